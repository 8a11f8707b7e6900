"""Step after step: what every other solver is compared with, and falls back to."""

from typing import final

from stretto.solvers.solver import AbstractSolver, Chain, Solution, Solved


@final
class Serial(AbstractSolver):
    """Walks step after step."""

    def solve(self, chain: Chain) -> Solved:
        """One walk through all steps."""
        walked = chain.run(chain.layout, chain.x_PF, chain.states)
        return Solved(walked=walked, solution=Solution(solver="serial"))

    def __repr__(self) -> str:
        return "Serial()"
