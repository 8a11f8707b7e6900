"""The public names: exactly these, imported when first used, and nothing heavy before."""

import importlib
import subprocess
import sys

import pytest

import stretto
from stretto.extras import EXTRA_OF

NAMES = [
    "RNN",
    "BatchTuner",
    "BucketSampler",
    "Cell",
    "Graph",
    "LargeBatch",
    "Multigrid",
    "Newton",
    "Shooting",
    "StrettoError",
    "TrajectoryCache",
    "accelerate",
    "cells",
    "collate",
    "distributed",
    "explain",
    "load",
    "optimal_edges",
    "restore",
    "scan",
    "straight_through",
    "train",
]
HEAVY = ["torch", "numpy", "plotly", "pyarrow", "pydantic", "rich", "tyro", "safetensors"]


def _loaded_after(statement: str) -> set[str]:
    code = f"{statement}\nimport sys\nprint(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(done.stdout.split())


def test_the_names_are_exactly_these() -> None:
    assert stretto.__all__ == NAMES
    assert dir(stretto) == sorted(NAMES)
    assert sorted([*stretto.HOMES, *stretto.FOLDERS]) == sorted(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_every_name_is_what_its_module_has(name: str) -> None:
    found = getattr(stretto, name)
    if name in stretto.FOLDERS:
        assert found is importlib.import_module(f"stretto.{name}")
    else:
        assert found is getattr(importlib.import_module(stretto.HOMES[name]), name)
    assert found.__doc__


def test_a_name_that_is_not_there_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'stretto' has no attribute 'brain'"):
        _ = stretto.brain
    with pytest.raises(ImportError):
        exec("from stretto import brain")


def test_importing_stretto_loads_nothing_heavy() -> None:
    assert not _loaded_after("import stretto; dir(stretto); stretto.StrettoError").intersection(HEAVY)


def test_the_command_line_loads_torch_with_a_verb_alone() -> None:
    loaded = _loaded_after("from stretto.cli.main import main; main(['--version']); main(['--help'])")
    assert not loaded.intersection(["torch", "plotly", "pyarrow"])


def test_training_code_loads_no_optional_package() -> None:
    loaded = _loaded_after("import stretto; stretto.train; import stretto.data.synthetic.handwriting")
    assert not loaded.intersection(module.partition(".")[0] for module in EXTRA_OF)
