"""The embedded data: lines of handwriting, made from a seed."""

import dataclasses
import hashlib
import json
from pathlib import Path
from typing import Final

import numpy as np

from stretto.data.lines import ALPHABET, random_line
from stretto.data.npz import read_npz, write_npz
from stretto.data.sequences import PARTS, SequenceSet
from stretto.data.targets import Transcripts
from stretto.data.writer import Writer
from stretto.files import cache_folder

GENERATOR_VERSION: Final = 2


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HandwritingSettings:
    """How much ink to make.

    Attributes:
        num_train: Training lines; validation and test get a tenth as many each, by writers of their own.
        num_writers: Training writers; validation and test get a quarter as many each.
        seed: Everything follows from it.
    """

    num_train: int = 6000
    num_writers: int = 80
    seed: int = 0

    def counts(self) -> tuple[int, int, int]:
        """Lines in train, valid and test."""
        held_out = max(1, self.num_train // 10)
        return self.num_train, held_out, held_out

    def writers(self) -> tuple[int, int, int]:
        """Writers of train, valid and test; no writer is in two."""
        held_out = max(1, self.num_writers // 4)
        return self.num_writers, held_out, held_out

    def key(self) -> str:
        """Names the cached file."""
        text = json.dumps([GENERATOR_VERSION, dataclasses.astuple(self)])
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def make_handwriting(settings: HandwritingSettings) -> SequenceSet:
    """Draw every line; a pure function of the settings."""
    inks, texts, split = [], [], []
    for number, (part, count, num_writers) in enumerate(zip(PARTS, settings.counts(), settings.writers(), strict=True)):
        rng = np.random.default_rng([settings.seed, number])
        writers = [Writer.draw(rng) for _ in range(num_writers)]
        for _ in range(count):
            text = random_line(part, rng=rng)
            writer = writers[rng.integers(num_writers)]
            inks.append(writer.write(text, alphabet=ALPHABET, rng=rng))
            texts.append(text)
            split.append(number)
    return SequenceSet.from_flat(
        np.concatenate(inks),
        offsets=np.cumsum([0, *map(len, inks)]),
        targets=Transcripts.of(texts),
        split_N=np.array(split, dtype=np.uint8),
        name="handwriting",
    )


def load_handwriting(settings: HandwritingSettings | None = None) -> SequenceSet:
    """The embedded set, memory-mapped from the cache; made in seconds when it is not there yet."""
    settings = settings or HandwritingSettings()
    path = cached_path(settings)
    if not path.exists():
        write_npz(path, make_handwriting(settings))
    return dataclasses.replace(read_npz(path), name="handwriting")


def cached_path(settings: HandwritingSettings) -> Path:
    """Where the set made from `settings` is kept."""
    return cache_folder() / f"handwriting-{settings.key()}.npz"
