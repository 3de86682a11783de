"""Record what each test costs in wall and CPU seconds, and print sums by folder, cause, file and test.

    make test ARGS="-p tests.support.cost --cost /tmp/cost"
    python -m tests.support.cost /tmp/cost

Each worker appends one line per test. The CPU seconds are those of the worker, of what it started and
has ended, and of its rank server with all ranks.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any

import psutil
import pytest

Row = dict[str, Any]
_counts: Counter[str] = Counter()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cost", metavar="FOLDER", help="write what each test costs into this folder")


def pytest_configure(config: pytest.Config) -> None:
    if folder := config.getoption("--cost"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        sys.addaudithook(_count_processes)
        config.pluginmanager.register(CostRecorder(Path(folder)), "cost-recorder")


def _count_processes(event: str, arguments: tuple[Any, ...]) -> None:
    if event == "subprocess.Popen":
        _counts["processes"] += 1


def cpu_seconds() -> float:
    """The CPU seconds that this process and its descendants have used so far."""
    total = sum(os.times()[:4])
    for child in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.Error):
            times = child.cpu_times()
            total += times.user + times.system + times.children_user + times.children_system
    return total


class CostRecorder:
    """A pytest plugin that appends a line of JSON for each test."""

    def __init__(self, folder: Path) -> None:
        name = os.environ.get("PYTEST_XDIST_WORKER", "main")
        self._file = (folder / f"{name}.jsonl").open("a", encoding="utf-8")

    @pytest.hookimpl(wrapper=True, tryfirst=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Generator[None, Any, Any]:
        wall, cpu, processes = time.perf_counter(), cpu_seconds(), _counts["processes"]
        result = yield
        row = {
            "test": item.nodeid,
            "cause": "ranks" if "ranks" in getattr(item, "fixturenames", ()) else "",
            "wall": round(time.perf_counter() - wall, 4),
            # A rank server that has ended takes its seconds along.
            "cpu": round(max(0.0, cpu_seconds() - cpu), 4),
            "processes": _counts["processes"] - processes,
        }
        print(json.dumps(row), file=self._file, flush=True)
        return result


def _cause(row: dict[str, Any]) -> str:
    if row["cause"]:
        return "ranks of the fork server"
    return "processes of its own" if row["processes"] else "in the worker"


def _print_table(rows: list[Row], title: str, key: Callable[[Row], str], most: int) -> None:
    groups: defaultdict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        groups[key(row)].append(row)
    print(f"\n| {title} | tests | wall, s | CPU, s |\n| --- | ---: | ---: | ---: |")
    ordered = sorted(groups.items(), key=lambda item: -sum(row["wall"] for row in item[1]))
    for name, group in ordered[:most]:
        wall, cpu = (sum(row[which] for row in group) for which in ("wall", "cpu"))
        print(f"| {name} | {len(group)} | {wall:.1f} | {cpu:.1f} |")


def main(folder: str) -> None:
    """Print the tables of what ``--cost FOLDER`` wrote."""
    lines = (line for file in Path(folder).glob("*.jsonl") for line in file.read_text().splitlines())
    rows = [json.loads(line) for line in lines]
    _print_table(rows, "folder", lambda row: "/".join(row["test"].split("/")[:2]), 20)
    _print_table(rows, "cause", _cause, 20)
    _print_table(rows, "file", lambda row: row["test"].split("::")[0], 60)
    _print_table(rows, "test", lambda row: row["test"], 80)


if __name__ == "__main__":
    main(sys.argv[1])
