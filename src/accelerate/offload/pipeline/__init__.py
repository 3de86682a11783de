"""Pipeline-parallel inference: a model split into even stages, one on each process.

- traced_forward.py: the stages of a traced model. untraced_stages.py: those of a model that cannot be traced.
- inference_pipeline.py: batches through the stages. prepare_pippy.py: the public functions.
- The package ``accelerate.stages`` chooses the split points.
"""
