"""Layers that users put in a model."""

from stretto.nn.bidirectional_lstm import BidirectionalLSTM as BidirectionalLSTM
from stretto.nn.reversal import reverse_padded as reverse_padded
from stretto.nn.standardise import Standardise as Standardise
