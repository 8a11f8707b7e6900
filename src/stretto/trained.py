"""`stretto.load`: a trained model with its preprocessing, without its training data.

A run folder holds, besides its record and checkpoints:

    model.json             the task, its settings, the form of the data (classes, characters, words), a vocabulary
    settings.toml          the settings again, for `stretto train TASK --config`
    model.safetensors      the weights after the last update
    best.safetensors       the weights after the epoch with the best validation metric

Shape legend: T steps of one sequence, F features.
"""

import dataclasses
import importlib.metadata
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, Literal, final, get_args

import numpy as np
import numpy.typing as npt
import safetensors
import safetensors.torch
import torch
from torch import nn

from stretto.batching import Batch
from stretto.checks import check_choice, check_path
from stretto.data import DataForm, Part, SequenceSet, from_tensors
from stretto.distributed import World
from stretto.errors import StrettoError
from stretto.files import refuse_special, write_text_atomically
from stretto.kernels import Backend
from stretto.tasks import TASKS, find_task, installed_tasks
from stretto.training import (
    BEST_FILE,
    MODEL_FILE,
    AbstractTask,
    Evaluation,
    evaluate,
    evaluation_mode,
    model_of_newest_checkpoint,
    settings_to_toml,
    validate,
)

CARD_FILE: Final = "model.json"
SETTINGS_FILE: Final = "settings.toml"
VERSION: Final = 1
Weights = Literal["best", "last"]
Data = str | Path | SequenceSet | Sequence[str] | Sequence[npt.NDArray[Any] | torch.Tensor]


def write_card(run: Path, task: AbstractTask[Any], *, digest: str) -> Path:
    """Write what `load` needs besides weights, and the settings; `digest` is that of the data."""
    card = {
        "version": VERSION,
        "stretto": importlib.metadata.version("stretto"),
        "torch": torch.__version__,
        "task": task.name,
        "settings": task.config.recorded(),
        "data": DataForm.of(task.data).to_dict(),
        "digest": digest,
        "preprocessing": task.preprocessing(),
    }
    write_text_atomically(run / CARD_FILE, json.dumps(card, indent=1, ensure_ascii=False) + "\n")
    write_text_atomically(run / SETTINGS_FILE, settings_to_toml(task.config, title=f"stretto train {task.name}"))
    return run / CARD_FILE


def load(
    run: str | Path,
    *,
    weights: Weights | None = None,
    task: type[AbstractTask[Any]] | None = None,
    device: str = "cpu",
    backend: Backend | None = None,
) -> "TrainedModel":
    """The model that a run has trained, ready to use: classes, characters, vocabulary and normalisation included.

    The training data are not needed. Nothing in the folder is executed: weights are safetensors, the rest is JSON.

    Args:
        run: The run folder.
        weights: Those of the epoch with the best validation metric, or the last ones. Left out, those that the metrics
            in the run's result belong to: the best if it had `patience` or `auto`, or else the last.
        task: The class of a task of your own.
        device: Where to run, as torch names it.
        backend: Backend of the recurrent layers; if left out, the one of training.

    Raises:
        StrettoError: The folder is not a run, was written by another version, or is damaged.

    Examples:
        model = stretto.load("runs/handwriting-001")
        for row in model.predict("new_ink.inkml"):
            print(row["text"])
    """
    run = check_path(run, name="run", owner="load")
    if weights is not None:
        check_choice(weights, name="weights", choices=get_args(Weights))
    card = read_card(run)
    if task is None and card["task"] not in {*TASKS, *installed_tasks()}:
        raise StrettoError(
            f"{str(run)!r} is of the task {card['task']!r}, which is not one of Stretto's",
            fix="Give its class: stretto.load(run, task=MyTask), or --task MODULE:NAME on the command line.",
        )
    if task is not None and not (isinstance(task, type) and issubclass(task, AbstractTask)):
        raise StrettoError(f"task={task!r} is not a task", fix="Give its class, a subclass of AbstractTask.")
    check_device(device)
    kind = task or find_task(card["task"])
    settings = {**card["settings"], "data": None, "device": device}
    config = validate(kind.Config, settings | ({"backend": backend} if backend else {}), source=str(run / CARD_FILE))
    chosen = weights or ("best" if config.tests_best else "last")
    tensors = _read_weights(run, chosen)
    try:
        restored = kind.restore(config, DataForm.from_dict(card["data"]).stand_in(), card["preprocessing"])
        with torch.random.fork_rng(devices=[]):
            model = restored.build_model().to(device)
        _check_numbers(model, tensors)
        model.load_state_dict(tensors)
    except (KeyError, TypeError, ValueError, IndexError, RuntimeError, MemoryError) as error:
        problem = error.problem if isinstance(error, StrettoError) else str(error).partition("\n")[0]
        raise StrettoError(
            f"the model in {str(run)!r} cannot be built: {problem}",
            fix=f"{CARD_FILE} and the weights must be as the run wrote them; train again if they are damaged.",
        ) from error
    return TrainedModel(model, restored, digest=str(card.get("digest")), weights=chosen).eval()


@final
class TrainedModel(nn.Module):
    """A trained model and its preprocessing, in evaluation mode.

    Called with a `stretto.batching.Batch`, it returns what the model does in training. `predict` and `evaluate` take
    data as they are.

    Attributes:
        model: The plain model.
        task: Its task: the settings, `class_names`, the `alphabet` or `vocabulary`, whichever it has.
        weights: Which weights these are, "best" or "last".
    """

    def __init__(self, model: nn.Module, task: AbstractTask[Any], *, digest: str, weights: Weights) -> None:
        super().__init__()
        self.model, self.task, self.weights = model, task, weights
        self._digest = digest

    def forward(self, batch: Batch) -> torch.Tensor:
        """What the model makes of a batch."""
        if not isinstance(batch, Batch):
            raise StrettoError(
                f"a trained model was called with a {type(batch).__name__}",
                fix="Call predict or evaluate; or give a Batch, as stretto.collate makes it.",
            )
        output: torch.Tensor = self.model(batch)
        return output

    def predict(self, data: Data, *, split: Part | Literal["all"] = "all") -> list[dict[str, Any]]:
        """What the model makes of each sequence, in the order of the data, labelled or not.

        Batches are made of sequences of similar length; the result does not depend on them beyond rounding.

        Args:
            data: A file or folder, a `SequenceSet`, arrays or tensors (T, F), or strings for a task that reads text.
            split: The part of the data to take.
        """
        task = self._task_over(data, targets=False)
        part = task.data if split == "all" else task.data.part(split)
        part = dataclasses.replace(part, numbers_N=np.arange(len(part)))
        found: dict[int, dict[str, Any]] = {}
        with evaluation_mode(self.model):
            # Each sequence by itself, whatever the batches of an evaluation are.
            for batch in AbstractTask.eval_batches(task, part, world=World(), device=self._device):
                assert batch.indices is not None
                if len(batch):
                    _check_range(batch, part)
                    found |= zip(batch.indices.tolist(), task.predict(self.model, batch), strict=True)
        return [found[number] for number in range(len(part))]

    def evaluate(self, data: Data, *, split: Part | Literal["all"] | None = None) -> dict[str, float]:
        """The task's metrics and `loss` on labelled data, as at the end of training.

        Args:
            data: As `predict` takes them.
            split: The part of the data to take. Left out, the test part of the data that the model was trained on,
                and all of any other.
        """
        found = self.evaluation(data, split=split)[0]
        return {**found.metrics, "loss": found.loss}

    def evaluation(self, data: Data, *, split: Part | Literal["all"] | None = None) -> tuple[Evaluation, SequenceSet]:
        """The metrics, how classes were confused, and the sequences that was measured on."""
        task = self._task_over(data, targets=True)
        if split is None:
            split = "test" if task.data.digest() == self._digest else "all"
        part = task.data if split == "all" else task.data.part(split)
        return evaluate(task, self.model, part, device=self._device, final=True), part

    def _task_over(self, data: Data, *, targets: bool) -> AbstractTask[Any]:
        task = self.task
        if isinstance(data, (str, Path)):
            data = task.open(Path(data))
        elif not isinstance(data, SequenceSet):
            if not _is_list(data):
                raise StrettoError(
                    f"the data are a {type(data).__name__}",
                    fix="Give a path, a SequenceSet, or a list of arrays, tensors or strings.",
                )
            if not len(data):
                raise StrettoError("there are no sequences", fix="Give at least one.")
            data = (
                task.from_texts([str(text) for text in data])
                if isinstance(data[0], str)
                else _as_sequences(data, dtype=task.data.features_SF.dtype)
            )
        task = task.with_data(data, targets=targets)
        cap = task.config.max_padded_steps
        if cap is not None:
            # A cap for the memory of training does not keep longer sequences out.
            task.config = dataclasses.replace(task.config, max_padded_steps=max(cap, int(data.lengths_N.max())))
        return task

    @property
    def _device(self) -> str:
        return str(self.task.config.device)


def _check_range(batch: Batch, part: SequenceSet) -> None:
    """Refuse numbers that are finite in the data and not in the precision of the model."""
    dtype = torch.get_default_dtype()
    fits_B = torch.isfinite(batch.features_BTF.to(dtype)).flatten(1).all(dim=1)
    if not fits_B.all():
        assert batch.indices is not None
        sequence = int(batch.indices[int((~fits_B).nonzero()[0])])
        raise StrettoError(
            f"{part.name}: sequence {sequence} has a number beyond what {dtype} can hold",
            fix="Scale the features as those that the model was trained on.",
        )


def _is_list(data: object) -> bool:
    is_some = isinstance(data, (Sequence, np.ndarray, torch.Tensor))
    return is_some and not isinstance(data, (bytes, bytearray))


def _as_sequences(rows: Sequence[Any], *, dtype: npt.DTypeLike) -> SequenceSet:
    """Arrays or tensors, each (T, F) or (T), as a set whose features are of this type."""
    data = from_tensors(rows, split=np.zeros(len(rows), dtype=np.uint8), name="arrays")
    return dataclasses.replace(data, features_SF=data.features_SF.astype(dtype))


def check_device(name: str) -> None:
    """Refuse a device that torch cannot use here."""
    try:
        torch.zeros(1, device=name).item()
    except (RuntimeError, AssertionError, ImportError, TypeError) as error:
        raise StrettoError(
            f"torch cannot use the device {name!r} here ({str(error).partition(chr(10))[0]})",
            fix="Choose another --device, for example cpu.",
        ) from error


def _check_numbers(model: nn.Module, tensors: dict[str, torch.Tensor]) -> None:
    """Refuse weights that would be rounded to integers, or that are NaN or inf; torch would take them."""
    for name, parameter in model.named_parameters():
        weight = tensors.get(name, parameter)
        if weight.is_floating_point() != parameter.is_floating_point():
            raise ValueError(f"{name} is of {weight.dtype}")
        if not torch.isfinite(weight).all():
            raise ValueError(f"{name} has a NaN or infinite number")


def read_card(run: Path) -> dict[str, Any]:
    """What `write_card` wrote."""
    path = run / CARD_FILE
    if not path.exists():
        raise StrettoError(
            f"{str(run)!r} holds no trained model",
            fix=f"Name the folder of a run; earlier versions did not write {CARD_FILE}, so train these again.",
        )
    try:
        refuse_special(path)
        card = json.loads(path.read_text(encoding="utf-8"))
        names = {"version": int, "task": str, "settings": dict, "data": dict, "preprocessing": dict}
        if not isinstance(card, dict) or not all(isinstance(card.get(name), kind) for name, kind in names.items()):
            raise ValueError("an entry is missing")
    except (OSError, ValueError, RecursionError) as error:
        raise StrettoError(f"{str(path)!r} is damaged ({error})", fix="Restore the file, or train again.") from error
    if card["version"] != VERSION:
        raise StrettoError(
            f"{str(path)!r} was written by Stretto {card.get('stretto')}, whose format this version does not read",
            fix="Use that version, or train again.",
        )
    return card


def _read_weights(run: Path, weights: Weights) -> dict[str, torch.Tensor]:
    path = run / (MODEL_FILE if weights == "last" else BEST_FILE)
    if weights == "last" and not path.exists():
        # Of a run that is not finished.
        return model_of_newest_checkpoint(run)
    if not path.exists():
        raise StrettoError(
            f"{str(run)!r} has no weights {path.name}", fix="No epoch has ended yet; train on with --resume."
        )
    try:
        refuse_special(path)
        return safetensors.torch.load_file(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise StrettoError(f"{str(path)!r} is damaged ({error})", fix="Restore the file, or train again.") from error
