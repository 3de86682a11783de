"""The dimensions of a device mesh, one file or folder each; ``strategy.py`` composes them."""
