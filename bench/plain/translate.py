"""Lines translated by an encoder and a decoder with attention, in plain PyTorch.

Shape legend: B pairs, S source steps, U target steps, P real target steps of all pairs, H units, C pieces of the
vocabulary.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pad_sequence

from .loop import ShuffledScript, open_forget_gates, reverse

PAD: Final = 0
BEGIN: Final = 1
END: Final = 2

Pair = tuple[torch.Tensor, torch.Tensor]
State = tuple[torch.Tensor, torch.Tensor]


@final
class TranslateNet(nn.Module):
    """Two layers that encode the source, the first in both directions, and two that decode with attention to it.

    The bottom layer of the decoder has only the piece before as its input, so that in training all steps attend at
    once. The output takes the embedding for its weights.
    """

    def __init__(self, *, num_pieces: int, size: int, dropout: float) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_pieces, size)
        nn.init.normal_(self.embed.weight, std=size**-0.5)
        self.ahead, self.behind = (nn.LSTM(size, size // 2, batch_first=True) for _ in range(2))
        self.encoder = nn.LSTM(size, size, batch_first=True)
        self.bottom = nn.LSTM(size, size, batch_first=True)
        self.query_norm, self.key_norm = nn.LayerNorm(size), nn.LayerNorm(size)
        self.form = nn.Linear(size, size, bias=False)
        self.decoder = nn.LSTM(2 * size, size, batch_first=True)
        open_forget_gates(self.ahead, self.behind, self.encoder, self.bottom, self.decoder)
        self.dropout = nn.Dropout(dropout)
        self.output_bias = nn.Parameter(torch.zeros(num_pieces))

    def forward(self, source_BS: torch.Tensor, target_BU: torch.Tensor) -> torch.Tensor:
        """Scores (P, C) of every real target step, each given the true pieces before it."""
        memory_BSH = self.encode(source_BS)
        before_BU = functional.pad(target_BU[:, :-1], (1, 0), value=BEGIN)
        hidden_BUH, _ = self.decode(before_BU, memory_BSH, source_BS != PAD)
        return self.scores(hidden_BUH[target_BU != PAD])

    def encode(self, source_BS: torch.Tensor) -> torch.Tensor:
        """What the decoder attends to (B, S, H)."""
        lengths_B = (source_BS != PAD).sum(dim=1)
        x_BSH = self._embed(source_BS)
        ahead_BSH, _ = self.ahead(x_BSH)
        behind_BSH, _ = self.behind(reverse(x_BSH, lengths_B))
        hidden_BSH = torch.cat([ahead_BSH, reverse(behind_BSH, lengths_B)], dim=-1)
        memory_BSH: torch.Tensor = self.key_norm(hidden_BSH + self.encoder(self.dropout(hidden_BSH))[0])
        return memory_BSH

    def decode(
        self,
        before_BU: torch.Tensor,
        memory_BSH: torch.Tensor,
        real_BS: torch.Tensor,
        states: tuple[State | None, State | None] = (None, None),
    ) -> tuple[torch.Tensor, tuple[State, State]]:
        """Hidden units (B, U, H) given the pieces before, and the states after them."""
        hidden_BUH, bottom = self.bottom(self._embed(before_BU), states[0])
        asking_BUH = self.form(self.query_norm(hidden_BUH))
        fit_BUS = asking_BUH @ memory_BSH.transpose(1, 2) / math.sqrt(memory_BSH.shape[-1])
        context_BUH = fit_BUS.masked_fill(~real_BS[:, None], -torch.inf).softmax(dim=-1) @ memory_BSH
        above_BUH, top = self.decoder(self.dropout(torch.cat([hidden_BUH, context_BUH], dim=-1)), states[1])
        return hidden_BUH + above_BUH, (bottom, top)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of all pieces."""
        return functional.linear(self.dropout(hidden), self.embed.weight, self.output_bias)

    def _embed(self, pieces: torch.Tensor) -> torch.Tensor:
        inputs: torch.Tensor = self.dropout(self.embed(pieces) * self.embed.embedding_dim**0.5)
        return inputs


@final
class PlainTranslate(ShuffledScript):
    """Trains the net with AdamW over one cycle of the rate.

    Args:
        train: Source and target of each pair as numbers of pieces, each target with its end mark.
        valid: Sources to translate, and their references as text.
        decode: Makes text of pieces.
        bleu_words: What BLEU takes for a word, as sacrebleu names it.
        label_smoothing: Share of the probability that is spread over all pieces.
        epochs: Of the whole run, over which the rate rises and falls.
    """

    model: TranslateNet

    def __init__(
        self,
        train: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]],
        valid: tuple[Sequence[Sequence[int]], Sequence[str]],
        *,
        num_pieces: int,
        decode: Callable[[Sequence[Sequence[int]]], list[str]],
        bleu_words: str,
        hidden_size: int,
        dropout: float,
        label_smoothing: float,
        epochs: int,
        learning_rate: float,
        seed: int,
        **options: Any,
    ) -> None:
        pairs = [(torch.tensor(source), torch.tensor(target)) for source, target in zip(*train, strict=True)]
        self._sources, self._references = [torch.tensor(source) for source in valid[0]], list(valid[1])
        self._decode, self._bleu_words, self._label_smoothing = decode, bleu_words, label_smoothing
        torch.manual_seed(seed)
        model = TranslateNet(num_pieces=num_pieces, size=hidden_size, dropout=dropout)
        super().__init__(model, pairs, collate=pad_pairs, seed=seed, **options)
        self._use_one_cycle(learning_rate=learning_rate, epochs=epochs)

    def loss(self, source_BS: torch.Tensor, target_BU: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of the target pieces, labels smoothed."""
        pieces_P = target_BU[target_BU != PAD]
        return functional.cross_entropy(
            self.model(source_BS, target_BU), pieces_P, label_smoothing=self._label_smoothing
        )

    @torch.no_grad()
    def quality(self) -> float:
        """BLEU of the validation pairs, each piece the likeliest one."""
        import sacrebleu

        self.model.eval()
        found: list[list[int]] = []
        for first in range(0, len(self._sources), 64):
            found += self._translate(pad_sequence(self._sources[first : first + 64], batch_first=True))
        texts = self._decode(found)
        return float(sacrebleu.corpus_bleu(texts, [self._references], tokenize=self._bleu_words, force=True).score)

    def _translate(self, source_BS: torch.Tensor) -> list[list[int]]:
        memory_BSH, real_BS = self.model.encode(source_BS), source_BS != PAD
        limits_B = 2 * real_BS.sum(dim=1) + 10
        last_B1 = torch.full((len(source_BS), 1), BEGIN)
        ended_B = torch.zeros(len(source_BS), dtype=torch.bool)
        states: tuple[State | None, State | None] = (None, None)
        pieces = []
        for length in range(int(limits_B.max())):
            hidden_B1H, states = self.model.decode(last_B1, memory_BSH, real_BS, states)
            scores_BC = self.model.scores(hidden_B1H[:, 0])
            scores_BC[:, [PAD, BEGIN]] = -torch.inf
            ended_B |= limits_B <= length
            best_B = scores_BC.argmax(dim=-1).masked_fill(ended_B, PAD)
            pieces.append(best_B)
            ended_B |= best_B == END
            last_B1 = best_B[:, None]
            if bool(ended_B.all()):
                break
        return [[piece for piece in row if piece not in (PAD, END)] for row in torch.stack(pieces, dim=1).tolist()]


def pad_pairs(pairs: Sequence[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch: padded sources and padded targets."""
    sources, targets = zip(*pairs, strict=True)
    return pad_sequence(list(sources), batch_first=True), pad_sequence(list(targets), batch_first=True)
