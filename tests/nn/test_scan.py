"""`stretto.scan` against the loop it stands for, called for one sequence at a time.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

import dataclasses
import functools
import gc
import threading
import warnings
import weakref
from collections.abc import Callable, Iterator
from fractions import Fraction
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.utils import checkpoint

import stretto
from stretto.errors import StrettoError
from stretto.state import describe, flatten, map_state

pytestmark = pytest.mark.usefixtures("quick_compiler")

F, H = 3, 4
Step = Callable[..., tuple[Any, Any]]


def by_hand(
    step: Step,
    init: Any,
    xs: Any,
    *,
    num_steps: int,
    lengths: Any = None,
    resets: torch.Tensor | None = None,
    reverse: bool = False,
    constants: Any = None,
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Final states and outputs, zero behind each end, by the definition: every sequence by itself."""
    finals, rows = [], []
    num_rows = next(part.shape[0] for part in (*flatten(init), *flatten(xs)))
    for row in range(num_rows):
        here = slice(row, row + 1)
        start = map_state(lambda part: part[here], init)  # noqa: B023
        extra = () if constants is None else (map_state(lambda part: part[here], constants),)  # noqa: B023
        length = num_steps if lengths is None else int(lengths[row])
        state, outputs = start, {}
        for t in reversed(range(length)) if reverse else range(length):
            if resets is not None and resets[row, t]:
                state = start
            state, y = step(state, map_state(lambda part: part[here, t], xs), *extra)  # noqa: B023
            outputs[t] = flatten(y)
        like = next(iter(outputs.values()), None)
        finals.append(flatten(state))
        rows.append((like, [outputs.get(t) for t in range(num_steps)]))
    like = next((like for like, _ in rows if like is not None), None)
    ys = []
    for index in range(len(like or ())):
        zero = torch.zeros_like(like[index])  # type: ignore[index]
        ys.append(torch.cat([torch.stack([zero if y is None else y[index] for y in made], 1) for _, made in rows]))
    return [torch.cat(parts) for parts in zip(*finals, strict=True)], ys


def assert_same(step: Step, init: Any, xs: Any, *, wrt: list[torch.Tensor], backend: str = "cpp", **how: Any) -> None:
    """Final states, outputs and gradients of all that is given are those of the loop."""
    num_steps = how.get("length") or flatten(xs)[0].shape[1]
    final, ys = stretto.scan(step, init, xs, **how)
    how.pop("length", None)
    expected_final, expected_ys = by_hand(step, init, xs, num_steps=num_steps, **how)
    made, expected = [*flatten(final), *flatten(ys)], [*expected_final, *expected_ys]
    assert len(made) == len(expected)
    tolerance = 1e-5 if any(part.dtype == torch.float32 for part in made) else 1e-10
    for one, other in zip(made, expected, strict=True):
        assert one.dtype == other.dtype
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)
    weights = [torch.rand(part.shape, dtype=torch.double).to(part.dtype) for part in made]

    def gradients(parts: list[torch.Tensor]) -> Any:
        pairs = [(part, weight) for part, weight in zip(parts, weights, strict=True) if part.requires_grad]
        total = sum(((part * weight).sum() for part, weight in pairs), torch.zeros(()))
        return torch.autograd.grad(total, wrt, allow_unused=True, retain_graph=True, materialize_grads=True)

    for one, other in zip(gradients(made), gradients(expected), strict=True):
        torch.testing.assert_close(one, other, rtol=10 * tolerance, atol=10 * tolerance)
    if not any(name in how for name in ("lengths", "resets")) and backend:
        extra = {} if flatten(xs) else {"length": num_steps}
        assert stretto.explain(step, init, xs, **how, **extra).backend == backend


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def no_slow_path() -> Iterator[None]:
    """A test that expects the loop says so with pytest.warns."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*runs step by step")
        yield


def leaf(*shape: int, dtype: torch.dtype = torch.double) -> torch.Tensor:
    return torch.randn(shape, dtype=dtype, requires_grad=True)


# --- structures ------------------------------------------------------------------------------------------------------


class Pair(NamedTuple):
    first: Any
    second: Any


STRUCTURES: list[Callable[[Any, Any], Any]] = [
    lambda a, b: (a, b),
    lambda a, b: [a, b],
    lambda a, b: {"a": a, "b": b},
    lambda a, b: {"b": b, "a": a},
    Pair,
    lambda a, b: (a, {"deep": [b, None]}),
    lambda a, b: {"p": Pair((a,), None), "q": (b, ())},
]
W = torch.randn(H, H, dtype=torch.double, generator=torch.Generator().manual_seed(1))


def structured_step(of_state: int, of_input: int, of_output: int, weight: torch.Tensor, *, constants: bool) -> Step:
    """The same arithmetic, so that one kernel serves, between structures of all kinds."""
    # Not by their numbers: a step whose numbers change again and again is compiled for some of them only.
    state_of, output_of = STRUCTURES[of_state], STRUCTURES[of_output]

    def step(state: Any, x: Any, extra: Any = None) -> tuple[Any, Any]:
        h, c = flatten(state)
        a, b = flatten(x)
        new = torch.tanh(h @ weight.to(h.dtype) + a) * torch.sigmoid(c)
        after = 0.5 * c + b.to(h.dtype) + new
        if constants:
            new = new * flatten(extra)[0]
        return state_of(new, after), output_of(new * after, after)

    return step


def _any_call(draw: Callable[[Any], Any], *, dtypes: list[torch.dtype]) -> None:
    kinds = st.integers(0, len(STRUCTURES) - 1)
    of_state, of_input, of_output = draw(kinds), draw(kinds), draw(kinds)
    dtype = draw(st.sampled_from(dtypes))
    num_rows, num_steps = draw(st.integers(1, 4)), draw(st.integers(1, 6))
    weight = W.to(dtype).requires_grad_()
    h, c = leaf(num_rows, H, dtype=dtype), leaf(num_rows, H, dtype=dtype)
    a, b = leaf(num_rows, num_steps, H, dtype=dtype), torch.rand(num_rows, num_steps, 1) > 0.5
    how: dict[str, Any] = {"reverse": draw(st.booleans())}
    if draw(st.booleans()):
        how["lengths"] = draw(st.lists(st.integers(0, num_steps), min_size=num_rows, max_size=num_rows))
        how["lengths"][0] = max(how["lengths"][0], 1)
    if draw(st.booleans()):
        how["resets"] = torch.rand(num_rows, num_steps) < draw(st.sampled_from([0.0, 0.3, 1.0]))
    wrt = [weight, h, c, a]
    if draw(st.booleans()):
        how["constants"] = {"scale": leaf(num_rows, H, dtype=dtype)}
        wrt.append(how["constants"]["scale"])
    step = structured_step(of_state, of_input, of_output, weight, constants="constants" in how)
    assert_same(step, STRUCTURES[of_state](h, c), STRUCTURES[of_input](a, b), wrt=wrt, **how)


@settings(max_examples=8)
@given(data=st.data())
def test_every_structure_ragged_reset_and_reversed(data: st.DataObject) -> None:
    _any_call(data.draw, dtypes=[torch.float64])


@pytest.mark.slow
@settings(max_examples=300)
@given(data=st.data())
def test_every_structure_ragged_reset_and_reversed_at_length(data: st.DataObject) -> None:
    _any_call(data.draw, dtypes=[torch.float32, torch.float64])


def test_structures_come_back_as_they_are() -> None:
    for index, structure in enumerate(STRUCTURES):
        step = structured_step(index, index, index, W, constants=False)
        init = structure(torch.zeros(2, H).double(), torch.zeros(2, H).double())
        final, ys = stretto.scan(step, init, structure(leaf(2, 5, H), leaf(2, 5, 1)))
        assert repr(map_state(torch.numel, final)) == repr(map_state(torch.numel, init))
        assert describe(ys) == describe(init)
        assert [part.shape for part in flatten(ys)] == [(2, 5, H)] * 2


def test_no_inputs_no_outputs_and_no_state() -> None:
    h, weight, x = leaf(3, H), leaf(H, H), leaf(3, 5, H)
    assert_same(lambda h, _: (torch.tanh(h @ weight), None), h, None, wrt=[h, weight], length=5)
    assert_same(lambda h, _: (torch.tanh(h @ weight), h), h, None, wrt=[h, weight], length=5)
    assert_same(lambda _, x: (None, torch.tanh(x @ weight)), None, x, wrt=[x, weight])


def test_one_number_per_step_and_row() -> None:
    level, x, flags = leaf(3), leaf(3, 5), torch.rand(3, 5) > 0.5
    gain = leaf()

    def step(level: Any, given: Any) -> Any:
        x, flag = given
        level = torch.where(flag, x, torch.tanh(gain * level + x))
        return level, {"level": level, "count": flag.long()}

    how = {"resets": torch.rand(3, 5) < 0.3, "lengths": [2, 5, 3]}
    assert_same(lambda level, x: (torch.tanh(gain * level + x),) * 2, level, x, wrt=[level, x, gain], backend="")
    assert_same(step, level, (x, flags), wrt=[level, x, gain], backend="", **how)


@pytest.mark.parametrize("how", [{}, {"reverse": True}, {"resets": True}, {"lengths": True}])
def test_no_steps_and_no_rows(how: dict[str, Any]) -> None:
    weight = leaf(H, H)

    def step(h: Any, x: Any) -> Any:
        new = torch.tanh(h @ weight + x["a"])
        return new, (new, x["b"])

    for num_rows, num_steps in ((3, 0), (0, 4), (0, 0)):
        h = leaf(num_rows, H)
        given: dict[str, Any] = dict(how)
        if "resets" in how:
            given["resets"] = torch.zeros(num_rows, num_steps, dtype=torch.bool)
        if "lengths" in how:
            given["lengths"] = torch.zeros(num_rows, dtype=torch.long)
        xs = {"a": torch.randn(num_rows, num_steps, H).double(), "b": torch.ones(num_rows, num_steps, 2).double()}
        final, (first, second) = stretto.scan(step, h, xs, **given)
        assert (first.shape, second.shape) == ((num_rows, num_steps, H), (num_rows, num_steps, 2))
        (gradient,) = torch.autograd.grad(final.sum(), h, materialize_grads=True)
        assert torch.equal(gradient, torch.ones_like(h))


def test_steps_first() -> None:
    weight, h, x = leaf(H, H), leaf(3, H), leaf(3, 5, H)
    resets = torch.rand(3, 5) < 0.4

    def step(h: Any, x: Any) -> Any:
        new = torch.tanh(h @ weight + x)
        return new, new

    final, ys = stretto.scan(step, h, x, lengths=[5, 2, 4], resets=resets)
    other, ys_TB = stretto.scan(step, h, x.transpose(0, 1), lengths=[5, 2, 4], resets=resets.T, batch_first=False)
    assert torch.equal(final, other)
    assert torch.equal(ys, ys_TB.transpose(0, 1))


# --- what a step closes over -----------------------------------------------------------------------------------------

GLOBAL = torch.randn(H, H, dtype=torch.double, generator=torch.Generator().manual_seed(2)).requires_grad_()


class Policy:
    """An object of a user's own, with much that the step does not read."""

    decay = 0.5

    def __init__(self) -> None:
        self.layers = nn.ModuleList([nn.Linear(H, H), nn.LayerNorm(H)]).double()
        self.weights = {"out": [leaf(H, H)]}
        self.num_updates = 0
        self.buffer = [torch.zeros(3)]

    def __call__(self, h: Any, x: Any) -> Any:
        return self.step(h, x)

    def step(self, h: Any, x: Any) -> Any:
        for layer in self.layers:
            h = layer(h)
        return torch.tanh(self.decay * h + x), self.read(h)

    def read(self, h: Any) -> Any:
        return h @ self.weights["out"][0]

    def tensors(self) -> list[torch.Tensor]:
        return [*self.layers.parameters(), self.weights["out"][0]]


class Leaky(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.recurrent = nn.utils.parametrizations.weight_norm(nn.Linear(H, H)).double()
        self.register_buffer("tau", torch.tensor(0.3, dtype=torch.double))

    def forward(self, h: Any, x: Any) -> Any:
        new = h + self.tau * (torch.tanh(self.recurrent(h) + x) - h)
        return new, new


@dataclasses.dataclass
class Settings:
    weight: torch.Tensor
    gain: float = 1.5


def _helper(h: Any, x: Any, *, scale: float = 2.0) -> Any:
    return torch.tanh(h @ GLOBAL + scale * x)


def _global(h: Any, x: Any) -> Any:
    new = _helper(h, x)
    return new, new


def _reach(kind: str) -> tuple[Step, list[torch.Tensor]]:
    policy, leaky, weight = Policy(), Leaky(), leaf(H, H)
    nested = {"all": [Settings(weight), SimpleNamespace(other=leaky)]}

    def with_default(h: Any, x: Any, weight: Any = weight) -> Any:
        return torch.tanh(h @ weight + x), h

    def keyword(h: Any, x: Any, *, cell: Any, gain: float) -> Any:
        return cell(h, gain * x)

    def deep(h: Any, x: Any) -> Any:
        settings = nested["all"][0]
        new = torch.tanh(settings.gain * (h @ settings.weight) + x)
        return nested["all"][1].other(new, x)

    @torch.no_grad()
    def gate(x: Any) -> Any:
        return torch.sigmoid(x @ weight)

    return {
        "global": (_global, [GLOBAL]),
        "method": (policy.step, policy.tensors()),
        "object": (policy, policy.tensors()),
        "module": (leaky, list(leaky.parameters())),
        "module's method": (leaky.forward, list(leaky.parameters())),
        "default": (with_default, [weight]),
        "partial": (functools.partial(keyword, cell=leaky, gain=0.7), list(leaky.parameters())),
        "partial argument": (functools.partial(lambda w, h, x: (torch.tanh(h @ w + x), h), weight), [weight]),
        "nested": (deep, [weight, *leaky.parameters()]),
        "decorated": (lambda h, x: (h * gate(x) + x, h), [weight]),
    }[kind]


@pytest.mark.parametrize(
    "kind",
    [
        *("object", "default", "partial argument", "nested"),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("global", "method", "module", "module's method")),
        *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("partial", "decorated")),
    ],
)
def test_what_a_step_reaches_is_found_and_gets_gradients(kind: str) -> None:
    step, tensors = _reach(kind)
    h, x = leaf(3, H), leaf(3, 5, H)
    assert_same(step, h, x, wrt=[h, x, *tensors])


def test_gradients_flow_to_what_made_a_captured_tensor() -> None:
    source = leaf(H, H)
    product = source @ source.T / H
    h, x = leaf(3, H), leaf(3, 5, H)
    assert_same(lambda h, x: (torch.tanh(h @ product + x), h), h, x, wrt=[source, h, x])


def test_a_tensor_that_is_reached_by_no_known_way_is_no_constant() -> None:
    hidden = {"weight": leaf(H, H)}
    registry = weakref.WeakValueDictionary(hidden)

    def step(h: Any, x: Any) -> Any:
        return torch.tanh(h @ registry["weight"] + x), h

    h, x = leaf(3, H), leaf(3, 5, H)
    with pytest.warns(UserWarning, match=r"step runs step by step .* reads tensors of \(4, 4\) that were not found"):
        assert_same(step, h, x, wrt=[h, x, hidden["weight"]], backend="torch")


TICKS = Mock()
"""Counts calls, unseen by what looks at a step's variables."""


def _counted(weight: torch.Tensor, cell: nn.Module, gain: float = 1.0) -> Step:
    def step(h: Any, x: Any) -> Any:
        TICKS()
        return torch.tanh(gain * (cell(h) @ weight) + x), h

    return step


def _calls_during(run: Callable[[], Any]) -> int:
    first = TICKS.call_count
    run()
    return int(TICKS.call_count - first)


def test_new_closures_share_what_was_compiled_and_numbers_do_not() -> None:
    h, x = leaf(3, H), leaf(3, 5, H)
    for number in range(3):
        weight, cell = leaf(H, H) * (number + 1), nn.Linear(H, H).double()
        step = _counted(weight, cell)
        assert _calls_during(lambda: stretto.scan(step, h, x)) == (0 if number else 2)  # noqa: B023
        assert_same(step, h, x, wrt=[h, x, *cell.parameters()])
    other = _counted(leaf(H, H), nn.Linear(H, H).double(), gain=0.25)
    assert _calls_during(lambda: stretto.scan(other, h, x)) == 2
    assert_same(other, h, x, wrt=[h, x])
    # One tensor in two places is not two tensors.
    weight = leaf(H, H)
    tied = nn.Linear(H, H, bias=False).double()
    tied.weight = nn.Parameter(weight.detach())
    assert_same(_counted(tied.weight, tied), h, x, wrt=[h, x, tied.weight])


def test_a_number_that_changes_at_every_call_is_told() -> None:
    h, x = torch.randn(2, H), torch.randn(2, 3, H)

    def make(noise: float) -> Step:
        return lambda h, x: (torch.tanh(h + noise * x), h)

    for number in range(8):
        stretto.scan(make(number / 10), h, x)
    with pytest.warns(UserWarning, match="compiled 8 times for other values of noise, .*make it a tensor"):
        final, _ = stretto.scan(make(0.85), h, x)
    expected, _ = by_hand(make(0.85), h, x, num_steps=3)
    torch.testing.assert_close(final, expected[0])
    assert stretto.explain(make(0.1), h, x).backend == "cpp"


class Rate(float):
    """A number of a user's own class."""


def test_whatever_a_step_reads_counts() -> None:
    h, x = torch.randn(2, H), torch.randn(2, 3, H)

    def run(value: Any) -> torch.Tensor:
        def step(h: Any, x: Any) -> Any:
            read = value["at"] if isinstance(value, dict) else value
            new = x[:, read] if isinstance(read, slice) else x * torch.as_tensor(float(read))
            return torch.tanh(h), new

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made: torch.Tensor = stretto.scan(step, h, x)[1]
        expected = by_hand(step, h, x, num_steps=3)[1][0]
        torch.testing.assert_close(made, expected)
        return made

    values = [1, 1.5, True, Rate(2), Rate(3), np.float32(4), np.array(5.0), np.array(6.0), Fraction(7, 2)]
    for value in [*values, *({"at": value} for value in values), slice(0, 2), slice(2, 4), Fraction(9, 2)]:
        run(value)


def test_objects_that_are_new_at_every_call_are_told() -> None:
    h, x = torch.randn(2, H), torch.randn(2, 3, H)

    def make(lock: Any) -> Step:
        return lambda h, x: (torch.tanh(h), x if lock else h)

    for _ in range(8):
        stretto.scan(make(threading.Lock()), h, x)
    with pytest.warns(UserWarning, match="compiled 8 times for other values of lock"):
        stretto.scan(make(threading.Lock()), h, x)


def test_autocast_is_that_of_the_loop() -> None:
    linear, h, x = nn.Linear(H, H), torch.zeros(2, H), torch.randn(2, 3, H)

    def step(h: Any, x: Any) -> Any:
        return torch.tanh(linear(h).float() + x), linear(x)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        with pytest.warns(UserWarning, match="step runs step by step in Python: autocast is on"):
            final, ys = stretto.scan(step, h, x)
        (expected,), (expected_ys,) = by_hand(step, h, x, num_steps=3)
    assert ys.dtype == torch.bfloat16
    assert torch.equal(ys, expected_ys)
    torch.testing.assert_close(final, expected)


@pytest.mark.parametrize("kind", ["list", "variable", "attribute", "module", "buffer"])
def test_a_step_that_does_more_than_compute_runs_as_it_is(kind: str) -> None:
    log: list[int] = []
    total = 0
    holder = SimpleNamespace(last=None, count=0)
    module = Leaky()

    def step(h: Any, x: Any) -> Any:
        nonlocal total
        if kind == "list":
            log.append(1)
        elif kind == "variable":
            total += 1
        elif kind == "attribute":
            holder.count, holder.last = holder.count + 1, h
        elif kind == "module":
            module.count = getattr(module, "count", 0) + 1
        else:
            module.tau.add_(1)
        return torch.tanh(h + x), h

    step.__name__ = kind
    with pytest.warns(UserWarning, match=rf"{kind} runs step by step.*(the step changes|in place)"):
        stretto.scan(step, torch.zeros(2, H), torch.randn(2, 6, H))
    counts = {"list": len(log), "variable": total, "attribute": holder.count, "module": getattr(module, "count", 0)}
    assert counts.get(kind, round(float(module.tau) - 0.3)) == 6


@pytest.mark.parametrize("reverse", [False, True])
def test_a_loop_in_python_has_ragged_rows_and_resets_too(reverse: bool) -> None:
    calls: list[int] = []

    def step(h: Any, x: Any) -> Any:
        calls.append(1)
        return torch.tanh(h + x), h

    h, x = torch.randn(4, H, dtype=torch.double), torch.randn(4, 6, H, dtype=torch.double)
    resets = torch.rand(4, 6) < 0.5
    resets[:, -1] = True  # behind the end of some: that changes nothing
    how: dict[str, Any] = {"lengths": [6, 2, 0, 5], "resets": resets, "reverse": reverse}
    step.__name__ = f"reversed_{reverse}"
    with pytest.warns(UserWarning, match="runs step by step"):
        final, ys = stretto.scan(step, h, x, **how)
    assert len(calls) >= 6
    expected_final, expected_ys = by_hand(step, h, x, num_steps=6, **how)
    torch.testing.assert_close([final, ys], [expected_final[0], expected_ys[0]])


def test_no_tensor_of_the_user_is_kept() -> None:
    def run(kind: str) -> list[Any]:
        step, tensors = _reach(kind)
        stretto.scan(step, torch.zeros(3, H).double(), torch.randn(3, 5, H).double())
        return [weakref.ref(tensor) for tensor in tensors if tensor is not GLOBAL]

    kept = [reference for kind in ("method", "module", "nested", "decorated") for reference in run(kind)]
    gc.collect()
    assert kept
    assert not [reference() for reference in kept if reference() is not None]


# --- who calls -------------------------------------------------------------------------------------------------------


def test_second_derivatives_no_grad_and_checkpoints() -> None:
    weight, h, x = leaf(H, H), leaf(2, H), leaf(2, 4, H)

    def step(h: Any, x: Any) -> Any:
        new = torch.tanh(h @ weight + x)
        return new, new

    def loss(weight: Any, h: Any, x: Any) -> Any:
        return stretto.scan(lambda h, x: (torch.tanh(h @ weight + x),) * 2, h, x)[1]

    assert torch.autograd.gradgradcheck(loss, (weight, h, x))
    with torch.no_grad():
        final, ys = stretto.scan(step, h, x)
    assert not ys.requires_grad
    again, _ = checkpoint.checkpoint(lambda h, x: stretto.scan(step, h, x), h, x, use_reentrant=False)
    torch.testing.assert_close(again, final)
    for one, other in zip(
        torch.autograd.grad(again.sum(), [weight, h, x]),
        torch.autograd.grad(stretto.scan(step, h, x)[0].sum(), [weight, h, x]),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_under_transforms_compilers_and_modes() -> None:
    cell = nn.Linear(H, H).double()
    h, x = torch.randn(2, H).double(), torch.randn(2, 4, H).double()
    lengths = torch.tensor([4, 2])

    def run(h: torch.Tensor, x: torch.Tensor, **how: Any) -> torch.Tensor:
        ys: torch.Tensor = stretto.scan(lambda h, x: (torch.tanh(cell(h) + x), h), h, x, **how)[1]
        return ys

    expected = run(h, x)
    torch.testing.assert_close(torch.func.vmap(run, in_dims=(None, 0))(h, torch.stack([x, x]))[1], expected)
    jacobian = torch.func.jacrev(run)(h, x)
    torch.testing.assert_close(jacobian, torch.autograd.functional.jacobian(lambda h: run(h, x), h))
    torch.testing.assert_close(torch.compile(run, backend="eager")(h, x), expected)

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cell = cell

        def forward(self, h: Any, x: Any, lengths: Any) -> Any:
            return stretto.scan(lambda h, x: (torch.tanh(self.cell(h) + x), h), h, x, lengths=lengths, reverse=True)[1]

    exported = torch.export.export(Model(), (h, x, lengths)).module()
    torch.testing.assert_close(exported(h, x, lengths), run(h, x, lengths=lengths, reverse=True))


def test_dtypes_that_differ() -> None:
    weight, h, x = leaf(H, H), leaf(2, H, dtype=torch.float32), leaf(2, 4, H)
    steps = torch.arange(8).reshape(2, 4)

    def step(h: Any, given: Any) -> Any:
        x, t = given
        return torch.tanh(h + (x @ weight).float()), (h.double(), t + 1)

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # whether kernels take it is their affair
        assert_same(step, h, (x, steps), wrt=[h, x, weight], backend="")
        assert_same(
            lambda h, g: (torch.tanh(h + g[0] + g[1]), h), h, (x.float(), leaf(2, 4, H).float()), wrt=[h], backend=""
        )
        # Two floating dtypes cannot be concatenated into one input.
        assert_same(
            lambda h, g: (torch.tanh(h + g[0].float() + g[1]), h), h, (x, x.float()), wrt=[h, x], backend="torch"
        )


def test_whole_numbers_are_exact_or_refused() -> None:
    h, x = torch.zeros(2, H), torch.randn(2, 3, H)
    ids = torch.full((2, 3, 1), 2**24 - 1)
    _, ys = stretto.scan(lambda h, g: (torch.tanh(h + g[0]), (h, g[1])), h, (x, ids))
    assert torch.equal(ys[1], ids)
    with pytest.raises(StrettoError, match="the input has the integer 16777217"):
        stretto.scan(lambda h, g: (torch.tanh(h + g[0]), (h, g[1])), h, (x, ids + 2))


# --- errors and explanations -----------------------------------------------------------------------------------------


def _same(h: Any, x: Any) -> Any:
    return h, x


@pytest.mark.parametrize(
    ("step", "init", "how", "said"),
    [
        (_same, torch.zeros(H), {}, r"init has the shape \(4,\) and the batch has 2 sequences.*expand"),
        (_same, torch.zeros(1, H), {}, "init has the shape"),
        (_same, 0.0, {}, "init of the scan is float"),
        (_same, torch.zeros(2, H), {"lengths": [1, 9]}, "a length is 9 and the batch has 3 steps"),
        (_same, torch.zeros(2, H), {"lengths": [1]}, "lengths have the shape"),
        (_same, torch.zeros(2, H), {"resets": torch.zeros(2, 3)}, "resets are .*float32 and the batch is"),
        (_same, torch.zeros(2, H), {"resets": torch.zeros(3, 2) > 0}, "resets are"),
        (_same, torch.zeros(2, H), {"length": 4}, "length=4 was given with inputs of 3 steps"),
        (
            lambda h, x, _: (h, x),
            torch.zeros(2, H),
            {"constants": torch.zeros(H)},
            "constants has the shape .*close over",
        ),
        (lambda h, _: h, torch.zeros(2, H), {}, "returned Tensor, not the new state and an output"),
        (lambda h, x: (x.sum(), h), torch.zeros(2, H), {}, r"returned one of rows of \(\).*the state first"),
        (lambda h, x: (h[:, :1], x), torch.zeros(2, H), {}, r"given a state of rows of \(4,\).*one of rows of \(1,\)"),
        (lambda h, x: ((h, h), x), torch.zeros(2, H), {}, r"state of Tensor and returned one of \(Tensor, Tensor\)"),
        (lambda h, x: (h.double(), x), torch.zeros(2, H), {}, "float64"),
        (lambda h, x: (h, x.mean()), torch.zeros(2, H), {}, r"an output of shape \(\) for 2 sequences.*reduce"),
        (lambda h, _: (h, 1.0), torch.zeros(2, H), {}, "an output of the step <lambda> of the scan is float"),
        (nn.GRUCell(H, H), torch.zeros(2, H), {}, "GRUCell takes its input first"),
        (3, torch.zeros(2, H), {}, "the step is 3"),
    ],
)
def test_errors_name_the_remedy(step: Any, init: Any, how: dict[str, Any], said: str) -> None:
    with pytest.raises(StrettoError, match=said):
        stretto.scan(step, init, torch.randn(2, 3, H), **how)


def test_errors_of_inputs() -> None:
    h = torch.zeros(2, H)
    with pytest.raises(StrettoError, match=r"inputs of the scan have \(2, 3\) and \(2, 4\) sequences and steps"):
        stretto.scan(_same, h, (torch.zeros(2, 3, H), torch.zeros(2, 4, H)))
    with pytest.raises(StrettoError, match="neither inputs nor a length"):
        stretto.scan(_same, h, None)
    with pytest.raises(StrettoError, match="a batch of one"):
        stretto.scan(_same, h, torch.zeros(3))


def test_a_captured_tensor_with_a_row_for_each_sequence_is_for_constants() -> None:
    memory, h, x = leaf(4, H), leaf(4, H), leaf(4, 5, H)
    with pytest.warns(
        UserWarning, match="runs step by step .*memory.* has a row for each of the 4 sequences.*constants"
    ):
        final, _ = stretto.scan(lambda h, x: (torch.tanh(h * memory + x), h), h, x)
    other, _ = stretto.scan(lambda h, x, memory: (torch.tanh(h * memory + x), h), h, x, constants=memory)
    torch.testing.assert_close(final, other, rtol=1e-10, atol=1e-10)


def test_explanations() -> None:
    h, x = torch.zeros(2, H).double(), torch.randn(2, 3, H).double()
    explanation = stretto.explain(_global, h, x)
    assert explanation.backend == "cpp"
    assert explanation.name == "_global"
    assert explanation.counts["loops"] == 1
    slow = stretto.explain(lambda h, x: (h if float(h.sum()) < 9 else x, h), h, x)
    assert slow.backend == "torch"
    assert "reads values" in slow.reason


class Surrogate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, v: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(v)
        return torch.gt(v, torch.as_tensor(0.0)).to(v.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        (v,) = ctx.saved_tensors
        return gradients[0] / (1 + 10 * v.abs()) ** 2


def test_create_graph_keeps_gradients_of_ones_own() -> None:
    weight, h, x = leaf(H, H), leaf(2, H), leaf(2, 4, H)

    def step(h: Any, x: Any) -> Any:
        spikes = Surrogate.apply(h @ weight + x)
        return 0.5 * h + spikes, spikes

    def derivatives(ys: Any, *, create_graph: bool) -> Any:
        return torch.autograd.grad(ys.square().sum(), [weight, h, x], create_graph=create_graph)

    assert stretto.explain(step, h, x).backend == "cpp"
    state, spikes = h, []
    for t in range(4):
        state, spike = step(state, x[:, t])
        spikes.append(spike)
    plain = torch.stack(spikes, 1)
    for create_graph in (False, True):
        found = derivatives(stretto.scan(step, h, x)[1], create_graph=create_graph)
        wanted = derivatives(plain, create_graph=True)
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other)
    for one, other in zip(
        *(torch.autograd.grad(sum(d.square().sum() for d in g), [weight, x]) for g in (found, wanted)), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_a_view_of_what_lies_otherwise_the_second_time() -> None:
    """A gradient that is itself differentiated may have other strides than the one that was recorded."""
    weights = leaf(H, H), leaf(2 * 3, H), leaf(H, 2 * 3)

    def step(state: Any, x: Any) -> Any:
        matrix, h = state
        turned = torch.tanh(matrix.transpose(1, 2)).transpose(1, 2)
        wide = (torch.tanh(x + h @ weights[0]) @ weights[1].t()).view(-1, 2, 3)
        return (torch.tanh(wide), torch.tanh(turned.contiguous().view(-1, 6) @ weights[2].t())), wide

    def curvature(run: Callable[[Any, Any], torch.Tensor]) -> tuple[torch.Tensor, ...]:
        slopes = torch.autograd.grad(run(state, x).square().sum(), [*weights, x], create_graph=True)
        return torch.autograd.grad(sum(slope.square().sum() for slope in slopes), [*weights, x])

    def plain(state: Any, x: torch.Tensor) -> torch.Tensor:
        outputs = []
        for t in range(x.shape[1]):
            state, y = step(state, x[:, t])
            outputs.append(y)
        return torch.stack(outputs, 1)

    state, x = (torch.zeros(2, 2, 3).double(), torch.zeros(2, H).double()), leaf(2, 4, H)
    for one, other in zip(curvature(lambda *given: stretto.scan(step, *given)[1]), curvature(plain), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    "of_rows",
    [
        lambda h: torch.full((), h.shape[0]),
        lambda h: torch.tensor(2 * h.shape[0]),
        lambda h: h.new_full((h.shape[0], 1), len(h)),
        lambda h: torch.ones(H) * h.size(0),
        lambda h: (torch.ones(H) + h.size(0)).sum(),
    ],
)
def test_a_value_that_is_the_number_of_rows_is_refused(of_rows: Any) -> None:
    h, x = leaf(3, H), leaf(3, 4, H)

    def step(h: Any, x: Any) -> Any:
        new = 0.5 * h + x / of_rows(h)
        return new, new

    explanation = stretto.explain(step, h, x)
    assert explanation.backend == "torch"
    assert "uses the number of rows" in explanation.reason


def test_derivatives_inside_a_step_are_those_of_the_loop() -> None:
    weight, h, x = leaf(H, H), leaf(2, H), leaf(2, 4, H)

    def step(h: Any, x: Any) -> Any:
        with torch.enable_grad():
            (slope,) = torch.autograd.grad(torch.tanh(h @ weight).sum(), h, create_graph=True)
        new = torch.tanh(h - 0.1 * slope + x)
        return new, new

    with pytest.warns(UserWarning, match="takes a derivative"):
        found = torch.autograd.grad(stretto.scan(step, h, x)[1].sum(), [weight, h, x])
    state, ys = h, []
    for t in range(4):
        state, y = step(state, x[:, t])
        ys.append(y)
    wanted = torch.autograd.grad(torch.stack(ys).sum(), [weight, h, x])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("how", ["data", "no_grad", "saved", "read", "state"])
def test_writes_that_gradients_do_not_see(how: str) -> None:
    weight, h, x = leaf(H, H), leaf(3, H), leaf(3, 4, H)
    mask = torch.arange(H) > 2

    def step(h: Any, x: Any) -> Any:
        scores = h @ weight + x
        if how == "data":
            scores.data.masked_fill_(mask, -float("inf"))
        elif how == "no_grad":
            with torch.no_grad():
                scores.clamp_(-0.3, 0.3)
        elif how == "saved":
            scores = torch.tanh(scores)
            scores.data.mul_(0.5)
        elif how == "read":
            squares = scores * scores
            scores.data.mul_(0.5)
            scores = scores + squares
        else:
            h.data.mul_(0.9)
            scores = scores + h
        new = torch.softmax(scores, -1) + torch.sin(x)
        return new, scores.clamp(min=-5)

    start = h.detach().clone().requires_grad_()
    state, ys = start * 1, []
    for t in range(4):
        state, y = step(state, x[:, t])
        ys.append(y)
    wanted = torch.autograd.grad(torch.stack(ys).sin().sum(), [weight, start, x])
    start = h.detach().clone().requires_grad_()
    explanation = stretto.explain(step, start * 1, x)
    assert (explanation.backend == "cpp") is (how in {"data", "no_grad"}), explanation.reason
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = torch.autograd.grad(stretto.scan(step, start * 1, x)[1].sin().sum(), [weight, start, x])
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other)


AROUND, OUTWARD = (torch.randn(F, F, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
SAVERS: dict[str, Step] = {
    "the state": lambda h, x: ((new := torch.tanh(h @ AROUND + x)), new),
    "the state before": lambda h, x: (torch.tanh(h @ AROUND + x), h),
    "behind the loop": lambda h, x: ((new := torch.tanh(h @ AROUND + x)), torch.softmax(new @ OUTWARD, -1)),
    "ahead of the loop": lambda h, x: (torch.tanh(h @ AROUND + x), torch.sigmoid(x @ OUTWARD)),
    "in the loop": lambda h, x: (torch.tanh((y := torch.sigmoid(h @ OUTWARD)) @ AROUND + x), y),
    "the input": lambda h, x: (torch.tanh(h @ AROUND + x), x),
    "several": lambda h, x: ((new := torch.tanh(h @ AROUND + x)), (new, torch.relu(new @ OUTWARD))),
}
CHANGES: dict[str, Callable[[torch.Tensor], Any]] = {
    "seen": lambda ys: ys.mul_(2.0),
    "a step": lambda ys: ys[:, 0].zero_(),
    "unseen": lambda ys: ys.data.mul_(2.0),
    "detached": lambda ys: ys.detach_(),
}


@pytest.mark.parametrize("reverse", [False, True])
@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("saver", SAVERS)
def test_work_in_place_on_results(saver: str, change: str, batch_first: bool, reverse: bool) -> None:
    step, found = SAVERS[saver], []
    for is_compiled in (False, True):
        xs, init = torch.linspace(-1, 1, 60).reshape(4, 5, F).requires_grad_(), torch.ones(4, F, requires_grad=True)
        given = (xs if batch_first else xs.transpose(0, 1)) * 1.0
        before = given.detach().clone()
        if is_compiled:
            final, ys = stretto.scan(step, init * 1.0, given, batch_first=batch_first, reverse=reverse)
        else:
            state, made = init * 1.0, []
            steps = given.unbind(1 if batch_first else 0)
            for x in steps[::-1] if reverse else steps:
                state, y = step(state, x)
                made.append(y)
            stacked = [torch.stack(flatten(y), 0) for y in (made[::-1] if reverse else made)]
            parts = torch.stack(stacked).unbind(1)
            ys = [torch.stack(part.unbind(0), 1 if batch_first else 0) for part in parts]
            final = state * 1.0
        outputs = flatten(ys)
        for tensor in outputs:
            CHANGES[change](tensor if batch_first else tensor.transpose(0, 1) if change == "a step" else tensor)
        (sum(tensor.square().sum() for tensor in outputs) + final.square().sum()).backward()
        assert torch.equal(given, before)
        found.append((*outputs, final, xs.grad, init.grad))
    torch.testing.assert_close(found[1], found[0])
