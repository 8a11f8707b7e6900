"""Cells as people write them: several inputs and outputs, states of any structure, constants.

Each is compared with a loop that calls the module itself at every step.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

import copy
import io
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_flatten, tree_map

import stretto
from stretto import StrettoError

pytestmark = pytest.mark.usefixtures("quick_compiler")

F, H, B, T = 3, 5, 4, 6
LENGTHS = (6, 2, 0, 5)


class Memory(NamedTuple):
    h: torch.Tensor
    c: torch.Tensor


class Base(nn.Module):
    """Weights for all cells here."""

    def __init__(self, width: int = F) -> None:
        super().__init__()
        self.inward, self.around = nn.Linear(width, H), nn.Linear(H, H)

    def mix(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.inward(x) + self.around(h))


class Alone(Base):
    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return self.mix(x, h)


class Pair(Base):
    def forward(self, x: torch.Tensor, state: Any) -> Any:
        h, c = state
        c = 0.5 * c + self.mix(x, h)
        return torch.tanh(c), c


class Parts(Base):
    def forward(self, x: torch.Tensor, h: torch.Tensor | None = None, c: torch.Tensor | None = None) -> Any:
        c = 0.5 * c + self.mix(x, h)  # type: ignore[operator]
        return torch.tanh(c) * 2, h + c, c


class Required(Base):
    def forward(self, x: torch.Tensor, h: torch.Tensor, c: torch.Tensor) -> Any:
        c = 0.5 * c + self.mix(x, h)
        return torch.tanh(c) * 2, (h - c, c)


class Dict(Base):
    def forward(self, x: torch.Tensor, state: Any) -> Any:
        c = 0.5 * state["old"] + self.mix(x, state["fast"])
        return torch.sin(c), {"old": c, "fast": torch.tanh(c)}


class Named(Base):
    def forward(self, x: torch.Tensor, state: Memory) -> Any:
        c = 0.5 * state.c + self.mix(x, state.h)
        return {"spike": c > 0, "h": torch.tanh(c), "deep": (c.sum(1), c[:, :2])}, Memory(torch.tanh(c), c)


class Nested(Base):
    def forward(self, x: torch.Tensor, state: Any) -> Any:
        h, [m, inner] = state
        n = self.mix(x, h + m.sum(2)) + inner["k"]
        return (n, n[:, :1]), (n, [0.5 * m + n[..., None] * 0.1, {"k": torch.sin(n)}])


class Several(Base):
    def forward(self, inputs: Any, h: torch.Tensor) -> Any:
        x, mask, elapsed = inputs["x"], inputs["mask"], inputs["at"][0]
        new = self.mix(torch.where(mask, x, torch.zeros_like(x)), h * torch.exp(-elapsed)[:, None])
        return new, new


class Tokens(Base):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(7, F)

    def forward(self, inputs: Any, h: torch.Tensor) -> Any:
        token, x, count = inputs
        return self.mix(self.table(token) + x * count[:, None], h)


class Static(Base):
    def forward(self, x: torch.Tensor, h: torch.Tensor, constants: Any) -> Any:
        gate, memory_BSH = constants["gate"], constants["memory"]
        weights_BS = torch.softmax((memory_BSH * h[:, None]).sum(2), dim=1)
        new = self.mix(x, h + (weights_BS[..., None] * memory_BSH).sum(1)) * torch.sigmoid(gate)
        return (new, weights_BS), new


def _plain(**more: Any) -> Any:
    return torch.randn(B, T, F, **more)


def _inputs() -> Any:
    return {"x": _plain(), "mask": torch.rand(B, T, F) > 0.5, "at": [torch.rand(B, T)]}


def _tokens() -> Any:
    return torch.randint(7, (B, T)), _plain(), torch.randint(3, (B, T), dtype=torch.int32)


def _static() -> Any:
    return {"gate": torch.randn(B, H), "memory": torch.randn(B, 3, H)}


def _same(y: Any, state: Any) -> Callable[[Any], Any]:
    return lambda result: (y(result), state(result))


FIRST, SECOND = _same(lambda r: r, lambda r: r), _same(lambda r: r[0], lambda r: r[1])
CASES: dict[str, tuple[Callable[[], nn.Module], Any, Callable[[], Any], Callable[[Any], Any], Any]] = {
    # cell, sizes of its state, inputs, how its result is to be read, constants
    "the state alone": (Alone, H, _plain, FIRST, None),
    "the state alone, a pair": (Pair, (H, H), _plain, _same(lambda r: r[0], lambda r: r), None),
    "parts as optional arguments": (Parts, (H, H), _plain, _same(lambda r: r[0], lambda r: r[1:]), None),
    "parts as arguments": (Required, [H, H], _plain, SECOND, None),
    "a dict": (Dict, {"old": H, "fast": H}, _plain, SECOND, None),
    "a named tuple, outputs in a dict": (Named, Memory(H, H), _plain, SECOND, None),
    "nested": (Nested, (H, [torch.Size([H, 2]), {"k": H}]), _plain, SECOND, None),
    "several inputs": (Several, H, _inputs, SECOND, None),
    "tokens beside features": (Tokens, H, _tokens, FIRST, None),
    "constants": (Static, H, _plain, SECOND, _static),
}


def _double(tree: Any, dtype: torch.dtype) -> Any:
    return tree_map(lambda t: t.to(dtype).requires_grad_() if t.is_floating_point() else t, tree)


def _floats(tree: Any) -> list[torch.Tensor]:
    return [t for t in tree_flatten(tree)[0] if isinstance(t, torch.Tensor) and t.is_floating_point()]


def _reference(cell: nn.Module, x: Any, state: Any, *, constants: Any, read: Any, lengths: Any, parts: bool) -> Any:
    """Each sequence on its own, one step after the other."""
    outputs, finals = [], []
    for row, length in enumerate(lengths):
        now, rows = tree_map(lambda t, r=row: t[r : r + 1], state), []
        given = () if constants is None else (tree_map(lambda t, r=row: t[r : r + 1], constants),)
        for step in range(T):
            x_t = tree_map(lambda t, r=row, s=step: t[r : r + 1, s], x)
            y, after = read(cell(x_t, *now, *given) if parts else cell(x_t, now, *given))
            rows.append(y if step < length else tree_map(torch.zeros_like, y))
            now = after if step < length else now
        outputs.append(tree_map(lambda *t: torch.stack(t, 1), *rows))
        finals.append(now)
    join = lambda *t: torch.cat(t)  # noqa: E731
    # Lists and tuples, and dicts in any order, are alike to a cell.
    parts_of = [tree_flatten(final)[0] for final in finals]
    return tree_map(join, *outputs), [torch.cat(each) for each in zip(*parts_of, strict=True)]


def _sorted_parts(state: Any) -> list[torch.Tensor]:
    if isinstance(state, torch.Tensor):
        return [state]
    items = [state[key] for key in state] if isinstance(state, dict) else state
    return [part for item in items for part in _sorted_parts(item)]


def _loss(tree: Any) -> torch.Tensor:
    return sum(((index + 1) * torch.sin(t)).sum() for index, t in enumerate(_floats(tree)))  # type: ignore[return-value]


COMPILED = [
    pytest.param(name, "auto", marks=[] if "named" in name or "tokens" in name else pytest.mark.slow) for name in CASES
]


@pytest.mark.parametrize(
    ("name", "backend"), [*COMPILED, *((name, backend) for name in CASES for backend in ("eager", "torch"))]
)
def test_a_cell_as_it_is_written_equals_the_loop(name: str, backend: Any) -> None:
    torch.manual_seed(0)
    make, sizes, inputs, read, constants = CASES[name]
    for dtype, tolerance in ((torch.float64, 1e-10), (torch.float32, 1e-5)):
        cell = make().to(dtype)
        rnn = stretto.RNN(cell, state=sizes, backend=backend)
        x = _double(inputs(), dtype)
        fixed = None if constants is None else _double(constants(), dtype)
        state = _double(tree_map(torch.randn_like, rnn.initial_state(B)), dtype)
        y, after = rnn(x, state, lengths=LENGTHS, constants=fixed)
        wanted, finals = _reference(
            cell, x, state, constants=fixed, read=read, lengths=LENGTHS, parts=name.startswith("parts")
        )
        assert tree_flatten(y)[1] == tree_flatten(wanted)[1]
        assert tree_flatten(after)[1] == tree_flatten(rnn.initial_state(1))[1]
        for ours, theirs in zip(tree_flatten(y)[0], tree_flatten(wanted)[0], strict=True):
            assert ours.dtype == theirs.dtype
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        for ours, theirs in zip(_sorted_parts(after), finals, strict=True):
            torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
        leaves = [*_floats((x, state, fixed)), *cell.parameters()]
        ours_d = torch.autograd.grad(_loss((y, _sorted_parts(after))), leaves)
        theirs_d = torch.autograd.grad(_loss((wanted, finals)), leaves)
        for one, other in zip(ours_d, theirs_d, strict=True):
            torch.testing.assert_close(one, other, rtol=tolerance, atol=10 * tolerance)
        if backend == "auto":
            assert rnn.explain().backend == "cpp", rnn.explain().reason


STEPS: dict[str, Callable[[], stretto.RNN]] = {
    "gru": lambda: stretto.RNN(stretto.cells.GRU(F, H), num_layers=2, backend="torch"),
    "lstm": lambda: stretto.RNN(stretto.cells.LSTM(F, H), backend="torch"),
    "relu": lambda: stretto.RNN(stretto.cells.Elman(F, H, nonlinearity="relu", bias=False), backend="torch"),
    "another reset": lambda: stretto.RNN(stretto.cells.GRU(F, H, reset="before"), backend="torch"),
    "time first": lambda: stretto.RNN(stretto.cells.IndRNN(F, H), num_layers=2, batch_first=False, backend="torch"),
    **{
        name: lambda make=make, sizes=sizes: stretto.RNN(make(), state=sizes, backend="torch")  # type: ignore[misc]
        for name, (make, sizes, *_) in CASES.items()
    },
}


@pytest.mark.parametrize("name", STEPS)
def test_a_single_step_is_what_forward_returns(name: str) -> None:
    torch.manual_seed(1)
    rnn = STEPS[name]().double()
    inputs, constants = (CASES[name][2], CASES[name][4]) if name in CASES else (_plain, None)
    x = tree_map(lambda t: t[:, 0], _double(inputs(), torch.float64))
    fixed = None if constants is None else _double(constants(), torch.float64)
    for state in (None, _double(tree_map(torch.randn_like, rnn.initial_state(B)), torch.float64)):
        ours = rnn.step(x, state, constants=fixed)
        dim = 1 if rnn.batch_first else 0
        y, after = rnn(tree_map(lambda t, d=dim: t.unsqueeze(d), x), state, constants=fixed)
        wanted = tree_map(lambda t, d=dim: t.squeeze(d), y), after
        assert tree_flatten(ours)[1] == tree_flatten(wanted)[1]
        for one, other in zip(tree_flatten(ours)[0], tree_flatten(wanted)[0], strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
        leaves = [*_floats((x, fixed)), *rnn.parameters()]
        pair = (torch.autograd.grad(_loss(each), leaves, allow_unused=True) for each in (ours, wanted))
        for one, other in zip(*pair, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_single_steps_follow_what_was_changed_and_refuse_what_forward_refuses() -> None:
    rnn = stretto.RNN(stretto.cells.GRU(F, H), backend="torch")
    x_t = torch.randn(B, F)
    y, _ = rnn.step(x_t)
    assert rnn.step(x_t[0])[0].shape == (H,)
    with torch.no_grad():
        for parameter in rnn.parameters():
            parameter.mul_(2)
    assert not torch.allclose(rnn.step(x_t)[0], y)
    torch.testing.assert_close(rnn.step(x_t)[0], rnn(x_t[:, None])[0][:, 0])
    seen = []
    rnn.cells[0].register_forward_hook(lambda *given: seen.append(given))
    rnn.step(x_t)
    assert seen
    for given in (torch.randn(B, F + 1), x_t.double()):
        with pytest.raises(StrettoError):
            rnn.step(given)
    with pytest.raises(StrettoError, match="the state has the shapes"):
        rnn.step(x_t, torch.zeros(B + 1, H))
    with pytest.raises(StrettoError, match="no single step"):
        stretto.RNN(stretto.cells.GRU(F, H), bidirectional=True).step(x_t)


def test_layers_of_such_cells_can_be_copied_saved_and_compiled() -> None:
    rnn = stretto.RNN([Parts(), Named(H)], num_layers=2, state=Memory(H, H), backend="torch").double()
    x = torch.randn(B, T, F, dtype=torch.float64)
    wanted = rnn(x)
    buffer = io.BytesIO()
    torch.save(rnn, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(rnn), torch.load(buffer, weights_only=False), torch.compile(rnn, backend="eager")):
        torch.testing.assert_close(other(x), wanted)
    again = torch.utils.checkpoint.checkpoint(rnn, x, use_reentrant=False)
    torch.testing.assert_close(again, wanted)


def test_cells_above_others_get_one_input_and_both_directions_lie_side_by_side() -> None:
    rnn = stretto.RNN([Named(), Named()], bidirectional=True, state=Memory(H, H), backend="torch")
    y, _ = rnn(torch.randn(B, T, F), lengths=LENGTHS)
    assert y["h"].shape == y["spike"].shape == (B, T, 2 * H)
    assert y["deep"][0].shape == (B, T, 2)
    assert y["spike"].dtype == torch.bool
    with pytest.raises(StrettoError, match="returns several outputs"):
        stretto.RNN([Named(), Named()], num_layers=2, state=Memory(H, H), backend="torch")(torch.randn(B, T, F))


class Swapped(Base):
    def forward(self, x: torch.Tensor, h: torch.Tensor) -> Any:
        return self.mix(x, h), h


class Odd(Base):
    def initial_state(self, x: torch.Tensor) -> torch.Tensor:
        return torch.zeros(x.shape[0], H)

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return self.mix(x, h)


def test_what_a_cell_returns_can_be_said() -> None:
    cell = Swapped()
    x = torch.randn(B, T, F)
    y, after = stretto.RNN(cell, state=H, returns="state and output", backend="torch")(x)
    torch.testing.assert_close(y[:, 1], cell(x[:, 0], torch.zeros(B, H))[0])
    assert not torch.equal(y[:, -1], after)
    with pytest.raises(StrettoError, match="not the state"):
        stretto.RNN(cell, state=H, returns="state", backend="torch")(x)


@pytest.mark.parametrize(
    ("make", "problem"),
    [
        (lambda: stretto.RNN(Alone()), "the state that it starts from is not known"),
        (lambda: stretto.RNN([Alone(), nn.ReLU()], 2), "the state that it starts from is not known"),
        (lambda: stretto.RNN(Odd(), backend="torch")(torch.randn(B, T, F)), r"initial_state\(4\) failed"),
        (lambda: stretto.RNN(Static(), state=H)(torch.randn(B, T, F)), "with constants="),
        (lambda: stretto.RNN(Alone(), state="wide")(torch.randn(B, T, F)), "state"),
        (
            lambda: stretto.RNN(Tokens(), state=H)((torch.full((B, T), 1 << 24), _plain(), torch.ones(B, T).int())),
            "the input has the integer 16777216",
        ),
        (lambda: stretto.RNN(Several(), state=H)((_plain(), torch.randn(B, T + 1))), "of several inputs one is"),
        (
            lambda: stretto.RNN(Static(), state=H)(_plain(), constants={"gate": torch.randn(1, H)}),
            "a constant has the shape",
        ),
    ],
)
def test_what_does_not_fit_is_refused(make: Callable[[], Any], problem: str) -> None:
    with pytest.raises(StrettoError, match=problem):
        make()


class Attends(stretto.Cell):
    """Reads static features and a memory, which are the same at every step."""

    def __init__(self, input_size: int = F) -> None:
        super().__init__()
        self.inward, self.around = nn.Linear(input_size, H), nn.Linear(H, H)

    def initial_state(self, batch_size: int) -> torch.Tensor:
        return self.zeros(batch_size, H)

    def forward(self, x_t: torch.Tensor, h: Any, constants: Any) -> Any:  # type: ignore[override]
        gate, memory_BSH = constants["gate"], constants["memory"]
        weights_BS = torch.softmax((memory_BSH * h[:, None]).sum(2), dim=1)
        read_BH = (weights_BS[..., None] * memory_BSH).sum(1)
        new = torch.tanh(self.inward(x_t) + 0.3 * self.around(h + read_BH)) * torch.sigmoid(gate)
        return new, new


@pytest.mark.parametrize("has_resets", [False, True])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"save": "states"},
        {"solver": stretto.Shooting(num_chunks=2, tolerance=1e-12)},
        {"solver": stretto.Newton(tolerance=1e-12)},
        {"solver": stretto.Multigrid(tolerance=1e-12)},
        {"solver": "auto"},
    ],
)
def test_constants_go_to_every_layer_and_direction_whoever_solves(settings: Any, has_resets: bool) -> None:
    torch.manual_seed(2)
    cells = [Attends(), Attends(), Attends(2 * H), Attends(2 * H)]
    plain = stretto.RNN(cells, 2, bidirectional=True, backend="torch").double()
    rnn = stretto.RNN(cells, 2, bidirectional=True, backend="eager", **settings)
    x, constants = _double(_plain(), torch.float64), _double(_static(), torch.float64)
    resets = torch.rand(B, T) < 0.3 if has_resets else None
    leaves, found = [x, *_floats(constants), *plain.parameters()], []
    for layer in (rnn, plain):
        result = layer(x, lengths=LENGTHS, constants=constants, resets=resets)
        found.append((_floats(result), torch.autograd.grad(_loss(result), leaves)))
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(list(ours), list(theirs), rtol=1e-9, atol=1e-9)
