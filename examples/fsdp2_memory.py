"""Train one decoder under DDP and under FSDP2: what each process holds at the end of a backward, and at most.

    accelerate launch --num_processes 2 examples/fsdp2_memory.py

DDP holds whole weights, gradients and optimizer state on each process; FSDP2 a shard of each, and all-gathers
one layer at a time. An accelerator's peak is printed too. The losses are those of a plain loop.
"""

import torch
from strategies import ROWS, Decoder, loss_of, make_samples, train_plainly
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader

from accelerate import Accelerator, DataLoaderConfiguration, FullyShardedDataParallelPlugin
from accelerate.utils import gather_object


def local_bytes(tensors: list[torch.Tensor]) -> int:
    local = [each.to_local() if isinstance(each, DTensor) else each for each in tensors]
    return sum(each.numel() * each.element_size() for each in local)


def peak_bytes(device: torch.device) -> int:
    """The most memory that tensors took since the last call; 0 on a CPU, where torch does not count."""
    if device.type == "cpu":
        return 0
    module = torch.get_device_module(device.type)
    peak = module.max_memory_allocated()
    module.reset_peak_memory_stats()
    return peak


def train(plugin: FullyShardedDataParallelPlugin | None) -> None:
    loading = DataLoaderConfiguration(split_batches=True)  # each batch is divided among the processes
    accelerator = Accelerator(fsdp_plugin=plugin, dataloader_config=loading)
    torch.manual_seed(0)
    model = Decoder()
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(make_samples(), batch_size=ROWS)
    )
    losses, held, peak = [], {}, 0
    for batch in loader:
        peak_bytes(accelerator.device)
        loss = loss_of(model, batch)
        accelerator.backward(loss)
        gradients = [each.grad for each in model.parameters() if each.grad is not None]
        optimizer.step()
        state = [value for values in optimizer.state.values() for value in values.values()]
        held = {
            "weights": local_bytes(list(model.parameters())),
            "gradients": local_bytes(gradients),
            "optimizer state": local_bytes([value for value in state if isinstance(value, torch.Tensor)]),
        }
        optimizer.zero_grad()
        peak = max(peak, peak_bytes(accelerator.device))
        losses.append(accelerator.mean_loss(loss.detach()).item())

    every_rank = gather_object([(held, peak)])
    difference = max(abs(a - b) for a, b in zip(losses, train_plainly(), strict=True))
    if accelerator.is_main_process:
        print(f"{accelerator.strategy.name}: largest difference from a plain loop {difference:.1e}")
        for rank, (parts, most) in enumerate(every_rank):
            text = ", ".join(f"{name} {size / 1e3:.0f} KB" for name, size in parts.items())
            print(f"process {rank}: {text}" + (f", peak {most / 1e6:.1f} MB" if most else ""))
    accelerator.free_memory()


def main() -> None:
    train(None)
    train(FullyShardedDataParallelPlugin(auto_wrap_policy="transformer_based_wrap"))


if __name__ == "__main__":
    main()
