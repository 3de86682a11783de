"""Train LoRA adapters on a base of 4 bits, and compare with a plain loop.

    pip install bitsandbytes peft transformers
    python examples/quantized_lora.py
    accelerate launch --num_processes 2 examples/quantized_lora.py

A small Llama with random weights is quantized to nf4 while it is read, gets adapters of peft, and learns a
sequence of words. The base stays frozen; only the adapters have gradients and optimizer state.
"""

import argparse
from pathlib import Path

import torch
from peft import LoraConfig, get_peft_model
from torch import nn
from torch.utils.data import DataLoader, TensorDataset
from transformers import LlamaConfig, LlamaForCausalLM

from accelerate import Accelerator, DataLoaderConfiguration, PartialState, init_empty_weights
from accelerate.utils import BnbQuantizationConfig, load_and_quantize_model, set_seed

WORDS, LENGTH, BATCH, STEPS = 64, 16, 8, 20
CONFIG = LlamaConfig(
    vocab_size=WORDS,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    max_position_embeddings=LENGTH,
)
BITS = BnbQuantizationConfig(
    load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype="fp32", torch_dtype="fp32"
)


def load(folder: Path, device: torch.device) -> nn.Module:
    """The quantized base with fresh adapters."""
    with init_empty_weights():
        model = LlamaForCausalLM(CONFIG)
    model = load_and_quantize_model(model, BITS, weights_location=folder, device_map={"": str(device)})
    set_seed(1)
    return get_peft_model(model, LoraConfig(r=8, target_modules=["q_proj", "v_proj", "up_proj"]))


def make_loader() -> DataLoader[tuple[torch.Tensor, ...]]:
    random = torch.Generator().manual_seed(0)
    start, step = (torch.randint(1, 8, (BATCH * STEPS, 1), generator=random) for _ in range(2))
    return DataLoader(TensorDataset((start + step * torch.arange(LENGTH)) % WORDS), batch_size=BATCH)


def trained(model: nn.Module) -> list[torch.nn.Parameter]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def train_plainly(model: nn.Module, device: torch.device) -> list[float]:
    """The losses of a loop without this package's training."""
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    losses = []
    for (ids,) in make_loader():
        loss = model(input_ids=ids.to(device), labels=ids.to(device)).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description="Train LoRA adapters on a base of 4 bits.")
    parser.add_argument("--folder", type=Path, default=Path("runs/quantized_lora"), help="for the base")
    folder = parser.parse_args().folder
    state = PartialState()
    with state.main_process_first():
        if state.is_main_process:
            torch.manual_seed(0)
            LlamaForCausalLM(CONFIG).save_pretrained(folder)
    expected = train_plainly(load(folder, state.device), state.device)
    model = load(folder, state.device)

    accelerator = Accelerator(dataloader_config=DataLoaderConfiguration(split_batches=True))
    optimizer = torch.optim.AdamW(trained(model), lr=1e-2)
    model, optimizer, loader = accelerator.prepare(model, optimizer, make_loader())
    losses = []
    for (ids,) in loader:
        loss = model(input_ids=ids, labels=ids).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.mean_loss(loss.detach()).item())

    total = sum(each.numel() for each in LlamaForCausalLM(CONFIG).parameters())
    accelerator.print(f"{sum(each.numel() for each in trained(model))} parameters train on a base of {total}")
    accelerator.print(f"loss {losses[0]:.4f} -> {losses[-1]:.4f}, of a plain loop {expected[-1]:.4f}")
    difference = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
    accelerator.print(f"largest difference {difference:.1e}")
    accelerator.end_training()


if __name__ == "__main__":
    main()
