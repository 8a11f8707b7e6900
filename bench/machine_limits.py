"""What this machine can do at best: products of large matrices, and reading memory over and over.

Shape legend: N rows and columns.
"""

import concurrent.futures
import ctypes
from typing import Final, final

import torch

from stretto.kernels import compiled

SIDE: Final = 1024
READ_BYTES: Final = 256 * 2**20
LANES: Final = 8
VECTOR_BYTES: Final = 32

# Eight sums that do not wait for each other, so that nothing but the loads can be the limit.
SOURCE: Final = """
typedef long long V __attribute__((vector_size(32)));
extern "C" long long read_over_and_over(const V* data, long long count, long long times) {
  V a{}, b{}, c{}, d{}, e{}, f{}, g{}, h{};
  for (long long time = 0; time < times; time++) {
    for (const V *p = data, *end = data + count; p < end; p += 8) {
      a += p[0]; b += p[1]; c += p[2]; d += p[3]; e += p[4]; f += p[5]; g += p[6]; h += p[7];
    }
    asm volatile("" : : "r"(data) : "memory");
  }
  V sum = ((a + b) + (c + d)) + ((e + f) + (g + h));
  return sum[0] + sum[1] + sum[2] + sum[3];
}
"""


@final
class LargeProduct:
    """One product of large square matrices by torch.

    Args:
        side: N.
    """

    def __init__(self, side: int = SIDE) -> None:
        self._side = side
        self._a_NN, self._b_NN = torch.randn(side, side), torch.randn(side, side)
        self._out_NN = torch.empty(side, side)

    @property
    def work(self) -> float:
        """Floating-point operations of a run."""
        return 2.0 * self._side**3

    def run(self) -> None:
        """Multiply."""
        torch.mm(self._a_NN, self._b_NN, out=self._out_NN)


@final
class RepeatedRead:
    """A buffer that is read over and over, by threads that have a part of it each.

    Args:
        num_bytes: Of the buffer; rounded up to what a turn of the loop reads.
        threads: How many.
        total_bytes: To read in a run.

    Raises:
        NoCompiler: If the loop cannot be compiled.
    """

    def __init__(self, num_bytes: int, *, threads: int, total_bytes: int = READ_BYTES) -> None:
        turn = LANES * VECTOR_BYTES
        part = -(-num_bytes // (threads * turn)) * turn
        self._threads = threads
        self._count = part // VECTOR_BYTES
        self._times = max(1, total_bytes // (part * threads))
        self._parts = [torch.ones(part, dtype=torch.uint8) for _ in range(threads)]
        self._read = compiled(SOURCE, torch_version=torch.__version__).read_over_and_over
        self._read.argtypes = (ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64)
        self._read.restype = ctypes.c_int64
        self._pool = concurrent.futures.ThreadPoolExecutor(threads)

    @property
    def work(self) -> float:
        """Bytes that a run reads."""
        return float(self._count * VECTOR_BYTES * self._times * self._threads)

    def run(self) -> int:
        """Read, and give the sum of all that was read, modulo 2**64; ctypes lets the threads run at once."""
        return sum(self._pool.map(self._one, self._parts)) % 2**64

    def _one(self, part: torch.Tensor) -> int:
        return int(self._read(part.data_ptr(), self._count, self._times))
