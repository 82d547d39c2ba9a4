"""Values as protobuf's JSON mapping reads them, which Google's endpoint applies to every body.

A number may be a text, an integer may be written 1.0 or 1e3, an enum may be its number, and one
value may take the place of a list of it. The module knows no field; `gemini.wire` applies it where
the declared type asks for it, and `gemini.schema` to the keywords of a schema.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from decimal import Decimal
from typing import Any, Final

_DECIMAL: Final = re.compile(r"-?[0-9]{1,20}(\.[0-9]{1,20})?([eE][+-]?[0-9]{1,3})?")

_MODES: Final = ("MODE_UNSPECIFIED", "AUTO", "ANY", "NONE", "VALIDATED")
_MODALITIES: Final = ("MODALITY_UNSPECIFIED", "TEXT", "IMAGE", "AUDIO")
TYPES: Final = (
    *("TYPE_UNSPECIFIED", "STRING", "NUMBER", "INTEGER", "BOOLEAN", "ARRAY", "OBJECT", "NULL"),
)
"""The types of a schema, by number."""

_SCHEDULINGS: Final = ("SCHEDULING_UNSPECIFIED", "SILENT", "WHEN_IDLE", "INTERRUPT")
_BEHAVIORS: Final = ("UNSPECIFIED", "BLOCKING", "NON_BLOCKING")
_RESOLUTIONS: Final = tuple(
    f"MEDIA_RESOLUTION_{name}" for name in ("UNSPECIFIED", "LOW", "MEDIUM", "HIGH")
)
_LEVELS: Final = ("THINKING_LEVEL_UNSPECIFIED", "LOW", "MEDIUM", "HIGH", "MINIMAL")
_TIERS: Final = ("unspecified", "standard", "flex", "priority")
_HOSTED_TOOLS: Final = (
    *("TOOL_TYPE_UNSPECIFIED", "GOOGLE_SEARCH_WEB", "GOOGLE_SEARCH_IMAGE", "URL_CONTEXT"),
    *("GOOGLE_MAPS", "FILE_SEARCH"),
)

ENUMS: Final[Mapping[str, Sequence[str]]] = {
    "mode": _MODES,
    "response_modalities": _MODALITIES,
    "type": TYPES,
    "scheduling": _SCHEDULINGS,
    "behavior": _BEHAVIORS,
    "media_resolution": _RESOLUTIONS,
    "thinking_level": _LEVELS,
    "service_tier": _TIERS,
    "tool_type": _HOSTED_TOOLS,
}
"""The values of the enums by number, by field."""


def read_int(value: Any) -> Any:
    """Return the integer that a value means; the value itself if it is none."""
    number = _number(value) if isinstance(value, str) else value
    is_whole = isinstance(number, float | Decimal) and number == int(number)
    return int(number) if is_whole else value


def read_float(value: Any) -> Any:
    """Return the number that a value means; the value itself if it is none."""
    if isinstance(value, str):
        found = _number(value)
        return float(found) if isinstance(found, Decimal) else value
    return value


def read_bool(value: Any) -> Any:
    """Return the boolean that a value means; the value itself if it is none."""
    return {"true": True, "false": False}.get(value, value) if isinstance(value, str) else value


def read_enum(value: Any, names: Sequence[str]) -> Any:
    """Return the name of an enum's number, or the name that a text is in any case; the value itself
    if it has none."""
    if isinstance(value, str) and value not in names:
        value = next((name for name in names if name.lower() == value.lower()), value)
    number = read_int(value)
    is_number = isinstance(number, int) and not isinstance(number, bool)
    return names[number] if is_number and 0 <= number < len(names) else value


def read_list(value: Any) -> Any:
    """Return one value as the list of it; null stays absent."""
    return value if isinstance(value, list) or value is None else [value]


def _number(text: str) -> Any:
    return Decimal(text) if _DECIMAL.fullmatch(text) else text
