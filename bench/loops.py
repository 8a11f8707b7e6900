"""`python -m bench loops`: custom cells, compiled and in the usual Python loop.

Every pair shares its parameters: the loop calls the cell once per step, and ours is `stretto.RNN` or `stretto.scan` of
the same cell. Shapes are the defaults of the projects that each case stands for.

Shape legend: T steps, B sequences, F features of the input, H hidden units, N heads, D units of a head, L attended
positions, O outputs.
"""

import copy
import dataclasses
import functools
import itertools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from typing import Any, Final

import torch
from torch import nn
from torch.nn import functional

import stretto
from bench.contenders import Batch, Shape, TorchContender
from bench.harness import ROOT, Count, Report, TimedSettings, bench, chosen_parts, ratio_of
from stretto.cells import Cell, cell_from
from stretto.errors import StrettoError
from stretto.files import CACHE_VARIABLE
from stretto.state import map_state
from stretto.timing import Timing, check_equal, time_interleaved

PARTS: Final = ("loops", "layers", "step", "first")
RESETS: Final = 0.02
NEVER_BELOW: Final = 0.97
COLUMNS: Final = (
    *("cell", "as in", "T, B, F, H", "ours", "backend", "loop ms", "ours ms", "ratio", "goal", "met"),
    *("ratio of minima", "error"),
)
CAPTION: Final = (
    "Forward and backward, with the gradients of all weights. ratio: the median time of the user's own Python loop "
    "over ours, of one interleaved run (A, B, A, B, ...). error: largest difference of outputs and gradients over the "
    "largest value, checked before the clock."
)
Forward = Callable[[torch.Tensor], torch.Tensor]


@dataclasses.dataclass(frozen=True, kw_only=True)
class LoopsSettings(TimedSettings):
    """Compare our layers with the Python loops that people write around their own cells.

    Attributes:
        only: Parts to run, separated by blanks or commas: loops, layers, step, first; all of them if left out.
        cells: Cells of the part "loops" to run, by their names; all of them if left out.
    """

    only: tuple[str, ...] = ()
    cells: tuple[str, ...] = ()
    rounds: Count = 7
    budget: float = 6.0


# What people write ----------------------------------------------------------------------------------------------------


class Spike(torch.autograd.Function):
    """A step, whose gradient is that of a fast sigmoid."""

    @staticmethod
    def forward(ctx: Any, u: torch.Tensor) -> torch.Tensor:
        """1 where u is positive."""
        ctx.save_for_backward(u)
        return (u > 0).to(u.dtype)

    @staticmethod
    def backward(ctx: Any, *dy: torch.Tensor) -> torch.Tensor:
        """1 / (1 + 25 |u|)^2."""
        (u,) = ctx.saved_tensors
        gradient: torch.Tensor = dy[0] / (25.0 * u.abs() + 1.0).pow(2)
        return gradient


class LIF(nn.Module):
    """Leaky integrate-and-fire, reset by subtraction; `recurrent` also feeds spikes back, through a current."""

    def __init__(self, F: int, H: int, *, recurrent: bool = False) -> None:
        super().__init__()
        self.fc = nn.Linear(F, H)
        self.recurrent = nn.Linear(H, H, bias=False) if recurrent else None

    def forward(self, state: Any, x: torch.Tensor) -> Any:
        """One step."""
        if self.recurrent is None:
            reset = Spike.apply(state - 1.0).detach()  # type: ignore[no-untyped-call]
            u = 0.9 * state + self.fc(x) - reset
            return u, Spike.apply(u - 1.0)  # type: ignore[no-untyped-call]
        z, v, i = state
        v = v + 0.1 * (i - v)
        z = Spike.apply(v - 0.1)  # type: ignore[no-untyped-call]
        i = 0.8 * i + self.fc(x) + self.recurrent(z)
        return (z, (1 - z.detach()) * v, i), z


class Mogrifier(nn.Module):
    """Melis et al. 2020: input and state gate each other before an LSTM's step."""

    def __init__(self, F: int, H: int) -> None:
        super().__init__()
        self.lstm = nn.LSTMCell(F, H)
        self.gates = nn.ModuleList(nn.Linear(H, F) if i % 2 == 0 else nn.Linear(F, H) for i in range(5))

    def forward(self, state: Any, x: torch.Tensor) -> Any:
        """One step."""
        h, c = state
        for i, gate in enumerate(self.gates):
            if i % 2 == 0:
                x = 2 * torch.sigmoid(gate(h)) * x
            else:
                h = 2 * torch.sigmoid(gate(x)) * h
        h, c = self.lstm(x, (h, c))
        return (h, c), h


class AttentionDecoder(nn.Module):
    """Bahdanau et al. 2015: additive attention to a memory, and a GRU of the context."""

    def __init__(self, F: int, H: int) -> None:
        super().__init__()
        self.query, self.key, self.v = nn.Linear(H, H), nn.Linear(H, H), nn.Linear(H, 1, bias=False)
        self.gru = nn.GRUCell(F + H, H)

    def forward(self, h: torch.Tensor, x: torch.Tensor, memory: Any) -> Any:
        """One step; the memory comes with its keys, computed once."""
        values, keys = memory
        scores = self.v(torch.tanh(self.query(h).unsqueeze(1) + keys)).squeeze(-1)
        context = torch.bmm(torch.softmax(scores, dim=-1).unsqueeze(1), values).squeeze(1)
        h = self.gru(torch.cat([x, context], dim=-1), h)
        return h, h


class SLSTM(nn.Module):
    """Beck et al. 2024: exponential gates, recurrent weights for each of 4 heads."""

    def __init__(self, F: int, H: int, N: int = 4) -> None:
        super().__init__()
        self.w = nn.Linear(F, 4 * H)
        self.r = nn.Parameter(torch.randn(N, H // N, 4 * H // N) / (H // N) ** 0.5)

    def forward(self, state: Any, x: torch.Tensor) -> Any:
        """One step."""
        h, c, n, m = state
        N, D, _ = self.r.shape
        recurrent = torch.einsum("bnd,nde->bne", h.view(-1, N, D), self.r).view(-1, N, 4, D)
        i, f, z, o = (self.w(x) + recurrent.transpose(1, 2).reshape(-1, 4 * N * D)).chunk(4, dim=-1)
        log_f = functional.logsigmoid(f)
        new_m = torch.maximum(log_f + m, i)
        i, f = torch.exp(i - new_m), torch.exp(log_f + m - new_m)
        c = f * c + i * torch.tanh(z)
        n = f * n + i
        h = torch.sigmoid(o) * c / n.clamp(min=1.0)
        return (h, c, n, new_m), h


class EALSTM(nn.Module):
    """Kratzert et al. 2019: the input gate depends on static features alone."""

    def __init__(self, F: int, H: int) -> None:
        super().__init__()
        self.static, self.x, self.h = nn.Linear(H, H), nn.Linear(F, 3 * H), nn.Linear(H, 3 * H, bias=False)

    def forward(self, state: Any, x: torch.Tensor, static: torch.Tensor) -> Any:
        """One step."""
        h, c = state
        f, g, o = (self.x(x) + self.h(h)).chunk(3, dim=-1)
        c = torch.sigmoid(f) * c + torch.sigmoid(self.static(static)) * torch.tanh(g)
        h = torch.sigmoid(o) * torch.tanh(c)
        return (h, c), h


class MCLSTM(nn.Module):
    """Hoedt et al. 2021: mass is redistributed by a matrix of each row, whose rows sum to one."""

    def __init__(self, F: int, H: int) -> None:
        super().__init__()
        self.i, self.o, self.r = nn.Linear(F + H, H), nn.Linear(F + H, H), nn.Linear(F + H, H * H)

    def forward(self, c: torch.Tensor, x: torch.Tensor) -> Any:
        """One step; the first feature is the mass that comes in."""
        features = torch.cat([x, functional.normalize(c, p=1.0, dim=-1)], dim=-1)
        i = torch.softmax(self.i(features), dim=-1)
        r = functional.normalize(torch.relu(self.r(features)).view(-1, c.shape[1], c.shape[1]), p=1.0, dim=-1)
        mass = x[:, :1].abs() * i + torch.bmm(c.unsqueeze(1), r).squeeze(1)
        o = torch.sigmoid(self.o(features))
        return (1 - o) * mass, o * mass


class CfC(nn.Module):
    """Hasani et al. 2022: closed-form continuous time, of x and the time that has passed."""

    def __init__(self, F: int, H: int) -> None:
        super().__init__()
        self.backbone = nn.Linear(F + H, 128)
        self.ff1, self.ff2, self.time_a, self.time_b = (nn.Linear(128, H) for _ in range(4))

    def forward(self, h: torch.Tensor, inputs: Any) -> Any:
        """One step."""
        x, ts = inputs
        z = 1.7159 * torch.tanh(0.666 * self.backbone(torch.cat([x, h], 1)))
        gate = torch.sigmoid(self.time_a(z) * ts + self.time_b(z))
        h = torch.tanh(self.ff1(z)) * (1.0 - gate) + gate * torch.tanh(self.ff2(z))
        return h, h


class LiGRU(nn.Module):
    """Ravanelli et al. 2018, with layer norm."""

    def __init__(self, F: int, H: int) -> None:
        super().__init__()
        self.w, self.u = nn.Linear(F, 2 * H, bias=False), nn.Linear(H, 2 * H, bias=False)
        self.norm = nn.LayerNorm(2 * H)

    def forward(self, h: torch.Tensor, x: torch.Tensor) -> Any:
        """One step."""
        a, z = (self.norm(self.w(x)) + self.u(h)).chunk(2, 1)
        z = torch.sigmoid(z)
        h = z * h + (1 - z) * torch.relu(a)
        return h, h


class GRUD(nn.Module):
    """Che et al. 2018: missing values and the state decay with time; inputs are x, its mask and the time since."""

    def __init__(self, F: int, H: int) -> None:
        super().__init__()
        self.gamma_x, self.gamma_h = nn.Parameter(torch.rand(F)), nn.Linear(F, H)
        self.gru = nn.GRUCell(2 * F, H)

    def forward(self, state: Any, inputs: Any) -> Any:
        """One step."""
        (h, last), (x, mask, delta) = state, inputs
        last = torch.where(mask > 0, x, last)
        x = mask * x + (1 - mask) * torch.exp(-torch.relu(self.gamma_x * delta)) * last
        h = self.gru(torch.cat([x, mask], dim=-1), h * torch.exp(-torch.relu(self.gamma_h(delta))))
        return (h, last), h


class ODERNN(nn.Module):
    """Rubanova et al. 2019: a step of Runge-Kutta between observations, a GRU at them."""

    def __init__(self, F: int, H: int) -> None:
        super().__init__()
        self.f = nn.Sequential(nn.Linear(H, 50), nn.Tanh(), nn.Linear(50, H))
        self.gru = nn.GRUCell(F, H)

    def forward(self, h: torch.Tensor, inputs: Any) -> Any:
        """One step."""
        x, dt = inputs
        k1 = self.f(h)
        k2 = self.f(h + dt * k1 / 2)
        k3 = self.f(h + dt * k2 / 2)
        k4 = self.f(h + dt * k3)
        h = self.gru(x, h + dt * (k1 + 2 * k2 + 2 * k3 + k4) / 6)
        return h, h


class IndRNN(nn.Module):
    """Li et al. 2018: each unit has a recurrent weight of its own."""

    def __init__(self, F: int, H: int) -> None:
        super().__init__()
        self.fc, self.u = nn.Linear(F, H), nn.Parameter(torch.rand(H))

    def forward(self, h: torch.Tensor, x: torch.Tensor) -> Any:
        """One step."""
        h = torch.relu(self.fc(x) + self.u * h)
        return h, h


class TwoLSTMCells(nn.Module):
    """PyTorch's example of time sequence prediction: two nn.LSTMCells and a linear layer."""

    def __init__(self, F: int, H: int) -> None:
        super().__init__()
        self.lstm1, self.lstm2, self.linear = nn.LSTMCell(F, H), nn.LSTMCell(H, H), nn.Linear(H, 1)

    def forward(self, state: Any, x: torch.Tensor) -> Any:
        """One step."""
        first, second = state
        first = self.lstm1(x, first)
        second = self.lstm2(first[0], second)
        return (first, second), self.linear(second[0])


class OneLSTMCell(nn.Module):
    """nn.LSTMCell in a loop."""

    def __init__(self, F: int, H: int) -> None:
        super().__init__()
        self.cell = nn.LSTMCell(F, H)

    def forward(self, state: Any, x: torch.Tensor) -> Any:
        """One step."""
        h, c = self.cell(x, state)
        return (h, c), h


class ManyNodes(Cell):
    """A long chain of small operators: a cell of 300 of them."""

    def __init__(self, F: int, H: int, *, depth: int = 50) -> None:
        super().__init__()
        self.hidden_size = H
        self.x, self.w = nn.Linear(F, H), nn.Parameter(torch.randn(2, depth, H))

    def initial_state(self, batch_size: int) -> torch.Tensor:
        """Zeros."""
        return self.zeros(batch_size, self.hidden_size)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        """One step: six operators for each link."""
        x, h = self.x(x_t), state
        for scale, shift in zip(*self.w.unbind(0), strict=True):
            h = h + 0.1 * torch.tanh(h * scale + shift * x)
        return h, h


# What is compared -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A cell at a shape, and the ratio to its loop that it has to reach.

    Attributes:
        origin: The project whose shape it is.
        cell: Makes the cell of F and H; it is called as cell(state, inputs[, constants]).
        state: Its initial state, from zeros of (B, H).
        beside: The inputs of a step in addition to x, for (T, B, F).
        constants: Inputs that are the same at every step, from the cell and (B, H).
    """

    name: str
    origin: str
    shape: Shape
    cell: Callable[[int, int], nn.Module]
    goal: float | None = None
    state: Callable[[torch.Tensor], Any] = lambda zeros_BH: zeros_BH
    beside: Callable[..., tuple[torch.Tensor, ...]] = lambda *sizes: ()  # noqa: ARG005
    constants: Callable[[Any, int, int], Callable[[], Any]] | None = None
    dtype: torch.dtype = torch.float32

    def resized(self, shape: Shape) -> "Case":
        """The same at another shape."""
        return dataclasses.replace(self, shape=shape)


def _pair(zeros_BH: torch.Tensor) -> Any:
    return zeros_BH, zeros_BH


def _memory(cell: AttentionDecoder, B: int, H: int) -> Callable[[], Any]:
    values_BLH = torch.randn(B, 30, H)
    return lambda: (values_BLH, cell.key(values_BLH))


def _static(_: nn.Module, B: int, H: int) -> Callable[[], Any]:
    static_BH = torch.randn(B, H)
    return lambda: static_BH


def _elapsed(T: int, B: int, _: int) -> tuple[torch.Tensor, ...]:
    return (torch.rand(T, B, 1),)


def _missing(T: int, B: int, F: int) -> tuple[torch.Tensor, ...]:
    return (torch.rand(T, B, F) < 0.5).float(), torch.rand(T, B, F)


TINY: Final = Shape(6, 3, 4, 8)
CASES: Final = (
    Case(name="LIF, autograd.Function", origin="snnTorch", shape=Shape(100, 32, 128, 128), cell=LIF, goal=5),
    Case(
        name="recurrent LIF, autograd.Function",
        origin="Norse",
        shape=Shape(100, 16, 64, 64),
        cell=lambda F, H: LIF(F, H, recurrent=True),
        goal=5,
        state=lambda zeros_BH: (zeros_BH,) * 3,
    ),
    Case(
        name="Mogrifier of nn.LSTMCell",
        origin="mogrifier-lstm",
        shape=Shape(50, 16, 128, 128),
        cell=Mogrifier,
        goal=4,
        state=_pair,
    ),
    Case(
        name="attention decoder of nn.GRUCell",
        origin="SpeechBrain",
        shape=Shape(40, 8, 64, 64),
        cell=AttentionDecoder,
        goal=4,
        constants=_memory,
    ),
    Case(
        name="sLSTM, 4 heads",
        origin="xLSTM",
        shape=Shape(128, 8, 64, 64),
        cell=SLSTM,
        goal=4,
        state=lambda zeros_BH: (zeros_BH,) * 4,
    ),
    Case(
        name="EA-LSTM, static features",
        origin="NeuralHydrology",
        shape=Shape(365, 64, 8, 64),
        cell=EALSTM,
        goal=3,
        state=_pair,
        constants=_static,
    ),
    Case(name="MC-LSTM", origin="NeuralHydrology", shape=Shape(365, 64, 8, 16), cell=MCLSTM),
    Case(
        name="nn.LSTMCell",
        origin="three changed lines",
        shape=Shape(128, 8, 64, 64),
        cell=OneLSTMCell,
        goal=5,
        state=_pair,
    ),
    Case(
        name="two nn.LSTMCells, float64",
        origin="PyTorch's time_sequence",
        shape=Shape(999, 97, 1, 51),
        cell=TwoLSTMCells,
        state=lambda zeros_BH: (_pair(zeros_BH),) * 2,
        dtype=torch.float64,
    ),
    Case(name="CfC", origin="ncps", shape=Shape(100, 16, 16, 64), cell=CfC, beside=_elapsed),
    Case(name="Li-GRU", origin="SpeechBrain", shape=Shape(200, 8, 40, 128), cell=LiGRU),
    Case(
        name="GRU-D of nn.GRUCell",
        origin="latent_ode",
        shape=Shape(60, 32, 40, 40),
        cell=GRUD,
        state=lambda z: z,
        beside=_missing,
    ),
    Case(name="ODE-RNN of nn.GRUCell", origin="latent_ode", shape=Shape(60, 32, 40, 40), cell=ODERNN, beside=_elapsed),
    Case(name="IndRNN", origin="IndRNN_pytorch", shape=Shape(784, 16, 1, 128), cell=IndRNN),
)
AGENTS: Final = (
    ("CleanRL, PPO", Shape(128, 2, 512, 128), None),
    ("RecurrentPPO", Shape(128, 8, 64, 128), 6.0),
    ("RecurrentPPO", Shape(128, 8, 64, 256), 6.0),
)
STEPS: Final = (Shape(1, 1, 64, 64), Shape(1, 16, 32, 32), Shape(1, 8, 256, 256))
"""Of single steps; the last is 256 units wide, where torch's product takes most of the time."""
Row = tuple[str | int | float | bool | None, ...]


@bench("loops", title="Custom cells against their Python loops")
def run(settings: LoopsSettings, report: Report) -> None:
    """Run the parts that were asked for."""
    parts = {"loops": _run_loops, "layers": _run_layers, "step": _run_steps, "first": _run_first_calls}
    for part in chosen_parts(settings.only, PARTS):
        parts[part](settings, report)


def _run_loops(settings: LoopsSettings, report: Report) -> None:
    """Every cell by `stretto.scan`."""
    rows: list[Row] = []
    for case in CASES:
        if settings.cells and case.name not in settings.cells:
            continue
        report.progress(f"{case.name}, {case.shape}")
        rows.append(_compare(case.resized(TINY) if settings.quick else case, settings, report))
        report.table(title="Training steps against the user's loop", columns=COLUMNS, rows=rows, caption=CAPTION)


def _compare(case: Case, settings: LoopsSettings, report: Report) -> Row:
    shape, T, B = case.shape, case.shape.num_steps, case.shape.batch
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        cell = case.cell(shape.input_size, shape.hidden_size).to(case.dtype)
        x_TBF = torch.randn(T, B, shape.input_size, dtype=case.dtype)
        beside = case.beside(T, B, shape.input_size)
        init = case.state(torch.zeros(B, shape.hidden_size, dtype=case.dtype))
        if isinstance(cell, GRUD):
            init = (init, torch.zeros(B, shape.input_size))
        draw_constants = None if case.constants is None else case.constants(cell, B, shape.hidden_size)

    def inputs_of(x: torch.Tensor) -> Any:
        return (x, *beside) if beside else x

    def loop(x_TBF: torch.Tensor) -> torch.Tensor:
        constants = () if draw_constants is None else (draw_constants(),)
        state, outputs = init, []
        for t in range(T):
            state, y = cell(state, map_state(lambda part: part[t], inputs_of(x_TBF)), *constants)  # noqa: B023
            outputs.append(y)
        return torch.stack(outputs)

    def ours(x_TBF: torch.Tensor) -> torch.Tensor:
        constants = None if draw_constants is None else draw_constants()
        _, y_TBO = stretto.scan(cell, init, inputs_of(x_TBF), constants=constants, batch_first=False)
        return y_TBO  # type: ignore[no-any-return]

    explanation = stretto.explain(
        *(cell, init, inputs_of(x_TBF)), constants=draw_constants and draw_constants(), batch_first=False
    )
    if explanation.backend != "cpp":
        report.note(f"{case.name} ran without compiled code, {explanation.backend}: {explanation.reason}")
    contenders = {"loop": (loop, cell), "scan": (ours, cell)}
    timings, errors = _time(contenders, x_TBF, settings, name=case.name, where=str(shape))
    return _make_row(
        case.name,
        origin=case.origin,
        shape=shape,
        ours="scan",
        backend=explanation.backend,
        timings=timings,
        errors=errors,
        goal=case.goal,
    )


def _run_layers(settings: LoopsSettings, report: Report) -> None:
    """Recurrent policies: nn.LSTM one step at a time, with the state set to zero at done flags, and `resets=`."""
    rows: list[Row] = []
    for origin, shape, goal in [("RecurrentPPO", TINY, None)] if settings.quick else AGENTS:
        report.progress(f"resets, {shape}")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            lstm = nn.LSTM(shape.input_size, shape.hidden_size)
            x_TBF = torch.randn(shape.num_steps, shape.batch, shape.input_size)
            done_TB = torch.rand(shape.num_steps, shape.batch) < RESETS
        rnn = stretto.RNN(cell_from(lstm), batch_first=False)
        layer = stretto.accelerate(copy.deepcopy(lstm))

        def loop(x_TBF: torch.Tensor, lstm: nn.LSTM = lstm, done_TB: torch.Tensor = done_TB) -> torch.Tensor:
            h_1BH = c_1BH = x_TBF.new_zeros(1, x_TBF.shape[1], lstm.hidden_size)
            outputs = []
            for x_BF, done_B in zip(x_TBF, done_TB.float(), strict=True):
                keep_1B1 = (1.0 - done_B).view(1, -1, 1)
                y_1BH, (h_1BH, c_1BH) = lstm(x_BF.unsqueeze(0), (keep_1B1 * h_1BH, keep_1B1 * c_1BH))
                outputs.append(y_1BH)
            return torch.cat(outputs)

        def by_rnn(x_TBF: torch.Tensor, rnn: Any = rnn, done_TB: torch.Tensor = done_TB) -> torch.Tensor:
            return rnn(x_TBF, resets=done_TB)[0]  # type: ignore[no-any-return]

        def by_layer(x_TBF: torch.Tensor, layer: Any = layer, done_TB: torch.Tensor = done_TB) -> torch.Tensor:
            return layer(x_TBF, resets=done_TB)[0]  # type: ignore[no-any-return]

        contenders = {"loop": (loop, lstm), "RNN": (by_rnn, rnn), "accelerate": (by_layer, layer)}
        timings, errors = _time(contenders, x_TBF, settings, name="nn.LSTM with resets", where=str(shape))
        for ours in ("RNN", "accelerate"):
            backend = rnn.explain().backend if ours == "RNN" else None
            rows.append(
                _make_row(
                    "nn.LSTM, resets",
                    origin=origin,
                    shape=shape,
                    ours=ours,
                    backend=backend,
                    timings=timings,
                    errors=errors,
                    goal=goal,
                )
            )
    report.table(title="Recurrent policies: resets in a loop and resets=", columns=COLUMNS, rows=rows, caption=CAPTION)


def _time(
    contenders: Mapping[str, tuple[Forward, nn.Module]],
    x_TBF: torch.Tensor,
    settings: LoopsSettings,
    *,
    name: str,
    where: str,
) -> tuple[dict[str, Timing], dict[str, float]]:
    """Check that all equal the first, then time them in turn; and the errors."""
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        weight_TBO = torch.randn_like(next(iter(contenders.values()))[0](x_TBF))
    batch = Batch(x_TBF=x_TBF, weight_TBO=weight_TBO)
    made = {
        key: TorchContender(key, forward=forward, weights=weights, batch=batch)
        for key, (forward, weights) in contenders.items()
    }
    reference, *others = made.values()
    expected = reference.results()
    errors = {
        one.name: check_equal(one.results(), expected, name=f"{name} by {one.name}", peer="the loop", where=where)
        for one in others
    }
    return time_interleaved({key: one.run for key, one in made.items()}, budget=settings.timing), errors


def _make_row(
    name: str,
    *,
    origin: str,
    shape: Shape,
    ours: str,
    backend: str | None,
    timings: Mapping[str, Timing],
    errors: Mapping[str, float],
    goal: float | None,
) -> Row:
    minima, medians = ratio_of(timings, "loop", ours)
    bound = NEVER_BELOW if goal is None else goal
    milliseconds = (1e3 * timings[key].median for key in ("loop", ours))
    return (
        *(name, origin, shape.sizes, ours, backend),
        *milliseconds,
        *(medians, bound, medians >= bound, minima, errors[ours]),
    )


# One step, and the first call -----------------------------------------------------------------------------------------


def _run_steps(settings: LoopsSettings, report: Report) -> None:
    """One step of a rollout or a stream: `rnn.step` and accelerated layers against torch's layer."""
    rows: list[Row] = []
    for kind, shape in itertools.product((nn.GRU, nn.LSTM), (TINY,) if settings.quick else STEPS):
        layer = kind(shape.input_size, shape.hidden_size)
        accelerated = stretto.accelerate(copy.deepcopy(layer))
        rnn = stretto.RNN(cell_from(layer), batch_first=False)
        x_1BF, h_1BH = torch.randn(1, shape.batch, shape.input_size), torch.randn(1, shape.batch, shape.hidden_size)
        state = (h_1BH, h_1BH) if kind is nn.LSTM else h_1BH
        for ours, with_gradients in (("step", False), ("accelerate", False), ("accelerate", True)):
            if ours == "step" and kind is nn.LSTM:
                continue
            name = f"nn.{kind.__name__}"
            loops = {name: _repeat_step(layer, x_1BF, state), "stretto": _repeat_step(accelerated, x_1BF, state)}
            if ours == "step":
                loops["stretto"] = _repeat_step(rnn.step, x_1BF[0], h_1BH[0])
            calls = 1 if settings.quick else 20 if with_gradients else 50
            with torch.set_grad_enabled(with_gradients):
                values = {key: {"y": loop(1).reshape(-1)} for key, loop in loops.items()}
                error = check_equal(values["stretto"], values[name], name=ours, peer=name, where=str(shape))
                contenders = {key: functools.partial(loop, calls) for key, loop in loops.items()}
                timings = time_interleaved(contenders, budget=settings.timing)
            minima, medians = ratio_of(timings, name, "stretto")
            microseconds = (1e6 * timings[key].median / calls for key in ("stretto", name))
            rows.append(
                (ours, name, with_gradients, shape.sizes, *microseconds, medians, 1.0, medians >= 1, minima, error)
            )
    report.table(
        title="One step at a time",
        columns=(
            *("ours", "beside", "gradients", "T, B, F, H", "ours us", "torch us", "ratio", "goal", "met"),
            *("ratio of minima", "error"),
        ),
        rows=rows,
        caption="ratio: the median time of torch's layer for one step over that of `rnn.step`, or of the accelerated "
        "layer called in the same loop, of one interleaved run; forward only, with or without recording gradients.",
    )


def _repeat_step(step: Callable[..., Any], x: torch.Tensor, state: Any) -> Callable[[int], torch.Tensor]:
    def loop(calls: int) -> torch.Tensor:
        y, after = step(x, state)
        for _ in range(calls - 1):
            y, after = step(x, after)
        return y  # type: ignore[no-any-return]

    return loop


# What a process prints of its first training step, imports and construction aside.
FIRST: Final = """
import json, sys, time, torch, stretto
from bench.loops import ManyNodes
torch.set_num_threads(1)
kind, T, B, F, H = sys.argv[1], *map(int, sys.argv[2:])
rnn = stretto.RNN(stretto.cells.GRU(F, H) if kind == "GRU" else ManyNodes(F, H), batch_first=False)
x = torch.randn(T, B, F)
torch.nn.GRU(F, H)(x)[0].sum().backward()
begin = time.perf_counter()
rnn(x)[0].sum().backward()
first = time.perf_counter() - begin
found = rnn.explain()
print(json.dumps([first, found.analysis_seconds, found.compile_seconds, found.backend]))
"""


def _run_first_calls(settings: LoopsSettings, report: Report) -> None:
    """The first training step in processes of their own: with an empty cache of kernels, and a full one."""
    shape = TINY if settings.quick else Shape(100, 8, 32, 64)
    rows: list[Row] = []
    for kind in ("GRU", "300 nodes"):
        report.progress(f"first call, {kind}")
        with tempfile.TemporaryDirectory() as cache:
            cold = _time_first_call(kind, shape, cache)
            warm = [_time_first_call(kind, shape, cache) for _ in range(1 if settings.quick else 3)]
        best = min(warm)
        rows.append((kind, shape.sizes, cold[3], cold[0], 1e3 * cold[1], cold[2], 1e3 * best[0], 1e3 * best[1]))
        if kind == "GRU":
            report.goal("first call of a GRU, cold, s", cold[0], at_most=2.5)
            report.goal("tracing a GRU, ms", 1e3 * best[1], at_most=20.0)
            report.goal("first call of a GRU, from the cache, ms", 1e3 * best[0], at_most=35.0)
        else:
            report.goal("compiling 300 nodes, s", cold[2], at_most=15.0)
    report.table(
        title="The first training step of a process",
        columns=(
            *("cell", "T, B, F, H", "backend", "cold s", "tracing ms, cold", "compiling s"),
            *("from the cache ms", "tracing ms"),
        ),
        rows=rows,
        caption=(
            "Forward and backward, after a training step of nn.GRU, in a separate process: once with an empty cache "
            "of compiled kernels, then three times from the cache, of which the fastest counts."
        ),
    )


def _time_first_call(kind: str, shape: Shape, cache: str) -> tuple[float, float, float, str]:
    sizes = (str(size) for size in (shape.num_steps, shape.batch, shape.input_size, shape.hidden_size))
    done = subprocess.run(  # noqa: S603
        [sys.executable, "-c", FIRST, kind, *sizes],
        env={**os.environ, CACHE_VARIABLE: cache},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise StrettoError(f"the first call of {kind} failed: {done.stderr[-2000:]}", fix="See the error above.")
    first, analysis, compiling, backend = json.loads(done.stdout.splitlines()[-1])
    return first, analysis, compiling, backend
