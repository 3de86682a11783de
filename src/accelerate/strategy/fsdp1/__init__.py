"""What version 1 of sharding is made of; its strategy is ``fsdp1.py`` beside this folder."""
