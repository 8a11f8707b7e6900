"""The same lines in two languages."""

import gzip

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.data import (
    LinePairs,
    SequenceSet,
    line_pairs,
    open_sequences,
    read_npz,
    read_parallel_text,
    write_npz,
)
from stretto.data.readers.parallel_text import holds_parallel_text
from stretto.errors import StrettoError

LINES = st.text(st.characters(exclude_characters="\r\n\ufeff", codec="utf-8"), min_size=1).map(str.strip).filter(bool)


def put(folder, **files):
    """Files by name, `_` for the dot before the ending; each a list of lines."""
    folder.mkdir(exist_ok=True)
    for name, lines in files.items():
        (folder / name.replace("_", ".")).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return folder


def put_all(folder):
    return put(
        folder,
        train_en=["a dog .", "two cats"],
        train_de=["ein hund .", "zwei katzen"],
        val_en=["a house"],
        val_de=["ein haus"],
        test_en=["a tree"],
        test_de=["ein baum"],
    )


def test_parts_and_languages_are_found(tmp_path):
    data = open_sequences(put_all(tmp_path / "pets"))
    assert data.name == "pets"
    assert data.split_N.tolist() == [0, 0, 1, 2]
    assert data.notes == ()
    assert data[1].target == "zwei katzen"
    assert "".join(data.alphabet[number] for number in data[0].features_TF[:, 0]) == "a dog ."
    pairs = line_pairs(data)
    assert pairs.languages == ("en", "de")
    assert pairs.sources == ["a dog .", "two cats", "a house", "a tree"]
    assert pairs.swapped() == LinePairs(sources=pairs.targets, targets=pairs.sources, languages=("de", "en"))


def test_without_english_the_first_ending_comes_first(tmp_path):
    folder = put(tmp_path, train_fr=["un", "deux", "trois"], train_de=["eins", "zwei", "drei"])
    data = read_parallel_text(folder)
    assert line_pairs(data).languages == ("de", "fr")
    assert any("drawn at random" in note for note in data.notes)
    assert sorted(set(data.split_N.tolist())) == [0, 1, 2]


def test_compressed_files_and_any_line_ends(tmp_path):
    put(tmp_path, train_en=["one ", "\ttwo"])
    (tmp_path / "train.de.gz").write_bytes(gzip.compress("\ufeffeins\r\nzwei".encode()))
    pairs = line_pairs(read_parallel_text(tmp_path))
    assert pairs.sources == ["one", "two"]
    assert pairs.targets == ["eins", "zwei"]


@pytest.mark.parametrize("name", ["val", "valid", "validation", "dev"])
def test_names_of_the_validation_part(tmp_path, name):
    put_all(tmp_path)
    for language in ("en", "de"):
        (tmp_path / f"val.{language}").rename(tmp_path / f"{name}.{language}")
    assert read_parallel_text(tmp_path).split_N.tolist() == [0, 0, 1, 2]


def test_of_several_test_parts_the_first_is_taken(tmp_path):
    put_all(tmp_path)
    put(tmp_path, test2017_en=["a boat"], test2017_de=["ein boot"])
    data = read_parallel_text(tmp_path)
    assert line_pairs(data).sources[-1] == "a tree"
    assert data.notes == ("the first test part is used, without test2017",)


def test_one_held_out_part_is_the_test_part(tmp_path):
    put(tmp_path, train_en=list("abcdefghij"), train_de=list("klmnopqrst"), dev_en=["x"], dev_de=["y"])
    data = read_parallel_text(tmp_path)
    assert line_pairs(data.part("test")).sources == ["x"]
    assert len(data.part("valid")) == 1
    assert any("a tenth of train" in note for note in data.notes)


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(LINES, LINES), min_size=1, max_size=6))
def test_every_pair_is_given_back(tmp_path_factory, pairs):
    folder = tmp_path_factory.mktemp("pairs")
    for place, language in enumerate(("en", "de")):
        text = "".join(f"{pair[place]}\n" for pair in pairs)
        (folder / f"train.{language}").write_bytes(text.encode())
    found = line_pairs(read_parallel_text(folder))
    assert list(zip(found.sources, found.targets, strict=True)) == pairs


def test_pairs_survive_a_subset_and_a_file(tmp_path):
    data = read_parallel_text(put_all(tmp_path / "pets"))
    part = line_pairs(data.part("train").subset([1]))
    assert part == LinePairs(sources=["two cats"], targets=["zwei katzen"], languages=("en", "de"))
    write_npz(tmp_path / "pets.npz", data)
    again = line_pairs(read_npz(tmp_path / "pets.npz"))
    assert (again.sources, again.targets) == (line_pairs(data).sources, line_pairs(data).targets)
    assert again.languages is None


@pytest.mark.parametrize("missing", ["train.de", "val.en", "test.de"])
def test_a_missing_file_is_named(tmp_path, missing):
    put_all(tmp_path)
    (tmp_path / missing).unlink()
    beside = missing[:-2] + ("en" if missing.endswith("de") else "de")
    with pytest.raises(StrettoError, match=rf"no {missing} or {missing}\.gz beside {beside}.*both languages"):
        open_sequences(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"val_de": ["ein haus", "noch ein haus"]}, r"val\.en has 1 lines and val\.de has 2 lines.*Line i"),
        *(
            ({"train_de": ["ein hund .", empty]}, r"train\.de': line 2 is empty.*both files")
            for empty in ("", "  ", "\u3000")
        ),
        ({"test_en": [], "test_de": []}, r"test\.en' has no lines"),
        ({"train_fr": ["un chien .", "deux chats"]}, r"3 languages: en, de, fr.*two"),
        ({"val_en_gz": ["a house"]}, r"both val\.en and val\.en\.gz"),
        ({"dev_en": ["a house"], "dev_de": ["ein haus"]}, "more than one validation part: val, dev"),
        ({"story_txt": ["Once upon a time", "", "there was"]}, r"two languages and story\.txt.*alone"),
    ],
)
def test_files_that_do_not_fit_are_named(tmp_path, files, message):
    put(put_all(tmp_path), **files)
    with pytest.raises(StrettoError, match=message):
        open_sequences(tmp_path)


def test_damaged_files_and_other_encodings_are_named(tmp_path):
    put_all(tmp_path)
    (tmp_path / "train.de").write_bytes("größe\nhaus\n".encode("latin-1"))
    with pytest.raises(StrettoError, match=r"train\.de' is not UTF-8 at byte 2"):
        open_sequences(tmp_path)
    (tmp_path / "train.de").unlink()
    (tmp_path / "train.de.gz").write_bytes(gzip.compress(b"ein hund .\nzwei katzen\n")[:-9])
    with pytest.raises(StrettoError, match=r"train\.de\.gz' is truncated"):
        open_sequences(tmp_path)


def test_a_readme_beside_it_is_no_data(tmp_path):
    put(put_all(tmp_path), README_txt=["About these lines."])
    assert len(open_sequences(tmp_path)) == 4


@pytest.mark.parametrize(
    "names",
    [["train.py", "train.sh"], ["train.txt", "valid.txt"], ["train.en"], ["a.en", "a.de"], ["val.en", "val.de"]],
)
def test_other_files_are_no_parallel_text(tmp_path, names):
    for name in names:
        (tmp_path / name).write_text("one\n", encoding="utf-8")
    assert not holds_parallel_text(tmp_path)


def test_other_data_are_no_pairs():
    data = SequenceSet.from_flat(np.arange(4.0), offsets=np.array([0, 2, 4]), name="waves")
    with pytest.raises(StrettoError, match=r"waves is not parallel text.*train\.en and train\.de"):
        line_pairs(data)


@pytest.mark.slow
def test_multi30k(shared_data):
    data = open_sequences(shared_data / "multi30k_en_de")
    assert [int((data.split_N == number).sum()) for number in range(3)] == [29_000, 1_014, 1_000]
    pairs = line_pairs(data)
    assert pairs.languages == ("en", "de")
    assert pairs.sources[0] == "two young , white males are outside near many bushes ."
    words = [len(line.split()) for line in pairs.targets[:29_000]]
    assert (min(words), max(words)) == (2, 44)
