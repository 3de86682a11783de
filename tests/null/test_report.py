"""``accelerate report``: files of runs are read, whatever is in them, thinned, and drawn as one page."""

from __future__ import annotations

import json
import math
import re
import shutil
import subprocess
import threading
import urllib.error
import urllib.request
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from accelerate import Accelerator
from accelerate.cli.main import run
from accelerate.core.errors import SettingError
from accelerate.report import page as page_module
from accelerate.report.page import POINTS, make_server, render_page
from accelerate.report.records import downsample
from accelerate.report.run_reader import RunReader, read_runs

HOSTILE = "<!-- <script </script><script>alert(1)</script>"


def lines(path: Path, *records: dict[str, Any]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps({"time": 100.0 + n, **record}) + "\n" for n, record in enumerate(records))
    path.write_text(text)
    return path


def data_of(page: str) -> Any:
    match = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert match is not None
    assert (
        "<" not in match[1]
    )  # a comment with the tag of a script would keep the element open (HTML 13.2.5.17)
    return json.loads(match[1])


@pytest.fixture
def logged(tmp_path: Path) -> Path:
    """The file of a run that the tracker wrote."""
    accelerator = Accelerator(log_with="jsonl", project_dir=tmp_path)
    accelerator.init_trackers("digits", config={"lr": 0.1, "model": {"layers": 2}})
    for step in range(20):
        accelerator.log({"train": {"norm": float(step)}, "loss": 1 / (step + 1), "note": HOSTILE}, step=step)
    accelerator.log({"loss": float("nan"), "per_class": [0.5, 0.25]}, step=20)
    accelerator.get_tracker("jsonl").log_table("scores", columns=["class", "recall"], data=[["zero", 0.5]])
    accelerator.end_training()
    return tmp_path / "digits.jsonl"


def test_a_run_of_the_tracker_is_read_back_whole(logged: Path) -> None:
    (read,) = read_runs([logged])
    assert (read.name, read.status, read.unreadable) == ("digits", "finished", 0)
    assert read.config == {"lr": 0.1, "model": {"layers": 2}}
    assert read.series["train/norm"].values == [float(n) for n in range(20)]
    assert read.series["loss"].steps == [float(n) for n in range(21)]
    assert math.isnan(read.series["loss"].values[20])
    assert read.texts == {"note": HOSTILE, "per_class": "[0.5, 0.25]"}
    assert read.tables == {"scores": (["class", "recall"], [["zero", 0.5]])}


def test_the_page_holds_every_number_and_no_text_of_a_run_ends_its_script(logged: Path) -> None:
    page = render_page(read_runs([logged]))
    data = data_of(page)
    assert [chart["title"] for chart in data["charts"]] == ["loss", "train/norm"]
    loss = data["charts"][0]["curves"][0]
    assert loss["value"] == pytest.approx([1 / (n + 1) for n in range(20)], rel=1e-5)
    assert (loss["not_finite"], loss["first_not_finite"], loss["points"]) == (1, 20, 21)
    assert data["config"] == [
        {"name": "lr", "values": ["0.1"], "differs": False},
        {"name": "model.layers", "values": ["2"], "differs": False},
    ]
    assert data["runs"][0]["facts"]["note"] == HOSTILE
    assert HOSTILE not in page


def test_the_page_needs_no_network(logged: Path) -> None:
    page = render_page(read_runs([logged]))
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", page)
    assert "@import" not in page
    assert "new uPlot(" in page


def test_a_run_that_was_killed_in_the_middle_of_a_line_is_drawn(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"start": "a"}, {"step": 0, "values": {"loss": 1.0}})
    with path.open("ab") as file:
        file.write(b'{"time": 102, "st\xff')
    (read,) = read_runs([path])
    assert (read.status, read.unreadable) == ("not ended", 1)
    assert read.series["loss"].values == [1.0]


def test_runs_of_one_name_in_one_file_and_in_several_are_told_apart(tmp_path: Path) -> None:
    first = lines(
        tmp_path / "x.jsonl", {"start": "run"}, {"end": "failed"}, {"start": "run"}, {"end": "finished"}
    )
    second = lines(tmp_path / "y.jsonl", {"start": "run"})
    runs = read_runs([first, second])
    assert [(each.name, each.status) for each in runs] == [
        ("run (x) (1 of 2)", "failed"),
        ("run (x) (2 of 2)", "finished"),
        ("run (y)", "not ended"),
    ]


def test_hyperparameters_that_differ_are_marked(tmp_path: Path) -> None:
    paths = [
        lines(tmp_path / f"{name}.jsonl", {"start": name}, {"config": {"lr": rate, "batch": 8}})
        for name, rate in (("a", 0.1), ("b", 0.2))
    ]
    rows = data_of(render_page(read_runs(paths)))["config"]
    assert [(row["name"], row["differs"]) for row in rows] == [("lr", True), ("batch", False)]


def test_a_configuration_without_names_is_one_row(tmp_path: Path) -> None:
    path = lines(tmp_path / "a.jsonl", {"start": "a"}, {"config": ["--fast"]})
    assert data_of(render_page(read_runs([path])))["config"] == [
        {"name": "config", "values": ['["--fast"]'], "differs": False}
    ]


def recorded(folder: Path) -> Path:
    """A run of two ranks, the second twice as slow."""
    for rank in (0, 1):
        steps = [
            {
                "optimizer_step": n + 1,
                "seconds": 0.1 * (rank + 1),
                "data_wait": 0.01,
                "samples": 64,
                "memory": 1000 * (n + 1),
                "lr": [0.1 / (n + 1)],
            }
            for n in range(4)
        ]
        saves = [{"checkpoint": "ckpt_0", "seconds": 0.5, "bytes": 2048, "step": 4}] if rank == 0 else []
        lines(folder / f"rank_{rank}.jsonl", {"start": f"rank_{rank}"}, *steps, *saves, {"end": "finished"})
    return folder


def test_a_recorded_run_shows_its_ranks_throughput_and_checkpoints(tmp_path: Path) -> None:
    (read,) = read_runs([recorded(tmp_path / "night")])
    assert (read.name, sorted(read.ranks)) == ("night", [0, 1])
    data = data_of(render_page([read]))
    charts = {chart["title"]: chart for chart in data["charts"]}
    # A step is as long as its slowest rank: 64 samples in 0.2 s.
    assert charts["throughput"]["curves"][0]["value"] == [320, 320, 320, 320]
    assert [curve["value"][0] for curve in charts["time of a step"]["curves"]] == [0.1, 0.2]
    assert charts["learning rate"]["curves"][0]["value"][0] == 0.1
    assert [(row["rank"], row["slowest"], row["waiting for data"]) for row in data["ranks"]] == [
        (0, False, "10 %"),
        (1, True, "5 %"),
    ]
    assert data["checkpoints"][0]["took"] == "500 ms"


MODEL = {"parameters": 10**9, "trained": 10**9, "format": "bf16", "peak_flops": 1e15, "processes": 2}


def token_charts(folder: Path, ranks: int = 2, **changes: Any) -> dict[str, list[float]]:
    for rank in range(ranks):
        head = [{"environment": {"Environment": {"processes": 2}}}, {"model": {**MODEL, **changes}}]
        steps = [
            {"optimizer_step": n, "seconds": 0.5, "samples": 8, "tokens": 1000 * (rank + 1)} for n in (1, 2)
        ]
        lines(folder / f"rank_{rank}.jsonl", {"start": "a"}, *(head if rank == 0 else []), *steps)
    charts = data_of(render_page(read_runs([folder])))["charts"]
    return {c["title"]: c["curves"][0]["value"] for c in charts if c["title"] in ("token throughput", "MFU")}


def test_tokens_per_second_and_utilization_are_drawn(tmp_path: Path) -> None:
    # 3,000 tokens in 0.5 s; 6 x 1e9 x 6,000 = 3.6e13 of the 2e15 of both devices.
    assert token_charts(tmp_path) == {"token throughput": [6000, 6000], "MFU": [1.8, 1.8]}


@pytest.mark.parametrize(
    "changes", [{"peak_flops": None}, {"trained": 10**6}], ids=["unknown peak", "frozen"]
)
def test_no_utilization_is_drawn_where_it_is_not_known(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert token_charts(tmp_path, **changes) == {"token throughput": [6000, 6000]}


def test_no_tokens_are_drawn_where_files_of_ranks_are_missing(tmp_path: Path) -> None:
    assert token_charts(tmp_path, ranks=1) == {}


def stragglers(data: Any) -> list[tuple[int, float]]:
    return [(row["rank"], row["step"]) for row in data["health"] if row["what"].startswith("slow")]


@pytest.mark.parametrize(("steps", "named"), [(19, []), (20, [(2, 11)])])
def test_a_rank_that_is_slow_for_20_steps_is_named(
    tmp_path: Path, steps: int, named: list[tuple[int, float]]
) -> None:
    """The ranks wait for each other in a step: only what each does before its backward tells them apart."""
    for rank in range(4):
        slow = [rank == 2 and 10 <= n < 10 + steps for n in range(40)]
        records = [
            {"optimizer_step": n + 1, "seconds": 0.5, "data_wait": 0.1, "forward": 0.3 if late else 0.1}
            for n, late in enumerate(slow)
        ]
        lines(tmp_path / f"rank_{rank}.jsonl", {"start": "a"}, *records)
    data = data_of(render_page(read_runs([tmp_path])))
    assert stragglers(data) == named
    assert all("2.0 x the median of the ranks in 20 steps" in row["what"] for row in data["health"])


def test_the_slowest_rank_is_the_one_for_which_the_others_wait(tmp_path: Path) -> None:
    for rank in range(3):
        step = {"seconds": 0.5 + 0.01 * (rank == 0), "data_wait": 0.1, "forward": 0.1 + 0.1 * (rank == 1)}
        records = [{"optimizer_step": n, **step} for n in (1, 2)]
        lines(tmp_path / f"rank_{rank}.jsonl", {"start": "a"}, *records)
    rows = data_of(render_page(read_runs([tmp_path])))["ranks"]
    assert [(row["median own time"], row["slowest"]) for row in rows] == [
        ("200 ms", False),
        ("300 ms", True),
        ("200 ms", False),
    ]


def test_a_rank_without_own_times_is_compared_by_the_whole_step(tmp_path: Path) -> None:
    for rank in range(2):
        records = [{"optimizer_step": n + 1, "seconds": 0.1 * (1 + rank)} for n in range(30)]
        lines(tmp_path / f"rank_{rank}.jsonl", {"start": "a"}, *records)
    assert stragglers(data_of(render_page(read_runs([tmp_path])))) == [(1, 1)]


def test_bad_numbers_are_in_a_table_with_the_first_of_each_kind(tmp_path: Path) -> None:
    events = [
        {"numerics": "not finite", "step": n, "what": "the loss is nan", "where": "", "samples": [n, 2]}
        for n in (4, 5, 6)
    ]
    lines(tmp_path / "rank_1.jsonl", {"start": "a"}, *events)
    (row,) = data_of(render_page(read_runs([tmp_path])))["health"]
    assert row == {
        "run": tmp_path.name,
        "step": 4,
        "rank": 1,
        "what": "the loss is nan (2 more of this kind)",
        "where": "-",
        "samples": "4, 2",
    }


def test_a_folder_of_folders_is_read_whole(tmp_path: Path) -> None:
    recorded(tmp_path / "runs" / "a")
    recorded(tmp_path / "runs" / "b")
    lines(tmp_path / "runs" / "c.jsonl", {"start": "c"})
    assert [each.name for each in read_runs([tmp_path / "runs"])] == ["a", "b", "c"]


@pytest.mark.parametrize(
    "record",
    [
        {"time": "12:00:01", "text": "x"},
        {"start": 0.0, "end": 2.5, "text": "x"},
        {"values": [1, 2]},
        {"table": "x"},
        {"config": "x"},
    ],
    ids=lambda record: next(iter(record)),
)
@pytest.mark.parametrize("name", ["data.jsonl", "rank_0.jsonl"])
def test_other_files_of_a_folder_are_no_runs(tmp_path: Path, record: dict[str, Any], name: str) -> None:
    lines(tmp_path / "a.jsonl", {"start": "a"}, {"step": 0, "values": {"loss": 1.0}})
    other = lines(tmp_path / name, *[record] * 2)
    if "time" not in record:
        other.write_text((json.dumps(record) + "\n") * 2)
    reader = RunReader([tmp_path])
    for _ in range(2):
        assert [each.name for each in reader.update()] == ["a"]
    with pytest.raises(SettingError, match=rf"{name} holds no records of a run"):
        read_runs([other])


def test_a_rank_that_died_early_shortens_the_throughput_only(tmp_path: Path) -> None:
    folder = recorded(tmp_path / "night")
    file = folder / "rank_1.jsonl"
    file.write_text("".join(file.read_text().splitlines(keepends=True)[:3]))
    (read,) = read_runs([folder])
    charts = {chart["title"]: chart for chart in data_of(render_page([read]))["charts"]}
    assert len(charts["throughput"]["curves"][0]["value"]) == 2
    assert [len(curve["value"]) for curve in charts["time of a step"]["curves"]] == [4, 2]


def test_downsampling_keeps_the_ends_and_the_spike() -> None:
    x = np.arange(100_000, dtype=float)
    y = np.zeros(100_000)
    y[31_415] = 5.0
    kept = downsample(x, y, POINTS)
    assert len(kept) == POINTS
    assert (kept[0], kept[-1]) == (0, 99_999)
    assert 31_415 in kept
    assert (np.diff(kept) > 0).all()
    assert downsample(x[:5], y[:5], POINTS).tolist() == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("count", [3, 4, 7, 10, 999, 1000])
def test_downsampling_returns_as_many_points_as_asked_for(count: int) -> None:
    x = np.arange(1001, dtype=float)
    assert len(set(downsample(x, np.sin(x), count).tolist())) == count


def test_the_command_writes_a_page_and_says_where(
    logged: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.html"
    assert run(["report", str(logged), "-o", str(page)]) == 0
    assert capsys.readouterr().out.startswith(f"{page}: digits, ")
    assert data_of(page.read_text())["runs"][0]["name"] == "digits"


@pytest.mark.parametrize(
    ("name", "words"),
    [("nothing.jsonl", "there is no"), ("empty", "holds no records"), ("empty.jsonl", "holds no records")],
)
def test_what_is_no_run_is_refused_with_what_to_type(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str, words: str
) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "empty.jsonl").write_text("")
    assert run(["report", str(tmp_path / name), "-o", str(tmp_path / "page.html")]) == 2
    text = capsys.readouterr().err
    assert words in text
    assert "Traceback" not in text
    assert not (tmp_path / "page.html").exists()


def test_a_page_that_cannot_be_written_is_refused(logged: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["report", str(logged), "-o", str(logged / "page.html")]) == 2
    assert "give another --output" in capsys.readouterr().err


def get(port: int, path: str, host: str = "127.0.0.1") -> str:
    request = urllib.request.Request(f"http://127.0.0.1:{port}{path}", headers={"Host": f"{host}:{port}"})
    with urllib.request.urlopen(request, timeout=30) as answer:
        return answer.read().decode()


def test_the_served_page_has_what_was_logged_since_and_answers_no_other_host(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = lines(tmp_path / "a.jsonl", {"start": "a"}, {"step": 0, "values": {"loss": 1.0}})
    server = make_server([str(path)], 0)
    port = server.server_address[1]
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        assert "const REFRESH_SECONDS = 2.0;" in get(port, "/")
        with path.open("a") as file:
            file.write(json.dumps({"time": 103, "step": 1, "values": {"loss": 0.5}}) + "\n")
        assert json.loads(get(port, "/data.json"))["charts"][0]["curves"][0]["value"] == [1, 0.5]
        for page, host, code in (("/", "evil.example", 403), ("/etc/passwd", "localhost", 404)):
            with pytest.raises(urllib.error.HTTPError) as caught:
                get(port, page, host)
            assert caught.value.code == code
        monkeypatch.setattr(page_module, "QUICK", -1.0)  # a page that took long is not made anew at once
        monkeypatch.setattr(page_module, "PAUSE", 1e6)
        assert json.loads(get(port, "/data.json"))["charts"][0]["curves"][0]["value"] == [1, 0.5]
        with path.open("a") as file:
            file.write(json.dumps({"time": 104, "step": 2, "values": {"loss": 0.25}}) + "\n")
        assert json.loads(get(port, "/data.json"))["charts"][0]["curves"][0]["value"] == [1, 0.5]
        path.unlink()
        with pytest.raises(urllib.error.HTTPError) as caught:
            get(port, "/")
        assert caught.value.code == 503
        with pytest.raises(SettingError, match=f"cannot serve on port {port}"):
            make_server([str(path)], port)
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_a_reader_reads_only_what_was_appended(tmp_path: Path) -> None:
    """What was read before is overwritten in place: a second look does not see it."""
    path = lines(tmp_path / "rank_0.jsonl", {"start": "a"}, {"step": 0, "values": {"loss": 1.0}})
    reader = RunReader([tmp_path])
    (first,) = reader.update()
    size, version = path.stat().st_size, reader.version
    with path.open("r+b") as file:
        file.write(b"x" * (size - 1))
    assert (reader.update(), reader.version) == ([first], version)
    with path.open("ab") as file:
        file.write(b'{"time": 103, "step": 1, "values": {"lo')
    assert reader.update()[0].unreadable == 1
    with path.open("ab") as file:
        file.write(b'ss": 0.5}}\n')
    lines(tmp_path / "rank_1.jsonl", {"start": "a"}, {"optimizer_step": 1, "seconds": 0.1})
    (again,) = reader.update()
    assert again is first
    assert again.series["loss"].values == [1.0, 0.5]
    assert (again.unreadable, list(again.ranks)) == (0, [1])
    assert reader.version > version


def test_a_file_that_was_replaced_is_read_anew(tmp_path: Path) -> None:
    records = [{"step": n, "values": {"loss": 1.0}} for n in range(3)]
    path = lines(tmp_path / "a.jsonl", {"start": "a"}, *records)
    reader = RunReader([path])
    reader.update()
    lines(path, {"start": "b"})
    assert [each.name for each in reader.update()] == ["b"]


BROWSER = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


# Arrows in the chart of the loss: the title says what the page shows at the cursor. The button PNG: the body
# has the length of the picture, and its first bytes.
PRESS = """
HTMLAnchorElement.prototype.click = () => {};
URL.createObjectURL = (blob) => {
  blob.arrayBuffer().then((bytes) => {
    document.body.dataset.png = [bytes.byteLength, ...new Uint8Array(bytes).slice(0, 4)].join(" ");
  });
  return "#";
};
[...document.querySelectorAll("button")].find((button) => button.textContent === "PNG").click();
const box = document.querySelector(".chart");
const says = () => [...box.querySelectorAll(".u-legend th, .u-legend td")];
box.focus();
for (const shiftKey of [false, false, true])
  box.dispatchEvent(new KeyboardEvent("keydown", { key: "ArrowRight", shiftKey, bubbles: true }));
setTimeout(() => { document.title = says().map((cell) => cell.textContent).join(" "); }, 100);
"""


@pytest.mark.skipif(BROWSER is None, reason="no chromium is installed")
def test_a_browser_draws_a_chart_for_each_number(logged: Path, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text(render_page(read_runs([logged])).replace("</body>", f"<script>{PRESS}</script></body>"))
    flags = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path / 'profile'}"]
    command = [str(BROWSER), *flags, "--virtual-time-budget=2000", "--dump-dom", page.as_uri()]
    dom = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
    assert len(re.findall("<canvas", dom)) == 2
    assert "digits: last 0.05, least 0.05, greatest 1, 21 points" not in dom  # all points are drawn
    assert "1 of 21 values of digits are NaN or infinite, the first at step 20" in dom
    assert '<td class="">zero</td>' in dom
    assert "<title>step 11 digits 0.083333</title>" in dom  # the first point, one more, ten more
    saved = re.search(r'data-png="(\d+) 137 80 78 71"', dom)  # as every PNG begins
    assert saved is not None
    assert int(saved[1]) > 5000
    assert "alert(1)</script>" not in dom.partition('id="data"')[0]
