"""Cost of a heartbeat on both sides: python -m tests.bench.heartbeat [namespaces]

Each namespace of the pool holds five blocks, and a hundred have changed since the last heartbeat.
Prints processor time, and bytes on the wire.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from time import process_time
from typing import TypeVar

from engine.cache import PrefixCache
from engine.client.cache_event_totals import CacheEventTotals
from engine.client.namespace_stats import NamespaceTable
from engine.config import EngineConfig
from engine.core.stats import EngineStats
from engine.protocol import Downward, Frame, Welcome, encode, read_downward
from engine.scheduler.request_table import RequestTable
from engine.scheduler.scheduler import Scheduler
from engine.scheduler.step_cost import StepCost
from engine.statistics import CacheNews, Gain, Stats
from engine.wire import Decoder
from gateway.analytics.block_churn import BlockChurn
from gateway.background.storage_metering import StorageMeter
from gateway.caching.namespaces import owner_of

T = TypeVar("T")
SIZE = 16
BLOCKS = 5
CHANGED = 100


def name_of(number: int) -> bytes:
    """Return a namespace as the gateway makes it."""
    parts = (str(number + 1), "default", "m" * 40, "t" * 40, "")
    return b"".join(len(part).to_bytes(4, "big") + part.encode() for part in parts)


class Heartbeats:
    """Both sides, without a socket between them."""

    def __init__(self, namespaces: int) -> None:
        self.cache = PrefixCache(blocks=namespaces * BLOCKS, block_size=SIZE)
        cost = StepCost()
        self.engine_stats = EngineStats(cost)
        self.scheduler = Scheduler(self.cache, EngineConfig(), cost, None)
        self.book, self.meter = NamespaceTable(), StorageMeter()
        self.losses, self.churn = CacheEventTotals(), BlockChurn()
        self.decoder = Decoder(read_downward)
        self.now_s = 0.0
        for number in range(namespaces):
            self.run_prompt(number)

    def run_prompt(self, number: int) -> None:
        """Run a prompt of one namespace, which evicts its last one."""
        self.now_s += 0.01
        tokens = [round(self.now_s * 100), *range(1, BLOCKS * SIZE)]
        table = self.cache.begin(name_of(number), tokens, self.now_s)
        self.cache.grow(table, len(tokens), self.now_s)
        self.cache.commit(table, tokens, len(tokens), self.now_s)
        self.cache.release(table, tokens, self.now_s)

    def beat(self) -> None:
        """Run one heartbeat, from the engine's thread to the meter."""
        stats = timed("engine: what has changed", self.encode)
        news = CacheNews((), tuple(Gain(one.namespace, BLOCKS) for one in stats.changed))
        frame = timed("engine: encode", lambda: encode(Frame(0, 1, (stats, news))))
        print(f"  {'bytes':30} {len(frame):12,}")
        timed("gateway: decode", lambda: self.decode(frame))
        timed("gateway: the book", lambda: self.book.add(stats.changed))
        now_ns = int(self.now_s * 1e9)
        timed("gateway: the storage meter", lambda: self.meter.update(self.book, SIZE, now_ns))
        timed("gateway: the losses", lambda: self.losses.add(news))
        moves = self.losses.take_moves()
        timed("gateway: churn", lambda: self.churn.update(moves, owner_of, 0))

    def encode(self) -> Stats:
        """Return the heartbeat's bytes."""
        names = self.cache.take_changed()
        return self.engine_stats.stats(0, self.cache, self.scheduler, RequestTable(), names)

    def decode(self, frame: bytes) -> list[Downward]:
        """Apply the bytes, as if they came over the socket."""
        found = list(self.decoder.feed(frame))
        assert not isinstance(found[0], Welcome)
        return found


def timed(what: str, act: Callable[[], T]) -> T:
    """Run a function and return its time."""
    began = process_time()
    done = act()
    print(f"  {what:30} {(process_time() - began) * 1e3:9.2f} ms")
    return done


def main() -> None:
    """Measure the first heartbeat, which has everything, and a later one."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("namespaces", nargs="?", type=int, default=20_000)
    namespaces = parser.parse_args().namespaces
    beats = Heartbeats(namespaces)
    print(f"{namespaces:,} namespaces, all new:")
    beats.beat()
    for number in range(CHANGED):
        beats.run_prompt(number)
    print(f"{CHANGED} of them changed:")
    beats.beat()
    print("none changed:")
    beats.beat()


if __name__ == "__main__":
    main()
