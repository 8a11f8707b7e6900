"""Digits read row by row or seen whole: both nets are those of plain torch, for images of any size, and learn.

Shape legend: B images, T rows, F columns, S rows of all images, C classes.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from task_gradients import Found, assert_padding_changes_nothing, assert_same, built, loss_and_gradients, whole
from torch import nn
from torch.nn import functional

import stretto
from stretto.data import Labels, SequenceSet, make_drawn_digits, write_npz
from stretto.errors import StrettoError
from stretto.tasks.digits import DigitImages, DigitImagesConfig, Digits, DigitsConfig

pytestmark = pytest.mark.usefixtures("quick_compiler")
EVEN = [4] * 6
RAGGED = [1, 8, 3, 5, 1, 12]
LABELS = np.array([0, 2, 1, 1, 0, 2])
FOLDED, APART = 6, 1
"""Sizes of a row for which the product of both weights is less work than one after the other, and more."""


def images(lengths: list[int], *, width: int = 3) -> SequenceSet:
    return SequenceSet.from_flat(
        np.random.default_rng(0).integers(256, size=(sum(lengths), width), dtype=np.uint8),
        offsets=np.cumsum([0, *lengths]),
        targets=Labels(values_N=LABELS, names=("one", "two", "three")),
        split_N=np.arange(len(lengths)) % 3,
        name="pictures",
    )


def make(lengths: list[int], **changes: Any) -> Digits:
    config = DigitsConfig(hidden_size=5, **{"row_size": FOLDED, **changes})
    return Digits(config, images(lengths))


def by_plain_torch(task: Digits, model: Any) -> Found:
    """The loss and gradients of torch's layers with the weights of `model`, one image after the other."""
    config, data = task.config, task.data
    transform, classify = nn.Linear(data.num_features, config.row_size), nn.Linear(config.hidden_size, 3)
    lstm = nn.LSTM(config.row_size, config.hidden_size, config.num_layers, batch_first=True)
    plain = nn.ModuleDict({"transform": transform, "lstm": lstm, "classify": classify}).double()
    weights = {name: tensor for name, tensor in model.state_dict().items() if not name.startswith("standardise")}
    plain.load_state_dict(weights)
    mean_F, scale_F = model.standardise.mean_F, model.standardise.scale_F
    total = torch.zeros((), dtype=torch.float64)
    for index, label in enumerate(LABELS):
        x_TF = (data[index].features_TF.double() - mean_F) * scale_F
        _, (last_LBH, _) = lstm(transform(x_TF)[None])
        total = total + functional.cross_entropy(classify(last_LBH[-1]), torch.tensor([label]))
    torch.autograd.backward(total)
    gradients = {name: p.grad for name, p in plain.named_parameters() if p.grad is not None}
    return Found(loss=total.item(), count=len(LABELS), gradients=gradients)


@pytest.mark.parametrize("backend", ["cpp", "torch"])
@pytest.mark.parametrize("lengths", [EVEN, RAGGED], ids=["even", "ragged"])
@pytest.mark.parametrize("row_size", [FOLDED, APART])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_net_is_that_of_plain_torch_layers(
    backend: str, lengths: list[int], row_size: int, num_layers: int
) -> None:
    task = make(lengths, backend=backend, row_size=row_size, num_layers=num_layers)
    model = built(task)
    assert model._can_fold == (row_size == FOLDED)
    assert_same(loss_and_gradients(task, model, [whole(task)]), by_plain_torch(task, model), atol=1e-12)


@pytest.mark.parametrize("changes", [{}, {"row_size": APART}, {"num_layers": 2}, {"backend": "torch"}])
def test_padding_changes_nothing(changes: dict[str, Any]) -> None:
    assert_padding_changes_nothing(make(RAGGED, **changes), count=len(RAGGED), rubbish=[float("nan")], atol=1e-12)


def test_both_kernels_make_the_same_net_of_a_seed() -> None:
    ours, torchs = built(make(RAGGED)), built(make(RAGGED, backend="torch"))
    assert ours.state_dict().keys() == torchs.state_dict().keys()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, torchs.state_dict()[name])


def test_layers_and_last_state_are_dropped_in_training_alone() -> None:
    task = make(EVEN, dropout=0.5, num_layers=2)
    model, batch = built(task), whole(task)
    assert not torch.equal(model(batch), model(batch))
    model.eval()
    assert torch.equal(model(batch), model(batch))


@pytest.mark.parametrize("task", [Digits, pytest.param(DigitImages, marks=pytest.mark.slow)])
def test_without_data_digits_are_drawn(task: type[Digits] | type[DigitImages]) -> None:
    data = task.embedded_data()
    assert (data.name, len(data), data.num_features) == ("drawn digits", 8000, 28)


def make_images(*, height: int = 7, width: int = 5, **changes: Any) -> DigitImages:
    return DigitImages(DigitImagesConfig(hidden_size=6, **changes), images([height] * len(LABELS), width=width))


def pooled(x: torch.Tensor) -> torch.Tensor:
    """The largest of each square of four; what lies beyond the edge does not count."""
    wide = functional.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2), value=-torch.inf)
    return torch.stack([wide[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)]).amax(dim=0)


@pytest.mark.parametrize(("height", "width"), [(28, 28), (7, 5), (4, 4), (1, 1), (1, 9), (2, 3)])
def test_the_net_is_that_of_plain_convolutions(height: int, width: int) -> None:
    task = make_images(height=height, width=width)
    model, batch = built(task), whole(task)
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}
    (few, few_bias), (many, many_bias), (hidden, hidden_bias), (last, last_bias) = zip(
        *[iter(weights.values())] * 2, strict=True
    )
    x = ((batch.features_BTF.double() - model.standardise.mean_F) * model.standardise.scale_F)[:, None]
    x = pooled(functional.conv2d(x, few, few_bias, padding=1).relu())
    x = pooled(functional.conv2d(x, many, many_bias, padding=1).relu())
    x = functional.linear(x.flatten(1), hidden, hidden_bias).relu()
    expected = functional.cross_entropy(functional.linear(x, last, last_bias), torch.tensor(LABELS), reduction="sum")
    torch.autograd.backward(expected)
    gradients = {name: weight.grad for name, weight in weights.items() if weight.grad is not None}
    wanted = Found(loss=expected.item(), count=len(LABELS), gradients=gradients)
    assert_same(loss_and_gradients(task, model, [batch]), wanted, atol=1e-12)


def test_rows_that_a_batch_is_padded_with_are_no_part_of_an_image() -> None:
    task = make_images()
    model = built(task)
    assert torch.equal(model(whole(task)), model(whole(task, edges=[20])))


def test_images_of_several_heights_and_recurrent_layers_are_refused() -> None:
    message = r"pictures: image 0 has 7 rows and image 2 has 4 \(2 such images\).*train digits"
    with pytest.raises(StrettoError, match=message):
        DigitImages(DigitImagesConfig(), images([7, 7, 4, 7, 9, 7], width=5))
    with pytest.raises(StrettoError, match=r"num_layers=2 was given.*no recurrent layers"):
        make_images(num_layers=2)


@pytest.mark.parametrize(
    ("task", "settings", "least"),
    [
        ("digits", {"epochs": 5, "row_size": 32, "backend": "cpp"}, 0.3),
        ("digits", {"epochs": 5, "row_size": 32, "backend": "torch"}, 0.3),
        ("digit-images", {"epochs": 3}, 0.5),
    ],
)
@pytest.mark.slow
def test_digits_are_learned(tmp_path: Path, task: str, settings: dict[str, Any], least: float) -> None:
    write_npz(tmp_path / "few.npz", make_drawn_digits(num_train=900))
    result = stretto.train(
        task, data=tmp_path / "few.npz", out=tmp_path / "run", batch_size=16, hidden_size=32, **settings
    )
    assert result.metrics["accuracy"] > least
    assert result.settings["optimizer"] == "momentum"
    assert result.padding == 0.0
