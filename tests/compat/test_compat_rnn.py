"""`stretto.RNN` under PyTorch's tools: each behaviour equals that of a plain Python loop over the same cell.

A behaviour is a function of `make`, which puts a cell into `stretto.RNN` or into the plain loop. What it returns has
to be the same both times. Shape legend: B sequences, T steps, F features, H hidden units, N copies.
"""

import copy
import io
import itertools
import warnings
from collections.abc import Callable, Iterator
from itertools import count
from typing import Any, Final

import pytest
import torch
from compat_cases import assert_same, gradients, learn, loss_of
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint

import stretto
from rounding import assert_as_exact

F, B, T = 5, 3, 4
LENGTHS: Final = [2, 4, 0]
FRESH_SIZES: Final = count(7)
TEMPERATURES: Final = [pytest.param(False, id="cold"), pytest.param(True, id="warm", marks=pytest.mark.slow)]
pytestmark = pytest.mark.usefixtures("quick_compiler")
Make = Callable[..., nn.Module]


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


class Leaky(stretto.Cell):
    """A cell of one's own, with a state of two tensors and a parameter that is used in two ways."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.inward = nn.Linear(input_size, hidden_size)
        self.around = nn.Linear(hidden_size, hidden_size, bias=False)

    def initial_state(self, batch_size: int) -> Any:
        return self.zeros(batch_size, self.hidden_size), self.zeros(batch_size, 1)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h, total = state
        new = 0.9 * h + 0.1 * torch.tanh(self.inward(x_t) + self.around(h) * torch.sigmoid(total))
        total = total + new.mean(1, keepdim=True)
        return new * total, (new, total)


class PlainLoop(nn.Module):
    """The definition: the cell at every step of each sequence."""

    def __init__(self, cell: stretto.Cell) -> None:
        super().__init__()
        self.cells = nn.ModuleList([cell])

    def forward(self, x_BTF: torch.Tensor, state: Any = None, lengths: Any = None) -> Any:
        cell: Any = self.cells[0]
        if lengths is not None:
            rows = [self(x_BTF[row : row + 1, :length]) for row, length in enumerate(lengths)]
            y_BTH = torch.cat(
                [torch.cat([y, y.new_zeros(1, x_BTF.shape[1] - y.shape[1], y.shape[2])], 1) for y, _ in rows]
            )
            parts = [after if isinstance(after, tuple) else (after,) for _, after in rows]
            joined = tuple(torch.cat(part) for part in zip(*parts, strict=True))
            return y_BTH, joined if len(joined) > 1 else joined[0]
        state = cell.initial_state(x_BTF.shape[0]) if state is None else state
        outputs = [x_BTF.new_zeros(x_BTF.shape[0], 0, cell.hidden_size)]
        for step in range(x_BTF.shape[1]):
            y_BH, state = cell(x_BTF[:, step], state)
            outputs.append(y_BH[:, None])
        return torch.cat(outputs, 1), state


CELLS: Final[dict[str, type[stretto.Cell]]] = {"lstm": stretto.cells.LSTM, "own": Leaky}


@pytest.fixture(params=["own", pytest.param("lstm", marks=pytest.mark.slow)])
def cell(request: pytest.FixtureRequest) -> stretto.Cell:
    """A cell of a size that this process has not run before."""
    torch.manual_seed(0)
    return CELLS[request.param](F, next(FRESH_SIZES)).double()  # type: ignore[call-arg]


def same(cell: stretto.Cell, behaviour: Callable[[Make], Any]) -> Any:
    """Check that a behaviour is the same with the plain loop and with `stretto.RNN`, and return it."""
    torch.manual_seed(1)
    wanted = behaviour(lambda: PlainLoop(copy.deepcopy(cell)))
    torch.manual_seed(1)
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".* runs by backend")
        found = behaviour(lambda: stretto.RNN(copy.deepcopy(cell)))
    assert_same(found, wanted)
    return found


def batch(*shape: int) -> torch.Tensor:
    return torch.randn(*(shape or (B, T, F)), dtype=torch.float64)


def warmed(model: nn.Module, warm: bool) -> nn.Module:
    """The model, after a training step and a call without gradients if it shall be warm."""
    if warm:
        learn(model, batch())
        model.zero_grad()
        with torch.no_grad():
            model(batch())
    torch.manual_seed(2)
    return model


def leaf() -> torch.Tensor:
    return batch().requires_grad_()


# torch.compile


@pytest.mark.parametrize("warm", TEMPERATURES)
@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_compiled(cell: stretto.Cell, warm: bool, backend: str) -> None:
    def behaviour(make: Make) -> Any:
        layer = warmed(make(), warm)
        model = nn.Sequential(layer, First(), nn.Linear(cell.hidden_size, 2).double())  # type: ignore[arg-type]
        compiled = torch.compile(model, backend=backend)
        with torch.no_grad():
            before = compiled(batch())
        first = learn(compiled, leaf())
        compiled.zero_grad()
        return before, first, learn(compiled, batch(B + 1, T, F).requires_grad_()), learn(layer, leaf())

    same(cell, behaviour)


class First(nn.Module):
    """Of a pair the first."""

    def forward(self, pair: Any) -> Any:
        return pair[0]


def test_compiling_makes_one_graph_and_generated_code_runs(cell: stretto.Cell) -> None:
    layer = stretto.RNN(cell)

    def model(x_BTF: torch.Tensor) -> torch.Tensor:
        return layer(x_BTF * 2)[0] + 1  # type: ignore[no-any-return]

    explained = torch._dynamo.explain(model)(batch())
    assert (explained.graph_count, explained.graph_break_count) == (1, 0)
    assert layer.last_built is not None
    assert layer.last_built.backend == "cpp"


def test_lengths_break_the_graph_once(cell: stretto.Cell) -> None:
    layer = stretto.RNN(cell)
    explained = torch._dynamo.explain(lambda x_BTF: layer(x_BTF * 2, lengths=LENGTHS)[0] + 1)(batch())
    assert (explained.graph_count, explained.graph_break_count) == (2, 1)


def test_what_is_not_one_graph_says_what_to_do(cell: stretto.Cell) -> None:
    layer = stretto.RNN(cell)
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile with fullgraph=False"):
        torch.compile(layer, fullgraph=True, backend="eager")(batch(), lengths=LENGTHS)
    same(cell, lambda make: learn(make(), leaf()))


@pytest.mark.parametrize("lengths", [LENGTHS, torch.tensor(LENGTHS)], ids=["list", "tensor"])
def test_compiled_with_lengths(cell: stretto.Cell, lengths: Any) -> None:
    def behaviour(make: Make) -> Any:
        layer, x_BTF = make(), leaf()
        is_plain = isinstance(layer, PlainLoop)
        run = layer if is_plain else torch.compile(layer, backend="eager")
        result = run(x_BTF, None, LENGTHS if is_plain else lengths)
        loss_of(result).backward()
        return result, gradients(layer), x_BTF.grad

    same(cell, behaviour)


# torch.export and tracing


@pytest.mark.parametrize("warm", TEMPERATURES)
@pytest.mark.parametrize("strict", [False, True])
def test_exported(cell: stretto.Cell, warm: bool, strict: bool) -> None:
    def behaviour(make: Make) -> Any:
        layer = warmed(make(), warm)
        program = torch.export.export(layer, (batch(),), strict=strict)
        return program.module()(batch()), learn(layer, leaf())

    same(cell, behaviour)


def test_exported_for_any_number_of_sequences(cell: stretto.Cell) -> None:
    def behaviour(make: Make) -> Any:
        shapes = {"x" if isinstance(layer := make(), stretto.RNN) else "x_BTF": {0: torch.export.Dim("rows")}}
        program = torch.export.export(layer, (batch(),), dynamic_shapes=shapes)
        return program.module()(batch(7, T, F))

    same(cell, behaviour)


@pytest.mark.slow
@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("bidirectional", [False, True])
def test_exported_with_lengths_as_an_input(cell: stretto.Cell, strict: bool, bidirectional: bool) -> None:
    layer = stretto.RNN(cell, num_layers=2, bidirectional=bidirectional)
    x_BTF = batch()
    program = torch.export.export(layer, (x_BTF, None, torch.tensor([4, 4, 4])), strict=strict)
    x_BTF[0, 2:] = torch.nan
    assert_same(program.module()(x_BTF, None, torch.tensor(LENGTHS)), layer(x_BTF, lengths=LENGTHS))


@pytest.mark.parametrize("warm", TEMPERATURES)
def test_traced(cell: stretto.Cell, warm: bool) -> None:
    def behaviour(make: Make) -> Any:
        layer = warmed(make(), warm)
        traced = torch.jit.trace(layer, (batch(),))
        stored = io.BytesIO()
        torch.jit.save(traced, stored)
        stored.seek(0)
        again = torch.jit.load(stored)
        return traced(batch()), again(batch()), again(batch(6, T, F)), learn(layer, leaf())

    with warnings.catch_warnings():
        warnings.simplefilter("error", torch.jit.TracerWarning)
        same(cell, behaviour)


def test_traced_by_make_fx(cell: stretto.Cell) -> None:
    def behaviour(make: Make) -> Any:
        layer = make().requires_grad_(False)
        return make_fx(layer)(batch())(batch())

    same(cell, behaviour)


# torch.func and forward-mode derivatives


TRANSFORMS: Final[dict[str, Callable[..., Any]]] = {
    "grad": lambda loss, weights, x: torch.func.grad(loss)(weights, x),
    "jvp": lambda loss, weights, x: torch.func.jvp(loss, (weights, x), (weights, torch.ones_like(x))),
    "jacrev": lambda loss, weights, x: torch.func.jacrev(loss, argnums=1)(weights, x),
    "jacfwd": lambda loss, weights, x: torch.func.jacfwd(loss, argnums=1)(weights, x),
    "hessian": lambda loss, weights, x: torch.func.hessian(loss, argnums=1)(weights, x),
    "per-sample": lambda loss, weights, x: torch.func.vmap(torch.func.grad(loss), (None, 0))(weights, x[:, None]),
}


@pytest.mark.parametrize(
    ("warm", "lengths"),
    [
        pytest.param(False, None, id="cold"),
        pytest.param(True, [1, 2], id="warm-with-lengths", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transformed(cell: stretto.Cell, name: str, warm: bool, lengths: list[int] | None) -> None:
    if name == "per-sample":
        lengths = lengths and lengths[:1]

    def behaviour(make: Make) -> Any:
        layer = warmed(make(), warm)

        def loss(weights: dict[str, torch.Tensor], x_BTF: torch.Tensor) -> torch.Tensor:
            return loss_of(functional_call(layer, weights, (x_BTF, None, lengths)))

        weights = {key: parameter.detach() for key, parameter in layer.named_parameters()}
        return TRANSFORMS[name](loss, weights, batch(2, 2, F)), learn(layer, leaf())

    same(cell, behaviour)


def test_lengths_can_be_mapped_over(cell: stretto.Cell) -> None:
    layer, x_NBTF, lengths_NB = stretto.RNN(cell), batch(2, B, T, F), torch.tensor([[4, 0, 1], [2, 3, 4]])
    found = torch.func.vmap(lambda x, lengths: layer(x, lengths=lengths)[0])(x_NBTF, lengths_NB)
    assert_same(found, torch.stack([layer(x, lengths=n)[0] for x, n in zip(x_NBTF, lengths_NB, strict=True)]))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_an_ensemble(cell: stretto.Cell, dtype: torch.dtype) -> None:
    models = [stretto.RNN(copy.deepcopy(cell)) for _ in range(3)]
    for index, model in enumerate(models):
        for parameter in model.parameters():
            parameter.data.mul_(index + 1)
    x_BTF = batch()

    def learned(y_NBTH: torch.Tensor, weights: list[torch.Tensor]) -> list[torch.Tensor]:
        """Outputs, and gradients of the sum of all models' losses."""
        return [y_NBTH.detach(), *torch.autograd.grad(loss_of(y_NBTH), weights)]

    each = [learned(model(x_BTF)[0], list(model.parameters())) for model in models]
    exact = [torch.stack(parts) for parts in zip(*each, strict=True)]
    models = [model.to(dtype) for model in models]
    x_BTF = x_BTF.to(dtype)
    weights, buffers = torch.func.stack_module_state(models)  # type: ignore[arg-type]
    y_NBTH = torch.func.vmap(lambda w, b: functional_call(models[0], (w, b), (x_BTF,))[0])(weights, buffers)
    found = learned(y_NBTH, list(weights.values()))
    if dtype == torch.float64:
        assert_same(found, exact)
        return
    each = [learned(model(x_BTF)[0], list(model.parameters())) for model in models]
    for index, (one, wanted) in enumerate(zip(found, exact, strict=True)):
        assert_as_exact(one, torch.stack([parts[index] for parts in each]), wanted)


@pytest.mark.parametrize("warm", TEMPERATURES)
def test_forward_mode(cell: stretto.Cell, warm: bool) -> None:
    def behaviour(make: Make) -> Any:
        layer = warmed(make(), warm)
        with forward_ad.dual_level():
            y, after = layer(forward_ad.make_dual(batch(), batch()))
            tangents = [forward_ad.unpack_dual(tensor).tangent for tensor in (y, *after)]
        return tangents, learn(layer, leaf())

    same(cell, behaviour)


@pytest.mark.parametrize("vectorize", [False, True])
def test_jacobian(cell: stretto.Cell, vectorize: bool) -> None:
    def behaviour(make: Make) -> Any:
        layer = make()
        return torch.autograd.functional.jacobian(lambda x: layer(x)[0], batch(2, 2, F), vectorize=vectorize)

    same(cell, behaviour)


# Checkpointing


@pytest.mark.parametrize("warm", TEMPERATURES)
@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(cell: stretto.Cell, warm: bool, reentrant: bool) -> None:
    def behaviour(make: Make) -> Any:
        layer, x_BTF = warmed(make(), warm), leaf()
        y_BTH, after = checkpoint(layer, x_BTF, use_reentrant=reentrant)
        loss_of((y_BTH, after)).backward()
        return y_BTH, after, x_BTF.grad, gradients(layer)

    same(cell, behaviour)


# Modes, devices and subclasses


def test_autocast_leaves_the_loop_in_the_precision_of_its_weights(cell: stretto.Cell) -> None:
    layer, x_BTF = stretto.RNN(cell.float()), leaf().detach().float()
    wanted = PlainLoop(cell)(x_BTF)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert_same(layer(x_BTF), wanted)
        assert_same(layer(x_BTF.bfloat16()), layer(x_BTF.bfloat16().float()))


def test_on_meta(cell: stretto.Cell) -> None:
    def behaviour(make: Make) -> Any:
        y_BTH, after = make().to("meta")(batch().to("meta"))
        return tuple(y_BTH.shape), y_BTH.device.type, [tuple(part.shape) for part in after]

    same(cell, behaviour)


def test_fake_tensors(cell: stretto.Cell) -> None:
    def behaviour(make: Make) -> Any:
        layer = make()
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            y_BTH, _ = layer(mode.from_tensor(batch()))
        return tuple(y_BTH.shape), type(y_BTH).__name__

    same(cell, behaviour)


@pytest.mark.parametrize("lengths", [None, LENGTHS], ids=["even", "lengths"])
@pytest.mark.parametrize("warm", TEMPERATURES)
def test_another_default_device(cell: stretto.Cell, warm: bool, lengths: list[int] | None) -> None:
    def behaviour(make: Make) -> Any:
        layer, x_BTF = warmed(make(), warm), leaf()
        with torch.device("meta"):
            y_BTH, after = layer(x_BTF, None, lengths)
            loss_of((y_BTH, after)).backward()
        return y_BTH, after, gradients(layer), learn(layer, leaf())

    same(cell, behaviour)


class Tagged(torch.Tensor):
    """A subclass that only has another name."""


@pytest.mark.parametrize("warm", TEMPERATURES)
def test_subclasses(cell: stretto.Cell, warm: bool) -> None:
    def behaviour(make: Make) -> Any:
        layer = warmed(make(), warm).requires_grad_(False)
        wrapped = layer(TwoTensor(batch(), batch()))[0]
        weights = {name: p.detach().as_subclass(Tagged) for name, p in layer.named_parameters()}
        return wrapped.a, wrapped.b, layer(batch().as_subclass(Tagged)), functional_call(layer, weights, (batch(),))

    same(cell, behaviour)


def test_negated_views(cell: stretto.Cell) -> None:
    def behaviour(make: Make) -> Any:
        return make()(torch._neg_view(batch()))

    same(cell, behaviour)


# Copies


def test_copies_and_stored_weights(cell: stretto.Cell) -> None:
    def behaviour(make: Make) -> Any:
        layer = warmed(make(), True)
        twin = copy.deepcopy(layer)
        assert not {p.data_ptr() for p in twin.parameters()} & {p.data_ptr() for p in layer.parameters()}
        for parameter in layer.parameters():
            parameter.data.add_(0.1)
        other = make()
        other.load_state_dict(layer.state_dict())
        return learn(twin, leaf()), learn(layer, leaf()), learn(other, leaf()), dict(layer.state_dict())

    same(cell, behaviour)


def test_a_stored_layer_can_be_read_again(cell: stretto.Cell) -> None:
    layer, stored, x_BTF = stretto.RNN(cell), io.BytesIO(), batch()
    wanted = layer(x_BTF)
    torch.save(layer, stored)
    stored.seek(0)
    assert_same(torch.load(stored, weights_only=False)(x_BTF), wanted)


# Work in place, seen by autograd or not

CHANGES: Final[dict[str, Callable[[torch.Tensor], Any]]] = {
    "seen": lambda tensor: tensor.mul_(2.0),
    "unseen": lambda tensor: tensor.data.mul_(2.0),
    "numpy": lambda tensor: tensor.detach().numpy().fill(3.0),
    "transposed": lambda tensor: tensor.transpose_(0, 1),
}
OWN_CELLS: Final[dict[str, Callable[[], nn.Module]]] = {
    "gru": lambda: stretto.cells.GRU(F, 6),
    "lstm": lambda: stretto.cells.LSTM(F, 6),
    "elman": lambda: stretto.cells.Elman(F, 6),
    "own": lambda: Leaky(F, 6),
}
SETTINGS: Final[dict[str, dict[str, Any]]] = {
    "plain": {},
    "eager": {"backend": "eager"},
    "states": {"save": "states"},
    "auto": {"solver": "auto"},
    "deep": {"num_layers": 2},
    "both-ways": {"bidirectional": True},
}


@pytest.mark.parametrize(
    ("kind", "setting"),
    # A cell that has no with_input_size is one layer of one direction.
    [pair for pair in itertools.product(OWN_CELLS, SETTINGS) if pair not in (("own", "deep"), ("own", "both-ways"))],
)
def test_work_in_place_on_results(kind: str, setting: str) -> None:
    for change in CHANGES.values():
        found = []
        for backend in ("torch", SETTINGS[setting].get("backend", "cpp")):
            torch.manual_seed(0)
            given = SETTINGS[setting] if backend != "torch" else {**SETTINGS[setting], "save": "auto"}
            model, x_BTF = stretto.RNN(OWN_CELLS[kind](), **{**given, "backend": backend}).double(), leaf()
            y, after = model(x_BTF)
            assert not y._is_view()
            kept = (y * torch.arange(y.shape[-1]).double()).sum()
            states = [tensor for tensor in torch.utils._pytree.tree_leaves(after) if tensor.shape[1] == 6]
            for tensor in (y, *states):
                change(tensor)
            (loss_of((y, states)) + kept).backward()
            found.append((y, states, gradients(model), x_BTF.grad))
        assert_same(found[1], found[0])


@pytest.mark.parametrize("kind", OWN_CELLS)
def test_a_layer_made_in_inference_mode_is_compiled(kind: str) -> None:
    with torch.inference_mode():
        layer = stretto.RNN(OWN_CELLS[kind]()).double()
    assert all(parameter.is_inference() for parameter in layer.parameters())
    x_BTF = batch()
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found, wanted = layer(x_BTF), PlainLoop(layer.cells[0])(x_BTF)  # type: ignore[arg-type]
            torch.testing.assert_close(found, wanted)
        assert layer.last_built is not None
        assert layer.last_built.backend == "cpp"
    assert all(parameter.is_inference() for parameter in layer.parameters())
    with pytest.raises(RuntimeError, match=r"[Ii]nference tensors"):
        layer(x_BTF)
    learned = copy.deepcopy(layer)
    learned.load_state_dict({name: tensor.clone() for name, tensor in layer.state_dict().items()}, assign=True)
    assert learned(x_BTF)[0].requires_grad


# Steps that run again in the backward pass, and solvers

RUNS: Final[dict[str, Callable[[], dict[str, Any]]]] = {
    "states": lambda: {"save": "states"},
    "torch-states": lambda: {"save": "states", "backend": "torch"},
    "newton": lambda: {"solver": stretto.Newton(tolerance=1e-13)},
    "multigrid": lambda: {"solver": stretto.Multigrid(num_levels=2, coarsening=4, tolerance=1e-13)},
    "shooting": lambda: {"solver": stretto.Shooting(num_chunks=4, tolerance=1e-13)},
    "auto": lambda: {"solver": "auto"},
}
LONG: Final = 12


def _of_weights(layer: nn.Module, transform: Callable[..., Any]) -> Any:
    weights = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    return transform(lambda given, x: loss_of(functional_call(layer, given, (x,))), weights, batch(2, LONG, F))


def _of_gradients(layer: nn.Module, transform: Callable[..., Any]) -> Any:
    """A transform of the backward pass of a forward pass that was recorded before."""
    x_BTF = batch(2, LONG, F).requires_grad_()
    y_BTH, _ = layer(x_BTF)
    wanted = [x_BTF, *layer.parameters()]

    def pull_back(d_BTH: torch.Tensor) -> torch.Tensor:
        found = torch.autograd.grad(y_BTH, wanted, d_BTH, retain_graph=True, create_graph=True)
        return torch.stack([gradient.square().sum() for gradient in found])

    return transform(pull_back, torch.ones_like(y_BTH).detach())


def _in_copies(layer: nn.Module) -> Any:
    """What `nn.DataParallel` does on several GPUs: copies whose weights are tensors that were computed."""
    modules = list(layer.modules())
    results = []
    for _ in range(2):
        copies = {module: module._replicate_for_data_parallel() for module in modules}  # type: ignore[no-untyped-call]
        for module, twin in copies.items():
            for name, inner in module.named_children():
                setattr(twin, name, copies[inner])
            for name, parameter in module.named_parameters(recurse=False):
                setattr(twin, name, parameter.clone())
        results.append(copies[layer](batch(2, LONG, F)))
    loss_of(results).backward()
    return results, gradients(layer)


def _batched(layer: nn.Module) -> Any:
    x_BTF = batch(2, LONG, F).requires_grad_()
    y_BTH, _ = layer(x_BTF)
    directions = torch.stack([torch.ones_like(y_BTH), y_BTH.detach()])
    return torch.autograd.grad(y_BTH, [x_BTF, *layer.parameters()], directions, is_grads_batched=True)


def _checkpointed(layer: nn.Module) -> Any:
    x_BTF = batch(2, LONG, F).requires_grad_()
    result = checkpoint(layer, x_BTF, use_reentrant=False)
    loss_of(result).backward()
    return result, x_BTF.grad, gradients(layer)


def _compiled_and_exported(layer: nn.Module) -> Any:
    x_BTF = batch(2, LONG, F)
    learned = learn(torch.compile(layer, backend="eager"), x_BTF.clone().requires_grad_())
    layer.zero_grad()
    return learned, torch.export.export(layer, (x_BTF,)).module()(x_BTF)


def _vjp(run: Callable[..., torch.Tensor], *given: Any) -> Any:
    made, pull = torch.func.vjp(run, *given)
    return made, pull(torch.ones_like(made).detach())


def _with_lengths(layer: nn.Module) -> Any:
    weights = {name: parameter.detach() for name, parameter in layer.named_parameters()}
    x_BTF, lengths = batch(2, LONG, F), [5, LONG]
    return torch.func.grad(lambda given: loss_of(functional_call(layer, given, (x_BTF, None, lengths))))(weights)


USES: Final[dict[str, Callable[[nn.Module], Any]]] = {
    "grad-with-lengths": _with_lengths,
    "grad": lambda layer: _of_weights(layer, lambda loss, *given: torch.func.grad(loss)(*given)),
    "vjp": lambda layer: _of_weights(layer, _vjp),
    "jvp": lambda layer: _of_weights(layer, lambda loss, *given: torch.func.jvp(loss, given, given)),
    "vjp-of-gradients": lambda layer: _of_gradients(layer, _vjp),
    "jvp-of-gradients": lambda layer: _of_gradients(layer, lambda run, d: torch.func.jvp(run, (d,), (d,))),
    "vmap-of-gradients": lambda layer: _of_gradients(layer, lambda run, d: torch.vmap(run)(torch.stack([d, d * 2]))),
    "batched-gradients": _batched,
    "checkpoint": _checkpointed,
    "compile-and-export": _compiled_and_exported,
    "deepcopy": lambda layer: learn(copy.deepcopy(warmed(layer, True)), batch(2, LONG, F).requires_grad_()),
    "copies-for-devices": _in_copies,
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize(
    "run", [pytest.param(run, marks=[] if run in {"states", "newton"} else [pytest.mark.slow]) for run in RUNS]
)
def test_other_ways_to_run_under_tools(run: str, use: str) -> None:
    torch.manual_seed(0)
    cell, found = stretto.cells.GRU(F, 6).double(), []
    warnings.filterwarnings("ignore", message=".* runs sequentially")
    for layer in (PlainLoop(copy.deepcopy(cell)), stretto.RNN(copy.deepcopy(cell), **RUNS[run]())):
        torch.manual_seed(1)
        found.append(USES[use](layer))
    torch.testing.assert_close(found[1], found[0], rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("run", ["states", "newton"])
def test_a_sequential_run_instead_is_told_once(run: str) -> None:
    kind = type(f"Under{run}", (Leaky,), {})
    layer = stretto.RNN(kind(F, 6).double(), **RUNS[run]())
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            torch.func.vjp(lambda x: loss_of(layer(x)), batch(2, LONG, F))
    (told,) = [str(item.message) for item in caught]
    assert told.startswith(f"Under{run} runs sequentially and stores what it needs, not with ")
    assert told.endswith("the call is transformed by torch.func")
