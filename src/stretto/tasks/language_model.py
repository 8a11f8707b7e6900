"""Language modelling: the next word or character of a text.

Shape legend: B passages or streams, T steps, U steps that have a next one, P all steps, E embedding size, H hidden
units, C words or characters.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Any, ClassVar, Final, Literal, final

import numpy as np
import torch
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn import functional

from stretto.batching import NO_STEP, Batch
from stretto.data import SequenceSet, make_text, read_word_text
from stretto.distributed import World
from stretto.errors import StrettoError
from stretto.nn import CarriedState, run_ragged
from stretto.tasks.recurrent import make_lstm
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

MIN_TOKENS: Final = 2
SAMPLE_TOKENS = {"characters": 60, "words": 16}
MAX_NATS = 700.0
PTB: Final[dict[str, Any]] = {
    "tokens": "words",
    "layout": "streams",
    "batch_size": 20,
    "base_batch_size": 20,
    "num_layers": 2,
    "optimizer": "sgd",
    "schedule": "ptb",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class LanguageModelConfig(TrainConfig):
    """Settings of the language-model task.

    Attributes:
        preset: A published set of settings, each of which can still be given: Zaremba et al.'s nets for the Penn
            Treebank, small or large.
        tokens: Words or characters; left out, what the data are read as: a single file as characters.
        layout: Passages are shuffled and each starts anew; streams read the text continuously, side by side, as many as
            batch_size, and carry the state. Left out, streams for words and passages for characters.
        window: In streams, steps of a batch, and how far gradients go back.
        embedding_size: Size of the embedding of a word or character.
        input_dropout: Fraction of the embedding dropped.
        init_scale: Weights begin uniform between minus and plus this; left out, as torch has them, with open forget
            gates.
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
            "learning_rate": 20.0,
            "clip_norm": 5 / 20,
            "dropout": 0.0,
            "epochs": 13,
            "flat_epochs": 4,
            "decay_factor": 0.5,
        },
        "ptb-large": {
            **PTB,
            "window": 35,
            "hidden_size": 1500,
            "embedding_size": 1500,
            "init_scale": 0.04,
            "learning_rate": 35.0,
            "clip_norm": 10 / 35,
            "dropout": 0.65,
            "input_dropout": 0.65,
            "epochs": 55,
            "flat_epochs": 14,
            "decay_factor": 1 / 1.15,
        },
    }


@final
class TextNet(nn.Module):
    """Words or characters embedded, an LSTM, and scores of what comes next."""

    def __init__(self, num_tokens: int, config: LanguageModelConfig) -> None:
        super().__init__()
        size, scale = config.hidden_size, config.init_scale
        self.carried = CarriedState(batch_dim=1)
        self.embed = nn.Embedding(num_tokens, config.embedding_size)
        self.lstm = make_lstm(config.embedding_size, size, config=config)
        self.input_dropout, self.dropout = nn.Dropout(config.input_dropout), nn.Dropout(config.dropout)
        self.predict = nn.Linear(size, num_tokens)
        if scale is not None:
            for weight in self.parameters():
                nn.init.uniform_(weight, -scale, scale)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Of passages, scores (B, U, C) of steps 1 to T - 1; of windows, which have targets, of all T that follow."""
        if batch.targets is not None:
            return self._window(batch)
        embedded_BUE = self.input_dropout(self.embed(batch.features_BTF[:, :-1, 0]))
        hidden_BUH = run_ragged(self.lstm, embedded_BUE, batch.lengths - 1)
        scores_BUC: torch.Tensor = self.predict(self.dropout(hidden_BUH))
        return scores_BUC

    def _window(self, batch: Batch) -> torch.Tensor:
        """Only the end of the text is followed by padding; its outputs and states are not used."""
        embedded_BTE = self.input_dropout(self.embed(batch.features_BTF[:, :, 0]))
        hidden_BTH, state = self.lstm(embedded_BTE, self.carried.rows(slice(len(batch))))
        self.carried.keep(state)
        # The layer returns its outputs with time first in memory; in that order neither they nor the scores are copied.
        hidden_TBH = hidden_BTH.transpose(0, 1)
        scores_PC: torch.Tensor = self.predict(self.dropout(hidden_TBH.flatten(0, 1)))
        return scores_PC.view(*hidden_TBH.shape[:2], -1).transpose(0, 1)


@final
class LanguageModelling(AbstractTask[LanguageModelConfig]):
    """Text as words or characters, in passages or in parallel streams, measured in perplexity per word or character."""

    name = "language-model"
    Config = LanguageModelConfig
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
        """Whether the text is read in continuous streams, not passage by passage."""
        layout = self.config.layout or ("streams" if self.data.vocabulary else "passages")
        return layout == "streams"

    def build_model(self) -> TextNet:
        """A new model."""
        return TextNet(len(self._names), self.config)

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
        """Passages, or windows of up to 20 streams, each from an initial state."""
        if not self.in_streams:
            return super().eval_batches(part, world=world, device=device)
        return eval_windows(part, window=self.config.window, world=world, device=device)

    def loss(self, output: torch.Tensor, batch: Batch) -> LossSum:
        """Cross-entropy of the next words or characters, counted in them."""
        if batch.targets is not None:
            # Time first, as the net returns its scores: so they need not be copied, which would cost as much again.
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
        """Nats, which add up; `summary` turns them into a perplexity."""
        loss = self.loss(output, batch)
        return {"nats": Score(amount=float(loss.total), count=loss.count)}

    def summary(self, scores: dict[str, Score]) -> dict[str, float]:
        """The exponential of the mean loss."""
        return {self.metric: perplexity(scores["nats"])}

    def samples(self, output: torch.Tensor, batch: Batch) -> list[Sample]:
        """Passages, and the model's prediction of each word or character from those before it."""
        best_BU = output.argmax(dim=-1)
        most = SAMPLE_TOKENS["words" if self.data.vocabulary else "characters"]
        shown = []
        for row, length in enumerate(batch.lengths.tolist()):
            count = min(length, most)
            actual = batch.features_BTF[row, :count, 0].tolist()
            expected = [actual[0], *best_BU[row, : count - 1].tolist()]
            shown.append(Sample(target=self._spell(actual), output=self._spell(expected)))
        return shown

    def _spell(self, numbers: list[int]) -> str:
        return (" " if self.data.vocabulary else "").join(self._names[number] for number in numbers)


def perplexity(nats: Score) -> float:
    """The exponential of the mean loss, finite however large that is."""
    return math.exp(min(nats.ratio, MAX_NATS))


def summed_cross_entropy(scores_PC: torch.Tensor, targets_P: torch.Tensor) -> torch.Tensor:
    """`torch.nn.functional.cross_entropy` with `reduction="sum"`; steps whose target is -1 do not count.

    With thousands of words, the softmax of a window takes as long as its layers. The gradient is computed in the memory
    of the log-probabilities, where torch would allocate two more matrices. A second backward pass computes them again.
    """
    if not (torch.is_grad_enabled() and scores_PC.requires_grad):
        return functional.cross_entropy(scores_PC, targets_P, ignore_index=NO_STEP, reduction="sum")
    total: torch.Tensor = _SummedCrossEntropy.apply(scores_PC, targets_P)  # type: ignore[no-untyped-call]
    return total


class _SummedCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, scores_PC: torch.Tensor, targets_P: torch.Tensor) -> torch.Tensor:
        logs_PC = torch.log_softmax(scores_PC, dim=1)
        ctx.logs_PC = logs_PC
        ctx.save_for_backward(scores_PC, targets_P)
        return functional.nll_loss(logs_PC, targets_P, ignore_index=NO_STEP, reduction="sum")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        scores_PC, targets_P = ctx.saved_tensors
        logs_PC, ctx.logs_PC = ctx.logs_PC, None
        gradient_PC = (torch.log_softmax(scores_PC, dim=1) if logs_PC is None else logs_PC).exp_()
        counted_P = targets_P != NO_STEP
        rows_P = torch.arange(len(targets_P), device=targets_P.device)
        gradient_PC[rows_P, targets_P.clamp(min=0)] -= 1.0
        if not bool(counted_P.all()):
            gradient_PC[~counted_P] = 0.0
        if gradient.device.type != "cpu" or gradient.item() != 1.0:
            gradient_PC.mul_(gradient)
        return gradient_PC, None


def _as_tokens(config: LanguageModelConfig, data: SequenceSet) -> SequenceSet:
    """The data as they were read, or read again as the tokens that the settings name."""
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
            f"{data.name} has {data.num_features} features of type {data.features_SF.dtype}, not one number per step",
            fix=f"Give `x` as whole numbers, each the place of a word or character in {where}.",
        )
    if data.lengths_N.min() >= MIN_TOKENS and data.features_SF.min() >= 0 and data.features_SF.max() < num_tokens:
        return
    for index, begin in enumerate(data.starts_N):
        numbers_T = data.features_SF[begin : begin + data.lengths_N[index]]
        if len(numbers_T) < MIN_TOKENS or numbers_T.min() < 0 or numbers_T.max() >= num_tokens:
            raise StrettoError(
                f"{data.name}: sequence {data.numbers_N[index]} has {len(numbers_T)} steps, numbered "
                f"{numbers_T.min()} to {numbers_T.max()}, for {num_tokens} words or characters",
                fix=f"Give passages of {MIN_TOKENS} or more steps, numbered by their place in {where}.",
            )
