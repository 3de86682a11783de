"""The documentation against the code: commands, paths, examples, and the tables made from declarations."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import click
import pytest
import torch
import yaml
from docs import generate
from safetensors.torch import save_file
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from tests.laws.test_2_imports import FLOOR, FLOORS
from tests.laws.test_4_settings import classes, own_settings

ROOT = generate.ROOT
PACKAGE = ROOT / "src" / "accelerate"
PAGES = ["README.md", "CONTRIBUTING.md", "CHANGELOG.md", *(f"docs/{p.name}" for p in ROOT.glob("docs/*.md"))]
FENCE = re.compile(r"^```(\w*)(?: title=\"([^\"]*)\")?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# A command keeps the help option of its first context: all are made as the command line makes them.
HELP = {"help_option_names": ["-h", "--help"]}
# What the documentation names and a checkout does not have: made by targets, or planned.
ABSENT = {
    *("site/", ".venv/bin/pre-commit", "benchmarks/RESULTS.md", "accelerate/default_config.yaml"),
    "offload/",
}


def text(page: str) -> str:
    return (ROOT / page).read_text(encoding="utf-8")


def blocks(page: str, language: str) -> list[tuple[str, str]]:
    """(title, content) of the fenced blocks of a language."""
    return [(title, body) for kind, title, body in FENCE.findall(text(page)) if kind == language]


def block(page: str, start: str) -> str:
    """The one Python block that contains ``start``."""
    (found,) = [body for _, body in blocks(page, "python") if start in body]
    return found


def inline(page: str) -> list[str]:
    """Everything in single backticks outside of blocks."""
    return re.findall(r"`([^`\n]+)`", FENCE.sub("", text(page)))


def commands(page: str) -> list[str]:
    """Command lines: of shell blocks, and in the text."""
    bodies = [body.replace("\\\n", " ") for _, body in blocks(page, "sh")]
    lines = [line.split(" #")[0].strip() for body in bodies for line in body.splitlines()]
    programs = ("make", "accelerate", "torchrun", "python")
    return [*filter(None, lines), *(word for word in inline(page) if word.split()[0] in programs)]


def examples() -> set[str]:
    """Files that the guide for contributors shows as examples; test_docs_examples.py uses them."""
    return {title for title, _ in blocks("CONTRIBUTING.md", "python") if title}


# --- commands -----------------------------------------------------------------------------------------------


def wrong_make(words: list[str]) -> Iterator[str]:
    makefile = text("Makefile")
    for word in words:
        name, given, _ = word.partition("=")
        pattern = rf"^{name}\s*\??=" if given else rf"^{name}:"
        if not re.search(pattern, makefile, re.MULTILINE):
            yield f"the Makefile has no {'variable' if given else 'target'} {name}"


def wrong_accelerate(words: list[str]) -> Iterator[str]:
    from tests.support.registries import REGISTRIES

    commands = REGISTRIES["COMMANDS"]
    shown = {f"src/accelerate/cli/{word.replace('-', '_')}.py" for word in words[:1]} & examples()
    if not words or words == ["--help"] or shown:
        return
    if words[0].replace("-", "_") not in commands:
        yield f"there is no command {words[0]}"
        return
    command = commands.get(words[0].replace("-", "_"))
    try:
        context = command.make_context(
            words[0], [word for word in words[1:] if not word.startswith("--help")], **HELP
        )
    except click.MissingParameter:
        if len(words) > 1:
            yield "an argument is missing"
        return
    except click.UsageError as error:
        yield error.message
        return
    yield from wrong_script(context.params.get("program") or ())


def wrong_script(words: Any) -> Iterator[str]:
    for word in words:
        if word.endswith(".py") and "/" in word and not (ROOT / word).is_file():
            yield f"there is no {word}"


def wrong_pip(words: list[str]) -> Iterator[str]:
    assert words[0] in ("install", "uninstall")
    for word in words[1:]:
        extra = re.fullmatch(r"\.\[(\w+)\]", word)
        is_extra = extra is not None and f"\n{extra[1]} = [" in text("pyproject.toml")
        if word not in ("torch", ".", "accelerate") and not is_extra:
            yield f"is {word} to be installed?"


def wrong_under(words: list[str]) -> Iterator[str]:
    """A launcher of others around ours: its own flags are its affair."""
    if "accelerate" not in words:
        yield "it does not start accelerate"
        return
    yield from wrong_accelerate(words[words.index("accelerate") + 1 :])


def wrong_batch(words: list[str]) -> Iterator[str]:
    if not (ROOT / words[0]).is_file():
        yield f"there is no {words[0]}"


CHECKS = {
    "sbatch": wrong_batch,
    "mpirun": wrong_under,
    "srun": wrong_under,
    "make": wrong_make,
    "accelerate": wrong_accelerate,
    "torchrun": wrong_script,
    "python": wrong_script,
    "pip": wrong_pip,
}


@pytest.mark.parametrize("page", PAGES)
def test_every_command_that_is_named_exists(page: str) -> None:
    found = []
    for line in commands(page):
        program, *words = shlex.split(line)
        assert program in CHECKS, f"{page}: who checks {line!r}?"
        found += [f"{line}: {wrong}" for wrong in CHECKS[program](words)]
    assert not found, "\n".join([page, *found])


def test_the_readme_is_short_and_names_the_two_commands() -> None:
    assert {"make demo", "make test"} <= {*commands("README.md")}
    assert len(text("README.md").encode()) < 6 * 1024


def test_a_wrong_command_is_seen() -> None:
    assert list(wrong_make(["demo", "ARGS=x", "dmeo", "AGRS=x"])) == [
        "the Makefile has no target dmeo",
        "the Makefile has no variable AGRS",
    ]
    assert not list(wrong_accelerate(["launch", "--num-processes", "2", "examples/digits.py", "--any"]))
    assert list(wrong_accelerate(["launch", "--nmu_processes", "2", "train.py"]))
    assert list(wrong_accelerate(["lunch"])) == ["there is no command lunch"]
    assert list(wrong_script(["examples/digit.py"])) == ["there is no examples/digit.py"]


@pytest.mark.parametrize("page", PAGES)
def test_every_flag_that_is_named_exists(page: str) -> None:
    from tests.support.registries import REGISTRIES

    commands = [REGISTRIES["COMMANDS"].get(name) for name in REGISTRIES["COMMANDS"].names()]
    commands += [
        each for group in commands if isinstance(group, click.Group) for each in group.commands.values()
    ]
    contexts = [click.Context(command, **HELP) for command in commands]
    params = [param for context in contexts for param in context.command.get_params(context)]
    known = {name for param in params for name in param.opts}
    # Of the example script, and of the examples for contributors.
    known |= {*re.findall(r"\"(--[a-z-]+)\"", text("examples/digits.py")), "--report_every", "--report-every"}
    named = {word.split()[0].split("=")[0] for word in inline(page) if word.startswith("--")}
    assert named <= known, f"{page}: {sorted(named - known)}"


# --- paths --------------------------------------------------------------------------------------------------


def paths(page: str) -> set[str]:
    """Paths of the repository, or below the package, in backticks and links."""
    tops = "src|tests|docs|examples|benchmarks|\\.ci|site|\\.venv"
    rooms = "|".join((*FLOOR, "accelerate"))
    words = {word for word in inline(page) if re.match(rf"(?:{tops}|{rooms})/[\w./*-]*$", word)}
    words |= {word for word in inline(page) if re.fullmatch(r"[A-Z]+(?:\.md)?|\w+\.(?:py|toml|yml)", word)}
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)\)", FENCE.sub("", text(page)))
    return {word for word in words if "." in word or "/" in word} | {*links}


def exists(page: str, path: str) -> bool:
    homes = (ROOT, PACKAGE, (ROOT / page).parent)
    # A bare name (`base.py`) is that of some file of the package, or of a user.
    bare = "/" not in path and (any(PACKAGE.rglob(path)) or path in ("train.py", "script.py"))
    return bare or path in ABSENT | examples() or any((home / path).exists() for home in homes)


@pytest.mark.parametrize("page", PAGES)
def test_every_path_that_is_named_exists(page: str) -> None:
    missing = sorted(path for path in paths(page) if not exists(page, path))
    assert not missing, f"{page} names {missing}"


def test_a_wrong_path_is_seen() -> None:
    assert "docs/settings.md" in paths("README.md")
    assert "src/accelerate/core/environ.py" in paths("docs/architecture.md")
    assert "core/environ.py" in paths("CONTRIBUTING.md")
    assert not exists("README.md", "docs/setings.md")


def test_every_page_is_in_the_navigation_once() -> None:
    def pages(entries: list[dict[str, Any]]) -> Iterator[str]:
        for value in (value for entry in entries for value in entry.values()):
            yield from pages(value) if isinstance(value, list) else [value]

    assert sorted(pages(yaml.safe_load(text("mkdocs.yml"))["nav"])) == sorted(
        path.relative_to(ROOT / "docs").as_posix() for path in ROOT.glob("docs/**/*.md")
    )


@pytest.mark.parametrize("page", ["docs/contributing.md", "docs/changelog.md"])
def test_what_is_taken_in_exists(page: str) -> None:
    """The snippet ``"FILE"`` of a file of the repository; its links are read from the page's folder."""
    (file,) = re.findall(r'^--8<-- "([\w.]+)"$', text(page), re.MULTILINE)
    links = re.findall(r"\]\((?!https?:|#)([^)#]+)\)", FENCE.sub("", text(file)))
    assert [link for link in links if not (ROOT / page).parent.joinpath(link).is_file()] == []


# --- examples -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES)
def test_python_examples_compile(page: str) -> None:
    for title, body in blocks(page, "python"):
        compile(body, f"{page}: {title}", "exec")


class Objects(dict[str, Any]):
    """What the examples take as given: a model, an optimizer, a schedule, a loader."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
        inputs = torch.randn(32, 4)
        loader = DataLoader(TensorDataset(inputs, inputs[:, :3].argmax(1)), batch_size=4)
        super().__init__(model=model, optimizer=optimizer, scheduler=scheduler, loader=loader)

    def weights(self) -> list[float]:
        return [value for p in self["model"].parameters() for value in p.detach().flatten().tolist()]


def versions(diff: str) -> tuple[str, str]:
    """The text before and after a diff of two columns' indentation."""
    before = [line[2:] for line in diff.splitlines() if not line.startswith("+")]
    after = [line[2:] for line in diff.splitlines() if not line.startswith("-")]
    return "\n".join(before), "\n".join(after)


def test_before_and_after_train_to_the_same_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    ((_, diff),) = blocks("README.md", "diff")
    changed = [line for line in diff.splitlines() if line[0] in "+-"]
    assert len(diff.splitlines()) - len(changed) >= 5
    assert len(changed) <= 10, "it is called a few lines"
    results = []
    for program in versions(diff):
        objects = Objects()
        fresh = objects.weights()
        exec("import torch\nfrom torch.nn import functional as F", objects)
        exec(program.replace('"cuda"', '"cpu"'), objects)
        results.append(objects.weights())
        assert results[-1] != fresh
    assert results[0] == results[1]


def test_the_plan_of_the_readme_is_printed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from accelerate import Accelerator

    exec(block("README.md", "accelerator.plan("), Objects() | {"accelerator": Accelerator(cpu=True)})
    assert "optimizer: " in capsys.readouterr().out


def test_the_lines_for_a_big_model_load_it(tmp_path: Path) -> None:
    saved = torch.nn.Linear(3, 2)
    save_file(saved.state_dict(), tmp_path / "model.safetensors")
    code = block("README.md", "init_empty_weights").replace("folder/with/safetensors", str(tmp_path))
    names: dict[str, Any] = {"make_model": lambda: torch.nn.Linear(3, 2)}
    exec(code, names)
    inputs = torch.randn(4, 3)
    torch.testing.assert_close(names["model"](inputs), saved(inputs))


def test_the_examples_of_the_start_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ACCELERATE_USE_CPU", "true")
    monkeypatch.chdir(tmp_path)
    objects, space = Objects(), dict[str, Any]()
    exec(block("docs/index.md", "def train("), space)
    space["train"](**objects, epochs=3)
    losses = re.findall(r"epoch \d: loss ([\d.]+)", capsys.readouterr().out)
    assert len(losses) == 3
    assert float(losses[2]) < float(losses[0])
    assert (tmp_path / "checkpoint" / "manifest.json").is_file()
    exec(block("docs/index.md", "PartialState"), space)
    space["main"]()
    assert capsys.readouterr().out == "1 processes, this one on cpu\n"


def test_the_error_of_the_guide_reads_as_it_says() -> None:
    from accelerate.core.errors import SettingError

    with pytest.raises(SettingError) as caught:
        exec(block("CONTRIBUTING.md", "SettingError("), {})
    assert [line.split(":")[0].strip() for line in str(caught.value).splitlines()[1:]] == ["why", "fix"]


# --- tables -------------------------------------------------------------------------------------------------


def test_every_claim_about_what_works_where_holds() -> None:
    claims = [(row, claim) for row, found in generate.claims().items() for claim in found]
    false = [
        f"{row}: {claim.text} is not {claim.column}: {claim.proof}"
        for row, claim in claims
        if not claim.holds()
    ]
    assert not false, "\n".join(["see docs/generate.py", *false])
    assert len(claims) > 40
    assert {claim.column for _, claim in claims} == {"built", "unrun", "refused"}


def test_false_claims_are_seen() -> None:
    false = [
        generate.tested("x", "null/test_docs.py::no_such_test"),
        generate.tested("x", "null/no_such_file.py"),
        generate.refused("x", lambda: None, "nothing"),
    ]
    assert [claim.text for claim in false if claim.holds()] == []
    assert generate.tested("x", "null/test_docs.py::false_claims").holds()


def test_the_support_table_is_what_the_registries_say() -> None:
    page = text("docs/support.md")
    table = generate.filled(page, "support", generate.support_table())
    assert page == table, "the table is out of date: python docs/generate.py"


def test_a_new_plugin_appears_in_the_support_table() -> None:
    from tests.support.devices import added_device

    with added_device("aurora"):
        assert "`aurora`" in generate.support_table()
    assert "`aurora`" not in generate.support_table()


def test_figures_come_from_the_benchmarks() -> None:
    """Every row is one that was measured; without measurements there is no figure."""
    block = text("docs/figures.md").split("<!-- figures -->")[1].split("<!-- /figures -->")[0]
    rows = [line for line in block.splitlines() if line.startswith("|")]
    results = ROOT / "benchmarks" / "RESULTS.md"
    measured = results.read_text(encoding="utf-8") if results.is_file() else ""
    assert bool(rows) == bool(measured), "python docs/generate.py takes the figures over"
    assert [row for row in rows if row not in measured] == []


@pytest.mark.parametrize("page", generate.PAGES)
def test_what_is_generated_is_up_to_date(page: str) -> None:
    assert text(page) == generate.PAGES[page](), "run: python docs/generate.py"


def test_every_setting_is_on_its_page() -> None:
    page = text("docs/settings.md")
    for row in (row for cls in classes() for row in own_settings(cls)):
        names = [*row.flags, *([row.variable] if row.variable else []), *([row.path] if row.in_file else [])]
        assert [name for name in names if f"`{name}`" not in page] == [], f"{row.name} is not documented"


def test_every_variable_of_the_protocol_is_on_the_page_of_settings() -> None:
    from tests.support.environment import protocol_variables

    page = text("docs/settings.md")
    assert [name for name in protocol_variables() if f"`{name}`" not in page] == []


# --- what the pages say about the code ----------------------------------------------------------------------


def test_the_picture_of_the_floors_is_the_law() -> None:
    ((_, picture),) = blocks("docs/architecture.md", "text")
    rows = [line for line in picture.splitlines() if "/" in line]
    drawn = {room: place for place, line in enumerate(rows) for room in re.findall(r"(\w+)/", line)}
    there = {path.name for path in PACKAGE.iterdir() if path.is_dir() and path.name in FLOOR}
    assert drawn.keys() == there == FLOOR.keys()
    for one in drawn:
        for other in drawn:
            if FLOOR[one] > FLOOR[other]:
                assert drawn[one] < drawn[other], f"{one} stands above {other}"
    assert len(FLOORS) >= 6


def test_the_registries_are_those_of_the_table() -> None:
    from tests.support.registries import REGISTRIES

    page = text("docs/architecture.md")
    for name, registry in REGISTRIES.items():
        assert f"| `{name}` | `src/{registry.package.replace('.', '/')}` |" in page
        assert f"`{registry.group}`" in text("CONTRIBUTING.md")


def test_every_law_has_its_row() -> None:
    page = text("CONTRIBUTING.md")
    laws = sorted(path.name for path in ROOT.glob("tests/laws/test_[0-9]_*.py"))
    rows = [line for line in page.splitlines() if re.match(r"\| \d\. ", line)]
    assert [row.split("`")[-2].rpartition("/")[2] for row in rows] == laws
    assert [row[2] for row in rows] == [name[5] for name in laws]


def test_every_test_folder_is_explained() -> None:
    folders = {path.parent.name for path in ROOT.glob("tests/*/test_*.py")}
    assert folders <= {*re.findall(r"\| `tests/(\w+)` \|", text("CONTRIBUTING.md"))}


def test_the_pages_know_this_version() -> None:
    from accelerate import __version__

    assert f"This is version {__version__}." in text("README.md")
    assert f'version = "{__version__}"' in text("pyproject.toml")
    assert re.search(rf"^## \[{re.escape(__version__)}\] - ", text("CHANGELOG.md"), re.MULTILINE)


def test_the_licence_is_the_one_that_is_declared() -> None:
    licence = text("LICENSE")
    assert "Apache License\n                           Version 2.0, January 2004" in licence
    assert "Copyright 2026 The authors of this project" in licence
    assert 'license = "Apache-2.0"' in text("pyproject.toml")
    assert "Copyright 2026 The authors of this project" in text("README.md")
    assert "not affiliated" in text("README.md")


def test_commit_hooks_use_the_tools_of_the_project() -> None:
    (local,) = yaml.safe_load(text(".pre-commit-config.yaml"))["repos"]
    entries = [hook["entry"].split() for hook in local["hooks"] if hook["language"] == "system"]
    tools = {Path(entry[0]).name for entry in entries}
    assert tools == {"ruff", "pyright", "python"}
    assert all((ROOT / word).is_file() for entry in entries for word in entry[1:] if word.endswith(".py"))


@pytest.mark.parametrize(
    "words",
    [
        *("activation checkpointing", "gradient checkpointing", "ZeRO-3", "comm hook", "out of memory"),
        *("NCCL timeout", "mixed precision", "torch.compile", "SLURM", "Kubernetes", "SageMaker", "LoRA"),
    ],
)
def test_a_search_for_what_people_call_it_finds_a_page(words: str) -> None:
    """The words of the field stand on a page of the manual, not only in the list of changes."""
    menu = yaml.safe_load(text("mkdocs.yml"))["nav"]
    how_to = next(entry["How to"] for entry in menu if "How to" in entry)
    pages = re.findall(r"[\w/]+\.md", str(how_to))
    assert [page for page in pages if words.lower() in text(f"docs/{page}").lower()]


def test_the_menu_has_four_kinds_of_pages() -> None:
    menu = yaml.safe_load(text("mkdocs.yml"))["nav"]
    assert [kind for entry in menu for kind in entry] == ["Start", "How to", "Reference", "How it works"]
