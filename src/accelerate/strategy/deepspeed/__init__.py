"""DeepSpeed: the plugin, its configuration, engine handles, and full state dicts."""
