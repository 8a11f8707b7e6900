"""`stretto doctor`."""

import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Iterator

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from stretto.cli.parsing import parse
from stretto.errors import StrettoError
from stretto.extras import EXTRA_OF
from stretto.storage import CACHE_VARIABLE, cache_folder

PACKAGES = {"HersheyFonts": "Hershey-Fonts"}


@dataclasses.dataclass(frozen=True, kw_only=True)
class DoctorSettings:
    """What Stretto will use on this machine, and why."""


def run(words: list[str]) -> int:
    """Tell."""
    parse(DoctorSettings, words, prog="stretto doctor")
    table = Table(show_header=False, box=None, pad_edge=False)
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in facts():
        table.add_row(Text(name), Text(value))
    Console().print(table)
    return 0


def facts() -> Iterator[tuple[str, str]]:
    """Names and values, in the order in which they are shown."""
    yield "stretto", f"{importlib.metadata.version('stretto')} on Python {platform.python_version()}"
    yield "torch", f"{torch.__version__}, vector instructions {torch.backends.cpu.get_cpu_capability()}"
    yield "threads", f"{torch.get_num_threads()} of {os.cpu_count()} cores; --threads changes it"
    yield "oneDNN", _one_dnn()
    yield "device", "CUDA is there; --device cuda uses it" if torch.cuda.is_available() else "cpu"
    try:
        yield "cache", f"{cache_folder()}, private; {CACHE_VARIABLE} moves it"
    except StrettoError as error:
        yield "cache", f"cannot be used: {error}"
    for extra, packages in extras().items():
        absent = [name for name, version in packages.items() if version is None]
        there = ", ".join(f"{name} {version}" for name, version in packages.items() if version is not None)
        hint = f"missing {', '.join(absent)}: pip install 'stretto[{extra}]'" if absent else ""
        yield f"[{extra}]", "; ".join(part for part in (there, hint) if part)


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
