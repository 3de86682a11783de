"""Run training scripts of checkouts of transformers and diffusers on one process and on two, and resume them.

    TRANSFORMERS_EXAMPLES=PATH/examples/pytorch DIFFUSERS_EXAMPLES=PATH/examples make test-clients

No package has these scripts, so nothing is recorded. On one process the weights are compared with a run
under the public package where ``make record-clients`` has made its environment. On two, a shuffled epoch has
another order than there.

Of transformers' ten, run_semantic_segmentation_no_trainer.py is not run: it reads id2label.json from the hub.
"""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
import torch

from tests.clients import checkouts
from tests.clients.checkouts import CheckoutScript, launch_script, load_weights, optimizer_steps
from tests.clients.probe import declare_torchvision_operators
from tests.clients.record import ADOPTERS_PEER

pytestmark = pytest.mark.timeout(900)

_LENGTHS = ["--max_source_length", "8", "--max_target_length", "8", "--num_beams", "1"]
TRANSFORMERS = {
    "language-modeling/run_clm_no_trainer.py": CheckoutScript(
        checkouts.save_llama, checkouts.write_lines, ["--block_size", "8"]
    ),
    # Masks and dropout draw in another order under 1.15, which reads a batch ahead: docs/coming.md.
    "language-modeling/run_mlm_no_trainer.py": CheckoutScript(
        checkouts.save_bert("MaskedLM", dropout=0), checkouts.write_lines, ["--max_seq_length", "8"]
    ),
    "multiple-choice/run_swag_no_trainer.py": CheckoutScript(
        checkouts.save_bert("MultipleChoice"), checkouts.write_endings, ["--max_seq_length", "16"]
    ),
    "question-answering/run_qa_no_trainer.py": CheckoutScript(
        checkouts.save_bert("QuestionAnswering"),
        checkouts.write_questions,
        ["--max_seq_length", "16", "--doc_stride", "2"],
    ),
    "text-classification/run_glue_no_trainer.py": CheckoutScript(
        checkouts.save_bert("SequenceClassification", 3), checkouts.write_pairs, ["--max_length", "16"]
    ),
    "token-classification/run_ner_no_trainer.py": CheckoutScript(
        checkouts.save_bert("TokenClassification", 3), checkouts.write_tags, ["--max_length", "16"]
    ),
    "summarization/run_summarization_no_trainer.py": CheckoutScript(
        checkouts.save_t5,
        checkouts.write_summaries,
        _LENGTHS,
    ),
    "translation/run_translation_no_trainer.py": CheckoutScript(
        checkouts.save_t5,
        checkouts.write_translations,
        ["--source_lang", "en", "--target_lang", "de", *_LENGTHS],
    ),
    "image-classification/run_image_classification_no_trainer.py": CheckoutScript(
        checkouts.save_vit, checkouts.write_classes
    ),
}
DIFFUSERS = [
    "text_to_image/train_text_to_image.py",
    "text_to_image/train_text_to_image_lora.py",
    "dreambooth/train_dreambooth.py",
    "unconditional_image_generation/train_unconditional.py",
]


@pytest.fixture(autouse=True)
def _torchvision() -> None:
    declare_torchvision_operators()


def train_transformers(python: Path | str, size: int, name: str, folder: Path) -> dict[str, torch.Tensor]:
    """Train six steps, then the last two again from a checkpoint: the weights of both runs."""
    script = TRANSFORMERS[name]
    folder.mkdir()
    script.save_model(folder / "start")
    checkouts.write_metrics(folder)
    arguments = [
        "--model_name_or_path", str(folder / "start"), *script.write_data(folder), *script.arguments,
        "--per_device_train_batch_size", "2", "--per_device_eval_batch_size", "2", "--max_train_steps", "6",
        "--learning_rate", "1e-3", "--lr_scheduler_type", "constant", "--checkpointing_steps", "2",
        "--seed", "0",
    ]  # fmt: skip
    path = checkouts.TRANSFORMERS / name
    launch_script(python, size, path, [*arguments, "--output_dir", "whole"], folder)
    resumed = [*arguments, "--output_dir", "resumed", "--resume_from_checkpoint", "whole/step_4"]
    assert "Resumed from checkpoint: whole/step_4" in launch_script(python, size, path, resumed, folder)
    assert [step.name for step in (folder / "resumed").glob("step_*")] == ["step_6"]
    assert optimizer_steps(folder / "resumed" / "step_6") == 6
    return {
        f"{run} {key}": value
        for run in ("whole", "resumed")
        for key, value in load_weights(folder / run).items()
    }


@pytest.mark.skipif(not checkouts.TRANSFORMERS.is_dir(), reason="TRANSFORMERS_EXAMPLES names no folder")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers_script_trains_and_resumes(name: str, size: int, tmp_path: Path) -> None:
    own = train_transformers(sys.executable, size, name, tmp_path / "own")
    start = load_weights(tmp_path / "own" / "start")
    assert any(not torch.equal(own[f"whole {key}"], value) for key, value in start.items())
    for key in start:
        assert torch.equal(own[f"whole {key}"], own[f"resumed {key}"]), f"{key} differs after resuming"
    if size == 1 and ADOPTERS_PEER.exists():
        peer = train_transformers(ADOPTERS_PEER, 1, name, tmp_path / "peer")
        whole = [key for key in own if key.startswith("whole")]
        torch.testing.assert_close(
            [own[key] for key in whole], [peer[key] for key in whole], rtol=0, atol=1e-5
        )


def diffusers_arguments(name: str, folder: Path) -> list[str]:
    """Write the model and the pictures of a script in ``folder``; return its arguments."""
    pictures = folder / "pictures"
    arguments = [
        "--output_dir", "out", "--train_batch_size", "4", "--resolution", "16", "--learning_rate", "1e-3",
        "--lr_warmup_steps", "0", "--checkpointing_steps", "2",
    ]  # fmt: skip
    if "unconditional" in name:
        checkouts.write_pictures(pictures)
        checkouts.save_unet(folder / "start")
        return [
            *arguments, "--model_config_name_or_path", "start", "--train_data_dir", "pictures", "--use_ema",
            "--num_epochs", "2", "--eval_batch_size", "1", "--ddpm_num_steps", "20",
            "--ddpm_num_inference_steps", "2",
        ]  # fmt: skip
    checkouts.save_stable_diffusion(folder / "start")
    arguments += ["--pretrained_model_name_or_path", "start", "--seed", "0", "--max_train_steps", "6"]
    if "dreambooth" in name:
        checkouts.write_pictures(pictures)
        prompt = ["--instance_prompt", "abc", "--train_text_encoder"]
        return [*arguments, "--instance_data_dir", "pictures", *prompt]
    checkouts.write_pictures(pictures, captions=True)
    return [
        *arguments,
        "--train_data_dir",
        "pictures",
        *(["--rank", "2"] if "lora" in name else ["--use_ema"]),
    ]


def last_checkpoint(folder: Path) -> Path:
    return max(folder.glob("checkpoint-*"), key=lambda at: int(at.name.split("-")[1]))


@pytest.mark.skipif(not checkouts.DIFFUSERS.is_dir(), reason="DIFFUSERS_EXAMPLES names no folder")
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", DIFFUSERS)
def test_diffusers_script_trains_and_resumes(name: str, size: int, tmp_path: Path) -> None:
    """On two processes the main process alone calls ``save_state``, so the other's random states are new.

    The checkpoint lies at the end of an epoch, since the scripts begin an epoch anew; only
    train_unconditional.py skips the batches before.
    """
    path, own = checkouts.DIFFUSERS / name, tmp_path / "own"
    own.mkdir()
    arguments = diffusers_arguments(name, own)
    launch_script(sys.executable, size, path, arguments, own)
    whole, steps = load_weights(own / "out"), 8 // size if "unconditional" in name else 6
    at = 2 if "unconditional" in name else 4
    assert last_checkpoint(own / "out").name == f"checkpoint-{steps}"
    for later in range(at + 2, steps + 2, 2):
        shutil.rmtree(own / "out" / f"checkpoint-{later}")
    printed = launch_script(
        sys.executable, size, path, [*arguments, "--resume_from_checkpoint", "latest"], own
    )
    assert f"Resuming from checkpoint checkpoint-{at}" in printed
    assert last_checkpoint(own / "out").name == f"checkpoint-{steps}"
    assert optimizer_steps(last_checkpoint(own / "out")) == steps
    resumed = load_weights(own / "out")
    if size > 1:
        return
    for key, value in whole.items():
        assert torch.equal(value, resumed[key]), f"{key} differs after resuming"
    if ADOPTERS_PEER.exists():
        peer = tmp_path / "peer"
        peer.mkdir()
        launch_script(ADOPTERS_PEER, 1, path, diffusers_arguments(name, peer), peer)
        torch.testing.assert_close(whole, load_weights(peer / "out"), rtol=0, atol=1e-5)
