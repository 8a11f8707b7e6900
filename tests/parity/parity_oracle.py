"""A layer beside its definition, and how to compare the two.

Shape legend: B sequences, T steps, F features of the input, O of the output.
"""

import contextlib
import copy
import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, final

import torch
from torch import nn

import stretto
from rnn_definition import by_hand
from rounding import ROUNDING
from stretto.state import flatten, map_state

KERNELS = ["cpp", "eager"]
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5}
"""Largest error of a tensor, as a share of its largest magnitude."""
DRAWS = 8
SMALLEST = 1e-3
"""Magnitudes below count as this: what cancels to zero has no digits to compare."""


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a layer is given.

    Attributes:
        x_BTF: The input.
        lengths: Steps of each sequence; None for all T.
        state: The state before the first step, as the layer takes it; None for the cells' own.
    """

    x_BTF: torch.Tensor
    lengths: list[int] | None = None
    state: Any = None


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """What came of it: outputs, final states and gradients by name; None is the gradient of what does not matter."""

    values: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor | None]


def defined(
    rnn: stretto.RNN, x_BTF: torch.Tensor, lengths: Sequence[int] | None = None, state: Any = None
) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """What a layer means, by its own cells: outputs and the tensors of all final states."""
    return by_hand(list(rnn.cells), x_BTF, lengths=lengths, state=state, num_directions=1 + rnn.bidirectional)


def expected(rnn: stretto.RNN, batch: Batch, *, seed: int = 0, dtype: torch.dtype = torch.float64) -> Result:
    """The definition's result, in double precision by default."""
    cells = copy.deepcopy(rnn.cells).to(dtype)
    given = _leaves_of(batch, dtype)
    with _one_thread():
        torch.manual_seed(seed)
        y_BTO, finals = by_hand(
            list(cells), given.x_BTF, lengths=given.lengths, state=given.state, num_directions=1 + rnn.bidirectional
        )
        return _result(y_BTO, finals, given, cells)


@contextlib.contextmanager
def _one_thread() -> Iterator[None]:
    """The definition means the same with any number of threads, and single steps are slow with more than one."""
    earlier = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(earlier)


def found(rnn: stretto.RNN, batch: Batch, *, seed: int = 0) -> Result:
    """What the layer makes of it."""
    given = _leaves_of(batch, batch.x_BTF.dtype)
    torch.manual_seed(seed)
    y_BTO, after = rnn(given.x_BTF, given.state, lengths=given.lengths)
    return _result(y_BTO, flatten(after), given, rnn.cells)


def _leaves_of(batch: Batch, dtype: torch.dtype) -> Batch:
    def leaf(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().to(dtype, copy=True).requires_grad_() if tensor.is_floating_point() else tensor

    state = None if batch.state is None else map_state(leaf, batch.state)
    return Batch(x_BTF=leaf(batch.x_BTF), lengths=batch.lengths, state=state)


def _result(y_BTO: torch.Tensor, finals: list[torch.Tensor], batch: Batch, cells: nn.Module) -> Result:
    values = {"y": y_BTO, **{f"final {index}": tensor for index, tensor in enumerate(finals)}}
    inputs = {"x": batch.x_BTF} if batch.x_BTF.requires_grad else {}
    if batch.state is not None:
        inputs |= {f"state {i}": part for i, part in enumerate(flatten(batch.state)) if part.requires_grad}
    inputs |= {name: parameter for name, parameter in cells.named_parameters() if parameter.requires_grad}
    # One seed for all: every result is multiplied by the same random weights.
    generator = torch.Generator().manual_seed(1)
    total = torch.zeros((), dtype=torch.float64)
    for tensor in values.values():
        weight = torch.randn(tensor.shape, generator=generator, dtype=torch.float64)
        if tensor.requires_grad:
            total = total + (tensor * weight.to(tensor)).sum()
    gradients: Sequence[torch.Tensor | None] = [None] * len(inputs)
    if total.requires_grad:
        gradients = torch.autograd.grad(total, list(inputs.values()), allow_unused=True)
    return Result(
        values={name: tensor.detach() for name, tensor in values.items()},
        gradients=dict(zip(inputs, gradients, strict=True)),
    )


def error_of(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    """Largest difference, as a share of the largest magnitude of `other`; a missing gradient is zero."""
    if one is None or other is None:
        present = one if other is None else other
        return 0.0 if present is None or not present.any() else math.inf
    assert one.shape == other.shape
    if one.numel() == 0 or torch.equal(one.double(), other.double()):
        return 0.0
    difference = (one.double() - other.double()).abs().max().item()
    error = difference / max(other.double().abs().max().item(), SMALLEST)
    return math.inf if math.isnan(error) else error


def assert_close(ones: Iterable[torch.Tensor | None], others: Iterable[torch.Tensor | None]) -> None:
    """Check tensors in double precision against others."""
    for number, (one, other) in enumerate(zip(ones, others, strict=True)):
        assert error_of(one, other) < TOLERANCE[torch.float64], number


def assert_equal(ones: Iterable[torch.Tensor], others: Iterable[torch.Tensor]) -> None:
    """Check that tensors are the same to the last bit."""
    for number, (one, other) in enumerate(zip(ones, others, strict=True)):
        assert torch.equal(one, other), number


def noise(*shape: int) -> torch.Tensor:
    """Random numbers, the same each time."""
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


def errors_of(one: Result, other: Result) -> dict[str, float]:
    """The error of each tensor."""
    assert one.values.keys() == other.values.keys()
    assert one.gradients.keys() == other.gradients.keys()
    errors = {name: error_of(value, other.values[name]) for name, value in one.values.items()}
    return errors | {f"d {name}": error_of(value, other.gradients[name]) for name, value in one.gradients.items()}


def assert_parity(
    rnn: stretto.RNN, batch: Batch, *, kernels: Sequence[str] = ("cpp", "eager"), seed: int = 0, cancels: bool = False
) -> dict[str, Result]:
    """Check a layer against the definition with each kernel, and return what each made.

    In single precision long chains lose digits by themselves, most of all through layer norms: a layer may be as far
    from the truth as rounding takes the definition, times `ROUNDING`. In double precision the tolerance stands, but
    where the definition `cancels` to nothing but its own rounding (a layer norm over one unit).
    """
    truth, results = expected(rnn, batch, seed=seed), {}
    rounding = functools.cache(lambda: _by_rounding(rnn, batch, truth, seed=seed))
    for backend in kernels:
        rnn.backend = backend  # type: ignore[assignment]
        results[backend] = found(rnn, batch, seed=seed)
        errors, dtype = errors_of(results[backend], truth), batch.x_BTF.dtype
        allowed = TOLERANCE[dtype]
        if max(errors.values()) > allowed and (cancels or dtype == torch.float32):
            allowed = max(allowed, ROUNDING * rounding())
        wrong = {name: f"{error:.1e}" for name, error in errors.items() if error > allowed}
        assert not wrong, f"{backend} is beyond {allowed:.1e}: {wrong}"
    return results


def _by_rounding(rnn: stretto.RNN, batch: Batch, truth: Result, *, seed: int) -> float:
    """How far off the definition itself is: the worst of some runs whose given numbers differ in the last digit.

    One run may be lucky: where digits cancel, its rounding errors may do so too.
    """
    dtype, worst = batch.x_BTF.dtype, 0.0
    for draw in range(DRAWS):
        generator = torch.Generator().manual_seed(draw)

        def shaken(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.is_floating_point():
                return tensor
            digits = torch.randint(-1, 2, tensor.shape, generator=generator).to(dtype)  # noqa: B023
            return tensor * (1.0 + torch.finfo(dtype).eps * digits)

        twin = copy.deepcopy(rnn)
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.copy_(shaken(parameter))
        state = None if batch.state is None else map_state(shaken, batch.state)
        near = Batch(x_BTF=shaken(batch.x_BTF), lengths=batch.lengths, state=state)
        worst = max(worst, *errors_of(expected(twin, near, seed=seed, dtype=dtype), truth).values())
    return worst


def assert_same_bits(one: Result, other: Result, *, but: Callable[[str], bool] = lambda _: False) -> None:
    """Check that two runs made the very same numbers, `but` for some gradients."""
    for name, value in one.values.items():
        assert torch.equal(value, other.values[name]), name
    for name, gradient in one.gradients.items():
        twin = other.gradients[name]
        assert (gradient is None) == (twin is None), f"d {name}"
        assert but(name) or gradient is None or twin is None or torch.equal(gradient, twin), f"d {name}"
