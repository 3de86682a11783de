"""Memory of a model that is quantized to 4 bits while it is loaded, on the CPU, by bitsandbytes.

16 blocks of two matrices of 2048 x 8192, 0.54 billion weights, in bfloat16 in one file of safetensors. raw is
the arithmetic: half a byte and a scale in float32 for each 64 weights; in the second row one layer in float32
is added. The peak is that without pages of files (RssAnon) beyond what the program had before, over the load.
1.15.0 quantizes on a GPU only, so it has no figure.
"""

from __future__ import annotations

import gc
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks.case import BenchError, Case, Sample, Subject
from benchmarks.cases.big_load import Peak, anonymous
from benchmarks.checkpoints import Queue, room

WIDTH, BLOCKS = 2048, 16
WEIGHTS = BLOCKS * 8 * WIDTH**2
BYTES = WEIGHTS // 2 + WEIGHTS // 64 * 4
LAYER = 4 * WIDTH**2 * 4


def take(subject: Subject, quick: bool) -> dict[str, Sample | str]:
    """One round of both rows."""
    with room() as folder:
        command = [str(subject.python), "-m", __name__, str(folder), "2" if quick else str(BLOCKS)]
        _, text = subject.run(command, timeout=600)
    facts = json.loads(text.splitlines()[-1])
    arithmetic, least = facts["arithmetic"], facts["arithmetic"] + LAYER / 1e6
    held, peak = facts["held"], facts["peak"]
    return {
        "held": Sample(arithmetic, held, held / arithmetic, 0.0, {"process": f"{facts['kept']:.0f} MB"}),
        "peak": Sample(least, peak, peak / least, 0.0),
    }


QUEUE = Queue(take, ("held", "peak"))
CASES = (
    Case(
        "memory of weights in 4 bits, against the arithmetic",
        "MB",
        "ratio",
        1.05,
        QUEUE.measure("held"),
        3,
        1,
    ),
    Case(
        "peak of quantizing to 4 bits, against the weights and one layer",
        "MB",
        "ratio",
        1.0,
        QUEUE.measure("peak"),
        3,
        1,
    ),
)


# --- in the environment of every subject ------------------------------------------------------------------


def main(folder: Path, blocks: int) -> None:
    import torch
    from safetensors.torch import save_file
    from torch import nn

    from accelerate import init_empty_weights
    from accelerate.utils import BnbQuantizationConfig, load_and_quantize_model

    if not Path("/proc/self/status").exists():
        raise BenchError("memory is looked at on Linux only")

    def model() -> Any:
        pairs = ((WIDTH, 4 * WIDTH), (4 * WIDTH, WIDTH))
        return nn.Sequential(*(nn.Linear(*sides, bias=False) for _ in range(blocks) for sides in pairs))

    def bits() -> BnbQuantizationConfig:
        return BnbQuantizationConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", torch_dtype="bf16", skip_modules=[]
        )

    with init_empty_weights():
        empty = model()
    shapes = {name: value.shape for name, value in empty.state_dict().items()}
    files = [folder / f"model-{number}.safetensors" for number in range(blocks)]
    table: dict[str, str] = {}
    for number, file in enumerate(files):
        names = list(shapes)[2 * number : 2 * number + 2]
        save_file({name: torch.randn(shapes[name], dtype=torch.bfloat16) for name in names}, file)
        table |= dict.fromkeys(names, file.name)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": table}))
    # What the libraries hold by themselves, and the pools of torch, are there before.
    (folder / "small").mkdir()
    small = nn.Sequential(nn.Linear(WIDTH, 64, bias=False))
    save_file(small.state_dict(), folder / "small" / "model.safetensors")
    load_and_quantize_model(small.to("meta"), bits(), folder / "small", device_map={"": "cpu"})
    gc.collect()
    with Peak() as peak:
        loaded = load_and_quantize_model(empty, bits(), folder, device_map={"": "cpu"})
    held = sum(value.nbytes for value in loaded.state_dict().values())
    facts = {
        "arithmetic": BYTES * blocks / BLOCKS / 1e6,
        "held": held / 1e6,
        "peak": peak.grown * 1e3,
        "kept": (anonymous() - peak.before) * 1e3,
    }
    print(json.dumps(facts))


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
