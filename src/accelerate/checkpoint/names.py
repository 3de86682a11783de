"""The names of files in a checkpoint folder. They are a public format: other programs read and write them."""

from __future__ import annotations

import re

MODEL_NAME = "pytorch_model"
SAFE_MODEL_NAME = "model"
OPTIMIZER_NAME = "optimizer"
SCHEDULER_NAME = "scheduler"
SAMPLER_NAME = "sampler"
SCALER_NAME = "scaler.pt"
RNG_STATE_NAME = "random_states"
LOADER_NAME = "dl_state_dict"
CUSTOM_NAME = "custom_checkpoint"

WEIGHTS_NAME = f"{MODEL_NAME}.bin"
WEIGHTS_PATTERN_NAME = "pytorch_model{suffix}.bin"
WEIGHTS_INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
SAFE_WEIGHTS_NAME = f"{SAFE_MODEL_NAME}.safetensors"
SAFE_WEIGHTS_PATTERN_NAME = "model{suffix}.safetensors"
SAFE_WEIGHTS_INDEX_NAME = f"{SAFE_WEIGHTS_NAME}.index.json"
PROFILE_PATTERN_NAME = "profile_{suffix}.json"

SHARDED_MODEL_NAME = "pytorch_model_fsdp"
SHARDED_INDEX = ".metadata"

MANIFEST_NAME = "manifest.json"
AUTOMATIC_FOLDER = "checkpoints"
AUTOMATIC_NAME = "checkpoint"


def indexed_name(stem: str, index: int, extension: str) -> str:
    """Return a file name with its index: ``optimizer.bin`` for 0, ``optimizer_1.bin`` for 1."""
    return f"{stem}{extension}" if index == 0 else f"{stem}_{index}{extension}"


def model_file(index: int, *, safe: bool) -> str:
    """Return the file of the model of that index."""
    return (
        indexed_name(SAFE_MODEL_NAME, index, ".safetensors")
        if safe
        else indexed_name(MODEL_NAME, index, ".bin")
    )


def optimizer_file(index: int) -> str:
    """Return the file of the optimizer of that index."""
    return indexed_name(OPTIMIZER_NAME, index, ".bin")


def sharded_folder(category: str, index: int) -> str:
    """Return the folder of the sharded model or optimizer of that index."""
    stem = {"models": SHARDED_MODEL_NAME, "optimizers": OPTIMIZER_NAME}[category]
    return f"{stem}_{index}"


def gathered_file(index: int) -> str:
    """Return the file in which the public package keeps a sharded model that it has gathered."""
    return indexed_name(SHARDED_MODEL_NAME, index, ".bin")


def rank_file(index: int, rank: int) -> str:
    """Return the file in which the public package keeps one rank's part of a sharded model."""
    return indexed_name(SHARDED_MODEL_NAME, index, f"_rank{rank}.bin")


def shard_file(rank: int) -> str:
    """Return the file of one rank in the folder of a sharded state."""
    return f"__{rank}_0.distcp"


def scheduler_file(index: int) -> str:
    """Return the file of the scheduler of that index."""
    return indexed_name(SCHEDULER_NAME, index, ".bin")


def loader_file(index: int, rank: int = 0) -> str:
    """Return the file of a stateful loader; rank 0 has the public name, other ranks add theirs."""
    stem = indexed_name(LOADER_NAME, index, "")
    return f"{stem}.bin" if rank == 0 else f"{stem}_rank{rank}.bin"


def rng_file(rank: int) -> str:
    """Return the file of one rank's random states."""
    return f"{RNG_STATE_NAME}_{rank}.pkl"


def custom_file(index: int) -> str:
    """Return the file of the registered object of that index."""
    return f"{CUSTOM_NAME}_{index}.pkl"


# Sharded, DeepSpeed and Megatron-LM checkpoints add files and folders named after the model or optimizer.
_PART = re.compile(
    rf"{SAFE_MODEL_NAME}(_\d+)?\.safetensors|{MODEL_NAME}\w*(\.bin)?"
    rf"|({OPTIMIZER_NAME}|{SCHEDULER_NAME}|{SAMPLER_NAME})(_\d+)?(_rank\d+)?(\.bin)?"
    rf"|{LOADER_NAME}(_\d+)?(_rank\d+)?\.bin|{re.escape(SCALER_NAME)}"
    rf"|{RNG_STATE_NAME}_\d+\.pkl|{CUSTOM_NAME}_\d+\.pkl|{re.escape(MANIFEST_NAME)}"
)


def is_checkpoint_name(name: str) -> bool:
    """Return True for names of a checkpoint's files and folders, False for the user's own."""
    return _PART.fullmatch(name) is not None
