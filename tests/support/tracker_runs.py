"""Runs of the real libraries behind trackers, offline, each in its own process, and readers of their files.

python -m tests.support.tracker_runs NAME FOLDER ENDING LOSS [LOSS ...] [--id ID] logs a short run, and prints
the id by which it is resumed. ``READERS`` read the files with the library's own reader.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import struct
import subprocess
import sys
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

ROOT = Path(__file__).parents[2]
CONFIG = {"lr": 0.125, "path": Path("a/b"), "inner": {"deep": 77}}
STORED_CONFIG = {"lr": 0.125, "path": "a/b", "inner": {"deep": 77}}
RGB = np.arange(90, dtype="uint8").reshape(6, 5, 3)
# What a library has not, and the words that say so once: tracker -> kind -> words.
ABSENT: dict[str, dict[str, str]] = {
    "aim": {"table": "aim has no tables"},
    "dvclive": {"table": "dvclive has no tables", "file": "A DVC repo is required to log artifacts"},
    "jsonl": {"images": "jsonl has no images"},
    "tensorboard": {"file": "tensorboard has no files"},
}


@dataclass
class RunContents:
    """The contents of the files of a run.

    Attributes:
        losses: in the order of their steps.
        config: the configuration, with its nesting.
        note: the text.
        images: how many images there are.
        table: the first row of the table, with its columns.
        file: what the stored file holds, or its name where the library keeps only that.
        end: how the run ended, in the library's words; empty where it has none.
    """

    losses: list[float] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    note: str = ""
    images: int = 0
    table: tuple[list[str], list[Any]] | None = None
    file: str = ""
    end: str = ""


# --- writing


def offline_options(name: str, folder: Path, run_id: str | None) -> dict[str, Any]:
    """Return the options of a run that needs no network; with ``run_id``, of one that goes on."""
    offline: dict[str, dict[str, Any]] = {
        "aim": {"system_tracking_interval": None, "capture_terminal_logs": False},
        # Looking for a repository, it reads every file that is imported and waits for the network.
        "clearml": {"auto_connect_frameworks": {"*": False, "detect_repository": False}, "output_uri": False},
        "comet_ml": {"online": False},
        "dvclive": {"dir": str(folder / "live"), "save_dvc_exp": False},
        "mlflow": {},
        "swanlab": {"mode": "offline", "log_dir": str(folder / "swan")},
        "trackio": {"name": "first"},
        "wandb": {"mode": "offline", "dir": str(folder)},
    }
    resumed: dict[str, dict[str, Any]] = {
        "aim": {"run_hash": run_id},
        "comet_ml": {"experiment_key": run_id, "mode": "get"},
        "dvclive": {"resume": True},
        "mlflow": {"run_id": run_id},
        "swanlab": {"id": run_id, "resume": "must"},
        "trackio": {"resume": "must"},
        "wandb": {"id": run_id, "resume": "must"},
    }
    return offline.get(name, {}) | (resumed.get(name, {}) if run_id else {})


def offline_variables(folder: Path) -> dict[str, str]:
    """Return the environment in which every library writes below ``folder`` only."""
    folders = ("HOME", "XDG_CONFIG_HOME", "XDG_CACHE_HOME", "TRACKIO_DIR", "COMET_OFFLINE_DIRECTORY")
    return {
        **{name: str(folder) for name in folders},
        **dict.fromkeys(("WANDB_SILENT", "DVC_NO_ANALYTICS", "MLFLOW_DISABLE_TELEMETRY"), "true"),
        **dict.fromkeys(("CLEARML_OFFLINE_MODE", "COMET_DISABLE_AUTO_LOGGING"), "1"),
        "AIM_UI_TELEMETRY_ENABLED": "0",
        "GIT_PYTHON_REFRESH": "quiet",
        "MLFLOW_TRACKING_URI": f"sqlite:///{folder}/m.db",
        "PYTHONPATH": str(ROOT),
    }


RUN_ID: dict[str, Callable[[Any], str]] = {
    "aim": lambda run: run.hash,
    "comet_ml": lambda experiment: experiment.get_key(),
    "mlflow": lambda run: run.info.run_id,
    "swanlab": lambda run: run.id,
    "wandb": lambda run: run.id,
}


def log_run(name: str, folder: Path, losses: list[float], run_id: str | None) -> Any:
    """Log with the real library, and leave the run open."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, log_with=name, project_dir=str(folder))
    accelerator.init_trackers("run", CONFIG, {name: offline_options(name, folder, run_id)})
    tracker = accelerator.trackers[0]
    first = 2 if run_id else 0
    for step, loss in enumerate(losses, first):
        accelerator.log({"loss": loss, "acc": np.float32(step), "train/loss": torch.tensor(loss)}, step=step)
    print("ID", RUN_ID.get(name, lambda _: "same name")(tracker.tracker), flush=True)
    return accelerator


def log_every_kind(tracker: Any, folder: Path) -> None:
    """Log a text, images in several forms, a table and a file, each twice where it is absent."""
    (folder / "weights.txt").write_text("trained")
    for step in (3, 4) if tracker.name in ABSENT else (3,):
        tracker.log({"note": "some words"}, step=step)
        batch = torch.from_numpy(np.stack([RGB // 2, RGB // 3])).permute(0, 3, 1, 2)
        tracker.log_images({"seen": [(RGB, "first"), batch]}, step=step)
        tracker.log_table("scores", columns=["who", "what"], data=[["me", np.int64(11)]], step=step)
        tracker.log_artifact(str(folder / "weights.txt"), "best")


def main() -> None:
    """Log a run that ends as the command line says."""
    parser = argparse.ArgumentParser()
    for argument in ("name", "folder", "ending"):
        parser.add_argument(argument)
    parser.add_argument("losses", nargs="+", type=float)
    parser.add_argument("--id")
    args = parser.parse_args()
    accelerator = log_run(args.name, Path(args.folder), args.losses, args.id)
    if args.ending == "every kind":
        log_every_kind(accelerator.trackers[0], Path(args.folder))
    if args.ending == "error":
        raise ValueError("no data")
    if args.ending == "interrupt":
        os.killpg(0, signal.SIGINT)  # as a terminal does: all processes of the run get it
        signal.pause()
    accelerator.end_training()


def run_arguments(name: str, folder: Path, ending: str, losses: list[float], run_id: str) -> list[str]:
    """Return the arguments of ``main``."""
    return [name, str(folder), ending, *map(str, losses), *(["--id", run_id] if run_id else [])]


def start_run(name: str, folder: Path, ending: str, losses: list[float], run_id: str = "") -> tuple[str, str]:
    """Log a run in another process; return (its id, what it wrote to the console)."""
    arguments = run_arguments(name, folder, ending, losses, run_id)
    done = subprocess.run(
        [sys.executable, "-m", "tests.support.tracker_runs", *arguments],
        env={**os.environ, **offline_variables(folder)},
        cwd=folder,
        start_new_session=True,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return run_outcome(ending, f"{done.stdout}\n{done.stderr}", failed=done.returncode != 0)


def run_outcome(ending: str, output: str, *, failed: bool) -> tuple[str, str]:
    """Return (the id of a run, its output), of a run that failed if it was to."""
    assert failed == (ending in ("error", "interrupt")), output[-4000:]
    ids = [line.removeprefix("ID ") for line in output.splitlines() if line.startswith("ID ")]
    assert ids, output[-4000:]
    return ids[0], output


# --- reading


def aim(folder: Path) -> RunContents:
    from aim import Repo

    (run,) = Repo.from_path(str(folder)).iter_runs()
    (loss,) = [metric for metric in run.metrics() if metric.name == "loss"]
    contents = RunContents(
        config=run["hparams"], losses=loss.dataframe().sort_values("step")["value"].tolist()
    )
    context = loss.context
    if text := run.get_text_sequence("note", context):
        contents.note = text.values.sparse_list()[1][0].data
    if images := run.get_image_sequence("seen", context):
        contents.images = len(images.values.sparse_list()[1][0])
    for artifact in run.artifacts.values():
        contents.file = Path(artifact.uri.removeprefix("file://")).read_text()
    return contents


def clearml(folder: Path) -> RunContents:
    from clearml.utilities.pyhocon import ConfigFactory

    contents = RunContents()
    (archive,) = folder.rglob("offline/*.zip")
    with zipfile.ZipFile(archive) as files:
        lines = [json.loads(line) for line in files.read("metrics.jsonl").decode().splitlines()]
        console = files.read("log.jsonl").decode()
        task = json.loads(files.read("task.json"))
        stored = [name for name in files.namelist() if name.endswith("weights.txt")]
        contents.file = files.read(stored[0]).decode() if stored else ""
        contents.images = len([name for name in files.namelist() if name.endswith((".png", ".jpeg"))])
    events = [each for batch in lines for each in (batch if isinstance(batch, list) else [batch])]
    losses = {
        each["iter"]: each["value"]
        for each in events
        if (each.get("metric"), each.get("variant")) == ("loss", "train")
    }
    contents.losses = [losses[step] for step in sorted(losses)]
    contents.config = dict(ConfigFactory.parse_string(task["configuration"]["General"]["value"]))
    contents.note = "some words" if "note: some words" in console else ""
    for event in events:
        if event.get("metric") == "scores":
            (plot,) = json.loads(event["plot_str"])["data"]
            rows = plot["cells"]["values"]
            contents.table = (list(plot["header"]["values"]), [column[0] for column in rows])
    return contents


def comet_ml(folder: Path) -> RunContents:
    contents, losses = RunContents(), {}
    for archive in folder.glob("*.zip"):
        with zipfile.ZipFile(archive) as files:
            lines = [json.loads(line) for line in files.read("messages.json").decode().splitlines()]
            for line in lines:
                kind, payload = line["type"], line["payload"]
                if kind == "metric_msg" and payload["metric"]["metricName"] == "loss":
                    losses[payload["metric"]["step"]] = payload["metric"]["metricValue"]
                elif kind == "parameter_msg" and payload.get("param"):
                    contents.config[payload["param"]["paramName"]] = payload["param"]["paramValue"]
                elif kind == "log_other" and payload["key"] == "note":
                    contents.note = payload["value"]
                elif kind == "file_upload":
                    name = payload["additional_params"].get("fileName")
                    if name == "best/weights.txt":
                        contents.file = files.read(payload["file_path"]).decode()
                    elif name == "scores.csv":
                        head, row = files.read(payload["file_path"]).decode().split()[:2]
                        contents.table = (head.split(","), row.split(","))
                    contents.images += payload["upload_type"] == "visualization"
    contents.losses = [losses[step] for step in sorted(losses)]
    stored = contents.config
    if "lr" in stored:
        contents.config = {
            "lr": float(stored["lr"]),
            "path": stored["path"],
            "inner": {"deep": int(stored["inner|deep"])},
        }
    return contents


def dvclive(folder: Path) -> RunContents:
    import yaml

    def values(name: str) -> list[str]:
        file = folder / f"live/plots/metrics/{name}.tsv"
        return [line.split("\t")[1] for line in file.read_text().splitlines()[1:]] if file.exists() else []

    return RunContents(
        losses=[float(value) for value in values("loss")],
        config=yaml.safe_load((folder / "live/params.yaml").read_text()),
        note=(values("note") or [""])[0],
        images=len([*(folder / "live").rglob("*.png")]),
    )


def jsonl(folder: Path) -> RunContents:
    contents = RunContents()
    for line in map(json.loads, (folder / "run.jsonl").read_text().splitlines()):
        contents.losses += [line["values"]["loss"]] if "loss" in line.get("values", ()) else []
        contents.note = line.get("values", {}).get("note", contents.note)
        contents.config |= line.get("config", {})
        contents.end = line.get("end", "")
        contents.file = Path(line["artifact"]).read_text() if "artifact" in line else contents.file
        contents.table = (line["columns"], line["rows"][0]) if "table" in line else contents.table
    return contents


def mlflow(folder: Path) -> RunContents:
    import mlflow

    client = mlflow.MlflowClient(f"sqlite:///{folder}/m.db")
    experiment = client.get_experiment_by_name("run")
    assert experiment is not None
    (run,) = client.search_runs([experiment.experiment_id])
    stored = run.data.params
    names = [each.path for each in client.list_artifacts(run.info.run_id)]
    contents = RunContents(
        losses=[
            each.value
            for each in sorted(client.get_metric_history(run.info.run_id, "loss"), key=lambda each: each.step)
        ],
        config={
            "lr": float(stored["lr"]),
            "path": stored["path"],
            "inner": {"deep": int(stored["inner.deep"])},
        },
        note=run.data.tags.get("note", ""),
        end=run.info.status,
    )

    def load(path: str) -> str:
        return Path(client.download_artifacts(run.info.run_id, path, str(folder))).read_text()

    if "images" in names:
        files = [each.path for each in client.list_artifacts(run.info.run_id, "images")]
        contents.images = len([each for each in files if each.endswith(".png")])
    if "scores-3.json" in names:
        table = json.loads(load("scores-3.json"))
        contents.table = (table["columns"], table["data"][0])
    contents.file = load("best/weights.txt") if "best" in names else ""
    return contents


def swanlab(folder: Path) -> RunContents:
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.proto.swanlab.run.v1.run_pb2 import RunState
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    contents, losses = RunContents(), {}
    for file in sorted(folder.glob("swan/*/*.swanlab")):
        reader = DataStoreReader()
        reader.open(file)
        for data in reader:
            record = Record()
            record.ParseFromString(data)
            media = file.parent / "media"
            if record.HasField("scalar") and record.scalar.key == "loss":
                losses[record.scalar.step] = record.scalar.value.number
            elif record.HasField("media"):
                items = [item.filename for item in record.media.value.items]
                if record.media.key == "note":
                    contents.note = (media / "text" / items[0]).read_text()
                elif record.media.key == "seen":
                    contents.images += len([name for name in items if (media / "image" / name).exists()])
                elif record.media.key == "scores":
                    (path,) = media.rglob(items[0])
                    stored = json.loads(path.read_text())
                    columns = [each["field"] for each in stored["colDefs"]]
                    contents.table = (columns, [stored["rowData"][0][name] for name in columns])
            elif record.HasField("save") and record.save.name.endswith("weights.txt"):
                contents.file = Path(record.save.source_path).read_text()
            elif record.HasField("finish"):
                contents.end = RunState.Name(record.finish.state)
        stored = yaml.safe_load((file.parent / "files/config.yaml").read_text()) or {}
        contents.config |= {name: each["value"] for name, each in stored.items()}
    contents.losses = [losses[step] for step in sorted(losses)]
    return contents


def tensorboard(folder: Path) -> RunContents:
    import yaml
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder / "run"), size_guidance={"images": 0, "tensors": 0})
    events.Reload()
    *_, file = sorted(folder.rglob("hparams.yml"))
    contents = RunContents(config=yaml.safe_load(file.read_text()))
    contents.losses = [each.value for each in events.Scalars("loss")]
    tags = events.Tags()

    def text(tag: str) -> str:
        return events.Tensors(f"{tag}/text_summary")[0].tensor_proto.string_val[0].decode()

    if "note/text_summary" in tags["tensors"]:
        contents.note = text("note")
        head, _, row = text("scores").splitlines()
        split = lambda line: line.strip("| ").split(" | ")  # noqa: E731
        contents.table = (split(head), split(row))
        (image, *_) = events.Images("seen")
        contents.images = image.width // RGB.shape[1]  # side by side
    return contents


def trackio(folder: Path) -> RunContents:
    script = """
import json, os
from trackio.sqlite_storage import SQLiteStorage
print(json.dumps([SQLiteStorage.get_logs("run", "first"), SQLiteStorage.get_run_config("run", "first")]))
"""
    # The library reads its folder when it is imported.
    done = subprocess.run(
        [sys.executable, "-c", script],
        env={**os.environ, **offline_variables(folder)},
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    rows, config = json.loads(done.stdout.splitlines()[-1])
    contents = RunContents(losses=[row["loss"] for row in rows if "loss" in row], config=config)
    for row in rows:
        contents.note = row.get("note", contents.note)
        contents.images += len([key for key in row if key.startswith("seen/")])
        if "scores" in row:
            (first,) = row["scores"]["_value"]
            contents.table = (list(first), list(first.values()))
    for file in folder.rglob("*"):
        if file.is_file() and file != folder / "weights.txt" and file.read_bytes() == b"trained":
            contents.file = "trained"
    return contents


def wandb(folder: Path) -> RunContents:
    from wandb.proto import wandb_internal_pb2

    contents = RunContents()
    for file in sorted(folder.glob("wandb/offline-run-*/*.wandb")):
        for data in _leveldb_records(file.read_bytes()):
            record = wandb_internal_pb2.Record()
            record.ParseFromString(data)
            items = {(item.key or "/".join(item.nested_key)): item.value_json for item in record.history.item}
            contents.losses += [json.loads(items["loss"])] if "loss" in items else []
            contents.note = json.loads(items["note"]) if "note" in items else contents.note
            for part in (record.run.config, record.config):
                contents.config |= {item.key: json.loads(item.value_json) for item in part.update if item.key}
            if record.artifact.type == "file":
                contents.file = Path(record.artifact.manifest.contents[0].local_path).read_text()
            if record.HasField("exit"):
                contents.end = f"exit code {record.exit.exit_code}"
        media = file.parent / "files/media"
        contents.images += len([*media.rglob("*.png")])
        for path in media.rglob("*.table.json"):
            table = json.loads(path.read_text())
            contents.table = (table["columns"], table["data"][0])
    return contents


def _leveldb_records(data: bytes) -> Iterator[bytes]:
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


READERS: dict[str, Callable[[Path], RunContents]] = {
    each.__name__: each
    for each in (aim, clearml, comet_ml, dvclive, jsonl, mlflow, swanlab, tensorboard, trackio, wandb)
}


if __name__ == "__main__":
    main()
