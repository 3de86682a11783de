"""Jobs of programs that use a package named accelerate, each tiny: no hub, no network, no file of data.

    python -m tests.clients.adopters OUT.json FOLDER JOB...       one process, or one rank of several

A job imports its program itself, so that each runs where only that one is installed. It gives losses, and the
weights in the end.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.clients.probe import main

VOCABULARY = 64
WORDS = [f"w{i}" for i in range(15)]


def weights(model: nn.Module) -> list[float]:
    """A sum of each tensor's values, weighted by where they are."""
    tensors = [p.detach().double().flatten() for p in model.parameters()]
    return [(t * torch.linspace(0.5, 1.5, t.numel(), dtype=t.dtype)).sum().item() for t in tensors]


def network() -> nn.Sequential:
    """Two layers, the same weights at every call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))


def samples(count: int = 24) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Vectors and their classes, by arithmetic."""
    wave = torch.sin(torch.arange(count * 6, dtype=torch.float32).view(count, 6) * 0.7)
    return [(x, torch.tensor(i % 3)) for i, x in enumerate(wave)]


def llama() -> Any:
    """A causal language model of two layers of width 32."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=32, intermediate_size=64, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=2, max_position_embeddings=64, pad_token_id=0,
            bos_token_id=1, eos_token_id=2, use_cache=False,
        )
    )  # fmt: skip


def tokenizer() -> Any:
    """A tokenizer whose tokens are words, made in memory."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(VOCABULARY - 4))]
    made = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=made, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def fastai(folder: Path) -> Any:
    """A Learner in its distributed context. On one process fastai does not use accelerate."""
    from fastai import distributed
    from fastai.basics import SGD, CrossEntropyLossFlat, DataLoader, DataLoaders, Learner
    from fastai.callback.core import Callback

    def broadcast(self: Any, values: Any, rank: int) -> list[int]:
        order = torch.tensor(values)
        torch.distributed.broadcast(order, rank)
        return order.tolist()

    class Losses(Callback):
        def __init__(self) -> None:
            self.seen: list[float] = []

        def after_batch(self) -> None:
            self.seen.append(self.learn.loss.item())

    # fastai moves the order of the samples to a CUDA device first.
    distributed.DistributedDL._broadcast = broadcast
    random.seed(1)
    train = DataLoader(samples(), bs=4, shuffle=True, device="cpu")
    dls = DataLoaders(train, DataLoader(samples(8), bs=4, device="cpu"), device="cpu")
    losses = Losses()
    learner = Learner(dls, network(), loss_func=CrossEntropyLossFlat(), lr=0.1, opt_func=SGD, cbs=losses)
    learner.path = folder
    with learner.no_bar(), learner.no_logging(), learner.distrib_ctx(sync_bn=False, cpu=True):
        learner.fit(2)
        learner.save("kept")
    fresh = learner.load("kept")
    return {"loss": losses.seen, "valid": list(learner.recorder.values[-1]), "weights": weights(fresh.model)}


def lightly(folder: Path) -> Any:
    """A contrastive loss over the samples of all processes, in a loop as its documentation has it."""
    from lightly.loss import NTXentLoss
    from lightly.models.modules import SimCLRProjectionHead
    from lightly.utils.dist import world_size
    from torch.utils.data import DataLoader

    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), SimCLRProjectionHead(8, 8, 4, batch_norm=False))
    optimizer: Any = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    loader: Any = DataLoader(samples(), batch_size=8 // accelerator.num_processes)  # type: ignore[arg-type]
    criterion = NTXentLoss(gather_distributed=world_size() > 1)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for _ in range(2):
        for views, _labels in loader:
            loss = criterion(model(views + 0.1), model(views - 0.1))
            optimizer.zero_grad()
            accelerator.backward(loss)
            optimizer.step()
            losses.append(accelerator.gather(loss.detach()[None]).mean().item())
    return {"loss": losses, "weights": weights(accelerator.unwrap_model(model))}


def ema_pytorch(folder: Path) -> Any:
    """An average of the weights, of the unwrapped model, saved with the state and loaded."""
    from ema_pytorch import EMA
    from torch.utils.data import DataLoader

    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model: Any = network()
    average = EMA(model, beta=0.9, update_every=1, update_after_step=1)
    optimizer: Any = torch.optim.Adam(model.parameters(), lr=0.01)
    loader: Any = DataLoader(samples(), batch_size=2)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    accelerator.register_for_checkpointing(average)
    for step, (inputs, labels) in enumerate(loader):
        optimizer.zero_grad()
        accelerator.backward(nn.functional.cross_entropy(model(inputs), labels))
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        average.update()
        if step == 2:
            accelerator.save_state(str(folder / "state"))
            kept = weights(average.ema_model)
    ended = weights(average.ema_model)
    accelerator.load_state(str(folder / "state"))
    assert weights(average.ema_model) == kept
    return {"kept": kept, "weights": ended}


def pytorch_accelerated(folder: Path) -> Any:
    """Its Trainer: shuffled epochs, windows of two, a schedule, evaluation, and a checkpoint of its own."""
    from pytorch_accelerated import Trainer

    def trainer() -> Any:
        model = network()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
        return Trainer(model, nn.CrossEntropyLoss(), optimizer, callbacks=())

    def schedule(optimizer: Any) -> Any:
        return torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=8)

    plain = {"num_workers": 0, "pin_memory": False}
    given: dict[str, Any] = {
        "per_device_batch_size": 3, "gradient_accumulation_steps": 2, "gradient_clip_value": 1.0,
        "train_dataloader_kwargs": plain, "eval_dataloader_kwargs": plain, "create_scheduler_fn": schedule,
    }  # fmt: skip
    folder.mkdir(exist_ok=True)
    first = trainer()
    first.train(samples(20), 2, samples(7), **given)
    first.save_checkpoint(str(folder / "checkpoint.pt"))
    history = first.run_history
    names = ("train_loss_epoch", "eval_loss_epoch")
    again = trainer()
    again.load_checkpoint(str(folder / "checkpoint.pt"), load_optimizer=False, load_scheduler=False)
    return {
        "size": first.run_config.num_processes,
        **{name: [float(value) for value in history.get_metric_values(name)] for name in names},
        "weights": weights(first.get_model()),
        "loaded": weights(again.get_model()),
    }


def pytorch_custom_utils(folder: Path) -> Any:
    """Its optimizer with warm-up, its forwarding wrapper, and its contexts of a window."""
    from pytorch_custom_utils import OptimizerWithWarmupSchedule, auto_unwrap_model
    from pytorch_custom_utils.accelerate_utils import model_forward_contexts
    from torch.utils.data import DataLoader

    from accelerate import Accelerator

    @auto_unwrap_model()
    class Trainer:
        def __init__(self) -> None:
            self.accelerator = Accelerator(cpu=True)
            model = network()
            model.features = 6
            optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
            self.optimizer = OptimizerWithWarmupSchedule(
                self.accelerator, optimizer, torch.optim.lr_scheduler.StepLR,
                {"step_size": 2, "gamma": 0.5}, warmup_steps=4, max_grad_norm=0.5,
            )  # fmt: skip
            self.model, self.loader = self.accelerator.prepare(
                model,
                DataLoader(samples(), batch_size=2),  # type: ignore[arg-type]
            )

    trainer = Trainer()
    model: Any = trainer.model
    batches, losses = iter(trainer.loader), []
    for _ in range(3):
        for context in model_forward_contexts(trainer.accelerator, model.parent, grad_accum_steps=2):
            inputs, labels = next(batches)
            with context():
                loss = nn.functional.cross_entropy(model(inputs), labels)
                trainer.accelerator.backward(loss / 2)
            losses.append(trainer.accelerator.gather(loss.detach()[None]).mean().item())
        trainer.optimizer.step()
        trainer.optimizer.zero_grad()
    inner: Any = trainer.optimizer.optimizer
    rates = [group["lr"] for group in inner.param_groups]
    return {"loss": losses, "lr": rates, "features": model.features, "weights": weights(model.child)}


def denoising_diffusion_pytorch(folder: Path) -> Any:
    """Its Trainer on a folder of pictures: split batches, an average on the main process, samples, a save."""
    import numpy
    from denoising_diffusion_pytorch import GaussianDiffusion, Trainer, Unet
    from PIL import Image

    from accelerate import PartialState

    state = PartialState(cpu=True)
    pictures = folder / "pictures"
    with state.main_process_first():
        if state.is_main_process:
            pictures.mkdir(parents=True)
            for i in range(100):
                values = (numpy.arange(16 * 16 * 3) * (i + 3) % 251).astype("uint8").reshape(16, 16, 3)
                Image.fromarray(values).save(pictures / f"{i:03}.png")
    torch.manual_seed(0)
    unet = Unet(dim=8, dim_mults=(1, 2), flash_attn=False)
    diffusion = GaussianDiffusion(unet, image_size=16, timesteps=8, sampling_timesteps=2)
    trainer = Trainer(
        diffusion, str(pictures), train_batch_size=16, train_lr=1e-3, train_num_steps=4, ema_update_every=1,
        save_and_sample_every=2, num_samples=1, results_folder=str(folder / "results"), calculate_fid=False,
        augment_horizontal_flip=False,
    )  # fmt: skip
    trainer.train()
    trainer.accelerator.wait_for_everyone()
    result: dict[str, Any] = {"weights": weights(trainer.accelerator.unwrap_model(trainer.model))}
    if state.is_main_process:
        result["average"] = weights(trainer.ema.ema_model)
    if state.num_processes == 1:  # 1.15 cannot load on several CPU processes: torch does not know "cpu:0"
        trainer.load(1)
        result["loaded"] = weights(trainer.accelerator.unwrap_model(trainer.model))
    kept = torch.load(folder / "results" / "model-2.pt", weights_only=True)
    return result | {"step": kept["step"], "kept": [v.double().sum().item() for v in kept["model"].values()]}


def diffusers(folder: Path) -> Any:
    """The loop of its training scripts: windows, hooks of the save, an average, a save by one process."""
    from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
    from diffusers.optimization import get_scheduler
    from diffusers.training_utils import EMAModel
    from torch.utils.data import DataLoader

    from accelerate import Accelerator
    from accelerate.utils import ProjectConfiguration, set_seed

    accelerator = Accelerator(
        cpu=True,
        gradient_accumulation_steps=2,
        project_config=ProjectConfiguration(project_dir=str(folder)),
    )
    set_seed(0)
    unet: Any = UNet2DModel(
        sample_size=8, in_channels=1, out_channels=1, layers_per_block=1, block_out_channels=(8, 8),
        norm_num_groups=4, down_block_types=("DownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    average = EMAModel(unet.parameters(), decay=0.9, model_cls=UNet2DModel, model_config=unet.config)
    noise_scheduler: Any = DDPMScheduler(num_train_timesteps=20)

    def save(models: list[Any], found: list[Any], output: str) -> None:
        if accelerator.is_main_process:
            for model in models:
                own: Any = accelerator.unwrap_model(model)
                own.save_pretrained(f"{output}/unet")
                found.pop()

    def load(models: list[Any], found: str) -> None:
        for _ in range(len(models)):
            model = models.pop()
            loaded: Any = UNet2DModel.from_pretrained(found, subfolder="unet")
            model.register_to_config(**loaded.config)
            model.load_state_dict(loaded.state_dict())

    accelerator.register_save_state_pre_hook(save)
    accelerator.register_load_state_pre_hook(load)
    optimizer: Any = torch.optim.AdamW(unet.parameters(), lr=1e-3)
    pictures = [torch.sin(torch.arange(64.0).view(1, 8, 8) * (i + 1) * 0.1) for i in range(24)]
    loader: Any = DataLoader(pictures, batch_size=2)  # type: ignore[arg-type]
    schedule: Any = get_scheduler("cosine", optimizer, num_warmup_steps=2, num_training_steps=20)
    unet, optimizer, loader, schedule = accelerator.prepare(unet, optimizer, loader, schedule)
    losses, step = [], 0
    for batch in loader:
        noise = torch.cos(batch * 3)
        times = torch.arange(batch.shape[0]) * 7 + step
        with accelerator.accumulate(unet):
            noisy = noise_scheduler.add_noise(batch, noise, times % 20)
            loss = nn.functional.mse_loss(unet(noisy, times % 20).sample, noise)
            losses.append(accelerator.gather(loss.repeat(2)).mean().item())
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(unet.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            average.step(unet.parameters())
            step += 1
            if step == 2 and accelerator.is_main_process:
                accelerator.save_state(str(folder / "checkpoint-2"))
    accelerator.wait_for_everyone()
    ended = weights(accelerator.unwrap_model(unet))
    accelerator.load_state(str(folder / "checkpoint-2"))
    model = accelerator.unwrap_model(unet)
    made: Any = DDPMPipeline(unet=model, scheduler=noise_scheduler)
    made.set_progress_bar_config(disable=True)
    made.save_pretrained(folder / f"pipeline-{accelerator.process_index}")
    pictures = made(
        num_inference_steps=2, generator=torch.Generator().manual_seed(0), output_type="np"
    ).images
    return {
        "loss": losses, "lr": schedule.get_last_lr(), "weights": ended, "loaded": weights(model),
        "average": [float(p.double().sum()) for p in average.shadow_params],
        "pictures": float(pictures.sum()),
    }  # fmt: skip


def peft(folder: Path) -> Any:
    """Adapters in a plain loop; they are gathered, saved and loaded by peft's own functions."""
    from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
    from torch.utils.data import DataLoader

    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    base = llama()
    torch.manual_seed(1)
    model: Any = get_peft_model(base, LoraConfig(r=2, target_modules=["q_proj", "v_proj"]))
    optimizer: Any = torch.optim.AdamW((p for p in model.parameters() if p.requires_grad), lr=0.05)
    rows = [(torch.arange(8) * (i + 2)) % VOCABULARY for i in range(16)]
    loader: Any = DataLoader(rows, batch_size=4 // accelerator.num_processes)  # type: ignore[arg-type]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for words in loader:
        loss = model(input_ids=words, labels=words).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(accelerator.gather(loss.detach()[None]).mean().item())
    unwrapped: Any = accelerator.unwrap_model(model)
    state = get_peft_model_state_dict(unwrapped, state_dict=accelerator.get_state_dict(model))
    place = folder / f"adapter-{accelerator.process_index}"
    unwrapped.save_pretrained(place)
    loaded = PeftModel.from_pretrained(llama(), str(place))
    return {
        "loss": losses,
        "state": {name: value.double().sum().item() for name, value in sorted(state.items())},
        "weights": weights(unwrapped),
        "loaded": weights(loaded),
    }


def lm_eval(folder: Path) -> Any:
    """Likelihoods of choices under a model from a folder; each process answers its part of the requests."""
    import datasets
    from lm_eval import simple_evaluate
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.models.huggingface import HFLM

    from accelerate import PartialState

    place = folder / "model"
    with PartialState(cpu=True).main_process_first():
        if PartialState().is_main_process:
            llama().save_pretrained(place)
            tokenizer().save_pretrained(place)

    def questions(**_: Any) -> Any:
        rows = [
            {
                "text": " ".join(WORDS[(i + j) % 15] for j in range(4)),
                "choices": WORDS[i : i + 3],
                "gold": i % 3,
            }
            for i in range(7)
        ]
        return datasets.DatasetDict({"test": datasets.Dataset.from_list(rows)})

    task = ConfigurableTask(
        config={
            "task": "choices", "custom_dataset": questions, "output_type": "multiple_choice",
            "test_split": "test", "doc_to_text": "{{text}}", "doc_to_choice": "{{choices}}",
            "doc_to_target": "gold", "metric_list": [{"metric": "acc"}],
        }
    )  # fmt: skip
    model: Any = HFLM(pretrained=str(place), device="cpu", batch_size=2, dtype="float32")
    # lm-eval shares requests between GPUs, which it counts; here they are shared between processes.
    model._rank, model._world_size = PartialState().process_index, PartialState().num_processes
    found: Any = simple_evaluate(model, tasks=[task], bootstrap_iters=0, log_samples=True)
    if found is None:
        return {}
    answers = sorted(found["samples"]["choices"], key=lambda sample: sample["doc_id"])
    return {
        "size": model.world_size,
        "accuracy": found["results"]["choices"]["acc,none"],
        "likelihoods": [[float(a[0]) for a in sample["filtered_resps"]] for sample in answers],
    }


def sentence_transformers(folder: Path) -> Any:
    """An embedding model that learns pairs of sentences, negatives of one process and of all."""
    import datasets
    from sentence_transformers import (
        SentenceTransformer,
        SentenceTransformerTrainer,
        SentenceTransformerTrainingArguments,
    )
    from sentence_transformers.losses import MultipleNegativesRankingLoss
    from sentence_transformers.models import Pooling, Transformer
    from transformers import BertConfig, BertModel

    from accelerate import PartialState

    place = folder / "bert"
    with PartialState(cpu=True).main_process_first():
        if PartialState().is_main_process:
            torch.manual_seed(0)
            shape = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
            BertModel(BertConfig(vocab_size=VOCABULARY, intermediate_size=64, **shape)).save_pretrained(place)
            tokenizer().save_pretrained(place)
    sentences = [" ".join(WORDS[i * j % 15] for j in range(1, 6)) for i in range(1, 49)]
    pairs = datasets.Dataset.from_dict({"anchor": sentences[::2], "positive": sentences[1::2]})
    report = {}
    for everywhere in (False, True):
        torch.manual_seed(1)
        model = SentenceTransformer(modules=[Transformer(str(place)), Pooling(32)], device="cpu")
        arguments = SentenceTransformerTrainingArguments(
            str(folder / "out"), per_device_train_batch_size=8 // PartialState().num_processes,
            num_train_epochs=2, logging_steps=1, report_to=[], save_strategy="no", use_cpu=True,
            disable_tqdm=True,
        )  # fmt: skip
        loss = MultipleNegativesRankingLoss(model, gather_across_devices=everywhere)
        trainer = SentenceTransformerTrainer(model, arguments, train_dataset=pairs, loss=loss)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        report[f"everywhere={everywhere}"] = {"loss": losses, "weights": weights(model)}
    return report


_ALL = (
    fastai, lightly, ema_pytorch, pytorch_accelerated, pytorch_custom_utils, denoising_diffusion_pytorch,
    diffusers, peft, lm_eval, sentence_transformers,
)  # fmt: skip
JOBS: dict[str, Callable[[Path], dict[str, Any]]] = {job.__name__: job for job in _ALL}


if __name__ == "__main__":
    main(JOBS)
