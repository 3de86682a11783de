"""Floor 3: checkpoints, whole or absent. The way in is ``state.py``, file names are in ``names.py``."""
