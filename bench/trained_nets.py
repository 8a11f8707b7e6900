"""Trained nets: a GRU that labels each step of long recordings.

At their initial weights nets forget within tens of steps. Claims about solvers have to hold for trained ones.

Shape legend: N recordings, T steps, B sequences, F features, H hidden units, C classes.
"""

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Final, final

import torch
from torch import nn
from torch.nn import functional

from bench.recordings import UNLABELLED, Recording, Recordings
from stretto.cells import GRU
from stretto.nn import RNN

CROP_STEPS: Final = 1024
CROPS_PER_BATCH: Final = 16
LEARNING_RATE: Final = 2e-3
CLIP_NORM: Final = 1.0
FULLY_TRAINED: Final = 128
"""Larger nets get fewer updates, since the cost of one grows as the square of the units."""
MEMORY_STEPS: Final = 1 << 15
"""Steps of the run that determines how long a net remembers."""
MEMORY_ROWS: Final = 8
MEMORY_TOLERANCE: Final = 1e-6


@final
class Labeller(nn.Module):
    """A GRU and a linear layer at each step; torch's generator keeps its state."""

    def __init__(self, num_features: int, hidden_size: int, num_classes: int) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
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
    """A trained GRU."""

    cell: GRU
    updates: int
    memory: float  # steps after which runs from different states agree within 1e-6; infinite if not within 32,768

    def __str__(self) -> str:
        memory = f"about {self.memory:,.0f}" if math.isfinite(self.memory) else f"more than {MEMORY_STEPS:,}"
        return f"H {self.cell.hidden_size}, {self.updates} updates, remembers {memory} steps"


@final
class Nets:
    """Nets trained on recordings, each size once; those of up to 128 units get all updates."""

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


def train_net(recordings: Recordings, hidden_size: int, *, updates: int) -> TrainedNet:
    """Train on random crops of the recordings."""
    net = Labeller(recordings.num_features, hidden_size, recordings.num_classes)
    rnn, optimizer = RNN(net.cell), net.optimizer()
    generator = torch.Generator().manual_seed(0)
    for _ in range(updates):
        x_BTF, labels_BT = _draw_crops(recordings.train, generator)
        net.update(net.loss(rnn(x_BTF)[0], labels_BT), optimizer)
    memory = measure_memory(net.cell, recordings.concatenate(MEMORY_STEPS * MEMORY_ROWS))
    return TrainedNet(cell=net.cell, updates=updates, memory=memory)


def _draw_crops(recordings: Sequence[Recording], generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    length = min(CROP_STEPS, *(len(recording) for recording in recordings))
    features, labels = [], []
    for _ in range(CROPS_PER_BATCH):
        recording = recordings[int(torch.randint(len(recordings), (), generator=generator))]
        first = int(torch.randint(len(recording) - length + 1, (), generator=generator))
        features.append(recording.x_TF[first : first + length])
        labels.append(recording.labels_T[first : first + length])
    return torch.stack(features), torch.stack(labels)


def measure_memory(cell: GRU, x_TF: torch.Tensor, *, stride: int = 64) -> float:
    """After how many steps the initial state no longer matters.

    The input is cut into 8 rows. Each runs from the initial state, and from the final state of another row.

    Returns:
        Steps until both runs of all rows agree within 1e-6, in multiples of `stride`; infinite if they do not.
    """
    rnn, length = RNN(copy.deepcopy(cell)), len(x_TF) // MEMORY_ROWS
    x_BTF = x_TF[: MEMORY_ROWS * length].reshape(MEMORY_ROWS, length, -1)
    with torch.no_grad():
        one_BH = cell.initial_state(MEMORY_ROWS)
        other_BH = rnn(x_BTF[:, -min(length, CROP_STEPS) :])[1].roll(1, 0)
        for first in range(0, length, stride):
            steps_BTF = x_BTF[:, first : first + stride]
            one_BH, other_BH = rnn(steps_BTF, one_BH)[1], rnn(steps_BTF, other_BH)[1]
            if float((one_BH - other_BH).abs().max()) <= MEMORY_TOLERANCE:
                return float(min(first + stride, length))
    return math.inf
