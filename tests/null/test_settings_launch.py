"""What a request means on a machine: how many processes, on which devices, and what does not go together."""

from __future__ import annotations

import contextlib
import io
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_args

import pytest

from accelerate import device as devices
from accelerate.cli.options import SCRIPT_SETTINGS
from accelerate.core.errors import LaunchError, SettingError, UnknownNameError
from accelerate.device import DeviceProbeHost
from accelerate.launch.base import LaunchKind
from accelerate.launch.device_selection import allocate_devices
from accelerate.launch.kinds import KINDS
from accelerate.launch.kinds.local import shared_variables, torchrun_variables
from accelerate.launch.launch_request import LaunchRequest, all_settings, read_request
from accelerate.launch.launcher import check_request, choose_kind, launch
from accelerate.launch.logs import CountedPipe, RankLogSettings
from tests.support.devices import machine


def cards(root: Path, count: int, **env: str) -> DeviceProbeHost:
    """A machine with this many cards of the kind that needs no vendor's package."""
    (root / "dev").mkdir(exist_ok=True)
    for number in range(count):
        (root / f"dev/nvidia{number}").touch()
    return DeviceProbeHost(
        root, env, lambda: {"cuda": "12.8"}, has_package=lambda package: package == "torch"
    )


@pytest.fixture
def asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``asks(file=..., **flags)`` is a request for a script that exists."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").touch()

    def request(file: str = "", program: tuple[str, ...] = ("train.py",), **flags: Any) -> LaunchRequest:
        if file:
            (tmp_path / "job.yaml").write_text(file)
            flags["config_file"] = "job.yaml"
        return read_request(flags, program, SCRIPT_SETTINGS)

    return request


def where(request: LaunchRequest, machine: DeviceProbeHost) -> tuple[str, int, str | None]:
    found = allocate_devices(request, machine)
    return found.device.type, found.processes, found.visible


# ---------------------------------------------------------------- how many, where


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ({}, ("cuda", 4, None)),
        ({"num_processes": "3"}, ("cuda", 3, None)),
        ({"num_processes": "auto"}, ("cuda", 4, None)),
        ({"gpu_ids": "all"}, ("cuda", 4, None)),
        ({"gpu_ids": "0,2"}, ("cuda", 2, "0,2")),
        ({"gpu_ids": "0,"}, ("cuda", 1, "0")),
        ({"gpu_ids": "3", "num_processes": "1"}, ("cuda", 1, "3")),
        ({"multi_gpu": True}, ("cuda", 4, None)),
        ({"multi_gpu": True, "file": "distributed_type: NO"}, ("cuda", 4, None)),
        ({"multi_gpu": True, "file": "distributed_type: NO\nnum_processes: 2"}, ("cuda", 2, None)),
        ({"multi_gpu": True, "file": "distributed_type: MULTI_CPU\nuse_cpu: true"}, ("cuda", 4, None)),
        ({"use_fsdp": True, "file": "distributed_type: MULTI_CPU\nnum_processes: 2"}, ("cpu", 2, None)),
        ({"use_cpu": True}, ("cpu", 1, None)),
        ({"use_cpu": True, "num_processes": "2"}, ("cpu", 2, None)),
        ({"file": "distributed_type: NO"}, ("cuda", 1, None)),
        ({"file": "distributed_type: NO", "num_processes": "2"}, ("cuda", 2, None)),
        ({"file": "distributed_type: MULTI_GPU\nnum_processes: 2"}, ("cuda", 2, None)),
        ({"file": "distributed_type: MULTI_CPU\nnum_processes: 3"}, ("cpu", 3, None)),
        ({"file": "use_cpu: true\nnum_processes: 3"}, ("cpu", 3, None)),
        ({"file": "gpu_ids: 1"}, ("cuda", 1, "1")),
        ({"file": "gpu_ids: 0,1", "use_cpu": True}, ("cpu", 1, None)),
    ],
)
def test_processes_and_devices(
    asks: Any, tmp_path: Path, flags: dict[str, Any], expected: tuple[str, int, str | None]
) -> None:
    """F1: --cpu and a number of processes go together."""
    request = asks(**flags)
    check_request(request)
    assert where(request, cards(tmp_path, 4)) == expected


def test_windows_starts_one_process_by_default(
    asks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "platform", "win32")
    assert where(asks(), cards(tmp_path, 2)) == ("cuda", 1, None)


def test_without_an_accelerator_a_job_runs_on_the_cpu(asks: Any, tmp_path: Path) -> None:
    assert where(asks(), DeviceProbeHost(tmp_path, {}, dict)) == ("cpu", 1, None)
    assert where(asks(num_processes="4"), DeviceProbeHost(tmp_path, {}, dict)) == ("cpu", 4, None)


def test_visible_devices_count(asks: Any, tmp_path: Path) -> None:
    assert where(asks(), cards(tmp_path, 4, CUDA_VISIBLE_DEVICES="1,3")) == ("cuda", 2, None)


@pytest.mark.parametrize("ids", ["GPU-8f6c2f5a,GPU-1b2c3d4e", "MIG-1,MIG-2,MIG-3", "MIG-GPU-8f6c/1/0"])
def test_devices_are_named_by_uuid(asks: Any, tmp_path: Path, ids: str) -> None:
    """The driver takes these names in the variable; a card may have several MIG instances."""
    expected = ("cuda", len(ids.split(",")), ids)
    assert where(asks(gpu_ids=ids), cards(tmp_path, 2)) == expected


# ---------------------------------------------------------------- what does not fit the machine


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"num_processes": "3"}, ["3 processes", "--num_processes", "2 cuda devices", "on this machine"]),
        ({"num_processes": "2", "gpu_ids": "1"}, ["2 processes", "--num_processes", "--gpu_ids"]),
        ({"gpu_ids": "0,5"}, ["--gpu_ids", "'0,5'", "2 cuda devices"]),
        ({"gpu_ids": "0,0"}, ["--gpu_ids", "'0,0'"]),
        ({"gpu_ids": "zero"}, ["--gpu_ids", "'zero'", "not a list"]),
        ({"gpu_ids": "0,GPU-1b2c"}, ["--gpu_ids", "'0,GPU-1b2c'", "not a list"]),
        ({"gpu_ids": "GPU-1b2c,GPU-1b2c"}, ["--gpu_ids", "'GPU-1b2c,GPU-1b2c'"]),
        ({"gpu_ids": "GPU-1,GPU-2,GPU-3"}, ["--gpu_ids", "2 cuda devices"]),
        ({"file": "num_processes: 8"}, ["8 processes", "job.yaml, line 1: num_processes", "2 cuda"]),
        ({"file": "distributed_type: XLA"}, ["line 1: distributed_type", "XLA", "no such device"]),
        ({"file": "distributed_type: MULTI_GPUS"}, ["'MULTI_GPUS'", "job.yaml, line 1"]),
    ],
)
def test_what_does_not_fit_names_both_places(
    asks: Any, tmp_path: Path, flags: dict[str, Any], words: list[str]
) -> None:
    request = asks(**flags)
    with pytest.raises(SettingError) as error:
        allocate_devices(request, cards(tmp_path, 2))
    assert [word for word in words if word not in error.value.what] == []
    assert error.value.why or error.value.fix


def test_another_accelerator_than_that_of_the_file_serves_too(
    asks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In 1.x every such type starts several processes, which find their devices."""
    machines = {"MULTI_GPU": machine(tmp_path / "npu", ["dev/davinci0", "dev/davinci1"], build={})}
    machines["MULTI_NPU"] = cards(tmp_path, 2)
    for kind, here in machines.items():
        monkeypatch.setattr("accelerate.launch.kinds.local.DeviceProbeHost", lambda here=here: here)
        request = asks(f"distributed_type: {kind}", strict=True, dry_run=True)
        device = "npu" if kind == "MULTI_GPU" else "cuda"
        assert where(request, here) == (device, 2, None)
        line = f"line 1: distributed_type has no effect: it is {kind}, but the devices .* of type {device}"
        with pytest.raises(SettingError, match=line):
            launch(request)
        with pytest.raises(SettingError, match="this machine has no such device"):
            allocate_devices(request, DeviceProbeHost(tmp_path / "none", {}, dict))


def test_too_many_processes_for_the_visible_devices_names_the_variable(asks: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="CUDA_VISIBLE_DEVICES=1"):
        allocate_devices(asks(num_processes="2"), cards(tmp_path, 4, CUDA_VISIBLE_DEVICES="1"))


def test_insisting_on_accelerators_where_there_are_none(asks: Any, tmp_path: Path) -> None:
    with pytest.raises(SettingError, match="--multi_gpu insists on accelerators, but none was found"):
        allocate_devices(asks(multi_gpu=True), DeviceProbeHost(tmp_path, {}, dict))


def test_an_unknown_type_of_group_suggests_the_nearest(asks: Any, tmp_path: Path) -> None:
    with pytest.raises(UnknownNameError) as error:
        allocate_devices(asks("distributed_type: MULTI_GPUS"), cards(tmp_path, 2))
    assert error.value.near == "MULTI_GPU"


# ---------------------------------------------------------------- what contradicts itself


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"use_cpu": True, "multi_gpu": True}, ["--cpu", "--multi_gpu"]),
        ({"module": True, "no_python": True}, ["--module", "--no_python"]),
        ({"machine_rank": "2", "num_machines": "2"}, ["--machine_rank is 2", "--num_machines is 2"]),
        ({"machine_rank": "1"}, ["--machine_rank is 1", "num_machines is 1 (the default)"]),
        ({"machine_rank": "-1"}, ["--machine_rank is -1", "0 to 1000000"]),
        ({"num_processes": "0"}, ["--num_processes is 0", "1 to 1000000"]),
        ({"main_process_port": "65536"}, ["--main_process_port is 65536", "0 to 65535"]),
        ({"main_process_port": "-1"}, ["--main_process_port is -1", "0 to 65535"]),
        ({"tee": "9", "dry_run": True}, ["--tee is '9'"]),
    ],
)
def test_a_contradiction_names_both_places(asks: Any, flags: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(SettingError) as error:
        check_request(asks(**flags))
    assert [word for word in words if word not in error.value.what] == []


@pytest.mark.parametrize(
    ("program", "what", "fix"),
    [
        ((), "there is nothing to launch", "accelerate launch [flags] train.py [arguments of train.py]"),
        (("trian.py",), "there is no script trian.py", "did you mean train.py?"),
        (
            ("python3", "train.py"),
            "there is no script python3",
            "leave out python3: accelerate launch [flags] train.py",
        ),
        (("none/train.py",), "there is no script none/train.py", ""),
        (("empty",), "empty is a folder without a __main__.py", "name the script inside it"),
        (("x" * 300,), f"the script {'x' * 300} cannot be read", ""),  # nor in a folder that forbids it
    ],
)
def test_a_script_that_is_not_there(
    asks: Any, tmp_path: Path, program: tuple[str, ...], what: str, fix: str
) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(LaunchError) as error:
        check_request(asks(program=program))
    assert (error.value.what, error.value.fix) == (what, fix)


def test_a_folder_that_may_not_be_listed_suggests_nothing(
    asks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mode 0711: what lies in it can be read by name. Root may list everything."""
    list_folder = os.listdir

    def listdir(folder: Path | str = ".") -> list[str]:
        if Path(folder) in (Path(), tmp_path):
            raise PermissionError(13, "Permission denied", str(folder))
        return list_folder(folder)

    monkeypatch.setattr(os, "listdir", listdir)
    with pytest.raises(LaunchError, match=r"there is no script trian\.py") as error:
        check_request(asks(program=("trian.py",)))
    assert error.value.fix == ""
    with pytest.raises(FileNotFoundError, match=r"there is no configuration file .*jbo\.yaml$"):
        asks(config_file=str(tmp_path / "jbo.yaml"))


def test_a_working_folder_that_was_deleted_is_said(
    asks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(LaunchError, match="there is no script") as error:
        check_request(asks(program=("train.py",)))
    assert "does not exist any more" in error.value.why


def test_modules_and_programs_are_found_by_those_who_run_them(asks: Any) -> None:
    check_request(asks(program=("package.train",), module=True))
    check_request(asks(program=("bash", "-c", "true"), no_python=True))


def test_devices_with_a_launch_of_their_own(
    asks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One process needs no launcher of its own kind; several do."""
    found = devices.get("xla")
    monkeypatch.setattr("accelerate.device.probe_devices", lambda machine: (found, 4))
    assert allocate_devices(asks(num_processes="1"), DeviceProbeHost(tmp_path, {}, dict)).processes == 1
    assert choose_kind(asks(num_processes="1")).name == "this machine"
    assert choose_kind(asks()).name == "TPU"
    assert choose_kind(asks(num_processes="4")).name == "TPU"
    assert choose_kind(asks(use_cpu=True)).name == "this machine"


def test_every_job_has_a_kind_of_launch(asks: Any) -> None:
    assert choose_kind(asks()).name == "this machine"
    assert choose_kind(asks(max_restarts="1")).name == "this machine"
    for flags in ({"num_machines": "2"}, {"num_machines": "1:4"}):
        assert choose_kind(asks(**flags)).name == "several machines"


# ---------------------------------------------------------------- what the processes are told


def test_threads_are_shared_out_unless_somebody_said_how_many(
    asks: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = DeviceProbeHost(tmp_path, {}, dict)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr("accelerate.launch.kinds.local.count_cores", lambda machine: 8)

    def threads(processes: int, **flags: Any) -> object:
        request = asks(num_processes=str(processes), **flags)
        return shared_variables(request, allocate_devices(request, machine), machine).get("OMP_NUM_THREADS")

    assert [threads(n) for n in (1, 2, 3, 16)] == [None, 4, 2, 1]
    assert threads(2, num_cpu_threads_per_process="5") == 5
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    assert threads(2) is None  # inherited
    assert threads(1, num_cpu_threads_per_process="5") == 5


def test_a_containers_share_of_the_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(16)))
    share = tmp_path / "sys/fs/cgroup/cpu.max"
    share.parent.mkdir(parents=True)
    found = []
    for text in ("max 100000", "250000 100000", "50000 100000", "1600000 50000"):
        share.write_text(text)
        found.append(devices.count_cores(DeviceProbeHost(tmp_path, {}, dict)))
    assert found == [16, 3, 1, 16]
    assert devices.count_cores(DeviceProbeHost(tmp_path, {}, dict), sharers=4) == 8


def test_the_script_is_told_what_was_given_and_nothing_else(asks: Any, tmp_path: Path) -> None:
    """Variables are written only where somebody said something: a default is the script's own affair."""
    machine = cards(tmp_path, 1)
    assert shared_variables(asks(), allocate_devices(asks(), machine), machine) == {}
    machine = cards(tmp_path, 4)
    request = asks(
        "dynamo_config: {use_dynamic: false}\ngradient_accumulation_steps: 4",
        mixed_precision="bf16",
        debug=True,
        gpu_ids="1",
    )
    assert shared_variables(request, allocate_devices(request, machine), machine) == {
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_DEBUG_MODE": "true",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_DYNAMO_USE_DYNAMIC": "false",
        "CUDA_VISIBLE_DEVICES": "1",
    }


def test_a_group_on_the_cpu_is_told_so_however_it_was_asked_for(asks: Any, tmp_path: Path) -> None:
    """F1."""
    machine = cards(tmp_path, 4)
    types = [asks(f"distributed_type: {kind}") for kind in ("MULTI_CPU", "multi_cpu")]
    for request in (asks(use_cpu=True), asks("use_cpu: true"), *types):
        assert (
            shared_variables(request, allocate_devices(request, machine), machine)["ACCELERATE_USE_CPU"]
            == "true"
        )


def test_ranks_are_told_in_torchruns_protocol() -> None:
    told = list(torchrun_variables(4, "127.0.0.1", 29500, "job"))[1]
    assert {name: told[name] for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")} == {
        "RANK": 1,
        "LOCAL_RANK": 1,
        "WORLD_SIZE": 4,
        "LOCAL_WORLD_SIZE": 4,
    }
    assert told["GROUP_RANK"] == 0


# Numbers that may be negative, and those that are text too, which is read later.
ANY_NUMBER = {"fp8_margin", "mpirun_ccl", "num_machines", "gpu_ids"}
# What takes memory or processes for each one.
COUNTS = {"num_processes", "nproc_per_node", "machine_rank", "main_process_port", "max_restarts"}
COUNTS |= {"num_cpu_threads_per_process", "parallelism_config_tp_size", "megatron_lm_pp_degree"}


@pytest.mark.parametrize(("text", "least"), [("nan", 30), ("-1", 30), (str(10**11), len(COUNTS))])
def test_every_number_has_a_range(text: str, least: int, asks: Any) -> None:
    """`-n 99999999999` took all memory, and `--stop_timeout nan` never ended."""
    rows = {row.name: row for row in all_settings(SCRIPT_SETTINGS) if {int, float} & bare_types(row.type)}
    names = COUNTS if least == len(COUNTS) else rows.keys() - ANY_NUMBER
    assert len(names) >= least
    for name in names:
        with pytest.raises(SettingError, match=rf"{name} is .* but {name} is|unknown value .* of {name} "):
            asks(**{name: text})


def test_a_number_of_a_file_has_a_range_too(asks: Any) -> None:
    with pytest.raises(SettingError, match=r"job\.yaml, line 1: num_processes is 99999999999, but"):
        asks("num_processes: 99999999999")


@pytest.mark.parametrize("text", ["1e8", "1E+8", "'1.0e8'", "100000000", "100000000.0", "1.0e+8"])
def test_a_count_may_have_an_exponent(asks: Any, text: str) -> None:
    """YAML takes 1e8 for text, and 1.0e+8 for a number that is not known to be whole."""
    file = f"distributed_type: FSDP\nfsdp_config:\n  fsdp_min_num_params: {text}\n"
    assert asks(file).get("fsdp_min_num_params") == 10**8


@pytest.mark.parametrize("text", ["1.5e0", "1e-3", "1e99", "e8"])
def test_a_number_that_is_not_whole_is_no_count(asks: Any, text: str) -> None:
    with pytest.raises(SettingError, match="num_processes is"):
        asks(f"num_processes: '{text}'")


def test_a_number_that_is_not_whole_is_no_count_of_a_file(asks: Any) -> None:
    with pytest.raises(SettingError, match="num_processes is"):
        asks("num_processes: 2.5")


def bare_types(kind: Any) -> set[Any]:
    """The types of which a type is made, without their rules."""
    parts = get_args(kind)
    return {kind} if not parts else set[Any]().union(*map(bare_types, parts))


def test_processes_of_one_machine_are_few(asks: Any) -> None:
    with pytest.raises(SettingError, match="--num_processes asks for 20000 processes on this machine"):
        check_request(asks(num_processes="20000"))
    check_request(asks(num_processes="20000", num_machines="4"))


def test_a_folder_for_logs_has_a_name(asks: Any) -> None:
    with pytest.raises(SettingError, match="log_dir is text that is not empty"):
        asks(log_dir="")
    with pytest.raises(SettingError, match="no text may have a NUL character"):
        asks('log_dir: "a\\0b"')


# ---------------------------------------------------------------- output, kinds


@pytest.mark.parametrize(
    ("tee", "folder", "piped"),
    [
        (None, False, [(), ()]),
        (None, True, [(1, 2), (1, 2)]),
        ("3", False, [(1, 2), (1, 2)]),
        ("1", False, [(1,), (1,)]),
        ("0:2,1:1", False, [(2,), (1,)]),
        ("1:3", False, [(), (1, 2)]),
        ("0", True, [(), ()]),
    ],
)
def test_which_output_passes_through_the_launcher(
    tmp_path: Path, tee: str | None, folder: bool, piped: list[tuple[int, ...]]
) -> None:
    logs = RankLogSettings(tee, str(tmp_path / "logs") if folder else None)
    found = [tuple(i for i, pipe in enumerate(logs.pipes(rank), 1) if pipe is not None) for rank in (0, 1)]
    assert found == piped
    assert logs.is_active == any(piped)


@pytest.mark.parametrize("tee", ["4", "both", "0:4", "x:1", ""])
def test_a_tee_that_says_nothing(tee: str) -> None:
    with pytest.raises(SettingError, match="--tee is"):
        RankLogSettings(tee, None)


def test_a_folder_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(LaunchError, match="--log_dir"):
        RankLogSettings(None, str(tmp_path / "file" / "logs"))


def seconds_of_log(text: bytes, folder: Path, times: int = 1) -> float:
    """Return the CPU time in which the output of a rank is read, written and passed on."""
    writer = subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    logs = RankLogSettings("1", str(folder), prefix="<{}>".format)
    began = time.process_time()
    logs.read(3, writer)
    assert writer.stdin is not None
    writer.stdin.write(text * times)
    writer.stdin.close()
    writer.wait()
    logs.finish()
    return time.process_time() - began


def test_output_without_lines_costs_no_more_than_with(tmp_path: Path, capfd: Any) -> None:
    """G10: 10 MB without a newline took 25 times as long as 10 MB of lines."""
    text = b"one\r\ntwo\rthree" + b"x" * 10_000_000 + b"\nlast"
    with_lines = seconds_of_log(b"x" * 99 + b"\n", tmp_path / "lines", 100_000)
    capfd.readouterr()
    assert seconds_of_log(text, tmp_path) < 2 * with_lines
    assert (tmp_path / "rank_3.log").read_bytes() == b"one\ntwo\rthree" + text[14:] + b"\n"
    out = capfd.readouterr().out
    assert [line[:8] for line in out.split("\n")] == ["<3>one", "<3>two\r<", "<3>last", ""]
    assert out.count("<3>") == 4


def test_pipes_that_leftovers_hold_are_waited_for_together(monkeypatch: pytest.MonkeyPatch) -> None:
    logs, now = RankLogSettings("3", None), [100.0]

    class HeldPipe:
        def is_alive(self) -> bool:
            return True

        def join(self, timeout: float) -> None:
            now[0] += timeout

    monkeypatch.setattr("accelerate.launch.logs.time", SimpleNamespace(monotonic=lambda: now[0]))
    logs.readers += [(HeldPipe(), CountedPipe(io.BytesIO()))] * 16  # type: ignore[list-item]
    assert logs.finish()
    assert logs.finish()  # after the next attempt of the job
    assert now == [pytest.approx(101.0, abs=0.1)]


class PipedConsole:
    """The console of this process as a pipe, whose reader takes nothing before ``read``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.reader, writer = os.pipe()
        self.stream = open(writer, "w", encoding="utf-8")  # noqa: SIM115
        self.text = b""
        monkeypatch.setattr(sys, "stdout", self.stream)

    def fill(self) -> None:
        """Leave no room for a single byte."""
        os.set_blocking(self.stream.fileno(), False)
        with contextlib.suppress(BlockingIOError):
            while True:
                os.write(self.stream.fileno(), b"." * 4096)
        os.set_blocking(self.stream.fileno(), True)

    def read(self) -> None:
        """Read all that is written, in a thread, until ``close``."""

        def read() -> None:
            self.text = b"".join(iter(lambda: os.read(self.reader, 1 << 16), b""))

        self.thread = threading.Thread(target=read)
        self.thread.start()

    def close(self) -> str:
        """Return what was read."""
        self.stream.close()
        self.thread.join()
        os.close(self.reader)
        return self.text.decode().lstrip(".")


def test_a_slow_console_gets_the_last_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a line without an end; a process that is left behind holds the pipe of rank 1."""
    monkeypatch.setattr("accelerate.launch.logs.FINISH_SECONDS", 0.2)
    console, logs = PipedConsole(monkeypatch), RankLogSettings("1", None)
    console.fill()
    for rank, command in enumerate(("seq 9000; printf end", "seq 9000; echo end; sleep 2 &")):
        process = subprocess.Popen(["sh", "-c", command], stdout=subprocess.PIPE)
        logs.read(rank, process)
        assert process.wait(30) == 0
    threading.Timer(0.6, console.read).start()
    assert logs.finish()
    lines = console.close().splitlines()
    for rank in (0, 1):
        assert [line for line in lines if line.startswith(f"[rank {rank}]")] == [
            *(f"[rank {rank}] {n}" for n in range(1, 9001)),
            f"[rank {rank}] end",
        ]


def test_a_chunk_that_is_just_taken_from_a_pipe_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is neither in the pipe any more nor counted yet when the ranks have ended."""
    monkeypatch.setattr("accelerate.launch.logs.FINISH_SECONDS", 0.5)
    console, logs = PipedConsole(monkeypatch), RankLogSettings("1", None)
    console.fill()

    class BusyPipe:
        def __init__(self, pipe: Any) -> None:
            self._pipe, self.fileno, self.close = pipe, pipe.fileno, pipe.close

        def read1(self, size: int) -> bytes:
            chunk: bytes = self._pipe.read1(size)
            time.sleep(0.3)
            return chunk

    process: Any = subprocess.Popen(["echo", "last"], stdout=subprocess.PIPE)
    assert process.wait(30) == 0
    process.stdout = BusyPipe(process.stdout)
    logs.read(0, process)
    time.sleep(0.1)
    threading.Timer(1.5, console.read).start()
    assert logs.finish()
    assert console.close() == "[rank 0] last\n"


def test_a_machine_without_ioctl_counts_what_was_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "fcntl", None)
    pipe = CountedPipe(io.BytesIO(b"12345"))
    assert pipe.read1(3) == b"123"
    assert pipe.count_written() == 3


def test_a_console_in_non_blocking_mode_gets_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that waits for its stdin sets it, for all who share the terminal."""
    console, logs = PipedConsole(monkeypatch), RankLogSettings("1", None)
    os.set_blocking(console.stream.fileno(), False)
    process = subprocess.Popen(["seq", "90000"], stdout=subprocess.PIPE)
    logs.read(0, process)
    time.sleep(0.2)
    console.read()
    assert logs.finish()
    assert console.close() == "".join(f"[rank 0] {n}\n" for n in range(1, 90001))


def test_the_wait_for_a_console_can_be_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python flushes the console at its end: nothing that is left behind may hold its lock."""
    console, logs = PipedConsole(monkeypatch), RankLogSettings("1", None)
    console.fill()
    process = subprocess.Popen(["seq", "9"], stdout=subprocess.PIPE)
    logs.read(0, process)
    assert process.wait(30) == 0
    (pump, _), answers = logs.readers[0], iter([False, True])
    assert not logs.finish(lambda: next(answers))
    flush = threading.Thread(target=console.stream.flush, daemon=True)
    flush.start()
    flush.join(5)
    assert not flush.is_alive()
    console.read()
    pump.join(5)
    assert console.close() == "".join(f"[rank 0] {n}\n" for n in range(1, 10))


def test_a_process_without_a_console_takes_the_output_of_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    logs = RankLogSettings("1", None)
    process = subprocess.Popen(["seq", "90000"], stdout=subprocess.PIPE)
    logs.read(0, process)
    assert process.wait(30) == 0
    assert logs.finish()


# The signals of Windows, and what such a machine imports.
ON_WINDOWS = """
import signal
for name in ("SIGHUP", "SIGQUIT", "SIGUSR1", "SIGUSR2", "SIGXCPU", "SIGKILL", "SIGBUS", "SIGCHLD"):
    delattr(signal, name)
    del signal.Signals._member_map_[name]
from accelerate.launch import supervisor
from accelerate.launch.notebook import launchers
print(*(number.name for number in supervisor.STOP_SIGNALS), supervisor.FORWARDED_SIGNALS)
"""


def test_windows_runs_one_process_as_a_child_and_refuses_several(
    asks: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not run on Windows: with a fake of what differs there."""
    done = subprocess.run([sys.executable, "-c", ON_WINDOWS], capture_output=True, text=True)
    assert done.stdout == "SIGINT SIGTERM ()\n", done.stderr
    calls: list[Any] = []

    def wait() -> int:
        calls.append("wait")
        if len(calls) < 4:  # Ctrl-C twice, while the script saves
            raise KeyboardInterrupt
        return 7

    def start(program: Any, env: Any) -> Any:
        calls.append(program)
        return SimpleNamespace(wait=wait)

    monkeypatch.setattr(sys, "platform", "win32")
    monkeypatch.setattr("subprocess.Popen", start)
    monkeypatch.setattr("os.execvpe", lambda *given: None)  # as there: it returns
    with pytest.raises(SystemExit) as end:
        launch(asks(program=("train.py", "a b"), use_cpu=True), replace=True)
    assert end.value.code == 7
    assert calls == [(sys.executable, "train.py", "a b"), "wait", "wait", "wait"]
    with pytest.raises(LaunchError, match="on Windows"):
        launch(asks(use_cpu=True, num_processes="2"))


def test_every_file_of_the_launcher_is_a_kind_or_is_known_not_to_be() -> None:
    """A new helper file must be excluded by name, or it would be taken for a kind of launch."""
    assert "local" in KINDS.names()
    assert all(isinstance(kind, LaunchKind) for kind in KINDS)
