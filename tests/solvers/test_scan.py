"""Linear recurrences by a scan, beside substitution step after step.

Shape legend: T steps, S numbers of a state.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.solvers.newton import scan
from stretto.solvers.newton.scan import solve_recurrence


def _substituted(linear_T: torch.Tensor, offset_TS: torch.Tensor) -> torch.Tensor:
    state_S = torch.zeros_like(offset_TS[0])
    made = []
    for linear, offset_S in zip(linear_T, offset_TS, strict=True):
        state_S = (linear @ state_S if linear.dim() == 2 else linear * state_S) + offset_S
        made.append(state_S)
    return torch.stack(made)


def _drawn(T: int, S: int, form: str, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    shape = (T, S, S) if form == "dense" else (T, S)
    linear_T = torch.randn(shape, generator=generator, dtype=torch.float64) / math.sqrt(S)
    return linear_T, torch.randn(T, S, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("form", ["dense", "diagonal"])
@pytest.mark.parametrize("S", [1, 3])
@pytest.mark.parametrize("T", [*range(1, 18), 31, 33, 64, 100, 127])
def test_it_equals_substitution(T: int, S: int, form: str) -> None:
    linear_T, offset_TS = _drawn(T, S, form)
    found_TS, expected_TS = solve_recurrence(linear_T, offset_TS), _substituted(linear_T, offset_TS)
    assert float((found_TS - expected_TS).abs().max()) <= 1e-12 * max(1.0, float(expected_TS.abs().max()))


@settings(deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=5), st.integers(1, 4), st.sampled_from(["dense", "diagonal"]))
def test_recurrences_one_after_another_do_not_touch(lengths: list[int], S: int, form: str) -> None:
    """The first step of each has no linear part, whatever is drawn for it."""
    linear_T, offset_TS = _drawn(sum(lengths), S, form, seed=sum(lengths))
    starts = [sum(lengths[:number]) for number in range(len(lengths))]
    alone = [
        _substituted(linear_T[start : start + length], offset_TS[start : start + length])
        for start, length in zip(starts, lengths, strict=True)
    ]
    linear_T[starts] = 0
    assert torch.allclose(solve_recurrence(linear_T, offset_TS), torch.cat(alone), atol=1e-11)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_diagonal_is_a_matrix(dtype: torch.dtype) -> None:
    linear_TS, offset_TS = (tensor.to(dtype) for tensor in _drawn(45, 5, "diagonal"))
    tolerance = 1e-5 if dtype == torch.float32 else 1e-13
    matrices = solve_recurrence(torch.diag_embed(linear_TS), offset_TS)
    assert torch.allclose(solve_recurrence(linear_TS, offset_TS), matrices, atol=tolerance)


@pytest.mark.parametrize("T", [2, 3, 17, 100, 1024])
def test_it_takes_few_rounds_and_few_products(T: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = []
    joined = scan._joined

    def counted(second_T: torch.Tensor, first_T: torch.Tensor) -> Any:
        rounds.append(len(second_T))
        return joined(second_T, first_T)

    monkeypatch.setattr(scan, "_joined", counted)
    solve_recurrence(*_drawn(T, 2, "dense"))
    assert len(rounds) == int(math.log2(T))
    assert sum(rounds) < T


def test_what_is_given_stays_as_it_is() -> None:
    linear_T, offset_TS = _drawn(20, 3, "dense")
    before = linear_T.clone(), offset_TS.clone()
    found_TS = solve_recurrence(linear_T, offset_TS)
    found_TS.zero_()
    assert torch.equal(linear_T, before[0])
    assert torch.equal(offset_TS, before[1])
    assert solve_recurrence(linear_T[:0], offset_TS[:0]).shape == (0, 3)
    solve_recurrence(linear_T[:1], offset_TS[:1]).zero_()
    assert torch.equal(offset_TS, before[1])


def test_an_overflow_is_not_hidden() -> None:
    linear_TS, offset_TS = torch.full((64, 1), 1e30), torch.ones(64, 1)
    assert not bool(solve_recurrence(linear_TS, offset_TS).isfinite().all())
