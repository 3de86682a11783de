"""DeepSpeed's own files, read by other numbers of processes, in other stages and under other strategies."""

from __future__ import annotations

import shutil
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from accelerate.commands.merge import merge_command, merge_command_parser
from accelerate.core.errors import CheckpointError, PrepareError
from accelerate.strategy.deepspeed.zero_checkpoint import ZeroCheckpoint
from accelerate.utils import is_deepspeed_available
from tests.cpu.test_deepspeed import ASKED, engine, loop
from tests.support.long_run import LONG_RUN
from tests.support.ranks import RankServer
from tests.support.sharded_models import adamw, batches, loss_of, share, tiny

# What the rank server imports once for this module.
PRELOAD = ("deepspeed.runtime.zero.muon.muon_optimizer", "transformers.integrations.deepspeed")

pytestmark = [
    pytest.mark.skipif(not is_deepspeed_available(), reason="the package deepspeed is not installed"),
    pytest.mark.timeout(300),
]
HALF, STEPS = 2, 4
# As the public package leaves a folder: without a word of ours.
BARE = " bare"
SAVED = {"1": "no", "2": "no", "3": "no", "3 bf16": "bf16"}


def states(accelerator: Any, model: Any, optimizer: Any) -> dict[str, Any]:
    """Whole and exact; what process 0 has."""
    strategy = accelerator.strategy
    plain = {name: value.clone() for name, value in strategy.master_state(model).items()}
    return {"weights": plain, "optimizer": strategy.optimizer_state(optimizer.optimizer, [model])}


def saves(folder: str) -> None:
    for kind, precision in SAVED.items():
        accelerator, model, optimizer = engine(ASKED[kind[0]], mixed_precision=precision)
        optimizer.param_groups[0]["lr"] = 0.02
        loop(accelerator, model, optimizer, steps=HALF)
        accelerator.save_state(f"{folder}/{kind}", metadata={"half": True})
        kept = states(accelerator, model, optimizer)
        if accelerator.is_main_process:
            torch.save(kept, f"{folder}/{kind}.pt")
        # As where DeepSpeed keeps the optimizer on a drive: its vectors in memory are empty then.
        if kind == "3":
            model.optimizer.swap_optimizer = True
            with pytest.raises(PrepareError, match="offloaded to NVMe"):
                accelerator.save_state(f"{folder}/nvme", sharded=False)
            with pytest.raises(PrepareError, match="offloaded to NVMe"):
                accelerator.strategy.load_model(model, kept["weights"])


def same(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """To the bit."""
    assert mine["weights"].keys() == theirs["weights"].keys()
    for name, value in theirs["weights"].items():
        assert torch.equal(mine["weights"][name], value), name
    assert mine["optimizer"]["state"].keys() == theirs["optimizer"]["state"].keys()
    for number, kept in theirs["optimizer"]["state"].items():
        for key, value in kept.items():
            assert torch.equal(mine["optimizer"]["state"][number][key], value), (number, key)
    groups = [each["optimizer"]["param_groups"] for each in (mine, theirs)]
    for mine_group, their_group in zip(*groups, strict=True):
        assert [mine_group[key] for key in ("params", "lr", "weight_decay")] == [
            their_group[key] for key in ("params", "lr", "weight_decay")
        ]


def goes_on(accelerator: Any, model: Any, optimizer: Any, theirs: dict[str, Any]) -> None:
    """The next losses are those of one process with the saved states."""
    reference = tiny()
    reference.load_state_dict(theirs["weights"])
    other = adamw(reference)
    other.load_state_dict(theirs["optimizer"])
    for words in list(batches(STEPS))[HALF:]:
        mine = loss_of(model, share(words, accelerator.process_index, accelerator.num_processes))
        plain = loss_of(reference, words)
        torch.testing.assert_close(
            accelerator.reduce(mine.detach(), "mean"), plain.detach(), rtol=0, atol=1e-5
        )
        accelerator.backward(mine)
        plain.backward()
        for each in (optimizer, other):
            each.step()
            each.zero_grad()


def loads(folder: str, ways: list[tuple[str, str]]) -> list[Counter[str]]:
    """Fresh engines over other weights, in that stage; how often each file was opened and weight joined."""
    counts: list[Counter[str]] = []
    load, read = torch.load, ZeroCheckpoint._read_weight

    def count_load(path: Any, **options: Any) -> Any:
        counts[-1][str(path).rpartition("/")[2]] += 1
        return load(path, **options)

    def count_read(self: ZeroCheckpoint, name: str) -> torch.Tensor:
        counts[-1][name] += 1
        return read(self, name)

    torch.load, ZeroCheckpoint._read_weight = count_load, count_read  # type: ignore[method-assign]
    for source, stage in ways:
        counts.append(Counter())
        kind = source.removesuffix(BARE)
        accelerator, model, optimizer = engine(ASKED[stage], seed=5, mixed_precision=SAVED[kind])
        metadata = accelerator.load_state(f"{folder}/{source}").metadata
        assert metadata == ({"half": True} if source == kind else {})
        theirs = torch.load(f"{folder}/{kind}.pt")
        mine = states(accelerator, model, optimizer)
        if accelerator.is_main_process:
            same(mine, theirs)
        assert model.global_steps == HALF
        if SAVED[kind] == "no":
            goes_on(accelerator, model, optimizer, theirs)
    return counts


def elsewhere(folder: str, source: str, kind: str) -> None:
    """Under a strategy that is not DeepSpeed's."""
    from accelerate import Accelerator, FullyShardedDataParallelPlugin

    more: dict[str, Any] = {"fsdp_plugin": FullyShardedDataParallelPlugin()} if kind == "fsdp" else {}
    accelerator = Accelerator(cpu=True, **more)
    assert accelerator.strategy.name == kind
    model = tiny(5)
    model, optimizer = accelerator.prepare(model, adamw(model))
    accelerator.load_state(f"{folder}/{source}")
    theirs = torch.load(f"{folder}/{source}.pt")
    strategy = accelerator.strategy
    weights = {name: value.clone() for name, value in accelerator.get_state_dict(model).items()}
    kept = strategy.optimizer_state(optimizer.optimizer, [model])
    if accelerator.is_main_process:
        same({"weights": weights, "optimizer": kept}, theirs)
    goes_on(accelerator, model, optimizer, theirs)


def test_saved_on_four_they_load_on_two_and_everywhere(ranks: RankServer, tmp_path: Path) -> None:
    """B7: masters and moments to the bit, rates of groups too; then the losses of one process."""
    folder = str(tmp_path)
    ranks(4, saves, folder, timeout=200)
    shutil.copytree(tmp_path / "3", tmp_path / f"3{BARE}")
    (tmp_path / f"3{BARE}" / "manifest.json").unlink()
    (tmp_path / f"3{BARE}" / "pytorch_model" / "accelerate_engine.json").unlink()
    ways = [
        (f"3{BARE}", "3"),
        ("1", "3"),
        ("3", "2"),
        ("2", "2 offload"),
        ("3 bf16", "1"),
        ("2", "0"),
        *([("2", "2")] if LONG_RUN else []),
    ]
    for counts in (each for rank in ranks(2, loads, folder, ways, timeout=200) for each in rank):
        opened = {name: count for name, count in counts.items() if name.endswith("_states.pt")}
        weights = {name: count for name, count in counts.items() if not name.endswith(".pt")}
        # Once to learn the layout, once to compare names and shapes, once to load.
        assert max(opened.values()) <= 3
        # What the other ranks have written is of use to the last alone.
        assert {count for name, count in opened.items() if "rank_3_" in name} <= {1}
        # A tied weight has two names.
        assert weights.pop("embed.weight") <= 2
        assert set(weights.values()) == {1}
    ranks(2, elsewhere, folder, "3", "fsdp")
    ranks(2, elsewhere, folder, "2", "ddp")
    ranks(1, elsewhere, folder, "1", "single")
    merge_command(merge_command_parser().parse_args([f"{folder}/3 bf16", f"{folder}/merged"]))
    joined = load_file(tmp_path / "merged" / "model.safetensors")
    theirs = torch.load(f"{folder}/3 bf16.pt")["weights"]
    # Frozen ones have no masters: they are as the model computes with them.
    assert joined.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name]) for name, value in joined.items())


def test_what_only_deepspeed_reads_is_said(tmp_path: Path) -> None:
    """Experts, cut layers and missing files, in one process that does not import DeepSpeed."""
    from accelerate.core.errors import CheckpointError
    from accelerate.strategy.deepspeed.zero_checkpoint import ZeroCheckpoint, find_unsupported_file

    own = tmp_path / "pytorch_model"
    own.mkdir()
    with pytest.raises(CheckpointError, match="it has no model"):
        ZeroCheckpoint(own)
    names = ("mp_rank_00_model_states.pt", "zero_pp_rank_1_mp_rank_00_optim_states.pt")
    for name in names:
        torch.save({"module": {}, "param_shapes": None}, own / name)
    with pytest.raises(CheckpointError, match="files of the optimizer are missing"):
        ZeroCheckpoint(own)
    (own / names[1]).unlink()
    assert (ZeroCheckpoint(own).stage, dict(ZeroCheckpoint(own).weights)) == (0, {})
    assert not find_unsupported_file(own)
    for name in ("layer_0_expert_1_mp_rank_00_model_states.pt", "mp_rank_01_model_states.pt"):
        torch.save({}, own / name)
        with pytest.raises(CheckpointError, match=f"it has {name}"):
            ZeroCheckpoint(own)
        (own / name).unlink()
    (own / names[0]).write_bytes(b"damaged")
    with pytest.raises(CheckpointError, match="cannot be read"):
        ZeroCheckpoint(own)


def load_into_another_optimizer(stage: int, folder: str) -> tuple[list[str], list[bool]]:
    """Save AdamW of one group; load it into another class, and into two groups: errors, nothing changed."""
    from accelerate import Accelerator, DeepSpeedPlugin

    def prepared(kind: str) -> tuple[Any, Any, Any]:
        accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(zero_stage=stage))
        model: Any = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 1))
        params = list(model.parameters())
        if kind == "SGD":
            optimizer: Any = torch.optim.SGD(params, lr=0.1, momentum=0.9)
        else:
            groups: Any = [{"params": params[:1]}, {"params": params[1:]}] if kind == "two groups" else params
            optimizer = torch.optim.AdamW(groups, lr=0.1)
        schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        model, optimizer, schedule = accelerator.prepare(model, optimizer, schedule)
        accelerator.backward(model(torch.ones(2, 4)).mean())
        optimizer.step()
        schedule.step()
        return accelerator, model, schedule

    prepared("AdamW")[0].save_state(folder)
    errors, same = [], []
    for kind in "SGD", "two groups":
        accelerator, model, schedule = prepared(kind)
        before = accelerator.get_state_dict(model), schedule.state_dict()
        with pytest.raises(CheckpointError) as error:
            accelerator.load_state(folder)
        after = accelerator.get_state_dict(model), schedule.state_dict()
        errors.append(str(error.value))
        weights = (torch.equal(value, after[0][name]) for name, value in (before[0] or {}).items())
        same.append(all(weights) and before[1] == after[1])
    return errors, same


@pytest.mark.parametrize("stage", [1, 3])
def test_the_state_of_another_optimizer_is_refused(ranks: RankServer, stage: int, tmp_path: Path) -> None:
    """G8: DeepSpeed reads any state, and fails at groups when weights are loaded already."""
    for (other, groups), same in ranks(2, load_into_another_optimizer, stage, str(tmp_path), timeout=100):
        assert "it has the state of AdamW (amsgrad, betas, " in other
        assert "and the optimizer is SGD (dampening, momentum, nesterov)" in other
        assert "it has groups of [4] parameters, and the optimizer has [1, 3]" in groups
        assert same == [True, True]


def load_and_save(source: str, target: str, stage: int | None) -> tuple[list[float], float]:
    """Load a scale of one element and the rate of SGD, where ``source`` is given; train and save."""
    from accelerate import Accelerator, DeepSpeedPlugin

    more = {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=stage)} if stage else {}
    accelerator = Accelerator(cpu=True, **more)  # type: ignore[arg-type]
    model: Any = torch.nn.Linear(4, 1)
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    if source:
        accelerator.load_state(source)
    else:
        optimizer.param_groups[0]["lr"] = 0.25
    accelerator.backward(model(torch.ones(2, 4)).mean())
    optimizer.step()
    accelerator.save_state(target)
    weights = accelerator.get_state_dict(model) or {}
    return [float(value.sum()) for value in weights.values()], optimizer.param_groups[0]["lr"]


@pytest.mark.parametrize("stage", [1, 3])
def test_small_parameters_and_optimizers_without_state_move(
    ranks: RankServer, stage: int, tmp_path: Path
) -> None:
    """A parameter with fewer elements than ranks; the learning rate of plain SGD, which keeps no state."""
    folders = [str(tmp_path / name) for name in "abc"]
    [(before, _)] = ranks(1, load_and_save, "", folders[0], None)
    (engine_weights, rate), *_ = ranks(3, load_and_save, folders[0], folders[1], stage, timeout=100)
    [(after, last_rate)] = ranks(1, load_and_save, folders[1], folders[2], None)
    assert (rate, last_rate) == (0.25, 0.25)
    # The gradient of each of the four weights, and of the bias, is 1.
    one_step = torch.tensor([1.0, 0.25])
    for earlier, later in ((before, engine_weights), (engine_weights, after)):
        assert torch.allclose(torch.tensor(earlier) - torch.tensor(later), one_step)


# --- universal checkpoints, which DeepSpeed's own converter makes

UNIVERSAL = {"checkpoint": {"load_universal": True}}


def save_universal(folder: str, stages: tuple[str, ...]) -> None:
    """Train, save, and convert; another scale and frozen layer than those of a new model."""
    from deepspeed.checkpoint import ds_to_universal  # type: ignore[import-not-found]

    for stage in stages:
        accelerator, model, optimizer = engine(ASKED[stage], seed=3)
        model.module.scale.fill_(0.25)
        optimizer.param_groups[1]["lr"] = 0.02
        loop(accelerator, model, optimizer, steps=HALF)
        accelerator.save_state(f"{folder}/{stage}")
        kept = states(accelerator, model, optimizer)
        if accelerator.is_main_process:
            torch.save(kept, f"{folder}/{stage}.pt")
            folders = {f"{kind}_folder": f"{folder}/{name}/pytorch_model" for kind, name in
                       (("input", stage), ("output", f"universal {stage}"))}  # fmt: skip
            Path(f"{folder}/universal {stage}").mkdir()
            settings = {"keep_temp_folder": False, "strict": True, "inject_missing_state": True}
            ds_to_universal.main(
                SimpleNamespace(num_extract_workers=1, num_merge_workers=1, **folders, **settings)
            )
        accelerator.wait_for_everyone()


def load_universal(folder: str, ways: list[tuple[str, str]]) -> list[str]:
    """Load each, and go on with the losses of one process; what the refusals say."""
    for source, stage in ways:
        accelerator, model, optimizer = engine({**ASKED[stage], **UNIVERSAL}, seed=5)
        for name in (f"universal {source}", source):  # an ordinary one is read too
            accelerator.load_state(f"{folder}/{name}")
            theirs = torch.load(f"{folder}/{source}.pt")
            mine = states(accelerator, model, optimizer)
            if accelerator.is_main_process:
                same(mine, theirs)
            assert model.global_steps == HALF
        goes_on(accelerator, model, optimizer, theirs)
    messages = []
    for stage, more in ("2", {}), ("0", UNIVERSAL):
        accelerator, model, _ = engine({**ASKED[stage], **more}, seed=5)
        before = accelerator.get_state_dict(model)
        with pytest.raises(CheckpointError) as error:
            accelerator.load_state(f"{folder}/universal 2")
        messages.append(str(error.value))
        after = accelerator.get_state_dict(model)
        assert all(torch.equal(value, after[name]) for name, value in before.items())
    return messages


def test_universal_checkpoints_are_read_by_deepspeed(ranks: RankServer, tmp_path: Path) -> None:
    """Float32 weights, moments, buffers and frozen layers; without the option they are refused."""
    folder = str(tmp_path)
    ranks(2, save_universal, folder, ("2", "3"), timeout=200)
    ways = [("2", "2"), ("2", "1"), ("3", "3")]
    for without, in_stage_0 in ranks(2, load_universal, folder, ways, timeout=200):
        assert "is a universal checkpoint of DeepSpeed" in without
        assert '"load_universal": true' in without
        assert "is a universal checkpoint, and the ZeRO stage is 0" in in_stage_0
    ranks(4, load_universal, folder, [("2", "2")], timeout=200)
    with pytest.raises(CheckpointError, match="universal checkpoint"):
        merge_command(merge_command_parser().parse_args([f"{folder}/universal 2", f"{folder}/merged"]))


def load_without_optimizer_files(folder: str) -> tuple[str, bool]:
    """What a load says, and whether the weights alone come back."""
    accelerator, model, optimizer = engine(ASKED["2"], seed=3)
    loop(accelerator, model, optimizer, steps=HALF)
    weights = accelerator.get_state_dict(model)
    accelerator.save_state(folder)
    if accelerator.is_main_process:
        for path in (*Path(folder).rglob("*_optim_states.pt"), *Path(folder).rglob("*.json")):
            path.unlink()
    accelerator.wait_for_everyone()
    accelerator, model, optimizer = engine(ASKED["2"], seed=5)
    with pytest.raises(CheckpointError) as error:
        accelerator.load_state(folder)
    accelerator.load_state(folder, load_module_only=True)
    loaded = accelerator.get_state_dict(model)
    return str(error.value), all(torch.equal(value, loaded[name]) for name, value in weights.items())


def test_files_of_the_optimizer_that_are_missing_are_said(ranks: RankServer, tmp_path: Path) -> None:
    """The model's file alone looked like one of stage 0, whose optimizer has no state."""
    for message, is_same in ranks(2, load_without_optimizer_files, str(tmp_path / "c"), timeout=100):
        assert "files of the optimizer are missing" in message
        assert is_same


# --- what a load leaves to the run


def resume_with_another_limit(stage: str, folder: str) -> list[float]:
    """The limits that the first step after a load clips by."""
    limits = []
    for limit in 100.0, 1e-3:
        accelerator, model, optimizer = engine({**ASKED[stage], "gradient_clipping": limit})
        if limits:
            accelerator.load_state(folder)
        limits.append(model.optimizer.clip_grad)
        loop(accelerator, model, optimizer, clip=limit, steps=1)
        accelerator.save_state(folder)
    return limits


def test_a_resumed_run_clips_by_its_own_limit(ranks: RankServer, tmp_path: Path) -> None:
    """DeepSpeed takes that of the saved run in stages 1 and 2, for one step."""
    assert ranks(2, resume_with_another_limit, "2", str(tmp_path / "c"))[0] == [100.0, 1e-3]


def train_a_student(folder: str, kind: str, is_loaded: bool) -> list[float]:
    """A frozen teacher is prepared first, and a student; the sums of the student's weights and moments."""
    from accelerate import Accelerator, DeepSpeedPlugin

    more = {"deepspeed_plugin": DeepSpeedPlugin(zero_stage=2)} if kind == "deepspeed" else {}
    accelerator = Accelerator(cpu=True, **more)  # type: ignore[arg-type]
    teacher = accelerator.prepare(tiny(1).requires_grad_(False))
    module = tiny(5 if is_loaded else 2)
    student, optimizer = accelerator.prepare(module, adamw(module))
    if is_loaded:
        accelerator.load_state(folder)
    else:
        loop(accelerator, student, optimizer, steps=1)
        accelerator.save_state(folder)
    weights = accelerator.get_state_dict(student)
    state = accelerator.strategy.optimizer_state(optimizer.optimizer, [teacher, student])
    moments = [float(each["exp_avg"].double().sum()) for each in state.get("state", {}).values()]
    return [float(value.double().sum()) for value in (weights or {}).values()] + moments


def test_the_second_model_is_found_without_a_first_one(ranks: RankServer, tmp_path: Path) -> None:
    """DeepSpeed writes the folder ``pytorch_model_1`` alone: the teacher has no optimizer."""
    folder = tmp_path / "c"
    saved, *_ = ranks(2, train_a_student, str(folder), "deepspeed", False, timeout=100)
    assert (folder / "pytorch_model_1").is_dir()
    assert not (folder / "pytorch_model").exists()
    [alone] = ranks(1, train_a_student, str(folder), "single", True)
    assert alone == pytest.approx(saved)


def load_with_a_new_buffer(folder: str) -> tuple[str, float, float]:
    """What a strict load says; a weight that another load takes, and the buffer that it leaves."""
    accelerator, model, optimizer = engine(ASKED["2"], seed=3)
    loop(accelerator, model, optimizer, steps=1)
    accelerator.save_state(folder)
    expected = model.module.embed.weight.sum().item()
    from accelerate import Accelerator, DeepSpeedPlugin

    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=ASKED["2"]))
    module: Any = tiny(5)
    module.register_buffer("extra", torch.full((1,), 7.0))
    model, optimizer = accelerator.prepare(module, adamw(module))
    with pytest.raises(CheckpointError) as error:
        accelerator.load_state(folder)
    accelerator.load_state(folder, strict=False)
    return str(error.value), model.module.embed.weight.sum().item() - expected, module.extra.item()


def test_strict_is_passed_on_to_deepspeed(ranks: RankServer, tmp_path: Path) -> None:
    for message, difference, extra in ranks(2, load_with_a_new_buffer, str(tmp_path / "c")):
        assert "extra was not saved" in message
        assert (difference, extra) == (0.0, 7.0)
