"""Packed copies: which format a namespace gets, what survives a restart, what is told of it."""

from __future__ import annotations

from typing import Any

import pytest

from engine.api import FIDELITIES, CacheGrant, Erase, Fidelity
from engine.levels.copy_formats import OWN, CopyFormats
from engine.moves import SlotFormat
from tests.fake_levels import PACKED, PLAIN, MoveError
from tests.unit.engine.levels.leveled_worlds import PAYER, LeveledWorld, ask, leased, prompt


def packed_world(**settings: Any) -> LeveledWorld:
    """Return a world whose copies may be packed."""
    return LeveledWorld(formats=PACKED, **settings)


def grant(fidelity: Fidelity, **wanted: Any) -> CacheGrant:
    """Return a grant of the namespace of a fidelity, with one lease."""
    leases = leased(13).leases
    return CacheGrant(fidelity.encode(), PAYER, **({"leases": leases} | wanted), fidelity=fidelity)


def copies(world: LeveledWorld, level: int = 0) -> dict[str, tuple[int, int]]:
    """Return blocks and bytes by fidelity on a level."""
    stats = world.core.stats().levels[level]
    return {one.fidelity: (one.blocks, one.bytes) for one in stats.copies}


def test_each_namespace_gets_the_smallest_format_that_it_allows() -> None:
    """Exact copies are as large as blocks."""
    world = packed_world()
    for fidelity in FIDELITIES:
        world.run(ask(fidelity, prompt(1), grant=grant(fidelity)))

    assert copies(world) == {"exact": (3, 3000), "near": (3, 1500), "rough": (3, 900)}
    assert world.levels.host_bytes(b"near") == 1500
    assert world.core.stats().levels[0].used_bytes == 5400
    (payer,) = world.core.stats().levels[0].payers
    assert (payer.used, payer.promised) == (5400, 0)
    world.levels.check()


def test_a_loaded_copy_is_told_as_what_it_is() -> None:
    """Asked is not got: what was computed is exact until a packed copy was loaded."""
    world = packed_world()
    plain = grant("near", leases=())
    for name in ("first", "again"):
        world.run(ask(name, prompt(1), grant=plain))
    world.push_out()
    for name in ("loaded", "after"):
        world.run(ask(name, prompt(1), grant=plain))
    told = [world.started(name).fidelity for name in ("first", "again", "loaded", "after")]

    assert told == ["exact", "exact", "near", "near"]
    assert world.loaded("loaded") == {"host": 12}


def test_a_record_comes_back_in_its_format() -> None:
    """After a restart it is fetched into a slot of its size."""
    world = packed_world()
    asked: tuple[Fidelity, ...] = ("exact", "rough")
    for fidelity in asked:
        world.run(ask(f"{fidelity} first", prompt(1), grant=grant(fidelity)))
    world.restart()
    for fidelity in asked:
        world.run(ask(fidelity, prompt(1), grant=grant(fidelity)))

        assert world.loaded(fidelity) == {"disk": 12}
        assert world.started(fidelity).fidelity == fidelity
    assert copies(world) == {"exact": (3, 3000), "rough": (3, 900)}


def test_a_record_that_is_read_as_another_format_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The planted fault: every record is taken for the pool's own bytes."""
    world = packed_world()
    world.run(ask("first", prompt(1), grant=grant("near")))
    world.restart()
    monkeypatch.setattr(CopyFormats, "of_record", lambda self, fidelity, slot_bytes: OWN)

    with pytest.raises(MoveError, match="the record has 500 bytes"):
        world.run(ask("again", prompt(1), grant=grant("near")))


def test_records_of_another_format_are_a_miss_and_are_replaced() -> None:
    """An engine that packed nothing left them; the next store of the prefix takes their place."""
    world = LeveledWorld(formats=(PLAIN,))
    world.run(ask("first", prompt(1), grant=grant("near")))
    for record in world.disk.records.values():
        record.form = SlotFormat("int8t", 700, "near")
    world.formats = PACKED
    world.restart()
    world.run(ask("again", prompt(1), grant=grant("near")))

    assert world.cached("again") == 0
    assert {record.form.name for record in world.disk.records.values()} == {"int8c"}


def test_a_block_that_cannot_be_packed_is_copied_as_it_is() -> None:
    """It costs room, no hit; and no pause for others, as a failing move would."""
    world = packed_world()
    world.memory.unpackable = 1.0
    world.run(ask("first", prompt(1), grant=grant("near")))
    world.run(ask("again", prompt(2), grant=grant("near")))

    assert copies(world).keys() == {"exact"}
    assert world.core.stats().levels[0].failed_total == 0


def test_an_erasure_counts_the_bytes_that_it_took() -> None:
    """Not those of blocks."""
    world = packed_world(disk=False)
    world.run(ask("first", prompt(1), grant=grant("rough")))
    answers: list[Any] = []
    world.core.erase(Erase(1, b"rough"), answers.append)
    world.settle()

    assert [(one.blocks, one.bytes) for one in answers[0].levels] == [(3, 900)]
    assert copies(world) == {}


def test_a_format_that_a_model_has_not_falls_back_to_a_stricter_one() -> None:
    """Heads whose size is no power of two have no 4 bits."""
    formats = CopyFormats([PLAIN, PACKED[1]])
    formats.allow(b"n", "rough")

    assert formats.formats[formats.of(b"n")].name == "int8c"
    assert CopyFormats([PLAIN]).of(b"n") == OWN
    assert formats.of_record("rough", 300) is None
