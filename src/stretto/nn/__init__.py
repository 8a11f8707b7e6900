"""Layers that users put in a model, and long sequences in streams."""

from stretto.nn import torch_layers
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
from stretto.nn.explain import Explanation
from stretto.nn.layers import Attention, Standardise, stack_steps, stacked_lengths
from stretto.nn.ragged import reverse_padded
from stretto.nn.rnn import RNN
from stretto.nn.streams import Chunk, Streams
from stretto.nn.torch_layers import accelerate, open_forget_gates

__all__ = [
    "RNN",
    "Attention",
    "CarriedState",
    "Chunk",
    "Explanation",
    "Part",
    "Standardise",
    "Streams",
    "TruncatedBPTT",
    "accelerate",
    "carried_states",
    "detach_state",
    "fresh_state",
    "in_turn",
    "open_forget_gates",
    "reset_carried",
    "reset_rows",
    "reverse_padded",
    "stack_steps",
    "stacked_lengths",
    "torch_layers",
]
