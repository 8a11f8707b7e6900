"""The embedded set of images: digits drawn with single-stroke fonts by synthetic hands.

Shape legend: N images, Q shapes (a digit of a font), P points of a shape, H rows and W columns of an image, S either of
the two, 2 coordinates.
"""

from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stretto.data.readers.npz import cached_set
from stretto.data.sequences import PARTS, SequenceSet, part_sizes
from stretto.data.synthetic.glyphs import font_glyphs
from stretto.data.targets import Labels

Array = npt.NDArray[Any]
GENERATOR_VERSION: Final = 1
NAME: Final = "drawn digits"
DIGITS: Final = "0123456789"
# The script font's digits are borrowed from the second of these.
FONTS: Final = ("futural", "rowmans", "cursive")
SIDE: Final = 28
IMAGES_PER_CHUNK: Final = 500
"""Images drawn at once, to limit memory."""
WAVES: Final = 2


def make_drawn_digits(*, num_train: int = 6000, seed: int = 0) -> SequenceSet:
    """Draw every image, 28 x 28 bytes of grey, one row of pixels per step; a pure function of its arguments.

    Args:
        num_train: Training images; validation and test get a sixth as many each.
        seed: Everything follows from it.
    """
    points_QP2, joined_QP = _make_shapes()
    images, labels = [], []
    counts = part_sizes(num_train, held_out=6)
    for number, count in enumerate(counts):
        rng = np.random.default_rng([seed, number, 0xD161])
        labels_N = rng.permutation(np.arange(count) % len(DIGITS))
        labels.append(labels_N)
        images += [
            _draw(points_QP2, joined_QP, labels_N[first : first + IMAGES_PER_CHUNK], rng=rng)
            for first in range(0, count, IMAGES_PER_CHUNK)
        ]
    rows_SF = np.concatenate(images).reshape(-1, SIDE)
    return SequenceSet.from_flat(
        rows_SF,
        offsets=np.arange(0, len(rows_SF) + 1, SIDE),
        targets=Labels.check(np.concatenate(labels), names=DIGITS, source=NAME),
        split_N=np.repeat(np.arange(len(PARTS), dtype=np.uint8), counts),
        split_complete=True,
        name=NAME,
    )


def load_drawn_digits(*, num_train: int = 6000, seed: int = 0) -> SequenceSet:
    """The embedded set, memory-mapped from the cache; generated in a second or two if it is not there yet."""
    identity = [GENERATOR_VERSION, (num_train, seed)]
    return cached_set(identity, name=NAME, make=lambda: make_drawn_digits(num_train=num_train, seed=seed))


def _make_shapes() -> tuple[Array, Array]:
    """The digits of all fonts, each centred, of height 1, and padded with points that no stroke joins.

    The points along the strokes (Q, P, 2), where digit d of font f is shape f * 10 + d; and whether a stroke goes from
    a point to the next (Q, P - 1).
    """
    glyphs = [font_glyphs(font, DIGITS)[digit] for font in FONTS for digit in DIGITS]
    most = max(len(glyph.stroke_P) for glyph in glyphs)
    points_QP2 = np.zeros((len(glyphs), most, 2))
    joined_QP = np.zeros((len(glyphs), most - 1), dtype=bool)
    for shape_P2, row_P, glyph in zip(points_QP2, joined_QP, glyphs, strict=True):
        low_2, high_2 = glyph.points_P2.min(axis=0), glyph.points_P2.max(axis=0)
        count = len(glyph.stroke_P)
        shape_P2[:count] = (glyph.points_P2 - (low_2 + high_2) / 2) / (high_2 - low_2)[1]
        row_P[: count - 1] = np.diff(glyph.stroke_P) == 0
    return points_QP2, joined_QP


def _draw(points_QP2: Array, joined_QP: Array, labels_N: Array, *, rng: np.random.Generator) -> Array:
    """Images (N, H, W) of the digits, each by its own hand and pen."""
    count = len(labels_N)
    shape_N = rng.integers(len(FONTS), size=count) * len(DIGITS) + labels_N
    points_NP2 = _distort(points_QP2[shape_N], rng=rng)
    ink_NHW = _draw_ink(points_NP2, joined_QP[shape_N], width_N=rng.uniform(0.6, 1.5, size=count))
    grey_NHW = np.minimum(1.0, rng.uniform(0.9, 1.6, size=(count, 1, 1)) * ink_NHW)
    grey_NHW *= rng.uniform(0.55, 1.0, size=(count, 1, 1))
    grey_NHW += rng.normal(scale=rng.uniform(0.0, 0.12, size=(count, 1, 1)), size=grey_NHW.shape)
    bytes_NHW: Array = np.rint(255 * np.clip(grey_NHW, 0.0, 1.0)).astype(np.uint8)
    return bytes_NHW


def _distort(points_NP2: Array, *, rng: np.random.Generator) -> Array:
    """Shapes as they are written, in pixels: bent, slanted, turned, of any size and place."""
    count = len(points_NP2)
    bent_NP2 = points_NP2.copy()
    for _ in range(WAVES):
        wave_N21 = rng.normal(scale=3.0, size=(count, 2, 1))
        phase_NP = (points_NP2 @ wave_N21)[..., 0] + rng.uniform(0.0, 2 * np.pi, size=(count, 1))
        bent_NP2 += rng.normal(scale=0.06, size=(count, 1, 2)) * np.sin(phase_NP)[..., None]
    slant_N, turn_N = rng.normal(0.1, 0.25, size=count), rng.normal(0.0, 0.15, size=count)
    height_N = rng.uniform(12.0, 22.0, size=count)
    width_N = height_N * rng.lognormal(0.0, 0.2, size=count)
    cos_N, sin_N = np.cos(turn_N), np.sin(turn_N)
    # Widened, slanted and turned; rows count downwards.
    across_N2 = np.stack([cos_N * width_N, slant_N * width_N * cos_N - sin_N * height_N], axis=1)
    down_N2 = -np.stack([sin_N * width_N, slant_N * width_N * sin_N + cos_N * height_N], axis=1)
    placed_NP2 = bent_NP2 @ np.stack([across_N2, down_N2], axis=2)
    return placed_NP2 + (SIDE - 1) / 2 + rng.uniform(-3.0, 3.0, size=(count, 1, 2))


def _draw_ink(points_NP2: Array, joined_NP: Array, *, width_N: Array) -> Array:
    """How much ink lies on each pixel (N, H, W): about 1 in the middle of a stroke, and soft at its edges.

    Each point leaves a round blot of ink for the way to its neighbours. A blot is a product of a row and a column, so
    that all blots of an image are one product of matrices.
    """
    way_NP = np.hypot(*np.moveaxis(np.diff(points_NP2, axis=1), 2, 0)) * joined_NP
    amount_NP = (np.pad(way_NP, ((0, 0), (0, 1))) + np.pad(way_NP, ((0, 0), (1, 0)))) / 2
    amount_NP /= np.sqrt(2 * np.pi) * width_N[:, None]
    apart_NP2S = (np.arange(SIDE) - points_NP2[..., None]) / width_N[:, None, None, None]
    blot_NP2S = np.exp(-0.5 * apart_NP2S**2)
    down_NHP = np.moveaxis(blot_NP2S[:, :, 1] * amount_NP[..., None], 1, 2)
    ink_NHW: Array = down_NHP @ blot_NP2S[:, :, 0]
    return ink_NHW
