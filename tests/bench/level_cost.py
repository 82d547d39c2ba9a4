"""What levels cost on the engine's thread: python -m tests.bench.level_cost

A prefix of 512 blocks of 16 tokens: matching its copies, importing its records, deciding what to
load, and a turn with nothing to do; one copy: noting it for the next engine, and recovering it; and
taking over one promise of the disk. Median and ninth decile, in microseconds.
"""

from __future__ import annotations

import random
import time

from engine.api import CacheGrant
from engine.cache import PrefixCache
from engine.cache.tree.prefix_tree import Node
from engine.config import LevelsConfig
from engine.levels.copy_formats import OWN
from engine.levels.levels import Levels
from engine.moves import (
    Look,
    Looked,
    PromiseTerms,
    Recall,
    Recalled,
    RecalledRun,
    StorageCommand,
    StorageOutcome,
    StoredRun,
)
from engine.scheduler.step_cost import StepCost
from tests.bench.timing import seconds_of
from tests.fake_levels import FakeKeptSlots, FakeTransferEngine, Weather
from tests.fakes import FakeRunner

BLOCKS, SIZE, TIMES = 512, 16, 200


class KnowingStorage:
    """A storage that knows every prompt, and promises so many blocks of one."""

    def __init__(self, promised: int = 0) -> None:
        self._outcomes: list[StorageOutcome] = []
        self._promised = promised

    def send(self, command: StorageCommand) -> None:
        """Answer a look at once."""
        if isinstance(command, Look):
            runs = (StoredRun(i + 1, "exact", None, 0.0, 1000) for i in range(BLOCKS))
            self._outcomes.append(Looked(command.call_id, tuple(runs)))
        if isinstance(command, Recall):
            last = min(command.after + command.most, self._promised)
            told = tuple(promised_run(number) for number in range(command.after, last))
            self._outcomes.append(Recalled(command.call_id, told, last % (self._promised or 1)))

    def poll(self) -> list[StorageOutcome]:
        """Return the answers."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def has_records(self, namespace: bytes) -> bool:
        """Return whether there are any: there are."""
        return True

    def namespaces(self) -> set[bytes]:
        """Return the namespaces with records; nothing asks for them here."""
        return set()

    def take_changed(self) -> set[bytes]:
        """Return the namespaces that have changed: none."""
        return set()

    def close(self) -> None:
        """End."""


def figures(name: str, times_s: list[float]) -> str:
    """Return a line of the table."""
    ordered = sorted(times_s)
    median, ninth = ordered[len(ordered) // 2], ordered[9 * len(ordered) // 10]
    return f"{name:28} {median * 1e6:8.1f} {ninth * 1e6:8.1f}"


def promised_run(number: int) -> RecalledRun:
    """Return a record of one path that is promised for an hour."""
    tokens = tuple(range(number, number + SIZE))
    terms = PromiseTerms("1h", "1h", "", 3600.0, 3600.0)
    limits = 1000, 7200.0, 3600.0
    return RecalledRun(number + 1, number, b"n", b"p", tokens, "exact", *limits, terms, ("lease",))


def recalling() -> list[float]:
    """Return what it costs to take over promises of the disk: each a block."""
    cache = PrefixCache(blocks=64, block_size=SIZE)
    runner = FakeRunner(1, SIZE, vocab_size=3)
    memory = FakeTransferEngine(lambda: runner, 64, random.Random(1), Weather())
    storage = KnowingStorage(NOTED)
    levels = Levels(cache, LevelsConfig(disk_gib=1.0), memory, storage)
    pages: list[float] = []
    while levels.is_busy:
        pages += seconds_of(lambda: levels.turn(0.0, (), 0))
    assert sum(cache.promised_below().values()) == NOTED
    return [seconds / (NOTED / len(pages)) for seconds in pages]


NOTED = 4_096
"""Copies of the slot table's figures."""


def table_lines() -> list[tuple[str, list[float]]]:
    """Return what it costs to note copies for the next engine, and to recover them: each a copy."""
    kept = FakeKeptSlots(NOTED, time.monotonic)
    namespace = b"0007default0064" + bytes(64) + b"0016" + bytes(16)
    grown: list[Levels] = []

    def engine() -> Levels:
        memory = FakeTransferEngine(lambda: runner, NOTED, random.Random(1), Weather())
        kept.start(memory, None)
        cache = PrefixCache(blocks=8, block_size=SIZE)
        return Levels(cache, LevelsConfig(host_mib=1), memory, kept=kept, now_s=time.monotonic())

    runner = FakeRunner(1, SIZE, vocab_size=3)
    levels = engine()
    places, notes = levels.places, levels.places.notes
    assert notes is not None, "it is kept"
    parent: Node | None = None
    chance = random.Random(2)
    for number in range(NOTED):
        run = tuple(chance.randrange(50_000) for _ in range(SIZE))
        parent = levels.cache.add_run(namespace, b"payer", parent, run)
        slot = places.take_slot(b"payer", namespace, OWN)
        assert slot is not None, "there is one for each"
        places.give(parent, slot, number.to_bytes(16))
        if number % 512 == 511:
            parent = None
    noting = seconds_of(lambda: notes.write_changed(1), NOTED)
    (taking_s,) = seconds_of(lambda: grown.append(engine()))
    assert grown[0].stats()[0].recovered_total == NOTED
    return [("note a copy", noting), ("recover a copy", [taking_s / NOTED])]


def main() -> None:
    """Print the table."""
    cache = PrefixCache(blocks=4096, block_size=SIZE)
    runner = FakeRunner(1, SIZE, vocab_size=3)
    memory = FakeTransferEngine(lambda: runner, 64, random.Random(1), Weather())
    levels = Levels(cache, LevelsConfig(disk_gib=1.0), memory, KnowingStorage())
    grant, cost = CacheGrant(b"n"), StepCost()
    prompts = [
        tuple(random.Random(seed).randrange(50_000) for _ in range(BLOCKS * SIZE + 1))
        for seed in range(20)
    ]
    imports = []
    for number, tokens in enumerate(prompts):
        levels.look(number, grant, tokens, 0)
        imports += seconds_of(lambda: levels.turn(0.0, (), 0))
    tokens = prompts[0]
    lines = (
        ("import 512 records", imports),
        (
            "match 512 copies",
            seconds_of(lambda: levels.places.match(b"n", tokens, 0.0), TIMES),
        ),
        (
            "match and decide",
            seconds_of(lambda: levels.plan(grant, tokens, 0, cost.seconds_of_slice, 0.0), TIMES),
        ),
        ("a turn with nothing to do", seconds_of(lambda: levels.turn(0.0, (), 0), TIMES)),
        *table_lines(),
        ("take over a promise", recalling()),
    )
    print(f"{'':28} {'median':>8} {'p90':>8}")
    for name, times_s in lines:
        print(figures(name, times_s))


if __name__ == "__main__":
    main()
