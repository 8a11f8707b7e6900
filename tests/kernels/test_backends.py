"""The registry of backends: which is used, why the others are not, and a custom backend."""

import platform
from collections.abc import Iterator
from typing import ClassVar, get_args

import pytest
import torch

import stretto
from stretto.errors import StrettoError
from stretto.graph import Body
from stretto.kernels import (
    MARCH_VARIABLE,
    AbstractBackend,
    AbstractKernel,
    Backend,
    Built,
    Cotangents,
    LoopCall,
    LoopGradients,
    LoopResult,
    Program,
    TracedProgram,
    TracedStep,
    all_backends,
    backend_names,
    build,
    find_compiler,
    register,
    unregister,
)
from stretto.kernels.backends.cpp.ops import OPS
from stretto.kernels.backends.eager import EagerKernel
from stretto.kernels.pointwise import COSTLY, POINTWISE


def _built(cell: stretto.Cell, backend: str = "auto", *, device: torch.device | None = None) -> Built:
    x_dtype = next(cell.parameters()).dtype
    return build(
        cell,
        x_shape=(3,),
        x_dtype=x_dtype,
        state=cell.initial_state(2),
        backend=backend,  # type: ignore[arg-type]
        device=device,
    )


class Recording(AbstractKernel):
    """The reference, with a count of its calls."""

    calls: ClassVar[list[str]] = []

    def forward(self, call: LoopCall, *, keep: bool) -> LoopResult:
        self.calls.append("forward")
        return EagerKernel(self.body).forward(call, keep=keep)

    def backward(self, call: LoopCall, result: LoopResult, cotangents: Cotangents) -> LoopGradients:
        self.calls.append("backward")
        return EagerKernel(self.body).backward(call, result, cotangents)


class Own(AbstractBackend):
    """A backend as a user writes it: for one state only."""

    name: ClassVar[str] = "own"
    description: ClassVar[str] = "the loops are counted"

    def supports(self, body: Body, device: torch.device) -> str | None:
        """Loops that carry one state."""
        return None if len(body.next_states) == 1 else f"{len(body.next_states)} states on {device}"

    def build(self, step: TracedStep) -> Program:
        """A kernel for each loop."""
        assert step.plan is not None
        return TracedProgram(step.plan, [[Recording(body) for body in level] for level in step.bodies])


@pytest.fixture
def own() -> Iterator[None]:
    register(Own(), before="cpp")
    Recording.calls.clear()
    yield
    unregister("own")


def test_the_literal_names_the_registry() -> None:
    assert get_args(Backend) == backend_names()


def test_every_operator_of_the_ir_has_a_cpp_expression() -> None:
    cell = stretto.cells.GRU(3, 4)
    assert _built(cell, "cpp").backend == "cpp"
    assert OPS.keys() >= COSTLY
    renamed = {"rsub", "sgn", "clamp", "clamp_min", "clamp_max", "hardtanh", "masked_fill"}
    of_bits = {op for op in POINTWISE if op.startswith(("logical_", "__")) or op.endswith("_shift")}
    assert POINTWISE.keys() - renamed - of_bits <= OPS.keys()


@pytest.mark.usefixtures("own")
def test_a_custom_backend_is_used_where_it_can_run() -> None:
    torch.manual_seed(0)
    rnn = stretto.RNN(stretto.cells.GRU(3, 4).double())
    x_BTF = torch.randn(2, 5, 3, dtype=torch.float64)
    y_BTH, _ = rnn(x_BTF)
    found = torch.autograd.grad(y_BTH.square().sum(), list(rnn.parameters()))
    assert Recording.calls == ["forward", "backward"]
    assert rnn.explain().backend == "own"
    reference = stretto.RNN(rnn.cells[0], backend="eager")
    wanted = torch.autograd.grad(reference(x_BTF)[0].square().sum(), list(reference.parameters()))
    assert all(torch.equal(one, other) for one, other in zip(found, wanted, strict=True))


@pytest.mark.usefixtures("own")
def test_a_backend_that_cannot_run_a_cell_says_why_and_the_next_is_used() -> None:
    built = _built(stretto.cells.LSTM(3, 4))
    assert built.backend == "cpp"
    assert built.choices[:2] == (("own", "2 states on cpu"), ("cpp", "used"))
    assert built.reason == "2 states on cpu"
    with pytest.raises(StrettoError, match="LSTM: 2 states on cpu"):
        _built(stretto.cells.LSTM(3, 4), "own")


@pytest.mark.usefixtures("own")
def test_names_are_unique_and_places_known() -> None:
    with pytest.raises(StrettoError, match="there is a backend 'own' already"):
        register(Own())
    unregister("own")
    with pytest.raises(StrettoError, match="there is no backend 'other'"):
        register(Own(), before="other")
    assert "own" not in backend_names()


@pytest.mark.usefixtures("own")
def test_layers_of_different_backends_run_together() -> None:
    torch.manual_seed(0)
    both = [stretto.cells.GRU(3, 4).double(), stretto.cells.GRU(3, 4).double()]
    rnn = stretto.RNN(both, bidirectional=True, backend="cpp")
    mixed = stretto.RNN(both, bidirectional=True, backend="cpp")
    x_BTF = torch.randn(2, 5, 3, dtype=torch.float64)
    wanted, _ = rnn(x_BTF)
    first, second = (_built(cell, name) for cell, name in zip(both, ("own", "cpp"), strict=True))
    mixed(x_BTF)
    for key, built in zip(list(mixed._built), (first, second), strict=True):
        mixed._built[key] = built
    torch.testing.assert_close(mixed(x_BTF)[0], wanted, rtol=1e-12, atol=1e-12)
    assert Recording.calls == ["forward"]


def test_an_unknown_backend_is_refused() -> None:
    with pytest.raises(StrettoError, match="backend='cuda' cannot be used"):
        _built(stretto.cells.GRU(3, 4), "cuda")


def test_the_cpp_backend_names_the_device_and_the_dtype_it_cannot_run() -> None:
    elsewhere = _built(stretto.cells.GRU(3, 4), device=torch.device("meta"))
    assert elsewhere.reason == "code is generated for the CPU, and this runs on meta"
    assert (elsewhere.backend, elsewhere.compile_seconds) == ("torch", 0.0)
    cell = stretto.cells.GRU(3, 4).half()
    narrow = build(cell, x_shape=(3,), x_dtype=torch.float16, state=cell.initial_state(1), needs_loops=True)
    assert narrow.reason.endswith("in the loop is of float16, which no code is generated for")


def test_the_reference_backends_run_everywhere() -> None:
    assert [backend.name for backend in all_backends() if not backend.generates_code] == ["eager", "torch"]
    assert all(backend.unavailable() is None for backend in all_backends() if not backend.generates_code)


@pytest.mark.skipif(platform.machine() != "x86_64", reason="names processors of another kind")
@pytest.mark.parametrize("march", ["x86-64-v2", "x86-64"])
def test_kernels_for_a_baseline_processor_equal_the_definition(march: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(MARCH_VARIABLE, raising=False)
    native = find_compiler()
    monkeypatch.setenv(MARCH_VARIABLE, march)
    assert f"-march={march}" in find_compiler().flags
    assert find_compiler().flags != native.flags
    torch.manual_seed(0)
    rnn = stretto.RNN(stretto.cells.LayerNormLSTM(3, 7).double(), num_layers=2, backend="cpp")
    reference = stretto.RNN(list(rnn.cells), 2, backend="torch")
    x_BTF = torch.randn(5, 6, 3, dtype=torch.float64)
    results = []
    for net in (rnn, reference):
        y_BTH, _ = net(x_BTF, lengths=[6, 2, 0, 5, 1])
        results.append([y_BTH, *torch.autograd.grad(y_BTH.square().sum(), list(net.parameters()))])
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-10, atol=1e-10)
