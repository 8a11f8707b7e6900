"""Two workers beside one, and what more of them would reach."""

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal

from stretto.benchmarks.machine import Machine, machine_with
from stretto.benchmarks.workers_model import CostModel, Prediction, predict
from stretto.data.opening import open_sequences
from stretto.distributed.launching import start_workers
from stretto.errors import StrettoError
from stretto.storage import write_text_atomically
from stretto.tasks.registry import CONFIGS, TASKS
from stretto.training.config import Count, checked

MODULE: Final = "stretto.benchmarks.worker_updates"
WAYS: Final = {
    "1 worker, 1 thread": (1, 1),
    "2 workers, 1 thread each": (2, 1),
    "1 worker, 2 threads": (1, 2),
}
GOALS: Final = {"1 worker, 1 thread": 1.8, "1 worker, 2 threads": 1.0}
"""What two workers should reach over each."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkersBenchSettings:
    """Settings of `stretto bench workers`.

    Attributes:
        task: What to train.
        data: A file or folder of sequences; left out, the task's embedded data.
        batch_size: Sequences of each worker's batch.
        updates: Timed updates of each turn.
        rounds: Turns of each contestant.
        json: JSON file for the result.
    """

    task: Literal["handwriting", "classify", "language-model"] = "handwriting"
    data: Path | None = None
    batch_size: Count = 32
    updates: Count = 60
    rounds: Count = 3
    json: Path | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkersBench:
    """What was measured, and what follows from it.

    Attributes:
        speeds: Real steps a second of each way, a number a round.
        ratios: Two workers over each other way: of medians.
        waiting: Share of the time that two workers waited for each other.
        model: Seconds of an update.
        predictions: For ever more workers.
        off: How far the prediction for two workers is from what was measured, relative.
        machine: Where it ran.
        settings: As given.
    """

    speeds: dict[str, list[float]]
    ratios: dict[str, float]
    waiting: float
    model: CostModel
    predictions: tuple[Prediction, ...]
    off: float
    machine: Machine
    settings: dict[str, Any]

    def to_json(self) -> str:
        """The content of the JSON file."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def run_workers_bench(settings: WorkersBenchSettings, *, tell: Callable[[str], None]) -> WorkersBench:
    """Time updates of each way in turn, and predict."""
    # Here too, so that data which cannot be used are told of at once.
    data = TASKS[settings.task].embedded_data() if settings.data is None else open_sequences(settings.data)
    answers: dict[str, list[list[dict[str, Any]]]] = {way: [] for way in WAYS}
    with tempfile.TemporaryDirectory(prefix="stretto-") as place:
        for turn in range(settings.rounds):
            for way, (workers, threads) in WAYS.items():
                tell(f"round {turn + 1} of {settings.rounds}: {way}")
                answers[way].append(_run(settings, Path(place), workers=workers, threads=threads))
    speeds = {way: [_speed(ranks) for ranks in turns] for way, turns in answers.items()}
    middle = {way: statistics.median(values) for way, values in speeds.items()}
    two = "2 workers, 1 thread each"
    alone, pair = answers["1 worker, 1 thread"], answers[two]
    kind = TASKS[settings.task](checked(CONFIGS[settings.task], {}, source="the benchmark"), data)
    num_bytes = sum(4 * parameter.numel() for parameter in kind.build_model().parameters())
    exchanges = [
        (size, min(turn[0]["exchanges"][number][1] for turn in pair))
        for number, (size, _) in enumerate(pair[0][0]["exchanges"])
    ]
    updates = [update for turn in alone for update in turn[0]["updates"]]
    model = CostModel.fitted(updates, exchanges, num_bytes=num_bytes)
    tell("predicting more workers")
    predictions = predict(model, data.part("train").lengths_N, batch_size=settings.batch_size)
    measured = middle[two] / middle["1 worker, 1 thread"]
    predicted = predictions[1].steps_per_second / predictions[0].steps_per_second
    taken = [update for turn in pair for rank in turn for update in rank["updates"]]
    bench = WorkersBench(
        speeds=speeds,
        ratios={way: middle[two] / middle[way] for way in GOALS},
        waiting=sum(update["waited"] for update in taken) / sum(update["seconds"] for update in taken),
        model=model,
        predictions=tuple(predictions),
        off=predicted / measured - 1.0,
        machine=machine_with([]),
        settings={key: str(v) if isinstance(v, Path) else v for key, v in dataclasses.asdict(settings).items()},
    )
    if settings.json is not None:
        write_text_atomically(settings.json, bench.to_json())
    return bench


def _speed(ranks: Sequence[dict[str, Any]]) -> float:
    """Real steps a second of all workers together."""
    seconds = max(sum(update["seconds"] for update in rank["updates"]) for rank in ranks)
    return float(sum(update["steps_real"] for rank in ranks for update in rank["updates"]) / seconds)


def _run(settings: WorkersBenchSettings, folder: Path, *, workers: int, threads: int) -> list[dict[str, Any]]:
    asked = {
        "task": settings.task,
        "data": None if settings.data is None else str(settings.data.resolve()),
        "batch_size": settings.batch_size,
        "updates": settings.updates,
        "warm_up": 10,
        "threads": threads,
    }
    path = folder / "asked.json"
    path.write_text(json.dumps(asked), encoding="utf-8")
    if workers == 1:
        command = [sys.executable, "-m", MODULE, str(path)]
        code = subprocess.run(command, capture_output=True, check=False).returncode  # noqa: S603
    else:
        code = start_workers([str(path)], module=MODULE, workers=workers, threads=threads, restarts=0)
    if code:
        raise StrettoError(
            f"a worker ended with the code {code}", fix="Try the same task and data with `stretto train --workers 2`."
        )
    return [json.loads((folder / f"asked-{rank}.json").read_text(encoding="utf-8")) for rank in range(workers)]
