# unsloth searches this file's text: ``def fsdp2_prepare_model``, ``def _prepare_sd_options``.
from accelerate.names import module_hooks

__getattr__, __dir__ = module_hooks(__name__)
