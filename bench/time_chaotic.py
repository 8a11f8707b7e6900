"""What it costs to find out that a net is chaotic: such a net is walked step after step, and the search was in vain.

Shape legend: T steps, B sequences, F features of the input, H hidden units.
"""

import copy
import dataclasses
import math
import statistics
from collections.abc import Callable, Mapping
from typing import Final, final

import torch

from bench.interleaved import Timing
from bench.kernel_gate import FAULT
from bench.time_cases import AGREED, FEATURES, Plan
from bench.time_contest import (
    NO_GOAL,
    Errors,
    Goal,
    Row,
    SolverStep,
    Subject,
    call_by_call,
    pass_exact,
    row_of,
)
from bench.training_step import AbstractStep, StepShape, drawn_batch
from stretto.cells import GRU
from stretto.errors import StrettoError
from stretto.nn import RNN
from stretto.solvers import AbstractSolver, Multigrid, Newton, Shooting

KEPT: Final[Mapping[str, Callable[[], AbstractSolver]]] = {
    "exact chunks": lambda: Shooting(tolerance=AGREED),
    "multigrid to 1e-6": lambda: Multigrid(tolerance=AGREED),
    "Newton, dense": lambda: Newton(tolerance=AGREED),
}
"""Solvers that are kept from call to call, as they are in training."""
ANEW: Final = "exact chunks, probed at every call"
SIZES: Final = ((4096, 64, 16), (4096, 256, 1))
"""Steps, units, and how many times the calls that were asked for.

A search by Newton's method takes as long as dozens of calls, and it takes a run of hundreds to see what is left of
that. Of 256 units its Jacobians would take too much memory, and there is no search.
"""
GOAL: Final = Goal(over_serial=round(1 / 1.15, 2))
"""At most 15 % over step after step."""
STRONGER: Final = 1.05
STRONGEST: Final = 1e3
WEAKEST: Final = 3.0
LOOKED: Final = 512
CLEARLY: Final = 0.005
"""An exponent that is above zero whatever the stretch it was measured on."""
BETWEEN: Final = 16
"""Steps after which a difference is made small again."""
SMALL: Final = 1e-6


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Chaotic:
    """A net, by how much its recurrent weights were scaled, and its largest Lyapunov exponent."""

    cell: GRU
    scale: float
    exponent: float


def chaotic_rows(plan: Plan, *, calls: int) -> list[Row]:
    """Exact solvers on nets that never forget, beside step after step.

    Raises:
        StrettoError: If a solver does not say that it walked step after step.
    """
    rows: list[Row] = []
    for *sizes, times in SIZES[: 1 if plan.quick else None]:
        num_steps, hidden_size = plan.sized(*sizes)
        run = calls if plan.quick else times * calls
        shape = StepShape(num_steps=num_steps, batch=1, input_size=FEATURES, hidden_size=hidden_size)
        batch = drawn_batch(shape)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            net = chaotic(GRU(FEATURES, hidden_size), batch.x_TBF[:, 0])
        told = f"recurrent weights x {net.scale:.2g}, Lyapunov exponent {net.exponent:+.1e}; drawn input"
        subject = Subject(case="chaotic", net=told, cell=net.cell, batch=batch)
        plan.tell(f"{subject.where}: {run} calls")
        rows += _rows(subject, calls=run, goal=NO_GOAL if plan.quick else GOAL)
    return rows


def _rows(subject: Subject, *, calls: int, goal: Goal) -> list[Row]:
    serial = subject.serial()
    wanted = serial.results()
    kept = [subject.solved(name, make()) for name, make in KEPT.items()]
    solved = [*kept, subject.solved_anew(ANEW, KEPT["exact chunks"])]
    errors = {step.name: _pass_fallen_back(step, subject, wanted=wanted) for step in solved}
    # Their first searches were before the clock; they are to be counted.
    for step in kept:
        step.solve_by(KEPT[step.name]())
    every: list[AbstractStep] = [serial, *solved]
    taken = call_by_call({step.name: step.run for step in every}, calls=calls)
    # Searches are dear and few: it is the mean of all calls that counts.
    means = {name: statistics.mean(seconds) for name, seconds in taken.items()}
    return [
        row_of(
            subject,
            name,
            Timing(least=min(seconds), median=statistics.median(seconds), rounds=len(seconds)),
            seconds=means,
            goal=goal if name in KEPT else NO_GOAL,
            errors=errors.get(name, Errors()),
        )
        for name, seconds in taken.items()
    ]


def _pass_fallen_back(step: SolverStep, subject: Subject, *, wanted: Mapping[str, torch.Tensor]) -> Errors:
    errors = pass_exact(step, wanted=wanted, where=subject.where)
    if not step.solution.fell_back:
        raise StrettoError(f"{step.name} does not say that it fell back at {subject.where}", fix=FAULT)
    return errors


def chaotic(cell: GRU, x_TF: torch.Tensor) -> Chaotic:
    """A copy, its recurrent weights made larger until a small difference grows from step to step.

    Not further: with every step gradients grow as differences do.

    Raises:
        StrettoError: If no weights make it so.
    """
    scale = WEAKEST
    while scale < STRONGEST:
        stronger = copy.deepcopy(cell)
        with torch.no_grad():
            stronger.weight_hh.mul_(scale)
        exponent = lyapunov(stronger, x_TF[:LOOKED])
        if exponent > CLEARLY:
            return Chaotic(cell=stronger, scale=scale, exponent=exponent)
        scale *= STRONGER
    raise StrettoError(
        f"no recurrent weights up to {STRONGEST:g} times as large make a net of {cell.hidden_size} units chaotic",
        fix="Give one of more units.",
    )


def lyapunov(cell: GRU, x_TF: torch.Tensor) -> float:
    """The largest Lyapunov exponent along a walk: the logarithm of what a step makes of a small difference."""
    rnn = RNN(copy.deepcopy(cell).double(), backend="eager")
    x_BTF = x_TF.double()[None].expand(2, -1, -1)
    state_BH = torch.zeros(2, cell.hidden_size, dtype=torch.float64)
    state_BH[1] += SMALL / math.sqrt(cell.hidden_size)
    grown = 0.0
    # The first stretch turns the difference into the direction that grows most.
    firsts = range(0, len(x_TF) - BETWEEN + 1, BETWEEN)
    with torch.no_grad():
        for first in firsts:
            state_BH = rnn(x_BTF[:, first : first + BETWEEN], state_BH)[1]
            moved_H = state_BH[1] - state_BH[0]
            size = max(float(moved_H.norm()), torch.finfo(torch.float64).tiny)
            grown += math.log(size / SMALL) if first else 0.0
            state_BH = torch.stack([state_BH[0], state_BH[0] + moved_H * (SMALL / size)])
    return grown / (BETWEEN * max(1, len(firsts) - 1))
