"""The batch that reaches a result soonest, from measured seconds per update and measured gradient noise."""

import dataclasses
import math
from typing import Final, final

from stretto.checks import check_float, check_int, check_kind
from stretto.errors import StrettoError
from stretto.large_batch.throughput import TABLE_FIX, ThroughputTable

MAX_ACCUMULATED: Final = 16
"""Micro-batches per update that are considered, of the largest measured, unless a largest batch is given."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A batch that was considered, over all ranks, and how each of these computes its share.

    Updates and time to the same result are relative to the base batch.
    """

    batch_size: int
    micro_batch: int
    """Most sequences of one rank at a time."""
    accumulate: int
    """Micro-batches of one rank per update."""
    updates_ratio: float
    update_seconds: float
    relative_time: float


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen, and from what.

    Attributes:
        batch_size: Sequences per update, over all ranks.
        accumulate: Micro-batches of one rank per update.
        predicted_gain: Speed gained over the base batch, 0.25 for a result 1.25 times as soon; 0 when it stays there.
        extra_data: Sequences to the same result beyond those that the base batch needs, as a share of them.
        reason: Why, with numbers.
        candidates: Everything that was considered, by increasing batch size.
    """

    batch_size: int
    accumulate: int
    predicted_gain: float
    extra_data: float
    reason: str
    candidates: tuple[Candidate, ...]


def split_share(table: ThroughputTable, share: int) -> tuple[int, int, float]:
    """The fastest way for one rank to compute a share of so many sequences from measured micro-batches.

    A measured size b takes ceil(share / b) micro-batches, each counted as a whole one, and the optimiser's seconds
    once. A share that was not measured is counted as the next larger size that was: nothing is fitted.

    Returns:
        Most sequences at a time, how many times, and the seconds of all, without exchange.
    """
    check_kind(table, ThroughputTable, name="table", owner="split_share", fix=TABLE_FIX)
    # Of sizes that hold the share at once, those above the smallest only add noise of the clock.
    sizes = [size for size in table.batch_sizes if size < share]
    sizes += [min(above)] if (above := [size for size in table.batch_sizes if size >= share]) else []
    if not sizes:
        raise StrettoError("no batch size of the table was measured", fix="Measure one with probe.")

    def seconds(size: int) -> float:
        count = math.ceil(share / size)
        return count * table.seconds_by_size[size] - (count - 1) * table.update_seconds

    best = min(sizes, key=lambda size: (seconds(size), -size))
    count = math.ceil(share / best)
    return math.ceil(share / count), count, seconds(best)


def choose_batch(
    table: ThroughputTable,
    *,
    noise_scale: float | None,
    base_batch_size: int,
    min_gain: float = 0.05,
    min_batch_size: int | None = None,
    max_batch_size: int | None = None,
    world_size: int = 1,
    exchange_seconds: float = 0.0,
) -> Choice:
    """Choose the batch size B that minimises the time to a result, (1 + phi/B) T(B).

    With noise scale phi, a batch of B needs updates in proportion to 1 + phi/B (McCandlish et al. 2018, arXiv
    1812.06162). T(B) are the seconds per update as measured: `split_share` finds the micro-batches, nothing is fitted.
    Candidates are the base batch multiplied and divided by powers of two, and the measured sizes times the number of
    ranks. At equal times the smaller batch wins. Updates that are saved cost data: an epoch gets less far at a larger
    batch.

    Args:
        table: Seconds per update of one rank, the slowest.
        noise_scale: phi in sequences; None if it is not known, which keeps the base batch.
        base_batch_size: The batch to compare with, over all ranks.
        min_gain: The gain below which the base batch is kept.
        min_batch_size: The smallest batch to consider; the base batch by default.
        max_batch_size: The largest; by default 16 of the largest micro-batches on every rank.
        world_size: Ranks that share a batch; each computes at most the share rounded up.
        exchange_seconds: What ranks spend on the all-reduce of gradients, once per update.

    Raises:
        StrettoError: An argument makes no sense, or the table is empty.

    Examples:
        >>> table = ThroughputTable.of({16: 1.0, 32: 1.1, 64: 1.3, 128: 2.4})
        >>> choice = choose_batch(table, noise_scale=200.0, base_batch_size=16)
        >>> choice.batch_size, round(choice.predicted_gain, 2)
        (64, 1.52)
    """
    check_kind(table, ThroughputTable, name="table", owner="choose_batch", fix=TABLE_FIX)
    phi = 0.0 if noise_scale is None else check_float(noise_scale, name="noise_scale", at_least=0.0)
    check_int(base_batch_size, name="base_batch_size")
    check_int(world_size, name="world_size")
    check_float(min_gain, name="min_gain", at_least=0.0)
    check_float(exchange_seconds, name="exchange_seconds", at_least=0.0)
    known = {size * world_size for size in table.batch_sizes}
    low = base_batch_size if min_batch_size is None else min_batch_size
    high = max([base_batch_size, *(MAX_ACCUMULATED * size for size in known)])
    high = high if max_batch_size is None else max_batch_size
    doubled = {base_batch_size << power for power in range(high.bit_length())}
    halved = {
        base_batch_size >> power for power in range(base_batch_size.bit_length()) if not base_batch_size % 2**power
    }
    sizes = {base_batch_size} | {size for size in known | doubled | halved if low <= size <= high}

    def split(size: int) -> tuple[int, int, float]:
        return split_share(table, math.ceil(size / world_size))

    base_seconds = split(base_batch_size)[2] + exchange_seconds
    candidates = []
    for size in sorted(sizes):
        micro_batch, accumulate, seconds = split(size)
        updates = (1 + phi / size) / (1 + phi / base_batch_size)
        candidates.append(
            Candidate(
                batch_size=size,
                micro_batch=micro_batch,
                accumulate=accumulate,
                updates_ratio=updates,
                update_seconds=seconds + exchange_seconds,
                relative_time=updates * (seconds + exchange_seconds) / base_seconds,
            )
        )
    stay = next(each for each in candidates if each.batch_size == base_batch_size)
    best = min(candidates, key=lambda each: (each.relative_time, each.batch_size))
    gain = 1 / best.relative_time - 1
    chosen = stay if noise_scale is None or best is stay or gain < min_gain else best
    return Choice(
        batch_size=chosen.batch_size,
        accumulate=chosen.accumulate,
        predicted_gain=0.0 if chosen is stay else gain,
        extra_data=chosen.updates_ratio * chosen.batch_size / base_batch_size - 1,
        reason=_reason(stay, best, chosen, noise_scale=noise_scale, min_gain=min_gain),
        candidates=tuple(candidates),
    )


def _reason(stay: Candidate, best: Candidate, chosen: Candidate, *, noise_scale: float | None, min_gain: float) -> str:
    if noise_scale is None:
        return f"stays at {stay.batch_size}: the noise scale is not known"
    known = f"noise scale {noise_scale:.4g}"
    if best is stay:
        return f"stays at {stay.batch_size}: at {known} no other batch is predicted to be faster"
    gain = 1 / best.relative_time - 1
    prediction = (
        f"{best.batch_size} is predicted to be {gain:.1%} faster than {stay.batch_size} ({known}: "
        f"{best.updates_ratio:.3g} of the updates, each {best.update_seconds / stay.update_seconds:.3g} times as long, "
        f"{best.updates_ratio * best.batch_size / stay.batch_size - 1:+.1%} sequences)"
    )
    if chosen is stay:
        return f"stays at {stay.batch_size}: {prediction}, less than the {min_gain:.0%} that a change must bring"
    return f"changes to {best.batch_size}: {prediction}"
