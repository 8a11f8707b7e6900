"""Whether to go on: cycles that wait longer than a walk step after step are not worth it."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Final, final

TRIED: Final = 2
"""Cycles before anything is foretold of them."""
PATIENCE: Final = 8
"""Cycles in which the mismatch must at least halve."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outlook:
    """What cycles cost, and what may be spent on them.

    Attributes:
        tolerance: The residual that is small enough.
        cycle: Steps of a cycle that wait for one another.
        allowed: Steps that may be waited for in all.
    """

    tolerance: float
    cycle: int
    allowed: int

    def given_up(self, *, made: int, residual: float, before: float, left: int) -> str:
        """Why to stop; empty if going on pays.

        Args:
            made: Cycles so far.
            residual: What they left.
            before: What all but the last of them left; infinite if that is not known.
            left: Cycles after which all is exact anyway.
        """
        more = 1.0
        if made >= TRIED and math.isfinite(before):
            rate = residual / before
            more = math.inf if rate >= 1 else math.log(self.tolerance / residual) / math.log(max(rate, 1e-30))
        needed = made + max(1, math.ceil(min(more, left)))
        if needed * self.cycle <= self.allowed:
            return ""
        cycles = "1 cycle" if needed == 1 else f"{needed} cycles"
        return f"{cycles} of {self.cycle} steps one after another would take longer than {self.allowed} steps"

    @staticmethod
    def stalled(residuals: Sequence[float]) -> str:
        """Why to stop although cycles would end in time, given what each left; empty if they come nearer.

        Cycles that come no nearer end when all chunks were walked one after another, each time with all others.
        """
        early, late = residuals[:-PATIENCE], residuals[-PATIENCE:]
        if not early or min(late) < min(early) / 2:
            return ""
        return f"a mismatch of {residuals[-1]:.1e} is left, which the last {PATIENCE} cycles did not halve"
