"""One finding of `trunkline doctor`."""

from __future__ import annotations

from msgspec import Struct


class Check(Struct, frozen=True):
    """A finding. `fix`: what to do; with `ok` it is advice, without `ok` the server needs it."""

    check: str
    ok: bool
    found: str
    fix: str | None = None
