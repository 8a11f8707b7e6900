"""`solver="auto"`: measure whether chunks of time are faster than a sequential run, and keep to what is.

Shape legend: B sequences, P real steps of all sequences, F features.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeAlias, final

import torch

from stretto.kernels import Layout
from stretto.nn.stack import Direction, SolverCall, StackResult
from stretto.solvers import Shooting, Solution

Run: TypeAlias = Callable[[Sequence[Sequence[Direction]], torch.Tensor, SolverCall | None], StackResult]
"""Runs a stack of layers on an input, sequentially or by a solver."""

TOLERANCE: Final = 1e-6
"""The difference at the boundaries of chunks that is small enough, relative to states above 1."""
TRIAL_BUDGET: Final = 0.02
"""The share of all time that trials may cost beyond sequential runs."""
EXPECTED_TRIAL_COST: Final = 0.5
"""What a trial is expected to cost beyond a sequential run, as a share of that."""
MIN_TIMINGS: Final = 2
"""Timings of each way before it is judged by the least."""
MAX_CHUNKED_SHARE: Final = 0.97
"""Chunks must take at most this share of the time of a sequential run."""
RETRY_CALLS: Final = 256
"""Calls after which chunks are tried again: nets learn to remember, and to forget."""


@final
@dataclasses.dataclass(slots=True)
class _Stopwatch:
    """Reports the seconds of a call, forward and backward together, when both are over."""

    report: Callable[[float], None]
    forward: float = 0.0
    backward_started: float = 0.0


@final
@dataclasses.dataclass(slots=True, kw_only=True)
class TimingRecord:
    """Timings of batches of one shape: the least seconds of each way, how often, and what trials cost."""

    shooting: Shooting
    serial: float = math.inf
    num_serial: int = 0
    chunked: float = math.inf
    num_chunked: int = 0
    total: float = 0.0
    lost: float = 0.0
    calls: int = 0

    def add(self, seconds: float, *, chunked: bool, fell_back: bool) -> None:
        """Count the time of a call."""
        self.total += seconds
        if chunked:
            self.num_chunked += 1
            self.lost += max(0.0, seconds - self.serial)
            self.chunked = math.inf if fell_back else min(self.chunked, seconds)
            # One trial is enough for a net that remembers too long.
            self.num_chunked = MIN_TIMINGS if fell_back else self.num_chunked
        else:
            self.num_serial += 1
            self.serial = min(self.serial, seconds)

    @property
    def is_judged(self) -> bool:
        """Whether both ways were timed often enough."""
        return self.num_serial >= MIN_TIMINGS and self.num_chunked >= MIN_TIMINGS

    @property
    def may_try(self) -> bool:
        """Whether a trial that fails would stay within the budget."""
        was_faster = self.num_chunked > 0 and self.chunked <= self.serial
        is_affordable = self.lost + EXPECTED_TRIAL_COST * self.serial <= TRIAL_BUDGET * self.total
        return self.num_serial >= MIN_TIMINGS and (was_faster or is_affordable)

    @property
    def reason(self) -> str:
        """What is known, in words."""
        if not self.is_judged:
            return "sequential until a trial of chunks is cheap in comparison"
        if math.isinf(self.chunked):
            return "chunks of time were tried and the net remembers too long"
        return f"chunks of time take {self.chunked / self.serial:.2f} of the time of a sequential run"


@final
class SolverAutotuner:
    """Runs sequentially or in chunks of time, whichever a trial from time to time finds faster.

    Every call gives the result of a sequential run within `TOLERANCE`. For each shape of batch both ways are timed,
    forward and backward. Trials are rationed, so that a net that remembers too long costs next to nothing.
    """

    def __init__(self) -> None:
        self._records: dict[tuple[Any, ...], TimingRecord] = {}

    def run(
        self, layers: Sequence[Sequence[Direction]], layout: Layout, x_PF: torch.Tensor, *, run: Run
    ) -> StackResult:
        """Run a stack of layers in the way that is fastest for batches like this one."""
        record = self._record(layout, x_PF)
        if not record.shooting.has_chunks(layout):
            return _add_reason(run(layers, x_PF, None), "too few steps, or too many sequences, for chunks to pay")
        record.calls += 1
        if record.is_judged and record.calls >= RETRY_CALLS:
            record.num_chunked, record.chunked, record.calls = 0, math.inf, 0
            record.shooting = Shooting(tolerance=TOLERANCE)
        if record.is_judged:
            is_chunked = record.chunked < MAX_CHUNKED_SHARE * record.serial
            result = run(layers, x_PF, SolverCall(record.shooting) if is_chunked else None)
            if is_chunked and any(solution.fell_back for solution in result.solutions):
                record.chunked = math.inf
        else:
            call = SolverCall(record.shooting) if record.may_try else None
            result = self._run_timed(layers, x_PF, record, call, run)
        return _add_reason(result, record.reason)

    def _record(self, layout: Layout, x_PF: torch.Tensor) -> TimingRecord:
        """For batches of about as many steps and sequences."""
        sizes = (layout.num_steps.bit_length(), layout.num_rows.bit_length(), layout.total.bit_length())
        key = (*sizes, x_PF.shape[1:], x_PF.dtype, x_PF.device.type, torch.is_grad_enabled(), torch.get_num_threads())
        return self._records.setdefault(key, TimingRecord(shooting=Shooting(tolerance=TOLERANCE)))

    @staticmethod
    def _run_timed(
        layers: Sequence[Sequence[Direction]],
        x_PF: torch.Tensor,
        record: TimingRecord,
        call: SolverCall | None,
        run: Run,
    ) -> StackResult:
        fell_back = [False]
        watch = _Stopwatch(lambda seconds: record.add(seconds, chunked=call is not None, fell_back=fell_back[0]))
        started = time.perf_counter()
        if not torch.is_grad_enabled():
            result = run(layers, x_PF, call)
            fell_back[0] = any(solution.fell_back for solution in result.solutions)
            watch.report(time.perf_counter() - started)
            return result
        # _BackwardEnd.apply and _BackwardStart.apply enclose the graph of the call.
        tensors = (tensor for layer in layers for direction in layer for tensor in direction.tensors())
        timed_x_PF, *rest = _BackwardEnd.apply(watch, x_PF, *tensors)  # type: ignore[no-untyped-call]
        made = iter(rest)
        timed_layers = [[direction.with_tensors(made) for direction in layer] for layer in layers]
        result = run(timed_layers, timed_x_PF, call)
        fell_back[0] = any(solution.fell_back for solution in result.solutions)
        watch.forward = time.perf_counter() - started
        counts = [len(states) for states in result.states]
        every = [state for states in result.states for state in states]
        y_PF, *states = _BackwardStart.apply(watch, result.y_PF, *every)  # type: ignore[no-untyped-call]
        remaining = iter(states)
        return StackResult(y_PF, [[next(remaining) for _ in range(count)] for count in counts], result.solutions)


def _add_reason(result: StackResult, reason: str) -> StackResult:
    if not result.solutions:
        return StackResult(result.y_PF, result.states, [Solution(solver="serial", reason=f"auto: {reason}")])
    for solution in result.solutions:
        solution.reason = f"auto: {reason}; {solution.reason}"
    return result


class _BackwardStart(torch.autograd.Function):
    """Identity after the outputs: a backward pass reaches it first."""

    @staticmethod
    def forward(ctx: Any, watch: _Stopwatch, *tensors: torch.Tensor) -> Any:
        ctx.watch = watch
        ctx.set_materialize_grads(False)
        return tuple(tensor.data for tensor in tensors)  # no views: a user may work on them in place

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        ctx.watch.backward_started = time.perf_counter()
        return None, *cotangents


class _BackwardEnd(torch.autograd.Function):
    """Identity before the inputs: a backward pass reaches it last."""

    @staticmethod
    def forward(ctx: Any, watch: _Stopwatch, *tensors: torch.Tensor) -> Any:
        ctx.watch = watch
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        watch: _Stopwatch = ctx.watch
        watch.report(watch.forward + time.perf_counter() - watch.backward_started)
        return None, *cotangents
