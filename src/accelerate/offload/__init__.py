"""Floor 3: models larger than the memory of a device: size, placement, and offloading with prefetch.

- module_sizes.py: bytes of modules. placement_planner.py: the plan of a placement, a pure function.
  device_maps.py: the public functions over both.
- offloaded_tensor.py: the stand-in for an offloaded weight, and where its values are stored.
  offload_folder.py, weight_store.py: values by name, in folders, memory and checkpoints.
- hooks.py: hooks around a forward, layerwise casting. align_hook.py: those of offloading, and how they are
  attached. dispatch.py, dispatch_steps.py, dispatch_hook.py: ``dispatch_model`` and its like.
- weight_block.py, pager.py: copying weights to an accelerator, with prefetch.
- module_input_output.py: moving inputs and outputs between devices.
- pipeline: pipeline-parallel inference.
"""
