"""The gate before the clock: the same weights give the same loss, gradient and quality on both sides."""

import dataclasses
from collections.abc import Callable
from typing import Any, Final, final

import torch
from torch import nn

from bench.kernel_gate import pass_gate
from bench.training_contest import Margin
from bench.training_pairs import Rival
from bench.training_sides import PlainScript, StrettoSide
from stretto.batching import Batch, collate
from stretto.distributed import World
from stretto.errors import StrettoError
from stretto.nn import fresh_state
from stretto.training import AbstractTask

TOLERANCE: Final = 1e-4
SAMPLES: Final = 32
"""Sequences that the gate compares losses on."""
NEW_NAMES: Final = (
    ("layers.", ""),
    ("lstm.forwards.0.", "ahead."),
    ("lstm.backwards.0.", "behind."),
    ("both_ways.forwards.0.", "ahead."),
    ("both_ways.backwards.0.", "behind."),
    ("encoder.0.", "encoder."),
    ("decoder.0.", "decoder."),
    ("attention.", ""),
)
"""How weights begin that a plain script calls otherwise."""
NOT_WEIGHTS: Final = "standardise."


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """What both sides make of the same weights before anything is trained.

    Attributes:
        plain_loss: Of the plain script, on one batch.
        stretto_loss: Of Stretto, on the same.
        error: The largest difference of losses, or of gradients, relative to the largest value.
        plain_value: The metric on the validation part, by the plain script.
        stretto_value: By Stretto.
    """

    plain_loss: float
    stretto_loss: float
    error: float
    plain_value: float
    stretto_value: float


def take_weights(script: PlainScript, model: nn.Module) -> None:
    """Give a plain script the weights of Stretto's model.

    Raises:
        StrettoError: They are not weights of the same net.
    """
    state = model.state_dict()
    weights = {_plain_name(name): tensor for name, tensor in state.items() if not name.startswith(NOT_WEIGHTS)}
    try:
        script.model.load_state_dict(weights)
    except RuntimeError as error:
        raise StrettoError(
            f"the plain script has another net than Stretto: {error}", fix="Give both the same sizes and layers."
        ) from error


def pass_start(task: AbstractTask[Any], stretto: StrettoSide, rival: Rival, *, margin: Margin) -> Start:
    """The gate: the same weights must give the same loss, gradient and quality on both sides, or nothing is timed.

    Args:
        task: Loss and metric.
        stretto: Its weights are taken.
        rival: The plain script, which gets them.
        margin: How far apart both may measure the quality.

    Raises:
        StrettoError: The sides differ.
    """
    take_weights(rival.script, stretto.model)
    batch = first_batch(task)

    def stretto_loss() -> torch.Tensor:
        found = task.loss(stretto.model(batch), batch)
        return found.total / found.count

    with fresh_state(stretto.model):
        ours = _measured(stretto.model, stretto_loss)
    theirs = _measured(rival.script.model, lambda: rival.loss_of(batch))
    error = pass_gate(
        ours, wanted=theirs, name="stretto", peer="the plain script", where=task.name, tolerance=TOLERANCE
    )
    plain_value, stretto_value = rival.script.quality(), stretto.quality()
    if not (
        margin.is_reached(plain_value, value=stretto_value) and margin.is_reached(stretto_value, value=plain_value)
    ):
        raise StrettoError(
            f"with the same weights, the plain script measures {task.metric} {plain_value:.6g} and stretto "
            f"{stretto_value:.6g} at {task.name}",
            fix="No time counts until that is mended: both must measure the same.",
        )
    return Start(
        plain_loss=float(theirs["loss"]),
        stretto_loss=float(ours["loss"]),
        error=error,
        plain_value=plain_value,
        stretto_value=stretto_value,
    )


def first_batch(task: AbstractTask[Any]) -> Batch:
    """The first sequences, or the first window of a text in streams."""
    feed = task.feed(world=World())
    if feed.carries:
        return next(iter(feed))
    part = task.data.part("train")
    return collate([part[number] for number in range(min(SAMPLES, len(part)))])


def _measured(model: nn.Module, loss_of: Callable[[], torch.Tensor]) -> dict[str, torch.Tensor]:
    """The loss and its gradient, dropout off; nothing is left behind."""
    was_training = model.training
    model.eval()
    weights = sorted(model.named_parameters(), key=lambda item: _plain_name(item[0]))
    loss = loss_of()
    gradients = torch.autograd.grad(loss, [weight for _, weight in weights])
    model.train(was_training)
    return {"loss": loss.detach(), "gradient": torch.cat([gradient.flatten() for gradient in gradients])}


def _plain_name(name: str) -> str:
    """What a plain script calls a weight."""
    old, new = next((pair for pair in NEW_NAMES if name.startswith(pair[0])), ("", ""))
    return new + name.removeprefix(old)
