"""How many examples a property is tried with: all of them, or a share by day."""

from __future__ import annotations

from hypothesis import settings

FULL = 40
"""Examples of a property that says no number, in a run of the night. See tests/conftest.py."""


def examples(full: int) -> int:
    """Return the examples for a property that has so many in the night. Two at least."""
    return max(2, full * settings().max_examples // FULL)
