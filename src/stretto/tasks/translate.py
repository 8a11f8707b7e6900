"""Translation: a line in one language in, the same line in another out, by an encoder and a decoder after GNMT.

Shape legend: N pairs, S source steps or steps of all pairs, B pairs of a batch, T steps of the longest text, U target
steps, R rows that are decoded, K translations kept of each, L pieces so far, H units, C pieces of the vocabulary;
`...` is (B, U) in training and (R,) in decoding.
"""

import copy
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal, final

import numpy as np
import numpy.typing as npt
import torch
from pydantic import Field
from torch import nn
from torch.nn import functional
from typing_extensions import Self

from stretto.batching import Batch
from stretto.data import (
    PARTS,
    LinePairs,
    NoTargets,
    SequenceSet,
    Transcripts,
    decode_text,
    line_pairs,
    make_number_words,
    parallel_set,
)
from stretto.errors import StrettoError
from stretto.extras import optional
from stretto.nn import Attention, Dropout, linear_cross_entropy, run_ragged
from stretto.tasks.language_model import NATS_DIMS, perplexity
from stretto.tasks.recurrent import make_lstm
from stretto.training import AbstractTask, Count, LossSum, Positive, Sample, Score, Share, TrainConfig

States = list[tuple[torch.Tensor, torch.Tensor]]
Memory = tuple[torch.Tensor, torch.Tensor]
"""The encoder's outputs (B, S, H) for the sources, and which of their steps (B, S) are real."""
PAD: Final = 0
"""Behind the end of a text; no piece of any."""
BEGIN: Final = 1
END: Final = 2
MARKS: Final = ("<pad>", "<begin>", "<end>")
MAX_LENGTH_RATIO: Final = 2.0
EXTRA_PIECES: Final = 10
"""A translation has at most twice the pieces of its source and these."""
LENGTH_POWER: Final = 0.6
"""How much a longer translation is forgiven its smaller probability, as in GNMT."""
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


def split_sides(batch: Batch) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Pieces (B, S) of the sources and (B, U) of the targets, each with the texts' lengths.

    The two lie side by side in the features of a pair; each text ends at its first `PAD`.
    """
    pieces_BT2 = batch.features_BTF.masked_fill(~batch.mask[..., None], PAD)
    lengths_2B = (pieces_BT2 != PAD).sum(dim=1).cpu().unbind(dim=1)
    return [(pieces_BT2[:, : int(lengths.max()), side], lengths) for side, lengths in enumerate(lengths_2B)]


@final
class TranslateModel(nn.Module):
    """Source pieces encoded in both directions, and target pieces one after another, each attending to the source.

    The decoder's bottom layer has the piece before as its only input, so that in training all target steps attend at
    once. The layers above get what was attended to beside the layer below. All layers but the bottom ones add their
    input to their output.
    """

    def __init__(self, num_pieces: int, config: TranslateConfig) -> None:
        super().__init__()
        size = config.hidden_size
        if size % 2:
            raise StrettoError(
                f"hidden_size is {size}, which two directions cannot share", fix="Choose an even --hidden-size."
            )
        self.embed = nn.Embedding(num_pieces, size)
        nn.init.normal_(self.embed.weight, std=size**-0.5)
        self.both_ways = make_lstm(size, size // 2, num_layers=1, bidirectional=True, config=config)
        above = range(config.num_layers - 1)
        self.encoder = nn.ModuleList(make_lstm(size, size, num_layers=1, config=config) for _ in above)
        self.bottom = make_lstm(size, size, num_layers=1, config=config)
        self.attention = Attention(size)
        self.decoder = nn.ModuleList(make_lstm(2 * size, size, num_layers=1, config=config) for _ in above)
        if not above:
            # Without a layer above, what is attended to goes to the output straight away.
            self.join = nn.Linear(2 * size, size)
        self.dropout = Dropout(config.dropout)
        self.label_smoothing = config.label_smoothing
        self.output_bias = nn.Parameter(torch.zeros(num_pieces))
        self.output_weight = None if config.tie_output else nn.Parameter(torch.empty(num_pieces, size))
        if self.output_weight is not None:
            nn.init.normal_(self.output_weight, std=size**-0.5)

    def forward(self, batch: Batch) -> torch.Tensor:
        """Scores (B, U, C) of the target steps, each given the true pieces before it; not defined after an end.

        In training the losses (B, U) of the true pieces, with smoothed labels, zero after an end.
        """
        source, (target_BU, lengths) = split_sides(batch)
        memory = self.encode(*source)
        before_BU = torch.cat([torch.full_like(target_BU[:, :1], BEGIN), target_BU[:, :-1]], dim=1)
        hidden_BUH = run_ragged(self.bottom, self._embed_pieces(before_BU), lengths)
        context_BUH = self.attention(hidden_BUH, *memory)
        for layer in self.decoder:
            assert isinstance(layer, nn.LSTM)
            both_BUF = self.dropout(torch.cat([hidden_BUH, context_BUH], dim=-1))
            hidden_BUH = hidden_BUH + run_ragged(layer, both_BUF, lengths)
        if not self.training:
            return self._scores(hidden_BUH, context_BUH)
        return linear_cross_entropy(
            self._join(hidden_BUH, context_BUH),
            self._output_weight(),
            self.output_bias,
            target_BU,
            ignore_index=PAD,
            label_smoothing=self.label_smoothing,
        )

    def encode(self, source_BS: torch.Tensor, lengths: torch.Tensor) -> Memory:
        """What the decoder attends to."""
        hidden_BSH = run_ragged(self.both_ways, self._embed_pieces(source_BS), lengths)
        for layer in self.encoder:
            assert isinstance(layer, nn.LSTM)
            hidden_BSH = hidden_BSH + run_ragged(layer, self.dropout(hidden_BSH), lengths)
        return hidden_BSH, source_BS != PAD

    def begin(self, num_rows: int) -> States:
        """The decoder's states before the first step."""
        zeros_RH = self.embed.weight.new_zeros(num_rows, self.embed.embedding_dim)
        return [(zeros_RH, zeros_RH) for _ in range(1 + len(self.decoder))]

    def step(self, before_R: torch.Tensor, states: States, memory: Memory) -> tuple[torch.Tensor, States]:
        """Scores (R, C) of the next piece and the states after it, given the piece before; a row for each source."""
        after = [_lstm_step(self.bottom, self._embed_pieces(before_R), states[0])]
        hidden_RH = after[0][0]
        context_RH = self.attention(hidden_RH[:, None], *memory)[:, 0]
        for layer, state in zip(self.decoder, states[1:], strict=True):
            assert isinstance(layer, nn.LSTM)
            after.append(_lstm_step(layer, self.dropout(torch.cat([hidden_RH, context_RH], dim=-1)), state))
            hidden_RH = hidden_RH + after[-1][0]
        return self._scores(hidden_RH, context_RH), after

    def _embed_pieces(self, pieces: torch.Tensor) -> torch.Tensor:
        """Inputs of unit size, whereas as weights of the output the same numbers have to be small."""
        inputs: torch.Tensor = self.dropout(self.embed(pieces) * self.embed.embedding_dim**0.5)
        return inputs

    def _scores(self, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """Scores (..., C) from the decoder's output (..., H) and what was attended to."""
        return functional.linear(self._join(hidden, context), self._output_weight(), self.output_bias)

    def _join(self, hidden: torch.Tensor, context: torch.Tensor) -> torch.Tensor:
        """What the output layer gets."""
        if not self.decoder:
            hidden = self.join(torch.cat([hidden, context], dim=-1)).tanh()
        joined: torch.Tensor = self.dropout(hidden)
        return joined

    def _output_weight(self) -> torch.Tensor:
        return self.embed.weight if self.output_weight is None else self.output_weight


def _lstm_step(
    lstm: nn.LSTM, x_RF: torch.Tensor, state: tuple[torch.Tensor, torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of a layer."""
    weights = [lstm.get_parameter(f"{name}_l0") for name in ("weight_ih", "weight_hh", "bias_ih", "bias_hh")]
    return torch.lstm_cell(x_RF, state, *weights)


@final
class Translate(AbstractTask[TranslateConfig]):
    """Lines in two languages, translated from one to the other and measured in BLEU.

    The pieces of a line and of its translation lie side by side as the two features of a pair, `PAD` after the end of
    the shorter one. Buckets are cut by both lengths, the translation counted with its end mark, and padded steps are
    those of both sides. The vocabulary is learned from the training part.

    Translating takes the model, so `score` and `samples` use the one that `build_model` made last; they refuse scores
    of another.

    Attributes:
        vocabulary: The pieces that both languages share.
    """

    name = "translate"
    Config = TranslateConfig
    metric = "bleu"
    higher_is_better = True

    def __init__(self, config: TranslateConfig, data: SequenceSet) -> None:
        pairs = _orient(line_pairs(data), config, name=data.name)
        trained = np.flatnonzero(data.split_N == PARTS.index("train")).tolist()
        texts = [text for side in (pairs.sources, pairs.targets) for text in (side[index] for index in trained)]
        default_size = min(MAX_PIECES, max(2 * MIN_PIECES, len(trained) // PAIRS_PER_PIECE))
        size = default_size if config.vocabulary_size == "auto" else config.vocabulary_size
        vocabulary = Vocabulary.learn(texts, max_pieces=size)
        words = config.bleu_words
        chosen = detect_bleu_words([pairs.targets[index] for index in trained]) if words == "auto" else words
        self._set_data(config, data, pairs, vocabulary=vocabulary, words=chosen)

    def _set_data(
        self,
        config: TranslateConfig,
        data: SequenceSet,
        pairs: LinePairs,
        *,
        vocabulary: "Vocabulary",
        words: BleuWords,
    ) -> None:
        self.vocabulary, self._words, self._bleu = vocabulary, words, Bleu(words)
        self._references = dict(zip(data.numbers_N.tolist(), pairs.targets, strict=True))
        self._model: TranslateModel | None = None
        note = f"BLEU compares {BLEU_WORD_NAMES[words]} (sacrebleu's {words})"
        super().__init__(config, _encode_pairs(data, pairs, vocabulary, note=note))

    @classmethod
    def embedded_data(cls) -> SequenceSet:
        """Numbers in words, from English to German."""
        return make_number_words()

    def build_model(self) -> TranslateModel:
        """A new model."""
        self._model = TranslateModel(self.vocabulary.size, self.config)
        return self._model

    def loss(self, output: torch.Tensor, batch: Batch) -> LossSum:
        """Cross-entropy with smoothed labels, counted in target pieces and end marks."""
        pieces_BU = _select_targets(output, batch)
        count = int((pieces_BU != PAD).sum())
        if output.dim() == NATS_DIMS:
            return LossSum(total=output.sum(), count=count)
        total = functional.cross_entropy(
            output.flatten(0, 1),
            pieces_BU.flatten(),
            ignore_index=PAD,
            reduction="sum",
            label_smoothing=self.config.label_smoothing,
        )
        return LossSum(total=total, count=count)

    def bucket_lengths(self, part: SequenceSet) -> npt.NDArray[np.int64]:
        """The lengths (N, 2) of source and target; where only one is known, it has at least one step."""
        before_S2 = np.concatenate([np.zeros((1, 2), np.int64), np.cumsum(part.features_SF != PAD, axis=0)])
        lengths_N2: npt.NDArray[np.int64] = before_S2[part.starts_N + part.lengths_N] - before_S2[part.starts_N]
        return np.maximum(1, lengths_N2)

    def count_steps(self, batch: Batch) -> tuple[int, int]:
        """Pieces of source and target, and those that both are padded to."""
        if not len(batch):
            return 0, 0
        sides = split_sides(batch)
        return sum(int(lengths.sum()) for _, lengths in sides), sum(pieces.numel() for pieces, _ in sides)

    def num_elements(self, part: SequenceSet) -> int:
        """Target pieces and end marks."""
        return int(self.bucket_lengths(part)[:, 1].sum())

    def score(self, output: torch.Tensor, batch: Batch) -> dict[str, Score]:
        """Nats, pieces predicted right, and the counts for BLEU of greedy translations."""
        texts = self._translate(output, batch, width=1)
        return {
            **self._score_guesses(output, batch),
            **self._bleu.scores(self.metric, texts, self._references_of(batch)),
        }

    def final_score(self, output: torch.Tensor, batch: Batch) -> dict[str, Score]:
        """The same for both decoders; `bleu` is the chosen one's."""
        found = self._score_guesses(output, batch)
        for decoder, width in (("greedy", 1), ("beam", self.config.beam_width)):
            texts = self._translate(output, batch, width=width)
            names = [f"{self.metric}_{decoder}", *([self.metric] if decoder == self.config.decoder else [])]
            for name in names:
                found |= self._bleu.scores(name, texts, self._references_of(batch))
        return found

    def summary(self, scores: dict[str, Score]) -> dict[str, float]:
        """BLEU from 0 to 100, the perplexity of a piece, and the share of pieces guessed right given those before."""
        return {
            **self._bleu.values(scores),
            "perplexity": perplexity(scores["nats"]),
            "accuracy": scores["accuracy"].ratio,
        }

    def samples(self, output: torch.Tensor, batch: Batch) -> list[Sample]:
        """References and translations."""
        width = self.config.beam_width if self.config.decoder == "beam" else 1
        texts = self._translate(output, batch, width=width)
        return [
            Sample(target=reference, output=text)
            for reference, text in zip(self._references_of(batch), texts, strict=True)
        ]

    def preprocessing(self) -> dict[str, Any]:
        """The vocabulary, and what BLEU takes for a word."""
        return {"vocabulary": self.vocabulary.to_json(), "bleu_words": self._words}

    @classmethod
    def restore(cls, config: TranslateConfig, data: SequenceSet, preprocessing: dict[str, Any]) -> Self:
        """The task with the vocabulary that it was trained with."""
        task = cls.__new__(cls)
        AbstractTask.__init__(task, config, data)
        task.vocabulary, task._words = Vocabulary(preprocessing["vocabulary"]), preprocessing["bleu_words"]
        task._bleu, task._references, task._model = Bleu(task._words), {}, None
        return task

    def open(self, path: Path) -> SequenceSet:
        """Read parallel text, or a file of lines to translate."""
        if path.is_dir() or path.suffix in (".npz", ".parquet", ".arrow", ".feather"):
            return super().open(path)
        lines = [line.strip() for line in decode_text(path).split("\n")]
        return dataclasses.replace(self.from_texts([line for line in lines if line]), name=path.name)

    def from_texts(self, texts: Sequence[str]) -> SequenceSet:
        """Lines to translate."""
        if not texts or not all(text.strip() for text in texts):
            raise StrettoError("there is an empty line, or no line at all", fix="Give lines with words.")
        pairs = LinePairs(sources=list(texts), targets=[""] * len(texts), languages=None)
        made = parallel_set(pairs, split_N=None, name="texts")
        return dataclasses.replace(made, targets=NoTargets(count=len(made)), notes=())

    def with_data(self, data: SequenceSet, *, targets: bool = True) -> Self:
        """Lines encoded with the vocabulary of the model; without references, each has an empty one."""
        is_source = isinstance(data.targets, NoTargets)
        if is_source and targets:
            raise StrettoError(f"{data.name} has no translations", fix="Give a folder of parallel text.")
        if is_source:
            data = dataclasses.replace(data, targets=Transcripts.of([""] * len(data)))
        pairs = line_pairs(data) if is_source else _orient(line_pairs(data), self.config, name=data.name)
        task, model = copy.copy(self), self._model
        task._set_data(self.config, data, pairs, vocabulary=self.vocabulary, words=self._words)
        task._model = model
        return task

    def predict(self, model: nn.Module, batch: Batch) -> list[dict[str, Any]]:
        """The translation of each line, by the decoder of the settings."""
        assert isinstance(model, TranslateModel)
        pieces, _ = search(model, batch, width=self.config.beam_width if self.config.decoder == "beam" else 1)
        return [{"translation": text} for text in self.vocabulary.decode(pieces)]

    def _score_guesses(self, output: torch.Tensor, batch: Batch) -> dict[str, Score]:
        pieces_BU = _select_targets(output, batch)
        real_BU = pieces_BU != PAD
        nats = functional.cross_entropy(output.flatten(0, 1), pieces_BU.flatten(), ignore_index=PAD, reduction="sum")
        right_BU = (output.argmax(dim=-1) == pieces_BU) & real_BU
        count = int(real_BU.sum())
        return {
            "nats": Score(amount=float(nats), count=count),
            "accuracy": Score(amount=int(right_BU.sum()), count=count),
        }

    def _references_of(self, batch: Batch) -> list[str]:
        assert batch.indices is not None
        return [self._references[number] for number in batch.indices.tolist()]

    def _translate(self, output: torch.Tensor, batch: Batch, *, width: int) -> list[str]:
        if self._model is None:
            raise StrettoError("there is no model to translate with", fix="Call build_model() first.")
        was_training = self._model.training
        self._model.eval()
        try:
            pieces, first_BC = search(self._model, batch, width=width)
        finally:
            self._model.train(was_training)
        # The first piece is scored before any is chosen, so the decoder must score it as the model did.
        given_BC = output[:, 0]
        allowed = FIRST_SCORE_TOLERANCE * float(given_BC.abs().max())
        if not torch.allclose(given_BC, first_BC, rtol=FIRST_SCORE_TOLERANCE, atol=allowed):
            raise StrettoError(
                "these scores are not of the model that translates, in evaluation mode",
                fix="Measure the model that build_model() made last, after model.eval().",
            )
        return self.vocabulary.decode(pieces)


@torch.no_grad()
def search(model: TranslateModel, batch: Batch, *, width: int = 1) -> tuple[list[list[int]], torch.Tensor]:
    """Translate the sources of a batch: beam search, which is greedy if one translation is kept.

    A translation that has ended stays among the kept ones and competes by its probability; in the end the best is the
    one of highest log-probability over ((5 + length) / 6) ^ 0.6.

    Args:
        model: In evaluation mode.
        batch: Pairs; their targets are not used.
        width: Translations that are kept of each source at every step.

    Returns:
        The pieces of each translation, without the end mark, and the scores (B, C) of the first piece.
    """
    source_BS, source_lengths = split_sides(batch)[0]
    memory = model.encode(source_BS, source_lengths)
    count, device = len(batch), source_BS.device
    translations: list[list[int]] = [[] for _ in range(count)]
    # B counts the sources that are not done yet; each has K rows among the R = B * K of `states` and `memory`.
    source_B = torch.arange(count, device=device)
    limit_B = (source_lengths * MAX_LENGTH_RATIO + EXTRA_PIECES).long().to(device)
    pieces_BKL = torch.full((count, width, 1), BEGIN, device=device)
    ended_BK = torch.zeros(count, width, dtype=torch.bool, device=device)
    total_BK = memory[0].new_full((count, width), -torch.inf)
    # All begin alike: one of them is enough.
    total_BK[:, 0] = 0.0
    states, memory = model.begin(count * width), _select_rows(memory, source_B.repeat_interleave(width))
    first_BC = None
    while len(source_B):
        scores_RC, states = model.step(pieces_BKL[..., -1].flatten(), states, memory)
        first_BC = scores_RC[::width] if first_BC is None else first_BC

        # Keep the best of all that could follow; after the end there is padding, which costs nothing.
        gains_BKC = scores_RC.log_softmax(dim=-1).reshape(-1, width, scores_RC.shape[1])
        gains_BKC[..., [PAD, BEGIN]] = -torch.inf
        gains_BKC = gains_BKC.masked_fill(ended_BK[..., None], -torch.inf)
        gains_BKC[..., PAD] = torch.where(ended_BK, 0.0, -torch.inf)
        total_BK, best_BK = (total_BK[..., None] + gains_BKC).flatten(1).topk(width, dim=1)
        parent_BK, piece_BK = best_BK // scores_RC.shape[1], best_BK % scores_RC.shape[1]
        pieces_BKL = torch.cat([pieces_BKL.take_along_dim(parent_BK[..., None], dim=1), piece_BK[..., None]], dim=2)
        ended_BK = (piece_BK == END) | (piece_BK == PAD)
        row_BK = torch.arange(len(source_B), device=device)[:, None] * width + parent_BK

        # Store the translations of sources that are done, and continue without these.
        done_B = ended_BK.all(dim=1) | (limit_B < pieces_BKL.shape[2])
        if bool(done_B.any()):
            lengths_BK = (pieces_BKL[..., 1:] != PAD).sum(dim=2)
            chosen_B = (total_BK / ((5.0 + lengths_BK) / 6.0) ** LENGTH_POWER).argmax(dim=1)
            for place in done_B.nonzero().flatten().tolist():
                row = pieces_BKL[place, chosen_B[place], 1:].tolist()
                translations[int(source_B[place])] = [piece for piece in row if piece not in (PAD, END)]
            source_B, limit_B, pieces_BKL = source_B[~done_B], limit_B[~done_B], pieces_BKL[~done_B]
            total_BK, ended_BK, row_BK = total_BK[~done_B], ended_BK[~done_B], row_BK[~done_B]
            memory = _select_rows(memory, row_BK.flatten())
        states = [_select_rows(state, row_BK.flatten()) for state in states]
    assert first_BC is not None
    return translations, first_BC


def _select_rows(pair: tuple[torch.Tensor, torch.Tensor], rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return pair[0][rows], pair[1][rows]


@final
class Vocabulary:
    """Byte-pair encoding: bytes, and the pairs of pieces that were most often side by side, merged one after another.

    Text is given back exactly, but for spaces at its ends.

    Args:
        pieces: As `to_json` wrote it.

    Attributes:
        size: Pieces and marks.
    """

    def __init__(self, pieces: str) -> None:
        self._pieces: Any = optional("tokenizers").Tokenizer.from_str(pieces)
        # What looks like a mark in a text is text.
        self._pieces.encode_special_tokens = True
        self.size: int = self._pieces.get_vocab_size()

    @classmethod
    def learn(cls, texts: Sequence[str], *, max_pieces: int) -> "Vocabulary":
        """Learn from texts; the same texts in the same order make the same vocabulary.

        Args:
            texts: What to learn from.
            max_pieces: Its largest size, marks included.

        Raises:
            StrettoError: The package tokenizers is missing, or there is no room for every byte.
        """
        if max_pieces < MIN_PIECES:
            raise StrettoError(
                f"vocabulary_size is {max_pieces}, which has no room for every byte",
                fix=f"Set --vocabulary-size to {MIN_PIECES} or more.",
            )
        tokenizers = optional("tokenizers")
        bytewise = tokenizers.pre_tokenizers.ByteLevel
        pieces = tokenizers.Tokenizer(tokenizers.models.BPE())
        pieces.pre_tokenizer = bytewise(add_prefix_space=True)
        pieces.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=max_pieces,
            min_frequency=2,
            special_tokens=list(MARKS),
            initial_alphabet=sorted(bytewise.alphabet()),
            show_progress=False,
        )
        pieces.train_from_iterator(texts, trainer)
        return cls(pieces.to_str())

    def to_json(self) -> str:
        """The vocabulary as JSON."""
        return str(self._pieces.to_str())

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

    def values(self, scores: Mapping[str, Score]) -> dict[str, float]:
        """BLEU, from 0 to 100, of all that was added up under each name."""
        found = {}
        for name in (key.removesuffix(f":{LENGTH_KEY}") for key in scores if key.endswith(f":{LENGTH_KEY}")):
            phrases = [scores[f"{name}:{n}"] for n in range(1, MAX_NGRAM + 1)]
            lengths = scores[f"{name}:{LENGTH_KEY}"]
            bleu = self._metric.compute_bleu(
                correct=[int(score.amount) for score in phrases],
                total=[int(score.count) for score in phrases],
                sys_len=int(lengths.amount),
                ref_len=int(lengths.count),
                smooth_method="exp",
            )
            found[name] = float(bleu.score)
        return found


def detect_bleu_words(references: Sequence[str]) -> BleuWords:
    """What a word is in these texts: "none" if punctuation stands alone, as in tokenised text, or else "13a"."""
    glued = sum(ATTACHED_PUNCTUATION.search(text) is not None for text in references)
    return "13a" if glued > MAX_ATTACHED_FRACTION * len(references) else "none"


def _select_targets(output: torch.Tensor, batch: Batch) -> torch.Tensor:
    """The true pieces (B, U) of as many steps as there are scores of; some rows of a batch may be shorter than all."""
    pieces_BT: torch.Tensor = batch.features_BTF[..., 1].masked_fill(~batch.mask, PAD)
    return pieces_BT[:, : output.shape[1]]


def _orient(pairs: LinePairs, config: TranslateConfig, *, name: str) -> LinePairs:
    """From the source that was asked for to the target."""
    for turned in (pairs, pairs.swapped()):
        source, target = turned.languages or (None, None)
        if config.source in (None, source) and config.target in (None, target):
            return turned
    asked = f"from {config.source or 'any language'} to {config.target or 'any language'}"
    if pairs.languages is None:
        raise StrettoError(
            f"{name} does not name its languages, and a translation {asked} was asked for",
            fix="Leave --source and --target out.",
        )
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
