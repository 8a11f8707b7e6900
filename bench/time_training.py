"""Training to the accuracy of step after step, with boundaries carried from one visit of a recording to the next.

Shape legend: T steps, B sequences, F features, H hidden units, C classes.
"""

import dataclasses
import math
import time
from collections.abc import Iterator
from typing import Final, final

import torch

from bench.kernel_peers import torch_layer
from bench.time_cases import Plan
from bench.time_contest import NO_GOAL, SERIAL, TORCH, Goal
from bench.trained_nets import UNLABELLED, Labeller, Recording, Recordings
from bench.training_step import StepShape
from stretto.nn import RNN
from stretto.solvers import Shooting, TrajectoryCache

UNITS: Final = 64
CARRIED_CHUNKS: Final = (8, 32)
SLACK: Final = 0.005
"""How far below the accuracy of step after step counts as the same."""
TESTED_AT_ONCE: Final = 5
GOAL: Final = Goal(over_torch=60, over_serial=1.6)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Epoch:
    """One pass over all training recordings.

    Attributes:
        seconds: Of training alone.
        accuracy: On the test recordings, step after step.
        residual: The largest mismatch at a boundary that was left, of the last recording.
    """

    seconds: float
    accuracy: float
    residual: float


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingRun:
    """One way of training.

    Attributes:
        way: How.
        epochs: One after another.
        reached: Seconds until the accuracy aimed at was reached; None if it was not.
        over_torch: The time that torch's layer would take for as many epochs as step after step needed, over that;
            estimated.
        over_serial: The time of step after step over that.
        goal: What these should be; of carried boundaries, the better way counts.
    """

    way: str
    epochs: tuple[Epoch, ...]
    reached: float | None
    over_torch: float | None
    over_serial: float | None
    goal: Goal


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """All ways of training.

    Attributes:
        runs: Step after step first.
        aim: The accuracy aimed at: that of step after step after its last epoch, less half a point.
        recordings: That were trained on.
        num_steps: Of all of them.
        hidden_size: H.
        torch_epoch: Seconds of an epoch of torch's layer: of one recording, by steps; estimated.
        torch_steps: Steps of that recording.
    """

    runs: tuple[TrainingRun, ...]
    aim: float
    recordings: int
    num_steps: int
    hidden_size: int
    torch_epoch: float
    torch_steps: int

    @property
    def best(self) -> TrainingRun:
        """The carried way that got there first."""
        return min(self.runs[1:], key=lambda run: math.inf if run.reached is None else run.reached)

    @property
    def judged(self) -> list[bool]:
        """Whether each goal is met, by the best."""
        best = self.best
        pairs = ((best.over_torch, best.goal.over_torch), (best.over_serial, best.goal.over_serial))
        return [found is not None and found >= goal for found, goal in pairs if goal is not None]


@final
class _Pupil:
    """A net in training.

    Args:
        way: Its name.
        chunks: Chunks with carried boundaries; None is step after step.
        recordings: What it learns.
        hidden_size: H.
    """

    def __init__(self, way: str, chunks: int | None, *, recordings: Recordings, hidden_size: int) -> None:
        self.way, self.recordings = way, recordings
        self.net = Labeller(recordings.num_features, hidden_size, recordings.num_classes)
        solver = None if chunks is None else Shooting(num_chunks=chunks, max_sweeps=1, cache=TrajectoryCache())
        self._rnn = RNN(self.net.cell) if solver is None else RNN(self.net.cell, solver=solver)
        self._serial = RNN(self.net.cell)
        self._optimiser = self.net.optimiser()
        self.epochs: list[Epoch] = []

    def learn(self) -> None:
        """One epoch; all pupils see recordings in the same order."""
        train = self.recordings.train
        order = torch.randperm(len(train), generator=torch.Generator().manual_seed(len(self.epochs))).tolist()
        begun = time.perf_counter()
        for number in order:
            self._update(train[number], number)
        seconds = time.perf_counter() - begun
        self.epochs.append(
            Epoch(seconds=seconds, accuracy=self._accuracy(), residual=float(self._rnn.solution.residual))
        )

    def _update(self, recording: Recording, number: int) -> None:
        y_BTH, _ = self._rnn(recording.x_TF[None], sample_ids=[number])
        self.net.update(self.net.loss(y_BTH, recording.labels_T[None]), self._optimiser)

    def warm_up(self) -> None:
        """Build the kernels."""
        with torch.enable_grad():
            self._rnn(self.recordings.train[0].x_TF[None, :2], sample_ids=[-1])[0].sum().backward()
        self.net.zero_grad()

    def _accuracy(self) -> float:
        right = count = 0
        with torch.no_grad():
            for x_BTF, labels_BT, lengths_B in _tests(self.recordings):
                best_BT = self.net.head(self._serial(x_BTF, lengths=lengths_B)[0]).argmax(dim=2)
                labelled_BT = labels_BT != UNLABELLED
                right += int((best_BT == labels_BT)[labelled_BT].sum())
                count += int(labelled_BT.sum())
        return right / max(1, count)

    def reached(self, aim: float) -> float | None:
        """Seconds until the accuracy was there; None if it is not yet."""
        seconds = 0.0
        for epoch in self.epochs:
            seconds += epoch.seconds
            if epoch.accuracy >= aim:
                return seconds
        return None


def train_to_accuracy(plan: Plan, recordings: Recordings, *, epochs: int) -> Training:
    """Train all ways epoch by epoch in turn.

    Who is not there yet when step after step has ended goes on, up to twice as many epochs.
    """
    hidden_size = 8 if plan.quick else UNITS
    ways: dict[str, int | None] = {SERIAL: None, **{f"carried, {count} chunks": count for count in CARRIED_CHUNKS}}
    pupils = [_Pupil(way, count, recordings=recordings, hidden_size=hidden_size) for way, count in ways.items()]
    for pupil in pupils:
        pupil.warm_up()
    for number in range(epochs):
        plan.tell(f"training: epoch {number + 1} of {epochs}")
        # Who goes first may find the machine in another state.
        for pupil in pupils[:: 1 if number % 2 else -1]:
            pupil.learn()
    serial = pupils[0]
    aim = serial.epochs[-1].accuracy - SLACK
    for number in range(epochs):
        late = [pupil for pupil in pupils[1:] if pupil.reached(aim) is None]
        if late:
            plan.tell(f"training: {len(late)} go on, epoch {epochs + number + 1}")
        for pupil in late:
            pupil.learn()
    plan.tell(f"training: a step of {TORCH}")
    recording = recordings.alike(1)[0]
    torch_epoch = _torch_seconds(recording, serial.net) / len(recording) * sum(map(len, recordings.train))
    # As many epochs as step after step took to get there.
    needed = next(number for number, epoch in enumerate(serial.epochs, 1) if epoch.accuracy >= aim)
    mine = sum(epoch.seconds for epoch in serial.epochs[:needed])
    runs = []
    for pupil in pupils:
        reached = pupil.reached(aim)
        runs.append(
            TrainingRun(
                way=pupil.way,
                epochs=tuple(pupil.epochs),
                reached=reached,
                over_torch=None if reached is None else torch_epoch * needed / reached,
                over_serial=None if reached is None else mine / reached,
                goal=NO_GOAL if pupil is serial or plan.quick else GOAL,
            )
        )
    return Training(
        runs=tuple(runs),
        aim=aim,
        recordings=len(recordings.train),
        num_steps=sum(map(len, recordings.train)),
        hidden_size=hidden_size,
        torch_epoch=torch_epoch,
        torch_steps=len(recording),
    )


def _tests(recordings: Recordings) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    for first in range(0, len(recordings.test), TESTED_AT_ONCE):
        some = recordings.test[first : first + TESTED_AT_ONCE]
        pad = torch.nn.utils.rnn.pad_sequence
        yield (
            pad([recording.x_TF for recording in some], batch_first=True),
            pad([recording.labels_T for recording in some], batch_first=True, padding_value=UNLABELLED),
            torch.tensor([len(recording) for recording in some]),
        )


def _torch_seconds(recording: Recording, net: Labeller) -> float:
    """The better of two updates on one recording by torch's layer."""
    hidden_size = net.cell.hidden_size
    shape = StepShape(num_steps=len(recording), batch=1, input_size=recording.x_TF.shape[1], hidden_size=hidden_size)
    layer = torch_layer([net.cell], "GRU", shape)
    optimiser = torch.optim.Adam([*layer.parameters(), *net.head.parameters()])
    taken = []
    for _ in range(2):
        begun = time.perf_counter()
        y_TBH, _ = layer(recording.x_TF[:, None])
        net.update(net.loss(y_TBH.transpose(0, 1), recording.labels_T[None]), optimiser)
        taken.append(time.perf_counter() - begun)
    return min(taken)
