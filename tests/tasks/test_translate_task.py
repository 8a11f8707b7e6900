"""Translation: losses add up, BLEU is sacrebleu's, directions and vocabularies are as asked, and it learns.

Shape legend: B pairs, T steps, F features, P real target steps, C pieces.
"""

import math
from typing import Any

import numpy as np
import pytest
import sacrebleu
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from task_gradients import assert_padding_changes_nothing
from torch.nn import functional

from stretto.batching import Batch, collate
from stretto.data import LinePairs, SequenceSet, line_pairs, make_number_words, parallel_set
from stretto.distributed import World
from stretto.errors import StrettoError
from stretto.tasks import PAD, Translate, detect_bleu_words
from stretto.tasks.translate import (
    END,
    MARKS,
    MIN_PIECES,
    Bleu,
    BleuWords,
    TranslateConfig,
    TranslateModel,
    Vocabulary,
)
from stretto.training import Score, evaluate

TEXTS = [
    ("a man in a hat .", "ein mann mit hut ."),
    ("two dogs", "zwei hunde spielen im gras und rennen hin und her ."),
    ("a house by the sea with many old trees around it .", "ein haus"),
    ("a dog .", "ein hund ."),
    ("<end> of <pad>", "<begin> ende"),
    ("two men", "zwei männer"),
]


def _texts(languages: tuple[str, str] | None = ("en", "de")) -> SequenceSet:
    pairs = LinePairs(sources=[s for s, _ in TEXTS], targets=[t for _, t in TEXTS], languages=languages)
    return parallel_set(pairs, split_N=np.array([0, 0, 0, 0, 1, 2], dtype=np.uint8), name="captions")


def _task(data: SequenceSet | None = None, **settings: Any) -> Translate:
    wanted = {"hidden_size": 6, "dropout": 0.0, "vocabulary_size": 280, **settings}
    return Translate(TranslateConfig(**wanted), _texts() if data is None else data)


def _model(task: Translate) -> TranslateModel:
    torch.manual_seed(0)
    return task.build_model().double().eval()


def _batch(task: Translate, *indices: int) -> Batch:
    return collate([task.data[index] for index in indices or range(len(task.data))])


def test_a_pair_is_as_long_as_the_longer_of_its_texts() -> None:
    task = _task()
    for index, texts in enumerate(TEXTS):
        source, target = task.vocabulary.encode(texts)
        pieces_T2 = task.data[index].features_TF
        assert len(pieces_T2) == task.data.lengths_N[index] == max(len(source), len(target) + 1)
        assert [p for p in pieces_T2[:, 0].tolist() if p != PAD] == source
        assert [p for p in pieces_T2[:, 1].tolist() if p != PAD] == [*target, END]
    assert task.data.split_N.tolist() == [0, 0, 0, 0, 1, 2]


def test_batches_come_from_buckets_of_both_lengths() -> None:
    data = make_number_words(num_train=300)
    task = Translate(TranslateConfig(hidden_size=4, max_padded_steps=700, largest_first=True), data)
    train = task.data.part("train")
    lengths_N2 = task.bucket_lengths(train)
    encoded = [task.vocabulary.encode([text])[0] for text in line_pairs(data.part("train")).sources]
    assert lengths_N2[:, 0].tolist() == [len(pieces) for pieces in encoded]
    assert lengths_N2.max(axis=1).tolist() == train.lengths_N.tolist()
    assert task.num_elements(train) == lengths_N2[:, 1].sum()
    feed = task.feed(world=World())
    report, real, padded, sizes = feed.report(), 0, 0, list[int]()
    for batch in feed:
        assert batch.indices is not None
        rows = [task.data.numbers_N.tolist().index(number) for number in batch.indices.tolist()]
        sides_B2 = task.bucket_lengths(task.data)[rows]
        sizes.append(len(batch) * int(sides_B2.max(axis=0).sum()))
        assert task.count_steps(batch) == (sides_B2.sum(), sizes[-1])
        real, padded = real + int(sides_B2.sum()), padded + sizes[-1]
    assert max(sizes) == sizes[0] <= 700
    assert real == lengths_N2.sum()
    assert report["padding"] == pytest.approx(1 - real / padded)
    assert sum(feed.shares.values()) == pytest.approx(1.0)
    for edge in feed.shares:
        assert task.count_steps(feed.example(3, edge))[1] <= 3 * edge
    with pytest.raises(StrettoError, match="more than max_padded_steps"):
        Translate(TranslateConfig(hidden_size=4, max_padded_steps=20), data).feed(world=World())


def test_padding_changes_nothing() -> None:
    task = _task(label_smoothing=0.1)
    count = sum(len(pieces) + 1 for pieces in task.vocabulary.encode([target for _, target in TEXTS]))
    found = assert_padding_changes_nothing(task, count=count, rubbish=[task.vocabulary.size - 1], atol=1e-12)
    assert found.gradients.keys() == dict(task.build_model().named_parameters()).keys()


def test_rows_of_a_batch_have_their_share_of_its_loss() -> None:
    task = _task()
    batch = _batch(task)
    with torch.no_grad():
        output_BUC = _model(task)(batch)
    whole = task.loss(output_BUC, batch)
    halves = [task.loss(output_BUC[rows], batch.take(rows)) for rows in (slice(0, None, 2), slice(1, None, 2))]
    assert sum(half.count for half in halves) == whole.count
    assert sum(float(half.total) for half in halves) == pytest.approx(float(whole.total), rel=1e-12)


def test_smoothed_labels_give_every_piece_its_share() -> None:
    task = _task(label_smoothing=0.2)
    batch = _batch(task, 3)
    pieces = [*task.vocabulary.encode([TEXTS[3][1]])[0], END]
    output_PC = torch.randn(len(pieces), task.vocabulary.size, dtype=torch.float64)
    loss = task.loss(output_PC[None], batch)
    log_probs_PC = output_PC.log_softmax(dim=-1)
    right = sum(-float(log_probs_PC[place, piece]) for place, piece in enumerate(pieces))
    spread = -float(log_probs_PC.mean(dim=-1).sum())
    assert float(loss.total) == pytest.approx(0.8 * right + 0.2 * spread)


def test_scores_are_those_of_sacrebleu_over_all_batches() -> None:
    task = _task()
    model = _model(task)
    sums: dict[str, Score] = {}
    texts: list[str] = []
    for indices in ((0, 1), (2,), (3, 5)):
        batch = _batch(task, *indices)
        with torch.no_grad():
            output = model(batch)
        texts += [sample.output for sample in task.samples(output, batch)]
        for name, score in task.final_score(output, batch).items():
            sums[name] = sums[name] + score if name in sums else score
    references = [TEXTS[index][1] for index in (0, 1, 2, 3, 5)]
    found = task.summary(sums)
    assert found["bleu"] == pytest.approx(sacrebleu.corpus_bleu(texts, [references], tokenize="none").score)
    assert found["bleu"] == found["bleu_beam"]
    assert found.keys() == {"bleu", "bleu_beam", "bleu_greedy", "perplexity", "accuracy"}


SENTENCES = st.lists(st.sampled_from("a b c d, e. f".split()), max_size=9).map(" ".join)


@settings(deadline=None, max_examples=60)
@given(
    st.lists(st.lists(st.tuples(SENTENCES, SENTENCES.filter(bool)), min_size=1, max_size=4), min_size=1, max_size=4),
    st.sampled_from(["none", "13a", "char"]),
)
def test_bleu_of_batches_is_that_of_the_corpus(batches: list[list[tuple[str, str]]], words: BleuWords) -> None:
    bleu, sums = Bleu(words), dict[str, Score]()
    for batch in batches:
        for name, score in bleu.scores("bleu", [one for one, _ in batch], [other for _, other in batch]).items():
            sums[name] = sums[name] + score if name in sums else score
    outputs, references = ([pair[place] for batch in batches for pair in batch] for place in (0, 1))
    wanted = sacrebleu.corpus_bleu(outputs, [references], tokenize=words).score
    assert bleu.values(sums) == {"bleu": pytest.approx(wanted)}


def test_what_a_word_is_follows_from_the_text_and_is_shown() -> None:
    assert detect_bleu_words(["ein mann , ein hund .", "ja !"]) == "none"
    assert detect_bleu_words(["ein Mann, ein Hund.", "Ja!"]) == "13a"
    assert any("between spaces" in note and "none" in note for note in _task().data.notes)
    assert any("characters" in note for note in _task(bleu_words="char").data.notes)


def test_perplexity_and_accuracy_are_of_the_pieces_without_smoothing() -> None:
    task = _task(label_smoothing=0.3)
    model, batch = _model(task), _batch(task, 0, 1)
    with torch.no_grad():
        output_BUC = model(batch)
    lengths = [len(task.vocabulary.encode([TEXTS[index][1]])[0]) + 1 for index in (0, 1)]
    output_PC = torch.cat([output_BUC[row, :length] for row, length in enumerate(lengths)])
    pieces_P = torch.tensor(
        [piece for index in (0, 1) for piece in (*task.vocabulary.encode([TEXTS[index][1]])[0], END)]
    )
    found = task.summary(task.score(output_BUC, batch))
    nats = float(functional.cross_entropy(output_PC, pieces_P))
    assert found["perplexity"] == pytest.approx(math.exp(nats))
    assert found["accuracy"] == pytest.approx(float((output_PC.argmax(-1) == pieces_P).double().mean()))


def test_samples_have_the_references_of_any_rows_and_parts() -> None:
    task = _task()
    model, part = _model(task), task.data.part("test")
    for batch, wanted in ((_batch(task, 4, 1), [TEXTS[4][1], TEXTS[1][1]]), (collate([part[0]]), ["zwei männer"])):
        with torch.no_grad():
            assert [sample.target for sample in task.samples(model(batch), batch)] == wanted


def test_scores_of_another_model_are_refused() -> None:
    task = _task()
    batch = _batch(task)
    with pytest.raises(StrettoError, match="no model to translate with"):
        task.score(torch.zeros(len(TEXTS), 40, task.vocabulary.size), batch)
    first = _model(task)
    torch.manual_seed(1)
    task.build_model()
    with torch.no_grad(), pytest.raises(StrettoError, match="not of the model that translates"):
        task.score(first(batch).float(), batch)


@pytest.mark.parametrize(
    ("asked", "first"),
    [
        ({}, "a man in a hat ."),
        ({"source": "en"}, "a man in a hat ."),
        ({"source": "de"}, "ein mann mit hut ."),
        ({"target": "en"}, "ein mann mit hut ."),
        ({"source": "en", "target": "de"}, "a man in a hat ."),
    ],
)
def test_the_direction_is_as_asked(asked: dict[str, str], first: str) -> None:
    task = _task(**asked)
    pieces = [piece for piece in task.data[0].features_TF[:, 0].tolist() if piece != PAD]
    assert task.vocabulary.decode([pieces]) == [first]


def test_directions_that_the_data_do_not_have_and_small_vocabularies_are_refused() -> None:
    with pytest.raises(StrettoError, match="captions has en and de, and a translation from fr to any language"):
        _task(source="fr")
    with pytest.raises(StrettoError, match="from de to de was asked for"):
        _task(source="de", target="de")
    with pytest.raises(StrettoError, match=r"does not name its languages.*Leave --source and --target out"):
        _task(_texts(languages=None), source="en")
    assert _task(_texts(languages=None)).data.num_features == 2
    with pytest.raises(StrettoError, match=f"vocabulary_size is 200.*{MIN_PIECES} or more"):
        _task(vocabulary_size=200)


@settings(deadline=None, max_examples=60)
@given(st.lists(st.text(st.characters(codec="utf-8")), min_size=1, max_size=5))
def test_pieces_give_any_text_back(texts: list[str]) -> None:
    vocabulary = Vocabulary.learn([text for pair in TEXTS for text in pair], max_pieces=300)
    rows = vocabulary.encode(texts)
    assert vocabulary.decode(rows) == [text.strip() for text in texts]
    assert all(len(MARKS) <= piece < vocabulary.size for row in rows for piece in row)


def test_the_same_text_makes_the_same_vocabulary() -> None:
    data = make_number_words(num_train=200)
    made = [_task(data, vocabulary_size=400).data for _ in range(3)]
    assert len({data.digest() for data in made}) == 1


def test_the_vocabulary_is_learned_from_the_training_part_alone() -> None:
    data = _texts()
    pairs = line_pairs(data)
    other = LinePairs(
        sources=[*pairs.sources[:4], "xyzzy xyzzy", "xyzzy"], targets=[*pairs.targets[:4], "xyzzy", "x"], languages=None
    )
    changed = _task(parallel_set(other, split_N=data.split_N, name="captions"))
    texts = [text for pair in TEXTS for text in pair]
    assert changed.vocabulary.encode(texts) == _task().vocabulary.encode(texts)


@pytest.mark.slow
def test_it_learns_numbers() -> None:
    data = make_number_words(num_train=60)
    task = _task(data, hidden_size=32, vocabulary_size=300)
    torch.manual_seed(0)
    model, part = task.build_model(), task.data.part("train")
    short = np.argsort(part.lengths_N, kind="stable")[:24]
    batch = collate([part[index] for index in short.tolist()])
    optimiser = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(120):
        loss = task.loss(model(batch), batch)
        optimiser.zero_grad()
        torch.autograd.backward(loss.total / loss.count)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimiser.step()
        losses.append(loss.total.item() / loss.count)
    assert losses[-1] < 0.4 * losses[0]
    measured = evaluate(task, model, part.subset(short), device="cpu", final=True)
    assert measured.metrics["bleu"] > 80.0
    assert measured.metrics["accuracy"] > 0.9
