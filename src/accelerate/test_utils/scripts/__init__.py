"""Scripts that are launched to see whether a set-up works."""
