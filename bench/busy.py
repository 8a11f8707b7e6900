"""`python -m bench busy`: training steps of GRU layers beside processes that keep processors busy.

Shape legend: T steps, B sequences, F features of the input, H hidden units.
"""

import contextlib
import dataclasses
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Final

import torch

from bench.contenders import draw_batch, draw_cell, our_layer
from bench.harness import Count, Report, Settings, bench, torch_threads
from bench.kernels import LARGE_SHAPES, SHAPES, TINY
from stretto.nn import RNN

MAX_RATIOS: Final = {1: 1.8, 2: 2.6}
"""How much longer a step may take beside so many busy processes; its share of two processors would be 1.5 and 2."""
COLUMNS: Final = ("T, B, F, H", "busy processes", "threads", "ms", "least ms", "over quiet", "over one thread")
CAPTION: Final = (
    "ms: mean of all steps, the turns of all rows taken in rounds. over quiet: that over the least time of the same "
    "number of threads without busy processes. over one thread: over the mean of one thread beside as many."
)
BUSY: Final = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)\nwhile True: pass"


@dataclasses.dataclass(frozen=True, kw_only=True)
class BusySettings(Settings):
    """Measure what other work on the machine costs.

    Attributes:
        rounds: Turns of each combination of threads and busy processes.
        turn_seconds: Seconds of a turn.
    """

    rounds: Count = 5
    turn_seconds: float = 0.3


@bench("busy", title="Kernels beside busy processes")
def run(settings: BusySettings, report: Report) -> None:
    """Time all combinations in rounds, each shape by itself."""
    shapes = [TINY] if settings.quick else [shape for shape, _ in (*SHAPES, *LARGE_SHAPES)]
    rows: list[tuple[str | int | float | None, ...]] = []
    with torch_threads(None):
        for shape in shapes:
            report.progress(str(shape))
            layer = our_layer(RNN(draw_cell("GRU", shape), batch_first=False), batch=draw_batch(shape))
            seconds: dict[tuple[int, int], list[float]] = {(count, n): [] for count in (0, 1, 2) for n in (1, 2)}
            for _ in range(1 if settings.quick else settings.rounds):
                for (count, threads), times in seconds.items():
                    torch.set_num_threads(threads)
                    with _busy_processes(count):
                        layer.run()  # not timed: the first one meets memory and threads of another turn
                        end = time.perf_counter() + (0 if settings.quick else settings.turn_seconds)
                        while not times or time.perf_counter() < end:
                            start = time.perf_counter()
                            layer.run()
                            times.append(time.perf_counter() - start)
            for (count, threads), times in seconds.items():
                mean = statistics.fmean(times)
                over_quiet, over_single = mean / min(seconds[0, threads]), mean / statistics.fmean(seconds[count, 1])
                rows.append((shape.sizes, count, threads, 1e3 * mean, 1e3 * min(times), over_quiet, over_single))
                if threads > 1 and count in MAX_RATIOS:
                    what = f"{shape.sizes}, {threads} threads beside {count}"
                    report.goal(what, over_quiet, at_most=MAX_RATIOS[count])
    report.table(title="Training steps beside busy processes", columns=COLUMNS, rows=rows, caption=CAPTION)


@contextlib.contextmanager
def _busy_processes(count: int) -> Iterator[None]:
    """So many processes that compute for ever, started before the clock is."""
    started = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]  # noqa: S603
    try:
        for process in started:
            os.waitpid(process.pid, os.WUNTRACED)
            os.kill(process.pid, signal.SIGCONT)
        yield
    finally:
        for process in started:
            process.kill()
            process.wait()
