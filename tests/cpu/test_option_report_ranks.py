"""Effects on several processes: groups, replicas, shards, shared data; one process's finding (F15)."""

from __future__ import annotations

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset

from tests.support.command import launch, launch_variables
from tests.support.ignored_options import ignore_replica_options, ignore_sharding_option
from tests.support.long_run import long_run_param
from tests.support.ranks import NO_LAUNCHER, RanksError, RankServer, same_on_all
from tests.support.scripts import run_to_exit
from tests.support.sharded_models import adamw, tiny

Said = dict[str, tuple[bool | None, str]]


def said(accelerator: Any) -> Said:
    return {effect.option: (effect.applied, effect.why) for effect in accelerator.effects()}


def prepared(accelerator: Any, *objects: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return accelerator.prepare(*objects)


# ---------------------------------------------------------------- the group


def group(opened_by: str) -> Said:
    from accelerate import Accelerator, PartialState
    from accelerate.utils import InitProcessGroupKwargs

    asked = InitProcessGroupKwargs(timeout=timedelta(seconds=77), backend="gloo")
    if opened_by == "a state":
        PartialState()
    elif opened_by == "the user":
        torch.distributed.init_process_group("gloo", timeout=timedelta(seconds=50))
    return said(Accelerator(kwargs_handlers=[asked]))


@pytest.mark.parametrize(
    ("opened_by", "applied", "why"),
    [("us", True, ""), ("a state", False, "0:30:00"), ("the user", False, "0:00:50")],
)
def test_the_timeout_is_that_of_the_group(ranks: RankServer, opened_by: str, applied: bool, why: str) -> None:
    """F15"""
    found = same_on_all(ranks(2, group, opened_by))
    words = f"the group of processes has {why}; it was open already" if why else ""
    assert found == {"backend": (True, ""), "timeout": (applied, words)}


# ---------------------------------------------------------------- replicas

REPLICAS: dict[str, Any] = {
    "bucket_cap_mb": 0.1,
    "gradient_as_bucket_view": True,
    "find_unused_parameters": True,
    "comm_hook": "fp16",
    "comm_wrapper": "bf16",
}


def replicas(ignored: bool, options: dict[str, Any] = REPLICAS) -> tuple[Said, Said]:
    from accelerate import Accelerator
    from accelerate.utils import DistributedDataParallelKwargs

    accelerator = Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(**options)])
    before = said(accelerator)
    with pytest.MonkeyPatch.context() as patch:
        if ignored:
            ignore_replica_options(patch)
        prepared(accelerator, nn.Linear(2, 2))
    return before, said(accelerator)


def test_options_of_replicas_are_read_back(ranks: RankServer) -> None:
    before, after = same_on_all(ranks(2, replicas, False))
    assert set(before.values()) == {(None, "no model that trains is prepared")}
    assert after == dict.fromkeys(REPLICAS, (True, ""))
    _, after = same_on_all(ranks(2, replicas, False, {"bucket_cap_mb": None}))
    assert after == {"bucket_cap_mb": (True, "")}
    rank = {"comm_state_option": {"matrix_approximation_rank": 2}}
    _, after = same_on_all(ranks(2, replicas, False, {"comm_hook": "fp16", **rank}))
    why = "there is no comm_hook of the PowerSGD family that it could belong to"
    assert after == {"comm_hook": (True, ""), "comm_state_option": (False, why)}
    _, after = same_on_all(ranks(2, replicas, True))
    assert after == {
        "bucket_cap_mb": (False, "the reducer has 25"),
        "gradient_as_bucket_view": (False, "the reducer has 0"),
        "find_unused_parameters": (False, "the reducer has 0"),
        "comm_hook": (False, "no communication hook is registered"),
        "comm_wrapper": (False, "there is no comm_hook that it could belong to"),
    }


# ---------------------------------------------------------------- shards

SHARDS: dict[str, Any] = {
    "auto_wrap_policy": "transformer_based_wrap",
    "cpu_offload": True,
    "activation_checkpointing": True,
    "reshard_after_forward": False,
}


def shards(options: dict[str, Any], impossible: str) -> Said:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(**options)
    accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision="bf16")
    model = tiny()
    with pytest.MonkeyPatch.context() as patch:
        if impossible:
            ignore_sharding_option(patch, impossible)
        prepared(accelerator, model, adamw(model))
    return said(accelerator)


def test_options_of_sharding_are_seen_on_the_shards(ranks: RankServer) -> None:
    found = same_on_all(ranks(2, shards, SHARDS, ""))
    assert all(applied for applied, _ in found.values()), found
    assert found["fsdp_auto_wrap_policy"][1].endswith("FSDP units")
    assert {"mixed_precision", "fsdp_offload_params", "fsdp_activation_checkpointing"} <= found.keys()
    count, whole = found["fsdp_offload_params"][1].split()[:3:2]
    assert count == whole


def test_the_format_and_the_switch_of_the_first_version_are_seen_too(ranks: RankServer) -> None:
    """Autocast is on the user's model, inside of torch's wrapper, and one plug-in asks for either version."""
    found = same_on_all(ranks(2, shards, {"fsdp_version": 1}, ""))
    assert found["mixed_precision"] == (True, "")
    assert all(applied for applied, _ in found.values()), found


def meshed() -> Said:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2, reshard_after_forward=False)
    accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=ParallelismConfig(dp_shard_size=2))
    model = tiny()
    prepared(accelerator, model, adamw(model))
    return said(accelerator)


def mesh_type(by_plugin: bool) -> str:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, ParallelismConfig

    plugin = FullyShardedDataParallelPlugin(fsdp_version=2) if by_plugin else None
    accelerator = Accelerator(fsdp_plugin=plugin, parallelism_config=ParallelismConfig(dp_shard_size=2))
    return str(accelerator.distributed_type.value)


def test_a_mesh_is_of_the_type_fsdp_where_somebody_asks_for_fsdp(ranks: RankServer) -> None:
    assert same_on_all(ranks(2, mesh_type, True)) == "FSDP"
    assert same_on_all(ranks(2, mesh_type, False)) == "MULTI_CPU"
    assert same_on_all(ranks(2, mesh_type, False, env={"ACCELERATE_USE_FSDP": "true"})) == "FSDP"


def test_a_mesh_takes_the_plugin_of_sharding(ranks: RankServer) -> None:
    found = same_on_all(ranks(2, meshed))
    assert all(applied for applied, _ in found.values()), found
    assert {"dp_shard_size", "fsdp_reshard_after_forward"} <= found.keys()


@pytest.mark.parametrize(
    ("impossible", "option", "why"),
    [
        ("offload", "fsdp_offload_params", "parameters are on the host"),
        ("recompute", "fsdp_activation_checkpointing", "no module of the model has activation checkpointing"),
        ("keep", "fsdp_reshard_after_forward", "units free unsharded parameters after the forward"),
    ],
)
def test_sharding_whose_options_are_impossible(
    ranks: RankServer, impossible: str, option: str, why: str
) -> None:
    """F15"""
    found = same_on_all(ranks(2, shards, SHARDS, impossible))
    assert [name for name, (applied, _) in found.items() if not applied] == [option]
    assert why in found[option][1]


# ---------------------------------------------------------------- data


class Stream(IterableDataset[torch.Tensor]):
    """Eight samples."""

    def __iter__(self) -> Any:
        return iter(torch.arange(8.0).reshape(8, 1))


def shared(options: dict[str, Any], stream: bool) -> Said:
    from accelerate import Accelerator, DataLoaderConfiguration

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(**options), rng_types=["torch"])
    prepared(accelerator, DataLoader(Stream() if stream else torch.randn(8, 1), batch_size=2))  # type: ignore[arg-type]
    return said(accelerator)


@pytest.mark.parametrize("stream", [False, True], ids=["map", "stream"])
@pytest.mark.parametrize(
    "options",
    [
        {"split_batches": True, "even_batches": False, "dispatch_batches": False},
        {"dispatch_batches": True, "even_batches": False},
        {"split_batches": True, "dispatch_batches": True},
    ],
    ids=["shared out", "dispatched", "dispatched in parts"],
)
def test_options_of_shared_data_are_seen_on_loaders(
    ranks: RankServer, options: dict[str, Any], stream: bool
) -> None:
    found = same_on_all(ranks(2, shared, options, stream))
    assert found == dict.fromkeys([*options, "rng_types"], (True, ""))


# ---------------------------------------------------------------- one process only


class Net(nn.Module):
    """One layer in a class of the user's own."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(2, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(x)


def lame(strict: bool) -> list[str]:
    """Rank 1 cannot compile; what each rank says."""
    from accelerate import Accelerator

    accelerator = Accelerator(dynamo_backend="eager", strict=strict)
    model = Net()
    with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
        warnings.simplefilter("always")
        if accelerator.process_index == 1:
            patch.setenv("TORCHDYNAMO_DISABLE", "1")
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        for _ in range(2):
            accelerator.backward(model(torch.ones(2, 2)).sum())
            optimizer.step()
            optimizer.zero_grad()
    return [str(one.message) for one in caught if "applied" in str(one.message)]


def test_what_one_process_finds_process_0_says_once(ranks: RankServer) -> None:
    """F15"""
    main, other = ranks(2, lame, False)
    assert main == [
        "rank 1: dynamo_backend=EAGER (the argument dynamo_backend) was not applied: "
        "TORCHDYNAMO_DISABLE=1 turns torch.compile off"
    ]
    assert other == []


def test_a_strict_run_ends_on_all_processes(ranks: RankServer) -> None:
    """F15"""
    with pytest.raises(RanksError) as caught:
        ranks(2, lame, True)
    assert [outcome.kind for outcome in caught.value.outcomes] == ["SettingError"] * 2
    words = "rank 1: dynamo_backend=EAGER (the argument dynamo_backend) was not applied"
    assert all(words in outcome.message for outcome in caught.value.outcomes)


# ---------------------------------------------------------------- as people run it

SCRIPT = """
from torch import nn
from accelerate import Accelerator

accelerator = Accelerator(cpu=True)
accelerator.prepare(nn.Linear(2, 1))
print("done\\n", end="", flush=True)
"""


def run(ranks: RankServer, folder: Path, size: int, *flags: str) -> list[tuple[int, str]]:
    """Run the script as ``accelerate launch FLAGS`` tells it to; return how each rank ended."""
    return run_to_exit(ranks, size, SCRIPT, folder, launch_variables("--cpu", "-n", str(size), *flags))


def test_a_launch_reports_in_a_line(ranks: RankServer, tmp_path: Path) -> None:
    asked = ("--mixed_precision", "bf16", "--dynamo_mode", "max-autotune")
    ends = run(ranks, tmp_path, 2, *asked, "--effects", "line")
    assert [(code, output.count("done\n")) for code, output in ends] == [(0, 1)] * 2, ends
    (_, main), (_, other) = ends
    assert "pplied" not in other
    lines = [line for line in main.splitlines() if "pplied" in line]
    assert lines[0] == (
        "accelerate: applied: cpu=True, num_processes=2, mixed_precision=bf16; "
        "not applied: dynamo_mode=max-autotune"
    )
    assert len(lines) == 2
    assert "--dynamo_mode max-autotune was not applied: no dynamo_backend is chosen" in lines[1]


@pytest.mark.parametrize(
    "flags",
    [[], long_run_param(["-q"]), long_run_param(["--effects", "none"]), long_run_param(["--strict", "-q"])],
)
def test_a_launch_of_which_everything_was_applied_says_nothing(flags: list[str]) -> None:
    result = launch("--cpu", "-n", "1", "--mixed_precision", "bf16", *flags, script_text=SCRIPT)
    assert (result.returncode, result.stdout, result.stderr) == (0, "done\n", "")


def test_a_launch_with_a_table(ranks: RankServer, tmp_path: Path) -> None:
    config = tmp_path / "c.yaml"
    config.write_text("mixed_precision: bf16\n")
    ((code, output),) = run(ranks, tmp_path, 1, "--config_file", str(config), "--explain")
    assert code == 0, output
    assert output.splitlines()[0] == "accelerate: requested options"
    row = next(line for line in output.splitlines() if line.startswith("mixed_precision=bf16"))
    assert row.split(maxsplit=2)[1] == "applied"
    assert "c.yaml, line 1: mixed_precision" in row


def test_a_strict_launch(ranks: RankServer, tmp_path: Path) -> None:
    """F15; one that has all says so in a line, but for a quiet one."""
    line = "accelerate: applied: cpu=True, num_processes=1, mixed_precision=bf16\n"
    for flags, said in (((), line), (("-q",), "")):
        ((code, output),) = run(ranks, tmp_path, 1, "--mixed_precision", "bf16", "--strict", *flags)
        assert (code, sorted(output.splitlines())) == (0, sorted(f"{said}done".splitlines()))
    ((code, output),) = run(ranks, tmp_path, 1, "--dynamo_mode", "max-autotune", "--strict")
    assert code != 0
    assert "--dynamo_mode max-autotune was not applied" in output
    assert "done" not in output


def test_without_a_launcher_nothing_is_printed(ranks: RankServer, tmp_path: Path) -> None:
    env = {**NO_LAUNCHER, "ACCELERATE_MIXED_PRECISION": "bf16"}
    assert run_to_exit(ranks, 1, SCRIPT, tmp_path, env) == [(0, "done\n")]
