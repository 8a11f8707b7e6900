"""A cell that does what a recipe says."""

from typing import Any, final

import torch
from fuzz_operations import LEAVES, RUN, leaf
from fuzz_recipe import Recipe
from torch import nn

import stretto


@final
class FuzzCell(stretto.Cell):
    """Runs the operators of a recipe, one after another; `seed` decides its parameters."""

    def __init__(self, recipe: Recipe, *, seed: int = 0) -> None:
        super().__init__()
        self.recipe = recipe
        generator = torch.Generator().manual_seed(seed)
        for index, op in enumerate(recipe.code):
            if op.name in LEAVES:
                tensor = leaf(op.name, op.settings, generator)
                if op.name == "buffer":
                    self.register_buffer(f"r{recipe.first + index}", tensor)
                else:
                    setattr(self, f"r{recipe.first + index}", tensor)
        if recipe.initial == "learnt":
            for index, sizes in enumerate(recipe.states):
                values = torch.randn(1, *sizes, dtype=torch.float64, generator=generator)
                setattr(self, f"start{index}", nn.Parameter(0.5 * values))

    def initial_state(self, batch_size: int) -> Any:
        """Zeros, or learnt rows."""
        if self.recipe.initial == "learnt":
            parts = [getattr(self, f"start{i}").expand(batch_size, *s) for i, s in enumerate(self.recipe.states)]
        else:
            parts = [torch.zeros(batch_size, *sizes, dtype=torch.float64) for sizes in self.recipe.states]
        return self.nested(parts)

    def nested(self, parts: list[torch.Tensor]) -> Any:
        """Parts of a state in the structure the recipe asks for."""
        if self.recipe.nesting == "bare":
            return parts[0]
        return tuple(parts) if self.recipe.nesting == "flat" else (tuple(parts[:1]), tuple(parts[1:]))

    def forward(self, x_t: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
        """One step."""
        registers: list[Any] = [x_t, *parts_of(state)]
        for index, op in enumerate(self.recipe.code):
            if op.name in LEAVES:
                registers.append(getattr(self, f"r{self.recipe.first + index}"))
            else:
                registers.append(RUN[op.name](*(registers[read] for read in op.reads), *op.settings))
        return registers[self.recipe.y], self.nested([registers[after] for after in self.recipe.after])


def parts_of(state: Any) -> list[torch.Tensor]:
    """The tensors of a state of any structure."""
    return [state] if isinstance(state, torch.Tensor) else [part for item in state for part in parts_of(item)]
