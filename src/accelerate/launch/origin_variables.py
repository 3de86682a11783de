"""Environment variables with the origin of each option, so that the script can report its status."""

from __future__ import annotations

from accelerate.core.setting import declared_settings
from accelerate.launch.launch_request import LaunchRequest, launcher_settings

# Settings that stay with the launcher and whose effect shows in the processes only; and, of those, what a
# process of several machines cannot judge, since machines may come and go.
_VISIBLE_IN_RANKS = ("num_processes", "num_cpu_threads_per_process", "gpu_ids")
_SINGLE_MACHINE_ONLY = ("num_processes",)


def origin_variables(request: LaunchRequest) -> dict[str, str]:
    """Variables of every process: what flags and files asked for and where, and to report it in a line.

    Empty when nothing was asked.
    """
    requested: dict[str, tuple[str, object]] = {}
    launcher_classes = launcher_settings()
    for cls in request.loaded:
        for row in declared_settings(cls):
            origin = request.origin(row.name)
            if origin.source in ("flag", "file") and (
                cls not in launcher_classes or row.name in _VISIBLE_IN_RANKS
            ):
                requested[row.name] = origin.where, origin.value
    if str(request.settings.num_machines) != "1":
        requested = {name: row for name, row in requested.items() if name not in _SINGLE_MACHINE_ONLY}
    for name, origin in request.strategy_switches.items():
        requested[name] = origin.where, True
    if not requested:
        return {}
    import json

    report = {} if request.settings.quiet or request.get("effects") else {"ACCELERATE_EFFECTS": "line"}
    return {"ACCELERATE_ASKED": json.dumps(requested), **report}
