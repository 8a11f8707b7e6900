"""The translation net: the same as plain torch sentence by sentence, and decoded step by step as it was trained.

Shape legend: B pairs, T steps, F features, S source steps, U target steps, P real target steps, H units, C pieces.
"""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from stretto.batching import Batch, collate
from stretto.data import Sample
from stretto.errors import StrettoError
from stretto.nn import Attention
from stretto.tasks.translate import (
    BEGIN,
    END,
    EXTRA_PIECES,
    LENGTH_POWER,
    MAX_LENGTH_RATIO,
    PAD,
    TranslateConfig,
    TranslateModel,
    search,
    split_sides,
)

PIECES = 11
PAIRS = [([3, 4, 5], [6, 7]), ([8], [9, 10, 3, 4, 5]), ([4, 4, 9, 10, 3, 7], [8]), ([5, 6], [3, 3])]


def _batch(pairs: list[tuple[list[int], list[int]]]) -> Batch:
    samples = []
    for index, (source, target) in enumerate(pairs):
        ended = [*target, END]
        steps_T2 = torch.full((max(len(source), len(ended)), 2), PAD)
        steps_T2[: len(source), 0] = torch.tensor(source)
        steps_T2[: len(ended), 1] = torch.tensor(ended)
        samples.append(Sample(features_TF=steps_T2, target=None, index=index))
    return collate(samples)


def _model(seed: int = 0, *, num_pieces: int = PIECES, **changes: Any) -> TranslateModel:
    torch.manual_seed(seed)
    config = TranslateConfig(**{"hidden_size": 6, "dropout": 0.0, "backend": "cpp", **changes})
    model = TranslateModel(num_pieces, config).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-0.9, 0.9)
    return model


def _run(lstm: nn.Module, x_TF: torch.Tensor) -> torch.Tensor:
    """A plain torch layer with the same parameters, which take part in the gradient."""
    assert isinstance(lstm, nn.LSTM)
    plain = nn.LSTM(lstm.input_size, lstm.hidden_size, bidirectional=lstm.bidirectional).double()
    named = dict(lstm.named_parameters())
    y_TH, _ = torch.func.functional_call(plain, named, (x_TF,))
    return y_TH  # type: ignore[no-any-return]


def _plain_memory(model: TranslateModel, source: list[int]) -> torch.Tensor:
    x_SH = model.embed.weight[source] * model.embed.embedding_dim**0.5
    hidden_SH = _run(model.both_ways, x_SH)
    for layer in model.encoder:
        hidden_SH = hidden_SH + _run(layer, hidden_SH)
    return hidden_SH


def _normalised(norm: nn.LayerNorm, x_H: torch.Tensor) -> torch.Tensor:
    variance = (x_H - x_H.mean()).square().mean()
    return (x_H - x_H.mean()) / (variance + norm.eps).sqrt() * norm.weight + norm.bias


def _plain_scores(model: TranslateModel, source: list[int], before: list[int]) -> torch.Tensor:
    """Scores of the pieces that follow each of `before`, one sentence alone, all by plain torch."""
    attention = model.attention
    memory_SH = torch.stack([_normalised(attention.key_norm, step_H) for step_H in _plain_memory(model, source)])
    hidden_UH = _run(model.bottom, model.embed.weight[before] * model.embed.embedding_dim**0.5)
    contexts = []
    for hidden_H in hidden_UH:
        query_H = attention.form.weight @ _normalised(attention.query_norm, hidden_H)
        fit_S = torch.stack([query_H @ step_H for step_H in memory_SH])
        weights_S = (fit_S / memory_SH.shape[1] ** 0.5).softmax(0)
        contexts.append(sum(w * step_H for w, step_H in zip(weights_S, memory_SH, strict=True)))
    context_UH = torch.stack(contexts)  # type: ignore[arg-type]
    for layer in model.decoder:
        hidden_UH = hidden_UH + _run(layer, torch.cat([hidden_UH, context_UH], dim=-1))
    if not len(model.decoder):
        hidden_UH = torch.tanh(torch.cat([hidden_UH, context_UH], dim=-1) @ model.join.weight.T + model.join.bias)
    weight_CH = model.embed.weight if model.output_weight is None else model.output_weight
    return hidden_UH @ weight_CH.T + model.output_bias


def _gradients(model: TranslateModel, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    torch.autograd.backward(loss)
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def _cross_entropy(scores_PC: torch.Tensor, pieces_P: torch.Tensor) -> torch.Tensor:
    smoothing = TranslateConfig().label_smoothing
    return functional.cross_entropy(scores_PC, pieces_P, reduction="sum", label_smoothing=smoothing)


@pytest.mark.parametrize("backend", ["cpp", "torch"])
@pytest.mark.parametrize("tie_output", [True, False])
@pytest.mark.parametrize("num_layers", [1, 2, 3])
def test_a_batch_is_its_sentences_by_plain_torch(backend: str, tie_output: bool, num_layers: int) -> None:
    model = _model(backend=backend, tie_output=tie_output, num_layers=num_layers)
    batch = _batch(PAIRS)
    losses_BU = model(batch)
    model.eval()
    scores_PC = model(batch)[split_sides(batch)[1][0] != PAD]
    pieces_P = torch.tensor([piece for _, target in PAIRS for piece in (*target, END)])
    alone_PC = torch.cat([_plain_scores(model, source, [BEGIN, *target]) for source, target in PAIRS])
    torch.testing.assert_close(scores_PC, alone_PC, rtol=1e-10, atol=1e-12)
    wanted = _gradients(model, _cross_entropy(alone_PC, pieces_P))
    for loss in (_cross_entropy(scores_PC, pieces_P), losses_BU.sum()):
        found = _gradients(model, loss)
        assert found.keys() == wanted.keys() == dict(model.named_parameters()).keys()
        for name, gradient in found.items():
            torch.testing.assert_close(gradient, wanted[name], rtol=1e-10, atol=1e-12, msg=name)


@settings(deadline=None, max_examples=30)
@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=4),
    poison=st.sampled_from([float("nan"), float("inf"), -float("inf"), 1e300]),
    seed=st.integers(0, 100),
)
def test_padding_is_never_attended_to(lengths: list[int], poison: float, seed: int) -> None:
    torch.manual_seed(seed)
    attention, longest = Attention(4).double(), max(lengths) + 2
    asking_BUH = torch.randn(len(lengths), 3, 4).double()
    asked_BSH = torch.randn(len(lengths), longest, 4).double()
    real_BS = torch.arange(longest) < torch.tensor(lengths)[:, None]
    asked_BSH[~real_BS] = poison
    asked_BSH.requires_grad_()
    context_BUH = attention(asking_BUH, asked_BSH, real_BS)
    torch.autograd.backward(context_BUH.square().sum())
    for row, length in enumerate(lengths):
        alone_SH = attention.key_norm(asked_BSH[row, :length].detach())
        asking_UH = attention.query_norm(asking_BUH[row])
        weights_US = (asking_UH @ attention.form.weight.T @ alone_SH.T / 2.0).softmax(dim=-1)
        torch.testing.assert_close(context_BUH[row], weights_US @ alone_SH)
    assert asked_BSH.grad is not None
    assert bool((asked_BSH.grad[~real_BS] == 0).all())
    assert bool(asked_BSH.grad.isfinite().all())


def _plain_greedy(model: TranslateModel, source: list[int]) -> list[int]:
    before = [BEGIN]
    while len(before) <= int(MAX_LENGTH_RATIO * len(source) + EXTRA_PIECES):
        scores_C = _plain_scores(model, source, before)[-1].detach()
        scores_C[[PAD, BEGIN]] = -torch.inf
        before.append(int(scores_C.argmax()))
        if before[-1] == END:
            return before[1:-1]
    return before[1:]


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("num_layers", [1, 2])
def test_greedy_translations_are_those_of_the_plain_net(seed: int, num_layers: int) -> None:
    model = _model(seed, num_layers=num_layers).eval()
    with torch.no_grad():
        # So that translations of all lengths come up.
        model.output_bias[END] += 0.4 * seed
    pieces, _ = search(model, _batch(PAIRS))
    assert pieces == [_plain_greedy(model, source) for source, _ in PAIRS]


def _rated(model: TranslateModel, source: list[int], pieces: list[int]) -> float:
    """The log-probability that the search goes by, of an ended translation."""
    scores_UC = _plain_scores(model, source, [BEGIN, *pieces]).detach()
    gains_UC = scores_UC.log_softmax(dim=-1)
    total = sum(float(gains_C[piece]) for gains_C, piece in zip(gains_UC, [*pieces, END], strict=True))
    return total / ((5.0 + len(pieces) + 1) / 6.0) ** LENGTH_POWER


@pytest.mark.parametrize("seed", range(4))
def test_a_beam_of_every_translation_finds_the_best_there_is(seed: int) -> None:
    model = _model(seed, num_pieces=5).eval()
    source = [3, 4]
    with torch.no_grad():
        # All probable translations are short, so that a wide beam loses none of them.
        model.output_bias[END] += 4.0
    every = [[], [3], [4], *([a, b] for a in (3, 4) for b in (3, 4))]
    best = max(every, key=lambda pieces: _rated(model, source, pieces))
    pieces, _ = search(model, _batch([(source, [3])]), width=60)
    assert pieces == [best]


def test_rows_do_not_disturb_each_other_in_a_beam() -> None:
    model = _model(3).eval()
    together, _ = search(model, _batch(PAIRS), width=3)
    alone = [search(model, _batch([pair]), width=3)[0][0] for pair in PAIRS]
    assert together == alone


def test_a_translation_that_does_not_end_is_cut() -> None:
    model = _model().eval()
    with torch.no_grad():
        model.output_bias[END] = -1e9
    lengths = [len(pieces) for pieces in search(model, _batch(PAIRS), width=2)[0]]
    assert lengths == [int(MAX_LENGTH_RATIO * len(source) + EXTRA_PIECES) for source, _ in PAIRS]


def test_an_odd_size_is_refused() -> None:
    with pytest.raises(StrettoError, match=r"hidden_size is 7.*even"):
        _model(hidden_size=7)
