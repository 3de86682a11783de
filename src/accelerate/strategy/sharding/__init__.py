"""FSDP by torch: the options for both versions, and FSDP2 (``fully_shard``) for ``strategy/fsdp.py``."""
