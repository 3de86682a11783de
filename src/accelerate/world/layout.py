"""How the ranks of a world are arranged: degrees of parallelism become named axes of a mesh.

The one place that checks sizes. The axes and their order are those of ``ParallelismConfig``: the outer
axis varies slowest, so neighbouring ranks, which share a machine, meet in the axes that talk most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from accelerate.core.errors import WorldError

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

# field of Layout -> name of the mesh's dimension, outermost first
DIMENSIONS: dict[str, str] = {
    "pp": "pp",
    "replicate": "dp_replicate",
    "shard": "dp_shard",
    "cp": "cp",
    "sp": "sp",
    "tp": "tp",
}
# Those along which processes see different data.
DATA = ("dp_replicate", "dp_shard")


@dataclass(frozen=True)
class Layout:
    """Degrees of parallelism; their product is the size of the world. -1 fills what is left.

    Attributes:
        replicate: copies of the model, each fed other data (DDP, or the outer axis of HSDP).
        shard: ranks that share one copy's parameters, gradients and optimizer (FSDP).
        tp: ranks that share each layer's matrices (tensor parallel).
        cp: ranks that share each sequence, all layers (context parallel).
        sp: ranks that share each sequence around attention (Ulysses sequence parallel).
        pp: stages of layers (pipeline).
    """

    replicate: int = 1
    shard: int = 1
    tp: int = 1
    cp: int = 1
    sp: int = 1
    pp: int = 1

    def __post_init__(self) -> None:
        for name, degree in self.degrees().items():
            if degree == 0 or degree < -1:
                raise WorldError(
                    f"layout: {name}={degree} is no degree of parallelism",
                    why="a degree is 1 or more, or -1 to fill the world",
                    fix=f"set {name}=1 to leave it out",
                )
        if len(self._open()) > 1:
            raise WorldError(
                f"layout: only one degree can fill the world, but {' and '.join(self._open())} are -1",
                fix=f"give all but {self._open()[0]} a number",
            )

    def degrees(self) -> dict[str, int]:
        """Field name -> degree, outermost axis first."""
        return {name: getattr(self, name) for name in DIMENSIONS}

    def check(self, size: int, words: Mapping[str, str] | None = None) -> Layout:
        """The same layout for a world of ``size`` ranks, the open degree filled.

        Args:
            size: ranks of the world.
            words: what the user calls the degrees, by their fields; None calls them as here.

        Raises:
            WorldError: the product of the degrees is not ``size``.
        """
        product, open_degrees = self._product(), self._open()
        if open_degrees and size % product == 0:
            return replace(self, **{open_degrees[0]: size // product})
        if not open_degrees and product == size:
            return self
        said = words or {name: name for name in DIMENSIONS}
        shown = " x ".join(f"{said[name]}={d}" for name, d in self.degrees().items() if d > 1) or "1"
        verb = "divide" if open_degrees else "equal"
        total = f" = {product}" if " x " in shown else ""
        raise WorldError(
            f"layout: {shown}{total} does not {verb} the world size {size}",
            why="every rank has one place in the layout, and every place one rank",
            fix=self._ways_out(size, product, said),
        )

    def _ways_out(self, size: int, product: int, said: Mapping[str, str]) -> str:
        """Two things to type: another number of processes, or another degree."""
        wanted = product * max(1, round(size / product)) if self._open() else product
        first = f"start {wanted} processes"
        if size % product == 0:
            more = " (or shard=-1, to fill)" if said["shard"] == "shard" else ""
            return f"{first}, or set {said['replicate']}={self.replicate * size // product}{more}"
        for name, degree in sorted(self.degrees().items(), key=lambda item: -item[1]):
            rest = product // abs(degree)
            if degree > 1 and size % rest == 0:
                return f"{first}, or set {said[name]}={size // rest if not self._open() else 1}"
        return f"{first}, or set all degrees but one to 1 and that one to {size}"

    def axes(self) -> tuple[str, ...]:
        """Names of the mesh's dimensions with more than one rank, outermost first."""
        return tuple(DIMENSIONS[name] for name, degree in self.degrees().items() if degree > 1)

    def size(self) -> int:
        """Ranks in the layout.

        Raises:
            WorldError: a degree is still open.
        """
        self._require_filled()
        return self._product()

    def coordinates(self, rank: int) -> dict[str, int]:
        """Dimension name -> place of ``rank`` on it, for every dimension.

        Raises:
            WorldError: the rank is outside the layout, or a degree is still open.
        """
        if not 0 <= rank < self.size():
            raise WorldError(f"layout: rank {rank} is outside of {self.size()} ranks")
        places: dict[str, int] = {}
        for name, degree in reversed(self.degrees().items()):
            rank, places[DIMENSIONS[name]] = divmod(rank, degree)
        return {dimension: places[dimension] for dimension in DIMENSIONS.values()}

    def mesh(self, device_type: str, *, size: int | None = None) -> DeviceMesh:
        """The torch mesh of the layout: its dimensions with more than one rank; one of all if there is none.

        Collective: every rank must call it, since process groups are made.

        Args:
            device_type: torch's device type, ``"cuda"``.
            size: size of the world, for a layout with an open degree.

        Raises:
            WorldError: the layout does not fit the world.
        """
        from torch.distributed.device_mesh import init_device_mesh

        layout = self if size is None else self.check(size)
        layout._require_filled()
        names = layout.axes() or (DIMENSIONS["replicate"],)
        degrees = {DIMENSIONS[name]: degree for name, degree in layout.degrees().items()}
        return init_device_mesh(device_type, tuple(degrees[n] for n in names), mesh_dim_names=names)

    def _product(self) -> int:
        return math.prod(degree for degree in self.degrees().values() if degree > 0)

    def _open(self) -> list[str]:
        return [item.name for item in fields(self) if getattr(self, item.name) == -1]

    def _require_filled(self) -> None:
        if self._open():
            raise WorldError(
                f"layout: {self._open()[0]}=-1 is not filled yet",
                fix="call check(world size) first",
            )


def parts_of(mesh: DeviceMesh) -> tuple[int, int]:
    """Into how many parts the processes of a mesh share out their data, and which one this process reads."""
    count, index = 1, 0
    places = mesh.get_coordinate() or [0] * mesh.ndim
    for name, size, place in zip(mesh.mesh_dim_names or (), mesh.shape, places, strict=True):
        if name in DATA:
            count, index = count * size, index * size + place
    return count, index
