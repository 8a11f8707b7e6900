"""Exact gradients over ranks, whatever share of a batch each rank has, none included.

DDP averages gradients as if all ranks had equally much. So losses are summed, not averaged, and divided once by the
number of elements on all ranks: the result is the gradient that one process would get for everything together.
"""

import inspect
from typing import Any, final

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from stretto.checks import check_float, check_kind
from stretto.distributed.world import World
from stretto.solvers import count_ranks


@final
class Replica(nn.Module):
    """Runs a model, or, for an empty share, returns a zero that depends on every parameter."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> torch.Tensor:
        """The model's output for the batch; a zero for None."""
        if batch is not None:
            output: torch.Tensor = self.model(batch)
            return output
        zeros = [parameter.sum() * 0.0 for parameter in self.model.parameters() if parameter.requires_grad]
        return torch.stack(zeros).sum()


def replicate(model: nn.Module, world: World) -> nn.Module:
    """The model as a `Replica`, with its gradients averaged over ranks if there are several."""
    replica = Replica(model)
    if world.size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return replica
    # Buffers are the same at the start, and nothing of ours changes them. The argument's name depends on the release.
    names = inspect.signature(DistributedDataParallel).parameters
    quiet: dict[str, Any] = {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False}
    return DistributedDataParallel(replica, process_group=world.group, gradient_as_bucket_view=True, **quiet)


def global_count(
    count: float, *, device: torch.device | str = "cpu", group: "distributed.ProcessGroup | None" = None
) -> float:
    """The sum of `count` over all ranks, each of which must call.

    Args:
        count: Elements (sequences, labels or steps) that this rank's loss is a sum over.
        device: Where the number is sent from: "cuda" for NCCL.
        group: The ranks; torch's default group if left out.
    """
    check_float(count, name="count")
    return float(World(size=count_ranks(group), device=str(device), group=group).all_reduce_sum([count])[0])


def scale_loss(
    loss_sum: torch.Tensor,
    count: float,
    *,
    total: float | None = None,
    group: "distributed.ProcessGroup | None" = None,
) -> torch.Tensor:
    """The loss to back-propagate under `DistributedDataParallel`: exact, whatever each rank's share is.

    The average that DDP takes is then the gradient of the mean over all elements of all ranks.

    Args:
        loss_sum: The summed, not averaged, loss of this rank's batch; zero, but depending on the parameters, for an
            empty share.
        count: Elements (sequences, labels or steps) it is a sum over; 0 for an empty share.
        total: Elements of all ranks, and of all batches accumulated into one update, if that is known; by default the
            sum of `count` over ranks, for which every rank must call.
        group: The ranks; torch's default group if left out.

    Examples:
        >>> loss = torch.tensor([1.0, 3.0]).sum()
        >>> scale_loss(loss, 2)
        tensor(2.)
    """
    check_kind(loss_sum, torch.Tensor, name="loss_sum", owner="scale_loss", fix="Give the summed loss, as a tensor.")
    if total is None:
        total = global_count(count, device=loss_sum.device if loss_sum.is_cuda else "cpu", group=group)
    return loss_sum * (count_ranks(group) / max(total, 1.0))
