"""Rich's progress and console on the main process; importable only when ``ACCELERATE_ENABLE_RICH`` is set."""

from accelerate.watch.console import console as console
from accelerate.watch.console import progress as progress
from accelerate.watch.console import require_rich_enabled as _require
from accelerate.watch.console import track as track

_require()
