"""Recording the operators that a function runs.

The same hook that `make_fx` is built on, without what it brings along: a step is recorded in about a millisecond.
A function is recorded at two batch sizes; integers that differ are multiples of the number of rows.
"""

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from stretto.graph.node import BatchDim, Node, replaced

TWO_SIZES: Final = (3, 5)
"""Batch sizes a function is recorded at."""

_RANDOM_IN_PLACE: Final = {"bernoulli_", "uniform_", "normal_", "exponential_"}
_FILLS: Final = dict.fromkeys("zeros zeros_like new_zeros empty_like".split(), 0.0) | dict.fromkeys(
    "ones ones_like new_ones".split(), 1.0
)
_READS_VALUES: Final = {"_local_scalar_dense", "nonzero", "item", "masked_select", "unique", "is_nonzero"}


class Untraceable(Exception):  # noqa: N818 - not an error: the step is then run as it is, and told
    """The function cannot be described as a fixed graph of operators; the message says why."""


def draw(
    shape: Sequence[int], method: str, arguments: tuple[Any, ...], dtype: torch.dtype, device: Any
) -> torch.Tensor:
    """Random numbers that depend on nothing but their shape, so that all steps can be drawn at once."""
    return getattr(torch.empty(tuple(shape), dtype=dtype, device=device), method)(*arguments)  # type: ignore[no-any-return]


def constant_fill(shape: Sequence[int], value: float, dtype: torch.dtype, device: Any) -> torch.Tensor:
    """A tensor of one value."""
    return torch.full(tuple(shape), value, dtype=dtype, device=device)


@dataclass(slots=True)
class Recording:
    """What one run of a function did."""

    nodes: list[Node]
    of_tensor: dict[int, Node]
    constants: dict[Node, torch.Tensor]

    def node(self, tensor: torch.Tensor) -> Node:
        """The node of a tensor that the function made or was given."""
        return self.of_tensor[id(tensor)]


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, *, heeds_no_grad: bool) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.heeds_no_grad = heeds_no_grad
        self.recording = Recording([], {}, {})
        self.alive: list[torch.Tensor] = []
        self.sharers: dict[int, set[int]] = {}
        self.given: set[int] = set()
        self.counts: dict[str, int] = {}
        self.names: set[str] = set()

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # The wrapper that torch would put around the hook imports all of its compiler, which takes seconds.
        return False

    def name(self, base: str) -> str:
        while True:
            count = self.counts[base] = self.counts.get(base, -1) + 1
            name = base if count == 0 else f"{base}_{count}"
            if name not in self.names:
                self.names.add(name)
                return name

    def enter(self, tensor: torch.Tensor, name: str) -> Node:
        node = Node(self.name(name), None, shape=tuple(tensor.shape), dtype=tensor.dtype)
        self.given.add(id(tensor))
        self.bind(tensor, node)
        return node

    def bind(self, tensor: torch.Tensor, node: Node) -> None:
        self.alive.append(tensor)
        self.recording.of_tensor[id(tensor)] = node
        self.recording.nodes.append(node)
        if tensor.device.type != "meta":
            self.sharers.setdefault(tensor.untyped_storage().data_ptr(), set()).add(id(tensor))

    def look_up(self, value: Any) -> Any:
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
            raise Untraceable(f"the step looks at values with {base}, so its course depends on the data")
        if base == "detach" and isinstance(args[0], torch.Tensor) and id(args[0]) not in self.recording.of_tensor:
            return func(*args, **kwargs)
        noted_args, noted_kwargs = replaced(tuple(args), self.look_up), replaced(kwargs, self.look_up)
        kwargs.pop("generator", None)
        noted_kwargs.pop("generator", None)
        result = func(*args, **kwargs)
        if base in _RANDOM_IN_PLACE:
            self.rebind(func, args[0], self.drawn(args[0], base, noted_args[1:], noted_kwargs))
        elif func._schema.is_mutable:
            self.rebind(func, args[0], Node(self.name(base), _functional(func), noted_args, noted_kwargs))
        elif (node := self.shape_only(base, result, noted_args)) is not None:
            self.bind(result, node)
        elif isinstance(result, torch.Tensor):
            if id(result) not in self.recording.of_tensor:
                node = Node(self.name(base), func, noted_args, noted_kwargs, tuple(result.shape), result.dtype)
                self.bind(result, node)
        else:
            self.bind_several(func, base, result, noted_args, noted_kwargs)
        if self.heeds_no_grad and not torch.is_grad_enabled():
            self.block(result)
        return result

    def block(self, result: Any) -> None:
        """No gradient passes what the cell computes without: its values are cut off from where they come from."""
        for tensor in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(tensor, torch.Tensor):
                source = self.recording.of_tensor[id(tensor)]
                cut = Node(
                    self.name("detach"), torch.ops.aten.detach.default, (source,), {}, source.shape, source.dtype
                )
                self.recording.of_tensor[id(tensor)] = cut
                self.recording.nodes.append(cut)

    def bind_several(self, func: Any, base: str, result: Any, args: Any, kwargs: Any) -> None:
        node = Node(self.name(base), func, args, kwargs)
        self.recording.nodes.append(node)
        for index, item in enumerate(result):
            if isinstance(item, torch.Tensor):
                part = Node(self.name(base), operator.getitem, (node, index), {}, tuple(item.shape), item.dtype)
                self.bind(item, part)

    def drawn(self, tensor: torch.Tensor, method: str, args: Any, kwargs: Any) -> Node:
        arguments = (*args, *kwargs.values())
        return Node(
            self.name(method.rstrip("_")), draw, (list(tensor.shape), method, arguments, tensor.dtype, tensor.device)
        )

    def shape_only(self, base: str, result: Any, args: Any) -> Node | None:
        """Operators that take a tensor for its shape alone do not depend on it."""
        if not isinstance(result, torch.Tensor):
            return None
        shape, dtype = tuple(result.shape), result.dtype
        value: Any = _FILLS.get(base)
        if base == "scalar_tensor":
            value = args[0]
        if base in {"full_like", "new_full", "full", "fill"}:
            value = args[1] if base != "new_full" else args[2]
        if value is not None and not isinstance(value, Node):
            arguments = (list(shape), value, dtype, result.device)
            return Node(self.name(base.removesuffix("_like")), constant_fill, arguments, {}, shape, dtype)
        method = {"rand_like": "uniform_", "randn_like": "normal_", "rand": "uniform_", "randn": "normal_"}.get(base)
        if method is not None:
            node = self.drawn(result, method, (), {})
            node.shape, node.dtype = shape, dtype
            return node
        return None

    def rebind(self, func: Any, tensor: torch.Tensor, node: Node) -> None:
        """An operator that writes in place makes a new value, if nobody else sees the memory."""
        others = self.sharers.get(tensor.untyped_storage().data_ptr(), set()) - {id(tensor)}
        if self.heeds_no_grad and tensor.requires_grad and not torch.is_grad_enabled():
            raise Untraceable(f"the step writes in place with {func} behind the back of its gradient")
        if tensor.device.type == "meta" or id(tensor) in self.given or others:
            raise Untraceable(f"the step writes in place with {func} into memory that something else reads")
        node.shape, node.dtype = tuple(tensor.shape), tensor.dtype
        self.recording.of_tensor[id(tensor)] = node
        self.recording.nodes.append(node)


def _functional(func: Any) -> Any:
    name = func.overloadpacket.__name__
    overload = func._overloadname
    packet = getattr(torch.ops.aten, name.removesuffix("_"), None)
    if not name.endswith("_") or packet is None or overload not in packet.overloads():
        raise Untraceable(f"the step writes in place with {func}")
    return getattr(packet, overload)


def refuse_own_gradients(recorder: "_Recorder", results: Sequence[torch.Tensor]) -> None:
    """Make sure that the gradient of what was recorded is that of its operators.

    Raises:
        Untraceable: If a function with a gradient of its own, or a hook, has a say in it.
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
            raise Untraceable(f"the step uses {name}, which has a gradient of its own")
        waiting.extend(item for item, _ in step.next_functions)
    if any(tensor._backward_hooks for tensor in recorder.alive if id(tensor) not in recorder.given):
        raise Untraceable("the step hooks into its gradient")


def record(run: "Callable[[_Recorder], Any]", *, heeds_no_grad: bool = False) -> tuple[Recording, Any]:
    """Record one run; random numbers it draws do not disturb the caller's.

    With `heeds_no_grad`, what runs where gradients are switched off is recorded as cut off from its inputs.

    `run` names its inputs with `recorder.enter(tensor, name)`, does its work inside `with recorder:`, and returns what
    it likes.
    """
    recorder = _Recorder(heeds_no_grad=heeds_no_grad)
    with torch.random.fork_rng(devices=[]):
        result = run(recorder)
    return recorder.recording, result


def merged(one: Recording, other: Recording) -> list[Node]:
    """The nodes of `one`, with sizes that follow the number of rows marked as such.

    Raises:
        Untraceable: If the two runs did different things.
    """
    if [node.op for node in one.nodes] != [node.op for node in other.nodes]:
        raise Untraceable("the step does different things for different numbers of rows")
    twin = dict(zip(one.nodes, other.nodes, strict=True))
    for first, second in zip(one.nodes, other.nodes, strict=True):
        first.shape = tuple(_size(a, b) for a, b in zip(first.shape, second.shape, strict=True))
        first.args = _matched(first.args, second.args, twin)
        first.kwargs = _matched(first.kwargs, second.kwargs, twin)
    return one.nodes


def _size(first: Any, second: Any) -> Any:
    if first == second:
        return first
    small, large = TWO_SIZES
    if first * large == second * small and first % small == 0:
        return BatchDim(first // small)
    raise Untraceable(f"a size is {first} for {small} rows and {second} for {large} rows")


def _matched(first: Any, second: Any, twin: dict[Node, Node]) -> Any:
    if isinstance(first, Node):
        if twin[first] is not second:
            raise Untraceable("the step connects its operators differently for different numbers of rows")
        return first
    if type(first) is not type(second):
        raise Untraceable("the step does different things for different numbers of rows")
    if isinstance(first, (tuple, list)):
        if len(first) != len(second):
            raise Untraceable("the step does different things for different numbers of rows")
        return type(first)(_matched(a, b, twin) for a, b in zip(first, second, strict=True))
    if isinstance(first, dict):
        return {key: _matched(value, second[key], twin) for key, value in first.items()}
    if isinstance(first, bool) or not isinstance(first, int):
        if first != second and not (first != first and second != second):  # noqa: PLR0124 - NaN equals NaN here
            raise Untraceable("the step uses a number that depends on the number of rows")
        return first
    return _size(first, second)
