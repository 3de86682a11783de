"""A law about language: the code speaks the field's words, so that a reader needs no dictionary.

A class name has one meaning in the whole package. Classes are nouns that name their job, functions are verbs,
files carry the name of the thing; none is a bare participle, an adverb or a general noun. A docstring opens
with a sentence that stands alone. Pages of the documentation use the terms that their readers search for.

``python -m tests.laws.test_language`` prints the measures; with ``--draw SEED``, 40 class names and 40 file
names, for a reader who has not seen the code to tell their job from the name alone.
"""

from __future__ import annotations

import ast
import random
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from itertools import takewhile
from typing import Any

import pytest

from tests.laws.source import ROOT, Function, Source, contract, obey, read, sources

LAW = "the language of the field"


def _words(section: str) -> frozenset[str]:
    """The words below a heading of ``language.txt``."""
    text = (ROOT / "tests" / "laws" / "language.txt").read_text()
    return frozenset(text.partition(f"[{section}]")[2].partition("[")[0].split("\n", 1)[1].split())


# Adverbs, prepositions and participles that do not end in -ed, -ing or -en.
NOT_NOUNS = _words("not nouns")
# Words of those endings that are nouns or verbs.
NOUNS = _words("nouns")
# Nouns that say nothing alone: a class of this name could be anything.
GENERAL = _words("general")
# A class, function or file of such a name that stays, with the reason.
ALLOWED: dict[str, str] = {}
OPENINGS = re.compile(r"(What|Whether|Where|Those|By|As|Of)\b")
NOUN_OPENINGS = {"Devices", "Names"}  # beside "Device" and "Name", which open others
ENGINE = re.compile(r"\b(the|an|this|that|each|its) engines?\b", re.IGNORECASE)
# Page -> terms that a reader of its subject searches for.
TERMS = {
    "architecture": (
        "all-gather",
        "all-reduce",
        "world size",
        "optimizer state",
        "device mesh",
        "state dict",
    ),
    "fsdp": ("all-gather", "reduce-scatter", "optimizer state", "HSDP", "world size", "mixed precision"),
    "deepspeed": ("DeepSpeed", "ZeRO", "optimizer state", "micro-batch"),
    "megatron": ("Megatron-LM", "tensor parallel", "pipeline parallel", "micro-batch"),
    "parallelism": ("tensor parallel", "pipeline parallel", "context parallel", "device mesh", "all-gather"),
    "pipeline_training": ("pipeline parallel", "micro-batch", "1F1B"),
    "sequences": ("context parallel", "all-gather", "all-to-all"),
    "gradients": ("micro-batch", "all-reduce", "gradient accumulation"),
    "processes": ("rank", "world size", "all-gather", "broadcast"),
    "checkpoints": ("optimizer state", "state dict", "manifest", "world size"),
    "launching": ("rendezvous", "world size", "rank"),
    "placement": ("device map", "meta device"),
}
BOUNDS = {
    "class names defined in more than one module": 0,
    "classes, functions and files with a name that is no name": 0,
    "functions named by a bare participle or adverb": 20,
    "variables named found": 60,
    "'the engine' in sources and docs": 30,
    "docstrings that open with What, Whether, Where, Those, By, As or Of": 150,
    "docstrings that explain an argument or attribute that is not there": 0,
    "docstrings in the third person": 0,
}


def is_participle(name: str) -> bool:
    """Whether a name is one word that is an adverb or participle: ``told``, ``_kept``, ``shared``."""
    word = name.strip("_")
    if not re.fullmatch(r"[a-z]+", word) or word in NOUNS or name.startswith("__"):
        return False
    return word in NOT_NOUNS or bool(re.search(r"[a-z]{2}(ed|ing|en)$", word))


def is_promised(name: str) -> bool:
    """Whether the public interface has the name: it stays as it is."""
    return name in _promised()


@cache
def _promised() -> frozenset[str]:
    return frozenset(contract()["identifiers"])


def is_promised_module(source: Source) -> bool:
    """Whether the public interface has the path of the file."""
    return source.module in contract()["modules"]


def class_names(source: Source) -> Iterator[ast.ClassDef]:
    """The classes of a file, nested ones too."""
    return (node for node in source.nodes if isinstance(node, ast.ClassDef))


def unclear_classes(source: Source) -> Iterator[str]:
    """Classes named by a general noun, a participle or an adverb."""
    for node in class_names(source):
        name = node.name.strip("_")
        unclear = name in GENERAL or (name.istitle() and is_participle(name.lower()))
        if unclear and not is_promised(name) and name not in ALLOWED:
            yield source.at(node, f"class {node.name}: name its job by a noun of the field")


def unclear_functions(source: Source) -> Iterator[str]:
    """Functions and properties named by a bare participle or adverb."""
    for node in source.nodes:
        named = isinstance(node, Function) and is_participle(node.name)
        if named and not is_promised(node.name) and node.name not in ALLOWED:
            yield source.at(node, f"{node.name}: say what it does, by a verb and its object")


def unclear_files(source: Source) -> Iterator[str]:
    """Files and folders named by a participle or adverb."""
    if is_promised_module(source):
        return
    for part in source.inside:
        if is_participle(part) and part not in ALLOWED:
            yield source.at(1, f"{part}: a file carries the name of the thing")


def _explained_names(node: Any, section: str) -> Iterator[str]:
    """The names that a section of a docstring explains."""
    explained = (ast.get_docstring(node) or "").partition(f"\n{section}:\n")[2]
    lines = takewhile(lambda line: not line or line.startswith(" "), explained.splitlines())
    heads = [match for line in lines if (match := re.match(r"    ([*\w]+(?:, [*\w]+)*):", line))]
    return (name.lstrip("*") for head in heads for name in head[1].split(", "))


def undefined_arguments(source: Source) -> Iterator[str]:
    """Arguments that a docstring explains and the function does not have: their name has changed."""
    for node in source.nodes:
        if isinstance(node, Function):
            own = {arg.arg for arg in ast.walk(node.args) if isinstance(arg, ast.arg)}
            for name in _explained_names(node, "Args"):
                if name not in own:
                    yield source.at(node, f"{node.name} has no argument {name}")


def _identifiers(node: ast.AST) -> Iterator[str]:
    """Every name in a piece of code."""
    for each in ast.walk(node):
        for field in ("id", "attr", "arg", "name"):
            if isinstance(name := getattr(each, field, None), str):
                yield name


def undefined_attributes(source: Source) -> Iterator[str]:
    """Attributes that a docstring explains and a class does not mention: their name has changed."""
    for node in source.nodes:
        # The fields of a class of settings may be those of its base class.
        if isinstance(node, ast.ClassDef) and "describe_fields" not in map(ast.unparse, node.decorator_list):
            own = set(_identifiers(node))
            for name in _explained_names(node, "Attributes"):
                if name not in own:
                    yield source.at(node, f"{node.name} has no attribute {name}")


def duplicate_classes() -> Iterator[str]:
    """Class names that several modules define."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for source in sources():
        for name in {node.name for node in class_names(source)}:
            places[name].append(source.where)
    return (f"class {name}: {', '.join(files)}" for name, files in places.items() if len(files) > 1)


def found_variables(source: Source) -> Iterator[str]:
    """Variables and parameters that say only that something was found."""
    for node in source.nodes:
        stored = isinstance(node, ast.Name) and node.id == "found" and isinstance(node.ctx, ast.Store)
        if stored or (isinstance(node, ast.arg) and node.arg == "found"):
            yield source.at(node, "found: say what it holds")


def unclear_docstrings(source: Source) -> Iterator[str]:
    """Docstrings whose first line is no sentence."""
    for node in source.nodes:
        if isinstance(node, Function | ast.ClassDef | ast.Module):
            text = ast.get_docstring(node) or ""
            if OPENINGS.match(text):
                yield source.at(node, text.splitlines()[0])


def third_person_docstrings() -> Iterator[str]:
    """Docstrings that say what a function does in the third person, where others say it in the imperative."""
    openings: defaultdict[str, list[str]] = defaultdict(list)
    for source in sources():
        for node in source.nodes:
            if isinstance(node, Function) and (
                word := re.match(r"[A-Z][a-z]+", ast.get_docstring(node) or "")
            ):
                openings[word[0]].append(source.at(node, word[0]))
    for word, where in openings.items():
        stems = [
            word[: -len(end)] + new
            for end, new in (("s", ""), ("es", ""), ("ies", "y"))
            if word.endswith(end)
        ]
        if word not in NOUN_OPENINGS and any(stem in openings for stem in stems):
            yield from where


def engines() -> Iterator[str]:
    """Lines of sources and documents that say 'the engine' for DeepSpeed or Megatron-LM."""
    pages = [*(ROOT / "docs").glob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]
    texts = [(source.where, source.text) for source in sources()]
    for where, text in texts + [(str(page.relative_to(ROOT)), page.read_text()) for page in pages]:
        for number, line in enumerate(text.splitlines(), 1):
            yield from (f"{where}:{number}: {line.strip()}" for _ in ENGINE.finditer(line))


@cache
def places() -> dict[str, list[str]]:
    """Every measure and the places it counts."""
    every = sources()
    names = [place for s in every for place in (*unclear_classes(s), *unclear_files(s))]
    measures = (
        list(duplicate_classes()),
        names,
        [place for s in every for place in unclear_functions(s)],
        [place for s in every for place in found_variables(s)],
        list(engines()),
        [place for s in every for place in unclear_docstrings(s)],
        [place for s in every for place in (*undefined_arguments(s), *undefined_attributes(s))],
        list(third_person_docstrings()),
    )
    return dict(zip(BOUNDS, measures, strict=True))


@pytest.mark.parametrize("measure", BOUNDS)
def test_the_code_speaks_the_language_of_the_field(measure: str) -> None:
    counted = places()[measure]
    obey(f"{LAW}: {measure}, at most {BOUNDS[measure]}", counted if len(counted) > BOUNDS[measure] else ())


@pytest.mark.parametrize("page", TERMS)
def test_a_page_uses_the_terms_that_readers_search_for(page: str) -> None:
    text = " ".join((ROOT / "docs" / f"{page}.md").read_text().lower().split())
    assert [term for term in TERMS[page] if term.lower() not in text] == []


def test_the_exceptions_are_few_and_needed() -> None:
    assert len(ALLOWED) <= 5
    kinds = Function | ast.ClassDef
    names = {node.name.strip("_") for s in sources() for node in s.nodes if isinstance(node, kinds)}
    assert ALLOWED.keys() <= names | {part for s in sources() for part in s.inside}


@pytest.mark.parametrize(
    ("text", "count"),
    [
        ("class Told: ...", 1),
        ("class Parts: ...", 1),
        ("class _Watch: ...", 1),
        ("class Watchdog: ...", 0),
        ("class ReadPlan: ...", 0),
        ("def told(): ...", 1),
        ("def _ahead(): ...", 1),
        ("def fsdp_params(): ...", 0),
        ("def open(): ...", 0),
        ("found = 1", 1),
        ("def f(found): ...", 1),
        ("matches = found", 0),
        ("def f():\n    'Whether x.'", 1),
        ("def f():\n    'Return x.'", 0),
        ('def f(a, *b):\n    """Do x.\n\n    Args:\n        a, *b: both.\n        c: gone.\n    """', 1),
        (
            'def f(a, *b):\n    """Do x.\n\n    Args:\n        a, *b: of\n            c: no.\n    """',
            0,
        ),
        ('class Watchdog:\n    """It watches.\n\n    Attributes:\n        a: one.\n    """\n\n    b: int', 1),
        ('class Watchdog:\n    """It watches.\n\n    Attributes:\n        b: one.\n    """\n\n    b: int', 0),
    ],
)
def test_the_law_sees_unclear_names(text: str, count: int) -> None:
    source = read(text)
    checks = (
        unclear_classes, unclear_functions, found_variables, unclear_docstrings, undefined_arguments,
        undefined_attributes,
    )  # fmt: skip
    assert sum(len(list(check(source))) for check in checks) == count
    assert len(list(unclear_files(read("", "world/told.py")))) == 1


def draw(seed: int) -> None:
    """Print 40 class names and 40 file names, drawn by ``seed``."""
    classes = sorted({node.name for s in sources() for node in class_names(s) if not is_promised(node.name)})
    own = (
        s for s in sources() if len(s.inside) > 1 and s.inside[-1] != "__init__" and not is_promised_module(s)
    )
    files = sorted("/".join(s.inside) for s in own)
    chosen = random.Random(seed)
    for title, names in (("classes", classes), ("files", files)):
        print(f"{title}:", *chosen.sample(names, 40), sep="\n  ")


def main() -> None:
    """Print the measures, or draw names."""
    if "--draw" in sys.argv:
        draw(int(sys.argv[-1]))
        return
    for measure, counted in places().items():
        print(f"{len(counted):5}  at most {BOUNDS[measure]:3}  {measure}")
        if "-v" in sys.argv:
            print(*(f"         {place}" for place in counted), sep="\n")
    pages = [page.read_text() for page in (*(ROOT / "docs").glob("*.md"), ROOT / "README.md")]
    text = " ".join(" ".join([*pages, *(source.text for source in sources())]).split())
    for term in sorted({term for terms in TERMS.values() for term in terms}, key=str.lower):
        print(f"{len(re.findall(re.escape(term), text, re.IGNORECASE)):5}  {term}")


if __name__ == "__main__":
    main()
