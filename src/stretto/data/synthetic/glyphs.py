"""Single-stroke letter shapes from the Hershey vector fonts.

Shape legend: P points of a polyline, 2 coordinates (x to the right, y up; the height of a capital is 1).
"""

import dataclasses
import functools
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stretto.data.readers.ink import resample_stroke
from stretto.extras import optional

FONTS: Final = ("futural", "rowmans", "cursive", "scripts")
# The script font's figures and marks are drawn with double lines; this one's are single.
MARKS_FROM: Final = {"scripts": "rowmans"}
POINT_SPACING = 0.04


@dataclasses.dataclass(frozen=True, slots=True)
class Glyph:
    """One character: dense points, the stroke that each belongs to, and how far the pen moves on."""

    points_P2: npt.NDArray[np.float64]
    stroke_P: npt.NDArray[np.int64]
    advance: float


@functools.cache
def font_glyphs(font: str, characters: str) -> dict[str, Glyph]:
    """The shapes of `characters` in a Hershey font, points evenly spaced along each stroke."""
    marks = MARKS_FROM.get(font, font)
    return {c: _glyph(_font(font if c.isalpha() else marks), c) for c in characters}


@functools.cache
def _font(font: str) -> Any:
    hershey = optional("HersheyFonts").HersheyFonts()
    hershey.load_default_font(font)
    return hershey


def _glyph(hershey: Any, character: str) -> Glyph:
    capital_P2 = np.concatenate([np.asarray(s, dtype=np.float64) for s in hershey.strokes_for_text("H")])
    top, bottom = capital_P2[:, 1].min(), capital_P2[:, 1].max()
    strokes = [np.asarray(s, dtype=np.float64) for s in hershey.strokes_for_text(character)]
    dense = [_dense(np.stack([s[:, 0], bottom - s[:, 1]], axis=1) / (bottom - top)) for s in strokes if len(s)]
    if not dense:
        return Glyph(np.zeros((0, 2)), np.zeros(0, dtype=np.int64), advance=0.6)
    points_P2 = np.concatenate(dense)
    points_P2[:, 0] -= points_P2[:, 0].min()
    stroke_P = np.repeat(np.arange(len(dense)), [len(stroke) for stroke in dense])
    return Glyph(points_P2, stroke_P, advance=float(points_P2[:, 0].max()) + 0.25)


def _dense(stroke_P2: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    if not np.ptp(stroke_P2, axis=0).any():
        # A dot: a short mark, so that it takes time to write.
        dot_P2: npt.NDArray[np.float64] = stroke_P2[:1] + np.array([[0.0, 0.0], [0.02, -0.04]])
        return dot_P2
    return resample_stroke(stroke_P2, lambda length: max(2, int(np.ceil(length / POINT_SPACING)) + 1))
