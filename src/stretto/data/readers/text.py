"""Plain text for language models: passages of characters, or sentences of words in parts.

Shape legend: S characters or words of all sequences together.
"""

import gzip
import re
import zlib
from collections.abc import Container, Mapping, Sequence
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from stretto.data.sequences import PARTS, Part, SequenceSet
from stretto.errors import StrettoError, list_some

BLANK_LINES: Final = re.compile(r"\n(?:[^\S\n]*\n)+")
MIN_CHARACTERS: Final = 2
PART_FILE: Final = re.compile(r"(?P<prefix>(?:.*[._-])?)(?P<part>train|valid|test)\.txt(?:\.gz)?", re.IGNORECASE)
END: Final = "<eos>"
"""Stands at the end of every sentence."""
UNKNOWN: Final = "<unk>"
"""Stands for any word that training has not seen, if training has it."""
MAX_TEXT_BYTES = 1 << 31
"""Of a file, uncompressed: more would fill the memory several times over."""


def read_text(path: Path) -> SequenceSet:
    """Read a text file: passages between blank lines are sequences, whose one feature is the character's number.

    Args:
        path: A `.txt` or `.txt.gz` file in UTF-8; line ends of any system count as one newline character.

    Raises:
        StrettoError: The file is damaged, is not UTF-8, or has no passage of two characters.
    """
    text = decode_text(path)
    passages = [passage.strip("\n") for passage in BLANK_LINES.split(f"\n{text}\n")]
    kept = [passage for passage in passages if len(passage) >= MIN_CHARACTERS]
    short = sum(map(bool, passages)) - len(kept)
    if not kept:
        raise StrettoError(
            f"{str(path)!r} has no passage of {MIN_CHARACTERS} or more characters",
            fix="Give text, with a blank line between passages.",
        )
    alphabet = "".join(sorted(set(text)))
    return SequenceSet.from_flat(
        number_characters("".join(kept), alphabet),
        offsets=np.cumsum([0, *map(len, kept)]),
        name=_find_text_name(path),
        alphabet=alphabet,
        notes=(f"{short} passages shorter than {MIN_CHARACTERS} characters are left out",) if short else (),
    )


def number_characters(text: str, alphabet: str) -> npt.NDArray[np.unsignedinteger]:
    """The number of each character in a sorted alphabet, in the smallest type that holds them, of shape (S, 1)."""
    known, flat_S = (np.frombuffer(part.encode("utf-32-le"), dtype="<u4") for part in (alphabet, text))
    return np.searchsorted(known, flat_S).astype(np.min_scalar_type(len(alphabet) - 1))[:, None]


def _find_text_name(path: Path) -> str:
    """The file's name without its endings."""
    return Path(path.stem).stem if path.suffix.lower() == ".gz" else path.stem


def decode_text(path: Path) -> str:
    """The text of a plain or compressed file in UTF-8; line ends of any system become newlines."""
    try:
        # One byte more than there may be.
        with gzip.open(path) if path.suffix.lower() == ".gz" else path.open("rb") as stream:
            plain = stream.read(MAX_TEXT_BYTES + 1)
        if len(plain) > MAX_TEXT_BYTES:
            raise MemoryError(f"it has more than {MAX_TEXT_BYTES:,} bytes")
    except MemoryError as error:
        raise StrettoError(
            f"{str(path)!r} is too large for the memory ({error})", fix="Give a part of it as a file of its own."
        ) from error
    except FileNotFoundError:
        raise StrettoError(f"there is no file {str(path)!r}", fix="Check the path.") from None
    except (OSError, EOFError, zlib.error) as error:
        raise StrettoError(
            f"{str(path)!r} is truncated or cannot be read ({error})", fix="Write or copy the file again."
        ) from error
    try:
        text = plain.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise StrettoError(
            f"{str(path)!r} is not UTF-8 at byte {error.start}", fix="Convert it to UTF-8 before reading."
        ) from error
    return text.replace("\r\n", "\n").replace("\r", "\n")


def holds_word_text(folder: Path) -> bool:
    """Whether a folder has a text in parts: a training file and one to measure with, such as ptb.valid.txt."""
    found = {part for part, paths in _find_part_files(folder).items() if paths}
    return "train" in found and len(found) > 1


def read_word_text(path: Path, *, whole: bool = False) -> SequenceSet:
    """Read sentences of words: a line is a sequence, the one feature is the word's number.

    Words are separated by blanks, and `<eos>` ends every line; lines without a word are left out. Words are numbered as
    they first appear in the training part. A word of another part that training does not have becomes `<unk>`.

    Args:
        path: A folder with PREFIX.train.txt, PREFIX.valid.txt and PREFIX.test.txt, each plain or .gz; or one such
            file, whose last lines then serve for validation and test, a tenth each, and whose words are all known.
        whole: Leave a single file undivided.

    Raises:
        StrettoError: A part is missing or there twice, a file is damaged, or a word is unknown and there is no `<unk>`.
    """
    if path.is_dir():
        files = _choose_files(path)
        sentences = {part: _read_sentences(file) for part, file in files.items()}
        known = {word for sentence in sentences["train"] for word in sentence}
        parts = {part: _replace_unknown(sentences[part], known, path=file) for part, file in files.items()}
        return word_set(parts, name=_name_of(files["train"]))
    lines = _read_sentences(path)
    if whole:
        return word_set({"train": lines, "valid": [], "test": []}, name=_find_text_name(path))
    tenth = max(1, len(lines) // 10)
    if len(lines) <= 2 * tenth:
        raise StrettoError(
            f"{str(path)!r} has {len(lines)} lines with words", fix="Give at least three lines, one sentence each."
        )
    return word_set(
        {"train": lines[: -2 * tenth], "valid": lines[-2 * tenth : -tenth], "test": lines[-tenth:]},
        name=_find_text_name(path),
        notes=("one file of words: its last lines are kept, a tenth for validation and a tenth for test",),
    )


def word_set(
    sentences: Mapping[Part, Sequence[Sequence[str]]], *, name: str, notes: tuple[str, ...] = ()
) -> SequenceSet:
    """Sentences, each a list of words that ends with `<eos>`, as numbers in the order in which words first appear."""
    flat = [word for part in PARTS for sentence in sentences[part] for word in sentence]
    words = tuple(dict.fromkeys(flat))
    number_of = {word: number for number, word in enumerate(words)}
    return SequenceSet.from_flat(
        np.array([number_of[word] for word in flat], dtype=np.min_scalar_type(len(words) - 1)),
        offsets=np.cumsum([0, *(len(sentence) for part in PARTS for sentence in sentences[part])]),
        split_N=np.repeat(np.arange(len(PARTS)), [len(sentences[part]) for part in PARTS]),
        split_complete=True,
        name=name,
        vocabulary=words,
        notes=notes,
    )


def _replace_unknown(sentences: list[list[str]], known: Container[str], *, path: Path) -> list[list[str]]:
    unknown = list(dict.fromkeys(word for sentence in sentences for word in sentence if word not in known))
    if unknown and UNKNOWN not in known:
        raise StrettoError(
            f"{str(path)!r} has words that the training part does not have, and there is no {UNKNOWN} there: "
            f"{list_some([*map(repr, unknown)])}",
            fix=f"Write {UNKNOWN} for rare words in the training part too.",
        )
    return [[word if word in known else UNKNOWN for word in sentence] for sentence in sentences]


def _read_sentences(path: Path) -> list[list[str]]:
    sentences = [[*line.split(), END] for line in decode_text(path).split("\n") if line.split()]
    if not sentences:
        raise StrettoError(f"{str(path)!r} has no words", fix="Give one sentence per line, words separated by blanks.")
    return sentences


def _find_part_files(folder: Path) -> dict[Part, list[Path]]:
    found: dict[Part, list[Path]] = {part: [] for part in PARTS}
    for path in sorted(folder.iterdir()):
        match = PART_FILE.fullmatch(path.name)
        if match and path.is_file() and not path.name.startswith("."):
            found[next(part for part in PARTS if part == match["part"].lower())].append(path)
    return found


def _choose_files(folder: Path) -> dict[Part, Path]:
    found = _find_part_files(folder)
    for part, paths in found.items():
        if len(paths) != 1:
            there = f"has {', '.join(path.name for path in paths)}" if paths else "has none"
            raise StrettoError(
                f"{str(folder)!r} {there} for the {part} part",
                fix=f"Keep exactly one file named like NAME.{part}.txt or NAME.{part}.txt.gz.",
            )
    return {part: paths[0] for part, paths in found.items()}


def _name_of(train: Path) -> str:
    match = PART_FILE.fullmatch(train.name)
    return (match["prefix"].rstrip("._-") if match else "") or train.parent.name
