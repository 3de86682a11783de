"""The worked examples of CONTRIBUTING.md: each file is put where its title says, and used.

A plug-in is found by being a file of a folder, so a second folder is added to the path of its package. That
is done in a process of its own, before anything has looked there: enumerations and the choices of flags are
made from the files too.
"""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
import types
from collections.abc import Generator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.support.environment import ROOT, clean
from tests.support.plugin_files import read_anew, reload_plugins, rows_of

FENCE = re.compile(r"^```python title=\"([^\"]+)\"\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PLUGINS = "src/accelerate/"
# What runs with the files in place: facts about them, as JSON, in the last line.
INSIDE = """
import json, sys
from pathlib import Path
from tests.null import test_docs_examples as examples
with examples.in_place(Path(sys.argv[1])):
    print(json.dumps(examples.facts()))
"""


def shown() -> dict[str, str]:
    """The titled examples of CONTRIBUTING.md, by title."""
    return dict(FENCE.findall((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")))


def plugins() -> list[str]:
    """Titles of those that are files of the package."""
    return [title for title in shown() if title.startswith(PLUGINS)]


@contextmanager
def in_place(folder: Path) -> Generator[None]:
    """The example files, written below ``folder``, are files of the package's folders inside the block."""
    rooms: dict[str, Any] = {}
    for title in plugins():
        path = folder / title.removeprefix(PLUGINS)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(shown()[title], encoding="utf-8")
        rooms[path.parent.name] = importlib.import_module(f"accelerate.{path.parent.name}")
    for name, package in rooms.items():
        package.__path__.append(str(folder / name))
    reload_plugins([title.removeprefix(PLUGINS) for title in plugins()])
    try:
        yield
    finally:
        for name, package in rooms.items():
            package.__path__.remove(str(folder / name))
        reload_plugins([title.removeprefix(PLUGINS) for title in plugins()])


class Passed:
    """Counts the tests that passed."""

    count = 0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self.count += report.when == "call" and report.passed


def facts() -> dict[str, Any]:
    """What is so with the examples in place."""
    from docs import generate

    from accelerate.core.errors import DeviceError
    from accelerate.utils import DistributedType
    from tests.support.devices import device_named, devices_of, machine

    try:
        device_named("aurorra")
        error = ""
    except DeviceError as unknown:
        error = str(unknown)
    files, here = ["dev/aurora0", "dev/aurora1", "dev/aurorafs"], Path(sys.argv[1]) / "machine"
    several = (
        machine(here, files, build={}),
        machine(here, files, build={}, env={"AURORA_VISIBLE_DEVICES": "1"}),
    )
    passed = Passed()
    laws = ["-q", "-p", "no:cacheprovider", "tests/null/test_device_laws.py", "-k", "aurora"]
    return {
        "detected": [[device.type, count] for device, count in map(devices_of, several)],
        "its type": DistributedType("MULTI_AURORA").value,
        "suggested": error,
        "laws": [int(pytest.main(laws, plugins=[passed])), passed.count],
        "table": generate.support_table(),
        "help": {name: help_of(name) for name in ("", "launch", "devices")},
        "devices": output_of("devices"),
        "double": train_in_double(),
        "tracked": tracked(Path(sys.argv[1]) / "logs"),
    }


def tracked(folder: Path) -> str:
    """What the tracker of the example has written after two numbers."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, log_with="csv", project_dir=str(folder))
    accelerator.init_trackers("run", config={"lr": 0.1})
    accelerator.log({"loss": 0.5, "accuracy": 0.75}, step=3)
    accelerator.end_training()
    return (folder / "run.csv").read_text(encoding="utf-8")


def output_of(*words: str) -> str:
    """What ``accelerate WORDS`` prints."""
    from click.testing import CliRunner

    from tests.support.command import group

    return CliRunner().invoke(group(), words, catch_exceptions=False).output


def help_of(command: str) -> str:
    return output_of(*([command] if command else []), "--help")


def train_in_double() -> dict[str, Any]:
    """Trains a model with ``mixed_precision="fp64"``, and one that is float64 from the start."""
    import torch

    from accelerate import Accelerator

    inputs = torch.randn(8, 3)
    accelerator = Accelerator(cpu=True, mixed_precision="fp64")
    weights = []
    for prepared in (True, False):
        torch.manual_seed(0)
        model = torch.nn.Linear(3, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        x = inputs
        if prepared:
            plan = str(accelerator.plan(model, optimizer))
            model, optimizer = accelerator.prepare(model, optimizer)
        else:
            model, x = model.double(), inputs.double()
        loss = model(x).square().mean()
        accelerator.backward(loss)
        optimizer.step()
        weights.append(model.weight.tolist())
    return {"dtype": str(loss.dtype), "equal": weights[0] == weights[1], "plan": plan}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """``facts()`` of a fresh process that has the example files."""
    folder = tmp_path_factory.mktemp("examples")
    done = subprocess.run(
        [sys.executable, "-c", INSIDE, str(folder)],
        cwd=ROOT,
        env=clean({"HF_HOME": folder}),
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def test_there_is_an_example_of_each_kind() -> None:
    rooms = sorted({title.removeprefix(PLUGINS).partition("/")[0] for title in plugins()})
    assert rooms == ["cli", "device", "precision", "strategy", "track"]
    assert "a setting" in shown()


def test_the_device_is_detected_and_counted(found: dict[str, Any]) -> None:
    assert found["detected"] == [["aurora", 2], ["aurora", 1]]
    assert found["its type"] == "MULTI_AURORA"
    assert "did you mean 'aurora'?" in found["suggested"]


def test_the_device_inherits_the_laws_of_devices(found: dict[str, Any]) -> None:
    code, count = found["laws"]
    assert code == 0
    assert count >= 12


def test_every_example_appears_in_the_table_of_the_readme(found: dict[str, Any]) -> None:
    rows = {row.split("|")[1].strip(" *"): row for row in found["table"].splitlines()}
    new = {"Devices": "aurora", "Strategies": "averaging", "Mixed precision": "fp64", "Trackers": "csv"}
    for row, name in new.items():
        assert f"`{name}`" in rows[row]
    assert "`accelerate devices`" in rows["Commands"]
    # It says that it was not run on one.
    assert "`aurora`" in rows["Devices"].split("|")[3]


def test_the_command_is_listed_and_runs(found: dict[str, Any]) -> None:
    assert re.search(r"^ +devices +Show which accelerators", found["help"][""], re.MULTILINE)
    assert "the variable that hides some" in " ".join(found["help"]["devices"].split())
    assert found["devices"] == "no accelerator: the CPU\n"


def test_the_precision_is_a_choice_of_the_launcher(found: dict[str, Any]) -> None:
    assert "fp64" in re.findall(r"--mixed_precision (\S+)", found["help"]["launch"])[0].split("|")


def test_the_precision_computes_in_double(found: dict[str, Any]) -> None:
    assert found["double"]["dtype"] == "torch.float64"
    assert found["double"]["equal"]
    assert "precision: weights and inputs become float64" in found["double"]["plan"]


def test_the_tracker_writes_what_is_logged(found: dict[str, Any]) -> None:
    assert found["tracked"].splitlines() == ["3,loss,0.5", "3,accuracy,0.75"]


def test_another_package_adds_a_device_through_an_entry_point(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    match = re.search(r'\[project\.entry-points\."([\w.]+)"\]\n(\w+) = "([\w.]+):(\w+)"', toml)
    assert match is not None
    group, name, module, attribute = match.groups()
    path = tmp_path / Path(*module.split(".")).with_suffix(".py")
    path.parent.mkdir()
    path.write_text(shown()[f"{PLUGINS}device/aurora.py"], encoding="utf-8")
    facts = tmp_path / "torch_aurora-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: torch_aurora\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}:{attribute}\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    try:
        with read_anew(group) as devices:
            assert name in devices.names()
            assert devices.get(name).visible_variable == "AURORA_VISIBLE_DEVICES"
    finally:
        for loaded in [known for known in sys.modules if known.startswith("torch_aurora")]:
            del sys.modules[loaded]


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The names of the example of a setting, as a module has them."""
    module = types.ModuleType("example_of_a_setting")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(shown()["a setting"], vars(module))
    return vars(module)


def test_the_setting_has_the_names_that_the_guide_says(example: dict[str, Any]) -> None:
    (row,) = rows_of(example["WatchSettings"])
    assert row.spellings == ("--report_every", "--report-every")
    assert (row.variable, row.path, row.topic) == ("ACCELERATE_REPORT_EVERY", "report_every", "Output")
    guide = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert all(f"`{name}`" in guide for name in (*row.spellings, row.variable, row.path))


def test_the_setting_takes_code_before_variable_before_default(
    example: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    report_every = example["report_every"]
    monkeypatch.delenv("ACCELERATE_REPORT_EVERY", raising=False)
    assert report_every() == 100
    monkeypatch.setenv("ACCELERATE_REPORT_EVERY", "7")
    assert report_every() == 7
    assert report_every(3) == 3


def test_the_launcher_hands_the_setting_on(
    example: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.support import launch_plans

    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    launch_plans.add_settings(monkeypatch, example["WatchSettings"])
    request = launch_plans.request(report_every="3")
    assert request.script_variables() == {"ACCELERATE_REPORT_EVERY": "3"}
    assert "ACCELERATE_REPORT_EVERY, report_every:" in launch_plans.help_text(width=200)
