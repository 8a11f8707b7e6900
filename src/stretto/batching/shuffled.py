"""Plain shuffled batches: what buckets are measured against.

Shape legend: N sequences, G batches.
"""

import numpy as np
import numpy.typing as npt


def shuffled_slots(
    lengths_N: npt.NDArray[np.int64], *, batch_size: int | None, max_padded_steps: int | None, seed: int = 0
) -> int:
    """The slots of one epoch of shuffled batches, each padded to its longest sequence.

    With a cap, a batch is closed when the next sequence would exceed `max_padded_steps` or `batch_size` rows.
    """
    order_N = np.random.default_rng(seed).permutation(lengths_N)
    if max_padded_steps is None:
        begins_G = np.arange(0, len(order_N), batch_size)
        sizes_G = np.diff(np.append(begins_G, len(order_N)))
        return int((np.maximum.reduceat(order_N, begins_G) * sizes_G).sum())
    slots = rows = longest = 0
    for length in order_N.tolist():
        wider = max(longest, length)
        if (rows + 1) * wider > max_padded_steps or rows == batch_size:
            slots, rows, wider = slots + rows * longest, 0, length
        rows, longest = rows + 1, wider
    return slots + rows * longest
