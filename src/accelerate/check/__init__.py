"""The checks that ``accelerate test`` runs on every rank to see whether a set-up works."""
