"""Restarts on one machine: nobody has to meet, so nothing but the processes is needed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from accelerate.launch.elastic.attempt import ElasticAttemptRunner
from accelerate.launch.errors import RankError
from accelerate.launch.plan import Variables


def run_with_restarts(
    attempts: ElasticAttemptRunner,
    size: int,
    max_restarts: int,
    variables_of_restart: Callable[[int], Sequence[Variables]],
    print_line: Callable[[str], None],
) -> None:
    """Runs the processes, again when they fail, until they end well.

    A signal that stops the job is no failure, and neither are ranks that stop to be resumed.

    Args:
        attempts: of this job.
        size: how many processes.
        max_restarts: how often they may be started again.
        variables_of_restart: the environment of each process, by how often they were started again.
        print_line: prints a line.

    Raises:
        RankError: a rank failed, and there is no restart left.
    """
    for restart in range(max_restarts + 1):
        attempt, error = attempts.run(variables_of_restart(restart), size=size)
        if error is None:
            return
        outcome = attempt.outcome
        if restart == max_restarts or outcome.stopped_by is not None or outcome.resumable:
            raise error
        print_line(f"{describe_failure(error)}; restart {restart + 1} of {max_restarts}")


def describe_failure(error: RankError) -> str:
    """How an attempt failed, in one line: with the last line of the traceback, if there is one."""
    lines = error.traceback.strip().splitlines()
    return f"{error.what}: {lines[-1]}" if lines else error.what
