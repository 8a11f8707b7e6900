"""BLEU as sums that add up over batches and workers."""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final, Literal, final

from stretto.extras import optional
from stretto.training import Score

LONGEST: Final = 4
"""Words of the longest phrases that are compared."""
LENGTH: Final = "length"
BleuWords = Literal["none", "13a", "char"]
GLUED: Final = re.compile(r"\w[.,!?](?:\s|$)")
TOKENISED_SHARE: Final = 0.01


@final
class Bleu:
    """Counts the phrases that translations and references share, by sacrebleu.

    Args:
        words: What a word is, as sacrebleu names it: "none" takes what stands between spaces, right for text that is
            split into words already; "13a" splits punctuation off, right for ordinary text; "char" takes characters.
    """

    def __init__(self, words: BleuWords) -> None:
        self._metric: Any = optional("sacrebleu.metrics").BLEU(tokenize=words, force=True)

    def scores(self, name: str, outputs: Sequence[str], references: Sequence[str]) -> dict[str, Score]:
        """Phrases in common and phrases in all, for each length, and the words of outputs and references."""
        found = self._metric.corpus_score(list(outputs), [list(references)])
        phrases = zip(found.counts, found.totals, strict=True)
        scores = {f"{name}:{n}": Score(amount=same, count=total) for n, (same, total) in enumerate(phrases, start=1)}
        return {**scores, f"{name}:{LENGTH}": Score(amount=found.sys_len, count=found.ref_len)}

    def value(self, name: str, scores: Mapping[str, Score]) -> float:
        """BLEU, from 0 to 100, of all that was added up under this name."""
        phrases = [scores[f"{name}:{n}"] for n in range(1, LONGEST + 1)]
        lengths = scores[f"{name}:{LENGTH}"]
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
    return [key.removesuffix(f":{LENGTH}") for key in scores if key.endswith(f":{LENGTH}")]


def fitting_words(references: Sequence[str]) -> BleuWords:
    """What a word is in these texts: "none" if punctuation stands alone, as in tokenised text, or else "13a"."""
    glued = sum(GLUED.search(text) is not None for text in references)
    return "13a" if glued > TOKENISED_SHARE * len(references) else "none"
