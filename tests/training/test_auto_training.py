"""`--auto`: which recipes there are, a run of several parts, stopped and resumed, and what it says."""

import contextlib
import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from training_runs import crash, interrupt

import stretto
from small_data import labelled, make_task
from stretto.distributed import World
from stretto.errors import StrettoError
from stretto.large_batch import Outcome, Recipe, search
from stretto.training import AUTO_FILE, EVENTS_FILE, AbstractTask, Event, Interrupted, RunResult, auto, read_events

EPOCHS = 6


def _task(**settings: Any) -> AbstractTask[Any]:
    rng = np.random.default_rng(0)
    labels_N, lengths_N = np.arange(180) % 3, rng.integers(2, 6, 180)
    features_SF = rng.normal(size=(lengths_N.sum(), 2)) + np.repeat(labels_N, lengths_N)[:, None]
    data = labelled(features_SF.astype(np.float32), lengths_N, labels_N, parts=(120, 30, 30))
    values = {"epochs": EPOCHS, "batch_size": 6, "hidden_size": 6, "num_buckets": 2, "backend": "torch", "auto": True}
    return make_task("classify", data, **{**values, **settings})


@pytest.fixture(autouse=True, scope="module")
def _short_trials() -> Iterator[None]:
    """Trials of an update or two, of two recipes, and short runs: which is chosen does not depend on the clock."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(search, "MIN_TRIAL_UPDATES", 1)
        patch.setattr(search, "MIN_FIRST_UPDATES", 1)
        patch.setattr(auto, "MUON_RATES", ((1, 0.2),))
        yield


@pytest.fixture(autouse=True)
def _own_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def whole(_short_trials: None, tmp_path_factory: pytest.TempPathFactory) -> RunResult:
    """A run that nothing stops."""
    return stretto.train(_task(), out=tmp_path_factory.mktemp("whole") / "run")


def _events(run: Path, kind: str = "auto") -> list[Event]:
    return [event for event in read_events(run) if event["event"] == kind]


def _outcome(run: Path) -> dict[str, Any]:
    """All that must be the same in two runs."""
    kept = ("action", "recipe", "epochs", "loss", "update", "value", "train_loss", "rate", "metrics")
    events = [event for event in read_events(run) if event["event"] in ("auto", "epoch", "update", "finished")]
    return {
        "events": [{key: event[key] for key in kept if key in event} for event in events],
        "best": (run / "best.safetensors").read_bytes(),
        "last": (run / "model.safetensors").read_bytes(),
    }


def test_recipes_suit_the_model_and_the_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "MUON_RATES", ((1, 0.4), (4, 0.4)))
    task = _task()
    feed = task.feed(world=World())
    recipes = auto.make_recipes(task, nn.GRU(2, 2), feed, world=World())
    # Batches of 24 would leave 5 updates per epoch; the first run has 2 epochs.
    rate = float(f"{0.4 / (2 * len(feed)) ** 0.5:.2g}")
    assert [recipe.name for recipe in recipes] == ["plain", f"muon {rate:g} x6"]
    monkeypatch.setattr(auto, "MIN_UPDATES_PER_EPOCH", 5)
    larger = auto.make_recipes(task, nn.GRU(2, 2), feed, world=World())[-1].settings
    assert larger["batch_size"] == 24
    assert larger["learning_rate"] == pytest.approx(2 * rate, rel=0.05)
    assert larger["adam_share"] == auto.ADAM_SHARE
    for model in (nn.Linear(2, 2), nn.Sequential(nn.GRU(2, 2).requires_grad_(False), nn.Linear(2, 2))):
        recipes = auto.make_recipes(task, model, feed, world=World())
        assert {recipe.settings.get("optimizer") for recipe in recipes} == {None, "adam"}
        # Settings of the plain recipe that Adam does not take.
        assert {recipe.settings.get("adam_share") for recipe in recipes} == {None, 1.0}


def test_adam_takes_smaller_batches_where_a_first_run_has_few_updates(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(auto, "MIN_ADAM_UPDATES", 8)
    model = nn.Linear(2, 2)
    for epochs, batch_size, expected in ((12, 120, 30), (12, 60, 30), (60, 60, 60), (12, 17, 17)):
        # A first run of 2 epochs, or of 10, of 120 sequences.
        task = _task(epochs=epochs, batch_size=batch_size, num_buckets=1)
        recipes = auto.make_recipes(task, model, task.feed(world=World()), world=World())
        assert recipes[1].settings["batch_size"] == expected, (epochs, batch_size)
        assert recipes[1].name.endswith(f"x{expected}")


def test_the_best_weights_of_all_parts_are_tested_and_everything_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Each run counts as a gain, so that none begins anew.
    monkeypatch.setattr(search, "MIN_GAIN", -1.0)
    monkeypatch.setattr(search, "MAX_LOSS", 10.0)
    result = stretto.train(_task(), out="out", progress=True)
    events = _events(result.run)
    trials = [(event["recipe"], event["updates"]) for event in events if event["action"] == "trial"]
    assert [name.split()[0] for name, _ in trials] == ["plain", "muon", "plain", "muon"]
    runs = [event for event in events if event["action"] == "run"]
    epochs = _events(result.run, "epoch")
    assert sum(event["epochs"] for event in runs) == len(epochs) == result.epochs == EPOCHS
    assert [epoch["epoch"] for epoch in epochs] == list(range(1, EPOCHS + 1))
    updates = [event["update"] for event in _events(result.run, "update")]
    assert updates == list(range(1, len(updates) + 1))
    best = max(epoch["value"] for epoch in epochs)
    assert events[-1]["action"] == "end"
    assert f"the best is {best:.4g}" in events[-1]["reason"]
    loaded = stretto.load(result.run, task=type(_task()))
    assert loaded.weights == "best"
    weights = dict(loaded.model.state_dict())
    assert all(torch.equal(weights[name], weight) for name, weight in result.model.state_dict().items())
    printed = capsys.readouterr().out
    assert result.report is not None
    page = result.report.read_text(encoding="utf-8")
    assert "How it was trained" in page
    for event in events:
        assert event["reason"] in page or event["action"] == "trial"
        assert (event["reason"] if event["action"] != "trial" else f"trial  {event['recipe']}: loss") in printed
    # The schedule of each part falls to zero in it.
    for run, after in zip(runs, [*runs[1:], None], strict=True):
        until = len(updates) if after is None else after["update"]
        rates = [e["rate"] for e in _events(result.run, "update") if run["update"] < e["update"] <= until]
        assert rates[-1] < 0.1 * max(rates)


def test_a_plain_recipe_that_is_chosen_is_the_run_without_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    def recipes(*_: Any, **__: Any) -> list[Recipe]:
        return [Recipe(name="plain"), Recipe(name="frozen", settings={"learning_rate": 1e-12})]

    monkeypatch.setattr(auto, "make_recipes", recipes)
    chosen = stretto.train(_task(), out="auto")
    plain = stretto.train(_task(auto=False), out="plain")
    assert [e["recipe"] for e in _events(chosen.run) if e["action"] == "run"] == ["plain"]
    ends = [(run / "model.safetensors").read_bytes() for run in (chosen.run, plain.run)]
    assert ends[0] == ends[1]


def test_it_stops_at_the_value_to_reach() -> None:
    result = stretto.train(_task(reach=0.5), out="out")
    epochs = _events(result.run, "epoch")
    assert epochs[-1]["value"] >= 0.5
    assert all(epoch["value"] < 0.5 for epoch in epochs[:-1])
    assert _events(result.run)[-1]["reason"].startswith("the target is reached")
    alone = stretto.train(_task(auto=False, reach=0.5), out="alone")
    assert _events(alone.run, "stopped_early")[0]["reason"] == "accuracy has reached 0.5"


def test_a_value_out_of_reach_is_told_before_the_end_with_the_best_so_far(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "MIN_GAIN", -1.0)
    monkeypatch.setattr(search, "MAX_LOSS", 10.0)
    monkeypatch.setattr(search, "MIN_TRIAL_UPDATES", 100)
    result = stretto.train(_task(epochs=8, reach=1.0, learning_rate=1e-5, hidden_size=1), out="out")
    runs = [event for event in _events(result.run) if event["action"] == "run"]
    values = [event["value"] for event in _events(result.run, "epoch") if event["update"] <= runs[2]["update"]]
    words = f"the target is 1, which is not expected to be reached: the best so far is {max(values):.4g}"
    assert runs[2]["reason"].endswith(words)
    assert _events(result.run)[-1]["reason"].endswith("and the target of 1 was not reached")


def test_a_time_too_short_for_an_epoch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(task: Any, job: Any, **_: Any) -> Outcome:
        return Outcome(loss=1.0, value=None, best=None, epochs=job.epochs, seconds=1000 * job.epochs)

    monkeypatch.setattr(auto, "_try", slow)
    with pytest.raises(StrettoError, match=r"seconds left of 1.4e\+03, too few for an epoch of .* about 1e\+03"):
        stretto.train(_task(max_hours=0.39), out="out")


def test_a_bounded_time_is_planned_for_where_there_is_no_room_for_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "MIN_TRIAL_UPDATES", 1000)
    real = auto._try

    def slow(task: Any, job: Any, **options: Any) -> Outcome:
        outcome = real(task, job, **options)
        return dataclasses.replace(outcome, seconds=1000 * outcome.epochs)

    monkeypatch.setattr(auto, "_try", slow)
    result = stretto.train(_task(max_hours=1.7 * 1000 / 3600), out="out")
    events = _events(result.run)
    assert [(event["action"], event["epochs"]) for event in events[:2]] == [("trial", 0.5), ("run", 1)]
    assert events[1]["reason"].endswith("there is time for 1 epoch")
    with pytest.raises(
        StrettoError, match=r"seconds left of 1e\+03, too few for an epoch of .* Allow .* hours\) or more"
    ):
        stretto.train(_task(max_hours=1000 / 3600), out="other")


@pytest.mark.parametrize("text", ["[]", "{}", '{"version": 1}', "{"])
def test_a_damaged_record_of_the_search_is_named(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    with monkeypatch.context() as patch:
        _stop_at(patch, 0, crash)
        with pytest.raises(RuntimeError, match="power"):
            stretto.train(_task(), out="out")
    (Path("out") / AUTO_FILE).write_text(text, encoding="utf-8")
    with pytest.raises(StrettoError, match=r"version None|recipes None|is damaged"):
        stretto.train(_task(), out="out", resume=True)


def _stop_at(monkeypatch: pytest.MonkeyPatch, number: int, act: Any) -> None:
    """Act at the write of this number of what was found."""
    real, count = auto._write, iter(range(100))

    def write(path: Path, text: str) -> str:
        real(path, text)
        if next(count) == number:
            act()
        return ""

    monkeypatch.setattr(auto, "_write", write)


@pytest.mark.parametrize("number", [0, 3, 4])
def test_a_run_that_was_stopped_goes_on_as_if_it_had_not_been(
    monkeypatch: pytest.MonkeyPatch, whole: RunResult, number: int
) -> None:
    with monkeypatch.context() as patch:
        _stop_at(patch, number, crash)
        with pytest.raises(RuntimeError, match="power"):
            stretto.train(_task(), out="out")
    stretto.train(_task(), out="out", resume=True)
    assert _outcome(Path("out")) == _outcome(whole.run)


def test_an_interruption_within_a_part_is_resumed_there(monkeypatch: pytest.MonkeyPatch, whole: RunResult) -> None:
    real = auto.Trainer._record

    def record(self: Any, update: Any) -> None:
        real(self, update)
        if self.state.num_updates == 30:
            interrupt()

    with monkeypatch.context() as patch:
        patch.setattr(auto.Trainer, "_record", record)
        with pytest.raises(Interrupted):
            stretto.train(_task(), out="out")
    resumed = stretto.train(_task(), out="out", resume=True)
    assert _outcome(Path("out"))["best"] == _outcome(whole.run)["best"]
    assert resumed.metrics == whole.metrics


def test_a_recipe_that_diverges_gives_way_to_the_plain_one(monkeypatch: pytest.MonkeyPatch) -> None:
    def recipes(*_: Any, **__: Any) -> list[Recipe]:
        settings = {"learning_rate": 3e38, "optimizer": "sgd", "clip_norm": 1e30, "schedule": "constant"}
        return [Recipe(name="plain"), Recipe(name="wild", settings=settings)]

    monkeypatch.setattr(auto, "make_recipes", recipes)
    monkeypatch.setattr(search, "MIN_TRIAL_UPDATES", 100)
    result = stretto.train(_task(), out="out")
    runs = [event for event in _events(result.run) if event["action"] == "run"]
    assert runs[1]["recipe"] == "plain"
    assert runs[1]["reason"].startswith("wild diverged; it begins anew")
    assert result.metrics["accuracy"] > 0.4


@pytest.mark.parametrize("stops_at", [None, 70, 110])
def test_the_plain_recipe_that_begins_anew_begins_with_new_weights(
    monkeypatch: pytest.MonkeyPatch, stops_at: int | None
) -> None:
    """After two runs of 2 epochs of 20 updates; also where it is resumed at its beginning or in the middle of it."""
    monkeypatch.setattr(search, "MIN_GAIN", 9.0)
    monkeypatch.setattr(search, "MAX_LOSS", 9.0)
    monkeypatch.setattr(search, "MIN_TRIAL_UPDATES", 100)
    begun: list[tuple[int, dict[str, torch.Tensor]]] = []
    real_begin, real_record = auto.Trainer.train, auto.Trainer._record

    def train(self: Any) -> dict[str, float]:
        weights = {name: weight.clone() for name, weight in self.state.model.state_dict().items()}
        begun.append((self.state.num_updates, weights))
        return real_begin(self)

    def record(self: Any, update: Any) -> None:
        real_record(self, update)
        if self.state.num_updates == stops_at:
            interrupt()

    monkeypatch.setattr(auto.Trainer, "train", train)
    with monkeypatch.context() as patch:
        patch.setattr(auto.Trainer, "_record", record)
        with pytest.raises(Interrupted) if stops_at else contextlib.nullcontext():
            stretto.train(_task(epochs=8), out="out")
    if stops_at:
        stretto.train(_task(epochs=8), out="out", resume=True)
    runs = [event for event in _events(Path("out")) if event["action"] == "run"]
    assert [(event["recipe"].split()[0], event["epochs"]) for event in runs if event["update"] in (0, 40, 80)][-3:] == [
        ("muon", 2),
        ("muon", 2),
        ("plain", 8),
    ]
    assert len(_events(Path("out"), "epoch")) == 12
    first = begun[0][1]
    (anew,) = [weights for update, weights in begun if update == 80]
    assert all(torch.equal(anew[name], weight) for name, weight in first.items())
    second = next(weights for update, weights in begun if update == 40)
    assert not any(torch.equal(second[name], weight) for name, weight in first.items() if "weight" in name)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"batch_size": "auto"}, "--auto was given with --batch-size auto"),
        ({"patience": 2}, "--auto was given .* --patience 2"),
        ({"reach": 96.0}, "reach=96 cannot be reached: accuracy is between 0 and 1"),
        ({"max_hours": 1e-9}, "are too short: trials alone would take"),
    ],
)
def test_bad_input_is_named_and_leaves_no_run(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(StrettoError, match=words):
        stretto.train(_task(**settings), out="out")
    assert not (Path("out") / AUTO_FILE).exists()
    assert not (Path("out") / EVENTS_FILE).exists() or "max_hours" in settings
