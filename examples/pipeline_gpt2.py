"""Continue texts by a GPT-2 whose layers are spread over processes, as one process does it.

    pip install transformers
    accelerate launch --num_processes 2 examples/pipeline_gpt2.py
    accelerate launch --num_processes 4 examples/pipeline_gpt2.py

Each process holds some of the layers, and several texts pass through them at once. The GPT-2 has random
weights, which need no download. Each step runs the whole texts: a stage keeps no cache of keys and values.
"""

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from accelerate import PartialState, prepare_pippy
from accelerate.utils import gather_object

TEXTS = ["pipelines", "of stages", "in unison", "on a ring"]  # of one length: nothing is padded
NEW = 8  # letters to add


def make_model() -> Any:
    torch.manual_seed(0)  # the same weights on every process
    config = GPT2Config(
        vocab_size=128,
        n_positions=64,
        n_embd=32,
        n_layer=4,
        n_head=2,
        bos_token_id=1,
        eos_token_id=1,
        initializer_range=0.2,
        use_cache=False,
    )
    return GPT2LMHeadModel(config).eval()


@torch.no_grad()
def extend(model: Any, ids: torch.Tensor) -> torch.Tensor:
    """Add the most probable letters to rows of letters, (texts, length) -> (texts, length + NEW)."""
    for _ in range(NEW):
        logits = model(ids)["logits"]
        ids = torch.cat([ids, logits[:, -1:].argmax(-1)], 1)
    return ids


def main() -> None:
    state = PartialState()
    ids = torch.tensor([list(text.encode("ascii")) for text in TEXTS], device=state.device)
    plain = extend(make_model().to(state.device), ids)

    # Every process needs the logits, to add the same letters.
    model = prepare_pippy(make_model(), example_args=(ids,), num_chunks=2, gather_output=True)
    held = sum(weight.nbytes for weight in model.parameters() if weight.device.type != "meta")
    for rank, size in enumerate(gather_object([held])):
        state.print(f"process {rank} holds {size / 1e3:.0f} KB")
    extended = extend(model, ids)
    for text, row in zip(TEXTS, extended[:, ids.shape[1] :].tolist(), strict=True):
        state.print(f"{text}: {' '.join(map(str, row))}")
    state.print("as by the whole model:", torch.equal(extended, plain))


if __name__ == "__main__":
    main()
