"""Which optional packages this machine has."""

from __future__ import annotations

from importlib.util import find_spec


def is_installed(module: str) -> bool:
    """Return True when ``module`` (``"megatron.core"``) can be imported, without importing it.

    A bare folder of that name, which some tools leave in the working directory, does not count.
    """
    try:
        spec = find_spec(module)
    except ModuleNotFoundError:  # its parent is missing
        return False
    return spec is not None and spec.origin is not None
