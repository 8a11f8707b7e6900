"""Sequences in: one type for a set of them, and its readers."""

from stretto.data.sequences import Sample as Sample
from stretto.data.sequences import SequenceSet as SequenceSet
from stretto.data.targets import Labels as Labels
from stretto.data.targets import NoTargets as NoTargets
from stretto.data.targets import StepLabels as StepLabels
from stretto.data.targets import Transcripts as Transcripts
