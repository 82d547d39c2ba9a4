"""Promises over the end of an engine: charged, kept, renewed, ended and erased by the next one."""

from __future__ import annotations

import pytest

from engine.api import CacheGrant, Erase, LeaseRequest, Quota
from engine.levels.promise_terms import UNKNOWN_CLASS
from engine.moves import Recall, Renew, StorageStats
from tests.unit.engine.levels.leveled_worlds import PAYER, LeveledWorld, ask, leased, prompt
from tests.unit.engine.levels.test_promises_below import SHORT, pushed, with_promise


def restarted(world: LeveledWorld) -> LeveledWorld:
    """Start the next engine, which then hears of what is promised."""
    world.restart()
    world.settle()
    return world


@pytest.mark.parametrize("is_kept", [False, True], ids=["disk", "host and disk"])
def test_a_promise_is_charged_without_a_request_that_reads_it(is_kept: bool) -> None:
    """To its payer, whose bound it takes room of, under the class that it was made in."""
    world = LeveledWorld(is_kept=is_kept)
    few = Quota(payer=b"payer", promised_blocks_max=8)
    for number in range(2):
        grant = leased(12, lease_id=f"lease{number}", quota=few)
        world.run(ask(f"leased{number}", prompt(number), grant=grant))
    restarted(world)
    account = world.cache.payer_account(b"payer")
    use = world.cache.use(b"n")

    assert world.promised() == (6, 6, 6)
    assert use.promised == {"hour": 6}
    assert account is not None
    assert account.promised_total == 6
    world.run(ask("third", prompt(5), grant=leased(12, lease_id="third", quota=few)))
    assert world.grant("third").tokens == 8  # two blocks are left of eight
    assert not world.lost


def test_a_promise_asked_for_again_takes_no_further_room() -> None:
    """The gateway's books survive a deploy: its clients renew what they wrote before."""
    world = LeveledWorld(is_kept=True)
    few = Quota(payer=b"payer", promised_blocks_max=3)
    world.run(ask("first", prompt(1), grant=leased(12, quota=few)))
    restarted(world)
    world.run(ask("again", prompt(1), grant=leased(12, lease_id="other", quota=few)))

    assert world.grant("again").outcome == "granted"
    assert world.promised() == (3, 3, 0)
    assert world.loaded("again") == {"host": 12}


def test_host_memory_keeps_promises_over_the_end_of_its_engine() -> None:
    """They are not given up for room, as those of the engine before were not."""
    world = LeveledWorld(slots=30, disk=False, is_kept=True, host_keeps_promises=True)
    pushed(world, 4)
    restarted(world)
    world.push_out(30)  # more than host memory holds

    assert world.promised() == (12, 12, 12)
    for number in range(4):
        assert world.run(ask(f"again{number}", prompt(number))) == [12]


def test_host_copies_keep_promises_until_the_disk_has_them() -> None:
    """A disk that failed before the end of an engine is asked again by the next one."""
    world = with_promise(slots=30, is_kept=True)
    world.disk.lose(min(world.disk.records))
    restarted(world)
    world.disk.is_away = True
    world.push_out(30)
    before = world.promised()
    world.disk.is_away = False
    world.clock.advance(2.0)
    world.settle()
    for _ in range(5):
        world.pass_s(1.0)

    assert before == (3, 3, 3)
    assert world.promised() == (3, 3, 3)
    assert len([one for one in world.disk.records.values() if one.promise_at_s > 1000]) == 3


def test_a_taken_over_promise_is_renewed_by_reads_and_told_to_the_disk() -> None:
    """Its renewal comes with it; without reads it ends at its time."""
    world = LeveledWorld()
    for name in ("read", "left"):
        number = 1 if name == "read" else 2
        lease = (LeaseRequest(12, SHORT, name),)
        world.run(ask(name, prompt(number), grant=CacheGrant(b"n", PAYER, lease)))
    restarted(world)
    world.clock.advance(60.0)
    world.run(ask("again", prompt(1)))
    world.pass_s(60.0)

    assert world.promised()[0] == 3
    assert any(isinstance(one, Renew) and one.promise_s > 90 for one in world.disk.commands)
    world.pass_s(60.0)
    assert world.promised() == (0, 0, 0)
    assert not world.lost


@pytest.mark.parametrize("what", ["namespace", "lease", "prefix"])
@pytest.mark.parametrize("polls", [0, 4])
def test_an_erasure_during_the_recall_leaves_nothing_promised(what: str, polls: int) -> None:
    """A page that was on its way may name what is gone; it is asked for again."""
    world = LeveledWorld(is_kept=True)
    pushed(world, 4)
    world.run(ask("own", prompt(9), grant=leased(12, lease_id="own")))
    world.weather.polls_max = polls
    world.restart()
    tokens = {"namespace": None, "lease": None, "prefix": prompt(9)[:4]}[what]
    lease_id = "own" if what == "lease" else None
    world.core.erase(Erase(1, b"n", lease_id, tokens))
    world.settle()

    left = 0 if what == "namespace" else 12
    assert world.promised()[0] == left
    assert len(world.disk.records) == left
    assert not world.lost
    world.check()


def test_a_promise_without_known_terms_is_kept_to_its_end() -> None:
    """Records of an earlier version, or of a rebuilt index, say only until when."""
    world = with_promise(SHORT)
    for record in world.disk.records.values():
        record.terms = None
    restarted(world)

    assert world.cache.use(b"n").promised == {UNKNOWN_CLASS: 3}
    world.pass_s(120.0)
    assert world.promised() == (0, 0, 0)


def test_a_record_without_a_promise_that_a_look_finds_is_not_promised() -> None:
    """Not to the instant of the look either, which the next engine may take for the future."""
    world = with_promise(SHORT)
    world.forget_promises()
    restarted(world)
    world.run(ask("again", prompt(1)))

    copies = world.levels.places.match(b"n", prompt(1), world.clock())
    assert [copy.promised for copy in copies] == [False] * 3


def test_the_disk_is_asked_again_when_it_has_opened() -> None:
    """A storage process that is slow to open, or was replaced, tells what it promises then."""
    world = LeveledWorld()
    pushed(world, 3)
    world.restart()
    world.disk.is_away = True
    world.settle()
    before = world.promised()
    world.disk.is_away = False
    world.disk.beat(StorageStats("open"))
    world.step()
    world.settle()

    assert before == (0, 0, 0)
    assert world.promised() == (9, 9, 9)
    assert sum(isinstance(one, Recall) for one in world.disk.commands) > 2


def test_an_engine_that_ends_tells_the_ends_of_promises() -> None:
    """A read that moved one by little is told at the close, so that no restart shortens it."""
    world = with_promise(SHORT)
    world.clock.advance(10.0)  # less than an eighth of a hundred seconds
    world.run(ask("again", prompt(1)))
    before = {one.promise_at_s for one in world.disk.records.values()}
    world.levels.close()
    world.disk.finish()

    assert {
        round(one.promise_at_s - at, 3) for one in world.disk.records.values() for at in before
    } == {10.1}
