"""`python -m bench faults`: ranks killed, stopped or left without disk space while they train.

Runs train the same net: one undisturbed, the others with faults injected, up to 25 each. Afterwards every sequence of
every epoch must have been used exactly once, and the final weights must be equal to the last bit. Then runs of every
task, with one rank and with two, are killed at a random moment: before the first checkpoint, while they train, while
the report is written. Each is resumed, and must end with the weights, the losses and the metrics of a run that was not
killed, and with a report. Last, one of two nodes is dropped and comes back. Nodes are launchers of torchrun's on this
machine, inside a network namespace that has nothing but loopback.

The first undisturbed run starts as a user starts it; the others, and their ranks, fork from a server that has imported
torch (`bench.quick_python`), without which most of the time would go into imports.

Shape legend: N sequences, S steps of all of them, F features.
"""

import collections
import concurrent.futures
import contextlib
import dataclasses
import functools
import itertools
import json
import os
import re
import resource
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import safetensors.torch
import torch
from pydantic import Field

from bench.harness import Count, Report, Settings, bench
from bench.quick_python import QuickPython
from stretto.data import Labels, SequenceSet, write_npz
from stretto.errors import StrettoError
from stretto.report import PAGE_NAME
from stretto.runs import RESULT_FILE
from stretto.tasks import TASKS, find_task
from stretto.training import CHECKPOINT_FOLDER, EVENTS_FILE, MODEL_FILE, read_events

KINDS: Final[dict[str, str]] = {
    "one": "SIGKILL of a random rank",
    "all": "SIGKILL of all ranks",
    "saving": "SIGKILL of rank 0 while it writes a checkpoint",
    "stopped": "SIGSTOP of a random rank, past the time-out",
    "full": "a full disk",
}
NUM_TRAINED: Final = 200
EPOCHS_PER_FAULT: Final = 12
MAX_FAULTS_PER_RUN: Final = 25
"""A run reads its record when it is resumed, so that many short runs take less time than a long one."""
PAUSE_EVENTS: Final = (10, 80)
MAX_PAUSE_SECONDS: Final = 0.02
"""Between a fault and the next: at least and at most so many events, and then up to so many seconds."""
MAX_SILENCE_SECONDS: Final = 180.0
MAX_RUN_SECONDS: Final = 3600.0
MOMENTS: Final = ("before the first checkpoint", "while it trains", "while the report is written")
TASK_SEQUENCES: Final = (48, 12, 12)
"""Of the parts, which tasks are trained on when they are killed."""
MAX_MISSES: Final = 50
"""How often a run may end, or come further than wanted, before it is killed; it is then started anew."""
MAX_SEARCH_SECONDS: Final = 20.0
"""How long to wait for a checkpoint that is being written."""
RANK_TIMEOUT_MINUTES: Final = 0.1
FULL_DISK_BYTES: Final = 4096
"""Files up to this size can still be written when the disk is full."""
USER_ERROR: Final = 2
NODE_EPOCHS: Final = 150
NODE_ENDPOINT: Final = "127.0.0.1:29400"
NODE_TIMEOUT_MINUTES: Final = 1.0
NODE_PROGRESS_EVENTS: Final = 40
"""Events after which a group of ranks counts as running."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultsSettings(Settings):
    """Inject faults into a run and compare it with an undisturbed one.

    Attributes:
        kills: How many faults to inject into runs of one task; and how many runs of all tasks to kill.
        nproc: Ranks that train.
        jobs: Runs at the same time; much of the time passes in waiting.
        seed: Chooses the kinds, ranks and moments.
        stops: Whether to stop ranks too, not only to kill them; each takes as long as the time-out.
        nodes: Whether to drop one of two nodes and let it come back, too.
        tasks: Whether to kill runs of all tasks, too, each at one moment, and to resume them.
    """

    kills: Count = 5
    nproc: Annotated[int, Field(ge=2, le=64)] = 2
    jobs: Annotated[int, Field(ge=1, le=64)] = 2
    seed: Annotated[int, Field(ge=0)] = 0
    stops: bool = True
    nodes: bool = True
    tasks: bool = True


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """How often sequences were used, over all epochs."""

    epochs: int
    lost: int  # sequences that an epoch did not use
    repeated: int  # uses beyond the first within an epoch

    @property
    def is_exact(self) -> bool:
        """Whether every epoch used every sequence once."""
        return self.lost == self.repeated == 0

    @property
    def rows(self) -> list[tuple[str, int]]:
        """Of a table."""
        return [("epochs", self.epochs), ("sequences lost", self.lost), ("sequences repeated", self.repeated)]

    @classmethod
    def count(cls, events: Iterable[dict[str, Any]]) -> "Usage":
        """Count each sequence of each epoch, by its number."""
        uses: dict[int, collections.Counter[int]] = {}
        for event in events:
            if event["event"] == "update":
                uses.setdefault(event["epoch"], collections.Counter()).update(event["sequences"])
        return cls(
            epochs=len(uses),
            lost=sum(NUM_TRAINED - len(counts) for counts in uses.values()),
            repeated=sum(counts.total() - len(counts) for counts in uses.values()),
        )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a disturbed run ended, or several."""

    faults: tuple[str, ...]  # the kinds that were injected
    resumed: int  # how often it was
    usage: Usage
    same_weights: bool  # whether its final weights are those of the undisturbed run
    exit_code: int
    runs: int = 1

    @property
    def survived(self) -> int:
        """Faults after which the run still finished."""
        return len(self.faults) if self.exit_code == 0 else 0

    def __add__(self, other: "Outcome") -> "Outcome":
        usage = zip(dataclasses.astuple(self.usage), dataclasses.astuple(other.usage), strict=True)
        return Outcome(
            faults=self.faults + other.faults,
            resumed=self.resumed + other.resumed,
            usage=Usage(**dict(zip(("epochs", "lost", "repeated"), map(sum, usage), strict=True))),
            same_weights=self.same_weights and other.same_weights,
            exit_code=self.exit_code or other.exit_code,
            runs=self.runs + other.runs,
        )


@bench("faults", title="Faults while training, and what is lost")
def run(settings: FaultsSettings, report: Report) -> None:
    """Inject faults, and fail if anything was lost."""
    if settings.quick:
        settings = dataclasses.replace(settings, kills=2, stops=False, nodes=False, tasks=False)
    begin = time.perf_counter()
    with QuickPython() as python:
        outcome = inject_faults(settings, python=python, progress=report.progress)
        rows: list[tuple[str, int | bool | str]] = [
            *((what, outcome.faults.count(kind)) for kind, what in KINDS.items() if kind in outcome.faults),
            ("runs that they hit", outcome.runs),
            ("faults survived", f"{outcome.survived} of {settings.kills}"),
            ("resumed from a checkpoint", outcome.resumed),
            *outcome.usage.rows,
            ("final weights bit-identical to the undisturbed run's", outcome.same_weights),
            ("seconds, with the undisturbed run", round(time.perf_counter() - begin)),
        ]
        title = f"Faults injected into {settings.nproc} ranks"
        report.table(title=title, columns=("fault or result", "count"), rows=rows)
        report.failed = not (outcome.survived == settings.kills and outcome.same_weights and outcome.usage.is_exact)
        if settings.tasks:
            begin = time.perf_counter()
            kills = kill_tasks(settings, python=python, progress=report.progress)
            report.table(
                title="Runs of all tasks, killed by SIGKILL and resumed",
                columns=("task", "ranks", *(f"killed {moment}" for moment in MOMENTS), "as if it had not been"),
                rows=kill_rows(kills),
                caption=f"{len(kills)} kills, {round(time.perf_counter() - begin):,} seconds. Weights to the last bit, "
                "losses, metrics and the report are compared with those of a run that was not killed.",
            )
            for kill in kills:
                if not kill.is_same:
                    report.note(f"{kill.task}, {kill.ranks} ranks, killed {kill.moment}: {kill.problem}")
            report.failed = report.failed or len(kills) < settings.kills or not all(kill.is_same for kill in kills)
    if not settings.nodes:
        return
    try:
        world_sizes, usage, exit_codes = drop_a_node(progress=report.progress)
    except StrettoError as error:
        report.skip("two nodes", error)
        return
    rows = [
        ("ranks at each start", ", ".join(map(str, world_sizes))),
        *usage.rows,
        ("exit codes of the nodes", ", ".join(map(str, exit_codes))),
    ]
    report.table(title="Two nodes, one of them dropped and back", columns=("result", "count"), rows=rows)
    report.failed = report.failed or any(exit_codes) or not usage.is_exact


# One run with faults, one without ------------------------------------------------------------------------------------


def inject_faults(settings: FaultsSettings, *, python: QuickPython, progress: Callable[[str], None]) -> Outcome:
    """Train undisturbed and with faults, and compare."""
    if not Path("/proc").is_dir():
        raise StrettoError("ranks are found through /proc, which does not exist here", fix="Run it on Linux.")
    shares = np.array_split(np.arange(settings.kills), -(-settings.kills // MAX_FAULTS_PER_RUN))
    with tempfile.TemporaryDirectory(prefix="stretto-") as place:
        folder = Path(place)
        data, undisturbed = write_data(folder / "data.npz"), folder / "undisturbed"
        num_faults = max(map(len, shares))
        flags = functools.partial(_training_flags, data, nproc=settings.nproc, num_faults=num_faults)
        progress("training undisturbed")
        if code := _finish(_start(flags(undisturbed))):
            raise StrettoError(
                f"the undisturbed run exited with code {code}", fix="Check `stretto train classify --nproc 2`."
            )

        def disturbed(number: int) -> Outcome:
            run = folder / f"disturbed-{number}"
            rng = np.random.default_rng([settings.seed, number])
            kinds = [kind for kind in KINDS if settings.stops or kind != "stopped"]
            # Every kind once before any comes again.
            order = [kind for _ in range(0, settings.kills, len(kinds)) for kind in rng.permutation(kinds).tolist()]
            wanted = order[: len(shares[number])]
            faults, exit_code = _disturb(flags(run), run, wanted=wanted, rng=rng, python=python, progress=progress)
            events = read_events(run)
            return Outcome(
                faults=tuple(faults),
                resumed=sum(event["event"] == "resumed" for event in events),
                usage=Usage.count(events),
                same_weights=exit_code == 0 and _same_weights(undisturbed / MODEL_FILE, run / MODEL_FILE),
                exit_code=exit_code,
            )

        with concurrent.futures.ThreadPoolExecutor(settings.jobs) as pool:
            return functools.reduce(Outcome.__add__, pool.map(disturbed, range(len(shares))))


def _disturb(
    flags: list[str],
    folder: Path,
    *,
    wanted: list[str],
    rng: np.random.Generator,
    python: QuickPython,
    progress: Callable[[str], None],
) -> tuple[list[str], int]:
    """Inject the faults that are wanted into a run, and let it finish; returns those injected and its exit code."""
    faults: list[str] = []
    record = _Record(folder)
    process = _start(flags, python)
    try:
        while len(faults) < len(wanted) and record.wait_for(record.count() + int(rng.integers(*PAUSE_EVENTS)), process):
            time.sleep(rng.uniform(0.0, MAX_PAUSE_SECONDS))
            kind = wanted[len(faults)]
            if not inject(kind, process.pid, folder, rng=rng, behind=python.processes()):
                continue
            faults.append(kind)
            progress(f"{folder.name}, {len(faults)} of {len(wanted)}: {KINDS[kind]}")
            if kind == "full":
                code = _finish(process)
                if code != USER_ERROR:
                    return faults, code
                # All ranks have reported it and exited; with space again, the run continues.
                process = _start([*flags, "--resume"], python)
        progress(f"{folder.name}: training to the end")
        return faults, _finish(process)
    finally:
        _stop(process)


def inject(kind: str, launcher: int, folder: Path, *, rng: np.random.Generator, behind: Mapping[int, int]) -> bool:
    """Inject one of `KINDS` into ranks that a launcher started; False if they were not there at that moment.

    `behind` has the processes that run on behalf of programs, as `QuickPython` has them.
    """
    processes = [process for process, _ in sorted(ranks_below(launcher, behind=behind), key=lambda found: found[1])]
    if not processes:
        return False
    try:
        return _inject(kind, processes, folder, rng)
    except ProcessLookupError:
        return False


def _inject(kind: str, processes: list[int], folder: Path, rng: np.random.Generator) -> bool:
    if kind == "saving":
        return _kill_while_saving(processes[0], folder)
    if kind == "full":
        # Files may not grow beyond this, which a program sees as a full disk: the write fails.
        resource.prlimit(processes[0], resource.RLIMIT_FSIZE, (FULL_DISK_BYTES, FULL_DISK_BYTES))
        return True
    chosen = processes[rng.integers(len(processes))]
    if kind == "stopped":
        os.kill(chosen, signal.SIGSTOP)
        # The others time out and end; torchrun asks this one to end, which it cannot, and kills it 30 seconds later.
        deadline = time.monotonic() + MAX_SILENCE_SECONDS
        while _is_alive(chosen) and not _has_sigterm_pending(chosen) and time.monotonic() < deadline:
            time.sleep(0.05)
    _signal(processes if kind == "all" else [chosen], signal.SIGKILL)
    return True


def _kill_while_saving(process: int, folder: Path) -> bool:
    """Stop the process when a partial checkpoint exists; if it is still there, the process is in the middle of it."""
    deadline = time.monotonic() + MAX_SEARCH_SECONDS
    while time.monotonic() < deadline:
        if not any((folder / CHECKPOINT_FOLDER).glob(".update-*.part")):
            continue
        os.kill(process, signal.SIGSTOP)
        time.sleep(0.01)
        if any((folder / CHECKPOINT_FOLDER).glob(".update-*.part")):
            os.kill(process, signal.SIGKILL)
            return True
        os.kill(process, signal.SIGCONT)
    return False


def ranks_below(launcher: int, *, behind: Mapping[int, int] | None = None) -> Iterator[tuple[int, int]]:
    """Process and rank of everything that a launcher started, whatever processes are in between."""
    behind = behind or {}
    for process in _descendants(launcher, behind):
        try:
            items = Path(f"/proc/{process}/environ").read_bytes().decode().split("\0")
        except (OSError, UnicodeDecodeError):
            continue
        variables = dict(item.partition("=")[::2] for item in items if item)
        # What a rank has started is no rank, though it has inherited the variable.
        if "RANK" in variables and process not in behind.values() and not _has_rank(_parent(process)):
            yield behind.get(process, process), int(variables["RANK"])


def _has_rank(process: int) -> bool:
    with contextlib.suppress(OSError):
        return b"\0RANK=" in b"\0" + Path(f"/proc/{process}/environ").read_bytes()
    return False


def _parent(process: int) -> int:
    """The process that started it; 0 if it has ended."""
    with contextlib.suppress(OSError):
        return int(re.findall(r"PPid:\s+(\d+)", Path(f"/proc/{process}/status").read_text(encoding="utf-8"))[0])
    return 0


def _descendants(process: int, behind: Mapping[int, int]) -> list[int]:
    """All processes below one, whatever session they are in, and those that run on behalf of any of them."""
    parents = {int(folder.name): _parent(int(folder.name)) for folder in Path("/proc").glob("[0-9]*")}
    parents |= {worker: program for program, worker in behind.items()}
    found = {process}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {process})


def write_data(path: Path) -> Path:
    """Two kinds of noise with different means, as a ragged .npz file."""
    write_npz(path, noise())
    return path


def noise() -> SequenceSet:
    """Two kinds of noise with different means."""
    rng = np.random.default_rng(0)
    count = NUM_TRAINED + 20
    labels_N, lengths_N = np.arange(count) % 2, rng.integers(2, 30, count)
    features_SF = rng.normal(size=(lengths_N.sum(), 2)) + 2.0 * np.repeat(labels_N, lengths_N)[:, None]
    return SequenceSet.from_flat(
        features_SF.astype(np.float32),
        offsets=np.cumsum([0, *lengths_N]),
        targets=Labels.check(labels_N, names=["still", "moving"], source="the fault suite"),
        split_N=np.repeat([0, 1, 2], [NUM_TRAINED, 10, 10]),
    )


def _training_flags(data: Path, out: Path, *, nproc: int, num_faults: int) -> list[str]:
    epochs = EPOCHS_PER_FAULT * (num_faults + 1)
    flags = train_command(data, out, epochs=epochs, rank_timeout_minutes=RANK_TIMEOUT_MINUTES)
    return [*flags, "--nproc", str(nproc), "--max-restarts", str(2 * num_faults + 2)]


def train_command(data: Path, out: Path, *, epochs: int, rank_timeout_minutes: float) -> list[str]:
    """The command line of a run that saves all the time and records the sequences of each update."""
    words = {
        "--data": data,
        "--out": out,
        "--epochs": epochs,
        "--batch-size": 8,
        "--hidden-size": 16,
        "--rank-timeout-minutes": rank_timeout_minutes,
        "--checkpoint-minutes": 0.002,
        "--backend": "torch",
        "--num-buckets": 3,
    }
    return ["train", "classify", *(str(word) for pair in words.items() for word in pair), "--record-sequences"]


def _start(flags: list[str], python: QuickPython | None = None) -> "subprocess.Popen[bytes]":
    command = [sys.executable if python is None else str(python.program), "-m", "stretto", *flags]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603


def _finish(process: "subprocess.Popen[bytes]") -> int:
    try:
        return process.wait(timeout=MAX_RUN_SECONDS)
    except subprocess.TimeoutExpired:
        raise StrettoError("the run does not finish", fix="Run with fewer --kills, on an idle machine.") from None
    finally:
        _stop(process)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Send SIGTERM first, so that the launcher ends its ranks."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=MAX_SILENCE_SECONDS)
        except subprocess.TimeoutExpired:
            process.kill()


class _Record:
    """How many events a run has recorded; what was counted once is not read again."""

    def __init__(self, folder: Path) -> None:
        self._path, self._place, self._count = folder / EVENTS_FILE, 0, 0

    def count(self) -> int:
        """So far."""
        if self._path.exists():
            with self._path.open("rb") as stream:
                stream.seek(self._place)
                added = stream.read()
            self._place += len(added)
            self._count += added.count(b"\n")
        return self._count

    def wait_for(self, number: int, process: "subprocess.Popen[bytes]") -> bool:
        """Wait until there are so many; False if the run ends or hangs instead."""
        deadline = time.monotonic() + MAX_SILENCE_SECONDS
        while self.count() < number:
            if process.poll() is not None or time.monotonic() > deadline:
                return False
            time.sleep(0.005)
        return True


def _same_weights(one: Path, other: Path) -> bool:
    """Whether the tensors of two files are bit-identical."""
    first, second = safetensors.torch.load_file(one), safetensors.torch.load_file(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


# Every task ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kill:
    """A run of a task that was killed and resumed."""

    task: str
    ranks: int
    moment: str
    problem: str

    @property
    def is_same(self) -> bool:
        """Whether it ended as the undisturbed run did."""
        return not self.problem


def kill_tasks(settings: FaultsSettings, *, python: QuickPython, progress: Callable[[str], None]) -> list[Kill]:
    """Kill runs of every task at random moments, with one rank and with two; each is resumed and compared."""
    # All of one number of ranks, then all of the other: 16 pairs, and no two of 48 kills alike in pair and moment.
    pairs = [(task, ranks) for ranks in (1, 2) for task in TASKS]
    with tempfile.TemporaryDirectory(prefix="stretto-") as place:
        folder = Path(place)
        for task in {task for task, _ in pairs[: settings.kills]}:
            write_npz(folder / f"{task}.npz", _task_data(task))

        def train_whole(pair: tuple[str, int]) -> str:
            task, ranks = pair
            progress(f"{task}, {ranks} ranks, undisturbed")
            flags = _task_flags(task, folder / f"{task}.npz", folder / f"{task}-{ranks}", ranks)
            code = _finish(_start(flags, python))
            return f"undisturbed, exit code {code}" if code else ""

        def kill(number: int) -> Kill:
            task, ranks = pair = pairs[number % len(pairs)]
            wanted = MOMENTS[(number + number // len(pairs)) % len(MOMENTS)]
            progress(f"{number + 1} of {settings.kills}: {task}, {ranks} ranks, {wanted}")
            run, whole = folder / f"killed-{number}", folder / f"{task}-{ranks}"
            flags = _task_flags(task, folder / f"{task}.npz", run, ranks)
            rng = np.random.default_rng([settings.seed, number])
            problem = broken[pair] or _kill(
                flags, run, num_events=_Record(whole).count(), wanted=wanted, rng=rng, python=python
            )
            moment = _moment(run)
            problem = problem or _resume(flags, run, python) or difference(whole, run)
            if not problem:
                shutil.rmtree(run)
            return Kill(task=task, ranks=ranks, moment=moment, problem=problem)

        with concurrent.futures.ThreadPoolExecutor(settings.jobs) as pool:
            used = pairs[: settings.kills]
            broken = dict(zip(used, pool.map(train_whole, used), strict=True))
            return list(pool.map(kill, range(settings.kills)))


def kill_rows(kills: list[Kill]) -> list[tuple[str | int, ...]]:
    """A row for each task and number of ranks: kills at each moment, and how many ended as if there had been none."""
    rows: list[tuple[str | int, ...]] = []
    for task, ranks in dict.fromkeys((kill.task, kill.ranks) for kill in kills):
        own = [kill for kill in kills if (kill.task, kill.ranks) == (task, ranks)]
        moments = [sum(kill.moment == moment for kill in own) for moment in MOMENTS]
        rows.append((task, ranks, *moments, f"{sum(kill.is_same for kill in own)} of {len(own)}"))
    moments = [sum(kill.moment == moment for kill in kills) for moment in MOMENTS]
    return [*rows, ("all", "1 and 2", *moments, f"{sum(kill.is_same for kill in kills)} of {len(kills)}")]


def _kill(
    flags: list[str], run: Path, *, num_events: int, wanted: str, rng: np.random.Generator, python: QuickPython
) -> str:
    """Start a run and kill all its processes at a moment that is wanted; what went wrong, if anything did."""
    for _ in range(MAX_MISSES):
        process, record = _start(flags, python), _Record(run)
        deadline = time.monotonic() + MAX_SILENCE_SECONDS
        if wanted == MOMENTS[0]:
            # From the first trace of the run; the imports are of no interest.
            awaited = run / rng.choice(["", EVENTS_FILE])
            while not awaited.exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.003)
            time.sleep(rng.uniform(0.0, 0.05))
        elif wanted == MOMENTS[1]:
            record.wait_for(int(rng.integers(2, num_events)), process)
            time.sleep(rng.uniform(0.0, 0.01))
        else:
            while not (run / RESULT_FILE).exists() and process.poll() is None and time.monotonic() < deadline:
                time.sleep(0.003)
            time.sleep(rng.uniform(0.0, 0.1))
        is_running = _kill_all(process, python)
        if is_running and run.exists() and _moment(run) == wanted and not (run / PAGE_NAME).exists():
            return ""
        shutil.rmtree(run, ignore_errors=True)
    return f"no run was met {wanted} in {MAX_MISSES} starts"


def _kill_all(process: "subprocess.Popen[bytes]", python: QuickPython) -> bool:
    """SIGKILL a run and all its ranks; False if it had ended by itself."""
    found: list[int] = []
    # Stopped first: none can start another while the list is made.
    while (more := [process.pid, *_descendants(process.pid, python.processes())]) != found:
        found = more
        _signal(found, signal.SIGSTOP)
    is_running = process.poll() is None
    _signal(found, signal.SIGKILL)
    process.wait()
    for number in found:
        while _is_alive(number) or number in python.processes():
            time.sleep(0.001)
    return is_running


def _is_alive(process: int) -> bool:
    """Whether a process exists and is more than an entry that its parent has not read yet."""
    with contextlib.suppress(OSError):
        return not re.search(r"State:\s+[ZX]", Path(f"/proc/{process}/status").read_text(encoding="utf-8"))
    return False


def _moment(run: Path) -> str:
    """How far a run has come, by what it has left."""
    if (run / RESULT_FILE).exists():
        return MOMENTS[2]
    return MOMENTS[1 if any((run / CHECKPOINT_FOLDER).glob("update-*")) else 0]


def _resume(flags: list[str], run: Path, python: QuickPython) -> str:
    """Resume a run that was killed, or make the page of one that was finished but for that; what went wrong."""
    code = _finish(_start([*flags, "--resume"], python))
    if code == USER_ERROR and (run / MODEL_FILE).exists() and read_events(run)[-1]["event"] == "finished":
        code = _finish(_start(["report", str(run)], python))
    return f"exit code {code}" if code else ""


def difference(whole: Path, run: Path) -> str:
    """In what a run differs from an undisturbed one; empty if in nothing."""
    if not _same_weights(whole / MODEL_FILE, run / MODEL_FILE):
        return "other weights"
    if _losses(whole) != _losses(run):
        return "other losses"
    results = [json.loads((folder / RESULT_FILE).read_text(encoding="utf-8")) for folder in (whole, run)]
    if results[0]["metrics"] != results[1]["metrics"]:
        return "other metrics"
    return "" if (run / PAGE_NAME).exists() else "no report"


def _losses(run: Path) -> list[tuple[int, float]]:
    """The loss of each update."""
    return [(event["update"], event["loss"]) for event in read_events(run) if event["event"] == "update"]


def _task_data(task: str) -> SequenceSet:
    """A few sequences of what the task has embedded, or of two kinds of noise."""
    data = noise() if task in {"classify", "video"} else find_task(task).embedded_data()
    places = [np.flatnonzero(data.split_N == part)[:count] for part, count in enumerate(TASK_SEQUENCES)]
    return data.subset(np.concatenate(places))


def _task_flags(task: str, data: Path, out: Path, ranks: int) -> list[str]:
    flags = f"train {task} --epochs 3 --batch-size 4 --hidden-size 8 --backend torch --threads 1".split()
    flags += ["--checkpoint-minutes", "0.002", "--data", str(data), "--out", str(out)]
    return [*flags, *(["--nproc", str(ranks), "--max-restarts", "0"] if ranks > 1 else [])]


# Two nodes -----------------------------------------------------------------------------------------------------------


def drop_a_node(*, progress: Callable[[str], None]) -> tuple[list[int], Usage, list[int]]:
    """Train on two nodes, drop one, and let it come back.

    Returns:
        The world sizes from the first with both on, the use of sequences, and the nodes' exit codes.

    Raises:
        StrettoError: If this machine does not allow a network namespace.
    """
    progress("two nodes, one of which is dropped and comes back")
    unshare = shutil.which("unshare")
    isolated = [str(unshare), "--net", "--map-root-user"]
    if unshare is None or subprocess.run([*isolated, "true"], capture_output=True, check=False).returncode:  # noqa: S603
        raise StrettoError(
            "two nodes need a network namespace, and `unshare --net --map-root-user` does not work here",
            fix="Allow user namespaces, or run with --no-nodes.",
        )
    with tempfile.TemporaryDirectory(prefix="stretto-") as place:
        command = [*isolated, sys.executable, "-m", "bench.faults", place]
        done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603
        answer = Path(place) / "answer.json"
        if done.returncode or not answer.exists():
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise StrettoError(f"two nodes did not finish ({last})", fix="Run again on an idle machine.")
        values = json.loads(answer.read_text(encoding="utf-8"))
    return values["world_sizes"], Usage(**values["usage"]), values["exit_codes"]


def run_two_nodes(folder: Path) -> None:
    """Inside the namespace: run both nodes, and write the outcome into the folder."""
    _enable_loopback()
    run, data = folder / "run", write_data(folder / "data.npz")
    # The node that hosts the rendezvous must stay, as torchrun requires.
    nodes = [_start_node(data, run, is_host=True), _start_node(data, run, is_host=False)]
    try:
        _wait_for_world(run, nodes, size=2)
        _drop(nodes.pop())
        _wait_for_world(run, nodes, size=1)
        # The rank that stays would finish all epochs if the other took long. Its launcher sends SIGTERM when a node
        # joins, which waits until the stopped rank continues.
        ranks = [process for process, _ in ranks_below(nodes[0].pid)]
        _signal(ranks, signal.SIGSTOP)
        nodes.append(_start_node(data, run, is_host=False))
        _wait(lambda: any(_has_sigterm_pending(rank) for rank in ranks), nodes)
        _signal(ranks, signal.SIGCONT)
        _wait_for_world(run, nodes, size=2)
        exit_codes = [node.wait(timeout=MAX_RUN_SECONDS) for node in nodes]
    finally:
        for node in nodes:
            _drop(node)
    # On a loaded machine the first node may have started alone, before the second came.
    sizes = [size for size, _ in itertools.groupby(size for size, _ in _starts(run))]
    outcome = {
        "world_sizes": sizes[sizes.index(2) :],
        "usage": dataclasses.asdict(Usage.count(read_events(run))),
        "exit_codes": exit_codes,
    }
    (folder / "answer.json").write_text(json.dumps(outcome), encoding="utf-8")


def _enable_loopback() -> None:
    import fcntl

    set_flags, up = 0x8914, 0x1
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, set_flags, struct.pack("16sh22x", b"lo", up))


def _start_node(data: Path, run: Path, *, is_host: bool) -> "subprocess.Popen[bytes]":
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=1"]
    launcher += ["--max-restarts=9", "--rdzv-backend=c10d", f"--rdzv-endpoint={NODE_ENDPOINT}", "--rdzv-id=two-nodes"]
    launcher += [f"--rdzv-conf=last_call_timeout=2,keep_alive_interval=5,is_host={int(is_host)}"]
    launcher += ["--local-addr=127.0.0.1", "-m", "stretto"]
    flags = train_command(data, run, epochs=NODE_EPOCHS, rank_timeout_minutes=NODE_TIMEOUT_MINUTES)
    # With a store that launchers share, a node that joins later does not learn its address (torch 2.13).
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
    return subprocess.Popen([*launcher, *flags], env=environment)  # noqa: S603


def _drop(node: "subprocess.Popen[bytes]") -> None:
    """SIGKILL a launcher and all its ranks."""
    if node.poll() is None:
        _signal([*(process for process, _ in ranks_below(node.pid)), node.pid], signal.SIGKILL)
        node.wait()


def _signal(processes: list[int], number: signal.Signals) -> None:
    for process in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process, number)


def _has_sigterm_pending(process: int) -> bool:
    with contextlib.suppress(OSError):
        status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
        pending = int(re.findall(r"ShdPnd:\s+(\w+)", status)[0], 16)
        return bool(pending & 1 << signal.SIGTERM - 1)
    return False


def _wait_for_world(run: Path, nodes: list["subprocess.Popen[bytes]"], *, size: int) -> None:
    """Wait until a group of this many ranks makes progress."""

    def is_running() -> bool:
        starts = _starts(run)
        return bool(starts) and starts[-1][0] == size and starts[-1][1] >= NODE_PROGRESS_EVENTS

    _wait(is_running, nodes)


def _wait(condition: Callable[[], bool], nodes: list["subprocess.Popen[bytes]"]) -> None:
    deadline = time.monotonic() + MAX_RUN_SECONDS
    while not condition():
        if time.monotonic() > deadline or any(node.poll() is not None for node in nodes):
            raise TimeoutError("a node has ended, or waits for the other")
        time.sleep(0.05)


def _starts(run: Path) -> list[tuple[int, int]]:
    """The world size, and the number of events since, for each start."""
    starts: list[tuple[int, int]] = []
    path = run / EVENTS_FILE
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            event = json.loads(line)
        except ValueError:
            continue
        if event["event"] in {"started", "resumed"}:
            starts.append((event["world_size"], 0))
        elif starts:
            starts[-1] = (starts[-1][0], starts[-1][1] + 1)
    return starts


if __name__ == "__main__":
    run_two_nodes(Path(sys.argv[1]))
