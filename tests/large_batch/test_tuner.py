"""The engine in loops of its users: it declines, grows, goes back, says why, and remembers.

Shape legend: N sequences, D features.
"""

import json
import math
import sys
from typing import Any

import pytest
import torch
from torch import nn

import stretto
from stretto.errors import StrettoError
from stretto.large_batch import BatchTuner, Entry, LargeBatch, SplitByMicroBatch, SplitNorms, ThroughputTable

SIZES = [8, 16, 32, 64, 128, 256, 512]
FLAT = ThroughputTable.of({size: 1.0 + 0.0001 * size for size in SIZES})
LINEAR = ThroughputTable.of({size: 0.001 + 0.01 * size for size in SIZES})


def _tuner(**changed: Any) -> BatchTuner:
    base = {"base_batch_size": 16, "base_lr": 0.1, "base_warmup_epochs": 0.0, "epochs": 10, "warmup_cap": 0.2}
    base |= {name: changed.pop(name) for name in base if name in changed}
    settings = LargeBatch(**{"batch_size": base["base_batch_size"], **base})
    return BatchTuner(settings, **({"num_sequences": 10_000, "table": FLAT} | changed))


def _measure(tuner: BatchTuner, *, phi: float = 400.0, updates: int = 40) -> None:
    """Updates with exactly this noise scale: |G| is 1, and both parts have their expected norms."""
    half = tuner.batch_size / 2
    for _ in range(updates):
        norms = SplitNorms(sizes=[half, half], squares=[1 + phi / half] * 2, square_of_mean=1 + phi / tuner.batch_size)
        assert not tuner.observe(loss=1.0, gradient_norm=1.0, norms=norms)


def test_it_grows_step_by_step_with_rate_and_warm_up_by_the_rule() -> None:
    tuner = _tuner(base_warmup_epochs=0.01, epochs=100)
    sizes = []
    for epoch in range(1, 5):
        _measure(tuner)
        decision = tuner.decide(epoch=epoch)
        sizes.append(decision.batch_size)
        assert decision.noise_scale == pytest.approx(400.0)
        assert decision.lr == pytest.approx(0.1 * (decision.batch_size / 16) ** 0.5) == tuner.settings.lr
        assert decision.warmup_epochs == pytest.approx(0.01 * decision.batch_size / 16)
        assert tuner.batch_size == decision.batch_size
        assert tuner.accumulate == decision.accumulate
    assert sizes == [64, 256, 512, 512]
    assert [decision.action for decision in tuner.decisions] == ["grow", "grow", "grow", "keep"]
    first = tuner.decisions[0]
    assert first.predicted_gain == pytest.approx((26 * 1.0016) / (7.25 * 1.0064) - 1)
    assert first.extra_data == pytest.approx(464 / 416 - 1)
    assert "at most 64 are considered: 4 times the batch in force" in first.reason


def test_a_decision_is_due_when_enough_was_measured_since_the_last() -> None:
    tuner = _tuner()
    _measure(tuner, updates=15)
    assert not tuner.is_due
    _measure(tuner, updates=1)
    assert tuner.is_due
    assert tuner.decide(epoch=0.25).epoch == 0.25
    _measure(tuner, updates=7)
    assert not tuner.is_due
    again = _tuner()
    again.load_state_dict(json.loads(json.dumps(tuner.state_dict())))
    for each in (tuner, again):
        _measure(each, updates=1)
        assert each.is_due
    blind = _tuner(table=None)
    _measure(blind, updates=40)
    assert not blind.is_due


def test_of_decisions_to_stay_the_last_is_kept() -> None:
    tuner = _tuner(table=LINEAR)
    for epoch in (0.5, 1.0, 1.5):
        _measure(tuner)
        assert tuner.decide(epoch=epoch).action == "keep"
    assert [decision.epoch for decision in tuner.decisions] == [1.5]


def test_a_measured_update_counts_for_those_since_the_last() -> None:
    tuner = _tuner()
    _measure(tuner, phi=100.0, updates=16)
    for _ in range(3):
        for _ in range(31):
            tuner.observe(loss=1.0, gradient_norm=1.0)
        state = json.loads(json.dumps(tuner.state_dict()))
        tuner = _tuner()
        tuner.load_state_dict(state)
        _measure(tuner, phi=400.0, updates=1)
    keep = 1 - 1 / tuner.noise.memory
    early, late = sum(keep**at for at in range(3, 19)), 32 * sum(keep**at for at in range(3))
    assert tuner.decide(epoch=1).noise_scale == pytest.approx((early * 100 + late * 400) / (early + late), rel=0.2)
    assert tuner.noise.scale > 350


def test_it_shrinks_to_the_base_at_most_when_noise_has_gone() -> None:
    table = ThroughputTable.of({size: 1.0 + 0.01 * size for size in (1, 2, 4, 8, *SIZES)})
    tuner = _tuner(table=table)
    _measure(tuner)
    assert tuner.decide(epoch=1).action == "grow"
    _measure(tuner, phi=0.0, updates=2000)
    decision = tuner.decide(epoch=2)
    assert (decision.action, decision.batch_size, decision.lr) == ("shrink", 16, 0.1)
    assert tuner.roll_back("it went wrong").action == "keep"


@pytest.mark.parametrize(
    ("changed", "epoch", "most", "said"),
    [
        ({"num_sequences": 400, "epochs": 50}, 1, 40, "10 updates per epoch are needed"),
        ({"num_sequences": 3000}, 9, 30, "100 updates until the end are needed"),
        ({"max_batch_size": 50}, 1, 50, "max_batch_size"),
        ({"max_growth": 2.0}, 1, 32, "2 times the batch in force"),
        ({"num_sequences": 20, "epochs": 50}, 1, 16, "10 updates per epoch are needed"),
    ],
)
def test_growth_has_bounds_that_the_reason_names(changed: dict[str, Any], epoch: int, most: int, said: str) -> None:
    tuner = _tuner(**changed)
    _measure(tuner, phi=1e5)
    decision = tuner.decide(epoch=epoch)
    assert decision.batch_size <= most
    assert f"at most {most} are considered: {said}" in decision.reason
    assert decision.action == ("grow" if most >= 32 else "keep")


def test_rolling_back_sets_a_ceiling() -> None:
    tuner = _tuner()
    assert not tuner.can_roll_back
    _measure(tuner)
    tuner.decide(epoch=1)
    _measure(tuner)
    tuner.decide(epoch=2)
    assert tuner.batch_size == 256
    assert tuner.observe(loss=float("nan"))
    waiting = tuner.decide(epoch=3)
    assert (waiting.action, waiting.reason) == ("keep", "there was trouble: the loss is nan")
    back = tuner.roll_back("the loss is nan")
    assert (back.action, back.batch_size, back.lr) == ("roll-back", 64, pytest.approx(0.2))
    assert back.reason == "the loss is nan; back from 256 to 64, and only batches below 256 from here"
    for epoch in range(3, 8):
        _measure(tuner)
        assert tuner.decide(epoch=epoch).batch_size < 256
    assert tuner.batch_size == 128
    assert [tuner.roll_back("again").batch_size for _ in range(3)] == [64, 16, 16]
    assert "16 is the smallest batch" in tuner.decisions[-1].reason


def test_what_is_not_known_keeps_the_batch_with_a_reason() -> None:
    alone = _tuner(base_batch_size=1)
    alone.observe(loss=1.0, norms=SplitNorms(sizes=[1], squares=[1.0], square_of_mean=1.0))
    assert "one sequence per update on one rank" in alone.decide(epoch=1).reason
    assert "observe got no update of two or more parts" in _tuner().decide(epoch=1).reason
    few = _tuner()
    _measure(few, updates=3)
    assert few.decide(epoch=1).reason == "the noise scale is not known yet: 3 of 16 updates measured"
    hidden = _tuner()
    for _ in range(20):
        hidden.observe(loss=1.0, norms=SplitNorms(sizes=[8, 8], squares=[9.0, 9.0], square_of_mean=1.0))
    assert "too noisy to measure" in hidden.decide(epoch=1).reason
    unmeasured = _tuner(table=None)
    _measure(unmeasured)
    assert "no throughput table" in unmeasured.decide(epoch=1).reason
    entries = (
        Entry(batch_size=16, length=5, seconds=1.0, num_steps=80, problem=""),
        Entry(batch_size=16, length=9, seconds=None, num_steps=0, problem="out of memory"),
    )
    in_part = _tuner(table=ThroughputTable(entries=entries, shares={5: 0.5, 9: 0.5}, update_seconds=0.0))
    _measure(in_part)
    assert "no batch size was timed at every length" in in_part.decide(epoch=1).reason
    unmeasured.table = FLAT
    assert unmeasured.decide(epoch=1).action == "grow"
    over = _tuner()
    _measure(over)
    assert over.decide(epoch=10).reason == "all 10 epochs are done"
    for tuner in (alone, few, hidden, over):
        assert {decision.action for decision in tuner.decisions} == {"keep"}


def test_a_warm_up_that_would_fill_the_run_is_not_chosen() -> None:
    tuner = _tuner(base_warmup_epochs=4.0, warmup_cap=None)
    _measure(tuner)
    decision = tuner.decide(epoch=1)
    assert decision.action == "keep"
    assert "so 64 is not used" in decision.reason


def test_ranks_share_a_batch_and_micro_batches_are_accumulated() -> None:
    table = ThroughputTable.of({1: 1.0, 2: 1.05, 4: 1.1, 8: 4.0})
    tuner = _tuner(table=table, world_size=4, exchange_seconds=5.0, base_batch_size=16)
    assert tuner.accumulate == 1
    _measure(tuner, phi=4000.0)
    decision = tuner.decide(epoch=1)
    assert (decision.batch_size, decision.accumulate) == (64, 4)


def test_curvature_is_judged_with_the_rate_in_force() -> None:
    tuner = _tuner()
    troubles = [tuner.observe(loss=1.0, curvature=25.0) for _ in range(10)]
    assert "rate times curvature is 2.5" in troubles[-1]
    calm = _tuner()
    assert not any(calm.observe(loss=1.0, curvature=25.0, lr=0.05) for _ in range(20))


def test_a_tuner_goes_on_from_its_state() -> None:
    tuner, restored = _tuner(), _tuner(table=None)
    tuner.exchange_seconds = 0.25
    _measure(tuner)
    tuner.decide(epoch=1)
    tuner.roll_back("made up")
    _measure(tuner, phi=300.0, updates=7)
    state = json.loads(json.dumps(tuner.state_dict()))
    restored.load_state_dict(state)
    assert restored.decisions == tuner.decisions
    for one in (tuner, restored):
        _measure(one, updates=5)
    assert restored.decide(epoch=2) == tuner.decide(epoch=2)
    assert restored.state_dict() == tuner.state_dict()
    with pytest.raises(StrettoError, match=r"'base_lr': 0\.1"):
        _tuner(base_lr=0.3).load_state_dict(state)
    with pytest.raises(StrettoError, match="version None"):
        _tuner().load_state_dict({})
    with pytest.raises(StrettoError, match="settings None"):
        _tuner().load_state_dict({"version": state["version"]})


@pytest.mark.parametrize(
    "wrong",
    [
        {"num_sequences": 10},
        {"max_growth": 1.0},
        {"max_batch_size": 8},
        {"epochs": None},
        {"min_gain": math.nan},
        {"exchange_seconds": -1.0},
    ],
)
def test_what_makes_no_sense_is_refused(wrong: dict[str, Any]) -> None:
    (name, value), *_ = wrong.items()
    with pytest.raises(StrettoError, match="without epochs" if value is None else f"{name}={value}"):
        _tuner(**wrong, warmup_cap=None)


class _Loop:
    """Training in plain torch: a linear model on made-up data, each update in two halves."""

    def __init__(self, table: ThroughputTable) -> None:
        torch.manual_seed(0)
        self.x_ND = torch.randn(4096, 10)
        self.y_N = self.x_ND @ torch.linspace(-1, 1, 10) + 2.0 * torch.randn(4096)
        self.model = nn.Linear(10, 1)
        settings = LargeBatch(base_batch_size=16, base_lr=0.01, batch_size=16, epochs=20)
        self.tuner = BatchTuner(settings, num_sequences=4096, table=table)
        self.rate = 1.0

    def epoch(self) -> str:
        """One epoch; the trouble it met, if any."""
        tuner, split = self.tuner, SplitByMicroBatch(self.model.parameters())
        optimizer = torch.optim.SGD(self.model.parameters(), lr=tuner.settings.lr * self.rate)
        for batch in torch.randperm(len(self.x_ND)).split(tuner.batch_size):
            optimizer.zero_grad()
            total = 0.0
            for half in batch.chunk(2):
                loss = (self.model(self.x_ND[half])[:, 0] - self.y_N[half]).square().sum() / len(batch)
                torch.autograd.backward(loss)
                split.add(len(half))
                total += float(loss.detach())
            norms = split.take()
            assert norms is not None
            optimizer.step()
            trouble = tuner.observe(loss=total, gradient_norm=norms.square_of_mean**0.5, norms=norms)
            if trouble:
                return trouble
        return ""


def test_end_to_end_a_flat_table_makes_it_grow_and_an_explosion_takes_it_back() -> None:
    loop = _Loop(FLAT)
    assert loop.epoch() == ""
    grown = loop.tuner.decide(epoch=1)
    assert grown.action == "grow"
    assert grown.noise_scale is not None
    assert grown.noise_scale > 10
    kept = {name: tensor.clone() for name, tensor in loop.model.state_dict().items()}
    assert loop.epoch() == ""
    loop.rate = 1000.0
    trouble = loop.epoch() or loop.epoch()
    assert trouble
    back = loop.tuner.roll_back(trouble)
    assert (back.action, back.batch_size) == ("roll-back", 16)
    loop.model.load_state_dict(kept)
    loop.rate = 1.0
    assert loop.epoch() == ""
    assert loop.tuner.decide(epoch=3).batch_size < grown.batch_size


def test_the_callback_for_lightning_says_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "lightning", None)
    monkeypatch.delitem(sys.modules, "stretto.large_batch.lightning", raising=False)
    with pytest.raises(StrettoError, match="Lightning, which is not installed"):
        _ = stretto.large_batch.TuneBatch
    with pytest.raises(AttributeError, match="no attribute 'TuneBath'"):
        _ = stretto.large_batch.TuneBath
