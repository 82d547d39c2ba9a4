"""Rows as PostgreSQL's `copy` has them in text, in both directions: what is sent so comes back the
same, byte by byte. It needs no driver; `moves` writes many rows like this.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from tenancy.storage.interface import Row

NO_SIGN = "�"
"""Stands for a NUL, which no text has on a server."""


def copied(row: Row) -> str:
    """A row as `copy` has it, which is how the server writes it too."""
    return "\t".join([_COPIED[type(value)](value) for value in row]) + "\n"


def _copied_text(text: str) -> str:
    return text.translate(_ESCAPES) if _TO_ESCAPE(text) else text


_ESCAPES = str.maketrans(
    dict(zip("\\\b\f\n\r\t\v", ("\\\\", *(f"\\{sign}" for sign in "bfnrtv")), strict=True))
    | {"\0": NO_SIGN}
)
_TO_ESCAPE = re.compile(r"[\\\0\x08-\x0d]").search
_COPIED: dict[type, Callable[[Any], str]] = {
    type(None): lambda _: "\\N",
    int: int.__repr__,
    float: lambda value: repr(value).removesuffix(".0"),
    str: _copied_text,
    bytes: lambda value: "\\\\x" + value.hex(),
}
