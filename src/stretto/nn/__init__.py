"""Layers that users put in a model."""

from stretto.nn.bidirectional_lstm import BidirectionalLSTM as BidirectionalLSTM
from stretto.nn.carried_state import CarriedState as CarriedState
from stretto.nn.carried_state import detach_state as detach_state
from stretto.nn.carried_state import reset_rows as reset_rows
from stretto.nn.reversal import reverse_padded as reverse_padded
from stretto.nn.rnn import RNN as RNN
from stretto.nn.standardise import Standardise as Standardise
from stretto.nn.streams import Chunk as Chunk
from stretto.nn.streams import Streams as Streams
from stretto.nn.truncated import Part as Part
from stretto.nn.truncated import TruncatedBPTT as TruncatedBPTT
