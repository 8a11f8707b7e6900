"""Folders of video clips: frames in natural order, features, and how they are found."""

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from clip_files import SIDE, SMALL, names, put_clip, put_features, put_frame, put_two_classes, values
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.data import Framing, open_sequences, write_npz
from stretto.data.frames import read_clips
from stretto.data.npz import read_npz
from stretto.errors import StrettoError


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


def test_memory_and_the_drawn_split_are_told(two: Path) -> None:
    data = read_clips(two, Framing(size=256, colour=True))
    assert data.features_SF.nbytes == 4 * 256 * 256 * 3
    assert data.notes[0] == "4 frames of 256 x 256 pixels in colour: 0.8 MiB of memory"
    assert "drawn at random" in data.notes[1]


def test_frames_are_in_the_natural_order_of_their_names(tmp_path: Path) -> None:
    order = ["f1", "f2", "f02b", "f3-9", "f3-10", "f10", "f011", "f100", "g0"]
    for value, name in reversed(list(enumerate(order))):
        put_frame(tmp_path / "run" / "a" / f"{name}.png", value)
    assert values(read_clips(tmp_path, SMALL), 0) == list(range(len(order)))


@settings(max_examples=25, deadline=None)
@given(
    numbers=st.lists(st.integers(0, 300), min_size=1, max_size=12, unique=True),
    width=st.integers(1, 6),
)
def test_numbers_of_any_width_are_ordered_by_value(
    tmp_path_factory: pytest.TempPathFactory, numbers: list[int], width: int
) -> None:
    folder = tmp_path_factory.mktemp("clips")
    for number in numbers:
        put_frame(folder / "run" / "a" / f"frame_{number:0{width}}.png", number % 256)
    assert values(read_clips(folder, SMALL), 0) == [number % 256 for number in sorted(numbers)]


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


def test_a_frame_of_the_right_size_keeps_its_pixels(tmp_path: Path) -> None:
    pixels = np.arange(SIDE * SIDE * 3, dtype=np.uint8).reshape(SIDE, SIDE, 3)
    put_frame(tmp_path / "run" / "a" / "1.png", pixels)
    data = read_clips(tmp_path, Framing(size=SIDE, colour=True))
    np.testing.assert_array_equal(data[0].features_TF.numpy().reshape(SIDE, SIDE, 3), pixels)


@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA"])
def test_kinds_of_images(tmp_path: Path, mode: str) -> None:
    put_frame(tmp_path / "run" / "a" / "1.png", 255, mode=mode)
    assert values(read_clips(tmp_path, SMALL), 0) == [255]
    assert values(read_clips(tmp_path, Framing(size=SIDE, colour=True)), 0) == [255]


def test_colour_becomes_brightness_unless_asked_for(tmp_path: Path) -> None:
    red = np.zeros((SIDE, SIDE, 3), dtype=np.uint8)
    red[..., 0] = 255
    put_frame(tmp_path / "run" / "a" / "1.png", red)
    assert values(read_clips(tmp_path, SMALL), 0) == [76]
    assert read_clips(tmp_path, Framing(size=SIDE, colour=True))[0].features_TF[0, :4].tolist() == [255, 0, 0, 255]


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


def test_a_clip_written_as_npz_is_the_same_set(two: Path, tmp_path: Path, assert_same_set: Any) -> None:
    data = read_clips(two, SMALL)
    write_npz(tmp_path / "clips.npz", data)
    assert_same_set(read_npz(tmp_path / "clips.npz"), data)


def test_the_number_of_values_tells_size_and_colour() -> None:
    for size in range(8, 257):
        for colour in (False, True):
            framing = Framing(size=size, colour=colour)
            assert Framing.of(size * size * framing.channels) == framing
    assert [Framing.of(number) for number in (0, 1, 49, 63, 65, 147, 257 * 257)] == [None] * 7


@pytest.mark.parametrize("size", [0, 7, 257, -32])
def test_sizes_out_of_bounds_are_refused(size: int) -> None:
    with pytest.raises(StrettoError, match=f"cannot be read at {size} x {size}.*Choose 8 to 256"):
        Framing(size=size)


def test_features_need_no_pillow(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    put_features(tmp_path / "run" / "a.npy", np.ones((2, 3)))
    assert len(read_clips(tmp_path)) == 1


def test_the_layout_is_recognised(two: Path, assert_same_set: Any) -> None:
    assert_same_set(open_sequences(two, framing=SMALL), read_clips(two, SMALL))
    assert open_sequences(str(two)).num_features == 32 * 32
    (two / "run" / "a" / "annotation.xml").write_text("<boxes/>")
    assert_same_set(open_sequences(two, framing=SMALL), read_clips(two, SMALL))


def test_features_and_videos_are_recognised(tmp_path: Path) -> None:
    put_features(tmp_path / "features" / "run" / "a.npy", np.ones((2, 3)))
    assert len(open_sequences(tmp_path / "features")) == 1
    (tmp_path / "videos" / "run").mkdir(parents=True)
    (tmp_path / "videos" / "run" / "a.avi").touch()
    with pytest.raises(StrettoError, match="ffmpeg"):
        open_sequences(tmp_path / "videos")


def test_a_text_beside_clips_is_not_guessed_at(two: Path) -> None:
    (two / "classes.txt").write_text("run\n\nwalk")
    with pytest.raises(StrettoError, match=r"has the text classes\.txt and clips below it"):
        open_sequences(two)


def test_ink_beside_images_stays_ink(two: Path) -> None:
    ink = "<ink><annotation type='truth'>a</annotation><trace>1 2, 3 4</trace></ink>"
    (two / "run" / "a" / "a.inkml").write_text(ink)
    assert open_sequences(two)[0].target == "a"
