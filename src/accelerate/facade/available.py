"""``is_<device>_available`` and its kin: questions about the devices at hand, asked the way 1.x spells them.

Each function here makes one such question; the table of public names gives it the device. All answers come
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
from accelerate.core.versions import is_torch_version

Question = Callable[..., bool]


def _signed(question: Question, doc: str, **arguments: Any) -> Question:
    """``question`` with its documentation and the arguments, with defaults, that callers see."""
    keyword = inspect.Parameter.POSITIONAL_OR_KEYWORD
    shown = [inspect.Parameter(name, keyword, default=value) for name, value in arguments.items()]
    signature = inspect.Signature(shown)

    def asked(*args: Any, **kwargs: Any) -> bool:
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        return question(**given.arguments)

    asked.__doc__ = doc
    asked.__signature__ = signature  # type: ignore[attr-defined]
    return asked


def device_checker(type: str, argument: str = "check_device") -> Question:
    """Whether a device of ``type`` can be used.

    Args:
        type: the device type.
        argument: the argument that asks to look at the device itself; that is always done.
    """
    arguments = {argument: False} if argument else {}
    return _signed(
        lambda **_: devices.get(type).available(),
        f"Whether a device of type {type!r} can be used by this process.",
        **arguments,
    )


def version_checker(type: str, min_version: str) -> Question:
    """Whether a device of ``type`` can be used, and torch is at least of a version."""
    return _signed(
        lambda min_version: is_torch_version(">=", min_version) and devices.get(type).available(),
        f"Whether a device of type {type!r} can be used and torch is ``min_version`` or newer.",
        min_version=min_version,
    )


def kind_checker(type: str) -> Question:
    """Whether a device of ``type`` can be used, and what it is made of."""

    def question(check_is_tpu: bool, check_is_gpu: bool) -> bool:
        if check_is_tpu and check_is_gpu:
            raise SettingError(
                "check_is_tpu and check_is_gpu are both set", why="a process computes on one kind of device"
            )
        device = devices.get(type)
        if not device.available() or not (check_is_tpu or check_is_gpu):
            return device.available()
        return ("TPU" in device.name()) == check_is_tpu

    return _signed(
        question,
        f"Whether a device of type {type!r} can be used, and whether it is a TPU or a GPU.",
        check_is_tpu=False,
        check_is_gpu=False,
    )


def model_checker(type: str, name: str) -> Question:
    """Whether the device of ``type`` is the model ``name``."""

    def question() -> bool:
        device = devices.get(type)
        return device.available() and device.name() == name

    return _signed(question, f"Whether the {type!r} device at hand is a {name}.")


def build_checker(type: str, toolkit: str) -> Question:
    """Whether torch was built for ``toolkit`` and a device of ``type`` can be used."""

    def question() -> bool:
        import torch

        return getattr(torch.version, toolkit, None) is not None and devices.get(type).available()

    return _signed(question, f"Whether torch was built for {toolkit} and finds a device.")


def format_checker(type: str, dtype: str) -> Question:
    """Whether the device of ``type`` computes in ``dtype``."""

    def question() -> bool:
        device = devices.get(type)
        return device.available() and device.supports(dtype)

    return _signed(question, f"Whether the {type!r} device at hand computes in {dtype}.")


def bf16_checker(tpu: str) -> Question:
    """Whether the best device here computes in bfloat16; devices of type ``tpu`` may be left out."""

    def question(ignore_tpu: bool) -> bool:
        device = devices.detect()
        return device.supports("bf16") and not (ignore_tpu and device.type == tpu)

    return _signed(
        question, "Whether the best device of this machine computes in bfloat16.", ignore_tpu=False
    )


def is_fp16_available() -> bool:
    """Whether the best device of this machine computes in float16."""
    return devices.detect().supports("fp16")


def is_torch_distributed_available() -> bool:
    """Whether this torch was built with torch.distributed."""
    import torch

    return torch.distributed.is_available()


def backend_checker(backend: str) -> Question:
    """Whether this torch has a communication backend."""

    def question() -> bool:
        import torch

        return torch.distributed.is_available() and torch.distributed.is_backend_available(backend)

    return _signed(question, f"Whether this torch has the communication backend {backend}.")


def _attribute(home: str) -> Any:
    """The attribute ``package.module:name`` of another package; None where it is absent."""
    module, _, name = home.partition(":")
    if not packages.installed(module.partition(".")[0]) or not packages.installed(module):
        return None
    return getattr(import_module(module), name, None)


def feature_checker(home: str, feature: str) -> Question:
    """Whether the set ``home`` of another package has ``feature``."""
    return _signed(
        lambda: feature in (_attribute(home) or ()), f"Whether {home.partition(':')[0]} has {feature}."
    )


def asking(home: str) -> Question:
    """Whether the function ``home`` of another package says yes; it may add a reason to its answer."""

    def question() -> bool:
        ask = _attribute(home)
        answer = ask() if ask else False
        return bool(answer[0] if isinstance(answer, tuple) else answer)

    return _signed(question, f"Whether {home.partition('.')[0]} says so.")


def tensor_checker(type: str) -> Question:
    """Whether a tensor lives on a device of ``type``."""

    def question(tensor: Any) -> bool:
        device = getattr(tensor, "device", None)
        return device is not None and device.type == type

    question.__doc__ = f"Whether a tensor lives on a device of type {type!r}."
    return question
