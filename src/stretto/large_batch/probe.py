"""What steps of training really take: batch sizes and lengths timed in turn, within a bound on memory and time."""

import dataclasses
import gc
import itertools
import json
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, final

import torch

from stretto.errors import StrettoError

MARGIN: Final = 1.2
"""Memory that a size is expected to need, as a multiple of what the size before suggests."""
FREE_SHARE: Final = 0.8
"""Of the memory that is free, what a probe may use unless it is told."""
LOOK_SECONDS: Final = 0.001
STATEMENT: Final = Path("/proc/self/statm")
FREE: Final = Path("/proc/meminfo")
GROUP: Final = Path("/sys/fs/cgroup")
OUT_OF_MEMORY: Final = ("out of memory", "can't allocate memory", "not enough memory", "bad_alloc")
TABLE_VERSION: Final = 1


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One shape of a batch.

    Attributes:
        batch_size: Sequences.
        length: Steps of each.
        seconds: The least that a step took; None if it cannot be run, or was not.
        num_steps: Real time steps that it computed.
        problem: Why there are no seconds; empty if there are.
    """

    batch_size: int
    length: int
    seconds: float | None
    num_steps: int = 0
    problem: str = ""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputTable:
    """Measured seconds of a step of training, by batch size and length.

    Attributes:
        entries: Everything that was tried.
        shares: What share of all sequences has about each length; they add up to 1.
        update_seconds: The part of every step that is spent once an update however many micro-batches are accumulated:
            the optimiser. 0 counts it with each of them.

    Example:
        >>> table = ThroughputTable.of({16: 0.5, 32: 0.75})
        >>> table.batch_sizes, table.seconds(32)
        ((16, 32), 0.75)
    """

    entries: tuple[Entry, ...]
    shares: Mapping[int, float]
    update_seconds: float = 0.0

    def __post_init__(self) -> None:
        wrong = [e for e in self.entries if e.seconds is not None and not 0.0 < e.seconds < math.inf]
        if wrong:
            raise StrettoError(f"{wrong[0]} has seconds that are no time", fix="Measure it anew.")
        strange = {entry.length for entry in self.entries} ^ set(self.shares)
        if strange or not all(0.0 <= share <= 1.0 for share in self.shares.values()):
            raise StrettoError(
                f"the shares {dict(self.shares)} do not go with the lengths that were measured",
                fix="Give each length a share of all sequences between 0 and 1.",
            )
        if not math.isclose(sum(self.shares.values()), 1.0, rel_tol=1e-6):
            raise StrettoError(f"the shares {dict(self.shares)} do not add up to 1", fix="Divide them by their sum.")
        if not math.isfinite(self.update_seconds) or self.update_seconds < 0:
            raise StrettoError(
                f"update_seconds is {self.update_seconds}", fix="Give the seconds of the optimiser's step, or 0."
            )

    @classmethod
    def of(cls, seconds: Mapping[int, float], *, length: int = 1, update_seconds: float = 0.0) -> "ThroughputTable":
        """A table of one length from seconds of a step by batch size, however they are known."""
        entries = [
            Entry(batch_size=size, length=length, seconds=float(each), num_steps=size * length)
            for size, each in sorted(seconds.items())
        ]
        return cls(entries=tuple(entries), shares={length: 1.0}, update_seconds=update_seconds)

    @property
    def seconds_by_size(self) -> dict[int, float]:
        """Mean seconds of a step, lengths weighted by their shares, of sizes measured at every length, rising."""
        found: dict[int, dict[int, float]] = {}
        for entry in self.entries:
            if entry.seconds is not None:
                found.setdefault(entry.batch_size, {})[entry.length] = entry.seconds
        return {
            size: math.fsum(share * times[length] for length, share in self.shares.items())
            for size, times in sorted(found.items())
            if len(times) == len(self.shares)
        }

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Sizes that were measured at every length, rising."""
        return tuple(self.seconds_by_size)

    def seconds(self, batch_size: int) -> float:
        """The mean seconds of a step over all sequences, lengths weighted by their shares.

        Raises:
            StrettoError: If this batch size was not measured at every length.
        """
        found = self.seconds_by_size.get(batch_size)
        if found is None:
            problems = [entry.problem for entry in self.entries if entry.batch_size == batch_size and entry.problem]
            raise StrettoError(
                f"there is no time of a step of {batch_size} sequences: {problems[0] if problems else 'not measured'}",
                fix=f"Use one of {list(self.batch_sizes)}.",
            )
        return found

    def to_dict(self) -> dict[str, Any]:
        """The table, ready for JSON."""
        return {
            "version": TABLE_VERSION,
            "entries": [dataclasses.asdict(entry) for entry in self.entries],
            "shares": [[length, share] for length, share in self.shares.items()],
            "update_seconds": self.update_seconds,
        }

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> "ThroughputTable":
        """The table that `to_dict` gave.

        Raises:
            StrettoError: If it is none.
        """
        try:
            if content["version"] != TABLE_VERSION:
                raise ValueError(f"version {content['version']!r}")
            return cls(
                entries=tuple(Entry(**entry) for entry in content["entries"]),
                shares={int(length): float(share) for length, share in content["shares"]},
                update_seconds=float(content["update_seconds"]),
            )
        except StrettoError:
            raise
        except (KeyError, TypeError, ValueError) as error:
            raise StrettoError(f"this is no table of throughput ({error})", fix="Measure a new one.") from error

    def to_json(self) -> str:
        """The table as text."""
        return json.dumps(self.to_dict())

    @classmethod
    def from_json(cls, text: str) -> "ThroughputTable":
        """The table that `to_json` gave; errors are those of `from_dict`."""
        try:
            content = json.loads(text)
        except json.JSONDecodeError as error:
            raise StrettoError(f"this is no table of throughput ({error})", fix="Measure a new one.") from error
        return cls.from_dict(content if isinstance(content, dict) else {})


def probe(
    run_step: Callable[[int, int], object],
    *,
    batch_sizes: Iterable[int],
    lengths: Mapping[int, float] | Sequence[int],
    repeats: int = 3,
    most_bytes: int | None = None,
    most_seconds: float = 10.0,
    update: Callable[[], object] | None = None,
    device: torch.device | str = "cpu",
) -> ThroughputTable:
    """Time steps of training at several batch sizes and lengths.

    First every shape is run once, in rising size and the longest sequences of a size first, while memory is watched.
    Before a size is run, what it needs is predicted from the size before; one that would pass `most_bytes`, or that
    fails for want of memory, ends the growth. Only the smallest size runs unpredicted. Then all shapes are timed in
    rounds, one after the other, so that a change of the machine's load hits all of them, and the least counts.

    Args:
        run_step: Does one step of training (forward, backward, optimiser) on a batch of the given size and length; may
            return how many real time steps that was. It must leave no trace: weights and optimiser are the caller's to
            guard.
        batch_sizes: Sizes to try.
        lengths: Lengths to try, with the share of all sequences that each stands for; equal shares if not given.
        repeats: Rounds.
        most_bytes: The most memory that this process, or the GPU, may use; four fifths of what is free, by default.
            Where memory cannot be watched (no /proc, no GPU), only failures end the growth.
        most_seconds: After which no step is begun that is expected to end later. Sizes not reached are marked. The
            smallest is run at every length whatever it takes, for without it nothing is known.
        update: Does the optimiser's step alone, if that can be told apart.
        device: Where steps run.

    Raises:
        StrettoError: If a size, length or bound makes no sense, or not even the smallest batch could be run.
    """
    sizes, shares = sorted(set(batch_sizes)), _shares(lengths)
    if not sizes or sizes[0] < 1 or repeats < 1 or not most_seconds > 0:
        raise StrettoError(
            f"probe got batch_sizes={sizes}, repeats={repeats} and most_seconds={most_seconds}",
            fix="Give sizes and repeats of at least 1, and some seconds.",
        )
    run = _Run(run_step, _MemoryWatch(device, most_bytes=most_bytes), time.perf_counter() + most_seconds)
    for size in sizes:
        for length in sorted(shares, reverse=True):
            run.grow(size, length)
    if not run.seconds:
        problem = next(iter(run.problems.values()))
        raise StrettoError(
            f"not even a batch of {sizes[0]} could be timed: {problem}",
            fix="Try a smaller one, shorter sequences, or allow more memory or time.",
        )
    for _, shape in itertools.product(range(repeats), list(run.seconds)):
        run.repeat(shape)
    update_seconds = 0.0
    if update is not None:
        update_seconds = min(run.timed(update) for _ in range(repeats + 1))
        # Once more than a whole step would be noise of the clock.
        update_seconds = min(update_seconds, *run.seconds.values())
    entries = [
        Entry(
            batch_size=size,
            length=length,
            seconds=run.seconds.get((size, length)),
            num_steps=run.num_steps.get((size, length), 0),
            problem=run.problems.get((size, length), ""),
        )
        for size, length in itertools.product(sizes, sorted(shares))
    ]
    return ThroughputTable(entries=tuple(entries), shares=shares, update_seconds=update_seconds)


def _is_out_of_memory(error: Exception) -> bool:
    return isinstance(error, MemoryError) or any(words in str(error).lower() for words in OUT_OF_MEMORY)


@final
class _MemoryWatch:
    """Tells how much memory work takes: the resident memory of this process, or what torch has on a GPU.

    Args:
        device: Where the work is done.
        most_bytes: The most that may be used; None takes a share of what is free.

    Attributes:
        most: The most that may be used; infinite where it cannot be told.
    """

    def __init__(self, device: torch.device | str, *, most_bytes: int | None) -> None:
        self._device = torch.device(device)
        self._is_cuda = self._device.type == "cuda"
        self._can_look = self._is_cuda or STATEMENT.exists()
        self.most = float(most_bytes) if most_bytes is not None else self.now() + FREE_SHARE * self._free()

    def now(self) -> int:
        """Bytes in use; 0 where it cannot be told."""
        if self._is_cuda:
            return torch.cuda.memory_allocated(self._device)
        if not self._can_look:
            return 0
        return int(STATEMENT.read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")

    def peak_of(self, work: Callable[[], object]) -> int:
        """Do the work; the most bytes in use meanwhile."""
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
            work()
            torch.cuda.synchronize(self._device)
            return torch.cuda.max_memory_allocated(self._device)
        # What a step takes is mostly given back when it ends, so somebody has to look while it runs.
        peak, over = [self.now()], threading.Event()

        def look() -> None:
            while not over.wait(LOOK_SECONDS):
                peak[0] = max(peak[0], self.now())

        looker = threading.Thread(target=look, daemon=True)
        looker.start()
        try:
            work()
        finally:
            over.set()
            looker.join()
        return max(peak[0], self.now())

    def wait(self) -> None:
        """Until a GPU has done what it was given."""
        if self._is_cuda:
            torch.cuda.synchronize(self._device)

    def free(self) -> None:
        """Give back what a failed step has left."""
        gc.collect()
        if self._is_cuda:
            torch.cuda.empty_cache()

    def _free(self) -> float:
        if self._is_cuda:
            return float(torch.cuda.mem_get_info(self._device)[0])
        free = math.inf
        if FREE.exists():
            lines = dict(line.split(":", 1) for line in FREE.read_text(encoding="ascii").splitlines() if ":" in line)
            if "MemAvailable" in lines:
                free = float(lines["MemAvailable"].split()[0]) * 1024
        bound, used = (GROUP / "memory.max", GROUP / "memory.current")
        if bound.exists() and used.exists():
            limit = bound.read_text(encoding="ascii").strip()
            if limit.isdigit():
                free = min(free, max(0.0, float(limit) - float(used.read_text(encoding="ascii"))))
        return free


@final
class _Run:
    """A probe under way: what shapes took, and why some were not run."""

    def __init__(self, run_step: Callable[[int, int], object], watch: _MemoryWatch, ends: float) -> None:
        self._run_step, self._watch, self._ends = run_step, watch, ends
        self.seconds: dict[tuple[int, int], float] = {}
        self.num_steps: dict[tuple[int, int], int] = {}
        self.problems: dict[tuple[int, int], str] = {}
        self._full = ""
        self._slots, self._bytes, self._floor = 0, 0, 0
        self._smallest, self._pace = 0, 0.0

    def grow(self, size: int, length: int) -> None:
        """Run a shape for the first time, unless it would not fit; once one did not, no larger size is run."""
        slots = size * length
        self._smallest = self._smallest or size
        if not self._full and self._slots:
            needed = self._floor + MARGIN * max(0, self._bytes - self._floor) * slots / self._slots
            if needed > self._watch.most:
                self._full = f"it would use {needed / 1e6:,.0f} MB of memory, {self._watch.most / 1e6:,.0f} are allowed"
            elif size > self._smallest and time.perf_counter() + self._pace * slots > self._ends:
                self._full = f"it would take about {self._pace * slots:.2g} s, longer than is left"
        if self._full:
            self.problems[size, length] = self._full
            return
        try:
            if not self._slots:
                # Kernels, threads and the optimiser's state come with the first step, and stay.
                self._run_step(size, length)
                self._floor = self._watch.now()
            answer: list[object] = []
            begun = time.perf_counter()
            peak = self._watch.peak_of(lambda: answer.append(self._run_step(size, length)))
            taken = time.perf_counter() - begun
        except (MemoryError, RuntimeError) as error:
            if not _is_out_of_memory(error):
                raise
            self._watch.free()
            self._full = self.problems[size, length] = "out of memory"
            return
        self.seconds[size, length] = taken
        self.num_steps[size, length] = answer[0] if isinstance(answer[0], int) else slots
        self._pace = taken / slots
        if slots >= self._slots:
            self._slots, self._bytes = slots, peak

    def repeat(self, shape: tuple[int, int]) -> None:
        """Time a shape once more, if there is time."""
        if time.perf_counter() + self.seconds[shape] <= self._ends:
            self.seconds[shape] = min(self.seconds[shape], self.timed(lambda: self._run_step(*shape)))

    def timed(self, work: Callable[[], object]) -> float:
        """Seconds of some work."""
        self._watch.wait()
        begun = time.perf_counter()
        work()
        self._watch.wait()
        return time.perf_counter() - begun


def _shares(lengths: Mapping[int, float] | Sequence[int]) -> dict[int, float]:
    given = dict(lengths) if isinstance(lengths, Mapping) else dict.fromkeys(lengths, 1.0)
    total = sum(given.values())
    if not given or min(given) < 1 or min(given.values()) < 0 or not 0 < total < math.inf:
        raise StrettoError(f"probe got the lengths {given}", fix="Give lengths of at least 1 with positive shares.")
    return {int(length): share / total for length, share in sorted(given.items())}
