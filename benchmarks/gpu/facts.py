"""Prints what the rows run on, as one line of JSON: device, memory, versions of this environment."""

from __future__ import annotations

import json
from importlib import metadata

PACKAGES = ("torch", "accelerate", "safetensors", "torchao", "transformer_engine", "triton")


def main() -> None:
    import torch

    if not torch.accelerator.is_available():
        print(json.dumps({"type": "cpu", "count": 0, "name": "no accelerator", "memory": 0}))
        return
    kind = torch.accelerator.current_accelerator().type
    module = torch.get_device_module(kind)
    installed = {name: version for name in PACKAGES if (version := find_version(name))}
    facts = {
        "type": kind,
        "count": module.device_count(),
        "name": module.get_device_name(0),
        "memory": module.mem_get_info(0)[1],
        "packages": installed,
    }
    print(json.dumps(facts))


def find_version(name: str) -> str | None:
    """The version of a package, or None where it is not installed."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


if __name__ == "__main__":
    main()
