"""How fast are the generated kernels? Training steps of our layer beside its peers', in interleaved runs."""

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Final

import torch

from bench.interleaved import Pace
from bench.kernel_comparison import (
    Comparison,
    Tell,
    hidden_comparisons,
    shape_comparisons,
    thread_comparisons,
)
from bench.kernel_compile import CompileRow, compile_rows
from bench.kernel_growth import Growth, growth
from bench.kernel_layers import bidirectional_comparisons, stack_comparisons
from bench.kernel_limits import LimitRow, limit_rows
from bench.kernel_memory import MemoryRow, memory_rows
from bench.kernel_peers import JaxStep
from bench.kernel_ragged import RaggedRow, ragged_rows
from bench.machine import Machine, machine_with
from stretto.errors import StrettoError
from stretto.extras import optional
from stretto.files import write_text_atomically
from stretto.kernels import NoCompiler, find_compiler

PARTS: Final = (
    "shapes",
    "bidirectional",
    "stack",
    "ragged",
    "hidden",
    "threads",
    "memory",
    "compile",
    "limits",
    "growth",
)
PEERS: Final = ("jax",)
COMPILED: Final = "compiled kernels"
QUICK_PACE: Final = Pace(rounds=1, budget=0.0)
TURN_SECONDS: Final = 0.1


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelsBenchSettings:
    """What to compare.

    Attributes:
        only: Parts to run, separated by blanks or commas: shapes, bidirectional, stack, ragged, hidden, threads,
            memory, compile, limits, growth; all of them if left out.
        threads: Threads of torch; as many as it has by default.
        thread_counts: Numbers of threads that the parts threads and limits compare.
        repeats: Rounds of an interleaved run; in each, every contestant has one turn of a tenth of a second or more.
        budget: Seconds after which a run of at least three rounds begins no further one.
        json: JSON file for the result, written after each part.
        out: Folder for an HTML page with all tables, and the JSON file.
        quick: Tiny shapes and a single round: shows that it works, and no more; its times mean nothing.
    """

    only: tuple[str, ...] = ()
    threads: int | None = None
    thread_counts: tuple[int, ...] = (1, 2)
    repeats: int = 10
    budget: float = 10.0
    json: Path | None = None
    out: Path | None = None
    quick: bool = False

    def __post_init__(self) -> None:
        for name in ("threads", "thread_counts", "repeats"):
            given = getattr(self, name)
            numbers = given if isinstance(given, tuple) else (given,)
            if not numbers or any(number is not None and number < 1 for number in numbers):
                raise StrettoError(f"{name}={given!r} is too little to compare with", fix="Give at least 1.")
        for part in self.parts:
            if part not in PARTS:
                raise StrettoError(f"there is no part {part!r}", fix=f"Choose from {', '.join(PARTS)}.")

    @property
    def parts(self) -> tuple[str, ...]:
        """The parts to run."""
        named = tuple(part for word in self.only for part in word.split(",") if part)
        return named or PARTS

    @property
    def pace(self) -> Pace:
        """How often everything is timed."""
        return QUICK_PACE if self.quick else Pace(rounds=self.repeats, budget=self.budget, turn=TURN_SECONDS)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class KernelsBench:
    """The result of one run; what was not asked for is empty.

    Attributes:
        comparisons: Our step beside a peer's: parts shapes, bidirectional, stack, hidden and threads.
        ragged: Batches of unequal lengths.
        memory: Peak memory of a step.
        compiling: Time until a kernel is ready.
        limits: Shares of what the machine can do.
        growth: Time against length, batch and size.
        threads: torch's, where nothing else is said.
        quick: Whether it was only a smoke test.
        machine: Where it ran.
        missing: What was left out, each with the reason and the way to get it.
        seconds: Time of the whole run.
    """

    comparisons: tuple[Comparison, ...]
    ragged: tuple[RaggedRow, ...]
    memory: tuple[MemoryRow, ...]
    compiling: tuple[CompileRow, ...]
    limits: tuple[LimitRow, ...]
    growth: tuple[Growth, ...]
    threads: int
    quick: bool
    machine: Machine
    missing: tuple[str, ...]
    seconds: float

    def to_json(self) -> str:
        """All of it as JSON."""
        return json.dumps(dataclasses.asdict(self), indent=2, allow_nan=False) + "\n"


def run_kernels_bench(settings: KernelsBenchSettings | None = None, *, tell: Tell | None = None) -> KernelsBench:
    """Compare training steps; first the results, then the times.

    Args:
        settings: What to compare.
        tell: Called with a line before each part.

    Raises:
        StrettoError: If contestants do not compute the same.
    """
    settings = settings or KernelsBenchSettings()
    tell = tell or (lambda _: None)
    begin = time.perf_counter()
    with _torch_threads(settings.threads) as threads:
        missing = _missing(settings.parts)
        bench = _nothing_yet(settings, threads=threads, missing=missing)
        for part, (field, measure) in _measures(settings, threads=threads, missing=missing, tell=tell).items():
            if part not in settings.parts:
                continue
            found: dict[str, Any] = {field: getattr(bench, field) + measure()}
            bench = dataclasses.replace(bench, **found, seconds=time.perf_counter() - begin)
            # After each part, so that a run that is stopped leaves what it has.
            if settings.json is not None:
                write_text_atomically(settings.json, bench.to_json())
    return bench


def _measures(
    settings: KernelsBenchSettings, *, threads: int, missing: Mapping[str, str], tell: Tell
) -> dict[str, tuple[str, Callable[[], tuple[Any, ...]]]]:
    """For each part the field that its rows belong to, and how to get them."""
    quick, counts = settings.quick, settings.thread_counts
    with_jax, compiles = JaxStep.title not in missing, COMPILED not in missing
    timed: dict[str, Any] = {"pace": settings.pace, "quick": quick, "tell": tell}
    return {
        "shapes": ("comparisons", lambda: shape_comparisons(**timed, with_jax=with_jax)),
        "bidirectional": ("comparisons", lambda: bidirectional_comparisons(**timed)),
        "stack": ("comparisons", lambda: stack_comparisons(**timed)),
        "ragged": ("ragged", lambda: ragged_rows(**timed)),
        "hidden": ("comparisons", lambda: hidden_comparisons(**timed)),
        "threads": ("comparisons", lambda: thread_comparisons(counts, **timed)),
        "memory": ("memory", lambda: memory_rows(threads=threads, quick=quick, tell=tell)),
        "compile": (
            "compiling",
            lambda: compile_rows(threads=threads, quick=quick, tell=tell) if compiles else (),
        ),
        "limits": ("limits", lambda: limit_rows(counts, **timed, compiles=compiles)),
        "growth": ("growth", lambda: growth(**timed)),
    }


def _nothing_yet(settings: KernelsBenchSettings, *, threads: int, missing: Mapping[str, str]) -> KernelsBench:
    return KernelsBench(
        comparisons=(),
        ragged=(),
        memory=(),
        compiling=(),
        limits=(),
        growth=(),
        threads=threads,
        quick=settings.quick,
        machine=machine_with(PEERS),
        missing=tuple(f"{name}: {reason}" for name, reason in missing.items()),
        seconds=0.0,
    )


def _missing(parts: tuple[str, ...]) -> dict[str, str]:
    """What cannot be run here, with the reason."""
    found: dict[str, str] = {}
    if "shapes" in parts:
        try:
            optional(PEERS[0])
        except StrettoError as error:
            found[JaxStep.title] = str(error)
        except (AttributeError, OSError, RuntimeError) as error:
            found[JaxStep.title] = f"its import fails ({error}). Mend it: pip install 'stretto[peers]'."
    try:
        find_compiler()
    except NoCompiler as reason:
        found[COMPILED] = f"{reason}, so our layer runs without. Install g++ or name a compiler in CXX."
    return found


@contextlib.contextmanager
def _torch_threads(count: int | None) -> Iterator[int]:
    """So many threads of torch's for a while."""
    before = torch.get_num_threads()
    try:
        if count is not None:
            torch.set_num_threads(count)
        yield torch.get_num_threads()
    finally:
        torch.set_num_threads(before)
