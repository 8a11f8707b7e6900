"""The examples in docstrings run."""

import doctest
from types import ModuleType

import pytest

from stretto.large_batch import choose, guard, noise, scaling, search, throughput, tuner


@pytest.mark.parametrize(
    "module", [choose, guard, noise, scaling, search, throughput, tuner], ids=lambda module: module.__name__
)
def test_the_examples_run(module: ModuleType) -> None:
    found = doctest.testmod(module)
    assert found.attempted > 0
    assert found.failed == 0
