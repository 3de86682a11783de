"""Python imports this when a process of a test starts: nearly all of them import torch, train a step and end.

The collector would walk what torch has imported a few times while it is imported, and again at the exit.
Without that, two processes that are launched and train cost 4.0 s of CPU instead of 6.0. The folder is at the
end of ``PYTHONPATH`` (``tests/support/environment.py``), so a test may have a ``sitecustomize`` of its own.
"""

import atexit
import gc
import os
import sys

if "TESTS_ALL" not in os.environ:  # the long run starts processes as users do
    gc.set_threshold(50_000, 20, 100)
    # Registered first, so it runs last: what is left is not walked again. Triton prints what it finds left.
    atexit.register(lambda: None if "triton" in sys.modules else gc.freeze())
