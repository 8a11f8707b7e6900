"""What tests of benchmarks share."""

import importlib
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

import pytest
import torch

from bench.harness import Report, Table, bench
from stretto import extras
from stretto.nn import RNN

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


def _measure(name: str, *flags: str) -> Report:
    return bench.measure(name, bench.parse(name, ["--quick", *flags]))


@pytest.fixture(scope="session")
def measure() -> Callable[..., Report]:
    """Run a benchmark with --quick and other flags."""
    return _measure


def _column(tables: Sequence[Table], name: str) -> list[Any]:
    return [row[table.columns.index(name)] for table in tables if name in table.columns for row in table.rows]


@pytest.fixture(scope="session")
def column() -> Callable[[Sequence[Table], str], list[Any]]:
    """All values under a heading."""
    return _column


@pytest.fixture(params=["output", "gradient"])
def wrong_layer(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Makes our layer wrong by a thousandth: in its outputs, or in its gradients alone."""
    right = RNN.forward

    def wrong(self: RNN, *args: Any, **options: Any) -> Any:
        y, state = right(self, *args, **options)
        changed: torch.Tensor = 1.001 * y if request.param == "output" else y.detach() + 1.001 * (y - y.detach())
        return changed, state

    monkeypatch.setattr(RNN, "forward", wrong)
    return str(request.param)
