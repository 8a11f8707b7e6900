"""`python -m bench busy`: forward and backward passes of our layers beside processes that keep processors busy.

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
from collections.abc import Iterator, Sequence
from typing import Final

import torch

from bench.contenders import Net, draw_batch, draw_cell, our_layer
from bench.harness import Count, Report, Settings, bench, torch_threads
from bench.kernels import LARGE_SHAPES, SHAPES, TINY
from stretto.nn import RNN

MAX_RATIOS: Final = {1: 1.8, 2: 2.6}
"""How much longer a pass may take beside so many busy processes; its share of two processors would be 1.5 and 2."""
COLUMNS: Final = ("net", "T, B, F, H", "busy processes", "threads", "ms", "least ms", "over quiet", "over one thread")
CAPTION: Final = (
    "ms: mean of all passes, the turns of all rows taken in rounds. over quiet: that over the least time of the same "
    "number of threads without busy processes. over one thread: over the mean of one thread beside as many."
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BusySettings(Settings):
    """Measure what other work on the machine costs.

    Attributes:
        nets: Cells, separated by blanks: GRU, LSTM, LayerNormLSTM.
        busy: Numbers of busy processes.
        thread_counts: Numbers of threads.
        rounds: Turns of each combination.
        turn_seconds: Seconds of a turn.
    """

    nets: tuple[Net, ...] = ("GRU",)
    busy: tuple[int, ...] = (0, 1, 2)
    thread_counts: tuple[Count, ...] = (1, 2)
    rounds: Count = 5
    turn_seconds: float = 0.3


@bench("busy", title="Kernels beside busy processes")
def run(settings: BusySettings, report: Report) -> None:
    """Time all combinations in rounds, each shape by itself."""
    shapes = [TINY] if settings.quick else [shape for shape, _ in (*SHAPES, *LARGE_SHAPES)]
    rows: list[tuple[str | int | float | None, ...]] = []
    with _busy_processes(max(settings.busy)) as processes, torch_threads(None):
        for net in settings.nets:
            for shape in shapes:
                report.progress(f"{net}, {shape}")
                layer = our_layer(RNN(draw_cell(net, shape), batch_first=False), batch=draw_batch(shape))
                seconds: dict[tuple[int, int], list[float]] = {}
                for _ in range(1 if settings.quick else settings.rounds):
                    for count in settings.busy:
                        with _running(processes[:count]):
                            for threads in settings.thread_counts:
                                torch.set_num_threads(threads)
                                layer.run()  # not timed: the first one meets memory and threads of another turn
                                begin = time.perf_counter()
                                while not seconds.get((count, threads)) or _elapsed(begin) < settings.turn_seconds:
                                    start = time.perf_counter()
                                    layer.run()
                                    seconds.setdefault((count, threads), []).append(_elapsed(start))
                                    if settings.quick:
                                        break
                for (count, threads), times in seconds.items():
                    mean = statistics.fmean(times)
                    quiet, single = seconds.get((0, threads)), seconds.get((count, 1))
                    over_quiet = mean / min(quiet) if quiet else None
                    over_single = mean / statistics.fmean(single) if single else None
                    rows.append(
                        (
                            *(net, shape.sizes, count, threads, 1e3 * mean, 1e3 * min(times)),
                            *(over_quiet, over_single),
                        )
                    )
                    if over_quiet is not None and threads > 1 and count in MAX_RATIOS:
                        what = f"{net} {shape.sizes}, {threads} threads beside {count}"
                        report.goal(what, over_quiet, at_most=MAX_RATIOS[count])
    report.table(title="Training steps beside busy processes", columns=COLUMNS, rows=rows, caption=CAPTION)


def _elapsed(since: float) -> float:
    return time.perf_counter() - since


@contextlib.contextmanager
def _busy_processes(count: int) -> Iterator[list[int]]:
    """Processes that would compute for ever, but are stopped until `_running` lets them."""
    command = [sys.executable, "-c", "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)\nwhile True: pass"]
    started = [subprocess.Popen(command) for _ in range(count)]  # noqa: S603
    try:
        for process in started:
            os.waitpid(process.pid, os.WUNTRACED)
        yield [process.pid for process in started]
    finally:
        for process in started:
            process.kill()
            process.wait()


@contextlib.contextmanager
def _running(processes: Sequence[int]) -> Iterator[None]:
    for process in processes:
        os.kill(process, signal.SIGCONT)
    try:
        yield
    finally:
        for process in processes:
            os.kill(process, signal.SIGSTOP)
