"""``python -m tests.clients.calls OUT FOLDER [JOB...]``."""

from __future__ import annotations

from tests.clients.calls import handlers, loaders, operations, training
from tests.clients.probe import main

JOBS = {**handlers.JOBS, **operations.JOBS, **training.JOBS, **loaders.JOBS}

if __name__ == "__main__":
    main(JOBS)
