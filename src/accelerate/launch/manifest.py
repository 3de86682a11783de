"""The job as a manifest for Kubernetes or SkyPilot. ``--print_manifest`` prints it, and starts nothing.

A pod or node of the job runs ``accelerate launch`` with the settings that are given here, in files and
variables too, so that it needs neither. It learns its number and the address of the first one from the
scheduler.

Sources: Kubeflow Training Operator 1.9, "PyTorch Training (PyTorchJob)" (the container is named pytorch; the
operator sets torchrun's ``PET_...`` variables); JobSet v1alpha2, "Concepts" (names of pods); Kubernetes,
"Indexed Job" (JOB_COMPLETION_INDEX); SkyPilot, "Distributed Multi-Node Jobs"; its task schema in 0.14.1.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping
from pathlib import PurePath
from typing import Any

from accelerate.core.errors import SettingError
from accelerate.core.setting import Setting, declared_settings
from accelerate.core.value_types import frozen_dataclass
from accelerate.launch.base import SECRET
from accelerate.launch.launch_request import LaunchRequest, format_value

PORT = 29500
GPU = "nvidia.com/gpu"
# Settings that the manifest says itself, or that are of this machine only.
_LOCAL = {
    "num_processes",
    "nproc_per_node",
    "num_machines",
    "machine_rank",
    "main_process_ip",
    "main_process_port",
    "config_file",
    "gpu_ids",
    "multi_gpu",
    "standalone",
    "print_manifest",
    "manifest_image",
    "manifest_accelerator",
    "ray",
    "ray_address",
    "ray_resources",
    "ray_placement",
}


@frozen_dataclass
class ManifestJob:
    """The job, as every kind of manifest describes it.

    Attributes:
        name: a DNS label, from the name of the script.
        machines: how many pods or nodes.
        processes: of each.
        image: the container image, if one was given.
        accelerator: the resource that a process needs one of; "" on a CPU.
        flags: the settings, as flags of ``accelerate launch``.
        program: the script and its arguments.
    """

    name: str
    machines: int
    processes: int
    image: str | None
    accelerator: str
    flags: tuple[str, ...]
    program: tuple[str, ...]

    def command(self, *place: str) -> list[str]:
        """Return the command of one machine; ``place`` are the flags that say which one it is."""
        counts = ["--num_machines", str(self.machines), "--nproc_per_node", str(self.processes)]
        return ["accelerate", "launch", *counts, *place, *self.flags, *self.program]


def print_manifest(request: LaunchRequest) -> None:
    """Print the manifest on stdout, as YAML.

    Raises:
        SettingError: the numbers of machines and processes, or the image, are not said.
    """
    import yaml

    kind = str(request.settings.print_manifest)
    manifest = MANIFESTS[kind](_describe_job(request, kind))
    print(f"# accelerate launch --print_manifest {kind}")
    print(yaml.safe_dump(manifest, sort_keys=False, width=100), end="", flush=True)


def _describe_job(request: LaunchRequest, kind: str) -> ManifestJob:
    settings = request.settings
    least, machines = request.machines
    if least != machines:
        raise SettingError(
            f"{request.origin('num_machines').where} is {settings.num_machines}: a manifest names one number",
            fix=f"--num_machines {machines}",
        )
    processes = request.local_processes.value
    if not isinstance(processes, int):
        raise SettingError(
            "a manifest has to say how many processes each machine starts",
            why="the machines of the job are not this one, whose devices could be counted",
            fix="--nproc_per_node 8",
        )
    accelerator = settings.manifest_accelerator or ("" if kind == "skypilot" else GPU)
    if request.get("use_cpu"):
        accelerator = ""
    elif not accelerator:
        raise SettingError(
            "a SkyPilot task has to name the accelerator that it needs",
            fix="--manifest_accelerator H100, or --cpu",
        )
    program = request.program
    if kind != "skypilot" and not settings.manifest_image:
        raise SettingError(
            "a pod needs an image, and none was given",
            fix="--manifest_image registry.example/train:1, with torch, this package and the script",
        )
    stem = PurePath(request.program[0]).stem.rpartition(".")[2]
    name = re.sub(r"[^a-z0-9]+", "-", stem.lower()).strip("-")
    # Services are named by it too: a letter first, and a letter or digit last (RFC 1035).
    name = (name if name[:1].isalpha() else f"train-{name}")[:40].rstrip("-")
    if kind != "skypilot":
        # Kubernetes would take $(NAME) in the user's words for a variable.
        program = tuple(word.replace("$(", "$$(") for word in program)
    flags = tuple(iterate_flags(request))
    return ManifestJob(name, machines, processes, settings.manifest_image, accelerator, flags, program)


def iterate_flags(request: LaunchRequest) -> Iterator[str]:
    """Yield the flags of every setting that some source gave a value of its own."""
    switches = request.strategy_switches
    for cls in request.loaded:
        for row in declared_settings(cls):
            origin = request.origin(row.name)
            if row.name in switches:
                yield row.flags[0]
            elif origin.source in ("flag", "environment", "file") and request.is_asked_for(cls):
                yield from _format_flag(row, origin.value)


def _format_flag(row: Setting, value: Any) -> Iterator[str]:
    is_local = row.name in _LOCAL or SECRET.search(row.name)
    if is_local or not row.flags or value is None or value == row.default:
        return
    if row.switch and isinstance(value, bool):
        yield row.flags[0]
    else:
        yield from (row.flags[0], format_value(value))


# ------------------------------------------------------------------------------------- the manifests


def _make_pod(job: ManifestJob, container: str, command: list[str], **more: Any) -> dict[str, Any]:
    """Return the pod of one machine; by default it has 64 MiB of shared memory, too few for workers."""
    main: dict[str, Any] = {"name": container, "image": job.image, "command": command}
    if job.accelerator:
        main["resources"] = {"limits": {job.accelerator: str(job.processes)}}
    main["volumeMounts"] = [{"name": "shared-memory", "mountPath": "/dev/shm"}]
    memory = {"name": "shared-memory", "emptyDir": {"medium": "Memory"}}
    return {"spec": {**more, "containers": [main], "volumes": [memory]}}


def _make_pytorch_job(job: ManifestJob) -> dict[str, Any]:
    def replica(count: int) -> dict[str, Any]:
        pod = _make_pod(job, "pytorch", job.command())
        return {"replicas": count, "restartPolicy": "OnFailure", "template": pod}

    specs = {"Master": replica(1)}
    if job.machines > 1:
        specs["Worker"] = replica(job.machines - 1)
    return {
        "apiVersion": "kubeflow.org/v1",
        "kind": "PyTorchJob",
        "metadata": {"name": job.name},
        "spec": {
            "nprocPerNode": str(job.processes),
            "runPolicy": {"cleanPodPolicy": "None"},  # their logs stay readable
            "pytorchReplicaSpecs": specs,
        },
    }


def _make_job_set(job: ManifestJob) -> dict[str, Any]:
    place = ("--machine_rank", "$(JOB_COMPLETION_INDEX)", "--main_process_ip")
    command = job.command(*place, f"{job.name}-machines-0-0.{job.name}", "--main_process_port", str(PORT))
    machines = {
        "parallelism": job.machines,
        "completions": job.machines,
        "completionMode": "Indexed",
        "backoffLimit": 0,
        "template": _make_pod(job, "train", command, restartPolicy="Never"),
    }
    return {
        "apiVersion": "jobset.x-k8s.io/v1alpha2",
        "kind": "JobSet",
        "metadata": {"name": job.name},
        "spec": {"replicatedJobs": [{"name": "machines", "template": {"spec": machines}}]},
    }


def _make_sky_task(job: ManifestJob) -> dict[str, Any]:
    place = ("--machine_rank", "RANK", "--main_process_ip", "ADDRESS", "--main_process_port", str(PORT))
    run = shlex.join(job.command(*place)).replace(" RANK ", ' "$SKYPILOT_NODE_RANK" ', 1)
    run = run.replace(" ADDRESS ", ' "$(echo "$SKYPILOT_NODE_IPS" | head -n1)" ', 1)
    resources: dict[str, Any] = {"image_id": f"docker:{job.image}"} if job.image else {}
    if job.accelerator:
        resources["accelerators"] = f"{job.accelerator}:{job.processes}"
    task: dict[str, Any] = {"name": job.name, "workdir": ".", "num_nodes": job.machines}
    return {**task, **({"resources": resources} if resources else {}), "run": run + "\n"}


MANIFESTS: Mapping[str, Callable[[ManifestJob], dict[str, Any]]] = {
    "pytorchjob": _make_pytorch_job,
    "jobset": _make_job_set,
    "skypilot": _make_sky_task,
}
