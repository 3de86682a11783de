from accelerate.names import module_hooks

__getattr__, __dir__ = module_hooks(__name__)
