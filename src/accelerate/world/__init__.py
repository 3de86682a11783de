"""Floor 2: the group of processes. Rank, size and node; layouts; collectives; random streams; ports."""
