"""The parts of an update, whose gradients tell how noisy they are: the shares of workers, batches, or halves of one."""

from typing import final

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from stretto.distributed import LocalNorm, Parts, World, parts_of_ranks, squared_norm
from stretto.large_batch import GradientParts, SeparateParts


@final
class NoiseParts:
    """Takes updates apart, now and then.

    With several workers the parts are their shares: each one's own gradient is read before it is averaged, which costs
    a pass over it. One worker alone compares the batches that it accumulates, or the halves of a single one, which are
    computed one after the other.

    Args:
        replica: The model as one of the workers' copies.
        optimizer: Gradients are measured in the units that it steps in.
        world: The workers.
    """

    def __init__(self, replica: nn.Module, optimizer: Optimizer, *, world: World) -> None:
        self._optimizer, self._world = optimizer, world
        self._weights = [parameter for parameter in replica.parameters() if parameter.requires_grad]
        self._is_on = False
        self._local: LocalNorm | None = None
        self._parts: GradientParts | None = None
        self._halves = SeparateParts(self._weights, optimizer=optimizer)
        self._is_halved = False
        if isinstance(replica, DistributedDataParallel):
            self._local = LocalNorm(replica, optimizer=optimizer)
            self._local.is_on = False
        elif world.size == 1:
            self._parts = GradientParts(self._weights, optimizer=optimizer)

    @property
    def wants_halves(self) -> bool:
        """Whether a batch that is an update by itself must be taken apart."""
        return self._is_on and self._parts is not None

    def begin(self, *, is_on: bool) -> None:
        """Begin an update, and take it apart or not."""
        self._is_on, self._is_halved = is_on, False
        self._halves.begin()
        if self._local is not None:
            self._local.is_on = is_on
        if self._parts is not None and is_on:
            self._parts.begin()

    def add(self, num_sequences: int) -> None:
        """Note that the gradient of so many sequences was added."""
        if self._is_on and self._parts is not None:
            self._parts.add(num_sequences)

    def set_aside(self, num_sequences: int) -> None:
        """Take the gradient of a half out of `.grad`; `take` puts both back."""
        self._is_halved = True
        self._halves.set_aside(num_sequences)

    def take(self, *, num_sequences: float, count: float) -> Parts | None:
        """The parts of the update, when its gradient is there and not scaled; None if there are none to compare.

        Args:
            num_sequences: Of this worker.
            count: Elements of all workers, by which the summed gradient is to be divided.
        """
        if not self._is_on:
            return None
        scale = 1.0 / max(1.0, count)
        if self._is_halved:
            return self._halves.put_back(scale=scale)
        if self._parts is not None:
            return self._parts.take(scale=scale)
        if self._local is None:
            return None
        return parts_of_ranks(
            self._world,
            num_sequences=num_sequences,
            square=self._local.take(),
            # What is there is the average over workers.
            square_of_mean=squared_norm(self._weights, self._optimizer) * (self._world.size * scale) ** 2,
            scale=scale,
        )
