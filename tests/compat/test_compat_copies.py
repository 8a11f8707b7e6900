"""What a layer is and where it goes: class, copies, files, threads, processes, machines without a compiler, and back.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

import copy
import inspect
import io
import multiprocessing
import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from compat_cases import (
    BACKENDS,
    KINDS,
    B,
    Behaviour,
    Behaviours,
    F,
    T,
    Use,
    assert_same,
    batch,
    learn,
    loss_of,
    update,
)
from torch import nn
from torch.nn.utils import parameters_to_vector, parametrizations, prune
from torch.nn.utils.rnn import pack_padded_sequence
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, Dataset

import stretto

CASES = Behaviours()
pytestmark = pytest.mark.usefixtures("quick_compiler")


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize("case", CASES.params)
def test_copies(case: Behaviour, backend: str) -> None:
    case.check(backend)


# What it is


class Scaled(nn.LSTM):
    """A subclass with a forward of its own around torch's."""

    def forward(self, x: torch.Tensor, hx: Any = None) -> Any:  # type: ignore[override]
        y, after = super().forward(x * 2, hx)
        return y + 1, after


class Silent(nn.GRU):
    """A subclass that adds nothing."""


class Named(nn.GRU):
    """A subclass that calls torch's forward by its name."""

    def forward(self, x: torch.Tensor, hx: Any = None) -> Any:  # type: ignore[override]
        return nn.GRU.forward(self, x, hx)


@CASES.add(each={**KINDS, "scaled": Scaled, "silent": Silent, "named": Named})
def identity(use: Use, layer: type[nn.RNNBase]) -> Any:
    model = use(nn.Sequential(layer(F, use.H, num_layers=2, dropout=0.5).double()))
    first = learn(model[0], batch())
    return (
        first,
        type(model[0]) is layer,
        repr(model),
        str(inspect.signature(model[0].forward)),
        [name for name, _ in model.named_modules()],
        {name: tuple(value.shape) for name, value in model.state_dict().items()},
        model[0].all_weights,
    )


@CASES.add(each=KINDS)
def classes_stay_as_they_are(use: Use, layer: type[nn.RNNBase]) -> Any:
    """Layers that nobody has accelerated, and those made from the class of one that was."""
    model = use(layer(F, use.H).double())
    model(batch())
    other = type(model)(F, use.H).double()
    cell = use(nn.Sequential(nn.LSTMCell(F, use.H), nn.GRUCell(F, use.H)).double())
    return learn(other, batch()), learn(cell[0], batch(B, F)), learn(cell[1], batch(B, F)), repr(cell)


@CASES.add(each={"accelerated-before": False, "accelerated-meanwhile": True})
def forward_is_replaced_for_a_while(use: Use, meanwhile: bool) -> Any:
    model, found, calls = nn.GRU(F, use.H).double(), nn.GRU.forward, []

    def counted(*given: Any) -> Any:
        calls.append(len(given))
        return found(*given)

    use(model if not meanwhile else nn.GRU(F, use.H))
    nn.GRU.forward = counted  # type: ignore[method-assign, assignment]
    try:
        result = learn(use(model), batch())
    finally:
        nn.GRU.forward = found  # type: ignore[method-assign]
    return result, calls, learn(model, batch())


@CASES.add(each=KINDS)
def modes(use: Use, layer: type[nn.RNNBase]) -> Any:
    model = use(layer(F, use.H, num_layers=2, dropout=0.5).double())
    seen = [model.training, model.eval() is model, model.training, learn(model, batch())]
    for change in (model.train, model.float, model.double, model.cpu, model.flatten_parameters, model.share_memory):
        change()
        seen.append(model(batch(dtype=model.weight_hh_l0.dtype)))
    model.apply(lambda module: seen.append(type(module).__name__))
    return seen, parameters_to_vector(model.parameters()), model.to(memory_format=torch.channels_last) is model


# Copies and files


class WithoutStretto(pickle.Unpickler):
    """A reader on a machine where stretto is not installed."""

    def find_class(self, module: str, name: str) -> Any:
        assert module.partition(".")[0] != "stretto", f"the file needs {module}.{name}"
        return super().find_class(module, name)


def _saved(value: Any, **options: Any) -> Any:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file, **options)


def _pickled(value: Any) -> Any:
    return WithoutStretto(io.BytesIO(pickle.dumps(value))).load()


def _safely(model: nn.Module) -> nn.Module:
    with torch.serialization.safe_globals([nn.Sequential, nn.RNN, nn.GRU, nn.LSTM]):
        return _saved(model, weights_only=True)  # type: ignore[no-any-return]


AGAIN: dict[str, Callable[[Any], Any]] = {
    "deepcopy": copy.deepcopy,
    "copy": copy.copy,
    "pickle": _pickled,
    "file": lambda model: _saved(model, weights_only=False),
    "safe-file": _safely,
    "pickle-of-a-deepcopy": lambda model: _pickled(copy.deepcopy(model)),
}


@CASES.add(each={f"{name}-{kind}": (again, KINDS[kind]) for name, again in AGAIN.items() for kind in KINDS})
def copies(use: Use, given: tuple[Callable[[Any], Any], type[nn.RNNBase]]) -> Any:
    """Cold, warm, and accelerated once more; whatever happens to a copy leaves the original alone."""
    again, layer = given
    model = use(nn.Sequential(layer(F, use.H).double()))
    cold = again(model)
    model[0](batch())
    warm = again(model)
    results = [update(other[0], batch()) for other in (cold, warm, use(again(cold)))]
    return results, type(warm[0]) is layer, repr(warm), learn(model[0], batch())


@CASES.add(each={"strict": {}, "assigned": {"assign": True}})
def state_dicts(use: Use, options: dict[str, Any]) -> Any:
    """From plain to accelerated and back, under the same names."""
    theirs, ours = nn.LSTM(F, use.H, bidirectional=True).double(), use(nn.LSTM(F, use.H, bidirectional=True).double())
    ours(batch())
    ours.load_state_dict(_saved(theirs.state_dict()), **options)
    updated = update(ours, batch())
    back = nn.LSTM(F, use.H, bidirectional=True).double()
    back.load_state_dict(ours.state_dict(), **options)
    return updated, learn(back, batch()), list(ours.state_dict())


@CASES.add(raises=RuntimeError)
def state_dict_of_another_size(use: Use) -> None:
    use(nn.GRU(F, use.H)).load_state_dict(nn.GRU(F, use.H + 1).state_dict())


@CASES.add()
def moving_average(use: Use) -> Any:
    model = use(nn.Sequential(nn.GRU(F, use.H)).double())
    average = AveragedModel(model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9))
    for _ in range(2):
        update(model[0], batch())
        average.update_parameters(model)
    return learn(average.module[0], batch()), list(average.state_dict())


@CASES.add()
def size_of_a_saved_output(use: Use) -> Any:
    file = io.BytesIO()
    torch.save(use(nn.GRU(F, use.H))(torch.randn(200, 50, F))[0].detach(), file)
    return len(file.getvalue()) // 50_000


# Back to plain


@pytest.mark.parametrize("layer", [nn.RNN, nn.GRU, nn.LSTM, Scaled])
def test_restored_layers_are_torchs_own(layer: type[nn.RNNBase]) -> None:
    theirs = nn.Sequential(layer(F, 6)).double()
    ours = copy.deepcopy(theirs)
    before = sorted(vars(ours[0]))
    stretto.accelerate(ours, backend="cpp")
    ours[0](batch())
    assert stretto.restore(ours) is ours
    assert sorted(vars(ours[0])) == before
    assert torch.equal(ours[0](x_TBF := batch())[0], theirs[0](x_TBF)[0])
    assert _operators(ours[0]) & {"aten::lstm", "aten::gru", "aten::rnn_tanh"}
    stretto.restore(stretto.restore(ours))


def _operators(model: nn.Module) -> set[str]:
    model(batch())
    with torch.autograd.profiler.profile() as profile:
        loss_of(model(batch())).backward()
    return {event.name for event in profile.function_events}


ACCELERATED: dict[str, Callable[[], Any]] = {
    "rnn": lambda: nn.RNN(F, 6),
    "gru": lambda: nn.GRU(F, 6),
    "lstm": lambda: nn.LSTM(F, 6),
    "projected": lambda: nn.LSTM(F, 6, proj_size=2),
    "subclass": lambda: Scaled(F, 6),
    "silent-subclass": lambda: Silent(F, 6),
    "named-subclass": lambda: Named(F, 6),
    "weight-norm": lambda: nn.utils.weight_norm(nn.GRU(F, 6), "weight_hh_l0"),
    "parametrized": lambda: parametrizations.weight_norm(nn.GRU(F, 6), "weight_hh_l0"),
    "pruned": lambda: prune.l1_unstructured(nn.GRU(F, 6), "weight_hh_l0", amount=0.5),
}


@pytest.mark.parametrize("make", ACCELERATED.values(), ids=ACCELERATED)
def test_kernels_run(make: Callable[[], nn.Module]) -> None:
    """The same layer, faster: none of torch's own recurrent operators is called."""
    model = make().double()
    assert _operators(model) & {"aten::lstm", "aten::gru", "aten::rnn_tanh"}
    assert not _operators(stretto.accelerate(model, backend="cpp")) & {"aten::lstm", "aten::gru", "aten::rnn_tanh"}


def test_kernels_run_after_forward_was_replaced_for_a_while() -> None:
    model, found = stretto.accelerate(nn.GRU(F, 6).double(), backend="cpp"), nn.GRU.forward
    nn.GRU.forward = lambda *given, **_: found(*given)  # type: ignore[method-assign, assignment]
    try:
        assert "not torch's own" in stretto.explain(stretto.accelerate(nn.GRU(F, 6))).layers[0].reason
    finally:
        nn.GRU.forward = found  # type: ignore[method-assign]
    assert "aten::gru" not in _operators(model)
    assert "aten::gru" not in _operators(stretto.accelerate(nn.GRU(F, 6).double(), backend="cpp"))


# Threads, processes, machines


@CASES.add()
def threads(use: Use) -> Any:
    shared, x_TBF = use(nn.LSTM(F, use.H, num_layers=2).double()), batch().detach()
    own = [copy.deepcopy(shared) for _ in range(2)]

    def run(model: nn.Module) -> Any:
        for _ in range(10):
            shared(x_TBF)
        return update(model, x_TBF, times=5)

    with ThreadPoolExecutor(2) as pool:
        return list(pool.map(run, own))


@CASES.add()
def backward_in_another_thread(use: Use) -> Any:
    model = use(nn.GRU(F, use.H).double())
    loss = loss_of(model(batch()))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(loss.backward).result()
    return [parameter.grad for parameter in model.parameters()]


def _send(model: nn.Module, x_TBF: torch.Tensor, pipe: Any) -> None:
    result = learn(model, x_TBF)
    pipe.send([tensor.detach().numpy() for tensor in (result[0][0], *result[1].values())])


@CASES.add(each={"cold": False, "warm": True})
def forked_process(use: Use, warm: bool) -> Any:
    model, x_TBF = use(nn.GRU(F, use.H).double()), batch().detach()
    if warm:
        model(x_TBF)
    here, there = multiprocessing.Pipe()
    child = multiprocessing.get_context("fork").Process(target=_send, args=(model, x_TBF, there))
    child.start()
    there.close()
    found = [torch.from_numpy(array) for array in here.recv()]
    child.join()
    return found, child.exitcode


class Encoded(Dataset[torch.Tensor]):
    """Sequences that a layer has run over in the worker."""

    def __init__(self, model: nn.Module) -> None:
        self.model, self.x_NTBF = model, batch(3, T, B, F).detach()

    def __len__(self) -> int:
        return len(self.x_NTBF)

    def __getitem__(self, index: int) -> torch.Tensor:
        with torch.no_grad():
            y_TBH: torch.Tensor = self.model(self.x_NTBF[index])[0]
        return y_TBH


@CASES.add()
def worker_of_a_loader(use: Use) -> Any:
    return list(DataLoader(Encoded(use(nn.GRU(F, use.H).double())), num_workers=1, batch_size=2))


WITHOUT = """
import torch, stretto
torch.manual_seed(0)
theirs = torch.nn.GRU(5, 6)
x = torch.randn(4, 3, 5)
wanted = theirs(x)[0]
ours = stretto.accelerate(theirs)
for _ in range(2):
    found = ours(x)[0]
    found.sum().backward()
    assert torch.allclose(found, wanted, atol=1e-6)
"""


@pytest.mark.parametrize("missing", ["compiler", pytest.param("cache", marks=pytest.mark.slow)])
def test_machines_that_cannot_compile_run_torchs_layer_and_say_so(missing: str, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    changed = {
        "compiler": {"CXX": "no-such-compiler", "STRETTO_CACHE": str(tmp_path / "cache")},
        "cache": {"STRETTO_CACHE": str(tmp_path / "file" / "cache")},
    }[missing]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT],
        env=os.environ | changed,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert missing in done.stderr.lower()


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_memory_does_not_grow(backend: str) -> None:
    """Calls of varying shape, packed or not, keep nothing."""
    model = stretto.accelerate(nn.GRU(F, 6), backend=backend)  # type: ignore[arg-type]
    generator = torch.Generator().manual_seed(0)

    def run(count: int) -> None:
        for _ in range(count):
            steps, rows = torch.randint(1, 50, (2,), generator=generator).tolist()
            x_TBF = torch.randn(steps, rows, F)
            lengths_B = torch.randint(1, steps + 1, (rows,), generator=generator)
            loss_of(model(x_TBF)).backward()
            loss_of(model(pack_padded_sequence(x_TBF, lengths_B, enforce_sorted=False))).backward()

    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    run(25)
    before = resident()
    run(50)
    assert resident() - before < 16_000_000


def test_accelerating_twice_or_a_copy_changes_nothing() -> None:
    model = nn.GRU(F, 6).double()
    x_TBF = batch()
    wanted = model(x_TBF)
    for _ in range(2):
        stretto.accelerate(model, backend="cpp")
    assert_same(model(x_TBF), wanted)
    assert_same(stretto.restore(copy.deepcopy(model))(x_TBF), wanted)
