"""Small nets that learned to remember: what holds at initial weights need not hold for these.

Shape legend: B sequences, T steps, F features, H hidden units, C classes.
"""

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import final

import numpy as np
import torch
from torch import nn
from torch.nn import functional

import stretto


@final
@dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """A layer, what it is asked about, and how well it was trained.

    Attributes:
        rnn: The layer, in single precision.
        x_BTF: Sequences of its task, longer than those it was trained on where the task allows it.
        loss: After training.
        ignorant: The loss of one that remembers nothing.
        initial: The layer before it was trained.
    """

    rnn: stretto.RNN
    x_BTF: torch.Tensor
    loss: float
    ignorant: float
    initial: stretto.RNN


def adding(generator: np.random.Generator, B: int, T: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers, two of which are marked: their sum is asked at the end."""
    numbers_BT = generator.random((B, T), dtype=np.float32)
    marks_BT = np.zeros((B, T), dtype=np.float32)
    for row in range(B):
        marks_BT[row, [generator.integers(T // 2), T // 2 + generator.integers(T - T // 2)]] = 1.0
    x_BTF = torch.from_numpy(np.stack([numbers_BT, marks_BT], axis=-1))
    return x_BTF, torch.from_numpy((numbers_BT * marks_BT).sum(1))


def copying(generator: np.random.Generator, B: int, T: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One of four symbols at the start, then nothing until a sign at the end, when it must be repeated."""
    symbols_B = generator.integers(4, size=B)
    shown_BT = np.full((B, T), 4)
    shown_BT[:, 0], shown_BT[:, -1] = symbols_B, 5
    return functional.one_hot(torch.from_numpy(shown_BT), 6).float(), torch.from_numpy(symbols_B)


def _train(
    cell: stretto.Cell,
    num_outputs: int,
    batches: Callable[[], tuple[torch.Tensor, torch.Tensor]],
    *,
    updates: int,
    ignorant: float,
    ask: Callable[[], torch.Tensor],
) -> Trained:
    """Train on the output at the last step; the loss is the mean of the last updates."""
    rnn, head = stretto.RNN(cell), nn.Linear(cell.hidden_size, num_outputs)  # type: ignore[arg-type]
    initial = copy.deepcopy(rnn)
    optimizer = torch.optim.Adam([*rnn.parameters(), *head.parameters()], 1e-2)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=updates)
    losses = []
    for _ in range(updates):
        x_BTF, target_B = batches()
        said_BC = head(rnn(x_BTF)[0][:, -1])
        if target_B.is_floating_point():
            loss = functional.mse_loss(said_BC[:, 0], target_B)
        else:
            loss = functional.cross_entropy(said_BC, target_B)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(rnn.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(float(loss.detach()))
    return Trained(rnn=rnn, x_BTF=ask(), loss=float(np.mean(losses[-10:])), ignorant=ignorant, initial=initial)


@functools.cache
def trained_on_adding() -> Trained:
    """Sums of two numbers up to many steps apart; asked about 1,024 steps."""
    torch.manual_seed(0)
    generator = np.random.default_rng(0)
    return _train(
        stretto.cells.GRU(2, 24),
        1,
        lambda: adding(generator, 48, int(generator.integers(8, 60))),
        updates=500,
        ignorant=1 / 6,
        ask=lambda: adding(generator, 2, 1024)[0],
    )


@functools.cache
def trained_on_copying() -> Trained:
    """A symbol kept for up to many steps, by an LSTM."""
    torch.manual_seed(0)
    generator = np.random.default_rng(0)
    cell = stretto.cells.LSTM(6, 16)
    with torch.no_grad():
        cell.bias_hh[16:32] = 3.0  # type: ignore[index]
    return _train(
        cell,
        4,
        lambda: copying(generator, 32, int(generator.integers(3, 80))),
        updates=250,
        ignorant=float(np.log(4)),
        ask=lambda: copying(generator, 3, 300)[0],
    )


def trained_on_windows(folder: Path) -> Trained:
    """Activities from 128 steps of a phone's motion; asked about a stretch of a recording."""
    held = np.load(folder / "hapt" / "hapt.npz", allow_pickle=False)
    signal_TF = torch.from_numpy(held["x"][:200_000] * held["scale"]).float()
    signal_TF = (signal_TF - signal_TF.mean(0)) / signal_TF.std(0)
    labels_T = torch.from_numpy(held["y"][:200_000].astype(np.int64))
    windows_NTF = signal_TF.unfold(0, 128, 64).mT
    labels_NT = labels_T.unfold(0, 128, 64)
    pure_N = (labels_NT == labels_NT[:, :1]).all(1) & (labels_NT[:, 0] > 0) & (labels_NT[:, 0] < 7)
    windows_NTF, labels_N = windows_NTF[pure_N].contiguous(), labels_NT[pure_N, 0] - 1
    torch.manual_seed(0)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        picked_B = torch.randint(len(windows_NTF), (48,))
        return windows_NTF[picked_B], labels_N[picked_B]

    ignorant = float(np.log(6))
    ask = signal_TF[None, 5000:6200].clone
    return _train(stretto.cells.GRU(6, 24), 6, batch, updates=200, ignorant=ignorant, ask=ask)


def trained_on_characters(text: str) -> Trained:
    """The next character of a text, by a GRU; asked about a passage."""
    alphabet = {character: number for number, character in enumerate(sorted(set(text)))}
    size, numbers_T = len(alphabet), torch.tensor([alphabet[character] for character in text])
    torch.manual_seed(0)

    def batch() -> tuple[torch.Tensor, torch.Tensor]:
        rows_BT = numbers_T[torch.randint(len(numbers_T) - 41, (64, 1)) + torch.arange(41)]
        return functional.one_hot(rows_BT[:, :-1], size).float(), rows_BT[:, -1]

    shares_C = torch.bincount(numbers_T).double() / len(numbers_T)
    entropy = float(-(shares_C * shares_C.clamp_min(1e-12).log()).sum())
    ask = functional.one_hot(numbers_T[:900], size).float()[None].clone
    return _train(stretto.cells.GRU(size, 32), size, batch, updates=200, ignorant=entropy, ask=ask)
