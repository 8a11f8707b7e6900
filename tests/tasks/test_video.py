"""Video: what moves which way is learned from small clips, padding changes nothing, and wrong data are refused.

Shape legend: B clips, T steps, F values of a frame or features, C classes, P real steps of all clips.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from PIL import Image
from task_gradients import assert_padding_changes_nothing, built, whole
from torch import nn

import stretto
from stretto.batching import collate
from stretto.cli.main import main
from stretto.data import Framing, Labels, SequenceSet, read_clips, write_npz
from stretto.errors import StrettoError
from stretto.tasks.video import Video, VideoConfig

pytestmark = pytest.mark.usefixtures("quick_compiler")
Array = npt.NDArray[Any]
LENGTHS = [1, 8, 3, 5, 1, 12]
LABELS = np.array([0, 2, 1, 1, 0, 2])
NAMES = ("left", "right", "stop")
SIDE = 16


def moving_square(direction: int, *, steps: int, rng: np.random.Generator) -> Array:
    """A square that goes left or right and comes back at the other side.

    Wherever it starts, each place is as likely in one class as in the other: one frame alone does not show the class.
    """
    clip = np.zeros((steps, SIDE, SIDE), dtype=np.uint8)
    row, column = rng.integers(SIDE - 4), rng.integers(SIDE)
    for step in range(steps):
        columns = (column + direction * 3 * step + np.arange(4)) % SIDE
        clip[step, row : row + 4, columns] = 255
    return clip


def put_moving_squares(folder: Path, *, clips: int, seed: int = 0) -> None:
    rng = np.random.default_rng(seed)
    for name, direction in (("leftwards", -1), ("rightwards", 1)):
        for number in range(clips):
            clip = folder / name / f"clip{number}"
            clip.mkdir(parents=True)
            for step, frame in enumerate(moving_square(direction, steps=int(rng.integers(3, 12)), rng=rng), start=1):
                Image.fromarray(frame).save(clip / f"{step}.png")


def made(features_SF: Array) -> SequenceSet:
    return SequenceSet.from_flat(
        features_SF,
        offsets=np.cumsum([0, *LENGTHS]),
        split_N=np.arange(len(LENGTHS)) % 3,
        name="signs",
        targets=Labels(values_N=LABELS, names=NAMES),
    )


def frames_task(*, size: int = 9, colour: bool = False, **settings: Any) -> Video:
    rng, channels = np.random.default_rng(0), 3 if colour else 1
    frames_SF = rng.integers(256, size=(sum(LENGTHS), size * size * channels), dtype=np.uint8)
    config = VideoConfig(hidden_size=5, dropout=0.0, frame_size=size, colour=colour, **settings)
    return Video(config, made(frames_SF))


def features_task(**settings: Any) -> Video:
    features_SF = np.random.default_rng(0).normal(size=(sum(LENGTHS), 7))
    return Video(VideoConfig(hidden_size=5, dropout=0.0, **settings), made(features_SF))


TASKS = [
    frames_task,
    lambda: frames_task(size=8, colour=True, num_layers=2),
    lambda: frames_task(size=16, backend="torch"),
    lambda: frames_task(solver="shooting", chunks=2, tolerance=1e-13),
    lambda: features_task(num_layers=2),
    lambda: features_task(backend="torch"),
]


@pytest.mark.parametrize("make", TASKS)
def test_padding_changes_nothing(make: Any) -> None:
    rubbish = [10**9, float("inf"), float("nan")]
    alone = assert_padding_changes_nothing(make(), count=len(LENGTHS), rubbish=rubbish, atol=1e-12)
    assert all(gradient.any() for gradient in alone.gradients.values())


def test_nothing_is_computed_for_padding() -> None:
    task = frames_task()
    model, seen, lengths = built(task), [], []
    assert isinstance(model.encode, nn.Module)
    assert isinstance(model.gru.rnn, stretto.RNN)
    model.encode.register_forward_hook(lambda _, given, __: seen.append(len(given[0])))
    model.gru.rnn.register_forward_pre_hook(
        lambda _, __, given: lengths.extend(given["lengths"].tolist()), with_kwargs=True
    )
    model(whole(task))
    assert seen == [sum(LENGTHS)]
    assert lengths == LENGTHS


def test_the_encoder_takes_pixels_by_row_and_colour() -> None:
    task = frames_task(size=8, colour=True)
    model, seen = built(task), []
    assert isinstance(model.encode, nn.Module)
    convolution = next(layer for layer in model.encode.modules() if isinstance(layer, nn.Conv2d))
    convolution.register_forward_pre_hook(lambda _, given: seen.append(given[0]))
    model(collate([task.data[1]]))
    train = task.data.part("train")
    values = np.concatenate([train[index].features_TF.numpy() for index in range(len(train))]).reshape(-1, 3)
    frames = (task.data.features_SF[1:9].reshape(8, 8, 8, 3) - values.mean(axis=0)) / values.std(axis=0)
    np.testing.assert_allclose(seen[0].numpy(), np.moveaxis(frames, 3, 1), atol=1e-6)


def test_clips_are_known_again_by_their_numbers() -> None:
    task = frames_task(solver="warm_start", chunks=3)
    model = built(task)
    assert isinstance(model.gru.rnn, stretto.RNN)
    train = task.data.part("train")
    batch = collate([train[index] for index in range(len(train))])
    exact = built(frames_task())(batch)
    first = (model(batch) - exact).abs().max().item()
    for _ in range(3):
        last = (model(batch) - exact).abs().max().item()
    assert first > 1e-6
    assert last < 1e-10


@pytest.mark.parametrize(
    ("num_bytes", "problem"),
    [
        (65, "signs has 65 bytes per step, which is not a square frame"),
        (192, "8 x 8 pixels in colour and .* 32 x 32 .* --frame-size 8 --colour"),
    ],
)
def test_bytes_that_are_no_frames_of_the_size_set_are_refused(num_bytes: int, problem: str) -> None:
    with pytest.raises(StrettoError, match=problem):
        Video(VideoConfig(), made(np.zeros((sum(LENGTHS), num_bytes), dtype=np.uint8)))


@pytest.fixture(scope="module")
def squares(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("squares")
    put_moving_squares(folder, clips=50)
    return folder


SETTINGS: dict[str, Any] = {
    "frame_size": SIDE,
    "epochs": 12,
    "batch_size": 8,
    "hidden_size": 32,
    "dropout": 0.0,
    "learning_rate": 0.01,
    "threads": 1,
}
FLAGS = [word for name, value in SETTINGS.items() for word in (f"--{name.replace('_', '-')}", str(value))]


@pytest.fixture(scope="module")
def trained(squares: Path, tmp_path_factory: pytest.TempPathFactory) -> Any:
    return stretto.train("video", data=squares, out=tmp_path_factory.mktemp("runs") / "run", **SETTINGS)


def accuracy(model: Any, data: SequenceSet, *, order: slice) -> float:
    """The share of clips that are recognised when frames are taken in some order."""
    assert isinstance(data.targets, Labels)
    turned = [(data[index].features_TF.numpy()[order], data[index].target) for index in range(len(data))]
    with torch.no_grad():
        found = model.eval()(collate(turned)).argmax(dim=1).numpy()
    return float((found == data.targets.values_N).mean())


def test_which_way_a_square_moves_is_learned_from_the_order_of_frames(trained: Any, tmp_path: Path) -> None:
    put_moving_squares(tmp_path, clips=40, seed=1)
    unseen = read_clips(tmp_path, Framing(size=SIDE))
    assert accuracy(trained.model, unseen, order=slice(None)) >= 0.9
    assert accuracy(trained.model, unseen, order=slice(None, None, -1)) <= 0.1
    assert 0.3 <= accuracy(trained.model, unseen, order=slice(1)) <= 0.7


def test_the_command_line_trains_and_inspects(
    squares: Path, trained: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "video", "--data", str(squares), "--out", str(tmp_path / "run"), *FLAGS]) == 0
    result = json.loads((tmp_path / "run" / "result.json").read_text(encoding="utf-8"))
    assert result["metrics"]["loss"] == trained.metrics["loss"]
    capsys.readouterr()
    assert main(["inspect", str(squares)]) == 0
    shown = capsys.readouterr().out
    assert "100 (80 train, 10 valid, 10 test)" in shown
    assert "1,024 per step, in memory" in shown
    assert main(["train", "video", "--out", str(tmp_path / "other")]) == 2
    assert "Name a set with --data PATH. Give clips as class/clip" in capsys.readouterr().err


@pytest.mark.slow
def test_clips_kept_as_npz_train_to_the_same_weights(squares: Path, tmp_path: Path) -> None:
    write_npz(tmp_path / "clips.npz", read_clips(squares, Framing(size=SIDE)))
    losses = [
        stretto.train(
            "video", data=data, out=tmp_path / str(number), frame_size=SIDE, epochs=1, hidden_size=4, threads=1
        ).metrics["loss"]
        for number, data in enumerate((squares, tmp_path / "clips.npz"))
    ]
    assert losses[0] == losses[1]
