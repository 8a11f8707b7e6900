"""The fastest exact way through time, measured: step after step, or chunks of time at once.

Shape legend: B sequences, T steps, P real steps of all sequences, F features.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, final

import torch

from stretto.kernels import Layout
from stretto.nn.stack import Direction, StackResult, Way
from stretto.solvers import Shooting, Solution

BUDGET: Final = 0.02
"""The share of all time that trials may cost beyond step after step."""
TRIAL: Final = 0.5
"""What a trial is expected to cost beyond step after step, as a share of that."""
MEASURED: Final = 2
"""Times that each way is measured before it is judged by the least."""
WORTH_IT: Final = 0.97
"""The share of the time of step after step that chunks must take at most."""
AGAIN: Final = 256
"""Calls after which chunks are tried anew: nets learn to remember, and to forget."""


@final
@dataclasses.dataclass(slots=True)
class _Clock:
    """Tells the seconds of a call, forward and backward together, when both are over."""

    told: Callable[[float], None]
    forward: float = 0.0
    began: float = 0.0


@final
@dataclasses.dataclass(slots=True, kw_only=True)
class Account:
    """What was measured of batches of one shape: the least seconds of each way, how often, and what trials cost."""

    shooting: Shooting
    serial: float = math.inf
    serials: int = 0
    chunked: float = math.inf
    trials: int = 0
    spent: float = 0.0
    lost: float = 0.0
    since: int = 0

    def note(self, seconds: float, *, chunked: bool, fell_back: bool) -> None:
        """Take the time of a call into account."""
        self.spent += seconds
        if chunked:
            self.trials += 1
            self.lost += max(0.0, seconds - self.serial)
            self.chunked = math.inf if fell_back else min(self.chunked, seconds)
            # Once is enough for a net that remembers too long.
            self.trials = MEASURED if fell_back else self.trials
        else:
            self.serials += 1
            self.serial = min(self.serial, seconds)

    @property
    def is_judged(self) -> bool:
        """Whether both ways were measured."""
        return self.serials >= MEASURED and self.trials >= MEASURED

    @property
    def may_try(self) -> bool:
        """Whether a trial that fails would not cost too much of all time."""
        cheap = self.trials > 0 and self.chunked <= self.serial
        return self.serials >= MEASURED and (cheap or self.lost + TRIAL * self.serial <= BUDGET * self.spent)

    @property
    def said(self) -> str:
        """What is known, in words."""
        if not self.is_judged:
            return "step after step until trying chunks of time costs little in comparison"
        if math.isinf(self.chunked):
            return "chunks of time were tried and the net remembers too long"
        return f"chunks of time take {self.chunked / self.serial:.2f} of the time of step after step"


@final
class Auto:
    """Walks step after step, tries chunks of time now and then, and keeps to what is faster.

    Every call gives the result of walking step after step, within `tolerance`. For each shape of batch both ways are
    measured, forward and backward. Trials are rationed, so that a net which remembers too long costs next to nothing.

    Args:
        tolerance: The mismatch at the boundaries of chunks that is small enough, relative to states above 1.
    """

    def __init__(self, *, tolerance: float = 1e-6) -> None:
        self.tolerance = tolerance
        self._accounts: dict[tuple[Any, ...], Account] = {}

    def run(
        self,
        layers: Sequence[Sequence[Direction]],
        layout: Layout,
        x_PF: torch.Tensor,
        *,
        run: Callable[[Sequence[Sequence[Direction]], torch.Tensor, Way | None], StackResult],
    ) -> StackResult:
        """Run a stack of layers by the way that is fastest for batches like this one; `run` does it by a given way."""
        account = self._account(layout, x_PF)
        if not account.shooting.has_chunks(layout):
            result = run(layers, x_PF, None)
            return _said(result, "too few steps, or sequences enough, for chunks of time to pay")
        account.since += 1
        if account.is_judged and account.since >= AGAIN:
            account.trials, account.chunked, account.since = 0, math.inf, 0
            account.shooting = Shooting(tolerance=self.tolerance)
        chunked = account.chunked < WORTH_IT * account.serial if account.is_judged else account.may_try
        way = Way(account.shooting) if chunked else None
        if account.is_judged:
            result = run(layers, x_PF, way)
            if chunked and any(solution.fell_back for solution in result.solutions):
                account.chunked = math.inf
        else:
            result = self._measured(layers, x_PF, account, way, run)
        return _said(result, account.said)

    def _account(self, layout: Layout, x_PF: torch.Tensor) -> Account:
        """Of batches of about as many steps and sequences."""
        sizes = (layout.num_steps.bit_length(), layout.num_rows.bit_length(), layout.total.bit_length())
        key = (*sizes, x_PF.shape[1:], x_PF.dtype, x_PF.device.type, torch.is_grad_enabled(), torch.get_num_threads())
        return self._accounts.setdefault(key, Account(shooting=Shooting(tolerance=self.tolerance)))

    @staticmethod
    def _measured(
        layers: Sequence[Sequence[Direction]],
        x_PF: torch.Tensor,
        account: Account,
        way: Way | None,
        run: Callable[[Sequence[Sequence[Direction]], torch.Tensor, Way | None], StackResult],
    ) -> StackResult:
        fell_back = [False]
        clock = _Clock(lambda seconds: account.note(seconds, chunked=way is not None, fell_back=fell_back[0]))
        started = time.perf_counter()
        if not torch.is_grad_enabled():
            result = run(layers, x_PF, way)
            fell_back[0] = any(solution.fell_back for solution in result.solutions)
            clock.told(time.perf_counter() - started)
            return result
        last_layers, last_x_PF = _last(clock, layers, x_PF)
        result = run(last_layers, last_x_PF, way)
        fell_back[0] = any(solution.fell_back for solution in result.solutions)
        clock.forward = time.perf_counter() - started
        counts = [len(states) for states in result.states]
        every = [state for states in result.states for state in states]
        y_PF, *states = _First.apply(clock, result.y_PF, *every)  # type: ignore[no-untyped-call]
        remaining = iter(states)
        return StackResult(y_PF, [[next(remaining) for _ in range(count)] for count in counts], result.solutions)


def _said(result: StackResult, reason: str) -> StackResult:
    if not result.solutions:
        return StackResult(result.y_PF, result.states, [Solution(solver="serial", reason=f"auto: {reason}")])
    for solution in result.solutions:
        solution.reason = f"auto: {reason}; {solution.reason}"
    return result


def _last(
    clock: _Clock, layers: Sequence[Sequence[Direction]], x_PF: torch.Tensor
) -> tuple[list[list[Direction]], torch.Tensor]:
    """The same inputs, through which a backward pass is known to be over."""
    directions = [direction for layer in layers for direction in layer]
    tensors = [x_PF, *(t for item in directions for t in (*item.states, *item.parameters.values()))]
    made = iter(_Last.apply(clock, *tensors))  # type: ignore[no-untyped-call]
    last_x_PF = next(made)

    def passed(item: Direction) -> Direction:
        states = [next(made) for _ in item.states]
        return dataclasses.replace(item, states=states, parameters={name: next(made) for name in item.parameters})

    return [[passed(item) for item in layer] for layer in layers], last_x_PF


class _First(torch.autograd.Function):
    """Stands behind the outputs: a backward pass comes here first."""

    @staticmethod
    def forward(ctx: Any, clock: _Clock, *tensors: torch.Tensor) -> Any:
        ctx.clock = clock
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        ctx.clock.began = time.perf_counter()
        return None, *cotangents


class _Last(torch.autograd.Function):
    """Stands before the inputs: a backward pass comes here last."""

    @staticmethod
    def forward(ctx: Any, clock: _Clock, *tensors: torch.Tensor) -> Any:
        ctx.clock = clock
        ctx.set_materialize_grads(False)
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        clock: _Clock = ctx.clock
        clock.told(clock.forward + time.perf_counter() - clock.began)
        return None, *cotangents
