"""The embedded handwriting: lines of text, written by synthetic hands with single-stroke fonts, from a seed.

No word and no writer is in two parts of the split, and the lengths have a long tail.

Shape legend: P dense points of a line, T resampled steps, 2 coordinates, 3 features (dx, dy, pen-up).
"""

import functools
import importlib.resources
import string
from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from stretto.data.readers.npz import cached_set
from stretto.data.sequences import PARTS, Part, SequenceSet, part_of, part_sizes
from stretto.data.synthetic.glyphs import FONTS, font_glyphs
from stretto.data.targets import Transcripts

ALPHABET: Final = " !',-.?" + string.digits + string.ascii_uppercase + string.ascii_lowercase
ONSETS: Final = tuple("b bl br c ch cl d dr f fl g gr h j k l m n p pl pr qu r s sh sl st t th tr v w y z".split(" "))
NUCLEI: Final = tuple("a e i o u ai ea ee ie oa oo ou".split(" "))
CODAS: Final = tuple("b ck d ft g l ll m mp n nd ng nt p r rd rk s sh st t th x z".split(" "))

MEDIAN_CHARACTERS = 10.0
CHARACTERS_SPREAD = 0.9
MAX_CHARACTERS = 58
STEP_TIME = 1.0
STROKE_GAP = 1e-6
GENERATOR_VERSION: Final = 2


@functools.cache
def dictionary(part: Part) -> tuple[str, ...]:
    """The listed English words of one split."""
    text = importlib.resources.files("stretto.data.synthetic").joinpath("words.txt").read_text(encoding="utf-8")
    return tuple(word for word in text.split() if part_of(word) == part)


def random_line(part: Part, *, rng: np.random.Generator) -> str:
    """One line of words of `part`; its number of characters is log-normal, from 1 to about 60."""
    wanted = min(rng.lognormal(np.log(MEDIAN_CHARACTERS), CHARACTERS_SPREAD), MAX_CHARACTERS)
    line = _token(part, rng=rng) if wanted >= 4 else _number(int(wanted), rng=rng)
    while len(line) < wanted:
        mark = rng.random()
        longer = line + ("- " if mark < 0.03 else ", " if mark < 0.09 else " ") + _token(part, rng=rng)
        if len(longer) > MAX_CHARACTERS:
            # Half a word might be a word of another part of the split.
            break
        line = longer
    return line + _pick(".?!", rng=rng) if rng.random() < 0.2 else line


def _pick(choices: Sequence[str], *, rng: np.random.Generator) -> str:
    return choices[int(rng.random() * len(choices))]


def _number(num_digits: int, *, rng: np.random.Generator) -> str:
    return "".join(_pick(string.digits, rng=rng) for _ in range(max(1, num_digits)))


def _token(part: Part, *, rng: np.random.Generator) -> str:
    kind = rng.random()
    if kind < 0.08:
        return _number(1 + int(rng.random() * 4), rng=rng)
    word = _invent_word(part, rng=rng) if kind < 0.4 else _pick(dictionary(part), rng=rng)
    if rng.random() < 0.03:
        word += "'s"
    style = rng.random()
    return word.upper() if style < 0.06 else word.capitalize() if style < 0.25 else word


def _invent_word(part: Part, *, rng: np.random.Generator) -> str:
    """A word that no list has, so that the net must read letters instead of remembering words."""
    while True:
        syllables = [_pick(ONSETS, rng=rng) + _pick(NUCLEI, rng=rng) for _ in range(1 + int(rng.random() * 3))]
        word = "".join(syllables) + _pick(CODAS, rng=rng)
        if part_of(word) == part:
            return word


class Writer:
    """One hand, whose habits are drawn at random; lengths are in capital heights."""

    def __init__(self, rng: np.random.Generator) -> None:
        self.font = str(rng.choice(FONTS))
        self.slant = rng.normal(0.12, 0.2)  # shift to the right per unit of height
        self.size = rng.lognormal(0.0, 0.15)
        self.width = rng.lognormal(0.0, 0.15)  # horizontal stretch
        self.spacing = rng.uniform(-0.05, 0.2)  # extra, between letters
        self.tremor = rng.uniform(0.005, 0.03)  # standard deviation of the smooth error of the hand
        self.drift = rng.uniform(0.0, 0.08)  # amplitude of the baseline's wave
        self.speed = rng.lognormal(np.log(0.19), 0.12)  # distance per time step on a straight stroke
        self.caution = rng.uniform(0.3, 0.9)  # how much curves slow the pen down
        self.looseness = rng.uniform(0.01, 0.06)  # standard deviation of each letter's size and place

    def write(self, text: str, *, rng: np.random.Generator) -> npt.NDArray[np.float32]:
        """Pen movement of one line: features (dx, dy, pen-up), one row per time step."""
        points_P2, stroke_P = self._place(text, rng=rng)
        return self._resample(self._disturb(points_P2, rng=rng), stroke_P)

    def _place(self, text: str, *, rng: np.random.Generator) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.int64]]:
        glyphs = font_glyphs(self.font, ALPHABET)
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
                num_strokes += int(glyph.stroke_P[-1]) + 1
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


def make_handwriting(*, num_train: int = 6000, num_writers: int = 80, seed: int = 0) -> SequenceSet:
    """Write every line; a pure function of its arguments.

    Args:
        num_train: Training lines; validation and test get a tenth as many each, by other writers.
        num_writers: Training writers; validation and test get a quarter as many each.
        seed: Everything follows from it.
    """
    inks, texts, split = [], [], []
    counts, writer_counts = part_sizes(num_train, held_out=10), part_sizes(num_writers, held_out=4)
    for number, (part, count, of_part) in enumerate(zip(PARTS, counts, writer_counts, strict=True)):
        rng = np.random.default_rng([seed, number])
        writers = [Writer(rng) for _ in range(of_part)]
        for _ in range(count):
            text = random_line(part, rng=rng)
            inks.append(writers[rng.integers(of_part)].write(text, rng=rng))
            texts.append(text)
            split.append(number)
    return SequenceSet.from_flat(
        np.concatenate(inks),
        offsets=np.cumsum([0, *map(len, inks)]),
        targets=Transcripts.of(texts),
        split_N=np.array(split, dtype=np.uint8),
        name="handwriting",
    )


def load_handwriting(*, num_train: int = 6000, num_writers: int = 80, seed: int = 0) -> SequenceSet:
    """The embedded set, memory-mapped from the cache; generated in seconds if it is not there yet."""
    identity = [GENERATOR_VERSION, (num_train, num_writers, seed)]
    make = functools.partial(make_handwriting, num_train=num_train, num_writers=num_writers, seed=seed)
    return cached_set(identity, name="handwriting", make=make)
