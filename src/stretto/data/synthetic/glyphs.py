"""Single-stroke letter shapes from the Hershey vector fonts.

Shape legend: P points of a polyline, 2 coordinates (x to the right, y up; the height of a capital is 1).
"""

import dataclasses
import functools
from typing import Any, Final

import numpy as np
import numpy.typing as npt

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

    @property
    def num_strokes(self) -> int:
        """Strokes, so pen lifts."""
        return int(self.stroke_P[-1]) + 1 if len(self.stroke_P) else 0


@functools.cache
def font_glyphs(font: str, characters: str) -> dict[str, Glyph]:
    """The shapes of `characters` in a Hershey font, points evenly spaced along each stroke."""
    marks = MARKS_FROM.get(font, font)
    return {c: _glyph(_strokes(font if c.isalpha() else marks, c)) for c in characters}


def _strokes(font: str, character: str) -> list[npt.NDArray[np.float64]]:
    hershey = _font(font)
    capital = np.concatenate([np.asarray(s, dtype=np.float64) for s in hershey.strokes_for_text("H")])
    top, bottom = capital[:, 1].min(), capital[:, 1].max()
    strokes = [np.asarray(s, dtype=np.float64) for s in hershey.strokes_for_text(character)]
    return [np.stack([s[:, 0], bottom - s[:, 1]], axis=1) / (bottom - top) for s in strokes if len(s)]


@functools.cache
def _font(font: str) -> Any:
    hershey = optional("HersheyFonts").HersheyFonts()
    hershey.load_default_font(font)
    return hershey


def _glyph(strokes: list[npt.NDArray[np.float64]]) -> Glyph:
    if not strokes:
        return Glyph(np.zeros((0, 2)), np.zeros(0, dtype=np.int64), advance=0.6)
    dense = [_evenly_spaced(stroke) for stroke in strokes]
    points_P2 = np.concatenate(dense)
    left = points_P2[:, 0].min()
    points_P2[:, 0] -= left
    stroke_P = np.repeat(np.arange(len(dense)), [len(stroke) for stroke in dense])
    return Glyph(points_P2, stroke_P, advance=float(points_P2[:, 0].max()) + 0.25)


def _evenly_spaced(stroke_P2: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    moved = np.hypot(*np.diff(stroke_P2, axis=0).T)
    travelled_P = np.concatenate([[0.0], np.cumsum(moved)])
    if travelled_P[-1] == 0:
        # A dot: a short mark, so that it takes time to write.
        dot_P2: npt.NDArray[np.float64] = stroke_P2[:1] + np.array([[0.0, 0.0], [0.02, -0.04]])
        return dot_P2
    count = max(2, int(np.ceil(travelled_P[-1] / POINT_SPACING)) + 1)
    at = np.linspace(0.0, travelled_P[-1], count)
    return np.stack([np.interp(at, travelled_P, stroke_P2[:, axis]) for axis in range(2)], axis=1)
