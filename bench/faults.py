"""`python -m bench faults`: ranks killed, stopped or left without disk space while they train.

Two runs train the same net: one undisturbed, one with faults injected. Afterwards every sequence of every epoch must
have been used exactly once, and the final weights must be equal to the last bit. So it is for every task, with one rank
and with two, killed before the first checkpoint, while training and while the report is written. Then one of two nodes
is dropped and comes back. Nodes are launchers of torchrun's on this machine, inside a network namespace that has
nothing but loopback.

Shape legend: N sequences, S steps of all of them, F features.
"""

import collections
import contextlib
import dataclasses
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
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import safetensors.torch
import torch
from pydantic import Field

from bench.harness import Count, Report, Settings, bench
from stretto.data import Labels, SequenceSet, write_npz
from stretto.errors import StrettoError
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
EPOCHS_PER_FAULT: Final = 60
MAX_PAUSE_SECONDS: Final = 2.0
MAX_SILENCE_SECONDS: Final = 180.0
MAX_RUN_SECONDS: Final = 3600.0
MOMENTS: Final = ("before the first checkpoint", "while it trains", "while the report is written")
TASK_SEQUENCES: Final = (48, 12, 12)
"""Of the parts, which tasks are trained on when they are killed."""
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
        kills: How many faults to inject into the run of one task; and how many runs of all tasks to kill.
        nproc: Ranks that train.
        seed: Chooses the kinds, ranks and moments.
        stops: Whether to stop ranks too, not only to kill them; each takes as long as the time-out.
        nodes: Whether to drop one of two nodes and let it come back, too.
        tasks: Whether to kill runs of all tasks, too, each at one moment, and to resume them.
    """

    kills: Count = 5
    nproc: Annotated[int, Field(ge=2, le=64)] = 2
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
    """How the disturbed run ended."""

    faults: tuple[str, ...]  # the kinds that were injected
    resumed: int  # how often it was
    usage: Usage
    same_weights: bool  # whether its final weights are those of the undisturbed run
    exit_code: int

    @property
    def survived(self) -> int:
        """Faults after which the run still finished."""
        return len(self.faults) if self.exit_code == 0 else 0


@bench("faults", title="Faults while training, and what is lost")
def run(settings: FaultsSettings, report: Report) -> None:
    """Inject faults, and fail if anything was lost."""
    if settings.quick:
        settings = dataclasses.replace(settings, kills=2, stops=False, nodes=False, tasks=False)
    begin = time.perf_counter()
    outcome = inject_faults(settings, progress=report.progress)
    rows: list[tuple[str, int | bool | str]] = [
        *((what, outcome.faults.count(kind)) for kind, what in KINDS.items() if kind in outcome.faults),
        ("faults survived", f"{outcome.survived} of {settings.kills}"),
        ("resumed from a checkpoint", outcome.resumed),
        *outcome.usage.rows,
        ("final weights bit-identical to the undisturbed run's", outcome.same_weights),
        ("seconds, both runs", round(time.perf_counter() - begin)),
    ]
    report.table(title=f"Faults injected into {settings.nproc} ranks", columns=("fault or result", "count"), rows=rows)
    report.failed = not (outcome.survived == settings.kills and outcome.same_weights and outcome.usage.is_exact)
    if settings.tasks:
        kills = kill_tasks(settings, progress=report.progress)
        columns = ("task", "ranks", "killed", "as if it had not been")
        table = [(kill.task, kill.ranks, kill.moment, "yes" if kill.is_same else kill.problem) for kill in kills]
        report.table(title="Runs of all tasks, killed and resumed", columns=columns, rows=table)
        report.failed = report.failed or not all(kill.is_same for kill in kills)
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


def inject_faults(settings: FaultsSettings, *, progress: Callable[[str], None]) -> Outcome:
    """Train twice, once undisturbed, and compare."""
    if not Path("/proc").is_dir():
        raise StrettoError("ranks are found through /proc, which does not exist here", fix="Run it on Linux.")
    with tempfile.TemporaryDirectory(prefix="stretto-") as place:
        folder = Path(place)
        data, undisturbed, disturbed = write_data(folder / "data.npz"), folder / "undisturbed", folder / "disturbed"
        progress("training undisturbed")
        if code := _finish(_start(_training_flags(data, undisturbed, settings))):
            raise StrettoError(
                f"the undisturbed run exited with code {code}", fix="Check `stretto train classify --nproc 2`."
            )
        faults, exit_code = _disturb(_training_flags(data, disturbed, settings), disturbed, settings, progress)
        events = read_events(disturbed)
        same = exit_code == 0 and _same_weights(undisturbed / MODEL_FILE, disturbed / MODEL_FILE)
    return Outcome(
        faults=tuple(faults),
        resumed=sum(event["event"] == "resumed" for event in events),
        usage=Usage.count(events),
        same_weights=same,
        exit_code=exit_code,
    )


def _disturb(
    flags: list[str], folder: Path, settings: FaultsSettings, progress: Callable[[str], None]
) -> tuple[list[str], int]:
    """Inject faults into a run until there were enough, and let it finish; returns the faults and its exit code."""
    rng = np.random.default_rng(settings.seed)
    kinds = [kind for kind in KINDS if settings.stops or kind != "stopped"]
    # Every kind once before any comes again.
    order = [kind for _ in range(0, settings.kills, len(kinds)) for kind in rng.permutation(kinds).tolist()]
    faults: list[str] = []
    process = _start(flags)
    try:
        while len(faults) < settings.kills and _makes_progress(process, folder):
            time.sleep(rng.uniform(0.0, MAX_PAUSE_SECONDS))
            kind = order[len(faults)]
            if not inject(kind, process.pid, folder, rng=rng):
                continue
            faults.append(kind)
            progress(f"{len(faults)} of {settings.kills}: {KINDS[kind]}")
            if kind == "full":
                code = _finish(process)
                if code != USER_ERROR:
                    return faults, code
                # All ranks have reported it and exited; with space again, the run continues.
                process = _start([*flags, "--resume"])
        progress("training to the end")
        return faults, _finish(process)
    finally:
        _stop(process)


def inject(kind: str, launcher: int, folder: Path, *, rng: np.random.Generator) -> bool:
    """Inject one of `KINDS` into ranks that a launcher started; False if there were none at that moment."""
    processes = [process for process, _ in sorted(ranks_below(launcher), key=lambda found: found[1])]
    if not processes:
        return False
    if kind == "saving":
        return _kill_while_saving(processes[0], folder)
    if kind == "full":
        # Files may not grow beyond this, which a program sees as a full disk: the write fails.
        resource.prlimit(processes[0], resource.RLIMIT_FSIZE, (FULL_DISK_BYTES, FULL_DISK_BYTES))
        return True
    for process in processes if kind == "all" else [processes[rng.integers(len(processes))]]:
        os.kill(process, signal.SIGSTOP if kind == "stopped" else signal.SIGKILL)
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


def ranks_below(launcher: int) -> Iterator[tuple[int, int]]:
    """Process and rank of everything that a launcher started, directly or through one process in between."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = _parent(int(folder.name))
            ancestors = {parent, _parent(parent)}
            variables = dict(
                item.partition("=")[::2] for item in (folder / "environ").read_bytes().decode().split("\0") if item
            )
        except (OSError, IndexError, UnicodeDecodeError):
            continue
        if launcher in ancestors and "RANK" in variables:
            yield int(folder.name), int(variables["RANK"])


def _parent(process: int) -> int:
    return int(re.findall(r"PPid:\s+(\d+)", Path(f"/proc/{process}/status").read_text(encoding="utf-8"))[0])


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


def _training_flags(data: Path, out: Path, settings: FaultsSettings) -> list[str]:
    epochs = EPOCHS_PER_FAULT * (settings.kills + 1)
    flags = train_command(data, out, epochs=epochs, rank_timeout_minutes=RANK_TIMEOUT_MINUTES)
    return [*flags, "--nproc", str(settings.nproc), "--max-restarts", str(2 * settings.kills + 2)]


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


def _start(flags: list[str]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "stretto", *flags]
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


def _makes_progress(process: "subprocess.Popen[bytes]", folder: Path) -> bool:
    """Wait for 20 more events; False if the run ends or hangs instead."""
    before, deadline = _num_events(folder), time.monotonic() + MAX_SILENCE_SECONDS
    while _num_events(folder) < before + 20:
        if process.poll() is not None or time.monotonic() > deadline:
            return False
        time.sleep(0.02)
    return True


def _num_events(folder: Path) -> int:
    path = folder / EVENTS_FILE
    return path.read_bytes().count(b"\n") if path.exists() else 0


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
        """Whether it ended with the weights of the undisturbed run."""
        return not self.problem


def kill_tasks(settings: FaultsSettings, *, progress: Callable[[str], None]) -> list[Kill]:
    """Kill runs of every task at every moment, in turn, with one rank and with two; each is resumed and compared."""
    rng = np.random.default_rng(settings.seed)
    pairs = [(task, ranks) for ranks in (1, 2) for task in TASKS]
    done: list[Kill] = []
    with tempfile.TemporaryDirectory(prefix="stretto-") as place:
        folder = Path(place)
        for number in range(settings.kills):
            task, ranks = pairs[number % len(pairs)]
            moment = MOMENTS[number % len(MOMENTS)]
            progress(f"{number + 1} of {settings.kills}: {task}, {ranks} ranks, {moment}")
            data, whole = folder / f"{task}.npz", folder / f"{task}-{ranks}"
            if not data.exists():
                write_npz(data, _task_data(task))
            flags = _task_flags(task, data, ranks)
            problem = ""
            if not whole.exists() and (code := _finish(_start([*flags, "--out", str(whole)]))):
                problem = f"undisturbed, exit code {code}"
            run = folder / f"killed-{number}"
            problem = problem or _kill_and_resume([*flags, "--out", str(run)], run, moment, rng)
            if not problem and not _same_weights(whole / MODEL_FILE, run / MODEL_FILE):
                problem = "other weights"
            done.append(Kill(task=task, ranks=ranks, moment=moment, problem=problem))
    return done


def _kill_and_resume(flags: list[str], run: Path, moment: str, rng: np.random.Generator) -> str:
    """Kill a run and all its ranks at a moment, and resume it; what went wrong, if anything did."""
    awaited = {MOMENTS[0]: EVENTS_FILE, MOMENTS[1]: f"{CHECKPOINT_FOLDER}/update-*", MOMENTS[2]: RESULT_FILE}[moment]
    process = _start(flags)
    deadline = time.monotonic() + MAX_SILENCE_SECONDS
    while not any(run.glob(awaited)) and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.001)
    if moment == MOMENTS[1]:
        time.sleep(rng.uniform(0.0, 0.2))
    _signal([process.pid, *_descendants(process.pid)], signal.SIGKILL)
    process.wait()
    code = _finish(_start([*flags, "--resume"]))
    if code == USER_ERROR and (run / MODEL_FILE).exists() and read_events(run)[-1]["event"] == "finished":
        # It was finished, but for its page.
        code = _finish(_start(["report", str(run)]))
    return f"exit code {code}" if code else ""


def _descendants(process: int) -> list[int]:
    """All processes below one, whatever session they are in."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parents[int(folder.name)] = _parent(int(folder.name))
        except (OSError, IndexError):
            continue
    found = {process}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return sorted(found - {process})


def _task_data(task: str) -> SequenceSet:
    """A few sequences of what the task has embedded, or of two kinds of noise."""
    if task in ("classify", "video"):
        return noise()
    data = find_task(task).embedded_data()
    places = [np.flatnonzero(data.split_N == part)[:count] for part, count in enumerate(TASK_SEQUENCES)]
    return data.subset(np.concatenate(places))


def _task_flags(task: str, data: Path, ranks: int) -> list[str]:
    flags = f"train {task} --epochs 3 --batch-size 4 --hidden-size 8 --backend torch --checkpoint-minutes 0.002".split()
    return [*flags, "--data", str(data), *(["--nproc", str(ranks), "--max-restarts", "0"] if ranks > 1 else [])]


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
    status = Path(f"/proc/{process}/status").read_text(encoding="utf-8")
    pending = int(re.findall(r"ShdPnd:\s+(\w+)", status)[0], 16)
    return bool(pending & 1 << signal.SIGTERM - 1)


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
