"""What is sent to the ranks of a notebook, what is refused, and in which words."""

from __future__ import annotations

import os
import pickle
import sys
import threading
import types
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator, notebook_launcher
from accelerate.core.errors import LaunchError, SettingError, UnknownNameError
from accelerate.launch.notebook import launchers, payload
from accelerate.utils import PrepareForLaunch
from tests.support import launch_plans

LOCK = threading.Lock()


def read(path: Path) -> tuple[dict[str, Any], Any, tuple[Any, ...]]:
    with path.open("rb") as file:
        return pickle.load(file), *pickle.load(file)


def test_a_closure_arrives_with_what_it_encloses(tmp_path: Path) -> None:
    factor = torch.tensor(3.0, requires_grad=True)
    payload.write_payload(tmp_path / "parcel", lambda x: x * factor, (2,))
    start, function, args = read(tmp_path / "parcel")
    assert start["path"] == sys.path
    assert function(*args).item() == 6
    assert function.__code__.co_filename == __file__  # for the lines of tracebacks


def test_a_module_that_no_other_process_could_import_goes_by_value(tmp_path: Path) -> None:
    """Runners of tests load files that are not on the path."""
    module = types.ModuleType("hidden_tests")
    module.__file__ = "/nowhere/hidden_tests.py"
    exec("BASE = 2\ndef power(x): return BASE ** x", vars(module))
    sys.modules["hidden_tests"] = module
    try:
        payload.write_payload(tmp_path / "parcel", module.power, (5,))
    finally:
        del sys.modules["hidden_tests"]
    _, function, args = read(tmp_path / "parcel")
    assert function(*args) == 32


def inner() -> None:
    LOCK.acquire()


def outer() -> None:
    inner()


def hidden(function: Any) -> Any:
    """The function as a notebook's: pickled by value, so that its variables are."""
    copy = types.FunctionType(function.__code__, globals() | {"inner": INNER}, function.__name__)
    copy.__module__ = "__main__"
    return copy


INNER = types.FunctionType(inner.__code__, globals(), "inner")
INNER.__module__ = "__main__"


@pytest.mark.parametrize(
    ("function", "args", "name"),
    [
        (hidden(inner), (), "the variable 'LOCK', which inner() uses, (lock)"),
        (hidden(outer), (), "the variable 'LOCK', which inner() uses, (lock)"),
        (print, (1, LOCK), "argument 2 (lock)"),
    ],
)
def test_what_cannot_be_pickled_is_named(function: Any, args: Any, name: str, tmp_path: Path) -> None:
    with pytest.raises(payload.UnpicklableFunctionError) as caught:
        payload.write_payload(tmp_path / "parcel", function, args)
    assert f"{name} cannot be pickled: TypeError" in caught.value.why


def test_an_accelerator_made_outside_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LaunchError, match="an Accelerator that was made outside"):
        payload.write_payload(tmp_path / "parcel", print, ({"a": Accelerator(cpu=True)},))


def test_a_tensor_with_a_graph_is_refused(tmp_path: Path) -> None:
    loss = torch.ones(2, requires_grad=True).exp()
    with pytest.raises(LaunchError, match=r"shape \(2,\) that is the result of Exp, with its graph"):
        payload.write_payload(tmp_path / "parcel", print, (loss,))
    plain = pickle.loads(payload.dump_by_value({"loss": loss}, bare=True))["loss"]
    assert torch.equal(plain, loss)
    assert not plain.requires_grad


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"args": 3}, r"args=\(3,\)"),
        ({"num_processes": -1}, "num_processes is -1"),
        ({"num_processes": False}, "num_processes is False"),
        ({"num_processes": "two"}, "num_processes is the text 'two'"),
        ({"max_restarts": -1}, "max_restarts is -1"),
        ({"num_nodes": 2, "node_rank": 2}, "node_rank is 2, but num_nodes is 2"),
        ({"use_port": "many"}, "use_port is 'many'"),
        ({"use_port": 65536}, "use_port is 65536"),
    ],
)
def test_a_wrong_argument_is_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        notebook_launcher(print, **options)


@pytest.mark.parametrize(
    ("endpoint", "meets"),
    [("", ("127.0.0.1", 29511)), ("node-0:7", ("node-0", 7)), ("node-0", ("node-0", 29511))],
)
def test_an_endpoint_stands_for_address_and_port(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, endpoint: str, meets: tuple[str, int]
) -> None:
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    calls: list[list[Any]] = []
    monkeypatch.setattr(
        "accelerate.launch.notebook.launchers.call_on_machines",
        lambda function, args, flags, **options: calls.append([*flags]),
    )
    notebook_launcher(print, num_processes=1, num_nodes=2, rdzv_endpoint=endpoint, use_port=29511)
    words = [str(word) for word in calls[0]]
    flags = {name.removeprefix("--"): value for name, value in zip(words[::2], words[1::2], strict=False)}
    endpoint_of_launch = launch_plans.meeting_point(launch_plans.request(**flags))
    assert (endpoint_of_launch.host, endpoint_of_launch.port) == meets


def test_no_gpu_is_one_process_in_this_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs pass ``torch.cuda.device_count()``."""
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    assert notebook_launcher(os.getpid, num_processes=0) == [os.getpid()]


def test_an_unknown_precision_is_refused_before_anything_starts() -> None:
    with pytest.raises(UnknownNameError, match="did you mean 'bf16'"):
        notebook_launcher(print, mixed_precision="bf61")


def test_a_function_that_does_not_run_when_called_is_refused() -> None:
    def generate() -> Any:
        yield 1

    async def wait() -> None:
        return None

    for function in (generate, wait):
        with pytest.raises(SettingError, match="does not run when it is called"):
            notebook_launcher(function, num_processes=1)


def test_a_function_that_was_called_already_is_refused() -> None:
    with pytest.raises(SettingError, match="pass the function itself"):
        notebook_launcher(print())  # type: ignore[func-returns-value]


def test_a_rank_starts_no_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {
        "RANK": "1",
        "WORLD_SIZE": "2",
        "LOCAL_RANK": "1",
        "MASTER_ADDR": "localhost",
    }.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_PORT", "29999")
    with pytest.raises(LaunchError, match="this one is rank 1 of 2 itself"):
        notebook_launcher(print, num_processes=2)


def test_one_process_is_this_one_and_gets_the_precision(capsys: pytest.CaptureFixture[str]) -> None:
    def train(scale: int) -> tuple[int, int, str]:
        return os.getpid(), scale, Accelerator(cpu=True).mixed_precision

    earlier = Accelerator(cpu=True)  # of another cell
    before = dict(os.environ)
    assert notebook_launcher(train, (3,), 1, mixed_precision="bf16") == [(os.getpid(), 3, "bf16")]
    assert earlier.mixed_precision == Accelerator(cpu=True).mixed_precision == "no"
    assert capsys.readouterr().out == "Launching training on CPU.\n"
    assert dict(os.environ) == before


@pytest.mark.parametrize(
    ("kind", "told"), [("NO", ("9", "1", "1")), ("MULTI_GPU", ("9", "1", "1")), ("XLA", (None, None, "1"))]
)
def test_prepare_for_launch_says_which_rank_it_is(
    kind: str, told: tuple[Any, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As 1.15 does, run there; a TPU's runtime tells its processes itself."""
    monkeypatch.setenv("NODE_RANK", "2")
    monkeypatch.setenv("NPROC", "4")
    call = pickle.loads(pickle.dumps(PrepareForLaunch(divmod, distributed_type=kind)))
    assert (call.launcher, call.distributed_type, call.debug) == (divmod, kind, False)
    assert call(1, 7, 2) == (3, 1)
    assert tuple(os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "FORK_LAUNCHED")) == told


def test_prepare_for_launch_needs_a_file_to_debug() -> None:
    with pytest.raises(LaunchError, match="ACCELERATE_DEBUG_RDV_FILE"):
        PrepareForLaunch(print, debug=True)(0)


def test_processes_of_a_runtime_are_started_by_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a TPU the processes are PyTorch/XLA's own; with a fake of it."""
    calls: list[Any] = []
    fake = types.ModuleType("torch_xla")
    vars(fake)["launch"] = lambda function, args, start_method: calls.append((function, args, start_method))
    monkeypatch.setitem(sys.modules, "torch_xla", fake)
    from accelerate import device

    monkeypatch.setattr(launchers, "_detect_devices", lambda: (device.get("xla"), 4))
    assert launchers.notebook_launcher(divmod, (7, 2), use_port=0) == [None] * 4
    ((function, args, method),) = calls
    assert (function.launcher, function.distributed_type, args, method) == (divmod, "XLA", (7, 2), "fork")


@pytest.mark.parametrize(("kind", "count"), [("cuda", 1), ("cpu", 0)])
def test_colab_with_fewer_than_two_accelerators_trains_in_this_process(
    kind: str, count: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """As in 1.x; elsewhere more processes than GPUs are an error."""
    from accelerate import device

    shell = type("Shell", (), {"__module__": "google.colab._shell"})()
    ipython = types.ModuleType("IPython")
    vars(ipython)["get_ipython"] = lambda: shell
    monkeypatch.setattr(launchers, "_detect_devices", lambda: (device.get(kind), count))
    if kind == "cuda":
        with pytest.raises(SettingError, match="num_processes is 2, but there are 1 cuda devices"):
            notebook_launcher(os.getpid, num_processes=2)
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert notebook_launcher(os.getpid, num_processes=2) == [os.getpid()]
    assert "Colab has fewer than two accelerators: num_processes=2 is not used." in capsys.readouterr().out
