"""The multigrid experiment: a GRU trained by parallel-in-time solvers, at ever longer sequences.

After Moon and Cyr, "Parallel training of GRU networks with a multi-grid solver for long sequences" (ICLR 2022), who
train on windows of 128 steps of phone sensors: the same net on the same batches, serially, by multigrid at the
published settings, and by multiple shooting, exact and with warm-started boundaries. Contenders train one epoch each in
turn, so that a change of the machine's load affects all of them.

Shape legend: B sequences, T steps, P labelled steps of all sequences, H hidden units, C classes.
"""

import contextlib
import dataclasses
import math
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, final

import torch
from pydantic import Field
from torch import nn
from torch.nn import functional

from bench.figure import AMBER, BLUE, GREY, TEAL, Line, Panel, draw_figure
from bench.harness import Report, Settings
from bench.recordings import UNLABELLED, Recordings
from experiments.multigrid_data import (
    WHOLE,
    WINDOW,
    CutRecordings,
    LabelledBatch,
    Length,
    cut_recordings,
    open_recordings,
)
from experiments.registry import experiment, to_dict
from stretto.cells import GRU, Cell, ImplicitGRU
from stretto.errors import StrettoError
from stretto.nn import RNN
from stretto.solvers import MAX_KERNEL_ROWS, AbstractSolver, Multigrid, Shooting, Solution, TrajectoryCache
from stretto.training import Count

SERIAL: Final = "serial"
MULTIGRID: Final = "multigrid"
EXACT: Final = "shooting, exact"
WARM: Final = "shooting, warm"
SOLVERS: Final[Mapping[str, str]] = {
    SERIAL: "one step after the other, by the compiled kernel",
    MULTIGRID: "as published: 3 levels, factor 4, 2 cycles forwards and 1 backwards; stretto.Multigrid()",
    EXACT: "chunks of time until they agree within 1e-6, or serially where that does not pay; "
    "stretto.Shooting(tolerance=1e-6)",
    WARM: "one sweep, each chunk from where its neighbour ended when the sequence was last seen; "
    "stretto.Shooting(max_sweeps=1, cache=stretto.TrajectoryCache())",
}
CELLS: Final[Mapping[str, type[Cell]]] = {"gru": GRU, "implicit": ImplicitGRU}
TOLERANCE: Final = 1e-6
CLIP_NORM: Final = 1.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultigridSettings(Settings):
    """Settings of `python -m experiments multigrid`.

    Attributes:
        data: Recordings with one label per step, 0 for none, that `stretto inspect` can read; by default embedded
            signals.
        out: The folder for the page, the figures and the JSON file.
        lengths: Steps of a sequence, and whole for recordings as they are. 128 are windows with one label each, as
            published; all others are pieces of recordings with one label per step.
        epochs: Passes over the training sequences, of every contender at every length.
        cell: A GRU, or the published net's implicit one.
        hidden_size: Units of a layer.
        num_layers: Recurrent layers.
        batch_steps: Steps of a batch, about; 12,800 are the published 100 windows. A whole recording may be more.
        learning_rate: Of Adam.
        chunks: Chunks of the longest sequence, for warm starts; auto fills the rows of a kernel.
        num_train: Maximum number of training recordings, and the same fraction of the test recordings.
        window_labels: Windows are those whose label is 1 to this.
        seed: Of weights and batches.
    """

    data: Path | None = None
    out: Path = Path("runs/reproduce-multigrid")
    lengths: tuple[Length, ...] = (128, 512, 2048, "whole")
    epochs: Count = 4
    cell: Literal["gru", "implicit"] = "gru"
    hidden_size: Count = 64
    num_layers: Count = 1
    batch_steps: Count = 12_800
    learning_rate: Annotated[float, Field(gt=0.0, le=100.0)] = 5e-3
    chunks: Annotated[int, Field(ge=2, lt=2**31)] | Literal["auto"] = "auto"
    num_train: Count | None = None
    window_labels: Count = 6
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    def tiny(self) -> "MultigridSettings":
        """The same for a smoke test."""
        sizes: dict[str, Any] = {"hidden_size": 8, "batch_steps": 1024, "learning_rate": 0.03, "num_train": 6}
        return dataclasses.replace(self, lengths=(128, 256, WHOLE), epochs=3, **sizes)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EpochResult:
    """One epoch of one contender. Residuals are those of the worst boundary; 0 is exact."""

    seconds: float  # of the updates alone
    loss: float  # mean over updates, as the solver computed it
    residual: float  # mean over batches
    backward_residual: float | None  # the same for gradients; None where there is none
    iterations: float  # passes over a sequence, mean over batches
    work: float  # forward steps computed over those there are, mean over batches
    fell_back: int  # batches that were finally solved serially
    batches: int
    reason: str  # that the solver gave for the last batch
    parallel: float  # test accuracy by the solver
    serial: float  # test accuracy computed serially
    differing: float  # share of the test labels for which the two disagree
    test_residual: float  # mean over test batches


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MultigridRow:
    """One contender at one length."""

    length: Length
    solver: str
    initial_loss: float  # computed serially, on the first batch before the first update
    median_seconds: float  # of an epoch's updates
    min_seconds: float
    speed_up: float  # time of a serial epoch over this one's: median of the ratios of interleaved epochs
    loss_gap: float  # the largest relative difference of an epoch's loss from the serial one's
    epochs: tuple[EpochResult, ...]

    @property
    def last(self) -> EpochResult:
        """The last epoch."""
        return self.epochs[-1]

    @property
    def fell_back(self) -> float:
        """Share of all batches that were finally solved serially."""
        return sum(epoch.fell_back for epoch in self.epochs) / sum(epoch.batches for epoch in self.epochs)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LengthSetting:
    """The sequences of one length."""

    length: Length
    num_train: int
    num_test: int
    num_dropped: int  # sequences that lack the labels they need
    train_steps: int  # of all training sequences
    median_steps: int  # of a training sequence
    batch_size: int
    chunks: int  # of the longest sequence, for warm starts


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MultigridResult:
    """The experiment."""

    data: str
    recordings: tuple[int, int]  # for training, for testing
    lengths: tuple[LengthSetting, ...]  # from the shortest
    rows: tuple[MultigridRow, ...]  # by length and solver, in this order, the serial one first
    threads: int
    settings: dict[str, Any]

    def at(self, length: Length) -> dict[str, MultigridRow]:
        """The rows of one length, by solver."""
        return {row.solver: row for row in self.rows if row.length == length}


def reproduce_multigrid(
    settings: MultigridSettings, *, progress: Callable[[str], None] = lambda _: None
) -> MultigridResult:
    """Run the experiment.

    Raises:
        StrettoError: If the data do not fit, or training diverges.
    """
    if not settings.lengths:
        raise StrettoError("there are no lengths", fix="Give some, such as --lengths 128 whole.")
    sizes = settings.tiny() if settings.quick else settings
    recordings = open_recordings(sizes.data, num_train=sizes.num_train, tiny=sizes.quick)
    lengths = sorted(set(sizes.lengths), key=lambda length: math.inf if length == WHOLE else length)
    # Cut all lengths first: one that leaves nothing to train on is refused before hours are spent on another.
    cuts = [
        cut_recordings(
            recordings,
            length,
            max_label=sizes.window_labels,
            batch_steps=sizes.batch_steps,
            # In the embedded signals, regimes differ by a pulse that comes before the labels of the regime begin.
            label_at_end=sizes.data is None,
        )
        for length in lengths
    ]
    rows: list[MultigridRow] = []
    for cut in cuts:
        progress(f"length {cut.length}: {len(cut.train):,} sequences, batches of {cut.batch_size}")
        contenders = [Contender(solver, cut, recordings, sizes) for solver in SOLVERS]
        initial_losses = [contender.warm_up() for contender in contenders]
        epochs: list[list[EpochResult]] = [[] for _ in contenders]
        for number in range(sizes.epochs):
            for contender, results in zip(contenders, epochs, strict=True):
                result = contender.train_epoch()
                results.append(result)
                progress(
                    f"{cut.length:>6}  {contender.name:<18} epoch {number + 1:>2}  loss {result.loss:.4f}  "
                    f"{result.seconds:6.2f} s  residual {result.residual:8.1e}  "
                    f"accuracy {result.parallel:.1%} by it, {result.serial:.1%} serially"
                )
        for contender, loss, results in zip(contenders, initial_losses, epochs, strict=True):
            rows.append(_make_row(contender, loss, results, serial=epochs[0]))
    return MultigridResult(
        data=recordings.name,
        recordings=(len(recordings.train), len(recordings.test)),
        lengths=tuple(_describe(cut, sizes) for cut in cuts),
        rows=tuple(rows),
        threads=torch.get_num_threads(),
        settings=to_dict(sizes),
    )


def _make_row(
    contender: "Contender", initial_loss: float, epochs: Sequence[EpochResult], *, serial: Sequence[EpochResult]
) -> MultigridRow:
    seconds = [epoch.seconds for epoch in epochs]
    pairs = list(zip(serial, epochs, strict=True))
    return MultigridRow(
        length=contender.cut.length,
        solver=contender.name,
        initial_loss=initial_loss,
        median_seconds=statistics.median(seconds),
        min_seconds=min(seconds),
        speed_up=statistics.median(base.seconds / own.seconds for base, own in pairs),
        loss_gap=max(abs(base.loss - own.loss) / base.loss for base, own in pairs),
        epochs=tuple(epochs),
    )


def _describe(cut: CutRecordings, settings: MultigridSettings) -> LengthSetting:
    steps = [len(sequence) for sequence in cut.train]
    return LengthSetting(
        length=cut.length,
        num_train=len(cut.train),
        num_test=len(cut.test),
        num_dropped=cut.num_dropped,
        train_steps=sum(steps),
        median_steps=round(statistics.median(steps)),
        batch_size=cut.batch_size,
        chunks=_num_chunks(cut, settings),
    )


def _num_chunks(cut: CutRecordings, settings: MultigridSettings) -> int:
    return max(2, MAX_KERNEL_ROWS // cut.batch_size) if settings.chunks == "auto" else settings.chunks


@final
class Contender:
    """A net trained by one of `SOLVERS`; all begin with the same weights and see the same batches."""

    def __init__(self, name: str, cut: CutRecordings, recordings: Recordings, settings: MultigridSettings) -> None:
        self.name, self.cut, self._settings = name, cut, settings
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(settings.seed)
            cell = CELLS[settings.cell](recordings.num_features, settings.hidden_size)
            self._rnn = RNN(cell, settings.num_layers)
            self._head = nn.Linear(settings.hidden_size, recordings.num_classes)
        self._weights = [*self._rnn.parameters(), *self._head.parameters()]
        self._optimizer = torch.optim.Adam(self._weights, lr=settings.learning_rate)
        self.solver = self._make_solver()
        self._epoch = 0

    def warm_up(self) -> float:
        """Compile all kernels on the first batch, without a trace; returns the loss there, computed serially."""
        batch = self.cut.train_batches(0, seed=self._settings.seed)[0]
        with self._solve_by(self._make_solver()):
            self._loss(batch).backward()  # type: ignore[no-untyped-call]
        self._optimizer.zero_grad()
        with torch.no_grad():
            return float(self._loss(batch))

    def train_epoch(self) -> EpochResult:
        """Train one epoch, then test both by the solver and serially."""
        # Batches are laid out before the clock starts: that is the same for all.
        batches = self.cut.train_batches(self._epoch, seed=self._settings.seed)
        losses, solutions = [], []
        begin = time.perf_counter()
        with self._solve_by(self.solver):
            for batch in batches:
                losses.append(self._update(batch))
                solutions.append(self._solutions())
        seconds = time.perf_counter() - begin
        self._epoch += 1
        # Of several layers the worst counts.
        worst = [max(each, key=lambda solution: solution.residual) for each in solutions]
        backward = [
            max(residuals)
            for each in solutions
            if (residuals := [s.backward_residual for s in each if s.backward_residual is not None])
        ]
        parallel, serial, differing, test_residual = self._test()
        return EpochResult(
            seconds=seconds,
            loss=statistics.fmean(losses),
            residual=statistics.fmean(solution.residual for solution in worst),
            backward_residual=statistics.fmean(backward) if backward else None,
            iterations=statistics.fmean(max(s.iterations for s in each) for each in solutions),
            work=statistics.fmean(statistics.fmean(s.work for s in each) for each in solutions),
            fell_back=sum(any(s.fell_back for s in each) for each in solutions),
            batches=len(batches),
            reason=worst[-1].reason,
            parallel=parallel,
            serial=serial,
            differing=differing,
            test_residual=test_residual,
        )

    def _make_solver(self) -> AbstractSolver | Literal["serial"]:
        if self.name == MULTIGRID:
            return Multigrid()
        if self.name == EXACT:
            return Shooting(tolerance=TOLERANCE)
        if self.name == WARM:
            return Shooting(
                num_chunks=_num_chunks(self.cut, self._settings),
                max_sweeps=1,
                cache=TrajectoryCache(),
                # Sequences that share a batch with others each time are found again only if all are cut alike.
                edges=(self.cut.longest,) if self.cut.batch_size > 1 else (),
            )
        return "serial"

    @contextlib.contextmanager
    def _solve_by(self, solver: AbstractSolver | Literal["serial"]) -> Iterator[None]:
        self._rnn.solver = solver
        try:
            yield
        finally:
            self._rnn.solver = "serial"

    def _update(self, batch: LabelledBatch) -> float:
        self._optimizer.zero_grad()
        loss = self._loss(batch)
        loss.backward()  # type: ignore[no-untyped-call]
        nn.utils.clip_grad_norm_(self._weights, CLIP_NORM)
        self._optimizer.step()
        value = float(loss.detach())
        residuals = [residual for s in self._solutions() for residual in (s.residual, s.backward_residual or 0.0)]
        if not all(map(math.isfinite, (value, *residuals))):
            raise StrettoError(
                f"{self.name} at length {self.cut.length}: in epoch {self._epoch + 1} a loss is {value} and a residual "
                f"{max(residuals)}",
                fix="Give a smaller --learning-rate.",
            )
        return value

    def _solutions(self) -> Sequence[Solution]:
        return self._rnn.solutions or (self._rnn.solution,)

    def _scores(self, batch: LabelledBatch) -> torch.Tensor:
        """Of all classes at labelled steps (P, C)."""
        y_BTH, _ = self._rnn(batch.x_BTF, lengths=batch.lengths_B, sample_ids=batch.sample_ids)
        scores_PC: torch.Tensor = self._head(y_BTH[batch.labels_BT != UNLABELLED])
        return scores_PC

    def _loss(self, batch: LabelledBatch) -> torch.Tensor:
        return functional.cross_entropy(self._scores(batch), batch.labels_BT[batch.labels_BT != UNLABELLED])

    @torch.no_grad()
    def _test(self) -> tuple[float, float, float, float]:
        """Accuracy by a solver that has seen no test sequence, serially, share of differences, mean residual."""
        solver = self._make_solver()
        by_solver, serially, labels, residuals = [], [], [], []
        for batch in self.cut.test_batches():
            labels.append(batch.labels_BT[batch.labels_BT != UNLABELLED])
            serially.append(self._scores(batch).argmax(dim=1))
            with self._solve_by(solver):
                by_solver.append(self._scores(batch).argmax(dim=1))
            residuals.append(max(solution.residual for solution in self._solutions()))
        parallel_P, serial_P, labels_P = torch.cat(by_solver), torch.cat(serially), torch.cat(labels)
        shares = (parallel_P == labels_P, serial_P == labels_P, parallel_P != serial_P)
        parallel, serial, differing = (float(share_P.double().mean()) for share_P in shares)
        return parallel, serial, differing, statistics.fmean(residuals)


COLOURS: Final = {SERIAL: GREY, MULTIGRID: AMBER, EXACT: TEAL, WARM: BLUE}
PUBLISHED: Final = ((1, 53, 51), (2, 71, 67), (3, 81, 75), (4, 87, 84))
"""Accuracy in per cent after each epoch with the parallel forward pass and with the serial one."""
PUBLISHED_FACTS: Final = (
    "The log that comes with the authors' program, on UCI-HAR, which is made of the same people and recordings as "
    "hapt, filtered: windows of 128 steps, 9 channels, two layers of 100 implicit units, batches of 100, 4 processes.\n"
    "Over these epochs the residual of the forward pass grew from 53 to between 84 and 93. It is a norm over all "
    "states and cannot be compared with residuals here, which are those of the worst boundary.\n"
    "A test window took 0.85 to 0.92 ms by 4 processes and 0.66 to 0.69 ms serially, so nothing was gained at 128 "
    "steps. The paper reports up to 6.5 times its own serial code, for long sequences of video."
)


@experiment("multigrid", title="Solvers in time")
def run(settings: MultigridSettings, report: Report) -> None:
    """Solvers in time at ever longer sequences: multigrid and shooting (Moon and Cyr 2022)."""
    show(reproduce_multigrid(settings, progress=report.progress), report)


def show(result: MultigridResult, report: Report) -> None:
    """Write tables and figures into a report."""
    report.result = to_dict(result)
    sizes = result.settings
    report.table(
        title=f"{'GRU' if sizes['cell'] == 'gru' else 'implicit GRU'} on {result.data}; layers: "
        f"{sizes['num_layers']}, units: {sizes['hidden_size']}, epochs: {sizes['epochs']}",
        columns=(
            *("length", "solver", "s/epoch", "min", "x serial", "residual"),
            *("solver %", "serial %", "differ %", "back %", "loss off"),
        ),
        rows=[
            (
                _name(row.length),
                row.solver,
                row.median_seconds,
                row.min_seconds,
                row.speed_up,
                row.last.residual,
                *(100 * share for share in (row.last.parallel, row.last.serial, row.last.differing, row.fell_back)),
                row.loss_gap,
            )
            for row in result.rows
        ],
        caption="s/epoch: median of the epochs' updates, without testing; x serial: times faster than serially, "
        "median of the ratios of interleaved epochs; residual: mean of the last epoch, 0 is exact; solver, "
        "serial: test accuracy of the trained net with its solver in use and serially; differ: labels for which "
        "the two disagree; back: batches that fell back and were solved serially; loss off: the largest relative "
        "difference of an epoch's training loss from the serial one's.\n"
        "The residual is the largest gap between the end of one stretch of time and the start of the next, "
        "relative to states above 1. Of several layers the worst counts. Test sequences have not been seen before: "
        "with warm starts, an eighth of a chunk is computed before each chunk to start it, and then one sweep is "
        "made. Such a net is meant to be used serially.",
    )
    _show_details(result, report)
    places = [_name(setting.length) for setting in result.lengths]
    times = {solver: [row.median_seconds for row in result.rows if row.solver == solver] for solver in SOLVERS}
    panels = [_panel("seconds per epoch, the median", "steps of a sequence", places, times)]
    for setting in result.lengths:
        rows = result.at(setting.length)
        residuals = {solver: [epoch.residual for epoch in row.epochs] for solver, row in rows.items()}
        panels.append(_panel(f"residual, {_name(setting.length)}", "epoch", _epochs(result), residuals))
    caption = f"An epoch has about as many steps at any length; windows of {WINDOW} overlap by half."
    report.plot(draw_figure(panels), title="Time and residual", caption=caption)
    report.plot(
        draw_figure([_accuracy_panel(result, setting.length) for setting in result.lengths]),
        title="Accuracy",
        caption="Colour: the solver of training. Solid: tested serially; dashed: with the solver in use.",
    )


def _show_details(result: MultigridResult, report: Report) -> None:
    for solver, meaning in SOLVERS.items():
        report.note(f"{solver}: {meaning}")
    rule = "the label of their last step" if result.settings["data"] is None else "one label throughout"
    report.table(
        title="The sequences",
        columns=("length", "training", "test", "dropped", "steps", "median", "per batch", "chunks"),
        rows=[(_name(setting.length), *dataclasses.astuple(setting)[1:]) for setting in result.lengths],
        caption=f"{result.recordings[0]} recordings to train on and {result.recordings[1]} to test on. Windows of "
        f"{WINDOW} steps begin 64 apart, have {rule}, of 1 to {result.settings['window_labels']}, and are "
        "classified at their last step; other sequences have one label per step. Dropped: windows without such a "
        "label and other sequences without any. Steps: of all training sequences, and of the median one. Chunks: "
        "of the longest sequence, for warm starts.",
        is_detail=True,
    )
    report.table(
        title="As published",
        columns=("epoch", "by multigrid %", "serially %", "gap, points"),
        rows=[(epoch, parallel, serial, parallel - serial) for epoch, parallel, serial in PUBLISHED],
        caption=PUBLISHED_FACTS,
        is_detail=True,
    )
    reasons = [(_name(row.length), row.solver, row.last.reason) for row in result.rows if row.last.reason]
    report.table(
        title="Reasons that solvers gave for the last batch",
        columns=("length", "solver", "reason"),
        rows=reasons,
        is_detail=True,
    )


def _name(length: Length) -> str:
    return length if isinstance(length, str) else f"{length:,}"


def _epochs(result: MultigridResult) -> list[str]:
    return [str(number + 1) for number in range(len(result.rows[0].epochs))]


def _panel(title: str, x: str, places: Sequence[str], values: Mapping[str, Sequence[float]]) -> Panel:
    lines = [Line(name=solver, colour=COLOURS[solver], xs=places, ys=values[solver]) for solver in values]
    return Panel(title=title, x=x, y=title.partition(",")[0], lines=lines, y_scale="from zero")


def _accuracy_panel(result: MultigridResult, length: Length) -> Panel:
    lines = [
        Line(
            name=solver,
            colour=COLOURS[solver],
            xs=_epochs(result),
            ys=[100 * getattr(epoch, kind) for epoch in row.epochs],
            dashed=kind == "parallel",
            in_legend=kind == "serial",
        )
        for solver, row in result.at(length).items()
        for kind in ("serial", "parallel")
        if kind == "serial" or solver != SERIAL
    ]
    return Panel(title=f"accuracy, {_name(length)}", x="epoch", y="test accuracy, %", lines=lines)
