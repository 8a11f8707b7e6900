"""Ragged .npz files: round trips, memory maps and real sets."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stretto.data import PARTS, Labels, NoTargets, SequenceSet, Transcripts, write_npz
from stretto.data.npz import read_npz
from stretto.errors import StrettoError

DTYPES = (np.float16, np.float32, np.float64, np.uint8, np.int16, np.int64, np.bool_)


def targets_of(kind, count):
    if kind == "labels":
        return Labels.check(np.arange(count) % 3, names=["ä", "b", "longer name"], source="here")
    if kind == "transcripts":
        return Transcripts.of([f"löng {index} 𝄞" * (index % 3) for index in range(count)])
    return NoTargets(count=count)


def example(kind="labels", lengths=(3, 1, 5, 2), name="example"):
    steps = sum(lengths)
    return SequenceSet.from_flat(
        np.random.default_rng(0).normal(size=(steps, 3)).astype(np.float32),
        offsets=np.cumsum([0, *lengths]),
        targets=targets_of(kind, len(lengths)),
        split_N=np.arange(len(lengths)) % 3,
        name=name,
    )


@pytest.mark.parametrize("kind", ["labels", "transcripts", "none"])
def test_a_set_survives_writing_and_reading(tmp_path, assert_same_set, kind):
    data = example(kind)
    write_npz(tmp_path / "example.npz", data)
    mapped = read_npz(tmp_path / "example.npz")
    loaded = read_npz(tmp_path / "example.npz", memory_map=False)
    assert mapped.memory_mapped
    assert not loaded.memory_mapped
    assert mapped.name == "example"
    assert mapped.notes == ()
    assert_same_set(data, mapped)
    assert_same_set(data, loaded)


@settings(deadline=None, max_examples=40)
@given(drawn=st.data(), kind=st.sampled_from(["labels", "transcripts", "none"]))
def test_random_ragged_sets_survive(tmp_path_factory, assert_same_set, drawn, kind):
    lengths = drawn.draw(st.lists(st.integers(1, 7), min_size=1, max_size=8))
    dtype = drawn.draw(st.sampled_from(DTYPES))
    width = drawn.draw(st.integers(1, 3))
    finite = {"allow_nan": False, "allow_infinity": False} if np.issubdtype(dtype, np.floating) else {}
    elements = hnp.from_dtype(np.dtype(dtype), **finite)
    features = drawn.draw(hnp.arrays(dtype, (sum(lengths), width), elements=elements))
    data = SequenceSet.from_flat(
        features,
        offsets=np.cumsum([0, *lengths]),
        targets=targets_of(kind, len(lengths)),
        split_N=drawn.draw(hnp.arrays(np.uint8, len(lengths), elements=st.integers(0, 2))),
    )
    path = tmp_path_factory.mktemp("npz") / "random.npz"
    write_npz(path, data)
    assert_same_set(data, read_npz(path))
    assert_same_set(data, read_npz(path, memory_map=False))


def test_a_subset_is_written_alone(tmp_path, assert_same_set):
    data = example("transcripts", lengths=(3, 1, 5, 2, 4, 6))
    chosen = data.subset([5, 0, 2, 2])
    write_npz(tmp_path / "some.npz", chosen)
    written = read_npz(tmp_path / "some.npz")
    assert len(written.features_SF) == 6 + 3 + 5 + 5
    assert_same_set(chosen, written)


def test_a_set_can_replace_the_file_it_is_mapped_from(tmp_path, assert_same_set):
    path = tmp_path / "same.npz"
    write_npz(path, example())
    write_npz(path, read_npz(path))
    assert_same_set(example(), read_npz(path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["same.npz"]


def test_the_words_of_text_survive(tmp_path, assert_same_set):
    data = SequenceSet.from_flat(
        np.array([0, 1, 2, 1]), offsets=np.array([0, 2, 4]), split_N=np.array([0, 0]), vocabulary=("a", "<eos>", "ä𝄞")
    )
    write_npz(tmp_path / "words.npz", data)
    assert read_npz(tmp_path / "words.npz").vocabulary == ("a", "<eos>", "ä𝄞")
    assert_same_set(read_npz(tmp_path / "words.npz"), data)
    arrays = {"x": np.zeros((2, 1), dtype=np.int64), "offsets": np.array([0, 2]), "vocabulary": np.array([1, 2])}
    np.savez(tmp_path / "numbers.npz", **arrays)
    with pytest.raises(StrettoError, match="`vocabulary` holds no words"):
        read_npz(tmp_path / "numbers.npz")


def test_the_alphabet_of_text_survives(tmp_path, assert_same_set):
    data = SequenceSet.from_flat(
        np.array([0, 1, 2, 1], dtype=np.uint8), offsets=np.array([0, 2, 4]), split_N=np.array([0, 0]), alphabet="\nä𝄞"
    )
    write_npz(tmp_path / "text.npz", data)
    assert read_npz(tmp_path / "text.npz").alphabet == "\nä𝄞"
    assert_same_set(data, read_npz(tmp_path / "text.npz"))


def test_compressed_files_are_read_into_memory(tmp_path):
    np.savez_compressed(tmp_path / "small.npz", x=np.arange(6.0), offsets=[0, 2, 6], y=[1, 0], split=[0, 2])
    data = read_npz(tmp_path / "small.npz")
    assert not data.memory_mapped
    assert data[1].features_TF.tolist() == [[2.0], [3.0], [4.0], [5.0]]
    assert data[0].target == 1


@pytest.mark.parametrize("memory_map", [True, False])
def test_fortran_order_is_understood(tmp_path, memory_map):
    features = np.asfortranarray(np.arange(12.0).reshape(6, 2))
    np.savez(tmp_path / "fortran.npz", x=features, offsets=[0, 2, 6])
    data = read_npz(tmp_path / "fortran.npz", memory_map=memory_map)
    np.testing.assert_array_equal(data[1].features_TF.numpy(), features[2:])


def test_other_arrays_in_the_file_are_left_alone(tmp_path):
    np.savez(tmp_path / "more.npz", x=np.zeros(4), offsets=[0, 4], writer=np.array([object()], dtype=object))
    assert len(read_npz(tmp_path / "more.npz")) == 1


def test_pen_positions_become_movements(tmp_path):
    np.savez(
        tmp_path / "pen.npz",
        xy=np.array([[0, 0], [0, 10], [5, 10], [7, 7], [7, 9]], dtype=np.int16),
        pen_down=np.array([1, 0, 1, 1, 0], dtype=np.uint8),
        offsets=[0, 3, 5],
        y=[0, 1],
    )
    data = read_npz(tmp_path / "pen.npz")
    np.testing.assert_allclose(data[0].features_TF.numpy(), [[0, 0, 0], [0, 1, 1], [0.5, 0, 1]])
    np.testing.assert_allclose(data[1].features_TF.numpy(), [[0, 0, 0], [0, 1, 1]])


def test_digilets(shared_data):
    data = read_npz(shared_data / "digilets" / "digilets.npz")
    assert len(data) == 23_870
    assert data.num_steps == 748_042
    assert data.num_features == 3
    assert (data.lengths_N.min(), np.median(data.lengths_N), data.lengths_N.max()) == (5, 27, 209)
    assert np.bincount(data.split_N).tolist() == [18_600, 2_480, 2_790]
    assert isinstance(data.targets, Labels)
    assert np.bincount(data.targets.values_N).tolist() == [385] * 62
    assert data.notes == ()


def test_pendigits(shared_data):
    data = read_npz(shared_data / "pendigits_orig" / "pendigits_orig.npz")
    assert len(data) == 10_992
    assert data.num_steps == 442_794
    assert (data.lengths_N.min(), np.median(data.lengths_N), data.lengths_N.max()) == (9, 38, 231)
    assert (data.split_N == 2).sum() == 3_498
    assert 600 < (data.split_N == 1).sum() < 900
    assert any("a tenth of train" in note for note in data.notes)


def test_japanese_vowels(shared_data, tmp_path, assert_same_set):
    data = read_npz(shared_data / "japanese_vowels" / "japanese_vowels.npz")
    assert (len(data), data.num_steps, data.num_features) == (640, 9_961, 12)
    assert (data.lengths_N.min(), np.median(data.lengths_N), data.lengths_N.max()) == (7, 15, 29)
    assert isinstance(data.targets, Labels)
    assert data.targets.names == tuple("123456789")
    assert (data.split_N == 2).sum() == 370
    write_npz(tmp_path / "again.npz", data)
    assert_same_set(data, read_npz(tmp_path / "again.npz"))


@pytest.mark.parametrize("parts", [("valid",), ("train", "valid"), ("test",), ("train", "test")])
def test_a_written_subset_keeps_its_parts(tmp_path: Path, parts: tuple[str, ...]) -> None:
    data = SequenceSet.from_flat(
        np.zeros((60, 1), dtype=np.float32), offsets=np.arange(61), split_N=np.repeat([0, 1, 2], 20)
    )
    kept = data.subset(np.flatnonzero(np.isin(data.split_N, [PARTS.index(part) for part in parts])))
    write_npz(tmp_path / "kept.npz", kept)
    assert read_npz(tmp_path / "kept.npz").split_N.tolist() == kept.split_N.tolist()
