"""Plain eager autograd: computed weights, hooks, work in place, states and shapes, packed batches, dropout, precision.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import Any, final

import pytest
import torch
from compat_cases import BACKENDS, KINDS, B, Behaviour, Behaviours, F, T, Use, batch, gradients, learn, loss_of, update
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.nn import functional
from torch.nn.utils import parametrizations, parametrize, prune, stateless
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pack_sequence, pad_packed_sequence

CASES = Behaviours()
pytestmark = pytest.mark.usefixtures("quick_compiler")
WEIGHT = "weight_hh_l0"
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "bare": {"bias": False},
    "batch-first": {"batch_first": True},
    "both-ways": {"bidirectional": True},
    "deep": {"num_layers": 3},
    "everything": {"num_layers": 2, "bias": False, "batch_first": True, "bidirectional": True},
}


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize("case", CASES.params)
def test_eager(case: Behaviour, backend: str) -> None:
    case.check(backend)


# Options, precision and devices


@CASES.add(each={f"{kind}-{name}": (KINDS[kind], options) for kind in KINDS for name, options in OPTIONS.items()})
def options(use: Use, given: tuple[type[nn.RNNBase], dict[str, Any]]) -> Any:
    layer, chosen = given
    return learn(use(layer(F, use.H, **chosen).double()), batch())


@CASES.add(
    each={
        "relu": lambda H: nn.RNN(F, H, nonlinearity="relu"),
        "projected": lambda H: nn.LSTM(F, H, proj_size=2),
        "projected-both-ways": lambda H: nn.LSTM(F, H, proj_size=2, num_layers=2, bidirectional=True),
        "one-unit": lambda _: nn.GRU(F, 1),
        "one-feature": lambda H: nn.GRU(1, H),
    }
)
def rare_options(use: Use, make: Callable[[int], nn.RNNBase]) -> Any:
    layer = use(make(use.H).double())
    return learn(layer, batch(T, B, layer.input_size))


@CASES.add(each=KINDS)
def single_precision(use: Use, layer: type[nn.RNNBase]) -> Any:
    return learn(use(layer(F, use.H, num_layers=2, bidirectional=True)), batch(dtype=torch.float32))


@CASES.add(each={"bfloat16": torch.bfloat16, "half": torch.float16})
def low_precision(use: Use, dtype: torch.dtype) -> Any:
    return learn(use(nn.GRU(F, use.H).to(dtype)), batch(dtype=dtype))


DTYPES = {"single": torch.float32, "double": torch.float64, "bfloat16": torch.bfloat16, "half": torch.float16}


@CASES.add(each={f"{kind}-{name}": (KINDS[kind], DTYPES[name]) for kind in ("rnn", "gru") for name in DTYPES})
def dtypes_under_autocast(use: Use, given: tuple[type[nn.RNNBase], torch.dtype]) -> Any:
    layer, dtype = given
    model = use(layer(F, use.H).to(torch.float64 if dtype == torch.float64 else torch.float32))
    found = []
    for low in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=low):
            for state in (None, torch.zeros(1, B, use.H, dtype=dtype)):
                found += [tensor.dtype for tensor in model(batch(dtype=dtype), state)]
    return found


@CASES.add(each={"packed": True, "projected": False})
def dtypes_of_other_lstms_under_autocast(use: Use, is_packed: bool) -> Any:
    """Those that are no single operator of oneDNN's."""
    model = use(nn.LSTM(F, use.H, proj_size=0 if is_packed else 2))
    found = []
    for low, given, of_states in product((torch.bfloat16, torch.float16), repeat=3):
        for dtypes in ((given, None), (torch.float32, of_states), (given, torch.float32)):
            x: Any = batch(dtype=dtypes[0])
            if is_packed:
                x = pack_padded_sequence(x, [T, 2, 1])
            widths = (model.proj_size or use.H, use.H)
            states = dtypes[1] and tuple(torch.zeros(1, B, width, dtype=dtypes[1]) for width in widths)
            with torch.autocast("cpu", dtype=low):
                y, after = model(x, states)
            found += [(y.data if is_packed else y).dtype, *(state.dtype for state in after)]
    return found


@CASES.add()
def double_precision_under_autocast(use: Use) -> Any:
    with torch.autocast("cpu"):
        return learn(use(nn.LSTM(F, use.H).double()), batch())


@CASES.add(each=KINDS)
def meta_device(use: Use, layer: type[nn.RNNBase]) -> Any:
    model = use(layer(F, use.H, device="meta"))
    y = model(torch.empty(T, B, F, device="meta"))[0]
    model = model.to_empty(device="cpu").double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.3, 0.3)
    return tuple(y.shape), y.device.type, learn(model, batch())


# Kinds of input and initial states


def _states(layer: nn.RNNBase, *rows: int) -> Any:
    states = [torch.randn(layer.num_layers, *rows, layer.hidden_size, dtype=torch.float64) for _ in range(2)]
    states = [state.requires_grad_() for state in states]
    return tuple(states) if layer.mode == "LSTM" else states[0]


@CASES.add(each=KINDS)
def given_states(use: Use, layer: type[nn.RNNBase]) -> Any:
    model = use(layer(F, use.H, num_layers=2).double())
    return learn(model, batch(), _states(model, B))


@CASES.add(each=KINDS)
def single_sequence(use: Use, layer: type[nn.RNNBase]) -> Any:
    model = use(layer(F, use.H, batch_first=True).double())
    return learn(model, batch(T, F)), learn(model, batch(T, F), _states(model))


@CASES.add()
def list_of_states(use: Use) -> Any:
    model = use(nn.LSTM(F, use.H).double())
    return model(batch(), list(_states(model, B)))


@CASES.add(
    each={
        "transposed": lambda: batch(B, T, F).transpose(0, 1),
        "strided": lambda: batch(2 * T, B, 3 * F)[::2, :, 1 : 2 * F : 2],
        "expanded": lambda: batch(T, 1, F).expand(T, B, F),
        "flipped": lambda: batch().flip(0),
        "shifted": lambda: batch(T * B * F + 3)[3:].view(T, B, F),
        "parameter": lambda: nn.Parameter(torch.randn(T, B, F, dtype=torch.float64)),
        "one-step": lambda: batch(1, B, F),
        "one-row": lambda: batch(T, 1, F),
        "no-rows": lambda: batch(T, 0, F),
        "not-a-number": lambda: torch.full((T, B, F), torch.nan, dtype=torch.float64),
        "infinite": lambda: torch.full((T, B, F), torch.inf, dtype=torch.float64),
        "tiny": lambda: torch.full((T, B, F), 1e-310, dtype=torch.float64),
        "huge": lambda: torch.full((T, B, F), 1e30, dtype=torch.float64),
        "imaginary-part": lambda: torch.randn(T, B, F, dtype=torch.complex128).conj().imag,
        "negative-bit": lambda: torch._neg_view(torch.randn(T, B, F, dtype=torch.float64)),
    }
)
def input_of_any_kind(use: Use, make: Callable[[], torch.Tensor]) -> Any:
    model, x_TBF = use(nn.GRU(F, use.H).double()), make()
    return learn(model, x_TBF), x_TBF.stride()


@CASES.add()
def negative_bit_of_states_and_weights(use: Use) -> Any:
    model = use(nn.GRU(F, use.H).double())
    weights = {name: torch._neg_view(p.detach()) for name, p in model.named_parameters()}
    state = torch._neg_view(torch.randn(1, B, use.H, dtype=torch.float64))
    return model(batch(), state), torch.func.functional_call(model, weights, (batch(), state))


@CASES.add()
def names_of_arguments(use: Use) -> Any:
    model = use(nn.GRU(F, use.H).double())
    return model(input=batch()), model(batch(), hx=torch.ones(1, B, use.H).double()), model(hx=None, input=batch())


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Layers:
    gru: nn.GRU
    lstm: nn.LSTM
    H: int


WRONG: dict[str, tuple[type[Exception], Callable[[Layers], Any]]] = {
    "features": (RuntimeError, lambda of: of.gru(batch(T, B, F + 1))),
    "four-dimensions": (ValueError, lambda of: of.gru(batch(T, B, F, 1))),
    "one-dimension": (ValueError, lambda of: of.gru(batch(F))),
    "no-steps": (RuntimeError, lambda of: of.gru(batch(0, B, F))),
    "precision": (ValueError, lambda of: of.gru(batch(dtype=torch.float32))),
    "integers": (ValueError, lambda of: of.gru(torch.ones(T, B, F, dtype=torch.int64))),
    "complex": (ValueError, lambda of: of.gru(torch.ones(T, B, F, dtype=torch.complex128))),
    "rows-of-state": (RuntimeError, lambda of: of.gru(batch(), batch(1, B + 1, of.H))),
    "layers-of-state": (RuntimeError, lambda of: of.gru(batch(), batch(2, B, of.H))),
    "width-of-state": (RuntimeError, lambda of: of.gru(batch(), batch(1, B, of.H + 1))),
    "state-of-one": (RuntimeError, lambda of: of.gru(batch(), batch(1, of.H))),
    "state-of-many": (RuntimeError, lambda of: of.gru(batch(T, F), batch(1, B, of.H))),
    "precision-of-state": (RuntimeError, lambda of: of.gru(batch(), batch(1, B, of.H).float())),
    "tuple-of-one-state": (AttributeError, lambda of: of.gru(batch(), (batch(1, B, of.H),))),
    "no-states": (AttributeError, lambda of: of.gru(batch(), ())),
    "no-states-of-lstm": (IndexError, lambda of: of.lstm(batch(), ())),
    "list-as-input": (AttributeError, lambda of: of.gru([[1.0] * F])),
    "nothing": (TypeError, lambda of: of.gru()),
    "unknown-name": (TypeError, lambda of: of.gru(batch(), state=None)),
    "one-state-of-lstm": (RuntimeError, lambda of: of.lstm(batch(), batch(B, of.H))),
    "three-states": (RuntimeError, lambda of: of.lstm(batch(), (batch(1, B, of.H),) * 3)),
    "wrong-cell-state": (RuntimeError, lambda of: of.lstm(batch(), (batch(1, B, of.H), batch(1, B, of.H + 1)))),
    "meta-input": (RuntimeError, lambda of: of.gru(torch.empty(T, B, F, device="meta").double())),
    "rising-batch-sizes": (RuntimeError, lambda of: of.gru(PackedSequence(batch(5, F), torch.tensor([2, 3])))),
    "too-little-data": (RuntimeError, lambda of: of.gru(PackedSequence(batch(4, F), torch.tensor([3, 2])))),
    "packed-features": (RuntimeError, lambda of: of.gru(PackedSequence(batch(5, F + 1), torch.tensor([3, 2])))),
    "packed-state": (
        RuntimeError,
        lambda of: of.gru(PackedSequence(batch(5, F), torch.tensor([3, 2])), batch(1, 2, of.H)),
    ),
}


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize("what", WRONG)
@pytest.mark.parametrize("warm", [False, True], ids=["", "warm"])
def test_wrong_input(what: str, warm: bool, backend: str) -> None:
    raised, call = WRONG[what]

    def run(use: Use) -> None:
        of = Layers(gru=use(nn.GRU(F, use.H).double()), lstm=use(nn.LSTM(F, use.H).double()), H=use.H)
        if warm:
            of.gru(batch()), of.lstm(batch())
        loss_of(call(of)).backward()

    Behaviour(run=run, raises=raised).check(backend)


# Packed batches

LENGTHS = {"sorted": [4, 2, 1], "unsorted": [2, 4, 1], "equal": [4, 4, 4], "short": [2, 1, 1]}


@CASES.add(each={f"{kind}-{name}": (KINDS[kind], name) for kind in KINDS for name in LENGTHS})
def packed(use: Use, given: tuple[type[nn.RNNBase], str]) -> Any:
    layer, name = given
    model = use(layer(F, use.H, num_layers=2, bidirectional=True).double())
    x_PF = pack_padded_sequence(batch(), torch.tensor(LENGTHS[name]), enforce_sorted=name != "unsorted")
    result = learn(model, x_PF)
    return result, pad_packed_sequence(result[0][0], total_length=T + 1)


@CASES.add(each={"sorted": True, "unsorted": False})
def packed_with_states(use: Use, is_sorted: bool) -> Any:
    model = use(nn.LSTM(F, use.H, proj_size=2, batch_first=True).double())
    lengths = torch.tensor(LENGTHS["sorted" if is_sorted else "unsorted"])
    x_PF = pack_padded_sequence(batch(B, T, F), lengths, batch_first=True, enforce_sorted=is_sorted)
    return learn(model, x_PF, (batch(1, B, 2), batch(1, B, use.H)))


@CASES.add()
def pack_of_sequences(use: Use) -> Any:
    model = use(nn.GRU(F, use.H).double())
    sequences = [batch(length, F) for length in (1, 4, 2)]
    return learn(model, pack_sequence(sequences, enforce_sorted=False)), [x_TF.grad for x_TF in sequences]


@CASES.add()
def pack_made_by_hand(use: Use) -> Any:
    model = use(nn.GRU(F, use.H).double())
    return learn(model, PackedSequence(batch(6, F), torch.tensor([3, 2, 1])))


@CASES.add()
def pack_with_too_much_data(use: Use) -> Any:
    return learn(use(nn.GRU(F, use.H).double()), PackedSequence(batch(7, F), torch.tensor([3, 2])))


@CASES.add()
def pack_changes_precision(use: Use) -> Any:
    model = use(nn.GRU(F, use.H).double())
    return model(pack_sequence([torch.ones(3, F), torch.ones(2, F)]).to(torch.float64))


@CASES.add(each={"lstm": nn.LSTM, "gru": nn.GRU})
def inplace_on_a_pack(use: Use, layer: type[nn.RNNBase]) -> Any:
    model = use(layer(F, use.H).double())
    y, _ = model(pack_padded_sequence(batch(), torch.tensor([4, 2, 1])))
    y.data.mul_(2.0)
    loss_of(y).backward()
    return y, gradients(model)


# Work in place, between forward and backward


def _set_first(y: torch.Tensor) -> torch.Tensor:
    y[0] = 0.5
    return y


def _unseen(change: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], torch.Tensor]:
    """A change that autograd does not see."""

    def changed(y: torch.Tensor) -> torch.Tensor:
        change(y.data)
        return y

    return changed


def _unrecorded(y: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        y.mul_(2.0)
    return y


def _through_numpy(y: torch.Tensor) -> torch.Tensor:
    y.detach().numpy()[:] = 3.0
    return y


INPLACE: dict[str, Callable[[torch.Tensor], Any]] = {
    "relu": lambda y: y.relu_(),
    "mul": lambda y: y.mul_(torch.linspace(0, 1, y.shape[-1], dtype=y.dtype)),
    "add": lambda y: y.add_(1.0),
    "dropout": lambda y: functional.dropout(y, 0.5, inplace=True),
    "leaky-relu": nn.LeakyReLU(inplace=True),
    "first": _set_first,
    "masked-fill": lambda y: y.masked_fill_(y > 0.1, 0.0),
    "clamp": lambda y: y.clamp_(-0.1, 0.1),
    "unsqueeze": lambda y: y.unsqueeze_(0),
    "squeeze": lambda y: y.squeeze_(),
    "transpose": lambda y: y.transpose_(0, 1),
    "unseen-mul": _unseen(lambda data: data.mul_(2.0)),
    "unseen-zero": _unseen(lambda data: data.zero_()),
    "unseen-first": _unseen(lambda data: data[:1].fill_(7.0)),
    "unrecorded": _unrecorded,
    "detached": lambda y: (y.detach().mul_(2.0), y)[1],
    "numpy": _through_numpy,
    "another-memory": lambda y: (setattr(y, "data", torch.ones_like(y)), y)[1],
}
SHAPES: dict[str, dict[str, Any]] = {
    "one": {},
    "batch-first": {"batch_first": True},
    "deep": {"num_layers": 2},
    "both-ways": {"bidirectional": True},
}


@CASES.add(each={f"{kind}-{name}": (KINDS[kind], change) for kind in KINDS for name, change in INPLACE.items()})
def inplace_on_output(use: Use, given: tuple[type[nn.RNNBase], Callable[[torch.Tensor], Any]]) -> Any:
    layer, change = given
    model, x_TBF = use(layer(F, use.H, batch_first=True).double()), batch()
    y = change(model(x_TBF)[0])
    loss_of(y).backward()
    return y, gradients(model), x_TBF.grad


@CASES.add(each={f"{kind}-{name}": (KINDS[kind], SHAPES[name]) for kind in KINDS for name in SHAPES})
def unseen_work_on_output_and_states(use: Use, given: tuple[type[nn.RNNBase], dict[str, Any]]) -> Any:
    layer, chosen = given
    model, x = use(layer(F, use.H, **chosen).double()), batch()
    y, after = model(x)
    loss = loss_of((y, after))
    wanted = torch.autograd.grad(loss, [x, *model.parameters()], retain_graph=True)
    found = model(x)
    y, after = found
    loss_by_hand = (y * torch.ones_like(y)).sum()  # what the loss itself keeps is not what is looked at
    for tensor in (y, *(after if isinstance(after, tuple) else (after,))):
        tensor.data.fill_(0.5)
    loss_by_hand.backward()
    return wanted, x.grad, gradients(model), y


@CASES.add(each=KINDS)
def unseen_work_on_packed_output(use: Use, layer: type[nn.RNNBase]) -> Any:
    model = use(layer(F, use.H).double())
    y, _ = model(pack_padded_sequence(batch(), torch.tensor([4, 4, 4])))
    y.data.data.mul_(2.0)
    loss_of(y).backward()
    return y, gradients(model)


@CASES.add(each={f"{kind}-{name}": (KINDS[kind], SHAPES[name]) for kind in ("rnn", "gru") for name in SHAPES})
def results_are_no_views(use: Use, given: tuple[type[nn.RNNBase], dict[str, Any]]) -> Any:
    layer, chosen = given
    model = use(layer(F, use.H, **chosen).double())
    found = []
    for asked in (True, False):
        with torch.set_grad_enabled(asked):
            y, after = model(batch())
            packed, _ = model(pack_padded_sequence(batch(), [2] * B))
        results = [y, packed.data, *(after if isinstance(after, tuple) else (after,))]
        found += [(tensor._is_view(), tensor.stride(), tensor.is_leaf) for tensor in results]
        found += [tensor.detach_().requires_grad for tensor in results]
    return found


@CASES.add(each=KINDS)
def memory_of_output_is_given_back(use: Use, layer: type[nn.RNNBase]) -> Any:
    model, x = use(layer(F, use.H).double()), batch()
    y, _ = model(x)
    loss = (y * 2.0).sum()
    y.untyped_storage().resize_(0)
    loss.backward()
    return x.grad, gradients(model)


@CASES.add(each=KINDS)
def hook_on_output_that_is_changed_in_place(use: Use, layer: type[nn.RNNBase]) -> Any:
    model, x = use(layer(F, use.H).double()), batch()
    y, _ = model(x)
    y.register_hook(lambda gradient: gradient * 3.0)
    y.mul_(2.0)
    loss_of(y).backward()
    return x.grad, gradients(model)


@CASES.add(each=KINDS)
def output_shared_with_other_libraries(use: Use, layer: type[nn.RNNBase]) -> Any:
    model = use(layer(F, use.H, batch_first=True).double())
    y, _ = model(batch(1, T, F))
    torch.from_dlpack(y.detach()).zero_()
    (y * 2.0).sum().backward()
    return y, gradients(model)


@CASES.add(
    each={
        "resize": lambda y: y.resize_(2, 2),
        "set": lambda y: y.set_(torch.ones(2, dtype=y.dtype)),
        "no-gradient": lambda y: y.requires_grad_(False),
        "gradient": lambda y: y.requires_grad_(True),
        "matrix-transpose": lambda y: y.t_(),
    }
)
def other_work_on_output(use: Use, change: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    model, found = use(nn.GRU(F, use.H).double()), []
    for asked in (True, False):
        with torch.set_grad_enabled(asked):
            y = model(batch())[0]
        try:
            y = change(y)
            found.append((tuple(y.shape), y.requires_grad))
        except RuntimeError as error:
            found.append(str(error))
    return found


@CASES.add(each=KINDS)
def inplace_on_states(use: Use, layer: type[nn.RNNBase]) -> Any:
    model = use(layer(F, use.H, num_layers=2).double())
    y, after = model(batch())
    for state in after if isinstance(after, tuple) else [after]:
        state.mul_(0.5)
    loss_of((y, after)).backward()
    return y, after, gradients(model)


@CASES.add(each=KINDS)
def made_in_inference_mode(use: Use, layer: type[nn.RNNBase]) -> Any:
    with torch.inference_mode():
        model = use(layer(F, use.H).double())
    x, found = batch().detach(), []
    for mode in (torch.no_grad, torch.inference_mode):
        with mode():
            found.append(model(x))
    with pytest.raises(RuntimeError, match=r"[Ii]nference tensors"):
        model(x)
    return found


@CASES.add(each=KINDS)
def inplace_without_gradients(use: Use, layer: type[nn.RNNBase]) -> Any:
    model = use(layer(F, use.H).double())
    with torch.no_grad():
        y, after = model(batch())
        y.zero_()
    return y, after


@CASES.add()
def output_is_not_a_view_of_the_state(use: Use) -> Any:
    model = use(nn.GRU(F, use.H).double())
    with torch.no_grad():
        given = torch.zeros(1, B, use.H, dtype=torch.float64)
        y, after = model(batch(), given)
        after.fill_(7.0)
        model(batch(), given)
    return y[:-1], given


@CASES.add(each={"rnn": nn.RNN, "gru": nn.GRU, "lstm": nn.LSTM})
def bias_changes_before_backward(use: Use, layer: type[nn.RNNBase]) -> Any:
    model = use(layer(F, use.H).double())
    y = model(batch())[0]
    with torch.no_grad():
        model.bias_ih_l0.add_(1.0)
    loss_of(y).backward()
    return y, gradients(model)


@CASES.add(each={"weight_hh_l0": "weight_hh_l0", "weight_ih_l0": "weight_ih_l0"}, raises=RuntimeError)
def weight_changes_before_backward(use: Use, name: str) -> None:
    model = use(nn.GRU(F, use.H).double())
    y = model(batch())[0]
    with torch.no_grad():
        getattr(model, name).add_(1.0)
    loss_of(y).backward()


@CASES.add(raises=RuntimeError)
def input_changes_before_backward(use: Use) -> None:
    model, x_TBF = use(nn.GRU(F, use.H).double()), batch().detach()
    y = model(x_TBF)[0]
    x_TBF.zero_()
    loss_of(y).backward()


GIVEN = {"x": ["x"], "h": ["h"], "c": ["c"], "weights": ["weight_ih_l0", "weight_hh_l0"], "biases": ["bias_ih_l0"]}
"""Given to a layer, and changed through `.data` before the backward pass: autograd does not see it."""
LAYERS_OF_ANY_SHAPE: dict[str, tuple[dict[str, Any], bool]] = {
    "one": ({}, False),
    "deep": ({"num_layers": 2}, False),
    "both-ways": ({"bidirectional": True}, False),
    "packed": ({}, True),
    "packed-both-ways": ({"bidirectional": True}, True),
}


def _unseen_work_on_what_was_given(
    use: Use,
    given: tuple[type[nn.RNNBase], str, tuple[dict[str, Any], bool], torch.dtype],
) -> Any:
    layer, name, (options, is_packed), dtype = given
    model = use(layer(F, use.H, **options).to(dtype))
    rows = model.num_layers * (2 if model.bidirectional else 1)
    x_TBF, *states = batch(dtype=dtype), *(batch(rows, B, use.H, dtype=dtype) for _ in range(2))
    x: Any = pack_padded_sequence(x_TBF, torch.tensor([4, 2, 1])) if is_packed else x_TBF
    y, after = model(x, tuple(states) if layer is nn.LSTM else states[0])
    tensors = {"x": x.data if is_packed else x, "h": states[0], "c": states[1], **dict(model.named_parameters())}
    for each in GIVEN[name]:
        # Sequences that run to the end of a packed batch are left as they are: torch has copies of the others alone.
        part = tensors[each].data
        (part[:, 1:] if is_packed and each in {"h", "c"} else part).mul_(-2.0)
    loss_of((y, after)).backward()
    return gradients(model), x_TBF.grad, [state.grad for state in states]


for _dtype in ("single", "double"):
    CASES.add(
        each={
            f"{kind}-{name}-{shape}-{_dtype}": (KINDS[kind], name, LAYERS_OF_ANY_SHAPE[shape], DTYPES[_dtype])
            for kind in KINDS
            for name in GIVEN
            for shape in LAYERS_OF_ANY_SHAPE
            if (name != "c" or kind == "lstm") and (name != "x" or "both-ways" not in shape)
        }
    )(_unseen_work_on_what_was_given)


@CASES.add(each={"single": torch.float32, "double": torch.float64})
def unseen_work_on_states_of_an_lstm_without_onednn(use: Use, dtype: torch.dtype) -> Any:
    with torch.backends.mkldnn.flags(enabled=False):
        shape = LAYERS_OF_ANY_SHAPE["both-ways"]
        return [_unseen_work_on_what_was_given(use, (nn.LSTM, name, shape, dtype)) for name in ("h", "c")]


# Autograd


@CASES.add(raises=RuntimeError)
def backward_twice(use: Use) -> None:
    loss = loss_of(use(nn.GRU(F, use.H).double())(batch()))
    loss.backward()
    loss.backward()


@CASES.add(each=KINDS)
def retained_graph(use: Use, layer: type[nn.RNNBase]) -> Any:
    model = use(layer(F, use.H).double())
    loss = loss_of(model(batch()))
    loss.backward(retain_graph=True)
    loss.backward()
    return gradients(model)


@CASES.add(each=KINDS)
def gradient_penalty(use: Use, layer: type[nn.RNNBase]) -> Any:
    model, x_TBF = use(layer(F, use.H).double()), batch()
    (by_x_TBF,) = torch.autograd.grad(loss_of(model(x_TBF)), x_TBF, create_graph=True)
    by_x_TBF.square().sum().backward()
    return by_x_TBF, gradients(model)


@CASES.add(each=KINDS)
def flattened_gradients(use: Use, layer: type[nn.RNNBase]) -> Any:
    model = use(layer(F, use.H, num_layers=2, bidirectional=True).double())
    found = torch.autograd.grad(loss_of(model(batch())), list(model.parameters()))
    return torch.cat([gradient.view(-1) for gradient in found]), [gradient.stride() for gradient in found]


@CASES.add(each=KINDS)
def hessian_times_vector(use: Use, layer: type[nn.RNNBase]) -> Any:
    model = use(layer(F, use.H, num_layers=2, bidirectional=True).double())
    weights = list(model.parameters())
    found = torch.autograd.grad(loss_of(model(batch())), weights, create_graph=True)
    flat = torch.cat([gradient.view(-1) for gradient in found])
    return torch.autograd.grad(flat @ torch.ones_like(flat), weights), [gradient.stride() for gradient in found]


@CASES.add(each=KINDS)
def layout_of_results(use: Use, layer: type[nn.RNNBase]) -> Any:
    """Whoever calls `view` on an output, a state or a gradient can still do so."""
    model, x_TBF = use(layer(F, use.H, num_layers=2).double()), batch()
    y, after = model(x_TBF)
    loss_of((y, after)).backward()
    assert x_TBF.grad is not None
    states = after if isinstance(after, tuple) else (after,)
    return y.view(-1), [state.view(-1) for state in states], x_TBF.grad.view(-1), [y.grad_fn is None, y.is_leaf]


@CASES.add(
    each={
        "y": lambda found: found[0],
        "last-step": lambda found: found[0][-1],
        "middle-step": lambda found: found[0][1],
        "h": lambda found: found[1][0],
        "c": lambda found: found[1][1],
        "one-row": lambda found: found[0][:, 1],
        "one-unit": lambda found: found[0][..., 2],
    }
)
def loss_of_a_part(use: Use, part: Callable[..., torch.Tensor]) -> Any:
    model, x_TBF = use(nn.LSTM(F, use.H, num_layers=2).double()), batch()
    loss_of(part(model(x_TBF))).backward()
    return gradients(model), x_TBF.grad


@CASES.add(
    each={
        "nothing": [],
        "biases": ["bias_ih_l0", "bias_hh_l0"],
        "recurrence": ["weight_hh_l0"],
        "input": ["weight_ih_l0"],
        "layer": ["weight_ih_l1", "weight_hh_l1", "bias_ih_l1", "bias_hh_l1"],
    }
)
def only_some_weights_learn(use: Use, names: list[str]) -> Any:
    model = use(nn.GRU(F, use.H, num_layers=2).double())
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
    x_TBF = batch().detach()
    y, after = model(x_TBF)
    if names:
        loss_of(y).backward()
    return y, after, gradients(model), learn(model, batch())


@CASES.add(each=KINDS)
def only_states_learn(use: Use, layer: type[nn.RNNBase]) -> Any:
    model = use(layer(F, use.H).double()).requires_grad_(False)
    return learn(model, batch().detach(), _states(model, B))


@CASES.add(
    each={"no-grad": torch.no_grad, "inference": torch.inference_mode, "off": partial(torch.set_grad_enabled, False)}
)
def without_gradients(use: Use, mode: Callable[[], Any]) -> Any:
    model = use(nn.LSTM(F, use.H, num_layers=2, dropout=0.5).double())
    with mode():
        result = model(batch())
        again = model.eval()(batch())
    return result, again, learn(model, batch())


@CASES.add()
def inference_tensors_as_input(use: Use) -> Any:
    model = use(nn.GRU(F, use.H).double()).requires_grad_(False)
    with torch.inference_mode():
        x_TBF = torch.randn(T, B, F, dtype=torch.float64)
    return model(x_TBF)


@CASES.add()
def detached_state_between_calls(use: Use) -> Any:
    model, state = use(nn.LSTM(F, use.H).double()), None
    for _ in range(3):
        y, state = model(batch(), state)
        loss_of(y).backward()
        state = tuple(part.detach() for part in state)
    return state, gradients(model)


@CASES.add()
def called_twice_in_one_graph(use: Use) -> Any:
    model = use(nn.GRU(F, F).double())
    y, state = model(batch())
    z, last = model(y, state)
    loss_of((z, last)).backward()
    return z, gradients(model)


@CASES.add()
def tied_weights(use: Use) -> Any:
    model = nn.ModuleList([nn.LSTM(F, use.H), nn.LSTM(F, use.H)]).double()
    model[1].weight_hh_l0 = model[0].weight_hh_l0
    use(model)
    loss = loss_of([layer(batch()) for layer in model])
    loss.backward()
    return gradients(model), len(list(model.parameters())), model[0].weight_hh_l0 is model[1].weight_hh_l0


@CASES.add(each={"sgd": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": partial(torch.optim.AdamW, foreach=True)})
def optimizers(use: Use, make: Callable[..., torch.optim.Optimizer]) -> Any:
    model, x_TBF = use(nn.LSTM(F, use.H).double()), batch()
    optimizer = make(model.parameters(), lr=0.01)
    for _ in range(3):
        optimizer.zero_grad()
        loss_of(model(x_TBF)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return list(model.parameters())


@CASES.add(each={"anomaly": torch.autograd.detect_anomaly, "save-on-cpu": torch.autograd.graph.save_on_cpu})
def context_of_autograd(use: Use, context: Callable[[], Any]) -> Any:
    model = use(nn.GRU(F, use.H).double())
    with context():
        return learn(model, batch())


@CASES.add(raises=RuntimeError)
def saved_tensors_are_gone(use: Use) -> None:
    def lost(_: Any) -> torch.Tensor:
        raise RuntimeError("lost")

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lost):
        loss = loss_of(use(nn.GRU(F, use.H).double())(batch()))
    loss.backward()


@CASES.add(each=KINDS)
def numerical_gradients(use: Use, layer: type[nn.RNNBase]) -> bool:
    model = use(layer(2, 2).double())
    x_TBF = batch(2, 2, 2)

    def run(x: torch.Tensor, *weights: torch.Tensor) -> Any:
        names = dict(model.named_parameters())
        y, after = torch.func.functional_call(model, dict(zip(names, weights, strict=True)), (x,))
        return (y, *(after if isinstance(after, tuple) else (after,)))

    given = (x_TBF, *model.parameters())
    return gradcheck(run, given) and gradgradcheck(run, given, fast_mode=True)


# Weights that are computed


def _masked(layer: nn.RNNBase) -> nn.RNNBase:
    mask_H = torch.arange(layer.hidden_size) % 2 == 0
    return prune.custom_from_mask(layer, WEIGHT, mask_H.expand(len(layer.weight_hh_l0), -1))


class Halved(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2 + weight.tanh()


COMPUTED: dict[str, Callable[[Any], Any]] = {
    "weight-norm-hook": lambda layer: nn.utils.weight_norm(layer, WEIGHT),
    "spectral-norm-hook": lambda layer: nn.utils.spectral_norm(layer, WEIGHT),
    "weight-norm": lambda layer: parametrizations.weight_norm(layer, WEIGHT),
    "spectral-norm": lambda layer: parametrizations.spectral_norm(layer, WEIGHT),
    "own-parametrization": lambda layer: parametrize.register_parametrization(layer, WEIGHT, Halved()) or layer,
    "prune-l1": lambda layer: prune.l1_unstructured(layer, WEIGHT, amount=0.5),
    "prune-structured": lambda layer: prune.ln_structured(layer, WEIGHT, amount=0.5, n=2, dim=1),
    "prune-twice": lambda layer: prune.l1_unstructured(prune.l1_unstructured(layer, WEIGHT, 0.2), WEIGHT, amount=0.2),
    "prune-by-mask": _masked,
}
ORDERS = {"": True, "-accelerated-first": False}


@CASES.add(each={f"{name}{order}": (make, first) for name, make in COMPUTED.items() for order, first in ORDERS.items()})
def computed_weights(use: Use, given: tuple[Callable[[Any], Any], bool]) -> Any:
    make, first = given
    layer = nn.LSTM(F, use.H).double()
    model = nn.Sequential(use(make(layer)) if first else make(use(layer)))
    updated = update(model, batch())
    return updated, update(model, batch()), model.eval()(batch()), list(model.state_dict())


REMOVED: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Any]]] = {
    "weight-norm": (COMPUTED["weight-norm-hook"], lambda layer: nn.utils.remove_weight_norm(layer, WEIGHT)),
    "spectral-norm": (COMPUTED["spectral-norm-hook"], lambda layer: nn.utils.remove_spectral_norm(layer, WEIGHT)),
    "prune": (COMPUTED["prune-l1"], lambda layer: prune.remove(layer, WEIGHT)),
    "parametrization": (
        COMPUTED["own-parametrization"],
        lambda layer: parametrize.remove_parametrizations(layer, WEIGHT),
    ),
}


@CASES.add(each=REMOVED)
def computed_weights_removed(use: Use, given: tuple[Callable[[Any], Any], Callable[[Any], Any]]) -> Any:
    make, remove = given
    layer = make(use(nn.GRU(F, use.H).double()))
    before = layer(batch())
    remove(layer)
    return before, sorted(layer.state_dict()), type(layer).__name__, learn(layer, batch())


@CASES.add()
def global_pruning_then_updates(use: Use) -> Any:
    model = use(nn.ModuleList([nn.GRU(F, use.H), nn.LSTM(F, use.H)]).double())
    pairs = [(layer, name) for layer in model for name in (WEIGHT, "weight_ih_l0")]
    prune.global_unstructured(pairs, pruning_method=prune.L1Unstructured, amount=0.4)
    losses = [update(layer, batch()) for layer in model]
    for layer, name in pairs:
        prune.remove(layer, name)
    return losses, [learn(layer, batch()) for layer in model], dict(model.state_dict())


class WeightDrop(nn.Module):
    """Dropout on the recurrent weights, as language models have it: the layer's weight is set at each call."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer
        self.raw = nn.Parameter(layer.weight_hh_l0.detach().clone())
        del layer._parameters[WEIGHT]

    def forward(self, x: torch.Tensor) -> Any:
        self.layer.weight_hh_l0 = functional.dropout(self.raw, 0.5, training=self.training)
        return self.layer(x)


@CASES.add(each={"lstm": nn.LSTM, "gru": nn.GRU})
def dropped_weights(use: Use, layer: type[nn.RNNBase]) -> Any:
    model = use(WeightDrop(layer(F, use.H).double()))
    return update(model, batch()), model.eval()(batch()), torch.get_rng_state()


@CASES.add(each={"func": torch.func.functional_call, "stateless": stateless.functional_call})
def weights_of_a_hypernetwork(use: Use, call: Callable[..., Any]) -> Any:
    model = use(nn.GRU(F, use.H).double())
    code = torch.ones(3, dtype=torch.float64, requires_grad=True)
    made = {name: code.sum() * p.detach() + code[0] for name, p in model.named_parameters()}
    result = call(model, made, (batch(),))
    loss_of(result).backward()
    return result, code.grad, gradients(model), learn(model, batch())


@CASES.add(raises=RuntimeError)
def functional_call_of_a_wrong_shape(use: Use) -> None:
    model = use(nn.GRU(F, use.H).double())
    torch.func.functional_call(model, {"weight_hh_l0": torch.ones(3, 2).double()}, (batch(),))


@CASES.add()
def weights_are_replaced(use: Use) -> Any:
    model = use(nn.GRU(F, use.H).double())
    first = model(batch())
    model.weight_hh_l0 = nn.Parameter(torch.zeros_like(model.weight_hh_l0))
    second = learn(model, batch())
    model.weight_ih_l0.data = torch.ones_like(model.weight_ih_l0)
    nn.init.orthogonal_(model.weight_hh_l0)
    third = model(batch())
    model.reset_parameters()
    return first, second, third, model(batch()), model.all_weights


@CASES.add()
def weights_of_foreign_layout(use: Use) -> Any:
    model = use(nn.GRU(F, use.H).double())
    model.weight_hh_l0 = nn.Parameter(torch.randn(use.H, 3 * use.H, dtype=torch.float64).t())
    model.bias_ih_l0 = nn.Parameter(torch.randn(6 * use.H, dtype=torch.float64)[::2])
    return learn(model, batch())


# Hooks


def _count(model: nn.Module, *given: Any) -> Any:
    """Every kind of hook on a module and its parameters, and how often each was called, in which order."""
    calls: list[str] = []

    def note(name: str) -> Callable[..., None]:
        return lambda *_: calls.append(name)

    model.register_forward_pre_hook(note("before forward"))
    model.register_forward_hook(note("after forward"))
    model.register_full_backward_pre_hook(note("before backward"))
    model.register_full_backward_hook(note("after backward"))
    for name, parameter in model.named_parameters():
        parameter.register_hook(note(f"gradient of {name}"))
        parameter.register_post_accumulate_grad_hook(note(f"accumulated {name}"))
    result = learn(model, *given)
    first = sorted(calls)
    calls.clear()
    model.zero_grad()
    learn(model, *given)
    return result, first, sorted(calls)


@CASES.add(each=KINDS)
def hooks(use: Use, layer: type[nn.RNNBase]) -> Any:
    return _count(use(layer(F, use.H, num_layers=2).double()), batch())


@CASES.add(cold=True)
def hooks_of_a_cold_layer(use: Use) -> Any:
    return _count(use(nn.GRU(F, use.H).double()), batch())


@CASES.add()
def hooks_change_what_they_see(use: Use) -> Any:
    model = use(nn.GRU(F, use.H).double())
    model.register_forward_pre_hook(lambda _, args: (args[0] * 2, *args[1:]))
    model.register_forward_pre_hook(lambda _, args, names: (args, {"hx": None, **names}), with_kwargs=True)
    model.register_forward_hook(lambda _, __, result: (result[0] + 1, result[1]))
    model.register_full_backward_hook(lambda _, by_input, __: tuple(None if g is None else g * 3 for g in by_input))
    model.weight_hh_l0.register_hook(lambda gradient: gradient * 5)
    return learn(model, batch())


@CASES.add()
def hooks_of_all_modules(use: Use) -> Any:
    calls: list[str] = []
    model = use(nn.Sequential(nn.GRU(F, use.H)).double())
    handle = nn.modules.module.register_module_forward_hook(lambda module, *_: calls.append(type(module).__name__))
    try:
        model(batch())
    finally:
        handle.remove()
    return calls


@CASES.add()
def hooks_of_tensors(use: Use) -> Any:
    model, seen = use(nn.GRU(F, use.H).double()), []
    x_TBF = batch() * 1
    x_TBF.retain_grad()
    x_TBF.register_hook(lambda gradient: seen.append(gradient) or gradient * 2)
    y, after = model(x_TBF)
    y.register_hook(seen.append)
    y.retain_grad()
    after.register_hook(lambda gradient: gradient * 0)
    loss_of((y, after)).backward()
    return seen, x_TBF.grad, y.grad, gradients(model)


# Dropout and random numbers


@CASES.add(each={f"{kind}-{p}": (KINDS[kind], p) for kind in KINDS for p in (0.3, 1.0)})
def dropout(use: Use, given: tuple[type[nn.RNNBase], float]) -> Any:
    layer, p = given
    model = use(layer(F, use.H, num_layers=3, dropout=p, bidirectional=True).double())
    results = [learn(model, batch()) for _ in range(2)]
    return results, torch.get_rng_state(), model.eval()(batch()), model.train()(batch()), torch.get_rng_state()


@CASES.add(cold=True)
def random_numbers_of_a_cold_layer(use: Use) -> Any:
    model = use(nn.GRU(F, use.H, num_layers=2, dropout=0.5).double())
    return model(batch()), torch.get_rng_state(), model(pack_padded_sequence(batch(), torch.tensor([4, 2, 1])))


@CASES.add(each=KINDS)
def options_change_later(use: Use, layer: type[nn.RNNBase]) -> Any:
    model = use(layer(F, use.H, num_layers=2, dropout=0.5).double())
    results = [model(batch())]
    for name, value in {"dropout": 0.0, "batch_first": True, "training": False}.items():
        setattr(model, name, value)
        results.append(model(batch()))
    return results, repr(model), torch.get_rng_state()


@CASES.add(each=KINDS, raises=RuntimeError)
def input_size_changes_later(use: Use, layer: type[nn.RNNBase]) -> None:
    model = use(layer(F, use.H).double())
    model(batch())
    model.input_size = F + 1
    model(batch())
