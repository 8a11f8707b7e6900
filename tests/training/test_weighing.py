"""Every element of an epoch counts alike, whichever batch it comes in."""

import functools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from small_data import make_task, task_data
from stretto.data import PARTS, SequenceSet
from stretto.distributed import World
from stretto.tasks import TASKS, find_task
from stretto.training import AbstractTask, SilentLog, Trainer, TrainState, Updater

QUICK = ("classify", "language-model")
"""Tasks whose data are there at once."""
LENGTHS_VARY = [
    name if name in QUICK else pytest.param(name, marks=pytest.mark.slow)
    for name in ("handwriting", "label-steps", "language-model", "translate", "classify")
]
# A clip is an element, as for classify.
COUNTED = [
    (name, {}) if name in QUICK else pytest.param(name, {}, marks=pytest.mark.slow)
    for name in sorted(set(TASKS) - {"video"})
]

pytestmark = pytest.mark.filterwarnings("ignore:Seems like `optimizer.step:UserWarning")


@functools.cache
def _embedded(name: str) -> SequenceSet:
    return find_task(name).embedded_data()


def _data(name: str, *, most: int) -> SequenceSet:
    """So many sequences of each part at most."""
    if name == "classify":
        rng = np.random.default_rng(0)
        data = task_data(name, rng.integers(1, 30, 90), rng, parts=(60, 15, 15))
    else:
        data = _embedded(name)
    return data.subset(np.concatenate([np.flatnonzero(data.split_N == part)[:most] for part in range(len(PARTS))]))


def _task(name: str, **settings: Any) -> AbstractTask[Any]:
    values = {"hidden_size": 4, "backend": "torch", "batch_size": 8, "num_buckets": 3, "dropout": 0.0, **settings}
    if name == "language-model":
        values["layout"] = "passages"
    return make_task(name, _data(name, most=44), **values)


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        *COUNTED,
        ("language-model", {"layout": "passages"}),
        pytest.param("label-steps", {"unlabelled": 0}, marks=pytest.mark.slow),
    ],
)
def test_a_task_knows_how_many_elements_its_losses_are_sums_over(name: str, settings: dict[str, Any]) -> None:
    task = make_task(name, _data(name, most=20), hidden_size=4, backend="torch", **settings)
    model, part = task.build_model().eval(), task.data.part("train")
    with torch.no_grad():
        counts = [task.loss(model(b), b).count for b in task.eval_batches(part, world=World(), device="cpu")]
    assert sum(counts) == task.num_elements(part) > 0


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("name", LENGTHS_VARY)
def test_the_updates_of_an_epoch_average_to_the_gradient_of_all(
    name: str, accumulate: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    task = _task(name, clip_norm=1e9)
    feed = task.feed(world=World())
    assert len(feed.edges) > 1
    torch.manual_seed(0)
    model = task.build_model()
    state = TrainState(model, config=task.config, updates_per_epoch=len(feed), batch_size=feed.batch_size)
    weights = list(model.parameters())
    seen: list[list[torch.Tensor]] = []
    monkeypatch.setattr(state.optimizer, "step", lambda: seen.append([p.grad.double().clone() for p in weights]))
    updater = Updater(task, state, world=World())
    feed.begin_epoch(0, model)
    updater.weigh(feed, accumulate=accumulate)
    batches = list(feed)
    for first in range(0, len(batches), accumulate):
        updater.update(batches[first : first + accumulate])
    assert len(seen) == -(-len(batches) // accumulate)
    losses = [task.loss(model(batch), batch) for batch in batches]
    total, count = sum(loss.total for loss in losses), sum(loss.count for loss in losses)
    truth = torch.autograd.grad(total / count, weights)
    # Updates of as many batches as any other, though the last may have fewer.
    share = len(batches) / accumulate
    for at, expected in enumerate(truth):
        found = torch.stack([gradients[at] for gradients in seen]).sum(dim=0) / share
        torch.testing.assert_close(found.float(), expected, rtol=1e-3, atol=1e-5)


def test_without_buckets_an_update_is_the_mean_of_its_own_elements(monkeypatch: pytest.MonkeyPatch) -> None:
    task = _task("language-model", num_buckets=1, clip_norm=1e9)
    feed = task.feed(world=World())
    assert len(feed.edges) == 1
    model = task.build_model()
    state = TrainState(model, config=task.config, updates_per_epoch=len(feed), batch_size=feed.batch_size)
    monkeypatch.setattr(state.optimizer, "step", lambda: None)
    updater = Updater(task, state, world=World())
    updater.weigh(feed)
    batch = next(iter(feed))
    updater.update([batch])
    weights = list(model.parameters())
    loss = task.loss(model(batch), batch)
    for weight, expected in zip(weights, torch.autograd.grad(loss.total / loss.count, weights), strict=True):
        torch.testing.assert_close(weight.grad, expected, rtol=1e-3, atol=1e-5)


def test_training_weighs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weighed: list[tuple[float, int]] = []
    weigh = Updater.weigh

    def noted(self: Updater, feed: Any, *, accumulate: int = 1) -> None:
        weigh(self, feed, accumulate=accumulate)
        weighed.append((self._divisor or 0.0, accumulate))

    monkeypatch.setattr(Updater, "weigh", noted)
    task = _task("language-model", epochs=2, accumulate=2)
    Trainer(task, run=tmp_path, log=SilentLog(), resume=False).run()
    elements, batches = task.num_elements(task.data.part("train")), task.feed(world=World()).whole_epoch
    assert weighed == [(pytest.approx(2 * elements / batches), 2)] * 2
