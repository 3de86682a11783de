"""The differences of single device files, and the detection of the right one."""

from __future__ import annotations

import mmap
import os
import sys
import types
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from accelerate import PartialState
from accelerate import device as devices
from accelerate.core.errors import DeviceError, SettingError, WorldError
from accelerate.utils import get_max_memory, patch_environment, release_memory
from tests.support.devices import (
    TOTAL,
    CountingDevice,
    FakeModule,
    FakeXla,
    added_device,
    install,
    is_generic,
)


def test_get_knows_files_and_types() -> None:
    assert devices.get("cuda").type == "cuda"
    assert devices.get("meta") is devices.get("null")


def test_get_takes_any_type_torch_has_a_module_for() -> None:
    """B1: a new accelerator needs no file."""
    device = devices.get("mtia")
    assert is_generic(device)
    assert (device.type, device.distributed_type, device.rng_key) == (
        "mtia",
        "MULTI_GPU",
        "torch_mtia_manual_seed",
    )
    assert not device.is_available()
    assert device.count() == 0
    assert device.probe_count() == 0


def test_an_unknown_type_is_refused_with_the_nearest() -> None:
    with pytest.raises(DeviceError, match="unknown device 'cudda'") as caught:
        devices.get("cudda")
    assert "did you mean 'cuda'?" in str(caught.value)


@pytest.mark.parametrize(("called", "device"), [("tpu", "xla"), ("gpu", "cuda"), ("habana", "hpu")])
def test_a_device_by_its_common_name_is_suggested_by_torchs(called: str, device: str) -> None:
    with pytest.raises(DeviceError) as caught:
        devices.get(called)
    assert caught.value.fix == f"did you mean {device!r}?"


def test_a_device_with_no_file_is_fully_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeModule("mtia", 4)
    monkeypatch.setattr(torch, "mtia", fake)
    device = devices.get("mtia")
    assert device.count() == 4
    assert device.bind(3) == torch.device("mtia", 3)
    assert fake.index == 3
    assert device.get_memory_info() == (TOTAL, TOTAL)


def test_detect_prefers_by_priority(monkeypatch: pytest.MonkeyPatch) -> None:
    assert devices.detect().type == "cpu"
    install(monkeypatch, "xpu")
    assert devices.detect().type == "xpu"
    install(monkeypatch, "cuda")
    assert devices.detect().type == "cuda"
    install(monkeypatch, "mlu")
    assert devices.detect().type == "mlu"


def test_detect_takes_what_torch_found_when_no_file_does(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mtia"))
    assert devices.detect().type == "mtia"


def test_devices_of_other_packages_are_detected(monkeypatch: pytest.MonkeyPatch) -> None:
    with added_device("own", priority=1000):
        assert devices.detect().type == "own"
        assert devices.get("own").distributed_type == "MULTI_GPU"
    assert devices.detect().type == "cpu"


def test_a_module_without_memory_questions_asks_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeModule("mtia")
    for name in ("mem_get_info", "memory_allocated", "max_memory_allocated", "reset_peak_memory_stats"):
        monkeypatch.setattr(FakeModule, name, None)
    for name in ("get_device_properties", "memory_reserved"):
        monkeypatch.setattr(FakeModule, name, None)
    monkeypatch.setattr(torch, "mtia", fake)
    device = devices.get("mtia")
    with pytest.raises(DeviceError, match="do not report how much memory"):
        device.get_memory_info()
    assert device.memory_allocated() is None
    assert device.reset_peak_memory() is False

    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("mtia"))
    monkeypatch.setattr(torch.accelerator, "get_memory_info", lambda index: (5, 9), raising=False)
    monkeypatch.setattr(torch.accelerator, "memory_allocated", lambda index: 4, raising=False)
    monkeypatch.setattr(torch.accelerator, "memory_reserved", lambda index: 6, raising=False)
    assert device.get_memory_info(1) == (5 + 6 - 4, 9)
    assert device.memory_allocated() == 4


def test_bind_names_the_variable_that_hides_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "cuda")
    with (
        patch_environment(CUDA_VISIBLE_DEVICES="0,1"),
        pytest.raises(DeviceError, match="cuda:2 does not exist") as caught,
    ):
        devices.get("cuda").bind(2)
    assert "sees 2" in str(caught.value)
    assert "CUDA_VISIBLE_DEVICES" in str(caught.value)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("npu", "the package 'torch_npu', which drives it, is not installed"),
        ("mps", "finds none"),
        ("cuda", "finds none"),
    ],
)
def test_a_device_that_is_not_there_is_refused_in_words(
    monkeypatch: pytest.MonkeyPatch, name: str, why: str
) -> None:
    monkeypatch.setattr(type(devices.get(name)), "count_physical", lambda self, machine: 0)
    with patch_environment(ACCELERATE_TORCH_DEVICE=name), pytest.raises(DeviceError) as caught:
        PartialState()
    assert caught.value.what == f"there is no {name!r} device for this process"
    assert why in caught.value.why
    assert "leave out ACCELERATE_TORCH_DEVICE" in caught.value.fix


def test_devices_that_are_hidden_or_that_this_torch_cannot_use_are_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = devices.get("cuda")
    monkeypatch.setattr(type(cuda), "count_physical", lambda self, machine: 8)
    monkeypatch.setattr(type(cuda), "is_usable", lambda self: False)
    with pytest.raises(DeviceError, match="there is no 'cuda' device") as caught:
        cuda.bind(0)
    assert caught.value.why == f"torch {torch.__version__} finds none of the machine's 8"
    with patch_environment(CUDA_VISIBLE_DEVICES="-1"), pytest.raises(DeviceError) as caught:
        cuda.bind(0)
    assert caught.value.why == "the machine has 8, and CUDA_VISIBLE_DEVICES='-1' hides them"


def test_two_devices_for_one_process_are_refused() -> None:
    with (
        patch_environment(ACCELERATE_TORCH_DEVICE="cuda,cpu"),
        pytest.raises(DeviceError, match="unknown device 'cuda,cpu'"),
    ):
        PartialState()
    with (
        patch_environment(ACCELERATE_TORCH_DEVICE="cuda", ACCELERATE_USE_CPU="1"),
        pytest.raises(WorldError, match="two devices are asked for"),
    ):
        PartialState()


def test_a_broken_extension_is_an_error_only_where_its_device_is(monkeypatch: pytest.MonkeyPatch) -> None:
    broken = types.ModuleType("torch_npu")
    monkeypatch.setitem(sys.modules, "torch_npu", broken)

    def refuse(name: str) -> Any:
        raise ImportError("libhccl.so: cannot open shared object file")

    monkeypatch.setattr("accelerate.device.base.importlib.import_module", refuse)
    npu = devices.get("npu")
    assert not npu.is_available()
    monkeypatch.setattr(type(npu), "count_physical", lambda self, machine: 8)
    with pytest.raises(DeviceError, match="cannot be imported") as caught:
        npu.is_available()
    assert "libhccl.so" in str(caught.value)


def test_a_package_that_registers_nothing_is_no_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The earlier package of that name works through XLA and brings no ``torch.neuron``."""
    monkeypatch.setitem(sys.modules, "torch_neuronx", types.ModuleType("torch_neuronx"))
    assert not devices.get("neuron").is_available()
    with pytest.raises(DeviceError, match="no module for 'neuron'"):
        _ = devices.get("neuron").module


def test_cuda_is_asked_without_being_initialised(monkeypatch: pytest.MonkeyPatch) -> None:
    """F14: a process that asked may still fork."""
    fake = install(monkeypatch, "cuda")
    seen: list[str | None] = []
    monkeypatch.setattr(
        fake,
        "is_available",
        lambda: bool(seen.append(os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK")) or True),
    )
    assert devices.get("cuda").is_available()
    assert seen == ["1"]
    assert os.environ.get("PYTORCH_NVML_BASED_CUDA_CHECK") is None


@pytest.mark.parametrize(
    ("capability", "has_fp8"), [((7, 0), False), ((8, 0), False), ((8, 9), True), ((9, 0), True)]
)
def test_cuda_has_fp8_since_ada(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], has_fp8: bool
) -> None:
    fake = install(monkeypatch, "cuda")
    monkeypatch.setattr(fake, "get_device_capability", lambda index: capability, raising=False)
    assert devices.get("cuda").supports("fp8") is has_fp8


@pytest.mark.parametrize(
    ("arch", "has_fp8"),
    [("gfx90a:sramecc+:xnack-", False), ("gfx942", True), ("gfx950", True), ("gfx1100", False)],
)
def test_rocm_has_fp8_by_architecture(monkeypatch: pytest.MonkeyPatch, arch: str, has_fp8: bool) -> None:
    fake = install(monkeypatch, "cuda")
    monkeypatch.setattr(torch.version, "hip", "6.4")
    monkeypatch.setattr(
        fake, "get_device_properties", lambda index: SimpleNamespace(gcnArchName=arch), raising=False
    )
    assert devices.get("cuda").supports("fp8") is has_fp8


@pytest.mark.parametrize(("capability", "has_tf32"), [((7, 5), False), ((8, 0), True), ((12, 0), True)])
def test_cuda_has_tf32_since_ampere(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], has_tf32: bool
) -> None:
    fake = install(monkeypatch, "cuda")
    monkeypatch.setattr(fake, "get_device_capability", lambda index: capability, raising=False)
    assert devices.get("cuda").has_tf32 is has_tf32
    monkeypatch.setattr(torch.version, "hip", "6.4")
    assert not devices.get("cuda").has_tf32


@pytest.mark.parametrize("chosen", [None, "none", "ieee"], ids=["before torch 2.9", "not chosen", "chosen"])
def test_tf32_is_allowed_unless_the_script_has_chosen(
    monkeypatch: pytest.MonkeyPatch, chosen: str | None
) -> None:
    switches = SimpleNamespace(allow_tf32=False, **({} if chosen is None else {"fp32_precision": chosen}))
    monkeypatch.setattr(torch.backends.cuda, "matmul", switches)
    devices.get("cuda").allow_tf32()
    assert switches.allow_tf32 is (chosen != "ieee")


def test_memory_that_the_allocator_keeps_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, "cuda")
    fake.take(3 * 2**20)
    monkeypatch.setattr(fake, "memory_reserved", lambda index: 5 * 2**20 * (index == 0), raising=False)
    assert devices.get("cuda").get_memory_info(0) == (TOTAL - 2**20, TOTAL)
    assert devices.get("cuda").get_memory_info(1) == (TOTAL, TOTAL)


def test_budgets_are_what_the_driver_has(monkeypatch: pytest.MonkeyPatch) -> None:
    """Transformers adds what torch's allocator keeps, which is given back before."""
    fake = install(monkeypatch, "cuda")
    fake.take(3 * 2**20)
    monkeypatch.setattr(fake, "memory_reserved", lambda index: 5 * 2**20 * (index == 0), raising=False)
    monkeypatch.setattr(fake, "mem_get_info", lambda index: (TOTAL - 5 * 2**20 * (index == 0), TOTAL))
    budgets = get_max_memory()
    assert (budgets[0], budgets[1]) == (TOTAL - 5 * 2**20, TOTAL)
    assert fake.calls["empty_cache"] == 1


def test_pinned_memory_is_released_with_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    fake, released = install(monkeypatch, "cuda"), Mock()
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device("cuda"))
    monkeypatch.setattr(torch.accelerator, "empty_host_cache", released, raising=False)
    release_memory()
    released.assert_called_once_with()
    assert fake.calls["empty_cache"] == 1


def test_the_memory_of_other_cards_is_asked_of_nvml(monkeypatch: pytest.MonkeyPatch) -> None:
    """The runtime would open a context there, of some 500 MB."""
    fake = install(monkeypatch, "cuda")
    asked: list[int] = []
    monkeypatch.setattr(fake, "device_memory_used", lambda index: 2**20, raising=False)
    facts = SimpleNamespace(total_memory=TOTAL)
    monkeypatch.setattr(fake, "get_device_properties", lambda index: facts, raising=False)
    monkeypatch.setattr(fake, "mem_get_info", lambda index: asked.append(index) or (1, TOTAL))
    assert devices.get("cuda").get_memory_info(1) == (TOTAL - 2**20, TOTAL)
    assert devices.get("cuda").get_memory_info(0) == (1, TOTAL)
    assert asked == [0]

    class NotSupportedError(Exception):
        """On a part of a card (MIG), for one."""

    monkeypatch.setitem(sys.modules, "pynvml", SimpleNamespace(NVMLError=NotSupportedError))
    for error in (ModuleNotFoundError("No module named 'pynvml'"), NotSupportedError("Not Supported")):
        monkeypatch.setattr(fake, "device_memory_used", Mock(side_effect=error))
        assert devices.get("cuda").get_memory_info(1) == (1, TOTAL)


@pytest.mark.parametrize(
    ("name", "dtype", "teraflops"),
    [
        ("NVIDIA H100 80GB HBM3", "bf16", 989.4),
        ("NVIDIA H100 PCIe", "bf16", 756.5),
        ("NVIDIA H200", "fp16", 989.4),
        ("NVIDIA A100-SXM4-40GB", "bf16", 312.0),
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "bf16", None),
        ("Tesla V100-SXM2-16GB", "bf16", None),  # it has no such products
        ("NVIDIA L40", "bf16", None),  # neither L4 nor L40S
        ("NVIDIA A10G", "bf16", None),
        ("NVIDIA H100 80GB HBM3", "mixed", None),
    ],
)
def test_the_peak_is_that_of_the_very_card(
    monkeypatch: pytest.MonkeyPatch, name: str, dtype: str, teraflops: float | None
) -> None:
    cuda = devices.get("cuda")
    monkeypatch.setattr(type(cuda), "name", lambda *_: name)
    peak = cuda.find_peak_flops(dtype)
    assert peak == (None if teraflops is None else pytest.approx(teraflops * 1e12))
    assert devices.get("cpu").find_peak_flops(dtype) is None


def test_cuda_deterministic_readies_cublas() -> None:
    devices.get("cuda").make_deterministic()
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == ":4096:8"
    os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":16:8"
    devices.get("cuda").make_deterministic()
    assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == ":16:8", "the user's choice stays"


def test_gaudi_one_has_bf16_only(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "hpu")
    first = SimpleNamespace(_is_fp16_supported=lambda: False)
    monkeypatch.setitem(sys.modules, "habana_frameworks.torch.utils.experimental", first)
    hpu = devices.get("hpu")
    assert [hpu.supports(name) for name in ("bf16", "fp16", "fp8")] == [True, False, False]


def test_intel_cards_that_do_not_tell_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, "xpu")

    def refuse(index: int) -> Any:
        raise RuntimeError("The device doesn't support querying the available free memory.")

    monkeypatch.setattr(fake, "mem_get_info", refuse)
    fake.take(30)
    monkeypatch.setattr(fake, "memory_reserved", lambda index: 40)
    # The 10 bytes that the allocator keeps are free for tensors.
    assert devices.get("xpu").get_memory_info(0) == (TOTAL - 30, TOTAL)


def refuse_statistics(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    """Let ``torch.accelerator`` refuse as in torch 2.9 to 2.12, where an allocator has no numbers."""
    error = RuntimeError(f"INTERNAL ASSERT FAILED: Allocator for {kind} is not a DeviceAllocator")
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(torch.accelerator, "current_accelerator", lambda: torch.device(kind))
    for name in ("memory_stats", "memory_reserved", "memory_allocated"):
        monkeypatch.setattr(torch.accelerator, name, Mock(side_effect=error), raising=False)


def test_metal_has_no_retries_and_no_cache_to_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch issue 186430: asking ``torch.accelerator`` ended each forward of an offloaded model."""
    install(monkeypatch, "mps")
    refuse_statistics(monkeypatch, "mps")
    metal = devices.get("mps")
    assert (metal.allocator_retries(0), metal.cached_memory(0)) == (None, 0)
    budgets = get_max_memory()
    assert list(budgets) == ["mps"]
    assert budgets["mps"] > 0


def test_an_allocator_that_torch_cannot_ask_tells_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeModule("mtia")
    monkeypatch.setattr(torch, "mtia", fake)
    for name in ("memory_allocated", "memory_reserved"):
        monkeypatch.setattr(FakeModule, name, None)
    refuse_statistics(monkeypatch, "mtia")
    device = devices.get("mtia")
    assert (device.memory_allocated(0), device.allocator_retries(0)) == (None, None)
    assert device.get_memory_info(0) == (TOTAL, TOTAL)


def test_metal_never_promises_more_than_the_machine_has(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "mps")
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=1000, total=2000))
    assert devices.get("mps").get_memory_info() == (1000, TOTAL)


def test_several_processes_of_a_machine_with_metal_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """One may compute on it, and several on the CPU, if somebody says so."""
    install(monkeypatch, "mps")
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "2")
    for name in ("RANK", "LOCAL_RANK"):
        monkeypatch.setenv(name, "0")
    with pytest.raises(WorldError, match="2 processes share this machine, but it has 1 mps device"):
        PartialState()


def test_metal_has_bf16_since_macos_14(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "mps")
    monkeypatch.setattr(
        torch.backends.mps, "is_macos_or_newer", lambda major, minor: (major, minor) <= (13, 5)
    )
    assert not devices.get("mps").supports("bf16")
    assert devices.get("mps").supports("fp16")


def test_xla_is_hidden_by_its_variable_and_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """B1: an installed torch_xla must not take a machine over that has no TPU."""
    fake = install(monkeypatch, "xla")
    assert isinstance(fake, FakeXla)
    xla = devices.get("xla")
    assert devices.detect() is xla
    with patch_environment(USE_TORCH_XLA="0"):
        assert devices.detect().type == "cpu"
    fake.kind = "CPU"
    assert not xla.is_available()
    assert xla.bind(0).type == "xla", "asked for by name it still works"


def test_a_tpu_that_is_asked_for_and_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch_xla 2.9 ended in OSError: libtpu not found, from its own files."""
    fake = install(monkeypatch, "xla")
    assert isinstance(fake, FakeXla)
    monkeypatch.delenv("TPU_LIBRARY_PATH")
    xla = devices.get("xla")
    for use in (xla.count, lambda: xla.bind(0)):
        with pytest.raises(DeviceError, match="neither a TPU nor its driver, libtpu") as caught:
            use()
        assert "unset PJRT_DEVICE" in str(caught.value)
    fake.kind = "CPU"
    assert xla.bind(0).type == "xla"


def test_xla_without_a_torch_xla_that_fits_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch_xla", None)
    with pytest.raises(DeviceError, match="pip install torch==2"):
        devices.get("xla").bind(0)


def test_xla_multiplies_fp16_only_off_the_tpu(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, "xla")
    assert isinstance(fake, FakeXla)
    assert not devices.get("xla").supports("fp16")
    fake.kind = "CUDA"
    assert devices.get("xla").supports("fp16")


def test_older_xla_tells_memory_in_kibibytes(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, "xla")
    monkeypatch.setattr(fake, "get_memory_info", lambda device: {"kb_free": 3, "kb_total": 8})
    xla = devices.get("xla")
    assert xla.get_memory_info() == (3 * 1024, 8 * 1024)
    assert xla.memory_allocated() == 5 * 1024
    assert xla.max_memory_allocated() is None


def test_xla_work_is_done_at_a_synchronize(monkeypatch: pytest.MonkeyPatch) -> None:
    fake = install(monkeypatch, "xla")
    devices.get("xla").synchronize()
    assert fake.calls == {"sync": 1, "synchronize 0": 1}


@pytest.mark.parametrize(
    ("name", "there", "backend"),
    [
        ("cuda", {"nccl", "gloo"}, "nccl"),
        ("cuda", {"gloo"}, "gloo"),
        ("xpu", {"xccl", "gloo"}, "xccl"),
        ("xpu", {"ccl", "gloo"}, "ccl"),
        ("npu", {"hccl"}, "hccl"),
        ("hpu", {"hccl"}, "hccl"),
        ("xla", {"xla"}, "xla"),
    ],
)
def test_the_preferred_backend_that_is_there(
    monkeypatch: pytest.MonkeyPatch, name: str, there: set[str], backend: str
) -> None:
    install(monkeypatch, name)
    monkeypatch.setattr(torch.distributed, "is_backend_available", there.__contains__)
    assert devices.get(name).group_backend() == backend


def test_no_backend_is_an_error_that_lists_them(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "xpu")
    monkeypatch.setattr(torch.distributed, "is_backend_available", lambda name: False)
    with pytest.raises(DeviceError, match="no process group") as caught:
        devices.get("xpu").group_backend()
    assert "xccl, ccl" in str(caught.value)


def test_the_cpu_is_as_it_is() -> None:
    cpu = devices.get("cpu")
    free, total = cpu.get_memory_info()
    assert 0 < free <= total
    used = cpu.memory_allocated()
    assert used is not None
    assert 0 < used <= total
    assert cpu.group_backend() == "gloo"
    assert cpu.bind(5) == torch.device("cpu")
    assert cpu.count() == 1
    assert cpu.supports("bf16")
    assert not cpu.supports("fp8")
    assert cpu.is_out_of_memory(MemoryError())
    torch.manual_seed(3)
    state = cpu.get_rng_state_all()
    first = torch.rand(3)
    cpu.set_rng_state_all(state)
    assert torch.equal(torch.rand(3), first)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux resets the peak of a process")
def test_the_cpus_peak_falls_after_a_reset() -> None:
    cpu = devices.get("cpu")
    # Pages of its own, 256 MiB: what an allocator gives may be memory that it had, and keeps.
    block = mmap.mmap(-1, 2**28)
    for page in range(0, 2**28, mmap.PAGESIZE):
        block[page] = 1
    high = cpu.max_memory_allocated()
    block.close()
    assert high is not None
    if not cpu.reset_peak_memory():
        pytest.skip("the kernel does not let this process reset its peak")
    after = cpu.max_memory_allocated()
    assert after is not None
    assert after <= high - 2**27


def test_null_needs_no_module_of_torch() -> None:
    null = CountingDevice(size=2)
    assert (null.count(), null.is_available(), null.group_backend()) == (2, True, "fake")
    assert null.bind(1) == torch.device("meta")
    assert null.current() == 1
    assert null.get_memory_info() == devices.get("null").get_memory_info() == (2**30, 2**30)
    assert null.memory_allocated() is null.max_memory_allocated() is null.stream() is None
    assert not null.reset_peak_memory()
    null.synchronize()
    null.empty_cache()
    devices.get("null").seed(5)
    null.set_rng_state_all(states := null.get_rng_state_all())
    assert len(states) == 2
    assert all(map(null.supports, ("no", "fp32", "bf16", "fp16", "fp8")))
    assert not null.supports("fp4")


def test_null_refuses_a_device_it_has_not() -> None:
    with pytest.raises(DeviceError, match="does not exist"):
        CountingDevice(size=2).bind(2)


def test_a_word_that_is_neither_yes_nor_no_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, "xla")
    with (
        patch_environment(USE_TORCH_XLA="perhaps"),
        pytest.raises(SettingError, match="neither yes nor no"),
    ):
        devices.get("xla").is_available()


def test_retries_of_the_allocator_are_those_that_torch_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "mtia", FakeModule("mtia"))
    assert devices.get("mtia").allocator_retries(0) is None
    counted = {0: {"num_alloc_retries": 2, "num_ooms": 1}, 1: {}}
    monkeypatch.setattr(FakeModule, "memory_stats", lambda self, index: counted[index], raising=False)
    assert devices.get("mtia").allocator_retries(0) == 2
    assert devices.get("mtia").allocator_retries(1) is None
