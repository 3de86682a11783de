"""Floor 5: the command line. A file of this folder with a ``PLUGIN`` is a command (main.py)."""
