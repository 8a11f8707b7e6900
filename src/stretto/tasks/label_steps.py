"""Labelling steps: one label for each step of a sequence.

Shape legend: B sequences, T steps, P real steps of all sequences, F features, H hidden units, C classes.
"""

import dataclasses
from itertools import groupby
from typing import Annotated, Any, ClassVar, Final, final

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import nn
from typing_extensions import Self

from stretto.batching import Batch
from stretto.data import NO_CLASS, SequenceSet, StepLabels, make_regimes
from stretto.errors import StrettoError
from stretto.nn import Dropout, Standardise
from stretto.tasks.classify import Classification, ClassificationConfig, match_classes
from stretto.tasks.recurrent import GRULayers
from stretto.training import AbstractTask, Count, LabelTrack, Positive, Sample, SolverConfig

SAMPLE_STEPS: Final = 400


@dataclasses.dataclass(frozen=True, kw_only=True)
class LabelStepsConfig(SolverConfig, ClassificationConfig):
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
        self.dropout = Dropout(config.dropout)
        self.classify = nn.Linear(config.hidden_size * (2 if config.bidirectional else 1), num_classes)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Scores of the classes (B, T, C); those after a sequence's end are undefined."""
        x_BTF = self.standardise(batch.features_BTF, batch.mask)
        hidden_BTH = self.gru(x_BTF, batch)
        scores_BTC: torch.Tensor = self.classify(self.dropout(hidden_BTH))
        return scores_BTC


@final
class LabelSteps(Classification[LabelStepsConfig]):
    """Sequences with one label per step, such as what a person does at each moment, measured in accuracy."""

    name = "label-steps"
    Config = LabelStepsConfig
    Model = LabelStepsModel
    label_hint: ClassVar[str] = (
        "Give one label per step as `y`, or use `stretto train classify` for one label per sequence."
    )
    target_type = StepLabels

    def __init__(self, config: LabelStepsConfig, data: SequenceSet) -> None:
        if isinstance(data.targets, StepLabels):
            self._class_of = data.targets.without_class(config.unlabelled)[1]
        super().__init__(config, data)
        assert isinstance(data.targets, StepLabels)
        self.class_names = data.targets.without_class(config.unlabelled)[0]
        if not self.num_elements(data.part("train")):
            raise StrettoError(
                f"{data.name}: no step of the training sequences has a label but {config.unlabelled}",
                fix="Label some steps, or name another label with --unlabelled.",
            )
        skipped = data.num_steps - self.num_elements(data)
        if skipped:
            note = (
                f"{skipped:,} of {data.num_steps:,} steps have the label {config.unlabelled} and count as unlabelled; "
                "--unlabelled None takes them too"
            )
            self.data = dataclasses.replace(data, notes=(*data.notes, note))

    @classmethod
    def embedded_data(cls) -> SequenceSet:
        """Signals that switch between regimes."""
        return make_regimes()

    def _count_classes(self, part: SequenceSet) -> npt.NDArray[np.int64]:
        assert isinstance(part.targets, StepLabels)
        counts_C: npt.NDArray[np.int64] = part.targets.counts()[self._class_of != NO_CLASS]
        return counts_C

    def num_elements(self, part: SequenceSet) -> int:
        """Labelled steps."""
        assert isinstance(part.targets, StepLabels)
        return int(self._count_classes(part).sum())

    def _classes(self, batch: Batch) -> torch.Tensor:
        """Classes (B, T); `NO_CLASS` where a step has no label, and after a sequence's end."""
        class_of = torch.from_numpy(self._class_of).to(batch.targets.device)
        return class_of[batch.targets].masked_fill(~batch.mask, NO_CLASS)

    def _select_labelled(self, output: torch.Tensor, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        classes_BT = self._classes(batch)
        labelled_BT = classes_BT != NO_CLASS
        return output[labelled_BT], classes_BT[labelled_BT]

    def samples(self, output: torch.Tensor, batch: Batch) -> list[Sample]:
        """Labels along each sequence, true and predicted."""
        best_BT, truth_BT = output.argmax(dim=2).cpu(), self._classes(batch).cpu()
        return [
            self._sample(truth_T[:length], best_T[:length])
            for truth_T, best_T, length in zip(truth_BT, best_BT, batch.lengths.tolist(), strict=True)
        ]

    def with_data(self, data: SequenceSet, *, targets: bool = True) -> Self:
        """Labels by their names, or by their numbers where the data have no names."""
        task = AbstractTask.with_data(self, data, targets=targets)
        labels, skipped = task.data.targets, self.config.unlabelled
        if isinstance(labels, StepLabels):
            if skipped is not None and skipped < len(labels.names):
                # The label for unlabelled steps is not a class, whatever it is called.
                known = (*self.class_names[:skipped], labels.names[skipped], *self.class_names[skipped:])
                task._class_of = match_classes(labels, known=known, source=data.name)
                task._class_of[task._class_of == skipped] = NO_CLASS
                task._class_of[task._class_of > skipped] -= 1
            else:
                task._class_of = match_classes(labels, known=self.class_names, source=data.name)
        elif targets:
            raise StrettoError(f"{data.name} has no labels of steps", fix=self.label_hint)
        return task

    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """The most likely class of each step."""
        rows = zip(model(batch).argmax(dim=2).tolist(), batch.lengths.tolist(), strict=True)
        return [{"labels": [self.class_names[number] for number in best_T[:length]]} for best_T, length in rows]

    def _sample(self, truth_T: torch.Tensor, best_T: torch.Tensor) -> Sample:
        at = np.unique(np.linspace(0, len(truth_T) - 1, min(len(truth_T), SAMPLE_STEPS)).round().astype(np.int64))
        target, output = _run_lengths(truth_T[at]), _run_lengths(best_T[at])
        right = float((truth_T == best_T).sum()) / max(1, int((truth_T != NO_CLASS).sum()))
        track = LabelTrack(names=list(self.class_names), target=target, output=output, right=right)
        return Sample(target=self._describe(target), output=self._describe(output), track=track)

    def _describe(self, runs: list[list[int]]) -> str:
        return ", then ".join(self.class_names[number] for number, _ in runs if number != NO_CLASS)


def _run_lengths(labels: torch.Tensor) -> list[list[int]]:
    return [[number, len(list(run))] for number, run in groupby(labels.tolist())]
