"""What N workers would reach, from the measured times of one and two.

A worker's share of an update takes a + b times its real steps. An update takes as long as the slowest share, and the
sum of gradients over N workers in a ring, of which each of 2 (N - 1) exchanges takes c + d times its bytes.

Shape legend: N sequences, G updates, W workers.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from stretto.batching import BucketSampler

UPDATES_A_BUCKET: Final = 8
WORLDS: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Seconds of an update.

    Attributes:
        fixed: Of a share, whatever is in it.
        a_step: Of each real step.
        exchange: Of an exchange, whatever is in it.
        a_byte: Of each byte exchanged.
        num_bytes: Of all gradients.
    """

    fixed: float
    a_step: float
    exchange: float
    a_byte: float
    num_bytes: int

    @classmethod
    def fitted(
        cls, updates: Sequence[dict[str, float]], exchanges: Sequence[tuple[int, float]], *, num_bytes: int
    ) -> "CostModel":
        """From one worker's updates and the sums that two have timed."""
        steps = np.array([update["steps_real"] for update in updates])
        seconds = np.array([update["seconds"] for update in updates])
        # Medians over pairs of a small and a large update: a pause of the machine does not tilt the line.
        order = np.argsort(steps)
        half = len(order) // 2
        low, high = order[:half], order[len(order) - half :]
        apart = np.maximum(steps[high] - steps[low], 1.0)
        a_step = max(0.0, float(np.median((seconds[high] - seconds[low]) / apart))) if half else 0.0
        fixed = max(0.0, float(np.median(seconds - a_step * steps)))
        small, large = exchanges[0], exchanges[-1]
        a_byte = max(0.0, (large[1] - small[1]) / (large[0] - small[0]))
        return cls(
            fixed=fixed,
            a_step=a_step,
            exchange=max(0.0, small[1] - a_byte * small[0]) / 2,
            a_byte=a_byte,
            num_bytes=num_bytes,
        )

    def summing(self, size: int) -> float:
        """Seconds of the sum over workers."""
        return 2 * (size - 1) * self.exchange + 2 * (size - 1) / size * self.num_bytes * self.a_byte


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """What so many workers would do.

    Attributes:
        workers: How many.
        steps_per_second: Real steps of all of them.
        efficiency: Over so many times one worker.
        stragglers: Share of the time in which a worker waits for the slowest, on average.
        summing: Share of the time that the sum of gradients takes.
    """

    workers: int
    steps_per_second: float
    efficiency: float
    stragglers: float
    summing: float


def predict(model: CostModel, lengths_N: npt.NDArray[Any], *, batch_size: int) -> list[Prediction]:
    """Simulate epochs of the real plan for ever more workers, on data of such lengths and enough of them for all."""
    found: list[Prediction] = []
    for size in WORLDS:
        probe = BucketSampler(lengths_N, batch_size=batch_size, rank=0, world_size=1)
        many_N = enough(lengths_N, UPDATES_A_BUCKET * len(probe.edges) * batch_size * size)
        plan = BucketSampler(many_N, batch_size=batch_size, edges=probe.edges, rank=0, world_size=size).plan
        steps_GW = np.array(
            [
                [int(many_N[plan.share(step, rank=rank, world_size=size)].sum()) for rank in range(size)]
                for step in range(plan.num_batches)
            ]
        )
        alone = found[0].steps_per_second if found else None
        found.append(simulated(model, steps_GW, alone=alone))
    return found


def simulated(model: CostModel, steps_GW: npt.NDArray[Any], *, alone: float | None = None) -> Prediction:
    """What workers would do whose shares have so many real steps, update after update.

    Args:
        model: Seconds of an update.
        steps_GW: Real steps of each update and worker.
        alone: Real steps a second of one worker; by default what is found here.
    """
    size = steps_GW.shape[1]
    seconds_GW = model.fixed + model.a_step * steps_GW
    slowest_G, summing = seconds_GW.max(axis=1), model.summing(size)
    total = float(slowest_G.sum()) + len(steps_GW) * summing
    speed = float(steps_GW.sum()) / total
    return Prediction(
        workers=size,
        steps_per_second=speed,
        efficiency=speed / (size * (alone or speed)),
        stragglers=float((slowest_G - seconds_GW.mean(axis=1)).sum()) / total,
        summing=len(steps_GW) * summing / total,
    )


def enough(lengths_N: npt.NDArray[Any], wanted: int) -> npt.NDArray[Any]:
    """The lengths, over and over, until there are at least so many."""
    return np.tile(lengths_N, -(-wanted // len(lengths_N)))
