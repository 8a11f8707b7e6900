"""How long a user waits for a kernel: with nothing compiled yet, and in a later process."""

import dataclasses
import tempfile
from pathlib import Path
from typing import Final

from bench.fresh_process import Request, measure
from bench.kernel_comparison import NETS, SHAPES, TINY, Tell

COLD_GOAL: Final = 5.0
CACHED_GOAL: Final = 0.05
SHAPE: Final = dataclasses.replace(SHAPES[1].shape, num_steps=50)
CACHED_PROCESSES: Final = 3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CompileRow:
    """The first training step of one net in a fresh process, everything imported.

    Attributes:
        net: Which.
        cached: Whether the kernel was compiled by an earlier process.
        forward_seconds: The first forward less a later one.
        backward_seconds: The first backward less a later one.
        analysis_seconds: Of that, tracing and analysing the step.
        compile_seconds: Of that, generating and compiling code, or finding it compiled and loading it, as far as it is
            done when the layer is built.
        wait_seconds: Both together: what the goal is for.
        goal: At most so many seconds.
        processes: Fresh processes measured; the one with the least wait is shown.
    """

    net: str
    cached: bool
    forward_seconds: float
    backward_seconds: float
    analysis_seconds: float
    compile_seconds: float
    wait_seconds: float
    goal: float
    processes: int


def compile_rows(*, threads: int, quick: bool, tell: Tell) -> tuple[CompileRow, ...]:
    """Every net, each with a cache of its own that is empty at first."""
    rows = []
    for net in ("GRU",) if quick else NETS:
        request = Request(kind="compile", net=net, shape=TINY if quick else SHAPE, threads=threads)
        with tempfile.TemporaryDirectory(prefix="stretto-") as folder:
            tell(f"compile: {net}, empty cache")
            rows.append(_row(request, [measure(request, cache=Path(folder))], cached=False))
            tell(f"compile: {net}, from the cache")
            again = [measure(request, cache=Path(folder)) for _ in range(1 if quick else CACHED_PROCESSES)]
            rows.append(_row(request, again, cached=True))
    return tuple(rows)


def _row(request: Request, found: list[dict[str, float]], *, cached: bool) -> CompileRow:
    best = min(found, key=_wait)
    return CompileRow(
        **best,
        net=request.net,
        cached=cached,
        wait_seconds=_wait(best),
        goal=CACHED_GOAL if cached else COLD_GOAL,
        processes=len(found),
    )


def _wait(found: dict[str, float]) -> float:
    return found["forward_seconds"] + found["backward_seconds"]
