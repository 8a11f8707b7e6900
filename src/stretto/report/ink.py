"""One line of ink as inline SVG.

Shape legend: T steps, 3 features (dx, dy, pen-up), 2 coordinates.
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from stretto.report.page import Html, escaped

HEIGHT_PIXELS = 72
MOST_WIDTH_PIXELS = 1030
MARGIN = 0.12


def ink_svg(ink: Sequence[Sequence[float]], *, label: str) -> Html:
    """Draw the strokes of (dx, dy, pen-up) steps, y pointing up.

    Args:
        ink: One step a point: how far the pen moved to it, and 1 on the last point of a stroke.
        label: What the ink says, for people who do not see it.
    """
    ink_T3: npt.NDArray[np.float64] = np.asarray(ink, dtype=np.float64)
    points_T2 = np.cumsum(ink_T3[:, :2] * np.array([1.0, -1.0]), axis=0)
    low, high = points_T2.min(axis=0), points_T2.max(axis=0)
    margin = MARGIN * max(float(high[1] - low[1]), 0.25 * float(high[0] - low[0]), 1e-3)
    left, top = (low - margin).tolist()
    width, height = (high - low + 2 * margin).tolist()
    scale = min(HEIGHT_PIXELS / height, MOST_WIDTH_PIXELS / width)
    # Coordinates are in pixels from the corner, so that two decimals are enough for ink of any size.
    placed_T2 = (points_T2 - np.array([left, top])) * scale
    return Html(
        f'<svg role="img" aria-label="{escaped(label)}" width="{width * scale:.0f}" height="{height * scale:.0f}" '
        f'viewBox="0 0 {width * scale:.2f} {height * scale:.2f}"><path d="{stroke_path(placed_T2, ink_T3[:, 2])}" '
        'fill="none" stroke="#22303f" stroke-width="1.7" stroke-linecap="round" stroke-linejoin="round"/></svg>'
    )


def stroke_path(points_T2: npt.NDArray[np.float64], pen_up_T: npt.NDArray[np.float64]) -> str:
    """The points as SVG path commands: M begins a stroke, L goes on; a stroke of one point is a dot."""
    begins_T = np.append(True, pen_up_T[:-1] > 0.5)
    ends_T = np.append(pen_up_T[:-1] > 0.5, True)
    commands = []
    for (x, y), begins, ends in zip(points_T2.tolist(), begins_T, ends_T, strict=True):
        at = f"{x:.2f} {y:.2f}"
        if begins:
            commands.append(f"M{at}")
        if not begins or ends:
            commands.append(f"L{at}")
    return "".join(commands)
