"""Importable only where ``ACCELERATE_ENABLE_RICH`` is set, as in 1.x; there, too, it has no functions."""

from accelerate.watch.console import require_rich_enabled as _require

_require()
