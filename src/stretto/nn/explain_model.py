"""How every recurrent layer of a model runs: its backend, why that one, and what to change."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, final, overload

from torch import nn

from stretto.errors import StrettoError
from stretto.nn.explanation import Explanation
from stretto.nn.rnn import RNN
from stretto.nn.scan import explain_scan
from stretto.nn.torch_layers import (
    BACKEND,
    ON_GPUS,
    RECORDS,
    LayerRecord,
    check_module,
    compiled_calls,
    recurrent_modules,
    speedup_of,
    unfit,
)

NO_CALL: Final = "not called yet"
SINGLE_STEP_REMEDY: Final = (
    "a call of one step cannot be made faster: collect the steps and call the layer once, or give the loop's body to "
    "stretto.RNN"
)


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class LayerExplanation:
    """One recurrent layer.

    Attributes:
        name: In the model.
        kind: Its class.
        backend: What ran most of its calls: "cpp", "triton", "eager" or "torch"; empty before the first call.
        reason: Why torch's own implementation ran; empty if it did not.
        remedy: What to change to make it faster; empty if there is nothing.
        calls: How many there were, without those of compiled graphs; None where nobody counts them.
        compiled_calls: In graphs of `torch.compile(fullgraph=True)`, of all layers of these sizes together.
        speedup: Of generated code over torch's own for the last batch; None if there was none.
        disturbed: Whether other work on the machine took part in the measurement of the speedup.
    """

    name: str
    kind: str
    backend: str
    reason: str = ""
    remedy: str = ""
    calls: int | None = None
    compiled_calls: int = 0
    speedup: float | None = None
    disturbed: bool = False

    def __str__(self) -> str:
        calls = "" if self.calls is None else f", {self.calls} call{'s' * (self.calls != 1)}"
        if self.compiled_calls:
            calls += f", {self.compiled_calls} in compiled graphs by all layers of these sizes"
        lines = [f"{self.name or 'the model'} ({self.kind}): {self.backend or 'undecided'}{calls}"]
        if self.disturbed:
            lines.append("    other work had the cores while its speed was measured; it is measured again later")
        elif self.speedup is not None:
            lines.append(f"    {self.speedup:.1f} times torch's speed, measured on a layer of these sizes")
        if self.reason:
            lines.append(f"    {self.reason}")
        if self.remedy:
            lines.append(f"    to change: {self.remedy}")
        return "\n".join(lines)


@final
@dataclass(frozen=True, slots=True)
class ModelExplanation:
    """The recurrent layers of a model. `str()` is a paragraph for each."""

    layers: tuple[LayerExplanation, ...]

    def __str__(self) -> str:
        if not self.layers:
            return "There is no recurrent layer in this model."
        return "\n".join(map(str, self.layers))

    __repr__ = __str__


@overload
def explain(model: nn.Module) -> ModelExplanation: ...


@overload
def explain(model: Callable[..., Any], init: Any, xs: Any, **options: Any) -> Explanation: ...


def explain(model: Any, *scanned: Any, **options: Any) -> ModelExplanation | Explanation:
    """Of every recurrent layer of a model: which backend runs it, why, how fast, and what to change.

    Args:
        model: Any module, accelerated or not. Speed and calls are of the calls so far. Or the
            step of a `stretto.scan`.
        scanned: The other arguments of that scan.
        options: Its keyword arguments.

    Returns:
        A paragraph for each recurrent layer; of a step how it is computed, like `RNN.explain`.

    Examples:
        >>> model = stretto.accelerate(torch.nn.Sequential(torch.nn.GRU(8, 32)))
        >>> stretto.explain(model).layers[0].reason
        'not called yet'
    """
    if scanned or options:
        if len(scanned) < 2 and "xs" not in options:
            raise StrettoError(
                "explain got some arguments of a scan, and not all", fix="Give stretto.explain(step, init, xs)."
            )
        return explain_scan(model, *scanned, **options)
    check_module(model)
    found = [_explain_rnn(name, module) for name, module in model.named_modules() if isinstance(module, RNN)]
    inside = {id(part) for module in model.modules() if isinstance(module, RNN) for part in module.modules()}
    found += [_explain(name, module) for name, module in recurrent_modules(model) if id(module) not in inside]
    return ModelExplanation(tuple(found))


def _explain_rnn(name: str, rnn: RNN) -> LayerExplanation:
    kind = f"RNN({type(rnn.cells[0]).__name__})"
    built = rnn.last_built
    if built is None:
        return LayerExplanation(name=name, kind=kind, backend="", reason=NO_CALL)
    built = built.now()
    remedy = "" if built.backend in {"cpp", "triton"} else "see `rnn.explain()`, and change the cell as it says"
    return LayerExplanation(name=name, kind=kind, backend=built.backend, reason=built.reason, remedy=remedy)


def _explain(name: str, module: nn.Module) -> LayerExplanation:
    kind, reason = type(module).__name__, unfit(module)
    if reason:
        reason, _, remedy = reason.partition(": ")
        return LayerExplanation(name=name, kind=kind, backend="torch", reason=reason, remedy=remedy)
    if BACKEND not in module.__dict__:
        remedy = "call stretto.accelerate(model)"
        return LayerExplanation(name=name, kind=kind, backend="torch", reason="not accelerated", remedy=remedy)
    assert isinstance(module, nn.RNNBase)
    record, compiled = RECORDS.get(module), compiled_calls(module)
    if record is None or not record.calls:
        backend = "" if not compiled else "eager" if module.__dict__[BACKEND] == "eager" else "cpp"
        reason = "" if compiled else NO_CALL
        return LayerExplanation(name=name, kind=kind, backend=backend, reason=reason, compiled_calls=compiled)
    (backend, why), _ = record.calls.most_common(1)[0]
    total = sum(record.calls.values())
    speedup, disturbed = _speedup(module, record)
    return LayerExplanation(
        name=name,
        kind=kind,
        backend=backend,
        reason=why,
        remedy=SINGLE_STEP_REMEDY if record.single_steps * 2 > total else "",
        calls=total,
        compiled_calls=compiled,
        speedup=speedup,
        disturbed=disturbed,
    )


def _speedup(layer: nn.RNNBase, record: LayerRecord) -> tuple[float | None, bool]:
    if record.last is None or not any(backend in {"cpp", *ON_GPUS} for backend, _ in record.calls):
        return None, False
    dtype, num_steps, num_rows, fill, training, input_gradient, device = record.last
    return speedup_of(
        layer,
        dtype=dtype,
        num_steps=num_steps,
        num_rows=num_rows,
        fill=fill,
        training=training,
        input_gradient=input_gradient,
        device=device,
    )
