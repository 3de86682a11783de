"""Law 1: a back end is branched on and imported in its own files only.

The back ends are the plug-in files themselves, so a new file is under the law by existing, and the schedulers
of world/clusters.py. Outside of its own files nobody compares with a back end's name, tests a condition that
names it, asks for an instance of its classes, or imports its package or our files about it. To name it in
words, identifiers, texts and documents is free and wanted: readers search for these names.

Its own are the file or folder called after it and those in ``OWN``.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache

import pytest

from tests.laws.source import Source, imported, obey, read, sources

LAW = "law 1, a back end is branched on and imported in its own files only"
CLUSTERS = ("world", "clusters")
FOLDERS = ("device", "strategy", "track", "precision")
# Plug-ins whose name is an ordinary word: to compare with the word is no branch on the plug-in.
GENERIC = {
    "cpu": "the host, which every program has",
    "null": "the value",
    "single": "one of something",
    "no": "the word; the precision of that name is the absence of one",
    "parallelism": "what every way of training on several processes is",
    "fp16": "a number format of IEEE 754; gradients travel in it and files are written in it",
    "bf16": "a number format, likewise",
    "torchrun": "the protocol that every launcher speaks, ours too",
}
# Files and folders about a back end that are not called after it.
OWN = {
    "precision/float8": {"fp8"},
    "strategy/sharding": {"fsdp", "fsdp1"},
    "launch/kinds/tpu": {"xla"},
    "launch/tpu_rank": {"xla"},
}
_NUMBERS = "which number formats the units of the device have"
_PROMISED = "arguments and attributes that the public interface names so"
# Branches and imports elsewhere, each with its reason: (file or folder, back end) -> why.
ALLOWED = {
    ("device/cuda", "fp8"): _NUMBERS,
    ("device/hpu", "fp8"): _NUMBERS,
    ("facade/accelerator", "deepspeed"): _PROMISED,
    ("facade/accelerator", "fp8"): _PROMISED,
    ("facade/accelerator", "megatron"): _PROMISED,
    ("facade/state", "deepspeed"): _PROMISED,
    ("facade/state", "fsdp"): _PROMISED,
    ("launch/launcher", "fsdp"): "the table of settings that exclude each other",
    (
        "launch/kinds/deepspeed",
        "slurm",
    ): "the launcher that hands on the environment itself",
    ("facade/estimate/memory_estimate", "ddp"): "what each rank holds under the strategy, as a sum",
    ("facade/estimate/memory_estimate", "fsdp"): "what each rank holds under the strategy, as a sum",
    ("precision/float8/torchao", "fsdp"): "a field of torchao's configuration, by torchao's name",
    ("strategy/deepspeed/plugin", "fp8"): "the environment variable of the public interface",
    ("strategy/megatron/plugin", "tensorboard"): "an option of Megatron-LM, by its name",
    ("strategy/xla_spmd", "fsdp"): "the plugin and the switch of FSDP ask for it where XLA partitions",
    ("strategy/parallelism", "fsdp"): "its dp_shard dimension is FSDP2: a strategy composed of another",
    (
        "strategy/parallelism/context/ulysses",
        "deepspeed",
    ): "transformers asks DeepSpeed for the group",
}


def plugins(folder: str) -> list[Source]:
    """The plug-ins of a registry: files in ``folder``, and ``strategy.py`` in a folder of it."""
    own = (s for s in sources() if s.room == folder and "PLUGIN" in assigned(s))
    return [s for s in own if len(s.inside) == 2 or s.inside[2:] == (folder,)]


def assigned(source: Source) -> set[str]:
    """Names that are given a value at the top level of the file."""
    targets: list[ast.expr] = []
    for node in source.tree.body:
        if isinstance(node, ast.Assign):
            targets += node.targets
        elif isinstance(node, ast.AnnAssign):
            targets.append(node.target)
    return {target.id for target in targets if isinstance(target, ast.Name)}


def schedulers() -> set[str]:
    """The schedulers of world/clusters.py: ``SLURMEnvironment`` -> slurm."""
    trees = [source.tree for source in sources() if source.inside == CLUSTERS]
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    own = (c for c in classes if any(ast.unparse(base) == "ClusterEnvironment" for base in c.bases))
    return {c.name.removesuffix("Environment").lower() for c in own}


def backends() -> set[str]:
    """Names of the plug-ins and schedulers, without those that are ordinary words."""
    files = {source.inside[1] for folder in FOLDERS for source in plugins(folder)}
    return (files | schedulers()) - GENERIC.keys()


def split_words(identifier: str) -> list[str]:
    """Split into lower-case words: ``DeepSpeedPlugin`` -> deep speed plugin, ``MULTI_NPU`` -> multi npu."""
    pieces = re.findall(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*|\d+", identifier)
    return [piece.lower() for piece in pieces]


@cache
def backend_in(identifier: str, names: frozenset[str]) -> str | None:
    """The back end that ``identifier`` names by some of its words in a row; ``fsdp2`` names ``fsdp`` too."""
    pieces = split_words(identifier)
    flat = {name.replace("_", ""): name for name in names}
    for start in range(len(pieces)):
        for end in range(start + 1, len(pieces) + 1):
            joined = "".join(pieces[start:end])
            name = flat.get(joined) or flat.get(joined.rstrip("0123456789"))
            if name:
                return name
    return None


def folders(source: Source) -> list[str]:
    """The file and the folders above it, as paths inside the package."""
    return ["/".join(source.inside[:depth]) for depth in range(1, len(source.inside) + 1)]


def is_own(source: Source, name: str) -> bool:
    """Whether the file is about the back end: it or a folder above it is called so, or stands in ``OWN``."""
    listed = any(name in OWN.get(place, ()) for place in folders(source))
    called = any(backend_in(part, frozenset({name})) for part in source.inside)
    return called or listed or (source.inside == CLUSTERS and name in schedulers())


def conditions(source: Source) -> Iterator[ast.expr]:
    """Every expression that decides what runs: tests, comparisons, cases, and arguments of ``isinstance``."""
    for node in source.nodes:
        if isinstance(node, ast.If | ast.IfExp | ast.While | ast.Assert):
            yield node.test
        elif isinstance(node, ast.comprehension):
            yield from node.ifs
        elif isinstance(node, ast.BoolOp | ast.Compare):
            yield node
        elif isinstance(node, ast.Match):
            yield node.subject
        elif isinstance(node, ast.match_case):
            yield from (n for n in ast.walk(node.pattern) if isinstance(n, ast.expr))
            yield from [node.guard] if node.guard else []
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass"):
            yield node


def identifiers(expression: ast.expr) -> Iterator[tuple[int, str]]:
    """(line, word) of the names in an expression and of its texts that are one word."""
    for node in ast.walk(expression):
        if isinstance(node, ast.Name):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute):
            yield node.lineno, node.attr
        elif isinstance(node, ast.Constant) and re.fullmatch(r"[\w-]+", str(node.value), re.ASCII):
            yield node.lineno, str(node.value)


def findings(source: Source, searched: set[str]) -> Iterator[str]:
    """Branches on back ends and imports of them that stand in other files."""
    names = frozenset(searched)
    places: set[tuple[int, str, str]] = set()
    for expression in conditions(source):
        for line, word in identifiers(expression):
            if name := backend_in(word, names):
                places.add((line, name, f"branches on {word!r}"))
    for line, module in imported(source):
        if name := next(filter(None, (backend_in(part, names) for part in module.split("."))), None):
            places.add((line, name, f"imports {module!r}"))
    for line, name, what in sorted(places):
        allowed = any((place, name) in ALLOWED for place in folders(source))
        if not is_own(source, name) and not allowed:
            yield source.at(line, f"{what}, which is the back end {name!r}")


def listed(source: Source, commands: set[str]) -> list[str]:
    """The commands of other files that a file of cli/ names in its texts."""
    others = commands - {source.inside[-1]}
    nodes = (node for node in source.nodes if id(node) not in source.docstrings)
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return sorted(text for text in texts if text.replace("-", "_") in others)


def test_a_back_end_is_branched_on_and_imported_in_its_own_files() -> None:
    names = backends()
    assert {"deepspeed", "fsdp", "npu", "wandb", "slurm"} <= names, "has the convention PLUGIN = ... changed?"
    obey(LAW, (finding for source in sources() for finding in findings(source, names)))


def test_every_exception_is_still_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    exceptions = dict(ALLOWED)
    monkeypatch.setitem(globals(), "ALLOWED", {})
    for place, name in exceptions:
        inside = [source for source in sources() if place in folders(source)]
        needed = [finding for source in inside for finding in findings(source, {name})]
        assert needed, f"{place} needs no exception for {name}"


def test_no_list_of_commands_is_kept_by_hand() -> None:
    """Each console script may name its command; more than half of all commands in one file is a list."""
    commands = {source.inside[1] for source in plugins("cli")}
    assert len(commands) >= 4
    named = ((source, listed(source, commands)) for source in sources() if source.room == "cli")
    lists = ((source, names) for source, names in named if 2 * len(names) > len(commands))
    obey(LAW, (source.at(1, f"keeps a list of commands: {names}") for source, names in lists))


@pytest.mark.parametrize(
    ("text", "line", "name"),
    [
        ('if device.type == "npu":\n    pass', 1, "npu"),
        ("x = 1\nok = kind in ('cpu', 'npu')", 2, "npu"),
        ("if is_npu_available():\n    pass", 1, "npu"),
        ("x = a if self.fsdp_plugin else b", 1, "fsdp"),
        ("y = kind is Kind.MULTI_NPU", 1, "npu"),
        ("ok = isinstance(x, DeepSpeedEngine)", 1, "deepspeed"),
        ("ok = [x for x in y if x.is_fsdp2]", 1, "fsdp"),
        ("match x:\n    case 'npu':\n        pass", 2, "npu"),
        ("match x:\n    case Kind.NPU:\n        pass", 2, "npu"),
        ("import torch_npu", 1, "npu"),
        ("def f():\n    from deepspeed.ops import x", 2, "deepspeed"),
        ("from accelerate.strategy.deepspeed import plugin", 1, "deepspeed"),
        ("from accelerate.strategy import deepspeed", 1, "deepspeed"),
        ("m = importlib.import_module('comet_ml')", 1, "comet_ml"),
        ("from transformers.integrations import deepspeed", 1, "deepspeed"),
        ("from . import deepspeed", 1, "deepspeed"),
        ("from ..strategy import deepspeed", 1, "deepspeed"),
    ],
)
def test_the_law_sees_branches_and_imports(text: str, line: int, name: str) -> None:
    places = list(findings(read(text), {"npu", "deepspeed", "comet_ml", "fsdp"}))
    assert len(places) == 1
    assert f":{line}: " in places[0]
    assert places[0].endswith(f"the back end {name!r}")


@pytest.mark.parametrize(
    "text",
    [
        "# npu",
        "def f():\n    'about npu'\n    return 'runs on npu'",
        "class NpuThing:\n    npu = 1",
        "deepspeed_plugin = DeepSpeedPlugin()",
        "from torch.nn import Linear",
        "if x:\n    npu = 1",
        "if text == 'a sentence about npu':\n    pass",
    ],
)
def test_words_are_free(text: str) -> None:
    assert not list(findings(read(text), {"npu", "deepspeed"}))


@pytest.mark.parametrize(
    ("place", "name", "free"),
    [
        ("strategy/deepspeed/plugin.py", "deepspeed", True),
        ("strategy/sharding/fsdp2_sharder.py", "fsdp", True),
        ("utils/fsdp_utils.py", "fsdp", True),
        ("strategy/sharding/fsdp2_sharder.py", "deepspeed", False),
        ("facade/accelerator.py", "fsdp", False),
        ("device/xpu.py", "fp8", False),
    ],
)
def test_own_files_are_free(place: str, name: str, free: bool) -> None:
    places = list(findings(read(f"if x == {name!r}:\n    pass", place), {name}))
    assert (not places) == free
