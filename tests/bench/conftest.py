"""What tests of benchmarks share."""

import importlib
from types import ModuleType
from typing import Any

import pytest
import torch

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
