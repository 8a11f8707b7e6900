"""Loops run by generated C++.

    LoopCall, one per loop --> _Call: pointers and strides --> _Job: which rows --> stretto_run(jobs, threads)

A job's rows are cut into pieces of about equal work, and threads take pieces, each through all of time. Where rows are
fewer than threads and the weights are large, the threads run as a team instead and share the columns of every row.

Shape legend: B sequences, P rows of all steps together.
"""

import ctypes
from array import array
from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any, Final, TypeAlias, final

import torch

from stretto.graph import Body, Kind, Node, concrete_shape, run
from stretto.kernels.backends.base import (
    AbstractKernel,
    Cost,
    Cotangents,
    LoopCall,
    LoopGradients,
    LoopResult,
)
from stretto.kernels.backends.cpp.batched import threads_for
from stretto.kernels.backends.cpp.compiler import load
from stretto.kernels.backends.cpp.generate import Generated, generate, source_of
from stretto.kernels.buffer_pool import empty
from stretto.kernels.ir import Unsupported
from stretto.kernels.layout import Layout
from stretto.kernels.lower import REAL_DTYPES, Way, value_dtypes

_Tensors: TypeAlias = "dict[str, Sequence[Any]]"
"""Tensors by their role in the loop IR; None where the generated code has no such buffer."""
CACHE_LINE_ELEMENTS: Final = 64
"""Elements that pieces of one memory begin at multiples of, so that no two threads write to one cache line."""


def dtype_of(body: Body) -> torch.dtype:
    """The real dtype of all values of a loop.

    Raises:
        Unsupported: If there are several, or no code is generated for it.
    """
    kinds = value_dtypes(body)
    real = [kind for kind in kinds if kind is not torch.bool]
    if len(real) != 1 or real[0] not in REAL_DTYPES:
        names = ", ".join(sorted(str(kind).removeprefix("torch.") for kind in kinds))
        raise Unsupported(f"the loop's values are of {names}; code is generated for float32 or float64")
    return real[0]


class _Call(ctypes.Structure):
    _fields_ = (
        *((name, ctypes.c_int64) for name in ("num_steps", "num_rows", "keep")),
        *((name, ctypes.c_void_p) for name in ("rows", "starts", "lengths", "strides", "weight_strides")),
        *((name, ctypes.c_void_p) for name in ("buffers", "weights", "packed", "scratch", "own", "room")),
    )


class _Job(ctypes.Structure):
    _fields_ = (
        ("pack", ctypes.c_void_p),
        ("work", ctypes.c_void_p),
        ("call", ctypes.c_void_p),
        ("bounds", ctypes.c_void_p),
        ("pieces", ctypes.c_int64),
    )


@final
class CppKernel(AbstractKernel):
    """One function for all steps forward, one for all steps backward.

    Raises:
        Unsupported: If no code can be generated for the body, or it cannot be compiled.
    """

    def __init__(self, body: Body) -> None:
        super().__init__(body)
        self.dtype = dtype_of(body)
        self.functions: dict[Way, Generated] = {
            "forward": generate(body, "forward"),
            "backward": generate(body, "backward"),
        }
        self.source = source_of(list(self.functions.values()), self.dtype)
        self.library = load(self.source, torch_version=torch.__version__)
        names = ("forward_pack", "forward_work", "backward_pack", "backward_work")
        self.addresses = {name: ctypes.cast(getattr(self.library, name), ctypes.c_void_p).value or 0 for name in names}
        per_step = [port.node for port in body.ports_of(Kind.PER_STEP)]
        made = (*body.next_states, *body.outputs, *body.saved, *body.to_deferred, *per_step)
        self._one_row = {node: concrete_shape(node.shape, 1) for node in made}
        # The gradient of what nothing depends on: one row for all, the distance between rows is zero.
        arriving = (*body.next_states, *body.outputs)
        self.zeros = torch.zeros(max((node.row_size for node in arriving), default=0), dtype=self.dtype)

    @property
    def cost(self) -> Cost:
        """What the generator counted."""
        work = sum(function.work for function in self.functions.values())
        return Cost(work, self.functions["forward"].usually_shares_columns)

    @property
    def passes(self) -> tuple[int, int]:
        """Loops over a row's elements per step."""
        return self.functions["forward"].passes, self.functions["backward"].passes

    def forward(self, call: LoopCall, *, keep: bool) -> LoopResult:
        """Run all steps."""
        return self.forward_all([call], keep=keep)[0]

    def backward(self, call: LoopCall, result: LoopResult, cotangents: Cotangents) -> LoopGradients:
        """Run all steps backward."""
        return self.backward_all([call], [result], [cotangents])[0]

    @classmethod
    def forward_all(cls, calls: Sequence[LoopCall], *, keep: bool) -> list[LoopResult]:
        """Run loops at once, each by threads of its own where there are enough."""
        made, given = [], []
        for call in calls:
            kernel = _kernel_of(call)
            result = kernel._empty_result(call.layout, keep=keep)
            made.append(result)
            given.append(kernel._inputs(call, result) | {"final": result.finals})
            if call.layout.total == 0:
                for final_state, initial in zip(result.finals, call.states, strict=True):
                    final_state.copy_(initial)
        _run_all("forward", calls, given, keep=keep)
        return made

    @classmethod
    def backward_all(
        cls, calls: Sequence[LoopCall], results: Sequence[LoopResult], cotangents: Sequence[Cotangents]
    ) -> list[LoopGradients]:
        """Run the same loops backward, at once."""
        made, given = [], []
        for call, result, arriving in zip(calls, results, cotangents, strict=True):
            kernel = _kernel_of(call)
            gradients, tensors = kernel._empty_gradients(call, arriving)
            made.append(gradients)
            given.append(kernel._inputs(call, result) | tensors)
        _run_all("backward", calls, given, keep=True)
        return made

    def _inputs(self, call: LoopCall, result: LoopResult) -> _Tensors:
        """What both directions read or write: contiguous rows of the loop's dtype."""
        return {
            "before": result.after,
            "initial": [self._rows(tensor) for tensor in call.states],
            "per_step": [self._rows(tensor) for tensor in call.per_step],
            "constant": [self._rows(tensor) for tensor in call.constants],
            "after": result.after,
            "output": result.outputs,
            "saved": result.saved,
        }

    def _rows(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dtype is self.dtype and tensor.is_contiguous():
            return tensor
        return tensor.to(self.dtype).contiguous()

    def _empty(self, rows: int, node: Node) -> torch.Tensor:
        first, *rest = self._one_row[node]
        return empty(first * rows, *rest, dtype=self.dtype)

    def _empty_result(self, layout: Layout, *, keep: bool) -> LoopResult:
        """Memory for what the loop makes; what nothing will need again gets one row for each sequence."""
        body, total, rows = self.body, layout.total, layout.num_rows
        return LoopResult(
            after=[self._empty(total, node) for node in body.next_states],
            outputs=[self._empty(total, node) for node in body.outputs],
            finals=[self._empty(rows, node) for node in body.next_states],
            saved=[self._empty(total if keep else rows, node) for node in body.saved],
        )

    def _empty_gradients(self, call: LoopCall, arriving: Cotangents) -> tuple[LoopGradients, _Tensors]:
        """Memory for gradients, and the same by role."""
        body, total = self.body, call.layout.total
        carried = []
        for state, last in zip(call.states, arriving.finals, strict=True):
            # Two, since a step reads one and writes the other. A sequence joins at its last step, whichever is read
            # there: both start as its final gradient.
            carry = empty(2, *state.shape, dtype=self.dtype)
            carried.append(carry.zero_() if last is None else carry.copy_(last.expand_as(carry)))
        ports = body.ports_of(Kind.PER_STEP)
        per_step = [None if port.gradient is None else self._empty(total, port.node) for port in ports]
        by_node = {port.gradient: item for port, item in zip(ports, per_step, strict=True) if item is not None}
        to_deferred = [by_node[node] if node in by_node else self._empty(total, node) for node in body.to_deferred]
        constants = [
            None if port.gradient is None else torch.zeros(tensor.shape, dtype=self.dtype)
            for port, tensor in zip(body.ports_of(Kind.CONSTANT), call.constants, strict=True)
        ]
        gradients = LoopGradients([carry[0] for carry in carried], per_step, constants, to_deferred)
        return gradients, {
            "carry_in": carried,
            "carry_out": carried,
            "d_after": [self.zeros if item is None else self._rows(item) for item in arriving.after],
            "d_output": [self.zeros if item is None else self._rows(item) for item in arriving.outputs],
            "d_per_step": per_step,
            "to_deferred": to_deferred,
            "d_constant": constants,
        }


def _kernel_of(call: LoopCall) -> CppKernel:
    assert isinstance(call.kernel, CppKernel)
    return call.kernel


def _run_all(way: Way, calls: Sequence[LoopCall], given: Sequence[_Tensors], *, keep: bool) -> None:
    """Share loops and rows out to threads, and run them."""
    chosen = [(call, tensors) for call, tensors in zip(calls, given, strict=True) if call.layout.total]
    if not chosen:
        return
    runs = [(call.layout, _kernel_of(call)) for call, _ in chosen]
    threads, team = share_out(way, runs)
    made = [
        _arguments(kernel, kernel.functions[way], layout, call.weights, tensors, keep=keep, team=team)
        for (layout, kernel), (call, tensors) in zip(runs, chosen, strict=True)
    ]
    launch(way, runs, made, threads=threads, team=team)


def share_out(way: Way, runs: Sequence[tuple[Layout, CppKernel]]) -> tuple[int, int]:
    """Threads for loops that run at once, and how many of them share the columns of each row: all, or one."""
    threads = threads_for(sum(layout.total * kernel.functions[way].work for layout, kernel in runs))
    rows = sum(layout.num_nonempty for layout, _ in runs)
    alone = len(runs) == 1 and rows < threads and runs[0][1].functions[way].shares_columns
    return threads, threads if alone else 1


def pieces_of(layout: Layout, count: int, *, threads: int, team: int) -> int:
    """Pieces of the rows of one of so many loops; none where a team shares all rows."""
    return 0 if team > 1 else 1 if count % threads == 0 else min(threads, layout.num_nonempty)


def launch(
    way: Way, runs: Sequence[tuple[Layout, CppKernel]], given: "Sequence[Arguments]", *, threads: int, team: int
) -> None:
    """Run loops at once, with the arguments of each."""
    jobs = (_Job * len(runs))()
    busy = 0
    for job, (layout, kernel), (call, _) in zip(jobs, runs, given, strict=True):
        pieces = pieces_of(layout, len(runs), threads=threads, team=team)
        busy += pieces
        job.pack, job.work = kernel.addresses[f"{way}_pack"], kernel.addresses[f"{way}_work"]
        job.call = ctypes.addressof(call)
        job.bounds = layout.bounds(max(pieces, 1)).buffer_info()[0]
        job.pieces = pieces
    runs[0][1].library.stretto_run(jobs, ctypes.c_int64(len(runs)), ctypes.c_int64(min(threads, max(busy, team))))


Arguments: TypeAlias = "tuple[_Call, Any]"
"""The arguments of one loop, and everything that they point to, which must be kept until it has run."""


def _arguments(
    kernel: CppKernel,
    function: Generated,
    layout: Layout,
    weights: Sequence[torch.Tensor],
    tensors: _Tensors,
    *,
    keep: bool,
    team: int,
) -> Arguments:
    ports = kernel.body.ports_of(Kind.WEIGHT)
    values: dict[Node, Any] = {port.node: tensor.detach() for port, tensor in zip(ports, weights, strict=True)}
    run(function.ir.prepared, values, layout.total)
    pointed = [tensors[role][index] for role, index, _ in function.own_buffers]
    strides = [0 if item is kernel.zeros else own[2] for item, own in zip(pointed, function.own_buffers, strict=True)]
    pointed += [values[node].to(kernel.dtype).contiguous() for node in function.ir.uniforms]
    matrices = [values[node].to(kernel.dtype) for node in function.ir.weights]
    lists = (
        strides,
        [stride for tensor in matrices for stride in tensor.stride()],
        [tensor.data_ptr() for tensor in pointed],
        [tensor.data_ptr() for tensor in matrices],
    )
    call, memory = arguments_of(kernel, function, layout, lists=lists, keep=keep, team=team)
    return call, (pointed, matrices, memory)


def arguments_of(
    kernel: CppKernel,
    function: Generated,
    layout: Layout,
    *,
    lists: Sequence[Sequence[int]],
    keep: bool,
    team: int,
) -> Arguments:
    """The arguments of one loop.

    Args:
        kernel: Of the loop.
        function: Its direction.
        layout: Of the rows.
        lists: Strides of buffers, strides of weights, addresses of buffers, addresses of weights.
        keep: Whether values are stored for the backward pass.
        team: Threads that share the columns of each row.
    """
    places, end = work_memory(function, layout.num_rows, team)
    memory = empty(end, dtype=kernel.dtype)
    start, each = memory.data_ptr(), memory.element_size()
    arrays = [array("q", items or (0,)) for items in lists]
    call = _Call(
        layout.num_steps,
        layout.num_rows,
        int(keep),
        *layout.addresses,
        *(item.buffer_info()[0] for item in arrays),
        *(start + place * each for place in places),
    )
    return call, (arrays, memory)


@lru_cache(maxsize=1024)
def work_memory(function: Generated, rows: int, team: int) -> tuple[tuple[int, ...], int]:
    """Where packed weights, scratch, threads' own scratch and room for products begin, and elements of all of them."""
    sizes = (
        function.packed[-1],
        rows * function.scratch,
        team * rows * max(function.private, 1),
        team * rows * function.room,
    )
    *places, end = accumulate((aligned(size) for size in sizes), initial=0)
    return tuple(places), end


def aligned(size: int) -> int:
    """Elements up to the next cache line, so that no two pieces of memory share one."""
    return -(-size // CACHE_LINE_ELEMENTS) * CACHE_LINE_ELEMENTS
