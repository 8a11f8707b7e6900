"""`python -m bench training`: all of Stretto against a plain PyTorch script of the same model.

How much sooner does Stretto reach the quality of the script? Both train an epoch each in turn, so that a change of the
machine's load hits both, once the same weights have given the same loss, gradient and quality on both sides.
"""

import contextlib
import dataclasses
import itertools
import math
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, Protocol, final, get_args

import torch
from pydantic import Field
from torch import nn

from bench.baselines import Baseline, PlainScript, baseline_of
from bench.figure import BLUE, GREY, Line, Panel, draw_figure
from bench.harness import Count, Report, Settings, bench
from bench.task_data import NO_CHECKPOINTS, check_tasks, open_data, take_share
from stretto.batching import Batch, collate
from stretto.data import SequenceSet
from stretto.distributed import World
from stretto.errors import StrettoError
from stretto.large_batch import LargeBatch, OptimizerName, first_run_epochs, make_optimizer
from stretto.nn import fresh_state
from stretto.tasks import find_task
from stretto.timing import check_equal
from stretto.training import (
    AbstractLog,
    AbstractTask,
    NotNegative,
    TrainConfig,
    Trainer,
    evaluate,
    run_auto,
    validate,
    with_preset,
)

TaskName = Literal["digits", "digit-images", "language-model", "translate", "handwriting"]
TASK_NAMES: Final[tuple[TaskName, ...]] = get_args(TaskName)
GOAL: Final = 5.3
"""Of the geometric mean: what large batches gave You et al. on average, with more hardware."""
QUICK_EPOCHS: Final = 2
QUICK_SHARE: Final = 0.05
SHARES: Final[dict[str, float]] = {"digits": 0.2, "digit-images": 0.1, "language-model": 0.05, "translate": 0.05}
"""The share of the data in a folder to train on unless another is asked for."""
FIRST_RATE: Final = 0.4
"""Of Muon, times the root of the updates: what `--auto` tries first."""
ADAM_SHARE: Final = 0.1
"""Of that, what Adam has on all but the output layer, also as --auto has it."""
FIRST_ADAM_RATE: Final = 0.003
WARMUP_SHARE: Final = 0.1
EXTRA_EPOCHS: Final = 1.5
"""How many times the epochs of the plain script Stretto may train."""
TASK_SETTINGS: Final[dict[str, dict[str, Any]]] = {"language-model": {"preset": "ptb-small"}}
"""Settings of tasks that are not their defaults."""
Row = tuple[str | int | float | bool | None, ...]
CHECK_SEQUENCES: Final = 32
"""Sequences that losses are compared on before anything is timed."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingSettings(Settings):
    """Train tasks with Stretto and with a plain PyTorch script, to the same quality.

    Attributes:
        tasks: What to train.
        data: A folder with the data sets mnist, ptb and multi30k_en_de, or some of them. Without it, and for tasks
            whose data are not there, the embedded data are used.
        epochs: Of the plain script; left out, the task's own number. Stretto may train half as many more.
        fraction: The share of the training data to use; left out, all of the embedded data, and of those in a folder
            as much as lets the five tasks end within half an hour on two cores.
        side: What is compared with the plain script. Stretto has the script's optimiser and schedule; with --batch-size
            own, what it gains is due to kernels and buckets alone. Auto is `stretto train --auto`, which looks for
            others: its trials count. Recipe is the plain script once more with what --auto tries first, Muon and a
            linear decay over as few epochs: what that gains is due to the recipe alone.
        batch_size: For stretto: auto lets it choose the batch by measuring, from the task's own on; own keeps that.
        accuracy_points: How many percent points of accuracy below the plain script's last epoch count as the same.
        perplexity_percent: The same for perplexity, in percent above it.
        cer_points: The same for the character error rate, in percent points above it.
        bleu_points: The same for BLEU, in points below it.
        seed: Of the initial weights and the order of data.
    """

    tasks: tuple[TaskName, ...] = TASK_NAMES
    data: Path | None = None
    epochs: Count | None = None
    fraction: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    side: Literal["stretto", "auto", "recipe"] = "stretto"
    batch_size: Literal["auto", "own"] = "auto"
    accuracy_points: NotNegative = 0.2
    perplexity_percent: NotNegative = 1.0
    cer_points: NotNegative = 0.3
    bleu_points: NotNegative = 0.5
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0

    def __post_init__(self) -> None:
        check_tasks(self.tasks, TASK_NAMES)

    def margin(self, metric: str) -> "Margin":
        """What counts as the same quality."""
        margins = {
            "accuracy": Margin(amount=self.accuracy_points / 100, higher_is_better=True),
            "perplexity": Margin(amount=self.perplexity_percent / 100, relative=True),
            "cer": Margin(amount=self.cer_points / 100),
            "bleu": Margin(amount=self.bleu_points, higher_is_better=True),
        }
        return margins[metric]


@bench("training", title="Training against plain PyTorch scripts: time to the same quality")
def run(settings: TrainingSettings, report: Report) -> None:
    """Train each task on both sides."""
    times: list[Row] = []
    epochs: list[Row] = []
    starts: list[Row] = []
    ratios, missed = [], []
    for name in settings.tasks:
        task, data = _make_task(name, settings, report)
        start, comparison = compare(task, data, settings, report)
        plain, stretto = comparison.plain, comparison.stretto
        ratios.append(comparison.ratio)
        missed += [] if comparison.is_reached else [name]
        times.append(
            (
                *(name, task.metric, comparison.target, comparison.limit),
                *(*(comparison.plain_reached or (None, None)), *(comparison.stretto_reached or (None, None))),
                *(comparison.ratio, comparison.is_reached),
            )
        )
        epochs.append(
            (
                *(name, len(data.part("train")), len(plain.epochs), plain.median, len(stretto.epochs), stretto.median),
                *(plain.median / stretto.median, stretto.epochs[-1].value, stretto.epochs[0].batch_size),
                *(stretto.epochs[-1].batch_size, sum(epoch.probe_seconds for epoch in stretto.epochs)),
            )
        )
        starts.append((name, data.name, *start))
        report.plot(_curves(comparison), title=f"{name}: {task.metric} over seconds of updates")
        mean = statistics.geometric_mean(ratios)
        # After each task, so that an interrupted run keeps what it has.
        _add_tables(report, [*times, ("geometric mean", *(None,) * 7, mean, not missed)], epochs, starts)
    if not settings.quick:
        report.goal("geometric mean of plain / stretto", 0.0 if missed else mean, at_least=GOAL)


def _add_tables(report: Report, times: Sequence[Row], epochs: Sequence[Row], starts: Sequence[Row]) -> None:
    report.table(
        title="Time to the quality of a plain PyTorch script",
        columns=(
            *("task", "metric", "target", "counts from", "plain epochs", "plain s", "stretto epochs", "stretto s"),
            *("plain / stretto", "reached"),
        ),
        rows=times,
        caption="The target is the plain script's metric on the validation part after its last epoch; the time is "
        "that of updates until the end of the first epoch that reached it. Where Stretto did not, the ratio is of "
        "all its time, so that the true one is smaller. Its time includes timing updates to choose the batch. "
        "Kernels were compiled, or found in the cache, before.",
    )
    report.table(
        title="Epochs",
        columns=(
            *("task", "sequences", "plain epochs", "plain s", "stretto epochs", "stretto s", "plain / stretto"),
            *("stretto's last metric", "first batch", "last batch", "probe s"),
        ),
        rows=epochs,
        caption="Seconds: the median per epoch, without timing updates to choose the batch.",
    )
    report.table(
        title="Before training: the same weights on both sides",
        columns=("task", "data", "plain loss", "stretto loss", "error", "plain metric", "stretto metric"),
        rows=starts,
        caption="On one batch, losses and gradients may differ by 1e-4 of the largest value, and on the validation "
        "part the metric by what counts as the same; otherwise nothing is timed.",
    )


def _make_task(name: str, settings: TrainingSettings, report: Report) -> tuple[AbstractTask[Any], SequenceSet]:
    report.progress(f"{name}: data")
    data, is_embedded = open_data(name, settings.data)
    if is_embedded and settings.data is not None:
        report.note(f"{name} trained on embedded data")
    default = QUICK_SHARE if settings.quick else 1.0 if is_embedded else SHARES.get(name, 1.0)
    share = settings.fraction or default
    if share < 1.0:
        if settings.fraction is None and not settings.quick:
            report.note(f"{name} trained on {share:.0%} of {data.name}; --fraction 1 takes all of it")
        data = take_share(data, part="train", share=share, seed=settings.seed)
    if settings.quick:
        data = take_share(data, part="valid", share=2 * QUICK_SHARE, seed=settings.seed)
    values: dict[str, Any] = {
        **TASK_SETTINGS.get(name, {}),
        "seed": settings.seed,
        "checkpoint_minutes": NO_CHECKPOINTS,
    }
    epochs = settings.epochs or (QUICK_EPOCHS if settings.quick else None)
    if epochs is not None:
        values["epochs"] = epochs
    config = _make_config(name, values)
    if settings.side == "stretto" and settings.batch_size == "auto":
        try:
            config = _make_config(name, {**values, "batch_size": "auto", "base_batch_size": config.first_batch_size})
        except StrettoError:
            report.note(f"{name} takes no batch size of auto; it trained with its own, {config.first_batch_size}")
    return find_task(name)(config, data), data


def _make_config(name: str, values: dict[str, Any]) -> TrainConfig:
    return validate(find_task(name).Config, with_preset(find_task(name).Config, values), source="the benchmark")


def _with_auto(task: AbstractTask[Any], data: SequenceSet) -> AbstractTask[Any]:
    return type(task)(dataclasses.replace(task.config, auto=True), data)


def compare(
    task: AbstractTask[Any], data: SequenceSet, settings: TrainingSettings, report: Report
) -> tuple["Start", "Comparison"]:
    """Check that both sides are the same model, then train both."""
    margin = settings.margin(task.metric)

    def progress(line: str) -> None:
        report.progress(f"{task.name}: {line}")

    with tempfile.TemporaryDirectory(prefix="stretto-") as place:
        stretto, baseline = StrettoContender(task, run=Path(place)), baseline_of(task, data)
        progress("both sides with the same weights")
        start = check_same_start(task, stretto, baseline, margin=margin)
        plain = PlainContender(baseline.script, batch_size=baseline.batch_size)
        beside: Contender = stretto
        with contextlib.ExitStack() as ended:
            if settings.side == "auto":
                beside = auto = AutoContender(_with_auto(task, data), run=Path(place) / "auto")
                ended.callback(auto.close)
            elif settings.side == "recipe":
                other = baseline_of(task, data)
                copy_weights(stretto.model, other.script)
                beside = RecipeContender(other.script, batch_size=other.batch_size, epochs=task.config.epochs)
                report.note(f"{task.name}: {beside.recipe}")
            comparison = train_in_turn(plain, beside, epochs=task.config.epochs, margin=margin, progress=progress)
    if comparison.stretto.error:
        count = len(comparison.stretto.epochs)
        report.note(f"{task.name}: stretto stopped after {count} epochs: {comparison.stretto.error}")
    for decision in (beside.clock if isinstance(beside, AutoContender) else stretto.clock).decisions:
        report.note(f"{task.name}: {decision}")
    return start, comparison


# The two sides -------------------------------------------------------------------------------------------------------


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class EpochTiming:
    """One epoch of one side."""

    seconds: float  # of its updates; measuring the quality is not counted
    value: float  # the metric on the validation part after it
    batch_size: int  # sequences, or streams, per update
    probe_seconds: float = 0.0  # of the seconds, those that went into timing updates to choose the batch


class Contender(Protocol):
    """One of the two sides."""

    def train_epoch(self) -> EpochTiming:
        """Train one epoch and measure."""


@final
class PlainContender:
    """A plain script."""

    def __init__(self, script: PlainScript, *, batch_size: int) -> None:
        self._script, self._batch_size = script, batch_size

    def train_epoch(self) -> EpochTiming:
        """Train one epoch and measure."""
        begin = time.perf_counter()
        self._script.epoch()
        seconds = time.perf_counter() - begin
        return EpochTiming(seconds=seconds, value=self._script.quality(), batch_size=self._batch_size)


@final
class Clock(AbstractLog):
    """Notes the end of the last update, the batch size of each epoch, and what it cost to choose it."""

    def __init__(self, batch_size: int) -> None:
        self._next_batch_size = batch_size
        self.last_update = time.perf_counter()
        self.batch_size = 0
        self.probe_seconds = 0.0
        self.decisions: list[str] = []

    def emit(self, kind: str, **values: Any) -> None:
        """Note an event."""
        if kind in ("update", "warning"):
            self.last_update = time.perf_counter()
        elif kind == "epoch":
            # Decisions for the next epoch come later.
            self.batch_size = self._next_batch_size
        elif kind == "probe":
            self.probe_seconds += float(values["seconds"])
        elif kind == "auto":
            self._next_batch_size = values.get("batch_size", self._next_batch_size)
            if values["action"] != "trial":
                self.decisions.append(f"{values['action']} {values.get('recipe', '')}: {values['reason']}")
        elif kind == "batch" and values["action"] != "keep":
            self._next_batch_size = values["batch_size"]
            self.decisions.append(f"after epoch {values['epoch']}, {values['action']} to {values['batch_size']}")


@final
class StrettoContender:
    """A task trained by Stretto's own loop, as `stretto train` does.

    The clock runs from the beginning of an epoch to the end of its last update: probing for the batch, measuring the
    gradient noise and epochs that were rolled back count; measuring quality and saving after the epoch do not.
    """

    def __init__(self, task: AbstractTask[Any], *, run: Path) -> None:
        self._task = task
        self.clock = Clock(task.config.first_batch_size * task.config.accumulate)
        self._trainer = Trainer(task, run=run, log=self.clock, resume=False)

    @property
    def model(self) -> nn.Module:
        """What is trained."""
        return self._trainer.model

    def train_epoch(self) -> EpochTiming:
        """Train one epoch and measure."""
        begin, probed = time.perf_counter(), self.clock.probe_seconds
        record = self._trainer.train_epoch()
        return EpochTiming(
            seconds=self.clock.last_update - begin,
            value=record.value,
            batch_size=self.clock.batch_size,
            probe_seconds=self.clock.probe_seconds - probed,
        )

    def quality(self) -> float:
        """The metric on the validation part."""
        task = self._task
        found = evaluate(task, self.model, task.data.part("valid"), device=task.config.device)
        return found.metrics[task.metric]


@final
class AutoContender(AbstractLog):
    """`stretto train --auto`, an epoch at a time: it runs in a thread of its own, which waits after each epoch.

    The clock runs as for `StrettoContender`; building the model and trials are in the first epoch.
    """

    def __init__(self, task: AbstractTask[Any], *, run: Path) -> None:
        self.clock = Clock(task.config.first_batch_size * task.config.accumulate)
        self._task, self._run = task, run
        self._mine, self._theirs = threading.Semaphore(0), threading.Semaphore(0)
        self._values: list[float] = []
        self._error: BaseException | None = None
        self._is_closed = False
        self._threads = torch.get_num_threads()
        self._thread = threading.Thread(target=self._train, daemon=True)
        self._thread.start()

    def train_epoch(self) -> EpochTiming:
        """Train one epoch and measure.

        Raises:
            StrettoError: All epochs are done.
        """
        count, begin = len(self._values), time.perf_counter()
        self._mine.release()
        self._theirs.acquire()
        if self._error is not None:
            raise self._error
        if len(self._values) == count:
            raise StrettoError("--auto has come to its end", fix="Give it more epochs.")
        seconds = self.clock.last_update - begin
        return EpochTiming(seconds=seconds, value=self._values[-1], batch_size=self.clock.batch_size)

    def emit(self, kind: str, **values: Any) -> None:
        """Note an event, and wait after an epoch."""
        self.clock.emit(kind, **values)
        if kind == "epoch":
            self._values.append(float(values["value"]))
            self._theirs.release()
            self._mine.acquire()
            if self._is_closed:
                raise SystemExit

    def close(self) -> None:
        """End the thread, even while it waits."""
        self._is_closed = True
        self._mine.release()
        self._thread.join()

    def _train(self) -> None:
        torch.set_num_threads(self._threads)
        self._mine.acquire()
        try:
            if not self._is_closed:
                self._run.mkdir()
                plain = Trainer(self._task, run=self._run, log=self, resume=False)
                run_auto(self._task, run=self._run, log=self, world=World(), plain=plain, resume=False)
        except SystemExit:
            pass
        except BaseException as error:  # noqa: BLE001  # raised where the epoch was asked for
            self._error = error
        self._theirs.release()


@final
class RecipeContender:
    """A plain script with Muon, or Adam if it has no recurrent matrices, and a linear decay over fewer epochs."""

    def __init__(self, script: PlainScript, *, batch_size: int, epochs: int) -> None:
        per_epoch = script.updates_per_epoch
        self._plain = PlainContender(script, batch_size=batch_size)
        self._left = first_run_epochs(epochs, updates_per_epoch=per_epoch)
        rates: dict[OptimizerName, float] = {
            "muon": float(f"{FIRST_RATE / math.sqrt(self._left * per_epoch):.2g}"),
            "adam": FIRST_ADAM_RATE,
        }
        share = 1.0
        try:
            make_optimizer("muon", script.model, lr=1.0)
            name: OptimizerName = "muon"
            share = ADAM_SHARE
        except StrettoError:
            name = "adam"
        scaled = LargeBatch(
            base_batch_size=batch_size,
            base_lr=rates[name],
            base_warmup_epochs=WARMUP_SHARE * self._left,
            batch_size=batch_size,
            epochs=self._left,
        )
        optimizer, schedule = scaled.build(
            script.model, optimizer=name, decay="linear", updates_per_epoch=per_epoch, adam_share=share
        )
        script.use(optimizer, schedule, clip_norm=1.0)
        self.recipe = f"{name} at {rates[name]:g}, {self._left} epochs of {per_epoch} updates"

    def train_epoch(self) -> EpochTiming:
        """Train one epoch and measure.

        Raises:
            StrettoError: All epochs are done.
        """
        if not self._left:
            raise StrettoError("the recipe has come to its end", fix="Give it more epochs.")
        self._left -= 1
        return self._plain.train_epoch()


# The check before the clock ------------------------------------------------------------------------------------------

Start = tuple[float, float, float, float, float]
"""Loss of the plain script and of Stretto on one batch, the error between them, and both metrics."""
PLAIN_PREFIXES: Final = (
    ("layers.", ""),
    ("encoder.0.", "encoder."),
    ("decoder.0.", "decoder."),
    ("attention.", ""),
)
"""Prefixes of weights, Stretto's and the plain script's, where they differ."""
NOT_WEIGHTS: Final = "standardise."


def check_same_start(
    task: AbstractTask[Any], stretto: StrettoContender, baseline: Baseline, *, margin: "Margin"
) -> Start:
    """The same weights must give the same loss, gradient and quality on both sides, or nothing is timed."""
    copy_weights(stretto.model, baseline.script)
    batch = first_batch(task)

    def stretto_loss() -> torch.Tensor:
        found = task.loss(stretto.model(batch), batch)
        return found.total / found.count

    with fresh_state(stretto.model):
        ours = _loss_and_gradient(stretto.model, stretto_loss)
    theirs = _loss_and_gradient(baseline.script.model, lambda: baseline.loss(batch))
    error = check_equal(ours, theirs, name="stretto", peer="the plain script", where=task.name)
    plain_value, stretto_value = baseline.script.quality(), stretto.quality()
    if not (margin.reaches(plain_value, stretto_value) and margin.reaches(stretto_value, plain_value)):
        raise StrettoError(
            f"with the same weights, the plain script measures {task.metric} {plain_value:.6g} and stretto "
            f"{stretto_value:.6g} at {task.name}",
            fix="Fix that first: both must measure the same.",
        )
    return float(theirs["loss"]), float(ours["loss"]), error, plain_value, stretto_value


def copy_weights(model: nn.Module, script: PlainScript) -> None:
    """Give a plain script the weights of Stretto's model."""
    state = model.state_dict()
    weights = {_plain_name(name, state): tensor for name, tensor in state.items() if not name.startswith(NOT_WEIGHTS)}
    try:
        script.model.load_state_dict(weights)
    except RuntimeError as error:
        raise StrettoError(
            f"the plain script has another net than Stretto: {error}", fix="Give both the same sizes and layers."
        ) from error


def first_batch(task: AbstractTask[Any]) -> Batch:
    """The first sequences, or the first window of a text in streams."""
    feed = task.feed(world=World())
    if feed.carries:
        return next(iter(feed))
    part = task.data.part("train")
    return collate([part[number] for number in range(min(CHECK_SEQUENCES, len(part)))])


def _loss_and_gradient(model: nn.Module, loss_of: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
    """Both without dropout; the model is left as it was."""
    was_training = model.training
    model.eval()
    names = dict(model.named_parameters())
    weights = sorted(names.items(), key=lambda item: _plain_name(item[0], names))
    loss = loss_of()
    gradients = torch.autograd.grad(loss, [weight for _, weight in weights])
    model.train(was_training)
    return {"loss": loss.detach(), "gradient": torch.cat([gradient.flatten() for gradient in gradients])}


def _plain_name(name: str, names: Collection[str]) -> str:
    """Plain scripts have a layer for each direction, `ahead` and `behind`."""
    own = name.rpartition(".")[2]
    if own.endswith("_reverse"):
        return f"behind.{own.removesuffix('_reverse')}"
    if f"{name}_reverse" in names:
        return f"ahead.{own}"
    old, new = next((pair for pair in PLAIN_PREFIXES if name.startswith(pair[0])), ("", ""))
    return new + name.removeprefix(old)


# Time to quality -----------------------------------------------------------------------------------------------------


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Margin:
    """How close to a value counts as reached: an amount, or a fraction of the value if relative."""

    amount: float
    higher_is_better: bool = False
    relative: bool = False

    def limit(self, target: float) -> float:
        """The worst that counts."""
        room = self.amount * abs(target) if self.relative else self.amount
        return target - room if self.higher_is_better else target + room

    def reaches(self, value: float, target: float) -> bool:
        """Whether a value counts; NaN reaches nothing, and nothing reaches NaN."""
        return value >= self.limit(target) if self.higher_is_better else value <= self.limit(target)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LearningCurve:
    """The epochs of one side, and the error that ended them early, if any."""

    epochs: tuple[EpochTiming, ...]
    error: str = ""

    @property
    def seconds(self) -> float:
        """Of all epochs."""
        return sum(epoch.seconds for epoch in self.epochs)

    @property
    def median(self) -> float:
        """Seconds per epoch, without choosing the batch."""
        return statistics.median(epoch.seconds - epoch.probe_seconds for epoch in self.epochs)

    def reached(self, target: float, margin: Margin) -> tuple[int, float] | None:
        """Epochs and seconds until the target was first reached; None if it was not."""
        sums = itertools.accumulate(epoch.seconds for epoch in self.epochs)
        for number, (epoch, seconds) in enumerate(zip(self.epochs, sums, strict=True), start=1):
            if margin.reaches(epoch.value, target):
                return number, seconds
        return None


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """Both learning curves, and what counts as the same quality."""

    plain: LearningCurve
    stretto: LearningCurve
    margin: Margin

    @property
    def target(self) -> float:
        """The plain script's quality after its last epoch."""
        return self.plain.epochs[-1].value

    @property
    def limit(self) -> float:
        """The worst value that counts as the target."""
        return self.margin.limit(self.target)

    @property
    def plain_reached(self) -> tuple[int, float] | None:
        """Epochs and seconds until the plain script first reached it."""
        return self.plain.reached(self.target, self.margin)

    @property
    def stretto_reached(self) -> tuple[int, float] | None:
        """Epochs and seconds until Stretto did; None if it did not in one and a half times the epochs."""
        return self.stretto.reached(self.target, self.margin)

    @property
    def is_reached(self) -> bool:
        """Whether Stretto reached the quality of the plain script."""
        return self.stretto_reached is not None

    @property
    def ratio(self) -> float:
        """The plain script's seconds to the target over Stretto's, or over all of Stretto's if it did not get there."""
        theirs = self.plain.seconds if self.plain_reached is None else self.plain_reached[1]
        ours = self.stretto.seconds if self.stretto_reached is None else self.stretto_reached[1]
        return theirs / ours


def train_in_turn(
    plain: Contender, stretto: Contender, *, epochs: int, margin: Margin, progress: Callable[[str], None]
) -> Comparison:
    """Train both, an epoch each in turn.

    The plain script trains all epochs; Stretto as many, and half as many more if it has not reached the target by then.

    Raises:
        StrettoError: If Stretto does not finish a single epoch.
    """
    theirs: list[EpochTiming] = []
    ours: list[EpochTiming] = []
    fault = ""
    most = math.ceil(EXTRA_EPOCHS * epochs)
    for number in range(1, most + 1):
        if number <= epochs:
            theirs.append(plain.train_epoch())
            progress(f"epoch {number} of {epochs}, plain: {theirs[-1].value:.4g} in {theirs[-1].seconds:.1f} s")
        elif LearningCurve(epochs=tuple(ours)).reached(theirs[-1].value, margin) is not None:
            break
        if not fault:
            try:
                ours.append(stretto.train_epoch())
            except StrettoError as error:
                if not ours:
                    raise
                fault = str(error)
                progress(f"epoch {number}, stretto: {fault}")
                continue
            last = epochs if number <= epochs else most
            progress(f"epoch {number} of {last}, stretto: {ours[-1].value:.4g} in {ours[-1].seconds:.1f} s")
    return Comparison(
        plain=LearningCurve(epochs=tuple(theirs)),
        stretto=LearningCurve(epochs=tuple(ours), error=fault),
        margin=margin,
    )


def _curves(comparison: Comparison) -> str:
    """Quality against seconds of updates, at the end of each epoch."""
    lines = []
    for name, curve, colour in (("plain", comparison.plain, GREY), ("stretto", comparison.stretto, BLUE)):
        seconds = list(itertools.accumulate(epoch.seconds for epoch in curve.epochs))
        values = [epoch.value if math.isfinite(epoch.value) else None for epoch in curve.epochs]
        lines.append(Line(name=name, colour=colour, xs=seconds, ys=values))
    panel = Panel(title="", x="seconds of updates", y="metric", lines=lines, x_scale="linear")
    return draw_figure([panel], size=(680, 320))
