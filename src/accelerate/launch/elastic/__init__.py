"""Jobs on several machines (``kinds/elastic.py`` plans them).

``attempts.py`` runs in the launcher: it starts the processes, watches them, starts them again when they fail,
and never waits for the network. What does wait is ``rendezvous_agent.py``, a process of its own, which meets
the other machines (``rendezvous.py``, over ``torch.distributed.elastic``) and tells the launcher what to do.

Why the agent is not torch's ``LocalElasticAgent``: an attempt has to end with one verdict for all machines,
with one count of restarts, one exit code, and within about a second, and with torch's agents there is none.
Each decides by its own processes alone. Run with torchrun of torch 2.13 on two machines, ``--max-restarts
1``; the process of machine b fails 2 s after each start, that of machine a works for 15 s:

- Restarts differ. An agent counts those that its own processes caused, and takes those of others for changes
  of membership, which do not count. In one attempt the ranks read ``TORCHELASTIC_RESTART_COUNT`` 0 on a and
  1 on b. A static rendezvous tells nobody at all (its ``num_nodes_waiting`` is always 0): b started again
  alone, beside the first processes of a.
- Ends differ. b gave up with exit code 1, whatever its process returned (7). The agent of a was not told:
  its process worked to its end, 10 s later, and then the agent waited 300 s in the barrier at its exit, in
  C++, where a SIGTERM did not reach it. Where b holds the store, a ended by a ``RendezvousConnectionError``
  instead.
- Processes are children of the loop that waits for the network: while the store does not answer, nobody
  stops them or passes a signal on to them.

A subclass of ``SimpleElasticAgent`` could have one verdict: its ``_monitor_workers`` may ask the store for
it and say "failed" on every machine. But ``_start_workers``, ``_stop_workers``, ``_restart_workers``,
``_shutdown`` and ``_assign_worker_ranks`` would be ours too (the launcher has the processes, and machines
compare their versions), and its private count of restarts would be written from outside, since a machine
that is lost or joins, a stop and a resume are no restarts. What is left of the library then is a loop of 40
lines, in place of the 30 of ``rendezvous_agent.run_job``. So what is public of ``torch.distributed.elastic``
is used: the rendezvous and its store.
"""
