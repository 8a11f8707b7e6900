"""Data sets that are generated from a seed: handwriting, drawn digits, numbers in words."""

import re
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.data import (
    PARTS,
    Labels,
    SequenceSet,
    Transcripts,
    line_pairs,
    load_drawn_digits,
    load_handwriting,
    make_drawn_digits,
    make_handwriting,
    make_number_words,
    part_of,
)
from stretto.data.synthetic.digits import SIDE
from stretto.data.synthetic.handwriting import ALPHABET, Writer
from stretto.data.synthetic.number_words import ENGLISH_SMALL, ENGLISH_TENS, in_english, in_german

SMALL = {"num_train": 40, "num_writers": 8}


@pytest.fixture(scope="module")
def many():
    return make_handwriting(num_train=600)


def texts(data):
    return [data.targets[index] for index in range(len(data))]


def test_everything_follows_from_the_seed():
    one, same, other = (make_handwriting(**SMALL, seed=seed) for seed in (0, 0, 1))
    assert one.digest() == same.digest()
    assert texts(one) != texts(other)
    assert one.lengths_N.tolist() != other.lengths_N.tolist()


def test_lines_are_as_many_as_asked_and_their_lengths_have_a_long_tail(many):
    assert np.bincount(many.split_N).tolist() == [600, 60, 60]
    assert (many.name, many.num_features, many.features_SF.dtype, many.notes) == ("handwriting", 3, np.float32, ())
    assert many.lengths_N.min() < 40
    assert 120 < np.median(many.lengths_N) < 300
    assert 700 < many.lengths_N.max() < 1300
    assert np.quantile(many.lengths_N, 0.95) > 3 * np.median(many.lengths_N)
    assert isinstance(many.targets, Transcripts)
    assert set(many.targets.alphabet()) <= set(ALPHABET)
    assert all(text and text == text.strip() for text in texts(many))


def test_words_are_of_their_part_alone(many):
    words = {part: set() for part in PARTS}
    for number, text in zip(many.split_N, texts(many), strict=True):
        words[PARTS[number]] |= set(re.findall("[a-z]+", re.sub(r"'s\b", "", text.lower())))
    strays = {part: sorted(word for word in found if part_of(word) != part) for part, found in words.items()}
    assert strays == {"train": [], "valid": [], "test": []}
    assert min(map(len, words.values())) > 100


def test_writers_are_of_their_part_alone(monkeypatch):
    writers = []
    write = Writer.write

    def recorded(self, text, **options):
        writers.append(self)
        return write(self, text, **options)

    monkeypatch.setattr(Writer, "write", recorded)
    data = make_handwriting(**SMALL)
    parts = {writer: set() for writer in writers}
    for writer, part in zip(writers, data.split_N, strict=True):
        parts[writer].add(int(part))
    assert all(len(of_writer) == 1 for of_writer in parts.values())
    counts = np.bincount([part for of_writer in parts.values() for part in of_writer])
    assert (counts <= (8, 2, 2)).all()
    assert counts[0] > 4


def test_ink_is_movement_with_pen_lifts(many):
    features = many.features_SF
    last_steps = np.cumsum(many.lengths_N) - 1
    assert set(np.unique(features[:, 2]).tolist()) == {0.0, 1.0}
    assert (features[last_steps, 2] == 1).all()
    assert (features[many.starts_N, :2] == 0).all()
    assert np.abs(features[:, :2]).max() < 20


@pytest.mark.parametrize(
    ("load", "small"), [(load_handwriting, SMALL), (load_drawn_digits, {"num_train": 30, "seed": 5})]
)
def test_a_set_is_made_once_and_then_mapped(monkeypatch, tmp_path, assert_same_set, load, small):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path))
    first = load(**small)
    (cached,) = tmp_path.iterdir()
    status = cached.stat()
    with monkeypatch.context() as patch:
        make = load.__name__.replace("load", "make")
        patch.setattr(f"{load.__module__}.{make}", lambda **_: pytest.fail("it was made again"))
        again = load(**small)
    assert (cached.stat().st_ino, cached.stat().st_mtime_ns) == (status.st_ino, status.st_mtime_ns)
    assert again.memory_mapped
    assert (again.name, again.notes) == (first.name, ())
    assert_same_set(first, again)
    for change in ({"seed": 9}, {"num_train": 41}):
        load(**small | change)
    assert len(list(tmp_path.iterdir())) == 3


Array = npt.NDArray[Any]


def pixels(data: SequenceSet) -> Array:
    places = zip(data.starts_N, data.lengths_N, strict=True)
    return np.stack([data.features_SF[start : start + length] for start, length in places]).astype(np.float64)


def labels(data: SequenceSet) -> Array:
    assert isinstance(data.targets, Labels)
    return data.targets.values_N


@pytest.fixture(scope="module")
def drawn() -> SequenceSet:
    return make_drawn_digits(num_train=1200)


def test_parts_have_their_share_of_every_digit(drawn: SequenceSet) -> None:
    assert np.bincount(drawn.split_N).tolist() == [1200, 200, 200]
    assert drawn.features_SF.dtype == np.uint8
    assert drawn.num_features == SIDE
    assert set(drawn.lengths_N.tolist()) == {SIDE}
    for part in PARTS:
        counts = np.bincount(labels(drawn.part(part)))
        assert counts.tolist() == [len(drawn.part(part)) // 10] * 10
    assert isinstance(drawn.targets, Labels)
    assert drawn.targets.names == tuple("0123456789")
    assert drawn.notes == ()
    for few in (1, 7):
        assert np.bincount(make_drawn_digits(num_train=few).split_N).tolist() == [few, 1, 1]


def test_everything_follows_from_the_settings(drawn: SequenceSet) -> None:
    assert make_drawn_digits(num_train=1200).digest() == drawn.digest()
    other = make_drawn_digits(num_train=1200, seed=1)
    assert (pixels(other) != pixels(drawn)).any(axis=(1, 2)).all()


def test_every_image_has_its_own_ink_on_paper(drawn: SequenceSet) -> None:
    images = pixels(drawn)
    assert len({image.tobytes() for image in images}) == len(drawn)
    assert (images.max(axis=(1, 2)) > 100).all()
    assert (np.quantile(images, 0.25, axis=(1, 2)) < 30).all()
    inked = np.where(images > 0.5 * images.max(axis=(1, 2), keepdims=True), images, 0.0)
    for axis in (1, 2):
        profile = inked.sum(axis=axis)
        centre = profile @ np.arange(SIDE) / profile.sum(axis=1)
        assert (np.abs(centre - (SIDE - 1) / 2) < 8).all()


def test_the_mean_image_of_a_digit_is_a_poor_classifier(drawn: SequenceSet) -> None:
    train, test = drawn.part("train"), drawn.part("test")
    means = np.stack([pixels(train)[labels(train) == digit].mean(axis=0) for digit in range(10)])
    apart = ((pixels(test)[:, None] - means) ** 2).sum(axis=(2, 3))
    right = (apart.argmin(axis=1) == labels(test)).mean()
    assert 0.25 < right < 0.9


@pytest.mark.parametrize(
    ("number", "english", "german"),
    [
        (0, "nought", "null"),
        (1, "one", "eins"),
        (21, "twenty-one", "einundzwanzig"),
        (101, "one hundred and one", "einhunderteins"),
        (1001, "one thousand and one", "eintausendeins"),
        (1100, "one thousand one hundred", "eintausendeinhundert"),
        (201_015, "two hundred and one thousand and fifteen", "zweihunderteintausendfünfzehn"),
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
def test_german_words_are_one_word_of_one_number(one, other):
    assert in_german(one).isalpha()
    assert in_german(one).islower()
    assert (in_german(one) == in_german(other)) == (one == other)


@given(st.integers(1, 999), st.integers(1, 999))
def test_german_thousands_are_put_together_from_both_halves(thousands, rest):
    # Within a number, one is spelt without its last letter.
    head = in_german(thousands).removesuffix("s") if thousands % 100 == 1 else in_german(thousands)
    assert in_german(1000 * thousands + rest) == f"{head}tausend{in_german(rest)}"


def test_the_set_is_parallel_text_without_repeats_that_follows_from_its_seed():
    data, same, other = (make_number_words(num_train=300, seed=seed) for seed in (0, 0, 1))
    assert data.digest() == same.digest() != other.digest()
    pairs = line_pairs(data)
    assert pairs.languages == ("en", "de")
    assert [len(data.part(part)) for part in ("train", "valid", "test")] == [300, 30, 30]
    assert len(set(pairs.sources)) == len(set(pairs.targets)) == 360
    for source, target in zip(pairs.sources, pairs.targets, strict=True):
        german = target.replace(" und ", ", ").split(", ")
        assert 1 <= len(german) <= 5
        if len(german) == 1:
            assert in_german(_counted(source)) == target
