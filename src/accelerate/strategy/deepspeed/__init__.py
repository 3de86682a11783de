"""Training by DeepSpeed's engine: the plugin, the configuration made for it, engines, and whole states."""
