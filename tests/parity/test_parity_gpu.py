"""What `make test-gpu` runs: the device beside the definition. Where there is no GPU, the interpreter is the device.

Whoever has a GPU is the first to run these on one. Sizes are real there, and tiny under the interpreter.

Shape legend: B sequences, T steps, F features of the input.
"""

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import pytest
import torch
from parity_cells import drawn, layer
from parity_oracle import Batch, assert_close, assert_parity, errors_of, expected, found

import stretto
from cell_settings import SETTINGS
from stretto.state import flatten, map_state

HAS_GPU: Final = torch.cuda.is_available()
DEVICE: Final = torch.device("cuda" if HAS_GPU else "cpu")
SLOW: Final = () if HAS_GPU else (pytest.mark.slow,)
QUICK: Final = ("gru", "projected")
SIZES: Final = (16, 64, 100, 128, 256, 512) if HAS_GPU else (6,)
T, B = (50, 37) if HAS_GPU else (5, 3)
RAGGED: Final = [max(0, T - 2 * b) for b in range(B)]


@pytest.fixture(autouse=True)
def interpreter_for_want_of_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    pytest.importorskip("triton")
    if not HAS_GPU:
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    earlier = torch.get_float32_matmul_precision()
    yield
    torch.set_float32_matmul_precision(earlier)


def moved(batch: Batch) -> Batch:
    state = None if batch.state is None else map_state(lambda part: part.to(DEVICE), batch.state)
    return Batch(x_BTF=batch.x_BTF.to(DEVICE), lengths=batch.lengths, state=state)


def on_device(setting: str, H: int, *, dtype: torch.dtype = torch.float64, **options: Any) -> tuple[stretto.RNN, Batch]:
    rnn = layer(setting, H, dtype=dtype, **options)
    batch = drawn(rnn, T=T, B=B, lengths=RAGGED, given=True)
    return rnn.to(DEVICE), moved(batch)


def settings() -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else SLOW) for name in SETTINGS]


@pytest.mark.parametrize("setting", settings())
def test_every_cell(setting: str) -> None:
    rnn, batch = on_device(setting, 7)
    assert_parity(rnn, batch, kernels=["triton"])
    assert rnn.explain().backend == "triton"


@pytest.mark.parametrize("H", SIZES)
@pytest.mark.parametrize("setting", ["gru", pytest.param("layer-norm-lstm", marks=SLOW)])
def test_sizes_in_single_precision(setting: str, H: int) -> None:
    rnn, batch = on_device(setting, H, dtype=torch.float32)
    assert_parity(rnn, batch, kernels=["triton"])


@pytest.mark.parametrize("H", SIZES)
@pytest.mark.parametrize("kind", ["high", "medium", "bfloat16", pytest.param("float16", marks=SLOW)])
def test_operands_of_fewer_bits(kind: str, H: int) -> None:
    """Within what rounding of operands explains; sums and states stay in single precision."""
    narrow = {"bfloat16": torch.bfloat16, "float16": torch.float16}.get(kind)
    rnn, batch = on_device("gru", H, dtype=narrow or torch.float32, backend="triton")
    if narrow is None:
        torch.set_float32_matmul_precision(kind)
    errors = errors_of(found(rnn, batch), expected(rnn, batch))
    assert max(errors.values()) < 0.1


def test_it_is_taken_by_itself() -> None:
    """Or CUDA graphs, if they were measured to be faster on this GPU."""
    rnn, batch = on_device("gru", 7, backend="auto" if HAS_GPU else "triton")
    assert_parity(rnn, batch, kernels=["auto" if HAS_GPU else "triton"])
    explained = rnn.explain()
    assert explained.backend in ({"triton", "cudagraph"} if HAS_GPU else {"triton"})
    assert bool(explained.measured) == HAS_GPU


def test_stacks_resets_packed_batches_and_steps() -> None:
    torch.manual_seed(0)
    rnn = stretto.RNN(stretto.cells.GRU(3, 5), 2, True, backend="triton").double().to(DEVICE)
    twin = copy.deepcopy(rnn)
    twin.backend = "eager"
    x = torch.randn(B, T, 3, dtype=torch.float64).to(DEVICE).requires_grad_()
    resets = (torch.arange(B * T).reshape(B, T) % 4 == 2).to(DEVICE)
    lengths = torch.tensor([max(1, length) for length in RAGGED])
    each = []
    for one in (rnn, twin):
        y, states = one(x, lengths=RAGGED, resets=resets)
        again, _ = one(torch.nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        total = y.square().sum() + again.data.square().sum() + sum(state.sum() for state in states)
        each.append([y, again.data, *states, *torch.autograd.grad(total, [x, *one.parameters()])])
    assert_close(*each)
    single = stretto.RNN(stretto.cells.LSTM(3, 5).double().to(DEVICE), backend="triton")
    state, outputs = None, []
    for t in range(3):
        y_t, state = single.step(x[:, t], state)
        outputs.append(y_t)
    y, last = single(x[:, :3])
    assert_close([y, *flatten(last)], [torch.stack(outputs, 1), *flatten(state)])


def test_solvers_stored_states_and_second_derivatives() -> None:
    torch.manual_seed(0)
    cell = stretto.cells.GRU(3, 4).double().to(DEVICE)
    x = torch.randn(2, 12, 3, dtype=torch.float64).to(DEVICE).requires_grad_()
    each = []
    for which in ("triton", "eager"):
        exact = stretto.Shooting(num_chunks=3, tolerance=1e-13)
        solved, _ = stretto.RNN(cell, backend=which, solver=exact)(x)  # type: ignore[arg-type]
        y, _ = stretto.RNN(cell, backend=which, save="states")(x)  # type: ignore[arg-type]
        (first,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
        (second,) = torch.autograd.grad(first.square().sum(), x)
        each.append([solved, y, first, second])
    assert_close(*each)


def test_accelerated_layers_and_autocast() -> None:
    torch.manual_seed(0)
    net = torch.nn.GRU(3, 6, batch_first=True).to(DEVICE)
    x = torch.randn(B, T, 3).to(DEVICE)
    each = []
    for which in ("torch", "triton"):
        stretto.accelerate(net, backend=which)  # type: ignore[arg-type]
        each.append(net(x)[0].double())
    assert (each[0] - each[1]).abs().max() < 1e-3
    rnn = stretto.RNN(stretto.cells.GRU(3, 6).to(DEVICE), backend="triton")
    exact, _ = rnn(x)
    with torch.autocast(DEVICE.type, dtype=torch.bfloat16):
        rough, _ = rnn(x)
    assert (rough.double() - exact.double()).abs().max() < 0.1


def test_weights_go_from_one_device_to_the_other() -> None:
    rnn, batch = on_device("lstm", 6)
    y, _ = rnn(batch.x_BTF, lengths=batch.lengths)
    there = copy.deepcopy(rnn).to("cpu")
    there.load_state_dict(rnn.state_dict())
    there.backend = "eager"
    assert_close([there(batch.x_BTF.cpu(), lengths=batch.lengths)[0]], [y.cpu()])


@pytest.mark.skipif(not HAS_GPU, reason="a run needs the GPU itself")
def test_a_run_trains_on_the_gpu(tmp_path: Path) -> None:
    pytest.importorskip("rapidfuzz")
    stretto.train(task="handwriting", out=tmp_path / "run", epochs=1, device="cuda")
    assert stretto.load(tmp_path / "run") is not None
