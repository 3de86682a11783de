"""Estimates of a model's memory: loaded in a dtype, and trained, item by item for each rank.

Arithmetic over the sizes of a model that is never loaded. What is counted, with its sources:

- A rule of thumb for training with Adam, batch size 1 and no activations (``rule``): weights once, gradients
  once, the optimizer's step four times the model; under a 16-bit format half of that.
- Everything that a rank holds during a step (``training``): weights, gradients and optimizer state by their
  shapes, exactly; copies that a precision or strategy makes; activations as a forward on fake tensors shows
  them (``activation_trace.py``), or else by a formula (``activation_formula.py``).
- What a strategy divides among the ranks: the stages of Rajbhandari et al. 2020, "ZeRO", section 5.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from accelerate.core.errors import SettingError, UnknownNameError
from accelerate.facade.estimate.activation_formula import (
    RECOMPUTE,
    BlockStack,
    TransformerShape,
    activation_bytes,
    block_stack,
    full_recompute_bytes,
    tensor_parallel_share,
    transformer_shape,
)

if TYPE_CHECKING:
    from torch import nn

    from accelerate.facade.estimate.activation_trace import SavedActivationBytes

# Bits of one number. The names of the formats that a table may have a row for.
BITS = {"float32": 32, "float16": 16, "bfloat16": 16, "float8": 8, "fp8": 8, "int8": 8, "int4": 4}
DEFAULT_DTYPES = ("float32", "float16", "int8", "int4")
TRAINING_DTYPES = ("float32", "float16", "bfloat16")  # formats in which gradients are numbers worth having
MIXED_PRECISION_BYTES = {"no": None, "fp16": 2, "bf16": 2}  # bytes of the copies in which a forward computes
# The ZeRO stage of each: 1 shards optimizer state, 2 gradients too, 3 weights too.
STRATEGIES = {"single": 0, "ddp": 0, "zero1": 1, "zero2": 2, "zero3": 3, "fsdp": 3}
PAPER = "Korthikanti et al. 2022"
PARTS = ("weights", "gradients", "optimizer", "copies", "activations")
_BLOCK = 256  # numbers that share a scale, in optimizers of 8 bits (Dettmers et al. 2022)
_SMALL = 4096  # parameters with fewer numbers keep 32 bits there


@dataclass(frozen=True)
class ModelSizes:
    """The sizes of a model, in float32.

    Attributes:
        name: what was asked for.
        kind: its class.
        shapes: of every parameter, tied ones once, with whether it is trained.
        buffers: bytes of the buffers, as they are.
        largest: bytes of the largest layer that is not split between devices, and its names.
        largest_block: parameters of the largest block, an FSDP unit; 0: not known.
        outside_blocks: parameters outside of all blocks.
        tensor_parallel_numbers: parameters that tensor parallelism divides; 0: no plan in the model.
        shape: for the formula of activations; None where a model is no stack of transformer blocks.
        blocks: for full recomputation; None where the configuration does not tell of a stack of blocks.
    """

    name: str
    kind: str
    shapes: tuple[tuple[tuple[int, ...], bool], ...]
    buffers: int = 0
    largest: tuple[int, tuple[str, ...]] = (0, ())
    largest_block: int = 0
    outside_blocks: int = 0
    tensor_parallel_numbers: int = 0
    shape: TransformerShape | None = None
    blocks: BlockStack | None = None

    @property
    def parameters(self) -> int:
        """The number of parameters (elements)."""
        return sum(math.prod(shape) for shape, _ in self.shapes)

    def total(self, dtype: str = "float32") -> int:
        """Return the bytes of the model in a dtype, as 1.x counts: buffers included."""
        return math.ceil((4 * self.parameters + self.buffers) * dtype_bits(dtype) / 32)


def dtype_bits(dtype: str) -> int:
    """Return the bits of one number of that format.

    Raises:
        UnknownNameError: no such format.
    """
    if dtype not in BITS:
        raise UnknownNameError("dtype", dtype, BITS)
    return BITS[dtype]


def measure_model(model: nn.Module, name: str) -> ModelSizes:
    """Measure a model; floating point weights count as float32, whatever their dtype."""
    from accelerate.offload.module_sizes import calculate_maximum_sizes, no_split_classes

    model = model.float()
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    shapes = tuple((tuple(p.shape), p.requires_grad) for p in model.parameters())
    # Of the blocks in ``_no_split_modules``: FSDP units.
    class_names = no_split_classes(model)
    blocks = [part for part in model.modules() if type(part).__name__ in class_names]
    inside = {parameter for part in blocks for parameter in part.parameters()}
    outside = sum(p.numel() for p in model.parameters() if p not in inside) if blocks else 0
    largest, names = calculate_maximum_sizes(model)[1]
    return ModelSizes(
        name,
        type(model).__name__,
        shapes,
        buffers,
        (largest, tuple(names)),
        max((sum(p.numel() for p in part.parameters()) for part in blocks), default=0),
        outside,
        _count_tensor_parallel_numbers(model),
        transformer_shape(model),
        block_stack(model),
    )


def _count_tensor_parallel_numbers(model: nn.Module) -> int:
    """Return the parameters that the model's own tensor parallel plan divides."""
    plan: Any = getattr(model, "_tp_plan", None) or getattr(
        getattr(model, "config", None), "base_model_tp_plan", None
    )
    if not isinstance(plan, dict):
        return 0
    cut = [name for name, style in plan.items() if "colwise" in str(style) or "rowwise" in str(style)]
    prefix = f"{getattr(model, 'base_model_prefix', '')}."
    parameters = set[Any]()
    for name, module in model.named_modules():
        generic = re.sub(r"\.\d+(?=\.|$)", ".*", name)
        if generic in cut or generic.removeprefix(prefix) in cut:
            parameters |= set(module.parameters())
    return sum(parameter.numel() for parameter in parameters)


# ---------------------------------------------------------------- the rule of thumb


def rule_of_thumb(size: int, dtype: str = "float32") -> dict[str, int]:
    """Return the bytes of training with Adam, batch size 1, activations left out.

    Args:
        size: bytes of the model in float32.
        dtype: the format in which it computes. Under a 16-bit one the weights stay in float32.

    Returns:
        What is in memory with the model, the gradients, in the backward pass and in the optimizer's step;
        -1 for each where nothing is known about the format.
    """
    if dtype_bits(dtype) == 32:
        return {"model": size, "gradients": size, "backward": 2 * size, "step": 4 * size}
    if dtype_bits(dtype) == 16:
        return {"model": size, "gradients": size + size // 2, "backward": 2 * size, "step": 2 * size}
    return {"model": -1, "gradients": -1, "backward": -1, "step": -1}


# ---------------------------------------------------------------- training


def _full_moments(count: int) -> Callable[[tuple[int, ...], int], int]:
    """Return a rule for ``count`` state tensors of the parameter's shape and dtype."""
    return lambda shape, size: count * math.prod(shape) * size


def _factored_moments(shape: tuple[int, ...], size: int) -> int:
    """Return one mean for each row and column (Shazeer and Stern 2018); vectors are kept whole."""
    if len(shape) < 2:
        return math.prod(shape) * size
    *outer, rows, columns = shape
    return math.prod(outer) * (rows + columns) * size


def _eight_bit_moments(shape: tuple[int, ...], size: int) -> int:
    """Return two moments of one byte, and a scale for each block; small parameters keep 32 bits."""
    count = math.prod(shape)
    return 2 * (count + 4 * math.ceil(count / _BLOCK)) if count >= _SMALL else 8 * count


# Bytes of the optimizer state of one parameter, from its shape and the bytes of one number.
OPTIMIZERS: dict[str, Callable[[tuple[int, ...], int], int]] = {
    "adamw": _full_moments(2),
    "adam": _full_moments(2),
    "sgd": _full_moments(0),
    "sgd-momentum": _full_moments(1),
    "adagrad": _full_moments(1),
    "rmsprop": _full_moments(1),
    "lion": _full_moments(1),
    "adafactor": _factored_moments,
    "8bit-adam": _eight_bit_moments,
    "8bit-adamw": _eight_bit_moments,
}


def model_state_bytes(
    parameters: Iterable[tuple[tuple[int, ...], int, bool]], optimizer: str
) -> tuple[int, int, int]:
    """Return the bytes of weights, of gradients and of optimizer state.

    Args:
        parameters: shape, bytes of one number, and whether it is trained.
        optimizer: its kind, a name of ``OPTIMIZERS``.
    """
    weights = gradients = state = 0
    for shape, size, is_trained in parameters:
        weights += math.prod(shape) * size
        if is_trained:
            gradients += math.prod(shape) * size
            state += OPTIMIZERS[optimizer](shape, size)
    return weights, gradients, state


@dataclass(frozen=True)
class MemoryEstimateConfig:
    """The set-up of a training: dtype, optimizer, batch, strategy.

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
        shard: ranks of a shard group; None: all of them.
        tensor: tensor parallel ranks.
        keeps: unsharded parameters stay between forward and backward, where weights are sharded.
        offload: sharded parameters, gradients and optimizer state are in host memory (CPU offload).
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
        choices: tuple[tuple[str, str, Iterable[str]], ...] = (
            ("optimizer", self.optimizer, OPTIMIZERS),
            ("strategy", self.strategy, STRATEGIES),
            ("mixed precision", self.mixed_precision, MIXED_PRECISION_BYTES),
            ("recomputation", self.recompute, RECOMPUTE),
            ("attention", self.attention, ("fused", "eager")),
        )
        for sort, name, names in choices:
            if name not in names:
                raise UnknownNameError(sort, name, names)
        dtype_bits(self.dtype)
        if self.dtype not in TRAINING_DTYPES:
            reason = f"gradients are computed in one of {', '.join(TRAINING_DTYPES)}"
            raise SettingError(f"a model is not trained in {self.dtype}", why=reason)
        for name, value in (
            ("batch", self.batch),
            ("length", self.length),
            ("num_processes", self.num_processes),
            ("accumulation", self.accumulation),
        ):
            if value is not None and value < 1:
                raise SettingError(f"{name} is {value}", why="it is at least 1")
        if self.strategy == "single" and self.num_processes > 1:
            message = f"{self.num_processes} processes under the strategy 'single'"
            raise SettingError(message, fix=f"--strategy {' or '.join(list(STRATEGIES)[1:])}")

    @property
    def narrow_weights(self) -> bool:
        """True when mixed precision keeps weights in 16 bits, and float32 weights with the optimizer."""
        return self.strategy.startswith("zero")

    @property
    def keeps_whole_gradients(self) -> bool:
        """True when gradients stay unsharded until the last micro-batch; DeepSpeed reduces each."""
        return self.accumulation > 1 and self.strategy == "fsdp"

    @property
    def title(self) -> str:
        """The dtype in words: ``float32``, ``float32 + bf16``."""
        return self.dtype if self.mixed_precision == "no" else f"float32 + {self.mixed_precision}"


@dataclass(frozen=True)
class RankMemoryEstimate:
    """The bytes of one rank, item by item; see ``estimate_training``. ``host`` is in host memory.

    ``unreduced`` is the part of ``gradients`` that waits for the last micro-batch.
    """

    training: MemoryEstimateConfig
    weights: int
    gradients: int
    optimizer: int
    copies: int
    activations: int
    notes: tuple[str, ...] = field(default=(), compare=False)
    host: int = 0
    unreduced: int = 0

    @property
    def parts(self) -> dict[str, int]:
        """The bytes by the name of the item."""
        return {name: getattr(self, name) for name in PARTS}

    @property
    def total(self) -> int:
        """The sum of all items: the peak when gradients are kept between micro-batches."""
        return sum(self.parts.values())

    def as_json(self) -> dict[str, Any]:
        """Return the estimate as a dict for JSON."""
        return {**asdict(self.training), **self.parts, "total": self.total, "notes": list(self.notes)}


def estimate_training(
    facts: ModelSizes, how: MemoryEstimateConfig, kept: SavedActivationBytes | str | None = None
) -> RankMemoryEstimate:
    """Estimate the memory of one rank during a training step.

    ``weights`` (with buffers), ``gradients`` and ``optimizer`` are exact sums over the parameters. ``copies``
    are 16-bit copies of the weights, blocks after an all-gather, buckets of gradients being reduced.
    ``activations`` is what autograd saves. Left out: what kernels and the optimizer's step take for a moment,
    the caching allocator's reserve, and the device's own context.

    Args:
        facts: the model.
        how: its training.
        kept: the traced activations (``trace_saved``), or why they are unknown; then a formula counts.
    """
    stage, mixed = STRATEGIES[how.strategy], MIXED_PRECISION_BYTES[how.mixed_precision]
    ranks = how.shard or how.num_processes // how.tensor
    size = 4 if mixed else dtype_bits(how.dtype) // 8
    part = _tensor_parallel_fraction(facts, how.tensor)
    rows = ((shape, size, is_trained) for shape, is_trained in facts.shapes)
    weights, gradients, state = (count * part for count in model_state_bytes(rows, how.optimizer))
    if mixed and how.narrow_weights:
        # Both in 16 bits; float32 weights are optimizer state (ZeRO, section 3.1).
        trained = gradients / size
        weights, gradients, state = weights / size * mixed, trained * mixed, state + 4 * trained
    share = [
        math.ceil(bytes / ranks) if stage >= least else math.ceil(bytes)
        for bytes, least in ((weights, 3), (gradients, 2), (state, 1))
    ]
    saved, note = _estimate_activations(facts, how, mixed or size, kept)
    if how.tensor > 1 and facts.shape is not None:
        saved = math.ceil(
            saved * (1 - tensor_parallel_share(facts.shape, mixed or size) * (1 - 1 / how.tensor))
        )
    casts = None if kept is None or isinstance(kept, str) else kept.casts
    copies = _estimate_copies(facts, how, math.ceil(gradients), casts)
    notes = (note,) if how.tensor == 1 else (note, _OF_LAYERS)
    layers = facts.shape
    if saved and how.attention == "fused" and not mixed and size == 4 and layers is not None:
        notes += (_NO_FUSED_KERNEL,) if layers.kv_heads < layers.heads else ()
    rests, on_device = (sum(share), [0, 0, 0]) if how.offload else (0, share)
    # Unreduced gradients are there until the last micro-batch, the sharded ones from then on.
    waits = max(math.ceil(gradients) - on_device[1], 0) if how.keeps_whole_gradients else 0
    return RankMemoryEstimate(
        how,
        on_device[0] + facts.buffers,
        on_device[1] + waits,
        on_device[2],
        copies,
        saved,
        notes,
        rests,
        waits,
    )


# Measured on one H200, torch 2.11: 229.0 MB, where "fused" gives 178.6 and "eager" 224.6 (tests/gpu).
_NO_FUSED_KERNEL = (
    "torch has no fused attention in float32 for fewer heads of keys than of queries: --attention eager "
    "counts the scores"
)
_OF_LAYERS = "of activations, those inside of attention and MLP are divided by tensor parallelism"


def _tensor_parallel_fraction(facts: ModelSizes, ranks: int) -> float:
    """Return the fraction of all parameters that one tensor parallel rank has."""
    return 1 - facts.tensor_parallel_numbers * (1 - 1 / ranks) / max(facts.parameters, 1)


def _estimate_activations(
    facts: ModelSizes, how: MemoryEstimateConfig, size: int, kept: SavedActivationBytes | str | None
) -> tuple[int, str]:
    """Return the bytes of activations without tensor parallelism, and how they were counted."""
    layers = facts.shape
    if how.length is None:
        return 0, "activations are left out: --length says how many tokens a sample has"
    formula = None
    if layers is not None:
        formula = activation_bytes(layers, how.batch, how.length, size, how.recompute, how.attention)
    if kept is not None and not isinstance(kept, str):
        formula_note = ""
        if formula is not None and how.recompute != "full" and kept.activations:
            formula_note = f" (the formula of {PAPER} gives {100 * formula / kept.activations:.0f} %)"
        again = "recomputed " if how.recompute == "full" else ""
        note = f"{again}activations: what a forward on empty tensors saves for the backward{formula_note}"
        if how.recompute != "full":
            return kept.activations, note
        if facts.blocks is None:
            return kept.activations, "activations without recomputation: the model's blocks are not known"
        return full_recompute_bytes(facts.blocks, how.batch, how.length, size, kept.activations), note
    reason = kept if isinstance(kept, str) else "no forward was traced"
    if formula is None:
        return 0, f"activations are left out: {reason}"
    return formula, f"activations by the formula of {PAPER}: {reason}"


def _estimate_copies(facts: ModelSizes, how: MemoryEstimateConfig, gradients: int, casts: int | None) -> int:
    """Return the bytes of copies during a step.

    Args:
        gradients: bytes of those of one rank, before they are divided.
        casts: copies of weights that autocast makes, where a trace has counted them.
    """
    stage, mixed = STRATEGIES[how.strategy], MIXED_PRECISION_BYTES[how.mixed_precision]
    if stage == 3:
        return _estimate_all_gathered(facts, how)
    cast = 0
    if mixed and not how.narrow_weights:
        cast = facts.parameters * mixed if casts is None else casts
    # Gradients are copied into buckets, unless they are views of them.
    return math.ceil(cast * _tensor_parallel_fraction(facts, how.tensor)) + (
        gradients if how.strategy == "ddp" else 0
    )


def _estimate_all_gathered(facts: ModelSizes, how: MemoryEstimateConfig) -> int:
    """Return the bytes of unsharded weights, and of their gradients until the reduce-scatter.

    Parameters outside of the blocks stay unsharded for the whole step. Of blocks there are two, the one that
    computes and the next, and the gradients of one, as computed and as they are reduced (in float32 under
    mixed precision).
    """
    mixed = MIXED_PRECISION_BYTES[how.mixed_precision]
    size = mixed or dtype_bits(how.dtype) // 8
    if not facts.largest_block:
        return 2 * facts.largest[0] * size // 4
    part = _tensor_parallel_fraction(facts, how.tensor)
    blocks = facts.parameters - facts.outside_blocks if how.keeps else 2 * facts.largest_block
    reduced = 2 if how.narrow_weights else 4 if mixed else size
    return math.ceil(part * (size * (facts.outside_blocks + blocks) + (size + reduced) * facts.largest_block))
