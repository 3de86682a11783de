"""Launching on a TPU, with fakes of torch_xla and gcloud: what they are asked, and what ranks are told."""

from __future__ import annotations

import json
import shlex
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from accelerate.core.errors import SettingError
from tests.support import launch_plans
from tests.support.command import CONSOLE, Finished, Running, accelerate, launch
from tests.support.free_ports import free_port

# As much of torch_xla 2.9 as a launch calls: two processes, each of them told who it is by the runtime.
XLA = """
import multiprocessing, os
def sync(): pass
def _start(fn, index, size, args):
    os.environ["PJRT_LOCAL_PROCESS_RANK"] = os.environ["FAKE_ORDINAL"] = str(index)
    os.environ["FAKE_SIZE"] = str(size)
    fn(index, *args)
def launch(fn, args=(), start_method="spawn", debug_single_process=False):
    size = 1 if debug_single_process else 2
    context = multiprocessing.get_context(start_method)
    ranks = [context.Process(target=_start, args=(fn, index, size, args)) for index in range(size)]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join()
    if any(rank.exitcode for rank in ranks):
        raise RuntimeError("a process failed")
"""
RUNTIME = """
import os
def device_type(): return "TPU"
def world_size():
    if "PJRT_LOCAL_PROCESS_RANK" not in os.environ:
        raise AssertionError("to ask starts the runtime, after which SPMD cannot be chosen")
    return int(os.environ["FAKE_SIZE"])
def global_ordinal(): return int(os.environ["FAKE_ORDINAL"])
def local_ordinal(): return int(os.environ["FAKE_ORDINAL"])
def local_process_count(): return int(os.environ["FAKE_SIZE"])
def addressable_device_count():
    return int(os.environ.get("FAKE_THREADS", 1 if "FAKE_SIZE" in os.environ else 2))
"""
# The group is one of gloo: what is sent is none of a TPU's tensors.
BACKEND = """
import torch.distributed as dist
def create(store, rank, size, timeout):
    return dist.ProcessGroupGloo(store, rank, size, timeout)
dist.Backend.register_backend("xla", create, devices=["xla", "cpu"])
"""
SCRIPT = """
import json, os, sys
NAMES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "FORK_LAUNCHED",
         "XLA_USE_BF16", "XLA_DOWNCAST_BF16", "ACCELERATE_MIXED_PRECISION")
def main():
    told = {name: os.environ[name] for name in NAMES if name in os.environ}
    port = int(os.environ["MASTER_PORT"])
    line = json.dumps({**told, "port": port, "argv": sys.argv[1:], "name": __name__, "path": sys.path[0]})
    sys.stdout.write(line + "\\n")
def other(index):
    sys.stdout.write(json.dumps({"RANK": index}) + "\\n")
def broken():
    raise KeyError("broken on purpose")
def world():
    from accelerate import PartialState
    state = PartialState()
    state.wait_for_everyone()
    told = {"RANK": state.process_index, "size": state.num_processes, "device": str(state.device)}
    sys.stdout.write(json.dumps(told) + "\\n")
    sys.stdout.flush()
    state.destroy_process_group()
if __name__ == "__main__":
    sys.exit("the script is not run, its function is called")
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a script, and beside it a fake torch_xla and a fake gcloud."""
    package = tmp_path / "fakes" / "torch_xla"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(XLA)
    (package / "runtime.py").write_text(RUNTIME)
    for name, text in (("core", "def wait_device_ops(): pass"), ("distributed", BACKEND)):
        (package / name).mkdir()
        (package / name / "__init__.py").touch()
        (package / name / {"core": "xla_model.py"}.get(name, "xla_backend.py")).write_text(text)
    gcloud = tmp_path / "bin" / "gcloud"
    gcloud.parent.mkdir()
    gcloud.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    gcloud.chmod(0o755)
    (tmp_path / "train.py").write_text(SCRIPT)
    return tmp_path


def start(folder: Path, *flags: str, script_args: tuple[str, ...] = ()) -> Finished:
    env = {"PYTHONPATH": str(folder / "fakes"), "PATH": str(folder / "bin"), "TPU_LIBRARY_PATH": "fake"}
    return launch(*flags, path="train.py", script_args=script_args, cwd=folder, env=env)


def told(result: Finished) -> list[dict[str, Any]]:
    """What the processes said, by rank."""
    assert result.returncode == 0, result.output
    return sorted(map(json.loads, result.stdout.splitlines()), key=lambda line: line["RANK"])


# ---------------------------------------------------------------- on this machine


@pytest.mark.parametrize("watched", [False, True])
def test_a_function_of_the_script_runs_once_for_each_device(folder: Path, watched: bool) -> None:
    """F1, F9, F10: under torchrun's names the processes know the world; arguments are as they were."""
    flags = ("--tpu", "--mixed_precision", "bf16", *(("--tee", "3") if watched else ()))
    result = start(folder, *flags, script_args=("--lr", "0.1"))
    assert result.returncode == 0, result.output
    lines = [line[line.index("{") :] for line in result.stdout.splitlines()]
    ranks = sorted(map(json.loads, lines), key=lambda line: line["RANK"])
    assert [rank["RANK"] for rank in ranks] == ["0", "1"]
    for rank in ranks:
        assert (rank["WORLD_SIZE"], rank["LOCAL_WORLD_SIZE"], rank["LOCAL_RANK"]) == ("2", "2", rank["RANK"])
        assert (rank["MASTER_ADDR"], rank["GROUP_RANK"], rank["FORK_LAUNCHED"]) == ("127.0.0.1", "0", "1")
        assert (rank["XLA_USE_BF16"], rank["XLA_DOWNCAST_BF16"]) == ("1", "0")
        assert rank["ACCELERATE_MIXED_PRECISION"] == "bf16"
        assert (rank["argv"], rank["name"]) == (["--lr", "0.1"], "train")
        assert Path(rank["path"]) == folder.resolve()
    assert len({rank["port"] for rank in ranks}) == 1
    assert not result.survivors()


def test_the_file_asks_for_it_too(folder: Path) -> None:
    """The keys of a file that the wizard of 1.x writes for a TPU."""
    (folder / "tpu.yaml").write_text(
        "distributed_type: XLA\ndowncast_bf16: true\nmixed_precision: bf16\nmain_training_function: main\n"
        "tpu_env: []\ntpu_use_cluster: false\ntpu_use_sudo: false\nnum_processes: 2\nmain_process_port: 0\n"
    )
    ranks = told(start(folder, "--config_file", "tpu.yaml"))
    assert [(rank["XLA_USE_BF16"], rank["XLA_DOWNCAST_BF16"]) for rank in ranks] == [("0", "1")] * 2


def test_another_function_one_process_and_a_module(folder: Path) -> None:
    ranks = told(start(folder, "--tpu", "--main_training_function", "other"))
    assert ranks == [{"RANK": 0}, {"RANK": 1}]
    (rank,) = told(start(folder, "--tpu", "-n", "1"))
    assert (rank["RANK"], rank["WORLD_SIZE"]) == ("0", "1")
    env = {"PYTHONPATH": str(folder / "fakes")}
    result = launch("--tpu", "-m", "train", "-x", cwd=folder, env=env)
    assert [rank["argv"] for rank in told(result)] == [["-x"]] * 2


def test_the_ranks_make_one_world(folder: Path) -> None:
    """The runtime shows each process its own device alone."""
    ranks = told(start(folder, "--tpu", "--main_training_function", "world"))
    assert ranks == [{"RANK": rank, "size": 2, "device": "xla:0"} for rank in range(2)]


def test_processes_that_no_launcher_of_ours_has_started_ask_the_runtime(folder: Path) -> None:
    """As programs that call ``torch_xla.launch``, and notebooks."""
    (folder / "own.py").write_text(
        "import sys, torch_xla, train\nfrom accelerate import notebook_launcher\n"
        "if sys.argv[1] == 'own':\n    torch_xla.launch(lambda index: train.world(), start_method='fork')\n"
        "else:\n    notebook_launcher(train.world, num_processes=2, use_port=0)\n"
    )
    env = {"PYTHONPATH": str(folder / "fakes"), "TPU_LIBRARY_PATH": "fake", "MASTER_PORT": str(free_port())}
    for way in ("own", "notebook"):
        result = Running([sys.executable, "own.py", way], cwd=folder, env=env).wait()
        lines = [line for line in result.stdout.splitlines() if line.startswith("{")]
        ranks = sorted(map(json.loads, lines), key=lambda line: line["RANK"])
        assert [(rank["RANK"], rank["size"]) for rank in ranks] == [(0, 2), (1, 2)], result.output
    result = Running([sys.executable, "-c", "import train; train.world()"], cwd=folder, env=env).wait()
    assert [json.loads(line)["size"] for line in result.stdout.splitlines()] == [1], result.output


def test_mistakes_are_told(folder: Path) -> None:
    result = start(folder, "--tpu", "--main_training_function", "mian")
    assert result.returncode == 1
    assert "has no function mian" in result.stderr
    assert "--main_training_function main" in result.stderr
    result = start(folder, "--tpu", "-n", "5")
    assert result.returncode == 1
    assert "5 processes are asked for, but the devices of this TPU make 2" in result.stderr
    result = start(folder, "--tpu", "--main_training_function", "broken", "--max_restarts", "1")
    assert "restart 1 of 1" in result.stderr
    assert "no effect" not in result.stderr
    assert result.returncode == 1
    assert "KeyError: 'broken on purpose'" in result.stderr


POOL = """
import concurrent.futures, multiprocessing
import os, torch_xla.runtime
def _start(fn, index, args):
    os.environ["PJRT_LOCAL_PROCESS_RANK"] = os.environ["FAKE_ORDINAL"] = str(index)
    os.environ["FAKE_SIZE"] = "2"
    fn(index, *args)
def launch(fn, args=(), start_method="spawn", debug_single_process=False):
    context = multiprocessing.get_context(start_method)
    with concurrent.futures.ProcessPoolExecutor(2, mp_context=context) as pool:
        for call in [pool.submit(_start, fn, index, args) for index in range(2)]:
            call.result()
"""


def test_a_signal_leaves_no_process_on_the_tpu(folder: Path) -> None:
    """The real starter's processes are in a pool, and notice nothing when it ends."""
    (folder / "fakes" / "torch_xla" / "__init__.py").write_text(POOL)
    text = "import sys, time\ndef main():\n    sys.stdout.write('ready\\n')\n    sys.stdout.flush()\n"
    (folder / "train.py").write_text(text + "    time.sleep(60)\n")
    env = {"PYTHONPATH": str(folder / "fakes")}
    running = Running([*CONSOLE, "launch", "--tpu", "--stop_timeout", "2", "train.py"], env=env, cwd=folder)
    running.wait_for("ready")
    running.signal(signal.SIGTERM)
    ended = running.wait()
    assert ended.returncode == 128 + signal.SIGTERM, ended.output
    assert not ended.survivors()


def test_a_tpu_whose_processes_have_several_devices_is_refused(folder: Path) -> None:
    """Their threads would write over each other's rank."""
    env = {"PYTHONPATH": str(folder / "fakes"), "FAKE_THREADS": "2"}
    result = launch("--tpu", path="train.py", cwd=folder, env=env)
    assert result.returncode == 1
    assert "this TPU has several devices in each process" in result.stderr


def test_a_runtime_that_does_not_say_that_it_has_started_the_processes_is_refused(folder: Path) -> None:
    """Each would be rank 0 of 1."""
    package = folder / "fakes" / "torch_xla"
    text = (package / "__init__.py").read_text()
    (package / "__init__.py").write_text(text.replace('os.environ["PJRT_LOCAL_PROCESS_RANK"] = ', ""))
    (package / "runtime.py").write_text("def world_size(): return 2\n")
    result = start(folder, "--tpu")
    assert result.returncode == 1
    assert "PJRT_LOCAL_PROCESS_RANK is not set" in result.stderr


def test_without_torch_xla_it_is_said_what_to_install(folder: Path) -> None:
    result = launch("--tpu", path="train.py", cwd=folder)
    assert result.returncode == 2
    assert "pip install torch_xla[tpu]" in result.stderr


# ---------------------------------------------------------------- on a pod


def test_a_pod_gets_the_command_on_all_machines(folder: Path) -> None:
    (folder / "pod.yaml").write_text(
        "distributed_type: XLA\ntpu_name: big\ntpu_zone: us-central2-b\ntpu_use_cluster: true\n"
        "tpu_use_sudo: true\n"
        "mixed_precision: bf16\ntpu_env: [A=1, 'B=2 3']\nmain_training_function: main\n"
    )
    result = start(folder, "--config_file", "pod.yaml", "--downcast_bf16", script_args=("--lr", "a b"))
    assert result.returncode == 0, result.output
    words = json.loads(result.stdout)
    assert words[:5] == ["compute", "tpus", "tpu-vm", "ssh", "big"]
    assert words[5:9] == ["--zone", "us-central2-b", "--worker", "all"]
    command = shlex.split(words[words.index("--command") + 1])
    assert command[:2] == ["sudo", "env"]
    variables = {
        "A=1",
        "B=2 3",
        "ACCELERATE_MIXED_PRECISION=bf16",
        "XLA_DOWNCAST_BF16=1",
        "ACCELERATE_IN_TPU_POD=1",
    }
    assert variables <= {*command}
    begin = command.index("python3")
    assert command[begin : begin + 6] == [
        "python3",
        "-m",
        "accelerate",
        "launch",
        "--tpu",
        "--no_tpu_cluster",
    ]
    assert command[-3:] == ["train.py", "--lr", "a b"]
    assert "--downcast_bf16" in command


def test_flags_that_may_be_repeated(folder: Path) -> None:
    (folder / "pod.yaml").write_text("tpu_name: big\n")
    flags = ("--tpu", "--tpu_cluster", "--vm", "0", "--vm", "2", "--env", "A=1", "--env", "B=x=y")
    words = json.loads(start(folder, "--config_file", "pod.yaml", *flags).stdout)
    assert words[words.index("--worker") + 1] == "0,2"
    assert "A=1 B=x=y" in words[-1]
    ranks = told(start(folder, "--config_file", "pod.yaml", "--tpu", "--no-tpu-cluster"))
    assert len(ranks) == 2


def test_without_gcloud_it_is_said(folder: Path) -> None:
    (folder / "pod.yaml").write_text("tpu_name: big\n")
    flags = ("--config_file", "pod.yaml", "--tpu", "--tpu_cluster")
    result = launch(*flags, path="train.py", cwd=folder, env={"PATH": str(folder)})
    assert result.returncode == 2
    assert "there is no program gcloud" in result.stderr


# ---------------------------------------------------------------- plans and refusals


def plan(**flags: Any) -> Any:
    return launch_plans.plan(launch_plans.request(tpu=True, **flags), "tpu")


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"no_python": True}, "--no_python does not go with a TPU"),
        ({"num_machines": "2"}, "but this is a launch on a TPU"),
        ({"tpu_use_cluster": True}, "no TPU is named"),
        ({"tpu_env": ["A"]}, "'A' is not NAME=value"),
    ],
)
def test_what_contradicts_itself_is_refused(flags: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        plan(**flags)


def test_options_without_an_effect_are_named() -> None:
    """F15: of a pod without one, and of a precision without it."""
    unused = dict(plan().unused_settings)
    assert {"tpu_vm", "tpu_env", "tpu_use_sudo", "downcast_bf16", "gpu_ids"} <= unused.keys()
    assert "downcast_bf16" not in dict(plan(mixed_precision="bf16", downcast_bf16=True).unused_settings)


def test_a_plan_needs_no_torch_xla(folder: Path) -> None:
    result = launch("--tpu", "--dry_run", path="train.py", cwd=folder)
    assert result.returncode == 0, result.output
    assert "accelerate.launch.tpu_rank main 0 0 script train.py" in result.stdout


# ---------------------------------------------------------------- accelerate tpu-config


def configure(folder: Path, *flags: str) -> Finished:
    return accelerate("tpu-config", *flags, cwd=folder, env={"PATH": str(folder / "bin")})


def test_commands_of_the_file_run_on_all_machines(folder: Path) -> None:
    (folder / "pod.yaml").write_text("tpu_name: big\ntpu_zone: here\ncommands: [pip install x, echo b]\n")
    result = configure(folder, "--config_file", "pod.yaml")
    assert result.returncode == 0, result.output
    words = json.loads(result.stdout.splitlines()[0])
    assert words == [
        *("compute", "tpus", "tpu-vm", "ssh", "big", "--zone", "here", "--worker", "all"),
        *("--command", "cd /usr/share; pip install x; echo b"),
    ]


def test_flags_win_over_the_file_and_debug_only_prints(folder: Path) -> None:
    (folder / "pod.yaml").write_text(
        "tpu_name: big\ntpu_zone: here\ncommands: [one]\ncommand_file: other.txt\n"
    )
    (folder / "list.txt").write_text("pip install a\n\npip install b\n")
    base = ("--config-file", "pod.yaml", "--debug", "--tpu_name", "small", "--use_alpha")
    result = configure(folder, *base, "--command", "echo 1", "--command", "echo 2")
    assert result.stdout == (
        "Running gcloud alpha compute tpus tpu-vm ssh small --zone here --worker all "
        "--command 'cd /usr/share; echo 1; echo 2'\n"
    )
    result = configure(
        folder, *base, "--command", "echo 1", "echo 2", "--use_alpha", "--command=echo 3", "-x"
    )
    assert result.returncode == 2, "a word that begins with a dash is a flag"
    result = configure(
        folder, *base, "--command", "echo 1", "echo 2", "--use_alpha", "--command=echo 3", "ls"
    )
    assert "'cd /usr/share; echo 1; echo 2; echo 3; ls'" in result.stdout
    result = configure(folder, *base, "--command_file", "list.txt", "--install_accelerate")
    assert "'cd /usr/share; pip install -U accelerate; pip install a; pip install b'" in result.stdout
    result = configure(
        folder, *base, "--command", "x", "--install_accelerate", "--accelerate_version", "1.15.0"
    )
    assert "'cd /usr/share; pip install accelerate==1.15.0; x'" in result.stdout


def test_what_tpu_config_cannot_do_is_told(folder: Path) -> None:
    result = configure(folder, "--tpu_name", "big")
    assert result.returncode == 2
    assert "nothing to run" in result.stderr
    result = configure(folder, "--command", "x")
    assert "no TPU is named" in result.stderr
    result = configure(folder, "--tpu_name", "big", "--command_file", "none.txt")
    assert "none.txt cannot be read" in result.stderr
    (folder / "bin" / "gcloud").write_text("#!/bin/sh\nexit 3\n")
    assert configure(folder, "--tpu_name", "big", "--command", "x").returncode == 3
