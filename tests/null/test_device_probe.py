"""How many accelerators a machine has, told without torch, on folders that look like machines."""

from __future__ import annotations

import ctypes
from pathlib import Path
from typing import Any

import pytest

from accelerate import device as devices
from accelerate.device.base import DeviceProbeHost, container_limit, count_visible, torch_build
from tests.support.devices import machine

EIGHT = [f"dev/nvidia{index}" for index in range(8)] + [
    "dev/nvidiactl",
    "dev/nvidia-uvm",
    "dev/nvidia-modeset",
]


@pytest.mark.parametrize(
    ("variable", "count"),
    [
        (None, 8),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("0,1,2", 3),
        (" 3 , 1 ", 2),
        ("0,-1,2", 1),
        ("0,8,1", 1),
        ("0,1,0", 0),
        ("7", 1),
        ("8", 0),
        ("GPU-8932f937-d72c-4106-c12f-20bd9faed9f6", 1),
        ("GPU-8932f937,GPU-1c9a5f1e", 2),
        ("MIG-a1,MIG-a2,MIG-a3", 3),
        ("MIG-a1,MIG-a1", 0),
        ("NoDevFiles", 0),
        (",0", 0),
        ("?", 0),
    ],
)
def test_a_visible_variable_counts_as_cuda_counts(variable: str | None, count: int) -> None:
    assert count_visible(8, variable) == count


def test_nothing_is_visible_where_nothing_is() -> None:
    assert count_visible(0, "0,1") == 0
    assert count_visible(0, "GPU-8932f937") == 0


@pytest.mark.parametrize(("value", "count"), [(None, 8), ("", 0), ("2,3", 2), ("-1", 0)])
def test_nvidia_cards_are_counted_by_their_nodes(tmp_path: Path, value: str | None, count: int) -> None:
    env = {} if value is None else {"CUDA_VISIBLE_DEVICES": value}
    assert devices.get("cuda").probe_count(machine(tmp_path, EIGHT, env=env)) == count


def test_nvidia_nodes_that_are_not_made_yet_are_counted_by_the_driver(tmp_path: Path) -> None:
    files = [f"proc/driver/nvidia/gpus/0000:{bus}:00.0/information" for bus in ("3b", "86")]
    assert devices.get("cuda").probe_count(machine(tmp_path, files)) == 2


def test_a_container_has_the_cards_it_was_given(tmp_path: Path) -> None:
    files = [f"proc/driver/nvidia/gpus/0000:0{bus}:00.0/information" for bus in range(8)] + ["dev/nvidia5"]
    assert devices.get("cuda").probe_count(machine(tmp_path, files)) == 1


@pytest.mark.parametrize(
    ("files", "count"),
    [
        (["dev/dxg", "usr/lib/wsl/lib/libcuda.so.1"], 1),
        (["dev/dxg"], 0),
        (["dev/nvhost-gpu"], 1),
        (["dev/nvidiactl", "dev/nvidia-caps/nvidia-cap1"], 0),
    ],
)
def test_wsl_and_jetson_have_one(tmp_path: Path, files: list[str], count: int) -> None:
    assert devices.get("cuda").probe_count(machine(tmp_path, files)) == count


class TwoCardsNVML:
    """Stands for the driver's library of a machine with two cards."""

    def __init__(self, path: str) -> None:
        assert Path(path).name in ("nvml.dll", "libnvidia-ml.so.1")

    def nvmlInit_v2(self) -> int:
        return 0

    def nvmlDeviceGetCount_v2(self, reference: Any) -> int:
        reference._obj.value = 2
        return 0


@pytest.mark.parametrize("files", [["dev/dxg", "usr/lib/wsl/lib/libcuda.so.1"], ["System32/nvcuda.dll"]])
def test_windows_asks_the_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: list[str]) -> None:
    env, cuda = {"SYSTEMROOT": str(tmp_path)}, devices.get("cuda")
    assert cuda.probe_count(machine(tmp_path, files, env=env)) == 1
    monkeypatch.setattr(ctypes, "CDLL", TwoCardsNVML)
    assert devices.probe_devices(machine(tmp_path, files, env=env)) == (cuda, 2)
    assert cuda.probe_count(machine(tmp_path, files, env=env | {"CUDA_VISIBLE_DEVICES": "1"})) == 1


def test_windows_without_a_driver_has_no_card(tmp_path: Path) -> None:
    assert devices.get("cuda").probe_count(machine(tmp_path, [], env={"SYSTEMROOT": str(tmp_path)})) == 0


def test_a_torch_without_cuda_sees_no_card(tmp_path: Path) -> None:
    assert devices.get("cuda").probe_count(machine(tmp_path, EIGHT, build={"cuda": None, "hip": None})) == 0


AMD = {
    "dev/kfd": "",
    "sys/class/kfd/kfd/topology/nodes/0/gpu_id": "0",
    "sys/class/kfd/kfd/topology/nodes/0/properties": "cpu_cores_count 64\nsimd_count 0\ndrm_render_minor 0",
    "sys/class/kfd/kfd/topology/nodes/1/gpu_id": "51546",
    "sys/class/kfd/kfd/topology/nodes/1/properties": "simd_count 304\ndrm_render_minor 128",
    "sys/class/kfd/kfd/topology/nodes/2/gpu_id": "4660",
    "sys/class/kfd/kfd/topology/nodes/2/properties": "simd_count 304\ndrm_render_minor 136",
    "dev/dri/renderD128": "",
    "dev/dri/renderD136": "",
}


@pytest.mark.parametrize(
    ("env", "count"),
    [
        ({}, 2),
        ({"HIP_VISIBLE_DEVICES": "1"}, 1),
        ({"CUDA_VISIBLE_DEVICES": "0"}, 1),
        ({"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": ""}, 2),
        ({"ROCR_VISIBLE_DEVICES": "0"}, 1),
        ({"ROCR_VISIBLE_DEVICES": "0", "HIP_VISIBLE_DEVICES": "1"}, 0),
        ({"ROCR_VISIBLE_DEVICES": "GPU-4b2c1a9f8a6f1185"}, 1),
    ],
)
def test_amd_cards_are_counted_by_the_topology(tmp_path: Path, env: dict[str, str], count: int) -> None:
    rocm = {"cuda": None, "hip": "6.4", "xpu": None}
    assert devices.get("cuda").probe_count(machine(tmp_path, AMD, env=env, build=rocm)) == count


def test_an_amd_card_outside_of_the_container_does_not_count(tmp_path: Path) -> None:
    files = {name: text for name, text in AMD.items() if name != "dev/dri/renderD136"}
    assert devices.get("cuda").probe_count(machine(tmp_path, files, build={"hip": "6.4"})) == 1


INTEL = {
    "dev/dri/renderD128": "",
    "sys/class/drm/renderD128/device/vendor": "0x8086",
    "dev/dri/renderD129": "",
    "sys/class/drm/renderD129/device/vendor": "0x8086",
    "dev/dri/renderD130": "",
    "sys/class/drm/renderD130/device/vendor": "0x1002",
}
TILES = {
    "dev/dri/renderD128": "",
    "sys/class/drm/renderD128/device/vendor": "0x8086",
    "sys/class/drm/renderD128/device/tile0/id": "0",
    "sys/class/drm/renderD128/device/tile1/id": "1",
}


@pytest.mark.parametrize(
    ("files", "mask", "count"),
    [
        (INTEL, None, 2),
        (INTEL, "1", 1),
        (INTEL, "", 0),
        (TILES, None, 2),
        (TILES, "0.0,0.1", 2),
        (TILES, "0.1", 1),
    ],
)
def test_intel_cards_and_tiles(tmp_path: Path, files: dict[str, str], mask: str | None, count: int) -> None:
    env = {} if mask is None else {"ZE_AFFINITY_MASK": mask}
    assert (
        devices.get("xpu").probe_count(machine(tmp_path, files, env=env, build={"xpu": "20250101"})) == count
    )


def test_an_intel_card_needs_a_torch_for_it(tmp_path: Path) -> None:
    """One for CPUs has none, also where Intel's extension for CPUs is installed."""
    for packages in ((), ("intel_extension_for_pytorch",)):
        assert devices.get("xpu").probe_count(machine(tmp_path, INTEL, packages=packages)) == 0


@pytest.mark.parametrize(
    ("name", "files", "count"),
    [
        ("npu", ["dev/davinci0", "dev/davinci1", "dev/davinci_manager", "dev/devmm_svm", "dev/hisi_hdc"], 2),
        # A container's cards keep the host's numbers.
        ("npu", ["dev/davinci14", "dev/davinci_manager"], 1),
        ("mlu", ["dev/cambricon_dev0", "dev/cambricon_dev1", "dev/cambricon_ctl", "dev/cambricon_ipcm0"], 2),
        ("musa", ["dev/mtgpu.0", "dev/mtgpu.1", "dev/mtgpu"], 2),
        ("musa", ["dev/mtgpu0"], 1),
        ("sdaa", ["dev/tcaicard0", "dev/tcaicard1", "dev/tcaicard2", "dev/tcaicard20"], 4),
        (
            "hpu",
            [f"dev/accel/accel{i}" for i in range(2)] + [f"dev/accel/accel_controlD{i}" for i in range(2)],
            2,
        ),
        ("hpu", ["dev/hl0", "dev/hl1", "dev/hl_controlD0"], 2),
        # Another vendor's accelerator in the same folder.
        ("hpu", ["dev/accel/accel0"], 0),
        ("mps", ["System/Library/Frameworks/Metal.framework/Metal"], 1),
    ],
)
def test_other_vendors_cards_are_counted_by_their_nodes(
    tmp_path: Path, name: str, files: list[str], count: int
) -> None:
    assert devices.get(name).probe_count(machine(tmp_path, files)) == count


@pytest.mark.parametrize("name", [name for name in devices.DEVICES.names() if devices.get(name).extension])
def test_a_card_without_the_vendors_package_does_not_count(tmp_path: Path, name: str) -> None:
    files = [pattern.replace("[0-9]*", "0") for pattern in devices.get(name).node_patterns]
    assert devices.get(name).probe_count(machine(tmp_path, files, packages=())) == 0


@pytest.mark.parametrize(
    ("cores", "env", "count"),
    [
        (None, {}, 4),  # the first generation: two cores per device, and no word of it
        ("2", {}, 4),
        ("8", {}, 8),  # later ones join cores by two
        ("8", {"NEURON_LOGICAL_NC_CONFIG": "1"}, 16),
        ("8", {"NEURON_RT_VISIBLE_CORES": "0-3"}, 4),
        ("8", {"NEURON_RT_VISIBLE_CORES": "0-1,5"}, 3),
        ("8", {"NEURON_RT_VISIBLE_CORES": "6"}, 1),
    ],
)
def test_a_neuron_device_has_several_cores(
    tmp_path: Path, cores: str | None, env: dict[str, str], count: int
) -> None:
    files = {"dev/neuron0": "", "dev/neuron1": ""}
    if cores is not None:
        files |= {f"sys/devices/virtual/neuron_device/neuron{i}/core_count": cores for i in range(2)}
    assert devices.get("neuron").probe_count(machine(tmp_path, files, env=env)) == count


def test_tpu_chips_are_counted_on_the_bus(tmp_path: Path) -> None:
    files = {}
    for index, (vendor, chip) in enumerate(
        [("0x1ae0", "0x0063"), ("0x1ae0", "0x0063"), ("0x1ae0", "0x0042"), ("0x8086", "0x0063")]
    ):
        files[f"sys/bus/pci/devices/0000:00:0{index}.0/vendor"] = vendor
        files[f"sys/bus/pci/devices/0000:00:0{index}.0/device"] = chip
    xla = devices.get("xla")
    assert xla.probe_count(machine(tmp_path, files)) == 2
    assert xla.probe_count(machine(tmp_path, files, env={"TPU_VISIBLE_CHIPS": "1"})) == 1


def test_the_cpu_and_null_are_no_accelerators(tmp_path: Path) -> None:
    assert devices.get("cpu").probe_count(machine(tmp_path)) == 0
    assert devices.get("null").probe_count(machine(tmp_path)) == 0


def test_probe_finds_the_accelerator_of_a_machine(tmp_path: Path) -> None:
    device, count = devices.probe_devices(machine(tmp_path, EIGHT))
    assert (device.type, count) == ("cuda", 8)


def test_probe_falls_back_to_the_cpu(tmp_path: Path) -> None:
    device, count = devices.probe_devices(machine(tmp_path, env={"CUDA_VISIBLE_DEVICES": "0"}))
    assert (device.type, count) == ("cpu", 0)
    hidden = machine(tmp_path / "b", EIGHT, env={"CUDA_VISIBLE_DEVICES": ""})
    assert devices.probe_devices(hidden)[1] == 0


def test_probe_does_not_think_of_the_cpu_as_one_more(tmp_path: Path) -> None:
    both = machine(tmp_path, [*EIGHT, "dev/davinci0"])
    assert devices.probe_devices(both)[0].type == "npu", "the vendor whose package was installed on purpose"


def test_torch_tells_what_it_was_built_for() -> None:
    import torch

    build = torch_build()
    assert build["cuda"] == torch.version.cuda
    assert build["hip"] == torch.version.hip
    assert build["__version__"] == torch.__version__


def test_this_machine_can_be_looked_at() -> None:
    seen = DeviceProbeHost()
    assert seen.exists("dev/null")
    assert seen.read("proc/self/status").startswith("Name:")
    assert seen.read("proc/does/not/exist") == ""


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({}, None),
        ({"memory.max": "max", "memory.current": "5"}, None),
        (
            {"memory.max": "1000", "memory.current": "400", "memory.stat": "anon 300\ninactive_file 100"},
            (700, 1000),
        ),
        ({"memory.max": "1000", "memory.current": "1200"}, (0, 1000)),
        (
            {
                "memory/memory.limit_in_bytes": "1000",
                "memory/memory.usage_in_bytes": "400",
                "memory/memory.stat": "inactive_file 7\ntotal_inactive_file 50",
            },
            (650, 1000),
        ),
    ],
)
def test_a_containers_memory_limit_is_seen(
    tmp_path: Path, files: dict[str, str], limit: tuple[int, int] | None
) -> None:
    assert container_limit(machine(tmp_path, {f"sys/fs/cgroup/{n}": t for n, t in files.items()})) == limit
