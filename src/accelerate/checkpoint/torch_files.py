"""torch files: written by ``torch.save``, read without running code unless the caller says otherwise.

A ``weights_only`` load builds what torch allows by itself (tensors, plain values) and what ``safe_globals``
lists. Everything else is refused by name: a pickle may call any function that it can name. Before that, it is
scanned for what would take time and memory without end (``core/pickle_scan.py``).
"""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import fractions
import io
import logging
import pathlib
import pickle
import re
import threading
import types
import uuid
import zipfile
from codecs import encode
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager, suppress
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, BinaryIO, ClassVar, cast

import numpy as np
import torch

from accelerate.checkpoint.file_access import CodeInFileError, file_errors
from accelerate.checkpoint.file_reads import FileRangeReader
from accelerate.core.errors import CheckpointError
from accelerate.core.pickle_scan import DamagedPickleError, RefusedPickleError, scan_torch_file

logger = logging.getLogger(__name__)

# Classes whose constructors only store their arguments. As functions in a pickle (``defaultdict(list)``) they
# convert data to data.
_PLAIN: tuple[Any, ...] = (
    *(bool, int, float, str, bytes, tuple, list, dict, frozenset, range, slice),
    *(collections.defaultdict, collections.deque),
    *(datetime.date, datetime.datetime, datetime.time, datetime.timedelta, datetime.timezone),
    *(pathlib.PosixPath, pathlib.WindowsPath, pathlib.PurePosixPath, pathlib.PureWindowsPath),
    *(uuid.UUID, types.SimpleNamespace, argparse.Namespace),
)
_NUMBERS = (decimal.Decimal, fractions.Fraction)
_LONG_NUMBER = re.compile(r"[eE]\s*[+-]?[\d_]{6}")  # 1e999999 as a fraction takes a million digits
TRUST = "load_state(..., load_kwargs={'weights_only': False})"
_PICKLED_BY_NAME = (type, types.FunctionType, types.BuiltinFunctionType)  # pickled as their names
_accepted_types: set[Any] = set()  # classes and functions in files that a ``weights_only`` load accepts
_warned: set[tuple[str, tuple[str, ...]]] = set()
_allowing = threading.Lock()


@cache
def safe_globals() -> list[Any]:
    """Return the classes that a ``weights_only`` load may build besides torch's own list.

    They are plain classes of Python and of numpy's data.

    These hold data and run nothing; numpy pickles bytes through ``codecs.encode``.
    """
    array = np.zeros(1, np.uint32)
    rebuild_array: Any = array.__reduce__()[0]
    scalar: Any = np.float64(0).__reduce__()[0]
    dtypes = [value for name, value in vars(np.dtypes).items() if name.endswith("DType")]
    numbers = [(partial(_make_number, kind), f"{kind.__module__}.{kind.__name__}") for kind in _NUMBERS]
    return [rebuild_array, np.ndarray, scalar, np.dtype, encode, *dtypes, *_PLAIN, *numbers]


def _make_number(kind: Callable[..., Any], *parts: Any) -> Any:
    if any(type(part) not in (int, str) or _LONG_NUMBER.search(str(part)) for part in parts):
        raise ValueError(f"a {getattr(kind, '__name__', kind)} is made from no number")
    return kind(*parts)


class _WeightsOnlyCompatiblePickler(pickle.Pickler):
    """A pickler that writes containers so that a ``weights_only`` load accepts them.

    Attributes:
        instances: of a subclass, those that were made; torch makes one for each pickle in a file.
        file: what it writes to.
        seen_types: classes of the objects it has written; classes and functions as they are.
    """

    instances: ClassVar[list[Any]]

    def __init__(self, file: IO[bytes], *args: Any, **kwargs: Any) -> None:
        super().__init__(file, *args, **kwargs)
        self.file = file
        self.seen_types: set[Any] = set()
        self.instances.append(self)

    def reducer_override(self, obj: Any) -> Any:
        """Pass the content of a container as an argument: such a load fills lists and dicts only."""
        kind = type(obj)
        self.seen_types.add(obj if issubclass(kind, _PICKLED_BY_NAME) else kind)
        if kind is collections.deque:
            return collections.deque, (list(obj), obj.maxlen)
        if kind is collections.defaultdict:
            return collections.defaultdict, (obj.default_factory, dict(obj))
        return NotImplemented


def write(value: Any, file: BinaryIO, what: str = "") -> None:
    """Write one torch file.

    Args:
        value: the object.
        file: open for writing.
        what: how a log line calls the object if ``read`` will refuse it; empty to not look.
    """
    picklers: list[_WeightsOnlyCompatiblePickler] = []

    class RecordedPickler(_WeightsOnlyCompatiblePickler):
        instances = picklers

    module = types.SimpleNamespace(Pickler=RecordedPickler, __name__="pickle")
    try:
        torch.save(value, file, pickle_module=module)
        for pickler in picklers if what else ():
            if isinstance(pickler.file, io.BytesIO) and not pickler.seen_types <= _accepted_types:
                _warn_refused(what, pickler.seen_types, pickler.file.getvalue())
    finally:
        picklers.clear()  # the class and they hold each other, and they hold all that was written


def _warn_refused(what: str, types_in_it: set[Any], pickled: bytes) -> None:
    """Warn once that loading will refuse an object; remember the types of one that it will not refuse."""
    refused = _refusals_of_pickle(pickled)
    if not refused:
        _accepted_types.update(types_in_it)
    elif (what, refused) not in _warned:
        _warned.add((what, refused))
        logger.warning(
            "%s saves %s, which loading refuses unless you type %s or torch.serialization.add_safe_globals: "
            "let its state_dict() return plain values and tensors",
            what,
            ", ".join(refused),
            TRUST,
        )


def _refusals_of_pickle(pickled: bytes) -> tuple[str, ...]:
    """Return what ``refusals`` returns for a torch file with this pickle and no tensors."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/version", "3")
    archive.seek(0)
    return refusals(archive)


class _OwnEntry(tuple[Any, str]):
    """An entry of torch's set of safe globals that equals no other: removing it leaves the user's there."""

    __slots__ = ()
    __eq__ = object.__eq__
    __hash__ = object.__hash__


@contextmanager
def _allow_safe_globals() -> Generator[None]:
    """Let torch build ``safe_globals`` besides what the user has allowed; threads may do so at once."""
    pairs = (
        each if isinstance(each, tuple) else (each, f"{each.__module__}.{each.__qualname__}")
        for each in safe_globals()
    )
    allowed = torch.serialization.safe_globals(list(map(_OwnEntry, pairs)))
    with _allowing:  # torch reads its set and puts a changed one in its place
        allowed.__enter__()
    try:
        yield
    finally:
        with _allowing:
            allowed.__exit__(None, None, None)


def refusals(source: Path | IO[bytes]) -> tuple[str, ...]:
    """Return the names of classes and functions in a torch file that a ``weights_only`` load would refuse."""
    with _allow_safe_globals():
        path = str(source) if isinstance(source, Path) else source
        return tuple(sorted(torch.serialization.get_unsafe_globals_in_checkpoint(path)))


def read(source: Path | IO[bytes], map_location: Any = None, trust: str = TRUST, **kwargs: Any) -> Any:
    """Load the object in a torch file.

    Args:
        source: path, or file open for reading.
        map_location: as ``torch.load`` takes it.
        trust: what the user types to load a file that may run code, for the error.
        kwargs: more arguments of ``torch.load``; ``weights_only`` is True unless given.

    Raises:
        CheckpointError: the file is missing, damaged, or would run code.
    """
    kwargs.setdefault("weights_only", True)
    path = source if isinstance(source, Path) else Path(getattr(source, "name", "the stream"))
    with file_errors("read", path), _allow_safe_globals():
        if kwargs.get("mmap") and path.is_file() and not zipfile.is_zipfile(path):
            kwargs["mmap"] = False  # files of torch before 1.6 cannot be mapped
        try:
            if kwargs["weights_only"]:
                scan_torch_file(source)
            if isinstance(source, Path) and not kwargs.get("mmap") and zipfile.is_zipfile(source):
                with FileRangeReader(source) as parallel:
                    file, kwargs["mmap"] = cast(IO[bytes], parallel), False
                    return torch.load(file, map_location=map_location, **kwargs)
            return torch.load(source, map_location=map_location, **kwargs)
        except DamagedPickleError as error:
            raise CheckpointError(f"cannot read {path}", why=str(error)) from error
        except RefusedPickleError as error:
            fix = f"if you trust whoever wrote the file: {trust}"
            raise CodeInFileError(f"cannot read {path}", why=str(error), fix=fix) from error
        except pickle.UnpicklingError as error:
            if not kwargs["weights_only"]:
                raise
            names = _refused_names(source)
            allow = f"; to allow only these: torch.serialization.add_safe_globals([{names}])" if names else ""
            raise CodeInFileError(
                f"{path} holds more than data, and reading it could run code",
                why=f"it names {names}" if names else _refusal_line(error),
                fix=f"if you trust whoever wrote the file: {trust}{allow}",
            ) from error


class MappedStates(Sequence[Any]):
    """The states in torch files, each mapped when it is asked for.

    Args:
        paths: the files.
        load_kwargs: more arguments of ``read``.
    """

    def __init__(self, paths: Sequence[Path], load_kwargs: Mapping[str, Any]) -> None:
        kwargs = {"mmap": True, **load_kwargs, "map_location": "cpu"}
        self._paths, self._read = paths, cache(partial(read, **kwargs))

    def __getitem__(self, index: Any) -> Any:
        return self._read(self._paths[index])

    def __len__(self) -> int:
        return len(self._paths)


def _refused_names(source: Path | IO[bytes]) -> str:
    """Return the names that are refused in a file; empty if unknown."""
    if isinstance(source, Path) and zipfile.is_zipfile(source):
        with suppress(pickle.UnpicklingError):  # torch reads pickles of protocol 2 only
            return ", ".join(refusals(source))
    return ""


def _refusal_line(error: Exception) -> str:
    """Return the line of torch's explanation that names what was refused."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next(
        (line for line in lines if "GLOBAL" in line or "Unsupported" in line), lines[0] if lines else ""
    )
