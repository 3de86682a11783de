"""Pipelines for inference: a model cut into even stages, one on each process.

graph.py the stages of a traced model, chain.py those of one that cannot be traced,
stages.py how batches run through them, prepare.py the public functions. Where a model is cut is said by the
room stages.
"""
