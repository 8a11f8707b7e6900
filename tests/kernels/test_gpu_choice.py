"""What runs on a GPU, by stand-ins for one: which kernels, or which slower way and why. None is needed."""

import dataclasses
import re
import types
from collections.abc import Callable
from typing import Any, Final

import pytest
import torch

import stretto
from stretto.errors import StrettoError
from stretto.graph import Body
from stretto.kernels import Built, build
from stretto.kernels.backends.triton import backend, generate, interpreter, model, modes, targets
from stretto.kernels.backends.triton.backend import TritonBackend
from stretto.kernels.backends.triton.team import Team
from stretto.kernels.lower import Way

triton = pytest.importorskip("triton")
GPU = torch.device("cuda")
Facts = dict[str, Any]
H100: Facts = {"major": 9, "minor": 0, "shared_memory_per_block_optin": 227 << 10}


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Callable[[Facts], None]:
    """Says that there is a GPU; nothing runs on it."""

    def put(facts: Facts) -> None:
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: types.SimpleNamespace(**facts))
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (facts["major"], facts["minor"]))
        # What it would hold on the GPU.
        monkeypatch.setattr(backend, "TritonKernel", _Kernel)

    return put


class _Kernel:
    """As far as `explain` looks at it."""

    fallback = ""
    cost = None

    def __init__(self, body: Body, *, tiles: Any, **_: Any) -> None:
        self.body, self.tiles = body, tiles


def built(cell: stretto.Cell, *, dtype: torch.dtype = torch.float32, **options: Any) -> Built:
    return build(cell, x_shape=(4,), x_dtype=dtype, state=cell.initial_state(1), device=GPU, backend="auto", **options)


def test_small_cells_get_kernels_and_large_ones_cuda_graphs(gpu: Callable[[Facts], None]) -> None:
    gpu(H100)
    small = built(stretto.cells.GRU(4, 16))
    assert (small.backend, small.reason, small.fastest) == ("triton", "", "triton")
    large = built(stretto.cells.GRU(4, 2048))
    assert (large.backend, large.reason) == ("cudagraph", "")
    assert "a model says" in dict(large.choices)["triton"]
    assert "neither was measured" in dict(large.choices)["triton"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_cells_in_half_precision_get_kernels_too(gpu: Callable[[Facts], None], dtype: torch.dtype) -> None:
    """Whose weights are on the GPU, that is, not on the CPU."""
    gpu(H100)
    made = built(stretto.cells.GRU(4, 16).to(dtype).to("meta"), dtype=dtype)
    assert (made.backend, made.reason) == ("triton", "")


def test_few_rows_of_large_cells_are_shared_by_programs() -> None:
    """As many as there are columns for, and no more than can run at once."""
    (body,) = built_on_cpu(stretto.cells.GRU(4, 512))
    target = targets.TARGETS["sm_90"]
    team = Team(target, operands=torch.bfloat16, compiles=False)
    few, many = team.tiles(body, "forward", 9), team.tiles(body, "forward", 1000)
    assert few is not None
    assert (few.rows, few.shares * few.columns) == (16, 512)
    assert few.resident
    assert many is not None
    units = model.GPUS["sm_90"].units
    assert -(-1000 // many.rows) * many.shares <= units
    assert team.tiles(body, "forward", 64 * units) is None
    (small,) = built_on_cpu(stretto.cells.GRU(4, 32))
    assert Team(target, operands=torch.bfloat16, compiles=False).tiles(small, "forward", 16) is None


def test_no_more_programs_share_rows_than_the_gpu_has_multiprocessors(gpu: Callable[[Facts], None]) -> None:
    """Small GPUs of a generation are not the one that the model was made for; their shared memory is smaller too."""
    (body,) = built_on_cpu(stretto.cells.GRU(4, 512))
    shares: dict[int, int] = {}
    for units in (0, 114, 28):
        gpu({"major": 8, "minor": 6, "shared_memory_per_block_optin": 99 << 10, "multi_processor_count": units})
        target = targets.target_of(GPU)
        assert target.name == "sm_86"
        tiles = Team(target, operands=torch.float32, compiles=False).tiles(body, "forward", 64)
        assert tiles is not None
        products = generate.generate(body, "forward", tiles).products
        assert modes.streamed_bytes(products, tiles, 4) <= 99 << 10
        shares[units] = tiles.shares
    assert shares == {0: 32, 114: 32, 28: 16}


def test_a_measurement_tries_more_than_the_model_expects_to_pay() -> None:
    """But not what it rules out."""
    target = targets.TARGETS["sm_90"]
    (body,) = built_on_cpu(stretto.cells.GRU(4, 128))
    by_model, tried = (
        Team(target, operands=torch.bfloat16, compiles=False, slack=slack).tiles(body, "forward", 16)
        for slack in (1.0, model.SLACK)
    )
    assert by_model is None
    assert tried is not None
    assert tried.shares > 1
    (small,) = built_on_cpu(stretto.cells.GRU(4, 16))
    assert Team(target, operands=torch.bfloat16, compiles=False, slack=model.SLACK).tiles(small, "forward", 16) is None


def test_cooperative_kernels_that_cannot_be_launched_give_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """To those whose programs have rows of their own; it is said once, and in the explanation."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    shared = modes.Tiles(rows=2, elements=2, columns=2, depth=4, reduced=4, least=2, shares=2)
    monkeypatch.setattr(Team, "_find", lambda *_: shared)
    at_once = interpreter.at_once

    def too_large(shares: int) -> Any:
        if shares > 1:
            raise RuntimeError("Triton Error [CUDA]: too many blocks in cooperative launch")
        return at_once(shares)

    monkeypatch.setattr(interpreter, "at_once", too_large)
    rnn = stretto.RNN(stretto.cells.GRU(3, 5).double(), backend="triton")
    twin = stretto.RNN(rnn.cells[0], backend="eager")
    x = torch.randn(3, 4, 3, dtype=torch.float64)
    with pytest.warns(UserWarning, match=r"too many blocks in cooperative launch.*rows of its own") as warned:
        found = [rnn(x)[0] for _ in range(2)]
    torch.testing.assert_close(found, [twin(x)[0]] * 2)
    assert len(warned) == 1
    assert "too many blocks" in rnn.explain().reason
    assert rnn.explain().backend == "triton"


@pytest.mark.slow
@pytest.mark.parametrize("name", targets.TARGETS)
def test_a_cooperative_kernel_compiles_with_meetings(name: str) -> None:
    target = targets.TARGETS[name]
    (body,) = built_on_cpu(stretto.cells.GRU(4, 512))
    team = Team(target, operands=torch.bfloat16, compiles=True)
    for way in model.WAYS:
        tiles = team.tiles(body, way, 16)
        assert tiles is not None
        made = generate.generate(body, way, tiles)
        function = getattr(generate.load(generate.source_of([made]), interpreted=False), way)
        constants = targets.constants_of(tiles, real=torch.float32, operands=torch.bfloat16, keep=True, widen=False)
        options = targets.options_of(tiles, kind=target.kind)
        compiled = targets.compile_for(target, function, made, constants, options)
        assert compiled.metadata.launch_cooperative_grid
        if target.kind == "cuda":
            text = compiled.asm["ptx"]
            # An arrival publishes what the program wrote; who waits reads what the others did.
            assert re.search(r"red\.\S*gpu\.release\.add", text)
            assert re.search(r"ld\.\S*gpu\.acquire", text)
            # What other programs write is not read from the cache for what never changes.
            assert "ld.global.nc" not in text


def test_a_gpu_that_is_too_old(gpu: Callable[[Facts], None]) -> None:
    gpu({"major": 7, "minor": 5})
    made = built(stretto.cells.GRU(4, 16))
    assert made.backend == "cudagraph"
    assert made.reason == "Triton's kernels need a GPU of compute capability 8.0, and this one has 7.5"


def test_without_triton(gpu: Callable[[Facts], None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(H100)
    monkeypatch.setattr(TritonBackend, "unavailable", lambda _: "the package 'triton' is missing")
    made = built(stretto.cells.GRU(4, 16))
    assert (made.backend, made.reason) == ("cudagraph", "the package 'triton' is missing")


def test_a_triton_that_is_too_old(gpu: Callable[[Facts], None], monkeypatch: pytest.MonkeyPatch) -> None:
    gpu(H100)
    monkeypatch.delattr(triton, "knobs")
    made = built(stretto.cells.GRU(4, 16))
    assert made.backend == "cudagraph"
    assert made.reason.startswith("Triton 3.")
    assert made.reason.endswith("is too old: 3.5 is needed")


def test_an_interpreter_that_fails_is_named_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise TypeError("only 0-dimensional arrays can be converted to Python scalars")

    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(
        pytest.importorskip("triton.runtime.interpreter").InterpreterBuilder, "create_masked_load", fail
    )
    rnn = stretto.RNN(stretto.cells.GRU(3, 4), backend="triton")
    with pytest.raises(StrettoError, match=r"the interpreter of Triton 3\..* failed: .*0-dimensional.* Unset"):
        rnn(torch.randn(2, 3, 3))


def test_a_compiler_that_fails_is_named_with_its_version(
    gpu: Callable[[Facts], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("PassManager::run failed")

    gpu(H100)
    monkeypatch.setattr(modes, "compiled_usage", fail)
    made = built(stretto.cells.GRU(4, 16))
    assert made.backend == "cudagraph"
    assert made.reason.startswith("Triton 3.")
    assert made.reason.endswith("could not compile the loop for sm_90: PassManager::run failed")


def test_the_next_mode_is_taken_where_shared_memory_is_short(
    gpu: Callable[[Facts], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By what was compiled, whatever the estimate was; and none if none fits."""
    used: list[modes.Tiles] = []

    def usage(body: Body, way: str, tiles: modes.Tiles, **_: Any) -> targets.Usage:
        used.append(tiles)
        shared = 300 << 10 if tiles.stages != 2 else 10 << 10
        return targets.Usage(128, 0, shared, uses_tensor_cores=True, num_barriers=1)

    gpu(H100)
    monkeypatch.setattr(modes, "compiled_usage", usage)
    made = built(stretto.cells.GRU(4, 16))
    assert made.backend == "triton"
    (kernel,) = made.program.loops
    assert {tiles.stages for tiles in kernel.kernels["triton"].tiles.values()} == {2}  # type: ignore[attr-defined]
    assert used[0].resident
    gpu({**H100, "shared_memory_per_block_optin": 1 << 10})
    made = built(stretto.cells.GRU(4, 17))
    assert made.backend == "cudagraph"
    assert made.reason == "a program needs 300 KiB of shared memory, and sm_90 has 1"


@pytest.mark.parametrize("name", model.GPUS)
def test_the_model_knows_what_costs(name: str) -> None:
    """Not how much: more units, more rows and streamed weights never cost less."""
    gpu = model.GPUS[name]
    bodies = [built_on_cpu(stretto.cells.GRU(4, H)) for H in (32, 64, 256, 1024)]
    each = [model.predict_triton(item, gpu, rows=16, operands=torch.float32) for item in bodies]
    assert [item.low for item in each] == sorted(item.low for item in each)
    assert all(item.low < item.middle < item.high for item in each)
    many = model.predict_triton(bodies[0], gpu, rows=16 * 1000, operands=torch.float32)
    assert many.low > each[0].low
    assert model.predict_triton(bodies[2], gpu, rows=16, operands=torch.bfloat16).low < each[2].low
    graphs = [model.predict_graph(item, gpu, rows=16, operands=torch.float32).low for item in bodies]
    assert graphs == sorted(graphs)


def test_the_model_is_within_its_range_of_published_figures() -> None:
    """Four points of FlashRNN's, which its range was chosen after: a change of the model must not lose them."""
    for H, published in ((16, 1.92), (32, 1.41), (64, 1.94), (128, 3.15)):
        found = model.predict_triton(
            built_on_cpu(stretto.cells.LSTM(4, H)),
            model.GPUS["sm_90"],
            rows=16,
            operands=torch.bfloat16,
            backward=False,
        )
        assert found.low < published < 1.35 * found.high


def built_on_cpu(cell: stretto.Cell) -> list[Body]:
    state = cell.initial_state(1)
    return build(cell, x_shape=(4,), x_dtype=torch.float32, state=state, backend="eager").program.bodies


@pytest.mark.parametrize("name", targets.TARGETS)
def test_a_kernel_compiles_for_each_target_within_its_limits(name: str) -> None:
    """Of many in `docs/measurements/gpu-targets.md`; a small sample."""
    (body,) = built_on_cpu(stretto.cells.GRU(4, 64))
    for way in backend.WAYS:
        _, usage = modes.first_that_fits(body, way, operands=torch.bfloat16, target=targets.TARGETS[name])
        assert usage.spilled_bytes == 0
        assert usage.uses_tensor_cores
        assert usage.num_barriers >= 1
        assert not usage.exceeds(targets.TARGETS[name])


OPERATORS: Final = {
    "of numbers": (
        *("expm1", "log1p", "erf", "erfc", "tan", "asin", "acos", "atan", "sinh", "cosh", "asinh", "acosh", "atanh"),
        *("tanh", "trunc", "log10", "sqrt", "exp", "log", "sin", "cos", "exp2", "log2", "floor", "ceil", "abs", "sign"),
        *("round", "sigmoid", "reciprocal", "square", "rsqrt", "neg"),
    ),
    "of networks": (
        *("hardsigmoid", "leaky_relu", "silu", "gelu", "softplus", "elu", "hardswish", "relu6", "selu", "hardtanh"),
        *("mish", "celu", "logsigmoid", "softsign"),
    ),
    "of two": ("pow", "atan2", "hypot", "fmod", "remainder", "maximum", "minimum"),
    "of integers and rows": (),
}


class UsesAll(torch.nn.Module):
    """The sum of what some operators make of the same numbers."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.weight = torch.nn.Parameter(torch.randn(16, 16))

    def forward(self, x_t: torch.Tensor, h: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        a = 0.8 * torch.sigmoid(x_t + h) + 0.1
        given = (a, x_t.square() + 1.5) if self.kind == "of two" else (a,)
        home = torch.nn.functional if self.kind == "of networks" else torch
        total = a
        for name in OPERATORS[self.kind]:
            total = total + getattr(home, name)(*given)
        if not OPERATORS[self.kind]:
            i = (7 * a).to(torch.int64)
            total = total + (i % 3 + i // 2 - (i ^ 1) + torch.fmod(i, 2) + (i << 1) + ~i).to(a.dtype)
            total = total + a.amax(1, keepdim=True) + torch.softmax(a, 1) + a.argmax(1, keepdim=True)
            total = total + torch.nn.functional.embedding(i[:, 0], self.weight)
        h = total @ self.weight
        return h, h


@pytest.mark.slow
@pytest.mark.parametrize("target", ["sm_90", "gfx942"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("kind", OPERATORS)
def test_operators_are_in_the_device_libraries(kind: str, dtype: torch.dtype, target: str) -> None:
    """The interpreter has torch's functions in their place, and knows nothing of a name that is not there."""
    cell = UsesAll(kind).to(dtype)
    state = torch.zeros(1, 16, dtype=dtype)
    made = build(cell, x_shape=(16,), x_dtype=dtype, state=state, backend="eager")
    (body,) = made.program.bodies
    for way in backend.WAYS:
        _, usage = modes.first_that_fits(body, way, operands=dtype, target=targets.TARGETS[target])
        assert not usage.exceeds(targets.TARGETS[target])


@pytest.mark.slow
@pytest.mark.parametrize("way", backend.WAYS)
@pytest.mark.parametrize("target", ["sm_80", "gfx942"])
def test_no_step_is_read_ahead_of_the_one_before(target: str, way: Way) -> None:
    """Where all of a step's tiles are single, time is the innermost loop, which the compiler must not pipeline.

    It does not since there is a barrier in each step: asked for tiles under way, it makes the same of it.
    """
    (body,) = built_on_cpu(stretto.cells.Elman(4, 32))
    texts = set()
    for stages in (1, 3):
        tiles = dataclasses.replace(modes.STREAMED[0], stages=stages)
        made = generate.generate(body, way, tiles)
        function = getattr(generate.load(generate.source_of([made]), interpreted=False), way)
        constants = targets.constants_of(tiles, real=torch.float32, operands=torch.float32, keep=True, widen=False) | {
            "PRECISION": "tf32"
        }
        gpu = targets.TARGETS[target]
        compiled = targets.compile_for(gpu, function, made, constants, targets.options_of(tiles, kind=gpu.kind))
        assert made.num_barriers
        assert compiled.asm["ttgir"].count("scf.for") == 1
        texts.add(re.sub(r"loc\(.*?\)|#loc.*", "", compiled.asm["ttgir"]))
    assert len(texts) == 1
