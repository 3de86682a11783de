"""Floor 4: starting a job. A file of this folder with a ``PLUGIN`` is one kind of launch (base.py)."""
