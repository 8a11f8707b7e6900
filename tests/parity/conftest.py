"""What the parity tests share: memory full of NaN, layers as waves, and which cases are for the quick suite."""

from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Final

import pytest
import torch
from parity_cells import layer
from parity_oracle import KERNELS

import stretto
from stretto.kernels import program

QUICK_CASES: Final = {
    "test_every_setting_equals_the_definition": 8,
    "test_every_cell_equals_the_definition_in_single_precision": 5,
    "test_one_unit_equals_the_definition": 3,
    "test_masks_of_whole_sequences_are_the_definition_s_in_training": 2,
    "test_cells_equal_the_definition_and_are_compiled_where_possible": 16,
    "test_inputs_of_any_magnitude": 12,
    "test_what_is_drawn_in_the_loop_is_the_same_for_compiled_code": 3,
    "test_all_steps_and_sequences": 1,
    "test_shared_rows_equal_the_definition": 2,
    "test_loops_long_enough_to_try_both_ways": 1,
    "test_a_wave_makes_the_same_bits": 2,
    "test_no_cell_reads_what_was_not_written": 5,
    "test_second_derivatives": 7,
}
"""How many cases of the tests that compile most are in the quick suite, spread evenly; the others are slow."""


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    cases: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        if item.path.parent == Path(__file__).parent and isinstance(item, pytest.Function):
            cases[item.originalname].append(item)
    for name, quick in QUICK_CASES.items():
        found = cases[name]
        kept = {len(found) * index // quick for index in range(quick)}
        for index, item in enumerate(found):
            if index not in kept:
                item.add_marker(pytest.mark.slow)


@pytest.fixture(params=KERNELS)
def lstm(request: pytest.FixtureRequest) -> stretto.RNN:
    return layer("lstm", 7, backend=request.param)


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
