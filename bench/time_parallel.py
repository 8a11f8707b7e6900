"""`python -m bench time`: parallel-in-time solvers against our sequential kernel, torch.nn.GRU and JAX.

Shape legend: T steps, B sequences, F features of the input, H hidden units.
"""

import copy
import dataclasses
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, final

import torch

from bench import time_ranks
from bench.contenders import (
    JAX,
    Batch,
    Contender,
    JaxContender,
    Shape,
    TorchContender,
    draw_batch,
    draw_cell,
    missing_peers,
    our_layer,
    torch_contender,
    torch_layer,
)
from bench.harness import Count, Report, Settings, bench, chosen_parts
from bench.recordings import UNLABELLED, Recording, Recordings, standardise_recordings
from bench.trained_nets import LEARNING_RATE, MEMORY_ROWS, Labeller, Nets, measure_memory
from stretto.cells import GRU
from stretto.data import open_sequences
from stretto.nn import RNN
from stretto.solvers import AbstractSolver, Multigrid, Newton, Shooting, Solution, TrajectoryCache
from stretto.timing import TimingBudget, check_equal, relative_error, time_interleaved

PARTS: Final = ("warm-start", "exact", "others", "ranks", "training")
NEEDS_DATA: Final = ("ranks", "training")
TORCH: Final = "nn.GRU"
SERIAL: Final = "sequential"
EXACT_TOLERANCE: Final = 1e-5
"""How far an exact solver may be from our sequential kernel, relative to the largest value."""
SOLVER_TOLERANCE: Final = 1e-6
NUM_FEATURES: Final = 6
NUM_CHUNKS: Final = (8, 16, 32, 64)
"""Numbers of chunks to choose from."""

# Each: T and H; the least speed-up over nn.GRU and over our sequential kernel.
Goal = tuple[float, float]
WARM_START_SHAPES: Final[tuple[tuple[tuple[int, int], Goal], ...]] = (
    ((16384, 64), (100, 1.8)),
    ((16384, 256), (20, 2.5)),
    ((8192, 512), (10, 3)),
)
EXACT_SHAPE: Final = (16384, 256)
EXACT_GOAL: Final[Goal] = (12, 1.6)
OTHERS_SHAPE: Final = (2048, 16)
QUICK_SHAPE: Final = (256, 8)


@dataclasses.dataclass(frozen=True, kw_only=True)
class TimeSettings(Settings):
    """Compare parallel-in-time solvers with sequential kernels.

    Attributes:
        only: Parts to run, separated by blanks or commas: warm-start, exact, others, ranks, training; all of them if
            left out.
        data: Long recordings with one label per step, to train nets on until they remember. Without it, the parts
            ranks and training are left out and the others use nets at their initial weights.
        rounds: Rounds of an interleaved run; nn.GRU takes part in two of them.
        chunks: Number of chunks; if left out, the fastest of 8, 16, 32 and 64, or what `Shooting` chooses.
        updates: Updates of the trained nets, up to 128 units; larger ones get as many as take that long.
        epochs: Epochs of the part training.
    """

    only: tuple[str, ...] = ()
    data: Path | None = None
    rounds: Count = 7
    chunks: Count | None = None
    updates: Count = 800
    epochs: Count = 4


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """What all parts share: the settings, the report, the trained nets if there are data, and whether JAX is there."""

    settings: TimeSettings
    report: Report
    nets: Nets | None
    with_jax: bool

    def sizes(self, num_steps: int, hidden_size: int) -> tuple[int, int]:
        """T and H, or tiny ones."""
        return QUICK_SHAPE if self.settings.quick else (num_steps, hidden_size)

    @property
    def timing(self) -> TimingBudget:
        """How often everything is timed."""
        return TimingBudget(rounds=self.settings.rounds, seconds=math.inf)


@bench("time", title="Parallel in time: solvers against sequential kernels")
def run(settings: TimeSettings, report: Report) -> None:
    """Run the parts that were asked for."""
    if settings.quick:
        settings = dataclasses.replace(settings, rounds=2, updates=3, epochs=1)
    parts = chosen_parts(settings.only, PARTS)
    missing = missing_peers()
    for what, why in missing.items():
        report.skip(what, why)
    nets = None
    if settings.data is not None:
        data = open_sequences(settings.data)
        recordings = standardise_recordings(data.part("train"), data.part("test"), name=data.name)
        nets = Nets(recordings, updates=settings.updates, progress=report.progress)
    plan = Plan(settings=settings, report=report, nets=nets, with_jax=JAX not in missing)
    if "warm-start" in parts:
        compare_warm_starts(plan)
    if "exact" in parts:
        compare_exact(plan)
    if "others" in parts:
        compare_others(plan)
    if nets is None:
        for part in set(parts) & set(NEEDS_DATA):
            report.skip(part, "it is about trained nets. Give long recordings with --data FILE.")
        return
    if "ranks" in parts:
        time_ranks.compare_ranks(nets, report, rounds=settings.rounds, quick=settings.quick)
    if "training" in parts:
        train_to_accuracy(plan, nets.recordings)


# One net and its contenders ------------------------------------------------------------------------------------------


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A net, its description, and the batch it runs on."""

    net: str
    cell: GRU
    batch: Batch

    @property
    def shape(self) -> Shape:
        """T, B, F and H."""
        num_steps, batch, input_size = self.batch.x_TBF.shape
        hidden_size = self.batch.weight_TBO.shape[2]
        return Shape(num_steps=num_steps, batch=batch, input_size=input_size, hidden_size=hidden_size)

    def serial(self) -> TorchContender:
        """Our own kernel, sequentially."""
        return our_layer(RNN(self.cell, batch_first=False), batch=self.batch, name=SERIAL)

    def solver(
        self, name: str, solver: AbstractSolver, *, renew: Callable[[], AbstractSolver] | None = None
    ) -> "SolverContender":
        """Our layer with a solver."""
        return SolverContender(name, solver, case=self, renew=renew)


@final
class SolverContender(Contender):
    """A pass by a solver, on a batch whose sequences have ids.

    `renew` makes a fresh solver before every pass. One that is kept stops trying where it failed, so that the cost of a
    failure would not show.
    """

    def __init__(
        self, name: str, solver: AbstractSolver, *, case: Case, renew: Callable[[], AbstractSolver] | None = None
    ) -> None:
        super().__init__(name)
        self._renew = renew
        self._rnn = RNN(case.cell, batch_first=False, solver=solver)
        self._pass = our_layer(self._rnn, batch=case.batch, name=name, sample_ids=range(case.shape.batch))

    @property
    def solution(self) -> Solution:
        """How the last pass went."""
        return self._rnn.solution

    def run(self) -> None:
        """Forward and backward."""
        if self._renew is not None:
            self._rnn.solver = self._renew()
        self._pass.run()

    def results(self) -> dict[str, torch.Tensor]:
        """Outputs and gradients of one pass."""
        if self._renew is not None:
            self._rnn.solver = self._renew()
        return self._pass.results()


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Errors:
    """How far a contender is from our sequential kernel, and what its solver reported."""

    output: float
    gradient: float
    solution: Solution | None = None


def errors_between(
    actual: Mapping[str, torch.Tensor], expected: Mapping[str, torch.Tensor], *, solution: Solution | None = None
) -> Errors:
    """The relative error of the output, and the largest of all gradients."""
    output, *gradients = (
        relative_error(one, other) for one, other in zip(actual.values(), expected.values(), strict=True)
    )
    # A copy: the solver writes into its own.
    reported = None if solution is None else dataclasses.replace(solution)
    return Errors(output=output, gradient=max(gradients), solution=reported)


def check_exact(contender: SolverContender, expected: Mapping[str, torch.Tensor], *, where: str) -> Errors:
    """Compare an exact solver with our sequential kernel; raises a StrettoError if it is not exact."""
    actual = contender.results()
    check_equal(actual, expected, name=contender.name, peer=SERIAL, where=where, tolerance=EXACT_TOLERANCE)
    return errors_between(actual, expected, solution=contender.solution)


def initial_case(num_steps: int, hidden_size: int) -> Case:
    """A net at its initial weights on random input."""
    shape = Shape(num_steps=num_steps, batch=1, input_size=NUM_FEATURES, hidden_size=hidden_size)
    return Case(net="initial weights, random input", cell=_draw_gru(shape), batch=draw_batch(shape))


def _case(plan: Plan, num_steps: int, hidden_size: int) -> Case:
    """A trained net on recordings; without data, a net at its initial weights on random input."""
    if plan.nets is None:
        return initial_case(num_steps, hidden_size)
    net = plan.nets.of(hidden_size)
    weight_TBO = torch.randn(num_steps, 1, hidden_size, generator=torch.Generator().manual_seed(1))
    batch = Batch(x_TBF=plan.nets.recordings.concatenate(num_steps)[:, None], weight_TBO=weight_TBO)
    # A copy: it gets an update.
    return Case(net=f"trained: {net}", cell=copy.deepcopy(net.cell), batch=batch)


def _draw_gru(shape: Shape) -> GRU:
    cell = draw_cell("GRU", shape)
    assert isinstance(cell, GRU)
    return cell


def _time(
    case: Case,
    contenders: Sequence[SolverContender],
    plan: Plan,
    *,
    expected: Mapping[str, torch.Tensor],
    errors: Mapping[str, Errors],
    title: str,
    caption: str,
    goal: Goal | None = None,
) -> None:
    """Add a table of contenders against torch's layer, JAX and our sequential kernel; the goal is for the first."""
    peers: list[Contender] = [torch_contender(torch_layer([case.cell], "GRU", case.shape), batch=case.batch)]
    if plan.with_jax:
        peers.append(JaxContender(case.cell, batch=case.batch))
    found = dict(errors)
    for peer in peers:
        actual = peer.results()
        check_equal(actual, expected, name=peer.name, peer=SERIAL, where=str(case.shape))
        found[peer.name] = errors_between(actual, expected)
    serial = case.serial()
    serial.run()
    every = {one.name: one for one in (*peers, serial, *contenders)}
    timings = time_interleaved({name: one.run for name, one in every.items()}, budget=plan.timing, only_twice=(TORCH,))
    rows, solvers = [], []
    for name, timing in timings.items():
        over_torch, over_serial = (timings[other].minimum / timing.minimum for other in (TORCH, SERIAL))
        if goal is not None and not plan.settings.quick and name == contenders[0].name:
            plan.report.goal(f"{name}, {case.shape}: over {TORCH}", over_torch, at_least=goal[0])
            plan.report.goal(f"{name}, {case.shape}: over {SERIAL}", over_serial, at_least=goal[1])
        error = found.get(name, Errors(output=0.0, gradient=0.0))
        solution = error.solution
        solvers += [f"{name}: {solution.reason}."] if solution is not None and solution.reason else []
        rows.append(
            (
                *(case.shape.sizes, name, 1e3 * timing.minimum, 1e3 * timing.median, over_torch, over_serial),
                *(error.output, error.gradient, None if solution is None else solution.residual),
                None if solution is None else solution.fell_back,
            )
        )
    plan.report.table(
        title=f"{title}, {case.shape}: {case.net}",
        columns=COLUMNS,
        rows=rows,
        caption="\n".join([CAPTION, caption, *solvers]),
    )


COLUMNS: Final = (
    *("T, B, F, H", "contender", "ms", "median ms", f"over {TORCH}", f"over {SERIAL}"),
    *("output error", "gradient error", "residual", "fell back"),
)
CAPTION: Final = (
    "over: the other's least time over this one's, forward and backward with the gradients of all weights, in one "
    f"interleaved run ({TORCH} in two rounds of it). {SERIAL}: our own kernel. Errors: largest difference from it, "
    "relative to the largest value."
)


# Parts ---------------------------------------------------------------------------------------------------------------


def compare_warm_starts(plan: Plan) -> None:
    """One sweep from cached boundaries, as in training with a `TrajectoryCache`."""
    caption = (
        "With constant weights the outputs converge to the sequential ones, checked to 1e-5. Errors and residual are "
        "those after one update of all weights by Adam (2e-3). Gradients are cut at the boundaries, or cached too."
    )
    for sizes, goal in WARM_START_SHAPES[: 1 if plan.settings.quick else None]:
        case = _case(plan, *plan.sizes(*sizes))
        plan.report.progress(f"warm start: {case.shape}")
        count = plan.settings.chunks or _fastest_num_chunks(case, plan)
        names = {f"warm start, {count} chunks": False, f"gradients too, {count} chunks": True}
        contenders = [case.solver(name, _one_sweep(count, adjoints=adjoints)) for name, adjoints in names.items()]
        expected = case.serial().results()
        errors = {one.name: _errors_after_update(one, case, expected, num_chunks=count) for one in contenders}
        _time(
            *(case, contenders, plan),
            expected=expected,
            errors=errors,
            title="Warm start, one sweep per pass",
            caption=caption,
            goal=goal,
        )


def _one_sweep(num_chunks: int, *, adjoints: bool = False) -> Shooting:
    cache = TrajectoryCache(adjoints=adjoints)
    return Shooting(num_chunks=num_chunks, max_sweeps=1, cache=cache, tolerance=SOLVER_TOLERANCE)


def _fastest_num_chunks(case: Case, plan: Plan) -> int:
    counts = [count for count in NUM_CHUNKS if count <= case.shape.num_steps]
    contenders = {str(count): case.solver(str(count), _one_sweep(count)) for count in counts}
    for contender in contenders.values():
        contender.run()
    budget = TimingBudget(rounds=max(1, plan.settings.rounds // 2), seconds=math.inf)
    timings = time_interleaved({name: one.run for name, one in contenders.items()}, budget=budget)
    return int(min(timings, key=lambda name: timings[name].minimum))


def _errors_after_update(
    contender: SolverContender, case: Case, expected: Mapping[str, torch.Tensor], *, num_chunks: int
) -> Errors:
    """The errors of a warm start after one update of all weights.

    Before that, with constant weights, its outputs must converge to the sequential ones: that is the check.
    """
    for _ in range(num_chunks + 1):
        actual = contender.results()
        if contender.solution.residual <= SOLVER_TOLERANCE:
            break
    check_equal(
        {"output": actual["output"]},
        {"output": expected["output"]},
        name=contender.name,
        peer=SERIAL,
        where=str(case.shape),
        tolerance=EXACT_TOLERANCE,
    )
    before = copy.deepcopy(case.cell.state_dict())
    serial = case.serial()
    serial.results()
    torch.optim.Adam(case.cell.parameters(), lr=LEARNING_RATE).step()
    errors = errors_between(contender.results(), serial.results(), solution=contender.solution)
    case.cell.load_state_dict(before)
    return errors


def compare_exact(plan: Plan) -> None:
    """Exact shooting on nets that forget: one soon, and one that needs 256 steps."""
    num_steps, hidden_size = plan.sizes(*EXACT_SHAPE)
    shape = Shape(num_steps=num_steps, batch=1, input_size=NUM_FEATURES, hidden_size=hidden_size)
    batch = draw_batch(shape)
    soon, soon_memory = shrink_until_forgetting(_draw_gru(shape), batch.x_TBF)
    late, late_memory = slow_down_while_forgetting(soon, soon_memory, batch.x_TBF)
    for cell, when, memory in ((soon, "soon", soon_memory), (late, "late", late_memory)):
        case = Case(net=f"forgets {when}, after about {memory:.0f} steps", cell=cell, batch=batch)
        plan.report.progress(f"exact: {case.shape}, {case.net}")
        expected = case.serial().results()
        solver = Shooting(num_chunks=plan.settings.chunks or "auto", tolerance=SOLVER_TOLERANCE)
        contender = case.solver(f"shooting, forgets {when}", solver)
        _time(
            *(case, [contender], plan),
            expected=expected,
            errors={contender.name: check_exact(contender, expected, where=str(shape))},
            title="Exact shooting",
            caption="Outputs and gradients are checked to be the sequential ones within 1e-5.",
            goal=EXACT_GOAL,
        )


def compare_others(plan: Plan) -> None:
    """Newton's method (DEER) and multigrid as published, at a shape that they can handle."""
    sizes = plan.sizes(*OTHERS_SHAPE)
    cases = [initial_case(*sizes), *([_case(plan, *sizes)] if plan.nets is not None else [])]
    for case in cases:
        plan.report.progress(f"others: {case.shape}, {case.net}")
        expected = case.serial().results()
        makers: dict[str, Callable[[], AbstractSolver]] = {
            "Newton, dense": lambda: Newton(jacobian="dense", tolerance=SOLVER_TOLERANCE),
            "Newton, diagonal": lambda: Newton(jacobian="diagonal", tolerance=SOLVER_TOLERANCE),
            "multigrid to 1e-6": lambda: Multigrid(tolerance=SOLVER_TOLERANCE),
        }
        exact = [case.solver(name, make(), renew=make) for name, make in makers.items()]
        published = case.solver("multigrid as published", Multigrid())
        errors = {one.name: check_exact(one, expected, where=str(case.shape)) for one in exact}
        errors[published.name] = errors_between(published.results(), expected, solution=published.solution)
        _time(
            *(case, [*exact, published], plan),
            expected=expected,
            errors=errors,
            title="Other methods",
            caption="Newton's method is DEER; multigrid is Moon and Cyr's, with their settings, or until converged. "
            "All but the published settings are checked to be exact within 1e-5.",
        )


# Nets that forget ----------------------------------------------------------------------------------------------------

FORGETS_WITHIN: Final = 256
WEIGHT_FACTOR: Final = 0.8
BIAS_INCREMENT: Final = 0.1


def shrink_until_forgetting(cell: GRU, x_TBF: torch.Tensor) -> tuple[GRU, float]:
    """Shrink recurrent weights until the net forgets within 256 steps; the net and how many steps it needs."""
    while (memory := _memory(cell, x_TBF)) > _max_memory(x_TBF):
        cell = copy.deepcopy(cell)
        with torch.no_grad():
            cell.weight_hh.mul_(WEIGHT_FACTOR)
    return cell, memory


def slow_down_while_forgetting(cell: GRU, memory: float, x_TBF: torch.Tensor) -> tuple[GRU, float]:
    """Open the update gate for as long as the net still forgets within 256 steps."""
    while True:
        slower = copy.deepcopy(cell)
        assert slower.bias_ih is not None
        with torch.no_grad():
            # The second of the three gates keeps the old state.
            slower.bias_ih[slower.hidden_size : 2 * slower.hidden_size] += BIAS_INCREMENT
        longer = _memory(slower, x_TBF)
        if longer > _max_memory(x_TBF):
            return cell, memory
        cell, memory = slower, longer


def _memory(cell: GRU, x_TBF: torch.Tensor) -> float:
    return measure_memory(cell, x_TBF[:, 0], stride=16)


def _max_memory(x_TBF: torch.Tensor) -> int:
    return min(FORGETS_WITHIN, len(x_TBF) // MEMORY_ROWS)


# Training to the accuracy of sequential training ---------------------------------------------------------------------

TRAINING_UNITS: Final = 64
TRAINING_CHUNKS: Final = (8, 32)
TRAINING_GOAL: Final[Goal] = (60, 1.6)
ACCURACY_SLACK: Final = 0.005
"""A difference from the accuracy of sequential training that counts as equal."""
TEST_BATCH: Final = 5


@final
class Learner:
    """A net in training, by chunks with cached boundaries, or sequentially if `num_chunks` is None."""

    def __init__(self, name: str, num_chunks: int | None, *, recordings: Recordings, hidden_size: int) -> None:
        self.name, self.recordings = name, recordings
        self.net = Labeller(recordings.num_features, hidden_size, recordings.num_classes)
        self._serial = RNN(self.net.cell)
        self._rnn = self._serial
        if num_chunks is not None:
            solver = Shooting(num_chunks=num_chunks, max_sweeps=1, cache=TrajectoryCache())
            self._rnn = RNN(self.net.cell, solver=solver)
        self._optimizer = self.net.optimizer()
        self.seconds: list[float] = []
        self.accuracies: list[float] = []

    @property
    def residual(self) -> float:
        """The largest mismatch at a boundary, of the last recording."""
        return float(self._rnn.solution.residual)

    def warm_up(self) -> None:
        """Build the kernels."""
        self._rnn(self.recordings.train[0].x_TF[None, :2], sample_ids=[-1])[0].sum().backward()
        self.net.zero_grad()

    def train_epoch(self) -> None:
        """One epoch; all learners see the recordings in the same order."""
        train = self.recordings.train
        generator = torch.Generator().manual_seed(len(self.seconds))
        begin = time.perf_counter()
        for number in torch.randperm(len(train), generator=generator).tolist():
            y_BTH, _ = self._rnn(train[number].x_TF[None], sample_ids=[number])
            self.net.update(self.net.loss(y_BTH, train[number].labels_T[None]), self._optimizer)
        self.seconds.append(time.perf_counter() - begin)
        self.accuracies.append(self._accuracy())

    def seconds_to(self, accuracy: float) -> float | None:
        """Seconds of training until the accuracy was reached; None if it was not."""
        for number, reached in enumerate(self.accuracies, 1):
            if reached >= accuracy:
                return sum(self.seconds[:number])
        return None

    def _accuracy(self) -> float:
        right = count = 0
        pad = torch.nn.utils.rnn.pad_sequence
        for first in range(0, len(self.recordings.test), TEST_BATCH):
            some = self.recordings.test[first : first + TEST_BATCH]
            x_BTF = pad([one.x_TF for one in some], batch_first=True)
            labels_BT = pad([one.labels_T for one in some], batch_first=True, padding_value=UNLABELLED)
            with torch.no_grad():
                y_BTH = self._serial(x_BTF, lengths=torch.tensor([len(one) for one in some]))[0]
                best_BT = self.net.head(y_BTH).argmax(dim=2)
            labelled_BT = labels_BT != UNLABELLED
            right += int((best_BT == labels_BT)[labelled_BT].sum())
            count += int(labelled_BT.sum())
        return right / max(1, count)


def train_to_accuracy(plan: Plan, recordings: Recordings) -> None:
    """Train sequentially and with warm starts, an epoch of each in turn.

    Warm starts that have not reached the accuracy of sequential training continue for up to twice as many epochs.
    """
    epochs, quick = plan.settings.epochs, plan.settings.quick
    names: dict[str, int | None] = {SERIAL: None, **{f"warm start, {count} chunks": count for count in TRAINING_CHUNKS}}
    size = QUICK_SHAPE[1] if quick else TRAINING_UNITS
    learners = [Learner(name, count, recordings=recordings, hidden_size=size) for name, count in names.items()]
    for learner in learners:
        learner.warm_up()
    for number in range(epochs):
        plan.report.progress(f"training: epoch {number + 1} of {epochs}")
        # The order alternates, because the first may find the machine in another state.
        for learner in learners[:: 1 if number % 2 else -1]:
            learner.train_epoch()
    serial, *others = learners
    target = serial.accuracies[-1] - ACCURACY_SLACK
    for number in range(epochs):
        late = [learner for learner in others if learner.seconds_to(target) is None]
        for learner in late:
            plan.report.progress(f"training: epoch {epochs + number + 1} of {learner.name}")
            learner.train_epoch()
    plan.report.progress(f"training: an update of {TORCH}")
    recording = sorted(recordings.train, key=len)[(len(recordings.train) - 1) // 2]
    torch_epoch = _torch_seconds(recording, serial.net) / len(recording) * sum(map(len, recordings.train))
    # As many epochs as sequential training took to get there.
    needed = next(number for number, accuracy in enumerate(serial.accuracies, 1) if accuracy >= target)
    serial_seconds = sum(serial.seconds[:needed])
    rows, ratios = [], []
    for learner in learners:
        seconds = learner.seconds_to(target)
        over = (None, None) if seconds is None else (torch_epoch * needed / seconds, serial_seconds / seconds)
        if learner is not serial:
            ratios.append(over)
        rows.append(
            (
                *(learner.name, sum(learner.seconds) / len(learner.seconds), seconds, *over, learner.residual),
                " ".join(f"{100 * accuracy:.1f}" for accuracy in learner.accuracies),
            )
        )
    if not quick:
        over_torch, over_serial = max(((one or 0.0, other or 0.0) for one, other in ratios), key=lambda pair: pair[1])
        plan.report.goal(f"training: over {TORCH}", over_torch, at_least=TRAINING_GOAL[0])
        plan.report.goal(f"training: over {SERIAL}", over_serial, at_least=TRAINING_GOAL[1])
    plan.report.table(
        title=f"Training to the accuracy of sequential training, H = {size}",
        columns=(
            *("training", "s per epoch", "s to the target", f"over {TORCH}", f"over {SERIAL}", "residual"),
            "test accuracy % after each epoch",
        ),
        rows=rows,
        caption=f"One label per step, {len(recordings.train)} whole recordings of {sum(map(len, recordings.train)):,} "
        f"steps in all, one at a time, Adam 2e-3; accuracy is measured sequentially. Target: {100 * target:.1f} %, the "
        f"last of sequential training less {100 * ACCURACY_SLACK:.1f} points. {TORCH} is estimated: "
        f"{torch_epoch:.0f} s per epoch, from one recording of {len(recording):,} steps, for as many epochs as "
        "sequential training needed.",
    )


def _torch_seconds(recording: Recording, net: Labeller) -> float:
    """The faster of two updates on one recording by torch's layer."""
    hidden_size = net.cell.hidden_size
    shape = Shape(num_steps=len(recording), batch=1, input_size=recording.x_TF.shape[1], hidden_size=hidden_size)
    layer = torch_layer([net.cell], "GRU", shape)
    optimizer = torch.optim.Adam([*layer.parameters(), *net.head.parameters()])
    seconds = []
    for _ in range(2):
        begin = time.perf_counter()
        y_TBH, _ = layer(recording.x_TF[:, None])
        net.update(net.loss(y_TBH.transpose(0, 1), recording.labels_T[None]), optimizer)
        seconds.append(time.perf_counter() - begin)
    return min(seconds)
