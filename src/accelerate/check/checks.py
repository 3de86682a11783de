"""The checks of ``accelerate test``: ranks, collectives, data, precision, training, checkpoints, speed.

A check is a function that tests one thing on every rank and returns its result as one line. ``CHECKS`` holds
them in the order in which they run: later checks rely on what earlier ones test.
"""

from __future__ import annotations

import copy
import json
import shutil
import socket
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from accelerate.core import environ
from accelerate.core.errors import name_ranks
from accelerate.core.setting import load_settings
from accelerate.core.units import show_bytes
from accelerate.data.prepare import DataLoaderConfiguration
from accelerate.facade.accelerator import Accelerator
from accelerate.facade.launch_settings import PrecisionSettings
from accelerate.strategy.base import EngineStrategy
from accelerate.world import collective
from accelerate.world.local_tensor_trees import local_tensor

_FORMATS = {"no": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
_LOADER_BATCH, _LOADER_STEPS, _LOADER_EPOCHS = 4, 3, 2
_WIDTH, _BATCH, _STEPS = 8, 4, 4  # of the tiny model and its training
# Of the loss, and of a step: gradients are shorter than what a configuration clips, and steps as long.
_LOSS, _RATE = 1 / 128, 0.05 * 128
_NUMBERS = 1 << 20  # float32 values of the timed all-reduce
_REPEATS = 5

# Runs on all ranks and returns a line of text. Raises ``CheckNotApplicableError`` where it does not apply,
# ``CheckFailedError`` or any other error where it fails.
Check = Callable[[Accelerator], str]


class CheckFailedError(AssertionError):
    """A result is not the expected one."""


class CheckNotApplicableError(Exception):
    """A check does not apply to this set-up; the text says why."""


@dataclass(frozen=True)
class CheckOutcome:
    """The outcome of a check on one rank.

    Attributes:
        result: ``"ok"``, ``"failed"`` or ``"skipped"``.
        text: the result, the failure, or the reason for skipping: one line.
        trace: the traceback of a failure.
    """

    result: Literal["ok", "failed", "skipped"]
    text: str
    trace: str = ""

    def to_json(self) -> str:
        """Return the outcome as JSON, for another rank."""
        return json.dumps(asdict(self))

    @staticmethod
    def from_json(text: str) -> CheckOutcome:
        """Return the outcome of a text of ``to_json``."""
        return CheckOutcome(**json.loads(text))


def run_check(check: Check, accelerator: Accelerator) -> CheckOutcome:
    """Run a check and return its outcome; an error becomes the outcome "failed"."""
    try:
        return CheckOutcome("ok", check(accelerator))
    except CheckNotApplicableError as why:
        return CheckOutcome("skipped", str(why))
    except Exception as error:  # noqa: BLE001 (every error is shown with its rank)
        first = (str(error).splitlines() or [""])[0]
        text = first if isinstance(error, CheckFailedError) else f"{type(error).__name__}: {first}"
        return CheckOutcome("failed", text, traceback.format_exc())


def expect(condition: bool, message: str) -> None:
    """Raise CheckFailedError with ``message`` unless ``condition`` holds.

    Raises:
        CheckFailedError: the condition does not hold.
    """
    if not condition:
        raise CheckFailedError(message)


def expect_equal(actual: Any, expected: Any, label: str) -> None:
    """Raise CheckFailedError unless two plain values are equal.

    Raises:
        CheckFailedError: they differ; both are shown.
    """
    expect(actual == expected, f"{label} is {actual}, not {expected}")


# --- ranks and collectives


def check_ranks(accelerator: Accelerator) -> str:
    """Check that every rank exists once, knows the world size, and has a device of its own."""
    world = accelerator.world
    variable = environ.get("WORLD_SIZE")
    matches = variable is None or int(variable) == world.size
    expect(matches, f"WORLD_SIZE is {variable}, but the world has {world.size}")
    reports = collective.gather_object([(world.rank, world.size, socket.gethostname(), str(world.device))])
    expect_equal([rank for rank, *_ in reports], list(range(world.size)), "the list of ranks")
    expect_equal({size for _, size, *_ in reports}, {world.size}, "the size that the ranks know")
    hosts = {host for *_, host, _ in reports}
    devices = [(host, device) for *_, host, device in reports]
    # Where a process sees one device only, all of them may call theirs by the same name.
    if world.device.type != "cpu" and world.hardware.count() > 1:
        expect(len(set(devices)) == world.size, f"ranks share a device: {devices}")
    names = ", ".join(device for _, device in devices[:8]) + (", ..." if world.size > 8 else "")
    return f"{world.size} on {len(hosts)} machine{'s' if len(hosts) > 1 else ''}: {names}"


def check_gather(accelerator: Accelerator) -> str:
    """Check an all-gather of several dtypes in rank order, and of ragged rows after padding."""
    rank, size, device = accelerator.process_index, accelerator.num_processes, accelerator.device
    sent = {
        "whole": torch.arange(3, device=device) + 10 * rank,
        "real": torch.full((1, 2), rank + 0.5, device=device),
        "yes": torch.tensor([rank % 2 == 0], device=device),
    }
    gathered = accelerator.gather(sent)
    expect_equal(
        gathered["whole"].tolist(), [10 * r + i for r in range(size) for i in range(3)], "what was gathered"
    )
    expect_equal(gathered["real"].tolist(), [[r + 0.5] * 2 for r in range(size)], "what was gathered")
    expect_equal(gathered["yes"].tolist(), [r % 2 == 0 for r in range(size)], "what was gathered")
    ragged = accelerator.pad_across_processes(torch.ones(rank + 1, device=device))
    rows = accelerator.gather(ragged).reshape(size, -1).tolist()
    expect_equal(rows, [[1.0] * (r + 1) + [0.0] * (size - r - 1) for r in range(size)], "what was padded")
    return f"{len(sent)} types and ragged rows, in the order of the ranks"


def check_reduce(accelerator: Accelerator) -> str:
    """Check the all-reduced sum and mean."""
    rank, size = accelerator.process_index, accelerator.num_processes
    values = torch.tensor([1.0, float(rank)], device=accelerator.device)
    total = size * (size - 1) / 2
    expect_equal(accelerator.reduce(values, reduction="sum").tolist(), [float(size), total], "the sum")
    expect_equal(accelerator.reduce(values, reduction="mean").tolist(), [1.0, total / size], "the mean")
    return f"sum {total:g} and mean {total / size:g} of the ranks"


def check_broadcast(accelerator: Accelerator) -> str:
    """Check a broadcast from the first and from the last rank."""
    last = accelerator.num_processes - 1
    for source in sorted({0, last}):
        values = torch.full((4,), float(accelerator.process_index), device=accelerator.device)
        received = collective.broadcast(values, from_process=source)
        expect_equal(received.tolist(), [float(source)] * 4, f"what rank {source} sent")
    return "from rank 0" + (f" and from rank {last}" if last else "")


def check_objects(accelerator: Accelerator) -> str:
    """Check the gather and broadcast of Python objects."""
    rank, size = accelerator.process_index, accelerator.num_processes
    objects = collective.gather_object([{"rank": rank, "text": "x" * rank}])
    expect_equal(objects, [{"rank": r, "text": "x" * r} for r in range(size)], "the list of objects")
    sent = collective.broadcast_object_list([rank, {"rank": rank}])
    expect_equal(sent, [0, {"rank": 0}], "what rank 0 sent")
    return f"gathered from {size}, sent by rank 0"


# --- data loaders: every sample comes once in an epoch, on one rank


def check_even_epochs(accelerator: Accelerator) -> str:
    """Check epochs in which every step is full: all ranks see equally many samples."""
    count = _full_step_samples(accelerator)
    _check_coverage(Accelerator(), count)
    return f"{count} samples, each once in each of {_LOADER_EPOCHS} epochs"


def check_uneven_epochs(accelerator: Accelerator) -> str:
    """Check epochs whose last step is not full."""
    count = _full_step_samples(accelerator) + 1
    _check_coverage(Accelerator(), count)
    return f"{count} samples, the last step not full, each counted once"


def check_shuffled_epochs(accelerator: Accelerator) -> str:
    """Check that orders differ between epochs and are the same on all ranks."""
    count = _full_step_samples(accelerator) + 1
    orders = _check_coverage(Accelerator(), count, shuffle=True)
    expect(orders[0] != list(range(count)), "the order is not shuffled")
    expect(orders[0] != orders[1], "two epochs have the same order")
    return f"{count} samples, another order in each epoch"


def check_dispatched_epochs(accelerator: Accelerator) -> str:
    """Check epochs that rank 0 reads and dispatches to all ranks."""
    if accelerator.strategy.data_shard.count < accelerator.num_processes:
        raise CheckNotApplicableError("several ranks read the same samples, and rank 0 dispatches none twice")
    count = _full_step_samples(accelerator) + 1
    _check_coverage(Accelerator(dataloader_config=DataLoaderConfiguration(dispatch_batches=True)), count)
    return f"{count} samples, read by rank 0"


def _full_step_samples(accelerator: Accelerator) -> int:
    return _LOADER_BATCH * _LOADER_STEPS * accelerator.num_processes


def _check_coverage(accelerator: Accelerator, count: int, *, shuffle: bool = False) -> list[list[int]]:
    """Return the samples of each epoch in the order of ``gather_for_metrics``; each must occur once."""
    data = DataLoader(TensorDataset(torch.arange(count)), batch_size=_LOADER_BATCH, shuffle=shuffle)
    loader: Any = accelerator.prepare(data)
    orders: list[list[int]] = []
    for epoch in range(_LOADER_EPOCHS):
        seen: list[int] = []
        num_rows = 0
        for (batch,) in loader:
            expect_equal(batch.device.type, accelerator.device.type, "the device of a batch")
            num_rows += len(batch)
            seen += accelerator.gather_for_metrics(batch).tolist()
        missing, twice = set(range(count)) - {*seen}, len(seen) - len({*seen})
        expect(not missing, f"epoch {epoch} leaves out {len(missing)} of {count}: {sorted(missing)[:5]}")
        expect(not twice, f"epoch {epoch} counts {twice} of {count} samples twice")
        shares = collective.gather_object([num_rows])
        expect(len({*shares}) == 1, f"ranks have shares of different sizes: {shares}")
        if count % (_LOADER_BATCH * accelerator.num_processes) == 0:
            expect_equal(num_rows * loader.data_shard.count, count, "the number of rows in all data shards")
        orders.append(seen)
    return orders


# --- precision, and parity with a single process


def make_tiny_model() -> nn.Module:
    """Return a model that is the same on every rank."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = nn.Sequential(nn.Linear(_WIDTH, 2 * _WIDTH), nn.Tanh(), nn.Linear(2 * _WIDTH, 1))
    model._tp_plan = {"0": "colwise", "2": "rowwise"}  # as models of transformers have it
    return model


def make_samples(count: int) -> TensorDataset:
    """Return ``count`` inputs of width 8 with targets, the same on every rank."""
    draw = torch.Generator().manual_seed(1)
    inputs = torch.randn(count, _WIDTH, generator=draw)
    return TensorDataset(inputs, inputs.sum(1, keepdim=True).sin())


def check_precision(accelerator: Accelerator) -> str:
    """Check that a layer inside a forward returns the requested dtype."""
    requested = load_settings(PrecisionSettings).value.mixed_precision
    if requested is None:  # the strategy's own configuration may say it
        requested = accelerator.strategy.plugins.get("_mixed_precision", "no")
    expect_equal(accelerator.mixed_precision, requested, "the precision in use")
    if accelerator.mixed_precision not in _FORMATS:
        raise CheckNotApplicableError(f"what {accelerator.mixed_precision} does is not seen from outside")
    model, seen = make_tiny_model(), list[torch.dtype]()
    next(model.children()).register_forward_hook(lambda layer, args, output: seen.append(output.dtype))
    prepared = Accelerator().prepare(model)
    with torch.no_grad():
        prepared(torch.ones(2, _WIDTH, device=accelerator.device)).sum().item()
    dtype = _FORMATS[accelerator.mixed_precision]
    expect_equal({str(each) for each in seen}, {str(dtype)}, "the format inside a forward")
    return f"{accelerator.mixed_precision}: a layer gives {str(dtype).removeprefix('torch.')}"


def check_parity(accelerator: Accelerator) -> str:
    """Check that a tiny model trains to the same weights on all ranks and on one process alone."""
    _skip_where_configured(accelerator, "optimizer", "scheduler")
    accelerator = Accelerator()
    model = make_tiny_model()
    alone = copy.deepcopy(model).to(accelerator.device)
    window = _BATCH * accelerator.strategy.data_shard.count * accelerator.gradient_accumulation_steps
    data = make_samples(_STEPS * window)
    model, skipped = _train_prepared(accelerator, model, data)
    _train_alone(alone, data, window, skipped)
    if not accelerator.strategy.shards_params:
        local_weights = torch.cat([weight.detach().float().flatten() for weight in model.parameters()])
        rank_weights = accelerator.gather(local_weights[None])
        different = [rank for rank, row in enumerate(rank_weights) if not torch.equal(row, rank_weights[0])]
        expect(not different, f"the weights of {name_ranks(different)} are not those of rank 0")
    state = accelerator.get_state_dict(model)
    if not accelerator.is_main_process:
        return ""
    reference = alone.state_dict()
    gap = max(float((state[name].to(value) - value).abs().max()) for name, value in reference.items())
    limit = 1e-5 if accelerator.mixed_precision == "no" else 3e-2
    expect(gap <= limit, f"weights differ by {gap:.1e} from those of one process alone, more than {limit:g}")
    return f"{_STEPS} steps, weights within {max(gap, 1e-9):.0e} of those of one process alone"


def _skip_where_configured(accelerator: Accelerator, *kinds: str) -> None:
    """Skip a check that takes another optimizer or learning rate than the strategy's own configuration."""
    strategy = accelerator.strategy
    configured = strategy.configured_kinds if isinstance(strategy, EngineStrategy) else ()
    if both := [kind for kind in kinds if kind in configured]:
        raise CheckNotApplicableError(f"{strategy.name} configures {' and '.join(both)} itself")


def _train_prepared(
    accelerator: Accelerator, model: nn.Module, data: TensorDataset
) -> tuple[nn.Module, list[bool]]:
    """Train one epoch; return the prepared model and, per window, whether its step was skipped (fp16)."""
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    skipped: list[bool] = []
    model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=_BATCH))
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            accelerator.backward(_LOSS * F.mse_loss(model(inputs).float(), targets))
            optimizer.step()
            if accelerator.sync_gradients:
                skipped.append(bool(accelerator.optimizer_step_was_skipped))
            optimizer.zero_grad()
    return model, skipped


def _train_alone(model: nn.Module, data: TensorDataset, window: int, skipped: list[bool]) -> None:
    """Take the same steps in plain torch, each over the samples of all ranks."""
    optimizer = torch.optim.SGD(model.parameters(), lr=_RATE)
    device = next(model.parameters()).device
    for (inputs, targets), skip in zip(DataLoader(data, batch_size=window), skipped, strict=True):
        optimizer.zero_grad()
        (_LOSS * F.mse_loss(model(inputs.to(device)), targets.to(device))).backward()
        if not skip:
            optimizer.step()


# --- checkpoints: a loaded state equals the saved one, bit for bit


def check_checkpoint(accelerator: Accelerator) -> str:
    """Check that loading restores weights, optimizer state and random numbers."""
    if accelerator.world.nodes > 1:
        raise CheckNotApplicableError("it is not known which folder all machines share")
    _skip_where_configured(accelerator, "optimizer")
    # One rank makes the folder and removes it, also when others fail.
    own_folder = tempfile.mkdtemp(prefix="accelerate-test-") if accelerator.is_main_process else ""
    try:
        (folder,) = collective.broadcast_object_list([own_folder])
        count = _save_and_load(Accelerator(), f"{folder}/state")
        accelerator.wait_for_everyone()
    finally:
        if own_folder:
            shutil.rmtree(own_folder)
    return f"{count} tensors of weights and optimizer, and random numbers, bit for bit"


def _save_and_load(accelerator: Accelerator, folder: str) -> int:
    model = make_tiny_model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model, optimizer = accelerator.prepare(model, optimizer)
    _step(accelerator, model, optimizer)
    accelerator.save_state(folder)
    saved, drawn = [tensor.clone() for tensor in _tensors(model, optimizer)], torch.rand(3)
    _step(accelerator, model, optimizer)
    now = list(_tensors(model, optimizer))
    expect(any(not torch.equal(a, b) for a, b in zip(saved, now, strict=True)), "a step changes nothing")
    accelerator.load_state(folder)
    now = list(_tensors(model, optimizer))
    wrong = sum(not torch.equal(a, b) for a, b in zip(saved, now, strict=True))
    expect(not wrong, f"{wrong} of {len(saved)} tensors are not what was saved")
    expect(torch.equal(drawn, torch.rand(3)), "random numbers do not go on where they were")
    return len(saved)


def _step(accelerator: Accelerator, model: nn.Module, optimizer: Any) -> None:
    inputs, targets = (tensor.to(accelerator.device) for tensor in make_samples(4).tensors)
    accelerator.backward(F.mse_loss(model(inputs).float(), targets))
    optimizer.step()
    optimizer.zero_grad()


def _tensors(model: nn.Module, optimizer: Any) -> Iterator[torch.Tensor]:
    """Yield this rank's shard of every tensor."""
    # A load may have changed the order of the names.
    states = (state[name] for state in optimizer.optimizer.state.values() for name in sorted(state))
    for tensor in (*model.parameters(), *states):
        if isinstance(tensor, torch.Tensor):
            yield local_tensor(tensor.detach())


# --- speed


def measure_all_reduce(accelerator: Accelerator) -> str:
    """Measure the time of one all-reduce."""
    if accelerator.num_processes == 1:
        raise CheckNotApplicableError("one process exchanges nothing")
    values = torch.ones(_NUMBERS, device=accelerator.device)
    accelerator.reduce(values, reduction="sum")
    times: list[float] = []
    for _ in range(_REPEATS):
        accelerator.wait_for_everyone()
        began = time.perf_counter()
        accelerator.reduce(values, reduction="sum")
        accelerator.world.hardware.synchronize()
        times.append(time.perf_counter() - began)
    size = _NUMBERS * values.element_size()
    return f"the sum of {show_bytes(size)} takes {1e3 * sorted(times)[_REPEATS // 2]:.1f} ms (median)"


CHECKS: tuple[tuple[str, Check], ...] = (
    ("ranks", check_ranks),
    ("gather", check_gather),
    ("reduce", check_reduce),
    ("broadcast", check_broadcast),
    ("objects", check_objects),
    ("data, even", check_even_epochs),
    ("data, uneven", check_uneven_epochs),
    ("data, shuffled", check_shuffled_epochs),
    ("data, dispatched", check_dispatched_epochs),
    ("precision", check_precision),
    ("training", check_parity),
    ("checkpoint", check_checkpoint),
    ("speed", measure_all_reduce),
)
