"""`stretto.RNN` and cells of a user's own: warnings, casts and errors.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

import copy
import warnings
from collections.abc import Callable
from typing import Any, Final, get_args

import pytest
import torch
from torch import nn

import stretto
from rounding import assert_as_exact
from stretto.errors import StrettoError
from stretto.kernels import Backend
from stretto.nn.rnn import MAX_BUILT
from stretto.nn.torch_layers import ON_GPUS

B, T, F, H = 3, 6, 3, 4
Step = Callable[..., Any]


class OwnCell(stretto.Cell):
    """h' = tanh(A x + U h), by a step that is given."""

    step: Step

    def __init__(self, input_size: int = F, hidden_size: int = H) -> None:
        super().__init__()
        self.input_size, self.hidden_size = input_size, hidden_size
        self.a, self.u = nn.Linear(input_size, hidden_size), nn.Linear(hidden_size, hidden_size)

    def initial_state(self, batch_size: int) -> Any:
        return self.zeros(batch_size, self.hidden_size)

    def sum(self, x_t: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        total: torch.Tensor = self.a(x_t) + self.u(h)
        return total

    def new(self, x_t: torch.Tensor, h: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.sum(x_t, h))

    def forward(self, x_t: torch.Tensor, state: Any) -> Any:
        return type(self).step(self, x_t, state)


def cell_of(step: Step, *, name: str = "Own") -> type[OwnCell]:
    return type(name, (OwnCell,), {"step": step})


def twice(value: Any) -> tuple[Any, Any]:
    return value, value


# Warnings


def _reads(cell: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    return twice(cell.new(x, h) if h.sum().item() < 99 else h)


def _casts(cell: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    return twice(((cell.sum(x, h).double() + 1e6) - 1e6).tanh().float())


def _rare(cell: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    return twice(cell.new(x, torch.special.i0e(h + 3)))


def _usual(cell: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    return twice(cell.new(x, h))


def warnings_of(layer: stretto.RNN, *, times: int = 2) -> list[str]:
    """The warnings of some calls."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(times):
            layer(torch.randn(B, T, F))
    assert all(item.category is UserWarning for item in caught)
    return [str(item.message) for item in caught]


@pytest.mark.parametrize(
    ("step", "backend", "runs", "words"),
    [
        (_reads, "auto", "torch", "not by 'cpp': the step reads values with _local_scalar_dense"),
        (_reads, "eager", "torch", "not by 'eager': the step reads values"),
        (_rare, "auto", "torch", "not by 'cpp': no code is generated for the operator special_i0e"),
    ],
)
def test_a_cell_without_generated_code_says_so_once(step: Step, backend: Backend, runs: str, words: str) -> None:
    cell = cell_of(step, name=f"Warned{backend}{runs}")
    (text,) = warnings_of(stretto.RNN(cell(), backend=backend))
    assert text.startswith(f"{cell.__name__} runs by backend {runs!r}")
    assert words in text
    assert f"choose backend={runs!r}" in text
    assert warnings_of(stretto.RNN(cell(), backend=backend)) == []
    assert len(warnings_of(stretto.RNN(cell_of(step, name=f"Other{cell.__name__}")(), backend=backend))) == 1


@pytest.mark.parametrize(
    ("step", "backend"), [(_reads, "torch"), (_casts, "eager"), (_casts, "torch"), (_usual, "auto"), (_usual, "eager")]
)
def test_a_backend_that_was_asked_for_gives_no_warning(step: Step, backend: Backend) -> None:
    assert warnings_of(stretto.RNN(cell_of(step, name="AskedFor")(), backend=backend)) == []


def test_a_plan_that_was_asked_for_does_not_keep_the_warning_from_the_first_batch() -> None:
    layer = stretto.RNN(cell_of(_reads, name="Explained")())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert layer.explain().backend == "torch"
    assert len(warnings_of(layer)) == 1


# Casts


def _double_product(cell: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    return twice((h.double() @ cell.u.weight.double() + 1e6 - 1e6 + cell.a(x)).tanh().float())


def _promoted(cell: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    table = torch.tensor([1e7, 1e7, 1e7, 1e7], dtype=torch.float64, device=h.device)
    return twice(((cell.sum(x, h) + table) - table).tanh().float())


def _double_output(cell: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    new = cell.new(x, h)
    return (new.double() + 1e9) - 1e9, new


def _double_state(cell: Any, x: torch.Tensor, state: Any) -> Any:
    h, total = state
    total = total + cell.new(x, h).double() / 3
    return total.float(), ((total * 3).tanh().float(), total)


def _rounded(cell: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    return twice(cell.sum(x, h).float().double().tanh())


def _rounded_constant(cell: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
    return twice((cell.sum(x, h) + torch.full((len(x), H), 0.1, dtype=torch.float32)).tanh())


CASTS: Final[dict[str, tuple[Step, torch.dtype]]] = {
    "sum": (_casts, torch.float32),
    "product": (_double_product, torch.float32),
    "promotion": (_promoted, torch.float32),
    "output": (_double_output, torch.float32),
    "state": (_double_state, torch.float32),
    "rounded": (_rounded, torch.float64),
    "constant": (_rounded_constant, torch.float64),
}


@pytest.mark.filterwarnings("ignore:.* runs by backend")
@pytest.mark.parametrize("backend", ["auto", "eager"])
@pytest.mark.parametrize("name", CASTS)
def test_casts_inside_a_cell_are_honoured(name: str, backend: Backend) -> None:
    """Each would be off by more than the tolerance in the precision of the weights."""
    step, dtype = CASTS[name]
    torch.manual_seed(0)
    cell = cell_of(step)().to(dtype)
    if name == "state":
        zeros = cell.zeros
        cell.initial_state = lambda rows: (zeros(rows, H), zeros(rows, H).double())  # type: ignore[method-assign]
    x_BTF = torch.randn(B, T, F, dtype=dtype).requires_grad_()
    found, wanted = stretto.RNN(cell, backend=backend)(x_BTF), _defined(cell, x_BTF)
    inputs = [x_BTF, *cell.parameters()]
    tolerance = 1e-12 if dtype is torch.float64 else 2e-5
    for one, other in ((found, wanted), (_gradients(found, inputs), _gradients(wanted, inputs))):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance)


def _defined(cell: OwnCell, x_BTF: torch.Tensor) -> Any:
    """The plain loop."""
    state = cell.initial_state(len(x_BTF))
    outputs = []
    for x_BF in x_BTF.unbind(1):
        y, state = cell(x_BF, state)
        outputs.append(y)
    return torch.stack(outputs, 1), state


def _gradients(result: Any, inputs: list[torch.Tensor]) -> Any:
    y, state = result
    parts = state if isinstance(state, tuple) else (state,)
    loss = y.double().sin().sum() + sum(part.double().cos().sum() for part in parts)
    return torch.autograd.grad(loss, inputs, allow_unused=True)


@pytest.mark.filterwarnings("ignore:.* runs by backend")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_cell_with_parameters_of_two_dtypes_takes_either(dtype: torch.dtype) -> None:
    class TwoDtypes(OwnCell):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((H,), 0.1, dtype=torch.float64))

        def initial_state(self, batch_size: int) -> torch.Tensor:
            return torch.zeros(batch_size, H, dtype=self.u.weight.dtype)

        def forward(self, x_t: torch.Tensor, state: Any) -> Any:
            return twice((self.sum(x_t.to(state.dtype), state) * self.scale).tanh().to(state.dtype))

    torch.manual_seed(0)
    cell = TwoDtypes()
    x_BTF = torch.randn(B, T, F, dtype=dtype)
    found, wanted = stretto.RNN(cell)(x_BTF), _defined(cell, x_BTF)
    torch.testing.assert_close(found, wanted)
    found, wanted = (_gradients(result, list(cell.parameters())) for result in (found, wanted))
    twin = copy.deepcopy(cell).double()
    exact = _gradients(_defined(twin, x_BTF.float().double()), list(twin.parameters()))
    for ours, theirs, truth in zip(found, wanted, exact, strict=True):
        assert ours.dtype == theirs.dtype
        # Sums of single precision are behind the gradient of double precision too.
        assert_as_exact(ours, theirs, truth)


@pytest.mark.parametrize("name", ["sum", "rounded", "promotion"])
def test_a_cell_with_casts_is_compiled(name: str) -> None:
    step, dtype = CASTS[name]
    assert stretto.RNN(cell_of(step)().to(dtype)).explain().backend == "cpp"


@pytest.mark.parametrize("read", [lambda h: torch.from_numpy(h.detach().numpy()), lambda h: torch.tensor(h.tolist())])
@pytest.mark.filterwarnings("ignore:.* runs by backend")
def test_what_is_computed_without_pytorch_is_not_frozen(read: Callable[[torch.Tensor], torch.Tensor]) -> None:
    def step(cell: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
        return twice((cell.sum(x, h) + read(h).to(h.dtype).mean(0)).tanh())

    cell = cell_of(step)().double()
    x_BTF = torch.randn(B, T, F, dtype=torch.float64)
    torch.testing.assert_close(stretto.RNN(cell)(x_BTF), _defined(cell, x_BTF))


# Refusals


class OneArgument(OwnCell):
    def forward(self, x_t: torch.Tensor) -> Any:  # type: ignore[override]
        return twice(x_t)


class ThreeArguments(OwnCell):
    def forward(self, x_t: torch.Tensor, state: Any, mask: Any) -> Any:  # type: ignore[override]  # noqa: ARG002
        return twice(x_t)


class FourArguments(OwnCell):
    def forward(self, x_t: torch.Tensor, state: Any, mask: Any, more: Any) -> Any:  # type: ignore[override]  # noqa: ARG002
        return twice(x_t)


class NoBatchSize(OwnCell):
    step = _usual

    def initial_state(self) -> Any:  # type: ignore[override]
        return self.zeros(2, H)


class Bare(nn.Module):
    """No `stretto.Cell`, but all that one layer needs."""

    input_size = F

    def initial_state(self, batch_size: int) -> torch.Tensor:
        return torch.zeros(batch_size, F)

    def forward(self, x_t: torch.Tensor, state: torch.Tensor) -> Any:
        return twice(x_t + state)


MADE: Final[dict[str, tuple[Callable[[], Any], str]]] = {
    "no-module": (lambda: stretto.RNN(None), "None is not a cell"),  # type: ignore[arg-type]
    "a-class": (lambda: stretto.RNN(OwnCell), "OwnCell'> is not a cell"),  # type: ignore[arg-type]
    "a-layer": (lambda: stretto.RNN(nn.Linear(3, 3)), r"Linear\(.* is not a cell"),
    "a-layer-of-torch": (lambda: stretto.RNN(nn.GRU(3, 3)), r"GRU\(.* is a layer, not a cell.*accelerate.*cell_from"),
    "a-list-of-layers": (lambda: stretto.RNN([nn.Linear(3, 3)]), r"Linear\(.* is not a cell"),
    "a-tuple-of-numbers": (lambda: stretto.RNN((5,)), "5 is not a cell"),  # type: ignore[arg-type]
    "an-empty-list": (lambda: stretto.RNN([]), "0 cells were given for 1 layers"),
    "too-few": (lambda: stretto.RNN([cell_of(_usual)()], 2), "1 cells were given for 2 layers"),
    "one-argument": (lambda: stretto.RNN(OneArgument()), r"cannot be called as forward\(x_t, state\)"),
    "three-arguments": (lambda: stretto.RNN([ThreeArguments()])(torch.randn(B, T, F)), "required argument: 'mask'"),
    "four-arguments": (lambda: stretto.RNN([FourArguments()]), "missing a required argument: 'mask'"),
    "no-batch-size": (lambda: stretto.RNN(NoBatchSize()), r"cannot be called as initial_state\(batch_size\)"),
    "not-to-be-made-again": (lambda: stretto.RNN(Bare(), 2), "Bare cannot be built again"),
}


@pytest.mark.parametrize("name", MADE)
def test_what_is_no_cell_is_refused(name: str) -> None:
    make, problem = MADE[name]
    with pytest.raises(StrettoError, match=problem):
        make()


def test_a_module_with_all_that_a_layer_needs_is_a_cell() -> None:
    y_BTF, _ = stretto.RNN(Bare())(torch.ones(1, 3, F))
    torch.testing.assert_close(y_BTF[0, :, 0], torch.tensor([1.0, 2.0, 3.0]))


RETURNED: Final[dict[str, tuple[Step, str]]] = {
    "none": (lambda cell, x, h: None, "returned NoneType"),  # noqa: ARG005
    "three": (lambda cell, x, h: (h, h, cell.new(x, h)), r"returned \(Tensor, Tensor, Tensor\)"),
    "number": (lambda cell, x, h: (1.0, cell.new(x, h)), "returned float as its output"),
    "dictionary": (
        lambda cell, x, h: (cell.new(x, h), {"h": h}),
        "structure Tensor and returns .* structure {h: Tensor}",
    ),
    "no-state": (lambda cell, x, h: (cell.new(x, h), None), "returns one with the structure NoneType"),
    "nested-state": (
        lambda cell, x, h: (h, (cell.new(x, h),)),
        r"the structure Tensor and returns .* the structure \(Tensor\)",
    ),
    "wider-state": (lambda cell, x, h: (h, torch.cat([cell.new(x, h)] * 2, 1)), r"rows of \(4,\) .* rows of \(8,\)"),
    "state-of-another-dtype": (lambda cell, x, h: (h, cell.new(x, h).double()), "float32.*float64"),
    "state-elsewhere": (lambda cell, x, h: (h, cell.new(x, h).to("meta")), "on cpu .* on meta"),
    "state-of-one-row": (lambda cell, x, h: (h, cell.new(x, h)[:1]), r"shapes \(\d+, 4\) .* shapes \(1, 4\)"),
    "output-of-one-row": (lambda cell, x, h: (h[:1], cell.new(x, h)), r"an output of shape \(1, 4\)"),
    "output-of-no-row": (lambda cell, x, h: (h.sum(), cell.new(x, h)), r"an output of shape \(\)"),
    "state-changes-later": (
        lambda cell, x, h: (x, cell.new(x, h) if h.abs().sum().item() == 0 else h.double()),
        "float32.*float64",
    ),
    "structure-changes-later": (
        lambda cell, x, h: (x, cell.new(x, h) if h.abs().sum().item() == 0 else (h,)),
        r"returns one with the structure \(Tensor\)",
    ),
    "output-changes-later": (
        lambda cell, x, h: (x if h.abs().sum().item() == 0 else h, cell.new(x, h)),
        r"outputs with rows of \(3,\) torch.float32 and of \(4,\)",
    ),
}


ON_THE_CPU = [name for name in get_args(Backend) if name not in ON_GPUS]


@pytest.mark.filterwarnings("ignore:.* runs by backend")
@pytest.mark.parametrize("backend", ON_THE_CPU)
@pytest.mark.parametrize("name", RETURNED)
def test_a_cell_that_returns_something_else_is_refused(name: str, backend: Backend) -> None:
    step, problem = RETURNED[name]
    problem = "no code can be generated" if backend == "cpp" and name.endswith("later") else problem
    for num_layers in (1,) if name.endswith("later") else (1, 2):
        layer = stretto.RNN([cell_of(step)(), *[cell_of(_usual)(H) for _ in range(num_layers - 1)]], num_layers)
        layer.backend = backend
        for lengths in (None, [6, 1, 3]):
            with pytest.raises(StrettoError, match=problem):
                layer(torch.randn(B, T, F), lengths=lengths)


@pytest.mark.parametrize("name", [name for name in RETURNED if not name.endswith("later")])
def test_it_is_refused_under_transforms(name: str) -> None:
    step, problem = RETURNED[name]
    with pytest.raises(StrettoError, match=problem):
        torch.func.vmap(stretto.RNN(cell_of(step)()))(torch.randn(2, B, T, F))


@pytest.mark.parametrize("widths", [(F + 1, H), (F, H + 1)])
@pytest.mark.parametrize("backend", ON_THE_CPU)
def test_wrong_widths_are_refused(backend: Backend, widths: tuple[int, int]) -> None:
    layer = stretto.RNN([cell_of(_usual)(width) for width in widths], 2, backend=backend)
    with pytest.raises(StrettoError, match="features per step and Own takes"):
        layer(torch.randn(B, T, F))


class Mine(Exception):  # noqa: N818
    """A user's own exception."""


@pytest.mark.filterwarnings("ignore:.* runs by backend")
@pytest.mark.parametrize("backend", ["auto", "eager", "torch"])
def test_exceptions_of_the_cell_come_out_unchanged(backend: Backend) -> None:
    raised = Mine("of my own")

    def step(cell: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
        raise raised

    with pytest.raises(Mine) as caught:
        stretto.RNN(cell_of(step)(), backend=backend)(torch.randn(B, T, F))
    assert caught.value is raised


@pytest.mark.parametrize("ids", ["abc", [1, 2, None], [1.5, 2, 3], 7])
def test_sample_ids_are_whole_numbers(ids: Any) -> None:
    layer = stretto.RNN(cell_of(_usual)(), solver=stretto.Shooting())
    with pytest.raises(StrettoError, match="sample_ids"):
        layer(torch.randn(B, T, F), sample_ids=ids)


def test_numbers_as_outputs_feed_a_second_layer_of_two_directions() -> None:
    def step(cell: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
        return cell.new(x, h).sum(1), cell.new(x, h)

    cells = [cell_of(step)(width).double() for width in (F, F, 2, 2)]
    x_BTF = torch.randn(B, T, F, dtype=torch.float64)
    (found, _), (wanted, _) = (
        stretto.RNN(copy.deepcopy(cells), 2, True, backend=backend)(x_BTF) for backend in ("cpp", "torch")
    )
    assert found.shape == (B, T, 2)
    torch.testing.assert_close(found, wanted)


# Jagged nested tensors


def jagged(*lengths: int, features: tuple[int, ...] = (F,)) -> torch.Tensor:
    torch.manual_seed(3)
    parts = [torch.randn(length, *features, dtype=torch.float64) for length in lengths]
    nested: torch.Tensor = torch.nested.nested_tensor(parts, layout=torch.jagged, requires_grad=True)
    return nested


@pytest.mark.parametrize("lengths", [(2, 5, 1), (5, 2, 0, 3, 2), (4, 4), (1,)])
@pytest.mark.parametrize("backend", ON_THE_CPU)
def test_a_jagged_batch_is_that_of_its_sequences(backend: Backend, lengths: tuple[int, ...]) -> None:
    layer = stretto.RNN(stretto.cells.LSTM(F, H), 2, True, backend=backend).double()
    x = jagged(*lengths)
    padded_BTF = x.to_padded_tensor(0.0).detach().requires_grad_()
    y, after = layer(x)
    assert y.is_nested
    assert y.shape[:2] == x.shape[:2]
    hand_BTO, hand_after = layer(padded_BTF, lengths=lengths)
    torch.testing.assert_close(y.to_padded_tensor(0.0, output_size=hand_BTO.shape), hand_BTO)
    torch.testing.assert_close(after, hand_after)
    weights = list(layer.parameters())
    ones = torch.autograd.grad(y.values().sin().sum(), [x, *weights])
    others = torch.autograd.grad(hand_BTO.sin().sum(), [padded_BTF, *weights])
    torch.testing.assert_close(ones[0].to_padded_tensor(0.0, output_size=padded_BTF.shape), others[0])
    torch.testing.assert_close(ones[1:], others[1:])


def test_a_jagged_batch_with_gaps_and_one_under_a_transform() -> None:
    layer = stretto.RNN(stretto.cells.GRU(F, H)).double()
    x_BTF = torch.randn(2, 6, F, dtype=torch.float64)
    x = torch.nested.narrow(x_BTF, 1, torch.tensor([1, 0]), torch.tensor([2, 3]), layout=torch.jagged)
    y, _ = layer(x)
    torch.testing.assert_close(y.unbind()[0], layer(x_BTF[0, 1:3])[0])
    torch.testing.assert_close(y.unbind()[1], layer(x_BTF[1, :3])[0])
    with torch.autograd.forward_ad.dual_level():
        torch.testing.assert_close(layer(x.contiguous())[0].values(), y.values())


@pytest.mark.parametrize("lengths", [(2, 5, 1), (4, 4)])
@pytest.mark.parametrize("backend", ["auto", "cpp", "torch"])
@pytest.mark.parametrize("kind", [nn.GRU, nn.LSTM])
def test_an_accelerated_layer_takes_a_jagged_batch(kind: Any, backend: Backend, lengths: tuple[int, ...]) -> None:
    layer = stretto.accelerate(kind(F, H, batch_first=True).double(), backend=backend, measure=False)
    x = jagged(*lengths)
    y, after = layer(x)
    hand_BTH, hand_after = layer(x.to_padded_tensor(0.0), lengths=list(lengths))
    torch.testing.assert_close(y.to_padded_tensor(0.0, output_size=hand_BTH.shape), hand_BTH)
    torch.testing.assert_close(after, hand_after)
    ones, others = (torch.autograd.grad(result.sum(), list(layer.parameters())) for result in (y.values(), hand_BTH))
    torch.testing.assert_close(ones, others)


NESTED: Final[dict[str, tuple[Callable[[], Any], str]]] = {
    "strided": (
        lambda: stretto.RNN(stretto.cells.GRU(F, H))(torch.nested.nested_tensor([torch.randn(2, F)])),
        "layout",
    ),
    "lengths": (lambda: stretto.RNN(stretto.cells.GRU(F, H).double())(jagged(2, 1), lengths=[2, 1]), "its own"),
    "steps-first": (
        lambda: stretto.RNN(stretto.cells.GRU(F, H).double(), batch_first=False)(jagged(2, 1)),
        "batch_first",
    ),
    "numbers": (lambda: stretto.RNN(stretto.cells.GRU(F, H).double())(jagged(2, 1, features=())), "the input is"),
    "empty": (lambda: stretto.accelerate(nn.GRU(F, H, batch_first=True).double())(jagged(2, 0)), "without steps"),
}


@pytest.mark.parametrize("name", NESTED)
def test_other_nested_tensors_are_refused(name: str) -> None:
    run, problem = NESTED[name]
    with pytest.raises(StrettoError, match=problem):
        run()


# What a step reads besides its parameters


SCALE = 0.5
SETTINGS_OF_A_CELL = {"scale": 0.5}
GLOBAL_WEIGHT = torch.eye(H)


class Elsewhere:
    scale = 0.5


def _scaled(h: torch.Tensor) -> torch.Tensor:
    return h * SCALE


PLACES: Final[dict[str, Step]] = {
    "global": lambda cell, x, h: twice(torch.tanh(cell.a(x) + h * SCALE)),
    "dict": lambda cell, x, h: twice(torch.tanh(cell.a(x) + h * SETTINGS_OF_A_CELL["scale"])),
    "class": lambda cell, x, h: twice(torch.tanh(cell.a(x) + h * Elsewhere.scale)),
    "object": lambda cell, x, h: twice(torch.tanh(cell.a(x) + h * cell.elsewhere.scale)),
    "function": lambda cell, x, h: twice(torch.tanh(cell.a(x) + _scaled(h))),
    "tensor": lambda cell, x, h: twice(torch.tanh(cell.a(x) + h @ GLOBAL_WEIGHT)),
    "attribute": lambda cell, x, h: twice(torch.tanh(cell.a(x) + h @ cell.weight)),
    "item": lambda cell, x, h: twice(torch.tanh(cell.a(x) + h @ cell.weights["inward"])),
}


def _with_places(name: str) -> Any:
    cell: Any = cell_of(PLACES[name])().double()
    cell.elsewhere, cell.weight, cell.weights = Elsewhere(), torch.eye(H).double(), {}
    return cell


def _change(cell: Any, monkeypatch: pytest.MonkeyPatch, value: float) -> torch.Tensor:
    """Other values everywhere; the tensors are made from one that needs a gradient."""
    root = torch.full((H, H), value, dtype=torch.float64, requires_grad=True)
    for name, new in {"SCALE": value, "GLOBAL_WEIGHT": root * 1}.items():
        monkeypatch.setitem(globals(), name, new)
    monkeypatch.setitem(SETTINGS_OF_A_CELL, "scale", value)
    monkeypatch.setattr(Elsewhere, "scale", value)
    cell.elsewhere.scale, cell.weight, cell.weights["inward"] = value, root * 1, root * 1
    return root


def _results(layer: Any, x: torch.Tensor, root: torch.Tensor) -> Any:
    y, _ = layer(x)
    wanted = [root, *layer.parameters()]
    return y, torch.autograd.grad(y.square().sum(), wanted, retain_graph=True, allow_unused=True)


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize(
    "setting",
    ["plain", "states", *(pytest.param(name, marks=pytest.mark.slow) for name in ("newton", "multigrid", "shooting"))],
)
@pytest.mark.parametrize("name", PLACES)
def test_what_a_step_reads_elsewhere_may_be_another_at_each_call(
    name: str, setting: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings: dict[str, Any] = {
        "plain": {},
        "states": {"save": "states"},
        "newton": {"solver": stretto.Newton(tolerance=1e-13)},
        "multigrid": {"solver": stretto.Multigrid(num_levels=2, coarsening=2, tolerance=1e-13)},
        "shooting": {"solver": stretto.Shooting(num_chunks=2, tolerance=1e-13)},
    }
    cell, x = _with_places(name), torch.randn(B, 2 * T, F).double()
    layer, loop = stretto.RNN(cell, **settings[setting]), stretto.RNN(cell, backend="torch")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".* reads a tensor that needs a gradient")
        for value in (0.5, -0.3, 0.2):
            root = _change(cell, monkeypatch, value)
            found, wanted = _results(layer, x, root), _results(loop, x, root)
            torch.testing.assert_close(found, wanted, rtol=1e-8, atol=1e-10)
    assert layer.last_built is not None
    assert layer.last_built.backend == "cpp"


@pytest.mark.usefixtures("quick_compiler")
def test_a_tensor_that_is_an_attribute_is_read_and_not_compiled_in(monkeypatch: pytest.MonkeyPatch) -> None:
    cell, x = _with_places("attribute"), torch.randn(B, T, F).double()
    cell.weights, layer = None, stretto.RNN(cell)
    layer(x)
    built = layer.last_built
    for value in (0.1, 0.2):
        cell.weight = torch.full((H, H), value, dtype=torch.float64)
        torch.testing.assert_close(layer(x), stretto.RNN(cell, backend="torch")(x))
        assert layer.last_built is built


@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize(
    ("settings", "words"),
    [({"save": "states"}, "with save='states'"), ({"solver": stretto.Newton()}, "with solver=Newton")],
)
@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_gradients_that_would_be_lost_are_stored_and_told(
    settings: dict[str, Any], words: str, backend: Backend, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = f"Reader{len(words)}{backend}"
    cell: Any = cell_of(PLACES["item"], name=name)().double()
    cell.weights, cell.elsewhere = {}, Elsewhere()
    root, x = _change(cell, monkeypatch, 0.5), torch.randn(B, T, F).double()
    layer = stretto.RNN(cell, backend=backend, **settings)
    with pytest.warns(UserWarning, match=f"{name} reads a tensor that needs a gradient .* {words}"):
        found = _results(layer, x, root)
    torch.testing.assert_close(found, _results(stretto.RNN(cell, backend="torch"), x, root))
    if "solver" in settings:
        assert layer.solution.solver == "serial"
        assert words in layer.solution.reason
    with torch.no_grad():
        layer(x)
    assert "solver" not in settings or layer.solution.solver == "newton" or backend == "torch"


@pytest.mark.slow
@pytest.mark.usefixtures("quick_compiler")
def test_what_changes_at_every_call_is_told_and_fills_no_memory() -> None:
    cell: Any = cell_of(PLACES["dict"], name="Restless")().double()
    layer, x = stretto.RNN(cell), torch.randn(B, T, F).double()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for number in range(MAX_BUILT + 3):
            patch.setitem(SETTINGS_OF_A_CELL, "scale", number / 100)
            layer(x)
        torch.testing.assert_close(layer(x), stretto.RNN(cell, backend="torch")(x))
    (told,) = [str(item.message) for item in caught]
    assert told.startswith("Restless has been traced 8 times in a row")
    assert len(layer._built) == MAX_BUILT


def test_a_step_that_is_not_compiled_is_not_traced_at_every_call() -> None:
    log: list[int] = []

    def step(cell: Any, x: torch.Tensor, h: torch.Tensor) -> Any:
        log.append(1)
        return twice(cell.new(x, h))

    layer, x = stretto.RNN(cell_of(step, name="Logging")().double()), torch.randn(B, T, F).double()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(12):
            layer(x)
    assert len(log) == 12 * T
    assert len(layer._built) == 8
