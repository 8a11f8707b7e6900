"""Draws that depend on values, as arithmetic on draws that do not: those can be made for all steps before a loop.

    multinomial(p)     argmax(p / exponential noise)       as PyTorch has it, too
    bernoulli(p)       uniform noise < p
    normal(m, s)       m + s * normal noise

Gradients stop at each of them, as they do in PyTorch.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, Final

import torch
from torch.distributions import Distribution

aten = torch.ops.aten


def _multinomial(weights: Any, num_samples: int, replacement: bool = False) -> Any:
    weights = aten.detach.default(weights)
    if num_samples > 1 and replacement:
        sizes = [*weights.shape[:-1], num_samples, weights.shape[-1]]
        weights = aten.expand.default(aten.unsqueeze.default(weights, -2), sizes)
        return _multinomial(weights, 1)[..., 0]
    noise = torch.empty(weights.shape, dtype=weights.dtype, device=weights.device).exponential_()
    keys = weights / noise
    return keys.argmax(-1, keepdim=True) if num_samples == 1 else keys.topk(num_samples, -1).indices


def _bernoulli(like: torch.Tensor, chance: Any = None) -> Any:
    chance = like if chance is None else chance
    chance = aten.detach.default(chance) if isinstance(chance, torch.Tensor) else chance
    noise = torch.rand_like(like, dtype=like.dtype if like.dtype.is_floating_point else torch.float32)
    return (noise < chance).to(like.dtype)


def _normal(mean: Any, std: Any = 1.0) -> Any:
    sizes = torch.broadcast_shapes(*(item.shape for item in (mean, std) if isinstance(item, torch.Tensor)))  # type: ignore[no-untyped-call]
    mean, std = (aten.detach.default(item) if isinstance(item, torch.Tensor) else item for item in (mean, std))
    like = mean if isinstance(mean, torch.Tensor) else std
    return torch.randn(sizes, dtype=like.dtype, device=like.device) * std + mean


DRAWS: Final[dict[str, Callable[..., Any]]] = {
    "multinomial": _multinomial,
    "bernoulli": _bernoulli,
    "normal": _normal,
}
"""Operators by name. Those that are given no tensor depend on nothing, and need no rule."""


@contextlib.contextmanager
def without_validation() -> Iterator[None]:
    """Distributions that are made inside do not read their arguments to check them, which changes no result."""
    earlier = Distribution._validate_args
    Distribution.set_default_validate_args(False)
    try:
        yield
    finally:
        Distribution.set_default_validate_args(earlier)
