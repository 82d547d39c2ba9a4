"""Facts of prefixes under hypothesis: what an engine has told equals, at any time, the strides at
which a match resumes, found by trying every prefix (rule *Facts*).

The machines are those of the cache, of window groups, of levels and of kept states; a stride has
four tokens. What is told is taken in parts, after one step or after several.
"""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from engine.cache import PrefixCache
from engine.cache.blocks.block_manager import BlockManager
from engine.cache.tree import stride_watch
from engine.cache.tree.prefix_tree import Node, PrefixTree
from engine.cache.tree.stride_watch import StrideWatch
from engine.levels.places import RunPlaces
from engine.moves import StoredRun
from engine.strides import DIGEST_BYTES, PrefixChanges, chain_strides, stride_digests, stride_key
from tests.fake_levels import layout_of, whole_of
from tests.property.machine_runs import case
from tests.property.planted import Plant, RarePlant, planted
from tests.property.test_cache_machine import CacheMachine
from tests.property.test_levels_machine import KeptMachine, LevelsMachine
from tests.property.test_state_machine import StateEngineMachine
from tests.property.test_window_levels_machine import WindowLevelsMachine
from tests.property.test_window_machine import WindowMachine
from tests.strategies import NAMESPACES

STRIDE = 4
NEVER = 9
"""A token that no prompt has."""

Prefix = tuple[int, ...]


class Watched:
    """What a gateway knows of a cache, by what it was told."""

    lag = 0
    """Steps whose changes have not been taken yet."""
    watched: PrefixCache | None = None

    def ask(self, cache: PrefixCache) -> None:
        """Ask for everything anew."""
        cache.strides.start(STRIDE)
        self.watched = cache
        self.is_new = True
        self.told: tuple[set[bytes], set[bytes]] = set(), set()

    @rule(lag=st.integers(1, 4))
    def let_changes_pile_up(self, lag: int) -> None:
        """Take what changes only after several steps."""
        self.lag = lag

    @rule(nodes=st.integers(1, 30))
    def take_a_part(self, nodes: int) -> None:
        """Take a part of what has changed."""
        if self.watched is not None:
            self.take(nodes)

    @rule()
    def ask_anew(self) -> None:
        """Ask in the middle of what is told."""
        if self.watched is not None:
            self.ask(self.watched)

    def take(self, nodes: int) -> None:
        """Take a part; nothing comes that is known, and nothing goes that is not."""
        assert self.watched is not None
        told = self.watched.strides.take(nodes)
        assert told.is_first == self.is_new, "the first part after it was asked for, and no other"
        self.is_new = False
        for known, added, removed in (
            (self.told[0], told.device_added, told.device_removed),
            (self.told[1], told.below_added, told.below_removed),
        ):
            come, gone = digests_of(added), digests_of(removed)
            assert len(come | gone) == len(come) + len(gone), "told as come and as gone"
            assert gone <= known, "a stride goes that was not told"
            assert not come & known, "a stride comes that was told"
            known -= gone
            known |= come

    def compare(self, cache: PrefixCache, now_s: float) -> None:
        """Check that all that was told is so, if nothing is left to be taken."""
        if self.watched is not cache:
            self.ask(cache)
        if self.lag:
            self.lag -= 1
            return
        cache.expire(now_s)
        while cache.strides.has_more:
            self.take(7)
        cache.strides.check()
        assert self.told[0] == present(cache, now_s), "present on the device"
        assert self.told[1] == kept(cache), "kept below it"


def digests_of(packed: bytes) -> set[bytes]:
    """Return digests told one after another."""
    found = [packed[at : at + DIGEST_BYTES] for at in range(0, len(packed), DIGEST_BYTES)]
    assert len(set(found)) == len(found), "a digest twice"
    return set(found)


def prefixes(cache: PrefixCache) -> list[tuple[bytes, Node, Prefix]]:
    """Return all nodes with the tokens up to their end."""
    roots = [(name, cache.tree_root(name)) for name in NAMESPACES]
    return [
        (name, node, tuple(token for one in node.path() for token in one.run))
        for name, root in roots
        if root is not None
        for node in root.subtree()
        if node.run
    ]


def digest_of(namespace: bytes, prefix: Prefix) -> bytes:
    """Return the digest of the last whole stride of a prefix."""
    return chain_strides(stride_key(namespace), b"", prefix, STRIDE)[-1]


def present(cache: PrefixCache, now_s: float) -> set[bytes]:
    """Return the strides behind which a match ends; with states, those before the state's end."""
    found = set()
    for namespace, node, prefix in prefixes(cache):
        ends = {prefix}
        for state in node.states or ():
            ends.add((*prefix, *state.run))
        for end in ends:
            is_end = cache.states.blocks or len(end) % STRIDE == 0
            match = cache.find(namespace, (*end, NEVER), now_s)
            if is_end and len(end) >= STRIDE and match.cached_tokens == len(end):
                found.add(digest_of(namespace, end))
    return found


def kept(cache: PrefixCache) -> set[bytes]:
    """Return the strides that a load could bring alone: all runs before them have a copy, and those
    that a window reads have all groups' blocks."""
    copies = {(name, prefix): node.places for name, node, prefix in prefixes(cache) if node.places}
    size, found = cache.block_size, set()
    for namespace, prefix in copies:
        if len(prefix) % STRIDE:
            continue
        ends = range(size, len(prefix) + 1, size)
        assert all((namespace, prefix[:end]) in copies for end in ends), "rule *Places*"
        reads = [len(prefix) - window + 1 for window in cache.windows.windows]
        read = [end for end in ends if reads and end > min(reads)]
        if all(copies[namespace, prefix[:end]][0].has_windows for end in read):
            found.add(digest_of(namespace, prefix))
    return found


class WatchedCache(Watched, CacheMachine):
    """The cache machine, watched."""

    @invariant()
    def facts_are_true(self) -> None:
        """See `Watched.compare`."""
        if hasattr(self, "cache"):
            self.compare(self.cache, self.now_s)


class WatchedWindows(Watched, WindowMachine):
    """The machine of window groups, watched."""

    @invariant()
    def facts_are_true(self) -> None:
        """See `Watched.compare`."""
        if hasattr(self, "cache"):
            self.compare(self.cache, self.now_s)


class _WatchedEngine(Watched):
    world: Any

    @invariant()
    def facts_are_true(self) -> None:
        """See `Watched.compare`; another engine is watched anew."""
        if hasattr(self, "world"):
            self.compare(self.world.cache, self.world.clock())


class WatchedLevels(_WatchedEngine, LevelsMachine):
    """The machine of levels, watched."""


class WatchedKept(_WatchedEngine, KeptMachine):
    """The same with host memory that outlives the engine."""


class WatchedWindowLevels(_WatchedEngine, WindowLevelsMachine):
    """The machine of levels below window groups, watched."""


class WatchedStates(_WatchedEngine, StateEngineMachine):
    """The machine of kept states, watched."""


TestWatchedCache = case(WatchedCache, 30)
TestWatchedWindows = case(WatchedWindows, 30)
TestWatchedLevels = case(WatchedLevels, 30)
TestWatchedKept = case(WatchedKept, 30)
TestWatchedWindowLevels = case(WatchedWindowLevels, 30)
TestWatchedStates = case(WatchedStates, 30)


def untold(original: Any) -> Any:
    """A change of a node's places is not noted."""

    def act(self: Any, first: Any, *given: Any, **named: Any) -> Any:
        tree = self if isinstance(self, PrefixTree) else first.tree
        touched, tree.touched = tree.touched, None
        found = original(self, first, *given, **named)
        tree.touched = touched
        return found

    return act


def only_where_it_changed(original: Any) -> Any:
    """What lies behind a change in a window is not looked at."""

    def step(self: Any, changed: Any) -> Any:
        reach, self._reach = self._reach, 0
        cost = original(self, changed)
        self._reach = reach
        return cost

    return step


def windows_forgotten(original: Any) -> Any:
    """A stride counts although a window before it is gone."""
    return lambda self, node: []


def half_a_state(original: Any) -> Any:
    """A state counts whose tokens no match reaches."""
    return lambda node, run: True


@pytest.mark.slow
@planted(
    Plant(WatchedCache, PrefixTree, "put_block", untold),
    Plant(WatchedCache, PrefixTree, "drop_block", untold),
    Plant(WatchedWindows, BlockManager, "fill", untold, seed=11),
    Plant(WatchedWindows, BlockManager, "_drop_window_block", untold),
    Plant(WatchedStates, BlockManager, "add_state", untold, seed=19),
    Plant(WatchedStates, BlockManager, "_drop_window_block", untold),
    Plant(WatchedLevels, RunPlaces, "_place", untold, seed=9),
    Plant(WatchedLevels, RunPlaces, "set_record", untold, seed=1),
    Plant(WatchedLevels, RunPlaces, "clear", untold, seed=9),
    Plant(WatchedWindows, StrideWatch, "_step", only_where_it_changed, seed=1),
    Plant(WatchedWindows, StrideWatch, "_first_reads", windows_forgotten),
    Plant(WatchedStates, stride_watch, "_is_reached", half_a_state),
)
def test_a_planted_fault_in_facts_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine that misses this fault proves nothing when it passes."""
    plant.check(monkeypatch)


def test_a_copy_without_its_windows_is_told_as_lost() -> None:
    """The record has group 0 alone, so nothing can be resumed from it once the slot is gone."""
    formats = whole_of(2)
    cache = PrefixCache(blocks=4, block_size=2, windows=(3,))
    places = RunPlaces(cache, layout_of(4, formats), formats)
    cache.strides.start(STRIDE)
    parent, slots = None, []
    for number in range(1, 3):
        run = StoredRun(number, "exact", None, 0.0, formats[0].slot_bytes)
        parent = places.know(b"n", b"p", parent, (0, 1), run, 0)
        slots.append(places.take_slot(b"p", b"n", 1))
        assert slots[-1] is not None
        places.give(parent, slots[-1])
    assert cache.strides.take(100).below_added == digest_of(b"n", (0, 1, 0, 1))
    assert parent is not None
    places.strike(parent, slots[-1] or 0)

    assert cache.strides.take(100).below_removed == digest_of(b"n", (0, 1, 0, 1))


def test_a_lost_slot_that_is_not_told_fails_its_test(monkeypatch: pytest.MonkeyPatch) -> None:
    """The machine does not meet it in 300 runs."""
    check = test_a_copy_without_its_windows_is_told_as_lost
    RarePlant(RunPlaces, "_emptied", untold, check).check(monkeypatch)


def test_a_stride_is_a_number_of_whole_blocks() -> None:
    """Elsewhere a stride could end within a block that several nodes begin alike."""
    cache = PrefixCache(blocks=4, block_size=3)

    with pytest.raises(ValueError, match=r"strides of 4 tokens; expected a multiple of 3"):
        cache.strides.start(STRIDE)


def test_what_left_and_came_back_is_not_told() -> None:
    """A gateway need not hear of an eviction that a later step has made up for."""
    cache = PrefixCache(blocks=4, block_size=2)
    prompt = (0, 1, 0, 1)
    cache.strides.start(STRIDE)
    _write(cache, prompt)
    assert cache.strides.take(100).device_added == digest_of(b"n", prompt)
    cache.erase(b"n")
    _write(cache, prompt)

    assert cache.strides.take(100) == PrefixChanges()
    cache.erase(b"n")
    assert cache.strides.take(100) == PrefixChanges(device_removed=digest_of(b"n", prompt))


def test_nothing_is_noted_once_nobody_asks() -> None:
    """A server whose gateway has left computes no digests."""
    cache = PrefixCache(blocks=4, block_size=2)
    cache.strides.start(STRIDE)
    cache.strides.stop()
    _write(cache, (0, 1, 0, 1))

    assert not cache.strides.has_more


def test_a_prompts_digests_are_those_that_are_told() -> None:
    """Engine and gateway compute them apart."""
    cache = PrefixCache(blocks=32, block_size=16)
    prompt = tuple(range(300))
    cache.strides.start()
    _write(cache, prompt)

    told = digests_of(cache.strides.take(1000).device_added)
    assert told == set(stride_digests(b"n", prompt))
    assert len(told) == 2


def _write(cache: PrefixCache, prompt: Prefix) -> None:
    table = cache.begin(b"n", prompt, 0.0, read=False)
    assert cache.grow(table, len(prompt), 0.0)
    cache.commit(table, prompt, len(prompt), 0.0)
    cache.release(table, prompt, 0.0)
