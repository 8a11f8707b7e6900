"""Video: clips of unequal length, one class each.

Shape legend: B clips, T steps, P real steps of all clips, F values of a frame or features, E of its code, H hidden
units, C classes.
"""

import dataclasses
from pathlib import Path
from typing import Annotated, ClassVar, Final, Literal, final

import numpy as np
import torch
from pydantic import Field
from torch import nn

from stretto.batching import Batch
from stretto.data import LARGEST_FRAME, SMALLEST_FRAME, Framing, SequenceSet, open_sequences
from stretto.errors import StrettoError
from stretto.nn import Dropout, Standardise
from stretto.tasks.classify import Classification, ClassificationConfig
from stretto.tasks.recurrent import GRULayers, mean_over_steps
from stretto.training import Count, Positive, SolverConfig

CHANNELS: Final = (16, 32)
POOLED_SIZE: Final = 4
"""Rows and columns that a frame is summed up in."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class VideoConfig(SolverConfig, ClassificationConfig):
    """Settings of the video task.

    Attributes:
        frame_size: Width and height, in pixels, that frames are scaled to.
        colour: Frames in colour instead of grey.
        split_file: Which of HMDB51's three splits, where its split files are there.
    """

    epochs: Count = 20
    batch_size: Count = 16
    hidden_size: Count = 64
    learning_rate: Positive = 5e-3
    frame_size: Annotated[int, Field(ge=SMALLEST_FRAME, le=LARGEST_FRAME)] = Framing().size
    colour: bool = Framing().colour
    split_file: Literal[1, 2, 3] = 1

    @property
    def framing(self) -> Framing:
        """How clips are to be read."""
        return Framing(size=self.frame_size, colour=self.colour, split_file=self.split_file)


@final
class FrameEncoder(nn.Module):
    """Two convolutions with pooling, which keep roughly where something is, and a linear layer, normalised."""

    def __init__(self, framing: Framing, *, code_size: int) -> None:
        super().__init__()
        self.size, self.channels = framing.size, framing.channels
        few, many = CHANNELS
        self.layers = nn.Sequential(
            nn.Conv2d(self.channels, few, kernel_size=3, stride=2, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(few, many, kernel_size=3, padding=1),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(POOLED_SIZE),
            nn.Flatten(),
            nn.Linear(many * POOLED_SIZE * POOLED_SIZE, code_size),
            # Of each frame by itself: what all frames have in common would swamp what moves.
            nn.LayerNorm(code_size),
        )

    def forward(self, pixels_PF: torch.Tensor) -> torch.Tensor:
        """Codes (P, E) of frames."""
        frames = pixels_PF.view(len(pixels_PF), self.size, self.size, self.channels).permute(0, 3, 1, 2)
        codes_PE: torch.Tensor = self.layers(frames)
        return codes_PE


@final
class VideoModel(nn.Module):
    """Each real frame encoded by itself, a GRU over the frames, its mean over real steps, and a linear layer."""

    def __init__(self, standardise: Standardise, encode: nn.Module, *, num_classes: int, config: VideoConfig) -> None:
        super().__init__()
        self.standardise, self.encode = standardise, encode
        size = config.hidden_size
        self.gru = GRULayers(size, config=config)
        self.dropout = Dropout(config.dropout)
        self.classify = nn.Linear(size, num_classes)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Scores of the classes (B, C)."""
        mask_BT = batch.mask
        x_PF = self.standardise(batch.features_BTF[mask_BT], mask_BT[mask_BT])
        codes_PE = self.dropout(self.encode(x_PF))
        codes_BTE = codes_PE.new_zeros(*mask_BT.shape, codes_PE.shape[1])
        codes_BTE[mask_BT] = codes_PE
        mean_BH = mean_over_steps(self.gru(codes_BTE, batch), batch)
        scores_BC: torch.Tensor = self.classify(self.dropout(mean_BH))
        return scores_BC


@final
class Video(Classification[VideoConfig]):
    """Clips of frames or features with one class each, measured in accuracy."""

    name = "video"
    Config = VideoConfig
    label_hint: ClassVar[str] = "Give clips as class/clip/frame.jpg or class/clip.npy."

    def __init__(self, config: VideoConfig, data: SequenceSet) -> None:
        if config.data is not None and config.framing != Framing():
            # The data were opened without the settings of frames.
            data = open_sequences(config.data, framing=config.framing)
        super().__init__(config, data)
        self._has_frames = data.features_SF.dtype == np.uint8
        if self._has_frames:
            _check_frames(data, config.framing)

    def open(self, path: Path) -> SequenceSet:
        """Read clips with the frames of the settings."""
        return open_sequences(path, framing=self.config.framing if path.is_dir() else None)

    def build_model(self) -> VideoModel:
        """A new model."""
        train, size = self.data.part("train"), self.config.hidden_size
        encode: nn.Module
        if self._has_frames:
            standardise = Standardise.of(train, num_groups=self.config.framing.channels)
            encode = FrameEncoder(self.config.framing, code_size=size)
        else:
            standardise, encode = Standardise.of(train), nn.Linear(self.data.num_features, size)
        return VideoModel(standardise, encode, num_classes=len(self.class_names), config=self.config)


def _check_frames(data: SequenceSet, framing: Framing) -> None:
    """Refuse bytes that are not frames of the size and colour in the settings."""
    have = Framing.of(data.num_features)
    if have is None:
        raise StrettoError(
            f"{data.name} has {data.num_features} bytes per step, which is not a square frame",
            fix=f"Give frames of {SMALLEST_FRAME} to {LARGEST_FRAME} pixels a side, or features as floating point.",
        )
    if (have.size, have.colour) != (framing.size, framing.colour):
        raise StrettoError(
            f"{data.name} has frames of {have} and the settings say {framing}",
            fix=f"Set --frame-size {have.size} {'--colour' if have.colour else '--no-colour'}.",
        )
