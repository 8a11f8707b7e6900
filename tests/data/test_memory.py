"""Lists and tables in memory become the same sequences, in whichever form they come; what does not fit is named."""

import importlib
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import stretto
from small_data import write_signs
from stretto.data import (
    Labels,
    SequenceSet,
    StepLabels,
    Transcripts,
    from_arrow,
    from_pandas,
    from_polars,
    from_tensors,
    read_npz,
)
from stretto.errors import StrettoError

FRAMES = {"arrow": from_arrow, "pandas": from_pandas, "polars": from_polars}
# What only the long checks install.
KINDS = ["arrow", pytest.param("pandas", marks=pytest.mark.slow), pytest.param("polars", marks=pytest.mark.slow)]


def frame_of(kind: str, columns: dict[str, Any]) -> Any:
    """The same table for each library."""
    return pa.table(columns) if kind == "arrow" else importlib.import_module(kind).DataFrame(columns)


def rows(data: SequenceSet) -> list[Any]:
    return [data[number].features_TF.tolist() for number in range(len(data))]


def test_lists_of_tensors_and_arrays() -> None:
    sequences = [torch.zeros(3, 2), np.ones((1, 2), dtype=np.float32), [[2.0, 3.0], [4.0, 5.0]]]
    data = from_tensors(sequences, labels=["low", "one", "low"], split=["train", "valid", "test"], name="mine")
    assert isinstance(data.targets, Labels)
    assert (data.name, data.lengths_N.tolist(), data.split_N.tolist()) == ("mine", [3, 1, 2], [0, 1, 2])
    assert (data.targets.names, [data[n].target for n in range(3)]) == (("low", "one"), [0, 1, 0])
    assert rows(data)[1:] == [[[1.0, 1.0]], [[2.0, 3.0], [4.0, 5.0]]]
    numbers = from_tensors([torch.arange(3), torch.arange(2)], labels=torch.tensor([2, 0]), split=[0, 2])
    assert (numbers.num_features, numbers.targets.names) == (1, ("0", "1", "2"))  # type: ignore[attr-defined]
    texts = from_tensors([np.zeros(4), np.ones(2)], texts=["ab", ""])
    assert isinstance(texts.targets, Transcripts)
    assert [texts.targets[0], texts.targets[1]] == ["ab", ""]
    steps = from_tensors([np.zeros(2), np.ones(3)], labels=[["up", "down"], ["up", "up", "up"]])
    assert isinstance(steps.targets, StepLabels)
    assert (steps.targets.names, steps.targets[0].tolist()) == (("down", "up"), [1, 0])


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_per_sequence(kind: str) -> None:
    columns = {"ink": [[[1.0, 2.0], [3.0, 4.0]], [[5.0, 6.0]]], "kind": ["b", "a"], "part": ["train", "test"]}
    data = FRAMES[kind](frame_of(kind, columns), features="ink", labels="kind", split="part", name="table")
    assert (rows(data), data.split_N.tolist()) == ([[[1, 2], [3, 4]], [[5, 6]]], [0, 2])
    assert (data.targets.names, data[0].target) == (("a", "b"), 1)  # type: ignore[attr-defined]
    texts = FRAMES[kind](frame_of(kind, {"x": [[1, 2], [3]], "said": ["yes", "no"]}), texts="said")
    assert (rows(texts), texts.targets[1]) == ([[[1], [2]], [[3]]], "no")


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_per_step(kind: str) -> None:
    """Sequences in the order of their first rows, which need not be adjacent."""
    columns = {
        "id": ["b", "a", "b", "a", "b"],
        "speed": [1.0, 2.0, 3.0, 4.0, 5.0],
        "height": [1, 2, 3, 4, 5],
        "kind": ["up", "down", "up", "down", "up"],
        "state": [0, 1, 1, 0, 1],
        "part": [0, 2, 0, 2, 0],
    }
    frame, make = frame_of(kind, columns), FRAMES[kind]
    data = make(frame, features=["speed", "height"], by="id", labels="kind", split="part")
    assert rows(data) == [[[1, 1], [3, 3], [5, 5]], [[2, 2], [4, 4]]]
    assert (data.targets.names, [data[n].target for n in range(2)]) == (("down", "up"), [1, 0])  # type: ignore[attr-defined]
    assert data.split_N.tolist() == [0, 2]
    steps = make(frame, features="speed", by="id", labels="state", step_labels=True)
    assert [steps.targets[n].tolist() for n in range(2)] == [[0, 1, 1], [1, 0]]  # type: ignore[union-attr]
    with pytest.raises(StrettoError, match="column 'state' changes within the sequence 'b'"):
        make(frame, features="speed", by="id", labels="state")


@given(st.lists(st.integers(0, 4), min_size=1, max_size=30))
def test_rows_of_steps_are_those_of_each_sequence_in_their_order(owners: list[int]) -> None:
    data = from_arrow(pa.table({"x": range(len(owners)), "id": owners}), by="id")
    expected = [[at for at, owner in enumerate(owners) if owner == one] for one in dict.fromkeys(owners)]
    assert [[value for (value,) in sequence] for sequence in rows(data)] == expected


@pytest.mark.slow
def test_datasets_of_hugging_face_and_lazy_frames() -> None:
    import datasets
    import polars as pl

    parts = {"train": [[1.0, 2.0], [3.0]], "validation": [[4.0]], "test": [[5.0, 6.0]]}
    whole = datasets.DatasetDict(
        {part: datasets.Dataset.from_dict({"x": x, "y": [part[0]] * len(x)}) for part, x in parts.items()}
    )
    data = from_arrow(whole, labels="y")
    assert (data.lengths_N.tolist(), data.split_N.tolist()) == ([2, 1, 1, 2], [0, 0, 1, 2])
    shuffled = whole["train"].shuffle(seed=1)
    assert rows(from_arrow(shuffled)) == [[[value] for value in row] for row in shuffled["x"]]
    assert rows(from_polars(pl.DataFrame({"x": [[1], [2, 3]]}).lazy())) == [[[1]], [[2], [3]]]


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"sequences": [np.float64(3)]}, r"sequence 0 has the shape \(\)"),
        ({"sequences": [["a", "b"]]}, "type <U1"),
        ({"sequences": [[[1.0], [2.0, 3.0]]]}, "cannot be read as an array"),
        ({"sequences": [np.zeros(0)]}, "no steps"),
        ({"sequences": [np.zeros(2)], "labels": [None]}, "type object"),
        ({"sequences": [np.zeros(2)], "labels": [[0, 0, 0]]}, "labels of steps are not as many"),
        ({"sequences": [np.zeros(2)] * 2, "labels": [0, [0, 0]]}, "label of sequence 1"),
        ({"sequences": [np.zeros(2)], "texts": [3]}, "text 0 is 3"),
        ({"sequences": [np.zeros(2)], "texts": ["a"], "labels": [0]}, "labels and texts"),
        ({"sequences": [np.zeros(2)], "split": [7]}, "split has shape"),
    ],
)
def test_lists_that_do_not_fit(arguments: dict[str, Any], problem: str) -> None:
    with pytest.raises(StrettoError, match=problem):
        from_tensors(**arguments)


@pytest.mark.parametrize(
    ("columns", "chosen", "problem"),
    [
        ({"ink": [[1]]}, {}, "has the columns ink, and no 'x'"),
        ({"x": [[1]]}, {"labels": "y"}, "no 'y'"),
        ({"x": [[1]], "y": [None]}, {"labels": "y"}, "row 0 has a null in column `y`"),
        ({"x": [1.5, 2.5]}, {}, "column `x` has the type double"),
        ({"x": ["a", "b"], "id": [0, 0]}, {"by": "id"}, "type object"),
        ({"x": [1, 2], "id": [0, None]}, {"by": "id"}, "null in column `id`"),
        ({"x": [[1]], "y": [[1]]}, {"features": ["x", "y"]}, "a row per step"),
        ({"x": [[1]], "y": [0]}, {"labels": "y", "step_labels": True}, "a row per step"),
        ({"x": [1], "id": [0]}, {"features": [], "by": "id"}, "no column of features"),
        ({"x": [1], "id": [0], "y": [0.5]}, {"by": "id", "labels": "y"}, "type float64"),
    ],
)
def test_tables_that_do_not_fit(columns: dict[str, Any], chosen: dict[str, Any], problem: str) -> None:
    with pytest.raises(StrettoError, match=problem):
        from_arrow(pa.table(columns), **chosen)


@pytest.mark.parametrize("make", [from_arrow, from_pandas, from_polars])
def test_what_is_no_table(make: Any) -> None:
    with pytest.raises(StrettoError):
        make([1, 2, 3])
    with pytest.raises(StrettoError):
        make({})


def test_training_on_data_in_memory_is_training_on_the_file(tmp_path: Path) -> None:
    data = read_npz(write_signs(tmp_path / "signs.npz", count=36))
    assert isinstance(data.targets, Labels)
    again = from_tensors(
        [data[number].features_TF for number in range(36)],
        labels=[data.targets.names[label] for label in data.targets.values_N],
        split=data.split_N,
    )
    small: dict[str, Any] = {"epochs": 1, "hidden_size": 4, "backend": "torch", "threads": 1}
    numbered = from_tensors([data[n].features_TF for n in range(36)], labels=data.targets.values_N, split=data.split_N)
    in_memory = stretto.train("classify", data=numbered, out=tmp_path / "memory", **small)
    from_file = stretto.train("classify", data=tmp_path / "signs.npz", out=tmp_path / "file", **small)
    assert in_memory.metrics == from_file.metrics
    # Names are numbered in the order of the alphabet.
    named = stretto.train("classify", data=again, out=tmp_path / "names", **small)
    assert stretto.load(named.run).task.class_names == ("moving", "still")  # type: ignore[attr-defined]
    with pytest.raises(StrettoError, match=r"data= got a Table.*from_arrow"):
        stretto.train("classify", data=pa.table({"x": [[1]]}), out=tmp_path / "table")  # type: ignore[arg-type]
