"""Files that are whole or not there, also when the kernel refuses, and the private cache folder."""

import errno
import os
import stat
import sys
from pathlib import Path

import pytest

from stretto.errors import StrettoError
from stretto.files import (
    CACHE_VARIABLE,
    cache_folder,
    check_ending,
    fallback_cache,
    write_atomically,
    write_text_atomically,
)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_new_file_gets_its_folders(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "note.txt"
    write_text_atomically(path, "wörld\n")
    assert path.read_bytes() == "wörld\n".encode()
    assert names(path.parent) == ["note.txt"]


def test_the_old_file_stays_until_the_new_one_is_whole(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    path.write_text("old")
    seen = []

    def write(target: Path) -> None:
        assert target.parent == path.parent
        target.write_text("ne")
        seen.append(path.read_text())
        target.write_text("new")
        seen.append(path.read_text())

    write_atomically(path, write)
    assert seen == ["old", "old"]
    assert path.read_text() == "new"
    assert names(tmp_path) == ["note.txt"]


@pytest.mark.parametrize(
    ("failure", "seen"),
    [
        (RuntimeError("broken"), RuntimeError),
        (KeyboardInterrupt(), KeyboardInterrupt),
        (StrettoError("sequence 3 is bad", fix="Remove it."), StrettoError),
        (OSError(errno.ENOSPC, "No space left on device"), StrettoError),
    ],
)
@pytest.mark.parametrize("existed", [True, False])
def test_a_failure_leaves_what_was_there(
    tmp_path: Path, failure: BaseException, seen: type[BaseException], existed: bool
) -> None:
    path = tmp_path / "note.txt"
    if existed:
        path.write_text("old")

    def write(target: Path) -> None:
        target.write_text("half")
        raise failure

    with pytest.raises(seen) as caught:
        write_atomically(path, write)
    if isinstance(failure, OSError):
        assert str(path) in str(caught.value)
        assert "No space left on device" in str(caught.value)
    else:
        assert caught.value is failure
    assert names(tmp_path) == (["note.txt"] if existed else [])
    assert not existed or path.read_text() == "old"


def test_a_disk_that_fails_only_when_synced_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "note.txt"
    path.write_text("old")

    def refuse(descriptor: int) -> None:
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(os, "fsync", refuse)
    with pytest.raises(StrettoError, match="Input/output error"):
        write_text_atomically(path, "new")
    assert path.read_text() == "old"
    assert names(tmp_path) == ["note.txt"]


def test_a_writer_that_writes_nothing_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    path.write_text("old")
    with pytest.raises(StrettoError, match=r"note\.txt"):
        write_atomically(path, lambda _: None)
    assert path.read_text() == "old"


def test_two_writers_of_one_file_do_not_share_a_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "note.txt"
    targets = []

    def write(target: Path) -> None:
        targets.append(target)
        if len(targets) < 3:
            write_atomically(path, write)
        target.write_text(f"{len(targets)} {target.name}")

    write_atomically(path, write)
    assert len(set(targets)) == 3
    assert path.read_text() == f"3 {targets[0].name}"
    assert names(tmp_path) == ["note.txt"]


def test_places_that_cannot_hold_a_file_are_named(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("old")
    for path in (tmp_path / "folder", tmp_path / "file" / "note.txt", tmp_path / ("n" * 250)):
        with pytest.raises(StrettoError, match="could not write") as caught:
            write_text_atomically(path, "new")
        assert str(path) in str(caught.value)
    assert names(tmp_path) == ["file", "folder"]
    assert (tmp_path / "file").read_text() == "old"


@pytest.mark.parametrize("mask", [0o022, 0o000])
def test_the_chosen_cache_is_made_private(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mask: int) -> None:
    chosen = tmp_path / "a" / "cache"
    monkeypatch.setenv(CACHE_VARIABLE, str(chosen))
    before = os.umask(mask)
    try:
        assert cache_folder() == chosen
    finally:
        os.umask(before)
    assert mode(chosen) == 0o700
    (chosen / "kept").touch()
    assert cache_folder() == chosen
    assert names(chosen) == ["kept"]


def test_without_a_choice_the_cache_is_the_users(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, "")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_folder() == tmp_path / "xdg" / "stretto"
    monkeypatch.delenv(CACHE_VARIABLE)
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "stretto"
    # It is ours, so that it is closed if it is open.
    cache_folder().chmod(0o755)
    assert mode(cache_folder()) == 0o700


@pytest.mark.parametrize("open_mode", [0o755, 0o750, 0o704, 0o701, 0o777])
def test_an_open_chosen_cache_is_refused_and_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, open_mode: int
) -> None:
    chosen = tmp_path / "cache"
    chosen.mkdir()
    chosen.chmod(open_mode)
    monkeypatch.setenv(CACHE_VARIABLE, str(chosen))
    with pytest.raises(StrettoError, match="open to other users") as caught:
        cache_folder()
    assert repr(str(chosen)) in str(caught.value)
    assert CACHE_VARIABLE in caught.value.fix
    assert mode(chosen) == open_mode


@pytest.mark.skipif(sys.platform == "win32", reason="needs owners")
@pytest.mark.parametrize("chosen", [True, False])
def test_a_cache_of_another_user_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, chosen: bool) -> None:
    folder = tmp_path / "stretto"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv(CACHE_VARIABLE, str(folder) if chosen else "")
    another = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: another)
    with pytest.raises(StrettoError, match="belongs to another user") as caught:
        cache_folder()
    assert repr(str(folder)) in str(caught.value)


def test_a_file_in_the_place_of_the_cache_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = tmp_path / "cache"
    place.write_text("mine")
    monkeypatch.setenv(CACHE_VARIABLE, str(place))
    with pytest.raises(StrettoError, match="cache folder") as caught:
        cache_folder()
    assert repr(str(place)) in str(caught.value)
    assert place.read_text() == "mine"


def test_a_user_without_a_home_has_a_cache_among_temporary_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def homeless() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv(CACHE_VARIABLE, raising=False)
    monkeypatch.setattr(Path, "home", homeless)
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(tmp_path))
    folder = cache_folder()
    assert folder == tmp_path / f"stretto-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.rmdir()
    folder.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StrettoError, match=CACHE_VARIABLE):
        cache_folder()


def test_a_home_that_cannot_hold_a_cache_is_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "home").write_text("a file")
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    for name in (CACHE_VARIABLE, "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setattr("tempfile.gettempdir", lambda: str(temporary))
    folder = cache_folder()
    assert folder == temporary / f"stretto-{os.getuid()}"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700


def test_other_libraries_are_lent_a_folder_only_where_they_cannot_have_their_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "cache"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert fallback_cache("other", usual="~/.other/cache") is None
    assert not (tmp_path / "cache").exists()
    monkeypatch.setenv("HOME", "/dev/null/home")
    assert fallback_cache("other", usual="~/.other/cache") == tmp_path / "cache" / "other"

    def homeless(self: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", homeless)
    assert fallback_cache("other", usual="~/.other/cache") == tmp_path / "cache" / "other"


def test_a_cache_that_cannot_be_made_names_the_variable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv(CACHE_VARIABLE, str(tmp_path / "file" / "below"))
    with pytest.raises(StrettoError, match=f"Set {CACHE_VARIABLE} to a folder of your own"):
        cache_folder()


@pytest.mark.parametrize("name", ["data.npz", "page", "page.html.npz"])
def test_an_output_of_another_kind_is_refused(name: str) -> None:
    with pytest.raises(StrettoError, match=r"--html .* does not end in \.html or \.htm"):
        check_ending(Path(name), flag="--html", endings=(".html", ".htm"))
    check_ending(Path("page.HTML"), flag="--html", endings=(".html", ".htm"))
    check_ending(None, flag="--html", endings=(".html",))
