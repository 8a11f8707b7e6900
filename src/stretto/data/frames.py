"""Video clips as sequences: a frame's pixels, or a row of features, a step.

Shape legend: S steps of all clips, T steps of one clip, N clips, F pixel values or features of a step.
"""

import dataclasses
import struct
import tokenize
import warnings
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, final

import numpy as np
import numpy.lib.format as npy
import numpy.typing as npt

from stretto.data.clips import Clip, find_clips
from stretto.data.hmdb import has_split_files, mark_clips
from stretto.data.sequences import SequenceSet
from stretto.data.targets import Labels
from stretto.errors import StrettoError
from stretto.extras import optional

Array = npt.NDArray[Any]
SMALLEST_FRAME: Final = 8
LARGEST_FRAME: Final = 256
FORMATS: Final = ("JPEG", "PNG")
# Of eight bits a value; Pillow would clip others instead of scaling them.
MODES: Final = ("1", "L", "LA", "P", "PA", "RGB", "RGBA", "CMYK", "YCbCr")
MEBIBYTE: Final = 1 << 20


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Framing:
    """How clips are read.

    Attributes:
        size: Width and height that frames are scaled to.
        colour: Three values a pixel instead of its brightness.
        split_file: Which of HMDB51's three splits, where its split files are there.
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
        """Values a pixel."""
        return 3 if self.colour else 1

    @classmethod
    def of(cls, num_features: int) -> "Framing | None":
        """The size and colour of frames with that many values; None if no frame has."""
        # No square is three times another, so that the number alone tells.
        for colour, channels in ((False, 1), (True, 3)):
            size = round((num_features / channels) ** 0.5)
            if size * size * channels == num_features and SMALLEST_FRAME <= size <= LARGEST_FRAME:
                return cls(size=size, colour=colour)
        return None

    def __str__(self) -> str:
        return f"{self.size} x {self.size} pixels in {'colour' if self.colour else 'grey'}"


def read_clips(folder: Path, framing: Framing | None = None) -> SequenceSet:
    """Read clips with one class each: `folder/class/clip/frame.jpg` (or .png), or `folder/class/clip.npy`.

    Frames are scaled to one small square, whatever their shape, and kept as bytes in memory: rows of pixels, each with
    its colours side by side. Transparency is ignored. An array of features has shape (steps, features).

    Args:
        folder: Holds a folder for each class; optionally also HMDB51's split files, in its
            `testTrainMulti_7030_splits`. Without them a split is drawn.
        framing: Size and colour of the frames, and the split; by default 32 x 32 in grey, and the first.

    Raises:
        StrettoError: A file is missing or cannot be used; the message names it.
    """
    framing = framing or Framing()
    found = find_clips(folder)
    marked = mark_clips(folder, found, number=framing.split_file) if has_split_files(folder) else None
    if marked is None and framing.split_file != Framing().split_file:
        raise no_split_files(folder)
    clips = found.clips if marked is None else marked.clips
    steps_SF, lengths = _frames(clips, framing) if clips[0].frames else _features(clips)
    kind = f"frames of {framing}" if clips[0].frames else f"steps of {steps_SF.dtype} features"
    return SequenceSet.from_flat(
        steps_SF,
        offsets=np.cumsum([0, *lengths]),
        targets=Labels(values_N=np.array([clip.label for clip in clips], dtype=np.int64), names=found.names),
        split_N=None if marked is None else marked.split_N,
        name=folder.resolve().name,
        notes=(
            f"{len(steps_SF):,} {kind}: {steps_SF.nbytes / MEBIBYTE:,.1f} MiB of memory",
            *(() if marked is None else marked.notes),
        ),
    )


def no_split_files(path: Path) -> StrettoError:
    """What to say when a split was chosen and there is nothing to choose from."""
    return StrettoError(
        f"{str(path)!r} has no split files to choose one of",
        fix="Put testTrainMulti_7030_splits into the folder of the clips, or leave --split-file out.",
    )


def _frames(clips: Sequence[Clip], framing: Framing) -> tuple[Array, list[int]]:
    image = optional("PIL.Image")
    lengths = [len(clip.frames) for clip in clips]
    pixels_SF = np.empty((sum(lengths), framing.size * framing.size * framing.channels), dtype=np.uint8)
    paths = (clip.path / name for clip in clips for name in clip.frames)
    with warnings.catch_warnings():
        # Pillow refuses the largest images and merely warns of large ones.
        warnings.simplefilter("error", image.DecompressionBombWarning)
        for row, path in enumerate(paths):
            pixels_SF[row] = _pixels(path, framing, image=image)
    return pixels_SF, lengths


def _pixels(path: Path, framing: Framing, *, image: Any) -> Array:
    try:
        with image.open(path, formats=FORMATS) as frame:
            if frame.mode not in MODES:
                raise StrettoError(
                    f"the frame {str(path)!r} is of Pillow's mode {frame.mode!r}",
                    fix="Save it with eight bits a value, in grey or colour.",
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
            f"the frame {str(path)!r} is damaged or no image ({error})", fix="Write it again, or remove it."
        ) from error
    scaled = plain.resize((framing.size, framing.size), image.Resampling.BILINEAR)
    return np.asarray(scaled, dtype=np.uint8).reshape(-1)


def _features(clips: Sequence[Clip]) -> tuple[Array, list[int]]:
    """All steps end to end, of the widest type among the files."""
    lengths, types = [], []
    width = 0
    for clip in clips:
        steps_TF = _mapped(clip.path)
        if steps_TF.ndim != 2 or 0 in steps_TF.shape or not np.issubdtype(steps_TF.dtype, np.floating):
            raise StrettoError(
                f"{str(clip.path)!r} has shape {steps_TF.shape} and type {steps_TF.dtype}",
                fix="Save floating-point numbers of shape (steps, features), at least one of each.",
            )
        if width not in (0, steps_TF.shape[1]):
            raise StrettoError(
                f"{str(clip.path)!r} has {steps_TF.shape[1]} features a step, {str(clips[0].path)!r} has {width}",
                fix="Give all clips the same features.",
            )
        width = steps_TF.shape[1]
        lengths.append(len(steps_TF))
        types.append(steps_TF.dtype)
    features_SF = np.empty((sum(lengths), width), dtype=np.result_type(*types))
    ends = np.cumsum(lengths)
    for clip, end, length in zip(clips, ends, lengths, strict=True):
        features_SF[end - length : end] = _mapped(clip.path)
        bad = np.flatnonzero(~np.isfinite(features_SF[end - length : end]).all(axis=1))
        if len(bad):
            raise StrettoError(
                f"{str(clip.path)!r} has a NaN or infinite feature at its step {bad[0]}",
                fix="Clean or remove that clip; Stretto never replaces values silently.",
            )
    return features_SF, lengths


def _mapped(path: Path) -> Array:
    """An array on disk, of which a wrong header cannot ask for memory."""
    try:
        return npy.open_memmap(path, mode="r")
    except (OSError, ValueError, TypeError, SyntaxError, tokenize.TokenError, ArithmeticError, MemoryError) as error:
        raise StrettoError(
            f"{str(path)!r} is truncated or no plain .npy array ({error})",
            fix="Save it again with np.save; Stretto never loads pickled objects.",
        ) from error
