"""torch files: written by ``torch.save``, read without running code unless the caller says otherwise.

A ``weights_only`` load builds what torch allows by itself (tensors, plain values) and what ``safe_globals``
lists. Everything else is refused by name: a pickle may call any function that it can name. Before that, it is
scanned for what would take time and memory without end (``core/pickle_scan.py``).

A large optimizer state is memory-mapped from its file at first, and copied to memory soon after. Filling
fresh memory is most of the time that a load takes. A private mapping is there at once; then a thread lets the
kernel copy its pages (``MADV_POPULATE_WRITE``, Linux 5.14), those that training has not written to yet: what
it has written stays. When that is done the file does not matter any more. Should somebody change the file in
place before, the next save, load or wait raises it: no training goes on unnoticed with a state that changed
under it. The disk space of a file that is removed comes back when the state is gone.

Source: madvise(2), "MADV_POPULATE_WRITE"; proc(5), "mountinfo".
"""

from __future__ import annotations

import argparse
import collections
import ctypes
import datetime
import decimal
import errno
import fractions
import io
import logging
import mmap
import os
import pathlib
import pickle
import re
import sys
import threading
import types
import uuid
import zipfile
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import IO, Any, BinaryIO, ClassVar, cast

import numpy as np
import torch
from torch import _utils as torch_utils
from torch.multiprocessing.reductions import StorageWeakRef
from torch.storage import TypedStorage, _LegacyStorage

from accelerate.checkpoint.errors import file_errors
from accelerate.checkpoint.file_reads import FileRangeReader
from accelerate.core import tree
from accelerate.core.errors import CheckpointError
from accelerate.core.pickle_scan import RefusedPickleError, scan_torch_file

LARGE = 64 * 2**20  # bytes; less is read at once
_POPULATE_WRITE = 23
# A network file system that does not answer would end the process when a page is read.
_LOCAL = {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "bcachefs", "tmpfs"}
_Stamp = tuple[int, int]

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
_warned: set[tuple[str, tuple[str, ...]]] = set()


@cache
def safe_globals() -> list[Any]:
    """Return the classes that a ``weights_only`` load may build besides torch's own list.

    They are plain classes of Python and of numpy's data.

    These hold data and run nothing.
    """
    array = np.zeros(1, np.uint32)
    rebuild_array: Any = array.__reduce__()[0]
    scalar: Any = np.float64(0).__reduce__()[0]
    dtypes = [value for name, value in vars(np.dtypes).items() if name.endswith("DType")]
    numbers = [(partial(_make_number, kind), f"{kind.__module__}.{kind.__name__}") for kind in _NUMBERS]
    return [rebuild_array, np.ndarray, scalar, np.dtype, _encode(), *dtypes, *_PLAIN, *numbers]


def _make_number(kind: Callable[..., Any], *parts: Any) -> Any:
    if any(type(part) not in (int, str) or _LONG_NUMBER.search(str(part)) for part in parts):
        raise ValueError(f"a {getattr(kind, '__name__', kind)} is made from no number")
    return kind(*parts)


def _encode() -> Any:
    from codecs import encode

    return encode  # numpy pickles bytes through it


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

    torch.save(value, file, pickle_module=types.SimpleNamespace(Pickler=RecordedPickler, __name__="pickle"))
    if what:
        for pickler in picklers:
            if isinstance(pickler.file, io.BytesIO) and not pickler.seen_types <= _known_types():
                _warn_refused(what, pickler.file.getvalue())


@cache
def _known_types() -> frozenset[Any]:
    """Return the classes that a ``weights_only`` load accepts."""
    classes = (torch.Tensor, torch.nn.Parameter, torch.Size, torch.dtype, torch.device)
    storages = TypedStorage.__subclasses__() + _LegacyStorage.__subclasses__()
    rebuild = (value for name, value in vars(torch_utils).items() if name.startswith("_rebuild_"))
    return frozenset(
        (
            *classes,
            *storages,
            *rebuild,
            collections.OrderedDict,
            collections.Counter,
            set,
            *_NUMBERS,
            *safe_globals(),
        )
    )


def _warn_refused(what: str, pickled: bytes) -> None:
    """Warn once that loading will refuse an object."""
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as file:
        file.writestr("archive/data.pkl", pickled)
        file.writestr("archive/version", "3")
    archive.seek(0)
    refused = refusals(archive)
    if refused and (what, refused) not in _warned:
        _warned.add((what, refused))
        logger.warning(
            "%s saves %s, which loading refuses unless you type %s or torch.serialization.add_safe_globals: "
            "let its state_dict() return plain values and tensors",
            what,
            ", ".join(refused),
            TRUST,
        )


def refusals(source: Path | IO[bytes]) -> tuple[str, ...]:
    """Return the names of classes and functions in a torch file that a ``weights_only`` load would refuse."""
    with torch.serialization.safe_globals(safe_globals()):
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
    with file_errors("read", path), torch.serialization.safe_globals(safe_globals()):
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
        except RefusedPickleError as error:
            fix = f"if you trust whoever wrote the file: {trust}"
            raise CheckpointError(f"cannot read {path}", why=str(error), fix=fix) from error
        except pickle.UnpicklingError as error:
            if not kwargs["weights_only"]:
                raise
            names = _refused_names(source)
            allow = f"; to allow only these: torch.serialization.add_safe_globals([{names}])" if names else ""
            raise CheckpointError(
                f"{path} holds more than data, and reading it could run code",
                why=f"it names {names}" if names else _refusal_line(error),
                fix=f"if you trust whoever wrote the file: {trust}{allow}",
            ) from error


def _refused_names(source: Path | IO[bytes]) -> str:
    """Return the names that are refused in a file; empty if unknown."""
    if isinstance(source, Path) and zipfile.is_zipfile(source):
        return ", ".join(refusals(source))
    return ""


def _refusal_line(error: Exception) -> str:
    """Return the line of torch's explanation that names what was refused."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return next(
        (line for line in lines if "GLOBAL" in line or "Unsupported" in line), lines[0] if lines else ""
    )


class MappedOptimizerState:
    """The optimizer state in a torch file, mapped until its pages are copied.

    Args:
        path: the file.
        kwargs: arguments of ``read``.

    Attributes:
        state: what the file holds, until it is loaded.
    """

    _open: ClassVar[list[MappedOptimizerState]] = []

    def __init__(self, path: Path, **kwargs: Any) -> None:
        self.path, self.failure = path, ""
        with file_errors("read", path):
            self._file = path.open("rb")  # keeps this file, whatever is renamed to its name
        self._stamp = _stamp(self._file.fileno())
        self.state: Any = read(path, mmap=True, **kwargs)
        self._thread: threading.Thread | None = None

    def load_into(self, load: Callable[[Any], Any]) -> None:
        """Pass the state to ``load``; a thread copies the pages of the tensors that it keeps."""
        state, self.state = self.state, None
        references = [
            StorageWeakRef(leaf.untyped_storage())
            for _, leaf in tree.iterate_leaves(state)
            if _has_memory(leaf)
        ]
        load(state)
        del state
        # Strong references: memory that was freed meanwhile is not touched.
        storages = [
            storage for ref in references if (storage := torch.UntypedStorage._new_with_weak_ptr(ref.cdata))
        ]
        if not storages:
            self._file.close()
        else:
            MappedOptimizerState._open.append(self)
            self._thread = threading.Thread(
                target=self._copy_pages, args=(storages,), name="accelerate-own", daemon=True
            )
            self._thread.start()

    def _copy_pages(self, storages: list[torch.UntypedStorage]) -> None:
        try:
            for start, size in _page_ranges(storages):
                populate_pages(start, size)
        except OSError as error:
            self.failure = f"its pages cannot be copied: {error.strerror}"
        if _stamp(self._file.fileno()) != self._stamp:
            self.failure = "the file was changed while the state was taken from it"
        self._file.close()

    @classmethod
    def wait_copied(cls) -> None:
        """Wait until the pages of all states are copied.

        Raises:
            CheckpointError: the file of one was changed before.
        """
        while cls._open:
            mapped = cls._open.pop()
            if mapped._thread is not None:
                mapped._thread.join()
            if mapped.failure:
                raise CheckpointError(
                    f"the optimizer state that was loaded from {mapped.path} cannot be trusted",
                    why=mapped.failure,
                    fix="load the checkpoint again, and leave its files alone for some seconds",
                )


def can_map(path: Path, location: Any) -> bool:
    """Return True if a torch file may be mapped: large, on a local disk, for use in host memory."""
    on_host = str(location) == "cpu"
    return on_host and path.stat().st_size >= LARGE and _can_populate() and _file_system(path) in _LOCAL


@cache
def _can_populate() -> bool:
    if sys.platform != "linux":
        return False
    page = mmap.mmap(-1, mmap.PAGESIZE)
    address = ctypes.addressof(ctypes.c_char.from_buffer(page))
    try:
        populate_pages(address, mmap.PAGESIZE)
    except OSError:
        return False
    return True


def populate_pages(address: int, size: int) -> None:
    """Give this process its own copy of every page of a private mapping.

    Raises:
        OSError: the system does not know this, or memory is short.
    """
    function = ctypes.CDLL(None, use_errno=True).madvise
    function.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    while function(address, size, _POPULATE_WRITE):
        code = ctypes.get_errno()
        if code not in (errno.EAGAIN, errno.EINTR):
            raise OSError(code, os.strerror(code))


def _file_system(path: Path) -> str:
    """Return the type of the file system of a file; empty if unknown."""
    device = path.stat().st_dev
    device_numbers = f"{os.major(device)}:{os.minor(device)}"
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        if before.split()[2] == device_numbers:
            return after.split()[0]
    return ""


def _stamp(handle: int) -> _Stamp:
    stat = os.fstat(handle)
    return stat.st_mtime_ns, stat.st_size


def _has_memory(leaf: Any) -> bool:
    return (
        isinstance(leaf, torch.Tensor) and leaf.device.type == "cpu" and leaf.untyped_storage().nbytes() > 0
    )


def _page_ranges(storages: Iterable[torch.UntypedStorage]) -> list[tuple[int, int]]:
    """Return (address, bytes) of whole pages; adjacent ranges are merged."""
    page, ranges = mmap.PAGESIZE, list[tuple[int, int]]()
    for start, size in sorted((storage.data_ptr(), storage.nbytes()) for storage in storages):
        first, last = start // page * page, -(-(start + size) // page) * page
        if ranges and first <= sum(ranges[-1]):
            first, last = ranges[-1][0], max(last, sum(ranges.pop()))
        ranges.append((first, last - first))
    return ranges
