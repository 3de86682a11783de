"""Watching a run: logs, progress bars, profiles, and trying again with less memory."""
