# Written by `python -m tests.support.pyi_stub_writer` from the table of names. Do not edit.
# ruff: noqa

from accelerate.world.rng import set_seed as set_seed
from accelerate.world.rng import synchronize_rng_state as synchronize_rng_state
from accelerate.world.rng import synchronize_rng_states as synchronize_rng_states
from typing import Any

def __getattr__(name: str) -> Any: ...
