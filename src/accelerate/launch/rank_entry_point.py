"""The first file of a rank.

    rank_entry_point.py FAULT_FILE ERROR_FILE script|module TARGET ARGUMENTS...   a script
    rank_entry_point.py function PAYLOAD FOLDER [RANK]                            a function of a notebook

Python compiles the file it is started with each time, so all there is to do stands in files whose compiled
form is kept.
"""

import os
import sys


def run_function(payload_file: str, folder: str, *rank: str) -> None:
    """Call the function of a payload, with ``sys.path`` as in the process that sent it.

    Nothing of this package is imported before the modules of that process can be found.
    """
    import pickle

    with open(payload_file, "rb") as file:
        start = pickle.load(file)
        sys.path[:] = start["path"]
        from accelerate.launch.notebook.function_ranks import run_payload

        run_payload(file, start, folder, *rank)


if __name__ == "__main__":
    if sys.argv[1] == "function":
        run_function(*sys.argv[2:])
    else:
        # Python has put this folder first already, but not in safe-path mode.
        sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
        from accelerate_rank import main

        del sys.path[0]
        main(*sys.argv[1:])
