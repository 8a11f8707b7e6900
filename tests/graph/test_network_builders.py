"""The ready-made graphs give what torch's cells and the plain equations give: outputs and gradients.

Shape legend: B rows, T steps, F features, H hidden units.
"""

from collections.abc import Callable

import pytest
import torch
from torch import nn

from stretto.graph import Graph, GraphCell
from stretto.graph.network.builders import delayed, gru, lstm, peephole_lstm, two_loops

ROWS, STEPS, FEATURES, HIDDEN = 3, 7, 5, 4
TOLERANCE = {"rtol": 1e-10, "atol": 1e-10}

Parameters = dict[str, torch.Tensor]


def _run(cell: GraphCell, x_BTF: torch.Tensor) -> torch.Tensor:
    state = cell.initial_state(len(x_BTF))
    outputs = []
    for x_BF in x_BTF.unbind(1):
        y_BH, state = cell(x_BF, state)
        outputs.append(y_BH)
    return torch.stack(outputs, dim=1)


def _drawn(graph: Graph) -> GraphCell:
    cell = graph.cell().double()
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.normal_(std=0.5)
    return cell


def _input() -> torch.Tensor:
    return torch.randn(ROWS, STEPS, FEATURES, dtype=torch.float64, requires_grad=True)


def _compare(
    graph: Graph, equations: Callable[[Parameters, torch.Tensor], torch.Tensor], *, idle: frozenset[str] = frozenset()
) -> None:
    """Outputs, and gradients by the input and all parameters, which but for the idle ones must have some."""
    torch.manual_seed(3)
    cell, x_BTF = _drawn(graph), _input()
    parameters = dict(cell.named_parameters())
    leaves = [*parameters.values(), x_BTF]
    ours_BTH, theirs_BTH = _run(cell, x_BTF), equations(parameters, x_BTF)
    torch.testing.assert_close(ours_BTH, theirs_BTH, **TOLERANCE)
    weights_BTH = torch.randn_like(ours_BTH)
    ours = torch.autograd.grad((ours_BTH * weights_BTH).sum(), leaves)
    theirs = torch.autograd.grad((theirs_BTH * weights_BTH).sum(), leaves)
    for name, one, other in zip([*parameters, "x"], ours, theirs, strict=True):
        assert (float(other.abs().max()) > 0.0) == (name not in idle)
        torch.testing.assert_close(one, other, **TOLERANCE)


def _stacked(parameters: Parameters, pattern: str, gates: list[str]) -> torch.Tensor:
    return torch.cat([parameters[pattern.format(gate)] for gate in gates])


def test_lstm_is_torchs() -> None:
    gates = ["input_gate", "forget_gate", "candidate", "output_gate"]

    def torchs(parameters: Parameters, x_BTF: torch.Tensor) -> torch.Tensor:
        theirs = nn.LSTMCell(FEATURES, HIDDEN).double()
        values = {
            "weight_ih": _stacked(parameters, "weight_x_to_{}_d0", gates),
            "weight_hh": _stacked(parameters, "weight_h_to_{}_d1", gates),
            "bias_ih": _stacked(parameters, "bias_{}", gates),
            "bias_hh": torch.zeros(4 * HIDDEN, dtype=torch.float64),
        }
        state, outputs = None, []
        for x_BF in x_BTF.unbind(1):
            state = torch.func.functional_call(theirs, values, (x_BF, state))
            outputs.append(state[0])
        return torch.stack(outputs, dim=1)

    _compare(lstm(FEATURES, HIDDEN), torchs)


def test_gru_is_torchs() -> None:
    def torchs(parameters: Parameters, x_BTF: torch.Tensor) -> torch.Tensor:
        theirs = nn.GRUCell(FEATURES, HIDDEN).double()
        both = ["reset_gate", "update_gate"]
        values = {
            "weight_ih": _stacked(parameters, "weight_x_to_{}_d0", [*both, "candidate"]),
            "weight_hh": _stacked(parameters, "weight_h_to_{}_d1", [*both, "recalled"]),
            "bias_ih": _stacked(parameters, "bias_{}", [*both, "candidate"]),
            "bias_hh": torch.cat([torch.zeros(2 * HIDDEN, dtype=torch.float64), parameters["bias_recalled"]]),
        }
        h_BH, outputs = None, []
        for x_BF in x_BTF.unbind(1):
            h_BH = torch.func.functional_call(theirs, values, (x_BF, h_BH))
            outputs.append(h_BH)
        return torch.stack(outputs, dim=1)

    _compare(gru(FEATURES, HIDDEN), torchs)


def _peephole_equations(p: Parameters, x_BTF: torch.Tensor) -> torch.Tensor:
    h = c = x_BTF.new_zeros(len(x_BTF), HIDDEN)
    outputs = []

    def before(gate: str, x_BF: torch.Tensor) -> torch.Tensor:
        return x_BF @ p[f"weight_x_to_{gate}_d0"].T + h @ p[f"weight_h_to_{gate}_d1"].T + p[f"bias_{gate}"]

    for x_BF in x_BTF.unbind(1):
        i = torch.sigmoid(before("input_gate", x_BF) + p["weight_c_to_input_gate_d1"] * c)
        f = torch.sigmoid(before("forget_gate", x_BF) + p["weight_c_to_forget_gate_d1"] * c)
        new_c = f * c + i * torch.tanh(before("candidate", x_BF))
        o = torch.sigmoid(before("output_gate", x_BF) + p["weight_c_to_output_gate_d0"] * new_c)
        c, h = new_c, o * torch.tanh(new_c)
        outputs.append(h)
    return torch.stack(outputs, dim=1)


def test_peephole_lstm_is_its_equations() -> None:
    _compare(peephole_lstm(FEATURES, HIDDEN), _peephole_equations)


def test_peepholes_as_products_with_weights_of_a_constant_are_the_same() -> None:
    graph = lstm(FEATURES, HIDDEN)
    one = graph.constant("one")
    for gate, delay in (("input_gate", 1), ("forget_gate", 1), ("output_gate", 0)):
        peephole = graph.layer(f"{gate}_peephole", HIDDEN, aggregation="multiply")
        graph.connect("c", peephole, kind="identity", delay=delay)
        graph.connect(one, peephole)
        graph.connect(peephole, gate, kind="identity")

    def equations(p: Parameters, x_BTF: torch.Tensor) -> torch.Tensor:
        diagonal = {
            f"weight_c_to_{gate}_d{delay}": p[f"weight_one_to_{gate}_peephole_d0"][:, 0]
            for gate, delay in (("input_gate", 1), ("forget_gate", 1), ("output_gate", 0))
        }
        return _peephole_equations({**p, **diagonal}, x_BTF)

    _compare(graph, equations)


@pytest.mark.parametrize("delays", [(1,), (1, 3), (2, 5), (4,), (3, 30)])
def test_delayed_is_its_equation(delays: tuple[int, ...]) -> None:
    def equation(p: Parameters, x_BTF: torch.Tensor) -> torch.Tensor:
        h: list[torch.Tensor] = []
        for step, x_BF in enumerate(x_BTF.unbind(1)):
            total = x_BF @ p["weight_x_to_h_d0"].T + p["bias_h"]
            for delay in delays:
                earlier = h[step - delay] if step >= delay else x_BF.new_zeros(ROWS, HIDDEN)
                total = total + earlier @ p[f"weight_h_to_h_d{delay}"].T
            h.append(torch.tanh(total))
        return torch.stack(h, dim=1)

    idle = frozenset(f"weight_h_to_h_d{delay}" for delay in delays if delay >= STEPS)
    _compare(delayed(FEATURES, HIDDEN, delays=delays), equation, idle=idle)


def test_two_loops_is_its_equations() -> None:
    def equations(p: Parameters, x_BTF: torch.Tensor) -> torch.Tensor:
        zero = x_BTF.new_zeros(ROWS, HIDDEN)
        lower, upper = [zero, zero], [zero]
        for x_BF in x_BTF.unbind(1):
            now = torch.tanh(
                x_BF @ p["weight_x_to_lower_d0"].T + lower[-1] @ p["weight_lower_to_lower_d1"].T + p["bias_lower"]
            )
            upper.append(
                torch.tanh(
                    x_BF @ p["weight_x_to_upper_d0"].T
                    + now @ p["weight_lower_to_upper_d0"].T
                    + lower[-2] @ p["weight_lower_to_upper_d2"].T
                    + upper[-1] @ p["weight_upper_to_upper_d1"].T
                    + p["bias_upper"]
                )
            )
            lower.append(now)
        return torch.stack(upper[1:], dim=1)

    _compare(two_loops(FEATURES, HIDDEN), equations)


@pytest.mark.parametrize(
    ("build", "state"),
    [
        (lstm, {"c_1", "h_1"}),
        (peephole_lstm, {"c_1", "h_1"}),
        (gru, {"h_1"}),
        (delayed, {"h_1", "h_2", "h_3"}),
        (two_loops, {"lower_1", "lower_2", "upper_1"}),
    ],
)
def test_states_hold_what_is_read_later_and_no_more(build: Callable[[int, int], Graph], state: set[str]) -> None:
    names = build(FEATURES, HIDDEN).cell().state_names
    assert len(names) == len(state)
    assert set(names) == state


def test_a_new_lstm_remembers_by_default() -> None:
    cell = lstm(FEATURES, HIDDEN).cell()
    assert torch.equal(cell.bias_forget_gate, torch.ones(HIDDEN))
    assert torch.equal(cell.bias_input_gate, torch.zeros(HIDDEN))
