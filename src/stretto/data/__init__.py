"""Sequences in: one type for a set of them, readers of files, and data sets generated from a seed."""

from stretto.data.form import DataForm
from stretto.data.memory import from_arrow, from_pandas, from_polars, from_tensors
from stretto.data.open import open_sequences
from stretto.data.readers.ink import line_features, pen_features, read_iam, read_inkml
from stretto.data.readers.npz import read_npz, write_npz
from stretto.data.readers.parallel_text import LinePairs, line_pairs, parallel_set, read_parallel_text
from stretto.data.readers.parquet import read_parquet
from stretto.data.readers.text import UNKNOWN, decode_text, number_characters, read_text, read_word_text
from stretto.data.readers.video import LARGEST_FRAME, SMALLEST_FRAME, Framing, read_clips
from stretto.data.sequences import PARTS, Part, Sample, SequenceSet, cut_runs, part_of
from stretto.data.synthetic.digits import load_drawn_digits, make_drawn_digits
from stretto.data.synthetic.handwriting import load_handwriting, make_handwriting
from stretto.data.synthetic.number_words import make_number_words
from stretto.data.synthetic.regimes import make_regimes
from stretto.data.synthetic.sentences import make_text
from stretto.data.targets import NO_CLASS, AbstractTargets, Labels, NoTargets, StepLabels, Transcripts

__all__ = [
    "LARGEST_FRAME",
    "NO_CLASS",
    "PARTS",
    "SMALLEST_FRAME",
    "UNKNOWN",
    "AbstractTargets",
    "DataForm",
    "Framing",
    "Labels",
    "LinePairs",
    "NoTargets",
    "Part",
    "Sample",
    "SequenceSet",
    "StepLabels",
    "Transcripts",
    "cut_runs",
    "decode_text",
    "from_arrow",
    "from_pandas",
    "from_polars",
    "from_tensors",
    "line_features",
    "line_pairs",
    "load_drawn_digits",
    "load_handwriting",
    "make_drawn_digits",
    "make_handwriting",
    "make_number_words",
    "make_regimes",
    "make_text",
    "number_characters",
    "open_sequences",
    "parallel_set",
    "part_of",
    "pen_features",
    "read_clips",
    "read_iam",
    "read_inkml",
    "read_npz",
    "read_parallel_text",
    "read_parquet",
    "read_text",
    "read_word_text",
    "write_npz",
]
