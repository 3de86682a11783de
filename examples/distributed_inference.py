"""Continue many texts on several processes: each takes its part of them, and the order stays.

    pip install transformers
    python examples/distributed_inference.py
    accelerate launch --num_processes 2 examples/distributed_inference.py

A GPT-2 with random weights, which need no download, continues each text. Every process has the whole model
and takes some of the texts. Those of a batch are padded on the left, so that what is generated follows
the text.
"""

from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel

from accelerate import PartialState
from accelerate.utils import gather_object

TEXTS = [f"{number} green bottles hanging on the wall" for number in range(1, 12)]
BATCH, NEW = 4, 8  # texts of a process at once, letters to add
PAD = 0


def make_model() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=128,
        n_positions=64,
        n_embd=32,
        n_layer=2,
        n_head=2,
        bos_token_id=1,
        eos_token_id=1,
        initializer_range=0.2,
    )
    return GPT2LMHeadModel(config).eval()


def encode(texts: list[str]) -> dict[str, torch.Tensor]:
    """Letters of the texts as numbers, padded on the left, (texts, longest)."""
    longest = max(map(len, texts))
    rows = [[PAD] * (longest - len(text)) + list(text.encode("ascii")) for text in texts]
    ids = torch.tensor(rows)
    return {"input_ids": ids, "attention_mask": (ids != PAD).long()}


def generate(model: Any, texts: list[str]) -> list[list[int]]:
    """The letters that are added to each text, as numbers."""
    batch = {name: value.to(model.device) for name, value in encode(texts).items()}
    out = model.generate(**batch, max_new_tokens=NEW, do_sample=False, pad_token_id=PAD, eos_token_id=None)
    return out[:, batch["input_ids"].shape[1] :].tolist()


def main() -> None:
    state = PartialState()
    model = make_model().to(state.device)

    results: list[list[int]] = []
    with state.split_between_processes(TEXTS) as own_texts:
        for begin in range(0, len(own_texts), BATCH):
            results += generate(model, own_texts[begin : begin + BATCH])

    every_result = gather_object(results)  # the list of process 0, then that of process 1, ...
    if state.is_main_process:
        print(f"{state.num_processes} processes continued {len(every_result)} texts")
        for text, letters in zip(TEXTS, every_result, strict=True):
            print(f"{text}: {' '.join(map(str, letters))}")
    state.destroy_process_group()


if __name__ == "__main__":
    main()
