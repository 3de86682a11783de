"""A launch inside another one: a script that a launcher has started starts a launcher, say for an evaluation.

Such a launcher inherits what the outer one told its script: rank and address, precision, the way of training.
It is no rank of that job, and its own flags and files count. So every launcher records the settings that it
hands on, and one that finds such a record takes them back before it reads its own. Devices and threads are no
such settings: an inner launch stays within those of the outer one.
"""

from __future__ import annotations

import json
from collections.abc import Generator, Mapping
from contextlib import contextmanager

from accelerate.core import environ
from accelerate.launch.job_scheduler import OUTER_LAUNCH_VARIABLE
from accelerate.launch.kinds.local import torchrun_variables


def record_variables(variables: Mapping[str, object | None]) -> str:
    """Return the record of the settings that a launcher hands on, each with what the variable was before."""
    values = {name: None if value is None else str(value) for name, value in variables.items()}
    return json.dumps({name: (value, environ.get(name)) for name, value in values.items()})


@contextmanager
def leave_outer_launch() -> Generator[None]:
    """Take back what an outer launch has set, while a launch is read and run; what its script set stays."""
    env = environ.snapshot()
    if OUTER_LAUNCH_VARIABLE not in env:
        yield
        return
    record: dict[str, tuple[str | None, str | None]] = json.loads(env[OUTER_LAUNCH_VARIABLE])
    former = {name: before for name, (value, before) in record.items() if env.get(name) == value}
    (rank_variables,) = torchrun_variables(1, None, None, "")
    place = f"rank {env['RANK']} of {env['WORLD_SIZE']}" if env.get("RANK") and env.get("WORLD_SIZE") else ""
    with environ.patch_environment({**former, **dict.fromkeys(rank_variables), OUTER_LAUNCH_VARIABLE: place}):
        yield
