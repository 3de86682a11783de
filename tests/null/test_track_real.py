"""Trackers with their real library, offline, read back with its own reader where it has one.

Those whose library is not installed are left out: pip install "accelerate[trackers]" runs them all. The
stand-ins of tests/support/trackers.py are held against the libraries too.
"""

from __future__ import annotations

import importlib
import inspect
import json
import struct
import zipfile
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accelerate import Accelerator, track
from tests.support.trackers import LIBRARIES

CONFIG = {"lr": 0.125, "path": Path("a/b"), "inner": {"deep": 77}}
LOSSES = [1.5, 0.75, 0.25]
PICTURE = np.arange(48, dtype="uint8").reshape(4, 4, 3)


def options_of(name: str, folder: Path) -> dict[str, Any]:
    """Options of a run that needs no network."""
    offline: dict[str, dict[str, Any]] = {
        # Looking for a repository, it reads every file that is imported and waits for the network.
        "clearml": {"auto_connect_frameworks": {"*": False, "detect_repository": False}, "output_uri": False},
        "comet_ml": {"online": False},
        "dvclive": {"dir": str(folder / "live"), "save_dvc_exp": False},
        "swanlab": {"mode": "offline", "log_dir": str(folder / "swan")},
        "wandb": {"mode": "offline", "dir": str(folder)},
        "trackio": {"name": "first"},
    }
    return offline.get(name, {})


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the only folder to which the libraries write."""
    monkeypatch.chdir(tmp_path)
    for variable in ("HOME", "XDG_CONFIG_HOME", "TRACKIO_DIR", "COMET_OFFLINE_DIRECTORY"):
        monkeypatch.setenv(variable, str(tmp_path))
    for variable in ("WANDB_SILENT", "DVC_NO_ANALYTICS", "MLFLOW_DISABLE_TELEMETRY"):
        monkeypatch.setenv(variable, "true")
    for variable in ("CLEARML_OFFLINE_MODE", "COMET_DISABLE_AUTO_LOGGING"):
        monkeypatch.setenv(variable, "1")
    monkeypatch.setenv("AIM_UI_TELEMETRY_ENABLED", "0")
    monkeypatch.setenv("GIT_PYTHON_REFRESH", "quiet")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/m.db")
    return tmp_path


def log_run(name: str, folder: Path) -> Any:
    """Log a short run with the real library; return the tracker."""
    accelerator = Accelerator(cpu=True, log_with=name, project_dir=str(folder))
    accelerator.init_trackers("run", CONFIG, {name: options_of(name, folder)})
    tracker: Any = accelerator.trackers[0]
    for step, loss in enumerate(LOSSES):
        accelerator.log({"loss": loss, "acc": np.float32(step)}, step=step)
    if hasattr(tracker, "log_images"):
        tracker.log_images({"seen": _pictures(name)}, step=2, **_layout(name))
    if hasattr(tracker, "log_table") and (name != "clearml" or find_spec("pandas")):
        tracker.log_table("scores", columns=["who", "what"], data=[["me", 11]], step=2)
    accelerator.end_training()
    return tracker


def _pictures(name: str) -> Any:
    return {"aim": (PICTURE, "text"), "dvclive": PICTURE, "tensorboard": PICTURE[None]}.get(name, [PICTURE])


def _layout(name: str) -> dict[str, str]:
    return {"dataformats": "NHWC"} if name == "tensorboard" else {}


# --- what the files hold: (losses by step, configuration)

Read = tuple[list[float], dict[str, Any]]


def aim(folder: Path, tracker: Any) -> Read:
    import aim

    run = aim.Run(tracker.writer.hash, repo=aim.Repo.from_path(str(folder)), read_only=True)
    (loss,) = [metric for metric in run.metrics() if metric.name == "loss"]
    return [float(value) for value in loss.values.sparse_numpy()[1]], run["hparams"]


def clearml(folder: Path, tracker: Any) -> Read:
    from clearml.utilities.pyhocon import ConfigFactory

    home = Path(str(tracker.task.get_offline_mode_folder()))
    archive = home.with_suffix(".zip")
    with zipfile.ZipFile(archive) as files:
        events = [json.loads(line) for line in files.read("metrics.jsonl").decode().splitlines()]
        task = json.loads(files.read("task.json"))
    rows = [each for batch in events for each in (batch if isinstance(batch, list) else [batch])]
    losses = {each["iter"]: each["value"] for each in rows if each.get("metric") == "loss"}
    config = ConfigFactory.parse_string(task["configuration"]["General"]["value"])
    return [losses[step] for step in sorted(losses)], dict(config)


def comet_ml(folder: Path, tracker: Any) -> Read:
    (archive,) = folder.rglob("*.zip")
    with zipfile.ZipFile(archive) as files:
        lines = [json.loads(line) for line in files.read("messages.json").decode().splitlines()]
    metrics = [each["payload"]["metric"] for each in lines if each["type"] == "metric_msg"]
    losses = {each["step"]: each["metricValue"] for each in metrics if each["metricName"] == "loss"}
    params = [each["payload"]["param"] for each in lines if each["type"] == "parameter_msg"]
    config = {each["paramName"]: each["paramValue"] for each in params}
    return [losses[step] for step in sorted(losses)], {
        "lr": float(config["lr"]),
        "path": config["path"],
        "inner": {"deep": int(config["inner|deep"])},
    }


def dvclive(folder: Path, tracker: Any) -> Read:
    import yaml

    rows = (folder / "live/plots/metrics/loss.tsv").read_text().splitlines()[1:]
    config = yaml.safe_load((folder / "live/params.yaml").read_text())
    return [float(row.split("\t")[1]) for row in rows], config


def jsonl(folder: Path, tracker: Any) -> Read:
    lines = [json.loads(line) for line in (folder / "run.jsonl").read_text().splitlines()]
    (config,) = [line["config"] for line in lines if "config" in line]
    assert lines[-1]["end"] == "finished"
    return [line["values"]["loss"] for line in lines if "values" in line], config


def mlflow(folder: Path, tracker: Any) -> Read:
    import mlflow

    client = mlflow.MlflowClient()
    run = client.get_run(tracker.tracker.info.run_id)
    assert run.info.status == "FINISHED"
    told = run.data.params
    history = client.get_metric_history(run.info.run_id, "loss")
    return [each.value for each in sorted(history, key=lambda each: each.step)], {
        "lr": float(told["lr"]),
        "path": told["path"],
        "inner": {"deep": int(told["inner.deep"])},
    }


def tensorboard(folder: Path, tracker: Any) -> Read:
    import yaml
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "run"), size_guidance={"images": 0})
    events.Reload()
    assert len(events.Images("seen")) == 1
    assert [each.value for each in events.Scalars("acc")] == [0, 1, 2]
    (file,) = folder.rglob("hparams.yml")
    return [each.value for each in events.Scalars("loss")], yaml.safe_load(file.read_text())


def trackio(folder: Path, tracker: Any) -> Read:
    from trackio.sqlite_storage import SQLiteStorage

    rows = SQLiteStorage.get_logs("run", "first")
    config = SQLiteStorage.get_run_config("run", "first")
    return [row["loss"] for row in rows if "loss" in row], config


def wandb(folder: Path, tracker: Any) -> Read:
    from wandb.proto import wandb_internal_pb2

    (file,) = folder.glob("wandb/offline-run-*/*.wandb")
    losses, config = [], {}
    for data in _records(file.read_bytes()):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        items = {(item.key or "/".join(item.nested_key)): item.value_json for item in record.history.item}
        losses += [json.loads(items["loss"])] if "loss" in items else []
        for part in (record.run.config, record.config):
            config |= {item.key: json.loads(item.value_json) for item in part.update if item.key}
    return losses, config


def _records(data: bytes) -> Iterator[bytes]:
    """Records of a file of LevelDB's log format, after a header of 7 bytes.

    Blocks of 32 KiB; before each record its checksum, length and type: whole, first, middle or last part.
    """
    position, record = 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        _, length, kind = struct.unpack("<IHB", data[position : position + 7])
        part = data[position + 7 : position + 7 + length]
        record = part if kind in (1, 2) else record + part
        position += 7 + length
        if kind in (1, 4):
            yield record


READERS: dict[str, Callable[[Path, Any], Read]] = {
    each.__name__: each
    for each in (aim, clearml, comet_ml, dvclive, jsonl, mlflow, tensorboard, trackio, wandb)
}


HERE = [name for name in track.TRACKERS.names() if track.TRACKERS.get(name).is_available()]


def test_libraries_are_installed() -> None:
    absent = sorted(set(track.TRACKERS.names()) - set(HERE))
    if absent:
        pytest.skip(f"not installed, not run: {', '.join(absent)}")


@pytest.mark.parametrize("name", [name for name in READERS if name in HERE])
def test_what_was_logged_can_be_read_back(name: str, folder: Path) -> None:
    tracker = log_run(name, folder)
    losses, config = READERS[name](folder, tracker)
    assert losses == LOSSES
    expected = {"lr": 0.125, "path": "a/b", "inner": {"deep": 77}}
    assert {key: config[key] for key in expected} == expected


@pytest.mark.parametrize("name", [name for name in HERE if name not in READERS])
def test_a_library_without_a_reader_writes_its_file(name: str, folder: Path) -> None:
    log_run(name, folder)
    assert any(file.stat().st_size > 100 for file in folder.rglob("*.swanlab"))


def test_every_tracker_has_a_reader_or_none_that_is_known() -> None:
    assert {*READERS, "swanlab"} == set(track.TRACKERS.names())


# --- the stand-ins

ALIASES = {
    "clearml": {"task": "Task", "logger": "Logger"},
    "comet_ml": {"experiment": "CometExperiment"},
    "swanlab": {"run": "Run", "run.config": ""},
    "trackio": {"run": "Run", "run.config": ""},
    "wandb": {"run": "Run", "run.config": "wandb_sdk.wandb_config.Config"},
}


def real(name: str, path: str) -> Any:
    """The function or class of the library that a path of its stand-in means; None for a plain dict's."""
    owner, _, last = path.rpartition(".")
    owner = ALIASES.get(name, {}).get(owner, owner.replace("()", ""))
    if not owner and "." in path:
        return None
    target: Any = importlib.import_module(LIBRARIES[name].home)
    for part in filter(None, [*owner.split("."), last]):
        target = getattr(target, part)
    return target


@pytest.mark.parametrize("name", [name for name in LIBRARIES if name in HERE])
def test_a_stand_in_declares_what_the_library_declares(name: str) -> None:
    wrong = []
    for path, declared in LIBRARIES[name].calls.items():
        function = real(name, path)
        if function is None:
            continue
        known = inspect.signature(function).parameters
        free = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in known.values())
        space: dict[str, Any] = {}
        exec(f"def stand_in({declared}): ...", space)
        used = inspect.signature(space["stand_in"]).parameters
        wrong += [f"{path}({each})" for each in used if each not in known and not free]
    assert not wrong
