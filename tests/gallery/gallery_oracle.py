"""A cell of the gallery in a plain Python loop, and what is compared with it.

Shape legend: B sequences, T steps.
"""

import math
from dataclasses import dataclass, replace
from typing import Any, final

import torch
from gallery_entry import INITIAL_SCALE, B, Entry, T, call, draw
from torch import nn
from torch.utils import _pytree as pytree

SMALLEST = 1e-3


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What a cell is run on: inputs (B, T, ...), a state and constants (B, ...), lengths and resets or None.

    A reset gives `fresh`, the state that a layer begins with when none is given; None is the state that is given.
    """

    xs: Any
    state: Any
    fresh: Any
    constants: Any
    lengths: list[int] | None
    resets_BT: torch.Tensor | None


def draw_batch(entry: Entry, *, dtype: torch.dtype = torch.float64, ragged: bool, seed: int = 1) -> Batch:
    """A batch; a ragged one has resets, too. A cell that draws numbers gets sizes at which a loop draws the same."""
    torch.manual_seed(seed)
    num_rows = 4 if entry.is_random else B
    resets_BT = torch.rand(num_rows, T) < 0.2
    state = draw(entry.state, num_rows, scale=INITIAL_SCALE, dtype=dtype)
    return Batch(
        xs=draw(entry.inputs, num_rows, T, dtype=dtype),
        state=state,
        fresh=pytree.tree_map(lambda part: part[:1].expand_as(part), state) if entry.step is None else None,
        constants=draw(entry.constants, num_rows, dtype=dtype),
        lengths=[T, 3, 1, T, 6][:num_rows] if ragged else None,
        resets_BT=resets_BT if ragged else None,
    )


def make(entry: Entry, *, dtype: torch.dtype = torch.float64, seed: int = 0) -> nn.Module:
    """The cell, with weights that are drawn in single precision, so that both precisions have the same."""
    torch.manual_seed(seed)
    return entry.make().to(dtype)


def leaves_of(batch: Batch) -> Batch:
    """The same, as tensors that want gradients."""

    def leaf(part: Any) -> Any:
        return part.detach().clone().requires_grad_() if part is not None and part.is_floating_point() else part

    xs, state, constants = (pytree.tree_map(leaf, part) for part in (batch.xs, batch.state, batch.constants))
    return replace(batch, xs=xs, state=state, constants=constants)


def _chosen(which_B: torch.Tensor, ones: Any, others: Any) -> Any:
    def choose(one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
        return torch.where(which_B.view(-1, *[1] * (one.dim() - 1)), one, other)

    return pytree.tree_map(choose, ones, others)


def by_loop(entry: Entry, cell: nn.Module, batch: Batch) -> tuple[Any, Any]:
    """Final state and outputs (B, T, ...), by the definition."""
    state, outputs = batch.state, []
    fresh = batch.state if batch.fresh is None else batch.fresh
    num_steps = pytree.tree_leaves(batch.xs)[0].shape[1]
    num_rows = pytree.tree_leaves(batch.state)[0].shape[0]
    lengths_B = torch.tensor([num_steps] * num_rows if batch.lengths is None else batch.lengths)
    for t in range(num_steps):
        real_B = lengths_B > t
        before = state
        if batch.resets_BT is not None:
            before = _chosen(batch.resets_BT[:, t], fresh, state)
        new, y = call(entry, cell, before, pytree.tree_map(lambda x: x[:, t], batch.xs), batch.constants)  # noqa: B023
        if batch.lengths is not None:
            new, y = _chosen(real_B, new, state), _chosen(real_B, y, pytree.tree_map(torch.zeros_like, y))
        state = new
        outputs.append(y)
    return state, pytree.tree_map(lambda *parts: torch.stack(parts, 1), *outputs)


def results(
    state: Any, ys: Any, batch: Batch, cell: nn.Module, *, twice: bool = False
) -> dict[str, torch.Tensor | None]:
    """Every tensor that came out, and the gradients of a random functional of them, by name.

    `twice` has the gradients of the gradients' size, too.
    """
    values = {**_named("y", ys), **_named("final", state)}
    wanted = {**_named("x", batch.xs), **_named("initial", batch.state), **_named("constant", batch.constants)}
    wanted = wanted | dict(cell.named_parameters())
    wanted = {name: part for name, part in wanted.items() if part.requires_grad}
    generator, total = torch.Generator().manual_seed(2), torch.zeros((), dtype=torch.float64)
    for value in values.values():
        weight = torch.randn(value.shape, generator=generator, dtype=torch.float64)
        if value.requires_grad:
            total = total + (value * weight.to(value.dtype)).sum()
    found: dict[str, torch.Tensor | None] = {name: value.detach() for name, value in values.items()}
    gradients = _gradients(total, wanted, again=twice)
    found |= {f"d {name}": gradient for name, gradient in gradients.items()}
    if twice:
        sizes = [d.square().sum().double() for d in gradients.values() if d is not None and d.requires_grad]
        found |= {f"d d {name}": d for name, d in _gradients(sum(sizes, torch.zeros(())), wanted).items()}
    return found


def _gradients(
    total: torch.Tensor, wanted: dict[str, torch.Tensor], *, again: bool = False
) -> dict[str, torch.Tensor | None]:
    if not total.requires_grad:
        return {}
    gradients = torch.autograd.grad(total, list(wanted.values()), allow_unused=True, create_graph=again)
    return dict(zip(wanted, gradients, strict=True))


def _named(name: str, tree: Any) -> dict[str, torch.Tensor]:
    return {name + pytree.keystr(path): part for path, part in pytree.tree_leaves_with_path(tree) if part is not None}


def errors(one: dict[str, torch.Tensor | None], other: dict[str, torch.Tensor | None]) -> dict[str, float]:
    """The error of each tensor, as a share of the largest magnitude of `other`; a missing gradient is zero."""
    assert one.keys() == other.keys(), one.keys() ^ other.keys()
    return {name: _error(value, other[name]) for name, value in one.items()}


def _error(one: torch.Tensor | None, other: torch.Tensor | None) -> float:
    if one is None or other is None:
        present = one if other is None else other
        return 0.0 if present is None or not present.any() else math.inf
    assert one.shape == other.shape
    one, other = one.double(), other.double()
    if one.numel() == 0 or torch.equal(one, other):
        return 0.0
    error = ((one - other).abs().max() / max(other.abs().max().item(), SMALLEST)).item()
    return math.inf if math.isnan(error) else error
