"""Behaviours of torch's layers, each run with a plain layer and with an accelerated one, and when results are the same.

A behaviour is a function of `use`, which leaves a model alone or accelerates it. What it returns, or the type of
what it raises, has to be the same both times. Shape legend: B sequences, T steps, F features, H hidden units.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import Any, Final, TypeVar, final

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence
from torch.utils import _pytree as pytree

import stretto
from rounding import assert_as_exact

Module = TypeVar("Module", bound=nn.Module)
Function = TypeVar("Function", bound=Callable[..., Any])

F, B, T = 5, 3, 4
SHARED_SIZE: Final = 6
FRESH_SIZES: Final = count(41)
BACKENDS: Final = ("cpp", *(pytest.param(f"auto-{who}", marks=pytest.mark.slow) for who in ("generated", "torch")))
"""What tests accelerate with: "auto" measures as ever, but who is then found to be faster is not left to the clock."""
KINDS: Final[dict[str, type[nn.RNNBase]]] = {"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM}


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Use:
    """What is done to a model before it is used.

    Attributes:
        backend: Of `stretto.accelerate`; None leaves the layers to torch.
        H: The width of its layers.
        exact: Whether it computes in double precision whatever its own.
    """

    backend: str | None
    H: int = SHARED_SIZE
    exact: bool = False

    def __call__(self, model: Module) -> Module:
        """The model, accelerated or as it is."""
        if self.exact:
            model.double().register_forward_pre_hook(lambda _, *given: in_double(given), with_kwargs=True)
        return model if self.backend is None else stretto.accelerate(model, backend=self.backend)  # type: ignore[arg-type]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Behaviour:
    """A function of `use` and perhaps of one more value.

    Args:
        cold: Whether it needs layers of a size that this process has not run before.
        raises: What torch raises, if it refuses.
    """

    run: Callable[..., Any]
    given: tuple[Any, ...] = ()
    cold: bool = False
    raises: type[BaseException] | None = None

    def check(self, backend: str) -> None:
        """Once with the plain layer, once with the accelerated one."""
        size = next(FRESH_SIZES) if self.cold else SHARED_SIZE
        plain, accelerated = Use(backend=None, H=size), Use(backend=backend, H=size)
        if self.raises is not None:
            for use in (plain, accelerated):
                with pytest.raises(self.raises) as caught:
                    self._run(use)
                assert caught.type is self.raises
            return
        wanted = self._run(plain)
        exact = functools.cache(lambda: self._run(Use(backend=None, H=size, exact=True)))
        assert_same(self._run(accelerated), wanted, exact=exact)

    def _run(self, use: Use) -> Any:
        torch.manual_seed(0)
        return self.run(use, *self.given)


@final
@dataclass(frozen=True, slots=True)
class Behaviours:
    """The behaviours of one file, by name."""

    params: list[Any] = field(default_factory=list)

    def add(
        self,
        *,
        each: Mapping[str, Any] | None = None,
        cold: bool = False,
        slow: bool = False,
        raises: type[BaseException] | None = None,
    ) -> Callable[[Function], Function]:
        """A decorator. With `each`, one behaviour for each of these values, which the function gets as well."""

        def added(function: Function) -> Function:
            name = function.__name__.strip("_").replace("_", "-")
            cases = {name: ()} if each is None else {f"{name}-{key}": (value,) for key, value in each.items()}
            marks = [pytest.mark.slow] if slow else []
            for key, given in cases.items():
                behaviour = Behaviour(run=function, given=given, cold=cold, raises=raises)
                self.params.append(pytest.param(behaviour, id=key, marks=marks))
            return function

        return added


def in_double(given: Any) -> Any:
    """The same with its tensors in double precision."""
    return pytree.tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, given)


Exact = Callable[[], Any]
"""What comes of the same calls in double precision."""


def assert_same(found: Any, wanted: Any, *, exact: Exact | None = None) -> None:
    """Tensors of the same class are close, everything else is equal.

    Where sums cancel, single precision differs by more than torch's default tolerance, and neither result is the true
    one: then both are compared with `exact`.
    """
    assert type(found) is type(wanted), (found, wanted)
    if isinstance(wanted, torch.Tensor):
        if type(wanted) not in {torch.Tensor, nn.Parameter}:
            found, wanted = found.as_subclass(torch.Tensor), wanted.as_subclass(torch.Tensor)
        assert found.requires_grad == wanted.requires_grad
        assert found.is_inference() == wanted.is_inference()
        try:
            torch.testing.assert_close(found, wanted, equal_nan=True)
        except AssertionError:
            if wanted.dtype != torch.float32 or exact is None:
                raise
            assert found.dtype == wanted.dtype
            assert_as_exact(found, wanted, exact())
    elif isinstance(wanted, Mapping):
        assert list(found) == list(wanted)
        for key, value in wanted.items():
            assert_same(found[key], value, exact=_part(exact, key))
    elif isinstance(wanted, Sequence) and not isinstance(wanted, str | bytes):
        assert len(found) == len(wanted)
        for index, (one, other) in enumerate(zip(found, wanted, strict=True)):
            assert_same(one, other, exact=_part(exact, index))
    else:
        assert found == wanted


def _part(exact: Exact | None, key: Any) -> Exact | None:
    return None if exact is None else lambda: exact()[key]


def batch(*shape: int, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    """A batch of random numbers whose gradient is asked for; (T, B, F) by default."""
    return torch.randn(*(shape or (T, B, F)), dtype=dtype, requires_grad=True)


def tensors_of(result: Any) -> list[torch.Tensor]:
    """The tensors of floating-point numbers in a layer's result, packed or not."""
    if isinstance(result, PackedSequence):
        return [result.data]
    if isinstance(result, torch.Tensor):
        return [result] if result.is_floating_point() else []
    return [tensor for part in result for tensor in tensors_of(part)]


def loss_of(result: Any) -> torch.Tensor:
    """A loss in which every number of the result counts, and not linearly."""
    return torch.stack([(tensor.square() + tensor).sum() for tensor in tensors_of(result)]).sum()


def gradients(model: nn.Module) -> dict[str, torch.Tensor | None]:
    """Copies of what `backward` has left, by the parameters' names."""
    return {name: None if p.grad is None else p.grad.clone() for name, p in model.named_parameters()}


def learn(model: nn.Module, *given: Any) -> tuple[Any, ...]:
    """The result of one call, and the gradients of its loss by parameters and by the tensors that were given."""
    result = model(*given)
    loss_of(result).backward()
    return result, gradients(model), [tensor.grad for tensor in tensors_of(given) if tensor.is_leaf]


def update(model: nn.Module, *given: Any, times: int = 2) -> list[torch.Tensor]:
    """The parameters after some updates, preceded by the losses on the way."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    losses = []
    for _ in range(times):
        optimizer.zero_grad()
        loss = loss_of(model(*given))
        loss.backward()
        optimizer.step()
        losses.append(loss)
    return [*losses, *model.parameters()]
