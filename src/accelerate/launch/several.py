"""When a job is on several machines: what a wizard asks about only then."""

from __future__ import annotations


class _Several:
    """Holds every number of machines beyond one, ``"1:4"`` too."""

    def __contains__(self, value: object) -> bool:
        last = str(value).rpartition(":")[2]
        return last.isdigit() and int(last) > 1


SEVERAL = {"num_machines": _Several()}
