"""Words as pieces: a vocabulary of sub-words that both languages share, learnt from text."""

from collections.abc import Sequence
from typing import Any, Final, final

from stretto.errors import StrettoError
from stretto.extras import optional

PAD: Final = 0
"""Behind the end of a text; no piece of any."""
BEGIN: Final = 1
END: Final = 2
MARKS: Final = ("<pad>", "<begin>", "<end>")
FEWEST_PIECES: Final = len(MARKS) + 256
"""The marks and every byte, so that there is nothing that cannot be spelt."""


@final
class Vocabulary:
    """Byte-pair encoding: bytes, and the pairs of pieces that were most often side by side, merged one after another.

    Text is given back exactly, but for spaces at its ends.

    Args:
        texts: What to learn from; the same texts in the same order make the same vocabulary.
        most_pieces: Its largest size, marks included.

    Attributes:
        size: Pieces and marks.

    Raises:
        StrettoError: The package tokenizers is missing, or there is no room for every byte.
    """

    def __init__(self, texts: Sequence[str], *, most_pieces: int) -> None:
        if most_pieces < FEWEST_PIECES:
            raise StrettoError(
                f"vocabulary_size is {most_pieces}, which has no room for every byte",
                fix=f"Set --vocabulary-size to {FEWEST_PIECES} or more.",
            )
        tokenizers = optional("tokenizers")
        bytewise = tokenizers.pre_tokenizers.ByteLevel
        self._pieces: Any = tokenizers.Tokenizer(tokenizers.models.BPE())
        self._pieces.pre_tokenizer = bytewise(add_prefix_space=True)
        self._pieces.decoder = tokenizers.decoders.ByteLevel()
        trainer = tokenizers.trainers.BpeTrainer(
            vocab_size=most_pieces,
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
