"""What a real step costs in a batch of unequal lengths, beside one of a batch without padding.

Shape legend: T steps, B sequences, F features of the input, H hidden units.
"""

import dataclasses
from typing import Final

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from bench.interleaved import Pace, Timing, interleaved
from bench.kernel_comparison import SHAPES, TINY, Tell
from bench.kernel_gate import pass_gate
from bench.kernel_peers import drawn_cell, our_step, torch_layer, torch_step, weights_of
from bench.training_step import Batch, Forward, StepShape, TorchStep, drawn_batch
from stretto.nn import RNN

RAGGED_SHAPES: Final = (SHAPES[3].shape, SHAPES[4].shape)
SHORTEST: Final = 0.1
FULL: Final = "stretto, all full"
RAGGED: Final = "stretto, ragged"
PADDED: Final = "nn.LSTM, padded"
PACKED: Final = "nn.LSTM, packed"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class RaggedRow(StepShape):
    """One way to run an LSTM over a batch whose lengths are uniform in [10 %, 100 %] of T, or all T.

    Attributes:
        way: Who and how.
        real_steps: Steps of all sequences together that count.
        slots: Steps that are in the batch, padding included.
        timing: Of a training step.
        us_per_real_step: Its least time over real steps, in microseconds.
        over_full: That over what a step of our full batch takes; 1 means that padding costs nothing.
        error: Largest relative difference of our outputs and gradients from torch's; None for torch's own.
    """

    way: str
    real_steps: int
    slots: int
    timing: Timing
    us_per_real_step: float
    over_full: float
    error: float | None


def ragged_rows(*, pace: Pace, quick: bool, tell: Tell) -> tuple[RaggedRow, ...]:
    """Every way at every shape, in one interleaved run a shape."""
    rows: list[RaggedRow] = []
    for shape in (TINY,) if quick else RAGGED_SHAPES:
        tell(f"ragged: {shape}")
        rows += _rows(shape, pace=pace)
    return tuple(rows)


def drawn_lengths(shape: StepShape, *, seed: int = 0) -> torch.Tensor:
    """Lengths uniform in [10 %, 100 %] of T, in no order; one of them is T."""
    shortest = max(1, round(SHORTEST * shape.num_steps))
    generator = torch.Generator().manual_seed(seed)
    lengths_B = torch.randint(shortest, shape.num_steps + 1, (shape.batch,), generator=generator)
    lengths_B[shape.batch // 2] = shape.num_steps
    return lengths_B


def _rows(shape: StepShape, *, pace: Pace) -> list[RaggedRow]:
    lengths_B = drawn_lengths(shape)
    full = drawn_batch(shape)
    real_TB = torch.arange(shape.num_steps)[:, None] < lengths_B[None, :]
    # What lies behind a sequence's end counts nothing, for all ways alike.
    ragged = Batch(x_TBF=full.x_TBF, weight_TBO=full.weight_TBO * real_TB[:, :, None])
    cell = drawn_cell("LSTM", shape)
    rnn, layer = RNN(cell, batch_first=False), torch_layer([cell], "LSTM", shape)
    steps = {
        FULL: our_step(rnn, batch=full),
        RAGGED: TorchStep(RAGGED, forward=_ours(rnn, lengths_B), weights=weights_of(rnn), batch=ragged),
        PADDED: torch_step(layer, batch=ragged),
        PACKED: TorchStep(PACKED, forward=_packed(layer, lengths_B), weights=weights_of(layer), batch=ragged),
    }
    packed = steps[PACKED].results()
    errors: dict[str, float] = {
        FULL: pass_gate(
            steps[FULL].results(),
            wanted=torch_step(layer, batch=full).results(),
            name="our LSTM",
            peer="nn.LSTM",
            where=str(shape),
        ),
        RAGGED: pass_gate(
            steps[RAGGED].results(), wanted=packed, name="our LSTM", peer=PACKED, where=f"{shape}, unequal lengths"
        ),
    }
    steps[PADDED].results()
    timings = interleaved({way: step.run for way, step in steps.items()}, pace=pace)
    slots = shape.num_steps * shape.batch
    real = int(lengths_B.sum())
    of_full = timings[FULL].least / slots
    return [
        RaggedRow(
            **dataclasses.asdict(shape),
            way=way,
            real_steps=slots if way == FULL else real,
            slots=slots,
            timing=timing,
            us_per_real_step=1e6 * timing.least / (slots if way == FULL else real),
            over_full=timing.least / (slots if way == FULL else real) / of_full,
            error=errors.get(way),
        )
        for way, timing in timings.items()
    ]


def _ours(rnn: RNN, lengths_B: torch.Tensor) -> Forward:
    def forward(x_TBF: torch.Tensor) -> torch.Tensor:
        y_TBO: torch.Tensor = rnn(x_TBF, lengths=lengths_B)[0]
        return y_TBO

    return forward


def _packed(layer: nn.RNNBase, lengths_B: torch.Tensor) -> Forward:
    def forward(x_TBF: torch.Tensor) -> torch.Tensor:
        y, _ = layer(pack_padded_sequence(x_TBF, lengths_B, enforce_sorted=False))
        y_TBO, _ = pad_packed_sequence(y, total_length=len(x_TBF))
        return y_TBO

    return forward
