"""The line of a notebook that was the first to use a device, for the error that it makes.

A process that has used a device cannot be copied to others that use it. When functions cannot be sent, that
is an error, and whoever reads it wants to know which line it was. So, in a notebook, from the first use of a
launcher's name on, the first use of each device is noted: its line where torch shows it, else its cell.
"""

from __future__ import annotations

import linecache
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from accelerate import device as devices
from accelerate.device import Device

_first_uses: dict[str, str] = {}
_watched_shells: list[Any] = []  # the shell that tells when a cell has run


def find_shell() -> Any:
    """IPython's shell in this process, or None; nothing is imported."""
    ipython = sys.modules.get("IPython")
    return ipython.get_ipython() if ipython is not None else None


def record_first_uses() -> None:
    """Begins to note the first use of devices, if this is a notebook."""
    shell = find_shell()
    if shell is None or not hasattr(shell, "kernel") or shell in _watched_shells:
        return
    _watched_shells.append(shell)
    shell.events.register("pre_run_cell", lambda info: _install_recorders())
    shell.events.register("post_run_cell", _record_cell)
    _install_recorders()


def used_devices() -> dict[str, str]:
    """Device type -> what is known of its first use, of the devices that this process has used."""
    unknown = "nobody noted where; import notebook_launcher in the first cell, and this will say it"
    return {
        each.type: _first_uses.get(each.type, unknown) for each in _known_devices() if each.is_initialized()
    }


def cell_of(file: str) -> str | None:
    """Return IPython's name of the cell with this file name, ``"Cell In[3]"``; None for a file."""
    name_of: Callable[[str], Any] | None = getattr(
        getattr(find_shell(), "compile", None), "format_code_name", None
    )
    name_parts = None if name_of is None else name_of(file)
    return None if name_parts is None else " ".join(name_parts)


def _known_devices() -> list[Device]:
    torch = sys.modules.get("torch")
    if torch is None:
        return []
    torch_devices = devices.accelerators()
    accelerator = getattr(torch, "accelerator", None)
    current = accelerator.current_accelerator() if accelerator is not None else None
    if current is not None and current.type not in {each.type for each in torch_devices}:
        torch_devices.append(devices.get(current.type))
    return torch_devices


def _install_recorders() -> None:
    """Has the first use of each device noted as it happens."""
    for each in _known_devices():
        module: Any = getattr(sys.modules["torch"], each.type, None)
        start = getattr(module, "_lazy_init", None)
        if start is not None and not isinstance(start, _FirstDeviceUseProbe) and not each.is_initialized():
            module._lazy_init = _FirstDeviceUseProbe(each, module, start)


def _record_cell(result: Any) -> None:
    """Notes the cell, where the line was not seen."""
    for each in _known_devices():
        if each.is_initialized():
            _first_uses.setdefault(each.type, f"cell In[{result.execution_count}] did")


class _FirstDeviceUseProbe:
    """Stands for the function with which torch starts a device, until that is called.

    Args:
        device: which.
        module: torch's module of it.
        start: that function.
    """

    def __init__(self, device: Device, module: Any, start: Callable[..., Any]) -> None:
        self.device, self.module, self.start = device, module, start

    def __call__(self, *args: Any, **options: Any) -> Any:
        if not self.device.is_initialized():
            _first_uses.setdefault(self.device.type, _describe_stack(traceback.extract_stack()[:-1]))
        self.module._lazy_init = self.start
        return self.start(*args, **options)


def _describe_stack(stack: list[traceback.FrameSummary]) -> str:
    """``"Cell In[2], line 4: x = x.to(...)"``, and the line of the library that it called, if any."""
    torch = str(Path(sys.modules["torch"].__file__ or "").parent)
    outside = [frame for frame in stack if not frame.filename.startswith((torch, "<frozen"))]
    cells = [frame for frame in outside if cell_of(frame.filename)]
    places = [*cells[-1:], *([outside[-1]] if outside and outside[-1] not in cells[-1:] else [])]
    return ", through ".join(_describe_frame(frame) for frame in places)


def _describe_frame(frame: traceback.FrameSummary) -> str:
    line = (linecache.getline(frame.filename, frame.lineno or 0)).strip()
    name = cell_of(frame.filename) or frame.filename
    return f"{name}, line {frame.lineno}: {line}"
