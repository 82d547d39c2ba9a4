"""A power cut at any write or sync loses no confirmed entry and leaves correct books.

A disk that only reports its syncs is the control: the same check must detect it.
"""

from __future__ import annotations

import os
import random
import sys
from contextlib import suppress
from pathlib import Path

import apsw
import pytest

from tenancy.errors import TenancyError
from tenancy.ledger.ledger import Ledger
from tenancy.storage.sqlite import SqliteStore
from tests.crash.ledger_checks import check_ledger
from tests.crash.ledger_child import furnish, hold, named
from tests.crash.power_cut import Disk, disk_of

IS_LONG = os.environ.get("CRASH") == "long"  # make crash
CUTS = 2_000 if IS_LONG else 20
LIES = 8
CALLS_MAX = 900
REQUESTS = 120

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3_600 if IS_LONG else 240)]


def live(path: Path, disk: Disk, seed: int) -> tuple[set[str], set[str]]:
    """Write a ledger until the power is cut or `COUNT` is reached.

    Returns the confirmed ids and the ids with refused holds.
    """
    confirmed: set[str] = set()
    unheld: set[str] = set()
    rng = random.Random(seed)
    with disk_of(disk):
        try:
            store = SqliteStore(path)
        except TenancyError:
            return confirmed, unheld
        try:
            furnish(store)
            ledger = Ledger(store, lambda: 2)
        except TenancyError:
            with suppress(apsw.Error):
                store.close()
            return confirmed, unheld
        number = 0
        while number < REQUESTS and not disk.is_cut:
            names = [f"{seed}-{number + more}" for more in range(rng.randrange(1, 6))]
            number += len(names)
            futures = [ledger.hold(hold(name)) for name in names]
            for name, future in zip(names, futures, strict=True):
                if future.exception(60) is not None:
                    unheld.add(name)
            sent = {name: ledger.settle(named(name)) for name in names if rng.random() < 0.9}
            confirmed |= {name for name, future in sent.items() if not future.exception(60)}
        ledger.close()
        with suppress(apsw.Error):  # the last checkpoint needs the disk
            store.close()
    return confirmed, unheld


def after(path: Path, disk: Disk, seed: int) -> Path:
    """Return the files as found after the power returns."""
    return disk.image(path, path.with_suffix(".after"), random.Random(seed))


def test_power_cut_loses_no_confirmed_entry(tmp_path: Path) -> None:
    """At many random instants, with each unsynced write kept, undone or torn."""
    entries = confirmed = 0
    for seed in range(CUTS):
        disk = Disk(cut_at=random.Random(seed).randrange(1, CALLS_MAX))
        path = tmp_path / f"{seed}.db"
        acked, unheld = live(path, disk, seed)
        confirmed += len(acked)
        entries += check_ledger(after(path, disk, seed), acked, unheld)

    sys.stdout.write(f"{CUTS} cuts, {confirmed} confirmed, {entries} found\n")
    assert entries >= confirmed > CUTS


def test_detects_a_lying_disk(tmp_path: Path) -> None:
    """The control: where syncs do nothing, the check above finds losses."""
    noticed = 0
    for seed in range(LIES):
        disk = Disk(cut_at=random.Random(seed).randrange(CALLS_MAX // 2, CALLS_MAX), is_lying=True)
        path = tmp_path / f"{seed}.db"
        acked, unheld = live(path, disk, seed)
        try:
            check_ledger(after(path, disk, seed), acked, unheld)
        except (AssertionError, TenancyError):
            noticed += 1

    assert noticed >= LIES // 2


@pytest.mark.parametrize("first", range(1, 40, 1 if IS_LONG else 4))
def test_failed_sync_then_power_cut_loses_nothing(tmp_path: Path, first: int) -> None:
    """A sync fails and the power goes later: confirmed entries are stored."""
    disk = Disk(fail_sync_at=frozenset({first}), cut_at=1_000)
    path = tmp_path / "test.db"
    acked, unheld = live(path, disk, first)

    assert disk.syncs >= first
    check_ledger(after(path, disk, first), acked, unheld)
