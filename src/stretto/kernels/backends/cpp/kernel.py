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

from stretto.graph import Body, Kind, Node, run
from stretto.kernels.backends.base import (
    Cost,
    Cotangents,
    LoopCall,
    LoopGradients,
    LoopResult,
)
from stretto.kernels.backends.cpp.batched import threads_for
from stretto.kernels.backends.cpp.compiler import load
from stretto.kernels.backends.cpp.generate import Generated, generate, source_of
from stretto.kernels.backends.generated import GeneratedKernel, Tensors
from stretto.kernels.buffer_pool import empty
from stretto.kernels.layout import Layout
from stretto.kernels.lower import Way

CACHE_LINE_ELEMENTS: Final = 64
"""Elements that pieces of one memory begin at multiples of, so that no two threads write to one cache line."""


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
class CppKernel(GeneratedKernel):
    """One function for all steps forward, one for all steps backward.

    Raises:
        Unsupported: If no code can be generated for the body, or it cannot be compiled.
    """

    def __init__(self, body: Body) -> None:
        super().__init__(body, device=torch.device("cpu"))
        self.functions: dict[Way, Generated] = {
            "forward": generate(body, "forward"),
            "backward": generate(body, "backward"),
        }
        self.source = source_of(list(self.functions.values()), self.dtype)
        self.library = load(self.source, torch_version=torch.__version__)
        names = ("forward_pack", "forward_work", "backward_pack", "backward_work")
        self.addresses = {name: ctypes.cast(getattr(self.library, name), ctypes.c_void_p).value or 0 for name in names}

    @property
    def cost(self) -> Cost:
        """What the generator counted."""
        work = sum(function.work for function in self.functions.values())
        return Cost(work, self.functions["forward"].usually_shares_columns)

    def raise_errors(self) -> None:
        """Raise what torch's operators would have raised in a step that was run."""
        if not any(function.has_integers for function in self.functions.values()):
            return
        found = self.library.stretto_errors()
        if found & 1:
            raise IndexError("index out of range in a step of the loop")
        if found & 2:
            raise RuntimeError("ZeroDivisionError")

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
        """Run loops at once, each by separate threads where there are enough."""
        made, given = [], []
        for call in calls:
            kernel = _kernel_of(call)
            result = kernel.empty_result(call.layout, keep=keep)
            made.append(result)
            inputs = kernel.inputs(call, result)
            shown = kernel.body.shown
            given.append(inputs | {"final": result.finals, "shown": [inputs[shown[0]][shown[1]]] if shown else []})
            if call.layout.total == 0:
                for final_state, initial in zip(result.finals, call.states, strict=True):
                    final_state.copy_(initial)
        _run_all("forward", calls, given, keep=keep)
        for call, result in zip(calls, made, strict=True):
            _kernel_of(call).give_out(result)
        return made

    @classmethod
    def backward_all(
        cls, calls: Sequence[LoopCall], results: Sequence[LoopResult], cotangents: Sequence[Cotangents]
    ) -> list[LoopGradients]:
        """Run the same loops backward, at once."""
        made, given = [], []
        for call, result, arriving in zip(calls, results, cotangents, strict=True):
            kernel = _kernel_of(call)
            gradients, tensors = kernel.empty_gradients(call, arriving)
            made.append(gradients)
            given.append(kernel.inputs(call, result) | tensors)
        _run_all("backward", calls, given, keep=True)
        for call, gradients in zip(calls, made, strict=True):
            _kernel_of(call).give_out_gradients(gradients)
        return made


def _kernel_of(call: LoopCall) -> CppKernel:
    assert isinstance(call.kernel, CppKernel)
    return call.kernel


def _run_all(way: Way, calls: Sequence[LoopCall], given: Sequence[Tensors], *, keep: bool) -> None:
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
    for _, kernel in runs:
        kernel.raise_errors()


def share_out(way: Way, runs: Sequence[tuple[Layout, CppKernel]]) -> tuple[int, int]:
    """Threads for loops that run at once, and how many of them share the columns of each row: all, or one."""
    threads = threads_for(sum(layout.total * kernel.functions[way].work for layout, kernel in runs))
    rows = sum(layout.num_nonempty for layout, _ in runs)
    alone = len(runs) == 1 and rows < threads and runs[0][1].functions[way].shares_columns
    return threads, threads if alone else 1


def pieces_of(layout: Layout, count: int, *, threads: int, team: int) -> int:
    """Pieces of the rows of one of `count` loops; none where a team shares all rows."""
    if team > 1:
        return 0
    # Loops that threads can share out evenly are not cut: each thread reads the weights of its own loops only.
    return 1 if count % threads == 0 else min(threads, layout.num_nonempty)


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
    tensors: Tensors,
    *,
    keep: bool,
    team: int,
) -> Arguments:
    ports = kernel.body.ports_of(Kind.WEIGHT)
    values: dict[Node, Any] = {port.node: tensor.detach() for port, tensor in zip(ports, weights, strict=True)}
    run(function.ir.prepared, values, layout.total)
    pointed = [tensors[role][index] for role, index, _ in function.own_buffers]
    strides = [0 if item is kernel.zeros else own[2] for item, own in zip(pointed, function.own_buffers, strict=True)]
    pointed += [values[node].to(kernel.stored(node)).contiguous() for node in function.ir.uniforms]
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
