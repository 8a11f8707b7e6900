"""The rule: published settings, properties over all batch sizes, schedules that stop and go on, and bad input."""

import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from stretto.errors import StrettoError
from stretto.large_batch import LargeBatch

Built = tuple[Optimizer, LRScheduler]
BASE: dict[str, Any] = {"base_batch_size": 20, "base_lr": 1.0, "base_warmup_epochs": 0.2}


@pytest.mark.parametrize(
    ("batch", "lr", "warmup"),
    [
        (512, 4.0, 0.15625),
        (1_024, 5.66, 0.3125),
        (4_096, 11.3, 1.25),
        (8_192, 16.0, 2.5),
        (16_384, 22.6, 5.0),
        (32_768, 32.0, 10.0),
    ],
)
def test_the_published_settings_for_imagenet(batch: int, lr: float, warmup: float) -> None:
    recipe = LargeBatch(base_batch_size=512, base_lr=4.0, base_warmup_epochs=10 / 64, batch_size=batch, epochs=90)
    assert float(f"{recipe.lr:.3g}") == lr
    assert recipe.lr == 4.0 * math.sqrt(batch / 512)
    assert recipe.warmup_epochs == warmup


@pytest.mark.parametrize(
    ("rule", "lr", "warmup"),
    [("legw", 4.0, 3.2), ("sqrt", 4.0, 0.2), ("linear", 16.0, 0.2), ("updates", 4.0, 0.2), ("none", 1.0, 0.2)],
)
def test_the_rules(rule: Any, lr: float, warmup: float) -> None:
    recipe = LargeBatch(**BASE, batch_size=320, rule=rule)
    assert (recipe.scale, recipe.lr, recipe.warmup_epochs) == (16.0, lr, pytest.approx(warmup))


@given(
    base=st.integers(1, 1000),
    times=st.integers(1, 200),
    steps=st.integers(1, 10_000),
    warmup=st.floats(0, 3),
)
def test_warm_up_keeps_its_updates_and_the_step_its_variance(base: int, times: int, steps: int, warmup: float) -> None:
    """With k times fewer updates an epoch, k times the epochs are as many updates; lr^2 / B stays what it was."""
    small = LargeBatch(base_batch_size=base, base_lr=0.3, base_warmup_epochs=warmup, batch_size=base)
    large = LargeBatch(base_batch_size=base, base_lr=0.3, base_warmup_epochs=warmup, batch_size=base * times)
    assert (small.lr, small.warmup_epochs) == (0.3, warmup)
    assert large.lr**2 / large.batch_size == pytest.approx(small.lr**2 / small.batch_size)
    few = small.warmup_updates(updates_per_epoch=steps * times)
    assert abs(large.warmup_updates(updates_per_epoch=steps) - few) <= 1


@given(epochs=st.floats(0.5, 50), base_epochs=st.floats(0.5, 50), times=st.integers(1, 64), steps=st.integers(1, 9999))
def test_the_rule_updates_keeps_the_rate_times_the_root_of_all_updates(
    epochs: float, base_epochs: float, times: int, steps: int
) -> None:
    """And the share of the run that warms up; whatever the number of epochs."""
    settings = {"base_batch_size": 10, "base_lr": 0.02, "base_warmup_epochs": 0.1 * base_epochs}
    recipe = LargeBatch(**settings, batch_size=10 * times, epochs=epochs, base_epochs=base_epochs, rule="updates")
    base_updates, updates = base_epochs * steps * times, epochs * steps
    assert recipe.lr * math.sqrt(updates) == pytest.approx(0.02 * math.sqrt(base_updates))
    assert recipe.warmup_epochs == pytest.approx(0.1 * epochs)


def test_the_rule_updates_holds_for_smaller_batches_too() -> None:
    settings = {"base_batch_size": 320, "base_lr": 0.02, "base_warmup_epochs": 0.3, "epochs": 3}
    recipe = LargeBatch(**settings, batch_size=80, rule="updates")
    assert recipe.lr == pytest.approx(0.01)
    assert recipe.warmup_epochs == pytest.approx(0.3)


@given(cap=st.floats(0, 0.99), epochs=st.floats(0.5, 50), steps=st.integers(1, 500), batch=st.integers(20, 5000))
def test_the_cap_bounds_the_share_of_updates(cap: float, epochs: float, steps: int, batch: int) -> None:
    recipe = LargeBatch(**BASE, batch_size=batch, warmup_cap=cap, epochs=epochs)
    updates = recipe.warmup_updates(updates_per_epoch=steps)
    assert recipe.warmup_epochs == pytest.approx(min(0.2 * batch / 20, cap * epochs))
    assert updates <= cap * epochs * steps * (1 + 1e-9)


def _rates(built: Built, count: int) -> list[float]:
    (optimizer, schedule), found = built, []
    for _ in range(count):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.step()
    return found


def test_rates_of_a_whole_run() -> None:
    recipe = LargeBatch(base_batch_size=10, base_lr=0.5, base_warmup_epochs=0.1, batch_size=40, epochs=6)
    built = recipe.build(nn.Linear(2, 2), updates_per_epoch=10, decay=lambda done: 0.5 ** max(0, int(done) - 1))
    rates = _rates(built, 60)
    assert rates[:4] == [0.25, 0.5, 0.75, 1.0]
    assert rates[4:20] == [1.0] * 16
    assert [rates[10 * epoch] for epoch in range(1, 6)] == [1.0, 0.5, 0.25, 0.125, 0.0625]
    assert [rates[10 * epoch + 9] for epoch in range(1, 6)] == [1.0, 0.5, 0.25, 0.125, 0.0625]


@pytest.mark.parametrize("decay", ["constant", "poly", "exponential", "step", "cosine", "ptb"])
@pytest.mark.parametrize("stop", [0, 1, 5, 23])
def test_a_stopped_schedule_goes_on_to_the_bit(decay: Any, stop: int) -> None:
    def made(lr: float) -> Built:
        recipe = LargeBatch(base_batch_size=4, base_lr=lr, base_warmup_epochs=0.3, batch_size=12, epochs=7)
        return recipe.build(nn.Linear(3, 2), optimizer="momentum", decay=decay, updates_per_epoch=7)

    whole = _rates(made(0.1), 49)
    first = made(0.1)
    assert _rates(first, stop) == whole[:stop]
    saved = json.loads(json.dumps([each.state_dict() for each in first], allow_nan=False))
    # Another rate, another warm-up and another decay: all of it is in the saved state.
    recipe = LargeBatch(base_batch_size=2, base_lr=9.0, base_warmup_epochs=0.01, batch_size=2)
    second = recipe.build(nn.Linear(3, 2), optimizer="momentum", updates_per_epoch=3)
    for each, state in zip(second, saved, strict=True):
        each.load_state_dict(state)
    assert _rates(second, 49 - stop) == whole[stop:]


@given(noise=st.floats(0, 1e9), base=st.integers(1, 500), times=st.integers(1, 100), threshold=st.floats(1e-3, 1e3))
def test_a_scaled_threshold_lies_between_unchanged_and_the_root(
    noise: float, base: int, times: int, threshold: float
) -> None:
    def scaled(phi: float | None) -> Any:
        settings = {"base_batch_size": base, "base_lr": 1.0, "batch_size": base * times}
        return LargeBatch(**settings, base_clip_norm=threshold, noise_scale=phi).clip_norm  # type: ignore[arg-type]

    assert threshold / math.sqrt(times) * (1 - 1e-9) <= scaled(noise) <= threshold * (1 + 1e-9)
    assert scaled(None) == scaled(0.0) == threshold
    assert scaled(1e15) == pytest.approx(threshold / math.sqrt(times), rel=1e-6)


def test_a_scaled_threshold_bites_as_often() -> None:
    """Gradients drawn with a known noise scale: the shares clipped at both batches agree, unscaled they do not."""
    generator = torch.Generator().manual_seed(0)
    size, noise = 400, 80.0
    true = torch.full((size,), 1.0, dtype=torch.float64) / math.sqrt(size)

    def share(batch: int, threshold: float) -> float:
        drawn = torch.randn(2000, size, generator=generator, dtype=torch.float64) * math.sqrt(noise / size / batch)
        return float(((true + drawn).norm(dim=1) > threshold).double().mean())

    recipe = LargeBatch(base_batch_size=8, base_lr=1.0, batch_size=64, base_clip_norm=3.3, noise_scale=noise)
    assert recipe.clip_norm == pytest.approx(3.3 * math.sqrt(2.25 / 11))
    assert share(8, 3.3) == pytest.approx(0.5, abs=0.15)
    assert share(64, recipe.clip_norm) == pytest.approx(share(8, 3.3), abs=0.15)
    assert share(64, 3.3) == 0.0


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"batch_size": 10}, r"batch_size=10 is smaller than base_batch_size=20.*Give the smaller one as base"),
        ({"batch_size": 10, "rule": "linear"}, r"batch_size=10 is smaller than base_batch_size=20.*rule 'linear'"),
        ({"batch_size": 0}, r"batch_size=0\. Give batch_size as an integer"),
        ({"batch_size": 2.5}, r"batch_size=2.5"),
        ({"batch_size": True}, r"batch_size=True"),
        ({"base_batch_size": -1}, r"base_batch_size=-1"),
        ({"base_lr": 0.0}, r"base_lr=0.0"),
        ({"base_lr": -1.0}, r"base_lr=-1.0"),
        ({"base_lr": math.nan}, r"base_lr=nan"),
        ({"base_warmup_epochs": -0.1}, r"base_warmup_epochs=-0.1"),
        ({"epochs": 0}, r"epochs=0"),
        ({"rule": "cubic"}, r"rule='cubic'.*'legw'"),
        ({"base_epochs": 5, "epochs": 2}, r"base_epochs=5 was given with the rule 'legw'"),
        ({"base_epochs": 5, "rule": "updates"}, r"base_epochs=5 .* epochs=None"),
        ({"warmup_cap": 1.0, "epochs": 3}, r"warmup_cap=1.0"),
        ({"warmup_cap": 0.2}, r"warmup_cap=0.2 was given without epochs"),
        ({"epochs": 6}, r"warm-up of 6.4 epochs \(0.2 at a batch of 20, now 640\) fills .* 6 epochs.*warmup_cap"),
        ({"base_clip_norm": 0.0}, r"base_clip_norm=0.0"),
        ({"noise_scale": 2.0}, r"noise_scale=2.0 .* no base_clip_norm"),
        ({"noise_scale": -2.0}, r"noise_scale=-2.0"),
    ],
)
def test_bad_settings_are_quoted_with_the_way_out(values: dict[str, Any], words: str) -> None:
    with pytest.raises(StrettoError, match=words):
        LargeBatch(**{**BASE, "batch_size": 640, **values})


def test_a_smaller_batch_is_fine_without_a_rule_and_a_long_warm_up_with_a_cap() -> None:
    assert LargeBatch(**BASE, batch_size=10, rule="none").lr == 1.0
    assert LargeBatch(**BASE, batch_size=640, epochs=6, warmup_cap=0.2).warmup_epochs == pytest.approx(1.2)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"updates_per_epoch": 0}, r"updates_per_epoch=0"),
        ({"decay": "poly"}, r"'poly' needs the number of epochs"),
        ({"decay": 0.5}, r"decay=0.5"),
        ({"decay": "slow"}, r"decay='slow'"),
        ({"epochs": 0.1}, r"warm-up of 0.2 epochs .* fills"),
        ({"optimizer": "rprop"}, r"optimizer='rprop'"),
    ],
)
def test_bad_arguments_of_build(values: dict[str, Any], words: str) -> None:
    recipe = LargeBatch(**BASE, batch_size=20)
    with pytest.raises(StrettoError, match=words):
        recipe.build(nn.Linear(2, 2), **{"updates_per_epoch": 5, **values})


def test_two_lengths_of_a_run_are_refused() -> None:
    with pytest.raises(StrettoError, match=r"epochs=4, and LargeBatch has epochs=3"):
        LargeBatch(**BASE, batch_size=20, epochs=3).build(nn.Linear(2, 2), updates_per_epoch=5, epochs=4)
