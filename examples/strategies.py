"""Train one decoder under the strategy that is named, and compare its losses with a plain loop.

    accelerate launch --num_processes 2 examples/strategies.py fsdp
    accelerate launch --num_processes 4 examples/strategies.py tensor_parallel

``ddp``, the default, ``bf16_hook`` (DDP that sends gradients in bfloat16), ``fsdp`` (FSDP2),
``tensor_parallel``, ``context_parallel``, ``ulysses``, ``pipeline`` and ``deepspeed`` (ZeRO-2, by
``configs/zero2.json``).
The loop is the same under each. The main process prints the losses beside those of a plain loop on one
process, and how many of the weights each process holds.
"""

import argparse
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset

from accelerate import (
    Accelerator,
    DataLoaderConfiguration,
    DeepSpeedPlugin,
    DistributedDataParallelKwargs,
    FullyShardedDataParallelPlugin,
    ParallelismConfig,
)
from accelerate.utils import DDPCommunicationHookType, TorchTensorParallelConfig, gather_object

WORDS, WIDTH, HEADS, LENGTH, ROWS, STEPS = 64, 64, 4, 16, 8, 20


class Block(nn.Module):
    """Causal attention and a small network, each beside the residual stream."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q_proj, self.k_proj, self.v_proj, self.o_proj = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(rows, length, WIDTH) -> the same; length and heads may be this process's part of them."""
        rows, length, _ = x.shape
        y = self.first(x)
        q, k, v = (
            layer(y).view(rows, length, -1, WIDTH // HEADS).transpose(1, 2)
            for layer in (self.q_proj, self.k_proj, self.v_proj)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.o_proj(y.transpose(1, 2).reshape(rows, length, -1))
        return x + self.down(F.gelu(self.up(self.second(x))))


class Decoder(nn.Module):
    """Words (rows, length) and their positions to logits (rows, length, WORDS)."""

    _no_split_modules = ("Block",)  # what FSDP shards as a unit, and a pipeline does not cut

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(WORDS, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(4))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, input_ids: torch.Tensor, position_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) + self.position(position_ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def make_samples() -> Dataset[dict[str, torch.Tensor]]:
    """Words that go up in steps, and the next word of each: ``shift_labels`` are not shifted again."""
    random = torch.Generator().manual_seed(0)
    start, step = (torch.randint(1, 8, (ROWS * STEPS, 1), generator=random) for _ in range(2))
    words = (start + step * torch.arange(LENGTH + 1)) % WORDS
    positions = torch.arange(LENGTH)
    rows = [{"input_ids": row[:-1], "position_ids": positions, "shift_labels": row[1:]} for row in words]
    return cast("Dataset[dict[str, torch.Tensor]]", rows)  # a list has what a map-style dataset needs


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"])
    return F.cross_entropy(logits.flatten(0, 1).float(), batch["shift_labels"].flatten())


def train_plainly() -> list[float]:
    """The losses of a loop without this package."""
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    losses = []
    for batch in DataLoader(make_samples(), batch_size=ROWS):
        loss = loss_of(model, batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def make_accelerator(strategy: str) -> Accelerator:
    """Ask for a strategy over all processes; a configuration file of the launcher can do it, too."""
    # Each batch of ROWS is divided among the processes that read different data.
    options: dict[str, Any] = {"dataloader_config": DataLoaderConfiguration(split_batches=True)}
    size = Accelerator().num_processes
    plan = {f"layers.*.{name}": "colwise" for name in ("q_proj", "k_proj", "v_proj", "up")}
    plan |= {f"layers.*.{name}": "rowwise" for name in ("o_proj", "down")}
    if strategy == "bf16_hook":
        hook = DistributedDataParallelKwargs(comm_hook=DDPCommunicationHookType.BF16)
        options["kwargs_handlers"] = [hook]
    elif strategy == "fsdp":
        options["fsdp_plugin"] = FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap")
    elif strategy == "tensor_parallel":
        handler = TorchTensorParallelConfig(plan=plan)
        options["parallelism_config"] = ParallelismConfig(tp_size=size, tp_handler=handler)
    elif strategy == "context_parallel":
        options["parallelism_config"] = ParallelismConfig(cp_size=size)
    elif strategy == "ulysses":
        options["parallelism_config"] = ParallelismConfig(sp_size=size)
    elif strategy == "pipeline":
        options["parallelism_config"] = ParallelismConfig(pp_size=size)
    elif strategy == "deepspeed":
        # Its file fills "auto" in from what is prepared, and clips no gradients, as the plain loop.
        file = Path(__file__).with_name("configs") / "zero2.json"
        options["deepspeed_plugin"] = DeepSpeedPlugin(hf_ds_config=str(file))
    return Accelerator(**options)


def count_local(tensors: Any) -> int:
    """The number of values that this process holds of some tensors."""
    local = (each.to_local() if isinstance(each, DTensor) else each for each in tensors)
    return sum(each.numel() for each in local if not each.is_meta)


STRATEGIES = (
    *("ddp", "bf16_hook", "fsdp", "tensor_parallel"),
    *("context_parallel", "ulysses", "pipeline", "deepspeed"),
)


def main() -> None:
    parser = argparse.ArgumentParser(description="Train a decoder under a strategy.")
    parser.add_argument("strategy", nargs="?", default="ddp", choices=STRATEGIES)
    accelerator = make_accelerator(parser.parse_args().strategy)

    torch.manual_seed(0)
    model = Decoder()
    total = sum(each.numel() for each in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    loader = DataLoader(make_samples(), batch_size=ROWS)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    losses = []
    for batch in loader:
        # Shards sequences under context parallelism; under Ulysses the loader has done it.
        dims = [1] * len(batch)
        with accelerator.maybe_context_parallel(buffers=list(batch.values()), buffer_seq_dims=dims):
            loss = loss_of(model, batch)
            accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.mean_loss(loss.detach()).item())

    held = gather_object([count_local(model.parameters())])
    if accelerator.is_main_process:
        print(
            f"{accelerator.strategy.name}: each process holds {', '.join(map(str, held))} of {total} weights"
        )
        expected = train_plainly()
        for step in (0, STEPS // 2, STEPS - 1):
            print(f"step {step}: loss {losses[step]:.4f}, of a plain loop {expected[step]:.4f}")
        print(f"largest difference {max(abs(a - b) for a, b in zip(losses, expected, strict=True)):.1e}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
