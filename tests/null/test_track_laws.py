"""One list of laws for all trackers: a new file inherits them by being there.

A tracker with a library is run with a stand-in that takes the library's real calls only; one without is run
as it is. tests/clients/test_trackers.py runs the libraries that are installed.
"""

from __future__ import annotations

import ast
import glob
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from accelerate import Accelerator, track
from accelerate.core.errors import MissingExtraError, SettingError
from accelerate.tracking import GeneralTracker
from accelerate.utils import LoggerType
from tests.support.packages import pretend_installed
from tests.support.trackers import Fake, finish, forget_open_runs, install, is_open, leaves

NAMES = track.TRACKERS.names()
OF_LIBRARIES = tuple(name for name in NAMES if track.TRACKERS.get(name).packages)
WITH_FOLDER = tuple(name for name in NAMES if track.TRACKERS.get(name).requires_logging_directory)


class FileLibrary(Fake):
    """The interface of ``Fake`` for a tracker that writes a file of its own: its lines are the calls."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def since(self, start: int) -> set[Any]:
        (file,) = self.folder.glob("*.jsonl")
        lines = [json.loads(line) for line in file.read_text().splitlines()][start:]
        return {leaf for line in lines for leaf in leaves(line)}


@pytest.fixture(params=NAMES)
def name(request: pytest.FixtureRequest) -> str:
    """Return the name of each tracker in turn."""
    return request.param


@pytest.fixture
def library(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Fake]:
    """Yield the library that the tracker writes with."""
    yield install(monkeypatch, name) if name in OF_LIBRARIES else FileLibrary(tmp_path)
    forget_open_runs()


def accelerator(name: str, folder: Path) -> Accelerator:
    return Accelerator(cpu=True, log_with=name, project_dir=str(folder))


def init_run(name: str, folder: Path, **arguments: Any) -> Accelerator:
    acc = accelerator(name, folder)
    acc.init_trackers("run", **arguments)
    return acc


# --- the file


def test_it_is_called_like_its_file_and_says_what_was_run(name: str) -> None:
    known = track.TRACKERS.get(name)
    assert known.name == name
    assert issubclass(known, GeneralTracker)
    assert isinstance(known.requires_logging_directory, bool)
    assert track.tracker_classes()[name] is known
    assert name in LoggerType
    assert re.search(r"\b[Rr]un (by|with|here)\b", known.__doc__ or ""), "the docstring says how it was run"
    assert hasattr(known, "tracker")  # GeneralTracker has none
    for heading in ("Online", "Offline", "Files", "Resume"):
        assert re.search(rf"^ *{heading}: \S", known.__doc__ or "", re.MULTILINE), heading  # 3.13 dedents


def test_importing_it_imports_no_library(name: str) -> None:
    module = sys.modules[track.TRACKERS.get(name).__module__]
    tree = ast.parse(Path(module.__file__ or "").read_text(encoding="utf-8"))
    top = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    imported = {each.name for node in top for each in node.names}
    imported |= {node.module or "" for node in top if isinstance(node, ast.ImportFrom)}
    assert not imported & {"torch", *track.TRACKERS.get(name).packages}


@pytest.mark.parametrize("name", OF_LIBRARIES)
def test_without_its_package_the_command_that_installs_it_is_said(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pretend_installed(monkeypatch, lambda module: False)
    command = rf"pip install {track.TRACKERS.get(name).packages[0]}"
    with pytest.raises(MissingExtraError, match=command):
        Accelerator(cpu=True, log_with=name, project_dir=tmp_path, strict=True)
    with pytest.warns(UserWarning, match=command):
        assert accelerator(name, tmp_path).log_with == []
    assert name not in track.available_trackers(tmp_path)


@pytest.mark.parametrize("name", WITH_FOLDER)
def test_without_a_folder_the_option_that_gives_one_is_said(name: str, library: Fake) -> None:
    with pytest.raises(SettingError, match="project_dir="):
        Accelerator(cpu=True, log_with=name)
    assert name not in track.available_trackers()


# --- one run


def test_nothing_is_started_before_init_trackers(name: str, library: Fake, tmp_path: Path) -> None:
    assert accelerator(name, tmp_path).trackers == []
    assert isinstance(library, FileLibrary) or library.calls == []
    assert list(tmp_path.iterdir()) == []


def test_a_run_begins_once_and_ends_once(name: str, library: Fake, tmp_path: Path) -> None:
    acc = init_run(name, tmp_path, config={"lr": 0.125})
    (tracker,) = acc.trackers
    assert is_open(tracker)
    assert acc.get_tracker(name) is tracker
    assert acc.get_tracker(name, unwrap=True) is tracker.tracker
    acc.end_training()
    acc.end_training()
    assert not is_open(tracker)
    assert acc.trackers == []
    if not isinstance(library, FileLibrary):
        assert library.paths().count(library.library.begin) == 1
        assert library.paths().count(library.library.end) == 1
        assert "run" in library.since(0) or str(tmp_path / "run") in library.since(0) or name == "dvclive"


def test_numbers_arrive_with_their_step(name: str, library: Fake, tmp_path: Path) -> None:
    acc = init_run(name, tmp_path)
    values = {"loss": 1.5, "acc": torch.tensor(0.25), "size": np.float64(0.75), "n": 3}
    acc.log(values, step=7)
    arrived = library.since(0)
    assert {"loss", "acc", "size", "n", 1.5, 0.25, 0.75, 3, 7} <= arrived
    assert not {"Tensor", "float64"} & arrived
    acc.log({"later": 2.5})
    assert {"later", 2.5} <= library.since(0)
    acc.log({"pair": {"a": 4.5, "b": torch.tensor([5.5])}}, step=8)
    assert {4.5, 5.5, 8} <= library.since(0)


def test_what_cannot_be_logged_is_named_once_or_left_to_the_library(
    name: str, library: Fake, tmp_path: Path
) -> None:
    acc = init_run(name, tmp_path)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in (1, 2):
            acc.log({"odd": object(), "fine": 1.5}, step=step)
    said = [str(each.message) for each in caught if "odd" in str(each.message)]
    arrived = library.since(0)
    assert len(said) == (0 if "odd" in arrived else 1)
    assert 1.5 in arrived


def test_a_configuration_arrives_whatever_it_holds(name: str, library: Fake, tmp_path: Path) -> None:
    config = {"lr": 0.125, "flag": True, "text": "some", "none": None, "many": [1, 2]}
    config |= {
        "path": Path("a/b"),
        "dtype": torch.bfloat16,
        "inner": {"deep": {"n": 77}},
        "t": torch.tensor(4),
    }
    init_run(name, tmp_path, config=config)
    arrived = {str(leaf) for leaf in library.since(0)}
    assert {"0.125", "True", "some", "a/b", "torch.bfloat16", "77", "4"} <= arrived
    assert not {"PosixPath", "Tensor"} & arrived


def test_options_reach_the_library(name: str, library: Fake, tmp_path: Path) -> None:
    if isinstance(library, FileLibrary):
        acc = init_run(name, tmp_path)
        with pytest.raises(SettingError, match="no options"):
            acc.log({"a": 1}, log_kwargs={name: {"b": 2}})
        return
    acc = init_run(name, tmp_path, init_kwargs={name: dict(library.library.options)})
    assert set(leaves(library.library.options)) - {"report", "save_dvc_exp"} <= library.since(0) | {None}
    start = len(library.calls)
    acc.log({"loss": 1.5}, step=1, log_kwargs={name: dict(library.library.log_options)})
    assert set(leaves(library.library.log_options)) <= library.since(start)


PICTURE = np.arange(48, dtype="uint8").reshape(4, 4, 3)
PICTURES: dict[str, Any] = {
    "one array": PICTURE,
    "a list": [PICTURE, PICTURE[:2]],
    "a batch of a tensor": torch.rand(2, 3, 4, 5),
    "gray with a caption": (np.ones((4, 4)), "text"),
    "one of Pillow": Image.fromarray(PICTURE),
}


@pytest.mark.parametrize("kind", PICTURES)
def test_images_arrive_in_each_form_or_are_left_out_by_name(
    name: str, kind: str, library: Fake, tmp_path: Path
) -> None:
    tracker = init_run(name, tmp_path).trackers[0]
    said = warnings_of(lambda: tracker.log_images({"seen": PICTURES[kind]}, step=5))
    arrived = " ".join(map(str, library.since(0)))
    assert ("seen" in arrived) != any(f"{name} has no images" in each for each in said)


def test_tables_arrive_or_are_left_out_by_name(name: str, library: Fake, tmp_path: Path) -> None:
    tracker = init_run(name, tmp_path).trackers[0]
    table = {"columns": ["who", "what"], "data": [["me", np.int64(11)]]}
    said = warnings_of(lambda: tracker.log_table("scores", **table, step=6))
    arrived = " ".join(map(str, library.since(0)))
    assert all(each in arrived for each in ("scores", "who", "me", "11", "6")) != bool(said)
    assert all(f"{name} has no tables" in each for each in said)
    if not said:
        with pytest.raises(SettingError, match="no rows"):
            tracker.log_table("nothing")
        with pytest.raises(SettingError, match="row 0 of the table 'ragged' has 1 values for 2 columns"):
            tracker.log_table("ragged", columns=["a", "b"], data=[[1]])


def test_files_arrive_or_are_left_out_by_name(name: str, library: Fake, tmp_path: Path) -> None:
    folder = tmp_path / "weights"
    folder.mkdir()
    (folder / "w.bin").write_text("w")
    tracker = init_run(name, tmp_path).trackers[0]
    said = warnings_of(lambda: tracker.log_artifact(str(folder / "w.bin"), "best"))
    arrived = " ".join(map(str, library.since(0)))
    assert ("w.bin" in arrived or "w-bin" in arrived) != any(f"{name} has no files" in each for each in said)
    if name in ("wandb", "trackio"):  # and their own artifacts
        artifact: Any = object()
        tracker.log_artifact(artifact)
        assert any(value is artifact for value in library.calls[-1].arguments.values())
    count = len(arrived)
    assert not warnings_of(lambda: tracker.log_artifacts(str(folder), "best")), "said twice"
    assert len(" ".join(map(str, library.since(0)))) >= count


def test_a_text_arrives_and_none_is_left_to_the_library_or_named(
    name: str, library: Fake, tmp_path: Path
) -> None:
    acc = init_run(name, tmp_path)
    assert not warnings_of(lambda: acc.log({"note": "some words"}, step=1))
    assert "some words" in " ".join(map(str, library.since(0)))


def warnings_of(call: Callable[[], Any]) -> list[str]:
    """Call ``call``; return the warnings of this package's trackers."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        call()
    return [str(each.message) for each in caught if issubclass(each.category, UserWarning)]


# --- when things go wrong


def test_a_second_init_ends_the_first_run(name: str, library: Fake, tmp_path: Path) -> None:
    acc = init_run(name, tmp_path)
    first = acc.trackers[0]
    acc.init_trackers("again")
    assert len(acc.trackers) == 1
    assert acc.trackers[0] is not first
    assert [is_open(tracker) for tracker in (first, acc.trackers[0])] == [False, True]
    if not isinstance(library, FileLibrary):
        order = [p for p in library.paths() if p in (library.library.begin, library.library.end)]
        assert order == [library.library.begin, library.library.end, library.library.begin]


@pytest.mark.parametrize("name", OF_LIBRARIES)
def test_an_error_of_the_library_is_not_swallowed(name: str, library: Fake, tmp_path: Path) -> None:
    library.raising.add(library.library.begin)
    acc = accelerator(name, tmp_path)
    with pytest.raises(ConnectionError):
        acc.init_trackers("run")
    assert acc.trackers == []
    library.raising.clear()
    acc.init_trackers("run")
    library.raising.add(library.library.end)
    tracker = acc.trackers[0]
    with pytest.raises(ConnectionError):
        acc.end_training()
    assert not is_open(tracker)


@pytest.mark.parametrize("name", ["mlflow"])
def test_the_name_of_an_experiment_is_no_part_of_a_query(name: str, library: Fake, tmp_path: Path) -> None:
    accelerator(name, tmp_path).init_trackers("John's run")
    assert "John's run" in library.since(0)


@pytest.mark.parametrize("name", ["dvclive"])
def test_a_name_that_ends_in_no_format_is_that_of_a_png(name: str, library: Fake, tmp_path: Path) -> None:
    tracker = init_run(name, tmp_path).trackers[0]
    start, image = len(library.calls), np.zeros((2, 2, 3), np.uint8)
    tracker.log_images({"sample_t0.5": image, "seen.JPG": image, "step_1.0": [image, image]})
    names = {"sample_t0.5.png", "seen.JPG", "step_1.0/0.png", "step_1.0/1.png"}
    assert names <= library.since(start)


@pytest.mark.parametrize("name", ["mlflow"])
def test_a_name_that_is_no_plain_path_costs_no_other_metric(name: str, library: Fake, tmp_path: Path) -> None:
    """A server refuses all metrics of a request for one of them."""
    acc = init_run(name, tmp_path)
    start = len(library.calls)
    refused = ["/loss", "a//b", "train/", "./x", "a/../b", "..x", ".", "x" * 251, "a%"]
    values = dict.fromkeys([*refused, "train/loss", "a..b", "x" * 250], 0.5)
    said = warnings_of(lambda: acc.log(values, step=1))
    assert {each.split("'")[1] for each in said} == {*refused}
    (logged,) = (call.arguments["metrics"] for call in library.calls[start:] if "metrics" in call.arguments)
    assert logged.keys() == values.keys() - refused


@pytest.mark.parametrize("name", ["swanlab"])
def test_a_file_is_no_pattern(name: str, library: Fake, tmp_path: Path) -> None:
    """It stores the files that a pattern matches below a folder, which is none."""
    for file in ("a[1].txt", "b?.txt", "a1.txt", "b1.txt", "c[1]/d.txt"):
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text(file)
    tracker = init_run(name, tmp_path).trackers[0]
    start = len(library.calls)
    for file in ("a[1].txt", "b?.txt", "c[1]/d.txt"):
        tracker.log_artifact(str(tmp_path / file))
    saved = [call.arguments for call in library.calls[start:]]
    assert [glob.glob(each["glob_str"]) for each in saved] == [
        [str(tmp_path / file)] for file in ("a[1].txt", "b?.txt", "c[1]/d.txt")
    ]
    assert all(Path(each["base_path"]) in Path(each["glob_str"]).parents for each in saved)


@pytest.mark.parametrize("name", [n for n in OF_LIBRARIES if n in ("aim", "swanlab", "wandb")])
def test_objects_of_the_library_itself_are_logged(name: str, library: Fake, tmp_path: Path) -> None:
    own = type("Distribution", (), {"__module__": f"{name}.sdk.objects"})
    acc = init_run(name, tmp_path)
    start = len(library.calls)
    acc.log({"weights": own(), "inner": {"several": [own(), own()]}, "loss": 0.5}, step=3)
    logged = [leaf for call in library.calls[start:] for leaf in leaves(call.arguments)]
    assert logged.count("Distribution") == 3
    assert 0.5 in logged


@pytest.mark.parametrize("name", [n for n in OF_LIBRARIES if n in ("clearml", "mlflow", "swanlab", "wandb")])
def test_a_run_that_failed_is_marked_so(name: str, library: Fake, tmp_path: Path) -> None:
    tracker = init_run(name, tmp_path).trackers[0]
    tracker.failed = True
    start = len(library.calls)
    finish(tracker)
    marks = {"the script ended by an error", "FAILED", "crashed", 1}
    assert marks & library.since(start)
