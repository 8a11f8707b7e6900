"""Optional dependencies: imported late, missed politely."""

import importlib.metadata
import json
import re
import sys
from pathlib import Path

import pytest

import stretto
from stretto.errors import StrettoError
from stretto.extras import EXTRA_OF, optional


@pytest.mark.parametrize(("module", "extra"), EXTRA_OF.items())
def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch, module: str, extra: str) -> None:
    package = module.partition(".")[0]
    for name in {module, package}:
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(StrettoError, match=re.escape(f"pip install 'stretto[{extra}]'")) as caught:
        optional(module)
    assert repr(package) in caught.value.problem
    assert isinstance(caught.value.__cause__, ImportError)


def test_a_module_that_is_there_is_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EXTRA_OF, "json", "data")
    assert optional("json") is json


def test_every_extra_is_declared() -> None:
    declared = importlib.metadata.metadata("stretto").get_all("Provides-Extra") or []
    assert set(EXTRA_OF.values()) <= set(declared)


def test_every_module_asked_for_is_in_the_table() -> None:
    folder = Path(stretto.__file__).parent
    asked = {
        module
        for path in folder.rglob("*.py")
        for module in re.findall(r"""\boptional\(\s*["']([^"']+)["']""", path.read_text(encoding="utf-8"))
    }
    assert asked
    assert asked <= set(EXTRA_OF)
