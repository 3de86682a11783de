"""State dicts: tied tensors, names under wrappers, safetensors files, and whether one fits its object.

safetensors cannot say that two names share one tensor. Here one name keeps the tensor, and the others are
aliases: listed in the manifest, and in the file's metadata as safetensors' own ``save_model`` does it
(``{alias: name}``).
"""

from __future__ import annotations

import json
import struct
import sys
import warnings
from collections import OrderedDict
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, BinaryIO

import torch
from safetensors import safe_open
from torch import nn
from torch.nn.parameter import is_lazy

from accelerate.checkpoint.file_access import NoTensorsError
from accelerate.core import tree
from accelerate.core.errors import CheckpointError, SettingError, list_first

State = dict[str, Any]
SHOWN = 6  # names that a message lists
# Options that schedules add to the groups of an optimizer.
_OF_SCHEDULES = {"initial_lr", "max_lr", "min_lr", "base_momentum", "max_momentum", "swa_lr"}
_NOT_OPTIONS = {"params", "param_names", *_OF_SCHEDULES}
# Optimizers of torch.optim whose state has tensors of other shapes than the parameters.
_OTHER_SHAPES = {"Adafactor", "LBFGS", "Muon"}
_SHORT = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}


def find_ties(state: Mapping[str, Any]) -> dict[str, str]:
    """Map names to the earlier name of the same tensor: equal memory, shape and strides, or the same object.

    Views that only overlap are not ties: each is its own tensor, and is saved as such.
    """
    first: dict[tuple[Any, ...], str] = {}
    aliases: dict[str, str] = {}
    key: tuple[Any, ...]
    for name, value in state.items():
        if not isinstance(value, torch.Tensor) or value.numel() == 0 or value.device.type == "meta":
            continue
        if value.layout is not torch.strided:
            continue
        bits, address = (value.is_conj(), value.is_neg()), _address(value)
        key = (value.device, address, value.dtype, tuple(value.shape), value.stride(), bits)
        if not address:  # a DTensor has none, and is tied only where it is the same object
            key = (id(value),)
        owner = first.setdefault(key, name)
        if owner != name:
            aliases[name] = owner
    return aliases


def is_distributed(tensor: Any) -> bool:
    """Return True for a ``DTensor``, without importing its module, which takes half a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def _address(tensor: torch.Tensor) -> int:
    """Return the address of the data; 0 for tensors that wrap others (sharded, quantised ...)."""
    try:
        return tensor.data_ptr()
    except RuntimeError:
        return 0


def untie(state: Mapping[str, Any]) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    """Return (contiguous tensors that share no memory, as safetensors needs them; aliases).

    Raises:
        NoTensorsError: a value is no tensor.
        CheckpointError: a tensor has no data.
    """
    if not isinstance(state, Mapping):
        raise NoTensorsError(
            f"a {type(state).__name__} is no dict of tensors, which is what safetensors files hold",
            fix="save with safe_serialization=False",
        )
    aliases = find_ties(state)
    tensors: dict[str, torch.Tensor] = {}
    seen: set[tuple[torch.device, int]] = set()
    for name, value in state.items():
        if name in aliases:
            continue
        if not isinstance(value, torch.Tensor):
            raise NoTensorsError(
                f"{name} in a model's state is a {type(value).__name__}, not a tensor",
                why="safetensors files hold tensors only",
                fix="save with safe_serialization=False",
            )
        refuse_meta_tensor(name, value)
        if value.layout is not torch.strided:
            raise CheckpointError(
                f"{name} is a sparse tensor ({value.layout}), and safetensors files hold dense ones only",
                fix="save with safe_serialization=False",
            )
        tensor = value.detach()
        if _address(tensor):
            memory = (tensor.device, tensor.untyped_storage().data_ptr())
            if memory in seen:  # another view of it is saved already; the copy takes no device memory
                tensor = tensor.to("cpu", copy=True)
            seen.add(memory)
        tensors[name] = tensor.contiguous()
    return tensors, aliases


def refuse_meta_tensor(name: str, value: Any) -> None:
    """Raise CheckpointError if ``value`` is a tensor on the meta device: there is nothing to save."""
    if isinstance(value, torch.Tensor) and value.device.type == "meta":
        raise CheckpointError(
            f"{name} has no data to save (it is on the meta device)",
            fix="give the model its weights before saving it",
        )


def id_tensor_storage(tensor: torch.Tensor) -> tuple[torch.device, int, int]:
    """Return (device, address, bytes) of a tensor's storage: equal for tensors that share it."""
    storage = tensor.untyped_storage()
    return tensor.device, storage.data_ptr(), storage.nbytes()


# dtype -> how a safetensors file calls it
_CODES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint64: "U64",
    torch.uint32: "U32",
    torch.uint16: "U16",
    torch.uint8: "U8",
    torch.bool: "BOOL",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.float8_e4m3fnuz: "F8_E4M3FNUZ",
    torch.float8_e5m2fnuz: "F8_E5M2FNUZ",
    torch.complex64: "C64",
}
# Newer dtypes of torch. An element of the last one is two numbers, which the file counts.
_CODES |= {
    getattr(torch, name): code
    for name, code in (("float8_e8m0fnu", "F8_E8M0"), ("float4_e2m1fn_x2", "F4"))
    if hasattr(torch, name)
}


def shape_in_torch(shape: Sequence[int], dtype: torch.dtype) -> torch.Size:
    """Return the shape of the tensor to which a safetensors file gives ``shape``."""
    return torch.Size([*shape[:-1], shape[-1] // 2] if _CODES[dtype] == "F4" else shape)


def write_safetensors(
    tensors: Mapping[str, torch.Tensor], aliases: Mapping[str, str], file: BinaryIO
) -> None:
    """Write one safetensors file, tensor by tensor: no second copy of them is in memory.

    Source: "Format" in the readme of https://github.com/huggingface/safetensors: the length of the header as
    8 bytes, little-endian; the header, JSON; the tensors one after the other, here the widest dtypes first
    so that each is aligned.

    Raises:
        CheckpointError: the format has no name for a tensor's dtype, or the tensor is of a class of its own
            that has no bytes (a quantised one).
    """
    order = sorted(tensors.items(), key=lambda item: (-item[1].element_size(), item[0]))
    header: dict[str, Any] = {"__metadata__": {**aliases, "format": "pt"}}
    end = 0
    for name, tensor in order:
        # Two numbers have no shape ().
        if tensor.dtype not in _CODES or (_CODES[tensor.dtype] == "F4" and not tensor.shape):
            kind = f"of {tensor.dtype}" if tensor.shape else f"a scalar of {tensor.dtype}"
            raise CheckpointError(
                f"{name} is {kind}, which safetensors files do not hold",
                fix="save with safe_serialization=False",
            )
        if name in header:
            raise CheckpointError(
                f"a tensor has the name {name}, by which safetensors files call something else",
                fix="save with safe_serialization=False",
            )
        start, end = end, end + tensor.numel() * tensor.element_size()
        code, shape = _CODES[tensor.dtype], list(tensor.shape)
        if code == "F4":
            shape[-1] *= 2
        header[name] = {"dtype": code, "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    file.write(struct.pack("<Q", len(text)) + text)
    for name, tensor in order:
        whole = tensor.detach()
        try:
            content = raw_bytes(whole)
        except (RuntimeError, TypeError) as error:
            if type(whole) is torch.Tensor:
                raise
            raise CheckpointError(
                f"{name} is a {type(whole).__name__}, which safetensors files do not hold",
                fix="save with safe_serialization=False",
            ) from error
        file.write(content)
        del whole, content  # before the next one is read


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a tensor in row-major order, without a copy if it is contiguous on the CPU."""
    flat = tensor.detach().to("cpu").resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data


def read_safetensors(path: Path) -> tuple[State, dict[str, str]]:
    """Return (tensors, aliases) of a safetensors file; tensors are mapped from it, not copied."""
    with safe_open(path, framework="pt") as file:
        metadata: dict[str, str] = file.metadata() or {}
        names = set(file.keys())
        state = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a dict
    aliases = {alias: name for alias, name in metadata.items() if name in names and alias not in names}
    return state, aliases


def read_safetensors_header(path: Path) -> tuple[dict[str, Any], int, dict[str, str]]:
    """Return (entries of the tensors, position from which their offsets count, metadata) of a file."""
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        header = json.loads(file.read(length))
    metadata = header.pop("__metadata__", {})
    return header, 8 + length, metadata


def clean_state_dict_for_safetensors(state_dict: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return ``state_dict`` as safetensors can hold it: tied tensors once, all contiguous.

    Warns:
        UserWarning: names the tied tensors that are left out.
    """
    tensors, aliases = untie(state_dict)
    if aliases:
        pairs = ", ".join(f"{alias} (is {name})" for alias, name in aliases.items())
        warnings.warn(f"tied tensors are saved once, left out: {pairs}", stacklevel=2)
    return tensors


def canonical_name(name: str) -> str:
    """Return the name of a tensor without the prefixes of wrappers.

    torch.compile adds ``_orig_mod.`` at any depth, data parallelism ``module.`` in front.
    """
    name = name.replace("_orig_mod.", "")
    while name.startswith("module."):
        name = name.removeprefix("module.")
    return name


def canonical_names(names: Iterable[str], others: Iterable[str] = ()) -> list[str]:
    """Return the names without wrappers; unchanged where two of them, or two of ``others``, would become one.

    A model may have a child ``module`` of its own: where a name without that is another name, only the
    prefix goes that all names have. Two sides that are compared give each other's names as ``others``.
    """
    sides = list(names), list(others)
    for strip in (lambda names: list(map(canonical_name, names)), _strip_common):
        if all(len(set(strip(side))) == len(side) for side in sides):
            return strip(sides[0])
    return sides[0]


def _strip_common(names: Iterable[str]) -> list[str]:
    names = [name.replace("_orig_mod.", "") for name in names]
    while names and all(name.startswith("module.") for name in names):
        names = [name.removeprefix("module.") for name in names]
    return names


def strip_compile_prefix(state: Mapping[str, Any]) -> State:
    """Return ``state`` by the names of the model that was not compiled."""
    names = {name: name.replace("_orig_mod.", "") for name in state}
    if len(set(names.values())) < len(names):
        return dict(state)
    return {names[name]: value for name, value in state.items()}


def fit_names(state: State, aliases: Mapping[str, str], model_state: Mapping[str, Any]) -> State:
    """Return ``state`` by the names that the model uses, tied names included.

    Args:
        state: what a file holds.
        aliases: its aliases.
        model_state: the model's present state, for its names and ties.

    Returns:
        Names of ``model_state`` where they can be matched; other names stay, for the model to refuse.
    """
    versions = getattr(state, "_metadata", None)  # of the modules
    state = {**state, **{alias: state[name] for alias, name in aliases.items() if name in state}}
    if state.keys() != model_state.keys():
        file_names, names = state.keys(), match_names(state, model_state)
        state = {names.get(name, name): value for name, value in state.items()}
        if versions is not None and state.keys() != file_names:
            own_paths = {canonical_name(f"{p}.")[:-1]: p for p in getattr(model_state, "_metadata", ())}
            short = {canonical_name(f"{path}.")[:-1]: note for path, note in versions.items()}
            versions = {own_paths.get(path, path): note for path, note in short.items()}
    groups: dict[str, list[str]] = {}
    for alias, owner in find_ties(model_state).items():
        groups.setdefault(owner, [owner]).append(alias)
    for group in groups.values():
        saved_name = next((name for name in group if name in state), None)
        for name in group:
            if saved_name is not None:
                state.setdefault(name, state[saved_name])
    if versions is not None:
        state = OrderedDict(state)
        state._metadata = versions  # type: ignore[attr-defined]
    return state


def match_names(names: Collection[str], others: Collection[str]) -> dict[str, str]:
    """Return the equivalent among ``others`` of those names that have one, of a model and a file."""
    full_names = dict(zip(canonical_names(others, names), others, strict=True))
    short_names = zip(names, canonical_names(names, others), strict=True)
    return {name: full_names[short] for name, short in short_names if short in full_names}


def find_untied(aliases: Mapping[str, str], model_state: Mapping[str, Any]) -> dict[str, str]:
    """Return those ``aliases`` of a file that are tensors of their own in the model."""
    # A name without a tensor is held by another rank, which knows whether it is tied.
    held = [name for name, value in model_state.items() if value is not None]
    names = match_names(dict.fromkeys((*aliases, *aliases.values())), held)
    owners = find_ties(model_state)

    def root(name: str) -> str | None:
        return owners.get(names[name], names[name]) if name in names else None

    return {
        alias: name
        for alias, name in aliases.items()
        if None not in (root(alias), root(name)) and root(alias) != root(name)
    }


def as_dtype(text: str | torch.dtype | None) -> torch.dtype | None:
    """Return the dtype of that name: ``"bf16"``, ``"bfloat16"``, ``"torch.bfloat16"``.

    Raises:
        SettingError: there is no floating point dtype of that name, or it is one of whole numbers, which
            would make zeros of weights.
    """
    if text is None or (isinstance(text, torch.dtype) and (text.is_floating_point or text.is_complex)):
        return text
    name = str(text).removeprefix("torch.")
    dtype = getattr(torch, _SHORT.get(name, name), None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        choices = ", ".join(sorted({*_SHORT, *_SHORT.values(), "float64"}))
        raise SettingError(
            f"{text!r} is no floating point dtype",
            fix=f"one of {choices}; for 8 or 4 bits, load_and_quantize_model",
        )
    return dtype


# ---------------------------------------------------------------- comparison with objects


def copy_state(state: Any) -> Any:
    """Return a copy of a state whose tensors are no longer those of the object."""
    return tree.map_tree(
        lambda leaf: leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf, state
    )


# ---------------------------------------------------------------- models


def model_differences(
    state: Mapping[str, Any], template: Mapping[str, Any]
) -> tuple[list[str], list[str], list[str]]:
    """Return (names that the state lacks, names that the model lacks, texts about other shapes).

    Args:
        state: what was saved, by the model's names.
        template: the model's state dict; a value of None is held by another rank.
    """
    # Layers of torch make this one up: it came later than their first files.
    missing = [n for n in template if n not in state and not n.endswith("num_batches_tracked")]
    surplus = [name for name in state if name not in template]
    shapes = []
    for name, value in template.items():
        saved = state.get(name)
        if not (isinstance(value, torch.Tensor) and isinstance(saved, torch.Tensor)) or is_lazy(value):
            continue
        if name.endswith("_extra_state"):  # of any length, see ``ShardedModelState.prepare_load``
            continue
        # torch loads a single number into a tensor without dimensions.
        if saved.shape != value.shape and not (value.dim() == 0 and saved.numel() == 1):
            shapes.append(
                f"size mismatch for {name}: {tuple(saved.shape)} was saved, the model has "
                f"{tuple(value.shape)}"
            )
    return missing, surplus, shapes


def describe_model(missing: list[str], surplus: list[str], shapes: list[str], *, strict: bool) -> str:
    """Return why a state does not fit a model; empty if it does."""
    texts = [f"Missing key(s): {list_first(missing, SHOWN)}"] if strict and missing else []
    texts += [f"Unexpected key(s): {list_first(surplus, SHOWN)}"] if strict and surplus else []
    return "; ".join([*texts, *shapes[:SHOWN]])


def describe_shapes(
    saved: Mapping[str, tuple[torch.dtype, torch.Size]], template: Mapping[str, Any], *, strict: bool
) -> str:
    """Return why saved tensors, of which dtype and shape are known, do not fit a model; empty if they do."""
    outline = {name: torch.empty(shape, device="meta") for name, (_, shape) in saved.items()}
    return describe_model(*model_differences(outline, template), strict=strict)


def converts_states(module: Any) -> bool:
    """Return whether loading may change names or shapes by code of its own, so that a difference may fit."""
    if not isinstance(module, nn.Module) or type(module).load_state_dict is not nn.Module.load_state_dict:
        return True
    for each in module.modules():
        load = type(each)._load_from_state_dict
        hooks = [getattr(hook, "hook", hook) for hook in each._load_state_dict_pre_hooks.values()]
        sources = [load, *hooks]
        if not all(comes_from(source, "torch.nn.modules", "torch.distributed") for source in sources):
            return True
    return False


def comes_from(function: Any, *packages: str) -> bool:
    """Return True for a function, also bound or partial, of a module whose name begins with one of these."""
    function = getattr(function, "func", function)
    return str(getattr(function, "__module__", "")).startswith(packages)


# ---------------------------------------------------------------- optimizers


def describe_optimizer(
    optimizer: torch.optim.Optimizer,
    sizes: Sequence[int],
    state: Any,
    *,
    saved_class: str = "",
    shapes: Sequence[torch.Size] | None = None,
) -> str:
    """Return why a full state dict does not fit an optimizer; empty if nothing speaks against it.

    Args:
        optimizer: the user's.
        sizes: the number of parameters in each of its groups.
        state: the state dict.
        saved_class: the class that was saved; empty if that is not known.
        shapes: of the parameters, in the order of the groups; None if they are not known.
    """
    if not (isinstance(state, Mapping) and {"state", "param_groups"} <= state.keys()):
        # An optimizer of others may have a layout of its own, which it compares itself.
        own = isinstance(state, Mapping) and not hasattr(optimizer, "state")
        return (
            "" if own and state.keys() == optimizer.state_dict().keys() else "it is no state of an optimizer"
        )
    saved = [len(group["params"]) for group in state["param_groups"]]
    if saved != list(sizes):
        return (
            f"it holds groups of {list_first(map(str, saved), SHOWN)} parameters, and the optimizer has "
            f"groups of {list_first(map(str, sizes), SHOWN)}"
        )
    other_class = describe_other_class(optimizer, state["param_groups"], saved_class)
    kind = type(optimizer)
    has_params_shapes = kind.__module__.startswith("torch.optim") and kind.__name__ not in _OTHER_SHAPES
    if other_class or shapes is None or not has_params_shapes:
        return other_class
    keys = [key for group in state["param_groups"] for key in group["params"]]
    for number, (key, shape) in enumerate(zip(keys, shapes, strict=True)):
        for name, value in state["state"].get(key, {}).items():
            if isinstance(value, torch.Tensor) and value.dim() and value.shape != shape:
                return (
                    f"{name} of its parameter {number} has the shape {tuple(value.shape)}, and the "
                    f"parameter {tuple(shape)}"
                )
    return ""


def describe_other_class(
    optimizer: torch.optim.Optimizer, saved_groups: Sequence[Mapping[str, Any]], saved_class: str = ""
) -> str:
    """Return why the saved groups are of another kind of optimizer; empty if they are not.

    Options are compared, which tell the classes of torch apart. A version of torch may have options that
    another one has not, so it takes differences in both directions.
    """
    own_class, theirs = type(optimizer), getattr(torch.optim, saved_class, None)
    unrelated = (
        isinstance(theirs, type)
        and own_class.__module__.startswith("torch.optim")
        and not (issubclass(own_class, theirs) or issubclass(theirs, own_class))
    )
    for own, saved in zip(optimizer.param_groups, saved_groups, strict=False):
        lacking = sorted(set(optimizer.defaults) - saved.keys() - _NOT_OPTIONS)
        surplus = sorted(saved.keys() - own.keys() - _NOT_OPTIONS)
        if unrelated or (lacking and surplus):
            return (
                f"it is the state of {saved_class or 'another optimizer'} "
                f"({list_first(surplus, SHOWN) or 'the same options'}), and the optimizer is "
                f"{own_class.__name__} ({list_first(lacking, SHOWN) or 'the same options'})"
            )
    return ""


def describe_other_schedule(schedule: Any, state: Any) -> str:
    """Return which values a schedule's state lacks and has besides; empty where it lacks or has none.

    torch's schedules take any values. Only both together tell another class from another version.
    """
    own = schedule.state_dict()
    if not isinstance(own, Mapping) or not isinstance(state, Mapping):
        return ""
    lacking = sorted(map(str, own.keys() - state.keys()))
    surplus = sorted(map(str, state.keys() - own.keys()))
    if not lacking or not surplus:
        return ""
    return f"it has no {', '.join(lacking[:4])}, and holds {', '.join(surplus[:4])}"
