"""The disk's writes of a day: one tenant could write them all, and no other's prefix was stored.

What is written cannot be taken back, so each payer's share of the day is held for it: by weight
among those that use the disk, by its floor, and one share for all that have nothing there yet.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.api import Quota
from engine.moves import SetStoredQuotas
from engine.storage.slabs.record import place_bytes_of
from engine.storage.space.quotas import DiskQuotas, DiskUsage
from engine.storage.space.write_budget import WriteBudget
from tests.unit.engine.storage.local_storage import LocalRig, MakeRig
from tests.unit.engine.storage.storage_rig import SLOT_BYTES, A, B, path_of

PLACE = place_bytes_of(SLOT_BYTES)
DAY_S = 86_400.0


class Meta(dict[str, Any]):
    """The values of a store's index, as `WriteBudget` keeps its counts."""

    def meta(self, name: str, default: int | bytes) -> Any:
        return self.get(name, default)

    def set_meta(self, name: str, value: int | bytes) -> None:
        self[name] = value


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeRig]:
    """Return a function that opens a store."""
    rigs: list[LocalRig] = []

    def open_rig(name: str = "levels", **settings: Any) -> LocalRig:
        rigs.append(LocalRig(tmp_path / name, **settings))
        return rigs[-1]

    yield open_rig
    for rig in rigs:
        rig.close()


def written(rig: LocalRig, payer: bytes, first: int, namespace: bytes, most: int = 60) -> int:
    """Store prefixes of a payer until one is refused; return how many were stored."""
    for number in range(most):
        command = rig.store_command(namespace, path_of(first + number), payer=payer)
        if rig.send_store(command).code:
            return number
    return most


def open_to(make: MakeRig, *quotas: Quota) -> LocalRig:
    """Open a store of 24 writes a day for these payers."""
    rig = make(write_bytes_per_day=24 * PLACE)
    rig.storage.send(SetStoredQuotas(quotas))
    return rig


def test_a_quiet_payer_writes_its_share_beside_one_that_writes_all_day(make: MakeRig) -> None:
    """It has nothing on the disk, no floor, and comes last; a restart forgets nothing."""
    rig = open_to(make, Quota(payer=b"loud"), Quota(payer=b"quiet"))
    loud = written(rig, b"loud", 100, A)
    rig.reopen()
    rig.storage.send(SetStoredQuotas((Quota(payer=b"loud"), Quota(payer=b"quiet"))))

    assert written(rig, b"loud", 200, A) == 0
    assert written(rig, b"quiet", 300, B) == 24 - loud == 6
    rig.clock.advance(DAY_S)
    assert written(rig, b"loud", 400, A) > 0


def test_a_floor_and_a_weight_hold_more(make: MakeRig) -> None:
    """Twice the weight is twice the share of what is held; a floor is held as far as it reaches."""
    heavy = open_to(make, Quota(payer=b"loud"), Quota(payer=b"quiet", weight=2.0))
    assert written(heavy, b"quiet", 0, B, most=1) == 1
    written(heavy, b"loud", 100, A)
    floored = make("other", write_bytes_per_day=24 * PLACE)
    quotas = Quota(payer=b"loud"), Quota(payer=b"quiet", floor_blocks=100)
    floored.storage.send(SetStoredQuotas(quotas))
    written(floored, b"loud", 100, A)

    assert 1 + written(heavy, b"quiet", 300, B) == 8
    assert written(floored, b"quiet", 300, B) > 6


def test_promises_of_one_payer_leave_the_others_their_shares(make: MakeRig) -> None:
    """They are written whatever the budget, so one payer's could be all that a day has."""
    rig = open_to(make, Quota(payer=b"loud"), Quota(payer=b"quiet"))
    for number in range(40):
        rig.store(A, path_of(100 + number), payer=b"loud", promise_s=60.0)

    assert written(rig, b"loud", 200, A) == 0
    assert written(rig, b"quiet", 300, B) == 6


def test_a_payer_that_is_alone_writes_all(make: MakeRig) -> None:
    """Nothing is held for payers that do not exist."""
    rig = open_to(make, Quota(payer=b"alone"))

    assert written(rig, b"alone", 0, A) == 24


@given(
    st.lists(st.tuples(st.integers(0, 3), st.integers(1, 30), st.booleans()), max_size=60),
    st.lists(st.tuples(st.sampled_from([0.5, 1.0, 3.0]), st.integers(0, 40)), max_size=3),
)
def test_shares_hold_in_any_order(
    writes: list[tuple[int, int, bool]], policies: list[tuple[float, int]]
) -> None:
    """No day's unpromised writes exceed the budget, and a payer inside its share of what is held is
    never refused, also after others have written what was promised to them."""
    quotas, usage = DiskQuotas(10_000, 1), DiskUsage()
    quotas.set(
        Quota(payer=bytes([number]), weight=weight, floor_blocks=floor)
        for number, (weight, floor) in enumerate(policies)
    )
    budget = WriteBudget(Meta(), quotas, usage, 400)
    least = 400 / 2 / (4 * 3 / 0.5 + 1) / 4  # of any payer's share: 4 payers, weights, cut floors
    own = dict.fromkeys(range(4), 0)
    unpromised = 0
    for number, size, is_promised in writes:
        payer = bytes([number])
        may = is_promised or budget.may_write(payer, size, 0)
        assert may or own[number] + size > least
        if may:
            budget.count(payer, size, 0, is_promised=is_promised)
            usage.add_bytes(payer, size, 0)
            own[number] += size
            unpromised += 0 if is_promised else size

        assert budget.written(0) == sum(own.values())
        assert unpromised <= 400
