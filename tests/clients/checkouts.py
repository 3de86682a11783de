"""Launch scripts of a checkout of transformers or diffusers offline: tiny models, rows, pictures, metrics.

A run has a folder of its own. It is the working directory, where ``evaluate.load`` looks for a metric first.
"""

from __future__ import annotations

import json
import os
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from tests.clients import adopters
from tests.support.environment import ROOT, clean

TRANSFORMERS = Path(os.environ.get("TRANSFORMERS_EXAMPLES") or "/nowhere")
DIFFUSERS = Path(os.environ.get("DIFFUSERS_EXAMPLES") or "/nowhere")
LAUNCH = ["-m", "accelerate.commands.launch", "--cpu", "--mixed_precision", "no", "--num_machines", "1"]
LABELS = ["O", "B-X", "I-X"]


def launch_script(python: Path | str, size: int, script: Path, arguments: Sequence[str], folder: Path) -> str:
    """Run a script on ``size`` processes in ``folder``; the result is what it printed."""
    command = [str(python), *LAUNCH, "--num_processes", str(size), "-m", "tests.clients.probe", str(script)]
    env = clean({"HOME": folder, "HF_HOME": folder / "cache", "PYTHONPATH": ROOT})
    done = subprocess.run(
        [*command, *arguments], env=env, cwd=folder, capture_output=True, text=True, timeout=250
    )
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-6000:]
    return done.stdout + done.stderr


def load_weights(folder: Path) -> dict[str, torch.Tensor]:
    """All weights that lie in a folder of a model or of a pipeline, by file and name."""
    from safetensors.torch import load_file

    files = {str(file.relative_to(folder)): file for file in folder.rglob("*.safetensors")}
    weights = {
        f"{where} {name}": value
        for where, file in sorted(files.items())
        if not where.startswith(("checkpoint", "step_"))
        for name, value in load_file(file).items()
    }
    assert weights, f"{folder} has no weights"
    assert all(value.isfinite().all() for value in weights.values())
    return weights


def optimizer_steps(checkpoint: Path) -> int:
    """The number of steps that the optimizer of a checkpoint has made."""
    states = torch.load(checkpoint / "optimizer.bin", weights_only=True)["state"]
    (steps,) = {int(state["step"]) for state in states.values()}
    return steps


# --- rows and pictures


def _words(first: int, count: int) -> str:
    return " ".join(f"w{(first * first + j) % 50}" for j in range(count))


def write_lines(folder: Path) -> list[str]:
    """Lines of text, to train and to validate on."""
    (folder / "text.txt").write_text("\n".join(_words(i, 8) for i in range(40)) + "\n")
    return ["--train_file", str(folder / "text.txt"), "--validation_file", str(folder / "text.txt")]


def _write_rows(folder: Path, rows: list[dict[str, Any]], *, field: bool = False) -> list[str]:
    lines = json.dumps({"data": rows}) if field else "\n".join(map(json.dumps, rows))
    (folder / "rows.json").write_text(lines)
    return ["--train_file", str(folder / "rows.json"), "--validation_file", str(folder / "rows.json")]


def write_endings(folder: Path) -> list[str]:
    """Sentences with four endings each."""
    endings = [{f"ending{k}": _words(i + k, 2) for k in range(4)} for i in range(21)]
    rows = [
        {"sent1": _words(i, 3), "sent2": _words(i + 9, 1), **endings[i], "label": i % 4} for i in range(21)
    ]
    return _write_rows(folder, rows)


def write_pairs(folder: Path) -> list[str]:
    """Pairs of sentences of varying length, with a class."""
    rows = [
        {"sentence1": _words(i, 2 + i % 4), "sentence2": _words(i + 5, 3), "label": i % 3} for i in range(21)
    ]
    return _write_rows(folder, rows)


def write_tags(folder: Path) -> list[str]:
    """Sentences of varying length, with a tag for each word."""
    rows = []
    for i in range(21):
        words = _words(i, 3 + i % 4).split()
        rows.append({"tokens": words, "ner_tags": [LABELS[(i + j) % 3] for j in range(len(words))]})
    return _write_rows(folder, rows)


def write_questions(folder: Path) -> list[str]:
    """Questions, each with a context of which a word is the answer."""
    rows = []
    for i in range(21):
        context = _words(i, 8)
        before, answer = context.split()[: 4 + i % 4], context.split()[4 + i % 4]
        answers = {"text": [answer], "answer_start": [len(" ".join(before)) + 1]}
        rows.append({"id": str(i), "question": _words(i + 3, 2), "context": context, "answers": answers})
    return _write_rows(folder, rows, field=True)


def write_translations(folder: Path) -> list[str]:
    """Sentences of varying length in two languages."""
    rows = [{"translation": {"en": _words(i, 2 + i % 4), "de": _words(i + 7, 3 + i % 2)}} for i in range(21)]
    return _write_rows(folder, rows)


def write_summaries(folder: Path) -> list[str]:
    """Sentences and their first words, and empty rules by which nltk splits sentences."""
    rules = folder / "nltk_data" / "tokenizers" / "punkt_tab" / "english"
    rules.mkdir(parents=True)
    (rules.parent.with_name("punkt")).mkdir()
    for name in ("collocations.tab", "sent_starters.txt", "abbrev_types.txt", "ortho_context.tab"):
        (rules / name).touch()
    rows = [{"text": _words(i, 4 + i % 4), "summary": _words(i, 2)} for i in range(21)]
    return _write_rows(folder, rows)


def write_pictures(folder: Path, *, captions: bool = False) -> None:
    """Sixteen pictures of 16 by 16 pixels; with captions as diffusers' scripts read them."""
    import numpy
    from PIL import Image

    folder.mkdir(parents=True)
    for i in range(16):
        values = (numpy.arange(16 * 16 * 3) * (i + 3) % 251).astype("uint8").reshape(16, 16, 3)
        Image.fromarray(values).save(folder / f"{i:02}.png")
    if captions:
        rows = [{"file_name": f"{i:02}.png", "text": "abcdef"[: i % 6 + 1]} for i in range(16)]
        (folder / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))


def write_classes(folder: Path) -> list[str]:
    """A folder of pictures for each of two classes."""
    for name in ("first", "second"):
        write_pictures(folder / "classes" / name)
    return ["--train_dir", str(folder / "classes"), "--validation_dir", str(folder / "classes")]


# --- models


def save_words(folder: Path) -> None:
    """Save the tokenizer of words, with a mask."""
    words = adopters.tokenizer()
    words.add_special_tokens({"mask_token": "w59"})
    words.model_max_length = 16
    words.save_pretrained(folder)


def save_llama(folder: Path) -> None:
    """Save the causal language model of the other jobs."""
    save_words(folder)
    adopters.llama().save_pretrained(folder)


def save_bert(head: str, labels: int = 2, dropout: float = 0.1) -> Callable[[Path], None]:
    """Return what saves a BERT of two layers with this head."""

    def save(folder: Path) -> None:
        import transformers

        config_class: Any = transformers.BertConfig
        config = config_class(
            vocab_size=adopters.VOCABULARY, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
            intermediate_size=64, max_position_embeddings=16, num_labels=labels,
            hidden_dropout_prob=dropout, attention_probs_dropout_prob=dropout,
        )  # fmt: skip
        save_words(folder)
        torch.manual_seed(0)
        getattr(transformers, f"BertFor{head}")(config).save_pretrained(folder)

    return save


def save_t5(folder: Path) -> None:
    """Save an encoder and a decoder of a layer each."""
    from transformers import T5Config, T5ForConditionalGeneration

    save_words(folder)
    torch.manual_seed(0)
    config_class: Any = T5Config
    config = config_class(
        vocab_size=adopters.VOCABULARY, d_model=32, d_kv=16, d_ff=64, num_layers=1, num_heads=2,
        decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    T5ForConditionalGeneration(config).save_pretrained(folder)


def save_vit(folder: Path) -> None:
    """Save a vision transformer of two layers, and its image processor."""
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

    torch.manual_seed(0)
    config_class: Any = ViTConfig
    config = config_class(
        image_size=16, patch_size=8, hidden_size=32, num_hidden_layers=2, num_attention_heads=2,
        intermediate_size=64, num_labels=2,
    )  # fmt: skip
    ViTForImageClassification(config).save_pretrained(folder)
    ViTImageProcessor(size={"height": 16, "width": 16}).save_pretrained(folder)


def save_stable_diffusion(folder: Path) -> None:
    """Save a Stable Diffusion pipeline of 30,000 parameters, whose tokens are letters."""
    from diffusers import AutoencoderKL, DDPMScheduler, StableDiffusionPipeline, UNet2DConditionModel
    from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

    letters = [chr(code) for code in range(ord("a"), ord("z") + 1)]
    tokens = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    tokenizer: Any = CLIPTokenizer(
        vocab={token: i for i, token in enumerate(tokens)}, merges=[], model_max_length=16
    )
    torch.manual_seed(0)
    text_encoder: Any = CLIPTextModel(
        CLIPTextConfig(
            vocab_size=len(tokens), hidden_size=16, intermediate_size=32, num_hidden_layers=1,
            num_attention_heads=2, max_position_embeddings=16, bos_token_id=0, eos_token_id=1, pad_token_id=1,
        )
    )  # fmt: skip
    vae: Any = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) * 2,
        block_out_channels=(8, 8), norm_num_groups=4,
    )  # fmt: skip
    unet: Any = UNet2DConditionModel(
        sample_size=8, layers_per_block=1, block_out_channels=(8, 16), cross_attention_dim=16,
        attention_head_dim=4, norm_num_groups=4, down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    scheduler: Any = DDPMScheduler(steps_offset=1, clip_sample=False)
    StableDiffusionPipeline(
        vae=vae, text_encoder=text_encoder, tokenizer=tokenizer, unet=unet, scheduler=scheduler,
        safety_checker=None, feature_extractor=None, requires_safety_checker=False,
    ).save_pretrained(folder)  # type: ignore[arg-type] # fmt: skip


def save_unet(folder: Path) -> None:
    """Save the configuration of a network for noise without text."""
    from diffusers import UNet2DModel

    UNet2DModel(
        sample_size=16, layers_per_block=1, block_out_channels=(8, 16), norm_num_groups=4,
        down_block_types=("DownBlock2D", "AttnDownBlock2D"), up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
    ).save_config(folder)  # fmt: skip


# --- metrics

_METRIC = """
import datasets
import evaluate
from datasets import Value


class Equal(evaluate.Metric):
    def _info(self):
        features = datasets.Features({{"predictions": {predictions}, "references": {references}}})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references, **options):
        equal = [prediction == reference for prediction, reference in zip(predictions, references)]
        return dict.fromkeys({results}, sum(equal) / len(equal))
"""
_ANSWER = '{"id": Value("string"), "prediction_text": Value("string")}'
_ANSWERS = '{"id": Value("string"), "answers": {"text": [Value("string")], "answer_start": [Value("int32")]}}'
_METRICS = {
    "accuracy": ('Value("int32")', 'Value("int32")', ["accuracy"]),
    "seqeval": (
        '[Value("string")]',
        '[Value("string")]',
        ["overall_precision", "overall_recall", "overall_f1", "overall_accuracy"],
    ),
    "squad": (_ANSWER, _ANSWERS, ["exact_match", "f1"]),
    "rouge": ('Value("string")', 'Value("string")', ["rouge1", "rougeLsum"]),
    "sacrebleu": ('Value("string")', '[Value("string")]', ["score"]),
}


def write_metrics(folder: Path) -> None:
    """Write stand-ins of the metrics that scripts load, which tell how many predictions are right."""
    for name, (predictions, references, results) in _METRICS.items():
        (folder / name).mkdir()
        text = _METRIC.format(predictions=predictions, references=references, results=results)
        (folder / name / f"{name}.py").write_text(text)


@dataclass(frozen=True)
class CheckoutScript:
    """A script of a checkout, and its input.

    Attributes:
        save_model: saves the model it starts from in a folder.
        write_data: writes its data in a folder, and returns the arguments that name them.
        arguments: further ones.
    """

    save_model: Callable[[Path], None]
    write_data: Callable[[Path], list[str]]
    arguments: Sequence[str] = ()
