"""What a call costs on 2 to 32 processes, beside ``torch.distributed``: ``python -m benchmarks.scaling``."""
