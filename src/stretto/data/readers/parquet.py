"""Tables with a list column: Parquet, Arrow IPC and Feather files, one sequence a row.

Shape legend: N rows, S steps of all rows together, F features per step.
"""

from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stretto.data.sequences import SequenceSet, number_split
from stretto.data.targets import AbstractTargets, Labels, NoTargets, Transcripts, locate
from stretto.errors import StrettoError
from stretto.extras import optional

Array = npt.NDArray[Any]
KNOWN_COLUMNS: Final = ("x", "y", "text", "split")


def read_parquet(path: Path) -> SequenceSet:
    """Read a table that has one sequence per row, into memory.

    Args:
        path: A `.parquet`, `.arrow` or `.feather` file. Column `x` has in each row a list of numbers (one feature)
            or a list of equally long lists (one per step). Optional are `y` (a class number or a class name), `text` (a
            transcript) and `split` (0, 1, 2 or train, valid, test).

    Raises:
        StrettoError: The file is damaged, has no column `x`, or a row does not fit.
    """
    return from_columns(_read_columns(path), source=str(path), name=path.stem)


def from_columns(columns: dict[str, Any], *, source: str, name: str) -> SequenceSet:
    """The sequences of a table with a row for each: its columns as `read_parquet` has them, by the same names."""
    features_SF, offsets = _read_features(columns["x"], source=source)
    split_N, complete = _read_split(columns["split"], source=source) if "split" in columns else (None, False)
    both = "text" in columns and "y" in columns
    return SequenceSet.from_flat(
        features_SF,
        offsets=offsets,
        targets=_read_targets(columns, count=len(offsets) - 1, source=source),
        split_N=split_N,
        split_complete=complete,
        name=name,
        notes=("the columns `text` and `y` are both there: `text` is the target, `y` is not read",) if both else (),
    )


def _read_columns(path: Path) -> dict[str, Any]:
    try:
        table = _read_parquet_table(path) if path.suffix.lower() == ".parquet" else _read_arrow_table(path)
        table.validate(full=True)
    except FileNotFoundError:
        raise StrettoError(f"there is no file {str(path)!r}", fix="Check the path.") from None
    except (optional("pyarrow").ArrowException, OSError, UnicodeDecodeError) as error:
        raise StrettoError(
            f"{str(path)!r} is truncated, damaged or no {path.suffix} file ({error})",
            fix="Write or copy the file again.",
        ) from error
    return decode_columns(table)


def decode_columns(table: Any) -> dict[str, Any]:
    """The columns of a table by name, those that are dictionary-encoded as plain values."""
    is_encoded = optional("pyarrow").types.is_dictionary
    columns = zip(table.column_names, table.columns, strict=True)
    return {name: each.cast(each.type.value_type) if is_encoded(each.type) else each for name, each in columns}


def _read_parquet_table(path: Path) -> Any:
    with optional("pyarrow.parquet").ParquetFile(path) as file:
        wanted = _choose_columns(file.schema_arrow.names, path=path)
        return file.read(columns=wanted).select(wanted)


def _read_arrow_table(path: Path) -> Any:
    ipc = optional("pyarrow.ipc")
    with optional("pyarrow").OSFile(str(path)) as stream:
        is_file = stream.read(6) == b"ARROW1"
        stream.seek(0)
        table = (ipc.open_file(stream) if is_file else ipc.open_stream(stream)).read_all()
    return table.select(_choose_columns(table.column_names, path=path))


def _choose_columns(names: list[str], *, path: Path) -> list[str]:
    if "x" not in names:
        raise StrettoError(
            f"{str(path)!r} has the columns {names} but needs `x`",
            fix="Name the column of sequences `x`, with a list of numbers or of feature lists per row.",
        )
    twice = [name for name in KNOWN_COLUMNS if names.count(name) > 1]
    if twice:
        raise StrettoError(f"{str(path)!r} has two columns `{twice[0]}`", fix="Rename or remove one of them.")
    return [name for name in KNOWN_COLUMNS if name in names]


def _is_list(data_type: Any) -> bool:
    types = optional("pyarrow").types
    return bool(types.is_list(data_type) or types.is_large_list(data_type) or types.is_fixed_size_list(data_type))


def _is_text(column: Any) -> bool:
    types = optional("pyarrow").types
    return bool(types.is_string(column.type) or types.is_large_string(column.type))


def _read_features(column: Any, *, source: str) -> tuple[Array, npt.NDArray[np.int64]]:
    """All steps end to end, and where each row begins."""
    types = optional("pyarrow").types
    step_type = column.type.value_type if _is_list(column.type) else column.type
    nested = _is_list(step_type)
    number_type = step_type.value_type if nested else step_type
    is_number = (types.is_integer, types.is_floating, types.is_boolean)
    if not _is_list(column.type) or not any(check(number_type) for check in is_number):
        raise StrettoError(
            f"{source}: column `x` has the type {column.type}",
            fix="Give a list of numbers per row, or a list of equally long lists of numbers.",
        )
    refuse_nulls(column, name="x", source=source)
    steps, lengths_N = _flatten_lists(column)
    offsets = np.concatenate([[0], np.cumsum(lengths_N)]).astype(np.int64)
    refuse_nulls(steps, name="x", source=source, offsets=offsets)
    if not nested:
        return steps.to_numpy(), offsets
    values, widths_S = _flatten_lists(steps)
    width = int(widths_S[0]) if len(widths_S) else 1
    uneven = np.flatnonzero(widths_S != width)
    if len(uneven):
        raise StrettoError(
            f"{source}: row {locate(offsets, uneven[0])[0]} has a step of {widths_S[uneven[0]]} features, "
            f"the first step of all has {width}",
            fix="Give every step of every row the same number of features.",
        )
    refuse_nulls(values, name="x", source=source, offsets=offsets * width)
    return values.to_numpy().reshape(len(widths_S), width), offsets


def _flatten_lists(column: Any) -> tuple[Any, npt.NDArray[np.int64]]:
    """The values of a list column end to end and the length of each list; chunks and slices are handled."""
    compute = optional("pyarrow.compute")
    return compute.list_flatten(column), compute.list_value_length(column).to_numpy().astype(np.int64)


def refuse_nulls(column: Any, *, name: str, source: str, offsets: npt.NDArray[np.int64] | None = None) -> None:
    """Refuse a column that has a null; `offsets` tell which row owns a value of flattened lists."""
    if column.null_count == 0:
        return
    compute = optional("pyarrow.compute")
    position = compute.index(compute.is_null(column), True).as_py()
    row = position if offsets is None else locate(offsets, position)[0]
    raise StrettoError(
        f"{source}: row {row} has a null in column `{name}`",
        fix="Fill or remove that row; Stretto never replaces values silently.",
    )


def _read_targets(columns: dict[str, Any], *, count: int, source: str) -> AbstractTargets:
    if "text" in columns:
        column = columns["text"]
        if not _is_text(column):
            raise StrettoError(f"{source}: column `text` has the type {column.type}", fix="Give one string per row.")
        refuse_nulls(column, name="text", source=source)
        return Transcripts.of(column.to_pylist())
    if "y" not in columns:
        return NoTargets(count=count)
    column = columns["y"]
    refuse_nulls(column, name="y", source=source)
    if _is_text(column):
        names, values_N = _number_strings(column)
        return Labels.check(values_N, names=names, source=source)
    if not optional("pyarrow").types.is_integer(column.type):
        raise StrettoError(
            f"{source}: column `y` has the type {column.type}",
            fix="Give one class number or one class name per row; transcripts belong in `text`.",
        )
    return Labels.check(column.to_numpy(), names=None, source=source)


def _number_strings(column: Any) -> tuple[list[str], Array]:
    """The different strings of a column, sorted, and the number of each row's."""
    compute = optional("pyarrow.compute")
    names = sorted(compute.unique(column).to_pylist())
    value_set = optional("pyarrow").array(names, type=column.type)
    return names, compute.index_in(column, value_set=value_set).to_numpy()


def _read_split(column: Any, *, source: str) -> tuple[Array, bool]:
    """The split for `from_flat`, and whether validation is named in it."""
    refuse_nulls(column, name="split", source=source)
    if not _is_text(column):
        if not optional("pyarrow").types.is_integer(column.type):
            raise StrettoError(
                f"{source}: column `split` has the type {column.type}",
                fix="Give 0, 1, 2 or train, valid, test per row.",
            )
        return column.to_numpy(), False
    return number_split(np.array(column.to_pylist(), dtype=object), source=source)
