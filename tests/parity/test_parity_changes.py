"""A cell that is changed after a call, in whatever way, is run as it is now.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

import types
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity_oracle import Batch, assert_close, defined, error_of, found, noise
from parity_own_cells import H, OneState, own_layer
from torch import nn
from torch.nn.utils import parametrizations

from cell_settings import F
from stretto.state import flatten


class Changeable(OneState):
    """Settings of many kinds."""

    def __init__(self, input_size: int = F) -> None:
        super().__init__(input_size)
        self.function = torch.tanh
        self.module: nn.Module = nn.Tanh()
        self.table = {"halved": False}
        self.factor = 1.0
        self.factors: list[Any] = [1.0, [1.0]]
        self.dropped: int | None = None

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH = self.module(self.function(self.inward(x_t) + self.around(state)))
        h_BH = h_BH * (0.5 if self.table["halved"] else 1.0) * self.factor * self.factors[0] * self.factors[1][0]
        return (h_BH if self.dropped is None else h_BH[:, : -self.dropped]), h_BH


class Subtracting(Changeable):
    """Something else."""

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH = torch.tanh(self.inward(x_t) - self.around(state))
        return h_BH, h_BH


def _set_class(cell: Any) -> None:
    cell.__class__ = Subtracting


CHANGES: dict[str, Callable[[Any], Any]] = {
    "number": lambda cell: setattr(cell, "factor", 0.7),
    "none": lambda cell: setattr(cell, "dropped", 2),
    "list": lambda cell: cell.factors.__setitem__(0, 0.7),
    "nested-list": lambda cell: cell.factors[1].__setitem__(0, 0.7),
    "dictionary": lambda cell: cell.table.update(halved=True),
    "function": lambda cell: setattr(cell, "function", torch.sigmoid),
    "module": lambda cell: setattr(cell, "module", nn.Sigmoid()),
    "class": _set_class,
    "forward": lambda cell: setattr(cell, "forward", types.MethodType(Subtracting.forward, cell)),
    "no-bias": lambda cell: setattr(cell, "around", nn.Linear(H, H, bias=False).double()),
    "parametrisation": lambda cell: parametrizations.weight_norm(cell.around),
    "hook": lambda cell: cell.around.register_forward_hook(lambda *given: 2 * given[-1]),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_cell_counts_at_the_next_call(change: str) -> None:
    rnn = own_layer(Changeable, backend="eager")
    batch = Batch(x_BTF=noise(3, 4, F), lengths=[4, 0, 3])
    before = found(rnn, batch)
    CHANGES[change](rnn.cells[0])
    with torch.no_grad():
        after = rnn(batch.x_BTF, lengths=batch.lengths)
        hand_BTH, ends = defined(rnn, batch.x_BTF, batch.lengths)
    assert_close([after[0], *flatten(after[1])], [hand_BTH, *ends])
    # Weight norm alone changes how a weight is stored, not what it is.
    same = after[0].shape == before.values["y"].shape and error_of(after[0], before.values["y"]) < 1e-10
    assert same == (change == "parametrisation")


def test_another_cell_in_the_place_of_the_first_counts() -> None:
    rnn = own_layer(Changeable, backend="eager")
    x_BTF = noise(3, 4, F)
    for _ in range(20):  # Python soon gives the memory of a cell that is gone to a new one.
        for kind in (Changeable, Subtracting):
            rnn(x_BTF)
            del rnn.cells[0]
            rnn.cells.append(kind().double())
            assert_close([rnn(x_BTF)[0]], [defined(rnn, x_BTF)[0]])
