"""Timing of tasks in turn: A, B, A, B, ..., so that a change of the machine's load hits all of them."""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Final

import torch

LEAST_ROUNDS: Final = 3
PAUSE_SECONDS: Final = 0.01


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """What one task took.

    Attributes:
        least: Seconds of the fastest turn.
        median: Seconds of the middle one.
        rounds: Turns that were timed.
    """

    least: float
    median: float
    rounds: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How often tasks are timed.

    Attributes:
        rounds: Turns of every task.
        budget: Seconds after which no new round begins once there are three.
    """

    rounds: int
    budget: float


def interleaved(tasks: Mapping[str, Callable[[], object]], *, pace: Pace) -> dict[str, Timing]:
    """Time every task once a round, all equally often; each has to be warm already."""
    taken: dict[str, list[float]] = {name: [] for name in tasks}
    begin = time.perf_counter()
    for done in range(pace.rounds):
        if done >= LEAST_ROUNDS and time.perf_counter() - begin > pace.budget:
            break
        for name, task in tasks.items():
            # Threads of the task before may spin for a while in wait of more work.
            time.sleep(PAUSE_SECONDS)
            start = time.perf_counter()
            task()
            taken[name].append(time.perf_counter() - start)
    return {
        name: Timing(least=min(seconds), median=statistics.median(seconds), rounds=len(seconds))
        for name, seconds in taken.items()
    }


def with_threads(task: Callable[[], object], threads: int) -> Callable[[], None]:
    """The task with so many threads of torch's; they stay so afterwards."""

    def run() -> None:
        torch.set_num_threads(threads)
        task()

    return run
