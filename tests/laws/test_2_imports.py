"""Law 2: imports go down. Rooms of one floor do not know each other, and no modules import in a circle.

Every import counts: at the top, inside a function, under TYPE_CHECKING, by ``importlib`` with a name that
is written out. A module that is asked for by name at run time (a registry, the table of public names) is
no import of the file that holds the table.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import pytest

from tests.laws.source import Source, imported, obey, read, sources

LAW = "law 2, imports go down"
# Lowest first.
FLOORS = (
    ("core",),
    ("device",),
    ("world", "stages"),
    ("data", "precision", "strategy", "checkpoint", "offload", "outer", "track", "watch", "report"),
    ("facade", "launch"),
    ("check", "cli"),
)
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}
FACE = len(FLOORS)  # names.py and the public modules, which only look names up


def floor_of(room: str) -> int:
    """The floor of a room; every module that is in no room is part of the face."""
    return FLOOR.get(room, FACE)


def imports(source: Source) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of everything imported from this package; a name may be a module or an object."""
    return ((line, name) for line, name in imported(source) if f"{name}.".startswith("accelerate."))


def room_of(name: str) -> str:
    """The room of a dotted name: ``accelerate.device.cuda`` -> ``device``; the package itself is the face."""
    parts = name.split(".")
    return parts[1] if len(parts) > 1 else ""


def upward(source: Source) -> Iterator[str]:
    """Imports that go up, or sideways into another room."""
    here = floor_of(source.room)
    for line, name in imports(source):
        room = room_of(name)
        if room == source.room or (here == FACE and floor_of(room) == FACE):
            continue
        if floor_of(room) > here:
            floors = f"from floor {floor_of(room)} above floor {here}"
            yield source.at(line, f"{source.room} imports {name}, {floors}")
        elif floor_of(room) == here:
            yield source.at(line, f"{source.room} imports {name}, another room of the same floor")


def graph(files: Iterable[Source]) -> dict[str, dict[str, int]]:
    """module -> the modules it imports, with the line."""
    files = list(files)
    modules = {source.module for source in files}
    edges: dict[str, dict[str, int]] = {}
    for source in files:
        own = edges.setdefault(source.module, {})
        for line, name in imports(source):
            target = name
            while target not in modules and "." in target:  # an object: the module that holds it
                target = target.rpartition(".")[0]
            if target in modules and target != source.module:
                own.setdefault(target, line)
    return edges


def circles(edges: dict[str, dict[str, int]]) -> list[list[str]]:
    """The groups of modules that reach each other (Tarjan 1972, strongly connected components)."""
    order: dict[str, int] = {}
    low: dict[str, int] = {}
    path: list[str] = []
    found: list[list[str]] = []

    def visit(module: str) -> None:
        order[module] = low[module] = len(order)
        path.append(module)
        for target in edges.get(module, {}):
            if target not in order:
                visit(target)
                low[module] = min(low[module], low[target])
            elif target in path:
                low[module] = min(low[module], order[target])
        if low[module] == order[module]:
            group = path[path.index(module) :]
            del path[path.index(module) :]
            if len(group) > 1:
                found.append(sorted(group))

    for module in edges:
        if module not in order:
            visit(module)
    return found


def test_imports_go_down() -> None:
    obey(LAW, (finding for source in sources() for finding in upward(source)))


def test_no_modules_import_in_a_circle() -> None:
    edges = graph(sources())
    files = {source.module: source for source in sources()}
    obey(
        LAW,
        (
            files[module].at(line, f"imports {target}, in a circle with {', '.join(group)}")
            for group in circles(edges)
            for module in group
            for target, line in edges[module].items()
            if target in group
        ),
    )


def test_every_room_has_a_floor() -> None:
    """A new folder must be given its floor here; only modules of two lines stand beside the rooms."""
    folders = {source.room for source in sources() if len(source.inside) > 1}
    face = {"utils", "commands", "test_utils"}
    assert folders <= FLOOR.keys() | face, f"no floor is set for {sorted(folders - FLOOR.keys() - face)}"


BREAKS = [
    ("core/units.py", "from accelerate.device import base"),
    ("core/units.py", "import accelerate"),
    ("device/cpu.py", "def f():\n    from accelerate.world import world"),
    ("world/world.py", "if TYPE_CHECKING:\n    from accelerate.data import loader"),
    ("data/loader.py", "from ..strategy import base"),
    ("data/__init__.py", "from ..strategy import base"),
    ("data/loader.py", "from .. import strategy"),
    ("launch/kinds/local.py", "import accelerate.facade.state"),
    ("facade/state.py", "import importlib\nimportlib.import_module('accelerate.cli.main')"),
    ("cli/main.py", "from accelerate.state import PartialState"),
]


@pytest.mark.parametrize(("name", "text"), BREAKS)
def test_the_law_sees_every_kind_of_import(name: str, text: str) -> None:
    found = list(upward(read(text, name)))
    assert len(found) == 1
    assert f"{name}:{len(text.splitlines())}: " in found[0]


KEEPS = [
    ("cli/main.py", "from accelerate.launch import local\nfrom accelerate.facade import state"),
    ("facade/state.py", "from accelerate import world\nfrom ..core import tree\nfrom . import gradient"),
    ("state.py", "from accelerate.names import module_hooks"),
    ("utils/modeling.py", "from accelerate.facade import x\nfrom accelerate.names import module_hooks"),
    (
        "data/loader.py",
        "import acceleratex\nfrom torch import nn\nfrom accelerate.data.batch_sampler_shard import Shard",
    ),
]


@pytest.mark.parametrize(("name", "text"), KEEPS)
def test_the_law_allows_the_way_down(name: str, text: str) -> None:
    assert not list(upward(read(text, name)))


def test_a_circle_is_found_through_functions_and_objects() -> None:
    one = read("from accelerate.data.b import Thing", "data/a.py")
    two = read("def f():\n    from accelerate.data import c", "data/b.py")
    three = read("from .a import other", "data/c.py")
    rest = read("from accelerate.data import a", "data/__init__.py")
    names = [f"accelerate.data.{letter}" for letter in "abc"]
    assert circles(graph([one, two, three, rest])) == [names]
    assert circles(graph([one, two])) == []
