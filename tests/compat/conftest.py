"""The backend of a test: `auto` measures, and finds what the test says."""

from typing import Any, Final

import pytest

from stretto.nn import choice, torch_layers

SPEEDUPS: Final = {"generated": 2.0, "torch": 0.5}


@pytest.fixture
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    name, _, faster = request.param.partition("-")
    if faster:

        def speedup(*args: Any, **kwargs: Any) -> float:
            choice.expected_speedup(*args, **kwargs)  # whatever measuring does to the user's program, it does
            return SPEEDUPS[faster]

        monkeypatch.setattr(torch_layers, "expected_speedup", speedup)
    return str(name)
