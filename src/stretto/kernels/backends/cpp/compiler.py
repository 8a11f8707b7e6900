"""The C++ compiler: which one, with which flags, and the private cache of what it made.

Environment variables:
    CXX: The compiler, with flags or a launcher if need be ("ccache g++"); by default the first of g++, clang++ and c++,
        and if there is none, the clang that `pip install 'stretto[compiler]'` brings.
    STRETTO_MARCH: What processor code is generated for, as the compiler's `-march=` takes it; by default the one that
        it runs on ("native"). `x86-64-v2` or `x86-64-v3`, for example, make kernels that give the same digits on every
        machine of a mixed cluster. It must be something that this processor can run.
    STRETTO_CACHE: The folder of the cache. Compiled kernels are found again by a hash of their text, the compiler, all
        flags, the processor and the release of torch.
"""

import ctypes
import hashlib
import importlib.util
import json
import os
import platform
import shlex
import shutil
import stat
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Final, final

from stretto.errors import StrettoError
from stretto.files import cache_folder, disk_errors, write_atomically, write_text_atomically
from stretto.kernels.ir import Unsupported

COMPILER_VARIABLE: Final = "CXX"
MARCH_VARIABLE: Final = "STRETTO_MARCH"
NATIVE_FLAGS: Final = ("-march=native", "-mcpu=native")
"""The first that the compiler takes is used, unless STRETTO_MARCH names something else."""
OPTIONAL_FLAGS: Final = ("-fopenmp", "--param=avoid-fma-max-bits=0", "-fpeel-loops")
"""Those that the compiler takes are used. The second: tuning for some processors splits fused multiplications in some
loops and not in others, and the same sum written for two widths would differ in its last digit. The last: short loops
over a row are written out, which makes layer norms up to a fifth faster and takes the compiler no longer."""
BASE_FLAGS: Final = (
    *("-std=c++17", "-O2", "-fno-tree-vectorize", "-fno-tree-slp-vectorize", "-fPIC", "-shared"),
    *("-fno-math-errno", "-fno-trapping-math", "-w"),
)
"""Generated code is written in vectors. Looking for more of them, and -O3, take half of the compiler's time and make
nothing faster."""


@final
@dataclass(frozen=True, slots=True)
class Compiler:
    """A compiler that works here."""

    command: tuple[str, ...]
    version: str
    flags: tuple[str, ...]

    @property
    def name(self) -> str:
        """As one would type it."""
        return shlex.join(self.command)


class NoCompiler(Unsupported):
    """Nothing can be compiled; the message says why."""


@lru_cache(maxsize=8)
def _find(wanted: str | None, search_path: str | None, march: str | None) -> Compiler:
    names = [wanted] if wanted else ["g++", "clang++", "c++"]
    command = next((words for name in names if (words := _command(name, search_path))), None)
    if command is None and not wanted and importlib.util.find_spec("ziglang") is not None:
        command = [sys.executable, "-m", "ziglang", "c++"]
    if command is None:
        raise NoCompiler(f"no C++ compiler was found ({', '.join(map(str, names))})")
    known = _remembered(command, march)
    if known is not None:
        return known
    version = (_run([*command, "--version"]) or "").splitlines()
    if not version:
        raise NoCompiler(f"the C++ compiler {shlex.join(command)!r} does not run")
    targets = [f"-march={march}"] if march else NATIVE_FLAGS
    target = next((flag for flag in targets if _accepts(command, [*BASE_FLAGS, flag])), None)
    if march and target is None:
        raise StrettoError(
            f"the C++ compiler {shlex.join(command)!r} does not take {MARCH_VARIABLE}={march!r}",
            fix=f"Unset {MARCH_VARIABLE}, or give something that its option -march= takes, such as x86-64-v3.",
        )
    flags = [*BASE_FLAGS, *([] if target is None else [target])]
    flags += [extra for extra in OPTIONAL_FLAGS if _accepts(command, [*BASE_FLAGS, extra])]
    found = Compiler(command=tuple(command), version=version[0], flags=tuple(flags))
    _remember(found, march)
    return found


def _command(name: str, search_path: str | None) -> list[str] | None:
    """The words of a command, the first as a path; None if it is not there."""
    try:
        # A path may have spaces in it.
        words = [name] if shutil.which(name, path=search_path) else shlex.split(name)
    except ValueError:
        return None
    place = shutil.which(words[0], path=search_path) if words else None
    return None if place is None else [place, *words[1:]]


def _identity(command: Sequence[str], march: str | None) -> dict[str, object]:
    """What changes when another compiler is installed, or this code asks for other flags."""
    status = Path(command[0]).stat()
    return {
        "command": list(command),
        "changed": status.st_mtime_ns,
        "size": status.st_size,
        "flags": [*BASE_FLAGS, *([f"-march={march}"] if march else NATIVE_FLAGS), *OPTIONAL_FLAGS],
    }


def _remembered(command: Sequence[str], march: str | None) -> Compiler | None:
    """What was found out about a compiler earlier, if it is still the same: asking it takes longer than a load."""
    path = library_folder() / "compiler.json"
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        if known["identity"] != _identity(command, march) or not _is_ours(path):
            return None
        return Compiler(command=tuple(command), version=str(known["version"]), flags=tuple(map(str, known["flags"])))
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None


def _remember(found: Compiler, march: str | None) -> None:
    facts = {"identity": _identity(found.command, march), "version": found.version, "flags": list(found.flags)}
    write_text_atomically(library_folder() / "compiler.json", json.dumps(facts, indent=1))


def find_compiler() -> Compiler:
    """The compiler named by `CXX`, or the first of g++, clang++, c++ and the one of the extra `compiler`.

    Raises:
        NoCompiler: If there is none that works.
        StrettoError: If it does not know the processor that `STRETTO_MARCH` names.
    """
    environment = os.environ
    return _find(environment.get(COMPILER_VARIABLE), environment.get("PATH"), environment.get(MARCH_VARIABLE) or None)


def _run(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)  # noqa: S603
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def _accepts(command: Sequence[str], flags: list[str]) -> bool:
    with tempfile.TemporaryDirectory(prefix="stretto-") as folder:
        source = Path(folder) / "probe.cpp"
        # Some compilers take the flag and have neither header nor library.
        header, value = ("#include <omp.h>\n", "omp_get_max_threads()") if "-fopenmp" in flags else ("", "0")
        source.write_text(f"{header}int main() {{ return {value}; }}\n", encoding="utf-8")
        return _run([*command, *flags, str(source), "-o", str(Path(folder) / "probe.so")]) is not None


@lru_cache(maxsize=1)
def describe_machine() -> str:
    """What code made for this machine depends on."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
        lines = {line for line in text.splitlines() if line.startswith(("flags", "Features", "model name"))}
    except OSError:
        lines = {platform.processor()}
    return "\n".join([platform.machine(), platform.system(), *sorted(lines)])


def _key_of(source: str, compiler: Compiler, torch_version: str) -> str:
    """A name that changes with everything the library depends on."""
    parts = [source, *compiler.command, compiler.version, *compiler.flags, describe_machine(), torch_version]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]


def library_folder() -> Path:
    """Where compiled libraries are kept: private, within the cache folder."""
    folder = cache_folder() / "kernels"
    with disk_errors(folder, doing="create the folder of compiled kernels"):
        folder.mkdir(mode=0o700, exist_ok=True)
        status = folder.stat()
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or stat.S_IMODE(status.st_mode) & 0o077):
        raise StrettoError(
            f"the folder of compiled kernels {str(folder)!r} can be reached by other users",
            fix="Remove it, or set STRETTO_CACHE to a private folder of your own.",
        )
    return folder


def _is_ours(path: Path) -> bool:
    status = path.lstat()
    owned = not hasattr(os, "getuid") or status.st_uid == os.getuid()
    # Windows has other permissions than these.
    private = os.name == "nt" or not stat.S_IMODE(status.st_mode) & 0o022
    return owned and private and stat.S_ISREG(status.st_mode)


def load(source: str, *, torch_version: str) -> ctypes.CDLL:
    """The library of `source`, from the cache or compiled now.

    Several processes may ask at once: each compiles to a temporary file, and renames it into place.

    Raises:
        NoCompiler: If it cannot be compiled or loaded.
    """
    compiler = find_compiler()
    path = library_folder() / f"{_key_of(source, compiler, torch_version)}.so"
    if path.exists():
        if not _is_ours(path):
            raise StrettoError(
                f"the compiled kernel {str(path)!r} belongs to another user or can be written by others",
                fix="Remove it, or set STRETTO_CACHE to a private folder of your own.",
            )
        try:
            return ctypes.CDLL(str(path))
        except OSError:
            path.unlink(missing_ok=True)
    _compile(source, compiler, path)
    try:
        return ctypes.CDLL(str(path))
    except OSError as error:
        raise NoCompiler(f"the compiled kernel could not be loaded: {error}") from error


def _compile(source: str, compiler: Compiler, path: Path) -> None:
    def write(target: Path) -> None:
        with tempfile.TemporaryDirectory(prefix="stretto-") as folder:
            text = Path(folder) / "kernel.cpp"
            text.write_text(source, encoding="utf-8")
            command = [*compiler.command, *compiler.flags, str(text), "-o", str(target)]
            try:
                done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)  # noqa: S603
            except (OSError, subprocess.TimeoutExpired) as error:
                raise NoCompiler(f"the C++ compiler could not be run: {error}") from error
            if done.returncode:
                first = next((line for line in done.stderr.splitlines() if "error" in line), done.stderr[:200])
                raise NoCompiler(f"the C++ compiler refused the generated code: {first.strip()}")
            if not target.exists():
                raise NoCompiler(f"the C++ compiler {compiler.name!r} ended without an error and wrote nothing")
            target.chmod(0o700)

    write_atomically(path, write)
