"""Floor 3: checkpoints that are whole or absent. ``state.py`` is the way in; ``names.py`` has the file names."""
