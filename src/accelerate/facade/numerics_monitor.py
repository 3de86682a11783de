"""``--check_numerics``: losses and gradients that are NaN, infinite or a spike, and where they come from."""

from __future__ import annotations

import math
import weakref
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from accelerate.core import tree
from accelerate.core.errors import warn_user
from accelerate.data.batches import FetchedBatch
from accelerate.facade.preparer import PreparedObjects
from accelerate.facade.run_recorder import RunRecorder, StepCounter
from accelerate.strategy.base import Strategy
from accelerate.world.local_tensor_trees import local_tensor
from accelerate.world.world import World

# A spike is above the median of the last losses by so many standard deviations, which are estimated by the
# median absolute deviation (1.4826 of it, for a normal distribution), and by a tenth of the median.
WINDOW, LEAST_LOSSES, SPIKE_DEVIATIONS = 50, 20, 10.0
# How many warnings of one kind a run gives; the record of the run has more.
WARNINGS, RECORDS = 3, 1000
_SHOWN_INDICES = 32
# Outputs of modules that are remembered between two backwards.
OUTPUTS = 20_000


class SpikeDetector:
    """Tells a spike from the losses before it."""

    def __init__(self) -> None:
        self._losses: deque[float] = deque(maxlen=WINDOW)
        self._is_high = False

    def add(self, loss: float) -> float | None:
        """Take the next loss; return the usual one if this one begins a spike."""
        if not math.isfinite(loss):
            return None
        usual = None
        if len(self._losses) >= LEAST_LOSSES:
            from statistics import median  # it loads what nothing else here needs

            usual = median(self._losses)
            was_high, above = self._is_high, loss - usual
            self._is_high = above > 0.1 * abs(usual)
            if self._is_high:
                deviation = median(abs(each - usual) for each in self._losses)
                self._is_high = above > SPIKE_DEVIATIONS * 1.4826 * deviation
            usual = usual if self._is_high and not was_high else None
        self._losses.append(loss)
        return usual


class NumericsMonitor:
    """Watches the numbers of one rank, and says of the first bad one where it comes from.

    Outputs of modules are compared on the device; the host reads them with the loss, once in a backward, and
    the norms of gradients once in a step. Modules inside of a compiled region are not seen.

    Args:
        world, strategy: of the run.
        prepared: the models and optimizers that are trained.
        recorder: takes norms and events; None: they are warnings only.
        steps: numbers the steps.
    """

    def __init__(
        self,
        world: World,
        strategy: Strategy,
        prepared: PreparedObjects,
        recorder: RunRecorder | None,
        steps: StepCounter,
    ) -> None:
        self._world, self._strategy = world, strategy
        self._prepared, self._recorder = prepared, recorder
        self._steps = steps
        self._indices: Any = None
        self._spikes = SpikeDetector()
        self._counts: dict[str, int] = {}
        self._watched: weakref.WeakSet[Any] = weakref.WeakSet()  # a kept model may be prepared again
        # Of the forwards since the last backward: modules, and the smallest and largest number of each.
        self._checks: list[_OutputCheck] = []
        self._extremes: list[torch.Tensor] = []
        self._culprit = ""
        # The norm of the gradients of parameters (their ids), of the clipping before their step.
        self._clipped: dict[frozenset[int], torch.Tensor] = {}

    # --- what is watched

    def watch(self, kind: str, item: Any) -> None:
        """Begin to watch a prepared model, loader or optimizer."""
        if kind == "model" and (model := self._strategy.unwrap(item)) not in self._watched:
            self._watched.add(model)
            suffix = self._model_suffix(len(self._prepared.models) - 1)
            model.register_forward_pre_hook(_InputCheck(self, "", model), with_kwargs=True)
            for name, module in model.named_modules():
                shown = f"{name or 'the model'} ({type(module).__name__}){suffix}"
                module.register_forward_hook(_OutputCheck(self, shown, module))
        elif kind == "loader" and hasattr(item, "time_fetches"):
            timed = item.time_fetches
            if timed in self._watched:
                return
            item.time_fetches = lambda batches, samples: self._note_batches(timed(batches, samples))
            self._watched.add(item.time_fetches)
        elif kind == "optimizer" and hasattr(item.optimizer, "register_step_pre_hook"):
            if item.optimizer in self._watched:
                return
            self._watched.add(item.optimizer)
            groups_step = not self._strategy.owns_step
            item.optimizer.register_step_pre_hook(lambda opt, *_: self.check_step(opt, groups_step))
            item.optimizer.register_step_post_hook(lambda opt, *_: self._forget_norms(opt))

    def _note_batches(self, batches: Iterator[FetchedBatch]) -> Iterator[FetchedBatch]:
        for fetched in batches:
            self._indices = fetched.indices
            yield fetched

    def note_output(self, check: _OutputCheck, output: Any) -> None:
        """Compare the output of a module with what is finite; nothing waits for it."""
        if not torch.is_grad_enabled() or torch.compiler.is_compiling():
            return
        if isinstance(output, torch.Tensor):
            self._note_tensor(check, output)
            return
        for _, leaf in tree.iterate_leaves(output):
            if isinstance(leaf, torch.Tensor):
                self._note_tensor(check, leaf)

    def _note_tensor(self, check: _OutputCheck, tensor: torch.Tensor) -> None:
        local = local_tensor(tensor).detach()
        if local.dtype in _DTYPES and local.layout is torch.strided and local.numel() and not local.is_meta:
            if len(self._checks) == OUTPUTS:  # forwards without a backward
                self._checks, self._extremes = [], []
            # NaN if there is one. Three kernels fewer than torch.isfinite(local).all(); a sum may overflow.
            self._checks.append(check)
            self._extremes += local.amin(), local.amax()

    # --- what is said

    @property
    def _step(self) -> int:
        """The number of the step that is under way."""
        return self._steps.count + 1

    def check_loss(self, loss: torch.Tensor) -> None:
        """Read the loss of a backward; the outputs of modules that led to it are forgotten.

        Args:
            loss: detached, as the script gave it.
        """
        value = loss.reshape(()) if loss.numel() == 1 else loss.float().mean()
        checks, extremes = self._checks, [each.to(value.device) for each in self._extremes]
        number, *numbers = torch.stack([value, *extremes]).tolist()
        self._checks, self._extremes = [], []
        bad = next((n for n, each in enumerate(numbers) if not math.isfinite(each)), None)
        self._culprit = "" if bad is None else checks[bad // 2].describe()
        if not math.isfinite(number):
            self._tell("not finite", f"the loss is {number}", self._culprit, loss=number)
        elif (usual := self._spikes.add(number)) is not None:
            text = f"the loss is {number:.6g}, and its median before was {usual:.6g}"
            self._tell("spike", text, "", loss=number)

    def note_norm(self, parameters: Iterable[torch.Tensor], norm: torch.Tensor) -> None:
        """Take the norm that was computed to clip the gradients of ``parameters``."""
        self._clipped[frozenset(id(p) for p in parameters if p.requires_grad)] = norm

    def check_step(self, optimizer: torch.optim.Optimizer, groups_step: bool) -> None:
        """Record the norm of the gradients of each group, and say which gradient is not finite.

        A norm that was computed to clip exactly the parameters of a group is not computed again.

        Args:
            optimizer: the user's, whose gradients are complete and unscaled.
            groups_step: its groups have the gradients, and not an engine's own copies.
        """
        norms: list[torch.Tensor] = []
        for group in optimizer.param_groups:
            norm = None
            if self._clipped:
                norm = self._clipped.get(frozenset(id(p) for p in group["params"] if p.requires_grad))
            if norm is None and groups_step:
                norm = self._strategy.clip_norm(group["params"], float("inf"), 2.0)
            if norm is not None:
                norms.append(norm.detach().to(self._world.device, torch.float32).reshape(()))
        if not norms:
            return
        values = torch.stack(norms).tolist()
        if self._recorder is not None and self._world.rank == 0:
            names = [f"gradient norm, group {n}" for n in range(len(values))]
            names = names if len(names) > 1 else ["gradient norm"]
            self._recorder.log(dict(zip(names, values, strict=True)), self._step)
        for number, value in enumerate(values):
            if not math.isfinite(value):
                where = self._describe_gradient(optimizer.param_groups[number]["params"])
                text = f"the gradient norm of parameter group {number} is {value}"
                self._tell("gradient", text, "; ".join(filter(None, (where, self._culprit))))

    def _forget_norms(self, optimizer: torch.optim.Optimizer) -> None:
        if self._clipped:
            ids = {id(p) for group in optimizer.param_groups for p in group["params"]}
            self._clipped = {each: norm for each, norm in self._clipped.items() if each.isdisjoint(ids)}

    def _model_suffix(self, number: int) -> str:
        return f" of model {number}" if number else ""

    def _describe_gradient(self, parameters: Iterable[torch.Tensor]) -> str:
        members = {id(p) for p in parameters}
        for number, model in enumerate(self._prepared.models):
            for name, p in self._strategy.unwrap(model).named_parameters():
                if id(p) in members and p.grad is not None and _has_not_finite(p.grad):
                    suffix = self._model_suffix(number)
                    return f"the first parameter with such a gradient here is {name}{suffix}"
        return ""

    def _tell(self, kind: str, what: str, where: str, **facts: Any) -> None:
        self._counts[kind] = count = self._counts.get(kind, 0) + 1
        indices = None if self._indices is None else [leaf for _, leaf in tree.iterate_leaves(self._indices)]
        if self._recorder is not None and count <= RECORDS:
            self._recorder.record_event(
                {"numerics": kind, "step": self._step, "what": what, "where": where, "samples": indices}
                | facts
            )
        if count > WARNINGS:
            return
        samples = "the samples of the batch are not known here"
        if indices is not None:
            more = f" and {len(indices) - _SHOWN_INDICES} more" if len(indices) > _SHOWN_INDICES else ""
            samples = f"the batch has the samples {', '.join(map(str, indices[:_SHOWN_INDICES]))}{more}"
        last = "; more of this kind is not said" if count == WARNINGS else ""
        parts = "; ".join(filter(None, (what, where, samples)))
        warn_user(f"step {self._step}, rank {self._world.rank}: {parts}{last}")


# Numbers of eight bits and sparse tensors have no kernels that compare them.
_DTYPES = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})


class _OutputCheck:
    """The forward hook of one module; a copy of the model has one that does nothing."""

    def __init__(self, monitor: NumericsMonitor, name: str, module: nn.Module) -> None:
        self._monitor, self._name, self._module = monitor, name, weakref.ref(module)

    def __call__(self, module: nn.Module, args: Any, output: Any) -> None:
        self._monitor.note_output(self, output)

    def describe(self) -> str:
        """Return a text that names the module, and its weights that are not finite."""
        text = f"the first module whose output was not finite is {self._name}"
        module = self._module()
        if module is None:
            return text
        own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        bad = [each for each, values in own if _has_not_finite(values)]
        return (
            f"{text}, whose {', '.join(bad)} {'is' if len(bad) == 1 else 'are'} not finite" if bad else text
        )

    def __reduce__(self) -> tuple[Any, ...]:
        return _DisabledCheck, ()


class _InputCheck(_OutputCheck):
    """The forward pre-hook of a model."""

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        self._monitor.note_output(self, (args, kwargs))

    def describe(self) -> str:
        """Return the text about a batch."""
        return "the batch itself holds a value that is not finite"


class _DisabledCheck:
    def __call__(self, *args: Any) -> None:
        """Do nothing."""


@torch.no_grad()
def _has_not_finite(values: torch.Tensor) -> bool:
    local = local_tensor(values)
    return local.is_floating_point() and not local.is_meta and not bool(torch.isfinite(local).all())
