"""Models whose linear layers are quantized: one file per library, and ``base.py`` for what they share."""
