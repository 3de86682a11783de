"""Sharding by torch's ``fully_shard``: the work behind ``strategy/fsdp.py``."""
