"""A block: modules whose weights come to the device together, around one forward."""

# torch's signatures are partly untyped: what is unknown here is torch's.
# pyright: reportUnknownMemberType=false, reportUnknownVariableType=false, reportUnknownArgumentType=false

from __future__ import annotations

import copy
import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from accelerate.offload.assign import as_parameter
from accelerate.offload.pager import Pager
from accelerate.offload.pages import Page, is_movable, split_by_home
from accelerate.offload.source import HostSource, OffloadError
from accelerate.offload.tensor import OffloadedTensor, offloaded

Table = dict[str, Any]
# (a table of a module, what it held when the block was read)
Snapshot = tuple[Table, tuple[Any, ...]]


def is_callable(module: nn.Module) -> bool:
    """Whether a module computes something itself; lists and dicts of modules do not."""
    return getattr(type(module), "forward", None) is not nn.Module.forward


class Block:
    """Modules whose weights come and go together.

    Args:
        name: of the module whose forward they are needed for.
        module: that module.
        whole: everything in it; otherwise only what it holds itself, and the lists of it.
        pager: brings the weights.

    Attributes:
        pages: the weights, as they travel.
        users: forwards that are using them now.
        armed: its parts bring their weights themselves, should they run while it is closed.
        following: the next block in the order of definition.
    """

    def __init__(self, name: str, module: nn.Module, whole: bool, pager: Pager) -> None:
        self.name, self.module, self.whole, self.pager = name, module, whole, pager
        self.pages: list[Page] = []
        self.users = 0
        self.armed = False
        self.following: Block | None = None
        self._places: dict[int, list[tuple[Table, str]]] = {}  # by the identity of a stand-in
        self._seen: list[Snapshot] | None = None
        self._here: list[tuple[OffloadedTensor, torch.Tensor]] = []
        self._versions: list[tuple[Page, torch.Tensor, int]] = []

    def __repr__(self) -> str:
        return f"<block {self.name or 'of the model'}, {sum(page.nbytes for page in self.pages)} bytes>"

    def __deepcopy__(self, memo: dict[int, Any]) -> Block:
        """The block of a copied model, which is read when it is first used."""
        module, pager = copy.deepcopy(self.module, memo), copy.deepcopy(self.pager, memo)
        twin = memo[id(self)] = Block(self.name, module, self.whole, pager)
        pager.blocks.append(twin)
        return twin

    def take(self, module: nn.Module) -> None:
        """Another module has taken the place of the block's."""
        self.module, self._seen = module, None

    # --- which weights

    def modules(self) -> Iterator[nn.Module]:
        """The modules whose weights are the block's."""
        if self.whole:
            yield from self.module.modules()
            return
        waiting = [self.module]
        while waiting:
            module = waiting.pop(0)
            yield module
            waiting += [c for c in module._modules.values() if c is not None and not is_callable(c)]

    def stand_ins(self) -> list[OffloadedTensor]:
        """The block's weights, each once, in the order of their modules."""
        self._places = {}
        seen: list[Snapshot] = []
        found: list[OffloadedTensor] = []
        for module in self.modules():
            seen.append(_snapshot(module._modules))
            for table in (module._parameters, module._buffers):
                here = [(name, t) for name, t in table.items() if isinstance(t, OffloadedTensor)]
                for name, tensor in here:
                    if id(tensor) not in self._places:
                        found.append(tensor)
                    self._places.setdefault(id(tensor), []).append((table, name))
                if here or table is module._parameters:
                    seen.append(_snapshot(table))
        self._seen = seen
        return found

    def make_pages(self, stand_ins: list[OffloadedTensor], shared: dict[int, Page]) -> None:
        """Sorts the weights into pages, and moves those in memory into memory of the pages' own.

        Args:
            stand_ins: the block's weights.
            shared: the pages of those that other blocks have as well, by identity.
        """
        known = {page.key: page for page in self.pages}
        mine = [s for s in stand_ins if id(s) not in shared]
        pages = [Page(group) for group in split_by_home(mine)]
        self.pages = [known.get(page.key, page) for page in pages]
        self.pages += [shared[id(s)] for s in stand_ins if id(s) in shared]
        for page in self.pages:
            if page.host is None and is_movable(page.pieces[0].stand_in):
                page.gather(self.pager.memory)

    def refresh(self) -> None:
        """Looks whether the modules are what they were; if somebody replaced some, takes the new ones."""
        if self._seen is not None and all(map(_is_unchanged, self._seen)):
            return
        self._adopt()
        shared = {page.key[0]: page for page in self.pages if page.shared}
        self.make_pages(self.stand_ins(), shared)

    def _adopt(self) -> None:
        """Weights that came from elsewhere, after the model was dispatched, are offloaded like the others.

        Those that are trained beside frozen ones (adapters) go to the device and stay.

        Raises:
            OffloadError: one has no values.
        """
        device = self.pager.device
        modules = list(self.modules())
        known = [p for m in modules for p in m._parameters.values() if isinstance(p, OffloadedTensor)]
        frozen = any(not p.requires_grad for p in known)
        made: dict[int, Any] = {}
        for module in modules:
            tables: tuple[Table, ...] = (module._parameters, module._buffers)
            for table in tables:
                for name, tensor in list(table.items()):
                    if tensor is not None and tensor.is_meta and not _is_mapped(module, name):
                        raise self._hollow(tensor)
                    if tensor is None or tensor.device.type != "cpu":
                        continue
                    if id(tensor) not in made:
                        made[id(tensor)] = (
                            moved(tensor, device)
                            if table is module._buffers or (tensor.requires_grad and frozen)
                            else offloaded(tensor, HostSource(f"{self.name}.{name}", tensor.detach()), device)
                        )
                    table[name] = made[id(tensor)]

    def _hollow(self, tensor: torch.Tensor) -> OffloadError:
        tensors = (*self.module.named_parameters(), *self.module.named_buffers())
        path = next((path for path, each in tensors if each is tensor), "?")
        return OffloadError(
            f"{self.name}.{path} has no values: it was put on the meta device after the model was dispatched",
            why="offloaded weights show that device, and what follows them there, like an adapter, is lost",
            fix="add it to the model in memory, then dispatch both: dispatch_model(model, device_map=...)",
        )

    # --- in and out

    def install(self, buffers: list[torch.Tensor]) -> None:
        """Puts the weights of the pages, which are on the device, in their places.

        Args:
            buffers: the bytes of each page.
        """
        gradients = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.no_grad():
            self._versions = [
                (page, buffer, buffer._version) for page, buffer in zip(self.pages, buffers, strict=True)
            ]
            views = [pair for page, buffer, _ in self._versions for pair in page.views(buffer)]
        for piece, view in views:
            stand_in = piece.stand_in
            places = self._places.get(id(stand_in), ())
            if isinstance(stand_in, nn.Parameter):
                view = _resident(stand_in, view, gradients)
            for table, name in places:
                table[name] = view
            self._here.append((stand_in, view))

    def uninstall(self) -> int:
        """Puts the stand-ins back; what was changed in place goes home.

        Returns:
            Bytes that were copied home.

        Raises:
            OffloadError: values were changed whose home is a file.
        """
        for stand_in, tensor in self._here:
            for table, name in self._places.get(id(stand_in), ()):
                if table.get(name) is tensor:  # else the module has taken another one, which stays
                    table[name] = stand_in
        self._here, versions, self._versions = [], self._versions, []
        changed = ((page, buffer) for page, buffer, version in versions if buffer._version != version)
        return sum(_write_back(page, buffer) for page, buffer in changed)


def _is_unchanged(snapshot: Snapshot) -> bool:
    table, seen = snapshot
    return len(table) == len(seen) and all(map(operator.is_, table.values(), seen))


def _is_mapped(module: nn.Module, name: str) -> bool:
    """Whether a hook on the module knows the values of its tensor."""
    return name in (getattr(vars(module).get("_hf_hook"), "weights_map", None) or ())


def _snapshot(table: Table) -> Snapshot:
    return table, tuple(table.values())


def _write_back(page: Page, buffer: torch.Tensor) -> int:
    """Copies changed weights of a page home."""
    written = 0
    with torch.inference_mode(False), torch.no_grad():
        for piece, view in page.views(buffer):
            home = piece.stand_in.source
            if page.host is None and torch.equal(view.cpu(), home.host()):
                continue
            home.write(view)
            written += piece.nbytes
    return written


def _resident(stand_in: Any, view: torch.Tensor, gradients: bool) -> torch.Tensor:
    """The parameter that stands in the module while its values are on the device."""
    if gradients and stand_in.requires_grad:
        return _Lent.apply(stand_in, [view])
    if not vars(stand_in).keys() - _PLAIN:
        return nn.Parameter(view, requires_grad=False)
    made = as_parameter(view, stand_in)
    return made.requires_grad_(False)


# What a stand-in for an ordinary parameter has; whatever else is there was set by others.
_PLAIN = {"source", "execution", "_is_param", "_restored"}


class _Lent(torch.autograd.Function):
    """A weight on the device whose gradient would be lost when it is dropped: asking for it is an error."""

    @staticmethod
    def forward(ctx: Any, stand_in: Any, holder: list[torch.Tensor]) -> torch.Tensor:
        """The weight; the holder hides it from autograd, which keeps arguments."""
        ctx.name = stand_in.source.name
        return holder[0]

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Any) -> Any:
        """There is nowhere to keep a gradient.

        Raises:
            OffloadError: always.
        """
        raise OffloadError(
            f"{ctx.name} is offloaded, and cannot be trained",
            why="its values are dropped after each forward, and a gradient for them has nowhere to go",
            fix="freeze what is offloaded, model.requires_grad_(False), and train adapters on top of it",
        )


def moved(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A parameter or buffer on a device, the same object where torch can keep it."""
    holder = nn.Module()
    if isinstance(tensor, nn.Parameter):
        holder.register_parameter("tensor", tensor)
        return holder.to(device)._parameters["tensor"]  # pyright: ignore[reportReturnType]
    return tensor.to(device)
