"""One rank of `stretto bench time`: walks its block of a long sequence, alone and in a relay, and times it.

Shape legend: T steps, F features of the input, H hidden units, P real steps of all sequences.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, final

import torch
from safetensors.torch import load_file

from bench.kernel_gate import relative_error
from stretto.cells import GRU
from stretto.distributed import TimeMesh, World, join_ranks
from stretto.nn import RNN
from stretto.solvers import TOLD, AbstractSolver, Chain, Leg, Neighbours, Serial, Solved, Sums

CELL: Final = "cell."
MESSAGES: Final = (1 << 8, 1 << 12, 1 << 16, 1 << 20)
"""Bytes whose way to the neighbour and back is timed."""
FACTS: Final = {str(number): number for number in range(8)}
"""As many as a relay's ranks compare."""
OFTEN: Final = 30
REPEATS: Final = 3


def main(path: Path) -> None:
    """Do what the file says, and leave the answer of the first rank beside it."""
    asked = json.loads(path.read_text(encoding="utf-8"))
    torch.set_num_threads(asked["threads"])
    with join_ranks(timeout_minutes=5.0) as world:
        rank = _Rank(asked, world)
        answer = {
            **rank.errors(),
            "turns": rank.turns(asked["rounds"]),
            "costs": rank.costs(asked["piece"]),
            **rank.messages(),
        }
        if world.is_rank0:
            path.with_suffix(".answer").write_text(json.dumps(answer), encoding="utf-8")


@final
class _Rank:
    def __init__(self, asked: dict[str, Any], world: World) -> None:
        tensors = load_file(asked["tensors"])
        weights = {name.removeprefix(CELL): value for name, value in tensors.items() if name.startswith(CELL)}
        self._x_TF, self._weight_TH = tensors["x_TF"], tensors["weight_TH"]
        cell = GRU(self._x_TF.shape[1], self._weight_TH.shape[1])
        cell.load_state_dict(weights)
        mesh = TimeMesh(time=world.size)
        self._world, self._own = world, mesh.steps(len(self._x_TF))
        self._cell, self._group = cell, mesh.time.group
        self._serial = RNN(cell)
        self._relay = RNN(cell, solver=mesh.solver(tolerance=asked["tolerance"], piece=asked["piece"]))

    def _step(self, rnn: RNN, steps: range) -> torch.Tensor:
        """Forward and backward over some steps; outputs (T, H)."""
        self._cell.zero_grad(set_to_none=True)
        rows = slice(steps.start, steps.stop)
        y_TH: torch.Tensor = rnn(self._x_TF[None, rows])[0][0]
        (y_TH * self._weight_TH[rows]).sum().backward()  # type: ignore[no-untyped-call]
        return y_TH.detach()

    def _whole(self) -> torch.Tensor:
        return self._step(self._serial, range(len(self._x_TF)))

    def _block(self) -> torch.Tensor:
        return self._step(self._serial, self._own)

    def _relayed(self) -> torch.Tensor:
        y_TH = self._step(self._relay, self._own)
        gradients = self._gradients()
        torch.distributed.all_reduce(gradients)
        done = 0
        for parameter in self._cell.parameters():
            parameter.grad = gradients[done : done + parameter.numel()].view_as(parameter)
            done += parameter.numel()
        return y_TH

    def _gradients(self) -> torch.Tensor:
        found = [p.grad for p in self._cell.parameters() if p.grad is not None]
        return torch.cat([gradient.flatten() for gradient in found])

    def errors(self) -> dict[str, Any]:
        """How far a relay is from step after step, the worst of all ranks, and how it went."""
        wanted_TH, here = self._whole(), slice(self._own.start, self._own.stop)
        wanted = [parameter.grad.clone() for parameter in self._cell.parameters() if parameter.grad is not None]
        found_TH = self._relayed()
        # Beside the largest of all outputs, not of this block's.
        largest = max(1e-30, float(wanted_TH.abs().max()))
        output = float((found_TH - wanted_TH[here]).abs().max()) / largest
        gradients = [parameter.grad for parameter in self._cell.parameters() if parameter.grad is not None]
        gradient = max(relative_error(one, wanted=other) for one, other in zip(gradients, wanted, strict=True))
        said = self._relay.solution
        numbers = [output, gradient, said.residual, said.iterations, said.backward_iterations or 0, said.work]
        worst = [max(values) for values in zip(*self._world.all_gather(numbers), strict=True)]
        names = ("output_error", "gradient_error", "residual", "rounds", "backward_rounds", "work")
        return dict(zip(names, worst, strict=True))

    def turns(self, rounds: int) -> dict[str, list[float]]:
        """Seconds of each way, turn after turn, of the slowest rank; where one walks alone, the others wait."""
        quarter = range(len(self._x_TF) // 4)
        ways: dict[str, tuple[bool, Callable[[], object]]] = {
            "whole": (True, self._whole),
            "relay": (False, self._relayed),
            "quarter": (True, lambda: self._step(self._serial, quarter)),
            "block alone": (True, self._block),
            "blocks at once": (False, self._block),
        }
        taken: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(rounds):
            for name, (alone, run) in ways.items():
                self._world.barrier()
                begun = time.perf_counter()
                if self._world.is_rank0 or not alone:
                    run()
                seconds = time.perf_counter() - begun
                taken[name].append(max(row[0] for row in self._world.all_gather([seconds])))
        return taken

    def costs(self, piece: int) -> list[dict[str, float]]:
        """Least seconds of a block as a relay walks it, in pieces of two lengths; the first rank alone."""
        found = []
        for length in (max(1, piece // 4), piece):
            if self._world.is_rank0:
                found.append(_block_seconds(self._chain(), length))
            self._world.barrier()
        return found

    def _chain(self) -> Chain:
        """The block of this rank as a relay gets it."""
        caught = _Caught()
        with torch.no_grad():
            RNN(self._cell, solver=caught)(self._x_TF[None, self._own.start : self._own.stop])
        assert caught.chain is not None
        return caught.chain

    def messages(self) -> dict[str, Any]:
        """Least seconds of what ranks say to each other: a round trip by bytes, a maximum, an agreement, a sum."""
        ranks = Neighbours(self._group, backwards=False)
        trips = []
        for size in MESSAGES:
            sent = [torch.zeros(size // 4)]

            def there_and_back(sent: list[torch.Tensor] = sent) -> None:
                ranks.pass_on(sent)
                ranks.pass_back(sent)

            trips.append((size, self._least(there_and_back)))
        gradients = self._gradients()
        return {
            "trips": trips,
            "maximum": self._least(lambda: ranks.largest([0.0, 0.0])),
            "agreement": self._least(lambda: ranks.agree(FACTS, told=[0.0] * TOLD)),
            "sum": self._least(lambda: torch.distributed.all_reduce(gradients)),
            "sum_bytes": gradients.numel() * gradients.element_size(),
        }

    def _least(self, exchange: Callable[[], object]) -> float:
        least = float("inf")
        for _ in range(OFTEN):
            begun = time.perf_counter()
            exchange()
            least = min(least, time.perf_counter() - begun)
        return least


@final
class _Caught(AbstractSolver):
    """Keeps the chain that a layer hands to its solver."""

    def __init__(self) -> None:
        self.chain: Chain | None = None

    def solve(self, chain: Chain) -> Solved:
        """Step after step."""
        self.chain = chain
        return Serial().solve(chain)


def _block_seconds(chain: Chain, length: int) -> dict[str, float]:
    """Of a walk forwards in pieces of that length, and of one backwards."""
    ahead, back = [], []
    d_y_PF = torch.ones(chain.layout.total, chain.states[0].shape[1])
    for _ in range(REPEATS):
        leg = Leg(chain, length=length, keeps=True, needs_input=False)
        begun = time.perf_counter()
        leg.walk(chain.states, close=0.0)
        walked = time.perf_counter()
        leg.back([torch.zeros_like(end) for end in leg.ends], Sums(leg), d_y_PF=d_y_PF)
        back.append(time.perf_counter() - walked)
        ahead.append(walked - begun)
        # Before the next takes as much memory.
        del leg
    steps = chain.layout.num_steps
    return {"pieces": -(-steps // length), "steps": steps, "ahead": min(ahead), "back": min(back)}


if __name__ == "__main__":
    main(Path(sys.argv[1]))
