"""Tools around a run: logs, progress bars, profiles, and the search for a batch size that fits memory."""
