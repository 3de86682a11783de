"""Loggers, progress bars, memory retries and profiles in one process."""

from __future__ import annotations

import logging
from collections.abc import Generator

import pytest
import torch

from accelerate.core.errors import DeviceError, SettingError, UnknownNameError, WorldError
from accelerate.logging import MultiProcessAdapter, get_logger
from accelerate.utils import (
    KwargsHandler,
    ProfileKwargs,
    find_executable_batch_size,
    release_memory,
    should_reduce_batch_size,
    tqdm,
)
from tests.support.worlds import enter


@pytest.fixture
def speak_as(monkeypatch: pytest.MonkeyPatch) -> Generator[pytest.MonkeyPatch]:
    """``speak_as(rank)`` opens a fake world of four; the level of the root logger is put back."""
    level = logging.root.level
    yield lambda rank: enter(monkeypatch, size=4, rank=rank)
    logging.root.setLevel(level)


def test_records_carry_the_rank_and_the_line_of_the_caller(caplog, speak_as):
    speak_as(0)
    logger = get_logger("a.b")
    logger.warning("loss %.1f", 0.5)
    logger.warning_once("said")
    logger.log(logging.ERROR, "plain")
    assert [record.getMessage() for record in caplog.records] == [
        "[RANK 0] loss 0.5",
        "[RANK 0] said",
        "[RANK 0] plain",
    ]
    assert {record.filename for record in caplog.records} == {"test_utilities_watch.py"}
    assert {record.name for record in caplog.records} == {"a.b"}


def test_only_the_main_process_logs_unless_asked(caplog, speak_as):
    speak_as(2)
    logger = get_logger("a.c")
    logger.warning("hidden")
    logger.warning("shown", main_process_only=False)
    assert [record.getMessage() for record in caplog.records] == ["[RANK 2] shown"]


def test_a_warning_is_given_once_per_logger_and_text(caplog, speak_as):
    speak_as(0)
    logger, other = get_logger("one"), get_logger("two")
    for _ in range(3):
        logger.warning_once("same")
    logger.warning_once("other")
    other.warning_once("same")
    assert [record.name for record in caplog.records] == ["one", "one", "two"]


def test_logging_before_the_world_is_open_uses_the_launchers_rank(caplog, monkeypatch):
    for name, value in {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("MASTER_PORT", "29500")
    logger = get_logger("early")
    logger.warning("hidden")
    logger.warning("shown", main_process_only=False)
    assert caplog.messages == ["[RANK 1] shown"]
    with pytest.raises(WorldError, match="in_order"):
        logger.warning("in turn", in_order=True)


def test_logging_alone_works_without_any_state(caplog):
    get_logger("alone").warning("hi", in_order=True)
    assert caplog.messages == ["[RANK 0] hi"]
    assert caplog.records[0].filename == "test_utilities_watch.py"


def test_the_level_comes_from_the_argument_or_the_variable(monkeypatch, speak_as):
    assert get_logger("quiet", log_level="error").logger.level == logging.ERROR
    assert logging.root.level == logging.ERROR
    monkeypatch.setenv("ACCELERATE_LOG_LEVEL", "debug")
    assert get_logger("loud").logger.level == logging.DEBUG
    assert isinstance(get_logger("loud"), MultiProcessAdapter)
    with pytest.raises(UnknownNameError, match="WARNING"):
        get_logger("odd", log_level="WARNIN")


def test_a_bar_is_shown_by_one_process_of_a_machine(speak_as):
    speak_as(0)
    assert not tqdm([1, 2]).disable
    speak_as(1)
    assert list(tqdm([1, 2])) == [1, 2]
    assert tqdm([1, 2]).disable
    assert not tqdm([1, 2], main_process_only=False).disable
    with pytest.raises(SettingError, match="main_process_only=True"):
        tqdm(True, [1])


def full(text: str = "CUDA out of memory. Tried to allocate 2 GiB") -> RuntimeError:
    return RuntimeError(text)


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (full(), True),
        (torch.OutOfMemoryError("out"), True),
        (full("DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"), True),
        (full("cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. non-contiguous input"), True),
        (full("XPU out of memory"), True),
        (MemoryError(), True),
        (full("shape mismatch"), False),
        (ValueError("CUDA out of memory."), False),
        (KeyError("x"), False),
    ],
)
def test_errors_of_full_memory_are_known(error, expected):
    assert should_reduce_batch_size(error) is expected


def test_the_batch_shrinks_by_a_tenth_and_the_size_is_kept():
    tried: list[int] = []

    @find_executable_batch_size(starting_batch_size=100)
    def train(batch_size: int, extra: int) -> int:
        tried.append(batch_size)
        if batch_size > 75:
            raise full()
        return batch_size + extra

    assert train(1) == 73
    assert tried == [100, 90, 81, 72]
    assert train(extra=0) == 72
    assert tried[4:] == [72]


def test_the_reduce_function_gives_the_next_size():
    sizes = iter([5, 2])

    @find_executable_batch_size(starting_batch_size=8, reduce_batch_size_fn=lambda: next(sizes))
    def train(batch_size: int) -> int:
        if batch_size > 2:
            raise full()
        return batch_size

    assert train() == 2


def test_a_size_that_does_not_shrink_is_refused():
    @find_executable_batch_size(starting_batch_size=8, reduce_batch_size_fn=lambda: 8)
    def train(batch_size: int) -> None:
        raise full()

    with pytest.raises(SettingError, match="does not shrink"):
        train()


def test_nothing_fits_and_other_errors():
    @find_executable_batch_size(starting_batch_size=4)
    def train(batch_size: int, error: Exception) -> None:
        raise error

    with pytest.raises(ZeroDivisionError):
        train(ZeroDivisionError())
    with pytest.raises(DeviceError, match="one sample") as caught:
        train(full())
    assert isinstance(caught.value, RuntimeError)
    assert "CUDA out of memory" in str(caught.value.__cause__)
    with pytest.raises(TypeError, match=r"call train\(error: 'Exception'\)"):
        train(4, full())


@pytest.mark.parametrize("how", ["raised", "from", "during"])
def test_tensors_of_a_failed_attempt_are_gone_before_the_next(how: str):
    import weakref

    kept: list[weakref.ref[torch.Tensor]] = []

    def fill(activations: torch.Tensor) -> None:
        kept.append(weakref.ref(activations))
        raise full()

    @find_executable_batch_size(starting_batch_size=2)
    def train(batch_size: int) -> bool:
        alive = any(reference() is not None for reference in kept)
        activations = torch.ones(batch_size)
        kept.append(weakref.ref(activations))
        if batch_size == 2:
            try:
                fill(activations * 2)
            except RuntimeError as error:
                if how == "raised":
                    raise
                raise full() from (error if how == "from" else None)
        return alive

    assert train() is False


def test_release_memory_gives_as_many_nones():
    assert release_memory(torch.ones(1), object()) == [None, None]
    assert release_memory() == []


def test_profile_options_build_torchs_profiler():
    options = ProfileKwargs(activities=["CPU"], record_shapes=True)
    assert isinstance(options, KwargsHandler)
    assert options.to_kwargs() == {"activities": ["CPU"], "record_shapes": True}
    seen: list[int] = []
    options.schedule_option = {"wait": 0, "warmup": 1, "active": 1, "repeat": 1}
    options.on_trace_ready = lambda profiler: seen.append(len(profiler.key_averages()))
    with options.build() as profiler:
        for _ in range(3):
            torch.ones(4).sum()
            profiler.step()
    assert len(seen) == 1
    assert seen[0] > 0


def test_an_unknown_activity_is_named_and_an_absent_one_announced():
    with pytest.raises(UnknownNameError, match="did you mean 'cuda'"):
        ProfileKwargs(activities=["cude"]).build()
    if not torch.cuda.is_available():
        with pytest.warns(UserWarning, match="'cuda'"):
            ProfileKwargs(activities=["cpu", "cuda"]).build()
