"""Launching as a training job on Amazon SageMaker.

Not run on SageMaker: written to version 2 of its Python SDK, tested with a fake of it. Source: SageMaker
Python SDK documentation, "Hugging Face Estimator" and "Using Hugging Face with the SageMaker Python SDK".
"""

from __future__ import annotations

import importlib
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Any, ClassVar

from accelerate.core import environ
from accelerate.core.errors import LaunchError, MissingExtraError, SettingError
from accelerate.core.packages import is_installed
from accelerate.core.setting import declared_settings
from accelerate.core.value_types import frozen_dataclass
from accelerate.launch.base import LaunchKind, LaunchPlan, PlannedCommand
from accelerate.launch.config_files import expand_home
from accelerate.launch.launch_request import JobSettings, LaunchRequest, file_setting, typed_setting

# Arguments of SageMaker's estimator that are keys of the file; the key.
_COPIED_ARGUMENTS = {name: name for name in ("image_uri", "transformers_version", "pytorch_version")} | {
    "base_job_name": "base_job_name",
    "instance_type": "ec2_instance_type",
    "py_version": "py_version",
    "role": "iam_role_name",
}
_INSTALL = "pip install 'sagemaker<3'"  # version 3 has no estimators
# Sections of files that say what a group of processes on SageMaker shares: its own library, no launcher.
_DISTRIBUTIONS: dict[str, dict[str, Any]] = {
    "DATA_PARALLEL": {"smdistributed": {"dataparallel": {"enabled": True}}},
    "MODEL_PARALLEL": {"smdistributed": {"modelparallel": {"enabled": True}}, "mpi": {"enabled": True}},
}


class Secret(str):
    """A text that is shown as stars wherever it is printed."""

    def __str__(self) -> str:
        return "***"

    __repr__ = __str__

    @property
    def plain_text(self) -> str:
        """The text itself."""
        return "".join(self)


@frozen_dataclass
class SageMakerSettings:
    """How to start a training job on Amazon SageMaker."""

    __topic__ = "Amazon SageMaker"
    __only_with__: ClassVar[dict[str, str]] = {"compute_environment": "AMAZON_SAGEMAKER"}

    aws_access_key_id: Secret | None = typed_setting(
        None, help="the key of an AWS account; by default the profile's"
    )
    aws_secret_access_key: Secret | None = typed_setting(None, help="the secret that belongs to the key")
    ec2_instance_type: str | None = file_setting(
        None, help="the type of its machines: ml.p3.2xlarge", question="EC2 instance type?"
    )
    iam_role_name: str | None = file_setting(
        None, help="the role that the job has; its name, or its ARN", question="IAM role of the job?"
    )
    profile: str | None = file_setting(
        None, help="a profile of the AWS configuration", question="AWS profile?"
    )
    region: str = file_setting("us-east-1", help="where the job runs", question="AWS region?")
    image_uri: str | None = file_setting(
        None,
        help="the container; by default that of the versions",
        question="Container image? (empty: that of the versions)",
    )
    pytorch_version: str = file_setting("1.10.2", help="PyTorch in the container")
    transformers_version: str = file_setting("4.17.0", help="Transformers in the container")
    py_version: str = file_setting("py38", help="Python in the container")
    base_job_name: str = file_setting("accelerate-sagemaker-1", help="how names of jobs begin")
    sagemaker_inputs_file: str | None = file_setting(
        None, help="a table with tabs: channel_name, data_location", question="File of inputs?"
    )
    sagemaker_metrics_file: str | None = file_setting(
        None, help="a table with tabs: metric_name, metric_regex", question="File of metrics?"
    )
    additional_args: dict[str, Any] | None = file_setting(
        None, help="more arguments of the estimator; they win over all others, in tables key by key"
    )


@frozen_dataclass
class SageMakerLaunchPlan(LaunchPlan):
    """A training job.

    Attributes:
        estimator: the arguments of ``sagemaker.huggingface.HuggingFace``.
        inputs: channel -> where its data lies; None for a job without.
    """

    estimator: Mapping[str, Any] = field(default_factory=dict)
    inputs: Mapping[str, str] | None = None


class SageMakerLaunch(LaunchKind[SageMakerLaunchPlan]):
    """A training job on machines of Amazon."""

    name: ClassVar[str] = "Amazon SageMaker"
    priority: ClassVar[int] = 30
    asked_by: ClassVar[tuple[str, ...]] = ("compute_environment",)
    settings = (SageMakerSettings,)

    def accepts(self, request: LaunchRequest) -> bool:
        """Accept jobs whose configuration file is for SageMaker."""
        return request.settings.compute_environment == "AMAZON_SAGEMAKER"

    def plan(self, request: LaunchRequest) -> SageMakerLaunchPlan:
        """Make the arguments of the job; see ``LaunchKind.plan``."""
        _check_request(request)
        options, group = request.values_of(SageMakerSettings), _distribution(request)
        variables = {"ACCELERATE_MIXED_PRECISION": "no", **request.script_variables()}
        arguments = estimator_arguments(
            options, request.program, group, variables, int(request.settings.num_machines)
        )
        facts = {name: value for name, value in arguments.items() if name != "environment"}
        return SageMakerLaunchPlan(
            kind=self.name,
            facts=tuple((name, str(value)) for name, value in facts.items()),
            variables=arguments["environment"],
            commands=(PlannedCommand("sagemaker.huggingface.HuggingFace.fit", ("python", *request.program)),),
            unused_settings=tuple(_unused_settings(request)),
            estimator=arguments,
            inputs=read_inputs(options),
        )

    def run(self, request: LaunchRequest, plan: SageMakerLaunchPlan, *, replace: bool) -> None:
        """Start the job and wait for its end; see ``LaunchKind.run``."""
        options = request.values_of(SageMakerSettings)
        with environ.patch_environment(_credentials(options)):
            _estimator_class()(**plan.estimator).fit(inputs=plan.inputs)


def estimator_arguments(
    own: Any, program: Sequence[str], group: str, told: Mapping[str, object], machines: int
) -> dict[str, Any]:
    """The arguments of ``sagemaker.huggingface.HuggingFace``.

    Args:
        own: an object with the keys of a file as attributes.
        program: the script and its arguments.
        group: ``"NO"``, ``"DATA_PARALLEL"`` or ``"MODEL_PARALLEL"``.
        told: the environment of the job.
        machines: how many take part.

    Raises:
        SettingError: the script's arguments cannot be handed on, or a table cannot be read.
    """
    script, script_arguments = Path(program[0]), program[1:]
    arguments = {argument: getattr(own, key) for argument, key in _COPIED_ARGUMENTS.items()}
    arguments["hyperparameters"] = parse_hyperparameters(script_arguments)
    arguments["metric_definitions"] = _read_metrics(own)
    arguments["environment"] = {
        "ACCELERATE_USE_SAGEMAKER": "true",
        **{name: str(value) for name, value in told.items()},
        "ACCELERATE_SAGEMAKER_DISTRIBUTED_TYPE": group,
    }
    arguments["distribution"] = _DISTRIBUTIONS.get(group)
    arguments.update(entry_point=script.name, source_dir=str(script.parent))
    arguments.update(instance_count=machines, debugger_hook_config=False)
    arguments = _merge_tables(arguments, own.additional_args or {})
    if group == "MODEL_PARALLEL" and "parameters" not in _model_parallel(arguments):
        raise SettingError(
            "distributed_type: MODEL_PARALLEL needs the number of partitions",
            why="Amazon's library for it does not start without",
            fix="additional_args: {distribution: {smdistributed: {modelparallel: {parameters: "
            "{partitions: 2}}}}}",
        )
    return arguments


def _merge_tables(table: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """A table with the keys of both; of two values those of ``more`` count, two tables are merged."""
    merged = {**table, **more}
    for key in table.keys() & more.keys():
        if isinstance(table[key], dict) and isinstance(more[key], dict):
            merged[key] = _merge_tables(table[key], more[key])
    return merged


def _model_parallel(arguments: Mapping[str, Any]) -> Any:
    smdistributed = (arguments["distribution"] or {}).get("smdistributed") or {}
    return smdistributed.get("modelparallel") or {}


def parse_hyperparameters(arguments: Sequence[str]) -> dict[str, Any]:
    """The arguments of a script as a table of numbers, yes and no, and texts.

    SageMaker hands a table on, as ``--name value`` each; what is not of this form cannot be handed on.

    Raises:
        SettingError: there is such an argument; the error names it.
    """
    table: dict[str, Any] = {}
    tokens = list(arguments)
    while tokens:
        token = tokens.pop(0)
        name, equals, value = token.partition("=")
        if not token.startswith("-") or _is_number(token):
            raise SettingError(
                f"the argument {token!r} of the script has no name",
                why="SageMaker hands arguments on as a table of names and values",
                fix=f"let the script take it as a flag: --name {token}",
            )
        if not equals and (not tokens or (tokens[0].startswith("-") and not _is_number(tokens[0]))):
            raise SettingError(
                f"the flag {token} of the script has no value",
                why="SageMaker hands arguments on as a table of names and values",
                fix=f"let the script take a value: {token} true",
            )
        name = name.lstrip("-")
        if name in table:
            raise SettingError(
                f"the script's argument {name} is given twice", why="a table has each name once"
            )
        table[name] = _parse_word(value if equals else tokens.pop(0))
    return table


def _is_number(word: str) -> bool:
    try:
        float(word)
    except ValueError:
        return False
    return True


def _parse_word(word: str) -> Any:
    """A number, yes or no where the script would get the same word of it, else the word."""
    if word in ("True", "False"):
        return word == "True"
    if _is_number(word):
        number = int(word) if word.lstrip("+-").isdecimal() else float(word)
        return number if math.isfinite(number) and str(number) == word else word
    return word


def read_inputs(own: Any) -> dict[str, str] | None:
    """Channel -> where its data lies, of the file of inputs; None without one.

    Raises:
        SettingError: the file cannot be read.
    """
    if not own.sagemaker_inputs_file:
        return None
    rows = _read_table(own.sagemaker_inputs_file, "channel_name", "data_location")
    return {row["channel_name"]: row["data_location"] for row in rows}


def _read_metrics(own: Any) -> list[dict[str, str]] | None:
    """Read the metrics that SageMaker searches for in the output of the job."""
    if not own.sagemaker_metrics_file:
        return None
    rows = _read_table(own.sagemaker_metrics_file, "metric_name", "metric_regex")
    return [{"Name": row["metric_name"], "Regex": row["metric_regex"]} for row in rows]


def _read_table(name: str, *columns: str) -> list[dict[str, str]]:
    import csv

    try:
        with expand_home(name).open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file, delimiter="\t")
            rows = list(reader)
    except (OSError, UnicodeDecodeError) as error:
        raise SettingError(f"the file {name} cannot be read", why=str(error)) from error
    if not {*columns} <= {*(reader.fieldnames or ())} or any(row[c] is None for row in rows for c in columns):
        raise SettingError(
            f"{name} is not a table of {' and '.join(columns)}",
            fix=f"begin it with the line {'<tab>'.join(columns)}, and write a line of two cells for each",
        )
    return rows


def _distribution(request: LaunchRequest) -> str:
    origin = request.origin("distributed_type")
    group = str(origin.value or "NO").upper()
    if group not in ("NO", *_DISTRIBUTIONS):
        raise SettingError(
            f"{origin.where} is {origin.value}, but the job runs on Amazon SageMaker",
            fix=f"give one of NO, {', '.join(_DISTRIBUTIONS)}",
        )
    return group


def _check_request(request: LaunchRequest) -> None:
    """Refuse what the job cannot do without, and what it cannot do."""
    for name in ("ec2_instance_type", "iam_role_name"):
        if not request.get(name):
            location = request.origin("compute_environment").where
            raise SettingError(
                f"a job on Amazon SageMaker ({location}) needs {name}",
                fix=f"write {name}: ... in the configuration file",
            )
    for name in ("module", "no_python"):
        if request.get(name):
            raise SettingError(f"--{name} does not go with Amazon SageMaker", why="it runs a Python file")
    options = request.values_of(SageMakerSettings)
    if bool(options.aws_access_key_id) != bool(options.aws_secret_access_key):
        raise SettingError("--aws_access_key_id and --aws_secret_access_key go together", fix="give both")
    if not str(request.settings.num_machines).isdecimal():
        raise SettingError(f"{request.origin('num_machines').where} is no number of machines for a job")


def _unused_settings(request: LaunchRequest) -> Iterator[tuple[str, str]]:
    """Yield the settings without use on SageMaker; see ``LaunchPlan.unused_settings``."""
    used = {"num_machines", "distributed_type", "compute_environment", "config_file", "quiet", "dry_run"}
    for row in declared_settings(JobSettings):
        if row.name not in used:
            yield row.name, "SageMaker starts the processes of the job"


def _credentials(own: SageMakerSettings) -> dict[str, object | None]:
    """Variables by which the SDK learns who asks; those that are not given stay as they are."""
    variables: dict[str, object | None] = {"AWS_DEFAULT_REGION": own.region}
    if own.profile:
        variables["AWS_PROFILE"] = own.profile
    if own.aws_access_key_id and own.aws_secret_access_key:
        variables["AWS_ACCESS_KEY_ID"] = own.aws_access_key_id.plain_text
        variables["AWS_SECRET_ACCESS_KEY"] = own.aws_secret_access_key.plain_text
    return variables


def _estimator_class() -> Any:
    if not is_installed("sagemaker"):
        missing = MissingExtraError("sagemaker", "a job on Amazon SageMaker")
        missing.fix = _INSTALL
        raise missing
    try:
        return importlib.import_module("sagemaker.huggingface").HuggingFace
    except (ModuleNotFoundError, AttributeError) as error:
        raise LaunchError(
            "this sagemaker has no Hugging Face estimator", why=str(error), fix=_INSTALL
        ) from error


def prepare_sagemager_args_inputs(sagemaker_config: Any, args: Any) -> tuple[dict[str, Any], Any]:
    """The arguments of the estimator and of its ``fit``, of a configuration and parsed flags of a launch.

    Args:
        sagemaker_config: a ``SageMakerConfig``.
        args: what ``launch_command_parser().parse_args()`` returned.

    Raises:
        SettingError: the script's arguments cannot be handed on, or a table cannot be read.
    """
    kind = sagemaker_config.distributed_type
    dynamo = sagemaker_config.dynamo_config or {}
    variables = {
        "ACCELERATE_MIXED_PRECISION": getattr(args, "mixed_precision", None)
        or sagemaker_config.mixed_precision
        or "no",
        **{f"ACCELERATE_{key.upper()}": str(value) for key, value in dynamo.items()},
    }
    program = (args.training_script, *(args.training_script_args or ()))
    arguments = estimator_arguments(
        sagemaker_config, program, str(getattr(kind, "value", kind)), variables, sagemaker_config.num_machines
    )
    return arguments, read_inputs(sagemaker_config)


PLUGIN = SageMakerLaunch()
