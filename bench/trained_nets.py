"""Trained nets: a GRU that labels each step of long recordings.

At their initial weights nets forget within tens of steps. Claims about solvers have to hold for trained ones.

Shape legend: N recordings, T steps, B sequences, F features, H hidden units, C classes.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Final, final

import torch
from torch import nn
from torch.nn import functional

from stretto.cells import GRU
from stretto.data import SequenceSet, StepLabels, open_sequences
from stretto.errors import StrettoError
from stretto.nn import RNN, Standardise

CROP_STEPS: Final = 1024
CROPS_PER_BATCH: Final = 16
LEARNING_RATE: Final = 2e-3
CLIP_NORM: Final = 1.0
UNLABELLED: Final = 0
FULLY_TRAINED: Final = 128
"""Larger nets get fewer updates, since the cost of one grows as the square of the units."""
MEMORY_STEPS: Final = 1 << 15
"""Steps that are run to see how long a net remembers."""
MEMORY_ROWS: Final = 8


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """Standardised features of one recording and a label for each step; 0 is none."""

    x_TF: torch.Tensor
    labels_T: torch.Tensor

    def __len__(self) -> int:
        return len(self.x_TF)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Recordings:
    """Long recordings with one label per step; `num_classes` includes the label for none."""

    name: str
    train: tuple[Recording, ...]
    test: tuple[Recording, ...]
    num_classes: int

    @property
    def num_features(self) -> int:
        """F."""
        return int(self.train[0].x_TF.shape[1])

    def concatenate(self, num_steps: int) -> torch.Tensor:
        """Concatenate the recordings, repeatedly if need be, up to so many steps (T, F)."""
        every_TF = torch.cat([recording.x_TF for recording in (*self.test, *self.train)])
        return every_TF.repeat(math.ceil(num_steps / len(every_TF)), 1)[:num_steps].contiguous()

    def median_recording(self) -> Recording:
        """The training recording of median length."""
        return sorted(self.train, key=len)[(len(self.train) - 1) // 2]


def open_recordings(path: Path) -> Recordings:
    """Read recordings with one label per step; features are standardised over the training recordings.

    Raises:
        StrettoError: If the data cannot be read, or have no labels of steps.
    """
    data = open_sequences(path)
    if not isinstance(data.targets, StepLabels):
        raise StrettoError(
            f"{data.name} has no label per step", fix="Give recordings with one label per step as `y`, 0 for none."
        )
    scale = Standardise.of(data.part("train"))
    return Recordings(
        name=data.name,
        train=tuple(_recordings(data.part("train"), scale)),
        test=tuple(_recordings(data.part("test"), scale)),
        num_classes=len(data.targets.names),
    )


def _recordings(data: SequenceSet, scale: Standardise) -> Iterator[Recording]:
    for sample in (data[index] for index in range(len(data))):
        x_1TF = sample.features_TF[None]
        real_1T = torch.ones(x_1TF.shape[:2], dtype=torch.bool)
        yield Recording(x_TF=scale(x_1TF, real_1T)[0], labels_T=torch.as_tensor(sample.target))


@final
class Labeller(nn.Module):
    """A GRU and a linear layer at each step.

    Args:
        num_features: F.
        hidden_size: H.
        num_classes: C.
        seed: Of the initial weights; the state of torch's generator is left as it is.
    """

    def __init__(self, num_features: int, hidden_size: int, num_classes: int, *, seed: int = 0) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.cell = GRU(num_features, hidden_size)
            self.head = nn.Linear(hidden_size, num_classes)

    def loss(self, y_BTH: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        """Cross-entropy over the steps that have a label."""
        scores_PC = self.head(y_BTH).flatten(0, 1)
        return functional.cross_entropy(scores_PC, labels_BT.flatten(), ignore_index=UNLABELLED)

    def optimizer(self) -> torch.optim.Optimizer:
        """Adam for all weights."""
        return torch.optim.Adam(self.parameters(), lr=LEARNING_RATE)

    def update(self, loss: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        """One update."""
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.parameters(), CLIP_NORM)
        optimizer.step()


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainedNet:
    """A trained GRU.

    Attributes:
        cell: The GRU.
        updates: Number of updates.
        loss: Mean over the last tenth of them.
        memory: Steps after which runs from different states agree within 1e-6; infinite if not within 32,768.
    """

    cell: GRU
    updates: int
    loss: float
    memory: float

    def __str__(self) -> str:
        memory = f"about {self.memory:,.0f}" if math.isfinite(self.memory) else f"more than {MEMORY_STEPS:,}"
        return f"H {self.cell.hidden_size}, {self.updates} updates, remembers {memory} steps"


@final
class Nets:
    """Nets trained on recordings, each size once.

    Args:
        recordings: The training data.
        updates: Of nets of up to 128 units; larger ones get as many as take that long.
        progress: Shows a line before a net is trained.
    """

    def __init__(self, recordings: Recordings, *, updates: int, progress: Callable[[str], None]) -> None:
        self.recordings = recordings
        self._updates, self._progress = updates, progress
        self._nets: dict[int, TrainedNet] = {}

    def of(self, hidden_size: int) -> TrainedNet:
        """The net of that size; callers must not change it."""
        if hidden_size not in self._nets:
            share = min(1.0, (FULLY_TRAINED / hidden_size) ** 2)
            updates = max(1, round(share * self._updates))
            self._progress(f"training a net of {hidden_size} units for {updates} updates")
            self._nets[hidden_size] = train_net(self.recordings, hidden_size, updates=updates)
        return self._nets[hidden_size]


def train_net(recordings: Recordings, hidden_size: int, *, updates: int, seed: int = 0) -> TrainedNet:
    """Train on random crops of the recordings."""
    net = Labeller(recordings.num_features, hidden_size, recordings.num_classes, seed=seed)
    rnn, optimizer = RNN(net.cell), net.optimizer()
    generator = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(updates):
        x_BTF, labels_BT = _draw_crops(recordings.train, generator)
        loss = net.loss(rnn(x_BTF)[0], labels_BT)
        net.update(loss, optimizer)
        losses.append(float(loss.detach()))
    memory = measure_memory(
        net.cell, recordings.concatenate(MEMORY_STEPS * MEMORY_ROWS), tolerance=1e-6, num_rows=MEMORY_ROWS
    )
    last = losses[-max(1, updates // 10) :]
    return TrainedNet(cell=net.cell, updates=updates, loss=sum(last) / len(last), memory=memory)


def _draw_crops(recordings: Sequence[Recording], generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    length = min(CROP_STEPS, *(len(recording) for recording in recordings))
    features, labels = [], []
    for _ in range(CROPS_PER_BATCH):
        recording = recordings[int(torch.randint(len(recordings), (), generator=generator))]
        first = int(torch.randint(len(recording) - length + 1, (), generator=generator))
        features.append(recording.x_TF[first : first + length])
        labels.append(recording.labels_T[first : first + length])
    return torch.stack(features), torch.stack(labels)


def measure_memory(cell: GRU, x_TF: torch.Tensor, *, tolerance: float, num_rows: int, stride: int = 64) -> float:
    """After how many steps the initial state no longer matters.

    The input is cut into `num_rows` rows. Each runs from the initial state, and from the final state of another row.

    Returns:
        Steps until both runs of all rows agree within the tolerance, in multiples of `stride`; infinite if they do not.
    """
    rnn, length = RNN(copy.deepcopy(cell)), len(x_TF) // num_rows
    x_BTF = x_TF[: num_rows * length].reshape(num_rows, length, -1)
    with torch.no_grad():
        one_BH = cell.initial_state(num_rows)
        other_BH = rnn(x_BTF[:, -min(length, CROP_STEPS) :])[1].roll(1, 0)
        for first in range(0, length, stride):
            steps_BTF = x_BTF[:, first : first + stride]
            one_BH, other_BH = rnn(steps_BTF, one_BH)[1], rnn(steps_BTF, other_BH)[1]
            if float((one_BH - other_BH).abs().max()) <= tolerance:
                return float(min(first + stride, length))
    return math.inf
