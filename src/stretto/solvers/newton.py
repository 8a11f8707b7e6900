r"""Newton's method on whole trajectories: DEER (Lim et al., 2024) and quasi-DEER (Gonzalez et al., 2024).

The unknowns are the states after all steps, h_1 ... h_T. They are the root of

    r_t(h) = f_t(h_{t-1}) - h_t,         f_t(h) = cell(x_t, h).

One iteration takes all steps at once from the current states, and solves the linearised equations for the change d:

    d_t = J_t d_{t-1} + r_t,     d_0 = 0,     J_t = df_t/dh at h_{t-1},

    h_0 -----> h_1 -----> h_2 -----> h_3 ----->  ...        current guess
        f_1        f_2        f_3                           all steps at once, with their Jacobians
       (J_1,r_1)  (J_2,r_2)  (J_3,r_3)                      affine maps d -> J d + r
          \________/            \________/                  joined in pairs: an associative scan
                \_____________________/                     2 log2(T) rounds instead of T steps

"dense" Jacobians give Newton's method: quadratic convergence, S x S numbers per step. "diagonal" keeps their diagonals
only (quasi-DEER): cheaper iterations, and more of them. Convergence is fast for nets that forget. For nets whose
largest Lyapunov exponent is about zero or above the products of Jacobians do not decay, and iterations do not converge.

Outputs and gradients come from a run over chunks that start from the states found; their ends must agree with these
states within the tolerance. So the result is exact for either form, and gradients do not go through the iterations.

Shape legend: B sequences, C chunks of all sequences, P real steps of all sequences, T steps, S all units of a state,
F features.
"""

import dataclasses
import math
from functools import cached_property
from typing import Final, Literal, TypeAlias, final

import numpy as np
import torch

from stretto.checks import check_choice, check_float, check_int
from stretto.kernels import Layout, differentiate
from stretto.solvers.adjoint import ReverseSweeps, differentiable_chunks
from stretto.solvers.backoff import Backoff, BackoffKey, backoff_key
from stretto.solvers.base import (
    AbstractSolver,
    Problem,
    Result,
    Solution,
    fall_back,
    format_count,
    has_halved,
    is_finite,
    residual_norm,
    why_incomparable,
)
from stretto.solvers.chunks import Chunks
from stretto.state import pack, unpack

JacobianForm: TypeAlias = Literal["dense", "diagonal"]

MAX_JACOBIAN_BYTES: Final = 1 << 30
"""For dense Jacobians and their products."""
MAX_CHUNKS: Final = 32
STALL_ITERATIONS: Final = 5
"""Iterations in which the residual must at least halve, or the number of steps that miss the tolerance."""
ROUNDING_EPSILONS: Final = 1000
"""A residual below so many machine epsilons may be rounding error."""
MAX_VERIFICATIONS: Final = 3
"""Runs over chunks from trajectories that are improved each time, before giving up."""


@final
class Newton(AbstractSolver):
    """Finds all states of a trajectory at once, by Newton's method and an associative scan.

    It converges within few iterations for nets that forget soon. For nets that do not, it falls back to a sequential
    run, skips the attempt for some calls, and `Solution` says so and why. Outputs and gradients are the cell's own and
    exact within `tolerance`, for either form of Jacobian.

    `Solution.iterations` counts iterations and runs over chunks; `Solution.work` also counts each product with the
    Jacobians of all steps.

    Args:
        jacobian: "dense" uses full Jacobians, S * S numbers per step for a state of S units; "diagonal" uses their
            diagonals, which need less memory and no matrix products, and more iterations unless the cell's Jacobians
            are diagonal.
        tolerance: The difference that is small enough, relative to states above 1.
        max_iterations: Iterations after which to run sequentially instead, tried on every call; by default, when they
            no longer help.
        damping: Share by which Jacobians are shrunk, from 0 up to 1: slower, and steadier for nets near the edge.

    Examples:
        >>> rnn = stretto.RNN(stretto.cells.GRU(3, 8), solver=stretto.Newton(tolerance=1e-6))
        >>> y, state = rnn(torch.randn(2, 500, 3))
        >>> rnn.solution.residual <= 1e-6
        True
    """

    def __init__(
        self,
        *,
        jacobian: JacobianForm = "dense",
        tolerance: float = 1e-6,
        max_iterations: int | None = None,
        damping: float = 0.0,
    ) -> None:
        check_choice(jacobian, name="jacobian", choices=("dense", "diagonal"), owner="Newton")
        self.jacobian: JacobianForm = jacobian
        self.tolerance = check_float(tolerance, name="tolerance", above=0.0, owner="Newton")
        self.max_iterations = (
            None if max_iterations is None else check_int(max_iterations, name="max_iterations", owner="Newton")
        )
        self.damping = check_float(damping, name="damping", at_least=0.0, below=1.0, owner="Newton")
        self._backoffs: dict[BackoffKey, Backoff] = {}

    def solve(self, problem: Problem) -> Result:
        """Iterate until the trajectory is right, then run its chunks at once; gradients flow through that run."""
        unfit = why_incomparable(problem) or self._why_unfit(problem)
        if unfit:
            return fall_back(problem, solver="newton", reason=unfit)
        backoff = self._backoff(problem)
        skip = backoff.should_skip()
        if skip:
            return fall_back(problem, solver="newton", reason=skip)
        result = self._iterate_and_verify(problem)
        backoff.record(result)
        return result

    def _backoff(self, problem: Problem) -> Backoff:
        """For batches of about the same length; one that never skips if a number of iterations was asked for."""
        if self.max_iterations is not None:
            return Backoff()
        return self._backoffs.setdefault(backoff_key(problem, problem.layout.num_steps.bit_length()), Backoff())

    def _iterate_and_verify(self, problem: Problem) -> Result:
        # The caller may be in inference mode, whose tensors cannot be differentiated.
        with torch.inference_mode(mode=False), torch.no_grad():
            newton = _Iteration(problem, self)
        chunks = Chunks.cut(problem.layout, MAX_CHUNKS)
        solution = Solution(solver="newton")
        adjoint = ReverseSweeps(tolerance=self.tolerance, max_sweeps=chunks.max_per_sequence)
        target = self.tolerance
        for runs in range(1, MAX_VERIFICATIONS + 1):
            with torch.inference_mode(mode=False), torch.no_grad():
                failure = newton.converge(target)
            if failure and not newton.residual <= self.tolerance:
                return _fall_back(problem, newton, runs - 1, reason=failure)
            boundaries = newton.boundaries(chunks)
            y_PF, states, ends = differentiable_chunks(problem, chunks, boundaries, adjoint=adjoint, solution=solution)
            residual = chunks.residual(chunks.previous_ends(ends), boundaries) if is_finite(ends) else math.inf
            if residual <= self.tolerance:
                solution.iterations, solution.work = newton.iterations + runs, newton.work + runs
                solution.residual = residual
                then = f"{chunks.max_per_sequence} chunks of {chunks.length} steps"
                solution.reason = f"{format_count(newton.iterations, 'iteration')}, then {then}"
                return Result(y_PF=y_PF, states=states, solution=solution)
            if failure or math.isinf(residual):
                break
            # What single steps miss adds up over a chunk.
            target = self.tolerance * newton.residual / (2 * residual)
        reason = f"runs from the states that were found do not agree: a residual of {residual:.1e} is left"
        return _fall_back(problem, newton, runs, reason=reason)

    def _why_unfit(self, problem: Problem) -> str:
        """Why not to start; empty if there is no reason."""
        if problem.layout.num_steps <= 1:
            return "no sequence has more than one step"
        size = sum(math.prod(state.shape[1:]) for state in problem.states)
        if size == 0:
            return "there is no state"
        for number, state in enumerate(problem.states):
            if not state.is_floating_point():
                return f"part {number} of the state is of {state.dtype}, which has no derivative"
        bytes_each = max(state.element_size() for state in problem.states)
        needed = 2 * problem.layout.total * size**2 * bytes_each
        if self.jacobian == "dense" and needed > MAX_JACOBIAN_BYTES:
            return (
                f"{size} x {size} Jacobians of {problem.layout.total} steps would take {needed / 2**30:.1f} GiB, and "
                f'{MAX_JACOBIAN_BYTES / 2**30:.1f} are allowed: use jacobian="diagonal", or stretto.Shooting'
            )
        return ""


def _fall_back(problem: Problem, newton: "_Iteration", runs: int, *, reason: str) -> Result:
    return fall_back(
        problem, solver="newton", reason=reason, iterations=newton.iterations + runs, work=newton.work + runs
    )


@final
class _Iteration:
    """A trajectory on its way to the right one."""

    def __init__(self, problem: Problem, settings: Newton) -> None:
        self._settings = settings
        self._order = SequenceMajor(problem.layout)
        self._steps = AllSteps(problem, self._order)
        self._initial_BS = pack([state.detach() for state in problem.states])
        self._residuals: list[float] = []
        self._num_off: list[int] = []
        self._is_coupled = False
        self.iterations = 0
        self.work = 0.0
        # The first guess: a few steps from the initial state, wherever they start; as many as a scan has rounds.
        self._states_PS = self._initial_BS.index_select(0, self._order.sequence_P.to(self._initial_BS.device))
        for _ in range(problem.layout.num_steps.bit_length()):
            self._states_PS = self._steps.after(self._order.before(self._states_PS, self._initial_BS))
            self.work += 1
        self._evaluate()

    def boundaries(self, chunks: Chunks) -> list[torch.Tensor]:
        """The states before each chunk."""
        return self._steps.parts(self._order.boundaries(self._linearized.after_PS, chunks))

    @property
    def residual(self) -> float:
        """The largest difference between the current states and the steps that lead there."""
        return self._residuals[-1]

    def converge(self, target: float) -> str:
        """Iterate until the residual is at most `target`; why that failed, or empty."""
        while not self.residual <= target:
            failure = self._why_stop()
            if failure:
                return failure
            self._iterate()
        return ""

    def _evaluate(self) -> None:
        """Take all steps from the current states, and see how far they are off."""
        self._linearized = self._steps.linearize(self._order.before(self._states_PS, self._initial_BS))
        self.work += 1
        after_PS = self._linearized.after_PS
        is_off_P = (after_PS - self._states_PS).abs().amax(dim=1) > self._settings.tolerance
        self._residuals.append(residual_norm(self._steps.parts(after_PS), self._steps.parts(self._states_PS)))
        self._num_off.append(int(is_off_P.sum()))

    def _iterate(self) -> None:
        """Correct the states by the solution of the linearised recurrence."""
        linear_P = self._jacobians().mul_(1 - self._settings.damping)
        linear_P[self._order.is_first_P.to(linear_P.device)] = 0
        residual_PS = self._linearized.after_PS - self._states_PS
        self._states_PS = self._states_PS + solve_recurrence(linear_P, residual_PS)
        self.iterations += 1
        self._evaluate()

    def _jacobians(self) -> torch.Tensor:
        """In the form that was asked for; diagonals whenever these are the whole Jacobians."""
        steps = self._linearized
        linear_P = None if self._is_coupled else steps.diagonals_if_uncoupled()
        if linear_P is None:
            self._is_coupled = True
            linear_P = steps.jacobians(self._settings.jacobian)
        self.work += steps.products
        return linear_P

    def _why_stop(self) -> str:
        """Why to run sequentially instead; empty while iterations make progress."""
        most = self._settings.max_iterations
        if not math.isfinite(self.residual):
            return f"iteration {self.iterations} overflows" if self.iterations else "a state is NaN or inf"
        if most is not None:
            left = f"a residual of {self.residual:.1e} is left after {format_count(most, 'iteration')}"
            return left if self.iterations >= most else ""
        if any(has_halved(values, within=STALL_ITERATIONS) for values in (self._residuals, self._num_off)):
            return ""
        left = f"a residual of {self.residual:.1e} is left after {format_count(self.iterations, 'iteration')}"
        dtype = self._states_PS.dtype
        if self.residual < ROUNDING_EPSILONS * torch.finfo(dtype).eps:
            return f"{left}: a tolerance of {self._settings.tolerance:.1e} is finer than {dtype} resolves"
        return (
            f"{left}, and the last {STALL_ITERATIONS} did not halve it: the net does not forget, or its step is not "
            "smooth"
        )


@final
@dataclasses.dataclass(frozen=True)
class SequenceMajor:
    """All sequences of a batch one after another, each from its first step to its last.

    In this order a recurrence over the batch is a single recurrence, however many sequences there are and however long
    each is. (A `Layout` is step-major: all first steps, then all second steps, and so on.)
    """

    layout: Layout

    @cached_property
    def sequence_P(self) -> torch.Tensor:
        """The sequence of each row."""
        return torch.from_numpy(np.repeat(np.arange(self.layout.num_rows), self.layout.lengths_B))

    @cached_property
    def first_row_B(self) -> torch.Tensor:
        """The first row of each sequence."""
        lengths_B = self.layout.lengths_B
        return torch.from_numpy(np.cumsum(lengths_B) - lengths_B)

    @cached_property
    def is_first_P(self) -> torch.Tensor:
        """Whether each row is the first of its sequence."""
        is_first_P = torch.zeros(self.layout.total, dtype=torch.bool, device="cpu")
        is_first_P[self.first_row_B[: self.layout.num_nonempty]] = True
        return is_first_P

    @cached_property
    def rows_P(self) -> torch.Tensor:
        """The row of the batch for each row of this order."""
        step_P = torch.arange(self.layout.total, device="cpu") - self.first_row_B[self.sequence_P]
        return torch.from_numpy(self.layout.starts_T)[step_P] + self.sequence_P

    def before(self, after_PS: torch.Tensor, initial_BS: torch.Tensor) -> torch.Tensor:
        """The state before each step, from those after each: one row up, the initial state before a first step."""
        going = self.layout.num_nonempty
        return after_PS.roll(1, 0).index_copy(0, self.first_row_B[:going].to(after_PS.device), initial_BS[:going])

    def boundaries(self, after_PS: torch.Tensor, chunks: Chunks) -> torch.Tensor:
        """The state before each chunk (C, S); meaningless for a first one."""
        steps_C = torch.from_numpy(chunks.number_C * chunks.length - 1).clamp(min=0)
        return after_PS.index_select(0, (self.first_row_B[chunks.sequence_C] + steps_C).to(after_PS.device))


@final
class AllSteps:
    """The steps of a problem, independent of each other. Gradients of the problem do not flow through them."""

    def __init__(self, problem: Problem, order: SequenceMajor) -> None:
        self._problem = dataclasses.replace(
            problem,
            # Tensors made in inference mode cannot be differentiated.
            parameters={n: t.clone() if t.is_inference() else t.detach() for n, t in problem.parameters.items()},
        )
        self._x_PF = problem.x_PF.detach().index_select(0, order.rows_P.to(problem.x_PF.device))
        self._layout = Layout.even(num_steps=1, num_rows=order.layout.total)

    def parts(self, states_PS: torch.Tensor) -> list[torch.Tensor]:
        """The parts of the states, in their own shapes and dtypes."""
        like = self._problem.states
        return [part.to(own.dtype) for part, own in zip(unpack(states_PS, like), like, strict=True)]

    def after(self, before_PS: torch.Tensor) -> torch.Tensor:
        """The state after each step."""
        with torch.no_grad():
            return pack(self._problem.run(self._layout, self._x_PF, self.parts(before_PS))[1])

    def linearize(self, before_PS: torch.Tensor) -> "LinearizedSteps":
        """The same, ready for Jacobians."""
        with torch.enable_grad():
            before = [part.detach().requires_grad_() for part in self.parts(before_PS)]
            _, after = self._problem.run(self._layout, self._x_PF, before)
        return LinearizedSteps(before, after)


@final
class LinearizedSteps:
    """All steps from given states, with their autograd graph."""

    def __init__(self, before: list[torch.Tensor], after: list[torch.Tensor]) -> None:
        self._before, self._after = before, after
        self.after_PS = pack([part.detach() for part in after])
        self.products = 0
        """Vector-Jacobian products computed so far, each over all steps."""

    def jacobians(self, form: JacobianForm) -> torch.Tensor:
        """The Jacobian of each step (P, S, S), or its diagonal (P, S), from one product per unit of the state."""
        rows, size = self.after_PS.shape
        linear_P = self.after_PS.new_empty((rows, size, size) if form == "dense" else (rows, size))
        unit_PS = torch.zeros_like(self.after_PS)
        for place in range(size):
            unit_PS[:, place] = 1
            row_PS = self._multiply(unit_PS)
            linear_P[:, place] = row_PS if form == "dense" else row_PS[:, place]
            unit_PS[:, place] = 0
        return linear_P

    def diagonals_if_uncoupled(self) -> torch.Tensor | None:
        """The diagonals of Jacobians that are diagonal (P, S), from few products; None if they are not.

        If no unit affects another, scaling the rows of a Jacobian by 1 or 2 scales its column sums likewise, to the
        last bit. Any two units get different weights by some binary digit of their numbers, so log2(S) products find
        any coupling, except one that cancels out to the last bit.
        """
        _, size = self.after_PS.shape
        sums_PS = self._multiply(torch.ones_like(self.after_PS))
        place_S = torch.arange(size, device=sums_PS.device)
        for digit in range((size - 1).bit_length()):
            weights_S = (1 + (place_S >> digit & 1)).to(sums_PS)
            if not torch.equal(self._multiply(weights_S.expand_as(sums_PS)), weights_S * sums_PS):
                return None
        return sums_PS

    def _multiply(self, d_after_PS: torch.Tensor) -> torch.Tensor:
        """The vector-Jacobian product of each step."""
        self.products += 1
        pieces = unpack(d_after_PS, self._after)
        found = differentiate([(part, d.to(part)) for part, d in zip(self._after, pieces, strict=True)], self._before)
        return pack([torch.zeros_like(part) if d is None else d for part, d in zip(self._before, found, strict=True)])


def solve_recurrence(linear_T: torch.Tensor, offset_TS: torch.Tensor) -> torch.Tensor:
    """All states of the linear recurrence `d_t = linear_t d_{t-1} + offset_t` from zero, by an associative scan.

    Two affine maps in a row are one affine map. Pairs are joined until one map is left; then states are filled in:

        step      1   2   3   4   5   6   7   8
        join          o       o       o       o     maps over steps 1-2, 3-4, 5-6, 7-8
                              o               o     over 1-4, 5-8
                                              o     over 1-8: applied to zero, the state after step 8
        fill in               x                     states, each by one map from the state to its left
                      x               x
                  x       x       x       x

    That is about 2 log2(T) rounds, and about T products of matrices in all, in the first half of the rounds. Linear
    parts are (T, S, S), or (T, S) if diagonal. States are not finite where products overflow.

    Several recurrences may follow one another: the linear part of the first step of each is zero.
    """
    if len(offset_TS) <= 1:
        return offset_TS.clone()
    pairs = len(offset_TS) // 2
    first_T, second_T = linear_T[0 : 2 * pairs : 2], linear_T[1::2]
    joined_TS = _apply(second_T, offset_TS[0 : 2 * pairs : 2], offset_TS[1::2])
    made_TS = torch.empty_like(offset_TS)
    made_TS[1::2] = odd_TS = solve_recurrence(_compose(second_T, first_T), joined_TS)
    made_TS[0] = offset_TS[0]
    between = len(offset_TS) - pairs - 1
    made_TS[2::2] = _apply(linear_T[2::2], odd_TS[:between], offset_TS[2::2])
    return made_TS


def _compose(second_T: torch.Tensor, first_T: torch.Tensor) -> torch.Tensor:
    return second_T * first_T if second_T.dim() == 2 else torch.bmm(second_T, first_T)


def _apply(linear_T: torch.Tensor, state_TS: torch.Tensor, offset_TS: torch.Tensor) -> torch.Tensor:
    if linear_T.dim() == 2:
        return torch.addcmul(offset_TS, linear_T, state_TS)
    return torch.baddbmm(offset_TS[:, :, None], linear_T, state_TS[:, :, None])[:, :, 0]
