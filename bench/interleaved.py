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
        least: Seconds of a run in the fastest turn.
        median: Seconds of a run in the middle one.
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
        turn: Seconds that a turn lasts at least: a task that is shorter is run several times on end, as in training,
            and their mean counts, the first one after the others' turns among them.
    """

    rounds: int
    budget: float
    turn: float = 0.0


def interleaved(tasks: Mapping[str, Callable[[], object]], *, pace: Pace) -> dict[str, Timing]:
    """Give every task a turn each round, all equally often; each has to be warm already."""
    taken: dict[str, list[float]] = {name: [] for name in tasks}
    begin = time.perf_counter()
    for done in range(pace.rounds):
        if done >= LEAST_ROUNDS and time.perf_counter() - begin > pace.budget:
            break
        for name, task in tasks.items():
            # Threads of the task before may spin for a while in wait of more work.
            time.sleep(PAUSE_SECONDS)
            taken[name].append(_turn(task, least=pace.turn))
    return {
        name: Timing(least=min(seconds), median=statistics.median(seconds), rounds=len(seconds))
        for name, seconds in taken.items()
    }


def _turn(task: Callable[[], object], *, least: float) -> float:
    """Seconds of a run."""
    start, runs = time.perf_counter(), 0
    while True:
        task()
        runs += 1
        taken = time.perf_counter() - start
        if taken >= least:
            return taken / runs


def with_threads(task: Callable[[], object], threads: int) -> Callable[[], None]:
    """The task with so many threads of torch's; they stay so afterwards."""

    def run() -> None:
        torch.set_num_threads(threads)
        task()

    return run
