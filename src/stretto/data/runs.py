"""Sequences with a label a step, cut into the runs of one label: one label a sequence.

Shape legend: N sequences, S steps of all sequences together, R runs.
"""

import dataclasses

import numpy as np

from stretto.data.sequences import SequenceSet
from stretto.data.targets import Labels, StepLabels
from stretto.errors import StrettoError


def cut_runs(data: SequenceSet, *, unlabelled: int | None = None) -> SequenceSet:
    """The runs of one label as sequences of their own, in order; they stay in the part that they were in.

    Args:
        data: Sequences with one label a step.
        unlabelled: The label of steps that have none: runs of it are left out, and so is its class.

    Raises:
        StrettoError: There are no labels of steps, or none but `unlabelled`.
    """
    labels = data.targets
    if not isinstance(labels, StepLabels):
        raise StrettoError(f"{data.name} has no labels of steps", fix="Give one label a step as `y`.")
    starts, lengths, values, owners = [], [], [], []
    for index in range(len(data)):
        of_steps_T = labels[index]
        firsts = np.flatnonzero(np.diff(of_steps_T, prepend=-1))
        starts.append(data.starts_N[index] + firsts)
        lengths.append(np.diff(firsts, append=len(of_steps_T)))
        values.append(of_steps_T[firsts])
        owners.append(np.full(len(firsts), index))
    values_R = np.concatenate(values)
    kept = np.flatnonzero(values_R != unlabelled) if unlabelled is not None else np.arange(len(values_R))
    if not len(kept):
        raise StrettoError(
            f"{data.name}: no step has a label but {unlabelled}", fix="Label some steps, or name another such label."
        )
    known = [number for number in range(len(labels.names)) if number != unlabelled]
    class_of = np.zeros(len(labels.names), dtype=np.int64)
    class_of[known] = np.arange(len(known))
    note = f"cut into {len(kept):,} runs of one label" + (
        f"; {len(values_R) - len(kept):,} runs of the label {unlabelled}, which is no label, are left out"
        if len(kept) < len(values_R)
        else ""
    )
    return dataclasses.replace(
        data,
        starts_N=np.concatenate(starts)[kept],
        lengths_N=np.concatenate(lengths)[kept],
        targets=Labels(values_N=class_of[values_R[kept]], names=tuple(labels.names[number] for number in known)),
        split_N=data.split_N[np.concatenate(owners)[kept]],
        numbers_N=np.arange(len(kept)),
        notes=(*data.notes, note),
    )
