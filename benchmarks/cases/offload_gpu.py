"""A model four times larger than the memory that it may use of an accelerator, its weights in host memory.

48 residual blocks of two matrices, fp16, 6.4 GB; the process may use a quarter of that on the device. raw is
the time in which the bytes of the weights cross from pinned memory to the device in copies of 128 MiB,
measured in the same process, in turn with the forward: a ratio of 1.11 is 0.9 of the bandwidth. A forward is
one of 8 rows, so that nearly nothing is computed and the copies are all that counts.

The second row is a stack as of a diffusion UNet: residual convolutions and attention, 1.0 billion parameters
in fp16, on 64 x 64 latents. It gives the peak of the device's memory over a forward; the target is that of
the talk that showed one under 800 MB.

``python -m benchmarks.gpu`` measures other shares of the memory too.
"""

from __future__ import annotations

import sys
import time

from benchmarks.case import BenchError, Case, Sample, Subject, compare, report, worker

WIDTH, BLOCKS, BASE = 4096, 48, 320
CHUNK = 2**27


def measure(what: str, *more: str):
    def run(subject: Subject, quick: bool) -> Sample:
        return worker(subject, __name__, what, "3" if quick else "7", "4", str(WIDTH), str(BLOCKS), *more)

    return run


CASES = (
    Case("forward of a model 4x the device's memory", "s", "ratio", 1.11, measure("large"), 3, 2),
    Case(
        "peak of a UNet of 1e9 parameters",
        "MB",
        "total",
        800,
        measure("unet", str(BASE)),
        rounds=1,
        peer_rounds=1,
    ),
)


def accelerator():
    """The type of the accelerator and torch's module for it.

    Raises:
        BenchError: there is none.
    """
    import torch

    if not torch.accelerator.is_available():
        raise BenchError("no accelerator")
    kind = torch.accelerator.current_accelerator().type
    return kind, torch.get_device_module(kind)


def stack(width: int, blocks: int):
    """Residual blocks of the same values, which take long to draw; of 6.4 GB with WIDTH and BLOCKS."""
    import copy

    import torch
    from torch import nn

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(width, 2 * width, bias=False, dtype=torch.float16)
            self.down = nn.Linear(2 * width, width, bias=False, dtype=torch.float16)

        def forward(self, x):
            return x + self.down(torch.relu(self.up(x)))

    block = Block()
    for parameter in block.parameters():
        parameter.data.mul_(0.1)  # for the same matrix many times over the default is too large
    return nn.Sequential(*[copy.deepcopy(block) for _ in range(blocks)])


def limit_memory(module, size: int, times: float):
    """Allow the process ``size / times`` bytes of the device; ``times`` 0: fill it up to 95 %.

    Returns:
        What has to be kept for as long as the limit is to hold.
    """
    import torch

    free, total = module.mem_get_info()
    if times:
        module.set_per_process_memory_fraction(min(1.0, size / times / total))
        return None
    return torch.empty(free - total // 20, dtype=torch.uint8, device=torch.accelerator.current_accelerator())


def large(rounds: int, times: float, width: int, blocks: int, trace: str = "") -> Sample:
    """Copies and forwards in turn; ``trace``: the file for a trace of one more forward."""
    import torch

    from accelerate import cpu_offload

    kind, module = accelerator()
    model = stack(width, blocks)
    size = sum(p.nbytes for p in model.parameters())
    chunk = min(CHUNK, size // 8)
    x, first = torch.ones(8, width, dtype=torch.float16), model[:2]
    expected = first(x.float().half())
    _limit = limit_memory(module, size, times)
    cpu_offload(model, torch.device(kind, 0))
    host = torch.empty(chunk, dtype=torch.uint8, pin_memory=True)
    there = torch.empty(chunk, dtype=torch.uint8, device=kind)

    def copies() -> float:
        module.synchronize()
        start = time.perf_counter()
        for _ in range(size // chunk):
            there.copy_(host, non_blocking=True)
        module.synchronize()
        return (time.perf_counter() - start) * size / (size // chunk * chunk)

    def forward() -> float:
        module.synchronize()
        start = time.perf_counter()
        with torch.no_grad():
            y = model(x.to(kind))
        module.synchronize()
        seconds = time.perf_counter() - start
        if not torch.isfinite(y).all():
            raise BenchError("the offloaded model computes something else")
        return seconds

    with torch.no_grad():
        if not torch.allclose(first(x.to(kind)).cpu(), expected, atol=0.1, rtol=0.05):
            raise BenchError("the offloaded model computes something else")
    taken = [(copies(), forward()) for _ in range(rounds + 1)][1:]
    if trace:
        with torch.profiler.profile() as profile:
            forward()
        profile.export_chrome_trace(trace)
    return compare([a for a, _ in taken], [b for _, b in taken], "ratio")


def unet(base: int):
    """Convolutions and attention; 1.0 billion parameters with a base of 320."""
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Resnet(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm, self.again = nn.GroupNorm(32, width), nn.GroupNorm(32, width)
            self.first, self.second = (
                nn.Conv2d(width, width, 3, padding=1),
                nn.Conv2d(width, width, 3, padding=1),
            )

        def forward(self, x):
            y = self.first(F.silu(self.norm(x)))
            return x + self.second(F.silu(self.again(y)))

    class Attention(nn.Module):
        def __init__(self, width: int) -> None:
            super().__init__()
            self.norm, self.qkv, self.out = (
                nn.LayerNorm(width),
                nn.Linear(width, 3 * width),
                nn.Linear(width, width),
            )
            self.up, self.down = nn.Linear(width, 8 * width), nn.Linear(4 * width, width)

        def forward(self, x):
            shape = x.shape
            x = x.flatten(2).transpose(1, 2)
            q, k, v = (t.unflatten(-1, (-1, 64)).transpose(1, 2) for t in self.qkv(self.norm(x)).chunk(3, -1))
            x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
            a, b = self.up(x).chunk(2, -1)
            return (x + self.down(a * F.gelu(b))).transpose(1, 2).reshape(shape)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            widths = [base] * 4 + [2 * base] * 6 + [4 * base] * 16
            self.inp, self.out = nn.Conv2d(4, base, 3, padding=1), nn.Conv2d(4 * base, 4, 3, padding=1)
            self.steps = nn.ModuleList()
            before = base
            for width in widths:
                if width != before:
                    self.steps.append(nn.Conv2d(before, width, 3, stride=2, padding=1))
                self.steps.extend((Resnet(width), Attention(width)))
                before = width

        def forward(self, x):
            x = self.inp(x)
            for step in self.steps:
                x = step(x)
            return self.out(x)

    torch.manual_seed(0)
    return Net().half().eval()


def peak(base: int) -> Sample:
    """The device's memory at its peak over a forward."""
    import torch

    from accelerate import cpu_offload

    kind, module = accelerator()
    model = unet(base)
    size = sum(p.numel() for p in model.parameters())
    if base == BASE and not 0.9e9 < size < 1.1e9:
        raise BenchError(f"{size} parameters are not 1e9")
    x = torch.randn(1, 4, 64 * base // BASE, 64 * base // BASE, dtype=torch.float16)
    cpu_offload(model, torch.device(kind, 0))
    with torch.no_grad():
        model(x.to(kind))
        module.reset_peak_memory_stats()
        y = model(x.to(kind))
    if not torch.isfinite(y).all():
        raise BenchError("the offloaded model computes something else")
    return Sample(2 * size / 2**20, used := module.max_memory_allocated() / 2**20, used, 0.0)


if __name__ == "__main__":
    if sys.argv[1] == "unet":
        report(peak(int(sys.argv[6])))
    else:
        rounds, times, width, blocks = sys.argv[2:6]
        report(large(int(rounds), float(times), int(width), int(blocks), *sys.argv[6:]))
