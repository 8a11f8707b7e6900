"""Optimisers by name: torch's own, and LARS and LAMB for large batches, with a trust ratio per matrix or per gate.

Shape legend: G gates, H hidden units, F features.
"""

import copy
import functools
import math
from collections.abc import Iterable
from typing import Any, Final, Literal, final, get_args

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from stretto.cells import AbstractGatedCell
from stretto.checks import check_choice, check_float
from stretto.errors import StrettoError
from stretto.extras import optional

OptimizerName = Literal["adamw", "adam", "sgd", "momentum", "nesterov", "lars", "lamb"]
TRUST_RATIO_OPTIMIZERS: Final = ("lars", "lamb")
MOMENTUM: Final = 0.9
FUSED_DEVICES: Final = ("cpu", "cuda")
PACKED_WEIGHTS: Final = ("weight_ih", "weight_hh", "weight_read")


def make_optimizer(
    name: str,
    parameters: nn.Module | Iterable[torch.Tensor],
    *,
    lr: float,
    weight_decay: float = 0.0,
    decay_biases: bool = False,
    gates: bool = False,
) -> Optimizer:
    """An optimiser with groups that suit recurrent nets.

    Biases and gains, tensors with fewer than two dimensions, form a group of their own: they have no weight decay and
    no trust ratio. There are two groups, or one if all tensors are alike in this.

    - "sgd" is plain; "momentum" and "nesterov" have a momentum of 0.9. Weight decay is added to the gradient, here and
      in "adam"; "adamw" takes it from the weights instead. Torch's fused code runs wherever it exists.
    - "lars" (You et al. 2017): momentum SGD, the gradient of each matrix scaled by 0.001 |w| / (|g| + decay |w|). Its
      rate is thus relative to the weights, and far above that of SGD: 4 to 32 on ImageNet. But biases and gains move by
      plain SGD at that same rate, and so does a matrix that is all zeros: start none at zero. An update writes into the
      gradients: read norms before it.
    - "lamb" (You et al. 2020): Adam's direction plus decay w, for each matrix scaled to the length |w|. Moments are not
      corrected for their start, since the scaling cancels any factor; those of biases and gains, which are not
      scaled, are. The norm of the weights is not bounded.

    Args:
        name: Which optimiser.
        parameters: A model, or its parameters.
        lr: The learning rate.
        weight_decay: Of matrices.
        decay_biases: Decay biases and gains too, all in one group, as `torch.optim.AdamW(model.parameters())` does.
        gates: For "lars" and "lamb": give every gate of a packed recurrent weight a trust ratio of its own. It needs
            the model, for parameters do not say what they are.

    Raises:
        StrettoError: There is no such optimiser, there is nothing to train, or gates were asked for where they change
            nothing or cannot be found.
    """
    check_choice(name, name="optimizer", choices=get_args(OptimizerName))
    check_float(weight_decay, name="weight_decay", at_least=0.0)
    tensors = _trained_tensors(name, parameters, gates=gates)
    groups: list[dict[str, Any]] = [
        {"params": [t for t in tensors if t.dim() >= 2 or decay_biases], "weight_decay": weight_decay},
        {"params": [t for t in tensors if t.dim() < 2 and not decay_biases], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if name in TRUST_RATIO_OPTIMIZERS:
        return _with_trust_ratios(name, groups, lr=lr)
    # Where there is no fused code torch decides.
    fused = True if all(t.device.type in FUSED_DEVICES and t.is_floating_point() for t in tensors) else None
    if name in ("adam", "adamw"):
        return (Adam if name == "adam" else AdamW)(groups, lr=lr, fused=fused)
    momentum = 0.0 if name == "sgd" else MOMENTUM
    return SGD(groups, lr=lr, momentum=momentum, nesterov=name == "nesterov", fused=fused)


def _trained_tensors(name: str, parameters: nn.Module | Iterable[torch.Tensor], *, gates: bool) -> list[torch.Tensor]:
    if gates and name not in TRUST_RATIO_OPTIMIZERS:
        raise StrettoError(
            f"gates=True was given with the optimiser {name!r}, which has no trust ratios",
            fix="Leave gates out, or choose 'lars' or 'lamb'.",
        )
    if gates and not isinstance(parameters, nn.Module):
        raise StrettoError(
            "gates=True was given with parameters, which do not say which of them hold gates",
            fix="Give the model in their place.",
        )
    if isinstance(parameters, nn.Module):
        found: list[Any] = list(parameters_by_gate(parameters) if gates else parameters.parameters())
    else:
        found = list(parameters)
    wrong = next((item for item in found if not isinstance(item, torch.Tensor)), None)
    if wrong is not None:
        raise StrettoError(
            f"{type(wrong).__name__} was given among the parameters",
            fix="Give model.parameters() or the model; groups are made here.",
        )
    trained = [item for item in found if item.requires_grad]
    if not trained:
        raise StrettoError("there are no parameters to train", fix="Give a model with parameters that require grad.")
    return trained


def _with_trust_ratios(name: str, groups: list[dict[str, Any]], *, lr: float) -> Optimizer:
    complex_dtype = next((t.dtype for group in groups for t in group["params"] if t.is_complex()), None)
    if complex_dtype is not None:
        raise StrettoError(f"{name!r} was given a parameter of {complex_dtype}", fix="Use parameters of real numbers.")
    if name == "lars":
        lars: Optimizer = optional("pytorch_optimizer").LARS(groups, lr=lr, momentum=MOMENTUM)
        return lars
    for group in groups:
        is_scaled = group["params"][0].dim() >= 2
        # With `adam` there is no trust ratio; `adam_debias` leaves the library's own correction out, which in scaled
        # updates would make the first one ten times too long.
        group |= {"adam": not is_scaled, "adam_debias": is_scaled}
    # Not decoupled: decay is a part of what is scaled, as published.
    lamb: Optimizer = _lamb()(groups, lr=lr, weight_decouple=False)
    return lamb


@functools.cache
def _lamb() -> Any:
    """The library's LAMB, with moments of unscaled tensors corrected as Adam does, and the norm of weights unbounded.

    The library divides by 1 - beta1^t, and never multiplies by the root of 1 - beta2^t: for hundreds of updates,
    which may be the whole of a run with large batches, biases would move several times as far as the rate says.
    """

    class Lamb(optional("pytorch_optimizer").Lamb):  # type: ignore[misc]
        clamp = math.inf

        def step(self, closure: Any = None) -> Any:
            rates = [group["lr"] for group in self.param_groups]
            for group in self.param_groups:
                if group["adam"]:
                    group["lr"] *= math.sqrt(1.0 - group["betas"][1] ** (group.get("step", 0) + 1))
            try:
                return super().step(closure)
            finally:
                for group, rate in zip(self.param_groups, rates, strict=True):
                    group["lr"] = rate

    return Lamb


@final
class Gate(nn.Parameter):
    """Some rows of a packed weight, as a parameter that an optimiser can hold in its place.

    It shares the memory of the packed weight: an update of the one is an update of the other. Its gradient is those
    rows of the packed weight's gradient, looked up whenever it is read, so that backward, clipping, all-reduce and
    `zero_grad` work as usual. Models never see it; the model's `state_dict` has the packed weight alone.
    """

    packed: nn.Parameter
    """The packed weight (G H, F)."""
    start: int
    stop: int

    def __new__(cls, packed: nn.Parameter, start: int, stop: int) -> "Gate":
        """A view with the packed weight's own version counter, which autograd checks."""
        gate = torch.Tensor._make_subclass(cls, packed.detach()[start:stop], packed.requires_grad)
        gate.packed, gate.start, gate.stop = packed, start, stop
        return gate

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Everything is done in `__new__`; `nn.Parameter` would make another tensor."""

    @property
    def grad(self) -> torch.Tensor | None:
        """These rows of the gradient of the packed weight."""
        self._follow()
        return None if self.packed.grad is None else self.packed.grad[self.start : self.stop]

    @grad.setter
    def grad(self, value: torch.Tensor | None) -> None:
        """None removes the gradient of the packed weight; all of its gates are zeroed together."""
        if value is None:
            self.packed.grad = None
            return
        if self.packed.grad is None:
            self.packed.grad = torch.zeros_like(self.packed)
        self.packed.grad[self.start : self.stop] = value

    def _follow(self) -> None:
        """The packed weight has other memory if the model was moved to a device or into one block of memory."""
        there = self.packed.detach()[self.start : self.stop]
        if there.data_ptr() != self.data_ptr() or there.device != self.device:
            self.data = there

    def __deepcopy__(self, memo: dict[int, Any]) -> "Gate":
        """Of the copy of the packed weight, which is the model's copy if both are copied together."""
        if id(self) not in memo:
            memo[id(self)] = Gate(copy.deepcopy(self.packed, memo), self.start, self.stop)
        copied: Gate = memo[id(self)]
        return copied

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return Gate, (self.packed, self.start, self.stop)


def parameters_by_gate(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of a model in their order, packed weights of recurrent layers replaced by their gates.

    `torch.nn.LSTM` and `GRU` keep the weights of 4 and 3 gates in one matrix, and so do the cells of Stretto and
    accelerated layers. An optimiser that scales each matrix by its own norm would treat them as one, although a forget
    gate and a candidate differ in the size of their weights and gradients. Weights that are one matrix stay as they
    are: those of `torch.nn.RNN`, projections, everything outside recurrent layers, and biases, which have no trust
    ratio. Your own cells are split if they derive from `AbstractGatedCell`.
    """
    rows: dict[int, int] = {}
    for module in model.modules():
        if isinstance(module, (nn.RNNBase, nn.RNNCellBase, AbstractGatedCell)):
            for name, weight in module.named_parameters(recurse=False):
                if name.startswith(PACKED_WEIGHTS) and weight.dim() == 2 and weight.shape[0] % module.hidden_size == 0:
                    rows[id(weight)] = module.hidden_size
    found: list[nn.Parameter] = []
    for parameter in model.parameters():
        each = rows.get(id(parameter), 0)
        if each and len(parameter) > each:
            found += [Gate(parameter, start, start + each) for start in range(0, len(parameter), each)]
        else:
            found.append(parameter)
    return found
