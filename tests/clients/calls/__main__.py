"""``python -m tests.clients.calls OUT FOLDER [JOB...]``."""

from __future__ import annotations

from tests.clients.calls import handlers, loaders, operations, training
from tests.clients.probe import main

main({**handlers.JOBS, **operations.JOBS, **training.JOBS, **loaders.JOBS})
