"""Every cell of `stretto.cells` in every setting that changes what it computes, at any size."""

from collections.abc import Callable
from typing import Final

from stretto import cells
from stretto.cells import Cell

F: Final = 5
"""Features of the input."""

SETTINGS: Final[dict[str, Callable[[int], Cell]]] = {
    "elman": lambda H: cells.Elman(F, H),
    "elman-relu-bare": lambda H: cells.Elman(F, H, nonlinearity="relu", bias=False),
    "gru": lambda H: cells.GRU(F, H),
    "gru-bare": lambda H: cells.GRU(F, H, bias=False),
    "gru-before": lambda H: cells.GRU(F, H, reset="before"),
    "gru-before-bare": lambda H: cells.GRU(F, H, reset="before", bias=False),
    "lstm": lambda H: cells.LSTM(F, H),
    "lstm-bare": lambda H: cells.LSTM(F, H, bias=False),
    "peephole": lambda H: cells.PeepholeLSTM(F, H),
    "peephole-bare": lambda H: cells.PeepholeLSTM(F, H, bias=False),
    "layer-norm-lstm": lambda H: cells.LayerNormLSTM(F, H),
    "layer-norm-lstm-bare": lambda H: cells.LayerNormLSTM(F, H, bias=False, eps=1e-3),
    "layer-norm-gru": lambda H: cells.LayerNormGRU(F, H),
    "layer-norm-gru-bare": lambda H: cells.LayerNormGRU(F, H, bias=False),
    "projected": lambda H: cells.ProjectedLSTM(F, H, proj_size=max(H // 2, 1)),
    "projected-bare": lambda H: cells.ProjectedLSTM(F, H, proj_size=H - 1, bias=False),
    "coupled": lambda H: cells.CoupledLSTM(F, H),
    "multiplicative": lambda H: cells.MultiplicativeLSTM(F, H),
    "ligru": lambda H: cells.LiGRU(F, H),
    "ligru-bare": lambda H: cells.LiGRU(F, H, bias=False),
    "ligru-plain": lambda H: cells.LiGRU(F, H, norm="none"),
    "minimal": lambda H: cells.MinimalGatedUnit(F, H),
    "minimal-bare": lambda H: cells.MinimalGatedUnit(F, H, bias=False),
    "indrnn": lambda H: cells.IndRNN(F, H),
    "indrnn-tanh-bare": lambda H: cells.IndRNN(F, H, nonlinearity="tanh", bias=False),
    "clockwork": lambda H: cells.Clockwork(F, H, periods=_periods(H)),
    "attention": lambda H: cells.AttentionCell(F, H, memory_size=3),
    "attention-bare": lambda H: cells.AttentionCell(F, H, memory_size=1, bias=False),
    "zoneout": lambda H: cells.Zoneout(cells.LSTM(F, H), p=(0.1, 0.5)),
    "zoneout-gru": lambda H: cells.Zoneout(cells.GRU(F, H), p=0.3),
    "recurrent-dropout": lambda H: cells.RecurrentDropout(cells.LSTM(F, H), p=0.4, masked=(0, 1)),
    "recurrent-dropout-elman": lambda H: cells.RecurrentDropout(cells.Elman(F, H), p=0.4),
    "nested": lambda H: cells.Zoneout(cells.RecurrentDropout(cells.PeepholeLSTM(F, H), p=0.2), p=0.2),
    "implicit-gru": lambda H: cells.ImplicitGRU(F, H),
}


def _periods(H: int) -> tuple[int, ...]:
    return next(periods for periods in ((1, 2, 5), (1, 3, 4, 8, 16, 32, 64), (1, 4), (2,)) if H % len(periods) == 0)
