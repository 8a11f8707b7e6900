"""Video clips: frames and features in folders, refusals, and the split files of HMDB51.

Shape legend: T steps of a clip, F values per step.
"""

import os
import shutil
import struct
import sys
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from PIL import Image

from stretto.data import Framing, Labels, SequenceSet, open_sequences, read_clips, write_npz
from stretto.data.readers.video import SPLITS_FOLDER
from stretto.errors import StrettoError

Array = npt.NDArray[Any]
SIDE = 8
SMALL = Framing(size=SIDE)


def put_frame(path: Path, value: int | Array, *, mode: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((SIDE, SIDE), value, dtype=np.uint8) if isinstance(value, int) else value
    frame = Image.fromarray(pixels)
    (frame if mode is None else frame.convert(mode)).save(path)


def put_clip(folder: Path, values: list[int], *, ending: str = ".png") -> None:
    for number, value in enumerate(values, start=1):
        put_frame(folder / f"{number}{ending}", value)


def put_features(path: Path, array: Array) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    np.save(path, array, allow_pickle=array.dtype.hasobject)


def put_split(folder: Path, name: str, lines: str, *, number: int = 1) -> Path:
    path = folder / SPLITS_FOLDER / f"{name}_test_split{number}.txt"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(lines, encoding="utf-8")
    return path


def values(data: SequenceSet, index: int) -> list[int]:
    """The brightness of each frame of a clip, all of whose pixels must be alike."""
    frames_TF = data[index].features_TF.numpy()
    assert (frames_TF == frames_TF[:, :1]).all()
    found: list[int] = frames_TF[:, 0].tolist()
    return found


def names(data: SequenceSet) -> tuple[str, ...]:
    assert isinstance(data.targets, Labels)
    return data.targets.names


def put_two_classes(folder: Path) -> Path:
    """A clip of three frames and one of one."""
    put_clip(folder / "run" / "a", [10, 20, 30])
    put_clip(folder / "walk" / "b", [40])
    return folder


@pytest.fixture
def two(tmp_path: Path) -> Path:
    return put_two_classes(tmp_path)


def test_classes_are_folders_and_clips_are_as_long_as_they_are(two: Path) -> None:
    put_clip(two / "run" / "c", [7, 8])
    data = read_clips(two, SMALL)
    assert names(data) == ("run", "walk")
    assert [data[index].target for index in range(3)] == [0, 0, 1]
    assert data.lengths_N.tolist() == [3, 2, 1]
    assert [values(data, index) for index in range(3)] == [[10, 20, 30], [7, 8], [40]]
    assert data.features_SF.dtype == np.uint8
    assert data.num_features == SIDE * SIDE
    assert data.name == two.name
    coloured = read_clips(two, Framing(size=256, colour=True))
    assert coloured.notes[0] == "6 frames of 256 x 256 pixels in colour: 1.1 MiB of memory"
    assert "drawn at random" in coloured.notes[1]


def test_frames_are_in_the_natural_order_of_their_names(tmp_path: Path) -> None:
    order = ["f1", "f2", "f02b", "f3-9", "f3-10", "f10", "f011", "f100", "g0"]
    for value, name in reversed(list(enumerate(order))):
        put_frame(tmp_path / "run" / "a" / f"{name}.png", value)
    assert values(read_clips(tmp_path, SMALL), 0) == list(range(len(order)))


@pytest.mark.parametrize("ending", [".jpg", ".jpeg", ".png", ".JPG", ".PNG"])
def test_endings_of_frames(tmp_path: Path, ending: str) -> None:
    put_clip(tmp_path / "run" / "a", [50, 200], ending=ending)
    assert values(read_clips(tmp_path, SMALL), 0) == [50, 200]


def test_a_frame_is_scaled_to_a_square_whatever_its_shape(tmp_path: Path) -> None:
    halves = np.zeros((30, 64), dtype=np.uint8)
    halves[:, 32:] = 255
    put_frame(tmp_path / "run" / "a" / "1.png", halves)
    put_frame(tmp_path / "run" / "a" / "2.png", halves.T.copy())
    frames = read_clips(tmp_path, SMALL)[0].features_TF.numpy().reshape(2, SIDE, SIDE)
    wide, tall = frames
    assert (wide[:, :3] == 0).all()
    assert (wide[:, 5:] == 255).all()
    np.testing.assert_array_equal(tall, wide.T)


def test_pixels_are_kept_in_colour_and_become_brightness_otherwise(tmp_path: Path) -> None:
    pixels = np.arange(SIDE * SIDE * 3, dtype=np.uint8).reshape(SIDE, SIDE, 3)
    put_frame(tmp_path / "run" / "a" / "1.png", pixels)
    red = np.zeros_like(pixels)
    red[..., 0] = 255
    put_frame(tmp_path / "run" / "b" / "1.png", red)
    coloured = read_clips(tmp_path, Framing(size=SIDE, colour=True))
    np.testing.assert_array_equal(coloured[0].features_TF.numpy().reshape(SIDE, SIDE, 3), pixels)
    assert values(read_clips(tmp_path, SMALL), 1) == [76]


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_kinds_of_images(tmp_path: Path, mode: str) -> None:
    put_frame(tmp_path / "run" / "a" / "1.png", 255, mode=mode)
    assert values(read_clips(tmp_path, SMALL), 0) == [255]
    assert values(read_clips(tmp_path, Framing(size=SIDE, colour=True)), 0) == [255]


def test_other_files_and_hidden_ones_are_not_read(two: Path) -> None:
    for name in ("run/a/n_frames", "run/a/.1.png", "run/a.avi", "run/.DS_Store", ".hidden/x/y.txt", "README.md"):
        path = two / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("no image")
    data = read_clips(two, SMALL)
    assert data.lengths_N.tolist() == [3, 1]
    assert names(data) == ("run", "walk")


def test_features_are_kept_as_they_are(tmp_path: Path) -> None:
    first, second = np.random.default_rng(0).normal(size=(5, 3)), np.ones((2, 3), dtype=">f4")
    put_features(tmp_path / "run" / "a.npy", first)
    put_features(tmp_path / "walk" / "b.npy", np.asfortranarray(second))
    data = read_clips(tmp_path)
    np.testing.assert_array_equal(data[0].features_TF.numpy(), first)
    np.testing.assert_array_equal(data[1].features_TF.numpy(), second)
    assert data.features_SF.dtype == np.float64
    assert [data[index].target for index in range(2)] == [0, 1]
    assert data.notes[0] == "7 steps of float64 features: 0.0 MiB of memory"


def test_size_and_colour_follow_from_the_number_of_values() -> None:
    for size in range(8, 257):
        for colour in (False, True):
            framing = Framing(size=size, colour=colour)
            assert Framing.of(size * size * framing.channels) == framing
    assert [Framing.of(number) for number in (0, 1, 49, 63, 65, 147, 257 * 257)] == [None] * 7


@pytest.mark.parametrize("size", [0, 7, 257, -32])
def test_sizes_out_of_bounds_are_refused(size: int) -> None:
    with pytest.raises(StrettoError, match=f"cannot be read at {size} x {size}.*Choose 8 to 256"):
        Framing(size=size)


def test_clips_features_and_videos_are_recognised(two: Path, assert_same_set: Any) -> None:
    assert open_sequences(str(two)).num_features == 32 * 32
    (two / "run" / "a" / "annotation.xml").write_text("<boxes/>")
    assert_same_set(open_sequences(two, framing=SMALL), read_clips(two, SMALL))
    put_features(two / "features" / "run" / "a.npy", np.ones((2, 3)))
    assert len(open_sequences(two / "features")) == 1
    (two / "videos" / "run").mkdir(parents=True)
    (two / "videos" / "run" / "a.avi").touch()
    with pytest.raises(StrettoError, match="ffmpeg"):
        open_sequences(two / "videos")


def test_a_text_beside_clips_is_ambiguous(two: Path) -> None:
    (two / "classes.txt").write_text("run\n\nwalk")
    with pytest.raises(StrettoError, match=r"has the text classes\.txt and clips below it"):
        open_sequences(two)


def test_ink_beside_images_stays_ink(two: Path) -> None:
    ink = "<ink><annotation type='truth'>a</annotation><trace>1 2, 3 4</trace></ink>"
    (two / "run" / "a" / "a.inkml").write_text(ink)
    assert open_sequences(two)[0].target == "a"


def put_pictures(path: Path) -> None:
    pictures = [Image.new("L", (SIDE, SIDE), value) for value in (1, 2, 3)]
    pictures[0].save(path, save_all=True, append_images=pictures[1:])


def _huge_png(side: int) -> bytes:
    """A few bytes that claim to be `side` times `side` pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda two: (two / "sit").mkdir(), r"the class '.*/sit' has no clips"),
        (lambda two: put_clip(two / "s\nit" / "a", [1]), "has a name that cannot be shown"),
        (lambda two: (two / "walk" / "empty").mkdir(), r"the clip '.*/walk/empty' has no frames"),
        (lambda two: put_frame(two / "run" / "a" / "2.jpg", 1), r"the clip '.*/run/a' has two frames '2'"),
        (
            lambda two: put_features(two / "walk" / "c.npy", np.ones((2, 3))),
            r"run/a' and '.*walk/c\.npy' are frames and features in one set",
        ),
        (lambda two: (two / "run" / "c.avi").touch(), r"run/c\.avi' is a video.*folder 'c' beside it.*ffmpeg"),
        (
            lambda two: Image.new("L", (SIDE, SIDE)).save(two / "walk" / "b" / "2.png", format="BMP"),
            r"walk/b/2\.png' is damaged or not an image",
        ),
        (
            lambda two: put_frame(two / "walk" / "b" / "2.png", np.full((SIDE, SIDE), 30_000, dtype=np.uint16)),
            r"walk/b/2\.png' is of Pillow's mode 'I;16'.*eight bits",
        ),
        (lambda two: put_pictures(two / "walk" / "b" / "2.png"), r"walk/b/2\.png' holds 3 pictures"),
        (
            lambda two: (two / "walk" / "b" / "1.png").write_bytes(b"no image"),
            r"the frame '.*walk/b/1\.png' is damaged or not an image",
        ),
        # A decompression bomb is refused before it is unpacked.
        *(
            (
                lambda two, side=side: (two / "walk" / "b" / "2.png").write_bytes(_huge_png(side)),
                r"walk/b/2\.png' is too large.*decompression bomb",
            )
            for side in (10_000, 100_000)
        ),
        # What is no file is no frame.
        (lambda two: os.mkfifo(two / "walk" / "b" / "2.png"), "walk/b"),
        (lambda two: (two / "walk" / "b" / "2.png").mkdir(), "walk/b"),
        (lambda two: (two / "walk" / "b" / "2.png").symlink_to(two / "gone.png"), "walk/b"),
        (lambda two: (two / "walk" / "b" / "2.png").symlink_to(two / "walk" / "b" / "2.png"), "walk/b"),
        (lambda two: put_split(two, "run", "a.avi 0") and put_split(two, "walk", "b.avi 0"), "uses none of the clips"),
        (
            lambda two: shutil.rmtree(two / "run") or shutil.rmtree(two / "walk"),
            r"no clips below.*class/clip/frame\.jpg",
        ),
    ],
)
def test_clips_that_cannot_be_used_are_named(two: Path, change: Callable[[Path], None], message: str) -> None:
    change(two)
    with pytest.raises(StrettoError, match=message):
        read_clips(two, SMALL)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ending=st.sampled_from([".png", ".jpg"]), data=st.data())
def test_a_damaged_or_truncated_frame_is_read_or_named(two: Path, ending: str, data: st.DataObject) -> None:
    path = two / "walk" / "b" / f"2{ending}"
    try:
        put_frame(path, np.arange(SIDE * SIDE, dtype=np.uint8).reshape(SIDE, SIDE))
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(content[: data.draw(st.integers(0, len(content)) | st.just(len(content)))])
        read_clips(two, SMALL)
    except StrettoError as error:
        if repr(str(path)) not in error.problem:
            raise
    finally:
        # A draw may end an example anywhere; the next one begins with the folder as it was.
        path.unlink(missing_ok=True)


@pytest.mark.parametrize(
    ("array", "message"),
    [
        (np.ones(5), r"shape \(5,\) and type float64"),
        (np.ones((5, 2, 2)), r"shape \(5, 2, 2\)"),
        (np.float64(1.0), r"shape \(\)"),
        (np.ones((0, 3)), r"shape \(0, 3\)"),
        (np.ones((5, 0)), r"shape \(5, 0\)"),
        (np.ones((5, 3), dtype=np.int64), "type int64"),
        (np.ones((5, 3), dtype=np.complex64), "type complex64"),
        (np.ones((5, 4)), r"has 4 features per step, '.*a\.npy' has 3"),
        (np.array([[0.0, 0, 0], [0, np.nan, 0]]), "NaN or infinite feature at its step 1"),
        (np.array([[0.0, 0, -np.inf]]), "NaN or infinite feature at its step 0"),
        (np.array([[{}]], dtype=object), "never loads pickled objects"),
    ],
)
def test_bad_features_are_named(tmp_path: Path, array: Array, message: str) -> None:
    put_features(tmp_path / "run" / "a.npy", np.ones((2, 3)))
    put_features(tmp_path / "walk" / "b.npy", np.asarray(array))
    with pytest.raises(StrettoError, match=rf"walk/b\.npy'.*{message}"):
        read_clips(tmp_path)


@pytest.mark.parametrize(
    "change",
    [
        *(lambda whole, keep=keep: whole[:keep] for keep in (0, 4, 9, 60, 130)),
        lambda whole: whole.replace(b" 'shape'", b"b'shape'"),
        lambda whole: whole.replace(b"(2, 3), }         ", b"(200000000000, 3),}"),  # more than there is memory
    ],
)
def test_a_damaged_array_is_named(tmp_path: Path, change: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "run" / "a.npy"
    put_features(path, np.ones((2, 3)))
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(StrettoError, match=r"run/a\.npy' is truncated or not a plain \.npy array"):
        read_clips(tmp_path)


@pytest.mark.parametrize("place", ["run/a/4.png", "run/linked", "linked", "run/linked.npy"])
def test_a_link_out_of_the_folder_is_refused(two: Path, tmp_path_factory: pytest.TempPathFactory, place: str) -> None:
    outside = tmp_path_factory.mktemp("outside")
    put_clip(outside / "class" / "clip", [1, 2])
    put_features(outside / "a.npy", np.ones((2, 3)))
    targets = {"4.png": "class/clip/1.png", "linked.npy": "a.npy"}
    (two / place).symlink_to(outside / targets.get(Path(place).name, "class/clip" if "/" in place else "class"))
    with pytest.raises(StrettoError, match=rf"{place}' is a link that leads out of"):
        read_clips(two, SMALL)


def test_links_within_the_folder_are_followed(two: Path) -> None:
    (two / "walk" / "linked").symlink_to(two / "run" / "a")
    (two / "walk" / "b" / "2.png").symlink_to("../../run/a/3.png")
    data = read_clips(two, SMALL)
    assert [values(data, index) for index in range(3)] == [[10, 20, 30], [40, 30], [10, 20, 30]]


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_a_folder_that_may_not_be_read_is_named(two: Path) -> None:
    (two / "walk").chmod(0)
    try:
        with pytest.raises(StrettoError, match=r"could not list '.*/walk'"):
            read_clips(two, SMALL)
    finally:
        (two / "walk").chmod(0o700)


def test_frames_need_pillow_and_features_do_not(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(StrettoError, match=r"pip install 'stretto\[video\]'"):
        read_clips(two, SMALL)
    put_features(two / "features" / "run" / "a.npy", np.ones((2, 3)))
    assert len(read_clips(two / "features")) == 1


@pytest.fixture
def marked(tmp_path: Path) -> Path:
    """Two classes with split files, in which some clips are unused."""
    for name in ("run", "walk"):
        for number in range(8):
            put_clip(tmp_path / name / f"{name} #{number}(x)", [number, number])
        lines = [f"{name} #{number}(x).avi {(1, 2, 0, 1)[number % 4]} " for number in range(8)]
        put_split(tmp_path, name, "\n".join(lines) + "\n")
        put_split(tmp_path, name, "\n".join(line.replace(" 0 ", " 2 ") for line in lines), number=2)
    return tmp_path


def test_split_files_mark_train_test_and_unused(marked: Path) -> None:
    data = open_sequences(marked, framing=SMALL)
    firsts = [values(data, index)[0] for index in range(len(data))]
    assert firsts == [0, 1, 3, 4, 5, 7] * 2
    assert names(data) == ("run", "walk")
    assert [data[index].target for index in range(len(data))] == [0] * 6 + [1] * 6
    test = [first for first, part in zip(firsts, data.split_N, strict=True) if part == 2]
    assert test == [1, 5, 1, 5]
    assert (data.split_N == 1).sum() == 1
    assert "train and test are those of split 1" in data.notes[1]
    assert "4 clips that the split marks as unused are left out" in data.notes
    assert "a tenth of train is kept for validation" in data.notes[-1]


def test_another_split_can_be_chosen(marked: Path) -> None:
    data = read_clips(marked, Framing(size=SIDE, split_file=2))
    assert len(data) == 16
    assert (data.split_N == 2).sum() == 8
    with pytest.raises(StrettoError, match=r"there is no split file '.*run_test_split3\.txt'.*drawn at random"):
        read_clips(marked, Framing(size=SIDE, split_file=3))


def test_split_files_fit_features_too(tmp_path: Path) -> None:
    for number in range(4):
        put_features(tmp_path / "run" / f"a{number}.npy", np.full((2, 3), number, dtype=np.float32))
    put_split(tmp_path, "run", "a0.avi 1\na1.avi 2\na2.avi 0\na3.avi 1\n")
    data = read_clips(tmp_path)
    assert [data[index].features_TF[0, 0].item() for index in range(3)] == [0, 1, 3]
    assert data.split_N[1] == 2


def test_a_missing_clip_is_noted_and_one_that_is_not_listed_is_refused(marked: Path) -> None:
    put_split(marked, "run", (marked / SPLITS_FOLDER / "run_test_split1.txt").read_text() + "gone.avi 1\n")
    assert "1 clips that the split lists are not there" in read_clips(marked, SMALL).notes
    put_clip(marked / "walk" / "new", [1])
    with pytest.raises(StrettoError, match=r"walk/new' is not listed in walk_test_split1\.txt.*'new\.avi 0'"):
        read_clips(marked, SMALL)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *(
            (line, r"line [12] of '.*walk_test_split1\.txt' is '")
            for line in (b"a.avi", b"a.avi 3", b"a.avi one", b"a.avi -1", b"a.avi 1\na.avi 2", b"7")
        ),
        (b"\xff\xfe", r"walk_test_split1\.txt' is not UTF-8"),
    ],
)
def test_a_split_file_that_makes_no_sense_is_quoted(marked: Path, content: bytes, message: str) -> None:
    put_split(marked, "walk", "").write_bytes(content)
    with pytest.raises(StrettoError, match=message):
        read_clips(marked, SMALL)


def test_a_split_cannot_be_chosen_where_there_are_none(two: Path) -> None:
    with pytest.raises(StrettoError, match="has no split files"):
        read_clips(two, Framing(size=SIDE, split_file=2))
    write_npz(two / "clips.npz", read_clips(two, SMALL))
    with pytest.raises(StrettoError, match=r"clips\.npz' has no split files"):
        open_sequences(two / "clips.npz", framing=Framing(split_file=2))


def test_a_split_file_may_not_lead_out_of_the_folder(marked: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    path, outside = marked / SPLITS_FOLDER / "run_test_split1.txt", tmp_path_factory.mktemp("outside") / "lines.txt"
    path.rename(outside)
    path.symlink_to(outside)
    with pytest.raises(StrettoError, match=r"run_test_split1\.txt' is a link that leads out of"):
        read_clips(marked, SMALL)
