import warnings

from accelerate.names import face

__getattr__, __dir__ = face(__name__)
warnings.warn(
    "accelerate.memory_utils is deprecated: import find_executable_batch_size from accelerate",
    FutureWarning,
    stacklevel=2,
)
