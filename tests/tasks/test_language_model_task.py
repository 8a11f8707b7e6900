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
from hypothesis import given, settings
from hypothesis import strategies as st
from task_gradients import assert_padding_changes_nothing, built
from torch.nn import functional

from stretto.batching import collate
from stretto.data import SequenceSet, read_text
from stretto.errors import StrettoError
from stretto.tasks.language_model import LanguageModelConfig, LanguageModelling, summed_cross_entropy

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
    model, batch = built(task), collate([text[0], text[1]])
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


@settings(deadline=None, max_examples=60)
@given(
    num_steps=st.integers(1, 9),
    num_words=st.integers(1, 30),
    scale=st.sampled_from([0.1, 1.0, 1e3]),
    weight=st.sampled_from([1.0, -0.5, 3.0]),
    seed=st.integers(0, 1000),
)
def test_values_and_gradients_are_torchs(
    num_steps: int, num_words: int, scale: float, weight: float, seed: int
) -> None:
    torch.manual_seed(seed)
    scores_PC = (torch.randn(num_steps, num_words, dtype=torch.float64) * scale).requires_grad_()
    targets_P = torch.randint(-1, num_words, (num_steps,))
    before_PC = scores_PC.detach().clone()
    mine = summed_cross_entropy(scores_PC * 1.0, targets_P)
    (found_PC,) = torch.autograd.grad(mine * weight, scores_PC)
    theirs = functional.cross_entropy(scores_PC, targets_P, ignore_index=-1, reduction="sum")
    (wanted_PC,) = torch.autograd.grad(theirs * weight, scores_PC)
    assert mine.item() == theirs.item()
    torch.testing.assert_close(found_PC, wanted_PC, rtol=1e-12, atol=1e-14)
    assert torch.equal(scores_PC, before_PC)
    with torch.no_grad():
        assert summed_cross_entropy(scores_PC, targets_P).item() == theirs.item()


def test_a_loss_of_nan_has_a_gradient_of_nan() -> None:
    scores_PC = torch.tensor([[0.0, float("nan")], [1.0, 2.0]], requires_grad=True)
    loss = summed_cross_entropy(scores_PC, torch.tensor([0, 1]))
    (found_PC,) = torch.autograd.grad(loss, scores_PC)
    assert torch.isnan(loss)
    assert torch.isnan(found_PC[0]).all()


def test_the_gradient_can_be_taken_again() -> None:
    scores_PC, targets_P = torch.randn(4, 6, dtype=torch.float64, requires_grad=True), torch.tensor([0, 5, -1, 2])
    loss = summed_cross_entropy(scores_PC, targets_P)
    (first_PC,) = torch.autograd.grad(loss, scores_PC, retain_graph=True)
    kept_PC = first_PC.clone()
    first_PC.mul_(7.0)
    (second_PC,) = torch.autograd.grad(loss, scores_PC)
    assert torch.equal(second_PC, kept_PC)
    assert torch.autograd.gradcheck(lambda scores: summed_cross_entropy(scores, targets_P), (scores_PC,))
