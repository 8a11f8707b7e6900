"""Several layers and both directions: what running them at once is worth.

Shape legend: T steps, B sequences, F features of the input, H hidden units.
"""

import dataclasses
from collections.abc import Sequence
from typing import Final, cast

import torch
from torch import nn

from bench.interleaved import Pace
from bench.kernel_comparison import TINY, Comparison, Tell, compare
from bench.kernel_peers import (
    Field,
    drawn_cell,
    kernel_of,
    our_step,
    torch_layer,
    torch_step,
    weights_of,
)
from bench.training_step import Batch, Forward, StepShape, TorchStep, drawn_batch
from stretto.cells import Cell
from stretto.nn import RNN

BIDIRECTIONAL: Final = StepShape(num_steps=1000, batch=1, input_size=32, hidden_size=128)
STACKED: Final = StepShape(num_steps=2000, batch=1, input_size=32, hidden_size=128)
NUM_STACKED: Final = 3
LAYER_BY_LAYER: Final = "layer by layer"


def bidirectional_comparisons(*, pace: Pace, quick: bool, tell: Tell) -> tuple[Comparison, ...]:
    """Two layers of both directions beside torch's."""
    shape = TINY if quick else BIDIRECTIONAL
    tell(f"bidirectional: {shape}")
    rnn = _gru(shape, num_layers=2, bidirectional=True)
    batch = drawn_batch(shape, output_size=2 * shape.hidden_size)
    field = Field(
        ours=our_step(rnn, batch=batch),
        peers=(torch_step(torch_layer(_cells(rnn), "GRU", shape, directions=2), batch=batch),),
        kernel=kernel_of(rnn),
    )
    return tuple(compare(field, topic="bidirectional", net="2-layer BiGRU", shape=shape, pace=pace))


def stack_comparisons(*, pace: Pace, quick: bool, tell: Tell) -> tuple[Comparison, ...]:
    """Three layers, as a wave through time where that pays, beside the same one after another, and torch's."""
    shape = dataclasses.replace(TINY, num_steps=64, batch=1) if quick else STACKED
    tell(f"stack: {shape}")
    rnn = _gru(shape, num_layers=NUM_STACKED, bidirectional=False)
    batch = drawn_batch(shape)
    field = Field(
        ours=our_step(rnn, batch=batch),
        peers=(
            _one_by_one(rnn, batch=batch),
            torch_step(torch_layer(_cells(rnn), "GRU", shape), batch=batch),
        ),
        kernel=kernel_of(rnn),
    )
    return tuple(compare(field, topic="stack", net=f"{NUM_STACKED}-layer GRU", shape=shape, pace=pace))


def _gru(shape: StepShape, *, num_layers: int, bidirectional: bool) -> RNN:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return RNN(drawn_cell("GRU", shape), num_layers, bidirectional, batch_first=False)


def _cells(rnn: RNN) -> Sequence[Cell]:
    return [cast("Cell", cell) for cell in rnn.cells]


def _one_by_one(rnn: RNN, *, batch: Batch) -> TorchStep:
    """The same cells in layers of their own, so that each has to wait for all steps of the one below."""
    layers = nn.ModuleList(RNN(cell, batch_first=False) for cell in rnn.cells)
    return TorchStep(LAYER_BY_LAYER, forward=_through(layers), weights=weights_of(rnn), batch=batch)


def _through(layers: nn.ModuleList) -> Forward:
    def forward(x_TBF: torch.Tensor) -> torch.Tensor:
        for layer in layers:
            x_TBF = layer(x_TBF)[0]
        return x_TBF

    return forward
