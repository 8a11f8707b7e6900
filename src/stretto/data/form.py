"""The form of a data set without its content: what a model trained on it must know to be used without it."""

import dataclasses
from typing import Any, Final, Literal, final

import numpy as np

from stretto.data.sequences import PARTS, SequenceSet
from stretto.data.targets import AbstractTargets, Labels, NoTargets, StepLabels, Transcripts

KINDS: Final = {NoTargets: "none", Labels: "labels", StepLabels: "step labels", Transcripts: "text"}


@final
@dataclasses.dataclass(frozen=True, kw_only=True)
class DataForm:
    """Features, classes, characters and words of a set; JSON-ready.

    Attributes:
        name: Of the set.
        num_features: Features per step.
        dtype: Of the features, as NumPy names it.
        length: Steps of the shortest sequence.
        targets: What a sequence has: nothing, a label, a label per step, or text.
        class_names: Of labels.
        characters: That occur in text to be learned.
        alphabet: Of sequences that are characters.
        vocabulary: Of sequences that are words.
    """

    name: str
    num_features: int
    dtype: str
    length: int
    targets: Literal["none", "labels", "step labels", "text"]
    class_names: tuple[str, ...] = ()
    characters: str = ""
    alphabet: str = ""
    vocabulary: tuple[str, ...] = ()

    @classmethod
    def of(cls, data: SequenceSet) -> "DataForm":
        """The form of a set."""
        targets = data.targets
        return cls(
            name=data.name,
            num_features=data.num_features,
            dtype=data.features_SF.dtype.name,
            length=int(data.lengths_N.min()),
            targets=KINDS[type(targets)],  # type: ignore[arg-type]
            class_names=targets.names if isinstance(targets, (Labels, StepLabels)) else (),
            characters=targets.alphabet() if isinstance(targets, Transcripts) else "",
            alphabet=data.alphabet,
            vocabulary=data.vocabulary,
        )

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready values; what is empty is left out."""
        return {name: value for name, value in dataclasses.asdict(self).items() if value not in ("", ())}

    @classmethod
    def from_dict(cls, values: dict[str, Any]) -> "DataForm":
        """From what `to_dict` gave, read from JSON."""
        known: dict[str, Any] = {k: tuple(value) if isinstance(value, list) else value for k, value in values.items()}
        found = cls(**known)
        texts = (found.name, found.dtype, found.characters, found.alphabet, *found.class_names, *found.vocabulary)
        if not all(isinstance(text, str) for text in texts) or not isinstance(found.class_names, tuple):
            raise ValueError("names, characters and words are not text")
        if found.targets not in KINDS.values():
            raise ValueError(f"the targets are {found.targets!r}")
        if np.dtype(found.dtype).kind not in "biuf":
            raise ValueError(f"features of type {found.dtype}")
        if found.num_features < 1 or found.length < 1:
            raise ValueError(f"{found.num_features} features, {found.length} steps")
        if len(set(found.class_names)) < len(found.class_names):
            raise ValueError("two classes have the same name")
        return found

    def stand_in(self) -> SequenceSet:
        """A set of this form, all zeros, with every class and character: a task can be built on it.

        All its sequences are the same steps. Those of training have one character or step label each.
        """
        kinds = {"text": max(1, len(self.characters)), "step labels": len(self.class_names)}
        count = kinds.get(self.targets, 1) + 2
        starts_N, lengths_N = np.zeros(count, dtype=np.int64), np.full(count, self.length)
        number_N = np.minimum(np.arange(count), count - 3)
        targets: AbstractTargets = NoTargets(count=count)
        if self.targets == "labels":
            targets = Labels(values_N=np.zeros(count, dtype=np.int64), names=self.class_names)
        elif self.targets == "step labels":
            targets = StepLabels(
                values_S=np.repeat(number_N, self.length),
                starts_N=np.arange(count) * self.length,
                lengths_N=lengths_N,
                names=self.class_names,
            )
        elif self.targets == "text":
            targets = Transcripts.of([self.characters[number : number + 1] for number in number_N])
        return SequenceSet(
            name=self.name,
            features_SF=np.zeros((self.length, self.num_features), dtype=self.dtype),
            starts_N=starts_N,
            lengths_N=lengths_N,
            targets=targets,
            split_N=np.array([0] * (count - 2) + [PARTS.index("valid"), PARTS.index("test")], dtype=np.uint8),
            numbers_N=np.arange(count),
            alphabet=self.alphabet,
            vocabulary=self.vocabulary,
        )
