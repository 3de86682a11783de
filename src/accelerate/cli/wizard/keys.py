"""Single keys of a configuration file: found by any of their spellings, checked by their setting, changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from accelerate.cli.options import HANDED, rows
from accelerate.core import environ
from accelerate.core.errors import AccelerateError, SettingError, UnknownNameError
from accelerate.core.setting import Setting, checked
from accelerate.launch import files, writing
from accelerate.launch.check import check
from accelerate.launch.files import ConfigFile
from accelerate.launch.job import of
from accelerate.launch.writing import Keys


def place(named: str | None) -> Path:
    """The file to write: the one named by flag or variable, else the default one."""
    where = named or environ.get("ACCELERATE_CONFIG_FILE")
    return Path(where).expanduser() if where else files.default_file()


def find(key: str) -> Setting:
    """The setting of a key: ``fsdp_version``, ``fsdp_config.fsdp_version`` or ``fsdp_config.version``.

    Raises:
        UnknownNameError: there is none; the nearest is suggested.
    """
    known = [row for row in rows() if row.in_file]
    section, _, name = key.rpartition(".")
    for row in known:
        if name in (row.name, row.name.removeprefix(row.prefix)) and row.section == section:
            return row
        if not section and name == row.name:
            return row
    spellings = [row.path if section else row.name for row in known]
    raise UnknownNameError("key", key, spellings, where="in --set")


def parse(pair: str) -> tuple[Setting, Any]:
    """``"key=value"`` as a setting and its checked value; None for ``key=none`` and ``key=``.

    Raises:
        SettingError: it is no pair, or the value does not fit.
        UnknownNameError: there is no such key.
    """
    key, sign, text = pair.partition("=")
    if not sign:
        raise SettingError(f"--set {pair} has no value", fix=f"write --set {key.strip()}=value")
    row, word = find(key.strip()), text.strip()
    if word.lower() in ("", "none", "null"):
        return row, None
    return row, plain(checked(row, word, f"--set {row.name}", text=True))


def plain(value: Any) -> Any:
    """A value as a file holds it."""
    return list(value) if isinstance(value, tuple) else value


@dataclass(frozen=True)
class Change:
    """One key of a file before and after; None for "not there"."""

    key: str
    old: Any
    new: Any

    def __str__(self) -> str:
        if self.new is None:
            return f"{self.key}: taken out (it was {self.old!r})"
        return f"{self.key}: {self.new!r}" + ("" if self.old is None else f" (it was {self.old!r})")


def set_in(path: Path, pairs: Iterable[str]) -> list[Change]:
    """Changes the keys of a file that ``pairs`` name, and leaves everything else as it stands.

    Args:
        path: the file; made if there is none.
        pairs: ``"key=value"``, the last one wins.

    Raises:
        SettingError: a pair is wrong, the file cannot be read, or it would have a key that nobody knows.
    """
    asked = {row.name: (row, value) for row, value in map(parse, pairs)}
    old = files.raw(path)[0] if path.exists() else {}
    new = _up_to_date(old)
    wanted = {_spelling(new, row): value for row, value in asked.values()}
    new = writing.with_changes(new, wanted)
    problem = refusal(new, path)
    if isinstance(problem, UnknownNameError):
        raise problem
    save(path, old, new)
    return [
        Change(row.path, _get(old, _spelling(old, row)), value)
        for row, value in asked.values()
        if _get(old, _spelling(old, row)) != value
    ]


def _up_to_date(values: Mapping[Any, Any]) -> dict[str, Any]:
    """The values as they stand, unless a key of them exists no more: then all of them as today's."""
    new = files.modern(values)
    return new if new.keys() - values.keys() else {str(key): value for key, value in values.items()}


def _spelling(values: Mapping[Any, Any], row: Setting) -> Keys:
    """Where a setting stands in a file, or would."""
    if not row.section:
        return (row.name,)
    table = values.get(row.section)
    short = row.name.removeprefix(row.prefix)
    return row.section, short if isinstance(table, dict) and short in table else row.name


def _get(values: Mapping[Any, Any], keys: Keys) -> Any:
    found: Any = values
    for key in keys:
        found = found.get(key) if isinstance(found, Mapping) else None
    return found


def save(path: Path, old: Mapping[Any, Any], new: Mapping[str, Any]) -> Path | None:
    """Writes ``new`` over a file that holds ``old``.

    Returns:
        A copy of the file as it was, where comments or its layout could not be kept.
    """
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    if path.suffix != ".json":
        kept = writing.edited(text, writing.difference(old, new))
        if kept is not None:
            writing.write(path, kept)
            return None
    copy = writing.backup(path) if "#" in text else None
    writing.write(path, writing.text_of(new, path))
    return copy


def refusal(values: Mapping[str, Any], path: Path) -> AccelerateError | None:
    """What ``accelerate launch`` would say against a file with these values, on any machine."""
    try:
        file = ConfigFile(path, files.modern(values))
        # A module, so that nobody looks for a script.
        check(of(file, {"module": True}, ("module",), HANDED, env={}))
    except AccelerateError as error:
        return error
    return None
