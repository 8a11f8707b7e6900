"""The benchmark of several workers: costs that were put in come out, and what is predicted makes sense."""

import json
from pathlib import Path
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from bench import workers
from bench.stragglers import Waiting, simulated_waiting, straggling_contestants
from bench.workers import WAYS, WorkersBenchSettings, run_workers_bench
from bench.workers_model import WORLDS, CostModel, predict, simulated
from bench.workers_page import write_workers_figure, write_workers_page
from bench.workers_tables import bench_tables
from stretto.data import Labels, SequenceSet, write_npz


def _model(*, exchange: float = 0.0, a_byte: float = 0.0) -> CostModel:
    return CostModel(fixed=1e-3, a_step=1e-6, exchange=exchange, a_byte=a_byte, num_bytes=1000)


def test_costs_are_found_again() -> None:
    rng = np.random.default_rng(0)
    steps = rng.integers(500, 5000, 200)
    updates = [{"steps_real": float(n), "seconds": 2e-3 + 3e-6 * n} for n in steps]
    updates[7]["seconds"] = 5.0
    exchanges = [(size, 2 * 1e-4 + size * 1e-9) for size in (1 << 10, 1 << 22)]
    found = CostModel.fitted(updates, exchanges, num_bytes=1 << 20)
    assert found.fixed == pytest.approx(2e-3, rel=1e-3)
    assert found.a_step == pytest.approx(3e-6, rel=1e-3)
    assert found.exchange == pytest.approx(1e-4, rel=1e-6)
    assert found.summing(2) == pytest.approx(2e-4 + (1 << 20) * 1e-9, rel=1e-6)
    assert found.summing(1) == 0.0


def test_equal_sequences_and_free_sums_lose_nothing() -> None:
    rows = predict(_model(), np.full(256, 50), batch_size=4)
    assert [row.workers for row in rows] == list(WORLDS)
    assert all(row.efficiency == pytest.approx(1.0, abs=0.02) for row in rows)


def test_what_costs_more_helps_less() -> None:
    lengths_N = np.random.default_rng(1).integers(5, 200, 500)
    cheap = predict(_model(exchange=1e-5, a_byte=1e-9), lengths_N, batch_size=4)
    dear = predict(_model(exchange=1e-4, a_byte=1e-9), lengths_N, batch_size=4)
    assert cheap[0].efficiency == dear[0].efficiency == 1.0
    for one, other in zip(cheap[1:], dear[1:], strict=True):
        assert other.efficiency < one.efficiency < 1.0
        assert 0.0 < one.stragglers + one.summing < 1.0
    assert dear[-1].summing > dear[1].summing


def test_shares_of_unequal_size_make_workers_wait() -> None:
    row = simulated(_model(), np.array([[1000, 3000], [2000, 2000]]))
    # The first update takes 4 ms, of which one waits 2 ms and the other none; the second 3 ms.
    assert row.stragglers == pytest.approx(1e-3 / 7e-3)
    assert row.steps_per_second == pytest.approx(8000 / 7e-3)
    assert row.summing == 0.0


def test_the_same_bucket_on_all_workers_makes_them_wait_less() -> None:
    lengths_N = np.random.default_rng(1).integers(5, 200, 500)
    ours, shuffled = (simulated_waiting(name, _model(), lengths_N, batch_size=4) for name in ("stretto", "shuffled"))
    assert ours.keys() == shuffled.keys()
    assert all(0.0 < ours[size] < shuffled[size] / 2 for size in ours)


def test_samplers_that_are_missing_are_told() -> None:
    names, missing = straggling_contestants()
    assert {"stretto", "shuffled"} <= set(names)
    assert ("lhotse" in names) != any(line.startswith("lhotse") for line in missing)


def test_what_was_waited_for_is_told_apart() -> None:
    ranks = [
        {"updates": [{"waited": 0.1, "steps_real": 1000, "seconds": 1.0}]},
        {"updates": [{"waited": 0.3, "steps_real": 2000, "seconds": 1.0}]},
    ]
    found = Waiting.of([ranks], a_step=1e-4)
    assert found.total == pytest.approx(0.2)
    assert found.summing == pytest.approx(0.1)
    assert found.shares == pytest.approx(0.05)
    assert found.uneven == pytest.approx(0.05)


def test_a_whole_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # One sampler beside ours is enough to see that it is run.
    monkeypatch.setattr(workers, "straggling_contestants", lambda: (["shuffled"], ["lhotse: left out"]))
    rng = np.random.default_rng(0)
    lengths_N = rng.integers(3, 12, 60)
    data = SequenceSet.from_flat(
        rng.normal(size=(lengths_N.sum(), 2)).astype(np.float32),
        offsets=np.cumsum([0, *lengths_N]),
        targets=Labels.check(np.arange(60) % 2, names=None, source="made"),
        split_N=np.repeat([0, 1, 2], [40, 10, 10]),
    )
    write_npz(tmp_path / "made.npz", data)
    settings = WorkersBenchSettings(
        task="classify", data=tmp_path / "made.npz", batch_size=4, updates=4, rounds=1, json=tmp_path / "workers.json"
    )
    said: list[str] = []
    bench = run_workers_bench(settings, tell=said.append)
    assert set(bench.speeds) == set(WAYS)
    assert all(speed > 0 for speeds in bench.speeds.values() for speed in speeds)
    assert 0.0 < bench.waiting.summing <= bench.waiting.total < 1.0
    assert [row.sampler for row in bench.stragglers] == ["shuffled"]
    assert bench.missing == ("lhotse: left out",)
    assert len(bench.predictions) == len(WORLDS)
    assert json.loads((tmp_path / "workers.json").read_text())["settings"]["task"] == "classify"
    assert len(said) == len(WAYS) + 2
    write_workers_page(bench, tmp_path / "workers.html")
    page = (tmp_path / "workers.html").read_text()
    assert all(table.title in page for table in bench_tables(bench))
    write_workers_figure(bench, tmp_path / "workers.svg")
    drawn = ET.parse(tmp_path / "workers.svg").getroot()
    assert "1,024" in "".join(drawn.itertext())
