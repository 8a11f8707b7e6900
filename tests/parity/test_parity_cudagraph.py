"""Loops as recorded stretches of steps, by a stand-in for CUDA's graphs that records and replays on the CPU.

Shape legend: B sequences, T steps, F features of the input.
"""

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from parity_cells import drawn, layer
from parity_oracle import assert_close, assert_parity, errors_of, found

import stretto
from cell_settings import SETTINGS
from graph_recorder import TapeRecorder
from stretto.errors import StrettoError
from stretto.kernels.backends import cudagraph

QUICK = ("gru", "layer-norm-lstm", "attention", "clockwork", "recurrent-dropout")
DRAWN = ("zoneout", "zoneout-gru", "nested")
"""In training they draw at each step, in another order than their definition."""
RAGGED = [9, 1, 4, 0, 12, 12, 5]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> TapeRecorder:
    made = TapeRecorder()
    monkeypatch.setitem(cudagraph.RECORDERS, "cpu", made)
    return made


@pytest.fixture(params=[64, 4])
def steps(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> int:
    monkeypatch.setattr(cudagraph, "MAX_STEPS", request.param)
    return int(request.param)


@pytest.mark.parametrize("lengths", [None, RAGGED])
@pytest.mark.parametrize(
    "setting", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SETTINGS]
)
def test_every_cell_equals_the_definition(
    setting: str, lengths: list[int] | None, recorder: TapeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudagraph, "MAX_STEPS", 4)
    rnn = layer(setting, 5, training=True)
    batch = drawn(rnn, T=12, B=7, lengths=lengths, given=True)
    if setting in DRAWN:
        made = []
        for rnn.backend in ("eager", "cudagraph"):
            made.append(found(rnn, batch, seed=3))
        assert max(errors_of(*made).values()) < 1e-10
    else:
        assert_parity(rnn, batch, kernels=["cudagraph"])
    assert rnn.explain().backend == "cudagraph"
    assert 0 < recorder.recorded < recorder.replays


def test_shapes_are_recorded_once_and_weights_may_change(recorder: TapeRecorder, steps: int) -> None:
    rnn = layer("gru", 5)
    batch = drawn(rnn, T=12, B=7, lengths=RAGGED)
    assert_parity(rnn, batch, kernels=["cudagraph"])
    recorded = recorder.recorded
    with torch.no_grad():
        for parameter in rnn.parameters():
            parameter.mul_(0.5)
    assert_parity(rnn, batch, kernels=["cudagraph"])
    rnn.cells[0].weight_hh = torch.nn.Parameter(rnn.cells[0].weight_hh.detach() * 2)
    assert_parity(rnn, batch, kernels=["cudagraph"])
    assert recorder.recorded == recorded
    # Other lengths of as many rows at the same steps.
    assert_parity(rnn, drawn(rnn, T=12, B=7, lengths=[10, 2, 3, 0, 12, 11, 5]), kernels=["cudagraph"])
    assert recorder.recorded == recorded


def test_memory_is_bounded(recorder: TapeRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudagraph, "MAX_GRAPHS", 3)
    made: list[cudagraph.GraphKernel] = []
    build = cudagraph.GraphKernel.__init__

    def noted(self: cudagraph.GraphKernel, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(cudagraph.GraphKernel, "__init__", noted)
    rnn = layer("gru", 5)
    for B in (1, 2, 3, 4, 3, 2, 1):
        assert_parity(rnn, drawn(rnn, T=3, B=B), kernels=["cudagraph"])
    assert recorder.recorded > 3
    assert all(kernel.num_recorded == 3 for kernel in made)
    # Long rows get short stretches.
    monkeypatch.setattr(cudagraph, "MAX_BYTES", 1)
    before = recorder.replays
    assert_parity(rnn, drawn(rnn, T=3, B=4), kernels=["cudagraph"])
    assert recorder.replays == before + 2 * 3


def test_without_gradients_in_inference_mode_and_then_with(recorder: TapeRecorder) -> None:
    rnn = layer("lstm", 5, backend="cudagraph")
    batch = drawn(rnn, T=6, B=3, lengths=[6, 2, 3])
    with torch.inference_mode():
        first, _ = rnn(batch.x_BTF, lengths=batch.lengths)
    assert_close([first.clone()], [found(rnn, batch).values["y"]])
    assert_parity(rnn, batch, kernels=["cudagraph"])


def test_calls_may_be_nested_and_gone_back_through_later(recorder: TapeRecorder) -> None:
    """What a call made stays, though the next one replays the same graphs."""
    rnn, twin = layer("gru", 5, backend="cudagraph"), layer("gru", 5, backend="eager")
    x = torch.randn(3, 8, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()
    each = []
    for one in (rnn, twin):
        first, state = one(x)
        second, _ = one(2 * x, state)
        (slope,) = torch.autograd.grad(first.square().sum() + second.sum(), x, create_graph=True)
        each.append([first, second, slope, *torch.autograd.grad(slope.sum(), x)])
    assert_close(*each)


def failing(kind: str) -> Callable[..., Any]:
    def record(self: Any, work: Any) -> Any:
        if kind == "memory":
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")
        raise RuntimeError("CUDA error: operation not permitted when stream is capturing\nmore")

    return record


@pytest.mark.parametrize("kind", ["memory", "capture"])
@pytest.mark.parametrize("when", ["forward", "backward"])
def test_what_cannot_be_recorded_runs_as_it_is_and_says_so(
    kind: str, when: str, recorder: TapeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    rnn = layer("gru", 5, backend="cudagraph")
    batch = drawn(rnn, T=6, B=3, lengths=[6, 2, 3])
    if when == "backward":
        with torch.no_grad():
            rnn(batch.x_BTF, lengths=batch.lengths)
        y, _ = rnn(batch.x_BTF.requires_grad_(), lengths=batch.lengths)
    monkeypatch.setattr(TapeRecorder, "record", failing(kind))
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        if when == "backward":
            y.sum().backward()
        assert_parity(rnn, batch, kernels=["cudagraph"])
        assert_parity(rnn, batch, kernels=["cudagraph"])
    (only,) = (str(item.message) for item in warned)
    assert only.startswith("the loop runs operator by operator: no CUDA graph could be recorded")
    assert ("out of memory" if kind == "memory" else "not permitted") in rnn.explain().reason
    assert "more" not in rnn.explain().reason


def test_accelerated_layers(recorder: TapeRecorder) -> None:
    torch.manual_seed(0)
    layer_of_torch = torch.nn.LSTM(3, 4, 2, bidirectional=True, batch_first=True).double()
    x = torch.randn(2, 5, 3, dtype=torch.float64, requires_grad=True)
    made = []
    for which in ("torch", "cudagraph"):
        stretto.accelerate(layer_of_torch, backend=which)  # type: ignore[arg-type]
        y, states = layer_of_torch(x)
        made.append([y, *states, *torch.autograd.grad(y.square().sum(), [x, *layer_of_torch.parameters()])])
        assert [item.backend for item in stretto.explain(layer_of_torch).layers] == [which]
    assert_close(*made)
    assert recorder.replays > 0


def test_within_a_capture_of_the_user_s_the_operators_run_as_they_are(
    recorder: TapeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(TapeRecorder, "is_busy", lambda _: True)
    rnn = layer("gru", 5)
    assert_parity(rnn, drawn(rnn, T=6, B=3, lengths=[6, 2, 3]), kernels=["cudagraph"])
    assert recorder.recorded == 0


def test_on_a_cpu_it_is_refused_with_a_remedy() -> None:
    with pytest.raises(StrettoError, match=r"CUDA graphs run on a GPU, and this runs on cpu"):
        stretto.RNN(stretto.cells.GRU(3, 4), backend="cudagraph")(torch.randn(2, 3, 3))
