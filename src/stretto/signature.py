"""How a module is called as one step: where its arguments come from, and what it returns.

A program has one tensor of inputs, one of outputs and a state in parts. People write their cells in many ways:

    forward(x_t, state)                 state: a tensor, or tensors in any structure
    forward(x_t, h, c)                  the parts of the state one by one
    forward((value_t, mask_t), state)   several inputs, in any structure, concatenated in the rows
    forward(x_t, state, constants)      what is the same at every step: further parts of the state, which never change

    return new_state                    the output is its first part
    return y_t, new_state               y_t: a tensor, or tensors in any structure, concatenated
    return y_t, h, c                    the parts of the state one by one

What a cell returned is read by its structure alone: what is nested like the state is the state; a pair whose second
item is nested like the state is an output and the state; and what has one item more than a state in a tuple is an
output and the state's items. No result fits two of these.

Shape legend: B sequences, F features, P rows.
"""

import inspect
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, Literal, NoReturn, TypeAlias, final

import torch
from torch import nn
from torch.func import functional_call

from stretto.checks import check_int
from stretto.errors import StrettoError
from stretto.state import (
    children,
    describe,
    describe_difference,
    describe_rows,
    flatten,
    is_alike,
    map_state,
    select_rows,
    structure_of,
    unflatten,
)

Returns: TypeAlias = Literal["auto", "state", "output and state", "state and output"]


@final
@dataclass(frozen=True, slots=True)
class Packing:
    """Tensors of a structure, concatenated row by row into one tensor (P, F).

    Integers and booleans are converted to the floating dtype of the others, if there is one.

    Attributes:
        structure: As it is compared.
        shapes: Of a row of each tensor.
        dtypes: Of each tensor.
        template: A structure like it.
    """

    structure: Any
    shapes: tuple[tuple[int, ...], ...]
    dtypes: tuple[torch.dtype, ...]
    template: Any = field(compare=False, repr=False)

    @staticmethod
    def of(tree: Any, *, num_lead: int = 1) -> "Packing":
        """That of tensors whose first `num_lead` dimensions are not those of a row.

        Raises:
            StrettoError: They are of several floating dtypes, or complex.
        """
        parts = flatten(tree)
        found = Packing(
            structure_of(tree),
            tuple(tuple(part.shape[num_lead:]) for part in parts),
            tuple(part.dtype for part in parts),
            unflatten(tree, [torch.empty(0)] * len(parts)),
        )
        floating = {dtype for dtype in found.dtypes if dtype.is_floating_point}
        if len(floating) > 1 or not parts or any(dtype.is_complex for dtype in found.dtypes):
            kinds = " and ".join(sorted({str(dtype) for dtype in found.dtypes})) or "no tensors"
            raise StrettoError(
                f"tensors of {kinds} cannot be concatenated", fix="Convert them to one floating dtype, with .to(...)."
            )
        return found

    @property
    def dtype(self) -> torch.dtype:
        """Of the packed tensor."""
        if len(set(self.dtypes)) == 1:
            return self.dtypes[0]
        return next((dtype for dtype in self.dtypes if dtype.is_floating_point), torch.int64)

    @property
    def widths(self) -> list[int]:
        """Columns of each tensor."""
        return [math.prod(shape) for shape in self.shapes]

    def pack(self, tree: Any) -> torch.Tensor:
        """Tensors (P, ...) as one (P, F)."""
        pairs = zip(flatten(tree), self.widths, strict=True)
        return torch.cat([part.reshape(part.shape[0], width).to(self.dtype) for part, width in pairs], dim=1)

    def unpack(self, packed: torch.Tensor) -> Any:
        """The tensors again."""
        return unflatten(self.template, self.unpack_parts(packed))

    def unpack_parts(self, packed: torch.Tensor) -> list[torch.Tensor]:
        """The tensors, part by part."""
        parts = torch.split(packed, self.widths, dim=1)
        return [
            _restore(part if len(shape) == 1 else part.reshape(part.shape[0], *shape), dtype)
            for part, shape, dtype in zip(parts, self.shapes, self.dtypes, strict=True)
        ]

    def check_exact(self, parts: Sequence[torch.Tensor], *, name: str) -> None:
        """Check that integers are exact in the packed dtype.

        Raises:
            StrettoError: One is too large.
        """
        if not self.dtype.is_floating_point:
            return
        most = int(2 / torch.finfo(self.dtype).eps)
        for part in parts:
            if part.dtype.is_floating_point or part.dtype == torch.bool or not part.numel():
                continue
            worst = max(map(abs, map(int, part.aminmax())))
            if worst >= most:
                raise StrettoError(
                    f"the {name} has the integer {worst}; packed beside values of {self.dtype}, integers from {most} "
                    "on are not exact",
                    fix="Scale it, or convert all to float64.",
                )


def _restore(part: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    if part.dtype is dtype:
        return part
    return part != 0 if dtype == torch.bool else part.to(dtype)


@final
@dataclass(frozen=True, slots=True)
class StepSignature:
    """How a cell is called. The state that a program carries is the cell's, or (the cell's, constants, last output).

    Attributes:
        inputs: The packing of several inputs; None for one tensor.
        spreads_state: Whether the items of the state are separate arguments.
        has_constants: Whether the carried state includes constants.
        feeds_back: Whether it includes the last output. An input then comes with a boolean for each row: where it
            is false, the row is replaced by the last output.
        returns: What is returned; "auto" reads it by its structure.
    """

    inputs: Packing | None = None
    spreads_state: bool = False
    has_constants: bool = False
    feeds_back: bool = False
    returns: Returns = "auto"

    def own_state(self, state: Any) -> Any:
        """The cell's own part of the state that a program carries."""
        return state[0] if self.has_constants or self.feeds_back else state

    def carry(self, after: Any, state: Any, y: Any) -> Any:
        """The state that a program carries on, where `state` was before."""
        further = (*(state[1:2] if self.has_constants else ()), *((y,) if self.feeds_back else ()))
        return (after, *further) if further else after

    def arguments(self, x: Any, state: Any) -> tuple[Any, ...]:
        """What the cell is called with."""
        given = x if self.inputs is None else self.inputs.unpack(x)
        own, constants = self.own_state(state), state[1:2] if self.has_constants else ()
        if self.feeds_back:
            given, mask_B = given
            given = map_state(partial(select_rows, mask_B), given, state[-1])
        return (given, *children(own), *constants) if self.spreads_state else (given, own, *constants)


PLAIN: Final = StepSignature()


def call_step(
    cell: nn.Module,
    x: Any,
    state: Any,
    *,
    signature: StepSignature = PLAIN,
    tensors: Mapping[str, torch.Tensor] | None = None,
) -> tuple[Any, Any]:
    """One step of a cell: its output, which may be tensors in a structure, and the next state.

    Args:
        cell: The cell.
        x: The step's input; a row of the program, or, if the signature says nothing of several, as the cell takes it.
        state: The state before it, and its constants.
        signature: How the cell is called.
        tensors: Used in place of the cell's own parameters and buffers.

    Raises:
        StrettoError: The result is not an output and a state like the one before.
    """
    arguments = signature.arguments(x, state)
    result = cell(*arguments) if tensors is None else functional_call(cell, dict(tensors), arguments)
    before = signature.own_state(state)
    can_check = not is_jit_tracing()
    if signature.returns == "auto" and type(result) is tuple and len(result) == 2 and type(result[0]) is torch.Tensor:
        # Nearly always, and then one pass is enough.
        y, after = result
        is_known = can_check and is_alike(before, after)
    else:
        is_known = False
    if not is_known:
        y, after = _read(cell, result, before, signature.returns)
        if can_check and not is_alike(before, after):
            _refuse_state(cell, before, after)
    if can_check:
        _check_rows(cell, y, (x if isinstance(x, torch.Tensor) else flatten(x)[0]).shape[0])
    if signature.feeds_back and can_check and not is_alike(state[-1], y):
        name = cell._get_name()  # type: ignore[no-untyped-call]
        raise StrettoError(
            f"{name} returned rows of {describe_rows(y)} and takes rows of {describe_rows(state[-1])}, so its output "
            "cannot be its next input",
            fix="Return an output of the shape and dtype of x_t, or leave out teacher=.",
        )
    return y, signature.carry(after, state, y)


def call_cell(cell: nn.Module, x: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
    """The same for `cell(x, state)`, with several outputs concatenated into one tensor."""
    y, after = call_step(cell, x, state)
    return y if isinstance(y, torch.Tensor) else Packing.of(y).pack(y), after


def is_jit_tracing() -> bool:
    """Whether `torch.jit.trace` runs, which would record checks of sizes as part of the cell."""
    return torch._C._get_tracing_state() is not None


def check_outputs(cell: nn.Module, outputs: Sequence[torch.Tensor]) -> None:
    """Check that the outputs of all steps have the same shape and dtype."""
    if is_jit_tracing():
        return
    row, dtype = outputs[0].shape[1:], outputs[0].dtype
    if not all(y.dtype is dtype and y.shape[1:] == row for y in outputs):
        kinds = {f"{tuple(y.shape[1:])} {y.dtype}" for y in outputs}
        raise StrettoError(
            f"{type(cell).__name__}.forward returned outputs with rows of {' and of '.join(sorted(kinds))}",
            fix="Return outputs of the same shape and dtype at every step.",
        )


def _read(cell: nn.Module, result: Any, before: Any, returns: Returns) -> tuple[Any, Any]:
    """The output and the state in what a cell returned."""
    is_several = isinstance(result, (tuple, list))
    is_spread = is_several and isinstance(before, (tuple, list)) and len(result) == len(before) + 1
    if returns in {"auto", "state"} and _is_nested(before, result) and flatten(before):
        return _first_part(result), result
    if returns in {"auto", "output and state"} and is_several:
        if len(result) == 2 and _is_nested(before, result[1]):
            return result[0], result[1]
        if is_spread and _is_nested(before, tuple(result[1:])):
            return result[0], tuple(result[1:])
    if returns == "state and output" and is_several and len(result) == 2 and _is_nested(before, result[0]):
        return result[1], result[0]
    if returns == "auto" and is_several and len(result) == 2:
        _refuse_state(cell, before, result[1])
    wanted = "an output and the next state, or the next state alone" if returns == "auto" else f"the {returns}"
    raise StrettoError(
        f"{type(cell).__name__}.forward returned {describe(result)}, not {wanted}, where the state is "
        f"{describe(before)}",
        fix="Return (y_t, new_state) from forward, with the state nested as it was given, and several outputs in one "
        "tuple or dict y_t.",
    )


def _is_nested(one: Any, other: Any) -> bool:
    return is_alike(one, other, compares_tensors=False)


def _first_part(state: Any) -> torch.Tensor:
    while not isinstance(state, torch.Tensor):
        state = next(iter(state.values())) if isinstance(state, dict) else children(state)[0]
    return state


def _refuse_state(cell: nn.Module, before: Any, after: Any) -> NoReturn:
    was, new = describe_difference(before, after)
    raise StrettoError(
        f"{type(cell).__name__}.forward takes a state with {was} and returns one with {new}",
        fix="Return a state of the same structure, shapes and dtypes as it was given.",
    )


def _check_rows(cell: nn.Module, y: Any, num_rows: int) -> None:
    outputs = (y,) if isinstance(y, torch.Tensor) else _output_parts(cell, y)
    wrong = next((part for part in outputs if part.dim() == 0 or part.shape[0] != num_rows), None)
    if wrong is not None or not outputs:
        what = "no output" if wrong is None else f"an output of shape {tuple(wrong.shape)}"
        raise StrettoError(
            f"{type(cell).__name__}.forward returned {what}", fix="Return one output row for each row of x_t."
        )


def _output_parts(cell: nn.Module, y: Any) -> list[torch.Tensor]:
    try:
        return flatten(y)
    except StrettoError:
        raise StrettoError(
            f"{type(cell).__name__}.forward returned {describe(y)} as its output",
            fix="Return a tensor, or tensors in tuples or dicts.",
        ) from None


# --- where a state comes from ----------------------------------------------------------------------------------------


def has_initial_state(cell: Any, sizes: Any = None) -> bool:
    """Whether it is known which state a cell starts from."""
    return isinstance(cell, nn.Module) and (sizes is not None or _sizes_of(cell) is not None or _has_own(cell))


def initial_state(cell: nn.Module, batch_size: int, *, sizes: Any = None, device: torch.device | None = None) -> Any:
    """The state that a cell starts from: its own, or zeros of the sizes that are given or that it names.

    Args:
        cell: The cell.
        batch_size: Rows.
        sizes: A number of units, a `torch.Size`, or a tensor with the values of a row, or these in a structure.
        device: Where zeros are made for a cell without tensors.
    """
    if sizes is None and _has_own(cell):
        try:
            return cell.initial_state(batch_size)  # type: ignore[operator]
        except (AttributeError, TypeError, IndexError) as error:
            raise StrettoError(
                f"{type(cell).__name__}.initial_state({batch_size}) failed: {error}",
                fix="Let it take the batch size and return tensors with that many rows, or give their sizes with "
                "stretto.RNN(cell, state=...).",
            ) from error
    floating = (tensor for tensor in (*cell.parameters(), *cell.buffers()) if tensor.is_floating_point())
    like = next(floating, None)
    like = torch.zeros((), device=device) if like is None else like

    def make(size: Any) -> Any:
        if isinstance(size, torch.Tensor):
            row = size.to(like.device, like.dtype if size.is_floating_point() else size.dtype)
            return row.expand(batch_size, *row.shape)
        shape = tuple(size) if isinstance(size, torch.Size) else (check_int(size, name="state"),)
        return like.new_zeros(batch_size, *shape)

    return map_sizes(make, _sizes_of(cell) if sizes is None else sizes)


def map_sizes(change: Callable[[Any], Any], sizes: Any) -> Any:
    """`change` of every size in a structure of sizes."""
    if isinstance(sizes, torch.Size) or not isinstance(sizes, (tuple, list, dict)):
        return change(sizes)
    if isinstance(sizes, dict):
        return {key: map_sizes(change, size) for key, size in sizes.items()}
    items = [map_sizes(change, size) for size in sizes]
    return type(sizes)(*items) if hasattr(sizes, "_fields") else items if isinstance(sizes, list) else tuple(items)


def check_sizes(sizes: Any) -> None:
    """Check sizes of a state as `initial_state` takes them: each a size, in a structure of sizes."""
    map_sizes(lambda size: isinstance(size, (torch.Size, torch.Tensor)) or check_int(size, name="state"), sizes)


def _has_own(cell: nn.Module) -> bool:
    return callable(getattr(cell, "initial_state", None))


def _sizes_of(cell: nn.Module) -> Any:
    """The sizes that a cell names, as Keras' cells and torch's do."""
    named = getattr(cell, "state_size", None)
    if named is not None and not callable(named):
        return named
    if isinstance(cell, nn.RNNCellBase):
        return (cell.hidden_size,) * 2 if isinstance(cell, nn.LSTMCell) else cell.hidden_size
    return None


def check_forward(cell: nn.Module, sizes: Any) -> None:
    """Check that a cell, and its own initial_state, can be called."""
    if _binds(cell.forward, 2) or _binds(cell.forward, 3):
        pass
    elif sizes is not None or not _has_own(cell):
        spreads_state(cell, map_sizes(lambda _: torch.empty(0), _sizes_of(cell) if sizes is None else sizes), PLAIN)
    else:
        spreads_state(cell, initial_state(cell, 1), PLAIN)
    if sizes is None and _has_own(cell) and not _binds(cell.initial_state, 1):
        _refuse_call(cell, "initial_state", ["batch_size"])


def spreads_state(cell: nn.Module, state: Any, form: StepSignature) -> bool | None:
    """Whether the items of the state are separate arguments; None if a cell could be called either way.

    Raises:
        StrettoError: It can be called neither way.
    """
    own = form.own_state(state)
    further = ["constants"] * form.has_constants
    parts = len(own) if isinstance(own, (tuple, list)) else 0
    takes_one, takes_parts = (
        _binds(cell.forward, 2 + len(further)),
        parts and _binds(cell.forward, 1 + parts + len(further)),
    )
    if takes_one and (not takes_parts or _has_own(cell)):
        return False
    if takes_parts and not takes_one:
        return True
    if not takes_one:
        _refuse_call(cell, "forward", ["x_t", "state", *further])
    return None


def _binds(function: Any, count: int) -> bool:
    """Whether a function can be called with so many arguments, as far as is known."""
    try:
        inspect.signature(function).bind(*[None] * count)
    except TypeError:
        return False
    except ValueError:  # not a Python function
        return True
    return True


def _refuse_call(cell: nn.Module, name: str, given: list[str]) -> NoReturn:
    called = getattr(cell, name)
    try:
        inspect.signature(called).bind(*given)
    except TypeError as error:
        raise StrettoError(
            f"{type(cell).__name__}.{name}{inspect.signature(called)} cannot be called as {name}({', '.join(given)}): "
            f"{error}",
            fix=f"Let it take {' and '.join(given)}, and nothing else without a default; what is the same at every "
            "step comes with constants=."
            if name == "forward"
            else "Let it take batch_size, and nothing else without a default, or give stretto.RNN(cell, state=...).",
        ) from None
    raise AssertionError(name)
