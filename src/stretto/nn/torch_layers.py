"""Torch's recurrent layers, run by generated kernels where those are faster.

Shape legend: B sequences, T steps, P real steps of all sequences, L layers times directions, H hidden units.
"""

import time
from collections.abc import Callable
from functools import lru_cache
from typing import Any, Final, TypeVar, final, get_args

import torch
from torch import nn
from torch.nn import functional
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from stretto import cells
from stretto.checks import check_choice
from stretto.errors import StrettoError
from stretto.kernels import Backend, Built, build, unseen_by_hooks
from stretto.nn.ragged import check_lengths, pack_batch, reverse_padded
from stretto.nn.stack import Direction, assemble, run_stack

Module = TypeVar("Module", bound=nn.Module)
DTYPES = (torch.float32, torch.float64)


_TORCH_FUNCTIONS: Final[dict[str, Callable[..., Any]]] = {
    "LSTM": torch.lstm,
    "GRU": torch.gru,
    "RNN_TANH": torch.rnn_tanh,
    "RNN_RELU": torch.rnn_relu,
}


@lru_cache(maxsize=256)
def _layer_program(
    mode: str, *, input_size: int, hidden_size: int, proj_size: int, bias: bool, dtype: torch.dtype, backend: Backend
) -> Built:
    """The program of one layer and direction. Weights are given when it runs, so that all layers alike share it."""
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
    device = torch.device("cpu")
    return build(cell, x_shape=(input_size,), x_dtype=dtype, state=state, device=device, backend=backend)


def _is_looked_at() -> bool:
    """Whether the call is compiled, exported, traced or transformed: torch's own layer is what such onlookers know.

    Nothing is built then either: a step that is traced under their modes would be remembered as one without a kernel.
    """
    return bool(
        torch.compiler.is_compiling()
        or torch._C._get_tracing_state() is not None
        or torch._C._functorch.peek_interpreter_stack() is not None
        or torch._C._len_torch_dispatch_stack()
    )


class _Accelerated(nn.RNNBase):
    """What the three layers share: each is torch's layer in everything but what computes it."""

    _backend: Backend = "auto"
    _measures: bool = True

    def forward(self, input: Any, hx: Any = None, lengths: Any = None) -> Any:  # noqa: A002 - torch's name
        """As torch's layer; with `lengths` of a padded batch, only real steps are computed.

        Args:
            input: A padded batch, a single sequence, or a PackedSequence.
            hx: The initial state; zeros by default.
            lengths: Steps of each sequence of a padded batch. Outputs after the end of a sequence are zero, its final
                state is that after its last step, and its backward direction starts there. torch's own layer needs
                a packed batch for this, on which it is several times slower; `ragged` avoids that.
        """
        if lengths is not None:
            if isinstance(input, PackedSequence) or input.dim() != 3:
                raise StrettoError(
                    "lengths are for padded batches", fix="Give (batch, steps, features), or no lengths."
                )
            return self._run(input, hx, lengths) if self._takes(input, hx) else self._run_packed(input, hx, lengths)
        if not self._takes(input, hx):
            return super().forward(input, hx)
        if self._backend == "auto" and self._measures and self._faster(input, hx) == "torch":
            return super().forward(input, hx)
        return self._run(input, hx)

    def ragged(self, x: torch.Tensor, lengths: Any) -> torch.Tensor:
        """Outputs for a padded batch of sequences of these lengths, zero after each one's end.

        The same as `layer(x, lengths=lengths)[0]`, but where torch's own layers run, they run on the padded batch,
        each direction over sequences that are reversed within their lengths.
        """
        if self._takes(x, None):
            return self._run(x, None, lengths)[0]  # type: ignore[no-any-return]
        return self._run_padded(x, lengths)

    def is_accelerated(self, x: torch.Tensor) -> bool:
        """Whether something else than torch's own layers runs batches of this type and device."""
        return self._backend != "torch" and not self._why_not(x.dtype, x.device)

    def _run_padded(self, x: torch.Tensor, lengths: Any) -> torch.Tensor:
        """Torch's own layers, one direction at a time, on the padded batch."""
        x_BTF = x if self.batch_first else x.transpose(0, 1)
        lengths_B = torch.from_numpy(check_lengths(lengths, *x_BTF.shape[:2])).to(x.device)
        behind_BT1 = (torch.arange(x_BTF.shape[1], device=x.device) >= lengths_B[:, None])[..., None]
        # Padding may hold anything, and NaN times a gradient of zero is NaN.
        x_BTF = x_BTF.masked_fill(behind_BT1, 0.0)
        shapes = [(1, *shape[1:]) for shape in self._state_shapes(len(x_BTF))]
        zeros = [x_BTF.new_zeros(shape) for shape in shapes]
        run = _TORCH_FUNCTIONS[self.mode]
        for number in range(self.num_layers):
            if number and self.dropout:
                x_BTF = functional.dropout(x_BTF, self.dropout, training=self.training)
            outputs = []
            for reverse in range(self._num_directions):
                given_BTF = reverse_padded(x_BTF, lengths_B) if reverse else x_BTF
                weights = list(self._weights(number * self._num_directions + reverse).values())
                state = tuple(zeros) if self.mode == "LSTM" else zeros[0]
                y_BTH = run(given_BTF, state, weights, self.bias, 1, 0.0, self.training, False, True)[0]
                outputs.append(reverse_padded(y_BTH, lengths_B) if reverse else y_BTH)
            x_BTF = torch.cat(outputs, dim=-1).masked_fill(behind_BT1, 0.0)
        return x_BTF if self.batch_first else x_BTF.transpose(0, 1)

    def _run_packed(self, x: torch.Tensor, hx: Any, lengths: Any) -> Any:
        """Torch's own layer on a packed batch; sequences without steps, which it refuses, keep their state."""
        batch_dim, steps = (0, x.shape[1]) if self.batch_first else (1, x.shape[0])
        lengths_B = torch.from_numpy(check_lengths(lengths, x.shape[batch_dim], steps))
        if bool((lengths_B == steps).all()):
            return super().forward(x, hx)
        states = self._states_LBH(x, hx, len(lengths_B))
        rows_M = lengths_B.nonzero().flatten()
        there_M = rows_M.to(x.device)
        shape = [steps, steps, self._output_width]
        shape[batch_dim] = len(lengths_B)
        y = x.new_zeros(shape)
        if len(rows_M):
            packed = pack_padded_sequence(
                x.index_select(batch_dim, there_M),
                lengths_B[rows_M],
                batch_first=self.batch_first,
                enforce_sorted=False,
            )
            given = tuple(state.index_select(1, there_M) for state in states)
            found, after = super().forward(packed, given if self.mode == "LSTM" else given[0])
            padded, _ = pad_packed_sequence(found, batch_first=self.batch_first, total_length=steps)
            y = y.index_copy(batch_dim, there_M, padded)
            news = after if self.mode == "LSTM" else (after,)
            states = [old.index_copy(1, there_M, new) for old, new in zip(states, news, strict=True)]
        return y, tuple(states) if self.mode == "LSTM" else states[0]

    def explain_choice(self) -> dict[str, Any]:
        """For each kind of batch seen, which backend was faster and by how much."""
        return {str(key): value for key, value in self.__dict__.get("_measured", {}).items()}

    def _takes(self, x: Any, hx: Any) -> bool:
        """Whether something else than torch's own implementation runs this batch.

        Raises:
            StrettoError: A backend was asked for by name, and cannot run it.
        """
        data = x.data if isinstance(x, PackedSequence) else x
        if (
            self._backend == "torch"
            or _is_looked_at()
            or not isinstance(data, torch.Tensor)
            or not self._fits(x, data, hx)
        ):
            return False
        reason = self._why_not(data.dtype, data.device)
        if reason and self._backend != "auto":
            raise StrettoError(
                f"{type(self).__name__}({self.extra_repr()}) cannot run with backend={self._backend!r}: {reason}",
                fix="Choose stretto.accelerate(model, backend='auto'), which then runs torch's own layer.",
            )
        return not reason

    def _fits(self, x: Any, data: torch.Tensor, hx: Any) -> bool:
        """Whether input, weights and state fit together; if not, torch handles them, or refuses in its own words."""
        weights = [getattr(self, name) for name in self._flat_weights_names]
        states = [] if hx is None else list(hx) if isinstance(hx, (tuple, list)) else [hx]
        if any(t.dtype != data.dtype or t.device != data.device for t in (*weights, *states)):
            # Under autocast torch converts the weights.
            return torch.is_autocast_enabled(data.device.type)
        num_dims = data.dim()
        is_single = num_dims == 2 and not isinstance(x, PackedSequence)
        if num_dims not in {2, 3} or data.shape[-1] != self._input_width or data.numel() == 0:
            return False
        shapes = self._state_shapes(self._num_rows(x)) if states else []
        return [tuple(s.shape) for s in states] == [(n, h) if is_single else (n, b, h) for n, b, h in shapes]

    def _why_not(self, dtype: torch.dtype, device: torch.device) -> str:
        """Why the backend cannot run batches of this type; empty if it can."""
        if device.type != "cpu":
            return f"the batch is on {device}, and generated code runs on the CPU"
        if torch.is_autocast_enabled("cpu"):
            return (
                "autocast is on, and it computes in full precision; torch.autocast('cpu', enabled=False) turns it off"
            )
        if dtype not in DTYPES:
            return f"the batch is of {dtype}, and it computes in float32 and float64"
        wanted = "eager" if self._backend == "eager" else "cpp"
        for width in (self._input_width, self._output_width)[: self.num_layers]:
            built = self._program(width, dtype)
            if built.backend != wanted:
                return built.reason
        return ""

    @property
    def _num_directions(self) -> int:
        return 2 if self.bidirectional else 1

    @property
    def _input_width(self) -> int:
        """By the weights that are there, which `torch.func.functional_call` may have replaced."""
        weight: torch.Tensor = self.weight_ih_l0  # type: ignore[assignment]
        return weight.shape[1]

    @property
    def _output_width(self) -> int:
        return (self.proj_size or self.hidden_size) * self._num_directions

    def _program(self, input_size: int, dtype: torch.dtype) -> Built:
        return _layer_program(
            self.mode,
            input_size=input_size,
            hidden_size=self.hidden_size,
            proj_size=self.proj_size,
            bias=self.bias,
            dtype=dtype,
            backend="eager" if self._backend == "eager" else "auto",
        )

    def _weights(self, index: int) -> dict[str, torch.Tensor]:
        """The parameters of one layer and direction, by the names that a cell gives them."""
        number, reverse = divmod(index, self._num_directions)
        names = ["weight_ih", "weight_hh", *(["bias_ih", "bias_hh"] if self.bias else [])]
        if self.proj_size:
            names.append("weight_hr")
        return {name: getattr(self, f"{name}_l{number}{'_reverse' if reverse else ''}") for name in names}

    def _num_rows(self, x: Any) -> int:
        if isinstance(x, PackedSequence):
            return int(x.batch_sizes[0])
        return 1 if x.dim() == 2 else int(x.shape[0 if self.batch_first else 1])

    def _state_shapes(self, num_rows: int) -> list[tuple[int, int, int]]:
        count = self.num_layers * self._num_directions
        shapes = [(count, num_rows, self.proj_size or self.hidden_size)]
        return [*shapes, (count, num_rows, self.hidden_size)] if self.mode == "LSTM" else shapes

    def _states_LBH(self, x: torch.Tensor, hx: Any, num_rows: int) -> list[torch.Tensor]:
        if hx is None:
            return [x.new_zeros(shape) for shape in self._state_shapes(num_rows)]
        return list(hx) if isinstance(hx, (tuple, list)) else [hx]

    def _run(self, x: Any, hx: Any, lengths: Any = None) -> Any:
        """On generated kernels, or the same loops operator by operator."""
        is_single = not isinstance(x, PackedSequence) and x.dim() == 2
        if is_single:
            x = x.unsqueeze(0 if self.batch_first else 1)
            hx = None if hx is None else tuple(s.unsqueeze(1) for s in (hx if isinstance(hx, (tuple, list)) else [hx]))
        packed = pack_batch(x, lengths, batch_first=self.batch_first)
        states_LBH = self._states_LBH(packed.x_PF, hx, packed.layout.num_rows)
        if packed.order_B is not None:
            states_LBH = [state.index_select(1, packed.order_B) for state in states_LBH]

        def direction(index: int, features: tuple[int, ...]) -> Direction:
            program = self._program(features[0], packed.x_PF.dtype).program
            return Direction(program, self._weights(index), [state[index] for state in states_LBH])

        layers = assemble(
            direction,
            output_shape=lambda *_: (self.proj_size or self.hidden_size,),
            features=tuple(packed.x_PF.shape[1:]),
            num_layers=self.num_layers,
            num_directions=self._num_directions,
        )
        result = run_stack(layers, packed.layout, packed.x_PF, dropout=self.dropout if self.training else 0.0)
        y = packed.unpack(result.y_PF)
        finals = [torch.stack(parts) for parts in zip(*result.states, strict=True)]
        if packed.order_B is not None:
            back_B = torch.argsort(packed.order_B)
            finals = [state.index_select(1, back_B) for state in finals]
        if is_single:
            y = y.squeeze(0 if self.batch_first else 1)  # type: ignore[union-attr]
            finals = [state.squeeze(1) for state in finals]
        return y, tuple(finals) if self.mode == "LSTM" else finals[0]

    def _faster(self, x: Any, hx: Any) -> str:
        """Which backend is faster for this kind of batch, measured on the first of its kind."""
        data = x.data if isinstance(x, PackedSequence) else x
        steps = len(x.batch_sizes) if isinstance(x, PackedSequence) else data.shape[1 if self.batch_first else 0]
        training = torch.is_grad_enabled()
        kind = (
            training,
            data.dtype,
            isinstance(x, PackedSequence),
            int(steps).bit_length(),
            self._num_rows(x).bit_length(),
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
        with torch.random.fork_rng(devices=[]), unseen_by_hooks():
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
        """Without measurements, which hold for one machine only."""
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


def accelerate(model: Module, *, backend: Backend = "auto", measure: bool = True) -> Module:
    """Let every `torch.nn.RNN`, `GRU` and `LSTM` inside `model` run on generated kernels.

    The layers are changed in place and stay what they are: the same parameters and `state_dict` keys, the same options,
    outputs and gradients. Subclasses of them with code of their own are left alone.

    Args:
        model: Any module; it is also returned.
        backend: "auto" measures, once for each kind of batch (sizes to the next power of two, training or not), whether
            the generated kernel or torch's own is faster, and takes that one. "cpp" always takes the generated kernel;
            "eager" runs the same loops operator by operator; "torch" always runs torch's own.
        measure: Whether "auto" measures. If not, it takes the generated kernel wherever there is one, which makes runs
            repeatable to the last digit.

    Raises:
        StrettoError: `model` is not a module. Later, when a layer is called: the backend that was asked for by name
            cannot run it; the layer and the reason are named.

    Example:
        >>> model = stretto.accelerate(torch.nn.Sequential(torch.nn.GRU(8, 32, batch_first=True)))
        >>> type(model[0]).__mro__[2].__name__
        'GRU'
    """
    if not isinstance(model, nn.Module):
        raise StrettoError(f"{type(model).__name__} is not a module", fix="Give a torch.nn.Module.")
    check_choice(backend, name="backend", choices=get_args(Backend))
    for module in model.modules():
        twin = _TWIN.get(type(module))
        if twin is not None:
            module.__class__ = twin
        if isinstance(module, _Accelerated):
            module._backend, module._measures = backend, measure
            module.__dict__.pop("_measured", None)
    return model


def open_forget_gates(lstm: nn.LSTM) -> None:
    """Let an LSTM begin with open forget gates: a bias of 1 in the second quarter of torch's gate order."""
    with torch.no_grad():
        for name, bias in lstm.named_parameters():
            if name.startswith("bias_ih"):
                bias[len(bias) // 4 : len(bias) // 2].fill_(1.0)
