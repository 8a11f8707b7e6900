"""Squared norms of gradients, as an optimiser sees them, and of each worker's own before they are averaged."""

import dataclasses
import math
from collections.abc import Iterable, Sequence
from typing import Any, Final, final

import torch
from torch import distributed
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from stretto.distributed.world import World
from stretto.errors import StrettoError

DEBIASED: Final = ("max_exp_avg_sq", "exp_avg_sq")
"""Averages of squared gradients that begin at zero, as the Adam family and LAMB keep them."""
SUMMED: Final = ("square_avg", "sum")
"""Averages or sums of squared gradients that are used as they are: RMSprop, Adagrad."""
ADAPTIVE: Final = ("betas", "alpha")
"""Settings of optimisers that will have such averages after their first step."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Parts:
    """The independent parts of one update: what a `NoiseMeter` takes.

    Attributes:
        sizes: Sequences of each part.
        squares: Squared norms of the parts' mean gradients.
        square_of_mean: Squared norm of the gradient of the whole update, before clipping.
    """

    sizes: tuple[float, ...]
    squares: tuple[float, ...]
    square_of_mean: float


def squared_norm(parameters: Iterable[torch.Tensor], optimizer: Optimizer | None = None) -> float:
    """The squared norm of the gradients, in the units that the optimiser steps in.

    For an optimiser that divides each element by a root mean square v of earlier gradients (Adam, AdamW, LAMB,
    RMSprop, Adagrad), each element of the gradient is divided by sqrt(v) + eps, v without its bias towards zero. The
    trust ratios of LAMB, one number a tensor, are left out. For SGD and LARS, and without an optimiser, the norm is
    the plain one.

    Args:
        parameters: Whose gradients; those without one count as zero. They must be the ones the optimiser has.
        optimizer: The optimiser, before its step.

    Returns:
        The squared norm, summed in double precision. NaN if the optimiser has such averages but took no step yet: a
        plain norm must not be mixed with those that follow.
    """
    held = [parameter for parameter in parameters if parameter.grad is not None]
    return float(square_of([p.grad for p in held if p.grad is not None], denominators(held, optimizer)))


def denominators(parameters: Sequence[torch.Tensor], optimizer: Optimizer | None) -> list[torch.Tensor] | None:
    """What an optimiser divides the gradient of each parameter by; None if by nothing, NaN before its first step.

    An optimiser may hold the gates of a packed weight in its place, each a parameter with `packed` and `start`.

    Raises:
        StrettoError: If it divides the gradients of some, and does not have others.
    """
    if optimizer is None:
        return None
    held: dict[int, list[tuple[Any, dict[str, Any]]]] = {}
    for group in optimizer.param_groups:
        for one in group["params"]:
            held.setdefault(id(getattr(one, "packed", one)), []).append((one, group))
    averages, corrections, small, divided, missing = [], [], [], False, []
    for parameter in parameters:
        places = sorted(held.get(id(parameter), []), key=lambda place: getattr(place[0], "start", 0))
        found = [_average(one, optimizer.state.get(one, {}), group) for one, group in places]
        known = [average for average, _ in found if average is not None]
        missing += [] if places else [tuple(parameter.shape)]
        divided |= bool(known)
        averages.append(torch.cat(known) if len(known) > 1 else known[0] if known else torch.ones_like(parameter))
        corrections.append(found[0][1] if known else 1.0)
        small.append(float(places[0][1].get("eps", 0.0)) if known else 0.0)
    if not divided:
        return None
    if missing:
        raise StrettoError(
            f"the optimiser {type(optimizer).__name__} divides gradients, and has no parameter of shape {missing[0]} "
            "that is to be measured with it",
            fix="Measure those parameters that the optimiser was made with.",
        )
    roots = torch._foreach_div(averages, corrections)
    torch._foreach_sqrt_(roots)
    torch._foreach_add_(roots, small)
    return list(roots)


def _average(
    parameter: torch.Tensor, state: dict[str, Any], group: dict[str, Any]
) -> tuple[torch.Tensor | None, float]:
    """The average of a parameter's squared gradients, and what to divide it by."""
    if not state and any(name in group for name in ADAPTIVE):
        return torch.full_like(parameter, math.nan), 1.0
    for name in DEBIASED:
        if torch.is_tensor(state.get(name)):
            # Some optimisers count the steps of a group, not of each parameter.
            step = float(state.get("step", group.get("step", math.inf)))
            return state[name], 1.0 - float(group["betas"][1]) ** step if step else math.nan
    for name in SUMMED:
        if torch.is_tensor(state.get(name)):
            return state[name], 1.0
    return None, 1.0


def square_of(gradients: Sequence[torch.Tensor], divided_by: Sequence[torch.Tensor] | None) -> torch.Tensor:
    """The squared norm of gradients, each divided by its denominators if there are any: a tensor, on their device."""
    if not gradients:
        return torch.zeros((), dtype=torch.float64)
    if divided_by is not None:
        dense = [gradient.to_dense() for gradient in gradients]
        gradients = list(torch._foreach_div(dense, list(divided_by)))
    # Rows that occur twice in a sparse gradient must be added up before they are squared.
    gradients = [gradient.coalesce().values() if gradient.is_sparse else gradient for gradient in gradients]
    norms = torch._foreach_norm(gradients, 2.0, dtype=_wide(gradients))
    return torch.stack([norm.to(gradients[0].device) for norm in norms]).double().square().sum()


def _wide(gradients: Sequence[torch.Tensor]) -> torch.dtype | None:
    """Half precision is summed in single; None is the precision of the gradients."""
    return torch.float32 if any(gradient.dtype in (torch.float16, torch.bfloat16) for gradient in gradients) else None


@final
class LocalNorm:
    """Reads the squared norm of this worker's own gradient before `DistributedDataParallel` averages it.

    It is read bucket by bucket, as gradients are exchanged, and costs one pass over them. Steps whose gradients are
    accumulated under `no_sync` count as one. A model can have one hook of communication only, and this one is it.

    Args:
        model: The model, before its first backward pass.
        optimizer: As for `squared_norm`.
        group: The workers; those of the model by default.

    Attributes:
        is_on: Whether to read; switch it off for updates that are not measured.

    Example:
        replica = DistributedDataParallel(model)
        local = LocalNorm(replica)
        replica(x).sum().backward()
        local.take()    # the squared norm of this worker's own gradient
    """

    def __init__(
        self,
        model: DistributedDataParallel,
        *,
        optimizer: Optimizer | None = None,
        group: "distributed.ProcessGroup | None" = None,
    ) -> None:
        self.is_on = True
        self._optimizer = optimizer
        self._group = group if group is not None else model.process_group
        self._squares: list[torch.Tensor] = []
        model.register_comm_hook(self, _read)

    def take(self) -> float:
        """The squared norm since this was last asked, NaN if nothing was read; call it after the backward pass."""
        squares, self._squares = self._squares, []
        return float(torch.stack(squares).sum()) if squares else math.nan


def _read(
    state: LocalNorm,
    bucket: distributed.GradBucket,  # type: ignore[name-defined]
) -> torch.futures.Future[torch.Tensor]:
    """Note the norm of a bucket, then average it over workers as ever."""
    if state.is_on:
        divided_by = denominators(bucket.parameters(), state._optimizer)
        state._squares.append(square_of(bucket.gradients(), divided_by))
    return default_hooks.allreduce_hook(state._group, bucket)


def parts_of_ranks(
    world: World, *, num_sequences: float, square: float, square_of_mean: float, scale: float | None = None
) -> Parts | None:
    """The workers' shares of an update as its parts; every worker must ask.

    Three numbers a worker are summed: the estimate needs the sum of n_i |x_i|^2 over workers, not each of them. What
    is returned are as many equal parts with the same sum, so it gives the estimate of the real ones.

    Args:
        world: The workers.
        num_sequences: Of this worker; 0 for an empty share.
        square: Squared norm of this worker's own gradient, as `LocalNorm.take` tells it.
        square_of_mean: Squared norm of the gradient that all workers step with, before clipping.
        scale: What the sum of the workers' gradients is multiplied by to give that one; 1/world.size, the average that
            `DistributedDataParallel` takes, by default.

    Returns:
        The parts; None if fewer than two workers had sequences.
    """
    own = [num_sequences, square / num_sequences, 1.0] if num_sequences > 0 else [0.0] * 3
    total, weighted, count = world.all_reduce_sum(own)
    if count < 2:
        return None
    factor = 1.0 / world.size if scale is None else scale
    shared = round(count)
    return Parts(
        sizes=(total / shared,) * shared,
        squares=(weighted * total * factor**2,) * shared,
        square_of_mean=square_of_mean,
    )
