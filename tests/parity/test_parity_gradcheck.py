"""Gradients against differences, once and twice: a second derivative goes through the loop run under autograd.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity_cells import SETTINGS, F
from parity_oracle import by_hand, error_of, tensors_in
from parity_own_cells import ConstantState, Detached, LoopBehindLoop

import stretto
from stretto.cells import Cell

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
    parts = [torch.rand_like(part) for part in tensors_in(structure)]
    x_BTF = torch.randn(B, T, F, dtype=torch.float64)
    inputs = (x_BTF, *parts, *(parameter.detach().clone() for parameter in rnn.parameters()))

    def function(x_BTF: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = rest[: len(parts)] if isinstance(structure, tuple) else rest[0]
        weights = dict(zip(names, rest[len(parts) :], strict=True))
        y_BTO, after = torch.func.functional_call(rnn, weights, (x_BTF, given, lengths))
        return (y_BTO, *tensors_in(after))

    return function, tuple(tensor.requires_grad_() for tensor in inputs)


@pytest.mark.parametrize("lengths", [None, [1, 3]])
@pytest.mark.parametrize("cell", CELLS)
def test_first_derivatives(cell: str, lengths: list[int] | None) -> None:
    torch.manual_seed(0)
    function, inputs = _function(stretto.RNN(CELLS[cell]().double(), backend="cpp"), lengths)
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


@pytest.mark.parametrize("lengths", [None, [0, 3]])
@pytest.mark.parametrize("cell", CELLS)
def test_second_derivatives(cell: str, lengths: list[int] | None) -> None:
    torch.manual_seed(0)
    function, inputs = _function(stretto.RNN(CELLS[cell]().double(), backend="cpp"), lengths)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def test_every_entry_of_the_first_derivative() -> None:
    torch.manual_seed(0)
    rnn = stretto.RNN(SETTINGS["indrnn-tanh-bare"](7).double(), backend="cpp")
    assert torch.autograd.gradcheck(*_function(rnn, [2, 3]))


@pytest.mark.parametrize("both_ways", [True, False])
@pytest.mark.parametrize("backend", ["cpp", "eager"])
def test_a_penalty_on_the_gradient_equals_the_definition_s(backend: str, both_ways: bool) -> None:
    torch.manual_seed(0)
    rnn = stretto.RNN(SETTINGS["lstm"](7).double(), 2, both_ways, backend=backend)  # type: ignore[arg-type]
    x_BTF = torch.randn(3, 4, F, dtype=torch.float64, requires_grad=True)
    lengths = [2, 0, 4]
    penalties = []
    for y_BTO in (
        rnn(x_BTF, lengths=lengths)[0],
        by_hand(list(rnn.cells), x_BTF, lengths=lengths, state=None, num_directions=1 + both_ways)[0],
    ):
        (slope_BTF,) = torch.autograd.grad(y_BTO.square().sum(), [x_BTF], create_graph=True)
        penalty = (slope_BTF.norm() - 1) ** 2
        penalties.append([penalty, *torch.autograd.grad(penalty, [x_BTF, *rnn.parameters()])])
    for one, other in zip(*penalties, strict=True):
        assert error_of(one, other) < 1e-10


def test_a_third_derivative() -> None:
    torch.manual_seed(0)
    rnn = stretto.RNN(SETTINGS["indrnn-tanh-bare"](7).double(), backend="cpp")
    x_BTF = torch.randn(1, 3, F, dtype=torch.float64, requires_grad=True)
    results = []
    for y_BTO in (rnn(x_BTF)[0], by_hand(list(rnn.cells), x_BTF, lengths=None, state=None, num_directions=1)[0]):
        total = y_BTO.sum()
        for _ in range(3):
            (slope_BTF,) = torch.autograd.grad(total, [x_BTF], create_graph=True)
            total = (slope_BTF**2).sum()
        results.append(slope_BTF)
    assert error_of(*results) < 1e-10


def test_a_second_derivative_past_a_detached_value() -> None:
    torch.manual_seed(0)
    rnn = stretto.RNN(Detached().double(), backend="cpp")
    x_BTF = torch.randn(2, 3, F, dtype=torch.float64, requires_grad=True)
    results = []
    for y_BTO in (rnn(x_BTF)[0], by_hand(list(rnn.cells), x_BTF, lengths=None, state=None, num_directions=1)[0]):
        (slope_BTF,) = torch.autograd.grad(y_BTO.sum(), [x_BTF], create_graph=True)
        results.append(torch.autograd.grad(slope_BTF.square().sum(), [x_BTF])[0])
    assert error_of(*results) < 1e-10
