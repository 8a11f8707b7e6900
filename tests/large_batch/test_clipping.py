"""How often clipping bites."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from stretto.large_batch import ClipMeter


@given(norms=st.lists(st.floats(0, 1e6), max_size=30), threshold=st.floats(1e-3, 1e3))
def test_shares_and_factors_are_those_of_the_list(norms: list[float], threshold: float) -> None:
    meter = ClipMeter()
    for norm in norms:
        meter.add(norm, clip_norm=threshold)
    if not norms:
        assert meter.share is None
        assert meter.mean_factor is None
        return
    factors = [threshold / norm if norm > threshold else 1.0 for norm in norms]
    assert meter.share == sum(norm > threshold for norm in norms) / len(norms)
    assert meter.mean_factor == pytest.approx(sum(factors) / len(norms))


def test_the_factor_is_what_torch_multiplies_by() -> None:
    torch.manual_seed(0)
    meter = ClipMeter()
    total = 0.0
    for scale in (0.01, 0.5, 3.0, 20.0):
        weight = nn.Parameter(torch.zeros(50, dtype=torch.float64))
        before = torch.randn(50, dtype=torch.float64) * scale
        weight.grad = before.clone()
        meter.add(float(nn.utils.clip_grad_norm_([weight], 2.0)), clip_norm=2.0)
        total += float(weight.grad.norm() / before.norm())
    assert meter.mean_factor == pytest.approx(total / 4, rel=1e-5)


def test_counting_goes_on_after_a_stop_and_skips_what_is_no_number() -> None:
    meter = ClipMeter()
    for norm in (1.0, math.nan, 8.0, math.inf):
        meter.add(norm, clip_norm=4.0)
    assert meter.num_updates == 2
    other = ClipMeter()
    other.load_state_dict(json.loads(json.dumps(meter.state_dict())))
    other.add(16.0, clip_norm=4.0)
    assert other.mean_factor == pytest.approx((1.0 + 0.5 + 0.25) / 3)
    other.reset()
    assert other == ClipMeter()
