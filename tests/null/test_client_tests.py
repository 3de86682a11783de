"""What ``accelerate.test_utils`` gives to the scripts and tests of other projects."""

from __future__ import annotations

import os
import sys
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from accelerate import Accelerator, PartialState, test_utils
from accelerate.state import AcceleratorState
from accelerate.test_utils import testing, training
from tests.support.environment import ROOT
from tests.support.ranks import RankServer, same_on_all


def test_the_backend_of_a_machine_without_an_accelerator() -> None:
    """``device, _, _ = get_backend()`` is how the guides of transformers find the device."""
    device, count, allocated = testing.get_backend()
    assert (device, count, allocated()) == ("cpu", 1, 0)
    assert (testing.torch_device, testing.device_count, testing.memory_allocated_func()) == ("cpu", 1, 0)
    assert test_utils.torch_device == "cpu"


def test_the_backend_of_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    from accelerate import device as devices

    cuda = devices.get("cuda")
    monkeypatch.setattr(devices, "detect", lambda: cuda)
    monkeypatch.setattr(cuda, "count", lambda: 4)
    monkeypatch.setattr(cuda, "memory_allocated", lambda index=None: 512)
    device, count, allocated = testing.get_backend()
    assert (device, count, allocated()) == ("cuda", 4, 512)
    assert not skips(testing.require_multi_device)
    assert not skips(testing.require_non_cpu)
    assert skips(testing.require_single_device)
    assert skips(testing.require_cpu)


def skips(decorator: Any) -> str:
    """Return why a decorator skips a test here; empty if it does not."""

    def case() -> None: ...

    marked = decorator(case)
    return getattr(marked, "__unittest_skip_why__", "")


# Those that skip on a machine without an accelerator.
SKIPPED = {
    "require_cuda", "require_cuda_or_hpu", "require_cuda_or_xpu", "require_mlu", "require_mps",
    "require_musa", "require_neuron", "require_npu", "require_sdaa", "require_tpu", "require_xpu",
    "require_non_cpu", "require_single_device", "require_single_gpu", "require_single_xpu",
    "require_multi_device", "require_multi_gpu", "require_multi_gpu_or_xpu", "require_multi_xpu",
}  # fmt: skip
RUN = {
    "require_cpu", "require_fp16", "require_non_hpu", "require_non_torch_xla", "require_non_xpu",
    "require_fsdp2", "require_tp", "require_pippy",
}  # fmt: skip


def test_a_test_is_skipped_where_it_cannot_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each name is a decorator; a machine without a device skips what Accelerate 1.15 skips on it."""
    names = [
        name for name in dir(testing) if name.startswith("require_") and name != "require_torch_min_version"
    ]
    reasons = {name: skips(getattr(testing, name)) for name in names}
    assert len(names) == 55
    assert {name for name in SKIPPED if not reasons[name]} == set()
    assert {name for name in RUN if reasons[name]} == set()
    assert reasons["require_multi_gpu"] == "test requires several cuda"
    packages = ("transformers", "wandb", "timm", "dvclive", "clearml")
    for name in packages:
        assert bool(reasons[f"require_{name}"]) != is_importable(name)

    @testing.require_multi_gpu
    class Case(unittest.TestCase): ...

    assert getattr(Case, "__unittest_skip__", False)
    assert skips(testing.require_torch_min_version(version="99.0"))
    assert not skips(testing.require_torch_min_version(version="2.0"))
    monkeypatch.delenv("RUN_SLOW", raising=False)
    assert "RUN_SLOW=1" in skips(testing.slow)
    monkeypatch.setenv("RUN_SLOW", "yes")
    assert not skips(testing.slow)
    assert skips(testing.skip) == "test is skipped"


def is_importable(package: str) -> bool:
    from importlib.util import find_spec

    return find_spec(package) is not None


@pytest.mark.filterwarnings("ignore::pytest.PytestUnknownMarkWarning")
def test_first_tests_are_marked(monkeypatch: pytest.MonkeyPatch) -> None:
    def case() -> None: ...

    # This project's own suite refuses marks that it does not know.
    monkeypatch.setattr(pytest.mark, "_config", None)
    (mark,) = testing.run_first(case).pytestmark
    assert (mark.name, mark.args) == ("order", (1,))


def test_commands() -> None:
    command = test_utils.get_launch_command(
        num_processes=2, multi_gpu=True, main_process_port=None, tee=False
    )
    assert command == ["accelerate", "launch", "--num_processes=2", "--multi_gpu", "--tee=False"]
    default = ["accelerate", "launch", "--num_processes=1", "--monitor_interval=0.1"]
    assert default == test_utils.DEFAULT_LAUNCH_COMMAND
    code = "import os, sys; print(os.environ.get('HOW'), file=sys.stderr)"
    run = testing.run_command([sys.executable, "-c", code], return_stdout=True, env={**os.environ, "HOW": 3})
    assert run == "3\n"
    assert testing.run_command([sys.executable, "-c", "print(1)"]) is None
    with pytest.raises(testing.SubprocessCallException, match=r"exit status 3(?s:.*)the reason"):
        testing.run_command([sys.executable, "-c", "import sys; print('the reason'); sys.exit(3)"])


def test_the_number_of_a_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTEST_XDIST_WORKER", "gw7")
    assert testing.pytest_xdist_worker_id() == 7


def test_assertions() -> None:
    with testing.assert_exception(ValueError, "bad"):
        raise ValueError("very bad")
    with (
        pytest.raises(AssertionError, match="'worse' in the message"),
        testing.assert_exception(ValueError, "worse"),
    ):
        raise ValueError("very bad")
    with pytest.raises(AssertionError, match="nothing was raised"), testing.assert_exception(ValueError):
        pass
    with pytest.raises(KeyError), testing.assert_exception(ValueError):
        raise KeyError("x")
    assert testing.capture_call_output(print, "hello", end="") == "hello"


def compared() -> tuple[bool, bool]:
    state = PartialState(cpu=True)
    equal, other = torch.ones(2), torch.full((2,), float(state.process_index))
    return test_utils.are_the_same_tensors(equal), test_utils.are_the_same_tensors(other)


def test_tensors_of_all_processes_are_compared(ranks: RankServer) -> None:
    assert same_on_all(ranks(2, compared)) == (True, False)


def run(case: type[unittest.TestCase]) -> unittest.TestResult:
    result = unittest.TestResult()
    unittest.defaultTestLoader.loadTestsFromTestCase(case).run(result)
    assert result.testsRun
    assert result.wasSuccessful(), result.failures + result.errors
    return result


def test_test_cases() -> None:
    folders: list[Path] = []

    class InFolder(testing.TempDirTestCase):
        def test_one(self) -> None:
            self.write()

        def test_two(self) -> None:
            self.write()

        def write(self) -> None:
            folders.append(self.tmpdir)
            assert list(self.tmpdir.iterdir()) == []
            (self.tmpdir / "file").write_text("x")
            (self.tmpdir / "folder").mkdir()

    class Forgetting(testing.AccelerateTestCase):
        def test_it(self) -> None:
            Accelerator(cpu=True, mixed_precision="bf16")

    class Mocking(testing.MockingTestCase):
        def test_it(self) -> None:
            self.add_mocks([mock.patch.dict(os.environ, {"OF_A_MOCK": "1"})])
            assert os.environ["OF_A_MOCK"] == "1"

    run(InFolder)
    assert len(set(folders)) == 1
    assert not folders[0].exists()
    run(Forgetting)
    assert AcceleratorState._shared_state == {}
    run(Mocking)
    assert "OF_A_MOCK" not in os.environ


def test_a_line_is_learned(capsys: pytest.CaptureFixture[str]) -> None:
    """The points are those of numpy's generator, as in 1.15: a test may know their values."""
    data = training.RegressionDataset(length=4, seed=3)
    assert len(data) == 4
    assert data[0] == {"x": pytest.approx(2.040919), "y": pytest.approx(7.0365734)}
    model = test_utils.RegressionModel(a=1, b=2)
    torch.testing.assert_close(model(torch.ones(2)), torch.full((2,), 3.0))
    model(torch.ones(2))
    assert (
        capsys.readouterr().out == "Model dtype: torch.float32, torch.float32. Input dtype: torch.float32\n"
    )
    assert [name for name, _ in model.named_parameters()] == ["a", "b"]


def test_they_cost_nothing_until_they_are_used() -> None:
    code = "from accelerate.test_utils.testing import run_command; import sys; print('torch' in sys.modules)"
    said = testing.run_command(
        [sys.executable, "-c", code], return_stdout=True, env={**os.environ, "PYTHONPATH": ROOT / "src"}
    )
    assert said == "False\n"
