"""``accelerate estimate-memory``: tell how much memory a model takes, loaded or trained."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from accelerate.cli.bar_charts import create_ascii_table, draw_bars, plot_bars, print_chart, size_text
from accelerate.cli.main import WordListCommand, command_parser, flag_spellings
from accelerate.core.errors import MissingExtraError
from accelerate.core.units import ProgressBar, show_count
from accelerate.facade.estimate import memory_estimate as sums
from accelerate.facade.estimate.activation_formula import RECOMPUTE

if TYPE_CHECKING:
    import argparse

    from torch import nn

_HELP = """Tell how much memory a model takes, from its configuration: no weight is read or downloaded.

MODEL is a folder with config.json, a name on the hub, or module:factory; a folder of safetensors files will
do without a configuration.

\b
accelerate estimate-memory ./my-model
accelerate estimate-memory my_models:build --dtypes float32 bfloat16
accelerate estimate-memory ./my-model --training --mixed_precision bf16 --batch 8 --length 2048 \\
    --strategy zero3 --num_processes 8 --plot memory.png
"""


class EstimateFlag(NamedTuple):
    """One flag, for click and for argparse.

    Attributes:
        help: what it does.
        kind: ``str``, ``int``, ``bool`` for a switch, ``list`` for words.
        default: when it is not typed.
        choices: the words it takes; checked by the arithmetic, whose error suggests the nearest.
        training: it says how a model is trained, and so asks for the part on training.
    """

    help: str
    kind: type = str
    default: Any = None
    choices: tuple[str, ...] = ()
    training: bool = False


_TRAINING = sums.MemoryEstimateConfig()
FLAGS = {
    "library_name": EstimateFlag("whose model it is, where its configuration does not tell",
                         choices=("timm", "transformers", "diffusers")),
    "dtypes": EstimateFlag("number formats, one row each", list, list(sums.DEFAULT_DTYPES), tuple(sums.BITS)),
    "trust_remote_code": EstimateFlag("run code that lies beside the configuration", bool, False),
    "head": EstimateFlag("count the head of the architecture too; always counted in training", bool, False),
    "training": EstimateFlag("show what each part of a training takes", bool, False),
    "mixed_precision": EstimateFlag("weights in float32, forward in 16 bits", str, "no",
                                    tuple(sums.MIXED_PRECISION_BYTES), True),
    "optimizer": EstimateFlag("its kind", str, "adamw", tuple(sums.OPTIMIZERS), True),
    "batch": EstimateFlag("samples of one process in one forward", int, 1, (), True),
    "length": EstimateFlag("tokens of a sample; without it, activations are left out", int, None, (), True),
    "recompute": EstimateFlag("what the backward computes again", str, "none", RECOMPUTE, True),
    "attention": EstimateFlag("fused keeps no scores, eager keeps them", str, "fused",
                              ("fused", "eager"), True),
    "strategy": EstimateFlag("how training is spread", str, "single", tuple(sums.STRATEGIES), True),
    "num_processes": EstimateFlag("over how many devices", int, 1, (), True),
    "plot": EstimateFlag("draw the bars into this picture"),
    "json": EstimateFlag("print a JSON object and nothing else", bool, False),
}  # fmt: skip


def _is_dtype(args: Sequence[str]) -> bool:
    """Return whether the last word is a format; else it is the model, unless a word before all flags is."""
    return args[-1] in sums.BITS or not args[0].startswith("-")


def _print_estimate(model_name: str, given: Mapping[str, Any]) -> None:
    """Print what was asked for."""
    for dtype in given["dtypes"]:
        sums.dtype_bits(dtype)
    with_training = given["training"] or any(given[n] != f.default for n, f in FLAGS.items() if f.training)
    kinds = _training_setups(given) if with_training else []
    facts, below = _model_facts(model_name, given, head=bool(given["head"] or with_training))
    rows = estimate_rows(facts, given["dtypes"])
    bills = [
        sums.estimate_training(facts, kind, trace_activations(model_name, _skeleton_options(given), kind))
        for kind in kinds
    ]
    if given["plot"]:
        title = f"{facts.kind}, {show_count(facts.parameters)} parameters"
        # The parts of a training, else the sizes of the model.
        bars = {bill.training.title: bill.parts for bill in bills}
        bars = bars or {row["dtype"]: {"model": row["total"]} for row in rows}
        plot_bars(Path(given["plot"]), bars, title)
    if given["json"]:
        click.echo(json.dumps(_as_json(facts, rows, bills), indent=1))
        return
    _print_tables(facts, below, rows, bills, given)


def _training_setups(given: Mapping[str, Any]) -> list[sums.MemoryEstimateConfig]:
    """The ways of training that are asked for: one, or one for each format that trains."""
    options = {name: given[name] for name, flag in FLAGS.items() if flag.training}
    if given["mixed_precision"] != "no":
        return [sums.MemoryEstimateConfig(**options)]
    dtypes = [name for name in given["dtypes"] if name in sums.TRAINING_DTYPES] or given["dtypes"][:1]
    return [sums.MemoryEstimateConfig(dtype=dtype, **options) for dtype in dtypes]


def _model_facts(
    model_name: str, given: Mapping[str, Any], *, head: bool
) -> tuple[sums.ModelSizes, list[str]]:
    """The sizes of the model, and what should be known about them."""
    from accelerate.facade.estimate import skeleton

    options = _skeleton_options(given)
    whole = skeleton.build_skeleton(model_name, **options)
    facts, notes = sums.measure_model(whole, model_name), _weight_files_note(model_name)
    config: Any = getattr(whole, "config", None)
    if head or not hasattr(config, "get_text_config"):
        return facts, notes
    base = sums.measure_model(skeleton.build_skeleton(model_name, **options, head=False), model_name)
    if base.kind != facts.kind:
        more = show_count(facts.parameters - base.parameters)
        size = f"{size_text(facts.total())} in float32"
        notes.append(f"Without its head: {facts.kind} has {more} parameters more, {size} (--head).")
    return base, notes


def trace_activations(model_name: str, options: Mapping[str, Any], how: sums.MemoryEstimateConfig) -> Any:
    """Trace the activations that a forward of this training keeps; None without a sample length.

    Args:
        model_name: as typed.
        options: of ``skeleton``.
        how: the training; the strategy matters only for the format of the weights.
    """
    if how.length is None:
        return None
    import torch

    from accelerate.facade.estimate import activation_trace, skeleton

    narrow = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(how.mixed_precision)
    dtype = torch.float32 if narrow else getattr(torch, how.dtype)
    if narrow and how.narrow_weights:
        dtype, narrow = narrow, None
    attention = "fused" if how.recompute == "selective" else how.attention
    with ProgressBar(f"tracing {model_name}", None):
        model = skeleton.build_skeleton(model_name, **options)
        return activation_trace.trace_saved(model, how.batch, how.length, dtype, narrow, attention)


def _skeleton_options(given: Mapping[str, Any]) -> dict[str, Any]:
    return {"library": given["library_name"], "trust_remote_code": given["trust_remote_code"]}


def _weight_files_note(model_name: str) -> list[str]:
    """Return a note about the weight files of the folder, if it holds any."""
    from accelerate.facade.estimate.skeleton import open_safetensors

    tensors = open_safetensors(Path(model_name).expanduser()).values()
    if not tensors:
        return []
    kinds = sorted({str(tensor.dtype).removeprefix("torch.") for tensor in tensors})
    size = size_text(sum(tensor.nbytes for tensor in tensors))
    return [f"Its files hold {size}: {len(tensors)} tensor(s) of {', '.join(kinds)}."]


# ---------------------------------------------------------------- what is shown


def estimate_rows(facts: sums.ModelSizes, dtypes: Sequence[str]) -> list[dict[str, Any]]:
    """For each format: bytes of the largest layer, of the model, and of training with Adam by the rule."""
    largest = facts.largest[0]
    return [
        {
            "dtype": dtype,
            "largest_layer": -(-largest * sums.dtype_bits(dtype) // 32),
            "total": facts.total(dtype),
            "training": sums.rule_of_thumb(facts.total(), dtype),
        }
        for dtype in dtypes
    ]


def _print_tables(
    facts: sums.ModelSizes,
    notes: list[str],
    rows: list[dict[str, Any]],
    bills: list[sums.RankMemoryEstimate],
    given: Mapping[str, Any],
) -> None:
    headers = ["dtype", "Largest Layer", "Total Size", "Training using Adam"]
    cells: list[list[str]] = []
    for row in rows:
        most = max(row["training"].values())
        sizes = [size_text(row["largest_layer"]), size_text(row["total"])]
        cells.append([row["dtype"], *sizes, size_text(most) if most >= 0 else "N/A"])
    print_chart(create_ascii_table(headers, cells, f"Memory Usage for loading `{facts.name}`"))
    click.echo(f"{facts.kind}, {show_count(facts.parameters)} parameters.")
    for note in notes:
        click.echo(note)
    click.echo("")
    if not bills:
        _print_rule_table(rows)
        return
    titles = ["weights in", *sums.PARTS, "total"]
    lines = [[bill.training.title, *map(size_text, [*bill.parts.values(), bill.total])] for bill in bills]
    print_chart(create_ascii_table(titles, lines, _training_title(bills[0].training)))
    click.echo("")
    print_chart(draw_bars({bill.training.title: bill.parts for bill in bills}, colour=sys.stdout.isatty()))
    for bill in bills:
        for note in bill.notes:
            click.echo(f"{bill.training.title}: {note}.")
    if given["plot"]:
        click.echo(f"drawn in {given['plot']}")


def _print_rule_table(rows: list[dict[str, Any]]) -> None:
    trained = [row for row in rows if row["training"]["step"] >= 0]
    if not trained:
        return
    headers = ["dtype", "Model", "Gradients", "Backward pass", "Optimizer step", "Highest"]
    lines = [
        [row["dtype"], *map(size_text, row["training"].values()), size_text(max(row["training"].values()))]
        for row in trained
    ]
    print_chart(create_ascii_table(headers, lines, "Training with Adam, batch size 1, activations left out"))
    click.echo("--training counts a training part by part: optimizer, activations, devices.")


def _training_title(how: sums.MemoryEstimateConfig) -> str:
    parts = [f"Training with {how.optimizer}", f"batch {how.batch}"]
    parts += [f"length {how.length}"] if how.length else []
    parts += [f"{how.recompute} recomputation"] if how.recompute != "none" else []
    parts += [f"each of {how.num_processes} under {how.strategy}"] if how.num_processes > 1 else []
    return ", ".join(parts)


def _as_json(
    facts: sums.ModelSizes, rows: list[dict[str, Any]], bills: list[sums.RankMemoryEstimate]
) -> dict[str, Any]:
    header = {"model": facts.name, "class": facts.kind, "parameters": facts.parameters}
    summary: dict[str, Any] = {**header, "largest_layer_names": list(facts.largest[1]), "rows": rows}
    return {**summary, "training": [bill.as_json() for bill in bills]} if bills else summary


# ---------------------------------------------------------------- the command


def _option(name: str, flag: EstimateFlag) -> click.Option:
    help = flag.help + (f": {', '.join(flag.choices)}" if flag.choices else "")
    if flag.kind is bool:
        return click.Option([*flag_spellings(name), name], is_flag=True, help=help)
    shown = flag.default not in (None, "no", "none") and flag.kind is not list
    return click.Option(
        [*flag_spellings(name), name],
        multiple=flag.kind is list,
        type=int if flag.kind is int else str,
        default=flag.default,
        show_default=shown,
        metavar={int: "N", list: "FORMAT ..."}.get(flag.kind, "FILE" if name == "plot" else "NAME"),
        help=help,
    )


def _run(model_name: str, **given: Any) -> None:
    _print_estimate(model_name, {**given, "dtypes": list(given["dtypes"])})


PLUGIN = WordListCommand(
    "estimate-memory",
    word_flag="--dtypes",
    is_last_word=_is_dtype,
    callback=_run,
    params=[
        click.Argument(["model_name"], metavar="MODEL"),
        *(_option(name, flag) for name, flag in FLAGS.items()),
    ],
    context_settings={"max_content_width": 110},
    help=_HELP,
    short_help="Tell how much memory a model takes, loaded or trained.",
)


# ---------------------------------------------------------------- accelerate.commands.estimate


def estimate_command_parser(subparsers: Any = None) -> argparse.ArgumentParser:
    """An argparse parser with the arguments and flags of ``accelerate estimate-memory``.

    Args:
        subparsers: what ``ArgumentParser.add_subparsers`` returned, to add the command to it.
    """
    from accelerate.cli.v1_launcher import CustomArgumentParser

    if subparsers is None:
        parser: argparse.ArgumentParser = CustomArgumentParser("accelerate estimate-memory")
    else:
        parser = command_parser("estimate-memory", estimate_command, subparsers)
    parser.add_argument("model_name", help="a folder with config.json, a name on the hub, or module:factory")
    for each, flag in FLAGS.items():
        if flag.kind is bool:
            parser.add_argument(f"--{each}", action="store_true", help=flag.help)
            continue
        kind: dict[str, Any] = {"nargs": "+"} if flag.kind is list else {"type": flag.kind}
        parser.add_argument(
            f"--{each}", default=flag.default, choices=flag.choices or None, help=flag.help, **kind
        )
    return parser


def estimate_command(args: argparse.Namespace) -> None:
    """Print the table.

    Args:
        args: what ``estimate_command_parser().parse_args()`` returned.
    """
    options = {name: getattr(args, name, flag.default) for name, flag in FLAGS.items()}
    _print_estimate(args.model_name, options)


def gather_data(args: argparse.Namespace) -> list[list[Any]]:
    """The rows of the table, in bytes: format, largest layer, total, and the rule for training with Adam.

    Args:
        args: with ``model_name``, ``library_name``, ``dtypes`` and ``trust_remote_code``.
    """
    library, trust = args.library_name, args.trust_remote_code
    token = getattr(args, "access_token", None)
    model = create_empty_model(args.model_name, library, trust, token)
    facts = sums.measure_model(model, args.model_name)
    cells = (
        [row[key] for key in ("dtype", "largest_layer", "total")] for row in estimate_rows(facts, args.dtypes)
    )
    return [[*row, estimate_training_usage(facts.total(), row[0])] for row in cells]


def create_empty_model(
    model_name: str,
    library_name: str | None,
    trust_remote_code: bool = False,
    access_token: str | None = None,
) -> nn.Module:
    """The model on the meta device, of transformers without its head.

    Args:
        model_name: a folder, a name on the hub, or ``module:factory``.
        library_name: whose model it is; None asks its configuration.
        trust_remote_code: run code that lies beside the configuration.
        access_token: of the hub, for models that not everybody may see.
    """
    from accelerate.facade.estimate.skeleton import build_skeleton

    return build_skeleton(
        model_name, library=library_name, trust_remote_code=trust_remote_code, token=access_token, head=False
    )


def estimate_training_usage(
    bytes: int, mixed_precision: str, msamp_config: str | None = None
) -> dict[str, int]:
    """Bytes that training with Adam takes, by the rule of thumb of ``facade/estimate/memory_estimate.py``.

    Args:
        bytes: of the model in float32.
        mixed_precision: a number format.
        msamp_config: how much of a training is in 8 bits; nothing is known about that.

    Returns:
        ``model``, ``optimizer`` (the backward pass), ``gradients`` and ``step``; -1 where nothing is known.
    """
    is_known = mixed_precision in sums.BITS and msamp_config is None
    eight = sums.BITS.get(mixed_precision) == 8 and mixed_precision != "int8"  # computes as 16 bits do
    sizes = sums.rule_of_thumb(bytes, ("float16" if eight else mixed_precision) if is_known else "int4")
    return {name: sizes.get(name, sizes["backward"]) for name in ("model", "optimizer", "gradients", "step")}


def add_timm_hub_prefix(model_name: str) -> str:
    """The name by which timm finds a model of the hub; its own models have names without an owner."""
    is_timm_name = "/" not in model_name or model_name.startswith("hf-hub:")
    return model_name if is_timm_name else f"hf-hub:{model_name}"


def check_has_model(error: BaseException) -> str:
    """The library whose error says that it has no such model: ``timm``, ``transformers`` or ``unknown``."""
    text = str(error.args[0]) if error.args else ""
    if isinstance(error, RuntimeError) and "Unknown model" in text:
        return "timm"
    if isinstance(error, OSError) and "does not appear to have a file named" in text:
        return "transformers"
    return "unknown"


def verify_on_hub(repo: str, token: str | None = None) -> Any:
    """Return the hub's record of a model; ``gated`` if access is restricted, ``repo`` if there is none.

    Args:
        repo: its name.
        token: of the hub.
    """
    from accelerate.core import packages

    if not packages.is_installed("huggingface_hub"):
        raise MissingExtraError("huggingface_hub", "verify_on_hub()")
    from huggingface_hub import errors, model_info

    try:
        return model_info(repo, token=token)
    except errors.GatedRepoError:
        return "gated"
    except errors.RepositoryNotFoundError:
        return "repo"


def main() -> None:
    """``python -m accelerate.commands.estimate``."""
    estimate_command(estimate_command_parser().parse_args())
