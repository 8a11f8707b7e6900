"""One way through time, in training: what it costs, what it leaves over, and how the net does by it and without it.

Shape legend: B sequences, T steps, P labelled steps of all sequences, H hidden units, C classes.
"""

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Final, Literal, final

import torch
from torch import nn
from torch.nn import functional

from experiments.multigrid_pieces import UNLABELLED, Course, PieceBatch, Recordings
from experiments.multigrid_settings import MultigridSettings
from stretto.cells import GRU, Cell, ImplicitGRU
from stretto.errors import StrettoError
from stretto.nn import RNN
from stretto.solvers import MOST_ROWS, AbstractSolver, Multigrid, Shooting, Solution, TrajectoryCache

SERIAL: Final = "serial"
MULTIGRID: Final = "multigrid"
EXACT: Final = "shooting, exact"
CARRIED: Final = "shooting, carried"
WAYS: Final[Mapping[str, str]] = {
    SERIAL: "step after step, by the compiled kernel",
    MULTIGRID: "as published: 3 levels, factor 4, 2 cycles forwards and 1 backwards; stretto.Multigrid()",
    EXACT: "chunks of time until they agree within 1e-6, or step after step where that does not pay; "
    "stretto.Shooting(tolerance=1e-6)",
    CARRIED: "one sweep, each chunk from where its neighbour ended when the sequence was last seen; "
    "stretto.Shooting(max_sweeps=1, cache=stretto.TrajectoryCache())",
}
CELLS: Final[Mapping[str, type[Cell]]] = {"gru": GRU, "implicit": ImplicitGRU}
TOLERANCE: Final = 1e-6
CLIP_NORM: Final = 1.0

AnySolver = AbstractSolver | Literal["serial"]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Lesson:
    """One epoch.

    Attributes:
        seconds: Of the updates alone.
        loss: Of the updates, on average, as the solver found it.
        residual: What was left where stretches of time meet, a batch's largest, on average over batches; 0 is exact.
        backward_residual: The same for gradients; None where there is none.
        iterations: Passes over a sequence, on average.
        work: Steps that were walked forwards, over those that there are, on average.
        fell_back: Batches that were walked step after step in the end.
        batches: How many there were.
        reason: What the solver said of the last batch.
        parallel: Share of the test labels that are found by the solver.
        serial: The same, step after step.
        differing: Share of the test labels for which the two find something else.
        test_residual: What was left in testing by the solver, on average over batches.
    """

    seconds: float
    loss: float
    residual: float
    backward_residual: float | None
    iterations: float
    work: float
    fell_back: int
    batches: int
    reason: str
    parallel: float
    serial: float
    differing: float
    test_residual: float


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Update:
    """One update: its loss, and how its batch was walked, by the worst of its layers."""

    loss: float
    residual: float
    backward_residual: float | None
    iterations: int
    work: float
    fell_back: bool
    reason: str


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Tested:
    parallel: float
    serial: float
    differing: float
    residual: float


def chunks_for(course: Course, settings: MultigridSettings) -> int:
    """Chunks of the longest sequence for carried boundaries."""
    return max(2, MOST_ROWS // course.batch_size) if settings.chunks == "auto" else settings.chunks


@final
class Contestant:
    """A net that learns one course by one solver; all have the same weights at first and see the same batches.

    Args:
        way: One of `WAYS`.
        course: What it learns.
        recordings: Where that is from.
        settings: Of the experiment.
    """

    def __init__(self, way: str, course: Course, recordings: Recordings, settings: MultigridSettings) -> None:
        self.way, self._course, self._settings = way, course, settings
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            cell = CELLS[settings.cell](recordings.num_features, settings.hidden_size)
            self._rnn = RNN(cell, settings.num_layers)
            self._head = nn.Linear(settings.hidden_size, recordings.num_classes)
        self._weights = [*self._rnn.parameters(), *self._head.parameters()]
        self._optimiser = torch.optim.Adam(self._weights, lr=settings.learning_rate)
        self._training = self._solver()
        self._epochs = 0

    def warm_up(self) -> float:
        """Build all kernels on the first batch, and leave no trace; the loss there step after step."""
        batch = self._batches()[0]
        with self._walking(self._solver()):
            self._loss(batch).backward()  # type: ignore[no-untyped-call]
        self._optimiser.zero_grad()
        with torch.no_grad():
            return float(self._loss(batch))

    def learn(self) -> Lesson:
        """One epoch, and then all test sequences both ways."""
        # Laid out before the clock runs: that is the same for all.
        batches = self._batches()
        begun = time.perf_counter()
        with self._walking(self._training):
            updates = [self._update(batch) for batch in batches]
        seconds = time.perf_counter() - begun
        self._epochs += 1
        tested = self._test()
        back = [update.backward_residual for update in updates if update.backward_residual is not None]
        return Lesson(
            seconds=seconds,
            loss=statistics.fmean(update.loss for update in updates),
            residual=statistics.fmean(update.residual for update in updates),
            backward_residual=statistics.fmean(back) if back else None,
            iterations=statistics.fmean(update.iterations for update in updates),
            work=statistics.fmean(update.work for update in updates),
            fell_back=sum(update.fell_back for update in updates),
            batches=len(updates),
            reason=updates[-1].reason,
            parallel=tested.parallel,
            serial=tested.serial,
            differing=tested.differing,
            test_residual=tested.residual,
        )

    def _solver(self) -> AnySolver:
        if self.way == MULTIGRID:
            return Multigrid()
        if self.way == EXACT:
            return Shooting(tolerance=TOLERANCE)
        if self.way == CARRIED:
            course = self._course
            return Shooting(
                num_chunks=chunks_for(course, self._settings),
                max_sweeps=1,
                cache=TrajectoryCache(),
                # Sequences that come with others each time are found again if all are cut alike.
                edges=(course.longest,) if course.batch_size > 1 else (),
            )
        return "serial"

    def _batches(self) -> list[PieceBatch]:
        return self._course.epoch(self._epochs, seed=self._settings.seed)

    @contextlib.contextmanager
    def _walking(self, solver: AnySolver) -> Iterator[None]:
        """Within it, the net walks through time like that; else step after step."""
        self._rnn.solver = solver
        try:
            yield
        finally:
            self._rnn.solver = "serial"

    def _update(self, batch: PieceBatch) -> _Update:
        self._optimiser.zero_grad()
        loss = self._loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._weights, CLIP_NORM)
        self._optimiser.step()
        found = self._solutions()
        worst = max(found, key=lambda solution: solution.residual)
        back = [solution.backward_residual for solution in found if solution.backward_residual is not None]
        update = _Update(
            loss=float(loss.detach()),
            residual=worst.residual,
            backward_residual=max(back, default=None),
            iterations=max(solution.iterations for solution in found),
            work=statistics.fmean(solution.work for solution in found),
            fell_back=any(solution.fell_back for solution in found),
            reason=worst.reason,
        )
        if not all(map(math.isfinite, (update.loss, update.residual, update.backward_residual or 0.0))):
            raise StrettoError(
                f"{self.way} at length {self._course.length}: in epoch {self._epochs + 1} a loss is {update.loss} and "
                f"a residual {update.residual}",
                fix="Give a smaller --learning-rate.",
            )
        return update

    def _solutions(self) -> Sequence[Solution]:
        return self._rnn.solutions or (self._rnn.solution,)

    def _scores(self, batch: PieceBatch) -> torch.Tensor:
        """Of all classes at labelled steps (P, C)."""
        y_BTH, _ = self._rnn(batch.x_BTF, lengths=batch.lengths_B, sample_ids=batch.sample_ids)
        scores_PC: torch.Tensor = self._head(y_BTH[batch.labels_BT != UNLABELLED])
        return scores_PC

    def _loss(self, batch: PieceBatch) -> torch.Tensor:
        return functional.cross_entropy(self._scores(batch), batch.labels_BT[batch.labels_BT != UNLABELLED])

    def _test(self) -> _Tested:
        # A solver of its own, which has seen none of the test sequences.
        solver = self._solver()
        parallel = serial = differing = count = 0
        residuals = []
        for batch in self._course.tests():
            right_P = batch.labels_BT[batch.labels_BT != UNLABELLED]
            with torch.no_grad():
                parallel_P = serial_P = self._scores(batch).argmax(dim=1)
                if solver != "serial":
                    with self._walking(solver):
                        parallel_P = self._scores(batch).argmax(dim=1)
            residuals.append(max(solution.residual for solution in self._solutions()))
            serial += int((serial_P == right_P).sum())
            parallel += int((parallel_P == right_P).sum())
            differing += int((parallel_P != serial_P).sum())
            count += len(right_P)
        return _Tested(
            parallel=parallel / count,
            serial=serial / count,
            differing=differing / count,
            residual=statistics.fmean(residuals),
        )
