"""The nets of the kernel benchmark: our layer and its peers over the same weights.

Shape legend: T steps, B sequences, F features of the input, H hidden units, G gate units.
"""

import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, final

import numpy as np
import torch
from torch import nn

from bench.training_step import AbstractStep, Batch, StepShape, TorchStep, drawn_batch, step_after_step
from stretto.cells import GRU, LSTM, Cell, LayerNormLSTM, store_layer
from stretto.extras import optional
from stretto.nn import RNN

Net = Literal["GRU", "LSTM", "LayerNormLSTM"]

OURS: Final = "stretto"
UNROLLS: Final = (1, 8)
# With gains of 1 this net is chaotic: two float32 computations of it drift apart within a few hundred steps.
RECURRENT_GAIN: Final = 0.3


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Field:
    """Contestants on one shape.

    Attributes:
        ours: Our step.
        peers: The others.
        kernel: What ran of ours: "cpp" for generated code, anything else with the reason.
    """

    ours: AbstractStep
    peers: tuple[AbstractStep, ...]
    kernel: str


def drawn_cell(net: Net, shape: StepShape, *, seed: int = 0) -> Cell:
    """A cell whose weights are the same for the same arguments; the state of torch's generator is left as it is."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        if net == "GRU":
            return GRU(shape.input_size, shape.hidden_size)
        if net == "LSTM":
            return LSTM(shape.input_size, shape.hidden_size)
        cell = LayerNormLSTM(shape.input_size, shape.hidden_size)
    with torch.no_grad():
        cell.norm_hh.weight.fill_(RECURRENT_GAIN)
    return cell


def torch_layer(cells: Sequence[Cell], net: Net, shape: StepShape, *, directions: int = 1) -> nn.RNNBase:
    """torch's layers of that net with the weights of these cells, which are in the order of torch's states."""
    kind = nn.GRU if net == "GRU" else nn.LSTM
    layer = kind(
        shape.input_size, shape.hidden_size, num_layers=len(cells) // directions, bidirectional=directions == 2
    )
    for number, cell in enumerate(cells):
        store_layer(cell, layer, layer=number // directions, reverse=bool(number % directions))
    return layer


def our_step(rnn: RNN, *, batch: Batch, name: str = OURS) -> TorchStep:
    """A step of our layer."""
    return TorchStep(name, forward=lambda x_TBF: rnn(x_TBF)[0], weights=weights_of(rnn), batch=batch)


def torch_step(layer: nn.RNNBase, *, batch: Batch) -> TorchStep:
    """A step of torch's layer."""
    return TorchStep(f"nn.{layer.mode}", forward=lambda x_TBF: layer(x_TBF)[0], weights=weights_of(layer), batch=batch)


def loop_step(cell: Cell, *, batch: Batch) -> TorchStep:
    """A step of the cell called in a Python loop."""
    return TorchStep("Python loop", forward=step_after_step(cell), weights=weights_of(cell), batch=batch)


def weights_of(module: nn.Module) -> dict[str, nn.Parameter]:
    """Its parameters by name."""
    return dict(module.named_parameters())


def field_of(net: Net, shape: StepShape, *, with_jax: bool) -> Field:
    """Our layer of one net and its peers: torch's own layer where there is one, else the Python loop."""
    cell, batch = drawn_cell(net, shape), drawn_batch(shape)
    rnn = RNN(cell, batch_first=False)
    peers: list[AbstractStep] = []
    if net == "LayerNormLSTM":
        peers.append(loop_step(cell, batch=batch))
    else:
        peers.append(torch_step(torch_layer([cell], net, shape), batch=batch))
    if with_jax and net == "GRU":
        peers.append(JaxStep(cell, batch=batch))
    return Field(ours=our_step(rnn, batch=batch), peers=tuple(peers), kernel=kernel_of(rnn))


def kernel_of(rnn: RNN) -> str:
    """What runs: "cpp", or what else and why."""
    told = rnn.explain()
    return told.backend if told.backend == "cpp" else f"{told.backend}: {told.reason}"


@final
class JaxStep(AbstractStep):
    """A GRU by JAX: `lax.scan` over the state, the product of the input taken out by hand, compiled by XLA.

    Of a loop body of one step and one of several, the faster is kept.

    Args:
        cell: The GRU whose weights are taken.
        batch: What is trained on.
    """

    title = "JAX scan"

    def __init__(self, cell: Cell, *, batch: Batch) -> None:
        super().__init__(self.title)
        jax = optional("jax")
        self._jax = jax
        weights = {name: value.detach().numpy().T for name, value in cell.named_parameters()}
        # JAX gives dictionaries back in another order.
        self._names = tuple(weights)
        self._weights = jax.device_put(weights)
        self._x, self._dy = jax.device_put((batch.x_TBF.numpy(), batch.weight_TBO.numpy()))
        self._step = min((_jax_gru(jax, unroll=unroll) for unroll in UNROLLS), key=self._seconds)

    def run(self) -> None:
        """Forward and backward."""
        self._jax.block_until_ready(self._step(self._weights, self._x, self._dy))

    def results(self) -> dict[str, torch.Tensor]:
        """Outputs and gradients of one step."""
        (_, y_TBH), gradients = self._step(self._weights, self._x, self._dy)
        found = {f"gradient of {name}": _as_torch(gradients[name].T) for name in self._names}
        return {"output": _as_torch(y_TBH), **found}

    def _seconds(self, step: Any) -> float:
        """Of the second run: the first compiles."""
        taken = 0.0
        for _ in range(2):
            begin = time.perf_counter()
            self._jax.block_until_ready(step(self._weights, self._x, self._dy))
            taken = time.perf_counter() - begin
        return taken


def _jax_gru(jax: Any, *, unroll: int) -> Any:
    """The compiled step: weights (transposed, as JAX likes them), input and the outputs' weights in the loss."""
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


def _as_torch(array: Any) -> torch.Tensor:
    return torch.from_numpy(np.array(array))
