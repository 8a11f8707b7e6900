"""What the engine would do with many workers: one worker's measured times, a simulated exchange, the measured noise."""

import dataclasses
import math
import threading
from typing import Any, Final, final

import torch

from stretto.distributed import World
from stretto.large_batch import BatchTuner, LargeBatch, SplitNorms, ThroughputTable, probe
from stretto.nn import reset_carried
from stretto.training import AbstractTask, TrainState, Updater

WORKERS: Final = 64
SHARES: Final = (1, 2, 4, 8, 16, 32, 64, 128, 256)
"""Sequences of one worker that are timed."""
PROBE_SECONDS: Final = 5.0
BYTES_A_SECOND: Final = 1.25e9
MESSAGE_SECONDS: Final = 5e-5
"""The network that is simulated: 10 Gbit/s, 50 us a message."""
EPOCHS: Final = 100
SEQUENCES: Final = 10_000_000
"""Data enough that only time and noise decide."""
OBSERVED: Final = 32
"""Updates of an epoch that the engine is told of; all tell the same."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Growth:
    """One decision.

    Attributes:
        action: What was done: grow, keep or shrink.
        batch_size: From here on, of all workers.
        predicted_gain: Speed to the same result gained over the batch before.
    """

    action: str
    batch_size: int
    predicted_gain: float


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ManyWorkers:
    """What the engine decides for one task, alone and with many workers.

    Attributes:
        task: Its name.
        base_batch_size: Where it begins.
        noise_scale: As measured along the run at the base batch.
        seconds: Of a step of one worker, by sequences, as measured.
        exchange_seconds: Simulated, of many workers.
        best: The batch of the grid that was fastest for one worker.
        alone: Decisions of one worker, until it keeps its batch.
        from_best: Decisions of one worker that begins with the best: it should see that growing does not pay.
        many: Decisions of many workers, likewise.
        gain: Predicted speed of many workers to the same result at their last batch, over the base batch.
    """

    task: str
    base_batch_size: int
    noise_scale: float
    seconds: dict[int, float]
    exchange_seconds: float
    best: int
    alone: tuple[Growth, ...]
    from_best: tuple[Growth, ...]
    many: tuple[Growth, ...]
    gain: float


def exchange_seconds(num_bytes: int, *, workers: int) -> float:
    """Of a sum of gradients over workers in a ring, its messages pipelined as in a tree."""
    if workers == 1:
        return 0.0
    return 2 * (workers - 1) / workers * num_bytes / BYTES_A_SECOND + 2 * math.log2(workers) * MESSAGE_SECONDS


def decisions_with(
    table: ThroughputTable, *, noise_scale: float, base_batch_size: int, workers: int, exchange: float
) -> tuple[Growth, ...]:
    """Decisions of the engine, epoch by epoch, until it keeps its batch.

    Args:
        table: Seconds of a step of one worker.
        noise_scale: The same all along.
        base_batch_size: Where it begins.
        workers: How many share a batch.
        exchange: Seconds of the sum of gradients, once an update.
    """
    tuner = BatchTuner(
        LargeBatch(base_batch_size=base_batch_size, base_lr=0.1, batch_size=base_batch_size, epochs=EPOCHS),
        num_sequences=SEQUENCES,
        table=table,
        world_size=workers,
        exchange_seconds=exchange,
    )
    decisions: list[Growth] = []
    for epoch in range(1, EPOCHS):
        half = tuner.batch_size / 2
        for _ in range(OBSERVED):
            # Two parts as they are on average where the gradient has a norm of 1.
            norms = SplitNorms(
                sizes=[half, half],
                squares=[1 + noise_scale / half] * 2,
                square_of_mean=1 + noise_scale / (2 * half),
            )
            tuner.observe(loss=1.0, norms=norms)
        decision = tuner.decide(epoch=epoch)
        decisions.append(
            Growth(action=decision.action, batch_size=decision.batch_size, predicted_gain=decision.predicted_gain)
        )
        if decision.action == "keep":
            break
    return tuple(decisions)


def time_shares(task: AbstractTask[Any]) -> ThroughputTable:
    """Seconds of a step of one worker with ever more sequences, of the length that is most common."""
    feed = task.feed(world=World())
    length = max(feed.shares, key=lambda each: feed.shares[each])
    earlier = torch.get_rng_state()
    try:
        torch.manual_seed(task.config.seed)
        model = task.build_model().to(task.config.device)
        state = TrainState(model, config=task.config, steps_per_epoch=len(feed), batch_size=feed.batch_size)
        updater = Updater(task, state, world=World(), stop=threading.Event())
        updater.skips = True
        model.train()

        def step(size: int, steps: int) -> int:
            reset_carried(model)
            batch = feed.example(size, steps).to(task.config.device)
            updater.begin()
            updater.add(batch, is_last=True)
            return batch.num_steps

        sizes = [size for size in SHARES if size <= feed.num_sequences]
        return probe(step, batch_sizes=sizes, lengths=[length], max_seconds=PROBE_SECONDS)
    finally:
        torch.set_rng_state(earlier)


def many_workers(
    name: str, table: ThroughputTable, *, noise_scale: float, base_batch_size: int, best: int, num_bytes: int
) -> ManyWorkers:
    """Let the engine decide, alone and with 64 workers.

    Args:
        name: The task.
        table: Seconds of a step of one worker.
        noise_scale: As measured.
        base_batch_size: Where it begins.
        best: The batch that was fastest for one worker.
        num_bytes: Of all gradients.
    """
    exchange = exchange_seconds(num_bytes, workers=WORKERS)
    alone, from_best, many = (
        decisions_with(table, noise_scale=noise_scale, base_batch_size=first, workers=workers, exchange=seconds)
        for first, workers, seconds in ((base_batch_size, 1, 0.0), (best, 1, 0.0), (base_batch_size, WORKERS, exchange))
    )
    gain = math.prod(1.0 + growth.predicted_gain for growth in many) - 1.0
    return ManyWorkers(
        task=name,
        base_batch_size=base_batch_size,
        noise_scale=noise_scale,
        seconds=table.seconds_by_size,
        exchange_seconds=exchange,
        best=best,
        alone=alone,
        from_best=from_best,
        many=many,
        gain=gain,
    )
