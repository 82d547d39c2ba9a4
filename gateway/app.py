"""The composition root: builds a gateway from its parts, its two listeners and its lifecycle.

`Gateway` is what tests and embedders use: it starts listeners over any engines. `serve` is the
product: a data directory, a model, an engine process, and a shutdown that loses no usage.
`gateway.cli.serve` calls it and handles the signals.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, suppress
from functools import partial
from importlib import metadata, util
from typing import TYPE_CHECKING, Protocol

import msgspec

from engine.api import Clock
from engine.encoder.card import EncoderCard
from engine.encoder.protocol import StartEncoder
from engine.errors import EngineError, ModelError
from engine.model_store import ModelCard
from gateway.analytics.aggregates import Analytics
from gateway.analytics.client import AnalyticsProcessClient
from gateway.analytics.interface import AnalyticsClient, InProcessAnalytics
from gateway.analytics.protocol import StartAnalytics
from gateway.api import listeners
from gateway.api.listeners import Services
from gateway.background.config_reload import ConfigReload
from gateway.background.erasure import CacheErasure
from gateway.background.history_sampling import HistorySampling
from gateway.background.metrics_export import MetricsExport, MetricsExporter
from gateway.background.missed_erasures import MissedErasures
from gateway.background.reconciliation import Reconciler
from gateway.background.storage_metering import StorageMetering
from gateway.background.webhook_events import WebhookEvents
from gateway.background.webhooks import (
    ReadEndpoints,
    WebhookEndpoint,
    WebhookSender,
    read_endpoints,
)
from gateway.caching import ContractManager
from gateway.caching.promise_store import PromiseStore
from gateway.config import Config, ConfigError, format_address, parse_address
from gateway.config.config_file import ConfigSource
from gateway.config.fleet import VARIABLE_OF_SHARED
from gateway.context import Context, Log
from gateway.embeddings.embedder import Embedder
from gateway.embeddings.encoder_client import EncoderProcess
from gateway.engines.cache_usage import CacheUsage
from gateway.engines.elsewhere.promise_moves import PromiseMoves
from gateway.engines.replicas import Replicas
from gateway.engines.served_models import FailedModel, ServedModel, ServedModels
from gateway.engines.waiting_requests import WaitingBounds, WaitingRequests
from gateway.errors import Refusal, error_location
from gateway.findings.finding_store import FindingStore
from gateway.gc_tuning import freeze_heap, use_large_pages
from gateway.generation.rate_limits import RateLimits
from gateway.generation.serving import Serving
from gateway.http.descriptors import connections_allowed
from gateway.http.middleware import Middleware
from gateway.http.request_context import RequestIds
from gateway.http.server import Listener, log_accept_errors
from gateway.ledger.attribution import UserAttribution
from gateway.ledger.client import LedgerProcessClient
from gateway.ledger.deferred_holds import DeferredHolds
from gateway.ledger.interface import InProcessLedger, LedgerClient, OpenedLedger
from gateway.ledger.metering import note_progress
from gateway.ledger.progress import PROGRESS_FLUSH_REMOTE_S, PROGRESS_FLUSH_S, ProgressJournal
from gateway.ledger.query_pool import QueryPool
from gateway.ledger.response_writer import ResponseWriter
from gateway.levels.report import holds_promises, unkept_tokens
from gateway.observability.ended_requests import EndedRequests
from gateway.observability.logging import LogLines
from gateway.observability.metrics import Metrics
from gateway.observability.tracing import Tracer
from gateway.prompt import Renderer
from gateway.shared.gateway_id import GatewayIdHold, gateway_of, name_start
from gateway.template_date import calendar_of
from tenancy.accounts.authentication import KeyAuthenticator
from tenancy.ledger.epochs import has_history, ledger_epoch
from tenancy.ledger.ledger import Ledger
from tenancy.limits import Limiter
from tenancy.pricing.budget_watch import BudgetWatch
from tenancy.storage.interface import Store
from tenancy.types import WallClock, wall_ms

if TYPE_CHECKING:
    from gateway.shared.valkey import ValkeyLimits

ADMIN_CONNECTIONS_MAX = 100
"""Open connections of the admin listener."""
SWITCH_INTERVAL_S = 0.001
"""How long a thread that prepares requests may run Python while the event loop waits, in seconds;
Python's own value is 5 ms."""


Announce = Callable[[list[str], Mapping[str, str]], None]
"""Tells the listeners' URLs, and the state of each model by name."""


class BackgroundTask(Protocol):
    """Work beside requests, from the opening of the listeners until the gateway closes."""

    def start(self) -> None:
        """Begin, on the running event loop."""

    async def close(self) -> None:
        """Stop, and write what is left. Safe without `start`."""


class Gateway:
    """A running gateway: its parts and its listeners."""

    def __init__(
        self,
        config: Config,
        models: Sequence[ServedModel],
        store: Store,
        log: Log,
        *,
        clock: Clock = time.monotonic,
        wall: WallClock = wall_ms,
        source: ConfigSource | None = None,
        gateway_id: str = "",
        start: str = "",
        ledger: OpenedLedger | None = None,
        analytics: AnalyticsClient | None = None,
        embeddings: Embedder | None = None,
        failed: Sequence[FailedModel] = (),
        endpoints: Sequence[WebhookEndpoint] = (),
        read_webhooks: ReadEndpoints | None = None,
    ) -> None:
        """Build the parts. `models`: the default one first. `failed`: those that were to be
        served too. `ledger` uses the same store; `close` closes `ledger`, `analytics` and
        `embeddings`; without them both run in this process. `gateway_id`: of this gateway in
        its database; `start`: names this start of it. `endpoints`: of webhooks;
        `read_webhooks`: reads them again, None to keep them. Raises StoreError."""
        self._start = start or name_start(gateway_id)
        opened: OpenedLedger = ledger or InProcessLedger(Ledger(store, wall, self._start))
        _log_found(opened, log)
        self.ledger: LedgerClient = opened
        if store.is_local:  # on a remote store each budget check would be a round trip
            self.ledger = DeferredHolds(opened, BudgetWatch(store))
        self._authenticator = KeyAuthenticator(store, wall, clock)
        served = ServedModels(models, failed)
        contracts = _contracts(config, served, store, clock)
        if not store.is_local:
            self._authenticator.start_watching()
        attribution = UserAttribution(store, wall) if config.billing.attribution == "user" else None
        kept = contracts.entries, contracts.promises
        promises = PromiseStore(store, gateway_id, *kept, clock, wall, log)
        metrics = Metrics(config.tenancy.tenants_as_labels_max, metadata.version("trunkline"))
        self.context = Context(
            config=config,
            models=served,
            authenticator=self._authenticator,
            ledger=self.ledger,
            journal=_journal(self.ledger, store),
            store=store,
            reports=QueryPool(store),
            contents=QueryPool(store),
            responses=ResponseWriter(store, config),
            metrics=metrics,
            ended_requests=EndedRequests(wall, metrics, gateway_id),
            contracts=contracts,
            promise_store=promises,
            analytics=analytics or InProcessAnalytics(_analytics(config, clock, wall)),
            usage=CacheUsage(served, config.caching, wall, self._authenticator),
            clock=clock,
            wall=wall,
            new_id=RequestIds(wall),
            log=log,
            attribution=attribution,
            embeddings=embeddings,
        )
        self._make_services(gateway_id)
        self.webhooks = self.sender(endpoints, read_webhooks)
        self._tasks.append(self.webhooks)
        self.reload = ConfigReload(
            *(config, served, self._authenticator, store, self.context.work, wall, log),
            *(source or ConfigSource(None, lambda: config), self.webhooks),
        )
        metrics.ledger_epoch.set(ledger_epoch(store).number)

    def _make_services(self, gateway_id: str) -> None:
        """Make what works on the parts, for handlers and beside them."""
        of = self.context
        self._started_s = of.wall() // 1000
        self.listeners: list[Listener] = []
        self.shared_limits = open_shared(of.config, gateway_id, of.metrics, of.clock, of.log)
        self.limits = RateLimits(Limiter(of.clock), of.config.limits, of.wall, self.shared_limits)
        self.erasure = CacheErasure(of)
        self.missed = MissedErasures(
            *(of.models, of.store, self.erasure, of.metrics.levels, of.clock, of.wall, of.log)
        )
        self.moves = PromiseMoves(
            *(of.models, of.contracts, of.usage.terms_of, of.new_id),
            partial(of.metrics.promise_moves.add, 1),
            *(of.clock, of.log),
        )
        self.sampling = HistorySampling(of)
        self._finding_store = FindingStore(of, gateway_id)
        self.metering = StorageMetering(of, self.erasure)
        self.reconciler = Reconciler(
            *(of.models, of.ledger, of.store, of.metrics, of.clock, of.wall, of.log),
            self._start,
        )
        self._tasks: list[BackgroundTask] = [
            *(self.metering, self._finding_store, self.sampling, self.reconciler, self.missed),
            self.moves,
            GatewayIdHold(of.store, gateway_id, of.log, of.clock),
        ]

    def events(self) -> WebhookEvents:
        """Return what finds the events that happen from now on."""
        of = self.context
        return WebhookEvents(
            *(of.models, of.contracts, self.limits.limited, of.authenticator),
            *(of.reports, of.clock, of.wall),
        )

    def sender(
        self, endpoints: Sequence[WebhookEndpoint], read: ReadEndpoints | None = None
    ) -> WebhookSender:
        """Return what sends events to these endpoints; `read` reads them again."""
        of = self.context
        return WebhookSender(of.store, of.clock, of.wall, of.log, self.events(), endpoints, read)

    async def listen(self, public: tuple[str, int], admin: tuple[str, int]) -> list[str]:
        """Open both listeners and return their URLs.

        Raises OSError that names the address, and ConfigError if traces or metrics are to be sent
        and cannot be.
        """
        context = self.context
        await context.promise_store.start()
        await self.missed.open()
        if self.shared_limits is not None:
            await self.shared_limits.open()
        context.tracer = await asyncio.to_thread(open_tracer, context.config, context.log)
        exporter = await asyncio.to_thread(open_metrics_exporter, context.config, context.log)
        if exporter is not None:
            self._tasks.append(MetricsExport(context, exporter))
        urls = []
        configured = context.config.server.connections_max
        allowed = await asyncio.to_thread(connections_allowed, configured)
        if allowed < configured:
            context.log("connections_limited", {"configured": configured, "allowed": allowed})
        is_shared = context.config.server.processes > 1
        for middleware, (host, port), connections_max, shares in (
            (self.public(), public, allowed, is_shared),
            (self.admin(), admin, min(allowed, ADMIN_CONNECTIONS_MAX), False),
        ):
            listener = Listener(
                middleware.handle,
                msgspec.structs.replace(context.config.server, connections_max=connections_max),
                self.context.new_id,
                on_unreadable=lambda: self.context.metrics.unreadable.add(1),
            )
            self.listeners.append(listener)
            bound_host, bound_port = await listener.open(host, port, is_shared=shares)
            urls.append(f"http://{format_address(bound_host, bound_port)}")
        for task in self._tasks:
            task.start()
        return urls

    def public(self) -> Middleware:
        """Return the routes that clients reach, behind their middlewares."""
        return listeners.public(self._services())

    def admin(self) -> Middleware:
        """Return the routes that operators reach, behind their middlewares."""
        return listeners.admin(self._services())

    def _services(self) -> Services:
        return Services(
            gateway=self.context,
            serving=Serving(self.context, self.limits),
            erasure=self.erasure,
            missed=self.missed,
            sampling=self.sampling,
            findings=self._finding_store,
            webhooks=self.webhooks,
            reload=self.reload,
            started_s=self._started_s,
        )

    def reload_soon(self) -> None:
        """Reload the configuration in the background; the log has the result."""

        async def work() -> None:
            with suppress(Refusal):  # logged where it was raised
                await self.reload.reload()

        _ = self.context.work.start(work())

    async def drain(self, timeout_s: float) -> None:
        """Stop being ready, and let running requests finish for at most `timeout_s`.

        Then record the engines' final counts and let them end.
        """
        self.context.running.is_draining = True
        for listener in self.listeners:
            listener.begin_drain()
        began_s = self.context.clock()
        is_idle = await self.context.running.wait_idle(timeout_s)
        await self._hurry()
        if is_idle:
            await self.reconciler.close()
        await self.metering.write()
        left_s = timeout_s - (self.context.clock() - began_s)
        for model in self.context.models:
            await model.replicas.drain(max(left_s, 0.0))

    async def _hurry(self) -> None:
        """From now on an engine that does not answer costs seconds once, and not each question."""
        for model in self.context.models:
            for replica in model.replicas:
                replica.hurry()

    async def refuse_last(self) -> None:
        """Stop accepting, and tell the clients that still ask why they are refused."""
        await asyncio.gather(*(listener.end_drain() for listener in self.listeners))

    @property
    def open_connections(self) -> int:
        """Connections of both listeners."""
        return sum(listener.open_connections for listener in self.listeners)

    async def close(self) -> None:
        """Close the listeners, finish settling, close the ledger; the engines belong to the caller.

        All parts are closed. Those that fail are logged, and the first error is raised at the end.
        """
        context = self.context
        embeddings, attribution, tracer = context.embeddings, context.attribution, context.tracer
        closes: list[Callable[[], Awaitable[None]]] = [
            *(listener.close for listener in self.listeners),
            context.work.finish,
            context.preparations.close,
            *(() if embeddings is None else (embeddings.close,)),
            context.responses.close,
            *(() if attribution is None else (attribution.close,)),
            self._hurry,
            *(task.close for task in self._tasks),
            context.promise_store.close,
            *(() if self.shared_limits is None else (self.shared_limits.close,)),
            self.ledger.close,
            context.analytics.close,
            partial(asyncio.to_thread, self._authenticator.close),
            context.reports.close,
            context.contents.close,
            *(() if tracer is None else (partial(asyncio.to_thread, tracer.close),)),
        ]
        errors: list[Exception] = []
        for close in closes:
            try:
                await close()
            except Exception as error:
                context.log("close_failed", error_location(error))
                errors.append(error)
        if errors:
            raise errors[0]


def _log_found(ledger: OpenedLedger, log: Log) -> None:
    """Log what the ledger found at its start."""
    if ledger.found_epoch is not None:
        facts = msgspec.structs.asdict(ledger.found_epoch)
        log("ledger_replaced", {**facts, "chain": ledger.found_epoch.chain.hex()})
    if ledger.interrupted:
        log("holds_closed", {"interrupted": ledger.interrupted})


def _journal(ledger: LedgerClient, store: Store) -> ProgressJournal:
    """Return the journal of running streams; a remote store is written to less often."""
    flush_s = PROGRESS_FLUSH_S if store.is_local else PROGRESS_FLUSH_REMOTE_S
    return ProgressJournal(partial(note_progress, ledger), flush_s)


def _contracts(config: Config, models: ServedModels, store: Store, clock: Clock) -> ContractManager:
    return ContractManager(
        config.caching,
        clock,
        models.losses_of,
        models.epoch_of,
        models.is_alive,
        has_past=has_history(store),
        tells_leases=config.server.tolerance != "strict",
        survives=lambda namespace: holds_promises(models.stats_of(namespace)),
        unkept_tokens=lambda namespace: unkept_tokens(
            models.stats_of(namespace), models.info_of(namespace)
        ),
        gap_cause=lambda namespace: (
            "state_gap" if models.keeps_states(namespace) else "window_gone"
        ),
    )


def _analytics(config: Config, clock: Clock, wall: WallClock) -> Analytics:
    followed = config.tenancy.tenants_followed_max
    return Analytics(clock, wall, followed, config.caching.kept(), secrets.randbits(64))


async def open_analytics(config: Config, log: Log) -> AnalyticsProcessClient:
    """Start analytics in a child process."""
    begin = StartAnalytics(config.tenancy.tenants_followed_max, config.caching.kept())
    client = AnalyticsProcessClient(begin, time.monotonic, wall_ms, log)
    await client.open()
    return client


async def open_embedder(card: EncoderCard, config: Config, log: Log) -> Embedder:
    """Start the encoder's process and return the embedding model; it serves some seconds later."""
    settings = config.embeddings
    threads = settings.threads or max(1, (os.cpu_count() or 1) // 2)
    encoder = EncoderProcess(StartEncoder(card.folder, threads), settings.waiting_tokens_max, log)
    encoder.open()
    try:
        return await asyncio.to_thread(Embedder, card, settings, encoder)
    except BaseException:
        await encoder.close()
        raise


def open_shared(
    config: Config, gateway_id: str, metrics: Metrics, clock: Clock, log: Log
) -> ValkeyLimits | None:
    """Return the limits that gateways share, or None without `fleet.shared`; then its client is not
    imported.

    Raises ConfigError if the client is not installed.
    """
    if not config.fleet.shared:
        return None
    if util.find_spec("redis") is None:
        raise ConfigError(
            "fleet.shared is set, but its client is not installed; install trunkline[shared], or"
            " set an empty address"
        )
    from gateway.shared.valkey import ValkeyLimits

    return ValkeyLimits(
        config.fleet.shared,
        gateway_id or secrets.token_hex(8),
        log,
        clock,
        password=os.environ.get(VARIABLE_OF_SHARED),
        on_state=lambda is_away: metrics.shared_degraded.set(int(is_away)),
    )


def open_tracer(config: Config, log: Log) -> Tracer | None:
    """Return the tracer, or None without `tracing.endpoint`; then OpenTelemetry is not imported.

    Raises ConfigError if OpenTelemetry is not installed.
    """
    if not config.tracing.endpoint:
        return None
    _check_opentelemetry("tracing.endpoint")
    from gateway.observability.otel_exporter import SpanTracer, WatchedExporter

    return SpanTracer(
        WatchedExporter(config.tracing.endpoint, log),
        config.tracing.sample_ratio,
        parse_address(config.server.listen, "server.listen"),
        metadata.version("trunkline"),
    )


def open_metrics_exporter(config: Config, log: Log) -> MetricsExporter | None:
    """Return the exporter of metrics, or None without `metrics.endpoint`; then OpenTelemetry is not
    imported.

    Raises ConfigError if OpenTelemetry is not installed.
    """
    if not config.metrics.endpoint:
        return None
    _check_opentelemetry("metrics.endpoint")
    from gateway.observability.otel_metrics import OtlpMetrics, open_exporter

    exporter = open_exporter(config.metrics.endpoint)
    return OtlpMetrics(exporter, metadata.version("trunkline"), wall_ms(), log)


def _check_opentelemetry(setting: str) -> None:
    """Raise ConfigError if OpenTelemetry is not installed."""
    if not all(
        map(util.find_spec, ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter"))
    ):
        raise ConfigError(
            f"{setting} is set, but OpenTelemetry is not installed; install trunkline[otel],"
            " or set an empty endpoint"
        )


async def serve(
    config: Config,
    cards: Sequence[ModelCard | ModelError],
    store: Store,
    replicas: Sequence[Replicas],
    log: LogLines,
    announce: Announce,
    source: ConfigSource,
    encoder: EncoderCard | None,
    stop: asyncio.Event,
    hangup: asyncio.Event,
    start: str,
) -> None:
    """Run until `stop` is set. `cards`: of `config.served_models()`; an error takes the place of a
    model that cannot be served. `replicas`: started, those of each card; they and `log` belong to
    the caller. `encoder`: the embedding model. `start`: names this start of the gateway.

    `stop` drains: the gateway is not ready from then on, and running requests may finish. `hangup`
    reloads the configuration, and is cleared.
    """
    log_accept_errors(asyncio.get_running_loop(), log)
    endpoints = read_endpoints(config.webhooks, os.environ)
    async with AsyncExitStack() as opened:
        loading = asyncio.to_thread(_load_models, config, cards, replicas)
        loaded = asyncio.create_task(loading)  # while processes start
        opened.callback(loaded.cancel)
        ledger = LedgerProcessClient(config.tenancy.database, config.data, log, gateway=start)
        await ledger.open()
        opened.push_async_callback(ledger.close)
        analytics = await open_analytics(config, log)
        opened.push_async_callback(analytics.close)
        embedder = None
        if encoder is not None:
            embedder = await open_embedder(encoder, config, log)
            opened.push_async_callback(embedder.close)
        found, failed = await loaded
        for model in failed:
            log("model_failed", {"model": model.settings.name, "reason": model.reason})
        served = {model.replicas for model in found}
        for unused in set(replicas).difference(served):
            await unused.close()
        gateway = Gateway(
            config,
            found,
            store,
            log,
            source=source,
            gateway_id=gateway_of(start),
            start=start,
            ledger=ledger,
            analytics=analytics,
            embeddings=embedder,
            failed=failed,
            endpoints=endpoints,
            read_webhooks=lambda changed: read_endpoints(changed.webhooks, os.environ),
        )
        opened.push_async_callback(gateway.close)
        await _serve(gateway, announce, stop, hangup)


def _load_models(
    config: Config,
    cards: Sequence[ModelCard | ModelError],
    replicas: Sequence[Replicas],
) -> tuple[list[ServedModel], list[FailedModel]]:
    """Return the served models, the default one first, and those with a fault. Loads their
    tokenizers: call it in a thread. Raises ModelError for a fault of the default model."""
    calendar, engines = calendar_of(config.templates), iter(replicas)
    found: list[ServedModel] = []
    failed: list[FailedModel] = []
    for settings, card in zip(config.served_models(), cards, strict=True):
        engine = config.engine_of(settings)
        has_disk = engine.levels.disk_gib > 0
        if isinstance(card, ModelError):
            failed.append(FailedModel(settings, card.message, has_disk))
            continue
        own = next(engines)
        try:
            renderer = Renderer(card, calendar)
        except ModelError as error:
            if not found:
                raise
            failed.append(FailedModel(settings, error.message, has_disk))
            continue
        bounds = WaitingBounds(engine.queue_requests_max, engine.queue_tokens_max)
        model = ServedModel(
            name=settings.name or card.name,
            replicas=own,
            renderer=renderer,
            aliases=settings.aliases,
            has_disk=has_disk,
            quota_scale=settings.quota_scale,
            tenants=settings.open_to,
            waiting=WaitingRequests(bounds),
        )
        found.append(model)
    return found, failed


async def _watch_start(model: ServedModel, log: Log) -> None:
    """Log when a model that is not the default one is ready, or that it never will be: the others
    serve on."""
    try:
        await model.replicas.wait_ready()
    except EngineError as error:
        log("model_failed", {"model": model.name, "reason": str(error)})
    else:
        log("model_ready", {"model": model.name})


async def _move_heap(starts: Sequence[Awaitable[None]]) -> None:
    """Move the heap to large pages when all models have started or failed to: they are faster with
    the processors for themselves."""
    await asyncio.gather(*starts)
    await asyncio.to_thread(use_large_pages)


async def _reload_at(hangup: asyncio.Event, gateway: Gateway) -> None:
    """Reload the configuration whenever `hangup` is set."""
    while True:
        await hangup.wait()
        hangup.clear()
        gateway.reload_soon()


async def _serve(
    gateway: Gateway,
    announce: Announce,
    stop: asyncio.Event,
    hangup: asyncio.Event,
) -> None:
    """Serve from opening the listeners until `stop` is set and the gateway has drained."""
    config = gateway.context.config
    await gateway.reload.declare(config)
    urls = await gateway.listen(
        parse_address(config.server.listen, "server.listen"),
        parse_address(config.admin.listen, "admin.listen"),
    )
    freeze_heap()
    sys.setswitchinterval(SWITCH_INTERVAL_S)
    default, *others = gateway.context.models
    ready = asyncio.create_task(default.replicas.wait_ready())
    watches = [asyncio.create_task(_watch_start(one, gateway.context.log)) for one in others]
    reloads = asyncio.create_task(_reload_at(hangup, gateway))
    stopped = asyncio.create_task(stop.wait())
    await asyncio.wait([ready, stopped], return_when=asyncio.FIRST_COMPLETED)
    if ready.done():
        ready.result()  # raises if the engine never will be ready
        announce(urls, gateway.context.models.states())
    moved = asyncio.create_task(_move_heap(watches))
    await stopped
    for watch in (*watches, moved, reloads):
        watch.cancel()
    context, timeout_s, began_s = gateway.context, config.engine.drain_timeout_s, time.monotonic()
    running = sum(context.running.values())
    connections = gateway.open_connections
    context.log("stopping", {"running": running, "connections": connections})
    await gateway.drain(timeout_s)
    await context.running.wait_idle(timeout_s + 1.0)
    await gateway.refuse_last()
    seconds = round(time.monotonic() - began_s, 3)
    context.log("stopped", {"seconds": seconds, "unfinished": sum(context.running.values())})
