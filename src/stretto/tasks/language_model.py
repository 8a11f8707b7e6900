"""Language modelling: the next character of a text.

Shape legend: B passages, T steps, U steps that have a next one, E embedding size, H hidden units, C characters.
"""

import dataclasses
import math
from typing import Final, final

import numpy as np
import torch
from torch import nn
from torch.nn import functional

from stretto.batching.collate import Batch
from stretto.data.sequences import SequenceSet
from stretto.errors import StrettoError
from stretto.nn import accelerate as accelerated
from stretto.nn.bidirectional_lstm import remember_by_default
from stretto.training.config import Count, Positive, TrainConfig
from stretto.training.task import AbstractTask, LossSum, Reading, Score

FEWEST_CHARACTERS: Final = 2
SHOWN_CHARACTERS = 60
LARGEST_NATS = 700.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModelConfig(TrainConfig):
    """Settings of the language-model task.

    Attributes:
        embedding_size: Numbers that stand for a character.
    """

    epochs: Count = 5
    learning_rate: Positive = 4e-3
    embedding_size: Count = 32


@final
class LanguageModel(nn.Module):
    """Characters embedded, an LSTM, and scores of the next character."""

    def __init__(self, *, num_characters: int, config: LanguageModelConfig) -> None:
        super().__init__()
        self.embed = nn.Embedding(num_characters, config.embedding_size)
        # torch warns when a single layer is given a dropout that it would not use.
        between = config.dropout if config.num_layers > 1 else 0.0
        self.lstm = accelerated.LSTM(
            config.embedding_size, config.hidden_size, config.num_layers, batch_first=True, dropout=between
        )
        remember_by_default(self.lstm)
        accelerated.accelerate(self.lstm, kernel="cpp" if config.kernel == "compiled" else "torch")
        self.dropout = nn.Dropout(config.dropout)
        self.predict = nn.Linear(config.hidden_size, num_characters)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Scores (B, U, C) of characters 1 to T - 1."""
        hidden_BUH = self.lstm.ragged(self.embed(batch.features_BTF[:, :-1, 0]), batch.lengths - 1)
        scores_BUC: torch.Tensor = self.predict(self.dropout(hidden_BUH))
        return scores_BUC


@final
class LanguageModelling(AbstractTask[LanguageModelConfig]):
    """Passages of text, each a sequence of characters, measured in perplexity per character."""

    name = "language-model"
    metric = "perplexity"

    def __init__(self, config: LanguageModelConfig, data: SequenceSet) -> None:
        super().__init__(config, data)
        if not data.alphabet:
            raise StrettoError(f"{data.name} is no text", fix="Give a .txt or .txt.gz file with --data.")
        _check_characters(data)

    @classmethod
    def embedded_data(cls) -> SequenceSet:
        """There is none: the text is always the user's own."""
        raise StrettoError("language-model has no embedded data", fix="Name a text file with --data PATH.")

    def build_model(self) -> LanguageModel:
        """A fresh model."""
        return LanguageModel(num_characters=len(self.data.alphabet), config=self.config)

    def loss(self, output: torch.Tensor, batch: Batch) -> LossSum:
        """Cross-entropy of each next character, counted in characters."""
        real_BU = batch.mask[:, 1:]
        next_BU = batch.features_BTF[:, 1:, 0]
        total = functional.cross_entropy(output[real_BU], next_BU[real_BU], reduction="sum")
        return LossSum(total=total, count=batch.num_steps - len(batch))

    def score(self, output: torch.Tensor, batch: Batch) -> dict[str, Score]:
        """Nats, which add up; `summary` makes a perplexity of them."""
        loss = self.loss(output, batch)
        return {"nats": Score(amount=float(loss.total), count=loss.count)}

    def summary(self, scores: dict[str, Score]) -> dict[str, float]:
        """The exponential of the mean loss."""
        return {self.metric: math.exp(min(scores["nats"].ratio, LARGEST_NATS))}

    def readings(self, output: torch.Tensor, batch: Batch) -> list[Reading]:
        """The text and the character that the model expects at each place."""
        best_BU = output.argmax(dim=-1)
        shown = []
        for row, length in enumerate(batch.lengths.tolist()):
            count = min(length, SHOWN_CHARACTERS)
            actual = batch.features_BTF[row, :count, 0].tolist()
            expected = [actual[0], *best_BU[row, : count - 1].tolist()]
            shown.append(Reading(target=self._spell(actual), output=self._spell(expected), ink=None))
        return shown

    def _spell(self, numbers: list[int]) -> str:
        return "".join(self.data.alphabet[number] for number in numbers)


def _check_characters(data: SequenceSet) -> None:
    if data.num_features != 1 or not np.issubdtype(data.features_SF.dtype, np.integer):
        raise StrettoError(
            f"{data.name} has {data.num_features} features of type {data.features_SF.dtype}, not one character a step",
            fix="Give `x` as whole numbers, each the place of a character in `alphabet`.",
        )
    for index in range(len(data)):
        numbers_T = data.features_SF[data.starts_N[index] : data.starts_N[index] + data.lengths_N[index]]
        if len(numbers_T) < FEWEST_CHARACTERS or numbers_T.min() < 0 or numbers_T.max() >= len(data.alphabet):
            raise StrettoError(
                f"{data.name}: sequence {data.numbers_N[index]} has {len(numbers_T)} characters, numbered "
                f"{numbers_T.min()} to {numbers_T.max()}, for an alphabet of {len(data.alphabet)}",
                fix=f"Give passages of {FEWEST_CHARACTERS} or more characters, numbered by their place in `alphabet`.",
            )
