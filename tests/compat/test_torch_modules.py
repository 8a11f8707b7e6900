"""torch's own database of modules, which comes with its wheel: every sample of its recurrent layers, accelerated."""

import copy
import functools
import pickle
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from itertools import product
from typing import Any

import pytest
import torch
from compat_cases import BACKENDS, assert_same, gradients, in_double, loss_of, tensors_of
from torch import nn
from torch.autograd import gradcheck, gradgradcheck
from torch.testing._internal.common_modules import module_db
from torch.utils import _pytree as pytree

import stretto

# The import above forbids to set flags such as torch.backends.mkldnn.enabled; other tests may want to.
torch.backends.__allow_nonbracketed_mutation_flag = True

LAYERS = {info.name: info for info in module_db if info.module_cls in {nn.RNN, nn.GRU, nn.LSTM}}
DTYPES = {"float32": torch.float32, "float64": torch.float64}
pytestmark = pytest.mark.usefixtures("quick_compiler")

Module = Any
Call = tuple[tuple[Any, ...], dict[str, Any]]


def _samples(info: Any, dtype: torch.dtype, *, training: bool = True) -> Iterator[tuple[nn.Module, Call]]:
    """A plain module and what it is called with, for each sample."""
    torch.manual_seed(0)
    for sample in info.module_inputs_func(info, device="cpu", dtype=dtype, requires_grad=True, training=training):
        options = sample.constructor_input
        module = info.module_cls(*options.args, **{**options.kwargs, "dtype": dtype}).train(training)
        yield module, (sample.forward_input.args, sample.forward_input.kwargs)


def _leaves(call: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]


def _run(module: Module, call: Call) -> Any:
    """Result, gradients of parameters and of inputs, and which of the gradients are contiguous."""
    args, names = pytree.tree_map_only(torch.Tensor, lambda t: t.detach().clone().requires_grad_(t.requires_grad), call)
    torch.manual_seed(1)
    result = module(*args, **names)
    loss_of(result).backward()
    by_weights = gradients(module)
    contiguous = [gradient is not None and gradient.is_contiguous() for gradient in by_weights.values()]
    module.zero_grad()
    return result, by_weights, [leaf.grad for leaf in _leaves((args, names))], contiguous


def _accelerated(module: nn.Module, backend: str) -> Any:
    return stretto.accelerate(copy.deepcopy(module), backend=backend)  # type: ignore[arg-type]


def _plain(module: Module) -> Module:
    return module


def _unpickled(module: Module) -> Module:
    return pickle.loads(pickle.dumps(module))


def _there_and_back(module: Module) -> Module:
    dtype = module.weight_ih_l0.dtype
    return module.to(torch.bfloat16).to("cpu").to(dtype)


def _reloaded(module: Module) -> Module:
    other = copy.deepcopy(module)
    other.reset_parameters()
    other.load_state_dict(module.state_dict())
    return other


CHANGES: dict[str, Callable[[Module], Module]] = {
    "as-it-is": _plain,
    "deepcopy": copy.deepcopy,
    "pickle": _unpickled,
    "to": _there_and_back,
    "state-dict": _reloaded,
    "memory-format": lambda module: module.to(memory_format=torch.channels_last),
    "frozen": lambda module: module.requires_grad_(False),
}


def _quick(change: str, dtype: str, backend: str, training: bool) -> bool:
    return (dtype, backend, training) == ("float64", "cpp", True) and change in {"as-it-is", "pickle", "state-dict"}


@pytest.mark.parametrize(
    ("change", "dtype", "backend", "training"),
    [
        pytest.param(*given, marks=[] if _quick(*given) else pytest.mark.slow)
        for given in product(CHANGES, DTYPES, ("cpp", "auto"), (True, False))
    ],
)
@pytest.mark.parametrize("name", LAYERS)
def test_samples(name: str, change: str, dtype: str, backend: str, training: bool) -> None:
    """Values and gradients of a sample, after each of the things that are done to modules."""
    for theirs, call in _samples(LAYERS[name], DTYPES[dtype], training=training):
        ours = CHANGES[change](_accelerated(theirs, backend))
        theirs = CHANGES[change](theirs)  # noqa: PLW2901
        assert repr(ours) == repr(theirs)
        assert type(ours) is type(theirs)
        assert ours.training == training
        assert_same(dict(ours.state_dict()), dict(theirs.state_dict()))
        if change == "frozen" and not any(leaf.requires_grad for leaf in _leaves(call)):
            continue
        exact = functools.partial(_run, copy.deepcopy(theirs).double(), in_double(call))
        assert_same(_run(ours, call), _run(theirs, call), exact=functools.cache(exact))


def _without_layout(leaf: torch.Tensor) -> torch.Tensor:
    """The same values, none of them next to another in memory."""
    if leaf.dim() == 0 or not leaf.is_floating_point():
        return leaf
    wide = torch.stack([leaf.detach(), torch.full_like(leaf, torch.nan)], dim=-1)[..., 0]
    return wide.requires_grad_(leaf.requires_grad)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("part", ["inputs", "gradients"])
def test_memory_layout(name: str, part: str) -> None:
    for theirs, call in _samples(LAYERS[name], torch.float64):
        ours, found = _accelerated(theirs, "cpp"), []
        for module in (theirs, ours):
            given = pytree.tree_map_only(torch.Tensor, _without_layout, call) if part == "inputs" else call
            outputs = tensors_of(module(*given[0], **given[1]))
            torch.manual_seed(2)
            by_outputs = [torch.randn_like(y) for y in outputs]
            if part == "gradients":
                by_outputs = [_without_layout(gradient) for gradient in by_outputs]
            found.append([*outputs, *torch.autograd.grad(outputs, list(module.parameters()), by_outputs)])
        assert_same(found[1], found[0])


@pytest.mark.parametrize("name", LAYERS)
def test_factory_arguments(name: str) -> None:
    """Modules that are made on the meta device, or without initial values, get them after they were accelerated."""
    for theirs, call in _samples(LAYERS[name], torch.float64):
        empty = stretto.accelerate(copy.deepcopy(theirs).to("meta"), backend="cpp")
        ours: Any = empty.to_empty(device="cpu")
        ours.load_state_dict(theirs.state_dict())
        assert_same(_run(ours, call), _run(theirs, call))


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("check", [gradcheck, gradgradcheck], ids=["first", "second"])
def test_numerical_gradients(name: str, check: Callable[..., bool]) -> None:
    for theirs, call in _samples(LAYERS[name], torch.float64):
        module = _accelerated(theirs, "cpp")
        tensors, names = _leaves(call), [key for key, _ in module.named_parameters()]

        def run(*given: torch.Tensor, module: Any = module, names: list[str] = names, call: Call = call) -> Any:
            weights = dict(zip(names, given[: len(names)], strict=True))
            rest = iter(given[len(names) :])
            swap = lambda t: next(rest) if t.is_floating_point() else t  # noqa: E731
            args, keywords = pytree.tree_map_only(torch.Tensor, swap, call)
            return tuple(tensors_of(torch.func.functional_call(module, weights, args, keywords)))

        weights = [parameter.detach().requires_grad_() for parameter in module.parameters()]
        assert check(run, (*weights, *tensors), fast_mode=True)


@pytest.mark.parametrize("name", LAYERS)
@pytest.mark.parametrize("backend", BACKENDS, indirect=True)
def test_errors(name: str, backend: str) -> None:
    info = LAYERS[name]
    for error in info.module_error_inputs_func(
        info, device="cpu", dtype=torch.float64, requires_grad=False, training=True
    ):
        sample = error.module_error_input
        make = sample.constructor_input
        with nullcontext() if error.error_on.name == "FORWARD_ERROR" else pytest.raises(error.error_type):
            module = _accelerated(info.module_cls(*make.args, **make.kwargs), backend)
            given = sample.forward_input
            with pytest.raises(error.error_type, match=error.error_regex):
                module(*given.args, **given.kwargs)
