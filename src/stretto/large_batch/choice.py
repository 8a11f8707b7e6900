"""The batch that reaches a result soonest, from measured seconds of a step and measured gradient noise."""

import dataclasses
import math
from collections.abc import Sequence
from typing import Final, final

from stretto.errors import StrettoError
from stretto.large_batch.probe import ThroughputTable

MOST_ACCUMULATED: Final = 16
"""Micro-batches an update that are considered, of the largest that was measured, unless a largest batch is given."""

Tables = ThroughputTable | Sequence[ThroughputTable]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """A batch that was considered.

    Attributes:
        batch_size: Sequences an update, of all workers.
        micro_batch: Most sequences of one worker at a time.
        accumulate: Micro-batches of one worker an update.
        steps_ratio: Updates to the same result, relative to the base batch.
        step_seconds: Seconds an update.
        relative_time: Time to the same result, relative to the base batch.
    """

    batch_size: int
    micro_batch: int
    accumulate: int
    steps_ratio: float
    step_seconds: float
    relative_time: float


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Choice:
    """What was chosen, and from what.

    Attributes:
        batch_size: Sequences an update, of all workers.
        micro_batch: Most sequences of one worker at a time.
        accumulate: Micro-batches of one worker an update.
        predicted_gain: Speed gained over the base batch, 0.25 for a result 1.25 times as soon; 0 when it stays there.
        predicted_steps_ratio: Updates to the same result, relative to the base batch.
        extra_data: Sequences to the same result beyond those that the base batch needs, as a share of them.
        reason: Why, with numbers.
        rows: Everything that was considered, by rising batch size.
    """

    batch_size: int
    micro_batch: int
    accumulate: int
    predicted_gain: float
    predicted_steps_ratio: float
    extra_data: float
    reason: str
    rows: tuple[Row, ...]


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Split:
    """How one worker computes its share of an update.

    Attributes:
        micro_batch: Most sequences at a time.
        accumulate: How many times.
        seconds: What it takes, without exchange.
    """

    micro_batch: int
    accumulate: int
    seconds: float


def split_share(tables: Tables, share: int) -> Split:
    """The fastest way to compute the share of one worker from measured micro-batches.

    A measured size b takes ceil(share / b) micro-batches, each counted as a whole one, and the optimiser's seconds
    once. A share that was not measured is counted as the next larger size that was: nothing is fitted. Several tables,
    one a worker, count as their slowest.

    Args:
        tables: Measured seconds.
        share: Sequences of one worker.
    """
    return _split(_measured(_every(tables)), share)


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Measured:
    """Seconds of a step by batch size, and of the optimiser alone, of one table."""

    seconds: dict[int, float]
    update_seconds: float


def _measured(tables: Sequence[ThroughputTable]) -> list[_Measured]:
    return [_Measured(seconds=item.seconds_by_size, update_seconds=item.update_seconds) for item in tables]


def _split(measured: Sequence[_Measured], share: int) -> Split:
    sizes = sorted(set.intersection(*(set(item.seconds) for item in measured)))
    # Of sizes that hold the share at once, larger ones than the first have nothing to add but noise of the clock.
    sizes = [size for size in sizes if size < share] + [size for size in sizes if size >= share][:1]
    if not sizes:
        raise StrettoError("the table has no batch size that was measured", fix="Measure one with probe.")

    def seconds(size: int) -> float:
        count = math.ceil(share / size)
        return max(count * item.seconds[size] - (count - 1) * item.update_seconds for item in measured)

    best = min(sizes, key=lambda size: (seconds(size), -size))
    count = math.ceil(share / best)
    return Split(micro_batch=math.ceil(share / count), accumulate=count, seconds=seconds(best))


def choose_batch(
    table: Tables,
    *,
    noise_scale: float | None,
    base_batch_size: int,
    threshold: float = 0.05,
    smallest: int | None = None,
    largest: int | None = None,
    workers: int = 1,
    exchange_seconds: float = 0.0,
) -> Choice:
    """Choose the batch size B that minimises the time to a result, (1 + phi/B) T(B).

    With noise scale phi, a batch of B needs updates in proportion to 1 + phi/B (McCandlish et al. 2018, arXiv
    1812.06162). T(B) are the seconds of an update as measured: `split_share` finds the micro-batches, nothing is
    fitted. Considered are the base batch multiplied and divided by powers of two, and the measured sizes times the
    workers. With equal times the smaller batch wins. Updates that are saved cost data: an epoch gets less far at a
    larger batch.

    Args:
        table: Seconds of a step of one worker, or one table a worker, of which the slowest counts.
        noise_scale: phi in sequences; None if it is not known, which keeps the base batch.
        base_batch_size: The batch to compare with, of all workers together.
        threshold: The gain below which the base batch is kept.
        smallest: The smallest batch to consider; the base batch by default.
        largest: The largest; by default 16 of the largest micro-batches on every worker.
        workers: How many share a batch; each computes at most the share rounded up.
        exchange_seconds: What workers spend on the sum of gradients, once an update.

    Raises:
        StrettoError: If an argument makes no sense, or the table is empty.

    Example:
        >>> table = ThroughputTable.of({16: 1.0, 32: 1.1, 64: 1.3, 128: 2.4})
        >>> choice = choose_batch(table, noise_scale=200.0, base_batch_size=16)
        >>> choice.batch_size, round(choice.predicted_gain, 2)
        (64, 1.52)
    """
    every = _every(table)
    _refuse(
        every,
        noise_scale=noise_scale,
        base_batch_size=base_batch_size,
        threshold=threshold,
        workers=workers,
        exchange_seconds=exchange_seconds,
    )
    low = base_batch_size if smallest is None else smallest
    measured = _measured(every)
    known = {size * workers for item in measured for size in item.seconds}
    high = max([base_batch_size, *(MOST_ACCUMULATED * size for size in known)]) if largest is None else largest
    sizes = {size for size in known if low <= size <= high} | {base_batch_size}
    size = base_batch_size
    while (size := size * 2) <= high:
        sizes |= {size} if size >= low else set()
    size = base_batch_size
    while size % 2 == 0 and (size := size // 2) >= low:
        sizes |= {size} if size <= high else set()
    phi = 0.0 if noise_scale is None else noise_scale
    base = _split(measured, math.ceil(base_batch_size / workers))
    rows = []
    for size in sorted(sizes):
        split = _split(measured, math.ceil(size / workers))
        steps = (1 + phi / size) / (1 + phi / base_batch_size)
        taken = split.seconds + exchange_seconds
        rows.append(
            Row(
                batch_size=size,
                micro_batch=split.micro_batch,
                accumulate=split.accumulate,
                steps_ratio=steps,
                step_seconds=taken,
                relative_time=steps * taken / (base.seconds + exchange_seconds),
            )
        )
    stay = next(row for row in rows if row.batch_size == base_batch_size)
    best = min(rows, key=lambda row: (row.relative_time, row.batch_size))
    gain = 1 / best.relative_time - 1
    chosen = stay if noise_scale is None or best is stay or gain < threshold else best
    return Choice(
        batch_size=chosen.batch_size,
        micro_batch=chosen.micro_batch,
        accumulate=chosen.accumulate,
        predicted_gain=0.0 if chosen is stay else gain,
        predicted_steps_ratio=chosen.steps_ratio,
        extra_data=chosen.steps_ratio * chosen.batch_size / base_batch_size - 1,
        reason=_reason(stay, best, chosen, noise_scale=noise_scale, threshold=threshold),
        rows=tuple(rows),
    )


def _reason(stay: Row, best: Row, chosen: Row, *, noise_scale: float | None, threshold: float) -> str:
    if noise_scale is None:
        return f"stays at {stay.batch_size}: the noise scale is not known"
    known = f"noise scale {noise_scale:.4g}"
    if best is stay:
        return f"stays at {stay.batch_size}: at {known} no other batch is predicted to be faster"
    gain = 1 / best.relative_time - 1
    told = (
        f"{best.batch_size} is predicted to be {gain:.1%} faster than {stay.batch_size} ({known}: "
        f"{best.steps_ratio:.3g} of the updates, each {best.step_seconds / stay.step_seconds:.3g} times as long, "
        f"{best.steps_ratio * best.batch_size / stay.batch_size - 1:+.1%} sequences)"
    )
    if chosen is stay:
        return f"stays at {stay.batch_size}: {told}, less than the {threshold:.0%} that a change must bring"
    return f"changes to {best.batch_size}: {told}"


def _every(tables: Tables) -> list[ThroughputTable]:
    return [tables] if isinstance(tables, ThroughputTable) else list(tables)


def _refuse(
    every: list[ThroughputTable],
    *,
    noise_scale: float | None,
    base_batch_size: int,
    threshold: float,
    workers: int,
    exchange_seconds: float,
) -> None:
    if noise_scale is not None and not 0.0 <= noise_scale < math.inf:
        raise StrettoError(
            f"the noise scale is {noise_scale}", fix="Give a number of sequences, or None if it is not known."
        )
    if base_batch_size < 1 or workers < 1:
        raise StrettoError(f"{workers} workers share a batch of {base_batch_size}", fix="Give at least 1 of each.")
    if not 0.0 <= threshold < math.inf or not 0.0 <= exchange_seconds < math.inf:
        raise StrettoError(
            f"threshold is {threshold} and exchange_seconds {exchange_seconds}", fix="Give numbers of at least 0."
        )
    if len(every) not in (1, workers):
        raise StrettoError(
            f"there are {len(every)} tables for {workers} workers", fix="Give one for all, or one for each."
        )
