"""Dropout, features on a common scale, and several steps as one, against NumPy, torch and naive loops.

Shape legend: B sequences, T steps, U stacked steps, F features, S steps of all sequences.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stretto.data import SequenceSet
from stretto.nn import Dropout, Standardise, layers, stack_steps, stacked_lengths


def _set(features_SF: npt.NDArray[Any], lengths: list[int]) -> SequenceSet:
    split_N = np.arange(len(lengths)) % 3
    return SequenceSet.from_flat(features_SF, offsets=np.cumsum([0, *lengths]), split_N=split_N)


@settings(deadline=None, max_examples=50)
@given(
    lengths=st.lists(st.integers(1, 20), min_size=3, max_size=9),
    num_features=st.integers(1, 4),
    seed=st.integers(0, 2**32),
    offset=st.sampled_from([0.0, 3.0, -1e4]),
    block=st.sampled_from([1, 7, 30, 1 << 22]),
)
def test_mean_and_deviation_are_those_of_the_training_part(
    lengths: list[int], num_features: int, seed: int, offset: float, block: int
) -> None:
    rng = np.random.default_rng(seed)
    features_SF = rng.normal(offset, 2.0, (sum(lengths), num_features))
    part = _set(features_SF, lengths).part("train")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(layers, "MAX_BLOCK_VALUES", block)
        standardise = Standardise.of(part)
        pooled = Standardise.of(part, num_groups=1)
    rows_SF = np.concatenate([part[index].features_TF.numpy() for index in range(len(part))])
    np.testing.assert_allclose(standardise.mean_F.numpy(), rows_SF.mean(axis=0), rtol=1e-6)
    if len(rows_SF) > 1:
        np.testing.assert_allclose(1.0 / standardise.scale_F.numpy(), rows_SF.std(axis=0), rtol=1e-5)
        np.testing.assert_allclose(1.0 / pooled.scale_F.numpy(), np.full(num_features, rows_SF.std()), rtol=1e-5)
    np.testing.assert_allclose(pooled.mean_F.numpy(), np.full(num_features, rows_SF.mean()), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("value", [0.0, 0.1, -7.3, 1000.1, 123456.7])
def test_a_feature_that_never_changes_is_left_as_it_is(value: float, dtype: type[np.floating[Any]]) -> None:
    lengths = [997, 1, 2, 1501, 3, 4]
    features_SF = np.full((sum(lengths), 1), value, dtype=dtype)
    standardise = Standardise.of(_set(features_SF, lengths).part("train"))
    assert standardise.scale_F.item() == 1.0


def test_a_common_offset_does_not_blur_the_deviation() -> None:
    rng = np.random.default_rng(3)
    features_SF = rng.normal(0.0, 1.0, (300, 1)) + 1e8
    standardise = Standardise.of(_set(features_SF, [100, 100, 100]).part("train"))
    assert 1.0 / standardise.scale_F.item() == pytest.approx(features_SF[:100].std(), rel=1e-6)


def test_real_steps_are_scaled_and_padding_is_zero_whatever_it_held() -> None:
    mean_F, scale_F = torch.tensor([1.0, -2.0]), torch.tensor([0.5, 4.0])
    standardise = Standardise(mean_F, scale_F)
    x_BTF = torch.tensor([[[3.0, 0.0], [float("nan"), 1e38]], [[1.0, -2.0], [1.0, -1.0]]])
    mask_BT = torch.tensor([[True, False], [True, True]])
    assert standardise(x_BTF, mask_BT).tolist() == [[[1.0, 8.0], [0.0, 0.0]], [[0.0, 0.0], [0.0, 4.0]]]


def test_whole_numbers_are_taken_and_the_model_type_decides() -> None:
    standardise = Standardise(torch.tensor([1.0]), torch.tensor([2.0]))
    x_BTF, mask_BT = torch.tensor([[[3], [4]]]), torch.ones(1, 2, dtype=torch.bool)
    assert standardise(x_BTF, mask_BT).dtype == torch.float32
    assert standardise.double()(x_BTF, mask_BT).dtype == torch.float64


def test_the_scale_is_saved_with_the_model_and_is_not_trained() -> None:
    standardise = Standardise(torch.tensor([1.0]), torch.tensor([2.0]))
    assert sorted(standardise.state_dict()) == ["mean_F", "scale_F"]
    assert list(standardise.parameters()) == []


@settings(deadline=None, max_examples=100)
@given(
    num_sequences=st.integers(1, 4),
    num_steps=st.integers(1, 11),
    num_features=st.integers(1, 3),
    factor=st.integers(1, 13),
)
def test_stacking_equals_a_loop(num_sequences: int, num_steps: int, num_features: int, factor: int) -> None:
    shape = (num_sequences, num_steps, num_features)
    x_BTF = torch.arange(1, 1 + math.prod(shape), dtype=torch.float64).reshape(shape)
    stacked_BUF = stack_steps(x_BTF, factor=factor)
    assert stacked_BUF.shape == (num_sequences, math.ceil(num_steps / factor), factor * num_features)
    for row in range(num_sequences):
        for group in range(stacked_BUF.shape[1]):
            expected: list[float] = []
            for step in range(group * factor, (group + 1) * factor):
                expected += x_BTF[row, step].tolist() if step < num_steps else [0.0] * num_features
            assert stacked_BUF[row, group].tolist() == expected


@settings(deadline=None, max_examples=100)
@given(lengths=st.lists(st.integers(0, 100), min_size=1, max_size=8), factor=st.integers(1, 9))
def test_lengths_count_a_last_group_that_is_not_full(lengths: list[int], factor: int) -> None:
    found_B = stacked_lengths(torch.tensor(lengths), factor=factor)
    assert found_B.dtype == torch.int64
    assert found_B.tolist() == [math.ceil(length / factor) for length in lengths]


@settings(deadline=None, max_examples=60)
@given(
    shape=st.lists(st.integers(0, 9), min_size=0, max_size=3),
    p=st.floats(0.001, 0.999) | st.sampled_from([0.0, 1.0]),
    dtype=st.sampled_from([torch.float32, torch.float64, torch.float16, torch.bfloat16]),
    seed=st.integers(0, 2**32),
    is_transposed=st.booleans(),
)
def test_dropout_keeps_or_clears_each_value_with_its_gradient(
    *, shape: list[int], p: float, dtype: torch.dtype, seed: int, is_transposed: bool
) -> None:
    torch.manual_seed(seed)
    x = torch.rand(shape, dtype=torch.float64).to(dtype) + 1
    x = x.transpose(0, -1) if is_transposed and x.ndim else x
    x.requires_grad_()
    dropout = Dropout(p)
    y = dropout(x)
    assert y.dtype == dtype
    assert not x.numel() or y.stride() == nn.functional.dropout(x, p).stride()
    y.backward(torch.full_like(y, 2.0))
    assert x.grad is not None
    scale = 0.0 if p == 1.0 else 1.0 if p == 0.0 else 65536 / round((1 - p) * 65536)
    kept = y != 0
    torch.testing.assert_close(y, torch.where(kept, x * torch.tensor(scale, dtype=dtype), torch.zeros_like(x)))
    torch.testing.assert_close(x.grad, 2 * kept * torch.tensor(scale, dtype=dtype))
    torch.manual_seed(seed + 1)
    once = dropout(x)
    torch.manual_seed(seed + 1)
    assert torch.equal(dropout(x), once)
    assert dropout.eval()(x) is x


@pytest.mark.parametrize("p", [0.1, 0.5, 0.77])
def test_dropout_clears_as_often_as_asked_wherever_a_value_is(p: float) -> None:
    """In each of four places that share 64 bits, and whatever the value before was."""
    torch.manual_seed(3)
    kept_N = (Dropout(p)(torch.ones(400_000)) != 0).double()
    allowed = 5 * math.sqrt(p * (1 - p) / 100_000)
    assert (kept_N.view(-1, 4).mean(dim=0) - (1 - p)).abs().max() < allowed
    for lag in (1, 2, 4):
        assert abs(float((kept_N[lag:] * kept_N[:-lag]).mean()) - (1 - p) ** 2) < allowed
    assert float(Dropout(p)(torch.ones(400_000)).mean()) == pytest.approx(1.0, abs=allowed / (1 - p))


def test_dropout_is_torchs_where_tensors_stand_for_many_or_are_whole_numbers() -> None:
    x_BF = torch.ones(5, 8)
    torch.manual_seed(0)
    found = torch.func.vmap(Dropout(0.5), randomness="different")(x_BF)
    torch.manual_seed(0)
    assert torch.equal(found, torch.func.vmap(nn.Dropout(0.5), randomness="different")(x_BF))
    with pytest.raises(RuntimeError, match="randomness"):
        torch.func.vmap(Dropout(0.5))(x_BF)
    assert torch.autograd.gradgradcheck(
        lambda x: (torch.manual_seed(0), Dropout(0.3)(x))[1] ** 2,
        torch.rand(7, dtype=torch.float64, requires_grad=True),
    )
    with pytest.raises(ValueError, match="probability"):
        Dropout(1.5)
