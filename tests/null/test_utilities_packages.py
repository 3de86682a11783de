"""Packages, versions and devices: asked about, never imported."""

from __future__ import annotations

import importlib.metadata
import shutil
import subprocess
import sys
import types
import zipfile

import pytest
import torch
from packaging.version import Version

from accelerate import device as devices
from accelerate.core import packages
from accelerate.core.errors import MissingExtraError, SettingError
from accelerate.facade import device_availability
from accelerate.utils import (
    check_cuda_fp8_capability,
    compare_versions,
    imports,
    is_torch_version,
    operations,
)
from tests.support.environment import ROOT


@pytest.fixture(autouse=True)
def _forget():
    packages._has_spec.cache_clear()
    packages.get_version.cache_clear()
    yield
    packages._has_spec.cache_clear()
    packages.get_version.cache_clear()


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder of installed packages: ``site(name, version)`` adds one."""

    def add(name: str, version: str = "1.0", distribution: str | None = None) -> None:
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "__init__.py").write_text("raise RuntimeError('imported')")
        info = tmp_path / f"{(distribution or name).replace('-', '_')}-{version}.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(
            f"Metadata-Version: 2.1\nName: {distribution or name}\nVersion: {version}\n"
        )
        (info / "top_level.txt").write_text(name)

    monkeypatch.syspath_prepend(str(tmp_path))
    return add


def test_an_installed_package_is_found_and_not_imported(site):
    site("toy_tracker")
    assert packages.is_installed("toy_tracker")
    assert not packages.is_installed("toy_absent")
    assert not packages.is_installed("toy_absent.inner")
    assert "toy_tracker" not in sys.modules


def test_a_bare_folder_is_no_package(tmp_path, monkeypatch):
    """Trackers leave folders of their own name where a script runs."""
    (tmp_path / "toy_tracker").mkdir()
    monkeypatch.syspath_prepend(str(tmp_path))
    assert not packages.is_installed("toy_tracker")


def test_a_module_made_by_hand_counts(monkeypatch):
    monkeypatch.setitem(sys.modules, "toy_made", types.ModuleType("toy_made"))
    assert packages.is_installed("toy_made")


@pytest.mark.parametrize(
    ("requirement", "expected"),
    [
        ("toy", True),
        ("toy>=1.5", True),
        ("toy>=2", False),
        ("toy<2", True),
        ("absent", False),
        ("absent<9", False),
    ],
)
def test_a_requirement_is_held_against_the_installed_version(site, requirement, expected):
    site("toy", "1.5rc1" if requirement == "toy<2" else "1.5")
    assert packages.is_satisfied(requirement) is expected


def test_a_distribution_may_have_another_name_than_its_module(site):
    site("toy_module", "3.1", distribution="toy-tools-for-all")
    assert packages.get_version("toy_module") == Version("3.1")
    assert packages.is_satisfied("toy_module>=3")


def test_any_of_several_packages_and_a_flag(site, monkeypatch):
    site("toy_b")
    check = packages.make_checker("toy_a", "toy_b", flag="TOY_ENABLED")
    assert check() is False
    monkeypatch.setenv("TOY_ENABLED", "1")
    assert check() is True
    assert packages.make_checker("toy_a")() is False


def test_a_needed_package_is_named_when_the_function_is_called(site):
    @packages.requires("toy_engine")
    def start(speed: int) -> int:
        return speed

    with pytest.raises(MissingExtraError, match="pip install toy_engine"):
        start(1)
    site("toy_engine")
    packages._has_spec.cache_clear()
    assert start(2) == 2
    assert start.__name__ == "start"


def test_questions_about_packages_answer_truly():
    assert imports.is_tqdm_available() is True
    assert imports.is_numpy_available() is True
    assert imports.is_numpy_available("99") is False
    assert imports.is_weights_only_available() is True
    assert imports.is_rich_available() is False
    for name in ("wandb", "deepspeed", "peft"):
        here = any(
            name == distribution.name.lower()
            for distribution in importlib.metadata.distributions()
            if distribution.name
        )
        assert getattr(imports, f"is_{name}_available")() is here


def test_programs_find_us_by_the_home_page_in_the_metadata():
    """sentence-transformers and others do not train if that of ``accelerate`` has no "huggingface" in it."""
    metadata = importlib.metadata.metadata("accelerate")
    assert metadata["Name"] == "accelerate"
    assert "huggingface" in metadata["Home-page"]
    assert "independent implementation" in metadata["Summary"]


def test_a_wheel_has_no_file_of_an_earlier_version(tmp_path):
    """setuptools keeps what it copies to build/, and a command is whatever file there is in cli/."""
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    package = tmp_path / "src" / "accelerate"
    package.mkdir(parents=True)
    names = [package / "__init__.py", package / "names.pyi", package / "old.py"]
    wheels = []
    for removed in (None, names[-1]):
        for path in names:
            path.touch()
        if removed:
            removed.unlink()
        code = "from setuptools import build_meta; build_meta.build_wheel('dist')"
        done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        (wheel,) = (tmp_path / "dist").glob("*.whl")
        with zipfile.ZipFile(wheel) as file:
            wheels.append({name for name in file.namelist() if name.startswith("accelerate/")})
            assert b"Home-page: " in file.read("accelerate-2.0.0.dist-info/METADATA")
    assert wheels[0] == {"accelerate/__init__.py", "accelerate/names.pyi", "accelerate/old.py"}
    assert wheels[1] == {"accelerate/__init__.py", "accelerate/names.pyi"}


def test_asking_about_packages_and_versions_imports_no_torch():
    code = (
        "import sys; from accelerate import utils\n"
        "utils.is_wandb_available(), utils.is_deepspeed_available(), utils.is_torch_version('>=', '2.0')\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize(
    ("found", "operation", "wanted", "expected"),
    [
        ("2.6.0+cpu", "==", "2.6.0", True),
        ("2.6.0+cpu", ">", "2.6.0", False),
        ("2.6.0+cpu", "<=", "2.6.0", True),
        ("2.6.0+cpu", "==", "2.6.0+cu128", False),
        ("2.6.0+cpu", "==", "2.6.0+cpu", True),
        ("2.10.0", ">", "2.9.1", True),
        ("2.7.0.dev20250101", "<", "2.7.0", True),
        ("1.0", "!=", "1.0.0", False),
    ],
)
def test_versions_compare_as_pip_compares_them(found, operation, wanted, expected):
    assert compare_versions(Version(found), operation, wanted) is expected


def test_versions_of_packages_and_wrong_operations():
    assert compare_versions("torch", ">=", "2.6")
    assert is_torch_version("==", importlib.metadata.version("torch").partition("+")[0])
    with pytest.raises(SettingError, match="use one of: >, >="):
        compare_versions("torch", "=>", "2.6")
    with pytest.raises(importlib.metadata.PackageNotFoundError):
        compare_versions("no-such-package", ">=", "1")


class Absent:
    """A device that is absent."""

    type = "absent"

    def is_available(self) -> bool:
        return False


class Toy(Absent):
    """A device that is present."""

    type = "toy"

    def is_available(self) -> bool:
        return True

    def supports(self, dtype: str) -> bool:
        return dtype == "bf16"

    def name(self) -> str:
        return "Toy TPU v1"


@pytest.fixture
def toys(monkeypatch):
    table = {name: Toy() for name in ("toy", "cuda", "hpu", "mps", "xla")} | {"absent": Absent()}
    monkeypatch.setattr(devices, "get", table.__getitem__)
    monkeypatch.setattr(devices, "detect", lambda: table["toy"])
    return table


def test_device_questions_ask_the_devices_own_file(toys, monkeypatch):
    assert device_availability.device_checker("toy")(check_device=True) is True
    assert device_availability.device_checker("absent")() is False
    assert imports.is_cuda_available() is True
    assert imports.is_hpu_available(init_hccl=True) is True
    assert check_cuda_fp8_capability() is False
    monkeypatch.setattr(Toy, "supports", lambda self, dtype: dtype == "fp8")
    assert check_cuda_fp8_capability() is True
    assert imports.is_bf16_available() is False
    toys["cuda"] = Absent()
    assert check_cuda_fp8_capability() is False


def test_device_questions_about_models_and_versions(toys, monkeypatch):
    assert imports.is_habana_gaudi1() is False
    monkeypatch.setattr(Toy, "name", lambda self: "GAUDI")
    assert imports.is_habana_gaudi1() is True
    assert imports.is_mps_available() is True
    assert imports.is_mps_available("99.0") is False
    assert imports.is_fp16_available() is False
    toys["xla"].type = "other"
    assert imports.is_bf16_available(ignore_tpu=True) is True
    toys["xla"].type = "toy"
    assert imports.is_bf16_available(ignore_tpu=True) is False
    assert imports.is_bf16_available() is True


def test_a_kind_of_device_is_asked_for_one_at_a_time(toys):
    check = imports.is_torch_xla_available
    assert check() is True
    assert check(check_is_tpu=True) is True
    assert check(check_is_gpu=True) is False
    toys["xla"] = Absent()
    assert check(check_is_gpu=True) is False
    with pytest.raises(SettingError, match="both"):
        check(True, True)


def test_a_question_takes_its_own_arguments_only(toys):
    with pytest.raises(TypeError, match="check_devise"):
        device_availability.device_checker("toy")(check_devise=True)
    with pytest.raises(TypeError):
        imports.is_cuda_available(True)  # pyright: ignore[reportCallIssue]


def test_questions_about_this_machine():
    assert imports.is_cuda_available() is torch.cuda.is_available()
    assert imports.is_torch_distributed_available() is torch.distributed.is_available()
    assert imports.is_rocm_available() is (torch.version.hip is not None and torch.cuda.is_available())
    assert imports.is_xccl_available() is False or torch.xpu.is_available()
    for name in ("npu", "mlu", "musa", "sdaa", "neuron", "hpu"):
        assert getattr(imports, f"is_{name}_available")() is hasattr(torch, name)


def test_other_packages_are_asked_only_where_they_are(monkeypatch):
    monkeypatch.setattr(packages, "is_installed", lambda name: name in sys.modules)
    for name in ("bitsandbytes", "transformer_engine", "transformer_engine.pytorch.fp8"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    assert imports.is_bitsandbytes_multi_backend_available() is False
    assert imports.is_transformer_engine_mxfp8_available() is False
    toys = {name: types.ModuleType(name) for name in ("bitsandbytes", "transformer_engine.pytorch.fp8")}
    for name, toy in {**toys, "transformer_engine": types.ModuleType("transformer_engine")}.items():
        monkeypatch.setitem(sys.modules, name, toy)
    library, engine = toys.values()
    library.features, engine.check_mxfp8_support = {"fast"}, lambda: (False, "too old")
    assert imports.is_bitsandbytes_multi_backend_available() is False
    assert imports.is_transformer_engine_mxfp8_available() is False
    library.features, engine.check_mxfp8_support = {"multi_backend"}, lambda: (True, "")
    assert imports.is_bitsandbytes_multi_backend_available() is True
    assert imports.is_transformer_engine_mxfp8_available() is True


def test_a_tensor_says_where_it_lives(monkeypatch):
    assert operations.is_torch_xpu_tensor(torch.ones(1)) is False
    assert operations.is_torch_xpu_tensor("text") is False
    assert operations.is_torch_xpu_tensor(types.SimpleNamespace(device=torch.device("xpu"))) is True
