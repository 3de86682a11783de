"""Calls of the public names, written down; jobs in ``TOGETHER`` depend on the number of processes."""

TOGETHER = ("operations.together", "random", "accelerator", "loop", "wrappers", "loaders")
