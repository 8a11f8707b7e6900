"""Which compiler is used, and the reason that is given where none can be."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import stretto
from stretto.files import CACHE_VARIABLE
from stretto.kernels import NoCompiler, find_compiler, library_folder
from stretto.kernels.backends.cpp import compiler

NAMES = ("g++", "clang++", "c++")
real = pytest.mark.skipif(not any(map(shutil.which, NAMES)), reason="there is no C++ compiler")


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    monkeypatch.delenv("CXX", raising=False)
    compiler._find.cache_clear()
    yield folder
    compiler._find.cache_clear()


def _script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
    path.chmod(0o755)
    return path


@real
def test_cxx_may_have_flags_a_launcher_or_a_path_with_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = next(place for name in NAMES if (place := shutil.which(name)))
    monkeypatch.setenv("CXX", f"{found} -O1")
    assert find_compiler().command == (found, "-O1")
    (tmp_path / "my tools").mkdir()
    spaced = _script(tmp_path / "my tools" / "c++", f'exec {found} "$@"')
    monkeypatch.setenv("CXX", str(spaced))
    assert find_compiler().command == (str(spaced),)
    launcher = _script(tmp_path / "launcher", 'exec "$@"')
    monkeypatch.setenv("CXX", f"{launcher} {found}")
    assert find_compiler().command == (str(launcher), found)
    assert find_compiler().flags


def test_a_compiler_that_writes_nothing_is_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", str(_script(tmp_path / "silent", "exit 0")))
    with pytest.raises(NoCompiler, match="does not run"):
        find_compiler()
    monkeypatch.setenv("CXX", str(_script(tmp_path / "idle", "echo idle 1.0")))
    with pytest.raises(NoCompiler, match="wrote nothing"):
        compiler.load("int x;", torch_version=torch.__version__)
    monkeypatch.setenv("CXX", "'unfinished")
    with pytest.raises(NoCompiler, match="no C\\+\\+ compiler was found"):
        find_compiler()


@real
def test_what_others_may_have_written_of_a_compiler_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = find_compiler()
    note = library_folder() / "compiler.json"
    facts = json.loads(note.read_text(encoding="utf-8"))
    note.write_text(json.dumps({**facts, "flags": ["-fplugin=evil.so"]}), encoding="utf-8")
    note.chmod(0o666)
    compiler._find.cache_clear()
    assert find_compiler() == honest


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_with_neither_a_compiler_nor_triton_all_runs_and_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "'unfinished")
    for name in {"triton", *(name for name in sys.modules if name.startswith("triton."))}:
        monkeypatch.setitem(sys.modules, name, None)
    x, h = torch.randn(2, 5, 3), torch.zeros(2, 3)

    def step(h: torch.Tensor, x_t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        new = torch.tanh(x_t + 0.5 * h)
        return new, new

    last, y = stretto.scan(step, h, x)
    torch.testing.assert_close(y[:, -1], last)
    # Of a size that no other test has: what was found out about a layer is kept for the process.
    model = stretto.accelerate(torch.nn.Sequential(torch.nn.GRU(3, 41, batch_first=True)))
    model(x)[0].sum().backward()
    for explanation in (stretto.explain(step, h, x), stretto.explain(model)):
        assert "no C++ compiler was found" in str(explanation)


HIDDEN = """
import torch, stretto
from stretto.kernels import find_compiler
torch.manual_seed(0)
rnn = stretto.RNN(stretto.cells.GRU(3, 8), num_layers=2, backend="cpp")
reference = stretto.RNN(list(rnn.cells), 2, backend="torch")
x = torch.randn(4, 9, 3)
results = []
for net in (rnn, reference):
    y, _ = net(x, lengths=[9, 2, 5, 1])
    results.append([y, *torch.autograd.grad(y.square().sum(), list(net.parameters()))])
for one, other in zip(*results):
    torch.testing.assert_close(one, other, atol=1e-4, rtol=1e-4)
print(" ".join(find_compiler().command[1:]))
"""


@pytest.mark.slow
def test_without_a_system_compiler_that_of_the_extra_is_used(tmp_path: Path, cache: Path) -> None:
    pytest.importorskip("ziglang", reason="the extra `compiler` is not installed")
    empty = tmp_path / "bin"
    empty.mkdir()
    environment = {**os.environ, "PATH": str(empty)}
    done = subprocess.run([sys.executable, "-c", HIDDEN], env=environment, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "-m ziglang c++"), done.stderr
    done = subprocess.run(
        [sys.executable, "-m", "stretto", "doctor"], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout
    assert "ziglang" in done.stdout
    assert "a small kernel agrees with plain PyTorch" in done.stdout


@real
def test_openmp_is_left_out_where_only_its_flag_is_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = next(place for name in NAMES if (place := shutil.which(name)))
    refuse = 'for word; do case "$word" in *.cpp) ! grep -q omp.h "$word" || exit 1;; esac; done'
    monkeypatch.setenv("CXX", str(_script(tmp_path / "bare", f'{refuse}\nexec {found} "$@"')))
    assert "-fopenmp" not in find_compiler().flags
