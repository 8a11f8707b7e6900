"""How data gets to a GPU: through pinned memory, so that nobody waits for the copy.

    CPU, another thread  | collate | collate the next ...
    CPU                            | pin, start the copy | launch the update ...          | pin, start the copy | ...
    GPU                                                  | copy | forward | backward | update

A job has the next batch collated meanwhile; a DataLoader of one's own has `num_workers` for it. Work on the GPU follows
in the order in which it was started, so that it finds the copy complete.
"""

import torch


def to_device(tensor: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """A tensor on a device; from the CPU to a GPU it is copied while the program goes on."""
    target = torch.device(device)
    if target.type != "cuda" or tensor.device.type != "cpu":
        return tensor.to(target)
    try:
        pinned = tensor.pin_memory()
    except RuntimeError:
        # The machine lets this process pin no more memory.
        return tensor.to(target)
    return pinned.to(target, non_blocking=True)
