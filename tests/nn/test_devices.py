"""Everything stays on one device: on torch's meta device, operators on tensors of two devices fail, as on a GPU.

Says nothing of values. A layer leaves the meta device to a plain loop; `as_on_a_gpu` makes it run its backends there.

Shape legend: B sequences, T steps, F features of the input.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import stretto
from cell_settings import SETTINGS, F
from stretto.kernels import LayerCall, Layout, build, run_together
from stretto.kernels.backends import cudagraph
from stretto.nn import rnn
from stretto.solvers import AbstractSolver, TimeParallel
from stretto.state import flatten

META = torch.device("meta")
RAGGED = [12, 3, 0, 5]


class Counter(cudagraph.AbstractRecorder):
    """Counts what would be recorded as graphs."""

    recorded = 0

    def record(self, work: Any) -> Any:
        """What a capture makes."""
        self.recorded += 1
        return work(), lambda: None


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Counter:
    counter = Counter()
    monkeypatch.setattr(rnn, "_unusual", lambda *_: "")
    monkeypatch.setitem(cudagraph.RECORDERS, "meta", counter)
    # Gradients come back in threads of autograd that ask for the device by its name.
    monkeypatch.setitem(cudagraph.RECORDERS, "cuda", counter)
    return counter


def run(rnn: stretto.RNN, *, T: int = 6, **options: Any) -> None:
    x_BTF = torch.empty(4, T, getattr(rnn.cells[0], "input_size", F), device=META, requires_grad=True)
    y_BTH, states = rnn(x_BTF, **options)
    assert all(part.is_meta for part in (y_BTH, *flatten(states)))
    y_BTH.sum().backward()
    assert x_BTF.grad is not None
    assert x_BTF.grad.is_meta


@pytest.mark.parametrize("setting", SETTINGS)
def test_the_loops_of_every_cell(setting: str) -> None:
    cell = SETTINGS[setting](5).to(META)
    state, size = cell.initial_state(4), getattr(cell, "input_size", F)
    built = build(cell, x_shape=(size,), x_dtype=torch.float32, state=state, backend="eager")
    assert built.plan is not None
    parameters = {**dict(cell.named_parameters()), **dict(cell.named_buffers())}
    for layout in (Layout.even(num_steps=6, num_rows=4), Layout(np.array([6, 4, 3, 0]))):
        x_PF = torch.empty(layout.total, size, device=META, requires_grad=True)
        ((y_PH, finals),) = run_together([LayerCall(built.program, layout, x_PF, flatten(state), parameters)])
        assert all(part.is_meta for part in (y_PH, *finals))
        y_PH.sum().backward()
        assert x_PF.grad is not None


def test_stacks_of_both_directions() -> None:
    rnn = stretto.RNN(stretto.cells.GRU(3, 5).to(META), 2, True)
    run(rnn)
    run(rnn, lengths=[6, 1, 4, 3])
    run(rnn, lengths=torch.tensor([6, 1, 4, 3]), resets=torch.rand(4, 6) < 0.5)


def test_stored_states_and_steps() -> None:
    rnn = stretto.RNN(stretto.cells.LSTM(3, 5).to(META), save="states")
    run(rnn, T=80, lengths=[80, 7, 0, 3])
    y_BH, state = rnn.step(torch.empty(2, 3, device=META))
    assert all(part.is_meta for part in (y_BH, *flatten(state)))


def test_tables_of_a_layout_are_copied_once() -> None:
    layout = Layout.even(num_steps=3, num_rows=2).chunk(0, 2)
    for name in ("sequence_P", "last_B", "reversed_P", "starts_T", "rows_T", "lengths_B"):
        table = layout.on_device(name, META)
        assert table.is_meta
        assert layout.on_device(name, META) is table


@pytest.mark.parametrize("default", ["cpu", "meta"])
@pytest.mark.parametrize("backend", ["eager", "cudagraph"])
def test_backends_of_a_gpu(backend: Any, default: str, as_on_a_gpu: Counter) -> None:
    """Also with `torch.set_default_device("cuda")`: what must be on the CPU is made there."""
    even = stretto.RNN(stretto.cells.GRU(3, 5).to(META), 2, True, dropout=0.3, backend=backend)
    stored = stretto.RNN(stretto.cells.LSTM(3, 5).to(META), backend=backend, save="states")
    resets = torch.rand(4, 12) < 0.3
    packed = torch.nn.utils.rnn.pack_padded_sequence(
        torch.empty(4, 12, 3, device=META), torch.tensor([12, 6, 4, 2]), batch_first=True
    )
    with torch.device(default):
        run(even, T=12)
        run(even, T=12, lengths=RAGGED, resets=resets)
        run(stored, T=80, lengths=[80, 7, 0, 3])
        assert even(packed)[0].data.is_meta
    assert even.explain().backend == stored.explain().backend == backend
    assert (as_on_a_gpu.recorded > 0) == (backend == "cudagraph")


class DrawsBits(torch.nn.Module):
    """Passes some inputs on; has no parameters that would say where its state is."""

    def forward(self, x_t: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(h + x_t * torch.bernoulli(torch.sigmoid(x_t)))
        return h, h


SOLVERS: dict[str, Callable[[], AbstractSolver]] = {
    "shooting": lambda: stretto.Shooting(num_chunks=3),
    "sweeps": lambda: stretto.Shooting(num_chunks=3, max_sweeps=2),
    "newton": stretto.Newton,
    "multigrid": stretto.Multigrid,
    "time_parallel": TimeParallel,
}


@pytest.mark.parametrize("lengths", [None, [40, 7, 0, 12]])
@pytest.mark.parametrize("name", SOLVERS)
def test_solvers_run_sequentially_where_there_are_no_values(name: str, lengths: Any) -> None:
    """Whether iterates agree cannot be known there: the loop is right, and it is told."""
    layer = stretto.RNN(stretto.cells.LSTM(3, 5).to(META), 2, True, solver=SOLVERS[name]())
    run(layer, T=40, lengths=lengths)
    assert layer.solution.solver == "serial"
    assert layer.solution.reason == "the input is on meta"


@pytest.mark.parametrize("lengths", [None, [40, 7, 0, 12]])
@pytest.mark.parametrize("name", SOLVERS)
def test_solvers_on_meta_themselves(name: str, lengths: Any, as_on_a_gpu: Counter) -> None:
    """As somebody calls one who writes their own."""
    layer = stretto.RNN(stretto.cells.LSTM(3, 5).to(META), solver=SOLVERS[name](), backend="eager")
    run(layer, T=40, lengths=lengths)
    assert layer.solution.solver == name.replace("sweeps", "shooting")
    assert layer.solution.iterations == 1
    if name != "time_parallel":
        assert layer.solution.fell_back
        assert layer.solution.reason == "the tensors are on meta, and have no values to compare"


def test_auto_solvers_on_meta() -> None:
    layer = stretto.RNN(stretto.cells.GRU(3, 5).to(META), solver="auto")
    run(layer, T=300)
    assert layer.solution.reason == "the input is on meta"


def test_what_a_cell_draws(as_on_a_gpu: Counter) -> None:
    x_BTF = torch.empty(4, 6, 3, device=META)
    layer = stretto.RNN(DrawsBits(), state=torch.zeros(3), backend="cudagraph")
    for resets in (None, torch.rand(4, 6) < 0.5):
        y_BTH, _ = layer(x_BTF, resets=resets)
        assert y_BTH.is_meta
    assert layer.step(x_BTF[:, 0])[0].is_meta
    assert layer.explain().backend == "cudagraph"
    assert as_on_a_gpu.recorded > 0


def test_resets_may_be_on_the_cpu_in_a_plain_loop() -> None:
    run(stretto.RNN(stretto.cells.GRU(3, 5).to(META)), resets=torch.rand(4, 6) < 0.5)
