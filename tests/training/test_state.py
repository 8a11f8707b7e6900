"""The state of training: through a checkpoint on disk and back, the next updates are those that would have followed."""

import json
import math
import typing
from pathlib import Path
from typing import Any, get_args

import pytest
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import LinearLR, OneCycleLR

from stretto.large_batch import OptimizerName
from stretto.training import TrainConfig, TrainState
from stretto.training.checkpoint import load_newest, save_checkpoint
from stretto.training.state import EpochTotals

SCHEDULES = get_args(typing.get_type_hints(TrainConfig)["schedule"])


def _model(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.4), nn.BatchNorm1d(4), nn.GRUCell(4, 2))


def _state(schedule: Any, *, seed: int, batch_size: int | None = None, **settings: Any) -> TrainState:
    model = _model(seed)
    config = TrainConfig(**{"epochs": 2, "learning_rate": 0.01, "schedule": schedule, **settings})
    return TrainState(model, config=config, updates_per_epoch=10, batch_size=batch_size)


def _update(state: TrainState) -> tuple[float, float]:
    """One update on random data: random state, model, optimiser and schedule all show in what it returns."""
    state.optimizer.zero_grad()
    loss = state.model(torch.randn(6, 3)).square().sum()
    torch.autograd.backward(loss)
    state.optimizer.step()
    state.schedule.step()
    state.num_updates += 1
    return loss.item(), float(state.schedule.get_last_lr()[0])


@pytest.mark.parametrize(
    ("schedule", "optimizer", "gates"),
    [
        *((schedule, "adamw", False) for schedule in SCHEDULES),
        *(("one-cycle", name, False) for name in get_args(OptimizerName)),
        *(("one-cycle", name, True) for name in ("lars", "lamb")),
    ],
)
@pytest.mark.parametrize("before", [1, *(pytest.param(before, marks=pytest.mark.slow) for before in (0, 7, 19))])
def test_what_follows_a_restored_state_is_what_would_have_followed(
    tmp_path: Path, schedule: str, optimizer: str, gates: bool, before: int
) -> None:
    state = _state(schedule, seed=0, optimizer=optimizer, gates=gates)
    for _ in range(before):
        _update(state)
    state.epoch, state.batches_done, state.seconds, state.padded_steps = 1, 3, 0.1 + 0.2, 77
    state.totals = EpochTotals(loss=1 / 3, count=5, steps_real=6, padded_steps=7, seconds=0.7)
    saved = state.to_checkpoint(sampler={"epoch": 1}, data_digest="abc")
    save_checkpoint(tmp_path, saved, update=before, keep=1)
    expected = [_update(state) for _ in range(20 - before)]

    restored = _state(schedule, seed=99, optimizer=optimizer, gates=gates)
    found = load_newest(tmp_path).checkpoint
    assert found.state["sampler"] == {"epoch": 1}
    assert found.state["data_digest"] == "abc"
    restored.load(found)
    again = restored.to_checkpoint(sampler={"epoch": 1}, data_digest="abc")
    assert json.loads(json.dumps(again.state)) == found.state
    assert again.tensors.keys() == found.tensors.keys()
    assert all(torch.equal(again.tensors[name], tensor) for name, tensor in found.tensors.items())
    assert (restored.num_updates, restored.epoch, restored.batches_done, restored.padded_steps) == (before, 1, 3, 77)
    assert restored.seconds == 0.1 + 0.2
    assert restored.totals == EpochTotals(loss=1 / 3, count=5, steps_real=6, padded_steps=7, seconds=0.7)
    assert [_update(restored) for _ in range(20 - before)] == expected
    for name, tensor in state.model.state_dict().items():
        assert torch.equal(restored.model.state_dict()[name], tensor), name


def _rates(state: TrainState, count: int) -> list[float]:
    """The rate of each update."""
    found = []
    for _ in range(count):
        found.append(float(state.optimizer.param_groups[0]["lr"]))
        _update(state)
    return found


@pytest.mark.parametrize("schedule", ["one-cycle", "constant"])
def test_settings_left_alone_train_as_adamw_under_these_schedules(schedule: str) -> None:
    state = _state(schedule, seed=0)
    model = _model(0)
    optimizer = AdamW(model.parameters(), lr=0.01, weight_decay=0.01, fused=True)
    plain = TrainState(model, config=TrainConfig(), updates_per_epoch=1)
    plain.optimizer = optimizer
    plain.schedule = (
        OneCycleLR(optimizer, max_lr=0.01, total_steps=21, pct_start=0.15)
        if schedule == "one-cycle"
        else LinearLR(optimizer, start_factor=0.1, total_iters=100)
    )
    torch.manual_seed(5)
    expected = [_update(plain) for _ in range(20)]
    torch.manual_seed(5)
    assert [_update(state) for _ in range(20)] == expected
    for name, tensor in model.state_dict().items():
        assert torch.equal(state.model.state_dict()[name], tensor), name


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize(("rule", "factor"), [("legw", 4.0), ("sqrt", 4.0), ("linear", 16.0), ("none", 1.0)])
def test_the_peak_follows_the_rule_and_the_shape_stays(schedule: str, rule: str, factor: float) -> None:
    small = _rates(_state(schedule, seed=0, batch_size=8, base_batch_size=8, rule=rule), 20)
    large = _rates(_state(schedule, seed=0, batch_size=128, base_batch_size=8, rule=rule), 20)
    assert large == pytest.approx([factor * rate for rate in small], rel=1e-9)
    assert _rates(_state(schedule, seed=0, batch_size=128, rule=rule), 20) == small


def test_the_batch_in_force_is_that_of_the_settings_unless_given() -> None:
    assert _state("poly", seed=0).batch_size == 32
    assert _state("poly", seed=0, batch_size=64).recipe.scale == 1.0
    assert _state("poly", seed=0, accumulate=3, base_batch_size=32).recipe.scale == 3.0
    assert _state("poly", seed=0, batch_size=128).batch_size == 128
    model = nn.Linear(2, 2)
    found = TrainState(model, config=TrainConfig(batch_size="auto", base_batch_size=5), updates_per_epoch=3)
    assert (found.batch_size, found.recipe.scale) == (5, 1.0)
    grown = TrainState(model, config=TrainConfig(batch_size="auto"), updates_per_epoch=3, batch_size=128)
    assert (grown.batch_size, grown.recipe.scale) == (128, 4.0)


def test_warm_up_grows_with_the_batch_up_to_its_cap_and_the_decay_has_its_settings() -> None:
    settings = {"base_batch_size": 8, "warmup_epochs": 0.1, "epochs": 4, "optimizer": "sgd"}
    rates = _rates(_state("constant", seed=0, batch_size=32, **settings), 40)
    assert rates == pytest.approx([0.02 * min(1.0, (update + 1) / 4) for update in range(40)])
    capped = _rates(_state("ptb", seed=0, batch_size=128, warmup_cap=0.1, **settings), 40)
    assert capped[:5] == pytest.approx([0.01, 0.02, 0.03, 0.04, 0.04])
    halved = _rates(_state("ptb", seed=0, flat_epochs=2, decay_factor=0.25, **settings | {"base_batch_size": 32}), 40)
    assert halved[5::10] == pytest.approx([0.01, 0.01, 0.0025, 0.000625])
    cycle = _rates(_state("one-cycle", seed=0, batch_size=64, **settings), 40)
    assert cycle.index(max(cycle)) == pytest.approx(0.2 * 40, abs=1)
    started = _rates(_state("one-cycle", seed=0, **{**settings, "warmup_epochs": 0.0, "base_batch_size": 32}), 40)
    assert started[1:] == sorted(started[1:], reverse=True)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("optimizer", ["adamw", "momentum", "lamb"])
def test_another_batch_continues_at_the_same_place_and_keeps_its_moments(schedule: str, optimizer: str) -> None:
    settings: dict[str, Any] = {"base_batch_size": 8, "epochs": 4, "optimizer": optimizer, "warmup_epochs": 0.2}
    config = TrainConfig(learning_rate=0.01, schedule=schedule, **settings)  # type: ignore[arg-type]
    state = _state(schedule, seed=0, batch_size=8, **settings)
    for _ in range(20):
        _update(state)
    moments = {key: value.clone() for key, value in state.to_checkpoint(sampler={}, data_digest="").tensors.items()}
    # Twenty updates at 8 are ten at 16: half of the run either way.
    state.reschedule(done=10, remaining=10, batch_size=16)
    after = state.to_checkpoint(sampler={}, data_digest="").tensors
    assert after.keys() == moments.keys()
    assert all(torch.equal(after[key], value) for key, value in moments.items() if key.startswith("optimizer."))
    model = _model(0)
    other = TrainState(model, config=config, updates_per_epoch=5, batch_size=16)
    expected = _rates(other, 20)[10:]
    assert state.recipe.lr == pytest.approx(0.01 * math.sqrt(2))
    assert _rates(state, 10) == pytest.approx(expected)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_that_changed_its_batch_resumes_to_the_bit(tmp_path: Path, schedule: str) -> None:
    settings = {"base_batch_size": 8, "optimizer": "momentum", "warmup_epochs": 0.5}
    state = _state(schedule, seed=0, batch_size=8, **settings)
    for _ in range(8):
        _update(state)
    state.reschedule(done=4, remaining=6, batch_size=16)
    _update(state)
    save_checkpoint(tmp_path, state.to_checkpoint(sampler={}, data_digest=""), update=9, keep=1)
    expected = [_update(state) for _ in range(5)]
    restored = _state(schedule, seed=1, batch_size=8, **settings)
    restored.load(load_newest(tmp_path).checkpoint)
    assert (restored.batch_size, restored.recipe) == (16, state.recipe)
    assert [_update(restored) for _ in range(5)] == expected


def test_a_plain_optimiser_has_no_decay_and_no_momentum_unless_asked() -> None:
    state = _state("one-cycle", seed=0, optimizer="sgd")
    _update(state)
    assert {(group["momentum"], group["weight_decay"]) for group in state.optimizer.param_groups} == {(0.0, 0.0)}
    decayed = _state("cosine", seed=0, optimizer="sgd", weight_decay=0.1)
    assert [group["weight_decay"] for group in decayed.optimizer.param_groups] == [0.1, 0.0]
