"""Lines of text for the embedded handwriting: words that no other split has, lengths with a long tail."""

import functools
import importlib.resources
import string
import zlib
from collections.abc import Sequence
from typing import Final

import numpy as np

from stretto.data.sequences import Part

ALPHABET: Final = " !',-.?" + string.digits + string.ascii_uppercase + string.ascii_lowercase
ONSETS: Final = tuple("b bl br c ch cl d dr f fl g gr h j k l m n p pl pr qu r s sh sl st t th tr v w y z".split(" "))
NUCLEI: Final = tuple("a e i o u ai ea ee ie oa oo ou".split(" "))
CODAS: Final = tuple("b ck d ft g l ll m mp n nd ng nt p r rd rk s sh st t th x z".split(" "))

MEDIAN_CHARACTERS = 10.0
SPREAD = 0.9
MOST_CHARACTERS = 58


def part_of(word: str) -> Part:
    """The split that owns a word: the same for every form of it, whatever the seed."""
    share = zlib.crc32(word.lower().encode()) % 100
    return "train" if share < 80 else "valid" if share < 90 else "test"


@functools.cache
def dictionary(part: Part) -> tuple[str, ...]:
    """The listed English words of one split."""
    text = importlib.resources.files("stretto.data").joinpath("words.txt").read_text(encoding="utf-8")
    return tuple(word for word in text.split() if part_of(word) == part)


def random_line(part: Part, *, rng: np.random.Generator) -> str:
    """One line of words of `part`; its number of characters is log-normal, from 1 to about 60."""
    wanted = min(rng.lognormal(np.log(MEDIAN_CHARACTERS), SPREAD), MOST_CHARACTERS)
    line = _token(part, rng=rng) if wanted >= 4 else _number(int(wanted), rng=rng)
    while len(line) < wanted:
        mark = rng.random()
        longer = line + ("- " if mark < 0.03 else ", " if mark < 0.09 else " ") + _token(part, rng=rng)
        if len(longer) > MOST_CHARACTERS:
            # Half a word might be a word of another part.
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
    word = _invented(part, rng=rng) if kind < 0.4 else _pick(dictionary(part), rng=rng)
    if rng.random() < 0.03:
        word += "'s"
    style = rng.random()
    return word.upper() if style < 0.06 else word.capitalize() if style < 0.25 else word


def _invented(part: Part, *, rng: np.random.Generator) -> str:
    """A word that no list has, so that the net must read letters instead of remembering words."""
    while True:
        syllables = [_pick(ONSETS, rng=rng) + _pick(NUCLEI, rng=rng) for _ in range(1 + int(rng.random() * 3))]
        word = "".join(syllables) + _pick(CODAS, rng=rng)
        if part_of(word) == part:
            return word
