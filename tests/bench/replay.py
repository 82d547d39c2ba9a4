"""A recorded trace over cache and levels: python -m tests.bench.replay conversation_trace.jsonl

Counts, not times: which prompt tokens are found on the device, in host memory and on disk, which
are computed again, and how many bytes move, with a pool of a fifth of the trace's working set. The
cache and the levels are the engine's own; bytes are stood in for by the number of the trace's
block, so that a load of another prefix is noticed. Requests run one after another at the times of
the trace, and each is followed by as many turns as a short answer has steps.

Mooncake's traces are lines of JSON (`timestamp` in ms, `input_length`, `hash_ids` of 512-token
prefix blocks); each block of the trace is one block here. Without a path a small synthetic trace is
replayed. The times of loads and of computing, by which the engine chooses, are those of the
arguments.
"""

from __future__ import annotations

import argparse
import itertools
import random
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Final

from msgspec import Struct

from engine.api import CacheGrant, Namespace, Quota
from engine.cache import PrefixCache
from engine.cache.blocks.block_table import BlockTable
from engine.cache.tree.eviction_policy import EvictionPolicy, LeastRecentlyUsed
from engine.config import LevelsConfig
from engine.levels.level_use import LevelUse
from engine.levels.levels import Levels
from engine.levels.loads import Load
from engine.moves import (
    LOADS_MAX,
    OFFLOADS_MAX,
    ROOT,
    Fetch,
    Fetched,
    Look,
    Looked,
    Move,
    Moved,
    RecordId,
    SlotFormat,
    SlotLayout,
    StorageCommand,
    StorageOutcome,
    Stored,
    StoredRun,
    StoreRuns,
)
from gateway.bench.trace import BLOCK_TOKENS, Arrival, read_trace
from tests.fakes import FirstInFirstOut

TURNS: Final = 8
"""Turns of the engine that follow a request: its decoding steps, in which levels copy."""
NAME: Final = b"trace"
PART: Final = 5
"""The pool is the working set divided by this; host memory is twice the pool."""


class ReplayedBytes(Struct):
    """What a replay counts, in blocks of `BLOCK_TOKENS`. `again`: computed though computed before.
    `moved`: by flow.
    """

    prompt: int = 0
    device: int = 0
    host: int = 0
    disk: int = 0
    computed: int = 0
    again: int = 0
    moved: dict[str, int] = {}


class BlockMemory:
    """`engine.moves.TransferEngine` whose bytes are numbers of blocks. Moves end at the next poll.

    `device`: the number that each block of the pool holds.
    """

    formats: tuple[SlotFormat, ...] = (SlotFormat("", BLOCK_TOKENS),)
    bytes_per_s = 4e9
    loads_max = LOADS_MAX
    offloads_max = OFFLOADS_MAX
    unusable_bytes = 0

    def __init__(self, slots: int, device: list[int], block_s: float) -> None:
        self.layout = SlotLayout.uniform(slots, BLOCK_TOKENS)
        self.host = [-1] * slots
        self.moved = {"offload": 0, "load": 0}
        self._device = device
        self._block_s = block_s
        self._outcomes: list[Moved] = []

    def submit(self, moves: Sequence[Move]) -> None:
        """Make the moves."""
        for move in moves:
            self.moved[move.kind] += 1
            if move.kind == "offload":
                self.host[move.slot] = self._device[move.block]
            else:
                self._device[move.block] = self.host[move.slot]
            self._outcomes.append(Moved(move.move_id, True, b"check", self._block_s))

    def poll(self) -> list[Moved]:
        """Return the outcomes."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def close(self) -> None:
        """End."""


class BlockDisk:
    """`engine.moves.Storage` without a bound, over the slots of a `BlockMemory`."""

    def __init__(self, memory: BlockMemory, block_s: float) -> None:
        self.moved = {"store": 0, "fetch": 0}
        self._memory = memory
        self._block_s = block_s
        self._ids: dict[tuple[RecordId, tuple[int, ...]], RecordId] = {}
        self._bytes: dict[RecordId, int] = {}
        self._outcomes: list[StorageOutcome] = []

    def send(self, command: StorageCommand) -> None:
        """Do a command at once."""
        if isinstance(command, StoreRuns):
            made, parent = list[RecordId](), command.parent
            for run in command.runs:
                key = parent, run.tokens
                parent = self._ids.setdefault(key, len(self._ids) + 1)
                self._bytes[parent] = self._memory.host[run.slot]
                made.append(parent)
            self.moved["store"] += len(made)
            self._outcomes.append(Stored(command.call_id, tuple(made)))
        elif isinstance(command, Look):
            self._outcomes.append(Looked(command.call_id, tuple(self._found(command))))
        elif isinstance(command, Fetch):
            for record_id, slot in zip(command.record_ids, command.slots, strict=True):
                self._memory.host[slot] = self._bytes[record_id]
                self._outcomes.append(Fetched(command.call_id, record_id, True, self._block_s))
            self.moved["fetch"] += len(command.record_ids)

    def _found(self, command: Look) -> Iterator[StoredRun]:
        parent = ROOT
        for token in command.tokens:
            found = self._ids.get((parent, (token,)))
            if found is None:
                return
            yield StoredRun(found, "exact", None, 0.0, BLOCK_TOKENS)
            parent = found

    def poll(self) -> list[StorageOutcome]:
        """Return the outcomes."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def has_records(self, namespace: Namespace) -> bool:
        """Return whether there are any."""
        return bool(self._ids)

    def namespaces(self) -> set[Namespace]:
        """Return the namespaces with records."""
        return {NAME} if self._ids else set()

    def take_changed(self) -> set[Namespace]:
        """Return none: nothing asks for them here."""
        return set()

    def close(self) -> None:
        """End."""


class Speeds(Struct, frozen=True):
    """Seconds for a block of `BLOCK_TOKENS`: computed, loaded from host memory, from disk."""

    compute_s: float
    host_s: float
    disk_s: float


class Replay:
    """One trace over one cache; `host`, `disk`: whether it has these levels."""

    def __init__(
        self, pool: int, policy: EvictionPolicy, speeds: Speeds, *, host: bool, disk: bool
    ) -> None:
        self.counts = ReplayedBytes()
        self._speeds = speeds
        self._device = [-1] * pool
        self._cache = PrefixCache(blocks=pool, block_size=1, eviction_policy=policy)
        self._memory = BlockMemory(2 * pool, self._device, speeds.host_s)
        self._disk = BlockDisk(self._memory, speeds.disk_s) if disk else None
        self._levels: Levels | None = None
        if host:
            config = LevelsConfig(
                host_mib=1, disk_gib=1e6, host_tokens_min=1, disk_tokens_min=1, verify_host=2**30
            )
            self._levels = Levels(self._cache, config, self._memory, self._disk)
        self._computed: set[int] = set()
        self._now_s = 0.0
        self._ids = itertools.count(1)

    def run(self, request: Arrival) -> None:
        """Run one request to its end."""
        cache, tokens, counts = self._cache, request.blocks, self.counts
        now_s = self._now_s = max(self._now_s, request.at_s)
        grant = CacheGrant(NAME, Quota())
        self._look(grant, tokens)
        found = cache.find(NAME, tokens, now_s)
        device = found.cached_tokens
        plan = None
        if self._levels is not None:
            plan = self._levels.plan(grant, tokens, len(found.path), self._compute_s, now_s)
        table = cache.begin(NAME, tokens, now_s, found=found)
        if self._levels is not None:
            self._levels.used(grant, table, now_s)
            if plan is not None and plan.copies:
                wanted = plan.first + len(plan.copies)
                if cache.grow(table, wanted, now_s):
                    self._load(self._levels.loads.begin(plan, table, 0, now_s), table, tokens)
        here = table.kv_tokens
        if not cache.grow(table, len(tokens), now_s):
            raise MemoryError(f"a prompt of {len(tokens)} blocks; the pool has {cache.blocks}")
        for index in range(here, len(tokens)):
            self._device[table.blocks[index]] = tokens[index]
        counts.prompt += len(tokens)
        counts.device += device
        counts.computed += len(tokens) - here
        counts.again += sum(token in self._computed for token in tokens[here:])
        self._computed.update(tokens)
        cache.commit(table, tokens, len(tokens), now_s)
        self._check(table, tokens)
        cache.release(table, tokens, now_s)
        for _ in range(TURNS if self._levels is not None else 0):
            self._turn()

    def end(self) -> ReplayedBytes:
        """Return the counts."""
        moved = self._memory.moved
        self.counts.moved = {"device-host": moved["offload"], "host-device": moved["load"]}
        if self._disk is not None:
            stored = self._disk.moved
            self.counts.moved |= {"host-disk": stored["store"], "disk-host": stored["fetch"]}
        return self.counts

    def _turn(self) -> None:
        if self._levels is not None:
            self._now_s += 1e-6
            self._levels.turn(self._now_s, (), 0)

    def _compute_s(self, start: int, count: int) -> float:
        return count * self._speeds.compute_s

    def _look(self, grant: CacheGrant, tokens: Sequence[int]) -> None:
        """Ask the disk, and wait for its answer."""
        if self._levels is None or not self._levels.has_records(NAME):
            return
        here = self._cache.find(NAME, tokens, self._now_s).cached_tokens
        if self._levels.look(next(self._ids), grant, tokens, here):
            while not self._levels.take_looked():
                self._turn()

    def _load(self, load: Load | None, table: BlockTable, tokens: Sequence[int]) -> None:
        """Wait for a load, and commit what it has brought."""
        assert self._levels is not None, "loads come from levels"
        while load is not None and not load.is_ended:
            self._turn()
            self._levels.take_ended(self._now_s)
        if load is not None and load.loaded:
            for level, count in load.tokens_by_level(1, LevelUse()).items():
                setattr(self.counts, level, getattr(self.counts, level) + count)
            self._cache.commit(table, tokens, load.first + load.loaded, self._now_s)
            self._levels.came_back()

    def _check(self, table: BlockTable, tokens: Sequence[int]) -> None:
        """Raise AssertionError unless each block holds its own prefix."""
        held = [self._device[block] for block in table.blocks]
        assert held == list(tokens), "a block of another prefix"


def synthetic_trace(seed: int = 1, conversations: int = 40, turns: int = 6) -> list[Arrival]:
    """Return conversations that take turns at random: each begins with the same three blocks, and
    each turn adds one to four to what the last one had.
    """
    chance, numbers = random.Random(seed), itertools.count(3)
    grown = [[0, 1, 2] for _ in range(conversations)]
    left = [number for number in range(conversations) for _ in range(turns)]
    chance.shuffle(left)
    requests = []
    for at, number in enumerate(left):
        grown[number] += itertools.islice(numbers, chance.randint(1, 4))
        requests.append(
            Arrival(float(at), BLOCK_TOKENS * len(grown[number]), 0, tuple(grown[number]))
        )
    return requests


POLICIES: dict[str, type[EvictionPolicy]] = {"lru": LeastRecentlyUsed, "fifo": FirstInFirstOut}
LEVELS = {"off": (False, False), "host": (True, False), "host+disk": (True, True)}


def replay(trace: Sequence[Arrival], levels: str, policy: str, speeds: Speeds) -> ReplayedBytes:
    """Replay a trace with a pool of a part of its working set."""
    working_set = len({block for request in trace for block in request.blocks})
    longest = max(len(request.blocks) for request in trace)
    host, disk = LEVELS[levels]
    one = Replay(
        max(working_set // PART, longest + 1), POLICIES[policy](), speeds, host=host, disk=disk
    )
    for request in trace:
        one.run(request)
    return one.end()


def line(name: str, policy: str, counts: ReplayedBytes, block_mib: float) -> str:
    """Return a row of the table: parts of the prompt tokens, and GiB moved by flow."""
    share = [f"{100 * n / counts.prompt:6.1f}" for n in (counts.device, counts.host, counts.disk)]
    hits = 100 * (1 - counts.computed / counts.prompt)
    moved = "  ".join(f"{flow} {n * block_mib / 1024:.0f}" for flow, n in counts.moved.items() if n)
    return (
        f"{name:10} {policy:5} {hits:6.1f} {' '.join(share)}"
        f" {100 * counts.again / counts.prompt:8.1f}  {moved}"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="Replay a trace over cache and levels.")
    parser.add_argument("path", nargs="?", type=Path, help="a trace of Mooncake's form")
    parser.add_argument("--requests", type=int, default=3_000, help="the first so many")
    parser.add_argument("--compute-us", type=float, default=25.7, help="a token, computed")
    parser.add_argument("--token-bytes", type=int, default=131_072, help="KV of a token")
    parser.add_argument("--host-gb-s", type=float, default=50.0)
    parser.add_argument("--disk-gb-s", type=float, nargs="*", default=[3.0, 12.0])
    options = parser.parse_args()
    trace = synthetic_trace()
    if options.path is not None:
        trace = [one for one in read_trace(options.path, options.requests) if one.blocks]
    if not trace:
        parser.error(
            f"no request of {options.path} has blocks; expected a trace of Mooncake's form"
        )
    size = options.token_bytes * BLOCK_TOKENS
    blocks = {block for request in trace for block in request.blocks}
    print(f"{len(trace)} requests, {len(blocks)} blocks of {BLOCK_TOKENS} tokens; pool a fifth")
    print("levels     policy hits % device   host   disk  again %  GiB moved")
    for levels, policy in itertools.product(LEVELS, POLICIES):
        for disk_gb_s in options.disk_gb_s if levels == "host+disk" else options.disk_gb_s[:1]:
            seconds = (size / (rate * 1e9) for rate in (options.host_gb_s, disk_gb_s))
            speeds = Speeds(options.compute_us * 1e-6 * BLOCK_TOKENS, *seconds)
            name = f"+disk {disk_gb_s:g}" if levels == "host+disk" else levels
            counts = replay(trace, levels, policy, speeds)
            print(line(name, policy, counts, size / 2**20))


if __name__ == "__main__":
    main()
