"""What training updates really take: batch sizes and lengths timed in turn, within bounds on memory and time."""

import dataclasses
import gc
import itertools
import math
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from numbers import Real
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import torch

from stretto.checks import check_callable, check_float, check_int, check_kind, check_list
from stretto.errors import StrettoError

TABLE_VERSION: Final = 1
TABLE_FIX: Final = "Give a ThroughputTable, as probe measures it or ThroughputTable.of makes it."
MEMORY_MARGIN: Final = 1.2
"""Memory that a size is expected to need, as a multiple of what the size before suggests."""
FREE_MEMORY_SHARE: Final = 0.8
"""Share of the free memory that a probe may use by default."""
OUT_OF_MEMORY: Final = ("out of memory", "can't allocate memory", "not enough memory", "bad_alloc")
PROCESS_MEMORY: Final = Path("/proc/self/status")
RESET_PEAK: Final = Path("/proc/self/clear_refs")
"""Where Linux forgets the largest resident memory of this process, if "5" is written there."""
SYSTEM_MEMORY: Final = Path("/proc/meminfo")
CGROUP: Final = Path("/sys/fs/cgroup")


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """One shape of a batch: the seconds of its fastest update and the real steps of that, or why it was not run."""

    batch_size: int
    length: int
    seconds: float | None
    num_steps: int = 0
    problem: str = ""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ThroughputTable:
    """Measured seconds per training update, by batch size and length.

    Attributes:
        entries: Everything that was tried.
        shares: What share of all sequences has about each length; they add up to 1.
        update_seconds: The part of each entry's seconds that is spent once per update however many micro-batches are
            accumulated: the optimiser. 0 counts it with each of them.
        seconds_by_size: Mean seconds per update, lengths weighted by their shares, of the sizes measured at every
            length.

    Examples:
        >>> table = ThroughputTable.of({16: 0.5, 32: 0.75})
        >>> table.batch_sizes, table.seconds(32)
        ((16, 32), 0.75)
    """

    entries: tuple[Entry, ...]
    shares: Mapping[int, float]
    update_seconds: float = 0.0
    seconds_by_size: Mapping[int, float] = dataclasses.field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        times: dict[int, dict[int, float]] = {}
        for entry in self.entries:
            if entry.seconds is not None:
                check_float(entry.seconds, name="seconds", above=0.0, owner="Entry")
                times.setdefault(entry.batch_size, {})[entry.length] = entry.seconds
        check_float(self.update_seconds, name="update_seconds", at_least=0.0, owner="ThroughputTable")
        unmatched = {entry.length for entry in self.entries} ^ set(self.shares)
        shares = self.shares.values()
        if unmatched or min(shares, default=0.0) < 0.0 or not math.isclose(sum(shares), 1.0, rel_tol=1e-6):
            raise StrettoError(
                f"the shares {dict(self.shares)} do not match the lengths that were measured, or do not add up to 1",
                fix="Give each length the share of all sequences that it stands for.",
            )
        means = {
            size: math.fsum(share * found[length] for length, share in self.shares.items())
            for size, found in sorted(times.items())
            if len(found) == len(self.shares)
        }
        object.__setattr__(self, "seconds_by_size", means)

    @classmethod
    def of(cls, seconds: Mapping[int, float], *, length: int = 1, update_seconds: float = 0.0) -> "ThroughputTable":
        """A table of one length from seconds per update by batch size, however they are known."""
        check_kind(seconds, Mapping, name="seconds", owner="ThroughputTable", fix="Give {batch size: seconds}.")
        times = {
            check_int(size, name="a batch size", owner="ThroughputTable"): check_float(
                each, name=f"seconds[{size}]", above=0.0, owner="ThroughputTable"
            )
            for size, each in seconds.items()
        }
        entries = [
            Entry(batch_size=size, length=length, seconds=each, num_steps=size * length)
            for size, each in sorted(times.items())
        ]
        return cls(entries=tuple(entries), shares={length: 1.0}, update_seconds=update_seconds)

    @property
    def batch_sizes(self) -> tuple[int, ...]:
        """Sizes that were measured at every length, increasing."""
        return tuple(self.seconds_by_size)

    def seconds(self, batch_size: int) -> float:
        """The mean seconds per update at this batch size, lengths weighted by their shares.

        Raises:
            StrettoError: This batch size was not measured at every length.
        """
        found = self.seconds_by_size.get(batch_size)
        if found is None:
            problems = [entry.problem for entry in self.entries if entry.batch_size == batch_size and entry.problem]
            raise StrettoError(
                f"an update of {batch_size} sequences has no time: {problems[0] if problems else 'not measured'}",
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
            StrettoError: It is not one.
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
            raise StrettoError(f"this is not a throughput table ({error})", fix="Measure a new one.") from error


def probe(
    run_update: Callable[[int, int], object],
    *,
    batch_sizes: Iterable[int],
    lengths: Mapping[int, float] | Sequence[int],
    repeats: int = 3,
    max_bytes: int | None = None,
    max_seconds: float = 10.0,
    update: Callable[[], object] | None = None,
    device: torch.device | str = "cpu",
) -> ThroughputTable:
    """Time training updates at several batch sizes and lengths.

    First every shape is run once, by increasing size and the longest sequences of a size first, while memory is
    watched. Before a size is run, what it needs is predicted from the size before; one that would pass `max_bytes`, or
    that runs out of memory, ends the growth. Only the smallest size runs without a prediction. Then all shapes are
    timed in rounds, one after the other, so that a change of the machine's load hits all of them; the minimum counts.

    Args:
        run_update: Makes one training update (forward, backward, optimiser) on a batch of the given size and length;
            may return how many real time steps that was. It must leave no trace: weights and optimiser are the
            caller's to protect.
        batch_sizes: Sizes to try.
        lengths: Lengths to try, with the share of all sequences that each stands for; a sequence means equal shares.
        repeats: Rounds.
        max_bytes: The most memory that this process, or the GPU, may use; four fifths of what is free, by default.
            Where memory cannot be watched (no /proc, no GPU), only failures end the growth.
        max_seconds: No update is begun that is expected to end later. Sizes not reached are marked. The smallest is run
            at every length whatever it takes, for without it nothing is known.
        update: Runs the optimiser alone, if that can be separated.
        device: Where updates run.

    Raises:
        StrettoError: A size, length or bound makes no sense, or not even the smallest batch could be run.
    """
    check_callable(run_update, name="run_update", owner="probe")
    given = check_list(batch_sizes, name="batch_sizes", owner="probe", fix="Give a list of integers.")
    sizes, shares = sorted({check_int(size, name="batch_sizes") for size in given}), _shares(lengths)
    check_int(repeats, name="repeats")
    check_float(max_seconds, name="max_seconds", above=0.0)
    if not sizes:
        raise StrettoError("probe got no batch sizes", fix="Give at least one.")
    run = _Run(run_update, _MemoryWatch(device, max_bytes=max_bytes), deadline=time.perf_counter() + max_seconds)
    for size in sizes:
        for length in sorted(shares, reverse=True):
            run.grow(size, length)
    if not run.seconds:
        raise StrettoError(
            f"not even a batch of {sizes[0]} could be timed: {run.stopped}",
            fix="Try a smaller one, shorter sequences, or allow more memory or time.",
        )
    for _, shape in itertools.product(range(repeats), list(run.seconds)):
        run.repeat(shape)
    update_seconds = 0.0
    if update is not None:
        update_seconds = min(run.seconds_of(update) for _ in range(repeats + 1))
        # More than a whole update would be noise of the clock.
        update_seconds = min(update_seconds, *run.seconds.values())
    entries = tuple(
        dataclasses.replace(run.entries[shape], seconds=run.seconds.get(shape)) for shape in sorted(run.entries)
    )
    return ThroughputTable(entries=entries, shares=shares, update_seconds=update_seconds)


@final
class _MemoryWatch:
    """Measures memory in use: the resident memory of this process, or what torch has allocated on a GPU.

    `limit` is the most that may be used, by default a share of what is free; infinite where memory cannot be watched.
    """

    def __init__(self, device: torch.device | str, *, max_bytes: int | None) -> None:
        self._device = torch.device(device)
        self._is_cuda = self._device.type == "cuda"
        self._can_look = self._is_cuda or self._reset_peak()
        self.limit = float(max_bytes) if max_bytes is not None else self.now() + FREE_MEMORY_SHARE * self._free()

    def now(self) -> int:
        """Bytes in use; 0 where memory cannot be watched."""
        if self._is_cuda:
            return torch.cuda.memory_allocated(self._device)
        return _kilobytes(PROCESS_MEMORY, "VmRSS") * 1024 if self._can_look else 0

    def peak_of(self, work: Callable[[], object]) -> int:
        """Do the work; the most bytes in use meanwhile."""
        if self._is_cuda:
            torch.cuda.reset_peak_memory_stats(self._device)
            work()
            torch.cuda.synchronize(self._device)
            return torch.cuda.max_memory_allocated(self._device)
        can_look = self._can_look and self._reset_peak()
        work()
        return _kilobytes(PROCESS_MEMORY, "VmHWM") * 1024 if can_look else 0

    def synchronize(self) -> None:
        """Wait until a GPU has finished."""
        if self._is_cuda:
            torch.cuda.synchronize(self._device)

    def release(self) -> None:
        """Free what a failed update has left."""
        gc.collect()
        if self._is_cuda:
            torch.cuda.empty_cache()

    def _free(self) -> float:
        if self._is_cuda:
            return float(torch.cuda.mem_get_info(self._device)[0])
        free = _kilobytes(SYSTEM_MEMORY, "MemAvailable") * 1024 if SYSTEM_MEMORY.exists() else math.inf
        bound, used = (CGROUP / "memory.max", CGROUP / "memory.current")
        if bound.exists() and used.exists():
            limit = bound.read_text(encoding="ascii").strip()
            if limit.isdigit():
                free = min(free, max(0.0, float(limit) - float(used.read_text(encoding="ascii"))))
        return free

    @staticmethod
    def _reset_peak() -> bool:
        """Reset the peak to what is in use; False where that is impossible."""
        try:
            RESET_PEAK.write_text("5", encoding="ascii")
        except OSError:
            return False
        return True


def _kilobytes(file: Path, name: str) -> int:
    """A number of a file that has lines such as "VmRSS:    1234 kB"."""
    return int(re.findall(rf"^{name}:\s*(\d+) kB$", file.read_text(encoding="utf-8"), flags=re.MULTILINE)[0])


@final
class _Run:
    """A probe under way: what was found of each shape, and what the largest so far predicts of the next."""

    def __init__(self, run_update: Callable[[int, int], object], watch: _MemoryWatch, *, deadline: float) -> None:
        self._run_update, self._watch, self._deadline = run_update, watch, deadline
        self.seconds: dict[tuple[int, int], float] = {}
        self.entries: dict[tuple[int, int], Entry] = {}
        self.stopped = ""
        self._num_steps, self._peak_bytes, self._base_bytes = 0, 0, 0
        self._smallest, self._seconds_per_step = 0, 0.0

    def grow(self, size: int, length: int) -> None:
        """Run a shape for the first time, unless it would not fit; once one did not, no larger size is run."""
        num_steps = size * length
        self._smallest = self._smallest or size
        if not self.stopped and self._num_steps:
            grown = max(0, self._peak_bytes - self._base_bytes) * num_steps / self._num_steps
            needed, limit = self._base_bytes + MEMORY_MARGIN * grown, self._watch.limit
            seconds = self._seconds_per_step * num_steps
            if needed > limit:
                self.stopped = f"it would use {needed / 1e6:,.0f} MB of memory, {limit / 1e6:,.0f} are allowed"
            elif size > self._smallest and time.perf_counter() + seconds > self._deadline:
                self.stopped = f"it would take about {seconds:.2g} s, and too little time is left"
        answer: list[object] = []
        if not self.stopped:
            try:
                if not self._num_steps:
                    # Kernels, threads and the optimiser's state come with the first update, and stay.
                    self._run_update(size, length)
                    self._base_bytes = self._watch.now()
                begun = time.perf_counter()
                peak = self._watch.peak_of(lambda: answer.append(self._run_update(size, length)))
                taken = time.perf_counter() - begun
            except (MemoryError, RuntimeError) as error:
                is_memory = isinstance(error, MemoryError) or any(
                    words in str(error).lower() for words in OUT_OF_MEMORY
                )
                if not is_memory:
                    raise
                self._watch.release()
                self.stopped = "out of memory"
        real = answer[0] if answer and isinstance(answer[0], int) else num_steps
        self.entries[size, length] = Entry(
            batch_size=size,
            length=length,
            seconds=None,
            num_steps=0 if self.stopped else real,
            problem=self.stopped,
        )
        if self.stopped:
            return
        self.seconds[size, length] = taken
        self._seconds_per_step = taken / num_steps
        if num_steps >= self._num_steps:
            self._num_steps, self._peak_bytes = num_steps, peak

    def repeat(self, shape: tuple[int, int]) -> None:
        """Time a shape once more, if there is time."""
        if time.perf_counter() + self.seconds[shape] <= self._deadline:
            self.seconds[shape] = min(self.seconds[shape], self.seconds_of(lambda: self._run_update(*shape)))

    def seconds_of(self, work: Callable[[], object]) -> float:
        """Seconds of some work."""
        self._watch.synchronize()
        begun = time.perf_counter()
        work()
        self._watch.synchronize()
        return time.perf_counter() - begun


def _shares(lengths: Mapping[int, float] | Sequence[int]) -> dict[int, float]:
    fix = "Give a list of lengths, or {length: share}."
    if not isinstance(lengths, Mapping):
        lengths = dict.fromkeys(check_list(lengths, name="lengths", owner="probe", fix=fix), 1.0)
    for length, share in lengths.items():
        check_kind(length, int, np.integer, name="lengths", owner="probe", fix=fix)
        check_kind(share, Real, name="lengths", owner="probe", fix=fix)
    given = dict(lengths)
    total = sum(given.values())
    if not given or min(given) < 1 or min(given.values()) < 0 or not 0 < total < math.inf:
        raise StrettoError(f"probe got the lengths {given}", fix="Give lengths of at least 1 with positive shares.")
    return {int(length): share / total for length, share in sorted(given.items())}
