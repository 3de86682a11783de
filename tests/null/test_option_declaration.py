"""An option is declared once: flag, variable, key, question, help, default and report follow from a field.

Each test declares an option that does not exist, on a class that inherits from a plugin. A real one is
declared in ``strategy/launch_settings/``, and used and read back where it has an effect: two files.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

import pytest
from torch import nn

from accelerate import DeepSpeedPlugin, FullyShardedDataParallelPlugin, ParallelismConfig
from accelerate.cli.options import SCRIPT_SETTINGS, SettingFlag
from accelerate.cli.wizard.questions import asked_settings
from accelerate.core.errors import UnknownNameError
from accelerate.core.setting import declared_settings, describe_fields, setting
from accelerate.core.value_types import mutable_dataclass
from accelerate.launch.launch_request import read_request
from accelerate.strategy.launch_settings.fsdp import FSDPSettings
from accelerate.strategy.sharding import fsdp1_options
from accelerate.strategy.sharding.fsdp2_options import READ_BACKS, option_statuses
from accelerate.utils import MegatronLMPlugin

HELP = "the number format in which parameters are gathered"


def gather_format(**more: Any) -> Any:
    """The declaration."""
    return setting(
        None, choices=("bf16", "fp32"), fallback="fp32", help=HELP, question="In which format?", **more
    )


@mutable_dataclass
class Settings(FSDPSettings):
    gather_format: str | None = gather_format()


@describe_fields
@dataclass
class Plugin(Settings, FullyShardedDataParallelPlugin):
    """FSDP with one more option."""


def test_its_flag_variable_key_question_and_help() -> None:
    (row,) = (row for row in asked_settings(Settings) if row.field == "gather_format")
    assert (row.name, row.spellings) == (
        "fsdp_gather_format",
        ("--fsdp_gather_format", "--fsdp-gather-format"),
    )
    assert (row.variable, row.path) == ("FSDP_GATHER_FORMAT", "fsdp_config.fsdp_gather_format")
    _, text = SettingFlag(row).get_help_record(None)  # type: ignore[arg-type]
    assert text == f"{HELP}  [FSDP_GATHER_FORMAT, fsdp_config.fsdp_gather_format:]"
    assert row.question == "In which format?"


@pytest.mark.parametrize("source", ["flag", "file"])
def test_a_launch_hands_it_to_the_script(source: str, tmp_path: Any) -> None:
    classes = tuple(Settings if cls is FSDPSettings else cls for cls in SCRIPT_SETTINGS)
    file = tmp_path / "config.yaml"
    file.write_text(
        "fsdp_config: {gather_format: bf16}\ndistributed_type: FSDP" if source == "file" else "{}"
    )
    flags = {"use_fsdp": True, "fsdp_gather_format": "bf16"} if source == "flag" else {}
    request = read_request({"config_file": str(file), **flags}, ("x.py",), classes)
    assert request.script_variables()["FSDP_GATHER_FORMAT"] == "bf16"


def test_the_field_of_the_plugin(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Plugin().gather_format == "fp32"
    monkeypatch.setenv("FSDP_GATHER_FORMAT", "bf16")
    assert Plugin().gather_format == "bf16"
    assert Plugin(gather_format="fp32").gather_format == "fp32"
    with pytest.raises(UnknownNameError, match="bf16"):
        Plugin(gather_format="bf17")
    text = " ".join((inspect.getdoc(Plugin) or "").split())
    assert f"gather_format: {HELP}: bf16, fp32 (``FSDP_GATHER_FORMAT``, fp32)." in text
    assert "gather_format" in inspect.signature(Plugin).parameters


def test_the_row_of_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a function that reads it back it counts as applied; with one, what that says."""
    plugin = Plugin(gather_format="bf16")
    (status,) = option_statuses((), plugin, [])
    assert (status.option, status.value, status.applied) == ("fsdp_gather_format", "bf16", True)
    monkeypatch.setitem(
        READ_BACKS, "fsdp_gather_format", lambda option, models: option.report_not_applied("it is float32")
    )
    (status,) = option_statuses((), plugin, [nn.Linear(1, 1)])
    assert (status.not_applied, status.why) == (True, "it is float32")
    assert not list(option_statuses((), Plugin(), []))


def test_every_row_of_the_report_is_of_an_option() -> None:
    known = {row.name for row in declared_settings(FSDPSettings)}
    known |= {"mixed_precision_policy", "buffer_dtype", "limit_all_gathers"}  # of code only
    assert set(READ_BACKS) | set(fsdp1_options.READ_BACKS) <= known


def test_deepspeed_gets_it_under_its_key() -> None:
    @dataclass
    class Stage(DeepSpeedPlugin):
        overlap_comm: bool | None = setting(
            None,
            switch=False,
            fallback=True,
            help="overlap the reduction of gradients with the backward",
            details={"key": "zero_optimization.overlap_comm", "absent": True},
        )

    assert Stage().get_value("zero_optimization.overlap_comm") is True
    assert Stage(overlap_comm=False).get_value("zero_optimization.overlap_comm") is False
    read = Stage(hf_ds_config={"zero_optimization": {"stage": 1, "overlap_comm": False}})
    assert read.overlap_comm is False
    with pytest.raises(ValueError, match=r"argument overlap_comm is True, but .*[.]overlap_comm: false"):
        Stage(hf_ds_config={"zero_optimization": {"stage": 1, "overlap_comm": False}}, overlap_comm=True)
    assert [option.name for option in Stage(overlap_comm=False).given_options()] == ["overlap_comm"]
    row = declared_settings(Stage)[-1]
    assert (row.flags, row.variable) == (("--overlap_comm",), "ACCELERATE_DEEPSPEED_OVERLAP_COMM")


def test_megatron_gets_it_as_an_argument() -> None:
    @dataclass
    class Fused(MegatronLMPlugin):
        fused_rope: bool = setting(
            None,
            switch=False,
            fallback=False,
            help="positions by a kernel",
            details={"nominal": None, "argument": "apply_rope_fusion", "unread": ""},
        )

    assert Fused().megatron_lm_default_args["apply_rope_fusion"] is False
    plugin = Fused(fused_rope=True)
    assert plugin.megatron_lm_default_args["apply_rope_fusion"] is True
    assert (plugin.explicit_value("fused_rope"), Fused().explicit_value("fused_rope")) == (True, None)
    assert declared_settings(Fused)[-1].variable == "MEGATRON_LM_FUSED_ROPE"


def test_the_mesh_takes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    @dataclass(repr=False)
    class Config(ParallelismConfig):
        ring: str | None = gather_format()

    monkeypatch.setenv("PARALLELISM_CONFIG_RING", "bf16")
    assert (Config().ring, Config(ring="fp32").ring) == ("bf16", "fp32")
