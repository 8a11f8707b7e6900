"""torch's recurrent layers, run by generated kernels where those are faster.

Shape legend: B sequences, T steps, P real steps of all sequences, L layers times directions, H hidden units.
"""

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeVar, final, get_args

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from stretto import cells
from stretto.errors import StrettoError
from stretto.kernels import Backend, Built, build
from stretto.nn.ragged import as_rows
from stretto.nn.stack import Direction, run_stack

Module = TypeVar("Module", bound=nn.Module)
DTYPES = (torch.float32, torch.float64)


@lru_cache(maxsize=256)
def layer_program(
    mode: str,
    *,
    input_size: int,
    hidden_size: int,
    proj_size: int = 0,
    bias: bool = True,
    dtype: torch.dtype,
    backend: Backend = "auto",
) -> Built:
    """The program of one layer and direction; weights are given when it runs, so that all alike share it."""
    cell: cells.Cell
    with torch.device("meta"):
        if mode == "GRU":
            cell = cells.GRU(input_size, hidden_size, bias=bias)
        elif mode == "LSTM" and proj_size:
            cell = cells.ProjectedLSTM(input_size, hidden_size, proj_size=proj_size, bias=bias)
        elif mode == "LSTM":
            cell = cells.LSTM(input_size, hidden_size, bias=bias)
        else:
            cell = cells.Elman(
                input_size, hidden_size, nonlinearity="relu" if mode == "RNN_RELU" else "tanh", bias=bias
            )
        cell = cell.to(dtype)
        state = cell.initial_state(1)
    return build(cell, x_shape=(input_size,), x_dtype=dtype, state=state, device=torch.device("cpu"), backend=backend)


def layer_weights(module: nn.RNNBase, number: int, *, reverse: bool = False) -> dict[str, torch.Tensor]:
    """The parameters of one layer and direction, by the names a cell gives them."""
    suffix = f"_l{number}{'_reverse' if reverse else ''}"
    names = ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if module.bias else [])]
    if module.proj_size:
        names.append("weight_hr")
    return {name: getattr(module, name + suffix) for name in names}


class _Accelerated(nn.RNNBase):
    """What the three layers share; each is torch's layer in everything but who computes it."""

    _backend: Backend = "auto"

    def ragged(self, x: torch.Tensor, lengths: Any) -> torch.Tensor:
        """Outputs for a padded batch of sequences of these lengths: real steps alone are computed, others are zero."""
        if self._backend == "torch" or self._why_not(x, None):
            return self._packed(x, torch.as_tensor(lengths).cpu())
        y, _ = self._run(x, None, lengths)
        return y  # type: ignore[no-any-return]

    def _packed(self, x: torch.Tensor, lengths_B: torch.Tensor) -> torch.Tensor:
        """Torch's own layer, on what is left without padding: a backward direction must begin at the real end."""
        rows_M = lengths_B.nonzero().flatten()
        batch_dim, steps = (0, x.shape[1]) if self.batch_first else (1, x.shape[0])
        width = (self.proj_size or self.hidden_size) * (2 if self.bidirectional else 1)
        shape = (len(lengths_B), steps, width) if self.batch_first else (steps, len(lengths_B), width)
        if not len(rows_M):
            return x.new_zeros(shape)
        there_M = rows_M.to(x.device)
        packed = pack_padded_sequence(
            x.index_select(batch_dim, there_M), lengths_B[rows_M], batch_first=self.batch_first, enforce_sorted=False
        )
        y, _ = super().forward(packed)
        padded, _ = pad_packed_sequence(y, batch_first=self.batch_first, total_length=steps)
        return padded.new_zeros(shape).index_copy(batch_dim, there_M, padded)

    def forward(self, input: Any, hx: Any = None) -> Any:  # noqa: A002 - torch's name
        """As torch's layer."""
        if self._backend == "torch" or self._why_not(input, hx):
            return super().forward(input, hx)
        if self._backend != "auto":
            return self._run(input, hx)
        faster = self._faster(input, hx)
        return self._run(input, hx) if faster == "cpp" else super().forward(input, hx)

    def explain_choice(self) -> dict[str, Any]:
        """For each kind of batch seen, who was faster and by how much."""
        return {str(key): value for key, value in self.__dict__.get("_measured", {}).items()}

    def _why_not(self, x: Any, hx: Any) -> str:  # noqa: PLR0911 - one line a reason
        """Why torch's own implementation has to run; empty if ours can."""
        data = x.data if isinstance(x, PackedSequence) else x
        if not isinstance(data, torch.Tensor) or data.device.type != "cpu" or data.dtype not in DTYPES:
            return "input"
        if any(p.dtype != data.dtype or p.device.type != "cpu" for p in self.parameters()):
            return "weights"
        if torch.is_autocast_enabled("cpu"):
            return "autocast"
        rank = 2 if isinstance(x, PackedSequence) else data.dim()
        if rank not in {2, 3} or data.shape[-1] != self.input_size or data.numel() == 0:
            return "shape"
        rows, alone = self._rows_of(x), not isinstance(x, PackedSequence) and rank == 2
        states = [] if hx is None else list(hx) if isinstance(hx, (tuple, list)) else [hx]
        wanted = self._state_shapes(rows)
        if states and [tuple(s.shape) for s in states] != [(n, h) if alone else (n, b, h) for n, b, h in wanted]:
            return "state"
        if any(s.dtype != data.dtype or s.device.type != "cpu" for s in states):
            return "state"
        sizes = self._sizes()
        made = [self._program(size, data.dtype) for size in sizes]
        return next(
            (item.reason for item in made if item.backend != ("eager" if self._backend == "eager" else "cpp")), ""
        )

    def _program(self, input_size: int, dtype: torch.dtype) -> Built:
        return layer_program(
            self.mode,
            input_size=input_size,
            hidden_size=self.hidden_size,
            proj_size=self.proj_size,
            bias=self.bias,
            dtype=dtype,
            backend="eager" if self._backend == "eager" else "auto",
        )

    def _sizes(self) -> list[int]:
        directions = 2 if self.bidirectional else 1
        width = (self.proj_size or self.hidden_size) * directions
        return [self.input_size, *[width] * (self.num_layers > 1)]

    def _rows_of(self, x: Any) -> int:
        if isinstance(x, PackedSequence):
            return int(x.batch_sizes[0])
        return 1 if x.dim() == 2 else x.shape[0 if self.batch_first else 1]

    def _state_shapes(self, rows: int) -> list[tuple[int, int, int]]:
        count = self.num_layers * (2 if self.bidirectional else 1)
        shapes = [(count, rows, self.proj_size or self.hidden_size)]
        return [*shapes, (count, rows, self.hidden_size)] if self.mode == "LSTM" else shapes

    def _run(self, x: Any, hx: Any, lengths: Any = None) -> Any:
        alone = not isinstance(x, PackedSequence) and x.dim() == 2
        if alone:
            x = x.unsqueeze(0 if self.batch_first else 1)
            hx = None if hx is None else tuple(s.unsqueeze(1) for s in (hx if isinstance(hx, (tuple, list)) else [hx]))
        rows = as_rows(x, lengths, batch_first=self.batch_first)
        data = rows.x_PF
        shapes = self._state_shapes(rows.layout.num_rows)
        given = [data.new_zeros(shape) for shape in shapes] if hx is None else hx
        states_LBH = list(given) if isinstance(given, (tuple, list)) else [given]
        if rows.order_B is not None:
            states_LBH = [state.index_select(1, rows.order_B) for state in states_LBH]
        directions = 2 if self.bidirectional else 1
        layers = []
        for number in range(self.num_layers):
            size = self.input_size if number == 0 else (self.proj_size or self.hidden_size) * directions
            program = self._program(size, data.dtype).program
            layer = []
            for reverse in range(directions):
                states = [state[number * directions + reverse] for state in states_LBH]
                layer.append(Direction(program, layer_weights(self, number, reverse=bool(reverse)), states))
            layers.append(layer)
        result = run_stack(layers, rows.layout, data, dropout=self.dropout if self.training else 0.0)
        y = rows.output(result.y_PF)
        finals = [torch.stack(parts) for parts in zip(*result.states, strict=True)]
        if rows.order_B is not None:
            back_B = torch.argsort(rows.order_B)
            finals = [state.index_select(1, back_B) for state in finals]
        if alone:
            y = y.squeeze(0 if self.batch_first else 1)  # type: ignore[union-attr]
            finals = [state.squeeze(1) for state in finals]
        return y, tuple(finals) if self.mode == "LSTM" else finals[0]

    def _faster(self, x: Any, hx: Any) -> str:
        """Who is faster for this kind of batch: measured when the first one of it comes."""
        data = x.data if isinstance(x, PackedSequence) else x
        steps = len(x.batch_sizes) if isinstance(x, PackedSequence) else data.shape[1 if self.batch_first else 0]
        training = torch.is_grad_enabled()
        kind = (
            training,
            data.dtype,
            isinstance(x, PackedSequence),
            int(steps).bit_length(),
            self._rows_of(x).bit_length(),
            torch.get_num_threads(),
        )
        measured: dict[Any, Any] = self.__dict__.setdefault("_measured", {})
        if kind not in measured:
            measured[kind] = self._measure(x, hx, training=training)
        return str(measured[kind]["faster"])

    def _measure(self, x: Any, hx: Any, *, training: bool) -> dict[str, Any]:
        runs: dict[str, Callable[[Any, Any], Any]] = {"cpp": self._run, "torch": super().forward}
        best = dict.fromkeys(runs, float("inf"))
        state = None if hx is None else tuple(s.detach() for s in hx) if isinstance(hx, (tuple, list)) else hx.detach()
        weights = [p for p in self.parameters() if p.requires_grad]
        with torch.random.fork_rng(devices=[]):
            for turn in range(3):
                for name, run in runs.items():
                    start = time.perf_counter()
                    y, _ = run(_detached(x), state)
                    if training and weights:
                        values = y.data if isinstance(y, PackedSequence) else y
                        torch.autograd.grad(values.sum(), weights, allow_unused=True)
                    seconds = time.perf_counter() - start
                    if turn:
                        best[name] = min(best[name], seconds)
        faster = min(best, key=best.__getitem__)
        return {"faster": faster, "ratio": best["torch"] / best["cpp"]}

    def __getstate__(self) -> dict[str, Any]:
        """Measurements are of one machine and are not stored."""
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {key: value for key, value in state.items() if key != "_measured"}


def _detached(x: Any) -> Any:
    if isinstance(x, PackedSequence):
        return PackedSequence(x.data.detach(), x.batch_sizes, x.sorted_indices, x.unsorted_indices)
    return x.detach()


@final
class RNN(_Accelerated, nn.RNN):
    """`torch.nn.RNN`, accelerated."""


@final
class GRU(_Accelerated, nn.GRU):
    """`torch.nn.GRU`, accelerated."""


@final
class LSTM(_Accelerated, nn.LSTM):
    """`torch.nn.LSTM`, accelerated."""


_TWIN: dict[type[nn.Module], type[nn.Module]] = {nn.RNN: RNN, nn.GRU: GRU, nn.LSTM: LSTM}


def accelerate(model: Module, *, backend: Backend = "auto") -> Module:
    """Let every `torch.nn.RNN`, `GRU` and `LSTM` inside `model` run on generated kernels.

    The layers are changed in place and stay what they are: the same parameters and `state_dict` keys, the same options,
    outputs and gradients. Subclasses of them with code of their own are left alone.

    Args:
        model: Any module; it is also returned.
        backend: "auto" measures, once for each kind of batch (sizes to the next power of two, training or not), whether
            the generated kernel or torch's own is faster, and takes that one. "cpp" always takes the generated kernel
            where there is one, which also makes runs repeatable to the last digit; "eager" runs the same loops operator
            by operator; "torch" always runs torch's own.

    Example:
        >>> model = stretto.accelerate(torch.nn.Sequential(torch.nn.GRU(8, 32, batch_first=True)))
        >>> type(model[0]).__mro__[2].__name__
        'GRU'
    """
    if not isinstance(model, nn.Module):
        raise StrettoError(f"{type(model).__name__} is not a module", fix="Give a torch.nn.Module.")
    if backend not in get_args(Backend):
        raise StrettoError(f"backend is {backend!r}", fix=f"Choose one of {', '.join(map(repr, get_args(Backend)))}.")
    for module in model.modules():
        twin = _TWIN.get(type(module))
        if twin is not None:
            module.__class__ = twin
        if isinstance(module, _Accelerated):
            module._backend = backend
            module.__dict__.pop("_measured", None)
    return model
