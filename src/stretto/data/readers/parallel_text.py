"""Parallel text: the same lines in two languages, in files such as train.en and train.de.

Shape legend: N lines, S characters of all lines together.
"""

import dataclasses
import re
from pathlib import Path
from typing import Final, final

import numpy as np
import numpy.typing as npt

from stretto.data.readers.text import decode_text, number_characters
from stretto.data.sequences import SequenceSet
from stretto.data.targets import Transcripts
from stretto.errors import StrettoError

PARALLEL_FILE: Final = re.compile(
    r"(?P<part>train|val|valid|validation|dev|test[\w-]*)\.(?P<language>[a-z]{2,3}(?:[-_][A-Za-z]{2,4})?)(?:\.gz)?"
)
NOT_LANGUAGES: Final = frozenset(
    "bin cfg csv doc gz htm ini jpg js json log md npy npz pdf pkl png pt pth py rst sh svg tar toml tsv txt xml xz "
    "yml zip zst".split()
)
"""Endings of other files that look like the name of a language."""
VALID_NAMES: Final = ("val", "valid", "validation", "dev")
ENGLISH: Final = "en"


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LinePairs:
    """Lines and their translations.

    Attributes:
        sources: Lines in one language.
        targets: The same lines in the other.
        languages: Of the sources and of the targets; None if the data do not say.
    """

    sources: list[str]
    targets: list[str]
    languages: tuple[str, str] | None

    def swapped(self) -> "LinePairs":
        """The other direction of translation."""
        languages = None if self.languages is None else (self.languages[1], self.languages[0])
        return LinePairs(sources=self.targets, targets=self.sources, languages=languages)


def holds_parallel_text(folder: Path) -> bool:
    """Whether the files of a folder are named as parts in two or more languages, training among them."""
    found = _find_parallel_files(folder)
    return len({language for _, language in found}) > 1 and any(part == "train" for part, _ in found)


def read_parallel_text(folder: Path) -> SequenceSet:
    """Read a folder of parallel text: characters of the one language are the sequences, the other is the target.

    English comes first, if it is one of the two; otherwise the language whose ending is first in the alphabet.

    Args:
        folder: `train.LANGUAGE`, `val.LANGUAGE` (or valid, validation, dev) and `test.LANGUAGE` (or any name that
            begins with test) for two languages, plain or with .gz behind, in UTF-8; line i of the one is line i of
            the other. Without validation or test, these are drawn as for any set. Of several test parts the first is
            taken.

    Raises:
        StrettoError: A file is missing, damaged or not UTF-8; the two files of a part are not equally long; a line is
            empty.
    """
    files = _find_parallel_files(folder)
    languages = _find_two_languages(folder, files)
    parts, left_out = _find_parts(folder, {part for part, _ in files})
    lines: tuple[list[str], list[str]] = ([], [])
    split: list[int] = []
    for number, part in parts:
        pair = [_read_lines(folder, files, part=part, language=language) for language in languages]
        if len(pair[0]) != len(pair[1]):
            paths = [files[part, language].name for language in languages]
            raise StrettoError(
                f"{str(folder)!r}: {paths[0]} has {len(pair[0])} lines and {paths[1]} has {len(pair[1])} lines",
                fix="Line i of the one must translate line i of the other.",
            )
        for side, more in zip(lines, pair, strict=True):
            side.extend(more)
        split += [number] * len(pair[0])
    pairs = LinePairs(sources=lines[0], targets=lines[1], languages=languages)
    split_N = np.array(split, dtype=np.uint8) if len(parts) > 1 else None
    notes = (f"the first test part is used, without {', '.join(left_out)}",) if left_out else ()
    return parallel_set(pairs, split_N=split_N, name=folder.resolve().name, notes=notes)


def parallel_set(
    pairs: LinePairs, *, split_N: npt.NDArray[np.uint8] | None, name: str, notes: tuple[str, ...] = ()
) -> SequenceSet:
    """Pairs as a set: the numbers of the sources' characters, and the targets as transcripts."""
    text = "".join(pairs.sources)
    alphabet = "".join(sorted(set(text)))
    return SequenceSet.from_flat(
        number_characters(text, alphabet),
        offsets=np.cumsum([0, *map(len, pairs.sources)]),
        targets=Transcripts.of(pairs.targets, languages=pairs.languages),
        split_N=split_N,
        name=name,
        alphabet=alphabet,
        notes=notes,
    )


def line_pairs(data: SequenceSet) -> LinePairs:
    """The pairs of a set that `parallel_set` made.

    Raises:
        StrettoError: The sequences are not text, or have no text as targets.
    """
    if not data.alphabet or not isinstance(data.targets, Transcripts):
        raise StrettoError(
            f"{data.name} is not parallel text",
            fix="Give a folder with the same lines in two languages, such as train.en and train.de, with --data.",
        )
    known = np.frombuffer(data.alphabet.encode("utf-32-le"), dtype="<u4")
    return LinePairs(
        sources=[known[numbers_T1[:, 0]].tobytes().decode("utf-32-le") for numbers_T1 in data.arrays()],
        targets=[data.targets[index] for index in range(len(data))],
        languages=data.targets.languages,
    )


def _find_parallel_files(folder: Path) -> dict[tuple[str, str], Path]:
    found: dict[tuple[str, str], Path] = {}
    for path in sorted(folder.iterdir()):
        match = PARALLEL_FILE.fullmatch(path.name)
        if match is None or match["language"] in NOT_LANGUAGES or not path.is_file():
            continue
        key = match["part"], match["language"]
        if key in found:
            raise StrettoError(
                f"{str(folder)!r} has both {found[key].name} and {path.name}", fix="Remove one of the two."
            )
        found[key] = path
    return found


def _find_two_languages(folder: Path, files: dict[tuple[str, str], Path]) -> tuple[str, str]:
    languages = sorted({language for _, language in files}, key=lambda language: (language != ENGLISH, language))
    if len(languages) != 2:
        raise StrettoError(
            f"{str(folder)!r} has text in {len(languages)} languages: {', '.join(languages) or 'none'}",
            fix="Give a folder with two, in files such as train.en and train.de.",
        )
    return languages[0], languages[1]


def _find_parts(folder: Path, names: set[str]) -> tuple[list[tuple[int, str]], list[str]]:
    """Each part's number in a split and its name, and the test parts that are left out."""
    valid = [name for name in VALID_NAMES if name in names]
    test = sorted(name for name in names if name.startswith("test"))
    if len(valid) > 1:
        raise StrettoError(
            f"{str(folder)!r} has more than one validation part: {', '.join(valid)}", fix="Keep one of them."
        )
    # If there is only one of the two, it is 1, which stands for either.
    held_out = [*valid, *test[:1]]
    return [(0, "train"), *enumerate(held_out, start=1)], test[1:]


def _read_lines(folder: Path, files: dict[tuple[str, str], Path], *, part: str, language: str) -> list[str]:
    path = files.get((part, language))
    if path is None:
        beside = ", ".join(other.name for (name, _), other in files.items() if name == part) or "the others"
        raise StrettoError(
            f"{str(folder)!r} has no {part}.{language} or {part}.{language}.gz beside {beside}",
            fix="Give every part in both languages.",
        )
    lines = [line.strip() for line in decode_text(path).removesuffix("\n").split("\n")]
    if lines == [""]:
        raise StrettoError(f"{str(path)!r} has no lines", fix="Give at least one pair of lines in every part.")
    if "" in lines:
        raise StrettoError(
            f"{str(path)!r}: line {lines.index('') + 1} is empty", fix="Remove that line from both files."
        )
    return lines
