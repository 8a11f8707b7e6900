"""CTC against naive code: what fits, greedy decoding, and beam search against every alignment there is.

Shape legend: T steps, C classes (0 is the blank), N sequences.
"""

import itertools
import math
from collections import defaultdict

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from stretto.data import Transcripts
from stretto.tasks.handwriting import BLANK, beam_decode, greedy_decode, steps_needed

Labels = tuple[int, ...]
NEVER = float("-inf")


@st.composite
def outputs(draw: st.DrawFn) -> npt.NDArray[np.float64]:
    """Log-probabilities of few steps and classes: flat, sharp, with ties, and with classes that cannot be."""
    num_steps, num_classes = draw(st.integers(1, 5)), draw(st.integers(2, 4))
    scores = st.sampled_from([NEVER, -20.0, -3.0, -1.0, -0.5, 0.0, 0.25, 1.0, 6.0])
    rows = st.lists(scores, min_size=num_classes, max_size=num_classes).filter(lambda row: max(row) > NEVER)
    scores_TC = np.array(draw(st.lists(rows, min_size=num_steps, max_size=num_steps)))
    log_probs_TC: npt.NDArray[np.float64] = scores_TC - np.log(np.exp(scores_TC).sum(axis=1, keepdims=True))
    return log_probs_TC


def _collapsed(path: Labels) -> Labels:
    merged = [label for label, _ in itertools.groupby(path)]
    return tuple(label for label in merged if label != BLANK)


def _probabilities(log_probs_TC: npt.NDArray[np.float64]) -> dict[Labels, float]:
    """The probability of every labelling, summed over all alignments."""
    found: dict[Labels, float] = defaultdict(float)
    probs_TC = np.exp(log_probs_TC)
    for path in itertools.product(range(probs_TC.shape[1]), repeat=len(probs_TC)):
        found[_collapsed(path)] += math.prod(float(p_C[label]) for p_C, label in zip(probs_TC, path, strict=True))
    return found


def _needed(text: str) -> int:
    return len(text) + sum(a == b for a, b in itertools.pairwise(text))


@settings(deadline=None, max_examples=200)
@given(st.data())
def test_steps_needed_equals_a_loop_over_the_texts_or_any_of_them(data: st.DataObject) -> None:
    texts = data.draw(st.lists(st.text("ab", max_size=6), min_size=1, max_size=8))
    chosen = data.draw(st.lists(st.integers(0, len(texts) - 1), min_size=1, max_size=6))
    own = Transcripts.of(texts)
    assert steps_needed(own).tolist() == [_needed(text) for text in texts]
    assert steps_needed(own.take(np.array(chosen))).tolist() == [_needed(texts[number]) for number in chosen]


@settings(deadline=None, max_examples=60)
@given(text=st.text("ab", min_size=1, max_size=5), num_steps=st.integers(1, 10))
def test_the_loss_is_finite_exactly_when_the_steps_suffice(text: str, num_steps: int) -> None:
    needed = int(steps_needed(Transcripts.of([text]))[0])
    loss = functional.ctc_loss(
        torch.randn(num_steps, 1, 3, generator=torch.Generator().manual_seed(0)).log_softmax(-1),
        torch.tensor([" ab".index(character) for character in text]),
        torch.tensor([num_steps]),
        torch.tensor([len(text)]),
        blank=BLANK,
        reduction="sum",
    )
    assert math.isfinite(float(loss)) == (needed <= num_steps)


@settings(deadline=None, max_examples=100)
@given(outputs())
def test_greedy_decoding_is_the_collapsed_best_path(log_probs_TC: npt.NDArray[np.float64]) -> None:
    path = tuple(int(np.argmax(log_probs_C)) for log_probs_C in log_probs_TC)
    assert tuple(greedy_decode(log_probs_TC)) == _collapsed(path)


@settings(deadline=None, max_examples=200)
@given(outputs())
def test_a_wide_beam_finds_the_most_probable_labelling(log_probs_TC: npt.NDArray[np.float64]) -> None:
    probabilities = _probabilities(log_probs_TC)
    found = tuple(beam_decode(log_probs_TC, width=100_000, min_log_prob=NEVER))
    assert probabilities[found] == pytest.approx(max(probabilities.values()), rel=1e-9)
    assert probabilities[found] >= probabilities[tuple(greedy_decode(log_probs_TC))] * (1 - 1e-9)


@settings(deadline=None, max_examples=100)
@given(outputs(), st.integers(1, 3), st.sampled_from([NEVER, -9.0, -0.1]))
def test_a_narrow_beam_still_gives_a_labelling_that_fits(
    log_probs_TC: npt.NDArray[np.float64], width: int, min_log_prob: float
) -> None:
    found = beam_decode(log_probs_TC, width=width, min_log_prob=min_log_prob)
    assert BLANK not in found
    assert len(found) + sum(a == b for a, b in itertools.pairwise(found)) <= len(log_probs_TC)


def test_no_steps_are_decoded_as_nothing() -> None:
    assert greedy_decode(np.zeros((0, 3))) == beam_decode(np.zeros((0, 3))) == []


def test_a_class_below_the_threshold_starts_no_label_but_may_continue() -> None:
    log_probs_TC = np.log(np.array([[0.1, 0.9], [0.5, 0.5], [0.95, 0.05]]))
    assert beam_decode(log_probs_TC, min_log_prob=math.log(0.6)) == [1]
    assert beam_decode(log_probs_TC[2:], min_log_prob=math.log(0.6)) == []
