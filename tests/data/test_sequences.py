"""The one type for sequences of unequal length, and what it refuses."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.data import PARTS, Labels, NoTargets, SequenceSet, Transcripts
from stretto.errors import StrettoError


def ragged(lengths, *, split=None, targets=None, name="data"):
    num_steps = sum(lengths)
    return SequenceSet.from_flat(
        np.arange(2 * num_steps, dtype=np.float32).reshape(num_steps, 2),
        offsets=np.cumsum([0, *lengths]),
        targets=targets,
        split_N=None if split is None else np.array(split),
        name=name,
    )


def test_a_sequence_is_its_slice_of_the_steps():
    data = ragged([2, 1, 3], split=[0, 1, 2])
    assert len(data) == 3
    assert data.num_steps == 6
    assert data.num_features == 2
    assert data[1].features_TF.tolist() == [[4.0, 5.0]]
    assert data[-1].features_TF.tolist() == [[6.0, 7.0], [8.0, 9.0], [10.0, 11.0]]
    assert data[-1].index == 2
    assert not data.memory_mapped


@pytest.mark.parametrize("index", [3, -4])
def test_an_index_outside_is_an_index_error(index):
    with pytest.raises(IndexError, match=f"sequence {index} of 3"):
        ragged([2, 1, 3])[index]


def test_a_flat_array_is_one_feature():
    data = SequenceSet.from_flat(np.arange(5), offsets=np.array([0, 2, 5]))
    assert data.num_features == 1
    assert data[1].features_TF.tolist() == [[2], [3], [4]]


@pytest.mark.parametrize(
    ("stored", "read"),
    [
        (np.float16, torch.float32),
        (np.float32, torch.float32),
        (np.float64, torch.float64),
        (np.uint8, torch.int64),
        (np.int16, torch.int64),
        (np.bool_, torch.int64),
    ],
)
def test_every_number_type_has_its_tensor_type(stored, read):
    data = SequenceSet.from_flat(np.ones((3, 1), dtype=stored), offsets=np.array([0, 3]))
    assert data.features_SF.dtype == stored
    assert data[0].features_TF.dtype == read


def test_changing_a_sample_leaves_the_set_alone():
    data = ragged([2, 2])
    data[0].features_TF.zero_()
    assert data[0].features_TF.tolist() == [[0.0, 1.0], [2.0, 3.0]]


@settings(deadline=None, max_examples=40)
@given(st.lists(st.integers(1, 6), min_size=1, max_size=9), st.data())
def test_a_subset_keeps_sequences_targets_and_numbers(lengths, drawn):
    texts = [f"line {index}" for index in range(len(lengths))]
    data = ragged(lengths, targets=Transcripts.of(texts))
    chosen = drawn.draw(st.lists(st.sampled_from(range(len(lengths))), max_size=6))
    subset = data.subset(chosen)
    assert len(subset) == len(chosen)
    for position, index in enumerate(chosen):
        assert torch.equal(subset[position].features_TF, data[index].features_TF)
        assert subset[position].target == texts[index]
        assert subset[position].index == index
        assert subset.split_N[position] == data.split_N[index]


def test_parts_follow_the_split():
    data = ragged([1, 2, 3, 4], split=[2, 0, 1, 0], name="four")
    assert {part: data.part(part).lengths_N.tolist() for part in PARTS} == {"train": [2, 4], "valid": [3], "test": [1]}
    assert data.part("test").name == "four (test)"
    assert data.notes == ()


def test_a_part_without_sequences_is_refused():
    with pytest.raises(StrettoError, match="four: no sequence is in the test split"):
        ragged([1, 2], split=[0, 0], name="four").part("test")


def test_a_missing_split_is_drawn_and_told():
    data = ragged([1] * 2000)
    shares = np.bincount(data.split_N, minlength=3) / len(data)
    assert np.abs(shares - [0.8, 0.1, 0.1]).max() < 0.03
    assert len(data.notes) == 1
    assert "80 % train" in data.notes[0]
    np.testing.assert_array_equal(data.split_N, ragged([1] * 2000).split_N)


def test_train_and_test_alone_lend_a_tenth_to_validation():
    given_split = [0] * 900 + [1] * 100
    data = ragged([1] * 1000, split=given_split)
    assert (data.split_N[900:] == 2).all()
    assert 50 < (data.split_N[:900] == 1).sum() < 140
    assert (data.split_N[:900] != 2).all()
    assert any("a tenth of train" in note for note in data.notes)


@pytest.mark.parametrize("split", [[0, 3], [0, -1], [0], [[0], [1]], ["train", "test"], [0.5, 1.0]])
def test_a_bad_split_is_refused(split):
    with pytest.raises(StrettoError, match="data: split has shape"):
        ragged([1, 1], split=split)


@pytest.mark.parametrize("wrong", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize(("step", "sequence", "within"), [(0, 0, 0), (2, 1, 0), (5, 2, 2)])
def test_a_feature_that_is_no_number_names_its_sequence(wrong, step, sequence, within):
    features = np.zeros((6, 2))
    features[step, 1] = wrong
    with pytest.raises(StrettoError, match=f"sequence {sequence} has a NaN or infinite feature at its step {within}"):
        SequenceSet.from_flat(features, offsets=np.array([0, 2, 3, 6]))


@pytest.mark.parametrize(
    ("offsets", "told"),
    [
        ([0], "the set is empty"),
        ([], "the set is empty"),
        ([0, 2, 2, 4], "1 of 3 sequences have no steps .first: sequence 1"),
        ([0, 2], "run from 0 to 2 over 4 steps"),
        ([0, 2, 5], "run from 0 to 5 over 4 steps"),
        ([1, 4], "run from 1 to 4 over 4 steps"),
        ([0, 3, 2, 4], "they fall at sequence 1"),
    ],
)
def test_offsets_that_do_not_fit_are_refused(offsets, told):
    with pytest.raises(StrettoError, match=told):
        SequenceSet.from_flat(np.zeros((4, 1)), offsets=np.array(offsets, dtype=np.int64))


@pytest.mark.parametrize("offsets", [np.array([0.0, 4.0]), np.array([[0, 4]]), np.array(4), np.array(["0", "4"])])
def test_offsets_of_another_kind_are_refused(offsets):
    with pytest.raises(StrettoError, match="data: offsets have shape"):
        SequenceSet.from_flat(np.zeros((4, 1)), offsets=offsets)


@pytest.mark.parametrize(
    "features",
    [
        np.zeros((4, 1, 1)),
        np.array(4.0),
        np.zeros((4, 1), dtype=complex),
        np.array([["a"], ["b"], ["c"], ["d"]]),
        np.zeros((4, 0)),
    ],
)
def test_features_of_another_kind_are_refused(features):
    with pytest.raises(StrettoError, match="features"):
        SequenceSet.from_flat(features, offsets=np.array([0, 4]))


def test_targets_must_be_one_a_sequence():
    labels = Labels.check(np.array([0, 1, 1]), names=None, source="here")
    with pytest.raises(StrettoError, match="2 sequences but 3 targets"):
        ragged([1, 2], targets=labels)
    assert isinstance(ragged([1, 2]).targets, NoTargets)


def test_the_digest_tells_other_lengths_and_splits_apart():
    data = ragged([2, 1, 3], split=[0, 1, 2])
    assert data.digest() == ragged([2, 1, 3], split=[0, 1, 2]).digest()
    others = [ragged([1, 2, 3], split=[0, 1, 2]), ragged([2, 1, 3], split=[0, 2, 1]), data.subset([0, 2])]
    assert len({data.digest(), *(other.digest() for other in others)}) == 4


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 11, 14, 19, 23, 25, 40, 101])
@pytest.mark.parametrize("given", [None, "train and test"])
def test_every_part_that_can_have_a_sequence_has_one(count: int, given: str | None) -> None:
    split_N = None if given is None else np.arange(count) % 2
    data = SequenceSet.from_flat(np.zeros((count, 1)), offsets=np.arange(count + 1), split_N=split_N)
    counts = np.bincount(data.split_N, minlength=3)
    assert counts[0] >= 1
    assert count < 3 or counts.min() >= 1


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64, np.uint8, np.int16, np.bool_])
def test_a_batch_of_samples_is_the_samples_one_by_one(dtype: type[np.generic]) -> None:
    rng = np.random.default_rng(0)
    lengths_N = rng.integers(1, 9, 12)
    data = SequenceSet.from_flat(
        rng.integers(0, 2, (lengths_N.sum(), 2)).astype(dtype),
        offsets=np.cumsum([0, *lengths_N]),
        targets=Labels.check(np.arange(12) % 3, names=None, source="here"),
    ).subset([11, 3, 0, 7])
    chosen = [2, 0, 3]
    for found, wanted in zip(data.__getitems__(chosen), [data[index] for index in chosen], strict=True):
        assert torch.equal(found.features_TF, wanted.features_TF)
        assert found.features_TF.dtype == wanted.features_TF.dtype
        assert (found.target, found.index) == (wanted.target, wanted.index)
    assert data.__getitems__([]) == []
