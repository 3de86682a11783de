"""``accelerate plan``: show how a training could be spread over some devices, and write the one that fits."""

from __future__ import annotations

import json
import os
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from accelerate.cli.bar_charts import LINE, create_ascii_table, draw_bars, plot_bars, print_chart
from accelerate.cli.main import flag_spellings
from accelerate.core.errors import SettingError
from accelerate.core.units import show_count, show_decimal_bytes

if TYPE_CHECKING:
    from accelerate.facade.estimate.memory_estimate import MemoryEstimateConfig
    from accelerate.facade.estimate.parallel_layouts import ClusterDeviceMemory, ParallelLayoutEstimate

_HELP = """Show what each device holds under every way to spread a training, and which way to take.

MODEL is a folder with config.json, a name on the hub, or module:factory. No weight is read or downloaded.

\b
accelerate plan ./my-model --gpus 8x80GB
accelerate plan ./my-model --gpus 4x8x80GB --batch 4 --length 4096 --write sharded.yaml
"""


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
    *flag_spellings("mixed-precision"),
    default="bf16",
    show_default=True,
    metavar="NAME",
    help="no, fp16, bf16",
)
@click.option("--optimizer", default="adamw", show_default=True, metavar="NAME", help="its kind")
@click.option("--library", help="whose model it is, where its configuration does not tell")
@click.option(
    *flag_spellings("trust-remote-code"), "trust", is_flag=True, help="run code beside the configuration"
)
@click.option("--take", metavar="NUMBER", type=int, help="write that row instead of the recommended one")
@click.option("--write", metavar="FILE", help="write a configuration for `accelerate launch`")
@click.option("--plot", metavar="FILE", help="draw the bars into this picture")
@click.option("--json", "as_json", is_flag=True, help="print a JSON object and nothing else")
def _plan(model: str, gpus: str, **given: Any) -> None:
    from accelerate.facade.estimate import parallel_layouts, skeleton
    from accelerate.facade.estimate.memory_estimate import MemoryEstimateConfig, measure_model

    _refuse_existing(given["write"])
    cluster = parallel_layouts.parse_cluster(gpus)
    names = ("batch", "length", "accumulation", "mixed_precision", "optimizer")
    training = MemoryEstimateConfig(**{name: given[name] for name in names})
    options = {"library": given["library"], "trust_remote_code": given["trust"]}
    facts = measure_model(skeleton.build_skeleton(model, **options), model)
    layouts = parallel_layouts.list_layouts(facts, training, cluster, _activation_tracer(model, options))
    best = parallel_layouts.recommend_layout(layouts, cluster)
    explanation = parallel_layouts.explain_choice(best, layouts, cluster)
    chosen = _select_layout(layouts, best, given["take"])
    if given["plot"]:
        title = f"{facts.kind}, {show_count(facts.parameters)} parameters, {gpus}"
        bars = {way.name: way.estimate.parts for way in layouts}
        plot_bars(Path(given["plot"]), bars, title, show=show_decimal_bytes, base=1000)
    if given["as_json"]:
        click.echo(json.dumps(plan_as_json(layouts, cluster, best, explanation), indent=1))
    else:
        click.echo(f"{facts.kind}, {show_count(facts.parameters)} parameters, on {cluster}.")
        print_layouts(layouts, cluster, best)
        click.echo(f"\n{_wrap(explanation)}")
    if given["write"]:
        if chosen is None:
            raise SettingError(
                "nothing fits, so there is nothing to write",
                fix="more or larger devices in --gpus, or a smaller --batch or --length; --take NUMBER "
                "writes a row all the same",
            )
        path = Path(given["write"])
        write_config(path, chosen, cluster, given["mixed_precision"], given["accumulation"])
        click.echo(f"written to {path}: accelerate launch --config_file {path} your_script.py", err=True)


def _activation_tracer(model: str, options: Mapping[str, Any]) -> Callable[[MemoryEstimateConfig], Any]:
    """Return a function that traces activations, once for each kind of forward."""
    from accelerate.cli.estimate_memory import trace_activations

    @cache
    def trace(batch: int, length: int | None, dtype: str, mixed: str, narrow: bool, attention: str) -> Any:
        from accelerate.facade.estimate.memory_estimate import MemoryEstimateConfig

        strategy = "zero1" if narrow else "single"
        config = MemoryEstimateConfig(
            dtype, mixed, batch=batch, length=length, attention=attention, strategy=strategy
        )
        return trace_activations(model, options, config)

    def trace_once(how: MemoryEstimateConfig) -> Any:
        return trace(how.batch, how.length, how.dtype, how.mixed_precision, how.narrow_weights, how.attention)

    return trace_once


def _select_layout(
    layouts: Sequence[ParallelLayoutEstimate], best: ParallelLayoutEstimate | None, take: int | None
) -> ParallelLayoutEstimate | None:
    if take is None:
        return best
    if not 1 <= take <= len(layouts):
        raise SettingError(f"there is no row {take}", fix=f"--take a number from 1 to {len(layouts)}")
    return layouts[take - 1]


# ---------------------------------------------------------------- what is shown


# The columns of the table, each as wide as its title or its largest number of GB.
_COLUMNS = {
    "peak": "total",
    "weights": "weights",
    "grads": "gradients",
    "optim": "optimizer",
    "copies": "copies",
    "activ": "activations",
    "host": "host",
}
_NAME_WIDTH = 38


def print_layouts(
    layouts: Sequence[ParallelLayoutEstimate],
    cluster: ClusterDeviceMemory,
    best: ParallelLayoutEstimate | None,
) -> None:
    """Print the table, the bars and the notes, in at most ``LINE`` columns."""
    rows: list[list[Any]] = []
    for number, layout in enumerate(layouts, 1):
        name, *rest = textwrap.wrap(layout.name, _NAME_WIDTH)
        fits = "take" if layout is best else "yes" if layout.fits(cluster) else "no"
        bytes_of_parts = [getattr(layout.estimate, part) for part in _COLUMNS.values()]
        sizes = [f"{size / 1e9:.2f}" if size else "-" for size in bytes_of_parts]
        rows.append([f"{number:>2}", name.ljust(_NAME_WIDTH), fits, *sizes])
        rows += [["", f"  {more}".ljust(_NAME_WIDTH), *[""] * (len(_COLUMNS) + 1)] for more in rest]
    # Numbers of one width are aligned by their decimal point.
    wide = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    cells = [[*row[:3], *(cell.rjust(w) for cell, w in zip(row[3:], wide[3:], strict=True))] for row in rows]
    devices = f"each of {cluster.count} devices" if cluster.count > 1 else "the device"
    print_chart(create_ascii_table(["", "", "fits", *_COLUMNS], cells, f"What {devices} holds, in GB"))
    click.echo("")
    bars = {layout.name: layout.estimate.parts for layout in layouts}
    print_chart(draw_bars(bars, colour=sys.stdout.isatty(), show=show_decimal_bytes))
    for note in _notes(layouts, cluster):
        click.echo(_wrap(f"note: {note}."))


def _notes(layouts: Sequence[ParallelLayoutEstimate], cluster: ClusterDeviceMemory) -> Iterator[str]:
    rows: dict[str, list[str]] = {}
    for number, layout in enumerate(layouts, 1):
        for note in layout.estimate.notes:
            rows.setdefault(note, []).append(str(number))
    for note, numbers in rows.items():
        whose = "" if len(numbers) == len(layouts) else f"row{'s'[: len(numbers) - 1]} {', '.join(numbers)}: "
        yield whose + note
    waiting = max(layout.estimate.unreduced for layout in layouts)
    if waiting:
        yield (
            "layouts that shard weights keep unsharded gradients until the last micro-batch: up to "
            f"{show_decimal_bytes(waiting)} more; GradientAccumulationPlugin(sync_each_batch=True) reduces "
            "each"
        )
    usable = show_decimal_bytes(cluster.usable)
    yield f"a tenth of each device is kept free, so {usable} count as fitting; 1 GB is 1000^3 bytes"


def _wrap(text: str) -> str:
    return textwrap.fill(text, LINE, subsequent_indent="  ", break_on_hyphens=False)


def plan_as_json(
    layouts: Sequence[ParallelLayoutEstimate],
    cluster: ClusterDeviceMemory,
    best: ParallelLayoutEstimate | None,
    why: str,
) -> dict[str, Any]:
    """The plan as JSON has it."""
    rows = [
        {
            "name": way.name,
            "fits": way.fits(cluster),
            "why": way.why,
            "settings": dict(way.settings),
            **way.estimate.parts,
            "peak": way.estimate.total,
            "host": way.estimate.host,
            "waiting": way.estimate.unreduced,
            "notes": list(way.estimate.notes),
        }
        for way in layouts
    ]
    devices = {name: getattr(cluster, name) for name in ("nodes", "each", "memory", "usable")}
    return {"devices": devices, "ways": rows, "recommended": None if best is None else best.name, "why": why}


# ---------------------------------------------------------------- the file


def write_config(
    path: Path, way: ParallelLayoutEstimate, on: ClusterDeviceMemory, precision: str, accumulation: int = 1
) -> None:
    """Write a configuration of that way for ``accelerate launch``. A file that is there stays as it is.

    Raises:
        SettingError: there is a file already, or it cannot be written.
    """
    from accelerate.cli.wizard import config_editor

    _refuse_existing(path)
    pairs = {**way.settings, "mixed_precision": precision, "num_processes": on.count}
    pairs |= {"num_machines": on.nodes} if on.nodes > 1 else {}
    pairs |= {"gradient_accumulation_steps": accumulation} if accumulation > 1 else {}
    config_editor.set_keys(path, [f"{name}={value}" for name, value in pairs.items()])


def _refuse_existing(path: str | Path | None) -> None:
    if path and os.path.exists(path):
        raise SettingError(f"{path} is there already", fix="name another file, or remove it first")


PLUGIN = _plan
