"""Passages of characters."""

import gzip

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.data import NoTargets
from stretto.data.text import read_text
from stretto.errors import StrettoError


def spelt(data):
    return ["".join(data.alphabet[number] for number in data[index].features_TF[:, 0]) for index in range(len(data))]


def test_passages_are_numbered_characters(tmp_path):
    path = tmp_path / "poem.txt"
    path.write_text("banana\nab\n\nnab\n", encoding="utf-8")
    data = read_text(path)
    assert data.name == "poem"
    assert data.alphabet == "\nabn"
    assert data[1].features_TF.tolist() == [[3], [1], [2]]
    assert spelt(data) == ["banana\nab", "nab"]
    assert data.features_SF.dtype == np.uint8
    assert isinstance(data.targets, NoTargets)
    assert len(data.notes) == 1


@settings(deadline=None, max_examples=60)
@given(
    st.lists(
        st.text(st.characters(exclude_characters="\r\n\ufeff", codec="utf-8"), min_size=2).filter(str.strip), min_size=1
    )
)
def test_every_passage_is_given_back(tmp_path_factory, passages):
    path = tmp_path_factory.mktemp("text") / "passages.txt"
    path.write_bytes("\n\n".join(passages).encode())
    data = read_text(path)
    assert spelt(data) == passages


@pytest.mark.parametrize(
    "text",
    [
        "ab\n\ncd",
        "ab\n\n\n\ncd\n\n",
        "\n\nab\n \t\ncd\n",
        "ab\r\n\r\ncd\r\n",
        "  \nab\n\ncd\n  ",
        "\ufeffab\r\rcd",
        "ab\n\u3000\ncd",
    ],
)
def test_blank_lines_of_any_kind_part_passages(tmp_path, text):
    path = tmp_path / "parted.txt"
    path.write_bytes(text.encode())
    assert spelt(read_text(path)) == ["ab", "cd"]


def test_spaces_at_the_ends_of_a_passage_stay(tmp_path):
    path = tmp_path / "spaces.txt"
    path.write_text("  ab \n\n cd", encoding="utf-8")
    assert spelt(read_text(path)) == ["  ab ", " cd"]


def test_passages_of_one_character_are_left_out_and_counted(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("a\n\nbc\n\nd\n\nef", encoding="utf-8")
    data = read_text(path)
    assert spelt(data) == ["bc", "ef"]
    assert "2 passages shorter than 2 characters are left out" in data.notes


@pytest.mark.parametrize(("count", "dtype"), [(256, np.uint8), (257, np.uint16)])
def test_the_type_is_as_small_as_the_alphabet_allows(tmp_path, count, dtype):
    path = tmp_path / "wide.txt"
    path.write_text("".join(map(chr, range(0x4E00, 0x4E00 + count))), encoding="utf-8")
    data = read_text(path)
    assert len(data.alphabet) == count
    assert data.features_SF.dtype == dtype
    assert data.features_SF.max() == count - 1


@pytest.mark.parametrize("name", ["poem.txt.gz", "POEM.TXT.GZ"])
def test_compressed_text_is_read(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(gzip.compress(b"ab\n\ncd"))
    data = read_text(path)
    assert data.name == name.partition(".")[0]
    assert spelt(data) == ["ab", "cd"]


@pytest.mark.parametrize("content", [b"", b"\n\n  \n", b"a\n\nb\n"])
def test_a_file_without_passages_is_refused(tmp_path, content):
    path = tmp_path / "empty.txt"
    path.write_bytes(content)
    with pytest.raises(StrettoError, match=r"empty\.txt' has no passage of 2 or more characters"):
        read_text(path)


def test_bytes_that_are_not_utf8_are_refused(tmp_path):
    path = tmp_path / "latin.txt"
    path.write_bytes("naïve".encode("latin-1"))
    with pytest.raises(StrettoError, match=r"latin\.txt' is not UTF-8 at byte 2"):
        read_text(path)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.99])
def test_truncated_gzip_is_refused(tmp_path, share):
    whole = gzip.compress(np.random.default_rng(0).bytes(1000).hex().encode())
    path = tmp_path / "cut.txt.gz"
    path.write_bytes(whole[: int(share * len(whole))])
    with pytest.raises(StrettoError, match=r"cut\.txt\.gz'"):
        read_text(path)


def test_damaged_gzip_is_refused(tmp_path):
    raw = bytearray(gzip.compress(np.random.default_rng(0).bytes(1000).hex().encode()))
    raw[100:120] = bytes(20)
    path = tmp_path / "damaged.txt.gz"
    path.write_bytes(raw)
    with pytest.raises(StrettoError, match=r"damaged\.txt\.gz' is truncated or cannot be read"):
        read_text(path)


def test_a_missing_file_is_told(tmp_path):
    with pytest.raises(StrettoError, match=r"there is no file '.*none\.txt'"):
        read_text(tmp_path / "none.txt")


def test_tiny_shakespeare(shared_data):
    path = shared_data / "tinyshakespeare" / "input.txt.gz"
    data = read_text(path)
    assert len(data) == 7_222
    assert (data.lengths_N.min(), np.median(data.lengths_N), data.lengths_N.max()) == (4, 83, 3_080)
    assert len(data.alphabet) == 65
    assert data.features_SF.dtype == np.uint8
    text = gzip.decompress(path.read_bytes()).decode()
    assert spelt(data) == [speech.strip("\n") for speech in text.split("\n\n")]
