"""Megatron-LM, the package megatron-core: what the strategy of that name is made of."""
