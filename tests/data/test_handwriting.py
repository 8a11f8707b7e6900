"""The embedded handwriting."""

import dataclasses
import re

import numpy as np
import pytest

from stretto.data import PARTS, HandwritingSettings, Transcripts, handwriting, load_handwriting
from stretto.data.handwriting import cached_path, make_handwriting
from stretto.data.lines import ALPHABET, part_of
from stretto.data.writer import Writer

SMALL = HandwritingSettings(num_train=40, num_writers=8)


@pytest.fixture(scope="module")
def many():
    return make_handwriting(HandwritingSettings(num_train=1500))


def texts(data):
    return [data.targets[index] for index in range(len(data))]


def test_the_seed_says_everything(assert_same_set):
    assert_same_set(make_handwriting(SMALL), make_handwriting(SMALL))


def test_another_seed_is_other_ink_and_text():
    one, other = make_handwriting(SMALL), make_handwriting(dataclasses.replace(SMALL, seed=1))
    assert texts(one) != texts(other)
    assert one.lengths_N.tolist() != other.lengths_N.tolist()


def test_sizes_are_as_asked(many):
    assert np.bincount(many.split_N).tolist() == [1500, 150, 150]
    assert many.num_features == 3
    assert many.features_SF.dtype == np.float32
    assert many.name == "handwriting"
    assert many.notes == ()


def test_lengths_have_a_long_tail(many):
    assert many.lengths_N.min() < 40
    assert 120 < np.median(many.lengths_N) < 300
    assert 700 < many.lengths_N.max() < 1300
    assert np.quantile(many.lengths_N, 0.95) > 3 * np.median(many.lengths_N)


def test_every_transcript_can_be_spelt(many):
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
    hands = []
    write = Writer.write

    def recorded(self, text, **options):
        hands.append(self)
        return write(self, text, **options)

    monkeypatch.setattr(Writer, "write", recorded)
    data = make_handwriting(SMALL)
    assert len(hands) == len(data)
    of_part = [{hand for hand, number in zip(hands, data.split_N, strict=True) if number == part} for part in range(3)]
    assert not of_part[0] & of_part[1]
    assert not of_part[0] & of_part[2]
    assert not of_part[1] & of_part[2]
    assert [len(hands_of) <= count for hands_of, count in zip(of_part, SMALL.writers(), strict=True)] == [True] * 3
    assert len(of_part[0]) > 4


def test_ink_is_movement_with_pen_lifts(many):
    features = many.features_SF
    last_steps = np.cumsum(many.lengths_N) - 1
    assert set(np.unique(features[:, 2]).tolist()) == {0.0, 1.0}
    assert (features[last_steps, 2] == 1).all()
    assert (features[many.starts_N, :2] == 0).all()
    assert np.abs(features[:, :2]).max() < 20


def test_loading_is_making_and_happens_once(monkeypatch, tmp_path, assert_same_set):
    tmp_path.chmod(0o700)
    monkeypatch.setenv("STRETTO_CACHE", str(tmp_path))
    made = make_handwriting(SMALL)
    first = load_handwriting(SMALL)
    status = cached_path(SMALL).stat()
    assert cached_path(SMALL).parent == tmp_path

    def refuse(settings):
        raise AssertionError("made a second time")

    monkeypatch.setattr(handwriting, "make_handwriting", refuse)
    second = load_handwriting(SMALL)
    again = cached_path(SMALL).stat()
    assert (again.st_ino, again.st_mtime_ns) == (status.st_ino, status.st_mtime_ns)
    assert second.memory_mapped
    assert second.name == made.name == "handwriting"
    assert second.notes == made.notes
    assert_same_set(made, first)
    assert_same_set(made, second)


def test_each_setting_has_a_cache_file_of_its_own():
    changes = [{}, {"seed": 1}, {"num_train": 41}, {"num_writers": 9}]
    assert len({dataclasses.replace(SMALL, **change).key() for change in changes}) == 4
