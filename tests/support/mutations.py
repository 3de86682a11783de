"""Proves that the tests find mistakes: makes some in the source, one after the other, and looks.

    python -m tests.support.mutations                  # all of them
    python -m tests.support.mutations items commit     # these alone

Run it from the root of the repository. The files are copied to a temporary folder, and only the copy is
changed. First the tests that are to find the mutations must pass on it as it is. Then each mutation is
written into its file, its tests run, and the file is put back. The result is a table. The exit code is 1 if
a mutation was not found, and 2 if something else went wrong.
"""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = Path("src/accelerate")
COPIED = (
    *("src", "tests", "examples", "docs", "benchmarks"),
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "pyproject.toml", "Makefile"),
)
LIMIT = 170.0  # seconds of a run with a mutation
LIMIT_PLAIN = 900.0  # seconds of the run without one, which has the tests of all
GRACE = 10.0  # seconds that a run has to end by itself, with all it has started


@dataclass(frozen=True)
class Mutation:
    """A small mistake, and the tests that find it.

    Attributes:
        name: what the command line calls it.
        room: the part of the package that it is in.
        mistake: what is wrong then, for people.
        file: below ``src/accelerate``.
        old: what stands there, exactly once.
        new: what takes its place.
        tests: files of tests, or single ones (``file::test``), as pytest takes them.
        hangs: a run that does not end counts as found.
    """

    name: str
    room: str
    mistake: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    hangs: bool = False


@dataclass(frozen=True)
class Finding:
    """What became of one mutation.

    Attributes:
        mutation: which one.
        result: ``"found"``, ``"NOT found"`` or what else went wrong.
        test: the test that failed.
        seconds: how long it took.
        output: what pytest said.
    """

    mutation: Mutation
    result: str
    test: str
    seconds: float
    output: str


MUTATIONS = (
    Mutation(
        name="settings",
        room="core: settings",
        mistake="a flag wins over what the script says in its code",
        file="core/setting.py",
        old='        "code": code or {},\n        "flag": flags or {},\n',
        new='        "flag": flags or {},\n        "code": code or {},\n',
        tests=("tests/null/test_core_setting.py::test_the_documented_source_wins_in_any_order",),
    ),
    Mutation(
        name="rng",
        room="world: random numbers",
        mistake="the state of the accelerator's generator is not restored",
        file="world/rng.py",
        old="device.set_rng_state_all for device in _all_devices()",
        new="device.set_rng_state_all for device in _all_devices()[:1]",
        tests=("tests/null/test_rng.py",),
    ),
    Mutation(
        name="control_channel",
        room="world: control channel",
        mistake="ranks that do different operations are not told",
        file="world/control_channel.py",
        old="if codes != {message.code} or set(kinds) != {message.kind}:",
        new="if set(kinds) != {message.kind}:",
        tests=(
            "tests/cpu/test_collective_errors.py::test_collectives_in_another_order_are_detected_at_once",
        ),
    ),
    Mutation(
        name="statuses",
        room="world: statuses of the ranks",
        mistake="a rank that waits reads eight times as many statuses",
        file="world/peers.py",
        old="first, count = self.rank + self._polls * LARGE_WORLD, LARGE_WORLD",
        new="first, count = self.rank + self._polls * LARGE_WORLD, 8 * LARGE_WORLD",
        tests=("tests/null/test_store_load.py::test_ranks_that_wait_for_a_slow_one_do_not_read_all_others",),
    ),
    Mutation(
        name="ragged",
        room="world: collectives",
        mistake="what fills up the shorter ranks stays in a large gather",
        file="world/collective.py",
        old="if min(lengths) == longest:",
        new="if min(lengths) <= longest:",
        tests=("tests/cpu/test_collectives.py::test_large_values_follow_their_shapes",),
    ),
    Mutation(
        name="stop",
        room="world: preemption",
        mistake="all stop where the furthest rank has passed already",
        file="world/preemption.py",
        old="max(int(tokens[0]) for tokens in counts) + 1}",
        new="max(int(tokens[0]) for tokens in counts)}",
        tests=("tests/null/test_preemption_consensus.py::test_all_stop_at_the_same_boundary",),
    ),
    Mutation(
        name="fillers",
        room="data: sharding",
        mistake="fillers of the last step count as real samples",
        file="data/sample_order.py",
        old="real = min(max(rest - begin, 0), rank_samples)",
        new="real = rank_samples",
        tests=("tests/null/test_resume.py::test_the_cut_of_a_known_order_is_that_of_any_sampler",),
    ),
    Mutation(
        name="resume",
        room="data: resume",
        mistake="generators of a loader are not put back",
        file="data/position.py",
        old='        restore_generators(generators, state["now"])\n',
        new="",
        tests=("tests/null/test_resume.py::test_one_process_goes_on",),
    ),
    Mutation(
        name="dispatch",
        room="data: dispatch",
        mistake="rank 0 does not know its last batch",
        file="data/dispatch.py",
        old="yield fetched._replace(last=not rank0_batches)",
        new="yield fetched",
        tests=(
            "tests/cpu/test_accumulation_windows_ranks.py::test_gradients_travel_once_per_window_and_are_its_mean",
        ),
    ),
    Mutation(
        name="scaler",
        room="precision: fp16",
        mistake="the loss scale is updated between the steps of two optimizers",
        file="precision/loss_scaling.py",
        old="if not _is_update_due(self):",
        new="_update_scale(self, self.unscaled)\n        if not _is_update_due(self):",
        tests=(
            "tests/null/test_accelerator.py::test_reading_the_loss_scale_between_two_steps_changes_no_step",
        ),
    ),
    Mutation(
        name="commit",
        room="checkpoint: commit",
        mistake="the folder of a checkpoint is not flushed before it is renamed",
        file="checkpoint/save.py",
        old='for name in records} | {"."}:',
        new='for name in records} - {"."}:',
        tests=("tests/cpu/test_crash.py::test_nothing_is_committed_before_it_is_on_the_disk",),
    ),
    Mutation(
        name="digest",
        room="checkpoint: digests",
        mistake="the largest file is not compared with the manifest",
        file="checkpoint/load.py",
        old="by_size[ranks.local_rank :: ranks.local_size]",
        new="by_size[ranks.local_rank + 1 :: ranks.local_size]",
        tests=(
            "tests/null/test_checkpoint_state.py"
            "::test_a_changed_number_of_the_weights_is_found_whichever_file_is_the_largest",
        ),
    ),
    Mutation(
        name="placement",
        room="offload: placement",
        mistake="no room is kept for the largest block that is stored already",
        file="offload/placement_planner.py",
        old="max(largest_offloaded, self.largest_from[number + 1])",
        new="self.largest_from[number + 1]",
        tests=("tests/null/test_placement_plans.py",),
    ),
    Mutation(
        name="fsdp",
        room="strategy: fsdp",
        mistake="processes keep their own values instead of those of rank 0",
        file="strategy/sharding/fsdp2_sharder.py",
        old="            broadcast_over_mesh(local, self.mesh)\n",
        new="",
        tests=("tests/cpu/test_fsdp2.py::test_only_rank_0_needs_the_weights",),
    ),
    Mutation(
        name="tensor",
        room="strategy: tensor parallel",
        mistake="heads of keys and values are cut in the middle",
        file="strategy/parallelism/tensor/tp_plan.py",
        old='_HEADS = ("num_attention_heads", "num_key_value_heads")',
        new='_HEADS = ("num_attention_heads",)',
        tests=("tests/cpu/test_tensor_parallel.py::test_models_of_transformers_bring_their_plan",),
    ),
    Mutation(
        name="pipeline",
        room="strategy: pipeline",
        mistake="gradients of earlier micro-batches are lost",
        file="strategy/parallelism/pipeline/one_f_one_b.py",
        old="                p.grad = old\n",
        new="                p.grad = None\n",
        tests=("tests/cpu/test_pipeline_training.py::test_two_stages_train_like_one_process",),
    ),
    Mutation(
        name="ddp",
        room="strategy: ddp",
        mistake="gradients are reduced in every micro-batch",
        file="strategy/ddp.py",
        old="return NO_CONTEXT if sync else _no_sync(models)",
        new="return NO_CONTEXT",
        tests=(
            "tests/cpu/test_accumulation_windows_ranks.py::test_gradients_travel_once_per_window_and_are_its_mean",
        ),
    ),
    Mutation(
        name="localsgd",
        room="outer: LocalSGD",
        mistake="16-bit weights are added up in 16 bits",
        file="outer/local_training.py",
        old="wire = torch.float32 if bucket[0].dtype in _HALVES else bucket[0].dtype",
        new="wire = bucket[0].dtype",
        tests=("tests/cpu/test_local_sgd.py::test_half_precision_weights_are_averaged_in_float32",),
    ),
    Mutation(
        name="accumulate",
        room="facade: accumulation",
        mistake="the last batch of a loader does not close its window",
        file="facade/gradient_state.py",
        old="loader.micro_steps >= loader.expected_micro_steps",
        new="loader.micro_steps > loader.expected_micro_steps",
        tests=("tests/null/test_training_loop.py",),
    ),
    Mutation(
        name="items",
        room="facade: weights by items",
        mistake="the mean over processes is not taken back",
        file="facade/loss_weighting.py",
        old="group.factor = self.average_size * self.reference / total",
        new="group.factor = self.reference / total",
        tests=("tests/cpu/test_gradients.py::test_weights_make_any_split_the_gradient_of_one_batch",),
    ),
    Mutation(
        name="schedule",
        room="facade: schedules",
        mistake="a schedule advances though its optimizer has skipped the step",
        file="facade/scheduler.py",
        old="            if optimizer.step_was_skipped:",
        new="            if False:",
        tests=("tests/null/test_accelerator.py::test_a_skipped_step_is_seen_and_the_schedule_waits",),
    ),
    Mutation(
        name="exit",
        room="launch: exit codes",
        mistake="a rank killed by a signal gives another exit code",
        file="launch/rank_reports.py",
        old="return code if code > 0 else 128 - code",
        new="return code if code > 0 else 128 + code",
        tests=(
            "tests/cpu/test_launch_failures.py::test_the_exit_code_and_the_last_words_are_the_failing_ranks",
        ),
    ),
)


def refuse(text: str) -> NoReturn:
    """Says what is wrong, and ends with 2."""
    print(text, file=sys.stderr)
    sys.exit(2)


class Copy:
    """The repository in a temporary folder, to be broken.

    Args:
        folder: an empty one.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *COPIED]
        names = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
        for name in filter(None, names.split("\0")):
            if (ROOT / name).is_file():  # not one that is deleted and still listed
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(ROOT / name, folder / name)
        self.env = {**os.environ, "PYTHONPATH": str(folder / "src"), "OMP_NUM_THREADS": "1"}

    def check(self) -> None:
        """Makes sure that the source of the copy is what is tested, not an installed one.

        Raises:
            SystemExit: it is not.
        """
        command = [sys.executable, "-c", "import accelerate; print(accelerate.__file__)"]
        found = subprocess.run(
            command, cwd=self.folder, env=self.env, check=True, capture_output=True, text=True
        )
        if not Path(found.stdout.strip()).is_relative_to(self.folder):
            refuse(f"the tests would import {found.stdout.strip()}, not the copy in {self.folder}")

    def write(self, file: Path, text: str) -> None:
        """Replaces a file of the copy, so that no compiled form of the old text is used."""
        path = self.folder / file
        path.write_text(text, encoding="utf-8")
        Path(importlib.util.cache_from_source(str(path))).unlink(missing_ok=True)

    def test(self, tests: Sequence[str], limit: float) -> tuple[int | None, str]:
        """pytest's exit code, None if it was still running after ``limit`` seconds, and what it said."""
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", *tests]
        with tempfile.TemporaryFile("w+", encoding="utf-8", errors="replace") as output:
            run = subprocess.Popen(
                command,
                cwd=self.folder,
                env=self.env,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
            try:
                code = run.wait(limit)
            except subprocess.TimeoutExpired:
                code = None
            finally:
                _end(run)
            output.seek(0)
            return code, output.read()


def _end(run: subprocess.Popen[bytes]) -> None:
    """Ends a run that is still there: asked first, so that its fixtures end what they have started."""
    if run.poll() is not None:
        return
    run.send_signal(signal.SIGINT)
    with suppress(subprocess.TimeoutExpired):
        run.wait(GRACE)
    with suppress(ProcessLookupError):
        os.killpg(run.pid, signal.SIGKILL)
    run.wait()


def check_table(mutations: Sequence[Mutation]) -> None:
    """Looks whether every mutation fits the source as it is.

    Raises:
        SystemExit: some do not, or there are two of a name.
    """
    wrong: list[str] = []
    for mutation in mutations:
        file = ROOT / PACKAGE / mutation.file
        count = file.read_text(encoding="utf-8").count(mutation.old) if file.is_file() else 0
        if count != 1:
            wrong.append(f"{mutation.name}: the old text stands {count} times in {PACKAGE / mutation.file}")
        files = [test.partition("::")[0] for test in mutation.tests]
        wrong += [f"{mutation.name}: there is no {name}" for name in files if not (ROOT / name).is_file()]
    names = [mutation.name for mutation in mutations]
    wrong += [f"{name}: two mutations have this name" for name in {n for n in names if names.count(n) > 1}]
    if wrong:
        refuse("\n".join(wrong))


def find(copy: Copy, mutation: Mutation) -> Finding:
    """Runs the tests of one mutation with it in the copy, and puts the file back."""
    file, begin = PACKAGE / mutation.file, time.monotonic()
    text = (copy.folder / file).read_text(encoding="utf-8")
    copy.write(file, text.replace(mutation.old, mutation.new))
    try:
        code, output = copy.test(mutation.tests, LIMIT)
    finally:
        copy.write(file, text)
    failed = re.search(r"^(?:FAILED|ERROR) ([^\s\[]+)", output, re.MULTILINE)
    test = failed[1] if failed else ", ".join(mutation.tests)
    results = {0: "NOT found", 1: "found", None: "found" if mutation.hangs else f"no end in {LIMIT:g} s"}
    result = results.get(code, f"pytest ended with {code}")
    return Finding(mutation, result, test, time.monotonic() - begin, output)


def show(findings: Sequence[Finding]) -> None:
    """Prints the table."""
    print("\n| room | mutation | found by |\n| --- | --- | --- |")
    for finding in findings:
        found = f"`{finding.test}`" if finding.result == "found" else f"**{finding.result}**"
        print(f"| {finding.mutation.room} | {finding.mutation.mistake} | {found} |")


def main(arguments: Sequence[str] | None = None) -> int:
    """Looks for the mutations that are named, or for all; returns the exit code."""
    parser = argparse.ArgumentParser(description="Proves that the tests find mistakes in the source.")
    names = [mutation.name for mutation in MUTATIONS]
    parser.add_argument("name", nargs="*", help=f"a mutation: {', '.join(names)}; all when none is given")
    asked: list[str] = parser.parse_args(arguments).name
    if unknown := [name for name in asked if name not in names]:
        parser.error(f"unknown mutation {unknown[0]!r}: there are {', '.join(names)}")
    chosen = [mutation for mutation in MUTATIONS if not asked or mutation.name in asked]
    check_table(chosen)
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        copy = Copy(Path(folder).resolve())
        copy.check()
        tests = list(dict.fromkeys(test for mutation in chosen for test in mutation.tests))
        code, output = copy.test(tests, LIMIT_PLAIN)
        if code != 0:
            refuse(f"{output}\nthe tests do not pass without a mutation (pytest: {code})")
        print(f"without a mutation: {output.strip().splitlines()[-1]}", flush=True)
        findings: list[Finding] = []
        for mutation in chosen:
            findings.append(finding := find(copy, mutation))
            print(f"{mutation.name}: {finding.result} in {finding.seconds:.0f} s", flush=True)
            if finding.result != "found":
                print(finding.output, file=sys.stderr)
    show(findings)
    results = [finding.result for finding in findings]
    count = results.count("found")
    print(f"\n{count} of {len(results)} found in {time.monotonic() - begin:.0f} s")
    if "NOT found" in results:
        return 1
    return 0 if count == len(results) else 2


if __name__ == "__main__":
    sys.exit(main())
