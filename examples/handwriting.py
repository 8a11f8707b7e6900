"""Handwriting recognition in your own loop: pen strokes in, text out, by a bidirectional LSTM and CTC.

Two lines make it faster: `accelerate` for the layer, and a `BucketSampler` for batches of similar length.
The handwriting comes with Stretto: `pip install 'stretto[handwriting]'`.

Shape legend: B lines, T steps of the longest, F features, C alphabet, S characters of all lines.
"""

import copy
import time

import torch
from side_by_side import compare, quick_was_asked
from torch import nn
from torch.utils.data import DataLoader

import stretto
from stretto.data import make_handwriting


class Recogniser(nn.Module):
    """Groups of three steps through a bidirectional LSTM, and a character for each group."""

    def __init__(self, num_characters):
        super().__init__()
        self.lstm = nn.LSTM(9, 64, bidirectional=True, batch_first=True)
        self.head = nn.Linear(128, 1 + num_characters)

    def forward(self, x_BTF):
        """Logits of the characters; the first is the CTC blank."""
        x_BTF = x_BTF[:, : x_BTF.shape[1] // 3 * 3].unflatten(1, (-1, 3)).flatten(2)
        return self.head(self.lstm(x_BTF)[0])


def train(model, optimizer, loader, alphabet):
    """Train one epoch in a plain loop; returns the loss per line."""
    total, lines = 0.0, 0
    for batch in loader:
        log_TBC = model(batch.features_BTF).log_softmax(dim=-1).transpose(0, 1)
        characters_S = torch.tensor([1 + alphabet.index(one) for text in batch.targets for one in text])
        sizes_B = torch.tensor([len(text) for text in batch.targets])
        loss = nn.functional.ctc_loss(log_TBC, characters_S, batch.lengths // 3, sizes_B, reduction="sum")
        optimizer.zero_grad()
        (loss / len(batch)).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        total, lines = total + loss.item(), lines + len(batch)
    return total / lines


def main():
    """Compare one batch, then train both, alternating by epoch."""
    quick = quick_was_asked(__doc__)
    torch.manual_seed(0)
    data = make_handwriting(num_train=24 if quick else 1500, num_writers=8, seed=0).part("train")
    alphabet = sorted({character for line in data for character in line.target})
    plain = Recogniser(len(alphabet))
    fast = stretto.accelerate(copy.deepcopy(plain))  # line 1
    sampler = stretto.BucketSampler(data.lengths_N, batch_size=8 if quick else 32, seed=0)  # line 2
    bucketed = DataLoader(data, batch_sampler=sampler, collate_fn=stretto.collate)
    shuffled = DataLoader(data, batch_size=8 if quick else 32, shuffle=True, collate_fn=stretto.collate)
    batch = next(iter(bucketed))

    def with_torch():
        return torch.func.functional_call(plain, dict(fast.named_parameters()), (batch.features_BTF,))

    compare(with_torch, lambda: fast(batch.features_BTF), fast, quick=quick)
    contenders = (("plain", plain, shuffled), ("fast", fast, bucketed))
    adams = {name: torch.optim.Adam(model.parameters(), lr=5e-3) for name, model, _ in contenders}
    seconds = dict.fromkeys(adams, 0.0)
    for epoch in range(1 if quick else 6):
        sampler.set_epoch(epoch)
        for name, model, loader in contenders:
            begin = time.perf_counter()
            loss = train(model, adams[name], loader, alphabet)
            seconds[name] += time.perf_counter() - begin
            print(f"epoch {epoch}  {name:<5}  loss per line {loss:.1f}  {seconds[name]:.1f} s so far")
    print(f"the two lines together: epochs are {seconds['plain'] / seconds['fast']:.1f} times as fast")


if __name__ == "__main__":
    main()
