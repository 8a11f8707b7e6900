"""Cells that torch does not have, against their equations written out unit by unit in plain Python.

Shape legend: B sequences, T steps, F features, H hidden units, M remembered states.
"""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto import cells
from stretto.cells import Cell, Clockwork
from stretto.errors import StrettoError

B, F, H, STEPS = 2, 3, 5, 4
Vector = list[float]
Reference = Callable[["Weights", Vector, list[Any]], list[Any]]


def _sigmoid(value: float) -> float:
    return 1.0 / (1.0 + math.exp(-value))


def _normed(values: Vector, gain: Vector, shift: Vector | None) -> Vector:
    mean = math.fsum(values) / len(values)
    variance = math.fsum((value - mean) ** 2 for value in values) / len(values)
    scaled = [(value - mean) / math.sqrt(variance + 1e-5) for value in values]
    return [value * gain[unit] + (shift[unit] if shift else 0.0) for unit, value in enumerate(scaled)]


class Weights:
    """The parameters of a cell as lists, and the sums that gates are made of."""

    def __init__(self, cell: Cell) -> None:
        self.of: dict[str, Any] = {name: value.tolist() for name, value in cell.state_dict().items()}

    def product(self, name: str, row: int, vector: Vector) -> float:
        return math.fsum(weight * value for weight, value in zip(self.of[name][row], vector, strict=True))

    def inward(self, gate: int, unit: int, x: Vector) -> float:
        row = gate * H + unit
        return self.product("weight_ih", row, x) + self.of.get("bias_ih", [0.0] * 9 * H)[row]

    def around(self, gate: int, unit: int, h: Vector) -> float:
        row = gate * H + unit
        return self.product("weight_hh", row, h) + self.of.get("bias_hh", [0.0] * 9 * H)[row]

    def both(self, gate: int, unit: int, x: Vector, h: Vector) -> float:
        return self.inward(gate, unit, x) + self.around(gate, unit, h)

    def norm(self, name: str, values: Vector) -> Vector:
        return _normed(values, self.of[f"{name}.weight"], self.of.get(f"{name}.bias"))


def _gru_before(w: Weights, x: Vector, state: list[Any]) -> list[Any]:
    (h,) = state
    reset = [_sigmoid(w.both(0, u, x, h)) * h[u] for u in range(H)]
    after = []
    for u in range(H):
        z, n = _sigmoid(w.both(1, u, x, h)), math.tanh(w.both(2, u, x, reset))
        after.append(n + z * (h[u] - n))
    return [after]


def _implicit_gru(w: Weights, x: Vector, state: list[Any]) -> list[Any]:
    (h,) = state
    after = []
    for u in range(H):
        r, z = _sigmoid(w.both(0, u, x, h)), _sigmoid(w.both(1, u, x, h))
        n = math.tanh(w.inward(2, u, x) + r * w.around(2, u, h))
        # Implicit in the trailing h alone: h' = h + (1 - z) (n - h').
        after.append((h[u] + (1 - z) * n) / (2 - z))
    return [after]


def _lstm_like(w: Weights, x: Vector, h: Vector, c: Vector, *, peep: tuple[Vector, Vector, Vector]) -> list[Any]:
    new_h, new_c = [], []
    for u in range(H):
        i = _sigmoid(w.both(0, u, x, h) + peep[0][u] * c[u])
        f = _sigmoid(w.both(1, u, x, h) + peep[1][u] * c[u])
        new_c.append(f * c[u] + i * math.tanh(w.both(2, u, x, h)))
        o = _sigmoid(w.both(3, u, x, h) + peep[2][u] * new_c[u])
        new_h.append(o * math.tanh(new_c[u]))
    return [new_h, new_c]


def _peephole(w: Weights, x: Vector, state: list[Any]) -> list[Any]:
    h, c = state
    return _lstm_like(w, x, h, c, peep=(w.of["peephole_i"], w.of["peephole_f"], w.of["peephole_o"]))


def _multiplicative(w: Weights, x: Vector, state: list[Any]) -> list[Any]:
    h, c = state
    m = [w.product("weight_mx", u, x) * w.product("weight_mh", u, h) for u in range(H)]
    return _lstm_like(w, x, m, c, peep=([0.0] * H,) * 3)


def _coupled(w: Weights, x: Vector, state: list[Any]) -> list[Any]:
    h, c = state
    new_h, new_c = [], []
    for u in range(H):
        f, g, o = _sigmoid(w.both(0, u, x, h)), math.tanh(w.both(1, u, x, h)), _sigmoid(w.both(2, u, x, h))
        new_c.append(g + f * (c[u] - g))
        new_h.append(o * math.tanh(new_c[u]))
    return [new_h, new_c]


def _layer_norm_lstm(w: Weights, x: Vector, state: list[Any]) -> list[Any]:
    h, c = state
    inward = w.norm("norm_ih", [w.product("weight_ih", row, x) for row in range(4 * H)])
    around = w.norm("norm_hh", [w.product("weight_hh", row, h) for row in range(4 * H)])
    gate = [[inward[k * H + u] + around[k * H + u] for u in range(H)] for k in range(4)]
    new_c = [_sigmoid(gate[1][u]) * c[u] + _sigmoid(gate[0][u]) * math.tanh(gate[2][u]) for u in range(H)]
    read = w.norm("norm_c", new_c)
    return [[_sigmoid(gate[3][u]) * math.tanh(read[u]) for u in range(H)], new_c]


def _layer_norm_gru(w: Weights, x: Vector, state: list[Any]) -> list[Any]:
    (h,) = state
    x_gates = w.norm("norm_ih_rz", [w.product("weight_ih", row, x) for row in range(2 * H)])
    h_gates = w.norm("norm_hh_rz", [w.product("weight_hh", row, h) for row in range(2 * H)])
    x_new = w.norm("norm_ih_n", [w.product("weight_ih", 2 * H + u, x) for u in range(H)])
    h_new = w.norm("norm_hh_n", [w.product("weight_hh", 2 * H + u, h) for u in range(H)])
    after = []
    for u in range(H):
        r, z = _sigmoid(x_gates[u] + h_gates[u]), _sigmoid(x_gates[H + u] + h_gates[H + u])
        n = math.tanh(x_new[u] + r * h_new[u])
        after.append(n + z * (h[u] - n))
    return [after]


def _ligru(w: Weights, x: Vector, state: list[Any]) -> list[Any]:
    (h,) = state
    inward = [w.inward(row // H, row % H, x) for row in range(2 * H)]
    if "norm_ih.weight" in w.of:
        inward = w.norm("norm_ih", inward)
    after = []
    for u in range(H):
        z = _sigmoid(inward[u] + w.around(0, u, h))
        after.append(z * h[u] + (1 - z) * max(0.0, inward[H + u] + w.around(1, u, h)))
    return [after]


def _minimal(w: Weights, x: Vector, state: list[Any]) -> list[Any]:
    (h,) = state
    f = [_sigmoid(w.both(0, u, x, h)) for u in range(H)]
    kept = [f[u] * h[u] for u in range(H)]
    return [[(1 - f[u]) * h[u] + f[u] * math.tanh(w.both(1, u, x, kept)) for u in range(H)]]


def _indrnn(squash: Callable[[float], float]) -> Reference:
    def step(w: Weights, x: Vector, state: list[Any]) -> list[Any]:
        (h,) = state
        return [[squash(w.inward(0, u, x) + w.of["weight_hh"][u] * h[u]) for u in range(H)]]

    return step


def _attention(w: Weights, x: Vector, state: list[Any]) -> list[Any]:
    h, memory = state
    query = [w.product("weight_query", u, h) for u in range(H)]
    scores = [math.exp(math.fsum(map(math.prod, zip(query, past, strict=True))) / math.sqrt(H)) for past in memory]
    read = [math.fsum(s * past[u] for s, past in zip(scores, memory, strict=True)) / sum(scores) for u in range(H)]
    after = []
    for u in range(H):
        inward = [w.inward(gate, u, x) + w.product("weight_read", gate * H + u, read) for gate in range(3)]
        r, z = _sigmoid(inward[0] + w.around(0, u, h)), _sigmoid(inward[1] + w.around(1, u, h))
        n = math.tanh(inward[2] + r * w.around(2, u, h))
        after.append(n + z * (h[u] - n))
    return [after, [*memory[1:], after]]


CASES: dict[str, tuple[Callable[[bool], Cell], Reference]] = {
    "gru-before": (lambda bias: cells.GRU(F, H, reset="before", bias=bias), _gru_before),
    "implicit-gru": (lambda bias: cells.ImplicitGRU(F, H, bias=bias), _implicit_gru),
    "peephole": (lambda bias: cells.PeepholeLSTM(F, H, bias=bias), _peephole),
    "multiplicative": (lambda bias: cells.MultiplicativeLSTM(F, H, bias=bias), _multiplicative),
    "coupled": (lambda bias: cells.CoupledLSTM(F, H, bias=bias), _coupled),
    "layer-norm-lstm": (lambda bias: cells.LayerNormLSTM(F, H, bias=bias), _layer_norm_lstm),
    "layer-norm-gru": (lambda bias: cells.LayerNormGRU(F, H, bias=bias), _layer_norm_gru),
    "ligru": (lambda bias: cells.LiGRU(F, H, bias=bias), _ligru),
    "ligru-plain": (lambda bias: cells.LiGRU(F, H, norm="none", bias=bias), _ligru),
    "minimal": (lambda bias: cells.MinimalGatedUnit(F, H, bias=bias), _minimal),
    "indrnn": (lambda bias: cells.IndRNN(F, H, bias=bias), _indrnn(lambda total: max(0.0, total))),
    "indrnn-tanh": (lambda bias: cells.IndRNN(F, H, nonlinearity="tanh", bias=bias), _indrnn(math.tanh)),
    "attention": (lambda bias: cells.AttentionCell(F, H, memory_size=3, bias=bias), _attention),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("seed", [0, 1])
@pytest.mark.parametrize("name", CASES)
def test_a_cell_follows_its_equations(name: str, seed: int, bias: bool) -> None:
    make, reference = CASES[name]
    torch.manual_seed(seed)
    cell = make(bias).double()
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.add_(0.5 * torch.randn_like(parameter))
    weights = Weights(cell)
    assert bias == any("bias" in key for key in weights.of)
    state = cell.initial_state(B)
    rows = [[part[row].tolist() for part in (state if isinstance(state, tuple) else (state,))] for row in range(B)]
    for x_BF in torch.randn(STEPS, B, F, dtype=torch.float64):
        y, state = cell(x_BF, state)
        rows = [reference(weights, x_BF[row].tolist(), rows[row]) for row in range(B)]
        expected = [torch.tensor(part, dtype=torch.float64) for part in zip(*rows, strict=True)]
        for one, two in zip(state if isinstance(state, tuple) else (state,), expected, strict=True):
            torch.testing.assert_close(one, two, rtol=1e-11, atol=1e-12)
        assert torch.equal(y, state[0] if isinstance(state, tuple) else state)


PERIODS = st.lists(st.integers(1, 6), min_size=1, max_size=4, unique=True).map(sorted)


def _by_hand(cell: Clockwork, x_TF: list[list[float]]) -> list[list[float]]:
    """Unit by unit, with the true step and without a mask: weights from fast to slow modules are never touched."""
    size, modules = cell.hidden_size, len(cell.periods)
    weight_ih, weight_hh = cell.weight_ih.tolist(), cell.weight_hh.tolist()
    bias = [a + b for a, b in zip(cell.bias_ih.tolist(), cell.bias_hh.tolist(), strict=True)]
    h, states = [0.0] * size, []
    for step, x_F in enumerate(x_TF):
        new = list(h)
        for unit in range(size):
            module = unit * modules // size
            if step % cell.periods[module]:
                continue
            total = bias[unit] + sum(w * v for w, v in zip(weight_ih[unit], x_F, strict=True))
            for other in range(module * size // modules, size):
                total += weight_hh[unit][other] * h[other]
            new[unit] = math.tanh(total)
        h = new
        states.append(h)
    return states


@settings(deadline=None, max_examples=8)
@given(periods=PERIODS, each=st.integers(1, 3), seed=st.integers(0, 99))
def test_the_clockwork_network_follows_its_equations_over_a_cycle(periods: list[int], each: int, seed: int) -> None:
    torch.manual_seed(seed)
    cell = Clockwork(3, each * len(periods), periods=periods).double()
    x_TBF = torch.randn(2 * math.lcm(*periods) % 20 + 7, 2, 3, dtype=torch.float64)
    expected = [_by_hand(cell, x_TBF[:, row].tolist()) for row in range(2)]
    state = cell.initial_state(2)
    for step, x_BF in enumerate(x_TBF):
        y_BH, state = cell(x_BF, state)
        wanted_BH = torch.tensor([expected[row][step] for row in range(2)], dtype=torch.float64)
        torch.testing.assert_close(y_BH, wanted_BH, rtol=1e-12, atol=1e-12)
        assert state[1].tolist() == [[(step + 1) % math.lcm(*periods)]] * 2


def test_rows_may_be_at_different_steps() -> None:
    torch.manual_seed(0)
    cell = Clockwork(2, 4, periods=(2, 3))
    x_BF, h_BH = torch.randn(2, 2), torch.randn(2, 4)
    y_BH, (_, count_B1) = cell(x_BF, (h_BH, torch.tensor([[3.0], [5.0]])))
    assert torch.equal(y_BH[0, :2], h_BH[0, :2])
    assert (y_BH[0, 2:] != h_BH[0, 2:]).all()
    assert torch.equal(y_BH[1], h_BH[1])
    assert count_B1.tolist() == [[4.0], [0.0]]


def test_a_cycle_that_the_dtype_cannot_count_is_refused() -> None:
    cell = Clockwork(2, 2, periods=(16, 17)).to(torch.bfloat16)
    with pytest.raises(StrettoError, match=r"repeats every 272 steps, more than torch.bfloat16 can count"):
        cell.initial_state(1)
    assert Clockwork(2, 2, periods=(128, 256)).to(torch.bfloat16).initial_state(1)[1].dtype == torch.bfloat16
    with pytest.raises(StrettoError, match="smaller common multiple"):
        Clockwork(2, 2, periods=(4096, 4099)).initial_state(1)
    # The last step before the count wraps is still distinct from its neighbours.
    wide = Clockwork(2, 2, periods=(2**23, 2**24))
    wide.initial_state(1)
    _, (_, count_B1) = wide(torch.zeros(1, 2), (torch.zeros(1, 2), torch.full((1, 1), 2.0**24 - 1)))
    assert count_B1.tolist() == [[0.0]]


@pytest.mark.parametrize("periods", [(), (2, 2), (4, 2), (0, 1), (1.5,), 4, None])
def test_periods_must_be_rising_whole_numbers(periods: object) -> None:
    with pytest.raises(StrettoError, match="period"):
        Clockwork(2, 4, periods=periods)


def test_units_that_cannot_be_shared_are_refused() -> None:
    with pytest.raises(StrettoError, match="cannot share 7 hidden units evenly among 4 periods"):
        Clockwork(2, 7)
