"""Steps with a state in Python that nobody carries: they run as the loop, exactly, from where the loop would begin.

A trace calls the step twice, and a coin that falls on the same side both times would be the same at all steps for ever.
"""

import itertools
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stretto

pytestmark = pytest.mark.usefixtures("quick_compiler")

H, B, T = 4, 3, 9

Factor = Callable[[], float]
"""What a step multiplies its input with: another number at each call."""


class Slotted:
    __slots__ = ("count",)

    def __init__(self) -> None:
        self.count = 0

    def __call__(self) -> float:
        self.count += 1
        return float(self.count > 4)


def _python() -> Factor:
    random.seed(3)
    return lambda: float(random.random() < 0.5)


def _numpy() -> Factor:
    np.random.seed(3)
    return lambda: float(np.random.rand() < 0.5)


def _own_python() -> Factor:
    own = random.Random(3)
    return lambda: float(own.random() < 0.5)


def _own_numpy() -> Factor:
    own = np.random.default_rng(3)
    return lambda: float(own.random() < 0.5)


def _own_old_numpy() -> Factor:
    own = np.random.RandomState(3)
    return lambda: float(own.random_sample() < 0.5)


def _iterator() -> Factor:
    values = iter([0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0])
    return lambda: next(values)


def _counter() -> Factor:
    count = itertools.count()
    return lambda: float(next(count) > 4)


def _generator() -> Factor:
    values = (float(number > 4) for number in range(T))
    return lambda: next(values)


def _deque() -> Factor:
    values = deque([0.0, 0.0, 0.0, 1.0, 0.0, 1.0, 1.0, 0.0, 1.0])

    def take() -> float:
        values.rotate(-1)
        return values[0]

    return take


def _set() -> Factor:
    seen: set[int] = set()

    def take() -> float:
        seen.add(len(seen))
        return float(len(seen) > 4)

    return take


def _array() -> Factor:
    count = np.zeros(1)

    def take() -> float:
        count[0] += 1
        return float(count[0] > 4)

    return take


def _class() -> Factor:
    class Counts:
        count = 0

    def take() -> float:
        Counts.count += 1
        return float(Counts.count > 4)

    return take


def _function() -> Factor:
    def take() -> float:
        take.count += 1  # type: ignore[attr-defined]
        return float(take.count > 4)  # type: ignore[attr-defined]

    take.count = 0  # type: ignore[attr-defined]
    return take


MAKERS = {
    "numbers": [_python, _numpy, _own_python, _own_numpy, _own_old_numpy],
    "iterator": [_iterator, _counter, _generator],
    "changes": [_deque, _set, _array, _class, _function, Slotted],
}
CASES = [pytest.param(make, word, id=make.__name__) for word, makers in MAKERS.items() for make in makers]


class Scaled(nn.Module):
    """h' = h / 2 + factor x."""

    def __init__(self, factor: Factor) -> None:
        super().__init__()
        self.factor = factor

    def forward(self, x: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return 0.5 * h + self.factor() * x


@contextmanager
def quietly() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("by", ["scan", "RNN"])
@pytest.mark.parametrize(("make", "word"), CASES)
def test_what_changes_at_each_call_is_neither_frozen_nor_advanced_by_a_trace(
    make: Callable[[], Factor], word: str, by: str
) -> None:
    x, zeros = torch.randn(B, T, H), torch.zeros(B, H)
    cell = Scaled(make())
    h, expected = zeros, []
    for t in range(T):
        h = cell(x[:, t], h)
        expected.append(h)
    cell = Scaled(make())

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = cell(x, h)
        return h, h

    with quietly():
        if by == "scan":
            ys, explanation = stretto.scan(step, zeros, x)[1], stretto.explain(step, zeros, x)
        else:
            rnn = stretto.RNN(cell, state=H)
            ys, explanation = rnn(x)[0], rnn.explain()
    torch.testing.assert_close(ys, torch.stack(expected, 1))
    assert explanation.backend == "torch"
    assert word in explanation.reason


def test_random_numbers_that_a_step_does_not_draw_stay_where_they_are() -> None:
    cell = nn.GRUCell(H, H)
    states = random.getstate(), np.random.get_state()[1].tolist()  # type: ignore[index, union-attr]
    _, ys = stretto.scan(lambda h, x: ((new := cell(x, h)), new), torch.zeros(B, H), torch.randn(B, T, H))
    assert ys.shape == (B, T, H)
    assert states == (random.getstate(), np.random.get_state()[1].tolist())  # type: ignore[index, union-attr]


def test_a_generator_of_torch_that_a_step_owns_is_used() -> None:
    generator = torch.Generator()

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = 0.5 * h + x * torch.empty_like(h).uniform_(generator=generator)
        return h, h

    x, h, expected = torch.randn(B, T, H), torch.zeros(B, H), []
    generator.manual_seed(5)
    for t in range(T):
        h, _ = step(h, x[:, t])
        expected.append(h)
    generator.manual_seed(5)
    with quietly():
        _, ys = stretto.scan(step, torch.zeros(B, H), x)
    torch.testing.assert_close(ys, torch.stack(expected, 1))
    assert "its own torch.Generator" in stretto.explain(step, torch.zeros(B, H), x).reason


def test_hooks_on_the_gradient_of_the_state_are_called() -> None:
    cell, x = nn.GRUCell(H, H), torch.randn(B, T, H)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        if h.requires_grad:
            h.register_hook(lambda gradient: 0.5 * gradient)
        h = cell(x, h)
        return h, h

    h = torch.zeros(B, H)
    for t in range(T):
        h, _ = step(h, x[:, t])
    expected = torch.autograd.grad(h.sum(), list(cell.parameters()))
    with quietly():
        final, _ = stretto.scan(step, torch.zeros(B, H), x)
    torch.testing.assert_close(torch.autograd.grad(final.sum(), list(cell.parameters())), expected)


# --- checks that pass ------------------------------------------------------------------------------------------------


def test_checks_are_passed_over_on_request_in_functions_and_modules() -> None:
    x, zeros = torch.randn(B, T, H), torch.zeros(B, H)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        assert not torch.isnan(x).any()
        loss = nn.functional.gaussian_nll_loss(h, x, torch.ones_like(h), reduction="none")  # it has a check of its own
        h = torch.tanh(h + x)
        return h, loss

    refused = stretto.explain(step, zeros, x)
    assert refused.backend == "torch"
    assert "assert not torch.isnan(x).any()" in refused.reason
    step.assume_checks_pass = True  # type: ignore[attr-defined]
    assert stretto.explain(step, zeros, x).backend == "cpp"

    class Checked(nn.Module):
        assume_checks_pass = True

        def forward(self, h: torch.Tensor, x: torch.Tensor) -> Any:
            if not torch.isfinite(h).all():
                raise ValueError
            return h + x, h

    assert stretto.explain(Checked(), zeros, x).backend == "cpp"
    module = Checked()
    assert stretto.explain(lambda h, x: module(h + 0, x), zeros, x).backend == "cpp"


# --- reasons ---------------------------------------------------------------------------------------------------------


def test_reasons_name_the_line_and_what_to_do() -> None:
    x, zeros = torch.randn(B, T, H), torch.zeros(B, H)
    norm = nn.BatchNorm1d(H, track_running_stats=False)

    def mixing(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.tanh(h + x)
        return h - h.mean(0), h

    def normalised(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = norm(torch.tanh(h + x))
        return h, h

    def spectral(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.fft.irfft(torch.fft.rfft(h), n=H) + x
        return h, h

    def counting(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.tanh(h + x) / h.shape[0]
        return h, h

    def leaving(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.tanh(h + x + torch.from_numpy(np.sin(h.detach().numpy())))
        return h, h

    for step, line, words in (
        (mixing, "return h - h.mean(0), h", ["mean mixes the rows", "each sequence by itself"]),
        (normalised, "h = norm(torch.tanh(h + x))", ["batch_norm", "each sequence by itself"]),
        (spectral, "h = torch.fft.irfft", ["complex numbers", "two tensors"]),
        (counting, "/ h.shape[0]", ["uses the number of rows", "how many sequences"]),
        (leaving, "np.sin", ["numpy", "with torch"]),
    ):
        explanation = stretto.explain(step, zeros, x)
        assert explanation.backend == "torch"
        for word in (line, *words, "test_hidden_state.py:"):
            assert word in explanation.reason


def test_half_precision_among_wider_values_is_told() -> None:
    linear, mask = nn.Linear(H, H).bfloat16(), torch.ones(H, H)

    def step(h: torch.Tensor, x: torch.Tensor) -> Any:
        h = torch.tanh(x + h @ (linear.weight * mask.to(x.dtype)))
        return h, h

    given = torch.zeros(B, H).bfloat16(), torch.randn(B, T, H).bfloat16()
    explanation = stretto.explain(step, *given)
    assert explanation.backend == "torch"
    assert "convert all that the step reads to one dtype" in explanation.reason
    mask = mask.bfloat16()
    assert stretto.explain(step, *given).backend == "cpp"


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bags_of_embeddings_are_compiled(mode: str) -> None:
    torch.manual_seed(0)
    bag, codes = nn.EmbeddingBag(6, H, mode=mode).double(), torch.randint(0, 6, (B, T, 3))

    def step(h: torch.Tensor, codes: torch.Tensor) -> Any:
        h = torch.tanh(0.5 * h + bag(codes))
        return h, h

    zeros = torch.zeros(B, H, dtype=torch.float64)
    h = zeros
    for t in range(T):
        h, _ = step(h, codes[:, t])
    final, _ = stretto.scan(step, zeros, codes)
    torch.testing.assert_close(final, h)
    torch.testing.assert_close(torch.autograd.grad(final.sum(), bag.weight), torch.autograd.grad(h.sum(), bag.weight))
    assert stretto.explain(step, zeros, codes).backend == "cpp"
