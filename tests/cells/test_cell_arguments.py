"""What a cell cannot be made with, and how its parameters are drawn."""

import math

import numpy as np
import pytest
import torch

from stretto import cells
from stretto.cells import Cell
from stretto.errors import StrettoError

SIMPLE = [
    cells.Elman,
    cells.GRU,
    cells.LSTM,
    cells.PeepholeLSTM,
    cells.LayerNormLSTM,
    cells.LayerNormGRU,
    cells.CoupledLSTM,
    cells.MultiplicativeLSTM,
    cells.LiGRU,
    cells.MinimalGatedUnit,
    cells.IndRNN,
    cells.Clockwork,
    cells.AttentionCell,
]


@pytest.mark.parametrize("kind", SIMPLE)
def test_sizes_that_are_none_are_refused(kind: type[Cell]) -> None:
    for wrong in (0, -3, 2.0, "4", None, True):
        with pytest.raises(StrettoError, match=rf"{kind.__name__} got input_size={wrong!r}"):
            kind(wrong, 4)
        with pytest.raises(StrettoError, match=rf"{kind.__name__} got hidden_size={wrong!r}"):
            kind(4, wrong)


@pytest.mark.parametrize("kind", SIMPLE)
def test_sizes_may_come_from_numpy_and_settings_are_given_by_name(kind: type[Cell]) -> None:
    cell = kind(np.int64(3), np.int32(4))
    assert (cell.input_size, cell.hidden_size) == (3, 4)
    assert kind(3, 4, bias=False).resized(2).bias_ih is None
    with pytest.raises(TypeError):
        kind(3, 4, False)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (cells.Elman, {"nonlinearity": "sigmoid"}),
        (cells.IndRNN, {"nonlinearity": None}),
        (cells.GRU, {"reset": "never"}),
        (cells.LiGRU, {"norm": "batch"}),
        (cells.AttentionCell, {"memory_size": 0}),
        (cells.ProjectedLSTM, {"proj_size": 0}),
        (cells.ProjectedLSTM, {"proj_size": 4}),
        (cells.ProjectedLSTM, {"proj_size": 9}),
    ],
)
def test_settings_that_are_none_are_refused(kind: type[Cell], settings: dict[str, object]) -> None:
    ((name, value),) = settings.items()
    with pytest.raises(StrettoError, match=rf"{kind.__name__} got {name}={value!r}") as caught:
        kind(3, 4, **settings)
    assert caught.value.fix.endswith(".")


@pytest.mark.parametrize("kind", [*SIMPLE, lambda F, H: cells.ProjectedLSTM(F, H, proj_size=7)])
def test_weights_are_drawn_within_the_bound_of_torch(kind: type[Cell]) -> None:
    torch.manual_seed(0)
    bound = 1 / math.sqrt(64)
    for name, weight in kind(30, 64).named_parameters():
        if "norm" in name:
            assert torch.equal(weight, torch.full_like(weight, 1.0 if name.endswith("weight") else 0.0)), name
        elif weight.dim() == 2:
            assert weight.abs().max() <= bound, name
            assert weight.abs().max() > 0.98 * bound, name
            assert abs(weight.mean()) < 0.1 * bound, name
    state = cells.IndRNN(3, 500).weight_hh
    assert 0 <= state.min() < 0.02
    assert 0.98 < state.max() <= 1
