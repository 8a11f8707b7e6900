"""The command line in the process of the tests."""

from collections.abc import Callable
from typing import NamedTuple

import pytest

from stretto.cli.main import main


class Ended(NamedTuple):
    code: object
    out: str
    err: str


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Callable[..., Ended]:
    def call(*words: str) -> Ended:
        capsys.readouterr()
        code: object
        try:
            code = main(words)
        except SystemExit as stop:
            code = stop.code
        printed = capsys.readouterr()
        return Ended(code=code, out=printed.out, err=printed.err)

    return call
