"""Loading of weights from files into a model, a tensor at a time.

Names and shapes of all files are compared with the model before the first tensor is read. A
``WeightPlacer`` says where a tensor goes: memory, a device, or the file itself. There is never a second
copy of the model.

Modules that convert what they load are in ``model_tensors.py``.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from accelerate.checkpoint.file_access import file_errors
from accelerate.checkpoint.file_reads import DeviceUploads, FileRegion
from accelerate.checkpoint.model_tensors import (
    LazyTensor,
    ModelTensor,
    SavedTensors,
    WeightsMismatchError,
    assign_tensor,
    convert_memory,
    find_custom_modules,
    list_model_tensors,
    settle_assigned,
    warn_unconverted,
)
from accelerate.checkpoint.state_dict_files import as_dtype, is_distributed, match_names
from accelerate.core.errors import list_first
from accelerate.core.units import ProgressBar
from accelerate.world.shard_boxes import shard_boxes

logger = logging.getLogger(__name__)

_SHOWN = 12
_SIGNED, _UNSIGNED = ("int8", "int16", "int32", "int64"), ("uint8", "uint16", "uint32", "uint64")
_INTEGERS: list[torch.dtype] = [getattr(torch, name) for name in (*_SIGNED, *_UNSIGNED)]
# dtype -> the least and the greatest number that it holds
_WHOLE_NUMBERS = {torch.bool: (0, 1), **{d: (torch.iinfo(d).min, torch.iinfo(d).max) for d in _INTEGERS}}


class MismatchedKeys(NamedTuple):
    """The names that only the model or only the files have.

    Attributes:
        missing: names of the model that no file holds; they are as they were.
        unexpected: names in files that the model does not have.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


class MappedFiles:
    """Memory-mapped files, each mapped once; tensors keep them mapped."""

    def __init__(self) -> None:
        self._files: dict[Path, Any] = {}

    def tensor(self, region: FileRegion, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """Return a tensor mapped from the file.

        Each one has a storage of its own, so no two of them seem to be tied.

        Raises:
            CheckpointError: the file cannot be mapped.
        """
        if shape.numel() == 0:
            return torch.empty(shape, dtype=dtype, device="cpu")
        tensor: Any = torch.empty(0, dtype=dtype, device="cpu")
        span = shape.numel()
        if region.stride is not None:
            span = 1 + sum((n - 1) * s for n, s in zip(shape, region.stride, strict=True))
        with file_errors("map", region.path):
            if region.path not in self._files:
                size = region.path.stat().st_size
                self._files[region.path] = torch.UntypedStorage.from_file(str(region.path), False, size)
            whole = self._files[region.path]
            storage: Any = whole[region.offset : region.offset + span * dtype.itemsize]
            if region.stride is None:
                return tensor.set_(storage, 0, shape)
            return tensor.set_(storage, 0, shape, region.stride)


class WeightPlacer(Protocol):
    """Places the tensors of a model: in memory, on a device, or in the file itself.

    Attributes:
        uploads: a context in which tensors are placed; at its end their values are there.
        loads_by_hooks: modules that may convert what they load do so, whatever the files hold.
    """

    uploads: DeviceUploads
    loads_by_hooks: bool

    def check(self, pairs: Sequence[TensorMatch]) -> None:
        """Refuse, before anything is read, tensors that cannot be placed."""
        ...

    def place_tensor(self, target: ModelTensor, saved: LazyTensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor that the model is to hold; its own, if values were copied into it."""
        ...

    def device(self, name: str, current: torch.device) -> torch.device:
        """Return the device of a module that loads its weights itself.

        Args:
            name: of a weight.
            current: where it is now.
        """
        ...


@dataclass(frozen=True)
class TensorMatch:
    """A tensor of the model and the saved tensors that belong to it.

    Attributes:
        target: the one in the model.
        name: its name in the files.
        saved: the one in the files.
        others: by further names, if the model has one tensor where the files may have several.
        dtype: what it becomes.
    """

    target: ModelTensor
    name: str
    saved: LazyTensor
    others: dict[str, LazyTensor]
    dtype: torch.dtype


def host_tensor(saved: LazyTensor, dtype: torch.dtype, maps: MappedFiles) -> torch.Tensor:
    """Return a tensor in host memory: a view of its file if that has the dtype, else a copy."""
    if saved.region is None:
        return saved.read().to(dtype)
    return maps.tensor(saved.region, saved.shape, saved.dtype).to(dtype)


@torch.no_grad()
def copy_into(
    target: torch.Tensor, saved: LazyTensor, dtype: torch.dtype, maps: MappedFiles, uploads: DeviceUploads
) -> torch.Tensor:
    """Copy saved values to a tensor's device, in place if possible; of a DTensor, its local shard."""
    if is_distributed(target):
        return _copy_into_shard(target, saved, dtype, maps, uploads)
    if uploads.accepts(saved.region, target.device) and target.is_contiguous():
        values = target if target.dtype == dtype else torch.empty_like(target, dtype=dtype)
        return upload(saved, values, uploads)
    value = host_tensor(saved, saved.dtype, maps)
    if target.dtype == dtype and target.device.type != "meta":
        # Torch changes tensors that were made in inference mode only there; another mode enables gradients.
        with torch.inference_mode(target.is_inference()), torch.no_grad():
            return target.copy_(value)
    return value.to(device=target.device, dtype=dtype)


def upload(saved: LazyTensor, values: torch.Tensor, uploads: DeviceUploads) -> torch.Tensor:
    """Have saved values uploaded to a tensor of their shape, which is returned; ``uploads`` accepts them."""
    assert saved.region is not None
    uploads.add(saved.region, saved.dtype, values)
    return values


def _copy_into_shard(
    target: Any, saved: LazyTensor, dtype: torch.dtype, maps: MappedFiles, uploads: DeviceUploads
) -> torch.Tensor:
    local = target.to_local()
    if local.device.type == "meta" or local.dtype != dtype:
        local = torch.empty_like(local, device=target.device_mesh.device_type, dtype=dtype)
    value = host_tensor(saved, saved.dtype, maps)
    pairs = [(value, local)]
    if not value.shape == local.shape != target.shape:  # files that hold the local shard have its shape
        boxes = shard_boxes(target) if local.numel() else []
        pairs = [(value[box.slices], local[box.local_slices]) for box in boxes]
    for region, part in pairs:
        # A mapped tensor begins where its storage does.
        begin = int(region.storage_offset()) * saved.dtype.itemsize
        if region.is_contiguous() and part.is_contiguous() and uploads.accepts(saved.region, part.device):
            assert saved.region is not None
            place = FileRegion(saved.region.path, saved.region.offset + begin)
            uploads.add(place, saved.dtype, part)
        else:
            part.copy_(region)
    if local is target.to_local() or local.data_ptr() == target.to_local().data_ptr():
        return target
    return type(target).from_local(
        local,
        target.device_mesh,
        target.placements,
        run_check=False,
        shape=target.shape,
        stride=target.stride(),
    )


def load_weights(
    model: nn.Module,
    saved_tensors: SavedTensors,
    source: Path,
    placement: WeightPlacer,
    *,
    dtype: str | torch.dtype | None = None,
    keep_in_fp32: Iterable[str] = (),
    strict: bool = False,
    allow_missing: bool = False,
    before_dispatch: bool = False,
    local_shards: bool = False,
) -> MismatchedKeys:
    """Load weights into a model. What no file holds stays as it is, with a warning that lists it.

    Args:
        model: the model.
        saved_tensors: what the files hold, by all names (``open_weights(path).by_all_names()``).
        source: the files, for errors.
        placement: says where each tensor goes.
        dtype: what floating point weights become; None keeps the model's.
        keep_in_fp32: names of modules, at any depth, whose floating point weights become float32.
        strict: names that only the model or only the files have are an error, not a warning.
        allow_missing: accept files that hold nothing of the model, and what ``before_dispatch`` refuses.
        before_dispatch: the model is dispatched next, so that what would stay on the meta device is an error.
        local_shards: files hold this process's local shard of each DTensor.

    Raises:
        WeightsMismatchError: names do not meet, or shapes or kinds differ; the model is unchanged, but for
            modules with loading code of their own, which may refuse after others have loaded.
    """
    targets, wanted, fp32_modules = list_model_tensors(model), as_dtype(dtype), tuple(keep_in_fp32)
    custom = find_custom_modules(model, saved_tensors, targets, by_hooks=placement.loads_by_hooks)
    persistent = [t for t in targets if t.is_persistent]
    own_targets = [t for t in persistent if custom.covers(t)]
    direct_targets = [t for t in persistent if not custom.covers(t)]
    remaining = {n: s for n, s in saved_tensors.items() if n not in custom.names}
    pairs, missing, unexpected = _match_tensors(direct_targets, remaining, wanted, fp32_modules)
    unexpected = (*unexpected, *(name for name in saved_tensors.objects if name not in custom.names))
    absent = [*missing, *(t for t in own_targets if custom.saved(t) is None)]
    if any(t.is_parameter for t in absent) and _tie_weights(model):
        return load_weights(
            model, saved_tensors, source, placement, dtype=dtype, keep_in_fp32=keep_in_fp32, strict=strict,
            allow_missing=allow_missing, before_dispatch=before_dispatch, local_shards=local_shards,
        )  # fmt: skip
    _refuse_mismatches(source, pairs, local_shards)
    wishes = {"strict": strict, "allow_missing": allow_missing, "before_dispatch": before_dispatch}
    _refuse_missing_keys(source, missing, unexpected, matched=bool(pairs or custom.names), **wishes)
    _check_unsaved_buffers(targets, refuse=(before_dispatch or strict) and not allow_missing)
    placement.check(pairs)
    own_places = [
        (t, _target_dtype(t, wanted, fp32_modules), placement.device(t.names[0], t.tensor.device))
        for t in own_targets
    ]
    for target, own_dtype, device in own_places:
        convert_memory(target, own_dtype, device)
    warn_unconverted(model, custom)
    lacking, unused = custom.load(source)
    for target, own_dtype, device in own_places:
        settle_assigned(target, own_dtype, device)
    own_missing = [target for target in own_targets if lacking.issuperset(target.names)]
    matched = bool(pairs) or len(own_missing) < len(own_targets)
    _refuse_missing_keys(source, own_missing, unused, matched=matched, **wishes)
    total = sum(pair.saved.nbytes for pair in pairs)
    with ProgressBar("loading weights", total) as progress, placement.uploads:
        for pair in pairs:
            assign_tensor(pair.target, placement.place_tensor(pair.target, pair.saved, pair.dtype))
            _warn_untied(pair)
            progress.advance(pair.saved.nbytes)
    missing += own_missing
    unexpected = (*unexpected, *unused)
    for label, keys in (
        ("missing, left as they are", [t.names[0] for t in missing if not t.tensor.is_meta]),
        ("missing, still on the meta device", [t.names[0] for t in missing if t.tensor.is_meta]),
        ("unused", unexpected),
    ):
        if keys:
            logger.warning("%s: %s", source, _format_names(label, keys))
    return MismatchedKeys(tuple(t.names[0] for t in missing), unexpected)


def _tie_weights(model: nn.Module) -> bool:
    """Call the model's ``tie_weights``; return True if that changed anything."""
    tie: Any = getattr(model, "tie_weights", None)
    if not callable(tie):
        return False
    before = [id(p) for _, p in model.named_parameters(remove_duplicate=False)]
    tie()
    return before != [id(p) for _, p in model.named_parameters(remove_duplicate=False)]


def _match_tensors(
    targets: list[ModelTensor],
    saved_tensors: Mapping[str, LazyTensor],
    dtype: torch.dtype | None,
    fp32_modules: Sequence[str],
) -> tuple[list[TensorMatch], list[ModelTensor], tuple[str, ...]]:
    """Return (matches, tensors that the files lack, names that the model lacks)."""
    own_names = [name for target in targets for name in target.names]
    file_names = match_names(own_names, saved_tensors)
    pairs: list[TensorMatch] = []
    missing: list[ModelTensor] = []
    used: set[str] = set()
    for target in targets:
        matches = list(dict.fromkeys(file_names[name] for name in target.names if name in file_names))
        used.update(matches)
        if matches:
            first, *others = matches
            saved, further = saved_tensors[first], {name: saved_tensors[name] for name in others}
            if target.tensor.dim() == 0 and saved.shape == (1,):  # as scalars were before torch 0.4
                saved = replace(saved, shape=torch.Size(), read=partial(_read_scalar, saved))
            new_dtype = _target_dtype(target, dtype, fp32_modules)
            pairs.append(TensorMatch(target, first, saved, further, new_dtype))
        else:
            missing.append(target)
    return pairs, missing, tuple(name for name in saved_tensors if name not in used)


def _read_scalar(saved: LazyTensor) -> torch.Tensor:
    return saved.read().reshape(())


def _refuse_missing_keys(
    source: Path,
    missing: list[ModelTensor],
    unexpected: tuple[str, ...],
    *,
    matched: bool,
    strict: bool,
    allow_missing: bool,
    before_dispatch: bool,
) -> None:
    """Refuse files of another model, what could not run once dispatched, and differences if ``strict``."""
    empty = [t for t in missing if t.tensor.is_meta] if before_dispatch else []
    needed = [] if allow_missing else empty if matched else [t for t in missing if t.is_parameter]
    if not (needed or (strict and (missing or unexpected))):
        return
    lines = [_format_names("missing", (t.names[0] for t in (missing if strict else needed)))]
    lines += [_format_names("not in the model", unexpected)] if unexpected else []
    remedies = ["strict=False"] * strict + ["allow_missing=True"] * bool(needed)
    fix = f"to load what fits, and leave the rest as it is: {', '.join(remedies)}"
    if not needed:
        why = "strict=True asks for the names of the model, and no others"
    elif not matched:
        why = "it holds nothing of the model"
    else:
        why = "what is missing is on the meta device: the model could not run"
        fix = "or give what is missing values before this call, which leaves it as it is then"
    raise WeightsMismatchError(
        f"{source} does not fit the model: " + "; ".join(line for line in lines if line),
        why=why,
        fix=f"check that the file is this model's; {fix}",
    )


def _check_unsaved_buffers(targets: list[ModelTensor], *, refuse: bool) -> None:
    """Warn of buffers on the meta device that no file ever holds, or refuse them."""
    uninitialized = [t.names[0] for t in targets if not t.is_persistent and t.tensor.device.type == "meta"]
    if not uninitialized:
        return
    line = _format_names("on the meta device, and files never hold them", uninitialized)
    if not refuse:
        logger.warning("%s", line)
        return
    raise WeightsMismatchError(
        line,
        why="they are buffers with persistent=False: the model would compute with uninitialised memory",
        fix="make the model in 'with init_empty_weights():', which leaves buffers real, or give them values, "
        f"as in model.{uninitialized[0]} = ...",
    )


def _refuse_mismatches(source: Path, pairs: list[TensorMatch], local_shards: bool) -> None:
    wrong: list[str] = []
    for pair in pairs:
        current: Any = pair.target.tensor
        saved = pair.saved
        local = current.to_local().shape if local_shards and is_distributed(current) else current.shape
        if local != saved.shape:
            wrong.append(f"{pair.name} has the shape {tuple(saved.shape)}, in the model {tuple(local)}")
        elif saved.layout is not current.layout:
            wrong.append(f"{pair.name} is {saved.layout}, in the model {current.layout}")
        elif _dtype_kind(current.dtype) != _dtype_kind(saved.dtype):
            wrong.append(f"{pair.name} is of {saved.dtype}, in the model of {current.dtype}")
        elif not _holds_exactly(current.dtype, saved):
            wrong.append(f"{pair.name} has values of {saved.dtype} that {current.dtype} cannot hold")
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise WeightsMismatchError(f"{source} does not fit the model", why="; ".join(wrong[:_SHOWN]) + more)


def _dtype_kind(dtype: torch.dtype) -> str:
    """Return a name that is equal for dtypes of which one can be converted to the other."""
    if dtype in _WHOLE_NUMBERS:
        return "whole number"
    if dtype.is_floating_point and dtype != getattr(torch, "float4_e2m1fn_x2", None):  # two in an element
        return "floating point"
    return "complex" if dtype.is_complex else str(dtype)


def _holds_exactly(dtype: torch.dtype, saved: LazyTensor) -> bool:
    """Return False if whole numbers of a file would wrap in the dtype; looks at them where they could."""
    if dtype not in _WHOLE_NUMBERS or saved.numel() == 0:
        return True
    (low, high), (least, most) = _WHOLE_NUMBERS[dtype], _WHOLE_NUMBERS[saved.dtype]
    if not low <= least <= most <= high:
        values = saved.read().numpy()
        least, most = int(values.min()), int(values.max())
    return low <= least <= most <= high


def _format_names(what: str, names: Iterable[str]) -> str:
    listed = list_first(names, _SHOWN)
    return f"{what}: {listed}" if listed else ""


def _target_dtype(
    target: ModelTensor, wanted: torch.dtype | None, fp32_modules: Iterable[str]
) -> torch.dtype:
    """Return the dtype that a tensor becomes: only floating point dtypes change."""
    model_dtype = target.tensor.dtype
    if _dtype_kind(model_dtype) != "floating point":
        return model_dtype
    if any(f".{module}." in f".{name}." for name in target.names for module in fp32_modules):
        return torch.float32
    return wanted or model_dtype


def _warn_untied(pair: TensorMatch) -> None:
    """Warn when a file has two different tensors for what is one in the model."""
    first = pair.saved
    for other, saved in pair.others.items():
        if saved is first or saved.file_ranges == first.file_ranges != ():
            continue
        if not torch.equal(first.read(), saved.read()):
            logger.warning(
                "%s and %s differ in the file and are tied in the model: %s counts",
                pair.name,
                other,
                pair.name,
            )
