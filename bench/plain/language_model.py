"""The next word of a text, read in parallel streams by an LSTM, in plain PyTorch.

Shape legend: S words, B streams, T steps of a window, U steps of a stream, H units,
C words of the vocabulary.
"""

import math
from typing import Any, final

import numpy as np
import numpy.typing as npt
import torch
from torch import nn
from torch.nn import functional
from torch.optim import SGD, Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler

State = tuple[torch.Tensor, torch.Tensor]


@final
class TextNet(nn.Module):
    """Words embedded, LSTM layers, and scores of the next word; all weights begin uniform."""

    def __init__(
        self, *, num_words: int, embedding_size: int, hidden_size: int, num_layers: int, dropout: float, scale: float
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_words, embedding_size)
        self.lstm = nn.LSTM(embedding_size, hidden_size, num_layers, dropout=dropout if num_layers > 1 else 0.0)
        self.dropout = nn.Dropout(dropout)
        self.predict = nn.Linear(hidden_size, num_words)
        for weight in self.parameters():
            nn.init.uniform_(weight, -scale, scale)

    def forward(self, words_TB: torch.Tensor, state: State | None) -> tuple[torch.Tensor, State]:
        """Scores (T, B, C) of the words that follow, and the state after the last."""
        hidden_TBH, state = self.lstm(self.embed(words_TB), state)
        return self.predict(self.dropout(hidden_TBH)), state


@final
class PlainLanguageModel:
    """Trains the net with plain SGD, the state carried from window to window: Zaremba et al.'s recipe for the PTB.

    Args:
        train: The training text, a number a word.
        valid: The text to measure on.
        init_scale: Weights begin between minus and plus this.
        batch_size: Streams.
        window: Steps of a window, and how far gradients go back.
        flat_epochs: Epochs before the rate falls.
        decay_factor: The factor by which it then falls every epoch.
    """

    def __init__(
        self,
        train: npt.NDArray[Any],
        valid: npt.NDArray[Any],
        *,
        num_words: int,
        embedding_size: int,
        hidden_size: int,
        num_layers: int,
        dropout: float,
        init_scale: float,
        batch_size: int,
        window: int,
        learning_rate: float,
        flat_epochs: int,
        decay_factor: float,
        clip_norm: float,
        seed: int,
    ) -> None:
        self._train_UB, self._valid_UB = (side_by_side(text_S, num_streams=batch_size) for text_S in (train, valid))
        torch.manual_seed(seed)
        self.model = TextNet(
            num_words=num_words,
            embedding_size=embedding_size,
            hidden_size=hidden_size,
            num_layers=num_layers,
            dropout=dropout,
            scale=init_scale,
        )
        self._optimizer: Optimizer = SGD(self.model.parameters(), lr=learning_rate)
        # Stepped once an epoch.
        self._schedule: LRScheduler = LambdaLR(
            self._optimizer, lambda done: decay_factor ** max(0, done + 1 - flat_epochs)
        )
        self._window, self._clip_norm = window, clip_norm

    @property
    def updates_per_epoch(self) -> int:
        """Updates of one epoch."""
        return -(-(len(self._train_UB) - 1) // self._window)

    def use(self, optimizer: Optimizer, schedule: LRScheduler, *, clip_norm: float) -> None:
        """Train with another optimiser, and with a schedule that is stepped once an update."""
        optimizer.register_step_post_hook(lambda *_: schedule.step())
        constant = LambdaLR(SGD(self.model.parameters()), lambda done: 1.0)  # noqa: ARG005
        self._optimizer, self._schedule, self._clip_norm = optimizer, constant, clip_norm

    def epoch(self) -> None:
        """Train one epoch."""
        self.model.train()
        state: State | None = None
        for first in range(0, len(self._train_UB) - 1, self._window):
            words_TB, next_TB = self._read(self._train_UB, first)
            if state is not None:
                state = (state[0].detach(), state[1].detach())
            self._optimizer.zero_grad()
            loss, state = self.loss(words_TB, next_TB, state)
            loss.backward()  # type: ignore[no-untyped-call]
            nn.utils.clip_grad_norm_(self.model.parameters(), self._clip_norm)
            self._optimizer.step()
        self._schedule.step()

    def loss(
        self, words_TB: torch.Tensor, next_TB: torch.Tensor, state: State | None = None
    ) -> tuple[torch.Tensor, State]:
        """Mean cross-entropy of a window, and the state after it."""
        scores_TBC, state = self.model(words_TB, state)
        return functional.cross_entropy(scores_TBC.flatten(0, 1), next_TB.flatten()), state

    @torch.no_grad()
    def quality(self) -> float:
        """Perplexity of the validation text."""
        self.model.eval()
        state, total, count = None, 0.0, 0
        for first in range(0, len(self._valid_UB) - 1, self._window):
            words_TB, next_TB = self._read(self._valid_UB, first)
            loss, state = self.loss(words_TB, next_TB, state)
            total, count = total + float(loss) * next_TB.numel(), count + next_TB.numel()
        return math.exp(min(total / count, 700.0))

    def _read(self, text_UB: torch.Tensor, first: int) -> tuple[torch.Tensor, torch.Tensor]:
        end = min(first + self._window, len(text_UB) - 1)
        return text_UB[first:end], text_UB[first + 1 : end + 1]


def side_by_side(text_S: npt.NDArray[Any], *, num_streams: int) -> torch.Tensor:
    """The text cut into streams (U, B) of equal length; the few words that are left over are not read.

    Each stream ends with the first word of the next one, so that every word between is to be said once.
    """
    length = (len(text_S) - 1) // num_streams
    starts_B = np.arange(num_streams) * length
    places_UB = starts_B + np.arange(length + 1)[:, None]
    return torch.from_numpy(text_S[places_UB].astype(np.int64))
