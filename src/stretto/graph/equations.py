"""Some of torch's own functions by their equations, which is what the recorder sees of them.

Inside, the recurrent ones write in place on parts of one buffer, or call a fused layer that no graph can look into. The
equations are those of the documentation of `nn.RNN`, `nn.GRU` and `nn.LSTM`; weights and results are the same.

Shape legend: T steps, B rows, F features, H hidden units.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch.nn import functional

from stretto.graph.matrices import function_of_rows

State = tuple[torch.Tensor, ...]


def _gates(
    x: torch.Tensor, h: torch.Tensor, weights: Sequence[torch.Tensor | None]
) -> tuple[torch.Tensor, torch.Tensor]:
    """The products of input and state with their weights, for all gates."""
    w_ih, w_hh, b_ih, b_hh = (*weights, None, None)[:4]
    assert w_ih is not None
    assert w_hh is not None
    return functional.linear(x, w_ih, b_ih), functional.linear(h, w_hh, b_hh)


def _gru(x: torch.Tensor, state: State, *weights: torch.Tensor | None) -> State:
    (h,) = state
    given, own = _gates(x, h, weights)
    (reset_x, update_x, new_x), (reset_h, update_h, new_h) = given.chunk(3, -1), own.chunk(3, -1)
    update = torch.sigmoid(update_x + update_h)
    new = torch.tanh(new_x + torch.sigmoid(reset_x + reset_h) * new_h)
    return (new + update * (h - new),)


def _lstm(x: torch.Tensor, state: State, *weights: torch.Tensor | None) -> State:
    h, c = state
    given, own = _gates(x, h, weights[:4])
    take, forget, new, give = (given + own).chunk(4, -1)
    c = torch.sigmoid(forget) * c + torch.sigmoid(take) * torch.tanh(new)
    h = torch.sigmoid(give) * torch.tanh(c)
    projection = weights[4] if len(weights) > 4 else None
    return (h if projection is None else functional.linear(h, projection)), c


def _elman(nonlinearity: Callable[[torch.Tensor], torch.Tensor]) -> Callable[..., State]:
    def step(x: torch.Tensor, state: State, *weights: torch.Tensor | None) -> State:
        given, own = _gates(x, state[0], weights)
        return (nonlinearity(given + own),)

    return step


_STEPS: Final[dict[str, Callable[..., State]]] = {
    "gru": _gru,
    "lstm": _lstm,
    "rnn_tanh": _elman(torch.tanh),
    "rnn_relu": _elman(torch.relu),
}


def _cell(kind: str) -> Callable[..., Any]:
    def run(x: torch.Tensor, state: Any, *weights: torch.Tensor | None, **named: torch.Tensor | None) -> Any:
        found = _STEPS[kind](x, tuple(state) if kind == "lstm" else (state,), *weights, *named.values())
        return found if kind == "lstm" else found[0]

    return run


def _layers(kind: str) -> Callable[..., Any]:
    def run(  # noqa: PLR0917 - torch's own signature
        x: torch.Tensor,
        state: Any,
        weights: Sequence[torch.Tensor],
        has_biases: bool,
        num_layers: int,
        dropout: float,
        train: bool,
        bidirectional: bool,
        batch_first: bool,
    ) -> Any:
        initial = state if kind == "lstm" else (state,)
        num_directions = 1 + bidirectional
        each = len(weights) // (num_layers * num_directions)
        values = list(x.unbind(1 if batch_first else 0))
        finals: list[State] = []
        for layer in range(num_layers):
            if layer and dropout and train:
                values = [functional.dropout(value, dropout) for value in values]
            directions = []
            for direction in range(num_directions):
                index = layer * num_directions + direction
                own: list[torch.Tensor | None] = list(weights[index * each : (index + 1) * each])
                if not has_biases:
                    own[2:2] = [None, None]
                now, found = tuple(part[index] for part in initial), []
                for value in values[:: -1 if direction else 1]:
                    now = _STEPS[kind](value, now, *own)
                    found.append(now[0])
                directions.append(found[:: -1 if direction else 1])
                finals.append(now)
            values = [found[0] if len(found) == 1 else torch.cat(found, -1) for found in zip(*directions, strict=True)]
        after = [torch.stack(parts) for parts in zip(*finals, strict=True)]
        return torch.stack(values, 1 if batch_first else 0), *after

    return run


def _one_hot(indices: torch.Tensor, num_classes: int = -1) -> torch.Tensor:
    if num_classes < 1:
        # How many there are depends on the data: torch's own says so.
        return functional.one_hot(indices, num_classes)
    classes = torch.arange(num_classes, device=indices.device)
    return (indices.unsqueeze(-1) == classes).to(torch.int64)


def _set_item(tensor: torch.Tensor, index: Any, value: Any) -> None:
    """`x[mask] = 1.0`: its own way goes through positions that depend on the data, and a tensor made of the number."""
    is_mask = isinstance(index, torch.Tensor) and index.dtype == torch.bool
    if is_mask and not isinstance(value, torch.Tensor):
        tensor.masked_fill_(index.reshape(*index.shape, *[1] * (tensor.dim() - index.dim())), value)
    else:
        tensor[index] = value


def _fill_diagonal(tensor: torch.Tensor, value: float, wrap: bool = False) -> torch.Tensor:
    if tensor.dim() != 2 or wrap:
        return tensor.fill_diagonal_(value, wrap)
    return tensor.masked_fill_(torch.eye(*tensor.shape, dtype=torch.bool, device=tensor.device), value)


def _solve(a: torch.Tensor, b: torch.Tensor, *, left: bool = True) -> torch.Tensor:
    """NaN where torch raises an error, for which it looks at values: where a matrix is singular."""
    x: torch.Tensor
    x, failed = torch.linalg.solve_ex(a, b, left=left)
    return x.masked_fill((failed != 0).reshape(*failed.shape, *[1] * (x.dim() - failed.dim())), float("nan"))


def _cosine_similarity(x: torch.Tensor, y: torch.Tensor, dim: int = 1, eps: float = 1e-8) -> torch.Tensor:
    def unit(value: torch.Tensor) -> torch.Tensor:
        length: torch.Tensor = torch.linalg.vector_norm(value, 2, dim, keepdim=True)
        # The gradient does not see the bound.
        return value / (length + (length.clamp_min(eps) - length).detach())

    return (unit(x) * unit(y)).sum(dim)


def _bilinear(x: torch.Tensor, y: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    made = torch.einsum("...i,oij,...j->...o", x, weight, y)
    return made if bias is None else made + bias


def _embedding_bag(x: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Sum or mean of a row's embeddings: its own way counts where each row begins."""
    names = ("offsets", "max_norm", "norm_type", "scale_grad_by_freq", "mode", "sparse", "per_sample_weights")
    given = {"mode": "mean", **dict(zip(names, args, strict=False)), **kwargs}
    mode, factors = given["mode"], given.get("per_sample_weights")
    is_other = any(given.get(name) is not None for name in ("offsets", "max_norm", "padding_idx"))
    is_other = is_other or mode not in ({"sum", "mean"} if factors is None else {"sum"})
    if len(args) > len(names) or x.is_floating_point() or x.dim() != 2 or not x.shape[1] or is_other:
        return functional.embedding_bag(x, weight, *args, **kwargs)
    found = functional.embedding(x, weight)
    found = found if factors is None else found * factors.unsqueeze(-1)
    return found.sum(1) if mode == "sum" else found.mean(1)


def _instance_norm(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    names = ("running_mean", "running_var", "weight", "bias", "use_input_stats", "momentum", "eps")
    given = {"use_input_stats": True, "eps": 1e-5, **dict(zip(names, args, strict=False)), **kwargs}
    if given.get("running_mean") is not None or not given["use_input_stats"] or x.dim() < 3:
        return functional.instance_norm(x, *args, **kwargs)
    y = functional.layer_norm(x, x.shape[2:], eps=given["eps"])
    along = (-1, *[1] * (x.dim() - 2))
    weight, bias = (None if given.get(name) is None else given[name].view(along) for name in ("weight", "bias"))
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


def _rrelu(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
    given = {"lower": 1 / 8, "upper": 1 / 3, "training": False, "inplace": False}
    given |= dict(zip(given, args, strict=False)) | kwargs
    if given["training"] or given["inplace"]:
        return functional.rrelu(x, *args, **kwargs)
    return functional.leaky_relu(x, (given["lower"] + given["upper"]) / 2)


def _pool(name: str, num_dims: int) -> Callable[..., torch.Tensor]:
    """The largest or the mean value of windows of a row."""
    is_max = name.startswith("max")
    names = ("kernel_size", "stride", "padding", *(("dilation",) if is_max else ()), "ceil_mode")

    def run(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        given = dict(zip(names, args, strict=False)) | kwargs
        if len(args) > len(names) or any(given.pop(name, False) for name in ("ceil_mode", "return_indices")):
            return getattr(functional, name)(x, *args, **kwargs)  # type: ignore[no-any-return]
        size, step, pad, apart = (
            [value] * num_dims if isinstance(value, int) else list(value) * (num_dims // len(value))
            for value in (
                given["kernel_size"],
                given.pop("stride", None) or given["kernel_size"],
                given.pop("padding", 0),
                given.pop("dilation", 1),
            )
        )
        if len(given) > 1 or x.dim() <= num_dims:
            return getattr(functional, name)(x, *args, **kwargs)  # type: ignore[no-any-return]
        if any(pad):
            sides = [side for both in reversed(pad) for side in (both, both)]
            x = functional.pad(x, sides, value=-math.inf if is_max else 0.0)
        rank = x.dim()
        for axis in range(num_dims):
            x = x.unfold(rank - num_dims + axis, (size[axis] - 1) * apart[axis] + 1, step[axis])[..., :: apart[axis]]
        windows = x.flatten(-num_dims)
        return windows.max(-1).values if is_max else windows.mean(-1)

    return run


EQUATIONS: Final[dict[str, Callable[..., Any]]] = {
    **{f"{kind}_cell": _cell(kind) for kind in _STEPS},
    **{kind: _layers(kind) for kind in _STEPS},
    "one_hot": _one_hot,
    "linalg_solve": _solve,
    "__setitem__": _set_item,
    "fill_diagonal_": _fill_diagonal,
    "cosine_similarity": _cosine_similarity,
    "bilinear": _bilinear,
    "instance_norm": _instance_norm,
    "embedding_bag": _embedding_bag,
    "rrelu": _rrelu,
    **{name: _pool(name, int(name[8])) for name in ("max_pool1d", "max_pool2d", "avg_pool1d", "avg_pool2d")},
}
"""Functions of `torch`, by name."""


def equations_of(name: str, args: Sequence[Any]) -> Callable[..., Any] | None:
    """What to call in the place of a function; None if there is none, as for those of packed sequences."""
    if name in _STEPS and not (len(args) == 9 and isinstance(args[3], bool)):
        return None
    return function_of_rows(name, args) or EQUATIONS.get(name)
