"""The stages of a model for inference, cut from its traced forward.

``torch.export`` traces the forward without reading a weight. The trace runs on tensors that have shapes and
no values (torch's FakeTensorMode), so it needs no memory, and it can be repeated for other shapes when the
weights of the other stages are gone. A stage takes a tuple of tensors and gives one to the next stage. A
value that is needed two stages later is passed on by the one between.
"""

from __future__ import annotations

import contextlib
import io
import operator
import warnings
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, TypeAlias

import torch
from torch import fx, nn
from torch._export import utils as export_utils
from torch.export.graph_signature import InputKind, OutputKind

from accelerate.core.errors import AccelerateError, PrepareError
from accelerate.core.torch_internals import require
from accelerate.offload.module_tensors import tensor_slots

require("fake tensors")

from torch._subclasses.fake_tensor import FakeTensorMode  # noqa: E402

# Calls a model with tensors, and returns the structure of its output, and the tensors in it.
Call: TypeAlias = Callable[[Sequence[torch.Tensor]], tuple[Any, list[torch.Tensor]]]

_PREFIX = "model."  # where the model stands in the module that is traced


@dataclass
class InferenceStage:
    """One stage of a model for inference.

    Attributes:
        module: takes tensors, returns a tuple of them. Its weights have no values until ``load_weights``.
        inputs, outputs: tensors on the meta device with the shapes and dtypes of these; contiguous.
        weights: the full names in the model of what it uses.
    """

    module: nn.Module
    inputs: tuple[torch.Tensor, ...]
    outputs: tuple[torch.Tensor, ...]
    weights: frozenset[str]

    def load_weights(self, values: Mapping[str, torch.Tensor]) -> None:
        """Load the weights, by their names in the model."""
        for name in self.weights:
            path, _, label = f"{_PREFIX}{name}".rpartition(".")
            holder = self.module.get_submodule(path)
            delattr(holder, label)
            value = values[name]
            if isinstance(value, nn.Parameter):
                holder.register_parameter(label, value)
            else:
                holder.register_buffer(label, value)


class _FlatForward(nn.Module):
    """The forward of a model over a flat list of tensors.

    Each comes in through an operation of its own, so that a later stage has it from the first one, and each
    result goes out through one, so that the last stage has them all.
    """

    def __init__(
        self, model: nn.Module, call: Callable[[Sequence[torch.Tensor]], list[torch.Tensor]]
    ) -> None:
        super().__init__()
        self.model = model
        self._call = call
        self.training = model.training

    def forward(self, *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the tensors of the result."""
        results = self._call([tensor.clone() for tensor in tensors])
        return tuple(tensor.clone(memory_format=torch.contiguous_format) for tensor in results)


class TracedForward:
    """The traced forward of a model for inputs of one shape.

    Args:
        model: its weights may be anywhere, also on the meta device.
        call: calls it.
        inputs: makes tensors for a number of samples; their values do not matter.
        rows: how many samples.
        device: where the stages will run.

    Attributes:
        output_form: of what the model gives.
        per_row: of each tensor of the result, how long its dimension 0 is for one sample; 0 if it does not
            depend on how many there are.
        computing_modules: the names of all modules that compute something, in the order in which they first
            do.

    Raises:
        PrepareError: ``torch.export`` cannot trace the forward.
    """

    def __init__(
        self,
        model: nn.Module,
        call: Call,
        inputs: Callable[[int], Iterable[torch.Tensor]],
        rows: int,
        device: torch.device,
    ) -> None:
        seen: list[Any] = []  # outside of the module: torch.export takes back what a forward changes there

        def call_and_keep(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            form, results = call(tensors)
            seen.append(form)
            return results

        flat = _FlatForward(model, call_and_keep)
        mode = FakeTensorMode(allow_non_fake_inputs=True)
        with _fake_weights(model, mode, device), torch.no_grad():
            with mode:
                fakes, more = (
                    tuple(torch.empty(t.shape, dtype=t.dtype, device=device) for t in inputs(n))
                    for n in (rows, rows + 1)
                )
            with _translate_trace_errors():
                self.program = _export(flat, fakes)
                # Models that ask ``torch.compiler.is_exporting`` take the same branch as in the trace.
                with mode, getattr(export_utils, "_compiling_state_context", nullcontext)():
                    grown = call_and_keep(more)
        self.output_form, self.device = seen[0], device
        (output,) = self.program.graph.find_nodes(op="output")
        results = [node.meta["val"] for node in output.args[0]][-len(grown) :]
        self.per_row = [
            _rows_per_sample(small, large, rows) for small, large in zip(results, grown, strict=True)
        ]
        self.first_nodes: dict[str, int] = {}
        for index, node in enumerate(self.program.graph.nodes):
            for name, _ in (node.meta.get("nn_module_stack") or {}).values():
                self.first_nodes.setdefault(name.partition("@")[0].removeprefix(_PREFIX), index)
        self.computing_modules = sorted(self.first_nodes, key=self.first_nodes.__getitem__)

    def build_stage(self, cuts: Sequence[str], index: int) -> InferenceStage:
        """Build one of the stages of the graph; each but the first begins with the module of a split point.

        Raises:
            PrepareError: a cut is at a module that computes nothing here, or two are at the same place.
        """
        for cut in cuts:
            if cut not in self.first_nodes:
                raise PrepareError(
                    f"the split point {cut!r} computes nothing in this forward",
                    why="it is not called with these inputs, or gives them back unchanged",
                    fix="name a module that computes",
                )
        begins = sorted((self.first_nodes[cut], cut) for cut in cuts)
        for (place, first), (other, second) in pairwise(begins):
            if place == other:
                raise PrepareError(
                    f"the split points {first!r} and {second!r} are at the same place",
                    why="nothing is computed between their beginnings",
                    fix="leave one of them out, or name a module that comes later",
                )
        return _GraphSplitter(self.program, [place for place, _ in begins], self.device).build_stage(index)


@contextmanager
def _translate_trace_errors() -> Generator[None]:
    """Raise errors of torch.export as PrepareError; hide the graph that it prints first."""
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore", FutureWarning)  # of torch, about torch
            yield
    except AccelerateError:
        raise
    except Exception as error:
        lines = str(error).strip().splitlines() or [""]
        raise PrepareError(
            "the model's forward cannot be traced",
            why=f"torch.export says: {type(error).__name__}: {lines[0]}",
            fix="write what depends on values as torch operations (torch.where, torch.cond), or as your own "
            "operation (torch.library.custom_op), which is not traced",
        ) from error


def _export(flat: nn.Module, fakes: tuple[torch.Tensor, ...]) -> torch.export.ExportedProgram:
    program = torch.export.export(flat, fakes, strict=False)
    schemas = (getattr(node.target, "_schema", None) for node in program.graph.nodes)
    if any(schema is not None and schema.is_mutable for schema in schemas):
        # A write through a view would not reach a copy of it in another stage.
        program = program.run_decompositions({})
    return program


@contextmanager
def _fake_weights(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> Generator[None]:
    """Replace every parameter and buffer with a fake one on ``device``; tied ones stay tied."""
    fakes: dict[int, torch.Tensor] = {}

    def fake(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in fakes:
            with mode:
                like = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
                wants = tensor.requires_grad
                fakes[id(tensor)] = nn.Parameter(like, wants) if isinstance(tensor, nn.Parameter) else like
        return fakes[id(tensor)]

    slots = tensor_slots(model.modules())
    try:
        for table, name, tensor in slots:
            table[name] = fake(tensor)
        yield
    finally:
        for table, name, tensor in slots:
            table[name] = tensor


def _rows_per_sample(one: torch.Tensor, two: torch.Tensor, rows: int) -> int:
    """Return the length of dimension 0 for one sample, from tensors for ``rows`` and ``rows + 1`` samples."""
    if one.shape == two.shape:
        return 0
    each = two.shape[0] - one.shape[0] if one.shape[1:] == two.shape[1:] else 0
    if each <= 0 or one.shape[0] != each * rows:
        raise PrepareError(
            f"a tensor of the result has the shape {tuple(one.shape)} for {rows} samples "
            f"and {tuple(two.shape)} for {rows + 1}",
            why="chunks of a batch are put in a row again along dimension 0",
            fix="give a result whose first dimension is the batch",
        )
    return each


class _GraphSplitter:
    """The split of an exported program's graph into stages.

    A node belongs to the stage in which it runs. Weights and constants belong to no stage: each
    stage that uses one has it.
    """

    def __init__(
        self, program: torch.export.ExportedProgram, begins: Sequence[int], device: torch.device
    ) -> None:
        self.program, self.device = program, device
        self.nodes = list(program.graph.nodes)
        self.root = program.graph_module
        self.constants = self._collect_constants()
        specs = program.graph_signature.output_specs
        output = next(node for node in self.nodes if node.op == "output")
        # The other results are new values of buffers.
        self.results = [
            n for n, s in zip(output.args[0], specs, strict=True) if s.kind is OutputKind.USER_OUTPUT
        ]
        self.count = len(begins) + 1
        self.stage_of = self._assign_stages(begins)
        self.last_use = {
            node: max(
                [
                    self.count - 1 if node in self.results else 0,
                    *(self.stage_of[user] for user in node.users if user in self.stage_of),
                ]
            )
            for node in self.stage_of
        }

    def _collect_constants(self) -> dict[fx.Node, tuple[str, Any]]:
        """Return the nodes of weights (full name, None) and of constants (name, value)."""
        specs = {spec.arg.name: spec for spec in self.program.graph_signature.input_specs}
        constants: dict[fx.Node, tuple[str, Any]] = {}
        for node in self.nodes:
            if node.op == "get_attr":
                constants[node] = node.target, getattr(self.root, node.target)
            elif node.op == "placeholder" and specs[node.name].kind is not InputKind.USER_INPUT:
                target = str(specs[node.name].target)
                constant = specs[node.name].kind is InputKind.CONSTANT_TENSOR
                value = self.program.constants[target] if constant else None
                constants[node] = target, value.to(self.device) if isinstance(value, torch.Tensor) else value
        return constants

    def _assign_stages(self, begins: Sequence[int]) -> dict[fx.Node, int]:
        """Return the stage of every node that computes."""
        numbers: dict[fx.Node, int] = {}
        for index, node in enumerate(self.nodes):
            if node in self.constants or node.op == "output":
                continue
            numbers[node] = sum(begin <= index for begin in begins)
            if node.target is operator.getitem:  # what a tuple is taken apart to stays with the tuple
                numbers[node] = numbers[node.args[0]]
        return numbers

    def _stage_inputs(self, stage: int) -> list[fx.Node]:
        """Return the values that a stage receives."""
        return [n for n, source in self.stage_of.items() if source < stage <= self.last_use[n]]

    def build_stage(self, index: int) -> InferenceStage:
        """Build one stage."""
        stage_nodes = [node for node, stage in self.stage_of.items() if stage == index]
        comes = [n for n in stage_nodes if n.op == "placeholder"] if index == 0 else self._stage_inputs(index)
        goes = self.results if index == self.count - 1 else self._stage_inputs(index + 1)
        graph, attributes = fx.Graph(), dict[str, Any]()
        copies = {node: graph.placeholder(node.name) for node in comes}
        weights: set[str] = set()

        def copy_node(node: fx.Node) -> fx.Node:
            if node not in copies:
                name, value = self.constants[node]
                if value is None:
                    weights.add(name.removeprefix(_PREFIX))
                    value = torch.empty(0, device="meta")  # until ``load_weights``
                attributes[name] = value
                copies[node] = graph.get_attr(name)
            return copies[node]

        for node in stage_nodes:
            if node.op != "placeholder":
                copies[node] = graph.node_copy(node, copy_node)
        sent = [copy_node(node) for node in goes]
        if index < self.count - 1:
            sent = [graph.call_method("contiguous", (node,)) for node in sent]
        graph.output(tuple(sent))
        module = fx.GraphModule(attributes, graph)
        return InferenceStage(module, _meta_tensors(comes), _meta_tensors(goes), frozenset(weights))


def _meta_tensors(nodes: Iterable[fx.Node]) -> tuple[torch.Tensor, ...]:
    """Return contiguous meta tensors of the shapes in the trace."""
    values = [node.meta["val"] for node in nodes]
    return tuple(torch.empty(v.shape, dtype=v.dtype, device="meta") for v in values)


def named_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return all parameters and buffers, tied ones under each of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def keep_weights(model: nn.Module, names: Iterable[str], device: torch.device) -> None:
    """Move some weights to ``device`` and drop all others; tied ones stay tied."""
    named = named_tensors(model)
    weight_ids = {id(named[name]) for name in names}
    relocated: dict[int, torch.Tensor] = {}

    def relocate(tensor: torch.Tensor) -> torch.Tensor:
        target = device if id(tensor) in weight_ids else torch.device("meta")
        if tensor.device == target:
            return tensor
        if id(tensor) not in relocated:
            moved = tensor.detach().to(target)
            if isinstance(tensor, nn.Parameter):
                moved = nn.Parameter(moved, tensor.requires_grad)
            vars(moved).update(vars(tensor))
            relocated[id(tensor)] = moved
        return relocated[id(tensor)]

    for table, name, tensor in tensor_slots(model.modules()):
        table[name] = relocate(tensor)
