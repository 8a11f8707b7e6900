"""Tracing one step of a cell to a graph of operators.

A `_Recorder` is the hook that `make_fx` is built on, without its overhead: a step is recorded in about a millisecond.
Every function is recorded at two batch sizes. The two recordings must hold the same operators, wired alike; an integer
that differs between them must be a multiple of the batch size, and becomes a `BatchDim`:

    batch of 3    linear(x (3, 8))  ->  chunk into (3, 4)
    batch of 5    linear(x (5, 8))  ->  chunk into (5, 4)       so the graph says (rows, 4)

What cannot be described this way raises `Untraceable`, and the cell then runs as it is.
"""

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import nn
from torch.func import functional_call
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.errors import StrettoError
from stretto.graph.node import BatchDim, Node, T, map_leaves
from stretto.state import describe, flatten, unflatten

TRACED_BATCH_SIZES: Final = (3, 5)

_RANDOM_IN_PLACE: Final = {"bernoulli_", "uniform_", "normal_", "exponential_"}
_FILL_VALUES: Final = dict.fromkeys("zeros zeros_like new_zeros empty_like".split(), 0.0) | dict.fromkeys(
    "ones ones_like new_ones".split(), 1.0
)
_RANDOM_METHODS: Final = {"rand_like": "uniform_", "randn_like": "normal_", "rand": "uniform_", "randn": "normal_"}
_READS_VALUES: Final = {"_local_scalar_dense", "nonzero", "item", "masked_select", "unique", "is_nonzero"}
_READS_MEMORY: Final = {"numpy", "__array__", "__dlpack__", "tolist", "data_ptr"}


class Untraceable(Exception):  # noqa: N818 - not an error: the step then runs as it is, and explain says why
    """The function cannot be described as a fixed graph of operators; the message says why."""


def random_fill(
    shape: Sequence[int], method: str, arguments: tuple[Any, ...], dtype: torch.dtype, device: Any
) -> torch.Tensor:
    """Random numbers that depend only on their shape, so that all steps can be drawn at once."""
    return getattr(torch.empty(tuple(shape), dtype=dtype, device=device), method)(*arguments)  # type: ignore[no-any-return]


def constant_fill(shape: Sequence[int], value: float, dtype: torch.dtype, device: Any) -> torch.Tensor:
    """A tensor with one value everywhere."""
    return torch.full(tuple(shape), value, dtype=dtype, device=device)


@dataclass(slots=True)
class Recording:
    """What one run of a function did: its nodes in order, the node of each tensor, and tensors it found elsewhere."""

    nodes: list[Node]
    of_tensor: dict[int, Node]
    constants: dict[Node, torch.Tensor]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Appends a node for every operator that runs inside `with recorder:`.

    Tensors are known by `id`, so all of them are kept alive. An operator that writes in place becomes its functional
    twin, and the tensor's id then stands for the new node; that is only right if no other tensor shares the memory.
    """

    def __init__(self, *, blocks_no_grad: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks_no_grad = blocks_no_grad
        self.recording = Recording([], {}, {})
        self.alive: list[torch.Tensor] = []
        self.sharers: dict[int, set[int]] = {}  # memory address -> ids of the tensors that use it
        self.given: set[int] = set()
        self.counts: dict[str, int] = {}
        self.names: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The wrapper that torch would put around the hook imports its whole compiler, which takes seconds.
        return False

    def enter(self, tensor: torch.Tensor, name: str) -> Node:
        """Name an input."""
        node = Node(self._unique_name(name), None, shape=tuple(tensor.shape), dtype=tensor.dtype)
        self.given.add(id(tensor))
        self._bind(tensor, node)
        return node

    def look_up(self, value: Any) -> Any:
        """The node of a tensor; a tensor never seen before is a constant. Anything else is itself."""
        if not isinstance(value, torch.Tensor):
            return value
        node = self.recording.of_tensor.get(id(value))
        if node is None:
            node = self.enter(value, "constant")
            self.recording.constants[node] = value
        return node

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        base = func.overloadpacket.__name__
        if base in _READS_VALUES:
            raise Untraceable(
                f"the step reads values with {base}, so what it does depends on the data; use torch.where instead"
            )
        if base == "detach" and isinstance(args[0], torch.Tensor) and id(args[0]) not in self.recording.of_tensor:
            return func(*args, **kwargs)
        node_args, node_kwargs = map_leaves(tuple(args), self.look_up), map_leaves(kwargs, self.look_up)
        kwargs.pop("generator", None)
        node_kwargs.pop("generator", None)
        result = func(*args, **kwargs)
        if base in _RANDOM_IN_PLACE:
            self._rebind(func, args[0], self._random_node(args[0], base, node_args[1:], node_kwargs))
        elif func._schema.is_mutable:
            self._rebind(func, args[0], Node(self._unique_name(base), _functional(func), node_args, node_kwargs))
        elif (node := self._shape_only(base, result, node_args)) is not None:
            self._bind(result, node)
        elif isinstance(result, torch.Tensor):
            if id(result) not in self.recording.of_tensor:
                name = self._unique_name(base)
                self._bind(result, Node(name, func, node_args, node_kwargs, tuple(result.shape), result.dtype))
        else:
            self._bind_several(func, base, result, node_args, node_kwargs)
        if self.blocks_no_grad and not torch.is_grad_enabled():
            self._detach(result)
        return result

    def _unique_name(self, base: str) -> str:
        while True:
            count = self.counts[base] = self.counts.get(base, -1) + 1
            name = base if count == 0 else f"{base}_{count}"
            if name not in self.names:
                self.names.add(name)
                return name

    def _bind(self, tensor: torch.Tensor, node: Node) -> None:
        self.alive.append(tensor)
        self.recording.of_tensor[id(tensor)] = node
        self.recording.nodes.append(node)
        if tensor.device.type != "meta":
            self.sharers.setdefault(tensor.untyped_storage().data_ptr(), set()).add(id(tensor))

    def _bind_several(self, func: Any, base: str, result: Any, args: Any, kwargs: Any) -> None:
        """An operator with several results: one node without a dtype, and one `getitem` for each result."""
        node = Node(self._unique_name(base), func, args, kwargs)
        self.recording.nodes.append(node)
        for index, item in enumerate(result):
            if isinstance(item, torch.Tensor):
                name = self._unique_name(base)
                self._bind(item, Node(name, operator.getitem, (node, index), {}, tuple(item.shape), item.dtype))

    def _rebind(self, func: Any, tensor: torch.Tensor, node: Node) -> None:
        """An operator that writes in place makes a new value, if no other tensor uses the memory."""
        others = self.sharers.get(tensor.untyped_storage().data_ptr(), set()) - {id(tensor)}
        if self.blocks_no_grad and tensor.requires_grad and not torch.is_grad_enabled():
            raise Untraceable(f"the step writes in place with {func}, hidden from its gradient by no_grad")
        if tensor.device.type == "meta" or id(tensor) in self.given or others:
            raise Untraceable(
                f"the step writes in place with {func} into memory that something else reads; make a new tensor instead"
            )
        node.shape, node.dtype = tuple(tensor.shape), tensor.dtype
        self.recording.of_tensor[id(tensor)] = node
        self.recording.nodes.append(node)

    def _detach(self, result: Any) -> None:
        """What the cell computes under `no_grad` passes no gradient: cut it off from its inputs."""
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                source, detach = self.recording.of_tensor[id(tensor)], torch.ops.aten.detach.default
                cut = Node(self._unique_name("detach"), detach, (source,), {}, source.shape, source.dtype)
                self.recording.of_tensor[id(tensor)] = cut
                self.recording.nodes.append(cut)

    def _random_node(self, tensor: torch.Tensor, method: str, args: Any, kwargs: Any) -> Node:
        arguments = (list(tensor.shape), method, (*args, *kwargs.values()), tensor.dtype, tensor.device)
        return Node(self._unique_name(method.rstrip("_")), random_fill, arguments)

    def _shape_only(self, base: str, result: Any, args: Any) -> Node | None:
        """A node for operators that read only the shape of a tensor, and so do not depend on it."""
        if not isinstance(result, torch.Tensor):
            return None
        shape, dtype = tuple(result.shape), result.dtype
        value: Any = _FILL_VALUES.get(base)
        if base == "scalar_tensor":
            value = args[0]
        if base in {"full_like", "new_full", "full", "fill"}:
            value = args[1] if base != "new_full" else args[2]
        if value is not None and not isinstance(value, Node):
            arguments = (list(shape), value, dtype, result.device)
            return Node(self._unique_name(base.removesuffix("_like")), constant_fill, arguments, {}, shape, dtype)
        if base in _RANDOM_METHODS:
            node = self._random_node(result, _RANDOM_METHODS[base], (), {})
            node.shape, node.dtype = shape, dtype
            return node
        return None


class _MemoryReads(TorchFunctionMode):
    """Refuses what reads a tensor's memory without an operator, so that the recorder cannot see it."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS_MEMORY:
            raise Untraceable(f"the step reads memory with {name}, so what it does depends on the data")
        return func(*args, **(kwargs or {}))


def _functional(func: Any) -> Any:
    """The operator that does the same without writing in place."""
    name = func.overloadpacket.__name__
    overload = func._overloadname
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    if not name.endswith("_") or packet is None or overload not in packet.overloads():
        raise Untraceable(f"the step writes in place with {func}")
    return getattr(packet, overload)


def record(run: "Callable[[_Recorder, int], T]", *, blocks_no_grad: bool = False) -> tuple[Recording, T]:
    """Record a function at both batch sizes; random numbers it draws do not disturb the caller's.

    Args:
        run: Takes the number of rows, names its inputs with `recorder.enter(tensor, name)`, does its work inside
            `with recorder:`, and returns anything.
        blocks_no_grad: Whether what runs under `torch.no_grad` is recorded as cut off from its inputs.

    Returns:
        The first recording, with sizes that follow the number of rows as `BatchDim`s, and what `run` returned there.

    Raises:
        Untraceable: The two runs did different things.
    """
    found = []
    for rows in TRACED_BATCH_SIZES:
        recorder = _Recorder(blocks_no_grad=blocks_no_grad)
        with torch.enable_grad(), torch.random.fork_rng(devices=[]):
            found.append((recorder.recording, run(recorder, rows)))
    (one, result), (other, _) = found
    if [node.op for node in one.nodes] != [node.op for node in other.nodes]:
        raise Untraceable("the step does different things for different numbers of rows")
    twin = dict(zip(one.nodes, other.nodes, strict=True))
    for first, second in twin.items():
        first.shape = tuple(_merge_sizes(a, b) for a, b in zip(first.shape, second.shape, strict=True))
        first.args = _merge_arguments(first.args, second.args, twin)
        first.kwargs = _merge_arguments(first.kwargs, second.kwargs, twin)
    return one, result


def _merge_sizes(first: Any, second: Any) -> Any:
    if first == second:
        return first
    small, large = TRACED_BATCH_SIZES
    if first * large == second * small and first % small == 0:
        return BatchDim(first // small)
    raise Untraceable(f"a size is {first} for {small} rows and {second} for {large} rows")


def _merge_arguments(first: Any, second: Any, twin: dict[Node, Node]) -> Any:
    if isinstance(first, Node):
        if twin[first] is not second:
            raise Untraceable("the step connects its operators differently for different numbers of rows")
        return first
    if type(first) is not type(second):
        raise Untraceable("the step does different things for different numbers of rows")
    if isinstance(first, (tuple, list)):
        if len(first) != len(second):
            raise Untraceable("the step does different things for different numbers of rows")
        return type(first)(_merge_arguments(a, b, twin) for a, b in zip(first, second, strict=True))
    if isinstance(first, dict):
        return {key: _merge_arguments(value, second[key], twin) for key, value in first.items()}
    if isinstance(first, bool) or not isinstance(first, int):
        if first != second and not (first != first and second != second):  # noqa: PLR0124 - NaN equals NaN here
            raise Untraceable("the step uses a number that depends on the number of rows")
        return first
    return _merge_sizes(first, second)


@dataclass(slots=True)
class StepGraph:
    """One step `(x_t, state) -> (y_t, state')` as nodes in the order they ran.

    Attributes:
        nodes: All nodes, inputs included.
        x: The step's input.
        states: The state before the step, part by part.
        next_states: The state after it.
        y: The step's output.
        parameters: Parameters and buffers of the cell by name, as they are used.
        constants: Tensors the cell reads that are neither parameters nor buffers.
    """

    nodes: list[Node]
    x: Node
    states: list[Node]
    next_states: list[Node]
    y: Node
    parameters: dict[str, Node]
    constants: dict[Node, torch.Tensor]

    @property
    def changing(self) -> dict[Node, Node]:
        """Each part of the state that changes, with what it becomes."""
        return {old: new for old, new in zip(self.states, self.next_states, strict=True) if new is not old}


def trace(cell: nn.Module, *, x_shape: tuple[int, ...], x_dtype: torch.dtype, state: Any) -> StepGraph:
    """Record one step of `cell`.

    Args:
        cell: Called as `cell(x_t, state)`.
        x_shape: Sizes of a row of the input.
        x_dtype: Of the input.
        state: A state for any number of rows, for its structure, shapes and dtypes.

    Raises:
        Untraceable: The step is not a fixed graph of operators; the message says why.
        StrettoError: The cell does not keep to the contract of a cell.
    """
    tensors: Mapping[str, torch.Tensor] = {**dict(cell.named_parameters()), **dict(cell.named_buffers())}
    device = next((tensor.device for tensor in (*tensors.values(), *flatten(state))), torch.device("cpu"))
    row_shapes = [(tuple(part.shape[1:]), part.dtype) for part in flatten(state)]

    def run(recorder: _Recorder, rows: int) -> dict[str, Any]:
        x = _example((rows, *x_shape), x_dtype, device)
        parts = [_example((rows, *shape), dtype, device) for shape, dtype in row_shapes]
        found: dict[str, Any] = {"x": recorder.enter(x, "x")}
        found["states"] = [recorder.enter(part, f"state{index}") for index, part in enumerate(parts)]
        found["parameters"] = {name: recorder.enter(t, name.replace(".", "_")) for name, t in tensors.items()}
        with recorder, _MemoryReads():
            y, after = _try_step(cell, x, unflatten(state, parts))
        _refuse_custom_gradients(recorder, [y, *flatten(after)])
        found["y"], found["next_states"] = recorder.look_up(y), [recorder.look_up(part) for part in flatten(after)]
        return found

    recording, found = record(run, blocks_no_grad=True)
    return StepGraph(nodes=recording.nodes, constants=recording.constants, **found)


def call_cell(
    cell: nn.Module, x: torch.Tensor, state: Any, *, tensors: Mapping[str, torch.Tensor] | None = None
) -> tuple[torch.Tensor, Any]:
    """One step of a cell of ours, or of one of torch's, which return only the next state.

    Args:
        cell: The cell.
        x: The step's input.
        state: The state before it.
        tensors: What to take for parameters and buffers; the cell's own by default.

    Raises:
        StrettoError: The result is not an output and a state like the one before.
    """
    result = cell(x, state) if tensors is None else functional_call(cell, dict(tensors), (x, state))
    if isinstance(cell, nn.LSTMCell):
        return result[0], result
    if isinstance(cell, (nn.GRUCell, nn.RNNCell)):
        return result, result
    if not isinstance(result, tuple) or len(result) != 2 or not isinstance(result[0], torch.Tensor):
        raise StrettoError(
            f"{type(cell).__name__}.forward returned {describe(result)}, not an output and the next state",
            fix="Return (y_t, new_state) from forward.",
        )
    if not _has_tensors_as_sizes():
        _check_step(cell, x, *result, state)
    return result


def _has_tensors_as_sizes() -> bool:
    """Whether `torch.jit.trace` runs, to which a check of sizes would look like work of the cell."""
    return torch._C._get_tracing_state() is not None


def check_outputs(cell: nn.Module, outputs: Sequence[torch.Tensor]) -> None:
    """An error unless the outputs of all steps are alike."""
    if _has_tensors_as_sizes():
        return
    kinds = {f"{tuple(y.shape[1:])} {y.dtype}" for y in outputs}
    if len(kinds) > 1:
        raise StrettoError(
            f"{type(cell).__name__}.forward returned outputs with rows of {' and of '.join(sorted(kinds))}",
            fix="Return outputs of the same shape and dtype at every step.",
        )


def _example(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor that requires gradients but is no leaf, like those of a real call."""
    zeros = torch.zeros(shape, dtype=dtype, device=device)
    return zeros.requires_grad_().clone() if dtype.is_floating_point else zeros


def _try_step(cell: nn.Module, x: torch.Tensor, state: Any) -> tuple[torch.Tensor, Any]:
    try:
        return call_cell(cell, x, state)
    except (Untraceable, StrettoError):
        raise
    except Exception as error:  # if it is the cell's own, it comes again when the cell runs as it is
        raise Untraceable(f"the step failed when it was traced: {type(error).__name__}: {error}") from error


def _check_step(cell: nn.Module, x: torch.Tensor, y: torch.Tensor, after: Any, before: Any) -> None:
    name = type(cell).__name__
    if not _is_alike(before, after):
        was, new = describe(before), describe(after)
        if was == new:
            was, new = (
                ", ".join(f"{tuple(part.shape[1:])} {part.dtype} on {part.device}" for part in flatten(state))
                for state in (before, after)
            )
        raise StrettoError(
            f"{name}.forward takes a state with rows of {was} and returns one with rows of {new}",
            fix="Return a state of the same structure, shapes and dtypes as it was given.",
        )
    if y.shape[:1] != x.shape[:1]:
        raise StrettoError(
            f"{name}.forward returned an output of shape {tuple(y.shape)}",
            fix="Return one output row for each row of x_t.",
        )


def _is_alike(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        is_tensor = isinstance(other, torch.Tensor)
        return is_tensor and one.shape == other.shape and one.dtype == other.dtype and one.device == other.device
    are_nested = isinstance(one, (tuple, list)) and isinstance(other, (tuple, list)) and len(one) == len(other)
    return are_nested and all(map(_is_alike, one, other))


def _refuse_custom_gradients(recorder: _Recorder, results: Sequence[torch.Tensor]) -> None:
    """Make sure that the gradient of what was recorded is that of its operators.

    Raises:
        Untraceable: A function with a custom gradient, or a hook, takes part in it.
    """
    seen: set[Any] = set()
    waiting: list[Any] = [tensor.grad_fn for tensor in results]
    while waiting:
        step = waiting.pop()
        if step is None or step in seen:
            continue
        seen.add(step)
        if isinstance(step, torch.autograd.function.BackwardCFunction):
            name = type(step).__name__.removesuffix("Backward")
            raise Untraceable(f"the step uses {name}, which has a custom gradient")
        waiting.extend(item for item, _ in step.next_functions)
    if any(tensor._backward_hooks for tensor in recorder.alive if id(tensor) not in recorder.given):
        raise Untraceable("the step hooks into its gradient")
