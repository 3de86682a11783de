"""The functions by which transformers' ``Trainer`` saves and loads models and optimizers under FSDP.

They write straight into the folder that they are given, without the commit of ``save_state``; the index is
written last, so an interrupted save is detected. All ranks must call them.

A program may replace ``accelerate.utils.fsdp_utils._get_model_state_dict`` and ``_set_model_state_dict``, to
leave weights out or to add some that FSDP does not know (axolotl). The states of models are then those that
its functions give and take, in the same files.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from accelerate.checkpoint import layout, mapped_state, torch_files
from accelerate.checkpoint.file_access import CheckpointNotFoundError, file_errors, make_folder
from accelerate.checkpoint.layout import CheckpointLoadContext
from accelerate.checkpoint.rank_group import CheckpointRankGroup
from accelerate.checkpoint.weight_files import replace_file
from accelerate.core.errors import CheckpointError, SettingError
from accelerate.core.lazy_names import get_override
from accelerate.facade.checkpoint_adapters import (
    load_optimizer_state,
    sharded_model_state,
    sharded_optimizer_state,
)
from accelerate.facade.module_queries import is_peft_model
from accelerate.strategy.sharding.forward_bypass import STRATEGIES

if TYPE_CHECKING:
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    from accelerate.checkpoint.layout import ShardedState
    from accelerate.facade.accelerator import Accelerator


_LOCAL = "LOCAL_STATE_DICT"
_KEY = "model"  # above the names of a model in its shards


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
    functions = _replaced_functions(fsdp_plugin)
    if functions is not None:
        _save_program_state(functions[0], fsdp_plugin, model, folder, model_index, adapter_only, use_dcp)
        return
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
    functions = _replaced_functions(fsdp_plugin)
    if functions is not None:
        return _load_program_state(functions, fsdp_plugin, model, Path(input_dir), model_index, adapter_only)
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
    state = torch_files.read(path, "cpu", mmap=True)
    mapped_state.load_shard(partial(load_optimizer_state, strategy, inner, [model]), inner, state)


# --- states that a program gives and takes


def get_model_state_dict(
    model: nn.Module, adapter_only: bool = False, sd_options: StateDictOptions | None = None
) -> dict[str, Any]:
    """Return the state of a model under FSDP; collective where ``sd_options`` ask for full tensors.

    Args:
        model: prepared.
        adapter_only: of a PEFT model, the adapter only, under the names of PEFT's files.
        sd_options: of ``torch.distributed.checkpoint.state_dict``; None takes ``model.state_dict()``.
    """
    if sd_options is None:
        state = model.state_dict()
    else:
        from torch.distributed.checkpoint import state_dict

        state = state_dict.get_model_state_dict(model, options=sd_options)
    if not adapter_only or not is_peft_model(model) or not state:  # full states are on rank 0 only
        return state
    names_in_file = _names_in_peft_file(model, state)
    return {names_in_file[name]: value for name, value in state.items() if name in names_in_file}


def set_model_state_dict(
    model: nn.Module,
    state_dict: Mapping[str, Any],
    adapter_only: bool = False,
    sd_options: StateDictOptions | None = None,
) -> Any:
    """Load what ``get_model_state_dict`` has returned; collective where ``sd_options`` ask to broadcast it.

    Args:
        model, adapter_only, sd_options: as there.
        state_dict: the state; empty where rank 0 broadcasts its own.

    Returns:
        Missing and unexpected names, as ``load_state_dict`` returns them.
    """
    state = dict(state_dict)
    is_adapter = adapter_only and is_peft_model(model)
    if is_adapter:
        strategy = STRATEGIES.get(model)
        view: Any = model if strategy is None else strategy.model_checkpoint_view(model)
        names_in_file = _names_in_peft_file(model, view.state_dict(keep_vars=True))
        names = {saved: name for name, saved in names_in_file.items()}
        state = {names.get(name, name): value for name, value in state.items()}
    if sd_options is None:
        return model.load_state_dict(state, strict=not is_adapter)
    from torch.distributed.checkpoint import state_dict as states

    if is_adapter:
        sd_options = dataclasses.replace(sd_options, strict=False)
    return states.set_model_state_dict(model, state, options=sd_options)


def prepare_sd_options(fsdp_plugin: Any) -> StateDictOptions | None:
    """Return the options for the states of models under FSDP2; None under FSDP1, which has a context."""
    if fsdp_plugin.fsdp_version != 2:
        return None
    from torch.distributed.checkpoint.state_dict import StateDictOptions

    full = not _is_sharded_save(fsdp_plugin, use_dcp=True)
    config = fsdp_plugin.state_dict_config
    return StateDictOptions(
        full_state_dict=full,
        cpu_offload=getattr(config, "offload_to_cpu", False),
        broadcast_from_rank0=full and getattr(config, "rank0_only", False),
    )


def _replaced_functions(fsdp_plugin: Any) -> tuple[Callable[..., Any], Callable[..., Any]] | None:
    """Return the functions that get and set states if a program has replaced one of them.

    None for local states too, which are no state dicts.
    """
    module = "accelerate.utils.fsdp_utils"
    get_state: Any = get_override(module, "_get_model_state_dict", get_model_state_dict)
    set_state: Any = get_override(module, "_set_model_state_dict", set_model_state_dict)
    is_own = (get_state, set_state) == (get_model_state_dict, set_model_state_dict)
    return None if is_own or _LOCAL in str(fsdp_plugin.state_dict_type) else (get_state, set_state)


def _state_arguments(fsdp_plugin: Any, adapter_only: bool) -> dict[str, Any]:
    options = prepare_sd_options(fsdp_plugin)
    return {"adapter_only": adapter_only} | ({} if options is None else {"sd_options": options})


def _state_dict_type(fsdp_plugin: Any, model: nn.Module) -> AbstractContextManager[Any]:
    """Return the context in which a model of FSDP1 gives and takes states of the plugin's type."""
    if fsdp_plugin.fsdp_version == 2:
        return nullcontext()
    from torch.distributed.fsdp import FullyShardedDataParallel

    configs = fsdp_plugin.state_dict_config, fsdp_plugin.optim_state_dict_config
    return FullyShardedDataParallel.state_dict_type(model, fsdp_plugin.state_dict_type, *configs)


def _save_program_state(
    get_state: Callable[..., Any],
    fsdp_plugin: Any,
    model: nn.Module,
    folder: Path,
    index: int,
    adapter_only: bool,
    use_dcp: bool,
) -> None:
    with _state_dict_type(fsdp_plugin, model):
        state = get_state(model, **_state_arguments(fsdp_plugin, adapter_only))
    if not _is_sharded_save(fsdp_plugin, use_dcp):
        _save_whole(state, folder / layout.file_name("gathered_models", index))
        return
    from torch.distributed.checkpoint.state_dict_saver import save

    ranks, sharded_folder = CheckpointRankGroup.current(), folder / layout.file_name("sharded_models", index)
    with ranks.collective_section(f"save {sharded_folder}"):
        _make_sharded_folder(sharded_folder, ranks)
    save({_KEY: state}, checkpoint_id=sharded_folder)


def _load_program_state(
    functions: tuple[Callable[..., Any], Callable[..., Any]],
    fsdp_plugin: Any,
    model: nn.Module,
    path: Path,
    index: int,
    adapter_only: bool,
) -> Any:
    (get_state, set_state), arguments = functions, _state_arguments(fsdp_plugin, adapter_only)
    with _state_dict_type(fsdp_plugin, model):
        if (folder := _find_sharded_folder(path, "models", index)) is not None:
            from torch.distributed.checkpoint.state_dict_loader import load

            loaded = {_KEY: get_state(model, **arguments)}
            load(loaded, checkpoint_id=folder)
            return set_state(model, loaded[_KEY], **arguments)
        file = path / layout.file_name("gathered_models", index)
        _refuse_missing(file, layout.file_name("sharded_models", index))
        options = arguments.get("sd_options")
        is_broadcast = options is not None and options.broadcast_from_rank0
        reads = not is_broadcast or CheckpointRankGroup.current().rank == 0
        return set_state(model, torch_files.read(file, "cpu", mmap=True) if reads else {}, **arguments)


def adapter_tensor_names(accelerator: Accelerator, model: nn.Module) -> dict[str, str] | None:
    """Map names of adapter tensors in the model to their names in a PEFT file; None without PEFT."""
    strategy = accelerator.strategy
    module: Any = strategy.unwrap(model)
    if not is_peft_model(module):
        return None
    return _names_in_peft_file(module, strategy.model_checkpoint_view(model).state_dict(keep_vars=True))


def _names_in_peft_file(module: Any, state: Mapping[str, Any]) -> dict[str, str]:
    """Map the names in the state dict of a PEFT model to those in its files; the values do not count.

    ``module.state_dict()`` would all-gather each FSDP1 unit, and make it a root before the first forward.
    """
    from peft import get_peft_model_state_dict

    # A value of its own for each name, by which it is found again.
    own = {n: torch.empty(()).expand(v.shape) for n, v in state.items() if isinstance(v, torch.Tensor)}
    names_by_id = {id(value): name for name, value in own.items()}
    saved = get_peft_model_state_dict(module, state_dict=own, adapter_name=module.active_adapter)
    return {names_by_id[id(value)]: name for name, value in saved.items() if id(value) in names_by_id}


def _save_local(pieces: Any, folder: Path, index: int) -> None:
    ranks = CheckpointRankGroup.current()
    with ranks.collective_section(f"save {folder}"):
        make_folder(folder)
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
        _make_sharded_folder(sharded_folder, ranks)
        plan_section.value, _ = sharded_state.local_plan(ranks.rank, ranks.size)
    infos = list[Any]()  # of all ranks, on rank 0
    with ranks.collective_section(doing, infos.extend) as write_section:
        writer = sharded_state.shard_writer(plan_section.values, index, ranks.rank)
        tensor_infos: list[Any] = []
        if writer.file:
            replace_file(folder / writer.file, lambda file: tensor_infos.append(writer.fill(file)))
        write_section.value = tensor_infos[0] if tensor_infos else None
    with ranks.collective_section(doing):
        if ranks.rank == 0:
            name, content = writer.build_index(infos)
            replace_file(folder / name, lambda file: file.write(content))


def _make_sharded_folder(folder: Path, ranks: CheckpointRankGroup) -> None:
    make_folder(folder)
    if ranks.rank == 0:
        # Without the index, what an interrupted save leaves is not taken for a checkpoint.
        with file_errors("remove", folder / layout.SHARDED_INDEX):
            (folder / layout.SHARDED_INDEX).unlink(missing_ok=True)


def _save_whole(state: Any, path: Path) -> None:
    ranks = CheckpointRankGroup.current()

    def write() -> None:
        make_folder(path.parent)
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
