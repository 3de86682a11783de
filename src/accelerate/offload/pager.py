"""Brings pages of weights to a device before they are needed, and drops them when they were used.

One pager serves one device. While a block computes, the next one is copied, on a stream of its own; the order
of blocks is learned from what was run before. Every copy is a fresh tensor, allocated and freed on the
computing stream: a view of a weight that outlives its block keeps the memory it looks at, and memory is not
used again before what was given to the device has read it. Nothing is copied back but what was changed.
"""

# torch's signatures are partly untyped: what is unknown here is torch's.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from accelerate import device as devices
from accelerate.core.units import show_bytes, show_seconds
from accelerate.device.base import Device
from accelerate.offload.pages import HostMemory, Page, Staging, read


class Block(Protocol):
    """What a pager asks of a block; see ``accelerate.offload.block``."""

    pages: list[Page]
    users: int

    @property
    def following(self) -> Block | None:
        """The next block in the order of definition."""
        ...

    def refresh(self) -> None:
        """Looks whether its modules are what they were."""
        ...

    def install(self, buffers: list[torch.Tensor]) -> None:
        """Puts weights in their places."""
        ...

    def uninstall(self) -> int:
        """Puts the stand-ins back; returns the bytes that were copied home."""
        ...


@dataclass
class Stats:
    """What a pager has done since it was made, or since ``reset``.

    Attributes:
        blocks: how often a block was opened.
        copies, moved: copies to the device, and their bytes.
        ahead: copies that were asked for before they were needed.
        written: bytes of weights that were changed in place and copied back.
        host_wait: seconds for which the program waited for values to be read or copied.
    """

    blocks: int = 0
    copies: int = 0
    moved: int = 0
    ahead: int = 0
    written: int = 0
    host_wait: float = 0.0
    stalls: deque[tuple[Any, Any]] = field(default_factory=lambda: deque[tuple[Any, Any]](maxlen=4096))

    @property
    def device_wait(self) -> float:
        """Seconds for which the device's computing stream waited for copies; waits for the device."""
        total = 0.0
        for before, after in self.stalls:
            after.synchronize()
            total += before.elapsed_time(after) / 1e3
        return total

    @property
    def waited(self) -> float:
        """Seconds in which nothing was computed because weights were on their way."""
        return self.host_wait + self.device_wait

    def reset(self) -> None:
        """Begins to count anew."""
        self.__init__()

    def __str__(self) -> str:
        waited = self.waited
        speed = f", {show_bytes(self.moved / waited)}/s while waiting" if waited > 0 else ""
        return (
            f"{show_bytes(self.moved)} in {self.copies} copies for {self.blocks} blocks, {self.ahead} of "
            f"them asked for ahead; {show_seconds(waited)} of waiting{speed}; "
            f"{show_bytes(self.written)} written back"
        )


@dataclass(eq=False)
class Arrival:
    """A page on the device, or on its way.

    Attributes:
        buffer: its bytes.
        done: the event of the copy; a future of it while a thread reads the page; None: it is there.
        stream: where the buffer was allocated.
        users: how many open blocks have weights of it.
        landed: a stream has been told to wait for the copy.
    """

    buffer: torch.Tensor
    done: Any
    stream: Any
    users: int = 0
    landed: bool = False


class _Thread(threading.local):
    """Where a thread is: how deep in forwards, and its last two blocks."""

    depth: int = 0
    seen: tuple[Block | None, Block | None] = (None, None)


class Pager:
    """The traffic of weights to one device.

    Args:
        device: the device.
        driver: its ``Device``; found by its type if not given.

    Attributes:
        blocks: the blocks in the order in which they were defined, which is the first guess at their order.
        stats: what was done.
    """

    def __init__(self, device: torch.device, driver: Device | None = None) -> None:
        self.device = device
        self.driver = driver or devices.get(device.type)
        self.blocks: list[Any] = []
        self.stats = Stats()
        self.memory = HostMemory(self.driver, 0)
        self.lock = threading.RLock()
        self.arrivals: dict[Page, Arrival] = {}
        self.borrowed: dict[Page, Arrival] = {}
        self._order: dict[tuple[Block | None, Block | None], Block | None] = {}
        self._thread = _Thread()
        self._passes = 0
        self._copies: Any = None
        self._staging: Staging | None = None
        self._reader: ThreadPoolExecutor | None = None
        self._started = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Pager:
        """A copied model has a pager of its own; its blocks join it as they are copied."""
        twin = memo[id(self)] = Pager(self.device, self.driver)
        return twin

    # --- blocks

    def open(self, block: Block) -> None:
        """Puts the weights of a block in their places, and asks for those of the next.

        Raises:
            OutOfMemoryError: they do not fit.
            OffloadError: a file that they are in is gone.
        """
        with self.lock:
            if not block.users:
                block.refresh()
            following = self._follow(block)
            wanted = {*block.pages, *(following.pages if following else ())}
            self._forget(keep=wanted)
            held: list[Page] = []
            try:
                for page in block.pages:
                    self._hold(page)
                    held.append(page)
                if not block.users:
                    block.install([self.arrivals[page].buffer for page in block.pages])
            except BaseException:
                self._let_go(held)
                raise
            block.users += 1
            self.stats.blocks += 1
            if following is not None and self._thread.depth:
                self._ahead(following)

    def close(self, block: Block) -> None:
        """Puts the stand-ins back, and drops the weights.

        Raises:
            OffloadError: a weight was changed in place whose values are in a file.
        """
        with self.lock:
            block.users -= 1
            try:
                if not block.users:
                    self.stats.written += block.uninstall()
            finally:
                self._let_go(block.pages)

    def enter(self) -> None:
        """A forward begins, around those of blocks."""
        with self.lock:
            if not self._thread.depth:
                self._thread.seen = (None, None)
                self._passes += 1
            self._thread.depth += 1

    def leave(self) -> None:
        """It ended, or raised. After the outermost one nothing stays on the device."""
        with self.lock:
            self._thread.depth -= 1
            if not self._thread.depth:
                self._order[self._thread.seen] = None
                self._passes -= 1
            if not self._passes:
                self._forget(keep=set())

    def _follow(self, block: Block) -> Block | None:
        """Learns that ``block`` came now, and says which one will be next."""
        thread = self._thread
        self._order[thread.seen] = block
        thread.seen = (thread.seen[1], block)
        if thread.seen in self._order:
            return self._order[thread.seen]
        return block.following

    # --- pages

    def _hold(self, page: Page) -> None:
        """Makes sure that a page is there, for the computing stream, as long as it is held."""
        arrival = self.arrivals.get(page)
        if arrival is None:
            arrival = self.arrivals[page] = self._fetch_somehow(page)
        try:
            self._land(arrival)
        except BaseException:
            del self.arrivals[page]
            raise
        arrival.users += 1

    def _let_go(self, pages: list[Page]) -> None:
        for page in pages:
            arrival = self.arrivals[page]
            arrival.users -= 1
            # What several blocks share is brought once in a forward.
            if not arrival.users and not (page.shared and self._passes):
                del self.arrivals[page]

    def _forget(self, keep: set[Page]) -> None:
        """Drops pages that nobody uses and that are not expected any more."""
        for page, arrival in list(self.arrivals.items()):
            if (
                not arrival.users
                and page not in keep
                and not (page.shared and self._passes and arrival.landed)
            ):
                del self.arrivals[page]
                self._land(arrival)  # the copy must not write into memory that others have got

    def _ahead(self, block: Block) -> None:
        """Asks for a block's pages, if there is room for them now."""
        for page in block.pages:
            if page not in self.arrivals:
                try:
                    self.arrivals[page] = self._fetch(page)
                except torch.OutOfMemoryError:
                    return  # they come when this block is dropped
                self.stats.ahead += 1

    def _fetch_somehow(self, page: Page) -> Arrival:
        """Asks for a page; if there is no room, gives up what was asked for ahead and tries again."""
        try:
            return self._fetch(page)
        except torch.OutOfMemoryError:
            self.borrowed.clear()
            self._forget(keep=set())
            self.driver.empty_cache()
            return self._fetch(page)

    def _fetch(self, page: Page) -> Arrival:
        """Begins to copy a page to the device."""
        self._start()
        self.stats.copies += 1
        self.stats.moved += page.nbytes
        begin = time.perf_counter()
        # Weights are tensors of the usual kind, also when they are brought under inference mode.
        with torch.inference_mode(False), torch.no_grad():
            buffer = torch.empty(page.nbytes, dtype=torch.uint8, device=self.device)
            if self._copies is None:
                if page.host is None:
                    read(page, buffer)
                else:
                    buffer.copy_(page.host)
                self.stats.host_wait += time.perf_counter() - begin
                return Arrival(buffer, None, None)
            stream = self.driver.current_stream(self.device.index)
            free = self.driver.mark(stream)  # whatever had this memory before is done by then
            if page.host is not None:
                return Arrival(buffer, self._copy(page.host, buffer, free), stream)
            assert self._reader is not None
            return Arrival(buffer, self._reader.submit(self._read_and_copy, page, [buffer], free), stream)

    def _start(self) -> None:
        """The stream and the thread; the first copy is the first use of the device."""
        if self._started:
            return
        self._started = True
        if self.driver.pins:
            self._copies = self.driver.stream(self.device.index)
            self._staging = Staging(self.driver)
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="accelerate-pager")

    def _copy(self, host: torch.Tensor, buffer: torch.Tensor, free: Any) -> Any:
        with self.driver.on(self._copies):
            self.driver.wait(free, self._copies)
            buffer.copy_(host, non_blocking=True)
            return self.driver.mark(self._copies)

    def _read_and_copy(self, page: Page, holder: list[torch.Tensor], free: Any) -> Any:
        """In the reading thread: files -> pinned memory -> device. It keeps no memory of the device."""
        assert self._staging is not None
        with torch.no_grad():
            event = self._copy(self._staging.fill(page), holder.pop(), free)
        self._staging.leaves(event)
        return event

    def _land(self, arrival: Arrival) -> None:
        """From here on the current stream computes with the page."""
        if arrival.done is None:
            arrival.landed = True
            return
        now = self.driver.current_stream(self.device.index)
        if isinstance(arrival.done, Future):
            begin = time.perf_counter()
            arrival.done = arrival.done.result()
            self.stats.host_wait += time.perf_counter() - begin
        before = None if arrival.landed else self.driver.mark(now, timed=True)
        self.driver.wait(arrival.done, now)
        if before is not None:
            self.stats.stalls.append((before, self.driver.mark(now, timed=True)))
        if now != arrival.stream:
            arrival.buffer.record_stream(now)
        arrival.landed = True

    # --- backward

    @contextmanager
    def saving(self) -> Generator[None]:
        """Inside, autograd keeps where a weight is found, not the weight; backward brings it again.

        What is no weight is kept as it would be without: checkpointing, which is around, computes it again.
        """
        torch_c: Any = torch._C
        around: Any = torch_c._autograd._top_saved_tensors_default_hooks(False)

        def pack(tensor: torch.Tensor) -> Any:
            saved = self._pack(tensor)
            return _Around(around[0](tensor)) if around and not isinstance(saved, _Saved) else saved

        def unpack(saved: Any) -> torch.Tensor:
            return around[1](saved.value) if isinstance(saved, _Around) else self._unpack(saved)

        with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
            yield

    def _pack(self, tensor: torch.Tensor) -> Any:
        # Detached: a node that held its own output through here would never be freed.
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device != self.device:
            return tensor.detach()
        address = tensor.untyped_storage().data_ptr()
        with self.lock:
            here = list(self.arrivals.items())
        for page, arrival in here:
            if arrival.buffer.data_ptr() == address and page.nbytes:
                where = tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
                return _Saved(page, where)
        return tensor.detach()

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _Saved):
            return saved
        dtype, size, stride, offset = saved.where
        with torch.no_grad():
            return self._borrow(saved.page).view(dtype).as_strided(size, stride, offset)

    def _borrow(self, page: Page) -> torch.Tensor:
        """A page for backward: it stays until another one is needed, or backward ends."""
        with self.lock:
            arrival = self.arrivals.get(page) or self.borrowed.get(page)
            if arrival is None:
                self.borrowed.clear()
                arrival = self.borrowed[page] = self._fetch_somehow(page)
                if torch._C._current_graph_task_id() != -1:
                    torch.autograd.Variable._execution_engine.queue_callback(self.borrowed.clear)
            self._land(arrival)
            return arrival.buffer


@dataclass(frozen=True)
class _Around:
    """What the saved tensor hooks around a block made of a tensor."""

    value: Any


@dataclass(frozen=True)
class _Saved:
    """In the place of a weight in autograd's graph."""

    page: Page
    where: tuple[torch.dtype, torch.Size, tuple[int, ...], int]
