"""Labelling steps: one label for each step of a sequence.

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

from stretto.batching import Batch
from stretto.data import SequenceSet, StepLabels, make_regimes
from stretto.errors import StrettoError
from stretto.nn import Standardise
from stretto.tasks.recurrent import GRULayers
from stretto.training import AbstractTask, Count, LabelTrack, LossSum, Positive, Sample, Score, SolverConfig

IGNORED_CLASS: Final = -100
SAMPLE_STEPS: Final = 400


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelStepsConfig(SolverConfig):
    """Settings of the task that labels steps.

    Attributes:
        bidirectional: Whether the net also reads backwards, so that a label may depend on what follows.
        unlabelled: The label of steps that have none: they count in neither loss nor score; None takes all labels.
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

    def __init__(self, data: SequenceSet, *, num_classes: int, config: LabelStepsConfig) -> None:
        super().__init__()
        self.standardise = Standardise.of(data.part("train"))
        self.gru = GRULayers(data.num_features, config=config, bidirectional=config.bidirectional)
        self.dropout = nn.Dropout(config.dropout)
        self.classify = nn.Linear(config.hidden_size * (2 if config.bidirectional else 1), num_classes)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Scores of the classes (B, T, C); those after a sequence's end are undefined."""
        x_BTF = self.standardise(batch.features_BTF, batch.mask)
        hidden_BTH = self.gru(x_BTF, batch)
        scores_BTC: torch.Tensor = self.classify(self.dropout(hidden_BTH))
        return scores_BTC


@final
class LabelSteps(AbstractTask[LabelStepsConfig]):
    """Sequences with one label per step, such as what a person does at each moment, measured in accuracy."""

    name = "label-steps"
    Config = LabelStepsConfig
    metric = "accuracy"

    def __init__(self, config: LabelStepsConfig, data: SequenceSet) -> None:
        if not isinstance(data.targets, StepLabels):
            raise StrettoError(
                f"{data.name} has no labels of steps",
                fix="Give one label per step as `y`, or use `stretto train classify` for one label per sequence.",
            )
        names = data.targets.names
        known = [number for number in range(len(names)) if number != config.unlabelled]
        self.class_names = [names[number] for number in known]
        # The last entry is for padding.
        self._class_of = torch.full((len(names) + 1,), IGNORED_CLASS)
        self._class_of[known] = torch.arange(len(known))
        counts = data.part("train").targets
        assert isinstance(counts, StepLabels)
        if not counts.counts()[known].any():
            raise StrettoError(
                f"{data.name}: no step of the training sequences has a label but {config.unlabelled}",
                fix="Label some steps, or name another label with --unlabelled.",
            )
        super().__init__(
            config, dataclasses.replace(data, notes=(*data.notes, *_unlabelled_note(data.targets, config)))
        )

    @classmethod
    def embedded_data(cls) -> SequenceSet:
        """Signals that switch between regimes."""
        return make_regimes()

    def build_model(self) -> LabelStepsModel:
        """A new model."""
        return LabelStepsModel(self.data, num_classes=len(self.class_names), config=self.config)

    def loss(self, output: torch.Tensor, batch: Batch) -> LossSum:
        """Cross-entropy, counted in labelled steps."""
        mask_BT, classes_P = batch.mask, self._classes(batch)
        total = functional.cross_entropy(output[mask_BT], classes_P, ignore_index=IGNORED_CLASS, reduction="sum")
        return LossSum(total=total, count=int((classes_P != IGNORED_CLASS).sum()))

    def num_elements(self, part: SequenceSet) -> int:
        """Labelled steps."""
        assert isinstance(part.targets, StepLabels)
        return int(part.targets.counts()[(self._class_of[:-1] != IGNORED_CLASS).numpy()].sum())

    def score(self, output: torch.Tensor, batch: Batch) -> dict[str, Score]:
        """The fraction of labelled steps whose best class is the right one."""
        classes_P = self._classes(batch)
        right_P = output[batch.mask].argmax(dim=1) == classes_P
        return {self.metric: Score(amount=int(right_P.sum()), count=int((classes_P != IGNORED_CLASS).sum()))}

    def samples(self, output: torch.Tensor, batch: Batch) -> list[Sample]:
        """Labels along each sequence, true and predicted."""
        best_BT, truth_BT = output.argmax(dim=2).cpu(), self._class_of[batch.targets.cpu()]
        return [
            self._sample(truth_T[:length], best_T[:length])
            for truth_T, best_T, length in zip(truth_BT, best_BT, batch.lengths.tolist(), strict=True)
        ]

    def _classes(self, batch: Batch) -> torch.Tensor:
        targets_P = batch.targets[batch.mask]
        return self._class_of.to(targets_P.device)[targets_P]

    def _sample(self, truth_T: torch.Tensor, best_T: torch.Tensor) -> Sample:
        labelled_T = truth_T != IGNORED_CLASS
        at = np.unique(np.linspace(0, len(truth_T) - 1, min(len(truth_T), SAMPLE_STEPS)).round().astype(np.int64))
        target, output = _runs(truth_T[at]), _runs(best_T[at])
        right = float((truth_T == best_T).sum()) / max(1, int(labelled_T.sum()))
        track = LabelTrack(names=self.class_names, target=target, output=output, right=right)
        return Sample(target=self._describe(target), output=self._describe(output), track=track)

    def _describe(self, runs: list[list[int]]) -> str:
        return ", then ".join(self.class_names[number] for number, _ in runs if number >= 0)


def _runs(labels: torch.Tensor) -> list[list[int]]:
    return [[max(-1, number), len(list(run))] for number, run in groupby(labels.tolist())]


def _unlabelled_note(labels: StepLabels, config: LabelStepsConfig) -> list[str]:
    """A note about steps without a label."""
    if config.unlabelled is None or config.unlabelled >= len(labels.names):
        return []
    count, total = int(labels.counts()[config.unlabelled]), int(labels.lengths_N.sum())
    if not count:
        return []
    return [
        f"{count:,} of {total:,} steps have the label {config.unlabelled} and count as unlabelled; "
        "--unlabelled None takes them too"
    ]
