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
               8     32 or more

Batches of many megabytes leave these lines: memory is then taken from the system and given back at every step, and
whoever needs more of it loses. Where the lines do not decide by a clear margin, such a batch is measured at its own
size, cut off after as many steps as show this.

Where other work takes part in a measurement, its times are too long, and unequally so: then the time counts that the
thread had a core. Such a measurement is repeated by the next process, and after a few of them, whose best times are
kept, in intervals that grow:

    process     1          2          3                4, 5, 6, ...    after 1 hour   after 2 more, 4 more, ...
                measured   measured   measured         read            measured       measured
                `----- the best times so far decide ---------------------------------------------->

until one is undisturbed, which is kept for good.

The measured layer is one of our own with the sizes of the user's. It touches neither the user's weights and graph nor
the random state, and its cost does not grow with the user's batch.
"""

import contextlib
import dataclasses
import functools
import hashlib
import math
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias, final

import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

from stretto.files import cache_folder
from stretto.kernels import describe_machine, hooks_allowed, keep_measurement, read_measurement, wait_for
from stretto.kernels import quiet_run as _quiet_run

SHORT: Final = 8
LONG: Final = 32
MAX_LONG: Final = 2048
"""Steps of a long run, at least and at most; see `_long_run`."""
ROUNDS: Final = 8
"""Timed runs of each, if they are short; the fastest counts."""
MAX_SECONDS: Final = 0.4
"""After so long no run is taken again, and no further round begins."""
MAX_WORK: Final = 1 << 29
"""Multiplications of a long run, at most: a layer with more rows is measured on fewer."""
LARGE: Final = 1 << 23
"""Bytes of all gates of a batch from which on short runs may not tell how long it takes."""
MAX_LARGE: Final = 1 << 26
"""Bytes of all gates of a batch that is measured, at most."""
CLEAR_SPEEDUPS: Final = (0.5, 1.25)
"""Outside of these, short runs decide about large batches too."""
FILLS: Final = (0.75, 0.5, 0.25, 0.125, 0.0625)
"""What ragged batches are measured at. Equal lengths are a kind of their own: they cost torch far less."""
MAX_DISTURBED: Final = 3
"""Disturbed measurements in a row, each by the next process that needs one, before there is a pause."""
FIRST_PAUSE: Final = 3600.0
"""Seconds until the next one is tried; each further pause is twice as long."""
LONGEST_PAUSE: Final = 30 * 86400.0
FORMAT: Final = 7
CPU: Final = torch.device("cpu")
Run: TypeAlias = Callable[[nn.RNNBase, Any], Any]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """Layers and batches that cost the same per step. Rows are those of the next power of two.

    Attributes:
        fill: Real steps of a packed batch over those of its longest sequence times its rows, roughly; 0 for a tensor.
        large_steps: Steps of a large batch that is measured as a whole; 0 for lines from short runs.
    """

    mode: str
    input_size: int
    hidden_size: int
    proj_size: int
    num_layers: int
    bidirectional: bool
    bias: bool
    dtype: torch.dtype
    training: bool
    input_gradient: bool
    fill: float
    num_rows: int
    threads: int
    device: torch.device = CPU
    large_steps: int = 0

    @property
    def gates(self) -> int:
        """Values of all gates, for each row and step."""
        gates = {"LSTM": 4, "GRU": 3}.get(self.mode, 1)
        return gates * self.hidden_size * self.num_layers * (2 if self.bidirectional else 1)

    @property
    def measured_rows(self) -> int:
        """Rows of a long run: those of the batch, or as many as keep it short."""
        return max(1, min(self.num_rows, MAX_WORK // (LONG * self._work_of_row)))

    @property
    def work(self) -> int:
        """Multiplications of a step of that run."""
        return self.measured_rows * self._work_of_row

    @property
    def _work_of_row(self) -> int:
        return self.gates * (self.hidden_size + self.input_size)

    @property
    def key(self) -> str:
        """A name in the cache, which changes with everything that the times depend on."""
        parts = [str(FORMAT), describe_machine(), torch.__version__, repr(self)]
        if self.device.type == "cuda":
            parts.append(torch.cuda.get_device_name(self.device))
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


@final
@dataclasses.dataclass(frozen=True, slots=True)
class Stored:
    """What was measured of a kind, by this process or another.

    Attributes:
        generated: The line of generated code.
        torch: That of torch's own layer.
        disturbed: How many measurements were disturbed, of which these are the best times; 0 if one was not.
        again: When to measure again, in seconds as `time.time` has them.
    """

    generated: Line
    torch: Line
    disturbed: int = 0
    again: float = 0.0

    @property
    def is_due(self) -> bool:
        """Whether it is to be measured again."""
        # A clock that was set back must not make a pause longer.
        return self.disturbed > 0 and not 0 < self.again - _now() <= LONGEST_PAUSE

    def best(self, other: "Stored") -> "Stored":
        """These times, or those of another measurement where they are shorter."""
        return dataclasses.replace(
            self,
            generated=_shortest(self.generated, other.generated),
            torch=_shortest(self.torch, other.torch),
        )


def _shortest(one: Line, other: Line) -> Line:
    short, long = (min(one.at(steps), other.at(steps)) for steps in (SHORT, MAX_LONG))
    return one if (short, long) == (one.at(SHORT), one.at(MAX_LONG)) else _line(short, long, MAX_LONG)


_now = time.time
_known: dict[Kind, tuple[Line, Line]] = {}
_disturbed: set[Kind] = set()
_measuring = threading.Lock()


def expected_speedup(kind: Kind, *, num_steps: int, generated: Run, original: Run) -> float:
    """How many times faster generated code is expected to be than torch's own layer.

    Args:
        kind: Of layer and batch.
        num_steps: T of the batch.
        generated: Runs a layer on generated code.
        original: Runs a layer as torch does.
    """
    speedup = _speedup(kind, num_steps, generated, original)
    bytes_per_step = kind.num_rows * kind.gates * kind.dtype.itemsize
    least, most = CLEAR_SPEEDUPS
    if num_steps * bytes_per_step < LARGE or not least < speedup < most:
        return speedup
    steps = min(num_steps, max(LONG, MAX_LARGE // bytes_per_step))
    steps = 1 << (steps.bit_length() - 1)  # a few lengths stand for all
    return _speedup(dataclasses.replace(kind, large_steps=steps), num_steps, generated, original)


def was_disturbed(kind: Kind) -> bool:
    """Whether other work on the machine took part in the last measurement of such layers."""
    return any(dataclasses.replace(each, large_steps=0) == kind for each in _disturbed)


def rounded_fill(num_real_steps: int, *, num_steps: int, num_rows: int) -> float:
    """The fill of a packed batch, as kinds tell batches apart: 1 for equal lengths alone."""
    fill = max(num_real_steps, 1) / max(num_steps * num_rows, 1)
    return 1.0 if fill >= 1.0 else min(FILLS, key=lambda near: abs(math.log(near / fill)))


def _speedup(kind: Kind, num_steps: int, generated: Run, original: Run) -> float:
    lines = _known.get(kind)
    if lines is None:
        with _measuring:
            lines = _known.get(kind)
            if lines is None:
                stored = _load(kind)
                if stored is None or stored.is_due:
                    stored = _measure(kind, stored, generated, original)
                (_disturbed.add if stored.disturbed else _disturbed.discard)(kind)
                lines = _known[kind] = (stored.generated, stored.torch)
    ours, torchs = lines
    return torchs.at(num_steps) / ours.at(num_steps)


def _measure(kind: Kind, earlier: Stored | None, generated: Run, original: Run) -> Stored:
    lines, is_quiet = _time(kind, {"generated": generated, "torch": original})
    found = Stored(lines["generated"], lines["torch"])
    if not is_quiet:
        found = found if earlier is None else found.best(earlier)
        count = 1 if earlier is None else earlier.disturbed + 1
        doublings = min(count - MAX_DISTURBED, 32)
        pause = 0.0 if doublings < 0 else min(FIRST_PAUSE * 2.0**doublings, LONGEST_PAUSE)
        found = dataclasses.replace(found, disturbed=count, again=_now() + pause)
    _store(kind, found)
    return found


def _load(kind: Kind) -> Stored | None:
    stored = read_measurement(cache_folder, kind.key)
    try:
        lines = [Line(*map(float, stored[name])) for name in ("generated", "torch")]
        disturbed, again = int(stored.get("disturbed", 0)), float(stored.get("again", 0.0))
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError):
        return None  # not measured yet, or damaged: it is measured again
    if not all(math.isfinite(line.at(1)) and line.at(1) > 0 for line in lines) or disturbed < 0:
        return None
    return Stored(lines[0], lines[1], disturbed, again)


def _store(kind: Kind, found: Stored) -> None:
    lines = {"generated": found.generated, "torch": found.torch}
    stored: dict[str, Any] = {name: [line.fixed, line.per_step] for name, line in lines.items()}
    if found.disturbed:
        stored |= {"disturbed": found.disturbed, "again": found.again}
    keep_measurement(cache_folder, kind.key, stored)


def _time(kind: Kind, runs: dict[str, Run]) -> tuple[dict[str, Line], bool]:
    """The line of each, and whether each of its points was measured without other processes in the way."""
    with _undisturbed(training=kind.training):
        layer, inputs = _layer(kind), functools.cache(functools.partial(_input, kind))
        weights: list[torch.Tensor] = list(layer.parameters())
        for run in runs.values():  # what is done once: threads are started, libraries loaded
            _one_run(run, layer, inputs(SHORT), weights, training=kind.training)
        end = time.perf_counter() + MAX_SECONDS

        def time_run(name: str, steps: int) -> tuple[float, bool]:
            run = functools.partial(_one_run, runs[name], layer, inputs(steps), weights, training=kind.training)
            return _quiet_run(run, end=end, on_cpu=kind.device.type == "cpu")

        if kind.large_steps:
            lengths = {name: [kind.large_steps] for name in runs}
        else:
            lengths = {name: [SHORT, _long_run(functools.partial(time_run, name), kind)] for name in runs}
        points = [(name, steps) for name in runs for steps in lengths[name]]
        quiet, disturbed = dict.fromkeys(points, math.inf), dict.fromkeys(points, math.inf)
        rounds, begin = 0, time.perf_counter()
        while rounds < ROUNDS and (not rounds or time.perf_counter() <= end):
            rounds += 1
            for point in points:
                seconds, is_quiet = time_run(*point)
                fastest = quiet if is_quiet else disturbed
                fastest[point] = min(fastest[point], seconds)
    best = {point: seconds if math.isfinite(seconds) else disturbed[point] for point, seconds in quiet.items()}
    lines = {name: _line(best[name, steps[0]], best[name, steps[-1]], steps[-1]) for name, steps in lengths.items()}
    # Where the system does not say who had the cores, the rounds that there should have been time for do.
    usual = min(ROUNDS, (end - begin) / sum(best.values()))
    return lines, all(map(math.isfinite, quiet.values())) and 2 * rounds >= usual


def _long_run(time_run: Callable[[int], tuple[float, bool]], kind: Kind) -> int:
    """Steps that take at least twice as long as a short run.

    Of 32 steps of a small layer the steps are a tenth and the call is the rest: noise would decide how long thousands
    of them take.
    """
    short, steps = min(time_run(SHORT)[0] for _ in range(2)), LONG
    while steps < MAX_LONG and 4 * steps * kind.work <= MAX_WORK:
        if min(time_run(steps)[0] for _ in range(2)) >= 2 * short:
            break
        steps *= 4
    return steps


def _line(short: float, long: float, steps: int) -> Line:
    """Through a short run, and one of so many steps that took longer; if it did not, nothing is known of the call."""
    if short >= long:
        return Line(0.0, long / steps)
    per_step = min((long - short) / (steps - SHORT), long / steps)
    return Line(long - steps * per_step, per_step)


def _one_run(run: Run, layer: nn.RNNBase, x: Any, weights: list[torch.Tensor], *, training: bool) -> float:
    data = x if isinstance(x, torch.Tensor) else x.data
    wait_for(data.device)
    start = time.perf_counter()
    y, _ = run(layer, x)
    if training:
        wanted = [*weights, data] if data.requires_grad else weights
        torch.autograd.grad((y if isinstance(y, torch.Tensor) else y.data).sum(), wanted)
    wait_for(data.device)
    return time.perf_counter() - start


@contextlib.contextmanager
def _undisturbed(*, training: bool) -> Iterator[None]:
    """Nothing that the caller has switched on sees what runs inside: gradient modes, hooks, the search for NaN."""
    hooks = torch.autograd.graph.saved_tensors_hooks
    with (
        torch.inference_mode(mode=False),
        torch.set_grad_enabled(training),
        torch.autograd.set_detect_anomaly(False),
        hooks_allowed(),
        hooks(lambda tensor: tensor, lambda tensor: tensor),
    ):
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
    fill_parameters(layer, 0.5 / math.sqrt(kind.hidden_size), kind.dtype, kind.device)
    layer._init_flat_weights()
    if kind.device.type == "cuda":
        layer.flatten_parameters()  # cuDNN wants them in one piece, as a layer on a GPU has them
    return layer


def fill_parameters(module: nn.Module, value: float, dtype: torch.dtype, device: torch.device = CPU) -> None:
    """Give a module that was made on the meta device, where initialising draws no random numbers, real parameters.

    Unlike `to_empty`, or any operator on meta tensors, it does not import torch's compiler, which takes seconds.
    """
    for owner in module.modules():
        for name, parameter in list(owner._parameters.items()):
            if parameter is not None:
                owner.register_parameter(
                    name, nn.Parameter(torch.full(parameter.shape, value, dtype=dtype, device=device))
                )


def _input(kind: Kind, steps: int) -> Any:
    rows = kind.num_rows if kind.large_steps else kind.measured_rows
    shape = (steps, rows, kind.input_size)
    x_TBF = torch.full(shape, 0.5, dtype=kind.dtype, device=kind.device, requires_grad=kind.input_gradient)
    if not kind.fill:
        return x_TBF
    # Lengths steps * u^p at even places u in (0, 1] have a mean of steps / (p + 1).
    places_B = torch.arange(rows, 0, -1) / rows
    lengths_B = (steps * places_B ** (1 / kind.fill - 1)).round().long().clamp(min=1)
    return pack_padded_sequence(x_TBF, lengths_B)
