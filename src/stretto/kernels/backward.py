"""What the backward passes of all operators here have in common."""

import contextlib
import contextvars
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final

import torch

_wants_weights: Final = contextvars.ContextVar("wants_weights", default=True)


@contextlib.contextmanager
def without_weights() -> Iterator[None]:
    """Backward passes inside leave out gradients of weights: autograd cannot tell an operator that they are unused."""
    token = _wants_weights.set(False)
    try:
        yield
    finally:
        _wants_weights.reset(token)


def wants_weights() -> bool:
    """Whether gradients of weights are to be computed."""
    return _wants_weights.get()


def is_transformed(tensor: torch.Tensor | None) -> bool:
    """Whether a gradient is more than its numbers, so that only torch's operators can take it.

    It may stand for several, as in `torch.autograd.grad(is_grads_batched=True)` and under `torch.vmap`, and then has no
    memory, or have a derivative of its own, in forward mode or under `torch.func`.
    """
    if tensor is None:
        return False
    functorch, forward_ad = torch._C._functorch, torch.autograd.forward_ad
    if functorch.peek_interpreter_stack() is not None or functorch.is_legacy_batchedtensor(tensor):
        return True
    if forward_ad._current_level < 0:
        return False
    return forward_ad.unpack_dual(tensor).tangent is not None  # type: ignore[no-untyped-call]


def _is_differentiated() -> bool:
    """Whether a transform of `torch.func` that differentiates is under way, whose tensors autograd does not follow."""
    functorch = torch._C._functorch
    return any(level.key() is not functorch.TransformType.Vmap for level in functorch.get_interpreter_stack() or ())


def _pull_back(
    run: Callable[[list[Any]], list[torch.Tensor]],
    tensors: Sequence[torch.Tensor | None],
    cotangents: Sequence[torch.Tensor | None],
    needed: Sequence[bool],
) -> list[torch.Tensor | None]:
    """What `differentiate_by_torch` does, as one more transform."""
    moving = [index for index, needs in enumerate(needed) if needs]

    def linked(*given: torch.Tensor) -> tuple[torch.Tensor, ...]:
        replaced = dict(zip(moving, given, strict=True))
        made = run([replaced.get(index, tensor) for index, tensor in enumerate(tensors)])
        return tuple(t for t, d in zip(made, cotangents, strict=True) if d is not None)

    pull = torch.func.vjp(linked, *(tensors[index] for index in moving))[1]
    found = dict(zip(moving, pull(tuple(d for d in cotangents if d is not None)), strict=True))
    return [found.get(index) for index in range(len(needed))]


def laid_out_like(gradient_KN: torch.Tensor, weight_KN: torch.Tensor) -> torch.Tensor:
    """A gradient laid out as its weight is: the parameter behind a transposed weight gets a contiguous gradient."""
    if gradient_KN.dim() != 2 or weight_KN.stride(0) != 1 or weight_KN.is_contiguous():
        return gradient_KN
    return gradient_KN.t().contiguous().t()


def differentiate(
    pairs: Iterable[tuple[torch.Tensor, torch.Tensor | None]],
    wanted: Sequence[torch.Tensor | None],
    *,
    create_graph: bool = False,
) -> list[torch.Tensor | None]:
    """Gradients of the wanted tensors, from tensors and the gradients that arrive at them; the graph is kept.

    A wanted tensor that does not require a gradient, or that nothing depends on, gets None.
    """
    given = [(made, d) for made, d in pairs if made.requires_grad and d is not None]
    moving = [tensor for tensor in wanted if tensor is not None and tensor.requires_grad]
    if not given or not moving:
        return [None] * len(wanted)
    made, arriving = zip(*given, strict=True)
    found = iter(
        torch.autograd.grad(made, moving, arriving, retain_graph=True, create_graph=create_graph, allow_unused=True)
    )
    return [next(found) if tensor is not None and tensor.requires_grad else None for tensor in wanted]


def differentiate_by_torch(
    run: Callable[[list[Any]], list[torch.Tensor]],
    tensors: Sequence[torch.Tensor | None],
    cotangents: Sequence[torch.Tensor | None],
    needed: Sequence[bool],
) -> list[torch.Tensor | None]:
    """The gradient of an operator by torch's own operators, which are differentiable and know batched gradients.

    Args:
        run: Computes the operator's results from its inputs under autograd.
        tensors: Its inputs.
        cotangents: Gradients of its results.
        needed: Which inputs need a gradient.
    """
    if _is_differentiated():
        return _pull_back(run, tensors, cotangents, needed)
    again = torch.is_grad_enabled()
    with torch.enable_grad():
        # Aliases: what leads from one of these tensors to another outside of the operator is not followed here.
        own = [None if tensor is None else tensor.view_as(tensor) for tensor in tensors]
        found = differentiate(zip(run(own), cotangents, strict=True), own, create_graph=again)
    return [d if needs else None for d, needs in zip(found, needed, strict=True)]
