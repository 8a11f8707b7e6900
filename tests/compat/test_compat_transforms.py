"""Whatever looks at a layer while it runs: checkpointing, torch.compile, torch.func, forward mode, modes, subclasses.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.utils.flop_counter
from compat_cases import (
    BACKENDS,
    FRESH_SIZES,
    KINDS,
    B,
    Behaviour,
    Behaviours,
    F,
    T,
    Use,
    batch,
    gradients,
    learn,
    loss_of,
)
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad, gradcheck
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.utils._per_sample_grad import call_for_per_sample_grads
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.checkpoint import checkpoint, checkpoint_sequential

import stretto

CASES = Behaviours()
pytestmark = pytest.mark.usefixtures("quick_compiler")
TEMPERATURES = {"cold": False, "warm": True}


@pytest.fixture(autouse=True)
def fresh_compiler() -> Iterator[None]:
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize("case", CASES.params)
def test_transforms(case: Behaviour, backend: str) -> None:
    case.check(backend)


def _warmed(model: Any, warm: bool) -> Any:
    """The model, after a training step and a call without gradients if it shall be warm."""
    if warm:
        learn(model, batch())
        model.zero_grad()
        with torch.no_grad():
            model(batch())
    torch.manual_seed(1)
    return model


# Checkpointing


WAYS = {"saved": False, "reentrant": True}


SHAPES = [(T, B), (3 * T, B), (T, 9 * B), (T,)]


def _checkpointed(model: Any, width: int, *shapes: tuple[int, ...], reentrant: bool) -> Any:
    """With dropout, and again with shapes that were not there before."""
    results = []
    for shape in shapes:
        x = batch(*shape, width)
        y, _ = checkpoint(model, x, use_reentrant=reentrant)
        loss_of(y).backward()
        results.append((y, x.grad))
    return results, gradients(model), torch.get_rng_state()


@CASES.add(each={f"{kind}-{way}": (KINDS[kind], reentrant) for kind in KINDS for way, reentrant in WAYS.items()})
def checkpointed(use: Use, given: tuple[type[nn.RNNBase], bool]) -> Any:
    layer, reentrant = given
    model = _warmed(use(layer(F, use.H, num_layers=2, dropout=0.5).double()), True)
    return _checkpointed(model, F, *SHAPES, reentrant=reentrant)


@CASES.add(each=WAYS, cold=True)
def checkpointed_cold(use: Use, reentrant: bool) -> Any:
    model = use(nn.GRU(use.H, use.H, num_layers=2, dropout=0.5).double())
    return _checkpointed(model, use.H, *SHAPES[:2], reentrant=reentrant)


@CASES.add(each=WAYS)
def checkpointed_pack(use: Use, reentrant: bool) -> Any:
    model, x_TBF = use(nn.GRU(F, use.H).double()), batch()

    def run(x: torch.Tensor) -> torch.Tensor:
        y, _ = model(pack_padded_sequence(x, torch.tensor([2, 4, 1]), enforce_sorted=False))
        return pad_packed_sequence(y)[0]

    y = checkpoint(run, x_TBF, use_reentrant=reentrant)
    loss_of(y).backward()
    return y, x_TBF.grad, gradients(model)


class First(nn.Module):
    """A layer as one of a sequence: its output without its state."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.layer(x)[0]
        return y


@CASES.add()
def checkpointed_sequence(use: Use) -> Any:
    model = use(nn.Sequential(*[First(nn.GRU(F, F)) for _ in range(4)]).double())
    y = checkpoint_sequential(model, 2, batch(), use_reentrant=False)
    loss_of(y).backward()
    return y, gradients(model)


# torch.compile


def _compiled(use: Use, layer: type[nn.RNNBase], backend: str, *, warm: bool, dynamic: bool | None = None) -> Any:
    model = use(nn.Sequential(First(layer(F, use.H)), nn.Linear(use.H, 2)).double())
    fast = torch.compile(_warmed(model, warm), backend=backend, dynamic=dynamic)
    x_TBF = batch()
    with torch.no_grad():
        before = fast(x_TBF)
    return before, learn(fast, x_TBF), learn(fast, batch(T, B + 2, F)) if dynamic else None


@CASES.add(each=TEMPERATURES, cold=True)
def compiled(use: Use, warm: bool) -> Any:
    return _compiled(use, nn.LSTM, "eager", warm=warm)


@CASES.add(each={"aot": "aot_eager", "inductor": "inductor"}, cold=True, slow=True)
def compiled_by(use: Use, backend: str) -> Any:
    return [_compiled(use, layer, backend, warm=warm) for layer in (nn.GRU, nn.LSTM) for warm in (False, True)]


@CASES.add(each=TEMPERATURES, cold=True, slow=True)
def compiled_for_any_size(use: Use, warm: bool) -> Any:
    return _compiled(use, nn.LSTM, "eager", warm=warm, dynamic=True)


@CASES.add(each=TEMPERATURES)
def compiled_around_a_pack(use: Use, warm: bool) -> Any:
    model = _warmed(use(nn.GRU(F, use.H).double()), warm)

    @torch.compile(backend="eager")
    def run(x_TBF: torch.Tensor) -> torch.Tensor:
        y, _ = model(pack_padded_sequence(x_TBF, torch.tensor([4, 2, 1])))
        return pad_packed_sequence(y)[0]

    y = run(batch())
    loss_of(y).backward()
    return y, gradients(model)


@CASES.add()
def module_compiles_itself(use: Use) -> Any:
    model = use(nn.Sequential(First(nn.GRU(F, use.H))).double())
    model.compile(backend="eager")
    return learn(model, batch())


# torch.func and its relatives


def _functional(use: Use, layer: type[nn.RNNBase], *, warm: bool) -> tuple[Callable[..., torch.Tensor], Any]:
    """The loss of a layer as a function of its weights and input, and the weights."""
    model = _warmed(use(layer(F, use.H).double()), warm)

    def loss(weights: dict[str, torch.Tensor], x: torch.Tensor) -> torch.Tensor:
        return loss_of(functional_call(model, weights, (x,)))

    return loss, {name: parameter.detach() for name, parameter in model.named_parameters()}


TRANSFORMS: dict[str, Callable[[Any, Any, torch.Tensor], Any]] = {
    "grad": lambda loss, weights, x: torch.func.grad(loss)(weights, x),
    "grad-of-input": lambda loss, weights, x: torch.func.grad_and_value(loss, argnums=1)(weights, x),
    "vjp": lambda loss, weights, x: torch.func.vjp(loss, weights, x)[1](torch.ones((), dtype=x.dtype)),
    "jvp": lambda loss, weights, x: torch.func.jvp(loss, (weights, x), (weights, torch.ones_like(x))),
    "jacrev": lambda loss, weights, x: torch.func.jacrev(loss, argnums=1)(weights, x),
    "jacfwd": lambda loss, weights, x: torch.func.jacfwd(loss, argnums=1)(weights, x),
    "hessian": lambda loss, weights, x: torch.func.hessian(loss, argnums=1)(weights, x[:2, :1]),
    "grad-of-grad": lambda loss, weights, x: torch.func.grad(
        lambda given: torch.func.grad(loss, argnums=1)(weights, given).square().sum()
    )(x),
    "functionalize": lambda loss, weights, x: torch.func.functionalize(loss)(weights, x),
}


@CASES.add(
    each={f"{name}-{kind}": (change, KINDS[kind]) for name, change in TRANSFORMS.items() for kind in ("gru", "lstm")}
)
def transform(use: Use, given: tuple[Callable[..., Any], type[nn.RNNBase]]) -> Any:
    change, layer = given
    return change(*_functional(use, layer, warm=True), batch(2, 2, F).detach())


def _pulled(kind: str, run: Callable[[torch.Tensor], torch.Tensor], of: torch.Tensor) -> Any:
    one = torch.ones_like(of).detach()
    if kind == "vjp":
        made, pull = torch.func.vjp(run, one)
        return made, pull(torch.ones_like(made).detach())
    if kind == "jvp":
        return torch.func.jvp(run, (one,), (one,))
    return torch.func.grad(lambda given: run(given).sum())(one)


@CASES.add(
    each={
        f"{name}-{kind}": (layer, kind)
        for name, layer in {"gru": nn.GRU, "lstm": nn.LSTM}.items()
        for kind in ("vjp", "jvp", "grad")
    }
)
def transform_of_a_backward_pass_recorded_before(use: Use, given: tuple[type[nn.RNNBase], str]) -> Any:
    layer, kind = given
    model, x = use(layer(F, use.H, num_layers=2).double()), batch()
    y, after = model(x)
    last = after[0] if isinstance(after, tuple) else after
    wanted = [x, *model.parameters()]

    def run(d: torch.Tensor) -> torch.Tensor:
        found = torch.autograd.grad([y, last], wanted, [d, torch.ones_like(last)], retain_graph=True, create_graph=True)
        return torch.stack([gradient.square().sum() for gradient in found])

    return _pulled(kind, run, y), _pulled(kind, lambda d: (y * d).square(), y)


@CASES.add(each={name: TRANSFORMS[name] for name in ("grad", "jvp", "jacfwd")}, cold=True)
def transform_cold(use: Use, change: Callable[..., Any]) -> Any:
    return change(*_functional(use, nn.GRU, warm=False), batch(2, 2, F).detach())


@CASES.add(slow=True)
def linearized(use: Use) -> Any:
    (loss, weights), x_TBF = _functional(use, nn.GRU, warm=True), batch(2, 2, F).detach()
    return torch.func.linearize(lambda x: loss(weights, x), x_TBF)[1](x_TBF)


FUNCTIONAL: dict[str, Callable[[Any, torch.Tensor], Any]] = {
    "jacobian": torch.autograd.functional.jacobian,
    "jacobian-at-once": lambda run, x: torch.autograd.functional.jacobian(run, x, vectorize=True),
    "hessian": lambda run, x: torch.autograd.functional.hessian(lambda given: loss_of(run(given)), x),
    "vjp": lambda run, x: torch.autograd.functional.vjp(lambda given: loss_of(run(given)), x),
    "jvp": lambda run, x: torch.autograd.functional.jvp(run, x, torch.ones_like(x)),
    "hvp": lambda run, x: torch.autograd.functional.hvp(lambda given: loss_of(run(given)), x, torch.ones_like(x)),
}


@CASES.add(
    each={f"{name}-{state}": (FUNCTIONAL[name], TEMPERATURES[state]) for name in FUNCTIONAL for state in TEMPERATURES}
)
def autograd_functional(use: Use, given: tuple[Callable[..., Any], bool]) -> Any:
    change, warm = given
    model = _warmed(use(nn.GRU(F, use.H).double()), warm)
    return change(lambda x: model(x)[0], batch(2, 1, F))


@CASES.add(each=KINDS)
def batched_gradients(use: Use, layer: type[nn.RNNBase]) -> Any:
    model, x_TBF = use(layer(F, use.H).double()), batch(2, 2, F)
    y, _ = model(x_TBF)
    directions = torch.eye(y.numel(), dtype=y.dtype).view(-1, *y.shape)
    return torch.autograd.grad(y, [x_TBF, *model.parameters()], directions, is_grads_batched=True)


@CASES.add(each=KINDS)
def gradients_by_vmap(use: Use, layer: type[nn.RNNBase]) -> Any:
    """Of a layer that was called before, as Jacobians are made row by row."""
    model, x_TBF = use(layer(F, use.H, num_layers=2, bidirectional=True).double()), batch(2, 2, F)
    y, _ = model(x_TBF)
    wanted, directions = [x_TBF, *model.parameters()], torch.eye(y.numel(), dtype=y.dtype).view(-1, *y.shape)
    return torch.vmap(lambda d: torch.autograd.grad(y, wanted, d, retain_graph=True))(directions)


@CASES.add(each=KINDS)
def dual_gradient(use: Use, layer: type[nn.RNNBase]) -> Any:
    model, x_TBF = use(layer(F, use.H).double()), batch()
    y, _ = model(x_TBF)
    with forward_ad.dual_level():
        d = forward_ad.make_dual(torch.randn_like(y), torch.randn_like(y))
        found = torch.autograd.grad(y, [x_TBF, *model.parameters()], d)
        return [tuple(forward_ad.unpack_dual(gradient)) for gradient in found]


@CASES.add(each={"batched": {}, "fast": {"fast_mode": True}, "forward": {"check_forward_ad": True, "fast_mode": True}})
def checks_of_gradients(use: Use, options: dict[str, Any]) -> bool:
    model = use(nn.GRU(2, 2).double())
    options = {"check_batched_grad": True, "check_undefined_grad": True, **options}
    return gradcheck(lambda x, state: model(x, state)[0], (batch(2, 2, 2), batch(1, 2, 2)), **options)


@CASES.add(each={**{kind: (KINDS[kind], True) for kind in KINDS}, "no-grad": (nn.GRU, False)})
def dual_input(use: Use, given: tuple[type[nn.RNNBase], bool]) -> Any:
    layer, with_gradients = given
    model = use(layer(F, use.H).double())
    with torch.set_grad_enabled(with_gradients), forward_ad.dual_level():
        y = model(forward_ad.make_dual(batch(), torch.randn(T, B, F).double()))[0]
        return tuple(part.detach() for part in forward_ad.unpack_dual(y) if part is not None)


@CASES.add(each=TEMPERATURES)
def dual_weights(use: Use, warm: bool) -> Any:
    model = _warmed(use(nn.LSTM(F, use.H).double()), warm)
    with forward_ad.dual_level():
        weights = {name: forward_ad.make_dual(p.detach(), torch.randn_like(p)) for name, p in model.named_parameters()}
        y = functional_call(model, weights, (batch(),))[0]
        return tuple(part.detach() for part in forward_ad.unpack_dual(y) if part is not None)


@CASES.add(
    each={
        **{kind: (KINDS[kind], {"num_layers": 2}) for kind in KINDS},
        "both-ways": (nn.GRU, {"bidirectional": True, "bias": False}),
        "projected": (nn.LSTM, {"proj_size": 2}),
    }
)
def gradients_per_sample(use: Use, given: tuple[type[nn.RNNBase], dict[str, Any]]) -> Any:
    layer, options = given
    model = use(layer(F, use.H, batch_first=True, **options).double())
    result = call_for_per_sample_grads(model, batch_size=B)(batch(B, T, F))
    loss_of(result).backward()
    return [parameter.grad_sample for parameter in model.parameters()]


@CASES.add(raises=RuntimeError)
def vmap_over_batches(use: Use) -> None:
    model = use(nn.GRU(F, use.H).double())
    torch.func.vmap(lambda x: model(x)[0])(batch(2, T, B, F).detach())


@CASES.add(raises=RuntimeError)
def vmap_over_an_ensemble(use: Use) -> None:
    models = [use(nn.GRU(F, use.H).double()) for _ in range(2)]
    weights, buffers = torch.func.stack_module_state(models)
    x_TBF = batch().detach()
    torch.func.vmap(lambda w, b: functional_call(models[0], (w, b), (x_TBF,))[0])(weights, buffers)


# Modes and subclasses


@CASES.add(each=TEMPERATURES, cold=True)
def traced_by_make_fx(use: Use, warm: bool) -> Any:
    model, x_TBF = _warmed(use(nn.GRU(F, use.H).double()), warm).requires_grad_(False), batch().detach()
    graph = make_fx(lambda x: model(x)[0])(x_TBF)
    return graph(x_TBF), graph(x_TBF + 1), sorted({str(node.target) for node in graph.graph.nodes})


@CASES.add(each={"gru": nn.GRU, "lstm": nn.LSTM})
def fake_tensors(use: Use, layer: type[nn.RNNBase]) -> Any:
    with FakeTensorMode():
        model = use(layer(F, use.H, dtype=torch.float64))
        y, _ = model(torch.randn(T, B, F, dtype=torch.float64))
        loss_of(y).backward()
        return tuple(y.shape), type(y).__name__, [tuple(p.grad.shape) for p in model.parameters()]


@CASES.add()
def fake_tensors_of_a_real_layer(use: Use) -> Any:
    model = _warmed(use(nn.GRU(F, use.H).double()), True)
    with FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y, _ = model(mode.from_tensor(torch.randn(T, B, F, dtype=torch.float64)))
    return tuple(y.shape), type(y).__name__


def test_accelerating_among_fake_tensors_waits_with_tracing() -> None:
    layer = nn.GRU(F, next(FRESH_SIZES))
    with FakeTensorMode(allow_non_fake_inputs=True):
        stretto.accelerate(layer, backend="cpp")
    layer(batch(dtype=torch.float32))
    assert stretto.explain(layer).layers[0].backend == "cpp"


CONTEXTS: dict[str, Callable[[], Any]] = {
    "inference": torch.inference_mode,
    "anomaly": lambda: torch.autograd.set_detect_anomaly(True),
    "hooks-disabled": lambda: torch.autograd.graph.disable_saved_tensors_hooks("disabled"),
}


@pytest.mark.parametrize("name", CONTEXTS)
@pytest.mark.parametrize("is_layer", [True, False], ids=["layer", "cell"])
def test_a_first_call_in_a_context_gets_generated_code(name: str, is_layer: bool) -> None:
    """Whatever the first caller has switched on: what is built is kept for everybody."""
    H, x_TBF = next(FRESH_SIZES), batch(dtype=torch.float32)
    first, second = (nn.GRU(F, H) if is_layer else stretto.RNN(stretto.cells.GRU(F, H)) for _ in range(2))
    with CONTEXTS[name]():
        stretto.accelerate(first, backend="cpp")(x_TBF.detach())
    loss_of(stretto.accelerate(second, backend="cpp")(x_TBF)).backward()
    for model in (first, second):
        assert [layer.backend for layer in stretto.explain(model).layers] == ["cpp"]


def test_measuring_does_not_depend_on_the_context() -> None:
    """The first call of "auto", which also measures, within all of them."""
    model, x_TBF = stretto.accelerate(nn.GRU(F, next(FRESH_SIZES))), batch(dtype=torch.float32)
    with CONTEXTS["anomaly"](), CONTEXTS["hooks-disabled"]():
        loss_of(model(x_TBF)).backward()
        assert torch.is_anomaly_enabled()
        with pytest.raises(RuntimeError, match="disabled"), torch.autograd.graph.save_on_cpu():
            pass
    assert not torch.is_anomaly_enabled()
    with torch.autograd.graph.save_on_cpu():
        loss_of(model(x_TBF)).backward()


@CASES.add(each={"context": False, "default": True})
def default_device(use: Use, is_default: bool) -> Any:
    model, x_TBF, state = use(nn.GRU(F, use.H).double()), batch(), torch.zeros(1, B, use.H).double()
    if not is_default:
        with torch.device("meta"):
            return learn(model, x_TBF, state)
    try:
        torch.set_default_device("meta")
        return learn(model, x_TBF, state)
    finally:
        torch.set_default_device(None)


@CASES.add()
def default_precision(use: Use) -> Any:
    try:
        torch.set_default_dtype(torch.float64)
        return learn(use(nn.GRU(F, use.H)), batch()), learn(use(nn.LSTM(F, use.H).float()), batch().float())
    finally:
        torch.set_default_dtype(torch.float32)


def _halves(result: Any) -> Any:
    return (result.a, result.b) if isinstance(result, TwoTensor) else result


@CASES.add(each=KINDS)
def wrapped_input(use: Use, layer: type[nn.RNNBase]) -> Any:
    model = use(layer(F, use.H).double()).requires_grad_(False)
    x_TBF = batch().detach()
    return _halves(model(TwoTensor(x_TBF, x_TBF + 1))[0])


@CASES.add()
def wrapped_weights(use: Use) -> Any:
    model = use(nn.GRU(F, use.H).double()).requires_grad_(False)
    weights = {name: TwoTensor(p.data, p.data * 2) for name, p in model.named_parameters()}
    return _halves(functional_call(model, weights, (batch().detach(),))[0])


class Tagged(torch.Tensor):
    """A subclass that only has another name."""


@CASES.add(each={"input": True, "weights": False})
def plain_subclass(use: Use, is_input: bool) -> Any:
    model, x_TBF = use(nn.GRU(F, use.H).double()), batch().detach()
    if is_input:
        return model(x_TBF.as_subclass(Tagged))
    weights = {name: p.detach().as_subclass(Tagged) for name, p in model.named_parameters()}
    return functional_call(model, weights, (x_TBF,))


class Counter(torch.overrides.TorchFunctionMode):
    """Sees every function of torch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


@CASES.add()
def function_mode(use: Use) -> Any:
    model = use(nn.GRU(F, use.H).double())
    with Counter():
        return learn(model, batch())


@CASES.add()
def counted_operations(use: Use) -> Any:
    model = use(nn.GRU(F, use.H).double())
    with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
        model(batch())
    return counter.get_total_flops()


@pytest.fixture(scope="module")
def one_rank() -> Iterator[None]:
    """A world of one process."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, 1, is_master=True)
    torch.distributed.init_process_group("gloo", rank=0, world_size=1, store=store)
    yield
    torch.distributed.destroy_process_group()


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_distributed_tensors_as_input(backend: str) -> None:
    from torch.distributed.tensor import Replicate, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cpu", (1,))

    def run(use: Use) -> Any:
        model = use(nn.GRU(F, use.H).double())
        return model(distribute_tensor(batch().detach(), mesh, [Replicate()]))

    Behaviour(run=run, raises=RuntimeError).check(backend)


@pytest.mark.usefixtures("one_rank")
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_data_parallel(backend: str) -> None:
    def run(use: Use) -> Any:
        model = use(nn.Sequential(First(nn.LSTM(F, use.H, num_layers=2)), nn.Linear(use.H, 2)).double())
        return learn(nn.parallel.DistributedDataParallel(model), batch())

    Behaviour(run=run).check(backend)
