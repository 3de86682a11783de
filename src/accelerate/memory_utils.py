import warnings

from accelerate.names import module_hooks

__getattr__, __dir__ = module_hooks(__name__)
warnings.warn(
    "accelerate.memory_utils is deprecated: import find_executable_batch_size from accelerate",
    FutureWarning,
    stacklevel=2,
)
