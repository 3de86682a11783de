"""When a job is on several machines: what a wizard asks about only then."""

from __future__ import annotations


class _MachineCountAboveOne:
    """Holds every number of machines beyond one, ``"1:4"`` too."""

    def __contains__(self, value: object) -> bool:
        last = str(value).rpartition(":")[2]
        return last.isdigit() and int(last) > 1


MULTI_MACHINE = {"num_machines": _MachineCountAboveOne()}
