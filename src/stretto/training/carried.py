"""Boundaries that are carried from visit to visit, on their way into a checkpoint and back.

All states of one type lie end to end in one tensor: sequences are many, and their states small.
"""

import math
from collections.abc import Sequence
from typing import Any

import torch

from stretto.solvers import TrajectoryCache
from stretto.training.checkpoint import Checkpoint

PREFIX = "carried"


def pack_caches(caches: Sequence[TrajectoryCache]) -> Checkpoint:
    """All that caches hold, in their order of use."""
    tensors: dict[str, torch.Tensor] = {}
    described = []
    for number, cache in enumerate(caches):
        held = cache.state_dict()
        by_type: dict[str, list[torch.Tensor]] = {}
        shapes: list[list[list[Any]]] = []
        for states in held["states"]:
            shapes.append([[_name(state.dtype), *state.shape] for state in states])
            for state in states:
                by_type.setdefault(_name(state.dtype), []).append(state.reshape(-1))
        tensors |= {f"{PREFIX}.{number}.{name}": torch.cat(parts) for name, parts in by_type.items()}
        described.append({"keys": held["keys"], "shapes": shapes})
    return Checkpoint(tensors=tensors, state={PREFIX: described} if caches else {})


def unpack_caches(checkpoint: Checkpoint, caches: Sequence[TrajectoryCache]) -> None:
    """Let caches hold what they held when `pack_caches` was called.

    Raises:
        KeyError: The checkpoint is of a run that carried nothing.
        ValueError: It does not fit.
    """
    for number, (cache, described) in enumerate(zip(caches, checkpoint.state[PREFIX] if caches else [], strict=True)):
        begun: dict[str, int] = {}
        states = []
        for shapes in described["shapes"]:
            parts = []
            for name, *shape in shapes:
                first = begun.get(name, 0)
                begun[name] = first + math.prod(shape)
                flat = checkpoint.tensors[f"{PREFIX}.{number}.{name}"][first : begun[name]]
                parts.append(flat.reshape(shape))
            states.append(parts)
        cache.load_state_dict({"keys": described["keys"], "states": states})


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
