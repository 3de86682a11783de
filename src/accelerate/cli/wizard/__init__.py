"""Configuration files written by asking, by ``--set``, and by bringing old ones up to date."""
