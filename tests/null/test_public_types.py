"""The types that an editor shows for what a training script writes, told by pyright."""

from __future__ import annotations

import ast
import importlib
import json
import os
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.null.test_reference import OBJECTS
from tests.support.environment import ROOT
from tests.support.long_run import LONG_RUN

SCRIPT = """
from typing import Any
import torch
from torch import nn
from torch.utils.data import DataLoader
from accelerate import Accelerator, cpu_offload, load_checkpoint_and_dispatch
from accelerate.utils import broadcast, gather, pad_across_processes, reduce, wait_for_everyone

dataset: Any = None

class Net(nn.Module):
    def loss(self) -> torch.Tensor: ...

accelerator = Accelerator()
net = Net()
sgd = torch.optim.SGD(net.parameters())
loader: DataLoader[dict[str, torch.Tensor]] = DataLoader(dataset)
schedule = torch.optim.lr_scheduler.StepLR(sgd, 1)
objects: list[Any] = [net]
tensor, tree = torch.ones(1), {"loss": torch.ones(1)}

reveal_type(accelerator.prepare(net))  # Net
reveal_type(accelerator.prepare(net, sgd))  # tuple[Net, SGD]
reveal_type(accelerator.prepare(net, sgd, loader))  # tuple[Net, SGD, DataLoader[dict[str, Tensor]]]
reveal_type(accelerator.prepare(net, None, device_placement=[True, False]))  # tuple[Net, None]
six = accelerator.prepare(net, net, sgd, sgd, schedule, schedule)
reveal_type(six)  # tuple[Net, Net, SGD, SGD, StepLR, StepLR]
reveal_type(accelerator.prepare_model(net))  # Net
reveal_type(accelerator.prepare_data_loader(loader))  # DataLoader[dict[str, Tensor]]
reveal_type(accelerator.unwrap_model(net))  # Net
reveal_type(accelerator.skip_first_batches(loader, 2))  # DataLoader[dict[str, Tensor]]
reveal_type(accelerator.gather(tensor))  # Tensor
reveal_type(accelerator.gather_for_metrics((tensor, tensor)))  # tuple[Tensor, Tensor]
reveal_type(accelerator.gather_for_metrics(["a"], use_gather_object=True))  # list[str]
reveal_type(accelerator.reduce(tree))  # dict[str, Tensor]
reveal_type(accelerator.pad_across_processes(tensor))  # Tensor
reveal_type((gather(tensor), reduce(tree)))  # tuple[Tensor, dict[str, Tensor]]
reveal_type((broadcast(tensor), pad_across_processes(tensor)))  # tuple[Tensor, Tensor]
reveal_type((cpu_offload(net), load_checkpoint_and_dispatch(net, "folder")))  # tuple[Net, Net]
reveal_type(wait_for_everyone())  # None
reveal_type(accelerator.autocast_handler)  # AutocastKwargs | None
reveal_type(accelerator.tensor_parallel_rank)  # int
reveal_type(accelerator.sync_gradients)  # bool
reveal_type(accelerator.distributed_type)  # DistributedType
reveal_type(accelerator.parallelism_config)  # ParallelismConfig | None
first, *rest = accelerator.prepare(*objects)
"""


@pytest.fixture(scope="module")
def revealed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What one run of pyright says of the script, and in `make test-all` of what examples prepare."""
    pytest.importorskip("pyright", reason="`make check` installs pyright")
    folder = tmp_path_factory.mktemp("types")
    (folder / "pyrightconfig.json").write_text("{}")
    (folder / "train.py").write_text(SCRIPT)
    for path in (ROOT / "examples").glob("*.py") if LONG_RUN else ():
        (folder / path.name).write_text(reveal_prepared(path.read_text(encoding="utf-8")))
    command = [sys.executable, "-m", "pyright", "--outputjson", "--pythonpath", sys.executable, "-p"]
    result = subprocess.run([*command, str(folder)], capture_output=True, text=True, check=False)
    said: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for each in json.loads(result.stdout)["generalDiagnostics"]:
        said[Path(each["file"]).name].append(each)
    return said


def reveal_prepared(source: str) -> str:
    """The source with ``reveal_type`` of each target after each assignment of what ``prepare`` returns."""
    lines = source.splitlines()
    calls = [
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign)
        and isinstance(node.value, ast.Call)
        and ast.unparse(node.value.func).endswith(".prepare")
    ]
    for node in sorted(calls, key=lambda node: -node.lineno):
        lines.insert(
            node.end_lineno or node.lineno,
            f"{' ' * node.col_offset}reveal_type({ast.unparse(node.targets[0])})",
        )
    return "\n".join(lines)


@pytest.mark.timeout(300)
def test_prepared_and_gathered_objects_keep_their_types(
    revealed: dict[str, list[dict[str, Any]]],
) -> None:
    said = revealed["train.py"]
    assert [each["message"] for each in said if each["severity"] == "error"] == []
    shown = {each["range"]["start"]["line"]: each["message"] for each in said}
    lines = {n: line.partition("  # ")[2] for n, line in enumerate(SCRIPT.splitlines()) if "  # " in line}
    assert len(lines) == 23
    assert {n: shown.get(n, "").partition(" is ")[2].strip('"') for n in lines} == lines


@pytest.mark.skipif(not LONG_RUN, reason="half a minute of CPU; runs in `make test-all`")
@pytest.mark.timeout(300)
def test_no_type_is_lost_where_an_example_prepares(revealed: dict[str, list[dict[str, Any]]]) -> None:
    shown = {
        name: [each["message"] for each in said if each["severity"] == "information"]
        for name, said in revealed.items()
        if name != "train.py"
    }
    assert sum(len(messages) for messages in shown.values()) >= 15
    lost = {name: [m for m in messages if "Any" in m or "Unknown" in m] for name, messages in shown.items()}
    assert not any(lost.values()), lost


@pytest.mark.skipif(not LONG_RUN, reason="takes most of a minute; runs in `make test-all`")
@pytest.mark.timeout(600)
def test_documented_names_and_their_members_have_known_types() -> None:
    """As ``pyright --verifytypes`` counts: a type is unknown too if another checker may infer another one."""
    # It looks for the package with the python that is first on the PATH.
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    command = [sys.executable, "-m", "pyright", "--verifytypes", "accelerate", "--ignoreexternal"]
    result = subprocess.run(
        [*command, "--outputjson"],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"PATH": path},
    )
    symbols: list[dict[str, Any]] = json.loads(result.stdout)["typeCompleteness"]["symbols"]
    homes = tuple(defined_at(name) for name in OBJECTS)
    documented = [
        each
        for each in symbols
        for home in homes
        if each["name"] == home or (each["name"].startswith(f"{home}.") and "._" not in each["name"])
    ]
    unknown = [each["name"] for each in documented if not each["isTypeKnown"] or each.get("isTypeAmbiguous")]
    assert len(documented) > 900
    assert len(unknown) <= 0.03 * len(documented), unknown


def defined_at(name: str) -> str:
    """The name by which pyright knows a public name."""
    module, _, attribute = name.rpartition(".")
    found = getattr(importlib.import_module(module), attribute)
    return f"{getattr(found, '__module__', module)}.{getattr(found, '__qualname__', attribute)}"
