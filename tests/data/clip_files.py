"""Small clips on disk, for the tests of their readers.

Shape legend: T steps of a clip, F values of a step.
"""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from stretto.data import Framing, Labels, SequenceSet
from stretto.data.clips import SPLITS_FOLDER

Array = npt.NDArray[Any]
SIDE = 8
SMALL = Framing(size=SIDE)


def put_frame(path: Path, value: int | Array, *, mode: str | None = None) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    pixels = np.full((SIDE, SIDE), value, dtype=np.uint8) if isinstance(value, int) else value
    frame = pytest.importorskip("PIL.Image").fromarray(pixels)
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
