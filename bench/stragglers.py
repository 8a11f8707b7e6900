"""How long workers wait for the slowest, with batches of ours, of Lhotse's and without a thought of length.

Shape legend: N sequences, G updates, W workers.
"""

import dataclasses
from collections.abc import Sequence
from typing import Any, Final, final

import numpy as np
import numpy.typing as npt

from bench.samplers import (
    AbstractContestant,
    Draw,
    LhotseContestant,
    OptimalContestant,
    ShuffledContestant,
)
from bench.workers_model import CostModel, enough, simulated
from stretto.errors import StrettoError

NUM_BUCKETS: Final = 10
"""Of those that have any; Lhotse's default."""
WORLDS: Final = (2, 4, 8, 16)
"""Every rank of Lhotse's draws the batches of all ranks, so many more take long."""
UPDATES: Final = 40
CONTESTANTS: Final[dict[str, type[AbstractContestant]]] = {
    OptimalContestant.name: OptimalContestant,
    LhotseContestant.name: LhotseContestant,
    ShuffledContestant.name: ShuffledContestant,
}


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """What workers lost by waiting for each other, as shares of the time.

    Attributes:
        total: All of it.
        summing: Summing gradients: what even the slowest worker of an update waits.
        shares: Because shares are not equally large.
    """

    total: float
    summing: float
    shares: float

    @property
    def uneven(self) -> float:
        """The rest: cores that are not equally fast from one update to the next."""
        return max(0.0, self.total - self.summing - self.shares)

    @classmethod
    def of(cls, turns: Sequence[Sequence[dict[str, Any]]], *, a_step: float) -> "Waiting":
        """From the updates of all workers, turn after turn, and what a real step costs."""
        total = summing = shares = seconds = 0.0
        for ranks in turns:
            for updates in zip(*(rank["updates"] for rank in ranks), strict=True):
                waits, steps = [u["waited"] for u in updates], [u["steps_real"] for u in updates]
                total += sum(waits) / len(waits)
                summing += min(waits)
                shares += a_step * (max(steps) - sum(steps) / len(steps))
                seconds += sum(u["seconds"] for u in updates) / len(updates)
        return cls(total=total / seconds, summing=summing / seconds, shares=shares / seconds)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Straggling:
    """How workers fare with one sampler's batches, all under the same cap on slots.

    Attributes:
        sampler: Whose batches.
        waiting: Share of the time that two workers waited, measured; sums of gradients included.
        steps_per_second: Real steps of two workers, measured.
        simulated: Share of the time that a worker waits for the slowest, by number of workers.
    """

    sampler: str
    waiting: float
    steps_per_second: float
    simulated: dict[int, float]


def straggling_contestants() -> tuple[list[str], list[str]]:
    """Names of the samplers that can be compared, ours first, and what is missing."""
    names, missing = [], []
    for name, kind in CONTESTANTS.items():
        try:
            kind().require()
        except StrettoError as error:
            missing.append(f"{name}: {error}")
        else:
            names.append(name)
    return names, missing


def simulated_waiting(name: str, model: CostModel, lengths_N: npt.NDArray[Any], *, batch_size: int) -> dict[int, float]:
    """Simulate some updates of ever more workers, on data of such lengths and enough of them for all."""
    found = {}
    for size in WORLDS:
        many_N = enough(lengths_N.astype(np.int64), UPDATES * batch_size * size)
        contestant = CONTESTANTS[name]()
        draws = [
            Draw(
                max_padded_steps=max(round(batch_size * float(lengths_N.mean())), int(lengths_N.max())),
                num_buckets=NUM_BUCKETS,
                seed=0,
                epoch=0,
                rank=rank,
                world_size=size,
            )
            for rank in range(size)
        ]
        dealt = [list(contestant.batches(many_N, draw)) for draw in draws]
        num_updates = min(len(batches) for batches in dealt)
        steps_GW = np.array(
            [[int(many_N[batches[update]].sum()) for batches in dealt] for update in range(num_updates)]
        )
        found[size] = simulated(model, steps_GW).stragglers
    return found
