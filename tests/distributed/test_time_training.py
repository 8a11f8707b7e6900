"""Training on two ranks with time divided, or with a solver: the losses, weights and records of one process; refusals.

Starting processes is what takes time, so that one world of two ranks serves most checks.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch
from tiny_tasks import spoil_loss, tiny_task
from worlds import compile_quickly, rank0_log, run_world

from small_data import make_task
from stretto.batching import collate
from stretto.cli.main import main
from stretto.data import SequenceSet, StepLabels, make_regimes, write_npz
from stretto.distributed import World
from stretto.errors import StrettoError
from stretto.training import (
    AbstractTask,
    SilentLog,
    Trainer,
    TrainState,
    Updater,
    read_events,
)
from stretto.training.solver import TimeParallelSetup

SETTINGS = {"epochs": 2, "batch_size": 3, "hidden_size": 6, "num_buckets": 2, "dropout": 0.0, "record_sequences": True}
SIGNALS = {"num_train": 11, "median_length": 25, "mean_stay": 10, "seed": 2}


def _task(settings: dict[str, Any]) -> AbstractTask[Any]:
    return make_task("label-steps", make_regimes(**SIGNALS), **SETTINGS | settings)


def _train(
    world: World, run: Path | str, settings: dict[str, Any], *, epochs: int = 2, resume: bool = False
) -> dict[str, Any]:
    trainer = Trainer(_task(settings), run=Path(run), log=rank0_log(world, run), resume=resume, world=world)
    found = {"metrics": trainer.run().metrics} if epochs == 2 else {"valid": {"loss": trainer.train_epoch().valid_loss}}
    weights = torch.cat([parameter.detach().reshape(-1) for parameter in trainer.state.model.parameters()])
    return {**found, "weights": weights.tolist()}


Trained: TypeAlias = tuple[dict[str, Any], list[Any]]
"""What the ranks found, and the events."""


def _assert_same(one: Trained, other: Trained) -> None:
    for key, value in other[0]["metrics"].items():
        assert one[0]["metrics"][key] == pytest.approx(value, abs=1e-5), key
    assert one[0]["weights"] == pytest.approx(other[0]["weights"], abs=1e-5)
    kinds = {"update": ("loss", "gradient_norm", "rate"), "epoch": ("train_loss", "valid_loss", "value", "padding")}
    for kind, keys in kinds.items():
        mine, theirs = ([event for event in events if event["event"] == kind] for events in (one[1], other[1]))
        assert len(mine) == len(theirs) > 1
        for first, second in zip(mine, theirs, strict=True):
            for key in keys:
                assert first[key] == pytest.approx(second[key], abs=1e-5), (kind, key)
            for key in ("update", "rows", "length", "steps_real", "padded_steps") if kind == "update" else ():
                assert first[key] == second[key], key
            if kind == "update":
                assert sorted(first["sequences"]) == sorted(second["sequences"])


@pytest.fixture(scope="module")
def alone(quick_compiler: None, tmp_path_factory: pytest.TempPathFactory) -> Trained:
    """One rank with the usual net."""
    run = tmp_path_factory.mktemp("one")
    return _train(World(), run, {}), read_events(run)


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


def _one_bad_block(world: World) -> dict[str, Any]:
    """Two updates of two batches each; in the first, the loss of rank 1 alone is NaN."""
    task = _task({"time_parallel": 2, "accumulate": 2, "on_nan": "skip"})
    ranks, train = TimeParallelSetup(2, world=world), task.data.part("train")
    spoil_loss(task, lambda indices: world.rank == 1 and 0 in indices)
    torch.manual_seed(0)
    model = task.build_model()
    ranks.set_solvers(model)
    state = TrainState(model, config=task.config, updates_per_epoch=2)
    updater = Updater(task, state, world=world, time_parallel=ranks)
    skipped = []
    for first in (0, 4):
        pairs = ([first, first + 1], [first + 2, first + 3])
        batches = [collate([dataclasses.replace(train[n], index=n) for n in members]) for members in pairs]
        skipped.append(updater.update(batches).is_skipped)
    return {"skipped": skipped, "finite": all(bool(p.isfinite().all()) for p in model.parameters())}


def _solve_an_epoch(world: World, run: str, settings: dict[str, Any]) -> Any:
    rng, lengths_N = np.random.default_rng(0), np.full(9, 40)
    offsets = np.cumsum([0, *lengths_N])
    data = SequenceSet.from_flat(
        rng.normal(size=(offsets[-1], 2)).astype(np.float32),
        offsets=offsets,
        targets=StepLabels.check(rng.integers(1, 3, offsets[-1]), offsets=offsets, names=None, source=""),
        split_N=np.repeat([0, 1, 2], [5, 2, 2]),
    )
    values = {
        "epochs": 2,
        "batch_size": 1,
        "hidden_size": 3,
        "dropout": 0.0,
        "learning_rate": 1e-30,
        "weight_decay": 0.0,
        **settings,
    }
    task = make_task("label-steps", data, **values)
    record = Trainer(task, run=Path(run), log=SilentLog(), resume=False, world=world).train_epoch()
    solving = record.solving
    assert solving is not None
    return [solving.batches, solving.residual_mean, solving.residual_max, record.train_loss]


SHOOTING = {"solver": "shooting", "chunks": 2, "tolerance": 1e-3}


def _two_ranks(world: World, folder: str) -> dict[str, Any]:
    runs, divided = Path(folder), {"time_parallel": 2}
    found: dict[str, Any] = {"trained": _train(world, runs / "trained", divided)}
    _train(world, runs / "begun by two", divided, epochs=1)
    found["begun by one"] = _train(world, runs / "begun by one", divided, resume=True)
    found["refused"] = _refused(world)
    found["bad block"] = _one_bad_block(world)
    found["shooting"] = _solve_an_epoch(world, str(runs / "shooting"), SHOOTING)
    try:
        _solve_an_epoch(world, str(runs / "warm start"), {"solver": "warm_start", "chunks": 2})
    except StrettoError as error:
        found["warm start"] = str(error)
    return found


@pytest.fixture(scope="module")
def runs(quick_compiler: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of all runs."""
    folder = tmp_path_factory.mktemp("runs")
    _train(World(), folder / "begun by one", {}, epochs=1)
    return folder


@pytest.fixture(scope="module")
def two_ranks(runs: Path, tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """What each of two ranks found."""
    found = run_world(2, _two_ranks, tmp_path_factory.mktemp("two"), str(runs), prepare=compile_quickly)
    assert all(isinstance(item, dict) for item in found), found
    return found


def _assert_trained_as_one(shared: Trained, alone: Trained, *, accumulate: int = 1) -> None:
    _assert_same(shared, alone)
    epochs = [event["solving"] for event in shared[1] if event["event"] == "epoch"]
    assert [epoch["solver"] for epoch in epochs] == ["time_parallel", "time_parallel"]
    updates = [event["update"] for event in shared[1] if event["event"] == "update"]
    assert sum(epoch["batches"] for epoch in epochs) == len(updates) * accumulate
    assert all(epoch["residual_max"] <= 1e-6 for epoch in epochs)
    assert all(epoch["backward_residual_max"] <= 1e-6 for epoch in epochs)
    assert all("2 ranks of" in epoch["reason"] for epoch in epochs)
    assert not any("solving" in event for event in alone[1])


def test_ranks_that_divide_steps_train_as_one(two_ranks: list[dict[str, Any]], runs: Path, alone: Trained) -> None:
    assert two_ranks[0]["trained"] == two_ranks[1]["trained"]
    _assert_trained_as_one((two_ranks[0]["trained"], read_events(runs / "trained")), alone)


def test_a_run_resumes_with_time_divided_or_not(two_ranks: list[dict[str, Any]], runs: Path, alone: Trained) -> None:
    found = {
        "begun by one": two_ranks[0]["begun by one"],
        "begun by two": _train(World(), runs / "begun by two", {}, resume=True),
    }
    for name, resumed in found.items():
        assert resumed["weights"] == pytest.approx(alone[0]["weights"], abs=1e-5)
        assert sum(event["event"] == "resumed" for event in read_events(runs / name)) == 1


def test_what_cannot_be_divided_is_refused_on_every_rank(two_ranks: list[dict[str, Any]]) -> None:
    for item in two_ranks:
        found = item["refused"]
        for name in ("classify", "language-model", "handwriting"):
            assert f"the task {name!r} needs whole sequences on one rank" in found[name]
        assert "time_parallel=3 does not divide the number of ranks, which is 2" in found["three"]
        assert "backend='torch'" in found["torch"]
        assert "the solver is 'shooting'" in found["solver"]
        assert "time_parallel of rank 1 differs from that of rank 0" in found["differing"]
        assert found["right"] == "nothing"


def test_a_block_whose_loss_is_nan_stops_nobody(two_ranks: list[dict[str, Any]]) -> None:
    for item in two_ranks:
        assert item["bad block"] == {"skipped": [True, False], "finite": True}


def test_the_record_of_a_solver_covers_all_ranks(two_ranks: list[dict[str, Any]], tmp_path: Path) -> None:
    """Weights stay as they are, so that two ranks find what one finds; one of three updates has an empty share."""
    alone, (first, second) = _solve_an_epoch(World(), str(tmp_path), SHOOTING), (item["shooting"] for item in two_ranks)
    assert first == second
    assert alone[0] == first[0] == 5
    np.testing.assert_allclose(first[3], alone[3], rtol=1e-6)
    assert first[1] <= first[2] <= 1e-3


def test_a_warm_start_is_refused_on_every_rank(two_ranks: list[dict[str, Any]]) -> None:
    for item in two_ranks:
        assert item["warm start"].startswith("the solver is 'warm_start' and there are 2 ranks")


@pytest.mark.slow
def test_layers_directions_and_accumulation(quick_compiler: None, tmp_path: Path) -> None:
    net = {"num_layers": 2, "bidirectional": True, "accumulate": 2}
    alone = _train(World(), tmp_path / "one", net), read_events(tmp_path / "one")
    shared = run_world(
        2, _train, tmp_path / "world", str(tmp_path / "two"), {**net, "time_parallel": 2}, prepare=compile_quickly
    )
    assert shared[0] == shared[1]
    _assert_trained_as_one((shared[0], read_events(tmp_path / "two")), alone, accumulate=2)


@pytest.mark.slow
def test_shares_of_sequences_and_of_steps(tmp_path: Path) -> None:
    found = {}
    for size, settings in ((2, {}), (4, {"time_parallel": 2})):
        run = tmp_path / f"run {size}"
        ranks = run_world(size, _train, tmp_path / f"world {size}", str(run), settings, prepare=compile_quickly)
        assert all(item == ranks[0] for item in ranks), ranks
        found[size] = ranks[0], read_events(run)
    _assert_same(found[4], found[2])


@pytest.mark.slow
def test_the_command_line(alone: Trained, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    data, out = tmp_path / "signals.npz", tmp_path / "run"
    write_npz(data, make_regimes(**SIGNALS))
    words = "--nproc 2 --time-parallel 2 --batch-size 3 --hidden-size 6 --num-buckets 2 --dropout 0 --epochs 2".split()
    code = main(["train", "label-steps", "--data", str(data), "--out", str(out), *words])
    assert code == 0, capfd.readouterr().err
    result = json.loads((out / "result.json").read_text())
    for name, value in alone[0]["metrics"].items():
        assert result["metrics"][name] == pytest.approx(value, abs=1e-5), name
    assert result["solving"]["solver"] == "time_parallel"
