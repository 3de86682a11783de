"""Floor 3: models larger than the memory of a device: measured, placed, and brought in while they run.

measure.py sizes, place.py who goes where (a pure function), source.py where the values of a weight lie,
tensor.py the weight that stands in for them, hooks.py and pager.py what brings them in around a forward.
"""
