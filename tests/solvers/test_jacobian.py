"""All steps at once and their Jacobians, beside those of the cell step by step.

Shape legend: B sequences, T steps, P real steps of all sequences, S numbers of a state, F features, H hidden units.
"""

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import stretto
from stretto.kernels import Layout
from stretto.solvers import AbstractSolver, Chain, Serial, Solved
from stretto.solvers.chunks import Chunks
from stretto.solvers.newton.jacobian import Steps
from stretto.solvers.newton.line import Line
from stretto.state import flatten, unflatten

F, H = 3, 5
LENGTHS = [4, 0, 6, 1]


class _Kept(AbstractSolver):
    """Walks step after step, and keeps what it was given."""

    chain: Chain

    def solve(self, chain: Chain) -> Solved:
        self.chain = chain
        return Serial().solve(chain)


def _chain(cell: torch.nn.Module, x_BTF: torch.Tensor, lengths: list[int]) -> Chain:
    solver = _Kept()
    stretto.RNN(cell, backend="eager", solver=solver)(x_BTF, lengths=lengths)
    return solver.chain


class _Pairs(stretto.Cell):
    """Each number moves itself, and one of them another."""

    def __init__(self, size: int, moves: int, moved: int) -> None:
        super().__init__()
        matrix_SS = torch.diag(torch.linspace(0.3, 0.7, size, dtype=torch.float64))
        if moves != moved:
            matrix_SS[moves, moved] = 0.2
        self.weight = torch.nn.Parameter(matrix_SS)

    def initial_state(self, batch_size: int) -> torch.Tensor:
        return self.zeros(batch_size, len(self.weight))

    def forward(self, x_t: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        state = torch.tanh(state @ self.weight + x_t)
        return state, state


@settings(deadline=None)
@given(st.lists(st.integers(0, 12), min_size=1, max_size=6).filter(any), st.integers(1, 14))
def test_a_line_has_each_sequence_from_its_first_step_to_its_last(lengths: list[int], num_chunks: int) -> None:
    """Each row says which sequence it is of, by hundreds, and which step it is."""
    layout = Layout(np.array(sorted(lengths, reverse=True), dtype=np.int64))
    line, chunks = Line(layout), Chunks.cut(layout, num_chunks)
    said_P = (100.0 * layout.sequence_P + layout.step_P)[line.rows_P]
    expected_P = torch.tensor([100.0 * b + t for b, length in enumerate(layout.lengths_B) for t in range(length)])
    assert torch.equal(said_P, expected_P)
    earlier_P = line.earlier(said_P[:, None], 100.0 * torch.arange(layout.num_rows)[:, None] - 1)[:, 0]
    assert torch.equal(earlier_P, expected_P - 1)
    assert torch.equal(line.first_P, expected_P % 100 == 0)
    before_C = line.boundaries(said_P[:, None], chunks)[:, 0]
    expected_C = 100.0 * chunks.sequence_C + torch.from_numpy(chunks.number_C) * chunks.length - 1
    assert torch.equal(before_C[~chunks.is_first_C], expected_C[~chunks.is_first_C])


CELLS = {
    "gru": lambda: stretto.cells.GRU(F, H),
    "lstm": lambda: stretto.cells.LSTM(F, H),
    "indrnn": lambda: stretto.cells.IndRNN(F, H),
    "recurrent-dropout": lambda: stretto.cells.RecurrentDropout(stretto.cells.Elman(F, H)),
}


@pytest.mark.parametrize("cell_name", sorted(CELLS))
def test_jacobians_are_those_of_the_cell(cell_name: str) -> None:
    torch.manual_seed(0)
    cell = CELLS[cell_name]().double()
    chain = _chain(cell, torch.randn(len(LENGTHS), 6, F, dtype=torch.float64), LENGTHS)
    line = Line(chain.layout)
    steps = Steps(chain, line)
    state = cell.initial_state(1)
    earlier_PS = torch.randn(sum(LENGTHS), steps.size, dtype=torch.float64)

    def moved(earlier_S: torch.Tensor, x_F: torch.Tensor) -> torch.Tensor:
        parts = earlier_S[None].split([part.shape[1] for part in flatten(state)], dim=1)
        return torch.cat([part[0] for part in flatten(cell(x_F[None], unflatten(state, parts))[1])])

    taken = steps.taken(earlier_PS)
    dense_PSS, diagonal_PS = taken.jacobians("dense"), taken.jacobians("diagonal")
    assert taken.products == 2 * steps.size
    for row, x_F in enumerate(chain.x_PF[line.rows_P].detach()):
        assert torch.allclose(taken.after_PS[row], moved(earlier_PS[row], x_F), atol=1e-13)
        expected_SS = torch.func.jacrev(moved)(earlier_PS[row], x_F)
        assert torch.allclose(dense_PSS[row], expected_SS, atol=1e-13)
        assert torch.allclose(diagonal_PS[row], expected_SS.diagonal(), atol=1e-13)
    assert torch.allclose(steps.after(earlier_PS), taken.after_PS, atol=1e-13)
    assert not taken.after_PS.requires_grad


@pytest.mark.parametrize("size", [1, 2, 5, 8, 9])
def test_diagonal_jacobians_take_few_products(size: int) -> None:
    chain = _chain(_Pairs(size, 0, 0), torch.randn(2, 4, size, dtype=torch.float64), [4, 3])
    steps = Steps(chain, Line(chain.layout))
    taken = steps.taken(torch.randn(7, size, dtype=torch.float64))
    found_PS = taken.diagonals_if_that_is_all()
    assert found_PS is not None
    assert taken.products == 1 + (size - 1).bit_length()
    assert torch.equal(found_PS, taken.jacobians("diagonal"))


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 9), st.data())
def test_one_number_that_moves_another_is_noticed(size: int, data: st.DataObject) -> None:
    moves, moved = data.draw(st.lists(st.integers(0, size - 1), min_size=2, max_size=2, unique=True))
    chain = _chain(_Pairs(size, moves, moved), torch.randn(1, 3, size, dtype=torch.float64), [3])
    taken = Steps(chain, Line(chain.layout)).taken(torch.randn(3, size, dtype=torch.float64))
    assert taken.diagonals_if_that_is_all() is None
