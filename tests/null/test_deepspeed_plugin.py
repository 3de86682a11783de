"""DeepSpeed's plugin, and the configuration made from it: one owner for each number. No engine runs."""

from __future__ import annotations

import base64
import json
import sys
from contextlib import nullcontext
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from accelerate import Accelerator, DeepSpeedPlugin
from accelerate.core.errors import MissingExtraError, PrepareError, SettingError
from accelerate.core.packages import is_installed
from accelerate.strategy.deepspeed import config_tree
from accelerate.strategy.deepspeed.engine_config import DeepSpeedConfigInputs, build_config, hidden_size
from accelerate.utils import GradientAccumulationPlugin
from accelerate.utils.deepspeed import DummyOptim, DummyScheduler, HfDeepSpeedConfig

CONFIG: dict[str, Any] = {
    "zero_optimization": {"stage": 3},
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "bf16": {"enabled": "auto"},
}


def wanted(**more: Any) -> DeepSpeedConfigInputs:
    model = nn.Linear(2, 2)
    given = {"model": model, "steps": 1, "precision": "no", "processes": 2, "host": True}
    return DeepSpeedConfigInputs(**{**given, "optimizer": torch.optim.SGD(model.parameters(), 0.1), **more})


def test_the_defaults_are_those_of_the_public_package() -> None:
    """Printed by 1.15 for ``DeepSpeedPlugin()`` and for a stage with offload."""
    assert DeepSpeedPlugin().deepspeed_config == {
        "train_batch_size": "auto",
        "train_micro_batch_size_per_gpu": "auto",
        "gradient_accumulation_steps": "auto",
        "zero_optimization": {
            "stage": 2,
            "offload_optimizer": {"device": "none", "nvme_path": None},
            "offload_param": {"device": "none", "nvme_path": None},
            "stage3_gather_16bit_weights_on_model_save": False,
        },
        "gradient_clipping": "auto",
        "steps_per_print": float("inf"),
    }
    plugin = DeepSpeedPlugin(zero_stage=3, offload_optimizer_device="cpu", gradient_clipping=1.0)
    assert (plugin.zero_stage, plugin.zero3_init_flag, plugin.gradient_clipping) == (3, True, 1.0)
    assert plugin.get_value("zero_optimization.offload_optimizer") == {"device": "cpu", "nvme_path": None}
    assert not DeepSpeedPlugin(zero3_init_flag=True).zero3_init_flag


def test_variables_of_the_launcher(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name, value in {
        "ACCELERATE_DEEPSPEED_ZERO_STAGE": "3",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE": "nvme",
        "ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH": "/drive",
        "ACCELERATE_GRADIENT_CLIPPING": "0.5",
        "ACCELERATE_GRADIENT_ACCUMULATION_STEPS": "4",
        "ACCELERATE_DEEPSPEED_ZERO3_INIT": "false",
        "ACCELERATE_DEEPSPEED_ZERO3_SAVE_16BIT_MODEL": "true",
        "ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES": "A,B",
    }.items():
        monkeypatch.setenv(name, value)
    plugin = DeepSpeedPlugin()
    assert plugin.get_value("zero_optimization.offload_param") == {"device": "nvme", "nvme_path": "/drive"}
    assert (plugin.zero_stage, plugin.zero3_init_flag, plugin.zero3_save_16bit_model) == (3, False, True)
    assert (plugin.gradient_clipping, plugin.gradient_accumulation_steps) == (0.5, 4)
    assert plugin.transformer_moe_cls_names == "A,B"
    monkeypatch.delenv("ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_NVME_PATH")
    with pytest.raises(SettingError, match="in which folder"):
        DeepSpeedPlugin()


def test_a_configuration_comes_as_dict_file_text_and_object(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "ds.json"
    text = json.dumps(CONFIG)
    file.write_text(text)
    coded = base64.urlsafe_b64encode(text.encode()).decode()
    for given in (CONFIG, str(file), file, text, coded, HfDeepSpeedConfig(CONFIG)):
        plugin = DeepSpeedPlugin(hf_ds_config=given)
        assert plugin.deepspeed_config == {**CONFIG, "steps_per_print": float("inf")}
        assert (plugin.zero_stage, plugin.zero3_init_flag) == (3, True)
        assert plugin.deepspeed_config is plugin.hf_ds_config.config
    monkeypatch.setenv("ACCELERATE_DEEPSPEED_CONFIG_FILE", str(file))
    assert DeepSpeedPlugin().zero_stage == 3
    monkeypatch.delenv("ACCELERATE_DEEPSPEED_CONFIG_FILE")
    assert "steps_per_print" not in CONFIG
    for steps, kept in (("auto", float("inf")), ("inf", float("inf")), (10, 10)):
        plugin = DeepSpeedPlugin(hf_ds_config={**CONFIG, "steps_per_print": steps})
        assert plugin.deepspeed_config["steps_per_print"] == kept
    for wrong in ("nowhere.json", 5):
        with pytest.raises(ValueError, match="no such file"):
            DeepSpeedPlugin(hf_ds_config=wrong)
    for without_table in ({"train_batch_size": 8}, {"zero_optimization": True}):
        with pytest.raises(ValueError, match="no table zero_optimization"):
            DeepSpeedPlugin(hf_ds_config=without_table)
    assert DeepSpeedPlugin(hf_ds_config={"zero_optimization": {}}).gradient_accumulation_steps == 1


def test_what_is_said_twice_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    """The public package lets the file win without a word."""
    with pytest.raises(SettingError, match=r"argument zero_stage is 2, but .*zero_optimization.stage: 3"):
        DeepSpeedPlugin(hf_ds_config=CONFIG, zero_stage=2)
    assert DeepSpeedPlugin(hf_ds_config=CONFIG, zero_stage=3).zero_stage == 3
    plugin = DeepSpeedPlugin(hf_ds_config=CONFIG, gradient_accumulation_steps=4)
    assert plugin.deepspeed_config["gradient_accumulation_steps"] == 4
    monkeypatch.setenv("ACCELERATE_GRADIENT_CLIPPING", "0.5")
    with pytest.raises(SettingError, match=r"ACCELERATE_GRADIENT_CLIPPING is 0.5"):
        DeepSpeedPlugin(hf_ds_config={**CONFIG, "gradient_clipping": 1.0})


def test_auto_takes_the_field_or_its_default() -> None:
    zero = {"stage": "auto", "offload_optimizer": {"device": "auto"}}
    plugin = DeepSpeedPlugin(
        hf_ds_config={"zero_optimization": zero}, zero_stage=3, offload_optimizer_device="cpu"
    )
    assert plugin.hf_ds_config.is_zero3()
    assert plugin.hf_ds_config.is_offload()
    plugin = DeepSpeedPlugin(hf_ds_config={"zero_optimization": zero})
    assert plugin.deepspeed_config["zero_optimization"] == {
        "stage": 2,
        "offload_optimizer": {"device": "none"},
    }
    assert (plugin.zero_stage, plugin.hf_ds_config.is_zero2()) == (2, True)


def test_steps_of_accumulation_that_the_configuration_leaves_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The Accelerator's count; 1.15 takes 1, without a word."""
    silent = {"zero_optimization": {"stage": 2}}
    plugin = DeepSpeedPlugin(hf_ds_config=silent, gradient_accumulation_steps=4)
    assert plugin.deepspeed_config["gradient_accumulation_steps"] == 4
    plugin = DeepSpeedPlugin(hf_ds_config=silent)
    assert Accelerator(cpu=True, deepspeed_plugin=plugin).gradient_accumulation_steps == 1
    accelerator = Accelerator(cpu=True, deepspeed_plugin=plugin, gradient_accumulation_steps=4)
    assert accelerator.gradient_accumulation_steps == 4
    assert build_config(plugin, wanted(steps=4)).config["gradient_accumulation_steps"] == 4
    monkeypatch.setenv("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "2")
    assert Accelerator(cpu=True, deepspeed_plugin=plugin).gradient_accumulation_steps == 2


def test_steps_of_the_configuration_count_beside_the_plugin_of_gradient_accumulation() -> None:
    """As beside the argument; libraries that count micro-batches by themselves say 1."""
    config = {"zero_optimization": {"stage": 2}, "gradient_accumulation_steps": 4}
    for steps, taken in ((2, 4), (4, 4), (1, 1)):
        expected = pytest.warns(UserWarning, match="Plugin is 2, but the DeepSpeed.* says .*: 4")
        with expected if steps == 2 else nullcontext():
            accelerator = Accelerator(
                cpu=True,
                deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config),
                gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=steps),
            )
        assert accelerator.gradient_accumulation_steps == taken
    config["gradient_accumulation_steps"] = 0
    with pytest.raises(SettingError, match="gradient_accumulation_steps is 0"):
        Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config=config))


def test_a_precision_that_the_configuration_disables_is_refused() -> None:
    """1.15 trains in float32, without a word."""
    plugin = DeepSpeedPlugin(hf_ds_config={**CONFIG, "bf16": {"enabled": False}})
    with pytest.raises(SettingError, match=r"mixed_precision is bf16, but .*bf16.enabled: false"):
        Accelerator(cpu=True, deepspeed_plugin=plugin, mixed_precision="bf16")
    Accelerator(cpu=True, deepspeed_plugin=plugin, mixed_precision="no")
    plugin = DeepSpeedPlugin(hf_ds_config=CONFIG)
    plugin.deepspeed_config["bf16"]["enabled"] = False  # by the program, before the Accelerator
    with pytest.raises(SettingError, match=r"mixed_precision is bf16, but .*bf16.enabled: false"):
        Accelerator(cpu=True, deepspeed_plugin=plugin, mixed_precision="bf16")
    plugin = DeepSpeedPlugin(hf_ds_config=CONFIG)
    plugin.set_mixed_precision("no")  # this is no wish of the configuration
    plugin.set_mixed_precision("bf16")
    assert plugin.precision == "bf16"


def test_each_plugin_of_several_keeps_its_own_precision() -> None:
    """Such as the moving average of a model that trains in bf16, which a program keeps in float32."""
    plugins = {name: DeepSpeedPlugin(hf_ds_config=CONFIG) for name in ("train", "average", "bf16")}
    plugins["average"].deepspeed_config["bf16"]["enabled"] = False
    plugins["bf16"].deepspeed_config["bf16"]["enabled"] = True
    for given, expected in (("bf16", (True, False, True)), ("no", (False, False, True))):
        accelerator = Accelerator(cpu=True, mixed_precision=given, deepspeed_plugins=plugins)
        for name, enabled in zip(plugins, expected, strict=True):
            accelerator.state.select_deepspeed_plugin(name)
            model = nn.Linear(2, 2)
            plan = accelerator.plan(model, torch.optim.SGD(model.parameters(), 0.1)).text
            assert f'"bf16": {{"enabled": {json.dumps(enabled)}}}' in plan


@pytest.mark.parametrize("table", [{}, {"enabled": "auto"}])
def test_the_next_accelerator_has_a_precision_of_its_own(table: dict[str, Any]) -> None:
    plugin = DeepSpeedPlugin(hf_ds_config={**CONFIG, "bf16": table})
    Accelerator(cpu=True, deepspeed_plugin=plugin, mixed_precision="bf16")
    assert plugin.precision == "bf16"
    plugin.publish_config(build_config(plugin, wanted(precision="bf16")).config)
    second = Accelerator(cpu=True, deepspeed_plugin=plugin, mixed_precision="no")
    assert (second.mixed_precision, plugin.precision) == ("no", None)
    config = build_config(plugin, wanted(batches=[3])).config
    assert not config.get("bf16", {}).get("enabled")
    assert config["train_micro_batch_size_per_gpu"] == 3  # "auto" again, as before the first engine
    with pytest.raises(SettingError, match="DeepSpeed cannot compute in fp16 on the CPU"):
        Accelerator(cpu=True, deepspeed_plugin=plugin, mixed_precision="fp16")


def test_two_names_of_one_argument() -> None:
    with pytest.raises(ValueError, match="both given"):
        Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(), deepspeed_plugins={"a": DeepSpeedPlugin()})


def test_what_clients_ask_of_it() -> None:
    plugin = DeepSpeedPlugin(hf_ds_config=CONFIG)
    assert plugin.is_auto("bf16.enabled")
    assert plugin.get_value("a.b", 7) == 7
    plugin.set_mixed_precision("bf16")
    assert plugin.get_value("bf16.enabled") is True
    assert plugin.get_value("fp16.enabled") is False
    with pytest.raises(ValueError, match=r"bf16.enabled: true"):
        plugin.set_mixed_precision("fp16")
    differing: list[str] = []
    plugin.fill_match("zero_optimization.stage", differing, True, **{"zero_optimization.stage": 2})
    plugin.fill_match("train_micro_batch_size_per_gpu", differing, True, train_micro_batch_size_per_gpu=2)
    plugin.fill_match("no.such", differing, True)
    assert differing == ["zero_optimization.stage is 3 in the file, and 2 as an argument"]
    assert plugin.get_value("train_micro_batch_size_per_gpu") == 2
    with pytest.raises(ValueError, match="gradient_accumulation_steps"):
        plugin.deepspeed_config_process()
    values: dict[str, Any] = {"zero_optimization.stage": 2, "gradient_accumulation_steps": 1}
    with pytest.raises(ValueError, match="stage is 3 in the file"):
        plugin.deepspeed_config_process(**values)
    with pytest.raises(NotImplementedError, match="select_deepspeed_plugin"):
        plugin.selected = True
    with pytest.raises(ValueError, match="select_deepspeed_plugin"):
        plugin.select()
    with pytest.raises(SettingError, match="MS-AMP"):
        DeepSpeedPlugin(enable_msamp=True)


def test_the_tree_that_transformers_derives_from(tmp_path: Path) -> None:
    found = HfDeepSpeedConfig(
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "cpu"}}, "a": {"b": 0}}
    )
    assert (found.is_zero3(), found.is_zero2(), found.is_offload()) == (True, False, True)
    assert found.find_config_node("a.b") == ({"b": 0}, "b")
    assert found.find_config_node("x.b") == (None, "b")
    assert (found.is_false("a.b"), found.is_true("a.b"), found.is_false("a.c")) == (True, False, False)
    found.del_config_sub_tree("a.b")
    found.del_config_sub_tree("a.b")
    with pytest.raises(ValueError, match=r"a\.b"):
        found.del_config_sub_tree("a.b", must_exist=True)
    assert found.get_value("a") == {}


def test_each_number_has_one_owner() -> None:
    """F15, PAINS: accumulation of the Accelerator, the batch of the loader, "auto" from both."""
    plugin = DeepSpeedPlugin(hf_ds_config=CONFIG)
    made = build_config(plugin, wanted(steps=4, batches=[8, 16], precision="bf16"))
    assert made.config["train_batch_size"] == 8 * 4 * 2
    assert config_tree.get_key(made.config, "bf16.enabled") is True
    assert not list(config_tree.auto_keys(made.config))
    assert made.config["train_micro_batch_size_per_gpu"] == 8
    assert plugin.deepspeed_config["train_micro_batch_size_per_gpu"] == "auto"
    plugin.publish_config(made.config)
    assert plugin.deepspeed_config["train_batch_size"] == 64
    # Another model, another batch: what was filled in is no wish of the user.
    assert (
        build_config(plugin, wanted(steps=4, batches=[2], precision="bf16")).config["train_batch_size"] == 16
    )
    # A change since then counts, and makes the other values no wish either.
    plugin.deepspeed_config["gradient_clipping"] = 1.5
    plugin.deepspeed_config["zero_optimization"]["stage"] = 2
    del plugin.deepspeed_config["zero_force_ds_cpu_optimizer"]
    changed = build_config(plugin, wanted(batches=[2])).config
    assert (changed["train_batch_size"], changed["gradient_clipping"]) == (4, 1.5)
    assert changed["zero_optimization"]["stage"] == 2
    plugin.deepspeed_config["train_micro_batch_size_per_gpu"] = 5
    # Kohya's scripts write it; their data sets give whole batches.
    with pytest.warns(UserWarning, match=r"train_micro_batch_size_per_gpu: 5.*batches of 1") as caught:
        kept = build_config(plugin, wanted(steps=4, batches=[1])).config
    assert (kept["train_micro_batch_size_per_gpu"], kept["train_batch_size"]) == (5, 5 * 4 * 2)
    assert len(caught) == 1
    plugin.deepspeed_config["train_batch_size"] = 8
    with pytest.raises(SettingError, match=r"says 40, but .*train_batch_size: 8"):
        build_config(plugin, wanted(steps=4, batches=[5]))


def test_contradictions_name_both_places() -> None:
    cases: list[tuple[dict[str, Any], dict[str, Any], str]] = [
        ({"gradient_accumulation_steps": 8}, {"steps": 4}, "of the Accelerator says 4.*steps: 8"),
        ({"train_batch_size": 7}, {"batches": [2]}, "2 processes says 4.*train_batch_size: 7"),
        ({"fp16": {"enabled": True}}, {"precision": "bf16"}, "fp16.enabled: true"),
        ({"optimizer": {"type": "Adam"}}, {}, "SGD in prepare, and Adam in"),
        ({"scheduler": {"type": "WarmupLR"}}, {"scheduler": object()}, "object in prepare, and WarmupLR in"),
        (
            {"zero_optimization": {"stage": 2, "sub_group_size": "auto"}},
            {},
            '"auto" for zero_optimization.sub',
        ),
    ]
    for more, given, text in cases:
        plugin = DeepSpeedPlugin(hf_ds_config={**CONFIG, **more})
        with pytest.raises(SettingError, match=text):
            build_config(plugin, wanted(**given))
    # A number that is the same as text is the same number.
    same = {**CONFIG, "train_micro_batch_size_per_gpu": "8", "gradient_accumulation_steps": "4"}
    build_config(DeepSpeedPlugin(hf_ds_config=same), wanted(steps=4, batches=[8]))


def test_optimizer_and_schedule_of_deepspeed() -> None:
    params = {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": 0.5}
    schedule = {"warmup_max_lr": "auto", "warmup_num_steps": "auto", "total_num_steps": "auto"}
    config = {**CONFIG, "optimizer": {"type": "AdamW", "params": params}, "scheduler": {"params": schedule}}
    model = nn.Linear(2, 2)
    dummy = DummyOptim(model.parameters(), lr=0.02, betas=(0.8, 0.9))
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    scheduler = DummyScheduler(dummy, total_num_steps=10)
    made = build_config(plugin, wanted(optimizer=dummy, scheduler=scheduler)).config
    expected = {"lr": 0.02, "betas": [0.8, 0.9], "eps": 1e-8, "weight_decay": 0.5, "torch_adam": True}
    assert made["optimizer"]["params"] == expected
    assert made["scheduler"]["params"] == {
        "warmup_max_lr": 0.02,
        "warmup_num_steps": 1,
        "total_num_steps": 10,
    }
    assert (
        "torch_adam"
        not in build_config(plugin, wanted(optimizer=dummy, scheduler=scheduler, host=False)).config[
            "optimizer"
        ]["params"]
    )
    momentum = {"optimizer": {"type": "SGD", "params": {"lr": "auto", "momentum": "auto"}}}
    sgd = wanted(optimizer=DummyOptim(model.parameters(), momentum=0.9))
    filled = build_config(DeepSpeedPlugin(hf_ds_config={**CONFIG, **momentum}), sgd).config
    assert filled["optimizer"]["params"] == {"lr": 0.001, "momentum": 0.9}
    with pytest.raises(SettingError, match=r"weight_decay of the DummyOptim says 0.1.*weight_decay: 0.5"):
        build_config(plugin, wanted(optimizer=DummyOptim(model.parameters(), lr=0.02, weight_decay=0.1)))
    with pytest.raises(SettingError, match="no optimizer"):
        build_config(DeepSpeedPlugin(), wanted(optimizer=dummy))
    with pytest.raises(SettingError, match="no scheduler"):
        build_config(DeepSpeedPlugin(), wanted(scheduler=DummyScheduler(dummy)))


def test_what_is_said_of_a_drive_goes_to_deepspeed() -> None:
    """Also what only DeepSpeed's own file says: sizes of its buffers and of its reader."""
    plugin = DeepSpeedPlugin(
        zero_stage=3,
        offload_optimizer_device="nvme",
        offload_optimizer_nvme_path="/drive/a",
        offload_param_device="nvme",
        offload_param_nvme_path="/drive/b",
    )
    zero = build_config(plugin, wanted()).config["zero_optimization"]
    assert zero["offload_optimizer"] == {"device": "nvme", "nvme_path": "/drive/a"}
    assert zero["offload_param"] == {"device": "nvme", "nvme_path": "/drive/b"}
    own = {"device": "nvme", "nvme_path": "/drive", "buffer_count": 6, "pipeline_read": True}
    reader = {"block_size": 1048576, "queue_depth": 16, "thread_count": 2}
    config = {**CONFIG, "zero_optimization": {"stage": 3, "offload_optimizer": own}, "aio": reader}
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    assert (plugin.offload_optimizer_device, plugin.offload_optimizer_nvme_path) == ("nvme", "/drive")
    filled = build_config(plugin, wanted()).config
    assert filled["zero_optimization"]["offload_optimizer"] == own
    assert filled["aio"] == reader


def test_buckets_go_by_the_width_of_the_model() -> None:
    model = nn.Linear(2, 2)
    model.config = type("Config", (), {"text_config": {"hidden_sizes": [8, 16]}})()  # type: ignore[assignment]
    assert hidden_size(model) == 16
    zero = {"stage": 3, "reduce_bucket_size": "auto", "stage3_param_persistence_threshold": "auto"}
    plugin = DeepSpeedPlugin(hf_ds_config={**CONFIG, "zero_optimization": zero})
    filled = build_config(plugin, wanted(model=model)).config["zero_optimization"]
    assert (filled["reduce_bucket_size"], filled["stage3_param_persistence_threshold"]) == (256, 160)
    assert "reduce_bucket_size" not in build_config(plugin, wanted()).config["zero_optimization"]


@pytest.mark.skipif(not is_installed("deepspeed"), reason="the package deepspeed is not installed")
def test_the_accelerator_takes_and_refuses() -> None:
    """In a world of one: what is asked is settled before anything is imported."""
    accelerator = Accelerator(cpu=True, deepspeed_plugin=DeepSpeedPlugin(gradient_accumulation_steps=4))
    assert accelerator.gradient_accumulation_steps == 4
    assert accelerator.state.deepspeed_plugins["default"].selected
    with pytest.warns(UserWarning, match="is 2, but .* gradient_accumulation_steps: 4, which counts"):
        warned = Accelerator(
            cpu=True,
            gradient_accumulation_steps=2,
            deepspeed_plugin=DeepSpeedPlugin(gradient_accumulation_steps=4),
        )
    assert warned.gradient_accumulation_steps == 4
    told = {effect.option: effect for effect in warned.effects()}
    assert told["gradient_accumulation_steps"].applied is False
    with pytest.raises(SettingError, match="fp16 on the CPU"):
        Accelerator(
            cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config={**CONFIG, "fp16": {"enabled": True}})
        )
    taken = Accelerator(
        cpu=True, deepspeed_plugin=DeepSpeedPlugin(hf_ds_config={**CONFIG, "bf16": {"enabled": True}})
    )
    assert taken.mixed_precision == "bf16"
    drive = DeepSpeedPlugin(offload_optimizer_device="nvme", offload_optimizer_nvme_path="/drive")
    with pytest.warns(UserWarning, match="SIGABRT"):
        Accelerator(cpu=True, deepspeed_plugin=drive)
    model = nn.Linear(2, 2)
    plan = str(taken.plan(model, torch.optim.SGD(model.parameters(), 0.1)))
    assert "ZeRO stage 3" in plan
    assert '"bf16": {"enabled": true}' in plan
    assert taken.deepspeed_plugin.is_auto("train_micro_batch_size_per_gpu")
    told = {effect.option: effect for effect in accelerator.effects()}
    assert told["gradient_accumulation_steps"].applied is not False


@pytest.mark.parametrize("variable", ["ACCELERATE_USE_DEEPSPEED", ""])
def test_without_the_package_nothing_trains(monkeypatch: pytest.MonkeyPatch, variable: str) -> None:
    """F3: asked for, it is never another strategy; the error is the line to type."""
    monkeypatch.setattr("accelerate.strategy.deepspeed.strategy.is_installed", lambda _: False)
    if variable:
        monkeypatch.setenv(variable, "true")
    with pytest.raises(MissingExtraError) as error:
        Accelerator(cpu=True, deepspeed_plugin=None if variable else DeepSpeedPlugin())
    assert error.value.fix == "pip install deepspeed"


def test_stand_ins_mean_nothing_without_deepspeed() -> None:
    model = nn.Linear(2, 2)
    with pytest.raises(PrepareError, match="DummyOptim stands for one of DeepSpeed"):
        Accelerator(cpu=True).prepare(model, DummyOptim(model.parameters()))
    with pytest.raises(PrepareError, match="DummyScheduler stands for one of DeepSpeed"):
        Accelerator(cpu=True).prepare_scheduler(DummyScheduler(None))


def test_a_stand_in_for_a_schedule_comes_back_without_deepspeed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """As in 1.x: SimpleTuner has one beside a schedule-free optimizer."""
    model = nn.Linear(2, 2)
    optimizer, accelerator = torch.optim.SGD(model.parameters()), Accelerator(cpu=True)
    dummy = DummyScheduler(optimizer)
    assert accelerator.prepare(model, dummy, optimizer)[1] is dummy
    assert "gives back a DummyScheduler as it is" in caplog.text
    accelerator.save_state(tmp_path / "c")
    accelerator.load_state(tmp_path / "c")
    with pytest.raises(PrepareError, match="a DummyScheduler cannot be prepared"):
        Accelerator(cpu=True, strict=True).prepare(model, dummy)


class Recorded:
    """Stands where an optimizer of DeepSpeed's would: it keeps what it was made with."""

    def __init__(self, groups: Any, **options: Any) -> None:
        self.groups, self.options = groups, options


def test_optimizers_of_torch_become_those_of_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    """One that DeepSpeed would compute otherwise stays."""
    from accelerate.utils.deepspeed import map_pytorch_optim_to_deepspeed

    for name in ("Adam", "Adagrad", "Lion"):
        module = ModuleType(f"deepspeed.ops.{name.lower()}")
        setattr(module, f"DeepSpeedCPU{name}", type(f"CPU{name}", (Recorded,), {}))
        monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    monkeypatch.setitem(sys.modules, "deepspeed.ops", ModuleType("deepspeed.ops"))
    layer = nn.Linear(2, 2)
    parts = [{"params": [layer.weight], "weight_decay": 0.3}, {"params": [layer.bias]}]
    adamw = map_pytorch_optim_to_deepspeed(torch.optim.AdamW(parts, lr=0.2, amsgrad=True))
    assert type(adamw).__name__ == "CPUAdam"
    assert adamw.options["adamw_mode"] is True
    assert (adamw.options["lr"], adamw.options["amsgrad"]) == (0.2, True)
    assert [group["weight_decay"] for group in adamw.groups] == [0.3, 0.01]
    assert adamw.groups[0]["params"] == [layer.weight]
    adam = map_pytorch_optim_to_deepspeed(torch.optim.Adam(layer.parameters()))
    assert adam.options["adamw_mode"] is False
    adagrad = map_pytorch_optim_to_deepspeed(torch.optim.Adagrad(layer.parameters(), eps=1e-3))
    assert (type(adagrad).__name__, adagrad.options) == (
        "CPUAdagrad",
        {"lr": 0.01, "weight_decay": 0, "eps": 1e-3},
    )
    lion = type("Lion", (torch.optim.SGD,), {})(layer.parameters(), lr=0.1)
    assert type(map_pytorch_optim_to_deepspeed(lion)).__name__ == "CPULion"
    for same in (
        torch.optim.SGD(layer.parameters(), lr=0.1),
        torch.optim.AdamW(layer.parameters(), maximize=True),
        torch.optim.Adagrad(layer.parameters(), lr_decay=0.1),
    ):
        assert map_pytorch_optim_to_deepspeed(same) is same


def test_an_engine_of_deepspeed_made_by_hand() -> None:
    """The step comes with the last backward of a window."""
    from accelerate.utils import DeepSpeedEngineWrapper

    calls: list[Any] = []

    class Engine:
        def set_gradient_accumulation_boundary(self, is_boundary: bool) -> None:
            calls.append(is_boundary)

        def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
            calls.append((loss.item(), kwargs))

        def step(self) -> None:
            calls.append("step")

        def get_global_grad_norm(self) -> Any:
            return torch.tensor(2.5) if "step" in calls else None

    wrapper = DeepSpeedEngineWrapper(Engine())
    assert wrapper.get_global_grad_norm() is None
    wrapper.backward(torch.tensor(3.0), sync_gradients=False)
    wrapper.backward(torch.tensor(4.0), retain_graph=True)
    assert calls == [False, (3.0, {}), True, (4.0, {"retain_graph": True}), "step"]
    assert wrapper.get_global_grad_norm() == 2.5


def test_the_active_plugin() -> None:
    from accelerate.utils import get_active_deepspeed_plugin

    plugins = {"student": SimpleNamespace(selected=False), "teacher": SimpleNamespace(selected=True)}
    assert get_active_deepspeed_plugin(SimpleNamespace(deepspeed_plugins=plugins)) is plugins["teacher"]
    with pytest.raises(ValueError, match="does not use DeepSpeed"):
        get_active_deepspeed_plugin(SimpleNamespace(deepspeed_plugins=None))


def test_parameters_of_a_stand_in_can_be_read_again() -> None:
    """As torch's own optimizers make lists of the parameters of each group."""
    first, second = nn.Linear(2, 2), nn.Linear(2, 1)
    groups: Any = [{"params": first.parameters(), "lr": 0.5}, {"params": second.weight}]
    for given in (groups, iter([*groups])):
        groups[0]["params"] = first.parameters()
        dummy = DummyOptim(given)
        assert dummy.params == [
            {"params": [first.weight, first.bias], "lr": 0.5},
            {"params": [second.weight]},
        ]
    params = list(first.parameters())
    assert DummyOptim(params).params is params


@pytest.mark.parametrize("size", [2, "2"])
def test_tensor_parallelism_of_deepspeed_is_refused(size: Any) -> None:
    config = {**CONFIG, "tensor_parallel": {"autotp_size": size}}
    plugin = DeepSpeedPlugin(hf_ds_config=config)
    with pytest.raises(SettingError, match=r"says tensor_parallel\.autotp_size: 2, which is not supported"):
        build_config(plugin, wanted())
    if is_installed("deepspeed"):
        with pytest.raises(SettingError, match="autotp_size"):
            Accelerator(cpu=True, deepspeed_plugin=plugin)
    config["tensor_parallel"]["autotp_size"] = 1
    build_config(DeepSpeedPlugin(hf_ds_config=config), wanted())
