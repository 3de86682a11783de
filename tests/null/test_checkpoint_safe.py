"""Files of strangers: reading them builds data, and what could run code is refused by name (D8)."""

from __future__ import annotations

import argparse
import collections
import datetime
import decimal
import enum
import fractions
import gc
import io
import os
import pathlib
import pickle
import subprocess
import sys
import types
import uuid
import weakref
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from accelerate import checkpointing, utils
from accelerate.checkpoint import load, save, torch_files
from accelerate.checkpoint.layout import CheckpointContents
from accelerate.core.errors import CheckpointError
from tests.support.ranks import RankServer
from tests.support.scripts import script_output
from tests.support.weights import ODD_TENSORS

SPRUNG = "ACCELERATE_TESTS_TRAP"


class Trap:
    """Sets a variable when it is unpickled."""

    def __reduce__(self) -> Any:
        return os.putenv, (SPRUNG, "sprung")


class Colour(enum.Enum):
    """A class that no list of plain classes knows."""

    RED = 1


class Holder:
    """A registered object whose state is whatever it is given."""

    def __init__(self, value: Any = None) -> None:
        self.value = value

    def state_dict(self) -> Any:
        return {"value": self.value}

    def load_state_dict(self, state: Any) -> None:
        self.value = state["value"]


def assert_not_sprung() -> None:
    """``os.putenv`` does not change ``os.environ``: a child sees it."""
    code = f"import os; print({SPRUNG!r} in os.environ)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "False\n"


PLAIN = [
    collections.defaultdict(list, {1: [2, 3]}),
    collections.deque([1, "a"], maxlen=4),
    collections.Counter("abca"),
    collections.OrderedDict(b=1, a=2),
    {1, "a"},
    frozenset([1, (2, 3)]),
    datetime.datetime(2026, 1, 2, 3, 4, 5, tzinfo=datetime.timezone.utc),
    datetime.date(2026, 1, 2),
    datetime.time(3, 4),
    datetime.timedelta(days=1.5),
    pathlib.Path("/a/b"),
    pathlib.PurePosixPath("a"),
    pathlib.PureWindowsPath("c:/a"),
    decimal.Decimal("1.50"),
    fractions.Fraction(1, 3),
    uuid.UUID(int=5),
    types.SimpleNamespace(a=1),
    argparse.Namespace(lr=0.1),
    range(1, 9, 2),
    slice(1, None),
    b"\x00\xff",
    bytearray(b"a"),
    2**100,
    1 + 2j,
    np.float32(1.5),
    np.datetime64("2026-01-02"),
    torch.Size([1, 2]),
    torch.bfloat16,
    torch.device("cpu"),
    {"rng": np.random.default_rng(3).bit_generator.state, "nested": [collections.deque([{1}])]},
]


@pytest.mark.parametrize("value", PLAIN, ids=lambda value: type(value).__name__)
def test_plain_objects_come_back(value: Any, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """D8: what people keep in the state of their objects needs no trust."""
    path = tmp_path / "c"
    save.save(CheckpointContents(custom=[Holder(value)]), path)
    fresh = Holder()
    load.load(CheckpointContents(custom=[fresh]), path)
    assert type(fresh.value) is type(value)
    assert fresh.value == value
    assert "refuses" not in caplog.text
    # Other programs read the file too.
    assert torch.load(path / "custom_checkpoint_0.pkl", weights_only=False) == {"value": value}


def test_a_limited_deque_and_a_default_keep_what_they_are(tmp_path: Path) -> None:
    utils.save({"d": PLAIN[1], "f": PLAIN[0]}, tmp_path / "x.bin")
    loaded = utils.load(tmp_path / "x.bin")
    assert loaded["d"].maxlen == 4
    assert loaded["f"]["new"] == []


def test_an_unknown_class_is_told_when_it_is_saved_and_refused_when_it_is_loaded(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """D8: nobody finds out at the resume; and it is said once, not at every save."""
    path = tmp_path / "c"
    for _ in range(2):
        save.save(CheckpointContents(custom=[Holder(), Holder(Colour.RED)]), path)
    told = [record.getMessage() for record in caplog.records if "refuses" in record.getMessage()]
    assert len(told) == 1
    assert "custom_checkpoint_1.pkl (Holder) saves" in told[0]
    assert f"{__name__}.Colour" in told[0]
    assert "load_kwargs={'weights_only': False}" in told[0]
    fresh = CheckpointContents(custom=[Holder("as it was"), Holder("as it was")])
    with pytest.raises(CheckpointError) as caught:
        load.load(fresh, path)
    assert "custom_checkpoint_1.pkl" in caught.value.what
    assert f"{__name__}.Colour" in caught.value.why
    assert "load_state(..., load_kwargs={'weights_only': False})" in caught.value.fix
    assert f"add_safe_globals([{__name__}.Colour])" in caught.value.fix
    assert [item.value for item in fresh.custom] == ["as it was"] * 2
    with torch.serialization.safe_globals([Colour]):
        load.load(fresh, path)
    assert fresh.custom[1].value is Colour.RED
    fresh.custom[1].value = None
    load.load(fresh, path, load_kwargs={"weights_only": False})
    assert fresh.custom[1].value is Colour.RED


def test_reading_leaves_what_the_user_allowed_as_it_was(tmp_path: Path) -> None:
    """torch has one list for the process, and a file may be read while another one is."""
    path = tmp_path / "x.bin"
    utils.save({"d": PLAIN[1], "f": PLAIN[0]}, path)
    during, before = list[Any](), set(torch.serialization.get_safe_globals())

    class Stream(io.BytesIO):
        def read(self, size: int | None = -1, /) -> bytes:
            if not during:
                during.append(utils.load(path))
            return super().read(size)

    with torch.serialization.safe_globals([collections.deque, Colour]):
        stream = Stream(path.read_bytes())
        assert torch_files.read(stream) == during[0] == {"d": PLAIN[1], "f": PLAIN[0]}
        assert set(torch.serialization.get_safe_globals()) == {*before, collections.deque, Colour}
    assert set(torch.serialization.get_safe_globals()) == before


def test_the_loose_function_refuses_too(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    checkpointing.save_custom_state(Holder(Colour.RED), str(tmp_path))
    assert "custom_checkpoint_0.pkl (Holder) saves" in caplog.text
    with pytest.raises(CheckpointError, match=r"(?s)Colour.*load_custom_state\(..., load_kwargs="):
        checkpointing.load_custom_state(Holder(), str(tmp_path))
    fresh = Holder()
    checkpointing.load_custom_state(fresh, str(tmp_path), load_kwargs={"weights_only": False})
    assert fresh.value is Colour.RED


@pytest.mark.filterwarnings("ignore::UserWarning")
@pytest.mark.parametrize("kind", ODD_TENSORS)
def test_what_torch_refuses_in_this_version_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, kind: str
) -> None:
    """torch 2.15 took the nested tensors off its list; the older ones load them."""
    checkpointing.save_custom_state(Holder(ODD_TENSORS[kind]()), str(tmp_path))
    told = "saves torch._utils._rebuild_" in caplog.text
    loading = checkpointing.load_custom_state
    if told:
        with pytest.raises(CheckpointError, match="could run code"):
            loading(Holder(), str(tmp_path))
    else:
        loading(Holder(), str(tmp_path))


def test_a_pickle_of_a_protocol_that_torch_does_not_read(tmp_path: Path) -> None:
    torch.save({"a": 1}, tmp_path / "a.bin", pickle_protocol=4)
    with pytest.raises(CheckpointError, match=r"(?s)Unsupported operand.*weights_only=False"):
        utils.load(tmp_path / "a.bin")


def poison_torch(path: Path) -> None:
    torch.save({"value": Trap()}, path)


def poison_legacy(path: Path) -> None:
    torch.save({"value": Trap()}, path, _use_new_zipfile_serialization=False)


def poison_pickle(path: Path) -> None:
    path.write_bytes(pickle.dumps(Trap()))


@pytest.mark.parametrize("poison", [poison_torch, poison_legacy, poison_pickle])
@pytest.mark.parametrize(
    "file",
    [
        *("custom_checkpoint_0.pkl", "optimizer.bin", "scheduler.bin", "scaler.pt", "pytorch_model.bin"),
        *("random_states_0.pkl", "open_gradients_0.bin"),
    ],
)
def test_a_pickle_that_would_run_code_is_refused_wherever_it_lies(
    tmp_path: Path, file: str, poison: Any
) -> None:
    def parts() -> CheckpointContents:
        model = nn.Linear(1, 1)
        optimizer, scaler = torch.optim.SGD(model.parameters()), torch.amp.GradScaler("cpu")
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        contents = CheckpointContents([model], [optimizer], [schedule], scaler, [Holder(1)], rng=True)
        contents.gradients = Holder(1)
        return contents

    path = tmp_path / "c"
    save.save(parts(), path, safe_serialization=False)
    (path / "manifest.json").unlink()
    poison(path / file)
    with pytest.raises(CheckpointError, match=rf"(?s){file}.*could run code.*(putenv|operand).*weights_only"):
        load.load(parts(), path)
    assert_not_sprung()


@pytest.mark.parametrize("poison", [poison_torch, poison_legacy, poison_pickle])
def test_files_of_weights_are_refused_too(tmp_path: Path, poison: Any) -> None:
    poison(tmp_path / "w.bin")
    for read in (utils.load_state_dict, utils.load):
        with pytest.raises(CheckpointError, match=r"(?s)could run code.*load\(.*weights_only=False\)"):
            read(tmp_path / "w.bin")
    assert_not_sprung()


def test_metadata_of_a_safetensors_file_is_text(tmp_path: Path) -> None:
    """A pickle in it stays text; an alias that names nothing in the file is no alias."""
    text = pickle.dumps(Trap(), 0).decode("latin1")
    save_file({"weight": torch.ones(1)}, tmp_path / "m.safetensors", metadata={"a": text, "../x": "../y"})
    assert list(utils.load_state_dict(tmp_path / "m.safetensors")) == ["weight"]
    assert_not_sprung()


AUDIT = """
import itertools, sys
from accelerate.checkpoint import torch_files
harmful = "open exec compile os. subprocess. socket. ctypes. shutil. import code."
harmful = tuple(harmful.split())
seen, watched = [], False

def hook(event, args):
    ours = event == "import" and args[0].startswith("encodings.")  # a name of an encoding, of Python's own
    ours |= event == "open" and args[0] == __file__  # a warning shows the line below that caused it
    if watched and event.startswith(harmful) and not ours:
        seen.append((event, args))

values = ["/etc/passwd", "os.system", b"exit 1", 5, {"a": "b"}, ["x"], None, ("a", 1), "U", "utf-8"]
allowed = [f[0] if isinstance(f, tuple) else f for f in torch_files.safe_globals()]
for call in allowed:  # once unwatched: what is imported lazily is imported
    for value in values:
        try: call(value)
        except Exception: pass
sys.addaudithook(hook)
for call in allowed:
    for count in (0, 1, 2):
        for arguments in itertools.product(values, repeat=count):
            watched = True
            try: call(*arguments)
            except Exception: pass
            watched = False
print(len(allowed), seen)
"""


def test_everything_that_may_be_built_only_keeps_data(ranks: RankServer, tmp_path: Path) -> None:
    """Called with anything, what the list allows opens, imports and runs nothing."""
    (tmp_path / "audit.py").write_text(AUDIT)
    count, _, seen = script_output(ranks, 1, tmp_path / "audit.py").strip().partition(" ")
    assert int(count) == len(torch_files.safe_globals()) > 40
    assert seen == "[]"


def test_the_list_holds_no_function_but_those_that_make_numpy_data_and_numbers() -> None:
    allowed = torch_files.safe_globals()
    numbers = {f[1] for f in allowed if isinstance(f, tuple)}
    assert numbers == {"decimal.Decimal", "fractions.Fraction"}
    functions = {f"{f.__module__}.{f.__name__}" for f in allowed if not isinstance(f, type | tuple)}
    assert len(functions) == 3
    assert functions <= {
        *("numpy._core.multiarray._reconstruct", "numpy.core.multiarray._reconstruct"),
        *("numpy._core.multiarray.scalar", "numpy.core.multiarray.scalar", "_codecs.encode"),
    }


def test_looking_for_what_would_be_refused_costs_nothing_for_a_state_like_one_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The pickle is read again only if a class is in it that no accepted one had."""
    looked: list[bytes] = []
    look = torch_files._refusals_of_pickle
    monkeypatch.setattr(torch_files, "_refusals_of_pickle", lambda text: looked.append(text) or look(text))
    monkeypatch.setattr(torch_files, "_accepted_types", set())
    weights = nn.Linear(2, 2).state_dict()
    for state, count in (
        ({"ema": weights, "all": PLAIN[:3], "array": np.ones(3)}, 1),
        ({"all": PLAIN[:3], "other": np.ones(5)}, 1),
        ({"ema": weights, "colour": Colour.RED}, 2),
        ({"ema": weights, "colour": Colour.RED}, 3),
    ):
        torch_files.write(state, io.BytesIO(), what="state")
        assert len(looked) == count


def test_what_was_written_is_not_held(tmp_path: Path) -> None:
    """A state on a device would take its memory until the collector runs."""
    tensor = torch.zeros(3)
    held = weakref.ref(tensor)
    gc.disable()
    try:
        with (tmp_path / "file").open("wb") as file:
            torch_files.write({"tensor": tensor}, file)
        del tensor
        assert held() is None
    finally:
        gc.enable()
