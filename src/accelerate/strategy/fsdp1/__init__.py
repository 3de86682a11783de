"""FSDP1, by torch's class ``FullyShardedDataParallel``."""
