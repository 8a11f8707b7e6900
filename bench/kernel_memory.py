"""Peak memory of a training step, each in a fresh process."""

import dataclasses
from typing import Final, get_args

from bench.fresh_process import STATUS, Request, Way, measure
from bench.kernel_comparison import TINY, Tell
from bench.training_step import StepShape
from stretto.errors import StrettoError

MEMORY_SHAPE: Final = StepShape(num_steps=2000, batch=16, input_size=32, hidden_size=256)
WAYS: Final[tuple[Way, ...]] = get_args(Way)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MemoryRow(StepShape):
    """What a training step of an LSTM needs at its peak, beyond weights and batch.

    Attributes:
        way: Whose step.
        extra_bytes: Peak resident memory within the step less what was resident before it.
        over_torch: That over torch's.
        outputs: How many times the size of all outputs that is.
    """

    way: str
    extra_bytes: float
    over_torch: float
    outputs: float


def memory_rows(*, threads: int, quick: bool, tell: Tell) -> tuple[MemoryRow, ...]:
    """Measure torch's LSTM, ours, and ours with states alone kept for the way back."""
    if not STATUS.exists():
        raise StrettoError(
            f"peak memory is read from {STATUS}, which this system does not have",
            fix="Leave that part out: name the others with --only.",
        )
    shape = dataclasses.replace(TINY, num_steps=2000) if quick else MEMORY_SHAPE
    found: dict[Way, float] = {}
    for way in WAYS:
        tell(f"memory: {way}, {shape}")
        request = Request(kind="memory", net="LSTM", way=way, shape=shape, threads=threads)
        found[way] = measure(request)["extra_bytes"]
    outputs = 4 * shape.num_steps * shape.batch * shape.hidden_size
    return tuple(
        MemoryRow(
            **dataclasses.asdict(shape),
            way=way,
            extra_bytes=extra,
            over_torch=extra / max(found["nn.LSTM"], 1.0),
            outputs=extra / outputs,
        )
        for way, extra in found.items()
    )
