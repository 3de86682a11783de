"""The first file of a rank: ``rank_entry_point.py FAULT_FILE ERROR_FILE script|module TARGET ARGUMENTS...``.

Python compiles the file it is started with each time, so all there is to do stands in ``accelerate_rank.py``,
whose compiled form is kept.
"""

import os
import sys

if __name__ == "__main__":
    # Python has put this folder first already, but not in safe-path mode.
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    from accelerate_rank import main

    del sys.path[0]
    main(*sys.argv[1:])
