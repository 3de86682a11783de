"""Law 1: a back end's name stands in one file.

The names are those of the plug-in files themselves, so a new file is under the law by existing, and those
of the schedulers in world/clusters.py. A name counts where it is a word of an identifier or of a text in
the code; comments and docstrings may say anything. Free are: the plug-in's own file and files called after
it, ``names.py``, and identifiers that the public interface promises (``deepspeed_plugin``,
``is_npu_available``, ``--use_fsdp``).
"""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.laws.source import Source, contract, obey, read, sources

LAW = "law 1, a back end's name stands in one file"
CLUSTERS = ("world", "clusters")
FOLDERS = ("device", "strategy", "track", "precision")
# Words of the language that are also the name of a plug-in: they name an idea, not a back end.
GENERIC = {
    "cpu": "the host, which every program has",
    "null": "the value",
    "base": "the class others derive from",
    "single": "one of something",
    "main": "the main process",
    "none": "the value",
    "no": "the word; the precision of that name is the absence of one",
    "meta": "torch's device without data",
    "state": "what is saved",
    "tensor": "torch's array",
    "context": "a with block",
    "pipeline": "stages after one another",
    "parallelism": "what every way of training on several processes is",
    "fp16": "a number format of IEEE 754; gradients travel in it and files are written in it",
    "bf16": "a number format, likewise",
    "torchrun": "the protocol that every launcher speaks, ours too",
}
_TITLE = "the title of its options in the help of the public parser"
# How narrow a number is, where it is no choice of how to train: (room or file, name) -> what it says there.
FACTS = {
    ("device", "fp8"): "which numbers the units of a device take",
    ("facade/modules", "fp8"): "how many bits a number of that type has",
    ("offload/estimate/bill", "fp8"): "how many bits a number of that type has",
    ("offload/estimate/layouts", "ddp"): "what each rank of it holds, and how a file asks for it",
    ("offload/estimate/layouts", "fsdp"): "what each rank of it holds, and how a file asks for it",
    ("offload/estimate/layouts", "deepspeed"): "how a file asks for it",
    ("offload/estimate/bill", "ddp"): "what each rank of it holds, as a sum",
    ("offload/estimate/bill", "fsdp"): "what each rank of it holds, as a sum",
    ("strategy/settings/parallelism", "deepspeed"): "whose functions split attention by heads, and no other",
    ("strategy/deepspeed", "deepspeed"): "the library of the engine, in the names of its modules and classes",
    ("strategy/megatron/layout", "cuda"): "whose torch module the engine calls, on any tensors",
    ("strategy/sharding", "fsdp"): "torch's own word for it, in the names of its classes and fields",
    (
        "strategy/parallelism/ulysses",
        "deepspeed",
    ): "which library a client asks for the group, by its own name",
    (
        "strategy/parallelism/config",
        "deepspeed",
    ): "what the public interface calls that way to split attention",
    **{
        ("strategy/settings/deepspeed", name): "by which program its own launcher reaches other machines"
        for name in ("openmpi", "mvapich", "slurm")
    },
    ("launch/kinds/deepspeed", "slurm"): "the one of these programs that hands on the environment by itself",
    ("checkpoint/names", "fsdp"): "what the public format calls the folder of a model that is saved in parts",
    ("cli/arguments", "deepspeed"): _TITLE,
    ("cli/arguments", "fsdp"): _TITLE,
    ("cli/arguments", "megatron"): _TITLE,
    ("cli/arguments", "fp8"): _TITLE,
}
# Files that are lists of names.
TABLES = {
    "names": "the table of public names spells them all",
}


def plugins(folder: str) -> list[Source]:
    """The files directly in ``folder`` that define ``PLUGIN`` at their top level."""
    return [s for s in sources() if s.inside[:-1] == (folder,) and "PLUGIN" in assigned(s)]


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
    """The schedulers of world/clusters.py: its classes, in lower case."""
    trees = [source.tree for source in sources() if source.inside == CLUSTERS]
    classes = [node for tree in trees for node in tree.body if isinstance(node, ast.ClassDef)]
    return {c.name.lower() for c in classes if any(ast.unparse(base) == "Scheduler" for base in c.bases)}


def backends() -> set[str]:
    """Names of the plug-ins and schedulers, without those that are ordinary words."""
    files = {source.inside[1] for folder in FOLDERS for source in plugins(folder)}
    return (files | schedulers()) - GENERIC.keys()


def parts(identifier: str) -> list[str]:
    """Lower-case words: ``DeepSpeedPlugin`` -> deep speed plugin, ``MULTI_NPU`` -> multi npu."""
    pieces = re.findall(r"[A-Z]+(?![a-z])\d*|[A-Z]?[a-z]+\d*|\d+", identifier)
    return [piece.lower() for piece in pieces]


def named_in(identifier: str, names: set[str]) -> str | None:
    """The back end that ``identifier`` names by some of its words in a row; ``fsdp2`` names ``fsdp`` too."""
    pieces = parts(identifier)
    flat = {name.replace("_", ""): name for name in names}
    for start in range(len(pieces)):
        for end in range(start + 1, len(pieces) + 1):
            joined = "".join(pieces[start:end])
            name = flat.get(joined) or flat.get(joined.rstrip("0123456789"))
            if name:
                return name
    return None


def words(source: Source) -> Iterator[tuple[int, str]]:
    """(line, identifier) of every identifier in code and in texts of the code, docstrings left out.

    Words joined by dashes are one identifier: flags and commands are spelled so.
    """
    outside: set[tuple[int, int]] = set()
    for node in ast.walk(source.tree):
        if id(node) in source.docstrings:
            outside.add((node.lineno, node.col_offset))  # type: ignore[attr-defined]
    quoted = {tokenize.STRING, getattr(tokenize, "FSTRING_MIDDLE", -1)}
    columns: dict[int, str] = dict(enumerate(source.text.splitlines(), 1))
    for token in tokenize.generate_tokens(io.StringIO(source.text).readline):
        line, column = token.start
        place = line, len(columns.get(line, "")[:column].encode())  # ast counts bytes
        if token.type == tokenize.NAME or (token.type in quoted and place not in outside):
            for match in re.finditer(r"\w+(-\w+)*", token.string, re.ASCII):
                yield line + token.string.count("\n", 0, match.start()), match.group()


def is_free(source: Source, name: str) -> bool:
    """Whether ``name`` may stand in the file: it or its folder is called so, or it states a fact."""
    own = any(named_in(part, {name}) for part in source.inside)
    places = ("/".join(source.inside[:depth]) for depth in range(1, len(source.inside) + 1))
    facts = {(place, name) for place in places} & FACTS.keys()
    return own or bool(facts) or (source.inside == CLUSTERS and name in schedulers())


def enumerations(source: Source, promised: set[str]) -> set[int]:
    """Lines of the enumerations that the public interface promises: their members are promised too."""
    classes = (node for node in source.tree.body if isinstance(node, ast.ClassDef) and node.name in promised)
    enums = (c for c in classes if any("Enum" in ast.unparse(base) for base in c.bases))
    return {line for c in enums for line in range(c.lineno, (c.end_lineno or c.lineno) + 1)}


def findings(source: Source, names: set[str], promised: set[str]) -> Iterator[str]:
    """Places where a back end is named that should not be."""
    if "/".join(source.inside) in TABLES:
        return
    # A promised identifier contains the name; the bare name is never a promise.
    free, known = enumerations(source, promised), promised - names
    for line, word in words(source):
        if line in free or word.replace("-", "_") in known:
            continue
        for piece in word.split("-"):
            name = named_in(piece, names)
            if name and piece not in known and not is_free(source, name):
                yield source.at(line, f"{piece!r} names the back end {name!r}")


def promised() -> set[str]:
    """The promised identifiers, as written, lower-cased, and as flags and variables spell them."""
    written = set(contract()["identifiers"])
    return written | {word.lower() for word in written} | {word.upper() for word in written}


def listed(source: Source, commands: set[str]) -> list[str]:
    """The commands of other files that a file of cli/ names in its texts."""
    others = commands - {source.inside[-1]}
    nodes = (node for node in ast.walk(source.tree) if id(node) not in source.docstrings)
    texts = {node.value for node in nodes if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return sorted(text for text in texts if text.replace("-", "_") in others)


def test_a_back_end_is_named_in_one_file() -> None:
    names, known = backends(), promised()
    assert names, "no plug-in was found: has the convention PLUGIN = ... changed?"
    obey(LAW, (finding for source in sources() for finding in findings(source, names, known)))


def test_no_list_of_commands_is_kept_by_hand() -> None:
    """Each console script may name its command; more than half of all commands in one file is a list."""
    commands = {source.inside[1] for source in plugins("cli")}
    if len(commands) < 4:
        pytest.skip("there are too few commands to tell a list")
    named = ((source, listed(source, commands)) for source in sources() if source.room == "cli")
    lists = ((source, found) for source, found in named if 2 * len(found) > len(commands))
    obey(LAW, (source.at(1, f"keeps a list of commands: {found}") for source, found in lists))


EXAMPLES = [
    ('if device.type == "npu":\n    pass', 1, "npu"),
    ("import torch_npu", 1, "npu"),
    ("class NpuThing:\n    pass", 1, "npu"),
    ("x = 1\ny = 'run on MULTI_NPU or not'", 2, "npu"),
    ("x = f'{1} is an npu'", 1, "npu"),
    ("deep_speed = 1", 1, "deepspeed"),
    ("DeepSpeedThing = 1", 1, "deepspeed"),
    ("def comet_ml_url(): ...", 1, "comet_ml"),
    ("CometML = 1", 1, "comet_ml"),
    ("is_fsdp2_like = 1", 1, "fsdp"),
    ("x = 'an npu-like thing'", 1, "npu"),
]


@pytest.mark.parametrize(("text", "line", "name"), EXAMPLES)
def test_the_law_sees_names_in_code_and_texts(text: str, line: int, name: str) -> None:
    found = list(findings(read(text), {"npu", "deepspeed", "comet_ml", "fsdp"}, set()))
    assert len(found) == 1
    assert f":{line}: " in found[0]
    assert found[0].endswith(f"names the back end {name!r}")


@pytest.mark.parametrize(
    "text",
    [
        "# npu",
        "x = 'run --deepspeed-plugin or a-deepspeed_plugin'",
        '"""npu"""',
        "def f():\n    'about npu'",
        "input = 1",
        "deepspeed_plugin = 1",
        "x = 'MULTI_NPU'",
    ],
)
def test_the_law_ignores_comments_docstrings_parts_of_words_and_promises(text: str) -> None:
    assert not list(findings(read(text), {"npu", "deepspeed"}, {"deepspeed_plugin", "MULTI_NPU"}))


def test_a_bare_name_is_not_a_promise_and_an_own_file_is_free() -> None:
    assert list(findings(read("x = 'deepspeed'"), {"deepspeed"}, {"deepspeed"}))
    assert not list(findings(read("x = 'deepspeed'", "strategy/deepspeed/strategy.py"), {"deepspeed"}, set()))
    assert not list(findings(read("x = 'fsdp'", "utils/fsdp_utils.py"), {"fsdp"}, set()))
    assert list(findings(read("x = 'fp8'", "facade/accelerator.py"), {"fp8"}, set()))
    assert not list(findings(read("x = 'fp8'", "device/cuda.py"), {"fp8"}, set()))


def test_a_promised_enumeration_may_spell_its_members_and_no_other() -> None:
    text = "class Kind(Enum):\n    NPU = 'npu'\nclass Other(Enum):\n    NPU = 'npu'"
    found = list(findings(read(text), {"npu"}, {"Kind"}))
    assert [finding.split(":")[1] for finding in found] == ["4", "4"]
