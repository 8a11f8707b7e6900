"""Workers that are killed and stopped again and again while they train: what is lost, and is the result the same."""

import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Final

import numpy as np
from pydantic import Field

from bench.fault_data import Dealt, num_lines, same_weights, training_words, write_signs
from bench.fault_nodes import NodesOutcome, run_two_nodes
from bench.fault_strikes import KINDS, Strike, strike
from stretto.errors import StrettoError
from stretto.files import write_text_atomically
from stretto.training import MODEL_FILE, Count, read_events

EPOCHS_A_KILL: Final = 60
LONGEST_PAUSE: Final = 2.0
PATIENCE: Final = 180.0
LONGEST_RUN: Final = 3600.0
LOST_AFTER: Final = 0.1
"""Minutes."""
REFUSED: Final = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class FaultsBenchSettings:
    """Settings of `stretto bench faults`.

    Attributes:
        kills: How many times to strike.
        workers: Processes that train.
        seed: Of who is struck, how and when.
        stops: Whether to stop workers too, not only to kill them; each takes as long as the time-out.
        nodes: Whether to drop one of two nodes, and let it come back, too.
        json: JSON file for the result.
    """

    kills: Count = 5
    workers: Annotated[int, Field(ge=2, le=64)] = 2
    seed: Annotated[int, Field(ge=0)] = 0
    stops: bool = True
    nodes: bool = True
    json: Path | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class FaultsBench:
    """What came of it.

    Attributes:
        asked: Strikes that were asked for.
        strikes: All strikes, in order.
        resumed: How often training went on from a checkpoint.
        dealt: How often the sequences of all epochs were used.
        same_weights: Whether the final weights equal those of the undisturbed run to the last bit.
        exit_code: Of the disturbed run.
        seconds: Of both runs.
        workers: Processes that trained.
        nodes: What came of two nodes; None if they were left out.
        missing: What was left out, and why.
    """

    asked: int
    strikes: tuple[Strike, ...]
    resumed: int
    dealt: Dealt
    same_weights: bool
    exit_code: int
    seconds: float
    workers: int
    nodes: NodesOutcome | None
    missing: tuple[str, ...]

    @property
    def survived(self) -> int:
        """Strikes after which the run came to its end all the same."""
        return len(self.strikes) if self.exit_code == 0 else 0

    @property
    def kept_all(self) -> bool:
        """Whether every strike was survived and nothing was lost."""
        nodes = self.nodes is None or (self.nodes.dealt.is_exact and not any(self.nodes.exit_codes))
        return nodes and self.survived == self.asked and self.same_weights and self.dealt.is_exact

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
        data, peace, disturbed = write_signs(folder / "signs.npz"), folder / "peace", folder / "disturbed"
        tell("training in peace")
        _end(_start(_words(data, peace, settings)))
        strikes, exit_code = _disturb(_words(data, disturbed, settings), disturbed, settings, tell)
        events = read_events(disturbed)
        found = Dealt.counted(events)
        same = exit_code == 0 and same_weights(peace / MODEL_FILE, disturbed / MODEL_FILE)
    nodes, missing = None, []
    if settings.nodes:
        try:
            nodes = run_two_nodes(tell=tell)
        except StrettoError as error:
            missing.append(str(error))
    bench = FaultsBench(
        asked=settings.kills,
        strikes=tuple(strikes),
        resumed=sum(event["event"] == "resumed" for event in events),
        same_weights=same,
        exit_code=exit_code,
        seconds=time.perf_counter() - begun,
        workers=settings.workers,
        nodes=nodes,
        missing=tuple(missing),
        dealt=found,
    )
    if settings.json is not None:
        write_text_atomically(settings.json, bench.to_json())
    return bench


def _silence(line: str) -> None:
    """Pass over a line."""


def _words(data: Path, out: Path, settings: FaultsBenchSettings) -> list[str]:
    words = training_words(data, out, epochs=EPOCHS_A_KILL * (settings.kills + 1), rank_timeout_minutes=LOST_AFTER)
    return [*words, "--nproc", str(settings.workers), "--max-restarts", str(2 * settings.kills + 2)]


def _start(words: list[str]) -> "subprocess.Popen[bytes]":
    command = [sys.executable, "-m", "stretto", *words]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)  # noqa: S603


def _end(process: "subprocess.Popen[bytes]") -> int:
    try:
        return process.wait(timeout=LONGEST_RUN)
    except subprocess.TimeoutExpired:
        raise StrettoError(
            "the run does not come to its end", fix="Run with fewer --kills, on a machine at rest."
        ) from None
    finally:
        _stop(process)


def _stop(process: "subprocess.Popen[bytes]") -> None:
    """Not by SIGKILL at once: the launcher takes its workers with it."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(timeout=PATIENCE)
        except subprocess.TimeoutExpired:
            process.kill()


def _disturb(
    words: list[str], run: Path, settings: FaultsBenchSettings, tell: Callable[[str], None]
) -> tuple[list[Strike], int]:
    """Strike a run until it was struck often enough, and let it end; returns the strikes and its exit code."""
    chance = np.random.default_rng(settings.seed)
    kinds = [kind for kind in KINDS if settings.stops or kind != "stopped"]
    # Every kind once before any comes again.
    order = [kind for _ in range(0, settings.kills, len(kinds)) for kind in chance.permutation(kinds).tolist()]
    strikes: list[Strike] = []
    process = _start(words)
    try:
        while len(strikes) < settings.kills and _goes_on(process, run):
            time.sleep(chance.uniform(0.0, LONGEST_PAUSE))
            kind, after = order[len(strikes)], num_lines(run)
            ranks = strike(kind, process.pid, run, chance=chance)
            if not ranks:
                continue
            strikes.append(Strike(kind=kind, ranks=ranks, after=after))
            tell(f"{len(strikes)} of {settings.kills}: {KINDS[kind]}")
            if kind == "full":
                code = _end(process)
                if code != REFUSED:
                    return strikes, code
                # All workers have said so and ended; with room again, the run goes on.
                process = _start([*words, "--resume"])
        tell("training to the end")
        return strikes, _end(process)
    finally:
        _stop(process)


def _goes_on(process: "subprocess.Popen[bytes]", run: Path) -> bool:
    """Whether there is progress, some of it since now."""
    before, ends = num_lines(run), time.monotonic() + PATIENCE
    while num_lines(run) < before + 20:
        if process.poll() is not None or time.monotonic() > ends:
            return False
        time.sleep(0.02)
    return True
