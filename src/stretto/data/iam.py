"""The IAM on-line handwriting database (IAM-OnDB): lines of strokes in XML, transcripts in text files beside them."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import numpy as np
import numpy.typing as npt

from stretto.data.inkml import Ink, ink_set, xml_root
from stretto.data.sequences import SequenceSet
from stretto.errors import StrettoError

LINE_FILE: Final = re.compile(r"(?P<form>[A-Za-z0-9]+-[0-9]+)(?P<letter>[A-Za-z]?)-(?P<number>[0-9]+)\.xml")
ROOT: Final = "WhiteboardCaptureSession"
MOST_NAMED = 12


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Line:
    path: Path
    form: str
    sheet: str
    number: int


def read_iam(folder: Path) -> SequenceSet:
    """Read IAM-OnDB: each stroke file is one line, as pen movement (dx, dy, pen-up) with its transcript.

    Args:
        folder: Holds, at any depth, stroke files such as `a01-000u-01.xml` and the transcripts `a01-000u.txt`. The text
            of line 1 is the first line under `CSR:` that is not empty, and so on.

    Raises:
        StrettoError: A file is missing or cannot be used; the message names it.
    """
    lines = list(_lines(folder))
    if not lines:
        raise StrettoError(
            f"there is no stroke file such as a01-000u-01.xml below {str(folder)!r}",
            fix="Unpack lineStrokes-all.tar.gz and ascii-all.tar.gz of IAM-OnDB there.",
        )
    texts = _texts(folder, lines)
    return ink_set(
        (
            Ink(strokes=_strokes(line.path), text=texts[line.path], group=line.form, source=str(line.path))
            for line in lines
        ),
        name=folder.name,
        note="split by form, by a hash of its name: about 80 % train, 10 % valid, 10 % test; "
        "no form is in two parts, but a writer of several forms may be",
    )


def _lines(folder: Path) -> Iterator[_Line]:
    for path in sorted(folder.rglob("*.xml")):
        match = LINE_FILE.fullmatch(path.name)
        if match:
            form, letter, number = match["form"], match["letter"], int(match["number"])
            yield _Line(path=path, form=form, sheet=form + letter, number=number)


def _texts(folder: Path, lines: list[_Line]) -> dict[Path, str]:
    """The transcript of every line; all lines without one are named at once."""
    sheets = {line.sheet for line in lines}
    found: dict[str, list[Path]] = {}
    for path in sorted(folder.rglob("*.txt")):
        if path.stem in sheets:
            found.setdefault(path.stem, []).append(path)
    for sheet, paths in found.items():
        if len(paths) > 1:
            raise StrettoError(
                f"there are {len(paths)} transcripts of {sheet!r}: {', '.join(map(str, paths))}", fix="Keep one."
            )
    transcripts = {sheet: _transcript(paths[0]) for sheet, paths in found.items()}
    texts: dict[Path, str] = {}
    missing: list[_Line] = []
    for line in lines:
        of_sheet = transcripts.get(line.sheet, [])
        if 1 <= line.number <= len(of_sheet):
            texts[line.path] = of_sheet[line.number - 1]
        else:
            missing.append(line)
    if missing:
        first = missing[0]
        known = transcripts.get(first.sheet)
        why = f"no {first.sheet}.txt" if known is None else f"{first.sheet}.txt has {len(known)} lines under CSR:"
        names = ", ".join(line.path.name for line in missing[:MOST_NAMED])
        more = f" and {len(missing) - MOST_NAMED} more" if len(missing) > MOST_NAMED else ""
        raise StrettoError(
            f"{str(folder)!r}: {len(missing)} of {len(lines)} stroke files have no transcript ({why}): {names}{more}",
            fix="Unpack the ascii files beside the stroke files, or remove the stroke files that have no text.",
        )
    return texts


def _transcript(path: Path) -> list[str]:
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise StrettoError(f"could not read {str(path)!r} ({error})", fix="Copy the file again.") from error
    if "CSR:" not in lines:
        raise StrettoError(
            f"{str(path)!r} has no line `CSR:`", fix="Use the ascii files of IAM-OnDB, whose transcripts follow it."
        )
    return [line for line in lines[lines.index("CSR:") + 1 :] if line]


def _strokes(path: Path) -> list[npt.NDArray[np.float64]]:
    root = xml_root(path)
    if root.tag != ROOT:
        raise StrettoError(f"{str(path)!r} has the root {root.tag!r}, not {ROOT!r}", fix="Remove the file.")
    strokes = []
    for stroke in root.iterfind("StrokeSet/Stroke"):
        try:
            points = [[float(int(point.attrib[axis])) for axis in "xy"] for point in stroke.iterfind("Point")]
        except (KeyError, ValueError, OverflowError) as error:
            raise StrettoError(
                f"{str(path)!r} has a point without whole numbers x and y ({error})", fix="Copy the file again."
            ) from error
        if points:
            strokes.append(np.array(points, dtype=np.float64))
    return strokes
