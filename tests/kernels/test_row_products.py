"""Products and sums over rows against torch's in float64, at odd sizes.

Shape legend: P rows, B of them in front, K features in, N features out.
"""

from collections.abc import Callable

import pytest
import torch

from stretto.kernels.row_products import column_sums, product, weight_gradient

SIZES = [(1, 1, 1), (3, 5, 7), (96, 6, 16), (97, 13, 33), (257, 64, 48), (600, 31, 100), (5, 200, 3)]
DTYPES = [(torch.float64, 1e-12), (torch.float32, 1e-5)]


def _assert_close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= tolerance * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(("P", "K", "N"), SIZES)
def test_equal_torch(P: int, K: int, N: int, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(P)
    x_PK, weight_KN, bias_N = (torch.randn(*shape, dtype=dtype) for shape in ((P, K), (K, N), (N,)))
    d_PN, e_PN = torch.randn(P, N, dtype=dtype), torch.randn(P, N, dtype=dtype)
    wide = [item.double() for item in (x_PK, weight_KN, bias_N, d_PN, e_PN)]
    wanted_PN = torch.addmm(wide[2], wide[0], wide[1])
    _assert_close(product(x_PK, weight_KN, bias_N), wanted_PN, tolerance)
    _assert_close(product(x_PK, weight_KN.t().contiguous().t(), bias_N), wanted_PN, tolerance)
    _assert_close(weight_gradient(x_PK, d_PN), wide[0].t() @ wide[3], tolerance)
    _assert_close(column_sums(d_PN), wide[3].sum(0), tolerance)
    _assert_close(column_sums(d_PN, e_PN), (wide[3] * wide[4]).sum(0), tolerance)


@pytest.mark.parametrize("B", [0, 1, 4, 30])
def test_states_before_are_those_after_one_step_later(B: int) -> None:
    torch.manual_seed(B)
    head_BK, x_PK = torch.randn(B, 7, dtype=torch.float64), torch.randn(30, 7, dtype=torch.float64)
    d_PN = torch.randn(30, 9, dtype=torch.float64)
    earlier_PK = torch.cat([head_BK, x_PK[: 30 - B]])
    assert torch.equal(weight_gradient(x_PK, d_PN, head_BK=head_BK), weight_gradient(earlier_PK, d_PN))


@pytest.mark.parametrize("N", [3, 40, 96, 100])
def test_threads_do_not_change_a_bit(N: int, set_threads: Callable[[int], None]) -> None:
    torch.manual_seed(N)
    x_PK, d_PN, weight_KN = torch.randn(4000, 50), torch.randn(4000, N), torch.randn(50, N)
    results = []
    for threads in (1, 2, 3):
        set_threads(threads)
        results.append([product(x_PK, weight_KN), weight_gradient(x_PK, d_PN), column_sums(d_PN, d_PN)])
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))
