"""An encoder and a decoder with attention, after GNMT.

Shape legend: B pairs, T steps of the longest text, S source steps, U target steps, R rows that are decoded,
H units, C pieces of the vocabulary; `...` is (B, U) in training and (R,) in decoding.
"""

import dataclasses
from typing import final

import torch
from torch import nn
from torch.nn import functional

from stretto.batching import Batch
from stretto.errors import StrettoError
from stretto.kernels import Backend
from stretto.nn import Attention, BidirectionalLSTM, remember_by_default
from stretto.nn import torch_layers as accelerated
from stretto.tasks.translate_vocabulary import BEGIN, PAD

States = list[tuple[torch.Tensor, torch.Tensor]]


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
        tie_output: Whether the output takes the embedding for its weights.
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
        """Part the features; the texts end where the first `PAD` is."""
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
    """What the encoder made of the sources, and which steps are real."""

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
        self.both_ways = BidirectionalLSTM(size, hidden_size=size // 2, backend=shape.backend)
        above = range(shape.num_layers - 1)
        self.encoder = nn.ModuleList(_layer(size, size, shape.backend) for _ in above)
        self.bottom = _layer(size, size, shape.backend)
        self.attention = Attention(size)
        self.decoder = nn.ModuleList(_layer(2 * size, size, shape.backend) for _ in above)
        if not above:
            # Without a layer above, what is attended to goes to the output straight away.
            self.join = nn.Linear(2 * size, size)
        self.dropout = nn.Dropout(shape.dropout)
        self.output_bias = nn.Parameter(torch.zeros(shape.num_pieces))
        self.output_weight = None if shape.tie_output else nn.Parameter(torch.empty(shape.num_pieces, size))
        if self.output_weight is not None:
            nn.init.normal_(self.output_weight, std=size**-0.5)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Scores (B, U, C) of the target steps, each given the true pieces before it; not defined behind an end."""
        sides = Sides.of(batch)
        memory = self.encode(sides.source_BS, sides.source_lengths)
        begin_B1 = torch.full_like(sides.target_BU[:, :1], BEGIN)
        before_BU = torch.cat([begin_B1, sides.target_BU[:, :-1]], dim=1)
        lengths = sides.target_lengths
        hidden_BUH = self.bottom.ragged(self._embedded(before_BU), lengths)
        context_BUH = self.attention(hidden_BUH, memory.hidden_BSH, memory.real_BS)
        for layer in self.decoder:
            assert isinstance(layer, accelerated.LSTM)
            both_BUF = self.dropout(torch.cat([hidden_BUH, context_BUH], dim=-1))
            hidden_BUH = hidden_BUH + layer.ragged(both_BUF, lengths)
        return self._scores(hidden_BUH, context_BUH)

    def encode(self, source_BS: torch.Tensor, lengths: torch.Tensor) -> Memory:
        """What the decoder attends to."""
        hidden_BSH = self.both_ways(self._embedded(source_BS), lengths)
        for layer in self.encoder:
            assert isinstance(layer, accelerated.LSTM)
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
            assert isinstance(layer, accelerated.LSTM)
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


def _layer(input_size: int, size: int, backend: Backend) -> accelerated.LSTM:
    lstm = accelerated.LSTM(input_size, size, batch_first=True)
    remember_by_default(lstm)
    return accelerated.accelerate(lstm, backend="cpp" if backend == "auto" else backend)


def _cell(
    lstm: accelerated.LSTM, x_RF: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of a layer."""
    own = accelerated.layer_weights(lstm, 0)
    return torch.lstm_cell(x_RF, state, own["weight_ih"], own["weight_hh"], own["bias_ih"], own["bias_hh"])
