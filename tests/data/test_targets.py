"""Labels, transcripts and nothing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.data import Labels, NoTargets, Transcripts
from stretto.errors import StrettoError


def test_labels_without_names_are_numbered():
    labels = Labels.check(np.array([2, 0, 1], dtype=np.uint8), names=None, source="here")
    assert len(labels) == 3
    assert [labels[index] for index in range(3)] == [2, 0, 1]
    assert labels.names == ("0", "1", "2")


def test_labels_keep_the_names_they_are_given():
    labels = Labels.check(np.array([0, 1]), names=["cat", "dog", "owl"], source="here")
    assert labels.names == ("cat", "dog", "owl")
    taken = labels.take(np.array([1, 1, 0]))
    assert [taken[index] for index in range(3)] == [1, 1, 0]
    assert taken.names == labels.names


@pytest.mark.parametrize(
    ("values", "names", "told"),
    [
        (np.array([0, 3]), ["a", "b"], "sequence 1 has label 3, outside 0 to 1"),
        (np.array([0, -1]), None, "sequence 1 has label -1"),
        (np.array([[0], [1]]), None, r"shape \(2, 1\)"),
        (np.array([0.0, 1.0]), None, "float64"),
        (np.array(["a", "b"]), None, "<U1"),
        (np.array([True, False]), None, "bool"),
    ],
)
def test_bad_labels_are_refused(values, names, told):
    with pytest.raises(StrettoError, match=f"here: .*{told}"):
        Labels.check(values, names=names, source="here")


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(max_size=12), max_size=8), st.data())
def test_transcripts_give_back_every_text(texts, data):
    transcripts = Transcripts.of(texts)
    assert [transcripts[index] for index in range(len(transcripts))] == texts
    chosen = data.draw(st.lists(st.sampled_from(range(len(texts))), max_size=6) if texts else st.just([]))
    taken = transcripts.take(np.array(chosen, dtype=np.int64))
    assert [taken[index] for index in range(len(taken))] == [texts[index] for index in chosen]
    assert taken.alphabet() == "".join(sorted(set("".join(texts[index] for index in chosen))))


def test_transcripts_may_all_be_empty():
    transcripts = Transcripts.of(["", ""])
    assert [transcripts[0], transcripts[1]] == ["", ""]
    assert transcripts.alphabet() == ""


def test_no_targets_are_none():
    nothing = NoTargets(count=3)
    assert len(nothing) == 3
    assert nothing[2] is None
    assert len(nothing.take(np.array([0, 2]))) == 2
