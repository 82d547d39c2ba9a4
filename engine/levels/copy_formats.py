"""Which format the copies of a namespace get below the device, and how far they may go.

Fidelity belongs to the namespace: all its requests allow the same. The format is the smallest that
it allows, and never a lossy one for a namespace that nothing was said of. Where copies may rest is
what the strictest of its requests has said. Outside this folder only
the core calls the module, for `laxest`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from engine.api import AT_REST, FIDELITIES, AtRest, Fidelity, Namespace
from engine.moves import WHOLE, SlotFormat

OWN: Final = 0
"""The index of the pool's own format."""


def laxest(*fidelities: Fidelity) -> Fidelity:
    """Return the one that is furthest from exact."""
    return max(fidelities, key=FIDELITIES.index)


class CopyFormats:
    """The formats of copies by index, the pool's own first, and what each namespace allows."""

    def __init__(self, formats: Sequence[SlotFormat]) -> None:
        self.formats = tuple(formats)
        names = [one.name for one in self.formats]
        self.whole = names.index(WHOLE) if WHOLE in names else None
        """The index of `WHOLE`, None for a model with one KV group."""
        self._allowed: dict[Namespace, Fidelity] = {}
        self._at_rest: dict[Namespace, AtRest] = {}  # where it is less than `remote`
        self._by_fidelity = {one: self._smallest(one) for one in FIDELITIES}

    def allow(self, namespace: Namespace, fidelity: Fidelity) -> None:
        """Note how far from exact the copies of a namespace may be. O(1)."""
        if fidelity != "exact":
            self._allowed[namespace] = fidelity

    def allowed(self, namespace: Namespace) -> Fidelity:
        """Return how far from exact the copies of a namespace may be. O(1)."""
        return self._allowed.get(namespace, "exact")

    def at_rest(self, namespace: Namespace) -> AtRest:
        """Return how far copies of a namespace may go. O(1)."""
        return self._at_rest.get(namespace, "remote")

    def limit_rest(self, namespace: Namespace, at_rest: AtRest) -> bool:
        """Note how far copies of a namespace may go: the strictest word counts (rule 33). Return
        whether the remote store is closed to them by that. O(1).
        """
        before = self.at_rest(namespace)
        if AT_REST.index(at_rest) >= AT_REST.index(before):
            return False
        self._at_rest[namespace] = at_rest
        return before == "remote"

    def of(self, namespace: Namespace) -> int:
        """Return the format that copies of a namespace are made in. O(1)."""
        return self._by_fidelity[self.allowed(namespace)]

    def is_own(self, form: int) -> bool:
        """Return whether a format has blocks as they are. O(1)."""
        return form in (OWN, self.whole)

    def of_record(self, fidelity: Fidelity, slot_bytes: int) -> int | None:
        """Return the format of a record; None for one that this engine has not. O(formats)."""
        for index, one in enumerate(self.formats):
            if (one.fidelity, one.slot_bytes) == (fidelity, slot_bytes):
                return index
        return None

    def _smallest(self, allowed: Fidelity) -> int:
        most = FIDELITIES.index(allowed)
        known = [i for i, one in enumerate(self.formats) if FIDELITIES.index(one.fidelity) <= most]
        return min(known, key=lambda index: self.formats[index].slot_bytes, default=OWN)
