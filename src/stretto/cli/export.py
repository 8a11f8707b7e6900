"""`stretto export RUN|MODULE:NAME`: a trained model, or a model or cell of one's own, for use without Stretto.

Shape legend: B sequences, T steps, F features.
"""

import contextlib
import copy
import dataclasses
import io
import logging
import shutil
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, Final, Literal, final

import numpy as np
import torch
import tyro
from torch import nn

from stretto.cells import cell_from, load_layer, matching_cell
from stretto.cli.flags import check_flags, parse
from stretto.cli.loading import SetFlags, draw, input_size_of, load_module, load_task, user_errors
from stretto.cli.predict import check_output
from stretto.errors import StrettoError
from stretto.extras import optional
from stretto.files import write_atomically, write_text_atomically
from stretto.kernels import export_c
from stretto.nn import RNN, Standardise, restore
from stretto.tasks import GRULayers, LabelStepsModel, Unpadded
from stretto.trained import CARD_FILE, TrainedModel, Weights, load
from stretto.training import Count

ENDINGS: Final = {"onnx": ".onnx", "torch": ".pt2", "c": ".c"}
OPSET: Final = 18
TOLERANCE: Final = 1e-4
NUM_TIMED: Final = 2000
MARK: Final = b"Written by Stretto"
MARK_WITHIN: Final = 1000


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExportSettings:
    """A model for use without Stretto: checked against the original before it is kept.

    For example:

    * stretto export runs/classify-001 --to onnx
    * stretto export my_package.cells:MyCell --to c --input-size 8 --out net.c

    Attributes:
        target: A run folder; or MODULE:NAME or FILE.py:NAME of a model, a cell, or what makes one; or a cell of
            Stretto's by its name.
        to: Onnx: through torch's own layers, checked with onnxruntime. Torch: a torch.export program. C: one step of a
            cell, of recurrent layers, or of a run of label-steps, as a C99 file with a header.
        out: The file to write; for c, NAME.c and NAME.h beside it. Left out, named after the target.
        input_size: Features of the input, for a cell or model that does not say.
        steps: Of the sequences it is exported for, where it cannot be for any number: torch fixes that of recurrent
            layers in a program.
        tokens: Give a model integers below this, such as words, instead of features.
        hidden_size: Hidden units that a cell is made with.
        arguments: Another argument that it is made with, as name=value with a Python literal; may be repeated.
        weights: Of a run: those of the best epoch or the last ones; left out, those that its result belongs to.
        task: MODULE:NAME of the class, for a run of a task of your own.
    """

    target: Annotated[tyro.conf.Positional[str], tyro.conf.arg(metavar="TARGET")]
    to: Literal["onnx", "torch", "c"]
    out: Path | None = None
    input_size: Count | None = None
    steps: Count = 100
    tokens: Count | None = None
    hidden_size: Count | None = None
    arguments: SetFlags = ()
    weights: Weights | None = None
    task: str | None = None


def run(words: list[str]) -> int:
    """Export."""
    settings = check_flags(parse(ExportSettings, words, prog="stretto export"))
    folder = Path(settings.target)
    is_run = ":" not in settings.target and (folder.is_dir() or "/" in settings.target)
    name = folder.name if is_run else settings.target.rpartition(":")[2]
    if not name:
        raise StrettoError(f"{settings.target!r} names nothing", fix="Name a run folder, or MODULE:NAME.")
    out = settings.out or Path(name).with_suffix(ENDINGS[settings.to])
    if out.suffix != ENDINGS[settings.to]:
        raise StrettoError(f"--out {str(out)!r} does not end in {ENDINGS[settings.to]}", fix="Name such a file.")
    check_output(out, data=None, run=folder)
    model: nn.Module
    if is_run:
        model = load(folder, weights=settings.weights, task=load_task(settings.task))
    else:
        model = load_module(
            settings.target,
            input_size=settings.input_size,
            hidden_size=settings.hidden_size,
            arguments=settings.arguments,
            kind="cell or model",
        ).eval()
    if any(parameter.is_meta for parameter in model.parameters()):
        raise StrettoError(f"{settings.target!r} has no weights: they are on the meta device", fix="Give it weights.")
    if settings.to == "c":
        return _to_c(model, out, settings)
    examples, inputs = (
        _example_input(model, settings),
        _Exportable(model) if isinstance(model, TrainedModel) else copy.deepcopy(model),
    )
    plain = restore(_with_torch_layers(inputs)).eval().requires_grad_(False)
    with _silence():
        written = _to_torch(plain, examples, out) if settings.to == "torch" else _to_onnx(plain, examples, out)
    print(f"{out}  {out.stat().st_size / 1024:,.0f} KiB, {written}")
    if is_run:
        print(f"classes, characters and settings are in {folder / CARD_FILE}")
    return 0


@final
class _Exportable(nn.Module):
    """A trained model called with features (B, T, F), or numbers (B, T) of words or characters, without padding."""

    def __init__(self, trained: TrainedModel) -> None:
        super().__init__()
        self.model = copy.deepcopy(trained.model)
        self._is_text = bool(trained.task.data.alphabet or trained.task.data.vocabulary)
        if trained.task.name in ("video", "translate", "digit-images"):
            raise StrettoError(
                f"a model of the task {trained.task.name!r} cannot be exported",
                fix="Use stretto.load in Python, or `stretto predict`.",
            )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """What the model makes of sequences of one length."""
        output: torch.Tensor = self.model(Unpadded(x[..., None] if self._is_text else x))
        return output


@final
class _Scale(nn.Module):
    """Standardised features of one step, all of them real."""

    def __init__(self, standardise: Standardise) -> None:
        super().__init__()
        self.register_buffer("mean_F", standardise.mean_F)
        self.register_buffer("scale_F", standardise.scale_F)

    def forward(self, x_BF: torch.Tensor) -> torch.Tensor:
        return (x_BF - self.mean_F) * self.scale_F  # type: ignore[operator]


def _with_torch_layers(model: nn.Module) -> nn.Module:
    for module in model.modules():
        if isinstance(module, GRULayers):
            module.rnn = module.to_torch()
    return model


def _example_input(model: nn.Module, settings: ExportSettings) -> list[torch.Tensor]:
    tokens, features = settings.tokens, settings.input_size
    if isinstance(model, TrainedModel):
        data = model.task.data
        tokens = len(data.vocabulary or data.alphabet) or None
        features = data.num_features
    elif features is None and tokens is None:
        layers = [module for module in model.modules() if isinstance(module, (nn.RNNBase, RNN))]
        if layers:
            first = layers[0]
            features = first.input_size if isinstance(first, nn.RNNBase) else input_size_of(first.cells[0])
        if not features:
            raise StrettoError(
                f"{settings.target!r} does not say how many features it takes", fix="Give --input-size or --tokens."
            )
    # The batch that is traced, another batch, and another length.
    shapes = [(2, settings.steps), (3, settings.steps), (3, settings.steps + 5)]
    generator = torch.Generator().manual_seed(0)
    if tokens:
        return [torch.randint(tokens, shape, generator=generator) for shape in shapes]
    return [draw((*shape, features or 1), like=model) for shape in shapes]


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Without what exporters print, log and warn of."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    with (
        warnings.catch_warnings(),
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(io.StringIO()),
        contextlib.ExitStack() as stack,
    ):
        stack.callback(logging.disable, level)
        warnings.simplefilter("ignore")
        yield


def _list_outputs(value: Any) -> list[torch.Tensor]:
    return [leaf for leaf in torch.utils._pytree.tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _to_torch(model: nn.Module, examples: list[torch.Tensor], out: Path) -> str:
    program, found = _export_program(model, examples[0]), ""

    def write(path: Path) -> None:
        nonlocal found
        # A stream: of a path it would want another ending.
        with path.open("w+b") as stream:
            torch.export.save(program, stream)
            stream.seek(0)
            found = _compare(model, torch.export.load(stream).module(), examples)

    write_atomically(out, write)
    return found


def _export_program(model: nn.Module, example: torch.Tensor) -> Any:
    """The program, for any number of sequences and steps as far as that can be."""
    fix = "torch must be able to export it: a model of torch's layers, called with one tensor."
    free = ({0: torch.export.Dim.AUTO, 1: torch.export.Dim.AUTO},)
    with user_errors("the model could not be exported", fix=fix), torch.no_grad():
        return torch.export.export(model, (example,), dynamic_shapes=free, strict=False)


def _to_onnx(model: nn.Module, examples: list[torch.Tensor], out: Path) -> str:
    runtime = optional("onnxruntime")
    optional("onnxscript")
    program, found = _export_program(model, examples[0]), ""

    def write(path: Path) -> None:
        nonlocal found
        assert made is not None
        made.save(path, external_data=False)
        options = runtime.SessionOptions()
        options.log_severity_level = 4
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
        name = session.get_inputs()[0].name

        def again(x: torch.Tensor) -> list[torch.Tensor]:
            return [torch.from_numpy(np.asarray(y)) for y in session.run(None, {name: x.numpy()})]

        found = _compare(model, again, examples)

    with user_errors("the model could not be written as ONNX", fix="Try --to torch: ONNX lacks some operators."):
        made = torch.onnx.export(program, dynamo=True, input_names=["x"], opset_version=OPSET, verbose=False)
        write_atomically(out, write)
    return f"{found} in onnxruntime {runtime.__version__}"


def _compare(model: nn.Module, again: Callable[[torch.Tensor], Any], examples: list[torch.Tensor]) -> str:
    """What sizes the exported model takes, and how much it differs."""
    worst, sizes = 0.0, "any batch and length"
    for x in examples:
        try:
            theirs = _list_outputs(again(x))
        except Exception:
            # Whatever an exported program raises about sizes; those that it was exported with must do.
            if x is examples[0]:
                raise
            sizes = f"any batch of {examples[0].shape[1]} steps"
            continue
        with torch.no_grad():
            ours = _list_outputs(model(x))
        if not ours or any(torch.isnan(one).any() for one in ours):
            raise StrettoError(
                f"the model returns {'NaN' if ours else 'no tensor'}, which cannot be compared with what is exported",
                fix="Fix the model: for a tensor of random numbers it must return tensors of numbers.",
            )
        for one, other in zip(ours, theirs, strict=True):
            if one.shape != other.shape or not torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE):
                raise StrettoError("the exported model computes something else", fix="Please report this model.")
            worst = max(worst, float((one - other).abs().max()))
    return f"{sizes}; differs by {worst:.0e} at most"


def _to_c(model: nn.Module, out: Path, settings: ExportSettings) -> int:
    steps, features = _steps(model, settings)
    header = out.with_suffix(".h")
    check_output(header, data=None, run=Path(settings.target))
    if (out.exists() or header.exists()) and not _is_written_by_us(header):
        present = " and ".join(repr(str(path)) for path in (out, header) if path.exists())
        raise StrettoError(f"{present} would be replaced, not written by Stretto", fix="Name another file with --out.")
    fix = "Fix the cell; it must do a step on its own."
    with user_errors(f"{settings.target!r} could not do a step", fix=fix):
        files = export_c(steps, num_inputs=features, name=out.stem)
    write_text_atomically(header, files.header)
    write_text_atomically(out, files.source)
    print(f"{out}, {header}")
    print(f"weights {files.weight_bytes:,} bytes, state and work {files.state_bytes:,} bytes per net")
    seconds = _time_per_step(files.name, out, features)
    if seconds is not None:
        print(f"{1e6 * seconds:.2f} us per step, with cc -O2 on this machine")
    return 0


def _is_written_by_us(header: Path) -> bool:
    return header.is_file() and MARK in header.read_bytes()[:MARK_WITHIN]


def _steps(model: nn.Module, settings: ExportSettings) -> tuple[list[nn.Module], int]:
    """The steps of layers, bottom up, and the features of the first."""
    if isinstance(model, TrainedModel):
        if not isinstance(model.model, LabelStepsModel) or model.model.gru.rnn.bidirectional:
            raise StrettoError(
                f"C is written for layers that go step by step, and not for this model of {model.task.name}",
                fix="Use --to onnx; or export a run of label-steps without --bidirectional, or MODULE:NAME of a cell.",
            )
        net = model.model
        return [_Scale(net.standardise), *_cells(net.gru.to_torch()), net.classify], model.task.data.num_features
    if isinstance(model, (nn.RNNBase, RNN)):
        steps = _cells(model)
    elif isinstance(model, (nn.RNNCell, nn.GRUCell, nn.LSTMCell)):
        steps = [cell_from(model)]
    elif callable(getattr(model, "initial_state", None)):
        steps = [model]
    else:
        raise StrettoError(
            f"{settings.target!r} is neither a cell nor recurrent layers",
            fix="Name a cell, a stretto.RNN, or a torch.nn.GRU, LSTM or RNN; or export the model with --to onnx.",
        )
    features = settings.input_size or input_size_of(steps[0])
    if features is None:
        raise StrettoError(f"{settings.target!r} does not say how many features it takes", fix="Give --input-size.")
    return steps, features


def _cells(layers: nn.RNNBase | RNN) -> list[nn.Module]:
    if layers.bidirectional:
        raise StrettoError("a bidirectional layer needs whole sequences", fix="Export it with --to onnx or --to torch.")
    if isinstance(layers, RNN):
        return [cell_from(cell) if isinstance(cell, nn.RNNCellBase) else cell for cell in layers.cells]
    kind, settings = matching_cell(layers)
    options: dict[str, Any] = {**settings, **({"proj_size": layers.proj_size} if layers.proj_size else {})}
    found = []
    for number in range(layers.num_layers):
        size = layers.input_size if number == 0 else layers.proj_size or layers.hidden_size
        cell = kind(size, layers.hidden_size, bias=layers.bias, **options)
        load_layer(cell, layers, layer=number)
        found.append(cell)
    return found


def _time_per_step(name: str, source: Path, features: int) -> float | None:
    """Seconds, by a plain compiler; None where there is none."""
    compiler = shutil.which("cc")
    if compiler is None:
        return None
    with tempfile.TemporaryDirectory() as folder:
        main, program = Path(folder, "main.c"), Path(folder, "program")
        main.write_text(
            f'#include "{name}.h"\n#include <time.h>\n'
            f"static {name} timed;\n"
            "int main(void) {\n"
            f"    float x[{features}] = {{0.5f}}, y[{name.upper()}_OUTPUTS];\n"
            f"    {name}_init(&timed);\n"
            "    clock_t begin = clock(); long n = 0;\n"
            f"    do {{ for (int i = 0; i < {NUM_TIMED}; ++i) {name}_step(&timed, x, y); n += {NUM_TIMED}; }}\n"
            "    while (clock() - begin < CLOCKS_PER_SEC / 20);\n"
            '    __builtin_printf("%g\\n", (double)(clock() - begin) / CLOCKS_PER_SEC / n); return 0;\n}\n',
            encoding="utf-8",
        )
        command = [
            compiler,
            "-std=c99",
            "-O2",
            f"-I{source.resolve().parent}",
            str(main),
            str(source),
            "-o",
            str(program),
        ]
        built = subprocess.run([*command, "-lm"], capture_output=True, check=False)  # noqa: S603
        if built.returncode:
            raise StrettoError(
                f"{compiler} could not compile {str(source)!r}: {built.stderr.decode(errors='replace')[:500]}",
                fix="Please report this model.",
            )
        ended = subprocess.run([str(program)], capture_output=True, check=False)  # noqa: S603
        try:
            return float(ended.stdout)
        except ValueError:
            print("the compiled step could not be run here", file=sys.stderr)
            return None
