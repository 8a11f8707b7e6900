"""When not to try: a net on which a search was in vain is walked step after step for some calls before the next one.

A search that ends step after step costs its own work on top, at every call of a net that does not forget. What a net
does it mostly goes on to do, so that it need not be searched each time; but nets learn, so that it is tried again.
"""

import dataclasses
import math
from collections.abc import Hashable
from typing import Final, TypeAlias, final

from stretto.solvers.solver import Chain, Solved

Key: TypeAlias = tuple[Hashable, ...]

FIRST: Final = 8
"""Calls to rest at first, at least."""
MOST: Final = 512
"""Calls to rest at most, if a search is not dearer than they can bear."""
EARLY: Final = 0.075
"""What a search may cost of the calls of the first rest: two of them with one rest between stay within 15 %."""
LATE: Final = 0.02
"""What it may cost of those of the longest rest."""


@final
@dataclasses.dataclass(slots=True, kw_only=True)
class Habit:
    """What is known of calls that are alike: for how many of them not to try, and why.

    Attributes:
        rest: Calls to come that are walked step after step at once.
        rested: How many there were after the last search in vain; 0 if the last search paid.
        reason: Why that was in vain.
    """

    rest: int = 0
    rested: int = 0
    reason: str = ""

    def skipped(self) -> str:
        """Why not to try in this call, which is counted; empty if it is to be tried."""
        if self.rest <= 0:
            return ""
        left = "1 call" if self.rest == 1 else f"{self.rest} calls"
        self.rest -= 1
        return f"not tried again for {left}: {self.reason}"

    def learn(self, solved: Solved) -> None:
        """What came of a search; of states that are no numbers, and of a call without a search, nothing is learnt."""
        in_vain = solved.solution.work - 1.0
        if not solved.solution.fell_back:
            self.encourage()
        elif in_vain > 0 and all(bool(part.isfinite().all()) for part in solved.walked.states):
            self.tire(work=in_vain, reason=solved.solution.reason)

    def tire(self, *, work: float, reason: str) -> None:
        """A search was in vain: rest, twice as long as after the one before, and longer the dearer it was.

        Args:
            work: Steps that were walked for nothing, over those that there are.
            reason: Why it was in vain.
        """
        if self.rest > 0:
            # Of two calls that were under way at once the first has said so.
            return
        first = max(FIRST, math.ceil(work / EARLY))
        most = max(MOST, math.ceil(work / LATE))
        self.rest = self.rested = min(most, max(first, 2 * self.rested))
        self.reason = reason

    def encourage(self) -> None:
        """A search paid: the next one in vain is as if it were the first."""
        self.rested = 0


def alike(chain: Chain, *shape: int) -> Key:
    """What calls have in common whose searches end alike.

    Args:
        chain: Its place in the layers, its precision and whether it is in training count: some steps then draw.
        shape: Sizes that count.
    """
    dtypes = tuple(state.dtype for state in chain.states)
    return (chain.name, chain.variants.cell.training, dtypes, *shape)
