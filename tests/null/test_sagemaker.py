"""Jobs on Amazon SageMaker, with a fake of its SDK: the estimator's arguments, and what is refused."""

from __future__ import annotations

import json
import re
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest

from accelerate.commands.config.config_args import SageMakerConfig, load_config_from_file
from accelerate.core.errors import SettingError, UnknownNameError
from accelerate.utils import prepare_sagemager_args_inputs
from tests.support import launch_plans
from tests.support.command import Finished, accelerate, launch

FILE = """
compute_environment: AMAZON_SAGEMAKER
distributed_type: DATA_PARALLEL
ec2_instance_type: ml.p4d.24xlarge
iam_role_name: trainer
num_machines: 2
mixed_precision: bf16
region: eu-west-1
profile: lab
dynamo_config:
  dynamo_backend: INDUCTOR
"""
# The part of the SDK that is called; it writes down what it was given and which account asks.
FAKE = """
import json, os, sys
class HuggingFace:
    def __init__(self, **given):
        self.given = given
    def fit(self, inputs=None):
        asks = {name: os.environ.get(name) for name in sorted(os.environ) if name.startswith("AWS_")}
        print(json.dumps({"given": self.given, "inputs": inputs, "asks": asks}))
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a script and the file of a job."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train.py").write_text("")
    (tmp_path / "job.yaml").write_text(FILE)
    return tmp_path


def plan(text: str = FILE, *program: str, **flags: Any) -> Any:
    Path("job.yaml").write_text(text)
    request = launch_plans.request(program or ("train.py",), config_file="job.yaml", **flags)
    return launch_plans.plan(request, "sagemaker")


def run(folder: Path, *flags: str, fake: str = FAKE, script_args: tuple[str, ...] = ()) -> Finished:
    """The command with a fake of the SDK in the folder."""
    package = folder / "fakes" / "sagemaker"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "huggingface.py").write_text(fake)
    env = {"PYTHONPATH": str(folder / "fakes")}
    return launch(
        "--config_file", "job.yaml", *flags, path="train.py", script_args=script_args, cwd=folder, env=env
    )


def test_a_job_is_started_with_what_the_file_and_the_flags_say(folder: Path) -> None:
    """The secret reaches the SDK by the environment, and no output."""
    flags = ("--aws_access_key_id", "AKIA", "--aws_secret_access_key", "HUSH")
    result = run(
        folder, *flags, script_args=("--lr", "1e-3", "--epochs=3", "--fast", "true", "--name", "a b")
    )
    assert result.returncode == 0, result.output
    told = json.loads(result.stdout.splitlines()[-1])
    given = told["given"]
    assert given["hyperparameters"] == {"lr": "1e-3", "epochs": 3, "fast": "true", "name": "a b"}
    assert (given["entry_point"], given["source_dir"], given["role"]) == ("train.py", ".", "trainer")
    assert (given["instance_count"], given["instance_type"]) == (2, "ml.p4d.24xlarge")
    assert given["distribution"] == {"smdistributed": {"dataparallel": {"enabled": True}}}
    assert given["environment"] == {
        "ACCELERATE_USE_SAGEMAKER": "true",
        "ACCELERATE_MIXED_PRECISION": "bf16",
        "ACCELERATE_DYNAMO_BACKEND": "INDUCTOR",
        "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": "DATA_PARALLEL",
    }
    assert told["inputs"] is None
    assert told["asks"] == {
        "AWS_ACCESS_KEY_ID": "AKIA",
        "AWS_DEFAULT_REGION": "eu-west-1",
        "AWS_PROFILE": "lab",
        "AWS_SECRET_ACCESS_KEY": "HUSH",
    }
    assert "HUSH" not in result.stderr


def test_a_dry_run_needs_no_sdk_and_shows_no_secret(folder: Path) -> None:
    flags = ("--aws_access_key_id", "AKIA", "--aws_secret_access_key", "HUSH", "--dry_run")
    result = launch("--config_file", "job.yaml", *flags, path="train.py", cwd=folder)
    assert result.returncode == 0, result.output
    assert "ml.p4d.24xlarge" in result.stdout
    assert "AKIA" not in result.output
    assert "HUSH" not in result.output
    told = accelerate("env", "--explain", "--aws_secret_access_key", "HUSH", cwd=folder)
    assert told.returncode == 0, told.output
    assert re.search(r"aws_secret_access_key +\*\*\* +--aws_secret_access_key", told.stdout)
    assert "HUSH" not in told.output
    request = launch_plans.request_of_file(folder / "job.yaml", aws_secret_access_key="HUSH")
    assert "HUSH" not in repr(request)
    assert "HUSH" not in str(request.get("aws_secret_access_key"))


def test_a_missing_or_another_sdk_is_told(folder: Path) -> None:
    result = launch("--config_file", "job.yaml", path="train.py", cwd=folder)
    assert result.returncode == 2
    assert "needs the package 'sagemaker'" in result.stderr
    assert "pip install 'sagemaker<3'" in result.stderr
    result = run(folder, fake="")
    assert result.returncode == 2
    assert "this sagemaker has no Hugging Face estimator" in result.stderr
    assert "pip install 'sagemaker<3'" in result.stderr


def test_tables_of_inputs_and_metrics_and_more_arguments(folder: Path) -> None:
    (folder / "inputs.tsv").write_text(
        "channel_name\tdata_location\ntrain\ts3://b/train\neval\ts3://b/eval\n"
    )
    (folder / "metrics.tsv").write_text("metric_name\tmetric_regex\nloss\tloss=([0-9.]+)\n")
    more = "sagemaker_inputs_file: inputs.tsv\nsagemaker_metrics_file: metrics.tsv\n"
    more += "additional_args: {volume_size: 9, py_version: py312}\n"
    found = plan(FILE + more)
    assert found.inputs == {"train": "s3://b/train", "eval": "s3://b/eval"}
    assert found.estimator["metric_definitions"] == [{"Name": "loss", "Regex": "loss=([0-9.]+)"}]
    assert (found.estimator["volume_size"], found.estimator["py_version"]) == (9, "py312")
    (folder / "inputs.tsv").write_text("channel_name,data_location\ntrain,s3://b/train\n")
    with pytest.raises(SettingError, match=r"inputs.tsv is not a table of channel_name and data_location"):
        plan(FILE + more)
    (folder / "inputs.tsv").unlink()
    with pytest.raises(SettingError, match=r"inputs.tsv cannot be read"):
        plan(FILE + more)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["data.txt"], "has no name"),
        (["--fast"], "--fast of the script has no value"),
        (["--fast", "--lr", "1"], "--fast of the script has no value"),
        (["--lr", "1", "--lr=2"], "lr is given twice"),
        (["--lr", "1", "2"], "'2' of the script has no name"),
    ],
)
def test_arguments_that_a_table_cannot_hold_are_refused(
    folder: Path, arguments: list[str], words: str
) -> None:
    """F9: none is dropped or changed in silence."""
    with pytest.raises(SettingError, match=words):
        plan(FILE, "train.py", *arguments)


def test_values_have_the_type_that_they_look_like(folder: Path) -> None:
    arguments = ("--a", "-1", "--b=-2.5", "--c", "False", "--d", "1a", "-e", "")
    typed = plan(FILE, "train.py", *arguments).estimator["hyperparameters"]
    assert typed == {"a": -1, "b": -2.5, "c": False, "d": "1a", "e": ""}
    assert type(typed["a"]) is int


@pytest.mark.parametrize("word", ["1.10", "007", "1_000", "5e12345", "1e-4", "true", "+1", "nan"])
def test_a_script_gets_the_words_that_were_typed(folder: Path, word: str) -> None:
    """The job calls it with ``str`` of each value."""
    (value,) = plan(FILE, "train.py", "--a", word).estimator["hyperparameters"].values()
    assert str(value) == word


def test_tables_of_more_arguments_are_merged(folder: Path) -> None:
    estimator = plan(FILE + "additional_args: {environment: {HF_TOKEN: x}}\n").estimator
    assert {"HF_TOKEN": "x", "ACCELERATE_MIXED_PRECISION": "bf16"}.items() <= estimator["environment"].items()


def test_model_parallelism_needs_what_the_sdk_asks_for(folder: Path) -> None:
    text = FILE.replace("DATA_PARALLEL", "MODEL_PARALLEL")
    with pytest.raises(SettingError, match="needs the number of partitions") as error:
        plan(text)
    library = plan(f"{text}{error.value.fix}\n").estimator["distribution"]["smdistributed"]
    assert library == {"modelparallel": {"enabled": True, "parameters": {"partitions": 2}}}


@pytest.mark.parametrize(
    ("text", "flags", "words"),
    [
        (FILE.replace("iam_role_name: trainer", ""), {}, "needs iam_role_name"),
        (FILE.replace("ec2_instance_type: ml.p4d.24xlarge", ""), {}, "needs ec2_instance_type"),
        (FILE.replace("DATA_PARALLEL", "MULTI_GPU"), {}, "MULTI_GPU, but the job runs on Amazon"),
        (FILE, {"module": True}, "--module does not go"),
        (FILE, {"no_python": True}, "--no_python does not go"),
        (FILE, {"aws_access_key_id": "AKIA"}, "go together"),
    ],
)
def test_what_cannot_be_a_job_is_refused(folder: Path, text: str, flags: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError, match=words):
        plan(text, **flags)


def test_its_keys_are_unknown_in_other_files(folder: Path) -> None:
    """F5: they would do nothing there."""
    with pytest.raises(UnknownNameError, match=r"ec2_instance_type.*line \d"):
        plan(FILE.replace("compute_environment: AMAZON_SAGEMAKER", ""))
    with pytest.raises(UnknownNameError, match="ec2_instance_typ'") as error:
        plan(FILE.replace("ec2_instance_type", "ec2_instance_typ"))
    assert error.value.near == "ec2_instance_type"


def test_options_of_other_launches_are_told_to_do_nothing(folder: Path) -> None:
    """F15."""
    unused = dict(plan().unused_settings)
    assert {"num_processes", "machine_rank", "gpu_ids", "log_dir"} <= unused.keys()
    assert not {"num_machines", "distributed_type"} & unused.keys()


def test_the_public_function_makes_the_same_of_a_configuration(folder: Path) -> None:
    config = load_config_from_file(str(folder / "job.yaml"))
    assert isinstance(config, SageMakerConfig)
    args = Namespace(training_script="train.py", training_script_args=["--lr", "2"], mixed_precision=None)
    made, inputs = prepare_sagemager_args_inputs(config, args)
    assert made == plan(FILE, "train.py", "--lr", "2").estimator
    assert inputs is None
