"""Images by the door of .npz files: a row of pixels is a step, and what is no image is refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from stretto.cli.main import main
from stretto.data import PARTS, Labels, SequenceSet, open_sequences, write_npz
from stretto.data.npz import read_npz
from stretto.errors import StrettoError

Array = npt.NDArray[Any]
DTYPES = (np.uint8, np.bool_, np.int16, np.float16, np.float32, np.float64)


def images(**change: Any) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {
        "x_train": rng.integers(256, size=(20, 4, 3), dtype=np.uint8),
        "y_train": np.arange(20, dtype=np.uint8) % 5,
        "x_test": rng.integers(256, size=(6, 4, 3), dtype=np.uint8),
        "y_test": np.arange(6, dtype=np.uint8) % 5,
    } | change


@settings(deadline=None, max_examples=40)
@given(drawn=st.data(), save=st.sampled_from([np.savez, np.savez_compressed]), memory_map=st.booleans())
def test_every_image_is_a_sequence_of_its_rows(
    tmp_path_factory: pytest.TempPathFactory, drawn: st.DataObject, save: Callable[..., None], memory_map: bool
) -> None:
    dtype = drawn.draw(st.sampled_from(DTYPES))
    rows, columns = drawn.draw(st.integers(1, 5)), drawn.draw(st.integers(1, 5))
    finite = {"allow_nan": False, "allow_infinity": False} if np.issubdtype(dtype, np.floating) else {}
    elements = hnp.from_dtype(np.dtype(dtype), **finite)
    arrays = {}
    for part, least in (("train", 2), ("test", 1)):
        count = drawn.draw(st.integers(least, 12))
        arrays[f"x_{part}"] = drawn.draw(hnp.arrays(dtype, (count, rows, columns), elements=elements))
        arrays[f"y_{part}"] = drawn.draw(hnp.arrays(np.uint8, count, elements=st.integers(0, 9)))
    path = tmp_path_factory.mktemp("images") / "pictures.npz"
    save(path, **arrays)
    data = read_npz(path, memory_map=memory_map)
    assert data.name == "pictures"
    assert data.features_SF.dtype == dtype
    assert data.lengths_N.tolist() == [rows] * len(data)
    x, y = np.concatenate([arrays["x_train"], arrays["x_test"]]), [*arrays["y_train"], *arrays["y_test"]]
    assert len(data) == len(x)
    for index, image in enumerate(x):
        np.testing.assert_array_equal(data[index].features_TF.numpy(), image)
        assert data[index].target == y[index]
    train, test = len(arrays["x_train"]), len(arrays["x_test"])
    assert (data.split_N[train:] == PARTS.index("test")).all()
    assert np.bincount(data.split_N, minlength=3).tolist() == [train - -(-train // 10), -(-train // 10), test]


def test_how_validation_came_about_is_told_and_the_classes_are_those_of_both_parts(tmp_path: Path) -> None:
    np.savez(tmp_path / "pictures.npz", **images(y_test=np.array([0, 1, 2, 3, 7, 0])))
    data = read_npz(tmp_path / "pictures.npz")
    assert data.notes == ("split has train and test only: a tenth of train is kept for validation",)
    assert isinstance(data.targets, Labels)
    assert data.targets.names == tuple("01234567")
    assert np.bincount(data.split_N).tolist() == [18, 2, 6]


def test_images_can_be_written_as_any_other_set(
    tmp_path: Path, assert_same_set: Callable[[SequenceSet, SequenceSet], None]
) -> None:
    np.savez(tmp_path / "pictures.npz", **images())
    data = read_npz(tmp_path / "pictures.npz")
    write_npz(tmp_path / "again.npz", data)
    again = read_npz(tmp_path / "again.npz")
    assert again.memory_mapped
    assert_same_set(data, again)


def test_a_folder_with_images_is_opened_and_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "pictures.npz", **images())
    (tmp_path / "README.md").write_text("about them")
    assert len(open_sequences(tmp_path)) == 26
    assert main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "26 (18 train, 2 valid, 6 test)" in shown
    assert "3 a step" in shown


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"x_train": np.zeros((20, 4, 3, 3))}, r"`x_train` has shape \(20, 4, 3, 3\).*grey images"),
        ({"x_train": np.zeros((20, 12))}, r"`x_train` has shape \(20, 12\)"),
        ({"x_test": np.zeros((0, 4, 3), dtype=np.uint8), "y_test": np.zeros(0, dtype=int)}, "at least one of them"),
        ({"x_test": np.zeros((6, 0, 3), dtype=np.uint8)}, r"`x_test` has shape \(6, 0, 3\)"),
        ({"x_train": np.zeros((20, 4, 3), dtype=np.complex64)}, "type complex64"),
        ({"x_train": np.full((20, 4, 3), "a")}, "type <U1"),
        ({"x_test": np.zeros((6, 4, 5), dtype=np.uint8)}, "images of 4 x 3 uint8 and `x_test` of 4 x 5 uint8"),
        ({"x_test": np.zeros((6, 4, 3))}, "images of 4 x 3 uint8 and `x_test` of 4 x 3 float64"),
        ({"y_train": np.zeros(19, dtype=int)}, r"`y_train` has shape \(19,\) and type int64 for 20 images"),
        ({"y_train": np.zeros((20, 1), dtype=int)}, r"`y_train` has shape \(20, 1\)"),
        ({"y_test": np.eye(6, 5)}, r"`y_test` has shape \(6, 5\)"),
        ({"y_test": np.zeros(6)}, "type float64 for 6 images"),
        ({"y_test": np.array([0, 1, -1, 0, 0, 0])}, "sequence 22 has label -1"),
    ],
)
def test_arrays_that_are_no_images_are_refused(tmp_path: Path, change: dict[str, Array], told: str) -> None:
    np.savez(tmp_path / "wrong.npz", **images(**change))
    with pytest.raises(StrettoError, match=told):
        read_npz(tmp_path / "wrong.npz")


def test_a_pixel_that_is_no_number_is_named(tmp_path: Path) -> None:
    arrays = {name: array.astype(np.float32) if name[0] == "x" else array for name, array in images().items()}
    arrays["x_test"][1, 2, 0] = np.nan
    np.savez(tmp_path / "wrong.npz", **arrays)
    with pytest.raises(StrettoError, match="sequence 21 has a NaN or infinite feature at its step 2"):
        read_npz(tmp_path / "wrong.npz")


@pytest.mark.parametrize("missing", ["x_train", "y_train", "x_test", "y_test"])
def test_what_is_missing_is_named(tmp_path: Path, missing: str) -> None:
    arrays = images()
    del arrays[missing]
    np.savez(tmp_path / "part.npz", **arrays)
    with pytest.raises(StrettoError, match=f"part.npz: there are images but no `{missing}`"):
        open_sequences(tmp_path / "part.npz")


def test_pickled_images_are_refused_and_those_beside_sequences_are_left_alone(tmp_path: Path) -> None:
    pickled = np.array([object()], dtype=object)
    np.savez(tmp_path / "wrong.npz", **images(x_train=pickled))
    with pytest.raises(StrettoError, match="never loads pickled objects"):
        read_npz(tmp_path / "wrong.npz")
    np.savez(tmp_path / "ragged.npz", x=np.zeros(4), offsets=[0, 1, 4], x_train=pickled)
    assert read_npz(tmp_path / "ragged.npz").lengths_N.tolist() == [1, 3]


def test_mnist(shared_data: Path) -> None:
    data = open_sequences(shared_data / "mnist")
    assert (len(data), data.num_features, data.features_SF.dtype) == (70_000, 28, np.uint8)
    assert set(data.lengths_N.tolist()) == {28}
    assert np.bincount(data.split_N).tolist() == [54_000, 6_000, 10_000]
    assert isinstance(data.targets, Labels)
    assert data.targets.names == tuple("0123456789")
    test = data.part("test").targets
    assert isinstance(test, Labels)
    assert np.bincount(test.values_N).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
    assert data.features_SF.mean() == pytest.approx(0.1309 * 255, abs=0.05)
