"""Folders of video clips that cannot be used: every fault by name."""

import os
import struct
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from clip_files import SIDE, SMALL, Array, put_clip, put_features, put_frame, put_two_classes, values
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from stretto.data.frames import read_clips
from stretto.errors import StrettoError

Image = pytest.importorskip("PIL.Image")


@pytest.fixture
def two(tmp_path: Path) -> Path:
    return put_two_classes(tmp_path)


def test_an_empty_class_is_named(two: Path) -> None:
    (two / "sit").mkdir()
    with pytest.raises(StrettoError, match=r"the class '.*/sit' has no clips"):
        read_clips(two, SMALL)


def test_a_class_whose_name_cannot_be_shown_is_named(two: Path) -> None:
    put_clip(two / "s\nit" / "a", [1])
    with pytest.raises(StrettoError, match="has a name that cannot be shown"):
        read_clips(two, SMALL)


def test_a_clip_without_frames_is_named(two: Path) -> None:
    (two / "walk" / "empty").mkdir()
    (two / "walk" / "empty" / "frame.bmp").touch()
    with pytest.raises(StrettoError, match=r"the clip '.*/walk/empty' has no frames"):
        read_clips(two, SMALL)


def test_a_folder_without_classes_is_named(tmp_path: Path) -> None:
    with pytest.raises(StrettoError, match=r"there are no clips below.*class/clip/frame\.jpg"):
        read_clips(tmp_path, SMALL)


def test_two_frames_of_one_name_are_refused(two: Path) -> None:
    put_frame(two / "run" / "a" / "2.jpg", 1)
    with pytest.raises(StrettoError, match=r"the clip '.*/run/a' has two frames '2'"):
        read_clips(two, SMALL)


def test_frames_and_features_are_not_mixed(two: Path) -> None:
    put_features(two / "walk" / "c.npy", np.ones((2, 3)))
    with pytest.raises(StrettoError, match=r"run/a' and '.*walk/c\.npy' are frames and features in one set"):
        read_clips(two, SMALL)


def test_a_video_without_frames_is_told_how_to_get_them(two: Path) -> None:
    (two / "run" / "c.avi").touch()
    with pytest.raises(StrettoError, match=r"run/c\.avi' is a video.*folder 'c' beside it.*ffmpeg"):
        read_clips(two, SMALL)


@pytest.mark.parametrize("content", [b"", b"no image", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff\xe0"])
def test_a_frame_that_is_no_image_is_named(two: Path, content: bytes) -> None:
    (two / "walk" / "b" / "1.png").write_bytes(content)
    with pytest.raises(StrettoError, match=r"the frame '.*walk/b/1\.png' is damaged or no image"):
        read_clips(two, SMALL)


@pytest.mark.parametrize("ending", [".png", ".jpg"])
def test_half_a_frame_is_named(two: Path, ending: str) -> None:
    noise = np.random.default_rng(0).integers(256, size=(64, 64), dtype=np.uint8)
    path = two / "walk" / "b" / f"2{ending}"
    put_frame(path, noise)
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    with pytest.raises(StrettoError, match=rf"walk/b/2\{ending}' is damaged"):
        read_clips(two, SMALL)


def test_another_format_under_the_name_of_a_frame_is_refused(two: Path) -> None:
    Image.new("L", (SIDE, SIDE)).save(two / "walk" / "b" / "2.png", format="BMP")
    with pytest.raises(StrettoError, match=r"walk/b/2\.png' is damaged or no image"):
        read_clips(two, SMALL)


def test_sixteen_bits_a_value_are_refused_rather_than_clipped(two: Path) -> None:
    put_frame(two / "walk" / "b" / "2.png", np.full((SIDE, SIDE), 30_000, dtype=np.uint16))
    with pytest.raises(StrettoError, match=r"walk/b/2\.png' is of Pillow's mode 'I;16'.*eight bits"):
        read_clips(two, SMALL)


def test_several_pictures_in_one_file_are_refused(two: Path) -> None:
    pictures = [Image.new("L", (SIDE, SIDE), value) for value in (1, 2, 3)]
    pictures[0].save(two / "walk" / "b" / "2.png", save_all=True, append_images=pictures[1:])
    with pytest.raises(StrettoError, match=r"walk/b/2\.png' holds 3 pictures"):
        read_clips(two, SMALL)


def _huge_png(side: int) -> bytes:
    """A few bytes that claim to be `side` times `side` pixels."""

    def chunk(kind: bytes, content: bytes) -> bytes:
        return struct.pack(">I", len(content)) + kind + content + struct.pack(">I", zlib.crc32(kind + content))

    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"")) + chunk(b"IEND", b"")


@pytest.mark.parametrize("side", [10_000, 100_000])
def test_a_decompression_bomb_is_refused_before_it_is_unpacked(two: Path, side: int) -> None:
    (two / "walk" / "b" / "2.png").write_bytes(_huge_png(side))
    with pytest.raises(StrettoError, match=r"walk/b/2\.png' is too large.*decompression bomb"):
        read_clips(two, SMALL)


def _fault(folder: Path) -> str | None:
    try:
        read_clips(folder, SMALL)
    except StrettoError as error:
        return error.problem
    return None


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(ending=st.sampled_from([".png", ".jpg"]), data=st.data())
def test_a_damaged_frame_is_read_or_named(two: Path, ending: str, data: st.DataObject) -> None:
    path = two / "walk" / "b" / f"2{ending}"
    try:
        put_frame(path, np.arange(SIDE * SIDE, dtype=np.uint8).reshape(SIDE, SIDE))
        content = bytearray(path.read_bytes())
        for _ in range(data.draw(st.integers(1, 4))):
            content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
        path.write_bytes(content)
        told = _fault(two)
    finally:
        # A draw may end an example anywhere; the next one begins with the folder as it was.
        path.unlink(missing_ok=True)
    assert told is None or repr(str(path)) in told


@pytest.mark.parametrize(
    ("array", "told"),
    [
        (np.ones(5), r"shape \(5,\) and type float64"),
        (np.ones((5, 2, 2)), r"shape \(5, 2, 2\)"),
        (np.float64(1.0), r"shape \(\)"),
        (np.ones((0, 3)), r"shape \(0, 3\)"),
        (np.ones((5, 0)), r"shape \(5, 0\)"),
        (np.ones((5, 3), dtype=np.int64), "type int64"),
        (np.ones((5, 3), dtype=np.complex64), "type complex64"),
        (np.ones((5, 4)), r"has 4 features a step, '.*a\.npy' has 3"),
        (np.array([[0.0, 0, 0], [0, np.nan, 0]]), "NaN or infinite feature at its step 1"),
        (np.array([[0.0, 0, -np.inf]]), "NaN or infinite feature at its step 0"),
        (np.array([[{}]], dtype=object), "never loads pickled objects"),
    ],
)
def test_bad_features_are_named(tmp_path: Path, array: Array, told: str) -> None:
    put_features(tmp_path / "run" / "a.npy", np.ones((2, 3)))
    put_features(tmp_path / "walk" / "b.npy", np.asarray(array))
    with pytest.raises(StrettoError, match=rf"walk/b\.npy'.*{told}"):
        read_clips(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 9, 60, 130])
def test_a_truncated_array_is_named(tmp_path: Path, keep: int) -> None:
    path = tmp_path / "run" / "a.npy"
    put_features(path, np.ones((2, 3)))
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(StrettoError, match=r"run/a\.npy' is truncated or no plain \.npy array"):
        read_clips(tmp_path)


def test_a_header_that_makes_no_sense_is_named(tmp_path: Path) -> None:
    path = tmp_path / "run" / "a.npy"
    put_features(path, np.ones((2, 3)))
    path.write_bytes(path.read_bytes().replace(b" 'shape'", b"b'shape'"))
    with pytest.raises(StrettoError, match=r"run/a\.npy' is truncated or no plain \.npy array"):
        read_clips(tmp_path)


def test_a_header_that_asks_for_more_than_there_is_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "run" / "a.npy"
    put_features(path, np.ones((2, 3)))
    path.write_bytes(path.read_bytes().replace(b"(2, 3), }         ", b"(200000000000, 3),}"))
    with pytest.raises(StrettoError, match=r"run/a\.npy' is truncated"):
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


@pytest.mark.parametrize("kind", ["dangling", "circle", "pipe", "folder"])
def test_what_is_no_file_is_no_frame(two: Path, kind: str) -> None:
    path = two / "walk" / "b" / "2.png"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(two / "gone.png" if kind == "dangling" else path)
    with pytest.raises(StrettoError, match=r"walk/b"):
        read_clips(two, SMALL)


@pytest.mark.skipif(os.geteuid() == 0, reason="the superuser may read everything")
def test_a_folder_that_may_not_be_read_is_named(two: Path) -> None:
    (two / "walk").chmod(0)
    try:
        with pytest.raises(StrettoError, match=r"could not list '.*/walk'"):
            read_clips(two, SMALL)
    finally:
        (two / "walk").chmod(0o700)


def test_without_pillow_the_extra_is_named(two: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "PIL.Image", None)
    with pytest.raises(StrettoError, match=r"pip install 'stretto\[video\]'"):
        read_clips(two, SMALL)
