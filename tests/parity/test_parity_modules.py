"""A layer as a module among others: dtypes, autocast, copies, stored weights, training and evaluation.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from parity_cells import drawn, layer
from parity_oracle import (
    KERNELS,
    assert_parity,
    assert_same_bits,
    defined,
    error_of,
    found,
)
from parity_own_cells import Counting, H

import stretto
from cell_settings import F


@pytest.fixture
def double_by_default() -> Iterator[None]:
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.usefixtures("double_by_default")
@pytest.mark.parametrize("setting", ["clockwork", "layer-norm-gru", "recurrent-dropout"])
def test_double_precision_by_default(setting: str) -> None:
    rnn = layer(setting, 7)
    batch = drawn(rnn, T=5, B=3, lengths=[2, 5, 0])
    assert batch.x_BTF.dtype == torch.float64
    assert assert_parity(rnn, batch)["cpp"].values["y"].dtype == torch.float64


@pytest.mark.usefixtures("double_by_default")
def test_single_precision_where_double_is_the_default() -> None:
    rnn = layer("lstm", 33, dtype=torch.float32)
    assert assert_parity(rnn, drawn(rnn, T=5, B=3))["cpp"].values["y"].dtype == torch.float32


def test_a_layer_follows_its_dtype() -> None:
    rnn = layer("lstm", 7)
    batch = drawn(rnn, T=5, B=3)
    found(rnn, batch)
    rnn.float()
    assert_parity(rnn, drawn(rnn, T=5, B=3))
    rnn.double()
    assert_parity(rnn, batch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_compiled(dtype: torch.dtype) -> None:
    rnn = layer("lstm", 7, dtype=dtype, backend="auto")
    x_BTF = torch.randn(3, 5, F, dtype=dtype)
    y_BTH, _ = rnn(x_BTF, lengths=[2, 5, 0])
    hand_BTH, _ = defined(rnn, x_BTF, [2, 5, 0])
    assert y_BTH.dtype == dtype
    assert error_of(y_BTH, hand_BTH) < 0.02
    assert rnn.explain().backend == "cpp"


def test_autocast_leaves_whole_numbers_alone() -> None:
    rnn = stretto.RNN(Counting())
    x_BTF, given = torch.randn(2, 3, F), (torch.zeros(2, H), torch.tensor([1, 2]))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        _, (_, count_B) = rnn(x_BTF, given)
    assert count_B.dtype == torch.int64
    assert count_B.tolist() == [4, 5]


@pytest.mark.parametrize("mode", [lambda: torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode])
def test_a_plan_asked_for_under_autocast_or_in_inference_mode_is_the_same(mode: Callable[[], Any]) -> None:
    rnn = layer("lstm", 33, dtype=torch.float32)
    with mode():
        explanation = rnn.explain()
    assert explanation.backend == "cpp"


def test_training_and_evaluation_take_turns() -> None:
    rnn = layer("zoneout", 7, backend="cpp")
    batch = drawn(rnn, T=5, B=3)
    still = found(rnn, batch)
    rnn.train()
    assert error_of(found(rnn, batch, seed=1).values["y"], still.values["y"]) > 0.01
    rnn.eval()
    assert_same_bits(found(rnn, batch), still)


@pytest.mark.parametrize("backend", KERNELS)
def test_dropout_between_layers(backend: str) -> None:
    rnn = layer("lstm", 7, backend=backend, num_layers=2, dropout=0.5)
    batch = drawn(rnn, T=5, B=3, lengths=[2, 5, 0])
    assert_parity(rnn, batch, kernels=[backend])
    rnn.train()
    one, two = found(rnn, batch, seed=1), found(rnn, batch, seed=1)
    assert_same_bits(one, two)
    assert error_of(found(rnn, batch, seed=2).values["y"], one.values["y"]) > 0.01
    rnn.dropout = 1.0
    above = stretto.RNN(rnn.cells[1], backend="eager")
    expected_BTH, _ = above(torch.zeros(3, 5, 7, dtype=torch.float64), lengths=batch.lengths)
    assert error_of(found(rnn, batch).values["y"], expected_BTH) < 1e-10
