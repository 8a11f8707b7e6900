"""Interleaved timing of contenders whose results were compared first."""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Final

import torch

from stretto.errors import StrettoError

MIN_ROUNDS: Final = 3
PAUSE_SECONDS: Final = 0.01
TOLERANCE: Final = 1e-4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """How long one task took: seconds per run in its fastest and in its median round, and the number of rounds."""

    minimum: float
    median: float
    rounds: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TimingBudget:
    """How often tasks are timed.

    Attributes:
        rounds: Turns of every task.
        seconds: No new round begins after this, once there are three.
        turn_seconds: The least length of a turn. A shorter task runs several times in a row, as it does in training,
            and the mean of those runs counts, including the first one after the other tasks' turns.
    """

    rounds: int
    seconds: float
    turn_seconds: float = 0.0


QUICK: Final = TimingBudget(rounds=1, seconds=0.0)


def time_interleaved(
    tasks: Mapping[str, Callable[[], object]], *, budget: TimingBudget, only_twice: Collection[str] = ()
) -> dict[str, Timing]:
    """Time tasks in turn (A, B, A, B, ...), so that a change of the machine's load hits all of them.

    Args:
        tasks: What to run, each warm already: compiled, allocated, cached.
        budget: How often.
        only_twice: Slow tasks that run in the first and the middle round only.
    """
    seconds: dict[str, list[float]] = {name: [] for name in tasks}
    begin = time.perf_counter()
    for done in range(budget.rounds):
        if done >= MIN_ROUNDS and time.perf_counter() - begin > budget.seconds:
            break
        for name, task in tasks.items():
            if name in only_twice and done not in (0, budget.rounds // 2):
                continue
            # Threads of the task before may spin for a moment while they wait for more work.
            time.sleep(PAUSE_SECONDS)
            seconds[name].append(_time_turn(task, at_least=budget.turn_seconds))
    return {
        name: Timing(minimum=min(values), median=statistics.median(values), rounds=len(values))
        for name, values in seconds.items()
    }


def _time_turn(task: Callable[[], object], *, at_least: float) -> float:
    begin, runs = time.perf_counter(), 0
    while True:
        task()
        runs += 1
        elapsed = time.perf_counter() - begin
        if elapsed >= at_least:
            return elapsed / runs


@contextlib.contextmanager
def torch_threads(count: int | None) -> Iterator[int]:
    """Set torch's number of threads inside the block and restore it afterwards; None leaves it. Yields the number."""
    before = torch.get_num_threads()
    try:
        if count is not None:
            torch.set_num_threads(count)
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)


def relative_error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """The largest difference over the largest expected value; infinite for other shapes, NaN or inf."""
    if actual.shape != expected.shape or not bool(actual.isfinite().all()):
        return float("inf")
    if not expected.numel():
        return 0.0
    largest, difference = float(expected.abs().max()), float((actual - expected).abs().max())
    return difference / largest if largest else difference


def check_equal(
    actual: Mapping[str, torch.Tensor],
    expected: Mapping[str, torch.Tensor],
    *,
    name: str,
    peer: str,
    where: str,
    tolerance: float = TOLERANCE,
    fix: str = "Report it with the output of `stretto doctor`; no time is meaningful until this is fixed.",
) -> float:
    """Compare outputs and gradients of two contenders position by position, before any clock runs.

    The message names both contenders and `where`, the input they ran on.

    Returns:
        The largest relative error.

    Raises:
        StrettoError: It is above the tolerance.
    """
    if len(actual) != len(expected):
        raise StrettoError(f"{name} gives {len(actual)} results and {peer} gives {len(expected)} at {where}", fix=fix)
    worst = 0.0
    for (what, value), reference in zip(actual.items(), expected.values(), strict=True):
        error = relative_error(value, reference)
        if not error <= tolerance:
            raise StrettoError(
                f"{what} of {name} differs from {peer} by {error:.1e} of its largest value at {where}; "
                f"{tolerance:.0e} is allowed",
                fix=fix,
            )
        worst = max(worst, error)
    return worst
