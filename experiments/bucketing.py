"""The bucketing experiment: the same net to the same validation loss, with ever more buckets.

After Khomenko et al., "Accelerating recurrent neural network training using sequence bucketing and multi-GPU data
parallelization" (2016). Contenders differ in the number of buckets, and of workers, alone. They train an epoch each in
turn, so that a change of the machine's load hits all of them.
"""

import dataclasses
import json
import statistics
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, final

import numpy as np
from pydantic import Field
from torch import distributed

from stretto.data import PARTS, HandwritingSettings, Labels, SequenceSet, Transcripts, load_handwriting, open_sequences
from stretto.distributed import World
from stretto.errors import StrettoError
from stretto.files import write_text_atomically
from stretto.tasks import CONFIGS, TASKS
from stretto.training import Count, EpochRecord, EventLog, SilentLog, Trainer, checked

FULL_TRAIN: Final = 12_000
PATIENCE: Final = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class BucketingSettings:
    """Settings of `stretto reproduce bucketing`.

    Attributes:
        data: A data set that `stretto inspect` can read; left out, the embedded handwriting.
        out: The folder for the table, the plot and the JSON file.
        buckets: Numbers of buckets to compare; 1, no buckets, is the baseline and always taken.
        epochs: Epochs of the baseline; its best validation loss is the target of all.
        batch_size: Sequences in a batch, the same for all.
        num_train: Training sequences to use at most.
        hidden_size: Units of the recurrent layer.
        seed: Of weights, data and batches.
        nproc: Also train with 2, 4, ... up to so many ranks, each with batches of that size and as many threads.
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


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True, order=True)
class Contender:
    """Who trains: so many workers with so many buckets, of which 1 is none."""

    workers: int
    buckets: int


BASELINE: Final = Contender(workers=1, buckets=1)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BucketingRow:
    """One contender.

    Attributes:
        workers: How many train together.
        buckets: How many; 1 is none.
        epochs: Until the target loss was reached, or all there were.
        reached: Whether it was.
        epoch_seconds: Wall clock of an epoch's updates, the median.
        total_seconds: Of the epochs until the target.
        valid_loss: The best.
        padding: Share of slots.
        speed_up: Epoch time of the baseline over this one's: median of the ratios of interleaved epochs.
        slot_ratio: Slots of the baseline over this one's: the speed-up of each worker if time followed slots.
        losses: Validation loss after each epoch.
        seconds: Wall clock of each epoch.
    """

    workers: int
    buckets: int
    epochs: int
    reached: bool
    epoch_seconds: float
    total_seconds: float
    valid_loss: float
    padding: float
    speed_up: float
    slot_ratio: float
    losses: tuple[float, ...]
    seconds: tuple[float, ...]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class BucketingResult:
    """The experiment: its data, the target and a row a contender, the baseline first."""

    task: str
    data: str
    num_train: int
    target: float
    rows: tuple[BucketingRow, ...]
    settings: dict[str, Any]

    def to_json(self) -> str:
        """The content of `bucketing.json`."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def reproduce_bucketing(
    settings: BucketingSettings,
    *,
    watch: Callable[[Contender, EpochRecord], None] | None = None,
    world: World | None = None,
) -> BucketingResult:
    """Run the experiment and write `bucketing.json`.

    Args:
        settings: What to run.
        watch: If given, called after every epoch with the contender and the epoch's record.
        world: The workers, `settings.nproc` of them; of each contender the first so many take part.
    """
    world = world or World()
    if world.size != settings.nproc:
        raise StrettoError(
            f"the experiment with nproc={settings.nproc} was started as {world.size}",
            fix=f"Run python -m experiments bucketing --nproc {settings.nproc}, which starts them.",
        )
    data = _data(settings)
    name = _task_of(data)
    num_epochs = settings.epochs * (2 if settings.full else 1)
    contenders = [
        Contender(workers=workers, buckets=buckets)
        for workers in _worker_counts(settings.nproc)
        for buckets in sorted({1, *settings.buckets})
    ]
    with tempfile.TemporaryDirectory(prefix="stretto-") as scratch:
        trainers: dict[Contender, Trainer | None] = {}
        worlds = {workers: _first_workers(world, workers) for workers in _worker_counts(settings.nproc)}
        for number, contender in enumerate(contenders):
            own = worlds[contender.workers]
            run = Path(scratch) / str(number)
            trainers[contender] = own and _trainer(name, data, settings, contender, run=run, world=own)
        records = _race(trainers, num_epochs=num_epochs, watch=watch, world=world)
    target = min(record.valid_loss for record in records[BASELINE])
    result = BucketingResult(
        task=name,
        data=data.name,
        num_train=int((data.split_N == 0).sum()),
        target=target,
        rows=tuple(_row(contender, records, target=target) for contender in contenders),
        settings={key: str(v) if isinstance(v, Path) else v for key, v in dataclasses.asdict(settings).items()},
    )
    if world.is_rank0:
        write_text_atomically(settings.out / "bucketing.json", result.to_json())
    return result


def _worker_counts(most: int) -> list[int]:
    """1, 2, 4, ... and the most."""
    return sorted({2**power for power in range(most.bit_length()) if 2**power <= most} | {most})


def _first_workers(world: World, count: int) -> World | None:
    """The first so many workers as a world of their own; None on those that are left out. All must ask."""
    if count == world.size:
        return world
    group = distributed.new_group(list(range(count))) if count > 1 else None
    return World(rank=world.rank, size=count, group=group) if world.rank < count else None


def _race(
    trainers: dict[Contender, Trainer | None],
    *,
    num_epochs: int,
    watch: Callable[[Contender, EpochRecord], None] | None,
    world: World,
) -> dict[Contender, list[EpochRecord]]:
    """An epoch of each in turn; who has not reached the baseline's best loss by then gets as many epochs again."""
    records: dict[Contender, list[EpochRecord]] = {contender: [] for contender in trainers}
    for done in range(PATIENCE * num_epochs):
        for contender, trainer in trainers.items():
            if done >= num_epochs:
                target = min(record.valid_loss for record in records[BASELINE])
                if min(record.valid_loss for record in records[contender]) <= target:
                    continue
            own = None if trainer is None else dataclasses.asdict(trainer.train_epoch())
            # All hear of it, those too that wait while fewer workers train.
            record = EpochRecord(**json.loads(world.broadcast_str(json.dumps(own))))
            records[contender].append(record)
            if watch is not None:
                watch(contender, record)
    return records


def _row(contender: Contender, records: dict[Contender, list[EpochRecord]], *, target: float) -> BucketingRow:
    own, baseline = records[contender], records[BASELINE]
    losses = [record.valid_loss for record in own]
    reached = min(losses) <= target
    epochs = next((n + 1 for n, loss in enumerate(losses) if loss <= target), len(losses))
    seconds = [record.seconds for record in own]
    ratios = [base.seconds / record.seconds for base, record in zip(baseline, own, strict=False)]
    return BucketingRow(
        workers=contender.workers,
        buckets=contender.buckets,
        epochs=epochs,
        reached=reached,
        epoch_seconds=statistics.median(seconds),
        total_seconds=sum(seconds[:epochs]),
        valid_loss=min(losses),
        padding=statistics.mean(record.padding for record in own),
        speed_up=statistics.median(ratios),
        slot_ratio=(1 - statistics.mean(r.padding for r in own)) / (1 - statistics.mean(r.padding for r in baseline)),
        losses=tuple(losses),
        seconds=tuple(seconds),
    )


def _trainer(
    name: str, data: SequenceSet, settings: BucketingSettings, contender: Contender, *, run: Path, world: World
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
        # The compiled kernels skip padding by themselves; the question here is what padding costs where it is computed.
        "backend": "torch",
    }
    task = TASKS[name](checked(CONFIGS[name], values, source="the experiment"), data)
    log = EventLog(run / "events.jsonl") if world.is_rank0 else SilentLog()
    return Trainer(task, run=run, log=log, resume=False, world=world)


def _data(settings: BucketingSettings) -> SequenceSet:
    if settings.data is None:
        made = HandwritingSettings(num_train=FULL_TRAIN) if settings.full else HandwritingSettings()
        data = load_handwriting(made)
    else:
        data = open_sequences(settings.data)
    if settings.full:
        return data
    rng = np.random.default_rng(settings.seed)
    chosen = []
    for number in range(len(PARTS)):
        members = np.flatnonzero(data.split_N == number)
        most = settings.num_train if number == 0 else max(1, settings.num_train // 4)
        chosen.append(np.sort(rng.permutation(members)[:most]))
    return data.subset(np.concatenate(chosen))


def _task_of(data: SequenceSet) -> str:
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
