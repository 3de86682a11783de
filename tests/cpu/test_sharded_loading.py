"""Loading weights for sharded training: each process reads its own part of the files, and holds no more."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from tests.support.long_run import long_run_param
from tests.support.ranks import RanksError, RankServer, same_on_all
from tests.support.sharded_models import Tiny, adamw, batches, loss_of, share, tiny, whole

LAYERS: dict[str, Any] = {"auto_wrap_policy": "transformer_based_wrap"}
STEPS = 2


class TinyWithBuffer(Tiny):
    """With a buffer that no file holds."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("waves", torch.linspace(0.5, 1, 8), persistent=False)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        """(batch, length) -> (batch, length, WORDS)."""
        return super().forward(words) * self.get_buffer("waves").mean()


def make_tiny_with_buffer() -> TinyWithBuffer:
    torch.manual_seed(0)
    return TinyWithBuffer()


def train_steps(
    model: Any, optimizer: Any, rank: int, size: int, backward: Callable[[Any], None]
) -> list[float]:
    losses = []
    for words in batches(STEPS):
        loss = loss_of(model, share(words, rank, size))
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def load_and_train(how: str, file: str) -> Any:
    """(losses of this rank, weights, shapes of the tensors that were sent, whether ties hold)."""
    from accelerate import (
        Accelerator,
        FullyShardedDataParallelPlugin,
        init_empty_weights,
        load_checkpoint_in_model,
    )

    plugin = FullyShardedDataParallelPlugin(**LAYERS)
    accelerator = Accelerator(fsdp_plugin=plugin)
    rank = accelerator.process_index
    with init_empty_weights():
        model: Any = TinyWithBuffer()
    model.frozen.requires_grad_(False)
    if how == "ignored":
        plugin.ignored_modules = [model.frozen]
    if not (how == "after" or (how == "rank 0" and rank)):
        load_checkpoint_in_model(model, file)
    if how == "written" and rank:
        model.layers[0].up.weight.data.mul_(2)
    if how == "library":
        model.load_state_dict(load_file(file), assign=True, strict=False)
        model.head.weight = model.embed.weight
    optimizer: Any = adamw(model)
    sent: list[tuple[int, ...]] = []
    broadcast = torch.distributed.broadcast

    def record_and_broadcast(tensor: torch.Tensor, **options: Any) -> None:
        sent.append(tuple(tensor.shape))
        broadcast(tensor, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.distributed, "broadcast", record_and_broadcast)
        if how == "optimizer later":
            model = accelerator.prepare(model)
            optimizer = accelerator.prepare(optimizer)
        else:
            model, optimizer = accelerator.prepare(model, optimizer)
    if how == "after":
        load_checkpoint_in_model(model, file)
    losses = train_steps(model, optimizer, rank, accelerator.num_processes, accelerator.backward)
    values = whole(model) | {"waves": model.waves, "scale": model.scale}
    tied = model.head.weight is model.embed.weight
    accelerator.free_memory()
    return losses, values, sent, tied


WAYS = ("before", "after", "library", "optimizer later", "ignored", "written", "rank 0")
BUFFERS = [(3,), (8,)]


def ways(file: str) -> dict[str, Any]:
    return {how: load_and_train(how, file) for how in WAYS}


def test_what_all_have_mapped_is_not_sent(tmp_path: Path, ranks: RankServer) -> None:
    """D6: ties, frozen layers and buffers hold; what one rank has changed comes from rank 0 as ever."""
    file = tmp_path / "model.safetensors"
    model = make_tiny_with_buffer()
    state = model.state_dict()
    del state["head.weight"]
    save_file(state, file)
    both = ranks(2, ways, str(file))
    losses = train_steps(model, adamw(model), 0, 1, lambda loss: loss.backward())
    expected = whole(model) | {"waves": model.waves, "scale": model.scale}
    for how in WAYS:
        first, second = both[0][how], both[1][how]
        mean = [sum(pair) / 2 for pair in zip(first[0], second[0], strict=True)]
        torch.testing.assert_close(mean, losses, rtol=0, atol=1e-5, msg=how)
        torch.testing.assert_close(first[1], expected, rtol=0, atol=1e-5, msg=how)
        assert first[2] == second[2]
        assert first[3], how
        if how == "rank 0":
            assert len(first[2]) == len(expected)
        elif how == "written":  # the small ones beside it lie on the same page
            assert (16, 8) in first[2]
        else:
            assert sorted(first[2]) == BUFFERS, how


# --- number formats


def half(file: str, when: str) -> dict[str, torch.Tensor]:
    from accelerate import (
        Accelerator,
        FullyShardedDataParallelPlugin,
        init_empty_weights,
        load_checkpoint_in_model,
    )

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**LAYERS), mixed_precision="bf16")
    with init_empty_weights():
        model: Any = Tiny().bfloat16()
    if when == "before":
        load_checkpoint_in_model(model, file)
    model = accelerator.prepare(model)
    if when == "after":
        load_checkpoint_in_model(model, file)
    values = whole(model)
    accelerator.backward(loss_of(model, next(batches(1))))
    assert all(p.grad.dtype == p.dtype for p in model.parameters() if p.grad is not None)
    return values


@pytest.mark.parametrize("when", ["before", "after"])
def test_half_precision_files_become_float32_where_they_train(
    tmp_path: Path, ranks: RankServer, when: str
) -> None:
    file = tmp_path / "model.safetensors"
    state = {n: v.bfloat16() for n, v in tiny().state_dict().items() if n != "head.weight"}
    save_file(state, file)
    for name, value in same_on_all(ranks(2, half, str(file), when)).items():
        assert value.dtype == (torch.bfloat16 if name.startswith("frozen") else torch.float32), name
        assert torch.equal(value, state[name].to(value.dtype)), name


# --- what is refused


def load_uninitialized(case: str, file: str) -> None:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, load_checkpoint_in_model

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**LAYERS))
    with torch.device("meta"):
        model: Any = TinyWithBuffer() if case == "buffer" else Tiny()
    model = accelerator.prepare(model)
    if case == "partly":
        load_checkpoint_in_model(model, file)
    loss_of(model, next(batches(1)))


@pytest.mark.parametrize(
    ("case", "words"),
    [
        (
            "never",
            "there are no values in embed.weight, layers.0.norm.weight, layers.0.norm.bias and 13 more",
        ),
        ("partly", "there are no values in layers.1.down.weight"),
        ("buffer", "the buffer waves is on the meta device, on rank 0 too"),
    ],
)
def test_nobody_computes_with_weights_that_nobody_loaded(
    tmp_path: Path, ranks: RankServer, case: str, words: str
) -> None:
    file = tmp_path / "model.safetensors"
    state = tiny().state_dict()
    for name in ("head.weight", "layers.1.down.weight"):
        del state[name]
    save_file(state, file)
    with pytest.raises(RanksError) as caught:
        ranks(2, load_uninitialized, case, str(file))
    assert caught.value.causing_kinds() == {"PrepareError"}
    assert words in str(caught.value)


def saved_empty(file: str, folder: str) -> dict[str, str]:
    from accelerate import Accelerator, FullyShardedDataParallelPlugin, load_checkpoint_in_model

    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**LAYERS))
    with torch.device("meta"):
        model: Any = Tiny()
    model = accelerator.prepare(model)
    calls: dict[str, Callable[[], Any]] = {
        "parts": lambda: accelerator.save_state(folder, sharded=True),
        "whole": lambda: accelerator.save_state(folder, sharded=False),
        "model": lambda: accelerator.save_model(model, folder),
        "state": lambda: accelerator.get_state_dict(model),
    }
    results = {}
    load_checkpoint_in_model(model, file)
    for name, call in calls.items():
        with pytest.raises(ValueError, match="no values") as caught:
            call()
        results[name] = str(caught.value)
    accelerator.wait_for_everyone()
    results["there"] = str(sorted(path.name for path in Path(folder).rglob("*")))
    with torch.no_grad():
        model.layers[1].down.weight.fill_(1.0)
    accelerator.save_state(f"{folder}-filled")
    return results


def test_a_model_that_nobody_filled_is_not_saved(tmp_path: Path, ranks: RankServer) -> None:
    """Both processes name what is empty, and what was saved before stays as it was."""
    state = tiny().state_dict()
    for name in ("head.weight", "layers.1.down.weight"):
        del state[name]
    save_file(state, tmp_path / "model.safetensors")
    folder = tmp_path / "before"
    folder.mkdir()
    (folder / "mine").touch()
    results = same_on_all(ranks(2, saved_empty, str(tmp_path / "model.safetensors"), str(folder)))
    assert results.pop("there") == "['mine']"
    for name, words in results.items():
        assert "there are no values in layers.1.down.weight\n" in words, name


# --- memory


class Wide(nn.Module):
    """Blocks of 17 MB in float32, and as much again in what is gathered with the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20_000, 2048)
        self.blocks = nn.ModuleList(nn.Linear(2048, 2048, bias=False) for _ in range(10))


def anonymous() -> int:
    """Bytes of this process that are no pages of files."""
    lines = Path("/proc/self/status").read_text().splitlines()
    (line,) = [line for line in lines if line.startswith("RssAnon:")]
    return int(line.split()[1]) * 1024


class Peak:
    """The greatest ``anonymous()`` while a block runs, beyond what was before it."""

    def __enter__(self) -> Peak:
        self.before = self.most = anonymous()
        self._ended = threading.Event()
        self._watcher = threading.Thread(target=self._watch)
        self._watcher.start()
        return self

    def _watch(self) -> None:
        while not self._ended.wait(0.001):
            self.most = max(self.most, anonymous())

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._watcher.join()
        self.most = max(self.most, anonymous())

    @property
    def growth(self) -> int:
        return self.most - self.before


def peaks(folder: str) -> dict[str, tuple[int, int]]:
    """(greatest memory, this rank's share) of each way to load."""
    from accelerate import (
        Accelerator,
        FullyShardedDataParallelPlugin,
        init_empty_weights,
        load_checkpoint_in_model,
    )

    options: dict[str, Any] = {**LAYERS, "transformer_cls_names_to_wrap": ["Linear"]}
    accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**options))
    casting = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(**options), mixed_precision="bf16")
    accelerator.prepare(nn.Sequential(nn.Linear(2, 2)))  # torch's own modules and pools
    peaks_by_way: dict[str, tuple[int, int]] = {}
    for how in ("before", "after", "cast"):
        file = Path(folder, "half" if how == "cast" else "full")
        with init_empty_weights():
            model: Any = Wide().bfloat16() if how == "cast" else Wide()
        with Peak() as peak:
            if how != "after":
                load_checkpoint_in_model(model, file)
            model = (casting if how == "cast" else accelerator).prepare(model)
            if how == "after":
                load_checkpoint_in_model(model, file)
        own = {name: p.to_local() for name, p in model.named_parameters()}
        peaks_by_way[how] = peak.growth, sum(p.numel() * p.element_size() for p in own.values())
        for name, value in load_file(file / "model.safetensors").items():
            part = value.chunk(accelerator.num_processes)[accelerator.process_index]
            assert torch.equal(own[name], part.to(own[name].dtype)), name
        del model, own
    return peaks_by_way


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wide")
    torch.manual_seed(0)
    state = Wide().state_dict()
    for name, dtype in (("full", torch.float32), ("half", torch.bfloat16)):
        (folder / name).mkdir()
        save_file({n: v.to(dtype) for n, v in state.items()}, folder / name / "model.safetensors")
    return folder


@pytest.mark.skipif(not Path("/proc/self/pagemap").exists(), reason="needs Linux: it tells what is mapped")
@pytest.mark.parametrize("size", [long_run_param(2), 4])
def test_a_process_holds_its_share_and_little_more(wide: Path, ranks: RankServer, size: int) -> None:
    """E11: at most 1.2 of one rank's share, whatever way the weights come."""
    for peaks_of_rank in ranks(size, peaks, str(wide), env={"MALLOC_MMAP_THRESHOLD_": 65536}):
        for how, (most, share_of_it) in peaks_of_rank.items():
            assert most <= 1.2 * share_of_it, (how, most, share_of_it)
