"""Handwriting: padding changes nothing, the metric is what it says, and what cannot be learned is named.

Shape legend: B lines, T steps, U stacked steps, F features, C classes.
"""

from typing import Any

import numpy as np
import pytest
import torch
from task_gradients import assert_padding_changes_nothing, built, ragged

from stretto.batching import Batch, collate
from stretto.data import AbstractTargets, SequenceSet, Transcripts
from stretto.errors import StrettoError
from stretto.tasks.handwriting import Handwriting, HandwritingConfig
from stretto.training import Sample

LENGTHS = [7, 20, 6, 13, 1, 9]
TEXTS = ["ab", "abba", "bb", "a b", "c", "ca"]


def _set(targets: AbstractTargets, *, lengths: list[int] = LENGTHS, num_features: int = 3) -> SequenceSet:
    return ragged(lengths, num_features=num_features, targets=targets, name="ink")


def _task(*, texts: list[str] = TEXTS, lengths: list[int] = LENGTHS, **settings: Any) -> Handwriting:
    config = HandwritingConfig(hidden_size=5, dropout=0.0, **({"stack": 2} | settings))
    return Handwriting(config, _set(Transcripts.of(texts), lengths=lengths))


@pytest.mark.parametrize("stack", [1, 2, 3])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_padding_changes_nothing(stack: int, num_layers: int) -> None:
    texts = ["a", "abba", "b", "a b", "c", "ca"] if stack == 3 else TEXTS
    task = _task(texts=texts, stack=stack, num_layers=num_layers)
    assert_padding_changes_nothing(task, count=sum(map(len, texts)), rubbish=[1e30], atol=1e-12)


def test_samples_and_errors_do_not_depend_on_the_padding() -> None:
    task = _task(decoder="beam")
    model, items = built(task), [task.data[index] for index in range(len(LENGTHS))]
    model.classify.weight.data.mul_(9.0)  # type: ignore[union-attr,operator]
    with torch.no_grad():
        together, alone = collate(items, edges=[41]), [collate([item]) for item in items]
        samples = task.samples(model(together), together)
        assert samples == [sample for one in alone for sample in task.samples(model(one), one)]
        assert len({sample.output for sample in samples}) > 1
        scores = task.final_score(model(together), together)
        assert set(scores) == {"cer", "cer_greedy", "cer_beam"}
        for name, score in scores.items():
            each = [task.final_score(model(one), one)[name] for one in alone]
            assert score.amount == sum(one.amount for one in each)
            assert score.count == sum(one.count for one in each) == sum(map(len, TEXTS))


def _sharp(task: Handwriting, batch: Batch, lines: list[str]) -> torch.Tensor:
    """An output that spells `lines`, a blank after each character."""
    num_steps = 2 * max(map(len, lines))
    output_BUC = torch.full((len(batch), num_steps, len(task.alphabet) + 1), -30.0)
    output_BUC[..., 0] = 0.0
    for row, line in enumerate(lines):
        for place, character in enumerate(line):
            output_BUC[row, 2 * place, 0] = -30.0
            output_BUC[row, 2 * place, 1 + task.alphabet.index(character)] = 0.0
    return output_BUC


@pytest.mark.parametrize("decoder", ["greedy", "beam"])
def test_the_error_rate_counts_edits_by_characters(decoder: str) -> None:
    task = _task(texts=["abba", "a b", "cc", "ca", "c", "bc"], lengths=[40] * 6, decoder=decoder)
    batch = collate([task.data[0], task.data[1], task.data[2]])
    output_BUC = _sharp(task, batch, ["abba", "ab", "ca"])
    assert [sample.output for sample in task.samples(output_BUC, batch)] == ["abba", "ab", "ca"]
    for scores in (task.score(output_BUC, batch), task.final_score(output_BUC, batch)):
        assert (scores["cer"].amount, scores["cer"].count) == (2, 9)
        assert task.summary(scores)["cer"] == pytest.approx(2 / 9)


def test_samples_have_the_ink_of_real_steps_where_there_is_ink() -> None:
    task = _task()
    batch = collate([task.data[0], task.data[2]])
    first, second = task.samples(_sharp(task, batch, ["a", "b"]), batch)
    assert first == Sample(target="ab", output="a", ink=first.ink)
    assert (len(first.ink or []), len(second.ink or [])) == (7, 6)
    np.testing.assert_allclose(first.ink or [], task.data[0].features_TF.numpy(), atol=5e-4)
    other = Handwriting(HandwritingConfig(stack=2), _set(Transcripts.of(TEXTS), num_features=2))
    assert other.samples(_sharp(other, batch, ["a", "b"]), collate([other.data[0], other.data[2]]))[0].ink is None


@pytest.mark.parametrize(
    ("settings", "problem"),
    [
        ({"texts": ["ab", "ab", "a", "", "c", ""]}, "ink: sequence 3 has no transcript"),
        (
            {"stack": 3},
            r"'bb' of sequence 2 needs 3 steps but its ink has 2 after stacking 3 \(1 such sequences\).*Lower --stack",
        ),
    ],
)
def test_a_transcript_that_cannot_be_learned_is_named(settings: dict[str, Any], problem: str) -> None:
    with pytest.raises(StrettoError, match=problem):
        _task(**settings)
