"""Language modelling: padding changes nothing, loss and perplexity are what they say, and text is needed.

Shape legend: B passages, T steps, U steps that have a next one, F features, P steps of all passages, C characters.
"""

import math
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from task_gradients import assert_padding_changes_nothing, built
from torch.nn import functional

from stretto.batching import collate
from stretto.data import SequenceSet, read_text
from stretto.errors import StrettoError
from stretto.tasks.language_model import LanguageModelConfig, LanguageModelling

PASSAGES = ["ab", "a rose is a rose", "so it is", "is it", "be", "to be or not"]


@pytest.fixture
def text(tmp_path: Path) -> SequenceSet:
    path = tmp_path / "roses.txt"
    path.write_text("\n\n".join(PASSAGES), encoding="utf-8")
    return read_text(path)


def _task(text: SequenceSet, **changes: Any) -> LanguageModelling:
    return LanguageModelling(LanguageModelConfig(hidden_size=5, embedding_size=3, dropout=0.0, **changes), text)


@pytest.mark.parametrize("num_layers", [1, 2])
def test_padding_changes_nothing(text: SequenceSet, num_layers: int) -> None:
    count, last = sum(len(passage) - 1 for passage in PASSAGES), len(text.alphabet) - 1
    assert_padding_changes_nothing(_task(text, num_layers=num_layers), count=count, rubbish=[last])


def test_perplexity_is_the_exponential_of_the_mean_loss(text: SequenceSet) -> None:
    task = _task(text)
    model, batch = built(task).eval(), collate([text[0], text[1]])
    with torch.no_grad():
        output_BUC = model(batch)
    nats = 0.0
    for row, passage in enumerate(PASSAGES[:2]):
        for place in range(1, len(passage)):
            log_probs_C = output_BUC[row, place - 1].log_softmax(-1)
            nats -= float(log_probs_C[text.alphabet.index(passage[place])])
    count = len(PASSAGES[0]) + len(PASSAGES[1]) - 2
    assert task.summary(task.score(output_BUC, batch)) == {"perplexity": pytest.approx(math.exp(nats / count))}
    output_BUC[..., text.alphabet.index("b")] = 1e6
    assert math.isfinite(task.summary(task.score(output_BUC, batch))["perplexity"])


def test_the_bias_can_begin_at_the_frequencies(text: SequenceSet) -> None:
    torch.manual_seed(0)
    model = _task(text, frequency_bias=True, init_scale=0.1).build_model()
    train = text.part("train")
    letters = [text.alphabet[int(number)] for n in range(len(train)) for number in train[n].features_TF[:, 0]]
    shares = model.predict.bias.softmax(dim=0).tolist()
    for letter, share in zip(text.alphabet, shares, strict=True):
        assert share == pytest.approx((1 + letters.count(letter)) / (len(text.alphabet) + len(letters)), rel=1e-5)
    torch.manual_seed(0)
    plain = _task(text, init_scale=0.1).build_model()
    assert torch.equal(plain.predict.weight, model.predict.weight)
    assert not torch.allclose(plain.predict.bias, model.predict.bias)


def test_samples_show_what_is_expected_at_each_place(text: SequenceSet) -> None:
    task, batch = _task(text), collate([text[0], text[1]])
    output_BUC = functional.one_hot(batch.features_BTF[:, :-1, 0], len(text.alphabet)).double()
    first, second = task.samples(output_BUC, batch)
    assert (first.target, first.output) == ("ab", "aa")
    assert (second.target, second.output) == (PASSAGES[1], "a" + PASSAGES[1][:-1])


def _numbers(rows: list[list[int]], *, dtype: npt.DTypeLike = np.int64, **names: Any) -> SequenceSet:
    flat_S = np.array([number for row in rows for number in row], dtype=dtype)
    return SequenceSet.from_flat(flat_S, offsets=np.cumsum([0, *map(len, rows)]), name="codes", **names)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (_numbers([[0, 1], [1, 2]], alphabet="ab"), "sequence 1"),
        (_numbers([[0, 1], [1, -1]], alphabet="ab"), "sequence 1"),
        (_numbers([[0, 1], [2, 0]], vocabulary=("a", "b")), "sequence 1 has 2 steps, numbered 0 to 2, for 2 words"),
        (_numbers([[0, 1], [1], [1, 0]], alphabet="ab"), "sequence 1"),
        (_numbers([[0, 1], [1, 0]], alphabet="ab", dtype=np.float32), "codes"),
        (
            SequenceSet.from_flat(np.zeros((4, 2), dtype=int), offsets=np.array([0, 2, 4]), name="codes", alphabet="a"),
            "codes",
        ),
    ],
)
def test_what_is_no_text_is_refused(data: SequenceSet, message: str) -> None:
    with pytest.raises(StrettoError, match=message):
        LanguageModelling(LanguageModelConfig(), data)


def test_the_embedded_text_is_of_words() -> None:
    data = LanguageModelling.embedded_data()
    assert "<eos>" in data.vocabulary
    assert LanguageModelling(LanguageModelConfig(), data).in_streams


def test_without_padding_the_loss_is_the_same_to_the_last_digit(text: SequenceSet) -> None:
    """A batch of passages of one length is not copied; one with a longer passage is, and adds its own loss."""
    task, same = _task(text), collate([text[0], text[4]])
    output_BUC = torch.randn(2, 1, len(text.alphabet))
    padded = collate([text[0], text[4]], edges=[9])
    behind_BUC = functional.pad(output_BUC, (0, 0, 0, 7), value=3.0)
    assert task.loss(output_BUC, same).total == task.loss(behind_BUC, padded).total


def test_in_training_the_model_returns_the_nats_that_its_scores_have(text: SequenceSet) -> None:
    task = _task(text)
    model, batch = built(task), collate([text[0], text[1], text[4]])
    nats_BU = model(batch)
    assert nats_BU.shape == (3, batch.features_BTF.shape[1] - 1)
    assert not nats_BU[~batch.mask[:, 1:]].any()
    expected = task.loss(model.eval()(batch), batch)
    assert nats_BU.sum().item() == pytest.approx(float(expected.total), rel=1e-12)
    assert task.loss(nats_BU, batch).count == expected.count
