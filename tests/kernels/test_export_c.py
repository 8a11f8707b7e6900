"""The step as C: compiled by a plain compiler and compared with the step in Python.

Shape legend: T steps, F features, O outputs.
"""

import ctypes
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from cell_settings import SETTINGS
from stretto.cells import GRU, LSTM, Cell
from stretto.errors import StrettoError
from stretto.kernels import CSource, export_c
from stretto.signature import call_cell

FLAGS = "-std=c99 -O2 -Wall -Wextra -Werror -pedantic -fPIC -shared".split()
H = 4


def _compiled(files: CSource, folder: Path) -> ctypes.CDLL:
    (folder / f"{files.name}.h").write_text(files.header, encoding="utf-8")
    source = folder / f"{files.name}.c"
    source.write_text(files.source, encoding="utf-8")
    library = folder / f"{files.name}.so"
    done = subprocess.run(["cc", *FLAGS, source, "-o", library, "-lm"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return ctypes.CDLL(str(library))


def _run_c(
    files: CSource, x_TF: np.ndarray, folder: Path, *, num_outputs: int, resets: Sequence[int] = ()
) -> np.ndarray:
    library = _compiled(files, folder)
    net = (ctypes.c_float * (files.state_bytes // 4))(*[float("nan")] * (files.state_bytes // 4))
    library[f"{files.name}_init"](net)
    y_TO = np.full((len(x_TF), num_outputs), np.nan, dtype=np.float32)
    for t, x_F in enumerate(np.ascontiguousarray(x_TF, dtype=np.float32)):
        if t in resets:
            library[f"{files.name}_reset"](net)
        library[f"{files.name}_step"](net, x_F.ctypes.data_as(ctypes.c_void_p), y_TO[t].ctypes.data_as(ctypes.c_void_p))
    return y_TO


@torch.no_grad()
def _run_python(steps: Sequence[nn.Module], x_TF: np.ndarray, *, resets: Sequence[int] = ()) -> np.ndarray:
    rows = []
    for t, x_F in enumerate(torch.from_numpy(x_TF)):
        if t == 0 or t in resets:
            states = [step.initial_state(1) if hasattr(step, "initial_state") else () for step in steps]
        value = x_F[None]
        for number, step in enumerate(steps):
            if hasattr(step, "initial_state"):
                value, states[number] = call_cell(step, value, states[number])
            else:
                value = step(value)
        rows.append(value[0].numpy().ravel())
    return np.stack(rows)


def _check(steps: Sequence[nn.Module], folder: Path, *, num_inputs: int, resets: Sequence[int] = (4,)) -> CSource:
    for step in steps:
        step.eval()
        with torch.no_grad():
            for parameter in step.parameters():
                # Biases begin as zeros, which would hide that they are left out.
                parameter.add_(0.3 * torch.randn_like(parameter))
    x_TF = np.random.default_rng(1).normal(size=(9, num_inputs)).astype(np.float32)
    expected_TO = _run_python(steps, x_TF, resets=resets)
    files = export_c(steps, num_inputs=num_inputs, name="net")
    found_TO = _run_c(files, x_TF, folder, num_outputs=expected_TO.shape[1], resets=resets)
    np.testing.assert_allclose(found_TO, expected_TO, rtol=1e-5, atol=1e-5)
    assert f"#define NET_INPUTS {num_inputs}\n" in files.header
    assert f"#define NET_OUTPUTS {expected_TO.shape[1]}\n" in files.header
    assert "malloc" not in files.source
    return files


@pytest.mark.parametrize("name", SETTINGS)
def test_every_cell_of_the_library(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    _check([SETTINGS[name](H)], tmp_path, num_inputs=5)


def test_layers_with_a_head(tmp_path: Path) -> None:
    torch.manual_seed(0)
    head = nn.Sequential(nn.Linear(3, 6), nn.GELU(), nn.Linear(6, 2), nn.Softmax(dim=-1))
    files = _check([GRU(5, 7), LSTM(7, 3), head], tmp_path, num_inputs=5)
    count = sum(p.numel() for module in (GRU(5, 7), LSTM(7, 3), head) for p in module.parameters())
    assert files.weight_bytes == 4 * (count + 7 + 2 * 3)


class _Odd(Cell):
    """Views, joins, reductions, branches, a matrix as state and a learned initial state."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.start = nn.Linear(8, 6), nn.Parameter(torch.randn(2, 3))

    def initial_state(self, batch_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        return self.start.expand(batch_size, 2, 3), self.zeros(batch_size, 1)

    def forward(
        self, x: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        matrix, count = state
        gates = self.mix(torch.cat([x, matrix.flatten(1)], dim=1)).view(-1, 2, 3)
        share = gates.softmax(dim=2)
        new = torch.where(gates > 0.1, share * matrix, torch.nn.functional.softplus(gates)) / (1 + count[..., None])
        top = new.amax(dim=(1, 2), keepdim=True)
        y = (new - top).transpose(1, 2).reshape(-1, 6).chunk(2, dim=1)
        return torch.cat([y[1], y[0].abs().sqrt(), count.clamp(max=3.0)], dim=1), (new, count + 1)


def test_a_cell_of_ones_own(tmp_path: Path) -> None:
    torch.manual_seed(0)
    _check([_Odd()], tmp_path, num_inputs=2)


def test_cells_in_double_precision_and_of_torch(tmp_path: Path) -> None:
    torch.manual_seed(0)
    cell = LSTM(5, 3).double()
    files = export_c([cell], num_inputs=5, name="net")
    x_TF = np.random.default_rng(1).normal(size=(5, 5))
    found_TO = _run_c(files, x_TF, tmp_path, num_outputs=3)
    np.testing.assert_allclose(found_TO, _run_python([cell], x_TF), rtol=1e-5, atol=1e-5)
    assert cell.weight_ih.dtype is torch.float64


class _Reads(Cell):
    def initial_state(self, batch_size: int) -> torch.Tensor:
        return self.zeros(batch_size, 2)

    def forward(self, x: torch.Tensor, state: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return (state if x.sum() > 0 else x), state


def test_what_cannot_be_written_is_refused() -> None:
    with pytest.raises(StrettoError, match=r"no C can be written for _Reads: .*reads values"):
        export_c([_Reads()], num_inputs=2, name="net")
    for name in ("", "3d", "a-b", "while", "net; int x"):
        with pytest.raises(StrettoError, match="is not a valid C identifier"):
            export_c([GRU(2, 2)], num_inputs=2, name=name)
