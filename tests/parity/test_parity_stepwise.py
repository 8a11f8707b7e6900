"""Generated kernels around PyTorch's products, in recorded stretches of steps: interpreted, never run on a GPU."""

import warnings
from typing import Any, Final

import pytest
import torch
from parity_cells import drawn, layer
from parity_oracle import assert_parity, errors_of, found
from race_detector import RaceError, watched

import stretto
from cell_settings import SETTINGS
from graph_recorder import TapeRecorder
from stretto.errors import StrettoError
from stretto.kernels.backends import cudagraph
from stretto.kernels.backends.triton import stepwise
from stretto.kernels.backends.triton.emit import Tiles
from stretto.kernels.backends.triton.stepwise import StepwiseKernel
from stretto.kernels.hazards import Hazards

pytestmark = pytest.mark.usefixtures("interpreter")

TINY: Final = Tiles(rows=2, elements=4, columns=4, depth=4, reduced=4, least=2, shares=2)
QUICK: Final = ("gru", "layer-norm-lstm", "clockwork")
DRAW_IN_THE_LOOP: Final = {"zoneout", "zoneout-gru", "nested"}
RAGGED: Final = [6, 1, 4, 0]


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> TapeRecorder:
    made = TapeRecorder()
    monkeypatch.setitem(cudagraph.RECORDERS, "cpu", made)
    monkeypatch.setattr(cudagraph, "MAX_STEPS", 4)
    return made


def use(patch: pytest.MonkeyPatch, tiles: Tiles) -> list[StepwiseKernel]:
    """Kernels with such tiles; those that are made."""
    made: list[StepwiseKernel] = []
    build = StepwiseKernel.__init__

    def noted(self: StepwiseKernel, *args: Any, **options: Any) -> None:
        build(self, *args, **options, tiles=tiles)
        made.append(self)

    patch.setattr(StepwiseKernel, "__init__", noted)
    return made


@pytest.mark.parametrize(
    "setting", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow) for name in SETTINGS]
)
def test_every_cell_equals_the_definition(
    setting: str, recorder: TapeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cudagraph, "MAX_STEPS", 1)
    kernels = use(monkeypatch, TINY)
    rnn = layer(setting, 5, training=setting not in DRAW_IN_THE_LOOP)
    batch = drawn(rnn, T=6, B=4, lengths=RAGGED, given=True)
    assert_parity(rnn, batch, kernels=["cudagraph"])
    assert kernels
    assert 0 < recorder.recorded < recorder.replays
    assert all(min(kernel.passes) > 0 for kernel in kernels)


def test_a_step_of_a_gru_takes_five_launches(recorder: TapeRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Forward a product and a kernel, backward a kernel, a product and what the next step needs."""
    kernels = use(monkeypatch, TINY)
    rnn = layer("gru", 5, backend="cudagraph")
    rnn(drawn(rnn, T=2, B=2).x_BTF)
    (kernel,) = kernels
    assert kernel.pieces["forward"].num_launches + kernel.pieces["backward"].num_launches <= 5


def test_weights_may_change_and_shapes_are_recorded_once(recorder: TapeRecorder) -> None:
    rnn = layer("lstm", 5)
    batch = drawn(rnn, T=6, B=4, lengths=RAGGED)
    assert_parity(rnn, batch, kernels=["cudagraph"])
    recorded = recorder.recorded
    with torch.no_grad():
        for parameter in rnn.parameters():
            parameter.mul_(0.5)
    assert_parity(rnn, batch, kernels=["cudagraph"])
    assert recorder.recorded == recorded


def test_nothing_is_kept_for_a_backward_pass_that_will_not_come(recorder: TapeRecorder) -> None:
    rnn = layer("gru", 5, backend="cudagraph")
    batch = drawn(rnn, T=6, B=4, lengths=RAGGED)
    wanted, _ = rnn(batch.x_BTF, lengths=batch.lengths)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        y, _ = rnn(batch.x_BTF, lengths=batch.lengths)
    assert torch.equal(y, wanted)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_other_precisions(dtype: torch.dtype, recorder: TapeRecorder) -> None:
    rnn = layer("gru", 5, dtype=dtype, backend="cudagraph")
    batch = drawn(rnn, T=6, B=4, lengths=RAGGED)
    generated = found(rnn, batch)
    rnn.backend = "eager"
    assert max(errors_of(generated, found(rnn, batch)).values()) < (1e-5 if dtype is torch.float32 else 0.05)


def test_a_step_that_may_find_an_error_runs_by_operators(recorder: TapeRecorder) -> None:
    """Nobody could wait for it within a graph."""
    table = torch.nn.Parameter(torch.randn(6, 4, dtype=torch.float64))

    class LooksUp(torch.nn.Module):
        def forward(self, x_t: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]) -> Any:
            count, h = state
            return h, (count + 1, torch.tanh(x_t + table[count % 6]))

    x = torch.randn(2, 5, 4, dtype=torch.float64)
    start = (torch.zeros(2, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.float64))
    made = []
    for backend in ("cudagraph", "torch"):
        rnn = stretto.RNN(LooksUp(), state=(torch.zeros((), dtype=torch.int64), start[1][0]), backend=backend)  # type: ignore[arg-type]
        made.append(rnn(x, start)[0])
    torch.testing.assert_close(*made)


def test_kernels_that_cannot_be_launched_give_way_to_operators(
    recorder: TapeRecorder, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise ValueError("no such instruction")

    monkeypatch.setattr(stepwise, "load", lambda *_, **__: type("Module", (), {"__getattr__": lambda *_: fail()})())
    rnn = layer("gru", 5)
    batch = drawn(rnn, T=6, B=3)
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert_parity(rnn, batch, kernels=["cudagraph"])
        assert_parity(rnn, batch, kernels=["cudagraph"])
    (only,) = (str(item.message) for item in warned)
    assert only.startswith("CUDA graphs run without generated kernels: Triton 3.")
    assert "no such instruction" in only
    assert rnn.explain().reason == only


def test_no_kernel_has_a_race(recorder: TapeRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    use(monkeypatch, TINY)
    rnn = layer("layer-norm-gru", 5, backend="cudagraph")
    with watched() as watch:
        found(rnn, drawn(rnn, T=2, B=3))
    assert watch.accesses > 50


def test_pieces_that_are_not_cut_apart_are_seen(recorder: TapeRecorder, monkeypatch: pytest.MonkeyPatch) -> None:
    """Programs would read what others make in the same launch."""
    use(monkeypatch, TINY)
    monkeypatch.setattr(Hazards, "must_wait", lambda *_: False)
    rnn = layer("layer-norm-gru", 5, backend="cudagraph")
    with watched(), pytest.raises((StrettoError, RaceError), match=r"reads what|writes what|since its last barrier"):
        found(rnn, drawn(rnn, T=2, B=3))
