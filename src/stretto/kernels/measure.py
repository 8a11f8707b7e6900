"""Small measurements that decide what runs: how one run is timed, and how what was found is kept across processes.

A run during which another process took a core from us says little, so it is taken again. What was found lies in the
cache, under a name that changes with everything that the times depend on.
"""

import contextlib
import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from stretto.errors import StrettoError
from stretto.files import write_text_atomically

MAX_RETRIES: Final = 12
"""How many disturbed runs are taken again before one is kept."""


def quiet_run(run: Callable[[], float], *, end: float, on_cpu: bool = False) -> tuple[float, bool]:
    """Seconds of a run during which no other process took a core from us, and True.

    After some tries, or at the end of the time for it: those of the fastest run, and False. Of a run on the CPU the
    time that this thread had a core counts then: waiting for one is what makes such a run too long.
    """
    fastest = math.inf
    for _ in range(MAX_RETRIES):
        before, begin = _times_interrupted(), time.thread_time()
        seconds = run()
        on_core = time.thread_time() - begin
        if _times_interrupted() == before:
            return seconds, True
        fastest = min(fastest, seconds, on_core if on_cpu else math.inf)
        if time.perf_counter() > end:
            break
    return fastest, False


def _times_interrupted() -> int:
    """How often another process took a core from us; always 0 where the system does not say."""
    try:
        import resource
    except ImportError:  # pragma: no cover - Windows
        return 0
    return resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw


def wait_for(device: torch.device) -> None:
    """Until a GPU has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def read_measurement(folder: Callable[[], Path], key: str) -> Any:
    """What was kept under a name; None if there is nothing, or it is damaged."""
    try:
        return json.loads((_in(folder) / f"{key}.json").read_text(encoding="utf-8"))
    except (OSError, StrettoError, ValueError):
        return None


def keep_measurement(folder: Callable[[], Path], key: str, found: Mapping[str, Sequence[float]]) -> None:
    """Keep it. A cache that cannot be written to costs another measurement in the next process, nothing else."""
    with contextlib.suppress(OSError, StrettoError):
        _in(folder).mkdir(mode=0o700, exist_ok=True)
        write_text_atomically(_in(folder) / f"{key}.json", json.dumps(found))


def _in(folder: Callable[[], Path]) -> Path:
    return folder() / "choices"
