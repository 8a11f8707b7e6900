"""Sets of sequences: the flat layout, targets, labels per step, and runs of one label.

Shape legend: N sequences, S steps of all sequences together, T steps of one sequence, F features.
"""

import dataclasses
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.batching import collate
from stretto.data import (
    PARTS,
    Labels,
    NoTargets,
    SequenceSet,
    StepLabels,
    Transcripts,
    cut_runs,
    make_regimes,
    open_sequences,
)
from stretto.data.synthetic.regimes import PULSE_STEPS, REGIME_NAMES, UNLABELLED_STEPS
from stretto.errors import StrettoError
from stretto.tasks.classify import Classify, ClassifyConfig


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
    for outside in (3, -4):
        with pytest.raises(IndexError, match=f"sequence {outside} of 3"):
            data[outside]


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
def test_a_batch_of_samples_is_its_slices_in_the_tensor_type(stored, read):
    rng = np.random.default_rng(0)
    lengths_N = rng.integers(1, 9, 12)
    features_SF = rng.integers(0, 2, (lengths_N.sum(), 2)).astype(stored)
    labels = Labels.check(np.arange(12) % 3, names=None, source="here")
    data = SequenceSet.from_flat(features_SF, offsets=np.cumsum([0, *lengths_N]), targets=labels)
    assert data.features_SF.dtype == stored
    starts_N, numbers = np.cumsum(lengths_N) - lengths_N, [11, 3, 0, 7]
    chosen = [2, 0, 3]
    for position, sample in zip(chosen, data.subset(numbers).__getitems__(chosen), strict=True):
        number = numbers[position]
        wanted = torch.from_numpy(features_SF[starts_N[number] :][: lengths_N[number]].copy()).to(read)
        assert torch.equal(sample.features_TF, wanted)
        assert sample.features_TF.dtype == read
        assert (sample.target, sample.index) == (number % 3, number)
    assert data.__getitems__([]) == []


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
    with pytest.raises(StrettoError, match="four: no sequence is in the test split"):
        ragged([1, 2], split=[0, 0], name="four").part("test")


def test_a_missing_split_is_drawn_and_noted():
    data = ragged([1] * 2000)
    shares = np.bincount(data.split_N, minlength=3) / len(data)
    assert np.abs(shares - [0.8, 0.1, 0.1]).max() < 0.03
    assert len(data.notes) == 1
    assert "80 % train" in data.notes[0]
    np.testing.assert_array_equal(data.split_N, ragged([1] * 2000).split_N)


def test_without_validation_a_tenth_of_train_is_taken_for_it():
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
def test_a_feature_of_nan_or_infinity_names_its_sequence(wrong, step, sequence, within):
    features = np.zeros((6, 2))
    features[step, 1] = wrong
    with pytest.raises(StrettoError, match=f"sequence {sequence} has a NaN or infinite feature at its step {within}"):
        SequenceSet.from_flat(features, offsets=np.array([0, 2, 3, 6]))


@pytest.mark.parametrize(
    ("offsets", "message"),
    [
        (np.array([0]), "the set is empty"),
        (np.array([], dtype=int), "the set is empty"),
        (np.array([0, 2, 2, 4]), "1 of 3 sequences have no steps .first: sequence 1"),
        (np.array([0, 2]), "run from 0 to 2 over 4 steps"),
        (np.array([0, 2, 5]), "run from 0 to 5 over 4 steps"),
        (np.array([1, 4]), "run from 1 to 4 over 4 steps"),
        (np.array([0, 3, 2, 4]), "they fall at sequence 1"),
        (np.array([0.0, 4.0]), "data: offsets have shape"),
        (np.array([[0, 4]]), "data: offsets have shape"),
        (np.array(4), "data: offsets have shape"),
        (np.array(["0", "4"]), "data: offsets have shape"),
    ],
)
def test_offsets_that_do_not_fit_are_refused(offsets, message):
    with pytest.raises(StrettoError, match=message):
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
    steps = StepLabels.check(np.zeros(5, np.int64), offsets=np.array([0, 3, 5]), names=None, source="")
    with pytest.raises(StrettoError, match="not as many as the steps of each sequence"):
        ragged([2, 3], targets=steps)
    assert isinstance(ragged([1, 2]).targets, NoTargets)
    assert ragged([1, 2])[1].target is None
    assert len(ragged([1, 2]).subset([1]).targets) == 1


def test_other_data_have_another_digest():
    data, labels = ragged([2, 1, 3], split=[0, 1, 2]), np.array([0, 1, 1, 0, 0, 1])
    offsets = np.array([0, 2, 3, 6])

    def with_targets(targets):
        return ragged([2, 1, 3], split=[0, 1, 2], targets=targets)

    def with_steps(values_S):
        return with_targets(StepLabels.check(values_S, offsets=offsets, names=["a", "b"], source=""))

    others = [
        ragged([1, 2, 3], split=[0, 1, 2]),
        ragged([2, 1, 3], split=[0, 2, 1]),
        data.subset([0, 2]),
        *(with_targets(Labels(values_N=labels[:3], names=names)) for names in (("a", "b"), ("a", "c"))),
        *(with_steps(values_S) for values_S in (labels, 1 - labels)),
        *(with_targets(Transcripts.of(texts)) for texts in (list("abc"), list("abd"))),
        *(with_targets(Transcripts.of(list("abc"), languages=pair)) for pair in (("en", "de"), ("de", "en"))),
        *(dataclasses.replace(data, vocabulary=words) for words in (("a", "b"), ("a", "c"))),
    ]
    assert data.digest() == ragged([2, 1, 3], split=[0, 1, 2]).digest()
    assert with_steps(labels).digest() == with_steps(labels).digest()
    assert len({data.digest(), *(other.digest() for other in others)}) == 1 + len(others)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 7, 11, 14, 19, 23, 25, 40, 101])
@pytest.mark.parametrize("given", [None, "train and test"])
def test_every_part_that_can_have_a_sequence_has_one(count: int, given: str | None) -> None:
    split_N = None if given is None else np.arange(count) % 2
    data = SequenceSet.from_flat(np.zeros((count, 1)), offsets=np.arange(count + 1), split_N=split_N)
    counts = np.bincount(data.split_N, minlength=3)
    assert counts[0] >= 1
    assert count < 3 or counts.min() >= 1


def test_labels_have_the_names_they_are_given_or_their_numbers():
    for names, kept in ((None, ("0", "1", "2")), (["cat", "dog", "owl", "elk"], ("cat", "dog", "owl", "elk"))):
        labels = Labels.check(np.array([2, 0, 1], dtype=np.uint8), names=names, source="here")
        taken = labels.take(np.array([1, 1, 0]))
        assert [taken[index] for index in range(len(taken))] == [0, 0, 2]
        assert labels.names == taken.names == kept


@pytest.mark.parametrize(
    ("values", "names", "message"),
    [
        (np.array([0, 3]), ["a", "b"], "sequence 1 has label 3, outside 0 to 1"),
        (np.array([0, -1]), None, "sequence 1 has label -1"),
        (np.array([0, 2**63], dtype=np.uint64), None, "sequence 1 has label 9223372036854775808"),
        (np.array([[0], [1]]), None, r"shape \(2, 1\)"),
        (np.array([0.0, 1.0]), None, "float64"),
        (np.array(["a", "b"]), None, "<U1"),
        (np.array([True, False]), None, "bool"),
    ],
)
def test_bad_labels_are_refused(values, names, message):
    with pytest.raises(StrettoError, match=f"here: .*{message}"):
        Labels.check(values, names=names, source="here")


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(max_size=12), max_size=8), st.data())
def test_transcripts_give_back_every_text(texts, data):
    transcripts = Transcripts.of(texts)
    assert [transcripts[index] for index in range(len(transcripts))] == texts
    chosen = data.draw(st.lists(st.sampled_from(range(len(texts))), max_size=6) if texts else st.just([]))
    taken = transcripts.take(np.array(chosen, dtype=np.int64))
    assert [taken[index] for index in range(len(taken))] == [texts[index] for index in chosen]
    assert taken.alphabet() == "".join(sorted(set("".join(texts[index] for index in chosen))))


def _labelled(lengths: list[int]) -> SequenceSet:
    rng, offsets = np.random.default_rng(0), np.cumsum([0, *lengths])
    values_S = rng.integers(0, 4, offsets[-1], dtype=np.uint8)
    return SequenceSet.from_flat(
        rng.normal(size=(offsets[-1], 2)).astype(np.float32),
        offsets=offsets,
        targets=StepLabels.check(values_S, offsets=offsets, names=["none", "a", "b", "c"], source="here"),
        split_N=np.arange(len(lengths)) % 3,
    )


def _labels(data: SequenceSet) -> StepLabels:
    assert isinstance(data.targets, StepLabels)
    return data.targets


def test_a_subset_has_its_own_labels() -> None:
    data = _labelled([3, 1, 5, 2])
    chosen = data.subset([2, 0])
    np.testing.assert_array_equal(chosen[0].target, _labels(data).values_S[4:9])
    np.testing.assert_array_equal(chosen[1].target, _labels(data).values_S[:3])
    assert _labels(chosen).counts().sum() == 8


def test_a_batch_has_labels_of_real_steps_and_minus_one_behind() -> None:
    data = _labelled([3, 1, 5])
    batch = collate([data[0], data[1], data[2]], edges=[7])
    assert batch.targets.shape == (3, 7)
    assert batch.targets.dtype == torch.int64
    assert torch.equal(batch.targets >= 0, batch.mask)
    for row, length in enumerate([3, 1, 5]):
        assert batch.targets[row, :length].tolist() == data[row].target.tolist()  # type: ignore[union-attr]
    assert batch.indices is not None
    assert batch.indices.tolist() == [0, 1, 2]


@pytest.mark.slow
def test_recordings_of_people_are_read(shared_data: Path) -> None:
    path = shared_data / "hapt" / "hapt.npz"
    if not path.exists():
        pytest.skip("there are no such recordings")
    data = open_sequences(path.parent)
    assert (len(data), data.num_features, data.num_steps) == (61, 6, 1_122_772)
    assert len(_labels(data).names) == 13
    counts = [int((data.split_N == part).sum()) for part in range(3)]
    assert counts == [37, 5, 19]
    with np.load(path) as arrays:
        np.testing.assert_allclose(data[3].features_TF[7], arrays["x"][57910 + 7] * arrays["scale"], rtol=1e-6)
        np.testing.assert_array_equal(data[3].target, arrays["y"][57910:74475])
        assert (np.flatnonzero(data.split_N == 2) == np.flatnonzero(arrays["split"] == 1)).all()
    cut = cut_runs(data, unlabelled=0)
    assert (len(cut), cut.lengths_N.min(), cut.lengths_N.max()) == (1214, 74, 2032)
    assert np.median(cut.lengths_N) == pytest.approx(639, abs=1)
    assert isinstance(cut.targets, Labels)
    assert len(cut.targets.names) == 12


def test_the_embedded_set_follows_from_its_seed() -> None:
    small = {"num_train": 12, "median_length": 80, "mean_stay": 20}
    one, same, other = (make_regimes(**small, seed=seed) for seed in (0, 0, 1))
    assert one.digest() == same.digest() != other.digest()
    assert [len(one.part(part)) for part in ("train", "valid", "test")] == [12, 2, 2]
    assert len(np.unique(one.lengths_N)) > 8
    assert one.lengths_N.min() >= 20
    assert _labels(one).names == REGIME_NAMES
    assert (_labels(one).counts() > 0).all()


def test_labels_of_the_embedded_set_are_what_the_signal_is() -> None:
    """The sign of the pulse before each run gives its label; the steps after the switch have no label."""
    data = make_regimes(num_train=20, median_length=300, mean_stay=60)
    seen = 0
    for index in range(len(data)):
        features_TF, labels_T = data[index].features_TF.numpy(), data[index].target
        assert isinstance(labels_T, np.ndarray)
        begins = np.flatnonzero((labels_T[1:] > 0) & (labels_T[:-1] == 0)) + 1
        for begin in begins:
            pulse = features_TF[begin - UNLABELLED_STEPS : begin - UNLABELLED_STEPS + PULSE_STEPS, 1].mean()
            assert (pulse > 0) == (labels_T[begin] % 2 == 1)
            seen += 1
    assert seen > 50


RUN_NAMES = ("none", "walk", "sit")


def _steps(rows: list[list[int]], *, parts: list[int] | None = None) -> SequenceSet:
    offsets = np.cumsum([0, *map(len, rows)])
    labels_S = np.array([label for row in rows for label in row])
    return SequenceSet.from_flat(
        np.arange(float(offsets[-1]))[:, None],
        offsets=offsets,
        targets=StepLabels.check(labels_S, offsets=offsets, names=RUN_NAMES, source="steps"),
        split_N=np.array(parts if parts is not None else [0] * len(rows)),
        name="steps",
    )


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=6),
    st.sampled_from([None, 0, 1, 2, 7]),
)
def test_runs_are_the_steps_of_each_label_in_order(rows: list[list[int]], unlabelled: int | None) -> None:
    parts = [(2, 0, 1)[index % 3] for index in range(len(rows))]
    data = _steps(rows, parts=parts)
    runs, first = [], 0
    for row, part in zip(rows, parts, strict=True):
        for label, of_label in groupby(row):
            count = len(list(of_label))
            if label != unlabelled:
                runs.append(([*range(first, first + count)], label, part))
            first += count
    if not runs:
        with pytest.raises(StrettoError, match=f"no step has another label than {unlabelled}"):
            cut_runs(data, unlabelled=unlabelled)
        return
    cut = cut_runs(data, unlabelled=unlabelled)
    assert isinstance(cut.targets, Labels)
    labels = [RUN_NAMES.index(cut.targets.names[cut.targets[index]]) for index in range(len(cut))]
    steps = [cut[index].features_TF[:, 0].int().tolist() for index in range(len(cut))]
    assert list(zip(steps, labels, cut.split_N.tolist(), strict=True)) == runs
    assert cut.numbers_N.tolist() == [*range(len(runs))]
    assert f"{len(runs)} runs" in cut.notes[-1]


def test_classification_takes_labels_of_steps() -> None:
    data = _steps([[1, 1, 0, 2, 2], [2, 1], [1, 0, 0, 2]], parts=[0, 1, 2])
    task = Classify(ClassifyConfig(hidden_size=3), data)
    assert len(task.data) == 6
    assert "left out" in task.data.notes[-1]
    assert len(Classify(ClassifyConfig(hidden_size=3, unlabelled=None), data).data) == 8
    with pytest.raises(StrettoError, match="data has no labels of steps"):
        cut_runs(ragged([3]))
