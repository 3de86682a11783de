"""The files of examples/configs, read and checked as a launch does; those of examples/clusters."""

from __future__ import annotations

import shlex
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.null.test_docs import wrong_accelerate
from tests.support import launch_plans
from tests.support.devices import machine
from tests.support.environment import ROOT

FILES = sorted((ROOT / "examples/configs").glob("*.yaml"))
ON_CPU = {"cpu", "mpi"}
OTHER_KINDS = {
    "ddp_two_machines": "elastic",
    "hsdp": "elastic",
    "elastic": "elastic",
    "mpi": "mpi",
    "tpu": "tpu",
}


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script, and a file of machines for mpirun."""
    (tmp_path / "x.py").touch()
    (tmp_path / "hosts").write_text("one slots=2\ntwo slots=2\n", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_means_what_its_name_says(path: Path, folder: Path) -> None:
    asked = launch_plans.request_of_file(path)
    launch_plans.check(asked)
    kind = OTHER_KINDS.get(path.stem, "local")
    assert launch_plans.kind_of(asked) is launch_plans.kind_named(kind)
    if kind not in ("tpu", "mpi"):
        cards = machine(folder, [f"dev/nvidia{number}" for number in range(8)], packages=("torch",))
        chosen = launch_plans.allocate(asked, cards)
        assert chosen.device.type == ("cpu" if path.stem in ON_CPU else "cuda")
        processes = {"cpu": 2, "one_gpu": 1, "mps": 1}.get(path.stem, 8)
        assert chosen.processes == processes


def test_a_file_with_an_unknown_key_is_refused(folder: Path) -> None:
    text = (ROOT / "examples/configs/fsdp2.yaml").read_text(encoding="utf-8")
    shutil.copy(ROOT / "examples/configs/fsdp2.yaml", folder / "job.yaml")
    launch_plans.check(launch_plans.request_of_file(folder / "job.yaml"))
    (folder / "job.yaml").write_text(text.replace("fsdp_version", "fsdp_verison"), encoding="utf-8")
    with pytest.raises(ValueError, match="fsdp_verison"):
        launch_plans.check(launch_plans.request_of_file(folder / "job.yaml"))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_a_file_begins_with_what_it_is_for(path: Path) -> None:
    assert path.read_text(encoding="utf-8").startswith("# ")


def commands_of_clusters() -> list[tuple[str, str]]:
    """(file, the command of a launch) of the scripts and manifests for clusters."""
    manifests = yaml.safe_load_all((ROOT / "examples/clusters/kubernetes.yaml").read_text(encoding="utf-8"))
    (job,) = [each for each in manifests if each["kind"] == "Job"]
    (container,) = job["spec"]["template"]["spec"]["containers"]
    script = (ROOT / "examples/clusters/slurm.sh").read_text(encoding="utf-8")
    (line,) = [line for line in script.splitlines() if line.startswith("srun ")]
    return [
        ("kubernetes.yaml", *container["args"]),
        ("slurm.sh", line.removeprefix("srun ").replace('"$@"', "train.py --epochs 3")),
    ]


@pytest.mark.parametrize(("file", "command"), commands_of_clusters())
def test_the_launch_in_a_file_for_a_cluster_has_flags_that_exist(file: str, command: str) -> None:
    program, *words = shlex.split(command.replace("$JOB_COMPLETION_INDEX", "0"))
    assert program == "accelerate"
    assert "train.py" in words
    assert not list(wrong_accelerate(words)), command


def test_the_script_for_slurm_is_one_for_bash() -> None:
    subprocess.run(["bash", "-n", ROOT / "examples/clusters/slurm.sh"], check=True)
