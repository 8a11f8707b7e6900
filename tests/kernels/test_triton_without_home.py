"""Triton where the user's home cannot hold its cache, as in containers."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

COMPILE = "from stretto.kernels.backends.triton import compiles_for; print(*compiles_for())"
ASK = """
import os
from stretto.kernels.backends.triton.package import optional
optional("triton")
print(os.environ["TRITON_CACHE_DIR"])
"""


def run(code: str, tmp_path: Path, **variables: str) -> "subprocess.CompletedProcess[str]":
    (tmp_path / "work").mkdir()
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("TRITON_", "XDG_"))}
    environment = {**kept, "STRETTO_CACHE": str(tmp_path / "cache"), **variables}
    command = [sys.executable, "-c", code]
    return subprocess.run(command, env=environment, cwd=tmp_path / "work", capture_output=True, text=True, check=False)


def test_kernels_are_compiled_into_our_cache(tmp_path: Path) -> None:
    done = run(COMPILE, tmp_path, HOME="/dev/null/home")
    assert done.returncode == 0, done.stderr
    assert done.stdout.split(), "nothing was compiled"
    assert any((tmp_path / "cache" / "triton").iterdir())
    assert not list((tmp_path / "work").iterdir())


def test_a_cache_that_the_user_has_chosen_is_kept(tmp_path: Path) -> None:
    chosen = str(tmp_path / "mine")
    done = run(ASK, tmp_path, HOME="/dev/null/home", TRITON_CACHE_DIR=chosen)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [chosen]
