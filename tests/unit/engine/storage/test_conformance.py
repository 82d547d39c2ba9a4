"""What every storage does: the one on disk, and the one in memory that other tests use."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.moves import ROOT, Fetch, Fetched, Look, Looked, PromiseTerms, Stored
from engine.storage.memory.arena import HostArena
from engine.storage.sealing.master_key import MasterKey
from tests.fakes import FakeClock
from tests.memory_storage import MemoryStorage
from tests.unit.engine.storage.local_storage import LocalRig
from tests.unit.engine.storage.storage_rig import (
    LAYOUT,
    LONG,
    RUN,
    SLOT_BYTES,
    A,
    B,
    DiskRig,
    StorageRig,
    content_of,
)

TERMS = PromiseTerms("hour", renew_name="hour", renew_promise_s=3600.0, renew_limit_s=7200.0)


@pytest.fixture(params=["memory", "local", "sealed", "disk"])
def rig(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[StorageRig]:
    """Return each storage in turn."""
    if request.param == "disk":
        disk = DiskRig(tmp_path / "levels", FakeClock(1_000.0))
        yield disk
        disk.close()
        return
    if request.param in ("local", "sealed"):
        master = MasterKey(bytes(32)) if request.param == "sealed" else None
        other_bytes = (SLOT_BYTES // 2,)
        local = LocalRig(tmp_path / "levels", other_bytes=other_bytes, master=master)
        yield local
        local.close()
        return
    arena, clock = HostArena.create(LAYOUT), FakeClock(1_000.0)
    storage = MemoryStorage(arena, clock, run_tokens=RUN)
    yield StorageRig(storage, arena, clock, storage.poll)
    storage.close()
    arena.close()


def test_a_stored_prefix_is_found_and_comes_back_to_the_byte(rig: StorageRig) -> None:
    """The purpose of it all."""
    ids = rig.store(A, LONG)

    assert rig.found(A, LONG) == list(ids)
    assert rig.fetch(A, ids) == [content_of(A, LONG[: at + RUN]) for at in range(0, 20, RUN)]


def test_a_look_finds_the_longest_common_prefix(rig: StorageRig) -> None:
    """Tokens are compared from the root, in whole runs."""
    ids = rig.store(A, LONG)

    assert rig.found(A, [*LONG, 1, 2, 3]) == list(ids)
    assert rig.found(A, [*LONG[:9], 99, *LONG[10:]]) == list(ids[:2])
    assert rig.found(A, LONG[: RUN - 1]) == []
    assert rig.found(A, [99, *LONG[1:]]) == []


def test_forks_share_their_beginning(rig: StorageRig) -> None:
    """A branch is stored below the record where it begins."""
    ids = rig.store(A, LONG)
    branch = (50, 51, 52, 53)
    (other,) = rig.store(A, branch, parent=ids[1], above=LONG[:8])

    assert rig.found(A, [*LONG[:8], *branch]) == [*ids[:2], other]
    assert rig.fetch(A, [other]) == [content_of(A, [*LONG[:8], *branch])]


def test_a_run_that_was_stored_before_keeps_its_record(rig: StorageRig) -> None:
    """No second copy is written."""
    ids = rig.store(A, LONG[:12])

    assert rig.store(A, LONG)[:3] == ids


def test_a_namespace_finds_nothing_of_another(rig: StorageRig) -> None:
    """Neither by its tokens nor by its record ids."""
    ids = rig.store(A, LONG)

    assert rig.found(B, LONG) == []
    assert rig.fetch(B, ids[:1]) == [None]
    refused = rig.send_store(rig.store_command(B, LONG[4:8], parent=ids[0]))
    assert (refused.record_ids, refused.code) == ((), "no_parent")
    assert rig.erase(B).records == 0
    assert rig.renew(B, ids, limit_s=1.0) == ids
    assert rig.found(A, LONG) == list(ids)


def test_a_run_below_an_unknown_record_is_refused(rig: StorageRig) -> None:
    """Its parent may have been dropped meanwhile."""
    refused = rig.send_store(rig.store_command(A, LONG, parent=77))

    assert (refused.record_ids, refused.code) == ((), "no_parent")


def test_bytes_without_their_digest_are_not_stored(rig: StorageRig) -> None:
    """The slot was written to since its digest was made: what came before it is kept."""
    command = rig.store_command(A, LONG)
    rig.arena.view(2, SLOT_BYTES)[5] ^= 1
    outcome = rig.send_store(command)

    assert (len(outcome.record_ids), outcome.code) == (2, "damaged")
    assert rig.found(A, LONG) == list(outcome.record_ids)


def test_an_unknown_record_is_not_fetched(rig: StorageRig) -> None:
    """A record id is never used again, so a stale one finds nothing."""
    assert rig.fetch(A, [12345]) == [None]


def test_nothing_is_found_at_or_after_its_limit(rig: StorageRig) -> None:
    """Neither by a look nor by a fetch, nor as a parent."""
    ids = rig.store(A, LONG, limit_s=10.0)
    rig.clock.advance(9.0)
    (first, *_) = rig.look(A, LONG)
    assert first.limit_s == pytest.approx(1.0, abs=0.01)

    rig.clock.advance(1.0)
    assert rig.found(A, LONG) == []
    assert rig.fetch(A, ids[:1]) == [None]
    assert rig.send_store(rig.store_command(A, LONG[4:8], parent=ids[0])).code == "no_parent"


def test_a_run_may_be_stored_anew_after_its_limit(rig: StorageRig) -> None:
    """Under a new id."""
    (old,) = rig.store(A, LONG[:4], limit_s=10.0)
    rig.clock.advance(20.0)
    (new,) = rig.store(A, LONG[:4])

    assert new != old
    assert rig.found(A, LONG) == [new]


def test_promises_are_told_with_their_remaining_time(rig: StorageRig) -> None:
    """Durations from the message: two processes share no clock."""
    rig.store(A, LONG[:4], promise_s=60.0)
    rig.clock.advance(20.0)
    (found,) = rig.look(A, LONG)

    assert found.limit_s is None
    assert found.promise_s == pytest.approx(40.0, abs=0.01)
    assert found.fidelity == "exact"


def test_a_renewal_lengthens_and_never_shortens(rig: StorageRig) -> None:
    """Limit and promise each end at the later of both instants."""
    ids = rig.store(A, LONG[:8], limit_s=10.0, promise_s=5.0)
    assert rig.renew(A, ids[:1], limit_s=30.0, promise_s=20.0) == ()
    rig.renew(A, ids[:1], limit_s=1.0, promise_s=1.0)
    rig.renew(A, ids[1:])
    first, second = rig.look(A, LONG)

    assert first.limit_s == pytest.approx(30.0, abs=0.01)
    assert first.promise_s == pytest.approx(20.0, abs=0.01)
    assert second.limit_s == pytest.approx(10.0, abs=0.01)
    assert second.promise_s == pytest.approx(5.0, abs=0.01)


def test_what_is_promised_is_told_to_the_next_engine(rig: StorageRig) -> None:
    """With what it hangs on, its payer, terms and leases, from the root on and page by page."""
    plain = rig.store(A, LONG[:4], payer=b"ada")
    deep = rig.store(
        A, LONG[4:12], parent=plain[0], above=LONG[:4], lease_ids=("one",), payer=b"ada"
    )
    rig.store(B, LONG)
    rig.renew(A, deep, limit_s=90.0, promise_s=60.0, terms=TERMS)
    rig.clock.advance(20.0)
    first, second = rig.recall(2), rig.recall(2, deep[0])

    assert [run.record_id for run in (*first.runs, *second.runs)] == [*plain, *deep]
    assert (first.last, second.last) == (deep[0], ROOT)
    assert [run.parent for run in (*first.runs, *second.runs)] == [ROOT, plain[0], deep[0]]
    (last,) = second.runs
    assert (last.namespace, last.payer, last.tokens) == (A, b"ada", LONG[8:12])
    assert last.promise_s == pytest.approx(40.0, abs=0.01)
    assert last.terms == TERMS
    assert last.lease_ids == ("one",)
    assert (first.runs[0].promise_s, first.runs[0].terms) == (0.0, None)


def test_an_erased_or_ended_promise_is_not_told(rig: StorageRig) -> None:
    """Nothing is charged for it any more."""
    ids = rig.store(A, LONG[:8], promise_s=10.0)
    rig.store(B, LONG[:8], promise_s=60.0)
    rig.clock.advance(20.0)
    before = rig.recall()
    rig.erase(B)

    assert [run.namespace for run in before.runs] == [B, B]
    assert rig.recall().runs == ()
    assert rig.found(A, LONG[:8]) == list(ids)


def test_a_renewal_tells_which_records_are_gone(rig: StorageRig) -> None:
    """A caller that relies on a promise must know that its record was there at the renewal."""
    ids = rig.store(A, LONG)
    rig.erase(A, tokens=LONG[:12])

    assert rig.renew(A, (*ids, 99), promise_s=20.0) == (*ids[2:], 99)


def test_an_erased_namespace_is_gone_and_others_stay(rig: StorageRig) -> None:
    """The receipt counts what left the disk."""
    ids, others = rig.store(A, LONG), rig.store(B, LONG)
    receipt = rig.erase(A)

    assert (receipt.records, receipt.code) == (5, "")
    assert receipt.bytes >= 5 * SLOT_BYTES
    assert rig.found(A, LONG) == []
    assert rig.fetch(A, ids[:1]) == [None]
    assert rig.found(B, LONG) == list(others)
    assert not rig.storage.has_records(A)
    assert rig.storage.has_records(B)


def test_an_erased_lease_leaves_what_another_lease_covers(rig: StorageRig) -> None:
    """A record stays if another lease covers it or anything under it."""
    ids = rig.store(A, LONG[:8], lease_ids=("one",))
    rig.store(A, LONG[8:12], parent=ids[1], above=LONG[:8], lease_ids=("two",))
    rig.store(A, (70, 71, 72, 73), parent=ids[0], above=LONG[:4], lease_ids=("one",))

    assert rig.erase(A, lease_id="one").records == 1
    assert rig.found(A, [*LONG[:4], 70, 71, 72, 73]) == [ids[0]]
    assert len(rig.found(A, LONG)) == 3
    assert rig.erase(A, lease_id="two").records == 1
    assert rig.erase(A, lease_id="none").records == 0


def test_a_renewal_puts_a_record_under_one_more_lease(rig: StorageRig) -> None:
    """The erasure of the first lease leaves it then."""
    ids = rig.store(A, LONG[:8], lease_ids=("one",))
    rig.renew(A, ids[:1], lease_ids=("two",))

    assert rig.erase(A, lease_id="one").records == 1
    assert rig.found(A, LONG) == [ids[0]]


@pytest.mark.parametrize(("prefix", "gone"), [(4, 5), (6, 4), (8, 4), (20, 1), (21, 0), (0, 5)])
def test_an_erased_prefix_takes_everything_under_it(
    rig: StorageRig, prefix: int, gone: int
) -> None:
    """A prefix that ends inside a run takes that run."""
    rig.store(A, LONG)
    receipt = rig.erase(A, tokens=(*LONG, 99)[:prefix])

    assert receipt.records == gone
    assert len(rig.found(A, LONG)) == 5 - gone


def test_an_erased_prefix_leaves_its_siblings(rig: StorageRig) -> None:
    """Runs are compared token by token."""
    (first, *_) = rig.store(A, LONG)
    (other,) = rig.store(A, (9, 9, 9, 9))
    rig.erase(A, tokens=(0, 1))

    assert rig.found(A, (9, 9, 9, 9)) == [other]
    assert rig.fetch(A, [first]) == [None]


def test_each_command_has_one_outcome(rig: StorageRig) -> None:
    """Callers hold slots until then."""
    command = rig.store_command(A, LONG[:8])
    ids = rig.send_store(command).record_ids
    fetch = Fetch(rig.call_id(), A, (*ids, 99), (10, 11, 12), SLOT_BYTES)
    look = Look(rig.call_id(), A, LONG)
    rig.storage.send(fetch)
    rig.storage.send(look)
    fetched = rig.answers(fetch.call_id, 3)
    (looked,) = rig.answers(look.call_id)

    assert sorted(one.is_done for one in fetched if isinstance(one, Fetched)) == [
        False,
        True,
        True,
    ]
    assert isinstance(looked, Looked)
    assert [one for one in rig.unclaimed if isinstance(one, Stored | Looked | Fetched)] == []


def test_a_closed_storage_fails_commands_at_once(rig: StorageRig) -> None:
    """A request never waits for a disk that is gone."""
    ids = rig.store(A, LONG[:4])
    rig.storage.close()

    assert rig.send_store(rig.store_command(A, LONG)).code == "closed"
    assert rig.found(A, LONG) == []
    assert rig.fetch(A, ids) == [None]
    assert rig.erase(A).code == "closed"
    assert not rig.storage.has_records(A)


def test_a_record_has_the_size_and_the_fidelity_of_its_copy(rig: StorageRig) -> None:
    """A look tells both; into slots of another size nothing is fetched."""
    half = SLOT_BYTES // 2
    command = rig.store_command(A, LONG, fidelity="near", slot_bytes=half)
    ids = rig.send_store(command).record_ids

    assert [(run.fidelity, run.slot_bytes) for run in rig.look(A, LONG)] == [("near", half)] * 5
    assert rig.fetch(A, ids[:1], half) == [content_of(A, LONG[:RUN], half)]
    assert rig.fetch(A, ids[:1]) == [None]
    assert rig.found(A, LONG) == list(ids), "the record is not to blame"


def test_a_store_in_another_format_replaces_the_record(rig: StorageRig) -> None:
    """With what hangs on it: it was computed over that copy, and nothing reads it any more."""
    old = rig.store(A, LONG)
    half = SLOT_BYTES // 2
    command = rig.store_command(A, LONG[: 2 * RUN], fidelity="near", slot_bytes=half)
    new = rig.send_store(command).record_ids

    assert rig.found(A, LONG) == list(new)
    assert not set(new) & set(old)
    assert rig.fetch(A, new, half)[1] == content_of(A, LONG[: 2 * RUN], half)


def test_refused_below_a_limit_of_records() -> None:
    """The storage in memory can be full, for the tests of levels."""
    arena = HostArena.create(LAYOUT)
    storage = MemoryStorage(arena, FakeClock(), run_tokens=RUN, records_max=2)
    rig = StorageRig(storage, arena, FakeClock(), storage.poll)
    outcome = rig.send_store(rig.store_command(A, LONG))

    assert (len(outcome.record_ids), outcome.code) == (2, "full")
    assert storage.stats().records == 2
    arena.close()


def test_namespaces_with_records_are_told_once(rig: StorageRig) -> None:
    """The gateway learns from them what an erasure has to reach."""
    rig.store(A, LONG)
    rig.store(B, LONG[:RUN])
    assert rig.storage.namespaces() == {A, B}
    assert rig.storage.take_changed() == {A, B}
    assert rig.storage.take_changed() == set()

    rig.store(A, (*LONG, *LONG))
    assert rig.storage.take_changed() == set()
