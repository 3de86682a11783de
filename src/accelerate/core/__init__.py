"""Floor 0: plain values. Nothing here imports torch."""
