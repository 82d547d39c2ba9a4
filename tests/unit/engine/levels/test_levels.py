"""Levels below a whole engine over the token oracle: what is copied, loaded, given up and erased.

`World` checks every answer against the one from nothing, and every block and slot after each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from msgspec.structs import replace

from engine.api import AtRest, CacheGrant, Erase, Erased, Quota, Retention
from engine.config import RemoteConfig
from engine.errors import InvariantViolation
from engine.levels.loads import Load, Loads
from engine.levels.places import RunPlaces
from engine.moves import KeepHere, Look, Move, RemoteStats, Renew, StorageStats, StoreRuns
from tests.checkers import RuleBroken
from tests.fake_levels import FakeTransferEngine, MoveError
from tests.fakes import OracleError
from tests.unit.engine.levels.leveled_worlds import (
    LIMITED,
    PAYER,
    LeveledWorld,
    ask,
    leased,
    prompt,
)


@pytest.fixture(params=[1, 2])
def world(request: pytest.FixtureRequest) -> LeveledWorld:
    """Return an engine with levels, with one step at a time and with one step in flight."""
    return LeveledWorld(depth=request.param)


def test_an_evicted_prefix_is_loaded_from_host_memory(world: LeveledWorld) -> None:
    """The next victims have been copied ahead, so eviction costs nothing."""
    world.run(ask("first", prompt(1)))
    world.push_out()

    assert world.below(prompt(1)) == (0, {"host": 12})
    assert world.run(ask("again", prompt(1))) == [12]
    assert world.loaded("again") == {"host": 12}


def test_a_promised_prefix_survives_a_restart_on_disk(world: LeveledWorld) -> None:
    """It is stored as soon as it is committed, without any pressure."""
    world.run(ask("first", prompt(1), grant=leased(13)))
    world.restart()

    assert world.run(ask("again", prompt(1))) == [12]
    assert world.loaded("again") == {"disk": 12}


def test_an_unpromised_prefix_is_stored_after_a_second_use(world: LeveledWorld) -> None:
    """A prompt that never comes back wears no disk."""
    world.run(ask("once", prompt(1)), ask("twice", prompt(2)))
    world.run(ask("twice again", prompt(2)))
    world.push_out()

    assert world.stored() == {prompt(2)[:12]}


def test_a_promise_is_stored_when_the_disk_comes_back() -> None:
    """A storage process that starts after the first requests, or again, misses nothing."""
    world = LeveledWorld()
    world.disk.is_away = True
    world.run(ask("first", prompt(1), grant=leased(13)), ask("more", prompt(2), grant=leased(13)))
    assert not world.stored()

    world.disk.is_away = False
    world.disk.beat(StorageStats("open"))
    for _ in range(3):
        world.step()
    world.settle()

    assert world.stored() == {prompt(1)[:12], prompt(2)[:12]}


def test_nothing_is_stored_beyond_the_days_writes() -> None:
    """Promised prefixes are counted, and never refused for it."""
    world = LeveledWorld()
    world.disk.beat(StorageStats("open", written_bytes_today=2**31))
    world.run(ask("twice", prompt(2)))
    world.run(ask("twice again", prompt(2)), ask("leased", prompt(3), grant=leased(13)))
    world.push_out()

    assert world.stored() == {prompt(3)[:12]}


def test_a_failed_load_is_computed_and_its_copy_never_tried_again(world: LeveledWorld) -> None:
    """There is no third outcome beside done and failed."""
    world.run(ask("first", prompt(1)))
    world.push_out()
    world.weather.fails = 1.0

    assert world.run(ask("again", prompt(1))) == [0]
    world.weather.fails = 0.0
    assert world.below(prompt(1))[1] == {}
    assert world.core.stats().levels[0].failed_total > 0


def test_a_damaged_record_is_not_served() -> None:
    """What came before it counts; the rest is computed."""
    world = LeveledWorld()
    world.run(ask("first", prompt(1), grant=leased(13)))
    world.restart()
    last = max(world.disk.records)
    world.submit(ask("again", prompt(1)))
    world.step()
    del world.disk.records[last]
    world.settle()

    assert world.cached("again") == 8


def test_a_cancelled_load_frees_its_blocks_when_its_moves_have_ended(world: LeveledWorld) -> None:
    """Until then nobody else may have them."""
    world.run(ask("first", prompt(1)))
    world.push_out()
    world.weather.polls_max = 9
    world.submit(ask("again", prompt(1)))
    for _ in range(20):
        world.step()
        if world.levels.loads.moves:
            break
    world.cancel("again")

    assert world.core.stats().pinned_blocks >= world.levels.loads.moves > 0
    world.settle()
    assert world.core.stats().pinned_blocks == 0


def test_two_requests_load_one_prefix_once(world: LeveledWorld) -> None:
    """A sequence that is being loaded leads the others."""
    world.run(ask("first", prompt(1, 20)))
    world.push_out()
    world.weather.polls_max = 3
    copied = world.core.stats().levels[0].loaded_total

    assert world.run(ask("a", prompt(1, 20)), ask("b", prompt(1, 20))) == [16, 16]
    assert world.core.stats().levels[0].loaded_total - copied == 4


def test_an_erased_namespace_is_gone_from_every_level(world: LeveledWorld) -> None:
    """The answer tells the copies of each level, and comes when the disk has confirmed."""
    world.run(ask("first", prompt(1), grant=leased(13)))
    world.weather.polls_max = 5
    world.chance.seed(2)
    answers: list[Erased] = []
    world.core.erase(Erase(7, b"n"), answers.append)
    world.written[b"n"] = []
    assert not answers
    world.settle()
    (answer,) = answers

    assert (answer.call_id, answer.blocks) == (7, 4)
    assert [(level.level, level.blocks) for level in answer.levels] == [("host", 3), ("disk", 3)]
    world.restart()
    assert world.run(ask("again", prompt(1))) == [0]


def test_what_is_under_way_during_an_erasure_brings_nothing(world: LeveledWorld) -> None:
    """An offload, a store and a load that began before it end as nobody's."""
    world.run(ask("first", prompt(1)))
    world.push_out()
    world.weather.polls_max = 4
    world.submit(ask("again", prompt(1)))
    world.step_until_loading()
    world.core.erase(Erase(1, b"n"))
    world.written[b"n"] = []
    world.settle()

    assert world.cached("again") == 0
    assert world.wait("again").cause == "", "it is no failure of the level"
    assert world.below(prompt(1)) == (0, {})


def test_an_erased_lease_takes_only_what_it_alone_covers() -> None:
    """The copies of a prefix that another lease covers stay."""
    world = LeveledWorld(disk=False, blocks=24)
    world.run(ask("one", prompt(1, 21), grant=leased(20, lease_id="one")))
    world.run(ask("two", prompt(1, 9) + prompt(2, 12), grant=leased(16, lease_id="two")))
    world.settle()
    answers: list[Erased] = []
    world.core.erase(Erase(1, b"n", lease_id="one"), answers.append)

    assert answers[0].levels[0].blocks == 2  # of five, three are in both
    assert len(world.levels.places.match(b"n", prompt(1, 9) + prompt(2, 12), 0.0)) == 4


def test_a_copy_has_its_blocks_limit(world: LeveledWorld) -> None:
    """Nothing is matched at or after its limit, on any level."""
    world.run(ask("first", prompt(1), grant=leased(13, LIMITED)))
    world.push_out()
    assert world.below(prompt(1))[1] == {"host": 12}

    world.clock.advance(51)

    assert world.below(prompt(1))[1] == {}
    assert world.run(ask("again", prompt(1))) == [0]


def test_a_read_renews_what_the_disk_has() -> None:
    """Otherwise a promise that was renewed on the device would not survive a restart."""
    world = LeveledWorld()
    retention = Retention("kept", promise_s=100, limit_s=200)
    world.run(ask("first", prompt(1), grant=leased(13, retention)))
    world.clock.advance(90)
    world.run(ask("again", prompt(1), grant=leased(13, retention)))
    (renewed,) = [one for one in world.disk.commands if isinstance(one, Renew)]

    assert renewed.promise_s == pytest.approx(100)
    assert len(renewed.record_ids) == 3


def test_what_may_not_be_written_leaves_nothing(world: LeveledWorld) -> None:
    """Such a request may read copies; its own blocks go nowhere."""
    world.run(ask("private", prompt(1), grant=CacheGrant(b"n", PAYER, write=False)))
    world.push_out()

    assert not any(node.namespace == b"n" for node in world.levels.places)


@pytest.mark.parametrize(("at_rest", "is_told"), [("remote", 0), ("local", 1), ("never", 1)])
def test_the_storage_learns_once_what_may_not_leave(at_rest: AtRest, is_told: int) -> None:
    """Before anything else of that request, also where an earlier one has let copies leave."""
    world = LeveledWorld(remote=RemoteConfig("s3://bucket", tokens_min=4))
    world.run(ask("first", prompt(1), grant=leased(13)))
    for name in ("second", "third"):
        world.run(ask(name, prompt(2), grant=replace(leased(13), at_rest=at_rest)))
    world.run(ask("last", prompt(3), grant=leased(13)))
    told = [one for one in world.disk.commands if isinstance(one, KeepHere)]
    stores = [one.may_leave for one in world.disk.commands if isinstance(one, StoreRuns)]

    assert told == [KeepHere((b"n",))] * is_told
    assert stores[0]
    assert set(stores[1:]) <= {at_rest == "remote"}


def test_a_request_that_may_not_read_loads_nothing(world: LeveledWorld) -> None:
    """Not even a look is sent for it."""
    world.run(ask("first", prompt(1), grant=leased(13)))
    world.restart()
    world.run(ask("again", prompt(1), grant=CacheGrant(b"n", PAYER, read=False)))

    assert not [command for command in world.disk.commands if isinstance(command, Look)]


def test_one_payers_stream_takes_no_copies_inside_anothers_floor() -> None:
    """Host memory has the device's floors, in proportion."""
    world = LeveledWorld(slots=24, disk=False)
    north = CacheGrant(b"north", Quota(floor_blocks=4))
    world.run(ask("first", prompt(1), grant=north))
    for number in range(12):
        name = f"south{number}"
        world.run(ask(name, prompt(number, 40), grant=CacheGrant(b"south")))

    assert world.run(ask("again", prompt(1), grant=north)) == [12]


def test_loads_that_would_be_slower_are_computed() -> None:
    """The cost model compares measured paces."""
    world = LeveledWorld()
    world.run(ask("first", prompt(1)))
    world.push_out()
    for _ in range(200):
        world.levels.paces["host"].record_block(10.0)

    assert world.run(ask("again", prompt(1))) == [0]


def test_what_lies_in_the_remote_store_is_loaded_and_counted_there() -> None:
    """The look says so; a fetch says where the record was, and its pace is that level's."""
    world = LeveledWorld(remote=RemoteConfig("s3://bucket", tokens_min=4))
    world.run(ask("first", prompt(1), grant=leased(13)))
    world.restart()
    world.disk.level = "remote"
    before = world.levels.paces["remote"].bytes_per_s
    world.weather.seconds = 1e-6

    assert world.run(ask("again", prompt(1))) == [12]
    assert world.loaded("again") == {"remote": 12}
    assert world.levels.paces["remote"].bytes_per_s != before
    world.disk.beat(StorageStats("open", remote=RemoteStats("open", records=3)))
    world.settle()
    world.step()
    remote = world.core.stats().levels[2]
    assert (remote.name, remote.state, remote.blocks) == ("remote", "open", 3)
    assert (remote.loaded_tokens_total, remote.loaded_total, remote.chosen_total) == (12, 3, 1)


def test_a_short_prefix_is_not_fetched_from_afar() -> None:
    """Below `tokens_min` it is computed."""
    world = LeveledWorld(remote=RemoteConfig("s3://bucket", tokens_min=16))
    world.run(ask("first", prompt(1), grant=leased(13)))
    world.restart()
    world.disk.level = "remote"

    assert world.run(ask("again", prompt(1))) == [0]


# -- planted faults ---------------------------------------------------------------------------


def restart_and_read(world: LeveledWorld) -> None:
    """Store a prefix, restart, read it, under slow moves."""
    world.weather.polls_max = 3
    world.run(ask("first", prompt(1), grant=leased(13)))
    world.restart()
    world.run(ask("again", prompt(1)))


def cancel_and_crowd(world: LeveledWorld) -> None:
    """Cancel a request whose load is under way, and let others take the freed blocks."""
    world.run(ask("first", prompt(1)))
    world.push_out()
    world.weather.polls_max = 8
    for turn in range(6):
        world.submit(ask(f"again{turn}", prompt(1)))
        for _ in range(30):
            world.step()
            if world.core.stats().loading:
                break
        world.step()
        world.cancel(f"again{turn}")
        world.submit(ask(f"next{turn}", prompt(turn + 2, 40)))
        for _ in range(6):
            world.step()
    world.settle()


def read_under_failures(world: LeveledWorld) -> None:
    """Read prefixes while half of all moves fail."""
    for number in range(4):
        world.run(ask(f"first{number}", prompt(number)))
    world.push_out()
    world.weather.fails = 0.5
    for number in range(4):
        world.run(ask(f"again{number}", prompt(number)))


FAULTS: dict[str, tuple[Any, str, Any, Any]] = {
    "blocks of a load are not held": (Loads, "begin", None, cancel_and_crowd),
    "a failed load counts as loaded": (Load, "count_done", lambda self: 3, read_under_failures),
    "copies are matched by position alone": (
        RunPlaces,
        "match",
        lambda self, namespace, tokens, now_s: _first_path(self, namespace, tokens),
        read_under_failures,
    ),
}


def _first_path(places: RunPlaces, namespace: bytes, tokens: Any) -> list[Any]:
    path = list[Any]()
    copy = next((one for one in places if one.namespace == namespace), None)
    copy = None if copy is None else copy.path()[0].parent
    while copy is not None and copy.copied_children and 4 * (len(path) + 1) < len(tokens):
        copy = next(one for one in copy.children.values() if one.is_copied)
        path.append(copy)
    return path


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle, the recount or the fakes notice it."""
    owner, attribute, fault, life = FAULTS[name]
    monkeypatch.setattr(owner, attribute, fault or _begin_without_hold(Loads.begin))

    with pytest.raises((OracleError, RuleBroken, MoveError, InvariantViolation)):
        life(LeveledWorld(blocks=16))


@pytest.mark.parametrize("life", [restart_and_read, cancel_and_crowd, read_under_failures])
def test_without_a_fault_nothing_is_found(life: Any) -> None:
    """The lives that find the faults pass without them."""
    life(LeveledWorld(blocks=16))


def _begin_without_hold(begin: Any) -> Any:
    def without(self: Any, plan: Any, table: Any, *rest: Any) -> Any:
        load = begin(self, plan, table, *rest)
        if load is not None:
            self._cache.moves.unhold(load.held)
            load.held = self._cache.moves.hold_blocks(table, len(table.blocks), 0.0)
        return load

    return without


@pytest.mark.parametrize(("floor", "is_copied"), [(30, False), (0, True)])
def test_a_payer_inside_its_floor_is_not_copied_for_a_crowd(floor: int, is_copied: bool) -> None:
    """It keeps its blocks, so what it finds later must not tell of the others."""
    world = LeveledWorld(disk=False)
    mine = CacheGrant(b"mine", Quota(floor_blocks=floor, payer=b"mine"))
    tokens = prompt(1, 40)
    world.submit(ask("mine", tokens, grant=mine, max_tokens=8))
    for number in (2, 3):
        grant = CacheGrant(b"other", PAYER)
        world.submit(ask(f"other{number}", prompt(number, 40), grant=grant, max_tokens=8))
    for _ in range(6):
        world.step()

    assert "mine" in world.live, "it runs still"
    assert bool(world.levels.places.match(b"mine", tokens, 0.0)) is is_copied


def test_loads_are_moved_in_turn_over_the_payers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A payer does not wait for all of a longer load that another began before."""
    monkeypatch.setattr(FakeTransferEngine, "loads_max", 4)
    world = LeveledWorld(disk=False, blocks=40, slots=200)
    long = CacheGrant(b"long", Quota(payer=b"long"))
    short = CacheGrant(b"short", Quota(payer=b"short"))
    world.run(ask("a", prompt(1, 41), grant=long))
    world.run(ask("b", prompt(2, 9), grant=short))
    for number in range(30):  # each payer pushes its own out
        payer = (b"long", b"short")[number % 2]
        grant = CacheGrant(b"other " + payer, Quota(payer=payer))
        world.run(ask(f"push{number}", prompt(number + 100), grant=grant))
    moved: list[int] = []
    submit = world.memory.submit

    def noted(moves: Sequence[Move]) -> None:
        moved.extend(move.slot for move in moves if move.kind == "load")
        submit(moves)

    monkeypatch.setattr(world.memory, "submit", noted)
    copies = world.levels.places.match(b"short", prompt(2, 9), world.clock())
    slots = [copy.slot for copy in copies]
    world.submit(ask("long", prompt(1, 41), grant=long))
    world.submit(ask("short", prompt(2, 9), grant=short))
    world.settle()

    assert [world.loaded(name) for name in ("long", "short")] == [{"host": 40}, {"host": 8}]
    assert set(slots) <= set(moved[:8]), "both of its two blocks are among the first eight"
