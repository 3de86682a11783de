"""``ParallelismConfig``: sizes, names, meshes and errors; and plans of names for tensor parallelism."""

from __future__ import annotations

import pickle
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest
from torch import nn

from accelerate import Accelerator, ParallelismConfig
from accelerate.core.errors import PrepareError, SettingError, UnknownNameError, WorldError
from accelerate.strategy.parallelism.tensor.tp_plan import resolve_plan
from tests.support.parity import INNER, PLAN, decoder


@contextmanager
def world(size: int, rank: int = 0) -> Iterator[None]:
    """A process group that only pretends."""
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", rank=rank, world_size=size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


def test_sizes_are_one_and_can_be_changed() -> None:
    """transformers assigns them after construction."""
    config = ParallelismConfig()
    assert (config.total_size, config._get_mesh()) == (1, ((), ()))
    assert config.active_mesh_dims == config.dp_dim_names == config.non_dp_dim_names == []
    config.tp_size, config.dp_shard_size = 2, 4
    assert (config.total_size, config.data_parallel_size, config.non_data_parallel_size) == (8, 4, 2)
    assert config._get_mesh() == (("dp_shard", "tp"), (4, 2))
    assert config.tp_enabled
    config._set_size("cp", 2)
    assert config.dp_shard_cp_dim_names == ["dp_shard", "cp"]
    with pytest.raises(UnknownNameError):
        config._set_size("ep", 2)


def test_programs_add_dimensions_of_their_own() -> None:
    """axolotl adds its expert parallel dimension to the sizes, and reads them in its own ``_get_mesh``."""
    config = ParallelismConfig(tp_size=2)
    config._sizes["ep"] = 2
    config.tp_size = 4
    assert [*config._sizes] == ["dp_replicate", "dp_shard", "tp", "cp", "sp", "pp", "ep"]
    assert (config._sizes["tp"], config._sizes["ep"]) == (4, 2)
    assert config._get_mesh() == (("tp",), (4,))
    config._set_size("ep", 3)
    assert pickle.loads(pickle.dumps(config))._sizes["ep"] == config._sizes["ep"] == 3
    config._sizes = {"dp_shard": 1, "ep": 2}
    assert config._sizes == {"dp_shard": 1, "ep": 3}


def test_configs_that_1_x_has_pickled_are_read() -> None:
    config = ParallelismConfig.__new__(ParallelismConfig)
    names = ("dp_replicate", "dp_shard", "tp", "cp", "sp")
    vars(config).update({f"{name}_size": 2 for name in names}, _sizes=dict.fromkeys(names, 2))
    assert (config.total_size, config.pp_enabled) == (32, False)


@pytest.mark.parametrize(
    ("sizes", "names", "shape"),
    [
        ({"dp_replicate_size": 8}, ("dp_replicate",), (8,)),
        ({"dp_replicate_size": 2, "dp_shard_size": 4}, ("dp_replicate", "dp_shard"), (2, 4)),
        ({"dp_replicate_size": 4, "tp_size": 2}, ("dp_replicate", "tp"), (4, 2)),
        ({"dp_shard_size": 2, "cp_size": 2, "tp_size": 2}, ("dp_shard", "cp", "tp"), (2, 2, 2)),
        (
            {"dp_replicate_size": 2, "dp_shard_size": 2, "sp_size": 2},
            ("dp_replicate", "dp_shard", "sp"),
            (2, 2, 2),
        ),
        ({"pp_size": 2, "dp_shard_size": 2, "tp_size": 2}, ("pp", "dp_shard", "tp"), (2, 2, 2)),
        ({"tp_size": 8}, ("tp",), (8,)),
    ],
)
def test_a_mesh_of_any_sizes(sizes: dict[str, int], names: tuple[str, ...], shape: tuple[int, ...]) -> None:
    config = ParallelismConfig(**sizes)  # type: ignore[arg-type]
    with world(8, 5), warnings.catch_warnings():
        warnings.simplefilter("error")
        mesh = config.build_device_mesh("cpu")
        assert mesh is not None
        assert mesh is config.get_device_mesh()
        assert (mesh.mesh_dim_names, tuple(mesh.mesh.shape)) == (names, shape)
        assert all(mesh[name].size() == size for name, size in zip(names, shape, strict=True))
        plane = config.plane("cpu")
        assert config.plane("cpu") is plane
        assert plane.mesh.numel() == 8
        shard = next(name for name in plane.mesh_dim_names or () if name.startswith("dp_shard"))
        copies = ["dp_replicate"] if config.dp_replicate_enabled else []
        sharing = plane[(*copies, shard)]
        assert sharing.size(-1) == config.shards
        # Neighbours on a dimension are the same ranks in both.
        if config.tp_enabled:
            assert plane["tp"].mesh.tolist() == mesh["tp"].mesh.tolist()


def test_clients_find_the_dimensions_that_sharding_takes() -> None:
    config = ParallelismConfig(dp_replicate_size=2, dp_shard_size=2, cp_size=2)
    with world(8), warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        mesh = config.build_device_mesh("cpu")
        assert mesh is not None
        assert tuple(mesh[tuple(config.fsdp_dim_names)].mesh.shape) == (2, 4)
        assert mesh["dp_cp"].size() == 8
        assert mesh["dp"].size() == 4


def test_a_config_is_good_for_another_world() -> None:
    config = ParallelismConfig(tp_size=2)
    with world(2, 1):
        config.build_device_mesh("cpu")
        # Libraries write it into a file, with their own arguments.
        copied = pickle.loads(pickle.dumps(config))
        assert (copied, copied.device_mesh) == (config, None)
    with world(2, 0):
        mesh = config.get_device_mesh("cpu")
        assert mesh is not None
        assert mesh.get_local_rank("tp") == 0


def test_sizes_that_do_not_make_up_the_world_are_said_in_the_users_words() -> None:
    config = ParallelismConfig(dp_shard_size=2, tp_size=2)
    with world(6), pytest.raises(WorldError) as error:
        config.build_device_mesh("cpu")
    said = str(error.value)
    assert "dp_shard_size=2 x tp_size=2 = 4" in said
    assert "world size 6" in said
    assert "start 4 processes" in said
    assert "tp_size=3" in said or "dp_shard_size=3" in said


def test_a_mesh_that_needs_more_processes_never_trains_in_another_way(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """F3: what the launcher says holds; without sizes one process is no mesh, and that is said."""
    monkeypatch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
    with pytest.warns(UserWarning, match="one process is no mesh"):
        Accelerator().prepare(nn.Linear(1, 1))
    monkeypatch.setenv("PARALLELISM_CONFIG_TP_SIZE", "2")
    with pytest.raises(WorldError, match="tp_size=2 does not equal the world size 1"):
        Accelerator()


@pytest.mark.parametrize("wrong", [0, -1, 1.5, True, "two"])
def test_what_is_no_size_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError, match="tp_size"):
        ParallelismConfig(tp_size=wrong)


def test_two_ways_to_share_sequences_exclude_each_other() -> None:
    with pytest.raises(ValueError, match="cp_size=2 and sp_size=2"):
        ParallelismConfig(cp_size=2, sp_size=2)


# --- plans of names


def names(model: nn.Module, given: dict[str, Any], size: int = 2) -> list[str]:
    return [part.name for part in resolve_plan(model, given, size).modules]


def test_a_plan_names_modules() -> None:
    model = decoder()
    found = resolve_plan(model, PLAN, 2)
    assert len(found.modules) == 4 * 6
    assert names(model, {"*.up": "colwise", "*.down": "rowwise", "layers.0.*": "replicate"}) == [
        f"layers.{n}.{kind}" for kind in ("up", "down") for n in range(1, 4)
    ]


@pytest.mark.parametrize(
    ("plan", "error", "texts"),
    [
        ({"*.q_prj": "colwise"}, SettingError, ["'*.q_prj' matches no module", "layers.0.attention.q_proj"]),
        ({}, PrepareError, ["has no plan", "TorchTensorParallelConfig(plan="]),
        ({"*.up": "colwize"}, UnknownNameError, ["colwise"]),
        ({"*.up": 3}, SettingError, ["layers.0.up is a int"]),
        ({"layers.0": "colwise"}, PrepareError, ["layers.0 is a Block"]),
        (
            {"embed": "rowwise"},
            PrepareError,
            ["embed.weight and head.weight are one parameter", "'replicate'"],
        ),
        (
            {"embed": "rowwise", "head": "rowwise"},
            PrepareError,
            ["head.weight", "are one parameter", "'colwise_rep'"],
        ),
    ],
)
def test_what_a_plan_cannot_say(plan: dict[str, Any], error: type[Exception], texts: list[str]) -> None:
    """Tied embeddings, wrong names, wrong styles."""
    with pytest.raises(error) as caught:
        resolve_plan(decoder(), plan, 2)
    for text in texts:
        assert text in str(caught.value), caught.value


def test_tied_weights_that_are_cut_alike() -> None:
    assert names(decoder(), {"embed": "rowwise", "head": "colwise_rep"}) == ["embed", "head"]


def test_a_size_that_does_not_divide() -> None:
    with pytest.raises(PrepareError) as caught:
        resolve_plan(decoder(), {"*.up": "colwise"}, 3)
    assert f"layers.0.up.weight ({INNER}, 16) cannot be sharded into 3 equal parts" in str(caught.value)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.num_attention_heads = 3
        self.q_proj = nn.Linear(12, 12)


def test_heads_stay_whole() -> None:
    with pytest.raises(PrepareError, match="num_attention_heads=3"):
        resolve_plan(nn.ModuleDict({"attn": Heads()}), {"attn.q_proj": "colwise"}, 2)


@pytest.mark.parametrize("style", ["colwise_rep", "colwise_gather_output"])
def test_heads_of_a_gathered_output_need_not_divide(style: str) -> None:
    """As the fused projection of Phi-3, which has 10 heads of keys."""
    assert names(nn.ModuleDict({"attn": Heads()}), {"attn.q_proj": style}) == ["attn.q_proj"]


class Owning(nn.Module):
    """Brings a plan along, as transformers' models do: ``*`` is a number there."""

    _tp_plan: ClassVar = {
        "layers.*.up": "colwise",
        "layers.*.down": "rowwise",
        "head": "colwise_rep",
        "none.*.x": "colwise",
    }

    def __init__(self, words: int = 8) -> None:
        super().__init__()
        block = {"up": nn.Linear(4, 8), "down": nn.Linear(8, 4)}
        self.layers = nn.ModuleList([nn.ModuleDict(block)])
        self.head = nn.Linear(4, words)


def test_a_model_brings_its_plan() -> None:
    assert names(Owning(), {}) == ["layers.0.up", "layers.0.down", "head"]
    # Inside of another model too; the user's own entries count.
    outer = nn.ModuleDict({"base": Owning()})
    assert names(outer, {"base.head": "replicate"}) == ["base.layers.0.up", "base.layers.0.down"]
    # Whole before and after: what cannot be cut can stay whole, and that is said.
    found = resolve_plan(Owning(words=7), {}, 2)
    assert [part.name for part in found.modules] == ["layers.0.up", "layers.0.down"]
    assert "head (tensor parallel: head.weight (7, 4)" in found.replicated[0]
    with pytest.raises(PrepareError, match="cannot be sharded"):
        resolve_plan(Owning(words=7), {"head": "colwise_rep"}, 2)


def test_a_name_of_the_plan_may_be_of_another_model() -> None:
    """A small model beside the one that the plan is of stays whole; a name that is of none is refused."""
    plan = {"*.up": "colwise", "*.down": "rowwise"}
    other = nn.Sequential(nn.Linear(8, 1))
    assert resolve_plan(other, plan, 2, set(plan)).modules == []
    with pytest.raises(SettingError, match="matches no module of the Sequential") as caught:
        resolve_plan(other, plan, 2, {"*.down"})
    assert "prepare both in one call, or that model first" in caught.value.fix
    found = resolve_plan(decoder(), {**plan, "0": "colwise"}, 2, {"0"}).modules
    assert [part.name for part in found][:1] == ["layers.0.up"]


def test_resolving_changes_nothing() -> None:
    model = decoder()
    before = dict(model.named_parameters())
    resolve_plan(model, PLAN, 2)
    assert all(model.get_parameter(name) is value for name, value in before.items())
    assert not any(part._forward_hooks or part._forward_pre_hooks for part in model.modules())
