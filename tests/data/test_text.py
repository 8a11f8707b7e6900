"""Text: passages of characters, and sentences of words in parts."""

import gzip

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.data import NoTargets, make_text, open_sequences, read_text, read_word_text
from stretto.data.readers.text import END, holds_word_text
from stretto.errors import StrettoError


def characters_of(data):
    return ["".join(data.alphabet[number] for number in data[index].features_TF[:, 0]) for index in range(len(data))]


def test_passages_are_numbered_characters(tmp_path):
    path = tmp_path / "poem.txt"
    path.write_text("banana\nab\n\nnab\n", encoding="utf-8")
    data = read_text(path)
    assert data.name == "poem"
    assert data.alphabet == "\nabn"
    assert data[1].features_TF.tolist() == [[3], [1], [2]]
    assert characters_of(data) == ["banana\nab", "nab"]
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
    assert characters_of(data) == passages


@pytest.mark.parametrize(("name", "pack"), [("poem.txt", bytes), ("POEM.TXT.GZ", gzip.compress)])
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
def test_blank_lines_of_any_kind_part_passages(tmp_path, text, name, pack):
    path = tmp_path / name
    path.write_bytes(pack(text.encode()))
    data = open_sequences(path)
    assert data.name == name.partition(".")[0]
    assert characters_of(data) == ["ab", "cd"]


def test_passages_of_one_character_are_left_out_and_counted(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("a\n\nbc\n\nd\n\nef", encoding="utf-8")
    data = read_text(path)
    assert characters_of(data) == ["bc", "ef"]
    assert "2 passages shorter than 2 characters are left out" in data.notes


@pytest.mark.parametrize(("count", "dtype"), [(256, np.uint8), (257, np.uint16)])
def test_the_type_is_as_small_as_the_alphabet_allows(tmp_path, count, dtype):
    path = tmp_path / "wide.txt"
    path.write_text("".join(map(chr, range(0x4E00, 0x4E00 + count))), encoding="utf-8")
    data = read_text(path)
    assert len(data.alphabet) == count
    assert data.features_SF.dtype == dtype
    assert data.features_SF.max() == count - 1


PACKED = gzip.compress(np.random.default_rng(0).bytes(1000).hex().encode())


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        *(("a.txt", content, "has no passage of 2 or more characters") for content in (b"", b"\n\n  \n", b"a\n\nb\n")),
        ("a.txt", "naïve".encode("latin-1"), "is not UTF-8 at byte 2"),
        *(("a.txt.gz", PACKED[: int(share * len(PACKED))], "") for share in (0.0, 0.1, 0.5, 0.99)),
        ("a.txt.gz", PACKED[:100] + bytes(20) + PACKED[120:], "is truncated or cannot be read"),
    ],
)
def test_a_file_that_is_no_text_is_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(StrettoError, match=f"{name}' {message}"):
        read_text(tmp_path / name)


@pytest.mark.slow
def test_tiny_shakespeare(shared_data):
    path = shared_data / "tinyshakespeare" / "input.txt.gz"
    data = open_sequences(path.parent)
    assert len(data) == 7_222
    assert (data.lengths_N.min(), np.median(data.lengths_N), data.lengths_N.max()) == (4, 83, 3_080)
    assert len(data.alphabet) == 65
    assert data.features_SF.dtype == np.uint8
    text = gzip.decompress(path.read_bytes()).decode()
    assert characters_of(data) == [speech.strip("\n") for speech in text.split("\n\n")]


TRAIN, VALID, TEST = "a rose is <unk>\n\n  a   rose \n", "is a rose\n", "a thorn is\nrose\n"


def put_parts(folder, **texts):
    for part, text in texts.items():
        (folder / f"poem.{part}.txt").write_text(text, encoding="utf-8")


def words_of(data):
    return [" ".join(data.vocabulary[number] for number in data[index].features_TF[:, 0]) for index in range(len(data))]


def test_lines_are_sentences_and_words_are_numbered_as_they_appear(tmp_path):
    put_parts(tmp_path, train=TRAIN, valid=VALID, test=TEST)
    data = open_sequences(tmp_path)
    assert data.name == "poem"
    assert data.vocabulary == ("a", "rose", "is", "<unk>", END)
    assert data.alphabet == ""
    assert words_of(data.part("train")) == ["a rose is <unk> <eos>", "a rose <eos>"]
    assert words_of(data.part("valid")) == ["is a rose <eos>"]
    assert words_of(data.part("test")) == ["a <unk> is <eos>", "rose <eos>"]
    assert data.features_SF.dtype == np.uint8
    assert data.notes == ()


def test_other_forms_of_the_text_may_lie_beside_it_and_names_have_no_prefix(tmp_path):
    for part, text in (("train", TRAIN), ("valid", VALID), ("test", TEST)):
        (tmp_path / f"{part}.txt.gz").write_bytes(gzip.compress(text.encode()))
    (tmp_path / "vocab.txt").write_text("a\n\nrose", encoding="utf-8")
    np.savez(tmp_path / "ids.npz", train=np.arange(3))
    data = open_sequences(tmp_path)
    assert data.name == tmp_path.name
    assert words_of(data)[0] == "a rose is <unk> <eos>"


def test_one_training_file_alone_stays_a_text_of_characters(tmp_path):
    put_parts(tmp_path, train="ab\n\ncd")
    assert not holds_word_text(tmp_path)
    assert open_sequences(tmp_path).alphabet == "\nabcd"


@settings(deadline=None, max_examples=40)
@given(st.lists(st.lists(st.sampled_from("one two three four five".split()), min_size=1), min_size=3, max_size=40))
def test_one_file_gives_back_every_sentence_in_order(tmp_path_factory, sentences):
    path = tmp_path_factory.mktemp("text") / "all.txt"
    path.write_text("\n".join(" ".join(words) for words in sentences), encoding="utf-8")
    data = read_word_text(path)
    assert words_of(data) == [" ".join([*words, END]) for words in sentences]
    assert (np.diff(data.split_N.astype(int)) >= 0).all()
    assert set(data.split_N.tolist()) == {0, 1, 2}
    assert len(data.notes) == 1


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ({"train": TRAIN, "valid": VALID}, "has none for the test part"),
        ({"train": "a rose", "valid": "a rose", "test": "a thorn or two"}, "poem.test.txt.*'thorn', 'or', 'two'"),
        ({"train": TRAIN, "valid": "\n \n", "test": TEST}, "poem.valid.txt' has no words"),
    ],
)
def test_what_is_missing_is_named(tmp_path, texts, message):
    put_parts(tmp_path, **texts)
    with pytest.raises(StrettoError, match=message):
        open_sequences(tmp_path)


def test_a_part_that_is_there_twice_is_refused(tmp_path):
    put_parts(tmp_path, train=TRAIN, valid=VALID, test=TEST)
    (tmp_path / "poem.test.txt.gz").write_bytes(gzip.compress(TEST.encode()))
    with pytest.raises(StrettoError, match=r"has poem.test.txt, poem.test.txt.gz for the test part"):
        open_sequences(tmp_path)


def test_a_file_of_two_lines_is_too_little(tmp_path):
    path = tmp_path / "short.txt"
    path.write_text("one\ntwo", encoding="utf-8")
    with pytest.raises(StrettoError, match="has 2 lines with words"):
        read_word_text(path)


@pytest.mark.slow
def test_the_penn_treebank_has_its_published_numbers(shared_data):
    folder = shared_data / "ptb"
    if not folder.is_dir():
        pytest.skip("the Penn Treebank is not among the real data sets")
    data = open_sequences(folder)
    stored = np.load(folder / "ptb_ids.npz")
    assert len(data.vocabulary) == 10_000
    for part in ("train", "valid", "test"):
        chosen = data.part(part)
        begin, end = chosen.starts_N[0], chosen.starts_N[-1] + chosen.lengths_N[-1]
        np.testing.assert_array_equal(data.features_SF[begin:end, 0], stored[part])


def test_the_embedded_text_is_the_same_every_time_and_uses_a_few_hundred_words():
    data, again = make_text(), make_text()
    assert data.digest() == again.digest()
    assert make_text(seed=1).digest() != data.digest()
    assert 200 < len(data.vocabulary) < 600
    assert [len(data.part(part)) for part in ("train", "valid", "test")] == [5000, 500, 500]
    train = set(data.part("train").features_SF[: data.part("train").num_steps, 0].tolist())
    assert train == set(range(len(data.vocabulary)))


def test_verbs_of_the_embedded_text_agree_with_their_subject():
    """After "every badger" comes "chases", after "many badgers" "chase"; after "yesterday" neither."""
    for sentence in words_of(make_text(num_train=2000)):
        words = sentence.split()
        singular, plural = {"chases", "guards", "reaches"}, {"chase", "guard", "reach"}
        if words[0] in ("every", "this", "a") and "and" not in words:
            assert not plural & set(words[3:]) - {"guard"}, sentence
        if words[0] in ("many", "these", "some") and "and" not in words:
            assert not (singular - {"guards"}) & set(words), sentence
        if words[0] in ("yesterday", "last-year", "once", "long-ago"):
            assert not (singular - {"guards"} | {"chase", "reach", "will"}) & set(words), sentence
        assert words[-1] == END


@pytest.mark.parametrize("name", ["large.txt", "large.txt.gz"])
def test_text_beyond_the_limit_is_refused_before_it_fills_the_memory(tmp_path, monkeypatch, name):
    raw = b"a" * 101
    (tmp_path / name).write_bytes(gzip.compress(raw) if name.endswith("gz") else raw)
    monkeypatch.setattr("stretto.data.readers.text.MAX_TEXT_BYTES", 101)
    assert read_text(tmp_path / name).num_steps == 101
    monkeypatch.setattr("stretto.data.readers.text.MAX_TEXT_BYTES", 100)
    with pytest.raises(StrettoError, match="too large for the memory"):
        read_text(tmp_path / name)
