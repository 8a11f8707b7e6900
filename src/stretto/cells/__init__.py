"""Recurrent cells: what one is, the well-known ones, wrappers around any, and weights from and to torch."""

from stretto.cells.cell import AbstractGatedCell, Cell, State
from stretto.cells.elman import Clockwork, Elman, IndRNN
from stretto.cells.gru import GRU, AttentionCell, ImplicitGRU, LayerNormGRU, LiGRU, MinimalGatedUnit
from stretto.cells.lstm import LSTM, CoupledLSTM, LayerNormLSTM, MultiplicativeLSTM, PeepholeLSTM, ProjectedLSTM
from stretto.cells.torch_weights import cell_from, load_layer, matching_cell, step_of_torch, store_layer
from stretto.cells.wrappers import RecurrentDropout, Zoneout

__all__ = [
    "GRU",
    "LSTM",
    "AbstractGatedCell",
    "AttentionCell",
    "Cell",
    "Clockwork",
    "CoupledLSTM",
    "Elman",
    "ImplicitGRU",
    "IndRNN",
    "LayerNormGRU",
    "LayerNormLSTM",
    "LiGRU",
    "MinimalGatedUnit",
    "MultiplicativeLSTM",
    "PeepholeLSTM",
    "ProjectedLSTM",
    "RecurrentDropout",
    "State",
    "Zoneout",
    "cell_from",
    "load_layer",
    "matching_cell",
    "step_of_torch",
    "store_layer",
]
