"""One door to all readers: the right one for a file or folder."""

from collections.abc import Callable
from pathlib import Path
from typing import Final

from stretto.data.iam import read_iam
from stretto.data.inkml import read_inkml
from stretto.data.npz import read_npz
from stretto.data.parquet import read_parquet
from stretto.data.sequences import SequenceSet
from stretto.data.text import read_text
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
ABOUT_THE_DATA: Final = ("readme", "license", "licence", "copying", "notice", "citation", "changelog")
CHOICE: Final = (
    "Give a file that ends in .npz, .parquet, .arrow, .feather, .txt, .txt.gz or .inkml, "
    "a folder of InkML files, or the IAM-OnDB folder with its lineStrokes and ascii."
)


def open_sequences(path: Path | str) -> SequenceSet:
    """Read a file or folder with the reader that fits it.

    Args:
        path: A file of a known kind; a folder with one such file (a README beside it is no data); a folder with InkML
            files or the IAM-OnDB layout at any depth.

    Raises:
        StrettoError: Nothing is there, nothing can be read, or more than one thing could be meant.
    """
    path = Path(path)
    try:
        if path.is_dir():
            return _open_folder(path)
        exists = path.exists()
    except OSError as error:
        raise StrettoError(f"could not open {str(path)!r}: {error.strerror}", fix="Check the path.") from error
    if not exists:
        raise StrettoError(f"there is no file or folder {str(path)!r}", fix="Check the path.")
    reader = _reader(path)
    if reader is None:
        raise StrettoError(f"{str(path)!r} is not of a kind that Stretto reads", fix=CHOICE)
    return reader(path)


def _reader(path: Path) -> Callable[[Path], SequenceSet] | None:
    name = path.name.lower()
    return next((reader for ending, reader in READERS.items() if name.endswith(ending)), None)


def _open_folder(folder: Path) -> SequenceSet:
    files = [path for path in sorted(folder.iterdir()) if path.is_file() and _is_data(path)]
    if len(files) > 1:
        raise StrettoError(
            f"{str(folder)!r} has {len(files)} data files: {', '.join(path.name for path in files)}",
            fix="Name one of them.",
        )
    ink_reader = _ink_reader(folder)
    if not files:
        if ink_reader is None:
            raise StrettoError(f"{str(folder)!r} holds nothing that Stretto reads", fix=CHOICE)
        return ink_reader(folder)
    if _reader(files[0]) is read_text and ink_reader is not None:
        raise StrettoError(
            f"{str(folder)!r} has the text {files[0].name} and ink below it",
            fix="Name the text file, or the folder that holds the ink alone.",
        )
    return open_sequences(files[0])


def _is_data(path: Path) -> bool:
    stem = path.name.lower().partition(".")[0]
    return _reader(path) not in (None, read_inkml) and stem not in ABOUT_THE_DATA and not path.name.startswith(".")


def _ink_reader(folder: Path) -> Callable[[Path], SequenceSet] | None:
    if any(folder.rglob("*.inkml")):
        return read_inkml
    return read_iam if any(folder.rglob("*.xml")) else None
