"""Nets that have learnt to remember: a GRU trained to label each step of long recordings.

At their initial weights nets forget within tens of steps. What is claimed of solvers has to hold for trained ones.

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

CROP: Final = 1024
CROPS: Final = 16
"""Of each batch."""
LEARNING_RATE: Final = 2e-3
CLIP_NORM: Final = 1.0
UNLABELLED: Final = 0
FULLY_TRAINED: Final = 128
"""Units up to which nets are trained as long as was asked for; an update of a larger one costs as their square."""
LOOKED: Final = 1 << 15
"""Steps that are walked to see how long a net remembers."""
PLACES: Final = 8


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
    """Long recordings with a label a step.

    Attributes:
        name: Of the data.
        train: To learn from.
        test: To measure accuracy on.
        num_classes: Labels, the one for none included.
    """

    name: str
    train: tuple[Recording, ...]
    test: tuple[Recording, ...]
    num_classes: int

    @property
    def num_features(self) -> int:
        """Of a step."""
        return int(self.train[0].x_TF.shape[1])

    def joined(self, num_steps: int) -> torch.Tensor:
        """Recordings one after another, and again, until there are so many steps (T, F)."""
        every_TF = torch.cat([recording.x_TF for recording in (*self.test, *self.train)])
        return every_TF.repeat(math.ceil(num_steps / len(every_TF)), 1)[:num_steps].contiguous()

    def alike(self, count: int) -> tuple[Recording, ...]:
        """So many training recordings of about the same length, the middle ones by length."""
        by_length = sorted(self.train, key=len)
        first = max(0, (len(by_length) - count) // 2)
        return tuple(by_length[first : first + count])


def open_recordings(path: Path) -> Recordings:
    """Read recordings with one label a step, features on the scale of the training recordings.

    Raises:
        StrettoError: If the data cannot be read, or have no labels of steps.
    """
    data = open_sequences(path)
    if not isinstance(data.targets, StepLabels):
        raise StrettoError(
            f"{data.name} has no labels of steps", fix="Give recordings with one label a step as `y`, 0 for none."
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
        """Cross-entropy of steps that have a label."""
        scores_PC = self.head(y_BTH).flatten(0, 1)
        return functional.cross_entropy(scores_PC, labels_BT.flatten(), ignore_index=UNLABELLED)

    def optimiser(self) -> torch.optim.Optimizer:
        """Adam for all weights."""
        return torch.optim.Adam(self.parameters(), lr=LEARNING_RATE)

    def update(self, loss: torch.Tensor, optimiser: torch.optim.Optimizer) -> None:
        """One update by the gradient of a loss."""
        optimiser.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self.parameters(), CLIP_NORM)
        optimiser.step()


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainedNet:
    """A GRU that was trained.

    Attributes:
        cell: The GRU.
        updates: That it was trained for.
        loss: Of the last updates, on average.
        memory: Steps after which two walks from different states agree within 1e-6, the longest found; infinite if they
            did not within 32,768.
    """

    cell: GRU
    updates: int
    loss: float
    memory: float

    @property
    def told(self) -> str:
        """Which net that is, in words."""
        memory = f"about {self.memory:,.0f}" if math.isfinite(self.memory) else f"more than {LOOKED:,}"
        return f"H {self.cell.hidden_size}, {self.updates} updates, remembers {memory} steps"


@final
class Nets:
    """Nets trained on recordings, each size once.

    Args:
        recordings: What on.
        updates: How long; nets of more than 128 units are trained as long as that would take.
        tell: Called with a line before a net is trained.
    """

    def __init__(self, recordings: Recordings, *, updates: int, tell: Callable[[str], None]) -> None:
        self.recordings = recordings
        self._updates, self._tell = updates, tell
        self._made: dict[int, TrainedNet] = {}

    def of(self, hidden_size: int) -> TrainedNet:
        """The net of that size; it must not be changed."""
        if hidden_size not in self._made:
            share = min(1.0, (FULLY_TRAINED / hidden_size) ** 2)
            updates = max(1, round(share * self._updates))
            self._tell(f"training a net of {hidden_size} units for {updates} updates")
            self._made[hidden_size] = train_net(self.recordings, hidden_size, updates=updates)
        return self._made[hidden_size]


def train_net(recordings: Recordings, hidden_size: int, *, updates: int, seed: int = 0) -> TrainedNet:
    """Train on crops of recordings until the net remembers."""
    net = Labeller(recordings.num_features, hidden_size, recordings.num_classes, seed=seed)
    rnn, optimiser = RNN(net.cell), net.optimiser()
    drawn = torch.Generator().manual_seed(seed)
    losses = []
    for _ in range(updates):
        x_BTF, labels_BT = _crops(recordings.train, drawn)
        loss = net.loss(rnn(x_BTF)[0], labels_BT)
        net.update(loss, optimiser)
        losses.append(float(loss.detach()))
    memory = memory_length(net.cell, recordings.joined(LOOKED * PLACES), tolerance=1e-6, places=PLACES)
    last = losses[-max(1, updates // 10) :]
    return TrainedNet(cell=net.cell, updates=updates, loss=sum(last) / len(last), memory=memory)


def _crops(recordings: Sequence[Recording], drawn: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    length = min(CROP, *(len(recording) for recording in recordings))
    features, labels = [], []
    for _ in range(CROPS):
        recording = recordings[int(torch.randint(len(recordings), (), generator=drawn))]
        first = int(torch.randint(len(recording) - length + 1, (), generator=drawn))
        features.append(recording.x_TF[first : first + length])
        labels.append(recording.labels_T[first : first + length])
    return torch.stack(features), torch.stack(labels)


def memory_length(cell: GRU, x_TF: torch.Tensor, *, tolerance: float, places: int, stride: int = 64) -> float:
    """After how many steps it makes no difference where a walk began.

    The input is cut into `places` stretches. Each is walked from the initial state, and from where the walk of another
    stretch ended.

    Returns:
        Steps until the last two walks agree within the tolerance, in multiples of `stride`; infinite if they do not.
    """
    rnn, length = RNN(copy.deepcopy(cell)), len(x_TF) // places
    x_BTF = x_TF[: places * length].reshape(places, length, -1)
    with torch.no_grad():
        one_BH = cell.initial_state(places)
        other_BH = rnn(x_BTF[:, -min(length, CROP) :])[1].roll(1, 0)
        for first in range(0, length, stride):
            steps_BTF = x_BTF[:, first : first + stride]
            one_BH, other_BH = rnn(steps_BTF, one_BH)[1], rnn(steps_BTF, other_BH)[1]
            if float((one_BH - other_BH).abs().max()) <= tolerance:
                return float(min(first + stride, length))
    return math.inf
