"""The kinds of launch: one file of this folder each. It takes some requests, plans them and runs them.

A file defines ``PLUGIN``, an instance of ``LaunchKind`` (``launch/base.py``), and next to it the settings
that only this kind reads: its flags, variables and keys then exist, in the help, the files and the tables.
"""

from __future__ import annotations

from typing import Any

from accelerate.core.registry import Registry

# Of ``LaunchKind``: it needs the settings (launch_request.py), which ask here for the settings of the kinds.
KINDS: Registry[Any] = Registry("launch kind", "accelerate.launch.kinds", "accelerate.launchers")
