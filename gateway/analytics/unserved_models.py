"""Count requests for models that are not served, by tenant and name, until findings take them.

`generation.preparation` notes each refusal; `findings.finding_store` takes the counts.
"""

from __future__ import annotations

from collections import Counter

NAME_CHARS_MAX = 80
NAMES_MAX = 1_024
"""Names of all tenants that wait to be taken; requests for further ones are not counted."""
NAMES_PER_TENANT_MAX = 16


class UnservedModels:
    """Counts of a gateway. Belongs to one event loop."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[int, str]] = Counter()
        self._names: Counter[int] = Counter()

    def note(self, tenant_id: int, name: str) -> None:
        """Count a request of a tenant. O(1)."""
        key = tenant_id, name[:NAME_CHARS_MAX]
        if key not in self._counts:
            if len(self._counts) >= NAMES_MAX or self._names[tenant_id] >= NAMES_PER_TENANT_MAX:
                return
            self._names[tenant_id] += 1
        self._counts[key] += 1

    def take(self) -> dict[tuple[int, str], int]:
        """Return the counts since the last call by tenant and name."""
        counts = dict(self._counts)
        self._counts.clear()
        self._names.clear()
        return counts
