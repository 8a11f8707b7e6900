"""How sharply the loss bends along its gradient: what a learning rate is held against."""

import math
from collections.abc import Callable, Sequence

import torch

from stretto.distributed import square_of
from stretto.errors import StrettoError


@torch.no_grad()
def local_curvature(
    gradient_at: Callable[[], Sequence[torch.Tensor]],
    parameters: Sequence[torch.Tensor],
    *,
    gradients: Sequence[torch.Tensor] | None = None,
    distance: float | None = None,
) -> float:
    """The local Lipschitz constant of the gradient along itself, L(x, g) ~ |g(x + e g/|g|) - g(x)| / e.

    On a quadratic with Hessian A it is |A g| / |g|, at most the largest eigenvalue. Plain gradient descent at rate r
    overshoots along its step where r L > 2. It peaks early in training, which is what warm-up waits for (You et al.
    2019, arXiv 1901.08256). It costs one or two gradients of a batch, which may be small. For optimisers that divide
    gradients, such as Adam, r L says nothing.

    Args:
        gradient_at: Gives the gradient of each parameter at the weights as they are, always of the same batch and with
            the same random draws. It may hand out the same tensors every time.
        parameters: The weights. They are moved and put back bit for bit, also if `gradient_at` fails.
        gradients: The gradient at the weights as they are, if it is known already.
        distance: e; by default the root of the precision times 1 + |x|, |x| the norm of all weights.

    Returns:
        The curvature; NaN where the gradient is zero or no number, since there is no direction to look along.

    Raises:
        StrettoError: If gradients do not go with parameters, or the distance is too small to move the weights.

    Example:
        >>> x = torch.tensor([3.0, 4.0], dtype=torch.float64)
        >>> round(local_curvature(lambda: [5.0 * x], [x]), 6)
        5.0
    """
    weights = list(parameters)
    if not weights:
        raise StrettoError("there are no parameters to look along", fix="Give those that are trained.")
    first = [gradient.detach().clone() for gradient in (gradient_at() if gradients is None else gradients)]
    found, wanted = ([tuple(tensor.shape) for tensor in tensors] for tensors in (first, weights))
    if found != wanted:
        raise StrettoError(
            f"gradients have the shapes {found}, parameters {wanted}",
            fix="Give one gradient a parameter, in the same order.",
        )
    norm = math.sqrt(float(square_of(first, None)))
    if not math.isfinite(norm) or norm == 0.0:
        return math.nan
    if distance is None:
        precision = max(torch.finfo(weight.dtype).eps for weight in weights)
        distance = math.sqrt(precision) * (1.0 + math.sqrt(float(square_of(weights, None))))
    kept = [weight.clone() for weight in weights]
    try:
        torch._foreach_add_(weights, first, alpha=distance / norm)
        if all(torch.equal(weight, copy) for weight, copy in zip(weights, kept, strict=True)):
            raise StrettoError(
                f"a distance of {distance:.3g} does not move the weights", fix="Give a larger distance, or none."
            )
        second = [gradient.detach() for gradient in gradient_at()]
        gap = torch._foreach_sub(second, first)
        return math.sqrt(float(square_of(gap, None))) / distance
    finally:
        torch._foreach_copy_(weights, kept)
