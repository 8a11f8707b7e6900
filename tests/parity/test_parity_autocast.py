"""Under autocast of a GPU, products take operands of 16 bits; states, sums and all else stay in single precision.

The CPU stands for the GPU, with the interpreter for its kernels: never run on a GPU.

Shape legend: B sequences, T steps, F features of the input.
"""

import importlib
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch
from parity_cells import drawn, layer
from parity_oracle import errors_of, expected, found

import stretto
from graph_recorder import TapeRecorder
from stretto.kernels.backends import cudagraph
from stretto.nn import guards
from stretto.nn.guards import autocast_operands
from stretto.state import flatten

RAGGED: Final = [6, 1, 4, 0]
BITS: Final = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}
Switch = Callable[[torch.dtype | None], None]


@pytest.fixture
def autocast(interpreter: None, monkeypatch: pytest.MonkeyPatch) -> Switch:
    """Turns autocast of the GPU that the CPU stands for on or off."""
    monkeypatch.setitem(cudagraph.RECORDERS, "cpu", TapeRecorder())

    def turn(low: torch.dtype | None) -> None:
        for name in ("rnn", "scan"):
            module = importlib.import_module(f"stretto.nn.{name}")
            monkeypatch.setattr(module, "autocast_operands", lambda _, own: low if own is torch.float32 else None)

    return turn


def test_where_it_is_on(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu = torch.device("cuda")
    assert autocast_operands(gpu, torch.float32) is None
    monkeypatch.setattr(guards.torch, "is_autocast_enabled", lambda kind: kind == "cuda")
    monkeypatch.setattr(guards.torch, "get_autocast_dtype", lambda _: torch.bfloat16)
    assert autocast_operands(gpu, torch.float32) is torch.bfloat16
    assert autocast_operands(gpu, torch.float64) is None
    assert autocast_operands(gpu, torch.bfloat16) is None
    assert autocast_operands(torch.device("cpu"), torch.float32) is None


@pytest.mark.parametrize("low", BITS, ids=str)
@pytest.mark.parametrize("backend", ["triton", "cudagraph", "eager"])
def test_products_round_their_operands_and_states_stay_wide(backend: Any, low: torch.dtype, autocast: Switch) -> None:
    rnn = layer("gru", 6, dtype=torch.float32, backend=backend)
    batch = drawn(rnn, T=6, B=4, lengths=RAGGED)
    wanted, exact = expected(rnn, batch), found(rnn, batch)
    autocast(low)
    y, state = rnn(batch.x_BTF, lengths=batch.lengths)
    assert y.dtype is low
    assert all(part.dtype is torch.float32 for part in flatten(state))
    rough = found(rnn, batch)
    errors, before = errors_of(rough, wanted), errors_of(exact, wanted)
    assert max(before.values()) < 1e-5
    # Rounded, and by no more than some roundings of operands make.
    assert 0.01 * BITS[low] < max(errors.values()) < 20 * BITS[low]
    autocast(None)
    assert rnn(batch.x_BTF, lengths=batch.lengths)[0].dtype is torch.float32


@pytest.mark.slow
def test_a_state_of_many_steps_is_not_rounded(autocast: Switch) -> None:
    """In 8 bits, 256 and one more is 256."""

    class Counts(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1, 1))

        def forward(self, x_t: torch.Tensor, count: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            count = count + x_t @ self.weight
            return count, count

    autocast(torch.bfloat16)
    for backend in ("cudagraph", "eager"):
        counts = stretto.RNN(Counts(), state=1, backend=backend)  # type: ignore[arg-type]
        y, state = counts(torch.ones(1, 300, 1))
        assert state.item() == 300.0
        assert y.dtype is torch.bfloat16


def test_products_outside_of_loops_take_them_too(autocast: Switch) -> None:
    """Inputs of all steps at once: their weights in 16 bits, forward and backward, and gradients in 32."""
    autocast(torch.bfloat16)
    torch.manual_seed(0)
    rnn = stretto.RNN(stretto.cells.GRU(4, 5), backend="eager")
    x_BTF = torch.randn(2, 1, 4, requires_grad=True)
    y, _ = rnn(x_BTF)
    cell = rnn.cells[0]
    gates = torch.nn.functional.linear(
        x_BTF[:, 0].bfloat16(), cell.weight_ih.bfloat16(), cell.bias_ih.bfloat16()
    ).float() + torch.cat([cell.bias_hh[:10], torch.zeros(5)])
    reset, update, new = gates.chunk(3, 1)
    new = torch.tanh(new + torch.sigmoid(reset) * cell.bias_hh[10:])
    wanted = (1 - torch.sigmoid(update)) * new
    given = [x_BTF, cell.weight_ih]
    made = [
        [one, *torch.autograd.grad(one.float().sum(), given, retain_graph=True)] for one in (y[:, 0], wanted.bfloat16())
    ]
    assert [item.dtype for item in made[0]] == [torch.bfloat16, torch.float32, torch.float32]
    torch.testing.assert_close(*made, atol=1e-2, rtol=2e-2)


def test_scans(autocast: Switch) -> None:
    """Outputs and states keep the dtypes of `init`, whatever comes in: the structure of a scan does not change."""
    torch.manual_seed(0)
    weight = torch.randn(5, 5, requires_grad=True)

    def step(h: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(x + h @ weight)
        return h, h

    x_BTF, start = torch.randn(2, 6, 5), torch.zeros(2, 5)
    _, exact = stretto.scan(step, start, x_BTF)
    autocast(torch.bfloat16)
    for given in (x_BTF, x_BTF.bfloat16()):
        last, ys = stretto.scan(step, start, given)
        assert last.dtype is ys.dtype is torch.float32
        assert ys.grad_fn is not None
        (gradient,) = torch.autograd.grad(ys.sum(), weight)
        assert gradient.dtype is torch.float32
        assert (ys - exact).abs().max() < 0.1
