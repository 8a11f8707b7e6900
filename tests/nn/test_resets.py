"""States that are reset within a sequence.

Each is compared with a loop that puts the initial state in the place of the state before such steps.

Shape legend: B sequences, T steps, F features, H hidden units, L layers times directions.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import stretto
from stretto import StrettoError

pytestmark = pytest.mark.usefixtures("quick_compiler")

B, T, F, H = 5, 9, 3, 4
LENGTHS = torch.tensor([9, 1, 0, 7, 4])


class Learned(stretto.Cell):
    """Starts from parameters."""

    def __init__(self, input_size: int = F, hidden_size: int = H) -> None:
        super().__init__()
        self.input_size = input_size
        self.inward, self.around = nn.Linear(input_size, hidden_size), nn.Linear(hidden_size, hidden_size)
        self.start = nn.Parameter(torch.randn(2, hidden_size))

    def initial_state(self, batch_size: int) -> Any:
        return tuple(self.start[:, None].expand(2, batch_size, -1))

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h, c = state
        c = 0.7 * c + torch.tanh(self.inward(x_t) + self.around(h))
        return torch.sin(c), (torch.tanh(c), c)


def _resets(share: float) -> torch.Tensor:
    return torch.rand(B, T) < share


def _run_steps(cell: Any, x_BTF: torch.Tensor, starts: Any, *, resets: torch.Tensor, reverse: bool) -> Any:
    """One layer and direction, sequence by sequence."""
    outputs, finals = torch.zeros(B, T, H, dtype=x_BTF.dtype), []
    rows = []
    for row, length in enumerate(LENGTHS.tolist()):
        state, steps = tuple(part[row : row + 1] for part in starts), list(range(length))
        made = [torch.zeros(1, H, dtype=x_BTF.dtype)] * T
        for step in reversed(steps) if reverse else steps:
            border = step + 1 < length and bool(resets[row, step + 1]) if reverse else bool(resets[row, step])
            state = cell.initial_state(1) if border else state
            made[step], state = cell(x_BTF[row : row + 1, step], state)
        rows.append(torch.stack(made, 1))
        finals.append(state)
    outputs = torch.cat(rows)
    return outputs, tuple(torch.cat(parts) for parts in zip(*finals, strict=True))


def _run_layers(rnn: stretto.RNN, x_BTF: torch.Tensor, states: Any, resets: torch.Tensor) -> Any:
    per_layer, finals = 2 if rnn.bidirectional else 1, []
    for first in range(0, len(rnn.cells), per_layer):
        results = [
            _run_steps(rnn.cells[first + back], x_BTF, states[first + back], resets=resets, reverse=bool(back))
            for back in range(per_layer)
        ]
        x_BTF = torch.cat([y for y, _ in results], dim=-1)
        finals += [after for _, after in results]
    return x_BTF, finals


FORMS = {
    "one layer": {},
    "two layers": {"num_layers": 2},
    "two directions": {"bidirectional": True},
    "stored states": {"save": "states"},
    "the cell itself": {"backend": "torch"},
    "operators": {"backend": "eager", "num_layers": 2, "bidirectional": True},
    "time first": {"batch_first": False},
    "chunks of time": {"solver": stretto.Shooting(num_chunks=2)},
}


@pytest.mark.parametrize("share", [0.0, 0.3, 1.0])
@pytest.mark.parametrize("name", FORMS)
def test_a_layer_resets_its_states_as_the_loop_does(name: str, share: float) -> None:
    torch.manual_seed(3)
    rnn = stretto.RNN(Learned(), **FORMS[name]).double()  # type: ignore[arg-type]
    x = torch.randn(B, T, F, dtype=torch.float64, requires_grad=True)
    count = len(rnn.cells)
    given = [tuple(torch.randn(2, B, H, dtype=torch.float64, requires_grad=True).unbind()) for _ in range(count)]
    resets = _resets(share)
    state = given[0] if count == 1 else tuple(given)
    first = (lambda t: t) if rnn.batch_first else (lambda t: t.transpose(0, 1))
    for states in (state, None):
        y, after = rnn(first(x), states, lengths=LENGTHS, resets=first(resets))
        starts = given if states is not None else [cell.initial_state(B) for cell in rnn.cells]
        wanted, finals = _run_layers(rnn, x, starts, resets)
        torch.testing.assert_close(first(y), wanted, rtol=1e-10, atol=1e-10)
        ends = [after] if count == 1 else list(after)
        for ours, theirs in zip(ends, finals, strict=True):
            torch.testing.assert_close(tuple(ours), theirs, rtol=1e-10, atol=1e-10)
        leaves = [x, *rnn.parameters(), *(part for parts in given for part in parts if states is not None)]
        losses = [
            torch.sin(out).sum() + sum((2 * part).cos().sum() for end in parts for part in end)
            for out, parts in ((first(y), ends), (wanted, finals))
        ]
        ours_d, theirs_d = (torch.autograd.grad(loss, leaves, allow_unused=True) for loss in losses)
        for one, other in zip(ours_d, theirs_d, strict=True):
            zero = torch.zeros(())
            a, b = (zero if t is None else t for t in (one, other))
            torch.testing.assert_close(*torch.broadcast_tensors(a, b), rtol=1e-9, atol=1e-9, check_dtype=False)


def _loop(layer: Any, x_TBF: torch.Tensor, hx: Any, resets_TB: torch.Tensor) -> Any:
    """A layer of torch's, one step at a time, as in reinforcement learning."""
    outputs = []
    for step in range(len(x_TBF)):
        keep = (~resets_TB[step]).to(x_TBF.dtype)[None, :, None]
        hx = tuple(keep * part for part in hx) if isinstance(hx, tuple) else keep * hx
        y, hx = layer(x_TBF[step : step + 1], hx)
        outputs.append(y)
    return torch.cat(outputs), hx


@pytest.mark.parametrize("backend", [pytest.param("auto", marks=pytest.mark.slow), "cpp", "eager", "torch"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU])
def test_an_accelerated_layer_resets_its_states(kind: Any, backend: Any) -> None:
    torch.manual_seed(4)
    plain = kind(F, H, num_layers=2)
    state = torch.randn(2, B, H)
    hx = (state, torch.randn(2, B, H)) if kind is nn.LSTM else state
    x_TBF, resets_TB = torch.randn(T, B, F), _resets(0.3).T
    wanted, ends = _loop(plain, x_TBF, hx, resets_TB)
    wanted_d = torch.autograd.grad(wanted.square().sum(), list(plain.parameters()))
    layer = stretto.accelerate(plain, backend=backend)
    y, after = layer(x_TBF, hx, resets=resets_TB)
    torch.testing.assert_close((y, after), (wanted, ends), rtol=1e-5, atol=1e-5)
    found_d = torch.autograd.grad(y.square().sum(), list(plain.parameters()))
    torch.testing.assert_close(found_d, wanted_d, rtol=1e-4, atol=1e-5)
    packed = pack_padded_sequence(x_TBF, [9, 6, 6, 2, 1], enforce_sorted=False)
    marks = pack_padded_sequence(resets_TB[..., None], [9, 6, 6, 2, 1], enforce_sorted=False)
    alike = PackedSequence(marks.data[:, 0], marks.batch_sizes, marks.sorted_indices, marks.unsorted_indices)
    for given in (resets_TB, alike):
        y, after = layer(packed, hx, resets=given)
        lengths = torch.tensor([9, 6, 6, 2, 1])
        padded, others = layer(x_TBF, hx, lengths=lengths, resets=resets_TB)
        torch.testing.assert_close((pad_packed_sequence(y)[0], after), (padded, others), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(padded[:, 0], wanted[:, 0], rtol=1e-5, atol=1e-5)
    single, _ = layer(x_TBF[:, 0], resets=resets_TB[:, 0])
    torch.testing.assert_close(single, layer(x_TBF[:, :1], resets=resets_TB[:, :1])[0][:, 0])
    empty = layer(x_TBF, hx, lengths=[9, 0, 6, 0, 2], resets=resets_TB)[1]
    kept = empty[0] if kind is nn.LSTM else empty
    torch.testing.assert_close(kept[:, 1], state[:, 1])


def test_a_backward_direction_resets_at_the_same_boundaries() -> None:
    layer = stretto.accelerate(nn.GRU(F, H, bidirectional=True, batch_first=True))
    x = torch.randn(1, T, F)
    resets = torch.zeros(1, T, dtype=torch.bool)
    resets[0, 4] = True
    y, after = layer(x, resets=resets)
    (first, end), (second, start) = layer(x[:, :4]), layer(x[:, 4:])
    torch.testing.assert_close(y, torch.cat([first, second], dim=1), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(after, torch.stack([start[0], end[1]]), rtol=1e-5, atol=1e-6)


@pytest.mark.slow
def test_those_who_look_at_the_call_see_the_same() -> None:
    rnn = stretto.RNN(Learned(), bidirectional=True).double()
    x, resets = torch.randn(B, T, F, dtype=torch.float64), _resets(0.3)
    wanted = rnn(x, lengths=LENGTHS, resets=resets)[0]
    program = torch.export.export(rnn, (x, None, LENGTHS), {"resets": resets}, strict=False)
    torch.testing.assert_close(program.module()(x, None, LENGTHS, resets=resets)[0], wanted)
    torch.testing.assert_close(torch.compile(rnn, backend="eager")(x, None, LENGTHS, resets=resets)[0], wanted)
    layer = stretto.accelerate(nn.GRU(F, H, batch_first=True).double())
    compiled = torch.compile(layer, backend="eager")
    torch.testing.assert_close(compiled(x, resets=resets)[0], layer(x, resets=resets)[0])


@pytest.mark.parametrize("resets", [torch.zeros(B, T), torch.zeros(B, T + 1, dtype=torch.bool), [True] * T])
def test_what_are_no_resets_is_refused(resets: Any) -> None:
    for layer in (stretto.RNN(Learned()), stretto.accelerate(nn.GRU(F, H, batch_first=True))):
        with pytest.raises(StrettoError, match="resets are"):
            layer(torch.randn(B, T, F), resets=resets)
