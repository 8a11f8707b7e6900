"""The backends, in the order in which "auto" tries them."""

from stretto.kernels.backends.base import register
from stretto.kernels.backends.cpp.backend import CppBackend
from stretto.kernels.backends.cudagraph import GraphBackend
from stretto.kernels.backends.eager import EagerBackend
from stretto.kernels.backends.plain import TorchBackend
from stretto.kernels.backends.triton.backend import TritonBackend

register(CppBackend())
register(TritonBackend())
register(GraphBackend())
register(EagerBackend())
register(TorchBackend())
