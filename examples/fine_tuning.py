"""Fine-tune a transformers model on texts, in a loop of your own, and compare with a plain loop.

    pip install transformers
    python examples/fine_tuning.py
    accelerate launch --num_processes 2 examples/fine_tuning.py

A small BERT with random weights, saved to a folder and loaded from there as one from the hub would be, learns
to tell lines of Python from lines of its help texts. Each optimizer step takes the same 32 lines on any
number of processes, so the losses are those of the plain loop in torch.
"""

import argparse
import inspect
import pydoc_data.topics
import textwrap
from pathlib import Path

import torch
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset
from transformers import (
    AutoModelForSequenceClassification,
    BertConfig,
    PreTrainedModel,
    get_linear_schedule_with_warmup,
)

from accelerate import Accelerator, DataLoaderConfiguration

BATCH, LENGTH, STEPS, TEST = 32, 48, 24, 90


def read_lines() -> tuple[TensorDataset, TensorDataset]:
    """Lines of code (1) and of prose (0) as letters, in turn: those to learn from, and those to test."""
    code = [line.strip() for line in inspect.getsource(inspect).splitlines()]
    prose = [line.strip() for line in pydoc_data.topics.topics["specialnames"].splitlines()]
    kinds = [prose, code]
    kinds = [[line for line in lines if len(line) > 12 and line.isascii()] for lines in kinds]
    count = min(map(len, kinds))
    lines = [(lines[number], label) for number in range(count) for label, lines in enumerate(kinds)]
    rows = [list(textwrap.shorten(line, LENGTH).encode().ljust(LENGTH, b"\0")) for line, _ in lines]
    ids, labels = torch.tensor(rows), torch.tensor([label for _, label in lines])
    return TensorDataset(ids[TEST:], labels[TEST:]), TensorDataset(ids[:TEST], labels[:TEST])


def save_base(folder: Path) -> None:
    """What a download would give: a configuration and weights."""
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=128,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    AutoModelForSequenceClassification.from_config(config).save_pretrained(folder)


def load(folder: Path) -> tuple[PreTrainedModel, torch.optim.AdamW, LambdaLR]:
    model = AutoModelForSequenceClassification.from_pretrained(folder)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    return model, optimizer, get_linear_schedule_with_warmup(optimizer, 4, STEPS)


def batch_of(ids: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"input_ids": ids, "attention_mask": (ids != 0).long(), "labels": labels}


def train_plainly(folder: Path, data: TensorDataset) -> list[float]:
    """The losses of a loop without this package."""
    model, optimizer, schedule = load(folder)
    losses = []
    for _, (ids, labels) in zip(range(STEPS), DataLoader(data, batch_size=BATCH), strict=False):
        loss = model(**batch_of(ids, labels)).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Fine-tune a small BERT on lines of text.")
    parser.add_argument("--folder", type=Path, default=Path("runs/fine_tuning"), help="for the models")
    args = parser.parse_args()
    # Each batch of the loader is divided among the processes.
    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    learn, test = read_lines()
    base, trained = args.folder / "base", args.folder / "trained"
    with accelerator.main_process_first():
        if accelerator.is_main_process:
            save_base(base)
    expected = train_plainly(base, learn)
    model, optimizer, schedule = load(base)
    loader, test_loader = DataLoader(learn, batch_size=BATCH), DataLoader(test, batch_size=BATCH)
    model, optimizer, schedule, loader, test_loader = accelerator.prepare(
        model, optimizer, schedule, loader, test_loader
    )

    model.train()
    losses = []
    for _, (ids, labels) in zip(range(STEPS), loader, strict=False):
        loss = model(**batch_of(ids, labels)).loss
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        losses.append(accelerator.mean_loss(loss.detach()).item())

    model.eval()
    right = counted = 0
    with torch.inference_mode():
        for ids, labels in test_loader:
            guesses = model(**batch_of(ids, labels)).logits.argmax(dim=-1)
            guesses, labels = accelerator.gather_for_metrics((guesses, labels))
            right, counted = right + int((guesses == labels).sum()), counted + len(labels)

    for step in (0, STEPS // 2, STEPS - 1):
        accelerator.print(f"step {step}: loss {losses[step]:.4f}, of a plain loop {expected[step]:.4f}")
    accelerator.print(f"{right} of {counted} lines of the test are right")
    difference = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    accelerator.print(f"largest difference {difference:.1e}")
    weights = accelerator.get_state_dict(model)
    accelerator.unwrap_model(model).save_pretrained(
        trained, is_main_process=accelerator.is_main_process, state_dict=weights
    )
    accelerator.print(f"saved to {trained}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
