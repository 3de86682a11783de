"""How much memory a model takes: loaded in a number format, and trained, part by part and for each rank.

Arithmetic over the sizes of a model that is never loaded. What is counted, with its sources:

- A rule of thumb for training with Adam, batch size 1 and no activations (``rule``): weights once, gradients
  once, the optimizer's step four times the model; under a 16-bit format half of that.
- Everything that a rank holds during a step (``training``): weights, gradients and optimizer state by their
  shapes, exactly; copies that a precision or strategy makes; activations as a forward on empty tensors shows
  them (``trace.py``), or else by a formula (``activations.py``).
- What a strategy divides among the ranks: the stages of Rajbhandari et al. 2020, "ZeRO", section 5.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from accelerate.core.errors import SettingError, UnknownNameError
from accelerate.core.units import show_bytes
from accelerate.offload.estimate.activations import (
    RECOMPUTE,
    Layers,
    activations,
    inside,
    recomputed,
)

if TYPE_CHECKING:
    from torch import nn

    from accelerate.offload.estimate.trace import Kept

# Bits of one number. The names of the formats that a table may have a row for.
BITS = {
    "float32": 32,
    "float16": 16,
    "bfloat16": 16,
    "float8": 8,
    "fp8": 8,
    "int8": 8,
    "int4": 4,
}
USUAL = ("float32", "float16", "int8", "int4")
TRAINED = ("float32", "float16", "bfloat16")  # formats in which gradients are numbers worth having
MIXED = {"no": None, "fp16": 2, "bf16": 2}  # bytes of the copies in which a forward computes
# How much each rank holds a part of: 1 optimizer state, 2 gradients too, 3 weights too.
STRATEGIES = {"single": 0, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}
PAPER = "Korthikanti et al. 2022"
PARTS = ("weights", "gradients", "optimizer", "copies", "activations")
_BLOCK = 256  # numbers that share a scale, in optimizers of 8 bits (Dettmers et al. 2022)
_SMALL = 4096  # parameters with fewer numbers keep 32 bits there


@dataclass(frozen=True)
class Facts:
    """What is counted of a model, in float32.

    Attributes:
        name: what was asked for.
        kind: its class.
        shapes: of every parameter, tied ones once, with whether it is trained.
        buffers: bytes of the buffers, as they are.
        largest: bytes of the largest layer that is not split between devices, and its names.
        block: numbers of the largest block, which is gathered by itself where weights are cut; 0: not known.
        rest: numbers outside of all blocks.
        matrices: numbers that tensor parallelism divides; 0 where the model does not say how.
        layers: what the formula of activations needs; None where a model is no stack of transformer blocks.
    """

    name: str
    kind: str
    shapes: tuple[tuple[tuple[int, ...], bool], ...]
    buffers: int = 0
    largest: tuple[int, tuple[str, ...]] = (0, ())
    block: int = 0
    rest: int = 0
    matrices: int = 0
    layers: Layers | None = None

    @property
    def parameters(self) -> int:
        """How many numbers the parameters have."""
        return sum(math.prod(shape) for shape, _ in self.shapes)

    @property
    def trained(self) -> list[tuple[int, ...]]:
        """Shapes of the parameters that get gradients."""
        return [shape for shape, wanted in self.shapes if wanted]

    def total(self, dtype: str = "float32") -> int:
        """Bytes of the model in a number format, as 1.x counts: all of it becomes that narrow."""
        return math.ceil((4 * self.parameters + self.buffers) * bits(dtype) / 32)


def bits(dtype: str) -> int:
    """Bits of one number of that format.

    Raises:
        UnknownNameError: no such format.
    """
    if dtype not in BITS:
        raise UnknownNameError("dtype", dtype, BITS)
    return BITS[dtype]


def facts_of(model: nn.Module, name: str) -> Facts:
    """Counts a model; floating point weights count as float32, whatever they are kept in."""
    from accelerate.offload.estimate.activations import layers_of

    model = model.float()
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    shapes = tuple((tuple(p.shape), p.requires_grad) for p in model.parameters())
    block, rest = _blocks(model)
    return Facts(
        name,
        type(model).__name__,
        shapes,
        buffers,
        _largest(model),
        block,
        rest,
        _divisible(model),
        layers_of(model),
    )


def _blocks(model: nn.Module) -> tuple[int, int]:
    """Numbers of the largest of the blocks that a model names as not to be split, and of what is around."""
    told = {name for part in model.modules() for name in getattr(part, "_no_split_modules", None) or ()}
    blocks = [part for part in model.modules() if type(part).__name__ in told]
    inside = {parameter for part in blocks for parameter in part.parameters()}
    sizes = [sum(parameter.numel() for parameter in part.parameters()) for part in blocks]
    rest = sum(parameter.numel() for parameter in model.parameters() if parameter not in inside)
    return (max(sizes), rest) if sizes else (0, 0)


def _divisible(model: nn.Module) -> int:
    """Numbers of the matrices that the model's own plan of tensor parallelism cuts."""
    plan: Any = getattr(model, "_tp_plan", None) or getattr(
        getattr(model, "config", None), "base_model_tp_plan", None
    )
    if not isinstance(plan, dict):
        return 0
    cut = [name for name, style in plan.items() if "colwise" in str(style) or "rowwise" in str(style)]
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    found = set[Any]()
    for name, module in model.named_modules():
        generic = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        if generic in cut or generic.removeprefix(prefix) in cut:
            found |= set(module.parameters())
    return sum(parameter.numel() for parameter in found)


def _largest(model: nn.Module) -> tuple[int, tuple[str, ...]]:
    from accelerate.offload.measure import calculate_maximum_sizes

    _, (size, names) = calculate_maximum_sizes(model)
    return int(size), tuple(names)


# ---------------------------------------------------------------- the rule of thumb


def rule(size: int, dtype: str = "float32") -> dict[str, int]:
    """Bytes that training with Adam takes, batch size 1, activations left out.

    Args:
        size: bytes of the model in float32.
        dtype: the format in which it computes. Under a 16-bit one the weights stay in float32.

    Returns:
        What is in memory with the model, the gradients, in the backward pass and in the optimizer's step;
        -1 for each where nothing is known about the format.
    """
    if bits(dtype) == 32:
        return {"model": size, "gradients": size, "backward": 2 * size, "step": 4 * size}
    if bits(dtype) == 16:
        return {"model": size, "gradients": size + size // 2, "backward": 2 * size, "step": 2 * size}
    return {"model": -1, "gradients": -1, "backward": -1, "step": -1}


# ---------------------------------------------------------------- training


def _moments(count: int) -> Callable[[tuple[int, ...], int], int]:
    """State of as many tensors as the parameter has, in its format."""
    return lambda shape, size: count * math.prod(shape) * size


def _factored(shape: tuple[int, ...], size: int) -> int:
    """A mean for each row and one for each column (Shazeer and Stern 2018); vectors are kept whole."""
    if len(shape) < 2:
        return math.prod(shape) * size
    *outer, rows, columns = shape
    return math.prod(outer) * (rows + columns) * size


def _eight_bits(shape: tuple[int, ...], size: int) -> int:
    """Two moments of one byte, and a scale for each block; small parameters keep 32 bits."""
    count = math.prod(shape)
    return 2 * (count + 4 * math.ceil(count / _BLOCK)) if count >= _SMALL else 8 * count


# Bytes of the state of one parameter, from its shape and the bytes of one number.
OPTIMIZERS: dict[str, Callable[[tuple[int, ...], int], int]] = {
    "adamw": _moments(2),
    "adam": _moments(2),
    "sgd": _moments(0),
    "sgd-momentum": _moments(1),
    "adagrad": _moments(1),
    "rmsprop": _moments(1),
    "lion": _moments(1),
    "adafactor": _factored,
    "8bit-adam": _eight_bits,
    "8bit-adamw": _eight_bits,
}


@dataclass(frozen=True)
class Training:
    """How a model is trained.

    Attributes:
        dtype: the format of weights and gradients.
        mixed_precision: ``fp16`` or ``bf16``: weights are float32, a forward computes with copies of 16 bits.
        optimizer: its kind, a name of ``OPTIMIZERS``.
        batch: samples of one rank in one forward.
        length: tokens of a sample; None leaves activations out.
        recompute: ``none``, ``selective`` (products of attention) or ``full`` (everything within a block).
        attention: ``fused`` keeps no scores; ``eager`` keeps them.
        strategy: a name of ``STRATEGIES``.
        num_processes: ranks.
        shard: ranks that share one copy of what is divided; None: all of them.
        tensor: ranks that share each layer.
        keeps: whole weights stay between forward and backward, where they are divided.
        offload: what is divided rests in the memory of the host.
        accumulation: micro-batches of a step, of which only the last reduces gradients.
    """

    dtype: str = "float32"
    mixed_precision: str = "no"
    optimizer: str = "adamw"
    batch: int = 1
    length: int | None = None
    recompute: str = "none"
    attention: str = "fused"
    strategy: str = "single"
    num_processes: int = 1
    shard: int | None = None
    tensor: int = 1
    keeps: bool = False
    offload: bool = False
    accumulation: int = 1

    def __post_init__(self) -> None:
        known: tuple[tuple[str, str, Iterable[str]], ...] = (
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("strategy", self.strategy, STRATEGIES),
            ("mixed precision", self.mixed_precision, MIXED),
            ("recomputation", self.recompute, RECOMPUTE),
            ("attention", self.attention, ("fused", "eager")),
        )
        for sort, name, names in known:
            if name not in names:
                raise UnknownNameError(sort, name, names)
        bits(self.dtype)
        if self.dtype not in TRAINED:
            why = f"gradients are computed in one of {', '.join(TRAINED)}"
            raise SettingError(f"a model is not trained in {self.dtype}", why=why)
        for name, value in (
            ("batch", self.batch),
            ("length", self.length),
            ("num_processes", self.num_processes),
            ("accumulation", self.accumulation),
        ):
            if value is not None and value < 1:
                raise SettingError(f"{name} is {value}", why="it is at least 1")
        if self.strategy == "single" and self.num_processes > 1:
            what = f"{self.num_processes} processes under the strategy 'single'"
            raise SettingError(what, fix=f"--strategy {' or '.join(list(STRATEGIES)[1:])}")

    @property
    def narrow_weights(self) -> bool:
        """Whether mixed precision keeps weights in 16 bits, and those in float32 with the optimizer."""
        return self.strategy.startswith("zero")

    @property
    def keeps_whole_gradients(self) -> bool:
        """Whether gradients that are divided are whole until the last micro-batch: engines divide each."""
        return self.accumulation > 1 and self.strategy == "fsdp"

    @property
    def title(self) -> str:
        """The format in words: ``float32``, ``float32 + bf16``."""
        return self.dtype if self.mixed_precision == "no" else f"float32 + {self.mixed_precision}"


@dataclass(frozen=True)
class Bill:
    """Bytes of one rank, part by part; see ``training``. ``host`` is in the memory of its machine.

    ``waiting`` is what of ``gradients`` there is only because they wait for the last micro-batch.
    """

    training: Training
    weights: int
    gradients: int
    optimizer: int
    copies: int
    activations: int
    notes: tuple[str, ...] = field(default=(), compare=False)
    host: int = 0
    waiting: int = 0

    @property
    def parts(self) -> dict[str, int]:
        """The parts by name."""
        return {name: getattr(self, name) for name in PARTS}

    @property
    def total(self) -> int:
        """Everything at once: what a rank needs when gradients are kept between micro-batches."""
        return sum(self.parts.values())

    def plain(self) -> dict[str, Any]:
        """For JSON."""
        return {**asdict(self.training), **self.parts, "total": self.total, "notes": list(self.notes)}


def training(facts: Facts, how: Training, kept: Kept | str | None = None) -> Bill:
    """What one rank holds during a training step.

    ``weights`` (with buffers), ``gradients`` and ``optimizer`` are exact sums over the parameters. ``copies``
    are 16-bit copies of the weights, blocks gathered from the other ranks, buckets of gradients on their way.
    ``activations`` is what autograd saves. Left out: what kernels and the optimizer's step take for a moment,
    the caching allocator's reserve, and the device's own context.

    Args:
        facts: the model.
        how: its training.
        kept: what a forward keeps (``trace.kept``), or why that is not known; then a formula counts.
    """
    stage, mixed = STRATEGIES[how.strategy], MIXED[how.mixed_precision]
    ranks = how.shard or how.num_processes // how.tensor
    size = 4 if mixed else bits(how.dtype) // 8
    part = _of_layers(facts, how.tensor)
    trained = sum(map(math.prod, facts.trained)) * part
    state = sum(OPTIMIZERS[how.optimizer](shape, size) for shape in facts.trained) * part
    weights, gradients = facts.parameters * size * part, trained * size
    if mixed and how.narrow_weights:
        # Both in 16 bits; float32 weights belong to the optimizer (ZeRO, section 3.1).
        weights, gradients, state = facts.parameters * mixed * part, trained * mixed, state + 4 * trained
    share = [
        math.ceil(bytes / ranks) if stage >= least else math.ceil(bytes)
        for bytes, least in ((weights, 3), (gradients, 2), (state, 1))
    ]
    saved, note = _saved(facts, how, mixed or size, kept)
    casts = None if kept is None or isinstance(kept, str) else kept.casts
    copies = _copies(facts, how, math.ceil(gradients), casts)
    notes = (note,) if how.tensor == 1 else (note, _OF_LAYERS)
    rests, here = (sum(share), [0, 0, 0]) if how.offload else (0, share)
    # They are there until the last micro-batch, and what they are reduced to is there from then on.
    waits = max(math.ceil(gradients) - here[1], 0) if how.keeps_whole_gradients else 0
    return Bill(how, here[0] + facts.buffers, here[1] + waits, here[2], copies, saved, notes, rests, waits)


_OF_LAYERS = "of activations, those inside of attention and MLP are divided by tensor parallelism"


def _of_layers(facts: Facts, ranks: int) -> float:
    """Which part of all numbers one of the ranks has that share each layer."""
    return 1 - facts.matrices * (1 - 1 / ranks) / max(facts.parameters, 1)


def _saved(facts: Facts, how: Training, size: int, kept: Kept | str | None) -> tuple[int, str]:
    """Bytes of activations of one rank, and how they are known."""
    found, note = _saved_whole(facts, how, size, kept)
    if how.tensor == 1 or facts.layers is None:
        return found, note
    inner = inside(facts.layers, size)
    return math.ceil(found * (1 - inner * (1 - 1 / how.tensor))), note


def _saved_whole(facts: Facts, how: Training, size: int, kept: Kept | str | None) -> tuple[int, str]:
    """The same where nothing is divided."""
    layers = facts.layers
    if how.length is None:
        return 0, "activations are left out: --length says how many tokens a sample has"
    formula = None
    if layers is not None:
        formula = activations(layers, how.batch, how.length, size, how.recompute, how.attention)
    if kept is not None and not isinstance(kept, str):
        said = f"; the formula of {PAPER} says {show_bytes(formula)}" if formula is not None else ""
        again = "recomputed " if how.recompute == "full" else ""
        note = f"{again}activations: what a forward on empty tensors saves for the backward{said}"
        if how.recompute != "full":
            return kept.activations, note
        if layers is not None:
            return recomputed(layers, how.batch, how.length, size, kept.activations), note
    why = kept if isinstance(kept, str) else "no forward was traced"
    if formula is None:
        return 0, f"activations are left out: {why}"
    return formula, f"activations by the formula of {PAPER}: {why}"


def _copies(facts: Facts, how: Training, gradients: int, casts: int | None) -> int:
    """Bytes of what a step has besides.

    Args:
        gradients: bytes of those of one rank, before they are divided.
        casts: copies of weights that autocast makes, where a trace has counted them.
    """
    stage, mixed = STRATEGIES[how.strategy], MIXED[how.mixed_precision]
    if stage == 3:
        return _gathered(facts, how)
    cast = 0
    if mixed and not how.narrow_weights:
        cast = facts.parameters * mixed if casts is None else casts
    # Gradients are copied into buckets, unless they are views of them.
    return math.ceil(cast * _of_layers(facts, how.tensor)) + (gradients if how.strategy == "ddp" else 0)


def _gathered(facts: Facts, how: Training) -> int:
    """Bytes of weights that are whole for a while, and of their gradients on the way to their owners.

    The rest around the blocks is whole from the beginning to the end. Of blocks there are two, the one that
    computes and the next, and the gradients of one, as computed and as they are reduced (in float32 under
    mixed precision).
    """
    mixed = MIXED[how.mixed_precision]
    size = mixed or bits(how.dtype) // 8
    if not facts.block:
        return 2 * facts.largest[0] * size // 4
    part = _of_layers(facts, how.tensor)
    blocks = facts.parameters - facts.rest if how.keeps else 2 * facts.block
    reduced = 2 if how.narrow_weights else 4 if mixed else size
    return math.ceil(part * (size * (facts.rest + blocks) + (size + reduced) * facts.block))
