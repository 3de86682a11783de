from accelerate.names import face

__getattr__, __dir__ = face(__name__)
