"""Functions on several processes, called from a notebook, a test, or a program.

start.py    the public functions: what is meant on this machine
crew.py     the processes of one call: their environment, their output, how they ended
parcel.py   the function on its way to them: by value where it belongs to the notebook
forked.py   processes that copy this one instead, for what cannot be sent
context.py  which line made this process use a device, for those
rank.py     what runs in each process; starter.py is the file that Python is started with
prepare.py  the callable that other starters of processes take
"""
