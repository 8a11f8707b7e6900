"""Functions with a custom gradient, `torch.autograd.Function`, as one node of a step.

The node's operator calls the function. Its forward is recorded too, to know what it does to rows and shapes. When the
loop is differentiated, autograd runs the function and then its backward, both under the recorder: the backward step has
the operators of the custom gradient, and whatever the forward saved for it.
"""

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Final, final

import torch

from stretto.checks import check_kind
from stretto.errors import StrettoError
from stretto.graph.node import Node

Recorded = Callable[[Any, Callable[[], Any], tuple[Any, ...]], Any]

_recorder: Final[ContextVar[Recorded | None]] = ContextVar("recorder", default=None)
_lock: Final = threading.Lock()
_users = 0


@final
@dataclass(frozen=True, slots=True)
class Opaque:
    """An argument that is neither a tensor nor a number."""

    value: Any

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Opaque):
            return NotImplemented
        if self.value is other.value:
            return True
        try:
            return type(self.value) is type(other.value) and bool(self.value == other.value)
        except (RuntimeError, ValueError, TypeError):
            return False

    def __hash__(self) -> int:
        return id(type(self.value))


@final
@dataclass(frozen=True)
class CustomGradient:
    """The operator of such a node: two are equal if they call the same function."""

    function: Any
    inner: tuple[Node, ...] = field(compare=False, repr=False)
    """The operators of its forward, as they were recorded."""
    results: tuple[Node, ...] = field(compare=False, repr=False)

    @property
    def __name__(self) -> str:
        return f"{self.function.__name__} (custom gradient)"

    def __call__(self, *args: Any) -> Any:
        """Run it."""
        return self.function.apply(*(arg.value if isinstance(arg, Opaque) else arg for arg in args))


class _StraightThrough(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(hard: torch.Tensor, soft: torch.Tensor) -> torch.Tensor:
        return hard.to(soft.dtype, copy=True)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is kept."""

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:  # noqa: ARG004
        return None, gradients[0]


def straight_through(hard: torch.Tensor, soft: torch.Tensor) -> torch.Tensor:
    """The value of `hard` with the gradient of `soft`.

    For steps, rounding, quantisation and samples, whose own gradient is zero: `straight_through(v > 0, v.sigmoid())` is
    a spike that learns like a sigmoid. Compiled inside cells.

    Args:
        hard: What comes out, to the last bit, as a tensor of the dtype of `soft`. It gets no gradient.
        soft: What gets the gradient; of the same shape.

    Raises:
        StrettoError: The shapes differ.
    """
    for name, given in (("hard", hard), ("soft", soft)):
        check_kind(given, torch.Tensor, name=name, owner="straight_through", fix="Give two tensors of the same shape.")
    if hard.shape != soft.shape:
        raise StrettoError(
            f"straight_through was given shapes {tuple(hard.shape)} and {tuple(soft.shape)}",
            fix="Give two tensors of the same shape.",
        )
    made: torch.Tensor = _StraightThrough.apply(hard, soft)  # type: ignore[no-untyped-call]
    return made


@contextlib.contextmanager
def intercept_calls(recorded: Recorded) -> Iterator[None]:
    """Calls of such functions by this thread go to `recorded(function, run, arguments)`.

    Functions of TorchScript run operator by operator, as in their graph: once they have been called, parts of them are
    fused into operators with custom gradients, too. No hook of torch sees either kind, so `Function.apply` and
    TorchScript's `__call__` are patched meanwhile; calls by other threads are passed on.
    """
    global _users  # noqa: PLW0603 - how many traces run at once
    with _lock:
        _users += 1
        if _users == 1:
            _originals.extend((kind, name, kind.__dict__[name]) for kind, name in _INTERCEPTED)
            for kind, name, original in _originals:
                is_function = kind is torch.autograd.Function
                setattr(
                    kind,
                    name,
                    classmethod(_intercept_apply(original.__func__)) if is_function else _run_unoptimized(original),
                )
    token = _recorder.set(recorded)
    try:
        yield
    finally:
        _recorder.reset(token)
        with _lock:
            _users -= 1
            if _users == 0:
                for kind, name, original in _originals:
                    setattr(kind, name, original)
                _originals.clear()


_INTERCEPTED: Final[tuple[tuple[Any, str], ...]] = (
    (torch.autograd.Function, "apply"),
    (torch._C.ScriptFunction, "__call__"),
    (torch._C.ScriptMethod, "__call__"),
)
_CALL: Final[Any] = torch._C.ScriptFunction.__call__
_originals: Final[list[tuple[Any, str, Any]]] = []


def _intercept_apply(original: Callable[..., Any]) -> Callable[..., Any]:
    def apply(function: Any, *args: Any, **kwargs: Any) -> Any:
        recorded = _recorder.get()
        if recorded is None or kwargs:
            return original(function, *args, **kwargs)
        # Functions that it calls are not intercepted: autograd differentiates the outer one as a whole.
        token = _recorder.set(None)
        try:
            return recorded(function, lambda: original(function, *args), args)
        finally:
            _recorder.reset(token)

    return apply


def _run_unoptimized(original: Callable[..., Any]) -> Callable[..., Any]:
    def call(script: Any, *args: Any, **kwargs: Any) -> Any:
        if _recorder.get() is None:
            return original(script, *args, **kwargs)
        # A copy, for which nothing was optimised yet; a method's has its module as the first argument.
        copy = torch._C._create_function_from_graph(script.name, script.inlined_graph.copy())
        owner = (script.owner,) if isinstance(script, torch._C.ScriptMethod) else ()
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            return _CALL(copy, *owner, *args, **kwargs)

    return call


def foreign_inputs(inner: Sequence[Node], arguments: Sequence[Node]) -> list[Node]:
    """Nodes that the forward reads although they are not among its arguments."""
    own = {*inner, *arguments}
    found = [node for node in inner if node.op is None]
    return found + [item for node in inner for item in node.inputs if item not in own]
