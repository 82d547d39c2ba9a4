"""Sums of the levels below the device over the engines of several models. Pure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from engine.api import LevelStats, PayerBytes

_STATES = ("open", "full", "off")
"""States of a level, the worst last."""
_NOT_SUMMED = ("name", "state", "reason", "bytes_per_s", "payers")


def sum_levels(each: Sequence[Sequence[LevelStats]]) -> tuple[LevelStats, ...]:
    """Return one level of each name, in the order of their first appearance. O(levels + payers).

    State and reason are those of the engine that is worst off, the rate that of the slowest.
    """
    by_name: dict[str, list[LevelStats]] = {}
    for levels in each:
        for one in levels:
            by_name.setdefault(one.name, []).append(one)
    return tuple(map(_sum, by_name.values()))


def _sum(levels: Sequence[LevelStats]) -> LevelStats:
    if len(levels) == 1:
        return levels[0]
    worst = max(levels, key=lambda one: _STATES.index(one.state))
    rates = [one.bytes_per_s for one in levels if one.bytes_per_s]
    names = [name for name in LevelStats.__struct_fields__ if name not in _NOT_SUMMED]
    return LevelStats(
        name=worst.name,
        state=worst.state,
        reason=worst.reason,
        bytes_per_s=min(rates, default=0.0),
        payers=_sum_payers([payer for one in levels for payer in one.payers]),
        **{name: sum(getattr(one, name) for one in levels) for name in names},
    )


def _sum_payers(payers: Sequence[PayerBytes]) -> tuple[PayerBytes, ...]:
    used: dict[bytes, int] = defaultdict(int)
    promised: dict[bytes, int] = defaultdict(int)
    for one in payers:
        used[one.payer] += one.used
        promised[one.payer] += one.promised
    return tuple(PayerBytes(payer, used[payer], promised[payer]) for payer in used)
