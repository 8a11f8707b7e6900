"""The learning rate of every update: a warm-up to the peak, then a decay."""

from typing import final

from stretto.large_batch.decay import AbstractDecay, decay_from_json


@final
class RateCurve:
    """The factor of the peak rate for each update, to be given to torch's `LambdaLR`.

    Update i of a warm-up of n has (i + 1) / n, so that the first one moves and the last one has the peak. Then the
    decay takes over, at the epoch that it is: a decay that fell meanwhile makes the rate step down to its curve.

    What it holds is JSON-ready, so that the state of the schedule is, and a schedule of other numbers takes these over
    when the state is loaded.

    Args:
        decay: How the rate falls.
        warmup_updates: Updates until the peak.
        updates: Updates in `updates_epochs` epochs.
        updates_epochs: See there; a run may know the updates of an epoch, or only those of all epochs together.
        epochs: Epochs of the whole run, where known.
    """

    def __init__(
        self,
        decay: AbstractDecay,
        *,
        warmup_updates: int,
        updates: float,
        updates_epochs: float = 1,
        epochs: float | None = None,
    ) -> None:
        self.decay = decay.to_json()
        self.warmup_updates = warmup_updates
        self.updates = updates
        self.updates_epochs = updates_epochs
        self.epochs = epochs

    def __call__(self, update: int) -> float:
        """The factor for the update of this number, from 0 on."""
        if update < self.warmup_updates:
            return (update + 1) / self.warmup_updates
        # The product first: at the end of an epoch the quotient is then a whole number, exactly.
        return decay_from_json(self.decay).at(update * self.updates_epochs / self.updates, epochs=self.epochs)
