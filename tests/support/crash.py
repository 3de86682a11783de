"""A training that can be saved in several ways, killed while it is, and asked afterwards what it lost."""

from __future__ import annotations

import hashlib
import os
import pickle
import random
import shutil
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn


class Net(nn.Module):
    """Few tensors, two of them tied; one is larger than a buffer of a file."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 512, bias=False)
        self.out = nn.Linear(512, 1, bias=False)
        self.again = nn.Linear(8, 512, bias=False)
        self.again.weight = self.inner.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.relu(self.inner(x)) + self.again(x)).square().mean()


class Count:
    """An object of the user."""

    def __init__(self) -> None:
        self.value = 0

    def state_dict(self) -> dict[str, Any]:
        return {"value": self.value}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.value = state["value"]


@dataclass(frozen=True)
class Place:
    """Where checkpoints go, and how.

    Attributes:
        name: its kind, and after a slash how the training is spread or saved.
        root: the folder above.
    """

    name: str
    root: Path

    @property
    def kind(self) -> str:
        """``"fixed"`` (one folder, replaced), ``"first"`` (one that is not there yet), ``"numbered"``
        (automatic naming, the last two are kept) or ``"each node"`` (numbered, on a disk per machine).
        """
        return self.name.partition("/")[0]

    @property
    def way(self) -> str:
        """``"async"`` (behind the loop), ``"sharded"`` (in parts), ``"fsdp"`` (sharded training) or none."""
        return self.name.partition("/")[2]

    @property
    def folder(self) -> Path:
        """Where checkpoints lie side by side."""
        return self.root / "checkpoints" if self.automatic else self.root

    @property
    def automatic(self) -> bool:
        """Whether they are numbered."""
        return self.kind in ("numbered", "each node")

    @property
    def given(self) -> str | None:
        """What ``save_state`` and ``load_state`` are given."""
        return None if self.automatic else str(self.root / "run")

    def at(self, root: Path) -> Place:
        """The same elsewhere."""
        return Place(self.name, root)

    def entries(self) -> list[str]:
        """What lies where checkpoints lie, hidden folders included."""
        return sorted(os.listdir(self.folder)) if self.folder.is_dir() else []

    def copy(self, to: Path) -> Place:
        """A copy of all of it as it is at this moment, half files included."""
        shutil.copytree(self.root, to, symlinks=True)
        return self.at(to)


class Training:
    """A training after ``value`` steps: equal for equal values, but each rank draws numbers of its own."""

    def __init__(self, value: int, place: Place) -> None:
        from accelerate import Accelerator
        from accelerate.utils import FullyShardedDataParallelPlugin, set_seed

        sharding = FullyShardedDataParallelPlugin(fsdp_version=2) if place.way == "fsdp" else None
        self.accelerator = accelerator = Accelerator(cpu=True, fsdp_plugin=sharding)
        self.move(place)
        set_seed(value)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        data = torch.utils.data.DataLoader(torch.arange(64.0).view(8, 8), batch_size=2, shuffle=True)  # type: ignore[arg-type]
        self.prepared = accelerator.prepare(model, optimizer, schedule, data)
        self.count = Count()
        accelerator.register_for_checkpointing(self.count)
        accelerator.register_save_state_pre_hook(partial(self._add, f"config{value}.json"))
        set_seed(value, device_specific=True)
        self.train(value)

    def move(self, place: Place, number: int = 0) -> None:
        """Saves and loads there from now on; the next automatic number is ``number``."""
        from accelerate.utils import ProjectConfiguration

        self.place = place
        self.accelerator.project_configuration = ProjectConfiguration(
            str(place.root),
            automatic_checkpoint_naming=place.automatic,
            total_limit=2 if place.automatic else None,  # type: ignore[arg-type]
            save_on_each_node=place.kind == "each node",
            iteration=number,
        )

    def _add(self, name: str, _models: Any, _weights: Any, folder: str) -> None:
        """A file of the user's, in the checkpoint; its name is none of the package's."""
        if self.accelerator.is_local_main_process:
            Path(folder, name).write_text(name)

    def train(self, steps: int) -> None:
        """Some steps, each on the first batches of an epoch."""
        model, optimizer, schedule, data = self.prepared
        for _ in range(steps):
            for batch in data:
                with self.accelerator.accumulate(model):
                    self.accelerator.backward(model(batch / 64 + random.random() + torch.rand(())))
                    optimizer.step()
                    schedule.step()
                    optimizer.zero_grad()
                break
            self.count.value += 1 + int(np.random.randint(1))

    def save(self) -> str:
        """Saves; returns the folder's name. In the background training goes on, which must not be saved."""
        how = {"async_save": True} if self.place.way == "async" else {}
        more = {"sharded": True} if self.place.way == "sharded" else {}
        name = Path(self.accelerator.save_state(self.place.given, **how, **more)).name
        if how:
            self.train(1)
            self.accelerator.wait_for_checkpoint()
        return name

    def load(self) -> Any:
        """Loads the newest, or the one that is named."""
        return self.accelerator.load_state(self.place.given)

    def prints(self) -> dict[str, str]:
        """A digest of everything that a checkpoint brings back, by its name."""
        model, optimizer, schedule, data = self.prepared
        draws = (torch.get_rng_state(), repr(random.getstate()), repr(np.random.get_state()))
        values = {
            "model": self.accelerator.get_state_dict(model), "optimizer": optimizer.state_dict(),
            "schedule": schedule.state_dict(), "count": self.count.value, "draws": draws,
            "step": self.accelerator.gradient_state.step, "position": data.state_dict(),
        }  # fmt: skip
        return {name: printed(value) for name, value in values.items()}


def printed(value: Any) -> str:
    """A digest of nested values; tensors count by type, shape and bytes."""
    state = hashlib.sha256()
    _add(state, value)
    return state.hexdigest()[:16]


def _add(state: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        whole = value.full_tensor() if hasattr(value, "full_tensor") else value  # type: ignore[operator]
        whole = whole.detach().cpu().contiguous()
        state.update(f"{whole.dtype} {tuple(whole.shape)}".encode())
        state.update(whole.reshape(-1).view(torch.uint8).numpy().tobytes())
    elif isinstance(value, dict):
        for key in sorted(value, key=repr):
            state.update(repr(key).encode())
            _add(state, value[key])
    elif isinstance(value, list | tuple):
        state.update(f"[{len(value)}".encode())
        for item in value:
            _add(state, item)
    else:
        state.update(pickle.dumps(value))


@dataclass(frozen=True)
class Recovered:
    """What a training of other values found after a crash, and what its next save left.

    Attributes:
        error: why nothing could be loaded; empty if something was.
        name: the folder that was loaded.
        untouched: digests before the load, and
        prints: after it.
        inside: the files in what was loaded, and then in what was saved, that are not the package's.
        ignored: folders that were named as passed over.
        before, after: what lay there before the load, and after the next save.
        saved: the folder of that save.
        again: whether that save gives back what was saved.
    """

    error: str
    name: str
    untouched: dict[str, str]
    prints: dict[str, str]
    inside: list[list[str]]
    ignored: tuple[str, ...]
    before: list[str]
    after: list[str]
    saved: str
    again: bool


def recover(place: Place, training: Training) -> Recovered:
    """Loads, goes on and saves again, on all ranks."""
    from accelerate.core.errors import CheckpointError

    training.move(place)
    before, untouched = place.entries(), training.prints()
    training.accelerator.wait_for_everyone()
    error, name, ignored = "", "", ()
    try:
        loaded = training.load()
        name, ignored = loaded.path.name, loaded.ignored
    except CheckpointError as caught:
        error = f"{type(caught).__name__}: {caught}"
    prints, inside = training.prints(), [foreign(place.folder / name)] if name else [[]]
    training.train(1)
    expected, saved = training.prints(), training.save()
    training.accelerator.wait_for_everyone()
    after = place.entries()
    inside.append(foreign(place.folder / saved))
    training.load()
    same = training.prints() == expected
    return Recovered(error, name, untouched, prints, inside, ignored, before, after, saved, same)


def foreign(folder: Path) -> list[str]:
    """What the user has put into a checkpoint, by hand or by a hook."""
    return sorted(
        name for name in os.listdir(folder) if name.endswith((".txt", ".json")) and name != "manifest.json"
    )


def recover_all(places: list[Place]) -> list[Recovered]:
    """The same for many, in one training."""
    training = Training(5, places[0])
    return [recover(place, training) for place in places]
