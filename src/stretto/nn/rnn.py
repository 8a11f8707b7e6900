"""A recurrent layer of any cell.

Shape legend: B sequences, T steps, F features of the input, O of the output, P real steps of all sequences.
"""

import copy
import inspect
import uuid
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any, Final, Literal, NamedTuple, final, get_args

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence

from stretto.cells import cell_from
from stretto.checks import check_bool, check_choice, check_float, check_int
from stretto.errors import StrettoError
from stretto.graph import call_cell
from stretto.kernels import (
    Backend,
    Built,
    Layout,
    Program,
    SaveChoice,
    TracedProgram,
    backend_names,
    build,
    loop_over_steps,
    parameter_names,
    register_programs,
    repeats,
    unseen_by_hooks,
)
from stretto.nn.auto import SolverAutotuner
from stretto.nn.compiled import evaluated, operators_are_usable, run_layers
from stretto.nn.explanation import Explanation
from stretto.nn.guards import is_looked_at, opaque, unusual_tensor, warn_once
from stretto.nn.ragged import PackedBatch, pack_batch, values_of
from stretto.nn.stack import Direction, SolverCall, StackResult, assemble, run_stack
from stretto.solvers import AbstractSolver, CellVariants, Solution
from stretto.state import flatten, map_state, unflatten

TORCH_CELLS = (nn.RNNCell, nn.GRUCell, nn.LSTMCell)
_VALUES: Final = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, type)
_FUNCTIONS: Final = (FunctionType, BuiltinFunctionType, MethodType)
_MODULE_ATTRIBUTES: Final = frozenset(nn.Module().__dict__) - {"training"}


@final
class RNN(nn.Module):
    """Runs a cell over sequences; every cell as fast as if a kernel had been written for it.

    One step of the cell is traced when the first batch comes. What does not depend on the state leaves the time loop,
    the rest is compiled, and weight gradients are computed after the loop; see `explain`. Sequences of unequal length
    cost their real steps only. Results are those of calling the cell at every step.

    Args:
        cell: A `stretto.Cell`, one of torch's cells, or a list of cells: one for each layer and direction, in the order
            of torch's states (layer 0 forward, layer 0 backward, layer 1 forward, ...).
        num_layers: Layers. Those above the first are copies of the cell with parameters of their own.
        bidirectional: Whether each layer also reads backwards, from each sequence's own end.
        batch_first: Whether batches are (B, T, F), as by default, or (T, B, F).
        dropout: Fraction of each layer's outputs, except the last's, dropped in training.
        backend: "auto" runs generated code where possible; "cpp" requires it; "eager" runs the same loops operator by
            operator; "torch" calls the cell itself at each step.
        save: What is stored for the backward pass: "auto" stores what is costly to compute again; "states" stores
            outputs and states at intervals, and computes the rest again: long sequences in little memory.
        solver: How to run through time. "serial": sequentially; "auto": measures whether solving chunks of time at once
            is faster, and uses what is; or a solver, such as `stretto.Shooting`. See also `rnn.solution`.

    Example:
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
        self.cells = nn.ModuleList(_make_cells(cell, num_layers, 2 if bidirectional else 1))
        self._built: dict[Any, Built] = {}
        self._held: dict[int, dict[str, nn.Module]] = {}
        self._autotuner = SolverAutotuner()
        self._in_graphs: dict[Any, _InGraph] = {}
        self.solutions: tuple[Solution, ...] = ()

    @property
    def solution(self) -> Solution:
        """How the last call went: of several layers and directions, that with the largest residual."""
        if not self.solutions:
            return Solution(solver="serial")
        return max(self.solutions, key=lambda solution: (solution.residual, solution.fell_back, solution.iterations))

    def forward(
        self,
        x: torch.Tensor | PackedSequence,
        state: Any = None,
        lengths: Any = None,
        *,
        sample_ids: Sequence[int] | torch.Tensor | None = None,
    ) -> tuple[Any, Any]:
        """Run all sequences.

        Args:
            x: (B, T, F), or (T, B, F) unless `batch_first`; a single sequence (T, F); a PackedSequence; or a nested
                tensor with `layout=torch.jagged`.
            state: The state before the first step, as it is returned; by default the cells' own.
            lengths: Steps of each sequence, in any order; all T by default.
            sample_ids: A whole number for each sequence, by which a solver recognises it in later calls.

        Returns:
            Outputs of the same kind as `x`, zero after each sequence's end, and the state after each sequence's last
            step. For one layer of one direction that is the cell's state; otherwise a tuple with one for each layer
            and direction, in the order of torch's.
        """
        if isinstance(x, torch.Tensor) and x.dim() == 2 and not x.is_nested:
            dim = 0 if self.batch_first else 1
            state = None if state is None else map_state(lambda part: part.unsqueeze(0), state)
            y, after = self.forward(x.unsqueeze(dim), state, lengths, sample_ids=sample_ids)
            return y.squeeze(dim), map_state(lambda part: part.squeeze(0), after)
        if torch.compiler.is_compiling():
            if torch.compiler.is_exporting():
                return self._loop_over_steps(x, state, lengths)
            if isinstance(x, torch.Tensor) and not x.is_nested and x.dim() > 2 and x.numel() and lengths is None:
                size = getattr(self.cells[0], "input_size", None)
                # A size that is compared with a number is no symbol any more, and one that is not remains one.
                features = (size,) if x.dim() == 3 and x.shape[2] == size else tuple(x.shape[2:])
                names = _operator_names(self, features, x.dtype, x.device.type)
                if names is not None and sample_ids is None and operators_are_usable():
                    return self._run_in_graph(x, state, *names)
        return self._call(x, state, lengths, sample_ids)

    @opaque
    def _call(self, x: Any, state: Any, lengths: Any, sample_ids: Any) -> tuple[Any, Any]:
        data = values_of(x)
        cells = [_inspect(cell) for cell in self.cells]
        has_autocast = not data.is_meta and torch.is_autocast_enabled(data.device.type)
        x, state = self._match_dtype(x, state, cells[0].dtype, convert=has_autocast)
        with torch.autocast(data.device.type, enabled=False) if has_autocast else nullcontext():
            seen = is_looked_at() or _unusual(data, state, cells)
            if seen and isinstance(x, torch.Tensor) and not (x.is_nested or _is_readable(lengths)):
                self.solutions = ()
                return self._loop_over_steps(x, state, lengths)
            packed = pack_batch(x, lengths, batch_first=self.batch_first)
            states = self._states(state, packed.layout.num_rows)
            layers = self._assemble(packed, states, cells, backend="torch" if seen else self.backend)
            run = partial(self._run, packed.layout)
            if self.solver == "auto" and not seen:
                result = self._autotuner.run(layers, packed.layout, packed.x_PF, run=run)
            else:
                result = run(layers, packed.x_PF, None if seen else self._solver_call(packed, sample_ids))
            self.solutions = tuple(result.solutions)
            after = [
                packed.restore_rows(unflatten(initial, final_state))
                for initial, final_state in zip(states, result.states, strict=True)
            ]
            return packed.unpack(result.y_PF), after[0] if len(after) == 1 else tuple(after)

    def _run_in_graph(
        self, x: torch.Tensor, state: Any, programs: list[list[str]], parameters: list[list[str]]
    ) -> tuple[Any, Any]:
        """What Dynamo traces: a registered operator for each layer."""
        x_TBF = x.transpose(0, 1) if self.batch_first else x
        states = self._states(state, x_TBF.shape[1])
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

    def _loop_over_steps(self, x: Any, state: Any, lengths: Any) -> tuple[Any, Any]:
        """A Python loop of operators alone, for those who look at them: transforms, tracers, modes, subclasses."""
        if values_of(x) is not x:
            raise StrettoError(
                f"{type(x).__name__} cannot be exported as an input", fix="Export a padded batch and lengths=."
            )
        x_BTF = x if self.batch_first else x.transpose(0, 1)
        num_rows = x_BTF.shape[0]
        real_BT = None
        if lengths is not None:
            lengths_B1, steps_T = lengths.to(x.device)[:, None], torch.arange(x_BTF.shape[1], device=x.device)
            real_BT = steps_T < lengths_B1
            reversed_BT = torch.where(real_BT, lengths_B1 - 1 - steps_T, steps_T)
            rows_B1 = torch.arange(num_rows, device=x.device)[:, None]
            # Padding may hold anything, and NaN times a gradient of zero is NaN.
            x_BTF = x_BTF.masked_fill(~real_BT.reshape(*real_BT.shape, *[1] * (x_BTF.dim() - 2)), 0)
        ends = []
        states = self._states(state, num_rows)
        num_directions = 2 if self.bidirectional else 1
        for number in range(self.num_layers):
            if number and self.dropout:
                x_BTF = functional.dropout(x_BTF, self.dropout, training=self.training)
            outputs = []
            for index in range(number * num_directions, (number + 1) * num_directions):
                given_BTF = x_BTF
                if index % num_directions:
                    given_BTF = x_BTF.flip(1) if real_BT is None else x_BTF[rows_B1, reversed_BT]
                y_BTF, after = loop_over_steps(self.cells[index], given_BTF, states[index], real_BT=real_BT)
                if index % num_directions:
                    y_BTF = y_BTF.flip(1) if real_BT is None else y_BTF[rows_B1, reversed_BT]
                outputs.append(y_BTF[..., None] if self.bidirectional and y_BTF.dim() == 2 else y_BTF)
                ends.append(unflatten(states[index], flatten(after)))
            x_BTF = outputs[0] if len(outputs) == 1 else torch.cat(outputs, dim=-1)
        y = x_BTF if self.batch_first else x_BTF.transpose(0, 1)
        return y, ends[0] if len(ends) == 1 else tuple(ends)

    def _assemble(
        self, packed: PackedBatch, states: list[Any], cells: list["_Inspected"], *, backend: Backend
    ) -> list[list[Direction]]:
        """The layers, each direction with its program, its tensors and its initial state."""
        built: dict[int, Built] = {}

        def direction(index: int, features: tuple[int, ...]) -> Direction:
            cell, initial = cells[index], states[index]
            _check_width(cell.module, features, packed.x_PF)
            _check_devices(cell, packed.x_PF, initial)
            built[index] = self._build(cell, features, packed.x_PF.dtype, initial, backend=backend)
            _warn_if_slower(cell.module, built[index], wanted=backend)
            variants = None if self.solver == "serial" else self._variants(cell.module, initial, index)
            return Direction(built[index].program, cell.tensors, flatten(packed.sort_rows(initial)), variants)

        def output_shape(index: int, features: tuple[int, ...]) -> tuple[int, ...]:
            return _output_shape(built[index], cells[index].module, features, states[index])

        return assemble(
            direction,
            output_shape=output_shape,
            features=tuple(packed.x_PF.shape[1:]),
            num_layers=self.num_layers,
            num_directions=2 if self.bidirectional else 1,
        )

    def _run(
        self, layout: Layout, layers: Sequence[Sequence[Direction]], x_PF: torch.Tensor, call: SolverCall | None
    ) -> StackResult:
        dropout = self.dropout if self.training else 0.0
        try:
            return run_stack(layers, layout, x_PF, dropout=dropout, save=self.save, call=call)
        except RuntimeError as error:
            if x_PF.is_floating_point() or "dtype" not in str(error):
                raise
            raise StrettoError(  # whole numbers are for cells that look them up in a table
                f"{type(self.cells[0]).__name__} cannot take an input of {x_PF.dtype}: {error}",
                fix="Convert it, with x.to(...).",
            ) from error

    def _solver_call(self, packed: PackedBatch, sample_ids: Sequence[int] | torch.Tensor | None) -> SolverCall | None:
        """The solver and the ids of the sequences; None for a sequential run."""
        if not isinstance(self.solver, AbstractSolver):
            return None
        if sample_ids is None:
            return SolverCall(self.solver)
        try:
            ids = [check_int(number, name="sample_ids", at_least=-(1 << 63)) for number in sample_ids]
        except TypeError:
            ids = []
        if len(ids) != packed.layout.num_rows:
            raise StrettoError(
                f"{len(ids)} sample_ids were given for {packed.layout.num_rows} sequences",
                fix="Give one whole number for each sequence.",
            )
        order = range(len(ids)) if packed.order_B is None else packed.order_B.tolist()
        return SolverCall(self.solver, tuple(ids[number] for number in order))

    def _match_dtype(self, x: Any, state: Any, own: torch.dtype | None, *, convert: bool) -> tuple[Any, Any]:
        """The input and state in the dtype of the parameters: converted under autocast, refused otherwise."""
        cell = self.cells[0]
        data = x.data if isinstance(x, PackedSequence) else x
        if convert and own is not None:
            if isinstance(x, PackedSequence):
                x = PackedSequence(data.to(own), x.batch_sizes, x.sorted_indices, x.unsorted_indices)
            elif x.is_floating_point():
                x = x.to(own)
            if state is not None:
                state = map_state(lambda part: part.to(own) if part.is_floating_point() else part, state)
            return x, state
        given = [data, *([] if state is None else flatten(state))]
        wrong = next((t.dtype for t in given if t.is_floating_point() and own is not None and t.dtype != own), None)
        if wrong is not None:
            raise StrettoError(
                f"the input or state is of {wrong} and the parameters of {type(cell).__name__} are of {own}",
                fix="Convert one to the other, with x.to(...) or rnn.to(...).",
            )
        return x, state

    def initial_state(self, batch_size: int) -> Any:
        """The state that `forward` starts from when none is given."""
        made = [_initial(cell, batch_size) for cell in self.cells]
        return made[0] if len(made) == 1 else tuple(made)

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
        features = (input_size,) if input_size else self._last_features or (_input_size(cell.module),)
        dtype = self._last_dtype or _floating_dtype(cell.tensors) or torch.get_default_dtype()
        built = self._build(cell, features, dtype, _initial(cell.module, 1), backend=self.backend)
        return Explanation.of(built, type(cell.module).__name__)

    _last_features: tuple[int, ...] | None = None
    _last_dtype: torch.dtype | None = None

    @property
    def last_built(self) -> Built | None:
        """What ran the last call; None before the first."""
        return next(reversed(self._built.values()), None)

    def _build(
        self, cell: "_Inspected", features: tuple[int, ...], dtype: torch.dtype, initial: Any, *, backend: Backend
    ) -> Built:
        shapes = tuple((part.shape[1:], part.dtype, part.device.type) for part in flatten(initial))
        key = (features, dtype, shapes, backend, cell.fingerprint)
        built = self._built.get(key)
        if built is None:
            self._last_features = self._last_features or features
            self._last_dtype = self._last_dtype or dtype
            built = build(
                cell.module,
                x_shape=features,
                x_dtype=dtype,
                state=initial,
                backend=backend,
                needs_loops=self.solver != "serial",
            )
            self._built[key] = built
        return built

    def _variants(self, cell: nn.Module, initial: Any, place: int) -> CellVariants:
        def program(module: nn.Module, features: tuple[int, ...], dtype: torch.dtype) -> Program:
            return self._build(_inspect(module), features, dtype, initial, backend=self.backend).program

        return CellVariants(cell=cell, build=program, modules=self._held.setdefault(place, {}))

    def _states(self, state: Any, num_rows: int) -> list[Any]:
        made = [_initial(cell, num_rows) for cell in self.cells]
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
        return {**self.__dict__, "_built": {}, "_held": {}, "_in_graphs": {}, "_autotuner": SolverAutotuner()}

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


@final
class _InGraph:
    """A cell of a layer that a compiled graph runs by name, as long as the layer lives."""

    def __init__(self, rnn: RNN, index: int, features: tuple[int, ...], dtype: torch.dtype) -> None:
        self.name = f"rnn:{uuid.uuid4().hex}"  # graphs are stored, and another process must not find another cell
        self._rnn, self._index, self._features, self._dtype = weakref.ref(rnn), index, features, dtype
        with torch.no_grad():
            self._initial = _initial(rnn.cells[index], 1)

    def build(self) -> Built | None:
        """As every call does: what the step depends on may have changed since the graph was compiled."""
        rnn = self._rnn()
        if rnn is None:
            return None
        cell = _inspect(rnn.cells[self._index])
        return rnn._build(cell, self._features, self._dtype, self._initial, backend=rnn.backend)

    def find_program(self) -> TracedProgram | None:
        """The program, if a graph can run it."""
        built = self.build()
        program = None if built is None else built.program
        return program if isinstance(program, TracedProgram) and repeats(program) else None


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


def _output_shape(built: Built, cell: nn.Module, features: tuple[int, ...], initial: Any) -> tuple[int, ...]:
    """The shape of one step of the output."""
    if built.plan is not None:
        return built.plan.graph.y.row_shape
    with torch.enable_grad(), unseen_by_hooks(), torch.random.fork_rng(devices=[]):
        like_part = flatten(initial)
        x = torch.zeros(2, *features, dtype=like_part[0].dtype if like_part else None)
        y, _ = call_cell(cell, x, unflatten(initial, [part.new_zeros(2, *part.shape[1:]) for part in like_part]))
    return tuple(y.shape[1:])


def _initial(cell: nn.Module, num_rows: int) -> Any:
    return cell.initial_state(num_rows)  # type: ignore[operator]


def _make_cells(cell: nn.Module | Sequence[nn.Module], num_layers: int, directions: int) -> list[nn.Module]:
    wanted = num_layers * directions
    if isinstance(cell, (list, tuple, nn.ModuleList)):
        cells = [_check_cell(item) for item in cell]
        if len(cells) != wanted:
            raise StrettoError(
                f"{len(cells)} cells were given for {num_layers} layers of {directions} directions",
                fix=f"Give {wanted} cells, or one to be made again.",
            )
        return cells
    cell = _check_cell(cell)
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


def _check_cell(cell: Any) -> nn.Module:
    """The cell, or one of ours for one of torch's."""
    if isinstance(cell, TORCH_CELLS):
        return cell_from(cell)
    if not isinstance(cell, nn.Module) or not callable(getattr(cell, "initial_state", None)):
        raise StrettoError(
            f"{cell!r} is not a cell",
            fix="Subclass stretto.Cell: give it initial_state(batch_size) and forward(x_t, state).",
        )
    for name, given in (("forward", ("x_t", "state")), ("initial_state", ("batch_size",))):
        try:
            signature = inspect.signature(getattr(cell, name))
        except (TypeError, ValueError):  # not a Python function
            continue
        try:
            signature.bind(*given)
        except TypeError as error:
            raise StrettoError(
                f"{type(cell).__name__}.{name}{signature} cannot be called as {name}({', '.join(given)}): {error}",
                fix=f"Let it take {' and '.join(given)}, and nothing else without a default.",
            ) from None
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
        wrong = next((t.device for t in tensors if t.device != x.device and t.dim() > 0), None)
        if wrong is not None:
            raise StrettoError(
                f"the input is on {x.device} and the {name} of {type(cell.module).__name__} on {wrong}",
                fix="Move them to one device, with x.to(...) or rnn.to(...).",
            )


def _warn_if_slower(cell: nn.Module, built: Built, *, wanted: Backend) -> None:
    """Say once of each class and reason that something slower runs than what was asked for."""
    fastest = built.choices[0][0] if wanted == "auto" else wanted
    if built.backend != fastest:
        warn_once(
            f"{type(cell).__name__} runs by backend {built.backend!r} ({built.description}), not by {fastest!r}: "
            f"{dict(built.choices)[fastest]}. Change the cell so that this is not so (rnn.explain() has the details), "
            f"or choose backend={built.backend!r}."
        )


def _unusual(data: torch.Tensor, state: Any, cells: Sequence["_Inspected"]) -> str:
    """Why nothing but PyTorch's operators can read a call's tensors; empty if there is no such reason."""
    if data.is_meta:
        return "the input is on meta"
    states = [] if state is None else flatten(state)
    return unusual_tensor((data, *states, *(tensor for cell in cells for tensor in cell.tensors.values())))


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
        y, _ = call_cell(cell, x, _initial(cell, 2))
    return int(y.shape[-1])


def _check(num_layers: int, dropout: float, backend: str, save: str, solver: Any) -> None:
    check_int(num_layers, name="num_layers")
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

    `dtype` is that of its parameters; None if there are several, and inputs may be of any.
    """

    module: nn.Module
    tensors: dict[str, torch.Tensor]
    dtype: torch.dtype | None
    fingerprint: tuple[Any, ...]


def _inspect(cell: nn.Module) -> _Inspected:
    """Types, settings, parameter shapes and hooks of all modules: when any of it changes, the step is traced again.

    One pass over the modules instead of three, because it is made on every call. Tensors that are there under several
    names are listed once, as in `named_parameters`.
    """
    found: list[Any] = [_Same(cell)]
    parameters: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    seen: set[int] = set()
    for name, module in cell.named_modules():
        found.append((name, type(module), len(module._forward_hooks) + len(module._forward_pre_hooks)))
        for key, value in module.__dict__.items():
            if key not in _MODULE_ATTRIBUTES:
                found.append((key, value if isinstance(value, _VALUES) else _mark(value)))
        for tensors, own in ((parameters, module._parameters), (buffers, module._buffers)):
            for key, tensor in own.items():
                found.append((key, None if tensor is None else (tensor.shape, tensor.dtype, tensor.device)))
                if tensor is not None and id(tensor) not in seen:
                    seen.add(id(tensor))
                    tensors[f"{name}.{key}" if name else key] = tensor
    dtypes = {tensor.dtype for tensor in parameters.values() if tensor.is_floating_point()}
    return _Inspected(cell, parameters | buffers, dtypes.pop() if len(dtypes) == 1 else None, tuple(found))


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
