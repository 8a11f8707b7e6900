"""The bucket sampler over all its ranks: exactly once, under the caps, restored anywhere."""

import copy
import json
import math
import pickle
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler, SequentialSampler

from stretto.batching import BucketSampler
from stretto.errors import StrettoError

Options = dict[str, Any]
WORLD_SIZES = st.one_of(st.sampled_from([1, 2, 3, 4, 8, 64]), st.integers(1, 64))
LENGTHS = np.random.default_rng(5).integers(1, 60, 200)


@st.composite
def options(draw: st.DrawFn) -> Options:
    lengths = draw(st.lists(st.integers(1, 60), min_size=1, max_size=120))
    longest = max(lengths)
    chosen: Options = {"lengths": lengths, "shuffle": draw(st.booleans()), "seed": draw(st.integers(0, 2**70))}
    chosen["largest_first"] = draw(st.booleans())
    caps = draw(st.sampled_from(["rows", "steps", "both"]))
    if caps != "steps":
        chosen["batch_size"] = draw(st.integers(1, 20))
    if caps != "rows":
        chosen["max_padded_steps"] = draw(st.integers(longest, 10 * longest))
    if draw(st.booleans()):
        inner = draw(st.sets(st.integers(1, 90), max_size=5))
        chosen["edges"] = sorted({edge for edge in inner if edge < longest} | {longest + draw(st.integers(0, 30))})
    else:
        chosen["num_buckets"] = draw(st.one_of(st.just("auto"), st.integers(1, 8)))
    return chosen


def world(world_size: int, **chosen: Any) -> list[BucketSampler]:
    return [BucketSampler(**chosen, rank=rank, world_size=world_size) for rank in range(world_size)]


def restored(state: dict[str, Any], *, world_size: int, **chosen: Any) -> list[BucketSampler]:
    samplers = world(world_size, **chosen)
    for sampler in samplers:
        sampler.load_state_dict(json.loads(json.dumps(state)))
    return samplers


def draw_steps(samplers: list[BucketSampler], count: int) -> list[int]:
    """The sequences of the next `count` steps on all ranks."""
    drawn = []
    for sampler in samplers:
        iterator = iter(sampler)
        drawn += [index for _ in range(count) for index in next(iterator)]
    return drawn


def steps_left(sampler: BucketSampler) -> int:
    *_, used = sampler.state_dict()["used"][-1]
    return len(sampler) - int(used)


def flat(batches: list[list[int]]) -> list[int]:
    return [index for batch in batches for index in batch]


@settings(deadline=None, max_examples=80)
@given(chosen=options(), world_size=WORLD_SIZES, epoch=st.integers(0, 1000))
def test_every_sequence_once_under_every_cap(chosen: Options, world_size: int, epoch: int) -> None:
    samplers = world(world_size, **chosen)
    for sampler in samplers:
        sampler.set_epoch(epoch)
    num_steps = len(samplers[0])
    by_rank = [list(sampler) for sampler in samplers]
    assert {len(batches) for batches in by_rank} == {num_steps}
    assert sorted(flat([flat(batches) for batches in by_rank])) == list(range(len(chosen["lengths"])))
    assert all(type(index) is int for batches in by_rank for index in flat(batches))
    lengths_N, edges_K = np.array(chosen["lengths"]), samplers[0].edges
    for shares in zip(*by_rank, strict=True):
        assert len({int(np.searchsorted(edges_K, lengths_N[index])) for index in flat(list(shares))}) == 1
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= chosen.get("batch_size", math.inf)
        for share in filter(None, shares):
            longest = max(lengths_N[share])
            edge = edges_K[np.searchsorted(edges_K, longest)]
            assert len(share) * longest <= len(share) * edge <= chosen.get("max_padded_steps", math.inf)


@settings(deadline=None, max_examples=40)
@given(chosen=options(), world_size=st.integers(1, 5), share=st.floats(0, 1), epoch=st.integers(0, 3))
def test_a_restored_sampler_continues_as_if_never_stopped(
    chosen: Options, world_size: int, share: float, epoch: int
) -> None:
    for rank in range(world_size):
        whole, stopped, again = (BucketSampler(**chosen, rank=rank, world_size=world_size) for _ in range(3))
        for sampler in (whole, stopped):
            sampler.set_epoch(epoch)
        used = round(share * len(stopped))
        iterator, uninterrupted = iter(stopped), list(whole)
        assert [next(iterator) for _ in range(used)] == uninterrupted[:used]
        again.load_state_dict(json.loads(json.dumps(stopped.state_dict())))
        if used < len(whole):
            assert list(again) == list(iterator) == uninterrupted[used:]
        assert [list(again), list(again)] == [list(whole), list(whole)]
        assert again.epoch == whole.epoch == epoch + 3


@settings(deadline=None, max_examples=60)
@given(
    chosen=options(),
    worlds=st.lists(st.integers(1, 6), min_size=2, max_size=4),
    shares=st.lists(st.floats(0, 1), min_size=3, max_size=3),
)
def test_other_world_sizes_still_draw_every_sequence_once(
    chosen: Options, worlds: list[int], shares: list[float]
) -> None:
    samplers = world(worlds[0], **chosen)
    drawn: list[int] = []
    for share, world_size in zip(shares, worlds[1:], strict=False):
        drawn += draw_steps(samplers, round(share * steps_left(samplers[0])))
        samplers = restored(samplers[-1].state_dict(), world_size=world_size, **chosen)
        if samplers[0].epoch == 1:
            break
    else:
        drawn += draw_steps(samplers, steps_left(samplers[0]))
    assert sorted(drawn) == list(range(len(chosen["lengths"])))
    for sampler, fresh in zip(samplers, world(len(samplers), **chosen), strict=True):
        sampler.set_epoch(1)
        fresh.set_epoch(1)
        assert list(sampler) == list(fresh)


def test_a_state_taken_behind_a_prefetching_loader_names_the_steps_used() -> None:
    sampler, again, whole = (BucketSampler(LENGTHS, batch_size=8) for _ in range(3))
    iterator = iter(sampler)
    _ = [next(iterator) for _ in range(9)]
    again.load_state_dict(sampler.state_dict(batches_done=4))
    uninterrupted = list(whole)
    assert list(again) == uninterrupted[4:]
    _ = list(iterator)
    assert sampler.epoch == 1
    again.load_state_dict(sampler.state_dict(epoch=0, batches_done=6))
    assert list(again) == uninterrupted[6:]


def test_a_prefetching_loader_may_run_ahead_in_an_epoch_that_changed_its_world_size() -> None:
    chosen: Options = {"lengths": LENGTHS, "batch_size": 8}
    two = world(2, **chosen)
    drawn = draw_steps(two, 3)
    (one,) = restored(two[0].state_dict(), world_size=1, **chosen)
    drawn += flat(list(one)[:4])
    assert one.epoch == 1
    (again,) = restored(one.state_dict(epoch=0, batches_done=4), world_size=1, **chosen)
    assert sorted(drawn + flat(list(again))) == list(range(200))


def test_a_second_iteration_starts_again_at_the_restored_position() -> None:
    stopped, again = (BucketSampler(LENGTHS, batch_size=8, seed=1) for _ in range(2))
    iterator = iter(stopped)
    _ = [next(iterator) for _ in range(5)]
    again.load_state_dict(stopped.state_dict())
    following = next(iterator)
    again.set_epoch(0)
    first = iter(again)
    assert [next(first), next(iter(again))] == [following, following]
    again.set_epoch(1)
    again.set_epoch(0)
    assert next(iter(again)) != following


@pytest.mark.parametrize("world_size", [1, 3])
def test_epochs_and_seeds_differ_in_membership_and_order(world_size: int) -> None:
    def plans(seed: int) -> list[list[list[int]]]:
        sampler = BucketSampler(LENGTHS, batch_size=4, num_buckets=4, seed=seed, world_size=world_size)
        return [list(sampler) for _ in range(3)]

    assert plans(0) == plans(0)
    six = plans(0) + plans(1)
    members = [{frozenset(batch) for batch in epoch} for epoch in six]
    assert all(len(one & other) < 5 for place, one in enumerate(members) for other in members[:place])
    orders = [[int(LENGTHS[batch].mean()) for batch in epoch] for epoch in six]
    assert all(one != other for place, one in enumerate(orders) for other in orders[:place])
    jumped = BucketSampler(LENGTHS, batch_size=4, num_buckets=4, seed=1, world_size=world_size)
    jumped.set_epoch(2)
    assert list(jumped) == six[5]


@settings(deadline=None, max_examples=60)
@given(
    chosen=options(),
    world_size=st.integers(1, 4),
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=3),
    shares=st.lists(st.floats(0, 1), min_size=3, max_size=3),
)
def test_other_sizes_in_the_middle_still_draw_every_sequence_once(
    chosen: Options, world_size: int, sizes: list[int], shares: list[float]
) -> None:
    samplers, drawn, epoch = world(world_size, **chosen), list[int](), 0
    for size, share in zip(sizes, shares, strict=False):
        used = min(round(share * len(samplers[0])), len(samplers[0]) - 1)
        drawn += draw_steps(samplers, used)
        # As after an interruption: a restored sampler goes on in the same way.
        again = restored(samplers[0].state_dict(), world_size=world_size, **chosen)
        for sampler in (*samplers, *again):
            sampler.resize(size)
        assert [list(sampler) for sampler in again] == [list(sampler) for sampler in copied(samplers, **chosen)]
        assert {sampler.batch_size for sampler in samplers} == {size}
    rest = [list(sampler) for sampler in samplers]
    assert max(len(batch) for batches in rest for batch in batches) <= sizes[-1]
    assert sorted(drawn + flat([flat(batches) for batches in rest])) == list(range(len(chosen["lengths"])))
    following = [list(sampler) for sampler in samplers]
    assert samplers[0].epoch == epoch + 2
    assert sorted(flat([flat(batches) for batches in following])) == list(range(len(chosen["lengths"])))
    assert len(following[0]) == samplers[0].batches_per_epoch


def copied(samplers: list[BucketSampler], **chosen: Any) -> list[BucketSampler]:
    return restored(samplers[0].state_dict(), world_size=len(samplers), **chosen)


def test_a_size_that_makes_no_sense_leaves_the_sampler_as_it_was() -> None:
    sampler = BucketSampler(LENGTHS, batch_size=8)
    wanted = list(BucketSampler(LENGTHS, batch_size=8))
    for size, used in ((0, 0), (-3, 0), (2.5, 0), (4, len(wanted) + 1), (4, -1)):
        with pytest.raises(StrettoError):
            sampler.resize(size, batches_done=used)  # type: ignore[arg-type]
    assert sampler.batch_size == 8
    assert list(sampler) == wanted


def test_another_size_after_the_last_step_is_that_of_the_next_epoch() -> None:
    sampler, other = (BucketSampler(LENGTHS, batch_size=8) for _ in range(2))
    sampler.resize(5, batches_done=len(sampler))
    other.resize(5)
    other.set_epoch(1)
    assert sampler.epoch == 1
    assert list(sampler) == list(other)


def test_state_of_other_lengths_or_settings_is_refused() -> None:
    chosen: Options = {"lengths": LENGTHS, "batch_size": 8, "max_padded_steps": 600, "num_buckets": 4}
    state = BucketSampler(**chosen).state_dict()
    changes: list[Options] = [
        {"lengths": LENGTHS[::-1]}, {"lengths": LENGTHS[:-1]}, {"batch_size": 7}, {"batch_size": None},
        {"max_padded_steps": 601}, {"num_buckets": 5}, {"edges": [30, 60]}, {"shuffle": False}, {"seed": 1},
    ]  # fmt: skip
    for change in changes:
        sampler = BucketSampler(**chosen | change)
        with pytest.raises(StrettoError, match="other lengths or settings"):
            sampler.load_state_dict(state)
        assert sampler.state_dict()["used"] == [[1, change.get("batch_size", 8) or 0, 0]]


def test_state_of_another_version_is_refused() -> None:
    sampler = BucketSampler(LENGTHS, batch_size=8)
    for state in (sampler.state_dict() | {"version": 1}, {}):
        with pytest.raises(StrettoError, match=r"version (1|None), not 2"):
            sampler.load_state_dict(state)


def test_state_of_another_cost_is_refused_even_when_one_rank_would_cut_alike() -> None:
    lengths = [1] * 100 + [100] * 100
    one = BucketSampler(lengths, batch_size=2, cost=lambda length: length, world_size=8)
    other = BucketSampler(lengths, batch_size=2, cost=lambda length: length + 2000, world_size=8)
    assert one.edges.tolist() != other.edges.tolist()
    with pytest.raises(StrettoError, match="other lengths or settings"):
        other.load_state_dict(one.state_dict())


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("used", [[[1, 2, 99]], [[1, 2, -2]], [[1, 2, 99], [1, 2, 0]], [[0, 2, 1]], [[1, 1]], []])
def test_state_of_steps_that_are_not_there_is_refused(world_size: int, used: list[list[int]]) -> None:
    state = BucketSampler([3] * 8, batch_size=2).state_dict() | {"used": used}
    with pytest.raises(StrettoError, match="state"):
        BucketSampler([3] * 8, batch_size=2, world_size=world_size).load_state_dict(state)


def test_an_edge_beyond_the_budget_does_not_break_it() -> None:
    report = BucketSampler([5, 3, 4], max_padded_steps=6, edges=[4, 20]).report()
    assert report.largest_batch == 5


@pytest.mark.parametrize(
    "form", [list, torch.tensor, lambda v: np.array(v, dtype=np.uint8), lambda v: np.array(v, float)]
)
def test_forms_of_lengths_and_settings_agree(form: Callable[[Any], Any]) -> None:
    values = [250, 251, 3, 4, 99, 100, 101] * 9
    plain = BucketSampler(values, batch_size=2, max_padded_steps=600, num_buckets=3, world_size=2, rank=1)
    given_lengths = form(values)
    numbers: Options = {
        "batch_size": np.int32(2), "max_padded_steps": 600.0, "num_buckets": np.int64(3), "seed": np.int64(0),
        "world_size": np.int64(2), "rank": np.uint8(1), "shuffle": np.bool_(True),
    }  # fmt: skip
    odd = BucketSampler(given_lengths, **numbers)
    given_lengths[0] = 1
    assert list(odd) == list(plain)
    assert json.loads(json.dumps(odd.state_dict())) == plain.state_dict()


@pytest.mark.parametrize("size", [2**31, 2**62, 2**63 - 1, 10**30])
def test_great_sizes_are_no_cap(size: int) -> None:
    for chosen in ({"batch_size": size}, {"max_padded_steps": size}, {"batch_size": size, "max_padded_steps": size}):
        batches = [list(sampler) for sampler in world(3, lengths=[1, 2, 3, 4], num_buckets=1, **chosen)]
        assert sorted(len(batch) for (batch,) in batches) == [1, 1, 2]


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"batch_size": "many"}, "batch_size='many'"), ({"batch_size": math.nan}, "batch_size=nan"),
        ({"max_padded_steps": math.inf}, "max_padded_steps=inf"), ({"lengths": [3, 0]}, "sequence 1 has length 0"),
        ({"edges": [5, 5, 9]}, r"edges \[5, 5, 9\]"), ({"edges": [0, 9]}, "edge"),
        ({"world_size": 0}, "world_size=0"), ({"world_size": 1.5}, r"world_size=1\.5"),
    ],
)  # fmt: skip
def test_settings_that_cannot_be_used_are_named(change: Options, named: str) -> None:
    chosen: Options = {"lengths": [5, 9, 2], "batch_size": 2}
    with pytest.raises(StrettoError, match=named):
        list(BucketSampler(**chosen | change))


def test_rank_and_world_size_are_those_of_a_running_process_group(monkeypatch: pytest.MonkeyPatch) -> None:
    assert (BucketSampler([1], batch_size=1).rank, BucketSampler([1], batch_size=1).world_size) == (0, 1)
    for name, value in (("is_initialized", True), ("get_world_size", 6), ("get_rank", 4)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    sampler = BucketSampler([1], batch_size=1)
    assert (sampler.rank, sampler.world_size) == (4, 6)


def test_a_copy_of_a_sampler_continues_on_its_own() -> None:
    sampler = BucketSampler(np.arange(1, 60), batch_size=4, num_buckets=3)
    drawn = iter(sampler)
    first = [next(drawn) for _ in range(5)]
    twin = pickle.loads(pickle.dumps(sampler))
    assert list(twin) == list(copy.deepcopy(sampler)) == list(sampler)
    assert first == list(BucketSampler(np.arange(1, 60), batch_size=4, num_buckets=3))[:5]


def test_it_is_a_batch_sampler_of_torch() -> None:
    sampler = BucketSampler(LENGTHS, batch_size=8)
    assert isinstance(sampler, BatchSampler)
    assert (sampler.batch_size, sampler.drop_last, sampler.sampler) == (8, False, sampler)
    sampler.sampler.set_epoch(3)
    assert sampler.epoch == 3


def test_ranks_that_are_joined_later_share_the_rest_of_the_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    samplers = [BucketSampler(LENGTHS, batch_size=8) for _ in range(2)]
    drawn = draw_steps(samplers[:1], 3)
    state = samplers[0].state_dict()
    samplers[1].load_state_dict(state)
    for name, value in (("is_initialized", True), ("get_world_size", 2), ("get_rank", 0)):
        monkeypatch.setattr(torch.distributed, name, lambda value=value: value)
    batches, whole = list(samplers[0]), samplers[0].batches_per_epoch
    assert (samplers[0].rank, samplers[0].world_size, samplers[0].epoch) == (0, 2, 1)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    others = list(samplers[1])
    assert (samplers[1].rank, samplers[1].world_size, len(others)) == (1, 2, len(batches))
    assert sorted(drawn + flat(batches) + flat(others)) == list(range(200))
    assert whole == len(samplers[0]) == BucketSampler(LENGTHS, batch_size=8, rank=0, world_size=2).batches_per_epoch
    # Who named the ranks keeps them.
    assert sorted(flat(list(BucketSampler(LENGTHS, batch_size=8, rank=0, world_size=1)))) == list(range(200))


def test_a_framework_that_would_share_the_batches_again_is_refused_with_the_remedy() -> None:
    """As Lightning makes a batch sampler again: outside its hooks by position, inside by name."""
    theirs = SequentialSampler(range(200))
    again: list[Callable[[], BucketSampler]] = [
        lambda: BucketSampler(theirs, batch_size=8, drop_last=False),  # type: ignore[arg-type]
        lambda: BucketSampler(LENGTHS, batch_size=8, sampler=theirs),  # type: ignore[arg-type]
    ]
    for make in again:
        with pytest.raises(StrettoError, match="use_distributed_sampler=False"):
            make()
    with pytest.raises(StrettoError, match="drops nothing"):
        BucketSampler(LENGTHS, batch_size=8, drop_last=True)  # type: ignore[arg-type]
