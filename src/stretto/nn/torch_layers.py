"""Torch's recurrent layers on generated kernels: the same layers, faster.

An accelerated layer keeps its class, its parameters and its place in the model. It carries one more attribute, the name
of a backend, which the `forward` of its class looks for:

    layer(x, hx) --> nn.LSTM.forward --+-- not accelerated ---------------------------------------> torch's own
                                       +-- somebody looks at the call: export, tracing, transforms --> torch's own
                                       +-- no code is generated for such inputs --------------------> torch's own
                                       +-- torch is faster for such batches -------------------------> torch's own
                                       +-- otherwise ------------------------------------------------> generated code

So a subclass that calls `super().forward` is accelerated below its own code, a saved model is made of torch's layers,
and whatever goes by the type of a layer (quantisation, pruning, summaries) finds the type that it knows.

Shape legend: B sequences, T steps, F features, P real steps of all sequences, L layers times directions, H units.
"""

import functools
import logging
import operator
import threading
import types
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Final, TypeVar, final, get_args

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from stretto import cells
from stretto.checks import check_bool, check_choice
from stretto.errors import StrettoError
from stretto.kernels import CALLS, Backend, Built, TracedProgram, build, kept_size, parameter_names, register_programs
from stretto.nn.choice import Kind, expected_speedup, fill_parameters, rounded_fill, was_disturbed
from stretto.nn.compiled import admit_layers, evaluated, layers_are_traced, operators_are_usable, run_layers
from stretto.nn.guards import PLAIN_TENSORS, is_looked_at, opaque, unusual_tensor, warn_once
from stretto.nn.ragged import PackedBatch, check_lengths, cut_at_resets, pack_batch, reverse_padded, values_of
from stretto.nn.stack import Direction, run_stack
from stretto.state import map_state

Module = TypeVar("Module", bound=nn.Module)
KINDS: Final = (nn.RNN, nn.GRU, nn.LSTM)
DTYPES: Final = (torch.float32, torch.float64)
DTYPES_ON_GPUS: Final = (*DTYPES, torch.bfloat16)
"""Of layers that generated code may take there; in float16 cuDNN has kernels that nothing generated would beat."""
BACKEND: Final = "_stretto_backend"
ON_GPUS: Final = ("triton", "cudagraph")
"""The attribute of an accelerated layer. Its value is a plain string: it can be saved and read without Stretto."""
TORCH_IS_FASTER: Final = "torch is faster for such batches"
MAX_KNOWN_BATCHES: Final = 1024
"""Shapes of batches that a layer remembers as left to torch."""
UNMEASURED: Final = "auto, unmeasured"
"""Its value for "auto" that takes generated code wherever there is some."""
_OWN_METHODS: Final = (
    "check_forward_args",
    "check_input",
    "check_hidden_size",
    "get_expected_hidden_size",
    "permute_hidden",
)
"""What torch's forward calls: a subclass that changes one of these means it to be called."""
_TORCH_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}
MIN_SPEEDUP: Final = 1.03
"""How much faster generated code is expected to be for "auto" to take it: a tie goes to torch's own layer."""
MIN_DISTURBED_SPEEDUP: Final = 0.67
"""The same where other work disturbed the measurement: torch's layers of GRU and RNN are up to 200 times slower, and
generated code is rarely slower by a third, so that doubt costs least with generated code."""
CPU: Final = torch.device("cpu")
_DTYPE_NAMES: Final = {torch.float32: "float32", torch.float64: "float64"}
_log = logging.getLogger("stretto")


def accelerate(model: Module, *, backend: Backend = "auto", measure: bool = True) -> Module:
    """Run every `torch.nn.RNN`, `GRU` and `LSTM` inside `model` on generated kernels.

    The layers keep their class, parameters, `state_dict` keys and options, and compute the same outputs and gradients.
    A subclass is accelerated where its code calls `super().forward`. `torch.export`, tracing and `torch.func` see
    torch's own layer. `restore` undoes it; `explain` shows which backend runs each layer, and why.

    An accelerated layer has two more arguments: `lengths=` of the sequences of a padded batch, and `resets=`, booleans
    with the batch and time dimensions of the input, which reset the state to zero before a step, for example after the
    end of an episode.

    Args:
        model: Any module; it is also returned.
        backend: "auto" takes the generated kernel or torch's own, whichever is expected to be faster for a batch.
            "cpp" always takes the generated kernel, "triton" the one for GPUs, "eager" runs the same loops operator by
            operator, and "torch" always runs torch's own. Where one of them cannot run a batch, torch's own does, with
            a warning.
        measure: Whether "auto" measures which of the two is faster, once for each kind of layer and machine. If not,
            it takes the generated kernel wherever there is one.

    Raises:
        StrettoError: `model` is not a module, or nothing can be compiled here and `backend` is "cpp".

    Examples:
        >>> model = stretto.accelerate(torch.nn.Sequential(torch.nn.GRU(8, 32, batch_first=True)))
        >>> type(model[0]).__name__
        'GRU'
    """
    check_module(model)
    check_choice(backend, name="backend", choices=get_args(Backend))
    check_bool(measure, name="measure")
    _install()
    taken, left = [], []
    for name, module in recurrent_modules(model):
        reason = unfit(module)
        if reason:
            left.append(f"{name or type(module).__name__} ({reason})")
            continue
        if backend == "cpp":
            _require_code(name, module)
        module.__dict__[BACKEND] = backend if measure or backend != "auto" else UNMEASURED
        RECORDS.pop(module, None)
        taken.append(name or type(module).__name__)
    _log.info("accelerated %d recurrent layers: %s", len(taken), ", ".join(taken) or "there is none")
    if left:
        _log.info("left alone: %s", "; ".join(left))
    return model


def restore(model: Module) -> Module:
    """Undo `accelerate`: every layer of `model` runs as torch's own again.

    Args:
        model: Any module; it is also returned.
    """
    check_module(model)
    for module in model.modules():
        module.__dict__.pop(BACKEND, None)
        RECORDS.pop(module, None)
    return model


def check_module(model: Any) -> None:
    """An error unless it is a module."""
    if not isinstance(model, nn.Module):
        raise StrettoError(f"{type(model).__name__} is not a module", fix="Give a torch.nn.Module.")


def recurrent_modules(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every recurrent layer or cell of torch's in a model, with its name."""
    for name, module in model.named_modules():
        if isinstance(module, (nn.RNNBase, nn.RNNCellBase)):
            yield name, module


def unfit(module: nn.Module) -> str:
    """Why a layer cannot be accelerated, whatever its inputs are; empty if it can."""
    if isinstance(module, nn.RNNCellBase):
        return "a cell, called once per step from Python: give the loop's body to stretto.RNN"
    if not isinstance(module, KINDS):
        return "not a torch.nn.RNN, GRU or LSTM"
    kind = next(kind for kind in KINDS if isinstance(module, kind))
    for name in _OWN_METHODS:
        if name in module.__dict__ or getattr(type(module), name) is not getattr(kind, name):
            return f"{type(module).__name__} has a {name} of its own"
    if not _is_torchs(kind.__dict__["forward"]):
        return f"torch.nn.{kind.__name__}.forward is not torch's own"
    return ""


def _require_code(name: str, layer: nn.Module) -> None:
    assert isinstance(layer, nn.RNNBase)
    if is_looked_at():
        return  # nothing can be traced meanwhile; the first call says whether there is code
    dtype = next((p.dtype for p in layer.parameters() if p.dtype in DTYPES), torch.float32)
    reason = _no_code(layer, dtype, "cpp")
    if reason:
        raise StrettoError(
            f"no code can be generated for {name or type(layer).__name__}: {reason}",
            fix="Choose backend='auto' to run it by torch's own layer; see `stretto doctor`.",
        )


@final
@dataclass(frozen=True, slots=True)
class LeftToTorch:
    """Batches of one shape for which torch's own layer is faster: single steps or not, and the shapes of their states.

    Unbatched sequences have no shapes here: for these torch's own forward does more than call its operator. All of it
    holds for the layer's `options` at that time; whoever changes one later gets torch's own forward, once.
    """

    shape: torch.Size
    is_step: bool
    states: tuple[torch.Size, ...]
    options: tuple[Any, ...]


@final
@dataclass(slots=True)
class LayerRecord:
    """What became of a layer's calls: how many were run by which backend, or left to torch for which reason.

    Attributes:
        calls: By backend and reason.
        single_steps: Calls of one step.
        last: The last batch that was not a single step: dtype, T, B, fill as in `Kind`, whether gradients were wanted,
            whether one of the input was, and its device.
        left_to_torch: Batches for which torch's own layer is faster, as `_batch_key` names them.
        last_step: The last single step among these.
    """

    calls: Counter[tuple[str, str]] = field(default_factory=Counter)
    single_steps: int = 0
    last: tuple[torch.dtype, int, int, float, bool, bool, torch.device] | None = None
    left_to_torch: dict[tuple[Any, ...], LeftToTorch] = field(default_factory=dict)
    last_step: LeftToTorch | None = None


RECORDS: Final["weakref.WeakKeyDictionary[nn.Module, LayerRecord]"] = weakref.WeakKeyDictionary()


class _Forward:
    """In the place of `forward` in a class of torch's: a layer that is not accelerated gets what was there before.

    The class itself gives a function that makes the same choice, for those who call `nn.LSTM.forward(layer, x)`, or
    replace the method for a while and put back what they had found.
    """

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original
        self.accelerated = accelerated = _accelerated(original)
        mark = BACKEND

        def forward(self: nn.RNNBase, *args: Any, **kwargs: Any) -> Any:
            return (accelerated if mark in self.__dict__ else original)(self, *args, **kwargs)

        self.of_class = _in_place_of(original, forward)

    def __get__(self, layer: nn.Module | None, owner: type | None = None) -> Any:
        if layer is None:
            return self.of_class
        return (self.accelerated if BACKEND in layer.__dict__ else self.original).__get__(layer, owner)


_FORWARDS: Final[dict[type[nn.RNNBase], _Forward]] = {}
_installing = threading.Lock()


def _install() -> None:
    with _installing:
        for kind in KINDS:
            found = kind.__dict__["forward"]
            if kind not in _FORWARDS and _is_torchs(found):
                _FORWARDS[kind] = _Forward(found)
            if kind in _FORWARDS and found in {_FORWARDS[kind].original, _FORWARDS[kind].of_class}:
                kind.forward = _FORWARDS[kind]  # type: ignore[method-assign, assignment]
        admit_layers(BACKEND, _Forward.__get__.__code__)


def _is_torchs(forward: Any) -> bool:
    """Whether it is torch's own, or ours in its place."""
    return isinstance(forward, _Forward) or getattr(forward, "__globals__", None) is vars(nn.modules.rnn)


def _in_place_of(original: Callable[..., Any], forward: Callable[..., Any]) -> Callable[..., Any]:
    """The function `forward`, which looks like torch's own to those who read its source.

    TorchScript compiles the source of `forward`: it follows `__wrapped__`, looks up names in `__globals__`, and wants
    the line number to lie within the class. It gets torch's own source, so a scripted layer is torch's. Names are those
    of torch's module there, so `forward` has what it uses in its closure.
    """
    assert isinstance(forward, types.FunctionType)
    assert isinstance(original, types.FunctionType)
    made = types.FunctionType(
        forward.__code__.replace(co_firstlineno=original.__code__.co_firstlineno),
        original.__globals__,
        "forward",
        forward.__defaults__,
        forward.__closure__,
    )
    return functools.wraps(original)(made)


def _accelerated(original: Callable[..., Any]) -> Callable[..., Any]:
    """The forward of an accelerated layer."""
    run, run_in_graph, run_left, is_compiling, is_exporting, is_traced = _run, _run_in_graph, _run_left, *_COMPILER
    find_record, tensor_type = RECORDS.get, torch.Tensor

    def forward(
        self: nn.RNNBase,
        input: Any,  # noqa: A002
        hx: Any = None,
        lengths: Any = None,
        resets: Any = None,
    ) -> Any:
        if lengths is None and resets is None:
            if is_compiling():
                if is_exporting():
                    return original(self, input, hx)
                if is_traced():
                    return run_in_graph(self, original, input, hx)
            elif (
                (known := find_record(self)) is not None
                and (step := known.last_step) is not None
                and type(input) is tensor_type
                and input.shape == step.shape
            ):
                return run_left(self, original, known, step, input, hx)
        return run(self, original, input, hx, lengths, resets)

    return _in_place_of(original, forward)


def _run_left(  # noqa: PLR0917 - those of forward
    layer: nn.RNNBase, original: Callable[..., Any], known: LayerRecord, left: LeftToTorch, x: torch.Tensor, hx: Any
) -> Any:
    """A batch that torch is known to be faster for, as in a loop over single steps, where each microsecond counts.

    What torch's own forward looks at before it calls its operator takes a fifth of a single step. All of it is known to
    hold for tensors of the shapes and the dtype of a call that was let through before; others go to that forward.
    """
    known.calls[_LEFT] += 1
    known.single_steps += left.is_step
    weights, shapes, is_lstm = layer._flat_weights, left.states, layer.mode == "LSTM"
    if left.options != _options(layer):
        known.left_to_torch.clear()
        known.last_step = None
        return original(layer, x, hx)
    if not shapes or torch._C._get_tracing_state() is not None:
        return original(layer, x, hx)
    if hx is None:
        zeros = tuple(torch.zeros(shape, dtype=x.dtype, device=x.device) for shape in shapes)
        hx = zeros if is_lstm else zeros[0]
    states = hx if is_lstm and type(hx) is tuple else (hx,)
    if len(states) != len(shapes) or weights[0] is None or x.dtype is not weights[0].dtype:
        return original(layer, x, hx)
    for state, shape in zip(states, shapes, strict=True):
        if type(state) is not torch.Tensor or state.shape != shape:
            return original(layer, x, hx)
    parameters = layer._parameters
    for weight, name in zip(weights, layer._flat_weights_names, strict=True):
        if parameters.get(name) is not weight:
            return original(layer, x, hx)
    settings = layer.bias, layer.num_layers, layer.dropout, layer.training, layer.bidirectional, layer.batch_first
    result = _TORCH_FUNCTIONS[layer.mode](x, hx, weights, *settings)
    return (result[0], result[1:]) if is_lstm else result


_options: Final = operator.attrgetter(
    "mode", "input_size", "hidden_size", "proj_size", "num_layers", "bidirectional", "batch_first"
)
"""What, of a layer's options, says how it reads a batch: attributes, which anybody may change."""
_LEFT: Final = ("torch", TORCH_IS_FASTER)
_COMPILER: Final = (torch.compiler.is_compiling, torch.compiler.is_exporting, layers_are_traced)


@opaque
def _run(  # noqa: PLR0917 - those of forward
    layer: nn.RNNBase, original: Callable[..., Any], x: Any, hx: Any, lengths: Any, resets: Any = None
) -> Any:
    if torch.is_autocast_enabled("cpu") and (dtypes := _dtypes_under_autocast(layer, x, hx)) is not None:
        within, given, of_cell = dtypes
        with torch.autocast("cpu", enabled=False):
            hx = None if hx is None else map_state(lambda part: part.to(within), hx)
            y, after = _run(layer, original, x.to(within), hx, lengths, resets)
            is_lstm = layer.mode == "LSTM"
            return y.to(given), (after[0].to(given), after[1].to(of_cell)) if is_lstm else after.to(given)
    if resets is not None:
        return _run_segments(layer, original, x, hx, lengths, resets)
    backend: str = layer.__dict__[BACKEND]
    # A batch that torch is known to be faster for gets there at once: what is looked at below takes as long as a few
    # steps of torch's layer.
    is_plain = type(x) is torch.Tensor and lengths is None and backend == "auto"
    if is_plain and (known := RECORDS.get(layer)) and (left := known.left_to_torch.get(_batch_key(x))) is not None:
        return _run_left(layer, original, known, left, x, hx)
    if isinstance(x, torch.Tensor) and x.is_nested:
        return _run_jagged(layer, original, x, hx, lengths)
    if lengths is not None:
        _check_ragged(layer, x, hx)
    reason = "backend='torch' was asked for" if backend == "torch" else torch_only(layer, x, hx, backend)
    if not reason and lengths is None and backend == "auto" and not _is_faster(layer, x):
        reason = TORCH_IS_FASTER
    _record(layer, x, "torch" if reason else _backend_of(layer, x, backend), reason)
    if not reason:
        return run_generated(layer, x, hx, lengths)
    if backend in {"cpp", "triton", "cudagraph", "eager"} and not is_looked_at(getattr(x, "device", None)):
        warn_once(f"{type(layer).__name__} runs as torch's own layer instead of {backend!r}: {reason}")
    if reason is TORCH_IS_FASTER and is_plain:
        shapes = _state_shapes(layer, _num_rows(layer, x)) if x.dim() == 3 else []
        sizes = tuple(torch.Size(shape) for shape in shapes)
        left = LeftToTorch(shape=x.shape, is_step=_num_steps(layer, x) == 1, states=sizes, options=_options(layer))
        record = RECORDS[layer]
        if left.is_step:
            record.last_step = left
        if len(record.left_to_torch) < MAX_KNOWN_BATCHES:
            record.left_to_torch[_batch_key(x)] = left
    return original(layer, x, hx) if lengths is None else _run_packed(layer, original, x, hx, lengths)


def _dtypes_under_autocast(layer: nn.RNNBase, x: Any, hx: Any) -> tuple[torch.dtype, torch.dtype, torch.dtype] | None:
    """What a call under autocast computes in, and of what dtype its results and an LSTM's cell state are.

    None for calls that torch's layers take as they are. As in `stretto.RNN` it computes in the dtype of the weights,
    which is wider. What torch returns is found as it is in torch: float64 is left alone, and a state that is added to
    takes part in the promotion of its own dtype, but an LSTM is a single operator where oneDNN has one.
    """
    data = x.data if isinstance(x, PackedSequence) else x
    within: torch.dtype = layer._flat_weights[0].dtype  # type: ignore[union-attr]
    states = [] if hx is None else list(hx) if isinstance(hx, (tuple, list)) else [hx]
    if not all(isinstance(t, torch.Tensor) and t.is_cpu and t.is_floating_point() for t in (data, *states)):
        return None
    if torch.float64 in {within, data.dtype}:
        return (within, within, within) if all(t.dtype is within for t in (data, *states)) else None
    if within not in DTYPES:
        return None
    low = torch.get_autocast_dtype("cpu")
    is_packed = isinstance(x, PackedSequence)
    is_single = not is_packed and not layer.proj_size and data.dtype is not torch.float16
    if layer.mode.startswith("RNN") or (layer.mode == "LSTM" and is_single and torch._C._get_mkldnn_enabled()):
        return within, low, low
    promoted = torch.promote_types(low, states[-1].dtype if states else data.dtype)
    return within, low if layer.proj_size else promoted, promoted  # a projection is a product of low precision


def _batch_key(x: torch.Tensor) -> tuple[Any, ...]:
    return (x.shape, x.dtype, x.device, x.requires_grad, torch.is_grad_enabled(), torch.get_num_threads())


def _check_ragged(layer: nn.RNNBase, x: Any, hx: Any) -> None:
    """What comes with `lengths`, of which torch's own checks know nothing."""
    if not isinstance(x, torch.Tensor) or x.dim() != 3:
        raise StrettoError("lengths are for padded batches", fix="Give (batch, steps, features), or no lengths.")
    if hx is not None:
        given = list(hx) if layer.mode == "LSTM" and isinstance(hx, (tuple, list)) else [hx]
        have = [tuple(part.shape) if isinstance(part, torch.Tensor) else type(part).__name__ for part in given]
        want = _state_shapes(layer, _num_rows(layer, x))
        if have != want:
            raise StrettoError(f"the state is {have} and {type(layer).__name__} takes {want}", fix="Give that.")


def _run_jagged(layer: nn.RNNBase, original: Callable[..., Any], x: torch.Tensor, hx: Any, lengths: Any) -> Any:
    """A jagged nested tensor, as the packed batch of the same sequences."""
    batch = pack_batch(x, lengths, batch_first=layer.batch_first)
    if batch.order_B is None or batch.layout.num_nonempty < max(batch.layout.num_rows, 1):
        raise StrettoError("the nested tensor has sequences without steps", fix="Leave them out, or use stretto.RNN.")
    sizes_T = torch.from_numpy(batch.layout.rows_T.astype("int64"))
    packed = PackedSequence(batch.x_PF, sizes_T, batch.order_B, torch.argsort(batch.order_B))
    y, after = _run(layer, original, packed, hx, None)
    return batch.unpack(y.data), after


def _run_segments(  # noqa: PLR0917 - those of forward
    layer: nn.RNNBase, original: Callable[..., Any], x: Any, hx: Any, lengths: Any, resets: Any
) -> Any:
    """A batch that is cut where its sequences are reset, as the packed batch of its segments."""
    if isinstance(x, torch.Tensor) and x.dim() == 2 and not x.is_nested:
        dim = 0 if layer.batch_first else 1
        hx = None if hx is None else map_state(lambda state: state.unsqueeze(1), hx)
        resets = resets.unsqueeze(dim) if isinstance(resets, torch.Tensor) else resets
        y, after = _run_segments(layer, original, x.unsqueeze(dim), hx, lengths, resets)
        return y.squeeze(dim), map_state(lambda state: state.squeeze(1), after)
    if lengths is not None:
        _check_ragged(layer, x, hx)
    values_of(x)
    batch = pack_batch(x, lengths, batch_first=layer.batch_first)
    segments = cut_at_resets(batch, resets, batch_first=layer.batch_first)
    count = segments.layout.num_nonempty
    if not count:
        return _run(layer, original, x, hx, lengths)
    is_reverse = [layer.bidirectional and index % 2 == 1 for index in range(_num_slices(layer))]

    def start(state_LBH: torch.Tensor) -> torch.Tensor:
        if batch.order_B is not None:
            state_LBH = state_LBH.index_select(1, batch.order_B.to(state_LBH.device))
        states = zip(state_LBH, torch.zeros_like(state_LBH), is_reverse, strict=True)
        return torch.stack([segments.start_states(given, new, reverse=back) for given, new, back in states])

    starts = None if hx is None else map_state(start, hx)
    sizes_T = torch.from_numpy(segments.layout.rows_T)
    packed = PackedSequence(segments.cut(batch.x_PF), sizes_T)
    given = None if starts is None else map_state(lambda state: state[:, :count], starts)
    y, after = _run(layer, original, packed, given, None)

    def end(state_LSH: torch.Tensor, *begun: torch.Tensor) -> torch.Tensor:
        missing = len(segments.sequence_S) - count  # sequences without steps keep their state
        if missing:
            kept = begun[0][:, count:] if begun else state_LSH.new_zeros(len(state_LSH), missing, state_LSH.shape[2])
            state_LSH = torch.cat([state_LSH, kept], dim=1)
        pairs = zip(state_LSH, is_reverse, strict=True)
        state_LBH = torch.stack([segments.end_states(state, reverse=back) for state, back in pairs])
        if batch.order_B is None:
            return state_LBH
        return state_LBH.index_select(1, torch.argsort(batch.order_B).to(state_LBH.device))

    finals = map_state(end, after) if starts is None else map_state(end, after, starts)
    return batch.unpack(segments.join(y.data)), finals


def _run_in_graph(layer: nn.RNNBase, original: Callable[..., Any], x: Any, hx: Any) -> Any:
    """What Dynamo traces of a layer: a registered operator for each layer, or what it traces of torch's own.

    The batch is not measured, since what Dynamo makes of torch's own is an operator for each step.
    """
    if not isinstance(x, torch.Tensor) or x.is_nested:
        return _run(layer, original, x, hx, None)
    weights = [getattr(layer, name) for name in layer._flat_weights_names]
    given = [] if hx is None else list(hx) if isinstance(hx, (tuple, list)) else [hx]
    if (
        layer.__dict__[BACKEND] == "torch"
        or x.dim() not in {2, 3}
        or x.dtype not in DTYPES
        or any(t.device.type != "cpu" or t.dtype != x.dtype for t in (x, *given, *weights))
        or x.numel() == 0
        or (hx is not None and not given)
        or [tuple(weight.shape) for weight in weights] != _weight_shapes(layer, x.shape[-1])
        or not operators_are_usable()
    ):
        return original(layer, x, hx)
    programs = _complete_names(_program_names(layer, weights[0].shape[1], x.dtype))
    if programs is None:
        return original(layer, x, hx)
    is_single = x.dim() == 2
    x_TBF = x.unsqueeze(1) if is_single else x.transpose(0, 1) if layer.batch_first else x
    wanted = _state_shapes(layer, x_TBF.shape[1])
    if given:
        if is_single:
            given = [state.unsqueeze(1) for state in given]
        is_tuple = isinstance(hx, (tuple, list))
        if is_tuple != (layer.mode == "LSTM") or [tuple(state.shape) for state in given] != wanted:
            return original(layer, x, hx)  # says what is wrong
    states = given or [x.new_zeros(shape) for shape in wanted]
    count = _num_slices(layer)
    per_program = len(weights) // count
    y_TBF, finals = run_layers(
        [[name] * _num_directions(layer) for name in programs],
        x_TBF,
        [[state[index] for state in states] for index in range(count)],
        [weights[index * per_program : (index + 1) * per_program] for index in range(count)],
        dropout=layer.dropout if layer.training else 0.0,
    )
    after = [torch.stack([parts[index] for parts in finals]) for index in range(len(states))]
    if is_single:
        y, after = y_TBF.squeeze(1), [state.squeeze(1) for state in after]
    else:
        y = y_TBF.transpose(0, 1) if layer.batch_first else y_TBF
    return y, tuple(after) if layer.mode == "LSTM" else after[0]


def _program_names(layer: nn.RNNBase, width: int, dtype: torch.dtype) -> list[str]:
    """By which registered operators find the program of each layer, in this process and in others: all its sizes."""
    backend = "eager" if layer.__dict__[BACKEND] == "eager" else "auto"
    rest = f"{layer.hidden_size}:{layer.proj_size}:{int(layer.bias)}:{_DTYPE_NAMES.get(dtype)}:{backend}"
    widths = [width] + [output_width(layer)] * (layer.num_layers - 1)
    return [f"torch:{layer.mode}:{width}:{rest}" for width in widths]


def _built_of(name: str) -> Built:
    """The program of such a name."""
    _, mode, width, hidden, proj, bias, dtype, backend = name.split(":")[:8]
    return _layer_program(
        mode,
        input_size=int(width),
        hidden_size=int(hidden),
        proj_size=int(proj),
        bias=bool(int(bias)),
        dtype=getattr(torch, dtype),
        backend="eager" if backend == "eager" else "auto",
    )


def _find_program(name: str) -> TracedProgram | None:
    program = _built_of(name).program
    return program if isinstance(program, TracedProgram) else None


@evaluated
def _complete_names(names: list[str]) -> list[str] | None:
    """The names if there is code for them all, each with what the operator keeps.

    Compilers store graphs: one that was made with another Stretto, which kept something else, must not be found.
    """
    completed = []
    for name in names:
        program, (proj, bias, _, backend) = _find_program(name), name.split(":")[4:]
        wanted = _weight_names(bias=bias == "1", proj_size=int(proj))
        if program is None or parameter_names(program) != wanted:
            return None
        if _built_of(name).backend not in _runs_on(backend, CPU):
            return None
        completed.append(f"{name}:{kept_size(program)}")
    return completed


def compiled_calls(layer: nn.RNNBase) -> int:
    """How often compiled graphs have called layers with the sizes of this one."""
    weight = layer._flat_weights[0]
    assert weight is not None
    name, *further = _program_names(layer, int(weight.shape[1]), weight.dtype)
    wanted = [name] * _num_directions(layer)
    calls = (count for key, count in CALLS.items() if [part.rpartition(":")[0] for part in key.split(" ")] == wanted)
    return sum(calls) // (1 + further.count(name))


def _record(layer: nn.RNNBase, x: Any, backend: str, reason: str) -> None:
    record = RECORDS.get(layer)
    if record is None:
        record = RECORDS[layer] = LayerRecord()
    record.calls[backend, reason] += 1
    if backend == "torch" and is_looked_at(getattr(x, "device", None)):
        return
    is_packed = isinstance(x, PackedSequence)
    if not is_packed and (not isinstance(x, torch.Tensor) or x.dim() not in {2, 3}):
        return
    num_steps = _num_steps(layer, x)
    if num_steps == 1:
        record.single_steps += 1
    else:
        data = x.data if is_packed else x
        record.last = (
            data.dtype,
            num_steps,
            _num_rows(layer, x),
            _fill(layer, x),
            torch.is_grad_enabled(),
            data.requires_grad,
            data.device,
        )


def torch_only(layer: nn.RNNBase, x: Any, hx: Any, backend: str) -> str:  # noqa: PLR0911 - one return per reason
    """Why torch's own forward must take a call; empty if generated code can."""
    is_packed = isinstance(x, PackedSequence)
    data = x.data if is_packed else x
    reason = is_looked_at(getattr(data, "device", None))
    if reason:
        return reason
    if not isinstance(data, torch.Tensor):
        return f"the input is {type(data).__name__}"
    dtype, on_gpu = data.dtype, _runs_on(backend, data.device)[0] in ON_GPUS
    if dtype not in (DTYPES_ON_GPUS if on_gpu else DTYPES):
        return f"the input is {dtype}"
    states = [] if hx is None else list(hx) if isinstance(hx, (tuple, list)) else [hx]
    # Weights that are computed when they are read, some of them with a state, are not read more often than by torch.
    if "parametrizations" not in layer._modules and not _has_its_parameters(layer):
        layer._update_flat_weights()
    weights: list[Any] = layer._flat_weights
    if on_gpu and torch.is_autocast_enabled("cuda"):
        return "autocast is on, under which cuDNN computes in 16 bits"
    for tensor in (data, *states, *weights):
        # One pass, since this is part of every call; what is wrong is looked for only if something is.
        if (
            type(tensor) not in PLAIN_TENSORS
            or tensor.is_neg()
            or (tensor.device != data.device if on_gpu else not tensor.is_cpu)
            or tensor.dtype is not dtype
            or tensor.layout is not torch.strided
        ):
            where = "one GPU" if on_gpu else "the CPU"
            mixed = f"inputs, states and weights are not all on {where}, strided, and of one dtype"
            return unusual_tensor((data, *states, *weights)) or mixed
    num_dims = data.dim()
    if num_dims != 2 and (is_packed or num_dims != 3):
        return "the input has neither two nor three dimensions"
    shapes = [weight.shape for weight in weights]
    if data.numel() == 0 or data.shape[-1] != layer.input_size or shapes != _weight_shapes(layer, data.shape[-1]):
        return "the input or a weight does not fit the layer, or there is no input"
    if is_packed and not _is_well_formed(x):
        return "the packed batch is malformed"
    if hx is not None:
        is_single = num_dims == 2 and not is_packed
        wanted = [(n, h) if is_single else (n, b, h) for n, b, h in _state_shapes(layer, _num_rows(layer, x))]
        if isinstance(hx, (tuple, list)) != (layer.mode == "LSTM") or [tuple(s.shape) for s in states] != wanted:
            return "the state does not fit the layer"
    return _no_code(layer, data.dtype, backend, data.device)


def _has_its_parameters(layer: nn.RNNBase) -> bool:
    """Whether the weights that a call reads are the layer's parameters, as they nearly always are."""
    weights, names, parameters = layer._flat_weights, layer._flat_weights_names, layer._parameters
    if len(weights) != len(names):
        return False
    return all(weight is parameters.get(name) for weight, name in zip(weights, names, strict=True))


def _weight_shapes(layer: nn.RNNBase, input_width: int) -> list[tuple[int, ...]]:
    """Of all parameters in torch's order, for inputs of this width: `functional_call` may bring others."""
    hidden, out = layer.hidden_size, layer.proj_size or layer.hidden_size
    rows = {"LSTM": 4, "GRU": 3}.get(layer.mode, 1) * hidden
    shapes: list[tuple[int, ...]] = []
    for index in range(_num_slices(layer)):
        width = input_width if index < _num_directions(layer) else output_width(layer)
        shapes += [(rows, width), (rows, out), *[(rows,)] * (2 * layer.bias), *[(out, hidden)] * bool(layer.proj_size)]
    return shapes


def _runs_on(backend: str, device: torch.device) -> tuple[str, ...]:
    """The backends whose programs may run a layer there, by what was asked for."""
    if backend in {"eager", *ON_GPUS}:
        return (backend,)
    return ON_GPUS if backend != "cpp" and _is_gpu(device) else ("cpp",)


def _is_gpu(device: torch.device) -> bool:
    return device.type == "cuda"


def _backend_of(layer: nn.RNNBase, x: Any, backend: str) -> str:
    """The one that runs a batch that nothing stands in the way of."""
    data = x.data if isinstance(x, PackedSequence) else x
    found = _runs_on(backend, data.device)
    if len(found) == 1:
        return found[0]
    return _program(layer, input_width(layer), data.dtype, backend, data.device).backend


def _no_code(layer: nn.RNNBase, dtype: torch.dtype, backend: str, device: torch.device = CPU) -> str:
    """Why nothing could be built for a layer; empty if something was."""
    for width in (input_width(layer), output_width(layer))[: layer.num_layers]:
        try:
            built = _program(layer, width, dtype, backend, device)
        except StrettoError as error:
            return error.problem
        if built.backend not in _runs_on(backend, device):
            warn_once(
                f"{type(layer).__name__} runs as torch's own layer: {built.reason.rstrip('.')}; see `stretto doctor`"
            )
            return built.reason
    return ""


def _is_well_formed(x: PackedSequence) -> bool:
    sizes = x.batch_sizes
    falls = bool((sizes[1:] <= sizes[:-1]).all())
    return falls and int(sizes[-1]) > 0 and int(sizes.sum()) == len(x.data)


def speedup_of(
    layer: nn.RNNBase,
    *,
    dtype: torch.dtype,
    num_steps: int,
    num_rows: int,
    fill: float,
    training: bool,
    input_gradient: bool,
    device: torch.device,
) -> tuple[float, bool]:
    """How many times faster than torch's own generated code is expected to be for such a batch; `fill` as in `Kind`.

    And whether other work on the machine disturbed the measurement.
    """
    kind = Kind(
        mode=layer.mode,
        input_size=input_width(layer),
        hidden_size=layer.hidden_size,
        proj_size=layer.proj_size,
        num_layers=layer.num_layers,
        bidirectional=layer.bidirectional,
        bias=layer.bias,
        dtype=dtype,
        training=training,
        input_gradient=training and input_gradient,
        fill=fill,
        num_rows=1 << (num_rows - 1).bit_length(),
        threads=torch.get_num_threads(),
        device=device,
    )
    speedup = expected_speedup(kind, num_steps=num_steps, generated=run_generated, original=_run_original)
    return speedup, was_disturbed(kind)


def _fill(layer: nn.RNNBase, x: Any) -> float:
    if not isinstance(x, PackedSequence):
        return 0.0
    return rounded_fill(len(x.data), num_steps=_num_steps(layer, x), num_rows=_num_rows(layer, x))


def _run_original(layer: nn.RNNBase, x: Any) -> Any:
    return _FORWARDS[type(layer)].original(layer, x)


def _is_faster(layer: nn.RNNBase, x: Any) -> bool:
    is_packed = isinstance(x, PackedSequence)
    if not is_packed and _num_steps(layer, x) == 1:
        return False  # there is no loop to make faster
    data = x.data if is_packed else x
    speedup, is_disturbed = speedup_of(
        layer,
        dtype=data.dtype,
        num_steps=_num_steps(layer, x),
        num_rows=_num_rows(layer, x),
        fill=_fill(layer, x),
        training=torch.is_grad_enabled(),
        input_gradient=data.requires_grad,
        device=data.device,
    )
    return speedup >= (MIN_DISTURBED_SPEEDUP if is_disturbed else MIN_SPEEDUP)


def run_generated(layer: nn.RNNBase, x: Any, hx: Any = None, lengths: Any = None) -> Any:
    """On generated kernels, or the same loops operator by operator."""
    backend: str = layer.__dict__.get(BACKEND, "cpp")
    if "parametrizations" in layer._modules:
        layer._update_flat_weights()  # computes them; others were brought up to date when the call was looked at
    is_single = not isinstance(x, PackedSequence) and x.dim() == 2
    if is_single:
        x = x.unsqueeze(0 if layer.batch_first else 1)
        hx = None if hx is None else tuple(s.unsqueeze(1) for s in (hx if isinstance(hx, (tuple, list)) else [hx]))
    packed = pack_batch(x, lengths, batch_first=layer.batch_first)
    states_LBH = [] if hx is None else _states_LBH(layer, packed.x_PF, hx, packed.layout.num_rows)
    if packed.order_B is not None:
        states_LBH = [state.index_select(1, packed.order_B) for state in states_LBH]
    # Initial states that are zero can be one tensor: nobody else has it, and nothing is written to it.
    widths = [shape[-1] for shape in _state_shapes(layer, 1)]
    zeros = {} if states_LBH else {width: packed.x_PF.new_zeros(packed.layout.num_rows, width) for width in set(widths)}
    num_directions, width, dtype = _num_directions(layer), packed.x_PF.shape[1], packed.x_PF.dtype
    num_copied = _num_copied(layer, packed, x) if states_LBH and num_directions > 1 else 0
    layers = []
    for first in range(0, _num_slices(layer), num_directions):
        program = _program(layer, width, dtype, backend, packed.x_PF.device).program
        layers.append(
            [
                Direction(
                    program,
                    weights_of(layer, index),
                    [
                        state[index].clone() if index % 2 and number < num_copied else state[index]
                        for number, state in enumerate(states_LBH)
                    ]
                    or [zeros[size] for size in widths],
                )
                for index in range(first, first + num_directions)
            ]
        )
        width = output_width(layer)
    dropout = layer.dropout if layer.training else 0.0
    result = run_stack(layers, packed.layout, packed.x_PF, dropout=dropout, shown=packed.shown)
    y = packed.unpack_shown(result.y_PF)
    finals = [torch.stack(parts) for parts in zip(*result.states, strict=True)]
    if packed.order_B is not None:
        back_B = torch.argsort(packed.order_B)
        finals = [state.index_select(1, back_B) for state in finals]
    if is_single:
        y = y.squeeze(0 if layer.batch_first else 1)  # type: ignore[union-attr]
        finals = [state.squeeze(1) for state in finals]
    return y, tuple(finals) if layer.mode == "LSTM" else finals[0]


def _num_copied(layer: nn.RNNBase, packed: PackedBatch, x: Any) -> int:
    """Of how many of the given states torch's backward directions keep copies: of none, of h, or of h and c.

    What changes in these before the backward pass, unseen by autograd as through `.data`, has no effect then. Sequences
    that end early join those that are under way, and oneDNN's LSTM has a copy of h.
    """
    if not torch.is_grad_enabled():
        return 0
    if not packed.layout.is_even:
        return 2
    is_one_operator = layer.mode == "LSTM" and packed.x_PF.dtype is torch.float32 and not layer.proj_size
    return int(is_one_operator and not isinstance(x, PackedSequence) and torch._C._get_mkldnn_enabled())


def run_ragged(layer: nn.RNNBase, x: torch.Tensor, lengths: Any) -> torch.Tensor:
    """Outputs for a padded batch of sequences of these lengths, zero after each one's end.

    The same as `layer(x, lengths=lengths)[0]` of an accelerated layer, but where torch's own implementation runs, it
    runs on the padded batch, each direction over sequences that are reversed within their lengths: torch's layers are
    several times slower on packed batches.
    """
    if is_accelerated(layer, x):
        return run_generated(layer, x, lengths=lengths)[0]  # type: ignore[no-any-return]
    layer._update_flat_weights()
    weights = [list(weights_of(layer, index).values()) for index in range(_num_slices(layer))]
    x_BTF = x if layer.batch_first else x.transpose(0, 1)
    y_BTH = run_padded(
        layer.mode,
        weights,
        x_BTF,
        lengths,
        bidirectional=layer.bidirectional,
        dropout=layer.dropout if layer.training else 0.0,
    )
    return y_BTH if layer.batch_first else y_BTH.transpose(0, 1)


def is_accelerated(layer: nn.RNNBase, x: torch.Tensor) -> bool:
    """Whether something else than torch's own implementation runs batches of this type and device."""
    backend: str = layer.__dict__.get(BACKEND, "torch")
    layer._update_flat_weights()  # a call with other weights may have left those
    like_x = x[:1, :1, :1].expand(1, 1, input_width(layer))
    return backend != "torch" and not torch_only(layer, like_x, None, backend)


def run_padded(
    mode: str,
    weights: Sequence[list[torch.Tensor]],
    x_BTF: torch.Tensor,
    lengths: Any,
    *,
    bidirectional: bool,
    dropout: float,
) -> torch.Tensor:
    """Outputs of torch's own layers, one direction at a time, on the padded batch.

    Args:
        mode: As in `torch.nn.RNNBase`.
        weights: Of each layer and direction, in torch's order.
        x_BTF: The batch.
        lengths: Of its sequences; outputs are zero after each one's end.
        bidirectional: Whether every second of the weights is of a backward direction.
        dropout: Share dropped between layers.
    """
    num_directions = 2 if bidirectional else 1
    lengths_B = torch.from_numpy(check_lengths(lengths, *x_BTF.shape[:2])).to(x_BTF.device)
    behind_BT1 = (torch.arange(x_BTF.shape[1], device=x_BTF.device) >= lengths_B[:, None])[..., None]
    # Padding may hold anything, and NaN times a gradient of zero is NaN.
    x_BTF = x_BTF.masked_fill(behind_BT1, 0.0)
    run = _TORCH_FUNCTIONS[mode]
    for first in range(0, len(weights), num_directions):
        if first and dropout:
            x_BTF = functional.dropout(x_BTF, dropout)
        outputs = []
        for reverse, tensors in enumerate(weights[first : first + num_directions]):
            given_BTF = reverse_padded(x_BTF, lengths_B) if reverse else x_BTF
            # The products with the state have its width in, and those of an LSTM four times its cell's width out.
            hidden = x_BTF.new_zeros(1, len(x_BTF), tensors[1].shape[1])
            cell = x_BTF.new_zeros(1, len(x_BTF), tensors[1].shape[0] // 4)
            state = (hidden, cell) if mode == "LSTM" else hidden
            needs_gradient = torch.is_grad_enabled()
            y_BTH = run(given_BTF, state, tensors, len(tensors) > 3, 1, 0.0, needs_gradient, False, True)[0]
            outputs.append(reverse_padded(y_BTH, lengths_B) if reverse else y_BTH)
        x_BTF = torch.cat(outputs, dim=-1).masked_fill(behind_BT1, 0.0)
    return x_BTF


def _run_packed(layer: nn.RNNBase, original: Callable[..., Any], x: torch.Tensor, hx: Any, lengths: Any) -> Any:
    """Torch's own layer on a packed batch; sequences without steps, which it refuses, keep their state."""
    batch_dim, steps = (0, x.shape[1]) if layer.batch_first else (1, x.shape[0])
    lengths_B = torch.from_numpy(check_lengths(lengths, x.shape[batch_dim], steps))
    if bool((lengths_B == steps).all()):
        return original(layer, x, hx)
    states = _states_LBH(layer, x, hx, len(lengths_B))
    rows_M = lengths_B.nonzero().flatten()
    there_M = rows_M.to(x.device)
    shape = [steps, steps, output_width(layer)]
    shape[batch_dim] = len(lengths_B)
    y = x.new_zeros(shape)
    if len(rows_M):
        packed = pack_padded_sequence(
            x.index_select(batch_dim, there_M),
            lengths_B[rows_M],
            batch_first=layer.batch_first,
            enforce_sorted=False,
        )
        given = tuple(state.index_select(1, there_M) for state in states)
        found, after = original(layer, packed, given if layer.mode == "LSTM" else given[0])
        padded, _ = pad_packed_sequence(found, batch_first=layer.batch_first, total_length=steps)
        y = y.index_copy(batch_dim, there_M, padded)
        news = after if layer.mode == "LSTM" else (after,)
        states = [old.index_copy(1, there_M, new) for old, new in zip(states, news, strict=True)]
    return y, tuple(states) if layer.mode == "LSTM" else states[0]


@lru_cache(maxsize=256)
def _layer_program(
    mode: str,
    *,
    input_size: int,
    hidden_size: int,
    proj_size: int,
    bias: bool,
    dtype: torch.dtype,
    backend: Backend,
    device: torch.device = CPU,
) -> Built:
    """The program of one layer and direction. Weights are given when it runs, so that all layers alike share it."""
    # Whoever calls first may be in inference mode, whose tensors have no gradients; the program is for everybody.
    with torch.inference_mode(mode=False):
        cell: cells.Cell
        with torch.device("meta"):
            if mode == "GRU":
                cell = cells.GRU(input_size, hidden_size, bias=bias)
            elif mode == "LSTM" and proj_size:
                cell = cells.ProjectedLSTM(input_size, hidden_size, proj_size=proj_size, bias=bias)
            elif mode == "LSTM":
                cell = cells.LSTM(input_size, hidden_size, bias=bias)
            else:
                cell = cells.Elman(
                    input_size, hidden_size, nonlinearity="relu" if mode == "RNN_RELU" else "tanh", bias=bias
                )
        fill_parameters(cell, 0.0, dtype)
        state = cell.initial_state(1)
        return build(cell, x_shape=(input_size,), x_dtype=dtype, state=state, device=device, backend=backend)


def _program(layer: nn.RNNBase, width: int, dtype: torch.dtype, backend: str, device: torch.device) -> Built:
    return _layer_program(
        layer.mode,
        input_size=width,
        hidden_size=layer.hidden_size,
        proj_size=layer.proj_size,
        bias=layer.bias,
        dtype=dtype,
        backend=backend if backend in {"eager", *ON_GPUS} else "auto",
        device=device,
    )


def weights_of(layer: nn.RNNBase, index: int) -> dict[str, torch.Tensor]:
    """The parameters of one layer and direction, by the names that a cell gives them."""
    names = _weight_names(bias=layer.bias, proj_size=layer.proj_size)
    first = index * len(names)
    return dict(zip(names, layer._flat_weights[first : first + len(names)], strict=True))  # type: ignore[arg-type]


def _weight_names(*, bias: bool, proj_size: int) -> list[str]:
    names = ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if bias else [])]
    return [*names, "weight_hr"] if proj_size else names


def input_width(layer: nn.RNNBase) -> int:
    """By the weights that are there, which `torch.func.functional_call` may have replaced."""
    weight = layer._flat_weights[0]
    assert weight is not None
    return int(weight.shape[1])


def output_width(layer: nn.RNNBase) -> int:
    """Features of a step of the output."""
    return (layer.proj_size or layer.hidden_size) * _num_directions(layer)


def _num_directions(layer: nn.RNNBase) -> int:
    return 2 if layer.bidirectional else 1


def _num_slices(layer: nn.RNNBase) -> int:
    return layer.num_layers * _num_directions(layer)


def _num_rows(layer: nn.RNNBase, x: Any) -> int:
    if isinstance(x, PackedSequence):
        return int(x.batch_sizes[0])
    return 1 if x.dim() == 2 else int(x.shape[0 if layer.batch_first else 1])


def _num_steps(layer: nn.RNNBase, x: Any) -> int:
    if isinstance(x, PackedSequence):
        return len(x.batch_sizes)
    return int(x.shape[1 if layer.batch_first and x.dim() == 3 else 0])


def _state_shapes(layer: nn.RNNBase, num_rows: int) -> list[tuple[int, int, int]]:
    count = _num_slices(layer)
    shapes = [(count, num_rows, layer.proj_size or layer.hidden_size)]
    return [*shapes, (count, num_rows, layer.hidden_size)] if layer.mode == "LSTM" else shapes


def _states_LBH(layer: nn.RNNBase, x: torch.Tensor, hx: Any, num_rows: int) -> list[torch.Tensor]:
    if hx is None:
        return [x.new_zeros(shape) for shape in _state_shapes(layer, num_rows)]
    return list(hx) if isinstance(hx, (tuple, list)) else [hx]


register_programs("torch", _find_program)


def open_forget_gates(lstm: nn.LSTM) -> None:
    """Let an LSTM begin with open forget gates: a bias of 1 in the second quarter of torch's gate order."""
    with torch.no_grad():
        for name, bias in lstm.named_parameters():
            if name.startswith("bias_ih"):
                bias[len(bias) // 4 : len(bias) // 2].fill_(1.0)
