"""Layers that users put in a model."""

from stretto.nn.attention import Attention
from stretto.nn.bidirectional_lstm import BidirectionalLSTM, remember_by_default
from stretto.nn.carried_state import CarriedState, detach_state, reset_rows
from stretto.nn.ragged import as_rows
from stretto.nn.reversal import reverse_padded
from stretto.nn.rnn import RNN
from stretto.nn.stack import Direction, run_stack
from stretto.nn.stacking import stack_steps, stacked_lengths
from stretto.nn.standardise import Standardise
from stretto.nn.streams import Chunk, Streams
from stretto.nn.torch_layers import DTYPES, accelerate, layer_program, layer_weights
from stretto.nn.truncated import Part, TruncatedBPTT

__all__ = [
    "DTYPES",
    "RNN",
    "Attention",
    "BidirectionalLSTM",
    "CarriedState",
    "Chunk",
    "Direction",
    "Part",
    "Standardise",
    "Streams",
    "TruncatedBPTT",
    "accelerate",
    "as_rows",
    "detach_state",
    "layer_program",
    "layer_weights",
    "remember_by_default",
    "reset_rows",
    "reverse_padded",
    "run_stack",
    "stack_steps",
    "stacked_lengths",
]
