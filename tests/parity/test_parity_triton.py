"""Generated Triton, interpreted on the CPU, beside the definition: never run on a GPU.

Shape legend: B sequences, T steps, F features of the input.
"""

import copy
import re
import subprocess
import sys
import types
import warnings
from typing import Any, Final

import pytest
import torch
from parity_cells import drawn, layer
from parity_oracle import assert_close, assert_parity, errors_of, expected, found

import stretto
from cell_settings import SETTINGS
from stretto.errors import StrettoError
from stretto.kernels.backends.triton import backend, kernel, targets
from stretto.kernels.backends.triton.emit import Tiles
from stretto.nn import torch_layers

pytestmark = pytest.mark.usefixtures("interpreter")

TILES: Final = {
    "ordinary": None,
    "tiny": Tiles(rows=2, elements=4, columns=4, depth=4, reduced=4, least=2),
    "resident": Tiles(rows=2, elements=64, columns=64, depth=64, least=4, resident=True),
    "cooperative": Tiles(rows=2, elements=2, columns=2, depth=4, reduced=4, least=2, shares=2),
    "cooperative, held": Tiles(rows=4, elements=4, columns=4, depth=64, least=4, resident=True, shares=2),
}
"""Tiny ones so that small cells have several tiles, and small batches several programs."""
QUICK: Final = {
    *(("gru", "ordinary"), ("layer-norm-lstm", "tiny"), ("attention", "tiny"), ("lstm", "resident")),
    *(("layer-norm-gru", "cooperative"), ("gru", "cooperative, held")),
}
RAGGED: Final = [6, 1, 4, 0]
DRAW_IN_THE_LOOP: Final = {"zoneout", "zoneout-gru", "nested"}
"""In training they draw for all steps at once, as all backends do; the definition draws step by step."""


def use(patch: pytest.MonkeyPatch, tiles: Tiles | None) -> None:
    if tiles is not None:
        patch.setattr(backend, "choose_tiles", lambda *_: tiles)


def cases() -> list[Any]:
    each = [(setting, name) for setting in SETTINGS for name in TILES]
    return [pytest.param(*case, marks=() if case in QUICK else pytest.mark.slow) for case in each]


@pytest.mark.parametrize(("setting", "name"), cases())
def test_every_cell_equals_the_definition(setting: str, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, TILES[name])
    rnn = layer(setting, 5, training=setting not in DRAW_IN_THE_LOOP)
    batch = drawn(rnn, T=6, B=4, lengths=RAGGED, given=True)
    assert_parity(rnn, batch, kernels=["triton"])
    assert rnn.explain().backend == "triton"
    if setting in DRAW_IN_THE_LOOP:
        compiled = found(rnn.train(), batch, seed=3)
        rnn.backend = "eager"
        errors = errors_of(compiled, found(rnn, batch, seed=3))
        assert max(errors.values()) < 1e-10, errors


@pytest.mark.parametrize("setting", ["gru", "peephole"])
def test_single_precision(setting: str) -> None:
    rnn = layer(setting, 5, dtype=torch.float32)
    assert_parity(rnn, drawn(rnn, T=6, B=4, lengths=RAGGED), kernels=["triton"])


@pytest.mark.parametrize("kind", ["medium", "bfloat16"])
def test_products_take_operands_of_sixteen_bits(kind: str) -> None:
    """As torch is set to, or as the cell is: sums and states stay in single precision."""
    earlier = torch.get_float32_matmul_precision()
    rnn = layer("gru", 5, dtype=torch.bfloat16 if kind == "bfloat16" else torch.float32, backend="triton")
    batch = drawn(rnn, T=6, B=4, lengths=RAGGED)
    try:
        torch.set_float32_matmul_precision("medium" if kind == "medium" else "highest")
        errors = errors_of(found(rnn, batch), expected(rnn, batch))
    finally:
        torch.set_float32_matmul_precision(earlier)
    assert 1e-4 < max(errors.values()) < 0.05


@pytest.mark.skipif(not hasattr(torch.backends, "fp32_precision"), reason="torch has only the older switch")
@pytest.mark.parametrize("newer", ["tf32", "ieee"])
@pytest.mark.parametrize("older", ["highest", "high"])
def test_both_of_torch_s_switches_of_precision_may_be_used(older: str, newer: str) -> None:
    """The newer one counts, as in torch's own products, and makes the older one unreadable."""
    earlier = torch.get_float32_matmul_precision()
    rnn = layer("gru", 5, dtype=torch.float32)
    batch = drawn(rnn, T=6, B=4, lengths=RAGGED)
    try:
        torch.set_float32_matmul_precision(older)
        torch.backends.cuda.matmul.fp32_precision = newer  # type: ignore[attr-defined]
        assert targets.float32_precision() == {"tf32": "high", "ieee": "highest"}[newer]
        assert_parity(rnn, batch, kernels=["triton"])
    finally:
        torch.set_float32_matmul_precision(earlier)
    assert targets.float32_precision() == earlier


def test_stacks_of_both_directions_with_resets() -> None:
    torch.manual_seed(0)
    rnn = stretto.RNN(stretto.cells.GRU(3, 5), 2, True, backend="triton").double()
    twin = stretto.RNN(list(rnn.cells), 2, True, backend="eager")
    x = torch.randn(3, 5, 3, dtype=torch.float64, requires_grad=True)
    made = []
    for one in (rnn, twin):
        y, states = one(x, lengths=[5, 2, 3], resets=torch.arange(15).reshape(3, 5) % 4 == 2)
        total = sum(state.sum() for state in states) + y.square().sum()
        made.append([y, *states, *torch.autograd.grad(total, [x, *rnn.parameters()])])
    assert_close(*made)


class LooksUp(torch.nn.Module):
    """A counter in the state finds a row of a table; the output has a maximum, and where it is."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(6, 4, dtype=torch.float64))

    def forward(self, x_t: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]) -> Any:
        count, h = state
        h = torch.tanh(x_t + torch.nn.functional.embedding(count, self.table))
        return h.amax(1) + h.argmax(1) + (count // 2), (count + 1, h)


def test_integers_look_ups_and_not_a_number() -> None:
    torch.manual_seed(0)
    cell, x = LooksUp(), torch.randn(2, 5, 4, dtype=torch.float64)
    x[0, 3, 2] = float("nan")
    zeros = torch.zeros(2, 4, dtype=torch.float64)
    each = {}
    for which in ("triton", "torch"):
        rnn = stretto.RNN(cell, state=(torch.zeros((), dtype=torch.int64), zeros[0]), backend=which)  # type: ignore[arg-type]
        each[which] = rnn(x, (torch.zeros(2, dtype=torch.int64), zeros))[0]
        with pytest.raises(IndexError, match="out of range"):
            rnn(x, (torch.full((2,), 3), zeros))
    assert each["torch"].isnan().sum() == 1
    torch.testing.assert_close(each["triton"], each["torch"], equal_nan=True)


def test_second_derivatives_stored_states_and_no_gradients() -> None:
    torch.manual_seed(0)
    cell = stretto.cells.LSTM(3, 4).double()
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    made = []
    for which in ("triton", "eager"):
        y, _ = stretto.RNN(cell, backend=which, save="states")(x)  # type: ignore[arg-type]
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        with torch.no_grad():
            again, _ = stretto.RNN(cell, backend=which)(x, lengths=[5, 0])  # type: ignore[arg-type]
        made.append([y, first, second, again])
    assert_close(*made)


def test_accelerated_layers() -> None:
    torch.manual_seed(0)
    layer_of_torch = torch.nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True).double()
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    made = []
    for which in ("torch", "triton"):
        stretto.accelerate(layer_of_torch, backend=which)  # type: ignore[arg-type]
        y, states = layer_of_torch(x)
        made.append([y, *states, *torch.autograd.grad(y.square().sum(), [x, *layer_of_torch.parameters()])])
        assert [item.backend for item in stretto.explain(layer_of_torch).layers] == [which]
    assert_close(*made)


def test_on_a_cpu_it_is_refused_with_a_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TRITON_INTERPRET")
    x = torch.randn(2, 3, 3)
    with pytest.raises(StrettoError, match=r"on the CPU; TRITON_INTERPRET=1 .* backend='auto'"):
        stretto.RNN(stretto.cells.GRU(3, 4), backend="triton")(x)
    rnn = stretto.RNN(stretto.cells.GRU(3, 4))
    rnn(x)
    assert rnn.explain().backend == "cpp"


def test_an_interpreted_kernel_is_never_a_choice_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/there/is/none")
    cell = stretto.cells.GRU(3, 4)
    rnn = stretto.RNN(cell)
    with pytest.warns(UserWarning, match="not by 'cpp'"):
        rnn(torch.randn(2, 3, 3))
    assert rnn.explain().backend == "torch"


@pytest.mark.parametrize("way", ["forward", "backward"])
def test_a_launch_that_fails_is_told_and_something_slower_runs(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Too much shared memory, say, or a driver that refuses: never a crash, never a wrong number."""
    rnn = layer("gru", 5, training=True)
    batch = drawn(rnn, T=6, B=4, lengths=RAGGED, given=True)

    class Refused:
        def __getitem__(self, _: object) -> Any:
            raise RuntimeError("out of resource: shared memory\nmore")

    load = kernel.load

    def loaded(*args: Any, **named: Any) -> Any:
        return types.SimpleNamespace(**{**vars(load(*args, **named)), way: Refused()})

    monkeypatch.setattr(kernel, "load", loaded)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert_parity(rnn, batch, kernels=["triton"])
        assert_parity(rnn, batch, kernels=["triton"])
    (told,) = (str(item.message) for item in warned)
    assert re.match(r"the loop runs without generated code: Triton 3.* \(RuntimeError: out of resource.*y\)$", told)
    assert rnn.explain().reason in told


def test_triton_is_imported_when_it_is_needed() -> None:
    code = "import stretto, sys; print('triton' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.fixture
def as_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU counts as a GPU, on which "auto" builds interpreted kernels."""
    built = torch_layers._layer_program

    def on_gpu(*args: Any, **options: Any) -> Any:
        return built(*args, **options | {"backend": "triton"})

    monkeypatch.setattr(torch_layers, "_is_gpu", lambda _: True)
    monkeypatch.setattr(torch_layers, "_layer_program", on_gpu)


@pytest.mark.parametrize(("speedup", "backend"), [(2.0, "triton"), (0.9, "torch")])
def test_accelerated_layers_on_a_gpu_run_by_what_was_measured_to_be_faster(
    speedup: float, backend: str, as_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds: list[Any] = []

    def expected(kind: Any, **_: Any) -> float:
        kinds.append(kind)
        return speedup

    monkeypatch.setattr(torch_layers, "expected_speedup", expected)
    torch.manual_seed(0)
    plain = torch.nn.GRU(3, 4, batch_first=True).double()
    fast = stretto.accelerate(copy.deepcopy(plain))
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    made = []
    for one in (plain, fast):
        y, state = one(x)
        made.append([y, state, *torch.autograd.grad(y.square().sum(), [x, *one.parameters()])])
    assert_close(*made)
    (explained,) = stretto.explain(fast).layers
    assert explained.backend == backend
    assert kinds[0].device == x.device
    assert kinds[0].training


@pytest.mark.parametrize(
    ("mode", "options"),
    [
        ("GRU", {"num_layers": 2, "bidirectional": True}),
        pytest.param("LSTM", {"proj_size": 2}, marks=pytest.mark.slow),
        pytest.param("RNN", {}, marks=pytest.mark.slow),
    ],
)
def test_accelerated_layers_in_bfloat16(mode: str, options: dict[str, Any]) -> None:
    """As close to what their weights compute in full precision as torch's own, in torch's dtypes."""
    torch.manual_seed(0)
    wide = getattr(torch.nn, mode)(3, 6, batch_first=True, **options).bfloat16().float()
    low = copy.deepcopy(wide).bfloat16()
    x = torch.randn(4, 7, 3).bfloat16()
    results, kinds = [], []
    for net, which in ((wide, "torch"), (low, "torch"), (low, "triton")):
        stretto.accelerate(net, backend=which)  # type: ignore[arg-type]
        given = x.to(net.weight_ih_l0.dtype).requires_grad_()
        y, states = net(given)
        each = states if isinstance(states, tuple) else (states,)
        total = y.float().square().sum() + sum(state.float().sum() for state in each)
        made = [y, *each, *torch.autograd.grad(total, [given, *net.parameters()])]
        results.append([tensor.detach().double() for tensor in made])
        kinds.append([tensor.dtype for tensor in made])
        assert {item.backend for item in stretto.explain(net).layers} == {which}
    assert kinds[1] == kinds[2] == [torch.bfloat16] * len(kinds[1])
    truth, *found_in_16_bits = results
    for found_tensors in found_in_16_bits:
        errors = [
            float((one - other).abs().max() / max(1.0, float(one.abs().max())))
            for one, other in zip(truth, found_tensors, strict=True)
        ]
        assert max(errors) < 0.05
        assert max(errors) > 1e-4


@pytest.mark.parametrize(("dtype", "backend"), [(torch.bfloat16, "triton"), (torch.float16, "torch")], ids=str)
def test_layers_in_bfloat16_are_measured_and_those_in_float16_are_left_to_torch(
    dtype: torch.dtype, backend: str, as_a_gpu: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where cuDNN has kernels that stay on the GPU for all steps."""
    kinds: list[Any] = []
    monkeypatch.setattr(torch_layers, "expected_speedup", lambda kind, **_: kinds.append(kind) or 2.0)
    layer_of_torch = stretto.accelerate(torch.nn.GRU(3, 4).to(dtype))
    y, _ = layer_of_torch(torch.randn(5, 2, 3).to(dtype))
    (explained,) = stretto.explain(layer_of_torch).layers
    assert (explained.backend, y.dtype) == (backend, dtype)
    assert {kind.dtype for kind in kinds} == ({dtype} if backend == "triton" else set())
    assert explained.reason == ("" if backend == "triton" else "the input is torch.float16")


def test_under_autocast_of_a_gpu_layers_are_left_to_torch(as_a_gpu: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda device="cuda": device == "cuda")
    layer_of_torch = stretto.accelerate(torch.nn.GRU(3, 4), measure=False)
    layer_of_torch(torch.randn(5, 2, 3))
    (explained,) = stretto.explain(layer_of_torch).layers
    assert explained.backend == "torch"
    assert "autocast is on, under which cuDNN" in explained.reason
