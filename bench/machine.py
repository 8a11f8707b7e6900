"""Where a benchmark ran: without it no number means anything."""

import dataclasses
import importlib.metadata
import os
import platform
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """Where it ran.

    Attributes:
        python: Version of Python.
        packages: Version of NumPy, torch and each peer; None when it is not installed.
        cpu_count: Logical processors.
        system: Operating system and architecture.
    """

    python: str
    packages: dict[str, str | None]
    cpu_count: int
    system: str

    def __str__(self) -> str:
        versions = [f"{package} {version}" for package, version in self.packages.items() if version is not None]
        return ", ".join([f"Python {self.python}", *versions, f"{self.cpu_count} CPUs", self.system])


def machine_with(peers: Sequence[str]) -> Machine:
    """This machine, with the versions of the peers that a benchmark compares with."""
    return Machine(
        python=platform.python_version(),
        packages={package: _version(package) for package in ("numpy", "torch", *peers)},
        cpu_count=os.cpu_count() or 1,
        system=f"{platform.system()} {platform.machine()}",
    )


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
