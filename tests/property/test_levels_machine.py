"""The whole core with levels below the device, under hypothesis: moves that are late, out of
order, failed or damaged, a disk that outlives the engine, erasures and limits in any order.

The token oracle finds a load that brought another prefix; the machine compares every slot of host
memory and every record with the tokens that it is kept under, and recounts the books.
"""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import strategies as st
from hypothesis.stateful import invariant, rule

from engine.api import Erase
from engine.cache import PrefixCache
from engine.config import LevelsConfig
from engine.levels.levels import Levels
from engine.storage.memory.slot_table import ENTRY_BYTES
from tests.checkers import MakeLevels, expect
from tests.fake_levels import LevelsBelow
from tests.fakes import FakeRunner, tag_after
from tests.property.machine_runs import case
from tests.property.test_engine_machine import EngineMachine
from tests.strategies import NAMESPACES, namespaces, tokens

SLOTS = 12
CONFIG = LevelsConfig(host_mib=1, disk_gib=1.0, host_tokens_min=1, disk_tokens_min=1, verify_host=2)


class LevelsMachine(LevelsBelow, EngineMachine):
    """The engine machine with a host level of few slots and a disk."""

    slots = SLOTS

    def levels_below(self) -> MakeLevels | None:
        """Return a host level that is smaller than the device and a disk, both faulty."""
        self.prepare(CONFIG, self.slots)
        self.weather.polls_max = 2
        return self.make_levels

    def make_levels(self, cache: PrefixCache, runner: Callable[[], FakeRunner]) -> Levels:
        """See `LevelsBelow`; loads are committed run by run."""
        levels = super().make_levels(cache, runner)
        levels.loads.part = 1
        return levels

    def now_s(self) -> float:
        """See `LevelsBelow`."""
        return self.world.clock() if hasattr(self, "world") else 0.0

    def disk_s(self) -> float:
        """See `LevelsBelow`; for the disk no time passes, so that no promise ends there."""
        return 0.0

    @rule(polls=st.integers(0, 6), fails=st.sampled_from([0.0, 0.1, 0.5, 1.0]))
    def change_weather(self, polls: int, fails: float) -> None:
        """Let moves become slower or faster, and fail more or less often."""
        self.weather.polls_max, self.weather.fails = polls, fails

    @rule()
    def restart(self) -> None:
        """Start another engine over the same disk."""
        self.world.settle()
        self.world.restart()

    @rule(namespace=namespaces)
    def erase_and_wait(self, namespace: bytes) -> None:
        """Erase a namespace; once that is confirmed, the disk has nothing of it."""
        answers: list[object] = []
        self.world.core.erase(Erase(1, namespace), answers.append)
        self.world.written[namespace] = []
        left = [node for node in self.levels.places if node.namespace == namespace]
        expect(not left, "copies of an erased namespace")
        while not answers:
            self.world.step()
        live = {stream.request.grant.namespace for stream in self.world.live.values()}
        if self.has_disk and namespace not in live:
            expect(not self.disk.has_records(namespace), "records of an erased namespace")
        if self.is_kept:
            self.kept_has_nothing_of(namespace)

    def kept_has_nothing_of(self, namespace: bytes) -> None:
        """Nothing is left of a namespace in kept memory but in slots that are about to be wiped."""
        for slot, content in enumerate(self.kept_memory.contents):
            entry = self.kept_memory.table.read(slot)
            expect(entry is None or entry.namespace != namespace, "an entry of it", slot)
            if any(part is not None and part[0] == namespace for part in content):
                expect(self.levels.places.remains.is_soiled(slot), "bytes of it", slot, content)

    @rule(namespace=namespaces, prompt=tokens)
    def match_holds_limits(self, namespace: bytes, prompt: tuple[int, ...]) -> None:
        """Nothing is matched at or after its limit."""
        now_s = self.world.clock()
        for copy in self.levels.places.match(namespace, prompt, now_s):
            expect(copy.limit_at_s > now_s, "a copy matched beyond its limit", copy.limit_at_s)

    @invariant()
    def copies_hold_their_prefix(self) -> None:
        """Every slot and every record holds the prefix under which it is found."""
        if not hasattr(self, "world"):
            return
        self.levels.check()
        for copy in self.levels.places:
            path = tuple(token for one in copy.path() for token in one.run)
            if copy.slot >= 0:
                content = self.memory.contents[copy.slot]
                groups = len(content) // len(copy.run)
                slots = prefix_slots(copy.namespace, path, len(copy.run), groups)
                expect(content == slots, "a slot", path)
        for record_id, record in self.records.items():
            path = self.disk.path(record_id)
            groups = len(record.content) // len(record.tokens)
            slots = prefix_slots(record.namespace, path, len(record.tokens), groups)
            expect(record.content == slots, "a record", path)

    def teardown(self) -> None:
        """Check that everything comes to rest and no slot is left to a move."""
        super().teardown()
        if hasattr(self, "world"):
            expect(not self.levels.is_busy, "moves at rest")
            held = sum(1 for copy in self.levels.places if copy.slot >= 0)
            expect(self.levels.places.accounts.pool.used == held, "slots that no copy has", held)
            for namespace in NAMESPACES:
                self.world.core.erase(Erase(1, namespace))
            self.world.settle()
            expect(self.levels.places.accounts.pool.used == 0, "slots after the erasure of all")


class HostMachine(LevelsMachine):
    """The same without a disk."""

    has_disk = False


class KeptMachine(LevelsMachine):
    """The same with host memory that outlives the engine, which may be killed at any step."""

    is_kept = True

    @rule(is_shared=st.booleans(), seconds=st.sampled_from([0.0, 30.0, 4000.0]))
    def kill(self, is_shared: bool, seconds: float) -> None:
        """Kill the engine between two steps, in the middle of its moves."""
        self.kept_memory.is_shared = is_shared
        self.world.clock.advance(seconds)
        self.world.restart()

    @rule()
    def end_the_process_before(self) -> None:
        """Let the storage process of the engine before end."""
        self.kept_memory.is_shared = False

    def teardown(self) -> None:
        """See `LevelsMachine`."""
        if self.kept is not None:
            self.kept.is_shared = False
            self.world.step()
        super().teardown()
        if self.kept is not None:
            expect(not any(self.kept.contents), "bytes after the erasure of all")
            zeros = self.kept.memory.count(0)
            expect(zeros >= self.kept.table.slots * ENTRY_BYTES, "entries after that")


class KeptHostMachine(KeptMachine):
    """The same without a disk."""

    has_disk = False


class LanesMachine(LevelsMachine):
    """The same over two GPUs: a move has a piece of each, and one that failed may have left a slot
    half written."""

    lanes = 2


class KeptLanesMachine(KeptMachine):
    """The same with host memory that outlives the engine."""

    lanes = 2


def prefix_slots(
    namespace: bytes, path: tuple[int, ...], last: int, groups: int = 1
) -> tuple[object, ...]:
    """Return what the slots of the last `last` tokens of a path hold, one KV group after the
    other.
    """
    tag, tags = 0, list[int]()
    for token in path:
        tag = tag_after(tag, token)
        tags.append(tag)
    return tuple((namespace, group, tag) for group in range(groups) for tag in tags[-last:])


TestLevelsMachine = case(LevelsMachine)
TestHostMachine = case(HostMachine)
TestKeptMachine = case(KeptMachine)
TestKeptHostMachine = case(KeptHostMachine)
TestLanesMachine = case(LanesMachine)
TestKeptLanesMachine = case(KeptLanesMachine)
