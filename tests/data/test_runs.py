"""Runs of one label: every labelled step once, in order, with its label and in its part."""

from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.data import Labels, SequenceSet, StepLabels, cut_runs, open_sequences
from stretto.errors import StrettoError
from stretto.tasks.classify import Classify, ClassifyConfig

NAMES = ("none", "walk", "sit")


def _set(rows: list[list[int]], *, parts: list[int] | None = None) -> SequenceSet:
    offsets = np.cumsum([0, *map(len, rows)])
    labels_S = np.array([label for row in rows for label in row])
    return SequenceSet.from_flat(
        np.arange(float(offsets[-1]))[:, None],
        offsets=offsets,
        targets=StepLabels.check(labels_S, offsets=offsets, names=NAMES, source="steps"),
        split_N=np.array(parts if parts is not None else [0] * len(rows)),
        name="steps",
    )


@given(
    st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=12), min_size=1, max_size=6),
    st.sampled_from([None, 0, 1, 2, 7]),
)
def test_runs_are_the_steps_of_each_label_in_order(rows: list[list[int]], unlabelled: int | None) -> None:
    parts = [(2, 0, 1)[index % 3] for index in range(len(rows))]
    data = _set(rows, parts=parts)
    flat = [(part, label) for row, part in zip(rows, parts, strict=True) for label in row]
    runs, first = [], 0
    for row, part in zip(rows, parts, strict=True):
        for label, steps in groupby(row):
            count = len(list(steps))
            if label != unlabelled:
                runs.append(([*range(first, first + count)], label, part))
            first += count
    assert first == len(flat)
    if not runs:
        with pytest.raises(StrettoError, match=f"no step has a label but {unlabelled}"):
            cut_runs(data, unlabelled=unlabelled)
        return
    cut = cut_runs(data, unlabelled=unlabelled)
    assert isinstance(cut.targets, Labels)
    found = [
        (
            [*cut[i].features_TF[:, 0].int().tolist()],
            NAMES.index(cut.targets.names[cut.targets[i]]),
            int(cut.split_N[i]),
        )
        for i in range(len(cut))
    ]
    assert found == runs
    assert cut.numbers_N.tolist() == [*range(len(runs))]
    assert f"{len(runs)} runs" in cut.notes[-1]


def test_other_targets_are_refused() -> None:
    data = SequenceSet.from_flat(np.zeros((3, 1)), offsets=np.array([0, 3]), split_N=np.array([0]), name="plain")
    with pytest.raises(StrettoError, match="plain has no labels of steps"):
        cut_runs(data)


def test_classification_takes_labels_of_steps() -> None:
    data = _set([[1, 1, 0, 2, 2], [2, 1], [1, 0, 0, 2]], parts=[0, 1, 2])
    task = Classify(ClassifyConfig(hidden_size=3), data)
    assert len(task.data) == 6
    assert "left out" in task.data.notes[-1]
    assert len(Classify(ClassifyConfig(hidden_size=3, unlabelled=None), data).data) == 8


def test_recordings_of_motion(shared_data: Path) -> None:
    cut = cut_runs(open_sequences(shared_data / "hapt"), unlabelled=0)
    lengths_N = np.sort(cut.lengths_N)
    assert (len(cut), lengths_N[0], lengths_N[-1]) == (1214, 74, 2032)
    assert np.median(lengths_N) == pytest.approx(639, abs=1)
    assert isinstance(cut.targets, Labels)
    assert len(cut.targets.names) == 12
