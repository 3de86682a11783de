"""Stand-ins for the libraries behind trackers: they take the calls of the real one, and nothing else.

Each is a table of the real interface: a path, its parameters as the real library declares them, and what the
call gives back. A call with other arguments fails as it would there; a name that is not in the table is an
AttributeError. Everything is recorded. tests/clients/test_trackers.py holds the tables against the libraries
that are installed, and logs with them.
"""

from __future__ import annotations

import inspect
import sys
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from accelerate import track
from accelerate.track.protocol import logged_values as logged_values
from accelerate.tracking import GeneralTracker


@dataclass(frozen=True)
class Library:
    """What a tracker uses of its library.

    Attributes:
        calls: path -> parameters; ``"begin() -> Run"`` style results are in ``gives``.
        gives: path of a call -> path of what it returns.
        begin, end: paths of the calls that begin and end a run.
        home: the module that is imported.
        options: harmless options of the call that begins a run.
        log_options: harmless options of the calls that log.
        assigned: attributes that are set.
    """

    calls: Mapping[str, str]
    begin: str
    end: str
    home: str
    gives: Mapping[str, str] = field(default_factory=dict)
    options: Mapping[str, Any] = field(default_factory=dict)
    log_options: Mapping[str, Any] = field(default_factory=dict)
    assigned: tuple[str, ...] = ()
    absent: tuple[str, ...] = ()


LIBRARIES: dict[str, Library] = {
    "aim": Library(
        home="aim",
        begin="Run",
        end="Run().close",
        calls={
            "Run": "run_hash=None, *, repo=None, read_only=False, experiment=None, log_system_params=False",
            "Run().track": "value, name=None, step=None, epoch=None, *, context=None",
            "Run().close": "",
            "Image": "image, caption='', format='png', quality=90, optimize=False",
            "Text": "text",
            "Run().set_artifacts_uri": "uri",
            "Run().log_artifact": "path, name=None, *, block=False",
        },
        gives={"Run": "Run()", "Image": "Image()", "Text": "Text()", "uri": "Run().artifacts_uri"},
        assigned=("Run().name", "Run()[]"),
        options={"experiment": "e"},
        log_options={"epoch": 3},
    ),
    "clearml": Library(
        home="clearml",
        begin="Task.init",
        end="task.close",
        calls={
            "Task.current_task": "",
            "Task.init": "project_name=None, task_name=None, task_type=None, tags=None, output_uri=None",
            "task.connect_configuration": "configuration, name=None, description=None",
            "task.get_logger": "",
            "task.mark_failed": "ignore_errors=True, status_reason=None, status_message=None, force=False",
            "task.flush": "wait_for_uploads=False",
            "task.close": "",
            "logger.report_scalar": "title, series, value, iteration",
            "logger.report_single_value": "name, value",
            "logger.report_image": (
                "title, series, iteration=None, local_path=None, image=None, max_image_history=None"
            ),
            "logger.report_table": "title, series, iteration=None, table_plot=None, csv=None",
            "logger.report_text": "msg, level=20, print_console=True",
            "task.upload_artifact": "name, artifact_object, metadata=None",
        },
        gives={"Task.init": "task", "task.get_logger": "logger"},
        absent=("Task.current_task",),
        options={"tags": ["t"]},
    ),
    "comet_ml": Library(
        home="comet_ml",
        begin="start",
        end="experiment.end",
        calls={
            "start": "api_key=None, workspace=None, project=None, project_name=None, online=None",
            "experiment.log_parameters": "parameters, prefix=None, step=None, nested_support=True",
            "experiment.set_step": "step",
            "experiment.log_metric": "name, value, step=None, epoch=None, include_context=True",
            "experiment.log_metrics": "dic, prefix=None, step=None, epoch=None, include_context=True",
            "experiment.log_other": "key, value",
            "experiment.log_image": "image_data, name=None, overwrite=False, step=None, metadata=None",
            "experiment.log_table": "filename, tabular_data=None, headers=False",
            "experiment.log_asset": "file_data, file_name=None, overwrite=False",
            "experiment.end": "",
        },
        gives={"start": "experiment"},
        options={"online": False},
        log_options={"epoch": 3},
    ),
    "dvclive": Library(
        home="dvclive",
        begin="Live",
        end="Live().end",
        calls={
            "Live": "dir='dvclive', resume=False, report=None, save_dvc_exp=True, dvcyaml='dvc.yaml'",
            "Live().log_params": "params",
            "Live().log_metric": "name, val, timestamp=False, plot=True",
            "Live().log_image": "name, val",
            "Live().log_artifact": "path, type=None, name=None",
            "Live().next_step": "",
            "Live().end": "",
        },
        gives={"Live": "Live()"},
        assigned=("Live().step",),
        options={"report": None, "save_dvc_exp": False},
        log_options={"plot": False},
    ),
    "mlflow": Library(
        home="mlflow",
        begin="start_run",
        end="end_run",
        calls={
            "get_experiment_by_name": "name",
            "create_experiment": "name, artifact_location=None, tags=None",
            "start_run": (
                "run_id=None, experiment_id=None, run_name=None, nested=False, tags=None, description=None"
            ),
            "log_params": "params, synchronous=None, run_id=None",
            "log_metrics": "metrics, step=None, synchronous=None, run_id=None, timestamp=None",
            "set_tag": "key, value, synchronous=None",
            "log_image": "image, artifact_file=None, key=None, step=None",
            "log_table": "data, artifact_file, run_id=None",
            "log_figure": "figure, artifact_file, *, save_kwargs=None",
            "log_artifact": "local_path, artifact_path=None, run_id=None",
            "log_artifacts": "local_dir, artifact_path=None, run_id=None",
            "end_run": "status='FINISHED'",
        },
        gives={"start_run": "run", "create_experiment": "experiment"},
        absent=("get_experiment_by_name",),
        options={"description": "d"},
        log_options={"timestamp": 5},
    ),
    "swanlab": Library(
        home="swanlab",
        begin="init",
        end="run.finish",
        calls={
            "init": "*, reinit=None, log_dir=None, mode=None, workspace=None, project=None, name=None",
            "run.config.update": "data",
            "run.log": "data, step=None",
            "run.finish": "state='success', error=None, async_log_timeout=None",
            "run.save": "glob_str, base_path=None, policy='live'",
            "Image": "data_or_path, mode=None, caption=None",
            "Text": "content, caption=None",
            "echarts.Table": "",
            "table.add": "headers, rows, attributes=None",
        },
        gives={
            "init": "run",
            "Image": "Image()",
            "Text": "Text()",
            "echarts.Table": "table",
            "table.add": "table",
        },
        options={"mode": "offline"},
    ),
    "tensorboard": Library(
        home="torch.utils.tensorboard",
        begin="SummaryWriter",
        end="SummaryWriter().close",
        calls={
            "SummaryWriter": (
                "log_dir=None, comment='', purge_step=None, max_queue=10, flush_secs=120, filename_suffix=''"
            ),
            "SummaryWriter().add_hparams": (
                "hparam_dict, metric_dict, hparam_domain_discrete=None, run_name=None, global_step=None"
            ),
            "SummaryWriter().add_scalar": "tag, scalar_value, global_step=None, walltime=None",
            "SummaryWriter().add_scalars": "main_tag, tag_scalar_dict, global_step=None, walltime=None",
            "SummaryWriter().add_text": "tag, text_string, global_step=None, walltime=None",
            "SummaryWriter().add_images": (
                "tag, img_tensor, global_step=None, walltime=None, dataformats='NCHW'"
            ),
            "SummaryWriter().flush": "",
            "SummaryWriter().close": "",
        },
        gives={"SummaryWriter": "SummaryWriter()"},
        options={"flush_secs": 30},
        log_options={"walltime": 5.0},
    ),
    "trackio": Library(
        home="trackio",
        begin="init",
        end="run.finish",
        calls={
            "init": "project, name=None, group=None, config=None, resume='never', private=None",
            "run.config.update": "data",
            "run.log": "metrics, step=None",
            "run.finish": "",
            "run.log_artifact": "artifact_or_path, name=None, type=None",
            "Image": "value, caption=None",
            "Table": "columns=None, data=None, dataframe=None",
        },
        gives={"init": "run", "Image": "Image()", "Table": "Table()"},
        options={"name": "n"},
    ),
    "wandb": Library(
        home="wandb",
        begin="init",
        end="run.finish",
        calls={
            "init": "entity=None, project=None, dir=None, id=None, name=None, mode=None, group=None",
            "run.config.update": "d, allow_val_change=None",
            "run.log": "data, step=None, commit=None",
            "run.finish": "exit_code=None",
            "Image": "data_or_path, mode=None, caption=None",
            "Table": "columns=None, data=None, rows=None, dataframe=None",
            "run.log_artifact": "artifact_or_path, name=None, type=None, aliases=None",
            "Artifact": "name, type, description=None, metadata=None",
            "Artifact().add_file": "local_path, name=None",
        },
        gives={"init": "run", "Image": "Image()", "Table": "Table()", "Artifact": "Artifact()"},
        options={"mode": "offline"},
        log_options={"commit": False},
    ),
}


@dataclass(frozen=True)
class Call:
    """One use of a stand-in: a call with its bound arguments, or something that was set."""

    path: str
    arguments: dict[str, Any]


class Recorder:
    """One object of a stand-in."""

    def __init__(self, library: Library, path: str, calls: list[Call], raising: set[str]) -> None:
        vars(self).update(_library=library, _path=path, _calls=calls, _raising=raising)

    def _at(self, path: str) -> Recorder:
        return Recorder(self._library, path, self._calls, self._raising)

    def __getattr__(self, name: str) -> Recorder:
        path = f"{self._path}.{name}" if self._path else name
        known = [*self._library.calls, *self._library.gives.values()]
        if name.startswith("_") or not any(f"{each}.".startswith(f"{path}.") for each in known):
            raise AttributeError(path)
        return self._at(path)

    def __setattr__(self, name: str, value: Any) -> None:
        self._set(f"{self._path}.{name}", value)

    def __setitem__(self, key: str, value: Any) -> None:
        self._set(f"{self._path}[]", {key: value})

    def _set(self, path: str, value: Any) -> None:
        assert path in self._library.assigned, path
        self._calls.append(Call(path, {"value": value}))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        space: dict[str, Any] = {}
        exec(f"def real({self._library.calls[self._path]}): ...", space)
        bound = inspect.signature(space["real"]).bind(*args, **kwargs)
        self._calls.append(Call(self._path, dict(bound.arguments)))
        if self._path in self._raising:
            raise ConnectionError(f"{self._path} failed")
        if self._path in self._library.absent:
            return None
        return self._at(self._library.gives.get(self._path, f"{self._path}()"))


class Fake:
    """A stand-in that is installed in place of a library.

    Attributes:
        calls: every use, in order.
        raising: paths of calls that fail.
    """

    def __init__(self, library: Library) -> None:
        self.library = library
        self.calls: list[Call] = []
        self.raising: set[str] = set()
        self.root = Recorder(library, "", self.calls, self.raising)

    def paths(self) -> list[str]:
        """Paths of every use so far."""
        return [call.path for call in self.calls]

    def since(self, start: int) -> set[Any]:
        """Every name and plain value that was handed over since use number ``start``."""
        return {leaf for call in self.calls[start:] for leaf in leaves(call.arguments)}


def leaves(value: Any) -> Iterator[Any]:
    """Keys and leaves of nested data; what cannot be in a set as its type's name."""
    if isinstance(value, Mapping):
        for key, each in value.items():
            yield key
            yield from leaves(each)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from leaves(each)
    else:
        yield value if isinstance(value, str | int | float | bool | type(None)) else type(value).__name__


def install(monkeypatch: pytest.MonkeyPatch, name: str) -> Fake:
    """Puts the stand-in of a tracker's library in place of the module, installed or not."""
    fake = Fake(LIBRARIES[name])
    for module in {name, fake.library.home}:
        stand_in = types.ModuleType(module)
        stand_in.__getattr__ = lambda each: getattr(fake.root, each)  # type: ignore[method-assign]
        monkeypatch.setitem(sys.modules, module, stand_in)
    return fake


def is_open(tracker: GeneralTracker) -> bool:
    """Return whether the run of ``tracker`` would be finished when this process ends."""
    return track.is_open(tracker)


def finish(tracker: GeneralTracker) -> None:
    """Finish the run of ``tracker`` as the end of a process does."""
    track.finish_runs([tracker])


def forget_open_runs() -> None:
    """Let no run be finished when this process ends."""
    track._open.clear()
