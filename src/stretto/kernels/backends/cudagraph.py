"""The loop of PyTorch's operators, recorded as CUDA graphs: stretches of steps that a GPU replays without Python.

    steps    0 ......... 63 | 64 ....... 127 | 128 .. 143 | ...      a stretch is 64 steps, or fewer at the end
    rows     8              | 6 -> 8         | 3 -> 4                running at its first step, as a power of two

    copy inputs of a stretch to fixed memory --> replay --> copy what it made to the rows of the batch

Any cell that can be traced runs so, at any size, with cuBLAS's products. A graph removes the cost of launching, not
what is launched: where Triton can, what lies between two products is a generated kernel (`triton/stepwise.py`), and
else PyTorch's operators. Never run on a GPU: tests record and replay on the CPU.

Graphs are kept by shape. The sorted batch makes the rows of a stretch a prefix; one that ends within a stretch goes on
with its last inputs, and nothing that it makes then is read. Backward it walks through those steps with gradients of
zero, since the gradient of its final state arrives at its last step.

Shape legend: B sequences, S steps of a stretch, R rows of a stretch, P rows of all steps together.
"""

import contextlib
import threading
import warnings
from abc import ABC, abstractmethod
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Final, TypeAlias, TypeVar, final

import torch

from stretto.graph import Body, Kind
from stretto.kernels.backends.base import (
    AbstractBackend,
    AbstractKernel,
    Cotangents,
    LoopCall,
    LoopGradients,
    LoopResult,
    Program,
    TracedStep,
)
from stretto.kernels.backends.eager import EagerKernel
from stretto.kernels.backends.generated import LaunchError
from stretto.kernels.ir import Unsupported
from stretto.kernels.layout import Layout, Stretch
from stretto.kernels.program import TracedProgram

T = TypeVar("T")

MAX_STEPS: Final = 64
"""Of a stretch: more would not run faster, and a graph's nodes need memory."""
MAX_BYTES: Final = 64 << 20
"""Fixed memory of a stretch, about: long rows get shorter stretches."""
MAX_GRAPHS: Final = 32
"""Kept by a kernel; the one that was not used for longest makes room."""


class AbstractRecorder(ABC):
    """Records work on a device, to run it again on the same memory."""

    @abstractmethod
    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """What the work makes, in fixed memory, and what runs it again."""

    def is_busy(self) -> bool:
        """Whether somebody else is recording, who then records the operators themselves."""
        return False


@final
class CudaRecorder(AbstractRecorder):
    """CUDA's own graphs."""

    def is_busy(self) -> bool:
        """Whether the caller captures a graph of its own."""
        return torch.cuda.is_current_stream_capturing()

    def record(self, work: Callable[[], T]) -> tuple[T, Callable[[], None]]:
        """What the work makes once it is replayed, and the replay."""
        # Once as it is: libraries allocate what they need for good at their first call, which a capture forbids.
        aside = torch.cuda.Stream()  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream()
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            work()
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            made = work()
        return made, graph.replay


RECORDERS: Final[dict[str, AbstractRecorder]] = {"cuda": CudaRecorder()}
"""By type of device."""

Tensors: TypeAlias = "list[torch.Tensor]"


def why_no_gpu() -> str | None:
    """Why torch has no GPU to run anything on; None if it has one."""
    if torch.cuda.is_available():
        return None
    is_built = torch.version.cuda is not None or torch.version.hip is not None
    return "torch finds no GPU" if is_built else f"there is no GPU that torch {torch.__version__} could use"


@final
class GraphBackend(AbstractBackend):
    """Runs every cell that could be traced, on a GPU."""

    name: ClassVar[str] = "cudagraph"
    description: ClassVar[str] = "the loops run operator by operator, in CUDA graphs of many steps"

    def is_meant_for(self, device: torch.device) -> bool:
        """GPUs."""
        return device.type == "cuda"

    def idle(self) -> str | None:
        """Without a GPU."""
        return why_no_gpu()

    def supports(self, body: Body, device: torch.device) -> str | None:  # noqa: ARG002
        """All bodies, on a GPU."""
        return None if device.type in RECORDERS else f"CUDA graphs run on a GPU, and this runs on {device.type}"

    def build(self, step: TracedStep) -> Program:
        """Kernels that record the loops when they first run."""
        assert step.plan is not None
        # Triton is optional, and its own kernels fall back on graphs.
        from stretto.kernels.backends.triton.backend import measured_kernel

        kernels: list[list[AbstractKernel]] = []
        for level in step.bodies:
            kernels.append([])
            for body in level:
                found = measured_kernel(body, step, expected=self.name) if step.measures else None
                kernels[-1].append(found or graph_kernel(body, step.device, step.narrow))
        return TracedProgram(step.plan, kernels)


def graph_kernel(body: Body, device: torch.device, operands: torch.dtype | None) -> "GraphKernel":
    """Graphs of generated kernels around products; of operators, where there are none."""
    return GraphKernel(body, device, recorder=RECORDERS[device.type], steps=_generated(body, device, operands))


def _generated(body: Body, device: torch.device, operands: torch.dtype | None) -> AbstractKernel | None:
    """Generated kernels around products, for a body and a device that have them."""
    from stretto.kernels.backends.triton.backend import TritonBackend
    from stretto.kernels.backends.triton.stepwise import StepwiseKernel

    if TritonBackend().supports(body, device) is not None:
        return None
    try:
        return StepwiseKernel(body, device=device, operands=operands)
    except Unsupported:
        return None


@final
@dataclass(slots=True)
class _Recorded:
    """A stretch of one shape: its fixed memory, what it makes there, and how to run it."""

    inputs: Tensors
    made: Any
    replay: Callable[[], None]


@final
class GraphKernel(AbstractKernel):
    """Replays stretches of steps.

    Args:
        body: The loop's.
        device: Where it runs.
        recorder: For such devices.
        steps: What is recorded; the loop's operators, if None.
    """

    def __init__(
        self, body: Body, device: torch.device, *, recorder: AbstractRecorder, steps: AbstractKernel | None = None
    ) -> None:
        super().__init__(body)
        self._device = device
        self._eager = EagerKernel(body)
        self._steps = steps or self._eager
        self._recorder = recorder
        self._recorded: OrderedDict[Any, _Recorded] = OrderedDict()
        self._weights: dict[Any, Tensors] = {}
        self._layouts: dict[tuple[int, int], Layout] = {}
        self._lock = threading.Lock()
        self._fallback = self._without = ""
        sizes = [node.row_size for node in (*body.next_states, *body.outputs, *body.saved, *body.to_deferred)]
        sizes += [port.node.row_size for port in body.ports_of(Kind.PER_STEP)]
        self._bytes_per_row = 16 * sum(sizes)

    @property
    def fallback(self) -> str:
        """Why nothing could be recorded, and the loops run operator by operator; or why no generated kernels are."""
        return self._fallback or self._without

    @property
    def passes(self) -> tuple[int, int] | None:
        """Generated kernels per step."""
        return self._steps.passes

    @property
    def num_recorded(self) -> int:
        """Graphs that are kept."""
        return len(self._recorded)

    def release(self) -> None:
        """Give back the memory of all graphs; what is asked for again is recorded again."""
        with self._lock:
            self._recorded.clear()
            self._weights.clear()

    def forward(self, call: LoopCall, *, keep: bool) -> LoopResult:
        """Run all steps."""
        if self._fallback or not call.layout.total or self._recorder.is_busy():
            return self._eager.forward(call, keep=keep)
        try:
            with self._lock, _plain_tensors(self._device):
                return self._forward(call, keep=keep)
        except RuntimeError as error:
            if self._without_kernels(error):
                return self.forward(call, keep=keep)
            self._give_up(error)
        return self._eager.forward(call, keep=keep)

    def backward(self, call: LoopCall, result: LoopResult, cotangents: Cotangents) -> LoopGradients:
        """Run all steps backward."""
        if self._fallback or not call.layout.total or self._recorder.is_busy():
            return self._eager.backward(call, result, cotangents)
        try:
            with self._lock, _plain_tensors(self._device):
                return self._backward(call, result, cotangents)
        except RuntimeError as error:
            if self._without_kernels(error):
                return self.backward(call, result, cotangents)
            self._give_up(error)
        return self._eager.backward(call, result, cotangents)

    def _without_kernels(self, error: RuntimeError) -> bool:
        """Whether operators are to be recorded from now on, since generated kernels cannot be launched."""
        if not isinstance(error, LaunchError):
            return False
        self._recorded.clear()
        self._steps = self._eager
        self._without = f"CUDA graphs run without generated kernels: {error}"
        warnings.warn(self._without, stacklevel=3)
        return True

    def _give_up(self, error: RuntimeError) -> None:
        """What cannot be recorded, or does not fit into memory twice, runs as it is; what was kept is given back."""
        self._recorded.clear()
        self._weights.clear()
        if isinstance(error, torch.OutOfMemoryError):
            torch.cuda.empty_cache()
        self._fallback = f"no CUDA graph could be recorded ({type(error).__name__}: {str(error).splitlines()[0]})"
        warnings.warn(f"the loop runs operator by operator: {self._fallback}", stacklevel=2)

    def _forward(self, call: LoopCall, *, keep: bool) -> LoopResult:
        layout, body = call.layout, self.body
        weights = self._fixed_weights(call.weights)
        states = [state[: layout.num_nonempty] for state in call.states]
        packed: Tensors = []
        for stretch in self._stretches(layout):
            rows = stretch.rows
            groups = [
                [state[:rows] for state in states],
                [stretch.dense(tensor, layout) for tensor in call.per_step],
                [_first_rows(tensor, rows, layout.num_rows) for tensor in call.constants],
            ]

            even = self._even(stretch)

            def work(fixed: list[Tensors], even: Layout = even) -> LoopResult:
                inner = LoopCall(self._steps, even, fixed[0], fixed[1], weights, fixed[2])
                return self._steps.forward(inner, keep=keep)

            made: LoopResult = self._replayed(("forward", keep, stretch.steps, rows, _shapes(weights)), groups, work)
            states = made.finals
            # Without a backward pass, kernels have saved no more than they need for a step.
            found = [*made.after, *made.outputs, *(made.saved if keep else ())]
            packed = packed or [_empty_like_rows(tensor, stretch, layout.total) for tensor in found]
            for whole, tensor in zip(packed, found, strict=True):
                stretch.store(whole, tensor, layout)
        after, outputs = len(body.next_states), len(body.outputs)
        return LoopResult(
            after=packed[:after],
            outputs=packed[after : after + outputs],
            finals=[
                layout.last(tensor, state.to(tensor.dtype)).clone()
                for tensor, state in zip(packed[:after], call.states, strict=True)
            ],
            saved=packed[after + outputs :],
        )

    def _backward(self, call: LoopCall, result: LoopResult, cotangents: Cotangents) -> LoopGradients:
        layout, weights = call.layout, self._fixed_weights(call.weights)
        arriving, carried = _at_last_steps(call, cotangents)
        constants = [torch.zeros_like(tensor) for tensor in call.constants]
        packed: list[torch.Tensor | None] = []
        num_per_step = len(self.body.ports_of(Kind.PER_STEP))
        for stretch in reversed(list(self._stretches(layout))):
            rows = stretch.rows
            given = (*arriving, *cotangents.outputs)
            groups = [
                [stretch.before(a, s, layout) for a, s in zip(result.after, call.states, strict=True)],
                [stretch.dense(tensor, layout) for tensor in call.per_step],
                [_first_rows(tensor, rows, layout.num_rows) for tensor in call.constants],
                [stretch.dense(tensor, layout) for tensor in (*result.after, *result.outputs, *result.saved)],
                [stretch.dense_gradient(tensor, layout) for tensor in given if tensor is not None],
                [_grown(carry, rows) for carry in carried],
            ]
            there = tuple(tensor is not None for tensor in given)

            even = self._even(stretch)

            def work(fixed: list[Tensors], even: Layout = even, there: tuple[bool, ...] = there) -> LoopGradients:
                inner = LoopCall(self._steps, even, fixed[0], fixed[1], weights, fixed[2])
                made, after = iter(fixed[3]), len(result.after)
                outputs = len(result.outputs)
                parts = [[next(made) for _ in range(count)] for count in (after, outputs, len(result.saved))]
                kept = iter(fixed[4])
                come = [next(kept) if one else None for one in there]
                return self._steps.backward(
                    inner,
                    LoopResult(parts[0], parts[1], [], parts[2]),
                    Cotangents(come[:after], come[after:], list(fixed[5])),
                )

            found: LoopGradients = self._replayed(
                ("backward", there, stretch.steps, rows, _shapes(weights)), groups, work
            )
            carried = found.states
            for whole, more in zip(constants, found.constants, strict=True):
                if more is not None:
                    whole[: len(more)] += more
            made = [*found.per_step, *found.to_deferred]
            if not packed:
                packed = [None if item is None else _empty_like_rows(item, stretch, layout.total) for item in made]
            for whole_P, item in zip(packed, made, strict=True):
                if whole_P is not None and item is not None:
                    stretch.store(whole_P, item, layout)
        states = []
        for state, carry, last in zip(call.states, carried, cotangents.finals, strict=True):
            whole = torch.zeros_like(state) if last is None else last.to(state.dtype, copy=True)
            whole[: len(carry)] = carry
            states.append(whole)
        ports = self.body.ports_of(Kind.CONSTANT)
        return LoopGradients(
            states=states,
            per_step=packed[:num_per_step],
            constants=[None if port.gradient is None else item for port, item in zip(ports, constants, strict=True)],
            to_deferred=[item for item in packed[num_per_step:] if item is not None],
        )

    def _stretches(self, layout: Layout) -> Iterator[Stretch]:
        most = MAX_BYTES // max(1, self._bytes_per_row * layout.num_nonempty)
        return layout.stretches(max(1, min(MAX_STEPS, most)))

    def _even(self, stretch: Stretch) -> Layout:
        """The layout of a stretch; its tables are on the device before anything is recorded, and stay there."""
        key = (stretch.steps, stretch.rows)
        if key not in self._layouts:
            self._layouts[key] = Layout.even(num_steps=stretch.steps, num_rows=stretch.rows)
            self._layouts[key].tables(self._device)
        return self._layouts[key]

    def _fixed_weights(self, weights: Sequence[torch.Tensor]) -> Tensors:
        """Weights where graphs expect them: an optimiser may have put others in their place."""
        key = _shapes(weights)
        if key not in self._weights:
            self._weights[key] = [torch.empty_like(weight) for weight in weights]
        for fixed, weight in zip(self._weights[key], weights, strict=True):
            fixed.copy_(weight)
        return self._weights[key]

    def _replayed(self, key: Any, groups: list[Tensors], work: Callable[[list[Tensors]], T]) -> T:
        """What a stretch makes of these inputs."""
        flat = [tensor for group in groups for tensor in group]
        key = (*key, _shapes(flat))
        if key not in self._recorded:
            while len(self._recorded) >= MAX_GRAPHS:
                self._recorded.popitem(last=False)
            fixed = [tensor.clone(memory_format=torch.contiguous_format) for tensor in flat]
            remaining = iter(fixed)
            regrouped = [[next(remaining) for _ in group] for group in groups]
            made, replay = self._recorder.record(lambda: work(regrouped))
            self._recorded[key] = _Recorded(fixed, made, replay)
        self._recorded.move_to_end(key)
        recorded = self._recorded[key]
        for fixed_one, tensor in zip(recorded.inputs, flat, strict=True):
            fixed_one.copy_(tensor)
        recorded.replay()
        found: T = recorded.made
        return found


def _at_last_steps(call: LoopCall, cotangents: Cotangents) -> tuple[list[torch.Tensor | None], Tensors]:
    """Gradients of states after each step, those of final states among them, and of what is carried at the end.

    In an even batch the carried ones are the final states' own.
    """
    layout, count = call.layout, call.layout.num_nonempty
    arriving: list[torch.Tensor | None] = []
    carried: Tensors = []
    for state, after, last in zip(call.states, cotangents.after, cotangents.finals, strict=True):
        if last is None or layout.is_even:
            arriving.append(after)
            carried.append(torch.zeros_like(state[:count]) if last is None else last[:count].contiguous())
            continue
        rows = layout.on_device("last_B", last.device)[:count]
        whole = last.new_zeros(layout.total, *last.shape[1:]) if after is None else after.clone()
        arriving.append(whole.index_add_(0, rows, last[:count]))
        carried.append(torch.zeros_like(last[:0]))
    return arriving, carried


def _grown(carry: torch.Tensor, rows: int) -> torch.Tensor:
    """With zeros for the sequences that join."""
    if len(carry) >= rows:
        return carry[:rows]
    return torch.cat([carry, carry.new_zeros(rows - len(carry), *carry.shape[1:])])


def _first_rows(tensor: torch.Tensor, rows: int, of: int) -> torch.Tensor:
    """Of the first sequences, each of which has one row or several."""
    return tensor[: rows * (len(tensor) // max(of, 1))]


def _empty_like_rows(tensor: torch.Tensor, stretch: Stretch, total: int) -> torch.Tensor:
    """Memory for all rows of what a stretch has made a part of."""
    each = len(tensor) // (stretch.steps * stretch.rows)
    return tensor.new_empty(each * total, *tensor.shape[1:])


def _shapes(tensors: Sequence[torch.Tensor]) -> tuple[Any, ...]:
    return tuple((tuple(tensor.shape), tensor.dtype, tensor.device) for tensor in tensors)


@contextlib.contextmanager
def _plain_tensors(device: torch.device) -> Iterator[None]:
    """Fixed memory is written again and again, also by calls with gradients after one without; on one device."""
    there = torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
    with there, torch.inference_mode(mode=False), torch.no_grad():
        yield
