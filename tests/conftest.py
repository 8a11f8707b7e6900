"""What all tests share: a private cache, one thread, real data where there is some, and when two sets are the same."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

# Threads of OpenMP wait without turning round and round: tests have few cores. To be said before torch is there.
os.environ["OMP_WAIT_POLICY"] = "passive"

import hypothesis
import numpy as np
import pytest
import torch

from stretto.data import Labels, SequenceSet, StepLabels
from stretto.files import CACHE_VARIABLE
from stretto.kernels.backends.cpp import batched, compiler
from stretto.nn import RNN

DATA_VARIABLE = "STRETTO_DATA"

# How long an example takes depends on what else the machine does.
hypothesis.settings.register_profile("any load", deadline=None)
hypothesis.settings.load_profile("any load")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Tests of what is not part of the package belong to the long checks."""
    for item in items:
        if item.path.parent.name in {"bench", "experiments"}:
            item.add_marker(pytest.mark.slow)


@pytest.fixture(autouse=True, scope="session")
def private_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Of this run of the suite: processes that share its tests share what they have compiled, too."""
    own = tmp_path_factory.getbasetemp()
    folder = (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "stretto-cache"
    folder.mkdir(mode=0o700, exist_ok=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, str(folder))
        yield folder


@pytest.fixture(autouse=True, scope="session")
def one_thread() -> Iterator[None]:
    """Small nets gain nothing from a second thread, and threads that wait slow down whatever else runs.

    So it is in processes that tests start, unless they set it themselves.
    """
    earlier = torch.get_num_threads()
    torch.set_num_threads(1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", "1")
        yield
    torch.set_num_threads(earlier)


@pytest.fixture
def set_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[int], None]]:
    """Sets the number of threads, which then all work however little there is to do; it is as before afterwards."""
    monkeypatch.setattr(batched, "MIN_WORK_PER_THREAD", 1)
    earlier = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(earlier)


@pytest.fixture(scope="module")
def quick_compiler() -> Iterator[None]:
    """A compiler that is quick rather than good, for small cells that run once; for one file of tests."""
    with pytest.MonkeyPatch.context() as patch:
        flags = tuple("-O0" if flag == "-O2" else flag for flag in compiler.BASE_FLAGS)
        patch.setattr(compiler, "BASE_FLAGS", flags)
        compiler._find.cache_clear()
        yield
    compiler._find.cache_clear()
    # Tests of kernels that come later in this process are about code that is compiled well.
    batched.find_library.cache_clear()


@pytest.fixture(scope="module")
def interpreter() -> Iterator[None]:
    """Triton's kernels are interpreted, on the CPU; for one file of tests."""
    pytest.importorskip("triton")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        yield


@pytest.fixture(scope="session")
def shared_data() -> Path:
    chosen = os.environ.get(DATA_VARIABLE)
    if not chosen:
        pytest.skip(f"{DATA_VARIABLE} does not name a folder of real data sets")
    folder = Path(chosen)
    if not folder.is_dir():
        pytest.skip(f"{DATA_VARIABLE} names {chosen!r}, which is no folder")
    return folder


def _assert_same_set(one: SequenceSet, other: SequenceSet) -> None:
    assert len(one) == len(other)
    np.testing.assert_array_equal(one.lengths_N, other.lengths_N)
    np.testing.assert_array_equal(one.split_N, other.split_N)
    assert one.features_SF.dtype == other.features_SF.dtype
    assert one.num_features == other.num_features
    assert (one.alphabet, one.vocabulary) == (other.alphabet, other.vocabulary)
    assert type(one.targets) is type(other.targets)
    if isinstance(one.targets, Labels | StepLabels) and isinstance(other.targets, Labels | StepLabels):
        assert one.targets.names == other.targets.names
    for index in range(len(one)):
        first, second = one[index], other[index]
        np.testing.assert_array_equal(first.features_TF.numpy(), second.features_TF.numpy())
        np.testing.assert_array_equal(first.target, second.target)  # type: ignore[arg-type]


@pytest.fixture(scope="session")
def assert_same_set() -> Callable[[SequenceSet, SequenceSet], None]:
    return _assert_same_set


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
