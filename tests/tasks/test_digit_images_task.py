"""Digit images: the net is that of plain convolutions, of any size of image, and it learns.

Shape legend: B images, T rows, F columns, C classes.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn import functional

import stretto
from stretto.batching import Batch, collate
from stretto.data import AbstractTargets, DrawnDigitsSettings, Labels, SequenceSet, make_drawn_digits, write_npz
from stretto.errors import StrettoError
from stretto.tasks.digit_images import DigitImages, DigitImagesConfig, DigitImagesModel

LABELS = np.array([0, 2, 1, 1, 0, 2])
NAMES = ("one", "two", "three")


def images(lengths: list[int], *, width: int, targets: AbstractTargets | None = None) -> SequenceSet:
    return SequenceSet.from_flat(
        np.random.default_rng(0).integers(256, size=(sum(lengths), width), dtype=np.uint8),
        offsets=np.cumsum([0, *lengths]),
        targets=targets or Labels(values_N=LABELS, names=NAMES),
        split_N=np.arange(len(lengths)) % 3,
        name="pictures",
    )


def make(*, height: int = 7, width: int = 5, **changes: Any) -> DigitImages:
    return DigitImages(DigitImagesConfig(hidden_size=6, **changes), images([height] * len(LABELS), width=width))


def build(task: DigitImages) -> DigitImagesModel:
    torch.manual_seed(0)
    return task.build_model().double()


def whole(task: DigitImages, **padding: Any) -> Batch:
    return collate([task.data[index] for index in range(len(task.data))], **padding)


def pooled(x: torch.Tensor) -> torch.Tensor:
    """The largest of each square of four; what lies beyond the edge does not count."""
    wide = functional.pad(x, (0, x.shape[3] % 2, 0, x.shape[2] % 2), value=-torch.inf)
    return torch.stack([wide[:, :, i::2, j::2] for i in (0, 1) for j in (0, 1)]).amax(dim=0)


@pytest.mark.parametrize(("height", "width"), [(28, 28), (7, 5), (4, 4), (1, 1), (1, 9), (2, 3)])
def test_the_net_is_that_of_plain_convolutions(height: int, width: int) -> None:
    task = make(height=height, width=width)
    model, batch = build(task), whole(task)
    loss = task.loss(model(batch), batch)
    torch.autograd.backward(loss.total)
    assert loss.count == len(LABELS)
    found = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}

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
    torch.testing.assert_close(loss.total, expected, rtol=1e-12, atol=0.0)
    assert found.keys() == weights.keys()
    for name, gradient in found.items():
        torch.testing.assert_close(gradient, weights[name].grad, rtol=1e-10, atol=1e-12)


def test_rows_that_a_batch_is_padded_with_are_no_part_of_an_image() -> None:
    task = make()
    model = build(task)
    assert torch.equal(model(whole(task)), model(whole(task, edges=[20])))


def test_the_score_is_the_share_of_right_classes() -> None:
    task = make()
    scores = task.score(torch.eye(3)[torch.tensor([0, 2, 0, 1, 0, 1])], whole(task))
    assert (scores["accuracy"].amount, scores["accuracy"].count) == (4, 6)


def test_images_of_several_heights_are_refused_and_named() -> None:
    message = r"pictures: image 0 has 7 rows and image 2 has 4 \(2 such images\).*train digits"
    with pytest.raises(StrettoError, match=message):
        DigitImages(DigitImagesConfig(), images([7, 7, 4, 7, 9, 7], width=5))


def test_recurrent_layers_are_refused() -> None:
    with pytest.raises(StrettoError, match=r"num_layers=2 was given.*no recurrent layers"):
        make(num_layers=2)


@pytest.mark.slow
def test_digit_images_are_learned(tmp_path: Path) -> None:
    write_npz(tmp_path / "few.npz", make_drawn_digits(DrawnDigitsSettings(num_train=900)))
    result = stretto.train(
        task="digit-images", data=tmp_path / "few.npz", out=tmp_path / "run", epochs=3, batch_size=16, hidden_size=32
    )
    assert result.metrics["accuracy"] > 0.5


@pytest.mark.slow
def test_without_data_digits_are_drawn() -> None:
    assert DigitImages.embedded_data().name == "drawn digits"
