"""Pipeline stages: where a model is cut, and trees of the tensors sent between stages."""
