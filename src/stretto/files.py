"""Files that are either whole or not there, and the private cache folder."""

import contextlib
import errno
import os
import secrets
import stat
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TextIO

import platformdirs

from stretto.errors import StrettoError

CACHE_VARIABLE = "STRETTO_CACHE"
LOCK_FILE = ".lock"
POLL_SECONDS = 0.1
"""Between two attempts to get a lock."""


@contextlib.contextmanager
def disk_errors(path: Path, *, doing: str, fix: str = "") -> Iterator[None]:
    """Turn a full disk or a missing permission into a `StrettoError` that names `path`."""
    try:
        yield
    except (OSError, ValueError) as error:
        # A name with a NUL in it is a ValueError.
        if isinstance(error, StrettoError):
            raise
        raise StrettoError(
            f"could not {doing} {str(path)!r}: {getattr(error, 'strerror', None) or error}",
            fix=fix or "Free space or choose another place; what was there before is untouched.",
        ) from error


def refuse_special(path: Path) -> None:
    """Raise an OSError for a pipe or a device, which would be waited for, or read without end.

    What does not exist is left to whoever opens it.
    """
    if path.exists() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a file", str(path))


def check_ending(path: Path | None, *, flag: str, endings: tuple[str, ...]) -> None:
    """Refuse to write to a file of another kind, which may be the user's data."""
    if path is not None and path.suffix.lower() not in endings:
        raise StrettoError(
            f"{flag} {str(path)!r} does not end in {' or '.join(endings)}",
            fix="Name a file of that kind: whatever it holds is replaced.",
        )


def sync_folder(folder: Path) -> None:
    """Make a rename inside `folder` durable."""
    if os.name == "nt":  # pragma: no cover - Windows cannot open a folder, and needs no such call
        return
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Let `write` fill a temporary file beside `path`, then put it in place in one step.

    A reader sees the old file or the new one, never a part. On failure the old file stays.
    """
    temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}.part")
    with disk_errors(path, doing="write"):
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            write(temporary)
            with temporary.open("rb") as stream:
                os.fsync(stream.fileno())
            temporary.replace(path)
            sync_folder(path.parent)
        finally:
            temporary.unlink(missing_ok=True)


def write_text_atomically(path: Path, text: str) -> None:
    """Write `text` as UTF-8, whole or not at all."""
    write_atomically(path, lambda target: target.write_text(text, encoding="utf-8"))


@contextlib.contextmanager
def locked(folder: Path, *, patience: float = 0.2) -> Iterator[None]:
    """Hold the lock of `folder`, which is made if missing; it is released when the process ends, however it ends.

    Raises:
        StrettoError: Another process still holds it after `patience` seconds.
    """
    path = folder / LOCK_FILE
    with disk_errors(path, doing="lock"):
        folder.mkdir(parents=True, exist_ok=True)
        ends = time.monotonic() + patience
        while (stream := _try_lock(path)) is None and time.monotonic() < ends:
            time.sleep(POLL_SECONDS)
    if stream is None:
        raise StrettoError(
            f"another run is writing to {str(folder)!r}", fix="Wait for it to end, or choose another --out."
        )
    with stream:
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def is_locked(folder: Path) -> bool:
    """Whether a process on this machine holds the lock of `folder`; a killed process leaves only the file."""
    path = folder / LOCK_FILE
    if not path.is_file():
        return False
    try:
        import fcntl

        # This holds the lock for a moment. A process that starts meanwhile retries: see `patience`.
        with path.open("rb") as stream:
            fcntl.flock(stream, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except (ImportError, BlockingIOError):
        return True
    except FileNotFoundError:
        pass
    return False


def _try_lock(path: Path) -> TextIO | None:
    """The lock file, locked; None if another process holds it."""
    refuse_special(path)
    stream = path.open("a")
    try:
        import fcntl

        fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except ImportError:  # pragma: no cover - not on this system
        return stream
    except BlockingIOError:
        stream.close()
        return None
    # Its last owner may have removed it since it was opened, and another made a new one.
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(stream.fileno()), path.stat()):
            return stream
    stream.close()
    return None


def cache_folder() -> Path:
    """The per-user cache folder: private (0700), ours, created when missing; `STRETTO_CACHE` moves it."""
    chosen = os.environ.get(CACHE_VARIABLE)
    folder = Path(chosen) if chosen else _default_cache()
    another = f"Set {CACHE_VARIABLE} to a folder of your own that can be written to."
    with disk_errors(folder, doing="create the cache folder", fix=another):
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat() if chosen else folder.lstat()
    if hasattr(os, "getuid") and status.st_uid != os.getuid():
        raise StrettoError(
            f"the cache folder {str(folder)!r} belongs to another user",
            fix=f"Set {CACHE_VARIABLE} to a folder of your own.",
        )
    if os.name != "nt" and stat.S_IMODE(status.st_mode) & 0o077:
        if chosen:
            raise StrettoError(
                f"the cache folder {str(folder)!r} is open to other users",
                fix=f"Run chmod 700 on it, or set {CACHE_VARIABLE} to a private folder.",
            )
        folder.chmod(0o700)
    return folder


def _default_cache() -> Path:
    """Where this system keeps caches.

    A folder among temporary files for a user without a home, as in containers, or with one that cannot be written to,
    as after `su` without `-`.
    """
    own = Path(tempfile.gettempdir()) / f"stretto-{os.getuid() if hasattr(os, 'getuid') else 'user'}"
    try:
        Path.home()
    except RuntimeError:
        return own
    usual = Path(platformdirs.user_cache_path("stretto", appauthor=False))
    return usual if _is_creatable(usual) else own


def fallback_cache(name: str, *, usual: str) -> Path | None:
    """A folder of our cache for another library that keeps its own at `usual`, as "~/.library"; None if that can be."""
    try:
        if _is_creatable(Path(usual).expanduser()):
            return None
    except RuntimeError:
        pass
    return cache_folder() / name


def _is_creatable(folder: Path) -> bool:
    """Whether a folder exists, whoever owns it, or can be created."""
    try:
        if folder.exists():
            return True
        parent = next(parent for parent in folder.parents if parent.exists())
    except OSError:
        # Permission denied: a home that this user may not enter.
        return False
    return os.access(parent, os.W_OK | os.X_OK)
