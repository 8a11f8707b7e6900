"""Gradient noise: estimates without bias, right on quadratics, and from real micro-batches.

Shape legend: D dimensions, N sequences.
"""

import itertools
import json
import math

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from stretto.errors import StrettoError
from stretto.large_batch import NoiseScale, SplitByMicroBatch, SplitNorms, noise_of, parameters_by_gate, squared_norm


def _norms(*squares: float, mean: float, size: float = 4) -> SplitNorms:
    """Of parts of one size."""
    return SplitNorms(sizes=[size] * len(squares), squares=squares, square_of_mean=mean)


def _draw(rng: np.random.Generator, truth_D: npt.NDArray[np.float64], *, deviation: float) -> SplitNorms:
    """Of two parts of four sequences whose mean gradients have this deviation in every dimension."""
    parts_2D = truth_D + deviation * rng.normal(size=(2, len(truth_D)))
    whole_D = parts_2D.mean(axis=0)
    return _norms(*(parts_2D**2).sum(axis=1).tolist(), mean=float(whole_D @ whole_D))


@pytest.mark.parametrize("sizes", [(8, 8), (3, 9, 20), (1, 1, 1, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("seed", [0, *(pytest.param(seed, marks=pytest.mark.slow) for seed in (1, 2))])
def test_the_scale_of_a_quadratic_is_within_a_tenth(seed: int, dtype: torch.dtype, sizes: tuple[int, ...]) -> None:
    """The gradient at x of 0.5 (x - c)' A (x - c), c normal with covariance S, has mean A x and covariance A S A."""
    generator = torch.Generator().manual_seed(seed)
    root_DD = torch.randn(30, 30, generator=generator, dtype=torch.float64)
    hessian_DD = root_DD @ root_DD.T / 30 + 0.1 * torch.eye(30, dtype=torch.float64)
    deviation_D = 0.5 + torch.rand(30, generator=generator, dtype=torch.float64)
    x_D = torch.randn(30, generator=generator, dtype=torch.float64)
    trace = float((hessian_DD @ torch.diag(deviation_D**2) @ hessian_DD).trace())
    known = trace / float((hessian_DD @ x_D).square().sum())
    weight_D = nn.Parameter(x_D.to(dtype))
    hessian_DD, deviation_D = hessian_DD.to(dtype), deviation_D.to(dtype)
    split, meter = SplitByMicroBatch([weight_D]), NoiseScale(memory=2000)
    torch.manual_seed(seed)
    for _ in range(500):
        weight_D.grad = None
        for size in sizes:
            gap_ND = weight_D - torch.randn(size, 30, dtype=dtype) * deviation_D
            torch.autograd.backward(0.5 * ((gap_ND @ hessian_DD) * gap_ND).sum() / sum(sizes))
            split.add(size)
        found = split.take()
        assert found is not None
        meter.add(found)
    assert meter.scale == pytest.approx(known, rel=0.1)
    assert meter.trace == pytest.approx(trace, rel=0.05)


@pytest.mark.parametrize("num_dims", [2, *(pytest.param(count, marks=pytest.mark.slow) for count in (3, 5, 10))])
def test_few_dimensions_do_not_bias_the_scale(num_dims: int) -> None:
    """The squared gradient of an update is then many times smaller by chance alone."""
    rng = np.random.default_rng(1)
    meter = NoiseScale(memory=1_000_000)
    for _ in range(20_000):
        meter.add(_draw(rng, np.ones(num_dims), deviation=1.0))
    # Four sequences have a covariance of one, so one has a trace of 4 a dimension.
    assert meter.scale == pytest.approx(4.0, rel=0.1)


@settings(max_examples=40, deadline=None)
@given(
    population=st.lists(st.integers(-9, 9), min_size=2, max_size=3),
    sizes=st.lists(st.integers(1, 3), min_size=2, max_size=3).filter(lambda sizes: sum(sizes) <= 6),
)
def test_both_estimates_are_without_bias(population: list[int], sizes: list[int]) -> None:
    """The mean over every possible draw from a population is exactly what is to be estimated."""
    found = []
    for draw in itertools.product(population, repeat=sum(sizes)):
        parts = np.split(np.array(draw, dtype=float), np.cumsum(sizes)[:-1])
        squares = [float(part.mean()) ** 2 for part in parts]
        found.append(noise_of(SplitNorms(sizes=sizes, squares=squares, square_of_mean=float(np.mean(draw)) ** 2)))
    trace, square = np.mean(found, axis=0)
    assert trace == pytest.approx(np.var(population), abs=1e-9)
    assert square == pytest.approx(np.mean(population) ** 2, abs=1e-9)


@settings(max_examples=60, deadline=None)
@given(
    values=st.lists(
        st.tuples(st.floats(0.1, 5), st.floats(0.1, 5), st.sampled_from([1, 4, 16, 32])), min_size=1, max_size=300
    ),
    memory=st.integers(1, 50),
)
def test_averages_are_exponential_and_start_without_bias(values: list[tuple[float, float, int]], memory: int) -> None:
    """Each update relative to the size of those before it, which follows by an eighth of the way in powers."""
    meter = NoiseScale(memory=memory, min_updates=1)
    weights = trace = square = 0.0
    keep, usual = 1 - 1 / memory, values[0][1]
    for between, mean, updates in values:
        meter.add(_norms(mean + between, mean + between, mean=mean, size=1), stands_for=updates)
        size = float(np.clip(usual, mean / 1e5, mean * 1e5))
        usual = size ** (7 / 8) * mean ** (1 / 8)
        weights = keep * weights + updates / size
        trace = keep * trace + updates * 2 * between / size
        square = keep * square + updates * (mean - between) / size
    assert meter.trace == pytest.approx(trace / weights)
    assert meter.square == pytest.approx(square / weights, abs=1e-9)
    if square / weights > 1e-6:
        assert meter.scale == pytest.approx(trace / square, rel=1e-4)
    elif square < -1e-6:
        assert meter.scale is None


@settings(max_examples=40, deadline=None)
@given(unit=st.floats(1e-30, 1e30), sizes=st.lists(st.floats(0.1, 5), min_size=2, max_size=40))
def test_the_unit_of_gradients_does_not_matter(unit: float, sizes: list[float]) -> None:
    plain, scaled = NoiseScale(min_updates=1), NoiseScale(min_updates=1)
    for size in sizes:
        plain.add(_norms(1.2 * size, 1.4 * size, mean=size, size=2))
        scaled.add(_norms(1.2 * size * unit, 1.4 * size * unit, mean=size * unit, size=2))
    assert scaled.scale == pytest.approx(plain.scale, rel=1e-6)
    assert scaled.cautious_scale == pytest.approx(plain.cautious_scale, rel=1e-6)


@pytest.mark.parametrize("falls", [1.0, 1e-2, 1e-12])
def test_large_gradients_of_long_ago_do_not_drown_those_of_now(falls: float) -> None:
    """As in the first updates of Adam, whose denominators grow by orders of magnitude."""
    meter = NoiseScale(memory=16)
    for phi, unit, count in ((8.0, 1.0, 40), (200.0, falls, 80)):
        for _ in range(count):
            # Two parts of 8 with noise phi, on average.
            meter.add(_norms(*[unit * (1 + phi / 8)] * 2, mean=unit * (1 + phi / 16), size=8))
    assert meter.scale == pytest.approx(200.0, rel=0.1)


def test_updates_between_the_measured_ones_show_how_gradients_shrink() -> None:
    """Measured now and then, while gradients fall and their noise rises: nearly as if all had been measured."""
    every = 8
    dense, observed, blind = NoiseScale(memory=8 * every), NoiseScale(memory=8), NoiseScale(memory=8)
    for at in range(20 * every):
        size, phi = (1.0, 10.0) if at < 12 * every else (0.01, 200.0)
        norms = _norms(*[size * (1 + phi / 8)] * 2, mean=size * (1 + phi / 16), size=8)
        dense.add(norms)
        if at % every == every - 1:
            for meter in (observed, blind):
                meter.add(norms, stands_for=every)
        # In units of their own.
        observed.observe_norm(1e-6 * norms.square_of_mean)
    assert dense.scale is not None
    assert observed.scale is not None
    assert blind.scale is not None
    assert observed.scale == pytest.approx(dense.scale, rel=0.2)
    assert blind.scale < 0.5 * dense.scale
    observed.observe_norm(math.nan)
    again = NoiseScale(memory=8)
    again.load_state_dict(json.loads(json.dumps(observed.state_dict())))
    for meter in (observed, again):
        meter.observe_norm(1e-9)
        meter.add(_norms(3.0, 3.0, mean=2.0, size=8))
    assert again.state_dict() == observed.state_dict()


def test_a_gradient_that_noise_hides_is_reported() -> None:
    meter = NoiseScale(min_updates=2)
    assert str(meter) == "the noise scale is not known yet: 0 of 2 updates measured"
    for _ in range(3):
        meter.add(_norms(10.0, 10.0, mean=1.0, size=2))
    assert meter.scale is None
    assert meter.square < 0
    assert "too noisy to measure" in str(meter)


def test_without_noise_the_scale_is_zero() -> None:
    meter = NoiseScale(min_updates=1)
    meter.add(SplitNorms(sizes=[3, 5], squares=[2.0, 2.0 - 1e-9], square_of_mean=2.0))
    assert meter.scale == 0.0


def test_norms_of_nan_or_inf_are_left_out_and_counted() -> None:
    meter = NoiseScale(min_updates=1)
    for square in (math.nan, math.inf):
        meter.add(_norms(square, 1.0, mean=1.0, size=1))
    assert (meter.num_updates, meter.num_nonfinite, meter.scale) == (0, 2, None)


@pytest.mark.parametrize("stands_for", [0, -1, math.inf, math.nan])
def test_an_update_that_stands_for_nothing_is_refused(stands_for: float) -> None:
    with pytest.raises(StrettoError, match=f"stands_for={stands_for}"):
        NoiseScale().add(_norms(3.0, 3.0, mean=2.0), stands_for=stands_for)


def test_one_update_that_counts_for_most_makes_the_mean_as_unsure_as_itself() -> None:
    """Forty that count alike show that noise does not hide the gradient; with one that outweighs them it may."""
    for last, is_hidden in ((1.0, False), (1e6, True)):
        meter = NoiseScale(memory=1_000_000)
        for at in range(41):
            square = 2.0 + (at % 2)
            meter.add(_norms(square + 1, square + 1, mean=square), stands_for=last if at == 40 else 1)
        assert meter.is_hidden is is_hidden


def test_a_meter_goes_on_from_its_state_to_the_bit() -> None:
    rng, meter, restored = np.random.default_rng(0), NoiseScale(memory=20), NoiseScale(memory=20)
    for at in range(300):
        update = _draw(rng, np.full(5, 0.3), deviation=0.5)
        for one in (meter, restored)[: 2 if at >= 150 else 1]:
            one.add(update)
        if at == 149:
            restored.load_state_dict(json.loads(json.dumps(meter.state_dict())))
    assert restored.state_dict() == meter.state_dict()
    assert restored.scale == meter.scale
    with pytest.raises(StrettoError, match="version 9"):
        restored.load_state_dict({"version": 9})


@pytest.mark.parametrize(
    ("sizes", "squares", "mean", "said"),
    [
        ([4], [1.0], 1.0, r"parts of the sizes \[4\]"),
        ([4, 0], [1.0, 0.0], 1.0, r"parts of the sizes \[4, 0\]"),
        ([4, -4], [1.0, 1.0], 1.0, r"parts of the sizes \[4, -4\]"),
        ([4, 4], [1.0], 1.0, "2 sizes of parts and 1 squared norms"),
        ([4, 4], [1.0, 1.0], 2.0, "cannot have a mean gradient of squared norm 2.0"),
    ],
)
def test_parts_that_make_no_sense_are_refused(sizes: list[float], squares: list[float], mean: float, said: str) -> None:
    with pytest.raises(StrettoError, match=said):
        noise_of(SplitNorms(sizes=sizes, squares=squares, square_of_mean=mean))
    with pytest.raises(StrettoError, match="memory=0"):
        NoiseScale(memory=0)


def _net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 1)).double()


def _optimizers(model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    every = list(model.parameters())
    return {
        "sgd": torch.optim.SGD(every, lr=0.01, momentum=0.9),
        "adam": torch.optim.Adam(every, lr=0.01, betas=(0.9, 0.95), eps=1e-3),
        "amsgrad": torch.optim.AdamW(every, lr=0.01, amsgrad=True),
        "rmsprop": torch.optim.RMSprop(every, lr=0.01),
        "adagrad": torch.optim.Adagrad(every, lr=0.01),
    }


def _expected(model: nn.Module, name: str, optimizer: torch.optim.Optimizer, gradients: list[torch.Tensor]) -> float:
    total, group = 0.0, optimizer.param_groups[0]
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        state, below = optimizer.state[parameter], torch.ones_like(gradient)
        if name in ("adam", "amsgrad"):
            average = state["max_exp_avg_sq" if name == "amsgrad" else "exp_avg_sq"]
            below = (average / (1 - group["betas"][1] ** float(state["step"]))).sqrt() + group["eps"]
        elif name != "sgd":
            below = state["square_avg" if name == "rmsprop" else "sum"].sqrt() + group["eps"]
        total += float((gradient / below).square().sum())
    return total


@pytest.mark.parametrize("name", ["sgd", "adam", "amsgrad", "rmsprop", "adagrad"])
def test_norms_of_micro_batches_are_those_of_separate_gradients_as_the_optimiser_sees_them(name: str) -> None:
    model = _net()
    optimizer = _optimizers(model)[name]
    for _ in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.randn(5, 4).double()).square().mean())
        optimizer.step()
    batches = [torch.randn(size, 4).double() for size in (2, 5, 3)]
    parts = SplitByMicroBatch(model.parameters(), optimizer=optimizer)
    for _ in range(2):
        optimizer.zero_grad()
        for batch in batches:
            torch.autograd.backward(model(batch).square().sum())
            parts.add(len(batch))
        found = parts.take(scale=0.1)
        assert found is not None
        own = [torch.autograd.grad(model(batch).square().mean(), list(model.parameters())) for batch in batches]
        for square, gradients in zip(found.squares, own, strict=True):
            assert square == pytest.approx(_expected(model, name, optimizer, list(gradients)), rel=1e-9)
        every = torch.autograd.grad(model(torch.cat(batches)).square().mean(), list(model.parameters()))
        assert found.square_of_mean == pytest.approx(_expected(model, name, optimizer, list(every)), rel=1e-9)
        for parameter, gradient in zip(model.parameters(), every, strict=True):
            parameter.grad = gradient
        assert squared_norm(model.parameters(), optimizer) == pytest.approx(found.square_of_mean, rel=1e-9)
    assert found.sizes == (2, 5, 3)


@pytest.mark.parametrize("sparse", [False, True])
def test_the_gradient_of_a_measured_update_is_that_of_plain_accumulation_to_the_bit(sparse: bool) -> None:
    torch.manual_seed(3)
    embed, read, unused = nn.Embedding(9, 4, sparse=sparse), nn.Linear(4, 2), nn.Linear(2, 2)
    weights = [*embed.parameters(), *read.parameters(), *unused.parameters()]
    batches = [torch.randint(0, 9, (size, 3)) for size in (2, 5, 3)]
    sums, split = [], SplitByMicroBatch(weights)
    for is_on in (False, True, True):
        for weight in weights:
            weight.grad = None
        split.begin(is_on=is_on)
        for batch in batches:
            torch.autograd.backward(read(embed(batch)).square().sum())
            split.add(len(batch))
        assert (split.take() is None) is not is_on
        sums.append([None if weight.grad is None else weight.grad.to_dense() for weight in weights])
    for plain, *others in zip(*sums, strict=True):
        assert all(other is None if plain is None else torch.equal(other, plain) for other in others)


def test_a_dense_part_joins_a_sparse_sum() -> None:
    table = nn.Embedding(5, 2, sparse=True)
    split = SplitByMicroBatch(table.parameters())
    torch.autograd.backward(table(torch.tensor([1, 3])).sum())
    split.add(2)
    torch.autograd.backward((2.0 * table.weight).sum())
    split.add(5)
    assert split.take() is not None
    assert table.weight.grad is not None
    assert table.weight.grad.to_dense()[:, 0].tolist() == [2.0, 3.0, 2.0, 3.0, 2.0]


def test_an_update_of_one_part_keeps_its_gradient_and_has_no_norms() -> None:
    weight = nn.Parameter(torch.ones(3))
    split = SplitByMicroBatch([weight])
    torch.autograd.backward((5.0 * weight).sum())
    split.add(4)
    split.begin()
    torch.autograd.backward((2.0 * weight).sum())
    split.add(2)
    assert split.take() is None
    assert weight.grad is not None
    assert weight.grad.tolist() == [2.0] * 3


def test_an_adaptive_optimiser_without_a_step_gives_no_norm() -> None:
    model = _net()
    torch.autograd.backward(model(torch.randn(5, 4).double()).square().mean())
    optimizers = _optimizers(model)
    assert math.isnan(squared_norm(model.parameters(), optimizers["adam"]))
    assert math.isnan(squared_norm(model.parameters(), optimizers["rmsprop"]))
    plain = squared_norm(model.parameters())
    assert squared_norm(model.parameters(), optimizers["sgd"]) == plain > 0


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    torch.manual_seed(1)
    for _ in range(3):
        optimizer.zero_grad()
        torch.autograd.backward(model(torch.randn(5, 7, 3))[0].square().mean())
        optimizer.step()
    torch.autograd.backward(model(torch.randn(5, 7, 3))[0].square().mean())


@pytest.mark.parametrize("gates", [False, True])
def test_lamb_divides_by_its_averages_also_gate_by_gate(gates: bool) -> None:
    import pytorch_optimizer

    torch.manual_seed(0)
    model = nn.LSTM(3, 4)
    optimizer = pytorch_optimizer.Lamb(parameters_by_gate(model) if gates else list(model.parameters()), lr=0.01)
    _stepped(model, optimizer)
    wanted = 0.0
    for group in optimizer.param_groups:
        for one in group["params"]:
            average = optimizer.state[one]["exp_avg_sq"] / (1 - group["betas"][1] ** group["step"])
            wanted += float((one.grad / (average.sqrt() + group["eps"])).double().square().sum())
    assert squared_norm(model.parameters(), optimizer) == pytest.approx(wanted, rel=1e-5)
    assert len(optimizer.param_groups[0]["params"]) == (10 if gates else 4)


def test_parameters_that_the_optimiser_does_not_have_are_refused() -> None:
    model, other = nn.LSTM(3, 4), nn.Linear(5, 6)
    optimizer = torch.optim.Adam(model.parameters())
    _stepped(model, optimizer)
    other.weight.grad = torch.ones_like(other.weight)
    with pytest.raises(StrettoError, match=r"Adam divides gradients, and has no parameter of shape \(6, 5\)"):
        squared_norm([*model.parameters(), *other.parameters()], optimizer)


def test_sparse_and_missing_gradients_count_as_what_they_are() -> None:
    table, unused = nn.Embedding(10, 3, sparse=True), nn.Linear(2, 2)
    every = [*table.parameters(), *unused.parameters()]
    parts = SplitByMicroBatch(every)
    dense = nn.Embedding.from_pretrained(table.weight.detach(), freeze=False)
    for numbers in ([1, 1, 4], [4, 7]):
        for layer in (table, dense):
            torch.autograd.backward(layer(torch.tensor(numbers)).square().sum())
        parts.add(len(numbers))
    assert dense.weight.grad is not None
    wanted = float(dense.weight.grad.double().square().sum())
    found = parts.take()
    assert found is not None
    assert found.square_of_mean == pytest.approx(wanted, rel=1e-6)
    assert squared_norm(every) == pytest.approx(wanted, rel=1e-6)
    assert parts.take() is None
    assert squared_norm(unused.parameters()) == 0.0


def test_half_precision_is_summed_in_single() -> None:
    weight = nn.Parameter(torch.zeros(70_000, dtype=torch.bfloat16))
    weight.grad = torch.ones_like(weight)
    assert squared_norm([weight]) == pytest.approx(70_000, rel=1e-5)


def test_noise_that_hides_the_gradient_does_not_make_the_scale_endless() -> None:
    """Half of many draws end without a scale, or with a huge one; what is used instead is near the truth or below."""
    rng = np.random.default_rng(0)
    dimensions, hidden, huge, far, unknown = 20, 0, 0, 0, 0
    for _ in range(200):
        truth = rng.normal(size=dimensions) * 0.05
        meter = NoiseScale()
        for _ in range(40):
            meter.add(_draw(rng, truth, deviation=0.5))
        phi = dimensions / float(truth @ truth)
        hidden += meter.is_hidden
        huge += meter.scale is None or meter.scale > 2 * phi
        unknown += meter.cautious_scale is None
        far += meter.cautious_scale is not None and not 0 < meter.cautious_scale <= 2 * phi
    assert unknown < 20
    assert hidden > 100
    assert huge > 60
    assert far < 4


def test_a_scale_that_is_known_is_taken_as_it_is() -> None:
    meter = NoiseScale(min_updates=2)
    assert meter.cautious_scale is None
    assert meter.is_hidden
    for square in (2.0, 2.5, 2.2):
        meter.add(_norms(square + 1, square + 1, mean=square))
    assert not meter.is_hidden
    assert meter.cautious_scale == pytest.approx(meter.scale)
