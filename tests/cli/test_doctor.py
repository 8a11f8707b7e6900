"""`stretto doctor`: what will be used, whether it works, and exit code 2 only for what would stop a user."""

import importlib
import os
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from stretto.cli import doctor
from stretto.extras import EXTRA_OF
from stretto.files import CACHE_VARIABLE
from stretto.kernels import MARCH_VARIABLE, Compiler, find_compiler
from stretto.kernels.backends.generated import LaunchError
from stretto.kernels.backends.triton.kernel import TritonKernel
from stretto.nn import RNN

Run = Callable[[], tuple[int, dict[str, str]]]


@pytest.fixture(autouse=True)
def wide(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("COLUMNS", "1000")
    with mock.patch.dict(os.environ):
        yield


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    monkeypatch.setenv(CACHE_VARIABLE, str(folder))
    return folder


@pytest.fixture
def examine(run: Callable[..., Any]) -> Run:
    def call() -> tuple[int, dict[str, str]]:
        ended = run("doctor")
        lines = [line.partition("  ") for line in ended.out.splitlines()]
        return ended.code, {name: value.strip() for name, _, value in lines}

    return call


@pytest.fixture
def compiler() -> Compiler:
    return find_compiler()


def test_the_compiler_is_shown_and_a_kernel_tried_cold_and_from_the_cache(
    examine: Run, cache: Path, compiler: Compiler
) -> None:
    code, found = examine()
    assert code == 0
    assert compiler.name in found["compiler"]
    assert compiler.version in found["compiler"]
    assert found["flags"].startswith(" ".join(compiler.flags))
    assert found["OpenMP"].startswith("yes" if "-fopenmp" in compiler.flags else "no")
    assert found["vectors"].endswith("bytes wide")
    assert found["kernels"] == f"0 compiled, 0.0 MiB, in {cache / 'kernels'}, private"
    assert found["self-test"].startswith("ok")
    assert "compiled just now" in found["self-test"]
    made = list((cache / "kernels").glob("*.so"))
    code, found = examine()
    assert code == 0
    assert found["kernels"].startswith(f"{len(made)} compiled, ")
    assert "from the cache" in found["self-test"]
    assert list((cache / "kernels").glob("*.so")) == made


def test_without_a_compiler_it_is_slower_and_nothing_is_broken(examine: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    code, found = examine()
    assert code == 0
    assert "no-such-compiler" in found["compiler"]
    assert "operator by operator" in found["compiler"]
    assert "CXX" in found[""]
    assert "self-test" not in found
    assert "no-such-compiler" in found["backend cpp"]
    assert "operator by operator" in found["backend eager"]


def test_without_a_gpu_a_kernel_of_triton_is_compiled_and_interpreted(examine: Run) -> None:
    pytest.importorskip("triton")
    code, found = examine()
    assert code == 0
    assert "no GPU" in found["Triton"]
    assert found["Triton test"].startswith("ok: a small kernel interpreted, never run on a GPU, agrees")
    assert "sm_80, sm_90, sm_100, gfx942" in found["Triton test"]
    assert "GPU 0" not in found


def test_backends_of_a_gpu_are_not_called_usable_without_one(examine: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    _, found = examine()
    for name in ("triton", "cudagraph"):
        assert found[f"backend {name}"].startswith("not here: ")
        assert "no GPU" in found[f"backend {name}"]
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert examine()[1]["backend triton"] == "the loops run as generated Triton"


def test_backends_of_a_gpu_that_is_too_old(examine: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    _pretend_gpu(monkeypatch, major=7, minor=5, multi_processor_count=40, total_memory=16 << 30)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (7, 5))
    _, found = examine()
    assert found["backend triton"].startswith("not here: ")
    assert "compute capability 8.0, and this one has 7.5" in found["backend triton"]
    assert found["backend cudagraph"].startswith("the loops run")


def test_a_kernel_that_something_slower_ran_for_is_not_ok(examine: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """What ran instead agrees, and says nothing of the kernel."""
    pytest.importorskip("triton")
    monkeypatch.setattr(TritonKernel, "launch", _refuse)
    with pytest.warns(UserWarning, match="no such instruction"):
        _, found = examine()
    assert found["Triton test"].startswith("failed: no such instruction")


def _pretend_gpu(monkeypatch: pytest.MonkeyPatch, **facts: int) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    properties = types.SimpleNamespace(name="A GPU", **facts)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)


def _refuse(*_: object, **__: object) -> None:
    raise LaunchError("no such instruction")


def test_a_gpu_is_named_and_one_whose_kernel_fails_stops_a_user(examine: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """A stand-in: named as torch names it, and nothing can run on it."""
    pytest.importorskip("triton")
    _pretend_gpu(monkeypatch, major=9, minor=0, multi_processor_count=132, total_memory=80 << 30)
    code, found = examine()
    assert code == 2
    assert found["GPU 0"] == "A GPU, compute capability 9.0, 132 multiprocessors, 80 GiB"
    assert "torch was built for" in found["driver"]
    assert found["Triton test"].startswith("failed: Triton ")
    assert "called at each step instead" in found["Triton test"]


@pytest.mark.parametrize("wrong", ["a result", "an error"])
def test_a_version_of_triton_that_fails_is_named(examine: Run, monkeypatch: pytest.MonkeyPatch, wrong: str) -> None:
    pytest.importorskip("triton")

    def fail(*_: object) -> tuple[str, str]:
        if wrong == "an error":
            raise TypeError("only 0-dimensional arrays")
        return "a compiled kernel and plain PyTorch disagree", ""

    monkeypatch.setattr(doctor, "_compare_with_torch", lambda name, _: fail() if name == "triton" else ("", ""))
    code, found = examine()
    assert code == 0  # No GPU is there that would need it.
    assert found["Triton test"].startswith("failed: ")
    assert ("TypeError: only 0-dim" if wrong == "an error" else "disagree") in found["Triton test"]


def test_a_processor_that_the_compiler_does_not_know_stops_a_user(
    examine: Run, cache: Path, compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(MARCH_VARIABLE, "no-such-processor")
    code, found = examine()
    assert code == 2
    for name in ("compiler", "backend cpp"):
        assert "STRETTO_MARCH='no-such-processor'" in found[name]


def test_a_compiler_that_cannot_compile_kernels_is_reported(
    examine: Run, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = cache.parent / "fake-c++"
    fake.write_text('#!/bin/sh\ncase "$*" in *--version*) echo fake 1.0;; *) exit 1;; esac\n', encoding="utf-8")
    fake.chmod(0o755)
    monkeypatch.setenv("CXX", str(fake))
    monkeypatch.delenv("STRETTO_MARCH", raising=False)
    code, found = examine()
    assert code == 0
    assert "fake 1.0" in found["compiler"]
    assert found["vectors"] == "not known"
    assert found["OpenMP"].startswith("no")
    assert found["self-test"].startswith("no kernel could be made")
    assert "operator by operator" in found["self-test"]


def test_a_cache_that_others_can_reach_stops_a_user(examine: Run, cache: Path, compiler: Compiler) -> None:
    cache.chmod(0o755)
    code, found = examine()
    assert code == 2
    assert found["cache"].startswith("cannot be used: ")
    assert "chmod 700" in found["cache"]
    assert found["kernels"].startswith("cannot be kept: ")


def test_a_folder_of_kernels_that_others_can_reach_stops_a_user(examine: Run, cache: Path, compiler: Compiler) -> None:
    (cache / "kernels").mkdir()
    (cache / "kernels").chmod(0o777)
    code, found = examine()
    assert code == 2
    assert "private" in found["cache"]
    assert "can be reached by other users" in found["kernels"]
    (cache / "kernels").rmdir()
    (cache / "kernels").touch()
    assert examine()[0] == 2


def test_a_kernel_that_computes_something_else_stops_a_user(examine: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    honest = RNN.forward

    def wrong(self: RNN, x: torch.Tensor) -> object:
        y, state = honest(self, x)
        return y * 1.01, state

    monkeypatch.setattr(RNN, "forward", wrong)
    code, found = examine()
    assert code == 2
    assert found["self-test"].startswith("failed: ")
    assert "disagree" in found["self-test"]


def test_the_self_test_leaves_random_numbers_alone(compiler: Compiler) -> None:
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    finding = doctor._check_layer()
    assert torch.equal(torch.rand(3), expected)
    assert (finding.name, finding.broken) == ("self-test", False)


# `make test` needs neither what the benchmarks compare with, nor another compiler, nor the loggers of others.
NOT_IN_DEV = {"compiler", "mlflow", "peers", "tensorboard", "wandb"}


@pytest.mark.parametrize(
    "module",
    [pytest.param(name, marks=[pytest.mark.slow] if extra in NOT_IN_DEV else []) for name, extra in EXTRA_OF.items()],
)
def test_a_package_that_can_be_imported_is_shown_with_its_version(module: str) -> None:
    importlib.import_module(module)
    package = module.partition(".")[0]
    assert doctor.extras()[EXTRA_OF[module]][doctor.PACKAGES.get(package, package)] is not None
