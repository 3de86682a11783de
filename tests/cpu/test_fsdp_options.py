"""Options of sharding seen at work: gathering ahead, number formats, what waits, compiled blocks, states."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from tests.cpu.test_fsdp2 import LAYERS, prepared
from tests.support.numbers import close, same
from tests.support.ranks import RanksError, RankServer, same_on_all
from tests.support.sharded_models import Block, adamw, batches, gathered_groups, loss_of, plain, share, tiny

AHEAD: dict[str, Any] = {**LAYERS, "forward_prefetch": True, "backward_prefetch": "NO_PREFETCH"}


def test_gathering_ahead_changes_no_number(ranks: RankServer) -> None:
    """B7: with inputs of blocks on the host, too."""
    kept = {"activation_checkpointing": True, "activation_checkpointing_offload": True}
    close(same_on_all(ranks(2, prepared, {**AHEAD, **kept}, 4)), plain(4), 1e-5)


def name_strategies() -> list[str]:
    """The strategies of dicts in place of plug-ins, which have trained as one plain process."""
    from accelerate import Accelerator

    plugins: list[Any] = [{"fsdp_version": 2}, {"fsdp_version": 1}]
    return [Accelerator(cpu=True, fsdp_plugin=plugin).strategy.name for plugin in plugins]


def test_a_dict_in_place_of_the_plugin_shards(ranks: RankServer) -> None:
    assert same_on_all(ranks(2, name_strategies)) == ["fsdp", "fsdp1"]


def said(accelerator: Any) -> dict[str, tuple[bool | None, str]]:
    return {effect.option: (effect.applied, effect.why) for effect in accelerator.effects()}


def run(each: bool, formats: dict[str, Any]) -> dict[str, Any]:
    """One window of two micro-batches: what the report says, and what hooks see."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import GradientAccumulationPlugin

    options = {
        **AHEAD, "activation_checkpointing": True, "activation_checkpointing_offload": True,
        "fsdp_version": 2, "sharding_strategy": "SHARD_GRAD_OP", "mixed_precision_policy": formats,
    }  # fmt: skip
    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(**options),
        gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=2, sync_each_batch=each),
    )
    model = tiny()
    seen: dict[str, Any] = {"ahead": said(accelerator)["mixed_precision_policy"]}
    model, optimizer = accelerator.prepare(model, adamw(model))
    up: Any = model.layers[0].up

    def look(module: nn.Module, args: Any, output: torch.Tensor) -> None:
        seen["compute"] = str(up.weight.dtype), str(args[0].dtype), str(output.dtype)

    up.register_forward_hook(look)
    waits = []
    for words in batches(2):
        with accelerator.accumulate(model):
            output = model(words)
            seen["output"] = str(output.dtype)
            accelerator.backward(output.float().square().mean())
            whole = [
                g for g in accelerator.strategy.gradients(model.parameters()) if not hasattr(g, "placements")
            ]
            waits.append(sum(g.nbytes for g in whole))
            optimizer.step()
            optimizer.zero_grad()
    seen["parameters"] = str(model.embed.weight.dtype)
    # Parts of an odd number of rows differ in size: in tenths of what the whole takes.
    trained = sum(p.numel() * 4 for p in tiny().parameters() if p.requires_grad)
    seen["waits"] = [round(10 * bytes_here / trained) for bytes_here in waits]
    seen["said"] = said(accelerator)
    return seen


def test_formats_and_waiting_gradients_are_seen(ranks: RankServer) -> None:
    """F15: what the report says is what hooks see."""
    formats = {"param_dtype": "bf16", "reduce_dtype": "fp32", "output_dtype": "fp32"}
    found = same_on_all(ranks(2, run, False, formats))
    assert found["ahead"] == (None, "no model that trains is prepared")
    assert found["compute"] == ("torch.bfloat16",) * 3
    assert (found["output"], found["parameters"]) == ("torch.float32", "torch.float32")
    report = found["said"]
    assert report["mixed_precision_policy"] == (
        True,
        "parameters float32, computed in bfloat16, gradients reduced in float32, buffers float32, "
        "outputs float32",
    )
    for name in ("fsdp_forward_prefetch", "fsdp_backward_prefetch", "fsdp_sharding_strategy"):
        assert report[name] == (True, "")
    assert report["fsdp_activation_checkpointing_offload"] == (
        True,
        "the inputs of 2 units are on the host anyway",
    )
    applied, why = report["num_steps"]
    assert applied
    assert why.startswith("unsharded gradients are kept until the end of a window: ")
    assert found["waits"] == [10, 5]


def test_reducing_in_every_micro_batch_lets_nothing_wait(ranks: RankServer) -> None:
    """PAINS 51"""
    found = same_on_all(ranks(2, run, True, {"param_dtype": "fp32"}))
    assert found["waits"] == [5, 5]
    assert (
        found["said"]["num_steps"][1]
        == "gradients are reduced in every micro-batch, so no unsharded gradients are kept"
    )


class DividedByCount(nn.Module):
    """A model that divides its loss by a number of tokens, as those of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, scale: torch.Tensor, *, count: torch.Tensor) -> list[str]:
        self.inner(x)
        return [str(x.dtype), f"{scale:.6f}", f"{count:.1f}"]


def scalars_of_forward(version: int, compiled: bool) -> list[str]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=version)
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
    model: Any = DividedByCount()
    if compiled:
        model.compile(backend="eager")
    model = accelerator.prepare(model)
    x, scale = torch.ones(2, 4), torch.tensor(0.998765)
    assert model(x, scale, count=torch.tensor(7.0))[2] == "7.0"
    return model(x, scale, count=torch.tensor(1234.0))


@pytest.mark.parametrize(("version", "compiled"), [(1, False), (2, False), (2, True)])
def test_scalars_are_not_rounded(ranks: RankServer, version: int, compiled: bool) -> None:
    """The Trainer of transformers gives ``num_items_in_batch`` so, by which the loss is divided."""
    seen = same_on_all(ranks(2, scalars_of_forward, version, compiled))
    assert seen == ["torch.bfloat16", "0.998765", "1234.0"]


def implied(policy: str) -> list[tuple[str, str]]:
    """Return the dtypes that are not applied: those of the precision, and those that FSDP1 knew."""
    from torch.distributed.fsdp import MixedPrecision

    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    buffers = MixedPrecision(param_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16)
    more: dict[str, Any] = (
        {"fsdp_version": 2, "mixed_precision_policy": buffers} if policy == "buffers" else {}
    )
    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(**LAYERS, **more), mixed_precision="bf16"
    )
    model = tiny()
    model, optimizer = accelerator.prepare(model, adamw(model))
    accelerator.backward(loss_of(model, next(batches(1))))
    optimizer.step()
    if policy == "changed":
        for group in gathered_groups(model):
            for place in group.fsdp_params:
                place.reduce_dtype = torch.float16
    return [(effect.option, effect.why) for effect in accelerator.effects() if effect.not_applied]


@pytest.mark.parametrize(
    ("policy", "wrong"),
    [
        ("as said", []),
        ("changed", [("mixed_precision", "reduced in float16, not float32")]),
        ("buffers", [("buffer_dtype", "FSDP2 leaves buffers as they are: float32")]),
    ],
)
def test_formats_that_are_not_there_are_said(
    ranks: RankServer, policy: str, wrong: list[tuple[str, str]]
) -> None:
    """F15"""
    assert same_on_all(ranks(2, implied, policy)) == wrong


# --- compiled blocks


def compiled() -> tuple[int, list[str], bool, float]:
    """Graphs that were made, names of the state, whether blocks run compiled, the loss."""
    import torch._dynamo.utils as told

    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import TorchDynamoPlugin

    accelerator = Accelerator(
        fsdp_plugin=FullyShardedDataParallelPlugin(**LAYERS),
        dynamo_plugin=TorchDynamoPlugin(backend="eager", use_regional_compilation=True),
    )
    model = tiny()
    model, optimizer = accelerator.prepare(model, adamw(model))
    loss = torch.zeros(())
    for words in batches(2):
        loss = loss_of(model, share(words, accelerator.process_index, 2))
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    graphs = told.counters["stats"]["unique_graphs"]
    blocks = [part for part in model.modules() if isinstance(part, Block)]
    run = all(block._compiled_call_impl is not None for block in blocks)
    names = [name for name, _ in model.named_parameters()]
    return graphs, names, run, accelerator.gather(loss.detach()).mean().item()


def test_compiled_blocks_run_compiled(ranks: RankServer) -> None:
    """D9"""
    graphs, names, run, loss = same_on_all(ranks(2, compiled, timeout=120))
    assert graphs > 0
    assert run
    assert names == [name for name, _ in tiny().named_parameters()]
    assert loss == pytest.approx(plain(1)[0][1], abs=1e-2)


# --- states that are no whole


def kept_apart(case: str, folder: str) -> Any:
    """The shards of one process are copied, loaded, refused as a file, and saved when all are full."""
    import copy

    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**LAYERS))
    model = accelerator.prepare(tiny())
    state = model.state_dict()
    file = f"{folder}/{accelerator.process_index}"
    if case == "torch":
        torch.save({"model": state}, f"{file}.pt")
    elif case == "ours":
        accelerator.save(state, f"{file}.pt")
    elif case == "safetensors":
        from safetensors.torch import save_file

        save_file(state, f"{file}.safetensors")
    else:
        copied = copy.deepcopy(state)
        assert copied["embed.weight"] is not state["embed.weight"]
        for value in copied.values():
            getattr(value, "to_local", lambda value=value: value)().zero_()
        found = model.load_state_dict(copied)
        from torch.distributed.checkpoint.state_dict_saver import save

        save({"model": model.state_dict()}, checkpoint_id=f"{folder}/parts")
        full = copy.copy(state)
        for name, value in full.items():
            full[name] = value.full_tensor() if hasattr(value, "full_tensor") else value
        torch.save(full, f"{file}.pt")
        assert torch.load(f"{file}.pt").keys() == state.keys()
        return str(found), float(model.embed.weight.full_tensor().abs().sum())
    return None


def test_parts_of_a_state_are_copied_and_loaded(ranks: RankServer, tmp_path: Path) -> None:
    found = same_on_all(ranks(2, kept_apart, "use", str(tmp_path)))
    assert found == ("<All keys matched successfully>", 0.0)


@pytest.mark.parametrize(
    ("case", "kind", "words"),
    [
        ("torch", "PrepareError", "accelerator.get_state_dict(model)"),
        ("ours", "CheckpointError", "a sharded model is no full state dict"),
        ("safetensors", "PrepareError", "accelerator.get_state_dict(model)"),
    ],
)
def test_parts_of_a_state_are_no_file_of_their_own(
    ranks: RankServer, tmp_path: Path, case: str, kind: str, words: str
) -> None:
    """D3: ``model.state_dict()`` of a sharded model is refused as a whole state."""
    with pytest.raises(RanksError) as caught:
        ranks(2, kept_apart, case, str(tmp_path), grace=30)
    first = caught.value.outcomes[0]
    assert first.kind == kind, str(first)
    assert words in first.message
    assert not list(tmp_path.glob("*.safetensors"))


def early() -> None:
    """The optimizer in a call of its own, before its model is sharded."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**LAYERS))
    model = tiny()
    accelerator.prepare(adamw(model))


def test_an_optimizer_prepared_before_sharding_is_refused(ranks: RankServer) -> None:
    with pytest.raises(RanksError, match="prepare both in one call") as caught:
        ranks(2, early)
    assert caught.value.causing_kinds() == {"PrepareError"}


class NormBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.linear(x))


def statistics(version: int, recomputes: bool) -> list[float]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(
        fsdp_version=version,
        activation_checkpointing=recomputes,
        auto_wrap_policy="transformer_based_wrap",
        transformer_cls_names_to_wrap=["NormBlock"],
    )
    accelerator = Accelerator(fsdp_plugin=plugin)
    torch.manual_seed(0)
    model = nn.Sequential(NormBlock(), nn.Linear(4, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    for _ in range(2):
        accelerator.backward(model(torch.arange(32.0).reshape(8, 4)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    return (
        []
        if not state
        else [*state["0.norm.running_mean"].tolist(), int(state["0.norm.num_batches_tracked"])]
    )


@pytest.mark.parametrize("version", [1, 2])
def test_a_batch_norm_that_is_recomputed_counts_a_batch_once(ranks: RankServer, version: int) -> None:
    plain, recomputed = (ranks(2, statistics, version, each)[0] for each in (False, True))
    assert plain[-1] == 2
    assert recomputed == pytest.approx(plain, rel=1e-5)


def train_convolution(version: int) -> dict[str, Any]:
    """Weights after one step of a model in float64 and channels_last."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3, padding=1), nn.Flatten(), nn.Linear(64, 1)).double()
    model.to(memory_format=torch.channels_last)  # pyright: ignore[reportCallIssue]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    images = torch.randn(4, 3, 4, 4, dtype=torch.float64)
    backward, clip, state = torch.Tensor.backward, nn.utils.clip_grad_norm_, model.state_dict
    if version:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin

        accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=version))
        model, optimizer = accelerator.prepare(model, optimizer)
        backward, clip = accelerator.backward, accelerator.clip_grad_norm_
        state = lambda: accelerator.get_state_dict(model)  # noqa: E731
    backward(model(images).square().mean())
    clip(model.parameters(), 1.0)
    optimizer.step()
    return {name: value.clone() for name, value in state().items()}


@pytest.mark.parametrize("version", [1, 2])
def test_parameters_that_are_not_contiguous_keep_their_elements(ranks: RankServer, version: int) -> None:
    """FSDP1 has written them to state dicts in the order of their memory; FSDP2 of torch refuses them."""
    same(ranks(2, train_convolution, version)[0], train_convolution(0), 1e-5)


def train_norms(version: int) -> tuple[list[float], dict[str, Any]]:
    """Losses and statistics of batch norms, alone and in units, in bfloat16; version 0: by torch itself."""
    import torch.distributed as dist
    from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
    from torch.distributed.fsdp.wrap import ModuleWrapPolicy

    torch.manual_seed(0)
    model: Any = nn.Sequential(
        nn.Linear(4, 4), NormBlock(), nn.BatchNorm1d(4), nn.BatchNorm1d(4, affine=False), nn.Linear(4, 1)
    )
    if version:
        from accelerate import Accelerator, FullyShardedDataParallelPlugin

        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=version, auto_wrap_policy=ModuleWrapPolicy({NormBlock})
        )
        accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
        backward = accelerator.backward
    else:
        dist.init_process_group("gloo")
        formats = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        model = FullyShardedDataParallel(
            model, auto_wrap_policy=ModuleWrapPolicy({NormBlock}), mixed_precision=formats,
            device_id=torch.device("cpu"),
        )  # fmt: skip
        optimizer, backward = torch.optim.SGD(model.parameters(), lr=0.1), torch.Tensor.backward
    losses = []
    for step in range(3):
        torch.manual_seed(2 * step + dist.get_rank())
        loss = model(torch.randn(8, 4)).float().square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    buffers = {name.replace("_fsdp_wrapped_module.", ""): value for name, value in model.named_buffers()}
    return losses, {name: value for name, value in buffers.items() if "running" in name}


def test_batch_norms_keep_their_statistics_in_half_precision(ranks: RankServer) -> None:
    """They are computed as by torch's FSDP1; in units that are computed in bfloat16, torch refuses them."""
    expected = ranks(2, train_norms, 0)[1]
    assert {value.dtype for value in expected[1].values()} == {torch.float32}
    for version in (1, 2):
        losses, statistics = ranks(2, train_norms, version)[1]
        assert losses == pytest.approx(expected[0], rel=1e-4), version
        # Rank 0's are broadcast before each forward, and each rank counts its own batch.
        assert {name: value.dtype for name, value in statistics.items()} == dict.fromkeys(
            expected[1], torch.float32
        )


def report_of_norms(options: dict[str, Any]) -> dict[str, tuple[bool | None, str]]:
    """Train a model with a batch norm in bfloat16, strictly, and return its option report."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    torch.manual_seed(0)
    plugin = FullyShardedDataParallelPlugin(**options)
    accelerator = Accelerator(mixed_precision="bf16", fsdp_plugin=plugin, strict=True)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    accelerator.backward(model(torch.randn(8, 4)).square().mean())
    optimizer.step()
    return said(accelerator)


@pytest.mark.parametrize(
    "options",
    [
        {"fsdp_version": 2, "auto_wrap_policy": "NO_WRAP"},
        {"fsdp_version": 2, "reshard_after_forward": True},
        {"fsdp_version": 2, "mixed_precision_policy": "bf16"},
        {"fsdp_version": 1, "auto_wrap_policy": "NO_WRAP"},
    ],
    ids=str,
)
def test_batch_norms_do_not_count_in_the_option_report(ranks: RankServer, options: dict[str, Any]) -> None:
    """As units of their own they compute in float32, and stay all-gathered, whatever the options say."""
    found = same_on_all(ranks(2, report_of_norms, options))
    assert all(applied for applied, _ in found.values()), found


def test_a_wrap_policy_that_matches_nothing_is_reported_beside_batch_norms(ranks: RankServer) -> None:
    for version in (1, 2):
        options = {"fsdp_version": version, "auto_wrap_policy": "SIZE_BASED_WRAP", "min_num_params": 1000}
        with pytest.raises(RanksError, match="it matches no module: the whole model is one FSDP unit"):
            ranks(2, report_of_norms, options)


@dataclass(frozen=True)
class Scored:
    """An output that torch registers as no tree."""

    hidden: torch.Tensor


class SlottedOutput:
    """Another, which has no ``__dict__``."""

    __slots__ = ("hidden",)

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


def nested_output(hidden: torch.Tensor) -> Any:
    """A tensor in a tuple in an object in another one."""
    return SimpleNamespace(inner=SimpleNamespace(parts=(1, {"hidden": hidden})))


def hidden_in(output: Any) -> torch.Tensor:
    """The tensor of any of these."""
    if isinstance(output, torch.Tensor):
        return output
    return output.inner.parts[1]["hidden"] if hasattr(output, "inner") else output.hidden


class KeptOutput(nn.Module):
    """A model that returns nothing, and keeps its loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.kept = nn.Sequential(nn.Linear(4, 4), nn.Tanh()), dict[str, torch.Tensor]()

    def forward(self, x: torch.Tensor) -> None:
        self.kept["loss"] = self.layers(x).square().mean()


def train_with_kept_loss() -> tuple[list[float], list[float]]:
    """The losses of three steps on equal data, and those of one process."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
    torch.manual_seed(0)
    alone = KeptOutput()
    model, optimizer = accelerator.prepare(shared := copy.deepcopy(alone), adamw(shared))
    reference, losses = adamw(alone), ([], [])
    for rows in torch.randn(3, 5, 4):
        model(rows)
        alone(rows)
        accelerator.backward(model.kept["loss"])
        alone.kept["loss"].backward()
        for each, kept, step in zip(losses, (model.kept, alone.kept), (optimizer, reference), strict=True):
            each.append(kept["loss"].item())
            step.step()
            step.zero_grad()
    return losses


class WrappedOutput(nn.Module):
    """A layer that returns its tensor in an object."""

    def __init__(self, make: Any) -> None:
        super().__init__()
        self.layer, self.make = nn.Linear(4, 4), make

    def forward(self, x: Any) -> Any:
        return self.make(self.layer(hidden_in(x)).tanh())


OUTPUTS = (Scored, SlottedOutput, nested_output)


def train_with_objects(wrap: str, frozen_graph: bool) -> list[float]:
    """The greatest difference to one process after three steps, for each form of an output."""
    from accelerate import Accelerator, DistributedDataParallelKwargs, FullyShardedDataParallelPlugin

    layers = {"transformer_cls_names_to_wrap": ["WrappedOutput"]} if wrap != "NO_WRAP" else {}
    options: dict[str, Any] = {"fsdp_plugin": FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy=wrap, **layers
    )}  # fmt: skip
    if frozen_graph:
        options = {"kwargs_handlers": [DistributedDataParallelKwargs(static_graph=True)]}
    accelerator, differences = Accelerator(cpu=True, **options), list[float]()
    for make in OUTPUTS:
        torch.manual_seed(0)
        alone = nn.Sequential(WrappedOutput(make), WrappedOutput(make))
        model, optimizer = accelerator.prepare(shared := copy.deepcopy(alone), adamw(shared))
        reference = adamw(alone)
        for rows in torch.randn(3, 2, 5, 4):
            accelerator.backward(hidden_in(model(rows[accelerator.process_index])).square().mean())
            hidden_in(alone(rows.flatten(0, 1))).square().mean().backward()
            for each in (optimizer, reference):
                each.step()
                each.zero_grad()
        state = accelerator.get_state_dict(model)
        expected = alone.state_dict()
        differences.append(max((float((state[n] - expected[n]).abs().max()) for n in state), default=0.0))
    return differences


@pytest.mark.parametrize("wrap", ["NO_WRAP", "TRANSFORMER_BASED_WRAP"])
def test_gradients_are_reduced_whatever_class_an_output_has(ranks: RankServer, wrap: str) -> None:
    """torch does not search objects: nothing would be trained, silently, or a unit would not be gathered."""
    for differences in ranks(2, train_with_objects, wrap, False):
        assert max(differences) < 1e-6, differences


def test_gradients_of_a_loss_that_a_model_keeps_are_reduced(ranks: RankServer) -> None:
    """Of a model that returns None torch would reduce none."""
    for sharded, alone in ranks(2, train_with_kept_loss):
        assert sharded == pytest.approx(alone, abs=1e-6)


def test_a_static_graph_refuses_outputs_in_objects(ranks: RankServer) -> None:
    """DDP would never begin to reduce, silently."""
    with pytest.raises(RanksError, match="returns a Scored, in which DDP finds no tensor") as caught:
        ranks(2, train_with_objects, "NO_WRAP", True)
    assert caught.value.causing_kinds() == {"PrepareError"}
