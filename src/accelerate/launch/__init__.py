"""Floor 4: starting a job. A file of ``kinds`` with a ``PLUGIN`` is one kind of launch (base.py)."""
