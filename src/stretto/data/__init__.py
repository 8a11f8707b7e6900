"""Sequences in: one type for a set of them, and its readers."""

from stretto.data.drawn_digits import load_drawn_digits
from stretto.data.frames import LARGEST_FRAME, SMALLEST_FRAME, Framing
from stretto.data.handwriting import HandwritingSettings, load_handwriting
from stretto.data.made_text import make_text
from stretto.data.npz import write_npz
from stretto.data.number_words import make_number_words
from stretto.data.opening import open_sequences
from stretto.data.parallel_text import LinePairs, line_pairs
from stretto.data.regimes import RegimeSettings, make_regimes
from stretto.data.runs import cut_runs
from stretto.data.sequences import PARTS, Part, Sample, SequenceSet
from stretto.data.targets import AbstractTargets, Labels, NoTargets, StepLabels, Transcripts
from stretto.data.word_text import read_word_text

__all__ = [
    "LARGEST_FRAME",
    "PARTS",
    "SMALLEST_FRAME",
    "AbstractTargets",
    "Framing",
    "HandwritingSettings",
    "Labels",
    "LinePairs",
    "NoTargets",
    "Part",
    "RegimeSettings",
    "Sample",
    "SequenceSet",
    "StepLabels",
    "Transcripts",
    "cut_runs",
    "line_pairs",
    "load_drawn_digits",
    "load_handwriting",
    "make_number_words",
    "make_regimes",
    "make_text",
    "open_sequences",
    "read_word_text",
    "write_npz",
]
