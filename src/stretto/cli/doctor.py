"""`stretto doctor`."""

import dataclasses
import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from typing import Final, final

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stretto.cells import Elman
from stretto.cli.flags import parse
from stretto.errors import StrettoError
from stretto.extras import EXTRA_OF
from stretto.files import CACHE_VARIABLE, cache_folder
from stretto.kernels import MARCH_VARIABLE, Compiler, NoCompiler, all_backends, find_compiler, library_folder
from stretto.nn import RNN

PACKAGES: Final = {"HersheyFonts": "Hershey-Fonts", "PIL": "pillow"}
"""Packages that are called otherwise than their modules."""
VECTORS: Final = {
    "__AVX512F__": "AVX-512, 64 bytes wide",
    "__AVX2__": "AVX2, 32 bytes wide",
    "__AVX__": "AVX, 32 bytes wide",
    "__ARM_NEON": "NEON, 16 bytes wide",
    "__SSE2__": "SSE2, 16 bytes wide",
}
"""Macros by which a compiler says what its code will use, the widest first."""
WITHOUT: Final = "cells run operator by operator instead: the same results, slower"
BROKEN: Final = 2
TOLERANCE: Final = 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    """What Stretto will use on this machine, and why. The exit code is 2 if something here would stop you."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """One line: what was looked at, what was found, and whether that would stop a user."""

    name: str
    value: str
    broken: bool = False


def run(words: list[str]) -> int:
    """Tell."""
    parse(DoctorSettings, words, prog="stretto doctor")
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    broken = False
    for finding in findings():
        table.add_row(Text(finding.name), Text(finding.value, style="bold red" if finding.broken else ""))
        broken |= finding.broken
    Console().print(table)
    return BROKEN if broken else 0


def findings() -> Iterator[Finding]:
    """What was found, in the order in which it is shown."""
    yield _found("stretto", f"{importlib.metadata.version('stretto')} on Python {platform.python_version()}")
    yield _found("torch", f"{torch.__version__}, vector instructions {torch.backends.cpu.get_cpu_capability()}")
    yield _found("threads", f"{torch.get_num_threads()} of {os.cpu_count()} cores; --threads changes it")
    yield _found("oneDNN", _one_dnn())
    yield _found("device", "CUDA is there; --device cuda uses it" if torch.cuda.is_available() else "cpu")
    try:
        yield _found("cache", f"{cache_folder()}, private; {CACHE_VARIABLE} moves it")
    except StrettoError as error:
        yield Finding(name="cache", value=f"cannot be used: {error}", broken=True)
    yield from _kernels()
    yield from _backends()
    for extra, packages in extras().items():
        absent = [name for name, version in packages.items() if version is None]
        there = ", ".join(f"{name} {version}" for name, version in packages.items() if version is not None)
        hint = f"missing {', '.join(absent)}: pip install 'stretto[{extra}]'" if absent else ""
        yield _found(f"[{extra}]", "; ".join(part for part in (there, hint) if part))


def _found(name: str, value: str) -> Finding:
    return Finding(name=name, value=value)


def _kernels() -> Iterator[Finding]:
    """The compiler, where compiled kernels lie, and whether one of them computes what it should."""
    try:
        compiler = find_compiler()
    except NoCompiler as reason:
        yield _found("compiler", f"none: {reason}. {WITHOUT[:1].upper()}{WITHOUT[1:]}")
        yield _found("", "Install g++ or clang++, or name a compiler with CXX")
        return
    except StrettoError as error:
        yield Finding(name="compiler", value=str(error), broken=True)
        return
    yield _found("compiler", f"{compiler.path}, {compiler.version}; CXX names another")
    yield _found("flags", f"{' '.join(compiler.flags)}; {MARCH_VARIABLE} names another processor for -march")
    yield _found("vectors", _vectors(compiler))
    parallel = "-fopenmp" in compiler.flags
    yield _found("OpenMP", "yes: kernels use the threads above" if parallel else "no: kernels run on one thread")
    try:
        folder = library_folder()
        sizes = [path.stat().st_size for path in folder.glob("*.so")]
    except (StrettoError, OSError) as error:
        yield Finding(name="kernels", value=f"cannot be kept: {error}", broken=True)
        return
    yield _found("kernels", f"{len(sizes)} compiled, {sum(sizes) / 2**20:.1f} MiB, in {folder}, private")
    yield _self_test()


def _backends() -> Iterator[Finding]:
    """The backends, in the order in which backend="auto" tries them."""
    for backend in all_backends():
        try:
            reason = backend.unavailable()
        except StrettoError as error:
            reason = str(error)
        yield _found(f"backend {backend.name}", backend.description if reason is None else f"not here: {reason}")


def _vectors(compiler: Compiler) -> str:
    """What the compiler says that its code will use."""
    command = [compiler.path, *compiler.flags, "-dM", "-E", "-x", "c++", os.devnull]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return "not known"
    macros = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("#define ")}
    return next((name for macro, name in VECTORS.items() if macro in macros), "none that is known")


def _self_test() -> Finding:
    """A small kernel beside the same steps in plain PyTorch: outputs and gradients."""
    start = time.perf_counter()
    before = set(library_folder().glob("*.so"))
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        cell = Elman(3, 5)
        x = torch.randn(4, 6, 3)
    rnn = RNN(cell)
    try:
        made = _run(cell, rnn(x)[0])
    except StrettoError as error:
        return Finding(name="self-test", value=f"failed: {error}", broken=True)
    explanation = rnn.explain()
    if explanation.backend != "cpp":
        return _found("self-test", f"no kernel could be made: {explanation.reason}; {WITHOUT}")
    state, outputs = cell.initial_state(len(x)), []
    for step in range(x.shape[1]):
        y, state = cell(x[:, step], state)
        outputs.append(y)
    wanted = _run(cell, torch.stack(outputs, dim=1))
    if not all(torch.allclose(one, other, atol=TOLERANCE) for one, other in zip(made, wanted, strict=True)):
        value = "failed: a compiled kernel and plain PyTorch disagree. Set CXX to another compiler, and report this"
        return Finding(name="self-test", value=value, broken=True)
    cold = set(library_folder().glob("*.so")) - before
    took = f"{time.perf_counter() - start:.2f} s, {'compiled just now' if cold else 'from the cache'}"
    return _found("self-test", f"ok: a small kernel agrees with plain PyTorch, gradients too ({took})")


def _run(cell: Elman, y: torch.Tensor) -> list[torch.Tensor]:
    """An output with the gradients of the cell's parameters."""
    return [y, *torch.autograd.grad(y.square().sum(), list(cell.parameters()))]


def _one_dnn() -> str:
    there = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    return "yes: torch.nn.LSTM runs fused" if there else "no: torch.nn.LSTM runs step by step"


def extras() -> dict[str, dict[str, str | None]]:
    """The packages of each extra with their versions, None for one that is not installed."""
    found: dict[str, dict[str, str | None]] = {}
    for module, extra in EXTRA_OF.items():
        package = module.partition(".")[0]
        name = PACKAGES.get(package, package)
        try:
            found.setdefault(extra, {})[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found.setdefault(extra, {})[name] = None
    return found
