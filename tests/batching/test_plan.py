"""The plan of an epoch: every member once, whole buckets, fair shares, an order without runs; and its report.

Shape legend: N sequences, M members, K buckets, G groups.
"""

import dataclasses
import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.batching import BucketSampler, EpochPlan, SamplerReport, adjacent_correlation, bucket_of, optimal_edges
from stretto.batching.plan import Buckets, plan_epoch

Ints = npt.NDArray[np.int64]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Scene:
    """Everything that a plan is made from."""

    lengths_N: Ints
    members_M: Ints
    buckets: Buckets
    world_size: int
    seed: int | None

    def plan(self) -> EpochPlan:
        rng = None if self.seed is None else np.random.default_rng(self.seed)
        return plan_epoch(
            self.members_M, lengths_N=self.lengths_N, buckets=self.buckets, world_size=self.world_size, rng=rng
        )


@st.composite
def scenes(draw: st.DrawFn) -> Scene:
    lengths_N = np.array(draw(st.lists(st.integers(1, 80), min_size=1, max_size=150)))
    keep = draw(st.floats(0.0, 1.0))
    edges_K = optimal_edges(lengths_N, draw(st.integers(1, 9)))
    rows_K = np.array(draw(st.lists(st.integers(1, 12), min_size=len(edges_K), max_size=len(edges_K))))
    return Scene(
        lengths_N=lengths_N,
        members_M=np.flatnonzero(np.random.default_rng(0).random(len(lengths_N)) <= keep),
        buckets=Buckets(edges_K=edges_K, bucket_N=bucket_of(lengths_N, edges_K), rows_K=rows_K),
        world_size=draw(st.integers(1, 64)),
        seed=draw(st.one_of(st.none(), st.integers(0, 2**40))),
    )


def groups_of(plan: EpochPlan) -> list[list[int]]:
    bounds = plan.offsets_G.tolist()
    return [plan.order_M[begin:end].tolist() for begin, end in itertools.pairwise(bounds)]


@settings(deadline=None, max_examples=150)
@given(scene=scenes())
def test_every_member_once_in_whole_groups_of_one_bucket(scene: Scene) -> None:
    plan, buckets = scene.plan(), scene.buckets
    assert sorted(plan.order_M.tolist()) == scene.members_M.tolist()
    assert plan.num_batches == len(groups_of(plan))
    for step, bucket in zip(groups_of(plan), plan.bucket_G.tolist(), strict=True):
        assert 1 <= len(step) <= buckets.rows_K[bucket] * scene.world_size
        assert set(buckets.bucket_N[step].tolist()) == {bucket}
    for bucket in range(len(buckets.edges_K)):
        sizes = [len(step) for step, at in zip(groups_of(plan), plan.bucket_G.tolist(), strict=True) if at == bucket]
        full = buckets.rows_K[bucket] * scene.world_size
        assert len(sizes) == -(-sum(sizes) // full)


@settings(deadline=None, max_examples=150)
@given(scene=scenes())
def test_shares_are_fair_and_agree_with_their_offsets(scene: Scene) -> None:
    plan, world_size = scene.plan(), scene.world_size
    offsets = plan.share_offsets(world_size)
    assert len(offsets) == plan.num_batches * world_size + 1
    place = 0
    for step, members in enumerate(groups_of(plan)):
        shares = [plan.share(step, rank=rank, world_size=world_size) for rank in range(world_size)]
        assert [member for share in shares for member in share] == members
        sizes = [len(share) for share in shares]
        assert max(sizes) - min(sizes) <= 1
        assert max(sizes) <= scene.buckets.rows_K[plan.bucket_G[step]]
        for share in shares:
            assert plan.order_M[offsets[place] : offsets[place + 1]].tolist() == share
            assert all(type(member) is int for member in share)
            place += 1
    assert offsets[-1] == len(scene.members_M)


@settings(deadline=None, max_examples=60)
@given(scene=scenes(), share=st.floats(0.0, 1.0))
def test_unused_members_are_those_of_the_later_groups(scene: Scene, share: float) -> None:
    plan = scene.plan()
    used = round(share * plan.num_batches)
    done = {member for step in groups_of(plan)[:used] for member in step}
    assert plan.unused(used).tolist() == sorted(set(scene.members_M.tolist()) - done)
    assert plan.unused(0).tolist() == scene.members_M.tolist()
    assert plan.unused(plan.num_batches).tolist() == []


@settings(deadline=None, max_examples=60)
@given(scene=scenes())
def test_plan_is_a_pure_function(scene: Scene) -> None:
    one, members_M = scene.plan(), scene.members_M.copy()
    other = scene.plan()
    for name in ("order_M", "offsets_G", "bucket_G"):
        np.testing.assert_array_equal(getattr(one, name), getattr(other, name))
    np.testing.assert_array_equal(scene.members_M, members_M)


@settings(deadline=None, max_examples=60)
@given(scene=scenes())
def test_without_a_generator_everything_is_sorted_by_length(scene: Scene) -> None:
    plan = dataclasses.replace(scene, seed=None).plan()
    wanted = sorted(scene.members_M.tolist(), key=lambda member: scene.lengths_N[member])
    assert plan.order_M.tolist() == wanted


def plan_of_law(law: str, *, seed: int, count: int, rows: int) -> tuple[EpochPlan, Ints]:
    rng = np.random.default_rng(seed)
    laws: dict[str, Callable[[], Ints | npt.NDArray[np.float64]]] = {
        "lognormal": lambda: rng.lognormal(5.0, 0.7, count),
        "two lengths": lambda: rng.choice([10, 1000], count, p=[0.9, 0.1]),
        "outlier": lambda: np.append(rng.integers(5, 9, count - 1), 10_000),
    }
    lengths_N = np.clip(laws[law](), 1, 10_000).astype(np.int64)
    edges_K = optimal_edges(lengths_N, 8)
    buckets = Buckets(
        edges_K=edges_K, bucket_N=bucket_of(lengths_N, edges_K), rows_K=np.full(len(edges_K), rows, dtype=np.int64)
    )
    plan = plan_epoch(
        np.arange(count), lengths_N=lengths_N, buckets=buckets, world_size=1, rng=np.random.default_rng([seed, 1])
    )
    return plan, lengths_N


@pytest.mark.parametrize("law", ["lognormal", "two lengths", "outlier"])
def test_a_batch_says_nothing_of_the_next(law: str) -> None:
    for seed in range(60):
        plan, lengths_N = plan_of_law(law, seed=seed, count=960 if seed % 2 else 3200, rows=8)
        means = np.array([lengths_N[step].mean() for step in groups_of(plan)])
        assert len(means) >= 100
        assert abs(np.corrcoef(means[:-1], means[1:])[0, 1]) < 0.1


def test_the_short_step_of_a_bucket_may_come_at_any_time() -> None:
    places = []
    for seed in range(30):
        plan, _ = plan_of_law("lognormal", seed=seed, count=963, rows=8)
        sizes_G = np.diff(plan.offsets_G)
        places.append(float(np.flatnonzero(sizes_G < 8).mean()) / plan.num_batches)
    assert 0.4 < np.mean(places) < 0.6


@settings(deadline=None, max_examples=60)
@given(values=st.lists(st.floats(-1e6, 1e6).map(lambda value: round(value, 3)), min_size=3, max_size=40, unique=True))
def test_adjacent_correlation_is_the_usual_one(values: list[float]) -> None:
    values_G = np.array(values)
    spread = min(np.ptp(values_G[:-1]), np.ptp(values_G[1:]))
    if spread > 1e-3 * np.abs(values_G).max():
        wanted = np.corrcoef(values_G[:-1], values_G[1:])[0, 1]
        assert adjacent_correlation(values_G) == pytest.approx(wanted, abs=1e-6)


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 2.0], [3.0, 3.0, 3.0, 3.0]])
def test_adjacent_correlation_is_zero_where_it_is_not_defined(values: list[float]) -> None:
    assert adjacent_correlation(np.array(values)) == 0.0


@pytest.mark.parametrize("seed", [None, 0])
def test_a_bucket_for_each_of_many_lengths(seed: int | None) -> None:
    lengths_N = np.arange(1, 40_001)
    buckets = Buckets(edges_K=lengths_N, bucket_N=lengths_N - 1, rows_K=np.full(40_000, 2))
    scene = Scene(lengths_N=lengths_N, members_M=np.arange(40_000), buckets=buckets, world_size=1, seed=seed)
    plan = scene.plan()
    assert plan.num_batches == 40_000
    assert np.array_equal(plan.bucket_G, plan.order_M)


def test_nothing_left_makes_no_steps() -> None:
    lengths_N = np.array([4, 5, 6])
    buckets = Buckets(edges_K=np.array([6]), bucket_N=np.zeros(3, dtype=np.int64), rows_K=np.array([2]))
    empty_M = np.zeros(0, dtype=np.int64)
    for seed in (None, 3):
        plan = Scene(lengths_N=lengths_N, members_M=empty_M, buckets=buckets, world_size=2, seed=seed).plan()
        assert plan.num_batches == 0
        assert plan.offsets_G.tolist() == [0]
        assert plan.share_offsets(2).tolist() == [0]


LENGTHS = np.clip(np.random.default_rng(0).lognormal(5.0, 0.6, 1500), 5, 900).astype(np.int64)


def recount(chosen: dict[str, Any], *, world_size: int, epoch: int) -> SamplerReport:
    samplers = [BucketSampler(**chosen, rank=rank, world_size=world_size) for rank in range(world_size)]
    for sampler in samplers:
        sampler.set_epoch(epoch)
    lengths, edges = chosen["lengths"], samplers[0].edges.tolist()
    shapes, shapes_to_edge, buckets = set(), set(), set()
    real = padded = padded_to_edge = largest = most_rows = drawn = 0
    waiting, working, means = 0.0, 0.0, []
    for shares in zip(*samplers, strict=True):
        longest_of_ranks, of_step = [], []
        for share in shares:
            longest = max((lengths[index] for index in share), default=0)
            longest_of_ranks.append(longest)
            of_step += [lengths[index] for index in share]
            if share:
                edge = min(edge for edge in edges if edge >= longest)
                buckets.add(edge)
                shapes.add((len(share), longest))
                shapes_to_edge.add((len(share), edge))
                padded += len(share) * longest
                padded_to_edge += len(share) * edge
                largest, most_rows = max(largest, len(share) * edge), max(most_rows, len(share))
        real, drawn = real + sum(of_step), drawn + len(of_step)
        waiting += max(longest_of_ranks)
        working += sum(longest_of_ranks) / world_size
        means.append(sum(of_step) / len(of_step))
    return SamplerReport(
        epoch=epoch,
        num_sequences=drawn,
        num_buckets=len(buckets),
        batches=len(means),
        shapes=len(shapes),
        shapes_to_edge=len(shapes_to_edge),
        padding=1 - real / padded,
        padding_to_edge=1 - real / padded_to_edge,
        largest_batch=largest,
        most_rows=most_rows,
        straggler=waiting / working,
        correlation=adjacent_correlation(np.array(means)),
    )


@settings(deadline=None, max_examples=80)
@given(
    lengths=st.lists(st.integers(1, 60), min_size=1, max_size=120),
    size=st.sampled_from([{"batch_size": 3}, {"max_padded_steps": 200}, {"batch_size": 5, "max_padded_steps": 90}]),
    buckets=st.sampled_from([{}, {"num_buckets": 4}, {"edges": [7, 30, 100]}]),
    shuffle=st.booleans(),
    world_size=st.one_of(st.integers(1, 4), st.integers(1, 64)),
    epoch=st.integers(0, 9),
)
def test_report_equals_a_slow_recount(
    *,
    lengths: list[int],
    size: dict[str, int],
    buckets: dict[str, Any],
    shuffle: bool,
    world_size: int,
    epoch: int,
) -> None:
    chosen = {"lengths": lengths, "shuffle": shuffle, **size, **buckets}
    sampler = BucketSampler(**chosen, rank=world_size - 1, world_size=world_size)
    sampler.set_epoch(epoch)
    wanted = dataclasses.asdict(recount(chosen, world_size=world_size, epoch=epoch))
    assert dataclasses.asdict(sampler.report()) == pytest.approx(wanted, rel=1e-9, abs=1e-7)


def test_report_leaves_the_position_alone() -> None:
    sampler = BucketSampler(LENGTHS, max_padded_steps=2000)
    iterator = iter(sampler)
    _ = [next(iterator) for _ in range(3)]
    before = sampler.state_dict()
    assert sampler.report() == sampler.report()
    assert sampler.state_dict() == before


def test_the_text_has_a_line_a_number() -> None:
    report = BucketSampler(LENGTHS, max_padded_steps=2000).report()
    lines = str(report).splitlines()
    assert len(lines) == 8
    assert lines[0].endswith("1,500")
    assert f"{report.padding:.1%}" in lines[4]
    assert math.isclose(float(lines[6].split()[-1]), report.straggler, abs_tol=5e-4)
