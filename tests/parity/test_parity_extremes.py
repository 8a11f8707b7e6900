"""Numbers at the edges: none at all, tiny, huge, saturated, infinite and not a number.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

import math

import pytest
import torch
from parity_cells import drawn, layer
from parity_oracle import KERNELS, Batch, assert_parity, defined, noise

from cell_settings import F

SCALES = [0.0, 1e-300, 1e-30, 1e-8, 50.0, 1e4, 1e8]


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("setting", ["lstm", "gru", "layer-norm-gru", "attention", "indrnn", "elman-relu-bare"])
def test_inputs_of_any_magnitude(setting: str, scale: float) -> None:
    rnn = layer(setting, 7)
    batch = drawn(rnn, T=12, B=3, given=True)
    assert_parity(rnn, Batch(x_BTF=scale * batch.x_BTF, state=batch.state))


@pytest.mark.parametrize("scale", [0.0, 1e-38, 50.0, 1e4])
def test_inputs_of_any_magnitude_in_single_precision(scale: float) -> None:
    rnn = layer("lstm", 33, dtype=torch.float32)
    batch = drawn(rnn, T=12, B=3, given=True)
    assert_parity(rnn, Batch(x_BTF=scale * batch.x_BTF, state=batch.state))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("setting", ["lstm", "gru", "elman-relu-bare", "layer-norm-gru"])
def test_nan_and_inf_stay_in_their_sequence(setting: str, backend: str, value: float) -> None:
    rnn = layer(setting, 7, backend=backend)
    x_BTF = noise(3, 6, F)
    clean_BTH, _ = rnn(x_BTF)
    x_BTF[1, 2, 0] = value
    y_BTH, _ = rnn(x_BTF)
    torch.testing.assert_close(y_BTH, defined(rnn, x_BTF)[0], rtol=1e-10, atol=1e-10, equal_nan=True)
    assert torch.equal(y_BTH[[0, 2]], clean_BTH[[0, 2]])
    assert torch.equal(y_BTH[1, :2], clean_BTH[1, :2])


@pytest.mark.parametrize("backend", KERNELS)
@pytest.mark.parametrize("setting", ["elman-relu-bare", "ligru-plain", "indrnn"])
def test_the_slope_of_a_rectifier_at_zero_is_that_of_torch(setting: str, backend: str) -> None:
    rnn = layer(setting, 7, backend=backend)
    with torch.no_grad():
        for name, parameter in rnn.named_parameters():
            if "bias" in name:
                parameter.zero_()
    assert_parity(rnn, Batch(x_BTF=torch.zeros(2, 4, F, dtype=torch.float64)), kernels=[backend])


@pytest.mark.parametrize("setting", ["layer-norm-lstm", "layer-norm-gru"])
def test_a_norm_over_equal_values(setting: str) -> None:
    rnn = layer(setting, 7)
    with torch.no_grad():
        for name, parameter in rnn.named_parameters():
            if "weight_" in name:
                parameter.fill_(0.1)
    assert_parity(rnn, drawn(rnn, T=5, B=3))
