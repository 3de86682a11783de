"""The first file of a rank that runs a function: ``rank_entry_point.py PARCEL FOLDER [RANK]``.

It imports nothing of this package before the modules of the notebook's own process can be found.
"""

import pickle
import sys

if __name__ == "__main__":
    with open(sys.argv[1], "rb") as file:
        start, (folder, *rank) = pickle.load(file), sys.argv[2:]
        sys.path[:] = start["path"]
        from accelerate.launch.notebook.function_ranks import run_payload

        run_payload(file, start, folder, *rank)
