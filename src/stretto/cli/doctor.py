"""`stretto doctor`."""

import contextlib
import dataclasses
import importlib.metadata
import os
import platform
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final, NamedTuple

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stretto.cells import Elman
from stretto.cli.flags import parse
from stretto.errors import StrettoError
from stretto.extras import EXTRA_OF
from stretto.files import CACHE_VARIABLE, cache_folder
from stretto.kernels import (
    MARCH_VARIABLE,
    Backend,
    Compiler,
    NoCompiler,
    all_backends,
    compiles_for,
    find_compiler,
    interpreted,
    library_folder,
)
from stretto.nn import RNN

PACKAGES: Final = {"mlflow": "mlflow-skinny", "HersheyFonts": "Hershey-Fonts", "PIL": "pillow"}
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
WITHOUT_TRITON: Final = "On a GPU, cells are called at each step instead: the same results, slower"
DRIVERS: Final = (Path("/proc/driver/nvidia/version"), Path("/sys/module/amdgpu/version"))
BROKEN: Final = 2
TOLERANCE: Final = 1e-4


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    """What Stretto will use on this machine, and why. The exit code is 2 if something here would stop you."""


class Finding(NamedTuple):
    """One line: what was checked, what was found, and whether that would stop a user."""

    name: str
    value: str
    broken: bool = False


def run(words: list[str]) -> int:
    """Print what was found."""
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
    yield Finding("stretto", f"{importlib.metadata.version('stretto')} on Python {platform.python_version()}")
    yield Finding("torch", f"{torch.__version__}, vector instructions {torch.backends.cpu.get_cpu_capability()}")
    yield Finding("threads", f"{torch.get_num_threads()} of {os.cpu_count()} cores; --threads changes it")
    fused = bool(torch.backends.mkldnn.is_available())  # type: ignore[no-untyped-call]
    yield Finding("oneDNN", f"{'yes' if fused else 'no'}: torch.nn.LSTM runs {'fused' if fused else 'step by step'}")
    yield Finding("device", "CUDA is there; --device cuda uses it" if torch.cuda.is_available() else "cpu")
    yield from _find_gpus()
    try:
        yield Finding("cache", f"{cache_folder()}, private; {CACHE_VARIABLE} moves it")
    except StrettoError as error:
        yield Finding("cache", f"cannot be used: {error}", broken=True)
    yield from _check_kernels()
    yield from _check_triton()
    # In the order in which backend="auto" tries them.
    for backend in all_backends():
        try:
            reason = backend.idle()
        except StrettoError as error:
            reason = str(error)
        yield Finding(f"backend {backend.name}", backend.description if reason is None else f"not here: {reason}")
    for extra, packages in extras().items():
        absent = [name for name, version in packages.items() if version is None]
        there = ", ".join(f"{name} {version}" for name, version in packages.items() if version is not None)
        hint = f"missing {', '.join(absent)}: pip install 'stretto[{extra}]'" if absent else ""
        yield Finding(f"[{extra}]", "; ".join(part for part in (there, hint) if part))


def _check_kernels() -> Iterator[Finding]:
    """The compiler, where compiled kernels lie, and whether one of them computes what it should."""
    try:
        compiler = find_compiler()
    except NoCompiler as reason:
        yield Finding("compiler", f"none: {reason}. {WITHOUT[:1].upper()}{WITHOUT[1:]}")
        yield Finding("", "Install g++ or clang++, name a compiler with CXX, or: pip install 'stretto[compiler]'")
        return
    except StrettoError as error:
        yield Finding("compiler", str(error), broken=True)
        return
    yield Finding("compiler", f"{compiler.name}, {compiler.version}; CXX names another")
    yield Finding("flags", f"{' '.join(compiler.flags)}; {MARCH_VARIABLE} names another processor for -march")
    yield Finding("vectors", _check_vectors(compiler))
    parallel = "-fopenmp" in compiler.flags
    yield Finding("OpenMP", "yes: kernels use the threads above" if parallel else "no: kernels run on one thread")
    try:
        folder = library_folder()
        sizes = [path.stat().st_size for path in folder.glob("*.so")]
    except (StrettoError, OSError) as error:
        yield Finding("kernels", f"cannot be kept: {error}", broken=True)
        return
    yield Finding("kernels", f"{len(sizes)} compiled, {sum(sizes) / 2**20:.1f} MiB, in {folder}, private")
    yield _check_layer()


def _check_vectors(compiler: Compiler) -> str:
    """What the compiler says that its code will use."""
    command = [*compiler.command, *compiler.flags, "-dM", "-E", "-x", "c++", os.devnull]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)  # noqa: S603
    except (OSError, subprocess.SubprocessError):
        return "not known"
    macros = {line.split()[1] for line in done.stdout.splitlines() if line.startswith("#define ")}
    return next((name for macro, name in VECTORS.items() if macro in macros), "none that is known")


def _check_layer() -> Finding:
    """A small compiled kernel beside the same steps in plain PyTorch."""
    start = time.perf_counter()
    before = set(library_folder().glob("*.so"))
    failure, reason = _compare_with_torch("auto", torch.device("cpu"))
    if failure:
        return Finding("self-test", f"failed: {failure}. Set CXX to another compiler, and report this", broken=True)
    if reason:
        return Finding("self-test", f"no kernel could be made: {reason}; {WITHOUT}")
    cold = set(library_folder().glob("*.so")) - before
    took = f"{time.perf_counter() - start:.2f} s, {'compiled just now' if cold else 'from the cache'}"
    return Finding("self-test", f"ok: a small kernel agrees with plain PyTorch, gradients too ({took})")


def _find_gpus() -> Iterator[Finding]:
    """Each GPU with what decides about kernels for it, and its driver."""
    if not torch.cuda.is_available():
        return
    for index in range(torch.cuda.device_count()):
        found = torch.cuda.get_device_properties(index)
        kind = found.gcnArchName if torch.version.hip else f"compute capability {found.major}.{found.minor}"
        memory, units = found.total_memory / 2**30, found.multi_processor_count
        yield Finding(f"GPU {index}", f"{found.name}, {kind}, {units} multiprocessors, {memory:.0f} GiB")
    runtime = f"ROCm {torch.version.hip}" if torch.version.hip else f"CUDA {torch.version.cuda}"
    texts = [path.read_text(encoding="utf-8").splitlines()[0] for path in DRIVERS if path.exists()]
    yield Finding("driver", "; ".join([*(texts or ["version not known"]), f"torch was built for {runtime}"]))


def _check_triton() -> Iterator[Finding]:
    """A small kernel of Triton on the first GPU; on a machine without one it is compiled for one, and interpreted."""
    backend = next(item for item in all_backends() if item.name == "triton")
    if backend.unavailable() is not None:
        return  # The backends' own lines say why.
    version, start = importlib.metadata.version("triton"), time.perf_counter()
    gpu = torch.cuda.is_available()
    yield Finding("Triton", f"{version}; {'kernels for the GPU' if gpu else 'no GPU: its interpreter stands in'}")
    try:
        with contextlib.nullcontext() if gpu else interpreted():
            failure, reason = _compare_with_torch("triton", torch.device("cuda" if gpu else "cpu"))
        compiled = "" if gpu else f" and compiles for {', '.join(compiles_for())}"
    except Exception as error:  # noqa: BLE001 - whatever a driver or compiler raises is reported
        failure, reason = f"Triton {version} raised {type(error).__name__}: {error}", ""
    if failure or reason:
        # Without a GPU nothing else than these lines needs Triton.
        yield Finding("Triton test", f"failed: {failure or reason}. {WITHOUT_TRITON}", broken=gpu)
        return
    where = "on the GPU" if gpu else "interpreted, never run on a GPU,"
    took = f"({time.perf_counter() - start:.2f} s)"
    yield Finding("Triton test", f"ok: a small kernel {where} agrees with plain PyTorch{compiled} {took}")


def _compare_with_torch(backend: Backend, device: torch.device) -> tuple[str, str]:
    """A small kernel beside the same steps in plain PyTorch, gradients too: what is wrong, or why there is none."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        cell = Elman(3, 5).to(device)
        x = torch.randn(4, 6, 3).to(device)
    rnn = RNN(cell, backend=backend)
    try:
        made = _output_and_gradients(cell, rnn(x)[0])
    except StrettoError as error:
        return str(error), ""
    explanation, made_by = rnn.explain(), rnn.last_built
    fallbacks = [] if made_by is None else [loop.fallback for loop in made_by.program.loops if loop.fallback]
    if fallbacks:
        return "", fallbacks[0]  # something slower ran, whatever it computed
    if explanation.backend not in {"cpp", "triton"}:
        return "", explanation.reason
    state, outputs = cell.initial_state(len(x)), []
    for step in range(x.shape[1]):
        y, state = cell(x[:, step], state)
        outputs.append(y)
    wanted = _output_and_gradients(cell, torch.stack(outputs, dim=1))
    if all(torch.allclose(one, other, atol=TOLERANCE) for one, other in zip(made, wanted, strict=True)):
        return "", ""
    return "a compiled kernel and plain PyTorch disagree", ""


def _output_and_gradients(cell: Elman, y: torch.Tensor) -> list[torch.Tensor]:
    """An output with the gradients of the cell's parameters."""
    return [y, *torch.autograd.grad(y.square().sum(), list(cell.parameters()))]


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
