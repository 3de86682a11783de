"""Prefetch of offloaded weights: pages are copied to a device before they are needed, and dropped after use.

One pager serves one device. While a block computes, the next one is copied on a separate stream. The order
of blocks is learned from what was run before. Every copy is a fresh tensor, allocated and freed on the
computing stream: a view of a weight that outlives its block keeps the memory it looks at, and memory is not
used again before what was given to the device has read it. Nothing is copied back but what was changed.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Generator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any

import torch

from accelerate import device as devices
from accelerate.core.units import show_bytes, show_seconds
from accelerate.device.base import Device
from accelerate.offload.module_tensors import address_of
from accelerate.offload.weight_block import (
    HostPageAllocator,
    StagingBuffers,
    WeightBlock,
    WeightPage,
    read_page,
)

MAX_STALL_EVENTS = 256  # pairs of events that are kept when the device has passed them


@dataclass
class PagerStats:
    """Counters of a pager since it was created, or since ``reset``.

    Attributes:
        blocks: how often a block was opened.
        copies, bytes_copied: copies to the device, and their bytes.
        prefetched: copies that were started before they were needed.
        bytes_written_back: bytes of weights that were changed in place and copied back.
        host_wait: seconds for which the program waited for values to be read or copied.
        past_stalls: seconds of waits of the compute stream that have ended.
        stalls: events before and after the latest such waits.
    """

    blocks: int = 0
    copies: int = 0
    bytes_copied: int = 0
    prefetched: int = 0
    bytes_written_back: int = 0
    host_wait: float = 0.0
    past_stalls: float = 0.0
    stalls: deque[tuple[Any, Any]] = field(default_factory=deque[tuple[Any, Any]])

    def add_stall(self, before: Any, after: Any) -> None:
        """Count a wait of the compute stream for a copy, by the events around it."""
        self.stalls.append((before, after))
        while len(self.stalls) > MAX_STALL_EVENTS and self.stalls[0][1].query():
            first, last = self.stalls.popleft()
            self.past_stalls += first.elapsed_time(last) / 1e3

    @property
    def device_wait(self) -> float:
        """The seconds for which the device's compute stream waited for copies; waits for the device."""
        total = self.past_stalls
        for before, after in self.stalls:
            after.synchronize()
            total += before.elapsed_time(after) / 1e3
        return total

    @property
    def wait_seconds(self) -> float:
        """The seconds in which nothing was computed because weights were being copied."""
        return self.host_wait + self.device_wait

    def reset(self) -> None:
        """Set all counters to zero."""
        self.__init__()

    def __str__(self) -> str:
        waited = self.wait_seconds
        speed = f", {show_bytes(self.bytes_copied / waited)}/s while waiting" if waited > 0 else ""
        return (
            f"{show_bytes(self.bytes_copied)} in {self.copies} copies for {self.blocks} blocks, "
            f"{self.prefetched} of them prefetched; {show_seconds(waited)} of waiting{speed}; "
            f"{show_bytes(self.bytes_written_back)} written back"
        )


@dataclass(eq=False)
class ResidentPage:
    """A page on the device, or being copied to it.

    Attributes:
        buffer: its bytes.
        copy_event: the event of the copy; a future of it while a thread reads the page; None: it is there.
        stream: where the buffer was allocated.
        changes: those of the weights when they were read.
        users: how many open blocks have weights of it.
        is_ready: a stream waits for the copy.
    """

    buffer: torch.Tensor
    copy_event: Any
    stream: Any
    changes: list[Any]
    users: int = 0
    is_ready: bool = False


class _PagerThreadState(threading.local):
    """The state of a thread: the depth of its forwards, and its last two blocks."""

    depth: int = 0
    recent: tuple[WeightBlock | None, WeightBlock | None] = (None, None)


class Pager:
    """The copies of weights to one device.

    Args:
        device: the device.
        driver: its ``Device``; found by its type if not given.

    Attributes:
        blocks: the blocks in the order in which they were defined, which is the first guess at their order.
        stats: its counters.
    """

    def __init__(self, device: torch.device, driver: Device | None = None) -> None:
        self.device = device
        self.driver = driver or devices.get(device.type)
        self.blocks: list[WeightBlock] = []
        self.stats = PagerStats()
        self.memory = HostPageAllocator(self.driver)
        self.lock = threading.RLock()
        self.resident: dict[WeightPage, ResidentPage] = {}
        self.backward_pages: dict[WeightPage, ResidentPage] = {}
        self._order: dict[tuple[WeightBlock | None, WeightBlock | None], WeightBlock | None] = {}
        self._thread = _PagerThreadState()
        self._running_forwards = 0
        # The allocator's retries when the running forward began; None once there was another one.
        self._known_retries: int | None = None
        self._copy_stream: Any = None
        self._staging: StagingBuffers | None = None
        self._reader: ThreadPoolExecutor | None = None
        self._started = False

    def __deepcopy__(self, memo: dict[int, Any]) -> Pager:
        """A copied model has a pager of its own; its blocks join it as they are copied."""
        twin = memo[id(self)] = Pager(self.device, self.driver)
        return twin

    # --- blocks

    def open_block(self, block: WeightBlock) -> None:
        """Put the weights of a block into its modules, and prefetch those of the next block.

        Raises:
            OutOfMemoryError: they do not fit.
            OffloadError: a file that they are in is gone.
        """
        with self.lock:
            if not block.users:
                block.refresh(self.device, self.memory, self.blocks)
            next_block = self._predict_next(block)
            pages = {*block.pages, *(next_block.pages if next_block else ())}
            self._drop_unused(keep=pages)
            held_pages: list[WeightPage] = []
            try:
                for page in block.pages:
                    self._hold_page(page)
                    held_pages.append(page)
                if not block.users:
                    block.install([self.resident[page].buffer for page in block.pages])
                if next_block is not None and self._thread.depth and self._copy_stream is not None:
                    self._prefetch(next_block)
            except BaseException:
                if not block.users:
                    block.uninstall()
                self._release_pages(held_pages)
                raise
            block.users += 1
            self.stats.blocks += 1

    def close_block(self, block: WeightBlock) -> None:
        """Put the stand-ins back, and drop the weights.

        Raises:
            OffloadError: a weight was changed in place whose values are in a file.
        """
        with self.lock:
            block.users -= 1
            try:
                if not block.users:
                    self.stats.bytes_written_back += block.uninstall()
            finally:
                self._release_pages(block.pages)

    def begin_forward(self) -> None:
        """Record that a forward begins, around those of blocks."""
        with self.lock:
            if not self._thread.depth:
                self._thread.recent = (None, None)
                if self.driver.pins_memory:  # without a copy stream nothing is prefetched
                    self._known_retries = self._count_retries()
                self._running_forwards += 1
            self._thread.depth += 1

    def end_forward(self) -> None:
        """Record that a forward ended or raised; after the outermost one nothing stays on the device."""
        with self.lock:
            self._thread.depth -= 1
            if not self._thread.depth:
                self._order[self._thread.recent] = None
                self._running_forwards -= 1
            if not self._running_forwards:
                self._drop_unused(keep=set())

    def _predict_next(self, block: WeightBlock) -> WeightBlock | None:
        """Record that ``block`` runs now, and return the block that is expected next."""
        thread = self._thread
        self._order[thread.recent] = block
        thread.recent = (thread.recent[1], block)
        if thread.recent in self._order:
            return self._order[thread.recent]
        return block.next_block

    # --- pages

    def _hold_page(self, page: WeightPage) -> None:
        """Fetch a page if needed, and keep it on the device for the compute stream."""
        resident_page = self.resident.get(page)
        if resident_page is not None and not resident_page.users and resident_page.changes != page.changes:
            self._drop_page(page)
            resident_page = None
        if resident_page is None:
            resident_page = self.resident[page] = self._fetch_or_make_room(page)
        try:
            self._wait_ready(resident_page)
        except BaseException:
            del self.resident[page]
            raise
        resident_page.users += 1

    def _release_pages(self, pages: list[WeightPage]) -> None:
        for page in pages:
            resident_page = self.resident[page]
            resident_page.users -= 1
            # Weights that several blocks share are copied once in a forward.
            if not resident_page.users and not (page.shared and self._running_forwards):
                del self.resident[page]

    def _drop_unused(self, keep: set[WeightPage]) -> None:
        """Drop pages that nobody uses and that are not expected any more."""
        for page, resident_page in list(self.resident.items()):
            if (
                not resident_page.users
                and page not in keep
                and not (page.shared and self._running_forwards and resident_page.is_ready)
            ):
                self._drop_page(page)

    def _drop_page(self, page: WeightPage) -> None:
        resident_page = self.resident.pop(page)
        event = resident_page.copy_event
        # The copy must not write into memory that others have got. A read that failed copies nothing, and
        # nobody has asked for its values.
        if not (isinstance(event, Future) and event.exception()):
            self._wait_ready(resident_page)

    def _prefetch(self, block: WeightBlock) -> None:
        """Begin to copy a block's pages, if there is room for them now. It needs a stream of its own.

        Where the allocator had to make room in this forward, for these copies or beside them, the device is
        too full to hold a block that is not needed yet.
        """
        for page in block.pages:
            if page not in self.resident:
                if self._known_retries is None or self._count_retries() > self._known_retries:
                    self._known_retries = None
                    return
                try:
                    self.resident[page] = self._fetch_page(page)
                except RuntimeError as error:
                    if self.driver.is_out_of_memory(error):
                        return  # they are fetched when this block is dropped
                    raise
                self.stats.prefetched += 1

    def _count_retries(self) -> int:
        return self.driver.allocator_retries(self.device.index) or 0

    def _fetch_or_make_room(self, page: WeightPage) -> ResidentPage:
        """Fetch a page; if there is no room, drop prefetched pages and try again."""
        try:
            return self._fetch_page(page)
        except RuntimeError as error:
            if not self.driver.is_out_of_memory(error):
                raise
        self.backward_pages.clear()
        self._drop_unused(keep=set())
        self.driver.empty_cache()
        return self._fetch_page(page)

    def _fetch_page(self, page: WeightPage) -> ResidentPage:
        """Begin to copy a page to the device."""
        self._start_copying()
        changes = page.changes
        if page.host is not None and changes != page.home_changes:
            changes = self._bring_home(page)
        begin = time.perf_counter()
        # Weights are tensors of the usual kind, also when they are brought under inference mode.
        with torch.inference_mode(False), torch.no_grad():
            buffer = torch.empty(page.nbytes, dtype=torch.uint8, device=self.device)
            self.stats.copies += 1
            self.stats.bytes_copied += page.nbytes
            if self._copy_stream is None:
                if page.host is None:
                    read_page(page, buffer)
                else:
                    buffer.copy_(page.host)
                self.stats.host_wait += time.perf_counter() - begin
                return ResidentPage(buffer, None, None, changes)
            stream = self.driver.current_stream(self.device.index)
            free = self.driver.record_event(stream)  # whatever had this memory before is done by then
            if page.host is not None:
                return ResidentPage(buffer, self._copy_to_device(page.host, buffer, free), stream, changes)
            assert self._reader is not None
            event = self._reader.submit(self._read_and_copy, page, [buffer], free)
            return ResidentPage(buffer, event, stream, changes)

    def _bring_home(self, page: WeightPage) -> list[Any]:
        """Copy values that a program has assigned to weights into the memory that the page is copied from.

        Returns:
            The changes of the page.
        """
        assigned = page.assigned_entries()
        if assigned:
            self.driver.synchronize(self.device.index)  # an earlier copy may still read it
        with torch.inference_mode(False), torch.no_grad():
            page.bring_home(assigned)
        return page.home_changes

    def _start_copying(self) -> None:
        """Create the copy stream and the reading thread; the first copy is the first use of the device."""
        if self._started:
            return
        self._started = True
        if self.driver.pins_memory:
            self._copy_stream = self.driver.stream(self.device.index)
            self._staging = StagingBuffers(self.driver)
            self._reader = ThreadPoolExecutor(1, thread_name_prefix="accelerate-pager")

    def _copy_to_device(self, host: torch.Tensor, buffer: torch.Tensor, free: Any) -> Any:
        with self.driver.use_stream(self._copy_stream):
            self.driver.wait_event(free, self._copy_stream)
            buffer.copy_(host, non_blocking=True)
            return self.driver.record_event(self._copy_stream)

    def _read_and_copy(self, page: WeightPage, holder: list[torch.Tensor], free: Any) -> Any:
        """Copy files -> pinned memory -> device, in the reading thread. It keeps no device memory."""
        assert self._staging is not None
        with torch.no_grad():
            event = self._copy_to_device(self._staging.fill(page), holder.pop(), free)
        self._staging.mark_copying(event)
        return event

    def _wait_ready(self, resident_page: ResidentPage) -> None:
        """Make the current stream wait for the copy of a page."""
        if resident_page.copy_event is None:
            resident_page.is_ready = True
            return
        now = self.driver.current_stream(self.device.index)
        if isinstance(resident_page.copy_event, Future):
            begin = time.perf_counter()
            resident_page.copy_event = resident_page.copy_event.result()
            self.stats.host_wait += time.perf_counter() - begin
        before = None if resident_page.is_ready else self.driver.record_event(now, timed=True)
        self.driver.wait_event(resident_page.copy_event, now)
        if before is not None:
            self.stats.add_stall(before, self.driver.record_event(now, timed=True))
        if now != resident_page.stream:
            resident_page.buffer.record_stream(now)
        resident_page.is_ready = True

    # --- backward

    @contextmanager
    def saved_tensor_hooks(self) -> Generator[None]:
        """Let autograd save the page of a weight, not the weight; backward fetches it again.

        Other tensors are saved as before: activation checkpointing around a block recomputes them.
        """
        torch_c: Any = torch._C
        # Torch 2.6 does not tell them: there a block that is checkpointed saves its activations.
        top_hooks = getattr(torch_c._autograd, "_top_saved_tensors_default_hooks", None)
        outer_hooks: Any = top_hooks(False) if top_hooks else None

        def pack(tensor: torch.Tensor) -> Any:
            saved = self._pack(tensor)
            return (
                _OuterHookSavedTensor(outer_hooks[0](tensor))
                if outer_hooks and not isinstance(saved, _AutogradWeightReference)
                else saved
            )

        def unpack(saved: Any) -> torch.Tensor:
            return (
                outer_hooks[1](saved.value)
                if isinstance(saved, _OuterHookSavedTensor)
                else self._unpack(saved)
            )

        # Inside of torch.func.grad torch refuses hooks: there the graph keeps the weights.
        is_enabled = torch_c._autograd._saved_tensors_hooks_is_enabled()
        with torch.autograd.graph.saved_tensors_hooks(pack, unpack) if is_enabled else nullcontext():
            yield

    def _pack(self, tensor: torch.Tensor) -> Any:
        # Detached: a node that held its own output through here would never be freed.
        if type(tensor) not in (torch.Tensor, torch.nn.Parameter) or tensor.device != self.device:
            return tensor.detach()
        # Inside of torch.func tensors have no address: they are saved as they are.
        address = address_of(tensor) and tensor.untyped_storage().data_ptr()
        with self.lock:
            resident_pages = list(self.resident.items())
        for page, resident_page in resident_pages:
            if address and address_of(resident_page.buffer) == address:
                view_args = tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset())
                return _AutogradWeightReference(page, view_args)
        return tensor.detach()

    def _unpack(self, saved: Any) -> torch.Tensor:
        if not isinstance(saved, _AutogradWeightReference):
            return saved
        dtype, size, stride, offset = saved.view_args
        with torch.no_grad():
            return self._fetch_for_backward(saved.page).view(dtype).as_strided(size, stride, offset)

    def _fetch_for_backward(self, page: WeightPage) -> torch.Tensor:
        """Fetch a page for backward; it stays until another one is needed, or backward ends."""
        with self.lock:
            resident_page = self.resident.get(page) or self.backward_pages.get(page)
            if resident_page is None:
                self.backward_pages.clear()
                resident_page = self.backward_pages[page] = self._fetch_or_make_room(page)
                if torch._C._current_graph_task_id() != -1:
                    torch.autograd.Variable._execution_engine.queue_callback(self.backward_pages.clear)
            self._wait_ready(resident_page)
            return resident_page.buffer


@dataclass(frozen=True)
class _OuterHookSavedTensor:
    """The value that the saved tensor hooks around a block returned for a tensor."""

    value: Any


@dataclass(frozen=True)
class _AutogradWeightReference:
    """The reference to a weight that autograd saves instead of the weight."""

    page: WeightPage
    view_args: tuple[torch.dtype, torch.Size, tuple[int, ...], int]
