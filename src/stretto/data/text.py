"""Plain text: passages of characters, for language models.

Shape legend: S characters of all passages together.
"""

import gzip
import re
import zlib
from pathlib import Path
from typing import Final

import numpy as np

from stretto.data.sequences import SequenceSet
from stretto.errors import StrettoError

BLANK_LINES: Final = re.compile(r"\n(?:[^\S\n]*\n)+")
FEWEST_CHARACTERS: Final = 2


def read_text(path: Path) -> SequenceSet:
    """Read a text file: passages between blank lines are sequences, the one feature is the character's number.

    Args:
        path: A `.txt` or `.txt.gz` file in UTF-8; line ends of any system count as one newline character.

    Raises:
        StrettoError: The file is damaged, is not UTF-8, or has no passage of two characters.
    """
    text = decoded_text(path)
    passages = [passage.strip("\n") for passage in BLANK_LINES.split(f"\n{text}\n")]
    kept = [passage for passage in passages if len(passage) >= FEWEST_CHARACTERS]
    short = sum(map(bool, passages)) - len(kept)
    if not kept:
        raise StrettoError(
            f"{str(path)!r} has no passage of {FEWEST_CHARACTERS} or more characters",
            fix="Give text, with a blank line between passages.",
        )
    alphabet = "".join(sorted(set(text)))
    known, flat_S = (np.frombuffer(t.encode("utf-32-le"), dtype="<u4") for t in (alphabet, "".join(kept)))
    numbers_S = np.searchsorted(known, flat_S).astype(np.min_scalar_type(len(alphabet) - 1))
    return SequenceSet.from_flat(
        numbers_S[:, None],
        offsets=np.cumsum([0, *map(len, kept)]),
        name=text_name(path),
        alphabet=alphabet,
        notes=(f"{short} passages shorter than {FEWEST_CHARACTERS} characters are left out",) if short else (),
    )


def text_name(path: Path) -> str:
    """The file's name without its endings."""
    return Path(path.stem).stem if _is_compressed(path) else path.stem


def _is_compressed(path: Path) -> bool:
    return path.suffix.lower() == ".gz"


def decoded_text(path: Path) -> str:
    """The text of a plain or compressed file in UTF-8; line ends of any system become newlines."""
    try:
        raw = path.read_bytes()
        plain = gzip.decompress(raw) if _is_compressed(path) else raw
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
