"""Cutting a model into stages, for inference and for training: split.py where, forms.py what goes between."""
