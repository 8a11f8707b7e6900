"""`stretto.load`, predict and evaluate: for each task the metrics of training again, without the training data.

Shape legend: S steps of all sequences, N sequences, F features.
"""

import dataclasses
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

import stretto
from stretto.data import (
    Labels,
    NoTargets,
    SequenceSet,
    StepLabels,
    Transcripts,
    make_drawn_digits,
    make_regimes,
    open_sequences,
    write_npz,
)
from stretto.errors import StrettoError
from stretto.tasks import find_task
from stretto.training import AbstractTask, TrainConfig

pytestmark = pytest.mark.usefixtures("quick_compiler")

SMALL: dict[str, Any] = {"epochs": 2, "batch_size": 4, "hidden_size": 4, "threads": 1, "backend": "torch"}


@pytest.fixture(autouse=True)
def a_place_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def _sequences(targets: Any, *, count: int = 18, features: int = 2, seed: int = 0) -> SequenceSet:
    rng = np.random.default_rng(seed)
    lengths_N = rng.integers(6, 14, count)
    offsets = np.cumsum([0, *lengths_N])
    return SequenceSet.from_flat(
        rng.normal(size=(offsets[-1], features)).astype(np.float32),
        offsets=offsets,
        targets=targets(lengths_N, rng),
        split_N=np.arange(count) % 3,
        split_complete=True,
        name="made",
    )


def _labels(lengths_N: Any, rng: Any) -> Labels:
    return Labels(values_N=rng.integers(0, 3, len(lengths_N)), names=("up", "down", "still"))


def _step_labels(lengths_N: Any, rng: Any) -> StepLabels:
    return StepLabels.check(
        rng.integers(0, 4, sum(lengths_N)),
        offsets=np.cumsum([0, *lengths_N]),
        names=("none", "walk", "sit", "run"),
        source="made",
    )


def _texts(lengths_N: Any, rng: Any) -> Transcripts:
    return Transcripts.of(["".join(rng.choice(list("abé "), 2)).strip() or "a" for _ in lengths_N])


def _text_file() -> SequenceSet:
    Path("text.txt").write_text("\n\n".join(["the red dog runs", "a cat", "the dog sees a cat\nand runs"] * 6), "utf-8")
    return open_sequences("text.txt")


def _word_folder() -> SequenceSet:
    Path("words").mkdir()
    for part in ("train", "valid", "test"):
        Path(f"words/w.{part}.txt").write_text("the dog runs\na <unk> cat sees the dog\n" * 3, "utf-8")
    return open_sequences("words")


def _pairs() -> SequenceSet:
    Path("pairs").mkdir()
    for part, count in (("train", 12), ("valid", 3), ("test", 4)):
        for language, words in (("en", "one two three"), ("de", "eins zwei drei")):
            rng = np.random.default_rng(count)
            lines = [" ".join(rng.choice(words.split(), 1 + number % 3)) for number in range(count)]
            Path(f"pairs/{part}.{language}").write_text("\n".join(lines) + "\n", "utf-8")
    return open_sequences("pairs")


def _frames() -> SequenceSet:
    rng = np.random.default_rng(0)
    return SequenceSet.from_flat(
        rng.integers(0, 256, (90, 64), dtype=np.uint8),
        offsets=np.arange(0, 91, 5),
        targets=Labels(values_N=np.arange(18) % 2, names=("jump", "wave")),
        split_N=np.arange(18) % 3,
        split_complete=True,
        name="clips",
    )


CASES: dict[str, tuple[str, Callable[[], SequenceSet], dict[str, Any]]] = {
    "handwriting": ("handwriting", lambda: _sequences(_texts, features=3), {"stack": 2}),
    "classify": ("classify", lambda: _sequences(_labels), {"class_weights": "balanced", "backend": "auto"}),
    "classify runs": ("classify", lambda: _sequences(_step_labels), {}),
    "label-steps": ("label-steps", lambda: _sequences(_step_labels), {"class_weights": "balanced"}),
    "label-steps both ways": (
        "label-steps",
        lambda: _sequences(_step_labels),
        {"bidirectional": True, "unlabelled": None},
    ),
    "digits": ("digits", lambda: make_drawn_digits(num_train=16), {"row_size": 4}),
    "digit-images": ("digit-images", lambda: make_drawn_digits(num_train=16), {}),
    "video": ("video", _frames, {"frame_size": 8}),
    "video features": ("video", lambda: _sequences(_labels), {"solver": "shooting", "backend": "auto"}),
    "characters": ("language-model", _text_file, {"epochs": 1}),
    "words": ("language-model", _word_folder, {"window": 3}),
    "translate": ("translate", _pairs, {"num_layers": 1, "vocabulary_size": 300}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_loaded_model_is_the_trained_one(case: str) -> None:
    name, make, changes = CASES[case]
    kind, data = find_task(name), make()
    task = kind(kind.Config(**SMALL | changes), data)
    result = stretto.train(task, out="run")
    model = stretto.load("run")
    assert not model.training
    assert type(model.task) is kind
    # As it was at the end of training, to the bit.
    assert model.evaluate(data) == result.metrics
    trained = result.model.state_dict()
    assert all(torch.equal(tensor, trained[key]) for key, tensor in model.model.state_dict().items())

    rows = model.predict(data)
    count = len(task.data) if case == "classify runs" else len(data)
    assert len(rows) == count
    assert json.loads(json.dumps(rows)) == rows
    # In the order of the data, and without targets.
    chosen = [4, 0, 3]
    bare = data.subset(chosen)
    if name not in ("classify", "translate") or case == "classify":
        bare = dataclasses.replace(bare, targets=NoTargets(count=3))
    if case != "classify runs":
        for row, number in zip(model.predict(bare), chosen, strict=True):
            _assert_close(row, rows[number])


def _assert_close(row: dict[str, Any], other: dict[str, Any]) -> None:
    assert row.keys() == other.keys()
    for name, value in row.items():
        approximate = isinstance(value, (float, dict))
        assert value == (pytest.approx(other[name], rel=1e-5) if approximate else other[name])


def test_predictions_agree_with_the_metrics() -> None:
    data = _sequences(_labels)
    stretto.train(find_task("classify")(find_task("classify").Config(**SMALL), data), out="labels")
    model = stretto.load("labels")
    rows, names = model.predict(data), ("up", "down", "still")
    right = [row["class"] == names[int(y)] for row, y in zip(rows, data.targets.values_N, strict=True)]  # type: ignore[attr-defined]
    assert np.mean(right) == pytest.approx(model.evaluate(data, split="all")["accuracy"])
    assert all(sum(row["probabilities"].values()) == pytest.approx(1.0) for row in rows)
    assert all(row["probability"] == max(row["probabilities"].values()) for row in rows)

    text = _text_file()
    stretto.train("language-model", data="text.txt", out="text", **SMALL)
    model = stretto.load("text")
    rows = model.predict("text.txt")
    nats = [np.log(row["perplexity"]) * (row["characters"] - 1) for row in rows]
    mean = sum(nats) / sum(row["characters"] - 1 for row in rows)
    assert np.exp(mean) == pytest.approx(model.evaluate("text.txt", split="all")["perplexity"], rel=1e-5)
    # The continuation is what the model predicts after itself.
    start = "the d"
    more = model.predict([start])[0]["continuation"]
    again = model.predict([start + more[:7]])[0]["continuation"]
    assert more[7:] == again[: len(more) - 7]
    assert len(text) == len(rows)


def test_long_texts_are_read_in_pieces() -> None:
    Path("text.txt").write_text("\n\n".join(["abcab " * 40, "ba", "cab " * 16, "ab" * 32 + "c"] * 5), "utf-8")
    result = stretto.train("language-model", data="text.txt", out="run", **SMALL)
    model = stretto.load("run")
    rows = model.predict("text.txt", split="test")
    nats = sum(np.log(row["perplexity"]) * (row["characters"] - 1) for row in rows)
    mean = nats / sum(row["characters"] - 1 for row in rows)
    assert np.exp(mean) == pytest.approx(result.metrics["perplexity"], rel=1e-5)
    together = model.predict(["abcab " * 11, "ba"])
    for text, row in zip(["abcab " * 11, "ba"], together, strict=True):
        _assert_close(model.predict([text])[0], row)


def test_best_and_last_weights_of_finished_and_unfinished_runs() -> None:
    data = _sequences(_labels)
    write_npz(Path("data.npz"), data)
    settings = SMALL | {"epochs": 12, "learning_rate": 0.2, "seed": 3}
    result = stretto.train("classify", data="data.npz", out="run", **settings)
    last, best = stretto.load("run"), stretto.load("run", weights="best")
    assert (last.weights, best.weights) == ("last", "best")
    assert last.evaluate("data.npz") == result.metrics
    events = [json.loads(line) for line in Path("run/events.jsonl").read_text("utf-8").splitlines()]
    values = [event["value"] for event in events if event["event"] == "epoch"]
    assert best.evaluate("data.npz", split="valid")["accuracy"] == max(values)
    # Its settings train the same again.
    text = Path("run/settings.toml").read_text("utf-8")
    assert "batch-size = 4\n" in text
    Path("run/model.safetensors").unlink()
    again = stretto.load("run", weights="last")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), last.parameters(), strict=True))

    # With patience the best weights are tested.
    stopped = stretto.train("classify", data="data.npz", out="patient", **settings | {"patience": 2, "epochs": 40})
    model = stretto.load("patient")
    assert model.weights == "best"
    assert model.evaluate("data.npz") == stopped.metrics
    assert stopped.epochs < 40
    assert "2 epochs without a better accuracy" in Path("patient/events.jsonl").read_text("utf-8")


def test_hours_end_a_run_after_an_epoch() -> None:
    write_npz(Path("data.npz"), _sequences(_labels))
    result = stretto.train("classify", data="data.npz", out="run", **SMALL | {"epochs": 50, "max_hours": 1e-9})
    assert result.epochs == 1


class _Own(AbstractTask[TrainConfig]):
    name = "own"
    metric = "error"

    @classmethod
    def embedded_data(cls) -> SequenceSet:
        return make_regimes()

    def build_model(self) -> torch.nn.Module:
        return find_task("classify")(find_task("classify").Config(**SMALL), self.data).build_model()

    def loss(self, output: torch.Tensor, batch: Any) -> Any:
        return find_task("classify")(find_task("classify").Config(**SMALL), self.data).loss(output, batch)

    def score(self, output: torch.Tensor, batch: Any) -> Any:
        return {"error": find_task("classify").score(self, output, batch)["error"]}  # type: ignore[arg-type]

    def _select_labelled(self, output: torch.Tensor, batch: Any) -> Any:
        return output, batch.targets

    def samples(self, output: torch.Tensor, batch: Any) -> Any:  # noqa: ARG002
        return [stretto.training.Sample(target=str(y), output="?") for y in batch.targets.tolist()]


def test_a_task_of_ones_own_is_loaded_by_its_class() -> None:
    data = _sequences(_labels)
    result = stretto.train(_Own(TrainConfig(**SMALL), data), out="run")
    with pytest.raises(StrettoError, match=r"task 'own'.*task=MyTask"):
        stretto.load("run")
    model = stretto.load("run", task=_Own)
    assert model.evaluate(data) == result.metrics
    assert model.predict(data) == [{"output": "?"}] * len(data)


def test_data_of_other_classes_features_and_characters() -> None:
    data = _sequences(_labels)
    config = find_task("classify").Config(**SMALL)
    stretto.train(find_task("classify")(config, data), out="run")
    model = stretto.load("run")
    expected = model.evaluate(data, split="all")

    def named(names: tuple[str, ...], values_N: Any) -> SequenceSet:
        return dataclasses.replace(data, targets=Labels(values_N=values_N, names=names))

    labels_N = data.targets.values_N  # type: ignore[attr-defined]
    # Classes are matched by name, whatever their numbers; numbers without names are those of training.
    assert (
        model.evaluate(named(("still", "up", "more", "down"), np.array([1, 3, 0])[labels_N]), split="all") == expected
    )
    assert model.evaluate(named(("0", "1", "2"), labels_N), split="all") == expected
    with pytest.raises(StrettoError, match=r"not trained on: 'left'"):
        model.evaluate(named(("up", "left", "still"), labels_N))
    assert model.predict([torch.zeros(3, 2), torch.ones(1, 2)])[1].keys() == {"class", "probability", "probabilities"}

    ink = _sequences(_texts, features=3)
    kind = find_task("handwriting")
    stretto.train(kind(kind.Config(**SMALL | {"stack": 1}), ink), out="ink")
    model = stretto.load("ink")
    other = dataclasses.replace(ink, targets=Transcripts.of(["ab", "xz", *["ba"] * 16]))
    found, part = model.evaluation(other)
    assert "xz" in part.notes[-1]
    assert np.isfinite(found.loss)
    assert min(found.loss, found.metrics["cer"]) > 0
    assert found.confusion is None

    _text_file()
    stretto.train("language-model", data="text.txt", out="text", **SMALL)
    with pytest.raises(StrettoError, match=r"characters that the model was not trained on: 'Q'"):
        stretto.load("text").predict(["the Q"])


def test_unknown_words_are_unk() -> None:
    _word_folder()
    stretto.train("language-model", data="words", out="run", **SMALL)
    model = stretto.load("run")
    Path("new.txt").write_text("the zebra runs\n", "utf-8")
    Path("same.txt").write_text("the <unk> runs\n", "utf-8")
    assert model.predict("new.txt") == model.predict("same.txt")
    assert model.predict("new.txt")[0]["words"] == 4


def test_lines_are_translated() -> None:
    _pairs()
    stretto.train("translate", data="pairs", out="run", **SMALL, num_layers=1, vocabulary_size=300)
    shutil.rmtree("pairs")
    model = stretto.load("run")
    Path("lines.en").write_text("one two\n\nthree\n", "utf-8")
    assert model.predict("lines.en") == model.predict(["one two", "three"])
    with pytest.raises(StrettoError, match="has no translations"):
        model.evaluate("lines.en")


def test_weights_of_another_net_are_refused() -> None:
    data = _sequences(_labels)
    stretto.train(find_task("classify")(find_task("classify").Config(**SMALL | {"epochs": 1}), data), out="run")
    tensors = safetensors.torch.load_file("run/best.safetensors")
    safetensors.torch.save_file({key: value[:1].clone() for key, value in tensors.items()}, "run/best.safetensors")
    with pytest.raises(StrettoError, match="cannot be built"):
        stretto.load("run", weights="best")
