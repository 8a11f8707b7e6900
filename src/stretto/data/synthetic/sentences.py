"""The embedded text: sentences of a small grammar, generated from a seed.

Verbs agree with their subject across what lies between, a sentence that begins with a time has the tense of that time,
and the predicate fits the kind of subject: there is something to learn at every distance.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np

from stretto.data.readers.text import END, word_set
from stretto.data.sequences import PARTS, SequenceSet, part_sizes

PEOPLE: Final = (
    "baker captain child cook doctor driver farmer friend gardener guard judge king librarian mother nurse painter "
    "pilot poet queen sailor singer smith soldier student tailor teacher uncle visitor waiter writer"
).split(" ")
ANIMALS: Final = (
    "badger bear bird cat cow crow dog donkey duck eagle goat hare hawk horse otter owl pigeon rabbit raven seal "
    "spider swan tiger whale"
).split(" ")
THINGS: Final = (
    "apple basket bell boat book bottle bridge candle cart chair clock coat cup door drum flag garden gate hammer hat "
    "house kettle key ladder lamp letter map mirror needle painting pillow plate ring road rope shoe spoon table "
    "tower wheel"
).split(" ")
PLACES: Final = (
    "bay cabin castle cellar city field forest harbour hill island kitchen lake market meadow mountain office palace "
    "river school station street valley village"
).split(" ")
DOINGS: Final = {
    "people": "break build buy carry clean count describe draw find forget hide keep lose make mend need open paint "
    "praise sell send show steal want watch".split(" "),
    "animals": "bite chase follow guard hear move pull push reach smell touch watch".split(" "),
}
RESTING: Final = "arrive dream fall laugh listen rest run sing sleep stand wait walk".split(" ")
QUALITIES: Final = (
    "blue brave broken bright calm clever cold dark empty gentle green heavy hungry large little lonely lost narrow "
    "new old patient proud quick quiet red round sharp silent small strange strong tall tired warm wet white wise "
    "wooden yellow young"
).split(" ")
MANNERS: Final = "again alone at-once badly gladly often quietly quickly slowly soon together well".split(" ")
NEAR: Final = "above behind beside beyond in near under".split(" ")
PAST: Final = ("yesterday", "last-year", "once", "long-ago")
FUTURE: Final = ("tomorrow", "next-year", "one-day", "soon-enough")
IRREGULAR: Final = dict(
    pair.split(":")
    for pair in "bite:bit break:broke build:built buy:bought draw:drew fall:fell find:found forget:forgot hear:heard "
    "hide:hid keep:kept lose:lost make:made run:ran sell:sold send:sent sing:sang sleep:slept stand:stood "
    "steal:stole".split(" ")
)


def make_text(*, num_train: int = 5000, seed: int = 0) -> SequenceSet:
    """Write every sentence; a pure function of its arguments.

    Args:
        num_train: Training sentences; validation and test get a tenth as many each.
        seed: Everything follows from it.
    """
    counts = part_sizes(num_train, held_out=10)
    sentences = {
        part: [_Speaker(np.random.default_rng([seed, number, at])).sentence() for at in range(counts[number])]
        for number, part in enumerate(PARTS)
    }
    return word_set(sentences, name="made-text")


class _Speaker:
    """Says one sentence."""

    def __init__(self, rng: np.random.Generator) -> None:
        # One call for all that a sentence can need: drawing one number at a time is slow.
        self._draws = iter(rng.random(256).tolist())

    def sentence(self) -> list[str]:
        """Its words, `<eos>` among them."""
        chance = next(self._draws)
        if chance < 0.2:
            return [self._pick(PAST), *self._clause("past"), END]
        if chance < 0.4:
            return [self._pick(FUTURE), *self._clause("future"), END]
        if chance < 0.5:
            return [*self._clause("present"), "and", *self._clause("present"), END]
        return [*self._clause("present"), END]

    def _clause(self, tense: str) -> list[str]:
        kind = "people" if next(self._draws) < 0.7 else "animals"
        plural = next(self._draws) < 0.4
        subject = self._things(PEOPLE if kind == "people" else ANIMALS, plural=plural)
        if next(self._draws) < 0.25:
            subject += [self._pick(NEAR), *self._things(PLACES, plural=next(self._draws) < 0.3)]
        if next(self._draws) < 0.3:
            said = [self._verb(self._pick(RESTING), tense, plural=plural)]
        else:
            other = THINGS if kind == "people" else PEOPLE + ANIMALS
            verb = self._verb(self._pick(DOINGS[kind]), tense, plural=plural)
            said = [verb, *self._things(other, plural=next(self._draws) < 0.4)]
        if tense == "future":
            said = ["will", *said]
        return [*subject, *said, *([self._pick(MANNERS)] if next(self._draws) < 0.2 else [])]

    def _things(self, names: Sequence[str], *, plural: bool) -> list[str]:
        name = self._pick(names)
        which = self._pick(("the", "some", "many", "these")) if plural else self._pick(("the", "a", "every", "this"))
        qualities = [self._pick(QUALITIES)] if next(self._draws) < 0.35 else []
        return [which, *qualities, _plural(name) if plural else name]

    def _verb(self, verb: str, tense: str, *, plural: bool) -> str:
        if tense == "past":
            return IRREGULAR.get(verb) or (f"{verb}d" if verb.endswith("e") else f"{verb}ed")
        return verb if plural or tense == "future" else _plural(verb)

    def _pick(self, words: Sequence[str]) -> str:
        """Earlier words more often: frequencies are uneven, as in any text."""
        return words[int(len(words) * next(self._draws) ** 1.6)]


def _plural(word: str) -> str:
    """The plural of a noun; also the third person of a verb."""
    if word == "child":
        return "children"
    if word.endswith(("ch", "sh", "s", "x")):
        return f"{word}es"
    return f"{word[:-1]}ies" if word.endswith("y") and word[-2] not in "aeiou" else f"{word}s"
