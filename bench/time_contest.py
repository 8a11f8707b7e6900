"""Ways through time beside each other on one net and batch: first the gate, then the clock, all in one run.

Shape legend: T steps, B sequences, F features of the input, H hidden units.
"""

import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Final, final

import torch

from bench.interleaved import PAUSE_SECONDS, Timing
from bench.kernel_gate import pass_gate, relative_error
from bench.kernel_peers import JaxStep, torch_layer, torch_step, weights_of
from bench.training_step import AbstractStep, Batch, StepShape, TorchStep
from stretto.cells import GRU
from stretto.nn import RNN
from stretto.solvers import AbstractSolver, Solution

Tell = Callable[[str], None]

TORCH: Final = "nn.GRU"
SERIAL: Final = "step after step"
EXACT: Final = 1e-5
"""How far a way that promises to be exact may be from step after step, relative to the largest value."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Goal:
    """What the ratio to each peer should be at least; None where nothing is asked."""

    over_torch: float | None = None
    over_serial: float | None = None


NO_GOAL: Final = Goal()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row(StepShape):
    """One way on one net and batch.

    Attributes:
        case: What is compared.
        net: Which net on what.
        way: Who and how.
        timing: Of a training step, forward and backward.
        seconds: What ratios are of: the least time, or where it says so the mean of all calls.
        over_torch: The time of `torch.nn.GRU` over it; None where that was not run.
        over_serial: The time of our own kernel, step after step, over it.
        goal: What these should be.
        output_error: How far its outputs are from those of step after step, relative to the largest.
        gradient_error: The same of all weights' gradients.
        residual: What its solver says is left at boundaries; None where there is no solver.
        fell_back: Whether its solver walked step after step in the end.
        told: What its solver said.
    """

    case: str
    net: str
    way: str
    timing: Timing
    seconds: float
    over_torch: float | None
    over_serial: float
    goal: Goal
    output_error: float
    gradient_error: float
    residual: float | None
    fell_back: bool
    told: str

    @property
    def judged(self) -> list[bool]:
        """Whether each goal is met."""
        pairs = ((self.over_torch, self.goal.over_torch), (self.over_serial, self.goal.over_serial))
        return [found >= goal for found, goal in pairs if goal is not None and found is not None]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """How far a way is from step after step, and what its solver said of it."""

    output: float = 0.0
    gradient: float = 0.0
    solution: Solution | None = None


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A net and what it is trained on.

    Attributes:
        case: What is compared.
        net: Which net on what, in words.
        cell: The net.
        batch: What on.
    """

    case: str
    net: str
    cell: GRU
    batch: Batch

    @property
    def shape(self) -> StepShape:
        """Its sizes."""
        num_steps, batch, input_size = self.batch.x_TBF.shape
        return StepShape(
            num_steps=num_steps, batch=batch, input_size=input_size, hidden_size=self.batch.weight_TBO.shape[2]
        )

    @property
    def where(self) -> str:
        """For messages."""
        return f"{self.case}, {self.shape}"

    def serial(self) -> TorchStep:
        """Our own kernel, step after step."""
        rnn = RNN(self.cell, batch_first=False)
        return TorchStep(SERIAL, forward=lambda x_TBF: rnn(x_TBF)[0], weights=weights_of(rnn), batch=self.batch)

    def torch(self) -> TorchStep:
        """torch's layer with the same weights."""
        return torch_step(torch_layer([self.cell], "GRU", self.shape), batch=self.batch)

    def jax(self) -> JaxStep:
        """JAX's scan with the same weights."""
        return JaxStep(self.cell, batch=self.batch)

    def solved(self, name: str, solver: AbstractSolver) -> "SolverStep":
        """Ours, by a solver."""
        return SolverStep(name, solver, subject=self)

    def solved_anew(self, name: str, make: Callable[[], AbstractSolver]) -> "SolverStep":
        """Ours, by a solver that knows nothing yet, at every call: what it finds out, it pays for each time."""
        return SolverStep(name, make(), subject=self, make=make)


@final
class SolverStep(AbstractStep):
    """A training step by a solver, on a batch whose sequences are known by their numbers.

    Args:
        name: Shown in tables.
        solver: How to walk through time.
        subject: The net, and what it is trained on.
        make: Makes another solver for every step; None to keep the first.
    """

    def __init__(
        self,
        name: str,
        solver: AbstractSolver,
        *,
        subject: Subject,
        make: Callable[[], AbstractSolver] | None = None,
    ) -> None:
        super().__init__(name)
        self._make = make
        self._rnn = RNN(subject.cell, batch_first=False, solver=solver)
        ids = range(subject.shape.batch)
        self._step = TorchStep(
            name,
            forward=lambda x_TBF: self._rnn(x_TBF, sample_ids=ids)[0],
            weights=weights_of(self._rnn),
            batch=subject.batch,
        )

    @property
    def solution(self) -> Solution:
        """How the last step went."""
        return self._rnn.solution

    def solve_by(self, solver: AbstractSolver) -> None:
        """Go on with another solver, which knows nothing of the steps before."""
        self._rnn.solver = solver

    def run(self) -> None:
        """Forward and backward."""
        self._renew()
        self._step.run()

    def results(self) -> dict[str, torch.Tensor]:
        """Outputs and gradients of one step."""
        self._renew()
        return self._step.results()

    def _renew(self) -> None:
        if self._make is not None:
            self._rnn.solver = self._make()


def pass_exact(step: SolverStep, *, wanted: Mapping[str, torch.Tensor], where: str) -> Errors:
    """Let a way that promises to be exact through the gate.

    Raises:
        StrettoError: If outputs or gradients are not those of step after step.
    """
    found = step.results()
    pass_gate(found, wanted=wanted, name=step.name, peer=SERIAL, where=where, tolerance=EXACT)
    return errors_of(found, wanted=wanted, solution=step.solution)


def errors_of(
    found: Mapping[str, torch.Tensor], *, wanted: Mapping[str, torch.Tensor], solution: Solution | None
) -> Errors:
    """How far results are from those wanted, position by position, the output first."""
    each = [relative_error(one, wanted=other) for one, other in zip(found.values(), wanted.values(), strict=True)]
    # A copy: the solver goes on to write into its own.
    said = None if solution is None else dataclasses.replace(solution)
    return Errors(output=each[0], gradient=max(each[1:]), solution=said)


def in_turns(tasks: Mapping[str, Callable[[], object]], *, rounds: int) -> dict[str, Timing]:
    """Time every task once a round; torch's layer, which takes long, in the first round and the middle one alone."""
    taken: dict[str, list[float]] = {name: [] for name in tasks}
    for number in range(rounds):
        for name, task in tasks.items():
            if name == TORCH and number not in (0, rounds // 2):
                continue
            # Threads of the task before may spin for a while in wait of more work.
            time.sleep(PAUSE_SECONDS)
            begun = time.perf_counter()
            task()
            taken[name].append(time.perf_counter() - begun)
    return {
        name: Timing(least=min(seconds), median=statistics.median(seconds), rounds=len(seconds))
        for name, seconds in taken.items()
    }


def call_by_call(tasks: Mapping[str, Callable[[], object]], *, calls: int) -> dict[str, list[float]]:
    """Seconds of so many calls of each, in turns; torch's layer, which takes long, at two of them alone."""
    taken: dict[str, list[float]] = {name: [] for name in tasks}
    for number in range(calls):
        # Who goes first may find caches that the other left cold.
        for name in list(tasks)[:: 1 if number % 2 else -1]:
            if name == TORCH and number not in (0, calls // 2):
                continue
            time.sleep(PAUSE_SECONDS)
            begun = time.perf_counter()
            tasks[name]()
            taken[name].append(time.perf_counter() - begun)
    return taken


def timed_rows(
    subject: Subject,
    steps: Sequence[AbstractStep],
    *,
    errors: Mapping[str, Errors],
    goals: Mapping[str, Goal],
    rounds: int,
) -> list[Row]:
    """Time all steps in turn; each must have run before. Ratios are of the least times."""
    timings = in_turns({step.name: step.run for step in steps}, rounds=rounds)
    least = {name: timing.least for name, timing in timings.items()}
    return [
        row_of(subject, name, timing, seconds=least, goal=goals.get(name, NO_GOAL), errors=errors.get(name, Errors()))
        for name, timing in timings.items()
    ]


def row_of(
    subject: Subject, way: str, timing: Timing, *, seconds: Mapping[str, float], goal: Goal, errors: Errors
) -> Row:
    """A row of a subject, with the ratios of its seconds to those of torch's layer, if it was timed, and our kernel."""
    said = errors.solution
    return Row(
        **dataclasses.asdict(subject.shape),
        case=subject.case,
        net=subject.net,
        way=way,
        timing=timing,
        seconds=seconds[way],
        over_torch=seconds[TORCH] / seconds[way] if TORCH in seconds else None,
        over_serial=seconds[SERIAL] / seconds[way],
        goal=goal,
        output_error=errors.output,
        gradient_error=errors.gradient,
        residual=None if said is None else said.residual,
        fell_back=said is not None and said.fell_back,
        told="" if said is None else said.reason,
    )
