"""Two workers beside one, and what more of them would reach."""

import dataclasses
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Final, Literal, final

from bench.machine import Machine, machine_with
from bench.stragglers import (
    NUM_BUCKETS,
    Straggling,
    Waiting,
    simulated_waiting,
    straggling_contestants,
)
from bench.workers_model import CostModel, Prediction, predict
from stretto.data import open_sequences
from stretto.distributed import launch_ranks
from stretto.errors import StrettoError
from stretto.files import write_text_atomically
from stretto.tasks import CONFIGS, TASKS
from stretto.training import Count, checked

MODULE: Final = "bench.worker_updates"
TWO: Final = "2 workers, 1 thread each"
APART: Final = "2 processes that exchange nothing"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Way:
    """One way to train.

    Attributes:
        processes: How many train at the same time.
        threads: Of each.
        apart: Whether they train each for itself.
        sampler: Whose batches; None is ours with batches of so many sequences, as `stretto train` has them.
    """

    processes: int
    threads: int
    apart: bool = False
    sampler: str | None = None


WAYS: Final = {
    "1 worker, 1 thread": Way(processes=1, threads=1),
    TWO: Way(processes=2, threads=1),
    "1 worker, 2 threads": Way(processes=1, threads=2),
    APART: Way(processes=2, threads=1, apart=True),
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
        out: Folder for the page with tables and plots, the picture and the JSON file.
        json: JSON file for the result.
    """

    task: Literal["handwriting", "classify", "language-model"] = "handwriting"
    data: Path | None = None
    batch_size: Count = 32
    updates: Count = 60
    rounds: Count = 3
    out: Path | None = None
    json: Path | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class WorkersBench:
    """What was measured, and what follows from it.

    Attributes:
        speeds: Real steps a second of each way, a number a round.
        ratios: Two workers over each other way: of medians.
        waiting: What two workers lost by waiting for each other.
        stragglers: How two workers fare with batches of ours, of Lhotse's and without a thought of length.
        model: Seconds of an update.
        predictions: For ever more workers.
        off: How far the prediction for two workers is from what was measured, relative.
        off_apart: The same, when two processes that exchange nothing count as twice one.
        machine: Where it ran.
        settings: As given.
        missing: What was left out, and why.
    """

    speeds: dict[str, list[float]]
    ratios: dict[str, float]
    waiting: Waiting
    stragglers: tuple[Straggling, ...]
    model: CostModel
    predictions: tuple[Prediction, ...]
    off: float
    off_apart: float
    machine: Machine
    settings: dict[str, Any]
    missing: tuple[str, ...]

    def to_json(self) -> str:
        """The content of the JSON file."""
        return json.dumps(dataclasses.asdict(self), indent=2) + "\n"


def run_workers_bench(settings: WorkersBenchSettings, *, tell: Callable[[str], None]) -> WorkersBench:
    """Time updates of each way in turn, and predict."""
    # Here too, so that data which cannot be used are told of at once.
    data = TASKS[settings.task].embedded_data() if settings.data is None else open_sequences(settings.data)
    task = TASKS[settings.task](checked(CONFIGS[settings.task], {}, source="the benchmark"), data)
    contestants, missing = straggling_contestants()
    ways = WAYS | {name: Way(processes=2, threads=1, sampler=name) for name in contestants}
    answers: dict[str, list[list[dict[str, Any]]]] = {way: [] for way in ways}
    with tempfile.TemporaryDirectory(prefix="stretto-") as place:
        for turn in range(settings.rounds):
            for name, way in ways.items():
                tell(f"round {turn + 1} of {settings.rounds}: {name}")
                answers[name].append(_run(settings, Path(place), way))
    speeds = {way: [_speed(ranks) for ranks in turns] for way, turns in answers.items()}
    middle = {way: statistics.median(values) for way, values in speeds.items()}
    alone, pair = answers["1 worker, 1 thread"], answers[TWO]
    num_bytes = sum(4 * parameter.numel() for parameter in task.build_model().parameters())
    exchanges = [
        (size, min(turn[0]["exchanges"][number][1] for turn in pair))
        for number, (size, _) in enumerate(pair[0][0]["exchanges"])
    ]
    updates = [update for turn in alone for update in turn[0]["updates"]]
    model = CostModel.fitted(updates, exchanges, num_bytes=num_bytes)
    tell("predicting more workers")
    lengths_N = task.data.part("train").lengths_N
    predictions = predict(model, lengths_N, batch_size=settings.batch_size)
    measured = middle[TWO] / middle["1 worker, 1 thread"]
    predicted = predictions[1].steps_per_second / predictions[0].steps_per_second
    allowed = middle[APART] / (2 * middle["1 worker, 1 thread"])
    stragglers = [
        Straggling(
            sampler=name,
            waiting=Waiting.of(answers[name], a_step=model.a_step).total,
            steps_per_second=middle[name],
            simulated=simulated_waiting(name, model, lengths_N, batch_size=settings.batch_size),
        )
        for name in contestants
    ]
    bench = WorkersBench(
        speeds={way: speeds[way] for way in WAYS},
        ratios={way: middle[TWO] / middle[way] for way in WAYS if way != TWO},
        waiting=Waiting.of(pair, a_step=model.a_step),
        stragglers=tuple(stragglers),
        model=model,
        predictions=tuple(predictions),
        off=predicted / measured - 1.0,
        off_apart=predicted * allowed / measured - 1.0,
        machine=machine_with([]),
        settings={key: str(v) if isinstance(v, Path) else v for key, v in dataclasses.asdict(settings).items()},
        missing=tuple(missing),
    )
    if settings.json is not None:
        write_text_atomically(settings.json, bench.to_json())
    return bench


def _speed(ranks: Sequence[dict[str, Any]]) -> float:
    """Real steps a second of all workers together."""
    seconds = max(sum(update["seconds"] for update in rank["updates"]) for rank in ranks)
    return float(sum(update["steps_real"] for rank in ranks for update in rank["updates"]) / seconds)


def _run(settings: WorkersBenchSettings, folder: Path, way: Way) -> list[dict[str, Any]]:
    asked = {
        "task": settings.task,
        "data": None if settings.data is None else str(settings.data.resolve()),
        "batch_size": settings.batch_size,
        "updates": settings.updates,
        "warm_up": 10,
        "threads": way.threads,
        "sampler": way.sampler,
        "num_buckets": NUM_BUCKETS,
    }
    together = way.processes > 1 and not way.apart
    paths = [folder / f"asked-{number}.json" for number in range(1 if together else way.processes)]
    for rank, path in enumerate(paths):
        path.write_text(json.dumps({**asked, "rank": rank, "size": way.processes}), encoding="utf-8")
    if together:
        codes = [launch_ranks([str(paths[0])], module=MODULE, nproc=2, threads=way.threads, max_restarts=0)]
    else:
        commands = [[sys.executable, "-m", MODULE, str(path)] for path in paths]
        processes = [subprocess.Popen(command, stdout=subprocess.DEVNULL) for command in commands]  # noqa: S603
        codes = [process.wait() for process in processes]
    if any(codes):
        raise StrettoError(
            f"a worker ended with the code {max(codes)}",
            fix="Try the same task and data with `stretto train --nproc 2`.",
        )
    answers = [folder / f"{paths[0 if together else rank].stem}-{rank}.json" for rank in range(way.processes)]
    return [json.loads(answer.read_text(encoding="utf-8")) for answer in answers]
