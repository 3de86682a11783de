"""The run for a machine with an accelerator and limited time: ``python -m benchmarks.gpu``."""
