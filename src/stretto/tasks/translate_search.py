"""Translations from a trained net: the best pieces, one after another.

Shape legend: B sources, K translations kept of each, R = B K rows, L pieces so far, H units, C pieces to choose from.
"""

import dataclasses
from typing import Final, final

import torch

from stretto.tasks.translate_model import Memory, Sides, States, TranslateModel
from stretto.tasks.translate_vocabulary import BEGIN, END, PAD

LONGER: Final = 2.0
ROOM: Final = 10
"""A translation has at most twice the pieces of its source and these."""
LENGTH_POWER: Final = 0.6
"""How much a longer translation is forgiven its smaller probability, as in GNMT."""


@final
@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Translations.

    Attributes:
        pieces: Of each source, without the end mark.
        first_BC: Scores of the first piece.
    """

    pieces: list[list[int]]
    first_BC: torch.Tensor


@final
@dataclasses.dataclass(slots=True, kw_only=True)
class _Beam:
    """What is under way: the sources that are not done yet, K rows for each."""

    source_B: torch.Tensor
    limit_B: torch.Tensor
    pieces_BKL: torch.Tensor
    total_BK: torch.Tensor
    ended_BK: torch.Tensor
    states: States
    memory: Memory


@torch.no_grad()
def search(model: TranslateModel, sides: Sides, *, width: int = 1) -> Found:
    """Translate the sources of a batch: beam search, which is greedy if one translation is kept.

    A translation that has ended stays among the kept ones and competes by its probability; in the end the best is the
    one of highest log-probability over ((5 + length) / 6) ^ 0.6.

    Args:
        model: In evaluation mode.
        sides: Of the batch; the targets are not looked at.
        width: Translations that are kept of each source at every step.
    """
    beam = _begin(model, sides, width=width)
    pieces: list[list[int]] = [[] for _ in range(len(beam.source_B))]
    first_BC = None
    while len(beam.source_B):
        scores_RC, states = model.step(_last(beam), beam.states, beam.memory)
        if first_BC is None:
            first_BC = scores_RC[::width]
        _advance(beam, scores_RC.log_softmax(dim=-1), states, width=width)
        _collect(beam, pieces, width=width)
    assert first_BC is not None
    return Found(pieces=pieces, first_BC=first_BC)


def _begin(model: TranslateModel, sides: Sides, *, width: int) -> _Beam:
    memory = model.encode(sides.source_BS, sides.source_lengths)
    count, device = len(sides.source_BS), sides.source_BS.device
    total_BK = memory.hidden_BSH.new_full((count, width), -torch.inf)
    # All begin alike: one of them is enough.
    total_BK[:, 0] = 0.0
    return _Beam(
        source_B=torch.arange(count, device=device),
        limit_B=(sides.source_lengths * LONGER + ROOM).long().to(device),
        pieces_BKL=torch.zeros(count, width, 0, dtype=torch.int64, device=device),
        total_BK=total_BK,
        ended_BK=torch.zeros(count, width, dtype=torch.bool, device=device),
        states=model.begin(count * width),
        memory=memory.rows(torch.arange(count, device=device).repeat_interleave(width)),
    )


def _last(beam: _Beam) -> torch.Tensor:
    if beam.pieces_BKL.shape[2] == 0:
        return torch.full_like(beam.ended_BK, BEGIN, dtype=torch.int64).flatten()
    return beam.pieces_BKL[..., -1].flatten()


def _advance(beam: _Beam, gains_RC: torch.Tensor, states: States, *, width: int) -> None:
    """Keep the best of all that could follow; behind the end there is padding, which costs nothing."""
    count, num_pieces = len(beam.source_B), gains_RC.shape[-1]
    gains_BKC = gains_RC.reshape(count, width, num_pieces)
    gains_BKC[..., [PAD, BEGIN]] = -torch.inf
    gains_BKC = gains_BKC.masked_fill(beam.ended_BK[..., None], -torch.inf)
    gains_BKC[..., PAD] = torch.where(beam.ended_BK, 0.0, -torch.inf)
    best = (beam.total_BK[..., None] + gains_BKC).flatten(1).topk(width, dim=1)
    parent_BK, piece_BK = best.indices // num_pieces, best.indices % num_pieces
    beam.total_BK = best.values
    earlier_BKL = beam.pieces_BKL.gather(1, parent_BK[..., None].expand(-1, -1, beam.pieces_BKL.shape[2]))
    beam.pieces_BKL = torch.cat([earlier_BKL, piece_BK[..., None]], dim=2)
    beam.ended_BK = (piece_BK == END) | (piece_BK == PAD)
    row_R = (torch.arange(count, device=parent_BK.device)[:, None] * width + parent_BK).flatten()
    beam.states = [(hidden_RH[row_R], cell_RH[row_R]) for hidden_RH, cell_RH in states]


def _collect(beam: _Beam, pieces: list[list[int]], *, width: int) -> None:
    """Take down the translations of sources that are done, and go on without these."""
    length = beam.pieces_BKL.shape[2]
    done_B = beam.ended_BK.all(dim=1) | (beam.limit_B <= length)
    if not bool(done_B.any()):
        return
    lengths_BK = (beam.pieces_BKL != PAD).sum(dim=2)
    best_B = (beam.total_BK / ((5.0 + lengths_BK) / 6.0) ** LENGTH_POWER).argmax(dim=1)
    for place in done_B.nonzero().flatten().tolist():
        row = beam.pieces_BKL[place, best_B[place]].tolist()
        pieces[int(beam.source_B[place])] = [piece for piece in row if piece not in (PAD, END)]
    going_B = (~done_B).nonzero().flatten()
    row_R = (going_B[:, None] * width + torch.arange(width, device=going_B.device)).flatten()
    beam.source_B, beam.limit_B = beam.source_B[going_B], beam.limit_B[going_B]
    beam.pieces_BKL, beam.total_BK = beam.pieces_BKL[going_B], beam.total_BK[going_B]
    beam.ended_BK, beam.memory = beam.ended_BK[going_B], beam.memory.rows(row_R)
    beam.states = [(hidden_RH[row_R], cell_RH[row_R]) for hidden_RH, cell_RH in beam.states]
