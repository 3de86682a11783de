"""Degrees of parallelism as a mesh of named axes."""

from __future__ import annotations

import dataclasses
import itertools
import math
import subprocess
import sys
from collections.abc import Generator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from accelerate.core.errors import WorldError
from accelerate.world.mesh_layout import DIMENSIONS, MeshLayout

degrees = st.integers(1, 3)


def test_a_layout_is_a_plain_value_and_needs_no_torch() -> None:
    assert MeshLayout() == MeshLayout(1, 1, 1, 1, 1, 1)
    with pytest.raises(dataclasses.FrozenInstanceError):
        MeshLayout().tp = 2  # type: ignore[misc]
    script = "import sys, accelerate.world.mesh_layout; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


@pytest.mark.parametrize(
    ("layout", "size", "filled"),
    [
        (MeshLayout(), 1, MeshLayout()),
        (MeshLayout(replicate=-1), 8, MeshLayout(replicate=8)),
        (MeshLayout(shard=-1), 8, MeshLayout(shard=8)),
        (MeshLayout(replicate=2, shard=-1), 8, MeshLayout(replicate=2, shard=4)),
        (MeshLayout(shard=-1, tp=2, cp=2), 8, MeshLayout(shard=2, tp=2, cp=2)),
        (MeshLayout(shard=-1, tp=8), 8, MeshLayout(shard=1, tp=8)),
        (MeshLayout(pp=-1, tp=4), 8, MeshLayout(pp=2, tp=4)),
        (MeshLayout(shard=2, sp=4), 8, MeshLayout(shard=2, sp=4)),
    ],
)
def test_check_fills_the_open_degree(layout: MeshLayout, size: int, filled: MeshLayout) -> None:
    assert layout.check(size) == filled
    assert filled.check(size) is filled
    assert filled.size() == size


@pytest.mark.parametrize(
    ("layout", "size", "texts"),
    [
        (MeshLayout(shard=2, tp=3), 8, ["shard=2 x tp=3 = 6", "world size 8", "start 6 processes", "tp=4"]),
        (MeshLayout(shard=4), 8, ["shard=4 does not equal", "start 4 processes", "replicate=2"]),
        (MeshLayout(shard=-1, tp=3), 8, ["tp=3 does not divide", "start 9 processes", "tp=1"]),
        (MeshLayout(), 2, ["1 does not equal the world size 2", "start 1 processes", "replicate=2"]),
        (MeshLayout(tp=4, cp=4), 6, ["tp=4 x cp=4", "start 16 processes", "to 6"]),
    ],
)
def test_a_wrong_product_is_an_error_with_two_fixes(layout: MeshLayout, size: int, texts: list[str]) -> None:
    with pytest.raises(WorldError) as caught:
        layout.check(size)
    for text in texts:
        assert text.replace("tp=4 x cp=4", "cp=4 x tp=4") in str(caught.value)


@given(degrees, degrees, degrees, degrees, st.integers(1, 24), st.booleans())
def test_every_suggested_fix_is_accepted(
    shard: int, tp: int, cp: int, pp: int, size: int, fill: bool
) -> None:
    """The fix that the error suggests is accepted."""
    layout = MeshLayout(replicate=-1 if fill else 1, shard=shard, tp=tp, cp=cp, pp=pp)
    try:
        layout.check(size)
    except WorldError as error:
        processes = int(error.fix.split("start ")[1].split()[0])
        layout.check(processes)
        other = error.fix.split("or set ")[1].split()[0]
        if "=" in other:
            name, value = other.split("=")
            dataclasses.replace(layout, **{name: int(value)}).check(size)


@pytest.mark.parametrize("wrong", [{"tp": 0}, {"shard": -2}, {"tp": -1, "shard": -1}])
def test_what_is_no_degree_is_refused_at_once(wrong: dict[str, int]) -> None:
    with pytest.raises(WorldError) as caught:
        MeshLayout(**wrong)
    assert all(name in str(caught.value) for name in wrong)


def test_axes_are_those_with_more_than_one_rank_outermost_first() -> None:
    assert MeshLayout().axes() == ()
    assert MeshLayout(tp=2, shard=4, replicate=2).axes() == ("dp_replicate", "dp_shard", "tp")
    assert MeshLayout(2, 2, 2, 2, 2, 2).axes() == ("pp", "dp_replicate", "dp_shard", "cp", "sp", "tp")


def test_neighbouring_ranks_meet_in_the_innermost_axis() -> None:
    layout = MeshLayout(shard=2, tp=2)
    assert [layout.coordinates(rank) for rank in range(4)] == [
        {"pp": 0, "dp_replicate": 0, "dp_shard": shard, "cp": 0, "sp": 0, "tp": tp}
        for shard, tp in itertools.product(range(2), range(2))
    ]


@given(degrees, degrees, degrees, degrees, degrees, degrees)
def test_coordinates_are_one_place_per_rank(
    replicate: int, shard: int, tp: int, cp: int, sp: int, pp: int
) -> None:
    layout = MeshLayout(replicate, shard, tp, cp, sp, pp)
    places = [tuple(layout.coordinates(rank).values()) for rank in range(layout.size())]
    assert places == sorted(set(places))
    assert len(places) == math.prod((replicate, shard, tp, cp, sp, pp))


def test_an_open_layout_has_no_size_yet() -> None:
    for ask in (MeshLayout(shard=-1).size, lambda: MeshLayout(shard=-1).coordinates(0)):
        with pytest.raises(WorldError, match="not filled yet"):
            ask()
    with pytest.raises(WorldError, match="outside"):
        MeshLayout(shard=2).coordinates(2)


@pytest.fixture
def world_of_8() -> Generator[None]:
    """A process group that only pretends: enough to build a mesh, on one process."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=5, world_size=8, store=FakeStore())
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("world_of_8")
def test_a_mesh_of_its_dimensions_has_the_same_coordinates() -> None:
    from torch.distributed.device_mesh import init_device_mesh

    layout = MeshLayout(replicate=2, shard=-1, tp=2).check(8)
    names = layout.axes()
    assert names == ("dp_replicate", "dp_shard", "tp")
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=names)
    here = layout.coordinates(5)
    assert {name: mesh.get_local_rank(name) for name in names} == {name: here[name] for name in names}


def test_a_layout_with_an_open_degree_has_no_size() -> None:
    with pytest.raises(WorldError, match="not filled"):
        MeshLayout(shard=-1).size()


def test_dimensions_are_the_contracts() -> None:
    assert set(DIMENSIONS.values()) == {"dp_replicate", "dp_shard", "tp", "cp", "sp", "pp"}
    assert set(DIMENSIONS) == {item.name for item in dataclasses.fields(MeshLayout)}
