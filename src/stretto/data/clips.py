"""Video clips in a folder: a folder a class, and in it, for each clip, a folder of frames or an array of features."""

import collections
import dataclasses
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final, final

from stretto.errors import StrettoError

FRAME_ENDINGS: Final = (".jpg", ".jpeg", ".png")
FEATURES_ENDING: Final = ".npy"
VIDEO_ENDINGS: Final = (".avi", ".mp4", ".mkv", ".mov", ".mpg", ".mpeg", ".webm")
SPLITS_FOLDER: Final = "testTrainMulti_7030_splits"
DIGITS: Final = re.compile(r"([0-9]+)")


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Clip:
    """One clip.

    Attributes:
        path: The folder of its frames, or the file of its features.
        label: The number of its class.
        frames: The names of its frames, in order; empty for features.
    """

    path: Path
    label: int
    frames: tuple[str, ...]

    @property
    def name(self) -> str:
        """As split files name it, without an ending."""
        return self.path.name if self.frames else self.path.stem


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class ClipFolder:
    """The clips of all classes, and the names of the classes."""

    clips: tuple[Clip, ...]
    names: tuple[str, ...]


def holds_clips(folder: Path) -> bool:
    """Whether two levels below `folder` there is a file of features or a video, or three levels below a frame."""
    classes = (entry for entry in _shown(folder) if entry.is_dir())
    return any(_looks_like_a_clip(entry) for group in classes for entry in _shown(Path(group.path)))


def find_clips(folder: Path) -> ClipFolder:
    """All clips below a folder; frames are in the natural order of their names: frame2 comes before frame10.

    Names that begin with a dot are left out, and so are files that are neither frames nor features.

    Raises:
        StrettoError: A class has no clips, a clip has no frames or is still a video, frames and features are mixed, or
            a link leads out of the folder.
    """
    root = folder.resolve()
    clips: list[Clip] = []
    names: list[str] = []
    for entry in _inside(folder, root):
        if not entry.is_dir() or entry.name == SPLITS_FOLDER:
            continue
        if not entry.name.isprintable():
            raise StrettoError(f"the class {entry.path!r} has a name that cannot be shown", fix="Rename the folder.")
        clips += _clips_of_class(Path(entry.path), root=root, label=len(names))
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
    return ClipFolder(clips=tuple(clips), names=tuple(names))


def _clips_of_class(folder: Path, *, root: Path, label: int) -> list[Clip]:
    entries = _inside(folder, root)
    clips = []
    for entry in entries:
        if entry.is_dir():
            clips.append(Clip(path=Path(entry.path), label=label, frames=_frames(Path(entry.path), root=root)))
        elif _ends(entry, (FEATURES_ENDING,)):
            _refuse_special(entry)
            clips.append(Clip(path=Path(entry.path), label=label, frames=()))
    known = {clip.name for clip in clips}
    video = next((entry for entry in entries if _ends(entry, VIDEO_ENDINGS) and Path(entry).stem not in known), None)
    if video is not None:
        raise StrettoError(
            f"{video.path!r} is a video whose frames are not there",
            fix=f"Write them to a folder {Path(video).stem!r} beside it, for example with: ffmpeg -i VIDEO %05d.jpg.",
        )
    if not clips:
        raise StrettoError(f"the class {str(folder)!r} has no clips", fix="Put clips there, or remove the folder.")
    return clips


def _frames(folder: Path, *, root: Path) -> tuple[str, ...]:
    names = []
    for entry in _inside(folder, root):
        if _ends(entry, FRAME_ENDINGS):
            _refuse_special(entry)
            names.append(entry.name)
    if not names:
        raise StrettoError(
            f"the clip {str(folder)!r} has no frames", fix="Put .jpg or .png files there, or remove the folder."
        )
    times = collections.Counter(Path(name).stem for name in names)
    twice = next((stem for stem, count in times.items() if count > 1), None)
    if twice is not None:
        raise StrettoError(f"the clip {str(folder)!r} has two frames {twice!r}", fix="Keep one of them.")
    return tuple(names)


def _inside(folder: Path, root: Path) -> list["os.DirEntry[str]"]:
    """The entries of a folder, in natural order; links may lead anywhere below `root`, but not out of it."""
    try:
        entries = sorted(_shown(folder), key=_natural)
        for entry in entries:
            if entry.is_symlink() and not Path(entry).resolve().is_relative_to(root):
                raise StrettoError(
                    f"{entry.path!r} is a link that leads out of {str(root)!r}", fix="Copy what it leads to instead."
                )
    except (OSError, RuntimeError) as error:
        # Links that lead in circles are a RuntimeError.
        raise StrettoError(f"could not list {str(folder)!r} ({error})", fix="Check its permissions.") from error
    return entries


def _natural(entry: "os.DirEntry[str]") -> tuple[list[str | int], str]:
    # Text and digits take turns, so that a number is only ever compared with a number.
    parts = DIGITS.split(entry.name)
    return [int(part) if place % 2 else part for place, part in enumerate(parts)], entry.name


def _refuse_special(entry: "os.DirEntry[str]") -> None:
    if not entry.is_file():
        raise StrettoError(f"{entry.path!r} is no file that can be read", fix="Copy it again, or remove it.")


def _shown(folder: Path) -> Iterable["os.DirEntry[str]"]:
    with os.scandir(folder) as entries:
        yield from (entry for entry in entries if not entry.name.startswith("."))


def _looks_like_a_clip(entry: "os.DirEntry[str]") -> bool:
    if entry.is_dir():
        return any(_ends(frame, FRAME_ENDINGS) for frame in _shown(Path(entry.path)))
    return _ends(entry, (FEATURES_ENDING, *VIDEO_ENDINGS))


def _ends(entry: "os.DirEntry[str]", endings: tuple[str, ...]) -> bool:
    return entry.name.lower().endswith(endings)
