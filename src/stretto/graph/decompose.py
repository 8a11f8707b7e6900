"""Operators whose gradient mixes what stays in the backward loop with what is deferred, written in simpler ones."""

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch


class _LayerNorm(torch.autograd.Function):
    """Layer norm, with its gradient in the form that reads least."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, dims: list[int], eps: float) -> torch.Tensor:
        centred = x - x.mean(dims, keepdim=True)
        scale = torch.rsqrt((centred * centred).mean(dims, keepdim=True) + eps)
        normal = centred * scale
        ctx.save_for_backward(normal, scale)
        ctx.dims = dims
        return normal

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        normal, scale = ctx.saved_tensors
        (d,) = gradients
        mean = d.mean(ctx.dims, keepdim=True)
        along = (d * normal).mean(ctx.dims, keepdim=True)
        return (d - mean - normal * along) * scale, None, None


def native_layer_norm(
    x: torch.Tensor, shape: Sequence[int], weight: torch.Tensor | None, bias: torch.Tensor | None, eps: float
) -> tuple[torch.Tensor, None, None]:
    """Layer norm over the last `len(shape)` dimensions; mean and deviation are not given out."""
    y: torch.Tensor = _LayerNorm.apply(x, list(range(-len(shape), 0)), eps)  # type: ignore[no-untyped-call]
    if weight is not None:
        y = y * weight
    # As the operator itself, it leaves its result in order in memory.
    return (y if bias is None else y + bias).contiguous(), None, None


DECOMPOSED: Final[dict[str, Callable[..., Any]]] = {"native_layer_norm": native_layer_norm}
