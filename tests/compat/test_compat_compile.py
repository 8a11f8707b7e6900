"""Layers as operators in one compiled graph: `torch.compile(fullgraph=True)` computes what eager mode does.

Dynamo refuses torch's recurrent layers unless `torch._dynamo.config.allow_rnn` is set; accelerated ones it traces.
Shape legend: B sequences, T steps, F features, H hidden units.
"""

import copy
import gc
import subprocess
import sys
from collections.abc import Iterable, Iterator
from typing import Any, Final

import pytest
import torch
import torch._dynamo
from compat_cases import assert_same, batch, gradients, loss_of
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence

import stretto
from stretto.kernels import register_operators

F, H = 5, 6
SHAPES: Final = [(4, 3, F), (7, 2, F), (3, 9, F)]
COMPILERS: Final = ["aot_eager", *(pytest.param(name, marks=pytest.mark.slow) for name in ("eager", "inductor"))]
pytestmark = pytest.mark.usefixtures("quick_compiler")

LAYERS: Final[dict[str, tuple[type[nn.RNNBase], dict[str, Any]]]] = {
    "lstm": (nn.LSTM, {}),
    "gru-two-layers": (nn.GRU, {"num_layers": 2}),
    "rnn-both-ways": (nn.RNN, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    "relu": (nn.RNN, {"nonlinearity": "relu", "bias": False}),
    "projected": (nn.LSTM, {"proj_size": 3, "num_layers": 2}),
}


@pytest.fixture(autouse=True)
def one_graph() -> Iterator[None]:
    """A fresh compiler, whose settings stay as they are."""
    torch.manual_seed(0)
    torch._dynamo.utils.counters.clear()
    yield
    assert not torch._dynamo.config.allow_rnn
    torch._dynamo.reset()


def one_quick(names: Iterable[str], quick: str) -> list[Any]:
    """All of them, of which one is not slow."""
    return [name if name == quick else pytest.param(name, marks=pytest.mark.slow) for name in names]


@pytest.fixture(params=one_quick(LAYERS, "rnn-both-ways"))
def layer(request: pytest.FixtureRequest) -> nn.RNNBase:
    kind, options = LAYERS[request.param]
    return kind(F, H, **options).double()


class Scaled(stretto.Cell):
    """A cell of a single loop that linear maps feed, which is one operator in eager mode; with a setting."""

    def __init__(self, input_size: int, hidden_size: int) -> None:
        super().__init__()
        self.input_size, self.hidden_size, self.scale = input_size, hidden_size, 0.3
        self.inward, self.around = nn.Linear(input_size, hidden_size), nn.Linear(hidden_size, hidden_size)

    def initial_state(self, batch_size: int) -> Any:
        return self.zeros(batch_size, self.hidden_size)

    def forward(self, x_t: torch.Tensor, h: torch.Tensor) -> Any:
        new = h + self.scale * (torch.tanh(self.inward(x_t) + self.around(h)) - h)
        return new, new


class Gated(Scaled):
    """One with work on all steps at once before and after its loop, which is several operators."""

    def initial_state(self, batch_size: int) -> Any:
        return self.zeros(batch_size, self.hidden_size), self.zeros(batch_size, 1)

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        h, total = state
        h = h + self.scale * torch.tanh(torch.sigmoid(self.inward(x_t)) * self.around(h))
        return torch.relu(h) * x_t.mean(1, keepdim=True), (h, total + h.mean(1, keepdim=True))


CELLS: Final[dict[str, type[stretto.Cell]]] = {"lstm": stretto.cells.LSTM, "scaled": Scaled, "gated": Gated}


@pytest.fixture(params=one_quick(CELLS, "gated"))
def cell(request: pytest.FixtureRequest) -> stretto.Cell:
    return CELLS[request.param](F, H).double()  # type: ignore[call-arg]


def learn(run: Any, model: nn.Module, *given: Any) -> Any:
    """Results, and the gradients of their loss by all inputs and parameters."""
    model.zero_grad()
    leaves = [tensor.detach().clone().requires_grad_() for tensor in given]
    state = leaves[1:]
    result = run(leaves[0], *([tuple(state) if len(state) > 1 else state[0]] if state else []))
    loss_of(result).backward()
    return result, gradients(model), [leaf.grad for leaf in leaves]


def check(model: nn.Module, eager: nn.Module, *inputs: Any, backend: str = "aot_eager", **options: Any) -> None:
    """One graph trains as `eager` does, with and without gradients."""
    fast = torch.compile(model, backend=backend, fullgraph=True, **options)
    for given in inputs:
        assert_same(learn(fast, model, *given), learn(eager, eager, *given))
        with torch.no_grad():
            assert_same(fast(given[0]), eager(given[0]))
    assert not torch._dynamo.utils.counters["graph_break"]


def operators_in(model: nn.Module, *given: Any) -> list[str]:
    """The functions of the graph that Dynamo traces."""
    found: list[str] = []

    def read(graph: torch.fx.GraphModule, _: Any) -> Any:
        found.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    torch.compile(model, backend=read, fullgraph=True)(*given)
    return [name for name in found if "stretto" in name or "lstm" in name or "gru" in name or "rnn" in name]


# Torch's layers


@pytest.mark.parametrize("backend", COMPILERS)
def test_layers_train_in_one_graph(layer: nn.RNNBase, backend: str) -> None:
    fast = stretto.accelerate(copy.deepcopy(layer), backend="cpp")
    check(fast, layer, *[(batch(*shape),) for shape in SHAPES], backend=backend)


def test_layers_train_in_single_precision(layer: nn.RNNBase) -> None:
    layer = layer.float()
    fast = stretto.accelerate(copy.deepcopy(layer), backend="cpp")
    check(fast, layer, *[(batch(*shape, dtype=torch.float32),) for shape in SHAPES])


@pytest.mark.parametrize("backend", ["cpp", "eager"])
def test_layers_are_operators_of_the_graph(layer: nn.RNNBase, backend: Any) -> None:
    stretto.accelerate(layer, backend=backend)
    found = operators_in(layer, batch(*SHAPES[0]))
    assert found == ["stretto.recurrent"] * layer.num_layers


def test_plain_layers_are_refused_as_ever() -> None:
    model = nn.Sequential(nn.GRU(F, H), stretto.accelerate(nn.GRU(F, H)))
    with pytest.raises(torch._dynamo.exc.Unsupported, match="allow_rnn=True"):
        torch.compile(model[0], backend="eager", fullgraph=True)(torch.randn(*SHAPES[0]))


def test_exporters_say_themselves_whether_layers_are_traced() -> None:
    for layer in (nn.GRU(F, H), stretto.accelerate(nn.GRU(F, H), backend="cpp")):
        with pytest.raises(torch._dynamo.exc.Unsupported, match="allow_rnn=True"):
            torch._dynamo.export(layer)(batch(*SHAPES[0]))


def test_without_fullgraph_the_graph_breaks_as_with_plain_layers() -> None:
    counts = []
    for layer in (nn.GRU(F, H), stretto.accelerate(nn.GRU(F, H), backend="cpp")):
        model = nn.Sequential(nn.Linear(F, F), layer)
        explained = torch._dynamo.explain(model)(torch.randn(*SHAPES[0]))
        counts.append((explained.graph_count, explained.graph_break_count))
        torch._dynamo.reset()
    assert counts[0] == counts[1]
    assert stretto.explain(model).layers[0].calls == 1


def test_what_only_torch_can_run_is_torchs_in_the_graph(layer: nn.RNNBase) -> None:
    plain, x = copy.deepcopy(layer), batch(*SHAPES[0])
    stretto.accelerate(layer, backend="cpp")
    with torch._dynamo.config.patch(allow_rnn=True):
        for dtype in (torch.float64, torch.bfloat16):
            with torch.autocast("cpu", enabled=dtype == torch.float64):
                wanted, found = operators_in(plain.to(dtype), x.to(dtype)), operators_in(layer.to(dtype), x.to(dtype))
            assert found == wanted != []
            torch._dynamo.reset()


def test_autocast_computes_what_it_does_for_plain_layers() -> None:
    layer, x = nn.GRU(F, H), torch.randn(*SHAPES[0])
    fast = stretto.accelerate(copy.deepcopy(layer), backend="cpp")
    with torch.autocast("cpu"):
        found, wanted = torch.compile(fast, backend="aot_eager", fullgraph=True)(x), layer(x)
    assert_same(found, wanted)


def test_numbers_are_those_of_eager_mode(layer: nn.RNNBase) -> None:
    fast = stretto.accelerate(layer, backend="cpp")
    run = torch.compile(fast, backend="aot_eager", fullgraph=True)
    for shape in SHAPES:
        x = batch(*shape)
        (found, _), (wanted, _) = run(x), fast(x)
        assert torch.equal(found, wanted)
        if not layer.bidirectional and layer.num_layers == 1:
            parameters = list(fast.parameters())
            mine, own = (torch.autograd.grad(loss_of(y), parameters) for y in (found, wanted))
            assert all(torch.equal(one, other) for one, other in zip(mine, own, strict=True))


def test_a_compiler_that_is_imported_later_admits_accelerated_layers_too() -> None:
    program = """
import sys, torch, stretto
model = stretto.accelerate(torch.nn.Sequential(torch.nn.GRU(3, 4)), backend="eager")
assert "torch._dynamo" not in sys.modules
assert torch.compile(model, backend="eager", fullgraph=True)(torch.randn(2, 2, 3))[0].shape == (2, 2, 4)
"""
    subprocess.run([sys.executable, "-c", program], check=True, timeout=300)


def test_calls_in_graphs_are_counted() -> None:
    model = stretto.accelerate(nn.Sequential(nn.GRU(F, 19, num_layers=2, bidirectional=True)), backend="cpp")
    run, x = torch.compile(model, backend="aot_eager", fullgraph=True), torch.randn(*SHAPES[0])
    for _ in range(3):
        loss_of(run(x)).backward()
    (found,) = stretto.explain(model).layers
    assert (found.backend, found.calls, found.compiled_calls) == ("cpp", None, 3)
    model(x)
    assert "cpp, 1 call, 3 in compiled graphs" in str(stretto.explain(model))


def test_layers_take_a_state_and_a_single_sequence(layer: nn.RNNBase) -> None:
    num, out = layer.num_layers * (2 if layer.bidirectional else 1), layer.proj_size or H
    for shape in ((4, 4, F), (4, F)):
        rows = shape[1:-1]
        state = [batch(num, *rows, out), *([batch(num, *rows, H)] if layer.mode == "LSTM" else [])]
        fast = stretto.accelerate(copy.deepcopy(layer), backend="cpp")
        check(fast, layer, (batch(*shape), *state))


def test_sizes_that_vary_compile_once(layer: nn.RNNBase) -> None:
    fast = stretto.accelerate(copy.deepcopy(layer), backend="cpp")
    run = torch.compile(fast, backend="aot_eager", fullgraph=True, dynamic=True)
    marked = torch.compile(fast, backend="aot_eager", fullgraph=True)
    for shape in SHAPES:
        x = batch(*shape).detach()
        assert_same(learn(run, fast, x), learn(layer, layer, x))
        torch._dynamo.mark_dynamic(x, 0)
        torch._dynamo.mark_dynamic(x, 1)
        with torch.no_grad():
            assert_same(marked(x), layer(x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2


def test_a_layer_may_be_called_twice_and_its_weights_computed() -> None:
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.utils.parametrizations.weight_norm(nn.GRU(F, F).double(), "weight_hh_l0")

        def forward(self, x: torch.Tensor) -> Any:
            return self.layer(self.layer(x)[0] * 2)

    model = Twice()
    check(stretto.accelerate(copy.deepcopy(model), backend="cpp"), model, (batch(*SHAPES[0]),))


def test_dropout_between_layers_is_that_of_eager_mode() -> None:
    layer = nn.LSTM(F, H, num_layers=3, dropout=0.5).double()
    fast = stretto.accelerate(copy.deepcopy(layer), backend="cpp")
    run, x = torch.compile(fast, backend="eager", fullgraph=True), batch(*SHAPES[0])
    found = []
    for call, model in ((run, fast), (layer, layer)):
        torch.manual_seed(3)
        found.append(learn(call, model, x))
    assert_same(*found)
    assert_same(run.eval()(x), layer.eval()(x))


@pytest.mark.parametrize("shape", [(0, 3, F), (4, 3, F - 1), (4, F, 3, F)], ids=["empty", "narrow", "four-dims"])
def test_what_torch_refuses_is_refused(shape: tuple[int, ...]) -> None:
    for layer in (nn.GRU(F, H).double(), stretto.accelerate(nn.GRU(F, H).double(), backend="auto")):
        with pytest.raises((RuntimeError, ValueError)):
            torch.compile(layer, backend="eager", fullgraph=True)(batch(*shape))


@pytest.mark.parametrize("allowed", [False, True])
def test_lengths_and_packed_batches_break_the_graph(allowed: bool) -> None:
    layer = nn.GRU(F, H).double()
    fast, x = stretto.accelerate(copy.deepcopy(layer), backend="cpp"), batch(*SHAPES[0]).detach()
    packed = pack_padded_sequence(x, torch.tensor([4, 2, 1]))
    with torch._dynamo.config.patch(allow_rnn=allowed):
        for call in (lambda model: model(packed), lambda model: model(x, lengths=[4, 2, 1])):
            with pytest.raises(torch._dynamo.exc.Unsupported, match="compile with fullgraph=False"):
                torch.compile(call, backend="eager", fullgraph=True)(fast)
            torch._dynamo.reset()
            assert_same(torch.compile(call, backend="eager")(fast), call(fast))


# stretto.RNN


@pytest.mark.parametrize("backend", COMPILERS)
def test_any_cell_trains_in_one_graph(cell: stretto.Cell, backend: str) -> None:
    eager = stretto.RNN(cell, backend="torch")
    check(stretto.RNN(copy.deepcopy(cell)), eager, *[(batch(*shape),) for shape in SHAPES], backend=backend)


def test_layers_and_directions_of_any_cell(cell: stretto.Cell) -> None:
    for options in ({"num_layers": 2, "bidirectional": True}, {"num_layers": 2, "batch_first": False}):
        rnn = stretto.RNN(copy.deepcopy(cell), **options).double()  # type: ignore[arg-type]
        eager = copy.deepcopy(rnn)
        eager.backend = "torch"
        check(rnn, eager, *[(batch(*shape),) for shape in SHAPES])
        assert operators_in(rnn, batch(*SHAPES[0])) == ["stretto.recurrent"] * 2


def test_any_cell_takes_a_state_and_a_single_sequence(cell: stretto.Cell) -> None:
    eager = stretto.RNN(cell, backend="torch")
    own = cell.initial_state(4)
    state = [torch.randn_like(part) for part in (own if isinstance(own, tuple) else [own])]
    check(stretto.RNN(copy.deepcopy(cell)), eager, (batch(4, 3, F), *state))
    torch._dynamo.reset()
    check(stretto.RNN(copy.deepcopy(cell)), eager, (batch(4, F),))


def test_any_cell_compiles_once_for_sizes_that_vary(cell: stretto.Cell) -> None:
    eager = stretto.RNN(cell, backend="torch")
    rnn = stretto.RNN(copy.deepcopy(cell))
    run = torch.compile(rnn, backend="aot_eager", fullgraph=True, dynamic=True)
    for shape in SHAPES:
        x = batch(*shape).detach()
        assert_same(learn(run, rnn, x), learn(eager, eager, x))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


def test_a_graph_follows_the_settings_of_a_cell() -> None:
    rnn, x = stretto.RNN(Scaled(F, H).double()), batch(*SHAPES[0])
    run = torch.compile(rnn, backend="aot_eager", fullgraph=True)
    before = run(x)[0]
    rnn.cells[0].scale = 0.7
    after = run(x)[0]
    assert not torch.equal(before, after)
    assert_same(after, rnn(x)[0])


class Noisy(Scaled):
    """A cell that drops some of its state."""

    def forward(self, x_t: torch.Tensor, h: torch.Tensor) -> Any:
        return super().forward(x_t, nn.functional.dropout(h, 0.5, training=self.training))


def test_a_cell_that_draws_random_numbers_breaks_the_graph() -> None:
    rnn, x = stretto.RNN(Noisy(F, H).double()), batch(*SHAPES[0])
    with pytest.raises(torch._dynamo.exc.Unsupported, match="compile with fullgraph=False"):
        torch.compile(rnn, backend="eager", fullgraph=True)(x)
    torch._dynamo.reset()
    rnn.eval()
    assert_same(torch.compile(rnn, backend="eager", fullgraph=True)(x), rnn(x))


def test_an_operator_without_its_layer_says_so() -> None:
    rnn, names = stretto.RNN(Scaled(F, H).double()), []

    def read(graph: torch.fx.GraphModule, _: Any) -> Any:
        names.extend(node.args for node in graph.graph.nodes if "stretto" in str(node.target))
        return graph

    torch.compile(rnn, backend=read, fullgraph=True)(batch(*SHAPES[0]))
    name = names[0][1]
    del rnn
    torch._dynamo.reset()
    gc.collect()
    with pytest.raises(stretto.StrettoError, match="is gone"):
        torch.ops.stretto.recurrent([batch(*SHAPES[0])], name, False)


def test_a_state_of_another_dtype_is_named() -> None:
    rnn = stretto.RNN(Scaled(F, H).double())
    with pytest.raises(Exception, match="state of a recurrent layer"):
        torch.compile(rnn, backend="eager", fullgraph=True)(batch(*SHAPES[0]), torch.zeros(4, H))


# The operators

ODD_SIZES: Final = [(1, 1, 1), (1, 3, 5), (2, 17, 1), (7, 1, 33), (7, 3, 33), (2, 17, 5)]
"""T, B, H"""
OPERATORS: Final = [
    *[(Scaled, 1, sizes) for sizes in ODD_SIZES],
    *[(stretto.cells.LSTM, 2, sizes) for sizes in ODD_SIZES[2:5]],
    (Gated, 1, (7, 3, 5)),
    (Gated, 2, (2, 17, 1)),
]


@pytest.mark.parametrize(
    ("kind", "num_directions", "sizes", "dtype"),
    [
        pytest.param(*case, dtype, marks=pytest.mark.slow if index or is_single else ())
        for index, case in enumerate(OPERATORS)
        for is_single, dtype in enumerate((torch.float64, torch.float32))
    ],
)
def test_operators_keep_the_rules_of_torch_library(
    kind: Any, num_directions: int, sizes: tuple[int, int, int], dtype: torch.dtype
) -> None:
    num_steps, num_rows, hidden = sizes
    rnn, calls = stretto.RNN(kind(F, hidden).to(dtype), bidirectional=num_directions == 2).to(dtype), []

    def read(graph: torch.fx.GraphModule, _: Any) -> Any:
        calls.extend(node.args for node in graph.graph.nodes if "stretto" in str(node.target))
        return graph

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=dtype, requires_grad=True)

    torch.compile(rnn, backend=read, fullgraph=True)(random(num_rows, num_steps, F))
    (_, names, keep), inputs = calls[0], []
    for cell in rnn.cells:
        state: Any = cell.initial_state(num_rows)  # type: ignore[operator]
        states = state if isinstance(state, tuple) else (state,)
        program: Any = rnn.last_built.program  # type: ignore[union-attr]
        assert hidden == 1 or (program.operator is None) == (kind is Gated)
        inputs += [random(num_steps, num_rows, F), *[random(*part.shape) for part in states]]
        inputs += [dict(cell.named_parameters())[name] for name in program.plan.graph.parameters]
    torch.library.opcheck(torch.ops.stretto.recurrent.default, (inputs, names, keep))
    made = torch.ops.stretto.recurrent(inputs, names, keep)
    count = (len(states) + 1) * num_directions
    kept = list(made[count:])
    given, saved = [tensor.detach() for tensor in inputs], [tensor.detach() for tensor in kept]
    cotangents = [torch.randn_like(tensor) for tensor in made[:count]]
    arguments = (given, saved, cotangents, names, [True] * len(inputs))
    torch.library.opcheck(torch.ops.stretto.recurrent_backward.default, arguments)
    found = torch.ops.stretto.recurrent_backward(*arguments)
    assert_same(list(found), list(torch.autograd.grad(made[:count], inputs, cotangents)))


def test_inputs_that_do_not_fit_are_refused() -> None:
    register_operators()
    name = "torch:RNN_TANH:5:6:0:0:float32:eager"
    for shapes in ([(4, 3, F), (2, H), (H, F), (H, H)], [(4, 3, F), (3, H), (H, H), (H, F)], [(4, 3, F), (3, H)]):
        with pytest.raises(stretto.StrettoError, match="recurrent layer"):
            torch.ops.stretto.recurrent([torch.randn(*shape) for shape in shapes], name, False)
