"""Labels of steps: checked, taken apart, written and read, padded; and the embedded set of them.

Shape legend: N sequences, S steps of all sequences, B sequences of a batch, T steps of the longest.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.batching import collate
from stretto.data import Labels, RegimeSettings, SequenceSet, StepLabels, make_regimes, open_sequences, write_npz
from stretto.data.npz import read_npz
from stretto.data.regimes import NAMES, PULSE, UNSURE
from stretto.errors import StrettoError
from stretto.report import inspect_lengths


def _set(lengths: list[int], *, seed: int = 0, dtype: Any = np.uint8) -> SequenceSet:
    rng, offsets = np.random.default_rng(seed), np.cumsum([0, *lengths])
    values_S = rng.integers(0, 4, offsets[-1]).astype(dtype)
    return SequenceSet.from_flat(
        rng.normal(size=(offsets[-1], 2)).astype(np.float32),
        offsets=offsets,
        targets=StepLabels.check(values_S, offsets=offsets, names=["none", "a", "b", "c"], source="here"),
        split_N=np.arange(len(lengths)) % 3,
    )


def _labels(data: SequenceSet) -> StepLabels:
    assert isinstance(data.targets, StepLabels)
    return data.targets


@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 9), min_size=1, max_size=6).filter(lambda lengths: max(lengths) > 1),
    dtype=st.sampled_from([np.uint8, np.int16, np.int64]),
)
def test_what_is_written_is_read(tmp_path_factory: pytest.TempPathFactory, lengths: list[int], dtype: Any) -> None:
    data, path = _set(lengths, dtype=dtype), tmp_path_factory.mktemp("steps") / "steps.npz"
    write_npz(path, data)
    for found in (read_npz(path), read_npz(path, memory_map=False)):
        assert _labels(found).names == ("none", "a", "b", "c")
        assert _labels(found).values_S.dtype == dtype
        for index in range(len(data)):
            np.testing.assert_array_equal(found[index].target, data[index].target)
            np.testing.assert_array_equal(found[index].features_TF.numpy(), data[index].features_TF.numpy())
        assert found.digest() == data.digest()


def test_a_subset_has_its_own_labels(tmp_path: Path) -> None:
    data = _set([3, 1, 5, 2])
    chosen = data.subset([2, 0])
    np.testing.assert_array_equal(chosen[0].target, _labels(data).values_S[4:9])
    np.testing.assert_array_equal(chosen[1].target, _labels(data).values_S[:3])
    assert _labels(chosen).counts().sum() == 8
    write_npz(tmp_path / "some.npz", chosen)
    np.testing.assert_array_equal(read_npz(tmp_path / "some.npz")[0].target, chosen[0].target)
    assert chosen.digest() != data.digest()


def test_other_labels_make_another_fingerprint() -> None:
    assert _set([3, 4], seed=0).targets[0] is not None
    same = _set([3, 4])
    other = SequenceSet.from_flat(
        same.features_SF,
        offsets=np.array([0, 3, 7]),
        targets=StepLabels.check(
            (_labels(same).values_S + 1) % 4, offsets=np.array([0, 3, 7]), names=_labels(same).names, source=""
        ),
        split_N=same.split_N,
    )
    assert other.digest() != same.digest() == _set([3, 4]).digest()


def test_a_batch_has_labels_of_real_steps_and_minus_one_behind() -> None:
    data = _set([3, 1, 5])
    batch = collate([data[0], data[1], data[2]], edges=[7])
    assert batch.targets.shape == (3, 7)
    assert batch.targets.dtype == torch.int64
    assert torch.equal(batch.targets >= 0, batch.mask)
    for row, length in enumerate([3, 1, 5]):
        assert batch.targets[row, :length].tolist() == data[row].target.tolist()  # type: ignore[union-attr]
    assert batch.indices is not None
    assert batch.indices.tolist() == [0, 1, 2]


def test_arrays_of_a_users_own_stay_a_list() -> None:
    batch = collate([(np.zeros((2, 1)), np.array([1, 2])), (np.zeros((3, 1)), np.array([1, 2, 3]))])
    assert isinstance(batch.targets, list)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"y": np.array([0, 1, -1, 0])}, "sequence 1 has label -1 at its step 1"),
        ({"y": np.array([0, 1, 2, 0]), "class_names": np.array(["a", "b"])}, "sequence 1 has label 2 at its step 1"),
        ({"y": np.array([0.0, 1.0, 2.0, 0.0])}, r"labels of steps have shape \(4,\) and type float64"),
        ({"scale": np.array([1.0, 2.0])}, r"`scale` has shape \(2,\)"),
        ({"scale": np.array(["a"])}, "`scale` has shape"),
        ({"scale": np.array(2.0)}, "`scale` has shape"),
        ({"scale": np.array([np.nan])}, "NaN or infinite"),
    ],
)
def test_what_does_not_fit_is_refused(tmp_path: Path, change: dict[str, Any], told: str) -> None:
    np.savez(tmp_path / "wrong.npz", **({"x": np.ones(4), "offsets": np.array([0, 1, 4])} | change))
    with pytest.raises(StrettoError, match=told):
        read_npz(tmp_path / "wrong.npz")


def test_labels_of_other_lengths_are_refused() -> None:
    labels = StepLabels.check(np.zeros(5, np.int64), offsets=np.array([0, 3, 5]), names=None, source="")
    with pytest.raises(StrettoError, match="not as many as the steps of each sequence"):
        SequenceSet.from_flat(np.zeros((5, 1)), offsets=np.array([0, 2, 5]), targets=labels)


def test_one_label_a_sequence_is_still_that(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=np.ones(4), offsets=np.array([0, 1, 4]), y=np.array([0, 1]))
    assert isinstance(read_npz(tmp_path / "a.npz").targets, Labels)


@pytest.mark.parametrize(
    ("dtype", "kept"), [(np.int16, np.float32), (np.float32, np.float32), (np.float64, np.float64)]
)
def test_features_are_multiplied_by_their_scale(tmp_path: Path, dtype: Any, kept: Any) -> None:
    x_SF = np.arange(8).reshape(4, 2).astype(dtype)
    np.savez(tmp_path / "a.npz", x=x_SF, offsets=np.array([0, 4]), scale=np.array([0.5, 3.0]))
    found = read_npz(tmp_path / "a.npz").features_SF
    assert found.dtype == kept
    np.testing.assert_array_equal(found, np.arange(8).reshape(4, 2) * [0.5, 3.0])


def test_recordings_of_people_are_read(shared_data: Path) -> None:
    path = shared_data / "hapt" / "hapt.npz"
    if not path.exists():
        pytest.skip("there are no such recordings")
    data = open_sequences(path)
    assert (len(data), data.num_features, data.num_steps) == (61, 6, 1_122_772)
    assert len(_labels(data).names) == 13
    counts = [int((data.split_N == part).sum()) for part in range(3)]
    assert counts == [37, 5, 19]
    with np.load(path) as arrays:
        np.testing.assert_allclose(data[3].features_TF[7], arrays["x"][57910 + 7] * arrays["scale"], rtol=1e-6)
        np.testing.assert_array_equal(data[3].target, arrays["y"][57910:74475])
        assert (np.flatnonzero(data.split_N == 2) == np.flatnonzero(arrays["split"] == 1)).all()
    inspection = inspect_lengths(data, batch_size=8, max_padded_steps=None, num_buckets="auto")
    assert inspection.target_kind == "labels of steps"


def test_the_embedded_set_follows_from_its_seed() -> None:
    small = RegimeSettings(num_train=12, median_length=80, mean_stay=20)
    one, same = make_regimes(small), make_regimes(small)
    assert (
        one.digest() == same.digest() != make_regimes(RegimeSettings(num_train=12, median_length=80, seed=1)).digest()
    )
    assert [len(one.part(part)) for part in ("train", "valid", "test")] == [12, 2, 2]
    assert len(np.unique(one.lengths_N)) > 8
    assert one.lengths_N.min() >= 20
    assert _labels(one).names == NAMES
    assert (_labels(one).counts() > 0).all()


def test_labels_of_the_embedded_set_are_what_the_signal_is() -> None:
    """The pulse before each stretch of one label tells its half; the steps after the switch have no label."""
    data = make_regimes(RegimeSettings(num_train=20, median_length=300, mean_stay=60))
    seen = 0
    for index in range(len(data)):
        features_TF, labels_T = data[index].features_TF.numpy(), data[index].target
        assert isinstance(labels_T, np.ndarray)
        begins = np.flatnonzero((labels_T[1:] > 0) & (labels_T[:-1] == 0)) + 1
        for begin in begins:
            pulse = features_TF[begin - UNSURE : begin - UNSURE + PULSE, 1].mean()
            assert (pulse > 0) == (labels_T[begin] % 2 == 1)
            seen += 1
    assert seen > 50
