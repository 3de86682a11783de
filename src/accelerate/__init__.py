"""accelerate: launch, train and run PyTorch models on any hardware.

An independent implementation of the API of Hugging Face Accelerate 1.x. Importing this package costs
next to nothing: every public name is loaded when it is first used (the table is ``accelerate.names``).
"""

from accelerate.names import module_hooks

__version__ = "2.0.0"
__getattr__, __dir__ = module_hooks(__name__)
