"""Ragged `.npz` files: all steps end to end in `x`, `offsets`, a target for each sequence or step, `split`.

Images as Keras stores MNIST are read too, one row of pixels per step: `x_train` (images, rows, columns) with `y_train`,
and `x_test` with `y_test`.

Members that are stored uncompressed, as `write_npz` writes them, are memory-mapped; compressed ones are read. Object
arrays, which would need pickle, are refused.

Shape legend: N sequences or images, S steps of all of them, F features, H rows and W columns of an image.
"""

import dataclasses
import hashlib
import json
import math
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, Final

import numpy as np
import numpy.lib.format as npy
import numpy.typing as npt

from stretto.checks import check_kind, check_path
from stretto.data.readers.ink import pen_features
from stretto.data.sequences import PARTS, SequenceSet
from stretto.data.targets import AbstractTargets, Labels, NoTargets, StepLabels, Transcripts, offsets_fit
from stretto.errors import StrettoError, list_some
from stretto.files import cache_folder, write_atomically

Array = npt.NDArray[Any]
LOCAL_HEADER_BYTES: Final = 30
IMAGE_MEMBERS: Final = ("x_train", "y_train", "x_test", "y_test")
# `offsets` first: the others are compared with them before they are read.
KNOWN_MEMBERS: Final = tuple(
    "offsets x scale xy pen_down pen_up y class_names split split_names text text_offsets alphabet vocabulary".split()
)
MAX_NAMED_MEMBERS: Final = 8


def read_npz(path: Path) -> SequenceSet:
    """Read a ragged `.npz`.

    Args:
        path: The file. `x` is (steps, features) or (steps,); pen data may instead have `xy`, and `pen_down` (1 on the
            first point of a stroke) or `pen_up` (1 on its last). Members of other names are ignored, with a note.
            With a `scale`, one factor per feature, features are `x` times `scale`.
            Targets are `y` (one class number per sequence or per step; names in `class_names`) or `text` code points
            with `text_offsets`. A `split` of 0 and 1 alone is train and test, unless `split_names` is there: then
            it is 0 train, 1 valid, 2 test. For text as features, `alphabet` has the code points of its characters, or
            `vocabulary` its words.
            Without `offsets`, `x_train`, `y_train`, `x_test` and `y_test` are images, read one row of pixels per step.

    Raises:
        StrettoError: The file is not a ragged `.npz`, or its arrays do not fit together.
    """
    arrays, notes = _read_arrays(path)
    if _holds_images(arrays):
        arrays = _flatten_images(arrays, source=str(path))
    offsets = arrays["offsets"]
    if offsets.ndim != 1:
        raise StrettoError(f"{str(path)!r}: `offsets` have shape {offsets.shape}", fix="Give N + 1 numbers in a row.")
    if "x" in arrays:
        features_SF = _apply_scale(arrays["x"], arrays.get("scale"), source=str(path))
    else:
        features_SF = pen_features(
            arrays["xy"],
            pen_down_S=arrays.get("pen_down"),
            pen_up_S=arrays.get("pen_up"),
            offsets=offsets,
            source=str(path),
        )
    alphabet = _read_alphabet(arrays, source=str(path))
    if alphabet and not _is_character_numbers(features_SF, alphabet):
        alphabet = ""
        notes += ("`alphabet` is ignored: it belongs to text, whose one feature is the number of a character",)
    return SequenceSet.from_flat(
        features_SF,
        offsets=offsets,
        targets=_make_targets(arrays, offsets=offsets, num_steps=math.prod(features_SF.shape[:1]), source=str(path)),
        split_N=arrays.get("split"),
        split_complete="split_names" in arrays,
        name=path.stem,
        alphabet=alphabet,
        vocabulary=_read_vocabulary(arrays, source=str(path)),
        notes=notes,
    )


def write_npz(path: Path | str, data: SequenceSet) -> None:
    """Write a set so that `read_npz` can memory-map it: uncompressed, unpadded, whole or not at all."""
    place = check_path(path, name="path", owner="write_npz")
    check_kind(data, SequenceSet, name="data", owner="write_npz", fix="Give a SequenceSet, such as from_tensors makes.")
    arrays: dict[str, Array] = {
        "x": np.concatenate(data.arrays()),
        "offsets": np.concatenate([[0], np.cumsum(data.lengths_N)]).astype(np.int64),
        "split": data.split_N,
        "split_names": np.array(PARTS),
    }
    if data.alphabet:
        arrays["alphabet"] = Transcripts.of([data.alphabet]).code_points
    if data.vocabulary:
        arrays["vocabulary"] = np.array(data.vocabulary)
    if isinstance(data.targets, Labels):
        arrays |= {"y": data.targets.values_N, "class_names": np.array(data.targets.names)}
    elif isinstance(data.targets, StepLabels):
        labels_S = np.concatenate([data.targets[index] for index in range(len(data))])
        arrays |= {"y": labels_S.astype(data.targets.values_S.dtype), "class_names": np.array(data.targets.names)}
    elif isinstance(data.targets, Transcripts):
        own = Transcripts.of([data.targets[index] for index in range(len(data))])
        arrays |= {"text": own.code_points, "text_offsets": np.append(own.starts_N, len(own.code_points))}

    def write(target: Path) -> None:
        with target.open("wb") as stream:
            np.savez(stream, allow_pickle=False, **arrays)

    write_atomically(place, write)


def cached_set(identity: Sequence[Any], *, name: str, make: Callable[[], SequenceSet]) -> SequenceSet:
    """The set that `make` returns, memory-mapped from the cache, where it is written when first needed.

    `identity` is all that the set follows from, ready for JSON: it names the file.
    """
    key = hashlib.sha256(json.dumps(identity).encode()).hexdigest()[:16]
    path = cache_folder() / f"{name.replace(' ', '-')}-{key}.npz"
    if not path.exists():
        write_npz(path, make())
    return dataclasses.replace(read_npz(path), name=name)


def _read_arrays(path: Path) -> tuple[dict[str, Array], tuple[str, ...]]:
    try:
        return _read_members(path)
    except FileNotFoundError:
        raise StrettoError(f"there is no file {str(path)!r}", fix="Check the path.") from None
    except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError, MemoryError) as error:
        raise StrettoError(
            f"{str(path)!r} is truncated or not an .npz file ({error})", fix="Write or copy the file again."
        ) from error
    except (ValueError, TypeError, SyntaxError, tokenize.TokenError) as error:
        if isinstance(error, StrettoError):
            raise
        raise StrettoError(
            f"{str(path)!r} holds something other than plain arrays ({error})",
            fix="Save number arrays only; Stretto never loads pickled objects.",
        ) from error


def _read_members(path: Path) -> tuple[dict[str, Array], tuple[str, ...]]:
    """The arrays by name, and a note of those that are left out."""
    arrays: dict[str, Array] = {}
    with path.open("rb") as stream, zipfile.ZipFile(stream) as archive:
        names = sorted(name.removesuffix(".npy") for name in archive.namelist())
        images = _holds_images(names)
        if not images and ("offsets" not in names or not {"x", "xy"}.intersection(names)):
            raise StrettoError(
                f"{str(path)!r} has the arrays {names} but needs `x` and `offsets`",
                fix="Write all steps end to end as `x` and where each sequence begins as `offsets` (N + 1 numbers).",
            )
        known: tuple[str, ...] = IMAGE_MEMBERS if images else KNOWN_MEMBERS
        if "x" in names:
            known = tuple(name for name in known if name not in ("xy", "pen_down", "pen_up"))
        infos = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
        for name in known:
            if name not in infos:
                continue
            info = infos[name]
            if name == "x" and info.compress_type == zipfile.ZIP_STORED:
                arrays[name] = _map_member(path, stream, info)
                continue
            with archive.open(info) as member:
                if name in ("x", "xy"):
                    _check_rows(member, arrays["offsets"], name=name, path=path)
            with archive.open(info) as member:
                arrays[name] = npy.read_array(member, allow_pickle=False)
    left_out = [name for name in names if name not in known]
    if not left_out:
        return arrays, ()
    named = list_some([f"`{name}`" for name in left_out], most=MAX_NAMED_MEMBERS)
    return arrays, (f"not used, of the members of the file: {named}",)


def _check_rows(member: IO[bytes], offsets: Array, *, name: str, path: Path) -> None:
    """Refuse a compressed member that is not as long as the offsets say, before it fills the memory."""
    shape, _, dtype = _read_header(member)
    are_offsets = offsets.ndim == 1 and len(offsets) > 0 and offsets.dtype.kind in "iu"
    if are_offsets and not dtype.hasobject and shape[:1] != (int(offsets[-1]),):
        raise StrettoError(
            f"{str(path)!r}: `{name}` has shape {shape} and offsets run from {offsets[0]} to {offsets[-1]}",
            fix="Offsets must rise from 0 to the number of steps.",
        )


def _read_header(stream: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    """Shape, Fortran order and type of a .npy array, whose data come next in the stream."""
    read = npy.read_array_header_1_0 if npy.read_magic(stream) == (1, 0) else npy.read_array_header_2_0
    return read(stream)


def _map_member(path: Path, stream: IO[bytes], info: zipfile.ZipInfo) -> Array:
    """Map a stored member: its array begins after the zip's local header and the .npy header."""
    stream.seek(info.header_offset)
    local = stream.read(LOCAL_HEADER_BYTES)
    if len(local) < LOCAL_HEADER_BYTES or local[:4] != b"PK\x03\x04":
        raise zipfile.BadZipFile(f"no local header for {info.filename}")
    name_bytes, extra_bytes = np.frombuffer(local[26:30], dtype="<u2")
    member = info.header_offset + LOCAL_HEADER_BYTES + int(name_bytes) + int(extra_bytes)
    stream.seek(member)
    shape, fortran_order, dtype = _read_header(stream)
    if dtype.hasobject:
        raise ValueError("Object arrays cannot be loaded without pickle")
    begin = stream.tell()
    if begin - member + math.prod(shape) * dtype.itemsize != info.file_size or min(shape, default=0) < 0:
        raise EOFError(f"{info.filename} does not have the size that its header says")
    if 0 in shape:
        return np.zeros(shape, dtype=dtype)
    return np.memmap(path, dtype=dtype, mode="r", offset=begin, shape=shape, order="F" if fortran_order else "C")


def _apply_scale(x_SF: Array, scale_F: Array | None, *, source: str) -> Array:
    """The features in their own unit, as single precision unless they are double already."""
    if scale_F is None:
        return x_SF
    width = x_SF.shape[1] if x_SF.ndim == 2 else 1
    if scale_F.shape != (width,) or scale_F.dtype.kind not in "fiu" or x_SF.dtype.kind not in "fiu":
        raise StrettoError(
            f"{source}: `scale` has shape {scale_F.shape} and type {scale_F.dtype} for {width} features",
            fix="Give one number per feature, by which `x` is multiplied, or leave `scale` out.",
        )
    dtype = np.float64 if x_SF.dtype == np.float64 else np.float32
    return (x_SF * scale_F.astype(np.float64)).astype(dtype)


def _make_targets(arrays: dict[str, Array], *, offsets: Array, num_steps: int, source: str) -> AbstractTargets:
    count = len(offsets) - 1
    if "text" in arrays:
        return _read_transcripts(arrays, source=source)
    if "y" not in arrays:
        return NoTargets(count=count)
    given = arrays.get("class_names")
    if given is not None and (given.ndim != 1 or given.dtype.kind not in "Uiu"):
        raise StrettoError(
            f"{source}: `class_names` have shape {given.shape} and type {given.dtype}",
            fix="Give one string per class.",
        )
    names = [str(name) for name in given] if given is not None else None
    y = arrays["y"]
    if y.shape == (count,):
        return Labels.check(y, names=names, source=source)
    if y.shape == (num_steps,) and np.issubdtype(offsets.dtype, np.integer):
        return StepLabels.check(y, offsets=offsets, names=names, source=source)
    raise StrettoError(
        f"{source}: `y` has shape {y.shape} for {count} sequences of {num_steps} steps together",
        fix="Give exactly one label per sequence, or one per step.",
    )


def _read_alphabet(arrays: dict[str, Array], *, source: str) -> str:
    code_points = arrays.get("alphabet", np.zeros(0, dtype=np.uint32))
    if code_points.ndim != 1 or not _are_code_points(code_points):
        raise StrettoError(f"{source}: `alphabet` holds no code points", fix="Give one code point a character.")
    return "".join(map(chr, code_points.tolist()))


def _is_character_numbers(features_SF: Array, alphabet: str) -> bool:
    """Whether features are numbers of the characters of an alphabet that has each of them once."""
    is_column = features_SF.ndim == 1 or (features_SF.ndim == 2 and features_SF.shape[1] == 1)
    return is_column and features_SF.dtype.kind in "iu" and len(set(alphabet)) == len(alphabet)


def _read_vocabulary(arrays: dict[str, Array], *, source: str) -> tuple[str, ...]:
    words = arrays.get("vocabulary", np.zeros(0, dtype=np.str_))
    if words.ndim != 1 or not np.issubdtype(words.dtype, np.str_):
        raise StrettoError(f"{source}: `vocabulary` holds no words", fix="Give an array of strings, in their order.")
    return tuple(str(word) for word in words)


def _are_code_points(values: Array) -> bool:
    return np.issubdtype(values.dtype, np.integer) and bool(((values >= 0) & (values < 0x110000)).all())


def _read_transcripts(arrays: dict[str, Array], *, source: str) -> Transcripts:
    code_points, offsets = arrays["text"], arrays.get("text_offsets")
    fits = offsets is not None and code_points.ndim == 1 and offsets_fit(offsets, num_values=len(code_points))
    if not fits or offsets is None or not _are_code_points(code_points):
        raise StrettoError(
            f"{source}: `text_offsets` do not fit `text`",
            fix="Give the code points of all transcripts as `text` and rising `text_offsets` from 0 to their number.",
        )
    starts = offsets.astype(np.int64)
    return Transcripts(code_points=code_points.astype(np.uint32), starts_N=starts[:-1], lengths_N=np.diff(starts))


def _holds_images(names: Iterable[str]) -> bool:
    """Whether arrays of these names are images in two parts rather than sequences end to end."""
    return "offsets" not in names and not {"x_train", "x_test"}.isdisjoint(names)


def _flatten_images(arrays: Mapping[str, Array], *, source: str) -> dict[str, Array]:
    """Images as sequences of rows, with the pixels in the type they are stored in."""
    missing = [member for member in IMAGE_MEMBERS if member not in arrays]
    if missing:
        raise StrettoError(
            f"{source}: there are images but no {', '.join(f'`{member}`' for member in missing)}",
            fix="Give `x_train`, `y_train`, `x_test` and `y_test`, or `x` and `offsets` for sequences of your own.",
        )
    for part in ("train", "test"):
        x_NHW, y_N = arrays[f"x_{part}"], arrays[f"y_{part}"]
        if x_NHW.ndim != 3 or 0 in x_NHW.shape or x_NHW.dtype.kind not in "biuf":
            raise StrettoError(
                f"{source}: `x_{part}` has shape {x_NHW.shape} and type {x_NHW.dtype}",
                fix="Give grey images as numbers of shape (images, rows, columns), at least one of them.",
            )
        if y_N.shape != (len(x_NHW),) or not np.issubdtype(y_N.dtype, np.integer):
            raise StrettoError(
                f"{source}: `y_{part}` has shape {y_N.shape} and type {y_N.dtype} for {len(x_NHW)} images",
                fix="Give one integer per image: its class, numbered from 0.",
            )
    both = [arrays["x_train"], arrays["x_test"]]
    train_size, test_size = (f"{x_NHW.shape[1]} x {x_NHW.shape[2]} {x_NHW.dtype}" for x_NHW in both)
    if train_size != test_size:
        raise StrettoError(
            f"{source}: `x_train` has images of {train_size} and `x_test` of {test_size}",
            fix="Give both the same size and type.",
        )
    images_NHW = np.concatenate(both)
    return {
        "x": images_NHW.reshape(-1, images_NHW.shape[2]),
        "offsets": np.arange(len(images_NHW) + 1) * images_NHW.shape[1],
        "y": np.concatenate([arrays[f"y_{part}"].astype(np.int64) for part in ("train", "test")]),
        "split": np.repeat(np.array([0, 1], dtype=np.uint8), [len(x_NHW) for x_NHW in both]),
    }
