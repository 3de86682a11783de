"""Every function of ``accelerate.utils.operations``, with usual and odd inputs."""

from __future__ import annotations

from collections import OrderedDict, UserDict, namedtuple
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from accelerate.utils import operations as ops
from tests.clients.probe import Probe

Point = namedtuple("Point", "x y")


@dataclass
class Output:
    """A dataclass that is no container for the public package."""

    loss: Any
    name: str = "n"


class Movable:
    """Anything with a ``to`` method."""

    def __init__(self) -> None:
        self.place: Any = None

    def to(self, device: Any) -> Movable:
        self.place = str(device)
        return self


class Mine(dict):  # type: ignore[type-arg]
    """A subclass of dict."""


def trees() -> dict[str, Any]:
    """What people put into these functions."""
    t = torch.arange(6.0).reshape(3, 2)
    return {
        "tensor": t,
        "scalar": torch.tensor(3),
        "empty": torch.zeros(0, 2),
        "half": t.half(),
        "bfloat": t.bfloat16(),
        "bool": t > 2,
        "int32": t.int(),
        "list": [t, t + 1],
        "tuple": (t, t + 1),
        "namedtuple": Point(t, t + 1),
        "dict": {"a": t, "b": [t.half(), (t,)]},
        "ordered": OrderedDict(a=t, b=t + 1),
        "userdict": UserDict(a=t),
        "mine": Mine(a=t),
        "mixed": {"t": t, "s": "text", "n": None, "i": 3, "f": 0.5},
        "strings": ["a", "b"],
        "string": "text",
        "none": None,
        "number": 5,
        "set": {1, 2},
        "no_list": [],
        "no_dict": {},
        "nested": [[t], [{"x": (t, "s")}]],
        "grad": (t.clone().requires_grad_() * 2),
    }


def pure(folder: Path) -> dict[str, Any]:
    """Those that need no other process."""
    probe = Probe()
    for name, data in trees().items():
        probe(f"send_to_device({name})", ops.send_to_device, data, "cpu")
        for function in (
            ops.listify, ops.find_batch_size, ops.ignorant_find_batch_size, ops.find_device, ops.get_shape,
            ops.get_data_structure, ops.convert_to_fp32, ops.is_namedtuple, ops.is_torch_tensor,
            ops.is_tensor_information,
        ):  # fmt: skip
            probe(f"{function.__name__}({name})", function, data)
        probe(f"slice_tensors({name})", ops.slice_tensors, data, slice(0, 2))
        probe(f"concatenate({name})", ops.concatenate, [data, data])
        probe(f"recursively_apply({name})", ops.recursively_apply, lambda t: t * 2, data)
        probe(f"strict({name})", ops.recursively_apply, _double, data, error_on_other_type=True)
        probe(
            f"initialize({name})",
            lambda d: ops.get_shape(ops.initialize_tensors(ops.get_data_structure(d))),
            data,
        )
        probe(f"pad_input_tensors({name})", ops.pad_input_tensors, data, 3, 2)
        probe(f"fp32 outputs({name})", ops.convert_outputs_to_fp32(lambda d=data: d))
    _more(probe)
    return probe.notes


def _double(t: torch.Tensor) -> torch.Tensor:
    return t * 2


def _more(probe: Probe) -> None:
    t = torch.arange(6.0).reshape(3, 2)
    probe("honor_type list", ops.honor_type, [1], iter([2, 3]))
    probe("honor_type tuple", ops.honor_type, (1,), iter([2, 3]))
    probe("honor_type namedtuple", ops.honor_type, Point(1, 2), iter([3, 4]))
    probe("send movable", lambda: ops.send_to_device(Movable(), "cpu").place)
    probe("send movable non_blocking", lambda: ops.send_to_device(Movable(), "cpu", non_blocking=True).place)
    probe("send skip", ops.send_to_device, {"a": t, "b": {"a": t}}, "meta", skip_keys="a")
    probe("send skip list", ops.send_to_device, {"a": t, "b": t, "c": t}, "meta", skip_keys=["a", "c"])
    probe("send meta", ops.send_to_device, {"a": [t, "s"]}, torch.device("meta"))
    probe(
        "send movables inside", lambda: [m.place for m in ops.send_to_device([Movable(), Movable()], "cpu")]
    )
    probe("concatenate dim 1", ops.concatenate, [t, t], dim=1)
    probe("concatenate dicts", ops.concatenate, [{"a": t}, {"a": t + 1}])
    probe("concatenate ragged", ops.concatenate, [t, t[:1]])
    probe("concatenate nothing", ops.concatenate, [])
    probe("pad_input dim 1", ops.pad_input_tensors, t, 2, 4, dim=1)
    probe("pad_input even", ops.pad_input_tensors, t[:2], 2, 2)
    probe("apply args", ops.recursively_apply, lambda x, a, b=1: x * a + b, [t], 2, b=3)
    probe("apply test_type", ops.recursively_apply, len, ["ab", 3], test_type=lambda x: isinstance(x, str))
    probe("find_device none", ops.find_device, ["a"])
    probe("information", ops.TensorInformation, shape=torch.Size([2]), dtype=torch.int8)
    probe("converter", ops.ConvertOutputsToFp32(lambda: (t.half(), [t.bfloat16()])))
    probe("converter name", lambda: ops.convert_outputs_to_fp32(_double).__wrapped__ is not None)
    probe("types", lambda: ops.TENSOR_TYPE_TO_INT)
    probe("types back", lambda: ops.TENSOR_INT_TO_DTYPE)
    probe("distributed kinds", lambda: sorted(ops.TORCH_DISTRIBUTED_OPERATION_TYPES))
    probe("is_xpu", ops.is_torch_xpu_tensor, t)
    probe("verify_operation", ops.verify_operation(_double), t)
    probe("chained_operation", ops.chained_operation(_double), t)


def together(folder: Path) -> dict[str, Any]:
    """Those that meet the other process, if there is one."""
    from accelerate import PartialState

    probe, state = Probe(), PartialState(cpu=True)
    rank = state.process_index
    for name, data in trees().items():
        if name in ("string", "none", "number", "set", "mixed", "strings", "nested", "half", "bfloat"):
            continue
        mine = ops.recursively_apply(lambda t: t + rank if t.dtype != torch.bool else t, data)
        probe(f"gather({name})", ops.gather, mine)
        probe(f"broadcast({name})", ops.broadcast, ops.recursively_apply(torch.clone, mine))
        probe(
            f"broadcast({name}) from last",
            ops.broadcast,
            ops.recursively_apply(torch.clone, mine),
            state.num_processes - 1,
        )
        if name != "bool":
            for reduction in ("sum", "mean", "none"):
                copied = ops.recursively_apply(torch.clone, mine)
                if name in ("int32", "scalar") and reduction == "mean":
                    continue
                probe(f"reduce({name}, {reduction})", ops.reduce, copied, reduction)
        probe(f"pad_across({name})", ops.pad_across_processes, mine)
    for name in ("string", "none", "number", "mixed", "strings", "set"):
        if state.num_processes == 1 or name not in ("mixed",):
            probe(f"gather odd({name})", ops.gather, trees()[name])
    _objects(probe, rank, state.num_processes)
    _padding(probe, rank)
    return probe.notes


def _objects(probe: Probe, rank: int, size: int) -> None:
    probe("copy_tensor_to_devices both", ops.copy_tensor_to_devices, torch.ones(2) * (rank + 1))
    probe("gather_object list", ops.gather_object, [rank, {"r": rank}])
    probe("gather_object empty", ops.gather_object, [] if rank else ["x"])
    probe("gather_object strings", ops.gather_object, ["a" * (rank + 1)])
    probe("gather_object tuple", ops.gather_object, (rank, rank))
    probe("broadcast_object_list", ops.broadcast_object_list, [rank, "x" * rank])
    probe("broadcast_object_list last", ops.broadcast_object_list, [rank, {"a": rank}], from_process=size - 1)
    probe("reduce scale", ops.reduce, torch.ones(2) * rank, "sum", scale=0.5)
    probe("reduce default", ops.reduce, torch.ones(2) * rank)
    probe("reduce mean scale", ops.reduce, torch.ones(2), "mean", 2.0)
    probe("reduce dict", ops.reduce, {"a": torch.ones(1), "b": [torch.zeros(2)]}, "sum")
    probe("gather 0-d", ops.gather, torch.tensor(float(rank)))
    probe("gather not contiguous", ops.gather, torch.arange(6).reshape(2, 3).t() + rank)
    probe("gather bfloat16", ops.gather, torch.ones(2, dtype=torch.bfloat16) * rank)
    probe("gather requires_grad", lambda: ops.gather(torch.ones(1, requires_grad=True) * 2).requires_grad)


def _padding(probe: Probe, rank: int) -> None:
    t = torch.ones(2 + rank, 3 - rank) * (rank + 1)
    probe("pad dim 0", ops.pad_across_processes, torch.ones(1 + rank, 2))
    probe("pad dim 1", ops.pad_across_processes, torch.ones(2, 1 + rank), dim=1)
    probe("pad dim -1", ops.pad_across_processes, torch.ones(2, 1 + rank), dim=-1)
    probe("pad index", ops.pad_across_processes, torch.ones(1 + rank), pad_index=-100)
    probe("pad first", ops.pad_across_processes, torch.ones(1 + rank), pad_index=7, pad_first=True)
    probe("pad big dim", ops.pad_across_processes, torch.ones(2), dim=3)
    probe("pad dict", ops.pad_across_processes, {"a": torch.ones(1 + rank), "b": [torch.zeros(2 - rank)]})
    probe("pad other dim differs", ops.pad_across_processes, t[:, :1])
    probe("pad scalar", ops.pad_across_processes, torch.tensor(1.0))
    probe("pad ints", ops.pad_across_processes, torch.ones(1 + rank, dtype=torch.int64), pad_index=-1)
    probe("pad bool", ops.pad_across_processes, torch.ones(1 + rank, dtype=torch.bool))


JOBS = {"operations.pure": pure, "operations.together": together}
