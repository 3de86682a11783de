"""The wizard of ``accelerate config``: every path through it, on a terminal that the test types into."""

from __future__ import annotations

import dataclasses
import io
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from prompt_toolkit.application import create_app_session
from prompt_toolkit.input import create_pipe_input
from prompt_toolkit.output import DummyOutput

from accelerate import device as devices
from accelerate.cli.options import SCRIPT_SETTINGS
from accelerate.cli.wizard import questions, terminal
from accelerate.cli.wizard.questions import WizardAnswers, WizardQuestion
from accelerate.commands.config.config_args import ClusterConfig, SageMakerConfig, load_config_from_file
from accelerate.core.setting import Setting, declared_settings
from accelerate.launch.launch_request import read_request
from accelerate.launch.launcher import check_request
from tests.support.command import run
from tests.support.devices import pretend_devices
from tests.support.environment import ROOT

DOWN, LEFT, ENTER, CTRL_C = "\x1b[B", "\x1b[D", "\r", "\x03"
CPUS = {"machine": "MULTI_CPU"}


class Terminal(io.StringIO):
    """A stdin that looks like a terminal; what is typed comes through the pipe."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the file goes, on a machine without accelerators."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    monkeypatch.delenv("ACCELERATE_CONFIG_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "stdin", Terminal())
    pretend_devices(monkeypatch, "cpu", 0)
    return tmp_path / "job.yaml"


def typed(keys: str, act: Callable[[], Any]) -> Any:
    """What ``act`` returns when these keys are typed."""
    with create_pipe_input() as pipe, create_app_session(input=pipe, output=DummyOutput()):
        pipe.send_text(keys)
        return act()


def config(place: Path, keys: str) -> int:
    """The exit code of ``accelerate config`` with these keys typed."""
    code: int = typed(keys, lambda: run(["config", "--config_file", str(place)]))
    return code


def answered(monkeypatch: pytest.MonkeyPatch, choices: dict[str, Any]) -> list[WizardQuestion]:
    """Answers questions instead of typing. The questions, as they are asked.

    ``choices`` tells, by name of the question, the text or the value that the option writes; a gate is
    opened by True. Other questions get what is offered, and the last one "yes".
    """
    seen: list[WizardQuestion] = []

    def ask(question: WizardQuestion, offered: Any) -> Any:
        seen.append(question)
        wanted = choices.get(question.name)
        if wanted is None or not question.options:
            return offered if wanted is None else wanted
        if question.name.startswith("gate"):
            return 1
        return next(n for n, option in enumerate(question.options) if wanted in option.writes.values())

    monkeypatch.setattr(terminal, "ask_question", ask)
    return seen


def written(path: Path) -> dict[str, Any]:
    """What the file says; it launches, and programs of 1.x read it too."""
    check_request(read_request({"config_file": str(path), "module": True}, ("train",), SCRIPT_SETTINGS))
    load_config_from_file(str(path))
    found: dict[str, Any] = yaml.safe_load(path.read_text())
    return found


def list_questions(place: Path, choices: dict[str, Any] | None = None) -> list[WizardQuestion]:
    """The questions that these answers lead to."""
    with pytest.MonkeyPatch.context() as patch:
        seen = answered(patch, choices or {})
        before = yaml.safe_load(place.read_text()) if place.exists() else {}
        terminal.ask_questions(questions.ask_everything, before, {})
    return seen


# ---------------------------------------------------------------- typed


def test_enter_alone_writes_a_file_for_one_process(place: Path) -> None:
    assert config(place, ENTER * 20) == 0
    assert (
        written(place).items()
        >= {
            "compute_environment": "LOCAL_MACHINE",
            "distributed_type": "NO",
            "dynamo_config": {"dynamo_backend": "NO"},
            "mixed_precision": "no",
            "num_machines": 1,
            "num_processes": 1,
            "use_cpu": False,
        }.items()
    )


def test_arrow_keys_choose_and_text_is_typed(place: Path) -> None:
    """Several processes on the CPU; the number offered is replaced."""
    keys = ENTER + DOWN * 2 + ENTER
    for question in list_questions(place, CPUS)[2:]:
        keys += "\x7f3" + ENTER if question.name == "num_processes" else ENTER
    assert config(place, keys + ENTER) == 0
    told = written(place)
    assert (told["distributed_type"], told["use_cpu"], told["num_processes"]) == ("MULTI_CPU", True, 3)


def test_a_wrong_answer_is_refused_as_it_is_typed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The line stays until it is right: zero processes, a word, a range that ends before it begins."""
    rows = {row.name: row for cls in questions.all_classes() for row in declared_settings(cls)}

    def ask(name: str, keys: str) -> Any:
        question = questions.question_of(rows[name], WizardAnswers({}))
        return typed(keys, lambda: terminal.ask_question(question, ""))

    assert ask("num_processes", "0\r\x7f4\r") == "4"
    assert ask("num_processes", "many\r\x15" + "4\r") == "4"
    assert ask("main_process_port", "70000\r\x7f\r") == "7000"
    assert ask("num_machines", "2:1\r\x15" + "1:2\r") == "1:2"
    told: list[str] = []
    monkeypatch.setattr(terminal, "print_plain", lambda text, style="": told.append(" ".join(text.split())))
    assert ask("num_machines", "1abc\r\x15" + "-3\r\x15" + "2\r") == "2"
    rule = "but num_machines is a whole number (1 to 1000000) or text as 1:4, the fewest first, both in that"
    assert [text.partition(" range - ")[0] for text in told] == [
        f"the answer is the text '1abc', {rule}",
        f"the answer is -3, {rule}",
    ]


def test_ctrl_c_writes_nothing_and_ends_with_130(place: Path) -> None:
    assert config(place, ENTER * 3 + CTRL_C) == 130
    assert list(place.parent.iterdir()) == []


def test_an_end_of_input_writes_nothing(place: Path) -> None:
    assert config(place, ENTER + DOWN * 2 + ENTER + "\x7f\x04") == 130
    assert list(place.parent.iterdir()) == []


def test_thrown_away_leaves_the_old_file(place: Path) -> None:
    place.write_text("num_processes: 7  # mine\n")
    asked = len(list_questions(place))
    assert config(place, ENTER * asked + DOWN * 2 + ENTER) == 0
    assert place.read_text() == "num_processes: 7  # mine\n"


def test_an_answer_is_changed_before_writing(place: Path) -> None:
    """The second question becomes another answer; those that depend on it are asked now."""
    asked = len(list_questions(place))
    change = DOWN + ENTER + DOWN + ENTER  # "change an answer", the second one
    assert config(place, ENTER * asked + change + DOWN * 2 + ENTER * 20) == 0
    told = written(place)
    assert (told["distributed_type"], told["num_processes"]) == ("MULTI_CPU", 2)


def test_a_step_back_asks_the_question_before_again(place: Path) -> None:
    """The left arrow, also at the first question and at the last one; other answers stay."""
    asked = len(list_questions(place, CPUS))
    keys = LEFT + ENTER + ENTER + LEFT + DOWN * 2 + ENTER  # one process on a device, no: several on the CPU
    assert config(place, keys + ENTER * (asked - 2) + LEFT + DOWN + ENTER * 2) == 0
    told = written(place)
    assert (told["distributed_type"], told["num_processes"]) == ("MULTI_CPU", 2)
    last = list_questions(place, CPUS)[-1]
    assert last.name == "mixed_precision"
    assert told["mixed_precision"] != "no"


def test_compilers_are_those_that_are_declared(place: Path) -> None:
    question = next(each for each in list_questions(place) if each.name == "dynamo_backend")
    assert question.setting is not None
    written = [value for option in question.options for value in option.writes.values()]
    assert written == list(question.setting.choices)
    assert {"NO", "INDUCTOR"} <= {*written}


def test_layers_by_class_are_offered_first_for_fsdp(place: Path) -> None:
    seen = list_questions(place, CPUS | {"engine": "FSDP"})
    policy = next(each for each in seen if each.name == "fsdp_auto_wrap_policy")
    assert policy.options[policy.default].label == "TRANSFORMER_BASED_WRAP"


def test_devices_are_those_of_this_machine_then_cuda_then_others(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here = next(each for each in devices.accelerators() if each.type == "xpu")
    monkeypatch.setattr(devices, "probe_devices", lambda machine=None: (here, 2))
    options = next(each for each in list_questions(place) if each.name == "machine").options
    kinds = [str(option.writes[("distributed_type",)]) for option in options]
    assert kinds[:5] == ["MULTI_XPU", "NO", "NO", "MULTI_CPU", "MULTI_GPU"]
    assert {"MULTI_NPU", "XLA"} <= set(kinds[5:])


def test_without_a_terminal_it_says_what_to_type(
    place: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO())
    assert run(["config"]) == 2
    told = capsys.readouterr().err
    assert "--set" in told
    assert "config default" in told


# ---------------------------------------------------------------- every path


def go(
    monkeypatch: pytest.MonkeyPatch, place: Path, choices: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    """The file that these answers write, and the names of the questions."""
    seen = answered(monkeypatch, choices)
    assert config(place, ENTER) == 0
    return written(place), [question.name for question in seen]


def test_several_machines_are_asked_about_only_if_there_are_several(
    monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    answers = {"num_machines": "2", "machine_rank": "1", "main_process_ip": "10.0.0.1"}
    more = {"main_process_port": "29500", "num_processes": "4"}
    told, _ = go(monkeypatch, place, CPUS | answers | more)
    assert {name: str(told[name]) for name in answers | more} == answers | more
    _, names = go(monkeypatch, place.with_name("alone.yaml"), CPUS)
    assert "num_machines" in names
    assert not {"machine_rank", "main_process_ip", "main_process_port"} & set(names)


def test_compilation_asks_more_only_with_a_backend(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    told, _ = go(monkeypatch, place, {"dynamo_backend": "INDUCTOR", "dynamo_mode": "max-autotune"})
    assert told["dynamo_config"] == {
        "dynamo_backend": "INDUCTOR",
        "dynamo_mode": "max-autotune",
        "dynamo_use_fullgraph": False,
        "dynamo_use_regional_compilation": False,
    }
    _, names = go(monkeypatch, place.with_name("no.yaml"), {})
    assert "dynamo_mode" not in names


ENGINES = [kind for cls in questions.all_classes() if (kind := getattr(cls, "__distributed_type__", ""))]
GATES = sorted({
    f"gate {cls.__section__}"
    for cls in questions.all_classes()
    if getattr(cls, "__section__", "") and questions.asked_settings(cls) and not hasattr(cls, "__when__")
})  # fmt: skip


@pytest.mark.parametrize("engine", ENGINES)
def test_every_way_of_training_has_a_page_and_its_file_launches(
    monkeypatch: pytest.MonkeyPatch, place: Path, engine: str
) -> None:
    told, names = go(monkeypatch, place, CPUS | {"engine": engine})
    assert (told["distributed_type"], told["use_cpu"], told["num_processes"]) == (engine, True, 2)
    assert names.index("engine") < names.index("num_processes") < names.index("mixed_precision")
    page = names[names.index("engine") + 1 : names.index("num_processes")]
    assert page, "it has a page of its own"


def test_a_page_of_options_asks_what_depends_on_an_answer(
    monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    choices = {"engine": "FSDP", "fsdp_version": 2, "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP"}
    told, names = go(monkeypatch, place, CPUS | choices | {"fsdp_min_num_params": "1000"})
    assert told["fsdp_config"] == {
        "fsdp_auto_wrap_policy": "SIZE_BASED_WRAP",
        "fsdp_min_num_params": 1000,
        "fsdp_version": 2,
    }
    assert "fsdp_transformer_layer_cls_to_wrap" not in names


def test_a_question_ends_with_its_key_and_default(place: Path) -> None:
    """Documentation and files speak of the key, so a reader can look it up."""
    asked = {question.name: question for question in list_questions(place, CPUS | {"engine": "FSDP"})}
    offload = asked["fsdp_offload_params"]
    assert offload.text == "CPU offload of parameters? [fsdp_offload_params] (default: no)"
    assert [option.label for option in offload.options] == ["default: no", "no", "yes"]
    for question in asked.values():
        if question.setting is not None:
            assert f" [{question.name}]" in question.text


def test_fsdp_wraps_transformer_layers_unless_told_otherwise(place: Path) -> None:
    """A new file is offered what shards; Enter on an old one keeps that it says nothing."""
    choices = CPUS | {"engine": "FSDP"}

    def offer() -> dict[Any, Any]:
        policy = next(q for q in list_questions(place, choices) if q.name == "fsdp_auto_wrap_policy")
        return dict(policy.options[policy.default].writes)

    key = ("fsdp_config", "fsdp_auto_wrap_policy")
    assert offer() == {key: "TRANSFORMER_BASED_WRAP"}
    place.write_text("distributed_type: FSDP\nnum_processes: 2\nfsdp_config:\n  fsdp_version: 2\n")
    assert offer() == {key: None}


def test_devices_of_other_machines_begin_with_cuda(place: Path) -> None:
    machine = next(question for question in list_questions(place) if question.name == "machine")
    labels = [option.label for option in machine.options]
    several = [label for label in labels if label.startswith("several") and "CPU" not in label]
    assert several[0] == "several processes, one cuda device each"
    assert labels.index("several processes, on the CPU") < labels.index(several[0])


@pytest.mark.parametrize("gate", GATES)
def test_every_other_page_opens_behind_its_question(
    monkeypatch: pytest.MonkeyPatch, place: Path, gate: str
) -> None:
    closed = [question.name for question in list_questions(place, CPUS)]
    _, names = go(monkeypatch, place, CPUS | {gate: True})
    assert set(closed) < set(names) or gate not in closed


def test_a_job_on_sagemaker(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    from accelerate.commands.config.sagemaker import get_sagemaker_input

    choices = {
        "compute_environment": questions.SAGEMAKER,
        "distributed_type": "DATA_PARALLEL",
        "ec2_instance_type": "ml.p3.16xlarge",
        "iam_role_name": "trainer",
        "num_machines": "2",
        "mixed_precision": "fp16",
    }
    told, names = go(monkeypatch, place, choices)
    assert told.items() >= (choices | {"num_machines": 2}).items()
    assert "machine" not in names
    found = get_sagemaker_input()
    assert isinstance(found, SageMakerConfig)
    assert (found.ec2_instance_type, found.num_machines) == ("ml.p3.16xlarge", 2)


def test_devices_found_here_come_first(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    pretend_devices(monkeypatch, "cuda", 4)
    told, _ = go(monkeypatch, place, {})
    assert (told["distributed_type"], told["num_processes"], told["use_cpu"]) == ("MULTI_GPU", 4, False)


def test_every_setting_with_a_question_is_reached(place: Path) -> None:
    """Whatever declares a question is asked on some path, so none is forgotten."""
    rows = [row for cls in questions.all_classes() for row in questions.asked_settings(cls)]
    by_name = {row.name: row for row in rows}
    reached: set[str] = set()
    for choices in leading(by_name):
        reached |= {question.name for question in list_questions(place, choices)}
    assert by_name.keys() - reached == {"use_cpu"}  # that follows from the devices


def leading(rows: dict[str, Setting]) -> Iterator[dict[str, Any]]:
    """Answers that lead to every setting: the devices, the way of training, and what it depends on."""
    common = {"num_machines": "2"} | dict.fromkeys(GATES, True)
    kinds = {device.distributed_type for device in devices.accelerators()}
    ways = [{"machine": kind} for kind in ("MULTI_CPU", *kinds)]
    ways += [{"compute_environment": questions.SAGEMAKER}, CPUS | {"mixed_precision": "fp8"}]
    ways += [CPUS | {"engine": engine} for engine in ENGINES]
    needs = [dict(needed(row, rows)) for row in rows.values()]
    distinct = {tuple(sorted(need.items(), key=str)): need for need in needs}
    for way in ways:
        yield from (common | way | need for need in distinct.values())


def needed(row: Setting, rows: dict[str, Setting]) -> Iterator[tuple[str, Any]]:
    """The answers by which a setting is asked about, and those by which these are."""
    for name, allowed in row.when.items():
        if isinstance(allowed, tuple) and None not in allowed:
            yield from needed(rows[name], rows)
            yield name, allowed[0]


# ---------------------------------------------------------------- a file that is there

TWO_MACHINES = """
    num_machines: 2
    num_processes: 16
    machine_rank: 1
    main_process_ip: 10.0.0.1
    main_process_port: 29500
    mixed_precision: bf16
"""
FILES = {
    "one process on the CPU": "distributed_type: 'NO'\nuse_cpu: true\nnum_processes: 1\n",
    "one process, many said": "distributed_type: 'NO'\nuse_cpu: false\nnum_processes: 8\n",
    "processes on the CPU": "# mine\nlog_dir: logs\ndistributed_type: MULTI_CPU\nuse_cpu: true\n"
    "num_processes: 5",
    "nothing but a number": "num_processes: 7  # mine\n",
    "GPUs": "distributed_type: MULTI_GPU\ngpu_ids: 0,2\ndowncast_bf16: 'no'\n" + TWO_MACHINES,
    "FSDP": "distributed_type: FSDP\nrdzv_backend: static\nsame_network: true\n" + TWO_MACHINES
    + "    fsdp_config:\n"
    "      fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n"
    "      fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer\n"
    "      fsdp_version: 2\n      fsdp_offload_params: false\n      fsdp_reshard_after_forward: true\n",
    "FSDP, no page": "distributed_type: FSDP\nnum_processes: 2\n",
    "FSDP on the CPU": "distributed_type: FSDP\nnum_processes: 2\nuse_cpu: true\n"
    "fsdp_config: {fsdp_version: 1}",
    "DeepSpeed": "distributed_type: DEEPSPEED\n" + TWO_MACHINES + "    deepspeed_config:\n"
    "      deepspeed_multinode_launcher: standard\n      zero_stage: 3\n      offload_param_device: cpu\n"
    "      zero3_init_flag: true\n      gradient_accumulation_steps: 4\n",
    "DeepSpeed by a file": "distributed_type: DEEPSPEED\nnum_processes: 2\ndeepspeed_config:\n"
    "  deepspeed_config_file: zero.json\n  zero3_init_flag: false\n",
    "Megatron-LM": "distributed_type: MEGATRON_LM\nnum_processes: 4\nmegatron_lm_config:\n"
    "  megatron_lm_tp_degree: 2\n  megatron_lm_pp_degree: 2\n  megatron_lm_gradient_clipping: 1.0\n",
    "parallelism": "distributed_type: FSDP\nnum_processes: 8\nfsdp_config: {fsdp_version: 2}\n"
    "parallelism_config:\n  parallelism_config_dp_shard_size: 4\n  parallelism_config_tp_size: 2\n",
    "MPI": "distributed_type: MULTI_CPU\nuse_cpu: true\nnum_processes: 4\nnum_machines: 2\n"
    "mpirun_config:\n  mpirun_hostfile: hosts\n  mpirun_ccl: 1\n",
    "TPU": "distributed_type: XLA\nnum_processes: 8\ntpu_use_cluster: false\ndowncast_bf16: 'no'\n"
    "main_training_function: main\ntpu_env: []\n",
    "compiled": "distributed_type: MULTI_GPU\nnum_processes: 2\ndynamo_config:\n"
    "  dynamo_backend: ONNXRT\n  dynamo_mode: max-autotune\n",
    "fp8": "distributed_type: MULTI_GPU\nnum_processes: 2\nmixed_precision: fp8\n"
    "fp8_config:\n  backend: AO\n",
    "elastic": "distributed_type: MULTI_GPU\nnum_processes: 8\nnum_machines: '1:2'\nmax_restarts: 3\n",
    "SageMaker": "compute_environment: AMAZON_SAGEMAKER\ndistributed_type: DATA_PARALLEL\n"
    "ec2_instance_type: ml.p3.16xlarge\niam_role_name: trainer\nnum_machines: 2\nmixed_precision: fp16\n",
    **{
        f"examples/configs/{path.name}": path.read_text(encoding="utf-8")
        for path in sorted((ROOT / "examples/configs").glob("*.yaml"))
    },
}  # fmt: skip


@pytest.mark.parametrize("kind", FILES)
def test_enter_alone_changes_nothing(monkeypatch: pytest.MonkeyPatch, place: Path, kind: str) -> None:
    """G19."""
    text = FILES[kind].replace("\n    ", "\n")
    place.write_text(text)
    (place.parent / "zero.json").write_text("{}")
    seen = answered(monkeypatch, {})
    assert config(place, ENTER) == 0
    assert place.read_text() == text
    names = {path.name for path in place.parent.iterdir()}
    assert names - {"zero.json"} == {place.name}, "and there is no copy"
    assert len(seen) > 5
    # One other answer changes one key.
    answered(monkeypatch, {"mixed_precision": "fp16" if "fp16" not in text else "no"})
    assert config(place, ENTER) == 0
    before, after = yaml.safe_load(text), yaml.safe_load(place.read_text())
    assert before.keys() <= after.keys()
    assert {key for key in after if before.get(key) != after[key]} == {"mixed_precision"}


def test_what_a_launch_would_refuse_is_said_before_the_file_is_written(
    monkeypatch: pytest.MonkeyPatch, place: Path
) -> None:
    """And the answer that causes it is offered to be changed."""
    two = {"num_machines": "2", "machine_rank": "0"}
    cases = {
        "num_processes": two | {"num_machines": "12", "num_processes": "2", "main_process_ip": "10.0.0.1"},
        "main_process_ip": two | {"num_processes": "2"},
        "deepspeed_hostfile": two | {"num_processes": "2", "engine": "DEEPSPEED"},
    }
    for name, choices in cases.items():
        said: list[str] = []
        offers: list[str] = []

        # An address can be a flag, and a hostfile lie on another machine; the numbers are wrong anywhere.
        may_write = name != "num_processes"

        def select(
            text: str,
            labels: list[str],
            offered: int = 0,
            closed: Any = (),
            *_: Any,
            offers: Any = offers,
            may_write: bool = may_write,
        ) -> int:
            offers.append(labels[offered])
            assert (0 in closed) == (text == "Write this file?" and not may_write)
            return offered if text == "Which one?" else 1 if len(offers) == 1 else 2

        answered(monkeypatch, CPUS | choices)
        monkeypatch.setattr(terminal, "print_plain", lambda text, style="", said=said: said.append(text))
        monkeypatch.setattr(terminal, "_select_option", select)
        assert terminal.run_wizard(place, {}) is None
        assert "would refuse this file here" in said[-1], name
        assert name in said[-1], said[-1]
        question = next(q for q in list_questions(place, CPUS | choices) if q.name == name)
        assert offers[1].startswith(question.text)


def test_what_an_answer_makes_void_goes_with_it(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    """The page of the way of training that was chosen before, and what only several machines need."""
    place.write_text("log_dir: logs\n" + FILES["FSDP"].replace("\n    ", "\n").strip())
    answered(monkeypatch, {"engine": "DEEPSPEED", "zero_stage": 3})
    assert config(place, ENTER) == 0
    told = yaml.safe_load(place.read_text())
    assert told["distributed_type"] == "DEEPSPEED"
    assert "fsdp_config" not in told
    assert told["deepspeed_config"]["zero_stage"] == 3
    assert (told["num_machines"], told["main_process_ip"], told["log_dir"]) == (2, "10.0.0.1", "logs")
    answered(monkeypatch, {"num_machines": "1", "num_processes": "8"})
    assert config(place, ENTER) == 0
    told = written(place)
    assert (told["num_machines"], told["num_processes"]) == (1, 8)
    assert not {"machine_rank", "main_process_ip", "main_process_port"} & told.keys()


def test_what_is_asked_has_its_place_in_the_classes_of_1_x() -> None:
    """Programs that load the file by ``load_config_from_file`` find every answer."""
    fields = {item.name for kind in (ClusterConfig, SageMakerConfig) for item in dataclasses.fields(kind)}
    asked = {
        questions.setting_path(row)[0]
        for cls in questions.all_classes()
        for row in questions.asked_settings(cls)
    }
    assert asked - fields == set()


# ---------------------------------------------------------------- the functions of 1.x


def test_the_functions_of_1_x_return_what_was_answered(monkeypatch: pytest.MonkeyPatch, place: Path) -> None:
    from accelerate.commands.config.cluster import get_cluster_input
    from accelerate.commands.config.config import get_user_input

    answered(monkeypatch, CPUS | {"mixed_precision": "bf16"})
    for found in (get_cluster_input(), get_user_input()):
        assert isinstance(found, ClusterConfig)
        assert (found.distributed_type, found.num_processes) == ("MULTI_CPU", 2)
        assert (found.mixed_precision, found.use_cpu) == ("bf16", True)
    assert not place.exists()


def test_the_parser_of_1_x(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from accelerate.commands.config import get_config_parser
    from accelerate.commands.config.update import update_config

    parser = get_config_parser()
    path = tmp_path / "basic.yaml"
    args = parser.parse_args(["default", "--config_file", str(path), "--mixed_precision", "bf16"])
    assert args.subcommand == "default"
    args.func(args)
    assert capsys.readouterr().out == f"accelerate configuration saved at {path}\n"
    assert yaml.safe_load(path.read_text())["mixed_precision"] == "bf16"
    path.write_text("distributed_type: 'NO'\nfp16: true\n")
    args = parser.parse_args(["update", "--config_file", str(path)])
    args.func(args)
    assert yaml.safe_load(path.read_text())["mixed_precision"] == "fp16"
    assert update_config(args) == str(path)
    assert parser.parse_args([]).subcommand is None
