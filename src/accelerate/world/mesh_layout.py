"""The device mesh layout: degrees of parallelism become named mesh dimensions.

All checks of their sizes are here. The dimensions and their order are those of ``ParallelismConfig``: the
outer dimension varies slowest, so neighbouring ranks, on one machine, share the dimensions that communicate
most.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING

from accelerate.core.errors import WorldError, warn_user

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
# Dimensions along which ranks read different data (data parallel).
DATA_DIMENSIONS = ("dp_replicate", "dp_shard")
# The same, as programs name the dimensions of a mesh that they made.
_DATA_NAMES = (*DATA_DIMENSIONS, "dp", "ddp", "fsdp", "hsdp", "data", "data_parallel", "replicate", "shard")


@dataclass(frozen=True)
class MeshLayout:
    """Degrees of parallelism; their product is the world size. -1 fills the rest.

    Attributes:
        replicate: data-parallel replicas of the model (DDP, or the outer dimension of HSDP).
        shard: ranks that shard parameters, gradients and optimizer state of a replica (FSDP).
        tp: ranks that shard each layer's matrices (tensor parallel).
        cp: ranks that split each sequence in all layers (context parallel).
        sp: ranks that split each sequence except in attention (Ulysses sequence parallel).
        pp: stages of layers (pipeline parallel).
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
        if len(self._open_degrees()) > 1:
            raise WorldError(
                "layout: only one degree can fill the world, but "
                f"{' and '.join(self._open_degrees())} are -1",
                fix=f"give all but {self._open_degrees()[0]} a number",
            )

    def degrees(self) -> dict[str, int]:
        """Return field name -> degree, outermost dimension first."""
        return {name: getattr(self, name) for name in DIMENSIONS}

    def check(self, size: int, degree_names: Mapping[str, str] | None = None) -> MeshLayout:
        """Return the layout for a world of ``size`` ranks, with the open degree filled.

        Args:
            size: world size.
            degree_names: the names of the degrees in errors, by field; None takes the field names.

        Raises:
            WorldError: the product of the degrees is not ``size``.
        """
        product, open_degrees = self._fixed_product(), self._open_degrees()
        if open_degrees and size % product == 0:
            return replace(self, **{open_degrees[0]: size // product})
        if not open_degrees and product == size:
            return self
        names = degree_names or {name: name for name in DIMENSIONS}
        shown = " x ".join(f"{names[name]}={d}" for name, d in self.degrees().items() if d > 1) or "1"
        verb = "divide" if open_degrees else "equal"
        total = f" = {product}" if " x " in shown else ""
        raise WorldError(
            f"layout: {shown}{total} does not {verb} the world size {size}",
            why="every rank has one place in the layout, and every place one rank",
            fix=self._suggest_fixes(size, product, names),
        )

    def _suggest_fixes(self, size: int, product: int, names: Mapping[str, str]) -> str:
        """Return the fix: another number of processes, or another degree."""
        num_processes = product * max(1, round(size / product)) if self._open_degrees() else product
        first = f"start {num_processes} processes"
        if size % product == 0:
            more = " (or shard=-1, to fill)" if names["shard"] == "shard" else ""
            return f"{first}, or set {names['replicate']}={self.replicate * size // product}{more}"
        for name, degree in sorted(self.degrees().items(), key=lambda item: -item[1]):
            rest = product // abs(degree)
            if degree > 1 and size % rest == 0:
                return f"{first}, or set {names[name]}={size // rest if not self._open_degrees() else 1}"
        return f"{first}, or set all degrees but one to 1 and that one to {size}"

    def axes(self) -> tuple[str, ...]:
        """Return the names of mesh dimensions with more than one rank, outermost first."""
        return tuple(DIMENSIONS[name] for name, degree in self.degrees().items() if degree > 1)

    def size(self) -> int:
        """Return the number of ranks in the layout.

        Raises:
            WorldError: a degree is still open.
        """
        if self._open_degrees():
            raise WorldError(
                f"layout: {self._open_degrees()[0]}=-1 is not filled yet",
                fix="call check(world size) first",
            )
        return self._fixed_product()

    def coordinates(self, rank: int) -> dict[str, int]:
        """Return dimension name -> coordinate of ``rank``, for every dimension.

        Raises:
            WorldError: the rank is outside the layout, or a degree is still open.
        """
        if not 0 <= rank < self.size():
            raise WorldError(f"layout: rank {rank} is outside of {self.size()} ranks")
        places: dict[str, int] = {}
        for name, degree in reversed(self.degrees().items()):
            rank, places[DIMENSIONS[name]] = divmod(rank, degree)
        return {dimension: places[dimension] for dimension in DIMENSIONS.values()}

    def _fixed_product(self) -> int:
        return math.prod(degree for degree in self.degrees().values() if degree > 0)

    def _open_degrees(self) -> list[str]:
        return [item.name for item in fields(self) if getattr(self, item.name) == -1]


def mesh_data_shard(mesh: DeviceMesh) -> tuple[int, int]:
    """Return the number of data shards of a mesh, and the index of the one that this process reads.

    Raises:
        WorldError: its dimensions have no names.
    """
    if mesh.mesh_dim_names is None:
        raise WorldError(
            "the dimensions of the device mesh have no names, so nothing says which ranks read the same data",
            fix="give it names: init_device_mesh(..., mesh_dim_names=('dp_shard', 'tp'))",
        )
    count, index = 1, 0
    places = mesh.get_coordinate() or [0] * mesh.ndim
    for name, size, place in zip(mesh.mesh_dim_names, mesh.shape, places, strict=True):
        if name in _DATA_NAMES:
            count, index = count * size, index * size + place
        elif size > 1 and name not in DIMENSIONS.values():
            warn_user(
                f"the ranks along {name!r} of the device mesh read the same data; where they train copies or "
                "shards of the model, call the dimension dp_replicate or dp_shard"
            )
    return count, index
