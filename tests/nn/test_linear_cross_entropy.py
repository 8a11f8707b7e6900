"""The output layer and its cross-entropy in one: torch's losses and gradients, whatever the blocks.

Shape legend: P rows, H units, C classes.
"""

from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional

from stretto.errors import StrettoError
from stretto.nn import linear_cross_entropy

TOLERANCES = {torch.float64: (1e-11, 1e-12), torch.float32: (2e-4, 2e-5), torch.bfloat16: (5e-2, 5e-2)}


def _drawn(
    rows: int, size: int, classes: int, *, scale: float = 1.0, dtype: torch.dtype = torch.float64
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(rows + 10 * size + 100 * classes)
    hidden_PH, weight_CH = torch.randn(rows, size) * scale, torch.randn(classes, size)
    tensors = [tensor.to(dtype).requires_grad_() for tensor in (hidden_PH, weight_CH, torch.randn(classes))]
    return tensors[0], tensors[1], tensors[2], torch.randint(-1, classes, (rows,))


@settings(deadline=None, max_examples=60)
@given(
    sizes=st.tuples(st.integers(0, 9), st.integers(1, 5), st.integers(1, 30)),
    scale=st.sampled_from([0.1, 1.0, 1e3]),
    options=st.fixed_dictionaries({"bias": st.booleans(), "smoothing": st.sampled_from([0.0, 0.1, 1.0])}),
    weights=st.sampled_from(["one", "alike", "each"]),
    dtype=st.sampled_from([torch.float64, torch.float32]),
    block=st.sampled_from([1, 40, 1 << 22]),
)
def test_losses_and_gradients_are_torchs(
    *,
    sizes: tuple[int, int, int],
    scale: float,
    options: dict[str, Any],
    weights: str,
    dtype: torch.dtype,
    block: int,
) -> None:
    rows, has_bias, smoothing = sizes[0], options["bias"], options["smoothing"]
    hidden_PH, weight_CH, drawn_bias_C, targets_P = _drawn(*sizes, scale=scale, dtype=dtype)
    bias_C = drawn_bias_C if has_bias else None
    g_P = {"one": torch.ones(rows), "alike": torch.full((rows,), -0.5), "each": torch.randn(rows)}[weights].to(dtype)
    inputs = [hidden_PH, weight_CH, *([drawn_bias_C] if has_bias else [])]
    with patch("stretto.nn.linear_cross_entropy.BLOCK_ELEMENTS", block):
        losses_P = linear_cross_entropy(
            hidden_PH, weight_CH, bias_C, targets_P, ignore_index=-1, label_smoothing=smoothing
        )
        found = torch.autograd.grad(losses_P @ g_P, inputs)
    # In double precision, for here both round otherwise.
    doubles = [tensor.detach().double().requires_grad_() for tensor in inputs]
    scores_PC = functional.linear(*doubles)  # type: ignore[arg-type]
    wanted_P = functional.cross_entropy(
        scores_PC, targets_P, ignore_index=-1, reduction="none", label_smoothing=smoothing
    )
    wanted = torch.autograd.grad(wanted_P @ g_P.double(), doubles)
    rtol, atol = TOLERANCES[dtype]
    torch.testing.assert_close(losses_P.double(), wanted_P, rtol=rtol, atol=atol * max(1.0, scale))
    for mine, theirs in zip(found, wanted, strict=True):
        torch.testing.assert_close(mine.double(), theirs, rtol=rtol, atol=atol * max(1.0, scale) * 10)


def test_half_precision_is_summed_in_single() -> None:
    hidden_PH, weight_CH, bias_C, targets_P = _drawn(50, 8, 20, dtype=torch.bfloat16)
    losses_P = linear_cross_entropy(hidden_PH, weight_CH, bias_C, targets_P, ignore_index=-1)
    assert losses_P.dtype == torch.float32
    found = torch.autograd.grad(losses_P.sum(), (hidden_PH, weight_CH, bias_C))
    doubles = [tensor.detach().double().requires_grad_() for tensor in (hidden_PH, weight_CH, bias_C)]
    scores_PC = functional.linear(*doubles)
    wanted_P = functional.cross_entropy(scores_PC, targets_P, ignore_index=-1, reduction="none")
    rtol, atol = TOLERANCES[torch.bfloat16]
    torch.testing.assert_close(losses_P.double(), wanted_P, rtol=rtol, atol=atol)
    for mine, theirs in zip(found, torch.autograd.grad(wanted_P.sum(), doubles), strict=True):
        assert mine.dtype == torch.bfloat16
        torch.testing.assert_close(mine.double(), theirs, rtol=rtol, atol=atol)


def test_autocast_takes_its_precision() -> None:
    hidden_PH, weight_CH, bias_C, targets_P = _drawn(6, 8, 20, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses_P = linear_cross_entropy(hidden_PH, weight_CH, bias_C, targets_P, ignore_index=-1)
    halves = [tensor.detach().bfloat16() for tensor in (hidden_PH, weight_CH, bias_C)]
    assert torch.equal(losses_P, linear_cross_entropy(*halves, targets_P, ignore_index=-1))
    (found_CH,) = torch.autograd.grad(losses_P.sum(), weight_CH)
    assert found_CH.dtype == torch.float32


def test_rows_that_do_not_count_may_hold_anything() -> None:
    hidden_PH, weight_CH, bias_C, _ = _drawn(3, 4, 5)
    bad_PH = torch.cat([hidden_PH.detach(), torch.full((1, 4), torch.nan, dtype=torch.float64)]).requires_grad_()
    targets_P = torch.tensor([0, 4, 2, -100])
    losses_P = linear_cross_entropy(bad_PH, weight_CH, bias_C, targets_P)
    found_PH, found_CH = torch.autograd.grad(losses_P.sum(), (bad_PH, weight_CH))
    assert not losses_P[3]
    assert not found_PH[3].any()
    assert found_CH.isfinite().all()


def test_a_loss_of_nan_has_a_gradient_of_nan() -> None:
    hidden_PH, weight_CH, bias_C, _ = _drawn(2, 4, 5)
    bad_PH = (hidden_PH.detach() * torch.tensor([[torch.nan], [1.0]])).requires_grad_()
    losses_P = linear_cross_entropy(bad_PH, weight_CH, bias_C, torch.tensor([0, 1]))
    (found_PH,) = torch.autograd.grad(losses_P.sum(), bad_PH)
    assert losses_P.isnan().tolist() == [True, False]
    assert found_PH.isnan().all(dim=1).tolist() == [True, False]


def test_the_gradient_can_be_taken_again_and_has_one_itself() -> None:
    hidden_PH, weight_CH, bias_C, targets_P = _drawn(4, 3, 6)

    def losses(hidden: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return linear_cross_entropy(hidden, weight, bias, targets_P, ignore_index=-1)

    total = losses(hidden_PH, weight_CH, bias_C).sum()
    (first_CH,) = torch.autograd.grad(total, weight_CH, retain_graph=True)
    kept_CH = first_CH.clone()
    first_CH.mul_(7.0)
    (second_CH,) = torch.autograd.grad(total, weight_CH)
    assert torch.equal(second_CH, kept_CH)
    assert torch.autograd.gradcheck(losses, (hidden_PH, weight_CH, bias_C))
    assert torch.autograd.gradgradcheck(losses, (hidden_PH, weight_CH, bias_C))


def test_only_the_gradients_that_are_needed_are_computed() -> None:
    hidden_PH, weight_CH, bias_C, targets_P = _drawn(4, 3, 6)
    losses_P = linear_cross_entropy(hidden_PH.detach(), weight_CH.detach(), bias_C, targets_P, ignore_index=-1)
    (found_C,) = torch.autograd.grad(losses_P.sum(), bias_C)
    assert found_C.sum().item() == pytest.approx(0.0, abs=1e-12)
    with torch.no_grad():
        again_P = linear_cross_entropy(hidden_PH, weight_CH, bias_C, targets_P, ignore_index=-1)
    assert torch.equal(again_P, losses_P)


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    hidden_PH, weight_CH, bias_C, targets_P = _drawn(4, 3, 6)
    with pytest.raises(StrettoError, match="hidden has the shape"):
        linear_cross_entropy(hidden_PH, weight_CH, bias_C, targets_P[:3])
    with pytest.raises(StrettoError, match="hidden has the shape"):
        linear_cross_entropy(hidden_PH[:, :2], weight_CH, bias_C, targets_P)
    with pytest.raises(StrettoError, match=r"bias \(2,\) and targets"):
        linear_cross_entropy(hidden_PH, weight_CH, bias_C[:2], targets_P)


def test_one_row_may_come_without_a_dimension_for_rows() -> None:
    hidden_PH, weight_CH, bias_C, _ = _drawn(1, 3, 6)
    target = torch.tensor(2)
    loss = linear_cross_entropy(hidden_PH[0], weight_CH, bias_C, target)
    expected = functional.cross_entropy(functional.linear(hidden_PH[0], weight_CH, bias_C), target)
    torch.testing.assert_close(loss, expected)
