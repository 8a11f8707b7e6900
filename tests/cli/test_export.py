"""`stretto export`: files that compute what the model does."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import stretto
from small_data import write_signs
from stretto.batching import collate
from stretto.data import make_drawn_digits, make_regimes, make_text, open_sequences
from stretto.tasks import find_task

Run = Callable[..., Any]
SMALL: dict[str, Any] = {"epochs": 1, "hidden_size": 6, "threads": 1, "backend": "torch"}

NETS = """
import torch
from torch import nn
import stretto

class Tagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.out = nn.Embedding(11, 4), nn.Linear(5, 3)
        self.gru = nn.GRU(4, 5, num_layers=2, batch_first=True)

    def forward(self, x):
        return self.out(self.gru(self.embed(x))[0])

layers = nn.LSTM(3, 4, num_layers=2)
projected = nn.LSTM(3, 4, proj_size=2)
rnn = stretto.RNN(stretto.cells.GRU(3, 4), num_layers=2)
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("trained")
    Path(folder, "nets.py").write_text(NETS, encoding="utf-8")
    signs = write_signs(folder / "signs.npz", count=30)
    stretto.train("classify", data=signs, out=folder / "classify", **SMALL)
    kind = find_task("label-steps")
    data = make_regimes()
    few = data.subset(np.concatenate([np.flatnonzero(data.split_N == part)[:3] for part in range(3)]))
    config = {**SMALL, "backend": "auto", "num_layers": 2}
    stretto.train(kind(kind.Config(**config), few), out=folder / "steps")
    kind, text = find_task("language-model"), make_text()
    few = text.subset(np.concatenate([np.flatnonzero(text.split_N == part)[:20] for part in range(3)]))
    stretto.train(kind(kind.Config(**SMALL), few), out=folder / "text")
    kind, digits = find_task("digits"), make_drawn_digits(num_train=30)
    stretto.train(kind(kind.Config(**SMALL), digits), out=folder / "digits")
    return folder


@pytest.fixture
def here(trained: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(trained)
    return tmp_path


@pytest.mark.slow
def test_a_run_as_a_program_of_torch(run: Run, here: Path) -> None:
    out = here / "net.pt2"
    model, data = stretto.load("classify"), open_sequences("signs.npz")
    row = data[3]
    ended = run("export", "classify", "--to", "torch", "--steps", str(len(row.features_TF)), "--out", str(out))
    assert (ended.code, ended.err) == (0, "")
    assert "any batch" in ended.out
    program = torch.export.load(out).module()
    with torch.no_grad():
        torch.testing.assert_close(program(row.features_TF[None]), model(collate([row])), rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["steps", "text", "digits"])
def test_runs_as_onnx(run: Run, here: Path, name: str) -> None:
    runtime = pytest.importorskip("onnxruntime")
    out = here / "net.onnx"
    ended = run("export", name, "--to", "onnx", "--out", str(out))
    assert (ended.code, ended.err) == (0, "")
    assert "any batch and length" in ended.out
    model = stretto.load(name)
    session = runtime.InferenceSession(str(out))
    assert [path.name for path in here.iterdir()] == ["net.onnx"]
    if name == "text":
        data = make_text()
        batch = collate([data[5]])
        x = batch.features_BTF[:, :, 0].long()
        found = session.run(None, {"x": x.numpy()})[0][:, :-1]
    else:
        batch = collate([(make_drawn_digits(num_train=30) if name == "digits" else make_regimes())[2]])
        found = session.run(None, {"x": batch.features_BTF.float().numpy()})[0]
    with torch.no_grad():
        np.testing.assert_allclose(found, model(batch).numpy(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "suffix", "sizes"),
    [pytest.param("onnx", "onnx", "any batch and length", marks=pytest.mark.slow), ("torch", "pt2", "any batch")],
)
def test_a_model_of_ones_own(run: Run, here: Path, kind: str, suffix: str, sizes: str) -> None:
    words = ["nets:Tagger", "--to", kind, "--tokens", "11", "--steps", "9", "--out", str(here / f"net.{suffix}")]
    ended = run("export", *words)
    assert (ended.code, ended.err) == (0, "")
    assert sizes in ended.out


PROGRAM = """
#include "NAME.h"
#include <stdio.h>
int main(void) {
    static NAME one;
    float x[NAME_IN], y[NAME_OUT];
    NAME_init(&one);
    for (;;) {
        for (int i = 0; i < NAME_IN; ++i) if (scanf("%f", x + i) != 1) return 0;
        NAME_step(&one, x, y);
        for (int i = 0; i < NAME_OUT; ++i) printf("%.9g ", y[i]);
        printf("\\n");
    }
}
"""


def _compile_and_run(folder: Path, x_TF: np.ndarray) -> np.ndarray:
    text = PROGRAM.replace("NAME_IN", "NET_INPUTS").replace("NAME_OUT", "NET_OUTPUTS").replace("NAME", "net")
    (folder / "main.c").write_text(text, encoding="utf-8")
    command = ["cc", "-std=c99", "-O2", "-Wall", "-Werror", "main.c", "net.c", "-o", "main", "-lm"]
    subprocess.run(command, cwd=folder, check=True)
    given = "\n".join(" ".join(map(repr, map(float, row))) for row in x_TF)
    done = subprocess.run([folder / "main"], input=given, capture_output=True, text=True, check=True)
    return np.array([[float(word) for word in line.split()] for line in done.stdout.splitlines()])


def test_a_run_of_label_steps_as_c(run: Run, here: Path) -> None:
    ended = run("export", "steps", "--to", "c", "--out", str(here / "net.c"))
    assert (ended.code, ended.err) == (0, "")
    assert "us per step" in ended.out
    batch = collate([make_regimes()[2]])
    with torch.no_grad():
        expected = stretto.load("steps")(batch)[0].numpy()
    found = _compile_and_run(here, batch.features_BTF[0].numpy())
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("target", ["nets:layers", "nets:projected", "nets:rnn"])
def test_layers_as_c(run: Run, here: Path, target: str) -> None:
    assert run("export", target, "--to", "c", "--out", str(here / "net.c")).code == 0
    x_TF = np.random.default_rng(0).normal(size=(6, 3)).astype(np.float32)
    found = _compile_and_run(here, x_TF)
    layers = getattr(sys.modules["nets"], target.partition(":")[2])
    x = torch.from_numpy(x_TF)[None] if layers.batch_first else torch.from_numpy(x_TF)[:, None]
    with torch.no_grad():
        np.testing.assert_allclose(found, layers(x)[0].reshape(6, -1).numpy(), rtol=1e-5, atol=1e-5)
