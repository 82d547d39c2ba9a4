"""The decisions of the cache with one KV group, against those recorded before it had several.

A seeded run drives every call of the cache and takes down what it decides: tables and their
versions, leases, copies, facts, statistics. The digest of these notes is compared with the recorded
one, so one group costs and behaves as it did. A change of a rule changes the digests: then `python
-m tests.unit.engine.cache.test_decisions` prints the new ones, and the commit says why.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

import xxhash

from engine.api import LeaseRequest, Quota
from engine.cache import BlockTable, PrefixCache
from tests.strategies import NAMESPACES, RETENTIONS
from tests.tables import each_row

RECORDED = Path("tests/data/cache_decisions.txt")
SEEDS = 24
STEPS = 600
VOCABULARY = 2
QUOTAS = (
    Quota(floor_blocks=3),
    Quota(ceiling_blocks=14, weight=2.0),
    Quota(promised_blocks_max=6, payer=b"north"),
)


class Run:
    """One seeded run. `digest`: over everything that the cache has decided so far."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.size = self.chance.choice([2, 4])
        self.notes = xxhash.xxh3_64()
        self.cache = PrefixCache(
            blocks=self.chance.randint(12, 40),
            block_size=self.size,
            context_tokens=24,
            facts=self.note,
        )
        self.quotas = dict(zip(NAMESPACES, QUOTAS, strict=True))
        self.now_s = 0.0
        self.live: list[tuple[BlockTable, list[int]]] = []
        self.past: list[list[int]] = [[0]]

    def note(self, *facts: object) -> None:
        """Add to the digest; a count may be a bool, which is the same number."""
        words = repr(facts).replace("False", "0").replace("True", "1")
        self.notes.update(words.encode())

    def note_table(self, table: BlockTable) -> None:
        """Add a table's public state to the digest."""
        self.note(table.blocks, table.version, table.kv_tokens, table.leases)

    def prompt(self) -> list[int]:
        """Return a new prompt, or an earlier one with another end."""
        start: list[int] = []
        if self.chance.random() < 0.7:
            start = self.chance.choice(self.past[-8:])
            start = start[: len(start) - self.chance.choice([0, 0, 1, 3])]
        more = [self.chance.randrange(VOCABULARY) for _ in range(self.chance.randint(1, 9))]
        return [*start, *more][:24]

    def begin(self) -> None:
        namespace, prompt = self.chance.choice(NAMESPACES), self.prompt()
        leases = tuple(
            LeaseRequest(
                self.chance.randint(0, 24),
                self.chance.choice(RETENTIONS),
                self.chance.choice("ab"),
            )
            for _ in range(self.chance.choice([0, 0, 1, 2]))
        )
        found = self.cache.find(namespace, prompt, self.now_s)
        self.note(found.cached_tokens, self.cache.count_unpinned(found))
        peek = self.cache.peek(namespace, prompt, self.now_s)
        self.note(peek.cached_tokens, peek.promised_tokens, peek.expires_at_s)
        table = self.cache.begin(
            namespace,
            prompt,
            self.now_s,
            quota=self.quotas[namespace],
            leases=leases,
            write=self.chance.random() < 0.9,
            found=found,
        )
        self.note_table(table)
        self.live.append((table, prompt))

    def compute(self) -> None:
        table, tokens = self.chance.choice(self.live)
        if table.kv_tokens == len(tokens):
            tokens.append(self.chance.randrange(VOCABULARY))
        end = min(len(tokens), table.kv_tokens + self.chance.randint(1, 8))
        has_room = self.cache.grow(table, end, self.now_s)
        self.note(has_room, self.cache.take_copies())
        if has_room:
            self.cache.commit(table, tokens, end, self.now_s)
        self.note_table(table)

    def fork(self) -> None:
        self.note(self.cache.take_copies())
        table, tokens = self.chance.choice(self.live)
        self.live.append((self.cache.fork(table), list(tokens)))

    def release(self) -> None:
        table, tokens = self.live.pop(self.chance.randrange(len(self.live)))
        self.cache.release(table, tokens, self.now_s, keep=self.chance.random() < 0.8)
        self.past.append(tokens)

    def erase(self) -> None:
        namespace, prompt = self.chance.choice(NAMESPACES), self.prompt()
        what = self.chance.choice(["all", "lease", "tokens"])
        lease_id = "a" if what == "lease" else None
        tokens = prompt[:5] if what == "tokens" else None
        self.note(self.cache.erase(namespace, lease_id=lease_id, tokens=tokens))

    def step(self) -> None:
        """Make one call, and note the figures that the scheduler reads."""
        choice = self.chance.random()
        if choice < 0.3 or not self.live:
            self.begin()
        elif choice < 0.7:
            self.compute()
        elif choice < 0.75:
            self.fork()
        elif choice < 0.93 or len(self.live) > 6:
            self.release()
        elif choice < 0.98:
            self.now_s += self.chance.choice([0.5, 4.0, 11.0])
            self.note(self.cache.expire(self.now_s))
        else:
            self.erase()
        stats = self.cache.stats()
        self.note(stats.blocks, stats.free, stats.cached, stats.pinned, stats.evicted_blocks_total)
        self.note(stats.expired_blocks_total, stats.copied_blocks_total)
        self.note(self.cache.namespaces(), self.cache.promises.next_lapse_s())
        for namespace, quota in self.quotas.items():
            self.note(self.cache.available_blocks(namespace, quota))
            self.note(self.cache.max_sequence_tokens(namespace, quota))


def digest(seed: int) -> str:
    """Return the digest of one run."""
    run = Run(seed)
    for _ in range(STEPS):
        run.step()
    run.cache.check()
    return run.notes.hexdigest()


@each_row("seed", range(SEEDS))
def test_one_group_decides_as_recorded(seed: int) -> None:
    """Every decision of a seeded run is the recorded one."""
    recorded = RECORDED.read_text(encoding="utf-8").split()

    assert digest(seed) == recorded[seed]


if __name__ == "__main__":
    for number in range(SEEDS):
        sys.stdout.write(f"{digest(number)}\n")
