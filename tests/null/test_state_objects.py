"""The public attributes of the state objects and enumerations, in one process."""

from __future__ import annotations

import copy
import importlib
import logging
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate import Accelerator, DistributedType, PartialState
from accelerate.logging import MultiProcessAdapter
from accelerate.state import AcceleratorState, GradientState, is_initialized
from accelerate.utils import (
    ComputeEnvironment,
    FullyShardedDataParallelPlugin,
    PrecisionType,
    TorchDynamoPlugin,
    broadcast,
    send_to_device,
)
from tests.support.environment import ROOT, clean
from tests.support.long_run import LONG_RUN
from tests.support.worlds import fake_world

PEER = ROOT / ".venv-peer" / "bin" / "python"


def test_attributes_are_gone_with_the_world() -> None:
    """Also those of the Accelerator, until there is a new one: it is not this world's any more."""
    accelerator, state = Accelerator(cpu=True, mixed_precision="bf16"), PartialState()
    assert is_initialized()
    AcceleratorState._reset_state(reset_partial_state=True)
    assert not is_initialized()
    for view in (state, accelerator.state, accelerator):
        for name in ("device", "num_processes", "distributed_type", "is_main_process"):
            assert not hasattr(view, name)
        assert getattr(view, "mixed_precision", None) is None
        with pytest.raises(AttributeError, match="no open world"):
            _ = view.process_index
        with pytest.raises(RuntimeError, match="create a"):
            _ = view.device
    renewed = Accelerator(cpu=True)
    assert (renewed.mixed_precision, state.num_processes) == ("no", 1)
    assert (accelerator.state.mixed_precision, accelerator.num_processes) == ("no", 1), "those of the new one"


def test_a_state_takes_no_plugin_that_it_would_drop() -> None:
    """1.15 drops one beside an Accelerator, and refuses it before there is one."""
    plugins = {"fsdp_plugin": FullyShardedDataParallelPlugin(), "dynamo_plugin": TorchDynamoPlugin()}
    for _ in range(2):
        for name, plugin in plugins.items():
            with pytest.raises(ValueError, match="Accelerator\\("):
                AcceleratorState(mixed_precision="no", **{name: plugin})
        Accelerator(cpu=True)


def test_a_reset_of_the_choices_leaves_the_world() -> None:
    accelerator, state = Accelerator(cpu=True), PartialState()
    AcceleratorState._reset_state()
    assert (state.process_index, hasattr(accelerator, "process_index")) == (0, False)


def test_the_end_of_the_training_leaves_the_rank_readable() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.end_training()
    assert accelerator.is_main_process
    assert (accelerator.state.num_processes, accelerator.state.process_index) == (1, 0)


def test_only_plug_ins_in_use_are_attributes() -> None:
    state = Accelerator(cpu=True).state
    assert state.deepspeed_plugin is state.torch_tp_plugin is None
    assert getattr(state, "fsdp_plugin", "absent") == "absent"
    with pytest.raises(AttributeError, match="'AcceleratorState' object has no attribute 'devise'"):
        _ = state.devise
    assert state.backend is None
    assert state.debug is False


def test_the_attributes_of_a_state_are_what_scripts_log() -> None:
    """As ``{str(k): str(v) for k, v in accelerator.state.__dict__.items()}``."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    logged = {str(key): str(value) for key, value in accelerator.state.__dict__.items()}
    names = [
        "device",
        "backend",
        "debug",
        "num_processes",
        "process_index",
        "local_process_index",
        "_mixed_precision",
    ]
    assert [logged[name] for name in names] == ["cpu", "None", "False", "1", "0", "0", "bf16"]
    assert logged["distributed_type"] == "DistributedType.NO"
    accelerator.state.device = "meta"
    assert str(vars(accelerator.state)["device"]) == str(accelerator.state.device) == "meta"
    assert vars(PartialState()) == PartialState._shared_state
    assert vars(PartialState())["num_processes"] == 1


def test_the_shared_state_shows_the_facts() -> None:
    assert PartialState._shared_state == {}
    state = PartialState(cpu=True)
    assert PartialState._shared_state["process_index"] == 0
    assert PartialState._shared_state["device"] == state.device
    state.distributed_type = "MULTI_GPU"
    assert PartialState().distributed_type == "MULTI_GPU" == DistributedType.MULTI_GPU
    assert PartialState._shared_state["distributed_type"] == "MULTI_GPU"


def test_the_shared_state_is_read_without_a_state_more(monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs read it in loops, to see whether there is a state."""
    state = PartialState(cpu=True)
    monkeypatch.setattr(PartialState, "__init__", lambda *_: pytest.fail("a state is made"))
    assert PartialState._shared_state["num_processes"] == vars(state)["num_processes"] == 1


def test_a_program_clears_and_puts_back_shared_states() -> None:
    """As fixtures do between tests, and trainers around a library that resets all states."""
    accelerator = Accelerator(cpu=True, mixed_precision="bf16")
    before = dict(AcceleratorState._shared_state), dict(PartialState._shared_state)
    AcceleratorState._reset_state(reset_partial_state=True)
    PartialState(cpu=True)
    for state, values in zip((AcceleratorState, PartialState), before, strict=True):
        state._shared_state.clear()
        state._shared_state.update(values)
    assert AcceleratorState().mixed_precision == accelerator.mixed_precision == "bf16"
    assert (accelerator.num_processes, accelerator.device.type, is_initialized()) == (1, "cpu", True)
    for state in (AcceleratorState, PartialState, GradientState):
        state._shared_state.clear()
    assert PartialState._shared_state == AcceleratorState._shared_state == {}
    with pytest.raises(ValueError, match="no Accelerator yet"):
        AcceleratorState()
    assert GradientState().sync_gradients
    assert Accelerator(cpu=True, mixed_precision="no").mixed_precision == accelerator.mixed_precision == "no"
    saved = pickle.dumps(PartialState())
    PartialState._shared_state["device"] = torch.device("meta")
    assert pickle.loads(saved).device.type == PartialState().device.type == "meta"


def test_states_that_are_unpickled_elsewhere_know_their_rank() -> None:
    """As in a spawned worker of a loader whose dataset holds one; the states of that process stay."""
    with fake_world(4, 2):
        saved = pickle.dumps((PartialState(), AcceleratorState(mixed_precision="bf16")))
    AcceleratorState._reset_state(reset_partial_state=True)
    for state in pickle.loads(saved):
        assert (state.process_index, state.num_processes, state.is_main_process) == (2, 4, False)
    assert not is_initialized()
    accelerator = Accelerator(cpu=True)
    partial, state = pickle.loads(saved)
    assert (partial.num_processes, accelerator.num_processes, state.num_processes) == (1, 1, 4)
    assert (accelerator.mixed_precision, state.mixed_precision) == ("no", "bf16")
    assert AcceleratorState() is accelerator.state


def test_a_lone_process_runs_what_is_meant_for_any_rank() -> None:
    accelerator = Accelerator(cpu=True)
    assert accelerator.on_process(lambda: 1, process_index=5)() == 1
    assert accelerator.on_local_process(local_process_index=3)(lambda: 2)() == 2
    assert accelerator.on_last_process(lambda: 3)() == 3


@pytest.mark.parametrize(
    "whole", [None, 3, {"a": [1], "b": [1, 2]}, "s", [1, 2], (torch.ones(1), 1)], ids=repr
)
def test_a_lone_process_has_the_whole(whole: Any) -> None:
    with PartialState(cpu=True).split_between_processes(whole) as part:
        assert part is whole
    assert broadcast(whole) is whole


class Movable:
    """Record the arguments of ``to``."""

    def to(self, device: Any, non_blocking: bool = True) -> tuple[Any, bool]:
        return device, non_blocking


class DeviceOnly:
    """Take a device, and nothing else."""

    def to(self, device: Any) -> Any:
        return device


def test_objects_are_moved_by_their_own_method_with_the_device_as_it_was_given() -> None:
    assert send_to_device([Movable(), DeviceOnly()], "cpu") == [("cpu", False), "cpu"]
    assert send_to_device({"a": Movable()}, 0, non_blocking=True) == {"a": (0, True)}
    tensor = torch.ones(1)
    assert send_to_device(tensor, None) is tensor


def test_enumerations_print_and_compare_as_in_1_x() -> None:
    assert str(DistributedType.NO) == "DistributedType.NO"
    assert str(ComputeEnvironment.LOCAL_MACHINE) == "ComputeEnvironment.LOCAL_MACHINE"
    assert str(PrecisionType.BF16) == "bf16"
    assert DistributedType.NO == "NO"
    assert DistributedType.NO in ("NO",)
    assert "NO" in DistributedType
    assert copy.deepcopy(DistributedType.FSDP) is DistributedType.FSDP


def test_whether_a_logger_speaks_can_be_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    assert MultiProcessAdapter(logging.getLogger("x"), {})._should_log(True)
    for name, value in {"RANK": 1, "WORLD_SIZE": 2, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert not MultiProcessAdapter._should_log(True)
    assert MultiProcessAdapter._should_log(False)


def test_the_module_of_rich_is_there_when_it_is_switched_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "accelerate.utils.rich", raising=False)
    monkeypatch.delenv("ACCELERATE_ENABLE_RICH", raising=False)
    with pytest.raises(ModuleNotFoundError, match="set ACCELERATE_ENABLE_RICH=1"):
        importlib.import_module("accelerate.utils.rich")
    monkeypatch.setenv("ACCELERATE_ENABLE_RICH", "1")
    importlib.import_module("accelerate.utils.rich")


# What a program can ask of both packages; each line prints one answer.
QUESTIONS = """
import warnings; warnings.simplefilter("ignore")
import torch
from accelerate import Accelerator, DistributedType, PartialState
from accelerate.logging import get_logger
from accelerate.state import AcceleratorState, GradientState, is_initialized
from accelerate.utils import find_executable_batch_size, release_memory

def ask(name, question):
    try:
        print(name, repr(question()))
    except Exception as error:
        kinds = (ValueError, TypeError, AttributeError)
        print(name, "raises", *(kind.__name__ for kind in kinds if isinstance(error, kind)))

ask("nothing yet", lambda: (PartialState._shared_state, AcceleratorState._shared_state, is_initialized()))
ask("no accelerator", AcceleratorState)
AcceleratorState._reset_state(True)
state = PartialState(cpu=True, backend=None)
facts = "backend debug default_device device distributed_type fork_launched initialized is_last_process " \
    "is_local_main_process is_main_process local_process_index num_processes process_index use_distributed"
for name in facts.split():
    ask(name, lambda: getattr(state, name))
ask("text", lambda: str(state))
ask("absent", lambda: state.absent)
ask("decorators", lambda: [getattr(state, f"on_{which}process")(lambda: 1)() for which in
    ("main_", "local_main_", "last_", "", "local_")])
ask("other rank", lambda: state.on_process(lambda: 1, process_index=3)())
for items in ([1, 2, 3], (1, 2), {"a": [1, 2]}, torch.arange(3), "text", []):
    ask("split", lambda: state.split_between_processes(items).__enter__())
ask("types", lambda: [(name, DistributedType(name) == name, str(DistributedType(name)))
    for name in sorted(member.value for member in DistributedType)])
ask("no type", lambda: DistributedType("none"))
accelerator = Accelerator(cpu=True)
ask("accelerator state", lambda: str(AcceleratorState()))
for name in (facts + " mixed_precision deepspeed_plugin torch_tp_plugin device_mesh is_fsdp2 fsdp_plugin "
    "megatron_lm_plugin parallelism_config").replace("default_device", "").split():
    ask(f"state {name}", lambda: getattr(AcceleratorState(), name))
for name in "active_dataloader dataloader_references end_of_dataloader in_dataloader initialized num_steps " \
    "is_xla_gradients_synced remainder sync_gradients sync_with_dataloader plugin_kwargs".split():
    ask(f"gradients {name}", lambda: getattr(GradientState(), name))
ask("gradients", lambda: str(GradientState()))
ask("trigger", lambda: (accelerator.check_trigger(), accelerator.set_trigger(), accelerator.check_trigger(),
    accelerator.check_trigger()))
ask("memory", lambda: (release_memory(1, 2), release_memory()))
ask("forget", lambda: (accelerator.free_memory(1), accelerator.clear()))
ask("register", lambda: accelerator.register_for_checkpointing(3))
ask("batch", lambda: find_executable_batch_size(lambda batch_size: batch_size)())
ask("batch passed", lambda: find_executable_batch_size(lambda batch_size: batch_size)(3))
logger = get_logger("client")
ask("logger", lambda: (type(logger).__name__, logger.extra, logger.name, logger.logger.level))
ask("level", lambda: get_logger("client", log_level="debug").logger.level)
ask("no level", lambda: get_logger("client", log_level="loud"))
AcceleratorState._reset_state()
ask("reset", lambda: (is_initialized(), AcceleratorState._shared_state == {}))
ask("world stays", lambda: PartialState._shared_state != {})
AcceleratorState._reset_state(True)
ask("all reset", lambda: PartialState._shared_state)
ask("device gone", lambda: state.device)
ask("alive", lambda: state.initialized)
GradientState._reset_state()
ask("gradients reset", lambda: GradientState._shared_state)
"""


@pytest.mark.skipif(not PEER.exists(), reason="the public package is not installed: make bench-peer")
@pytest.mark.skipif(not LONG_RUN, reason="runs in `make test-all`")
def test_the_public_package_gives_the_same_answers(tmp_path: Path) -> None:
    def answers(*python: str) -> list[str]:
        command = [*python, "-c", QUESTIONS]
        done = subprocess.run(command, env=clean(), cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    ours, theirs = answers(sys.executable), answers(os.fspath(PEER), "-E")
    assert len(ours) == len(theirs) > 70
    for own, other in zip(ours, theirs, strict=True):
        before, raised, kinds = other.partition(" raises ")
        if raised:  # an error of ours may be caught as more than one kind
            assert own.startswith(before + raised)
            assert set(kinds.split()) <= set(own.rpartition(raised)[2].split()), own
        else:
            assert own == other
