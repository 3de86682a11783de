"""What a strategy is asked, subject by subject; ``strategy/base.py`` puts it together."""
