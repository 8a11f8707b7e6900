"""A model as one of several workers' copies, which takes part in every exchange, with or without a share."""

import inspect
from typing import Any, final

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from stretto.distributed.world import World


@final
class Replica(nn.Module):
    """Runs a model, or, for an empty share, gives a zero that depends on every parameter.

    Args:
        model: The model, called with a batch.
    """

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, batch: Any) -> torch.Tensor:
        """What the model makes of the batch; a zero for None."""
        if batch is not None:
            output: torch.Tensor = self.model(batch)
            return output
        zeros = [parameter.sum() * 0.0 for parameter in self.model.parameters() if parameter.requires_grad]
        return torch.stack(zeros).sum()


def replicated(model: nn.Module, world: World) -> nn.Module:
    """The model as a `Replica`, whose gradients are averaged over workers if there are several."""
    replica = Replica(model)
    if world.size == 1 or not any(parameter.requires_grad for parameter in model.parameters()):
        return replica
    # Buffers are the same at the start, and nothing of ours changes them; newer releases of torch call it otherwise.
    names = inspect.signature(DistributedDataParallel).parameters
    quiet: dict[str, Any] = {"forward_sync_buffers" if "forward_sync_buffers" in names else "broadcast_buffers": False}
    return DistributedDataParallel(replica, process_group=world.group, gradient_as_bucket_view=True, **quiet)
