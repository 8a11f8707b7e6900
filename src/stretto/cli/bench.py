"""`stretto bench MODULE:NAME`: how fast is this cell or model on this machine?

Shape legend: T steps, B sequences, F features of the input.
"""

import copy
import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any, Final, Literal, final

import torch
import tyro
from pydantic import Field
from rich import box
from rich.console import Console
from rich.table import Table
from torch import nn
from torch.utils._pytree import tree_leaves

from stretto.cells import GRU, LSTM, Cell, Elman, store_layer
from stretto.cli.flags import check_flags, parse
from stretto.cli.loading import INPUT_SIZE, SetFlags, draw, input_size_of, load_module, try_step, user_errors
from stretto.errors import StrettoError
from stretto.files import check_ending, write_text_atomically
from stretto.kernels import Backend
from stretto.nn import RNN, accelerate
from stretto.signature import call_cell, has_initial_state, initial_state
from stretto.timing import TOLERANCE, TimingBudget, check_equal, time_interleaved, torch_threads
from stretto.training import Count, Positive

OURS: Final = "stretto"
NUM_STEPS: Final = 200
BATCH_SIZE: Final = 16
TURN_SECONDS: Final = 0.1
WARM_UP_RUNS: Final = 3
"""`accelerate` measures during the first passes which kernel is faster."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class BenchSettings:
    """How fast is a cell or model on this machine? Outputs and gradients are compared before anything is timed.

    For example:

    * stretto bench GRU --hidden-size 256 --against torch
    * stretto bench my_package.cells:MyCell --shape 1000,8,32
    * stretto bench path/to/model.py:make_model --tokens 10000

    Attributes:
        target: MODULE:NAME or FILE.py:NAME of a cell, a model, or a class or function that makes one; or a cell of
            Stretto's by its name, such as LSTM. The current folder is searched for modules.
        shape: Steps, sequences and features of the batch as T,B,F; features may be left out.
        against: What to compare with. Loop calls the cell once per step in Python; torch runs torch's own layers. Left
            out, loop for a cell and torch for a model.
        tokens: Give a model integers below this, such as words, instead of features.
        time_first: Give a model (steps, sequences, features) instead of (sequences, steps, features).
        hidden_size: Hidden units that the cell is made with; left out, the class's own default or 128.
        arguments: Another argument that it is made with, as name=value with a Python literal; may be repeated.
        backend: What runs our side: auto, cpp, eager or torch.
        threads: Threads of torch; its own default if left out.
        rounds: Rounds of the interleaved run; in each, both sides have a turn of at least a tenth of a second.
        budget: Seconds after which a run of at least three rounds begins no further one.
        tolerance: The largest difference of outputs and gradients allowed, relative to the largest value.
        json: Also write the numbers to this file.
    """

    target: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TARGET")]
    shape: str = f"{NUM_STEPS},{BATCH_SIZE}"
    against: Literal["loop", "torch"] | None = None
    tokens: Count | None = None
    time_first: bool = False
    hidden_size: Count | None = None
    arguments: SetFlags = ()
    backend: Backend = "auto"
    threads: Annotated[int, Field(ge=1, le=1024)] | None = None
    rounds: Count = 10
    budget: Positive = 10.0
    tolerance: Positive = TOLERANCE
    json: Path | None = None


@final
class Contender:
    """One side: passes over the same batch with the same weights. The parameters of `module` get gradients.

    `forward` gives the outputs, a tensor or any nest of tuples, lists and dicts of tensors. The loss is the sum of all
    outputs, each times a fixed number.
    """

    def __init__(self, name: str, forward: Callable[[], Any], module: nn.Module) -> None:
        self.name, self.module = name, module
        self._forward = forward
        self._weights: list[torch.Tensor] = []

    def infer(self) -> None:
        """Forward alone."""
        with torch.no_grad():
            self._forward()

    def train(self) -> list[torch.Tensor]:
        """Forward and backward; the outputs."""
        self.module.zero_grad(set_to_none=True)
        outputs = [leaf for leaf in tree_leaves(self._forward()) if torch.is_tensor(leaf) and leaf.is_floating_point()]
        if not any(output.requires_grad for output in outputs):
            raise StrettoError(
                "no output depends on a parameter", fix="Name something that is trained: with parameters, not detached."
            )
        if not self._weights:
            generator = torch.Generator().manual_seed(0)
            self._weights = [
                torch.randn(output.shape, generator=generator).to(output.device, output.dtype) for output in outputs
            ]
        pairs = zip(outputs, self._weights, strict=True)
        loss = torch.stack([(output * weight).sum() for output, weight in pairs]).sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return outputs

    def results(self) -> dict[str, torch.Tensor]:
        """Outputs and gradients of one pass, without dropout."""
        was_training = self.module.training
        self.module.eval()
        outputs = [output.detach().clone() for output in self.train()]
        self.module.train(was_training)
        found = {f"output {number}" if number else "the output": output for number, output in enumerate(outputs)}
        zero = torch.zeros(())
        for name, parameter in self.module.named_parameters():
            found[f"the gradient of {name}"] = (zero if parameter.grad is None else parameter.grad).detach().clone()
        return found


def run(words: list[str]) -> int:
    """Compare, then time."""
    settings = check_flags(parse(BenchSettings, words, prog="stretto bench"))
    check_ending(settings.json, flag="--json", endings=(".json",))
    num_steps, batch_size, features = _parse_shape(settings.shape)
    module = load_module(
        settings.target,
        input_size=features,
        hidden_size=settings.hidden_size,
        arguments=settings.arguments,
        kind="cell or model",
        input_flag="--shape T,B,F",
    )
    is_cell = has_initial_state(module)
    with torch_threads(settings.threads) as threads:
        if is_cell:
            features = features or input_size_of(module) or INPUT_SIZE
            ours, peer, note = _cell_contenders(module, settings, (num_steps, batch_size, features))
        else:
            features = 0 if settings.tokens else features or _layer_size(module) or INPUT_SIZE
            ours, peer, note = _model_contenders(module, settings, (num_steps, batch_size, features))
        where = f"T={num_steps}, B={batch_size}" + (f", F={features}" if features else f", tokens={settings.tokens}")
        error = check_equal(
            ours.results(),
            peer.results(),
            name=OURS,
            peer=peer.name,
            where=where,
            tolerance=settings.tolerance,
            fix="A net that amplifies rounding needs fewer steps (--shape) or a larger --tolerance; "
            "otherwise report it with the output of `stretto doctor`.",
        )
        rows = _time(ours, peer, settings)
    result = {
        "target": settings.target,
        "batch": where,
        "threads": threads,
        "against": peer.name,
        "error": error,
        "note": note,
        "rows": rows,
    }
    if settings.json is not None:
        write_text_atomically(settings.json, json.dumps(result, indent=2, allow_nan=False) + "\n")
    _print(result)
    return 0


def _parse_shape(text: str) -> tuple[int, int, int | None]:
    try:
        sizes = [int(word) for word in text.split(",")]
    except ValueError:
        sizes = []
    if len(sizes) not in (2, 3) or min(sizes) < 1:
        raise StrettoError(
            f"--shape {text!r} is not the shape of a batch", fix="Write T,B,F or T,B: --shape 200,16,64."
        )
    return sizes[0], sizes[1], sizes[2] if len(sizes) == 3 else None


def _cell_contenders(
    cell: nn.Module, settings: BenchSettings, shape: tuple[int, int, int]
) -> tuple[Contender, Contender, str]:
    """The compiled layer of a cell, and a Python loop over it or torch's own layer."""
    rnn = RNN(cell, batch_first=False, backend=settings.backend)
    cell, features = rnn.cells[0], shape[2]
    try_step(cell, features, target=settings.target, input_flag="--shape T,B,F")
    x_TBF = draw(shape, like=cell)
    explanation = rnn.explain(features)
    note = explanation.backend + (f": {explanation.reason}" if explanation.reason else "")
    ours = Contender(OURS, lambda: rnn(x_TBF)[0], cell)
    if settings.against == "torch":
        layer = _torch_layer(cell, settings.target)
        return ours, Contender(f"nn.{layer.mode.partition('_')[0]}", lambda: layer(x_TBF)[0], layer), note

    def loop() -> torch.Tensor:
        state = initial_state(cell, shape[1])
        outputs = []
        for x_BF in x_TBF.unbind(0):
            y_BO, state = call_cell(cell, x_BF, state)
            outputs.append(y_BO)
        return torch.stack(outputs)

    return ours, Contender("Python loop", loop, cell), note


def _torch_layer(cell: nn.Module, target: str) -> nn.RNNBase:
    """torch's layer with the weights of a cell."""
    kinds: dict[type, Any] = {GRU: nn.GRU, LSTM: nn.LSTM, Elman: nn.RNN}
    kind = kinds.get(type(cell))
    if kind is None:
        raise StrettoError(
            f"torch has no layer that computes what {target!r} does",
            fix="Leave --against out: it compares with a loop.",
        )
    assert isinstance(cell, Cell)
    options: dict[str, Any] = {"nonlinearity": cell.nonlinearity} if isinstance(cell, Elman) else {}
    bias = any(name.startswith("bias") for name, _ in cell.named_parameters())
    layer: nn.RNNBase = kind(input_size_of(cell), cell.hidden_size, bias=bias, **options)
    store_layer(cell, layer.to(next(cell.parameters()).dtype))
    return layer


def _model_contenders(
    model: nn.Module, settings: BenchSettings, shape: tuple[int, int, int]
) -> tuple[Contender, Contender, str]:
    """The accelerated model, and a copy that runs torch's own layers."""
    layers = [module for module in model.modules() if isinstance(module, (nn.RNNBase, RNN))]
    if not layers:
        raise StrettoError(
            f"{settings.target!r} ({type(model).__name__}) has no recurrent layer",
            fix="Name a cell, or a model with a torch.nn.RNN, GRU or LSTM or a stretto.RNN inside.",
        )
    if settings.against == "loop":
        raise StrettoError(
            "--against loop is for cells, and this is a model", fix="Leave --against out: it compares with torch."
        )
    num_steps, batch_size, features = shape
    time_first = not model.batch_first if isinstance(model, (nn.RNNBase, RNN)) else settings.time_first
    sizes = (num_steps, batch_size) if time_first else (batch_size, num_steps)
    if settings.tokens is None:
        x = draw((*sizes, features), like=model)
    else:
        x = torch.randint(settings.tokens, sizes, generator=torch.Generator().manual_seed(0))
    peer = copy.deepcopy(model)
    for module in peer.modules():
        if isinstance(module, RNN):
            module.backend = "torch"
    if any(isinstance(layer, nn.RNNBase) and type(layer).__module__.startswith("stretto.") for layer in layers):
        # The user has accelerated it already.
        accelerate(peer, backend="torch")
    ours = accelerate(copy.deepcopy(model), backend=settings.backend)
    fix = "Give the --shape that it takes, --time-first if steps come first, or --tokens N for integers."
    with user_errors(f"{settings.target!r} failed on an input of shape {tuple(x.shape)}", fix=fix), torch.no_grad():
        peer(x)
    note = f"recurrent layers: {len(layers)}"
    return Contender(OURS, lambda: ours(x), ours), Contender("plain torch", lambda: peer(x), peer), note


def _layer_size(model: nn.Module) -> int | None:
    """The features that the first recurrent layer takes."""
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            return module.input_size
        if isinstance(module, RNN):
            return input_size_of(module.cells[0])
    return None


def _time(ours: Contender, peer: Contender, settings: BenchSettings) -> list[dict[str, Any]]:
    tasks: dict[str, Callable[[], object]] = {}
    for contender in (peer, ours):
        tasks |= {f"forward, {contender.name}": contender.infer, f"training, {contender.name}": contender.train}
    for task in tasks.values():
        for _ in range(WARM_UP_RUNS):
            task()
    budget = TimingBudget(rounds=settings.rounds, seconds=settings.budget, turn_seconds=TURN_SECONDS)
    timings = time_interleaved(tasks, budget=budget)
    rows = []
    for what, label in (("forward", "forward"), ("training", "forward and backward")):
        theirs, own = timings[f"{what}, {peer.name}"], timings[f"{what}, {ours.name}"]
        rows.append(
            {
                "pass": label,
                "stretto_ms": 1e3 * own.minimum,
                "peer_ms": 1e3 * theirs.minimum,
                "ratio": theirs.minimum / own.minimum,
                "ratio_of_medians": theirs.median / own.median,
                "rounds": own.rounds,
            }
        )
    return rows


def _print(result: dict[str, Any]) -> None:
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    table.add_column("pass", no_wrap=True)
    for heading in ("stretto ms", f"{result['against']} ms", "ratio", "ratio of medians"):
        table.add_column(heading, justify="right")
    for row in result["rows"]:
        numbers = (row[key] for key in ("stretto_ms", "peer_ms", "ratio", "ratio_of_medians"))
        table.add_row(row["pass"], *(f"{number:,.0f}" if number >= 100 else f"{number:.3g}" for number in numbers))
    print(f"{result['target']}: {result['batch']}")
    Console().print(table)
    print(f"Outputs and gradients differ by {result['error']:.0e} of the largest value at most.")
    print(
        f"Least times of {result['rows'][0]['rounds']} rounds in turn; threads: {result['threads']}. {result['note']}."
    )
