"""`solver="auto"` on nets that remember: what its trials cost over many calls, beside step after step.

Shape legend: T steps, B sequences, F features of the input, H hidden units.
"""

import dataclasses
import statistics
from typing import Final

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence

from bench.interleaved import Timing
from bench.kernel_gate import pass_gate
from bench.kernel_peers import torch_layer, weights_of
from bench.time_cases import CARRIED, Plan, subject_of
from bench.time_contest import (
    EXACT,
    NO_GOAL,
    SERIAL,
    TORCH,
    Errors,
    Goal,
    Row,
    Subject,
    call_by_call,
    errors_of,
    row_of,
)
from bench.trained_nets import Nets
from bench.training_step import Batch, Forward, TorchStep
from stretto.nn import RNN

AUTO: Final = "auto"
SHORT: Final = 4
"""Steps of a call that builds kernels and, being short, is kept apart from those that are counted."""
RECORDINGS: Final = 8
UNITS: Final = 128
SHAPES_GOAL: Final = Goal(over_serial=0.95)
RECORDINGS_GOAL: Final = Goal(over_torch=6.5, over_serial=0.95)


def auto_rows(plan: Plan, *, calls: int) -> list[Row]:
    """Trained nets at the shapes of carried boundaries."""
    rows: list[Row] = []
    for sizes, _ in CARRIED[: 1 if plan.quick else None]:
        subject = subject_of("auto", plan, *plan.sized(*sizes))
        plan.tell(f"{subject.where}: {calls} calls")
        lengths_B = torch.full((1,), subject.shape.num_steps)
        rows += _rows(subject, lengths_B, calls=calls, goal=NO_GOAL if plan.quick else SHAPES_GOAL, torch_too=False)
    return rows


def recording_rows(plan: Plan, nets: Nets, *, calls: int) -> list[Row]:
    """Whole recordings of unequal length, several at a time."""
    net = nets.of(8 if plan.quick else UNITS)
    chosen = nets.recordings.alike(RECORDINGS)
    lengths_B = torch.tensor([len(recording) for recording in chosen])
    x_TBF = pad_sequence([recording.x_TF for recording in chosen])
    drawn = torch.Generator().manual_seed(0)
    weight_TBO = torch.randn(*x_TBF.shape[:2], net.cell.hidden_size, generator=drawn)
    # What lies behind a recording's end counts nothing, for all ways alike.
    weight_TBO *= (torch.arange(len(x_TBF))[:, None] < lengths_B)[:, :, None]
    batch = Batch(x_TBF=x_TBF, weight_TBO=weight_TBO)
    told = f"whole recordings of {lengths_B.min():,} to {lengths_B.max():,} steps; trained: {net.told}"
    subject = Subject(case="recordings", net=told, cell=net.cell, batch=batch)
    plan.tell(f"{subject.where}: {calls} calls")
    return _rows(subject, lengths_B, calls=calls, goal=NO_GOAL if plan.quick else RECORDINGS_GOAL, torch_too=True)


def _rows(subject: Subject, lengths_B: torch.Tensor, *, calls: int, goal: Goal, torch_too: bool) -> list[Row]:
    serial, auto = RNN(subject.cell, batch_first=False), RNN(subject.cell, batch_first=False, solver="auto")
    steps = {SERIAL: _step(SERIAL, serial, subject, lengths_B), AUTO: _step(AUTO, auto, subject, lengths_B)}
    wanted = steps[SERIAL].results()
    errors: dict[str, Errors] = {}
    if torch_too:
        layer = torch_layer([subject.cell], "GRU", subject.shape)
        peer = TorchStep(TORCH, forward=_padded(layer, lengths_B), weights=weights_of(layer), batch=subject.batch)
        found = peer.results()
        pass_gate(found, wanted=wanted, name=TORCH, peer=SERIAL, where=subject.where)
        errors[TORCH] = errors_of(found, wanted=wanted, solution=None)
        steps = {TORCH: peer, **steps}
    _run_short(auto, subject, lengths_B)
    taken = call_by_call({name: step.run for name, step in steps.items()}, calls=calls)
    # After the calls, for it is now that it may have come to something else than step after step.
    found = steps[AUTO].results()
    pass_gate(found, wanted=wanted, name=AUTO, peer=SERIAL, where=subject.where, tolerance=EXACT)
    errors[AUTO] = errors_of(found, wanted=wanted, solution=auto.solution)
    # Trials are dear and few: it is the mean of all calls that counts. Of torch's layer, the better of two.
    each = {name: min(seconds) if name == TORCH else statistics.mean(seconds) for name, seconds in taken.items()}
    return [
        row_of(
            subject,
            name,
            Timing(least=min(seconds), median=statistics.median(seconds), rounds=len(seconds)),
            seconds=each,
            goal=goal if name == AUTO else NO_GOAL,
            errors=errors.get(name, Errors()),
        )
        for name, seconds in taken.items()
    ]


def _run_short(rnn: RNN, subject: Subject, lengths_B: torch.Tensor) -> None:
    """Build the kernels by a call of another shape, of which it keeps another account."""
    batch = Batch(x_TBF=subject.batch.x_TBF[:SHORT], weight_TBO=subject.batch.weight_TBO[:SHORT])
    few = dataclasses.replace(subject, batch=batch)
    _step("", rnn, few, lengths_B.clamp(max=SHORT)).run()


def _step(name: str, rnn: RNN, subject: Subject, lengths_B: torch.Tensor) -> TorchStep:
    def forward(x_TBF: torch.Tensor) -> torch.Tensor:
        y_TBH: torch.Tensor = rnn(x_TBF, lengths=lengths_B)[0]
        return y_TBH

    return TorchStep(name, forward=forward, weights=weights_of(rnn), batch=subject.batch)


def _padded(layer: nn.RNNBase, lengths_B: torch.Tensor) -> Forward:
    """As one gets torch's layer fastest: its gradients through packed sequences take time by the square of steps."""

    def forward(x_TBF: torch.Tensor) -> torch.Tensor:
        y_TBH: torch.Tensor = layer(x_TBF)[0]
        return y_TBH * (torch.arange(len(x_TBF))[:, None] < lengths_B)[:, :, None]

    return forward
