"""Multigrid in time (MGRIT), after Moon and Cyr (2022): coarse grids carry what is remembered over long times.

Shape legend: B sequences, C chunks of all sequences.
"""

import inspect
import math
from collections.abc import Callable, Sequence
from typing import Any, Final, Literal, TypeAlias, final

import torch

from stretto.errors import StrettoError
from stretto.solvers.habit import Habit, Key, alike
from stretto.solvers.multigrid.coarse_step import why_no_coarse_step
from stretto.solvers.multigrid.cycles import Cycles
from stretto.solvers.multigrid.grids import Grids
from stretto.solvers.multigrid.levels import Level, levels
from stretto.solvers.multigrid.outlook import Outlook
from stretto.solvers.multigrid.reverse_cycles import Reversal, Reversed
from stretto.solvers.multigrid.walk import walk_finest
from stretto.solvers.serial import Serial
from stretto.solvers.solver import AbstractSolver, Chain, Solution, Solved
from stretto.solvers.sweep import mismatch

Relaxation: TypeAlias = Literal["F", "FCF"]
RELAXATIONS: Final = {"F": 1, "FCF": 2}
"""Walks over a grid before the coarser one is asked."""


@final
class Multigrid(AbstractSolver):
    """Walks chunks of a few steps at once, and learns from coarser and coarser grids where they begin.

    A cycle walks all chunks of the finest grid and hands what does not agree at their boundaries to a grid with one
    step for each chunk, the cell's `coarse_step`; that grid does the same with the next coarser one, and the coarsest
    is walked step after step. A cell without a `coarse_step` has no coarse grids: chunks then begin where the chunk
    before ended in the last cycle.

    By default the settings are the published ones: a fixed number of cycles, so that states and gradients are
    approximate, and `Solution.residual` and `.backward_residual` tell what is left at the boundaries. With `tolerance`
    the result is that of walking step after step, within the tolerance: after k cycles at least the first k chunks are
    right, whatever the net, so it ends; where that would take longer than step after step, that is done instead, and
    `Solution` says so. Batches of such a length are then walked step after step for some calls before cycles are tried
    again.

    Args:
        num_levels: Grids, the finest included; 1 is without coarse grids. Short sequences have fewer.
        coarsening: Steps of one grid in a step of the next.
        max_iterations: Cycles; 2 by default, with a tolerance as many as it takes. After 0 all chunks begin with the
            initial state.
        backward_iterations: Cycles for the gradient; 1 by default, with a tolerance as many as it takes. After 0 no
            gradient passes the boundary of a chunk.
        tolerance: The mismatch at the boundaries that is small enough, relative to states above 1.
        fine_relaxation: "F" walks the finest grid once in a cycle, "FCF" twice, from where the first walk ended.
        coarse_relaxation: The same for the grids between the finest and the coarsest.
        skip_first_down: Begin the first cycle on the coarsest grid, with coarse steps alone, and not by walking the
            finest.
    """

    def __init__(
        self,
        *,
        num_levels: int = 3,
        coarsening: int = 4,
        max_iterations: int | None = None,
        backward_iterations: int | None = None,
        tolerance: float | None = None,
        fine_relaxation: Relaxation = "F",
        coarse_relaxation: Relaxation = "FCF",
        skip_first_down: bool = True,
    ) -> None:
        _check_whole(num_levels, name="num_levels", least=1)
        _check_whole(coarsening, name="coarsening", least=2)
        for name, count in (("max_iterations", max_iterations), ("backward_iterations", backward_iterations)):
            if count is not None:
                _check_whole(count, name=name, least=0)
        is_number = isinstance(tolerance, (int, float)) and not isinstance(tolerance, bool)
        if tolerance is not None and not (is_number and 0 < tolerance < math.inf):
            raise StrettoError(f"tolerance is {tolerance!r}", fix="Give a number above 0, such as 1e-6, or None.")
        for name, relaxation in (("fine_relaxation", fine_relaxation), ("coarse_relaxation", coarse_relaxation)):
            if relaxation not in tuple(RELAXATIONS):
                raise StrettoError(f"{name} is {relaxation!r}", fix='Choose "F" or "FCF".')
        self.num_levels = num_levels
        self.coarsening = coarsening
        self.max_iterations = max_iterations
        self.backward_iterations = backward_iterations
        self.tolerance = None if tolerance is None else float(tolerance)
        self.fine_relaxation: Relaxation = fine_relaxation
        self.coarse_relaxation: Relaxation = coarse_relaxation
        self.skip_first_down = skip_first_down
        self._habits: dict[Key, Habit] = {}

    def solve(self, chain: Chain) -> Solved:
        """Cycle until chunks agree or enough cycles were made; gradients flow through the last walk."""
        habit = self._habit(chain)
        skipped = habit.skipped()
        if skipped:
            return _serially(chain, reason=skipped)
        solved = self._cycled(chain, habit)
        # Where there is a gradient to be found, it tells whether cycles paid.
        if solved.solution.fell_back or not solved.walked.y_PF.requires_grad:
            habit.learn(solved)
        return solved

    def _cycled(self, chain: Chain, habit: Habit) -> Solved:
        missing = "num_levels is 1" if self.num_levels == 1 else why_no_coarse_step(chain)
        grids = levels(chain.layout, num_levels=1 if missing else self.num_levels, coarsening=self.coarsening)
        finest, chunks = grids[0], grids[0].chunks
        if chunks.most <= 1:
            return _serially(chain, reason="there is but one chunk")
        coarse = None if missing else Grids(chain, grids, relaxations=RELAXATIONS[self.coarse_relaxation])
        cycles = Cycles(chain, finest, coarse, relaxations=RELAXATIONS[self.fine_relaxation])
        solution = Solution(solver="multigrid", reason=_told(grids, missing))
        report = _told_to(solution, habit)
        reversal = self._reversal(chain, cycles, coarse)
        outlook = self._outlook(self.max_iterations, cycles, allowed=chain.layout.num_steps)
        most = self._most(self.max_iterations, cycles, usual=2)
        if self.skip_first_down and most > 0:
            cycles.begin_on_the_coarsest()
        residual, residuals = math.inf, list[float]()
        while True:
            last = cycles.made >= most or cycles.left <= 1
            # Other walks are improved upon: what their gradients would need is not stored.
            stored = last or (self.tolerance is not None and cycles.walks > 0) or not torch.is_grad_enabled()
            with torch.set_grad_enabled(torch.is_grad_enabled() and stored):
                walked, ends = walk_finest(chain, finest, cycles.starts, reversal=reversal, report=report)
            cycles.walks += 1
            before, residual = residual, mismatch(cycles.arrived(ends), cycles.starts, ~chunks.is_first_C)
            residuals.append(residual)
            done = last or (stored and self.tolerance is not None and residual <= self.tolerance)
            given_up = "" if math.isfinite(residual) else "a state is no number"
            if done and not given_up:
                break
            if outlook is not None and not given_up:
                given_up = outlook.given_up(made=cycles.made, residual=residual, before=before, left=cycles.left)
                given_up = given_up or outlook.stalled(residuals)
            if given_up:
                return _serially(chain, reason=given_up, iterations=cycles.made, work=cycles.work)
            cycles.improve(ends)
        solution.iterations, solution.residual, solution.work = cycles.made, residual, cycles.work
        return Solved(walked=walked, solution=solution)

    def _habit(self, chain: Chain) -> Habit:
        """Of batches about as long; one that never rests if a number of cycles was asked for."""
        if self.tolerance is None or self.max_iterations is not None:
            return Habit()
        num_chunks = -(-chain.layout.num_steps // self.coarsening)
        return self._habits.setdefault(alike(chain, num_chunks.bit_length()), Habit())

    def _reversal(self, chain: Chain, cycles: Cycles, coarse: Grids | None) -> Reversal:
        return Reversal(
            most=self._most(self.backward_iterations, cycles, usual=1),
            tolerance=self.tolerance,
            relaxations=RELAXATIONS[self.fine_relaxation],
            grids=coarse,
            # Step after step, the states would have to be found anew first.
            outlook=self._outlook(self.backward_iterations, cycles, allowed=2 * chain.layout.num_steps),
        )

    def _most(self, given: int | None, cycles: Cycles, *, usual: int) -> int:
        """Cycles to make at most; with a tolerance as many as make all chunks certain."""
        if given is not None:
            return given
        return usual if self.tolerance is None else cycles.left

    def _outlook(self, given: int | None, cycles: Cycles, *, allowed: int) -> Outlook | None:
        """When to go step after step instead: never, if a number of cycles was asked for."""
        if given is not None or self.tolerance is None:
            return None
        return Outlook(tolerance=self.tolerance, cycle=cycles.wait, allowed=allowed)

    def __repr__(self) -> str:
        usual = {name: parameter.default for name, parameter in inspect.signature(type(self)).parameters.items()}
        said = [f"{name}={getattr(self, name)!r}" for name, value in usual.items() if getattr(self, name) != value]
        return f"Multigrid({', '.join(said)})"


def _check_whole(value: Any, *, name: str, least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < least:
        raise StrettoError(f"{name} is {value!r}", fix=f"Give a whole number from {least} on.")


def _told(grids: Sequence[Level], missing: str) -> str:
    """What is solved on which grids."""
    finest = grids[0]
    chunks = f"{finest.chunks.most} chunks of {finest.coarsening} steps"
    if missing:
        return f"{chunks}, relaxation only: {missing}"
    return f"{chunks}, {len(grids)} levels of {', '.join(str(level.layout.num_steps) for level in grids)} steps"


def _told_to(solution: Solution, habit: Habit) -> Callable[[Reversed], None]:
    """Where to tell how the gradient was found, and whether cycles paid for it."""
    forward = solution.reason

    def report(back: Reversed) -> None:
        solution.backward_iterations, solution.backward_residual = back.cycles, back.residual
        if not back.reason:
            habit.encourage()
            return
        solution.backward_residual = 0.0
        solution.reason = f"{forward}; the gradient was found step after step: {back.reason}"
        if math.isfinite(back.residual):
            # The states were found by cycles, and once more step after step.
            habit.tire(work=solution.work + back.cycles, reason=f"the gradient: {back.reason}")

    return report


def _serially(chain: Chain, *, reason: str, iterations: int = 0, work: float = 0.0) -> Solved:
    """Step after step, after what was tried."""
    solution = Solution(solver="multigrid", iterations=iterations + 1, fell_back=True, reason=reason, work=work + 1.0)
    return Solved(walked=Serial().solve(chain).walked, solution=solution)
