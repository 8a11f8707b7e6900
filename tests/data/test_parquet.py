"""Tables with a list column."""

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.data import Labels, NoTargets, Transcripts, read_parquet
from stretto.errors import StrettoError

KINDS = (".parquet", ".arrow", ".feather")
X_TYPES = {"list": pa.list_, "large list": pa.large_list}
STEP_TYPES = {
    "number": lambda number: number,
    "list": pa.list_,
    "large list": pa.large_list,
    "fixed list": lambda number: pa.list_(number, 2),
}


def save(table, path, *, stream=False):
    if path.suffix == ".parquet":
        pq.write_table(table, path, row_group_size=3)
        return path
    make = pa.ipc.new_stream if stream else pa.ipc.new_file
    with make(path, table.schema) as writer:
        writer.write_table(table)
    return path


def rows(data):
    return [data[index].features_TF.tolist() for index in range(len(data))]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "number", [pa.float16(), pa.float32(), pa.float64(), pa.int8(), pa.uint16(), pa.int64(), pa.bool_()]
)
def test_numbers_a_row_are_one_feature(tmp_path, kind, number):
    table = pa.table({"x": pa.array([[1, 0], [1], [0, 1, 1]]).cast(pa.list_(pa.int8())).cast(pa.list_(number))})
    data = read_parquet(save(table, tmp_path / f"table{kind}"))
    assert data.name == "table"
    assert rows(data) == [[[1], [0]], [[1]], [[0], [1], [1]]]
    assert data.features_SF.dtype == number.to_pandas_dtype()
    assert isinstance(data.targets, NoTargets)


@settings(deadline=None, max_examples=60)
@given(
    sequences=st.lists(
        st.lists(st.tuples(st.integers(-9, 9), st.integers(-9, 9)), min_size=1, max_size=5), min_size=1, max_size=8
    ),
    outer=st.sampled_from(sorted(X_TYPES)),
    inner=st.sampled_from(sorted(STEP_TYPES)),
    drawn=st.data(),
)
def test_chunks_and_slices_of_every_list_type(tmp_path_factory, sequences, outer, inner, drawn):
    flat = inner == "number"
    wanted = [[[step[0]] if flat else list(step) for step in sequence] for sequence in sequences]
    given_rows = [[step[0] if flat else list(step) for step in sequence] for sequence in sequences]
    data_type = X_TYPES[outer](STEP_TYPES[inner](pa.int32()))
    begin, end = drawn.draw(st.integers(0, 2)), drawn.draw(st.integers(0, 2))
    margin = [[0, 0, 0]] if flat else [[[0, 0]] * 3]
    whole = pa.array(margin * begin + given_rows + margin * end, type=data_type)
    sliced = whole.slice(begin, len(given_rows))
    cut = drawn.draw(st.integers(0, len(given_rows)))
    table = pa.table({"x": pa.chunked_array([sliced.slice(0, cut), sliced.slice(cut)])})
    kind = drawn.draw(st.sampled_from(KINDS))
    path = save(table, tmp_path_factory.mktemp("table") / f"table{kind}", stream=drawn.draw(st.booleans()))
    assert rows(read_parquet(path)) == wanted


@pytest.mark.parametrize("kind", KINDS)
def test_a_fixed_number_of_steps_is_a_set_too(tmp_path, kind):
    table = pa.table({"x": pa.array([[1, 2], [3, 4], [5, 6]], type=pa.list_(pa.int8(), 2)).slice(1)})
    assert rows(read_parquet(save(table, tmp_path / f"fixed{kind}"))) == [[[3], [4]], [[5], [6]]]


def test_labels_are_numbers_or_sorted_names(tmp_path):
    x = [[1.0], [2.0], [3.0]]
    numbers = read_parquet(save(pa.table({"x": x, "y": [2, 0, 1]}), tmp_path / "numbers.parquet"))
    names = read_parquet(save(pa.table({"x": x, "y": ["owl", "cat", "owl"]}), tmp_path / "names.parquet"))
    coded = pa.table({"x": x, "y": pa.array(["owl", "cat", "owl"]).dictionary_encode()})
    codes = read_parquet(save(coded, tmp_path / "codes.arrow"))
    chunked = pa.table({"x": x, "y": pa.chunked_array([["owl"], [], ["cat", "owl"]])})
    chunks = read_parquet(save(chunked, tmp_path / "chunks.arrow"))
    assert isinstance(numbers.targets, Labels)
    assert numbers.targets.values_N.tolist() == [2, 0, 1]
    for data in (names, codes, chunks):
        assert isinstance(data.targets, Labels)
        assert data.targets.names == ("cat", "owl")
        assert data.targets.values_N.tolist() == [1, 0, 1]


def test_transcripts_go_before_labels_and_a_note_says_so(tmp_path):
    table = pa.table({"x": [[1.0], [2.0]], "text": ["", "löng 𝄞"], "y": [0, 1], "split": [0, 0]})
    data = read_parquet(save(table, tmp_path / "both.parquet"))
    assert isinstance(data.targets, Transcripts)
    assert [data[0].target, data[1].target] == ["", "löng 𝄞"]
    assert data.notes == ("the columns `text` and `y` are both there: `text` is the target, `y` is not read",)


@pytest.mark.parametrize(
    ("split", "wanted"),
    [
        ([0, 1, 2, 0], [0, 1, 2, 0]),
        (["train", "valid", "test", "train"], [0, 1, 2, 0]),
        (["dev", "validation", "valid", "train"], [1, 1, 1, 0]),
        (["train", "train", "train", "train"], [0, 0, 0, 0]),
        ([0, 0, 1, 1], None),
        (["train", "train", "test", "test"], None),
    ],
)
def test_a_split_is_taken_at_its_word_unless_validation_is_missing(tmp_path, split, wanted):
    table = pa.table({"x": [[1.0]] * 4, "split": split})
    data = read_parquet(save(table, tmp_path / "split.parquet"))
    assert data.split_N.tolist() == wanted or (wanted is None and sorted(data.split_N.tolist()) == [0, 1, 2, 2])
    assert data.notes == (() if wanted else ("split has train and test only: a tenth of train is kept for validation",))


def test_other_columns_and_the_names_of_folders_do_not_matter(tmp_path):
    folder = tmp_path / "split=2" / "y=1"
    folder.mkdir(parents=True)
    table = pa.table({"writer": [None, "b"], "x": [[1.0], [2.0]], "x.more": [1, 2], "split": [0, 0]})
    data = read_parquet(save(table, folder / "table.parquet"))
    assert rows(data) == [[[1.0]], [[2.0]]]
    assert data.split_N.tolist() == [0, 0]
    assert isinstance(data.targets, NoTargets)


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"x": [[1.0], None]}, "row 1 has a null in column `x`"),
        ({"x": [[1.0, 2.0], [3.0, None]]}, "row 1 has a null in column `x`"),
        ({"x": [[[1.0]], [[2.0], None]]}, "row 1 has a null in column `x`"),
        ({"x": [[[1.0, 2.0]], [[2.0, 3.0], [4.0, None]]]}, "row 1 has a null in column `x`"),
        ({"x": [[[1, 2]], [[3, 4], [5]]]}, "row 1 has a step of 1 features, the first step of all has 2"),
        ({"x": [[[1, 2]], [[3, 4, 5]]]}, "row 1 has a step of 3 features, the first step of all has 2"),
        ({"x": [[[]], [[]]]}, "column `x` has the type"),
        ({"x": pa.array([[[]], [[]]], type=pa.list_(pa.list_(pa.int8())))}, "there are no features"),
        ({"x": [["a"], ["b"]]}, "column `x` has the type"),
        ({"x": [1.0, 2.0]}, "column `x` has the type double"),
        ({"x": [[[[1.0]]], [[[1.0]]]]}, "column `x` has the type"),
        ({"x": [[1.0], [2.0]], "y": [0, None]}, "row 1 has a null in column `y`"),
        ({"x": [[1.0], [2.0]], "y": [0.0, 1.0]}, "column `y` has the type double"),
        ({"x": [[1.0], [2.0]], "y": [[0], [1]]}, "column `y` has the type list"),
        ({"x": [[1.0], [2.0]], "text": ["a", None]}, "row 1 has a null in column `text`"),
        ({"x": [[1.0], [2.0]], "text": [1, 2]}, "column `text` has the type int64"),
        ({"x": [[1.0], [2.0]], "split": [None, 1]}, "row 0 has a null in column `split`"),
        ({"x": [[1.0], [2.0]], "split": ["train", "eval"]}, "row 1 has the split 'eval'"),
        ({"x": [[1.0], [2.0]], "split": [0.0, 1.0]}, "column `split` has the type double"),
        ({"input": [[1.0]], "label": [0]}, r"has the columns \['input', 'label'\] but needs `x`"),
    ],
)
@pytest.mark.parametrize("kind", [".parquet", ".arrow"])
def test_tables_that_do_not_fit_are_refused(tmp_path, columns, message, kind):
    with pytest.raises(StrettoError, match=message):
        read_parquet(save(pa.table(columns), tmp_path / f"wrong{kind}"))


def test_two_columns_of_one_name_are_refused(tmp_path):
    table = pa.Table.from_arrays([pa.array([[1.0]]), pa.array([[2.0]])], names=["x", "x"])
    with pytest.raises(StrettoError, match="has two columns `x`"):
        read_parquet(save(table, tmp_path / "twice.arrow"))


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("share", [0.0, 0.001, 0.1, 0.5, 0.9])
def test_a_truncated_file_is_refused(tmp_path, kind, share, stream):
    table = pa.table({"x": [[float(number)] * 20 for number in range(100)]})
    whole = save(table, tmp_path / f"whole{kind}", stream=stream).read_bytes()
    path = tmp_path / f"cut{kind}"
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(StrettoError, match=rf"cut\{kind}' is truncated, damaged or no \{kind} file"):
        read_parquet(path)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "content", [b"PAR1" + bytes(50) + b"PAR1", b"ARROW1" + bytes(50), b"words " * 20, bytes(100), None]
)
def test_garbage_and_a_damaged_column_name_are_refused(tmp_path, kind, content):
    path = save(pa.table({"x": [[1.0]], "other column": [1]}), tmp_path / f"damaged{kind}")
    path.write_bytes(content or path.read_bytes().replace(b"other column", b"other \xff\xffumn"))
    with pytest.raises(StrettoError, match=rf"damaged\{kind}' is truncated, damaged or no"):
        read_parquet(path)
