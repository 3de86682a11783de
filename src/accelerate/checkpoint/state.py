"""Save and load a training state. Both are collective: every rank calls, and all succeed or all raise.

    train_state = CheckpointContents(models=[model], optimizers=[optimizer], schedulers=[scheduler],
                                       rng=rng, loaders=[loader], step=12, metadata={"epoch": 3})

    path = state.save(train_state, "runs/a/last")     # replaces the folder in one step
    path = state.save(train_state, project=project)   # runs/a/checkpoints/checkpoint_<iteration>

    result = state.load(train_state, "runs/a/last")   # verified against its manifest, then loaded
    result = state.load(train_state, project=project)  # the newest committed one
    result.step, result.metadata["epoch"], result.missing, result.notes

The objects and the protocols for their states are in ``stateful_protocols.py``, the commit protocol in
``commit.py``, the file names in ``names.py``, the manifest in ``manifest.py``. Device-specific and sharded
states come in as ``StatefulAdapter`` or ``FolderStateful``. A ``before`` hook gets the folder: that of a save
may write files into it and take models out of its list, that of a load may take models out of
``train_state.models``.
"""

from __future__ import annotations

from accelerate.checkpoint.discovery import latest_checkpoint
from accelerate.checkpoint.load_state import CheckpointLoadResult, load
from accelerate.checkpoint.save import save
from accelerate.checkpoint.stateful_protocols import (
    CheckpointContents,
    FolderStateful,
    RNGStates,
    ShardedState,
    ShardWriter,
    Stateful,
    StatefulAdapter,
)

__all__ = [
    "CheckpointContents",
    "CheckpointLoadResult",
    "FolderStateful",
    "RNGStates",
    "ShardWriter",
    "ShardedState",
    "Stateful",
    "StatefulAdapter",
    "latest_checkpoint",
    "load",
    "save",
]
