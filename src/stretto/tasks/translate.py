"""Translation: a line in one language in, the same line in another out.

Shape legend: N pairs, S steps of all pairs, B pairs of a batch, T steps, U target steps, C pieces.
"""

import dataclasses
import math
import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal, final

import numpy as np
import torch
from pydantic import Field
from torch.nn import functional

from stretto.batching import Batch
from stretto.data import PARTS, LinePairs, SequenceSet, line_pairs, make_number_words
from stretto.errors import StrettoError
from stretto.extras import optional
from stretto.tasks.translate_model import END, MARKS, PAD, Sides, TranslateModel, TranslateShape, search
from stretto.training import AbstractTask, Count, LossSum, Positive, Sample, Score, Share, TrainConfig

MIN_PIECES: Final = len(MARKS) + 256
"""The marks and every byte, so that any text can be encoded."""
MAX_NGRAM: Final = 4
"""Words of the longest n-grams that are compared."""
LENGTH_KEY: Final = "length"
BleuWords = Literal["none", "13a", "char"]
ATTACHED_PUNCTUATION: Final = re.compile(r"\w[.,!?](?:\s|$)")
MAX_ATTACHED_FRACTION: Final = 0.01
PAIRS_PER_PIECE: Final = 7
MAX_PIECES: Final = 6000
MAX_NATS: Final = 700.0
FIRST_SCORE_TOLERANCE: Final = 1e-2
BLEU_WORD_NAMES: Final[dict[BleuWords, str]] = {
    "none": "words between spaces, because the text is tokenised",
    "13a": "words with punctuation split off",
    "char": "characters",
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class TranslateConfig(TrainConfig):
    """Settings of the translation task.

    Attributes:
        hidden_size: Units of every layer; the two directions of the encoder's first layer have half of them each.
        num_layers: Layers of the encoder, and of the decoder.
        source: The language to translate from, by the ending of its files; left out, English or the first of the two.
        target: The language to translate to; left out, the other.
        vocabulary_size: Most pieces of the vocabulary that both languages share; auto is one for every seven training
            pairs, and at most 6,000.
        label_smoothing: Fraction of the probability spread over all pieces.
        tie_output: Whether the output layer shares its weights with the embedding.
        decoder: How the test part is translated for `bleu`: greedy, or beam search; the result has both.
        beam_width: Translations that beam search keeps.
        bleu_words: What BLEU takes for a word, as sacrebleu names it; auto is none for text that is tokenised, or 13a.
    """

    epochs: Count = 10
    batch_size: Count | Literal["auto"] = 64
    hidden_size: Count = 256
    num_layers: Count = 2
    dropout: Share = 0.2
    learning_rate: Positive = 1e-3
    source: str | None = None
    target: str | None = None
    vocabulary_size: Count | Literal["auto"] = "auto"
    label_smoothing: Share = 0.1
    tie_output: bool = True
    decoder: Literal["greedy", "beam"] = "beam"
    beam_width: Annotated[int, Field(ge=1, le=100)] = 4
    bleu_words: Literal["auto", "none", "13a", "char"] = "auto"


@final
class Translate(AbstractTask[TranslateConfig]):
    """Lines in two languages, translated from one to the other and measured in BLEU.

    The pieces of a line and of its translation lie side by side as the two features of a pair, `PAD` after the end of
    the shorter one: a pair is as long as the longer of the two, the translation counted with its end mark, and buckets
    are made by that. The vocabulary is learned from the training part.

    Translating takes the model, so `score` and `samples` use the one that `build_model` made last; they refuse scores
    of another.

    Attributes:
        vocabulary: The pieces that both languages share.
    """

    name = "translate"
    Config = TranslateConfig
    metric = "bleu"

    def __init__(self, config: TranslateConfig, data: SequenceSet) -> None:
        pairs = _orient(line_pairs(data), config, name=data.name)
        trained = np.flatnonzero(data.split_N == PARTS.index("train")).tolist()
        texts = [text for side in (pairs.sources, pairs.targets) for text in (side[index] for index in trained)]
        self.vocabulary = Vocabulary(texts, max_pieces=_max_pieces(config, num_pairs=len(trained)))
        words = config.bleu_words
        chosen = detect_bleu_words([pairs.targets[index] for index in trained]) if words == "auto" else words
        self._bleu = Bleu(chosen)
        self._references = dict(zip(data.numbers_N.tolist(), pairs.targets, strict=True))
        self._model: TranslateModel | None = None
        note = f"BLEU compares {BLEU_WORD_NAMES[chosen]} (sacrebleu's {chosen})"
        super().__init__(config, _encode_pairs(data, pairs, self.vocabulary, note=note))

    @classmethod
    def embedded_data(cls) -> SequenceSet:
        """Numbers in words, from English to German."""
        return make_number_words()

    def build_model(self) -> TranslateModel:
        """A new model."""
        self._model = TranslateModel(
            TranslateShape(
                num_pieces=self.vocabulary.size,
                hidden_size=self.config.hidden_size,
                num_layers=self.config.num_layers,
                dropout=self.config.dropout,
                tie_output=self.config.tie_output,
                backend=self.config.backend,
            )
        )
        return self._model

    def loss(self, output: torch.Tensor, batch: Batch) -> LossSum:
        """Cross-entropy with smoothed labels, counted in target pieces and end marks."""
        pieces_BU = _target_pieces(output, batch)
        total = functional.cross_entropy(
            output.flatten(0, 1),
            pieces_BU.flatten(),
            ignore_index=PAD,
            reduction="sum",
            label_smoothing=self.config.label_smoothing,
        )
        return LossSum(total=total, count=int((pieces_BU != PAD).sum()))

    def num_elements(self, part: SequenceSet) -> int:
        """Target pieces and end marks."""
        before_S = np.concatenate([[0], np.cumsum(part.features_SF[:, 1] != PAD)])
        return int((before_S[part.starts_N + part.lengths_N] - before_S[part.starts_N]).sum())

    def score(self, output: torch.Tensor, batch: Batch) -> dict[str, Score]:
        """Nats, pieces predicted right, and the counts for BLEU of greedy translations."""
        texts = self._translations(output, batch, width=1)
        return {**self._guesses(output, batch), **self._bleu.scores(self.metric, texts, self._true(batch))}

    def final_score(self, output: torch.Tensor, batch: Batch) -> dict[str, Score]:
        """The same for both decoders; `bleu` is the chosen one's."""
        found = self._guesses(output, batch)
        for decoder, width in (("greedy", 1), ("beam", self.config.beam_width)):
            texts = self._translations(output, batch, width=width)
            names = [f"{self.metric}_{decoder}", *([self.metric] if decoder == self.config.decoder else [])]
            for name in names:
                found |= self._bleu.scores(name, texts, self._true(batch))
        return found

    def summary(self, scores: dict[str, Score]) -> dict[str, float]:
        """BLEU from 0 to 100, the perplexity of a piece, and the share of pieces guessed right given those before."""
        return {
            **{name: self._bleu.value(name, scores) for name in bleu_names(scores)},
            "perplexity": math.exp(min(scores["nats"].ratio, MAX_NATS)),
            "accuracy": scores["accuracy"].ratio,
        }

    def samples(self, output: torch.Tensor, batch: Batch) -> list[Sample]:
        """References and translations."""
        width = self.config.beam_width if self.config.decoder == "beam" else 1
        texts = self._translations(output, batch, width=width)
        return [Sample(target=reference, output=text) for reference, text in zip(self._true(batch), texts, strict=True)]

    def _guesses(self, output: torch.Tensor, batch: Batch) -> dict[str, Score]:
        pieces_BU = _target_pieces(output, batch)
        real_BU = pieces_BU != PAD
        nats = functional.cross_entropy(output.flatten(0, 1), pieces_BU.flatten(), ignore_index=PAD, reduction="sum")
        right_BU = (output.argmax(dim=-1) == pieces_BU) & real_BU
        count = int(real_BU.sum())
        return {
            "nats": Score(amount=float(nats), count=count),
            "accuracy": Score(amount=int(right_BU.sum()), count=count),
        }

    def _true(self, batch: Batch) -> list[str]:
        assert batch.indices is not None
        return [self._references[number] for number in batch.indices.tolist()]

    def _translations(self, output: torch.Tensor, batch: Batch, *, width: int) -> list[str]:
        if self._model is None:
            raise StrettoError("there is no model to translate with", fix="Call build_model() first.")
        sides = Sides.of(batch)
        was_training = self._model.training
        self._model.eval()
        try:
            found = search(self._model, sides, width=width)
        finally:
            self._model.train(was_training)
        # The first piece is scored before any is chosen, so the decoder must score it as the model did.
        given_BC = output[:, 0]
        allowed = FIRST_SCORE_TOLERANCE * float(given_BC.abs().max())
        if not torch.allclose(given_BC, found.first_BC, rtol=FIRST_SCORE_TOLERANCE, atol=allowed):
            raise StrettoError(
                "these scores are not of the model that translates, in evaluation mode",
                fix="Measure the model that build_model() made last, after model.eval().",
            )
        return self.vocabulary.decode(found.pieces)


@final
class Vocabulary:
    """Byte-pair encoding: bytes, and the pairs of pieces that were most often side by side, merged one after another.

    Text is given back exactly, but for spaces at its ends.

    Args:
        texts: What to learn from; the same texts in the same order make the same vocabulary.
        max_pieces: Its largest size, marks included.

    Attributes:
        size: Pieces and marks.

    Raises:
        StrettoError: The package tokenizers is missing, or there is no room for every byte.
    """

    def __init__(self, texts: Sequence[str], *, max_pieces: int) -> None:
        if max_pieces < MIN_PIECES:
            raise StrettoError(
                f"vocabulary_size is {max_pieces}, which has no room for every byte",
                fix=f"Set --vocabulary-size to {MIN_PIECES} or more.",
            )
        tokenizers = optional("tokenizers")
        bytewise = tokenizers.pre_tokenizers.ByteLevel
        self._pieces: Any = tokenizers.Tokenizer(tokenizers.models.BPE())
        self._pieces.pre_tokenizer = bytewise(add_prefix_space=True)
        self._pieces.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=max_pieces,
            min_frequency=2,
            special_tokens=list(MARKS),
            initial_alphabet=sorted(bytewise.alphabet()),
            show_progress=False,
        )
        self._pieces.train_from_iterator(texts, trainer)
        # What looks like a mark in a text is text.
        self._pieces.encode_special_tokens = True
        self.size: int = self._pieces.get_vocab_size()

    def encode(self, texts: Sequence[str]) -> list[list[int]]:
        """The numbers of the pieces of each text."""
        return [found.ids for found in self._pieces.encode_batch([text.strip() for text in texts])]

    def decode(self, rows: Sequence[Sequence[int]]) -> list[str]:
        """The text that pieces spell; marks are left out."""
        return [text.strip() for text in self._pieces.decode_batch([list(row) for row in rows])]


@final
class Bleu:
    """Counts the phrases that translations and references share, by sacrebleu.

    Args:
        words: What a word is, as sacrebleu names it: "none" splits at spaces, right for tokenised text; "13a" splits
            punctuation off, right for ordinary text; "char" takes characters.
    """

    def __init__(self, words: BleuWords) -> None:
        self._metric: Any = optional("sacrebleu.metrics").BLEU(tokenize=words, force=True)

    def scores(self, name: str, outputs: Sequence[str], references: Sequence[str]) -> dict[str, Score]:
        """Phrases in common and phrases in all, for each length, and the words of outputs and references."""
        found = self._metric.corpus_score(list(outputs), [list(references)])
        phrases = zip(found.counts, found.totals, strict=True)
        scores = {f"{name}:{n}": Score(amount=same, count=total) for n, (same, total) in enumerate(phrases, start=1)}
        return {**scores, f"{name}:{LENGTH_KEY}": Score(amount=found.sys_len, count=found.ref_len)}

    def value(self, name: str, scores: Mapping[str, Score]) -> float:
        """BLEU, from 0 to 100, of all that was added up under this name."""
        phrases = [scores[f"{name}:{n}"] for n in range(1, MAX_NGRAM + 1)]
        lengths = scores[f"{name}:{LENGTH_KEY}"]
        found = self._metric.compute_bleu(
            correct=[int(score.amount) for score in phrases],
            total=[int(score.count) for score in phrases],
            sys_len=int(lengths.amount),
            ref_len=int(lengths.count),
            smooth_method="exp",
        )
        return float(found.score)


def bleu_names(scores: Mapping[str, Score]) -> list[str]:
    """The names under which there is something to make a BLEU of."""
    return [key.removesuffix(f":{LENGTH_KEY}") for key in scores if key.endswith(f":{LENGTH_KEY}")]


def detect_bleu_words(references: Sequence[str]) -> BleuWords:
    """What a word is in these texts: "none" if punctuation stands alone, as in tokenised text, or else "13a"."""
    glued = sum(ATTACHED_PUNCTUATION.search(text) is not None for text in references)
    return "13a" if glued > MAX_ATTACHED_FRACTION * len(references) else "none"


def _target_pieces(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The true pieces (B, U) of as many steps as there are scores of; some rows of a batch may be shorter than all."""
    pieces_BT: torch.Tensor = batch.features_BTF[..., 1].masked_fill(~batch.mask, PAD)
    return pieces_BT[:, : output.shape[1]]


def _max_pieces(config: TranslateConfig, *, num_pairs: int) -> int:
    if config.vocabulary_size != "auto":
        return config.vocabulary_size
    return min(MAX_PIECES, max(2 * MIN_PIECES, num_pairs // PAIRS_PER_PIECE))


def _orient(pairs: LinePairs, config: TranslateConfig, *, name: str) -> LinePairs:
    """From the source that was asked for to the target."""
    if config.source is None and config.target is None:
        return pairs
    asked = f"from {config.source or 'any language'} to {config.target or 'any language'}"
    if pairs.languages is None:
        raise StrettoError(
            f"{name} does not name its languages, and a translation {asked} was asked for",
            fix="Leave --source and --target out.",
        )
    for turned in (pairs, pairs.swapped()):
        assert turned.languages is not None
        if config.source in (None, turned.languages[0]) and config.target in (None, turned.languages[1]):
            return turned
    raise StrettoError(
        f"{name} has {' and '.join(pairs.languages)}, and a translation {asked} was asked for",
        fix=f"Set --source and --target to {' and '.join(pairs.languages)}, in either order, or leave them out.",
    )


def _encode_pairs(data: SequenceSet, pairs: LinePairs, vocabulary: Vocabulary, *, note: str) -> SequenceSet:
    """Pieces of source and target as two features, as many steps as the longer has."""
    sources = vocabulary.encode(pairs.sources)
    targets = [[*pieces, END] for pieces in vocabulary.encode(pairs.targets)]
    for number, pieces in zip(data.numbers_N.tolist(), sources, strict=True):
        if not pieces:
            raise StrettoError(f"{data.name}: line {number} has no words", fix="Remove it and its translation.")
    lengths_N = [max(len(source), len(target)) for source, target in zip(sources, targets, strict=True)]
    offsets = np.cumsum([0, *lengths_N])
    pieces_S2 = np.full((offsets[-1], 2), PAD, dtype=np.min_scalar_type(vocabulary.size - 1))
    for start, source, target in zip(offsets.tolist(), sources, targets, strict=False):
        pieces_S2[start : start + len(source), 0] = source
        pieces_S2[start : start + len(target), 1] = target
    made = SequenceSet.from_flat(
        pieces_S2, offsets=offsets, split_N=data.split_N, split_complete=True, name=data.name, notes=(*data.notes, note)
    )
    return dataclasses.replace(made, numbers_N=data.numbers_N)
