"""The plugin of Megatron-LM, its engine's arguments, and how weights map; the engine is not imported."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import BatchSampler, DataLoader, IterableDataset

from accelerate.core.errors import FeatureNotBuiltError, PrepareError, SettingError, UnknownNameError
from accelerate.data.prepare import join_batches
from accelerate.strategy.megatron import model_families
from accelerate.strategy.megatron.engine_factory import build_lr_schedule
from accelerate.strategy.megatron.layout import MegatronLayout, megatron_layout
from accelerate.strategy.megatron.model_families import FAMILIES, model_family
from accelerate.strategy.megatron.plugin import check_options
from accelerate.utils import (
    MODEL_CONFIGS_TO_MEGATRON_PARSERS,
    MegatronLMDummyScheduler,
    MegatronLMPlugin,
    T5TrainStep,
    add_model_config_to_megatron_parser,
    megatron_lm,
)

# The defaults of the public package.
DEFAULTS: dict[str, Any] = {
    "tp_degree": 1,
    "pp_degree": 1,
    "use_custom_fsdp": False,
    "overlap_cpu_optimizer_d2h_h2d": False,
    "no_load_optim": False,
    "eod_mask_loss": False,
    "no_save_optim": False,
    "optimizer_cpu_offload": False,
    "use_precision_aware_optimizer": False,
    "decoder_last_pipeline_num_layers": None,
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
    "attention_backend": True,
    "expert_model_parallel_size": 1,
    "context_parallel_size": 2,
    "attention_dropout": 0.0,
    "hidden_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "expert_tensor_parallel_size": 1,
    "calculate_per_token_loss": True,
    "use_rotary_position_embeddings": True,
    "num_micro_batches": 1,
    "gradient_clipping": 1.0,
    "sequence_parallelism": False,
    "recompute_activations": False,
    "use_distributed_optimizer": False,
}
IDS = {"input_ids": torch.zeros(2, 16), "labels": torch.zeros(2, 12)}


def arguments(plugin: MegatronLMPlugin) -> dict[str, Any]:
    return plugin.megatron_lm_default_args


# --- fields, variables, defaults


def test_the_fields_are_the_promised_ones_in_their_order() -> None:
    contract = json.loads(Path("tests/laws/contract.json").read_text())
    facts = contract["modules"]["accelerate.utils.dataclasses"]["MegatronLMPlugin"]
    promised = [part.split(":")[0].strip() for part in _arguments(facts["signature"])]
    assert [field.name for field in dataclasses.fields(MegatronLMPlugin)] == promised


def _arguments(signature: str) -> list[str]:
    """``(a: int = None, b: dict[str, Any] = None)`` at its outer commas."""
    parts, depth = [""], 0
    for letter in signature[1 : signature.rindex(")")]:
        depth += (letter in "([") - (letter in ")]")
        if letter == "," and not depth:
            parts.append("")
        else:
            parts[-1] += letter
    return parts


VALUES = {
    "recompute_granularity": ("selective", "selective"),
    "recompute_method": ("block", "block"),
    "gradient_clipping": ("0.5", 0.5),
    "attention_dropout": ("0.25", 0.25),
    "hidden_dropout": ("0.125", 0.125),
}


@pytest.mark.parametrize("name", DEFAULTS)
def test_a_field_takes_its_variable_and_the_code_wins(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    default = DEFAULTS[name]
    assert getattr(MegatronLMPlugin(), name) == default
    flipped = ("false" if default else "true", not default)
    text, value = VALUES.get(name, flipped if isinstance(default, bool) else ("3", 3))
    monkeypatch.setenv(f"MEGATRON_LM_{name.upper()}", text)
    plugin = MegatronLMPlugin()
    assert getattr(plugin, name) == value
    assert plugin.explicit_value(name) == value
    code: Any = (
        (not value) if isinstance(value, bool) else {"block": "uniform", "selective": "full"}.get(value, 4)
    )
    assert getattr(MegatronLMPlugin(**{name: code}), name) == code


def test_a_default_is_not_what_somebody_asked_for() -> None:
    """The public package's default of two processes for a sequence cuts nothing here."""
    plugin = MegatronLMPlugin()
    assert plugin.context_parallel_size == 2
    assert plugin.explicit_value("context_parallel_size") is None
    check_options(plugin, "no")


def test_the_arguments_of_megatron_have_the_training_scripts_names() -> None:
    """As the public package 1.15 gives them."""
    found = arguments(MegatronLMPlugin(tp_degree=2, sequence_parallelism=True, gradient_clipping=0.5))
    assert found["tensor_model_parallel_size"] == 2
    assert found["sequence_parallel"] is True
    assert found["clip_grad"] == 0.5
    assert found["DDP_impl"] == "torch"
    assert len(found) == 36
    cases: list[dict[str, Any]] = [{"pp_degree": 2}, {"use_distributed_optimizer": True}]
    for options in cases:
        plugin = MegatronLMPlugin(**options)
        assert plugin.DDP_impl == arguments(plugin)["DDP_impl"] == "local"
    assert arguments(MegatronLMPlugin(other_megatron_args={"lr": 3}))["lr"] == 3
    assert arguments(MegatronLMPlugin(tensorboard_dir="logs"))["tensorboard_dir"] == "logs"
    with pytest.raises(FeatureNotBuiltError, match="logs of Megatron-LM's training script"):
        MegatronLMPlugin(tensorboard_dir="logs", set_all_logging_options=True)


class Stream(IterableDataset[int]):
    """Eight numbers."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(8))


class Precomputed(BatchSampler):
    """A batch sampler whose batches are chosen when it is made."""

    def __init__(self, count: int) -> None:
        super().__init__(range(count), batch_size=2, drop_last=False)
        order = list(reversed(range(count)))
        self.chosen = [order[i : i + 2] for i in range(0, count, 2)]

    def __iter__(self) -> Iterator[list[int]]:
        return iter(self.chosen)


def test_a_batch_of_a_loader_is_a_micro_batch() -> None:
    """As in the public package; a loader that does not tell its batch size stays, and the user's own too."""
    rows: Any = range(8)
    chosen = BatchSampler(rows, batch_size=2, drop_last=False)
    loaders: list[DataLoader[Any]] = [
        DataLoader(rows, batch_size=2),
        DataLoader(rows, batch_sampler=chosen),
        DataLoader(Stream(), batch_size=2),
        DataLoader(torch.arange(8), batch_size=None, sampler=chosen),  # type: ignore[arg-type]
    ]
    for loader in loaders:
        joined = join_batches(loader, 2)
        assert [each.tolist() for each in joined] == [[0, 1, 2, 3], [4, 5, 6, 7]]
        assert joined.batch_size in (4, None)
        assert len(next(iter(loader))) == 2
    assert [each.tolist() for each in join_batches(DataLoader(rows, batch_sampler=Precomputed(8)), 3)] == [
        [7, 6, 5, 4, 3, 2],
        [1, 0],
    ]
    listed = DataLoader(rows, batch_sampler=[[0, 1], [2]])
    assert join_batches(listed, 2) is listed


def test_arguments_of_precision_batches_and_optimizers() -> None:
    """As the public package 1.15 gives them."""
    plugin = MegatronLMPlugin(num_micro_batches=3)
    plugin.set_mixed_precision("bf16")
    plugin.set_training_args(4, 2)
    assert (plugin.data_parallel_size, plugin.micro_batch_size, plugin.global_batch_size) == (2, 4, 24)
    plugin.set_optimizer_type(torch.optim.AdamW([torch.ones(1)], lr=0.1, betas=(0.8, 0.9), eps=1e-6))
    found = arguments(plugin)
    assert found["bf16"] is True
    assert found["DDP_impl"] == "local"
    assert [found[f"adam_{name}"] for name in ("beta1", "beta2", "eps")] == [0.8, 0.9, 1e-6]
    assert (found["optimizer"], found["lr"], found["weight_decay"]) == ("adam", 0.1, 0.01)
    plugin.set_optimizer_type(torch.optim.SGD([torch.ones(1)], lr=0.2, momentum=0.9))
    assert (found["optimizer"], found["sgd_momentum"], found["lr"]) == ("sgd", 0.9, 0.2)
    with pytest.raises(SettingError, match="no optimizer RMSprop"):
        plugin.set_optimizer_type(torch.optim.RMSprop([torch.ones(1)]))


def test_arguments_of_a_schedule_are_counted_for_one_copy_of_the_model() -> None:
    """As the public package 1.15 gives them."""
    dummy = MegatronLMDummyScheduler(None, total_num_steps=10, warmup_num_steps=2)
    plugin = MegatronLMPlugin(train_samples=100)
    with pytest.raises(PrepareError, match="before set_training_args"):
        plugin.set_scheduler_args(dummy)
    plugin.set_training_args(4, 2)
    with pytest.warns(UserWarning, match="train_samples is ignored"):
        plugin.set_scheduler_args(dummy)
    found = arguments(plugin)
    assert (found["train_iters"], found["lr_warmup_iters"], found["train_samples"]) == (5, 1, None)
    given = MegatronLMPlugin(train_iters=7, lr_warmup_iters=3)
    given.set_training_args(4, 2)
    given.set_scheduler_args(dummy)
    assert (arguments(given)["train_iters"], arguments(given)["lr_warmup_iters"]) == (7, 3)


# --- configurations of models


def model_of(kind: str, **values: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    names = {
        "gpt2": "GPT2",
        "llama": "Llama",
        "megatron-bert": "MegatronBert",
        "t5": "T5",
        "glm4_moe": "Glm4Moe",
    }
    made = type("Some", (nn.Module,), {})()
    made.config = getattr(transformers, f"{names[kind]}Config")(vocab_size=64, **values)
    return made


@pytest.mark.parametrize(
    ("kind", "given", "lengths"),
    [
        ("gpt2", {}, {"seq_length": 16, "max_position_embeddings": 1024}),
        ("gpt2", {"seq_length": 8}, {"seq_length": 8}),
        ("gpt2", {"decoder_seq_length": 9}, {"seq_length": 9}),
        ("llama", {}, {"seq_length": 16, "max_position_embeddings": 2048}),
        ("llama", {"encoder_seq_length": 9}, {"seq_length": 16}),
        ("megatron-bert", {"encoder_seq_length": 9}, {"seq_length": 9}),
        ("t5", {}, {"encoder_seq_length": 16, "decoder_seq_length": 12, "max_position_embeddings": 1024}),
        ("t5", {"decoder_seq_length": 9}, {"encoder_seq_length": 16, "decoder_seq_length": 9}),
    ],
)
def test_lengths_are_the_plugins_or_the_batchs(kind: str, given: Any, lengths: dict[str, int]) -> None:
    """As the public package 1.15 has them; but ``seq_length`` counts where it is given, also with GPT-2."""
    plugin = MegatronLMPlugin(**given)
    plugin.set_network_size_args(model_of(kind), IDS)
    assert {name: arguments(plugin)[name] for name in lengths} == lengths
    assert arguments(plugin)["orig_vocab_size"] == 64


def test_sizes_of_models() -> None:
    plugin = MegatronLMPlugin(return_logits=True)
    plugin.set_network_size_args(model_of("gpt2", n_embd=32, n_layer=2, n_head=4))
    found = arguments(plugin)
    assert (found["hidden_size"], found["num_layers"], found["num_attention_heads"]) == (32, 2, 4)
    assert (found["seq_length"], found["model_type_name"], found["pretraining_flag"]) == (1024, "gpt", True)
    assert (found["tokenizer_type"], found["return_logits"]) == ("GPT2BPETokenizer", True)
    bert = MegatronLMPlugin()
    bert.set_network_size_args(model_of("megatron-bert", num_labels=3))
    assert (arguments(bert)["num_labels"], arguments(bert)["pretraining_flag"]) == (3, False)
    experts = MegatronLMPlugin()
    experts.set_network_size_args(model_of("glm4_moe", n_routed_experts=4, num_experts_per_tok=2))
    assert (arguments(experts)["num_experts"], arguments(experts)["moe_router_topk"]) == (4, 2)


def test_a_parser_of_ones_own() -> None:
    odd = nn.Linear(1, 1)
    odd.config = SimpleNamespace(model_type="odd")  # type: ignore[assignment]
    with pytest.raises(UnknownNameError, match="'odd'"):
        MegatronLMPlugin().set_network_size_args(odd)
    try:

        @add_model_config_to_megatron_parser("odd")
        def parse(plugin: Any, model: Any, batch: Any) -> None:
            plugin.megatron_lm_default_args["odd"] = batch

        plugin = MegatronLMPlugin()
        plugin.set_network_size_args(odd, 5)
        assert arguments(plugin)["odd"] == 5
        assert MODEL_CONFIGS_TO_MEGATRON_PARSERS["odd"] is parse
    finally:
        MODEL_CONFIGS_TO_MEGATRON_PARSERS.pop("odd", None)


# --- what is refused

REFUSALS: list[tuple[dict[str, Any], str]] = [
    ({"context_parallel_size": 2}, "inside TransformerEngine's attention"),
    ({"expert_model_parallel_size": 2}, "models with experts"),
    ({"expert_tensor_parallel_size": 2}, "models with experts"),
    ({"use_custom_fsdp": True}, "nobody has run it"),
    ({"optimizer_cpu_offload": True}, "needs TransformerEngine"),
    ({"overlap_cpu_optimizer_d2h_h2d": True}, "needs TransformerEngine"),
    ({"use_precision_aware_optimizer": True}, "needs TransformerEngine"),
    ({"num_layers_per_virtual_pipeline_stage": 2}, "nobody has run it"),
    ({"pipeline_model_parallel_split_rank": 1}, "an encoder and a decoder"),
    ({"custom_model_provider_function": print}, "by the user's names"),
    ({"custom_megatron_datasets_provider_function": print}, "Megatron-LM's repository"),
    ({"megatron_dataset_flag": True}, "Megatron-LM's own datasets"),
    ({"sequence_parallelism": True}, "without tensor parallelism"),
    ({"sequence_parallelism": True, "tp_degree": 2}, "Apex's or TransformerEngine's"),
    ({"num_micro_batches": 0}, "1 to 1000000"),
]


@pytest.mark.parametrize(("options", "words"), REFUSALS)
def test_what_megatron_cannot_do_is_refused_with_its_reason(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SettingError) as caught:
        check_options(MegatronLMPlugin(**options), "no")
    assert words in str(caught.value)
    assert caught.value.fix


@pytest.mark.parametrize("precision", ["fp16", "fp8"])
def test_precisions_that_nobody_has_run_are_refused(precision: str) -> None:
    with pytest.raises(SettingError, match="use mixed_precision='bf16' or 'no'"):
        check_options(MegatronLMPlugin(), precision)


def test_scripts_functions_refuse_and_say_what_to_do() -> None:
    for call in (
        megatron_lm.model_provider_func,
        lambda: megatron_lm.prepare_model_optimizer_scheduler(None),
        megatron_lm.MegatronLMDummyDataLoader(split="1").set_megatron_data_args,
        lambda: megatron_lm.prepare_data_loader(None, megatron_lm.MegatronLMDummyDataLoader()),
        lambda: T5TrainStep(None, None),
        lambda: megatron_lm.MegatronEngine.megatron_generate(None, torch.ones(1, 4)),  # type: ignore[arg-type]
    ):
        with pytest.raises(FeatureNotBuiltError) as caught:
            call()
        assert caught.value.fix


# --- places of processes


def test_places_follow_the_order_of_deepspeed() -> None:
    """Tensor parallel first, then copies, then stages."""
    places = [MegatronLayout(8, rank, 2, 2) for rank in range(8)]
    assert [place.tp_rank for place in places] == [0, 1] * 4
    assert [place.dp_rank for place in places] == [0, 0, 1, 1] * 2
    assert [place.pp_rank for place in places] == [0] * 4 + [1] * 4
    assert [place.share.counts_samples for place in places] == [True, False, True, False] + [False] * 4
    assert {place.share.count for place in places} == {2}


def test_degrees_that_do_not_fit_name_the_product_and_what_fits() -> None:
    world: Any = SimpleNamespace(size=6, rank=0)
    with pytest.raises(SettingError) as caught:
        megatron_layout(MegatronLMPlugin(tp_degree=2, pp_degree=2), world)
    assert "2 is 4, which does not divide 6 processes" in str(caught.value)
    assert "start 4 processes or a multiple, or use degrees whose product is one of [1, 2, 3, 6]" in str(
        caught.value
    )


# --- weights

RULES: dict[str, tuple[model_families.WeightRule, list[tuple[int, ...]]]] = {
    "the same everywhere": (model_families.WeightRule("a"), [(6,)]),
    "rows": (model_families.DimShard("a", dim=0), [(8, 3)]),
    "columns": (model_families.DimShard("a", dim=1, transposed=True), [(8, 3)]),
    "words": (model_families.VocabShardRule("a", vocab_size=7), [(7, 3)]),
    "gated": (model_families.GatedMLPShardRule("a", "b"), [(8, 3), (8, 3)]),
    "grouped": (
        model_families.FusedQKVShardRule("q", "k", "v", groups=2, heads=4),
        [(16, 3), (8, 3), (8, 3)],
    ),
    "joined": (model_families.FusedQKVShardRule("qkv", groups=4, heads=4, transposed=True), [(3, 24)]),
    "joined biases": (model_families.FusedQKVShardRule("qkv", groups=4, heads=4), [(24,)]),
}


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("name", RULES)
def test_parts_join_to_what_was_sharded(name: str, size: int) -> None:
    rule, shapes = RULES[name]
    wholes = [torch.randn(shape) for shape in shapes]
    parts = rule.shard(wholes, size)
    assert len(parts) == size
    assert len({part.shape for part in parts}) == 1
    for ours, theirs in zip(rule.join(parts), wholes, strict=True):
        assert torch.equal(ours, theirs)


def test_queries_keys_and_values_lie_group_by_group() -> None:
    """Two groups of two queries, heads of one row."""
    rule = model_families.FusedQKVShardRule("q", "k", "v", groups=2, heads=4)
    wholes = [torch.tensor([[1], [2], [3], [4]]), torch.tensor([[5], [6]]), torch.tensor([[7], [8]])]
    first, second = rule.shard(wholes, 2)
    assert first.flatten().tolist() == [1, 2, 5, 7]
    assert second.flatten().tolist() == [3, 4, 6, 8]


def on_meta(kind: str, **values: Any) -> Any:
    transformers = pytest.importorskip("transformers")
    names = {"gpt2": ("GPT2Config", "GPT2LMHeadModel"), "llama": ("LlamaConfig", "LlamaForCausalLM")}
    config, model = (getattr(transformers, name) for name in names[kind])
    small = (
        {"n_embd": 8, "n_layer": 1, "n_head": 2}
        if kind == "gpt2"
        else {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    )
    with torch.device("meta"):
        return model(config(vocab_size=16, bos_token_id=0, eos_token_id=1, **small, **values))


@pytest.mark.parametrize("kind", FAMILIES)
def test_every_weight_has_its_place(kind: str) -> None:
    model_family(on_meta(kind))


@pytest.mark.parametrize(
    ("kind", "values", "words"),
    [
        ("gpt2", {"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx=True"),
        ("gpt2", {"activation_function": "tanh"}, "activation_function='tanh'"),
        ("llama", {"hidden_act": "gelu"}, "hidden_act='gelu'"),
        (
            "llama",
            {"rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}},
            "rotary positions are linear",
        ),
    ],
)
def test_what_would_map_only_nearly_is_refused(kind: str, values: dict[str, Any], words: str) -> None:
    model = on_meta(kind, **values)
    family = model_family(model)
    with pytest.raises(PrepareError) as caught:
        _mapped(family, model.config)
    assert words in str(caught.value)


@pytest.mark.parametrize("kind", ["linear", "dynamic", "yarn", "llama3"])
@pytest.mark.parametrize("key", ["rope_type", "type"])
def test_rotary_positions_in_the_fields_of_transformers_4_count(kind: str, key: str) -> None:
    scaling = {key: kind, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
    config = SimpleNamespace(
        model_type="llama", vocab_size=16, max_position_embeddings=32, tie_word_embeddings=False,
        rope_theta=500000.0, rope_scaling=scaling | {"original_max_position_embeddings": 8192},
    )  # fmt: skip
    if kind == "llama3":
        arguments = FAMILIES["llama"].model(config)
        assert (arguments["rotary_base"], arguments["rope_scaling_factor"]) == (500000, 8.0)
        config.rope_theta, kind = 500000.5, "a base of 500000.5"
    with pytest.raises(PrepareError, match=f"rotary positions are {kind}"):
        FAMILIES["llama"].model(config)


def _mapped(family: Any, config: Any) -> Any:
    return family.transformer(config), family.model(config)


def test_a_model_with_more_than_megatron_has_is_refused() -> None:
    model = on_meta("llama")
    model.adapter = nn.Linear(2, 2)
    with pytest.raises(PrepareError, match="no plain llama language model: adapter"):
        model_family(model)


# --- schedules


@pytest.mark.parametrize(
    ("style", "expected"),
    [
        ("constant", [0.0, 0.5, 1.0, 1.0, 1.0]),
        ("linear", [0.0, 0.5, 1.0, 0.55, 0.1]),
        ("cosine", [0.0, 0.5, 1.0, 0.55, 0.1]),
    ],
)
def test_a_stand_in_becomes_a_warm_up_and_a_decay(style: str, expected: list[float]) -> None:
    """Two copies of the model: a step advances the schedule twice, and its lengths are counted alike."""
    optimizer = torch.optim.SGD([torch.ones(1)], lr=1.0)
    dummy = MegatronLMDummyScheduler(optimizer, total_num_steps=8, warmup_num_steps=4)
    with pytest.raises(PrepareError, match="only stands for a schedule"):
        dummy.step()
    of_plugin = {"lr_decay_iters": 4, "lr_warmup_iters": 2, "lr_decay_style": style, "min_lr": 0.1}
    for lengths in (dummy, MegatronLMDummyScheduler(optimizer)):  # its own; the plugin's, in optimizer steps
        optimizer.param_groups[0]["lr"] = 1.0
        optimizer.param_groups[0].pop("initial_lr", None)
        schedule = build_lr_schedule(lengths, MegatronLMPlugin(**of_plugin), 2)
        rates = []
        for _ in expected:
            rates.append(optimizer.param_groups[0]["lr"])
            optimizer.step()
            schedule.step()
            schedule.step()
        assert rates == pytest.approx(expected)


def test_an_unknown_style_is_named() -> None:
    dummy = MegatronLMDummyScheduler(torch.optim.SGD([torch.ones(1)], lr=1.0))
    with pytest.raises(UnknownNameError, match="did you mean 'linear'"):
        build_lr_schedule(dummy, MegatronLMPlugin(lr_decay_style="linaer"), 1)
