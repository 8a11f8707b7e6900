"""Ranks that are not about to do the same are refused on every one of them; nobody waits for ever.

Shape legend: B sequences, T steps, F features, H hidden units.
"""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from worlds import run_world

import stretto
from stretto.distributed import TimeMesh, World
from stretto.errors import StrettoError
from stretto.solvers import Relay

F, H = 3, 4


def _caught(work: Callable[[], Any]) -> str:
    try:
        work()
    except StrettoError as error:
        return str(error)
    return "nothing was refused"


def _refusals(world: World) -> dict[str, str]:
    mesh = TimeMesh(time=world.size)
    odd = int(world.rank == 1)

    def net(hidden: int = H, **words: Any) -> stretto.RNN:
        return stretto.RNN(stretto.cells.GRU(F, hidden), backend="eager", solver=mesh.solver(**words))

    def frozen(x_BTF: torch.Tensor) -> None:
        with torch.set_grad_enabled(not odd):
            net()(x_BTF)

    def out_of_step() -> None:
        one = net()
        early = one(x_BTF)[0].sum() if not odd else None
        late = one(x_BTF)[0].sum()
        (late if early is None else early).backward()

    x_BTF, ragged = torch.randn(3, 5, F), [5, 2, 5]
    return {
        "batch": _caught(lambda: net()(torch.randn(2 + odd, 5, F))),
        "dtype": _caught(lambda: net().double()(x_BTF.double()) if odd else net()(x_BTF)),
        "state": _caught(lambda: net(H + odd)(x_BTF)),
        "gradients": _caught(lambda: frozen(x_BTF)),
        "tolerance": _caught(lambda: net(tolerance=1e-3 if odd else 1e-4)(x_BTF)),
        "unknown": _caught(lambda: net()(x_BTF, lengths=ragged if odd else None)),
        "ids": _caught(lambda: net()(x_BTF, sample_ids=[1, 2, 3 + odd])),
        "some ids": _caught(lambda: net()(x_BTF, sample_ids=[1, 2, 3] if odd else None)),
        "same ids": _caught(lambda: net()(x_BTF, sample_ids=[1, 2, 2])),
        "steps": _caught(lambda: mesh.block(10 + odd, [10])),
        "lengths": _caught(lambda: mesh.block(10, [10 - odd])),
        "too long": _caught(lambda: mesh.block(10, [11])),
        "out of step": _caught(out_of_step),
        "mesh": _caught(lambda: TimeMesh(time=2)),
        "large mesh": _caught(lambda: TimeMesh(time=6)),
        "no mesh": _caught(lambda: TimeMesh(time=0)),
        "still": _caught(lambda: net()(x_BTF)),
    }


REFUSED = {
    "batch": "the number of sequences of rank 1 differs from that of rank 0",
    "dtype": "the state of rank 1 differs from that of rank 0",
    "state": "the state of rank 1 differs from that of rank 0",
    "gradients": "whether gradients are asked for of rank 1 differs from that of rank 0",
    "tolerance": "the tolerance of rank 1 differs from that of rank 0",
    "unknown": "sequences are of unequal length and are not known by any number",
    "ids": "sample_ids of rank 1 differs from that of rank 0",
    "some ids": "sample_ids of rank 1 differs from that of rank 0",
    "same ids": "two sequences of a batch have the same sample_ids",
    "steps": "the number of steps, or the lengths, of rank 1 differs from that of rank 0",
    "lengths": "the number of steps, or the lengths, of rank 1 differs from that of rank 0",
    "too long": "a length is 11 and the batch has 10 steps",
    "out of step": "the pass of rank 1 differs from that of rank 0",
    "mesh": "steps cannot be divided over 2 ranks each: there are 3 ranks",
    "large mesh": "steps cannot be divided over 6 ranks each: there are 3 ranks",
    "no mesh": "steps cannot be divided over 0 ranks each: there are 3 ranks",
    "still": "nothing was refused",
}


def test_differences_are_refused_on_every_rank(tmp_path: Path) -> None:
    for told in run_world(3, _refusals, tmp_path):
        assert isinstance(told, dict), told
        for name, said in REFUSED.items():
            assert told[name].startswith(said), (name, told[name])


def _left_alone(world: World) -> dict[str, Any]:
    mesh = TimeMesh(time=world.size, minutes=0.05)
    net, x_BTF = stretto.RNN(stretto.cells.GRU(F, H), backend="eager"), torch.randn(2, 6, F)
    net(x_BTF)
    # What takes long, and may take one rank longer, is done: three seconds are enough for the rest.
    world.barrier()
    net.solver = mesh.solver()
    y_BTH, _ = net(x_BTF)
    begun = time.monotonic()
    try:
        if world.rank == 0:
            y_BTH.sum().backward()
    except RuntimeError as error:
        return {"said": str(error), "seconds": time.monotonic() - begun}
    # Still there, but busy with something else.
    time.sleep(5.0)
    return {}


def test_a_rank_that_waits_in_vain_fails_in_time(tmp_path: Path) -> None:
    told, _ = run_world(2, _left_alone, tmp_path)
    assert isinstance(told, dict), told
    assert "imed out" in told["said"]
    assert told["seconds"] < 6.0


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ({"tolerance": 0.0}, "tolerance is 0.0"),
        ({"tolerance": float("nan")}, "tolerance is nan"),
        ({"tolerance": "small"}, "tolerance is 'small'"),
        ({"piece": 0}, "piece is 0"),
        ({"piece": 1.5}, "piece is 1.5"),
    ],
)
def test_settings_that_make_no_sense(words: dict[str, Any], said: str) -> None:
    with pytest.raises(StrettoError, match=said):
        Relay(**words)


def test_one_rank_alone_walks_step_after_step() -> None:
    mesh = TimeMesh(time=1)
    net = stretto.RNN(stretto.cells.GRU(F, H), backend="eager", solver=mesh.solver(tolerance=1e-4))
    x_BTF = torch.randn(2, 6, F)
    y_BTH, state = net(x_BTF)
    net.solver = "serial"
    assert torch.equal(y_BTH, net(x_BTF)[0])
    assert torch.equal(mesh.final_state(net, state), state)
    assert mesh.steps(6) == range(6)
    assert mesh.devices is None
    assert repr(mesh.solver(piece=7)) == "Relay(piece=7)"
    with pytest.raises(StrettoError, match="there are 1 ranks"):
        TimeMesh(time=2)
