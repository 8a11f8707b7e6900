"""Open a file or folder with the reader that fits it."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from stretto.checks import check_path
from stretto.data.readers.ink import LINE_FILE, read_iam, read_inkml
from stretto.data.readers.npz import read_npz
from stretto.data.readers.parallel_text import holds_parallel_text, read_parallel_text
from stretto.data.readers.parquet import read_parquet
from stretto.data.readers.text import holds_word_text, read_text, read_word_text
from stretto.data.readers.video import Framing, holds_clips, no_split_files, read_clips
from stretto.data.sequences import SequenceSet
from stretto.errors import StrettoError

READERS: Final[dict[str, Callable[[Path], SequenceSet]]] = {
    ".npz": read_npz,
    ".parquet": read_parquet,
    ".arrow": read_parquet,
    ".feather": read_parquet,
    ".txt": read_text,
    ".txt.gz": read_text,
    ".inkml": read_inkml,
}
NOT_DATA: Final = ("readme", "license", "licence", "copying", "notice", "citation", "changelog")
SUPPORTED: Final = (
    "Give a file that ends in .npz, .parquet, .arrow, .feather, .txt, .txt.gz or .inkml, "
    "a folder of InkML files, the IAM-OnDB folder with its lineStrokes and ascii, "
    "a folder with a text in parts as NAME.train.txt, NAME.valid.txt and NAME.test.txt, "
    "a folder with the same lines in two languages as train.en and train.de, "
    "or a folder of video clips as class/clip/frame.jpg or class/clip.npy."
)


def open_sequences(path: Path | str, *, framing: Framing | None = None) -> SequenceSet:
    """Read a file or folder with the reader that fits it.

    Args:
        path: A file of a known kind; a folder with one such file (a README beside it is not data); a folder with InkML
            files or the IAM-OnDB layout at any depth; a folder with a text in parts, as `read_word_text` takes it; a
            folder of parallel text, as `read_parallel_text` takes it; a folder of video clips, as `read_clips` takes
            it.
        framing: How to read video clips; other data ignore its size and colour.

    Raises:
        StrettoError: Nothing is there, nothing can be read, or more than one thing could be meant.
    """
    path = check_path(path, name="path", owner="open_sequences")
    try:
        if path.is_dir():
            return _open_folder(path, framing)
        exists, is_file = path.exists(), path.is_file()
    except (OSError, ValueError) as error:
        raise StrettoError(
            f"could not open {str(path)!r}: {getattr(error, 'strerror', error)}", fix="Check the path."
        ) from error
    if not exists:
        raise StrettoError(f"there is no file or folder {str(path)!r}", fix="Check the path.")
    if not is_file:
        raise StrettoError(f"{str(path)!r} is a pipe or a device", fix="Write the data to a file first.")
    reader = _find_reader(path)
    if reader is None:
        raise StrettoError(f"{str(path)!r} is not of a kind that Stretto reads", fix=SUPPORTED)
    if framing is not None and framing.split_file != Framing().split_file:
        raise no_split_files(path)
    return reader(path)


def _find_reader(path: Path) -> Callable[[Path], SequenceSet] | None:
    name = path.name.lower()
    return next((reader for ending, reader in READERS.items() if name.endswith(ending)), None)


def _open_folder(folder: Path, framing: Framing | None) -> SequenceSet:
    if holds_word_text(folder):
        # Other forms of the same text may lie beside it.
        return read_word_text(folder)
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and _is_data(path)]
    if holds_parallel_text(folder):
        if files:
            raise StrettoError(
                f"{str(folder)!r} has text in two languages and {files[0].name}",
                fix=f"Name {files[0].name}, or a folder that holds the parallel text alone.",
            )
        return read_parallel_text(folder)
    if len(files) > 1:
        raise StrettoError(
            f"{str(folder)!r} has {len(files)} data files: {', '.join(path.name for path in files)}",
            fix="Name one of them.",
        )
    below = _find_reader_below(folder)
    if not files:
        if below is None:
            raise StrettoError(f"{str(folder)!r} holds nothing that Stretto reads", fix=SUPPORTED)
        return read_clips(folder, framing) if below is read_clips else below(folder)
    if _find_reader(files[0]) is read_text and below is not None:
        what = "clips" if below is read_clips else "ink"
        raise StrettoError(
            f"{str(folder)!r} has the text {files[0].name} and {what} below it",
            fix=f"Name the text file, or the folder that holds the {what} alone.",
        )
    return open_sequences(files[0], framing=framing)


def _is_data(path: Path) -> bool:
    stem = path.name.lower().partition(".")[0]
    return _find_reader(path) not in (None, read_inkml) and stem not in NOT_DATA and not path.name.startswith(".")


def _find_reader_below(folder: Path) -> Callable[[Path], SequenceSet] | None:
    """The reader of ink or clips at some depth."""
    if any(folder.rglob("*.inkml")):
        return read_inkml
    documents = [path.name for path in folder.rglob("*.xml")]
    if any(map(LINE_FILE.fullmatch, documents)):
        return read_iam
    # Frames may have other .xml files beside them, such as annotations.
    if holds_clips(folder):
        return read_clips
    return read_iam if documents else None
