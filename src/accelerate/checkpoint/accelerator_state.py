"""The public functions that write a training state straight into a folder, each process for itself.

``Accelerator.save_state`` does not use them; see ``save.py``. The files are the same.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from safetensors.torch import load_model as load_model

from accelerate.checkpoint import layout, torch_files
from accelerate.checkpoint.layout import KINDS, CheckpointContents
from accelerate.checkpoint.load import resolve_map_location
from accelerate.checkpoint.rank_group import CheckpointRankGroup
from accelerate.checkpoint.save import WholeStateFile
from accelerate.checkpoint.state_reader import TrainingStateReader
from accelerate.checkpoint.weight_files import replace_file


def save_accelerator_state(
    output_dir: str,
    model_states: list[dict[str, Any]],
    optimizers: list[Any],
    schedulers: list[Any],
    dataloaders: list[Any],
    process_index: int,
    step: int,
    scaler: Any = None,
    save_on_each_node: bool = False,
    safe_serialization: bool = True,
) -> Path:
    """Write one process's files of a training state into ``output_dir``; return the folder.

    Each file is replaced in one step, the folder as a whole is not.

    Raises:
        CheckpointError: a file cannot be written.
    """
    folder = Path(output_dir)
    contents = CheckpointContents([], optimizers, schedulers, scaler, rng=True, step=step)
    contents.stateful_loaders = _stateful(dataloaders)
    replicated = process_index == 0 or (save_on_each_node and CheckpointRankGroup.current().local_rank == 0)
    whole = [("models", index, "", state) for index, state in enumerate(model_states)]
    whole += [(o.category, o.index, o.class_name, o.item.state_dict()) for o in contents.objects().values()]
    for state in whole:
        writer = WholeStateFile(*state, process_index, safe=safe_serialization)
        if replicated or KINDS[writer.category].per_rank:
            replace_file(folder / writer.file, writer.fill)
    for index in range(len(model_states) if replicated else 0):
        # The other format would be read in its place, or beside it.
        other = layout.file_name("torch_models" if safe_serialization else "models", index)
        (folder / other).unlink(missing_ok=True)
    return folder


def load_accelerator_state(
    input_dir: str,
    models: list[Any],
    optimizers: list[Any],
    schedulers: list[Any],
    dataloaders: list[Any],
    process_index: int,
    scaler: Any = None,
    map_location: Any = None,
    load_kwargs: Mapping[str, Any] | None = None,
    **load_model_func_kwargs: Any,
) -> dict[str, Any]:
    """Read what ``save_accelerator_state`` wrote; return ``{"step": step counter}``.

    Raises:
        CheckpointError: a file is missing or damaged, or does not fit its object.
    """
    current = CheckpointRankGroup.current()
    ranks = CheckpointRankGroup(
        process_index, max(current.size, process_index + 1), current.local_rank, current.local_size
    )
    train_state = CheckpointContents(models, optimizers, schedulers, scaler, rng=True)
    train_state.stateful_loaders = _stateful(dataloaders)
    location = resolve_map_location(map_location, "cpu")
    reader = TrainingStateReader(
        Path(input_dir), None, ranks, True, location, load_kwargs or {}, load_model_func_kwargs, location
    )
    reader.read(train_state)
    with reader.undone_on_error():
        reader.try_to_apply(train_state)
    reader.apply()
    reader.finish(train_state)
    return {} if reader.step is None else {"step": reader.step}


def save_custom_state(obj: Any, path: str, index: int = 0, save_on_each_node: bool = False) -> None:
    """Write the state of one of the user's objects, on the main process (or one process per machine)."""
    if CheckpointRankGroup.current().is_writer(save_on_each_node):
        description = f"{layout.file_name('custom', index)} ({type(obj).__name__})"
        file = Path(path) / layout.file_name("custom", index)
        replace_file(file, partial(torch_files.write, obj.state_dict(), what=description))


def load_custom_state(
    obj: Any, path: str, index: int = 0, load_kwargs: Mapping[str, Any] | None = None
) -> None:
    """Read the state of one of the user's objects.

    Args:
        obj: the object; its ``load_state_dict`` is called.
        path: the checkpoint's folder.
        index: which of the registered objects.
        load_kwargs: more arguments of ``torch.load``: ``{"weights_only": False}`` for a file that you trust.

    Raises:
        CheckpointError: the file is missing, damaged, or would run code.
    """
    file = Path(path) / layout.file_name("custom", index)
    trust = "load_custom_state(..., load_kwargs={'weights_only': False})"
    obj.load_state_dict(
        torch_files.read(file, **{"map_location": "cpu", "trust": trust, **(load_kwargs or {})})
    )


def _stateful(dataloaders: list[Any]) -> list[Any]:
    return [loader for loader in dataloaders if getattr(loader, "use_stateful_dataloader", False)]
