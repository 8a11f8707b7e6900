"""A compiler that is quick rather than good: random cells are many, small, and each is run once."""

from collections.abc import Iterator

import pytest

from stretto.kernels import compiler


@pytest.fixture(scope="session")
def quick_compiler() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        flags = tuple("-O0" if flag == "-O3" else flag for flag in compiler.BASE_FLAGS)
        patch.setattr(compiler, "BASE_FLAGS", flags)
        compiler._find.cache_clear()
        yield
    compiler._find.cache_clear()
