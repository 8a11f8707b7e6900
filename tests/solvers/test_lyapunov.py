"""What is predictable can be solved in parallel: iterations and sweeps against the largest Lyapunov exponent.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

import copy
import dataclasses
import functools
import math
import re
from typing import Any

import pytest
import torch
from newton_cells import Rotated
from solver_oracle import assert_equal, results

import stretto
from stretto.solvers import AbstractSolver

H = 16
GAINS = (0.5, 0.8, 1.0, 1.2, 1.6, 2.0, 2.5, 3.0)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Net:
    """A random net, its sequential results on one sequence, and its largest Lyapunov exponent there."""

    rnn: stretto.RNN
    x_BTF: torch.Tensor
    expected: dict[str, torch.Tensor]
    exponent: float

    def by(self, solver: AbstractSolver) -> stretto.RNN:
        """The same net by a solver."""
        rnn = copy.deepcopy(self.rnn)
        rnn.solver = solver
        return rnn


def _exponent(weight_HH: torch.Tensor, h_TH: torch.Tensor) -> float:
    """The largest Lyapunov exponent of tanh(A h + x) along its states: how much a small difference grows a step."""
    moved_H, total = torch.ones_like(h_TH[0]), 0.0
    for h_H in h_TH:
        moved_H = (1 - h_H.square()) * (weight_HH @ moved_H)
        total += math.log(float(moved_H.norm()))
        moved_H = moved_H / moved_H.norm()
    return total / len(h_TH)


@functools.cache
def _sweep(T: int) -> list[Net]:
    """Recurrent weights from weak to strong."""
    generator = torch.Generator().manual_seed(1)
    weight_HH = torch.randn(H, H, generator=generator, dtype=torch.float64) / math.sqrt(H)
    x_BTF = 0.3 * torch.randn(1, T, H, generator=generator, dtype=torch.float64)
    nets = []
    for gain in GAINS:
        rnn = stretto.RNN(Rotated(gain * weight_HH), backend="eager")
        expected = results(rnn, x_BTF)
        exponent = _exponent(gain * weight_HH, expected["y"][0])
        nets.append(Net(rnn=rnn, x_BTF=x_BTF, expected=expected, exponent=exponent))
    exponents = [net.exponent for net in nets]
    assert exponents == sorted(exponents)
    assert exponents[0] < -0.5
    assert sum(exponent > 0.03 for exponent in exponents) >= 3
    return nets


@pytest.mark.parametrize(
    ("solver", "T", "error", "converges", "reason", "most_work"),
    [
        (stretto.Newton(tolerance=1e-12), 300, 1e-10, -0.1, "does not forget", math.inf),
        (stretto.Multigrid(tolerance=1e-12), 300, 1e-10, -0.2, "did not halve", 12),
        # A probe is all that it costs.
        pytest.param(
            stretto.Shooting(num_chunks=6, tolerance=1e-8),
            *(1200, 1e-6, -0.2, "does not forget|remembers about", 1.5),
            marks=pytest.mark.slow,
        ),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, AbstractSolver) else "",
)
def test_solvers_converge_below_zero_and_fall_back_above(
    *, solver: Any, T: int, error: float, converges: float, reason: str, most_work: float
) -> None:
    """The longer a net remembers, the more it takes: iterations, or steps that are burnt in."""
    costs = []
    for net in _sweep(T):
        rnn = net.by(copy.deepcopy(solver))
        assert_equal(results(rnn, net.x_BTF), net.expected, error)
        solution = rnn.solution
        cost = solution.work if isinstance(solver, stretto.Shooting) else solution.iterations
        costs.append(math.inf if solution.fell_back else cost)
        if net.exponent < converges:
            assert not solution.fell_back
            assert solution.residual <= solver.tolerance
        if net.exponent > 0:
            assert solution.fell_back
            assert re.search(reason, solution.reason)
            assert solution.iterations <= 12
            assert solution.work < most_work
            with torch.no_grad():
                rnn(net.x_BTF)
            assert rnn.solution.work == 1.0
            assert rnn.solution.reason.endswith(f" calls: {solution.reason}")
    assert costs == sorted(costs)
    rising = [cost for cost, net in zip(costs, _sweep(T), strict=True) if net.exponent < converges]
    assert len(rising) >= 3
    assert len(set(rising)) == len(rising)


def test_sweeps_until_convergence_rise_to_as_many_as_chunks() -> None:
    """Above zero it takes as many sweeps as chunks: nothing is gained, and it is reported."""
    num_chunks, sweeps = 12, []
    for net in _sweep(300):
        rnn = net.by(stretto.Shooting(num_chunks=num_chunks, tolerance=1e-12, until_converged=True))
        found = results(rnn, net.x_BTF)
        solution = rnn.solution
        assert not solution.fell_back
        assert solution.residual <= 1e-12
        sweeps.append(solution.iterations)
        if net.exponent < 0:
            assert_equal(found, net.expected, 1e-10)
        # Above zero, rounding alone leads to another trajectory, sequentially too. Each step is still the net's own.
        weight_HH = net.rnn.cells[0].weight.detach()  # type: ignore[union-attr, operator]
        h_TH = found["y"][0]
        again_TH = torch.tanh(h_TH[:-1] @ weight_HH.T + net.x_BTF[0, 1:])  # type: ignore[operator]
        assert float((again_TH - h_TH[1:]).abs().max()) <= 1e-12
    exponents = [net.exponent for net in _sweep(300)]
    assert sweeps == sorted(sweeps)
    assert sweeps[0] < sweeps[1] < sweeps[2] < sweeps[3] < num_chunks
    above = {count for count, exponent in zip(sweeps, exponents, strict=True) if exponent > 0}
    assert above == {num_chunks}
