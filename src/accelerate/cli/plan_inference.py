"""``accelerate plan-inference``: show which part of a model would lie on which device."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from accelerate.cli.main import flag_spellings

if TYPE_CHECKING:
    from torch import nn

    from accelerate.offload.placement import Device, ModelPlacement

_HELP = """Show which part of a model would lie on which device, and why. No weight is read or downloaded.

MODEL is a folder with config.json, a name on the hub, or module:factory. Without budgets, the devices of
this machine are asked what they have free.

\b
accelerate plan-inference ./my-model --device 24GB --cpu 60GB
accelerate plan-inference ./my-model --device 24GB --device 24GB --batch 8 --length 4096 --dtype bfloat16
"""
# How people say it -> the name of the format.
_DTYPE_ALIASES = {"fp32": "float32", "fp16": "float16", "bf16": "bfloat16"}


class WeightNumberFormat(NamedTuple):
    """A number format that matters only for sizes."""

    bits: int


@click.command(
    "plan-inference",
    short_help="Show which part of a model would lie on which device.",
    help=_HELP,
    context_settings={"max_content_width": 110},
)
@click.argument("model", metavar="MODEL")
@click.option("--device", "devices", multiple=True, metavar="SIZE", help="of an accelerator; once for each")
@click.option("--cpu", metavar="SIZE", help="of main memory; 0 uses none")
@click.option("--disk", metavar="SIZE", help="of the disk; without it there is no limit")
@click.option("--batch", type=int, default=1, show_default=True, help="samples at once")
@click.option("--length", type=int, help="tokens of each; without it only weights are planned")
@click.option(
    "--dtype", metavar="NAME", help="weights as if converted to it; else what the configuration says"
)
@click.option(
    *flag_spellings("no-split"), "no_split", multiple=True, metavar="CLASS", help="modules that stay whole"
)
@click.option(
    *flag_spellings("offload-buffers"),
    "offload_buffers",
    is_flag=True,
    help="buffers move with their weights",
)
@click.option("--fill", is_flag=True, help="fill accelerators with what fits, also out of order")
@click.option("--library", help="whose model it is, where its configuration does not tell")
@click.option(
    *flag_spellings("trust-remote-code"), "trust", is_flag=True, help="run code beside the configuration"
)
@click.option("--json", "as_json", is_flag=True, help="print a JSON object and nothing else")
def _plan_inference(model: str, **given: Any) -> None:
    from accelerate.facade.estimate.skeleton import build_skeleton

    limits = device_budgets(given["devices"], given["cpu"], given["disk"])
    empty = build_skeleton(model, library=given["library"], trust_remote_code=given["trust"])
    plan, notes = plan_placement(empty, limits, **{name: given[name] for name in _PLAN_OPTIONS})
    click.echo(json.dumps(plan_as_json(plan, notes), indent=2) if given["as_json"] else plan)
    for note in () if given["as_json"] else (*notes, "1 GB is 1000^3 bytes, as budgets are typed"):
        click.echo(f"note: {note}")


_PLAN_OPTIONS = ("batch", "length", "dtype", "no_split", "offload_buffers", "fill")


def device_budgets(
    devices: Sequence[str], cpu: str | None, disk: str | None
) -> dict[Device, int | float | str]:
    """Device -> budget, as typed; what was not typed is what this machine has free.

    Args:
        devices: budgets of accelerators.
        cpu: of main memory.
        disk: of the disk.
    """
    from accelerate.offload.device_maps import get_max_memory
    from accelerate.offload.placement import CPU, DISK

    free_memory = get_max_memory() if cpu is None or not devices else {}
    limits: dict[Device, int | float | str] = dict(enumerate(devices))
    if not devices:
        limits |= {device: free for device, free in free_memory.items() if device != CPU}
    if cpu is not None or CPU in free_memory:
        limits[CPU] = free_memory[CPU] if cpu is None else cpu
    return limits if disk is None else limits | {DISK: disk}


def plan_placement(
    model: nn.Module,
    limits: Mapping[Device, int | float | str],
    *,
    batch: int = 1,
    length: int | None = None,
    dtype: str | None = None,
    no_split: Sequence[str] = (),
    offload_buffers: bool = False,
    fill: bool = False,
) -> tuple[ModelPlacement, list[str]]:
    """(the plan, how its reserve was counted) of a model on the meta device.

    With a length, keys and values are counted with the blocks that keep them, and activations are reserved on
    every device that computes. The formulas are those of ``facade/estimate/activation_formula.py``:

    - keys and values of a block: ``2 x batch x length x kv_heads x head_size x bytes``;
    - activations: what one block makes of ``batch x length`` tokens, and for the words of the last of them
      ``batch x vocabulary x (bytes + 4)``.

    Args:
        model: the model.
        limits: device -> budget.
        batch: samples at once.
        length: tokens of each; None plans for weights only.
        dtype: count floating point weights as if they were converted to it.
        no_split: classes that stay whole, besides those that the model names.
        offload_buffers, fill: see ``PlacementRules``.
    """
    from accelerate.facade.estimate.activation_formula import reserve_for_inference
    from accelerate.facade.estimate.memory_estimate import dtype_bits
    from accelerate.offload.module_sizes import build_module_tree, no_split_classes
    from accelerate.offload.placement import CPU, DISK
    from accelerate.offload.placement_planner import PlacementRules, plan_placement

    width = None if dtype is None else WeightNumberFormat(dtype_bits(_DTYPE_ALIASES.get(dtype, dtype)))
    rules = PlacementRules(frozenset(no_split_classes(model).union(no_split)), offload_buffers, fill)
    part = build_module_tree(model, width)
    if length is None:
        notes = ["only weights are counted; with --length so are activations, keys and values"]
        return plan_placement(part, limits, rules), notes
    need = reserve_for_inference(model, batch, length, _compute_bytes(model, width))
    computers = [device for device in limits if device not in (CPU, DISK)] or [CPU]
    reserve = {device: need.working for device in computers if device in limits}
    rules = PlacementRules(rules.no_split, offload_buffers, fill, reserve, need.cache)
    return plan_placement(part, limits, rules), [need.note]


def _compute_bytes(model: nn.Module, bits: WeightNumberFormat | None) -> int:
    """Bytes of a number in the forward: formats below 16 bits are for storage, and computed in 16."""
    if bits is not None:
        return max(2, bits.bits // 8)
    floats = (tensor.dtype.itemsize for tensor in model.parameters() if tensor.is_floating_point())
    return max(2, next(floats, 4))


def plan_as_json(plan: ModelPlacement, notes: Sequence[str]) -> dict[str, Any]:
    """The plan as JSON has it; a disk without limit is null."""
    accounts = {
        str(device): {
            "budget": None if math.isinf(account.budget) else account.budget,
            "weights": account.weights,
            "buffers_of_others": account.pinned,
            "keys_and_values": account.cache,
            "activations": account.reserve,
            "largest_block": account.block_buffer,
        }
        for device, account in plan.budgets.items()
    }
    return {
        "device_map": plan.device_map,
        "devices": accounts,
        "rows": [row._asdict() for row in plan.rows],
        "executor": plan.executor,
        "tied": plan.tied,
        "notes": [*plan.notes, *notes],
    }


PLUGIN = _plan_inference
