"""Labelling steps: one label for each moment of a sequence.

Shape legend: B sequences, T steps, P real steps of all sequences, F features, H hidden units, C classes.
"""

import dataclasses
from itertools import groupby
from typing import Annotated, Final, final

import numpy as np
import torch
from pydantic import Field
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from stretto.batching import Batch
from stretto.cells import GRU
from stretto.data import SequenceSet, StepLabels, make_regimes
from stretto.errors import StrettoError
from stretto.nn import RNN, Standardise
from stretto.training import (
    AbstractTask,
    Count,
    LabelTrack,
    LossSum,
    Positive,
    Sample,
    Score,
    SolverConfig,
    check_compatible,
)

LEFT_OUT: Final = -100
SHOWN_STEPS: Final = 400


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelStepsConfig(SolverConfig):
    """Settings of the task that labels steps.

    Attributes:
        bidirectional: Whether the net also reads backwards, so that a label may depend on what follows.
        unlabelled: The label of steps that have none: they are neither learnt nor measured; None takes all labels.
    """

    epochs: Count = 8
    batch_size: Count = 8
    hidden_size: Count = 64
    learning_rate: Positive = 5e-3
    bidirectional: bool = False
    unlabelled: Annotated[int, Field(ge=0, lt=2**31)] | None = 0


@final
class LabelStepsModel(nn.Module):
    """Layers of GRUs over standardised features, and a linear layer at each step."""

    def __init__(
        self, standardise: Standardise, *, num_features: int, num_classes: int, config: LabelStepsConfig
    ) -> None:
        super().__init__()
        self.standardise = standardise
        size, layers, both = config.hidden_size, config.num_layers, config.bidirectional
        # torch warns when a single layer is given a dropout that it would not use.
        between = config.dropout if layers > 1 else 0.0
        self.gru: RNN | nn.GRU
        if config.backend != "torch":
            self.gru = RNN(
                GRU(num_features, size),
                layers,
                both,
                dropout=between,
                backend=config.backend,
                solver=config.make_solver(),
            )
        else:
            check_compatible(config)
            self.gru = nn.GRU(num_features, size, layers, batch_first=True, dropout=between, bidirectional=both)
        self.dropout = nn.Dropout(config.dropout)
        self.classify = nn.Linear(size * (2 if both else 1), num_classes)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Scores of the classes (B, T, C); rows beyond a sequence's end are not defined."""
        x_BTF = self.standardise(batch.features_BTF, batch.mask)
        if isinstance(self.gru, RNN):
            hidden_BTH, _ = self.gru(x_BTF, lengths=batch.lengths, sample_ids=batch.indices)
        elif self.gru.bidirectional:
            # On a padded batch, torch's backward direction would start in the padding.
            packed, _ = self.gru(pack_padded_sequence(x_BTF, batch.lengths, batch_first=True, enforce_sorted=False))
            hidden_BTH, _ = pad_packed_sequence(packed, batch_first=True, total_length=x_BTF.shape[1])
        else:
            hidden_BTH, _ = self.gru(x_BTF)
        scores_BTC: torch.Tensor = self.classify(self.dropout(hidden_BTH))
        return scores_BTC


@final
class LabelSteps(AbstractTask[LabelStepsConfig]):
    """Sequences with one label a step, such as what a person does at each moment, measured in accuracy."""

    name = "label-steps"
    metric = "accuracy"

    def __init__(self, config: LabelStepsConfig, data: SequenceSet) -> None:
        if not isinstance(data.targets, StepLabels):
            raise StrettoError(
                f"{data.name} has no labels of steps",
                fix="Give one label a step as `y`, or use `stretto train classify` for one label a sequence.",
            )
        names = data.targets.names
        known = [number for number in range(len(names)) if number != config.unlabelled]
        self._names = [names[number] for number in known]
        # The last place is for what lies behind a sequence's end.
        self._class_of = torch.full((len(names) + 1,), LEFT_OUT)
        self._class_of[known] = torch.arange(len(known))
        counts = data.part("train").targets
        assert isinstance(counts, StepLabels)
        if not counts.counts()[known].any():
            raise StrettoError(
                f"{data.name}: no step of the training sequences has a label but {config.unlabelled}",
                fix="Label some steps, or name another label with --unlabelled.",
            )
        super().__init__(config, dataclasses.replace(data, notes=(*data.notes, *_left_out(data.targets, config))))

    @classmethod
    def embedded_data(cls) -> SequenceSet:
        """Signals that switch between regimes now and then."""
        return make_regimes()

    def build_model(self) -> LabelStepsModel:
        """A fresh model."""
        return LabelStepsModel(
            Standardise.of(self.data.part("train")),
            num_features=self.data.num_features,
            num_classes=len(self._names),
            config=self.config,
        )

    def loss(self, output: torch.Tensor, batch: Batch) -> LossSum:
        """Cross-entropy, counted in labelled steps."""
        mask_BT, classes_P = batch.mask, self._classes(batch)
        total = functional.cross_entropy(output[mask_BT], classes_P, ignore_index=LEFT_OUT, reduction="sum")
        return LossSum(total=total, count=int((classes_P != LEFT_OUT).sum()))

    def num_elements(self, part: SequenceSet) -> int:
        """Labelled steps."""
        assert isinstance(part.targets, StepLabels)
        return int(part.targets.counts()[(self._class_of[:-1] != LEFT_OUT).numpy()].sum())

    def score(self, output: torch.Tensor, batch: Batch) -> dict[str, Score]:
        """Share of labelled steps whose best class is the right one."""
        classes_P = self._classes(batch)
        right_P = output[batch.mask].argmax(dim=1) == classes_P
        return {self.metric: Score(amount=int(right_P.sum()), count=int((classes_P != LEFT_OUT).sum()))}

    def samples(self, output: torch.Tensor, batch: Batch) -> list[Sample]:
        """Labels along each sequence, true and found."""
        best_BT, truth_BT = output.argmax(dim=2).cpu(), self._class_of[batch.targets.cpu()]
        return [
            self._sample(truth_T[:length], best_T[:length])
            for truth_T, best_T, length in zip(truth_BT, best_BT, batch.lengths.tolist(), strict=True)
        ]

    def _classes(self, batch: Batch) -> torch.Tensor:
        targets_P = batch.targets[batch.mask]
        return self._class_of.to(targets_P.device)[targets_P]

    def _sample(self, truth_T: torch.Tensor, best_T: torch.Tensor) -> Sample:
        labelled_T = truth_T != LEFT_OUT
        at = np.unique(np.linspace(0, len(truth_T) - 1, min(len(truth_T), SHOWN_STEPS)).round().astype(np.int64))
        target, output = _runs(truth_T[at]), _runs(best_T[at])
        right = float((truth_T == best_T).sum()) / max(1, int(labelled_T.sum()))
        track = LabelTrack(names=self._names, target=target, output=output, right=right)
        return Sample(target=self._told(target), output=self._told(output), track=track)

    def _told(self, runs: list[list[int]]) -> str:
        return ", then ".join(self._names[number] for number, _ in runs if number >= 0)


def _runs(labels: torch.Tensor) -> list[list[int]]:
    return [[max(-1, number), len(list(run))] for number, run in groupby(labels.tolist())]


def _left_out(labels: StepLabels, config: LabelStepsConfig) -> list[str]:
    """What the user should know of steps without a label."""
    if config.unlabelled is None or config.unlabelled >= len(labels.names):
        return []
    count, total = int(labels.counts()[config.unlabelled]), int(labels.lengths_N.sum())
    if not count:
        return []
    return [
        f"{count:,} of {total:,} steps have the label {config.unlabelled} and count as unlabelled; "
        "--unlabelled None takes them too"
    ]
