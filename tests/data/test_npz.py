"""Ragged `.npz` files and images in them: what is written is read, and what cannot be used is refused."""

import io
import pathlib
import zipfile
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
from stretto.data import (
    PARTS,
    Labels,
    NoTargets,
    SequenceSet,
    StepLabels,
    Transcripts,
    open_sequences,
    read_npz,
    write_npz,
)
from stretto.errors import StrettoError

DTYPES = (np.float16, np.float32, np.float64, np.uint8, np.int16, np.int64, np.bool_)


def targets_of(kind, lengths):
    count = len(lengths)
    if kind == "labels":
        return Labels.check(np.arange(count) % 3, names=["ä", "b", "longer name"], source="here")
    if kind == "labels of steps":
        values_S = np.arange(sum(lengths), dtype=np.int16) % 3
        return StepLabels.check(values_S, offsets=np.cumsum([0, *lengths]), names=["ä", "b", "c"], source="here")
    if kind == "transcripts":
        return Transcripts.of([f"löng {index} 𝄞" * (index % 3) for index in range(count)])
    return NoTargets(count=count)


def example(kind="labels", lengths=(3, 1, 5, 2), name="example"):
    steps = sum(lengths)
    return SequenceSet.from_flat(
        np.random.default_rng(0).normal(size=(steps, 3)).astype(np.float32),
        offsets=np.cumsum([0, *lengths]),
        targets=targets_of(kind, lengths),
        split_N=np.arange(len(lengths)) % 3,
        name=name,
    )


@settings(deadline=None, max_examples=40)
@given(drawn=st.data(), kind=st.sampled_from(["labels", "labels of steps", "transcripts", "none"]))
def test_random_ragged_sets_and_subsets_survive(tmp_path_factory, assert_same_set, drawn, kind):
    # Labels of steps that are all of length 1 are read as labels of sequences.
    lengths = [2, *drawn.draw(st.lists(st.integers(1, 7), max_size=7))]
    dtype = drawn.draw(st.sampled_from(DTYPES))
    width = drawn.draw(st.integers(1, 3))
    finite = {"allow_nan": False, "allow_infinity": False} if np.issubdtype(dtype, np.floating) else {}
    elements = hnp.from_dtype(np.dtype(dtype), **finite)
    features = drawn.draw(hnp.arrays(dtype, (sum(lengths), width), elements=elements))
    data = SequenceSet.from_flat(
        features,
        offsets=np.cumsum([0, *lengths]),
        targets=targets_of(kind, lengths),
        split_N=drawn.draw(hnp.arrays(np.uint8, len(lengths), elements=st.integers(0, 2))),
    )
    path = tmp_path_factory.mktemp("npz") / "random.npz"
    chosen = data.subset([0, *drawn.draw(st.lists(st.sampled_from(range(len(lengths))), max_size=7))])
    for written in (data, chosen):
        write_npz(path, written)
        assert_same_set(written, read_npz(path))
    assert len(read_npz(path).features_SF) == chosen.num_steps


def test_a_set_is_mapped_and_can_replace_the_file_it_is_mapped_from(tmp_path, assert_same_set):
    path = tmp_path / "same.npz"
    write_npz(path, example())
    mapped = read_npz(path)
    assert (mapped.name, mapped.notes, mapped.memory_mapped) == ("same", (), True)
    write_npz(path, mapped)
    assert_same_set(example(), read_npz(path))
    assert [entry.name for entry in tmp_path.iterdir()] == ["same.npz"]


@pytest.mark.parametrize("meaning", [{"vocabulary": ("a", "<eos>", "ä𝄞")}, {"alphabet": "\nä𝄞"}])
def test_what_the_numbers_of_text_mean_survives(tmp_path, assert_same_set, meaning):
    data = SequenceSet.from_flat(
        np.array([0, 1, 2, 1]), offsets=np.array([0, 2, 4]), split_N=np.array([0, 0]), **meaning
    )
    write_npz(tmp_path / "text.npz", data)
    assert_same_set(read_npz(tmp_path / "text.npz"), data)


@pytest.mark.parametrize(
    ("dtype", "kept"), [(np.int16, np.float32), (np.float32, np.float32), (np.float64, np.float64)]
)
def test_features_are_multiplied_by_their_scale(tmp_path, dtype, kept):
    x_SF = np.arange(8).reshape(4, 2).astype(dtype)
    np.savez(tmp_path / "a.npz", x=x_SF, offsets=np.array([0, 4]), scale=np.array([0.5, 3.0]))
    found = read_npz(tmp_path / "a.npz").features_SF
    assert found.dtype == kept
    np.testing.assert_array_equal(found, np.arange(8).reshape(4, 2) * [0.5, 3.0])


def test_compressed_files_are_read_into_memory(tmp_path):
    np.savez_compressed(tmp_path / "small.npz", x=np.arange(6.0), offsets=[0, 2, 6], y=[1, 0], split=[0, 2])
    data = read_npz(tmp_path / "small.npz")
    assert not data.memory_mapped
    assert data[1].features_TF.tolist() == [[2.0], [3.0], [4.0], [5.0]]
    assert data[0].target == 1


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_fortran_order_is_understood(tmp_path, save):
    features = np.asfortranarray(np.arange(12.0).reshape(6, 2))
    save(tmp_path / "fortran.npz", x=features, offsets=[0, 2, 6])
    data = read_npz(tmp_path / "fortran.npz")
    np.testing.assert_array_equal(data[1].features_TF.numpy(), features[2:])


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


def test_pen_up_marks_the_last_point_of_a_stroke(tmp_path):
    positions = {"xy": np.array([[0, 0], [0, 10], [5, 10], [7, 7], [7, 9]]), "offsets": [0, 3, 5]}
    np.savez(tmp_path / "down.npz", **positions, pen_down=[1, 0, 1, 1, 0])
    np.savez(tmp_path / "up.npz", **positions, pen_up=[0, 1, 1, 0, 1])
    one, other = read_npz(tmp_path / "down.npz"), read_npz(tmp_path / "up.npz")
    np.testing.assert_array_equal(one.features_SF, other.features_SF)
    np.savez(tmp_path / "both.npz", **positions, pen_up=[0, 1, 1, 0, 1], pen_down=[1, 0, 1, 1, 0])
    with pytest.raises(StrettoError, match="`pen_down` and `pen_up`"):
        read_npz(tmp_path / "both.npz")


def test_members_that_are_not_used_are_named(tmp_path):
    np.savez(tmp_path / "some.npz", x=np.zeros((4, 2)), offsets=[0, 4], writer=[1], pen_up=np.zeros(4))
    assert "not used, of the members of the file: `pen_up`, `writer`" in read_npz(tmp_path / "some.npz").notes
    many = {f"m{number}": np.zeros(1) for number in range(11)}
    np.savez(tmp_path / "many.npz", x=np.zeros((4, 2)), offsets=[0, 4], **many)
    assert any(note.endswith("`m6` and 3 more") for note in read_npz(tmp_path / "many.npz").notes)


@pytest.mark.parametrize(("x", "alphabet"), [(np.zeros((4, 2)), [97]), (np.zeros(4, dtype=np.uint8), [0, 0])])
def test_what_is_no_alphabet_is_not_taken_for_one(tmp_path, x, alphabet):
    np.savez(tmp_path / "set.npz", x=x, offsets=[0, 4], alphabet=np.array(alphabet))
    data = read_npz(tmp_path / "set.npz")
    assert data.alphabet == ""
    assert any("`alphabet` is ignored" in note for note in data.notes)


@pytest.mark.parametrize("name", ["x", "xy"])
def test_a_compressed_member_of_another_length_is_not_unpacked(tmp_path, monkeypatch, name):
    np.savez_compressed(tmp_path / "bomb.npz", **{name: np.zeros((100_000, 2)), "offsets": [0, 4]})
    unpacked = []
    honest = np.lib.format.read_array

    def read(member, **options):
        array = honest(member, **options)
        unpacked.append(array.shape)
        return array

    monkeypatch.setattr("numpy.lib.format.read_array", read)
    with pytest.raises(StrettoError, match=r"shape \(100000, 2\) and offsets run from 0 to 4"):
        read_npz(tmp_path / "bomb.npz")
    assert unpacked == [(2,)]


@pytest.mark.parametrize(
    ("x", "problem"),
    [
        (np.full((4, 1), 2**63 + 5, dtype=np.uint64), r"a feature of 2\*\*63 or more"),
        (np.full((4, 1), 5, dtype="m8[s]"), "type timedelta64"),
    ],
)
def test_numbers_that_torch_does_not_have_are_refused(tmp_path, x, problem):
    np.savez(tmp_path / "odd.npz", x=x, offsets=[0, 4])
    with pytest.raises(StrettoError, match=problem):
        read_npz(tmp_path / "odd.npz")


@pytest.mark.slow
@pytest.mark.parametrize(
    "facts",
    [
        ("digilets", (23_870, 748_042, 3), (5, 27, 209), [18_600, 2_480, 2_790], 62),
        ("pendigits_orig", (10_992, 442_794, 3), (9, 38, 231), [6_744, 750, 3_498], 10),
        ("japanese_vowels", (640, 9_961, 12), (7, 15, 29), [243, 27, 370], 9),
    ],
)
def test_real_sets_have_their_published_sizes_and_survive(shared_data, tmp_path, assert_same_set, facts):
    name, size, lengths, split, classes = facts
    data = open_sequences(shared_data / name)
    assert (len(data), data.num_steps, data.num_features) == size
    assert (data.lengths_N.min(), np.median(data.lengths_N), data.lengths_N.max()) == lengths
    assert np.bincount(data.split_N).tolist() == split
    assert isinstance(data.targets, Labels)
    assert len(data.targets.names) == classes
    write_npz(tmp_path / "again.npz", data)
    assert_same_set(data, read_npz(tmp_path / "again.npz"))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"offsets": np.array(4)}, "`offsets` have shape"),
        ({"scale": np.array([1.0, 2.0])}, r"`scale` has shape \(2,\)"),
        ({"scale": np.array(["a"])}, "`scale` has shape"),
        ({"scale": np.array(2.0)}, "`scale` has shape"),
        ({"y": np.array([0])}, r"`y` has shape \(1,\) for 2 sequences"),
        ({"y": np.array(1)}, r"`y` has shape \(\) for 2 sequences"),
        ({"y": np.array([0, 1, 0])}, r"`y` has shape \(3,\) for 2 sequences"),
        ({"y": np.array([[0], [1]])}, r"`y` has shape \(2, 1\) for 2 sequences"),
        ({"y": np.array([0.0, 1.0])}, "float64"),
        ({"y": np.array([0, 1, -1, 0])}, "sequence 1 has label -1 at its step 1"),
        ({"y": np.array([0, 1, 2, 0]), "class_names": np.array(["a", "b"])}, "sequence 1 has label 2 at its step 1"),
        ({"y": np.array([0.0, 1.0, 2.0, 0.0])}, r"labels of steps have shape \(4,\) and type float64"),
        ({"y": np.array([0, 1]), "class_names": np.array("ab")}, "`class_names` have shape"),
        ({"y": np.array([0, 1]), "class_names": np.array([b"a", b"b"])}, "`class_names` have shape"),
        ({"alphabet": np.array([-3])}, "`alphabet` holds no code points"),
        ({"alphabet": np.array("ab")}, "`alphabet` holds no code points"),
        ({"vocabulary": np.array([1, 2])}, "`vocabulary` holds no words"),
        ({"text": np.array([97, 98, 99])}, "`text_offsets` do not fit"),
        *(
            ({"text": np.array(text), "text_offsets": np.array(offsets)}, "`text_offsets` do not fit")
            for text, offsets in [
                *(
                    ([97, 98, 99], wrong)
                    for wrong in ([0, 1, 2], [1, 2, 3], [0, 4, 3], [[0, 1, 3]], [0.0, 1.0, 3.0], [])
                ),
                *((wrong, [0, 1, 3]) for wrong in ([97, -1, 99], [97, 0x110000, 99], [97.0, 98.0, 99.0])),
            ]
        ),
        ({"text": np.array([97, 98, 99]), "text_offsets": np.array([0, 3])}, "2 sequences but 1 targets"),
    ],
)
def test_arrays_that_do_not_fit_are_refused(tmp_path, change, message):
    arrays = {"x": np.zeros(4), "offsets": np.array([0, 1, 4])} | change
    np.savez(tmp_path / "wrong.npz", **arrays)
    with pytest.raises(StrettoError, match=message):
        read_npz(tmp_path / "wrong.npz")


@pytest.mark.parametrize(
    ("xy", "offsets", "others"),
    [
        (np.zeros((4, 3)), [0, 4], {}),
        (np.zeros((4, 2)), [2, 4], {}),
        (np.zeros((4, 2)), [0, 2, 2, 4], {}),
        (np.zeros((4, 2)), [0.0, 4.0], {}),
        (np.zeros((4, 2)), [0, 4], {"pen_down": np.zeros(3)}),
        (np.zeros((4, 2)), [0, 4], {"pen_down": np.zeros((4, 1))}),
        (np.full((4, 2), "a"), [0, 4], {}),
    ],
)
def test_pen_data_that_does_not_fit_is_refused(tmp_path, xy, offsets, others):
    np.savez(tmp_path / "pen.npz", xy=xy, offsets=np.array(offsets), **others)
    with pytest.raises(StrettoError, match="do not fit together"):
        read_npz(tmp_path / "pen.npz")


@pytest.mark.parametrize("missing", ["x", "offsets"])
def test_an_error_lists_the_arrays_that_are_there(tmp_path, missing):
    arrays = {"x": np.zeros(4), "offsets": np.array([0, 4]), "labels": np.array([0])}
    del arrays[missing]
    np.savez(tmp_path / "part.npz", **arrays)
    there = ", ".join(map(repr, sorted(arrays)))
    with pytest.raises(StrettoError, match=rf"has the arrays \[{there}\] but needs `x` and `offsets`"):
        read_npz(tmp_path / "part.npz")


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9, 0.99, 0.9999])
def test_a_truncated_file_is_refused(tmp_path, compressed, share):
    save = np.savez_compressed if compressed else np.savez
    save(tmp_path / "whole.npz", x=np.random.default_rng(0).normal(size=(500, 3)), offsets=np.array([0, 200, 500]))
    whole = (tmp_path / "whole.npz").read_bytes()
    path = tmp_path / "cut.npz"
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(StrettoError, match=r"cut\.npz' is truncated or not an \.npz file"):
        read_npz(path)


def _member(rows):
    """An array of two rows of zeros whose header says something else."""
    member = io.BytesIO()
    np.lib.format.write_array(member, np.zeros((2, 1)))
    return member.getvalue().replace(b"(2, 1), }".ljust(40), f"{rows}, }}".encode().ljust(40))


@pytest.mark.parametrize("compress_type", [zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED])
@pytest.mark.parametrize(
    "shape",
    [
        *(f"({rows}, 1)" for rows in (3, 5, 1 << 40, 1 << 62)),
        *("(2, 1  ", "(2, 1]", "(2, x)", "\n(2,1):", "(-2,-1)", "(2.0,1)"),
    ],
)
def test_an_array_header_that_is_damaged_or_says_too_much_is_refused(tmp_path, compress_type, shape):
    path = tmp_path / "header.npz"
    np.savez(path, offsets=np.array([0, 2]))
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr("x.npy", _member(shape), compress_type=compress_type)
        archive.writestr("padding.npy", bytes(4096))
    with pytest.raises(StrettoError, match=r"header\.npz"):
        read_npz(path)


def _damaged(path):
    np.savez_compressed(path, x=np.random.default_rng(0).normal(size=(500, 3)), offsets=np.array([0, 500]))
    raw = path.read_bytes()
    return raw[:300] + bytes(40) + raw[340:]


@pytest.mark.parametrize(
    "content", [lambda _: b"", lambda _: b"no zip at all", lambda _: b"PK\x03\x04" + bytes(100), _damaged]
)
def test_a_damaged_file_or_another_kind_is_refused(tmp_path, content):
    path = tmp_path / "other.npz"
    path.write_bytes(content(path))
    with pytest.raises(StrettoError, match=r"is truncated or not an \.npz file"):
        read_npz(path)


class Trap:
    """Leaves a marker when it is unpickled."""

    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return pathlib.Path.touch, (self.marker,)


@pytest.mark.parametrize("compressed", [True, False])
@pytest.mark.parametrize("trapped", ["x", "offsets", "y", "text", "split"])
def test_pickled_objects_are_never_loaded(tmp_path, trapped, compressed):
    marker = tmp_path / "marker"
    arrays = {"x": np.zeros(4), "offsets": np.array([0, 4]), trapped: np.array([Trap(marker)], dtype=object)}
    (np.savez_compressed if compressed else np.savez)(tmp_path / "trap.npz", **arrays)
    with pytest.raises(StrettoError, match="never loads pickled objects"):
        read_npz(tmp_path / "trap.npz")
    assert not marker.exists()


Array = npt.NDArray[Any]
IMAGE_DTYPES = (np.uint8, np.bool_, np.int16, np.float16, np.float32, np.float64)


def images(**change: Any) -> dict[str, Array]:
    rng = np.random.default_rng(0)
    return {
        "x_train": rng.integers(256, size=(20, 4, 3), dtype=np.uint8),
        "y_train": np.arange(20, dtype=np.uint8) % 5,
        "x_test": rng.integers(256, size=(6, 4, 3), dtype=np.uint8),
        "y_test": np.arange(6, dtype=np.uint8) % 5,
    } | change


@settings(deadline=None, max_examples=40)
@given(drawn=st.data(), save=st.sampled_from([np.savez, np.savez_compressed]))
def test_every_image_is_a_sequence_of_its_rows(
    tmp_path_factory: pytest.TempPathFactory, drawn: st.DataObject, save: Callable[..., None]
) -> None:
    dtype = drawn.draw(st.sampled_from(IMAGE_DTYPES))
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
    data = read_npz(path)
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


def test_a_folder_with_images_is_opened_and_inspected(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    np.savez(tmp_path / "pictures.npz", **images(y_test=np.array([0, 1, 2, 3, 7, 0])))
    (tmp_path / "README.md").write_text("about them")
    data = open_sequences(tmp_path)
    assert data.notes == ("split has train and test only: a tenth of train is kept for validation",)
    assert isinstance(data.targets, Labels)
    assert data.targets.names == tuple("01234567")
    assert main(["inspect", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert "26 (18 train, 2 valid, 6 test)" in shown
    assert "3 per step" in shown


@pytest.mark.parametrize(
    ("change", "message"),
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
def test_arrays_that_are_no_images_are_refused(tmp_path: Path, change: dict[str, Array], message: str) -> None:
    np.savez(tmp_path / "wrong.npz", **images(**change))
    with pytest.raises(StrettoError, match=message):
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


@pytest.mark.slow
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
