"""Products, sums and layer norms over the rows of all steps against torch's in float64, at odd sizes.

Shape legend: P rows, B of them in front, K features in, N features out.
"""

from collections.abc import Callable

import pytest
import torch
from torch.nn import functional

from stretto.kernels.backends.cpp.batched import can_norm, column_sums, norm, product, weight_gradient

SIZES = [(1, 1, 1), (3, 5, 7), (96, 6, 16), (97, 13, 33), (257, 64, 48), (600, 31, 100), (5, 200, 3)]
DTYPES = [(torch.float64, 1e-12), (torch.float32, 1e-5)]


def _assert_close(found: torch.Tensor, wanted: torch.Tensor, tolerance: float) -> None:
    assert found.shape == wanted.shape
    assert (found - wanted).abs().max() <= tolerance * max(1.0, float(wanted.abs().max()))


@pytest.mark.parametrize(("dtype", "tolerance"), DTYPES)
@pytest.mark.parametrize(("P", "K", "N"), SIZES)
def test_products_and_sums_equal_torch(P: int, K: int, N: int, dtype: torch.dtype, tolerance: float) -> None:
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
def test_the_first_rows_may_lie_elsewhere(B: int) -> None:
    torch.manual_seed(B)
    head_BK, x_PK = torch.randn(B, 7, dtype=torch.float64), torch.randn(30, 7, dtype=torch.float64)
    d_PN = torch.randn(30, 9, dtype=torch.float64)
    earlier_PK = torch.cat([head_BK, x_PK[: 30 - B]])
    assert torch.equal(weight_gradient(x_PK, d_PN, head_BK=head_BK), weight_gradient(earlier_PK, d_PN))


@pytest.mark.parametrize("N", [3, 40, 96, 100])
def test_threads_do_not_change_a_bit_of_products(N: int, set_threads: Callable[[int], None]) -> None:
    torch.manual_seed(N)
    x_PK, d_PN, weight_KN = torch.randn(4000, 50), torch.randn(4000, N), torch.randn(50, N)
    results = []
    for threads in (1, 2, 3):
        set_threads(threads)
        results.append([product(x_PK, weight_KN), weight_gradient(x_PK, d_PN), column_sums(d_PN, d_PN)])
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


NORM_SIZES = [(1, 1), (5, 3), (7, 8), (3, 17), (40, 33), (300, 100), (2, 1024)]


def _double(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().double().requires_grad_()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize(("P", "N"), NORM_SIZES)
@pytest.mark.parametrize("scales", ["both", "gain", "none"])
def test_norms_equal_torch(P: int, N: int, scales: str, dtype: torch.dtype, tolerance: float) -> None:
    torch.manual_seed(P + N)
    x_PN = (3 * torch.randn(P, N, dtype=dtype) + 1).requires_grad_()
    gain_N = None if scales == "none" else torch.randn(N, dtype=dtype).requires_grad_()
    bias_N = torch.randn(N, dtype=dtype).requires_grad_() if scales == "both" else None
    d_PN = torch.randn(P, N, dtype=dtype)
    given = [item for item in (x_PN, gain_N, bias_N) if item is not None]
    wide = [_double(item) for item in (x_PN, gain_N, bias_N)]
    y_PN = norm(x_PN, gain_N, bias_N, 1e-5)
    wanted_PN = functional.layer_norm(wide[0], (N,), wide[1], wide[2], 1e-5)  # type: ignore[arg-type]
    found = torch.autograd.grad(y_PN, given, d_PN)
    wanted = torch.autograd.grad(wanted_PN, [item for item in wide if item is not None], d_PN.double())
    for one, other in [(y_PN, wanted_PN), *zip(found, wanted, strict=True)]:
        assert (one - other).abs().max() <= tolerance * max(1.0, float(other.detach().abs().max())) * N**0.5


def test_norms_have_gradients_of_gradients() -> None:
    torch.manual_seed(0)
    given = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 5), (5,), (5,))]
    assert torch.autograd.gradcheck(lambda *items: norm(*items, 1e-5), given)
    assert torch.autograd.gradgradcheck(lambda *items: norm(*items, 1e-5), given)


def test_norms_have_gradients_of_several_losses_at_once() -> None:
    torch.manual_seed(0)
    given = [torch.randn(*shape, dtype=torch.float64, requires_grad=True) for shape in ((4, 5), (5,), (5,))]
    y_PN, d_LPN = norm(*given, 1e-5), torch.randn(3, 4, 5, dtype=torch.float64)
    found = torch.autograd.grad(y_PN, given, d_LPN, is_grads_batched=True, retain_graph=True)
    each = [torch.autograd.grad(y_PN, given, d_PN, retain_graph=True) for d_PN in d_LPN]
    for one, others in zip(found, zip(*each, strict=True), strict=True):
        _assert_close(one, torch.stack(others), 1e-12)


@pytest.mark.parametrize("N", [1, 20, 96, 130])
def test_threads_do_not_change_a_bit_of_norms(N: int, set_threads: Callable[[int], None]) -> None:
    torch.manual_seed(1)
    x_PN, d_PN = torch.randn(5000, N), torch.randn(5000, N)
    results = []
    for threads in (1, 2, 3):
        set_threads(threads)
        given = [x_PN.clone().requires_grad_(), torch.ones(N).requires_grad_(), torch.zeros(N).requires_grad_()]
        y_PN = norm(given[0], given[1], given[2], 1e-5)
        results.append([y_PN, *torch.autograd.grad(y_PN, given, d_PN)])
    for other in results[1:]:
        assert all(torch.equal(one, two) for one, two in zip(results[0], other, strict=True))


def test_norms_of_rows_with_gaps_between() -> None:
    x = torch.randn(6, 9, dtype=torch.float64)[:, 2:7]
    assert torch.allclose(norm(x, None, None, 1e-5), functional.layer_norm(x, (5,)), atol=1e-12)


def test_norms_that_are_left_to_torch() -> None:
    x = torch.randn(4, 6)
    assert can_norm(x, [6])
    assert not can_norm(x, [3, 2])
    assert not can_norm(x[None], [6])
    assert not can_norm(x.half(), [6])
    assert not can_norm(x, [6], torch.ones(6, dtype=torch.float64))
    assert not can_norm(x[:0], [6])
