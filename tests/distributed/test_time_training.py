"""Training with time divided over ranks: the losses, weights and records of one process; what is refused; no hang."""

import dataclasses
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from tiny_tasks import tiny_task
from worlds import run_world

from stretto.batching import Batch, collate
from stretto.data import RegimeSettings, make_regimes, write_npz
from stretto.distributed import World
from stretto.errors import StrettoError
from stretto.kernels.backends.cpp import compiler
from stretto.tasks import TASKS
from stretto.training import (
    EVENTS_FILE,
    AbstractTask,
    EventLog,
    LossSum,
    SilentLog,
    Trainer,
    TrainState,
    Updater,
    read_events,
    validate,
)
from stretto.training.solver import TimeParallelSetup

SETTINGS = {"epochs": 2, "batch_size": 3, "hidden_size": 6, "num_buckets": 2, "dropout": 0.0, "record_sequences": True}
SIGNALS = RegimeSettings(num_train=11, median_length=25, mean_stay=10, seed=2)


def _compile_quickly(rank: int) -> None:
    compiler.BASE_FLAGS = tuple("-O0" if flag == "-O3" else flag for flag in compiler.BASE_FLAGS)  # type: ignore[misc]


def _task(settings: dict[str, Any]) -> AbstractTask[Any]:
    config = validate(TASKS["label-steps"].Config, SETTINGS | settings, source="the test")
    return TASKS["label-steps"](config, make_regimes(SIGNALS))


def _train(world: World, run: str, settings: dict[str, Any], epochs: int = 2, resume: bool = False) -> dict[str, Any]:
    folder = Path(run)
    log = EventLog(folder / EVENTS_FILE) if world.is_rank0 else SilentLog()
    trainer = Trainer(_task(settings), run=folder, log=log, resume=resume, world=world)
    found = {"metrics": trainer.run().metrics} if epochs == 2 else {"valid": {"loss": trainer.train_epoch().valid_loss}}
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in trainer.state.model.parameters()])
    return {**found, "weights": weights.tolist()}


Told: TypeAlias = tuple[dict[str, Any], list[Any]]
"""What the first rank found, which must be what all found, and the events."""


def _ranks(size: int, folder: Path, settings: dict[str, Any], *more: Any) -> Told:
    run = folder / "run"
    if size == 1:
        return _train(World(), str(run), settings, *more), read_events(run)
    found = run_world(
        size, _train, folder / f"world-{size}-{more}", str(run), settings, *more, prepare=_compile_quickly
    )
    assert isinstance(found[0], dict), found[0]
    assert all(item == found[0] for item in found)
    return found[0], read_events(run)


def _assert_same(one: Told, other: Told) -> None:
    for key, value in other[0]["metrics"].items():
        assert one[0]["metrics"][key] == pytest.approx(value, abs=1e-5), key
    assert one[0]["weights"] == pytest.approx(other[0]["weights"], abs=1e-5)
    kinds = {"step": ("loss", "gradient_norm", "rate"), "epoch": ("train_loss", "valid_loss", "value", "padding")}
    for kind, keys in kinds.items():
        mine, theirs = ([event for event in events if event["event"] == kind] for events in (one[1], other[1]))
        assert len(mine) == len(theirs) > 1
        for first, second in zip(mine, theirs, strict=True):
            for key in keys:
                assert first[key] == pytest.approx(second[key], abs=1e-5), (kind, key)
            for key in ("step", "rows", "length", "steps_real", "slots") if kind == "step" else ():
                assert first[key] == second[key], key
            if kind == "step":
                assert sorted(first["sequences"]) == sorted(second["sequences"])


NETS: list[dict[str, Any]] = [{}, {"num_layers": 2, "bidirectional": True, "accumulate": 2}]


@pytest.fixture(scope="module")
def alone(quick_compiler: None, tmp_path_factory: pytest.TempPathFactory) -> Told:
    """One worker with the usual net."""
    return _ranks(1, tmp_path_factory.mktemp("one"), NETS[0])


@pytest.mark.parametrize("net", NETS, ids=str)
def test_ranks_that_divide_steps_train_as_one(net: dict[str, Any], alone: Told, tmp_path: Path) -> None:
    if net:
        alone = _ranks(1, tmp_path / "one", net)
    shared = _ranks(2, tmp_path / "two", {**net, "time_parallel": 2})
    _assert_same(shared, alone)
    told = [event["solving"] for event in shared[1] if event["event"] == "epoch"]
    assert [epoch["solver"] for epoch in told] == ["time_parallel", "time_parallel"]
    batches = [event["step"] for event in shared[1] if event["event"] == "step"]
    assert sum(epoch["batches"] for epoch in told) == len(batches) * net.get("accumulate", 1)
    assert all(epoch["residual_max"] <= 1e-6 for epoch in told)
    assert all(epoch["backward_residual_max"] <= 1e-6 for epoch in told)
    assert all("2 ranks of" in epoch["reason"] for epoch in told)
    assert not any("solving" in event for event in alone[1])


def test_shares_of_sequences_and_of_steps(tmp_path: Path) -> None:
    two, four = _ranks(2, tmp_path / "two", {}), _ranks(4, tmp_path / "four", {"time_parallel": 2})
    _assert_same(four, two)


@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2)])
def test_a_run_goes_on_with_time_divided_or_not(before: int, after: int, alone: Told, tmp_path: Path) -> None:
    _ranks(before, tmp_path / "cut", {"time_parallel": before}, 1)
    found, events = _ranks(after, tmp_path / "cut", {"time_parallel": after}, 2, True)
    assert found["weights"] == pytest.approx(alone[0]["weights"], abs=1e-5)
    assert sum(event["event"] == "resumed" for event in events) == 1


def _refused(world: World) -> dict[str, str]:
    def said(task: AbstractTask[Any]) -> str:
        try:
            Trainer(task, run=Path("unused"), log=SilentLog(), resume=False, world=world)
        except StrettoError as error:
            return str(error)
        return "nothing"

    found = {}
    for name in ("classify", "language-model", "handwriting"):
        task = tiny_task(name, accumulate=1)
        object.__setattr__(task.config, "time_parallel", 2)
        found[name] = said(task)
    found["three"] = said(_task({"time_parallel": 3}))
    found["torch"] = said(_task({"time_parallel": 2, "backend": "torch"}))
    found["solver"] = said(_task({"time_parallel": 2, "solver": "shooting"}))
    found["differing"] = said(_task({"time_parallel": 1 + world.rank}))
    found["right"] = said(_task({"time_parallel": 2}))
    return found


def test_what_cannot_be_divided_is_refused_on_every_rank(tmp_path: Path) -> None:
    for told in run_world(2, _refused, tmp_path):
        assert isinstance(told, dict), told
        for name in ("classify", "language-model", "handwriting"):
            assert f"the task {name!r} needs whole sequences on one rank" in told[name]
        assert "time_parallel=3 does not divide the number of ranks, which is 2" in told["three"]
        assert "backend='torch'" in told["torch"]
        assert "the solver is 'shooting'" in told["solver"]
        assert "time_parallel of rank 1 differs from that of rank 0" in told["differing"]
        assert told["right"] == "nothing"


def _one_bad_block(world: World) -> dict[str, Any]:
    """Accumulated steps of which the first has no loss on the second worker alone."""
    task = _task({"time_parallel": 2, "accumulate": 2, "on_nan": "skip"})
    ranks, train = TimeParallelSetup(2, world=world), task.data.part("train")
    honest = task.loss

    def loss(output: torch.Tensor, batch: Batch) -> LossSum:
        found = honest(output, batch)
        assert batch.indices is not None
        bad = world.rank == 1 and 0 in batch.indices.tolist()
        return LossSum(total=found.total * (torch.nan if bad else 1.0), count=found.count)

    task.loss = loss  # type: ignore[method-assign]
    torch.manual_seed(0)
    model = task.build_model()
    ranks.set_solvers(model)
    state = TrainState(model, config=task.config, updates_per_epoch=2)
    updater = Updater(task, state, world=world, time=ranks)
    skipped = []
    for first in (0, 4):
        pairs = ([first, first + 1], [first + 2, first + 3])
        batches = [collate([dataclasses.replace(train[n], index=n) for n in members]) for members in pairs]
        skipped.append(updater.update(batches).is_skipped)
    return {"skipped": skipped, "finite": all(bool(p.isfinite().all()) for p in model.parameters())}


def test_a_block_without_a_loss_stops_nobody(tmp_path: Path) -> None:
    for told in run_world(2, _one_bad_block, tmp_path, prepare=_compile_quickly):
        assert told == {"skipped": [True, False], "finite": True}


def test_the_command_line(
    alone: Told, tmp_path: Path, main_in_time: Callable[[Sequence[str]], int], capfd: pytest.CaptureFixture[str]
) -> None:
    data, out = tmp_path / "signals.npz", tmp_path / "run"
    write_npz(data, make_regimes(SIGNALS))
    words = "--nproc 2 --time-parallel 2 --batch-size 3 --hidden-size 6 --num-buckets 2 --dropout 0 --epochs 2".split()
    code = main_in_time(["train", "label-steps", "--data", str(data), "--out", str(out), *words])
    assert code == 0, capfd.readouterr().err
    result = json.loads((out / "result.json").read_text())
    for name, value in alone[0]["metrics"].items():
        assert result["metrics"][name] == pytest.approx(value, abs=1e-5), name
    assert result["solving"]["solver"] == "time_parallel"
