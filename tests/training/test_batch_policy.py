"""The batch size chosen while training: grown, kept, rolled back, and the same again when resumed.

Shape legend: B sequences, T steps, S steps of all sequences, N sequences.
"""

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from training_runs import at, crash, events_of, outcome, stop, train, weights

from small_data import labelled, make_task
from stretto.data import SequenceSet
from stretto.distributed import World
from stretto.errors import StrettoError
from stretto.large_batch import BatchTuner, ThroughputTable, probe
from stretto.nn import carried_states
from stretto.report import write_run_report
from stretto.state import flatten
from stretto.training import (
    EVENTS_FILE,
    AbstractTask,
    Event,
    EventLog,
    SilentLog,
    Trainer,
    Updater,
    batch_policy,
)
from stretto.training.batch_policy import representative_lengths

FIRST = 4
SEQUENCES = 480
EPOCHS = 4


@pytest.fixture(scope="module")
def data() -> SequenceSet:
    """Whether a sum is positive, with labels that are often wrong: gradients are noisy."""
    rng = np.random.default_rng(3)
    lengths_N = rng.integers(2, 9, SEQUENCES + 40)
    features_SF = rng.normal(size=(lengths_N.sum(), 2)).astype(np.float32)
    offsets = np.cumsum([0, *lengths_N])
    sums_N = np.array([features_SF[a:b, 0].sum() for a, b in itertools.pairwise(offsets)])
    labels_N = ((sums_N > 0) ^ (rng.random(len(sums_N)) < 0.3)).astype(np.int64)
    return labelled(features_SF, lengths_N, labels_N, parts=(SEQUENCES, 20, 20), name="signs")


def _task(data: SequenceSet, **settings: Any) -> AbstractTask[Any]:
    values = {
        "epochs": EPOCHS,
        "batch_size": "auto",
        "base_batch_size": FIRST,
        "hidden_size": 4,
        "num_buckets": 2,
        "dropout": 0.2,
        "optimizer": "momentum",
        "schedule": "constant",
        "warmup_epochs": 0.05,
        "learning_rate": 0.02,
        "backend": "torch",
        **settings,
    }
    return make_task("classify", data, **values)


def _with_table(monkeypatch: pytest.MonkeyPatch, *, fixed: float, each: float) -> None:
    """Updates take `fixed` seconds and `each` per sequence, whatever the clock says."""

    def table(run_step: Any, *, batch_sizes: list[int], lengths: dict[int, float], **_: Any) -> ThroughputTable:
        assert run_step(batch_sizes[0], max(lengths)) > 0
        return ThroughputTable.of({size: fixed + each * size for size in batch_sizes})

    monkeypatch.setattr(batch_policy, "probe", table)


@pytest.fixture(autouse=True)
def growth_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    _with_table(monkeypatch, fixed=1.0, each=1e-6)


def _decisions(run: Path) -> list[Event]:
    return events_of(run, "batch")


def test_it_grows_where_larger_batches_cost_no_time(tmp_path: Path, data: SequenceSet) -> None:
    train(tmp_path, _task(data))
    updates, decisions = events_of(tmp_path, "update"), _decisions(tmp_path)
    at_ends = [event["epoch"] for event in decisions if event["epoch"] == int(event["epoch"])]
    assert at_ends == [*range(1, EPOCHS)]
    # Sixteen updates were measured, of four each; that is soon enough for a decision within the first epoch.
    assert decisions[0]["update"] == 64
    assert 0 < decisions[0]["epoch"] < 1
    assert decisions[0]["action"] == "grow"
    assert decisions[0]["batch_size"] == 4 * FIRST
    assert decisions[0]["predicted_gain"] >= 0.05
    for event, following in zip(decisions, [*decisions[1:], None], strict=True):
        factor = math.sqrt(event["batch_size"] / FIRST)
        assert event["rate"] == pytest.approx(0.02 * factor)
        until = math.inf if following is None else following["update"]
        after = [e for e in updates if event["update"] < e["update"] <= until]
        assert max(e["rows"] for e in after) == event["batch_size"]
        assert after[-1]["rate"] == pytest.approx(event["rate"])
        assert event["updates_left"] >= len(after)
    for epoch in range(EPOCHS):
        assert sum(e["rows"] for e in updates if e["epoch"] == epoch) == SEQUENCES
    assert decisions[-1]["update"] + decisions[-1]["updates_left"] == updates[-1]["update"]
    (probed,) = events_of(tmp_path, "probe")
    assert [entry["batch_size"] for entry in probed["table"]["entries"]] == [4, 8, 16, 32, 64]


@pytest.mark.slow
def test_it_keeps_the_batch_where_growing_does_not_pay(
    tmp_path: Path, data: SequenceSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    _with_table(monkeypatch, fixed=1e-6, each=1.0)
    train(tmp_path, _task(data))
    decisions = _decisions(tmp_path)
    assert {event["action"] for event in decisions} == {"keep"}
    assert len(decisions) > EPOCHS
    assert all("no other batch" in event["reason"] for event in decisions)
    kept = _task(data, batch_size=FIRST)
    train(tmp_path / "given", kept)
    given = [event["rows"] for event in events_of(tmp_path / "given", "update")]
    assert [event["rows"] for event in events_of(tmp_path, "update")] == given


@pytest.mark.parametrize(
    "update", [64, *(pytest.param(update, marks=pytest.mark.slow) for update in (7, 63, 65, 90, 103))]
)
def test_an_interruption_changes_nothing(tmp_path: Path, data: SequenceSet, update: int) -> None:
    task = _task(data, optimizer="adam", schedule="one-cycle", warmup_epochs=None)
    expected = train(tmp_path / "whole", task)
    assert any(event["action"] == "grow" for event in _decisions(tmp_path / "whole"))
    stop(tmp_path / "cut", task, update)
    result = train(tmp_path / "cut", task, resume=True)
    assert outcome(tmp_path / "cut", result) == outcome(tmp_path / "whole", expected)
    assert _decisions(tmp_path / "cut") == _decisions(tmp_path / "whole")


def _trouble_at(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """The guard sees trouble in its `number`-th update."""
    seen, observe = [0], BatchTuner.observe

    def observed(self: BatchTuner, **values: Any) -> str:
        seen[0] += 1
        trouble = observe(self, **values)
        return "made up" if seen[0] == number else trouble

    monkeypatch.setattr(BatchTuner, "observe", observed)


@pytest.mark.parametrize(("number", "epoch"), [(75, 0), pytest.param(95, 1, marks=pytest.mark.slow)])
def test_trouble_rolls_the_batch_back(
    tmp_path: Path, data: SequenceSet, monkeypatch: pytest.MonkeyPatch, number: int, epoch: int
) -> None:
    """Within the epoch in which it grew, and in the next; every sequence still counts once an epoch."""
    _trouble_at(monkeypatch, number)
    train(tmp_path, _task(data, record_sequences=True))
    events, decisions = events_of(tmp_path, "batch", "update", "epoch"), _decisions(tmp_path)
    grown, back = decisions[0], next(event for event in decisions if event["action"] == "roll-back")
    assert (grown["action"], grown["batch_size"]) == ("grow", 4 * FIRST)
    assert (back["batch_size"], back["update"], back["epoch"]) == (FIRST, number, epoch)
    assert "made up" in back["reason"]
    assert all(event["batch_size"] < 4 * FIRST for event in decisions[decisions.index(back) :])
    again = [e for e in events[events.index(back) :] if e["event"] == "update" and e["epoch"] == epoch]
    assert again[0]["update"] == number + 1
    assert max(e["rows"] for e in again[:10]) == FIRST
    # Updates of this epoch that were given up are made again with others.
    updates = [e for e in events if e["event"] == "update"]
    updates = [e for e in updates if e["epoch"] != epoch or not grown["update"] < e["update"] <= number]
    for each in range(EPOCHS):
        assert sorted(n for e in updates if e["epoch"] == each for n in e["sequences"]) == [*range(SEQUENCES)]
    assert [e["epoch"] for e in events if e["event"] == "epoch"] == [*range(1, EPOCHS + 1)]
    text = write_run_report(tmp_path).read_text(encoding="utf-8")
    assert "roll-back" in text
    assert 'id="plot-batch-size"' in text


@pytest.mark.slow
def test_a_run_that_rolled_back_resumes_from_there(
    tmp_path: Path, data: SequenceSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = _task(data)
    with monkeypatch.context() as patched:
        _trouble_at(patched, 75)
        expected = train(tmp_path / "whole", task)
    with monkeypatch.context() as patched:
        _trouble_at(patched, 75)
        with pytest.raises(RuntimeError, match="power"):
            train(tmp_path / "cut", task, watch=at(90, "update", crash))
    assert train(tmp_path / "cut", task, resume=True).metrics == expected.metrics
    assert weights(tmp_path / "cut") == weights(tmp_path / "whole")


@pytest.mark.slow
def test_the_weights_after_a_roll_back_are_those_from_before(
    tmp_path: Path, data: SequenceSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    _trouble_at(monkeypatch, 75)
    found: dict[str, tuple[list[torch.Tensor], list[torch.Tensor], float]] = {}

    def watch(event: Event) -> None:
        if event["event"] == "batch" and event["action"] not in found:
            state = trainer.state
            moments = [entry["momentum_buffer"].clone() for entry in state.optimizer.state.values()]
            found[event["action"]] = [w.detach().clone() for w in state.model.parameters()], moments, state.recipe.lr

    log = EventLog(tmp_path / EVENTS_FILE, subscribers=[watch])
    trainer = Trainer(_task(data), run=tmp_path, log=log, resume=False)
    trainer.run()
    log.close()
    for one, other in zip(found["grow"][:2], found["roll-back"][:2], strict=True):
        assert len(one) > 0
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))
    assert found["grow"][2] == pytest.approx(2 * found["roll-back"][2]) == pytest.approx(0.04)


@pytest.mark.filterwarnings("error")
def test_a_loss_that_is_nan_rolls_back_instead_of_ending_the_run(
    tmp_path: Path, data: SequenceSet, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = _task(data)
    loss = task.loss

    def poisoned(output: torch.Tensor, batch: Any) -> Any:
        found = loss(output, batch)
        spoilt = len(batch) > FIRST and output.requires_grad
        return dataclasses.replace(found, total=found.total * math.nan) if spoilt else found

    monkeypatch.setattr(task, "loss", poisoned)
    train(tmp_path, task)
    actions = [event["action"] for event in _decisions(tmp_path)]
    assert actions[:2] == ["grow", "roll-back"]
    monkeypatch.setattr(
        task, "loss", lambda output, batch: dataclasses.replace(loss(output, batch), total=output.sum() * math.nan)
    )
    with pytest.raises(StrettoError, match="nan"):
        train(tmp_path / "at-once", task)


def test_an_update_measured_in_parts_is_the_same_update(data: SequenceSet) -> None:
    """The same gradient, and the squares of its halves add up as they must."""
    for accumulate in (1, 2):
        found = []
        for measured in (False, True):
            task = _task(data, batch_size=12, base_batch_size=None, accumulate=accumulate, dropout=0.0, clip_norm=1e9)
            torch.manual_seed(0)
            trainer = Trainer(task, run=Path("unused"), log=SilentLog(), resume=False)
            state = trainer.state
            state.model.double()
            updater = Updater(task, state, world=World(), measures_noise=True)
            batches = [
                dataclasses.replace(b, features_BTF=b.features_BTF.double())
                for b, _ in zip(trainer.feed, range(accumulate), strict=False)
            ]
            update = updater.update(batches, measure_noise=measured)
            found.append([p.grad.clone() for p in state.model.parameters() if p.grad is not None])
            if not measured:
                assert update.norms is None
                continue
            norms = update.norms
            assert norms is not None
            assert norms.sizes == ((6, 6) if accumulate == 1 else (12, 12))
            whole = sum(float(g.square().sum()) for g in found[0])
            assert norms.square_of_mean == pytest.approx(whole, rel=1e-9)
            assert update.gradient_norm == pytest.approx(math.sqrt(whole), rel=1e-6)
            spread = sum(n * s for n, s in zip(norms.sizes, norms.squares, strict=True)) / sum(norms.sizes)
            assert spread >= whole
        for one, other in zip(*found, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-14)


@pytest.mark.parametrize("streams", [2, 5])
def test_an_update_of_streams_measured_in_parts_carries_the_same_state(streams: int) -> None:
    rng = np.random.default_rng(2)
    lengths_N = rng.integers(3, 9, 40)
    words = SequenceSet.from_flat(
        rng.integers(0, 7, int(lengths_N.sum())),
        offsets=np.cumsum([0, *lengths_N]),
        split_N=np.repeat([0, 1, 2], [30, 5, 5]),
        name="words",
        vocabulary=tuple("abcdefg"),
    )
    values = {
        "batch_size": streams,
        "layout": "streams",
        "tokens": "words",
        "window": 5,
        "hidden_size": 6,
        "num_layers": 2,
        "embedding_size": 3,
        "dropout": 0.0,
        "backend": "torch",
        "optimizer": "sgd",
        "learning_rate": 0.1,
    }
    found = []
    for measured in (False, True):
        task = make_task("language-model", words, **values)
        trainer = Trainer(task, run=Path("unused"), log=SilentLog(), resume=False)
        state = trainer.state
        state.model.double()
        updater = Updater(task, state, world=World(), measures_noise=True)
        trainer.feed.begin_epoch(0, state.model)
        for batch in trainer.feed:
            update = updater.update([batch], measure_noise=measured)
            assert (update.norms is not None) == (measured and len(batch) > 1)
        carried = [tensor for part in carried_states(state.model) for tensor in flatten(part.state)]
        assert carried
        found.append([*carried, *(w.detach() for w in state.model.parameters())])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-13)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"accumulate": 2}, "--batch-size auto was given with --accumulate 2"),
        ({"base_batch_size": SEQUENCES + 1}, rf"a batch of {SEQUENCES + 1} .* has {SEQUENCES} .*at most {SEQUENCES}"),
        ({"batch_size": SEQUENCES + 1, "base_batch_size": 4}, f"{SEQUENCES + 1}"),
        ({"batch_size": 2, "base_batch_size": 4}, "smaller than base_batch_size=4"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    tmp_path: Path, data: SequenceSet, settings: dict[str, Any], message: str
) -> None:
    with pytest.raises(StrettoError, match=message):
        train(tmp_path, _task(data, **settings))


@pytest.mark.slow
@pytest.mark.parametrize(("dropout", "alike"), [(0.2, 3), (0.0, 64)])
def test_the_probe_leaves_no_trace(
    tmp_path: Path, data: SequenceSet, monkeypatch: pytest.MonkeyPatch, dropout: float, alike: int
) -> None:
    """Until the first decision a run that probed is one that did not; what is dropped, until the first measurement."""
    monkeypatch.setattr(batch_policy, "probe", probe)
    train(tmp_path / "auto", _task(data, epochs=1, dropout=dropout))
    train(tmp_path / "given", _task(data, epochs=1, dropout=dropout, batch_size=FIRST))
    losses = [[event["loss"] for event in events_of(tmp_path / name, "update")] for name in ("auto", "given")]
    assert len(losses[0]) > alike
    assert losses[0][:alike] == pytest.approx(losses[1][:alike], rel=1e-4)
    (probed,) = events_of(tmp_path / "auto", "probe")
    assert all(entry["seconds"] is None or entry["seconds"] > 0 for entry in probed["table"]["entries"])


@pytest.mark.parametrize("count", [1, 2, 4, 5, 37])
def test_few_lengths_stand_for_all(count: int) -> None:
    shares = dict.fromkeys(range(1, count + 1), 1 / count)
    few = representative_lengths(shares)
    assert len(few) == min(count, 4)
    assert sum(few.values()) == pytest.approx(1.0)
    assert max(few) == count
    assert few.keys() <= shares.keys()


@pytest.mark.slow
def test_a_clip_norm_that_always_applies_follows_the_batch(tmp_path: Path, data: SequenceSet) -> None:
    train(tmp_path, _task(data, clip_norm=1e-3))
    grown = next(event for event in _decisions(tmp_path) if event["action"] == "grow")
    assert "of gradients were clipped, now at" in grown["reason"]
    assert events_of(tmp_path, "epoch")[0]["clipped"] == 1.0
