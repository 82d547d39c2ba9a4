"""Promises over restarts: what a level had taken over goes on under the next engine, with its time,
its class and its payer's charge, and nothing comes back that was erased.

The machines are those of `test_promises_machine`; here the engine is killed between any two steps,
alone or with host memory, and what the disk or the slot table says then is what must be promised.
"""

from __future__ import annotations

from hypothesis import strategies as st
from hypothesis.stateful import rule

from engine.api import Erase
from engine.cache.tree.prefix_tree import Node
from engine.storage.memory.slot_table import SlotEntry
from tests.checkers import expect
from tests.fake_levels import BOOT_S
from tests.property.machine_runs import case
from tests.property.test_promises_machine import CLASSES, NAMESPACES, Block, PromisesMachine


class RestartedMachine(PromisesMachine):
    """Promises that move down to a disk, under engines that are killed."""

    is_kept = True
    forgets_host = False

    @rule(
        forgets_host=st.booleans(),
        seconds=st.sampled_from([0.0, 5.0, 30.0]),
        erased=st.sampled_from([None, None, *NAMESPACES]),
    )
    def kill(self, forgets_host: bool, seconds: float, erased: bytes | None) -> None:
        """Kill the engine, perhaps with host memory, and start the next one; perhaps erase a
        namespace before that has heard of all promises.
        """
        self.take_grants()
        self.forgets_host = forgets_host and self.has_disk
        if self.has_disk:
            before = self.stored()
            self.disk.finish()  # its process outlives the engine, which hears of no lost record
            self.doubtful |= before - self.stored()
        kept = {one: self.kept_until_s(one) for one in self.promised if one not in self.doubtful}
        due = {one: self.due_s(one) for one in kept}
        if self.forgets_host:
            self.kept = None
        self.world.restart()
        self.world.clock.advance(seconds)
        self.world.cache.facts = self.note
        self.asked.clear()
        self.unmatched = 0
        now_s = self.world.clock()
        self.promised = {
            one: min(self.promised[one], until_s)
            for one, until_s in kept.items()
            if until_s > now_s
        }
        for one, until_s in kept.items():
            if due[one] > 0:
                expect(until_s >= due[one] * 0.6, "a promise that its level has forgotten", one)
        if erased is not None:
            self.world.core.erase(Erase(1, erased))
            self.promised = {one: at for one, at in self.promised.items() if one[0] != erased}
        self.settle()
        if erased is not None:
            expect(self.promised_now(erased) == 0, "promises of an erased namespace", erased)
        names = {retention.name for retention in CLASSES}
        for namespace in NAMESPACES:
            found = self.world.cache.use(namespace).promised
            expect(found.keys() <= names, "promises under another class", found)

    def due_s(self, block: Block) -> float:
        """Return when a promise ends that a level keeps for good; 0 for others."""
        namespace, path = block
        copies = self.levels.places.match(namespace, (*path, 2), self.world.clock())
        if len(copies) * self.world.block_size < len(path):
            return 0.0
        terms, is_durable = copies[-1].terms, self.has_disk and bool(copies[-1].record_id)
        is_kept = copies[-1].promised_below and is_durable
        return terms.promise_at_s if terms is not None and is_kept else 0.0

    def kept_until_s(self, block: Block) -> float:
        """Return until when a promise is kept if the engine dies now: as the disk has it, or the
        table, with all that it hangs on.
        """
        namespace, path = block
        until_s = 0.0
        for record_id, record in self.records.items():
            if record.namespace == namespace and self.disk.path(record_id) == path:
                until_s = record.promise_at_s
        copies = self.levels.places.match(namespace, (*path, 2), self.world.clock())
        if self.forgets_host or len(copies) * self.world.block_size < len(path):
            return until_s
        entries = self.noted(copies)
        if entries[-1] is not None and all(entries) and copies[-1].promised_below:
            until_s = max(until_s, entries[-1].promise_at_s - BOOT_S)
        return until_s

    def noted(self, copies: list[Node]) -> list[SlotEntry | None]:
        """Return what the slot table says of copies; None where it has none."""
        table = self.kept_memory.table
        return [table.read(copy.slot) if copy.slot >= 0 else None for copy in copies]


class RestartedHostMachine(RestartedMachine):
    """The same without a disk: host memory keeps promises, and outlives its engine."""

    has_disk = False


TestRestartedMachine = case(RestartedMachine)
TestRestartedHostMachine = case(RestartedHostMachine)
