"""The whole of Stretto beside a plain PyTorch script of the same model: how much sooner is the same quality reached?"""

import contextlib
import dataclasses
import functools
import json
import math
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, final, get_args

import torch
from pydantic import Field

from bench.machine import Machine, machine_with
from bench.training_contest import Contest, Margin, in_turn
from bench.training_data import open_data, some_of
from bench.training_gate import Start, pass_start
from bench.training_pairs import rival_of
from bench.training_sides import PlainSide, StrettoSide
from stretto.data import SequenceSet
from stretto.errors import StrettoError
from stretto.files import write_text_atomically
from stretto.tasks import CONFIGS, task_named
from stretto.training import AbstractTask, Count, NotNegative, TrainConfig, checked, with_preset

TaskName = Literal["digits", "digit-images", "language-model", "translate", "handwriting"]
TASK_NAMES: Final[tuple[TaskName, ...]] = get_args(TaskName)
GOAL: Final = 5.3
"""What the geometric mean should reach: what large batches gave You et al. on average, with more hardware."""
QUICK_EPOCHS: Final = 2
QUICK_FRACTION: Final = 0.05
SHARES: Final[dict[str, float]] = {"digits": 0.2, "digit-images": 0.1, "language-model": 0.05, "translate": 0.05}
"""How much of data in a folder is trained on unless another share is asked for."""
WITHOUT_END: Final = 1e6
"""Minutes between checkpoints within an epoch, so that there are none."""
ASKED: Final[dict[str, dict[str, Any]]] = {"language-model": {"preset": "ptb-small"}}
"""Settings of tasks that are not their defaults."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainingBenchSettings:
    """Settings of `stretto bench training`.

    Attributes:
        tasks: What to train.
        data: A folder with the data sets mnist, ptb and multi30k_en_de, or some of them; left out, and for tasks whose
            data are not there, the embedded data.
        epochs: Of the plain script; left out, as many as the task has. Stretto may train half as many more.
        fraction: The share of the training data to use; left out, all of the embedded data, and of those in a folder
            as much as lets the five tasks end within half an hour on two cores.
        batch_size: Auto lets Stretto choose the batch by measuring, from the task's own on; own keeps that.
        accuracy_points: How many percent points of accuracy below the plain script's last epoch count as the same.
        perplexity_percent: The same for perplexity, in percent above it.
        cer_points: The same for the character error rate, in percent points above it.
        bleu_points: The same for BLEU, in points below it.
        seed: Of the first weights and the order of data.
        threads: Threads of torch; as many as it has by default.
        quick: Two epochs on a twentieth of the data: shows that it works, and no more; its times mean nothing.
        out: Folder for the page with tables and plots, and the JSON file.
        json: JSON file for the result, written after each task.
    """

    tasks: tuple[TaskName, ...] = TASK_NAMES
    data: Path | None = None
    epochs: Count | None = None
    fraction: Annotated[float, Field(gt=0.0, le=1.0)] | None = None
    batch_size: Literal["auto", "own"] = "auto"
    accuracy_points: NotNegative = 0.2
    perplexity_percent: NotNegative = 1.0
    cer_points: NotNegative = 0.3
    bleu_points: NotNegative = 0.5
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    threads: Count | None = None
    quick: bool = False
    out: Path | None = None
    json: Path | None = None

    def margin(self, metric: str) -> Margin:
        """What counts as the same quality."""
        margins = {
            "accuracy": Margin(amount=self.accuracy_points / 100, higher_is_better=True),
            "perplexity": Margin(amount=self.perplexity_percent / 100, relative=True),
            "cer": Margin(amount=self.cer_points / 100),
            "bleu": Margin(amount=self.bleu_points, higher_is_better=True),
        }
        return margins[metric]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TaskRow:
    """One task.

    Attributes:
        task: Its name.
        data: What it was trained on.
        sequences: Training sequences.
        metric: What quality is.
        epochs: Of the plain script.
        start: What both sides made of the same weights before.
        contest: How they fared.
        decisions: On the batch, those to keep it left out.
    """

    task: str
    data: str
    sequences: int
    metric: str
    epochs: int
    start: Start
    contest: Contest
    decisions: tuple[str, ...]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class TrainingBench:
    """The result of one run.

    Attributes:
        rows: One a task, those included that did not reach the target.
        geometric_mean: Of the ratios of all tasks; where some did not reach the target the true one is smaller.
        threads: torch's.
        machine: Where it ran.
        settings: As given.
        missing: What was not as asked for, and why.
        seconds: Time of the whole run.
    """

    rows: tuple[TaskRow, ...]
    geometric_mean: float
    threads: int
    machine: Machine
    settings: dict[str, Any]
    missing: tuple[str, ...]
    seconds: float

    @property
    def not_reached(self) -> tuple[str, ...]:
        """The tasks that did not reach what the plain script had."""
        return tuple(row.task for row in self.rows if not row.contest.is_reached)

    def to_json(self) -> str:
        """The content of the JSON file; what is no number is null."""
        values = _with_null({**dataclasses.asdict(self), "not_reached": self.not_reached})
        return json.dumps(values, indent=2, allow_nan=False) + "\n"


def run_training_bench(settings: TrainingBenchSettings, *, tell: Callable[[str], None]) -> TrainingBench:
    """Train each task on both sides, epoch by epoch in turn, once both have shown that they begin alike.

    Args:
        settings: What to train, and how much.
        tell: Called with how far it is.

    Raises:
        StrettoError: The settings or data cannot be used, or the two sides of a task are not the same model.
    """
    if not settings.tasks or len(set(settings.tasks)) < len(settings.tasks):
        raise StrettoError(
            f"the tasks to train are {list(settings.tasks)}", fix=f"Name each once, of {', '.join(TASK_NAMES)}."
        )
    begun = time.perf_counter()
    missing: list[str] = []
    rows: list[TaskRow] = []
    with _threads(settings.threads):
        for name in settings.tasks:
            rows.append(_row(name, settings, missing=missing, tell=functools.partial(_tell_of, name, tell)))
            bench = TrainingBench(
                rows=tuple(rows),
                geometric_mean=statistics.geometric_mean(row.contest.ratio for row in rows),
                threads=torch.get_num_threads(),
                machine=machine_with([]),
                settings={key: str(v) if isinstance(v, Path) else v for key, v in dataclasses.asdict(settings).items()},
                missing=tuple(missing),
                seconds=time.perf_counter() - begun,
            )
            if settings.json is not None:
                write_text_atomically(settings.json, bench.to_json())
    return bench


def _tell_of(name: str, tell: Callable[[str], None], line: str) -> None:
    tell(f"{name}: {line}")


def _row(name: str, settings: TrainingBenchSettings, *, missing: list[str], tell: Callable[[str], None]) -> TaskRow:
    tell("data")
    opened = open_data(name, settings.data)
    missing += [opened.note] if opened.note else []
    share = _share(name, settings, is_embedded=opened.is_embedded)
    if share < 1.0 and settings.fraction is None and not settings.quick:
        missing.append(f"{name}: trained on {share:.0%} of {opened.data.name}; --fraction 1 takes all of it")
    data = _cut(opened.data, share, settings)
    task = _task(name, settings, data, missing=missing)
    margin = settings.margin(task.metric)
    with tempfile.TemporaryDirectory(prefix="stretto-") as place:
        stretto = StrettoSide(task, run=Path(place))
        rival = rival_of(task, data)
        tell("both sides with the same weights")
        start = pass_start(task, stretto, rival, margin=margin)
        contest = in_turn(
            PlainSide(rival.script, batch_size=rival.batch_size),
            stretto,
            epochs=task.config.epochs,
            margin=margin,
            tell=tell,
        )
    if contest.stretto.fault:
        missing.append(f"{name}: stretto stopped after {len(contest.stretto.turns)} epochs: {contest.stretto.fault}")
    return TaskRow(
        task=name,
        data=data.name,
        sequences=len(data.part("train")),
        metric=task.metric,
        epochs=task.config.epochs,
        start=start,
        contest=contest,
        decisions=tuple(stretto.watch.decisions),
    )


def _share(name: str, settings: TrainingBenchSettings, *, is_embedded: bool) -> float:
    """How much of the training data is used."""
    usual = QUICK_FRACTION if settings.quick else 1.0 if is_embedded else SHARES.get(name, 1.0)
    return settings.fraction or usual


def _cut(data: SequenceSet, share: float, settings: TrainingBenchSettings) -> SequenceSet:
    """So much of the data; quick runs measure on less, too."""
    if share < 1.0:
        data = some_of(data, part="train", fraction=share, seed=settings.seed)
    return some_of(data, part="valid", fraction=2 * QUICK_FRACTION, seed=settings.seed) if settings.quick else data


def _task(name: str, settings: TrainingBenchSettings, data: SequenceSet, *, missing: list[str]) -> AbstractTask[Any]:
    asked: dict[str, Any] = {**ASKED.get(name, {}), "seed": settings.seed, "checkpoint_minutes": WITHOUT_END}
    epochs = settings.epochs or (QUICK_EPOCHS if settings.quick else None)
    if epochs is not None:
        asked["epochs"] = epochs
    config = _config(name, asked)
    if settings.batch_size == "auto":
        try:
            config = _config(name, {**asked, "batch_size": "auto", "base_batch_size": config.rows})
        except StrettoError:
            missing.append(f"{name}: the task takes no batch size of auto; it trained with its own, {config.rows}")
    return task_named(name)(config, data)


def _config(name: str, values: dict[str, Any]) -> TrainConfig:
    return checked(CONFIGS[name], with_preset(CONFIGS[name], values), source="the benchmark")


def _with_null(value: Any) -> Any:
    """JSON has no word for what is no number."""
    if isinstance(value, dict):
        return {key: _with_null(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_with_null(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


@contextlib.contextmanager
def _threads(count: int | None) -> Iterator[None]:
    """So many threads of torch's, and as before afterwards."""
    earlier = torch.get_num_threads()
    torch.set_num_threads(count or earlier)
    try:
        yield
    finally:
        torch.set_num_threads(earlier)
