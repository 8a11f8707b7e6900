"""Ink: pen points to features, the one form in which all online handwriting is learnt.

Shape legend: S points of all sequences, P points of one line, T steps, 3 features (dx, dy, pen-up).
"""

from typing import Any

import numpy as np
import numpy.typing as npt

from stretto.errors import StrettoError

POINTS_PER_HEIGHT = 7.0
MOST_STEPS = 1_000_000


def pen_features(
    xy_S2: npt.NDArray[Any],
    *,
    pen_down_S: npt.NDArray[Any] | None,
    offsets: npt.NDArray[Any],
    source: str,
) -> npt.NDArray[np.float32]:
    """Flat pen positions to (dx, dy, pen-up): differences in units of each sequence's height.

    Args:
        xy_S2: Positions.
        pen_down_S: 1 on the first point of each stroke; None takes each sequence as one stroke.
        offsets: Where each sequence begins.
        source: Named in errors.
    """
    is_flat = offsets.ndim == 1 and np.issubdtype(offsets.dtype, np.integer)
    bounds: npt.NDArray[np.int64] = offsets.astype(np.int64) if is_flat else np.zeros(0, dtype=np.int64)
    starts, lengths_N = bounds[:-1], bounds[1:] - bounds[:-1]
    shapes_fit = xy_S2.ndim == 2 and xy_S2.shape[1] == 2 and xy_S2.dtype.kind in "iuf"
    flags_fit = pen_down_S is None or (pen_down_S.shape == xy_S2.shape[:1] and pen_down_S.dtype.kind in "biuf")
    bounds_fit = len(starts) > 0 and bounds[0] == 0 and bounds[-1] == len(xy_S2) and lengths_N.min() > 0
    if not (shapes_fit and flags_fit and bounds_fit):
        raise StrettoError(
            f"{source}: `xy` of shape {xy_S2.shape}, `pen_down` and `offsets` do not fit together",
            fix="Give `xy` as (points, 2), a `pen_down` flag a point, and rising `offsets` up to the number of points.",
        )
    bad = np.flatnonzero(~np.isfinite(xy_S2).all(axis=1))
    if len(bad):
        sequence = int(np.searchsorted(bounds, bad[0], side="right")) - 1
        raise StrettoError(
            f"{source}: sequence {sequence} has a NaN or infinite position at its point {bad[0] - starts[sequence]}",
            fix="Clean or remove that sequence; Stretto never replaces values silently.",
        )
    y_S = xy_S2[:, 1].astype(np.float64)
    height_N = np.maximum.reduceat(y_S, starts) - np.minimum.reduceat(y_S, starts)
    scale_S = np.repeat(1.0 / np.maximum(height_N, 1e-6), lengths_N)
    features_S3 = np.zeros((len(xy_S2), 3), dtype=np.float32)
    moved_S2 = np.diff(xy_S2.astype(np.float64), axis=0, prepend=xy_S2[:1].astype(np.float64))
    moved_S2[starts] = 0.0
    features_S3[:, :2] = np.clip(moved_S2 * scale_S[:, None], -8.0, 8.0)
    first_S = np.zeros(len(xy_S2), dtype=bool)
    first_S[starts] = True
    if pen_down_S is not None:
        first_S |= pen_down_S.astype(bool)
    features_S3[:, 2] = np.append(first_S[1:], True)
    return features_S3


def line_features(strokes: list[npt.NDArray[np.float64]], *, source: str = "a line") -> npt.NDArray[np.float32]:
    """The strokes of one written line to (dx, dy, pen-up), resampled evenly along the pen's path.

    The unit is the typical height of the writing; y points up in the result, down in the strokes, as tablets have it.

    Args:
        strokes: Positions of each stroke's points, as (x, y) rows.
        source: Named in errors.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        heights = [np.ptp(stroke[:, 1]) for stroke in strokes]
        extent = float(np.ptp(np.concatenate(strokes), axis=0).max())
        unit = float(np.quantile(heights, 0.75)) or extent or 1.0
        path = float(sum(np.hypot(*np.diff(stroke, axis=0).T).sum() for stroke in strokes))
    far = max(path, extent)
    if not far / unit * POINTS_PER_HEIGHT <= MOST_STEPS:
        raise StrettoError(
            f"{source}: the pen travels {far:.3g} in writing of height {unit:.3g}, which is over {MOST_STEPS} steps",
            fix="Check the coordinates, or cut the writing into lines.",
        )
    resampled = [_even_steps(stroke / unit) for stroke in strokes]
    joined_T2 = np.concatenate(resampled)
    features_T3 = np.zeros((len(joined_T2), 3), dtype=np.float32)
    features_T3[:, :2] = np.diff(joined_T2, axis=0, prepend=joined_T2[:1]) * np.array([1.0, -1.0])
    features_T3[np.cumsum([len(stroke) for stroke in resampled]) - 1, 2] = 1.0
    return features_T3


def _even_steps(stroke_P2: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    moved = np.hypot(*np.diff(stroke_P2, axis=0).T)
    travelled_P = np.concatenate([[0.0], np.cumsum(moved)])
    count = max(2, round(travelled_P[-1] * POINTS_PER_HEIGHT) + 1) if travelled_P[-1] > 0 else 1
    at = np.linspace(0.0, travelled_P[-1], count)
    return np.stack([np.interp(at, travelled_P, stroke_P2[:, axis]) for axis in range(2)], axis=1)
