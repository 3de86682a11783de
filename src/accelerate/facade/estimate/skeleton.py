"""A skeleton: a model without its weights, with modules, names and shapes, on the meta device.

Only configurations and the headers of files are read: no weight, and no memory for one.
"""

from __future__ import annotations

import importlib
import inspect
import json
import os
import re
import socket
import sys
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import getproxies

import torch
from torch import nn

from accelerate.checkpoint.lazy_weights import open_weights
from accelerate.checkpoint.model_tensors import LazyTensor
from accelerate.core import packages
from accelerate.core.errors import AccelerateError, MissingExtraError, UnknownNameError
from accelerate.offload.module_sizes import as_torch_dtype

LIBRARIES = ("transformers", "diffusers", "timm")
CONFIG, PIPELINE, _INDEX = "config.json", "model_index.json", ".safetensors.index.json"
_FACTORY = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_][\w.]*")
_KEYS = "a config.json with 'model_type' (transformers), '_class_name' (diffusers) or 'architecture' (timm)"
_TRUST = "read that code; if you trust it: --trust_remote_code (trust_remote_code=True)"


class ModelSkeletonError(AccelerateError, ValueError):
    """A model cannot be built from what was named."""


class ModelNotFoundError(ModelSkeletonError, FileNotFoundError):
    """There is no such model, or no file that describes it, or the hub does not give it."""


def build_skeleton(
    model: str | os.PathLike[str],
    *,
    library: str | None = None,
    trust_remote_code: bool = False,
    dtype: torch.dtype | str | None = None,
    head: bool = True,
    token: str | None = None,
) -> nn.Module:
    """Build a model on the meta device.

    Args:
        model: a folder with ``config.json`` (of transformers, diffusers or timm; a pipeline of diffusers with
            ``model_index.json`` gives its parts), the name of a model on the hub, of which only the
            configuration is fetched, or ``module:factory``: a function without arguments, or a class, that
            is imported from the working folder and called under ``torch.device("meta")``. A folder of
            safetensors files without a configuration gives modules that only have names and weights. With the
            library timm, also the name of one of its architectures.
        library: whose configuration it is, where that cannot be told from its keys.
        trust_remote_code: run code that lies beside the configuration, if the library needs it.
        dtype: of floating point weights; None is what the configuration says.
        head: the architecture that a configuration of transformers names; False is the model below its
            head, which 1.x measures.
        token: of the hub, for models that not everybody may see; None is the one that is logged in.

    Raises:
        ModelNotFoundError: there is no such model.
        ModelSkeletonError: its configuration does not describe one.
        MissingExtraError: its library is not installed.
        PrepareError: there is no such dtype.
    """
    name, weight_dtype = os.fspath(model), None if dtype is None else as_torch_dtype(dtype)
    if library is not None and library not in LIBRARIES:
        raise UnknownNameError("library", library, LIBRARIES)
    if _FACTORY.fullmatch(name) and not os.path.exists(name):
        return _cast(_call_factory(name), weight_dtype)
    location = _ModelLocation(name, token)
    if library in (None, "diffusers") and (index := location.find_file(PIPELINE)):
        return _cast(_pipeline(location, index, trust_remote_code), weight_dtype)
    if library == "timm" and not location.local and "/" not in name:  # an architecture of its own
        config = {"architecture": name}
    elif path := location.find_file(CONFIG):
        config = read_json(path)
    else:
        return _cast(_build_from_headers(location), weight_dtype)
    with torch.device("meta"):
        return _build_from_config(location, "", config, library, trust_remote_code, weight_dtype, head)


def _cast(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """Cast floating point weights; on the meta device this costs nothing."""
    return model if dtype is None else model.to(dtype)


def read_json(path: Path) -> dict[str, Any]:
    """Read a file that holds one JSON object.

    Raises:
        ModelSkeletonError: it does not.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ModelSkeletonError(f"{path} is not JSON", why=str(error)) from error
    if not isinstance(content, dict):
        raise ModelSkeletonError(f"{path} holds no JSON object", why=f"it holds a {type(content).__name__}")
    return content


class _ModelLocation:
    """The location of a model's configuration: a folder, or a repository on the hub."""

    def __init__(self, name: str, token: str | None) -> None:
        self.name, self.token, self.folder = name, token, Path(name).expanduser()
        if self.folder.name == CONFIG and self.folder.is_file():
            self.folder = self.folder.parent
        self.local = self.folder.exists()
        if not self.local and (name.startswith((".", "/", "~")) or name.count("/") > 1):
            raise ModelNotFoundError(
                f"there is no folder {name}", fix="a folder with config.json, or a name on the hub"
            )

    @property
    def source(self) -> str:
        """The name or path that the libraries take."""
        return str(self.folder) if self.local else self.name

    def find_file(self, name: str) -> Path | None:
        """Return the path of a file, downloaded if needed, or None when there is no such file."""
        if self.local:
            path = self.folder / name
            return path if path.is_file() else None
        return _download_file(self.name, name, self.token)


def _download_file(repository: str, name: str, token: str | None) -> Path | None:
    """Download a file of a repository on the hub, or take it from the cache."""
    if not packages.is_installed("huggingface_hub"):
        raise MissingExtraError("huggingface_hub", f"the model {repository!r}, which is no folder here,")
    from huggingface_hub import errors, hf_hub_download

    example = "a folder with config.json, such as ./my-model"
    try:
        return Path(hf_hub_download(repository, name, token=token, local_files_only=not _is_hub_reachable()))
    except errors.GatedRepoError as error:
        message, reason = f"the hub does not show {repository!r} to everybody", str(error).splitlines()[0]
        raise ModelNotFoundError(
            message, why=reason, fix="ask for access on its page, then: hf auth login"
        ) from error
    except (errors.RepositoryNotFoundError, errors.HFValidationError) as error:
        message, reason = f"there is no model {repository!r}, neither a folder here nor on the hub", ""
        raise ModelNotFoundError(
            message, why=reason, fix=f"its name as owner/name; hf auth login if it is private; {example}"
        ) from error
    except errors.LocalEntryNotFoundError as error:
        message = f"there is no folder {repository!r}, and the hub cannot be reached"
        reason = "a name that is no folder is looked up on huggingface.co, or in its cache on this machine"
        raise ModelNotFoundError(message, why=reason, fix=example) from error
    except errors.EntryNotFoundError:
        return None


def _is_hub_reachable() -> bool:
    """Return True when the hub's name resolves: without a network its library tries for half a minute."""
    from huggingface_hub import constants

    host = urlsplit(constants.ENDPOINT).hostname
    if host is None or getproxies():  # a proxy looks names up itself
        return True
    try:
        socket.getaddrinfo(host, None)
    except socket.gaierror:
        return False
    return True


# ---------------------------------------------------------------- module:factory


def _call_factory(name: str) -> nn.Module:
    """Import ``module:factory`` and return its model, on the meta device."""
    home, _, attribute = name.partition(":")
    with _working_folder_first():
        try:
            factory: Any = importlib.import_module(home)
        except ModuleNotFoundError as error:
            if error.name is None or not f"{home}.".startswith(f"{error.name}."):
                raise
            message = f"there is no module {home!r} here"
            raise ModelSkeletonError(
                message, why=f"looked in {os.getcwd()} and among installed packages"
            ) from error
        for part in attribute.split("."):
            if not hasattr(factory, part):
                factories = [
                    n for n, value in vars(factory).items() if callable(value) and not n.startswith("_")
                ]
                raise UnknownNameError(f"factory in {home}", attribute, factories)
            factory = getattr(factory, part)
        if isinstance(factory, nn.Module):
            return factory.to("meta")
        needed = [
            parameter.name
            for parameter in inspect.signature(factory).parameters.values()
            if parameter.default is parameter.empty
            and parameter.kind not in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
        ]
        if needed:
            raise ModelSkeletonError(
                f"{name} cannot be called without arguments",
                why=f"{name} needs arguments: {', '.join(needed)}",
                fix="write a function that gives them",
            )
        with torch.device("meta"):
            model = factory()
    if not isinstance(model, nn.Module):
        raise ModelSkeletonError(
            f"{name}() is a {type(model).__name__}", why="a factory returns an nn.Module"
        )
    return model


@contextmanager
def _working_folder_first() -> Generator[None]:
    """Put the working folder first on ``sys.path``, as for a script in it."""
    folder = os.getcwd()
    sys.path.insert(0, folder)
    try:
        yield
    finally:
        sys.path.remove(folder)


# ---------------------------------------------------------------- configurations


def _build_from_config(
    location: _ModelLocation,
    part: str,
    config: dict[str, Any],
    library: str | None,
    trust: bool,
    dtype: torch.dtype | None,
    head: bool,
) -> nn.Module:
    """Build the model of a configuration.

    Args:
        part: the folder within ``location`` that holds it; empty for ``location`` itself.
    """
    if library is None:  # by the key that only this library writes
        is_timm = "architecture" in config and "model_type" not in config
        library = "diffusers" if "_class_name" in config else "timm" if is_timm else "transformers"
    if not packages.is_installed(library):
        raise MissingExtraError(library, f"the configuration of {location.name}")
    try:
        if library == "transformers":
            return _transformers(location, part, config, trust, dtype, head)
        return _cast((_diffusers if library == "diffusers" else _timm)(location, config), dtype)
    except AccelerateError:
        raise
    except Exception as error:
        message = f"{library} builds no model from the configuration of {location.name}"
        raise ModelSkeletonError(message, why=" ".join(f"{type(error).__name__}: {error}".split())) from error


def _diffusers(location: _ModelLocation, config: dict[str, Any]) -> nn.Module:
    import diffusers

    name = config.get("_class_name", "")
    kind: Any = getattr(diffusers, name, None) if name else None
    if not (isinstance(kind, type) and issubclass(kind, nn.Module)):
        class_names = [each for each in dir(diffusers) if each.endswith(("Model", "2D", "3D", "KL"))]
        raise UnknownNameError(
            "class of diffusers", name, class_names, where=f"in the config.json of {location.name}"
        )
    make: Any = kind.from_config  # type: ignore[attr-defined]
    model: nn.Module = make(config)
    return model


def _timm(location: _ModelLocation, config: dict[str, Any]) -> nn.Module:
    import timm

    name = config.get("architecture", "")
    if not timm.is_model(name):
        where = f"in the config.json of {location.name}" if location.local or "/" in location.name else ""
        raise UnknownNameError("architecture of timm", name, timm.list_models(), where=where)
    options = {key: config[key] for key in ("num_classes", "global_pool") if key in config}
    model: nn.Module = timm.create_model(name, pretrained=False, **options, **config.get("model_args", {}))
    return model


def _transformers(
    location: _ModelLocation,
    part: str,
    config: dict[str, Any],
    trust: bool,
    dtype: torch.dtype | None,
    head: bool,
) -> nn.Module:
    import transformers

    where = f"in the config.json of {location.name}"
    sort, remote = config.get("model_type"), config.get("auto_map") or {}
    if sort not in transformers.CONFIG_MAPPING:
        if remote and not trust:
            message = f"{location.name} brings its own code, {sort or 'a model'} is not part of transformers"
            raise ModelSkeletonError(
                message, why=f"its config.json names {', '.join(_code_files(remote))}", fix=_TRUST
            )
        if not remote and not sort:
            message = f"config.json of {location.name} describes no model: it has no 'model_type'"
            raise ModelSkeletonError(message, why=f"its keys: {', '.join(config) or 'none'}", fix=_KEYS)
        if not remote:
            raise UnknownNameError("model_type", str(sort), list(transformers.CONFIG_MAPPING), where=where)
    options: dict[str, Any] = {"trust_remote_code": trust, "token": location.token}
    options |= {"subfolder": part} if part else {}
    described: Any = transformers.AutoConfig.from_pretrained(location.source, **options)
    extra: dict[str, Any] = {} if dtype is None else {"dtype": dtype}
    kind = _architecture(described, remote, trust, where) if head else None
    if isinstance(kind, type):
        return kind._from_config(described, **extra)
    maker: Any = getattr(transformers, kind or "AutoModel")
    model: nn.Module = maker.from_config(described, trust_remote_code=trust, **extra)
    return model


def _code_files(remote: Mapping[str, Any]) -> list[str]:
    """Return the code files that an ``auto_map`` names."""
    return sorted({str(value).partition(".")[0] + ".py" for value in remote.values()})


def _architecture(described: Any, remote: Mapping[str, Any], trust: bool, where: str) -> Any:
    """Return the class that a configuration names; for remote code, the auto class that loads it."""
    import transformers

    names = list(described.architectures or ())
    keys = [key for key in remote if key.startswith("AutoModel")]
    remote_keys = [key for key in keys if str(remote[key]).rpartition(".")[2] in names]
    if remote_keys and trust:
        return remote_keys[0]
    for name in names:
        kind = getattr(transformers, name, None)
        if isinstance(kind, type) and issubclass(kind, nn.Module):
            return kind
    if remote_keys:
        reason = f"it is in {', '.join(_code_files(remote))} beside the configuration"
        raise ModelSkeletonError(f"{names[0]} {where} is not part of transformers", why=reason, fix=_TRUST)
    if names:
        class_names = [each for each in dir(transformers) if "For" in each or each.endswith("Model")]
        raise UnknownNameError("architecture", names[0], class_names, where=where)
    return next((key for key in keys if trust and "For" in key), None)


def _pipeline(location: _ModelLocation, index: Path, trust: bool) -> nn.Module:
    """Build the models of a diffusers pipeline."""
    parts = nn.ModuleDict()
    for name, entry in read_json(index).items():
        is_part = isinstance(entry, list) and len(entry) == 2 and all(isinstance(each, str) for each in entry)
        if name.startswith("_") or not is_part:
            continue
        path = location.find_file(f"{name}/{CONFIG}")
        if path is None:  # schedulers, tokenizers and processors have files of other names
            continue
        config = read_json(path)
        with torch.device("meta"):
            parts[name] = _build_from_config(location, name, config, None, trust, None, True)
    if not parts:
        raise ModelSkeletonError(f"{index} names no model with a {CONFIG}")
    return parts


# ---------------------------------------------------------------- weights without a configuration


class NameOnlyModule(nn.Module):
    """A module that has weights with names, shapes and dtypes, and no forward."""


def open_safetensors(path: Path) -> dict[str, LazyTensor]:
    """Open the weights in safetensors files by name, tied ones once; empty if there are no such files.

    Args:
        path: a file, an index of shards, or a folder that holds either; an index stands for its files.

    Raises:
        CheckpointError: a file is damaged, or an index names one that is missing.
    """
    files = [path] if path.is_file() else sorted(path.glob(f"*{_INDEX}"))[:1] or path.glob("*.safetensors")
    tensors: dict[str, LazyTensor] = {}
    for file in files:
        if file.name.endswith((".safetensors", _INDEX)):
            tensors |= open_weights(file).tensors
    return dict(sorted(tensors.items()))


def _build_from_headers(location: _ModelLocation) -> nn.Module:
    """Build a tree of modules with the names, shapes and dtypes of safetensors files, and no forward."""
    tensors = open_safetensors(location.folder) if location.local else {}
    if not tensors:
        raise ModelNotFoundError(
            f"{location.name} has no {CONFIG}",
            why="it says which model to build, and there is no safetensors file with weights",
            fix="a folder with config.json, a name on the hub, or module:factory",
        )
    root = NameOnlyModule()
    for name, tensor in tensors.items():
        *path, last = name.split(".")
        holder: nn.Module = root
        for part in path:
            if part not in holder._modules:
                _refuse_twice(holder, part, name)
                holder.add_module(part, NameOnlyModule())
            holder = holder.get_submodule(part)
        _refuse_twice(holder, last, name)
        weight = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        if weight.is_floating_point():
            holder.register_parameter(last, nn.Parameter(weight, requires_grad=False))
        else:
            holder.register_buffer(last, weight)
    return root


def _refuse_twice(holder: nn.Module, part: str, name: str) -> None:
    if hasattr(holder, part):
        message = (
            f"the weight {name!r} cannot be an attribute of a module: {part!r} is something else already"
        )
        raise ModelSkeletonError(message, fix="a config.json beside the weights says which model to build")
