"""Training with a solver: what it reaches, what it reports, what it remembers, and that resuming is the same run.

Shape legend: S steps of all sequences, N sequences.
"""

import copy
import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_runs import events_of, outcome, stop

import stretto
from stretto.batching import Batch
from stretto.data import SequenceSet, StepLabels, write_npz
from stretto.errors import StrettoError
from stretto.solvers import CacheKey
from stretto.tasks.label_steps import LabelSteps, LabelStepsConfig
from stretto.training import (
    EVENTS_FILE,
    EpochRecord,
    EventLog,
    LossSum,
    SilentLog,
    SolverRecord,
    Trainer,
    evaluate,
    read_events,
    validate,
)
from stretto.training.checkpoint import load_newest, save_checkpoint
from stretto.training.solver import pack_caches, unpack_caches

pytestmark = pytest.mark.usefixtures("quick_compiler")

EPOCHS, TRAIN, H = 3, 8, 5
SMALL: dict[str, Any] = {"epochs": EPOCHS, "batch_size": 3, "hidden_size": H, "num_buckets": 2, "dropout": 0.2}


def _data(*, seed: int = 0, steps: int = 60) -> SequenceSet:
    """Labels say which of two levels a noisy signal was last pushed to."""
    rng = np.random.default_rng(seed)
    lengths_N = rng.integers(steps // 3, steps, 16)
    labels_S = np.repeat(rng.integers(1, 3, lengths_N.sum() // 7 + 1), 7)[: lengths_N.sum()]
    features_SF = rng.normal(size=(len(labels_S), 2)) + (2.0 * labels_S - 3.0)[:, None] * [1.0, 0.3]
    offsets = np.cumsum([0, *lengths_N])
    return SequenceSet.from_flat(
        features_SF.astype(np.float32),
        offsets=offsets,
        targets=StepLabels.check(labels_S, offsets=offsets, names=None, source="here"),
        split_N=np.repeat([0, 1, 2], [TRAIN, 4, 4]),
        name="levels",
    )


def _task(data: SequenceSet | None = None, **changes: Any) -> LabelSteps:
    return LabelSteps(validate(LabelStepsConfig, SMALL | changes, source="the test"), data or _data())


def _trainer(run: Path, task: LabelSteps, *, resume: bool = False) -> Trainer:
    return Trainer(task, run=run, log=EventLog(run / EVENTS_FILE), resume=resume)


def _records(run: Path, **changes: Any) -> list[EpochRecord]:
    trainer = _trainer(run, _task(**changes))
    return [trainer.train_epoch() for _ in range(trainer._config.epochs)]


def _solving(run: Path, **changes: Any) -> list[SolverRecord]:
    """What the solver reports of each epoch of a warm start with four chunks."""
    records = [record.solving for record in _records(run, **({"solver": "warm_start", "chunks": 4} | changes))]
    assert all(records)
    return [record for record in records if record is not None]


def _layer(trainer: Trainer) -> stretto.RNN:
    layer = trainer.model.gru.rnn
    assert isinstance(layer, stretto.RNN)
    return layer


def _cache(trainer: Trainer) -> stretto.TrajectoryCache:
    (cache,) = trainer._monitor._caches
    return cache


def _held(cache: stretto.TrajectoryCache) -> tuple[Any, list[bytes]]:
    state = cache.state_dict()
    return state["keys"], [part.numpy().tobytes() for parts in state["states"] for part in parts]


def test_shooting_reaches_what_sequential_training_reaches(tmp_path: Path) -> None:
    data = _data(steps=200)
    both = []
    for name, way in (("serial", {}), ("shooting", {"solver": "shooting", "chunks": 2})):
        trainer = _trainer(tmp_path / name, _task(data, **way))
        both.append([trainer.train_epoch() for _ in range(EPOCHS)])
    for serial, parallel in zip(*both, strict=True):
        assert parallel.train_loss == pytest.approx(serial.train_loss, rel=1e-4)
        assert parallel.valid_loss == pytest.approx(serial.valid_loss, rel=1e-4)
        assert serial.solving is None
        assert parallel.solving is not None
        assert parallel.solving.residual_max <= 1e-6
    records = [record.solving for record in both[1] if record.solving]
    assert sum(solving.batches - solving.fell_back for solving in records) > 0, "all fell back: nothing was compared"
    assert all(solving.cache_bytes is None and solving.solver == "shooting" for solving in records)


def test_carried_boundaries_differ_and_are_reported(tmp_path: Path) -> None:
    carried = _records(tmp_path / "carried", solver="warm_start", chunks=4, batch_size=1)
    serial = _records(tmp_path / "serial", batch_size=1)
    assert carried[0].train_loss != serial[0].train_loss
    assert carried[-1].train_loss == pytest.approx(serial[-1].train_loss, rel=0.2)
    for record in carried:
        solving = record.solving
        assert solving is not None
        assert (solving.solver, solving.exact, solving.batches) == ("warm_start", False, TRAIN)
        assert (solving.fell_back, solving.iterations) == (0, 1)
        assert 0 < solving.residual_mean < solving.residual_max
        assert solving.backward_residual_mean is not None
        # Three boundaries of each sequence, or two, where a chunk of its steps rounds up.
        assert solving.cache_bytes is not None
        assert TRAIN * 2 * H * 4 <= solving.cache_bytes <= TRAIN * 3 * H * 4
        assert ("0 of 1" if record.epoch == 1 else "1 of 1") + " sequences from where" in solving.reason
    residuals = [event["residual"] for event in events_of(tmp_path / "carried", "update")[:TRAIN]]
    solved = [dataclasses.asdict(record.solving) for record in carried if record.solving]
    assert np.mean(residuals) == pytest.approx(solved[0]["residual_mean"])
    assert [event["solving"] for event in events_of(tmp_path / "carried", "epoch")] == solved


def test_sequences_are_found_again_in_shuffled_and_bucketed_batches(tmp_path: Path) -> None:
    """Whatever the longest sequence of a batch is, each is cut where it was cut before."""
    solving = _solving(tmp_path, batch_size=3, num_buckets=2, learning_rate=1e-6)
    assert solving[-1].residual_mean < 0.1 * solving[0].residual_mean
    assert solving[-1].cache_bytes == solving[0].cache_bytes
    assert len({event["length"] for event in events_of(tmp_path, "update")}) > 2


@pytest.mark.parametrize(
    ("changes", "stop_at"),
    [
        ({"batch_size": 1}, "start"),
        pytest.param({"batch_size": 1}, "end", marks=pytest.mark.slow),
        ({"batch_size": 1, "num_layers": 2, "bidirectional": True}, "middle"),
        ({"batch_size": 3, "accumulate": 2}, "start"),
        pytest.param({"batch_size": 1, "exact_epochs": 1}, "middle", marks=pytest.mark.slow),
        ({"batch_size": 1, "exact_epochs": 1}, "end"),
        ({"batch_size": 1, "cache_megabytes": 0.0003}, "middle"),
    ],
)
def test_a_resumed_run_is_the_run_that_was_not_stopped(tmp_path: Path, changes: dict[str, Any], stop_at: str) -> None:
    task = _task(solver="warm_start", chunks=4, **changes)
    whole = _trainer(tmp_path / "whole", task)
    expected = whole.run()
    per_epoch = whole.state.num_updates // EPOCHS
    update = {"start": per_epoch + 1, "middle": 2 * per_epoch - 1, "end": 3 * per_epoch - 1}[stop_at]
    stop(tmp_path / "cut", task, update)
    resumed = _trainer(tmp_path / "cut", task, resume=True)
    assert outcome(tmp_path / "cut", resumed.run()) == outcome(tmp_path / "whole", expected)
    assert _held(_cache(resumed)) == _held(_cache(whole))


def test_evaluation_is_sequential_and_leaves_the_cache_alone(tmp_path: Path) -> None:
    task = _task(solver="warm_start", chunks=4, batch_size=1, dropout=0.0)
    trainer = _trainer(tmp_path, task)
    trainer.train_epoch()
    before, solver = _held(_cache(trainer)), _layer(trainer).solver
    model, part = trainer.model, task.data.part("train")
    measured = evaluate(task, model, part, device="cpu")
    assert _held(_cache(trainer)) == before
    assert _layer(trainer).solver is solver
    plain = copy.deepcopy(model)
    plain.gru.rnn.solver = "serial"  # type: ignore[union-attr]
    assert evaluate(task, plain, part, device="cpu") == measured
    assert evaluate(task, model, part, device="cpu", by_solver=True).loss != measured.loss
    assert _held(_cache(trainer)) != before


def test_the_last_epochs_are_exact_when_asked(tmp_path: Path) -> None:
    records = _records(tmp_path / "a", solver="warm_start", chunks=4, batch_size=1, exact_epochs=2)
    assert [record.solving.exact for record in records if record.solving] == [False, True, True]
    exact = records[-1].solving
    assert exact is not None
    assert (exact.residual_max, exact.iterations, exact.cache_bytes, exact.fell_back) == (0.0, 1.0, 0, 0)
    assert exact.backward_residual_mean is None
    # From the same weights, a sequential epoch is the same epoch.
    task = _task(solver="warm_start", chunks=4, batch_size=1, exact_epochs=2)
    trainer = _trainer(tmp_path / "b", task)
    trainer.train_epoch()
    serial = Trainer(_task(batch_size=1), run=tmp_path / "b", log=SilentLog(), resume=True)
    assert serial.train_epoch().train_loss == records[1].train_loss


def test_a_warm_start_on_two_ranks_is_refused(tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match="the solver is 'warm_start' and there are 2 ranks"):
        _trainer(tmp_path, _task(solver="warm_start", nproc=2))


def test_more_chunks_than_steps_are_fine(tmp_path: Path) -> None:
    (solving,) = _solving(tmp_path, chunks=1000, batch_size=1, epochs=1)
    assert solving.residual_max > 0


def test_boundaries_that_are_nan_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A skipped update must not spoil the sequence for all epochs to come."""
    task = _task(solver="warm_start", chunks=4, batch_size=1, on_nan="skip")
    trainer = _trainer(tmp_path, task)
    trainer.train_epoch()
    model, spoilt = trainer.model, []
    plain = model.standardise.forward

    def spoil(x_BTF: torch.Tensor, mask_BT: torch.Tensor) -> torch.Tensor:
        good_BTF = plain(x_BTF, mask_BT)
        if model.training and len(spoilt) < 1:
            spoilt.append(1)
            return good_BTF * torch.nan
        return good_BTF

    monkeypatch.setattr(model.standardise, "forward", spoil)
    assert trainer.train_epoch().solving.batches == TRAIN - 1  # type: ignore[union-attr]
    record = trainer.train_epoch()
    assert record.solving is not None
    assert (record.solving.batches, np.isfinite(record.train_loss)) == (TRAIN, True)
    assert len(events_of(tmp_path, "warning")) == 1


def test_sequential_training_records_nothing_about_solvers(tmp_path: Path) -> None:
    assert _trainer(tmp_path, _task()).run().solving is None
    text = (tmp_path / EVENTS_FILE).read_text(encoding="utf-8")
    assert "residual" not in text
    assert "solving" not in text
    saved = load_newest(tmp_path).checkpoint
    assert not any(name.startswith("carried") for name in saved.tensors)
    assert not {"carried", "solver"} & saved.state.keys()


def test_a_checkpoint_of_another_solver_is_refused(tmp_path: Path) -> None:
    _trainer(tmp_path, _task()).train_epoch()
    with pytest.raises(StrettoError, match="is of another model"):
        _trainer(tmp_path, _task(solver="warm_start", chunks=4), resume=True)


def test_multigrid_is_reported_and_also_used_in_parallel(tmp_path: Path) -> None:
    iterated = _trainer(tmp_path / "iterated", _task(solver="multigrid", tolerance=0.25))
    assert _layer(iterated).solver.tolerance == 0.25  # type: ignore[union-attr]
    task = _task(solver="multigrid", epochs=1)
    trainer = _trainer(tmp_path, task)
    metrics = trainer.run().metrics
    serial, parallel = (
        evaluate(task, trainer.model, task.data.part("test"), device="cpu", by_solver=by_solver).metrics["accuracy"]
        for by_solver in (False, True)
    )
    assert (metrics["accuracy"], metrics["accuracy_parallel"]) == (serial, parallel)
    (epoch,) = events_of(tmp_path, "epoch")
    assert epoch["solving"]["solver"] == "multigrid"
    assert epoch["solving"]["residual_mean"] > 0
    assert epoch["solving"]["iterations"] == 2


@settings(deadline=None, max_examples=30)
@given(drawn=st.data())
def test_caches_survive_a_checkpoint(tmp_path_factory: pytest.TempPathFactory, drawn: st.DataObject) -> None:
    caches = []
    for _ in range(drawn.draw(st.integers(1, 2))):
        cache = stretto.TrajectoryCache()
        for number in range(drawn.draw(st.integers(0, 4))):
            shapes = drawn.draw(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=3), min_size=1, max_size=2))
            dtypes = [drawn.draw(st.sampled_from([torch.float32, torch.float64, torch.int64])) for _ in shapes]
            states = [(torch.randn(shape) * 9).to(dtype) for shape, dtype in zip(shapes, dtypes, strict=True)]
            cache.put(CacheKey(layer="0.1", sample_id=7 - number, chunk_length=3), states)
        caches.append(cache)
    run = tmp_path_factory.mktemp("cache")
    save_checkpoint(run, pack_caches(caches).copy(), update=1, keep=1)
    fresh = [stretto.TrajectoryCache() for _ in caches]
    unpack_caches(load_newest(run).checkpoint, fresh)
    for one, other in zip(caches, fresh, strict=True):
        assert _held(one) == _held(other)
        assert one.num_bytes == other.num_bytes
        kinds = [[(p.dtype, p.shape) for parts in c.state_dict()["states"] for p in parts] for c in (one, other)]
        assert kinds[0] == kinds[1]


def test_a_whole_run_reports_residual_and_memory(tmp_path: Path) -> None:
    write_npz(tmp_path / "levels.npz", _data())
    way = {**SMALL, "batch_size": 1, "solver": "warm_start", "chunks": 3, "exact_epochs": 1, "threads": 1}
    result = stretto.train("label-steps", data=tmp_path / "levels.npz", out=tmp_path / "run", **way)
    solving = result.solving
    assert solving is not None
    assert (solving["solver"], solving["batches"], solving["exact_epochs"], solving["fell_back"]) == (
        "warm_start",
        3 * TRAIN,
        1,
        0,
    )
    assert solving["residual_mean"] == solving["residuals"][1] > 0
    assert solving["residual_max"] >= max(solving["residuals"])
    assert solving["residuals"][2] == 0.0
    assert solving["cache_bytes"] > 0
    assert f'"cache_bytes": {solving["cache_bytes"]}' in (tmp_path / "run/result.json").read_text(encoding="utf-8")
    assert read_events(tmp_path / "run")[-1]["solving"] == solving
    page = (tmp_path / "run/report.html").read_text(encoding="utf-8")
    assert "Parallel in time" in page
    assert "Approximate" in page


def test_a_loss_that_is_nan_leaves_the_record_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The states are fine and the gradient is not."""
    task = _task(solver="warm_start", chunks=4, batch_size=1, on_nan="skip", epochs=1)
    plain, seen = task.loss, []

    def loss(output: torch.Tensor, batch: Batch) -> LossSum:
        seen.append(1)
        summed = plain(output, batch)
        return LossSum(total=summed.total * (torch.nan if len(seen) == 3 else 1.0), count=summed.count)

    monkeypatch.setattr(task, "loss", loss)
    solving = _trainer(tmp_path, task).train_epoch().solving
    assert solving is not None
    assert solving.batches == TRAIN - 1
    assert solving.backward_residual_max is not None
    assert np.isfinite(solving.backward_residual_max)
