"""Images as sequences: a row of pixels is a step.

Reads the arrays of an `.npz` as Keras has MNIST: `x_train` (images, rows, columns) with `y_train`, and `x_test` with
`y_test`.

Shape legend: N images, H rows, W columns, S rows of all images.
"""

from collections.abc import Iterable, Mapping
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from stretto.data.sequences import SequenceSet
from stretto.data.targets import Labels
from stretto.errors import StrettoError

Array = npt.NDArray[Any]
IMAGE_MEMBERS: Final = ("x_train", "y_train", "x_test", "y_test")


def holds_images(names: Iterable[str]) -> bool:
    """Whether arrays of these names are images in two parts, rather than sequences end to end."""
    return "offsets" not in names and not {"x_train", "x_test"}.isdisjoint(names)


def image_rows(arrays: Mapping[str, Array], *, name: str, source: str) -> SequenceSet:
    """The images as sequences of rows, with the pixels in the type they are stored in.

    A tenth of the training images is kept for validation, which the notes of the set tell.

    Args:
        arrays: By the names in `IMAGE_MEMBERS`.
        name: Of the set.
        source: Named in errors.

    Raises:
        StrettoError: An array is missing, is not made of grey images or whole-number labels, or does not fit the rest.
    """
    missing = [member for member in IMAGE_MEMBERS if member not in arrays]
    if missing:
        raise StrettoError(
            f"{source}: there are images but no {', '.join(f'`{member}`' for member in missing)}",
            fix="Give `x_train`, `y_train`, `x_test` and `y_test`, or `x` and `offsets` for sequences of your own.",
        )
    for part in ("train", "test"):
        _check_part(arrays[f"x_{part}"], arrays[f"y_{part}"], part=part, source=source)
    train_NHW, test_NHW = arrays["x_train"], arrays["x_test"]
    if train_NHW.shape[1:] != test_NHW.shape[1:] or train_NHW.dtype != test_NHW.dtype:
        raise StrettoError(
            f"{source}: `x_train` has images of {_told(train_NHW)} and `x_test` of {_told(test_NHW)}",
            fix="Give both the same size and type.",
        )
    images_NHW = np.concatenate([train_NHW, test_NHW])
    num_images, num_rows, num_columns = images_NHW.shape
    labels_N = np.concatenate([arrays[f"y_{part}"].astype(np.int64) for part in ("train", "test")])
    return SequenceSet.from_flat(
        images_NHW.reshape(num_images * num_rows, num_columns),
        offsets=np.arange(num_images + 1) * num_rows,
        targets=Labels.check(labels_N, names=None, source=source),
        split_N=np.repeat(np.array([0, 1], dtype=np.uint8), [len(train_NHW), len(test_NHW)]),
        name=name,
    )


def _check_part(x_NHW: Array, y_N: Array, *, part: str, source: str) -> None:
    if x_NHW.ndim != 3 or 0 in x_NHW.shape or x_NHW.dtype.kind not in "biuf":
        raise StrettoError(
            f"{source}: `x_{part}` has shape {x_NHW.shape} and type {x_NHW.dtype}",
            fix="Give grey images as numbers of shape (images, rows, columns), at least one of them.",
        )
    if y_N.shape != (len(x_NHW),) or not np.issubdtype(y_N.dtype, np.integer):
        raise StrettoError(
            f"{source}: `y_{part}` has shape {y_N.shape} and type {y_N.dtype} for {len(x_NHW)} images",
            fix="Give one whole number an image: its class, numbered from 0.",
        )


def _told(x_NHW: Array) -> str:
    _, rows, columns = x_NHW.shape
    return f"{rows} x {columns} {x_NHW.dtype}"
