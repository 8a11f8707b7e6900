"""Where everything in a picture goes: rows from top to bottom, few crossings, arrows that run straight where they can.

A layered drawing after Sugiyama et al. (1981): rows by the longest path within each band, an order within rows by
barycentres, and positions by least squares under the distances that boxes need. A long arrow takes a place in every row
that it passes.
"""

from dataclasses import dataclass, field
from typing import Final, final

from stretto.graph.draw_panel import Box, Delayed, Look, Panel

TITLE_SIZE: Final = 13.0
LINE_SIZE: Final = 11.0
BOX_GAP: Final = 20.0
ROW_GAP: Final = 30.0
TRACK: Final = 10.0
BAND_TOP: Final = 34.0
BAND_BOTTOM: Final = 18.0
BAND_GAP: Final = 14.0
BAND_SIDE: Final = 22.0
LANE: Final = 13.0
MOST_WIDTH: Final = 190.0
LEAST_WIDTH: Final = 74.0
SWEEPS: Final = 24


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Rectangle:
    """A place, by its left upper corner."""

    x: float
    y: float
    width: float
    height: float

    @property
    def middle(self) -> float:
        """Half way across."""
        return self.x + self.width / 2

    @property
    def bottom(self) -> float:
        """The lower edge."""
        return self.y + self.height


@final
@dataclass(slots=True)
class Layout:
    """A panel with a place for everything.

    Attributes:
        width: Of all.
        height: Of all.
        bands: Places of the bands.
        boxes: Places of the boxes.
        arrows: Corners of the arrows within a step, from top to bottom; two for each row in between.
        delayed: Corners of the arrows into another step.
    """

    width: float = 0.0
    height: float = 0.0
    bands: list[Rectangle] = field(default_factory=list)
    boxes: list[Rectangle] = field(default_factory=list)
    arrows: list[list[tuple[float, float]]] = field(default_factory=list)
    delayed: list[list[tuple[float, float]]] = field(default_factory=list)
