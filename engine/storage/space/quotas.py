"""Shares of the disk: whose records go first when room is needed; the sums of who has what.

The arithmetic of `engine.cache.tree.fair_share`: the payer that is furthest over its floor,
relative to its weight, gives first, and nothing is taken inside a floor. This module knows no index
and no clock.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Mapping

from engine.api import FIDELITIES, Namespace, Payer, Quota
from engine.statistics import FidelityBytes

FLOORS_PART_MAX = 7 / 8
"""The part of the disk that floors may take together; above it they are cut in one proportion."""


class DiskQuotas:
    """The quotas of payers, whose blocks count as places of `place_bytes`, the largest."""

    def __init__(self, capacity_bytes: int, place_bytes: int) -> None:
        self._room = int(capacity_bytes * FLOORS_PART_MAX)
        self._place_bytes = place_bytes
        self._by_payer: dict[Payer, Quota] = {}
        self._floors = 0

    def set(self, quotas: Iterable[Quota]) -> None:
        """Replace the quotas of the payers that are named."""
        for quota in quotas:
            self._by_payer[quota.payer] = quota
        self._floors = sum(one.floor_blocks for one in self._by_payer.values()) * self._place_bytes

    @property
    def payers(self) -> Iterable[Payer]:
        """The payers that have a quota."""
        return self._by_payer.keys()

    def weight(self, payer: Payer) -> float:
        """Return the payer's weight. O(1)."""
        quota = self._by_payer.get(payer)
        return quota.weight if quota is not None else 1.0

    def floor(self, payer: Payer) -> int:
        """Return the bytes that others never take from this payer. O(1)."""
        quota = self._by_payer.get(payer)
        if quota is None:
            return 0
        floor = quota.floor_blocks * self._place_bytes
        return floor if self._floors <= self._room else floor * self._room // self._floors

    def ceiling(self, payer: Payer) -> int | None:
        """Return the most bytes that this payer may take; None without a ceiling. O(1)."""
        quota = self._by_payer.get(payer)
        if quota is None or quota.ceiling_blocks is None:
            return None
        return quota.ceiling_blocks * self._place_bytes

    def _overage(self, payer: Payer, used: int) -> float:
        """Return how far `used` bytes are over the payer's floor, relative to its weight."""
        return (used - self.floor(payer)) / self.weight(payer)

    def victim(
        self, used: Mapping[Payer, int], taker: Payer, without: Container[Payer]
    ) -> Payer | None:
        """Return the payer that gives a place to `taker`, which wants one more; None if all others
        are inside their floors and the taker has nothing. O(payers).

        `without`: payers that have nothing that may go.
        """
        best: Payer | None = None
        best_overage = 0.0
        for payer, size in used.items():
            if payer in without:
                continue
            is_taker = payer == taker
            overage = self._overage(payer, size + self._place_bytes if is_taker else size)
            if overage <= 0 and not is_taker:
                continue
            if best is None or overage > best_overage or (is_taker and overage == best_overage):
                best, best_overage = payer, overage
        return best


class DiskUsage:
    """Bytes by payer and records by namespace: the sums of the index, kept while it changes.

    A store in flight is counted in bytes from its plan on, and in records from its commit on.
    """

    def __init__(self) -> None:
        self.used: dict[Payer, int] = {}
        self.used_bytes = 0
        self.records = 0
        self.by_fidelity = [[0, 0] for _ in FIDELITIES]  # records and bytes
        self.by_namespace: dict[Namespace, int] = {}
        self._kept: set[Namespace] = set()
        self._gained: dict[Namespace, None] = {}
        self._lost: dict[Namespace, None] = {}

    @property
    def namespaces(self) -> list[Namespace]:
        """The namespaces that have records."""
        return list(self.by_namespace)

    def has(self, namespace: Namespace) -> bool:
        """Return whether the namespace has records."""
        return namespace in self.by_namespace

    def add_bytes(self, payer: Payer, size: int, fidelity: int, count: int = 1) -> None:
        """Count the bytes of a payer's places; a negative size takes them back. `fidelity`: of
        their records, by its index; `count`: how many they are."""
        total = self.used.get(payer, 0) + size
        self.used_bytes += size
        self.by_fidelity[fidelity][0] += count if size > 0 else -count
        self.by_fidelity[fidelity][1] += size
        if total:
            self.used[payer] = total
        else:
            self.used.pop(payer, None)

    def copies(self) -> tuple[FidelityBytes, ...]:
        """Return records and bytes by fidelity, those that there are."""
        return tuple(
            FidelityBytes(fidelity, *sums)
            for fidelity, sums in zip(FIDELITIES, self.by_fidelity, strict=True)
            if sums[0]
        )

    def add_records(self, namespace: Namespace, count: int) -> None:
        """Count records of a namespace; a negative count takes them back."""
        total = self.by_namespace.get(namespace, 0) + count
        self.records += count
        if total:
            if namespace not in self.by_namespace:
                self._gained[namespace] = None
                self._lost.pop(namespace, None)
            self.by_namespace[namespace] = total
        elif self.by_namespace.pop(namespace, None) is not None and namespace not in self._kept:
            self._lost[namespace] = None
            self._gained.pop(namespace, None)

    def keep(self, namespace: Namespace) -> None:
        """Count a namespace as held also without records: a remote store may have some of it."""
        self._kept.add(namespace)
        self._lost.pop(namespace, None)
        if namespace not in self.by_namespace:
            self._gained[namespace] = None

    def is_kept(self, namespace: Namespace) -> bool:
        """Return whether a namespace counts as held also without records."""
        return namespace in self._kept

    def let_go(self, namespace: Namespace) -> None:
        """Count a namespace only by its records again."""
        if namespace in self._kept and namespace not in self.by_namespace:
            self._lost[namespace] = None
            self._gained.pop(namespace, None)
        self._kept.discard(namespace)

    def sums(self) -> tuple[object, ...]:
        """Return all sums, to compare them with those of a recount."""
        return self.used, self.used_bytes, self.records, self.by_namespace, self.by_fidelity

    def take_changes(self) -> tuple[tuple[Namespace, ...], tuple[Namespace, ...]]:
        """Return the namespaces that got their first record and lost their last one since then."""
        changes = tuple(self._gained), tuple(self._lost)
        self._gained, self._lost = {}, {}
        return changes
