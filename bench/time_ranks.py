"""One long sequence over two gloo ranks against one rank, one thread each.

`compare_ranks` starts the ranks; each runs this module as a script, and rank 0 writes the answer.

Shape legend: T steps, F features of the input, H hidden units.
"""

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final, final

import torch
from safetensors.torch import load_file, save_file

from bench.harness import Report
from bench.trained_nets import Nets
from stretto.cells import GRU
from stretto.distributed import TimeMesh, World, join_ranks, launch_ranks
from stretto.errors import StrettoError
from stretto.nn import RNN
from stretto.timing import relative_error

NUM_RANKS: Final = 2
NUM_STEPS: Final = 1 << 17
QUICK_STEPS: Final = 512
QUICK_SEGMENT_STEPS: Final = 32
HIDDEN_SIZES: Final = (128, 64)
GOALS: Final = {128: 1.5}
SOLVER_TOLERANCE: Final = 1e-6
EXACT_TOLERANCE: Final = 1e-5
CELL_PREFIX: Final = "cell."


def compare_ranks(nets: Nets, report: Report, *, rounds: int, quick: bool) -> None:
    """Start two ranks for each size of net; a row each."""
    rows = []
    for hidden_size in (8,) if quick else HIDDEN_SIZES:
        net = nets.of(hidden_size)
        num_steps = QUICK_STEPS if quick else NUM_STEPS
        where = f"T={num_steps}, H={hidden_size}"
        report.progress(f"ranks: two gloo ranks, {where}")
        weight_TH = torch.randn(num_steps, hidden_size, generator=torch.Generator().manual_seed(1))
        tensors = {f"{CELL_PREFIX}{name}": value.contiguous() for name, value in net.cell.state_dict().items()}
        tensors |= {"x_TF": nets.recordings.concatenate(num_steps), "weight_TH": weight_TH}
        answer = measure(tensors, rounds=rounds, segment_steps=QUICK_SEGMENT_STEPS if quick else None)
        check_exact(answer, where=where)
        one, two = answer["seconds"]["one rank"], answer["seconds"]["two ranks"]
        alone, both = answer["seconds"]["block alone"], answer["seconds"]["blocks together"]
        ratio = min(one) / min(two)
        if not quick and hidden_size in GOALS:
            report.goal(f"two ranks over one, {where}", ratio, at_least=GOALS[hidden_size])
        rows.append(
            (
                *(num_steps, hidden_size, str(net), min(one), min(two), ratio, min(both) / min(alone)),
                *(round(answer["iterations"]), round(answer["backward_iterations"]), answer["work"]),
                *(answer["output_error"], answer["gradient_error"], answer["residual"]),
            )
        )
    report.table(
        title="One long sequence over two gloo ranks, one thread each, exact",
        columns=(
            *("T", "H", "net", "1 rank s", "2 ranks s", "ratio", "contention", "rounds", "backward rounds"),
            *("work", "output error", "gradient error", "residual"),
        ),
        rows=rows,
        caption="ratio: of least times, in turn, the all-reduce of gradients included. contention: time of a block "
        "while both ranks work, nothing exchanged, over its time alone. rounds: passes over a block. work: steps "
        "run forwards over those of a block. Errors: largest difference from one rank, over the largest value.",
    )


def check_exact(answer: dict[str, Any], *, where: str) -> None:
    """Refuse to time ranks whose results differ from those of one rank."""
    for what in ("output", "gradient"):
        error = answer[f"{what}_error"]
        if not error <= EXACT_TOLERANCE:
            raise StrettoError(
                f"the {what} of two ranks differs from one rank by {error:.1e} of its largest value at {where}; "
                f"{EXACT_TOLERANCE:.0e} is allowed",
                fix="Report it with the output of `stretto doctor`; no time is meaningful until this is fixed.",
            )


def measure(tensors: dict[str, torch.Tensor], *, rounds: int, segment_steps: int | None) -> dict[str, Any]:
    """Run the ranks and read the answer of rank 0."""
    with tempfile.TemporaryDirectory(prefix="stretto-") as place:
        path = Path(place) / "request.json"
        save_file(tensors, path.with_suffix(".safetensors"))
        path.write_text(json.dumps({"rounds": rounds, "segment_steps": segment_steps}), encoding="utf-8")
        code = launch_ranks([str(path)], module="bench.time_ranks", nproc=NUM_RANKS, threads=1, max_restarts=0)
        answer = path.with_suffix(".answer")
        if code or not answer.exists():
            raise StrettoError(f"a rank exited with code {code}", fix="See its message above, and `stretto doctor`.")
        found: dict[str, Any] = json.loads(answer.read_text(encoding="utf-8"))
        return found


@final
class Rank:
    """One rank: runs its block of a long sequence, alone and together with the others.

    `tensors` are the GRU's weights, the input, and the weights of outputs in the loss.
    """

    def __init__(self, tensors: dict[str, torch.Tensor], world: World, *, segment_steps: int | None) -> None:
        self._x_TF, self._weight_TH = tensors["x_TF"], tensors["weight_TH"]
        self._cell = GRU(self._x_TF.shape[1], self._weight_TH.shape[1])
        prefix = CELL_PREFIX
        self._cell.load_state_dict({n.removeprefix(prefix): t for n, t in tensors.items() if n.startswith(prefix)})
        mesh = TimeMesh(time=world.size)
        self._world, self._block = world, mesh.steps(len(self._x_TF))
        options = {} if segment_steps is None else {"segment_steps": segment_steps}
        self._serial = RNN(self._cell)
        self._parallel = RNN(self._cell, solver=mesh.solver(tolerance=SOLVER_TOLERANCE, **options))

    def errors(self) -> dict[str, float]:
        """How far all ranks together are from one alone, the worst of them, and how the solver went."""
        expected_TH = self._run_whole()
        expected = self._gradients()
        actual_TH = self._run_parallel()
        # Relative to the largest of all outputs, not of this block's.
        largest = max(1e-30, float(expected_TH.abs().max()))
        block = slice(self._block.start, self._block.stop)
        output = float((actual_TH - expected_TH[block]).abs().max()) / largest
        gradient = max(relative_error(one, other) for one, other in zip(self._gradients(), expected, strict=True))
        solution = self._parallel.solution
        numbers = {
            "output_error": output,
            "gradient_error": gradient,
            "residual": solution.residual,
            "iterations": solution.iterations,
            "backward_iterations": solution.backward_iterations or 0,
            "work": solution.work,
        }
        worst = (max(values) for values in zip(*self._world.all_gather(list(numbers.values())), strict=True))
        return dict(zip(numbers, worst, strict=True))

    def time(self, rounds: int) -> dict[str, list[float]]:
        """Seconds of the slowest rank, round by round; where one runs alone, the others wait."""
        tasks: dict[str, tuple[bool, Callable[[], object]]] = {
            "one rank": (True, self._run_whole),
            "two ranks": (False, self._run_parallel),
            "block alone": (True, lambda: self._run(self._serial, self._block)),
            "blocks together": (False, lambda: self._run(self._serial, self._block)),
        }
        seconds: dict[str, list[float]] = {name: [] for name in tasks}
        for _ in range(rounds):
            for name, (alone, task) in tasks.items():
                self._world.barrier()
                begin = time.perf_counter()
                if self._world.is_rank0 or not alone:
                    task()
                elapsed = time.perf_counter() - begin
                seconds[name].append(max(row[0] for row in self._world.all_gather([elapsed])))
        return seconds

    def _run(self, rnn: RNN, steps: range) -> torch.Tensor:
        """Forward and backward over some steps; outputs (T, H)."""
        self._cell.zero_grad(set_to_none=True)
        rows = slice(steps.start, steps.stop)
        y_TH: torch.Tensor = rnn(self._x_TF[None, rows])[0][0]
        (y_TH * self._weight_TH[rows]).sum().backward()  # type: ignore[no-untyped-call]
        return y_TH.detach()

    def _run_whole(self) -> torch.Tensor:
        return self._run(self._serial, range(len(self._x_TF)))

    def _run_parallel(self) -> torch.Tensor:
        """This rank's block, then the sum of all gradients, as one message."""
        y_TH = self._run(self._parallel, self._block)
        flat = torch.cat([gradient.flatten() for gradient in self._gradients()])
        torch.distributed.all_reduce(flat)
        first = 0
        for parameter in self._cell.parameters():
            parameter.grad = flat[first : first + parameter.numel()].view_as(parameter)
            first += parameter.numel()
        return y_TH

    def _gradients(self) -> list[torch.Tensor]:
        return [parameter.grad for parameter in self._cell.parameters() if parameter.grad is not None]


def main(path: Path) -> None:
    """Measure, and let rank 0 write the answer next to the request."""
    request = json.loads(path.read_text(encoding="utf-8"))
    torch.set_num_threads(1)
    with join_ranks(timeout_minutes=5.0) as world:
        rank = Rank(load_file(path.with_suffix(".safetensors")), world, segment_steps=request["segment_steps"])
        answer = {**rank.errors(), "seconds": rank.time(request["rounds"])}
        if world.is_rank0:
            path.with_suffix(".answer").write_text(json.dumps(answer), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
