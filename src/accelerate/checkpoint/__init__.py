"""Floor 3: checkpoints, whole or absent. The ways in are ``save.py`` and ``load.py``."""
