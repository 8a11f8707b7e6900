"""Losses scaled so that workers, and steps that are accumulated, add up to the gradient of one worker."""

import torch
from torch import distributed


def _size(group: "distributed.ProcessGroup | None") -> int:
    running = distributed.is_available() and distributed.is_initialized()
    return distributed.get_world_size(group) if running else 1


def global_count(
    count: float, *, device: torch.device | str = "cpu", group: "distributed.ProcessGroup | None" = None
) -> float:
    """The sum of `count` over all workers; every one of them must ask.

    Args:
        count: Elements (sequences, labels or steps) that this worker's loss is a sum over.
        device: Where the number travels: "cuda" for NCCL.
        group: The workers; all of them by default.
    """
    if _size(group) == 1:
        return float(count)
    total = torch.tensor(float(count), dtype=torch.float64, device=device)
    distributed.all_reduce(total, group=group)
    return float(total)


def scale_loss(
    loss_sum: torch.Tensor,
    count: float,
    *,
    total: float | None = None,
    group: "distributed.ProcessGroup | None" = None,
) -> torch.Tensor:
    """The loss to back-propagate under `DistributedDataParallel`: exact, whatever each worker's share is.

    DDP averages gradients over workers as if all had equally much. With this loss the average is the gradient of the
    mean over all elements of all workers: what one worker would get for everything together.

    Args:
        loss_sum: The summed, not averaged, loss of this worker's batch; zero, but depending on the parameters, for an
            empty share.
        count: Elements (sequences, labels or steps) it is a sum over; 0 for an empty share.
        total: Elements of all workers, and of all steps that are accumulated into one update, if that is known; by
            default the sum of `count` over workers, for which every worker must call.
        group: The workers; all of them by default.

    Example:
        >>> loss = torch.tensor([1.0, 3.0]).sum()
        >>> scale_loss(loss, 2)
        tensor(2.)
    """
    if total is None:
        total = global_count(count, device=loss_sum.device if loss_sum.is_cuda else "cpu", group=group)
    return loss_sum * (_size(group) / max(total, 1.0))
