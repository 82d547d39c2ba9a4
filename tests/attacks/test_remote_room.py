"""The room of the remote store: one tenant could fill its bound, and no other's copies got there.

Half of the bound is held for shares, as of the disk's writes; a payer above its share gives up
objects for one that is inside its own, and its queue of wanted puts is no other's.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import Quota
from engine.moves import SetStoredQuotas
from engine.storage.index.index_file import LOG_BYTES_MAX
from engine.storage.remote.copies import PUTS_MAX
from engine.storage.sealing.master_key import KEY_BYTES, MasterKey
from engine.storage.slabs.record import place_bytes_of
from tests.examples import examples
from tests.unit.engine.storage.local_storage import LocalRig, MakeRig
from tests.unit.engine.storage.remote_faults import FaultyObjects
from tests.unit.engine.storage.storage_rig import A, B, path_of

WIDE = 2**18
PLACE = place_bytes_of(WIDE)
MASTER = MasterKey(b"1" * KEY_BYTES)
ROOM = 12
"""Places of the remote store: a sixth is held for each of three payers."""
SHARE = 2
QUOTAS = tuple(Quota(payer=one) for one in (b"loud", b"quiet", b"late"))


@pytest.fixture
def make(tmp_path: Path) -> Iterator[MakeRig]:
    """Return a function that opens a store with a remote one, for three payers."""
    rigs: list[LocalRig] = []

    def open_rig(**settings: Any) -> LocalRig:
        rigs.append(open_store(tmp_path / f"levels-{len(rigs)}", **settings))
        return rigs[-1]

    yield open_rig
    for rig in rigs:
        rig.close()


def open_store(
    folder: Path, places: int = 100, quotas: tuple[Quota, ...] = QUOTAS, **settings: Any
) -> LocalRig:
    """Open a store with so many places on disk and `ROOM` places in the remote store."""
    room = LOG_BYTES_MAX + places * PLACE + WIDE
    options: dict[str, Any] = {"disk_bytes": room, "slab_bytes": places * PLACE, "slot_bytes": WIDE}
    options |= {"master": MASTER, "remote": FaultyObjects(), "remote_bytes": ROOM * PLACE}
    options["write_bytes_per_day"] = 1_000 * PLACE
    rig = LocalRig(folder, **options | settings)
    rig.storage.send(SetStoredQuotas(quotas))
    rig.local.turn()
    return rig


def put(rig: LocalRig, payer: bytes, number: int, promise_s: float = 600.0) -> int:
    """Store a prefix of one run, and let a second pass; return its record."""
    rig.clock.advance(1.0)
    namespace = A if payer == b"loud" else B
    (record_id,) = rig.store(namespace, path_of(number), payer=payer, promise_s=promise_s)
    rig.local.turn()
    return record_id


def have_objects(rig: LocalRig, record_ids: list[int]) -> int:
    """Return how many of these records have an object, once nothing more changes."""
    for _ in range(4):
        rig.local.turn()
    rig.disk.check()
    return sum(bool(rig.far.rows.name_of(one)) for one in record_ids)


def test_a_payer_that_is_alone_has_all_of_the_room(make: MakeRig) -> None:
    """Nothing is held for payers that do not exist."""
    rig = make(quotas=())
    loud = [put(rig, b"loud", number) for number in range(ROOM + 4)]

    assert have_objects(rig, loud) == ROOM
    assert rig.far.stats().used_bytes <= ROOM * PLACE


@pytest.mark.parametrize("promise_s", [0.0, 600.0])
def test_a_payer_that_fills_the_room_leaves_another_its_share(
    make: MakeRig, promise_s: float
) -> None:
    """Promised records have objects beside their places on disk, others only objects."""
    rig = make(places=8 if not promise_s else 100)
    for number in range(30):
        put(rig, b"loud", number, promise_s)
    quiet = [put(rig, b"quiet", 100 + number) for number in range(SHARE)]
    quiet += [put(rig, b"late", 200 + number) for number in range(SHARE)]
    for number in range(30, 60):
        put(rig, b"loud", number, promise_s)

    assert have_objects(rig, quiet) == 2 * SHARE
    assert rig.far.stats().used_bytes <= ROOM * PLACE


def test_a_long_queue_of_one_payer_holds_up_no_other(make: MakeRig) -> None:
    """Payers take turns, so what another one wants goes among the next ones."""
    rig = make(remote_bytes=0)
    for number in range(4 * PUTS_MAX):
        rig.store(A, path_of(number), payer=b"loud", promise_s=600.0)
    (quiet,) = rig.store(B, path_of(0), payer=b"quiet", promise_s=600.0)
    rig.local.turn()
    assert isinstance(rig.remote, FaultyObjects)
    order = list(rig.remote.objects)

    assert len(order) == 4 * PUTS_MAX + 1
    assert order.index(rig.far.rows.name_of(quiet)) < 2 * PUTS_MAX


@settings(max_examples=examples(60))
@given(
    st.lists(st.sampled_from([b"loud", b"quiet", b"late"]), min_size=8, max_size=40),
    st.randoms(use_true_random=False),
)
def test_no_order_of_payers_takes_a_share(
    tmp_path_factory: pytest.TempPathFactory, payers: list[bytes], random: Random
) -> None:
    """What is inside its share has its objects, whatever comes before, between and after; and the
    bound holds at each moment."""
    rig = open_store(tmp_path_factory.mktemp("levels"))
    inside: dict[bytes, list[int]] = {b"quiet": [], b"late": []}
    try:
        for number, payer in enumerate(payers):
            if len(mine := inside.get(payer, [])) < SHARE and payer in inside:
                mine.append(put(rig, payer, number))
            else:
                put(rig, b"loud", number, random.choice([0.0, 600.0]))
            assert rig.far.stats().used_bytes <= ROOM * PLACE

        for mine in inside.values():
            assert have_objects(rig, mine) == len(mine)
    finally:
        rig.close()
