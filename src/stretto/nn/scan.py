"""A loop over time steps, given as a function of one step, that runs as fast as a layer.

    state = init
    for t in range(T):                                    final_state, ys = stretto.scan(step, init, xs)
        state, y = step(state, xs[:, t])

The step is traced with the tensors that it closes over (`stretto.nn.captured`) as parameters, and compiled like a cell.
What was compiled belongs to the code of the step and to what kinds of things it reaches, so that closures made anew at
every call share it. What cannot be compiled runs as the loop above.

Shape legend: B sequences, T steps, F features of several inputs side by side, P real steps of all sequences.
"""

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any, Final, final

import torch
from torch import nn

from stretto.cells import Cell
from stretto.checks import check_bool, check_int
from stretto.errors import StrettoError
from stretto.graph import Untraceable
from stretto.kernels import Built, Program, TracedProgram, build
from stretto.nn.captured import Captured, capture, path
from stretto.nn.explanation import Explanation
from stretto.nn.guards import autocast_operands, is_looked_at, opaque, unusual_tensor, warn_of_unset, warn_once
from stretto.nn.ragged import CutBatch, PackedBatch, check_lengths, cut_at_resets, pack_batch
from stretto.nn.stack import Direction, reverse_rows, run_stack
from stretto.signature import Packing
from stretto.state import describe, flatten, is_alike, map_state, structure_of, unflatten

MAX_COMPILED: Final = 128
MAX_VARIANTS: Final = 8
"""How often the same step is compiled for other numbers or objects that it reads, before it runs as a loop."""


def scan(
    step: Callable[..., tuple[Any, Any]],
    init: Any,
    xs: Any,
    *,
    lengths: Any = None,
    resets: torch.Tensor | None = None,
    reverse: bool = False,
    constants: Any = None,
    length: int | None = None,
    batch_first: bool = True,
) -> tuple[Any, Any]:
    """Run a function of one step over sequences, compiled; the results are those of the loop in Python.

    States, inputs, outputs and constants are batches, in any structure: tuples, named tuples, lists, dicts, None. All
    of them receive gradients, and so does every tensor, parameter and module that the step closes over.

    Args:
        step: Called as `step(state, x_t)`, or `step(state, x_t, constants)` if there are some; returns the new state,
            like the one it was given, and the step's output, which may be None. Any function, method, lambda,
            `functools.partial` or module.
        init: The state before the first step, with a row per sequence.
        xs: Inputs of all steps, each (B, T, ...); None if there are none.
        lengths: Steps of each sequence; all T by default. Outputs are zero after a sequence's end.
        resets: (B, T) booleans; the state before such a step is that sequence's `init`.
        reverse: Whether to run from each sequence's own end to its beginning.
        constants: Inputs that are the same at every step, with a row per sequence.
        length: T, where there are no `xs`.
        batch_first: Whether inputs, outputs and resets are (B, T, ...), as by default, or (T, B, ...).

    Returns:
        The state after each sequence's last step, and the outputs of all steps, zero after each sequence's end.

    Examples:
        >>> decay = torch.tensor(0.9, requires_grad=True)
        >>> step = lambda level, x: (decay * level + x, level.tanh())
        >>> level, ys = stretto.scan(step, torch.zeros(4, 8), torch.randn(4, 100, 8))
        >>> ys.shape
        torch.Size([4, 100, 8])
    """
    call = _Call.of(
        step,
        init,
        xs,
        lengths=lengths,
        resets=resets,
        reverse=reverse,
        constants=constants,
        length=length,
        batch_first=batch_first,
    )
    if torch.compiler.is_compiling() and torch.compiler.is_exporting():
        return _loop(call)
    return _run(call)


def explain_scan(step: Callable[..., tuple[Any, Any]], init: Any, xs: Any, **options: Any) -> Explanation:
    """What `scan` with these arguments runs by, why, and what is computed where."""
    call = _Call.of(step, init, xs, **options)
    found = capture(step)
    name = _name(step)
    operands = _operands(call, found)
    if operands is not None:
        call = call.in_single_precision()
    reason = is_looked_at(call.device) or _why_loop(call, found)
    return Explanation.of((_as_loop(reason) if reason else _compiled(call, found, operands)).built, name)


@final
@dataclasses.dataclass(slots=True, kw_only=True)
class _Call:
    """Arguments of a scan, checked; inputs and resets are (T, B, ...)."""

    step: Callable[..., tuple[Any, Any]]
    init: Any
    xs: Any
    constants: Any
    init_parts: list[torch.Tensor]
    x_parts: list[torch.Tensor]
    constant_parts: list[torch.Tensor]
    lengths: Any
    resets_TB: torch.Tensor | None
    reverse: bool
    batch_first: bool
    num_rows: int
    num_steps: int

    @property
    def device(self) -> torch.device:
        """Of its tensors."""
        return next(self.tensors()).device

    @classmethod
    def of(
        cls,
        step: Callable[..., tuple[Any, Any]],
        init: Any,
        xs: Any,
        *,
        lengths: Any = None,
        resets: torch.Tensor | None = None,
        reverse: bool = False,
        constants: Any = None,
        length: int | None = None,
        batch_first: bool = True,
    ) -> "_Call":
        """What is given, or an error that says what does not fit."""
        _check_step(step)
        check_bool(reverse, name="reverse")
        check_bool(batch_first, name="batch_first")
        init_parts = _tensors(init, "init")
        x_parts = _tensors(xs, "xs")
        constant_parts = _tensors(constants, "constants")
        steps_dim = 1 if batch_first else 0
        for part in x_parts:
            if part.dim() < 2:
                raise StrettoError(
                    f"an input of the scan has the shape {tuple(part.shape)}",
                    fix="Give inputs as (batch, steps, ...): a single sequence is a batch of one, x[None], and one "
                    "number per step x[..., None] or (batch, steps).",
                )
        if x_parts:
            num_steps, num_rows = x_parts[0].shape[steps_dim], x_parts[0].shape[1 - steps_dim]
            wrong = next((part for part in x_parts if part.shape[:2] != x_parts[0].shape[:2]), None)
            if wrong is not None:
                raise StrettoError(
                    f"inputs of the scan have {tuple(x_parts[0].shape[:2])} and {tuple(wrong.shape[:2])} "
                    f"{'sequences and steps' if batch_first else 'steps and sequences'}",
                    fix="Give all inputs with the same batch and the same steps; what is the same at every step is "
                    "for constants=.",
                )
            if length is not None and length != num_steps:
                raise StrettoError(
                    f"length={length} was given with inputs of {num_steps} steps", fix="Leave length= to the inputs."
                )
        else:
            if length is None:
                raise StrettoError("the scan has neither inputs nor a length", fix="Give xs, or length= with xs=None.")
            num_steps = check_int(length, name="length", at_least=0)
            rows = next((part.shape[0] for part in (*init_parts, *constant_parts) if part.dim()), None)
            if rows is None:
                raise StrettoError("the scan has no tensors", fix="Give init, with a row for each sequence.")
            num_rows = rows
        for name, parts, fix in (
            (
                "init",
                init_parts,
                "Give every tensor of the state a row for each sequence, h.expand(batch_size, -1), and inputs as "
                + ("(batch, steps, ...), or set batch_first=False." if batch_first else "(steps, batch, ...)."),
            ),
            ("constants", constant_parts, "Give each a row for each sequence, or let the step close over it."),
        ):
            lone = next((part for part in parts if part.dim() == 0 or part.shape[0] != num_rows), None)
            if lone is not None:
                raise StrettoError(
                    f"a tensor of {name} has the shape {tuple(lone.shape)} and the batch has {num_rows} sequences",
                    fix=fix if x_parts or name == "init" else f"{fix} There are as many as init has rows.",
                )
        if resets is not None:
            shape = (num_rows, num_steps) if batch_first else (num_steps, num_rows)
            if not isinstance(resets, torch.Tensor) or resets.shape != shape or resets.dtype != torch.bool:
                kind = f"{tuple(resets.shape)} {resets.dtype}" if isinstance(resets, torch.Tensor) else type(resets)
                raise StrettoError(
                    f"resets are {kind} and the batch is {shape}",
                    fix=f"Give a boolean tensor of the shape {shape}, done.bool(): True where a step starts from init.",
                )
        return cls(
            step=step,
            init=init,
            xs=xs,
            constants=constants,
            init_parts=init_parts,
            x_parts=[part.transpose(0, 1) for part in x_parts] if batch_first else x_parts,
            constant_parts=constant_parts,
            lengths=lengths,
            resets_TB=resets.T if resets is not None and batch_first else resets,
            reverse=reverse,
            batch_first=batch_first,
            num_rows=num_rows,
            num_steps=num_steps,
        )

    def tensors(self) -> Iterator[torch.Tensor]:
        """All that were given."""
        yield from self.init_parts
        yield from self.x_parts
        yield from self.constant_parts

    def in_single_precision(self) -> "_Call":
        """With what autocast has made narrow as wide as the weights: only products round it again."""

        def wide(part: torch.Tensor) -> torch.Tensor:
            return part.float() if part.dtype in {torch.bfloat16, torch.float16} else part

        init, constants = map_state(wide, self.init), map_state(wide, self.constants)
        return dataclasses.replace(
            self,
            init=init,
            constants=constants,
            init_parts=flatten(init),
            x_parts=[wide(part) for part in self.x_parts],
            constant_parts=flatten(constants),
        )

    def run_step(self, state: Any, x: Any, constants: Any) -> tuple[Any, Any]:
        """The new state and the output of one step, or an error that says what is wrong with them."""
        return _checked(self.step, self.step(state, x) if constants is None else self.step(state, x, constants), state)


def _check_step(step: Any) -> None:
    if isinstance(step, (nn.RNNCellBase, nn.RNNBase, Cell)):
        name = type(step).__name__
        raise StrettoError(
            f"{name} takes its input first and then its state, and scan calls step(state, x_t)",
            fix=f"Give a function that calls it and returns (state, y_t), or the {name} to stretto.RNN.",
        )
    if not callable(step):
        raise StrettoError(f"the step is {step!r}", fix="Give a function or module that is called as step(state, x_t).")


def _tensors(tree: Any, name: str) -> list[torch.Tensor]:
    try:
        parts = flatten(tree)
    except StrettoError:
        raise StrettoError(
            f"{name} of the scan is {describe(tree)}",
            fix="Give tensors, in tuples, lists, dicts, named tuples or classes registered with "
            "torch.utils._pytree.register_dataclass; let the step close over other things.",
        ) from None
    sparse = next((part.layout for part in parts if part.layout not in {torch.strided, torch.jagged}), None)
    if sparse is not None:
        raise StrettoError(f"{name} of the scan has a tensor of layout {sparse}", fix="Make it dense: to_dense().")
    return parts


def _name(step: Any) -> str:
    while isinstance(step, partial):
        step = step.func
    return str(getattr(step, "__name__", type(step).__name__))


def _checked(step: Any, result: Any, before: Any) -> tuple[Any, Any]:
    if not isinstance(result, (tuple, list)) or len(result) != 2:
        raise StrettoError(
            f"{_name(step)} returned {describe(result)}, not the new state and an output",
            fix="Return (new_state, y_t) from the step; y_t may be None.",
        )
    after, y = result
    if not is_alike(before, after):
        was, new = describe(before), describe(after)
        if was == new:
            was, new = (
                ", ".join(f"rows of {tuple(part.shape[1:])} {part.dtype}" for part in flatten(state))
                for state in (before, after)
            )
        fix = "Return a state of the structure, shapes and dtypes of init, or make init like what the step returns."
        if is_alike(before, y):
            fix += (
                " If the two are the wrong way round, return (new_state, y_t), the state first: the order of torch's "
                "and JAX's scan."
            )
        raise StrettoError(f"{_name(step)} was given a state of {was} and returned one of {new}", fix=fix)
    return after, y


# --- step by step ----------------------------------------------------------------------------------------------------


def _loop(call: _Call) -> tuple[Any, Any]:
    """The loop in Python, by operators alone, whatever a transform or a tracer makes of them."""
    x_parts, resets_TB, real_TB, index_TB = call.x_parts, call.resets_TB, None, None
    rows_B = torch.arange(call.num_rows, device=next(call.tensors()).device) if call.num_rows else None
    if call.lengths is not None and call.num_steps:
        lengths_B = torch.as_tensor(call.lengths, device=None if rows_B is None else rows_B.device)
        steps_T1 = torch.arange(call.num_steps, device=lengths_B.device)[:, None]
        real_TB = steps_T1 < lengths_B
        if call.reverse:
            index_TB = torch.where(real_TB, lengths_B - 1 - steps_T1, steps_T1)
    if call.reverse:
        x_parts = [_back_to_front(part, index_TB) for part in x_parts]
        resets_TB = None if resets_TB is None else _back_to_front(resets_TB, index_TB)
    if real_TB is not None:
        # Padding may hold anything, and NaN times a gradient of zero is NaN.
        x_parts = [part.masked_fill(~_beside(real_TB, part), 0) for part in x_parts]
        resets_TB = None if resets_TB is None else resets_TB & real_TB
    state = call.init
    outputs: list[Any] = []
    for number in range(call.num_steps):
        if resets_TB is not None:
            state = map_state(partial(_choose, resets_TB[number]), call.init, state)
        x = unflatten(call.xs, [part[number] for part in x_parts])
        after, y = call.run_step(state, x, call.constants)
        parts = _output_parts(call, y, num_rows=call.num_rows)
        if real_TB is not None:
            real_B = real_TB[number]
            after = map_state(partial(_choose, real_B), after, state)
            y = unflatten(y, [_choose(real_B, part, torch.zeros_like(part)) for part in parts])
        if outputs and not is_alike(outputs[0], y):
            raise StrettoError(
                f"{_name(call.step)} returned outputs that differ from step to step: {describe(outputs[0])} and "
                f"{describe(y)}",
                fix="Return outputs of the same structure, shapes and dtypes at every step.",
            )
        outputs.append(y)
        state = after
    if not outputs:
        with torch.no_grad():
            x = unflatten(call.xs, [part.new_zeros(part.shape[1:]) for part in x_parts])
            _, y = call.run_step(state, x, call.constants)
            parts = _output_parts(call, y, num_rows=call.num_rows)
        dim = 1 if call.batch_first else 0
        return state, unflatten(y, [part.unsqueeze(dim).narrow(dim, 0, 0) for part in parts])
    ys = [torch.stack(parts) for parts in zip(*map(flatten, outputs), strict=True)]
    if call.reverse:
        ys = [_back_to_front(part, index_TB) for part in ys]
    return state, unflatten(outputs[0], [part.transpose(0, 1) if call.batch_first else part for part in ys])


def _output_parts(call: _Call, y: Any, *, num_rows: int) -> list[torch.Tensor]:
    parts = _tensors(y, f"an output of the step {_name(call.step)}")
    for part in parts:
        if part.dim() == 0 or part.shape[0] != num_rows:
            raise StrettoError(
                f"{_name(call.step)} returned an output of shape {tuple(part.shape)} for {num_rows} sequences",
                fix="Return outputs with a row for each sequence, and reduce over them after the scan.",
            )
    return parts


def _back_to_front(part_TB: torch.Tensor, index_TB: torch.Tensor | None) -> torch.Tensor:
    """Steps in reverse, each sequence from its own end."""
    return part_TB.flip(0) if index_TB is None else part_TB.gather(0, _beside(index_TB, part_TB).expand_as(part_TB))


def _beside(given: torch.Tensor, part: torch.Tensor) -> torch.Tensor:
    return given.reshape(*given.shape, *[1] * (part.dim() - given.dim()))


def _choose(chosen_B: torch.Tensor, new: torch.Tensor, old: torch.Tensor) -> torch.Tensor:
    return torch.where(_beside(chosen_B, new), new, old)


# --- compiled --------------------------------------------------------------------------------------------------------


@opaque
def _run(call: _Call) -> tuple[Any, Any]:
    if watcher := is_looked_at(call.device):
        if torch.is_autocast_enabled("cpu"):
            warn_once(f"{_name(call.step)} runs step by step in Python: {watcher}. Call scan with it disabled.")
        return _loop(call)
    lengths = call.lengths
    if lengths is not None:
        call.lengths = check_lengths(lengths, call.num_rows, call.num_steps)
    found = capture(call.step)
    reason = _why_loop(call, found)
    if not reason:
        operands = _operands(call, found)
        wide = call if operands is None else call.in_single_precision()
        with nullcontext() if operands is None else torch.autocast(call.device.type, enabled=False):
            compiled = _compiled(wide, found, operands)
            if compiled.program is not None:
                return compiled.run(wide, found, compiled.program)
        reason = compiled.built.reason
    result = _loop(call)
    warn_once(
        f"{_name(call.step)} runs step by step in Python, not compiled: {reason}. stretto.explain(step, init, xs) says "
        "more, and `stretto doctor` what this machine lacks."
    )
    return result


def _operands(call: _Call, found: Captured) -> torch.dtype | None:
    """What products round their operands to, if anything that the step reads is wider."""
    given = (*found.tensors, *call.tensors())
    own = torch.float32 if any(tensor.dtype is torch.float32 for tensor in given) else None
    return autocast_operands(call.device, own)


def _why_loop(call: _Call, found: Captured) -> str:
    """Why this call cannot run compiled; empty if it can."""
    kinds = {part.dtype for part in call.x_parts if part.is_floating_point()}
    if len(kinds) > 1:
        return "the inputs are of several floating dtypes"
    return (
        found.problem
        or unusual_tensor((*call.tensors(), *found.tensors))
        or next((f"a tensor is on {t.device}" for t in call.tensors() if t.device.type == "meta"), "")
    )


@final
class _OneStep(nn.Module):
    """The step as a cell: one input and one output, several of them side by side, and a state that is a flat tuple.

    Constants are parts of the state that stay as they are, which programs read once for each row.
    """

    def __init__(self, call: _Call, tensors: dict[str, torch.Tensor]) -> None:
        super().__init__()
        self._buffers.update(tensors)
        self.call: _Call | None = call
        self.inputs = _packing(call)
        self.outputs: Packing | None = None
        self.y: Any = None
        self.assume_checks_pass = False

    def forward(
        self, x: torch.Tensor, state: tuple[torch.Tensor, ...]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]]:
        """One step."""
        call = self.call
        assert call is not None
        if self.inputs is not None:
            given = unflatten(call.xs, self.inputs.unpack_parts(x))
        else:
            given = unflatten(call.xs, [x] if call.x_parts else [])
        count = len(call.init_parts)
        constants = None if call.constants is None else unflatten(call.constants, state[count:])
        try:
            after, y = call.run_step(unflatten(call.init, state[:count]), given, constants)
            parts = _output_parts(call, y, num_rows=x.shape[0])
            self.outputs = Packing.of(tuple(parts)) if len(parts) > 1 else None
        except StrettoError as error:  # it comes again, with the rows of the batch, when the step runs as it is
            raise Untraceable(error.problem) from None
        self.y = unflatten(y, [torch.empty(0)] * len(parts))
        parts = parts if self.outputs is None else [self.outputs.pack(parts)]
        return parts[0] if parts else x.new_zeros(x.shape[0], 1), (*flatten(after), *state[count:])

    def forget(self) -> None:
        """Hold nothing of the user's."""
        self.call = None
        self._buffers.clear()


def _packing(call: _Call) -> Packing | None:
    return Packing.of(tuple(call.x_parts), num_lead=2) if len(call.x_parts) > 1 else None


@final
@dataclasses.dataclass(slots=True)
class _Compiled:
    """What a step was compiled to; without a program it runs as a loop.

    Attributes:
        built: By which backend, and why.
        program: What runs it.
        names: Of the captured tensors.
        inputs: How several inputs lie side by side; None for one or none.
        outputs: How several outputs lie side by side; None for one or none.
        y: The structure of the outputs.
    """

    built: Built
    program: Program | None
    names: list[str]
    inputs: Packing | None
    outputs: Packing | None
    y: Any

    def run(self, call: _Call, found: Captured, program: Program) -> tuple[Any, Any]:
        """All steps of a call."""
        parts = call.x_parts or [call.init_parts[0].new_zeros(1, 1, 1).expand(call.num_steps, call.num_rows, 1)]
        packed = pack_batch(parts[0], call.lengths, batch_first=False)
        layout, x_PF = packed.layout, packed.x_PF
        if self.inputs is not None:
            rows = [x_PF, *(packed.rows_of(part) for part in parts[1:])]
            self.inputs.check_exact(rows, name="input")
            x_PF = self.inputs.pack(rows)
        states = packed.sort_rows([*call.init_parts, *call.constant_parts])
        segments = _cut(call, packed)
        if segments is not None:
            layout, x_PF = segments.layout, segments.cut(x_PF)
            states = segments.start_states(states, states, reverse=call.reverse)
        x_PF = reverse_rows(layout, x_PF) if call.reverse else x_PF
        direction = Direction(program, dict(zip(self.names, found.tensors, strict=True)), states)
        # Other outputs are rearranged, or there are several, or none.
        is_plain = segments is None and not call.reverse and self.outputs is None and len(flatten(self.y)) == 1
        result = run_stack([[direction]], layout, x_PF, shown=packed.shown if is_plain else "")
        y_PF = reverse_rows(layout, result.y_PF) if call.reverse else result.y_PF
        final = result.states[0][: len(call.init_parts)]
        if segments is not None:
            y_PF, final = segments.join(y_PF), segments.end_states(final, reverse=call.reverse)
        final = packed.restore_rows(final)
        if is_plain and packed.shown:
            steps: list[Any] = [packed.unpack_shown(y_PF)]
            ys = [y.transpose_(0, 1) if call.batch_first else y for y in steps]
            return unflatten(call.init, final), unflatten(self.y, ys)
        outputs = [y_PF] if self.outputs is None else self.outputs.unpack_parts(y_PF)
        if self.outputs is not None:
            self.outputs.check_exact(outputs, name="output")
        steps = [packed.unpack_copied(part) for part in outputs[: len(flatten(self.y))]]
        turn = torch.Tensor.transpose_ if packed.shown else torch.Tensor.transpose  # views are not changed in place
        ys = [turn(part, 0, 1) if call.batch_first else part for part in steps]
        return unflatten(call.init, final), unflatten(self.y, ys)


def _cut(call: _Call, packed: PackedBatch) -> CutBatch | None:
    """The segments between resets; None without any. Read from its end, a segment ends with its reset."""
    resets_TB = call.resets_TB
    if resets_TB is None or not call.num_steps:
        return None
    if call.reverse:
        resets_TB = torch.cat([torch.zeros_like(resets_TB[:1]), resets_TB[:-1]])
    return cut_at_resets(packed, resets_TB, batch_first=False)


_COMPILED: Final["OrderedDict[Any, _Compiled]"] = OrderedDict()
_VARIANTS: Final["OrderedDict[Any, tuple[int, tuple[Any, ...]]]"] = OrderedDict()
_LOCK: Final = threading.Lock()


def _compiled(call: _Call, found: Captured, operands: torch.dtype | None = None) -> _Compiled:
    """What the step was compiled to when something like it was called; compiled now if there was none."""
    shapes = tuple((part.shape[1:], part.dtype, part.device) for part in (*call.init_parts, *call.constant_parts))
    inputs = tuple((part.shape[2:], part.dtype, part.device) for part in call.x_parts)
    form = (structure_of(call.init), structure_of(call.xs), structure_of(call.constants), shapes, inputs, operands)
    key = (found.marks, form)
    compiled = _COMPILED.get(key)
    if compiled is None:
        changing = _too_many_variants(found, form)
        if changing:
            return _as_loop(
                f"it was compiled {MAX_VARIANTS} times for other values of {changing}, and each takes time: make it a "
                "tensor, or give it by xs or constants"
            )
        compiled = _compile(call, found, operands)
    with _LOCK:
        _COMPILED[key] = compiled
        _COMPILED.move_to_end(key)
        while len(_COMPILED) > MAX_COMPILED:
            _COMPILED.popitem(last=False)
    return compiled


def _too_many_variants(found: Captured, form: Any) -> str:
    """What changes, for which the same step was compiled again and again; empty if that is not so."""
    alike = list(found.marks)
    for index, _ in found.changeable:
        alike[index] = None
    key = (tuple(alike), form)
    with _LOCK:
        count, before = _VARIANTS.pop(key, (0, found.marks))
        changing = [".".join(path(where)) for index, where in found.changeable if before[index] != found.marks[index]]
        is_over = count >= MAX_VARIANTS and bool(changing)
        _VARIANTS[key] = (count, before) if is_over else (count + (not count or bool(changing)), found.marks)
        while len(_VARIANTS) > MAX_COMPILED:
            _VARIANTS.popitem(last=False)
    return " and ".join(changing) if is_over else ""


def _compile(call: _Call, found: Captured, operands: torch.dtype | None) -> _Compiled:
    """Trace and compile a step; what it changes besides, when it is called for that, is undone."""
    names = found.names()
    cell = _OneStep(call, dict(zip(names, found.tensors, strict=True)))
    cell.assume_checks_pass = found.assumes_checks
    x_shape: tuple[int, ...] = (1,)
    x_dtype = call.init_parts[0].dtype if call.init_parts else torch.get_default_dtype()
    if cell.inputs is not None:
        x_shape, x_dtype = (sum(cell.inputs.widths),), cell.inputs.dtype
    elif call.x_parts:
        x_shape, x_dtype = tuple(call.x_parts[0].shape[2:]), call.x_parts[0].dtype
    state = (*call.init_parts, *call.constant_parts)
    with _unwritten(found) as change:
        built = build(cell, x_shape=x_shape, x_dtype=x_dtype, state=state, holders=found.holders, operands=operands)
        outside = [] if built.plan is None else built.plan.graph.outside
        again = capture(call.step)
        if again.marks != found.marks or any(a is not b for a, b in zip(again.tensors, found.tensors, strict=False)):
            change.append("the step changes what it closes over")
    reason = ""
    if change:
        reason = f"{change[0]}, which has to happen at every step: return it as a part of the state"
    elif outside:
        shapes = " and ".join(str(tuple(tensor.shape)) for tensor in outside)
        reason = (
            f"the step reads tensors of {shapes} that were not found among what it closes over: give them by xs or "
            "constants, or let it close over them"
        )
    elif built.plan is None:
        reason = built.reason + _hint(call, found)
    cell.forget()
    if reason or not isinstance(built.program, TracedProgram):
        return _as_loop(reason or built.reason)
    warn_of_unset(_name(call.step), built.unset)
    return _Compiled(built, built.program, names, cell.inputs, cell.outputs, cell.y)


def _hint(call: _Call, found: Captured) -> str:
    """What is probably wrong with a step that cannot be traced for another number of rows."""
    like_rows = [
        ".".join(path(place))
        for tensor, place in zip(found.tensors, found.places, strict=True)
        if tensor.dim() > 1 and tensor.shape[0] == call.num_rows > 1 and not isinstance(tensor, nn.Parameter)
    ]
    if not like_rows:
        return ""
    return (
        f" ({' and '.join(like_rows)} {'has' if len(like_rows) == 1 else 'have'} a row for each of the {call.num_rows} "
        "sequences: give what belongs to sequences by constants, step(state, x_t, constants))"
    )


@contextmanager
def _unwritten(found: Captured) -> Iterator[list[str]]:
    """Undo what is written inside to tensors that a step closes over; yields a list of what that was."""
    tensors = [(tensor, tensor.detach().clone()) for tensor in found.tensors]
    changes: list[str] = []
    try:
        yield changes
    finally:
        for tensor, value in tensors:
            if not torch.equal(tensor.nan_to_num(), value.nan_to_num()):
                changes.append(f"the step writes into a tensor of {tuple(tensor.shape)} that it closes over")
                with torch.no_grad():
                    tensor.copy_(value)


def _as_loop(reason: str) -> _Compiled:
    """What stands for a step that runs as a loop."""
    built = build(nn.Identity(), x_shape=(1,), x_dtype=torch.float32, state=(), backend="torch")
    choices = tuple((name, why if name == built.backend else reason) for name, why in built.choices)
    return _Compiled(dataclasses.replace(built, choices=choices), None, [], None, None, None)
