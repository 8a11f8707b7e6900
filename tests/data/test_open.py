"""The right reader for a file or folder."""

import os
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from pyarrow import feather

from stretto.data import SequenceSet, open_sequences, read_inkml, read_npz, read_parquet, read_text, write_npz
from stretto.errors import StrettoError

INK = "<ink><annotation type='truth'>a</annotation><trace>1 2, 3 4</trace></ink>"
SESSION = (
    "<WhiteboardCaptureSession><StrokeSet><Stroke><Point x='1' y='2'/></Stroke></StrokeSet></WhiteboardCaptureSession>"
)


@pytest.fixture
def four():
    return SequenceSet.from_flat(np.arange(8.0), offsets=np.array([0, 1, 3, 4, 8]), split_N=np.array([0, 0, 1, 2]))


def put(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")


def put_iam(folder):
    put(folder / "lineStrokes" / "a01" / "a01-000" / "a01-000u-01.xml", SESSION)
    put(folder / "ascii" / "a01" / "a01-000" / "a01-000u.txt", "CSR:\n\na line\n")


def put_table(path):
    table = pa.table({"x": [[1.0], [2.0, 3.0]]})
    if path.suffix == ".parquet":
        pq.write_table(table, path)
    else:
        feather.write_feather(table, path)


def test_an_npz_file_by_path_and_by_string(tmp_path, four, assert_same_set):
    write_npz(tmp_path / "four.npz", four)
    assert_same_set(open_sequences(tmp_path / "four.npz"), four)
    assert_same_set(open_sequences(str(tmp_path / "four.npz")), four)
    assert open_sequences(tmp_path / "four.npz").memory_mapped


@pytest.mark.parametrize("name", ["table.parquet", "table.arrow", "table.feather"])
def test_tables(tmp_path, name):
    put_table(tmp_path / name)
    assert open_sequences(tmp_path / name).lengths_N.tolist() == [1, 2]


def test_an_inkml_file_and_a_folder_of_them(tmp_path):
    put(tmp_path / "a.inkml", INK)
    put(tmp_path / "deep" / "b.inkml", INK)
    assert len(open_sequences(tmp_path / "a.inkml")) == 1
    assert len(open_sequences(tmp_path)) == 2


def test_an_iam_folder(tmp_path):
    put_iam(tmp_path)
    put(tmp_path / "README.txt", "About these lines.")
    assert open_sequences(tmp_path)[0].target == "a line"


def test_a_folder_with_one_data_file(tmp_path, four, assert_same_set):
    write_npz(tmp_path / "four.npz", four)
    for name in ("README.md", "readme.txt", "LICENSE.txt", ".hidden.txt", "notes.pdf", "deep/other.txt", "ink/a.inkml"):
        put(tmp_path / name, "About\n\nthis")
    assert_same_set(open_sequences(tmp_path), four)


def test_a_folder_with_several_data_files_lists_them(tmp_path, four):
    write_npz(tmp_path / "one.npz", four)
    write_npz(tmp_path / "two.npz", four)
    put(tmp_path / "three.txt", "words")
    with pytest.raises(StrettoError, match=r"3 data files: one\.npz, three\.txt, two\.npz\. Name one"):
        open_sequences(tmp_path)


def test_a_text_beside_ink_is_not_guessed_at(tmp_path):
    put_iam(tmp_path)
    put(tmp_path / "trainset.txt", "a01-000u")
    with pytest.raises(StrettoError, match=r"has the text trainset\.txt and ink below it"):
        open_sequences(tmp_path)


@pytest.mark.parametrize("name", ["data.csv", "data.pkl", "data.gz", "data.xml", "npz"])
def test_another_kind_of_file_is_refused_with_the_choice(tmp_path, name):
    put(tmp_path / name, "1,2")
    with pytest.raises(StrettoError, match=r"is not of a kind that Stretto reads.*\.npz, \.parquet.*IAM-OnDB"):
        open_sequences(tmp_path / name)


def test_a_folder_with_nothing_to_read_is_refused_with_the_choice(tmp_path):
    put(tmp_path / "README.md", "Nothing else.")
    with pytest.raises(StrettoError, match=r"holds nothing that Stretto reads.*\.npz, \.parquet.*IAM-OnDB"):
        open_sequences(tmp_path)


@pytest.mark.parametrize("read", [read_npz, read_parquet, read_text, read_inkml])
def test_a_missing_file_is_an_error_of_its_reader(tmp_path, read):
    with pytest.raises(StrettoError, match=r"(there is no file|could not read) '.*none\.ending'"):
        read(tmp_path / "none.ending")


@pytest.mark.parametrize("name", ["data.npz", "data.txt", "data.txt.gz", "data.parquet", "data.inkml"])
def test_a_pipe_is_refused_and_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    with pytest.raises(StrettoError, match="is a pipe or a device"):
        open_sequences(tmp_path / name)


def test_a_device_and_a_name_that_no_file_can_have_are_refused(tmp_path: Path) -> None:
    (tmp_path / "zero.txt").symlink_to("/dev/zero")
    with pytest.raises(StrettoError, match="is a pipe or a device"):
        open_sequences(tmp_path / "zero.txt")
    with pytest.raises(StrettoError, match="Check the path"):
        open_sequences("nul\0.npz")
