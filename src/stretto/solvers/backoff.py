"""Exponential backoff: after a failed attempt, skip the next calls, twice as many each time.

An attempt that falls back costs its own work on top of the sequential run. Convergence changes slowly during training,
so a solver that failed on a net will mostly fail again; but nets learn to forget, so it is tried again now and then.

    attempt fails     skip n calls     attempt fails     skip 2n calls     attempt fails     skip 4n calls ...

n grows with the work that was wasted, so that failed attempts stay a small share of all work.
"""

import dataclasses
import math
from collections.abc import Hashable
from typing import Final, TypeAlias, final

from stretto.solvers.base import Problem, Result, format_count, is_finite

BackoffKey: TypeAlias = tuple[Hashable, ...]

MIN_SKIP_CALLS: Final = 8
"""The shortest first pause."""
MAX_SKIP_CALLS: Final = 512
"""The longest pause, unless attempts are too expensive for it."""
FIRST_COST_SHARE: Final = 0.075
"""What an attempt may cost, as a share of the first pause: two attempts with one pause between stay within 15 %."""
LAST_COST_SHARE: Final = 0.02
"""The same for the longest pause."""


@final
@dataclasses.dataclass(slots=True, kw_only=True)
class Backoff:
    """Whether to attempt a call, for calls of one kind.

    Attributes:
        calls_to_skip: Calls still to skip.
        last_pause: Calls skipped after the last failure; 0 if the last attempt succeeded.
        reason: Why the last attempt failed.
    """

    calls_to_skip: int = 0
    last_pause: int = 0
    reason: str = ""

    def should_skip(self) -> str:
        """Why to skip this call, which is counted; empty if it should be attempted."""
        if self.calls_to_skip <= 0:
            return ""
        left = format_count(self.calls_to_skip, "call")
        self.calls_to_skip -= 1
        return f"not tried again for {left}: {self.reason}"

    def record(self, result: Result) -> None:
        """Count an attempt. A fallback without any attempt, or with states that are NaN or inf, says nothing."""
        wasted = result.solution.work - 1.0
        if not result.solution.fell_back:
            self.succeed()
        elif wasted > 0 and is_finite(result.states):
            self.fail(work=wasted, reason=result.solution.reason)

    def fail(self, *, work: float, reason: str) -> None:
        """Pause for twice as long as last time, and longer the more work was wasted.

        Args:
            work: Steps computed in vain, as a multiple of the steps there are.
            reason: Why the attempt failed.
        """
        if self.calls_to_skip > 0:
            # Two calls were under way at once, and the first has reported already.
            return
        shortest = max(MIN_SKIP_CALLS, math.ceil(work / FIRST_COST_SHARE))
        longest = max(MAX_SKIP_CALLS, math.ceil(work / LAST_COST_SHARE))
        self.calls_to_skip = self.last_pause = min(longest, max(shortest, 2 * self.last_pause))
        self.reason = reason

    def succeed(self) -> None:
        """The next failure counts as the first."""
        self.last_pause = 0


def backoff_key(problem: Problem, *sizes: int) -> BackoffKey:
    """The kind of a call: those of one layer and direction, mode, dtypes and these sizes converge alike.

    The mode counts because a cell may draw random numbers in training.
    """
    dtypes = tuple(state.dtype for state in problem.states)
    return (problem.name, problem.variants.cell.training, dtypes, *sizes)
