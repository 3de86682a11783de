"""Pipeline-parallel inference: a model split into even stages, one on each process.

- inference_stages.py: the stages of a traced model.
- inference_pipeline.py: a model in stages, and batches through them. prepare_pippy.py: the public functions.
- The package ``accelerate.stages`` chooses the split points.
"""
