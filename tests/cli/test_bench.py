"""`stretto bench`: compares before it times. No time is judged."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from stretto.cli import bench
from stretto.cli.main import main

MINE = """
import torch
from torch import nn
import stretto


class Leaky(stretto.Cell):
    def __init__(self, input_size, hidden_size):
        super().__init__()
        self.hidden_size = hidden_size
        self.inward, self.around = nn.Linear(input_size, hidden_size), nn.Linear(hidden_size, hidden_size, bias=False)

    def initial_state(self, batch_size):
        return self.zeros(batch_size, self.hidden_size)

    def forward(self, x_t, state):
        new = 0.9 * state + 0.1 * torch.tanh(self.inward(x_t) + self.around(state))
        return new, new


class Tagger(nn.Module):
    def __init__(self, words=9):
        super().__init__()
        self.embed, self.lstm = nn.Embedding(words, 4), nn.LSTM(4, 6, batch_first=True)
        self.drop, self.head = nn.Dropout(0.5), nn.Linear(6, 3)

    def forward(self, words_BT):
        y, (h, c) = self.lstm(self.embed(words_BT))
        return {"scores": self.head(self.drop(y)), "last": (h, c), "words": words_BT}


def ours():
    return nn.Sequential(stretto.RNN(stretto.cells.GRU(5, 4)))


class First(nn.Module):
    def __init__(self):
        super().__init__()
        self.gru = nn.GRU(5, 4)

    def forward(self, x):
        return self.gru(x)[0]


accelerated = stretto.accelerate(First())
"""


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "benched.py"
    path.write_text(MINE, encoding="utf-8")
    return str(path)


@pytest.fixture
def run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], quick_compiler: None
) -> Callable[..., dict[str, Any]]:
    monkeypatch.setattr(bench, "TURN_SECONDS", 0.0)

    def call(*words: str) -> dict[str, Any]:
        path = tmp_path / "bench.json"
        assert main(["bench", *words, "--rounds", "1", "--json", str(path)]) == 0, capsys.readouterr().err
        found: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        assert found["target"] in capsys.readouterr().out
        return found

    return call


@pytest.mark.parametrize(
    ("words", "against", "batch"),
    [
        (["{mine}:Leaky", "--shape", "6,2,5", "--hidden-size", "4"], "Python loop", "T=6, B=2, F=5"),
        (["GRU", "--shape", "6,2,5", "--hidden-size", "4", "--against", "torch"], "nn.GRU", "T=6, B=2, F=5"),
        (["{mine}:Tagger", "--shape", "6,2", "--tokens", "9"], "plain torch", "T=6, B=2, tokens=9"),
        (["{mine}:ours", "--shape", "6,2"], "plain torch", "T=6, B=2, F=5"),
        (["{mine}:First", "--shape", "6,2", "--time-first"], "plain torch", "T=6, B=2, F=5"),
        (["{mine}:accelerated", "--shape", "6,2", "--time-first"], "plain torch", "T=6, B=2, F=5"),
    ],
)
def test_cells_and_models_are_compared_and_timed(
    run: Callable[..., dict[str, Any]], mine: str, words: list[str], against: str, batch: str
) -> None:
    found = run(*(word.format(mine=mine) for word in words))
    assert (found["against"], found["batch"]) == (against, batch)
    assert 0 <= found["error"] <= 1e-4
    assert [row["pass"] for row in found["rows"]] == ["forward", "forward and backward"]
    for row in found["rows"]:
        assert row["ratio"] == pytest.approx(row["peer_ms"] / row["stretto_ms"])
        assert row["rounds"] == 1


def test_a_wrong_layer_is_not_timed(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], wrong_layer: str, quick_compiler: None
) -> None:
    monkeypatch.setattr(bench, "time_interleaved", lambda *_, **__: pytest.fail("nothing may be timed"))
    assert main(["bench", "GRU", "--shape", "6,2,5", "--hidden-size", "4"]) == 2
    assert f"the {wrong_layer}" in capsys.readouterr().err
