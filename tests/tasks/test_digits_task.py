"""Digits read row by row: the net is that of plain torch layers, ragged or not, and it learns.

Shape legend: B images, T rows, F columns, S rows of all images, C classes.
"""

import dataclasses
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from torch import nn
from torch.nn import functional

import stretto
from stretto.batching import Batch, collate
from stretto.data import (
    AbstractTargets,
    DrawnDigitsSettings,
    Labels,
    SequenceSet,
    Transcripts,
    make_drawn_digits,
    write_npz,
)
from stretto.errors import StrettoError
from stretto.nn import Standardise
from stretto.tasks.digits import Digits, DigitsConfig, DigitsModel

pytestmark = pytest.mark.usefixtures("quick_compiler")
Array = npt.NDArray[Any]
EVEN = [4] * 6
RAGGED = [1, 8, 3, 5, 1, 12]
LABELS = np.array([0, 2, 1, 1, 0, 2])
FOLDED, APART = 6, 1
"""Sizes of a row for which the product of both weights is less work than one after the other, and more."""
Found = tuple[float, int, dict[str, torch.Tensor]]


def images(lengths: list[int], targets: AbstractTargets | None = None, *, width: int = 3) -> SequenceSet:
    pixels_SF = np.random.default_rng(0).integers(256, size=(sum(lengths), width), dtype=np.uint8)
    return SequenceSet.from_flat(
        pixels_SF,
        offsets=np.cumsum([0, *lengths]),
        targets=targets,
        split_N=np.arange(len(lengths)) % 3,
        name="pictures",
    )


def make(lengths: list[int], **changes: Any) -> Digits:
    config = DigitsConfig(hidden_size=5, **{"row_size": FOLDED, **changes})
    return Digits(config, images(lengths, Labels(values_N=LABELS, names=("one", "two", "three"))))


def build(task: Digits) -> DigitsModel:
    torch.manual_seed(0)
    return task.build_model().double()


def whole(task: Digits, **padding: Any) -> Batch:
    return collate([task.data[index] for index in range(len(task.data))], **padding)


def loss_and_gradients(task: Digits, model: nn.Module, batches: list[Batch]) -> Found:
    model.zero_grad()
    total, count = 0.0, 0
    for batch in batches:
        loss = task.loss(model(batch), batch)
        torch.autograd.backward(loss.total)
        total, count = total + loss.total.item(), count + loss.count
    return total, count, {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def by_plain_torch(task: Digits, model: DigitsModel) -> Found:
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
    return total.item(), len(LABELS), gradients


def assert_same(found: Found, expected: Found) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-12)
    assert found[1] == expected[1]
    assert found[2].keys() == expected[2].keys()
    assert len(found[2]) >= 8
    for name, gradient in found[2].items():
        torch.testing.assert_close(gradient, expected[2][name], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("backend", ["cpp", "torch"])
@pytest.mark.parametrize("lengths", [EVEN, RAGGED], ids=["even", "ragged"])
@pytest.mark.parametrize("row_size", [FOLDED, APART])
@pytest.mark.parametrize("num_layers", [1, 2])
def test_the_net_is_that_of_plain_torch_layers(
    backend: str, lengths: list[int], row_size: int, num_layers: int
) -> None:
    task = make(lengths, backend=backend, row_size=row_size, num_layers=num_layers)
    model = build(task)
    assert model._can_fold == (row_size == FOLDED)
    assert_same(loss_and_gradients(task, model, [whole(task)]), by_plain_torch(task, model))


@pytest.mark.parametrize("changes", [{}, {"row_size": APART}, {"num_layers": 2}, {"backend": "torch"}])
def test_images_of_any_height_are_learned_as_if_alone(changes: dict[str, Any]) -> None:
    task = make(RAGGED, **changes)
    model, items = build(task), [task.data[index] for index in range(len(RAGGED))]
    alone = loss_and_gradients(task, model, [collate([item]) for item in items])
    assert alone[1] == len(RAGGED)
    assert_same(loss_and_gradients(task, model, [whole(task)]), alone)
    assert_same(loss_and_gradients(task, model, [whole(task, edges=[29])]), alone)


@pytest.mark.parametrize("backend", ["cpp", "torch"])
def test_what_stands_in_padded_slots_is_ignored(backend: str) -> None:
    task = make(RAGGED, backend=backend)
    model, batch = build(task), whole(task, edges=[20])
    loud_BTF = batch.features_BTF.double()
    loud_BTF[~batch.mask] = float("nan")
    clean = loss_and_gradients(task, model, [batch])
    assert_same(loss_and_gradients(task, model, [dataclasses.replace(batch, features_BTF=loud_BTF)]), clean)


def test_both_kernels_make_the_same_net_of_a_seed() -> None:
    ours, torchs = build(make(RAGGED)), build(make(RAGGED, backend="torch"))
    assert ours.state_dict().keys() == torchs.state_dict().keys()
    for name, tensor in ours.state_dict().items():
        assert torch.equal(tensor, torchs.state_dict()[name])


def test_layers_and_last_state_are_dropped_in_training_alone() -> None:
    task = make(EVEN, dropout=0.5, num_layers=2)
    model, batch = build(task), whole(task)
    assert not torch.equal(model(batch), model(batch))
    model.eval()
    assert torch.equal(model(batch), model(batch))


@settings(deadline=None, max_examples=60)
@given(
    pixels_SF=hnp.arrays(
        st.sampled_from([np.uint8, np.float32]), st.tuples(st.just(24), st.integers(1, 4)), elements=st.integers(0, 255)
    )
)
def test_pixels_are_scaled_over_all_of_them_alike(pixels_SF: Array) -> None:
    data = SequenceSet.from_flat(pixels_SF, offsets=np.array([0, 10, 16, 24]), split_N=np.array([0, 2, 0]))
    scale = Standardise.of(data.part("train"), num_groups=1)
    seen = np.concatenate([pixels_SF[:10], pixels_SF[16:]]).astype(np.float64)
    assert scale.mean_F.shape == scale.scale_F.shape == (pixels_SF.shape[1],)
    np.testing.assert_allclose(scale.mean_F.numpy(), seen.mean(), rtol=1e-5, atol=1e-5)
    deviation = seen.std()
    np.testing.assert_allclose(scale.scale_F.numpy(), 1 / deviation if deviation > 1e-6 else 1.0, rtol=1e-4)


def test_the_score_is_the_share_of_right_classes() -> None:
    task = make(EVEN)
    batch = collate([task.data[index] for index in range(4)])
    output_BC = torch.eye(3)[torch.tensor([0, 2, 0, 1])]
    scores = task.score(output_BC, batch)
    assert (scores["accuracy"].amount, scores["accuracy"].count) == (3, 4)
    assert [(sample.target, sample.output) for sample in task.samples(output_BC, batch)] == [
        ("one", "one"),
        ("three", "three"),
        ("two", "one"),
        ("two", "two"),
    ]


@pytest.mark.parametrize("targets", [None, Transcripts.of(list("abcdef"))])
def test_a_set_without_labels_is_refused(targets: AbstractTargets | None) -> None:
    with pytest.raises(StrettoError, match=r"pictures has no labels.*`x_train`"):
        Digits(DigitsConfig(), images(EVEN, targets))


def test_without_data_digits_are_drawn() -> None:
    data = Digits.embedded_data()
    assert (data.name, len(data), data.num_features) == ("drawn digits", 8000, 28)


@pytest.mark.parametrize("backend", ["cpp", "torch"])
@pytest.mark.slow
def test_digits_are_learned(tmp_path: Path, backend: str) -> None:
    write_npz(tmp_path / "few.npz", make_drawn_digits(DrawnDigitsSettings(num_train=900)))
    result = stretto.train(
        task="digits",
        data=tmp_path / "few.npz",
        out=tmp_path / "run",
        epochs=5,
        batch_size=16,
        hidden_size=32,
        row_size=32,
        backend=backend,
    )
    assert result.metrics["accuracy"] > 0.3
    assert result.settings["optimizer"] == "momentum"
    assert result.padding == 0.0
