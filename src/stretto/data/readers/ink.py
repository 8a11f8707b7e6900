"""Online handwriting: pen points to features, from InkML files and from the IAM database (IAM-OnDB).

Shape legend: S points of all sequences, P points of one stroke or line, T steps, 2 coordinates (x to the right, y
down), 3 features (dx, dy, pen-up).
"""

import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, Final
from xml.etree.ElementTree import Element

import numpy as np
import numpy.typing as npt

from stretto.data.readers.text import decode_text
from stretto.data.sequences import PARTS, SequenceSet, part_of
from stretto.data.targets import NoTargets, Transcripts, locate, offsets_fit
from stretto.errors import StrettoError, list_some
from stretto.extras import optional

POINTS_PER_HEIGHT = 7.0
MAX_LINE_STEPS = 1_000_000
NAMESPACE: Final = "{http://www.w3.org/2003/InkML}"
TRANSCRIPT_TYPES: Final = ("truth", "transcription", "label", "normalizedLabel")
DECIMAL: Final = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d+)?", re.ASCII)
LINE_FILE: Final = re.compile(r"(?P<sheet>(?P<form>[A-Za-z0-9]+-[0-9]+)[A-Za-z]?)-(?P<number>[0-9]+)\.xml")
IAM_ROOT: Final = "WhiteboardCaptureSession"
MAX_NAMED_FILES = 12
Strokes = list[npt.NDArray[np.float64]]


def pen_features(
    xy_S2: npt.NDArray[Any],
    *,
    pen_down_S: npt.NDArray[Any] | None,
    pen_up_S: npt.NDArray[Any] | None = None,
    offsets: npt.NDArray[Any],
    source: str,
) -> npt.NDArray[np.float32]:
    """Flat pen positions to (dx, dy, pen-up): differences, in units of each sequence's height.

    Args:
        xy_S2: Positions.
        pen_down_S: 1 on the first point of each stroke; None takes each sequence as one stroke.
        pen_up_S: 1 on the last point of each stroke, instead.
        offsets: Where each sequence begins.
        source: Named in errors.
    """
    shapes_fit = xy_S2.ndim == 2 and xy_S2.shape[1] == 2 and xy_S2.dtype.kind in "iuf"
    if pen_down_S is not None and pen_up_S is not None:
        raise StrettoError(f"{source}: there are `pen_down` and `pen_up`", fix="Give one of the two.")
    flags_S = pen_up_S if pen_down_S is None else pen_down_S
    flags_fit = flags_S is None or (flags_S.shape == xy_S2.shape[:1] and flags_S.dtype.kind in "biuf")
    if not (shapes_fit and flags_fit and offsets_fit(offsets, num_values=len(xy_S2)) and np.diff(offsets).all()):
        raise StrettoError(
            f"{source}: `xy` of shape {xy_S2.shape}, `pen_down` or `pen_up`, and `offsets` do not fit together",
            fix="Give `xy` as (points, 2), one flag per point, and `offsets` that rise to the last point.",
        )
    bounds: npt.NDArray[np.int64] = offsets.astype(np.int64)
    starts, lengths_N = bounds[:-1], np.diff(bounds)
    bad = np.flatnonzero(~np.isfinite(xy_S2).all(axis=1))
    if len(bad):
        sequence, point = locate(bounds, bad[0])
        raise StrettoError(
            f"{source}: sequence {sequence} has a NaN or infinite position at its point {point}",
            fix="Clean or remove that sequence; Stretto never replaces values silently.",
        )
    y_S = xy_S2[:, 1].astype(np.float64)
    height_N = np.maximum.reduceat(y_S, starts) - np.minimum.reduceat(y_S, starts)
    scale_S = np.repeat(1.0 / np.maximum(height_N, 1e-6), lengths_N)
    features_S3 = np.zeros((len(xy_S2), 3), dtype=np.float32)
    moved_S2 = np.diff(xy_S2.astype(np.float64), axis=0, prepend=xy_S2[:1].astype(np.float64))
    moved_S2[starts] = 0.0
    features_S3[:, :2] = np.clip(moved_S2 * scale_S[:, None], -8.0, 8.0)
    first_S = np.zeros(len(xy_S2), dtype=bool)
    first_S[starts] = True
    if pen_down_S is not None:
        first_S |= pen_down_S.astype(bool)
    if pen_up_S is not None:
        first_S[1:] |= pen_up_S.astype(bool)[:-1]
    features_S3[:, 2] = np.append(first_S[1:], True)
    return features_S3


def line_features(strokes: list[npt.NDArray[np.float64]], *, source: str = "a line") -> npt.NDArray[np.float32]:
    """The strokes of one written line to (dx, dy, pen-up), resampled evenly along the pen's path.

    The unit is the typical height of the writing; y points up in the result, down in the strokes, as tablets have it.

    Args:
        strokes: Positions of each stroke's points, as (x, y) rows.
        source: Named in errors.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        heights = [np.ptp(stroke[:, 1]) for stroke in strokes]
        extent = float(np.ptp(np.concatenate(strokes), axis=0).max())
        unit = float(np.quantile(heights, 0.75)) or extent or 1.0
        path = float(sum(np.hypot(*np.diff(stroke, axis=0).T).sum() for stroke in strokes))
    far = max(path, extent)
    if not far / unit * POINTS_PER_HEIGHT <= MAX_LINE_STEPS:
        raise StrettoError(
            f"{source}: the pen travels {far:.3g} in writing of height {unit:.3g}, over {MAX_LINE_STEPS} steps",
            fix="Check the coordinates, or cut the writing into lines.",
        )
    resampled = [
        resample_stroke(
            stroke / unit, lambda length: max(2, round(length * POINTS_PER_HEIGHT) + 1) if length > 0 else 1
        )
        for stroke in strokes
    ]
    joined_T2 = np.concatenate(resampled)
    features_T3 = np.zeros((len(joined_T2), 3), dtype=np.float32)
    features_T3[:, :2] = np.diff(joined_T2, axis=0, prepend=joined_T2[:1]) * np.array([1.0, -1.0])
    features_T3[np.cumsum([len(stroke) for stroke in resampled]) - 1, 2] = 1.0
    return features_T3


def resample_stroke(stroke_P2: npt.NDArray[np.float64], num_points: Callable[[float], int]) -> npt.NDArray[np.float64]:
    """Points evenly spaced along a stroke, as many as `num_points` returns for its length."""
    travelled_P = np.concatenate([[0.0], np.cumsum(np.hypot(*np.diff(stroke_P2, axis=0).T))])
    at = np.linspace(0.0, travelled_P[-1], num_points(float(travelled_P[-1])))
    return np.stack([np.interp(at, travelled_P, stroke_P2[:, axis]) for axis in range(2)], axis=1)


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
    return _make_ink_set(
        ((file, file.stem, *_read_ink(file)) for file in files),
        name=path.name if path.is_dir() else path.stem,
        note="split by file name, by a hash of it: about 80 % train, 10 % valid, 10 % test",
    )


def _parse_xml(path: Path) -> Element:
    """Parse an XML file; document types and entities are refused, so nothing is expanded or fetched."""
    etree = optional("defusedxml.ElementTree")
    if path.exists() and not path.is_file():
        raise StrettoError(f"{str(path)!r} is not a file", fix="Remove it.")
    try:
        root: Element = etree.parse(path, forbid_dtd=True).getroot()
    except OSError as error:
        raise StrettoError(f"could not read {str(path)!r}: {error.strerror or error}", fix="Check the path.") from error
    except (SyntaxError, LookupError, ValueError) as error:
        raise StrettoError(
            f"{str(path)!r} is damaged or not plain XML ({error})",
            fix="Write or copy it again; document types and entities are never read.",
        ) from error
    return root


def _make_ink_set(inks: Iterable[tuple[Path, str, Strokes, str | None]], *, name: str, note: str) -> SequenceSet:
    """One set of files, each given as its path, its group, which is in one part of the split, strokes and transcript.

    All have a transcript, or none has.
    """
    features, texts, split, silent = [], [], [], []
    for path, group, strokes, text in inks:
        if not strokes:
            raise StrettoError(f"{str(path)!r} has no strokes", fix="Remove the file.")
        features.append(line_features(strokes, source=str(path)))
        split.append(PARTS.index(part_of(group)))
        if text is None:
            silent.append(str(path))
        else:
            texts.append(text)
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


def _read_ink(path: Path) -> tuple[Strokes, str | None]:
    root = _parse_xml(path)
    if root.tag not in ("ink", f"{NAMESPACE}ink"):
        raise StrettoError(f"{str(path)!r} has the root {root.tag!r}, not InkML's `ink`", fix="Remove the file.")
    prefix = root.tag.removesuffix("ink")
    axes = _find_axes(root, prefix, path=path)
    for definitions in root.findall(f"{prefix}definitions"):
        root.remove(definitions)
    strokes = [_parse_points(trace, axes=axes, path=path) for trace in root.iter(f"{prefix}trace")]
    return [stroke for stroke in strokes if len(stroke)], _find_transcript(root, prefix)


def _find_axes(root: Element, prefix: str, *, path: Path) -> tuple[tuple[int, float], tuple[int, float]]:
    """Which channels are x and y, each with its sign: +1 for x to the right and y down."""
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
    return (x, -1.0 if layout[x][1] == "-ve" else 1.0), (y, -1.0 if layout[y][1] == "-ve" else 1.0)


def _parse_points(
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
    points = []
    for point in text.split(",") if text else ():
        channels = point.split()
        for index, _ in axes:
            if len(channels) <= index or not DECIMAL.fullmatch(channels[index]):
                raise StrettoError(
                    f"{str(path)!r} has the point {point.strip()[:40]!r}: value {index + 1} is not a plain decimal",
                    fix="Write points as decimals with spaces between, and commas between points.",
                )
        points.append([float(channels[index]) * sign for index, sign in axes])
    return np.array(points, dtype=np.float64)


def _find_transcript(root: Element, prefix: str) -> str | None:
    for holder in (root, root.find(f"{prefix}traceGroup")):
        annotations = [] if holder is None else holder.findall(f"{prefix}annotation")
        for wanted in TRANSCRIPT_TYPES:
            for annotation in annotations:
                text = (annotation.text or "").strip()
                if annotation.get("type") == wanted and text:
                    return text
    return None


def read_iam(folder: Path) -> SequenceSet:
    """Read IAM-OnDB: each stroke file is one line, as pen movement (dx, dy, pen-up) with its transcript.

    Args:
        folder: Holds, at any depth, stroke files such as `a01-000u-01.xml` and the transcripts `a01-000u.txt`. The text
            of line 1 is the first line under `CSR:` that is not empty, and so on.

    Raises:
        StrettoError: A file is missing or cannot be used; the message names it.
    """
    found = {path: LINE_FILE.fullmatch(path.name) for path in sorted(folder.rglob("*.xml"))}
    lines = {path: match for path, match in found.items() if match}
    if not lines:
        raise StrettoError(
            f"there is no stroke file such as a01-000u-01.xml below {str(folder)!r}",
            fix="Unpack lineStrokes-all.tar.gz and ascii-all.tar.gz of IAM-OnDB there.",
        )
    texts = _read_texts(folder, lines)
    return _make_ink_set(
        ((path, match["form"], _read_strokes(path), texts[path]) for path, match in lines.items()),
        name=folder.name,
        note="split by form, by a hash of its name: about 80 % train, 10 % valid, 10 % test; "
        "no form is in two parts, but a writer of several forms may be",
    )


def _read_texts(folder: Path, lines: Mapping[Path, re.Match[str]]) -> dict[Path, str]:
    """The transcript of every line; the error names all lines without one."""
    sheets = {match["sheet"] for match in lines.values()}
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*.txt")):
        if path.stem in found:
            raise StrettoError(
                f"there are 2 transcripts of {path.stem!r}: {found[path.stem]} and {path}", fix="Keep one."
            )
        if path.stem in sheets:
            found[path.stem] = path
    transcripts = {sheet: _read_transcript(path) for sheet, path in found.items()}
    texts: dict[Path, str] = {}
    for path, match in lines.items():
        of_sheet = transcripts.get(match["sheet"], [])
        if 1 <= int(match["number"]) <= len(of_sheet):
            texts[path] = of_sheet[int(match["number"]) - 1]
    missing = [path for path in lines if path not in texts]
    if missing:
        sheet = lines[missing[0]]["sheet"]
        why = (
            f"{sheet}.txt has {len(transcripts[sheet])} lines under CSR:" if sheet in transcripts else f"no {sheet}.txt"
        )
        names = list_some([path.name for path in missing], most=MAX_NAMED_FILES)
        raise StrettoError(
            f"{str(folder)!r}: {len(missing)} of {len(lines)} stroke files have no transcript ({why}): {names}",
            fix="Unpack the ascii files beside the stroke files, or remove the stroke files that have no text.",
        )
    return texts


def _read_transcript(path: Path) -> list[str]:
    lines = [line.strip() for line in decode_text(path).splitlines()]
    if "CSR:" not in lines:
        raise StrettoError(
            f"{str(path)!r} has no line `CSR:`", fix="Use the ascii files of IAM-OnDB, whose transcripts follow it."
        )
    return [line for line in lines[lines.index("CSR:") + 1 :] if line]


def _read_strokes(path: Path) -> Strokes:
    root = _parse_xml(path)
    if root.tag != IAM_ROOT:
        raise StrettoError(f"{str(path)!r} has the root {root.tag!r}, not {IAM_ROOT!r}", fix="Remove the file.")
    strokes = []
    for stroke in root.iterfind("StrokeSet/Stroke"):
        try:
            points = [[float(int(point.attrib[axis])) for axis in "xy"] for point in stroke.iterfind("Point")]
        except (KeyError, ValueError, OverflowError) as error:
            raise StrettoError(
                f"{str(path)!r} has a point without integers x and y ({error})", fix="Copy the file again."
            ) from error
        if points:
            strokes.append(np.array(points, dtype=np.float64))
    return strokes
