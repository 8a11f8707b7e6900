"""InkML files, and what all ink in XML files shares: safe parsing, and a split that keeps groups whole.

Shape legend: P points of a stroke, 2 coordinates (x to the right, y down).
"""

import dataclasses
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Final
from xml.etree.ElementTree import Element

import numpy as np
import numpy.typing as npt

from stretto.data.ink import line_features
from stretto.data.lines import part_of
from stretto.data.sequences import PARTS, SequenceSet
from stretto.data.targets import NoTargets, Transcripts
from stretto.errors import StrettoError
from stretto.extras import optional

NAMESPACE: Final = "{http://www.w3.org/2003/InkML}"
TRANSCRIPT_TYPES: Final = ("truth", "transcription", "label", "normalizedLabel")
DECIMAL: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", re.ASCII)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Ink:
    """What one file holds.

    Attributes:
        strokes: The points of each stroke, as (x, y) rows.
        text: What is written, if the file tells.
        group: Files of one group are in the same part of the split.
        source: Named in errors.
    """

    strokes: list[npt.NDArray[np.float64]]
    text: str | None
    group: str
    source: str


def read_inkml(path: Path) -> SequenceSet:
    """Read InkML: each file is one sequence of pen movement (dx, dy, pen-up).

    Args:
        path: One `.inkml` file, or a folder with such files at any depth. The transcript is an `annotation` of the type
            truth, transcription, label or normalizedLabel. Coordinates must be plain decimals.

    Raises:
        StrettoError: There is no InkML, or a file of it cannot be used; the message names the file.
    """
    files = sorted(path.rglob("*.inkml")) if path.is_dir() else [path]
    if not files:
        raise StrettoError(f"there is no .inkml file below {str(path)!r}", fix="Check the path.")
    return ink_set(
        (_ink(file) for file in files),
        name=path.name if path.is_dir() else path.stem,
        note="split by file name, by a hash of it: about 80 % train, 10 % valid, 10 % test",
    )


def xml_root(path: Path) -> Element:
    """Parse an XML file; document types and entities are refused, so nothing is expanded or fetched."""
    etree = optional("defusedxml.ElementTree")
    try:
        root: Element = etree.parse(path, forbid_dtd=True).getroot()
    except OSError as error:
        raise StrettoError(f"could not read {str(path)!r}: {error.strerror or error}", fix="Check the path.") from error
    except (SyntaxError, LookupError, ValueError) as error:
        raise StrettoError(
            f"{str(path)!r} is damaged or no plain XML ({error})",
            fix="Write or copy it again; document types and entities are never read.",
        ) from error
    return root


def ink_set(inks: Iterable[Ink], *, name: str, note: str) -> SequenceSet:
    """Make one set of many inks: transcripts for all or for none, groups in one part each."""
    features, texts, split, silent = [], [], [], []
    for ink in inks:
        if not ink.strokes:
            raise StrettoError(f"{ink.source!r} has no strokes", fix="Remove the file.")
        features.append(line_features(ink.strokes, source=ink.source))
        split.append(PARTS.index(part_of(ink.group)))
        if ink.text is None:
            silent.append(ink.source)
        else:
            texts.append(ink.text)
    if texts and silent:
        raise StrettoError(
            f"{silent[0]!r} has no transcript, as {len(silent)} of {len(features)} files",
            fix="Give every file a transcript, or none.",
        )
    return SequenceSet.from_flat(
        np.concatenate(features),
        offsets=np.cumsum([0, *map(len, features)]),
        targets=Transcripts.of(texts) if texts else NoTargets(count=len(features)),
        split_N=np.array(split, dtype=np.uint8),
        split_complete=True,
        name=name,
        notes=(note,),
    )


def _ink(path: Path) -> Ink:
    root = xml_root(path)
    if root.tag not in ("ink", f"{NAMESPACE}ink"):
        raise StrettoError(f"{str(path)!r} has the root {root.tag!r}, not InkML's `ink`", fix="Remove the file.")
    prefix = root.tag.removesuffix("ink")
    axes = _axes(root, prefix, path=path)
    for definitions in root.findall(f"{prefix}definitions"):
        root.remove(definitions)
    strokes = [_points(trace, axes=axes, path=path) for trace in root.iter(f"{prefix}trace")]
    return Ink(
        strokes=[stroke for stroke in strokes if len(stroke)],
        text=_transcript(root, prefix),
        group=path.stem,
        source=str(path),
    )


def _axes(root: Element, prefix: str, *, path: Path) -> tuple[tuple[int, float], tuple[int, float]]:
    """The place of x and of y among the channels, each with its sign: +1 for x to the right and y down."""
    layouts = {
        tuple((channel.get("name", ""), channel.get("orientation", "+ve")) for channel in form.iter(f"{prefix}channel"))
        for form in root.iter(f"{prefix}traceFormat")
    } - {()}
    if not layouts:
        return (0, 1.0), (1, 1.0)
    if len(layouts) > 1:
        raise StrettoError(
            f"{str(path)!r} has {len(layouts)} different trace formats", fix="Write all its traces in one format."
        )
    layout = layouts.pop()
    names = [name for name, _ in layout]
    if "X" not in names or "Y" not in names:
        raise StrettoError(f"{str(path)!r} has the channels {names}, not X and Y", fix="Give both channels.")
    x, y = names.index("X"), names.index("Y")
    sign = {"-ve": -1.0}
    return (x, sign.get(layout[x][1], 1.0)), (y, sign.get(layout[y][1], 1.0))


def _points(
    trace: Element, *, axes: tuple[tuple[int, float], tuple[int, float]], path: Path
) -> npt.NDArray[np.float64]:
    text = (trace.text or "").strip()
    if trace.get("type") == "penUp" or trace.get("continuation"):
        raise StrettoError(
            f"{str(path)!r} has a trace that is pen-up or continues another",
            fix="Write each stroke as one whole trace, and leave pen-up traces out.",
        )
    if any(mark in text for mark in "'\"!"):
        raise StrettoError(
            f"{str(path)!r} has a trace in a compressed form (', \" or ! before a value)",
            fix="Write the coordinates as plain decimals: no differences of first or second order.",
        )
    if not text:
        return np.zeros((0, 2))
    return np.stack([_channel(text, index=index, path=path) * sign for index, sign in axes], axis=1)


def _channel(text: str, *, index: int, path: Path) -> npt.NDArray[np.float64]:
    values = []
    for point in text.split(","):
        channels = point.split()
        if len(channels) <= index or not DECIMAL.fullmatch(channels[index]):
            raise StrettoError(
                f"{str(path)!r} has the point {point.strip()[:40]!r}, in which value {index + 1} is no plain decimal",
                fix="Write points as decimals with spaces between, and commas between points.",
            )
        values.append(float(channels[index]))
    return np.array(values, dtype=np.float64)


def _transcript(root: Element, prefix: str) -> str | None:
    for holder in (root, root.find(f"{prefix}traceGroup")):
        annotations = [] if holder is None else holder.findall(f"{prefix}annotation")
        for wanted in TRANSCRIPT_TYPES:
            for annotation in annotations:
                text = (annotation.text or "").strip()
                if annotation.get("type") == wanted and text:
                    return text
    return None
