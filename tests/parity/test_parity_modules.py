"""A layer as a module among others: dtypes, autocast, copies, stored weights, and changes made to a cell afterwards.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

import copy
import io
import pickle
import types
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from parity_cells import F, drawn, layer
from parity_oracle import Batch, assert_parity, assert_same_bits, by_hand, error_of, found, tensors_in
from parity_own_cells import H, OneState
from torch import nn
from torch.nn.utils import parametrizations

import stretto
from stretto import cells

COPIES: dict[str, Callable[[stretto.RNN], stretto.RNN]] = {
    "deepcopy": copy.deepcopy,
    "pickle": lambda rnn: pickle.loads(pickle.dumps(rnn)),
    "torch.save": lambda rnn: _saved_and_loaded(rnn, weights_only=False),
}


def _saved_and_loaded(value: Any, *, weights_only: bool) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, weights_only=weights_only)


@pytest.mark.parametrize("after_a_call", [True, False])
@pytest.mark.parametrize("way", COPIES)
def test_copies_make_the_same_numbers_and_are_apart(way: str, after_a_call: bool) -> None:
    rnn = layer("recurrent-dropout", 7, num_layers=2, bidirectional=True)
    batch = drawn(rnn, T=5, B=3, lengths=[2, 5, 0])
    if after_a_call:
        found(rnn, batch)
    twin = COPIES[way](rnn)
    assert_same_bits(found(rnn, batch), found(twin, batch))
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.mul_(1.5)
    assert_parity(rnn, batch)
    assert_parity(twin, batch)
    assert error_of(found(twin, batch).values["y"], found(rnn, batch).values["y"]) > 0.01


def test_weights_go_round_by_state_dict() -> None:
    rnn, other = (layer("layer-norm-lstm", 7, num_layers=2, seed=seed) for seed in (0, 1))
    batch = drawn(rnn, T=5, B=3)
    found(other, batch)
    stored = _saved_and_loaded(rnn.state_dict(), weights_only=True)
    assert all(isinstance(value, torch.Tensor) for value in stored.values())
    other.load_state_dict(stored)
    assert_same_bits(found(rnn, batch), found(other, batch))


def test_a_copied_cell_can_be_made_again_for_further_layers() -> None:
    cell = pickle.loads(pickle.dumps(copy.deepcopy(cells.GRU(F, 7, reset="before"))))
    rnn = stretto.RNN(cell.double(), num_layers=2)
    assert [one.reset for one in rnn.cells] == ["before", "before"]  # type: ignore[union-attr]
    assert_parity(rnn, drawn(rnn, T=5, B=3))


@pytest.fixture
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double_by_default")
@pytest.mark.parametrize("setting", ["clockwork", "layer-norm-gru", "recurrent-dropout"])
def test_double_precision_by_default(setting: str) -> None:
    rnn = layer(setting, 7 if setting != "clockwork" else 6)
    batch = drawn(rnn, T=5, B=3, lengths=[2, 5, 0])
    assert batch.x_BTF.dtype == torch.float64
    assert assert_parity(rnn, batch)["cpp"].values["y"].dtype == torch.float64


@pytest.mark.usefixtures("double_by_default")
def test_single_precision_where_double_is_the_default() -> None:
    rnn = layer("lstm", 33, dtype=torch.float32)
    assert assert_parity(rnn, drawn(rnn, T=5, B=3))["cpp"].values["y"].dtype == torch.float32


def test_a_layer_follows_its_dtype() -> None:
    rnn = layer("lstm", 7)
    batch = drawn(rnn, T=5, B=3)
    found(rnn, batch)
    rnn.float()
    assert_parity(rnn, drawn(rnn, T=5, B=3))
    rnn.double()
    assert_parity(rnn, batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_runs_without_compiled_code(dtype: torch.dtype) -> None:
    rnn = layer("lstm", 7, dtype=dtype, kernel="auto")
    x_BTF = torch.randn(3, 5, F, dtype=dtype)
    y_BTH, _ = rnn(x_BTF, lengths=[2, 5, 0])
    hand_BTH, _ = by_hand(list(rnn.cells), x_BTF, lengths=[2, 5, 0], state=None, num_directions=1)
    assert y_BTH.dtype == dtype
    assert error_of(y_BTH, hand_BTH) < 0.02
    assert rnn.explain().kernel == "eager"
    assert str(dtype).removeprefix("torch.") in rnn.explain().reason


@pytest.mark.parametrize("kernel", ["cpp", "eager"])
def test_autocast_leaves_the_loop_in_full_precision(kernel: str) -> None:
    rnn, fresh = (layer("lstm", 33, dtype=torch.float32, kernel=kernel) for _ in range(2))
    batch = drawn(rnn, T=5, B=3)
    outside = found(rnn, batch)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same_bits(found(rnn, batch), outside)
        assert_same_bits(found(fresh, batch), outside)


def test_autocast_hands_on_half_precision() -> None:
    rnn, below = layer("lstm", 33, dtype=torch.float32), nn.Linear(F, F)
    x_BTF = torch.randn(3, 5, F)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        half_BTF = below(x_BTF)
        assert half_BTF.dtype == torch.bfloat16
        y_BTH, _ = rnn(half_BTF)
    full_BTH, _ = rnn(half_BTF.float())
    assert error_of(y_BTH, full_BTH) < 0.01


def test_a_plan_asked_for_under_autocast_is_the_same() -> None:
    rnn = layer("lstm", 33, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        explanation = rnn.explain()
    assert explanation.kernel == "cpp"


def test_a_plan_asked_for_in_inference_mode_is_the_same() -> None:
    rnn = layer("lstm", 33, dtype=torch.float32)
    with torch.inference_mode():
        explanation = rnn.explain()
    assert explanation.kernel == "cpp"


class Changeable(OneState):
    """Settings of many kinds."""

    def __init__(self, input_size: int = F) -> None:
        super().__init__(input_size)
        self.function = torch.tanh
        self.module: nn.Module = nn.Tanh()
        self.table = {"halved": False}
        self.factor = 1.0
        self.factors: list[Any] = [1.0, [1.0]]
        self.dropped: int | None = None

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH = self.module(self.function(self.inward(x_t) + self.around(state)))
        h_BH = h_BH * (0.5 if self.table["halved"] else 1.0) * self.factor * self.factors[0] * self.factors[1][0]
        return (h_BH if self.dropped is None else h_BH[:, : -self.dropped]), h_BH


class Subtracting(Changeable):
    """Something else."""

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h_BH = torch.tanh(self.inward(x_t) - self.around(state))
        return h_BH, h_BH


def _set_class(cell: Any) -> None:
    cell.__class__ = Subtracting


CHANGES: dict[str, Callable[[Any], Any]] = {
    "number": lambda cell: setattr(cell, "factor", 0.7),
    "none": lambda cell: setattr(cell, "dropped", 2),
    "list": lambda cell: cell.factors.__setitem__(0, 0.7),
    "nested-list": lambda cell: cell.factors[1].__setitem__(0, 0.7),
    "dictionary": lambda cell: cell.table.update(halved=True),
    "function": lambda cell: setattr(cell, "function", torch.sigmoid),
    "module": lambda cell: setattr(cell, "module", nn.Sigmoid()),
    "class": _set_class,
    "forward": lambda cell: setattr(cell, "forward", types.MethodType(Subtracting.forward, cell)),
    "no-bias": lambda cell: setattr(cell, "around", nn.Linear(H, H, bias=False).double()),
    "parametrisation": lambda cell: parametrizations.weight_norm(cell.around),
    "hook": lambda cell: cell.around.register_forward_hook(lambda module, given, made: 2 * made),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_the_cell_counts_at_the_next_call(change: str) -> None:
    torch.manual_seed(0)
    rnn = stretto.RNN(Changeable().double(), kernel="eager")
    batch = Batch(x_BTF=torch.randn(3, 4, F, dtype=torch.float64), lengths=[4, 0, 3])
    before = found(rnn, batch)
    CHANGES[change](rnn.cells[0])
    with torch.no_grad():
        after = rnn(batch.x_BTF, lengths=batch.lengths)
        hand_BTH, ends = by_hand(list(rnn.cells), batch.x_BTF, lengths=batch.lengths, state=None, num_directions=1)
    assert error_of(after[0], hand_BTH) < 1e-10
    assert error_of(tensors_in(after[1])[0], ends[0]) < 1e-10
    # Weight norm alone changes how a weight is stored, not what it is.
    assert change == "parametrisation" or not torch.equal(tensors_in(after[1])[0], before.values["final 0"])


def test_another_cell_in_the_place_of_the_first_counts() -> None:
    torch.manual_seed(0)
    rnn = stretto.RNN(Changeable().double(), kernel="eager")
    x_BTF = torch.randn(3, 4, F, dtype=torch.float64)
    for _ in range(20):  # Python soon gives the memory of a cell that is gone to a new one.
        for kind in (Changeable, Subtracting):
            rnn(x_BTF)
            del rnn.cells[0]
            rnn.cells.append(kind().double())
            hand_BTH, _ = by_hand(list(rnn.cells), x_BTF, lengths=None, state=None, num_directions=1)
            assert error_of(rnn(x_BTF)[0], hand_BTH) < 1e-10


def test_training_and_evaluation_take_turns() -> None:
    rnn = layer("zoneout", 7, kernel="cpp")
    batch = drawn(rnn, T=5, B=3)
    still = found(rnn, batch)
    rnn.train()
    assert error_of(found(rnn, batch, seed=1).values["y"], still.values["y"]) > 0.01
    rnn.eval()
    assert_same_bits(found(rnn, batch), still)


@pytest.mark.parametrize("kernel", ["cpp", "eager"])
def test_functional_call(kernel: str) -> None:
    rnn = layer("lstm", 7, kernel=kernel)
    x_BTF = torch.randn(3, 5, F, dtype=torch.float64)
    given = {name: (2 * value).detach().requires_grad_() for name, value in rnn.named_parameters()}
    y_BTH, _ = torch.func.functional_call(rnn, given, (x_BTF,))
    gradients = torch.autograd.grad(y_BTH.square().sum(), list(given.values()))
    twin = copy.deepcopy(rnn)
    twin.load_state_dict(given)
    twin(x_BTF)[0].square().sum().backward()
    for gradient, parameter in zip(gradients, twin.parameters(), strict=True):
        assert error_of(gradient, parameter.grad) < 1e-10
