"""One finding of `trunkline doctor`."""

from __future__ import annotations

from msgspec import Struct


class Check(Struct, frozen=True):
    """A finding."""

    check: str
    ok: bool
    found: str
    fix: str | None = None
    """What to do; with `ok` it is advice, without `ok` the server needs it."""
