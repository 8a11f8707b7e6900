"""What holds for every cell: shapes, rows apart, gradients, copies, further layers, traceable operators.

Shape legend: B sequences, F features.
"""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stretto import cells
from stretto.cells import Cell, State
from stretto.errors import StrettoError

F = 5


def _parts(state: State) -> tuple[torch.Tensor, ...]:
    return (state,) if isinstance(state, torch.Tensor) else state


def _warm(cell: Cell, batch_size: int, *, steps: int = 3) -> State:
    """A state with something in every part of it."""
    torch.manual_seed(batch_size)
    state = cell.initial_state(batch_size)
    for _ in range(steps):
        _, state = cell(torch.randn(batch_size, F, dtype=torch.float64), state)
    return tuple(part.detach() for part in state) if isinstance(state, tuple) else state.detach()


def _rows(state: State, rows: slice) -> State:
    return state[rows] if isinstance(state, torch.Tensor) else tuple(part[rows] for part in state)


def _step(cell: Cell, x_BF: torch.Tensor, state: State, *, seed: int = 0) -> list[torch.Tensor]:
    torch.manual_seed(seed)
    y, after = cell(x_BF, state)
    return [y, *_parts(after)]


@pytest.mark.parametrize("batch_size", [1, 4])
def test_a_step_keeps_the_structure_shapes_and_dtype_of_the_state(cell: Cell, batch_size: int) -> None:
    state = cell.initial_state(batch_size)
    y, after = cell(torch.randn(batch_size, F, dtype=torch.float64), state)
    assert isinstance(after, torch.Tensor) == isinstance(state, torch.Tensor)
    assert [part.shape for part in _parts(after)] == [part.shape for part in _parts(state)]
    assert all(len(part) == batch_size for part in _parts(state))
    assert {part.dtype for part in (y, *_parts(state), *_parts(after))} == {torch.float64}
    assert y.shape == _parts(after)[0].shape


def test_the_state_starts_at_zero_in_the_dtype_of_the_cell(cell: Cell) -> None:
    for part in _parts(cell.eval().float().initial_state(2)):
        assert part.dtype == torch.float32
        # The masks of dropout are ones, all else is zero.
        assert part.unique().tolist() in ([0.0], [1.0])
    assert not _parts(cell.initial_state(2))[0].any()


def test_rows_of_a_batch_do_not_see_each_other(cell: Cell) -> None:
    cell.eval()
    state, x_BF = _warm(cell, 4), torch.randn(4, F, dtype=torch.float64)
    together = _step(cell, x_BF, state)
    for row in range(4):
        alone = _step(cell, x_BF[row : row + 1], _rows(state, slice(row, row + 1)))
        for one, all_ in zip(alone, together, strict=True):
            torch.testing.assert_close(one[0], all_[row], rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("training", [True, False])
def test_gradients_of_a_step_are_right(cell: Cell, training: bool) -> None:
    cell.train(training)
    state, x_BF = _warm(cell, 2), torch.randn(2, F, dtype=torch.float64)
    parts, names = _parts(state), [name for name, _ in cell.named_parameters()]
    # A step counter, the only part of one column, has no gradient.
    smooth = [index for index, part in enumerate(parts) if part.shape[1:] != (1,)]

    def step(x_BF: torch.Tensor, *rest: torch.Tensor) -> tuple[torch.Tensor, ...]:
        given = list(parts)
        for index, part in zip(smooth, rest, strict=False):
            given[index] = part
        weights = dict(zip(names, rest[len(smooth) :], strict=True))
        torch.manual_seed(5)
        inner: Any = given[0] if isinstance(state, torch.Tensor) else tuple(given)
        y, after = torch.func.functional_call(cell, weights, (x_BF, inner))
        return (y, *(_parts(after)[index] for index in smooth))

    inputs = [x_BF, *(parts[index] for index in smooth), *(weight.detach() for weight in cell.parameters())]
    assert torch.autograd.gradcheck(step, [tensor.clone().requires_grad_() for tensor in inputs], fast_mode=True)


def test_every_parameter_takes_part(cell: Cell) -> None:
    y, after = cell(torch.randn(3, F, dtype=torch.float64), _warm(cell, 3))
    torch.autograd.backward(sum((part.square().sum() for part in _parts(after) if part.requires_grad), y.sum()))
    for name, parameter in cell.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.abs().sum() > 0, name


class _Operators(TorchDispatchMode):
    """Notes the operators that change their arguments or look at values."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []
        self.refused: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen.append(str(func))
        if func._schema.is_mutable or "_local_scalar_dense" in str(func) or "nonzero" in str(func):
            self.refused.append(str(func))
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("training", [True, False])
def test_a_step_can_be_traced(cell: Cell, training: bool) -> None:
    cell.train(training)
    state, x_BF = _warm(cell, 3), torch.randn(3, F, dtype=torch.float64)
    with _Operators() as operators:
        cell(x_BF, state)
    with _Operators() as again:
        cell(torch.zeros(7, F, dtype=torch.float64), _warm(cell, 7))
    assert operators.refused == []
    assert len(operators.seen) > 3
    assert again.seen[-len(operators.seen) :] == operators.seen


def test_a_step_leaves_what_it_was_given_as_it_was(cell: Cell) -> None:
    state, x_BF = _warm(cell, 3), torch.randn(3, F, dtype=torch.float64)
    before = [tensor.clone() for tensor in (x_BF, *_parts(state))]
    cell(x_BF, state)
    for tensor, earlier in zip((x_BF, *_parts(state)), before, strict=True):
        assert torch.equal(tensor, earlier)


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
    assert twin.resized(3)(torch.zeros(2, 3, dtype=torch.float64), cell.initial_state(2))[0].shape == expected[0].shape


def test_resized_changes_the_input_and_nothing_else(cell: Cell) -> None:
    other = cell.resized(9)
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
    part = _parts(cell.initial_state(2))[0]
    wrong: list[State] = [(part,), (part,) * 7]
    if not isinstance(cell.initial_state(2), torch.Tensor):
        wrong.append(part)
    for state in wrong:
        with pytest.raises(StrettoError, match=r"initial_state\(batch_size\)"):
            cell(torch.zeros(2, F, dtype=torch.float64), state)


def test_the_package_exports_what_it_lists() -> None:
    assert all(getattr(cells, name) is not None for name in cells.__all__)
    made = {name for name in cells.__all__ if isinstance(getattr(cells, name), type)} - {"Cell"}
    assert len(made) == 17
    assert all(issubclass(getattr(cells, name), Cell) for name in made)


def test_a_printed_cell_shows_how_it_was_made() -> None:
    assert repr(cells.GRU(3, 4, reset="before")) == "GRU(3, 4, reset='before')"
    assert "p=(0.5, 0.5)" in repr(cells.Zoneout(cells.LSTM(3, 4), p=0.5))
