"""What truncated BPTT cannot be given.

Shape legend: B rows, T steps, F features, H hidden units.
"""

from typing import Any

import pytest
import torch
from bptt_definition import (
    F,
    H,
    make_case,
    make_net,
)
from torch import nn

from stretto.errors import StrettoError
from stretto.nn import Streams, TruncatedBPTT


def test_inputs_from_other_layers_are_refused_where_their_graph_would_be_used_twice() -> None:
    net, (x_BTF, _) = make_net("gru"), make_case(2, 6)
    made_BTF = nn.Linear(F, F).double()(x_BTF)
    with pytest.raises(StrettoError, match="output of other layers"):
        list(TruncatedBPTT(net, made_BTF, window=4, step=2))
    (part,) = TruncatedBPTT(net, made_BTF, window=6, step=6)
    part.y_new.sum().backward()
    with torch.no_grad():
        assert len(list(TruncatedBPTT(net, made_BTF, window=4, step=2))) == 3


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": 1}, "window=1 is shorter than step=2"),
        ({"step": 0}, "step=0"),
        ({"step": 1.0}, "step=1.0"),
        ({"window": True}, "window=True"),
        ({"x": torch.zeros(3)}, r"shape \(3,\)"),
        ({"x": torch.zeros(2, 0, F)}, r"shape \(2, 0, 2\)"),
        ({"lengths": [3]}, "1 lengths"),
        ({"lengths": [3, 7]}, "up to 7 steps"),
        ({"lengths": [3, 0]}, "sequence 1 has length 0"),
        ({"lengths": [3, 2], "batch_dim": 0}, "batch_dim=1"),
        ({"x": Streams(torch.zeros(4, F), num_streams=1, chunk=2), "lengths": [4]}, "which have their own"),
        ({"x": Streams(torch.zeros(4, F), num_streams=1, chunk=2), "batch_dim": 0}, "batch_dim=1"),
        ({"x": Streams(torch.zeros(4, F), num_streams=1, chunk=3)}, "chunk 0 has 3 steps, more than step=2"),
        ({"x": [torch.zeros(2, 3, F)]}, "gave a Tensor"),
        ({"state": "nothing"}, "this is str"),
        ({"initial": torch.zeros(1, 2, H)}, "instead of `initial`"),
        ({"rnn": nn.GRU(F, H)}, "batch_first=False"),
        ({"rnn": nn.GRU(F, H, batch_first=True, bidirectional=True)}, "bidirectional"),
        ({"rnn": lambda x, state: (x, state), "lengths": [3, 2]}, "takes none"),
        ({"rnn": lambda *given: given[0]}, "gave Tensor instead of outputs and state"),
        ({"rnn": lambda x, state: (x[:, :1], state)}, r"outputs of shape \(2, 1, 2\) for \(2, 2, 2\)"),
    ],
)
def test_what_cannot_be_used_is_refused(options: dict[str, Any], message: str) -> None:
    settings_ = {
        "rnn": nn.GRU(F, H, batch_first=True),
        "x": torch.zeros(2, 3, F),
        "window": 4,
        "step": 2,
        "batch_dim": 1,
    }
    settings_.update(options)
    with pytest.raises(StrettoError, match=message):
        list(TruncatedBPTT(settings_.pop("rnn"), settings_.pop("x"), **settings_))
