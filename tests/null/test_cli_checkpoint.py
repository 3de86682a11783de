"""``accelerate checkpoint ls|verify|prune|export``, run inside the test and as people type it."""

from __future__ import annotations

import json
import os
import re
import shutil
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from accelerate.checkpoint import save, weight_files
from accelerate.checkpoint.layout import CheckpointContents, StatefulAdapter, _manifest_digest
from accelerate.checkpoint.lazy_weights import open_weights
from accelerate.cli.main import run
from accelerate.core.errors import CheckpointError
from accelerate.utils import ProjectConfiguration
from tests.laws.test_8_no_torch import command as without_torch
from tests.support.long_run import long_run_param

Run = Callable[..., SimpleNamespace]


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Run:
    """``cli("ls", ...)`` runs ``accelerate checkpoint ls ...`` and returns code, out, err and rows."""

    def call(*args: str | Path) -> SimpleNamespace:
        code = run(["checkpoint", *map(str, args)])
        captured = capsys.readouterr()
        lines = [
            ["" if cell == "-" else cell for cell in re.split(r"\s{2,}", line)]
            for line in captured.out.splitlines()
        ]
        rows = [dict(zip(lines[0], line, strict=False)) for line in lines[1:]]
        return SimpleNamespace(code=code, out=captured.out, err=captured.err, rows=rows)

    return call


def parts(step: int = 0, value: float = 0.0) -> CheckpointContents:
    model = nn.Linear(3, 2)
    nn.init.constant_(model.weight, value)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return CheckpointContents([model], [optimizer], rng=True, step=step, metadata={"epoch": step // 10})


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A run with the checkpoints 0 to 3."""
    configuration = ProjectConfiguration(str(tmp_path), automatic_checkpoint_naming=True)
    for step in (10, 20, 30, 40):
        save.save(parts(step, step), project=configuration)
    return tmp_path


def test_a_path_is_never_taken_for_a_command(cli: Run, tmp_path: Path, monkeypatch: Any) -> None:
    """The nearest name to "run" is the command that removes checkpoints."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prun").mkdir()
    for typed in ("prun", "run/e-0"):
        result = cli(typed)
        assert result.code == 2
        assert f"accelerate checkpoint ls {typed}" in result.err
        assert "prune" not in result.err
    assert "prune" in cli("prunee").err


def old(path: Path, seconds: float = 86400) -> None:
    """Everything in a folder was written a while ago."""
    for each in (*path.rglob("*"), path):
        then = time.time() - seconds
        os.utime(each, (then, then))


def leftover(project: Path, name: str = "checkpoint_2", id: str = "abc0") -> Path:
    folder = project / "checkpoints" / f".{name}.tmp-{id}"
    folder.mkdir()
    (folder / "model.safetensors").write_bytes(b"half")
    return folder


# ---------------------------------------------------------------- ls


@pytest.mark.parametrize("inside", ["", "checkpoints"])
def test_ls_shows_every_checkpoint_of_a_project_or_folder(cli: Run, project: Path, inside: str) -> None:
    result = cli("ls", project / inside)
    assert result.code == 0
    assert [row["name"] for row in result.rows] == [f"checkpoint_{i}" for i in range(4)]
    assert [row["step"] for row in result.rows] == ["10", "20", "30", "40"]
    last = result.rows[-1]
    assert last["metadata"] == "epoch=4"
    assert (last["processes"], last["strategy"], last["format"]) == ("1", "single", "full")
    assert [row["status"] for row in result.rows] == [*["complete"] * 3, "complete, newest"]
    assert last["size"].endswith(("bytes", "KB"))


def test_weights_beside_the_checkpoints_of_a_project_are_none_of_them(cli: Run, project: Path) -> None:
    """What ``save_model`` and ``save_pretrained`` write; it hid the checkpoints of the project."""
    final, torn = project / "final", project / "checkpoint_9"
    for folder in (final, torn):
        folder.mkdir()
        (folder / "model.safetensors").write_bytes(
            (project / "checkpoints" / "checkpoint_0" / "model.safetensors").read_bytes()
        )
    assert [row["name"] for row in cli("ls", project).rows] == [f"checkpoint_{i}" for i in range(4)]
    assert [row["name"] for row in cli("ls", final).rows] == ["final"]
    assert "4 of 4" not in cli("verify", project).out
    for number in range(4):
        shutil.rmtree(project / "checkpoints" / f"checkpoint_{number}")
    (row,) = cli("ls", project).rows
    assert (row["name"], "the save was not complete" in row["status"]) == ("checkpoint_9", True)


def test_ls_of_one_checkpoint_and_as_json(cli: Run, project: Path) -> None:
    result = cli("ls", project / "checkpoints" / "checkpoint_2", "--json")
    (row,) = json.loads(result.out)
    held = sum(p.stat().st_size for p in (project / "checkpoints" / "checkpoint_2").iterdir())
    manifest = (project / "checkpoints" / "checkpoint_2" / "manifest.json").stat().st_size
    assert row["size"] == held - manifest
    assert (row["step"], row["newest"], row["metadata"]) == (30, True, {"epoch": 3})


def test_ls_says_what_is_wrong_with_each(cli: Run, project: Path) -> None:
    """D1, D2: what cannot be loaded is listed, in words; the newest complete one is marked."""
    folder = project / "checkpoints"
    (folder / "checkpoint_3" / "optimizer.bin").unlink()
    with (folder / "checkpoint_1" / "model.safetensors").open("ab") as file:
        file.write(b"x")
    (folder / "checkpoint_0" / "manifest.json").write_text("{}")
    leftover(project)
    status = {row["name"]: row["status"] for row in cli("ls", project).rows}
    assert status["checkpoint_3"] == "optimizer.bin is missing"
    assert "model.safetensors has" in status["checkpoint_1"]
    assert "expected" in status["checkpoint_1"]
    assert "manifest.json is damaged" in status["checkpoint_0"]
    assert status["checkpoint_2"] == "complete, newest"
    assert status[".checkpoint_2.tmp-abc0"] == "a save that was interrupted before it was committed"


def test_ls_knows_checkpoints_of_other_libraries(cli: Run, tmp_path: Path) -> None:
    path = Path(save.save(parts(), tmp_path / "c"))
    (path / "manifest.json").unlink()
    (row,) = cli("ls", path).rows
    assert (row["format"], row["step"], row["status"]) == ("full, no manifest", "", "complete, newest")


def test_ls_of_nothing_says_so(cli: Run, tmp_path: Path) -> None:
    result = cli("ls", tmp_path / "no")
    assert result.code == 2
    assert f"there is no folder {tmp_path / 'no'}" in result.err
    result = cli("ls", tmp_path)
    assert "there is no checkpoint in" in result.err
    assert "fix:" in result.err


def test_looking_imports_no_torch(project: Path) -> None:
    """Law 8: it is as quick as a listing of files, and works where torch is broken."""
    path = project / "checkpoints" / "checkpoint_0"
    (path / "manifest.json").unlink()
    assert "checkpoint_3" in without_torch("checkpoint", "ls", str(project))
    assert "as saved" in without_torch("checkpoint", "verify", str(project / "checkpoints" / "checkpoint_1"))
    assert "would free" in without_torch("checkpoint", "prune", str(project), "--keep", "1", "--dry-run")


def test_without_a_verb_there_is_help_and_exit_code_1(cli: Run) -> None:
    result = cli()
    assert result.code == 1
    for verb in ("ls", "verify", "prune", "export"):
        assert f"\n  {verb} " in result.out
        assert "DIR is a checkpoint, a folder of checkpoints" in cli(verb, "--help").out


# ---------------------------------------------------------------- verify


def test_verify_reads_everything(cli: Run, project: Path) -> None:
    result = cli("verify", project)
    assert result.code == 0
    assert {row["result"] for row in result.rows} == {"as saved"}
    assert {row["name"] for row in result.rows} == {f"checkpoint_{i}" for i in range(4)}
    assert {row["file"] for row in cli("verify", project, "checkpoint_1").rows} == {
        "model.safetensors",
        "optimizer.bin",
        "random_states_0.pkl",
    }


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize(
    ("damage", "words"),
    [(flip, ["its digest is", "expected"]), (cut, ["bytes, expected"]), (Path.unlink, ["it is missing"])],
)
def test_verify_names_the_file_and_what_was_expected(
    cli: Run, project: Path, damage: Callable[[Path], Any], words: list[str]
) -> None:
    """D2: and the exit code is 1; what is whole is still checked."""
    damage(project / "checkpoints" / "checkpoint_2" / "optimizer.bin")
    result = cli("verify", project)
    assert result.code == 1
    (bad,) = [row for row in result.rows if row["result"] != "as saved"]
    assert (bad["name"], bad["file"]) == ("checkpoint_2", "optimizer.bin")
    assert all(word in bad["result"] for word in words)
    assert len(result.rows) == 12
    assert "1 of 12 are not as they were saved" in result.err
    rows = json.loads(cli("verify", project, "--json").out)
    assert [row["file"] for row in rows if row["ok"] == "no"] == ["optimizer.bin"]


def test_verify_says_what_it_cannot_check(cli: Run, tmp_path: Path) -> None:
    path = Path(save.save(parts(), tmp_path / "c"))
    (path / "manifest.json").unlink()
    result = cli("verify", path)
    assert result.code == 0
    assert "digests are not known" in result.rows[0]["result"]
    cut(path / "model.safetensors")
    result = cli("verify", path)
    assert result.code == 1
    assert "model.safetensors is damaged" in result.rows[0]["result"]


def test_files_of_many_pieces_are_checked_by_pieces(cli: Run, tmp_path: Path) -> None:
    """A byte anywhere counts, also behind the first 64 MiB."""
    big = StatefulAdapter("big", lambda: {"w": torch.zeros(18 * 2**20)}, lambda state: None)
    path = Path(save.save(CheckpointContents([big]), tmp_path / "c"))
    assert cli("verify", path).code == 0
    with (path / "model.safetensors").open("r+b") as file:
        file.seek(70 * 2**20)
        file.write(b"\x01")
    assert cli("verify", path).code == 1


# ---------------------------------------------------------------- prune


def list_checkpoints(project: Path) -> list[str]:
    return sorted(os.listdir(project / "checkpoints"))


def test_prune_removes_the_oldest_and_what_was_left(cli: Run, project: Path) -> None:
    """D4, D5: by number, and only what a newer committed one replaces."""
    old(leftover(project))
    result = cli("prune", project, "--keep", "2", "--dry-run")
    assert "would free" in result.out
    assert len(list_checkpoints(project)) == 5
    result = cli("prune", project, "--keep", "2", "--yes")
    assert result.code == 0
    assert "removed 3 folder(s)" in result.out
    assert list_checkpoints(project) == ["checkpoint_2", "checkpoint_3"]
    assert "nothing to remove" in cli("prune", project, "--keep", "2", "--yes").out


def test_prune_counts_complete_checkpoints_only(cli: Run, project: Path) -> None:
    """D5: a damaged newest one is no reason to remove the last that can be loaded; it stays itself."""
    (project / "checkpoints" / "checkpoint_3" / "optimizer.bin").unlink()
    cli("prune", project, "--keep", "1", "--yes")
    assert list_checkpoints(project) == ["checkpoint_2", "checkpoint_3"]


@pytest.mark.parametrize("when", ["now", "after the newest"])
def test_prune_leaves_a_save_that_may_be_going_on(cli: Run, project: Path, when: str) -> None:
    """D1: a folder that changed just now, or since the newest commit, may belong to a process that writes."""
    folder = leftover(project, "checkpoint_4")
    if when == "after the newest":
        path = project / "checkpoints" / "checkpoint_3" / "manifest.json"
        body = json.loads(path.read_text())
        body.pop("digest")
        body["saved"] = "2020-01-01T00:00:00.000+00:00"
        path.write_text(json.dumps({"digest": _manifest_digest(body), **body}))
        old(folder)
    result = cli("prune", project, "--keep", "4", "--yes")
    assert folder.is_dir()
    assert f"stays: {folder.name}: " in result.out


def test_prune_asks(cli: Run, project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda *_: "n")
    assert cli("prune", project, "--keep", "1").code == 130
    monkeypatch.setattr("click.termui.visible_prompt_func", Mock(side_effect=EOFError))
    result = cli("prune", project, "--keep", "1")
    assert (result.code, "--yes removes without asking" in result.err) == (2, True)
    assert result.out.endswith("\n")
    assert len(list_checkpoints(project)) == 4
    monkeypatch.setattr("click.termui.visible_prompt_func", lambda *_: "y")
    assert cli("prune", project, "--keep", "1").code == 0
    assert list_checkpoints(project) == ["checkpoint_3"]


def test_prune_of_one_checkpoint_or_of_all_is_refused(cli: Run, project: Path) -> None:
    result = cli("prune", project / "checkpoints" / "checkpoint_1", "--keep", "1", "--yes")
    assert (result.code, "is one checkpoint" in result.err) == (2, True)
    assert cli("prune", project, "--keep", "0", "--yes").code == 2
    assert len(list_checkpoints(project)) == 4


def test_remote_checkpoints_are_listed_verified_and_pruned(cli: Run, tmp_path: Path) -> None:
    """The commands use the same Store as saving; exporting needs a local copy, and says so."""
    url = f"memory://{tmp_path.name}/run"
    configuration = ProjectConfiguration(url, str(tmp_path), automatic_checkpoint_naming=True)
    for step in (1, 2, 3):
        save.save(parts(step), project=configuration)
    assert [row["step"] for row in cli("ls", url).rows] == ["1", "2", "3"]
    assert {row["result"] for row in cli("verify", url).rows} == {"as saved"}
    assert cli("prune", url, "--keep", "1", "--yes").code == 0
    assert [row["name"] for row in cli("ls", url).rows] == ["checkpoint_2"]
    assert "copy the checkpoint to a local folder" in cli("export", url, tmp_path / "out").err


# ---------------------------------------------------------------- export


class WrappedNet(nn.Module):
    """Names as data parallelism and compilation leave them; two weights are one, one is turned."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 7, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(4)
        self.turned = nn.Parameter(torch.randn(5, 3).t())

    def state_as_saved(self, prefix: str = "module._orig_mod.") -> dict[str, torch.Tensor]:
        return {f"{prefix}{name}": value for name, value in self.state_dict().items()}


def save_wrapped(path: Path, model: WrappedNet, *, safe: bool) -> Path:
    """Save as older versions of 1.x did on several processes: names have a prefix, there is no manifest."""
    part = StatefulAdapter("Wrapped", model.state_as_saved, lambda state: None)
    path = Path(
        save.save(CheckpointContents([part], rng=True, strategy="ddp"), path, safe_serialization=safe)
    )
    (path / "manifest.json").unlink()
    return path


@pytest.mark.parametrize("safe", [True, False])
@pytest.mark.parametrize("limit", ["5GB", "120"])
def test_export_gives_the_users_own_names(cli: Run, tmp_path: Path, safe: bool, limit: str) -> None:
    """D6, D9: tied weights once, with their other name; no prefix; one file or shards."""
    model = WrappedNet()
    path = save_wrapped(tmp_path / "c", model, safe=safe)
    out = tmp_path / "out"
    result = cli("export", path, out, "--max-shard-size", limit)
    assert result.code == 0, result.err
    files = sorted(p for p in out.iterdir() if p.suffix == ".safetensors")
    assert (len(files) > 1) == (limit == "120")
    assert (out / "model.safetensors.index.json").exists() == (limit == "120")
    exported: dict[str, torch.Tensor] = {}
    alias: dict[str, str] = {}
    for file in files:
        exported |= load_file(file)
        with safe_open(file, framework="pt") as opened:
            alias |= opened.metadata()
    assert alias.pop("format") == "pt"
    assert alias == {"head.weight": "embed.weight"}
    expected = {name: value for name, value in model.state_dict().items() if name != "head.weight"}
    torch.testing.assert_close(exported, expected, rtol=0, atol=0)
    torch.testing.assert_close(
        {name: tensor.read() for name, tensor in open_weights(out).by_all_names().items()},
        dict(model.state_dict()),
    )


def test_export_casts_floating_point_weights_only(cli: Run, tmp_path: Path) -> None:
    path = save_wrapped(tmp_path / "c", WrappedNet(), safe=True)
    cli("export", path, tmp_path / "out", "--dtype", "bf16")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.pop("norm.num_batches_tracked").dtype == torch.int64
    assert {tensor.dtype for tensor in exported.values()} == {torch.bfloat16}
    result = cli("export", path, tmp_path / "out", "--dtype", "int8")
    assert "no floating point dtype" in result.err


@pytest.mark.parametrize("world", [1, 2])
def test_export_keeps_a_module_of_that_name(cli: Run, tmp_path: Path, world: int) -> None:
    """No number of processes puts a prefix in front: ``module.`` is the user's own."""
    model = nn.Module()
    model.module = nn.Linear(1, 1)
    path = Path(save.save(CheckpointContents([model], rng=True), tmp_path / "c"))
    body = {**json.loads((path / "manifest.json").read_text()), "world_size": world}
    body.pop("digest")
    (path / "manifest.json").write_text(json.dumps({"digest": _manifest_digest(body), **body}))
    cli("export", path, tmp_path / "out")
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == {"module.weight", "module.bias"}


def test_export_takes_the_newest_complete_checkpoint_and_the_model_asked_for(cli: Run, project: Path) -> None:
    (project / "checkpoints" / "checkpoint_3" / "optimizer.bin").unlink()
    assert cli("export", project, project / "out").code == 0
    assert load_file(project / "out" / "model.safetensors")["weight"].unique() == 30.0
    two = [nn.Linear(1, 1), nn.Linear(2, 2)]
    path = Path(save.save(CheckpointContents(two, rng=True), project / "two"))
    assert cli("export", path, project / "second", "--model", "1").code == 0
    assert load_file(project / "second" / "model.safetensors")["weight"].shape == (2, 2)
    result = cli("export", path, project / "third", "--model", "2")
    assert "weights of model 2" in result.err


def test_export_verifies_first(cli: Run, project: Path) -> None:
    """D2: nothing is written from a damaged file; a damaged optimizer does not matter."""
    path = project / "checkpoints" / "checkpoint_1"
    flip(path / "optimizer.bin")
    assert cli("export", path, project / "out").code == 0
    before = (project / "out" / "model.safetensors").read_bytes()
    flip(path / "model.safetensors")
    result = cli("export", path, project / "out")
    assert result.code == 2
    assert "model.safetensors is damaged" in result.err
    assert (project / "out" / "model.safetensors").read_bytes() == before


def test_export_refuses_to_write_into_a_checkpoint(cli: Run, project: Path) -> None:
    path = project / "checkpoints" / "checkpoint_1"
    assert "is a checkpoint" in cli("export", path, path).err
    assert cli("verify", path).code == 0


def test_a_crash_never_leaves_an_index_over_mixed_shards(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D1: killed at any rename or removal, a folder has the old weights, the new ones, or no index."""
    weights = [{f"w{i}": torch.full((64,), float(k)) for i in range(4)} for k in range(2)]
    steps = 0

    def count_calls(function: Callable[..., Any], fatal: int) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps == fatal:
                raise KeyboardInterrupt
            return function(*args, **kwargs)

        return call

    fatal = 0
    for fatal in range(1, 40):
        out = tmp_path / str(fatal)
        weight_files.save_weights(weights[0], out, max_shard_size=600)
        steps = 0
        with monkeypatch.context() as patch:
            patch.setattr(Path, "replace", count_calls(Path.replace, fatal))
            patch.setattr(Path, "unlink", count_calls(Path.unlink, fatal))
            try:
                weight_files.save_weights(weights[1], out, max_shard_size=600)
            except KeyboardInterrupt:
                pass
            else:
                break
        if (out / "model.safetensors.index.json").exists():
            values = {float(t.read()[0]) for t in open_weights(out).tensors.values()}
            assert len(values) == 1, fatal
        weight_files.save_weights(weights[1], out, max_shard_size=600)
        assert {float(t.read()[0]) for t in open_weights(out).tensors.values()} == {1.0}
        assert not [name for name in os.listdir(out) if name.startswith(".")]
    assert fatal > 4


def test_a_killed_process_leaves_nothing_that_the_next_export_does_not_clear(tmp_path: Path) -> None:
    (tmp_path / ".model-00001-of-00002.safetensors.tmp-abc0").write_bytes(b"half")
    (tmp_path / ".notes.tmp-abc0").write_bytes(b"the user's")
    weight_files.save_weights({"w": torch.ones(2)}, tmp_path)
    assert sorted(os.listdir(tmp_path)) == [".notes.tmp-abc0", "model.safetensors"]


MEMORY = """
import resource, sys
from pathlib import Path
from accelerate.checkpoint.weight_files import export_weights
from accelerate.checkpoint.checkpoint_maintenance import open_checkpoints, select_checkpoint

def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024

open_one = lambda text: select_checkpoint(open_checkpoints(text))
big = open_one(sys.argv[1])
export_weights(open_one(sys.argv[2]), Path(sys.argv[3], "small"), dtype="bf16")
before = peak()
export_weights(big, Path(sys.argv[3], "big"), max_shard_size="64MiB", dtype="bf16")
print(peak() - before)
"""


@pytest.mark.parametrize("safe", [True, long_run_param(False)])
def test_export_holds_one_shard_in_memory_at_most(tmp_path: Path, safe: bool) -> None:
    """A model several times larger than the limit of a shard, from both formats, while its dtype changes."""
    every = {f"layer.{i}": torch.randn(4 * 2**20) for i in range(24)}  # 16 MiB each, 384 MiB in all
    big = Path(
        save.save(
            CheckpointContents([StatefulAdapter("big", lambda: every, print)]),
            tmp_path / "b",
            safe_serialization=safe,
        )
    )
    small = Path(save.save(CheckpointContents([nn.Linear(2, 2)]), tmp_path / "s", safe_serialization=safe))
    done = subprocess.run(
        [sys.executable, "-c", MEMORY, str(big), str(small), str(tmp_path)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) <= 64 * 2**20
    shards = sorted((tmp_path / "big").glob("*.safetensors"))
    assert len(shards) == 3
    assert all(path.stat().st_size <= 64 * 2**20 + 4096 for path in shards)
    exported = {name: tensor.read() for name, tensor in open_weights(tmp_path / "big").tensors.items()}
    assert all(torch.equal(exported[name], value.bfloat16()) for name, value in every.items())
    assert len(exported) == len(every)


# ---------------------------------------------------------------- files of strangers


@pytest.mark.parametrize("file", ["../secret.safetensors", "/etc/passwd", "..\\secret", 5])
def test_an_index_never_leads_out_of_its_folder(tmp_path: Path, file: Any) -> None:
    save_file({"w": torch.ones(1)}, tmp_path / "secret.safetensors")
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": file}}))
    with pytest.raises(CheckpointError, match="outside of the folder"):
        open_weights(folder)


def header(path: Path, body: bytes, length: int | None = None) -> None:
    path.write_bytes(struct.pack("<Q", len(body) if length is None else length) + body + b"\x00" * 8)


@pytest.mark.parametrize(
    "body",
    [
        b"{",
        b"[]",
        b'{"w":{"dtype":"F32","shape":[1000000],"data_offsets":[0,4000000]}}',
        b'{"w":{"dtype":"F32","shape":[4],"data_offsets":[0,8]}}',
        b'{"w":{"dtype":"F32","shape":[2],"data_offsets":[-4,4]}}',
        b'{"w":{"dtype":"pickle","shape":[2],"data_offsets":[0,8]}}',
    ],
)
def test_a_safetensors_header_that_lies_is_refused(tmp_path: Path, body: bytes) -> None:
    header(tmp_path / "m.safetensors", body)
    with pytest.raises(CheckpointError, match=r"m\.safetensors"):
        open_weights(tmp_path / "m.safetensors")
    header(tmp_path / "m.safetensors", body, 2**60)
    with pytest.raises(CheckpointError, match=r"m\.safetensors"):
        open_weights(tmp_path / "m.safetensors")


def test_an_index_that_is_none_and_shards_that_lack_are_named(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors.index.json"
    path.write_text("{}")
    with pytest.raises(CheckpointError, match="weight_map"):
        open_weights(path)
    path.write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    with pytest.raises(CheckpointError, match=r"a\.safetensors is missing"):
        open_weights(path)
    save_file({"v": torch.ones(1)}, tmp_path / "a.safetensors")
    with pytest.raises(CheckpointError, match="does not hold w"):
        open_weights(path)
    path.write_text(json.dumps({"v": "a.safetensors"}))  # some tools write the table alone
    assert list(open_weights(path).tensors) == ["v"]
