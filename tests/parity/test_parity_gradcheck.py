"""Gradients against differences, once and twice: a second derivative goes through the loop run under autograd.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity_cells import layer
from parity_oracle import KERNELS, assert_close, defined, noise
from parity_own_cells import ConstantState, Detached, LoopBehindLoop

import stretto
from cell_settings import SETTINGS, F
from stretto.cells import Cell
from stretto.state import flatten

CELLS: dict[str, Callable[[], Cell]] = {
    "lstm": lambda: SETTINGS["lstm"](7),
    "gru-before": lambda: SETTINGS["gru-before"](7),
    "layer-norm-lstm": lambda: SETTINGS["layer-norm-lstm"](7),
    "attention": lambda: SETTINGS["attention"](7),
    "indrnn": lambda: SETTINGS["indrnn-tanh-bare"](7),
    "constant-state": ConstantState,
    "loop-behind-loop": LoopBehindLoop,
}
T, B = 3, 2


def _function(rnn: stretto.RNN, lengths: list[int] | None) -> tuple[Callable[..., Any], tuple[torch.Tensor, ...]]:
    torch.manual_seed(1)
    names = [name for name, _ in rnn.named_parameters()]
    structure = rnn.cells[0].initial_state(B)  # type: ignore[operator]
    parts = [torch.rand_like(part) for part in flatten(structure)]
    inputs = (noise(B, T, F), *parts, *(parameter.detach().clone() for parameter in rnn.parameters()))

    def function(x_BTF: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = rest[: len(parts)] if isinstance(structure, tuple) else rest[0]
        weights = dict(zip(names, rest[len(parts) :], strict=True))
        y_BTO, after = torch.func.functional_call(rnn, weights, (x_BTF, given, lengths))
        return (y_BTO, *flatten(after))

    return function, tuple(tensor.requires_grad_() for tensor in inputs)


@pytest.mark.parametrize("lengths", [None, [1, 3]])
@pytest.mark.parametrize("cell", CELLS)
def test_first_derivatives(cell: str, lengths: list[int] | None) -> None:
    """Along a random direction; one cell's in every entry."""
    torch.manual_seed(0)
    function, inputs = _function(stretto.RNN(CELLS[cell]().double(), backend="cpp"), lengths)
    assert torch.autograd.gradcheck(function, inputs, fast_mode=cell != "indrnn")


@pytest.mark.parametrize("lengths", [None, [0, 3]])
@pytest.mark.parametrize("cell", CELLS)
def test_second_derivatives(cell: str, lengths: list[int] | None) -> None:
    torch.manual_seed(0)
    function, inputs = _function(stretto.RNN(CELLS[cell]().double(), backend="cpp"), lengths)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def _twice(rnn: stretto.RNN, x_BTF: torch.Tensor, lengths: list[int] | None = None) -> list[torch.Tensor]:
    """Outputs of the layer and of its definition."""
    return [rnn(x_BTF, lengths=lengths)[0], defined(rnn, x_BTF, lengths)[0]]


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("backend", KERNELS)
def test_a_penalty_on_the_gradient_equals_the_definition_s(backend: str, both_ways: bool) -> None:
    rnn = layer("lstm", 7, backend=backend, num_layers=2, bidirectional=both_ways)
    x_BTF = noise(3, 4, F).requires_grad_()
    penalties = []
    for y_BTO in _twice(rnn, x_BTF, [2, 0, 4]):
        (slope_BTF,) = torch.autograd.grad(y_BTO.square().sum(), [x_BTF], create_graph=True)
        penalty = (slope_BTF.norm() - 1) ** 2
        penalties.append([penalty, *torch.autograd.grad(penalty, [x_BTF, *rnn.parameters()])])
    assert_close(*penalties)


@pytest.mark.parametrize(("cell", "order"), [(CELLS["indrnn"], 3), (Detached, 2)])
def test_derivatives_of_higher_order(cell: Callable[[], Cell], order: int) -> None:
    """The third one; and the second one past a detached value."""
    torch.manual_seed(0)
    rnn = stretto.RNN(cell().double(), backend="cpp")
    x_BTF = noise(2, 3, F).requires_grad_()
    results = []
    for y_BTO in _twice(rnn, x_BTF):
        total = y_BTO.sum()
        for _ in range(order):
            (slope_BTF,) = torch.autograd.grad(total, [x_BTF], create_graph=True)
            total = (slope_BTF**2).sum()
        results.append(slope_BTF)
    assert_close(results[:1], results[1:])
