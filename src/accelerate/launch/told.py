"""What a launch tells the script about who asked for what, so that it can report what became of it."""

from __future__ import annotations

from accelerate.core.setting import declared
from accelerate.launch.job import Request, kept

# Settings that stay with the launcher and whose effect shows in the processes only; and, of those, what a
# process of several machines cannot judge, since machines may come and go.
_SEEN_INSIDE = ("num_processes", "num_cpu_threads_per_process", "gpu_ids")
_OF_ONE_MACHINE = ("num_processes",)


def told(request: Request) -> dict[str, str]:
    """Variables of every process: what flags and files asked for and where, and to report it in a line.

    Empty when nothing was asked.
    """
    asked: dict[str, tuple[str, object]] = {}
    here = kept()
    for cls in request.loaded:
        for row in declared(cls):
            origin = request.origin(row.name)
            if origin.source in ("flag", "file") and (cls not in here or row.name in _SEEN_INSIDE):
                asked[row.name] = origin.where, origin.value
    if str(request.settings.num_machines) != "1":
        asked = {name: row for name, row in asked.items() if name not in _OF_ONE_MACHINE}
    for name, origin in request.engines.items():
        asked[name] = origin.where, True
    if not asked:
        return {}
    import json

    report = {} if request.settings.quiet or request.get("effects") else {"ACCELERATE_EFFECTS": "line"}
    return {"ACCELERATE_ASKED": json.dumps(asked), **report}
