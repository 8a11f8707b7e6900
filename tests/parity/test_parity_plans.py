"""The plan of a step: what leaves the loop, what is merged and split, and what stays.

Shape legend: F features, H hidden units.
"""

import pytest
import torch
from parity_cells import layer
from parity_own_cells import (
    Concatenated,
    DelayLine,
    LoopBehindLoop,
    OldState,
    OneState,
    PureDelay,
    SeparateGates,
    TwoLoops,
    UnusedState,
)

import stretto
from cell_settings import F
from stretto.cells import Cell

GEMMS: dict[str, tuple[int, int, int]] = {
    **dict.fromkeys("elman lstm gru peephole coupled layer-norm-lstm ligru clockwork".split(), (1, 1, 1)),
    **dict.fromkeys("gru-before minimal projected".split(), (2, 2, 1)),
    "indrnn": (0, 0, 1),
    "multiplicative": (2, 2, 2),
}
"""Products with weights: in a step, where they must wait for the state, forward and backward; and hoisted ones."""


@pytest.mark.parametrize("setting", GEMMS)
def test_products_in_and_before_the_loop(setting: str) -> None:
    counts = layer(setting, 6, backend="eager").explain().counts
    assert counts["loops"] == (2 if setting == "clockwork" else 1)
    assert (counts["forward_gemms"], counts["backward_gemms"], counts["hoisted_gemms"]) == GEMMS[setting]
    assert counts["sunk_gemms"] == 0


@pytest.mark.parametrize(
    ("cell", "loops", "gemms", "rewrite"),
    [
        (Concatenated, 1, 1, "split"),
        (SeparateGates, 1, 1, "merged"),
        (TwoLoops, 2, 1, ""),
        # The product between the loops is computed for all steps at once.
        (LoopBehindLoop, 2, 2, ""),
        (DelayLine, 1, 1, ""),
        (PureDelay, 0, 0, ""),
        (UnusedState, 1, 1, ""),
        (OldState, 1, 1, ""),
    ],
)
def test_loops_and_rewrites(cell: type[Cell], loops: int, gemms: int, rewrite: str) -> None:
    explanation = stretto.RNN(cell(), backend="eager").explain()
    counts = explanation.counts
    assert counts["loops"] == loops
    assert (counts["forward_gemms"], counts["backward_gemms"]) == (gemms, gemms)
    assert not rewrite or any(rewrite in sentence for sentence in explanation.rewrites)


def test_weight_gradients_are_deferred() -> None:
    explanation = layer("lstm", 6, backend="eager").explain()
    assert {"mm", "sum"} <= {operator.name for operator in explanation.operators["deferred"]}


def test_what_depends_on_weights_alone_is_computed_once() -> None:
    class Squared(OneState):
        def new(self, x_BF: torch.Tensor, h_BH: torch.Tensor) -> torch.Tensor:
            return torch.tanh(self.inward(x_BF) + h_BH @ (self.around.weight.T * 0.5).tanh())

    explanation = stretto.RNN(Squared(F), backend="eager").explain()
    assert "tanh" in {operator.name for operator in explanation.operators["once"]}
    assert explanation.counts["forward_gemms"] == 1
