"""Recurrent cells: what one is, the well-known ones, wrappers around any, and weights from and to torch."""

from stretto.cells.attention_cell import AttentionCell
from stretto.cells.cell import Cell, State
from stretto.cells.clockwork import Clockwork
from stretto.cells.coupled_lstm import CoupledLSTM
from stretto.cells.elman import Elman
from stretto.cells.gated import AbstractGatedCell
from stretto.cells.gru import GRU
from stretto.cells.implicit_gru import ImplicitGRU
from stretto.cells.indrnn import IndRNN
from stretto.cells.layer_norm_gru import LayerNormGRU
from stretto.cells.layer_norm_lstm import LayerNormLSTM
from stretto.cells.ligru import LiGRU
from stretto.cells.lstm import LSTM
from stretto.cells.minimal_gated_unit import MinimalGatedUnit
from stretto.cells.multiplicative_lstm import MultiplicativeLSTM
from stretto.cells.peephole_lstm import PeepholeLSTM
from stretto.cells.projected_lstm import ProjectedLSTM
from stretto.cells.recurrent_dropout import RecurrentDropout
from stretto.cells.weights import cell_from, load_layer, store_layer
from stretto.cells.zoneout import Zoneout

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
    "store_layer",
]
