"""The storage meter: whole token-seconds, none lost, equal to a plain integral over the cache."""

from __future__ import annotations

from collections import Counter

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import HeldTokens, LeaseRequest, Quota, Retention
from engine.cache import BlockTable, PrefixCache
from engine.core.storage_meter import UNPROMISED, StorageMeter
from engine.statistics import NamespaceStats
from tests.examples import examples

HOUR = Retention("1h", promise_s=3.0, limit_s=3.0)
BLOCK = 4
PAYERS = (b"1", b"2", b"")
"""The last one names none: then a namespace pays for itself."""


class World:
    """A small cache whose sequences come and go, a meter of it, and the integral of what it
    holds."""

    def __init__(self) -> None:
        self.cache = PrefixCache(blocks=24, block_size=BLOCK)
        self.now_ms = 0
        self.tables: list[tuple[BlockTable, list[int]]] = []
        self.integral: Counter[tuple[bytes, str]] = Counter()
        """In token-milliseconds."""
        self.seen: dict[tuple[bytes, str], int] = {}
        self.payers: dict[bytes, bytes] = {}
        self.meter = StorageMeter(self.cache, (), 0.0)

    def begin(self, space: int, words: list[int], *, is_promised: bool) -> None:
        namespace, payer = b"%d" % space, PAYERS[space % len(PAYERS)]
        self.payers[namespace] = payer or namespace
        leases = [LeaseRequest(len(words), HOUR)] if is_promised else []
        table = self.cache.begin(
            namespace, words, self.now_s, quota=Quota(payer=payer), leases=leases
        )
        if self.cache.grow(table, len(words), self.now_s):
            self.cache.take_copies()
            self.cache.commit(table, words, len(words), self.now_s)
        self.tables.append((table, words))

    def end(self) -> None:
        if self.tables:
            self.cache.release(*self.tables.pop(0), self.now_s)

    @property
    def now_s(self) -> float:
        return self.now_ms / 1_000

    def wait(self, pause_ms: int) -> None:
        """Let time pass, in which what was seen last is held, and see what is held now."""
        for key, tokens in self.seen.items():
            self.integral[key] += tokens * pause_ms
        self.now_ms += pause_ms
        self.cache.expire(self.now_s)
        self.meter.note(self.cache.take_changed())
        self.meter.update(self.now_s)
        held = Counter[tuple[bytes, str]]()
        for use in self.cache.namespaces():
            told = NamespaceStats(
                use.namespace, use.blocks, 0, 0, 0, use.promised, promised_away=use.away
            )
            whose = self.payers[use.namespace]
            held[whose, UNPROMISED] += BLOCK * told.unpromised_blocks
            for name, blocks in told.promised_by_class.items():
                held[whose, name] += BLOCK * blocks
        self.seen = dict(held)

    def expected(self) -> set[HeldTokens]:
        return {
            HeldTokens(payer, name, whole)
            for (payer, name), n in self.integral.items()
            if (whole := n // 1_000)
        }


HAPPENINGS = st.one_of(
    st.tuples(
        st.just("begin"),
        st.integers(0, 3),
        st.lists(st.integers(0, 1), min_size=1, max_size=20),
        st.booleans(),
    ),
    st.tuples(st.just("end")),
    st.tuples(st.just("erase"), st.integers(0, 3)),
    st.tuples(st.just("read")),
    st.tuples(st.just("wait"), st.integers(0, 4_000)),
)


@settings(max_examples=examples(200))
@given(st.lists(HAPPENINGS, max_size=40))
def test_readings_are_the_integral_of_what_is_held(history: list[tuple[object, ...]]) -> None:
    """For any requests, promises, evictions, erasures and times of reading. Reading changes
    nothing, and namespaces that are gone stay counted."""
    world = World()
    for what, *more in history:
        match what, more:
            case "begin", [int(space), list(words), bool(is_promised)]:
                world.begin(space, words, is_promised=is_promised)
                world.wait(0)
            case "end", []:
                world.end()
                world.wait(0)
            case "erase", [int(space)]:
                world.cache.erase(b"%d" % space)
                world.wait(0)
            case "wait", [int(pause_ms)]:
                world.wait(pause_ms)
            case _:
                assert set(world.meter.read(world.now_s)) == world.expected()
        world.meter.check()

    assert set(world.meter.read(world.now_s)) == world.expected()


def test_blocks_that_were_there_before_the_meter_count_from_its_start() -> None:
    """Promises that a life takes over from the one before."""
    world = World()
    world.begin(0, [1] * 8, is_promised=False)
    meter = StorageMeter(world.cache, [use.namespace for use in world.cache.namespaces()], 5.0)

    assert meter.read(15.0) == (HeldTokens(b"1", UNPROMISED, 10 * 8),)


def test_changes_that_wait_are_counted_a_few_at_a_time() -> None:
    """A heartbeat with many changes delays no step for all of them."""
    world = World()
    for space in (0, 1, 3):
        world.begin(space, [space] * 4, is_promised=False)
    world.meter.note(world.cache.take_changed())
    world.meter.update(0.0, 2)
    behind = world.meter.is_behind
    world.meter.update(1.0, 2)

    assert (behind, world.meter.is_behind) == (True, False)
    assert sum(one.token_seconds for one in world.meter.read(1.0)) == 2 * 4
