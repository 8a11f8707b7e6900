"""Numbers in English and German words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.data import line_pairs, make_number_words
from stretto.data.number_words import ENGLISH_SMALL, ENGLISH_TENS, NumberWordsSettings, in_english, in_german
from stretto.errors import StrettoError


@pytest.mark.parametrize(
    ("number", "english", "german"),
    [
        (0, "nought", "null"),
        (1, "one", "eins"),
        (12, "twelve", "zwölf"),
        (16, "sixteen", "sechzehn"),
        (17, "seventeen", "siebzehn"),
        (20, "twenty", "zwanzig"),
        (21, "twenty-one", "einundzwanzig"),
        (36, "thirty-six", "sechsunddreißig"),
        (70, "seventy", "siebzig"),
        (100, "one hundred", "einhundert"),
        (101, "one hundred and one", "einhunderteins"),
        (111, "one hundred and eleven", "einhundertelf"),
        (999, "nine hundred and ninety-nine", "neunhundertneunundneunzig"),
        (1000, "one thousand", "eintausend"),
        (1001, "one thousand and one", "eintausendeins"),
        (1100, "one thousand one hundred", "eintausendeinhundert"),
        (21_000, "twenty-one thousand", "einundzwanzigtausend"),
        (
            201_015,
            "two hundred and one thousand and fifteen",
            "zweihunderteintausendfünfzehn",
        ),
        (
            764_538,
            "seven hundred and sixty-four thousand five hundred and thirty-eight",
            "siebenhundertvierundsechzigtausendfünfhundertachtunddreißig",
        ),
    ],
)
def test_numbers_in_words(number, english, german):
    assert in_english(number) == english
    assert in_german(number) == german


def _counted(words):
    """The number that English words name, read from left to right."""
    values = {word: value for value, word in enumerate(ENGLISH_SMALL)}
    values |= {word: 20 + 10 * place for place, word in enumerate(ENGLISH_TENS)}
    done, group = 0, 0
    for word in words.replace("-", " ").replace(" and ", " ").split():
        if word == "thousand":
            done, group = group * 1000, 0
        elif word == "hundred":
            group *= 100
        else:
            group += values[word]
    return done + group


@given(st.integers(0, 999_999))
def test_english_words_name_their_number(number):
    assert _counted(in_english(number)) == number


@given(st.integers(0, 999_999), st.integers(0, 999_999))
def test_german_words_are_one_word_and_tell_numbers_apart(one, other):
    assert in_german(one).isalpha()
    assert in_german(one).islower()
    assert (in_german(one) == in_german(other)) == (one == other)


@given(st.integers(1, 999), st.integers(1, 999))
def test_german_thousands_are_put_together_from_both_halves(thousands, rest):
    # Within a number, one is spelt without its last letter.
    head = in_german(thousands).removesuffix("s") if thousands % 100 == 1 else in_german(thousands)
    assert in_german(1000 * thousands + rest) == f"{head}tausend{in_german(rest)}"


@pytest.mark.parametrize("number", [-1, 1_000_000])
def test_other_numbers_are_refused(number):
    for words in (in_english, in_german):
        with pytest.raises(StrettoError, match=f"{number} cannot be put into words.*999,999"):
            words(number)


def test_the_set_is_parallel_text_without_repeats():
    data = make_number_words(NumberWordsSettings(num_train=300))
    pairs = line_pairs(data)
    assert pairs.languages == ("en", "de")
    assert [len(data.part(part)) for part in ("train", "valid", "test")] == [300, 30, 30]
    assert len(set(pairs.sources)) == len(set(pairs.targets)) == 360
    for source, target in zip(pairs.sources, pairs.targets, strict=True):
        german = target.replace(" und ", ", ").split(", ")
        assert 1 <= len(german) <= 5
        if len(german) == 1:
            assert in_german(_counted(source)) == target


def test_the_set_follows_from_its_seed():
    made = [make_number_words(NumberWordsSettings(num_train=50, seed=seed)).digest() for seed in (0, 0, 1)]
    assert made[0] == made[1] != made[2]
