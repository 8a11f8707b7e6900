"""The state of training: through a checkpoint on disk and back, the next steps are those that would have followed."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from stretto.training.checkpoint import load_newest, save_checkpoint
from stretto.training.config import TrainConfig
from stretto.training.state import EpochTotals, TrainState


def _state(schedule: Any, *, seed: int) -> TrainState:
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.4), nn.BatchNorm1d(4), nn.Linear(4, 1))
    config = TrainConfig(epochs=2, learning_rate=0.01, schedule=schedule)
    return TrainState(model, config=config, steps_per_epoch=10)


def _update(state: TrainState) -> tuple[float, float]:
    """One step on random data: random state, model, optimiser and schedule all show in what it returns."""
    state.optimizer.zero_grad()
    loss = state.model(torch.randn(6, 3)).square().sum()
    torch.autograd.backward(loss)
    state.optimizer.step()
    state.schedule.step()
    state.step += 1
    return loss.item(), float(state.schedule.get_last_lr()[0])


@pytest.mark.parametrize("schedule", ["one-cycle", "constant"])
@pytest.mark.parametrize("before", [0, 1, 7, 19])
def test_what_follows_a_restored_state_is_what_would_have_followed(tmp_path: Path, schedule: str, before: int) -> None:
    state = _state(schedule, seed=0)
    for _ in range(before):
        _update(state)
    state.epoch, state.used, state.seconds, state.slots = 1, 3, 0.1 + 0.2, 77
    state.totals = EpochTotals(loss=1 / 3, count=5, steps_real=6, slots=7, seconds=0.7)
    saved = state.to_checkpoint(sampler={"epoch": 1}, data_digest="abc")
    save_checkpoint(tmp_path, saved, step=before, keep=1)
    expected = [_update(state) for _ in range(20 - before)]

    restored = _state(schedule, seed=99)
    found = load_newest(tmp_path).checkpoint
    assert found.state["sampler"] == {"epoch": 1}
    assert found.state["data_digest"] == "abc"
    restored.load(found)
    assert (restored.step, restored.epoch, restored.used, restored.slots) == (before, 1, 3, 77)
    assert restored.seconds == 0.1 + 0.2
    assert restored.totals == EpochTotals(loss=1 / 3, count=5, steps_real=6, slots=7, seconds=0.7)
    assert [_update(restored) for _ in range(20 - before)] == expected
    for name, tensor in state.model.state_dict().items():
        assert torch.equal(restored.model.state_dict()[name], tensor), name


def test_a_restored_state_saves_as_the_same_checkpoint() -> None:
    state = _state("one-cycle", seed=0)
    for _ in range(5):
        _update(state)
    first = state.to_checkpoint(sampler={}, data_digest="abc")
    tensors = {name: tensor.clone() for name, tensor in first.tensors.items()}
    restored = _state("one-cycle", seed=1)
    restored.load(first)
    second = restored.to_checkpoint(sampler={}, data_digest="abc")
    assert second.state == first.state
    assert second.tensors.keys() == tensors.keys()
    assert any(name.startswith("optimizer.") for name in tensors)
    for name, tensor in tensors.items():
        assert torch.equal(second.tensors[name], tensor), name


def test_one_cycle_peaks_and_ends_low_and_constant_rises_once() -> None:
    cycle, constant = _state("one-cycle", seed=0), _state("constant", seed=0)
    rates = [_update(cycle)[1] for _ in range(20)]
    assert max(rates) == pytest.approx(0.01, rel=0.05)
    assert rates[-1] < 1e-4
    rising = [_update(constant)[1] for _ in range(120)]
    assert rising == sorted(rising)
    assert rising[-1] == pytest.approx(0.01)
