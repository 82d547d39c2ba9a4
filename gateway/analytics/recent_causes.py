"""Where each tenant's prompts parted from earlier ones, and why, as findings last said.

The header of an answer is written before the answer's prompt has been compared. Most faults return
at the same place: the header of the next request that parts there names the cause. `FindingStore`
notes the comparisons, `generation` reads them.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable

from tenancy.reuse.miss_causes import MissCause
from tenancy.reuse.prompt_changes import fold_indexes

PLACES_MAX = 4_096
KEPT_S = 3_600.0


class RecentCauses:
    """The latest cause of each place. Belongs to one event loop."""

    def __init__(self) -> None:
        self._causes: OrderedDict[tuple[int, str], tuple[str, float]] = OrderedDict()

    def note(self, causes: Iterable[MissCause], now_s: float) -> None:
        """Keep the causes that have a place. O(causes)."""
        for one in causes:
            if one.place and one.wasted_tokens:
                key = one.tenant_id, one.place
                self._causes[key] = one.cause, now_s + KEPT_S
                self._causes.move_to_end(key)
        while len(self._causes) > PLACES_MAX:
            self._causes.popitem(last=False)

    def find(self, tenant_id: int, path: str, now_s: float) -> str:
        """Return why the tenant's prompts part in this part of a request; "" if not known. O(1)."""
        cause, until_s = self._causes.get((tenant_id, fold_indexes(path)), ("", 0.0))
        return cause if now_s < until_s else ""
