"""Layers in a graph that Dynamo traces: registered operators, and what PyTorch has between them.

Dynamo reads these functions, so they are made of what it can follow. Those that are `evaluated` it calls instead, once,
and takes their result for a constant.

Shape legend: B sequences, T steps, F features.
"""

import functools
import sys
from collections.abc import Callable, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder
from types import CodeType, ModuleType
from typing import Any, Final, TypeVar, final

import torch
from torch.nn import functional

from stretto.kernels import register_operators
from stretto.nn.guards import is_looked_at

_Function = TypeVar("_Function", bound=Callable[..., object])
_BUILDER: Final = "torch._dynamo.variables.builder"


def evaluated(function: _Function) -> _Function:
    """Let Dynamo call a function of constants and modules, instead of tracing what it does."""
    function._dynamo_marked_constant = True  # type: ignore[attr-defined]
    return function


@evaluated
def operators_are_usable() -> bool:
    """Whether nobody but Dynamo sees the call; then the operators are registered."""
    if is_looked_at():
        return False
    register_operators()
    return True


@evaluated
def layers_are_traced() -> bool:
    """Whether Dynamo, which traces the call, goes into torch's recurrent layers: as a rule the graph breaks there."""
    one_graph: bool = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx().one_graph
    return one_graph or bool(torch._dynamo.config.allow_rnn)


@functools.cache
def admit_layers(mark: str, descriptor: CodeType) -> None:
    """Let Dynamo go into recurrent layers of torch's that have the attribute `mark` where the graph must not break.

    `VariableBuilder.wrap_module` refuses them all unless `torch._dynamo.config.allow_rnn` is set. It is set for as long
    as that method looks at such a layer, so that plain layers and the user's own setting are left alone. Dynamo is not
    imported for it, which would take seconds: that is left to those who use it.

    Dynamo must not compile the `descriptor` that finds the forward of such a layer, as it tries to when a graph breaks:
    what it makes of a method that is returned looks the method up, and so calls the descriptor again.
    """
    if _BUILDER in sys.modules:
        _admit(sys.modules[_BUILDER], mark, descriptor)
    else:
        sys.meta_path.insert(0, _AfterImport(mark, descriptor))


def _admit(builder: ModuleType, mark: str, descriptor: CodeType) -> None:
    refuse = getattr(getattr(builder, "VariableBuilder", None), "wrap_module", None)
    if refuse is None or not hasattr(torch._dynamo.config, "allow_rnn"):
        return  # another torch, which has it otherwise

    @functools.wraps(refuse)
    def wrap_module(self: Any, value: Any) -> Any:
        if mark not in value.__dict__:
            return refuse(self, value)
        torch._dynamo.eval_frame.skip_code(descriptor)
        if self.tx.output.export or not self.tx.output.root_tx.one_graph:
            return refuse(self, value)  # exporters set `allow_rnn` themselves
        with torch._dynamo.config.patch(allow_rnn=True):
            return refuse(self, value)

    builder.VariableBuilder.wrap_module = wrap_module


@final
class _AfterImport(MetaPathFinder):
    """Calls `_admit` when Dynamo is imported."""

    def __init__(self, *given: Any) -> None:
        self._given = given

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        """The module with a loader that goes on to `_admit`; None for all others."""
        if name != _BUILDER:
            return None
        sys.meta_path.remove(self)
        spec = PathFinder.find_spec(name, path, target)
        if spec is None or spec.loader is None:
            return None
        load = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            load(module)
            _admit(module, *self._given)

        spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


def run_layers(
    programs: Sequence[Sequence[str]],
    x_TBF: torch.Tensor,
    states: Sequence[Sequence[torch.Tensor]],
    parameters: Sequence[Sequence[torch.Tensor]],
    *,
    dropout: float,
) -> tuple[torch.Tensor, list[list[torch.Tensor]]]:
    """What `run_stack` does, by registered operators.

    Args:
        programs: Names for each layer, of one program or of two of which the second reads backwards.
        x_TBF: The input.
        states: Initial ones of each layer and direction.
        parameters: Of each layer and direction, in the order of `parameter_names`.
        dropout: Between layers.

    Returns:
        Outputs of the last layer, and the final states of each layer and direction.
    """
    finals: list[list[torch.Tensor]] = []
    for number, names in enumerate(programs):
        if number and dropout:
            x_TBF = functional.dropout(x_TBF, dropout)
        inputs: list[torch.Tensor] = []
        for reverse in range(len(names)):
            index = len(finals) + reverse
            inputs += [x_TBF.flip(0) if reverse else x_TBF, *states[index], *parameters[index]]
        keep = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in inputs)
        made = torch.ops.stretto.recurrent(inputs, " ".join(names), keep)
        outputs, first = [], 0
        for reverse in range(len(names)):
            last = first + 1 + len(states[len(finals)])
            y_TBF = made[first].reshape(*x_TBF.shape[:2], *made[first].shape[1:])
            outputs.append(y_TBF.flip(0) if reverse else y_TBF)
            finals.append(list(made[first + 1 : last]))
            first = last
        if len(outputs) > 1:
            outputs = [y if y.dim() > 2 else y[..., None] for y in outputs]
        x_TBF = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
    return x_TBF, finals
