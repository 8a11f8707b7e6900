"""What the parity tests share: any number of threads, and memory that comes full of NaN."""

from collections.abc import Iterator

import pytest
import torch

from stretto.kernels import program


@pytest.fixture
def poisoned_memory() -> Iterator[None]:
    """`torch.empty` gives NaN: what is read without being written shows."""
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory  # type: ignore[attr-defined]
    torch.use_deterministic_algorithms(True)
    assert bool(torch.empty(3).isnan().all())
    yield
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def waves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers run as a wave wherever they can, whether or not that is expected to be faster."""
    monkeypatch.setattr(program, "CHUNK_COST", 0)
    monkeypatch.setattr(program, "TEAM_SPEEDUP", 1.0)
    monkeypatch.setattr(program, "MAX_WAVE_SHARE", 1.0)
