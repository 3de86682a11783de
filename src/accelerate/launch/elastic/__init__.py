"""Jobs that start again, and jobs on several machines (``kinds/elastic.py`` plans them).

On one machine ``attempts.py`` starts the processes again when they fail. On several,
``multi_machine_runner.py`` runs in the launcher: it starts the processes, watches them, and never waits for
the network. What does wait is ``rendezvous_agent.py``, a process of its own, which meets the other machines
(``rendezvous.py``, over ``torch.distributed.elastic``) and tells the launcher what to do.
"""
