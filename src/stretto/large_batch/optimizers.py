"""Optimisers by name: those of torch, and LARS and LAMB for large batches."""

import functools
import math
from collections.abc import Iterable
from typing import Any, Final, Literal, get_args

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from stretto.errors import StrettoError
from stretto.extras import optional
from stretto.large_batch.gates import parameters_by_gate

OptimizerName = Literal["adamw", "adam", "sgd", "momentum", "nesterov", "lars", "lamb"]
BY_TENSOR: Final = ("lars", "lamb")
MOMENTUM: Final = 0.9
FUSED_DEVICES: Final = ("cpu", "cuda")


def make_optimizer(
    name: str,
    parameters: nn.Module | Iterable[torch.Tensor],
    *,
    lr: float,
    weight_decay: float = 0.0,
    gates: bool = False,
) -> Optimizer:
    """An optimiser with groups that suit recurrent nets.

    Biases and gains, tensors with fewer than two dimensions, form a group of their own: they have no weight decay and
    no trust ratio. There are two groups, or one if all tensors are alike in this.

    - "sgd" is plain; "momentum" and "nesterov" have a momentum of 0.9. Weight decay is added to the gradient, here and
      in "adam"; "adamw" takes it from the weights instead. Torch's fused code runs wherever it exists.
    - "lars" (You et al. 2017): momentum SGD, the gradient of each matrix scaled by 0.001 |w| / (|g| + decay |w|). Its
      rate is thus relative to the weights, and far above that of SGD: 4 to 32 on ImageNet. But biases and gains move by
      plain SGD at that same rate, and so does a matrix that is all zeros: start none at zero. A step writes into the
      gradients: read norms before it.
    - "lamb" (You et al. 2020): Adam's direction plus decay w, for each matrix scaled to the length |w|. Moments are not
      corrected for their start, since the scaling takes any factor out; those of biases and gains, which are not
      scaled, are. The norm of the weights is not bounded.

    Args:
        name: Which.
        parameters: A model, or its parameters.
        lr: The rate.
        weight_decay: Of matrices.
        gates: For "lars" and "lamb": give every gate of a packed recurrent weight a trust ratio of its own. It takes
            the model, for parameters do not say what they are.

    Raises:
        StrettoError: There is no such optimiser, there is nothing to train, or gates were asked for where they change
            nothing or cannot be found.
    """
    if name not in get_args(OptimizerName):
        raise StrettoError(
            f"there is no optimiser {name!r}", fix=f"Choose one of {', '.join(map(repr, get_args(OptimizerName)))}."
        )
    if not 0 <= weight_decay < math.inf:
        raise StrettoError(f"weight_decay is {weight_decay!r}", fix="Give a number from 0 on.")
    groups = _groups(_listed(name, parameters, gates=gates), weight_decay=weight_decay)
    if name in BY_TENSOR:
        return _by_tensor(name, groups, lr=lr)
    tensors = [tensor for group in groups for tensor in group["params"]]
    # Where there is no fused code torch decides.
    fused = True if all(t.device.type in FUSED_DEVICES and t.is_floating_point() for t in tensors) else None
    if name in ("adam", "adamw"):
        return (Adam if name == "adam" else AdamW)(groups, lr=lr, fused=fused)
    momentum = 0.0 if name == "sgd" else MOMENTUM
    return SGD(groups, lr=lr, momentum=momentum, nesterov=name == "nesterov", fused=fused)


def _listed(name: str, parameters: nn.Module | Iterable[torch.Tensor], *, gates: bool) -> list[torch.Tensor]:
    is_model = isinstance(parameters, nn.Module)
    if gates and name not in BY_TENSOR:
        raise StrettoError(
            f"gates were asked for with the optimiser {name!r}, which has no trust ratios for them to have",
            fix="Leave gates out, or choose 'lars' or 'lamb'.",
        )
    if gates and not is_model:
        raise StrettoError(
            "gates were asked for and parameters given, which do not say which of them hold gates",
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


def _groups(tensors: list[torch.Tensor], *, weight_decay: float) -> list[dict[str, Any]]:
    matrices = [tensor for tensor in tensors if tensor.dim() >= 2]
    others = [tensor for tensor in tensors if tensor.dim() < 2]
    groups: list[dict[str, Any]] = [
        {"params": matrices, "weight_decay": weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return [group for group in groups if group["params"]]


def _by_tensor(name: str, groups: list[dict[str, Any]], *, lr: float) -> Optimizer:
    complex_one = next((t.dtype for group in groups for t in group["params"] if t.is_complex()), None)
    if complex_one is not None:
        raise StrettoError(f"{name!r} was given a parameter of {complex_one}", fix="Use parameters of real numbers.")
    if name == "lars":
        made: Optimizer = optional("pytorch_optimizer").LARS(groups, lr=lr, momentum=MOMENTUM)
        return made
    for group in groups:
        is_scaled = group["params"][0].dim() >= 2
        # With `adam` there is no trust ratio; `adam_debias` leaves the library's own correction out, which in scaled
        # updates would make the first step ten times too long.
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
