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
from engine.moves import WHOLE, SlotFormat, is_whole_format

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
        self._wholes = frozenset(i for i, name in enumerate(names) if is_whole_format(name))
        self._allowed: dict[Namespace, Fidelity] = {}
        self._at_rest: dict[Namespace, AtRest] = {}  # where it is less than `remote`
        self._of_group_0 = {one: self._smallest(one, is_whole=False) for one in FIDELITIES}
        self._of_all = {one: self._smallest(one, is_whole=True) for one in FIDELITIES}

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

    def terms_of(self, namespace: Namespace) -> tuple[Fidelity, AtRest]:
        """Return how far from exact copies of a namespace may be, and how far they may go. O(1)."""
        return self.allowed(namespace), self.at_rest(namespace)

    def limit_rest(self, namespace: Namespace, at_rest: AtRest) -> bool:
        """Note how far copies of a namespace may go: the strictest word counts (rule *Rest*).
        Return whether the remote store is closed to them by that. O(1).
        """
        before = self.at_rest(namespace)
        if AT_REST.index(at_rest) >= AT_REST.index(before):
            return False
        self._at_rest[namespace] = at_rest
        return before == "remote"

    def of(self, namespace: Namespace, *, is_whole: bool = False, is_own: bool = False) -> int:
        """Return the format that copies of a namespace are made in. `is_whole`: with the blocks of
        all KV groups; `is_own`: with blocks as they are. O(1).
        """
        found = self._of_all if is_whole else self._of_group_0
        return found["exact" if is_own else self.allowed(namespace)]

    def is_whole(self, form: int) -> bool:
        """Return whether a format has the blocks of all KV groups. O(1)."""
        return form in self._wholes

    def is_own(self, form: int) -> bool:
        """Return whether a format has blocks as they are. O(1)."""
        return form in (OWN, self.whole)

    def of_record(self, fidelity: Fidelity, slot_bytes: int) -> int | None:
        """Return the format of a record; None for one that this engine has not. O(formats)."""
        for index, one in enumerate(self.formats):
            if (one.fidelity, one.slot_bytes) == (fidelity, slot_bytes):
                return index
        return None

    def _smallest(self, allowed: Fidelity, *, is_whole: bool) -> int:
        most = FIDELITIES.index(allowed)
        known = [i for i, one in enumerate(self.formats) if FIDELITIES.index(one.fidelity) <= most]
        known = [index for index in known if self.is_whole(index) == is_whole]
        own = OWN if self.whole is None or not is_whole else self.whole
        return min(known, key=lambda index: self.formats[index].slot_bytes, default=own)
