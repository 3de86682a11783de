"""States and checkpoints under version 1 of sharding: by the user's names, for any other way of training."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch

from accelerate.core.errors import SettingError
from tests.cpu.test_sharded_checkpoints import MODEL, OPTIMIZER, Net, step
from tests.support.long_run import long_run_param
from tests.support.ranks import RanksError, RankServer, same_on_all
from tests.support.sharded_jobs import load_wrong, refuses_wrong_states
from tests.support.sharded_models import Tiny, adamw, batches, loss_of, tiny


def accelerator_of(kind: str, **options: Any) -> Any:
    """Make an Accelerator for FSDP "1" or "2", or "" for DDP or one process."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = FullyShardedDataParallelPlugin(fsdp_version=int(kind), **options) if kind else None
    return Accelerator(cpu=True, fsdp_plugin=plugin)


# --- runs that go on elsewhere


def prepared(kind: str, seed: int, options: dict[str, Any]) -> tuple[Any, ...]:
    """A run that every process takes with the same data; two groups, tied, frozen, buffers."""
    accelerator = accelerator_of(kind, **options)
    torch.manual_seed(seed)
    model = Net()
    groups = [
        {"params": [model.embed.weight, model.frozen.weight], "weight_decay": 0.2},
        {"params": [*model.norm.parameters(), model.frozen.bias, model.scale], "lr": 0.01 * (seed + 1)},
    ]
    optimizer = torch.optim.AdamW(groups, lr=0.03)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
    return accelerator, *accelerator.prepare(model, optimizer, scheduler)


def part(
    kind: str, first: int, options: dict[str, Any], load: str = "", save: str = ""
) -> tuple[list[float], tuple[str, ...]]:
    run = prepared(kind, 1 if load else 0, options)
    notes = run[0].load_state(load).notes if load else ()
    assert run[1].head.weight is run[1].embed.weight
    losses = [step(run, number) for number in range(first, first + 3)]
    if save:
        run[0].save_state(save)
    return losses, notes


def through() -> list[float]:
    run = prepared("", 0, {})
    return [step(run, number) for number in range(9)]


@pytest.fixture(scope="module")
def train_undisturbed(ranks: RankServer) -> list[float]:
    return ranks(1, through)[0]


SHARDED: dict[str, Any] = {"state_dict_type": "SHARDED_STATE_DICT"}
GRADS: dict[str, Any] = {"sharding_strategy": "SHARD_GRAD_OP", **SHARDED}
WHOLE: dict[str, Any] = {"sharding_strategy": "NO_SHARD", **SHARDED}
COPIES: dict[str, Any] = {"sharding_strategy": "HYBRID_SHARD", "replicate_size": 2, **SHARDED}


@pytest.mark.parametrize(
    "runs",
    [
        (("1", 2, SHARDED), ("", 1, {}), ("1", 2, {})),
        (("1", 2, {}), ("2", 2, {}), ("1", 3, SHARDED)),
        (("", 2, {}), ("1", 2, GRADS), ("2", 3, {})),
        (("1", 4, COPIES), ("1", 2, WHOLE), ("1", 2, {"state_dict_type": "LOCAL_STATE_DICT"})),
    ],
    ids=["one process", "fsdp2", "ddp", "hsdp"],
)
def test_a_run_goes_on_under_another_strategy_and_number_of_processes(
    ranks: RankServer, train_undisturbed: list[float], tmp_path: Path, runs: Any
) -> None:
    """D6: whole and in parts; the numbers are those of one run in one process."""
    for number, (kind, size, options) in enumerate(runs):
        load, save = (str(tmp_path / f"c{n}") for n in (number - 1, number))
        got = ranks(size, part, kind, 3 * number, options, load if number else "", save)
        found = same_on_all([values for values, _ in got])
        assert found == pytest.approx(train_undisturbed[3 * number : 3 * number + 3], rel=1e-5)
        full = (kind == "1" and not options) or not kind
        assert (tmp_path / f"c{number}" / MODEL / ".metadata").is_file() is not full
        assert (tmp_path / f"c{number}" / "optimizer.bin").is_file() is full


# --- whole states


def save_after_steps(flat: bool, kind: str, folder: str) -> tuple[int, int]:
    """Trains three steps and keeps whole states; two more, and keeps those weights."""
    accelerator, model, optimizer = trained(flat, kind, 0)
    steps(accelerator, model, optimizer, 3)
    strategy = accelerator.strategy
    weights, state = strategy.model_state(model), strategy.optimizer_state(optimizer.optimizer, [model])
    steps(accelerator, model, optimizer, 2)
    after = strategy.model_state(model)
    if accelerator.is_main_process:
        torch.save({"model": weights, "optimizer": state, "after": after}, f"{folder}/whole.pt")
    return len(weights), len(state)


def trained(flat: bool, kind: str, seed: int) -> tuple[Any, Any, Any]:
    options = {"use_orig_params": False, "ignored_modules": "frozen"} if flat else {}
    accelerator = accelerator_of("1", auto_wrap_policy="transformer_based_wrap", **options)
    model = tiny(seed)
    return accelerator, *accelerator.prepare(model, optimizer_of(flat, kind, model))


def optimizer_of(flat: bool, kind: str, model: Tiny) -> torch.optim.Optimizer:
    if flat:
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
    if kind == "sgd":
        return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    return adamw(model)


def steps(accelerator: Any, model: Any, optimizer: Any, count: int) -> None:
    for words in batches(count):
        accelerator.backward(loss_of(model, words))
        optimizer.step()
        optimizer.zero_grad()


def resume_training(flat: bool, kind: str, folder: str) -> dict[str, torch.Tensor]:
    file = torch.load(f"{folder}/whole.pt", mmap=True, weights_only=True)
    accelerator, model, optimizer = trained(flat, kind, 5)
    model.eval()
    with torch.no_grad():
        # Whole values of the outermost part stay after a forward; loading must not leave them.
        model(next(batches(1)))
    found = accelerator.strategy.load_model(model, file["model"])
    assert (found.missing_keys, found.unexpected_keys) == ([], [])
    accelerator.strategy.load_optimizer(optimizer.optimizer, [model], file["optimizer"])
    steps(accelerator, model, optimizer, 2)
    return accelerator.strategy.model_state(model)


@pytest.mark.parametrize(("flat", "kind"), [long_run_param(False, "adamw"), (False, "sgd"), (True, "adamw")])
def test_whole_states_go_to_one_process_and_back(
    ranks: RankServer, tmp_path: Path, flat: bool, kind: str
) -> None:
    """D6: of the user's parameters also where an optimizer holds flat ones; an evaluation before loading."""
    assert ranks(2, save_after_steps, flat, kind, str(tmp_path))[1] == (0, 0)
    file = torch.load(tmp_path / "whole.pt", weights_only=True)
    other = tiny(0)
    reference = optimizer_of(flat, kind, other)
    for words in batches(3):
        loss_of(other, words).backward()
        reference.step()
        reference.zero_grad()
    theirs = reference.state_dict()
    assert list(file["model"]) == list(other.state_dict())
    assert file["model"]["head.weight"].data_ptr() == file["model"]["embed.weight"].data_ptr()
    assert file["optimizer"]["state"].keys() == theirs["state"].keys()
    assert file["optimizer"]["param_groups"] == theirs["param_groups"]
    for index, values in theirs["state"].items():
        for name, value in values.items():
            torch.testing.assert_close(file["optimizer"]["state"][index][name], value, rtol=0, atol=1e-6)
    model = tiny(9)
    optimizer = optimizer_of(flat, kind, model)
    model.load_state_dict(file["model"])
    optimizer.load_state_dict(file["optimizer"])
    for words in batches(2):
        loss_of(model, words).backward()
        optimizer.step()
        optimizer.zero_grad()
    again = ranks(2, resume_training, flat, kind, str(tmp_path))[0]
    for name, value in model.state_dict().items():
        torch.testing.assert_close(file["after"][name], value, rtol=0, atol=1e-6)
        assert torch.equal(again[name], file["after"][name])


def load_unfit(case: str) -> str:
    # With the frozen layer in no unit.
    return load_wrong(*trained(case == "loose", "adamw", 0), case)


def test_a_state_that_does_not_fit_is_refused(ranks: RankServer) -> None:
    refuses_wrong_states(ranks, load_unfit)


# --- the functions of transformers' Trainer


def by_functions(folder: str, kind: str, load: bool) -> list[float]:
    from accelerate.utils import load_fsdp_model, load_fsdp_optimizer, save_fsdp_model, save_fsdp_optimizer

    run = prepared("1", 1 if load else 0, {"state_dict_type": kind})
    accelerator, model, optimizer, _ = run
    plugin = accelerator.state.fsdp_plugin
    if load:
        result = load_fsdp_model(plugin, accelerator, model, folder)
        assert (result.missing_keys, result.unexpected_keys) == ([], [])
        load_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    else:
        step(run, 0)
        save_fsdp_model(plugin, accelerator, model, folder)
        save_fsdp_optimizer(plugin, accelerator, optimizer, model, folder)
    return [step(run, number) for number in (1, 2)]


FILES = {
    "FULL_STATE_DICT": ["optimizer.bin", "pytorch_model_fsdp.bin"],
    "SHARDED_STATE_DICT": [OPTIMIZER, MODEL],
    "LOCAL_STATE_DICT": [OPTIMIZER, "pytorch_model_fsdp_rank0.bin", "pytorch_model_fsdp_rank1.bin"],
}


@pytest.mark.parametrize("kind", FILES)
def test_the_functions_of_the_trainer(ranks: RankServer, tmp_path: Path, kind: str) -> None:
    """Local states come back with the user's own parameters too, into as many processes as wrote them."""
    folder = str(tmp_path)
    saved = same_on_all(ranks(2, by_functions, folder, kind, False))
    assert sorted(os.listdir(tmp_path)) == FILES[kind]
    assert same_on_all(ranks(2, by_functions, folder, kind, True)) == saved
    if kind == "LOCAL_STATE_DICT":
        with pytest.raises(RanksError, match="local states of 2 processes, and these are 3") as caught:
            ranks(3, by_functions, folder, kind, True)
        assert caught.value.causing_kinds() == {"CheckpointError"}


def by_own_states(folder: str, kind: str) -> tuple[int, dict[str, bool]]:
    """Save by a function that a program has replaced; it is called in torch's context of the type."""
    from accelerate.utils import fsdp_utils, load_fsdp_model, save_fsdp_model

    accelerator, model, *_ = prepared("1", 0, {"state_dict_type": kind})
    plugin, before = accelerator.state.fsdp_plugin, accelerator.get_state_dict(model)
    get_state, calls = fsdp_utils._get_model_state_dict, []

    def get_changed(model: Any, adapter_only: bool = False) -> dict[str, Any]:
        calls.append(adapter_only)
        state = get_state(model, adapter_only)
        return {name: -value if name == "frozen.bias" else value for name, value in state.items()}

    fsdp_utils._get_model_state_dict = get_changed
    save_fsdp_model(plugin, accelerator, model, folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    load_fsdp_model(plugin, accelerator, model, folder)
    after = accelerator.get_state_dict(model)
    return len(calls), {name: torch.equal(value, before[name]) for name, value in after.items()}


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT"])
def test_states_that_a_program_gives(ranks: RankServer, tmp_path: Path, kind: str) -> None:
    (calls, same), (others, _) = ranks(2, by_own_states, str(tmp_path), kind)
    assert calls == others == (2 if "SHARDED" in kind else 1)
    assert [name for name in same if not same[name]] == ["frozen.bias"]
    assert os.listdir(tmp_path) == FILES[kind][1:]


def saved_beside_hooks(kind: str, folder: str) -> tuple[list[int], bool]:
    """Save full states with the hooks of diffusers' scripts, which write adapters by themselves."""
    accelerator, model, *_ = prepared(kind, 0, {"state_dict_type": "FULL_STATE_DICT"})
    counts: list[int] = []

    def save(models: list[Any], weights: list[Any], output_dir: str) -> None:
        counts.extend([len(models), len(weights)])
        if weights:
            weights.pop()

    accelerator.register_save_state_pre_hook(save)

    def load(models: list[Any], input_dir: str) -> None:
        counts.append(len(models))
        models.clear()

    accelerator.register_load_state_pre_hook(load)
    before = accelerator.get_state_dict(model)
    accelerator.save_state(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7)
    accelerator.load_state(folder)
    after = accelerator.get_state_dict(model)
    return counts, all(torch.equal(value, before[name]) for name, value in after.items())


@pytest.mark.parametrize("kind", ["1", "2"])
def test_hooks_leave_no_sharded_model_out_of_a_checkpoint(
    ranks: RankServer, tmp_path: Path, kind: str
) -> None:
    """As in 1.15 they get no weights to save, and no models to load full tensors into."""
    assert same_on_all(ranks(2, saved_beside_hooks, kind, str(tmp_path))) == ([1, 0, 0], True)


def step_before_async_save() -> tuple[int, int]:
    """Count the state dicts of torch at the first step, which measures what saves in the background copy."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin
    from accelerate.utils import ProjectConfiguration

    plugin, project = FullyShardedDataParallelPlugin(fsdp_version=1), ProjectConfiguration(async_save=True)
    accelerator = Accelerator(cpu=True, fsdp_plugin=plugin, project_config=project)
    model: Any = Net()
    model, optimizer = accelerator.prepare(model, adamw(model))
    calls: list[Any] = []
    model.register_state_dict_pre_hook(lambda *each: calls.append(each))
    accelerator.backward(model(torch.tensor([1, 5, 2])))
    optimizer.step()
    at_step = len(calls)
    model.state_dict()
    return at_step, len(calls)


def test_no_step_gathers_the_model_to_measure_it(ranks: RankServer) -> None:
    """``state_dict()`` of the wrapper holds all unsharded parameters on each rank at once."""
    assert same_on_all(ranks(2, step_before_async_save)) == (0, 1)


def export_model(folder: str) -> bool:
    run = prepared("1", 0, SHARDED)
    step(run, 0)
    run[0].save_model(run[1], f"{folder}/exported")
    compiled, state = torch.compile(run[1]), run[0].get_state_dict(run[1])
    run[0].save_model(compiled, f"{folder}/compiled")
    assert run[0].get_state_dict(compiled).keys() == state.keys()
    run[0].save_state(f"{folder}/parts")
    return True


def test_weights_are_exported_and_parts_merged(ranks: RankServer, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from accelerate.utils import merge_fsdp_weights

    ranks(2, export_model, str(tmp_path))
    merge_fsdp_weights(f"{tmp_path}/parts", f"{tmp_path}/merged")
    one, compiled, other = (
        load_file(tmp_path / name / "model.safetensors") for name in ("exported", "compiled", "merged")
    )
    assert one.keys() == compiled.keys() <= other.keys()
    assert all(torch.equal(one[name], each[name]) for name in one for each in (compiled, other))
    assert {"embed.weight", "norm.running_mean", "frozen.weight", "seen"} <= one.keys()


# --- several models, modules of several names, averages of weights


def moments_after_resume(kind: str, folder: str) -> list[bool]:
    """Saves and loads one optimizer over two models that lie at other addresses on each rank."""
    accelerator = accelerator_of(kind)
    torch.manual_seed(0)
    kept, equal = [], list[bool]()
    for attempt in range(6):
        kept.append([object() for _ in range(1000 * attempt * (accelerator.process_index + 1))])
        models = accelerator.prepare(torch.nn.Linear(4, 8), torch.nn.Linear(4, 8))
        optimizer = accelerator.prepare(torch.optim.AdamW([p for m in models for p in m.parameters()]))
        for scale, model in enumerate(models):
            accelerator.backward((model(torch.randn(4, 4)) * (1 + 10 * scale)).square().mean())
        optimizer.step()
        before = {p: state["exp_avg"].clone() for p, state in optimizer.state.items()}
        accelerator.save_state(folder)
        accelerator.load_state(folder)
        equal += [torch.equal(before[p], optimizer.state[p]["exp_avg"]) for p in before]
        accelerator.free_memory()
    return equal


def test_models_of_one_optimizer_keep_their_order_on_all_ranks(ranks: RankServer, tmp_path: Path) -> None:
    assert all(all(each) for each in ranks(2, moments_after_resume, "1", str(tmp_path / "state")))


def norms_of_two_models(kind: str) -> list[float]:
    accelerator = accelerator_of(kind)
    torch.manual_seed(0)
    models = [
        torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Linear(8, 8).requires_grad_(False)).append(
            torch.nn.Linear(8, 1)
        )
        for _ in range(2)
    ]
    models = accelerator.prepare(*models)
    for model in models:
        accelerator.backward(model(torch.ones(4, 4)).mean(), num_items=4)
    return [float(accelerator.clip_grad_norm_(model.parameters(), 1e9)) for model in models]


def test_items_of_two_models_with_frozen_layers_count_once(ranks: RankServer) -> None:
    plain = same_on_all(ranks(2, norms_of_two_models, ""))
    assert same_on_all(ranks(2, norms_of_two_models, "1")) == pytest.approx(plain, rel=1e-5)


def notes_of_a_shared_layer(kind: str, folder: str) -> tuple[str, ...]:
    accelerator = accelerator_of(kind)
    shared = torch.nn.Linear(4, 4)
    model = torch.nn.Sequential(shared, torch.nn.Tanh(), shared, torch.nn.Linear(4, 1))
    model, optimizer = accelerator.prepare(model, torch.optim.AdamW(model.parameters()))
    accelerator.backward(model(torch.ones(2, 4)).mean())
    optimizer.step()
    accelerator.save_state(folder, sharded=False)
    return accelerator.load_state(folder).notes


@pytest.mark.parametrize("kind", ["1", "2"])
def test_a_layer_that_is_registered_twice_is_loaded(ranks: RankServer, tmp_path: Path, kind: str) -> None:
    assert same_on_all(ranks(2, notes_of_a_shared_layer, kind, str(tmp_path / "state"))) == ()


class Average:
    def __init__(self, model: torch.nn.Module) -> None:
        self.shadow = [p.detach().clone() for p in model.parameters()]

    def state_dict(self) -> dict[str, Any]:
        return {"shadow": self.shadow, "decay": 0.9}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.shadow = state["shadow"]


def resume_average(kind: str, folder: str, action: str = "save load") -> bool:
    accelerator = accelerator_of(kind.removesuffix("local"))
    torch.manual_seed(0)
    model = accelerator.prepare(torch.nn.Linear(3, 5))
    average = Average(model)
    if kind == "2local":
        average.shadow = [p.to_local() for p in average.shadow]  # type: ignore[attr-defined]
    accelerator.register_for_checkpointing(average)
    before: list[Any] = list(average.shadow)
    if "save" in action:
        accelerator.save_state(folder)
    average.shadow = [torch.zeros_like(p) for p in average.shadow]
    accelerator.load_state(folder)
    pairs = zip(map(local_part, average.shadow), map(local_part, before), strict=True)
    return all(torch.equal(now, old) for now, old in pairs)


def local_part(tensor: Any) -> torch.Tensor:
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def test_an_average_of_sharded_weights_is_saved_whole(ranks: RankServer, tmp_path: Path) -> None:
    """Each rank had rank 0's shards after the load."""
    folder = tmp_path / "state"
    assert same_on_all(ranks(2, resume_average, "2", str(folder)))
    (file,) = folder.glob("custom_checkpoint_0.pkl")
    assert [tuple(p.shape) for p in torch.load(file, weights_only=True)["shadow"]] == [(5, 3), (5,)]


def save_on_each_machine(folder: str, sharded: bool | None) -> str:
    os.environ.update(GROUP_RANK=os.environ["RANK"], LOCAL_RANK="0", LOCAL_WORLD_SIZE="1")
    accelerator = accelerator_of("2")
    accelerator.prepare(torch.nn.Linear(3, 5))
    accelerator.project_configuration.save_on_each_node = True
    with pytest.raises(SettingError) as caught:
        accelerator.save_state(folder, sharded=sharded)
    return str(caught.value)


@pytest.mark.parametrize("sharded", [None, False])
def test_a_disk_for_each_machine_and_shards(ranks: RankServer, tmp_path: Path, sharded: bool | None) -> None:
    """The file of the second machine was empty, and nothing said so before it was loaded."""
    text = same_on_all(ranks(2, save_on_each_machine, str(tmp_path / "state"), sharded))
    assert "save_on_each_node does not go with shards" in text


@pytest.mark.parametrize("kind", ["1", "2local"])
def test_an_average_in_plain_tensors_is_saved_by_rank(ranks: RankServer, tmp_path: Path, kind: str) -> None:
    """Each rank had rank 0's shards after the load."""
    folder = str(tmp_path / "state")
    assert same_on_all(ranks(2, resume_average, kind, folder))
    with pytest.raises(RanksError, match="has shards of 2 processes, and 1 load it"):
        ranks(1, resume_average, "", folder, "load")


def resume_registered_optimizer(kind: str, folder: str) -> bool:
    accelerator = accelerator_of(kind)
    torch.manual_seed(0)
    model = accelerator.prepare(torch.nn.Linear(3, 5))
    optimizer = torch.optim.AdamW(model.parameters())
    accelerator.register_for_checkpointing(optimizer)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    before = [local_part(state["exp_avg"]).clone() for state in optimizer.state.values()]
    accelerator.save_state(folder)
    for state in optimizer.state.values():
        state["exp_avg"].zero_()
    accelerator.load_state(folder)
    after = [local_part(state["exp_avg"]) for state in optimizer.state.values()]
    return all(torch.equal(now, old) for now, old in zip(after, before, strict=True))


@pytest.mark.parametrize("kind", ["1", "2"])
def test_a_registered_optimizer_keeps_the_state_of_each_rank(
    ranks: RankServer, tmp_path: Path, kind: str
) -> None:
    """FSDP2 put rank 0's moments on all ranks; FSDP1 could not load what it had saved."""
    assert same_on_all(ranks(2, resume_registered_optimizer, kind, str(tmp_path / "state")))


def save_by_functions_of_torch(options: dict[str, Any]) -> dict[str, Any]:
    """Train and read the weights as programs of 1.x do that use torch's class."""
    from torch.distributed.fsdp import (
        FullOptimStateDictConfig,
        FullStateDictConfig,
        FullyShardedDataParallel,
        StateDictType,
    )

    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    accelerator = Accelerator(cpu=True, fsdp_plugin=FullyShardedDataParallelPlugin(**options))
    model = tiny()
    model, optimizer = accelerator.prepare(model, adamw(model))
    accelerator.backward(loss_of(model, next(batches(1))))
    optimizer.step()
    configs = FullStateDictConfig(rank0_only=False), FullOptimStateDictConfig(rank0_only=False)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT, *configs):
        weights = model.state_dict()
        moments = FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"]
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        seen = {name: p.detach().clone() for name, p in model.named_parameters()}
    assert isinstance(model, FullyShardedDataParallel)
    return {
        "weights": {name: value.clone() for name, value in weights.items()},
        "seen": {name.replace("_fsdp_wrapped_module.", ""): value for name, value in seen.items()},
        "moments": len(moments),
    }


@pytest.mark.parametrize(
    "options", [{"sharding_strategy": "FULL_SHARD"}, {"use_orig_params": True, "sync_module_states": True}]
)
def test_a_program_for_fsdp1_that_gives_no_version(ranks: RankServer, options: dict[str, Any]) -> None:
    """Its calls of torch's class read the whole weights of the one model."""
    result = same_on_all(ranks(2, save_by_functions_of_torch, options))
    model = tiny()
    optimizer = adamw(model)
    loss_of(model, next(batches(1))).backward()
    optimizer.step()
    for name, value in model.named_parameters():
        torch.testing.assert_close(result["weights"][name], value.detach(), rtol=0, atol=1e-5)
        torch.testing.assert_close(result["seen"][name], value.detach(), rtol=0, atol=1e-5)
    assert result["moments"] == len(optimizer.state)


def train_as_launched() -> tuple[str, bool, str, float]:
    from torch.distributed.fsdp import FullyShardedDataParallel

    from accelerate import Accelerator

    accelerator = Accelerator()
    model = tiny()
    model, optimizer = accelerator.prepare(model, adamw(model))
    loss = loss_of(model, next(batches(1)))
    accelerator.backward(loss)
    optimizer.step()
    plugin = accelerator.state.fsdp_plugin
    is_wrapped = isinstance(model, FullyShardedDataParallel)
    return type(accelerator.strategy).name, is_wrapped, type(plugin.cpu_offload).__name__, loss.item()


def test_a_launch_with_options_of_fsdp1_and_no_version(ranks: RankServer) -> None:
    """By variables alone, as from a file that was written for 1.x, in another precision and offloaded."""
    told = {
        "ACCELERATE_USE_FSDP": "true", "ACCELERATE_USE_CPU": "true", "ACCELERATE_MIXED_PRECISION": "bf16",
        "FSDP_BACKWARD_PREFETCH": "BACKWARD_PRE", "FSDP_OFFLOAD_PARAMS": "true",
    }  # fmt: skip
    name, is_wrapped, offload, loss = same_on_all(ranks(2, train_as_launched, env=told))
    assert (name, is_wrapped, offload) == ("fsdp1", True, "CPUOffload")
    assert loss == pytest.approx(loss_of(tiny(), next(batches(1))).item(), rel=0.02)
