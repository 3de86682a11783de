"""Loading of weights from files into a model, a tensor at a time.

Names and shapes of all files are compared with the model before the first tensor is read. A
``WeightPlacer`` says where a tensor goes: memory, a device, or the file itself. There is never a second
copy of the model.

Some modules read some of their state themselves: scales of quantised weights, formats, extra state. A module
of that kind has a ``_load_from_state_dict`` of its own, and files hold more for it than its parameters and
buffers. It gets all of that at once, as ``load_state_dict`` would give it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from accelerate.checkpoint.device_uploads import DeviceUploads
from accelerate.checkpoint.file_reads import FileRegion, LazyTensor, MappedFiles
from accelerate.checkpoint.state_dict_files import as_dtype, canonical_name, is_distributed
from accelerate.core.errors import CheckpointError
from accelerate.core.progress import ProgressBar

logger = logging.getLogger(__name__)

_SHOWN = 12
_HOST = torch.device("cpu")


class WeightsMismatchError(CheckpointError, ValueError):
    """The weights of a file do not fit a model (a ValueError too, as in the public package)."""


class MismatchedKeys(NamedTuple):
    """The names that only the model or only the files have.

    Attributes:
        missing: names of the model that no file holds; they are as they were.
        unexpected: names in files that the model does not have.
    """

    missing: tuple[str, ...]
    unexpected: tuple[str, ...]


@dataclass(eq=False)
class ModelTensor:
    """One tensor of the model.

    Attributes:
        names: by which it goes; several if it is tied.
        owners: module and attribute of each.
        tensor: the parameter or buffer as it is now.
        is_persistent: the model's state dict holds it, unlike buffers with ``persistent=False``.
    """

    names: list[str]
    owners: list[tuple[nn.Module, str]]
    tensor: torch.Tensor
    is_persistent: bool = True

    @property
    def is_parameter(self) -> bool:
        """True for a parameter; False for a buffer, which keeps its initial value if it is not saved."""
        return isinstance(self.tensor, nn.Parameter)

    @property
    def shape(self) -> torch.Size:
        """The shape of the whole tensor."""
        return self.tensor.shape


class WeightPlacer(Protocol):
    """Places the tensors of a model: in memory, on a device, or in the file itself.

    Attributes:
        uploads: a context in which tensors are placed; at its end their values are there.
    """

    uploads: DeviceUploads

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
        is_persistent: the one in the files.
        others: by further names, if the model has one tensor where the files may have several.
        dtype: what it becomes.
    """

    target: ModelTensor
    name: str
    saved: LazyTensor
    others: dict[str, LazyTensor]
    dtype: torch.dtype


class CurrentDeviceWeightPlacer:
    """Keeps tensors on their devices; those on the meta device are mapped into host memory."""

    def __init__(self) -> None:
        self.maps, self.uploads = MappedFiles(), DeviceUploads()

    def check(self, pairs: Sequence[TensorMatch]) -> None:
        """Accept everything."""

    def place_tensor(self, target: ModelTensor, saved: LazyTensor, dtype: torch.dtype) -> torch.Tensor:
        """Copy into memory that there is; otherwise return a view of the file."""
        current = target.tensor
        if current.device.type != "meta" or is_distributed(current):
            return copy_into(current, saved, dtype, self.maps, self.uploads)
        return host_tensor(saved, dtype, self.maps)

    def device(self, name: str, current: torch.device) -> torch.device:
        """Return the current device; the CPU for the meta device."""
        return _HOST if current.type == "meta" else current


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
    # Files that hold the local shard have its shape.
    chunks = [] if value.shape == local.shape != target.shape else target.__create_chunk_list__()
    regions = [value] if not chunks else []
    for chunk in chunks if local.numel() else ():
        region = value
        for dim, (offset, length) in enumerate(zip(chunk.offsets, chunk.sizes, strict=True)):
            region = region.narrow(dim, offset, length)
        regions.append(region)
    for region in regions:
        # A mapped tensor begins where its storage does.
        begin = int(region.storage_offset()) * saved.dtype.itemsize
        if region.is_contiguous() and local.is_contiguous() and uploads.accepts(saved.region, local.device):
            assert saved.region is not None
            place = FileRegion(saved.region.path, saved.region.offset + begin)
            uploads.add(place, saved.dtype, local)
        else:
            local.copy_(region)
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
    saved_tensors: Mapping[str, LazyTensor],
    source: Path,
    placement: WeightPlacer,
    *,
    dtype: str | torch.dtype | None = None,
    keep_in_fp32: Iterable[str] = (),
    strict: bool = False,
    allow_missing: bool = False,
    local_shards: bool = False,
) -> MismatchedKeys:
    """Load weights into a model.

    Args:
        model: the model.
        saved_tensors: what the files hold, by all names (``open_weights(path).by_all_names()``).
        source: the files, for errors.
        placement: says where each tensor goes.
        dtype: what floating point weights become; None keeps the model's.
        keep_in_fp32: names of modules, at any depth, whose floating point weights become float32.
        strict: names that the model does not have are an error, not a warning; so are missing buffers.
        allow_missing: weights that no file holds stay as they are, with a warning that lists them. Otherwise
            they are an error: they would be random, or stay on the meta device.
        local_shards: files hold this process's local shard of each DTensor.

    Raises:
        WeightsMismatchError: names are missing, or shapes or kinds differ; the model is unchanged.
    """
    targets = _model_tensors(model)
    self_loading = find_self_loading(model, saved_tensors, {n for t in targets for n in t.names})
    direct_targets = [t for t in targets if t.is_persistent and not self_loading.covers(t.names)]
    remaining = {n: s for n, s in saved_tensors.items() if n not in self_loading.names}
    pairs, missing, unexpected = _match_tensors(
        direct_targets, remaining, as_dtype(dtype), tuple(keep_in_fp32)
    )
    if any(t.is_parameter for t in missing) and _tie_weights(model):
        return load_weights(
            model, saved_tensors, source, placement, dtype=dtype, keep_in_fp32=keep_in_fp32, strict=strict,
            allow_missing=allow_missing, local_shards=local_shards,
        )  # fmt: skip
    _refuse_mismatches(source, pairs, local_shards)
    _refuse_missing_keys(source, missing, unexpected, strict=strict, allow_missing=allow_missing)
    _refuse_uninitialized(targets, allow_missing=allow_missing)
    placement.check(pairs)
    total = sum(pair.saved.nbytes for pair in pairs)
    with ProgressBar("loading weights", total) as progress, placement.uploads:
        for pair in pairs:
            _assign_tensor(pair.target, placement.place_tensor(pair.target, pair.saved, pair.dtype))
            _warn_untied(pair)
            progress.advance(pair.saved.nbytes)
    unused = self_loading.load(source, placement.device)
    names = tuple(t.names[0] for t in missing)
    unexpected = (*unexpected, *unused)
    for label, keys in (("missing, left as they are", names), ("unused", unexpected)):
        if keys:
            logger.warning("%s: %s", source, _format_names(label, keys))
    return MismatchedKeys(names, unexpected)


def _model_tensors(model: nn.Module) -> list[ModelTensor]:
    """Return the parameters and buffers of a model, tied ones once."""
    by_id: dict[int, ModelTensor] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        left_out = module._non_persistent_buffers_set
        for name, tensor in {**module._parameters, **module._buffers}.items():
            if tensor is None:
                continue
            target = by_id.setdefault(id(tensor), ModelTensor([], [], tensor, is_persistent=False))
            target.names.append(f"{prefix}.{name}" if prefix else name)
            target.owners.append((module, name))
            target.is_persistent = target.is_persistent or name not in left_out
    return list(by_id.values())


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
    file_names = dict(zip(_strip_wrappers(saved_tensors), saved_tensors, strict=True))
    pairs: list[TensorMatch] = []
    missing: list[ModelTensor] = []
    used: set[str] = set()
    for target in targets:
        matches = list(dict.fromkeys(file_names[n] for n in _strip_wrappers(target.names) if n in file_names))
        used.update(matches)
        if matches:
            first, *others = matches
            further = {name: saved_tensors[name] for name in others}
            pairs.append(
                TensorMatch(
                    target, first, saved_tensors[first], further, _target_dtype(target, dtype, fp32_modules)
                )
            )
        else:
            missing.append(target)
    return pairs, missing, tuple(name for name in saved_tensors if name not in used)


def _strip_wrappers(names: Iterable[str]) -> list[str]:
    """Return the names without wrappers; unchanged where two would become one."""
    full_names = list(names)
    short = [canonical_name(name) for name in full_names]
    return short if len(set(short)) == len(full_names) else full_names


def _refuse_missing_keys(
    source: Path,
    missing: list[ModelTensor],
    unexpected: tuple[str, ...],
    *,
    strict: bool,
    allow_missing: bool,
) -> None:
    uninitialized = [t for t in missing if t.is_parameter or t.tensor.device.type == "meta"]
    if not ((uninitialized and not allow_missing) or (strict and (missing or unexpected))):
        return
    lines = [_format_names("missing", (t.names[0] for t in (missing if strict else uninitialized)))]
    lines += [_format_names("not in the model", unexpected)] if unexpected else []
    raise WeightsMismatchError(
        f"{source} does not fit the model: " + "; ".join(line for line in lines if line),
        why="what is missing would stay random or on the meta device",
        fix="check that the file is this model's; to leave such weights as they are: allow_missing=True",
    )


def _refuse_uninitialized(targets: list[ModelTensor], *, allow_missing: bool) -> None:
    """Refuse buffers on the meta device that no file ever holds."""
    uninitialized = [t.names[0] for t in targets if not t.is_persistent and t.tensor.device.type == "meta"]
    if not uninitialized:
        return
    line = _format_names("on the meta device, and files never hold them", uninitialized)
    if allow_missing:
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
        elif current.dtype.is_floating_point != saved.dtype.is_floating_point:
            wrong.append(f"{pair.name} is of {saved.dtype}, in the model of {current.dtype}")
    if wrong:
        more = f"; and {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else ""
        raise WeightsMismatchError(f"{source} does not fit the model", why="; ".join(wrong[:_SHOWN]) + more)


def _format_names(what: str, names: Iterable[str]) -> str:
    name_list = list(names)
    more = f" and {len(name_list) - _SHOWN} more" if len(name_list) > _SHOWN else ""
    return f"{what}: {', '.join(name_list[:_SHOWN])}{more}" if name_list else ""


def _target_dtype(
    target: ModelTensor, wanted: torch.dtype | None, fp32_modules: Iterable[str]
) -> torch.dtype:
    """Return the dtype that a tensor becomes: only floating point dtypes change."""
    model_dtype = target.tensor.dtype
    if not model_dtype.is_floating_point:
        return model_dtype
    if any(f".{module}." in f".{name}." for name in target.names for module in fp32_modules):
        return torch.float32
    return wanted or model_dtype


@torch.no_grad()
def _assign_tensor(target: ModelTensor, value: torch.Tensor) -> None:
    """Set a tensor of the model: in the same parameter where that has memory, else as a new one."""
    current = target.tensor
    if value is current:
        return
    plain = type(value) in (torch.Tensor, nn.Parameter) and current.device.type != "meta"
    if target.is_parameter and plain and torch._has_compatible_shallow_copy_type(current, value):  # pyright: ignore
        current.data = value
        vars(current).update(vars(value))
        return
    new: Any = value
    if isinstance(current, nn.Parameter) and not isinstance(value, nn.Parameter):
        new = nn.Parameter(value, requires_grad=current.requires_grad)
        new.__dict__.update(current.__dict__)
    for module, name in target.owners:
        table = module._parameters if isinstance(current, nn.Parameter) else module._buffers
        table[name] = new


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


@dataclass
class CustomStateDictModules:
    """Modules that load themselves, and the saved tensors for each.

    Attributes:
        modules: module, by its prefix (``"layer.0."``).
        state: what the files hold for each, by the same prefix.
        names: of all that in the files.
    """

    modules: dict[str, nn.Module] = field(default_factory=dict)
    state: dict[str, dict[str, LazyTensor]] = field(default_factory=dict)
    names: set[str] = field(default_factory=set)

    def covers(self, names: Iterable[str]) -> bool:
        """Return True if a tensor of the model is read by its module."""
        return any(name.rpartition(".")[0] + "." in self.modules for name in names)

    def load(self, source: Path, device: Callable[[str, torch.device], torch.device]) -> tuple[str, ...]:
        """Load all these modules; return the names that they did not use.

        Args:
            source: the files, for errors.
            device: where the weight of a name goes that is on a device now.

        Raises:
            CheckpointError: a module refuses what the files hold for it.
        """
        unused: list[str] = []
        for prefix, module in self.modules.items():
            before = dict(module.named_parameters(recurse=False))
            values = {name: saved.read() for name, saved in self.state[prefix].items()}
            missing: list[str] = []
            errors: list[str] = []
            module._load_from_state_dict(
                values, prefix, {"assign_to_params_buffers": True}, True, missing, unused, errors
            )
            if errors or missing:
                reason = "; ".join(errors) or f"missing: {', '.join(missing)}"
                raise CheckpointError(f"{source} does not fit the module {prefix[:-1]!r}", why=reason)
            for name, old in before.items():
                new = module._parameters[name]
                if new is not None and new is not old:
                    new.requires_grad_(old.requires_grad and new.dtype.is_floating_point)
            for name, old in before.items():
                module.to(device(prefix + name, old.device))
        return tuple(unused)


def find_self_loading(
    model: nn.Module, saved_tensors: Mapping[str, LazyTensor], model_names: set[str]
) -> CustomStateDictModules:
    """Find the modules for which files hold more than the model's tensors, and which can use it.

    Args:
        model: the model.
        saved_tensors: what the files hold.
        model_names: names of the model's tensors.
    """
    extra = [name for name in saved_tensors if name not in model_names]
    self_loading = CustomStateDictModules()
    if not extra:
        return self_loading
    capable = {f"{name}." if name else "": m for name, m in model.named_modules() if _is_self_loading(m)}
    for name in extra:
        prefixes = [prefix for prefix in capable if name.startswith(prefix)]
        if not prefixes:
            continue
        prefix = max(prefixes, key=len)
        self_loading.modules[prefix] = capable[prefix]
    for prefix in self_loading.modules:
        inner = [f"{prefix}{child}." for child, _ in self_loading.modules[prefix].named_children()]
        self_loading.state[prefix] = {
            name: saved
            for name, saved in saved_tensors.items()
            if name.startswith(prefix) and not name.startswith(tuple(inner))
        }
        self_loading.names.update(self_loading.state[prefix])
    return self_loading


def _is_self_loading(module: nn.Module) -> bool:
    kind = type(module)
    has_own_load = kind._load_from_state_dict is not nn.Module._load_from_state_dict
    hooks = bool(module._load_state_dict_pre_hooks)
    extra = kind.set_extra_state is not nn.Module.set_extra_state
    return (has_own_load and not kind.__module__.startswith("torch.nn.")) or hooks or extra
