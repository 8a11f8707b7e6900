"""What holds for every cell: shapes, independent rows, gradients, copies, other input sizes, operators, arguments.

Shape legend: B sequences, F features.
"""

import copy
import inspect
import math
import operator
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from cell_settings import SETTINGS, F
from stretto import cells
from stretto.cells import Cell, State
from stretto.errors import StrettoError
from stretto.state import flatten, map_state

H = 6
"""Hidden units."""


@pytest.fixture(params=SETTINGS)
def cell(request: pytest.FixtureRequest) -> Cell:
    torch.manual_seed(0)
    made = SETTINGS[request.param](H).double()
    with torch.no_grad():
        for parameter in made.parameters():
            # Gains of one and shifts of zero would hide a mix-up.
            parameter.add_(0.3 * torch.randn_like(parameter))
    return made


def _warm(cell: Cell, batch_size: int, *, steps: int = 3) -> State:
    """A state with something in every part of it."""
    torch.manual_seed(batch_size)
    state = cell.initial_state(batch_size)
    for _ in range(steps):
        _, state = cell(torch.randn(batch_size, F, dtype=torch.float64), state)
    return map_state(torch.Tensor.detach, state)


def _step(cell: Cell, x_BF: torch.Tensor, state: State, *, seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    y, after = cell(x_BF, state)
    return [y, *flatten(after)]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_step_keeps_the_structure_shapes_and_dtype_of_the_state(cell: Cell, batch_size: int) -> None:
    state = cell.initial_state(batch_size)
    y, after = cell(torch.randn(batch_size, F, dtype=torch.float64), state)
    assert isinstance(after, torch.Tensor) == isinstance(state, torch.Tensor)
    assert [part.shape for part in flatten(after)] == [part.shape for part in flatten(state)]
    assert all(len(part) == batch_size for part in flatten(state))
    assert {part.dtype for part in (y, *flatten(state), *flatten(after))} == {torch.float64}
    assert y.shape == flatten(after)[0].shape


def test_the_state_starts_at_zero_in_the_dtype_of_the_cell(cell: Cell) -> None:
    for part in flatten(cell.eval().float().initial_state(2)):
        assert part.dtype == torch.float32
        # The masks of dropout are ones, all else is zero.
        assert part.unique().tolist() in ([0.0], [1.0])
    assert not flatten(cell.initial_state(2))[0].any()


def test_rows_of_a_batch_do_not_see_each_other(cell: Cell) -> None:
    cell.eval()
    state, x_BF = _warm(cell, 4), torch.randn(4, F, dtype=torch.float64)
    together = _step(cell, x_BF, state)
    for row in range(4):
        alone = _step(cell, x_BF[row : row + 1], map_state(operator.itemgetter(slice(row, row + 1)), state))
        for one, all_ in zip(alone, together, strict=True):
            torch.testing.assert_close(one[0], all_[row], rtol=1e-13, atol=1e-13)


def test_every_parameter_takes_part(cell: Cell) -> None:
    y, after = cell(torch.randn(3, F, dtype=torch.float64), _warm(cell, 3))
    torch.autograd.backward(sum((part.square().sum() for part in flatten(after) if part.requires_grad), y.sum()))
    for name, parameter in cell.named_parameters():
        assert parameter.grad is not None, name
        # A memory of one state leaves a query nothing to choose.
        assert parameter.grad.abs().sum() > 0 or getattr(cell, "memory_size", 0) == 1, name


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda cell: pickle.loads(pickle.dumps(cell))])
def test_copies_compute_the_same_and_stand_alone(cell: Cell, duplicate: Any) -> None:
    twin = duplicate(cell)
    state, x_BF = _warm(cell, 2), torch.randn(2, F, dtype=torch.float64)
    expected = _step(cell, x_BF, state)
    for one, other in zip(_step(twin, x_BF, state), expected, strict=True):
        assert torch.equal(one, other)
    assert not {id(weight) for weight in twin.parameters()} & {id(weight) for weight in cell.parameters()}
    with torch.no_grad():
        for weight in twin.parameters():
            weight.zero_()
    assert torch.equal(_step(cell, x_BF, state)[0], expected[0])
    assert (
        twin.with_input_size(3)(torch.zeros(2, 3, dtype=torch.float64), cell.initial_state(2))[0].shape
        == expected[0].shape
    )


def test_another_input_size_changes_the_input_and_nothing_else(cell: Cell) -> None:
    other = cell.with_input_size(9)
    assert type(other) is type(cell)
    assert {weight.dtype for weight in other.parameters()} == {torch.float64}
    sizes = {name: tuple(weight.shape) for name, weight in cell.named_parameters()}
    grown = {name: tuple(weight.shape) for name, weight in other.named_parameters()}
    wide = {"weight_ih", "weight_mx"}
    assert grown == {name: (size[0], 9) if name.split(".")[-1] in wide else size for name, size in sizes.items()}
    for name, parameter in other.named_parameters():
        assert all(parameter is not weight for weight in cell.parameters()), name
    # The same settings: with the same weights the step is the same on the inputs that both know.
    with torch.no_grad():
        for name, weight in cell.named_parameters():
            twin = other.get_parameter(name)
            twin.zero_()
            twin[tuple(slice(0, size) for size in weight.shape)] = weight
    state, x_BF = _warm(cell, 2), torch.randn(2, F, dtype=torch.float64)
    wider_BF = torch.cat([x_BF, torch.randn(2, 9 - F, dtype=torch.float64)], dim=1)
    for one, two in zip(_step(other, wider_BF, state), _step(cell, x_BF, state), strict=True):
        torch.testing.assert_close(one, two, rtol=1e-13, atol=1e-13)


def test_saved_weights_are_parameters_only(cell: Cell) -> None:
    assert cell.state_dict().keys() == dict(cell.named_parameters()).keys()


def test_a_state_of_another_make_up_is_refused(cell: Cell) -> None:
    part = flatten(cell.initial_state(2))[0]
    wrong: list[State] = [(part,), (part,) * 7]
    if not isinstance(cell.initial_state(2), torch.Tensor):
        wrong.append(part)
    for state in wrong:
        with pytest.raises(StrettoError, match=r"initial_state\(batch_size\)"):
            cell(torch.zeros(2, F, dtype=torch.float64), state)


def test_every_cell_that_is_exported_is_tried_here() -> None:
    classes = [getattr(cells, name) for name in cells.__all__ if isinstance(getattr(cells, name), type)]
    assert all(issubclass(kind, Cell) for kind in classes)
    assert {kind for kind in classes if inspect.isabstract(kind)} == {Cell, cells.AbstractGatedCell}
    tried = {type(part) for make in SETTINGS.values() for part in make(H).modules() if isinstance(part, Cell)}
    assert tried == set(classes) - {Cell, cells.AbstractGatedCell}


def test_a_printed_cell_shows_how_it_was_made() -> None:
    assert repr(cells.GRU(3, 4, reset="before")) == "GRU(3, 4, reset='before')"
    assert "p=(0.5, 0.5)" in repr(cells.Zoneout(cells.LSTM(3, 4), p=0.5))


SIMPLE = [
    kind
    for kind in dict.fromkeys(type(make(H)) for make in SETTINGS.values())
    if kind not in (cells.ProjectedLSTM, cells.Zoneout, cells.RecurrentDropout)
]
"""Those that are made from two sizes alone."""


@pytest.mark.parametrize("kind", SIMPLE)
def test_sizes_below_1_or_not_whole_are_refused(kind: type[Cell]) -> None:
    for wrong in (0, -3, 2.0, "4", None, True):
        with pytest.raises(StrettoError, match=rf"{kind.__name__} got input_size={wrong!r}"):
            kind(wrong, 4)
        with pytest.raises(StrettoError, match=rf"{kind.__name__} got hidden_size={wrong!r}"):
            kind(4, wrong)


@pytest.mark.parametrize("kind", SIMPLE)
def test_sizes_may_come_from_numpy_and_settings_are_given_by_name(kind: type[Cell]) -> None:
    cell = kind(np.int64(3), np.int32(4))
    assert (cell.input_size, cell.hidden_size) == (3, 4)
    assert kind(3, 4, bias=False).with_input_size(2).bias_ih is None
    with pytest.raises(TypeError):
        kind(3, 4, False)


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        (cells.Elman, {"nonlinearity": "sigmoid"}),
        (cells.IndRNN, {"nonlinearity": None}),
        (cells.GRU, {"reset": "never"}),
        (cells.LiGRU, {"norm": "batch"}),
        (cells.AttentionCell, {"memory_size": 0}),
        (cells.ProjectedLSTM, {"proj_size": 0}),
        (cells.ProjectedLSTM, {"proj_size": 4}),
        (cells.ProjectedLSTM, {"proj_size": 9}),
    ],
)
def test_unknown_settings_are_refused(kind: type[Cell], settings: dict[str, object]) -> None:
    ((name, value),) = settings.items()
    with pytest.raises(StrettoError, match=rf"{kind.__name__} got {name}={value!r}") as caught:
        kind(3, 4, **settings)
    assert caught.value.fix.endswith(".")


@pytest.mark.parametrize("kind", [*SIMPLE, lambda F, H: cells.ProjectedLSTM(F, H, proj_size=7)])
def test_weights_are_drawn_within_the_bound_of_torch(kind: type[Cell]) -> None:
    torch.manual_seed(0)
    bound = 1 / math.sqrt(64)
    for name, weight in kind(30, 64).named_parameters():
        if "norm" in name:
            assert torch.equal(weight, torch.full_like(weight, 1.0 if name.endswith("weight") else 0.0)), name
        elif weight.dim() == 2:
            assert weight.abs().max() <= bound, name
            assert weight.abs().max() > 0.98 * bound, name
            assert abs(weight.mean()) < 0.1 * bound, name
    state = cells.IndRNN(3, 500).weight_hh
    assert 0 <= state.min() < 0.02
    assert 0.98 < state.max() <= 1
