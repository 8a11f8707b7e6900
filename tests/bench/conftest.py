"""What tests of benchmarks share."""

import importlib
from types import ModuleType

import pytest

from stretto import extras

PEERS = ("jax", "lhotse", "transformers")


@pytest.fixture
def without_peers(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no other library were installed."""
    real = importlib.import_module

    def import_module(name: str, package: str | None = None) -> ModuleType:
        if name.partition(".")[0] in PEERS:
            raise ImportError(f"No module named {name!r}")
        return real(name, package)

    monkeypatch.setattr(extras.importlib, "import_module", import_module)
