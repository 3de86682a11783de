"""Functions on several processes, called from a notebook, a test, or a program.

launchers.py           the public functions
function_launcher.py   the ranks of one call: their environment, their output, their exit
fork_server.py         the process that has imported torch, and forks the ranks
fork_server_client.py  how they are started by it, or as fresh processes
payload.py             the pickled function: by value where it belongs to the notebook; cells
function_ranks.py      the code of each rank, fresh or forked; Python starts ../rank_entry_point.py
"""
