"""The backends, in the order in which "auto" tries them."""

from stretto.kernels.backends.base import register
from stretto.kernels.backends.cpp.backend import CppBackend
from stretto.kernels.backends.eager import EagerBackend
from stretto.kernels.backends.plain import TorchBackend

register(CppBackend())
register(EagerBackend())
register(TorchBackend())
