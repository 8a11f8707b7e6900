"""Sets of settings that go by a name."""

from collections.abc import Mapping
from typing import Any

PRESET = "preset"


def with_preset(kind: type[Any], values: Mapping[str, Any]) -> dict[str, Any]:
    """Settings, and, for those that are left out, what the preset says that they name.

    Args:
        kind: The settings class of a task; if it has presets, their values by name are in its `presets`.
        values: What was given. A name that is not there is left for the check of all settings.
    """
    presets: Mapping[str, Mapping[str, Any]] = getattr(kind, "presets", {})
    named = values.get(PRESET)
    return {**(presets.get(named, {}) if isinstance(named, str) else {}), **values}
