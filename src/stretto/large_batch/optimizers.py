"""Optimisers by name: torch's own, Muon for recurrent nets, and LARS and LAMB with a trust ratio per matrix or gate."""

import functools
import math
from collections.abc import Iterable
from typing import Any, Final, Literal, get_args

import torch
from torch import nn
from torch.optim import SGD, Adam, AdamW, Optimizer

from stretto.checks import check_choice, check_float, check_list
from stretto.errors import StrettoError
from stretto.extras import optional
from stretto.large_batch.gates import parameters_by_gate
from stretto.large_batch.muon import FUSED_DEVICES, Muon

OptimizerName = Literal["adamw", "adam", "sgd", "momentum", "nesterov", "lars", "lamb", "muon"]
TRUST_RATIO_OPTIMIZERS: Final = ("lars", "lamb")
SPARSE_OPTIMIZERS: Final = ("sgd", "momentum", "nesterov")
MOMENTUM: Final = 0.9


def make_optimizer(
    name: str,
    parameters: nn.Module | Iterable[torch.Tensor],
    *,
    lr: float,
    weight_decay: float = 0.0,
    decay_biases: bool = False,
    gates: bool = False,
    adam_share: float = 1.0,
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
    - "muon": the momentum of every gate of a recurrent layer made orthogonal, and Adam for the rest; see `Muon`. It has
      a group for each kind of parameter, and needs the model.

    Args:
        name: Which optimiser.
        parameters: A model, or its parameters.
        lr: The learning rate.
        weight_decay: Of matrices.
        decay_biases: Decay biases and gains too, all in one group, as `torch.optim.AdamW(model.parameters())` does.
        gates: For "lars" and "lamb": give every gate of a packed recurrent weight a trust ratio of its own. It needs
            the model, for parameters do not say what they are.
        adam_share: For "muon": the rate of what Adam updates, but for embeddings and the output layer, as a
            multiple of the rate; see `Muon`.

    Raises:
        StrettoError: There is no such optimiser, a number is out of range, there is nothing to train, gates were asked
            for where they change nothing or cannot be found, or an embedding's gradients are sparse, which "sgd",
            "momentum" and "nesterov" alone take, without weight decay.
    """
    check_choice(name, name="optimizer", choices=get_args(OptimizerName))
    check_float(lr, name="lr", at_least=0.0)
    check_float(weight_decay, name="weight_decay", at_least=0.0)
    sparse = _sparse_embedding(parameters)
    if sparse is not None and (name not in SPARSE_OPTIMIZERS or weight_decay):
        takes = f"{name!r}{f' with a weight decay of {weight_decay:g}' if name in SPARSE_OPTIMIZERS else ''}"
        raise StrettoError(
            f"the gradients of the embedding {sparse!r} are sparse, which {takes} does not take",
            fix="Make it with sparse=False, or choose 'sgd' without weight decay.",
        )
    if name == "muon":
        _refuse_for_muon(decay_biases=decay_biases, gates=gates)
        return _muon(parameters, lr=lr, weight_decay=weight_decay, adam_share=adam_share)
    if adam_share != 1.0:
        raise StrettoError(
            f"adam_share={adam_share!r} was given with the optimiser {name!r}, which has one rate for all",
            fix="Leave it out, or choose 'muon'.",
        )
    tensors = _trained_tensors(name, parameters, gates=gates)
    groups: list[dict[str, Any]] = [
        {"params": [t for t in tensors if t.dim() >= 2 or decay_biases], "weight_decay": weight_decay},
        {"params": [t for t in tensors if t.dim() < 2 and not decay_biases], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    if name in TRUST_RATIO_OPTIMIZERS:
        return _with_trust_ratios(name, groups, lr=lr)
    # Where there is no fused code torch decides.
    can_fuse = sparse is None and all(t.device.type in FUSED_DEVICES and t.is_floating_point() for t in tensors)
    fused = True if can_fuse else None
    if name in ("adam", "adamw"):
        return (Adam if name == "adam" else AdamW)(groups, lr=lr, fused=fused)
    momentum = 0.0 if name == "sgd" else MOMENTUM
    return SGD(groups, lr=lr, momentum=momentum, nesterov=name == "nesterov", fused=fused)


def _sparse_embedding(parameters: nn.Module | Iterable[torch.Tensor]) -> str | None:
    """The name of an embedding to train that gives sparse gradients; parameters do not say so."""
    if not isinstance(parameters, nn.Module):
        return None
    modules: dict[str, nn.Module] = dict(parameters.named_modules())
    for name, module in modules.items():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and module.sparse and module.weight.requires_grad:
            return name
    return None


def _refuse_for_muon(*, decay_biases: bool, gates: bool) -> None:
    if gates or decay_biases:
        raise StrettoError(
            f"{'gates' if gates else 'decay_biases'}=True was given with the optimiser 'muon'",
            fix="Leave it out: Muon always takes weights apart into their gates, and never decays biases and gains.",
        )


def _muon(parameters: nn.Module | Iterable[torch.Tensor], *, lr: float, weight_decay: float, adam_share: float) -> Muon:
    if not isinstance(parameters, nn.Module):
        raise StrettoError(
            "the optimiser 'muon' was given parameters, which do not say what they are",
            fix="Give the model in their place.",
        )
    return Muon(parameters, lr=lr, adam_share=adam_share, weight_decay=weight_decay)


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
        found = check_list(parameters, name="parameters", fix="Give the model, or model.parameters().")
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
