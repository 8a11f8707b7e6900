"""Whether generated code or torch's own layer is faster for a batch, from a small measurement kept across processes.

A layer's time is close to a line in the number of steps. Two short runs of each give the two lines, once for each kind
of layer and machine; from then on they are read from the cache, so that the same machine decides the same way in every
process:

    seconds |        torch            fixed + per_step * T
            |      /
            |    /       __---        a batch of T steps goes to the lower line
            |  /  __---  generated
            |/---
            +--------------------- T
               8     32

The measured layer is one of our own with the sizes of the user's. It touches neither the user's weights and graph nor
the random state, and its cost does not grow with the user's batch.
"""

import contextlib
import dataclasses
import hashlib
import json
import math
import resource
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias, final

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from stretto.errors import StrettoError
from stretto.files import cache_folder, write_text_atomically
from stretto.kernels import describe_machine

SHORT: Final = 8
LONG: Final = 32
ROUNDS: Final = 4
"""Timed runs of each; the fastest counts."""
MAX_RETRIES: Final = 12
"""How many disturbed runs are taken again before one is kept."""
MAX_SECONDS: Final = 0.4
"""After so long no run is taken again, and no further round begins."""
MAX_WORK: Final = 1 << 29
"""Multiplications of a long run, at most: a layer with more rows is measured on fewer."""
FORMAT: Final = 3
Run: TypeAlias = Callable[[nn.RNNBase, Any], Any]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Layers and batches that cost the same per step. Rows are those of the next power of two."""

    mode: str
    input_size: int
    hidden_size: int
    proj_size: int
    num_layers: int
    bidirectional: bool
    bias: bool
    dtype: torch.dtype
    training: bool
    packed: bool
    num_rows: int
    threads: int

    @property
    def key(self) -> str:
        """A name in the cache, which changes with everything that the times depend on."""
        parts = [str(FORMAT), describe_machine(), torch.__version__, repr(self)]
        return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """Seconds of a run: fixed + per_step * T."""

    fixed: float
    per_step: float

    def at(self, num_steps: int) -> float:
        """Seconds of a run of so many steps."""
        return self.fixed + self.per_step * num_steps


_known: dict[Kind, tuple[Line, Line]] = {}
_measuring = threading.Lock()


def expected_speedup(kind: Kind, *, num_steps: int, generated: Run, original: Run) -> float:
    """How many times faster generated code is expected to be than torch's own layer.

    Args:
        kind: Of layer and batch.
        num_steps: T of the batch.
        generated: Runs a layer on generated code.
        original: Runs a layer as torch does.
    """
    lines = _known.get(kind)
    if lines is None:
        with _measuring:
            lines = _known.get(kind) or _load(kind) or _measure(kind, generated, original)
            _known[kind] = lines
    ours, torchs = lines
    return torchs.at(num_steps) / ours.at(num_steps)


def _measure(kind: Kind, generated: Run, original: Run) -> tuple[Line, Line]:
    found = _time(kind, {"generated": generated, "torch": original})
    _store(kind, found)
    return found["generated"], found["torch"]


def _load(kind: Kind) -> tuple[Line, Line] | None:
    try:
        text = (cache_folder() / "choices" / f"{kind.key}.json").read_text(encoding="utf-8")
        stored = json.loads(text)
        lines = [Line(*map(float, stored[name])) for name in ("generated", "torch")]
    except (OSError, StrettoError, ValueError, KeyError, TypeError):
        return None  # not measured yet, or damaged: it is measured again
    if not all(math.isfinite(line.at(1)) and line.at(1) > 0 for line in lines):
        return None
    return lines[0], lines[1]


def _store(kind: Kind, found: dict[str, Line]) -> None:
    stored = {name: [line.fixed, line.per_step] for name, line in found.items()}
    # A cache that cannot be written to costs another measurement in the next process, nothing else.
    with contextlib.suppress(OSError, StrettoError):
        folder = cache_folder() / "choices"
        folder.mkdir(mode=0o700, exist_ok=True)
        write_text_atomically(folder / f"{kind.key}.json", json.dumps(stored))


def _time(kind: Kind, runs: dict[str, Run]) -> dict[str, Line]:
    best = {(name, steps): math.inf for name in runs for steps in (SHORT, LONG)}
    with _undisturbed(training=kind.training):
        layer = _layer(kind)
        inputs = {steps: _input(kind, steps) for steps in (SHORT, LONG)}
        weights = list(layer.parameters())
        for x in inputs.values():
            for run in runs.values():
                _one_run(run, layer, x, weights, training=kind.training)
        end = time.perf_counter() + MAX_SECONDS
        for number in range(ROUNDS):
            if number and time.perf_counter() > end:
                break
            for (name, steps), fastest in best.items():
                seconds = _quiet_run(runs[name], layer, inputs[steps], weights, training=kind.training, end=end)
                best[name, steps] = min(fastest, seconds)
    return {name: _line(best[name, SHORT], best[name, LONG]) for name in runs}


def _line(short: float, long: float) -> Line:
    per_step = max(0.0, (long - short) / (LONG - SHORT))
    return Line(max(0.0, long - LONG * per_step), per_step)


def _quiet_run(
    run: Run, layer: nn.RNNBase, x: Any, weights: list[nn.Parameter], *, training: bool, end: float
) -> float:
    """Seconds of a run during which no other process took a core from us; after some tries, of the fastest one."""
    fastest = math.inf
    for _ in range(MAX_RETRIES):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw
        fastest = min(fastest, _one_run(run, layer, x, weights, training=training))
        if resource.getrusage(resource.RUSAGE_SELF).ru_nivcsw == before or time.perf_counter() > end:
            break
    return fastest


def _one_run(run: Run, layer: nn.RNNBase, x: Any, weights: list[nn.Parameter], *, training: bool) -> float:
    start = time.perf_counter()
    y, _ = run(layer, x)
    if training:
        torch.autograd.grad((y if isinstance(y, torch.Tensor) else y.data).sum(), weights)
    return time.perf_counter() - start


@contextlib.contextmanager
def _undisturbed(*, training: bool) -> Iterator[None]:
    """Nothing that the caller has switched on sees what runs inside: gradient modes, hooks on saved tensors."""
    hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
    with torch.inference_mode(mode=False), torch.set_grad_enabled(training), hooks:
        yield


def _layer(kind: Kind) -> nn.RNNBase:
    """A layer of torch's with the sizes of the user's; made on the meta device, since initialising draws numbers."""
    options: dict[str, Any] = {"num_layers": kind.num_layers, "bidirectional": kind.bidirectional, "bias": kind.bias}
    options |= {"device": "meta", "dtype": kind.dtype}
    if kind.mode.startswith("RNN"):
        options["nonlinearity"] = kind.mode.removeprefix("RNN_").lower()
    if kind.mode == "LSTM":
        options["proj_size"] = kind.proj_size
    made = {"LSTM": nn.LSTM, "GRU": nn.GRU}.get(kind.mode, nn.RNN)
    layer: nn.RNNBase = made(kind.input_size, kind.hidden_size, **options)
    fill_parameters(layer, 0.5 / math.sqrt(kind.hidden_size), kind.dtype)
    layer._init_flat_weights()
    return layer


def fill_parameters(module: nn.Module, value: float, dtype: torch.dtype) -> None:
    """Give a module that was made on the meta device, where initialising draws no random numbers, real parameters.

    Unlike `to_empty`, or any operator on meta tensors, it does not import torch's compiler, which takes seconds.
    """
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is not None:
                owner.register_parameter(
                    name, nn.Parameter(torch.full(parameter.shape, value, dtype=dtype, device="cpu"))
                )


def _input(kind: Kind, steps: int) -> Any:
    gates = {"LSTM": 4, "GRU": 3}.get(kind.mode, 1) * kind.num_layers * (2 if kind.bidirectional else 1)
    per_row = LONG * gates * kind.hidden_size * (kind.hidden_size + kind.input_size)
    rows = max(1, min(kind.num_rows, MAX_WORK // per_row))
    x_TBF = torch.full((steps, rows, kind.input_size), 0.5, dtype=kind.dtype)
    return pack_padded_sequence(x_TBF, torch.full((rows,), steps)) if kind.packed else x_TBF
