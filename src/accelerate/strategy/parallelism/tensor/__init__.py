"""Tensor parallelism: layers sharded by columns and rows over the processes of one mesh dimension."""
