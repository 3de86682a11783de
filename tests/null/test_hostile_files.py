"""Files that would exhaust time or memory, change the process, or never end: refused at once, by name."""

from __future__ import annotations

import json
import os
import pickle
import signal
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint import metadata

from accelerate import load_checkpoint_in_model, utils
from accelerate.checkpoint import dcp_files, layout, load, save
from accelerate.checkpoint.layout import CheckpointContents
from accelerate.core import pickle_scan
from accelerate.core.errors import CheckpointError
from accelerate.strategy.deepspeed.zero_checkpoint import ZeroCheckpoint

INDEX = layout.SAFE_WEIGHTS_INDEX_NAME


@pytest.fixture(autouse=True)
def at_once() -> Iterator[None]:
    """A test that waits for a pipe, or counts to 2**40, ends."""

    def stop(*_: Any) -> None:
        raise TimeoutError("it was not refused")

    before = signal.signal(signal.SIGALRM, stop)
    signal.alarm(100)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, before)


def text(value: str) -> bytes:
    """The opcode of a text in protocol 2."""
    return b"X" + len(value).to_bytes(4, "little") + value.encode()


def call(name: str, arguments: bytes) -> bytes:
    module, _, function = name.rpartition(".")
    return f"c{module}\n{function}\n".encode() + arguments + b"R"


MILLION = b"(" + b"K\x01" * 100_000
TUPLES = b")q\x00" + b"h\x00h\x00\x86q\x00" * 40
TRILLION = call("builtins.range", b"\x8a\x06\x00\x00\x00\x00\x00\x01\x85")
BOMBS = {
    "shared tuples as a key": (b"}" + TUPLES + b"N0h\x00Ns.", "steps to build"),
    "a list that is copied by each call": (
        MILLION + b"t\x85q\x01" + call("torch.Size", b"h\x01") * 2000 + b".",
        "steps to build",
    ),
    "a list from a range": (call("builtins.list", TRILLION + b"\x85") + b".", "fills a container"),
    "a set from a tensor": (
        call("builtins.set", call("torch.Tensor", b"J\x00\x00\x00\x40\x85") + b"\x85") + b".",
        "fills a container",
    ),
    "deep": (b")" + b"\x85" * 100_000 + b".", "nested more than 200 levels"),
    "no end": (b"](" + b"N" * 1000, "damaged, at byte|EOFError"),
    "an empty stack": (b"\x86R.", "damaged, at byte|index out of range|pop from"),
    "attributes of a class": (
        b"ccollections\nOrderedDict\n(N}" + text("leak") + b"K\x01st" + b"b.",
        "did not make",
    ),
    "attributes of a dtype": (b"ctorch\nfloat32\n}" + text("leak") + b"K\x01sb.", "did not make"),
    "a huge fraction": (
        call("fractions.Fraction", text("1e9999999999") + b"\x85") + b".",
        "made from no number|names fractions.Fraction",
    ),
    "a huge fraction of a decimal": (
        call("fractions.Fraction", call("decimal.Decimal", text("1e9999999999") + b"\x85") + b"\x85") + b".",
        "made from no number|names decimal.Decimal|names fractions",
    ),
}


def write_torch(path: Path, content: bytes) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("archive/data.pkl", content)
        archive.writestr("archive/version", "3")


def write_legacy(path: Path, content: bytes) -> None:
    head = [torch.serialization.MAGIC_NUMBER, torch.serialization.PROTOCOL_VERSION, {}]
    path.write_bytes(b"".join(pickle.dumps(value, 2) for value in head) + content + pickle.dumps([], 2))


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_pickle_that_takes_too_much_is_refused_in_every_kind_of_file(bomb: str, tmp_path: Path) -> None:
    """G13: in torch files of both formats, in files of DeepSpeed, and in the index of a sharded model."""
    content, words = b"\x80\x02" + BOMBS[bomb][0], BOMBS[bomb][1]
    for write in (write_torch, write_legacy):
        write(tmp_path / "w.bin", content)
        for read in (utils.load, utils.load_state_dict, weights_into_a_model):
            with pytest.raises(CheckpointError, match=words):
                read(tmp_path / "w.bin")
    (tmp_path / "zero").mkdir()
    write_torch(tmp_path / "zero/mp_rank_00_model_states.pt", content)
    with pytest.raises(CheckpointError, match=words):
        ZeroCheckpoint(tmp_path / "zero")
    (tmp_path / layout.SHARDED_INDEX).write_bytes(content)
    with pytest.raises(CheckpointError, match=words + "|range|torch.Tensor"):
        dcp_files.ShardFolderReader(tmp_path)
    assert not hasattr(torch.float32, "leak")


@pytest.mark.parametrize(
    "file", ["optimizer.bin", "scheduler.bin", "scaler.pt", "custom_checkpoint_0.pkl", "random_states_0.pkl"]
)
@pytest.mark.parametrize("write", [write_torch, write_legacy])
def test_every_pickle_of_a_training_state_is_scanned(
    write: Callable[[Path, bytes], None], file: str, tmp_path: Path
) -> None:
    """G13: with a manifest that does not know of it, and without one."""

    def training() -> CheckpointContents:
        whole = contents()
        whole.schedulers = [torch.optim.lr_scheduler.StepLR(whole.optimizers[0], 1)]
        whole.scaler, whole.custom = torch.amp.GradScaler("cpu"), [nn.Linear(1, 1)]
        return whole

    for bomb in ("attributes of a dtype", "a list from a range", "deep"):
        save.save(training(), tmp_path / "c", safe_serialization=False)
        (tmp_path / "c" / layout.MANIFEST_NAME).unlink()
        write(tmp_path / "c" / file, b"\x80\x02" + BOMBS[bomb][0])
        with pytest.raises(CheckpointError, match=rf"(?s){file}.*({BOMBS[bomb][1]})"):
            load.load(training(), tmp_path / "c")
    assert not hasattr(torch.float32, "leak")


def weights_into_a_model(path: Path) -> None:
    load_checkpoint_in_model(nn.Linear(2, 2), path)


def test_an_index_changes_no_class_and_no_member_of_an_enumeration(tmp_path: Path) -> None:
    """G13: BUILD sets attributes of an instance that the pickle made, and of nothing else."""
    module = metadata.__name__
    member = call(f"{module}._MEM_FORMAT_ENCODING", b"K\x00\x85")
    for made in (f"c{module}\nMetadataIndex\n".encode(), member):
        attributes = b"}" + text("__hash__") + b"K\x01s"
        for state in (attributes, b"N" + attributes + b"\x86"):
            (tmp_path / layout.SHARDED_INDEX).write_bytes(b"\x80\x02" + made + state + b"b.")
            with pytest.raises(CheckpointError, match="sets attributes of an object that it did not make"):
                dcp_files.ShardFolderReader(tmp_path)
    assert "__hash__" not in vars(metadata._MEM_FORMAT_ENCODING(0))
    assert isinstance(hash(metadata.MetadataIndex("a")), int)


def test_a_pickle_of_many_opcodes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pickle_scan, "OPCODES", 1000)
    state = {f"layer.{i}.weight": torch.ones(1) for i in range(20)}
    torch.save(state, tmp_path / "w.bin")
    assert utils.load(tmp_path / "w.bin").keys() == state.keys()
    write_torch(tmp_path / "w.bin", b"\x80\x02](" + b"N" * 1000 + b"e.")
    with pytest.raises(CheckpointError, match=r"(?s)more than 1,000 opcodes.*weights_only=False"):
        utils.load(tmp_path / "w.bin")
    assert utils.load(tmp_path / "w.bin", weights_only=False) == [None] * 1000
    (tmp_path / layout.SHARDED_INDEX).write_bytes(b"\x80\x02](" + b"N" * 2**21 + b"e.")
    with pytest.raises(CheckpointError, match=r"more than all shards"):
        dcp_files.ShardFolderReader(tmp_path)


def test_an_archive_that_unpacks_to_much_more_is_refused(tmp_path: Path) -> None:
    for name in ("data.pkl", "data/0"):
        with zipfile.ZipFile(tmp_path / "w.bin", "w", zipfile.ZIP_DEFLATED) as archive:
            archive.writestr(f"archive/{name}", bytes(2**25))
        with pytest.raises(CheckpointError, match="would take 33,554,432 when unpacked"):
            utils.load(tmp_path / "w.bin")


def test_what_this_library_saves_passes_whatever_it_holds() -> None:
    """Sharing and depth of honest data: one list in many places, and lists of lists."""
    shared = [tuple(range(50))] * 1000
    nested: Any = 1
    for _ in range(90):
        nested = [{"a": nested}]
    for value in ({"a": [shared] * 1000}, nested, {(1, ("a", 2)): {1, 2}}, [frozenset([(1, 2)])] * 9):
        for protocol in (2, 4, 5):
            data = pickle.dumps(value, protocol)
            assert pickle_scan.scan_pickle(b"?" + data, 1, opcodes=None) == len(data) + 1


# ------------------------------------------------------------------------ files that are no files


def contents() -> CheckpointContents:
    model = nn.Linear(2, 2)
    return CheckpointContents([model], [torch.optim.SGD(model.parameters(), momentum=0.9)], rng=True)


def to_pipe(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def to_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("change", [to_pipe, to_device])
def test_a_pipe_or_device_in_place_of_a_file_is_refused(
    change: Callable[[Path], None], tmp_path: Path
) -> None:
    """G13: nothing waits for a writer, and nothing reads without end."""
    words = "is missing|no file, but a pipe|there is no|is damaged|no complete"
    for safe in (True, False):
        made = tmp_path / f"c{safe}"
        save.save(contents(), made, safe_serialization=safe)
        for name in sorted(p.name for p in made.iterdir()):
            if name != layout.MANIFEST_NAME:
                save.save(contents(), made, safe_serialization=safe)
                change(made / name)
                for manifest in (True, False):
                    if not manifest:
                        (made / layout.MANIFEST_NAME).unlink()
                    with pytest.raises(CheckpointError, match=words):
                        load.load(contents(), made)
    save_file(nn.Linear(2, 2).state_dict(), tmp_path / "model.safetensors")
    torch.save({}, tmp_path / "model.bin")
    (tmp_path / "model.safetensors.index.json").touch()
    for name in ("model.safetensors", "model.bin", "model.safetensors.index.json"):
        change(tmp_path / name)
        for read in (utils.load, utils.load_state_dict, weights_into_a_model):
            with pytest.raises(CheckpointError, match=words):
                read(tmp_path / name)
    (tmp_path / "zero").mkdir()
    (tmp_path / "zero/mp_rank_00_model_states.pt").touch()
    change(tmp_path / "zero/mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match=words):
        ZeroCheckpoint(tmp_path / "zero")


@pytest.mark.parametrize(
    "state", [{}, [1], {"module": 5, "param_shapes": []}, {"module": {}, "param_shapes": 5}]
)
def test_a_file_of_deepspeed_of_another_form_is_refused(state: Any, tmp_path: Path) -> None:
    torch.save(state, tmp_path / "mp_rank_00_model_states.pt")
    with pytest.raises(CheckpointError, match="cannot be read by other processes"):
        ZeroCheckpoint(tmp_path)


def test_links_to_files_are_followed_as_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    save_file(nn.Linear(2, 2).state_dict(), tmp_path / "blob")
    (tmp_path / "model.safetensors").symlink_to(tmp_path / "blob")
    weights_into_a_model(tmp_path / "model.safetensors")


@pytest.mark.parametrize("file", ["../w.safetensors", "/etc/passwd", "a/b", "..", ".", "", INDEX, 5, None])
def test_an_index_leads_to_files_beside_it_only(file: Any, tmp_path: Path) -> None:
    folder = tmp_path / "m"
    folder.mkdir()
    save_file(nn.Linear(2, 2).state_dict(), tmp_path / "w.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"weight": file, "bias": file}}))
    for path in (folder / INDEX, folder):
        with pytest.raises(CheckpointError, match=r"outside of the folder|is missing|no file of weights"):
            weights_into_a_model(path)


@pytest.mark.parametrize("file", ["../../escaped", "/tmp/escaped", "a/../../escaped", "..\\escaped"])
def test_a_manifest_names_files_of_its_folder_only(file: str, tmp_path: Path) -> None:
    """A checkpoint that is fetched from a store writes its files where it is told to."""
    made = tmp_path / "c"
    save.save(contents(), made)
    manifest = layout.decode_manifest((made / layout.MANIFEST_NAME).read_bytes(), "m")
    record = next(iter(manifest.files.values()))
    (made / layout.MANIFEST_NAME).write_bytes(
        layout.encode_manifest(layout.Manifest("1", 0, 1, {**manifest.files, file: record}))
    )
    with pytest.raises(CheckpointError, match=r"outside of the checkpoint's folder"):
        load.load(contents(), made)


def view(strides: tuple[int, ...], offset: int = 0, storage_bytes: int = 16) -> bytes:
    """A pickled state dict of one tensor, whose storage need not hold what it claims."""

    def number(value: int) -> bytes:
        data = value.to_bytes(8, "little", signed=True)
        return b"\x8a\x08" + data

    storage = b"(" + text("storage") + b"ctorch\nFloatStorage\n" + text("0") + text("cpu")
    storage += number(storage_bytes // 4) + b"tQ"
    size = b"(" + number(2) * len(strides) + b"t"
    steps = b"(" + b"".join(map(number, strides)) + b"t"
    hooks = call("collections.OrderedDict", b")")
    tensor = call(
        "torch._utils._rebuild_tensor_v2",
        b"(" + storage + number(offset) + size + steps + b"\x89" + hooks + b"t",
    )
    return b"\x80\x02}(" + text("weight") + tensor + text("bias") + tensor + b"u."


@pytest.mark.parametrize(
    "content",
    [
        view((2**40, 1)), view((2, 1), offset=2**40), view((2, 1), offset=-8), view((-1, 1)),
        view((2, 1), storage_bytes=2**46), view((2, 1), storage_bytes=-16), view((2, 1), storage_bytes=0),
    ],
)  # fmt: skip
def test_a_torch_file_with_impossible_tensors_is_refused(content: bytes, tmp_path: Path) -> None:
    with zipfile.ZipFile(tmp_path / "w.bin", "w") as archive:
        for name, data in {"data.pkl": content, "version": b"3", "data/0": bytes(16)}.items():
            archive.writestr(f"archive/{name}", data)
    for read in (utils.load, weights_into_a_model):
        with pytest.raises(CheckpointError):
            read(tmp_path / "w.bin")


def test_an_index_with_impossible_places_is_refused(tmp_path: Path) -> None:
    """What the index says of a chunk is compared with the file before anything is read or allocated."""
    folder = tmp_path / "m"
    folder.mkdir()
    index = dcp_files.read_index(saved_shards(folder))
    path = folder / layout.SHARDED_INDEX
    for field, value in [
        ("offset", -1),
        ("offset", "a"),
        ("length", 2**50),
        ("length", -5),
        ("relative_path", 5),
    ]:
        broken = pickle.loads(pickle.dumps(index))
        for info in broken.storage_data.values():
            setattr(info, field, value)
        path.write_bytes(pickle.dumps(broken))
        with pytest.raises(CheckpointError):
            weights_into_a_model(folder)
    for size in (torch.Size([2**40, 2]), (2, "a"), "ab", None):
        broken = pickle.loads(pickle.dumps(index))
        for entry in broken.state_dict_metadata.values():
            entry.size = size
        path.write_bytes(pickle.dumps(broken))
        with pytest.raises(CheckpointError):
            weights_into_a_model(folder)


def saved_shards(folder: Path) -> Path:
    dcp.save({"model": nn.Linear(2, 2).state_dict()}, checkpoint_id=folder, no_dist=True)
    return folder
