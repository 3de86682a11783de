"""The dimensions of a mesh of processes, one file each; ``strategy/parallelism.py`` puts them together."""
