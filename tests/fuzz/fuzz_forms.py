"""Random cells with states, inputs, constants and outputs in random structures, and functions that do the same step.

A form gives each register of a recipe that comes before its operators a role, and says how they are nested.

Shape legend: B sequences, T steps.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, Final, Literal, NamedTuple, Self, TypeAlias, final

import torch
from fuzz_cell import Case, FuzzCell, Recipe, run_code
from fuzz_comparison import Results, drawing, resets_of, results_of
from fuzz_strategies import recipes
from fuzz_writer import Draw
from hypothesis import strategies as st
from torch import nn

import stretto
from stretto.kernels import Backend, SaveChoice

Role: TypeAlias = Literal["state", "input", "flags", "count", "constant"]
Tree: TypeAlias = "tuple[Literal['tuple', 'list', 'dict', 'named'], tuple[Tree, ...]] | None"
"""How tensors are nested; None is a tensor."""


class Named(NamedTuple):
    """A pair with names, in the order that is not that of the names."""

    second: Any
    first: Any


KEYS: Final = "dcbafe"
DTYPES: Final = {"input": torch.float64, "flags": torch.bool, "count": torch.int64}


def nest(tree: Tree, parts: Iterator[torch.Tensor]) -> Any:
    """Tensors in a structure."""
    if tree is None:
        return next(parts)
    made = [nest(item, parts) for item in tree[1]]
    if tree[0] == "dict":
        return dict(zip(KEYS, made, strict=False))
    if tree[0] == "named":
        return Named(*made)
    return made if tree[0] == "list" else tuple(made)


def parts_of(tree: Tree, value: Any) -> list[torch.Tensor]:
    """The tensors again, if they are in that structure."""
    if tree is None:
        assert isinstance(value, torch.Tensor)
        return [value]
    assert type(value) is {"tuple": tuple, "list": list, "dict": dict, "named": Named}[tree[0]]
    items = [value[key] for key in KEYS[: len(value)]] if tree[0] == "dict" else value
    return [part for item, inner in zip(items, tree[1], strict=True) for part in parts_of(inner, item)]


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Form:
    """How a recipe is called.

    Attributes:
        recipe: The operators.
        roles: What each of its states is: a state, another input, also as booleans or integers, or a constant.
        outputs: Registers that are outputs.
        state: How states are nested.
        inputs: How inputs are.
        constants: How constants are.
        y: How outputs are.
    """

    recipe: Recipe
    roles: tuple[Role, ...]
    outputs: tuple[int, ...]
    state: Tree
    inputs: Tree
    constants: Tree
    y: Tree

    def places(self, *roles: Role) -> list[int]:
        """Which states of the recipe have one of some roles."""
        return [index for index, role in enumerate(self.roles) if role in roles]

    def step(self, leaves: list[torch.Tensor | None], x: Any, state: Any, constants: Any) -> tuple[Any, Any]:
        """One step: the outputs and the next state."""
        inputs = parts_of(self.inputs, x)
        registers = [inputs[0], *[inputs[0]] * len(self.roles)]
        for place, part in zip(self.places("input", "flags", "count"), inputs[1:], strict=True):
            assert part.dtype == DTYPES[self.roles[place]]
            registers[1 + place] = part.to(torch.float64)
        for place, part in zip(self.places("state"), parts_of(self.state, state), strict=True):
            registers[1 + place] = part
        fixed = self.places("constant")
        for place, part in zip(fixed, parts_of(self.constants, constants) if fixed else [], strict=True):
            registers[1 + place] = part
        registers = run_code(self.recipe, leaves, registers)
        after = [registers[self.recipe.after[place]] for place in self.places("state")]
        return nest(self.y, iter([registers[read] for read in self.outputs])), nest(self.state, iter(after))


@final
@dataclass(slots=True)
class FormBatch:
    """Tensors of a case; the states of each direction, if they are given."""

    form: Form
    case: Case
    inputs_BT: list[torch.Tensor]
    states: list[list[torch.Tensor]] | None
    constants: list[torch.Tensor]
    resets_BT: torch.Tensor | None

    @classmethod
    def of(cls, form: Form, case: Case, *, num_directions: int = 1) -> Self:
        """Random tensors."""
        drawn, recipe, count = drawing(case), form.recipe, len(case.lengths)
        inputs = [drawn(count, case.num_steps, *recipe.x).requires_grad_(case.x_learns)]
        for place in form.places("input", "flags", "count"):
            made, role = drawn(count, case.num_steps, *recipe.states[place]), form.roles[place]
            made = (made > 0 if role == "flags" else (2 * made).round() if role == "count" else made).to(DTYPES[role])
            inputs.append(made.requires_grad_(role == "input" and case.x_learns))
        states = [
            [drawn(count, *recipe.states[place]).requires_grad_() for place in form.places("state")]
            for _ in range(num_directions)
        ]
        constants = [drawn(count, *recipe.states[place]).requires_grad_() for place in form.places("constant")]
        return cls(form, case, inputs, states if case.given_state else None, constants, resets_of(case))

    @property
    def seed(self) -> int:
        """Of random numbers."""
        return self.case.seed

    @property
    def loss_on(self) -> Any:
        """What the loss reads."""
        return self.case.loss_on

    @property
    def weighted(self) -> bool:
        """Whether it weighs every element differently."""
        return self.case.weighted

    twice = False

    def inputs(self, module: nn.Module) -> dict[str, torch.Tensor]:
        """Everything that has a gradient, by name."""
        states = [part for parts in self.states or [] for part in parts]
        lists = {"input": self.inputs_BT, "state": states, "constant": self.constants}
        named = {f"{name} {index}": part for name, parts in lists.items() for index, part in enumerate(parts)}
        return {name: part for name, part in {**named, **dict(module.named_parameters())}.items() if part.requires_grad}

    def moved(self, move: Callable[[torch.Tensor], torch.Tensor]) -> Self:
        """The same with other numbers."""

        def moved(parts: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            return [
                move(part.detach()).requires_grad_(part.requires_grad) if part.is_floating_point() else part
                for part in parts
            ]

        states = None if self.states is None else list(map(moved, self.states))
        return replace(self, inputs_BT=moved(self.inputs_BT), states=states, constants=moved(self.constants))

    def nested_inputs(self) -> Any:
        """Inputs as a cell takes them."""
        return nest(self.form.inputs, iter(self.inputs_BT))

    def nested_constants(self) -> Any:
        """Constants as a cell takes them; None without any."""
        return nest(self.form.constants, iter(self.constants)) if self.constants else None


class FormCell(nn.Module):
    """A form as a module; `seed` decides its parameters."""

    def __init__(self, form: Form, *, seed: int) -> None:
        super().__init__()
        self.form, self.inner = form, FuzzCell(form.recipe, seed=seed)

    def start(self, batch_size: int) -> list[torch.Tensor]:
        """The parts of the initial state."""
        parts = self.inner.start(batch_size)
        return [parts[place] for place in self.form.places("state")]

    def initial_state(self, batch_size: int) -> Any:
        """Zeros, or learnt rows."""
        return nest(self.form.state, iter(self.start(batch_size)))

    def forward(self, x: Any, state: Any) -> tuple[Any, Any]:
        """One step."""
        return self.form.step(self.inner.leaves(), x, state, None)


@final
class ConstantsCell(FormCell):
    """The same with constants."""

    def forward(self, x: Any, state: Any, constants: Any) -> tuple[Any, Any]:  # type: ignore[override]
        """One step."""
        return self.form.step(self.inner.leaves(), x, state, constants)


@final
class FormNet(nn.Module):
    """A form as a layer of one or two directions, or as a function that is scanned, forwards or in reverse."""

    def __init__(self, form: Form, *, seed: int, num_directions: int = 1, scans: bool = False, reverse: bool = False):
        super().__init__()
        kind = ConstantsCell if form.places("constant") else FormCell
        self.form, self.scans, self.reverse = form, scans, reverse
        self.each = [kind(form, seed=seed + index) for index in range(num_directions)]
        self.cells = nn.ModuleList(self.each)

    def rnn(self, backend: Backend, save: SaveChoice) -> stretto.RNN:
        """As a layer."""
        return stretto.RNN(list(self.cells), 1, len(self.each) == 2, backend=backend, save=save)

    def by_rnn(self, rnn: stretto.RNN, batch: FormBatch) -> Results:
        """What the layer gives, if it comes in the structures that were given."""
        state = None
        if batch.states is not None:
            each = [nest(self.form.state, iter(parts)) for parts in batch.states]
            state = each[0] if len(each) == 1 else tuple(each)
        lengths, constants = list(batch.case.lengths), batch.nested_constants()
        ys, after = rnn(batch.nested_inputs(), state, lengths, constants=constants, resets=batch.resets_BT)
        finals = [after] if len(self.each) == 1 else after
        states = [part for final in finals for part in parts_of(self.form.state, final)]
        return results_of(self, batch, parts_of(self.form.y, ys), states)

    def by_scan(self, batch: FormBatch) -> Results:
        """What scanning gives a function that closes over the cell's tensors."""
        step = self.function()
        init = nest(self.form.state, iter(self._starts(batch)[0]))
        after, ys = stretto.scan(
            step,
            init,
            batch.nested_inputs(),
            lengths=list(batch.case.lengths),
            resets=batch.resets_BT,
            reverse=self.reverse,
            constants=batch.nested_constants(),
        )
        return results_of(self, batch, parts_of(self.form.y, ys), parts_of(self.form.state, after))

    def function(self) -> Callable[..., tuple[Any, Any]]:
        """A new copy of the step."""
        form, leaves = self.form, self.each[0].inner.leaves()

        def step(state: Any, x: Any, constants: Any = None) -> tuple[Any, Any]:
            y, after = form.step(leaves, x, state, constants)
            return after, y

        return step

    def _starts(self, batch: FormBatch) -> list[list[torch.Tensor]]:
        count = len(batch.case.lengths)
        return [cell.start(count) for cell in self.each] if batch.states is None else batch.states

    def by_definition(self, batch: FormBatch) -> Results:
        """Each sequence by itself, each step a call."""
        runs = [self._run(index, start, batch) for index, start in enumerate(self._starts(batch))]
        sides = zip(*(ys for ys, _ in runs), strict=True)
        if len(runs) == 1:
            ys = [side[0] for side in sides]
        else:
            ys = [torch.cat([y if y.dim() > 2 else y[..., None] for y in side], dim=-1) for side in sides]
        return results_of(self, batch, ys, [part for _, finals in runs for part in finals])

    def _run(
        self, index: int, start: list[torch.Tensor], batch: FormBatch
    ) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Outputs and final states of one direction."""
        form, leaves = self.form, self.each[index].inner.leaves()
        is_back = self.reverse or index == 1
        # A layer read backwards is reset at the last step before a reset, a scan in reverse at the reset itself.
        ahead = int(is_back and not self.scans)
        fresh = start if self.scans else self.each[index].start(len(batch.case.lengths))
        num_steps = batch.case.num_steps
        finals, rows = [], []
        for row, length in enumerate(batch.case.lengths):
            here = slice(row, row + 1)
            borders = [False] * num_steps if batch.resets_BT is None else batch.resets_BT[row].tolist()
            borders = [*borders[:length], False]
            constants = None
            if batch.constants:
                constants = nest(form.constants, iter([part[here] for part in batch.constants]))
            state = nest(form.state, iter([part[here] for part in start]))
            outputs: dict[int, list[torch.Tensor]] = {}
            for t in reversed(range(length)) if is_back else range(length):
                if borders[t + ahead]:
                    state = nest(form.state, iter([part[here] for part in fresh]))
                x = nest(form.inputs, iter([part[here, t] for part in batch.inputs_BT]))
                y, state = form.step(leaves, x, state, constants)
                outputs[t] = parts_of(form.y, y)
            finals.append(parts_of(form.state, state))
            rows.append(outputs)
        zeros = [torch.zeros_like(part) for part in next(iter(next(outputs for outputs in rows if outputs).values()))]
        ys = [
            torch.cat(
                [torch.stack([made[t][place] if t in made else zero for t in range(num_steps)], 1) for made in rows]
            )
            for place, zero in enumerate(zeros)
        ]
        return ys, [torch.cat(parts) for parts in zip(*finals, strict=True)]


@st.composite
def trees(draw: Draw, count: int, *, depth: int = 2) -> Tree:
    """How so many tensors are nested."""
    if count == 1 and (depth == 0 or draw(st.booleans())):
        return None
    kind = draw(st.sampled_from(("tuple", "list", "dict", "named")))
    cuts = set(range(1, count))
    if kind == "named" or depth == 0:
        kind, cuts = ("named", {draw(st.integers(1, count - 1))}) if count > 1 and depth else ("tuple", cuts)
    elif count > 1:
        cuts = draw(st.sets(st.integers(1, count - 1)))
    ends = [0, *sorted(cuts), count]
    return kind, tuple(draw(trees(end - begin, depth=depth - 1)) for begin, end in pairwise(ends))


@st.composite
def forms(draw: Draw, *, shortest: int = 2) -> Form:
    """A recipe whose states are states, further inputs and constants; what would become of the others are outputs."""
    recipe = draw(recipes(shortest=shortest, longest=8, fewest_states=2))
    others: tuple[Role, ...] = ("state", "input", "constant", "flags", "count")
    roles = ("state", *(draw(st.sampled_from(others)) for _ in recipe.states[1:]))
    further = [after for after, role in zip(recipe.after, roles, strict=True) if role != "state"]
    outputs = (recipe.y, *further) if draw(st.booleans()) else (recipe.y,)
    counts = [roles.count("state"), 1 + sum(role in {"input", "flags", "count"} for role in roles)]
    state, inputs, constants, y = (
        draw(trees(count)) if count else None for count in (*counts, roles.count("constant"), len(outputs))
    )
    return Form(recipe=recipe, roles=roles, outputs=outputs, state=state, inputs=inputs, constants=constants, y=y)
