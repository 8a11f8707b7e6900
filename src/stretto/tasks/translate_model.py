"""An encoder and a decoder with attention, after GNMT.

Shape legend: B pairs, T steps of the longest text, S source steps, U target steps, R rows that are decoded,
H units, C pieces of the vocabulary; `...` is (B, U) in training and (R,) in decoding.
"""

import dataclasses
from typing import Final, final

import torch
from torch import nn
from torch.nn import functional

from stretto.batching import Batch
from stretto.errors import StrettoError
from stretto.kernels import Backend
from stretto.nn import Attention, torch_layers
from stretto.tasks.recurrent import make_lstm

States = list[tuple[torch.Tensor, torch.Tensor]]
PAD: Final = 0
"""Behind the end of a text; no piece of any."""
BEGIN: Final = 1
END: Final = 2
MARKS: Final = ("<pad>", "<begin>", "<end>")
MAX_LENGTH_RATIO: Final = 2.0
EXTRA_PIECES: Final = 10
"""A translation has at most twice the pieces of its source and these."""
LENGTH_POWER: Final = 0.6
"""How much a longer translation is forgiven its smaller probability, as in GNMT."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TranslateShape:
    """The sizes of the net.

    Attributes:
        num_pieces: Of the vocabulary, marks included.
        hidden_size: Units of every layer, and numbers that stand for a piece; the two directions of the encoder's
            first layer have half of them each.
        num_layers: Of the encoder, and of the decoder.
        dropout: Share of the inputs of each layer that is dropped.
        tie_output: Whether the output layer shares its weights with the embedding.
        backend: What runs the recurrent layers.
    """

    num_pieces: int
    hidden_size: int
    num_layers: int
    dropout: float
    tie_output: bool
    backend: Backend


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Sides:
    """The two texts of each pair of a batch, which lie side by side in its features."""

    source_BS: torch.Tensor
    source_lengths: torch.Tensor
    target_BU: torch.Tensor
    target_lengths: torch.Tensor

    @classmethod
    def of(cls, batch: Batch) -> "Sides":
        """Split the features; each text ends at its first `PAD`."""
        pieces_BT2 = batch.features_BTF.masked_fill(~batch.mask[..., None], PAD)
        source_lengths, target_lengths = (pieces_BT2 != PAD).sum(dim=1).cpu().unbind(dim=1)
        return cls(
            source_BS=pieces_BT2[:, : int(source_lengths.max()), 0],
            source_lengths=source_lengths,
            target_BU=pieces_BT2[:, : int(target_lengths.max()), 1],
            target_lengths=target_lengths,
        )


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """The encoder's outputs for the sources, and which of their steps are real."""

    hidden_BSH: torch.Tensor
    real_BS: torch.Tensor

    def rows(self, indices_R: torch.Tensor) -> "Memory":
        """Of the named sources, in this order."""
        return Memory(hidden_BSH=self.hidden_BSH[indices_R], real_BS=self.real_BS[indices_R])


@final
class TranslateModel(nn.Module):
    """Source pieces encoded in both directions, and target pieces one after another, each attending to the source.

    The decoder's bottom layer has the piece before as its only input, so that in training all target steps attend at
    once. The layers above get what was attended to beside the layer below. All layers but the bottom ones add their
    input to their output.

    Args:
        shape: Sizes; `hidden_size` must be even.
    """

    def __init__(self, shape: TranslateShape) -> None:
        super().__init__()
        size = shape.hidden_size
        if size % 2:
            raise StrettoError(
                f"hidden_size is {size}, which two directions cannot share", fix="Choose an even --hidden-size."
            )
        self.embed = nn.Embedding(shape.num_pieces, size)
        nn.init.normal_(self.embed.weight, std=size**-0.5)
        self.both_ways = make_lstm(size, size // 2, bidirectional=True, backend=shape.backend)
        above = range(shape.num_layers - 1)
        self.encoder = nn.ModuleList(make_lstm(size, size, backend=shape.backend) for _ in above)
        self.bottom = make_lstm(size, size, backend=shape.backend)
        self.attention = Attention(size)
        self.decoder = nn.ModuleList(make_lstm(2 * size, size, backend=shape.backend) for _ in above)
        if not above:
            # Without a layer above, what is attended to goes to the output straight away.
            self.join = nn.Linear(2 * size, size)
        self.dropout = nn.Dropout(shape.dropout)
        self.output_bias = nn.Parameter(torch.zeros(shape.num_pieces))
        self.output_weight = None if shape.tie_output else nn.Parameter(torch.empty(shape.num_pieces, size))
        if self.output_weight is not None:
            nn.init.normal_(self.output_weight, std=size**-0.5)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Scores (B, U, C) of the target steps, each given the true pieces before it; not defined after an end."""
        sides = Sides.of(batch)
        memory = self.encode(sides.source_BS, sides.source_lengths)
        begin_B1 = torch.full_like(sides.target_BU[:, :1], BEGIN)
        before_BU = torch.cat([begin_B1, sides.target_BU[:, :-1]], dim=1)
        lengths = sides.target_lengths
        hidden_BUH = self.bottom.ragged(self._embedded(before_BU), lengths)
        context_BUH = self.attention(hidden_BUH, memory.hidden_BSH, memory.real_BS)
        for layer in self.decoder:
            assert isinstance(layer, torch_layers.LSTM)
            both_BUF = self.dropout(torch.cat([hidden_BUH, context_BUH], dim=-1))
            hidden_BUH = hidden_BUH + layer.ragged(both_BUF, lengths)
        return self._scores(hidden_BUH, context_BUH)

    def encode(self, source_BS: torch.Tensor, lengths: torch.Tensor) -> Memory:
        """What the decoder attends to."""
        hidden_BSH = self.both_ways.ragged(self._embedded(source_BS), lengths)
        for layer in self.encoder:
            assert isinstance(layer, torch_layers.LSTM)
            hidden_BSH = hidden_BSH + layer.ragged(self.dropout(hidden_BSH), lengths)
        return Memory(hidden_BSH=hidden_BSH, real_BS=source_BS != PAD)

    def begin(self, num_rows: int) -> States:
        """The decoder's states before the first step."""
        zeros_RH = self.embed.weight.new_zeros(num_rows, self.embed.embedding_dim)
        return [(zeros_RH, zeros_RH) for _ in range(1 + len(self.decoder))]

    def step(self, before_R: torch.Tensor, states: States, memory: Memory) -> tuple[torch.Tensor, States]:
        """Scores (R, C) of the next piece and the states after it, given the piece before; a row for each source."""
        after = [_cell(self.bottom, self._embedded(before_R), states[0])]
        hidden_RH = after[0][0]
        context_RH = self.attention(hidden_RH[:, None], memory.hidden_BSH, memory.real_BS)[:, 0]
        for layer, state in zip(self.decoder, states[1:], strict=True):
            assert isinstance(layer, torch_layers.LSTM)
            after.append(_cell(layer, self.dropout(torch.cat([hidden_RH, context_RH], dim=-1)), state))
            hidden_RH = hidden_RH + after[-1][0]
        return self._scores(hidden_RH, context_RH), after

    def _embedded(self, pieces: torch.Tensor) -> torch.Tensor:
        """Inputs of unit size, whereas as weights of the output the same numbers have to be small."""
        inputs: torch.Tensor = self.dropout(self.embed(pieces) * self.embed.embedding_dim**0.5)
        return inputs

    def _scores(self, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Scores (..., C) from the decoder's output (..., H) and what was attended to."""
        if not self.decoder:
            hidden = self.join(torch.cat([hidden, context], dim=-1)).tanh()
        weight_CH = self.embed.weight if self.output_weight is None else self.output_weight
        return functional.linear(self.dropout(hidden), weight_CH, self.output_bias)


def _cell(
    lstm: torch_layers.LSTM, x_RF: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of a layer."""
    weights = [lstm.get_parameter(f"{name}_l0") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    return torch.lstm_cell(x_RF, state, *weights)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Translations.

    Attributes:
        pieces: Of each source, without the end mark.
        first_BC: Scores of the first piece.
    """

    pieces: list[list[int]]
    first_BC: torch.Tensor


@final
@dataclasses.dataclass(slots=True, kw_only=True)
class _Beam:
    """What is under way: the sources that are not done yet, K rows for each."""

    source_B: torch.Tensor
    limit_B: torch.Tensor
    pieces_BKL: torch.Tensor
    total_BK: torch.Tensor
    ended_BK: torch.Tensor
    states: States
    memory: Memory


@torch.no_grad()
def search(model: TranslateModel, sides: Sides, *, width: int = 1) -> Found:
    """Translate the sources of a batch: beam search, which is greedy if one translation is kept.

    A translation that has ended stays among the kept ones and competes by its probability; in the end the best is the
    one of highest log-probability over ((5 + length) / 6) ^ 0.6.

    Args:
        model: In evaluation mode.
        sides: Of the batch; the targets are not looked at.
        width: Translations that are kept of each source at every step.
    """
    beam = _begin(model, sides, width=width)
    pieces: list[list[int]] = [[] for _ in range(len(beam.source_B))]
    first_BC = None
    while len(beam.source_B):
        scores_RC, states = model.step(_last(beam), beam.states, beam.memory)
        if first_BC is None:
            first_BC = scores_RC[::width]
        _advance(beam, scores_RC.log_softmax(dim=-1), states, width=width)
        _collect(beam, pieces, width=width)
    assert first_BC is not None
    return Found(pieces=pieces, first_BC=first_BC)


def _begin(model: TranslateModel, sides: Sides, *, width: int) -> _Beam:
    memory = model.encode(sides.source_BS, sides.source_lengths)
    count, device = len(sides.source_BS), sides.source_BS.device
    total_BK = memory.hidden_BSH.new_full((count, width), -torch.inf)
    # All begin alike: one of them is enough.
    total_BK[:, 0] = 0.0
    return _Beam(
        source_B=torch.arange(count, device=device),
        limit_B=(sides.source_lengths * MAX_LENGTH_RATIO + EXTRA_PIECES).long().to(device),
        pieces_BKL=torch.zeros(count, width, 0, dtype=torch.int64, device=device),
        total_BK=total_BK,
        ended_BK=torch.zeros(count, width, dtype=torch.bool, device=device),
        states=model.begin(count * width),
        memory=memory.rows(torch.arange(count, device=device).repeat_interleave(width)),
    )


def _last(beam: _Beam) -> torch.Tensor:
    if beam.pieces_BKL.shape[2] == 0:
        return torch.full_like(beam.ended_BK, BEGIN, dtype=torch.int64).flatten()
    return beam.pieces_BKL[..., -1].flatten()


def _advance(beam: _Beam, gains_RC: torch.Tensor, states: States, *, width: int) -> None:
    """Keep the best of all that could follow; after the end there is padding, which costs nothing."""
    count, num_pieces = len(beam.source_B), gains_RC.shape[-1]
    gains_BKC = gains_RC.reshape(count, width, num_pieces)
    gains_BKC[..., [PAD, BEGIN]] = -torch.inf
    gains_BKC = gains_BKC.masked_fill(beam.ended_BK[..., None], -torch.inf)
    gains_BKC[..., PAD] = torch.where(beam.ended_BK, 0.0, -torch.inf)
    best = (beam.total_BK[..., None] + gains_BKC).flatten(1).topk(width, dim=1)
    parent_BK, piece_BK = best.indices // num_pieces, best.indices % num_pieces
    beam.total_BK = best.values
    earlier_BKL = beam.pieces_BKL.gather(1, parent_BK[..., None].expand(-1, -1, beam.pieces_BKL.shape[2]))
    beam.pieces_BKL = torch.cat([earlier_BKL, piece_BK[..., None]], dim=2)
    beam.ended_BK = (piece_BK == END) | (piece_BK == PAD)
    row_R = (torch.arange(count, device=parent_BK.device)[:, None] * width + parent_BK).flatten()
    beam.states = [(hidden_RH[row_R], cell_RH[row_R]) for hidden_RH, cell_RH in states]


def _collect(beam: _Beam, pieces: list[list[int]], *, width: int) -> None:
    """Store the translations of sources that are done, and continue without these."""
    length = beam.pieces_BKL.shape[2]
    done_B = beam.ended_BK.all(dim=1) | (beam.limit_B <= length)
    if not bool(done_B.any()):
        return
    lengths_BK = (beam.pieces_BKL != PAD).sum(dim=2)
    best_B = (beam.total_BK / ((5.0 + lengths_BK) / 6.0) ** LENGTH_POWER).argmax(dim=1)
    for place in done_B.nonzero().flatten().tolist():
        row = beam.pieces_BKL[place, best_B[place]].tolist()
        pieces[int(beam.source_B[place])] = [piece for piece in row if piece not in (PAD, END)]
    going_B = (~done_B).nonzero().flatten()
    row_R = (going_B[:, None] * width + torch.arange(width, device=going_B.device)).flatten()
    beam.source_B, beam.limit_B = beam.source_B[going_B], beam.limit_B[going_B]
    beam.pieces_BKL, beam.total_BK = beam.pieces_BKL[going_B], beam.total_BK[going_B]
    beam.ended_BK, beam.memory = beam.ended_BK[going_B], beam.memory.rows(row_R)
    beam.states = [(hidden_RH[row_R], cell_RH[row_R]) for hidden_RH, cell_RH in beam.states]
