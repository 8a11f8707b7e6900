"""A layer as a graph: export, ONNX, TorchScript, FX, quantisation, structured sparsity; before and after a first call.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from compat_cases import BACKENDS, KINDS, B, Behaviour, Behaviours, F, T, Use, batch, learn
from torch import nn
from torch.ao.ns import _numeric_suite as numeric_suite
from torch.ao.pruning._experimental.pruner import BaseStructuredSparsifier, LSTMSaliencyPruner
from torch.ao.quantization import QConfigMapping, default_dynamic_qconfig, quantize_dynamic
from torch.ao.quantization.quantize_fx import convert_fx, prepare_fx
from torch.nn.utils.rnn import pack_padded_sequence

CASES = Behaviours()
pytestmark = pytest.mark.usefixtures("quick_compiler")
TEMPERATURES = {"cold": False, "warm": True}
STATES = {f"{kind}-{name}": (KINDS[kind], warm) for kind in KINDS for name, warm in TEMPERATURES.items()}


@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize("case", CASES.params)
def test_export(case: Behaviour, backend: str) -> None:
    case.check(backend)


class Tagger(nn.Module):
    """A recurrent layer and a linear one, as a model of which people make graphs."""

    def __init__(self, layer: nn.RNNBase) -> None:
        super().__init__()
        self.layer = layer
        self.head = nn.Linear(layer.hidden_size, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, _ = self.layer(x)
        return self.head(y)


def _tagger(use: Use, given: tuple[type[nn.RNNBase], bool], **options: Any) -> Any:
    layer, warm = given
    model = use(Tagger(layer(F, use.H, **options)).eval())
    if warm:
        learn(model, _x())
        with torch.no_grad():
            model(_x())
    torch.manual_seed(1)
    return model.requires_grad_(False)


def _x(rows: int = B) -> torch.Tensor:
    return torch.randn(T, rows, F)


def _saved(program: Any, save: Callable[..., None], load: Callable[..., Any]) -> Any:
    file = io.BytesIO()
    save(program, file)
    file.seek(0)
    return load(file)


# torch.export and ONNX


@CASES.add(
    each={f"{name}-{'strict' if strict else 'loose'}": (STATES[name], strict) for name in STATES for strict in (False,)}
    | {"lstm-cold-strict": (STATES["lstm-cold"], True), "gru-warm-strict": (STATES["gru-warm"], True)}
)
def exported(use: Use, given: tuple[Any, bool]) -> Any:
    state, strict = given
    program = torch.export.export(_tagger(use, state), (_x(),), strict=strict)
    again = _saved(program, torch.export.save, torch.export.load)
    calls = [str(node.target) for node in program.graph.nodes if node.op == "call_function"]
    return program.module()(_x()), again.module()(_x()), calls, list(program.state_dict)


@CASES.add(each=TEMPERATURES, cold=True, slow=True)
def exported_for_any_batch(use: Use, warm: bool) -> Any:
    rows = torch.export.Dim("rows", min=2, max=64)
    program = torch.export.export(_tagger(use, (nn.GRU, warm)), (_x(),), dynamic_shapes={"x": {1: rows}})
    return program.module()(_x()), program.module()(_x(7))


@pytest.mark.slow
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
@pytest.mark.parametrize("by_export", [False, True], ids=["script", "export"])
@pytest.mark.parametrize("kind", KINDS)
def test_onnx(kind: str, by_export: bool, backend: str, tmp_path: Path) -> None:
    import onnx
    from onnx.reference import ReferenceEvaluator

    def run(use: Use) -> Any:
        model, x_TBF, file = _tagger(use, (KINDS[kind], False)), _x(), tmp_path / "model.onnx"
        torch.onnx.export(model, (x_TBF,), file, dynamo=by_export, input_names=["x"], verbose=False)
        graph = onnx.load(file).graph
        (y,) = ReferenceEvaluator(str(file)).run(None, {"x": x_TBF.numpy()})
        torch.testing.assert_close(torch.from_numpy(y.copy()), model(x_TBF), atol=1e-4, rtol=1e-4)
        return [node.op_type for node in graph.node], len(graph.initializer)

    Behaviour(run=run).check(backend)


# TorchScript


@CASES.add(each=STATES)
def traced(use: Use, given: Any) -> Any:
    model, x_TBF = _tagger(use, given), _x()
    program = torch.jit.trace(model, (x_TBF,), check_trace=True)
    again = _saved(program, torch.jit.save, torch.jit.load)
    return program(_x()), again(_x(5)), torch.jit.freeze(program)(_x()), "lstm" in str(program.inlined_graph)


@CASES.add(each=STATES)
def scripted(use: Use, given: Any) -> Any:
    program = torch.jit.script(_tagger(use, given))
    again = _saved(program, torch.jit.save, torch.jit.load)
    return program(_x()), again(_x(5)), torch.jit.freeze(program)(_x()), list(program.state_dict())


@CASES.add(each=KINDS)
def scripted_in_training(use: Use, layer: type[nn.RNNBase]) -> Any:
    model = torch.jit.script(use(Tagger(layer(F, use.H, num_layers=2, dropout=0.4)).double()))
    return learn(model, batch()), torch.get_rng_state()


@CASES.add(each={"no-grad": torch.no_grad, "inference": torch.inference_mode})
def traced_without_gradients(use: Use, mode: Callable[[], Any]) -> Any:
    with mode():
        return torch.jit.trace(_tagger(use, (nn.GRU, False)), (_x(),))(_x())


@CASES.add()
def traced_with_a_pack(use: Use) -> Any:
    model, lengths_B = use(nn.LSTM(F, use.H, bidirectional=True).eval()).requires_grad_(False), torch.tensor([4, 2, 1])

    def run(x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = model(pack_padded_sequence(x, lengths))[0].data
        return y

    return torch.jit.trace(run, (_x(), lengths_B))(_x(), torch.tensor([4, 4, 1]))


@CASES.add()
def call_from_a_script(use: Use) -> Any:
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.jit.trace(_tagger(use, (nn.GRU, True)), (_x(),))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.inner(x) * 2 if x.sum() > 0 else self.inner(x)

    return torch.jit.script(Outer())(_x())


# FX and what is built on it


@CASES.add(each=STATES)
def symbolically_traced(use: Use, given: Any) -> Any:
    graph = torch.fx.symbolic_trace(_tagger(use, given))
    targets = [str(node.target) for node in graph.graph.nodes]
    return graph(_x()), targets, type(graph.layer).__name__, torch.fx.Interpreter(graph).run(_x())


@CASES.add(each=TEMPERATURES)
def quantised_by_fx(use: Use, warm: bool) -> Any:
    mapping = QConfigMapping().set_global(default_dynamic_qconfig)
    model = convert_fx(prepare_fx(_tagger(use, (nn.LSTM, warm)), mapping, (_x(),)))
    return model(_x()), [type(module).__module__ for module in model.modules()]


@CASES.add(
    each={
        f"{kind}-{str(dtype)[6:]}": (KINDS[kind], dtype)
        for kind in ("lstm", "gru")
        for dtype in (torch.qint8, torch.float16)
    }
)
def quantised(use: Use, given: tuple[type[nn.RNNBase], torch.dtype]) -> Any:
    layer, dtype = given
    float_model = _tagger(use, (layer, True), num_layers=2, bidirectional=False)
    model = quantize_dynamic(float_model, {layer, nn.Linear}, dtype=dtype)
    again = _saved(torch.jit.script(model), torch.jit.save, torch.jit.load)
    x_PF = pack_padded_sequence(_x(), torch.tensor([4, 2, 1]))
    classes = [f"{type(module).__module__}.{type(module).__name__}" for module in model.modules()]
    return model(_x()), again(_x()), model.layer(x_PF), classes, float_model(_x())


@CASES.add(
    each={"stub": numeric_suite.compare_model_stub, "weights": None, "outputs": numeric_suite.compare_model_outputs}
)
def numeric_suite_of(use: Use, compare: Callable[..., Any] | None) -> Any:
    float_model = _tagger(use, (nn.LSTM, False))
    model = quantize_dynamic(float_model, {nn.LSTM, nn.Linear})
    if compare is None:
        found = numeric_suite.compare_weights(float_model.state_dict(), model.state_dict())
        return {key: sorted(value) for key, value in found.items()}
    if compare is numeric_suite.compare_model_stub:
        found = compare(float_model, model, {nn.LSTM, nn.Linear}, _x())
    else:
        found = compare(float_model, model, _x())
    return {key: {name: part for name, part in value.items() if name != "stack_trace"} for key, value in found.items()}


class HalfOfTheRows(BaseStructuredSparsifier):
    def update_mask(self, module: nn.Module, tensor_name: str, **_: Any) -> None:
        getattr(module.parametrizations, tensor_name)[0].mask[::2] = False


@CASES.add(each={"rows": (HalfOfTheRows, {}), "saliency": (LSTMSaliencyPruner, {"sparsity_level": 0.5})})
def structured_sparsity(use: Use, given: tuple[Any, dict[str, Any]]) -> Any:
    make, defaults = given
    model = use(Tagger(nn.LSTM(F, 8)))
    names = ["layer.weight_ih_l0", "layer.weight_hh_l0"]
    pruner = make(defaults)
    pruner.prepare(model, [{"tensor_fqn": name} for name in names])
    model(_x())
    pruner.enable_mask_update = True
    pruner.step()
    before = model(_x())
    pruned = pruner.prune()
    return before, pruned(_x()), [tuple(p.shape) for p in pruned.parameters()], type(pruned.layer).__name__
