"""The bucketing experiment: the same net to the same validation loss, with ever more length buckets.

After Khomenko et al., "Accelerating recurrent neural network training using sequence bucketing and multi-GPU data
parallelization" (2016). Contenders differ only in the number of buckets and of ranks. They train one epoch each in
turn, so that a change of the machine's load affects all of them.
"""

import dataclasses
import itertools
import json
import os
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, final

import numpy as np
from pydantic import Field
from torch import distributed

from bench.figure import AMBER, Line, Panel, draw_figure
from bench.harness import Report, Settings
from experiments.registry import experiment, to_dict
from stretto.data import PARTS, Labels, SequenceSet, Transcripts, load_handwriting, open_sequences
from stretto.distributed import World, join_ranks
from stretto.errors import StrettoError
from stretto.tasks import TASKS
from stretto.timing import torch_threads
from stretto.training import Count, EpochRecord, EventLog, SilentLog, Trainer, validate

FULL_NUM_TRAIN: Final = 12_000
MAX_EPOCHS_RATIO: Final = 2
"""A contender may train this many times the baseline's epochs to reach the target."""
TIMEOUT_MINUTES: Final = 120.0
"""Ranks wait this long for an epoch of the others."""
SHADES: Final = ("#b9cbdc", "#8fb0cb", "#6690b5", "#2f5d8a", "#1d3c5c", "#2b2350")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketingSettings(Settings):
    """Settings of `python -m experiments bucketing`.

    Attributes:
        data: A data set that `stretto inspect` can read; by default the embedded handwriting.
        out: The folder for the page, the figure and the JSON file.
        buckets: Numbers of buckets to compare; 1, no buckets, is the baseline and always included.
        epochs: Epochs of the baseline; its best validation loss is the target for all.
        batch_size: Sequences per batch and rank.
        num_train: Training sequences to use at most.
        hidden_size: Units of the recurrent layer.
        seed: Of weights, data and batches.
        nproc: Also train with 2, 4, ... up to this many ranks, each with batches of that size.
        full: The long version: all data, or 12,000 lines of the embedded, and twice the epochs.
    """

    data: Path | None = None
    out: Path = Path("runs/reproduce-bucketing")
    buckets: tuple[Annotated[int, Field(ge=1)], ...] = (2, 4, 8, 16, 32)
    epochs: Count = 8
    batch_size: Count = 32
    num_train: Count = 2400
    hidden_size: Count = 96
    seed: Annotated[int, Field(ge=0)] = 0
    nproc: Count = 1
    full: bool = False

    def tiny(self) -> "BucketingSettings":
        """The same for a smoke test."""
        return dataclasses.replace(self, buckets=(2,), epochs=1, batch_size=8, num_train=64, hidden_size=4)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """A number of ranks and a number of buckets; 1 bucket is none."""

    ranks: int
    buckets: int

    def __str__(self) -> str:
        buckets = "no buckets" if self.buckets == 1 else f"{self.buckets} buckets"
        return buckets if self.ranks == 1 else f"{self.ranks} ranks, {buckets}"


BASELINE: Final = Contender(ranks=1, buckets=1)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BucketingRow:
    """The result of one contender."""

    contender: Contender
    epochs: int  # until the target loss was reached, or all that were run
    reached: bool
    epoch_seconds: float  # of the updates, the median
    total_seconds: float  # of the epochs until the target
    valid_loss: float  # the best
    padding: float  # share of the padded steps
    speed_up: float  # epoch time of the baseline over this one's: median of the ratios of interleaved epochs
    padded_step_ratio: float  # padded steps of the baseline over this one's: the speed-up if time followed them
    losses: tuple[float, ...]  # on the validation part, after each epoch
    seconds: tuple[float, ...]  # of each epoch


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BucketingResult:
    """The experiment: its data, the target loss and one row per contender, the baseline first."""

    task: str
    data: str
    num_train: int
    target: float
    rows: tuple[BucketingRow, ...]
    settings: dict[str, Any]


def reproduce_bucketing(
    settings: BucketingSettings, *, progress: Callable[[str], None] = lambda _: None, world: World | None = None
) -> BucketingResult:
    """Run the experiment.

    Of the `settings.nproc` ranks of `world`, a contender with fewer uses the first.

    Raises:
        StrettoError: If the data do not fit, or the ranks are not as many as the settings say.
    """
    world = world or World()
    if world.size != settings.nproc:
        raise StrettoError(
            f"the experiment with nproc={settings.nproc} was started as {world.size}",
            fix=f"Run python -m experiments bucketing --nproc {settings.nproc}, which starts them.",
        )
    settings = settings.tiny() if settings.quick else settings
    data = _open_data(settings)
    task = _task_for(data)
    rank_counts = sorted({2**power for power in range(settings.nproc.bit_length())} | {settings.nproc})
    contenders = [
        Contender(ranks=ranks, buckets=buckets) for ranks in rank_counts for buckets in sorted({1, *settings.buckets})
    ]
    with tempfile.TemporaryDirectory(prefix="stretto-") as scratch:
        trainers: dict[Contender, Trainer | None] = {}
        worlds = {ranks: _first_ranks(world, ranks) for ranks in rank_counts}
        for number, contender in enumerate(contenders):
            own = worlds[contender.ranks]
            run = Path(scratch) / str(number)
            trainers[contender] = own and _make_trainer(task, data, settings, contender, run=run, world=own)
        num_epochs = settings.epochs * (2 if settings.full else 1)
        records = _train_in_turn(trainers, num_epochs=num_epochs, progress=progress, world=world)
    target = min(record.valid_loss for record in records[BASELINE])
    return BucketingResult(
        task=task,
        data=data.name,
        num_train=int((data.split_N == 0).sum()),
        target=target,
        rows=tuple(_row(contender, records, target=target) for contender in contenders),
        settings=to_dict(settings),
    )


def _first_ranks(world: World, count: int) -> World | None:
    """The first `count` ranks as a world of their own; None on the others. Collective: all ranks must call it."""
    if count == world.size:
        return world
    group = distributed.new_group(list(range(count))) if count > 1 else None
    return World(rank=world.rank, size=count, group=group) if world.rank < count else None


def _train_in_turn(
    trainers: dict[Contender, Trainer | None], *, num_epochs: int, progress: Callable[[str], None], world: World
) -> dict[Contender, list[EpochRecord]]:
    """An epoch of each in turn; those that have not reached the baseline's best loss get as many epochs again."""
    records: dict[Contender, list[EpochRecord]] = {contender: [] for contender in trainers}
    for done in range(MAX_EPOCHS_RATIO * num_epochs):
        for contender, trainer in trainers.items():
            if done >= num_epochs:
                target = min(record.valid_loss for record in records[BASELINE])
                if min(record.valid_loss for record in records[contender]) <= target:
                    continue
            own = None if trainer is None else dataclasses.asdict(trainer.train_epoch())
            # Broadcast, so that ranks that do not train here wait, and know when a contender is done.
            record = EpochRecord(**json.loads(world.broadcast_str(json.dumps(own))))
            records[contender].append(record)
            progress(
                f"{contender!s:<22} epoch {record.epoch:>2}  valid {record.valid_loss:.4f}  {record.seconds:6.2f} s  "
                f"padding {record.padding:.1%}"
            )
    return records


def _row(contender: Contender, records: dict[Contender, list[EpochRecord]], *, target: float) -> BucketingRow:
    own, baseline = records[contender], records[BASELINE]
    losses, seconds = [record.valid_loss for record in own], [record.seconds for record in own]
    epochs = next((n + 1 for n, loss in enumerate(losses) if loss <= target), len(losses))
    padding, base_padding = (statistics.mean(record.padding for record in each) for each in (own, baseline))
    return BucketingRow(
        contender=contender,
        epochs=epochs,
        reached=min(losses) <= target,
        epoch_seconds=statistics.median(seconds),
        total_seconds=sum(seconds[:epochs]),
        valid_loss=min(losses),
        padding=padding,
        speed_up=statistics.median(base.seconds / record.seconds for base, record in zip(baseline, own, strict=False)),
        padded_step_ratio=(1 - padding) / (1 - base_padding),
        losses=tuple(losses),
        seconds=tuple(seconds),
    )


def _make_trainer(
    task: str, data: SequenceSet, settings: BucketingSettings, contender: Contender, *, run: Path, world: World
) -> Trainer:
    values = {
        "epochs": settings.epochs,
        "batch_size": settings.batch_size,
        "hidden_size": settings.hidden_size,
        "seed": settings.seed,
        "num_buckets": contender.buckets,
        # With a rate that does not depend on the length of the run, epochs to the target can be compared.
        "schedule": "constant",
        "learning_rate": 3e-3,
        # The compiled kernels skip padding anyway; the question here is what padding costs where it is computed.
        "backend": "torch",
    }
    config = validate(TASKS[task].Config, values, source="the experiment")
    log = EventLog(run / "events.jsonl") if world.is_rank0 else SilentLog()
    return Trainer(TASKS[task](config, data), run=run, log=log, resume=False, world=world)


def _open_data(settings: BucketingSettings) -> SequenceSet:
    if settings.data is None:
        data = load_handwriting(num_train=FULL_NUM_TRAIN) if settings.full else load_handwriting()
    else:
        data = open_sequences(settings.data)
    if settings.full:
        return data
    rng = np.random.default_rng(settings.seed)
    chosen = []
    for number in range(len(PARTS)):
        members = np.flatnonzero(data.split_N == number)
        count = settings.num_train if number == 0 else max(1, settings.num_train // 4)
        chosen.append(np.sort(rng.permutation(members)[:count]))
    return data.subset(np.concatenate(chosen))


def _task_for(data: SequenceSet) -> str:
    if isinstance(data.targets, Transcripts):
        return "handwriting"
    if isinstance(data.targets, Labels):
        return "classify"
    if data.alphabet:
        return "language-model"
    raise StrettoError(
        f"{data.name} has nothing to learn: no transcripts, labels or text",
        fix="Give a set with targets, for example a ragged .npz with `y`.",
    )


@experiment("bucketing", title="Sequence bucketing")
def run(settings: BucketingSettings, report: Report) -> None:
    """The same net to the same loss with ever more length buckets (Khomenko et al. 2016)."""
    with (
        join_ranks(timeout_minutes=TIMEOUT_MINUTES) as world,
        torch_threads(None if world.size == 1 else max(1, (os.cpu_count() or 1) // world.size)),
    ):
        result = reproduce_bucketing(settings, progress=report.progress, world=world)
    show(result, report)


def show(result: BucketingResult, report: Report) -> None:
    """Write tables and figure into a report."""
    report.result = to_dict(result)
    report.table(
        title=f"{result.task} on {result.data}, {result.num_train:,} training sequences, to validation loss "
        f"{result.target:.4f}",
        columns=("contender", "s/epoch", "epochs", "total s", "loss", "padding %", "faster", "steps x", "share"),
        rows=[
            (
                str(row.contender),
                row.epoch_seconds,
                row.epochs if row.reached else f"> {row.epochs}",
                row.total_seconds,
                round(row.valid_loss, 4),
                100 * row.padding,
                row.speed_up,
                row.padded_step_ratio,
                row.speed_up / (row.padded_step_ratio * row.contender.ranks),
            )
            for row in result.rows
        ],
        caption="s/epoch: median, without validation; total s: until the loss was reached; loss: the best; faster: "
        "median of the ratios of interleaved epochs; steps x: how many times fewer padded steps; share: of the "
        "speed-up that padded steps and ranks allow. Contenders train an epoch each in turn, from the same initial "
        "weights. The target is the best validation loss of the baseline.",
    )
    baseline, best = result.rows[0], min(result.rows, key=lambda row: (not row.reached, row.total_seconds))
    report.note(
        f"{baseline.total_seconds / best.total_seconds:.1f} x sooner to the same loss with {best.contender}, padding "
        f"{best.padding:.1%} instead of {baseline.padding:.1%}"
    )
    if any(row.contender.ranks > 1 for row in result.rows):
        report.note(
            "every rank has batches of the same size and as many threads, so the batch of an update grows with the "
            "number of ranks, and so may the epochs until the loss is reached"
        )
    counts = sorted({row.contender.buckets for row in result.rows} - {1})
    colours = {1: AMBER} | {count: SHADES[min(at, len(SHADES) - 1)] for at, count in enumerate(counts)}
    lines = [
        Line(
            name=str(row.contender),
            colour=colours[row.contender.buckets],
            xs=list(itertools.accumulate(row.seconds)),
            ys=row.losses,
            dashed=row.contender.ranks > 1,
        )
        for row in result.rows
    ]
    title = "Validation loss against time; left is sooner"
    panel = Panel(
        title=title,
        x="seconds of training",
        y="validation loss",
        lines=lines,
        x_scale="linear",
        y_scale="log",
        level=result.target,
    )
    report.plot(draw_figure([panel], size=(760, 340)), title=title, caption="Dashed line: the target.")
