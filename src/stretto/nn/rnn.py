"""A recurrent layer of any cell.

Shape legend: B sequences, T steps, F features of the input, O of the output, P real steps of all sequences.
"""

import contextlib
import copy
import uuid
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final, Literal, NamedTuple, NoReturn, final, get_args

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from stretto.cells import cell_from, step_of_torch
from stretto.checks import check_bool, check_choice, check_float, check_int
from stretto.errors import StrettoError
from stretto.graph import holders_of
from stretto.kernels import (
    Backend,
    Built,
    LayerCall,
    Layout,
    Program,
    SaveChoice,
    Shown,
    TracedProgram,
    backend_names,
    build,
    loop_over_steps,
    parameter_names,
    register_programs,
    repeats,
    run_together,
    unseen_by_hooks,
)
from stretto.nn.auto import SolverAutotuner
from stretto.nn.captured import capture
from stretto.nn.compiled import evaluated, operators_are_usable, run_layers
from stretto.nn.explanation import Explanation
from stretto.nn.guards import autocast_operands, is_looked_at, opaque, unusual_tensor, warn_of_unset, warn_once
from stretto.nn.ragged import PackedBatch, cut_at_resets, is_one_input, pack_inputs, values_of
from stretto.nn.stack import Direction, SolverCall, StackResult, assemble, run_stack
from stretto.signature import (
    PLAIN,
    Packing,
    Returns,
    StepSignature,
    call_cell,
    call_step,
    check_forward,
    check_sizes,
    has_initial_state,
    initial_state,
    spreads_state,
)
from stretto.solvers import AbstractSolver, CellVariants, Solution
from stretto.state import describe, flatten, map_state, structure_of, unflatten

TORCH_CELLS = (nn.RNNCell, nn.GRUCell, nn.LSTMCell)
MAX_LAYERS: Final = 10_000
_VALUES: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type)
_FUNCTIONS: Final = (FunctionType, BuiltinFunctionType, MethodType)
_CALLABLES: Final = (FunctionType, MethodType, partial)
_LIBRARIES: Final = frozenset({"stretto", "torch"})
_MODULE_ATTRIBUTES: Final = frozenset(nn.Module().__dict__) - {"training"}
MAX_VARIANTS: Final = 8
"""Programs made in a row because something that a cell reads has changed, before that is told."""
MAX_BUILT: Final = 64
"""Programs that a layer keeps: those of cells whose settings change at every call would fill the memory."""


@final
class RNN(nn.Module):
    """Runs any cell over sequences, compiled to a fused kernel.

    One step of the cell is traced at the first batch. Whatever does not depend on the state leaves the time loop, the
    rest is compiled, and weight gradients are computed after the loop; see `explain`. Padding costs nothing. Results
    are those of calling the cell at every step.

    Args:
        cell: A `stretto.Cell`, one of torch's cells, any other module that does a step, or a list of them: one for each
            layer and direction, in the order of torch's states (layer 0 forward, layer 0 backward, layer 1 forward,
            ...). Its forward takes `(x_t, state)`, or the parts of the state as arguments of their own, and returns the
            new state, or an output and the new state.
        num_layers: Layers. Those above the first are copies of the cell with parameters of their own.
        bidirectional: Whether each layer also reads backwards, from each sequence's own end.
        batch_first: Whether batches are (B, T, F), as by default, or (T, B, F).
        dropout: Fraction of each layer's outputs, except the last's, dropped in training.
        backend: "auto" runs generated code where possible; "cpp" and "triton" require it, for the CPU and for GPUs;
            "cudagraph" replays the loops' operators on a GPU; "eager" runs them one by one; "torch" calls the cell
            itself at each step.
        save: What is stored for the backward pass: "auto" stores what is costly to compute again; "states" stores
            outputs and states at intervals, and computes the rest again: long sequences in little memory.
        solver: How to run through time. "serial": sequentially; "auto": measures whether solving chunks of time at once
            is faster, and uses what is; or a solver, such as `stretto.Shooting`. See also `rnn.solution`.
        state: What the cell's state is, if it has no `initial_state(batch_size)`: a number of units, a `torch.Size`, or
            a tensor with the values of a row, or several of these in tuples, dicts or named tuples. It starts with
            zeros, of the dtype of the parameters.
        returns: What the cell returns. "auto" reads it by its structure: what is nested like the state is the state,
            and its first part the output; a pair with such a state is an output and the state. "state and output" is
            for cells that return a pair in that order.

    Examples:
        >>> rnn = stretto.RNN(stretto.cells.GRU(8, 32), num_layers=2)
        >>> y, state = rnn(torch.randn(4, 100, 8), lengths=[100, 70, 33, 5])
        >>> y.shape
        torch.Size([4, 100, 32])
    """

    def __init__(
        self,
        cell: nn.Module | Sequence[nn.Module],
        num_layers: int = 1,
        bidirectional: bool = False,
        *,
        batch_first: bool = True,
        dropout: float = 0.0,
        backend: Backend = "auto",
        save: SaveChoice = "auto",
        solver: AbstractSolver | Literal["serial", "auto"] = "serial",
        state: Any = None,
        returns: Returns = "auto",
    ) -> None:
        super().__init__()
        _check(num_layers, dropout, backend, save, solver)
        self.num_layers = num_layers
        self.bidirectional = check_bool(bidirectional, name="bidirectional")
        self.batch_first = check_bool(batch_first, name="batch_first")
        self.dropout = dropout
        self.backend = backend
        self.save = save
        self.solver = solver
        if state is not None:
            check_sizes(state)
        self.state_sizes = state
        check_choice(returns, name="returns", choices=get_args(Returns))
        self.returns: Returns = returns
        self.cells = nn.ModuleList(_make_cells(cell, num_layers, 2 if bidirectional else 1, sizes=state))
        self._built: dict[Any, Built] = {}
        self._held: dict[int, dict[str, nn.Module]] = {}
        self._autotuner = SolverAutotuner()
        self._in_graphs: dict[Any, _InGraph] = {}
        self._spreads: dict[int, bool] = {}
        self._unlisted: dict[int, tuple[Built, bool]] = {}
        self._variants_of: dict[Any, tuple[int, Built | None]] = {}
        self.solutions: tuple[Solution, ...] = ()

    def __prepare_scriptable__(self) -> NoReturn:
        """Called by `torch.jit.script`, also for a module around this one; TorchScript cannot take every cell."""
        raise StrettoError(
            "torch.jit.script was given a model with a stretto.RNN, which TorchScript cannot take",
            fix="Use `stretto export MODULE:NAME --to torch`, onnx or c instead; or torch's own layer, such as nn.GRU.",
        )

    @property
    def solution(self) -> Solution:
        """How the last call went: of several layers and directions, that with the largest residual."""
        if not self.solutions:
            return Solution(solver="serial")
        return max(self.solutions, key=lambda solution: (solution.residual, solution.fell_back, solution.iterations))

    def forward(
        self,
        x: Any,
        state: Any = None,
        lengths: Any = None,
        *,
        constants: Any = None,
        resets: Any = None,
        teacher: torch.Tensor | None = None,
        sample_ids: Sequence[int] | torch.Tensor | None = None,
    ) -> tuple[Any, Any]:
        """Run all sequences.

        Args:
            x: (B, T, F), or (T, B, F) unless `batch_first`; a single sequence (T, F); integers (B, T), such as tokens;
                a PackedSequence; or a nested tensor with `layout=torch.jagged`. Several inputs are padded batches in a
                tuple, dict or named tuple; the cell receives them in the same structure.
            state: The state before the first step, in the form in which it is returned; by default the cells' own.
            lengths: Steps of each sequence, in any order; all T by default.
            constants: Inputs that are the same at every step: a tensor with a row per sequence, or several in a tuple
                or dict. Cells receive them as their third argument.
            resets: Booleans, (B, T) or (T, B) like the input, or packed like it. Where true, the state is reset to the
                cell's initial state before the step, for example after the end of an episode or between documents in
                one row. The backward direction starts at the last step before each reset.
            teacher: Booleans, (B, T) or (T, B) like the input. Where false, a step's input is the last layer's output
                of the previous step instead of `x`, as in scheduled sampling and closed loops. The first step of a
                sequence, and the first after a reset, always read `x`.
            sample_ids: An integer per sequence, by which a solver recognises it in later calls.

        Returns:
            Outputs of the same kind as `x`, in the structure in which the cell returns them, zero after each sequence's
            end, and the state after each sequence's last step. For one layer of one direction that is the cell's state;
            otherwise a tuple with one for each layer and direction, in the order of torch's.
        """
        if isinstance(x, torch.Tensor) and x.dim() == 2 and not x.is_nested and x.is_floating_point():
            dim = 0 if self.batch_first else 1
            state = None if state is None else map_state(lambda part: part.unsqueeze(0), state)
            constants = None if constants is None else map_state(lambda part: part.unsqueeze(0), constants)
            resets = resets.unsqueeze(dim) if isinstance(resets, torch.Tensor) else resets
            teacher = teacher.unsqueeze(dim) if isinstance(teacher, torch.Tensor) else teacher
            x, further = x.unsqueeze(dim), {"constants": constants, "resets": resets, "teacher": teacher}
            y, after = self.forward(x, state, lengths, **further, sample_ids=sample_ids)
            return map_state(lambda part: part.squeeze(dim), y), map_state(lambda part: part.squeeze(0), after)
        if teacher is not None:
            return self._feed_back(x, state, lengths, constants, resets, teacher)
        if torch.compiler.is_compiling():
            if torch.compiler.is_exporting():
                return self._loop_over_steps(x, state, lengths, constants, resets)
            is_padded = isinstance(x, torch.Tensor) and not x.is_nested and x.dim() > 2 and x.numel()
            if is_padded and lengths is None and constants is None and resets is None:
                size = getattr(self.cells[0], "input_size", None)
                # A size that is compared with a number is no symbol any more, and one that is not remains one.
                features = (size,) if x.dim() == 3 and x.shape[2] == size else tuple(x.shape[2:])
                names = _operator_names(self, features, x.dtype, x.device.type)
                if names is not None and sample_ids is None and operators_are_usable():
                    return self._run_in_graph(x, state, *names)
        return self._call(x, state, lengths, constants, resets, sample_ids)

    def step(self, x_t: Any, state: Any = None, *, constants: Any = None) -> tuple[Any, Any]:
        """Compute one step of all layers, for rollouts and streams: the results of `forward`, in less time.

        Args:
            x_t: (B, F), or (F) of a single sequence, or several inputs (B, ...) in a tuple, dict or named tuple.
            state: The state before the step, as it is returned; by default the cells' own.
            constants: Inputs that are the same at every step.

        Returns:
            The output (B, ...) and the state after the step.

        Raises:
            StrettoError: The layer is bidirectional.
        """
        if self.bidirectional:
            raise StrettoError(
                "a bidirectional layer has no single step: its backward direction begins at a sequence's end",
                fix="Give whole sequences to the layer, or make it with bidirectional=False.",
            )
        if isinstance(x_t, torch.Tensor):
            if x_t.dim() == 1:
                given = [
                    None if one is None else map_state(lambda t: t.unsqueeze(0), one) for one in (state, constants)
                ]
                y, after = self.step(x_t.unsqueeze(0), given[0], constants=given[1])
                return y.squeeze(0), map_state(lambda part: part.squeeze(0), after)
            kind = x_t.device.type
        else:
            kind = values_of(map_state(lambda part: part.unsqueeze(1), x_t)).device.type
        if not (kind != "meta" and torch.is_autocast_enabled(kind)):
            try:
                return self._step_once(x_t, state, constants)
            except StrettoError:
                raise
            except Exception as error:
                if torch.compiler.is_compiling():
                    raise
                del error
        dim = 1 if self.batch_first else 0
        y, after = self.forward(map_state(lambda part: part.unsqueeze(dim), x_t), state, constants=constants)
        return map_state(lambda part: part.squeeze(dim), y), after

    @opaque
    def _feed_back(  # noqa: PLR0917 - the arguments of forward
        self, x: Any, state: Any, lengths: Any, constants: Any, resets: Any, teacher: Any
    ) -> tuple[Any, Any]:
        """All layers as one step, whose output is its next input where nobody teaches it."""
        if self.bidirectional or self.solver != "serial" or _has_own_lengths(x):
            raise StrettoError(
                "teacher= is for padded batches, layers of one direction and solver='serial'",
                fix="Give a padded batch and lengths=, or leave out teacher=.",
            )
        data, time = values_of(x), 1 if self.batch_first else 0
        if not isinstance(teacher, torch.Tensor) or teacher.dtype != torch.bool or teacher.shape != data.shape[:2]:
            kind = f"{tuple(teacher.shape)} of {teacher.dtype}" if isinstance(teacher, torch.Tensor) else repr(teacher)
            raise StrettoError(
                f"teacher is {kind} and the input {tuple(data.shape)}",
                fix="Give booleans with the batch and time dimensions of the input.",
            )
        is_first = torch.arange(data.shape[time], device=data.device) == 0
        teacher = teacher | (is_first if self.batch_first else is_first[:, None])
        teacher = teacher if resets is None else teacher | resets
        inner = self._held.setdefault(-1, {}).get("step of all layers")
        if inner is None:
            inner = RNN(_AllLayers(self), batch_first=self.batch_first, backend=self.backend, save=self.save)
            self._held[-1]["step of all layers"] = inner
        assert isinstance(inner, RNN)
        inner.training = inner.cells[0].training = self.training
        y, after = inner._call((x, teacher), state, lengths, constants, resets, None, feeds_back=True)
        return y, after

    def _step_once(self, x_t: Any, state: Any, constants: Any, *, calls_cells: bool = False) -> tuple[Any, Any]:
        """The cells called once, or torch's functions for a step of them. Nothing is built."""
        count = len(self.cells)
        if state is None:
            first = x_t if isinstance(x_t, torch.Tensor) else flatten(x_t)[0]
            states = self._own_states(None, first.shape[0], first.device)
        else:
            states = [state] if count == 1 else list(state)
        after = []
        for index, (cell, own) in enumerate(zip(self.cells, states, strict=True)):
            if index:
                _check_single(cell, x_t)
                x_t = functional.dropout(x_t, self.dropout, training=self.training) if self.dropout else x_t
            run = None if constants is not None or calls_cells else step_of_torch(cell)
            if run is not None:
                x_t, new = run(x_t, own)
            else:
                carried = own if constants is None else (own, constants)
                signature = self._step_signature(index, carried, has_constants=constants is not None)
                x_t, new = call_step(cell, x_t, carried, signature=signature)
                new = signature.own_state(new)
                new = new if type(new) is torch.Tensor else unflatten(own, flatten(new))
            after.append(new)
        return x_t, after[0] if count == 1 else tuple(after)

    def _step_signature(self, index: int, state: Any, *, has_constants: bool) -> StepSignature:
        form = StepSignature(has_constants=has_constants, returns=self.returns)
        spreads = self._spreads.get(index)
        if spreads is None:
            spreads = spreads_state(self.cells[index], state, form)
            if spreads is None:
                raise LookupError("how the cell is called is found by forward")
            self._spreads[index] = spreads
        return replace(form, spreads_state=True) if spreads else form

    @opaque
    def _call(  # noqa: PLR0917 - the arguments of forward
        self,
        x: Any,
        state: Any,
        lengths: Any,
        constants: Any,
        resets: Any,
        sample_ids: Any,
        *,
        feeds_back: bool = False,
    ) -> tuple[Any, Any]:
        data = values_of(x)
        cells = [_inspect(cell) for cell in self.cells]
        has_autocast = not data.is_meta and torch.is_autocast_enabled(data.device.type)
        x, state, constants = self._match_dtype(x, state, constants, cells[0].dtype, convert=has_autocast)
        operands = autocast_operands(data.device, cells[0].dtype)
        with torch.autocast(data.device.type, enabled=False) if has_autocast else nullcontext():
            given = [] if is_one_input(x) else flatten(x)
            seen = is_looked_at(data.device) or _unusual(data, (state, constants, given), cells)
            if seen and (self.save != "auto" or self.solver != "serial"):
                warn_once(
                    f"{type(self.cells[0]).__name__} runs sequentially and stores what it needs, not with "
                    f"{self._asked}: {seen}"
                )
            if seen and not (_has_own_lengths(x) or _is_readable(lengths)):
                self.solutions = self._unsolved(seen)
                y, ends = self._loop_over_steps(x, state, lengths, constants, resets, feeds_back=feeds_back)
                return _as_autocast_gives(y, operands), ends
            packed, inputs = pack_inputs(x, lengths, batch_first=self.batch_first)
            num_rows, has_constants = packed.layout.num_rows, constants is not None
            further = [constants] * has_constants + ([_no_output(x[0], num_rows)] if feeds_back else [])
            states = self._states(state, num_rows, further, data.device)
            form = StepSignature(
                inputs=inputs, has_constants=has_constants, feeds_back=feeds_back, returns=self.returns
            )
            layout, x_PF, starts = packed.layout, packed.x_PF, [packed.sort_rows(initial) for initial in states]
            segments = None if resets is None else cut_at_resets(packed, resets, batch_first=self.batch_first)
            if segments is not None:
                own = states if state is None else self._states(None, num_rows, further, data.device)
                fresh = map(packed.sort_rows, own)
                layout, x_PF = segments.layout, segments.cut(x_PF)
                starts = [
                    segments.start_states(given, new, reverse=self._is_reverse(index))
                    for index, (given, new) in enumerate(zip(starts, fresh, strict=True))
                ]
            layers, built, stored = self._assemble(x_PF, starts, cells, form, seen=seen, operands=operands)
            if self.solver != "serial" and not stored and not seen and _is_checkpointed():
                stored = (
                    f"{type(self.cells[0]).__name__} runs sequentially, not with {self._asked}: it is checkpointed, "
                    "and run again a solver may go another way"
                )
            if stored:
                warn_once(stored)
            last = range(len(built))[-len(layers[-1]) :]
            shown = packed.shown if segments is None and not any(built[index].outputs for index in last) else ""
            run = partial(self._run, layout, shown, "auto" if stored or seen else self.save)
            if self.solver == "auto" and not (seen or stored):
                result = self._autotuner.run(layers, layout, x_PF, run=run)
            else:
                call = None if seen else self._solver_call(packed, sample_ids, is_cut=segments is not None)
                result = run(layers, x_PF, None if stored else call)
            self.solutions = self._unsolved(seen or stored) if seen or stored else tuple(result.solutions)
            finals, y_PF = result.states, result.y_PF
            after = [form.own_state(unflatten(initial, final)) for initial, final in zip(states, finals, strict=True)]
            if segments is not None:
                y_PF = segments.join(y_PF)
                after = [
                    segments.end_states(final, reverse=self._is_reverse(index)) for index, final in enumerate(after)
                ]
            after = list(map(packed.restore_rows, after))
            outputs = [built[index].outputs for index in last]  # of an untraced cell, known when it has run
            if shown and any(outputs):
                y_PF, shown = y_PF.reshape(layout.total, -1), ""
            y = packed.unpack_shown(y_PF) if shown else _unpack(packed, y_PF, outputs)
            return _as_autocast_gives(y, operands), after[0] if len(after) == 1 else tuple(after)

    @property
    def _asked(self) -> str:
        """The way to run that was asked for, if it is not the usual one."""
        return f"save={self.save!r}" if self.solver == "serial" else f"solver={self.solver!r}"

    def _why_stored(self, cell: nn.Module) -> str:
        """Why a call stores what it needs: steps that run again give gradients to tensors that are known alone."""
        return (
            f"{type(cell).__name__} reads a tensor that needs a gradient and is no parameter, buffer or attribute of "
            f"its modules: with {self._asked} it would get none, so the layer runs sequentially and stores what it "
            "needs. Make it an attribute of the cell, or give it by constants="
        )

    def _reads_unlisted(
        self, index: int, built: Built, one_row: list[torch.Tensor], tensors: dict[str, torch.Tensor]
    ) -> bool:
        """Whether a step has a gradient for anything but its input, its state and the cell's tensors."""
        if built.plan is not None:
            return any(tensor.requires_grad for tensor in built.plan.graph.outside)
        known = self._unlisted.get(index)
        if known is None or known[0] is not built:
            own = {name: tensor.detach() for name, tensor in tensors.items()}
            with unseen_by_hooks(), torch.random.fork_rng(devices=[]):
                call = LayerCall(built.program, Layout.even(num_steps=1, num_rows=1), one_row[0], one_row[1:], own)
                known = (built, any(t.requires_grad for y, after in run_together([call]) for t in (y, *after)))
            self._unlisted[index] = known
        return known[1]

    def _unsolved(self, reason: str) -> tuple[Solution, ...]:
        """What is told of a call that no solver ran, though there is one."""
        return () if self.solver == "serial" else (Solution(solver="serial", reason=reason),)

    def _is_reverse(self, index: int) -> bool:
        """Whether a layer and direction, by its number, reads backwards."""
        return self.bidirectional and index % 2 == 1

    def _run_in_graph(
        self, x: torch.Tensor, state: Any, programs: list[list[str]], parameters: list[list[str]]
    ) -> tuple[Any, Any]:
        """What Dynamo traces: a registered operator for each layer."""
        x_TBF = x.transpose(0, 1) if self.batch_first else x
        states = self._own_states(state, x_TBF.shape[1], x_TBF.device)
        y_TBF, finals = run_layers(
            programs,
            x_TBF,
            [flatten(initial) for initial in states],
            [[_tensor_of(cell, name) for name in names] for cell, names in zip(self.cells, parameters, strict=True)],
            dropout=self.dropout if self.training else 0.0,
        )
        after = [unflatten(initial, parts) for initial, parts in zip(states, finals, strict=True)]
        y = y_TBF.transpose(0, 1) if self.batch_first else y_TBF
        return y, after[0] if len(after) == 1 else tuple(after)

    def _loop_over_steps(
        self, x: Any, state: Any, lengths: Any, constants: Any, resets: Any, *, feeds_back: bool = False
    ) -> tuple[Any, Any]:
        """A Python loop of operators alone, for those who look at them: transforms, tracers, modes, subclasses."""
        if _has_own_lengths(x):
            raise StrettoError(
                f"{type(x).__name__} cannot be exported as an input", fix="Export a padded batch and lengths=."
            )
        data = values_of(x)
        x_BTF = x if self.batch_first else map_state(lambda part: part.transpose(0, 1), x)
        num_rows, num_steps = data.shape[:2] if self.batch_first else (data.shape[1], data.shape[0])
        real_BT = None
        if lengths is not None:
            lengths_B1, steps_T = lengths.to(data.device)[:, None], torch.arange(num_steps, device=data.device)
            real_BT = steps_T < lengths_B1
            reversed_BT = torch.where(real_BT, lengths_B1 - 1 - steps_T, steps_T)
            rows_B1 = torch.arange(num_rows, device=data.device)[:, None]
            # Padding may hold anything, and NaN times a gradient of zero is NaN.
            behind_BT = ~real_BT
            x_BTF = map_state(
                lambda part: part.masked_fill(behind_BT.reshape(*behind_BT.shape, *[1] * (part.dim() - 2)), 0), x_BTF
            )

        def reverse(part: torch.Tensor) -> torch.Tensor:
            return part.flip(1) if real_BT is None else part[rows_B1, reversed_BT]

        has_constants = constants is not None
        form = StepSignature(has_constants=has_constants, feeds_back=feeds_back, returns=self.returns)
        further = [constants] * has_constants + ([_no_output(x[0], num_rows)] if feeds_back else [])
        ends = []
        states = self._states(state, num_rows, further, data.device)
        fresh = [None] * len(states) if resets is None else self._states(None, num_rows, further, data.device)
        resets_BT = None
        if resets is not None:
            resets_BT = (resets if self.batch_first else resets.transpose(0, 1)).to(data.device)
            resets_BT = resets_BT if real_BT is None else resets_BT & real_BT
        num_directions = 2 if self.bidirectional else 1
        for number in range(self.num_layers):
            if number and self.dropout:
                x_BTF = functional.dropout(x_BTF, self.dropout, training=self.training)
            outputs = []
            for index in range(number * num_directions, (number + 1) * num_directions):
                given_BTF, fresh_BT = x_BTF, resets_BT
                if index % num_directions:
                    given_BTF = map_state(reverse, x_BTF)
                    if resets_BT is not None:  # backwards, a segment begins at the step before a reset
                        fresh_BT = reverse(torch.cat([resets_BT[:, 1:], torch.zeros_like(resets_BT[:, :1])], dim=1))
                spreads = self._spreads.get(index, bool(spreads_state(self.cells[index], states[index], form)))
                y_BTF, after = loop_over_steps(
                    self.cells[index],
                    given_BTF,
                    states[index],
                    real_BT=real_BT,
                    resets_BT=fresh_BT,
                    fresh=fresh[index],
                    signature=replace(form, spreads_state=spreads),
                )
                outputs.append(map_state(reverse, y_BTF) if index % num_directions else y_BTF)
                ends.append(form.own_state(unflatten(states[index], flatten(after))))
            x_BTF = outputs[0] if len(outputs) == 1 else map_state(partial(_side_by_side, num_lead=2), *outputs)
            if number + 1 < self.num_layers:
                _check_single(self.cells[number * num_directions], x_BTF)
        y = x_BTF if self.batch_first else map_state(lambda part: part.transpose(0, 1), x_BTF)
        return y, ends[0] if len(ends) == 1 else tuple(ends)

    def _assemble(
        self,
        x_PF: torch.Tensor,
        states: list[Any],
        cells: list["_Inspected"],
        form: StepSignature,
        *,
        seen: str,
        operands: torch.dtype | None,
    ) -> tuple[list[list[Direction]], dict[int, Built], str]:
        """The layers, each direction with its program, its tensors and its initial state; and what was built.

        And why they are to run sequentially and to store what they need, though something else was asked for.
        """
        backend: Backend = "torch" if seen else self.backend
        is_usual = bool(seen) or (self.save == "auto" and self.solver == "serial") or not torch.is_grad_enabled()
        built: dict[int, Built] = {}
        reason = ""
        signatures: dict[int, StepSignature] = {}

        def direction(index: int, features: tuple[int, ...]) -> Direction:
            nonlocal reason
            cell, initial = cells[index], states[index]
            signature = signatures[index] = self._signature(index, form, features, x_PF, initial)
            if signature.inputs is None:
                _check_width(cell.module, features, x_PF)
            _check_devices(cell, x_PF, initial)
            options: Any = {"backend": backend, "signature": signature, "operands": operands}
            built[index] = self._build(cell, features, x_PF.dtype, initial, **options)
            _warn_if_slower(cell.module, built[index], wanted=backend)
            tensors = _tensors_read(built[index], cell)
            if not is_usual and not reason:
                one_row = [x_PF.new_zeros(1, *features)]
                one_row += [part.new_zeros(1, *part.shape[1:]) for part in flatten(initial)]
                if self._reads_unlisted(index, built[index], one_row, tensors):
                    reason = self._why_stored(cell.module)
            variants = (
                None if self.solver == "serial" else self._variants(cell.module, initial, index, signature, operands)
            )
            return Direction(built[index].program, tensors, flatten(initial), variants)

        def output_shape(index: int, features: tuple[int, ...]) -> tuple[int, ...]:
            return _output_shape(built[index], cells[index].module, features, states[index], signatures[index])

        layers = assemble(
            direction,
            output_shape=output_shape,
            features=tuple(x_PF.shape[1:]),
            num_layers=self.num_layers,
            num_directions=2 if self.bidirectional else 1,
        )
        return layers, built, reason

    def _signature(
        self, index: int, form: StepSignature, features: tuple[int, ...], x_PF: torch.Tensor, initial: Any
    ) -> StepSignature:
        """How the cell of a layer and direction is called. Where two ways are possible, both are tried, once."""
        cell = self.cells[index]
        form = form if index < (2 if self.bidirectional else 1) else replace(form, inputs=None)
        spreads = self._spreads.get(index)
        if spreads is None:
            spreads = spreads_state(cell, initial, form)
            if spreads is None:
                spreads = _try_both(cell, x_PF.new_zeros(3, *features), initial, form)
            self._spreads[index] = spreads
        return replace(form, spreads_state=spreads)

    def _run(  # noqa: PLR0917 - three of them are the call's, given first
        self,
        layout: Layout,
        shown: Shown,
        save: SaveChoice,
        layers: Sequence[Sequence[Direction]],
        x_PF: torch.Tensor,
        call: SolverCall | None,
    ) -> StackResult:
        dropout = self.dropout if self.training else 0.0
        try:
            return run_stack(layers, layout, x_PF, dropout=dropout, save=save, call=call, shown=shown)
        except RuntimeError as error:
            if x_PF.is_floating_point() or "dtype" not in str(error):
                raise
            raise StrettoError(  # integers are for cells that look them up in a table
                f"{type(self.cells[0]).__name__} cannot take an input of {x_PF.dtype}: {error}",
                fix="Convert it, with x.to(...).",
            ) from error

    def _solver_call(
        self, packed: PackedBatch, sample_ids: Sequence[int] | torch.Tensor | None, *, is_cut: bool
    ) -> SolverCall | None:
        """The solver and the ids of the sequences; None for a sequential run."""
        solver = self.solver if isinstance(self.solver, AbstractSolver) else None
        if sample_ids is None:
            return None if solver is None else SolverCall(solver)
        if solver is not None and is_cut:
            raise StrettoError("sample_ids were given with resets", fix="Give one of the two.")
        try:
            ids = [check_int(number, name="sample_ids", at_least=-(1 << 63)) for number in sample_ids]
        except TypeError:
            ids = []
        if len(ids) != packed.layout.num_rows:
            raise StrettoError(
                f"{len(ids)} sample_ids were given for {packed.layout.num_rows} sequences",
                fix="Give one integer per sequence.",
            )
        if solver is None:
            return None
        order = range(len(ids)) if packed.order_B is None else packed.order_B.tolist()
        return SolverCall(solver, tuple(ids[number] for number in order))

    def _match_dtype(
        self, x: Any, state: Any, constants: Any, own: torch.dtype | None, *, convert: bool
    ) -> tuple[Any, Any, Any]:
        """Inputs, state and constants in the dtype of the parameters: converted under autocast, refused otherwise."""
        cell = self.cells[0]
        data = x.data if isinstance(x, PackedSequence) else x
        if convert and own is not None:

            def match(part: torch.Tensor) -> torch.Tensor:
                return part.to(own) if part.is_floating_point() else part

            if isinstance(x, PackedSequence):
                x = PackedSequence(match(data), x.batch_sizes, x.sorted_indices, x.unsorted_indices)
            else:
                x = map_state(match, x)
            return x, map_state(match, state), map_state(match, constants)
        given = flatten((data, state, constants))
        wrong = next((t.dtype for t in given if t.is_floating_point() and own is not None and t.dtype != own), None)
        if wrong is not None:
            raise StrettoError(
                f"the input or state is of {wrong} and the parameters of {type(cell).__name__} are of {own}",
                fix="Convert one to the other, with x.to(...) or rnn.to(...).",
            )
        return x, state, constants

    def initial_state(self, batch_size: int) -> Any:
        """The state that `forward` starts from when none is given."""
        made = [self._initial(cell, batch_size) for cell in self.cells]
        return made[0] if len(made) == 1 else tuple(made)

    def _initial(self, cell: nn.Module, num_rows: int, device: torch.device | None = None) -> Any:
        return initial_state(cell, num_rows, sizes=self.state_sizes, device=device)

    def explain(self, input_size: int | None = None) -> Explanation:
        """What is computed where, and the cost per step, of the first cell; the other layers are alike.

        Args:
            input_size: Features of a step; by default what the cell was made with, or what the last batch had.

        Raises:
            StrettoError: If the input size is not known.
        """
        cell = _inspect(self.cells[0])
        if input_size is not None:
            check_int(input_size, name="input_size")
        last, initial = self._last, self._initial(cell.module, 1)
        features = (input_size,) if input_size else (_input_size(cell.module),) if last is None else last.features
        dtype = _floating_dtype(cell.tensors) or torch.get_default_dtype() if last is None else last.dtype
        signature = PLAIN
        if last is not None and features == last.features:
            signature, initial = last.signature, last.initial
        operands = None if last is None else last.operands
        options: Any = {"backend": self.backend, "signature": signature, "operands": operands}
        built = self._build(cell, features, dtype, initial, **options)
        return Explanation.of(built, type(cell.module).__name__)

    _last: "_Described | None" = None

    @property
    def last_built(self) -> Built | None:
        """What ran the last call; None before the first."""
        return next(reversed(self._built.values()), None)

    def _build(
        self,
        cell: "_Inspected",
        features: tuple[int, ...],
        dtype: torch.dtype,
        initial: Any,
        *,
        backend: Backend,
        signature: StepSignature = PLAIN,
        operands: torch.dtype | None = None,
    ) -> Built:
        shapes = tuple((part.shape[1:], part.dtype, part.device.type) for part in flatten(initial))
        form = (_Same(cell.module), features, dtype, shapes, structure_of(initial), backend, signature, operands)
        key = (form, cell.fingerprint)
        built = self._built.get(key)
        count, last = self._variants_of.get(form, (0, None))
        if built is None and count >= MAX_VARIANTS and last is not None:
            warn_once(
                f"{type(cell.module).__name__} has been traced {MAX_VARIANTS} times in a row, since something that it "
                "reads is another at every call, and each time takes longer than a call. Make what changes a tensor "
                "attribute of the cell, or give it with the input or by constants="
            )
            built = last if last.plan is None else None  # nothing of it was compiled: it runs as it is
        if built is not None and count:
            self._variants_of[form] = (0 if (key in self._built) else count, last)
        if built is None:
            if cell.module is self.cells[0]:
                row = map_state(lambda part: torch.zeros_like(part[:1]), initial)
                self._last = _Described(features, dtype, signature, row, operands)
            built = build(
                cell.module,
                x_shape=features,
                x_dtype=dtype,
                state=initial,
                backend=backend,
                signature=signature,
                needs_loops=self.solver != "serial",
                holders=_holders(cell.module) if any(cell.module is own for own in self.cells) else None,
                operands=operands,
            )
            self._built[key] = built
            self._variants_of[form] = (count + 1, built)
            while len(self._built) > MAX_BUILT:
                self._built.pop(next(iter(self._built)), None)
        return built

    def _variants(
        self, cell: nn.Module, initial: Any, place: int, signature: StepSignature, operands: torch.dtype | None
    ) -> CellVariants:
        def program(module: nn.Module, features: tuple[int, ...], dtype: torch.dtype) -> Program:
            options: Any = {"backend": self.backend, "operands": operands}
            return self._build(_inspect(module), features, dtype, initial, **options).program

        if signature != PLAIN:
            # The hooks of a cell take one input and its own state alone, so solvers do without them.
            cell = _Hookless(cell)
        return CellVariants(cell=cell, build=program, modules=self._held.setdefault(place, {}))

    def _states(self, state: Any, num_rows: int, further: Sequence[Any], device: torch.device) -> list[Any]:
        """The state that each layer and direction starts from, with what programs carry beside it."""
        own = self._own_states(state, num_rows, device)
        if not further:
            return own
        wrong = next((part for part in flatten(further) if part.dim() == 0 or part.shape[0] != num_rows), None)
        if wrong is not None:
            raise StrettoError(
                f"a constant has the shape {tuple(wrong.shape)} and the batch has {num_rows} sequences",
                fix="Give a row for each sequence, with expand if they are alike; what all share is a buffer.",
            )
        return [(initial, *further) for initial in own]

    def _own_states(self, state: Any, num_rows: int, device: torch.device) -> list[Any]:
        made = [self._initial(cell, num_rows, device) for cell in self.cells]
        is_known = torch.compiler.is_compiling() or torch._C._get_tracing_state() is None  # or sizes are tensors
        for cell, own in zip(self.cells, made, strict=True):
            if is_known and any(part.dim() == 0 or part.shape[0] != num_rows for part in flatten(own)):
                shapes = [tuple(part.shape) for part in flatten(own)]
                raise StrettoError(
                    f"{type(cell).__name__}.initial_state({num_rows}) returned the shapes {shapes}",
                    fix="Return a row for each sequence in every tensor, with expand if they are alike.",
                )
        if state is None:
            return made
        given = [state] if len(made) == 1 else list(state) if isinstance(state, (tuple, list)) else [state]
        if len(given) != len(made):
            raise StrettoError(
                f"the state has {len(given)} parts and there are {len(made)} layers and directions",
                fix="Give a tuple with one state for each, as it is returned.",
            )
        for one, own in zip(given, made, strict=True):
            have, want = [tuple(t.shape) for t in flatten(one)], [tuple(t.shape) for t in flatten(own)]
            if is_known and have != want:
                raise StrettoError(
                    f"the state has the shapes {have} and the cell's own has {want}",
                    fix="Give a state as it is returned, with a row for each sequence.",
                )
            for part, wanted in zip(flatten(one), flatten(own), strict=True):
                if part.is_floating_point() != wanted.is_floating_point():
                    raise StrettoError(
                        f"the state is of {part.dtype} and the cell's own of {wanted.dtype}",
                        fix="Give a state as it is returned.",
                    )
        return [unflatten(own, flatten(one)) for one, own in zip(given, made, strict=True)]

    def __getstate__(self) -> dict[str, Any]:
        """Without compiled code, which is found in the cache again."""
        return {
            **self.__dict__,
            "_built": {},
            "_unlisted": {},
            "_variants_of": {},
            "_held": {},
            "_in_graphs": {},
            "_autotuner": SolverAutotuner(),
        }

    def __deepcopy__(self, memo: dict[int, Any]) -> "RNN":
        twin = type(self).__new__(type(self))
        memo[id(self)] = twin
        twin.__dict__.update({key: copy.deepcopy(value, memo) for key, value in self.__getstate__().items()})
        return twin

    def extra_repr(self) -> str:
        """Settings that differ from the default."""
        shown = f"num_layers={self.num_layers}" if self.num_layers > 1 else ""
        for name, usual in (("bidirectional", False), ("batch_first", True), ("dropout", 0.0), ("save", "auto")):
            value = getattr(self, name)
            shown += "" if value == usual else f"{', ' if shown else ''}{name}={value!r}"
        return shown


class _AllLayers(nn.Module):
    """A step of all layers of an RNN, as one cell."""

    def __init__(self, rnn: RNN) -> None:
        super().__init__()
        self.cells = rnn.cells
        self.initial_state = rnn.initial_state
        self.step = partial(rnn._step_once, calls_cells=True)

    def _get_name(self) -> str:
        return ", then ".join(cell._get_name() for cell in self.cells)  # type: ignore[no-untyped-call]

    def forward(self, x_t: Any, state: Any, constants: Any = None) -> tuple[Any, Any]:
        """The step."""
        return self.step(x_t, state, constants)


def _holders(cell: nn.Module) -> list[Any]:
    """What a cell may change: its own attributes, and whatever else its code can reach."""
    own = cell.cells if isinstance(cell, _AllLayers) else [cell]
    return [*holders_of(cell), *(holder for one in own for holder in capture(one).holders)]


class _Hookless(nn.Module):
    """What solvers see of a cell that has inputs, constants or a state they cannot hand to its hooks."""

    def __init__(self, cell: nn.Module) -> None:
        super().__init__()
        self.train(cell.training)


@final
class _InGraph:
    """A cell of a layer that a compiled graph runs by name, as long as the layer lives."""

    def __init__(self, rnn: RNN, index: int, features: tuple[int, ...], dtype: torch.dtype) -> None:
        self.name = f"rnn:{uuid.uuid4().hex}"  # graphs are stored, and another process must not find another cell
        self._rnn, self._index, self._features, self._dtype = weakref.ref(rnn), index, features, dtype
        with torch.no_grad():
            self._initial = rnn._initial(rnn.cells[index], 1)

    def build(self) -> Built | None:
        """As every call does: what the step depends on may have changed since the graph was compiled."""
        rnn = self._rnn()
        if rnn is None:
            return None
        cell = _inspect(rnn.cells[self._index])
        x, form = torch.zeros(1, dtype=self._dtype), StepSignature(returns=rnn.returns)
        signature = rnn._signature(self._index, form, self._features, x, self._initial)
        return rnn._build(cell, self._features, self._dtype, self._initial, backend=rnn.backend, signature=signature)

    def find_program(self) -> TracedProgram | None:
        """The program, if a graph can run it."""
        built = self.build()
        program = None if built is None else built.program
        if (
            not isinstance(program, TracedProgram)
            or program.plan.graph.outputs is not None
            or program.plan.graph.narrow
        ):
            return None
        return program if repeats(program) else None


_IN_GRAPHS: Final["weakref.WeakValueDictionary[str, _InGraph]"] = weakref.WeakValueDictionary()


def _find_program(name: str) -> TracedProgram | None:
    found = _IN_GRAPHS.get(name)
    return None if found is None else found.find_program()


register_programs("rnn", _find_program)


@evaluated
def _operator_names(
    rnn: RNN, features: tuple[int, ...], dtype: torch.dtype, device: str
) -> tuple[list[list[str]], list[list[str]]] | None:
    """Names of the programs of each layer, and of the parameters of each; None if no graph can run them."""
    if device != "cpu" or rnn.solver != "serial" or rnn.save != "auto":
        return None
    num_directions = 2 if rnn.bidirectional else 1
    programs: list[list[str]] = []
    parameters: list[list[str]] = []
    for number in range(rnn.num_layers):
        programs.append([])
        shapes = []
        for index in range(number * num_directions, (number + 1) * num_directions):
            key = (index, features, dtype)
            found = rnn._in_graphs.get(key)
            if found is None:
                found = rnn._in_graphs[key] = _InGraph(rnn, index, features, dtype)
                _IN_GRAPHS[found.name] = found
            cell = _inspect(rnn.cells[index])
            # One that does not fit, or is not to be seen by generated code, is left to `_call`.
            if cell.dtype not in {None, dtype} or _unusual(torch.empty(0), None, [cell]):
                return None
            width = getattr(cell.module, "input_size", None)
            if isinstance(width, int) and dtype.is_floating_point and features[-1:] != (width,):
                return None
            program = found.find_program()
            if program is None:
                return None
            programs[-1].append(found.name)
            parameters.append(parameter_names(program))
            shapes.append(program.plan.graph.y.row_shape)
        if num_directions > 1:
            shapes = [shape or (1,) for shape in shapes]
        features = (*shapes[0][:-1], *([sum(shape[-1] for shape in shapes)] if shapes[0] else []))
    return programs, parameters


def _tensor_of(cell: nn.Module, name: str) -> torch.Tensor:
    """A parameter or buffer by its name."""
    found: Any = cell
    for part in name.split("."):
        found = getattr(found, part)
    return found  # type: ignore[no-any-return]


def _tensors_read(built: Built, cell: "_Inspected") -> dict[str, torch.Tensor]:
    """A cell's parameters and buffers, and what its step reads of other tensors that are attributes."""
    if not cell.attributes:
        return cell.tensors
    read = cell.attributes if built.plan is None else built.plan.graph.parameters
    return cell.tensors | {name: tensor for name, tensor in cell.attributes.items() if name in read}


def _output_shape(
    built: Built, cell: nn.Module, features: tuple[int, ...], initial: Any, signature: StepSignature
) -> tuple[int, ...]:
    """The shape of one step of the output, which goes into the next layer."""
    if built.plan is not None:
        _check_single(cell, None if built.outputs is None else built.outputs.template)
        return built.plan.graph.y.row_shape
    with torch.enable_grad(), unseen_by_hooks(), torch.random.fork_rng(devices=[]):
        like_part = flatten(initial)
        like = like_part[0] if like_part else torch.empty(0)
        x = torch.zeros(2, *features, dtype=like.dtype, device=like.device)
        rows = unflatten(initial, [part.new_zeros(2, *part.shape[1:]) for part in like_part])
        y, _ = call_step(cell, x, rows, signature=signature)
    _check_single(cell, y)
    return tuple(y.shape[1:])


def _check_single(cell: nn.Module, y: Any) -> None:
    """An error if what goes into the next layer is several outputs."""
    if y is not None and not isinstance(y, torch.Tensor):
        raise StrettoError(
            f"{type(cell).__name__} returns several outputs, {describe(y)}, and there is another layer above",
            fix="Return one tensor from the cells of all layers but the last.",
        )


def _unpack(packed: PackedBatch, y_PF: torch.Tensor, outputs: Sequence[Packing | None]) -> Any:
    """Outputs in the form of the batch, in the structure in which the cell returned them, directions side by side."""
    known = [packing for packing in outputs if packing is not None]
    if not known:
        return packed.unpack_copied(y_PF)
    columns = torch.split(y_PF, [sum(packing.widths) for packing in known], dim=1)
    found = [packing.unpack(part_PF) for packing, part_PF in zip(known, columns, strict=True)]
    for packing, tree in zip(known, found, strict=True):
        packing.check_exact(flatten(tree), name="output")
    joined = found[0] if len(found) == 1 else map_state(partial(_side_by_side, num_lead=1), *found)
    return map_state(packed.unpack_copied, joined)


def _as_autocast_gives(y: Any, operands: torch.dtype | None) -> Any:
    """Outputs of single precision in the dtype that torch's layers return under autocast of a GPU."""
    if operands is None:
        return y
    return map_state(lambda part: part.to(operands) if part.dtype is torch.float32 else part, y)


def _no_output(x: Any, num_rows: int) -> Any:
    """What is in the place of the output before the first step, which does not read it."""
    return map_state(lambda part: part.new_zeros(num_rows, *part.shape[2:]), x)


def _side_by_side(*parts: torch.Tensor, num_lead: int) -> torch.Tensor:
    """Two directions, of which each row has a feature at least."""
    return torch.cat([part if part.dim() > num_lead else part[..., None] for part in parts], dim=-1)


def _try_both(cell: nn.Module, x: torch.Tensor, initial: Any, form: StepSignature) -> bool:
    """Whether the items of the state are arguments of their own, of a cell that could be called either way."""
    rows = map_state(lambda part: part.new_zeros(3, *part.shape[1:]), initial)
    with torch.no_grad(), unseen_by_hooks(), torch.random.fork_rng(devices=[]):
        for spreads in (False, True):
            with contextlib.suppress(Exception):  # the cell's own comes again when it runs
                call_step(cell, x, rows, signature=replace(form, spreads_state=spreads))
                return spreads
    return False


def _has_own_lengths(x: Any) -> bool:
    return isinstance(x, PackedSequence) or (isinstance(x, torch.Tensor) and x.is_nested)


def _make_cells(
    cell: nn.Module | Sequence[nn.Module], num_layers: int, directions: int, *, sizes: Any
) -> list[nn.Module]:
    wanted = num_layers * directions
    if isinstance(cell, (list, tuple, nn.ModuleList)):
        cells = [_check_cell(item, sizes) for item in cell]
        if len(cells) != wanted:
            raise StrettoError(
                f"{len(cells)} cells were given for {num_layers} layers of {directions} directions",
                fix=f"Give {wanted} cells, or one to be made again.",
            )
        return cells
    cell = _check_cell(cell, sizes)
    if wanted == 1:
        return [cell]
    if not callable(getattr(cell, "with_input_size", None)):
        raise StrettoError(
            f"{type(cell).__name__} cannot be built again for another layer: it has no with_input_size",
            fix="Subclass stretto.Cell, or give a list with one cell for each layer and direction.",
        )
    size = _output_size(cell)
    first = [cell, *(cell.with_input_size(_input_size(cell)) for _ in range(directions - 1))]  # type: ignore[operator]
    return first + [cell.with_input_size(size * directions) for _ in range(wanted - directions)]  # type: ignore[operator]


def _check_cell(cell: Any, sizes: Any) -> nn.Module:
    """The cell, or one of ours for one of torch's."""
    if type(cell) in TORCH_CELLS:
        return cell_from(cell)
    if not isinstance(cell, nn.Module) or not has_initial_state(cell, sizes):
        if isinstance(cell, nn.RNNBase):
            raise StrettoError(
                f"{cell!r} is a layer, not a cell",
                fix="Give it to stretto.accelerate, or stretto.cells.cell_from(layer) to stretto.RNN.",
            )
        if isinstance(cell, nn.Module):
            raise StrettoError(
                f"{cell!r} is not a cell: the state that it starts from is not known",
                fix="Give the sizes of its state, as in stretto.RNN(cell, state=64) or state=(64, 64), or give the "
                "cell a method initial_state(batch_size).",
            )
        raise StrettoError(
            f"{cell!r} is not a cell",
            fix="Give a module with forward(x_t, state), such as a subclass of stretto.Cell; functions are for "
            "stretto.scan.",
        )
    check_forward(cell, sizes)
    return cell


def _check_width(cell: nn.Module, features: tuple[int, ...], x: torch.Tensor) -> None:
    size = getattr(cell, "input_size", None)
    if isinstance(size, int) and x.is_floating_point() and features[-1:] != (size,):
        raise StrettoError(
            f"the input has {features[-1] if features else 0} features per step and {type(cell).__name__} takes {size}",
            fix="Give (batch, steps, features) with that many features, or make the cell with another input_size.",
        )


def _check_devices(cell: "_Inspected", x: torch.Tensor, initial: Any) -> None:
    """An error unless all is on one device; a scalar may be on the CPU, as with torch's operators."""
    for name, tensors in (("state", flatten(initial)), ("parameters", cell.tensors.values())):
        sparse = next((t.layout for t in tensors if t.layout != torch.strided), None)
        if sparse is not None:
            raise StrettoError(
                f"the {name} of {type(cell.module).__name__} has a tensor of layout {sparse}",
                fix="Make it dense, with to_dense().",
            )
        wrong = next((t.device for t in tensors if t.device != x.device and t.dim() > 0), None)
        if wrong is not None:
            raise StrettoError(
                f"the input is on {x.device} and the {name} of {type(cell.module).__name__} on {wrong}",
                fix="Move them to one device, with x.to(...) or rnn.to(...).",
            )


def _warn_if_slower(cell: nn.Module, built: Built, *, wanted: Backend) -> None:
    """Say once of each class and reason that something slower runs than what was asked for."""
    fastest = built.fastest if wanted == "auto" else wanted
    if built.backend != fastest:
        warn_once(
            f"{type(cell).__name__} runs by backend {built.backend!r} ({built.description}), not by {fastest!r}: "
            f"{dict(built.choices)[fastest]}. Change the cell so that this is not so (rnn.explain() has the details), "
            f"or choose backend={built.backend!r}."
        )
    elif built.backend != "torch":
        warn_of_unset(type(cell).__name__, built.unset)


def _unusual(data: torch.Tensor, given: Any, cells: Sequence["_Inspected"]) -> str:
    """Why nothing but PyTorch's operators can read a call's tensors; empty if there is no such reason."""
    if data.is_meta:
        return "the input is on meta"
    return unusual_tensor((data, *flatten(given), *(tensor for cell in cells for tensor in cell.tensors.values())))


def _is_checkpointed() -> bool:
    """Whether the call will be made again for the backward pass, and has to save as many tensors then."""
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return hooks is not None and getattr(hooks[0], "__module__", "") == "torch.utils.checkpoint"


def _is_readable(lengths: Any) -> bool:
    """Whether lengths are known, and not to be traced or transformed."""
    if not isinstance(lengths, torch.Tensor):
        return lengths is not None
    is_plain = type(lengths) is torch.Tensor and not torch._C._functorch.is_functorch_wrapped_tensor(lengths)
    return is_plain and torch._C._get_tracing_state() is None and not torch._C._len_torch_dispatch_stack()


def _input_size(cell: nn.Module) -> int:
    size = getattr(cell, "input_size", None)
    if size is None:
        made_with: Any = getattr(cell, "_init_args", ((), {}))
        args, kwargs = made_with
        size = kwargs.get("input_size", args[0] if args else None)
    if not isinstance(size, int):
        raise StrettoError(
            f"the input size of {type(cell).__name__} is not known, so no further layers can be made from it",
            fix="Give the cell an attribute input_size, or give one cell for each layer and direction as a list.",
        )
    return size


def _output_size(cell: nn.Module) -> int:
    tensors = (*cell.parameters(), *cell.buffers())
    like_part = next((t for t in tensors if t.is_floating_point()), torch.zeros(()))
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        x = torch.zeros(2, _input_size(cell), dtype=like_part.dtype, device=like_part.device)
        y, _ = call_cell(cell, x, cell.initial_state(2))  # type: ignore[operator]
    return int(y.shape[-1])


def _check(num_layers: int, dropout: float, backend: str, save: str, solver: Any) -> None:
    check_int(num_layers, name="num_layers", at_most=MAX_LAYERS)
    check_float(dropout, name="dropout", at_least=0.0, at_most=1.0)
    check_choice(backend, name="backend", choices=backend_names())
    check_choice(save, name="save", choices=get_args(SaveChoice))
    if not isinstance(solver, AbstractSolver):
        check_choice(solver, name="solver", choices=("serial", "auto"))
    if solver != "serial" and save != "auto":
        raise StrettoError(
            f"save={save!r} was given with solver={solver!r}, which stores what its chunks need",
            fix='Choose one of the two: save="auto", or solver="serial".',
        )


class _Described(NamedTuple):
    """What was built last for the first cell: a row of its input, its call, its state, and products' operands."""

    features: tuple[int, ...]
    dtype: torch.dtype
    signature: StepSignature
    initial: Any
    operands: torch.dtype | None


@final
class _Same:
    """An object that equals itself alone; it is kept alive, so that no other can take its identity."""

    __slots__ = ("thing",)

    def __init__(self, thing: Any) -> None:
        self.thing = thing

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and other.thing is self.thing

    def __hash__(self) -> int:
        return id(self.thing)


class _Inspected(NamedTuple):
    """A cell with its parameters and buffers by name, and what a traced step depends on besides its inputs.

    `attributes` has tensors that are neither. `dtype` is that of the parameters; None if there are several, and inputs
    may be of any.
    """

    module: nn.Module
    tensors: dict[str, torch.Tensor]
    attributes: dict[str, torch.Tensor]
    dtype: torch.dtype | None
    fingerprint: tuple[Any, ...]


def _inspect(cell: nn.Module) -> _Inspected:
    """Types, settings, parameter shapes and hooks of all modules: when any of it changes, the step is traced again.

    So it is when what the code reads besides has changed: globals, closures, attributes of other objects. The modules
    of this library and of PyTorch read nothing of that kind.

    One pass over the modules instead of three, because it is made on every call. Tensors that are there under several
    names are listed once, as in `named_parameters`.
    """
    found: list[Any] = [_Same(cell)]
    parameters: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    attributes: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    reads_more = False
    for name, module in cell.named_modules():
        kind = type(module).__module__.partition(".")[0]
        reads_more |= kind not in _LIBRARIES or bool(module._forward_hooks or module._forward_pre_hooks)
        found.append((name, type(module), len(module._forward_hooks) + len(module._forward_pre_hooks)))
        for key, value in module.__dict__.items():
            if key in _MODULE_ATTRIBUTES:
                continue
            reads_more |= isinstance(value, _CALLABLES)
            if isinstance(value, torch.Tensor) and not isinstance(module, torch.jit.ScriptModule):
                found.append((key, value.shape, value.dtype, value.device))
                attributes[f"{name}.{key}" if name else key] = value
            else:
                found.append((key, value if isinstance(value, _VALUES) else _mark(value)))
        for tensors, own in ((parameters, module._parameters), (buffers, module._buffers)):
            for key, tensor in own.items():
                found.append((key, None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)))
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    tensors[f"{name}.{key}" if name else key] = tensor
    dtypes = {tensor.dtype for tensor in parameters.values() if tensor.is_floating_point()}
    if reads_more:
        seen.update(map(id, attributes.values()))
        for one in cell.cells if isinstance(cell, _AllLayers) else [cell]:
            further = capture(one)
            found += [further.marks, *(_Same(tensor) for tensor in further.tensors if id(tensor) not in seen)]
    dtype = dtypes.pop() if len(dtypes) == 1 else None
    return _Inspected(cell, parameters | buffers, attributes, dtype, tuple(found))


def _floating_dtype(tensors: dict[str, torch.Tensor]) -> torch.dtype | None:
    return next((tensor.dtype for tensor in tensors.values() if tensor.is_floating_point()), None)


def _mark(value: Any) -> Any:
    if isinstance(value, _VALUES):
        return value
    if isinstance(value, _FUNCTIONS):
        return _Same(getattr(value, "__func__", value))
    if isinstance(value, (tuple, list)):
        return (type(value), *(_mark(item) for item in value))
    if isinstance(value, dict):
        return (dict, *((_mark(key), _mark(item)) for key, item in value.items()))
    if isinstance(value, (set, frozenset)):
        return (set, frozenset(_mark(item) for item in value))
    return _Same(value)
