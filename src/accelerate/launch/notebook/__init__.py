"""Functions on several processes, called from a notebook, a test, or a program.

launchers.py           the public functions
function_launcher.py   the ranks of one call: their environment, their output, their exit
rendezvous_config.py  one call on several machines
payload.py             the pickled function: by value where it belongs to the notebook
fork.py                forked ranks, for functions that cannot be pickled
device_use.py          which line first used a device, for errors of forked ranks
function_runner.py                the code of each rank; rank_entry_point.py is the file that Python starts
spawn_target.py             the callable for torch's and PyTorch/XLA's own process starters
"""
