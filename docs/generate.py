"""Writes the tables of the documentation from the code that they describe: ``python docs/generate.py``.

    docs/settings.md    every setting, from its declaration
    docs/cli.md         every command, from its help
    docs/support.md     what works where, from the registries
    docs/figures.md     the figures, from benchmarks/RESULTS.md; README.md, two of them
    docs/*.md           options of a class NAME, after <!-- options:NAME -->; trackers; examples

tests/null/test_docs.py holds the files against what this would write, and every claim against the code.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal

import click

from accelerate.core.errors import AccelerateError
from accelerate.core.registry import Registry

ROOT = Path(__file__).resolve().parents[1]
Column = Literal["built", "unrun", "refused"]


# --- what works where ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Claim:
    """One thing that the table says.

    Attributes:
        text: the thing.
        column: ``"built"`` and tested by ``make test``; ``"unrun"``, written to the real interface and tested
            with a stand-in; or ``"refused"``, an error that says why when it is asked for.
        holds: whether it is so.
        proof: what ``holds`` looks at, for the error of the test.
    """

    text: str
    column: Column
    holds: Callable[[], bool]
    proof: str


def tested(text: str, *tests: str) -> Claim:
    """Something that tests cover: ``file::words``, words of the name of a test in that file of tests/."""
    return Claim(text, "built", lambda: all(map(_is_tested, tests)), f"there are tests {', '.join(tests)}")


def faked(text: str, *tests: str) -> Claim:
    """Something that is not run here: tests use a fake of what is outside; names as for ``tested``."""
    return Claim(text, "unrun", lambda: all(map(_is_tested, tests)), f"there are tests {', '.join(tests)}")


def _is_tested(name: str) -> bool:
    file, _, words = name.partition("::")
    path = ROOT / "tests" / file
    tree = ast.parse(path.read_text(encoding="utf-8")) if path.is_file() else ast.Module([], [])
    functions = (node.name for node in tree.body if isinstance(node, ast.FunctionDef))
    return any(function.startswith("test_") and words in function for function in functions)


def refused(text: str, use: Callable[[], object], proof: str) -> Claim:
    """Something that raises an error with the reason when it is used."""

    def holds() -> bool:
        try:
            use()
        except AccelerateError as error:
            return bool(error.why)
        return False

    return Claim(text, "refused", holds, f"{proof} raises an error that says why")


def plugins(registry: Registry[Any], column: Callable[[Any], Column], leave_out: str = "") -> list[Claim]:
    """A claim per plug-in of a registry; it holds by being made from it."""
    names = (name for name in registry.names() if name != leave_out)
    return [
        Claim(f"`{name}`", column(registry.get(name)), lambda: True, f"the registry of {registry.kind}s")
        for name in names
    ]


def by_plan(plugin: Any) -> Column:
    """A strategy says itself when it has not run on its hardware."""
    return "built" if getattr(plugin, "hardware_tested", True) else "unrun"


def by_run(device: Any) -> Column:
    """The docstring of a device says where it was run; a test holds every device file to that."""
    return "built" if re.search(r"\bRun on\b", type(device).__doc__ or "") else "unrun"


RUN_HERE = {
    "SLURM": "cpu/test_schedulers.py::a_task_for_each_process_is_a_rank",
    "Open MPI": "cpu/test_schedulers.py::a_launcher_under_mpirun_is_a_rank",
    "MPI (Hydra)": "cpu/test_schedulers.py::a_launcher_under_mpirun_is_a_rank",
}


def schedulers() -> Iterator[Claim]:
    """Who may have started the processes, from world/clusters.py."""
    from accelerate.world import clusters

    kinds = (kind for kind in vars(clusters).values() if isinstance(kind, type))
    for kind in kinds:
        if issubclass(kind, clusters.ClusterEnvironment) and kind is not clusters.ClusterEnvironment:
            proof = "world/clusters.py, tested on recorded environments"
            if kind.name in RUN_HERE:
                yield tested(kind.name, RUN_HERE[kind.name])
            elif kind.name != "torchrun":
                yield Claim(kind.name, "unrun", lambda: True, proof)


def _launching() -> Iterator[Claim]:
    yield tested(
        "`python script.py`",
        "cpu/test_examples.py::alone_it_reaches",
        "cpu/test_examples.py::processes_of_its_own",
    )
    yield tested("`torchrun script.py`", "cpu/test_examples.py::torchrun")
    yield tested(
        "`accelerate launch` of one process or several on one machine",
        "cpu/test_launch.py::a_world_of_two_in_torch",
        "cpu/test_examples.py::on_two_processes_it_learns",
    )
    yield tested("`notebook_launcher` in Jupyter", "cpu/test_notebook.py::a_function_of_the_notebook_runs")
    yield tested("`debug_launcher` in tests", "cpu/test_notebook.py::a_test_runs_a_function")
    yield from schedulers()
    yield tested(
        "`accelerate launch` on several machines, and with restarts",
        "cpu/test_machines.py::a_crash_on_one_host_is_recovered",
        "cpu/test_elastic.py::started_again_with_the_others",
    )
    yield tested(
        "`mpirun` on the machines of a file (`--mpirun_hostfile`)",
        "cpu/test_schedulers.py::file_of_machines_is_launched",
    )
    yield tested(
        "machines on a slow, lossy network: one joins late, one is lost, clocks differ",
        "cpu/test_machines.py::machines_on_a_slow",
    )
    yield tested(
        "Ray (`--ray`, `accelerate.ray.launch`), by `make test-ray`; with a fake of it in `make test`",
        "ray/test_jobs.py::a_function_trains_on_two_machines",
        "null/test_ray_launch.py::machines_are_numbered",
    )
    yield tested(
        "manifests (`--print_manifest`) for Kubeflow, JobSet and SkyPilot, applied to no cluster",
        "null/test_manifests.py::a_pytorch_job_of_a_file",
    )
    yield faked(
        "TPU and its pods (`--tpu`, `--tpu_use_cluster`, `tpu-config`)",
        "null/test_tpu_launch.py::once_for_each_device",
        "null/test_tpu_launch.py::on_all_machines",
    )
    yield faked("Amazon SageMaker", "null/test_sagemaker.py::a_job_is_started")


def _devices() -> Iterator[Claim]:
    from accelerate.device import DEVICES

    yield from plugins(DEVICES, by_run, leave_out="null")
    yield tested("any other type that torch has a module for, on a simulated one", "sim/test_sim_generic.py")


def _more_strategies() -> Iterator[Claim]:
    law = "laws/test_7_parity.py::numbers_of_one_process"
    yield tested("a device mesh: HSDP, tensor, context, sequence and pipeline parallel", law)
    other = "laws/test_7_parity.py::another_strategy"
    yield tested("from one strategy to another in the middle of a training", other)
    plan = ("null/test_cli_plan.py", "sim/test_sim_plan.py", "cpu/test_plan_memory.py")
    yield tested("the recommended way to spread a model (`plan`)", *plan)
    rehearsal = "null/test_model_dry_run.py::dry_run"
    yield tested("a layout of 512 processes on one CPU (`--dry_run_model`)", rehearsal)
    yield tested("LocalSGD and DiLoCo", "cpu/test_local_sgd.py::what_the_paper_says")


def _data() -> Iterator[Claim]:
    yield tested(
        "map-style datasets with any sampler",
        "null/test_sharding.py",
        "cpu/test_data_parallel.py::order_on_two_ranks",
    )
    yield tested("streams", "null/test_sharding.py::stream", "cpu/test_dispatch.py::variable_lengths")
    yield tested("process 0 reads for all (`dispatch_batches`)", "cpu/test_dispatch.py::any_kind_travel")
    yield tested("sharded data is recognised", "cpu/test_sharded.py")
    yield tested(
        "exact resume inside an epoch, also on another number of processes",
        "cpu/test_resume_ranks.py::run_in_two_parts",
        "cpu/test_resume_ranks.py::another_number_of_processes",
    )
    yield tested("exact metrics (`gather_for_metrics`)", "cpu/test_metrics.py::once_and_in_order")
    yield tested("`join_uneven_inputs`", "cpu/test_join.py::train_to_the_end")


def _gradients() -> Iterator[Claim]:
    yield tested("accumulation (`accumulate`, `no_sync`)", "cpu/test_data_parallel.py::windows_close")
    yield tested("`windows`, divided by what they hold", "null/test_accumulation_windows.py::mean_of_its_own")
    yield tested("weights by tokens (`num_items`)", "cpu/test_gradients.py::any_split")
    yield tested("the true norm when clipping", "cpu/test_data_parallel.py::true_norm")
    yield tested("gradients sent in half precision", "cpu/test_data_parallel.py::half_precision")


def _processes() -> Iterator[Claim]:
    yield tested("collectives over trees and objects", "cpu/test_collectives.py::every_leaf")
    yield tested(
        "one process fails, all end, and it is said who",
        "cpu/test_collective_errors.py::last_words_are_the_failing_ranks",
        "cpu/test_collective_errors.py::disagree_about",
    )


def _checkpoints() -> Iterator[Claim]:
    yield tested(
        "`save_state` and `load_state`: whole or not at all, verified",
        "cpu/test_checkpoint_ranks.py::killed_at_any_write",
        "cpu/test_checkpoint_ranks.py::damage",
    )
    yield tested(
        "loading on another number of processes", "cpu/test_checkpoint_ranks.py::another_number_of_ranks"
    )
    yield tested(
        "a disk for each machine (`save_on_each_node`)", "cpu/test_checkpoint_ranks.py::each_machine"
    )
    yield tested("`save_model`, in shards", "null/test_checkpoint_export.py")
    yield tested("`load_checkpoint_in_model`, a tensor at a time", "null/test_weight_loading.py")
    yield tested("files that would run code are refused", "null/test_checkpoint_safe.py::would_run_code")
    yield tested(
        "sharded, loaded under another strategy and world size",
        "cpu/test_sharded_checkpoints.py::another_strategy_and_number",
    )
    yield tested("merging shards (`merge-weights`)", "null/test_sharded_state.py::merg")


def _float8_libraries() -> Iterator[Claim]:
    yield tested("`fp8` by torchao, emulated on a CPU", "null/test_fp8.py::trains_as_bf16_does")
    yield faked("`fp8` by TransformerEngine", "null/test_fp8_transformer_engine.py::trains_as_bf16_does")
    yield refused("`fp8` by MS-AMP", _request_msamp, "a request for it")


def _request_msamp() -> None:
    from accelerate import Accelerator
    from accelerate.utils import MSAMPRecipeKwargs

    Accelerator(cpu=True, mixed_precision="fp8", kwargs_handlers=[MSAMPRecipeKwargs()])


def _big_models() -> Iterator[Claim]:
    yield tested("`init_empty_weights`", "null/test_empty_init.py")
    yield tested(
        "`load_checkpoint_and_dispatch`, device maps, offload to memory and files",
        "null/test_load_big.py",
        "null/test_dispatch.py",
        "sim/test_sim_pager.py",
    )
    yield tested(
        "a plan without weights (`plan-inference`, `estimate-memory`)",
        "null/test_cli_plan_inference.py",
        "null/test_cli_estimate.py",
    )
    yield tested(
        "8-bit and 4-bit quantization by bitsandbytes and torchao",
        "null/test_quantization.py",
        "null/test_quantization_torchao.py",
    )
    yield tested(
        "pipeline-parallel inference (`prepare_pippy`)",
        "cpu/test_pippy.py::what_the_plain_model_gives",
        "sim/test_sim_pippy.py",
    )


def _trackers() -> Iterator[Claim]:
    """`make test` runs those whose package it installs, `make test-trackers` all that its list names."""
    from accelerate.track import TRACKERS

    installed = _test_extra() | _trackers_list()
    for tracker in TRACKERS:
        run = not tracker.packages or bool(installed & {*tracker.packages})
        proof = "packages of the extra test in pyproject.toml, and of tests/clients/trackers.txt"
        yield Claim(f"`{tracker.name}`", "built" if run else "unrun", lambda: True, proof)


def _test_extra() -> set[str]:
    """Names of the packages that the extra ``test`` names itself."""
    text = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    (block,) = re.findall(r"^test = \[(.*?)^\]", text, re.MULTILINE | re.DOTALL)
    return set(re.findall(r'"([\w-]+)', block))


def _trackers_list() -> set[str]:
    """Names of the modules whose packages `make test-trackers` installs."""
    text = (ROOT / "tests" / "clients" / "trackers.txt").read_text(encoding="utf-8")
    return {name.replace("-", "_") for name in re.findall(r"^([\w-]+)==", text, re.MULTILINE)}


def _watching() -> Iterator[Claim]:
    yield tested(
        "loggers and progress bars that know ranks",
        "null/test_utilities_watch.py::logs",
        "null/test_utilities_watch.py::bar",
    )
    yield tested("`find_executable_batch_size`, one size for all", "null/test_utilities_watch.py")
    yield tested("`Accelerator.profile`, a trace per rank", "null/test_accelerator.py::trace_per_rank")
    yield tested("a picture of what fills the memory", "null/test_profile.py::what_fills_the_memory")


def _commands() -> Iterator[Claim]:
    from accelerate.cli.main import COMMANDS

    for name in COMMANDS.names():
        yield Claim(f"`accelerate {name.replace('_', '-')}`", "built", lambda: True, "the folder cli/")


def claims() -> dict[str, list[Claim]]:
    """Everything that the table says, by row."""
    from accelerate.precision import PRECISIONS
    from accelerate.strategy import STRATEGIES

    return {
        "Launching": list(_launching()),
        "Devices": list(_devices()),
        "Strategies": [*plugins(STRATEGIES, by_plan), *_more_strategies()],
        "Mixed precision": [*plugins(PRECISIONS, by_plan), *_float8_libraries()],
        "Compilation": [tested("`torch.compile` in place", "null/test_accelerator.py::compiled_in_place")],
        "Processes": list(_processes()),
        "Data": list(_data()),
        "Gradients": list(_gradients()),
        "Checkpoints": list(_checkpoints()),
        "Models larger than memory": list(_big_models()),
        "Watching": list(_watching()),
        "Trackers": list(_trackers()),
        "Commands": list(_commands()),
    }


def support_table() -> str:
    """What works where, as Markdown."""
    titles: dict[Column, str] = {
        "built": "Built, and tested by `make test`",
        "unrun": "Written to the real interface, tested with fakes of it",
        "refused": "Refused, with the reason",
    }
    rows = []
    for row, found in claims().items():
        cells = ("; ".join(claim.text for claim in found if claim.column == column) for column in titles)
        rows.append([f"**{row}**", *(cell or "-" for cell in cells)])
    return table(["", *titles.values()], rows)


# --- figures ------------------------------------------------------------------------------------------------


def newest_results() -> list[str]:
    """The lines of the newest whole run in benchmarks/RESULTS.md: date, machine, table; none without one.

    The heading of a whole run is its date alone.
    """
    path = ROOT / "benchmarks" / "RESULTS.md"
    parts = path.read_text(encoding="utf-8").split("\n## ")[1:] if path.is_file() else []
    whole = (part.splitlines() for part in parts if re.match(r"[\d-]+ [\d:]+\n", part))
    return next(whole, [])


def figure_rows() -> dict[str, list[str]]:
    """The cells of each figure, by its title: raw, ours, 1.15.0, target, noise, verdict."""
    rows = [line.strip("| ").split(" | ") for line in newest_results() if line.startswith("|")]
    return {title: cells for title, *cells in rows[2:]}


def figures() -> str:
    """The newest table of ``make bench``, or how to make one."""
    lines = newest_results()
    if not lines:
        return "No figures are recorded yet: `make bench` measures them."
    machine = [line.removeprefix("- ") for line in lines[1:] if line.startswith("- ")][:2]
    rows = [line for line in lines if line.startswith("|")]
    failed = [
        f"- {title}, {subject}: "
        for title, cells in figure_rows().items()
        for subject, figure in (("ours", cells[1]), ("1.15.0", cells[2]))
        if figure == "failed"
    ]
    reasons = [line for line in lines if line.startswith(tuple(failed))]
    head = f"Measured on {lines[0].strip()}: {'; '.join(machine)}."
    return "\n".join([head, "", *rows, *(["", "Why a figure is missing:", "", *reasons] if reasons else [])])


def highlights() -> str:
    """What the README says of speed: the medians of four figures, ours and those of 1.15.0."""
    rows = figure_rows()
    ours, theirs = (
        {title: cells[i].partition(" [")[0].lstrip("+") for title, cells in rows.items()} for i in (1, 2)
    )
    start, disk, resume, step = (
        "`accelerate --help`",
        "load 4.3 GB with 32 blocks on disk",
        "`load_state` of 3.2 GB, cached, against 1.15.0",
        "added to a training step, fp32",
    )
    share = f"{float(ours[resume].rstrip('x')):.0%}"
    return (
        f"- **It is quick** (in brackets 1.15.0): {start} {ours[start]} ({theirs[start]}), loading\n"
        f"  4.3 GB with 32 blocks on disk {ours[disk]} ({theirs[disk]}); a training step of\n"
        f"  {rows[step][0]} in plain PyTorch takes {ours[step]} ({theirs[step]}) more; `load_state`\n"
        f"  of 3.2 GB takes {share} of the time."
    )


# --- settings -----------------------------------------------------------------------------------------------


def settings_page() -> str:
    """docs/settings.md."""
    from accelerate.cli.options import launch_settings as every_setting
    from accelerate.core import environ

    topics: dict[str, list[list[str]]] = {}
    for row in every_setting():
        topics.setdefault(row.topic, []).append(_setting(row))
    parts = [_HEAD]
    for topic, rows in topics.items():
        parts += [f"## {topic}", table(["Flag", "Variable", "Key", "Default", "What it does"], rows)]
    parts += ["## Variables that describe a run", _PROTOCOL]
    parts.append(
        table(["Variable", "Meaning"], ([code(n), cell(t)] for n, t in environ.PROTOCOL_VARIABLES.items()))
    )
    parts += ["## Which devices a process sees", _VISIBLE, table(["Device", "Variable"], _visible())]
    parts += ["## What a device's processes are given", _GIVEN]
    parts.append(table(["Device", "Variable", "Value"], _given()))
    return "\n\n".join(parts) + "\n"


_HEAD = """<!-- Written by docs/generate.py. Change the declaration of the setting, then run it. -->

# Settings

Every setting is declared once, next to the code that uses it. Its flag, its environment variable, its key in
a configuration file and this page are made from that declaration.

Where several sources give a value, the first of these wins:

1. the script's own code, such as `Accelerator(mixed_precision="bf16")`
2. a flag of `accelerate launch`
3. an environment variable
4. a configuration file
5. the default

A wrong value is an error whether it wins or not. `accelerate env --explain` prints every setting with its
value, its source and what it overrides. The flags of a launch may follow it.

**Flags.** `--num_processes` and `--num-processes` are the same flag. This holds for all of them.

**Variables.** An empty variable counts as unset. Yes is `1 true t yes y on`, no is `0 false f no n off`.

**Files.** A configuration file is YAML, or JSON if its name ends in `.json`. `accelerate launch` uses the
first of these that there is:

1. the file that `--config_file` or `ACCELERATE_CONFIG_FILE` names
2. `accelerate/default_config.yaml` in `$HF_HOME`, by default `~/.cache/huggingface`; not with `--cpu`

A file that was not named is announced in one line. An unknown key is an error that gives its line and the
nearest known key; in a nested table, where Accelerate 1.x reads past it, one that is near no other is told
in a line. `python script.py` and `torchrun script.py` read no file. A number may stand between quotes.

A key with a dot, `dynamo_config.dynamo_backend`, is a key of a nested table. There the prefix `dynamo_` may
be left out."""

_PROTOCOL = "They have no flag and no key: a launcher, a scheduler or the shell sets them."

_VISIBLE = """`accelerate launch --gpu_ids 0,2` sets the variable of the device at hand for what it starts.
UUIDs (`--gpu_ids GPU-8f6c2f5a,GPU-1b2c3d4e`) are handed on as they are."""
_GIVEN = """A launcher sets these before torch is loaded; without one, the first `Accelerator` or
`PartialState` does. What you have set yourself stays. `accelerate launch --dry-run` shows them."""


def _setting(row: Any) -> list[str]:
    """The cells of one setting."""
    text = cell(row.help)
    if row.choices:
        text += ": " + ", ".join(f"`{choice}`" for choice in row.choices)
    flags = " ".join(map(code, row.flags))
    key = code(row.path) if row.in_file else ""
    value = row.fallback if row.default is None else row.default
    default = "" if value is None else code(_shown(value))
    return [flags, code(row.variable or ""), key, default, text]


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _visible() -> Iterator[list[str]]:
    from accelerate.device import accelerators

    for device in accelerators():
        yield [code(device.type), code(device.visible_variable or "")]


def _given() -> Iterator[list[str]]:
    from accelerate import device as devices

    for name in devices.DEVICES.names():
        for variable, value in devices.get(name).environment.items():
            yield [code(name), code(variable), code(value)]


# --- options of a class -------------------------------------------------------------------------------------


def command_line_page() -> str:
    """The page on the commands: the help of each."""
    from accelerate.cli.main import accelerate

    sections = "".join(_command_sections(accelerate, "accelerate", accelerate.context_settings))
    return (
        "# Command line\n\n"
        "What each command says to `-h`. All flags of `accelerate launch` are those of "
        "[Settings](settings.md).\n"
        f"{sections}"
    )


def _command_sections(command: click.Command, name: str, settings: Mapping[str, Any]) -> Iterator[str]:
    context = click.Context(command, info_name=name, terminal_width=100, max_content_width=100, **settings)
    text = command.get_help(context).rstrip()
    yield f"\n## {name}\n\n```text\n{text}\n```\n"
    if isinstance(command, click.Group):
        for each in command.list_commands(context):
            found = command.get_command(context, each)
            assert found is not None
            yield from _command_sections(found, f"{name} {each}", settings)


def options_table(cls: type) -> str:
    """The fields of a dataclass with their defaults and what its docstring says about each."""
    said = _attributes(inspect.getdoc(cls) or "")
    fields = (each for each in dataclasses.fields(cls) if each.init and not each.name.startswith("_"))
    rows = ([code(each.name), code(_default(each)), cell(said.get(each.name, ""))] for each in fields)
    return table(["Option", "Default", "What it does"], rows)


def _attributes(docstring: str) -> dict[str, str]:
    """What stands under ``Attributes:``, by name; one entry may be for several names."""
    _, _, rest = docstring.partition("Attributes:\n")
    block = re.split(r"\n\S", f"{rest}\n", maxsplit=1)[0]
    found: dict[str, str] = {}
    for names, words in re.findall(r"^    (\w[\w, ]*): (.*(?:\n {5,}.*)*)", block, re.MULTILINE):
        text = " ".join(words.replace("``", "`").split())
        found |= dict.fromkeys(names.split(", "), text[:1].upper() + text[1:])
    return found


def _default(each: dataclasses.Field[Any]) -> str:
    if each.default is not dataclasses.MISSING:
        return f'"{each.default}"' if isinstance(each.default, str) else str(each.default)
    made: Any = each.default_factory
    return "" if made is dataclasses.MISSING else str(made())


def trackers_table() -> str:
    """Every tracker: what it writes and on what it was run, from its docstring."""
    from accelerate.track import TRACKERS

    rows = []
    for tracker in TRACKERS:
        writes, _, run = cell((inspect.getdoc(tracker) or "").splitlines()[0]).partition(" Run here: ")
        package = " or ".join(map(code, tracker.packages)) or "-"
        folder = "yes" if tracker.requires_logging_directory else "-"
        rows.append(
            [code(tracker.name), writes.replace("``", "`"), package, folder, run.replace("``", "`") or "-"]
        )
    return table(["`log_with`", "What it writes", "Package", "Needs `project_dir`", "Run here"], rows)


def devices_table() -> str:
    """Every device: its facts, on what it was run, and by what its file is tested without the hardware."""
    from accelerate.device import DEVICES

    rows = []
    for device in DEVICES:
        if device.type == "meta":
            continue
        _, _, run = cell((inspect.getdoc(type(device)) or "").splitlines()[0]).partition(". ")
        held = "a fake of its module" if device.priority else "`make test` runs on it"
        if device.extension and not _is_type_of_torch(device.type):
            held += "; the simulated accelerator under its name: FSDP2, DDP in 16 bits, checkpoints"
        variable = code(device.visible_variable or "") or "-"
        rows.append(
            [code(device.type), code(device.backend) or "-", variable, code(device.compile_backend) or "-"]
        )
        rows[-1] += [run.rstrip("."), held]
    titles = ["Device", "Process groups", "Hidden by", "Compiled by", "Run for real", "Conformance"]
    return table(titles, rows)


def _is_type_of_torch(type: str) -> bool:
    """True unless its package gives the name to torch's spare device type."""
    import torch

    try:
        torch.device(type)
    except RuntimeError:
        return False
    return True


def tracker_places() -> str:
    """For every tracker: how it is used online and offline, where its files are, how a run goes on."""
    from accelerate.track import TRACKERS

    parts = []
    for tracker in TRACKERS:
        lines = re.findall(
            r"^(Online|Offline|Files|Resume): (.*(?:\n    .*)*)", inspect.getdoc(tracker) or "", re.MULTILINE
        )
        texts = (f"- {name}: {' '.join(text.split()).replace('``', '`')}" for name, text in lines)
        parts.append("\n".join([f"### {code(tracker.name)}", "", *texts]))
    return "\n\n".join(parts)


def examples_table() -> str:
    """Every example and the first line of its docstring."""
    rows = []
    for path in sorted((ROOT / "examples").glob("*.py")):
        said = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        rows.append([code(f"examples/{path.name}"), cell(said.split("\n\n")[0].replace("\n", " "))])
    return table(["File", "What it shows"], rows)


def page(path: Path) -> str:
    """A page with its tables."""
    text = path.read_text(encoding="utf-8")
    tables = {
        "support": support_table,
        "figures": figures,
        "highlights": highlights,
        "trackers": trackers_table,
        "devices": devices_table,
        "tracker_places": tracker_places,
        "examples": examples_table,
    }
    for name, make in tables.items():
        text = filled(text, name, make()) if f"<!-- {name} -->" in text else text
    for name in re.findall(r"<!-- options:(\w+) -->", text):
        cls = getattr(importlib.import_module("accelerate.utils"), name)
        text = filled(text, f"options:{name}", options_table(cls))
    return text


# --- Markdown -----------------------------------------------------------------------------------------------


def cell(text: str) -> str:
    """Text that stays in its cell; in code Markdown shows an entity as it is written."""
    parts = text.replace("|", "\\|").split("`")
    return "`".join(part if i % 2 else part.replace("<", "&lt;") for i, part in enumerate(parts))


def code(text: str) -> str:
    """Text as code, nothing for nothing."""
    return f"`{text}`" if text else ""


def table(titles: list[str], rows: Iterable[Iterable[str]]) -> str:
    """A Markdown table."""
    lines = [titles, ["---"] * len(titles), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def filled(text: str, name: str, content: str) -> str:
    """``text`` with what stands between ``<!-- name -->`` and ``<!-- /name -->`` replaced.

    Raises:
        ValueError: the marks are not there.
    """
    begin, end = f"<!-- {name} -->", f"<!-- /{name} -->"
    if begin not in text or end not in text:
        raise ValueError(f"the marks {begin} and {end} are missing")
    head, rest = text.split(begin, 1)
    return f"{head}{begin}\n{content}\n{end}{rest.split(end, 1)[1]}"


def pages_with_tables() -> dict[str, Callable[[], str]]:
    """README.md and the pages of docs/ in which a table is marked."""
    paths = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    marked = [path for path in paths if "<!-- /" in path.read_text("utf-8")]
    return {str(path.relative_to(ROOT)): partial(page, path) for path in marked}


PAGES: dict[str, Callable[[], str]] = {
    "docs/settings.md": settings_page,
    "docs/cli.md": command_line_page,
    **pages_with_tables(),
}


def main() -> None:
    """Writes all pages."""
    for name, make in PAGES.items():
        (ROOT / name).write_text(make(), encoding="utf-8")
        print(name)


if __name__ == "__main__":
    main()
