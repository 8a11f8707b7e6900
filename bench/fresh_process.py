"""Measurements that need a process of their own: peak memory, and the time until a kernel is ready.

`python -m bench.fresh_process REQUEST` measures and prints; `measure` starts it and reads what it printed.

Shape legend: T steps, B sequences, F features of the input.
"""

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final, Literal

import torch

from bench.kernel_peers import Net, drawn_cell, our_step, torch_layer, torch_step
from bench.training_step import Batch, StepShape, TorchStep, drawn_batch
from stretto.errors import StrettoError
from stretto.files import CACHE_VARIABLE
from stretto.nn import RNN

Kind = Literal["memory", "compile"]
Way = Literal["nn.LSTM", "stretto", "stretto, save='states'"]

STATUS: Final = Path("/proc/self/status")
FORGET_PEAK: Final = Path("/proc/self/clear_refs")
LATER_RUNS: Final = 3
MOST_SECONDS: Final = 900


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """What a fresh process is to measure.

    Attributes:
        kind: Peak memory of a training step, or the time of a first one.
        net: Which net.
        way: Whose, for memory.
        shape: Sizes of the step.
        threads: torch's.
    """

    kind: Kind
    net: Net
    way: Way = "stretto"
    shape: StepShape
    threads: int

    @classmethod
    def read(cls, text: str) -> "Request":
        """From what `dataclasses.asdict` and JSON made of one."""
        fields: dict[str, Any] = json.loads(text)
        return cls(**(fields | {"shape": StepShape(**fields["shape"])}))


def measure(request: Request, *, cache: Path | None = None) -> dict[str, float]:
    """Measure in a fresh process.

    Args:
        request: What.
        cache: The folder for compiled kernels; by default the usual one.

    Raises:
        StrettoError: If that process fails.
    """
    environment = dict(os.environ) | ({} if cache is None else {CACHE_VARIABLE: str(cache)})
    command = [sys.executable, "-m", __name__, json.dumps(dataclasses.asdict(request))]
    try:
        done = subprocess.run(  # noqa: S603 - our own interpreter and module
            command, env=environment, capture_output=True, text=True, timeout=MOST_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise StrettoError(
            f"a fresh process could not be run: {error}", fix="Leave that part out with --only."
        ) from error
    if done.returncode:
        last = (done.stderr.strip().splitlines() or ["no message"])[-1]
        raise StrettoError(
            f"the fresh process for {request.kind} failed: {last}", fix="Leave that part out with --only."
        )
    found: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return found


def measure_here(request: Request) -> dict[str, float]:
    """Measure in this process, which should be a fresh one."""
    torch.set_num_threads(request.threads)
    return _memory(request) if request.kind == "memory" else _compile(request)


def _memory(request: Request) -> dict[str, float]:
    """Bytes that a step needs at its peak beyond what was there before it: weights and batch are left out."""
    cell = drawn_cell(request.net, request.shape)
    rnn = RNN(cell, batch_first=False, save="states" if "states" in request.way else "auto")
    layer = torch_layer([cell], request.net, request.shape) if request.way.startswith("nn.") else None

    def step(shape: StepShape) -> TorchStep:
        batch = drawn_batch(shape)
        return our_step(rnn, batch=batch) if layer is None else torch_step(layer, batch=batch)

    # Two steps compile, load and start all that stays, but need next to no memory themselves.
    step(dataclasses.replace(request.shape, num_steps=2)).run()
    whole = step(request.shape)
    if FORGET_PEAK.exists():
        FORGET_PEAK.write_text("5", encoding="ascii")
    before = _status_bytes("VmRSS")
    whole.run()
    return {"extra_bytes": _status_bytes("VmHWM") - before}


def _status_bytes(name: str) -> float:
    found = re.search(rf"^{name}:\s*(\d+) kB", STATUS.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return 1024.0 * int(found.group(1)) if found else 0.0


def _compile(request: Request) -> dict[str, float]:
    """Seconds of a first forward and backward beyond later ones; torch is warm and everything is imported."""
    cell, batch = drawn_cell(request.net, request.shape), drawn_batch(request.shape)
    torch_step(torch_layer([drawn_cell("GRU", request.shape)], "GRU", request.shape), batch=batch).run()
    rnn = RNN(cell, batch_first=False)
    first, *later = (_seconds(rnn, batch) for _ in range(1 + LATER_RUNS))
    told = rnn.explain()
    return {
        "forward_seconds": first[0] - min(forward for forward, _ in later),
        "backward_seconds": first[1] - min(backward for _, backward in later),
        "analysis_seconds": told.analysis_seconds,
        "compile_seconds": told.compile_seconds,
    }


def _seconds(rnn: RNN, batch: Batch) -> tuple[float, float]:
    """Of a forward and of a backward."""
    begin = time.perf_counter()
    loss = (rnn(batch.x_TBF)[0] * batch.weight_TBO).sum()
    middle = time.perf_counter()
    loss.backward()
    return middle - begin, time.perf_counter() - middle


if __name__ == "__main__":
    print(json.dumps(measure_here(Request.read(sys.argv[1]))))
