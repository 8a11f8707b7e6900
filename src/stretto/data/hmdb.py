"""HMDB51's split files: one a class, a line a clip, which is marked 1 for train, 2 for test or 0 for unused."""

import dataclasses
from pathlib import Path
from typing import Final, final

import numpy as np
import numpy.typing as npt

from stretto.data.clips import SPLITS_FOLDER, Clip, ClipFolder
from stretto.errors import StrettoError

UNUSED: Final = 0
TEST: Final = 2
MARKS: Final = ("0", "1", "2")


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MarkedClips:
    """The clips that split files use.

    Attributes:
        clips: Those marked for train or test.
        split_N: 0 train, 1 test.
        notes: What was left out, or is missing.
    """

    clips: tuple[Clip, ...]
    split_N: npt.NDArray[np.uint8]
    notes: tuple[str, ...]


def has_split_files(folder: Path) -> bool:
    """Whether there is a folder of split files."""
    return (folder / SPLITS_FOLDER).is_dir()


def mark_clips(folder: Path, found: ClipFolder, *, number: int) -> MarkedClips:
    """Take train and test from `testTrainMulti_7030_splits/<class>_test_split<number>.txt`.

    Raises:
        StrettoError: A class has no such file, a line cannot be read, or a clip is not listed.
    """
    marks = [_marks(folder, name=name, number=number) for name in found.names]
    listed = sum(map(len, marks))
    marks_N = []
    for clip in found.clips:
        mark = marks[clip.label].get(clip.name)
        if mark is None:
            raise StrettoError(
                f"{str(clip.path)!r} is not listed in {_file_name(found.names[clip.label], number)}",
                fix=f"List it as '{clip.name}.avi 0' to leave it out, or remove it.",
            )
        marks_N.append(mark)
    used = tuple(clip for clip, mark in zip(found.clips, marks_N, strict=True) if mark != UNUSED)
    if not used:
        raise StrettoError(
            f"split {number} in {str(folder / SPLITS_FOLDER)!r} uses none of the clips",
            fix="Mark clips with 1 for train and 2 for test.",
        )
    unused, missing = len(marks_N) - len(used), listed - len(marks_N)
    notes = [f"train and test are those of split {number} in {SPLITS_FOLDER}"]
    notes += [f"{unused} clips that the split marks as unused are left out"] if unused else []
    notes += [f"{missing} clips that the split lists are not there"] if missing else []
    return MarkedClips(
        clips=used,
        split_N=np.array([mark == TEST for mark in marks_N if mark != UNUSED], dtype=np.uint8),
        notes=tuple(notes),
    )


def _file_name(name: str, number: int) -> str:
    return f"{name}_test_split{number}.txt"


def _marks(folder: Path, *, name: str, number: int) -> dict[str, int]:
    path = folder / SPLITS_FOLDER / _file_name(name, number)
    marks: dict[str, int] = {}
    for place, line in enumerate(_lines(path, root=folder.resolve()), start=1):
        words = line.rsplit(maxsplit=1)
        if not words:
            continue
        clip = words[0].strip().removesuffix(".avi")
        if len(words) < 2 or words[1] not in MARKS or marks.get(clip, int(words[1])) != int(words[1]):
            raise StrettoError(
                f"line {place} of {str(path)!r} is {line[:80]!r}",
                fix="Write the name of a clip and 1 (train), 2 (test) or 0 (unused), each clip once.",
            )
        marks[clip] = int(words[1])
    return marks


def _lines(path: Path, *, root: Path) -> list[str]:
    try:
        if not path.resolve().is_relative_to(root):
            raise StrettoError(f"{str(path)!r} leads out of {str(root)!r}", fix="Copy what the link leads to instead.")
        if path.exists() and not path.is_file():
            raise StrettoError(f"{str(path)!r} is no file that can be read", fix="Copy it again.")
        return path.read_text(encoding="utf-8").splitlines()
    except FileNotFoundError:
        raise StrettoError(
            f"there is no split file {str(path)!r}",
            fix=f"Put it there, or remove the folder {SPLITS_FOLDER} to have a split drawn at random.",
        ) from None
    except (OSError, RuntimeError, UnicodeDecodeError) as error:
        raise StrettoError(f"could not read {str(path)!r} ({error})", fix="Copy the file again.") from error
