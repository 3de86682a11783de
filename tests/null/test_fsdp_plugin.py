"""The plugin of sharded training: its fields, variables, and what it refuses."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import ModuleWrapPolicy, always_wrap_policy

from accelerate import FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.core.errors import SettingError, UnknownNameError
from accelerate.utils import fsdp_utils
from tests.support.launch_plans import request_of_file
from tests.support.sharded_models import Block, tiny
from tests.support.strategies import chosen, fsdp_statuses, fsdp_unit_names, unused


@pytest.fixture(autouse=True)
def no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    """The plugin may write one of them."""
    for name in ("FSDP_CPU_RAM_EFFICIENT_LOADING", "ACCELERATE_USE_FSDP"):
        monkeypatch.setenv(name, "false")
        monkeypatch.delenv(name)


def test_its_defaults(monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = FullyShardedDataParallelPlugin()
    assert (plugin.fsdp_version, plugin.reshard_after_forward) == (2, True)
    # As in 1.x, whose version is then 1: under it alone transformers' Trainer saves weights.
    assert "FULL_STATE_DICT" in str(plugin.state_dict_type)
    assert plugin.state_dict_config.rank0_only
    assert "SHARDED_STATE_DICT" in str(FullyShardedDataParallelPlugin(fsdp_version=2).state_dict_type)
    monkeypatch.setenv("FSDP_VERSION", "2")
    assert FullyShardedDataParallelPlugin().state_dict_type == StateDictType.SHARDED_STATE_DICT
    assert not isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    assert plugin.auto_wrap_policy is None
    assert plugin.activation_checkpointing is False
    assert plugin.mixed_precision_policy is None


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        ({"sharding_strategy": "SHARD_GRAD_OP"}, "reshard_after_forward", False),
        ({"sharding_strategy": 1}, "reshard_after_forward", True),
        ({"reshard_after_forward": "false"}, "reshard_after_forward", False),
        ({"state_dict_type": "full_state_dict"}, "state_dict_type", StateDictType.FULL_STATE_DICT),
        ({"cpu_offload": True}, "cpu_offload", CPUOffloadPolicy()),
        ({"cpu_offload": CPUOffload(offload_params=True)}, "cpu_offload", CPUOffloadPolicy()),
        ({"transformer_cls_names_to_wrap": "A, B"}, "transformer_cls_names_to_wrap", ["A", "B"]),
        (
            {"mixed_precision_policy": "bf16"},
            "mixed_precision_policy",
            MixedPrecisionPolicy(torch.bfloat16, torch.float32),
        ),
        (
            {"mixed_precision_policy": {"param_dtype": "fp16", "reduce_dtype": torch.float16}},
            "mixed_precision_policy",
            MixedPrecisionPolicy(torch.float16, torch.float16),
        ),
    ],
)
def test_what_its_fields_mean(options: dict[str, Any], name: str, value: Any) -> None:
    assert getattr(FullyShardedDataParallelPlugin(fsdp_version=2, **options), name) == value


@pytest.mark.parametrize(
    ("options", "version"),
    [
        ({"sharding_strategy": "FULL_SHARD"}, 1),
        ({"backward_prefetch": "NO_PREFETCH"}, 1),
        ({"use_orig_params": False}, 1),
        ({"sync_module_states": True}, 1),
        ({"forward_prefetch": False}, 1),
        ({"limit_all_gathers": False}, 1),
        ({"state_dict_type": "LOCAL_STATE_DICT"}, 1),
        ({"reshard_after_forward": "FULL_SHARD"}, 1),
        ({"cpu_offload": CPUOffload()}, 1),
        ({"mixed_precision_policy": MixedPrecision()}, 1),
        ({"mixed_precision_policy": {"buffer_dtype": "bf16"}}, 1),
        ({"state_dict_config": FullStateDictConfig()}, 1),
        ({"optim_state_dict_config": ShardedOptimStateDictConfig()}, 1),
        ({"fsdp_version": 2, "sharding_strategy": "FULL_SHARD"}, 2),
        ({"sharding_strategy": "FULL_SHARD", "reshard_after_forward": True}, 2),
        ({"sharding_strategy": "FULL_SHARD", "mixed_precision_policy": MixedPrecisionPolicy()}, 2),
        ({"use_orig_params": True, "cpu_offload": CPUOffloadPolicy()}, 2),
        ({"cpu_offload": True, "state_dict_type": "FULL_STATE_DICT", "auto_wrap_policy": "NO_WRAP"}, 2),
        ({"mixed_precision_policy": {"param_dtype": "bf16"}, "min_num_params": 4}, 2),
        ({"activation_checkpointing": True, "ignored_modules": "head", "replicate_size": 2}, 2),
    ],
)
def test_a_version_that_is_not_given_is_that_of_the_options(options: dict[str, Any], version: int) -> None:
    """Programs written for FSDP1, the version of 1.x, call functions that FSDP2 lacks."""
    assert FullyShardedDataParallelPlugin(**options).fsdp_version == version


def test_a_file_of_fsdp1_without_a_version_means_fsdp1(config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Older files have no version."""
    text = "distributed_type: FSDP\nfsdp_config: {fsdp_backward_prefetch: BACKWARD_PRE}\n"
    for name, told in config(text).script_variables().items():
        monkeypatch.setenv(name, told)
    assert FullyShardedDataParallelPlugin().fsdp_version == 1
    assert FullyShardedDataParallelPlugin(fsdp_version=2).fsdp_version == 2


def test_fields_that_are_not_given_take_their_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "false")
    monkeypatch.setenv("FSDP_STATE_DICT_TYPE", "FULL_STATE_DICT")
    monkeypatch.setenv("FSDP_TRANSFORMER_CLS_TO_WRAP", "A,B")
    monkeypatch.setenv("FSDP_OFFLOAD_PARAMS", "true")
    plugin = FullyShardedDataParallelPlugin(reshard_after_forward=True)
    assert plugin.reshard_after_forward is True
    assert FullyShardedDataParallelPlugin().reshard_after_forward is False
    assert plugin.transformer_cls_names_to_wrap == ["A", "B"]
    assert isinstance(plugin.cpu_offload, CPUOffloadPolicy)
    assert "FULL_STATE_DICT" in str(plugin.state_dict_type)


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"fsdp_version": 3}, UnknownNameError, "fsdp_version"),
        ({"sharding_strategy": "NO_SHARD"}, SettingError, "shards nothing"),
        ({"sharding_strategy": "FUL_SHARD"}, UnknownNameError, "did you mean 'FULL_SHARD'"),
        (
            {"sharding_strategy": "SHARD_GRAD_OP", "reshard_after_forward": True},
            SettingError,
            "keep reshard_after_forward",
        ),
        ({"reshard_after_forward": "FULL_SHARD"}, SettingError, "use true, as FULL_SHARD did"),
        ({"state_dict_type": "LOCAL_STATE_DICT"}, SettingError, "one of FSDP1"),
        ({"activation_checkpointing_offload": True}, SettingError, "without activation_checkpointing"),
        ({"auto_wrap_policy": "transformer_wrap"}, UnknownNameError, "TRANSFORMER_BASED_WRAP"),
        ({"mixed_precision_policy": {"parm_dtype": "bf16"}}, UnknownNameError, "did you mean 'param_dtype'"),
        ({"mixed_precision_policy": "bf17"}, UnknownNameError, "bf17"),
    ],
)
def test_what_it_refuses(options: dict[str, Any], error: type[Exception], words: str) -> None:
    with pytest.raises(error) as caught:
        FullyShardedDataParallelPlugin(**({"fsdp_version": 2} | options))
    assert words in str(caught.value)


# --- version 1


def test_the_defaults_of_fsdp1() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
    assert (plugin.sharding_strategy, plugin.reshard_after_forward) == (ShardingStrategy.FULL_SHARD, None)
    assert plugin.state_dict_type == StateDictType.FULL_STATE_DICT
    assert (plugin.use_orig_params, plugin.sync_module_states, plugin.forward_prefetch) == (True, True, False)
    assert plugin.backward_prefetch == BackwardPrefetch.BACKWARD_PRE
    assert plugin.cpu_offload == CPUOffload(offload_params=False)
    # Without an accelerator torch crashes while it moves whole values to the host.
    assert plugin.state_dict_config.offload_to_cpu is torch.accelerator.is_available()


@pytest.mark.parametrize("version", [1, 2])
def test_state_dict_configurations_of_torch_are_kept(version: int) -> None:
    """They say the type where nothing else does: programs give one of them alone."""
    full = FullStateDictConfig(rank0_only=False)
    sharded = ShardedOptimStateDictConfig(offload_to_cpu=False)
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, state_dict_config=full)
    assert (plugin.state_dict_type, plugin.state_dict_config) == (StateDictType.FULL_STATE_DICT, full)
    assert plugin.optim_state_dict_config.rank0_only
    plugin.set_state_dict_type("SHARDED_STATE_DICT")
    assert type(plugin.state_dict_config) is ShardedStateDictConfig
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, optim_state_dict_config=sharded)
    assert (plugin.state_dict_type, plugin.optim_state_dict_config) == (
        StateDictType.SHARDED_STATE_DICT,
        sharded,
    )
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version, state_dict_type="SHARDED_STATE_DICT", state_dict_config=full
    )
    assert type(plugin.state_dict_config) is ShardedStateDictConfig
    # FSDP1 of torch crashes where it moves to the host what is there.
    offloaded = FullyShardedDataParallelPlugin(
        fsdp_version=version, state_dict_config=FullStateDictConfig(offload_to_cpu=True)
    )
    expected = version == 2 or torch.accelerator.is_available()
    assert offloaded.state_dict_config.offload_to_cpu is expected


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        ({"sharding_strategy": "shard_grad_op"}, "sharding_strategy", ShardingStrategy.SHARD_GRAD_OP),
        ({"sharding_strategy": 5}, "sharding_strategy", ShardingStrategy._HYBRID_SHARD_ZERO2),
        ({"sharding_strategy": ShardingStrategy.NO_SHARD}, "sharding_strategy", ShardingStrategy.NO_SHARD),
        ({"sharding_strategy": "_HYBRID_SHARD_ZERO2"}, "hybrid", True),
        ({"reshard_after_forward": "SHARD_GRAD_OP"}, "sharding_strategy", ShardingStrategy.SHARD_GRAD_OP),
        ({"backward_prefetch": "NO_PREFETCH"}, "backward_prefetch", None),
        ({"backward_prefetch": 2}, "backward_prefetch", BackwardPrefetch.BACKWARD_POST),
        ({"cpu_offload": CPUOffloadPolicy()}, "cpu_offload", CPUOffload(offload_params=True)),
        ({"state_dict_type": "LOCAL_STATE_DICT"}, "state_dict_type", StateDictType.LOCAL_STATE_DICT),
        (
            {"mixed_precision_policy": "bf16"},
            "mixed_precision_policy",
            MixedPrecision(torch.bfloat16, torch.float32),
        ),
        (
            {"mixed_precision_policy": {"param_dtype": "fp16", "buffer_dtype": "fp16"}},
            "mixed_precision_policy",
            MixedPrecision(torch.float16, buffer_dtype=torch.float16),
        ),
        (
            {"mixed_precision_policy": MixedPrecisionPolicy(torch.bfloat16)},
            "mixed_precision_policy",
            MixedPrecision(torch.bfloat16, cast_forward_inputs=True),
        ),
    ],
)
def test_what_fields_mean_in_fsdp1(options: dict[str, Any], name: str, value: Any) -> None:
    assert getattr(FullyShardedDataParallelPlugin(fsdp_version=1, **options), name) == value


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"reshard_after_forward": True}, "reshard_after_forward (the argument"),
        ({"activation_checkpointing_offload": True}, "is an option of FSDP2, and fsdp_version is 1"),
        ({"mixed_precision_policy": MixedPrecisionPolicy(output_dtype=torch.float32)}, "output_dtype"),
        (
            {"cpu_ram_efficient_loading": True, "sync_module_states": False},
            "only rank 0 has read the weights",
        ),
        ({"sharding_strategy": "FUL_SHARD"}, "did you mean 'FULL_SHARD'"),
        ({"backward_prefetch": "BEFORE"}, "BACKWARD_PRE"),
        ({"replicate_size": 2}, "replicate_size"),
    ],
)
def test_what_fsdp1_refuses(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError) as caught:
        FullyShardedDataParallelPlugin(fsdp_version=1, **options)
    assert words in str(caught.value)


def test_what_launchers_always_write_is_no_contradiction(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher of 1.x writes the default of both options."""
    monkeypatch.setenv("FSDP_VERSION", "1")
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", "true")
    monkeypatch.setenv("FSDP_SHARDING_STRATEGY", "SHARD_GRAD_OP")
    assert FullyShardedDataParallelPlugin().sharding_strategy == ShardingStrategy.SHARD_GRAD_OP
    monkeypatch.delenv("FSDP_SHARDING_STRATEGY")
    assert FullyShardedDataParallelPlugin().sharding_strategy == ShardingStrategy.FULL_SHARD


@pytest.mark.parametrize(
    ("value", "strategy", "reshards", "hybrid"),
    [
        ("true", "FULL_SHARD", True, False),
        ("false", "SHARD_GRAD_OP", False, False),
        ("FULL_SHARD", "FULL_SHARD", True, False),
        ("shard_grad_op", "SHARD_GRAD_OP", False, False),
        ("HYBRID_SHARD", "HYBRID_SHARD", True, True),
        ("HYBRID_SHARD_ZERO2", "HYBRID_SHARD_ZERO2", False, True),
    ],
)
def test_each_version_reads_the_words_of_the_other_in_files(
    config: Any, monkeypatch: pytest.MonkeyPatch, value: str, strategy: str, reshards: bool, hybrid: bool
) -> None:
    """As ``accelerate to-fsdp2`` maps them."""
    text = f"distributed_type: FSDP\nfsdp_config: {{fsdp_reshard_after_forward: {value}}}\n"
    for name, told in config(text).script_variables().items():
        monkeypatch.setenv(name, told)
    old, new = (FullyShardedDataParallelPlugin(fsdp_version=version) for version in (1, 2))
    assert old.sharding_strategy.name.lstrip("_") == strategy
    assert (new.reshard_after_forward, new.hybrid, old.hybrid) == (reshards, hybrid, hybrid)


@pytest.mark.parametrize(("value", "words"), [("NO_SHARD", "shards nothing"), ("FUL_SHARD", "'FULL_SHARD'")])
def test_what_a_file_cannot_say_of_resharding(
    monkeypatch: pytest.MonkeyPatch, value: str, words: str
) -> None:
    monkeypatch.setenv("FSDP_RESHARD_AFTER_FORWARD", value)
    with pytest.raises(SettingError, match="reshard_after_forward") as caught:
        FullyShardedDataParallelPlugin(fsdp_version=2)
    assert words in str(caught.value)


@pytest.mark.parametrize("version", [1, 2])
def test_hsdp_replicas(version: int) -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=version, sharding_strategy="HYBRID_SHARD")
    assert [plugin.replicate_count(8, nodes) for nodes in (1, 2, 4)] == [1, 2, 4]
    with pytest.raises(SettingError, match="as many processes as any other"):
        plugin.replicate_count(6, 4)
    if version == 1:  # torch reduces no gradients then, and the copies drift apart
        with pytest.raises(SettingError, match="shards nothing"):
            plugin.replicate_count(8, 8)
    options: dict[str, Any] = {"fsdp_version": version, "sharding_strategy": "HYBRID_SHARD"}
    assert FullyShardedDataParallelPlugin(**options, replicate_size=2).replicate_count(8, 1) == 2
    assert FullyShardedDataParallelPlugin(fsdp_version=version).replicate_count(8, 4) == 1


def test_replicas_in_disguise_are_refused() -> None:
    """Torch reduces no gradients where each process has a copy by itself: they would drift apart."""
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, sharding_strategy="HYBRID_SHARD")
    with pytest.raises(SettingError, match="leave FSDP out to train by DDP"):
        chosen(4, plugin, nodes=4)
    strategy = chosen(4, plugin, nodes=2)
    assert (strategy.name, strategy.distributed_type(strategy.world)) == ("fsdp1", "FSDP")


def test_a_mesh_needs_fsdp2() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
    layout = ParallelismConfig(dp_shard_size=4)
    with pytest.raises(SettingError, match="parallelism_config needs FSDP2"):
        chosen(4, plugin, parallelism=layout)


def test_the_methods_in_fsdp1() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1)
    plugin.set_mixed_precision("bf16", buffer_autocast=True)
    assert plugin.mixed_precision_policy == MixedPrecision(
        torch.bfloat16, torch.float32, buffer_dtype=torch.bfloat16
    )
    plugin.set_mixed_precision("no", override=True)
    assert plugin.mixed_precision_policy == MixedPrecision()
    plugin.cpu_offload = True
    with pytest.raises(SettingError, match="an object CPUOffload"):
        plugin.validate_cpu_offload()
    plugin.set_cpu_offload()
    assert plugin.offloads_params
    plugin.set_state_dict_type("LOCAL_STATE_DICT")
    assert type(plugin.state_dict_config).__name__ == "LocalStateDictConfig"


def test_options_of_fsdp1_that_mean_nothing_are_said() -> None:
    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, use_orig_params=False, limit_all_gathers=False)
    said = [effect for effect in fsdp_statuses(plugin) if effect.is_failure]
    assert sorted(effect.option for effect in said) == ["fsdp_use_orig_params", "limit_all_gathers"]
    assert all("FSDP1" in effect.why for effect in said)
    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=2, backward_prefetch="BACKWARD_PRE", use_orig_params=True, sync_module_states=True
    )
    assert not [effect for effect in fsdp_statuses(plugin) if effect.not_applied]


def test_it_has_the_policy_of_the_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """trl shards a reference model by it: with another the two models differ from the start."""
    models = {"model": [tiny()], "optimizer": [], "other": []}
    bundle: Any = SimpleNamespace(objects_of=models.__getitem__, training=True)
    for version, kind in ((1, MixedPrecision), (2, MixedPrecisionPolicy)):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
        strategy = chosen(2, plugin, precision="bf16")
        policy = plugin.mixed_precision_policy
        assert strategy.plugins["fsdp_plugin"] is plugin
        assert policy == kind(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        copied = copy.deepcopy(plugin)
        for each in (plugin, copied):  # another Accelerator's
            chosen(2, each, precision="fp16")
            assert each.mixed_precision_policy.param_dtype == torch.float16
            chosen(2, each, precision="fp8", autocast_format="bf16")
            assert each.mixed_precision_policy == policy
            chosen(2, each)
            assert each.mixed_precision_policy is None
        # The first one shards after that by its own.
        assert [step.name for step in strategy.prepare_steps(bundle)] == ["shard"]
        assert plugin.mixed_precision_policy == policy
        plugin.set_mixed_precision("fp16", override=True)
        given = plugin.mixed_precision_policy
        chosen(2, plugin, precision="bf16")
        assert plugin.mixed_precision_policy is given
        chosen(2, plugin)
        assert plugin.mixed_precision_policy is given
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert chosen(2, precision="bf16").plugins["fsdp_plugin"].mixed_precision_policy == policy


@pytest.mark.parametrize("version", [1, 2])
def test_weights_become_float32_by_the_precision_alone(version: int) -> None:
    """A policy beside ``mixed_precision="no"`` keeps half precision, in half the memory, as in 1.x."""
    model = tiny().bfloat16().requires_grad_()
    bundle: Any = SimpleNamespace(
        objects_of={"model": [model], "optimizer": [], "other": []}.__getitem__, training=True
    )
    sizes: dict[str, int] = {}
    for precision in ("no", "bf16"):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=version, mixed_precision_policy="bf16")
        (step,) = chosen(2, plugin, precision=precision).prepare_steps(bundle)
        assert step.memory is not None
        sizes[precision] = step.memory()[1] - model.scale.nbytes
    assert sizes["bf16"] == 2 * sizes["no"] > 0


@pytest.mark.parametrize(
    ("version", "policy", "offload"),
    [
        (2, MixedPrecision(torch.bfloat16, torch.float32), CPUOffload(offload_params=True)),
        (1, MixedPrecisionPolicy(torch.bfloat16, torch.float32), True),
    ],
)
def test_objects_of_the_other_version_may_be_assigned(version: int, policy: Any, offload: Any) -> None:
    """After the plugin is made: programs do so where the user has set the version."""
    bundle: Any = SimpleNamespace(
        objects_of={"model": [tiny()], "optimizer": [], "other": []}.__getitem__, training=True
    )
    assigned = FullyShardedDataParallelPlugin(fsdp_version=version)
    made = FullyShardedDataParallelPlugin(
        fsdp_version=version, mixed_precision_policy=policy, cpu_offload=offload
    )
    assigned.mixed_precision_policy, assigned.cpu_offload = policy, offload
    list(chosen(2, assigned).prepare_steps(bundle))
    assert assigned.offloads_params
    for name in ("mixed_precision_policy", "cpu_offload"):
        assert getattr(assigned, name) == getattr(made, name)
        assert type(getattr(assigned, name)) is type(getattr(made, name))


def test_its_methods() -> None:
    plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="TRANSFORMER_BASED_WRAP")
    plugin.set_mixed_precision("fp16")
    plugin.set_mixed_precision("bf16")
    assert plugin.mixed_precision_policy == MixedPrecisionPolicy(torch.float16, torch.float32)
    plugin.set_mixed_precision(torch.bfloat16, override=True)
    assert plugin.mixed_precision_policy == MixedPrecisionPolicy(torch.bfloat16, torch.float32)
    plugin.set_state_dict_type("FULL_STATE_DICT")
    assert type(plugin.state_dict_config).__name__ == "FullStateDictConfig"
    plugin.set_auto_wrap_policy(tiny())
    assert plugin.auto_wrap_policy.keywords == {"transformer_layer_cls": {Block}}


def test_which_modules_are_gathered_by_themselves() -> None:
    model = tiny()

    def named(**options: Any) -> list[str]:
        plugin = FullyShardedDataParallelPlugin(**options)
        return fsdp_unit_names(model, plugin)

    layers = ["layers.0", "layers.1"]
    assert named() == named(auto_wrap_policy="no_wrap") == []
    assert named(auto_wrap_policy="transformer_based_wrap") == layers
    assert named(auto_wrap_policy=ModuleWrapPolicy({Block})) == layers
    assert named(auto_wrap_policy="size_based_wrap", min_num_params=200) == layers
    assert named(auto_wrap_policy="size_based_wrap", min_num_params=130)[:2] == [
        "layers.0.up",
        "layers.0.down",
    ]
    assert named(auto_wrap_policy="size_based_wrap") == [], (
        "without a number the model is one unit, as in 1.15"
    )
    # The embeddings are the output layer's too: they stay with the model as a whole.
    every = named(auto_wrap_policy=always_wrap_policy)
    assert {"layers.0.norm", "layers.0", "frozen"} <= set(every)
    assert not {"embed", "head", "layers", ""} & set(every)
    chosen = fsdp_utils.fsdp2_prepare_auto_wrap_policy(
        FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap"), model
    )
    assert chosen is not None
    assert [chosen(model.layers[0]), chosen(model.frozen)] == [True, False]


def test_the_text_of_the_module_shows_fsdp2() -> None:
    """unsloth reads the file, without importing torch, and takes one without these for an old version."""
    text = Path(fsdp_utils.__file__).read_text(encoding="utf-8")
    assert "def fsdp2_prepare_model" in text
    assert "def _prepare_sd_options" in text


def test_small_functions() -> None:
    assert fsdp_utils.fsdp2_canonicalize_names({"a._checkpoint_wrapped_module.b": 1, "_orig_mod.c": 2}) == {
        "a.b": 1,
        "c": 2,
    }
    model: Any = tiny()
    found = fsdp_utils.get_parameters_from_modules(r"layers\.0\.up", model, "cpu")
    assert found == set(model.layers[0].up.parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    new = nn.Parameter(torch.zeros(1))
    fsdp_utils.fsdp2_switch_optimizer_parameters(optimizer, {model.embed.weight.data_ptr(): new})
    assert optimizer.param_groups[0]["params"][0] is new


def test_weights_are_tied_again() -> None:
    with torch.device("meta"):
        model = tiny()

    def fill(module: nn.Module) -> None:
        module.to_empty(device="cpu", recurse=False)

    again = fsdp_utils.ensure_weights_retied(fill, model, "cpu")
    for module in model.modules():
        again(module)
    assert model.head.weight is model.embed.weight
    assert not model.head.weight.is_meta


# --- asked for


def test_who_asks_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """F3"""
    plugin = FullyShardedDataParallelPlugin()
    assert chosen(2, plugin).name == "fsdp"
    assert chosen(2).name == "ddp"
    alone = chosen(1, plugin)
    assert alone.name == "single"
    said = unused(alone)
    assert [(effect.option, effect.not_applied) for effect in said] == [("fsdp_plugin", True)]
    assert said[0].why.startswith("one process has nothing to shard")
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    assert chosen(2).name == "fsdp"
    monkeypatch.setenv("FSDP_VERSION", "1")
    assert chosen(2).name == "fsdp1"
    assert chosen(2, plugin).name == "fsdp"


@pytest.fixture
def config(tmp_path: Any) -> Any:
    def reads(text: str, **flags: Any) -> Any:
        file = tmp_path / "config.yaml"
        file.write_text(text)
        return request_of_file(file, **flags)

    return reads


TALK = """
compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config:
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: false
  fsdp_sharding_strategy: FULL_SHARD
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_use_orig_params: false
main_training_function: main
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""


def test_a_file_asks_for_it(config: Any) -> None:
    told = config(TALK).script_variables()
    assert told["ACCELERATE_USE_FSDP"] == "true"
    assert told["FSDP_AUTO_WRAP_POLICY"] == "TRANSFORMER_BASED_WRAP"
    assert told["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"
    assert told["FSDP_OFFLOAD_PARAMS"] == "false"
    assert "FSDP_VERSION" not in told


def test_code_wins_over_the_loading_that_the_launcher_turns_on(monkeypatch: pytest.MonkeyPatch) -> None:
    """``sync_module_states=False`` keeps what each rank has read, so libraries read it on each."""
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    plugin = FullyShardedDataParallelPlugin(fsdp_version=1, sync_module_states=False)
    assert not plugin.cpu_ram_efficient_loading
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "False"
    monkeypatch.setenv("FSDP_CPU_RAM_EFFICIENT_LOADING", "true")
    assert FullyShardedDataParallelPlugin(fsdp_version=1).cpu_ram_efficient_loading
    assert os.environ["FSDP_CPU_RAM_EFFICIENT_LOADING"] == "true"
    with pytest.raises(SettingError, match="cpu_ram_efficient_loading with sync_module_states=False"):
        FullyShardedDataParallelPlugin(
            fsdp_version=1, sync_module_states=False, cpu_ram_efficient_loading=True
        )


def test_flags_ask_for_it(config: Any) -> None:
    told = config(
        "{}", use_fsdp=True, fsdp_version="2", fsdp_reshard_after_forward="false"
    ).script_variables()
    assert (told["ACCELERATE_USE_FSDP"], told["FSDP_VERSION"]) == ("true", "2")
    assert told["FSDP_RESHARD_AFTER_FORWARD"] == "false"


@pytest.mark.parametrize(
    ("options", "least"),
    [
        ("fsdp_auto_wrap_policy: SIZE_BASED_WRAP", "100000000"),
        ("fsdp_auto_wrap_policy: size_based_wrap, fsdp_min_num_params: 2000", "2000"),
        ("fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP", None),
    ],
)
def test_units_by_size_have_a_least_size(config: Any, options: str, least: str | None) -> None:
    told = config(f"distributed_type: FSDP\nfsdp_config: {{{options}}}\n").script_variables()
    assert told.get("FSDP_MIN_NUM_PARAMS") == least


def test_options_that_nobody_asked_for_are_refused(config: Any) -> None:
    with pytest.raises(SettingError, match="--fsdp_offload_params is given, but --use_fsdp is not") as error:
        config("{}", fsdp_offload_params="true")
    assert "--use_fsdp" in str(error.value)
    (problem,) = config("fsdp_config: {version: 2}").file.problems
    assert "line 1: fsdp_config has no effect: nothing asks for it; to use it, add --use_fsdp" in problem
