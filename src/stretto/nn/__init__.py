"""Layers that users put in a model, and long sequences in streams."""

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
from stretto.nn.explain_model import LayerExplanation, ModelExplanation, explain
from stretto.nn.explanation import Explanation
from stretto.nn.guards import warn_once, warnings_to
from stretto.nn.layers import Attention, Dropout, Standardise, stack_steps, stacked_lengths
from stretto.nn.linear_cross_entropy import linear_cross_entropy
from stretto.nn.ragged import reverse_padded
from stretto.nn.rnn import RNN
from stretto.nn.scan import scan
from stretto.nn.streams import Chunk, Streams
from stretto.nn.torch_layers import accelerate, is_accelerated, open_forget_gates, restore, run_padded, run_ragged

__all__ = [
    "RNN",
    "Attention",
    "CarriedState",
    "Chunk",
    "Dropout",
    "Explanation",
    "LayerExplanation",
    "ModelExplanation",
    "Part",
    "Standardise",
    "Streams",
    "TruncatedBPTT",
    "accelerate",
    "carried_states",
    "detach_state",
    "explain",
    "fresh_state",
    "in_turn",
    "is_accelerated",
    "linear_cross_entropy",
    "open_forget_gates",
    "reset_carried",
    "reset_rows",
    "restore",
    "reverse_padded",
    "run_padded",
    "run_ragged",
    "scan",
    "stack_steps",
    "stacked_lengths",
    "warn_once",
    "warnings_to",
]
