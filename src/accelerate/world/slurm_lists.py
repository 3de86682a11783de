"""Parsers of SLURM's compact lists of numbers and of hosts."""

from __future__ import annotations

import re
from itertools import product

from accelerate.core.errors import WorldError


def expand_counts(text: str, *, where: str = "the list") -> list[int]:
    """Parse SLURM's repeated numbers: ``"2(x3),1"`` is ``[2, 2, 2, 1]``.

    Raises:
        WorldError: the text is not such a list; ``where`` names its source.
    """
    counts: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:\(x(\d+)\))?\s*", part)
        if match is None:
            raise WorldError(f"{where}={text!r} is not a list like '2(x3),1'")
        counts += [int(match[1])] * int(match[2] or 1)
    return counts


def expand_nodes(text: str, *, where: str = "the list") -> list[str]:
    """Parse SLURM's compact host lists: ``"gpu[01-02,07]-ib,login"`` is gpu01-ib, gpu02-ib, gpu07-ib, login.

    Names keep what stands before and after a bracket, numbers their leading zeros; of several brackets
    in one name the last runs fastest.

    Raises:
        WorldError: the text is not such a list; ``where`` names its source.
    """
    names: list[str] = []
    for pattern in re.findall(r"(?:[^,\[\]]|\[[^\[\]]*\])+", text):
        parts = re.split(r"\[([^\[\]]*)\]", pattern.strip())
        choices = [_numbers(part, text, where) if index % 2 else [part] for index, part in enumerate(parts)]
        names += ["".join(choice) for choice in product(*choices)]
    if not names or text.count("[") != text.count("]"):
        raise WorldError(f"{where}={text!r} is not a list of hosts like 'gpu[01-03,07],login'")
    return names


def _numbers(ranges: str, text: str, where: str) -> list[str]:
    """Parse ``"01-03,07"`` to ``["01", "02", "03", "07"]``."""
    numbers: list[str] = []
    for part in ranges.split(","):
        match = re.fullmatch(r"\s*(\d+)(?:-(\d+))?\s*", part)
        if match is None:
            raise WorldError(f"{where}={text!r} holds {part!r}, which is not a number or a range like 01-03")
        first, last = match[1], match[2] or match[1]
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last) + 1)]
    return numbers
