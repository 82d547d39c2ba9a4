"""A gateway over the null engine, as a child process.

Run as `python -m tests.bench.overhead.null_gateway`. Everything but the engine is real: listeners,
keys, limits (too high to refuse), prompts, the ledger on a disk, log lines. It reads
`NullGatewaySettings` as its first line of input, answers with one line, `Ready`, and exits when its
input ends. It knows no workload. `tests.bench.overhead.overhead` starts it.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import msgspec
from msgspec import Struct

from engine.model_store import load_card
from gateway.analytics.aggregates import Analytics
from gateway.analytics.completed_prompt import CompletedPrompt
from gateway.analytics.interface import InProcessAnalytics
from gateway.app import Gateway, open_analytics
from gateway.cli.database import connect
from gateway.config import Config, LimitsConfig, LogConfig, ServerConfig
from gateway.context import Context
from gateway.engines.composition import own_engine
from gateway.engines.served_models import ServedModel
from gateway.gc_tuning import freeze_heap, use_large_pages
from gateway.ledger.client import LedgerProcessClient
from gateway.observability.logging import LogLines
from gateway.prompt import Renderer
from tenancy.accounts.keys import create_key
from tenancy.accounts.tenants import create_tenant
from tenancy.ledger.transactions import Item
from tenancy.storage.interface import Store
from tenancy.types import Limits, TokenCounts, wall_ms

ENOUGH = 10**9
"""A limit that counts every request and refuses none."""

NULL_ENGINE = (sys.executable, "-m", "tests.bench.overhead.null_engine")


class NullGatewaySettings(Struct, frozen=True):
    """`data`: the database's folder. `streams_max`: concurrent streams. `books`: whether to use
    ledger and analytics."""

    model_dir: str
    data: str
    streams_max: int
    logs: bool = True
    books: bool = True


class Ready(Struct, frozen=True):
    """Addresses, key, and the process ids of the engine, and of ledger and analytics
    (`book_pids`)."""

    url: str
    key: str
    model: str
    pid: int
    book_pids: tuple[int, ...] = ()


class _NoLedger:
    """A ledger client that writes nothing and confirms at once."""

    restarts, is_well = 0, True

    def write(self, item: Item) -> asyncio.Future[None]:
        """See `LedgerClient`."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        done.set_result(None)
        return done

    def note_progress(self, reached: Mapping[str, TokenCounts]) -> None:
        """See `LedgerClient`."""

    def holds_first(self) -> AbstractContextManager[None]:
        """See `LedgerClient`."""
        return nullcontext()

    async def close(self) -> None:
        """See `LedgerClient`."""


class _NoAnalytics(InProcessAnalytics):
    """An analytics client that drops its input."""

    def __init__(self, context: Context) -> None:
        super().__init__(Analytics(context.clock, context.wall, 1, {}, 1))
        self.note = _look_away


def _look_away(completed: CompletedPrompt) -> None:
    """See `AnalyticsClient.note`."""


def remove_ledger_and_analytics(gateway: Gateway) -> None:
    """Replace ledger and analytics, to measure their cost. Call it before the start."""
    context = gateway.context
    context.ledger = _NoLedger()
    context.analytics = _NoAnalytics(context)


def config_of(settings: NullGatewaySettings) -> Config:
    """Return the defaults, with room for the load."""
    room = 2 * settings.streams_max + 64
    return Config(
        data_dir=settings.data,
        server=ServerConfig(connections_per_address_max=room, connections_max=2 * room),
        limits=LimitsConfig(requests_per_tenant_max=room),
        log=LogConfig(requests=settings.logs),
    )


def make_key(store: Store) -> str:
    """Create a tenant with every kind of limit, and its key with two."""
    limits = Limits(
        requests_per_minute=ENOUGH,
        tokens_per_minute=ENOUGH,
        input_tokens_per_minute=ENOUGH,
        output_tokens_per_minute=ENOUGH,
        requests_at_once=ENOUGH,
    )
    tenant = create_tenant(store, wall_ms, "bench", limits=limits)
    of_key = Limits(requests_per_minute=ENOUGH, requests_at_once=ENOUGH)
    return create_key(store, wall_ms, tenant.tenant_id, limits=of_key)


async def serve(settings: NullGatewaySettings) -> None:
    """Serve until standard input ends."""
    loop = asyncio.get_running_loop()
    config = config_of(settings)
    card = load_card(Path(settings.model_dir))
    store = connect(config)
    key = make_key(store)
    log = LogLines(sys.stderr.fileno(), wall_ms)
    replicas = own_engine(Path(card.folder), config.engine, log, command=NULL_ENGINE)
    ledger = LedgerProcessClient(config.tenancy.database, config.data, log)
    await ledger.open()
    analytics = await open_analytics(config, log) if settings.books else None
    models = [ServedModel(card.name, replicas, Renderer(card))]
    gateway = Gateway(config, models, store, log, ledger=ledger, analytics=analytics)
    if not settings.books:
        remove_ledger_and_analytics(gateway)
    parent_gone = asyncio.Event()

    def parent_spoke() -> None:
        if not os.read(sys.stdin.fileno(), 4096):
            loop.remove_reader(sys.stdin.fileno())
            parent_gone.set()

    loop.add_reader(sys.stdin.fileno(), parent_spoke)
    try:
        urls = await gateway.listen(("127.0.0.1", 0), ("127.0.0.1", 0))
        replicas.start()
        freeze_heap()
        use_large_pages()
        await replicas.wait_ready()
        pids = (ledger.pid, analytics.pid) if analytics is not None else ()
        ready = Ready(urls[0], key, card.name, os.getpid(), pids)
        sys.stdout.buffer.write(msgspec.json.encode(ready) + b"\n")
        sys.stdout.buffer.flush()
        await parent_gone.wait()
    finally:
        await gateway.close()
        await replicas.close()
        store.close()


def main() -> None:
    """Read the settings, then serve."""
    line = sys.stdin.buffer.readline()
    asyncio.run(serve(msgspec.json.decode(line, type=NullGatewaySettings)))


if __name__ == "__main__":
    main()
