"""Words in streams: windows are one unbroken run, stops change nothing, and the settings of the published nets.

Shape legend: B streams, T steps, S words, C words of the vocabulary.
"""

import math
import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from task_gradients import Found, assert_same, built, loss_and_gradients
from torch import nn
from torch.nn import functional

import stretto
from stretto.cli.train import _config
from stretto.data import SequenceSet, make_text
from stretto.distributed import World
from stretto.errors import StrettoError
from stretto.tasks.language_model import LanguageModelConfig, LanguageModelling, TextNet
from stretto.training import EVENTS_FILE, EventLog, Interrupted, Subscriber, Trainer, evaluate, read_events, validate


@pytest.fixture(scope="module")
def text() -> SequenceSet:
    return make_text(num_train=60)


def _task(text: SequenceSet, **settings: Any) -> LanguageModelling:
    values = {"hidden_size": 6, "embedding_size": 5, "dropout": 0.0, "batch_size": 4, "window": 7, **settings}
    return LanguageModelling(validate(LanguageModelConfig, values, source="the test"), text)


def _plain(model: TextNet, words_S: torch.Tensor) -> torch.Tensor:
    """Scores of all that follow, in one run through torch's own layers."""
    lstm = nn.LSTM(model.lstm.input_size, model.lstm.hidden_size, model.lstm.num_layers, batch_first=True).double()
    lstm.load_state_dict(model.lstm.state_dict())
    hidden, _ = lstm(model.embed(words_S)[None])
    scores: torch.Tensor = model.predict(hidden[0])
    return scores


@pytest.mark.parametrize("backend", ["cpp", "torch"])
@pytest.mark.parametrize("window", [1, 7, 1000])
def test_windows_are_one_unbroken_run(text: SequenceSet, window: int, backend: str) -> None:
    task = _task(text, window=window, num_layers=2, backend=backend, batch_size=3)
    model: Any = built(task).eval()
    found: dict[int, list[torch.Tensor]] = {}
    said: dict[int, list[torch.Tensor]] = {}
    feed = task.feed(world=World())
    feed.begin_epoch(0, model)
    read: dict[int, list[torch.Tensor]] = {}
    with torch.no_grad():
        for batch in feed:
            scores_BTC = model(batch)
            for row, length in enumerate(batch.lengths.tolist()):
                found.setdefault(row, []).append(scores_BTC[row, :length])
                read.setdefault(row, []).append(batch.features_BTF[row, :length, 0])
                said.setdefault(row, []).append(batch.targets[row, :length])
        for row in range(3):
            words_S = torch.cat(read[row])
            assert torch.equal(torch.cat(said[row])[:-1], words_S[1:])
            torch.testing.assert_close(torch.cat(found[row]), _plain(model, words_S), rtol=1e-10, atol=1e-12)


def test_loss_and_gradients_are_those_of_plain_torch(text: SequenceSet) -> None:
    """Of the second window: what is carried into it is a constant."""
    task = _task(text, num_layers=2)
    model: Any = built(task)
    first, second, *_ = task.feed(world=World())
    model(first)
    found = loss_and_gradients(task, model, [second])
    model.zero_grad()
    lstm = nn.LSTM(5, 6, 2, batch_first=True).double()
    lstm.load_state_dict(model.lstm.state_dict())
    with torch.no_grad():
        _, state = lstm(model.embed(first.features_BTF[..., 0]))
    hidden_BTH, _ = lstm(model.embed(second.features_BTF[..., 0]), state)
    scores_PC = model.predict(hidden_BTH.flatten(0, 1))
    expected = functional.cross_entropy(scores_PC, second.targets.flatten(), reduction="sum")
    torch.autograd.backward(expected)
    gradients = {f"lstm.{name}": weight.grad for name, weight in lstm.named_parameters()}
    gradients |= {name: weight.grad for name, weight in model.named_parameters() if not name.startswith("lstm")}
    assert_same(found, Found(loss=expected.item(), count=28, gradients=gradients), atol=1e-12)


def test_the_scores_of_a_window_are_not_copied(text: SequenceSet) -> None:
    task = _task(text)
    model, batch = task.build_model().eval(), next(iter(task.feed(world=World())))
    scores_BTC = model(batch)
    rows_PC = scores_BTC.transpose(0, 1).flatten(0, 1)
    assert rows_PC.data_ptr() == scores_BTC.data_ptr()
    assert rows_PC.is_contiguous()


def test_the_perplexity_counts_every_word_but_the_first_once(text: SequenceSet) -> None:
    """Against streams that are read one by one and without windows."""
    task, part = _task(text), text.part("valid")
    model: Any = built(task)
    words_S = torch.from_numpy(
        part.features_SF[part.starts_N[0] : part.starts_N[-1] + part.lengths_N[-1], 0].astype(int)
    )
    count = len(words_S) - 1
    streams = min(20, count // 7)
    shortest, longer = divmod(count, streams)
    begin, nats = 0, 0.0
    for stream in range(streams):
        end = begin + shortest + (stream < longer)
        with torch.no_grad():
            scores_SC = _plain(model, words_S[begin:end])
            nats += float(functional.cross_entropy(scores_SC, words_S[begin + 1 : end + 1], reduction="sum"))
        begin = end
    found = evaluate(task, model, part, device="cpu")
    assert begin == count
    assert found.metrics["perplexity"] == pytest.approx(math.exp(nats / count), rel=1e-10)


def _train(run: Path, task: LanguageModelling, *, resume: bool = False, watch: Subscriber | None = None) -> Trainer:
    log = EventLog(run / EVENTS_FILE, subscribers=[watch] if watch else [])
    try:
        trainer = Trainer(task, run=run, log=log, resume=resume)
        trainer.run()
        return trainer
    finally:
        log.close()


def _outcome(run: Path, trainer: Trainer) -> tuple[list[Any], dict[str, bytes]]:
    kept = ("epoch", "update", "train_loss", "valid_loss", "value", "loss", "gradient_norm", "rate", "rows", "length")
    events = [
        {key: event[key] for key in kept if key in event}
        for event in read_events(run)
        if event["event"] in ("update", "epoch")
    ]
    return events, {name: w.numpy().tobytes() for name, w in trainer.state.model.state_dict().items()}


@pytest.mark.parametrize("accumulate", [1, 2])
def test_a_stop_in_the_middle_of_an_epoch_changes_nothing(text: SequenceSet, tmp_path: Path, accumulate: int) -> None:
    task = _task(text, epochs=2, num_layers=2, dropout=0.4, input_dropout=0.2, accumulate=accumulate, window=13)
    expected = _outcome(tmp_path / "whole", _train(tmp_path / "whole", task))
    updates = [event["update"] for event in expected[0] if "loss" in event]
    assert len(updates) >= 10
    for stop in (3, updates[-1] // 2, updates[-1] - 1):
        run = tmp_path / str(stop)

        def watch(event: Any, stop: int = stop) -> None:
            if event["event"] == "update" and event["update"] == stop:
                os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(Interrupted):
            _train(run, task, watch=watch)
        torch.manual_seed(99)
        assert _outcome(run, _train(run, task, resume=True)) == expected, f"after update {stop}"


def test_a_state_of_nan_is_not_carried_on(text: SequenceSet, tmp_path: Path) -> None:
    task = _task(text, epochs=1, on_nan="skip")
    trainer = Trainer(task, run=tmp_path, log=EventLog(tmp_path / EVENTS_FILE), resume=False)
    model = trainer.state.model
    assert isinstance(model, TextNet)
    plain, calls = model.carried.keep, []

    def keep(state: tuple[torch.Tensor, ...]) -> None:
        calls.append(state)
        plain(tuple(part * math.nan for part in state) if len(calls) == 2 else state)

    model.carried.keep = keep  # type: ignore[method-assign]
    record = trainer.train_epoch()
    warnings = [event["message"] for event in read_events(tmp_path) if event["event"] == "warning"]
    assert warnings == ["update 3 was skipped: its loss or gradient is NaN or inf"]
    assert math.isfinite(record.train_loss)


def test_words_can_be_passages_and_characters_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("a rose is a rose\n\nis it\n\na rose so it is\n" * 12, encoding="utf-8")
    small: dict[str, Any] = {"epochs": 2, "hidden_size": 4, "embedding_size": 3, "batch_size": 3, "window": 5}
    found = {}
    for tokens in ("words", "characters"):
        for layout in ("passages", "streams"):
            out = Path(tokens) / layout
            result = stretto.train("language-model", data="notes.txt", tokens=tokens, layout=layout, out=out, **small)
            started = read_events(out)[0]
            found[tokens, layout] = started["report"].get("streams")
            assert 1 < result.metrics["perplexity"] < 40
    assert found == {
        ("words", "passages"): None,
        ("words", "streams"): 3,
        ("characters", "passages"): None,
        ("characters", "streams"): 3,
    }


@pytest.mark.slow
def test_without_data_there_are_words_in_streams(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    made = make_text(num_train=600)
    monkeypatch.setattr("stretto.tasks.language_model.make_text", lambda: made)
    result = stretto.train("language-model", epochs=3, hidden_size=24, batch_size=8, out="out")
    assert result.metrics["perplexity"] < len(made.vocabulary) / 3
    started, *_ = read_events(Path("out"))
    assert started["report"]["streams"] == 8
    assert started["report"]["window"] == 20
    (samples,) = [event for event in read_events(Path("out")) if event["event"] == "samples"]
    shown = [word for item in samples["items"] for word in f"{item['target']} {item['output']}".split()]
    assert len(samples["items"]) == 12
    assert set(shown) <= set(made.vocabulary)


def test_presets_are_defaults_that_flags_and_files_override(tmp_path: Path) -> None:
    file = tmp_path / "own.toml"
    file.write_text("preset = 'ptb-small'\nhidden-size = 50\nepochs = 3\n", encoding="utf-8")
    small = _config("language-model", LanguageModelling, ["--preset", "ptb-small", "--window", "9"])
    assert isinstance(small, LanguageModelConfig)
    facts = (small.hidden_size, small.num_layers, small.batch_size, small.learning_rate, small.clip_norm, small.epochs)
    assert facts == (200, 2, 20, 20.0, 0.25, 13)
    assert (small.window, small.init_scale, small.optimizer, small.schedule) == (9, 0.1, "sgd", "ptb")
    mixed = _config("language-model", LanguageModelling, ["--config", str(file), "--epochs", "4"])
    assert (mixed.hidden_size, mixed.epochs, mixed.batch_size, mixed.learning_rate) == (50, 4, 20, 20.0)
    other = _config("language-model", LanguageModelling, ["--preset", "ptb-small", "--schedule", "linear"])
    assert (other.schedule, other.decay_factor, other.flat_epochs, other.hidden_size) == ("linear", None, None, 200)
    large = _config("language-model", LanguageModelling, ["--preset=ptb-large"])
    assert isinstance(large, LanguageModelConfig)
    assert (large.hidden_size, large.dropout, large.input_dropout, large.window) == (1500, 0.65, 0.65, 35)
    assert large.decay_factor == pytest.approx(1 / 1.15)
    assert _config("language-model", LanguageModelling, []) == LanguageModelConfig()
    with pytest.raises(StrettoError, match="preset: "):
        _config("language-model", LanguageModelling, ["--preset", "ptb-huge"])
    with pytest.raises(StrettoError, match="preset: "):
        stretto.train("language-model", preset="ptb-huge", out=tmp_path / "out")


def test_the_published_net_begins_uniform(text: SequenceSet) -> None:
    model = _task(text, init_scale=0.1, num_layers=2).build_model()
    weights_P = torch.cat([weight.detach().flatten() for weight in model.parameters()])
    assert float(weights_P.abs().max()) <= 0.1
    assert float(weights_P.std()) == pytest.approx(0.1 / math.sqrt(3), rel=0.05)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"tokens": "characters"}, "was read as words, and tokens='characters' was given"),
        ({"window": 0}, "window: "),
        ({"batch_size": 100_000}, "100000 streams"),
        ({"max_padded_steps": 20}, "4 streams with windows of 7 make 28 padded steps"),
    ],
)
def test_settings_that_do_not_fit_are_refused(text: SequenceSet, settings: dict[str, Any], message: str) -> None:
    with pytest.raises(StrettoError, match=message):
        _task(text, **settings).feed(world=World())
