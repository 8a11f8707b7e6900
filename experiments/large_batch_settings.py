"""Settings of the experiment with large batches."""

import dataclasses
import os
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias, get_args

from pydantic import Field

from stretto.errors import StrettoError
from stretto.training import Count

ApplicationName: TypeAlias = Literal["digits", "language-model", "translate", "handwriting", "digit-images"]
RuleName: TypeAlias = Literal["none", "linear", "sqrt", "legw", "lamb", "oracle"]
APPLICATION_NAMES: Final[tuple[ApplicationName, ...]] = get_args(ApplicationName)
RULES: Final[dict[RuleName, str]] = {
    "none": "the rate and the warm-up of the baseline",
    "linear": "the rate times k",
    "sqrt": "the rate times the square root of k",
    "legw": "the same, and the warm-up times k in epochs, up to a share of the run",
    "lamb": "LAMB instead of the baseline's optimiser, with a rate of its own for the baseline's batch, then as legw",
    "oracle": "the best rate of a small grid around that of sqrt, found anew at every batch",
}
SEEDS: Final = 3


@dataclasses.dataclass(frozen=True, kw_only=True)
class LargeBatchSettings:
    """Settings of `stretto reproduce large-batch`.

    Attributes:
        data: A folder with data in subfolders: mnist, ptb, multi30k_en_de and iam, each used where it is there; left
            out, embedded data.
        out: The folder for the tables, the plot, the page and, below it, the finished runs.
        applications: Which to run.
        multiples: Batches, in multiples of the baseline's, which is always run; left out, what the applications have.
        rules: How settings follow the batch, and the oracle, for which the rate is tuned anew.
        seeds: Runs of each, with the seeds 0, 1 and so on; left out, 3, and 1 if quick.
        threads: Cores of a run; left out, 1, and with full what torch takes.
        jobs: Runs at a time, each in a process of its own; left out, as many as there are cores, and 1 if quick or with
            full.
        fresh: Run all again instead of taking finished runs as they are, and going on with one that was stopped.
        quick: Tiny nets on a few sequences: shows that it works, and no more; its numbers mean nothing.
        full: The sizes of the papers instead of small ones; takes many hours, and data for digits, digit-images,
            language-model and translate.
    """

    data: Path | None = None
    out: Path = Path("runs/reproduce-large-batch")
    applications: tuple[ApplicationName, ...] = APPLICATION_NAMES
    multiples: tuple[Annotated[int, Field(ge=1, le=2**20)], ...] | None = None
    rules: tuple[RuleName, ...] = tuple(RULES)
    seeds: Count | None = None
    threads: Count | None = None
    jobs: Count | None = None
    fresh: bool = False
    quick: bool = False
    full: bool = False

    def refuse_contradictions(self) -> None:
        """Refuse what leaves nothing to run, or asks for two things at once.

        Raises:
            StrettoError: If so.
        """
        if self.quick and self.full:
            raise StrettoError("both --quick and --full were given", fix="Give one of the two, or none.")
        for name in ("applications", "rules"):
            if not getattr(self, name):
                raise StrettoError(f"there are no {name}", fix=f"Give some, or leave --{name} out.")
        if self.data is not None and not self.data.is_dir():
            raise StrettoError(
                f"there is no folder {str(self.data)!r}", fix="Name the folder that has mnist, ptb and so on in it."
            )

    @property
    def num_jobs(self) -> int:
        """Runs at a time."""
        return self.jobs or (1 if self.quick or self.full else max(1, (os.cpu_count() or 1) // (self.threads or 1)))

    @property
    def num_seeds(self) -> int:
        """Runs of each."""
        return self.seeds or (1 if self.quick else SEEDS)
