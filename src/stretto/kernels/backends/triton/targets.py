"""GPUs as targets of compilation: their limits, and what a compiled kernel needs of them.

Triton compiles for a GPU that is not there. It does not fail where a kernel needs more shared memory than the target
has, since that is found out at the launch: `Usage.exceeds` compares.
"""

import re
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, final

import torch

from stretto.graph import Body
from stretto.kernels.backends.triton.emit import Tiles
from stretto.kernels.backends.triton.generate import Generated, generate, load, source_of
from stretto.kernels.backends.triton.package import optional
from stretto.kernels.lower import Way, real_dtype

NAMES: Final = {
    torch.float16: "float16",
    torch.bfloat16: "bfloat16",
    torch.float32: "float32",
    torch.float64: "float64",
}
"""Triton's names of dtypes."""

MAX_REGISTERS: Final = 255
LEAST_CAPABILITY: Final = (8, 0)
"""Of NVIDIA's GPUs: tensor cores for single precision and asynchronous copies."""


@final
@dataclass(frozen=True, slots=True)
class Target:
    """A GPU.

    Attributes:
        name: "sm_90" or "gfx942", say.
        kind: Triton's backend, "cuda" or "hip".
        arch: Triton's name of the architecture.
        warp_size: Threads of a warp.
        shared_bytes: Shared memory that a program may have.
        units: Multiprocessors, as the device itself says; 0 for those that are only compiled for.
    """

    name: str
    kind: str
    arch: int | str
    warp_size: int
    shared_bytes: int
    units: int = 0


TARGETS: Final = {
    target.name: target
    for target in (
        Target("sm_80", "cuda", 80, 32, 163 << 10),
        Target("sm_90", "cuda", 90, 32, 227 << 10),
        Target("sm_100", "cuda", 100, 32, 227 << 10),
        Target("gfx942", "hip", "gfx942", 64, 64 << 10),
    )
}
"""A100, H100, B200 and MI300."""


def target_of(device: torch.device) -> Target:
    """The GPU that a device is; for the interpreter, the one with the most memory."""
    if device.type == "cpu":
        return TARGETS["sm_90"]
    properties = torch.cuda.get_device_properties(device)
    units = int(getattr(properties, "multi_processor_count", 0))
    if torch.version.hip:
        name = str(properties.gcnArchName).partition(":")[0]
        return Target(name, "hip", name, properties.warp_size, 64 << 10, units)
    arch = 10 * properties.major + properties.minor
    shared = getattr(properties, "shared_memory_per_block_optin", 0) or 99 << 10
    return Target(f"sm_{arch}", "cuda", arch, 32, int(shared), units)


def too_old(device: torch.device) -> str:
    """Why a GPU cannot run the kernels; empty if it can."""
    if torch.version.hip:
        return ""
    capability = torch.cuda.get_device_capability(device)
    if capability >= LEAST_CAPABILITY:
        return ""
    needed, found = (".".join(map(str, version)) for version in (LEAST_CAPABILITY, capability))
    return f"Triton's kernels need a GPU of compute capability {needed}, and this one has {found}"


@final
@dataclass(frozen=True, slots=True)
class Usage:
    """What a compiled kernel needs.

    Attributes:
        registers: Of a thread.
        spilled_bytes: Of a thread, in memory: registers that were too few, and arrays.
        shared_bytes: Of a program.
        uses_tensor_cores: Whether products run on them.
        num_barriers: Barriers in the code.
    """

    registers: int
    spilled_bytes: int
    shared_bytes: int
    uses_tensor_cores: bool
    num_barriers: int

    def exceeds(self, target: Target) -> str:
        """Why it does not run on a target; empty if it does."""
        if self.shared_bytes > target.shared_bytes:
            needed, there = self.shared_bytes >> 10, target.shared_bytes >> 10
            return f"a program needs {needed} KiB of shared memory, and {target.name} has {there}"
        return ""


def compiled_usage(body: Body, way: Way, tiles: Tiles, *, operands: torch.dtype, target: Target) -> Usage:
    """What the kernel of a loop needs on a target."""
    made = generate(body, way, tiles)
    function = getattr(load(source_of([made]), interpreted=False), way)
    constants = constants_of(tiles, real=real_dtype(body), operands=operands, keep=True, widen=False)
    return usage_of(compile_for(target, function, made, constants, options_of(tiles, kind=target.kind)), target)


def float32_precision() -> str:
    """What torch is set to for products on a GPU: "highest", "high" or "medium".

    torch has an older switch for it (`set_float32_matmul_precision`) and, since 2.9, a newer one, which wins here. The
    older one cannot be read once the newer one allows less precision.
    """
    try:
        older = torch.get_float32_matmul_precision()
    except RuntimeError:
        older = ""
    newer = getattr(torch.backends.cuda.matmul, "fp32_precision", None)
    if newer is None:
        return older
    if newer != "tf32":
        return "highest"
    return "medium" if older == "medium" else "high"


def constants_of(tiles: Tiles, *, real: torch.dtype, operands: torch.dtype, keep: bool, widen: bool) -> dict[str, Any]:
    """The constants of a kernel."""
    language = optional("triton.language")
    precise = float32_precision() == "highest"
    return {
        "ROWS": tiles.rows,
        "KEEP": keep,
        "REAL": getattr(language, NAMES[real]),
        "WEIGHT": getattr(language, NAMES[operands]),
        "PRECISION": "ieee" if precise or operands is not torch.float32 else "tf32",
        "WIDEN": widen,
        **({"SHARES": tiles.shares} if tiles.shares > 1 else {}),
    }


def options_of(tiles: Tiles, *, kind: str) -> dict[str, Any]:
    """How a kernel is compiled by one of Triton's backends."""
    options: dict[str, Any] = {"num_warps": tiles.warps, "num_stages": tiles.stages, "enable_fp_fusion": True}
    if tiles.shares > 1:
        # Programs that wait for each other must all run at once; a launch of more than there is room for fails.
        options["launch_cooperative_grid"] = True
    if kind == "cuda" and tiles.warps <= 8:
        # NVIDIA's compiler would rather spill than leave no room for a second program, which will not come.
        options["maxnreg"] = MAX_REGISTERS
    return options


def compile_for(
    target: Target, function: Any, made: Generated, constants: dict[str, Any], options: dict[str, Any]
) -> Any:
    """A kernel compiled for a target; Triton caches it on disk."""
    triton = optional("triton")
    real = str(constants["REAL"])
    weight = str(constants["WEIGHT"])
    kinds = dict.fromkeys(("starts", "rows", "lengths", "integers", "arrived"), "*i64")
    kinds |= {"scratch": f"*{real}", "errors": "*i32", "num_rows": "i32"}
    own = iter(made.buffers)
    for name in made.arguments:
        if re.fullmatch(r"p\d+", name):
            kinds[name] = "*i64" if next(own).integer else f"*{real}"
        elif re.fullmatch(r"w\d+", name):
            kinds[name] = f"*{weight}"
        else:
            kinds.setdefault(name, "i32")
    names = function.arg_names
    source = optional("triton.compiler").ASTSource(
        fn=function,
        signature={name: kinds.get(name, "constexpr") for name in names},
        constexprs={(names.index(name),): value for name, value in constants.items()},
        # Memory of torch's is aligned.
        attrs={
            (names.index(name),): [["tt.divisibility", 16]]
            for name, kind in kinds.items()
            if name in names and kind.startswith("*")
        },
    )
    gpu = optional("triton.backends.compiler").GPUTarget(target.kind, target.arch, target.warp_size)
    return triton.compile(source, target=gpu, options=options)


def compiles_for() -> list[str]:
    """The targets that a small kernel can be compiled for here."""
    source = "import triton\nimport triton.language as tl\n\n\n@triton.jit\ndef zero(p):\n    tl.store(p, 0.0)\n"
    function = load(source, interpreted=False).zero
    triton, compiler = optional("triton"), optional("triton.backends.compiler")
    made = []
    for target in TARGETS.values():
        gpu = compiler.GPUTarget(target.kind, target.arch, target.warp_size)
        code = optional("triton.compiler").ASTSource(fn=function, signature={"p": "*fp32"})
        triton.compile(code, target=gpu, options={"enable_fp_fusion": True})
        made.append(target.name)
    return made


def usage_of(compiled: Any, target: Target) -> Usage:
    """What a compiled kernel needs, read from its machine code."""
    shared = int(compiled.metadata.shared)
    if target.kind == "hip":
        text = compiled.asm["amdgcn"]
        found = {
            name: int(match.group(1)) if (match := re.search(rf"\.{name}:\s*(\d+)", text)) else 0
            for name in ("vgpr_count", "vgpr_spill_count")
        }
        return Usage(
            registers=found["vgpr_count"],
            spilled_bytes=4 * found["vgpr_spill_count"],
            shared_bytes=shared,
            uses_tensor_cores="v_mfma" in text,
            num_barriers=text.count("s_barrier"),
        )
    tool = optional("triton").knobs.nvidia.cuobjdump.path
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(compiled.asm["cubin"])
        done = subprocess.run([tool, "-res-usage", str(path)], capture_output=True, text=True, check=True, timeout=60)  # noqa: S603
    sizes = {name: int(size) for name, size in re.findall(r"(REG|STACK|LOCAL):(\d+)", done.stdout)}
    return Usage(
        registers=sizes["REG"],
        spilled_bytes=sizes["STACK"] + sizes.get("LOCAL", 0),
        shared_bytes=shared,
        uses_tensor_cores="mma" in compiled.asm["ptx"],
        num_barriers=len(re.findall(r"\bbar(?:rier)?\.sync", compiled.asm["ptx"])),
    )
