"""Models and texts for tests of processes that share sequences, and one loop for all of them."""

from __future__ import annotations

import warnings
from collections.abc import Generator
from contextlib import contextmanager
from importlib import import_module
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from accelerate.utils import TorchContextParallelConfig
from tests.support.parity import Decoder, decoder

WORDS, LENGTH, ROWS = 32, 16, 4
IGNORED = -100
# Loaders give parts; by default `maybe_context_parallel` makes parts of whole sequences.
CUT: dict[str, Any] = {"cp_size": 2, "cp_handler": TorchContextParallelConfig(cut=True)}
RING: dict[str, Any] = {
    "cp_size": 2,
    "cp_handler": TorchContextParallelConfig(cp_comm_strategy="alltoall", cut=True),
}
SDPA: dict[str, Any] = {"attn_implementation": "sdpa"}
Numbers = tuple[list[float], list[float], dict[str, torch.Tensor]]
Jobs = list[tuple[str, dict[str, Any], int, int, bool]]


def llama(**more: Any) -> Any:
    """Two layers, four heads of queries over two of keys, no dropout."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"vocab_size": WORDS, "num_key_value_heads": 2, **sizes, **SDPA, **more}
    return LlamaForCausalLM(LlamaConfig(**config))


def gpt2(**more: Any) -> Any:
    """Two layers with learned positions and tied embeddings, no dropout."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64, "vocab_size": WORDS}
    dropout = {"embd_pdrop": 0.0, "attn_pdrop": 0.0, "resid_pdrop": 0.0}
    config = {**sizes, **dropout, **SDPA, "bos_token_id": 0, "eos_token_id": 0, **more}
    return GPT2LMHeadModel(GPT2Config(**config))


def mistral(**more: Any) -> Any:
    """Attention to a window of five tokens."""
    from transformers import MistralConfig, MistralForCausalLM

    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"vocab_size": WORDS, "num_key_value_heads": 1, "sliding_window": 5, **sizes, **SDPA, **more}
    return MistralForCausalLM(MistralConfig(**config))


def small_decoder() -> Decoder:
    """A block that learns, and a frozen one."""
    return decoder(blocks=2)


MODELS = {"llama": llama, "gpt2": gpt2, "mistral": mistral, "plain": small_decoder}


def adamw(model: nn.Module) -> torch.optim.AdamW:
    """``eps`` keeps rounding from deciding about a step."""
    return torch.optim.AdamW(model.parameters(), lr=0.005, weight_decay=0.01, eps=1e-4)


def texts(steps: int, padded: bool = False, length: int = LENGTH) -> list[dict[str, torch.Tensor]]:
    """Rows with labels for some tokens only: prompts have none, of other lengths in each row.

    Every second batch has them at its very end alone, so that a process has none.
    """
    chance = torch.Generator().manual_seed(7)
    rows = []
    for row in range(steps * ROWS):
        tokens = torch.randint(1, WORDS, (length,), generator=chance)
        labels = tokens.clone()
        prompt = length - 3 + row % 3 if (row // ROWS) % 2 else row % 7
        labels[:prompt] = IGNORED
        found = {"input_ids": tokens, "labels": labels}
        if padded:
            kept = length - row % 5
            found["attention_mask"] = (torch.arange(length) < kept).long()
            labels[kept:] = IGNORED
        rows.append(found)
    return rows


def loss_of(model: Any, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The mean over this process's labels; NaN where it has none."""
    inner = getattr(model, "module", model)
    if not isinstance(inner, Decoder):
        return model(**batch).loss
    logits = model(batch["input_ids"], batch.get("position_ids"))
    return nn.functional.cross_entropy(logits.flatten(0, 1), targets(batch).flatten())


def loss_of_buffers(accelerator: Any, model: Any, ids: torch.Tensor, labels: torch.Tensor) -> Any:
    """The loss and its number of labels, as the guide of 1.x shards whole sequences; then backward."""
    shift = nn.functional.pad(labels, (0, 1), value=IGNORED)[:, 1:].contiguous()
    with accelerator.maybe_context_parallel(buffers=[ids, shift], buffer_seq_dims=[1, 1]):
        logits = model(ids).logits
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), shift.flatten())
        count = (shift != IGNORED).sum()
        accelerator.backward(loss, num_items=count)
    return loss, count


def targets(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """What is learned at each token."""
    if "shift_labels" in batch:
        return batch["shift_labels"]
    return nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)


def alone(kind: str, steps: int, window: int, padded: bool = False) -> Numbers:
    """Losses, norms and weights of a plain loop: each window is one mean over its tokens."""
    model = MODELS[kind]()
    optimizer = adamw(model)
    loader = DataLoader(texts(steps, padded), batch_size=ROWS)  # type: ignore[arg-type]
    losses, norms = [], []
    waiting: list[tuple[torch.Tensor, int]] = []
    for batch in loader:
        loss = loss_of(model, batch)
        losses.append(loss.item())
        waiting.append((loss, int((targets(batch) != IGNORED).sum())))
        if len(waiting) == window:
            tokens = sum(count for _, count in waiting)
            torch.stack([loss * count / tokens for loss, count in waiting]).sum().backward()
            norms.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
            waiting = []
    return losses, norms, {name: value.detach().clone() for name, value in model.state_dict().items()}


def shared(
    kind: str, sizes: dict[str, Any], steps: int, window: int, padded: bool = False, *, cpu: bool = True
) -> Numbers:
    """The same on a mesh, through the prepared loader."""
    from accelerate import Accelerator, ParallelismConfig

    config = ParallelismConfig(**sizes)
    accelerator = Accelerator(cpu=cpu, gradient_accumulation_steps=window, parallelism_config=config)
    model = MODELS[kind]()
    optimizer = adamw(model)
    rows = ROWS // config.data_parallel_size
    loader = DataLoader(texts(steps, padded), batch_size=rows)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses, norms = [], []
    in_block = sizes.get("cp_size", 1) > 1 and "cp_handler" not in sizes
    for batch in loader:
        with accelerator.accumulate(model):
            if in_block:
                loss, count = loss_of_buffers(accelerator, model, batch["input_ids"], batch["labels"])
            else:
                count = (targets(batch) != IGNORED).sum()
                loss = loss_of(model, batch)
                accelerator.backward(loss, num_items=count)
            if accelerator.sync_gradients:
                norms.append(accelerator.clip_grad_norm_(model.parameters(), 0.5).item())
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.mean_loss(loss, count).item())
    state = accelerator.get_state_dict(model)
    return losses, norms, {name: value.detach().clone() for name, value in (state or {}).items()}


@contextmanager
def ring_alone() -> Generator[None]:
    """Refuse the all-gather that gives the numbers of a ring where no kernel can make one."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", "cp_comm_strategy='alltoall' has no effect on an attention call")
        yield


def shared_all(jobs: Jobs, cpu: bool = True) -> list[Numbers]:
    """Several trainings in one start of processes."""
    with ring_alone():
        return [shared(*job, cpu=cpu) for job in jobs]


def close(ours: Numbers, theirs: Numbers, within: float = 1e-5) -> None:
    """Losses, norms and weights are equal within an absolute distance."""
    for one, other in zip(ours[:2], theirs[:2], strict=True):
        torch.testing.assert_close(torch.tensor(one), torch.tensor(other), rtol=0, atol=within)
    assert ours[2].keys() == theirs[2].keys()
    for name, value in theirs[2].items():
        torch.testing.assert_close(ours[2][name], value, rtol=0, atol=within)


def same(jobs: Jobs, found: list[list[Numbers]]) -> None:
    """All processes have the numbers of one; the first has the weights."""
    for job, *numbers in zip(jobs, *found, strict=True):
        kind, _, steps, window, padded = job
        one = alone(kind, steps, window, padded)
        for mine in numbers:
            close((*mine[:2], numbers[0][2]), one)


def ring_options() -> dict[str, Any]:
    """Return torch's options of context parallelism, which belong to the user."""
    return vars(import_module("torch.distributed.tensor.experimental._attention")._cp_options)
