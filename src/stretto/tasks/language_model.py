"""Language modelling: the next word or character of a text.

Shape legend: B passages or streams, T steps, U steps that have a next one, P all steps, E embedding size, H hidden
units, C words or characters.
"""

import dataclasses
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Final, Literal, final

import numpy as np
import torch
from torch import nn
from torch.nn import functional
from typing_extensions import Self

from stretto.batching import NO_STEP, Batch
from stretto.data import UNKNOWN, SequenceSet, make_text, open_sequences, read_word_text
from stretto.distributed import World
from stretto.errors import StrettoError, list_some
from stretto.nn import CarriedState, Dropout, linear_cross_entropy, run_ragged
from stretto.tasks.recurrent import Unpadded, make_lstm
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
NATS_DIMS: Final = 2
"""Dimensions of what a model returns in training: those of its scores without one."""
SAMPLE_TOKENS = {"characters": 60, "words": 16}
MAX_NATS = 700.0
READ_STEPS: Final = 64
"""Steps whose scores are in memory at once when a text is read to be continued."""
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
        layout: Passages are shuffled and each starts from the initial state; streams read the text continuously, side
            by side, as many as batch_size, and carry the state. Left out, streams for words and passages for
            characters.
        window: In streams, steps of a batch, and how far gradients go back.
        embedding_size: Size of the embedding of a word or character.
        input_dropout: Fraction of the embedding dropped.
        init_scale: Weights begin uniform between minus and plus this; left out, as torch has them, with open forget
            gates.
        frequency_bias: The output layer's bias begins at the logarithms of how often words or characters occur in
            training, so that the first updates need not teach it.
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
    frequency_bias: bool = False

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
        self.input_dropout, self.dropout = Dropout(config.input_dropout), Dropout(config.dropout)
        self.predict = nn.Linear(size, num_tokens)
        if scale is not None:
            for weight in self.parameters():
                nn.init.uniform_(weight, -scale, scale)

    def forward(self, batch: Batch | Unpadded) -> torch.Tensor:
        """Of passages, scores (B, U, C) of steps 1 to T - 1; of windows, which have targets, of all T that follow.

        In training the nats (B, U) of what really comes, zero in padding: scores take far more memory and time.
        """
        if isinstance(batch, Unpadded):
            return self.predict(self.lstm(self.embed(batch.features_BTF[:, :, 0]))[0])  # type: ignore[no-any-return]
        if batch.targets is not None:
            hidden_TBH = self._run_window(batch)
            # Time first, as they lie in memory, so that nothing is copied.
            return self._score_next(hidden_TBH, batch.targets.transpose(0, 1)).transpose(0, 1)
        embedded_BUE = self.input_dropout(self.embed(batch.features_BTF[:, :-1, 0]))
        hidden_BUH = run_ragged(self.lstm, embedded_BUE, batch.lengths - 1)
        next_BU = batch.features_BTF[:, 1:, 0].masked_fill(~batch.mask[:, 1:], NO_STEP)
        return self._score_next(self.dropout(hidden_BUH), next_BU)

    def _score_next(self, hidden: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """In training the nats of what follows, or else scores of all that could."""
        if not self.training:
            scores: torch.Tensor = self.predict(hidden)
            return scores
        weight_CH, bias_C = self.predict.weight, self.predict.bias
        return linear_cross_entropy(hidden, weight_CH, bias_C, following, ignore_index=NO_STEP)

    def _run_window(self, batch: Batch) -> torch.Tensor:
        """Only the end of the text is followed by padding; its outputs and states are not used."""
        embedded_BTE = self.input_dropout(self.embed(batch.features_BTF[:, :, 0]))
        hidden_BTH, state = self.lstm(embedded_BTE, self.carried.rows(slice(len(batch))))
        self.carried.keep(state)
        hidden_TBH: torch.Tensor = self.dropout(hidden_BTH.transpose(0, 1))
        return hidden_TBH

    def continue_texts(self, batch: Batch, *, num_steps: int) -> tuple[torch.Tensor, torch.Tensor]:
        """The nats (B) of each text after its first step, and the likeliest next step, taken `num_steps` times (B, U).

        Texts are read from an initial state, some steps at a time: the scores of a long one would fill the memory.
        """
        numbers_BT, lengths_B = batch.features_BTF[:, :, 0], batch.lengths
        nats_B, last_BC = torch.zeros(len(batch), dtype=torch.float64), None
        state: tuple[torch.Tensor, torch.Tensor] | None = None
        for begin in range(0, numbers_BT.shape[1], READ_STEPS):
            # Longer texts are read on beside those that have ended, whose states do not change.
            left_B = (lengths_B - begin).clamp(0, READ_STEPS)
            now_BT, next_BT = (
                numbers_BT[:, begin : begin + READ_STEPS],
                numbers_BT[:, begin + 1 : begin + READ_STEPS + 1],
            )
            hidden_BTH, state = self._read(now_BT, left_B, state)
            logs_BTC = self.predict(hidden_BTH).log_softmax(dim=-1)
            real_BT = torch.arange(next_BT.shape[1]) < (lengths_B - 1 - begin)[:, None]
            found_BT = logs_BTC[:, : next_BT.shape[1]].gather(2, next_BT[..., None])[..., 0]
            nats_B -= found_BT.double().cpu().masked_fill(~real_BT, 0.0).sum(dim=1)
            ends_B = logs_BTC[torch.arange(len(batch)), (left_B - 1).clamp(min=0)]
            is_last_B = ((left_B > 0) & (lengths_B <= begin + READ_STEPS)).to(ends_B.device)[:, None]
            last_BC = ends_B if last_BC is None else torch.where(is_last_B, ends_B, last_BC)
        assert last_BC is not None
        rows = [last_BC.argmax(dim=1)]
        ones_B = torch.ones_like(lengths_B)
        while len(rows) < num_steps:
            hidden_BTH, state = self._read(rows[-1][:, None], ones_B, state)
            rows.append(self.predict(hidden_BTH[:, 0]).argmax(dim=1))
        return nats_B, torch.stack(rows, dim=1)

    def _read(
        self, numbers_BT: torch.Tensor, lengths_B: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor] | None
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Outputs and the state after it, of rows which may be empty."""
        if state is None:
            return self.lstm(self.embed(numbers_BT), lengths=lengths_B)  # type: ignore[no-any-return]
        return self.lstm(self.embed(numbers_BT), state, lengths=lengths_B)  # type: ignore[no-any-return]


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
        model = TextNet(len(self._names), self.config)
        if self.config.frequency_bias:
            data = self.data
            # A model that is built to be loaded may have no training data.
            train = data.subset(np.flatnonzero(data.split_N == 0))
            tokens_S = np.concatenate([np.zeros(0, np.int64), *(numbers_T1[:, 0] for numbers_T1 in train.arrays())])
            # Counted from one: what does not occur has a finite logarithm too.
            counts_C = 1 + np.bincount(tokens_S.astype(np.int64), minlength=len(self._names))
            with torch.no_grad():
                model.predict.bias.copy_(torch.from_numpy(np.log(counts_C / counts_C.sum())))
        return model

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
        is_window = batch.targets is not None
        count = batch.num_steps if is_window else batch.num_steps - len(batch)
        if output.dim() == NATS_DIMS:
            return LossSum(total=output.sum(), count=count)
        next_BU = batch.targets if is_window else batch.features_BTF[:, 1:, 0].masked_fill(~batch.mask[:, 1:], NO_STEP)
        scores_PC, next_P = output.flatten(0, 1), next_BU.flatten()
        total = functional.cross_entropy(scores_PC, next_P, ignore_index=NO_STEP, reduction="sum")
        return LossSum(total=total, count=count)

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

    def open(self, path: Path) -> SequenceSet:
        """Read text as words or characters, whichever the model was trained on."""
        if self.data.vocabulary and path.is_file() and path.name.lower().endswith((".txt", ".txt.gz")):
            return read_word_text(path, whole=True)
        return open_sequences(path)

    def from_texts(self, texts: Sequence[str]) -> SequenceSet:
        """Words of sentences, without an end, or characters."""
        rows: list[Any] = [text.split() if self.data.vocabulary else text for text in texts]
        names: Any = dict.fromkeys(name for row in rows for name in row)
        number_of = {name: number for number, name in enumerate(names)}
        return SequenceSet.from_flat(
            np.array([number_of[name] for row in rows for name in row], dtype=np.int64),
            offsets=np.cumsum([0, *map(len, rows)]),
            split_N=np.zeros(len(rows), dtype=np.int64),
            name="texts",
            **({"vocabulary": tuple(names)} if self.data.vocabulary else {"alphabet": "".join(names)}),
        )

    def with_data(self, data: SequenceSet, *, targets: bool = True) -> Self:
        """Words or characters by the model's numbers; a word that it does not know is `<unk>`, if it knows that."""
        names: tuple[str, ...] | str = data.vocabulary if self.data.vocabulary else data.alphabet
        kind = "words" if self.data.vocabulary else "characters"
        if not names:
            raise StrettoError(f"{data.name} is no text of {kind}", fix="Give text as the model was trained on.")
        _check_numbers(data, num_tokens=len(names))
        number_of = {name: number for number, name in enumerate(self._names)}
        default = number_of.get(UNKNOWN, -1) if self.data.vocabulary else -1
        known = np.array([number_of.get(name, default) for name in names], dtype=np.int64)
        used = np.unique(np.concatenate(data.arrays()))
        if missing := [names[number] for number in used.tolist() if known[number] < 0]:
            raise StrettoError(
                f"{data.name} has {kind} that the model was not trained on: {list_some([*map(repr, missing)])}",
                fix="Remove or replace them in the text.",
            )
        numbers_SF = np.maximum(known, 0).astype(self.data.features_SF.dtype)[data.features_SF]
        data = dataclasses.replace(
            data, features_SF=numbers_SF, alphabet=self.data.alphabet, vocabulary=self.data.vocabulary
        )
        return super().with_data(data, targets=targets)

    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """The perplexity of each text, read from an initial state, and how it continues by the likeliest steps."""
        assert isinstance(model, TextNet)
        words = bool(self.data.vocabulary)
        nats_B, rows = model.continue_texts(batch, num_steps=SAMPLE_TOKENS["words" if words else "characters"])
        counts_B = (batch.lengths - 1).tolist()
        return [
            {
                "perplexity": perplexity(Score(amount=nats, count=count)),
                "words" if words else "characters": count + 1,
                "continuation": self._spell(row),
            }
            for nats, count, row in zip(nats_B.tolist(), counts_B, rows.tolist(), strict=True)
        ]

    def _spell(self, numbers: list[int]) -> str:
        return (" " if self.data.vocabulary else "").join(self._names[number] for number in numbers)


def perplexity(nats: Score) -> float:
    """The exponential of the mean loss, finite however large that is."""
    return math.exp(min(nats.ratio, MAX_NATS))


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
            fix=f"Give `x` as integers, each the place of a word or character in {where}.",
        )
    if data.lengths_N.min() >= MIN_TOKENS and data.features_SF.min() >= 0 and data.features_SF.max() < num_tokens:
        return
    for number, numbers_T1 in zip(data.numbers_N, data.arrays(), strict=True):
        if len(numbers_T1) < MIN_TOKENS or numbers_T1.min() < 0 or numbers_T1.max() >= num_tokens:
            raise StrettoError(
                f"{data.name}: sequence {number} has {len(numbers_T1)} steps, numbered "
                f"{numbers_T1.min()} to {numbers_T1.max()}, for {num_tokens} words or characters",
                fix=f"Give passages of {MIN_TOKENS} or more steps, numbered by their place in {where}.",
            )
