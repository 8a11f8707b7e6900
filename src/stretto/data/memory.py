"""Data that is in memory already: lists of tensors or arrays, and tables of pandas, polars, Arrow or Hugging Face.

A table has a row per sequence, with lists in its cells, or a row per step and a column that identifies the sequence:

    a row per sequence    x                   label        by="id", a row per step    id   speed  height   label
                          [[1, 2], [3, 4]]    up                                      a    1      2        up
                          [[5, 6]]            down                                    a    3      4        up
                                                                                      b    5      6        down

Shape legend: N sequences, S steps of all sequences.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch

from stretto.checks import check_kind, check_list
from stretto.data.readers.parquet import decode_columns, from_columns, refuse_nulls
from stretto.data.sequences import SequenceSet, number_split
from stretto.data.targets import AbstractTargets, Labels, StepLabels, Transcripts
from stretto.errors import StrettoError
from stretto.extras import optional

Array = npt.NDArray[Any]
PART: Final = "part of the DatasetDict"


def from_tensors(
    sequences: Sequence[Any],
    *,
    labels: Any = None,
    texts: Sequence[str] | None = None,
    split: Any = None,
    name: str = "data",
) -> SequenceSet:
    """Sequences from a list of tensors or arrays.

    Args:
        sequences: Each of shape (steps, features) or (steps,).
        labels: For each sequence a class number or name; or an array of such, one for each of its steps.
        texts: For each sequence its transcript, instead of labels.
        split: For each sequence 0, 1, 2 or "train", "valid", "test"; left out, a split is drawn.
        name: What the data is called in messages and reports.

    Examples:
        >>> data = from_tensors([torch.zeros(3, 2), torch.ones(5, 2)], labels=["low", "high"])
        >>> data.lengths_N.tolist(), data.targets.names
        ([3, 5], ('high', 'low'))
    """
    check_kind(name, str, name="name", owner="from_tensors", fix="Give a string.")
    items = check_list(
        sequences,
        name="sequences",
        owner="from_tensors",
        fix="Give a list of tensors or arrays of shape (steps, features).",
    )
    arrays = [array[:, None] if array.ndim == 1 else array for array in map(_as_array, items)]
    if not arrays:
        raise StrettoError(f"{name}: there are no sequences", fix="Give at least one.")
    for number, array in enumerate(arrays):
        if array.ndim != 2 or array.shape[1] != arrays[0].shape[1]:
            raise StrettoError(
                f"{name}: sequence {number} has the shape {array.shape}, and the first {arrays[0].shape}",
                fix="Give each as (steps, features), of the same features.",
            )
    if labels is not None and texts is not None:
        raise StrettoError(f"{name}: labels and texts were given", fix="Give one of them.")
    targets: AbstractTargets | None = None
    if isinstance(texts, str) or (labels is not None and not np.iterable(labels)):
        given = f"texts={texts!r}" if labels is None else f"labels={labels!r}"
        raise StrettoError(f"{name}: {given} is not a list", fix="Give one per sequence.")
    if texts is not None:
        wrong = next((number for number, text in enumerate(texts) if not isinstance(text, str)), None)
        if wrong is not None:
            raise StrettoError(f"{name}: text {wrong} is {texts[wrong]!r}", fix="Give one string per sequence.")
        targets = Transcripts.of(list(texts))
    elif labels is not None:
        targets = _make_targets([_as_array(label) for label in labels], source=name)
    split_N, complete = (None, False) if split is None else number_split(_as_array(split), source=name)
    return SequenceSet.from_flat(
        np.concatenate(arrays),
        offsets=np.cumsum([0, *map(len, arrays)]),
        targets=targets,
        split_N=split_N,
        split_complete=complete,
        name=name,
    )


def from_arrow(
    table: Any,
    *,
    features: str | Sequence[str] = "x",
    labels: str | None = None,
    texts: str | None = None,
    split: str | None = None,
    by: str | None = None,
    step_labels: bool = False,
    name: str = "table",
) -> SequenceSet:
    """Sequences from an Arrow table, or from a `Dataset` or `DatasetDict` of Hugging Face's `datasets`.

    Args:
        table: With a row per sequence; or, if `by` is given, with a row per step.
        features: The column of lists of numbers or of feature lists; with `by`, one or more columns of numbers.
        labels: The column of class numbers or names.
        texts: The column of transcripts.
        split: The column with 0, 1, 2 or "train", "valid", "test". Left out, the parts of a `DatasetDict` are the
            split, or one is drawn.
        by: The column that identifies the sequence. They come in the order of their first rows; steps keep theirs.
        step_labels: With `by`, whether each step has a label of its own; otherwise a sequence has one, at all its rows.
        name: What the data is called in messages and reports.
    """
    columns = _read_columns(table)
    split = split or (PART if PART in columns else None)
    check_kind(name, str, name="name", fix="Give a string.")
    one = "Name a column, or with by= a list of columns."
    inputs = [features] if isinstance(features, str) else check_list(features, name="features", owner=name, fix=one)
    asked = [column for column in (*inputs, by, labels, texts, split) if column is not None]
    if missing := [column for column in asked if column not in columns]:
        raise StrettoError(
            f"{name} has the columns {', '.join(columns) or 'none'}, and no {' or '.join(map(repr, missing))}",
            fix="Name its columns with features=, labels=, texts=, split= and by=.",
        )
    for column in asked:
        refuse_nulls(columns[column], name=column, source=name)
    if by is None:
        if len(inputs) != 1 or step_labels:
            raise StrettoError(
                f"{name}: several columns of features, or labels of steps, are for a row per step",
                fix="Name the column that identifies the sequence with by=.",
            )
        named = {"x": inputs[0], "y": labels, "text": texts, "split": split}
        chosen = {key: columns[column] for key, column in named.items() if column is not None}
        return from_columns(chosen, source=name, name=name)
    if not inputs:
        raise StrettoError(f"{name}: no column of features is named", fix="Name some with features=.")
    code_S = columns[by].combine_chunks().dictionary_encode().indices.to_numpy()
    order_S, lengths_N = np.argsort(code_S, kind="stable"), np.bincount(code_S)
    cuts = np.cumsum(lengths_N)[:-1]

    def of_sequences(column: str | None) -> list[Any] | None:
        if column is None:
            return None
        values_S = np.array([*columns[column].to_pylist(), None], dtype=object)[:-1][order_S]
        values_N = values_S[[0, *cuts]]
        changed = np.flatnonzero(values_S != np.repeat(values_N, lengths_N))
        if len(changed):
            owner = columns[by][int(order_S[changed[0]])].as_py()
            raise StrettoError(
                f"{name}: column {column!r} changes within the sequence {owner!r}",
                fix="Give one value per sequence; labels of single steps need step_labels=True.",
            )
        return list(values_N)

    in_order = [np.asarray(columns[column].to_numpy())[order_S] for column in inputs]
    label_S = np.asarray(columns[labels].to_pylist())[order_S] if step_labels and labels is not None else None
    return from_tensors(
        np.split(np.stack(in_order, axis=1), cuts),
        labels=of_sequences(labels) if label_S is None else np.split(label_S, cuts),
        texts=of_sequences(texts),
        split=of_sequences(split),
        name=name,
    )


def from_pandas(frame: Any, **columns: Any) -> SequenceSet:
    """Sequences from a pandas `DataFrame`, with the arguments of `from_arrow`; its index is not read."""
    arrow = optional("pyarrow")
    try:
        table = arrow.Table.from_pandas(frame, preserve_index=False)
    except (arrow.ArrowException, AttributeError, TypeError, ValueError) as error:
        raise StrettoError(
            f"the frame is none of pandas, or cannot be read ({str(error).splitlines()[0]})",
            fix="Give a pandas DataFrame whose columns have one type each, with lists of numbers for sequences.",
        ) from error
    return from_arrow(table, **columns)


def from_polars(frame: Any, **columns: Any) -> SequenceSet:
    """Sequences from a polars `DataFrame` or `LazyFrame`, with the arguments of `from_arrow`."""
    whole = frame.collect() if hasattr(frame, "collect") else frame
    if not hasattr(whole, "to_arrow"):
        raise StrettoError(f"from_polars got a {type(frame).__name__}", fix="Give a polars DataFrame or LazyFrame.")
    return from_arrow(whole.to_arrow(), **columns)


def _read_columns(table: Any) -> dict[str, Any]:
    arrow = optional("pyarrow")
    if isinstance(table, Mapping) and table and all(hasattr(part, "with_format") for part in table.values()):
        parts = {part: dataset.with_format("arrow")[:] for part, dataset in table.items()}
        marked = [rows.append_column(PART, arrow.array([part] * len(rows))) for part, rows in parts.items()]
        table = arrow.concat_tables(marked, promote_options="permissive")
    elif hasattr(table, "with_format"):
        table = table.with_format("arrow")[:]
    if not isinstance(table, arrow.Table):
        raise StrettoError(
            f"from_arrow got a {type(table).__name__}",
            fix="Give an Arrow table or a Hugging Face dataset, or use from_pandas, from_polars or from_tensors.",
        )
    return decode_columns(table)


def _as_array(values: Any) -> Array:
    try:
        return values.detach().cpu().numpy() if isinstance(values, torch.Tensor) else np.asarray(values)
    except (TypeError, ValueError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        raise StrettoError(
            f"values cannot be read as an array ({reason})",
            fix="Give an array, a dense tensor, or lists of equally long rows.",
        ) from error


def _make_targets(labels: list[Array], *, source: str) -> AbstractTargets:
    of_steps = bool(labels) and labels[0].ndim == 1
    odd = next((number for number, label in enumerate(labels) if label.ndim != int(of_steps)), None)
    if odd is not None:
        raise StrettoError(
            f"{source}: the label of sequence {odd} has the shape {labels[odd].shape}, and the first {labels[0].shape}",
            fix="Give one label for each sequence, or for each an array with one for each step.",
        )
    flat = np.concatenate([np.atleast_1d(label) for label in labels]) if labels else np.zeros(0, dtype=np.int64)
    names: list[str] | None = None
    if flat.dtype.kind == "U":
        found, flat = np.unique(flat, return_inverse=True)
        names = found.tolist()
    if not of_steps:
        return Labels.check(flat, names=names, source=source)
    return StepLabels.check(flat, offsets=np.cumsum([0, *map(len, labels)]), names=names, source=source)
