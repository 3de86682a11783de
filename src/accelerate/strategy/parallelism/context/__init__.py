"""Context and sequence parallelism: sequences sharded over processes, which meet in attention."""
