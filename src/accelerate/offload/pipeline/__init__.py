"""Pipeline-parallel inference: a model split into even stages, one on each process.

- inference_stages.py: the stages of a traced model, or of one that cannot be traced.
- inference_pipeline.py: batches through the stages. prepare_pippy.py: the public functions.
- The package ``accelerate.stages`` chooses the split points.
"""
