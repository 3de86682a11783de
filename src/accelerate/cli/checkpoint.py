"""``accelerate checkpoint``: look at checkpoints, check them, clear them, and export their weights."""

from __future__ import annotations

import json
import os
import shutil
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click

from accelerate.checkpoint import checkpoint_maintenance
from accelerate.checkpoint.discovery import CheckpointCandidate
from accelerate.cli.main import CommandGroup
from accelerate.core.errors import CheckpointError, SettingError
from accelerate.core.tables import print_table
from accelerate.core.units import ProgressBar, show_bytes, show_seconds

_DIR = """DIR is a checkpoint, a folder of checkpoints, or the project_dir of a run; or the URL of one."""
_LOCAL_DIR = """DIR is a checkpoint, a folder of checkpoints, or the project_dir of a run, on this machine."""


class _CheckpointCommandGroup(CommandGroup):
    """Its commands; a folder alone is none of them."""

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Find the command. A path is never taken for a mistyped one: the nearest may remove something."""
        if not ctx.resilient_parsing and ("/" in args[0] or os.path.exists(args[0])):
            raise SettingError(
                f"{args[0]} is no command", fix=f"accelerate checkpoint ls {args[0]} shows what is there"
            )
        return super().resolve_command(ctx, args)


@click.group(
    "checkpoint",
    cls=_CheckpointCommandGroup,
    invoke_without_command=True,
    short_help="List, verify, prune and export checkpoints.",
)
@click.pass_context
def _checkpoint(ctx: click.Context) -> None:
    """List, verify, prune and export checkpoints."""
    if ctx.invoked_subcommand is None:
        click.echo(ctx.get_help())
        ctx.exit(1)


@_checkpoint.command("ls", short_help="A table of checkpoints.", epilog=_DIR)
@click.argument("folder", metavar="DIR")
@click.option("--json", "as_json", is_flag=True, help="print a JSON list")
def _ls(folder: str, as_json: bool) -> None:
    """A table of the checkpoints in DIR, oldest first; what is incomplete is listed with the reason.

    Only manifests are read. `accelerate checkpoint verify` reads everything.
    """
    place = checkpoint_maintenance.open_checkpoints(folder)
    rows = [_candidate_row(candidate, newest=candidate is place.newest) for candidate in place.candidates]
    if as_json:
        click.echo(json.dumps(rows, indent=1))
        return
    first_titles = ("name", "step", "position", "metadata", "saved", "age", "size")
    titles = (*first_titles, "processes", "strategy", "format", "status")
    if sys.stdout.isatty() and shutil.get_terminal_size().columns < 110:
        # The age says when in less room; the rest is in the wide table and in --json.
        titles = tuple(title for title in titles if title not in ("saved", "processes", "format"))
    incomplete = {index for index, row in enumerate(rows) if not row["complete"]}
    cells = ([_cell_text(row, title) for title in titles] for row in rows)
    print_table(titles, cells, dim=incomplete, wrap=False)


def _candidate_row(candidate: CheckpointCandidate, *, newest: bool) -> dict[str, Any]:
    manifest = candidate.manifest
    return {
        "name": candidate.name,
        "step": manifest.step if manifest else None,
        "position": _loader_position(manifest.loaders if manifest else []),
        "metadata": manifest.metadata if manifest else {},
        "saved": candidate.saved_at.isoformat(),
        "size": sum(checkpoint_maintenance.file_sizes(candidate).values()),
        "processes": manifest.world_size if manifest else None,
        "strategy": manifest.strategy if manifest else "",
        "format": checkpoint_maintenance.weight_layout(candidate),
        "complete": not candidate.problem,
        "newest": newest,
        "status": candidate.problem or "complete",
    }


def _loader_position(loaders: list[Any]) -> str:
    """Return the position of the first loader: ``epoch 2, 384 of 1000 samples``."""
    first: dict[str, Any] = next((loader for loader in loaders if "epoch" in loader), {})
    progress = first.get("in_progress")
    if not first or progress is None or (progress["complete"] and not progress["active"]):
        return f"epoch {first['epoch']}" if first else ""
    whole = f" of {progress['length']}" if progress["length"] else ""
    return f"epoch {progress['epoch']}, {progress['samples']}{whole} samples"


def _cell_text(row: dict[str, Any], title: str) -> str:
    saved = datetime.fromisoformat(row["saved"])
    if title == "saved":
        return saved.astimezone().strftime("%Y-%m-%d %H:%M:%S")
    if title == "age":
        return show_seconds(max(1, round((datetime.now(timezone.utc) - saved).total_seconds())))
    if title == "size":
        return show_bytes(row["size"])
    if title == "step" and row["step"] == 0:
        return ""  # a loop without accumulate() counts no steps
    if title == "metadata":
        return " ".join(f"{key}={value}" for key, value in row["metadata"].items())
    if title == "status" and row["newest"]:
        return f"{row['status']}, newest"
    return "" if row[title] is None else str(row[title])


@_checkpoint.command("verify", short_help="Compare every file with its size and digest.", epilog=_DIR)
@click.argument("folder", metavar="DIR")
@click.argument("names", nargs=-1, metavar="[NAME]...")
@click.option("--json", "as_json", is_flag=True, help="print a JSON list")
@click.pass_context
def _verify(ctx: click.Context, folder: str, names: tuple[str, ...], as_json: bool) -> None:
    """Read every file of the checkpoints in DIR, or of those called NAME, and compare with the manifest.

    The exit code is 1 if anything is missing or damaged. A checkpoint without a manifest, as Accelerate 1.x
    writes it, can only be looked at: its files are opened as far as their formats allow.
    """
    place = checkpoint_maintenance.open_checkpoints(folder)
    chosen = [checkpoint_maintenance.select_checkpoint(place, name) for name in names] or place.candidates
    lines: list[dict[str, str]] = []
    sizes = [checkpoint_maintenance.file_sizes(each) for each in chosen if each.manifest is not None]
    with ProgressBar("verifying", sum(sum(files.values()) for files in sizes)) as progress:
        for candidate in chosen:
            lines += _verify_candidate(candidate, progress)
    if as_json:
        click.echo(json.dumps(lines, indent=1))
    else:
        titles = ("name", "file", "size", "result")
        print_table(titles, [[line[title] for title in titles] for line in lines], wrap=False)
    bad = sum(line["ok"] == "no" for line in lines)
    if bad:
        click.echo(f"{bad} of {len(lines)} are not as they were saved", file=sys.stderr)
        ctx.exit(1)


def _verify_candidate(candidate: CheckpointCandidate, progress: ProgressBar) -> list[dict[str, str]]:
    if candidate.manifest is None:
        seen = candidate.problem or "no manifest: every file can be opened, digests are not known"
        line = {"name": candidate.name, "file": "", "size": "", "result": seen}
        return [line | {"ok": "no" if candidate.problem else "unknown"}]
    damages = {each.name: each for each in checkpoint_maintenance.check_files(candidate, progress.advance)}
    lines: list[dict[str, str]] = []
    for name, record in sorted(candidate.manifest.files.items(), key=lambda item: (-item[1].size, item[0])):
        damage = damages.get(name)
        size = record.size if damage is None else damage.size
        result = "as saved" if damage is None else f"it is {damage.state}: {damage.why}"
        lines.append(
            {
                "name": candidate.name,
                "file": name,
                "size": "" if size is None else show_bytes(size),
                "result": result,
                "ok": "yes" if damage is None else "no",
            }
        )
    return lines


@_checkpoint.command("prune", short_help="Remove the oldest checkpoints.", epilog=_DIR)
@click.argument("folder", metavar="DIR")
@click.option("--keep", type=click.IntRange(min=1), required=True, metavar="N", help="how many stay")
@click.option("--dry-run", is_flag=True, help="only say what would go")
@click.option("--yes", is_flag=True, help="do not ask")
def _prune(folder: str, keep: int, dry_run: bool, yes: bool) -> None:
    """Remove the oldest complete checkpoints in DIR beyond N, and what interrupted saves have left.

    The newest complete one always stays, and so does what is damaged. A leftover goes if a checkpoint was
    committed after it, and nothing in it has changed for ten minutes: it could be a save that is going on.
    """
    place = checkpoint_maintenance.open_checkpoints(folder)
    if place.single:
        raise SettingError(f"{folder} is one checkpoint", fix="name the folder that holds the checkpoints")
    going, stays = checkpoint_maintenance.plan_removal(place, keep)
    for line in stays:
        click.echo(f"stays: {line}")
    if not going:
        click.echo("nothing to remove")
        return
    rows = [(each.name, show_bytes(each.size), each.why) for each in going]
    print_table(("name", "size", "why"), rows, wrap=False)
    total = show_bytes(sum(each.size for each in going))
    if dry_run:
        click.echo(f"would free {total}")
        return
    if not yes:
        try:
            agreed = click.confirm(f"Remove {len(going)} folder(s), {total}?")
        except click.Abort as error:
            click.echo()  # ends the line of the question
            if sys.stdin.isatty():
                raise
            fix = "--yes removes without asking"
            raise SettingError("nothing is removed: there was no answer", fix=fix) from error
        if not agreed:
            raise click.Abort
    from accelerate.checkpoint.storage import new_id

    for each in going:
        checkpoint_maintenance.remove_candidate(place, each, new_id())
    click.echo(f"removed {len(going)} folder(s), {total}")


@_checkpoint.command("export", short_help="Write the weights for other tools.", epilog=_LOCAL_DIR)
@click.argument("folder", metavar="DIR")
@click.argument("out", metavar="OUT", type=click.Path(path_type=Path))
@click.option("--max-shard-size", "--max_shard_size", default="5GB", show_default=True, metavar="SIZE",
              help="limit of one file")  # fmt: skip
@click.option("--model", type=click.IntRange(min=0), default=0, show_default=True, metavar="N",
              help="which of the checkpoint's models")  # fmt: skip
@click.option("--dtype", metavar="NAME", help="what floating point weights become: bf16, fp16, fp32")
def _export(folder: str, out: Path, max_shard_size: str, model: int, dtype: str | None) -> None:
    """Write the weights of DIR, or of its newest complete checkpoint, into the folder OUT.

    OUT gets model.safetensors, or shards and their index: the layout of the model hub. Weights of an earlier
    export are replaced. The files are verified first. One tensor is in memory at a time.
    """
    candidate = checkpoint_maintenance.select_checkpoint(checkpoint_maintenance.open_checkpoints(folder))
    if candidate.problem:
        raise CheckpointError(f"{candidate.path} is not complete", why=candidate.problem)
    from accelerate.checkpoint.weight_files import export_weights
    from accelerate.facade.engine_checkpoint_import import engine_weights

    more = {"on_progress": click.echo, "find_engine_weights": engine_weights}
    done = export_weights(candidate, out, model=model, max_shard_size=max_shard_size, dtype=dtype, **more)
    if done.left_out:
        click.echo(f"left out, since they are no tensors: {', '.join(done.left_out)}", file=sys.stderr)
    click.echo(f"{done.tensors} tensors, {show_bytes(done.size)}, from {done.source} in {out}")


PLUGIN = _checkpoint
