"""Accelerated models are the models they were: names, copies, files, processes, and the choice of a backend.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

import copy
import pickle
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

import stretto

F, H = 8, 4
B, T = 3, 5


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


class Doubled(nn.LSTM):
    """A layer with code of its own."""

    def forward(self, input: Any, hx: Any = None) -> Any:  # noqa: A002 - torch's name
        y, state = super().forward(input, hx)
        return 2 * y, state


@pytest.fixture(autouse=True)
def same_weights() -> None:
    torch.manual_seed(0)


@pytest.fixture
def x_TBF() -> torch.Tensor:
    return torch.randn(T, B, F, dtype=torch.float64)


def _accelerated(model: nn.Module) -> nn.Module:
    return stretto.accelerate(copy.deepcopy(model), backend="cpp")


def _gradients(model: nn.Module, x_TBF: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    answer = model(x_TBF)
    y_TBF = answer[0] if isinstance(answer, tuple) else answer
    (y_TBF * torch.linspace(-1, 1, y_TBF.numel(), dtype=y_TBF.dtype).reshape(y_TBF.shape)).sum().backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    return {"y": y_TBF.detach(), **{name: gradient.clone() for name, gradient in found.items() if gradient is not None}}


def _assert_close(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert (found[name] - tensor).abs().max() <= 1e-10, name


def _assert_identical(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        assert torch.equal(found[name], tensor), name


def _pickled(model: nn.Module) -> nn.Module:
    again: nn.Module = pickle.loads(pickle.dumps(model))
    return again


def test_nested_models_change_in_place_and_keep_what_they_share(x_TBF: torch.Tensor) -> None:
    model = Nested().double()
    parameters, text = dict(model.named_parameters()), repr(model)
    kinds = [type(layer) for layer in (model.inner[0], *model.middle, model.shared)]
    wanted = _gradients(model, x_TBF)
    assert stretto.accelerate(model, backend="cpp") is model
    assert model.again is model.shared
    layers = [model.inner[0], *model.middle, model.shared]
    assert [type(layer) for layer in layers] == kinds
    assert all(parameter is parameters[name] for name, parameter in model.named_parameters())
    assert repr(model) == text
    _assert_close(_gradients(model, x_TBF), wanted)
    assert {layer.backend for layer in stretto.explain(model).layers} == {"cpp"}
    assert stretto.restore(model) is model
    _assert_identical(_gradients(model, x_TBF), wanted)
    assert {layer.reason for layer in stretto.explain(model).layers} == {"not accelerated"}


def test_a_model_without_recurrent_layers_stays_as_it_is(x_TBF: torch.Tensor) -> None:
    model = nn.Sequential(nn.Linear(F, F), nn.Tanh(), nn.LSTMCell(F, H)).double()
    before = {name: type(module) for name, module in model.named_modules()}
    wanted = model(x_TBF[0])
    assert stretto.accelerate(model, backend="cpp") is model
    assert {name: type(module) for name, module in model.named_modules()} == before
    for one, other in zip(model(x_TBF[0]), wanted, strict=True):
        assert torch.equal(one, other)


def test_layers_with_code_of_their_own_are_accelerated_below_it(x_TBF: torch.Tensor) -> None:
    layer = Doubled(F, H).double()
    wanted = _gradients(layer, x_TBF)
    assert type(stretto.accelerate(layer, backend="cpp")) is Doubled
    _assert_close(_gradients(layer, x_TBF), wanted)
    assert stretto.explain(layer).layers[0].backend == "cpp"


def test_parameters_tied_across_layers_gather_all_gradients(x_TBF: torch.Tensor) -> None:
    model = nn.Sequential(nn.GRU(F, F), Outputs(), nn.GRU(F, F), Outputs()).double()
    model[2].weight_hh_l0 = model[0].weight_hh_l0
    ours = _accelerated(model)
    _assert_close(_gradients(ours, x_TBF), _gradients(model, x_TBF))
    assert ours[2].weight_hh_l0 is ours[0].weight_hh_l0  # type: ignore[index]


@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_copies_keep_the_choice(backend: Any, x_TBF: torch.Tensor) -> None:
    other = _pickled(stretto.accelerate(nn.GRU(F, H).double(), backend=backend))
    other(x_TBF)
    assert stretto.explain(other).layers[0].backend == backend


def test_training_takes_the_same_way(x_TBF: torch.Tensor) -> None:
    theirs = Nested().double()
    ours = _accelerated(theirs)
    for model in (theirs, ours):
        optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
        for _ in range(5):
            optimizer.zero_grad()
            model(x_TBF).square().sum().backward()
            optimizer.step()
    _assert_close(dict(ours.named_parameters()), dict(theirs.named_parameters()))


@pytest.fixture
def one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    distributed.init_process_group("gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


@pytest.mark.usefixtures("one_process")
def test_distributed_training_reduces_every_gradient(x_TBF: torch.Tensor) -> None:
    theirs = Nested().double()
    model = DistributedDataParallel(_accelerated(theirs))
    reduced: list[int] = []

    def doubled(_: Any, bucket: distributed.GradBucket) -> torch.futures.Future[torch.Tensor]:  # type: ignore[name-defined]
        reduced.append(bucket.buffer().numel())
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(2 * bucket.buffer())
        return future

    model.register_comm_hook(None, doubled)
    wanted = {name: tensor if name == "y" else 2 * tensor for name, tensor in _gradients(theirs, x_TBF).items()}
    found = {name.removeprefix("module."): tensor for name, tensor in _gradients(model, x_TBF).items()}
    _assert_close(found, wanted)
    assert sum(reduced) == sum(parameter.numel() for parameter in theirs.parameters())
