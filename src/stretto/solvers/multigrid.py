r"""Multigrid in time (MGRIT), after Moon and Cyr (2022): coarse grids carry information over long times.

Every `coarsening`-th point of the finest grid, the grid of time steps, is a point of the next coarser one. The time
between two of them is a chunk. With m = 4:

    level 0    o---.---.---.---o---.---.---.---o---.---.---.---o    o  C-points: chunk boundaries, points of level 1
                    chunk 0         chunk 1         chunk 2         .  F-points: inside chunks
    level 1    O---------------O---------------O---------------O       one coarse step per chunk

Three operations on a grid:

    F-relaxation    run all chunks at once, each from its C-point: updates all F-points
    C-relaxation    move the end of each chunk to the C-point where the next one starts
    FCF             F, then C, then F again

The coarse grid solves the full approximation scheme (FAS). With Phi the fine map over a chunk and Phi_c the coarse
step, the cell's own `coarse_step(x, state, dt)`, the coarse states v satisfy

    v_{c+1} = Phi_c(v_c) + tau_c,         tau_c = Phi(u_c) - Phi_c(u_c),

where u is the current fine approximation. The forcing term tau makes the exact solution a fixed point: if the fine
states u are right, v = u solves the coarse problem. A V-cycle goes down and up once:

    level 0    F-relax                                            F-relax ...
                  \  restrict u, tau                        / correct C-points
    level 1         FCF-relax                      F-relax
                       \  restrict v, tau        / correct
    level 2              sequential coarse solve

The gradient solves the adjoint recurrence on the same grids, where everything is linear (`ReverseCycles`).

Shape legend: B sequences, C chunks of all sequences, P steps of a grid, Q those of the next coarser one, F features,
D units of the state, G features and units of the state side by side.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from functools import cached_property
from typing import Any, Final, Literal, TypeAlias, final

import numpy as np
import torch
from torch import nn

from stretto.checks import check_bool, check_choice, check_float, check_int
from stretto.errors import StrettoError
from stretto.kernels import Layout
from stretto.solvers.adjoint import AbstractAdjoint, AdjointStats, ChunkGraph, MaybeTensor, differentiable_chunks
from stretto.solvers.backoff import Backoff, BackoffKey, backoff_key
from stretto.solvers.base import (
    AbstractSolver,
    Problem,
    Result,
    Solution,
    fall_back,
    format_count,
    has_halved,
    residual_norm,
    why_incomparable,
)
from stretto.solvers.chunks import Chunks, select_chunks
from stretto.state import describe_difference, flatten, is_alike, pack, unflatten, unpack

Relaxation: TypeAlias = Literal["F", "FCF"]
F_RELAXATIONS: Final = {"F": 1, "FCF": 2}
"""Runs over a grid before the coarser one is used."""
DEFAULT_CYCLES: Final = 2
DEFAULT_BACKWARD_CYCLES: Final = 1
MIN_CYCLES_TO_EXTRAPOLATE: Final = 2
STALL_CYCLES: Final = 8
"""Cycles in which the residual must at least halve."""


@final
class Multigrid(AbstractSolver):
    """Runs chunks of a few steps at once, with coarser and coarser grids that say where chunks start.

    A cycle runs all chunks of the finest grid and passes what differs at their boundaries to a grid with one step per
    chunk, the cell's `coarse_step`. That grid does the same with the next coarser one, and the coarsest runs
    sequentially. A cell without a `coarse_step` has no coarse grids: chunks then start where the chunk before ended in
    the last cycle.

    The defaults are the published ones: a fixed number of cycles. States and gradients are then approximate, and
    `Solution.residual` and `.backward_residual` report what is left at the boundaries. With `tolerance` the result
    equals that of a sequential run within the tolerance: after k cycles at least the first k chunks are exact, whatever
    the net, so it terminates. Where that would take longer than a sequential run, that is done instead, `Solution`
    says so, and batches of about the same length run sequentially for some calls before cycles are tried again.

    Args:
        num_levels: Grids, including the finest; 1 is without coarse grids. Short sequences have fewer.
        coarsening: Steps of one grid per step of the next.
        max_iterations: Cycles; 2 by default, with a tolerance as many as it takes. With 0 all chunks start from the
            initial state.
        backward_iterations: Cycles for the gradient; 1 by default, with a tolerance as many as it takes. With 0 no
            gradient passes the boundary of a chunk.
        tolerance: The difference at the boundaries that is small enough, relative to states above 1.
        fine_relaxation: Relaxation of the finest grid. "F" runs it once per cycle, "FCF" twice.
        coarse_relaxation: The same for the grids between the finest and the coarsest.
        skip_first_down: Start the first cycle on the coarsest grid, with coarse steps alone, instead of running the
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
        self.num_levels = check_int(num_levels, name="num_levels", owner="Multigrid")
        self.coarsening = check_int(coarsening, name="coarsening", at_least=2, owner="Multigrid")
        self.max_iterations, self.backward_iterations = (
            None if given is None else check_int(given, name=name, at_least=0, owner="Multigrid")
            for name, given in (("max_iterations", max_iterations), ("backward_iterations", backward_iterations))
        )
        self.tolerance = (
            None if tolerance is None else check_float(tolerance, name="tolerance", above=0.0, owner="Multigrid")
        )
        for name, choice in (("fine_relaxation", fine_relaxation), ("coarse_relaxation", coarse_relaxation)):
            check_choice(choice, name=name, choices=F_RELAXATIONS, owner="Multigrid")
        self.fine_relaxation: Relaxation = fine_relaxation
        self.coarse_relaxation: Relaxation = coarse_relaxation
        self.skip_first_down = check_bool(skip_first_down, name="skip_first_down", owner="Multigrid")
        self._backoffs: dict[BackoffKey, Backoff] = {}

    def solve(self, problem: Problem) -> Result:
        """Cycle until chunks agree or enough cycles were made; gradients flow through the last run."""
        backoff = self._backoff(problem)
        skip = why_incomparable(problem) or backoff.should_skip()
        if skip:
            return fall_back(problem, solver="multigrid", reason=skip)
        result = self._cycle(problem, backoff)
        # Where a gradient will be asked for, its backward pass decides whether cycles paid.
        if result.solution.fell_back or not result.y_PF.requires_grad:
            backoff.record(result)
        return result

    def _cycle(self, problem: Problem, backoff: Backoff) -> Result:
        missing = "num_levels is 1" if self.num_levels == 1 else _why_no_coarse_step(problem)
        levels = make_levels(problem.layout, num_levels=1 if missing else self.num_levels, coarsening=self.coarsening)
        chunks = levels[0]
        if chunks.max_per_sequence <= 1:
            return fall_back(problem, solver="multigrid", reason="there is only one chunk")
        grids = None if missing else CoarseGrids(problem, levels, runs=F_RELAXATIONS[self.coarse_relaxation])
        cycles = ForwardCycles(problem, chunks, grids, runs=F_RELAXATIONS[self.fine_relaxation])
        described = f"{chunks.max_per_sequence} chunks of {self.coarsening} steps"
        sizes = ", ".join(str(level.whole.num_steps) for level in levels)
        described += f", relaxation only: {missing}" if missing else f", {len(levels)} levels of {sizes} steps"
        solution = Solution(solver="multigrid", reason=described)
        record = _record_backward(solution, backoff)
        # The fallback of a gradient runs forward again first.
        max_cycles, stopping = self._limits(
            self.backward_iterations, cycles, default=DEFAULT_BACKWARD_CYCLES, budget=2 * problem.layout.num_steps
        )
        adjoint = ReverseCycles(
            grids=grids,
            runs=F_RELAXATIONS[self.fine_relaxation],
            max_cycles=max_cycles,
            tolerance=self.tolerance,
            stopping=stopping,
        )
        max_cycles, stopping = self._limits(
            self.max_iterations, cycles, default=DEFAULT_CYCLES, budget=problem.layout.num_steps
        )
        if self.skip_first_down and max_cycles > 0:
            cycles.start_on_the_coarsest()
        residuals: list[float] = []
        while True:
            is_last = cycles.done >= max_cycles or cycles.runs_until_exact <= 1
            # Runs that will be improved upon need no graph for gradients.
            has_graph = is_last or (self.tolerance is not None and cycles.runs > 0) or not torch.is_grad_enabled()
            with torch.set_grad_enabled(torch.is_grad_enabled() and has_graph):
                y_PF, states, ends = differentiable_chunks(
                    problem, chunks, cycles.starts, adjoint=adjoint, solution=solution, on_backward=record
                )
            cycles.runs += 1
            residuals.append(chunks.residual(chunks.previous_ends(ends), cycles.starts))
            is_close = has_graph and self.tolerance is not None and residuals[-1] <= self.tolerance
            failure = "" if math.isfinite(residuals[-1]) else "a state is NaN or inf"
            if (is_last or is_close) and not failure:
                break
            if stopping is not None and not failure:
                failure = stopping.over_budget(residuals, done=cycles.done, until_exact=cycles.runs_until_exact)
                # Cycles that do not converge end when each chunk was run in its turn, every time with all others.
                if not failure and not has_halved(residuals, within=STALL_CYCLES):
                    left = f"a residual of {residuals[-1]:.1e} is left"
                    failure = f"{left}, which the last {STALL_CYCLES} cycles did not halve"
            if failure:
                return fall_back(problem, solver="multigrid", reason=failure, iterations=cycles.done, work=cycles.work)
            cycles.improve(ends)
        solution.iterations, solution.residual, solution.work = cycles.done, residuals[-1], cycles.work
        return Result(y_PF=y_PF, states=states, solution=solution)

    def _backoff(self, problem: Problem) -> Backoff:
        """For batches of about the same length; one that never skips if a number of cycles was asked for."""
        if self.tolerance is None or self.max_iterations is not None:
            return Backoff()
        num_chunks = -(-problem.layout.num_steps // self.coarsening)
        return self._backoffs.setdefault(backoff_key(problem, num_chunks.bit_length()), Backoff())

    def _limits(
        self, given: int | None, cycles: "ForwardCycles", *, default: int, budget: int
    ) -> "tuple[int, StoppingRule | None]":
        """With a tolerance, as many cycles as make all chunks exact; those asked for are made whatever they cost."""
        if given is not None or self.tolerance is None:
            return default if given is None else given, None
        rule = StoppingRule(tolerance=self.tolerance, steps_per_cycle=cycles.sequential_steps, budget=budget)
        return cycles.runs_until_exact, rule


def _record_backward(solution: Solution, backoff: Backoff) -> Callable[[AdjointStats], None]:
    """Records whether cycles paid for the gradient, too."""
    forward = solution.reason

    def record(stats: AdjointStats) -> None:
        if not stats.failure:
            backoff.succeed()
            return
        solution.backward_residual = 0.0
        solution.reason = f"{forward}; the gradient was found sequentially: {stats.failure}"
        if math.isfinite(stats.residual):
            # The states were found by cycles, and once more sequentially.
            backoff.fail(work=solution.work + stats.iterations, reason=f"the gradient: {stats.failure}")

    return record


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class StoppingRule:
    """When to give up on cycles: if they would take longer than a sequential run, or stop converging."""

    tolerance: float
    steps_per_cycle: int
    """Only those that depend on one another."""
    budget: int
    """How many such steps may be spent in all."""

    def over_budget(self, residuals: Sequence[float], *, done: int, until_exact: int) -> str:
        """Why to stop; empty if the cycles still needed, at the last rate of convergence, are within the budget.

        After `until_exact` further cycles everything is exact anyway.
        """
        more = 1.0
        if done >= MIN_CYCLES_TO_EXTRAPOLATE and len(residuals) > 1:
            rate = residuals[-1] / residuals[-2]
            more = math.inf if rate >= 1 else math.log(self.tolerance / residuals[-1]) / math.log(max(rate, 1e-30))
        needed = done + max(1, math.ceil(min(more, until_exact)))
        if needed * self.steps_per_cycle <= self.budget:
            return ""
        cycles = format_count(needed, "cycle")
        return f"{cycles} of {self.steps_per_cycle} sequential steps would take longer than {self.budget} steps"


# --- grids -----------------------------------------------------------------------------------------------------------


@final
class Level(Chunks):
    """One grid of time, cut at the points of the next coarser one.

    Point t is the state after t steps. The points where chunks start are those of the coarser grid, so that a coarse
    step spans a whole chunk. No coarse step spans a sequence's last chunk, which may be short.
    """

    @cached_property
    def coarser(self) -> Layout:
        """Of the steps of the coarser grid."""
        return Layout(np.maximum(self.counts_B - 1, 0))

    @cached_property
    def next_Q(self) -> torch.Tensor:
        """The chunk that starts where each coarse step ends."""
        sequence_Q, step_Q = self.coarser.sequence_P.numpy(), self.coarser.step_P.numpy()
        return torch.from_numpy(self.place_BN[sequence_Q, step_Q + 1])

    @cached_property
    def chunk_Q(self) -> torch.Tensor:
        """The chunk that each coarse step spans."""
        return self.previous_C[self.next_Q]

    @cached_property
    def _first_row_C(self) -> torch.Tensor:
        """The row of each chunk's first step: in the layout of the chunks these come first."""
        return self.rows_P[: self.num_chunks]

    @cached_property
    def first_Q(self) -> torch.Tensor:
        """The first row that each coarse step spans."""
        return self._first_row_C[self.chunk_Q]

    def states_before(self, initial_BD: torch.Tensor, points_PD: torch.Tensor) -> torch.Tensor:
        """The state before each chunk, given those after each step."""
        before_PD = self.whole.shift(points_PD, initial_BD)
        return before_PD.index_select(0, self._first_row_C.to(points_PD.device))

    def prolong(self, initial_BD: torch.Tensor, points_QD: torch.Tensor) -> torch.Tensor:
        """The state before each chunk, given those after each coarse step."""
        boundary_CD = points_QD.new_zeros(self.num_chunks, *points_QD.shape[1:])
        boundary_CD[self.next_Q.to(points_QD.device)] = points_QD
        return self.starts([initial_BD], [boundary_CD])[0]


def make_levels(layout: Layout, *, num_levels: int, coarsening: int) -> list[Level]:
    """The finest grid and coarser ones: as many as were asked for, or until one is no longer than a chunk."""
    levels = [Level(layout, coarsening)]
    while len(levels) < num_levels and levels[-1].max_per_sequence > 1:
        levels.append(Level(levels[-1].coarser, coarsening))
    return levels


# --- the coarse step -------------------------------------------------------------------------------------------------


@final
class ForcedCoarseStep(nn.Module):
    """One coarse step over `dt` steps of a cell, plus a forcing term that comes with the input.

    A row of its input is the cell's input, of shape `features`, and the forcing term, flattened and side by side. Its
    output is the state after the step, flattened.
    """

    def __init__(self, cell: nn.Module, *, dt: float, features: tuple[int, ...]) -> None:
        super().__init__()
        self.cell = cell
        self.dt = dt
        self.features = features

    def forward(self, row_BG: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        """The step."""
        size = math.prod(self.features)
        x = row_BG[:, :size]
        if len(self.features) != 1:
            x = x.reshape(-1, *self.features)
        after = self.cell.coarse_step(x, state, self.dt)  # type: ignore[operator]
        if not is_alike(state, after):
            given, made = describe_difference(state, after)
            raise StrettoError(
                f"{type(self.cell).__name__}.coarse_step was given a state with {given} and returned one with {made}",
                fix="Return the next state alone from coarse_step(x_t, state, dt), in the form it was given.",
            )
        parts = flatten(after)
        forced = [part + tau for part, tau in zip(parts, unpack(row_BG[:, size:], parts), strict=True)]
        return pack(forced), unflatten(state, forced)


def _why_no_coarse_step(problem: Problem) -> str:
    """Why there can be no coarse grids; empty if there can."""
    cell = problem.variants.cell
    if not callable(getattr(cell, "coarse_step", None)):
        return f"{type(cell).__name__} has no coarse_step"
    if not problem.states:
        return f"{type(cell).__name__} has no state"
    dtypes = list(dict.fromkeys(tensor.dtype for tensor in (problem.x_PF, *problem.states)))
    if len(dtypes) > 1 or not dtypes[0].is_floating_point:
        return f"the input and the state are of {' and '.join(map(str, dtypes))}"
    return ""


# --- forward cycles --------------------------------------------------------------------------------------------------


@final
class ForwardCycles:
    """The states before each chunk of the finest grid (C, ...), improved from cycle to cycle.

    A cycle makes one or two runs over the finest grid: 1 is F-, 2 is FCF-relaxation.
    """

    def __init__(self, problem: Problem, finest: Chunks, grids: "CoarseGrids | None", *, runs: int) -> None:
        self.starts = finest.repeat_initial([part.detach() for part in problem.states])
        # Cycles, and runs over the finest grid, so far. Each run makes one more chunk of every sequence exact.
        self.done = 0
        self.runs = 0
        self._problem, self._finest, self._grids, self._runs_per_cycle = problem, finest, grids, runs

    @property
    def sequential_steps(self) -> int:
        """Steps of a cycle that depend on one another."""
        coarse = 0 if self._grids is None else self._grids.sequential_steps
        return self._runs_per_cycle * self._finest.length + coarse

    @property
    def runs_until_exact(self) -> int:
        """Runs over the finest grid until all states are exact, whatever the net."""
        return self._finest.max_per_sequence - self.runs

    @property
    def work(self) -> float:
        """Steps computed, as a multiple of the steps there are."""
        coarse = 0 if self._grids is None else self._grids.steps_run
        return self.runs + coarse / self._problem.layout.total

    def start_on_the_coarsest(self) -> None:
        """A first cycle without a run over the finest grid; nothing without coarse grids."""
        if self._grids is not None:
            with torch.no_grad():
                self.starts = self._grids.first_starts()
            self.done += 1

    def improve(self, ends: Sequence[torch.Tensor]) -> None:
        """The rest of a cycle, after an F-relaxation that led to these ends."""
        chunks = self._finest
        with torch.no_grad():
            relaxed = self._next_starts(ends)
            for _ in range(self._runs_per_cycle - 1):
                self.starts = relaxed
                _, ends = self._problem.run(chunks.layout, chunks.to_chunks(self._problem.x_PF), self.starts)
                self.runs += 1
                relaxed = self._next_starts(ends)
            corrected = relaxed if self._grids is None else self._grids.correct(self.starts, ends)
            # What relaxation alone has made exact is not corrected any more.
            self.starts = select_chunks(torch.from_numpy(chunks.number_C) <= self.runs, relaxed, corrected)
            self.done += 1

    def _next_starts(self, ends: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """C-relaxation: each chunk starts where the one before ended."""
        chunks = self._finest
        return chunks.starts([state.detach() for state in self._problem.states], chunks.previous_ends(ends))


@final
class CoarseGrids:
    """The coarse grids of a problem, and the FAS corrections that they give.

    Each is run over `runs` times before the next coarser one is used: 1 is F-, 2 is FCF-relaxation.
    """

    def __init__(self, problem: Problem, levels: Sequence[Level], *, runs: int) -> None:
        # The first is the finest grid.
        self.levels = levels
        self.runs = runs
        # Coarse steps computed so far.
        self.steps_run = 0
        self.initial_BD = pack([part.detach() for part in problem.states])
        self._problem = problem
        self._features = tuple(problem.x_PF.shape[1:])
        self._parameters = {name: tensor.detach() for name, tensor in problem.parameters.items()}
        # A coarse step reads the first input of its chunk.
        self._x = [pack([problem.x_PF.detach()])]
        for level in levels[:-1]:
            self._x.append(self._x[-1].index_select(0, level.first_Q.to(problem.x_PF.device)))

    @property
    def sequential_steps(self) -> int:
        """Steps of a correction that depend on one another."""
        between = self.levels[1:-1]
        inner = sum(1 + min(level.length, level.whole.num_steps) * (self.runs + 1) for level in between)
        return inner + 1 + self.levels[-1].whole.num_steps

    def first_starts(self) -> list[torch.Tensor]:
        """The states before each chunk of the finest grid, from the coarsest up, by coarse steps alone."""
        last = len(self.levels) - 1
        points_PD = self.run(last, self._unforced(last))
        for number in range(last - 1, 0, -1):
            starts_CD = self.levels[number].prolong(self.initial_BD, points_PD)
            points_PD, _ = self.relax(number, starts_CD, self._unforced(number))
        return unpack(self.levels[0].prolong(self.initial_BD, points_PD), self._problem.states)

    def correct(self, starts: Sequence[torch.Tensor], ends: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Better states before each chunk of the finest grid, whose runs from `starts` led to `ends` (C, ...)."""
        return unpack(self._correct(0, pack(starts), pack(ends)), self._problem.states)

    def _correct(self, number: int, starts_CD: torch.Tensor, ends_CD: torch.Tensor) -> torch.Tensor:
        level = self.levels[number]
        chunk_Q, next_Q = level.chunk_Q.to(starts_CD.device), level.next_Q.to(starts_CD.device)
        tau_QD = ends_CD.index_select(0, chunk_Q) - self.step(number + 1, starts_CD.index_select(0, chunk_Q))
        points_QD = self._solve(number + 1, starts_CD.index_select(0, next_Q), tau_QD)
        return level.prolong(self.initial_BD, points_QD)

    def _solve(self, number: int, points_PD: torch.Tensor, tau_PD: torch.Tensor) -> torch.Tensor:
        """The states after each step of a coarse grid: exactly on the coarsest, else one cycle from those given."""
        if number == len(self.levels) - 1:
            return self.run(number, tau_PD)
        level = self.levels[number]
        starts_CD = level.states_before(self.initial_BD, points_PD)
        _, ends_CD = self.relax(number, starts_CD, tau_PD)
        for _ in range(self.runs - 1):
            (starts_CD,) = level.starts([self.initial_BD], level.previous_ends([ends_CD]))
            _, ends_CD = self.relax(number, starts_CD, tau_PD)
        points_PD, _ = self.relax(number, self._correct(number, starts_CD, ends_CD), tau_PD)
        return points_PD

    def step(self, number: int, states_PD: torch.Tensor) -> torch.Tensor:
        """One coarse step from each given state, without forcing: Phi_c."""
        layout = Layout.even(num_steps=1, num_rows=len(states_PD))
        after_PD, _ = self._run(number, layout, self._rows(number, self._unforced(number)), states_PD)
        return after_PD

    def run(self, number: int, tau_PD: torch.Tensor) -> torch.Tensor:
        """The state after each step of a coarse grid, sequentially."""
        layout = self.levels[number].whole
        points_PD, _ = self._run(number, layout, self._rows(number, tau_PD), self.initial_BD)
        return points_PD

    def relax(self, number: int, starts_CD: torch.Tensor, tau_PD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """F-relaxation of a coarse grid: the states after each step and after each chunk, all chunks at once."""
        chunks = self.levels[number]
        rows_PG = chunks.to_chunks(self._rows(number, tau_PD))
        points_PD, ends_CD = self._run(number, chunks.layout, rows_PG, starts_CD)
        return chunks.to_sequences(points_PD), ends_CD

    def _run(
        self, number: int, layout: Layout, rows_PG: torch.Tensor, states_BD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        dt = float(self.levels[0].length ** number)
        points_PD, after = self._problem.variants.run(
            f"a coarse step over {dt:g} of {self._features}",
            lambda cell: ForcedCoarseStep(cell, dt=dt, features=self._features),
            layout,
            rows_PG,
            unpack(states_BD, self._problem.states),
            parameters=self._parameters,
        )
        self.steps_run += layout.total
        return points_PD, pack(after)

    def _rows(self, number: int, tau_PD: torch.Tensor) -> torch.Tensor:
        return torch.cat([self._x[number], tau_PD], dim=1)

    def _unforced(self, number: int) -> torch.Tensor:
        return self.initial_BD.new_zeros(self.levels[number].whole.total, self.initial_BD.shape[1])


# --- reverse cycles --------------------------------------------------------------------------------------------------


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class ReverseCycles(AbstractAdjoint):
    """The adjoint recurrence by cycles in reverse.

    A reverse sweep is the relaxation. After k of them the last k chunks are exact, whatever the net, as the first k
    are for the states.
    """

    grids: CoarseGrids | None
    runs: int
    """Reverse sweeps before the coarse grids are used: 1 is F-, 2 is FCF-relaxation."""
    max_cycles: int
    """As many as there are chunks are always enough."""
    tolerance: float | None
    """The change that is small enough, relative to the largest gradient; None to make all cycles."""
    stopping: StoppingRule | None
    """When to fall back to a sequential backward pass; None for never."""

    def solve(self, graph: ChunkGraph) -> tuple[list[MaybeTensor], list[MaybeTensor], AdjointStats]:
        """Cycle until nothing changes or enough cycles were made, then one sweep with gradients of weights."""
        num_chunks = graph.chunks.max_per_sequence
        arriving = [torch.zeros_like(end) for end in graph.ends]
        coarse: ReverseGrids | None = None
        done, exact_chunks, residuals = 0, 0, list[float]()
        while done < self.max_cycles and exact_chunks + 1 < num_chunks:
            fresh = graph.sweep(arriving)
            exact_chunks += 1
            residuals.append(residual_norm(fresh, arriving, kind="gradient"))
            if self.tolerance is not None and residuals[-1] <= self.tolerance:
                break
            failure = self._why_stop(residuals, done=done, until_exact=num_chunks - exact_chunks)
            if failure:
                return [], [], AdjointStats(iterations=done, residual=residuals[-1], failure=failure)
            for _ in range(self.runs - 1):
                arriving, fresh = fresh, graph.sweep(fresh)
                exact_chunks += 1
            if self.grids is not None:
                coarse = coarse or ReverseGrids(self.grids, graph.starts)
                fresh = select_chunks(graph.chunks.behind_C <= exact_chunks, fresh, coarse.correct(arriving, fresh))
            arriving = fresh
            done += 1
        d_leaves, d_starts = graph.pull_back(arriving)
        residual = residual_norm(graph.hand_back(d_starts), arriving, kind="gradient")
        failure = "" if math.isfinite(residual) else "a gradient is NaN or inf"
        stats = AdjointStats(iterations=done, residual=residual, failure=failure)
        return d_leaves, d_starts, stats

    def _why_stop(self, residuals: Sequence[float], *, done: int, until_exact: int) -> str:
        if not math.isfinite(residuals[-1]):
            return "a gradient is NaN or inf"
        if self.stopping is None:
            return ""
        return self.stopping.over_budget(residuals, done=done, until_exact=until_exact)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _CoarseRun:
    """The autograd graph of a run over a coarse grid: chunk by chunk, or sequential on the coarsest."""

    level: Level
    tau_PD: torch.Tensor
    points_PD: torch.Tensor
    starts_CD: torch.Tensor | None = None
    ends_CD: torch.Tensor | None = None


@final
class ReverseGrids:
    """Corrections of the gradient by the coarse grids.

    At given states the adjoint recurrence is linear, and so are its corrections: what arrives at a point of a coarse
    grid is what the coarse step after it pulls back, plus what the finer grid is still missing there. Pulling back is
    left to autograd: a run over the grid, forced so that it goes through the given states, is differentiated with
    regard to its forcing term. `starts` are those states, before each chunk of the finest grid (C, ...).
    """

    def __init__(self, grids: CoarseGrids, starts: Sequence[torch.Tensor]) -> None:
        self._grids = grids
        self._runs: list[_CoarseRun] = []
        starts_CD = pack([part.detach() for part in starts])
        for number in range(1, len(grids.levels)):
            points_PD = starts_CD.index_select(0, grids.levels[number - 1].next_Q.to(starts_CD.device))
            run = self._run_through(number, points_PD)
            self._runs.append(run)
            if run.starts_CD is not None:
                starts_CD = run.starts_CD.detach()

    def _run_through(self, number: int, points_PD: torch.Tensor) -> _CoarseRun:
        """A run over a coarse grid that is forced through all these points."""
        grids, level = self._grids, self._grids.levels[number]
        before_PD = level.whole.shift(points_PD, grids.initial_BD)
        with torch.no_grad():
            tau_PD = points_PD - grids.step(number, before_PD)
        tau_PD.requires_grad_()
        if number == len(grids.levels) - 1:
            with torch.enable_grad():
                return _CoarseRun(level=level, tau_PD=tau_PD, points_PD=grids.run(number, tau_PD))
        starts_CD = level.states_before(grids.initial_BD, points_PD).requires_grad_()
        with torch.enable_grad():
            points_PD, ends_CD = grids.relax(number, starts_CD, tau_PD)
        return _CoarseRun(level=level, tau_PD=tau_PD, points_PD=points_PD, starts_CD=starts_CD, ends_CD=ends_CD)

    def correct(self, arriving: Sequence[torch.Tensor], fresh: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """A better guess of what arrives at the end of each chunk (C, ...), of which a sweep made `fresh`."""
        arriving_CD, fresh_CD = pack(arriving), pack(fresh)
        chunk_Q = self._grids.levels[0].chunk_Q.to(arriving_CD.device)
        missing_QD = (fresh_CD - arriving_CD).index_select(0, chunk_Q)
        return unpack(arriving_CD.index_add(0, chunk_Q, self._pull_back(0, missing_QD)), arriving)

    def _pull_back(self, index: int, missing_PD: torch.Tensor) -> torch.Tensor:
        """What is missing at all points of a coarse grid: exactly on the coarsest, else by one cycle."""
        run = self._runs[index]
        if run.starts_CD is None or run.ends_CD is None:
            (found_PD,) = torch.autograd.grad([run.points_PD], [run.tau_PD], [missing_PD], retain_graph=True)
            return found_PD
        made = [run.points_PD, run.ends_CD]
        arriving_CD = torch.zeros_like(run.ends_CD)
        chunk_Q, next_Q = run.level.chunk_Q.to(missing_PD.device), run.level.next_Q.to(missing_PD.device)
        for turn in range(self._grids.runs):
            (d_start_CD,) = torch.autograd.grad(made, [run.starts_CD], [missing_PD, arriving_CD], retain_graph=True)
            passed_QD = d_start_CD.index_select(0, next_Q)
            if turn + 1 < self._grids.runs:
                arriving_CD = torch.zeros_like(run.ends_CD).index_copy(0, chunk_Q, passed_QD)
        short_QD = passed_QD - arriving_CD.index_select(0, chunk_Q)
        arriving_CD = arriving_CD.index_add(0, chunk_Q, self._pull_back(index + 1, short_QD))
        (found_PD,) = torch.autograd.grad(made, [run.tau_PD], [missing_PD, arriving_CD], retain_graph=True)
        return found_PD
