"""Ragged .npz files: every way in which one can be wrong."""

import io
import pathlib
import pickle
import zipfile

import numpy as np
import pytest

from stretto.data.npz import read_npz
from stretto.errors import StrettoError


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"offsets": np.array([0])}, "the set is empty"),
        ({"offsets": np.array(4)}, "`offsets` have shape"),
        ({"offsets": np.array([0.0, 1.0, 4.0])}, "offsets have shape"),
        ({"offsets": np.array([0, 4, 4])}, "first: sequence 1"),
        ({"offsets": np.array([0, 1, 5])}, "run from 0 to 5 over 4 steps"),
        ({"offsets": np.array([0, 5, 4])}, "they fall at sequence 1"),
        ({"x": np.array([0.0, 1.0, np.nan, 0.0])}, "sequence 1 has a NaN or infinite feature at its step 1"),
        ({"x": np.array([np.inf, 1.0, 0.0, 0.0])}, "sequence 0 has a NaN or infinite feature at its step 0"),
        ({"x": np.array(["a", "b", "c", "d"])}, "features have shape"),
        ({"x": np.zeros((4, 1, 1))}, "features have shape"),
        ({"x": np.array(1.0)}, "features have shape"),
        ({"x": np.zeros((4, 0))}, "no features"),
        ({"y": np.array([0])}, r"`y` has shape \(1,\) for 2 sequences"),
        ({"y": np.array(1)}, r"`y` has shape \(\) for 2 sequences"),
        ({"y": np.array([0, 1, 0])}, r"`y` has shape \(3,\) for 2 sequences"),
        ({"y": np.array([[0], [1]])}, r"`y` has shape \(2, 1\) for 2 sequences"),
        ({"y": np.array([0, -1])}, "sequence 1 has label -1"),
        ({"y": np.array([0.0, 1.0])}, "float64"),
        ({"y": np.array([0, 2]), "class_names": np.array(["a", "b"])}, "sequence 1 has label 2, outside 0 to 1"),
        ({"y": np.array([0, 1]), "class_names": np.array("ab")}, "`class_names` have shape"),
        ({"y": np.array([0, 1]), "class_names": np.array([b"a", b"b"])}, "`class_names` have shape"),
        ({"split": np.array([0, 7])}, "values .0, 7."),
        ({"split": np.array([0])}, r"split has shape \(1,\)"),
        ({"alphabet": np.array([-3])}, "`alphabet` holds no code points"),
        ({"alphabet": np.array("ab")}, "`alphabet` holds no code points"),
    ],
)
@pytest.mark.parametrize("memory_map", [True, False])
def test_arrays_that_do_not_fit_are_refused(tmp_path, change, told, memory_map):
    arrays = {"x": np.zeros(4), "offsets": np.array([0, 1, 4])} | change
    np.savez(tmp_path / "wrong.npz", **arrays)
    with pytest.raises(StrettoError, match=told):
        read_npz(tmp_path / "wrong.npz", memory_map=memory_map)


@pytest.mark.parametrize(
    ("text", "text_offsets", "told"),
    [
        ([97, 98, 99], None, "do not fit"),
        ([97, 98, 99], [0, 1, 2], "do not fit"),
        ([97, 98, 99], [1, 2, 3], "do not fit"),
        ([97, 98, 99], [0, 4, 3], "do not fit"),
        ([97, 98, 99], [[0, 1, 3]], "do not fit"),
        ([97, 98, 99], [0.0, 1.0, 3.0], "do not fit"),
        ([97, 98, 99], [], "do not fit"),
        ([97, -1, 99], [0, 1, 3], "do not fit"),
        ([97, 0x110000, 99], [0, 1, 3], "do not fit"),
        ([97.0, 98.0, 99.0], [0, 1, 3], "do not fit"),
        ([97, 98, 99], [0, 3], "2 sequences but 1 targets"),
    ],
)
def test_transcripts_that_do_not_fit_are_refused(tmp_path, text, text_offsets, told):
    arrays = {"x": np.zeros(4), "offsets": np.array([0, 1, 4]), "text": np.array(text)}
    if text_offsets is not None:
        arrays["text_offsets"] = np.array(text_offsets)
    np.savez(tmp_path / "wrong.npz", **arrays)
    with pytest.raises(StrettoError, match=told):
        read_npz(tmp_path / "wrong.npz")


@pytest.mark.parametrize(
    "arrays",
    [
        {"xy": np.zeros((4, 3)), "offsets": np.array([0, 4])},
        {"xy": np.zeros((4, 2)), "offsets": np.array([2, 4])},
        {"xy": np.zeros((4, 2)), "offsets": np.array([0, 2, 2, 4])},
        {"xy": np.zeros((4, 2)), "offsets": np.array([0.0, 4.0])},
        {"xy": np.zeros((4, 2)), "offsets": np.array([0, 4]), "pen_down": np.zeros(3)},
        {"xy": np.zeros((4, 2)), "offsets": np.array([0, 4]), "pen_down": np.zeros((4, 1))},
        {"xy": np.full((4, 2), "a"), "offsets": np.array([0, 4])},
    ],
)
def test_pen_data_that_does_not_fit_is_refused(tmp_path, arrays):
    np.savez(tmp_path / "pen.npz", **arrays)
    with pytest.raises(StrettoError, match="do not fit together"):
        read_npz(tmp_path / "pen.npz")


@pytest.mark.parametrize("missing", ["x", "offsets"])
def test_a_missing_array_is_told_with_those_there(tmp_path, missing):
    arrays = {"x": np.zeros(4), "offsets": np.array([0, 4]), "labels": np.array([0])}
    del arrays[missing]
    np.savez(tmp_path / "part.npz", **arrays)
    there = ", ".join(map(repr, sorted(arrays)))
    with pytest.raises(StrettoError, match=rf"has the arrays \[{there}\] but needs `x` and `offsets`"):
        read_npz(tmp_path / "part.npz")


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(StrettoError, match=r"there is no file '.*none\.npz'"):
        read_npz(tmp_path / "none.npz")


@pytest.mark.parametrize("memory_map", [True, False])
@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 0.99, 0.9999])
def test_a_truncated_file_is_refused(tmp_path, memory_map, compressed, share):
    save = np.savez_compressed if compressed else np.savez
    save(tmp_path / "whole.npz", x=np.random.default_rng(0).normal(size=(500, 3)), offsets=np.array([0, 200, 500]))
    whole = (tmp_path / "whole.npz").read_bytes()
    path = tmp_path / "cut.npz"
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(StrettoError, match=r"cut\.npz' is truncated or no \.npz file"):
        read_npz(path, memory_map=memory_map)


@pytest.mark.parametrize("memory_map", [True, False])
@pytest.mark.parametrize("rows", [3, 5, 1 << 40, 1 << 62])
def test_an_array_shorter_than_it_says_is_refused(tmp_path, memory_map, rows):
    member = io.BytesIO()
    np.lib.format.write_array_header_1_0(member, {"descr": "<f8", "fortran_order": False, "shape": (rows, 8)})
    member.write(np.zeros((2, 8)).tobytes())
    path = tmp_path / "liar.npz"
    np.savez(path, offsets=np.array([0, rows]))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x.npy", member.getvalue())
        archive.writestr("padding.npy", bytes(4096))
    with pytest.raises(StrettoError, match=r"liar\.npz"):
        read_npz(path, memory_map=memory_map)


@pytest.mark.parametrize("shape", [b"(2, 1  ", b"(2, 1],", b"(2, x),", b"\n(2,1):", b"(-2,-1)", b"(2.0,1)"])
@pytest.mark.parametrize("memory_map", [True, False])
def test_a_damaged_array_header_is_refused(tmp_path, memory_map, shape):
    member = io.BytesIO()
    np.lib.format.write_array(member, np.zeros((2, 1)))
    path = tmp_path / "header.npz"
    np.savez(path, offsets=np.array([0, 2]))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x.npy", member.getvalue().replace(b"(2, 1),", shape))
    with pytest.raises(StrettoError, match=r"header\.npz"):
        read_npz(path, memory_map=memory_map)


def test_damaged_compressed_bytes_are_refused(tmp_path):
    path = tmp_path / "damaged.npz"
    np.savez_compressed(path, x=np.random.default_rng(0).normal(size=(500, 3)), offsets=np.array([0, 500]))
    raw = bytearray(path.read_bytes())
    raw[300:340] = bytes(40)
    path.write_bytes(raw)
    with pytest.raises(StrettoError, match=r"is truncated or no \.npz file"):
        read_npz(path)


@pytest.mark.parametrize("content", [b"", b"no zip at all", b"PK\x03\x04" + bytes(100)])
def test_a_file_of_another_kind_is_refused(tmp_path, content):
    path = tmp_path / "other.npz"
    path.write_bytes(content)
    with pytest.raises(StrettoError, match=r"is truncated or no \.npz file"):
        read_npz(path)


class Trap:
    """Leaves a marker when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return pathlib.Path.touch, (self.marker,)


@pytest.mark.parametrize("memory_map", [True, False])
@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("trapped", ["x", "offsets", "y", "text", "split"])
def test_pickled_objects_are_never_loaded(tmp_path, trapped, compressed, memory_map):
    marker = tmp_path / "marker"
    arrays = {"x": np.zeros(4), "offsets": np.array([0, 4]), trapped: np.array([Trap(marker)], dtype=object)}
    (np.savez_compressed if compressed else np.savez)(tmp_path / "trap.npz", **arrays)
    with pytest.raises(StrettoError, match="never loads pickled objects"):
        read_npz(tmp_path / "trap.npz", memory_map=memory_map)
    assert not marker.exists()


def test_a_bare_pickle_is_never_loaded(tmp_path):
    marker = tmp_path / "marker"
    (tmp_path / "trap.npz").write_bytes(pickle.dumps(Trap(marker)))
    with pytest.raises(StrettoError, match=r"is truncated or no \.npz file"):
        read_npz(tmp_path / "trap.npz")
    assert not marker.exists()
    pickle.loads((tmp_path / "trap.npz").read_bytes())
    assert marker.exists()
