"""Accelerated layers and models beside torch's own: all options, kinds of input and initial states; sharing, ranks.

`tests/compat` has what else is done to layers: dropout, frozen or computed weights, copies, hooks, transforms.

Shape legend: B sequences, T steps, F features, L layers times directions, H hidden units or projected ones.
"""

import copy
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence

import stretto

# Two directions of H are F wide, so that the layers above them share the programs of the first.
F, H, P = 8, 4, 2
B, T = 4, 6
TOLERANCE = 1e-10
KINDS: dict[str, Callable[..., nn.RNNBase]] = {
    "rnn-tanh": nn.RNN,
    "rnn-relu": lambda *sizes, **options: nn.RNN(*sizes, nonlinearity="relu", **options),
    "gru": nn.GRU,
    "lstm": nn.LSTM,
    "projected": lambda *sizes, **options: nn.LSTM(*sizes, proj_size=P, **options),
}
LENGTHS = {"sorted": [6, 4, 4, 1], "unsorted": [4, 1, 6, 4]}


def _assert_same(layer: nn.RNNBase, kind: str, *, given: bool) -> None:
    """The generated kernel alone does what torch does: outputs, final states and all gradients."""
    generator = torch.Generator().manual_seed(3)

    def drawn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, dtype=torch.float64, generator=generator).requires_grad_()

    count = layer.num_layers * (2 if layer.bidirectional else 1)
    rows = () if kind == "unbatched" else (B,)
    widths = [layer.proj_size or layer.hidden_size, *([layer.hidden_size] if layer.mode == "LSTM" else [])]
    states = [drawn(count, *rows, width) for width in widths] if given else []
    x = drawn(*((T, F) if kind == "unbatched" else (B, T, F) if layer.batch_first else (T, B, F)))
    batch: torch.Tensor | PackedSequence = x
    if kind in LENGTHS:
        lengths_B, is_sorted = torch.tensor(LENGTHS[kind]), kind == "sorted"
        batch = pack_padded_sequence(x, lengths_B, batch_first=layer.batch_first, enforce_sorted=is_sorted)

    def run(layer: nn.RNNBase) -> list[torch.Tensor]:
        y, after = layer(batch, None if not given else tuple(states) if layer.mode == "LSTM" else states[0])
        values = [y.data if isinstance(y, PackedSequence) else y, *(after if isinstance(after, tuple) else [after])]
        drawn_again = torch.Generator().manual_seed(5)
        weights = [torch.randn(value.shape, dtype=value.dtype, generator=drawn_again) for value in values]
        return [*values, *torch.autograd.grad(values, [x, *layer.parameters(), *states], weights, retain_graph=True)]

    ours = stretto.accelerate(copy.deepcopy(layer), backend="cpp")
    torch.testing.assert_close(run(ours), run(layer), rtol=0.0, atol=TOLERANCE)
    assert [item.backend for item in stretto.explain(ours).layers] == ["cpp"]


@pytest.fixture(autouse=True)
def same_weights() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("given", [False, True], ids=["", "state"])
@pytest.mark.parametrize("kind", ["batched", "unbatched", "sorted", "unsorted"])
@pytest.mark.parametrize("batch_first", [False, True], ids=["", "batch-first"])
@pytest.mark.parametrize("both_ways", [False, True], ids=["", "both-ways"])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("bias", [True, False], ids=["", "bare"])
@pytest.mark.parametrize("layer", KINDS)
@pytest.mark.slow
def test_any_options_and_input(  # noqa: PLR0917 - pytest names what it gives
    layer: str, bias: bool, num_layers: int, both_ways: bool, batch_first: bool, kind: str, given: bool
) -> None:
    dropout = 0.4 if num_layers > 1 else 0.0
    options = {"num_layers": num_layers, "bias": bias, "bidirectional": both_ways}
    theirs = KINDS[layer](F, H, batch_first=batch_first, dropout=dropout, **options).double()
    theirs.train(mode=not dropout)
    _assert_same(theirs, kind, given=given)


@pytest.mark.parametrize("pair", [("weight_ih_l0", "weight_ih_l0_reverse"), ("bias_ih_l0", "bias_hh_l0")])
@pytest.mark.parametrize("layer", KINDS)
def test_tied_parameters_stay_tied_and_gather_both_gradients(layer: str, pair: tuple[str, str]) -> None:
    theirs = KINDS[layer](F, H, bidirectional=True).double()
    one, other = pair
    setattr(theirs, other, getattr(theirs, one))
    _assert_same(theirs, "batched", given=False)
    stretto.accelerate(theirs, backend="cpp")
    assert getattr(theirs, one) is getattr(theirs, other)


class Outputs(nn.Module):
    """Outputs of a recurrent layer without its states, so that layers can be in a sequence."""

    def forward(self, both: tuple[torch.Tensor, Any]) -> torch.Tensor:
        return both[0]


class Nested(nn.Module):
    """Recurrent layers in a sequence, in a list, and one that is there twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.LSTM(F, H, bidirectional=True), Outputs())
        self.first = nn.Sequential(nn.Linear(F, F), self.inner)
        self.middle = nn.ModuleList([nn.GRU(F, H), nn.RNN(F, H)])
        self.shared = nn.GRU(F, F)
        self.again = self.shared

    def forward(self, x_TBF: torch.Tensor) -> torch.Tensor:
        x_TBF = self.first(x_TBF)
        x_TBF = torch.cat([layer(x_TBF)[0] for layer in self.middle], dim=-1)
        y_TBF: torch.Tensor = self.again(self.shared(x_TBF)[0])[0]
        return y_TBF


@pytest.fixture
def x_TBF() -> torch.Tensor:
    return torch.randn(T, B, F, dtype=torch.float64)


def _gradients(model: nn.Module, x_TBF: torch.Tensor) -> dict[str, torch.Tensor]:
    y_TBF = model(x_TBF)
    weights_TBF = torch.linspace(-1, 1, y_TBF.numel(), dtype=y_TBF.dtype).view_as(y_TBF)
    model.zero_grad()
    y_TBF.backward(weights_TBF)
    return {"y": y_TBF.detach(), **{name: p.grad for name, p in model.named_parameters() if p.grad is not None}}


def test_nested_models_change_in_place_and_keep_what_they_share(x_TBF: torch.Tensor) -> None:
    model = Nested().double()
    parameters, text = dict(model.named_parameters()), repr(model)
    wanted = _gradients(model, x_TBF)
    assert stretto.accelerate(model, backend="cpp") is model
    assert model.again is model.shared
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert repr(model) == text
    torch.testing.assert_close(_gradients(model, x_TBF), wanted, rtol=0.0, atol=TOLERANCE)
    assert {layer.backend for layer in stretto.explain(model).layers} == {"cpp"}
    assert stretto.restore(model) is model
    torch.testing.assert_close(_gradients(model, x_TBF), wanted, rtol=0.0, atol=0.0)
    assert {layer.reason for layer in stretto.explain(model).layers} == {"not accelerated"}


@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_copies_keep_the_choice(backend: Any, x_TBF: torch.Tensor) -> None:
    other = pickle.loads(pickle.dumps(stretto.accelerate(nn.GRU(F, H).double(), backend=backend)))
    other(x_TBF)
    assert stretto.explain(other).layers[0].backend == backend


@pytest.fixture
def one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_distributed_training_reduces_every_gradient(x_TBF: torch.Tensor) -> None:
    theirs = Nested().double()
    model = DistributedDataParallel(stretto.accelerate(copy.deepcopy(theirs), backend="cpp"))
    reduced: list[int] = []

    def doubled(_: Any, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        reduced.append(bucket.buffer().numel())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(2 * bucket.buffer())
        return future

    model.register_comm_hook(None, doubled)
    wanted = {name: tensor if name == "y" else 2 * tensor for name, tensor in _gradients(theirs, x_TBF).items()}
    found = {name.removeprefix("module."): tensor for name, tensor in _gradients(model, x_TBF).items()}
    torch.testing.assert_close(found, wanted, rtol=0.0, atol=TOLERANCE)
    assert sum(reduced) == sum(parameter.numel() for parameter in theirs.parameters())


@pytest.mark.parametrize("layer", [nn.RNN, nn.GRU, nn.LSTM])
def test_no_memory_is_taken_for_a_backward_pass_that_cannot_come(layer: type[nn.RNNBase]) -> None:
    model = stretto.accelerate(layer(8, 32), backend="cpp")
    x_TBF = torch.randn(50, 4, 8)

    def taken(mode: Any) -> int:
        with mode():
            model(x_TBF)  # whatever is done once
            with torch.profiler.profile(profile_memory=True) as found:
                model(x_TBF)
        return sum(max(event.self_cpu_memory_usage, 0) for event in found.key_averages())

    assert taken(torch.no_grad) == taken(torch.inference_mode) < taken(torch.enable_grad)
