"""The embedded set for translation: numbers in words, from English to German.

German puts the ones before the tens ("twenty-one" is "einundzwanzig") and writes a number below a million as one word,
so that the order changes and words that were never seen have to be put together from pieces. Everything follows from a
seed.
"""

from typing import Final

import numpy as np

from stretto.data.readers.parallel_text import LinePairs, parallel_set
from stretto.data.sequences import SequenceSet, part_sizes

ENGLISH_SMALL: Final = (
    "nought one two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen "
    "seventeen eighteen nineteen".split()
)
ENGLISH_TENS: Final = "twenty thirty forty fifty sixty seventy eighty ninety".split()
GERMAN_SMALL: Final = (
    "null ein zwei drei vier fünf sechs sieben acht neun zehn elf zwölf dreizehn vierzehn fünfzehn sechzehn "
    "siebzehn achtzehn neunzehn".split()
)
GERMAN_TENS: Final = "zwanzig dreißig vierzig fünfzig sechzig siebzig achtzig neunzig".split()
LARGEST_NUMBER: Final = 999_999
MAX_NUMBERS_PER_LINE: Final = 5


def make_number_words(*, num_train: int = 5000, seed: int = 0) -> SequenceSet:
    """The set; a pure function of its arguments. Each line has up to five numbers of any size.

    Args:
        num_train: Training lines; validation and test get a tenth as many each. No line occurs twice.
        seed: Everything follows from it.
    """
    counts = part_sizes(num_train, held_out=10)
    rng = np.random.default_rng([seed, 0x2021])
    lines: dict[tuple[int, ...], None] = {}
    while len(lines) < sum(counts):
        magnitudes = rng.uniform(0.0, np.log(LARGEST_NUMBER + 2), size=rng.integers(1, MAX_NUMBERS_PER_LINE + 1))
        lines[tuple((np.exp(magnitudes) - 1.0).astype(int).tolist())] = None
    pairs = LinePairs(
        sources=[_join_words([in_english(number) for number in line], "and") for line in lines],
        targets=[_join_words([in_german(number) for number in line], "und") for line in lines],
        languages=("en", "de"),
    )
    # Lines of one small number run out soon and come early: every part should get some.
    split_N = rng.permutation(np.repeat(np.arange(3, dtype=np.uint8), counts))
    return parallel_set(pairs, split_N=split_N, name="number words")


def in_english(number: int) -> str:
    """A number from 0 to 999,999 in English words."""
    if number < 20:
        return ENGLISH_SMALL[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return ENGLISH_TENS[tens - 2] + (f"-{ENGLISH_SMALL[ones]}" if ones else "")
    if number < 1000:
        hundreds, rest = divmod(number, 100)
        return f"{ENGLISH_SMALL[hundreds]} hundred" + (f" and {in_english(rest)}" if rest else "")
    thousands, rest = divmod(number, 1000)
    between = " and " if rest < 100 else " "
    return f"{in_english(thousands)} thousand" + (between + in_english(rest) if rest else "")


def in_german(number: int) -> str:
    """A number from 0 to 999,999 as a German word."""
    # One is "eins" where it ends a number, and "ein" within.
    return _german_stem(number) + ("s" if number % 100 == 1 else "")


def _german_stem(number: int) -> str:
    if number < 20:
        return GERMAN_SMALL[number]
    if number < 100:
        tens, ones = divmod(number, 10)
        return (f"{GERMAN_SMALL[ones]}und" if ones else "") + GERMAN_TENS[tens - 2]
    unit, name = (100, "hundert") if number < 1000 else (1000, "tausend")
    count, rest = divmod(number, unit)
    return f"{_german_stem(count)}{name}" + (_german_stem(rest) if rest else "")


def _join_words(words: list[str], conjunction: str) -> str:
    return ", ".join(words[:-1]) + f" {conjunction} {words[-1]}" if len(words) > 1 else words[0]
