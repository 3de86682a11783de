"""Floor 5: what ``accelerate test`` runs on every process to see whether a set-up works."""
