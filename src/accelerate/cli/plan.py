"""``accelerate plan``: show how a training could be spread over some devices, and write the one that fits."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from accelerate.cli.bars import bars, create_ascii_table, plot, size_text
from accelerate.core.errors import SettingError
from accelerate.core.units import show_count

if TYPE_CHECKING:
    from accelerate.offload.estimate.bill import Bill, Training
    from accelerate.offload.estimate.layouts import Devices, Way

_HELP = """Show what each device holds under every way to spread a training, and which way to take.

MODEL is a folder with config.json, a name on the hub, or module:factory. No weight is read or downloaded.

\b
accelerate plan ./my-model --gpus 8x80GB
accelerate plan ./my-model --gpus 4x8x80GB --batch 4 --length 4096 --write accelerate.yaml
"""


def _flag(name: str) -> tuple[str, ...]:
    """Both spellings of a flag."""
    return tuple(dict.fromkeys((f"--{name}", f"--{name.replace('-', '_')}")))


@click.command(
    "plan",
    short_help="Show how a training could be spread over devices.",
    help=_HELP,
    context_settings={"max_content_width": 110},
)
@click.argument("model", metavar="MODEL")
@click.option("--gpus", required=True, metavar="NxSIZE", help="8x80GB, or 4x8x80GB for four machines")
@click.option("--batch", type=int, default=1, show_default=True, help="samples of one device in one forward")
@click.option("--length", type=int, help="tokens of a sample; without it, activations are left out")
@click.option(
    "--accumulation", type=int, default=1, show_default=True, help="micro-batches of an optimizer step"
)
@click.option(
    *_flag("mixed-precision"), default="bf16", show_default=True, metavar="NAME", help="no, fp16, bf16"
)
@click.option("--optimizer", default="adamw", show_default=True, metavar="NAME", help="its kind")
@click.option("--library", help="whose model it is, where its configuration does not tell")
@click.option(*_flag("trust-remote-code"), "trust", is_flag=True, help="run code beside the configuration")
@click.option("--take", metavar="NUMBER", type=int, help="write that row instead of the recommended one")
@click.option("--write", metavar="FILE", help="write a configuration for `accelerate launch`")
@click.option("--plot", metavar="FILE", help="draw the bars into this picture")
@click.option("--json", "as_json", is_flag=True, help="print a JSON object and nothing else")
def _plan(model: str, gpus: str, **given: Any) -> None:
    from accelerate.offload.estimate import layouts, skeleton
    from accelerate.offload.estimate.bill import Training, facts_of

    _refuse_taken(given["write"])
    on = layouts.devices(gpus)
    names = ("batch", "length", "accumulation", "mixed_precision", "optimizer")
    how = Training(**{name: given[name] for name in names})
    options = {"library": given["library"], "trust_remote_code": given["trust"]}
    facts = facts_of(skeleton.skeleton(model, **options), model)
    found = layouts.ways(facts, how, on, _kept(model, options))
    best = layouts.recommended(found, on)
    why = layouts.reason(best, found, on)
    chosen = _chosen(found, best, given["take"])
    if given["plot"]:
        title = f"{facts.kind}, {show_count(facts.parameters)} parameters, {gpus}"
        plot(Path(given["plot"]), {way.name: way.bill.parts for way in found}, title)
    if given["as_json"]:
        click.echo(json.dumps(as_object(found, on, best, why), indent=1))
    else:
        click.echo(f"{facts.kind}, {show_count(facts.parameters)} parameters, on {on}.")
        show(found, on, best)
        click.echo(f"\n{why}")
    if given["write"]:
        if chosen is None:
            raise SettingError("nothing fits, so there is nothing to write", fix="--take NUMBER of a row")
        path = Path(given["write"])
        write(path, chosen, on, given["mixed_precision"], given["accumulation"])
        click.echo(f"written to {path}: accelerate launch --config_file {path} your_script.py", err=True)


def _kept(model: str, options: Mapping[str, Any]) -> Callable[[Training], Any]:
    """What a forward keeps, traced once for each kind of forward."""
    from accelerate.cli.estimate_memory import traced

    @cache
    def once(batch: int, length: int | None, dtype: str, mixed: str, narrow: bool, attention: str) -> Any:
        from accelerate.offload.estimate.bill import Training

        strategy = "zero1" if narrow else "single"
        how = Training(dtype, mixed, batch=batch, length=length, attention=attention, strategy=strategy)
        return traced(model, options, how)

    def kept(how: Training) -> Any:
        return once(how.batch, how.length, how.dtype, how.mixed_precision, how.narrow_weights, how.attention)

    return kept


def _chosen(found: Sequence[Way], best: Way | None, take: int | None) -> Way | None:
    if take is None:
        return best
    if not 1 <= take <= len(found):
        raise SettingError(f"there is no row {take}", fix=f"--take a number from 1 to {len(found)}")
    return found[take - 1]


# ---------------------------------------------------------------- what is shown


def show(found: Sequence[Way], on: Devices, best: Way | None) -> None:
    """Prints the table and the bars."""
    from accelerate.offload.estimate.bill import PARTS

    headers = ["", "", "peak", "fits", *PARTS, "on the host"]
    rows = [[str(n), way.name, *_cells(way, on, best)] for n, way in enumerate(found, 1)]
    title = "What the device holds" if on.count == 1 else f"What each of {on.count} devices holds"
    click.echo(create_ascii_table(headers, rows, title))
    click.echo("")
    click.echo(bars({way.name: way.bill.parts for way in found}, colour=sys.stdout.isatty()))
    for note in dict.fromkeys(note for way in found for note in way.bill.notes):
        click.echo(f"note: {note}.")
    waiting = max(way.bill.waiting for way in found)
    if waiting:
        click.echo(
            "note: ways that divide weights keep whole gradients until the last micro-batch: up to "
            f"{size_text(waiting)} more; GradientAccumulationPlugin(sync_each_batch=True) reduces each."
        )
    free = f"a tenth of each device is kept free, so {size_text(on.usable)} count as fitting"
    click.echo(f"note: {free}; in all that is printed, 1 GB is 1024^3 bytes.")


def _cells(way: Way, on: Devices, best: Way | None) -> list[str]:
    bill: Bill = way.bill
    fits = "yes, take it" if way is best else "yes" if way.fits(on) else "no"
    host = size_text(bill.host) if bill.host else "-"
    return [size_text(bill.total), fits, *map(size_text, bill.parts.values()), host]


def as_object(found: Sequence[Way], on: Devices, best: Way | None, why: str) -> dict[str, Any]:
    """The plan as JSON has it."""
    rows = [
        {
            "name": way.name,
            "fits": way.fits(on),
            "why": way.why,
            "settings": dict(way.job),
            **way.bill.parts,
            "peak": way.bill.total,
            "host": way.bill.host,
            "waiting": way.bill.waiting,
            "notes": list(way.bill.notes),
        }
        for way in found
    ]
    devices = {"nodes": on.nodes, "each": on.each, "memory": on.memory, "usable": on.usable}
    return {"devices": devices, "ways": rows, "recommended": None if best is None else best.name, "why": why}


# ---------------------------------------------------------------- the file


def write(path: Path, way: Way, on: Devices, precision: str, accumulation: int = 1) -> None:
    """Writes a configuration of that way for ``accelerate launch``. A file that is there stays as it is.

    Raises:
        SettingError: there is a file already, or it cannot be written.
    """
    from accelerate.cli.wizard import keys

    _refuse_taken(path)
    pairs = {**way.job, "mixed_precision": precision, "num_processes": on.count}
    pairs |= {"num_machines": on.nodes} if on.nodes > 1 else {}
    pairs |= {"gradient_accumulation_steps": accumulation} if accumulation > 1 else {}
    keys.set_in(path, [f"{name}={value}" for name, value in pairs.items()])


def _refuse_taken(path: str | Path | None) -> None:
    if path and Path(path).exists():
        raise SettingError(f"{path} is there already", fix="name another file, or remove it first")


PLUGIN = _plan
