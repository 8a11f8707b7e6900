"""The bidirectional LSTM on padded batches: the same as each sequence alone, and as torch's own on packed sequences.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

from stretto.nn import BidirectionalLSTM

TOLERANCE = {torch.float64: 1e-12, torch.float32: 1e-5}
LENGTHS = [[1], [1, 1, 1], [7, 1, 4], [2, 9, 9, 1, 5], [3, 3, 3]]
Gradients = dict[str, torch.Tensor]


def _batch(lengths: list[int], *, num_features: int, extra: int = 0, dtype: torch.dtype) -> torch.Tensor:
    """Real values on real steps, loud rubbish behind."""
    generator = torch.Generator().manual_seed(sum(lengths))
    x_BTF = torch.randn(len(lengths), max(lengths) + extra, num_features, generator=generator, dtype=dtype)
    for row, length in enumerate(lengths):
        x_BTF[row, length:] = 1e3
    return x_BTF


def _weights(lengths: list[int], size: int, *, dtype: torch.dtype) -> list[torch.Tensor]:
    """What makes a scalar of the outputs: every real one counts, each differently."""
    generator = torch.Generator().manual_seed(7)
    return [torch.randn(length, size, generator=generator, dtype=dtype) for length in lengths]


def _gradients(module: nn.Module) -> Gradients:
    found = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    assert found.keys() == dict(module.named_parameters()).keys()
    module.zero_grad()
    return found


def _real_gradients(module: nn.Module, output_BTH: torch.Tensor, lengths: list[int]) -> Gradients:
    weights = _weights(lengths, output_BTH.shape[2], dtype=output_BTH.dtype)
    torch.autograd.backward(sum(((output_BTH[b, : len(w)] * w).sum() for b, w in enumerate(weights)), torch.zeros(())))
    return _gradients(module)


def _assert_close(found: Gradients, expected: Gradients, tolerance: float) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=tolerance, atol=tolerance, msg=f"gradient of {name}")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("num_layers", [1, 2])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_a_padded_batch_equals_its_sequences_alone(lengths: list[int], num_layers: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = BidirectionalLSTM(3, hidden_size=5, num_layers=num_layers).to(dtype)
    x_BTF = _batch(lengths, num_features=3, extra=2, dtype=dtype)
    output_BTH = module(x_BTF, torch.tensor(lengths))
    assert output_BTH.shape == (len(lengths), max(lengths) + 2, 10)
    together = _real_gradients(module, output_BTH, lengths)
    for row, weights_TH in enumerate(_weights(lengths, 10, dtype=dtype)):
        alone_TH = module(x_BTF[row : row + 1, : lengths[row]], torch.tensor([lengths[row]]))[0]
        torch.testing.assert_close(
            output_BTH[row, : lengths[row]], alone_TH, rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )
        torch.autograd.backward((alone_TH * weights_TH).sum())
    _assert_close(together, _gradients(module), TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("num_layers", [1, 2, 3])
@pytest.mark.parametrize("lengths", LENGTHS)
def test_it_equals_torch_on_packed_sequences(lengths: list[int], num_layers: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    module = BidirectionalLSTM(3, hidden_size=5, num_layers=num_layers).to(dtype)
    peer = nn.LSTM(3, 5, num_layers, batch_first=True, bidirectional=True).to(dtype)
    names = {}
    for layer in range(num_layers):
        for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
            names[f"{kind}_l{layer}"] = f"forwards.{layer}.{kind}_l0"
            names[f"{kind}_l{layer}_reverse"] = f"backwards.{layer}.{kind}_l0"
    own = module.state_dict()
    assert sorted(names.values()) == sorted(own)
    peer.load_state_dict({name: own[source] for name, source in names.items()})
    x_BTF = _batch(lengths, num_features=3, dtype=dtype)
    output_BTH = module(x_BTF, torch.tensor(lengths))
    packed = pack_padded_sequence(x_BTF, torch.tensor(lengths), batch_first=True, enforce_sorted=False)
    expected_BTH, _ = pad_packed_sequence(peer(packed)[0], batch_first=True)
    for row, length in enumerate(lengths):
        torch.testing.assert_close(
            output_BTH[row, :length], expected_BTH[row, :length], rtol=TOLERANCE[dtype], atol=TOLERANCE[dtype]
        )
    expected = _real_gradients(peer, expected_BTH, lengths)
    _assert_close(
        _real_gradients(module, output_BTH, lengths),
        {names[name]: value for name, value in expected.items()},
        TOLERANCE[dtype],
    )


@pytest.mark.parametrize("num_layers", [1, 2])
def test_gradients_are_those_of_finite_differences(num_layers: int) -> None:
    torch.manual_seed(0)
    lengths = [3, 1]
    module = BidirectionalLSTM(2, hidden_size=2, num_layers=num_layers).double()
    x_BTF = torch.randn(2, 3, 2, dtype=torch.float64, requires_grad=True)
    mask_BT1 = (torch.arange(3) < torch.tensor(lengths)[:, None])[..., None]

    def real_outputs(given_BTF: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        named = dict(zip(dict(module.named_parameters()), parameters, strict=True))
        output_BTH: torch.Tensor = torch.func.functional_call(module, named, (given_BTF, torch.tensor(lengths)))
        return output_BTH * mask_BT1

    assert torch.autograd.gradcheck(real_outputs, (x_BTF, *module.parameters()))


def test_padding_gets_no_gradient() -> None:
    torch.manual_seed(0)
    lengths = torch.tensor([2, 5])
    module = BidirectionalLSTM(2, hidden_size=3, num_layers=2).double()
    x_BTF = torch.randn(2, 6, 2, dtype=torch.float64, requires_grad=True)
    mask_BT = torch.arange(6) < lengths[:, None]
    torch.autograd.backward(module(x_BTF, lengths)[mask_BT].sum())
    assert x_BTF.grad is not None
    assert (x_BTF.grad[~mask_BT] == 0).all()
    assert (x_BTF.grad[mask_BT] != 0).all()


def test_forget_gates_start_open_and_dropout_is_for_training_alone() -> None:
    module = BidirectionalLSTM(2, hidden_size=3, num_layers=2, dropout=0.5)
    biases = [p for name, p in module.named_parameters() if "bias_ih" in name]
    assert len(biases) == 4
    assert all(bias[3:6].tolist() == [1.0] * 3 and (bias[:3] != 1.0).all() for bias in biases)
    x_BTF, lengths = torch.randn(2, 6, 2), torch.tensor([6, 3])
    assert not torch.equal(module(x_BTF, lengths), module(x_BTF, lengths))
    module.eval()
    assert torch.equal(module(x_BTF, lengths), module(x_BTF, lengths))
