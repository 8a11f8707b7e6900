"""Layers that users put in a model, and long sequences in streams."""

from stretto.nn.attention import Attention
from stretto.nn.bidirectional_lstm import BidirectionalLSTM, remember_by_default
from stretto.nn.bptt import (
    CarriedState,
    Part,
    TruncatedBPTT,
    carried_states,
    detach_state,
    fresh_state,
    in_turn,
    reset_carried,
    reset_rows,
)
from stretto.nn.ragged import as_rows
from stretto.nn.reversal import reverse_padded
from stretto.nn.rnn import RNN
from stretto.nn.stack import Direction, run_stack
from stretto.nn.stacking import stack_steps, stacked_lengths
from stretto.nn.standardise import Standardise
from stretto.nn.streams import Chunk, Streams
from stretto.nn.torch_layers import DTYPES, accelerate, layer_program, layer_weights

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
    "carried_states",
    "detach_state",
    "fresh_state",
    "in_turn",
    "layer_program",
    "layer_weights",
    "remember_by_default",
    "reset_carried",
    "reset_rows",
    "reverse_padded",
    "run_stack",
    "stack_steps",
    "stacked_lengths",
]
