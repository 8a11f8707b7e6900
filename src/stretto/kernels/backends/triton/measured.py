"""What runs a loop on a GPU, by a small measurement: one of two kinds of kernels for all steps, or of CUDA graphs.

    triton                 one launch for all steps, forward and backward; a program has rows of its own
    triton, cooperative    likewise, but programs share rows, and wait for each other in each step
    cudagraph              generated kernels around cuBLAS's products, in replayed graphs
    cudagraph, operators   PyTorch's operators in replayed graphs

A model (`model.py`) expects one of them to be fastest. When the first batch of a kind comes, all of them run its first
steps, forward and backward if there will be gradients, and the fastest is kept for this loop, kind of batch and GPU, in
this process and in others. Programs share rows where they can all run at once, and where the model does not rule it
out. Loops run outside of autograd, so neither the caller's graph nor hooks see it; nothing is drawn, and nothing of the
caller's is written. Never run on a GPU: tests have the interpreter for one.
"""

import dataclasses
import functools
import hashlib
import math
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, Final, TypeAlias, final

import torch

from stretto.files import cache_folder
from stretto.graph import Body
from stretto.kernels.backends.base import (
    AbstractKernel,
    Cotangents,
    KernelChoice,
    LoopCall,
    LoopGradients,
    LoopResult,
)
from stretto.kernels.backends.cpp.compiler import describe_machine
from stretto.kernels.backends.cudagraph import AbstractRecorder, GraphKernel
from stretto.kernels.backends.triton.emit import power_of_two
from stretto.kernels.backends.triton.kernel import TritonKernel
from stretto.kernels.backends.triton.targets import float32_precision
from stretto.kernels.batched_ops import as_node_dtype
from stretto.kernels.ir import Unsupported
from stretto.kernels.layout import Layout
from stretto.kernels.measure import keep_measurement, quiet_run, read_measurement, wait_for

Make: TypeAlias = "Callable[[], AbstractKernel]"

COOPERATIVE: Final = "triton, cooperative"
OPERATORS: Final = "cudagraph, operators"
MAX_STEPS: Final = 256
"""Steps that are measured, at most: longer batches count as batches of so many."""
ROUNDS: Final = 8
"""Timed runs of each, if they are short; the fastest counts."""
MAX_SECONDS: Final = 0.4
"""After so long no run is taken again, and no further round begins."""
FILLS: Final = 8
"""Ragged batches are told apart by so many shares of steps that there are."""
FORMAT: Final = 2

_KNOWN: Final[dict[str, dict[str, float]]] = {}
_DISTURBED: Final[set[str]] = set()
_MEASURING: Final = threading.Lock()


@final
@dataclasses.dataclass(frozen=True, slots=True)
class BatchKind:
    """Batches that a loop takes as long for, per step.

    Attributes:
        keep: Whether there will be a backward pass.
        steps: That are measured, a power of two.
        rows: At the first step, up to the next power of two.
        fill: Steps that there are, in shares of all sequences' longest.
        precision: That torch is set to for products in single precision.
    """

    keep: bool
    steps: int
    rows: int
    fill: int
    precision: str

    @classmethod
    def of(cls, layout: Layout, *, keep: bool) -> "BatchKind":
        """That of a batch with steps."""
        steps = 1 << (min(layout.num_steps, MAX_STEPS).bit_length() - 1)
        total, most = layout.chunk(0, steps).total, steps * layout.num_nonempty
        return cls(keep, steps, power_of_two(layout.num_nonempty), -(-FILLS * total // most), float32_precision())

    def __str__(self) -> str:
        fill = "" if self.fill == FILLS else f", ragged ({self.fill} of {FILLS} full)"
        return f"{self.steps} steps of {self.rows} rows{fill}{', with gradients' if self.keep else ''}"


@final
class MeasuredKernel(AbstractKernel):
    """Runs a loop by whatever was measured to be fastest for such batches.

    Args:
        body: The loop's.
        device: Where it runs.
        candidates: What may run it, by name: that of a backend, and after a comma what else tells it from others.
        expected: The one that runs what cannot be measured.
        identity: What the loop computes, as text.
        recorder: Of the device, to know whether somebody is capturing.

    Raises:
        Unsupported: If the expected one cannot be made.
    """

    def __init__(
        self,
        body: Body,
        *,
        device: torch.device,
        candidates: Mapping[str, Make],
        expected: str,
        identity: str,
        recorder: AbstractRecorder,
    ) -> None:
        super().__init__(body)
        self.candidates = dict(candidates)
        self.kernels: dict[str, AbstractKernel] = {expected: candidates[expected]()}
        self._device = device
        self._expected = expected
        self._identity = identity
        self._recorder = recorder
        self._taken: dict[BatchKind, str] = {}
        self._failed: dict[str, str] = {}
        self._last = expected

    @property
    def fallback(self) -> str:
        """Of what ran last; or why the expected one could not run, or programs cannot share rows here."""
        found = (self.kernels[self._last].fallback, *map(self._failed.get, (self._expected, COOPERATIVE)))
        return next(filter(None, found), "")

    @property
    def passes(self) -> tuple[int, int] | None:
        """Of what ran last."""
        return self.kernels[self._last].passes

    @property
    def choice(self) -> KernelChoice | None:
        """What was measured, and the backend of what ran last; None before the first measurement."""
        if not self._taken:
            return None
        told = []
        for kind in self._taken:
            key = self._key(kind)
            times = ", ".join(f"{name} {1e3 * seconds:.3g} ms" for name, seconds in _KNOWN.get(key, {}).items())
            disturbed = " (other work took part: the next process measures again)" if key in _DISTURBED else ""
            failed = "".join(f"; {name} could not run: {why}" for name, why in self._failed.items())
            told.append(f"{kind}: {times}{disturbed}{failed}")
        return KernelChoice(self._last.partition(",")[0], tuple(told))

    def forward(self, call: LoopCall, *, keep: bool) -> LoopResult:
        """Run all steps."""
        if not call.layout.total:
            return self.kernels[self._expected].forward(call, keep=keep)
        kind = BatchKind.of(call.layout, keep=keep)
        if kind not in self._taken and not self._recorder.is_busy():
            self._choose(kind, call)
        self._last = self._taken.get(kind, self._expected)
        return self.kernels[self._last].forward(call, keep=keep)

    def backward(self, call: LoopCall, result: LoopResult, cotangents: Cotangents) -> LoopGradients:
        """Run all steps backward, by what ran them forward; nothing is measured here."""
        name = self._expected
        if call.layout.total:
            name = self._taken.get(BatchKind.of(call.layout, keep=True), name)
        if name == OPERATORS:
            # It may be another than ran forward, if somebody was capturing then.
            saved = [as_node_dtype(tensor, node) for tensor, node in zip(result.saved, self.body.saved, strict=True)]
            result = dataclasses.replace(result, saved=saved)
        return self.kernels[name].backward(call, result, cotangents)

    def _choose(self, kind: BatchKind, call: LoopCall) -> None:
        """Take what was found for such batches, in this process or another, or find it."""
        key = self._key(kind)
        with _MEASURING:
            found = _KNOWN.get(key) or self._read(key) or self._measure(kind, key, call)
            if found is None:
                return  # the batch itself cannot be run, and says so
            _KNOWN[key] = found
            for name in sorted(found, key=lambda name: found[name]):
                if self._kernel(name) is not None:
                    self._taken[kind] = name
                    return

    def _kernel(self, name: str) -> AbstractKernel | None:
        """A candidate, made when it is first asked for; None if it cannot be."""
        if name not in self.kernels and name in self.candidates:
            try:
                self.kernels[name] = self.candidates[name]()
            except Unsupported:
                del self.candidates[name]
        return self.kernels.get(name)

    def _key(self, kind: BatchKind) -> str:
        """A name in the cache, which changes with everything that the times depend on."""
        parts = [str(FORMAT), describe_machine(), torch.__version__, self._identity, repr(kind), str(self._device)]
        if self._device.type == "cuda":
            parts.append(torch.cuda.get_device_name(self._device))
        return "loop-" + hashlib.sha256("\0".join(parts).encode()).hexdigest()[:32]

    def _read(self, key: str) -> dict[str, float] | None:
        """What was kept of a measurement."""
        stored: Any = read_measurement(cache_folder, key)
        try:
            found = {name: float(seconds) for name, (seconds,) in stored.items()}
        except (AttributeError, TypeError, ValueError):
            return None  # not measured yet, or damaged: it is measured again
        is_whole = found and found.keys() <= self.candidates.keys()
        return found if is_whole and all(math.isfinite(one) and one > 0 for one in found.values()) else None

    def _measure(self, kind: BatchKind, key: str, call: LoopCall) -> dict[str, float] | None:
        """Seconds of each candidate for the first steps of the batch; None if none can run them."""
        call = _first_steps(call, kind.steps)
        best, failed = self._try_each(kind, call)
        if not best:
            return None
        quiet, end = set(), time.perf_counter() + MAX_SECONDS
        for number in range(ROUNDS):
            if number and time.perf_counter() > end:
                break
            for name, fastest in best.items():
                run = functools.partial(self._run, self.kernels[name], call, keep=kind.keep)
                seconds, is_quiet = quiet_run(run, end=end)
                best[name] = min(fastest, seconds)
                quiet |= {name} if is_quiet else set()
        fastest_name = min(best, key=lambda name: best[name])
        for name, kernel in self.kernels.items():
            if isinstance(kernel, GraphKernel) and name != fastest_name:
                kernel.release()
        if quiet == best.keys() and not failed:
            keep_measurement(cache_folder, key, {name: [seconds] for name, seconds in best.items()})
        elif not failed:
            _DISTURBED.add(key)
        return best

    def _try_each(self, kind: BatchKind, call: LoopCall) -> tuple[dict[str, float], bool]:
        """Those that can run the batch, and whether others cannot, which is told once.

        What is done once is done here: kernels are compiled, graphs recorded. There may be too little memory for it,
        say; whoever is left runs the batch, or says what is wrong with it.
        """
        best: dict[str, float] = {}
        failed: dict[str, str] = {}
        silent: set[str] = set()
        for name in list(self.candidates):
            kernel = self._kernel(name)
            rows = call.layout.num_nonempty
            shares = isinstance(kernel, TritonKernel) and kernel.shares_rows(rows, keep=kind.keep)
            if kernel is None or (name == COOPERATIVE and not shares):
                continue
            try:
                self._run(kernel, call, keep=kind.keep)
            except Exception as error:  # noqa: BLE001 - whatever it is, others may run it
                failed[name] = f"{type(error).__name__}: {str(error).partition(chr(10))[0]}"
                silent.add(name)
            else:
                if kernel.fallback:
                    # It has said so itself, and ran by something that is measured under its own name.
                    failed[name] = kernel.fallback
                else:
                    best[name] = math.inf
        if not best:
            # Each runs by something slower, if at all.
            return {name: math.inf for name in failed if name not in silent}, True
        for name in failed.keys() & silent - self._failed.keys():
            warnings.warn(
                f"a loop cannot run by {name!r} ({failed[name]}): the fastest of the others runs", stacklevel=3
            )
        self._failed |= failed
        return best, bool(failed)

    def _run(self, kernel: AbstractKernel, call: LoopCall, *, keep: bool) -> float:
        """Seconds of a loop, and back."""
        wait_for(self._device)
        start = time.perf_counter()
        with torch.no_grad():
            result = kernel.forward(call, keep=keep)
            if keep:
                after, outputs = ([_ones(tensor) for tensor in made] for made in (result.after, result.outputs))
                kernel.backward(call, result, Cotangents(after, outputs, [None] * len(result.finals)))
        wait_for(self._device)
        return time.perf_counter() - start


def _ones(tensor: torch.Tensor) -> torch.Tensor | None:
    return torch.ones_like(tensor) if tensor.is_floating_point() else None


def _first_steps(call: LoopCall, steps: int) -> LoopCall:
    """The loop over the first steps of a batch."""
    total, layout = call.layout.total, call.layout.chunk(0, steps)
    return dataclasses.replace(
        call,
        layout=layout,
        states=[tensor.detach() for tensor in call.states],
        per_step=[tensor.detach()[: len(tensor) // total * layout.total] for tensor in call.per_step],
        weights=[tensor.detach() for tensor in call.weights],
        constants=[tensor.detach() for tensor in call.constants],
    )
