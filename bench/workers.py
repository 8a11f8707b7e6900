"""`python -m bench workers`: two ranks against one, in alternating whole runs of `stretto train`."""

import dataclasses
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any, Final, Literal, final

from bench.harness import Count, Report, Settings, bench
from stretto.errors import StrettoError
from stretto.training import read_events

ONE_RANK: Final = "1 rank, 1 thread"
TWO_RANKS: Final = "2 ranks, 1 thread each"
TWO_THREADS: Final = "1 rank, 2 threads"
INDEPENDENT: Final = "2 independent processes"
GOALS: Final = {ONE_RANK: 1.8, TWO_THREADS: 1.0}
"""What two ranks should reach over each."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Contender:
    """How training is started: processes that know nothing of each other, each with ranks and threads."""

    processes: int = 1
    nproc: int = 1
    threads: int = 1


CONTENDERS: Final = {
    ONE_RANK: Contender(),
    TWO_RANKS: Contender(nproc=2),
    TWO_THREADS: Contender(threads=2),
    INDEPENDENT: Contender(processes=2),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkersSettings(Settings):
    """Train with one rank and with two, and compare the real steps per second.

    Attributes:
        task: What to train.
        data: A file or folder of sequences; left out, the task's embedded data.
        batch_size: Sequences per batch of each rank.
        epochs: Timed epochs of each run, after one to warm up.
        rounds: Runs of each contender, in turn.
    """

    task: Literal["handwriting", "classify", "language-model"] = "handwriting"
    data: Path | None = None
    batch_size: Count = 32
    epochs: Count = 2
    rounds: Count = 3


@bench("workers", title="Two ranks against one")
def run(settings: WorkersSettings, report: Report) -> None:
    """Run every contender in turn."""
    if settings.quick:
        settings = dataclasses.replace(settings, epochs=1, rounds=1)
    speeds: dict[str, list[float]] = {name: [] for name in CONTENDERS}
    waits: list[float] = []
    for number in range(settings.rounds):
        for name, contender in CONTENDERS.items():
            report.progress(f"round {number + 1} of {settings.rounds}: {name}")
            runs = train(contender, settings)
            speeds[name].append(sum(steps_per_second(events) for events in runs))
            waits += [waiting_share(events) for events in runs if contender.nproc > 1]
    medians = {name: statistics.median(values) for name, values in speeds.items()}
    ratios = {name: medians[TWO_RANKS] / medians[name] for name in CONTENDERS}
    for name, goal in {} if settings.quick else GOALS.items():
        report.goal(f"2 ranks over {name}", ratios[name], at_least=goal)
    report.table(
        title=f"Training {settings.task}, real steps per second",
        columns=("contender", "median", "least", "most", "2 ranks over it"),
        rows=[(name, medians[name], min(values), max(values), ratios[name]) for name, values in speeds.items()],
        caption=f"Medians of {settings.rounds} runs in turn, {settings.epochs} epochs each after one to warm up. "
        f"Independent processes show what two cores of this machine give: two ranks reach "
        f"{ratios[INDEPENDENT]:.0%} of it. The ranks spent {statistics.mean(waits):.1%} of their time waiting for "
        "each other, the all-reduce of gradients included.",
    )


def train(contender: Contender, settings: WorkersSettings) -> list[list[dict[str, Any]]]:
    """The events of the timed epochs, for each process."""
    with tempfile.TemporaryDirectory(prefix="stretto-") as place:
        folders = [Path(place) / str(number) for number in range(contender.processes)]
        words = {
            "--epochs": settings.epochs + 1,
            "--batch-size": settings.batch_size,
            "--threads": contender.threads,
            "--nproc": contender.nproc,
            "--max-restarts": 0,
            **({} if settings.data is None else {"--data": settings.data.resolve()}),
        }
        command = [sys.executable, "-m", "stretto", "train", settings.task]
        command += [str(word) for pair in words.items() for word in pair]
        processes = [
            subprocess.Popen([*command, "--out", str(folder)], stdout=subprocess.DEVNULL)  # noqa: S603
            for folder in folders
        ]
        codes = [process.wait() for process in processes]
        if any(codes):
            raise StrettoError(
                f"training exited with code {max(codes)}", fix="See its message above, or run `stretto train` by hand."
            )
        return [[event for event in read_events(folder) if event.get("epoch", 0) >= 1] for folder in folders]


def steps_per_second(events: list[dict[str, Any]]) -> float:
    """The median over epochs, all ranks together."""
    return statistics.median(float(event["steps_per_second"]) for event in events if event["event"] == "epoch")


def waiting_share(events: list[dict[str, Any]]) -> float:
    """The share of the time that ranks waited for each other, the mean over ranks and epochs."""
    ranks = [event for event in events if event["event"] == "ranks"]
    return sum(sum(event["waited"]) for event in ranks) / max(1e-9, sum(sum(event["seconds"]) for event in ranks))
