"""The first file of a fresh rank that runs a function: ``rank_entry_point.py PARCEL FOLDER [RANK]``.

It imports nothing of this package before the modules of the notebook's own process can be found.
"""

import pickle
import sys


def run(payload_file: str, folder: str, *rank: str) -> None:
    """Call the function of a payload, with ``sys.path`` as in the process that sent it."""
    with open(payload_file, "rb") as file:
        start = pickle.load(file)
        sys.path[:] = start["path"]
        from accelerate.launch.notebook.function_ranks import run_payload

        run_payload(file, start, folder, *rank)


if __name__ == "__main__":
    run(*sys.argv[1:])
