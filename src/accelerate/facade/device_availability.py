"""The functions ``is_<device>_available`` and similar checks of devices, under the names of 1.x.

Each function ending in ``_checker`` makes one such check; ``names.py`` gives it the device. All answers come
from the device's own file.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from importlib import import_module
from typing import Any

from accelerate import device as devices
from accelerate.core import packages
from accelerate.core.errors import SettingError
from accelerate.core.packages import is_torch_version

Check = Callable[..., bool]


def _with_signature(check: Check, doc: str, **arguments: Any) -> Check:
    """Return ``check`` with a docstring and a signature: its arguments and their defaults."""
    keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
    parameters = [inspect.Parameter(name, keyword, default=value) for name, value in arguments.items()]
    signature = inspect.Signature(parameters)

    def checker(*args: Any, **kwargs: Any) -> bool:
        bound = signature.bind(*args, **kwargs)
        bound.apply_defaults()
        return check(**bound.arguments)

    checker.__doc__ = doc
    checker.__signature__ = signature  # type: ignore[attr-defined]
    return checker


def device_checker(type: str, argument: str = "check_device") -> Check:
    """Return a check whether a device of ``type`` can be used.

    Args:
        type: the device type.
        argument: the argument that asks to check the device itself; that is always done.
    """
    arguments = {argument: False} if argument else {}
    return _with_signature(
        lambda **_: devices.get(type).is_available(),
        f"Return whether a device of type {type!r} can be used by this process.",
        **arguments,
    )


def version_checker(type: str, min_version: str) -> Check:
    """Return a check whether a device of ``type`` can be used, and torch is at least of a version."""
    return _with_signature(
        lambda min_version: is_torch_version(">=", min_version) and devices.get(type).is_available(),
        f"Return whether a device of type {type!r} can be used and torch is ``min_version`` or newer.",
        min_version=min_version,
    )


def tpu_gpu_checker(type: str) -> Check:
    """Return a check whether a device of ``type`` can be used, and what it is made of."""

    def check(check_is_tpu: bool, check_is_gpu: bool) -> bool:
        if check_is_tpu and check_is_gpu:
            raise SettingError(
                "check_is_tpu and check_is_gpu are both set", why="a process computes on one kind of device"
            )
        device = devices.get(type)
        if not device.is_available() or not (check_is_tpu or check_is_gpu):
            return device.is_available()
        return ("TPU" in device.name()) == check_is_tpu

    return _with_signature(
        check,
        f"Return whether a device of type {type!r} can be used, and whether it is a TPU or a GPU.",
        check_is_tpu=False,
        check_is_gpu=False,
    )


def model_checker(type: str, name: str) -> Check:
    """Return a check whether the device of ``type`` is the model ``name``."""
    return _with_signature(
        lambda: devices.get(type).is_available() and devices.get(type).name() == name,
        f"Return whether the {type!r} device at hand is a {name}.",
    )


def build_checker(type: str, toolkit: str) -> Check:
    """Return a check whether torch was built for ``toolkit`` and a device of ``type`` can be used."""

    def check() -> bool:
        import torch

        return getattr(torch.version, toolkit, None) is not None and devices.get(type).is_available()

    return _with_signature(check, f"Return whether torch was built for {toolkit} and finds a device.")


def format_checker(type: str, dtype: str) -> Check:
    """Return a check whether the device of ``type`` computes in ``dtype``."""
    return _with_signature(
        lambda: devices.get(type).is_available() and devices.get(type).supports(dtype),
        f"Return whether the {type!r} device at hand computes in {dtype}.",
    )


def bf16_checker(tpu: str) -> Check:
    """Return a check whether the best device computes in bfloat16, perhaps except type ``tpu``."""

    def check(ignore_tpu: bool) -> bool:
        device = devices.detect()
        return device.supports("bf16") and not (ignore_tpu and device.type == tpu)

    return _with_signature(
        check, "Return whether the best device of this machine computes in bfloat16.", ignore_tpu=False
    )


def is_fp16_available() -> bool:
    """Return whether the best device of this machine computes in float16."""
    return devices.detect().supports("fp16")


def is_torch_distributed_available() -> bool:
    """Return whether this torch was built with torch.distributed."""
    import torch

    return torch.distributed.is_available()


def backend_checker(backend: str) -> Check:
    """Return a check whether this torch has a communication backend."""

    def check() -> bool:
        import torch

        return torch.distributed.is_available() and torch.distributed.is_backend_available(backend)

    return _with_signature(check, f"Return whether this torch has the communication backend {backend}.")


def _import_attribute(home: str) -> Any:
    """The attribute ``package.module:name`` of another package; None where it is absent."""
    module, _, name = home.partition(":")
    if not packages.is_installed(module.partition(".")[0]) or not packages.is_installed(module):
        return None
    return getattr(import_module(module), name, None)


def feature_checker(home: str, feature: str) -> Check:
    """Return a check whether the set ``home`` of another package has ``feature``."""
    return _with_signature(
        lambda: feature in (_import_attribute(home) or ()),
        f"Return whether {home.partition(':')[0]} has {feature}.",
    )


def function_checker(home: str) -> Check:
    """Return a check that calls the function ``home`` of another package, which may return (bool, reason)."""

    def check() -> bool:
        ask = _import_attribute(home)
        answer = ask() if ask else False
        return bool(answer[0] if isinstance(answer, tuple) else answer)

    return _with_signature(check, f"Return whether {home.partition('.')[0]} says so.")


def tensor_checker(type: str) -> Check:
    """Return a check whether a tensor lives on a device of ``type``."""

    def check(tensor: Any) -> bool:
        device = getattr(tensor, "device", None)
        return device is not None and device.type == type

    check.__doc__ = f"Return whether a tensor lives on a device of type {type!r}."
    return check
