"""Data: which samples each process sees, in which order, and how batches reach the device."""
