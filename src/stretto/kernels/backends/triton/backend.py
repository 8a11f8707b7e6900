"""The backend that generates Triton, as the registry knows it."""

import functools
import importlib.metadata
from collections.abc import Mapping
from typing import ClassVar, final

import torch

from stretto.errors import StrettoError
from stretto.graph import Body
from stretto.kernels.backends.base import AbstractBackend, AbstractKernel, Program, TracedStep
from stretto.kernels.backends.cudagraph import RECORDERS, GraphBackend, GraphKernel, graph_kernel, why_no_gpu
from stretto.kernels.backends.triton import interpreter
from stretto.kernels.backends.triton.emit import Tiles
from stretto.kernels.backends.triton.generate import generate, generate_pieces
from stretto.kernels.backends.triton.kernel import TritonKernel
from stretto.kernels.backends.triton.measured import COOPERATIVE, OPERATORS, MeasuredKernel
from stretto.kernels.backends.triton.model import SLACK, WAYS, gpu_of, predict_graph, predict_triton
from stretto.kernels.backends.triton.modes import ROWS, STEPWISE, choose_tiles, first_that_fits
from stretto.kernels.backends.triton.package import optional
from stretto.kernels.backends.triton.targets import target_of, too_old
from stretto.kernels.backends.triton.team import Team
from stretto.kernels.ir import Unsupported
from stretto.kernels.lower import Way, real_dtype
from stretto.kernels.program import TracedProgram


@final
class TritonBackend(AbstractBackend):
    """Generates Triton for GPUs and compiles it on first use; interpreted on the CPU where Triton is told to."""

    name: ClassVar[str] = "triton"
    description: ClassVar[str] = "the loops run as generated Triton"

    @property
    def is_reference(self) -> bool:
        """Whether kernels are interpreted, which takes long."""
        return interpreter.is_on()

    def is_meant_for(self, device: torch.device) -> bool:
        """GPUs, of AMD too, which torch calls the same."""
        return device.type == "cuda"

    def unavailable(self) -> str | None:
        """Why nothing can be compiled."""
        try:
            optional("triton.language")
        except StrettoError as error:
            return str(error)
        if not hasattr(optional("triton"), "knobs"):
            return f"Triton {importlib.metadata.version('triton')} is too old: 3.5 is needed"
        return None

    def idle(self) -> str | None:
        """Without Triton, or a GPU that is new enough; the interpreter stands for one where Triton is told to."""
        if reason := self.unavailable() or (None if interpreter.is_on() else why_no_gpu()):
            return reason
        found = [too_old(torch.device("cuda", index)) for index in range(torch.cuda.device_count())]
        return found[0] if found and all(found) else None

    def supports(self, body: Body, device: torch.device) -> str | None:
        """Bodies on a GPU, of operators and dtypes that code can be generated for."""
        if reason := self.unavailable():
            return reason
        if device.type == "cpu" and not interpreter.is_on():
            return "Triton's kernels run on a GPU, and this runs on the CPU; TRITON_INTERPRET=1 interprets them, slowly"
        if device.type not in {"cuda", "cpu"}:
            return f"Triton's kernels run on a GPU, and this runs on {device.type}"
        if device.type == "cuda" and (reason := too_old(device)):
            return reason
        try:
            real_dtype(body)
            for way in WAYS:
                generate(body, way, Tiles())
        except Unsupported as reason:
            return str(reason)
        return None

    def leaves(self, step: TracedStep) -> str | None:
        """Loops whose weights take longer to read in each step than a CUDA graph takes to run the operators."""
        if step.device.type != "cuda" or step.plan is None or self.refuses(step) is not None:
            return None
        bodies = [body for level in step.bodies for body in level]
        gpu = gpu_of(target_of(step.device))
        operands = max((step.narrow or real_dtype(body) for body in bodies), key=lambda dtype: dtype.itemsize)
        own = predict_triton(bodies, gpu, rows=ROWS, operands=operands)
        graph = predict_graph(bodies, gpu, rows=ROWS, operands=operands)
        if own.middle <= graph.middle:
            return None
        return (
            f"a model says that a kernel for all steps takes {own.middle:.0f} us per step on "
            f"the {gpu.name}, and CUDA graphs {graph.middle:.0f} us; neither was measured"
        )

    def build(self, step: TracedStep) -> Program:
        """Kernels of the loops."""
        assert step.plan is not None
        operands = step.narrow
        kernels: list[list[AbstractKernel]] = []
        for level in step.bodies:
            kernels.append([])
            for body in level:
                found = measured_kernel(body, step, expected=self.name) if step.measures else None
                kernels[-1].append(found or _kernel(body, step.device, operands, slack=1.0))
        return TracedProgram(step.plan, kernels)


def measured_kernel(body: Body, step: TracedStep, *, expected: str) -> MeasuredKernel | None:
    """What runs a loop by whatever is measured to be fastest; None where there is nothing to choose from.

    Raises:
        Unsupported: If the expected one cannot be made.
    """
    device, recorder = step.device, RECORDERS.get(step.device.type)
    if recorder is None or TritonBackend().supports(body, device) is not None:
        return None
    try:
        identity = "".join(generate_pieces(body, way, STEPWISE).source for way in WAYS)
    except Unsupported:
        return None
    operands = step.narrow
    # Both kinds of kernels have these; compiled and compared once.
    tiles = functools.cache(lambda: _own_tiles(body, device, operands))
    return MeasuredKernel(
        body,
        device=device,
        candidates={
            TritonBackend.name: lambda: TritonKernel(body, device=device, tiles=tiles(), operands=operands),
            COOPERATIVE: lambda: _kernel(body, device, operands, slack=SLACK, tiles=tiles()),
            GraphBackend.name: lambda: graph_kernel(body, device, operands),
            OPERATORS: lambda: GraphKernel(body, device, recorder=recorder),
        },
        expected=expected,
        identity=f"{identity} {operands}",
        recorder=recorder,
    )


def _kernel(
    body: Body,
    device: torch.device,
    operands: torch.dtype | None,
    *,
    slack: float,
    tiles: Mapping[Way, Tiles] | None = None,
) -> TritonKernel:
    """With the best tiles that fit; programs share rows where a model says that it takes at most `slack` times longer.

    Raises:
        Unsupported: If none fit.
    """
    team = Team(target_of(device), operands=operands or real_dtype(body), compiles=device.type != "cpu", slack=slack)
    own = tiles or _own_tiles(body, device, operands)
    return TritonKernel(body, device=device, tiles=own, operands=operands, team=team)


def _own_tiles(body: Body, device: torch.device, operands: torch.dtype | None) -> dict[Way, Tiles]:
    """The best that fit, of kernels whose programs have rows of their own.

    Raises:
        Unsupported: If none do.
    """
    taken = operands or real_dtype(body)
    target = target_of(device)
    tiles: dict[Way, Tiles] = {}
    for way in WAYS:
        if device.type == "cpu":
            tiles[way] = choose_tiles(body, way, taken, target)
            continue
        tiles[way], _ = first_that_fits(body, way, operands=taken, target=target)
    return tiles
