import dataclasses
import importlib
import io
import json

import numpy as np
import pytest
from rich.console import Console

from bench.buckets import BucketsBenchSettings, run_buckets_bench
from bench.buckets_tables import tables
from bench.drawn_epoch import count_epoch, order_match, timed_draw
from bench.length_laws import LAW_NAMES, length_law
from bench.samplers import (
    OURS,
    Draw,
    LengthGroupedContestant,
    LhotseContestant,
    ShuffledContestant,
    contestants,
)
from stretto import StrettoError, extras

PEERS = ("lhotse", "transformers")
TINY = BucketsBenchSettings(
    num_sequences=600, num_buckets=(4,), world_size=2, laws=("uniform",), seeds=2, world_sizes=(1, 2), num_large=2000
)


@pytest.fixture
def without_peers(monkeypatch):
    real = importlib.import_module

    def import_module(name, package=None):
        if name.partition(".")[0] in PEERS:
            raise ImportError(f"No module named {name!r}")
        return real(name, package)

    monkeypatch.setattr(extras.importlib, "import_module", import_module)


@pytest.fixture
def tiny(without_peers):
    return run_buckets_bench(TINY)


def draw(contestant, lengths_N, *, world_size, seed=0, max_padded_steps=4000):
    return [
        list(
            contestant.batches(
                lengths_N,
                Draw(
                    max_padded_steps=max_padded_steps,
                    num_buckets=5,
                    seed=seed,
                    epoch=seed,
                    rank=rank,
                    world_size=world_size,
                ),
            )
        )
        for rank in range(world_size)
    ]


def printed(bench):
    stream = io.StringIO()
    for table in tables(bench):
        Console(width=120, file=stream).print(table)
    return stream.getvalue()


@pytest.mark.usefixtures("without_peers")
def test_our_row_keeps_every_promise():
    settings = BucketsBenchSettings(laws=("log-normal", "two-mode"), seeds=2, world_sizes=(1,), num_large=1000)
    rows = [row for row in run_buckets_bench(settings).rows if row.sampler == OURS]
    assert [(row.law, row.num_buckets) for row in rows] == [
        ("log-normal", 10),
        ("log-normal", 30),
        ("two-mode", 10),
        ("two-mode", 30),
    ]
    for row in rows:
        assert row.coverage == 1
        assert row.repeated == 0
        assert row.cap <= 1
        assert row.length_straggler < 1.02
        assert row.token_straggler < 1.02
        assert row.waste <= row.waste_to_edge
        assert not row.same_order
        assert abs(row.correlation) < 0.1


def test_without_peers_the_rest_runs_and_tells_what_is_missing(tiny):
    ours = {OURS, f"{OURS} auto", f"{OURS} rows"}
    assert {row.sampler for row in tiny.rows} == ours | {"equal mass", "percentile", "uniform", "shuffled"}
    assert [line.partition(":")[0] for line in tiny.missing] == list(PEERS)
    assert all("pip install 'stretto[peers]'" in line for line in tiny.missing)
    assert {row.sampler for row in tiny.scaling} == {OURS}
    text = printed(tiny)
    assert text.count("left out: this needs the package") == 2


def test_a_peer_whose_import_breaks_is_left_out(monkeypatch):
    def broken(name, package=None):
        raise RuntimeError("built for another torch")

    monkeypatch.setattr(extras.importlib, "import_module", broken)
    missing = run_buckets_bench(TINY).missing
    assert len(missing) == 2
    assert all("built for another torch" in line and "stretto[peers]" in line for line in missing)


def test_json_round_trip(tiny):
    read = json.loads(tiny.to_json())
    assert set(read) == {field.name for field in dataclasses.fields(tiny)}
    assert type(tiny.rows[0])(**read["rows"][0]) == tiny.rows[0]
    assert [type(tiny.edges[0])(**row) for row in read["edges"]] == list(tiny.edges)
    assert [type(tiny.scaling[0])(**row) for row in read["scaling"]] == list(tiny.scaling)
    assert read["missing"] == list(tiny.missing)


@pytest.mark.usefixtures("without_peers")
def test_the_result_is_written_whole(tmp_path):
    out = tmp_path / "new" / "buckets.json"
    bench = run_buckets_bench(dataclasses.replace(TINY, out=out))
    assert json.loads(out.read_text(encoding="utf-8")) == json.loads(bench.to_json())
    assert [path.name for path in out.parent.iterdir()] == ["buckets.json"]


def test_the_other_tables_hold_what_was_asked(tiny):
    assert [row.world_size for row in tiny.scaling] == [1, 2]
    assert [(row.num_lengths, row.num_distinct) for row in tiny.edges] == [(2000, 2000)] * 6
    assert [row.num_buckets for row in tiny.edge_waste] == [5, 10, 30]
    for row in tiny.edge_waste:
        assert 0 < row.optimal <= min(row.equal_mass, row.percentile, row.uniform)
    assert tiny.machine.packages["torch"] is not None


def test_tables_fit_120_columns_and_put_ours_first(tiny):
    text = printed(tiny)
    assert max(map(len, text.splitlines())) <= 120
    assert "…" not in text
    made = tables(tiny)
    assert next(made[0].columns[0].cells) == OURS
    assert made[0].rows[0].style == "bold"
    assert all(column.justify == "right" for column in made[0].columns[1:])


@pytest.mark.parametrize(
    "bad", [{"seeds": 1}, {"num_buckets": (10, 1)}, {"num_buckets": ()}, {"laws": ()}, {"max_padded_steps": 0}]
)
def test_bad_settings_are_refused(bad):
    with pytest.raises(StrettoError):
        BucketsBenchSettings(**bad)


def test_more_buckets_than_sequences_are_refused():
    with pytest.raises(StrettoError, match="num_sequences=20 cannot fill 30 buckets"):
        BucketsBenchSettings(num_sequences=20)


def test_an_unknown_law_is_refused_with_the_names():
    with pytest.raises(StrettoError, match=r"'zipf'.*log-normal-wide.*handwriting"):
        BucketsBenchSettings(laws=("zipf",))


@pytest.mark.parametrize("name", [name for name in LAW_NAMES if name != "handwriting"])
def test_laws_are_pure_and_stay_in_range(name):
    law = length_law(name)
    lengths_N = law.draw(5000)
    low, high = map(int, law.description.rpartition("[")[2].rstrip("]").split(","))
    assert lengths_N.dtype == np.int64
    assert low <= lengths_N.min()
    assert lengths_N.max() <= high
    np.testing.assert_array_equal(lengths_N, law.draw(5000))
    assert (lengths_N != law.draw(5000, seed=1)).any()


def test_counts_of_a_small_epoch_by_hand():
    lengths_N = np.array([2, 4, 6, 8, 10])
    counts = count_epoch(
        [[[0, 1], [2]], [[3], [3]]], lengths_N=lengths_N, max_padded_steps=10, edges_K=np.array([4, 10])
    )
    assert counts.waste == pytest.approx(1 - 28 / (8 + 6 + 8 + 8))
    assert counts.waste_to_edge == pytest.approx(1 - 28 / (8 + 10 + 10 + 10))
    assert counts.cap == pytest.approx(0.8)
    assert counts.coverage == pytest.approx(4 / 5)
    assert counts.repeated == pytest.approx(1 / 5)
    assert (counts.batches, counts.shapes, counts.shapes_to_edge) == (4, 3, 2)
    assert counts.serial_steps == 16
    assert counts.length_straggler == pytest.approx(16 / ((4 + 8 + 6 + 8) / 2))
    assert counts.token_straggler == pytest.approx(16 / ((8 + 8 + 6 + 8) / 2))


def test_empty_shares_are_no_batches_but_make_others_wait():
    counts = count_epoch([[[0], [1]], [[2], []]], lengths_N=np.array([5, 5, 5]), max_padded_steps=5)
    assert counts.batches == 3
    assert counts.waste_to_edge is None
    assert counts.length_straggler == pytest.approx(10 / 7.5)


def test_order_match_is_one_for_the_same_order_and_near_zero_for_shuffles():
    lengths_N = np.arange(1, 1001)
    rng = np.random.default_rng(0)
    first, second = ([[int(number)] for number in rng.permutation(1000)] for _ in range(2))
    ruler_K = np.array([250, 500, 750, 1000])
    assert order_match(first, first, lengths_N=lengths_N, ruler_K=ruler_K) == 1
    assert abs(order_match(first, second, lengths_N=lengths_N, ruler_K=ruler_K)) < 0.1
    assert order_match(first, first, lengths_N=lengths_N, ruler_K=np.array([1000])) == 0


def test_a_draw_stops_after_the_asked_batches():
    drawn = timed_draw(([number] for number in range(10)), most=3)
    assert drawn.batches == [[0], [1], [2]]
    assert timed_draw(iter([[1]])).ms_per_batch is None


@pytest.mark.parametrize("world_size", [1, 3])
@pytest.mark.parametrize("contestant", contestants(), ids=lambda contestant: contestant.name)
def test_every_contestant_deals_every_sequence_in_equal_steps(contestant, world_size):
    try:
        contestant.require()
    except StrettoError as error:
        pytest.skip(str(error))
    lengths_N = np.random.default_rng(0).integers(10, 200, 700)
    ranks = draw(contestant, lengths_N, world_size=world_size)
    assert len({len(batches) for batches in ranks}) == 1
    assert {number for batches in ranks for batch in batches for number in batch} == set(range(700))


def test_the_length_grouped_sampler_fills_the_last_round_with_repeats():
    contestant = LengthGroupedContestant()
    try:
        contestant.require()
    except StrettoError as error:
        pytest.skip(str(error))
    lengths_N = np.random.default_rng(0).integers(10, 200, 701)
    ranks = draw(contestant, lengths_N, world_size=4)
    assert len({len(batch) for batches in ranks for batch in batches}) == 1
    counts = count_epoch(ranks, lengths_N=lengths_N, max_padded_steps=4000)
    assert 0 < counts.repeated < 0.3
    assert (
        counts.waste
        < count_epoch(
            draw(ShuffledContestant(), lengths_N, world_size=4), lengths_N=lengths_N, max_padded_steps=4000
        ).waste
    )


def test_lhotse_keeps_one_order_of_buckets_for_all_seeds():
    contestant = LhotseContestant()
    try:
        contestant.require()
    except StrettoError as error:
        pytest.skip(str(error))
    lengths_N = length_law("uniform").draw(3000)
    first, second = (draw(contestant, lengths_N, world_size=1, seed=seed, max_padded_steps=8000)[0] for seed in (0, 1))
    assert order_match(first, second, lengths_N=lengths_N, ruler_K=np.array([450, 630, 780, 900, 1000])) > 0.7


@pytest.mark.parametrize("width", [80, 120])
def test_no_number_is_cut_off(tiny, width):
    console = Console(width=width, record=True, file=io.StringIO())
    for table in tables(tiny, width=width):
        console.print(table)
    assert "\u2026" not in console.export_text()
