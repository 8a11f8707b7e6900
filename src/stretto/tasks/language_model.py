"""Language modelling: the next word or character of a text.

Shape legend: B passages or streams, T steps, U steps that have a next one, P rows of all steps, C words or characters.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, ClassVar, Final, Literal, final

import numpy as np
import torch
from torch.nn import functional

from stretto.batching import Batch
from stretto.data import SequenceSet, make_text, read_word_text
from stretto.distributed import World
from stretto.errors import StrettoError
from stretto.tasks.text_loss import summed_cross_entropy
from stretto.tasks.text_net import TextNet
from stretto.training import (
    AbstractFeed,
    AbstractTask,
    Count,
    LossSum,
    Positive,
    Sample,
    Score,
    Share,
    StreamFeed,
    TrainConfig,
    eval_windows,
)

FEWEST_TOKENS: Final = 2
SHOWN_TOKENS = {"characters": 60, "words": 16}
LARGEST_NATS = 700.0
PTB: Final[dict[str, Any]] = {
    "tokens": "words",
    "layout": "streams",
    "batch_size": 20,
    "base_batch_size": 20,
    "num_layers": 2,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModelConfig(TrainConfig):
    """Settings of the language-model task.

    Attributes:
        preset: A published set of settings, each of which can still be given: Zaremba et al.'s nets for the Penn
            Treebank, small or large.
        tokens: Words or characters; left out, what the data are read as: a single file as characters.
        layout: Passages are shuffled and each starts anew; streams read the text on and on, side by side, as many as
            batch_size, with the state carried. Left out, streams for words and passages for characters.
        window: In streams, steps of a batch, and how far gradients go back.
        embedding_size: Numbers that stand for a word or character.
        input_dropout: Share of the embedding dropped.
        init_scale: Weights begin uniform between minus and plus this; left out, as torch has them.
    """

    epochs: Count = 5
    learning_rate: Positive = 4e-3
    preset: Literal["ptb-small", "ptb-large"] | None = None
    tokens: Literal["words", "characters"] | None = None
    layout: Literal["passages", "streams"] | None = None
    window: Count = 20
    embedding_size: Count = 32
    input_dropout: Share = 0.0
    init_scale: Positive | None = None

    presets: ClassVar[dict[str, dict[str, Any]]] = {
        # Published for a loss summed over the steps of a window; a mean has rates so many times larger, and norms
        # so many times smaller.
        "ptb-small": {
            **PTB,
            "window": 20,
            "hidden_size": 200,
            "embedding_size": 200,
            "init_scale": 0.1,
            "optimizer": "sgd",
            "learning_rate": 20.0,
            "clip_norm": 5 / 20,
            "dropout": 0.0,
            "epochs": 13,
            "schedule": "ptb",
            "flat_epochs": 4,
            "decay_factor": 0.5,
        },
        "ptb-large": {
            **PTB,
            "window": 35,
            "hidden_size": 1500,
            "embedding_size": 1500,
            "init_scale": 0.04,
            "optimizer": "sgd",
            "learning_rate": 35.0,
            "clip_norm": 10 / 35,
            "dropout": 0.65,
            "input_dropout": 0.65,
            "epochs": 55,
            "schedule": "ptb",
            "flat_epochs": 14,
            "decay_factor": 1 / 1.15,
        },
    }


@final
class LanguageModelling(AbstractTask[LanguageModelConfig]):
    """Text as words or characters, in passages or in parallel streams, measured in perplexity per word or character."""

    name = "language-model"
    metric = "perplexity"

    def __init__(self, config: LanguageModelConfig, data: SequenceSet) -> None:
        data = _as_tokens(config, data)
        super().__init__(config, data)
        self._names: tuple[str, ...] | str = data.vocabulary or data.alphabet
        if not self._names:
            raise StrettoError(
                f"{data.name} is no text",
                fix="Give a .txt or .txt.gz file, or a folder with NAME.train.txt and its like, with --data.",
            )
        _check_numbers(data, num_tokens=len(self._names))

    @classmethod
    def embedded_data(cls) -> SequenceSet:
        """Sentences of a small grammar."""
        return make_text()

    @property
    def in_streams(self) -> bool:
        """Whether the text is read on and on, and not passage by passage."""
        layout = self.config.layout or ("streams" if self.data.vocabulary else "passages")
        return layout == "streams"

    def build_model(self) -> TextNet:
        """A fresh model."""
        config = self.config
        return TextNet(
            num_tokens=len(self._names),
            embedding_size=config.embedding_size,
            hidden_size=config.hidden_size,
            num_layers=config.num_layers,
            dropout=config.dropout,
            input_dropout=config.input_dropout,
            init_scale=config.init_scale,
            backend=config.backend,
        )

    def feed(self, *, world: World) -> AbstractFeed:
        """Windows of streams, or passages from buckets."""
        if not self.in_streams:
            return super().feed(world=world)
        config = self.config
        return StreamFeed(
            self.data.part("train"),
            window=config.window,
            batch_size=config.first_batch_size,
            max_padded_steps=config.max_padded_steps,
            world=world,
        )

    def eval_batches(self, part: SequenceSet, *, world: World, device: str) -> Iterator[Batch]:
        """In streams, up to 20 of them, each from a state of zero on, every word but the first said once."""
        if not self.in_streams:
            return super().eval_batches(part, world=world, device=device)
        return eval_windows(part, window=self.config.window, world=world, device=device)

    def loss(self, output: torch.Tensor, batch: Batch) -> LossSum:
        """Cross-entropy of all that comes next, counted in words or characters."""
        if batch.targets is not None:
            # Step by step, as the net leaves its scores: so that they are not copied, which would cost as much again.
            scores_PC, next_P = (item.transpose(0, 1).flatten(0, 1) for item in (output, batch.targets))
            return LossSum(total=summed_cross_entropy(scores_PC, next_P), count=batch.num_steps)
        real_BU, next_BU = batch.mask[:, 1:], batch.features_BTF[:, 1:, 0]
        if bool(real_BU.all()):
            scores_PC, next_P = output.flatten(0, 1), next_BU.flatten()
        else:
            scores_PC, next_P = output[real_BU], next_BU[real_BU]
        total = functional.cross_entropy(scores_PC, next_P, reduction="sum")
        return LossSum(total=total, count=batch.num_steps - len(batch))

    def num_elements(self, part: SequenceSet) -> int:
        """Words or characters but the first, of each passage or of all."""
        return int(part.lengths_N.sum()) - (1 if self.in_streams else len(part))

    def score(self, output: torch.Tensor, batch: Batch) -> dict[str, Score]:
        """Nats, which add up; `summary` makes a perplexity of them."""
        loss = self.loss(output, batch)
        return {"nats": Score(amount=float(loss.total), count=loss.count)}

    def summary(self, scores: dict[str, Score]) -> dict[str, float]:
        """The exponential of the mean loss."""
        return {self.metric: math.exp(min(scores["nats"].ratio, LARGEST_NATS))}

    def samples(self, output: torch.Tensor, batch: Batch) -> list[Sample]:
        """Passages, and the word or character that the model expects at each place."""
        best_BU = output.argmax(dim=-1)
        most = SHOWN_TOKENS["words" if self.data.vocabulary else "characters"]
        shown = []
        for row, length in enumerate(batch.lengths.tolist()):
            count = min(length, most)
            actual = batch.features_BTF[row, :count, 0].tolist()
            expected = [actual[0], *best_BU[row, : count - 1].tolist()]
            shown.append(Sample(target=self._spell(actual), output=self._spell(expected)))
        return shown

    def _spell(self, numbers: list[int]) -> str:
        return (" " if self.data.vocabulary else "").join(self._names[number] for number in numbers)


def _as_tokens(config: LanguageModelConfig, data: SequenceSet) -> SequenceSet:
    """The data as they were read, or read again as what was asked for."""
    found = "words" if data.vocabulary else "characters" if data.alphabet else None
    if config.tokens in (None, found) or found is None:
        return data
    source = config.data
    if config.tokens == "words" and source is not None and source.name.lower().endswith((".txt", ".txt.gz")):
        return read_word_text(source)
    raise StrettoError(
        f"{data.name} was read as {found}, and tokens={config.tokens!r} was given",
        fix=f"Leave --tokens out for {found}, or name a single .txt file with --data.",
    )


def _check_numbers(data: SequenceSet, *, num_tokens: int) -> None:
    where = "`vocabulary`" if data.vocabulary else "`alphabet`"
    if data.num_features != 1 or not np.issubdtype(data.features_SF.dtype, np.integer):
        raise StrettoError(
            f"{data.name} has {data.num_features} features of type {data.features_SF.dtype}, not one number a step",
            fix=f"Give `x` as whole numbers, each the place of a word or character in {where}.",
        )
    numbers_S = data.features_SF
    if data.lengths_N.min() >= FEWEST_TOKENS and numbers_S.min() >= 0 and numbers_S.max() < num_tokens:
        return
    bounds_N = np.stack([data.starts_N, data.starts_N + data.lengths_N])
    for index, (begin, end) in enumerate(bounds_N.T.tolist()):
        numbers_T = data.features_SF[begin:end]
        if len(numbers_T) < FEWEST_TOKENS or numbers_T.min() < 0 or numbers_T.max() >= num_tokens:
            raise StrettoError(
                f"{data.name}: sequence {data.numbers_N[index]} has {len(numbers_T)} steps, numbered "
                f"{numbers_T.min()} to {numbers_T.max()}, for {num_tokens} words or characters",
                fix=f"Give passages of {FEWEST_TOKENS} or more steps, numbered by their place in {where}.",
            )
