"""Tracing one step of a cell to a graph of operators.

A `_Recorder` is the hook that `make_fx` is built on, without its overhead: a step is recorded in about a millisecond.
Every function is recorded at two batch sizes. The two recordings must have the same operators and edges; an integer
that differs between them must be a multiple of the batch size, and becomes a `BatchDim`:

    batch of 3    linear(x (3, 8))  ->  chunk into (3, 4)
    batch of 5    linear(x (5, 8))  ->  chunk into (5, 4)       so the graph says (rows, 4)

What cannot be described this way raises `Untraceable`, and the cell then runs as it is.
"""

import contextlib
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.errors import StrettoError
from stretto.graph.custom_gradient import CustomGradient, Opaque, foreign_inputs, intercept_calls, straight_through
from stretto.graph.decompose import decomposition_of
from stretto.graph.draws import DRAWS, without_validation
from stretto.graph.equations import equations_of
from stretto.graph.memory import CannotPut, Memory, View, Write, key_of, look_through, overlap, place_of, put, steps_to
from stretto.graph.node import BatchDim, Node, T, leaves_in, map_leaves
from stretto.graph.side_effects import SideEffects, attribute_tensors, holders_of
from stretto.graph.user_code import Line, is_in_check, line_of_user, whereabouts
from stretto.signature import PLAIN, Packing, StepSignature, call_step
from stretto.state import flatten, unflatten

TRACED_BATCH_SIZES: Final = (3, 5)

_RANDOM_IN_PLACE: Final = {"bernoulli_", "uniform_", "normal_", "exponential_"}
_FILL_VALUES: Final = dict.fromkeys("zeros zeros_like new_zeros empty_like new_empty".split(), 0.0) | dict.fromkeys(
    "ones ones_like new_ones".split(), 1.0
)
_RANDOM_METHODS: Final = {"rand_like": "uniform_", "randn_like": "normal_", "rand": "uniform_", "randn": "normal_"}
_READS_VALUES: Final = {"_local_scalar_dense", "equal", "nonzero", "item", "masked_select", "unique", "is_nonzero"}
_READS_MEMORY: Final = {"numpy", "__array__", "__dlpack__", "tolist", "data_ptr"}

_DERIVATIVES: Final = {torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward}


aten = torch.ops.aten


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
    """What one run of a function did: its nodes in order, the node of each tensor, and tensors it found elsewhere.

    Of those `outside` has the ones that were there before.
    """

    nodes: list[Node]
    of_tensor: dict[int, Node]
    constants: dict[Node, torch.Tensor]
    outside: list[torch.Tensor]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Appends a node for every operator that runs inside `with recorder:`.

    Tensors are known by `id`, so all of them are kept alive. An operator that writes in place becomes its functional
    twin, and the tensor's id then stands for the new node; views of the same memory learn of it when they are read.
    """

    def __init__(self, *, blocks_no_grad: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.blocks_no_grad = blocks_no_grad
        self.assumes_checks = False
        self.finds_lines = False
        self.line: Line | None = None
        self.recording = Recording([], {}, {}, [])
        self.alive: list[torch.Tensor] = []
        self.views: dict[int, View] = {}
        self.memories: dict[int, Memory] = {}
        self.custom: set[Any] = set()
        self.counts: dict[str, int] = {}
        self.names: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The wrapper that torch would put around the hook imports its whole compiler, which takes seconds.
        return False

    def enter(self, tensor: torch.Tensor, name: str, *, owner: str = "the step's input") -> Node:
        """Name an input; `owner` says in words whose it is, if the step must not write to it."""
        node = Node(self._unique_name(name), None, shape=tuple(tensor.shape), dtype=tensor.dtype)
        self._bind(tensor, node)
        self.views[id(tensor)].memory.owner = owner
        return node

    def look_up(self, value: Any) -> Any:
        """The node of a tensor; a tensor never seen before is a constant. Anything else is itself."""
        if not isinstance(value, torch.Tensor):
            return value
        node = self.recording.of_tensor.get(id(value))
        if node is None:
            node = self.enter(value, "constant", owner="a tensor from outside of the step")
            self.recording.constants[node] = value
            return node
        view = self.views[id(value)]
        if view.seen < len(view.memory.writes):
            self._catch_up(value, view)
            return self.recording.of_tensor[id(value)]
        return node

    def __torch_dispatch__(  # noqa: PLR0911, PLR0912 - one branch per kind of operator
        self, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        base = func.overloadpacket.__name__
        if kwargs.get("generator") is not None:
            raise Untraceable(
                f"the step draws with {base} from its own torch.Generator; draw without one, or before the loop, as an "
                "input"
            )
        if base in _READS_VALUES:
            if self.assumes_checks and is_in_check():
                return func(*args, **kwargs)
            raise Untraceable(
                f"the step reads values with {base}{whereabouts()}, so what it does depends on the data; "
                "use torch.where instead, or set assume_checks_pass = True on the cell or function if it is a check"
            )
        if base == "detach" and isinstance(args[0], torch.Tensor) and id(args[0]) not in self.recording.of_tensor:
            return func(*args, **kwargs)
        if base == "lift_fresh" and args[0].numel() == 1 and not args[0].is_complex():
            # A number that the step makes a tensor of.
            made = func(*args, **kwargs)
            arguments = (list(made.shape), made.item(), made.dtype, made.device)
            self._bind(
                made, Node(self._unique_name("full"), constant_fill, arguments, {}, tuple(made.shape), made.dtype)
            )
            return made
        if base in DRAWS and any(isinstance(item, torch.Tensor) for item in (*args, *kwargs.values())):
            kwargs.pop("generator", None)
            with self:
                return DRAWS[base](*args, **kwargs)
        if func._schema.is_mutable:
            return self._write(func, base, args, kwargs)
        if (simpler := decomposition_of(func)) is not None:
            made = self._decomposed(simpler, args, kwargs)
            if made is not NotImplemented:
                return made
        node_args, node_kwargs = map_leaves(tuple(args), self.look_up), map_leaves(kwargs, self.look_up)
        kwargs.pop("generator", None)
        node_kwargs.pop("generator", None)
        result = func(*args, **kwargs)
        if (node := self._shape_only(base, result, node_args)) is not None:
            self._bind(result, node)
        elif isinstance(result, torch.Tensor):
            if id(result) not in self.recording.of_tensor:
                name = self._unique_name(base)
                self._bind(result, Node(name, func, node_args, node_kwargs, tuple(result.shape), result.dtype))
                self._note_views(func, args, kwargs, [result])
        else:
            self._bind_several(func, base, result, node_args, node_kwargs)
            self._note_views(func, args, kwargs, result)
        if self.blocks_no_grad and not torch.is_grad_enabled():
            self._detach(result)
        return result

    def _decomposed(self, simpler: "Callable[..., Any]", args: Any, kwargs: Any) -> Any:
        """What an operator's decomposition makes of its arguments, recorded; `NotImplemented` if it cannot."""
        start = len(self.recording.nodes)
        try:
            with self:
                made = simpler(*args, **kwargs)
        except (NotImplementedError, AttributeError, TypeError):
            made = NotImplemented
        if any(getattr(node.op, "namespace", "") == "prims" for node in self.recording.nodes[start:]):
            made = NotImplemented  # these are simpler only for compilers, and have no derivative
        if made is NotImplemented:
            del self.recording.nodes[start:]
        given = {id(leaf) for leaf in leaves_in((args, kwargs)) if isinstance(leaf, torch.Tensor)}
        if isinstance(made, torch.Tensor) and id(made) in given:
            with self:
                return aten.clone.default(made)
        return made

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
        node.line = line_of_user() if self.finds_lines and node.op is not None else self.line
        key = key_of(tensor)
        memory = self.memories.get(key)
        if memory is None:
            memory = self.memories[key] = Memory(tensor, node)
        self.views[id(tensor)] = View(memory, seen=len(memory.writes))

    def _bind_several(self, func: Any, base: str, result: Any, args: Any, kwargs: Any) -> None:
        """An operator with several results: one node without a dtype, and one `getitem` for each result."""
        if base.startswith("unsafe_"):
            # The parts are written to, as tensors of their own.
            func = getattr(getattr(aten, base.removeprefix("unsafe_")), func._overloadname)
        node = Node(self._unique_name(base), func, args, kwargs)
        node.line = line_of_user() if self.finds_lines else self.line
        self.recording.nodes.append(node)
        for index, item in enumerate(result):
            if isinstance(item, torch.Tensor):
                name = self._unique_name(base)
                self._bind(item, Node(name, operator.getitem, (node, index), {}, tuple(item.shape), item.dtype))

    def _note_views(self, func: Any, args: Any, kwargs: Any, results: Sequence[Any]) -> None:
        """How results that look at an argument's memory came to do so."""
        first = results[0] if results else None
        if not isinstance(first, torch.Tensor) or not args or not isinstance(args[0], torch.Tensor):
            return
        source = self.views.get(id(args[0]))
        if source is None or self.views[id(first)].memory is not source.memory:
            return
        for result, step in zip(results, steps_to(func, args, kwargs, results), strict=True):
            if func is aten.detach.default and not args[0].requires_grad:
                # Equivalent to its argument; torch's own factories return such tensors.
                self.views[id(result)].steps = source.steps
                if source.memory.root is args[0]:
                    source.memory.root = result
            else:
                self.views[id(result)].steps = (*source.steps, step)

    # Writes in place; see `memory.py`

    def _write(self, func: Any, base: str, args: Any, kwargs: Any) -> Any:
        """An operator that writes in place: the new contents of what it writes to, as a node."""
        target = args[0] if args else None
        if not isinstance(target, torch.Tensor) or not base.endswith("_"):
            raise Untraceable(f"the step writes in place with {func}")
        self.look_up(target)
        if torch.Tag.inplace_view in func.tags:
            return self._view_in_place(func, target, args, kwargs)
        view = self.views[id(target)]
        memory = view.memory
        if memory.owner.startswith(("the parameter", "the buffer", "a tensor")):
            raise Untraceable(
                f"the step writes in place with {func} to {memory.owner}{whereabouts()}, which outlives it; "
                "make it part of the state"
            )
        hidden = target.requires_grad or memory.root.requires_grad
        hidden = view.goes_through("detach") if torch.is_grad_enabled() else hidden
        hidden = self.blocks_no_grad and (hidden or (target.requires_grad and not memory.root.requires_grad))
        if hidden and not self._is_unread(memory):
            raise Untraceable(
                f"the step writes in place with {func}, hidden by no_grad or detach from a gradient that reads it; "
                "write it without these, or out of place"
            )
        node = self._record_write(func, base, target, args, kwargs)
        node = self._pass_gradient_through(target, node) if hidden else node
        kwargs.pop("generator", None)
        result = func(*args, **kwargs)
        memory.writes.append(Write(place_of(target), view.steps, self._stand_in(target, node)))
        view.seen = len(memory.writes)
        self.recording.of_tensor[id(target)] = self._add_detach(node) if hidden and not target.requires_grad else node
        return result

    def _is_unread(self, memory: Memory) -> bool:
        """Whether no gradient reads what was in a memory: neither that of what made it, nor of who read it since."""
        if memory.writes or memory.root.grad_fn is None or memory.node.op is None:
            return False
        of_memory = {self.recording.of_tensor[index] for index, view in self.views.items() if view.memory is memory}
        for node in self.recording.nodes:
            if node not in of_memory and any(item in of_memory for item in node.inputs):
                return False
        step = memory.root.grad_fn
        saved = (getattr(step, name) for name in dir(step) if name.startswith("_saved_"))
        return not any(isinstance(item, torch.Tensor) and key_of(item) == key_of(memory.root) for item in saved)

    def _pass_gradient_through(self, target: torch.Tensor, node: Node) -> Node:
        """A value that was written unseen by autograd: the gradient goes where it went before."""
        before = self.look_up(target)
        before = before.args[0] if before.label == "detach" else before
        hard, soft = self._stand_in(target, node), self._stand_in(target, before)
        with torch.enable_grad(), self:
            made = straight_through(hard, soft)
        return self.look_up(made)  # type: ignore[no-any-return]

    def _view_in_place(self, func: Any, target: torch.Tensor, args: Any, kwargs: Any) -> Any:
        """`x.unsqueeze_(0)`: the tensor is then the view that the functional twin makes."""
        with self:
            made = _functional(func)(*args, **kwargs)
            node = self.look_up(made)
        self.recording.of_tensor[id(target)], self.views[id(target)] = node, self.views[id(made)]
        return func(*args, **kwargs)

    def _record_write(self, func: Any, base: str, target: torch.Tensor, args: Any, kwargs: Any) -> Node:
        """What a write in place leaves in its target."""
        if base in _RANDOM_IN_PLACE and not any(isinstance(item, torch.Tensor) for item in args[1:]):
            node_args, node_kwargs = map_leaves(tuple(args[1:]), self.look_up), map_leaves(kwargs, self.look_up)
            node_kwargs.pop("generator", None)
            node = self._random_node(target, base, node_args, node_kwargs)
            node.shape, node.dtype = tuple(target.shape), target.dtype
            self.recording.nodes.append(node)
            return node
        with self:
            made: torch.Tensor
            if base == "copy_":
                made = args[1]
            elif base == "bernoulli_":
                made = DRAWS["bernoulli"](*args)
            elif base == "zero_":
                made = aten.zeros_like.default(target)
            elif base == "fill_":
                made = args[1] if isinstance(args[1], torch.Tensor) else aten.full_like.default(target, args[1])
            else:
                made = _functional(func)(*args, **kwargs)
            if made.dtype != target.dtype:
                made = aten._to_copy.default(made, dtype=target.dtype)
            if made.shape != target.shape:
                made = aten.expand.default(made, list(target.shape))
        node = self.look_up(made)
        return self._add_detach(node) if self.blocks_no_grad and not torch.is_grad_enabled() else node

    def _stand_in(self, like: torch.Tensor, node: Node) -> torch.Tensor:
        """A new tensor for `node`, which nothing else can write to."""
        # `like` may have been resized since its node was made.
        made = like.detach().clone().reshape(node.shape)  # type: ignore[arg-type]
        self.alive.append(made)
        self.recording.of_tensor[id(made)] = node
        memory = self.memories[key_of(made)] = Memory(made, node)
        self.views[id(made)] = View(memory)
        return made

    def _catch_up(self, tensor: torch.Tensor, view: View) -> None:
        """Writes to a tensor's memory since it was last read make a new node of it."""
        memory, place = view.memory, place_of(tensor)
        reached = [write for write in memory.writes[view.seen :] if overlap(memory, place, write.place)]
        view.seen = len(memory.writes)
        if not reached:
            return
        if reached[-1].place == place:
            self._rebind(tensor, self.recording.of_tensor[id(reached[-1].value)])
            return
        blocks_no_grad, self.blocks_no_grad = self.blocks_no_grad, False
        value = self._stand_in(memory.root, memory.node) if memory.base is None else memory.base
        try:
            with self:
                for write in memory.writes[memory.applied :]:
                    value = put(value, write.steps, write.value)
                memory.base, memory.applied = value, len(memory.writes)
                node = self.look_up(look_through(value, view.steps))
        except CannotPut as name:
            if tensor.is_complex() or memory.root.is_complex():
                advice = "the step computes with complex numbers; give real and imaginary parts as two tensors"
                raise Untraceable(advice) from None
            raise Untraceable(f"the step writes in place to a view made with {name}; use torch.where instead") from None
        finally:
            self.blocks_no_grad = blocks_no_grad
        self._rebind(tensor, node)

    def _rebind(self, tensor: torch.Tensor, node: Node) -> None:
        """A tensor of memory that was written to stands for a new node, cut off if autograd sees it so."""
        cut = self.blocks_no_grad and tensor.is_floating_point() and not tensor.requires_grad
        self.recording.of_tensor[id(tensor)] = self._add_detach(node) if cut else node

    def writes_to(self, tensor: torch.Tensor) -> bool:
        """Whether anything was written in place to a tensor's memory."""
        return bool(self.views[id(tensor)].memory.writes)

    # Gradients

    def _detach(self, result: Any) -> None:
        """What the cell computes under `no_grad` passes no gradient: cut it off from its inputs."""
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                cut = self._add_detach(self.recording.of_tensor[id(tensor)])
                self.recording.of_tensor[id(tensor)] = cut
                view = self.views[id(tensor)]
                if view.memory.root is tensor:
                    view.memory.node = cut
                else:
                    view.steps = (*view.steps, (aten.detach.default, (), {}))

    def _add_detach(self, source: Node) -> Node:
        cut = Node(self._unique_name("detach"), aten.detach.default, (source,), {}, source.shape, source.dtype)
        self.recording.nodes.append(cut)
        return cut

    def record_custom(self, function: Any, run: "Callable[[], Any]", args: tuple[Any, ...]) -> Any:
        """Call a function with a custom gradient, and make one node of what was recorded."""
        name = function.__name__
        tensors = [arg for arg in args if isinstance(arg, torch.Tensor)]
        given = tuple(self._as_argument(arg) for arg in args)
        written = [len(self.views[id(tensor)].memory.writes) for tensor in tensors]
        start = len(self.recording.nodes)
        blocks_no_grad, self.blocks_no_grad = self.blocks_no_grad, False
        try:
            result = run()
        finally:
            self.blocks_no_grad = blocks_no_grad
        several = isinstance(result, tuple)
        outputs = result if several else (result,)
        results = tuple(self.look_up(item) for item in outputs)
        inner = self.recording.nodes[start:]
        if foreign_inputs(inner, [item for item in given if isinstance(item, Node)]):
            raise Untraceable(
                f"the forward of {name} reads tensors that are not among its arguments; pass them to apply"
            )
        if written != [len(self.views[id(tensor)].memory.writes) for tensor in tensors]:
            raise Untraceable(f"the forward of {name} writes in place to an argument")
        op = CustomGradient(function, tuple(inner), tuple(item for item in results if isinstance(item, Node)))
        node = Node(self._unique_name(name), op, given)
        if not several:
            node.shape, node.dtype = tuple(result.shape), result.dtype
        self.recording.nodes.append(node)
        for index, tensor in enumerate(outputs):
            if isinstance(tensor, torch.Tensor):
                made = node
                if several:
                    shape, dtype = tuple(tensor.shape), tensor.dtype
                    made = Node(self._unique_name(name), operator.getitem, (node, index), {}, shape, dtype)
                    self.recording.nodes.append(made)
                if blocks_no_grad and not torch.is_grad_enabled():
                    made = self._add_detach(made)
                self.alive.append(tensor)
                self.recording.of_tensor[id(tensor)] = made
                self.memories[key_of(tensor)] = Memory(tensor, made)
                self.views[id(tensor)] = View(self.memories[key_of(tensor)])
        self.custom.add(function)
        return result

    def _as_argument(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self.look_up(value)
        return value if value is None or isinstance(value, (bool, int, float, str)) else Opaque(value)

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


class FunctionMode(TorchFunctionMode):
    """Replaces some functions of torch by their equations, and refuses those that bypass the recorder.

    The latter read a tensor's memory without an operator.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = getattr(func, "__name__", "")
        if name in _READS_MEMORY:
            raise Untraceable(
                f"the step reads memory with {name}{whereabouts()}, so what it does depends on the data; "
                "do it with torch"
            )
        if func in _DERIVATIVES and (kwargs or {}).get("create_graph"):
            # What autograd saved is cut off in the recording: the second derivative would be another.
            raise Untraceable("the step takes a derivative with create_graph=True; write the derivative out")
        return (equations_of(name, args) or func)(*args, **(kwargs or {}))


def _functional(func: Any) -> Any:
    """The operator that does the same without writing in place: that with the same arguments, whatever its overload."""
    name = func.overloadpacket.__name__
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    wanted = [(item.name, str(item.type)) for item in func._schema.arguments]
    for overload in packet.overloads() if packet is not None and name.endswith("_") else ():
        found = getattr(packet, overload)
        if [(item.name, str(item.type)) for item in found._schema.arguments] == wanted:
            return found
    raise Untraceable(f"the step writes in place with {func}")


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
        pairs = zip(one.nodes, other.nodes, strict=False)
        apart = (f"{first.label}{first.whereabouts}" for first, second in pairs if first.op is not second.op)
        where = next(apart, "its last operator")
        raise Untraceable(f"the step does different things for different numbers of rows, from {where} on")
    twin = dict(zip(one.nodes, other.nodes, strict=True))
    for first, second in twin.items():
        try:
            first.shape = tuple(_merge_sizes(a, b) for a, b in zip(first.shape, second.shape, strict=True))
            first.args = _merge_arguments(first.args, second.args, twin)
            first.kwargs = _merge_arguments(first.kwargs, second.kwargs, twin)
        except Untraceable as reason:
            raise Untraceable(f"{reason}{first.whereabouts}") from None
    for node, tensor in one.constants.items():
        again = other.constants.get(twin[node])
        if again is tensor:
            one.outside.append(tensor)
        elif again is None or not _is_equal(again, tensor):
            raise Untraceable("the step makes a tensor of other values each time it is called")
    return one, result


def _records_the_same(one: Recording, run: "Callable[[_Recorder, int], Any]") -> bool:
    """Whether recording `run` gives the same operators and edges."""
    try:
        other, _ = record(run, blocks_no_grad=True)
    except Untraceable:
        return False
    if [node.op for node in one.nodes] != [node.op for node in other.nodes]:
        return False
    twin = dict(zip(one.nodes, other.nodes, strict=True))
    try:
        for first, second in twin.items():
            _merge_arguments((first.args, first.kwargs), (second.args, second.kwargs), twin)
    except Untraceable:
        return False
    return all(
        (again := other.constants.get(twin[node])) is not None and (again is tensor or _is_equal(again, tensor))
        for node, tensor in one.constants.items()
    )


def _is_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape or one.dtype != other.dtype:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124 - NaN equals NaN here


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
            raise Untraceable("the step uses a number that depends on the number of rows, or is another at each call")
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
        outputs: The packing of several outputs in `y`; None for one.
        outside: Those of them that were not made in the step.
        unset: Names of what the step sets for others to look at, which compiled code leaves as it was.
        narrow: Inputs and results that are in half precision outside, where the step computes in single precision.
    """

    nodes: list[Node]
    x: Node
    states: list[Node]
    next_states: list[Node]
    y: Node
    parameters: dict[str, Node]
    constants: dict[Node, torch.Tensor]
    outputs: Packing | None = None
    outside: Sequence[torch.Tensor] = ()
    unset: Sequence[str] = ()
    narrow: dict[Node, torch.dtype] = field(default_factory=dict)

    @property
    def changing(self) -> dict[Node, Node]:
        """Each part of the state that changes, with what it becomes."""
        return {old: new for old, new in zip(self.states, self.next_states, strict=True) if new is not old}


def trace(
    cell: nn.Module,
    *,
    x_shape: tuple[int, ...],
    x_dtype: torch.dtype,
    state: Any,
    signature: StepSignature = PLAIN,
    holders: Sequence[Any] | None = None,
) -> StepGraph:
    """Record one step of `cell`.

    Args:
        cell: Called as `signature` says.
        x_shape: Sizes of a row of the input.
        x_dtype: Of the input.
        state: A state for any number of rows, for its structure, shapes and dtypes.
        signature: By default `cell(x_t, state)`.
        holders: What the step may change besides, which is undone; by default attributes of the cell.

    Raises:
        Untraceable: The step is not a fixed graph of operators; the message says why.
        StrettoError: The cell does not keep to the contract of a cell.
    """
    tensors: Mapping[str, torch.Tensor] = {**dict(cell.named_parameters()), **dict(cell.named_buffers())}
    device = next((tensor.device for tensor in (*tensors.values(), *flatten(state))), torch.device("cpu"))
    row_shapes = [(tuple(part.shape[1:]), part.dtype) for part in flatten(state)]
    effects = SideEffects(list(holders_of(cell) if holders is None else holders))
    if effects.problem:
        raise Untraceable(effects.problem)

    def step(recorder: _Recorder, rows: int) -> dict[str, Any]:
        x = _example((rows, *x_shape), x_dtype, device)
        parts = [_example((rows, *shape), dtype, device) for shape, dtype in row_shapes]
        recorder.assumes_checks = any(getattr(module, "assume_checks_pass", False) for module in cell.modules())
        recorder.finds_lines = True
        found: dict[str, Any] = {"x": recorder.enter(x, "x")}
        found["states"] = [recorder.enter(part, f"state{index}") for index, part in enumerate(parts)]
        found["parameters"] = {
            name: recorder.enter(t, name.replace(".", "_"), owner=f"{_kind_of(t)} {name}")
            for name, t in tensors.items()
        }
        # Attention as products and a softmax: torch's fused operators have no gradient row by row.
        custom = intercept_calls(recorder.record_custom)
        math = sdpa_kernel(SDPBackend.MATH)
        with _without_dynamo(), recorder, FunctionMode(), custom, math, without_validation():
            y, after = _try_step(cell, x, unflatten(state, parts), signature)
            outputs = flatten(y)
            found["outputs"] = None if isinstance(y, torch.Tensor) else Packing.of(y)
            y = y if found["outputs"] is None else found["outputs"].pack(y)
        if any(recorder.writes_to(part) and key_of(part) == key_of(out) for part in parts for out in outputs):
            raise Untraceable(
                "the step writes in place to its state and returns the same memory as its output, "
                "so in a loop each step changes the outputs before it; return a clone"
            )
        if any(part._backward_hooks for part in (x, *parts)):
            raise Untraceable("the step hooks into its gradient")
        _refuse_custom_gradients(recorder, [y, *flatten(after)])
        found["y"], found["next_states"] = recorder.look_up(y), [recorder.look_up(part) for part in flatten(after)]
        return found

    def run(recorder: _Recorder, rows: int) -> dict[str, Any]:
        try:
            return step(recorder, rows)
        finally:
            effects.undo()

    def run_second(recorder: _Recorder, rows: int) -> dict[str, Any]:
        try:
            step(_Recorder(blocks_no_grad=True), rows)
            return step(recorder, rows)
        finally:
            effects.undo()

    try:
        recording, found = record(run, blocks_no_grad=True)
    except Untraceable:
        if effects.problem:
            raise Untraceable(effects.problem) from None
        raise
    if effects.problem:
        raise Untraceable(effects.problem)
    if effects.names and not _records_the_same(recording, run_second):
        raise Untraceable(
            f"the step reads {' or '.join(effects.names)}, which it has set at the step before: make it a part of the "
            "state"
        )
    found["parameters"] |= _take_attributes(recording, dict(attribute_tensors(cell)))
    return StepGraph(
        nodes=recording.nodes,
        constants=recording.constants,
        outside=recording.outside,
        unset=tuple(effects.names),
        **found,
    )


def _take_attributes(recording: Recording, attributes: Mapping[str, torch.Tensor]) -> dict[str, Node]:
    """Tensors from outside that are attributes of the cell, as parameters: each call reads what is there then."""
    names = {id(tensor): name for name, tensor in attributes.items()}
    nodes = {id(tensor): node for node, tensor in recording.constants.items()}
    taken = [tensor for tensor in recording.outside if id(tensor) in names]
    recording.outside = [tensor for tensor in recording.outside if id(tensor) not in names]
    for tensor in taken:
        del recording.constants[nodes[id(tensor)]]
    return {names[id(tensor)]: nodes[id(tensor)] for tensor in taken}


def _without_dynamo() -> Any:
    """FunctionMode given to torch.compile run as they are: compiled code has no operators to be recorded."""
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    return torch.compiler.set_stance("force_eager")


def _kind_of(tensor: torch.Tensor) -> str:
    return "the parameter" if isinstance(tensor, nn.Parameter) else "the buffer"


def _example(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor that requires gradients but is not a leaf, like those of a real call."""
    zeros = torch.zeros(shape, dtype=dtype, device=device)
    return zeros.requires_grad_().clone() if dtype.is_floating_point else zeros


def _try_step(cell: nn.Module, x: torch.Tensor, state: Any, signature: StepSignature) -> tuple[Any, Any]:
    try:
        return call_step(cell, x, state, signature=signature)
    except (Untraceable, StrettoError):
        raise
    except Exception as error:  # if it is the cell's own, it comes again when the cell runs as it is
        if "torch.func" in str(error):
            raise Untraceable("the step is transformed by torch.func; write the derivative out") from error
        raise Untraceable(f"the step failed when it was traced: {type(error).__name__}: {error}") from error


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
        if (
            isinstance(step, torch.autograd.function.BackwardCFunction)
            and getattr(step, "_forward_cls", None) not in recorder.custom
        ):
            name = type(step).__name__.removesuffix("Backward")
            raise Untraceable(f"the step uses {name}, which has a custom gradient")
        waiting.extend(item for item, _ in step.next_functions)
    if any(
        tensor._backward_hooks for tensor in recorder.alive if recorder.recording.of_tensor[id(tensor)].op is not None
    ):
        raise Untraceable("the step hooks into its gradient")
