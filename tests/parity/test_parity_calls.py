"""All ways to call a layer: layouts of the input, what is learned, which results the loss reads.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from parity_cells import drawn, layer
from parity_oracle import KERNELS, assert_close, assert_equal, assert_same_bits, defined, found, noise

import stretto
from cell_settings import F
from stretto.state import flatten

H, T, B = 7, 11, 4
LENGTHS = [5, 11, 0, 8]


LAYOUTS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "steps-first-in-memory": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "every-other-feature": lambda x: x.repeat_interleave(2, dim=2)[..., ::2],
    "every-other-sequence": lambda x: x.repeat_interleave(2, dim=0)[::2],
    "features-first-in-memory": lambda x: x.permute(2, 0, 1).contiguous().permute(1, 2, 0),
    "one-row-for-all": lambda x: x[:1].expand(B, T, F),
    "one-step-for-all": lambda x: x[:, :1].expand(B, T, F),
    "beginning-elsewhere": lambda x: torch.cat([x.new_zeros(1, T, F), x])[1:],
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_memory_layout_of_the_input(lstm: stretto.RNN, layout: str, lengths: list[int] | None) -> None:
    leaf_BTF = noise(B, T, F).requires_grad_()
    arranged_BTF = LAYOUTS[layout](leaf_BTF)
    weights = list(lstm.parameters())
    y_BTH, _ = lstm(arranged_BTF, lengths=lengths)
    hand_BTH, _ = defined(lstm, arranged_BTF.contiguous(), lengths)
    factor_BTH = torch.randn_like(y_BTH)
    ones = torch.autograd.grad((y_BTH * factor_BTH).sum(), [leaf_BTF, *weights], retain_graph=True)
    others = torch.autograd.grad((hand_BTH * factor_BTH).sum(), [leaf_BTF, *weights])
    assert_close([y_BTH, *ones], [hand_BTH, *others])


LOSSES: dict[str, Callable[[torch.Tensor, list[torch.Tensor]], torch.Tensor]] = {
    "sum-of-outputs": lambda y, _: y.sum(),
    "mean-of-outputs": lambda y, _: y.mean(),
    "squared-outputs": lambda y, _: y.square().sum(),
    "transposed-outputs": lambda y, _: (y.transpose(0, 2) ** 3).sum(),
    "last-step": lambda y, _: y[:, -1].square().sum(),
    "first-step": lambda y, _: y[:, 0].sum(),
    "one-unit": lambda y, _: y[..., 2].sum(),
    "one-sequence": lambda y, _: y[1].square().sum(),
    "final-h": lambda _, states: states[0].square().sum(),
    "final-c": lambda _, states: states[1].sum(),
    "one-final-unit": lambda _, states: states[1][1, 3],
    "all": lambda y, states: y.sum() + states[0].sum() * states[1].square().sum(),
    "output-twice": lambda y, _: (y * y.detach() + y.tanh()).sum(),
}


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_which_results_the_loss_reads(lstm: stretto.RNN, loss: str, lengths: list[int] | None) -> None:
    x_BTF = noise(B, T, F).requires_grad_()
    inputs = [x_BTF, *lstm.parameters()]
    y_BTH, state = lstm(x_BTF, lengths=lengths)
    ones = torch.autograd.grad(LOSSES[loss](y_BTH, flatten(state)), inputs, allow_unused=True)
    others = torch.autograd.grad(LOSSES[loss](*defined(lstm, x_BTF, lengths)), inputs, allow_unused=True)
    assert_close(ones, others)
    assert any(gradient is not None and bool(gradient.any()) for gradient in ones)


@pytest.mark.parametrize("learned", ["x", "weight_ih", "weight_hh", "bias_hh", "state"])
def test_one_thing_alone_is_learned(lstm: stretto.RNN, learned: str) -> None:
    lstm.requires_grad_(False)
    cell = lstm.cells[0]
    x_BTF, state = noise(B, T, F), (noise(B, H), noise(B, H))
    leaf = {"x": x_BTF, "state": state[1]}.get(learned)
    leaf = (getattr(cell, learned) if leaf is None else leaf).requires_grad_()
    y_BTH, after = lstm(x_BTF, state, lengths=LENGTHS)
    hand_BTH, ends = defined(lstm, x_BTF, LENGTHS, state)
    (one,) = torch.autograd.grad(y_BTH.square().sum() + flatten(after)[1].sum(), [leaf])
    (other,) = torch.autograd.grad(hand_BTH.square().sum() + ends[1].sum(), [leaf])
    assert_close([one], [other])


def test_nothing_is_learned(lstm: stretto.RNN) -> None:
    lstm.requires_grad_(False)
    y_BTH, state = lstm(noise(B, T, F), lengths=LENGTHS)
    assert not y_BTH.requires_grad
    assert not any(part.requires_grad for part in flatten(state))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("setting", ["lstm", "layer-norm-gru", "attention"])
@pytest.mark.parametrize("backend", KERNELS)
def test_without_gradients_the_same_numbers(setting: str, backend: str, mode: Callable[[], Iterator[None]]) -> None:
    rnn = layer(setting, H, backend=backend, num_layers=2, bidirectional=True)
    x_BTF = noise(B, T, F)
    y_BTO, state = rnn(x_BTF, lengths=LENGTHS)
    with mode():  # type: ignore[attr-defined]
        bare_BTO, bare_state = rnn(x_BTF, lengths=LENGTHS)
    assert not bare_BTO.requires_grad
    assert_equal([y_BTO, *flatten(state)], [bare_BTO, *flatten(bare_state)])


def test_a_first_call_without_gradients_does_not_spoil_the_next(lstm: stretto.RNN) -> None:
    batch = drawn(lstm, T=T, B=B, lengths=LENGTHS)
    with torch.inference_mode():
        lstm(batch.x_BTF, lengths=LENGTHS)
    assert_same_bits(found(lstm, batch), found(layer("lstm", H, backend=lstm.backend), batch))


def test_backward_twice(lstm: stretto.RNN) -> None:
    x_BTF = noise(B, T, F).requires_grad_()
    y_BTH, _ = lstm(x_BTF, lengths=LENGTHS)
    inputs = [x_BTF, *lstm.parameters()]
    first = torch.autograd.grad(y_BTH.sum(), inputs, retain_graph=True)
    second = torch.autograd.grad(2 * y_BTH.sum(), inputs)
    assert_close([2 * gradient for gradient in first], second)


@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("lengths", [None, LENGTHS])
def test_writing_into_a_result_is_right_or_refused(lstm: stretto.RNN, lengths: list[int] | None, place: int) -> None:
    x_BTF = noise(B, T, F).requires_grad_()
    inputs = [x_BTF, *lstm.parameters()]

    def results() -> list[torch.Tensor]:
        y_BTH, (h_BH, c_BH) = lstm(x_BTF, lengths=lengths)
        return [y_BTH, h_BH, c_BH]

    changed = results()
    changed[place] = 2 * changed[place]
    others = torch.autograd.grad(sum(part.square().sum() for part in changed), inputs)  # type: ignore[arg-type]
    written = results()
    try:
        written[place].mul_(2)
        ones = torch.autograd.grad(sum(part.square().sum() for part in written), inputs)  # type: ignore[arg-type]
    except RuntimeError as error:
        assert "inplace" in str(error).replace("-", "")  # noqa: PT017 - either is right
    else:
        assert_close(ones, others)


def test_python_threads_do_not_disturb_each_other() -> None:
    rnn = layer("lstm", H, backend="cpp")
    batches = [drawn(rnn, T=20 + number, B=1 + number, seed=number) for number in range(6)]
    alone = [rnn(batch.x_BTF)[0] for batch in batches]
    with ThreadPoolExecutor(6) as pool:
        together = list(pool.map(lambda batch: rnn(batch.x_BTF)[0], batches * 5))
    assert_equal(alone * 5, together)
