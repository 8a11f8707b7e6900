"""Workers that are killed, stopped and killed again while they train: what is lost, and whether the result is the same.

Shape legend: N sequences, S steps of all of them, F features.
"""

import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final

import numpy as np
import safetensors.torch
import torch
from pydantic import Field

from stretto.data.npz import write_npz
from stretto.data.sequences import SequenceSet
from stretto.data.targets import Labels
from stretto.errors import StrettoError
from stretto.storage import write_text_atomically
from stretto.training.config import Count
from stretto.training.events import EVENTS_FILE, read_events
from stretto.training.loop import MODEL_FILE

KINDS: Final[dict[str, str]] = {
    "one": "SIGKILL of a random worker",
    "all": "SIGKILL of all workers",
    "stopped": "SIGSTOP of a random worker, past the time-out",
}
NUM_TRAINED: Final = 200
EPOCHS_A_KILL: Final = 60
PATIENCE: Final = 180.0
LOST_AFTER: Final = 0.1
"""Minutes."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultsBenchSettings:
    """Settings of `stretto bench faults`.

    Attributes:
        kills: How many times to strike.
        workers: Processes that train.
        seed: Of who is struck, how and when.
        stops: Whether to stop workers too, not only to kill them; each takes as long as the time-out.
        json: JSON file for the result.
    """

    kills: Count = 5
    workers: Annotated[int, Field(ge=2, le=64)] = 2
    seed: Annotated[int, Field(ge=0)] = 0
    stops: bool = True
    json: Path | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Strike:
    """One of them: how, on which ranks, and after how many recorded updates."""

    kind: str
    ranks: tuple[int, ...]
    step: int


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FaultsBench:
    """What came of it.

    Attributes:
        strikes: All strikes, in order.
        resumed: How often training went on from a checkpoint.
        epochs: Epochs trained.
        lost: Sequences that an epoch should have had and had not, over all epochs.
        repeated: Sequences that an epoch had too often, over all epochs.
        same_weights: Whether the final weights equal those of the undisturbed run to the last bit.
        exit_code: Of the disturbed run.
        seconds: Of both runs.
        workers: Processes that trained.
    """

    strikes: tuple[Strike, ...]
    resumed: int
    epochs: int
    lost: int
    repeated: int
    same_weights: bool
    exit_code: int
    seconds: float
    workers: int

    @property
    def survived(self) -> int:
        """Strikes after which the run came to its end all the same."""
        return len(self.strikes) if self.exit_code == 0 else 0

    def to_json(self) -> str:
        """The content of the JSON file."""
        return json.dumps({**dataclasses.asdict(self), "survived": self.survived}, indent=2) + "\n"


def run_faults_bench(settings: FaultsBenchSettings, *, tell: Callable[[str], None] | None = None) -> FaultsBench:
    """Train twice, once in peace, and compare."""
    if not Path("/proc").is_dir():
        raise StrettoError("workers are found through /proc, which is not there", fix="Run it on Linux.")
    tell = tell or _silence
    begun = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="stretto-") as place:
        folder = Path(place)
        data = _write_data(folder / "signs.npz")
        tell("training in peace")
        peace = _start(data, folder / "peace", settings)
        _end(peace)
        disturbed = _start(data, folder / "disturbed", settings)
        try:
            strikes = tuple(_strikes(disturbed, folder / "disturbed", settings, tell))
            tell("training to the end")
            _end(disturbed)
        finally:
            disturbed.kill()
        events = read_events(folder / "disturbed")
        rows = _rows_by_epoch(events)
        same = disturbed.returncode == 0 and _same(folder / "peace" / MODEL_FILE, folder / "disturbed" / MODEL_FILE)
        bench = FaultsBench(
            strikes=strikes,
            resumed=sum(event["event"] == "resumed" for event in events),
            epochs=len(rows),
            lost=sum(max(0, NUM_TRAINED - count) for count in rows.values()),
            repeated=sum(max(0, count - NUM_TRAINED) for count in rows.values()),
            same_weights=same,
            exit_code=int(disturbed.returncode),
            seconds=time.perf_counter() - begun,
            workers=settings.workers,
        )
    if settings.json is not None:
        write_text_atomically(settings.json, bench.to_json())
    return bench


def _silence(line: str) -> None:
    """Pass over a line."""


def workers_below(launcher: int) -> Iterator[tuple[int, int]]:
    """Process and rank of every worker that a launcher has started."""
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = _parent(int(folder.name))
            above = _parent(parent)
            variables = dict(
                item.partition("=")[::2] for item in (folder / "environ").read_bytes().decode().split("\0") if item
            )
        except (OSError, IndexError, UnicodeDecodeError):
            continue
        if above == launcher and "RANK" in variables:
            yield int(folder.name), int(variables["RANK"])


def _parent(process: int) -> int:
    return int(re.findall(r"PPid:\s+(\d+)", Path(f"/proc/{process}/status").read_text(encoding="utf-8"))[0])


def _write_data(path: Path) -> Path:
    rng = np.random.default_rng(0)
    count = NUM_TRAINED + 20
    labels_N, lengths_N = np.arange(count) % 2, rng.integers(2, 30, count)
    features_SF = rng.normal(size=(lengths_N.sum(), 2)) + 2.0 * np.repeat(labels_N, lengths_N)[:, None]
    data = SequenceSet.from_flat(
        features_SF.astype(np.float32),
        offsets=np.cumsum([0, *lengths_N]),
        targets=Labels.check(labels_N, names=["still", "moving"], source="made"),
        split_N=np.repeat([0, 1, 2], [NUM_TRAINED, 10, 10]),
    )
    write_npz(path, data)
    return path


def _start(data: Path, out: Path, settings: FaultsBenchSettings) -> "subprocess.Popen[bytes]":
    epochs = EPOCHS_A_KILL * (settings.kills + 1)
    words = {
        "--data": data,
        "--out": out,
        "--epochs": epochs,
        "--batch-size": 8,
        "--hidden-size": 16,
        "--workers": settings.workers,
        "--restarts": 2 * settings.kills + 2,
        "--lost-after": LOST_AFTER,
        "--checkpoint-minutes": 0.002,
        "--kernel": "torch",
        "--num-buckets": 3,
    }
    command = [sys.executable, "-m", "stretto", "train", "classify"]
    command += [str(word) for pair in words.items() for word in pair]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603


def _end(process: "subprocess.Popen[bytes]") -> None:
    try:
        process.wait(timeout=20 * PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        raise StrettoError(
            "the run does not come to its end", fix="Run with fewer --kills, on a machine at rest."
        ) from None


def _strikes(
    process: "subprocess.Popen[bytes]", run: Path, settings: FaultsBenchSettings, tell: Callable[[str], None]
) -> Iterator[Strike]:
    chance = np.random.default_rng(settings.seed)
    kinds = ["one", "one", "all", *(["stopped"] if settings.stops else [])]
    for number in range(settings.kills):
        before = _num_lines(run)
        ends = time.monotonic() + PATIENCE
        while _num_lines(run) < before + 20:
            if process.poll() is not None or time.monotonic() > ends:
                return
            time.sleep(0.05)
        time.sleep(chance.uniform(0.0, 2.0))
        workers = sorted(workers_below(process.pid), key=lambda worker: worker[1])
        if not workers:
            continue
        kind = kinds[chance.integers(len(kinds))]
        struck = workers if kind == "all" else [workers[chance.integers(len(workers))]]
        strike = Strike(kind=kind, ranks=tuple(rank for _, rank in struck), step=_num_lines(run))
        tell(f"{number + 1} of {settings.kills}: {KINDS[kind]}")
        for worker, _ in struck:
            os.kill(worker, signal.SIGSTOP if kind == "stopped" else signal.SIGKILL)
        yield strike


def _num_lines(run: Path) -> int:
    path = run / EVENTS_FILE
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _rows_by_epoch(events: list[dict[str, Any]]) -> dict[int, int]:
    rows: dict[int, int] = {}
    for event in events:
        if event["event"] == "step":
            rows[event["epoch"]] = rows.get(event["epoch"], 0) + event["rows"]
    return rows


def _same(one: Path, other: Path) -> bool:
    first, second = safetensors.torch.load_file(one), safetensors.torch.load_file(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)
