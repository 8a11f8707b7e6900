"""Contenders: forward and backward passes of the same net on the same batch, by different implementations.

The loss is the sum of the outputs, each times a fixed number. Gradients go to all weights and, as in a first layer,
not to the input.

Shape legend: T steps, B sequences, F features of the input, O of the output, H hidden units, G gate units.
"""

import abc
import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Final, Literal, final

import numpy as np
import torch
from torch import nn

from bench.harness import why_missing
from stretto.cells import GRU, LSTM, Cell, LayerNormLSTM, store_layer
from stretto.extras import optional
from stretto.kernels import NoCompiler, find_compiler
from stretto.nn import RNN

Forward = Callable[[torch.Tensor], torch.Tensor]
Net = Literal["GRU", "LSTM", "LayerNormLSTM"]

OURS: Final = "stretto"
JAX: Final = "JAX scan"
JAX_UNROLLS: Final = (1, 8)
# With gains of 1 this net is chaotic: two float32 computations of it drift apart within a few hundred steps.
RECURRENT_GAIN: Final = 0.3


@dataclasses.dataclass(frozen=True, slots=True)
class Shape:
    """Sizes of a pass, in this order: T, B, F and H."""

    num_steps: int
    batch: int
    input_size: int
    hidden_size: int

    def __str__(self) -> str:
        return f"T={self.num_steps}, B={self.batch}, F={self.input_size}, H={self.hidden_size}"

    @property
    def sizes(self) -> str:
        """The same for a column of a table."""
        return f"{self.num_steps}, {self.batch}, {self.input_size}, {self.hidden_size}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Input, and the weight of each output in the loss."""

    x_TBF: torch.Tensor
    weight_TBO: torch.Tensor


def draw_batch(shape: Shape, *, output_size: int | None = None) -> Batch:
    """A batch of normal numbers, the same for the same arguments; O is H by default."""
    generator = torch.Generator().manual_seed(0)
    size = (shape.num_steps, shape.batch)
    return Batch(
        x_TBF=torch.randn(*size, shape.input_size, generator=generator),
        weight_TBO=torch.randn(*size, output_size or shape.hidden_size, generator=generator),
    )


def draw_cell(net: Net, shape: Shape) -> Cell:
    """A cell with the same weights for the same arguments; the state of torch's generator does not change."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if net == "GRU":
            return GRU(shape.input_size, shape.hidden_size)
        if net == "LSTM":
            return LSTM(shape.input_size, shape.hidden_size)
        cell = LayerNormLSTM(shape.input_size, shape.hidden_size)
    with torch.no_grad():
        cell.norm_hh.weight.fill_(RECURRENT_GAIN)
    return cell


class Contender(abc.ABC):
    """A forward and backward pass that can run again and again."""

    def __init__(self, name: str) -> None:
        self.name = name

    @abc.abstractmethod
    def run(self) -> None:
        """Forward and backward."""

    @abc.abstractmethod
    def results(self) -> dict[str, torch.Tensor]:
        """Outputs and gradients of one pass: the output first, then weights in the order of torch's layers."""


@final
class TorchContender(Contender):
    """Any torch computation, with the gradients of the parameters of `weights`."""

    def __init__(self, name: str, *, forward: Forward, weights: nn.Module, batch: Batch) -> None:
        super().__init__(name)
        self._forward, self._batch = forward, batch
        self._weights = dict(weights.named_parameters())

    def run(self) -> None:
        """Forward and backward."""
        self._pass()

    def results(self) -> dict[str, torch.Tensor]:
        """Outputs and gradients of one pass."""
        y_TBO = self._pass().detach().clone()
        zero = torch.zeros(())
        gradients = {
            f"gradient of {name}": (zero if weight.grad is None else weight.grad).detach().clone()
            for name, weight in self._weights.items()
        }
        return {"output": y_TBO, **gradients}

    def _pass(self) -> torch.Tensor:
        for weight in self._weights.values():
            weight.grad = None
        y_TBO = self._forward(self._batch.x_TBF)
        (y_TBO * self._batch.weight_TBO).sum().backward()  # type: ignore[no-untyped-call]
        return y_TBO


def our_layer(rnn: RNN, *, batch: Batch, name: str = OURS, **options: Any) -> TorchContender:
    """Our layer, called with the given options."""
    return TorchContender(name, forward=lambda x_TBF: rnn(x_TBF, **options)[0], weights=rnn, batch=batch)


def torch_layer(cells: Sequence[Cell], net: Net, shape: Shape, *, directions: int = 1) -> nn.RNNBase:
    """torch's layers with the weights of these cells, which are in the order of torch's states."""
    kind = nn.GRU if net == "GRU" else nn.LSTM
    layer = kind(
        shape.input_size, shape.hidden_size, num_layers=len(cells) // directions, bidirectional=directions == 2
    )
    for number, cell in enumerate(cells):
        store_layer(cell, layer, layer=number // directions, reverse=bool(number % directions))
    return layer


def torch_contender(layer: nn.RNNBase, *, batch: Batch) -> TorchContender:
    """One of torch's layers."""
    return TorchContender(f"nn.{layer.mode}", forward=lambda x_TBF: layer(x_TBF)[0], weights=layer, batch=batch)


def loop_contender(cell: Cell, *, batch: Batch) -> TorchContender:
    """The cell in a Python loop, with gradients by autograd: what people write without a library."""
    return TorchContender("Python loop", forward=python_loop(cell), weights=cell, batch=batch)


def python_loop(cell: nn.Module) -> Forward:
    """Call the cell once per step."""

    def forward(x_TBF: torch.Tensor) -> torch.Tensor:
        state: Any = cell.initial_state(x_TBF.shape[1])  # type: ignore[operator]
        outputs = []
        for x_BF in x_TBF.unbind(0):
            y_BO, state = cell(x_BF, state)
            outputs.append(y_BO)
        return torch.stack(outputs)

    return forward


def missing_peers() -> dict[str, str]:
    """Peers that cannot run here, JAX or the compiled kernels, with the reason."""
    missing: dict[str, str] = {}
    if (reason := why_missing(lambda: optional("jax"))) is not None:
        missing[JAX] = reason
    try:
        find_compiler()
    except NoCompiler as error:
        missing["compiled kernels"] = f"{error}, so our layer runs without. Install g++ or name a compiler in CXX."
    return missing


@final
class JaxContender(Contender):
    """A GRU by JAX: `lax.scan` over the state, with the input projection hoisted by hand, compiled by XLA.

    Of a loop body of one step and one of several, the faster is kept.
    """

    def __init__(self, cell: Cell, *, batch: Batch) -> None:
        super().__init__(JAX)
        jax = optional("jax")
        self._jax = jax
        weights = {name: value.detach().numpy().T for name, value in cell.named_parameters()}
        # JAX returns dictionaries in another order.
        self._names = tuple(weights)
        self._weights = jax.device_put(weights)
        self._x, self._dy = jax.device_put((batch.x_TBF.numpy(), batch.weight_TBO.numpy()))
        self._pass = min((_compile_jax_gru(jax, unroll=unroll) for unroll in JAX_UNROLLS), key=self._seconds)

    def run(self) -> None:
        """Forward and backward."""
        self._jax.block_until_ready(self._pass(self._weights, self._x, self._dy))

    def results(self) -> dict[str, torch.Tensor]:
        """Outputs and gradients of one pass."""
        (_, y_TBH), gradients = self._pass(self._weights, self._x, self._dy)
        found = {f"gradient of {name}": torch.from_numpy(np.array(gradients[name].T)) for name in self._names}
        return {"output": torch.from_numpy(np.array(y_TBH)), **found}

    def _seconds(self, compiled: Any) -> float:
        """Seconds of the second run: the first compiles."""
        elapsed = 0.0
        for _ in range(2):
            begin = time.perf_counter()
            self._jax.block_until_ready(compiled(self._weights, self._x, self._dy))
            elapsed = time.perf_counter() - begin
        return elapsed


def _compile_jax_gru(jax: Any, *, unroll: int) -> Any:
    """A function of the weights (transposed, as JAX likes them), the input and the outputs' weights in the loss."""
    numpy, sigmoid = jax.numpy, jax.nn.sigmoid

    def loss(weights: Mapping[str, Any], x_TBF: Any, weight_TBO: Any) -> Any:
        hidden_size = weights["weight_hh"].shape[0]
        gates_TBG = x_TBF @ weights["weight_ih"] + weights["bias_ih"]

        def step(h_BH: Any, gates_BG: Any) -> Any:
            xr_BH, xz_BH, xn_BH = numpy.split(gates_BG, 3, axis=-1)
            hr_BH, hz_BH, hn_BH = numpy.split(h_BH @ weights["weight_hh"] + weights["bias_hh"], 3, axis=-1)
            z_BH = sigmoid(xz_BH + hz_BH)
            n_BH = numpy.tanh(xn_BH + sigmoid(xr_BH + hr_BH) * hn_BH)
            h_BH = (1 - z_BH) * n_BH + z_BH * h_BH
            return h_BH, h_BH

        h_BH = numpy.zeros((x_TBF.shape[1], hidden_size), x_TBF.dtype)
        _, y_TBH = jax.lax.scan(step, h_BH, gates_TBG, unroll=unroll)
        return (y_TBH * weight_TBO).sum(), y_TBH

    return jax.jit(jax.value_and_grad(loss, has_aux=True))
