"""Find the largest batch that fits into memory, and give memory back.

    python examples/memory.py
    accelerate launch --num_processes 2 examples/memory.py

So that it runs on any machine, the memory of each process is pretended to be small; the last one has least.
All processes end with the same batch size. On a real device ``pretend`` is not needed: the device itself
raises the error.
"""

import gc

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from accelerate import Accelerator, find_executable_batch_size
from accelerate.utils import release_memory, set_seed

WIDTH = 512


def pretend(accelerator, activations: torch.Tensor) -> None:
    """Fails as a device does when the activations of a batch exceed this process's memory."""
    memory = 400_000 if accelerator.is_last_process else 600_000
    if activations.nbytes > memory:
        raise torch.OutOfMemoryError("CUDA out of memory. (pretended)")


def bytes_of_tensors() -> int:
    """Memory of all tensors that Python can still reach."""
    gc.collect()
    alive = [item for item in gc.get_objects() if issubclass(type(item), torch.Tensor)]
    return sum({tensor.data_ptr(): tensor.untyped_storage().nbytes() for tensor in alive}.values())


def main() -> None:
    accelerator = Accelerator()
    set_seed(0)
    pixels, labels = load_digits(return_X_y=True)
    dataset = TensorDataset(torch.tensor(pixels, dtype=torch.float32) / 16, torch.tensor(labels))
    model = nn.Sequential(nn.Linear(64, WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10))
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    model, optimizer = accelerator.prepare(model, optimizer)
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=256)
    def largest(batch_size: int) -> int:
        """One pass over one batch. Nothing is exchanged in it, so that a process may fail alone."""
        tried.append(batch_size)
        images, labels = (column.to(accelerator.device) for column in dataset[:batch_size])
        with accelerator.no_sync(model):
            pretend(accelerator, model[:2](images))
            F.cross_entropy(model(images), labels).backward()
        optimizer.zero_grad()
        return batch_size

    size = largest()
    accelerator.print(f"tried {' '.join(map(str, tried))}")
    sizes = accelerator.gather(torch.tensor([size], device=accelerator.device)).tolist()
    accelerator.print(f"batch size of each process: {sizes}")

    loader = accelerator.prepare(DataLoader(dataset, size, shuffle=True, drop_last=True))
    loss = torch.zeros(())
    for _ in range(3):
        for images, labels in loader:
            loss = F.cross_entropy(model(images), labels)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
    accelerator.print(f"trained with it to a loss of {loss.item():.3f}")

    before = bytes_of_tensors()
    accelerator.free_memory()  # the accelerator's own references
    model, optimizer, loader, loss = release_memory(model, optimizer, loader, loss)
    freed = before - bytes_of_tensors()
    accelerator.print(f"tensors: {before / 1024:.0f} KB, of which release_memory freed {freed / 1024:.0f} KB")
    accelerator.end_training()


if __name__ == "__main__":
    main()
