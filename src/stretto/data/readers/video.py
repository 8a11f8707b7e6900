"""Video clips as sequences: the pixels of a frame, or a row of features, per step.

    folder/class/clip/frame0.jpg, frame1.jpg, ...        frames, in the natural order of their names
    folder/class/clip.npy                                or features of shape (steps, features)
    folder/testTrainMulti_7030_splits/                   and, if you like, the split files of HMDB51

Shape legend: S steps of all clips, T steps of one clip, N clips, F pixel values or features per step.
"""

import collections
import dataclasses
import os
import re
import struct
import tokenize
import warnings
import zlib
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import numpy.lib.format as npy
import numpy.typing as npt

from stretto.checks import check_path
from stretto.data.readers.text import decode_text
from stretto.data.sequences import SequenceSet
from stretto.data.targets import Labels
from stretto.errors import StrettoError
from stretto.extras import optional

Array = npt.NDArray[Any]
SMALLEST_FRAME: Final = 8
LARGEST_FRAME: Final = 256
FORMATS: Final = ("JPEG", "PNG")
# Eight bits per value; Pillow would clip others instead of scaling them.
MODES: Final = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
MEBIBYTE: Final = 1 << 20
FRAME_ENDINGS: Final = (".jpg", ".jpeg", ".png")
FEATURE_ENDINGS: Final = (".npy",)
VIDEO_ENDINGS: Final = (".avi", ".mp4", ".mkv", ".mov", ".mpg", ".mpeg", ".webm")
SPLITS_FOLDER: Final = "testTrainMulti_7030_splits"
_DIGITS: Final = re.compile(r"([0-9]+)")
UNUSED: Final = 0
TEST: Final = 2
MARKS: Final = ("0", "1", "2")


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Framing:
    """How clips are read.

    Attributes:
        size: Width and height that frames are scaled to.
        colour: Three values per pixel instead of its brightness.
        split_file: Which of HMDB51's three splits to use, if its split files are there.
    """

    size: int = 32
    colour: bool = False
    split_file: int = 1

    def __post_init__(self) -> None:
        if not SMALLEST_FRAME <= self.size <= LARGEST_FRAME:
            raise StrettoError(
                f"frames cannot be read at {self.size} x {self.size} pixels",
                fix=f"Choose {SMALLEST_FRAME} to {LARGEST_FRAME}.",
            )

    @property
    def channels(self) -> int:
        """Values per pixel."""
        return 3 if self.colour else 1

    @classmethod
    def of(cls, num_features: int) -> "Framing | None":
        """The size and colour of frames with that many values; None if no frame has."""
        # No square is three times another square, so the number alone decides.
        for colour, channels in ((False, 1), (True, 3)):
            size = round((num_features / channels) ** 0.5)
            if size * size * channels == num_features and SMALLEST_FRAME <= size <= LARGEST_FRAME:
                return cls(size=size, colour=colour)
        return None

    def __str__(self) -> str:
        return f"{self.size} x {self.size} pixels in {'colour' if self.colour else 'grey'}"


def read_clips(folder: Path, framing: Framing | None = None) -> SequenceSet:
    """Read clips with one class each: `folder/class/clip/frame.jpg` (or .png), or `folder/class/clip.npy`.

    Frames are scaled to one small square, whatever their shape, and kept in memory as bytes: rows of pixels, the
    colours of each side by side. Transparency is ignored. An array of features has shape (steps, features).

    Args:
        folder: Holds a folder for each class; optionally also HMDB51's split files, in its
            `testTrainMulti_7030_splits`. Without them a split is drawn.
        framing: Size and colour of the frames, and the split; by default 32 x 32 in grey, and the first.

    Raises:
        StrettoError: A file is missing or cannot be used; the message names it.
    """
    framing = framing or Framing()
    folder = check_path(folder, name="folder", owner="read_clips")
    clips, names = _find_clips(folder)
    split_N: npt.NDArray[np.uint8] | None = None
    notes: list[str] = []
    if (folder / SPLITS_FOLDER).is_dir():
        clips, split_N, notes = _apply_split_files(folder, clips, names, number=framing.split_file)
    elif framing.split_file != Framing().split_file:
        raise no_split_files(folder)
    steps_SF, lengths = _read_frames(clips, framing) if clips[0].frames else _read_features(clips)
    kind = f"frames of {framing}" if clips[0].frames else f"steps of {steps_SF.dtype} features"
    return SequenceSet.from_flat(
        steps_SF,
        offsets=np.cumsum([0, *lengths]),
        targets=Labels(values_N=np.array([clip.label for clip in clips], dtype=np.int64), names=tuple(names)),
        split_N=split_N,
        name=folder.resolve().name,
        notes=(f"{len(steps_SF):,} {kind}: {steps_SF.nbytes / MEBIBYTE:,.1f} MiB of memory", *notes),
    )


def no_split_files(path: Path) -> StrettoError:
    """The error when a split was chosen and there are no split files."""
    return StrettoError(
        f"{str(path)!r} has no split files to choose from",
        fix="Put testTrainMulti_7030_splits into the folder of the clips, or leave --split-file out.",
    )


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Clip:
    """The folder of a clip's frames, whose names are in order, or the file of its features, without frames."""

    path: Path
    name: str
    """As split files have it, without an ending."""
    label: int
    frames: tuple[str, ...]


def holds_clips(folder: Path) -> bool:
    """Whether two levels below `folder` there is a file of features or a video, or three levels below a frame."""
    classes = (entry for entry in _visible_entries(folder) if entry.is_dir())
    return any(_looks_like_a_clip(entry) for group in classes for entry in _visible_entries(Path(group.path)))


def _find_clips(folder: Path) -> tuple[list[_Clip], list[str]]:
    """All clips below a folder and the names of their classes; frame2 comes before frame10.

    Names that begin with a dot are left out, and so are files that are neither frames nor features.
    """
    root = folder.resolve()
    clips: list[_Clip] = []
    names: list[str] = []
    for entry in _list_entries(folder, root):
        if not entry.is_dir() or entry.name == SPLITS_FOLDER:
            continue
        if not entry.name.isprintable():
            raise StrettoError(f"the class {entry.path!r} has a name that cannot be shown", fix="Rename the folder.")
        clips += _find_clips_of_class(Path(entry.path), root=root, label=len(names))
        names.append(entry.name)
    if not clips:
        raise StrettoError(
            f"there are no clips below {str(folder)!r}", fix="Lay them out as class/clip/frame.jpg or class/clip.npy."
        )
    mixed = next((clip for clip in clips if bool(clip.frames) != bool(clips[0].frames)), None)
    if mixed is not None:
        raise StrettoError(
            f"{str(clips[0].path)!r} and {str(mixed.path)!r} are frames and features in one set",
            fix="Keep one kind, or put them in two folders.",
        )
    return clips, names


def _find_clips_of_class(folder: Path, *, root: Path, label: int) -> list[_Clip]:
    entries = _list_entries(folder, root)
    clips = [
        _Clip(path=Path(entry), name=entry.name, label=label, frames=_list_frames(Path(entry), root=root))
        for entry in entries
        if entry.is_dir()
    ]
    clips += [
        _Clip(path=Path(entry), name=Path(entry).stem, label=label, frames=())
        for entry in _select_files([entry for entry in entries if not entry.is_dir()], FEATURE_ENDINGS)
    ]
    known = {clip.name for clip in clips}
    videos = (Path(entry) for entry in entries if entry.name.lower().endswith(VIDEO_ENDINGS))
    video = next((path for path in videos if path.stem not in known), None)
    if video is not None:
        raise StrettoError(
            f"{str(video)!r} is a video whose frames are not there",
            fix=f"Write them to a folder {video.stem!r} beside it, for example with: ffmpeg -i VIDEO %05d.jpg.",
        )
    if not clips:
        raise StrettoError(f"the class {str(folder)!r} has no clips", fix="Put clips there, or remove the folder.")
    return clips


def _list_frames(folder: Path, *, root: Path) -> tuple[str, ...]:
    names = tuple(entry.name for entry in _select_files(_list_entries(folder, root), FRAME_ENDINGS))
    if not names:
        raise StrettoError(
            f"the clip {str(folder)!r} has no frames", fix="Put .jpg or .png files there, or remove the folder."
        )
    times = collections.Counter(Path(name).stem for name in names)
    twice = next((stem for stem, count in times.items() if count > 1), None)
    if twice is not None:
        raise StrettoError(f"the clip {str(folder)!r} has two frames {twice!r}", fix="Keep one of them.")
    return names


def _list_entries(folder: Path, root: Path) -> list["os.DirEntry[str]"]:
    """The entries of a folder, in natural order; links may lead anywhere below `root`, but not out of it."""
    try:
        entries = sorted(_visible_entries(folder), key=_natural_key)
        for entry in entries:
            if entry.is_symlink() and not Path(entry).resolve().is_relative_to(root):
                raise StrettoError(
                    f"{entry.path!r} is a link that leads out of {str(root)!r}", fix="Copy what it leads to instead."
                )
    except (OSError, RuntimeError) as error:
        # Links that lead in circles are a RuntimeError.
        raise StrettoError(f"could not list {str(folder)!r} ({error})", fix="Check its permissions.") from error
    return entries


def _natural_key(entry: "os.DirEntry[str]") -> tuple[list[str | int], str]:
    # Text and digits alternate, so a number is only ever compared with a number.
    parts = _DIGITS.split(entry.name)
    return [int(part) if place % 2 else part for place, part in enumerate(parts)], entry.name


def _select_files(entries: list["os.DirEntry[str]"], endings: tuple[str, ...]) -> list["os.DirEntry[str]"]:
    """The entries with one of these endings, which must be files."""
    found = [entry for entry in entries if entry.name.lower().endswith(endings)]
    special = next((entry for entry in found if not entry.is_file()), None)
    if special is not None:
        raise StrettoError(f"{special.path!r} is not a file that can be read", fix="Copy it again, or remove it.")
    return found


def _visible_entries(folder: Path) -> Iterable["os.DirEntry[str]"]:
    with os.scandir(folder) as entries:
        yield from (entry for entry in entries if not entry.name.startswith("."))


def _looks_like_a_clip(entry: "os.DirEntry[str]") -> bool:
    if entry.is_dir():
        return any(frame.name.lower().endswith(FRAME_ENDINGS) for frame in _visible_entries(Path(entry)))
    return entry.name.lower().endswith(FEATURE_ENDINGS + VIDEO_ENDINGS)


def _apply_split_files(
    folder: Path, clips: list[_Clip], names: list[str], *, number: int
) -> tuple[list[_Clip], npt.NDArray[np.uint8], list[str]]:
    """The clips that a split uses, their part (0 train, 1 test), and notes of what was left out.

    Each line of `testTrainMulti_7030_splits/<class>_test_split<number>.txt` names a clip and marks it 1 for train, 2
    for test or 0 for unused.
    """
    paths = [folder / SPLITS_FOLDER / f"{name}_test_split{number}.txt" for name in names]
    marks = [_read_marks(path, root=folder.resolve()) for path in paths]
    unlisted = next((clip for clip in clips if clip.name not in marks[clip.label]), None)
    if unlisted is not None:
        raise StrettoError(
            f"{str(unlisted.path)!r} is not listed in {paths[unlisted.label].name}",
            fix=f"List it as '{unlisted.name}.avi 0' to leave it out, or remove it.",
        )
    marks_N = [marks[clip.label][clip.name] for clip in clips]
    used = [clip for clip, mark in zip(clips, marks_N, strict=True) if mark != UNUSED]
    if not used:
        raise StrettoError(
            f"split {number} in {str(folder / SPLITS_FOLDER)!r} uses none of the clips",
            fix="Mark clips with 1 for train and 2 for test.",
        )
    unused, missing = len(clips) - len(used), sum(map(len, marks)) - len(clips)
    notes = [f"train and test are those of split {number} in {SPLITS_FOLDER}"]
    notes += [f"{unused} clips that the split marks as unused are left out"] if unused else []
    notes += [f"{missing} clips that the split lists are not there"] if missing else []
    return used, np.array([mark == TEST for mark in marks_N if mark != UNUSED], dtype=np.uint8), notes


def _read_marks(path: Path, *, root: Path) -> dict[str, int]:
    listed = [entry for entry in _list_entries(path.parent, root) if entry.name == path.name]
    if not _select_files(listed, (".txt",)):
        raise StrettoError(
            f"there is no split file {str(path)!r}",
            fix=f"Put it there, or remove the folder {SPLITS_FOLDER} to have a split drawn at random.",
        )
    marks: dict[str, int] = {}
    for place, line in enumerate(decode_text(path).splitlines(), start=1):
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


def _read_frames(clips: Sequence[_Clip], framing: Framing) -> tuple[Array, list[int]]:
    image = optional("PIL.Image")
    lengths = [len(clip.frames) for clip in clips]
    pixels_SF = np.empty((sum(lengths), framing.size * framing.size * framing.channels), dtype=np.uint8)
    paths = (clip.path / name for clip in clips for name in clip.frames)
    with warnings.catch_warnings():
        # Pillow refuses the largest images and merely warns of large ones.
        warnings.simplefilter("error", image.DecompressionBombWarning)
        for row, path in enumerate(paths):
            pixels_SF[row] = _read_pixels(path, framing, image=image)
    return pixels_SF, lengths


def _read_pixels(path: Path, framing: Framing, *, image: Any) -> Array:
    try:
        with image.open(path, formats=FORMATS) as frame:
            if frame.mode not in MODES:
                raise StrettoError(
                    f"the frame {str(path)!r} is of Pillow's mode {frame.mode!r}",
                    fix="Save it with eight bits per value, in grey or colour.",
                )
            if getattr(frame, "n_frames", 1) > 1:
                raise StrettoError(
                    f"the frame {str(path)!r} holds {frame.n_frames} pictures", fix="Save each as a file of its own."
                )
            plain = frame.convert("RGB" if framing.colour else "L")
    except (image.DecompressionBombError, image.DecompressionBombWarning) as error:
        raise StrettoError(
            f"the frame {str(path)!r} is too large ({error})", fix="Save it at the size of a video's frame."
        ) from error
    except StrettoError:
        raise
    except (OSError, SyntaxError, ValueError, EOFError, struct.error, zlib.error) as error:
        raise StrettoError(
            f"the frame {str(path)!r} is damaged or not an image ({error})", fix="Write it again, or remove it."
        ) from error
    scaled = plain.resize((framing.size, framing.size), image.Resampling.BILINEAR)
    return np.asarray(scaled, dtype=np.uint8).reshape(-1)


def _read_features(clips: Sequence[_Clip]) -> tuple[Array, list[int]]:
    """All steps end to end, in the widest type among the files."""
    lengths, types = [], []
    width = 0
    for clip in clips:
        steps_TF = _map_array(clip.path)
        if steps_TF.ndim != 2 or 0 in steps_TF.shape or not np.issubdtype(steps_TF.dtype, np.floating):
            raise StrettoError(
                f"{str(clip.path)!r} has shape {steps_TF.shape} and type {steps_TF.dtype}",
                fix="Save floating-point numbers of shape (steps, features), at least one of each.",
            )
        if width not in (0, steps_TF.shape[1]):
            raise StrettoError(
                f"{str(clip.path)!r} has {steps_TF.shape[1]} features per step, {str(clips[0].path)!r} has {width}",
                fix="Give all clips the same features.",
            )
        width = steps_TF.shape[1]
        lengths.append(len(steps_TF))
        types.append(steps_TF.dtype)
    features_SF = np.empty((sum(lengths), width), dtype=np.result_type(*types))
    ends = np.cumsum(lengths)
    for clip, end, length in zip(clips, ends, lengths, strict=True):
        features_SF[end - length : end] = _map_array(clip.path)
        bad = np.flatnonzero(~np.isfinite(features_SF[end - length : end]).all(axis=1))
        if len(bad):
            raise StrettoError(
                f"{str(clip.path)!r} has a NaN or infinite feature at its step {bad[0]}",
                fix="Clean or remove that clip; Stretto never replaces values silently.",
            )
    return features_SF, lengths


def _map_array(path: Path) -> Array:
    """An array on disk; a wrong header cannot make it allocate memory."""
    try:
        return npy.open_memmap(path, mode="r")
    except (OSError, ValueError, TypeError, SyntaxError, tokenize.TokenError, ArithmeticError, MemoryError) as error:
        raise StrettoError(
            f"{str(path)!r} is truncated or not a plain .npy array ({error})",
            fix="Save it again with np.save; Stretto never loads pickled objects.",
        ) from error
