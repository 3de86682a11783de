"""Measurements against raw torch and against the public package, in turn, in one run. See README.md here."""
