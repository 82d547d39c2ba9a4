"""The composition root: parts into a gateway, a gateway into two listeners, and its life.

`Gateway` is what tests and embedders hold: it starts listeners over any engine. `serve` is the
product: a data directory, a model, an engine process, and an end by SIGTERM that loses nothing.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AsyncExitStack, suppress
from functools import partial
from importlib import metadata, util
from pathlib import Path

import msgspec

from engine.api import Clock
from engine.client.client import Engine
from engine.model_store import ModelCard
from engine.signals import handle_signals
from gateway.analytics.aggregates import Analytics
from gateway.analytics.client import AnalyticsProcessClient
from gateway.analytics.interface import AnalyticsClient, InProcessAnalytics
from gateway.analytics.protocol import StartAnalytics
from gateway.api import cached_contents, generate, health, models, quote, self_service
from gateway.api.admin import analytics, billing, dashboard, metrics, shared_scopes, tenants, usage
from gateway.api.routes import SHAPES
from gateway.background.config_reload import declare, reload
from gateway.background.reconciliation import Reconciler
from gateway.background.storage_metering import StorageWatch
from gateway.caching import ContractManager
from gateway.config import Config, ConfigError, parse_address
from gateway.context import Context, Log
from gateway.engine_supervisor import EngineSupervisor
from gateway.errors import Refusal
from gateway.gc_tuning import settle_heap
from gateway.http.middleware import Middleware
from gateway.http.request_context import RequestIds
from gateway.http.server import Listener
from gateway.ledger.client import LedgerProcessClient
from gateway.ledger.deferred_holds import DeferredHolds
from gateway.ledger.interface import InProcessLedger, LedgerClient
from gateway.ledger.metering import note_progress, wall_ms
from gateway.ledger.progress import PROGRESS_FLUSH_REMOTE_S, PROGRESS_FLUSH_S, ProgressJournal
from gateway.ledger.query_pool import QueryPool
from gateway.observability.logging import LogLines
from gateway.observability.metrics import Metrics
from gateway.observability.tracing import Tracer
from gateway.prompt import Renderer
from tenancy.accounts.authentication import KeyAuthenticator
from tenancy.accounts.tenants import bootstrap, bootstrap_admin
from tenancy.ledger.epochs import has_history, ledger_epoch
from tenancy.ledger.ledger import Ledger
from tenancy.limits import Limiter
from tenancy.pricing.budget_watch import BudgetWatch
from tenancy.storage import backends
from tenancy.storage.interface import Store
from tenancy.types import WallClock

KEY_FILE = "default.key"
ADMIN_KEY_FILE = "admin.key"


class Gateway:
    """One running gateway: what it is made of, and its listeners."""

    def __init__(
        self,
        config: Config,
        engine: Engine,
        renderer: Renderer,
        store: Store,
        log: Log,
        *,
        clock: Clock = time.monotonic,
        wall: WallClock = wall_ms,
        engine_restarts: Callable[[], int] = lambda: 0,
        read_config: Callable[[], Config] | None = None,
        ledger: LedgerClient | None = None,
        analytics: AnalyticsClient | None = None,
    ) -> None:
        """`ledger`: over the same store. It and `analytics` are in this process where none is
        given, and closed with this, whoever made them. Raises StoreError."""
        vocab = renderer.card.config.vocab
        self.ledger = ledger if ledger is not None else InProcessLedger(Ledger(store, wall))
        if store.is_local:  # elsewhere each look for budgets would be a round trip
            self.ledger = DeferredHolds(self.ledger, BudgetWatch(store))
        self._registry = KeyAuthenticator(store, wall, clock)
        if not store.is_local:
            self._registry.start_watching()
        self.context = Context(
            config=config,
            engine=engine,
            registry=self._registry,
            ledger=self.ledger,
            journal=ProgressJournal(
                partial(note_progress, self.ledger),
                PROGRESS_FLUSH_S if store.is_local else PROGRESS_FLUSH_REMOTE_S,
            ),
            store=store,
            reports=QueryPool(store),
            limiter=Limiter(clock),
            telemetry=Metrics(config.tenancy.tenants_as_labels_max),
            renderer=renderer,
            contracts=ContractManager(
                config.caching,
                clock,
                lambda namespace: engine.cache_events.losses_of(namespace),
                lambda: "" if engine.info is None else engine.info.epoch,
                has_past=has_history(store),
            ),
            analytics=analytics or InProcessAnalytics(_analytics(config, clock, wall)),
            model=renderer.card.name,
            clock=clock,
            wall=wall,
            new_id=RequestIds(wall),
            log=log,
            token_bytes_max=max(map(len, map(renderer.token_bytes, range(vocab)))),
            read_config=read_config or (lambda: config),
            engine_restarts=engine_restarts,
        )
        self._reckoning = Reconciler(self.context)
        self._storage = StorageWatch(self.context)
        self._listeners: list[Listener] = []
        self.context.telemetry.ledger_epoch.set(ledger_epoch(store).number)
        if self.ledger.found_epoch is not None:
            facts = msgspec.structs.asdict(self.ledger.found_epoch)
            log("ledger_replaced", {**facts, "chain": self.ledger.found_epoch.chain.hex()})
        if self.ledger.interrupted:
            log("holds_closed", {"interrupted": self.ledger.interrupted})

    async def listen(self, public: tuple[str, int], admin: tuple[str, int]) -> list[str]:
        """Open both listeners; the URLs bound. Raises OSError naming the address, and ConfigError
        where traces are wanted and cannot be sent."""
        context = self.context
        context.tracer = await asyncio.to_thread(open_tracer, context.config, context.log)
        urls = []
        for middleware, (host, port) in ((self.public(), public), (self.admin(), admin)):
            listener = Listener(
                middleware.handle,
                self.context.config.server,
                self.context.new_id,
                on_unreadable=lambda: self.context.telemetry.unreadable.add(1),
                shutdown_timeout_s=5.0,
            )
            self._listeners.append(listener)
            bound_host, bound_port = await listener.open(host, port)
            urls.append(f"http://{bound_host}:{bound_port}")
        self._reckoning.start()
        self._storage.start()
        return urls

    def public(self) -> Middleware:
        """What clients reach."""
        context = self.context
        routes = (
            *generate.routes(context),
            *quote.routes(context),
            *cached_contents.routes(context),
            *models.routes(context),
            *self_service.routes(context),
            *health.routes(context),
        )
        return Middleware(routes, context, context.config.server.hosts, SHAPES)

    def admin(self) -> Middleware:
        """What operators reach."""
        context = self.context
        routes = (
            *metrics.routes(context),
            *tenants.routes(context),
            *shared_scopes.routes(context),
            *usage.routes(context),
            *billing.routes(context),
            *analytics.routes(context),
            *dashboard.routes(),
            *health.routes(context),
        )
        return Middleware(routes, context, ("*",))

    def reload_soon(self) -> None:
        """Read the configuration again; what comes of it is in the log."""

        async def work() -> None:
            with suppress(Refusal):  # logged where it was raised
                await reload(self.context)

        task = asyncio.create_task(work())
        self.context.background.add(task)
        task.add_done_callback(self.context.background.discard)

    async def drain(self, timeout_s: float) -> None:
        """Not ready from now on; what runs may finish. Then the engine says its last count, and may
        end."""
        self.context.is_draining = True
        began_s = self.context.clock()
        if await self.context.wait_idle(timeout_s):
            await self._reckoning.close()
        left_s = timeout_s - (self.context.clock() - began_s)
        await self.context.engine.drain(max(left_s, 0.0))

    async def close(self) -> None:
        """Close listeners, finish settling, close the ledger. The engine is its owner's."""
        for listener in self._listeners:
            await listener.close()
        await self.context.finish_background()
        await self._storage.close()
        await self._reckoning.close()
        await self.ledger.close()
        await self.context.analytics.close()
        await asyncio.to_thread(self._registry.close)
        await self.context.reports.close()
        if self.context.tracer is not None:
            await asyncio.to_thread(self.context.tracer.close)


def _analytics(config: Config, clock: Clock, wall: WallClock) -> Analytics:
    return Analytics(clock, wall, config.tenancy.tenants_followed_max, config.caching.kept())


async def open_analytics(config: Config, log: Log) -> AnalyticsProcessClient:
    """In a process of their own."""
    begin = StartAnalytics(config.tenancy.tenants_followed_max, config.caching.kept())
    return await AnalyticsProcessClient.open(begin, time.monotonic, wall_ms, log)


def open_tracer(config: Config, log: Log) -> Tracer | None:
    """What sends spans, where `tracing.endpoint` is set; else nothing of OpenTelemetry is imported.
    Raises ConfigError where it is not installed."""
    if not config.tracing.endpoint:
        return None
    if not all(
        map(util.find_spec, ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter"))
    ):
        raise ConfigError(
            "tracing.endpoint is set, but OpenTelemetry is not installed: install trunkline[otel],"
            " or leave the endpoint empty"
        )
    from gateway.observability.otel_exporter import SpanTracer, WatchedExporter

    return SpanTracer(
        WatchedExporter(config.tracing.endpoint, log),
        config.tracing.sample_ratio,
        parse_address(config.server.listen, "server.listen"),
        metadata.version("trunkline"),
    )


def prepare_data_dir(config: Config) -> None:
    """Make it, for its owner alone; one that is there keeps its mode. Raises OSError."""
    if not config.data.is_dir():
        config.data.mkdir(mode=0o700, parents=True)


def connect(config: Config) -> Store:
    """The database that is configured. Raises StoreError."""
    return backends.open_store(config.tenancy.database, config.data, os.environ)


def open_store(config: Config) -> tuple[Store, str | None]:
    """The database, with the default tenant made on first start: (store, its new key or None).

    That key and an administrator's are also kept in files that their owner alone may read.
    """
    prepare_data_dir(config)
    store = connect(config)
    key = bootstrap(store, wall_ms)
    for name, made in ((KEY_FILE, key), (ADMIN_KEY_FILE, bootstrap_admin(store, wall_ms))):
        if made is not None:
            path = config.data / name
            path.touch(mode=0o600)
            path.chmod(0o600)
            path.write_text(made + "\n")
    return store, key


async def serve(
    config: Config,
    card: ModelCard,
    store: Store,
    announce: Callable[[list[str]], None],
    read_config: Callable[[], Config],
) -> int:
    """Run until SIGTERM or SIGINT. Returns the exit status.

    The first signal drains: not ready at once, running answers may finish. A second one ends now.
    SIGHUP reads the configuration again (`reload`).
    """
    log, stop = LogLines(sys.stderr.fileno(), wall_ms), asyncio.Event()
    supervisor = EngineSupervisor(Path(card.folder), config.engine, log)
    gateway: Gateway | None = None

    def end() -> None:
        if stop.is_set():
            log.close()
            os._exit(1)
        stop.set()

    def reload_soon() -> None:
        if gateway is not None and not stop.is_set():
            gateway.reload_soon()

    with handle_signals({signal.SIGTERM: end, signal.SIGINT: end, signal.SIGHUP: reload_soon}):
        supervisor.start()  # it takes longest to be ready: all else is made meanwhile
        try:
            async with AsyncExitStack() as opened:
                ledger = await LedgerProcessClient.open(config.tenancy.database, config.data, log)
                opened.push_async_callback(ledger.close)
                analytics = await open_analytics(config, log)
                opened.push_async_callback(analytics.close)
                gateway = Gateway(
                    config,
                    supervisor,
                    await asyncio.to_thread(Renderer, card),
                    store,
                    log,
                    engine_restarts=lambda: supervisor.restarts,
                    read_config=read_config,
                    ledger=ledger,
                    analytics=analytics,
                )
                opened.push_async_callback(gateway.close)
                await _serve(gateway, supervisor, announce, stop)
        finally:
            await supervisor.close()
            log.close()
    return 0


async def _serve(
    gateway: Gateway,
    supervisor: EngineSupervisor,
    announce: Callable[[list[str]], None],
    stop: asyncio.Event,
) -> None:
    """From the listeners' opening to the end of what they took, once it is to `stop`."""
    config = gateway.context.config
    await declare(gateway.context, config)
    urls = await gateway.listen(
        parse_address(config.server.listen, "server.listen"),
        parse_address(config.admin.listen, "admin.listen"),
    )
    settle_heap()
    ready = asyncio.create_task(supervisor.wait_ready())
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait([ready, stopped], return_when=asyncio.FIRST_COMPLETED)
    if ready.done() and ready.exception() is None:
        announce(urls)
    elif ready.done():
        ready.result()
    await stopped
    timeout_s = config.engine.drain_timeout_s
    await gateway.drain(timeout_s)
    await gateway.context.wait_idle(timeout_s + 1.0)
