"""A batch sampler that draws every batch from one length bucket.

An epoch is a chain of segments. Normally there is one. A change of the batch size or of the number of ranks in the
middle closes it and plans the sequences that are left again, so that each still comes exactly once:

    segment 0   2 ranks, 32 rows    |b|b|b|b|b|b            6 batches done, then resize(64)
    segment 1   2 ranks, 64 rows                |B|B|B      3 batches done, then a restart on 4 ranks
    segment 2   4 ranks, 64 rows                      |B|B|B|...

Each plan is a pure function of seed, epoch, number of the segment, lengths and settings. A state therefore only has
(ranks, rows, batches done) of each segment: loading it replays the plans, not the data.

Shape legend: N sequences, K buckets, M members of a segment.
"""

import hashlib
import json
import math
import sys
from collections.abc import Iterator
from typing import Any, Final, Literal, final

import numpy as np
import numpy.typing as npt
import torch.distributed
from torch.utils.data import BatchSampler, Sampler

from stretto.batching.cost import Cost, evaluate_cost
from stretto.batching.edges import as_lengths, bucket_of, optimal_edges
from stretto.batching.plan import Buckets, EpochPlan, SamplerReport, measure_plan, plan_epoch, steps_of
from stretto.checks import check_bool, check_int
from stretto.errors import StrettoError

STATE_VERSION: Final = 2

LIGHTNING_FIX: Final = (
    "Make the Trainer with use_distributed_sampler=False; for Trainer.predict give a loader without a BucketSampler."
)
ACCELERATE_FIX: Final = (
    "Leave the loader out of accelerator.prepare(...) and move batches with batch.to(accelerator.device); "
    "in a Trainer, let get_train_dataloader return the loader unprepared."
)
ACCELERATE_SHARES: Final = ("BatchSamplerShard", "DataLoaderDispatcher")

Segments = tuple[tuple[int, int, int], ...]
"""For each segment of an epoch: ranks, most sequences per batch (0 for any number), batches done."""


@final
class BucketSampler(BatchSampler):
    """Batches of sequences of similar length, for a plain `torch.utils.data.DataLoader`.

    Buckets are cut where padding costs least (`optimal_edges`). Each epoch draws new batches within the buckets and a
    new order of the batches. The plan of an epoch is a pure function of seed, epoch, lengths and settings, so every
    rank computes the same one without communication and takes its share: the same bucket on all ranks at the same
    time, equally many batches, every sequence exactly once. The short last group of a bucket is shared evenly; ranks
    for which nothing is left get an empty batch, to be weighted zero.

    Iterating to the end moves on to the next epoch; `set_epoch` chooses one. `resize` continues with other batches.

    Pairs of sequences, such as source and target, have two lengths each, in an array of shape (N, 2): buckets are cut
    in both, and padded steps are those of both sides, each padded to its longest.

    It is a `torch.utils.data.BatchSampler` that shares the batches among ranks itself: a framework that would share
    them a second time gets an error with the remedy.

    Args:
        lengths: Steps of each sequence, at least 1; of shape (N, 2) for pairs.
        batch_size: Most sequences of one rank's batch.
        max_padded_steps: Most padded steps (rows times longest) of one rank's batch, a hard cap. Give either or both.
        num_buckets: How many buckets, or "auto": as many as save more than the partial last batch that each one adds.
        edges: Bucket edges to use instead of the optimal ones.
        cost: The cost of one sequence padded to a length (of a pair, to two), non-decreasing; None counts steps.
        shuffle: Whether to draw membership and order at random. Otherwise everything is sorted by length.
        largest_first: Whether the first epoch begins with the batch of most padded steps, so that one update shows
            whether memory suffices.
        seed: Of all draws.
        rank: This rank; None asks `torch.distributed` whenever batches are planned, 0 when it is not running.
        world_size: Number of ranks; None asks `torch.distributed` likewise, 1 when it is not running.
        sampler: Always None: where frameworks put a sampler of theirs, which is refused.
        drop_last: Always False: every sequence comes.

    Examples:
        >>> sampler = BucketSampler([5, 90, 6, 88], batch_size=2, num_buckets=2)
        >>> sorted(map(sorted, sampler))
        [[0, 2], [1, 3]]
    """

    def __init__(
        self,
        lengths: npt.ArrayLike,
        *,
        batch_size: int | None = None,
        max_padded_steps: int | None = None,
        num_buckets: int | Literal["auto"] = "auto",
        edges: npt.ArrayLike | None = None,
        cost: Cost | None = None,
        shuffle: bool = True,
        largest_first: bool = False,
        seed: int = 0,
        rank: int | None = None,
        world_size: int | None = None,
        sampler: None = None,
        drop_last: Literal[False] = False,
    ) -> None:
        if sampler is not None or isinstance(lengths, Sampler):
            raise _sharding_error("Lightning", fix=LIGHTNING_FIX)
        if drop_last:
            raise StrettoError("drop_last=True was given to a BucketSampler, which drops nothing", fix="Leave it out.")
        self.drop_last = False
        self._lengths_N = as_lengths(lengths, pairs=True)
        self._batch_size = self._rows = None if batch_size is None else _as_int("batch_size", batch_size)
        self._max_padded_steps = None if max_padded_steps is None else _as_int("max_padded_steps", max_padded_steps)
        if batch_size is None and max_padded_steps is None:
            raise StrettoError(
                "BucketSampler got neither batch_size nor max_padded_steps", fix="Give one of them, or both."
            )
        self._refuse_too_long()
        self._num_buckets = int(num_buckets) if isinstance(num_buckets, np.integer) else num_buckets
        self._cost = cost
        self._given_edges_K = None if edges is None else self._check_edges(edges)
        self._shuffle = check_bool(shuffle, name="shuffle")
        self._largest_first = check_bool(largest_first, name="largest_first")
        self._seed = _as_int("seed", seed, at_least=0)
        self._given_ranks = rank, world_size
        self.rank, self.world_size = _resolve_rank(rank, world_size)
        self._buckets: dict[tuple[int, int | None], Buckets] = {}
        self._epoch = 0
        self._closed: Segments = ()  # of this epoch, before the current segment
        self._previous: tuple[int, Segments] = (-1, ())  # the epoch before and its closed segments
        self._start = self._done = 0  # batches of the current segment: where to begin, how many have been drawn
        self._plan: EpochPlan | None = None
        _ = self._current_buckets  # so that bad edges or costs are refused now

    @property
    def sampler(self) -> "BucketSampler":  # type: ignore[override]
        """Itself: what Lightning and others tell the epoch to."""
        return self

    @property
    def batch_size(self) -> int | None:  # type: ignore[override]
        """Most sequences of one rank's batch, as given or as last resized."""
        return self._rows

    @property
    def edges(self) -> npt.NDArray[np.int64]:
        """The bucket edges in use, rising; the last is at least the greatest length. For pairs, (K, 2)."""
        return self._current_buckets.edges_K

    @property
    def batches_per_epoch(self) -> int:
        """Batches per rank of a whole epoch at the current batch size."""
        self._follow_ranks()
        buckets = self._current_buckets
        counts_K = np.bincount(buckets.bucket_N, minlength=len(buckets.edges_K))
        return int((-(-counts_K // (buckets.rows_K * self.world_size))).sum())

    @property
    def epoch(self) -> int:
        """The epoch that the next iteration draws."""
        return self._epoch

    @property
    def plan(self) -> EpochPlan:
        """The plan of the current epoch."""
        self._follow_ranks()
        if self._plan is None:
            self._plan = self._compute_plan()
        return self._plan

    def __len__(self) -> int:
        return self.plan.num_batches

    def __iter__(self) -> Iterator[list[int]]:
        _refuse_accelerate()
        plan, self._done = self.plan, self._start
        for batch in range(self._start, plan.num_batches):
            self._done = batch + 1
            yield plan.share(batch, rank=self.rank, world_size=self.world_size)
        if plan is self._plan:
            self._move_to(self._epoch + 1)

    def set_epoch(self, epoch: int) -> None:
        """Choose the epoch. Naming the current one changes nothing, so a restored position is kept."""
        if (epoch := _as_int("epoch", epoch, at_least=0)) != self._epoch:
            self._move_to(epoch)

    def resize(self, batch_size: int, *, batches_done: int | None = None) -> None:
        """Continue with batches of another size: plan the rest of the epoch again; later epochs use the new size too.

        An iterator that is already running keeps the old batches: start another.

        Args:
            batch_size: Most sequences of one rank's batch.
            batches_done: The batches that training has done, if a prefetching loader has drawn more from the sampler.
        """
        rows = _as_int("batch_size", batch_size)
        done = self._done if batches_done is None else _as_int("batches_done", batches_done, at_least=0)
        if done > self.plan.num_batches:
            raise _state_error(f"{done} of {self.plan.num_batches} batches are done")
        if done == self.plan.num_batches:
            self._move_to(self._epoch + 1)
        elif done:
            self._closed = (*self._closed, self._segment(done))
        self._rows, self._plan = rows, None
        self._start = self._done = 0

    def state_dict(self, *, epoch: int | None = None, batches_done: int | None = None) -> dict[str, Any]:
        """The position, as JSON-ready values: the epoch and how many of its batches are done.

        Args:
            epoch: The epoch to record instead of the current one.
            batches_done: The batches that training has done, if a prefetching loader has drawn more from the sampler.
        """
        if epoch is None or epoch == self._epoch:
            epoch, closed, done = self._epoch, self._closed, self._done
        else:
            check_int(epoch, name="epoch", at_least=0)
            # A prefetching loader may have moved the sampler on while training is still in the epoch before.
            closed, done = self._previous[1] if epoch == self._previous[0] else (), 0
        if batches_done is not None:
            check_int(batches_done, name="batches_done", at_least=0)
        return {
            "version": STATE_VERSION,
            "epoch": epoch,
            "used": [
                [*segment] for segment in (*closed, self._segment(done if batches_done is None else batches_done))
            ],
            "digest": self._digest(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Continue exactly where `state` was taken, with the batch size of that time.

        With another world size the rest of the epoch is planned again: still every sequence exactly once.
        """
        if not isinstance(state, dict):
            raise _state_error(f"it is a {type(state).__name__}")
        if state.get("version") != STATE_VERSION:
            raise StrettoError(
                f"the sampler's state has version {state.get('version')!r}, not {STATE_VERSION}",
                fix="Resume with the version of Stretto that saved it, or start a new epoch.",
            )
        if state.get("digest") != self._digest():
            raise StrettoError(
                "the sampler's state was saved for other lengths or settings",
                fix="Restore it into a BucketSampler with the same lengths, sizes, buckets, seed and shuffle.",
            )
        *closed, (world_size, rows, done) = _read_segments(state)
        epoch = state.get("epoch")
        if not isinstance(epoch, int) or isinstance(epoch, bool) or epoch < 0:
            raise _state_error(f"the epoch is {epoch!r}")
        self._rows = rows or None
        self._move_to(epoch)
        if world_size == self.world_size:
            self._closed, self._start = tuple(closed), done
        else:
            self._closed = (*closed, (world_size, rows, done)) if done else tuple(closed)
        self._done = self._start
        if self._start > self.plan.num_batches:
            raise _state_error(f"{self._start} of {self.plan.num_batches} batches are done")
        if self._start == self.plan.num_batches:
            self._move_to(self._epoch + 1)

    def report(self) -> SamplerReport:
        """Batches, shapes, padding, largest batch and straggler factor of the current epoch, over all ranks."""
        return measure_plan(
            self.plan,
            lengths_N=self._lengths_N,
            buckets=self._current_buckets,
            world_size=self.world_size,
            epoch=self._epoch,
            batch_size=self._rows,
            max_padded_steps=self._max_padded_steps,
        )

    def _follow_ranks(self) -> None:
        """If ranks were joined after this was made, as in Lightning, the rest of the epoch is theirs together."""
        rank, world_size = _resolve_rank(*self._given_ranks)
        if world_size != self.world_size:
            state = self.state_dict()
            self.rank, self.world_size = rank, world_size
            self.load_state_dict(state)

    def _move_to(self, epoch: int) -> None:
        self._previous = (self._epoch, self._closed)
        self._epoch, self._closed, self._plan = epoch, (), None
        self._start = self._done = 0

    def _compute_plan(self) -> EpochPlan:
        """Replay the plans of closed segments to find what they left, and plan that."""
        members_M = np.arange(len(self._lengths_N))
        for number, (world_size, rows, done) in enumerate(self._closed):
            plan = self._plan_segment(members_M, number, world_size=world_size, rows=rows or None)
            if done > plan.num_batches:
                raise _state_error(f"{done} of {plan.num_batches} batches are done at world size {world_size}")
            members_M = plan.unused(done)
        return self._plan_segment(members_M, len(self._closed), world_size=self.world_size, rows=self._rows)

    def _segment(self, done: int) -> tuple[int, int, int]:
        return self.world_size, self._rows or 0, done

    def _plan_segment(
        self, members_M: npt.NDArray[np.int64], number: int, *, world_size: int, rows: int | None
    ) -> EpochPlan:
        return plan_epoch(
            members_M,
            lengths_N=self._lengths_N,
            buckets=self._buckets_of(world_size, rows),
            world_size=world_size,
            rng=np.random.default_rng([self._seed, self._epoch, number]) if self._shuffle else None,
            largest_first=self._largest_first and self._epoch == 0,
        )

    @property
    def _current_buckets(self) -> Buckets:
        return self._buckets_of(self.world_size, self._rows)

    def _buckets_of(self, world_size: int, rows: int | None) -> Buckets:
        if (world_size, rows) not in self._buckets:
            self._buckets[world_size, rows] = self._compute_buckets(world_size, rows)
        return self._buckets[world_size, rows]

    def _compute_buckets(self, world_size: int, rows: int | None) -> Buckets:
        edges_K = self._given_edges_K
        if edges_K is None:
            price = self._bucket_price(world_size, rows)
            edges_K = optimal_edges(self._lengths_N, self._num_buckets, self._cost, bucket_price=price)
        most = len(self._lengths_N)
        rows_K = np.full(len(edges_K), min(rows or most, most))
        if self._max_padded_steps is not None:
            # More padded steps than all sequences have together cap nothing, and might not fit in an int64.
            steps_K = steps_of(edges_K)
            capped = min(self._max_padded_steps, most * int(steps_K.max()))
            rows_K = np.minimum(rows_K, np.maximum(1, capped // steps_K))
        return Buckets(edges_K=edges_K, bucket_N=bucket_of(self._lengths_N, edges_K), rows_K=rows_K)

    def _bucket_price(self, world_size: int, rows: int | None) -> float:
        """One more bucket adds one more partial group, half empty on average: half a group of average sequences."""
        steps_N = steps_of(self._lengths_N)
        cost_N = steps_N.astype(np.float64) if self._cost is None else np.abs(self._sequence_costs())
        by_budget = self._max_padded_steps / steps_N.mean() if self._max_padded_steps is not None else np.inf
        return float(min(rows or np.inf, by_budget) * world_size * cost_N.mean() / 2)

    def _sequence_costs(self) -> npt.NDArray[np.float64]:
        """Evaluated once for each distinct length."""
        distinct, inverse = np.unique(self._lengths_N, axis=0, return_inverse=True)
        return evaluate_cost(distinct, self._cost)[inverse.ravel()]

    def _refuse_too_long(self) -> None:
        steps_N = steps_of(self._lengths_N)
        longest = int(steps_N.argmax())
        if self._max_padded_steps is not None and steps_N[longest] > self._max_padded_steps:
            raise StrettoError(
                f"sequence {longest} has {steps_N[longest]} steps, more than max_padded_steps={self._max_padded_steps}",
                fix="Raise max_padded_steps to at least that, or shorten or remove the sequence.",
            )

    def _check_edges(self, edges: npt.ArrayLike) -> npt.NDArray[np.int64]:
        is_pairs = self._lengths_N.ndim > 1
        longest = self._lengths_N.max(axis=0)
        try:
            edges_K = as_lengths(edges, pairs=is_pairs)
        except StrettoError as error:
            raise StrettoError(
                f"edges {edges!r} cannot be used: they are checked as lengths, and {error.problem}",
                fix="Give rising integers, the last at least as long as the longest sequence.",
            ) from error
        if is_pairs:
            beyond = np.flatnonzero(bucket_of(self._lengths_N, edges_K) == len(edges_K)) if edges_K.ndim > 1 else [0]
            if len(beyond):
                raise StrettoError(
                    f"edges {edges_K.tolist()} do not hold pair {beyond[0]} of lengths "
                    f"{self._lengths_N[beyond[0]].tolist()}",
                    fix="Give edges of shape (K, 2), one of which is as long as each pair in both lengths.",
                )
        elif (np.diff(edges_K) <= 0).any() or edges_K[-1] < longest:
            raise StrettoError(
                f"edges {edges_K.tolist()} do not rise up to the longest sequence ({longest} steps)",
                fix="Give rising edges, the last at least as long as the longest sequence.",
            )
        if self._max_padded_steps is not None:
            # An edge may lie beyond the longest sequence; the cap must hold when batches are padded to it.
            edges_K = np.minimum(edges_K, longest)
            edges_K = edges_K if is_pairs else np.unique(edges_K)
        return edges_K

    def _digest(self) -> str:
        settings = [self._batch_size, self._max_padded_steps, self._num_buckets, self._shuffle, self._seed]
        hasher = hashlib.sha256(json.dumps(settings).encode())
        if self._largest_first:
            hasher.update(b"largest_first")
        if self._cost is not None:
            hasher.update(evaluate_cost(np.unique(self._lengths_N, axis=0), self._cost).tobytes())
        hasher.update(self._lengths_N.tobytes())
        hasher.update(self._buckets_of(1, self._batch_size).edges_K.tobytes())
        return hasher.hexdigest()[:16]


def _as_int(name: str, value: Any, *, at_least: int = 1) -> int:
    """An integer; floats such as 6e5 are accepted if they are integers."""
    whole_float = isinstance(value, float | np.floating) and value % 1 == 0
    return check_int(int(value) if whole_float else value, name=name, at_least=at_least, at_most=math.inf)


def _read_segments(state: dict[str, Any]) -> list[tuple[int, int, int]]:
    """The segments that `state_dict` wrote."""
    used = state.get("used")
    found = [tuple(part) if isinstance(part, (list, tuple)) else () for part in used] if isinstance(used, list) else []
    whole = all(isinstance(number, int) for segment in found for number in segment)
    if not (found and whole and all(len(part) == 3 and part[0] >= 1 and min(part) >= 0 for part in found)):
        raise _state_error(f"used={used!r}")
    return [(int(world_size), int(rows), int(done)) for world_size, rows, done in found]


def _state_error(what: str) -> StrettoError:
    return StrettoError(
        f"the sampler's state does not fit: {what}", fix="Restore a state that was saved by state_dict()."
    )


def _sharding_error(framework: str, *, fix: str) -> StrettoError:
    return StrettoError(
        f"{framework} would share the batches of a BucketSampler among ranks, which it does itself: sequences would be "
        "lost or come twice",
        fix=fix,
    )


def _refuse_accelerate() -> None:
    """Refuse to be read by Accelerate's shards of a batch sampler.

    They take every n-th batch, and none of a round whose last batch is short.
    """
    module = sys.modules.get("accelerate.data_loader")
    sharing = tuple(filter(None, (getattr(module, name, None) for name in ACCELERATE_SHARES)))
    frame = sys._getframe(1) if sharing else None
    while frame is not None:
        reader = frame.f_locals.get("self") if frame.f_globals.get("__name__") == "accelerate.data_loader" else None
        state = getattr(reader, "state", reader)
        if isinstance(reader, sharing) and getattr(state, "num_processes", 1) > 1:
            raise _sharding_error("Accelerate", fix=ACCELERATE_FIX)
        frame = frame.f_back


def _resolve_rank(rank: int | None, world_size: int | None) -> tuple[int, int]:
    running = torch.distributed.is_available() and torch.distributed.is_initialized()
    if world_size is None:
        world_size = torch.distributed.get_world_size() if running else 1
    if rank is None:
        rank = torch.distributed.get_rank() if running else 0
    rank, world_size = _as_int("rank", rank, at_least=0), _as_int("world_size", world_size)
    if rank >= world_size:
        raise StrettoError(f"rank={rank} does not fit world_size={world_size}", fix="Give 0 <= rank < world_size.")
    return rank, world_size
