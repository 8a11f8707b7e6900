"""What becomes of a step: what leaves the loop, what is merged and split, and what stays.

Shape legend: F features, H hidden units.
"""

from typing import Any

import pytest
import torch
from parity_cells import F, layer
from parity_own_cells import (
    Concatenated,
    DelayLine,
    H,
    LoopBehindLoop,
    OldState,
    OneState,
    PureDelay,
    SeparateGates,
    TwoLoops,
    UnusedState,
)

import stretto
from stretto.cells import Cell

GEMMS: dict[str, tuple[int, int]] = {
    "elman": (1, 1),
    "lstm": (1, 1),
    "gru": (1, 1),
    "peephole": (1, 1),
    "coupled": (1, 1),
    "layer-norm-lstm": (1, 1),
    "ligru": (1, 1),
    "clockwork": (1, 1),
    "indrnn": (0, 0),
    "gru-before": (2, 2),
    "minimal": (2, 2),
    "multiplicative": (2, 2),
    "projected": (2, 2),
}
"""Products of a step with weights that must wait for the state: forward and backward."""


@pytest.mark.parametrize("setting", GEMMS)
def test_products_in_the_loop(setting: str) -> None:
    counts = layer(setting, 6, backend="eager").explain().counts
    assert counts["loops"] == (2 if setting == "clockwork" else 1)
    assert (counts["forward_gemms"], counts["backward_gemms"]) == GEMMS[setting]


@pytest.mark.parametrize("setting", ["elman", "lstm", "gru", "gru-before", "layer-norm-lstm", "ligru", "indrnn"])
def test_the_product_with_the_input_is_hoisted(setting: str) -> None:
    counts = layer(setting, 6, backend="eager").explain().counts
    assert (counts["hoisted_gemms"], counts["sunk_gemms"]) == (1, 0)


def test_weight_gradients_are_deferred() -> None:
    explanation = layer("lstm", 6, backend="eager").explain()
    assert explanation.counts["deferred_gemms"] == 1
    assert {"mm", "sum"} <= {operator.name for operator in explanation.operators["deferred"]}


def test_an_lstm_stores_no_more_than_its_gates_and_a_cell() -> None:
    """Four gates after their activations and tanh(c), of 6 units each."""
    assert 0 < layer("lstm", 6, backend="eager").explain().counts["saved"] <= 5 * 6


def _plan(cell: type[Cell]) -> dict[str, int]:
    torch.manual_seed(0)
    return stretto.RNN(cell().double(), backend="eager").explain().counts


def test_a_product_of_a_concatenation_is_split() -> None:
    counts = _plan(Concatenated)
    assert (counts["loops"], counts["forward_gemms"], counts["backward_gemms"]) == (1, 1, 1)
    explanation = stretto.RNN(Concatenated(), backend="eager").explain()
    assert explanation.counts["hoisted_gemms"] == 1
    assert any("split" in sentence for sentence in explanation.rewrites)


def test_products_of_separate_gates_are_merged() -> None:
    counts = _plan(SeparateGates)
    assert (counts["loops"], counts["forward_gemms"], counts["backward_gemms"]) == (1, 1, 1)
    rewrites = stretto.RNN(SeparateGates(), backend="eager").explain().rewrites
    assert any("merged" in sentence for sentence in rewrites)


def test_what_reads_the_state_alone_is_sunk() -> None:
    class WithHead(OneState):
        def __init__(self) -> None:
            super().__init__()
            self.head = torch.nn.Linear(H, 3)

        def forward(self, x_t: torch.Tensor, state: Any) -> Any:
            h_BH = self.new(x_t, state)
            return self.head(h_BH), h_BH

    explanation = stretto.RNN(WithHead(), backend="eager").explain()
    assert (explanation.counts["sunk_gemms"], explanation.counts["forward_gemms"]) == (1, 1)


@pytest.mark.parametrize(
    ("cell", "loops"),
    [(TwoLoops, 2), (LoopBehindLoop, 2), (DelayLine, 1), (PureDelay, 0), (UnusedState, 1), (OldState, 1)],
)
def test_loops(cell: type[Cell], loops: int) -> None:
    assert _plan(cell)["loops"] == loops


def test_the_product_behind_a_loop_is_hoisted_out_of_the_next() -> None:
    """One product in each of the two loops; the one between them is computed for all steps at once."""
    counts = _plan(LoopBehindLoop)
    assert (counts["forward_gemms"], counts["backward_gemms"]) == (2, 2)


def test_what_depends_on_weights_alone_is_computed_once() -> None:
    class Squared(OneState):
        def new(self, x_BF: torch.Tensor, h_BH: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.inward(x_BF) + h_BH @ (self.around.weight.T * 0.5).tanh())

    explanation = stretto.RNN(Squared(F), backend="eager").explain()
    assert "tanh" in {operator.name for operator in explanation.operators["once"]}
    assert explanation.counts["forward_gemms"] == 1
