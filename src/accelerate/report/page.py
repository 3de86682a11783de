"""The page of one or several runs: one HTML file that needs no network, or served while the runs go on."""

from __future__ import annotations

import json
import math
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from accelerate.core.errors import SettingError
from accelerate.core.units import show_bytes, show_seconds
from accelerate.report.records import RunRecord, Series, downsample, find_stragglers
from accelerate.report.run_reader import RunReader

if TYPE_CHECKING:
    from http.server import ThreadingHTTPServer

# Wider than a screen has pixels for one chart; ten runs of twenty numbers stay under 5 MB.
POINTS = 1000
REFRESH_SECONDS = 2.0
# A page that takes longer to make than QUICK seconds is made anew after PAUSE times as long: the rest of the
# core is for the run on the same machine.
QUICK, PAUSE = 0.1, 20
_NOTES = {
    "token throughput": "Tokens are the elements of input_ids, padding counts.",
    "MFU": "6 x parameters x tokens per second, over what the maker of the device gives for dense products "
    "in the format of the training.",
}


def render_page(runs: Sequence[RunRecord], *, refresh_seconds: float | None = None) -> str:
    """Return the page.

    Args:
        runs: what is drawn; the first decides the order of the charts.
        refresh_seconds: how often the page asks ``data.json`` beside it for newer data; None: never.

    Returns:
        HTML. Styles, scripts and data are inside; the plotting library is uPlot (MIT License).
    """
    assets = files("accelerate.report")
    parts = {
        "uplot_css": assets.joinpath("uplot/uPlot.min.css").read_text(encoding="utf-8"),
        "uplot_js": assets.joinpath("uplot/uPlot.iife.min.js").read_text(encoding="utf-8"),
        "css": assets.joinpath("page.css").read_text(encoding="utf-8"),
        "js": assets.joinpath("page.js").read_text(encoding="utf-8"),
        "data": page_data(runs),
        "refresh": json.dumps(refresh_seconds),
    }
    page = assets.joinpath("page.html").read_text(encoding="utf-8")
    for name, text in parts.items():
        page = page.replace(f"/*{name}*/", text, 1)
    return page


def page_data(runs: Sequence[RunRecord]) -> str:
    """Return what the page draws, as JSON that may stand inside a ``script`` element."""
    data = {
        "runs": [_describe_run(run) for run in runs],
        "charts": [*_charts(runs), *_rank_charts(runs)],
        "config": _config_rows(runs),
        "tables": [
            {"title": f"{name} ({run.name})" if len(runs) > 1 else name, "columns": columns, "rows": rows}
            for run in runs
            for name, (columns, rows) in run.tables.items()
        ],
        "ranks": [row for run in runs for row in _rank_rows(run)],
        "health": [row for run in runs for row in _health_rows(run)],
        "checkpoints": [_checkpoint_row(run, record) for run in runs for record in run.checkpoints],
        "environment": [[run.name, run.environment] for run in runs if run.environment],
    }
    # A text of a run may hold the end of a script element, or a comment and a script that swallow it.
    return json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")


def _describe_run(run: RunRecord) -> dict[str, Any]:
    facts = {
        "status": run.status,
        "lasted": show_seconds(max(run.end - run.start, 0)),
        "file": str(run.path),
        **{name: text[:200] for name, text in run.texts.items()},
    }
    if run.unreadable:
        facts["unreadable lines"] = str(run.unreadable)
    if run.artifacts:
        facts["files"] = ", ".join(
            f"{each['artifact']} ({show_bytes(each['bytes'])})" for each in run.artifacts
        )
    return {"name": run.name, "start": run.start, "facts": facts}


def _charts(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return one chart for each logged number, losses first, with a curve for each run that has it."""
    names = dict.fromkeys(name for run in runs for name in run.series)
    return [
        {
            "title": name,
            "unit": "",
            "curves": [
                _curve(run.name, index, run.series[name])
                for index, run in enumerate(runs)
                if name in run.series
            ],
        }
        for name in sorted(names, key=lambda name: "loss" not in name.lower())
    ]


def _curve(name: str, color: int, series: Series) -> dict[str, Any]:
    """Return one curve: its points, and what the table below the chart says."""
    steps, times, values = (
        np.asarray(each, dtype=float) for each in (series.steps, series.times, series.values)
    )
    is_finite = np.isfinite(values)
    finite = np.flatnonzero(is_finite)
    order = finite[np.argsort(steps[finite], kind="stable")]
    kept = order[downsample(steps[order], values[order], POINTS)] if len(order) else order
    numbers = values[finite]
    return {
        "name": name,
        "color": color,
        "step": _rounded(steps[kept]),
        "time": _rounded(times[kept]),
        "value": _rounded(values[kept]),
        "points": len(series),
        "last": _number(numbers[-1]) if len(numbers) else None,
        "min": _number(numbers.min()) if len(numbers) else None,
        "max": _number(numbers.max()) if len(numbers) else None,
        "not_finite": len(values) - len(finite),
        "first_not_finite": None if is_finite.all() else series.steps[int(is_finite.argmin())],
    }


def _rounded(values: np.ndarray) -> list[float]:
    """Return numbers with six digits, more than a screen shows, in few characters."""
    return [_number(value) for value in values]


def _number(value: float) -> float:
    short = float(f"{value:.6g}")
    return int(short) if short.is_integer() and abs(short) < 1e15 else short


def _rank_charts(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return the charts of recorded runs: throughput of a run; step time, waiting and memory of each rank."""
    recorded = [(index, run) for index, run in enumerate(runs) if run.ranks]
    if not recorded:
        return []
    throughput = [
        # The samples of all ranks per second, at each step that all ranks have made.
        _curve(run.name, index, _rate(run, "samples", lambda samples: samples.max(axis=0)))
        for index, run in recorded
    ]
    per_rank = [
        (f"{run.name}, rank {rank}" if len(recorded) > 1 else f"rank {rank}", steps)
        for _, run in recorded
        for rank, steps in sorted(run.ranks.items())
    ]
    charts = [{"title": "throughput", "unit": "samples/s", "curves": throughput}]
    tokens = [(index, run, _token_throughput(run)) for index, run in recorded]
    for title, unit, series in (
        ("token throughput", "tokens/s", tokens),
        ("MFU", "%", [(index, run, _utilization(run, each)) for index, run, each in tokens]),
    ):
        if curves := [_curve(run.name, index, each) for index, run, each in series if len(each)]:
            note = _NOTES[title]
            charts.append({"title": title, "unit": unit, "curves": curves, "note": note})
    for title, unit, attribute in (
        ("time of a step", "s", "seconds"),
        ("time from a batch to its backward", "s", "forward"),
        ("time waiting for data", "s", "data_wait"),
        ("peak memory", "B", "memory"),
    ):
        curves = [
            _curve(name, color, Series(steps.steps, steps.times, getattr(steps, attribute)))
            for color, (name, steps) in enumerate(per_rank)
        ]
        if attribute != "forward" or any(any(steps.forward) for _, steps in per_rank):
            charts.append({"title": title, "unit": unit, "curves": curves})
    return charts


def _token_throughput(run: RunRecord) -> Series:
    """Return the tokens of all ranks per second; nothing where a rank's file is not here, or has none."""
    processes = run.environment.get("Environment", {}).get("processes", len(run.ranks))
    if len(run.ranks) != processes:
        return Series()
    return _rate(run, "tokens", lambda tokens: tokens.sum(axis=0))


def _rate(run: RunRecord, name: str, combine: Callable[[np.ndarray], np.ndarray]) -> Series:
    """Return a number of each step over the time of the slowest rank; what is not known is left out.

    Args:
        run: whose ranks may have made different numbers of steps.
        name: attribute of ``RankSteps``.
        combine: shape ``(ranks, steps)`` -> ``(steps,)``.
    """
    shortest = min(run.ranks.values(), key=lambda steps: len(steps.steps))
    count = len(shortest.steps)
    numbers = combine(np.array([getattr(steps, name)[:count] for steps in run.ranks.values()]))
    seconds = np.array([steps.seconds[:count] for steps in run.ranks.values()]).max(axis=0)
    known = np.flatnonzero((seconds > 0) & np.isfinite(numbers))
    steps, times = np.array(shortest.steps)[known], np.array(shortest.times)[known]
    return Series(steps.tolist(), times.tolist(), (numbers[known] / seconds[known]).tolist())


def _utilization(run: RunRecord, tokens: Series) -> Series:
    """Return the model FLOPs utilization (MFU) in percent: 6 x parameters x tokens/s over the devices' peak.

    Source: Chowdhery et al. 2022, "PaLM" (arXiv:2204.02311), appendix B, without the attention term. Nothing
    where there are several models, frozen parameters, or a device whose peak is not known.
    """
    model = run.models[0] if len(run.models) == 1 else {}
    if not model.get("peak_flops") or model["trained"] != model["parameters"]:
        return Series()
    factor = 100 * 6 * model["parameters"] / (model["peak_flops"] * model["processes"])
    return Series(tokens.steps, tokens.times, [factor * each for each in tokens.values])


def _rank_rows(run: RunRecord) -> list[dict[str, Any]]:
    """Return a row of the table of ranks for each rank, the slowest marked."""
    medians = {rank: float(np.median(seconds)) for rank, seconds in run.own_seconds().items() if seconds}
    slowest = max(medians, key=lambda rank: medians[rank], default=None)
    return [
        {
            "run": run.name,
            "rank": rank,
            "steps": len(steps.steps),
            "median step": show_seconds(float(np.median(steps.seconds))),
            "median own time": show_seconds(medians[rank]),
            "95 % of steps under": show_seconds(float(np.quantile(steps.seconds, 0.95))),
            "waiting for data": steps.data_wait_share(),
            "peak memory": show_bytes(round(steps.peak_memory)),
            "slowest": rank == slowest and len(medians) > 1,
        }
        for rank, steps in sorted(run.ranks.items())
        if steps.seconds
    ]


def _health_rows(run: RunRecord) -> Iterator[dict[str, Any]]:
    """Yield the first bad number of each kind and rank with their count, and the ranks that were slow."""
    counts = Counter((event["rank"], event["numerics"]) for event in run.events)
    first: dict[tuple[int, str], dict[str, Any]] = {}
    for event in sorted(run.events, key=lambda event: event["step"]):
        first.setdefault((event["rank"], event["numerics"]), event)
    for key, event in first.items():
        more = counts[key] - 1
        samples = event.get("samples")
        yield {
            "run": run.name,
            "step": event["step"],
            "rank": event["rank"],
            "what": event["what"] + (f" ({more} more of this kind)" if more else ""),
            "where": event.get("where") or "-",
            "samples": "not known" if samples is None else ", ".join(map(str, samples[:32])),
        }
    for rank, straggler in find_stragglers(run.own_seconds()).items():
        first_step = run.ranks[rank].steps[straggler.first]
        yield {
            "run": run.name,
            "step": first_step,
            "rank": rank,
            "what": f"slow: {straggler.describe(first_step)}",
            "where": "reading data and forward",
            "samples": "-",
        }


def _checkpoint_row(run: RunRecord, record: dict[str, Any]) -> dict[str, Any]:
    return {
        "run": run.name,
        "step": record.get("step"),
        "checkpoint": str(record["checkpoint"]),
        "size": show_bytes(record.get("bytes") or 0),
        "took": show_seconds(record.get("seconds") or 0),
    }


def _config_rows(runs: Sequence[RunRecord]) -> list[dict[str, Any]]:
    """Return a row for each hyperparameter: its value in each run, and whether they differ."""
    flat = [dict(_flatten(run.config)) for run in runs]
    rows = []
    for name in dict.fromkeys(name for config in flat for name in config):
        values = [config.get(name) for config in flat]
        rows.append({"name": name, "values": values, "differs": len(set(map(repr, values))) > 1})
    return rows


def _flatten(config: dict[str, Any], prefix: str = "") -> Iterable[tuple[str, str]]:
    for key, value in config.items():
        if isinstance(value, dict) and value:
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            not_finite = isinstance(value, float) and not math.isfinite(value)
            yield f"{prefix}{key}", str(value) if not_finite else json.dumps(value).strip('"')


# --- served on this machine, while the runs go on


class _RunPages:
    """The page of some runs and its data; made anew only where something was appended."""

    def __init__(self, paths: Sequence[str]) -> None:
        self._reader, self._lock = RunReader(paths), threading.Lock()
        self._data, self._version, self._next = "", -1, 0.0

    def data(self) -> str:
        """Return the data of the page, as of now or, of a long run, as of some seconds ago."""
        with self._lock:  # each request has a thread
            start = time.monotonic()
            if start < self._next:
                return self._data
            runs = self._reader.update()
            if self._version != self._reader.version:
                self._data, self._version = page_data(runs), self._reader.version
            took = time.monotonic() - start
            self._next = start + PAUSE * took if took > QUICK else 0.0
            return self._data

    def render(self) -> str:
        """Return the page."""
        with self._lock:
            return render_page(self._reader.update(), refresh_seconds=REFRESH_SECONDS)


def make_server(runs: Sequence[str], port: int) -> ThreadingHTTPServer:
    """Return a server of the page on the loopback interface; ``serve_forever`` runs it.

    Args:
        runs: files and folders; a request reads what was appended since the one before.
        port: 0 is a free one.

    Raises:
        SettingError: the port is in use.
    """
    from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer  # slow to import

    pages = _RunPages(runs)

    class _Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            """Answer with the page at ``/``, with its data at ``/data.json``."""
            # Another page of the browser may reach this port under a name of its own (DNS rebinding).
            host = urlsplit(f"//{self.headers.get('Host', '')}").hostname
            if host not in ("localhost", "127.0.0.1"):
                self.send_error(403)
                return
            answers = {"/": ("text/html", pages.render), "/data.json": ("application/json", pages.data)}
            if self.path not in answers:
                self.send_error(404)
                return
            kind, answer = answers[self.path]
            try:
                body = answer().encode()
            except SettingError as error:  # the folder was removed while the page was open
                self.send_error(503, str(error).splitlines()[0])
                return
            self.send_response(200)
            self.send_header("Content-Type", f"{kind}; charset=utf-8")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            """Print nothing for a request."""

    try:
        return ThreadingHTTPServer(("127.0.0.1", port), _Handler)
    except OSError as error:
        raise SettingError(
            f"cannot serve on port {port}", why=error.strerror or str(error), fix="give another --port"
        ) from error


def serve_page(runs: Sequence[str], port: int) -> None:
    """Serve the page until Ctrl-C.

    Raises:
        SettingError: a run cannot be read, or the port is in use.
    """
    RunReader(runs).update()
    with make_server(runs, port) as server:
        print(f"http://127.0.0.1:{server.server_address[1]}/ shows the runs; Ctrl-C ends it", flush=True)
        try:
            server.serve_forever()
        except KeyboardInterrupt:
            print()
