"""The gradients of the parts of one update, computed one after the other and kept apart until they are summed."""

from collections.abc import Iterable
from typing import final

import torch
from torch.optim import Optimizer

from stretto.distributed import Parts, denominators, square_of
from stretto.large_batch.noise import scaled_parts


@final
class SeparateParts:
    """Takes the norms of parts of an update that are all computed before anything else is.

    Cheaper than `GradientParts`, which finds each part again in a sum: a gradient is taken out of `.grad` when it is
    there, so that the next is not added to it, and all are added up in the end. That costs a pass over each, and one
    over the sum, and no copy.

    Args:
        parameters: Whose gradients.
        optimizer: As for `squared_norm`.
    """

    def __init__(self, parameters: Iterable[torch.Tensor], *, optimizer: Optimizer | None = None) -> None:
        self._parameters = [parameter for parameter in parameters if parameter.requires_grad]
        self._optimizer = optimizer
        self.begin()

    def begin(self) -> None:
        """Forget an update that is not finished."""
        self._sizes: list[int] = []
        self._gradients: list[list[torch.Tensor | None]] = []

    def set_aside(self, num_sequences: int) -> None:
        """Take the gradient of a part of so many sequences out of `.grad`."""
        self._sizes.append(num_sequences)
        self._gradients.append([parameter.grad for parameter in self._parameters])
        for parameter in self._parameters:
            parameter.grad = None

    @torch.no_grad()
    def put_back(self, *, scale: float = 1.0) -> Parts | None:
        """Leave the sum of all parts in `.grad`, and begin the next update; None if fewer than two had sequences.

        Args:
            scale: What the gradient is multiplied by later: 1/count for losses that are sums.
        """
        sizes, gradients = self._sizes, self._gradients
        divided_by = denominators(self._parameters, self._optimizer)
        squares = [self._square(each, divided_by) for each in gradients]
        for parameter, *own in zip(self._parameters, *gradients, strict=True):
            held = [gradient for gradient in own if gradient is not None]
            parameter.grad = held[0] if held else None
            for gradient in held[1:]:
                held[0].add_(gradient)
        whole = self._square([parameter.grad for parameter in self._parameters], divided_by)
        self.begin()
        return scaled_parts(sizes, squares, whole, scale=scale)

    def _square(self, gradients: list[torch.Tensor | None], divided_by: list[torch.Tensor] | None) -> float:
        held = [at for at, gradient in enumerate(gradients) if gradient is not None]
        below = None if divided_by is None else [divided_by[at] for at in held]
        return float(square_of([gradient for gradient in gradients if gradient is not None], below))
