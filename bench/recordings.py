"""Long recordings with one label per step, for `python -m bench time` and `python -m experiments multigrid`.

Shape legend: T steps, F features.
"""

import dataclasses
import math
from collections.abc import Iterator
from typing import Final, final

import torch

from stretto.data import SequenceSet, StepLabels
from stretto.errors import StrettoError
from stretto.nn import Standardise

UNLABELLED: Final = 0


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Standardised features, and a label for each step; 0 is no label."""

    x_TF: torch.Tensor
    labels_T: torch.Tensor

    def __len__(self) -> int:
        return len(self.x_TF)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recordings:
    """Whole recordings; `num_classes` includes the label for none."""

    name: str
    train: tuple[Recording, ...]
    test: tuple[Recording, ...]
    num_classes: int

    @property
    def num_features(self) -> int:
        """F."""
        return int(self.train[0].x_TF.shape[1])

    def concatenate(self, num_steps: int) -> torch.Tensor:
        """Concatenate the recordings, repeatedly if need be, up to this many steps (T, F)."""
        every_TF = torch.cat([recording.x_TF for recording in (*self.test, *self.train)])
        return every_TF.repeat(math.ceil(num_steps / len(every_TF)), 1)[:num_steps].contiguous()


def standardise_recordings(
    train: SequenceSet, test: SequenceSet, *, name: str, max_steps: int | None = None
) -> Recordings:
    """Recordings of at most `max_steps` steps, their features standardised by the training recordings.

    Raises:
        StrettoError: If they have no labels of steps.
    """
    if not isinstance(train.targets, StepLabels):
        raise StrettoError(
            f"{name} has no label per step", fix="Give recordings with one label per step as `y`, 0 for none."
        )
    scale = Standardise.of(train)

    def standardise(data: SequenceSet) -> Iterator[Recording]:
        for sample in (data[index] for index in range(len(data))):
            x_1TF = sample.features_TF[None, :max_steps]
            real_1T = torch.ones(x_1TF.shape[:2], dtype=torch.bool)
            labels_T = torch.as_tensor(sample.target)[:max_steps]
            yield Recording(x_TF=scale(x_1TF, real_1T)[0], labels_T=labels_T)

    return Recordings(
        name=name,
        train=tuple(standardise(train)),
        test=tuple(standardise(test)),
        num_classes=len(train.targets.names),
    )
