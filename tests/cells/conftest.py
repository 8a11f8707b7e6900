"""Every cell in every setting that changes what it computes, in double precision."""

from collections.abc import Callable

import pytest
import torch

from stretto import cells
from stretto.cells import Cell

F, H = 5, 6
"""Features and hidden units; three divides the units for the three periods of the clockwork."""

MAKERS: dict[str, Callable[[], Cell]] = {
    "elman": lambda: cells.Elman(F, H),
    "elman-relu": lambda: cells.Elman(F, H, nonlinearity="relu", bias=False),
    "gru": lambda: cells.GRU(F, H),
    "gru-before": lambda: cells.GRU(F, H, reset="before"),
    "gru-before-bare": lambda: cells.GRU(F, H, reset="before", bias=False),
    "implicit-gru": lambda: cells.ImplicitGRU(F, H),
    "implicit-gru-bare": lambda: cells.ImplicitGRU(F, H, bias=False),
    "lstm": lambda: cells.LSTM(F, H),
    "lstm-bare": lambda: cells.LSTM(F, H, bias=False),
    "peephole": lambda: cells.PeepholeLSTM(F, H),
    "layer-norm-lstm": lambda: cells.LayerNormLSTM(F, H),
    "layer-norm-lstm-bare": lambda: cells.LayerNormLSTM(F, H, bias=False),
    "layer-norm-gru": lambda: cells.LayerNormGRU(F, H),
    "projected": lambda: cells.ProjectedLSTM(F, H, proj_size=2),
    "coupled": lambda: cells.CoupledLSTM(F, H),
    "multiplicative": lambda: cells.MultiplicativeLSTM(F, H),
    "ligru": lambda: cells.LiGRU(F, H),
    "ligru-plain": lambda: cells.LiGRU(F, H, norm="none"),
    "minimal": lambda: cells.MinimalGatedUnit(F, H),
    "minimal-bare": lambda: cells.MinimalGatedUnit(F, H, bias=False),
    "indrnn": lambda: cells.IndRNN(F, H),
    "indrnn-tanh": lambda: cells.IndRNN(F, H, nonlinearity="tanh", bias=False),
    "clockwork": lambda: cells.Clockwork(F, H, periods=(1, 2, 3)),
    "attention": lambda: cells.AttentionCell(F, H, memory_size=3),
    "zoneout": lambda: cells.Zoneout(cells.LSTM(F, H), p=(0.1, 0.5)),
    "zoneout-gru": lambda: cells.Zoneout(cells.GRU(F, H), p=0.3),
    "recurrent-dropout": lambda: cells.RecurrentDropout(cells.LSTM(F, H), p=0.4),
    "recurrent-dropout-elman": lambda: cells.RecurrentDropout(cells.Elman(F, H), p=0.4),
    "nested": lambda: cells.Zoneout(cells.RecurrentDropout(cells.Clockwork(F, H, periods=(1, 3)), p=0.2), p=0.2),
}


@pytest.fixture(params=MAKERS)
def cell(request: pytest.FixtureRequest) -> Cell:
    torch.manual_seed(0)
    made = MAKERS[request.param]().double()
    with torch.no_grad():
        for parameter in made.parameters():
            # Gains of one and shifts of zero would hide a mix-up.
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made
