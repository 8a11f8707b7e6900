"""Products within a row: heads, attention over a row's memory, matrix states and fast weights, as people write them.

Shape legend: B sequences, T steps, F features, H units of N heads with D each, S slots of a memory.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, TypeAlias, final

import pytest
import torch
from torch import nn
from torch.nn import functional

import stretto
from rnn_definition import by_hand
from stretto.kernels import Backend
from stretto.state import flatten

pytestmark = pytest.mark.usefixtures("quick_compiler")

B, T, F, N, D, S = 5, 6, 4, 3, 5, 4
H = N * D
LENGTHS = [6, 2, 0, 1, 5]
States: TypeAlias = tuple[torch.Tensor, ...]


@final
@dataclass(frozen=True, slots=True)
class Spec:
    """A cell: what happens in a step, with the weights `w` by name, sizes of its states, and modules by name."""

    step: Callable[[Any, torch.Tensor, States], tuple[torch.Tensor, States]]
    states: tuple[tuple[int, ...], ...] = ((H,),)
    weights: dict[str, tuple[int, ...]] = field(default_factory=dict)
    modules: dict[str, Callable[[], nn.Module]] = field(default_factory=dict)


@final
class RowCell(stretto.Cell):
    """Runs the step of a `Spec`; `w.i` maps the input to H units."""

    def __init__(self, spec: Spec) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.spec, self.input_size = spec, F
        self.i = nn.Linear(F, H)
        for name, sizes in spec.weights.items():
            setattr(self, name, nn.Parameter(0.3 * torch.randn(sizes)))
        for name, made in spec.modules.items():
            setattr(self, name, made())

    def initial_state(self, batch_size: int) -> States:
        return tuple(self.zeros(batch_size, *sizes) for sizes in self.spec.states)

    def forward(self, x_t: torch.Tensor, state: States) -> tuple[torch.Tensor, States]:
        return self.spec.step(self, x_t, state)


SPECS: dict[str, Spec] = {}


def spec(*states: tuple[int, ...], w: dict[str, tuple[int, ...]] | None = None, **modules: Any) -> Any:
    """Enter a step by its name."""

    def enter(step: Any) -> Any:
        SPECS[step.__name__] = Spec(step, states or ((H,),), w or {}, modules)
        return step

    return enter


def _heads(x: torch.Tensor) -> torch.Tensor:
    return x.view(-1, N, D)


# Heads: a matrix for each


def _of_heads(product: Callable[[torch.Tensor, Any], torch.Tensor]) -> Any:
    def step(w: Any, x: torch.Tensor, state: States) -> Any:
        h = torch.tanh(_heads(w.i(x)) + product(state[0], w.r))
        return h.flatten(1), (h,)

    return step


for _name, _product in {
    "heads_einsum": lambda h, r: torch.einsum("bhd,hde->bhe", h, r),
    "heads_einsum_transposed": lambda h, r: torch.einsum("bhd,hed->bhe", h, r),
    "heads_bmm": lambda h, r: torch.bmm(h.transpose(0, 1), r).transpose(0, 1),
    "heads_bmm_permuted": lambda h, r: torch.bmm(r.mT, h.permute(1, 2, 0)).permute(2, 0, 1),
    "heads_baddbmm": lambda h, r: torch.baddbmm(r[:, :1], h.transpose(0, 1), r, beta=0.5, alpha=0.7).transpose(0, 1),
    "heads_matmul": lambda h, r: (h.unsqueeze(-2) @ r).squeeze(-2),
    "heads_matmul_left": lambda h, r: torch.matmul(r, h.unsqueeze(-1)).squeeze(-1),
    "heads_matmul_of_copies": lambda h, r: (h[:, :, None] @ r.expand(h.shape[0], N, D, D))[:, :, 0],
    "heads_one_after_another": lambda h, r: torch.stack([h[:, k] @ r[k] for k in range(N)], 1),
    "heads_grouped_first": lambda h, r: (h.permute(1, 0, 2).reshape(N, -1, D) @ r).view(N, -1, D).permute(1, 0, 2),
    "heads_shared": lambda h, r: torch.einsum("bnd,de->bne", h, r[0]),
    "heads_mixed": lambda h, r: torch.einsum("mn,bnd->bmd", r[0][:N, :N], h),
    "heads_of_all_pairs": lambda h, r: torch.einsum("bhd,hde,bge->bge", h, r, h),
}.items():
    SPECS[_name] = Spec(_of_heads(_product), ((N, D),), {"r": (N, D, D)})


@spec(w={"r": (D, D), "s": (D, D), "t": (D, D)})
def block_diagonal(w: Any, x: torch.Tensor, state: States) -> Any:
    h = torch.tanh(w.i(x) + state[0] @ torch.block_diag(w.r, w.s, w.t))
    return h, (h,)


@spec((H,), (H,), (H,), (H,), w={"r": (N, D, 4 * D)}, g=lambda: nn.Linear(F, 4 * H))
def slstm(w: Any, x: torch.Tensor, state: States) -> Any:
    h, c, n, m = state
    recurrent = torch.matmul(h.view(-1, N, 1, D), w.r).view(-1, N, 4, D).transpose(1, 2).reshape(-1, 4 * H)
    i, f, z, o = (w.g(x) + recurrent).chunk(4, -1)
    kept = m - functional.softplus(-f)
    m = torch.maximum(kept, i)
    i, f = torch.exp(i - m), torch.exp(kept - m)
    c, n = f * c + i * torch.tanh(z), f * n + i
    h = torch.sigmoid(o) * c / (n + 0.1)
    states = torch.stack((h, c, n, m), dim=0)
    return h, (states[0], states[1], states[2], states[3])


@spec(w={"r": (N, D + F, 3 * D), "b": (N, 3 * D)}, norm=lambda: nn.LayerNorm(H))
def block_gru(w: Any, x: torch.Tensor, state: States) -> Any:
    (h,) = state
    rows = torch.cat([_heads(h), x.unsqueeze(1).expand(-1, N, -1)], -1)
    r, c, u = (part.flatten(1) for part in (torch.einsum("bgi,gio->bgo", rows, w.r) + w.b).chunk(3, -1))
    c, u = torch.tanh(torch.sigmoid(r) * w.norm(c)), torch.sigmoid(u - 1)
    h = u * c + (1 - u) * h
    return h, (h,)


# Rows in another dimension than the first


@spec(w={"r": (H, H)}, around=lambda: nn.Linear(H, H))
def rows_elsewhere(w: Any, x: torch.Tensor, state: States) -> Any:
    (h,) = state
    first = torch.tanh(w.i(x)[None] + w.around(h[None]))[0]
    h = torch.tanh(first + (w.r @ h.T).T + torch.stack([h, first], 0).softmax(-1).sum(0))
    return h, (h,)


# Attention over a memory, which never changes or does


@spec((H,), (S, H), q=lambda: nn.Linear(H, 6), k=lambda: nn.Linear(H, 6), v=lambda: nn.Linear(6, 1, bias=False))
def additive_attention(w: Any, x: torch.Tensor, state: States) -> Any:
    h, memory = state
    energy = w.v(torch.tanh(w.q(h).unsqueeze(1) + w.k(memory))).squeeze(-1)
    context = torch.bmm(torch.softmax(energy, 1).unsqueeze(1), memory).squeeze(1)
    h = torch.tanh(w.i(x) + context)
    return torch.cat([h, energy], 1), (h, memory)


@spec((H,), (S, H), q=lambda: nn.Linear(H, H))
def dot_attention(w: Any, x: torch.Tensor, state: States) -> Any:
    h, memory = state
    weights = torch.softmax(torch.einsum("bd,bsd->bs", w.q(h), memory), -1)
    h = torch.tanh(w.i(x) + torch.einsum("bs,bsd->bd", weights, memory))
    return h, (h, memory)


@spec((H,), (S, H), k=lambda: nn.Linear(H, H), o=lambda: nn.Linear(H, 3))
def keys_used_everywhere(w: Any, x: torch.Tensor, state: States) -> Any:
    h, memory = state
    keys = torch.tanh(w.k(memory))
    first, last = keys.chunk(2, 1)
    weights = torch.softmax(torch.bmm(h.unsqueeze(1), keys.transpose(1, 2)), -1)
    h = torch.tanh(w.i(x) + torch.bmm(weights, memory).squeeze(1) + first.mean(1))
    return torch.cat([w.o(h), keys.sum(1), last.mean(1) * x.mean(1, keepdim=True)], -1), (h, memory)


@spec((H,), (S, H), a=lambda: nn.MultiheadAttention(H, N, batch_first=True))
def multihead_attention(w: Any, x: torch.Tensor, state: States) -> Any:
    h, memory = state
    context, weights = w.a(h.unsqueeze(1), memory, memory)
    fused, _ = w.a(h.unsqueeze(1), memory, memory, need_weights=False)
    h = torch.tanh(w.i(x) + context.squeeze(1) - 0.5 * fused.squeeze(1))
    return torch.cat([h, weights.squeeze(1)], 1), (h, memory)


@spec((H,), (S, H), a=lambda: nn.MultiheadAttention(H, N))
def attention_time_first(w: Any, x: torch.Tensor, state: States) -> Any:
    h, memory = state
    turned = memory.transpose(0, 1)
    h = torch.tanh(w.i(x) + w.a(h.unsqueeze(0), turned, turned)[0].squeeze(0))
    return h, (h, memory)


@spec((H,), (S, H), q=lambda: nn.Linear(H, H), kv=lambda: nn.Linear(H, 2 * H))
def scaled_dot_product(w: Any, x: torch.Tensor, state: States) -> Any:
    h, memory = state
    keys, values = (part.view(-1, S, N, D).transpose(1, 2) for part in w.kv(memory).chunk(2, -1))
    mask = memory[:, None, None, :, 0] > -0.3
    made = functional.scaled_dot_product_attention(w.q(h).view(-1, N, 1, D), keys, values, attn_mask=mask)
    h = torch.tanh(w.i(x) + made.transpose(1, 2).flatten(1))
    return h, (h, memory)


@spec((S, H), qkv=lambda: nn.Linear(H, 3 * H), o=lambda: nn.Linear(H, H), norm=lambda: nn.LayerNorm(H))
def relational_memory(w: Any, x: torch.Tensor, state: States) -> Any:
    rows = torch.cat([state[0], w.i(x).unsqueeze(1)], 1)
    q, k, v = w.qkv(rows).view(-1, S + 1, 3, N, D).permute(2, 0, 3, 1, 4)
    weights = torch.softmax(q @ k.transpose(-2, -1) / D**0.5, -1)
    mixed = (weights @ v).transpose(1, 2).reshape(-1, S + 1, H)
    memory = w.norm(rows + w.o(mixed))[:, :S]
    return memory.flatten(1), (memory,)


@spec((H,), (S, D), (S,), k=lambda: nn.Linear(H, 3 * D + 1), r=lambda: nn.Linear(D, H))
def turing_machine(w: Any, x: torch.Tensor, state: States) -> Any:
    h, memory, weights = state
    h = torch.tanh(w.i(x) + w.r(torch.bmm(weights.unsqueeze(1), memory).squeeze(1)))
    key, erase, add, sharpness = w.k(h).split([D, D, D, 1], -1)
    lengths = ((memory**2).sum(-1) + 0.1).sqrt() * ((key**2).sum(-1, keepdim=True) + 0.1).sqrt()
    weights = torch.softmax(functional.softplus(sharpness) * torch.einsum("bsd,bd->bs", memory, key) / lengths, -1)
    memory = memory * (1 - torch.einsum("bs,bd->bsd", weights, torch.sigmoid(erase)))
    memory = memory + weights.unsqueeze(2) @ torch.tanh(add).unsqueeze(1)
    return h, (h, memory, weights)


# Matrices as states


@spec((N, D, D), (N, D), qkv=lambda: nn.Linear(F, 3 * H), g=lambda: nn.Linear(F, 2 * N))
def mlstm(w: Any, x: torch.Tensor, state: States) -> Any:
    c, n = state
    q, k, v = map(_heads, w.qkv(x).chunk(3, -1))
    i, f = torch.sigmoid(w.g(x)).unsqueeze(-1).chunk(2, 1)
    c = f.unsqueeze(-1) * c + i.unsqueeze(-1) * torch.einsum("bhv,bhk->bhvk", v, k)
    n = f * n + i * k
    h = torch.einsum("bhvk,bhk->bhv", c, q) / (n * q).sum(-1, keepdim=True).abs().clamp(min=1)
    return h.flatten(1), (c, n)


@spec((H,), (H, H), around=lambda: nn.Linear(H, H), norm=lambda: nn.LayerNorm(H))
def fast_weights(w: Any, x: torch.Tensor, state: States) -> Any:
    h, fast = state
    z = w.i(x) + w.around(h)
    fast = 0.9 * fast + 0.5 * torch.bmm(h.unsqueeze(2), h.unsqueeze(1))
    h = torch.tanh(w.norm(z + torch.matmul(fast, torch.tanh(z).unsqueeze(-1)).squeeze(-1)))
    return h, (h, fast)


@spec((N, D, D), qkv=lambda: nn.Linear(F, 3 * H), b=lambda: nn.Linear(F, N))
def delta_rule(w: Any, x: torch.Tensor, state: States) -> Any:
    q, k, v = map(_heads, w.qkv(x).chunk(3, -1))
    k = torch.softmax(k, -1)
    change = torch.sigmoid(w.b(x)).unsqueeze(-1) * (v - torch.einsum("bhkv,bhk->bhv", state[0], k))
    memory = state[0] + torch.einsum("bhk,bhv->bhkv", k, change)
    return torch.einsum("bhkv,bhk->bhv", memory, q).flatten(1), (memory,)


@spec((N, D, D), w={"r": (N, D, D), "s": (D, D)}, qkv=lambda: nn.Linear(F, 3 * H))
def matrix_to_matrix(w: Any, x: torch.Tensor, state: States) -> Any:
    q, k, v = map(_heads, w.qkv(x).chunk(3, -1))
    mixed = state[0] @ w.r + torch.einsum("bhij,jk->bhik", state[0], w.s)
    h = torch.tanh(mixed + k.unsqueeze(-1) * v.unsqueeze(-2))
    return (q.unsqueeze(-2) @ h).squeeze(-2).flatten(1), (h,)


@spec(w={"mu": (H, H), "steep": (H, H), "w": (H, H), "reverse": (H, H)})
def liquid_time_constants(w: Any, x: torch.Tensor, state: States) -> Any:
    (h,) = state
    for _ in range(2):
        active = w.w * torch.sigmoid((h.unsqueeze(-1) - w.mu) * w.steep)
        h = (h + (active * w.reverse).sum(1) + w.i(x)) / (2 + active.sum(1) ** 2)
    return h, (h,)


@spec((S, D), (D, S), w={"a": (S, S), "b": (D, D)}, j=lambda: nn.Linear(F, S * D))
def products_of_rows(w: Any, x: torch.Tensor, state: States) -> Any:
    a, b = state
    given = w.j(x).view(-1, S, D)
    both = torch.matmul(a, b)
    mixed = w.a @ a @ w.b + torch.einsum("nm,bmd->bnd", w.a, given)
    after = torch.tanh(mixed + 0.3 * torch.baddbmm(a, both, a, beta=0.5, alpha=0.7))
    b = torch.tanh(0.5 * b + torch.bmm(b, both) + given.mT)
    return torch.cat([after.flatten(1), b.flatten(1)], 1), (after, b)


@spec(w={"r": (H, F, H)})
def tensor_product(w: Any, x: torch.Tensor, state: States) -> Any:
    h = torch.tanh(w.i(x) + torch.einsum("bi,bj,ijk->bk", state[0], x, w.r))
    return h, (h,)


@spec((H, 4), (H, S), w={"c": (H, 1, 4), "a": (H, S)}, bc=lambda: nn.Linear(H, 2 * S))
def selective_state_space(w: Any, x: torch.Tensor, state: States) -> Any:
    line, h = state
    line = torch.cat([line[:, :, 1:], w.i(x).unsqueeze(-1)], -1)
    u = functional.silu((line * w.c.squeeze(1)).sum(-1))
    b, c = w.bc(u).chunk(2, -1)
    h = h * torch.exp(-torch.exp(w.a)) + torch.einsum("bd,bn->bdn", u, b)
    return torch.einsum("bdn,bn->bd", h, c), (line, h)


# Windows


@spec((2, 4, 5), (2, 4, 5), c=lambda: nn.Conv2d(3, 8, 3, padding=1), j=lambda: nn.Linear(F, 20))
def conv_lstm(w: Any, x: torch.Tensor, state: States) -> Any:
    h, c = state
    i, f, o, g = w.c(torch.cat([w.j(x).view(-1, 1, 4, 5), h], 1)).chunk(4, 1)
    c = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    h = torch.sigmoid(o) * torch.tanh(c)
    return h, (h, c)


@spec(
    (4, 9),
    a=lambda: nn.Conv1d(4, 6, 3, padding=2, dilation=2, groups=2),
    b=lambda: nn.Conv1d(6, 4, 4, stride=2, groups=2, bias=False),
    j=lambda: nn.Linear(4 * 3, 4 * 9),
)
def strided_dilated_grouped(w: Any, x: torch.Tensor, state: States) -> Any:
    made = w.b(torch.tanh(w.a(state[0])))
    h = torch.tanh(0.5 * state[0] + w.j(made.flatten(1)).view(-1, 4, 9) + x[:, :1, None])
    return made, (h,)


@spec((H, 4), c=lambda: nn.Conv1d(H, 2 * H, 4, groups=H), around=lambda: nn.Linear(H, H))
def delay_line(w: Any, x: torch.Tensor, state: States) -> Any:
    line = torch.cat([state[0][:, :, 1:], (w.i(x) + w.around(state[0][:, :, -1])).unsqueeze(-1)], -1)
    u, gate = w.c(line).squeeze(-1).view(-1, H, 2).unbind(-1)
    y = torch.tanh(u) * torch.sigmoid(gate)
    return y, (torch.cat([line[..., :-1], y.unsqueeze(-1)], -1),)


@spec(w={"k": (3,), "v": (H,)}, around=lambda: nn.Linear(H, H))
def windows_of_features(w: Any, x: torch.Tensor, state: States) -> Any:
    (h,) = state
    seen = functional.pad(h, (1, 1), value=0.2).unfold(1, 3, 1) @ w.k
    apart = functional.pad(h, (-1, 2)).unfold(1, 4, 3).sum(-1)
    h = torch.tanh(w.i(x) + w.around(h) + seen + (h @ w.v).unsqueeze(1) + apart.mean(1, keepdim=True))
    return h, (h,)


def _run(name: str, backend: Backend, dtype: torch.dtype) -> tuple[list[torch.Tensor], list[torch.Tensor], str]:
    """Outputs, final states and gradients of a layer, of the loop by hand, and what ran the layer."""
    cell = RowCell(SPECS[name]).to(dtype)
    rnn = stretto.RNN(cell, backend=backend)
    generator = torch.Generator().manual_seed(1)
    x_BTF = torch.randn(B, T, F, generator=generator, dtype=dtype).requires_grad_()
    state = tuple(
        (0.5 * torch.randn(B, *sizes, generator=generator, dtype=dtype)).requires_grad_()
        for sizes in SPECS[name].states
    )
    leaves = [x_BTF, *state, *cell.parameters()]
    results = []
    made = rnn(x_BTF, state, lengths=torch.tensor(LENGTHS))
    for y_BTH, finals in (made, by_hand([cell], x_BTF, lengths=LENGTHS, state=state, num_directions=1)):
        parts = [y_BTH, *flatten(finals)]
        generator.manual_seed(2)
        loss = sum((part * torch.randn(part.shape, generator=generator, dtype=dtype)).sum() for part in parts)
        found = torch.autograd.grad(loss, leaves, materialize_grads=True)  # type: ignore[arg-type]
        results.append([*parts, *found])
    return results[0], results[1], rnn.explain().backend


def _cases() -> Iterator[Any]:
    quick = {"heads_bmm", "keys_used_everywhere"}
    for name in SPECS:
        for dtype in (torch.float64, torch.float32):
            slow = dtype is torch.float32 or name not in quick
            yield pytest.param(name, dtype, marks=[pytest.mark.slow] if slow else [])


@pytest.mark.parametrize(("name", "dtype"), list(_cases()))
def test_products_within_a_row_are_compiled_and_equal_the_loop(name: str, dtype: torch.dtype) -> None:
    tolerance = 1e-10 if dtype is torch.float64 else 1e-5
    made, expected, backend = _run(name, "auto", dtype)
    assert backend == "cpp"
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * float(1 + other.detach().abs().max()))


@pytest.mark.parametrize(
    "name", [name if n % 4 == 0 else pytest.param(name, marks=pytest.mark.slow) for n, name in enumerate(SPECS)]
)
def test_operator_by_operator_they_equal_the_loop(name: str) -> None:
    made, expected, backend = _run(name, "eager", torch.float64)
    assert backend == "eager"
    for one, other in zip(made, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_more_vectors_in_a_row_than_rows_have_room() -> None:
    def step(w: Any, x: torch.Tensor, state: States) -> Any:
        h = torch.tanh(x.mean(1)[:, None, None] + state[0] @ w.r)
        return h.flatten(1), (h,)

    cell = RowCell(Spec(step, ((96, 32),), {"r": (32, 32)}))
    x_BTF = torch.randn(1, T, F)
    y_BTH, _ = stretto.RNN(cell, backend="cpp")(x_BTF)
    expected, _ = by_hand([cell], x_BTF, lengths=None, state=None, num_directions=1)
    torch.testing.assert_close(y_BTH, expected, rtol=1e-5, atol=1e-5)


def test_large_convolutions_are_left_to_torch() -> None:
    def step(w: Any, x: torch.Tensor, state: States) -> Any:
        h = torch.tanh(w.c(state[0]) + x.mean(1)[:, None, None, None])
        return h, (h,)

    rnn = stretto.RNN(RowCell(Spec(step, ((8, 64, 64),), modules={"c": lambda: nn.Conv2d(8, 8, 3, padding=1)})))
    with pytest.warns(UserWarning, match="convolution of 2,359,296 multiplications"):
        rnn(torch.randn(1, 2, F))


def test_rows_that_are_mixed_by_a_product_of_heads_are_refused() -> None:
    def step(w: Any, x: torch.Tensor, state: States) -> Any:
        turned = state[0].transpose(0, 1)
        h = torch.tanh(_heads(w.i(x)) + (turned @ turned.mT @ turned).transpose(0, 1))
        return h.flatten(1), (h,)

    rnn = stretto.RNN(RowCell(Spec(step, ((N, D),))))
    with pytest.warns(UserWarning, match="rows"):
        rnn(torch.randn(B, T, F))
    assert "rows" in rnn.explain().reason
