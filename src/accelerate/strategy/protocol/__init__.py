"""The strategy protocol by subject; ``strategy/base.py`` combines the mixins."""
