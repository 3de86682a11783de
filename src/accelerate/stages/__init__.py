"""Pipeline stages: split.py cuts a model into stages, tensor_tree.py flattens values sent between them."""
