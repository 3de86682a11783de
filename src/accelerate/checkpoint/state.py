"""Save and load a training state. Both are collective: every rank calls, and all succeed or all raise.

    parts = Parts(models=[model], optimizers=[optimizer], schedulers=[scheduler], rng=rng,
                  loaders=[loader], step=12, strategy="ddp", metadata={"epoch": 3})

    path = state.save(parts, "runs/a/last")                  # replaces the folder in one step
    path = state.save(parts, project=project_configuration)  # runs/a/checkpoints/checkpoint_<iteration>

    loaded = state.load(parts, "runs/a/last")                # verified against its manifest, then put back
    loaded = state.load(parts, project=project_configuration)  # the newest committed one
    loaded.step, loaded.metadata["epoch"], loaded.missing, loaded.notes

What the parts are is in ``parts.py``, the protocol that makes a save whole or absent in ``commit.py``, the
file names in ``names.py``, the manifest in ``manifest.py``. Device-specific and sharded states come in as
``Part`` or ``OwnFiles``. A ``before`` hook sees the folder: that of a save may write files into it and take
models out of its list, that of a load may take models out of ``parts.models``.
"""

from __future__ import annotations

from accelerate.checkpoint.find import latest
from accelerate.checkpoint.load import Loaded, load
from accelerate.checkpoint.parts import OwnFiles, Part, Parts, Rng, Share, Spread, Stateful
from accelerate.checkpoint.save import save

__all__ = [
    "Loaded",
    "OwnFiles",
    "Part",
    "Parts",
    "Rng",
    "Share",
    "Spread",
    "Stateful",
    "latest",
    "load",
    "save",
]
