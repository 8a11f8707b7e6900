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
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

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
        with torch.no_grad():
            for lstm in (self.ahead, self.behind, self.encoder, self.bottom, self.decoder):
                lstm.get_parameter("bias_ih_l0")[lstm.hidden_size : 2 * lstm.hidden_size].fill_(
                    1.0
                )  # forget gates begin open
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
        x_BSH = self._embedded(source_BS)
        ahead_BSH, _ = self.ahead(x_BSH)
        behind_BSH, _ = self.behind(turned_round(x_BSH, lengths_B))
        hidden_BSH = torch.cat([ahead_BSH, turned_round(behind_BSH, lengths_B)], dim=-1)
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
        hidden_BUH, bottom = self.bottom(self._embedded(before_BU), states[0])
        asking_BUH = self.form(self.query_norm(hidden_BUH))
        fit_BUS = asking_BUH @ memory_BSH.transpose(1, 2) / math.sqrt(memory_BSH.shape[-1])
        context_BUH = fit_BUS.masked_fill(~real_BS[:, None], -torch.inf).softmax(dim=-1) @ memory_BSH
        above_BUH, top = self.decoder(self.dropout(torch.cat([hidden_BUH, context_BUH], dim=-1)), states[1])
        return hidden_BUH + above_BUH, (bottom, top)

    def scores(self, hidden: torch.Tensor) -> torch.Tensor:
        """Of all pieces."""
        return functional.linear(self.dropout(hidden), self.embed.weight, self.output_bias)

    def _embedded(self, pieces: torch.Tensor) -> torch.Tensor:
        inputs: torch.Tensor = self.dropout(self.embed(pieces) * self.embed.embedding_dim**0.5)
        return inputs


@final
class PlainTranslate:
    """Trains the net with AdamW over one cycle of the rate.

    Args:
        train: Source and target of each pair as numbers of pieces, each target with its end mark.
        valid: Sources to translate, and their references as text.
        num_pieces: Of the vocabulary.
        decode: Makes text of pieces.
        bleu_words: What BLEU takes for a word, as sacrebleu names it.
        hidden_size: Units of every layer.
        dropout: Share of the inputs of each layer that is dropped.
        label_smoothing: Share of the probability that is spread over all pieces.
        batch_size: Pairs per batch.
        epochs: Of the whole run, over which the rate rises and falls.
        learning_rate: Its peak.
        clip_norm: Largest norm of a gradient.
        seed: Of the weights and the order of pairs.

    Attributes:
        model: The net.
    """

    def __init__(
        self,
        train: tuple[Sequence[Sequence[int]], Sequence[Sequence[int]]],
        valid: tuple[Sequence[Sequence[int]], Sequence[str]],
        *,
        num_pieces: int,
        decode: Callable[[Sequence[Sequence[int]]], list[str]],
        bleu_words: str,
        hidden_size: int = 256,
        dropout: float = 0.2,
        label_smoothing: float = 0.1,
        batch_size: int = 64,
        epochs: int = 10,
        learning_rate: float = 1e-3,
        clip_norm: float = 1.0,
        seed: int = 0,
    ) -> None:
        self._train: list[Pair] = [
            (torch.tensor(source), torch.tensor(target)) for source, target in zip(*train, strict=True)
        ]
        self._sources, self._references = [torch.tensor(source) for source in valid[0]], list(valid[1])
        self._decode, self._bleu_words = decode, bleu_words
        torch.manual_seed(seed)
        self.model = TranslateNet(num_pieces=num_pieces, size=hidden_size, dropout=dropout)
        self._loader: DataLoader[Any] = DataLoader(
            self._train,  # type: ignore[arg-type]
            batch_size=batch_size,
            shuffle=True,
            collate_fn=padded,
            generator=torch.Generator().manual_seed(seed),
        )
        self._optimizer = AdamW(self.model.parameters(), lr=learning_rate)
        self._schedule = OneCycleLR(
            self._optimizer, max_lr=learning_rate, total_steps=epochs * len(self._loader) + 1, pct_start=0.15
        )
        self._label_smoothing, self._clip_norm = label_smoothing, clip_norm

    def epoch(self) -> None:
        """Train one epoch."""
        self.model.train()
        for source_BS, target_BU in self._loader:
            self._optimizer.zero_grad()
            self.loss(source_BS, target_BU).backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
            self._optimizer.step()
            self._schedule.step()

    def loss(self, source_BS: torch.Tensor, target_BU: torch.Tensor) -> torch.Tensor:
        """Mean cross-entropy of the target pieces, labels smoothed."""
        pieces_P = target_BU[target_BU != PAD]
        return functional.cross_entropy(
            self.model(source_BS, target_BU), pieces_P, label_smoothing=self._label_smoothing
        )

    def loss_of(self, numbers: list[int]) -> torch.Tensor:
        """The loss of a batch of these training pairs."""
        return self.loss(*padded([self._train[number] for number in numbers]))

    @torch.no_grad()
    def quality(self) -> float:
        """BLEU of the validation pairs, each piece the likeliest one."""
        import sacrebleu

        self.model.eval()
        found: list[list[int]] = []
        for first in range(0, len(self._sources), 64):
            found += self._translated(pad_sequence(self._sources[first : first + 64], batch_first=True))
        texts = self._decode(found)
        return float(sacrebleu.corpus_bleu(texts, [self._references], tokenize=self._bleu_words, force=True).score)

    def _translated(self, source_BS: torch.Tensor) -> list[list[int]]:
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


def padded(pairs: Sequence[Pair]) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch: padded sources and padded targets."""
    sources, targets = zip(*pairs, strict=True)
    return pad_sequence(list(sources), batch_first=True), pad_sequence(list(targets), batch_first=True)


def turned_round(x_BSH: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
    """Each line from its last step to its first; padding stays behind."""
    places_S = torch.arange(x_BSH.shape[1])
    turned_BS = torch.where(places_S < lengths_B[:, None], lengths_B[:, None] - 1 - places_S, places_S)
    return x_BSH.gather(1, turned_BS[..., None].expand_as(x_BSH))
