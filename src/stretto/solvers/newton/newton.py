"""Newton's method on whole trajectories, after Lim et al. (2024), "DEER", and Gonzalez et al. (2024), "quasi-DEER".

The unknowns are the states after all steps. Each iteration takes all steps at once from the states assumed before them,
and corrects these by the linear recurrence that the steps' Jacobians make, which a scan solves in few rounds.

Shape legend: B sequences, C chunks of all sequences, P real steps of all sequences, S numbers of a state.
"""

import math
from collections.abc import Sequence
from typing import Final, final

import torch

from stretto.errors import StrettoError
from stretto.solvers.chunks import Chunks
from stretto.solvers.habit import Habit, Key, alike
from stretto.solvers.newton.jacobian import Form, Steps
from stretto.solvers.newton.line import Line
from stretto.solvers.newton.scan import solve_recurrence
from stretto.solvers.reverse_sweep import Limits, Swept
from stretto.solvers.serial import Serial
from stretto.solvers.solver import AbstractSolver, Chain, Solution, Solved
from stretto.solvers.sweep import mismatch, walk_chunks

MOST_BYTES: Final = 1 << 30
"""Of dense Jacobians and their products."""
MOST_CHUNKS: Final = 32
PATIENCE: Final = 5
"""Iterations in which the mismatch must at least halve, or the number of steps that have one."""
ROUNDING: Final = 1000
"""Times the finest difference of a number that may be left by rounding."""
WALKS: Final = 3
"""Walks from a trajectory, made better each time, before it is given up."""


@final
class Newton(AbstractSolver):
    """Finds all states of a trajectory at once, by Newton's method and an associative scan.

    It converges within few iterations for nets that forget soon, and does not for nets whose largest Lyapunov exponent
    is about zero or above; those are walked step after step, for some calls without trying again, and `Solution` says
    so and why. Outputs and gradients are the cell's own: chunks of time are walked from the states that were found, and
    their ends must meet these within `tolerance`. The gradient is exact for either form, for it does not go through the
    iterations.

    `Solution.iterations` counts iterations and walks; `Solution.work` also each product with all steps' Jacobians.

    Args:
        jacobian: "dense" takes whole Jacobians, S * S numbers a step for a state of S; "diagonal" takes their diagonals
            alone, which need less memory and no products of matrices, and more iterations, unless the cell's Jacobians
            are diagonal.
        tolerance: The mismatch that is small enough, relative to states above 1.
        max_iterations: Iterations after which to walk step after step instead, tried at every call; by default, when
            they no longer help.
        damping: Share by which Jacobians are made smaller, from 0 up to 1; slower, and steadier for nets near the edge.

    Example:
        >>> rnn = stretto.RNN(stretto.cells.GRU(3, 8), solver=stretto.Newton(tolerance=1e-6))
        >>> y, state = rnn(torch.randn(2, 500, 3))
        >>> rnn.solution.residual <= 1e-6
        True
    """

    def __init__(
        self,
        *,
        jacobian: Form = "dense",
        tolerance: float = 1e-6,
        max_iterations: int | None = None,
        damping: float = 0.0,
    ) -> None:
        if jacobian not in ("dense", "diagonal"):
            raise StrettoError(f"jacobian is {jacobian!r}", fix='Choose one of "dense", "diagonal".')
        if isinstance(tolerance, bool) or not (isinstance(tolerance, (int, float)) and 0 < tolerance < math.inf):
            raise StrettoError(f"tolerance is {tolerance!r}", fix="Give a number above 0, such as 1e-6.")
        if max_iterations is not None and (not isinstance(max_iterations, int) or max_iterations < 1):
            raise StrettoError(f"max_iterations is {max_iterations!r}", fix="Give a whole number from 1 on, or None.")
        if not (isinstance(damping, (int, float)) and 0 <= damping < 1):
            raise StrettoError(f"damping is {damping!r}", fix="Give a number from 0 on that is below 1.")
        self.jacobian: Form = jacobian
        self.tolerance = float(tolerance)
        self.max_iterations = max_iterations
        self.damping = float(damping)
        self._habits: dict[Key, Habit] = {}

    def solve(self, chain: Chain) -> Solved:
        """Iterate until the trajectory is right, then walk its chunks at once; gradients flow through that walk."""
        unfit = self._unfit(chain)
        if unfit:
            return _serially(chain, iterations=0, work=0.0, reason=unfit)
        habit = self._habit(chain)
        skipped = habit.skipped()
        if skipped:
            return _serially(chain, iterations=0, work=0.0, reason=skipped)
        solved = self._searched(chain)
        habit.learn(solved)
        return solved

    def _habit(self, chain: Chain) -> Habit:
        """Of batches about as long; one that never rests if a number of iterations was asked for."""
        if self.max_iterations is not None:
            return Habit()
        return self._habits.setdefault(alike(chain, chain.layout.num_steps.bit_length()), Habit())

    def _searched(self, chain: Chain) -> Solved:
        # A caller in inference mode makes tensors that no derivative can be taken of.
        with torch.inference_mode(mode=False), torch.no_grad():
            search = _Search(chain, self)
        chunks = Chunks.cut(chain.layout, MOST_CHUNKS)
        solution = Solution(solver="newton")

        def report(back: Swept) -> None:
            solution.backward_iterations, solution.backward_residual = math.ceil(back.sweeps), back.residual

        target = self.tolerance
        for walks in range(1, WALKS + 1):
            with torch.inference_mode(mode=False), torch.no_grad():
                given_up = search.converge(target)
            if given_up and not search.residual <= self.tolerance:
                return _serially(chain, search.iterations + walks - 1, search.work + walks - 1, reason=given_up)
            boundaries = search.boundaries(chunks)
            limits = Limits(tolerance=self.tolerance, most=chunks.most)
            walked, ends = walk_chunks(chain, chunks, boundaries, backward=limits, report=report)
            finite = all(bool(end.isfinite().all()) for end in ends)
            arrived = [chunks.arrived(end) for end in ends]
            gap = mismatch(arrived, boundaries, ~chunks.is_first_C) if finite else math.inf
            if gap <= self.tolerance:
                solution.iterations, solution.work = search.iterations + walks, search.work + walks
                solution.residual = gap
                solution.reason = f"{_said(search.iterations)}, then {chunks.most} chunks of {chunks.length} steps"
                return Solved(walked=walked, solution=solution)
            if given_up or not finite:
                break
            # Over a chunk, what steps miss each other by adds up.
            target = self.tolerance * search.residual / (2 * gap)
        reason = f"walks from the states that were found do not meet: a mismatch of {gap:.1e} is left"
        return _serially(chain, search.iterations + walks, search.work + walks, reason=reason)

    def _unfit(self, chain: Chain) -> str:
        """Why not to begin; empty if there is no reason."""
        if chain.layout.num_steps <= 1:
            return "no sequence has more than one step"
        size = sum(math.prod(state.shape[1:]) for state in chain.states)
        if size == 0:
            return "there is no state"
        for number, state in enumerate(chain.states):
            if not state.is_floating_point():
                return f"part {number} of the state is of {state.dtype}, which has no derivative"
        bytes_each = max(state.element_size() for state in chain.states)
        needed = 2 * chain.layout.total * size**2 * bytes_each
        if self.jacobian == "dense" and needed > MOST_BYTES:
            return (
                f"Jacobians of {chain.layout.total} steps and {size} numbers each way would take {needed / 2**30:.1f} "
                f'GiB, and {MOST_BYTES / 2**30:.1f} are allowed: use jacobian="diagonal", or stretto.Shooting'
            )
        return ""

    def __repr__(self) -> str:
        usual = {"jacobian": "dense", "tolerance": 1e-6, "max_iterations": None, "damping": 0.0}
        said = [f"{name}={getattr(self, name)!r}" for name, value in usual.items() if getattr(self, name) != value]
        return f"Newton({', '.join(said)})"


def _serially(chain: Chain, iterations: int, work: float, *, reason: str) -> Solved:
    walked = Serial().solve(chain).walked
    solution = Solution(solver="newton", iterations=iterations + 1, fell_back=True, reason=reason, work=work + 1.0)
    return Solved(walked=walked, solution=solution)


@final
class _Search:
    """A trajectory on its way to the right one.

    Args:
        chain: Whose.
        settings: How to go about it.
    """

    def __init__(self, chain: Chain, settings: Newton) -> None:
        self._settings = settings
        self._line = Line(chain.layout)
        self._steps = Steps(chain, self._line)
        self._initial_BS = self._steps.joined(chain.states)
        self._residuals: list[float] = []
        self._off: list[int] = []
        self._coupled = False
        self.iterations = 0
        self.work = 0.0
        # What a few steps from the initial state lead to, wherever they begin: as many as a scan has rounds.
        self._assumed_PS = self._initial_BS.index_select(0, self._line.sequence_P.to(self._initial_BS.device))
        for _ in range(chain.layout.num_steps.bit_length()):
            self._assumed_PS = self._steps.after(self._line.earlier(self._assumed_PS, self._initial_BS))
            self.work += 1
        self._take()

    def boundaries(self, chunks: Chunks) -> list[torch.Tensor]:
        """The states before each chunk."""
        return self._steps.parts(self._line.boundaries(self._taken.after_PS, chunks))

    @property
    def residual(self) -> float:
        """The largest mismatch between the states assumed and the steps that lead there."""
        return self._residuals[-1]

    def converge(self, target: float) -> str:
        """Iterate until the residual is at most `target`; why that failed, or empty."""
        while not self.residual <= target:
            given_up = self._given_up()
            if given_up:
                return given_up
            self._iterate()
        return ""

    def _take(self) -> None:
        """Take all steps from the states that are assumed, and see how well they meet."""
        self._taken = self._steps.taken(self._line.earlier(self._assumed_PS, self._initial_BS))
        self.work += 1
        after = self._steps.parts(self._taken.after_PS)
        assumed = self._steps.parts(self._assumed_PS)
        off_P = (self._taken.after_PS - self._assumed_PS).abs().amax(dim=1) > self._settings.tolerance
        finite = all(bool(part.isfinite().all()) for part in after)
        self._residuals.append(mismatch(after, assumed, torch.ones_like(off_P)) if finite else math.nan)
        self._off.append(int(off_P.sum()))

    def _iterate(self) -> None:
        """Correct the states by what a linear recurrence makes of the mismatches."""
        linear_P = self._linear().mul_(1 - self._settings.damping)
        linear_P[self._line.first_P.to(linear_P.device)] = 0
        self._assumed_PS = self._assumed_PS + solve_recurrence(linear_P, self._taken.after_PS - self._assumed_PS)
        self.iterations += 1
        self._take()

    def _linear(self) -> torch.Tensor:
        taken = self._taken
        linear_P = None if self._coupled else taken.diagonals_if_that_is_all()
        if linear_P is None:
            self._coupled = True
            linear_P = taken.jacobians(self._settings.jacobian)
        self.work += taken.products
        return linear_P

    def _given_up(self) -> str:
        """Why to walk step after step instead; empty if iterations are worth while."""
        most = self._settings.max_iterations
        if not math.isfinite(self.residual):
            return f"iteration {self.iterations} overflows" if self.iterations else "a state is no number"
        if most is not None:
            return f"a mismatch of {self.residual:.1e} is left after {_said(most)}" if self.iterations >= most else ""
        if _halved(self._residuals) or _halved(self._off):
            return ""
        left = f"a mismatch of {self.residual:.1e} is left after {_said(self.iterations)}"
        dtype = self._assumed_PS.dtype
        if self.residual < ROUNDING * torch.finfo(dtype).eps:
            return f"{left}: a tolerance of {self._settings.tolerance:.1e} is finer than {dtype} resolves"
        return (
            f"{left}, the last {PATIENCE} of which did not halve it: the net does not forget, or its step is not smooth"
        )


def _said(iterations: int) -> str:
    return f"{iterations} iteration" if iterations == 1 else f"{iterations} iterations"


def _halved(values: Sequence[float]) -> bool:
    """Whether the lowest of the last is below half of the lowest before; true as long as there are too few."""
    early, late = values[:-PATIENCE], values[-PATIENCE:]
    return not early or min(late) < min(early) / 2
