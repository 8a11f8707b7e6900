"""`python -m experiments PAPER [flags]`."""

import sys
from collections.abc import Sequence

from experiments import bucketing, graph, large_batch, multigrid
from experiments.registry import experiment
from stretto.cli import report_errors, show_error
from stretto.distributed import detect_lost_rank, is_distributed, is_rank0, launch_ranks, leave_exit_code
from stretto.errors import StrettoError

PAPERS = (bucketing, graph, large_batch, multigrid)


def main(words: Sequence[str]) -> int:
    """Run a paper's experiment; the exit code is 2 for anything that the user can fix."""
    return report_errors(_run, list(words))


def _run(words: list[str]) -> int:
    if is_distributed():
        try:
            with detect_lost_rank():
                return _run_rank(words)
        except StrettoError as error:
            return leave_exit_code(show_error(error))
    if words[:1] == ["bucketing"]:
        nproc = experiment.parse("bucketing", words[1:]).nproc
        if nproc > 1:
            return launch_ranks(words, nproc=nproc, threads=None, max_restarts=0, module="experiments")
    return experiment.main(words)


def _run_rank(words: list[str]) -> int:
    """Rank 0 shows and writes the result; the others only take part."""
    if is_rank0():
        return experiment.main(words)
    experiment.measure(words[0], experiment.parse(words[0], words[1:]))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
