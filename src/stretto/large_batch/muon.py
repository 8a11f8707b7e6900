"""Muon for recurrent nets: the momentum of every gate is made orthogonal, all gates of equal shape at once.

    gradients -> momentum of each weight -> gates of equal shape, stacked -> orthogonalise -> update
    of everything else ----------------> Adam, in torch's fused code --------------------> update

An update of a gate is the orthogonal matrix nearest to its momentum: all directions of a gate move equally far, not
those alone in which its gradients happen to be large (Jordan et al. 2024).

Shape legend: N matrices in a stack, M rows, K columns (M <= K).
"""

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, NamedTuple, final

import torch
from torch import nn
from torch.nn.modules.conv import _ConvNd
from torch.optim import Optimizer
from torch.optim.adam import adam

from stretto.cells import Cell
from stretto.checks import check_float, check_kind
from stretto.errors import StrettoError
from stretto.large_batch.gates import gate_rows
from stretto.nn import RNN

POLYNOMIALS: Final = (
    (8.093369, -23.62043, 17.446152),
    (3.636586, -2.721927, 0.536546),
    (2.6613, -1.977155, 0.452616),
)
"""(a, b, c) of a x + b x^3 + c x^5, applied one after the other: each is the closest to 1, in the largest error, on the
interval that the one before leaves; the first on [0.01, 1]."""
WIDE: Final = 1.5
"""Columns per row from which iterating on small matrices takes fewer operations."""
BLOCK_ELEMENTS: Final = 1 << 18
UPDATE_RMS: Final = 0.2
"""Root mean square of an update's elements at a rate of 1: that of Adam's updates, so that both take the same rate."""
MOMENTUM: Final = 0.95
BETAS: Final = (0.9, 0.95)
MUON_KINDS: Final = ("recurrent", "input")
FULL_RATE_KINDS: Final = (*MUON_KINDS, "embedding", "output")
"""What has the rate itself, whatever `adam_share` is."""
RULES_HEADER: Final = ("parameter", "shape", "kind", "rule")
CLASSES: Final[dict[str, tuple[type[nn.Module], ...]]] = {
    "recurrent": (nn.RNNBase, nn.RNNCellBase, Cell, RNN),
    "embedding": (nn.Embedding, nn.EmbeddingBag),
    "convolution": (_ConvNd,),
}
"""Modules whose matrices are of a kind."""
ADAM_EPSILON: Final = 1e-8
FUSED_DEVICES: Final = ("cpu", "cuda")


def orthogonalise(stack_NMK: torch.Tensor) -> torch.Tensor:
    """Nearly orthogonal matrices with the singular vectors of those given, which are not taller than wide.

    Singular values are first divided by a bound of the largest one, then three odd polynomials bring each that is above
    a hundredth to within 0.27 of 1. Smaller ones are multiplied by up to 78, and zero stays zero. A polynomial of a
    matrix X is p(S) X with S = X X^T, so the work is on the smaller side:

        square    S = X X^T;  X <- p(S) X              per polynomial, 3 products of matrices
        wide      S <- p(S) S p(S);  Q <- p(S) Q       4 products of small matrices, and Q X once at the end

    The bound is (sum of s^8)^(1/8) of the singular values s, the root of the norm of S^2, which is computed anyway. It
    is much tighter than the Frobenius norm (sum of s^2)^(1/2), and saves a polynomial.
    """
    check_kind(stack_NMK, torch.Tensor, name="stack_NMK", owner="orthogonalise", fix="Give a tensor (N, M, K).")
    # A few at a time stay in the processor's cache.
    each = max(1, BLOCK_ELEMENTS // max(1, stack_NMK[:1].numel()))
    return torch.cat([_orthogonalise_block(block_NMK) for block_NMK in torch.split(stack_NMK, each)])


def _orthogonalise_block(block_NMK: torch.Tensor) -> torch.Tensor:
    # Before the fourth power, where tiny elements would vanish.
    x_NMK = block_NMK / _norms(block_NMK)
    is_wide = x_NMK.shape[2] >= WIDE * x_NMK.shape[1]
    gram_NMM = x_NMK @ x_NMK.mT
    square_NMM = gram_NMM @ gram_NMM
    bound_N11 = _norms(square_NMM).sqrt_()
    (a, b, c), *later = POLYNOMIALS
    p_NMM = square_NMM.mul_(c / bound_N11.square()).addcmul_(gram_NMM, b / bound_N11)
    p_NMM.diagonal(dim1=1, dim2=2).add_(a)
    x_NMK.div_(bound_N11.sqrt())
    if not is_wide:
        x_NMK = p_NMM @ x_NMK
        for a, b, c in later:
            gram_NMM = x_NMK @ x_NMK.mT
            x_NMK = _polynomial(gram_NMM, a, b, c) @ x_NMK
        return x_NMK
    gram_NMM.div_(bound_N11)
    product_NMM = p_NMM
    for a, b, c in later:
        gram_NMM = p_NMM @ gram_NMM @ p_NMM
        p_NMM = _polynomial(gram_NMM, a, b, c)
        product_NMM = p_NMM @ product_NMM
    return product_NMM @ x_NMK


def _polynomial(gram_NMM: torch.Tensor, a: float, b: float, c: float) -> torch.Tensor:
    p_NMM = torch.baddbmm(gram_NMM, gram_NMM, gram_NMM, beta=b, alpha=c)
    p_NMM.diagonal(dim1=1, dim2=2).add_(a)
    return p_NMM


def _norms(stack_NMK: torch.Tensor) -> torch.Tensor:
    """Frobenius norms (N, 1, 1), of zeros 1."""
    norms_N: torch.Tensor = torch.linalg.vector_norm(stack_NMK, dim=(1, 2))
    return norms_N.masked_fill_(norms_N == 0, 1.0)[:, None, None]


@final
class Muon(Optimizer):
    """Muon for the matrices of recurrent layers, gate by gate, and Adam for everything else.

    What a parameter is decides:

    | kind | what it is | rule |
    |---|---|---|
    | recurrent | a matrix of a recurrent layer or cell, but for those that follow | Muon |
    | input | `weight_ih...` of a recurrent layer or cell | Muon |
    | embedding | of `nn.Embedding` and `nn.EmbeddingBag`, if there is an output layer | Adam |
    | tied | the same if there is none, so that they may be the output layer too | Adam |
    | convolution | of torch's convolutions | Adam |
    | output | the last matrix of the model, if it is none of the above | Adam |
    | linear | other matrices outside recurrent layers | Adam |
    | bias | fewer than two dimensions and a name that begins with "bias" | Adam |
    | gain | fewer than two dimensions otherwise | Adam |
    | other | three dimensions or more | Adam |

    Recurrent layers are torch's, accelerated or not, everything inside a `stretto.RNN`, and any `stretto.Cell`. Packed
    weights of torch's layers and of cells that derive from `AbstractGatedCell` are taken apart into their gates; a
    matrix of another cell is one matrix. `explain` lists all of it.

    Muon's momentum is Nesterov's. An update has a root mean square of 0.2 times the rate, as Adam's updates have, so
    that one rate serves both: usual are 0.01 to 0.03. In short runs a smaller one can be better for all that Adam
    updates but embeddings and the output layer: `adam_share`. A matrix of one row or column moves along its momentum,
    scaled; a gate whose gradient is always zero stays. Weight decay is taken from the weights, of matrices alone.

    Momentum is kept in the packed weights' shape. `state_dict` has everything: what follows is the same to the bit.

    Args:
        model: What to train; parameters without it do not say what they are. Those that do not require gradients when
            the optimiser is made are left out.
        lr: The learning rate, of both rules.
        adam_share: The rate of what Adam updates, but for the output layer and embeddings that are not tied to it, as a
            multiple of the learning rate.
        weight_decay: Of matrices, in each update times the rate.
        momentum: Of Muon.
        betas: Of Adam.

    Raises:
        StrettoError: There is no matrix for Muon, a parameter is complex, or a number is out of range.
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        lr: float,
        adam_share: float = 1.0,
        weight_decay: float = 0.0,
        momentum: float = MOMENTUM,
        betas: tuple[float, float] = BETAS,
    ) -> None:
        check_kind(model, nn.Module, name="model", owner="Muon", fix="Give the model, whose layers decide the rules.")
        check_float(lr, name="lr", at_least=0.0, owner="Muon")
        check_float(adam_share, name="adam_share", above=0.0, owner="Muon")
        check_float(weight_decay, name="weight_decay", at_least=0.0, owner="Muon")
        check_float(momentum, name="momentum", at_least=0.0, below=1.0, owner="Muon")
        for number, beta in enumerate(betas):
            check_float(beta, name=f"betas[{number}]", at_least=0.0, below=1.0, owner="Muon")
        groups: dict[tuple[str, int], list[tuple[str, nn.Parameter]]] = defaultdict(list)
        for name, parameter, kind, gates in _kinds(model):
            if parameter.is_complex():
                raise StrettoError(
                    f"'muon' was given {name} of {parameter.dtype}", fix="Use parameters of real numbers."
                )
            groups[kind, gates].append((name, parameter))
        if not any(kind in MUON_KINDS for kind, _ in groups):
            raise StrettoError(
                f"'muon' found no matrix of a recurrent layer to train in {type(model).__name__}",
                fix="Use torch's recurrent layers, stretto.RNN or cells derived from stretto.Cell, or choose 'adam'.",
            )
        super().__init__(
            [
                {
                    "params": named,
                    "kind": kind,
                    "gates": gates,
                    "weight_decay": 0.0 if kind in ("bias", "gain") else weight_decay,
                    "lr_share": 1.0 if kind in FULL_RATE_KINDS else float(adam_share),
                    **({"momentum": momentum} if kind in MUON_KINDS else {"betas": tuple(betas), "eps": ADAM_EPSILON}),
                    # Torch loads the counts of updates to where its fused code wants them if it finds this here.
                    "fused": kind not in MUON_KINDS and all(p.device.type in FUSED_DEVICES for _, p in named),
                }
                for (kind, gates), named in groups.items()
            ],
            {"lr": lr, "weight_decay": weight_decay},
        )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Make an update; parameters without a gradient stay as they are.

        Raises:
            StrettoError: A gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._refuse_sparse()
        stacks: dict[Any, list[_Gates]] = defaultdict(list)
        for group in self.param_groups:
            parameters = [parameter for parameter in group["params"] if parameter.grad is not None]
            if not parameters:
                continue
            if group["weight_decay"]:
                torch._foreach_mul_(parameters, 1.0 - _rate(group) * group["weight_decay"])
            if group["kind"] in MUON_KINDS:
                for gates in self._momenta(parameters, group):
                    weight_NMK = gates.weight_NMK
                    stacks[weight_NMK.shape[1:], weight_NMK.dtype, weight_NMK.device].append(gates)
            else:
                self._adam(parameters, group)
        for stack in stacks.values():
            _update(stack)
        return loss

    def rules(self) -> list[tuple[str, str, str, str]]:
        """Each parameter: its name, its shape, what it is, and which rule updates it."""
        rows = []
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                rule = "Adam" if _share(group) == 1.0 else f"Adam at {_share(group):.3g} of the rate"
                if group["kind"] in MUON_KINDS:
                    num_gates, rows_of_gate, columns = _by_gate(parameter, group["gates"]).shape
                    rule = "Muon" if num_gates == 1 else f"Muon, {num_gates} gates of {rows_of_gate} x {columns}"
                rows.append((name, " x ".join(map(str, parameter.shape)), group["kind"], rule))
        return rows

    def explain(self) -> str:
        """A table of `rules`."""
        return format_rules(self.rules())

    def _refuse_sparse(self) -> None:
        for group in self.param_groups:
            for name, parameter in zip(group["param_names"], group["params"], strict=True):
                if parameter.grad is not None and parameter.grad.layout != torch.strided:
                    raise StrettoError(
                        f"'muon' got a sparse gradient of {name}, and its moments are dense",
                        fix="Make the embedding with sparse=False.",
                    )

    def _momenta(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> list["_Gates"]:
        """Take gradients into the momentum, and look ahead: what is to be made orthogonal, gate by gate."""
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        for parameter in parameters:
            if not self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        buffers = [self.state[parameter]["momentum_buffer"] for parameter in parameters]
        torch._foreach_lerp_(buffers, gradients, 1.0 - group["momentum"])
        ahead = torch._foreach_lerp(gradients, buffers, group["momentum"])
        found = []
        for parameter, direction in zip(parameters, ahead, strict=True):
            stacks = [_by_gate(tensor, group["gates"]) for tensor in (parameter, direction)]
            if stacks[0].shape[1] > stacks[0].shape[2]:
                # What is nearest to the transposed matrix is transposed too.
                stacks = [stack.mT for stack in stacks]
            found.append(_Gates(weight_NMK=stacks[0], direction_NMK=stacks[1], lr=group["lr"]))
        return found

    def _adam(self, parameters: list[nn.Parameter], group: dict[str, Any]) -> None:
        states: list[dict[str, Any]] = [self.state[parameter] for parameter in parameters]
        for parameter, state in zip(parameters, states, strict=True):
            if not state:
                device = parameter.device if group["fused"] else "cpu"
                state["step"] = torch.zeros((), dtype=torch.float32, device=device)
                state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(parameter), torch.zeros_like(parameter)
        gradients: list[Any] = [parameter.grad for parameter in parameters]
        adam(
            list(parameters),
            gradients,
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            max_exp_avg_sqs=[],
            state_steps=[state["step"] for state in states],
            fused=group["fused"],
            amsgrad=False,
            beta1=group["betas"][0],
            beta2=group["betas"][1],
            lr=_rate(group),
            weight_decay=0.0,
            eps=group["eps"],
            maximize=False,
        )


def format_rules(rules: Iterable[Sequence[str]]) -> str:
    """What `Muon.rules` says, as a table for a terminal."""
    rows = [RULES_HEADER, *rules]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in lines)


def _share(group: dict[str, Any]) -> float:
    """What a group's rate is multiplied by; states that were saved before there was one have none."""
    share: float = group.get("lr_share", 1.0)
    return share


def _rate(group: dict[str, Any]) -> float:
    rate: float = group["lr"] * _share(group)
    return rate


class _Gates(NamedTuple):
    """The gates of a weight, and the direction each is to move in once it is orthogonal."""

    weight_NMK: torch.Tensor
    direction_NMK: torch.Tensor
    lr: float


def _update(alike: list[_Gates]) -> None:
    """Update gates of one shape, dtype and device together."""
    stack_NMK = torch.cat([gates.direction_NMK for gates in alike])
    # Half precision would lose the small directions, which are to be found.
    is_half = stack_NMK.dtype in (torch.float16, torch.bfloat16)
    moves_NMK = orthogonalise(stack_NMK.float() if is_half else stack_NMK)
    scale = UPDATE_RMS * math.sqrt(stack_NMK.shape[2])
    for gates, move_NMK in zip(alike, torch.split(moves_NMK, [len(g.weight_NMK) for g in alike]), strict=True):
        gates.weight_NMK.add_(move_NMK, alpha=-scale * gates.lr)


def _by_gate(tensor: torch.Tensor, num_gates: int) -> torch.Tensor:
    """A packed weight as a stack of its gates, in the same memory."""
    return tensor.detach().view(num_gates, len(tensor) // num_gates, tensor.shape[1])


def _kinds(model: nn.Module) -> Iterator[tuple[str, nn.Parameter, str, int]]:
    """Every parameter to train, with its name, what it is, and its number of gates."""
    rows = gate_rows(model)
    inside: dict[str, set[int]] = {"recurrent": set(), "embedding": set(), "convolution": set()}
    for module in model.modules():
        for kind, classes in CLASSES.items():
            if isinstance(module, classes):
                inside[kind].update(map(id, module.parameters()))
    # In the order of registration, which is that of most models' layers.
    matrices = [p for p in model.parameters() if p.dim() == 2]
    last_matrix = id(matrices[-1]) if matrices else None
    has_output = last_matrix not in set().union(*inside.values())
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        own_name, number = name.rpartition(".")[2], id(parameter)
        if parameter.dim() < 2:
            kind = "bias" if own_name.startswith("bias") else "gain"
        elif number in inside["embedding"]:
            kind = "embedding" if has_output else "tied"
        elif number in inside["convolution"]:
            kind = "convolution"
        elif parameter.dim() > 2:
            kind = "other"
        elif number not in inside["recurrent"]:
            kind = "output" if number == last_matrix else "linear"
        else:
            kind = "input" if own_name.startswith("weight_ih") else "recurrent"
        gates = len(parameter) // rows[number] if kind in MUON_KINDS and number in rows else 1
        yield name, parameter, kind, gates
