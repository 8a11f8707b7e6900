"""Everything stays on one device: on torch's meta device, operators on tensors of two devices fail, as on a GPU.

Says nothing of values. Shape legend: B sequences, T steps, F features of the input.
"""

from typing import Any

import numpy as np
import pytest
import torch

import stretto
from cell_settings import SETTINGS, F
from stretto.kernels import LayerCall, Layout, build, run_together
from stretto.state import flatten

META = torch.device("meta")


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
