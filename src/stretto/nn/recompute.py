"""Long sequences in little memory: stretches of time whose inner values are computed again in the backward pass."""

import math
from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

import torch

Run: TypeAlias = "Callable[[Sequence[torch.Tensor], Sequence[torch.Tensor]], list[torch.Tensor]]"
FEWEST_STEPS = 32
FEWEST_ROWS = 1024


def stretches(num_steps: int, num_rows: int) -> list[int]:
    """Where to cut: about as many stretches as steps in one, but none too short to be worth a call."""
    shortest = max(FEWEST_STEPS, FEWEST_ROWS // max(num_rows, 1), math.isqrt(num_steps))
    count = max(1, num_steps // shortest)
    return [num_steps * index // count for index in range(count + 1)]


class _Recomputed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, run: Run, given: int, *tensors: torch.Tensor) -> Any:
        ctx.run, ctx.given = run, given
        ctx.chance = torch.get_rng_state()
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(*tensors)
        return tuple(run(tensors[:given], tensors[given:]))

    @staticmethod
    def backward(ctx: Any, *cotangents: torch.Tensor | None) -> Any:
        tensors: Sequence[torch.Tensor] = ctx.saved_tensors
        needed = ctx.needs_input_grad[2:]
        twice = torch.is_grad_enabled()
        if twice:
            # Aliases: what leads from one of these tensors to another outside is not followed here.
            tensors = [tensor.view_as(tensor) for tensor in tensors]
        else:
            tensors = [t.detach().requires_grad_(needs) for t, needs in zip(tensors, needed, strict=True)]
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            torch.set_rng_state(ctx.chance)
            made = ctx.run(tensors[: ctx.given], tensors[ctx.given :])
        linked = [(t, d) for t, d in zip(made, cotangents, strict=True) if d is not None and t.requires_grad]
        wanted = [tensor for tensor, needs in zip(tensors, needed, strict=True) if needs]
        found = iter(
            torch.autograd.grad(
                [t for t, _ in linked], wanted, [d for _, d in linked], create_graph=twice, allow_unused=True
            )
            if linked and wanted
            else [None] * len(wanted)
        )
        return None, None, *(next(found) if needs else None for needs in needed)


def recomputed(run: Run, inputs: Sequence[torch.Tensor], parameters: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """What `run` makes of `inputs`, storing nothing else for the backward pass.

    Args:
        run: Makes tensors of inputs and parameters; it draws random numbers as it likes.
        inputs: What it is given.
        parameters: What else gradients are wanted for.
    """
    return list(_Recomputed.apply(run, len(inputs), *inputs, *parameters))  # type: ignore[no-untyped-call]
