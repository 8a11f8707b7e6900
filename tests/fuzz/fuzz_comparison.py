"""Cells run by `stretto.RNN` beside the same cells called step after step, for each sequence by itself.

Shape legend: B sequences, T steps, F features of the input.
"""

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self, final

import torch
from fuzz_cell import Case, FuzzCell, Recipe
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

import stretto
from rnn_definition import by_hand
from stretto.kernels import Backend, SaveChoice
from stretto.state import flatten

TOLERANCE = 1e-9
NUDGE = 1e-10
"""How far inputs are moved to find out whether a result means anything: kinks and chaos answer out of proportion."""


@final
@dataclass(slots=True)
class Batch:
    """Tensors of a case, what the loss reads, and whether gradients are differentiated again."""

    x_BTF: torch.Tensor
    state: list[torch.Tensor] | None
    lengths: tuple[int, ...]
    loss_on: Any
    weighted: bool
    seed: int
    resets_BT: torch.Tensor | None = None
    packed: bool = False
    twice: bool = False

    @classmethod
    def of(cls, recipe: Recipe, case: Case, *, twice: bool = False) -> "Batch":
        """Random tensors."""
        drawn, count = drawing(case), len(case.lengths)
        x_BTF = drawn(count, case.num_steps, *recipe.x)
        state = [drawn(count, *sizes) for sizes in recipe.states]
        return cls(
            x_BTF.requires_grad_(case.x_learns),
            [part.requires_grad_() for part in state] if case.given_state else None,
            case.lengths,
            case.loss_on,
            case.weighted,
            case.seed,
            resets_of(case),
            packed=case.packed and min(case.lengths) > 0,
            twice=twice,
        )

    def inputs(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Everything that has a gradient, by name."""
        named = {"x": self.x_BTF, **{f"state{index}": part for index, part in enumerate(self.state or [])}}
        return {
            name: tensor
            for name, tensor in {**named, **dict(module.named_parameters())}.items()
            if tensor.requires_grad
        }

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The same with other numbers."""
        return replace(
            self,
            x_BTF=move(self.x_BTF.detach()).requires_grad_(self.x_BTF.requires_grad),
            state=None if self.state is None else [move(part.detach()).requires_grad_() for part in self.state],
        )


def drawing(case: Case) -> Callable[..., torch.Tensor]:
    """What draws the tensors of a case, one after another, given their sizes."""
    generator = torch.Generator().manual_seed(case.seed)

    def drawn(*sizes: int) -> torch.Tensor:
        pairs = 0.8 * torch.randn(*sizes, 2, dtype=torch.float64, generator=generator)
        return pairs[..., 0] if case.strided else pairs[..., 0].contiguous()

    return drawn


def resets_of(case: Case) -> torch.Tensor | None:
    """Where the sequences of a case are reset; None if nowhere."""
    generator = torch.Generator().manual_seed(case.seed + 3)
    shape = (len(case.lengths), case.num_steps)
    return torch.rand(shape, generator=generator) < case.resets if case.resets else None


class Definition(Protocol):
    """A net and a batch for it, as far as it matters here whether results mean anything."""

    def by_definition(self, batch: Any) -> "Results": ...

    def parameters(self) -> Any: ...


@final
@dataclass(slots=True)
class Results:
    """Values and gradients, by name."""

    values: dict[str, torch.Tensor]
    gradients: dict[str, torch.Tensor]

    @property
    def all(self) -> dict[str, torch.Tensor]:
        """Both."""
        return {**self.values, **{f"gradient of {name}": tensor for name, tensor in self.gradients.items()}}


@final
class Net(nn.Module):
    """Layers of random cells, each of one or two directions, of which the second reads backwards."""

    def __init__(self, *layers: Sequence[Recipe], seed: int = 0) -> None:
        super().__init__()
        self.num_directions = len(layers[0])
        in_order = [recipe for layer in layers for recipe in layer]
        self.each = [FuzzCell(recipe, seed=seed + index) for index, recipe in enumerate(in_order)]
        self.cells = nn.ModuleList(self.each)

    def rnn(self, backend: Backend, save: SaveChoice = "auto") -> stretto.RNN:
        """The same with the library."""
        num_layers = len(self.each) // self.num_directions
        return stretto.RNN(list(self.cells), num_layers, self.num_directions == 2, backend=backend, save=save)

    def by_definition(self, batch: Batch) -> Results:
        """Each sequence by itself, layer by layer, each step a call of the cell."""
        state = None if batch.state is None else self.each[0].nested(batch.state)
        y, finals = by_hand(
            self.each,
            batch.x_BTF,
            lengths=batch.lengths,
            state=state,
            num_directions=self.num_directions,
            resets_BT=batch.resets_BT,
        )
        return results_of(self, batch, [y], finals)


def by_stretto(rnn: stretto.RNN, net: Net, batch: Batch) -> Results:
    """The same with the library."""
    y, after = called(rnn, net, batch)
    return results_of(net, batch, [y], flatten(after))


def called(rnn: stretto.RNN, net: Net, batch: Batch) -> tuple[torch.Tensor, Any]:
    """Outputs, padded with zeros, and the state after each sequence."""
    state = None if batch.state is None else net.each[0].nested(batch.state)
    if not batch.packed:
        y, after = rnn(batch.x_BTF, state, lengths=list(batch.lengths), resets=batch.resets_BT)
        return y, after

    def pack(padded: torch.Tensor) -> PackedSequence:
        return pack_padded_sequence(padded, torch.tensor(batch.lengths), batch_first=True, enforce_sorted=False)

    resets = None if batch.resets_BT is None else pack(batch.resets_BT)
    made, after = rnn(pack(batch.x_BTF), state, resets=resets)
    y, _ = pad_packed_sequence(made, batch_first=True, total_length=batch.x_BTF.shape[1])
    return y, after


def assert_same_without_gradients(rnn: stretto.RNN, net: Net, batch: Batch, wanted: Results) -> None:
    """Evaluation gives the same values to the last bit.

    Where the cell is called as it is, torch chooses other products for tensors without gradients; these are only close.
    """
    with torch.no_grad():
        y, after = called(rnn, net, batch)
    found = {"y": y, **{f"last state {index}": state for index, state in enumerate(flatten(after))}}
    if rnn.explain().backend == "torch":
        assert_same(Results(found, {}), Results(wanted.values, {}))
    else:
        assert_identical(found, wanted.values)


def results_of(module: nn.Module, batch: Any, ys: Sequence[torch.Tensor], states: Sequence[torch.Tensor]) -> Results:
    """Values, and the gradients of a loss that reads them."""
    generator = torch.Generator().manual_seed(batch.seed + 1)
    made = {"y" if len(ys) == 1 else f"y {index}": y for index, y in enumerate(ys)}
    made.update((f"last state {index}", state) for index, state in enumerate(states))
    loss = torch.zeros((), dtype=torch.float64)
    for position, tensor in enumerate(made.values(), 1 - len(ys)):
        weight = torch.randn(tensor.shape, dtype=torch.float64, generator=generator)
        counts = {"y": position <= 0, "last": position > 0, "both": True}.get(batch.loss_on, position == 1)
        if counts:
            loss = loss + (tensor * weight if batch.weighted else tensor).sum()
    inputs = batch.inputs(module)
    gradients = _gradients(loss, inputs, again=batch.twice)
    found = {name: tensor.detach() for name, tensor in gradients.items()}
    if batch.twice:
        size = (
            torch.stack([tensor.square().sum() for tensor in gradients.values()]).sum() if gradients else loss.detach()
        )
        found.update((f"{name}, of its size", tensor) for name, tensor in _gradients(size, inputs).items())
    return Results({name: tensor.detach() for name, tensor in made.items()}, found)


def _gradients(loss: torch.Tensor, inputs: dict[str, torch.Tensor], *, again: bool = False) -> dict[str, torch.Tensor]:
    """The gradient of each input, zero where the loss does not depend on it."""
    if not (inputs and loss.requires_grad):
        return {name: torch.zeros_like(tensor) for name, tensor in inputs.items()}
    found = torch.autograd.grad(loss, list(inputs.values()), allow_unused=True, create_graph=again)
    return {
        name: torch.zeros_like(tensor) if gradient is None else gradient
        for (name, tensor), gradient in zip(inputs.items(), found, strict=True)
    }


def difference(found: torch.Tensor, wanted: torch.Tensor) -> float:
    """The largest difference, relative to the largest magnitude; infinite for another shape or no number."""
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        return float("inf")
    if found.numel() == 0:
        return 0.0
    size = max(wanted.abs().max().item(), 1e-3)
    gap = (found - wanted).abs().max().item()
    return gap / size if gap == gap else float("inf")  # noqa: PLR0124 - not a number


def is_meaningful(net: Definition, batch: Any, results: Results) -> bool:
    """Whether results are finite and follow the inputs smoothly, so that the last digits of a value cannot decide."""
    tensors = [tensor for tensor in results.all.values() if tensor.numel()]
    if not all(bool(tensor.isfinite().all()) and tensor.abs().max() < 1e6 for tensor in tensors):
        return False
    generator = torch.Generator().manual_seed(batch.seed + 2)

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor + NUDGE * torch.randn(tensor.shape, dtype=tensor.dtype, generator=generator)

    twin = copy.deepcopy(net)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.copy_(moved(parameter))
    other = twin.by_definition(batch.moved(moved))
    return all(difference(other.all[name], tensor) < 1e4 * NUDGE for name, tensor in results.all.items())


def assert_same(found: Results, wanted: Results) -> None:
    """All values and gradients agree."""
    assert found.all.keys() == wanted.all.keys()
    for name, tensor in wanted.all.items():
        gap = difference(found.all[name], tensor)
        assert gap <= TOLERANCE, f"{name} is off by {gap:.1e}: {found.all[name]} and not {tensor}"


def assert_identical(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> None:
    """All tensors agree to the last bit."""
    for name, tensor in found.items():
        assert torch.equal(tensor, wanted[name]), f"{name} is {tensor} and not {wanted[name]}"
