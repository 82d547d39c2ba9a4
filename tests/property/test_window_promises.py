"""Promises over the levels of models with window groups: the machines of `test_promises_machine`
and `test_restarted_promises`, whose model also knows which window blocks each promise covers.

A window block is named by its group and the tokens up to its end: `(namespace, path)` with a last
token of minus one for the first window group, minus two for the second.
"""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule

from engine.api import Request
from engine.cache.tree.prefix_tree import Node
from engine.cache.tree.window_groups import WindowGroups
from tests.fake_levels import BOOT_S, whole_of
from tests.property.machine_runs import case
from tests.property.test_promises_machine import CLASSES, NAMESPACES, Block, PromisesMachine
from tests.property.test_restarted_promises import RestartedMachine

WINDOWS = (3, 3)


class WindowPromisesMachine(PromisesMachine):
    """Promises of runs and of window blocks that move down to host memory and disk."""

    windows = WINDOWS
    formats = whole_of(1 + len(WINDOWS))

    def blocks_of(self, namespace: bytes, tokens: tuple[int, ...]) -> list[Block]:
        """Return the blocks that a promise of these tokens promises: in window groups those that a
        prompt reads which resumes at the end of their last whole block, beside one token.
        """
        size = self.world.block_size
        groups, runs = WindowGroups(self.windows, size), len(tokens) // size
        found = super().blocks_of(namespace, tokens)
        for group in range(len(self.windows)):
            first = groups.first_read(group, max(0, len(tokens) - 1) // size * size)
            for index in range(first, runs):
                found.append((namespace, (*tokens[: (index + 1) * size], -1 - group)))
        return found

    def promised_runs(self) -> list[Block]:
        """See `PromisesMachine`."""
        return sorted(one for one in self.promised if one[1][-1] >= 0)

    def note_grants(self, request: Request, submitted_s: float, owed: dict[Block, float]) -> None:
        """See `PromisesMachine`. A load brings no window blocks but those that are read behind it:
        what a lease promises there that ends before is not promised.
        """
        super().note_grants(request, submitted_s, owed)
        started = self.world.streams[request.request_id].started
        if started is not None and started.loaded_tokens:
            for block in [one for one in owed if one[1][-1] < 0]:
                del owed[block]

    def is_there(self, block: Block) -> bool:
        """Return whether a level has a block of any group."""
        namespace, path = block
        group = -1 - path[-1]
        tokens = path if group < 0 else path[:-1]
        node, copy = self.found(namespace, tokens)
        if group < 0:
            is_stored = copy is not None and self.has_bytes(copy.slot, copy.record_id)
            return node is not None or is_stored
        beside = None if node is None else node.beside
        if beside is not None and beside[group] is not None:
            return True
        return copy is not None and self.has_whole(copy)

    def found(self, namespace: bytes, tokens: tuple[int, ...]) -> tuple[Node | None, Node | None]:
        """Return the node and the copy of a run."""
        size, now_s = self.world.block_size, self.world.clock()
        root = self.world.cache.tree_root(namespace)
        node, runs = root, len(tokens) // size
        for index in range(runs):
            run = tokens[index * size : (index + 1) * size]
            node = None if node is None else node.children.get(run)
        node = node if node is not None and node.block >= 0 else None
        copies = self.levels.places.match(namespace, (*tokens, 2), now_s)
        return node, copies[-1] if len(copies) == runs else None

    def has_whole(self, copy: Node) -> bool:
        """Return whether a level has the blocks of all groups of a copy."""
        whole = self.formats[1]
        if copy.slot >= 0 and self.memory.written[copy.slot] == whole.name:
            return True
        record = self.records.get(copy.record_id)
        return record is not None and record.form == whole

    def stored(self) -> set[Block]:
        """Return the blocks of which the disk has records."""
        found = super().stored()
        whole = self.formats[1]
        for number, one in self.records.items():
            if one.form == whole:
                groups = range(len(self.windows))
                path = self.disk.path(number)
                found |= {(one.namespace, (*path, -1 - group)) for group in groups}
        return found


class WindowHostPromisesMachine(WindowPromisesMachine):
    """The same without a disk: host memory keeps promises."""

    has_disk = False


class RestartedWindowMachine(WindowPromisesMachine, RestartedMachine):
    """The same under engines that are killed."""

    @rule(
        namespace=st.sampled_from(NAMESPACES),
        prompt=st.lists(st.integers(0, 1), min_size=5, max_size=14).map(tuple),
        inside=st.integers(1, 13),
        settles=st.booleans(),
        data=st.data(),
    )
    def promise_late(
        self,
        namespace: bytes,
        prompt: tuple[int, ...],
        inside: int,
        settles: bool,
        data: st.DataObject,
    ) -> None:
        """Promise a window after its run: a prompt ends inside another one, whose lease may have
        reached the level when a further one ends where the first prompt did.
        """
        inside = min(inside, len(prompt) - 1)
        for tokens, end in ((prompt[:inside], 0), (prompt, len(prompt)), (prompt, inside)):
            ends = [(end, data.draw(st.sampled_from(CLASSES)))] if end else []
            self.ask(namespace=namespace, prompt=tokens, again=False, data=data, ends=ends)
            if settles:
                self.settle()

    def due_s(self, block: Block) -> float:
        """See `RestartedMachine`: a window block's promise is told with that of its run."""
        namespace, path = block
        group = -1 - path[-1]
        if group < 0:
            return super().due_s(block)
        _, copy = self.found(namespace, path[:-1])
        kept = None if copy is None else copy.window_block(group)
        terms = kept.terms if kept is not None and kept.promised_below else None
        run_s = super().due_s((namespace, path[:-1]))
        return 0.0 if terms is None else min(run_s, terms.promise_at_s)

    def kept_until_s(self, block: Block) -> float:
        """See `RestartedMachine`: a window block's promise is told with that of its run."""
        namespace, path = block
        group = -1 - path[-1]
        if group < 0:
            return super().kept_until_s(block)
        until_s, tokens = 0.0, path[:-1]
        for number, record in self.records.items():
            if record.namespace == namespace and self.disk.path(number) == tokens:
                told = () if record.terms is None else record.terms.window_groups
                is_kept = group in told and record.form == self.formats[1]
                until_s = record.promise_at_s if is_kept else 0.0
        copies = self.levels.places.match(namespace, (*tokens, 2), self.world.clock())
        if self.forgets_host or len(copies) * self.world.block_size < len(tokens):
            return until_s
        entries = self.noted(copies)
        last = entries[-1]
        if last is None or not all(entries) or last.terms is None or last.format != "whole":
            return until_s
        is_kept = group in last.terms.window_groups and copies[-1].promised_below
        return max(until_s, last.promise_at_s - BOOT_S) if is_kept else until_s


class RestartedWindowHostMachine(RestartedWindowMachine):
    """The same without a disk: host memory keeps promises, and outlives its engine."""

    has_disk = False


TestWindowPromisesMachine = case(WindowPromisesMachine)
TestWindowHostPromisesMachine = case(WindowHostPromisesMachine)
TestRestartedWindowMachine = case(RestartedWindowMachine)
TestRestartedWindowHostMachine = case(RestartedWindowHostMachine)


class Drawn:
    """Draws that were made before, in their order."""

    def __init__(self, *values: Any) -> None:
        self._values = list(values)

    def draw(self, _: object) -> Any:
        """Return the next one."""
        return self._values.pop(0)


Asked = tuple[bytes, tuple[int, ...], tuple[int, ...], int, int]
"""A namespace, a prompt, the ends of its short leases, a priority, and the most tokens."""


def born(blocks: int) -> RestartedWindowMachine:
    """Return a machine with room for six blocks in host memory and six records."""
    machine = RestartedWindowMachine()
    machine.start(
        blocks=blocks, slots=6, records_max=6, floor=0, ceiling=None, promised_max=None,
        depth=2, step_tokens=16,
    )  # fmt: skip
    return machine


def live(machine: RestartedWindowMachine, *asked: Asked) -> None:
    """Submit requests, as the machine has once drawn them."""
    for namespace, prompt, ends, *drawn in asked:
        data: Any = Drawn(*drawn)
        leases = [(end, CLASSES[0]) for end in ends]
        machine.ask(namespace=namespace, prompt=prompt, again=False, data=data, ends=leases)


def test_window_blocks_promised_below_without_their_run_end_in_time() -> None:
    """The run's promise stays on the device for a sequence that has yet to compute what follows."""
    machine, (north, _) = born(8), NAMESPACES
    short: Asked = (north, (0,), (), 0, 1)
    live(machine, (north, (0, 1, 0, 0, 0, 0, 0), (7,), 0, 3), short)
    live(machine, (north, (0, 0), (1,), 0, 1), short, short)
    lost: Any = Drawn(1)
    machine.lose_a_record(data=lost)
    live(machine, (north, (0, 0, 0), (3,), 0, 1))

    machine.teardown()


def test_a_promise_brings_no_block_behind_its_end_back_to_the_device() -> None:
    """What levels keep behind it stays there, so that the pool's bound of promises holds."""
    machine, (north, south) = born(13), NAMESPACES
    short: Asked = (north, (0,), (), 0, 1)
    live(machine, (south, (0,) * 9, (9,), 0, 3), (north, (0, 0), (2,), 0, 1), short, short)
    live(machine, (north, (0, 1, 0), (12,), 0, 1), (north, (0, 1, *(0,) * 9), (), 0, 1))
    live(machine, (south, (0, 0, 0, 0, 0, 1), (1, 5), 0, 1), (north, (0,) * 9, (3, 10), 0, 3))
    live(machine, short, short, (north, (0, 0, 0, 1, *(0,) * 10), (13,), 1, 1))
    live(machine, (south, (0,) * 9, (5,), 1, 1), short)

    machine.teardown()
