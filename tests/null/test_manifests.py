"""The manifests that ``accelerate launch --print_manifest`` prints, and what its machines make of them."""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import yaml

from tests.support.command import run

KINDS = ("pytorchjob", "jobset", "skypilot")
FILE = """distributed_type: FSDP
num_machines: 2
num_processes: 16
mixed_precision: bf16
fsdp_config: {fsdp_version: 2, fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP}
"""
COUNTS = ["accelerate", "launch", "--num_machines", "2", "--nproc_per_node", "8"]
GIVEN = ["--mixed_precision", "bf16", "--use_fsdp", "--fsdp_version", "2"]
GIVEN += ["--fsdp_auto_wrap_policy", "TRANSFORMER_BASED_WRAP"]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_Train.py").write_text("raise SystemExit('it was started')")
    (tmp_path / "job.yaml").write_text(FILE)
    return tmp_path


def manifest(capfd: pytest.CaptureFixture[str], kind: str, *more: str) -> Any:
    given = ["launch", "--print_manifest", kind, "--manifest_image", "registry.example/train:1", *more]
    assert run(given) == 0, capfd.readouterr().err
    out = capfd.readouterr().out
    assert out.startswith(f"# accelerate launch --print_manifest {kind}\n")
    return yaml.safe_load(out)


def containers(document: Any) -> list[Any]:
    """The containers of all pods, with the number of pods."""
    if document["kind"] == "PyTorchJob":
        specs = document["spec"]["pytorchReplicaSpecs"].values()
        return [(spec["replicas"], *spec["template"]["spec"]["containers"]) for spec in specs]
    (job,) = document["spec"]["replicatedJobs"]
    spec = job["template"]["spec"]
    return [(spec["completions"], *spec["template"]["spec"]["containers"])]


def test_a_pytorch_job_of_a_file(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    words = ("--config_file", "job.yaml", "my_Train.py", "--lr", "a b", "$(HOME)")
    document = manifest(capfd, "pytorchjob", *words)
    assert (document["apiVersion"], document["metadata"]) == ("kubeflow.org/v1", {"name": "my-train"})
    assert document["spec"]["nprocPerNode"] == "8"
    assert [*document["spec"]["pytorchReplicaSpecs"]] == ["Master", "Worker"]
    for count, container in containers(document):
        assert (count, container["name"], container["image"]) == (1, "pytorch", "registry.example/train:1")
        assert container["command"] == [*COUNTS, *GIVEN, "my_Train.py", "--lr", "a b", "$$(HOME)"]
        assert container["resources"] == {"limits": {"nvidia.com/gpu": "8"}}


def test_a_job_set_reaches_its_first_pod_by_name(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    document = manifest(capfd, "jobset", "--config_file", "job.yaml", "my_Train.py")
    assert (document["apiVersion"], document["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    ((count, container),) = containers(document)
    place = ["--machine_rank", "$(JOB_COMPLETION_INDEX)", "--main_process_ip"]
    place += ["my-train-machines-0-0.my-train", "--main_process_port", "29500"]
    assert (count, container["command"]) == (2, [*COUNTS, *place, *GIVEN, "my_Train.py"])
    (job,) = document["spec"]["replicatedJobs"]
    assert job["name"] == "machines"
    assert job["template"]["spec"]["completionMode"] == "Indexed"


def test_a_sky_task_takes_its_place_from_the_variables_of_its_node(
    folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    words = ("--config_file", "job.yaml", "--manifest_accelerator", "H100", "my_Train.py", "it's")
    document = manifest(capfd, "skypilot", *words)
    assert (document["name"], document["num_nodes"]) == ("my-train", 2)
    assert document["resources"] == {"image_id": "docker:registry.example/train:1", "accelerators": "H100:8"}
    run_words = shlex.split(document["run"])
    assert run_words[:6] == COUNTS
    assert run_words[6:8] == ["--machine_rank", "$SKYPILOT_NODE_RANK"]
    assert run_words[-2:] == ["my_Train.py", "it's"]


def test_the_models_of_the_clients_take_the_pods(folder: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Kubeflow's and Kubernetes' own classes read each manifest and write the same again."""
    models = pytest.importorskip("kubeflow.training.models")
    client = pytest.importorskip("kubernetes.client")
    for name in vars(models):
        if name.startswith("KubeflowOrg"):
            setattr(client.models, name, getattr(models, name))

    def read_and_write(part: Any, name: str) -> Any:
        api = client.ApiClient()
        return api.sanitize_for_serialization(api.deserialize(SimpleNamespace(data=json.dumps(part)), name))

    words = ("--config_file", "job.yaml", "my_Train.py")
    job = manifest(capfd, "pytorchjob", *words)
    assert read_and_write(job, "KubeflowOrgV1PyTorchJob") == job
    template = manifest(capfd, "jobset", *words)["spec"]["replicatedJobs"][0]["template"]
    assert read_and_write(template, "V1JobTemplateSpec") == template


def test_sky_pilot_reads_the_task(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its schema takes the printed task, and its own class says the same of it."""
    monkeypatch.setenv("HOME", str(folder))
    monkeypatch.setenv("SKYPILOT_DISABLE_USAGE_COLLECTION", "1")
    sky = pytest.importorskip("sky")
    words = ("--config_file", "job.yaml", "--manifest_accelerator", "H100", "my_Train.py")
    document = manifest(capfd, "skypilot", *words)
    schema = sky.utils.schemas.get_task_schema()
    sky.utils.common_utils.validate_schema(document, schema, "")
    with pytest.raises(ValueError, match="num_node"):
        sky.utils.common_utils.validate_schema({**document, "num_node": 2}, schema, "")
    task = sky.Task.from_yaml_config(dict(document))  # it takes the entries out
    (resources,) = task.resources
    assert (task.name, task.num_nodes, task.run) == ("my-train", 2, document["run"])
    assert resources.accelerators == {"H100": 8}


def test_a_pod_of_a_pytorch_job_knows_its_place(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the variables that the operator sets, the printed command plans the processes of that machine."""
    document = manifest(capfd, "pytorchjob", "--cpu", "--num_machines", "2", "-n", "4", "my_Train.py")
    _, container = containers(document)[1]
    assert "resources" not in container
    pod = {"NNODES": "2", "NODE_RANK": "1", "NPROC_PER_NODE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "23456"}
    for name, value in pod.items():
        monkeypatch.setenv(f"PET_{name}", value)
    words = container["command"][1:]
    assert run([words[0], "--dry_run", *words[1:]]) == 0
    out = capfd.readouterr().out
    assert "rank 2" in out
    assert "rank 3" in out
    assert "rank 1" not in out


@pytest.mark.parametrize(
    ("script", "name"),
    [("2024_run", "train-2024-run"), ("_", "train"), (f"{'a' * 39}_b", "a" * 39), ("Étude 1", "tude-1")],
)
def test_the_name_is_one_that_services_may_have(
    folder: Path, capfd: pytest.CaptureFixture[str], script: str, name: str
) -> None:
    (folder / f"{script}.py").touch()
    document = manifest(capfd, "jobset", "--config_file", "job.yaml", f"{script}.py")
    assert document["metadata"] == {"name": name}


@pytest.mark.parametrize("kind", KINDS)
def test_what_a_manifest_needs_is_asked_for(
    folder: Path, capfd: pytest.CaptureFixture[str], kind: str
) -> None:
    def error(*words: str) -> str:
        assert run(["launch", "--print_manifest", kind, *words, "my_Train.py"]) == 2
        return capfd.readouterr().err

    assert "how many processes each machine starts" in error()
    assert "a manifest names one number" in error("--num_machines", "1:4", "--nproc_per_node", "8")
    last = error("--nproc_per_node", "8")
    assert ("--manifest_accelerator H100" if kind == "skypilot" else "--manifest_image") in last


def test_secrets_and_what_is_of_this_machine_stay_here(
    folder: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "fp16")
    words = ("--nproc_per_node", "1", "--gpu_ids", "0", "--main_process_ip", "10.0.0.1", "my_Train.py")
    ((_, container),) = containers(manifest(capfd, "jobset", *words))
    text = " ".join(container["command"])
    assert "--mixed_precision fp16" in text
    assert "gpu_ids" not in text
    assert "10.0.0.1" not in text
