"""Replicas that would drift apart are named at the first step: parameters, and the call that did it."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from accelerate.core.errors import PrepareError
from tests.support.ranks import RankServer, same_on_all

# What the rank server imports once for this module.
PRELOAD = ("deepspeed.runtime.zero.muon.muon_optimizer", "transformers.integrations.deepspeed")


class Net(nn.Module):
    """With a method that computes around the forward, and one that goes through it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body, self.head = nn.Linear(3, 4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor, whole: bool = True) -> torch.Tensor:
        hidden = torch.tanh(self.body(x))
        return self.head(hidden) if whole else hidden

    def loss(self, x: torch.Tensor) -> torch.Tensor:
        return self(x).square().mean()

    def around(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.body(x)).square().mean()


def frozen_body() -> Net:
    net = Net()
    net.body.requires_grad_(False)
    return net


class Case:
    """One training of two steps, of which the second does what ``change`` does."""

    def __init__(self, model: Net | None = None, window: int = 1, **options: Any) -> None:
        from accelerate import Accelerator, DistributedDataParallelKwargs

        self.accelerator = Accelerator(
            cpu=True,
            gradient_accumulation_steps=window,
            kwargs_handlers=[DistributedDataParallelKwargs(**options)],
        )
        self.user = model or Net()
        optimizer = torch.optim.SGD(self.user.parameters(), lr=0.1)
        self.model, self.optimizer = self.accelerator.prepare(self.user, optimizer)
        self.x = torch.full((2, 3), 1.0 + self.accelerator.process_index)

    def step(self, *losses: Callable[[], torch.Tensor]) -> list[str]:
        """Backward of each loss, and a step; what is said of it."""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for loss in losses:
                self.accelerator.backward(loss())
            self.optimizer.step()
            self.optimizer.zero_grad()
        return [str(each.message) for each in caught]

    def forward(self) -> torch.Tensor:
        return self.model.loss(self.x)

    def drifted(self) -> bool:
        """Whether the copies of the ranks differ."""
        whole = torch.cat([p.detach().flatten() for p in self.model.parameters()])
        first, second = self.accelerator.gather(whole[None])
        return not torch.equal(first, second)


def wrong() -> dict[str, tuple[list[str], list[str], list[str], bool]]:
    """Of each mistake: what is said of the step before, of the first with it, of the next; the drift."""

    def unfrozen() -> Any:
        case = Case(frozen_body())
        yield case, case.step(case.forward)
        case.model.body.requires_grad_(True)
        yield case.step(case.forward), case.step(case.forward)

    def method() -> Any:
        case = Case()
        yield case, case.step(case.forward)
        yield [case.step(lambda: case.model.around(case.x)) for _ in range(2)]

    def submodule() -> Any:
        case = Case()
        yield case, case.step(case.forward)
        yield [case.step(lambda: case.model.body(case.x).mean()) for _ in range(2)]

    def original() -> Any:
        case = Case()
        yield case, case.step(case.forward)
        yield [case.step(lambda: case.user.loss(case.x)) for _ in range(2)]

    def beside() -> Any:  # reduced, and then some that is not
        case = Case()
        yield case, case.step(case.forward)
        yield [case.step(case.forward, lambda: case.model.around(case.x)) for _ in range(2)]

    def twice() -> Any:
        case = Case()
        yield case, case.step(case.forward)
        outputs = [case.model(case.x), case.model(2 * case.x)]
        yield case.step(*(output.mean for output in outputs)), []

    def added() -> Any:
        case = Case()
        yield case, case.step(case.forward)
        case.model.extra = nn.Linear(1, 1)
        case.optimizer.add_param_group({"params": list(case.model.extra.parameters())})
        loss = lambda: case.model.extra(case.model(case.x)).mean()  # noqa: E731  # pyright: ignore[reportCallIssue]
        yield case.step(loss), case.step(loss)

    def late() -> Any:  # all of it was frozen, so there is no reducer
        net = Net().requires_grad_(False)
        case = Case(net)
        yield case, []
        case.model.requires_grad_(True)
        yield case.step(case.forward), case.step(case.forward)

    found: dict[str, tuple[list[str], list[str], list[str], bool]] = {}
    for each in (unfrozen, method, submodule, original, beside, twice, added, late):
        run = each()
        case, before = next(run)
        first, second = next(run)
        found[each.__name__] = before, first, second, case.drifted()
    return found


def test_each_mistake_is_named_at_its_first_step_and_once(ranks: RankServer) -> None:
    """G5."""
    said, silent = ranks(2, wrong)
    for name, (before, first, second, drifts) in said.items():
        assert (before, second, drifts) == ([], [], True), name
        assert len(first) == 1, (name, first)
    assert all(not any(each[:3]) for each in silent.values()), "rank 0 speaks for all"
    notes = {name: first[0] for name, (_, first, _, _) in said.items()}
    assert "gradients of body.weight, body.bias that are not averaged over 2 processes" in notes["unfrozen"]
    assert "were frozen when the model was prepared" in notes["unfrozen"]
    for name in "method", "submodule", "original", "beside", "twice":
        assert "gradients of body.weight, body.bias" in notes[name]
        assert "the backward at test_replica_drift.py:" in notes[name]
        assert "drift apart, unless the loss is computed from the weights alone" in notes[name]
    assert "head" not in notes["submodule"]
    assert "extra.weight, extra.bias, whose gradients are not reduced" in notes["added"]


def right() -> list[str]:
    """What must stay silent: windows, two models, discarded gradients, retained graphs, frozen later."""
    case = Case()
    said = case.step(case.forward)
    # A gradient of the input, for an adversarial sample: what it leaves in the parameters is dropped.
    sample = case.x.clone().requires_grad_(True)
    case.accelerator.backward(case.user(sample).mean())
    case.optimizer.zero_grad()
    said += case.step(case.forward)
    with case.accelerator.no_sync(case.model):
        case.accelerator.backward(case.forward())
    said += case.step(case.forward)
    window = Case(window=3)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(6):
            with window.accelerator.accumulate(window.model):
                window.accelerator.backward(window.forward())
                window.optimizer.step()
                window.optimizer.zero_grad()
        one, two = Case(), Case()
        for _ in range(2):
            first, second = one.forward(), two.forward()
            one.accelerator.backward(first)
            two.accelerator.backward(second)
            one.optimizer.step()
            two.optimizer.step()
        # Both models by one Accelerator, each with its own backward, in the other order.
        other = case.accelerator.prepare(Net())
        for _ in range(2):
            first, second = case.forward(), other.loss(case.x)
            case.accelerator.backward(second)
            case.accelerator.backward(first)
            case.optimizer.step()
        frozen = Case(find_unused_parameters=True)
        for _ in range(2):
            frozen.accelerator.backward(frozen.forward())
            frozen.optimizer.step()
            frozen.optimizer.zero_grad()
            frozen.model.body.requires_grad_(False)
    assert not any(each.drifted() for each in (case, window, one, two, frozen))
    return said + [str(each.message) for each in caught]


def test_training_that_does_not_drift_is_silent(ranks: RankServer) -> None:
    assert same_on_all(ranks(2, right)) == []


def averaged_by_the_program(averages: bool) -> tuple[list[str], bool]:
    """What is said of a step after a submodule was called; the program averages the gradients, or not."""
    case = Case()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            case.accelerator.backward(case.model.body(case.x).mean())
            for parameter in case.model.body.parameters() if averages else ():
                parameter.grad = case.accelerator.reduce(parameter.grad, reduction="mean")
            case.accelerator.clip_grad_norm_(case.model.parameters(), 1.0)
            case.optimizer.step()
            case.optimizer.zero_grad()
    return [str(each.message) for each in caught], case.drifted()


def test_gradients_that_the_program_averages_are_not_named(ranks: RankServer) -> None:
    assert same_on_all(ranks(2, averaged_by_the_program, True)) == ([], False)
    (said, drifts), _ = ranks(2, averaged_by_the_program, False)
    assert (len(said), drifts) == (1, True)


class TwoHeads(nn.Module):
    """An actor and a critic over one forward, as in PPO."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.actor, self.critic = nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.actor(x).square().mean(), self.critic(x).square().mean()


def two_backwards(steps_between: bool, first: int) -> tuple[list[str], bool]:
    """What is said of two backwards of one forward, each reaching a part of the model; the drift."""
    from accelerate import Accelerator

    accelerator, user = Accelerator(cpu=True), TwoHeads()
    parts = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (user.actor, user.critic)]
    model, *parts = accelerator.prepare(user, *parts)
    x = torch.full((2, 3), 1.0 + accelerator.process_index)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(3):
            losses = model(x)
            for index in (first, 1 - first):
                accelerator.backward(losses[index])
                if steps_between:
                    parts[index].step()
                    parts[index].zero_grad()
            for optimizer in [] if steps_between else parts:
                optimizer.step()
                optimizer.zero_grad()
    whole = torch.cat([p.detach().flatten() for p in model.parameters()])
    one, two = accelerator.gather(whole[None])
    return [str(each.message) for each in caught], not torch.equal(one, two)


@pytest.mark.parametrize("first", [0, 1], ids=["actor", "critic"])
def test_a_step_before_the_reducer_is_done_is_named_once(ranks: RankServer, first: int) -> None:
    (said, drifts), (silent, _) = ranks(2, two_backwards, True, first)
    part = ("actor", "critic")[first]
    assert (len(said), silent, drifts) == (1, [], True), said
    assert f"gradients of {part}.weight, {part}.bias that are not averaged" in said[0]
    assert "the backward at test_replica_drift.py:" in said[0]
    assert same_on_all(ranks(2, two_backwards, False, first)) == ([], False)


def unreached() -> list[str]:
    """What the forward after an incomplete backward says."""
    found = []
    for freeze in False, True:
        case = Case()
        if freeze:
            case.model.body.requires_grad_(False)
        case.accelerator.backward(case.forward() if freeze else case.model(case.x, whole=False).mean())
        with pytest.raises(PrepareError) as error:
            case.forward()
        found.append(str(error.value))
    return found


def test_what_a_backward_left_out_is_named_before_torch_counts_it(ranks: RankServer) -> None:
    unused, frozen = same_on_all(ranks(2, unreached))
    assert "gave no gradient to body.weight, body.bias" in frozen
    assert "since then these were frozen" in frozen
    assert "gave no gradient to head.weight, head.bias" in unused
    assert "the loss does not depend on these" in unused


def make_accelerator(kind: str) -> Any:
    """An accelerator of a strategy whose hooks are those of parameters."""
    from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig

    name, _, stage = kind.partition(" ")
    if name == "ZeRO":
        return Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=int(stage)))
    if name.startswith("fsdp"):
        plugin = FullyShardedDataParallelPlugin(fsdp_version=int(name.removeprefix("fsdp")))
        return Accelerator(cpu=True, fsdp_plugin=plugin)
    config = ParallelismConfig(**{"cp_size" if name == "cp" else "dp_replicate_size": 2})  # type: ignore[arg-type]
    return Accelerator(cpu=True, parallelism_config=config)


def go_around_the_forward(kind: str) -> list[list[float]]:
    """The weights after steps through the original object, a method, and a submodule."""
    accelerator = make_accelerator(kind)
    user = Net()
    model, optimizer = accelerator.prepare(user, torch.optim.SGD(user.parameters(), lr=0.1))
    x = torch.full((2, 3), 1.0 + accelerator.process_index)
    # Shards are refused around the forward (test_fsdp_bad_input); the user's object is the model itself.
    calls = [lambda: user.loss(x)]
    if "ZeRO" in kind:
        calls += [lambda: model.around(x), lambda: model.body(x).square().mean()]
    found = []
    for call in calls:
        accelerator.backward(call())
        optimizer.step()
        optimizer.zero_grad()
        whole = (p.full_tensor() if isinstance(p, DTensor) else p for p in model.parameters())
        found.append([value for p in whole for value in p.detach().flatten().tolist()])
    return found


@pytest.mark.parametrize("kind", ["fsdp2", "replicas", "ZeRO 1", "ZeRO 2"])
def test_calls_around_the_forward_are_reduced_where_hooks_are_those_of_parameters(
    ranks: RankServer, kind: str
) -> None:
    """G5: the gradient is the mean of the ranks."""
    weights = same_on_all(ranks(2, go_around_the_forward, kind))
    net = Net()
    losses: list[Callable[[torch.Tensor], torch.Tensor]] = [
        net.loss, net.around, lambda x: net.body(x).square().mean()
    ]  # fmt: skip
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    for loss, found in zip(losses, weights, strict=False):
        (sum(loss(torch.full((2, 3), value)) for value in (1.0, 2.0)) / 2).backward()  # type: ignore[union-attr]
        optimizer.step()
        optimizer.zero_grad()
        assert found == pytest.approx([v for p in net.parameters() for v in p.flatten().tolist()], abs=1e-6)


def reduce_by_hooks(module: nn.Module) -> None:
    """Average the gradients of a module over all ranks, as transformers does those of some adapters."""
    for parameter in module.parameters():
        average = lambda p: torch.distributed.all_reduce(p.grad, torch.distributed.ReduceOp.AVG)  # noqa: E731
        parameter.register_post_accumulate_grad_hook(average)


def add_after_prepare(kind: str, reduces: bool = False) -> tuple[list[str], str]:
    """What is said of a layer that a prepared model gets, in three steps; what the optimizer refuses."""
    accelerator = make_accelerator(kind)
    model = Net()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    x = torch.full((2, 3), 1.0 + accelerator.process_index)

    def step(module: nn.Module) -> None:
        accelerator.backward(module(model(x)).mean())
        optimizer.step()
        optimizer.zero_grad()

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step(nn.Identity())
        model.extra = nn.Linear(1, 1)
        if reduces:
            reduce_by_hooks(model.extra)
        try:
            optimizer.add_param_group({"params": list(model.extra.parameters())})
        except PrepareError as error:
            return [], str(error)
        step(model.extra)
        step(model.extra)
    return [said for each in caught if "extra" in (said := str(each.message))], ""


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2", "replicas", "cp"])
def test_parameters_that_are_added_after_sharding_are_named(ranks: RankServer, kind: str) -> None:
    """G5: their gradients are reduced no more than under DDP."""
    (first, _), (second, _) = ranks(2, add_after_prepare, kind)
    assert len(first) == 1, first
    assert "optimizer.step() of extra.weight, extra.bias, whose gradients are not reduced" in first[0]
    assert not second, "rank 0 speaks for all"


@pytest.mark.parametrize("kind", ["fsdp1", "fsdp2", "replicas"])
def test_parameters_whose_gradients_the_program_reduces_are_not_named(ranks: RankServer, kind: str) -> None:
    assert same_on_all(ranks(2, add_after_prepare, kind, True)) == ([], "")


def hooks_of_the_program() -> list[str]:
    """What is said of a model without a reducer: it is prepared for evaluation, and hooks reduce."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = accelerator.prepare_model(nn.Linear(2, 1), evaluation_mode=True)
    reduce_by_hooks(model)
    optimizer = accelerator.prepare_optimizer(torch.optim.SGD(model.parameters(), lr=0.1))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.backward(model(torch.full((1, 2), 1.0 + accelerator.process_index)).sum())
        optimizer.step()
    assert torch.equal(*accelerator.gather(model.weight.detach()))
    return [str(each.message) for each in caught]


def test_a_model_whose_gradients_the_program_reduces_is_not_named(ranks: RankServer) -> None:
    """As LoRA on a model that transformers has sharded while it loaded it."""
    assert same_on_all(ranks(2, hooks_of_the_program)) == []


@pytest.mark.parametrize("kind", ["ZeRO 1", "ZeRO 3"])
def test_deepspeed_takes_no_parameters_after_prepare(ranks: RankServer, kind: str) -> None:
    _, error = same_on_all(ranks(2, add_after_prepare, kind))
    assert "add_param_group() of an optimizer that deepspeed steps" in error


def local_of(value: torch.Tensor) -> torch.Tensor:
    return value.to_local() if isinstance(value, DTensor) else value


def made(kind: str, rate: float, momentum: bool) -> tuple[Any, Any, Any]:
    """A prepared model, with momentum from before on rank 0 only."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    more: dict[str, Any] = (
        {} if kind == "ddp" else {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=int(kind))}
    )
    accelerator = Accelerator(cpu=True, **more)
    net = Net()
    optimizer = torch.optim.SGD(net.parameters(), lr=rate, momentum=0.9)
    if momentum:
        net.loss(torch.ones(2, 3)).backward()
        optimizer.step()
        optimizer.zero_grad()
    net.load_state_dict(Net().state_dict())
    model, optimizer = accelerator.prepare(net, optimizer)
    return accelerator, model, optimizer


def loaded(kind: str, everywhere: bool) -> tuple[dict[str, torch.Tensor], list[str]]:
    from accelerate import PartialState

    first = PartialState().is_main_process
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator, model, optimizer = made(kind, 0.1, everywhere or first)
    for _ in range(2):
        accelerator.backward(model(torch.ones(2, 3)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    state = accelerator.get_state_dict(model)
    return state, [str(each.message) for each in caught if "rank 0" in str(each.message)]


@pytest.mark.parametrize("kind", ["ddp", "1", "2"])
def test_an_optimizer_state_on_rank_0_only_is_that_of_all(ranks: RankServer, kind: str) -> None:
    """G5: its state counts as its weights do."""
    (state, said), (_, silent) = ranks(2, loaded, kind, False)
    ((expected, nothing), _) = ranks(2, loaded, kind, True)
    torch.testing.assert_close(state, expected, rtol=0, atol=0)
    assert nothing == silent == []
    assert "that of rank 0 counts" in said[0]


def prepare_trained_again(kind: str) -> tuple[bool, bool, list[str]]:
    """Whether ``prepare`` leaves the momentum of this rank, whether it has some, and what is said."""
    from accelerate import Accelerator, DeepSpeedPlugin, FullyShardedDataParallelPlugin

    def momenta() -> list[torch.Tensor]:
        return [local_of(state["momentum_buffer"]).clone() for state in user.state.values()]

    plugin: dict[str, Any] = {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=1)}
    if kind != "ZeRO 1":
        version = 1 if "FSDP1" in kind else 2
        plugin = {"fsdp_plugin": FullyShardedDataParallelPlugin(fsdp_version=version, use_orig_params=False)}
    accelerator, net = Accelerator(cpu=True, **plugin), Net()
    prepared: Any = net
    if kind == "the user's FSDP2":
        torch.distributed.fsdp.fully_shard(net)
    user = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    if kind == "the user's FSDP2":
        net(torch.ones(2, 3)).square().mean().backward()
        user.step()
    else:
        prepared, optimizer = accelerator.prepare(net, user)
        accelerator.backward(prepared(torch.ones(2, 3)).square().mean())
        optimizer.step()
    if kind == "another Accelerator's FSDP1":
        accelerator, net = Accelerator(cpu=True, **plugin), prepared
    before = momenta()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.prepare(net, user)
    said = [str(each.message) for each in caught if "rank 0 counts" in str(each.message)]
    return all(map(torch.equal, before, momenta())), any(map(torch.any, before)), said


@pytest.mark.parametrize(
    "kind", ["FSDP1", "FSDP2", "ZeRO 1", "the user's FSDP2", "another Accelerator's FSDP1"]
)
def test_ranks_keep_their_shards_of_an_optimizer_state_in_prepare(ranks: RankServer, kind: str) -> None:
    assert same_on_all(ranks(2, prepare_trained_again, kind)) == (True, True, [])


def other_rate(kind: str) -> str:
    from accelerate import PartialState

    with pytest.raises(PrepareError) as error:
        made(kind, 0.1 * (1 + PartialState().process_index), False)
    return error.value.what


@pytest.mark.parametrize("kind", ["ddp", "2"])
def test_another_learning_rate_on_a_rank_is_refused(ranks: RankServer, kind: str) -> None:
    assert (
        same_on_all(ranks(2, other_rate, kind))
        == "lr of group 0 of the SGD is 0.1 on rank 0 and 0.2 on rank 1"
    )


def prepare_fewer(kind: str) -> str:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    plugin = {} if kind == "ddp" else {"fsdp_plugin": FullyShardedDataParallelPlugin()}
    accelerator = Accelerator(cpu=True, **plugin)
    model = nn.Linear(3, 2)
    optimizers = [torch.optim.SGD(model.parameters(), 0.1) for _ in range(2 - accelerator.process_index)]
    with pytest.raises(PrepareError) as error:
        accelerator.prepare(model, *optimizers)
    return error.value.what


@pytest.mark.parametrize("kind", ["ddp", "2"])
def test_another_number_of_optimizers_on_a_rank_is_refused(ranks: RankServer, kind: str) -> None:
    """It ended in an IndexError on one rank, and the other waited."""
    told = same_on_all(ranks(2, prepare_fewer, kind))
    assert told == "prepare was given 2 new optimizer(s) on rank 0 and 1 on rank 1"


def saved(folder: str) -> list[list[str]]:
    """What each save says: of equal replicas, another rate, another parameter; and when not asked to."""
    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration

    found = []
    for interval in None, 0, 2:
        project = ProjectConfiguration(**({} if interval is None else {"replica_check_interval": interval}))
        accelerator = Accelerator(cpu=True, project_config=project)
        net = Net().to(torch.bfloat16)
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1))
        for change in range(3):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                if change == 1:
                    optimizer.param_groups[0]["lr"] *= 1 + accelerator.process_index
                elif change == 2:
                    with torch.no_grad():
                        model.head.bias += accelerator.process_index * 1e-2
                accelerator.save_state(f"{folder}/{interval}-{change}")
            found.append([str(each.message) for each in caught if "drifted apart" in str(each.message)])
    return found


def save_sharded_with_other_rates(folder: str) -> list[str]:
    """What a save of a sharded model says of another learning rate."""
    accelerator, _, optimizer = made("2", 0.1, momentum=False)
    accelerator.save_state(f"{folder}/equal")
    optimizer.param_groups[0]["lr"] *= 1 + accelerator.process_index
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        accelerator.save_state(f"{folder}/other")
    return [str(each.message) for each in caught if "drifted apart" in str(each.message)]


def test_a_save_names_another_learning_rate_of_a_sharded_model(ranks: RankServer, tmp_path: Path) -> None:
    (said,), silent = ranks(2, save_sharded_with_other_rates, str(tmp_path))
    assert silent == []
    assert "the learning rate of group 0 of the SGD of rank 1 is not that of rank 0" in said


class DeviceRate(torch.Tensor):
    """A learning rate that names the device of its rank, as one on an accelerator does."""

    def __repr__(self, **kwargs: Any) -> str:  # type: ignore[override]
        return f"tensor({self.item():.4f}, device='cuda:{torch.distributed.get_rank()}')"


def save_with_rates_on_devices(folder: str) -> list[list[str]]:
    """What saves say of equal learning rates on the devices of the ranks, and of other ones."""
    from accelerate import Accelerator

    accelerator, net = Accelerator(cpu=True), Net()
    rate = torch.tensor(0.1).as_subclass(DeviceRate)
    _, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), lr=rate))
    said = []
    for change in (0.0, 1e-6):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            optimizer.param_groups[0]["lr"].add_(change * accelerator.process_index)
            accelerator.save_state(f"{folder}/{change}")
        said.append([str(each.message) for each in caught if "drifted apart" in str(each.message)])
    return said


def test_learning_rates_on_the_devices_of_the_ranks_are_compared_by_value(
    ranks: RankServer, tmp_path: Path
) -> None:
    """A warning came at each save, and a small difference was not seen."""
    said, silent = ranks(2, save_with_rates_on_devices, str(tmp_path))
    assert silent == [[], []]
    assert said[0] == []
    assert "the learning rate of group 0 of the SGD of rank 1 is not that of rank 0" in said[1][0]


def test_a_save_names_what_has_drifted(ranks: RankServer, tmp_path: Path) -> None:
    said, silent = ranks(2, saved, str(tmp_path))
    assert silent == [[]] * 9
    assert [len(each) for each in said] == [0, 1, 1, 0, 0, 0, 0, 0, 1]
    assert "the learning rate of group 0 of the SGD of rank 1 is not that of rank 0" in said[1][0]
    assert "head.bias and 1 more of rank 1" in said[2][0]
