"""The backend that generates C++, as the registry knows it."""

import threading
from typing import ClassVar, final

import torch

from stretto.graph import Body
from stretto.kernels.backends.base import AbstractBackend, Program, TracedStep
from stretto.kernels.backends.cpp.batched import find_library
from stretto.kernels.backends.cpp.compiler import NoCompiler, find_compiler
from stretto.kernels.backends.cpp.generate import generate
from stretto.kernels.backends.cpp.kernel import CppKernel
from stretto.kernels.backends.cpp.layer import FusedLayer
from stretto.kernels.ir import Unsupported
from stretto.kernels.lower import real_dtype
from stretto.kernels.program import TracedProgram


@final
class CppBackend(AbstractBackend):
    """Generates C++ for the CPU and compiles it on first use."""

    name: ClassVar[str] = "cpp"
    description: ClassVar[str] = "the loops run as generated C++"

    def is_meant_for(self, device: torch.device) -> bool:
        """The CPU."""
        return device.type == "cpu"

    def unavailable(self) -> str | None:
        """Why nothing can be compiled."""
        try:
            find_compiler()
        except NoCompiler as reason:
            return str(reason)
        return None

    def supports(self, body: Body, device: torch.device) -> str | None:
        """Bodies on the CPU, of operators and dtypes that code can be generated for."""
        if device.type != "cpu":
            return f"code is generated for the CPU, and this runs on {device.type}"
        try:
            real_dtype(body)
            generate(body, "forward")
            generate(body, "backward")
        except Unsupported as reason:
            return str(reason)
        return None

    def build(self, step: TracedStep) -> Program:
        """Compile the loops, and at the same time the products outside of them: the first batch needs both."""
        assert step.plan is not None
        bodies = [body for level in step.bodies for body in level]
        dtype = real_dtype(bodies[0]) if bodies else torch.float32
        products = threading.Thread(target=find_library, args=(dtype,), daemon=True)
        products.start()
        try:
            kernels = [[CppKernel(body) for body in level] for level in step.bodies]
            program = TracedProgram(step.plan, kernels)
        finally:
            products.join()
        program.operator = FusedLayer.of(step.plan, [kernel for level in kernels for kernel in level])
        return program
