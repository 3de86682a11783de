"""The environment as scripts and tests see it, the place of a process, its cores and its hardware."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from accelerate import device as devices
from accelerate import utils
from accelerate.core.errors import DeviceError, SettingError, WorldError
from accelerate.device import DeviceProbeHost
from accelerate.facade import v1_utilities
from accelerate.world import affinity
from accelerate.world import world as worlds
from accelerate.world.world import World
from tests.support.devices import install


@pytest.mark.parametrize("word", ["y", "YES", "t", "True", "on", "1"])
def test_words_that_mean_yes(word):
    assert utils.str_to_bool(word) == 1
    assert utils.str_to_bool(word, to_bool=True) is True


@pytest.mark.parametrize("word", ["n", "No", "f", "FALSE", "off", "0"])
def test_words_that_mean_no(word):
    assert utils.str_to_bool(word) == 0
    assert utils.str_to_bool(word, to_bool=True) is False


def test_other_words_are_refused():
    with pytest.raises(SettingError, match="neither yes nor no") as caught:
        utils.str_to_bool("maybe")
    assert isinstance(caught.value, ValueError)


def test_variables_are_read_with_their_defaults(monkeypatch):
    monkeypatch.setenv("TOY_FLAG", "yes")
    monkeypatch.setenv("TOY_EMPTY", "")
    monkeypatch.setenv("TOY_MINUS", "-1")
    monkeypatch.setenv("TOY_FIVE", "5")
    assert utils.parse_flag_from_env("TOY_FLAG") is True
    assert utils.parse_flag_from_env("TOY_UNSET", True) is True
    assert utils.parse_flag_from_env("TOY_EMPTY", True) is True
    assert utils.parse_choice_from_env("TOY_FLAG") == "yes"
    assert utils.parse_choice_from_env("TOY_UNSET") == "no"
    assert utils.parse_choice_from_env("TOY_EMPTY") == ""
    assert utils.get_int_from_env(["TOY_UNSET", "TOY_MINUS", "TOY_FIVE"], 7) == 5
    assert utils.get_int_from_env(["TOY_UNSET", "TOY_EMPTY"], 7) == 7
    with pytest.raises(ValueError, match="TOY_FLAG is 'yes'"):
        utils.get_int_from_env(["TOY_FLAG", "TOY_FIVE"], 7)


def test_the_place_of_a_process_comes_from_its_launcher(monkeypatch):
    assert utils.get_cpu_distributed_information() == utils.CPUInformation(0, 1, 0, 1)
    for name, value in {"RANK": 3, "WORLD_SIZE": 4, "LOCAL_RANK": 1, "LOCAL_WORLD_SIZE": 2}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    assert utils.get_cpu_distributed_information() == utils.CPUInformation(3, 4, 1, 2)
    monkeypatch.setenv("MASTER_ADDR", "10.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    assert utils.get_cpu_distributed_information() == utils.CPUInformation(3, 4, 1, 2)


def test_a_patch_is_in_capitals_and_undone_even_after_an_error(monkeypatch):
    monkeypatch.setenv("TOY_OLD", "before")

    def fail():
        with utils.patch_environment(toy_old="in", toy_new=3):
            assert (os.environ["TOY_OLD"], os.environ["TOY_NEW"]) == ("in", "3")
            raise KeyError

    with pytest.raises(KeyError):
        fail()
    assert os.environ["TOY_OLD"] == "before"
    assert "TOY_NEW" not in os.environ


def test_a_cleared_environment_comes_back(monkeypatch):
    monkeypatch.setenv("TOY_OLD", "before")
    with utils.clear_environment():
        assert not os.environ
        os.environ["TOY_NEW"] = "1"
    assert os.environ["TOY_OLD"] == "before"
    assert "TOY_NEW" not in os.environ


def ours() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if key.startswith("ACCELERATE_TOY")}


def test_variables_that_a_function_sets_are_purged(monkeypatch):
    monkeypatch.setenv("ACCELERATE_TOY_OLD", "before")

    @utils.purge_accelerate_environment
    def train(fail: bool) -> int:
        os.environ.update({"ACCELERATE_TOY_OLD": "in", "ACCELERATE_TOY_NEW": "1", "TOY_OTHER": "stays"})
        if fail:
            raise KeyError
        return 5

    @utils.purge_accelerate_environment
    async def wait() -> int:
        os.environ["ACCELERATE_TOY_NEW"] = "1"
        return 6

    assert train(False) == 5
    with pytest.raises(KeyError):
        train(True)
    assert asyncio.run(wait()) == 6
    assert ours() == {"ACCELERATE_TOY_OLD": "before"}
    assert os.environ["TOY_OTHER"] == "stays"
    assert train.__name__ == "train"


def test_tests_of_a_class_and_of_its_subclasses_are_purged():
    @utils.purge_accelerate_environment
    class Base:
        def setup(self) -> None:
            os.environ["ACCELERATE_TOY_SETUP"] = "1"

        def test_one(self) -> int:
            os.environ["ACCELERATE_TOY_ONE"] = "1"
            return 1

    class Derived(Base):
        def test_two(self) -> int:
            os.environ["ACCELERATE_TOY_TWO"] = "1"
            return 2

        @staticmethod
        def test_three() -> int:
            os.environ["ACCELERATE_TOY_THREE"] = "1"
            return 3

        @classmethod
        def test_four(cls) -> int:
            os.environ["ACCELERATE_TOY_FOUR"] = "1"
            return 4 if cls is Derived else 0

    assert Derived().test_one() + Derived().test_two() == 3
    assert Derived.test_three() + Derived().test_three() + Derived().test_four() == 10
    assert ours() == {}
    Derived().setup()
    assert ours() == {"ACCELERATE_TOY_SETUP": "1"}


def test_what_a_shell_could_misread_is_not_passed_on():
    with pytest.warns(UserWarning, match="not passed on") as caught:
        lines = utils.convert_dict_to_env_variables(
            {"A": "1", "B C": "2", "D": "3;rm", "E": "4\n", "F": "", "G": "<x"}
        )
    assert lines == ["A=1\n"]
    assert len(caught) == 5


def test_what_is_imported_is_told():
    assert utils.are_libraries_initialized("pytest", "no_such_library") == ["pytest"]


def test_a_device_and_its_type_of_group():
    kind, group = utils.get_current_device_type()
    assert (kind, group) == ("cpu", "MULTI_CPU") or group.startswith("MULTI_")


# --- hardware


@pytest.fixture
def smi(tmp_path, monkeypatch):
    """``smi(names, driver)`` puts a driver tool of that answer on the path."""

    def install(names: list[str], driver: str, status: int = 0) -> None:
        rows = "\\n".join(names)
        versions = "\\n".join([driver] * len(names))
        tool = tmp_path / "nvidia-smi"
        answers = f'case "$1" in *name*) printf "{rows}\\n";; *) printf "{versions}\\n";; esac'
        tool.write_text(f"#!/bin/sh\n{answers}\nexit {status}\n")
        tool.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    return install


def test_the_drivers_tool_is_asked(smi):
    smi(["NVIDIA A100", "NVIDIA A100"], "535.1")
    assert utils.get_gpu_info() == (["NVIDIA A100", "NVIDIA A100"], 2)
    assert utils.get_driver_version() == "535.1"
    assert v1_utilities.has_p2p_infiniband() is True


@pytest.mark.parametrize(
    ("names", "driver", "expected"),
    [
        (["NVIDIA GeForce RTX 4090"] * 2, "535.54", False),
        (["NVIDIA GeForce RTX 4090"] * 2, "550.54.14", True),
        (["NVIDIA GeForce RTX 4090"], "535.54", True),
        (["NVIDIA GeForce RTX 3090"] * 2, "535.54", True),
    ],
)
def test_cards_that_hang_in_copies_are_known(smi, names, driver, expected):
    smi(names, driver)
    assert v1_utilities.has_p2p_infiniband() is expected


def test_without_the_tool_nothing_is_claimed(monkeypatch, smi):
    smi(["A"], "1", status=9)
    with pytest.raises(DeviceError, match="does not answer"):
        utils.get_gpu_info()
    assert v1_utilities.has_p2p_infiniband() is True
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(DeviceError, match="nvidia-smi is not installed"):
        utils.get_driver_version()


@pytest.mark.parametrize(
    ("release", "warned"),
    [("5.4.0-150-generic", True), ("5.15.0-1-amd64", False), ("6.1", False), ("odd!", False)],
)
def test_an_old_kernel_is_announced(monkeypatch, caplog, release, warned):
    monkeypatch.setattr(v1_utilities.platform, "system", lambda: "Linux")
    monkeypatch.setattr(v1_utilities.platform, "release", lambda: release)
    utils.check_os_kernel()
    assert bool(caplog.records) is warned


# --- cores


@pytest.mark.parametrize(
    ("text", "cores"), [("0-3,8,10-11", [0, 1, 2, 3, 8, 10, 11]), ("5", [5]), ("", []), ("0-1 4", [0, 1, 4])]
)
def test_the_kernels_lists_of_cores(text, cores):
    assert affinity.parse_cpu_list(text) == cores


def machine(root: Path, files: dict[str, str]) -> DeviceProbeHost:
    """A machine whose files are these."""
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return DeviceProbeHost(root=root, env={}, build=dict)


def test_processes_are_dealt_out_over_numa_nodes(tmp_path):
    files = {
        f"sys/devices/system/node/node{node}/cpulist": f"{4 * node}-{4 * node + 3}\n" for node in range(2)
    }
    two = machine(tmp_path, files)
    cpu = World.fake(device="cpu").hardware
    cores = [affinity.near_cores(cpu, index, 4, two) for index in range(4)]
    assert cores == [[0, 1, 2, 3], [0, 1, 2, 3], [4, 5, 6, 7], [4, 5, 6, 7]]
    (tmp_path / "sys/devices/system/node/node1/cpulist").unlink()
    (tmp_path / "sys/devices/system/node/node1").rmdir()
    assert affinity.near_cores(cpu, 0, 4, two) == []


class Card:
    """A device that tells its PCI address."""

    type = "toy"

    def __init__(self, count: int = 2) -> None:
        self.count = lambda: count

    class module:  # noqa: N801
        @staticmethod
        def get_device_properties(index: int):
            return type("Facts", (), {"pci_domain_id": 1, "pci_bus_id": 0x3B + index, "pci_device_id": 0})


def test_a_device_is_near_the_cores_that_its_bus_names(tmp_path):
    here = machine(tmp_path, {"sys/bus/pci/devices/0001:3c:00.0/local_cpulist": "8-9\n"})
    assert affinity.near_cores(Card(), 1, 2, here) == [8, 9]
    assert affinity.near_cores(Card(), 0, 2, here) == []


@pytest.mark.parametrize("name", [d.type for d in devices.accelerators()])
def test_a_vendors_device_is_near_the_cores_of_its_bus_or_nobody_knows(monkeypatch, tmp_path, name):
    fake, device = install(monkeypatch, name), devices.get(name)
    addresses = (f"0000:{0x3B + index:02x}:00.0" for index in range(2))
    lists = {
        f"sys/bus/pci/devices/{a}/local_cpulist": f"{8 * n}-{8 * n + 1}" for n, a in enumerate(addresses)
    }
    cores = [affinity.near_cores(device, index, 2, machine(tmp_path, lists)) for index in range(2)]
    if fake.get_device_properties is None:
        assert cores == [[], []]
    else:
        assert cores == [[0, 1], [8, 9]]


def test_a_process_that_sees_only_its_own_device_is_near_that(tmp_path):
    """As ``srun --gpus-per-task=1``: process 3 of the machine sees one device, whose index is 0."""
    here = machine(tmp_path, {"sys/bus/pci/devices/0001:3b:00.0/local_cpulist": "4-5\n"})
    assert affinity.near_cores(Card(count=1), 3, 4, here) == [4, 5]


def test_only_allowed_cores_are_bound(monkeypatch, caplog):
    bound: list[set[int]] = []
    monkeypatch.setattr(affinity, "near_cores", lambda *_: [0, 1, 2, 3])
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {2, 3, 4}, raising=False)
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: bound.append(cores), raising=False)
    monkeypatch.setattr(worlds, "_current", World.fake(device="cpu"))
    utils.override_numa_affinity(0)
    assert bound == [{2, 3}]
    utils.set_numa_affinity.cache_clear()
    utils.set_numa_affinity(1)
    utils.set_numa_affinity(1)
    assert bound == [{2, 3}] * 2
    monkeypatch.setattr(affinity, "near_cores", lambda *_: [])
    utils.override_numa_affinity(0)
    assert bound == [{2, 3}] * 2
    with pytest.raises(WorldError, match="-1"):
        utils.override_numa_affinity(-1)


def test_a_device_without_a_number_is_the_one_of_the_process(monkeypatch):
    install(monkeypatch, "cuda")
    monkeypatch.setenv("ACCELERATE_TORCH_DEVICE", "cuda")
    settings = worlds.load_settings(worlds.ProcessDeviceSettings).value
    assert worlds._select_device(settings, local_rank=1, local_size=2).index == 1
