"""`python -m bench busy`: accelerated layers and torch's own, on a quiet and on a loaded machine.

Shape legend: T steps, B sequences, F features of the input, H hidden units.
"""

import contextlib
import copy
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
from torch import nn

import stretto
from bench.contenders import Shape, TorchContender, draw_batch, torch_contender
from bench.harness import Count, Report, Settings, bench
from bench.kernels import SHAPES, TINY
from stretto.timing import check_equal, torch_threads

MAX_OVER_QUIET: Final = {1: 1.8, 2: 2.6}
"""By how many busy processes: how much longer a step may take. A fair share of two cores would give 1.5 and 2."""
MIN_RATIO: Final = 0.97
COLUMNS: Final = (
    *("net", "T, B, F, H", "layers", "busy processes", "threads", "ours ms", "torch ms"),
    *("ratio", "over quiet", "over one thread"),
)
CAPTION: Final = (
    "Forward and backward, medians of all steps; all rows of a net are timed in turn. ratio: torch's time over ours. "
    "over quiet: our time over our time without busy processes. over one thread: our time over that of one thread "
    "with the same number of busy processes."
)
BUSY: Final = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)\nwhile True: pass"


# What libraries use by default: darts, GluonTS, neuralforecast, RLlib, cleanrl, NAM, a small policy, DeepFilterNet.
LIBRARIES: Final[tuple[tuple[type[nn.GRU | nn.LSTM], Shape, int], ...]] = (
    (nn.LSTM, Shape(24, 32, 25, 25), 1),
    (nn.GRU, Shape(24, 32, 25, 25), 1),
    (nn.LSTM, Shape(48, 32, 40, 40), 2),
    (nn.GRU, Shape(48, 32, 40, 40), 2),
    (nn.LSTM, Shape(36, 128, 128, 128), 2),
    (nn.LSTM, Shape(20, 32, 256, 256), 1),
    (nn.LSTM, Shape(128, 2, 128, 128), 1),
    (nn.LSTM, Shape(4096, 4, 16, 16), 1),
    (nn.GRU, Shape(32, 16, 32, 32), 1),
    (nn.GRU, Shape(300, 4, 256, 256), 1),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class BusySettings(Settings):
    """Compare accelerated layers with torch's, on a quiet machine and with busy processes.

    Attributes:
        rounds: How often each combination of threads and busy processes is timed.
        turn_seconds: Seconds each time.
    """

    rounds: Count = 2
    turn_seconds: float = 1.0


@bench("busy", title="Accelerated layers and torch's, on a quiet and on a loaded machine")
def run(settings: BusySettings, report: Report) -> None:
    """Time all combinations in rounds, each net by itself."""
    nets: list[tuple[type[nn.GRU | nn.LSTM], Shape, int]] = [
        (kind, shape, 1) for shape, _ in SHAPES for kind in (nn.GRU, nn.LSTM)
    ]
    nets = [(nn.GRU, TINY, 1)] if settings.quick else [*nets, *LIBRARIES]
    rows: list[tuple[str | int | float | None, ...]] = []
    with torch_threads(None):
        for kind, shape, num_layers in nets:
            report.progress(f"{kind.__name__}, {shape}")
            plain = kind(shape.input_size, shape.hidden_size, num_layers)
            batch = draw_batch(shape)
            torchs = torch_contender(plain, batch=batch)
            ours = torch_contender(stretto.accelerate(copy.deepcopy(plain)), batch=batch)
            check_equal(ours.results(), torchs.results(), name=f"our {kind.__name__}", peer="torch", where=str(shape))
            own, peer = _time(ours, torchs, settings)
            for (count, threads), ms in own.items():
                ratio, over_quiet = peer[count, threads] / ms, ms / own[0, threads]
                names = (kind.__name__, shape.sizes, num_layers)
                rows.append((*names, count, threads, ms, peer[count, threads], ratio, over_quiet, ms / own[count, 1]))
                what = f"{kind.__name__} {shape.sizes}, {threads} threads, {count} busy processes"
                report.goal(f"{what}: ratio", ratio, at_least=MIN_RATIO)
                if count in MAX_OVER_QUIET:
                    report.goal(f"{what}: over quiet", over_quiet, at_most=MAX_OVER_QUIET[count])
    report.table(title="Training steps with busy processes", columns=COLUMNS, rows=rows, caption=CAPTION)


def _time(
    ours: TorchContender, torchs: TorchContender, settings: BusySettings
) -> tuple[dict[tuple[int, int], float], dict[tuple[int, int], float]]:
    """Median milliseconds of both, by busy processes and threads."""
    found: list[dict[tuple[int, int], list[float]]] = [
        {(count, threads): [] for count in (0, 1, 2) for threads in (1, 2)} for _ in (ours, torchs)
    ]
    for _ in range(1 if settings.quick else settings.rounds):
        for count, threads in found[0]:
            torch.set_num_threads(threads)
            with _busy_processes(count):
                for contender, times in zip((ours, torchs), found, strict=True):
                    # Not timed: the first steps meet memory and threads of another turn, and the kernel of the
                    # operating system has yet to distribute threads and busy processes over the processors.
                    begin = time.perf_counter() + (0 if settings.quick else 0.3 * settings.turn_seconds)
                    contender.run()
                    while time.perf_counter() < begin:
                        contender.run()
                    end = begin + (0 if settings.quick else settings.turn_seconds)
                    while not times[count, threads] or time.perf_counter() < end:
                        start = time.perf_counter()
                        contender.run()
                        times[count, threads].append(1e3 * (time.perf_counter() - start))
    own, peer = ({key: statistics.median(ms) for key, ms in times.items()} for times in found)
    return own, peer


@contextlib.contextmanager
def _busy_processes(count: int) -> Iterator[None]:
    """Run this many busy loops as processes, started before the timing."""
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
