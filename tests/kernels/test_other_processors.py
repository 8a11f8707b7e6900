"""Generated C++ for other processors, run in an emulator: every cell of the library, forward and backward.

The loops of a program are handed to a small program of another architecture: what they read goes into a file, what they
wrote is read back, and the rest of the computation goes on here. So the whole result is compared with the reference.
"""

import ctypes
import shutil
import struct
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stretto
from cell_settings import SETTINGS, F
from stretto.graph import Kind, run
from stretto.kernels.backends.cpp import kernel as cpp
from stretto.kernels.backends.cpp.compiler import BASE_FLAGS
from stretto.kernels.backends.cpp.layer import FusedLayer

DRIVER = """
#include <cstdio>
#include <cstdlib>
#include <vector>
static FILE* file;
static std::vector<int64_t> numbers() {
  int64_t count = 0;
  if (std::fread(&count, 8, 1, file) != 1) std::exit(3);
  std::vector<int64_t> found(count + 1);
  if (std::fread(found.data(), 8, count, file) != size_t(count)) std::exit(3);
  return found;
}
static std::vector<char*> memories(std::vector<int64_t>& sizes) {
  sizes = numbers();
  std::vector<char*> found;
  for (size_t i = 0; i + 1 < sizes.size(); i++) {
    char* memory = static_cast<char*>(std::aligned_alloc(64, (sizes[i] / 64 + 2) * 64));
    if (std::fread(memory, 1, sizes[i], file) != size_t(sizes[i])) std::exit(3);
    found.push_back(memory);
  }
  found.push_back(nullptr);
  return found;
}
int main(int, char** names) {
  file = std::fopen(names[1], "rb");
  auto facts = numbers(), rows = numbers(), starts = numbers(), lengths = numbers(), bounds = numbers();
  auto strides = numbers(), weight_strides = numbers();
  // Some buffers are the same memory under several names.
  auto which = numbers();
  std::vector<int64_t> sizes, weight_sizes;
  auto memory = memories(sizes), weights = memories(weight_sizes);
  std::vector<char*> buffers;
  for (int64_t at : which) buffers.push_back(memory[at]);
  std::vector<real*> room;
  for (int i = 4; i < 8; i++) room.push_back(static_cast<real*>(std::aligned_alloc(64, (facts[i] * 8 / 64 + 2) * 64)));
  Call call{facts[0], facts[1], facts[2], rows.data(), starts.data(), lengths.data(), strides.data(),
            weight_strides.data(), reinterpret_cast<real**>(buffers.data()), reinterpret_cast<real**>(weights.data()),
            room[0], room[1], room[2], room[3]};
  Job job{};
  job.pack = facts[3] ? backward_pack : forward_pack;
  job.work = facts[3] ? backward_work : forward_work;
  job.call = &call;
  job.bounds = bounds.data();
  job.pieces = 1;
  stretto_run(&job, 1, 1);
  FILE* out = std::fopen(names[2], "wb");
  for (size_t i = 0; i + 1 < sizes.size(); i++) std::fwrite(memory[i], 1, sizes[i], out);
  return std::fclose(out);
}
"""


class Target:
    """Another processor: its compiler, flags and emulator, and the programs that were made for it."""

    def __init__(self, compiler: str, flags: Sequence[str], emulator: Sequence[str], folder: Path) -> None:
        self.command = [compiler, *(flag for flag in BASE_FLAGS if flag not in ("-O2", "-shared", "-fPIC"))]
        self.command += ["-O1", "-static", *flags]
        self.emulator, self.folder = list(emulator), folder
        self.made: dict[str, Path] = {}
        self.runs = 0

    def program(self, source: str) -> Path:
        """The kernels of a source with the driver, compiled."""
        if source not in self.made:
            text = self.folder / f"{len(self.made)}.cpp"
            text.write_text(source + DRIVER, encoding="utf-8")
            subprocess.run([*self.command, str(text), "-o", str(text.with_suffix(""))], check=True, timeout=600)
            self.made[source] = text.with_suffix("")
        return self.made[source]

    def run_all(self, way: str, calls: Any, given: Any, *, keep: bool) -> None:
        """What `kernel._run_all` does, one loop after the other, on the other processor."""
        for call, tensors in zip(calls, given, strict=True):
            if call.layout.total:
                self.run_one(way, call, tensors, keep=keep)

    def run_one(self, way: str, call: Any, tensors: Any, *, keep: bool) -> None:
        kernel, layout = call.kernel, call.layout
        function = kernel.functions[way]
        ports = kernel.body.ports_of(Kind.WEIGHT)
        values = {port.node: tensor.detach() for port, tensor in zip(ports, call.weights, strict=True)}
        run(function.ir.prepared, values, layout.total)
        pointed = [tensors[role][index] for role, index, _ in function.own_buffers]
        owns = zip(pointed, function.own_buffers, strict=True)
        strides = [0 if item is kernel.zeros else own[2] for item, own in owns]
        pointed += [values[node].to(kernel.stored(node)).contiguous() for node in function.ir.uniforms]
        matrices = [values[node].to(kernel.dtype) for node in function.ir.weights]
        unique = {item.data_ptr(): item for item in sorted(pointed, key=lambda item: item.numel())}
        places = {address: place for place, address in enumerate(unique)}
        rows = layout.num_rows
        sizes = (function.packed[-1], rows * function.scratch, rows * max(function.private, 1), rows * function.room)
        numbers = (
            [layout.num_steps, rows, int(keep), int(way == "backward"), *sizes],
            *(layout.rows_T, layout.starts_T, layout.lengths_B, layout.bounds(1), strides),
            [stride for matrix in matrices for stride in matrix.stride()],
            [places[item.data_ptr()] for item in pointed],
        )
        data, answer = self.folder / "in", self.folder / "out"
        with data.open("wb") as stream:
            for row in numbers:
                stream.write(struct.pack("q", len(row)) + np.asarray(row, dtype=np.int64).tobytes())
            for memories in (list(unique.values()), matrices):
                raw = [_raw(item) for item in memories]
                stream.write(
                    struct.pack("q", len(raw)) + np.array([len(each) for each in raw], dtype=np.int64).tobytes()
                )
                stream.write(b"".join(raw))
        subprocess.run([*self.emulator, self.program(kernel.source), data, answer], check=True, timeout=600)
        written = answer.read_bytes()
        for item in unique.values():
            size = item.numel() * item.element_size()
            # Not by an operator: autograd is to see no change, as it sees none when a kernel writes.
            ctypes.memmove(item.data_ptr(), written[:size], size)
            written = written[size:]
        self.runs += 1


def _raw(tensor: torch.Tensor) -> bytes:
    """The memory from a tensor's first element to its last."""
    span = 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.as_strided((span if tensor.numel() else 0,), (1,)).numpy().tobytes()


TARGETS = {
    "aarch64": ("aarch64-linux-gnu-g++", ["-march=armv8-a"], ["qemu-aarch64"]),
    "x86-64-v2": ("x86_64-linux-gnu-g++", ["-march=x86-64-v2"], ["qemu-x86_64", "-cpu", "Nehalem"]),
}


@pytest.fixture(scope="module", params=TARGETS)
def target(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Target]:
    compiler, flags, emulator = TARGETS[request.param]
    missing = [name for name in (compiler, emulator[0]) if shutil.which(name) is None]
    if missing:
        pytest.skip(f"there is no {' and no '.join(missing)}")
    made = Target(compiler, flags, emulator, tmp_path_factory.mktemp(request.param))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedLayer, "of", classmethod(lambda *_: None))
        patch.setattr(cpp, "_run_all", made.run_all)
        yield made


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SETTINGS if not name.endswith("-bare")])
def test_a_cell_on_another_processor(target: Target, name: str) -> None:
    torch.manual_seed(0)
    cell = SETTINGS[name](10).eval()
    results, runs = [], target.runs
    x_BTF = torch.randn(4, 7, F)
    for backend in ("cpp", "torch"):
        rnn = stretto.RNN(cell, backend=backend)
        x = x_BTF.clone().requires_grad_()
        y_BTH, _ = rnn(x, lengths=[7, 3, 0, 5])
        wanted = [x, *(p for p in cell.parameters() if p.requires_grad)]
        results.append([y_BTH, *torch.autograd.grad(y_BTH.square().sum(), wanted, materialize_grads=True)])
    assert target.runs >= runs + 2, "nothing ran on the other processor"
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=2e-4, atol=2e-5)
