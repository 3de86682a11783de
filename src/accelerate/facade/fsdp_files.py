"""The functions by which transformers' ``Trainer`` saves and loads a sharded training, part by part.

They write straight into the folder that they are given, without the commit of ``save_state``; the index is
the last file, so an interrupted save is seen to be one. All processes must call them.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import nn

from accelerate.checkpoint import names, pickles
from accelerate.checkpoint.errors import CheckpointNotFoundError, file_errors
from accelerate.checkpoint.export import replace_file
from accelerate.checkpoint.parts import Reading
from accelerate.checkpoint.ranks import Ranks
from accelerate.core.errors import CheckpointError, SettingError
from accelerate.facade.modules import is_peft_model
from accelerate.facade.parts import load_optimizer, spread_model, spread_optimizer

if TYPE_CHECKING:
    from accelerate.checkpoint.parts import Spread
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
    """Saves a model as ``fsdp_plugin.state_dict_type`` says.

    In parts into ``pytorch_model_fsdp_{model_index}/``, or whole, by the main process, into
    ``pytorch_model_fsdp.bin`` (``pytorch_model_fsdp_{model_index}.bin``). Local states are what each process
    has, in a file of its own, ``pytorch_model_fsdp_rank{rank}.bin``: for as many processes as these only.

    Args:
        fsdp_plugin: says which of the two.
        accelerator: whose strategy trains the model.
        model: prepared.
        output_dir: the folder.
        model_index: of several models.
        adapter_only: of a model of peft, the adapter only.
        use_dcp: only True: parts are in the format of torch.distributed.checkpoint.

    Raises:
        CheckpointError: on every process, when a file cannot be written.
    """
    folder = Path(output_dir)
    called = adapter_names(accelerator, model) if adapter_only else None
    if _LOCAL in str(fsdp_plugin.state_dict_type):
        _save_local(accelerator.strategy.as_saved(model).pieces(), folder, model_index)
        return
    if _sharded(fsdp_plugin, use_dcp):
        spread = spread_model(accelerator.strategy, model, called)
        _save_parts(spread, folder, "models", model_index)
        return
    state = accelerator.strategy.state(model)
    if called is not None:
        state = {called[name]: value for name, value in state.items() if name in called}
    _save_whole(state, folder / names.whole_file(model_index))


def load_fsdp_model(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    model: nn.Module,
    input_dir: str,
    model_index: int = 0,
    adapter_only: bool = False,
    use_dcp: bool = True,
) -> Any:
    """Loads what ``save_fsdp_model`` saved; what is in the folder decides how.

    Args:
        fsdp_plugin, accelerator, model, model_index, adapter_only, use_dcp: as there.
        input_dir: the folder, or that of the parts itself.

    Returns:
        Missing and unexpected names, as ``load_state_dict`` returns them.

    Raises:
        CheckpointError: there is neither, it is damaged, or it does not fit the model.
    """
    called = adapter_names(accelerator, model) if adapter_only else None
    folder = _parts_folder(Path(input_dir), "models", model_index)
    if folder is not None:
        return spread_model(accelerator.strategy, model, called).prepare(folder, Reading())()
    path = Path(input_dir) / names.whole_file(model_index)
    ranks = Ranks.current()
    if not path.is_file() and (own := Path(input_dir) / names.rank_file(model_index, 0)).is_file():
        return _load_local(accelerator.strategy.as_saved(model), own.parent, model_index, ranks)
    _refuse_missing(path, names.sharded_folder("models", model_index))
    state = pickles.read(path, "cpu", mmap=True)
    if called is not None:
        back = {saved: own for own, saved in called.items()}
        return accelerator.strategy.load(model, {back[n]: v for n, v in state.items()}, strict=False)
    return accelerator.strategy.load(model, state)


def save_fsdp_optimizer(
    fsdp_plugin: Any,
    accelerator: Accelerator,
    optimizer: Any,
    model: nn.Module,
    output_dir: str,
    optimizer_index: int = 0,
    use_dcp: bool = True,
) -> None:
    """Saves an optimizer: in parts into ``optimizer_{optimizer_index}/``, or whole into ``optimizer.bin``.

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
    if _sharded(fsdp_plugin, use_dcp):
        _save_parts(spread_optimizer(strategy, inner, [model]), folder, "optimizers", optimizer_index)
    else:
        from accelerate.checkpoint.spread import by_name

        state = strategy.optimizer_state(inner, [model])
        # Complete on the main process only, which writes it.
        own = strategy.optimizer_as_saved(inner)
        state = by_name(own, [strategy.as_saved(model)], state) if state else state
        _save_whole(state, folder / names.optimizer_file(optimizer_index))


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
    """Loads what ``save_fsdp_optimizer`` saved; what is in the folder decides how.

    Args:
        fsdp_plugin, accelerator, optimizer, model, optimizer_index, use_dcp: as there.
        input_dir: the folder, or that of the parts itself.
        adapter_only: kept for compatibility; an optimizer has what it trains.

    Raises:
        CheckpointError: there is neither, it is damaged, or it does not fit the optimizer.
    """
    inner, strategy = getattr(optimizer, "optimizer", optimizer), accelerator.strategy
    folder = _parts_folder(Path(input_dir), "optimizers", optimizer_index)
    if folder is not None:
        spread_optimizer(strategy, inner, [model]).prepare(folder, Reading())()
        return
    path = Path(input_dir) / names.optimizer_file(optimizer_index)
    _refuse_missing(path, names.sharded_folder("optimizers", optimizer_index))
    load_optimizer(strategy, inner, [model], pickles.read(path, "cpu"))


def adapter_names(accelerator: Accelerator, model: nn.Module) -> dict[str, str] | None:
    """How peft calls the tensors of an adapter in a file, by their names in the model; None without peft."""
    module: Any = accelerator.strategy.unwrap(model)
    if not is_peft_model(module):
        return None
    from peft import get_peft_model_state_dict

    state = module.state_dict()
    own = {id(value): name for name, value in state.items()}
    saved = get_peft_model_state_dict(module, state_dict=state, adapter_name=module.active_adapter)
    return {own[id(value)]: name for name, value in saved.items() if id(value) in own}


def _save_local(pieces: Any, folder: Path, index: int) -> None:
    ranks = Ranks.current()
    with ranks.together(f"save {folder}"):
        with file_errors("make the folder", folder):
            folder.mkdir(parents=True, exist_ok=True)
        whole = {"pieces": pieces, "ranks": ranks.size}
        replace_file(folder / names.rank_file(index, ranks.rank), partial(pickles.write, whole))


def _load_local(model: Any, folder: Path, index: int, ranks: Ranks) -> Any:
    path = folder / names.rank_file(index, ranks.rank)
    with ranks.together(f"load {path.parent}"):
        found = pickles.read(path, "cpu") if path.is_file() else {"ranks": 0}
        if found["ranks"] != ranks.size:
            raise CheckpointError(
                f"{folder} holds local states of {found['ranks'] or 'fewer'} processes, and these are "
                f"{ranks.size}",
                why="LOCAL_STATE_DICT keeps the pieces of each process as they lie there",
                fix="load it with as many processes, or save with SHARDED_STATE_DICT, which any number reads",
            )
        model.check_pieces(found["pieces"])
    return model.load_pieces(found["pieces"])


def _sharded(plugin: Any, use_dcp: bool) -> bool:
    sharded = "FULL_STATE_DICT" not in str(plugin.state_dict_type)
    if sharded and not use_dcp:
        raise SettingError(
            "use_dcp=False writes parts that only the same number of processes can read",
            fix="leave it out, or use state_dict_type='FULL_STATE_DICT'",
        )
    return sharded


def _save_parts(spread: Spread, folder: Path, sort: str, index: int) -> None:
    ranks = Ranks.current()
    own = folder / names.sharded_folder(sort, index)
    doing = f"save {own}"
    with ranks.together(doing) as planned:
        if ranks.rank == 0:
            with file_errors("make the folder", own):
                own.mkdir(parents=True, exist_ok=True)
                # Without it, what an interrupted save leaves is not taken for a checkpoint.
                (own / names.SHARDED_INDEX).unlink(missing_ok=True)
        planned.value = spread.plan(ranks.rank)
    with ranks.together(doing) as written:
        share = spread.share(planned.values, index, ranks.rank)
        told: list[Any] = []
        if share.file:
            with file_errors("make the folder", own):
                own.mkdir(parents=True, exist_ok=True)
            replace_file(folder / share.file, lambda file: told.append(share.fill(file)))
        written.value = told[0] if told else None
    with ranks.together(doing):
        if ranks.rank == 0:
            name, content = share.finish(written.values)
            replace_file(folder / name, lambda file: file.write(content))


def _save_whole(state: Any, path: Path) -> None:
    ranks = Ranks.current()

    def write() -> None:
        with file_errors("make the folder", path.parent):
            path.parent.mkdir(parents=True, exist_ok=True)
        replace_file(path, partial(pickles.write, state))

    ranks.lead(f"save {path}", write)


def _parts_folder(given: Path, sort: str, index: int) -> Path | None:
    for path in (given, given / names.sharded_folder(sort, index)):
        if (path / names.SHARDED_INDEX).is_file():
            return path
    return None


def _refuse_missing(path: Path, folder: str) -> None:
    if not path.is_file():
        raise CheckpointNotFoundError(
            f"{path.parent} holds neither {folder} nor {path.name}",
            why="nothing was saved there, or the save was interrupted",
        )
