"""A writer: how one hand turns a line of text into pen movement.

Shape legend: P dense points of a line, T resampled steps, 2 coordinates, 3 features (dx, dy, pen-up).
"""

import dataclasses

import numpy as np
import numpy.typing as npt

from stretto.data.glyphs import FONTS, font_glyphs

STEP_TIME = 1.0
STROKE_GAP = 1e-6


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Writer:
    """The habits of one hand; lengths are in capital heights.

    Attributes:
        font: The letter shapes it learnt.
        slant: Shift to the right per unit of height.
        size: Overall scale.
        width: Horizontal stretch.
        spacing: Extra room between letters.
        tremor: Standard deviation of the smooth error of the hand.
        drift: Standard deviation of the baseline's wander.
        speed: Distance per time step on a straight stroke.
        caution: How much curves slow the pen down.
        looseness: Random variation of each letter's size and place.
    """

    font: str
    slant: float
    size: float
    width: float
    spacing: float
    tremor: float
    drift: float
    speed: float
    caution: float
    looseness: float

    @classmethod
    def draw(cls, rng: np.random.Generator) -> "Writer":
        """A random hand."""
        return cls(
            font=str(rng.choice(FONTS)),
            slant=float(rng.normal(0.12, 0.2)),
            size=float(rng.lognormal(0.0, 0.15)),
            width=float(rng.lognormal(0.0, 0.15)),
            spacing=float(rng.uniform(-0.05, 0.2)),
            tremor=float(rng.uniform(0.005, 0.03)),
            drift=float(rng.uniform(0.0, 0.08)),
            speed=float(rng.lognormal(np.log(0.19), 0.12)),
            caution=float(rng.uniform(0.3, 0.9)),
            looseness=float(rng.uniform(0.01, 0.06)),
        )

    def write(self, text: str, *, alphabet: str, rng: np.random.Generator) -> npt.NDArray[np.float32]:
        """Pen movement of one line: features (dx, dy, pen-up), one row a time step."""
        points_P2, stroke_P = self._place(text, alphabet=alphabet, rng=rng)
        points_P2 = self._disturb(points_P2, rng=rng)
        return self._resample(points_P2, stroke_P)

    def _place(
        self, text: str, *, alphabet: str, rng: np.random.Generator
    ) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        glyphs = font_glyphs(self.font, alphabet)
        jitter = rng.normal(0.0, self.looseness, size=(len(text), 4))
        parts, strokes = [], []
        x, num_strokes = 0.0, 0
        for character, (dx, dy, grow, tilt) in zip(text, jitter, strict=True):
            glyph = glyphs[character]
            shape_P2 = glyph.points_P2 * (1.0 + grow)
            if len(shape_P2):
                shape_P2 = shape_P2 + np.array([dx, dy])
                shape_P2[:, 0] += tilt * shape_P2[:, 1] + x
                parts.append(shape_P2)
                strokes.append(glyph.stroke_P + num_strokes)
                num_strokes += glyph.num_strokes
            x += glyph.advance + self.spacing
        points_P2 = np.concatenate(parts)
        points_P2[:, 0] = (points_P2[:, 0] + self.slant * points_P2[:, 1]) * self.width
        return points_P2 * self.size, np.concatenate(strokes)

    def _disturb(self, points_P2: npt.NDArray[np.float64], *, rng: np.random.Generator) -> npt.NDArray[np.float64]:
        kernel = np.hanning(11)
        kernel /= np.sqrt((kernel**2).sum())
        noise_P2 = rng.normal(size=(len(points_P2) + len(kernel) - 1, 2))
        smooth_P2 = np.stack([np.convolve(noise, kernel, mode="valid") for noise in noise_P2.T], axis=1)
        disturbed_P2 = points_P2 + self.tremor * smooth_P2
        phase, wave = rng.uniform(0.0, 2 * np.pi), rng.uniform(0.1, 0.4)
        disturbed_P2[:, 1] += self.drift * np.sin(wave * points_P2[:, 0] + phase)
        return disturbed_P2

    def _resample(self, points_P2: npt.NDArray[np.float64], stroke_P: npt.NDArray[np.int64]) -> npt.NDArray[np.float32]:
        """Points at equal times: the pen is slow in curves and at the ends of a stroke."""
        moved_P2 = np.diff(points_P2, axis=0, prepend=points_P2[:1])
        first_P = np.diff(stroke_P, prepend=-1) != 0
        distance_P = np.where(first_P, 0.0, np.hypot(*moved_P2.T))
        turn_P = np.abs(np.diff(np.unwrap(np.arctan2(moved_P2[:, 1], moved_P2[:, 0])), append=0.0))
        last_P = np.append(first_P[1:], True)
        turn_P[last_P] = 0.0
        slowness_P = 1.0 + self.caution * np.minimum(turn_P, 1.5) + 0.8 * (first_P | last_P)
        time_P = np.cumsum(distance_P * slowness_P / (self.speed * self.size) + STROKE_GAP)

        begin_K, end_K = time_P[first_P], time_P[last_P]
        count_K = np.maximum(2, np.rint((end_K - begin_K) / STEP_TIME).astype(np.int64) + 1)
        offset_K = np.cumsum(count_K) - count_K
        within_T = np.arange(count_K.sum()) - np.repeat(offset_K, count_K)
        share_T = within_T / np.repeat(count_K - 1, count_K)
        at_T = np.repeat(begin_K, count_K) + share_T * np.repeat(end_K - begin_K, count_K)

        features_T3 = np.zeros((len(at_T), 3), dtype=np.float32)
        for axis in range(2):
            sampled_T = np.interp(at_T, time_P, points_P2[:, axis])
            features_T3[:, axis] = np.diff(sampled_T, prepend=sampled_T[:1])
        features_T3[offset_K + count_K - 1, 2] = 1.0
        return features_T3
