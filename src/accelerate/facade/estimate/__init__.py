"""Estimates of the memory of a model, without loading it.

- skeleton.py: a model on the meta device, without its weights.
- activation_formula.py, activation_trace.py: activations that a forward saves for its backward, and what
  inference takes beside the weights. memory_estimate.py: training memory.
- parallel_layouts.py: the ways to run a training on several devices.
"""
