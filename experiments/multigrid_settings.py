"""Settings of the experiment with solvers in time."""

import dataclasses
from pathlib import Path
from typing import Annotated, Final, Literal, TypeAlias

from pydantic import Field

from stretto.training import Count

WHOLE: Final = "whole"
Length: TypeAlias = Annotated[int, Field(ge=2, lt=2**31)] | Literal["whole"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class MultigridSettings:
    """Settings of `stretto reproduce multigrid`.

    Attributes:
        data: Recordings with one label a step, 0 for none, that `stretto inspect` can read; left out, embedded signals.
        out: The folder for the table, the plot and the page.
        lengths: Steps of a sequence, and whole for recordings as they are. 128 are windows with one label each, as
            published; all others are pieces of recordings with a label a step.
        epochs: Passes over the training sequences, of every contestant at every length.
        cell: A GRU, or the published net's implicit one.
        hidden_size: Units of a layer.
        num_layers: Recurrent layers.
        batch_steps: Steps of a batch, about; 12,800 are the published 100 windows. A whole recording may be more.
        learning_rate: Of Adam.
        chunks: For carried boundaries: chunks of the longest sequence; auto fills the rows of a kernel.
        num_train: Training recordings to use at most, and as large a share of the test recordings.
        window_labels: Windows are those whose label is 1 to this.
        seed: Of weights and batches.
        quick: A tiny net on a few short recordings: shows that it works, and no more; its times mean nothing.
    """

    data: Path | None = None
    out: Path = Path("runs/reproduce-multigrid")
    lengths: tuple[Length, ...] = (128, 512, 2048, "whole")
    epochs: Count = 4
    cell: Literal["gru", "implicit"] = "gru"
    hidden_size: Count = 64
    num_layers: Count = 1
    batch_steps: Count = 12_800
    learning_rate: Annotated[float, Field(gt=0.0, le=100.0)] = 5e-3
    chunks: Annotated[int, Field(ge=2, lt=2**31)] | Literal["auto"] = "auto"
    num_train: Count | None = None
    window_labels: Count = 6
    seed: Annotated[int, Field(ge=0, lt=2**63)] = 0
    quick: bool = False

    def tiny(self) -> "MultigridSettings":
        """The same for a smoke test."""
        return dataclasses.replace(
            self,
            lengths=(128, 256, WHOLE),
            epochs=3,
            hidden_size=8,
            batch_steps=1024,
            learning_rate=0.03,
            num_train=6,
        )
