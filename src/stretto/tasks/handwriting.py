"""Handwriting recognition: pen movement in, text out.

Shape legend: B or N lines, T steps, U stacked steps, F features, C classes (blank first), S characters of all lines.
"""

import dataclasses
import math
from collections import defaultdict
from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, final

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import nn
from torch.nn import functional
from typing_extensions import Self

from stretto.batching import Batch
from stretto.data import SequenceSet, Transcripts, load_handwriting
from stretto.errors import StrettoError
from stretto.extras import optional
from stretto.nn import Dropout, Standardise, stack_steps, stacked_lengths
from stretto.tasks.recurrent import Unpadded, make_lstm, run_layers
from stretto.training import AbstractTask, Count, LossSum, Sample, Score, TrainConfig

INK_FEATURES: Final = 3
BLANK: Final = 0
"""The class of CTC for no character."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class HandwritingConfig(TrainConfig):
    """Settings of the handwriting task.

    Attributes:
        stack: Time steps concatenated into one before the recurrent layer.
        decoder: How the test part is decoded: greedy, or prefix beam search.
        beam_width: Prefixes that beam search keeps.
    """

    epochs: Count = 7
    stack: Count = 3
    decoder: Literal["greedy", "beam"] = "greedy"
    beam_width: Annotated[int, Field(ge=1, le=1000)] = 8


@final
class HandwritingModel(nn.Module):
    """Stacked pen movement, a bidirectional LSTM, and the probability of each character at each step."""

    def __init__(self, data: SequenceSet, *, num_classes: int, config: HandwritingConfig) -> None:
        super().__init__()
        self.stack = config.stack
        self.standardise = Standardise.of(data.part("train"))
        self.lstm = make_lstm(data.num_features * config.stack, config.hidden_size, bidirectional=True, config=config)
        self.dropout = Dropout(config.dropout)
        self.classify = nn.Linear(2 * config.hidden_size, num_classes)

    def forward(self, batch: Batch | Unpadded) -> torch.Tensor:
        """Log-probabilities (B, U, C); rows beyond a line's end are not defined."""
        x_BTF = self.standardise(batch.features_BTF, batch.mask)
        x_BUF = stack_steps(x_BTF, factor=self.stack)
        lengths = None if isinstance(batch, Unpadded) else stacked_lengths(batch.lengths, factor=self.stack)
        hidden_BUH = self.dropout(run_layers(self.lstm, x_BUF, lengths))
        log_probs_BUC: torch.Tensor = self.classify(hidden_BUH).log_softmax(dim=-1)
        return log_probs_BUC


@final
class Handwriting(AbstractTask[HandwritingConfig]):
    """Lines of pen movement with transcripts, trained with CTC, measured in character error rate."""

    name = "handwriting"
    Config = HandwritingConfig
    metric = "cer"

    def __init__(self, config: HandwritingConfig, data: SequenceSet) -> None:
        super().__init__(config, data)
        if not isinstance(data.targets, Transcripts):
            raise StrettoError(
                f"{data.name} has no transcripts", fix="Give ink with text, or use `stretto train classify` for labels."
            )
        self._distance = optional("rapidfuzz.distance").Levenshtein.distance
        self.alphabet = data.targets.alphabet()
        self._code_of = {character: BLANK + 1 + number for number, character in enumerate(self.alphabet)}
        _check_transcripts(data, data.targets, stack=config.stack)

    @classmethod
    def embedded_data(cls) -> SequenceSet:
        """Lines drawn with single-stroke fonts in invented handwriting."""
        return load_handwriting()

    def build_model(self) -> HandwritingModel:
        """A new model."""
        return HandwritingModel(self.data, num_classes=BLANK + 1 + len(self.alphabet), config=self.config)

    def loss(self, output: torch.Tensor, batch: Batch) -> LossSum:
        """Negative log-likelihood of the transcripts, counted in characters.

        New data may have characters that training did not have: their lines have no likelihood, and are left out.
        """
        rows = [row for row, text in enumerate(batch.targets) if self._code_of.keys() >= set(text)]
        if not rows:
            return LossSum(total=output.new_zeros(()), count=0)
        codes = [[self._code_of[character] for character in batch.targets[row]] for row in rows]
        lengths = stacked_lengths(batch.lengths, factor=self.config.stack)
        if len(rows) < len(batch):
            output, lengths = output[rows], lengths[rows]
        total = functional.ctc_loss(
            output.transpose(0, 1),
            torch.tensor([code for line in codes for code in line], device=output.device),
            lengths,
            torch.tensor([len(line) for line in codes]),
            blank=BLANK,
            reduction="sum",
        )
        return LossSum(total=total, count=sum(map(len, codes)))

    def num_elements(self, part: SequenceSet) -> int:
        """Characters."""
        assert isinstance(part.targets, Transcripts)
        return int(part.targets.lengths_N.sum())

    def score(self, output: torch.Tensor, batch: Batch) -> dict[str, Score]:
        """Character errors of greedy decoding."""
        return {self.metric: self._count_errors(batch, self._decode(output, batch, decoder="greedy"))}

    def final_score(self, output: torch.Tensor, batch: Batch) -> dict[str, Score]:
        """Character errors of both decoders; `cer` is the chosen one's."""
        errors = {
            f"cer_{decoder}": self._count_errors(batch, self._decode(output, batch, decoder=decoder))
            for decoder in ("greedy", "beam")
        }
        return {self.metric: errors[f"cer_{self.config.decoder}"], **errors}

    def samples(self, output: torch.Tensor, batch: Batch) -> list[Sample]:
        """The lines with their predicted text."""
        lines = self._decode(output, batch, decoder=self.config.decoder)
        return [
            Sample(target=target, output=line, ink=_list_points(features_TF[:length]))
            for target, line, features_TF, length in zip(
                batch.targets, lines, batch.features_BTF, batch.lengths.tolist(), strict=True
            )
        ]

    def with_data(self, data: SequenceSet, *, targets: bool = True) -> Self:
        """Transcripts may have characters that training did not have: these always count as errors."""
        task = super().with_data(data, targets=targets)
        if isinstance(task.data.targets, Transcripts):
            _check_transcripts(data, task.data.targets, stack=self.config.stack)
            unknown = "".join(sorted(set(task.data.targets.alphabet()) - set(self.alphabet)))
            if unknown:
                note = f"characters that the model does not know count as errors, in cer but not in the loss: {unknown}"
                task.data = dataclasses.replace(data, notes=(*data.notes, note))
        elif targets:
            raise StrettoError(f"{data.name} has no transcripts", fix="Give ink with text.")
        return task

    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """The text of each line, by the decoder of the settings."""
        return [{"text": line} for line in self._decode(model(batch), batch, decoder=self.config.decoder)]

    def _decode(self, output: torch.Tensor, batch: Batch, *, decoder: str) -> list[str]:
        log_probs_BUC = output.float().cpu().numpy()
        lengths = stacked_lengths(batch.lengths, factor=self.config.stack).tolist()
        lines = []
        for log_probs_UC, length in zip(log_probs_BUC, lengths, strict=True):
            real_UC = log_probs_UC[:length]
            codes = (
                greedy_decode(real_UC) if decoder == "greedy" else beam_decode(real_UC, width=self.config.beam_width)
            )
            lines.append("".join(self.alphabet[code - BLANK - 1] for code in codes))
        return lines

    def _count_errors(self, batch: Batch, lines: list[str]) -> Score:
        errors = sum(self._distance(target, line) for target, line in zip(batch.targets, lines, strict=True))
        return Score(amount=errors, count=sum(map(len, batch.targets)))


def _check_transcripts(data: SequenceSet, transcripts: Transcripts, *, stack: int) -> None:
    empty = np.flatnonzero(transcripts.lengths_N == 0)
    if len(empty):
        raise StrettoError(
            f"{data.name}: sequence {empty[0]} has no transcript", fix="Write its text, or remove the sequence."
        )
    needed_N = steps_needed(transcripts)
    given_N = -(-data.lengths_N // stack)
    short = np.flatnonzero(needed_N > given_N)
    if len(short):
        first = int(short[0])
        raise StrettoError(
            f"{data.name}: the transcript {transcripts[first]!r} of sequence {first} needs {needed_N[first]} steps "
            f"but its ink has {given_N[first]} after stacking {stack} ({len(short)} such sequences)",
            fix="Lower --stack, check the transcript, or remove the sequence.",
        )


def _list_points(features_TF: torch.Tensor) -> list[list[float]] | None:
    if features_TF.shape[1] != INK_FEATURES:
        return None
    return [[round(value, 3) for value in row] for row in features_TF.tolist()]


def steps_needed(transcripts: Transcripts) -> npt.NDArray[np.int64]:
    """The fewest steps that CTC needs for each transcript: one per character, and a blank between equal ones."""
    codes, starts_N, lengths_N = transcripts.code_points, transcripts.starts_N, transcripts.lengths_N
    repeated = np.zeros(len(codes) + 1, dtype=np.int64)
    repeated[2:] = np.cumsum(codes[1:] == codes[:-1])
    within_N = repeated[starts_N + lengths_N] - repeated[np.minimum(starts_N + 1, len(codes))]
    return lengths_N + np.where(lengths_N > 0, within_N, 0)


def greedy_decode(log_probs_TC: npt.NDArray[np.floating]) -> list[int]:
    """The most likely class of each step, repeats merged, blanks removed."""
    best_T = log_probs_TC.argmax(axis=1)
    changed_T = np.diff(best_T, prepend=-1) != 0
    kept: list[int] = best_T[changed_T & (best_T != BLANK)].tolist()
    return kept


def beam_decode(log_probs_TC: npt.NDArray[np.floating], *, width: int = 8, min_log_prob: float = -9.0) -> list[int]:
    """Prefix beam search: the most likely labelling, summed over all its paths.

    Args:
        log_probs_TC: Log-probabilities of the classes at each step.
        width: Prefixes kept after each step. Wide enough, the search is exact.
        min_log_prob: Classes below this at a step do not extend a prefix there; minus infinity leaves none out.
    """
    # For each prefix, the probability of all paths that spell it: those that end in a blank, and those in its symbol.
    beam: Mapping[tuple[int, ...], list[float]] = {(): [0.0, -math.inf]}
    for log_probs_C in log_probs_TC:
        blank = float(log_probs_C[BLANK])
        likely = [(c, float(log_probs_C[c])) for c in np.flatnonzero(log_probs_C >= min_log_prob) if c != BLANK]
        grown: dict[tuple[int, ...], list[float]] = defaultdict(lambda: [-math.inf, -math.inf])
        for labels, (by_blank, by_symbol) in beam.items():
            total = _log_add(by_blank, by_symbol)
            same = grown[labels]
            same[0] = _log_add(same[0], total + blank)
            if labels:
                same[1] = _log_add(same[1], by_symbol + float(log_probs_C[labels[-1]]))
            for label, log_prob in likely:
                longer = grown[(*labels, int(label))]
                # After the same symbol, only paths through a blank make a new one.
                before = by_blank if labels and labels[-1] == label else total
                longer[1] = _log_add(longer[1], before + log_prob)
        beam = dict(sorted(grown.items(), key=lambda item: _log_add(*item[1]), reverse=True)[:width])
    return list(next(iter(beam)))


def _log_add(left: float, right: float) -> float:
    """log(exp(left) + exp(right)) without the overhead of NumPy on scalars."""
    if left < right:
        left, right = right, left
    return left if right == -math.inf else left + math.log1p(math.exp(right - left))
