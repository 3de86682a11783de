"""The functions by which transformers' ``Trainer`` saves and loads models and optimizers under FSDP.

They write straight into the folder that they are given, without the commit of ``save_state``; the index is
written last, so an interrupted save is detected. All ranks must call them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from accelerate.checkpoint import layout, torch_files
from accelerate.checkpoint.file_access import CheckpointNotFoundError, file_errors
from accelerate.checkpoint.layout import CheckpointLoadContext
from accelerate.checkpoint.rank_group import CheckpointRankGroup
from accelerate.checkpoint.weight_files import replace_file
from accelerate.core.errors import CheckpointError, SettingError
from accelerate.facade.checkpoint_adapters import (
    load_optimizer_state,
    sharded_model_state,
    sharded_optimizer_state,
)
from accelerate.facade.module_queries import is_peft_model

if TYPE_CHECKING:
    from accelerate.checkpoint.layout import ShardedState
    from accelerate.facade.accelerator import Accelerator


_LOCAL = "LOCAL_STATE_DICT"


def save_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    model: nn.Module,
    output_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Save a model in the format of ``fsdp_plugin.state_dict_type``.

    Sharded into ``pytorch_model_fsdp_{model_index}/``, or full, by the main process, into
    ``pytorch_model_fsdp.bin`` (``pytorch_model_fsdp_{model_index}.bin``). Local states are what each process
    has, in a file of its own, ``pytorch_model_fsdp_rank{rank}.bin``: for as many processes as these only.

    Args:
        fsdp_plugin: has the ``state_dict_type``.
        accelerator: whose strategy trains the model.
        model: prepared.
        output_dir: the folder.
        model_index: of several models.
        adapter_only: of a PEFT model, the adapter only.
        use_dcp: only True: shards are in the format of torch.distributed.checkpoint (DCP).

    Raises:
        CheckpointError: on every process, when a file cannot be written.
    """
    folder = Path(output_dir)
    names_in_file = adapter_tensor_names(accelerator, model) if adapter_only else None
    if _LOCAL in str(fsdp_plugin.state_dict_type):
        _save_local(accelerator.strategy.model_checkpoint_view(model).pieces(), folder, model_index)
        return
    if _is_sharded_save(fsdp_plugin, use_dcp):
        sharded_state = sharded_model_state(accelerator.strategy, model, names_in_file)
        _save_sharded(sharded_state, folder, "models", model_index)
        return
    state = accelerator.strategy.model_state(model)
    if names_in_file is not None:
        state = {names_in_file[name]: value for name, value in state.items() if name in names_in_file}
    _save_whole(state, folder / layout.file_name("gathered_models", model_index))


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    model: nn.Module,
    input_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Load a model saved by ``save_fsdp_model``; the files in the folder tell the format.

    Args:
        fsdp_plugin, accelerator, model, model_index, adapter_only, use_dcp: as there.
        input_dir: the folder, or the folder of the shards itself.

    Returns:
        Missing and unexpected names, as ``load_state_dict`` returns them.

    Raises:
        CheckpointError: there is neither, it is damaged, or it does not fit the model.
    """
    names_in_file = adapter_tensor_names(accelerator, model) if adapter_only else None
    folder = _find_sharded_folder(Path(input_dir), "models", model_index)
    if folder is not None:
        return sharded_model_state(accelerator.strategy, model, names_in_file).prepare_load(
            folder, CheckpointLoadContext()
        )()
    path = Path(input_dir) / layout.file_name("gathered_models", model_index)
    ranks = CheckpointRankGroup.current()
    if (
        not path.is_file()
        and (rank_file := Path(input_dir) / layout.file_name("rank_models", model_index, 0)).is_file()
    ):
        return _load_local(
            accelerator.strategy.model_checkpoint_view(model), rank_file.parent, model_index, ranks
        )
    _refuse_missing(path, layout.file_name("sharded_models", model_index))
    state = torch_files.read(path, "cpu", mmap=True)
    if names_in_file is not None:
        back = {saved: name for name, saved in names_in_file.items()}
        return accelerator.strategy.load_model(model, {back[n]: v for n, v in state.items()}, strict=False)
    return accelerator.strategy.load_model(model, state)


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    optimizer: Any,
    model: nn.Module,
    output_dir: str,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Save an optimizer: sharded into ``optimizer_{optimizer_index}/``, or full into ``optimizer.bin``.

    Args:
        fsdp_plugin, accelerator, output_dir, use_dcp: see ``save_fsdp_model``.
        optimizer: prepared, or the inner one.
        model: the prepared model whose parameters it has.
        optimizer_index: of several optimizers.

    Raises:
        CheckpointError: on every process, when a file cannot be written.
    """
    folder, strategy = Path(output_dir), accelerator.strategy
    inner = getattr(optimizer, "optimizer", optimizer)
    if _is_sharded_save(fsdp_plugin, use_dcp):
        _save_sharded(
            sharded_optimizer_state(strategy, inner, [model]), folder, "optimizers", optimizer_index
        )
    else:
        from accelerate.checkpoint.sharded_state import optimizer_state_by_name

        state = strategy.optimizer_state(inner, [model])
        # Complete on the main process only, which writes it.
        view = strategy.optimizer_checkpoint_view(inner)
        state = (
            optimizer_state_by_name(view, [strategy.model_checkpoint_view(model)], state) if state else state
        )
        _save_whole(state, folder / layout.file_name("optimizers", optimizer_index))


def load_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    optimizer: Any,
    model: nn.Module,
    input_dir: str,
    optimizer_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> None:
    """Load an optimizer saved by ``save_fsdp_optimizer``; the files in the folder tell the format.

    Args:
        fsdp_plugin, accelerator, optimizer, model, optimizer_index, use_dcp: as there.
        input_dir: the folder, or the folder of the shards itself.
        adapter_only: kept for compatibility; an optimizer has what it trains.

    Raises:
        CheckpointError: there is neither, it is damaged, or it does not fit the optimizer.
    """
    inner, strategy = getattr(optimizer, "optimizer", optimizer), accelerator.strategy
    folder = _find_sharded_folder(Path(input_dir), "optimizers", optimizer_index)
    if folder is not None:
        sharded_optimizer_state(strategy, inner, [model]).prepare_load(folder, CheckpointLoadContext())()
        return
    path = Path(input_dir) / layout.file_name("optimizers", optimizer_index)
    _refuse_missing(path, layout.file_name("sharded_optimizers", optimizer_index))
    load_optimizer_state(strategy, inner, [model], torch_files.read(path, "cpu"))


def adapter_tensor_names(accelerator: Accelerator, model: nn.Module) -> dict[str, str] | None:
    """Map names of adapter tensors in the model to their names in a PEFT file; None without PEFT."""
    module: Any = accelerator.strategy.unwrap(model)
    if not is_peft_model(module):
        return None
    from peft import get_peft_model_state_dict

    state = module.state_dict()
    names_by_id = {id(value): name for name, value in state.items()}
    saved = get_peft_model_state_dict(module, state_dict=state, adapter_name=module.active_adapter)
    return {names_by_id[id(value)]: name for name, value in saved.items() if id(value) in names_by_id}


def _save_local(pieces: Any, folder: Path, index: int) -> None:
    ranks = CheckpointRankGroup.current()
    with ranks.collective_section(f"save {folder}"):
        with file_errors("make the folder", folder):
            folder.mkdir(parents=True, exist_ok=True)
        whole = {"pieces": pieces, "ranks": ranks.size}
        replace_file(
            folder / layout.file_name("rank_models", index, ranks.rank), partial(torch_files.write, whole)
        )


def _load_local(model: Any, folder: Path, index: int, ranks: CheckpointRankGroup) -> Any:
    path = folder / layout.file_name("rank_models", index, ranks.rank)
    with ranks.collective_section(f"load {path.parent}"):
        content = torch_files.read(path, "cpu") if path.is_file() else {"ranks": 0}
        if content["ranks"] != ranks.size:
            raise CheckpointError(
                f"{folder} holds local states of {content['ranks'] or 'fewer'} processes, and these are "
                f"{ranks.size}",
                why="LOCAL_STATE_DICT keeps the local shards of each rank",
                fix="load it with as many processes, or save with SHARDED_STATE_DICT, which any number reads",
            )
        model.check_pieces(content["pieces"])
    return model.load_pieces(content["pieces"])


def _is_sharded_save(plugin: Any, use_dcp: bool) -> bool:
    sharded = "FULL_STATE_DICT" not in str(plugin.state_dict_type)
    if sharded and not use_dcp:
        raise SettingError(
            "use_dcp=False writes shards that only the same number of processes can read",
            fix="leave it out, or use state_dict_type='FULL_STATE_DICT'",
        )
    return sharded


def _save_sharded(sharded_state: ShardedState, folder: Path, kind: str, index: int) -> None:
    ranks = CheckpointRankGroup.current()
    sharded_folder = folder / layout.file_name(f"sharded_{kind}", index)
    doing = f"save {sharded_folder}"
    with ranks.collective_section(doing, sharded_state.combine_plans) as plan_section:
        if ranks.rank == 0:
            with file_errors("make the folder", sharded_folder):
                sharded_folder.mkdir(parents=True, exist_ok=True)
                # Without it, what an interrupted save leaves is not taken for a checkpoint.
                (sharded_folder / layout.SHARDED_INDEX).unlink(missing_ok=True)
        plan_section.value = sharded_state.local_plan(ranks.rank)
    infos = list[Any]()  # of all ranks, on rank 0
    with ranks.collective_section(doing, infos.extend) as write_section:
        writer = sharded_state.shard_writer(plan_section.values, index, ranks.rank)
        tensor_infos: list[Any] = []
        if writer.file:
            with file_errors("make the folder", sharded_folder):
                sharded_folder.mkdir(parents=True, exist_ok=True)
            replace_file(folder / writer.file, lambda file: tensor_infos.append(writer.fill(file)))
        write_section.value = tensor_infos[0] if tensor_infos else None
    with ranks.collective_section(doing):
        if ranks.rank == 0:
            index_file = writer.build_index(infos)
            assert index_file is not None
            name, content = index_file
            replace_file(folder / name, lambda file: file.write(content))


def _save_whole(state: Any, path: Path) -> None:
    ranks = CheckpointRankGroup.current()

    def write() -> None:
        with file_errors("make the folder", path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, partial(torch_files.write, state))

    ranks.run_on_rank0(f"save {path}", write)


def _find_sharded_folder(path: Path, kind: str, index: int) -> Path | None:
    for folder in (path, path / layout.file_name(f"sharded_{kind}", index)):
        if (folder / layout.SHARDED_INDEX).is_file():
            return folder
    return None


def _refuse_missing(path: Path, folder: str) -> None:
    if not path.is_file():
        raise CheckpointNotFoundError(
            f"{path.parent} holds neither {folder} nor {path.name}",
            why="nothing was saved there, or the save was interrupted",
        )
