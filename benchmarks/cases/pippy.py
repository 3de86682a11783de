"""``prepare_pippy`` on two processes, against the plain model on one of them, over the same batch.

Each process has one thread. With eight chunks on two stages, each stage waits for one chunk in nine, so half
the time of the plain model is out of reach: 9/16 is the least. What comes above is the sending. The public
package fails here: it fills a batch up before it cuts it, to chunks of other lengths than it has traced.
"""

from __future__ import annotations

import sys

from benchmarks.case import Case, Sample, Subject, alternate, leave, report, worker

PROCESSES, CHUNKS, ROWS = 2, 8, 32


def measure(subject: Subject, quick: bool) -> Sample:
    return worker(subject, __name__, "4" if quick else "16", processes=PROCESSES)


CASES = (
    Case(
        "forward of a transformer by `prepare_pippy` on two processes, against one process (9/16 is ideal)",
        "us",
        "ratio",
        None,
        measure,
    ),
)


def main(blocks: int) -> None:
    import torch
    import torch.distributed as dist
    from torch import nn

    from accelerate import PartialState, prepare_pippy

    class Transformer(nn.Module):
        """Values (batch, length, width) to values of the same shape."""

        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList(
                nn.TransformerEncoderLayer(256, 4, 1024, batch_first=True) for _ in range(8)
            )

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x)
            return x

    state = PartialState(cpu=True)
    if state.num_processes != PROCESSES:
        raise SystemExit(f"a world of {state.num_processes} instead of {PROCESSES}")
    torch.manual_seed(0)
    plain = Transformer().eval()
    spread = Transformer().eval()
    spread.load_state_dict(plain.state_dict())
    batch = torch.randn(ROWS, 64, 256)
    prepare_pippy(spread, split_points=["layers.4"], example_args=(batch,), num_chunks=CHUNKS)

    def raw() -> None:
        if state.is_main_process:
            with torch.no_grad():
                plain(batch)
        dist.barrier()

    def prepared() -> None:
        with torch.no_grad():
            spread(batch)
        dist.barrier()

    with torch.no_grad():
        found, expected = spread(batch), plain(batch)
    if state.is_last_process:
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-4)
    sample = alternate(raw, prepared, "ratio", blocks=blocks, steps=1, before=dist.barrier)
    if state.is_main_process:
        report(sample)
    dist.barrier()
    leave()


if __name__ == "__main__":
    main(int(sys.argv[1]))
