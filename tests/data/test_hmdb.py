"""HMDB51's split files."""

from pathlib import Path

import numpy as np
import pytest
from clip_files import SIDE, SMALL, names, put_clip, put_features, put_split, put_two_classes, values

from stretto.data import Framing, open_sequences, write_npz
from stretto.data.clips import SPLITS_FOLDER
from stretto.data.frames import read_clips
from stretto.errors import StrettoError


@pytest.fixture
def two(tmp_path: Path) -> Path:
    return put_two_classes(tmp_path)


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


def test_split_files_tell_train_test_and_unused(marked: Path) -> None:
    data = read_clips(marked, SMALL)
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


def test_a_listed_clip_that_is_missing_is_told(marked: Path) -> None:
    put_split(marked, "run", (marked / SPLITS_FOLDER / "run_test_split1.txt").read_text() + "gone.avi 1\n")
    assert "1 clips that the split lists are not there" in read_clips(marked, SMALL).notes


def test_a_clip_that_is_not_listed_is_refused(marked: Path) -> None:
    put_clip(marked / "walk" / "new", [1])
    with pytest.raises(StrettoError, match=r"walk/new' is not listed in walk_test_split1\.txt.*'new\.avi 0'"):
        read_clips(marked, SMALL)


@pytest.mark.parametrize(
    "line", ["a.avi", "a.avi 3", "a.avi one", "a.avi -1", "walk #1(x).avi 1\nwalk #1(x).avi 2", "7"]
)
def test_a_line_of_a_split_file_that_makes_no_sense_is_quoted(marked: Path, line: str) -> None:
    put_split(marked, "walk", line)
    with pytest.raises(StrettoError, match=r"line [12] of '.*walk_test_split1\.txt' is '"):
        read_clips(marked, SMALL)


def test_a_split_file_that_is_no_text_is_refused(marked: Path) -> None:
    put_split(marked, "walk", "").write_bytes(b"\xff\xfe")
    with pytest.raises(StrettoError, match=r"could not read '.*walk_test_split1\.txt'"):
        read_clips(marked, SMALL)


def test_a_split_that_uses_no_clip_is_refused(two: Path) -> None:
    put_split(two, "run", "a.avi 0")
    put_split(two, "walk", "b.avi 0")
    with pytest.raises(StrettoError, match="uses none of the clips"):
        read_clips(two, SMALL)


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
    with pytest.raises(StrettoError, match=r"run_test_split1\.txt' leads out of"):
        read_clips(marked, SMALL)


def test_a_folder_of_split_files_is_no_class(marked: Path) -> None:
    assert open_sequences(marked).lengths_N.tolist() == [2] * 12
