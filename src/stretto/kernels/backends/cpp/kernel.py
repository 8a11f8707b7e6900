"""Loops run by generated C++.

    LoopCall, one per loop --> _Run: pointers and strides --> _Job: which rows --> stretto_run(jobs, threads)

A job's rows are cut into pieces of about equal work, and threads take pieces, each through all of time. Where rows are
fewer than threads and the weights are large, the threads run as a team instead and share the columns of every row.

Shape legend: B sequences, P rows of all steps together.
"""

import ctypes
import threading
from array import array
from collections.abc import Sequence
from typing import Any, ClassVar, Final, final

import torch

from stretto.graph import Body, Kind, Node, concrete_shape, run
from stretto.kernels.backends.base import (
    AbstractBackend,
    AbstractKernel,
    Cost,
    Cotangents,
    LoopCall,
    LoopGradients,
    LoopResult,
    Program,
    TracedStep,
)
from stretto.kernels.backends.cpp.compiler import NoCompiler, find_compiler, load
from stretto.kernels.backends.cpp.gemm import threads_for, warm_up
from stretto.kernels.backends.cpp.generate import Generated, generate, source_of
from stretto.kernels.buffer_pool import empty
from stretto.kernels.ir import Unsupported
from stretto.kernels.layout import Layout
from stretto.kernels.lower import REAL_DTYPES, value_dtypes
from stretto.kernels.program import GraphProgram

CACHE_LINE_ELEMENTS: Final = 64
"""Elements that pieces of one memory begin at multiples of, so that no two threads write to one cache line."""


@final
class CppBackend(AbstractBackend):
    """Generates C++ for the CPU and compiles it on first use."""

    name: ClassVar[str] = "cpp"
    description: ClassVar[str] = "the loops run as generated C++"

    def unavailable(self) -> str | None:
        """Why nothing can be compiled."""
        try:
            find_compiler()
        except NoCompiler as reason:
            return str(reason)
        return None

    def supports(self, body: Body, device: torch.device) -> str | None:
        """Bodies of float32 or float64 on the CPU, of operators that code can be generated for."""
        if device.type != "cpu":
            return f"code is generated for the CPU, and this runs on {device.type}"
        try:
            _dtype_of(body)
            generate(body, "forward")
            generate(body, "backward")
        except Unsupported as reason:
            return str(reason)
        return None

    def build(self, step: TracedStep) -> Program:
        """Compile the loops, and at the same time the products outside of them: the first batch needs both."""
        assert step.plan is not None
        bodies = [body for level in step.bodies for body in level]
        dtype = _dtype_of(bodies[0]) if bodies else torch.float32
        products = threading.Thread(target=warm_up, args=(dtype,), daemon=True)
        products.start()
        try:
            return GraphProgram(step.plan, [[CppKernel(body) for body in level] for level in step.bodies])
        finally:
            products.join()


def _dtype_of(body: Body) -> torch.dtype:
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

    Args:
        body: The loop.

    Raises:
        Unsupported: If no code can be generated for the body, or it cannot be compiled.
    """

    def __init__(self, body: Body) -> None:
        super().__init__(body)
        self.dtype = _dtype_of(body)
        self.functions: dict[str, Generated] = {
            "forward": generate(body, "forward"),
            "backward": generate(body, "backward"),
        }
        self.source = source_of(list(self.functions.values()), self.dtype)
        self.library = load(self.source, torch_version=torch.__version__)
        names = ("forward_pack", "forward_work", "backward_pack", "backward_work")
        self.addresses = {name: ctypes.cast(getattr(self.library, name), ctypes.c_void_p).value for name in names}

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
        made, runs = [], []
        for call in calls:
            kernel = call.kernel
            assert isinstance(kernel, CppKernel)
            result = kernel._empty_result(call.layout, keep=keep)
            tensors = kernel._inputs(call, result) | {"final": result.finals}
            runs.append(_Run(kernel, "forward", call, tensors, keep=keep))
            made.append(result)
        _run_all(runs)
        return made

    @classmethod
    def backward_all(
        cls, calls: Sequence[LoopCall], results: Sequence[LoopResult], cotangents: Sequence[Cotangents]
    ) -> list[LoopGradients]:
        """Run the same loops backward, at once."""
        made, runs = [], []
        for call, result, arriving in zip(calls, results, cotangents, strict=True):
            kernel = call.kernel
            assert isinstance(kernel, CppKernel)
            gradients, tensors = kernel._empty_gradients(call, arriving)
            runs.append(_Run(kernel, "backward", call, kernel._inputs(call, result) | tensors, keep=True))
            made.append(gradients)
        _run_all(runs)
        return made

    def _inputs(self, call: LoopCall, result: LoopResult) -> dict[str, list[torch.Tensor]]:
        """What both directions read or write, by role: contiguous rows of the loop's dtype."""
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
        return empty(*concrete_shape(node.shape, rows), dtype=self.dtype)

    def _empty_result(self, layout: Layout, *, keep: bool) -> LoopResult:
        """Memory for what the loop makes; what nothing will need again gets one row for each sequence."""
        body, total, rows = self.body, layout.total, layout.num_rows
        return LoopResult(
            after=[self._empty(total, node) for node in body.next_states],
            outputs=[self._empty(total, node) for node in body.outputs],
            finals=[self._empty(rows, node) for node in body.next_states],
            saved=[self._empty(total if keep else rows, node) for node in body.saved],
        )

    def _empty_gradients(
        self, call: LoopCall, arriving: Cotangents
    ) -> tuple[LoopGradients, dict[str, list[torch.Tensor]]]:
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
        nothing = torch.empty(0)
        tensors = {
            "carry_in": carried,
            "carry_out": carried,
            "d_after": [self._arriving(t, node) for t, node in zip(arriving.after, body.next_states, strict=True)],
            "d_output": [self._arriving(t, node) for t, node in zip(arriving.outputs, body.outputs, strict=True)],
            "d_per_step": [nothing if item is None else item for item in per_step],
            "to_deferred": to_deferred,
            "d_constant": [nothing if item is None else item for item in constants],
        }
        return gradients, tensors

    def _arriving(self, tensor: torch.Tensor | None, node: Node) -> torch.Tensor:
        if tensor is None:
            # One row for all: the distance between rows is zero.
            return torch.zeros(1, node.row_size, dtype=self.dtype).expand(2, -1)
        # A row of the batch may be several of the tensor's.
        return self._rows(tensor).reshape(tensor.numel() // max(1, node.row_size), node.row_size)


class _Run:
    """One loop's arguments, kept alive while it runs."""

    def __init__(
        self,
        kernel: CppKernel,
        way: str,
        call: LoopCall,
        tensors: dict[str, list[torch.Tensor]],
        *,
        keep: bool,
    ) -> None:
        self.kernel, self.function, self.way = kernel, kernel.functions[way], way
        self.layout, self.keep, self.tensors = call.layout, keep, tensors
        ir = self.function.ir
        values: dict[Node, Any] = {}
        for port, tensor in zip(kernel.body.ports_of(Kind.WEIGHT), call.weights, strict=True):
            values[port.node] = tensor.detach()
        run(ir.prepared, values, call.layout.total)
        real = kernel.dtype
        own = ir.buffers[: len(ir.buffers) - len(ir.uniforms)]
        pointed = [tensors[buffer.role][buffer.index] for buffer in own]
        pointed += [values[node].to(real).contiguous() for node in ir.uniforms]
        matrices = [values[node].to(real) for node in ir.weights]
        self.pointers = array("q", [tensor.data_ptr() for tensor in pointed] or [0])
        self.strides = array("q", [tensor.stride(0) if tensor.dim() else 0 for tensor in pointed] or [0])
        self.weights = array("q", [tensor.data_ptr() for tensor in matrices] or [0])
        self.weight_strides = array("q", [stride for tensor in matrices for stride in tensor.stride()] or [0])
        self.alive = (pointed, matrices)

    def prepare(self, *, team: int) -> _Call:
        """Memory to work in, and the call."""
        function, rows = self.function, self.layout.num_rows
        sizes = (
            function.packed[-1],
            rows * function.scratch,
            team * rows * max(function.private, 1),
            team * rows * function.room,
        )
        places = [0]
        for size in sizes:
            places.append(places[-1] + -(-size // CACHE_LINE_ELEMENTS) * CACHE_LINE_ELEMENTS)
        self.memory = empty(places[-1], dtype=self.kernel.dtype)
        start, each = self.memory.data_ptr(), self.memory.element_size()
        self.call = _Call(
            self.layout.num_steps,
            rows,
            int(self.keep),
            *self.layout.addresses,
            *(item.buffer_info()[0] for item in (self.strides, self.weight_strides, self.pointers, self.weights)),
            *(start + place * each for place in places[:-1]),
        )
        return self.call


def _run_all(runs: Sequence[_Run]) -> None:
    """Share loops and rows out to threads, and run them."""
    for item in runs:
        if item.layout.total == 0:
            _copy_finals(item)
    runs = [item for item in runs if item.layout.total]
    if not runs:
        return
    threads = threads_for(sum(item.layout.total * item.function.work for item in runs))
    rows = sum(item.layout.num_nonempty for item in runs)
    alone = len(runs) == 1 and rows < threads and runs[0].function.shares_columns
    team = threads if alone else 1
    jobs = (_Job * len(runs))()
    for job, item in zip(jobs, runs, strict=True):
        pieces = 0 if alone else 1 if len(runs) % threads == 0 else min(threads, item.layout.num_nonempty)
        job.pack = item.kernel.addresses[f"{item.way}_pack"]
        job.work = item.kernel.addresses[f"{item.way}_work"]
        job.call = ctypes.addressof(item.prepare(team=team))
        job.bounds = item.layout.bounds(max(pieces, 1)).buffer_info()[0]
        job.pieces = pieces
    busy = min(threads, max(sum(job.pieces for job in jobs), team))
    runs[0].kernel.library.stretto_run(jobs, ctypes.c_int64(len(runs)), ctypes.c_int64(busy))


def _copy_finals(item: _Run) -> None:
    for final_state, initial in zip(item.tensors.get("final", []), item.tensors["initial"], strict=False):
        final_state.copy_(initial)
