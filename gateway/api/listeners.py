"""The two listeners: which routes each has, and which middlewares a request passes, in order."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import msgspec
from aiohttp import web

from gateway.api import (
    cached_contents,
    conversations,
    dashboard,
    generate,
    health,
    models,
    openapi,
    quote,
    stored_responses,
    tokenizer,
)
from gateway.api.admin import (
    audit,
    billing,
    findings,
    fleet,
    history,
    levels,
    me,
    metrics,
    requests,
    shared_scopes,
    webhooks,
)
from gateway.api.admin.analytics import AnalyticsHandlers
from gateway.api.admin.audit import ChangeLog
from gateway.api.admin.tenants import TenantHandlers, reload_route
from gateway.api.admin.usage import UsageHandlers
from gateway.api.openapi import ListenerName
from gateway.api.self_service import SelfServiceHandlers
from gateway.api.tenant_state import TenantStates
from gateway.api.usage_report import UsageReports
from gateway.background.config_reload import ConfigReload
from gateway.background.erasure import CacheErasure
from gateway.background.history_sampling import HistorySampling
from gateway.background.metrics_export import refresh_metrics
from gateway.background.missed_erasures import MissedErasures
from gateway.background.webhooks import WebhookSender
from gateway.context import Context
from gateway.findings.finding_store import FindingStore
from gateway.generation.serving import Serving
from gateway.http.authentication import (
    NO_TRUSTED_HEADER,
    Keys,
    TrustedHeader,
    allowed_hosts,
    check_host,
)
from gateway.http.middleware import Middleware, Origins, Places, RequestRouting
from gateway.http.request_context import (
    RequestLines,
    RequestMetrics,
    RequestRecords,
    RequestSpans,
)
from gateway.http.route_table import Route


@dataclass(frozen=True, slots=True)
class Services:
    """What the handlers of one gateway ask, beside its parts. `started_s`: when it started."""

    gateway: Context
    serving: Serving
    erasure: CacheErasure
    missed: MissedErasures
    sampling: HistorySampling
    findings: FindingStore
    webhooks: WebhookSender
    reload: ConfigReload
    started_s: int

    def name_of(self, tenant_id: int) -> str | None:
        """Return the name of a tenant that exists."""
        found = self.gateway.authenticator.tenant(tenant_id)
        return None if found is None else found.tenant.name

    def states(self) -> TenantStates:
        """Return what says of tenants what they may do."""
        gateway, limiter = self.gateway, self.serving.limits.limiter
        ended, sampling = gateway.ended_requests, self.sampling
        return TenantStates(gateway.reports, limiter, ended, sampling, gateway.wall)


def public_routes(of: Services) -> tuple[Route, ...]:
    """Return the routes that clients reach."""
    gateway, serving = of.gateway, of.serving
    own = SelfServiceHandlers(
        *(gateway.reports, gateway.contents, gateway.models, gateway.authenticator),
        *(gateway.clock, gateway.wall, UsageReports(gateway.reports, gateway.wall)),
        *(of.states(), of.erasure),
    )
    output_tokens = gateway.config.limits.output_tokens_default
    routes = (
        *generate.routes(serving),
        *tokenizer.routes(serving),
        *stored_responses.routes(serving),
        *conversations.routes(serving, gateway.new_id),
        *quote.routes(serving, gateway.reports, gateway.config, gateway.wall),
        *cached_contents.routes(serving),
        *models.routes(gateway.models, gateway.embeddings, output_tokens, of.started_s),
        *own.routes(),
        *findings.own_routes(gateway.reports, of.findings, gateway.wall),
        *(dashboard.public_routes() if gateway.config.server.dashboard else ()),
        *health.routes(gateway.models, gateway.obstacle),
    )
    return (*routes, openapi.route("public", routes))


def admin_routes(of: Services) -> tuple[Route, ...]:
    """Return the routes that operators reach."""
    gateway, store, reports, wall = (
        of.gateway,
        of.gateway.store,
        of.gateway.reports,
        of.gateway.wall,
    )
    config, served = gateway.config, gateway.models
    changes = ChangeLog(gateway.authenticator, wall, gateway.log)
    tenants = TenantHandlers(
        *(store, reports, config, served, gateway.authenticator, wall, changes),
        *(of.states(), of.erasure),
    )
    usage_reports = UsageReports(reports, wall)
    usage = UsageHandlers(store, served, usage_reports, of.erasure, changes, of.name_of)
    routes = (
        *metrics.routes(gateway.metrics, partial(refresh_metrics, gateway)),
        *tenants.routes(),
        reload_route(of.reload, changes),
        *shared_scopes.routes(store, reports, changes, wall),
        *usage.routes(),
        *billing.routes(store, reports, config, changes, wall),
        *audit.routes(store, wall),
        *AnalyticsHandlers(gateway, of.sampling, of.erasure).routes(),
        *findings.routes(reports, of.findings, wall),
        *history.routes(store, reports, of.sampling, wall),
        *fleet.routes(
            *(served, of.name_of, gateway.count_broken_promises, of.missed, changes, reports)
        ),
        *levels.routes(served, gateway.usage, config, of.reload, of.name_of, wall),
        *requests.routes(reports, of.sampling, of.findings, wall),
        *webhooks.routes(reports, of.webhooks, changes),
        *me.routes(store, config, served, changes, wall),
        *dashboard.admin_routes(),
        *health.routes(served, gateway.obstacle),
    )
    return (*routes, openapi.route("admin", routes))


def public(of: Services) -> Middleware:
    """Return the routes that clients reach, behind their middlewares."""
    server = of.gateway.config.server
    check = partial(check_host, allowed=allowed_hosts(server), setting="server.hosts")
    origins = Origins(server.cors_origins, check)
    return _middleware(of, public_routes(of), check, origins, NO_TRUSTED_HEADER, is_public=True)


def admin(of: Services) -> Middleware:
    """Return the routes that operators reach, behind their middlewares."""
    admin = of.gateway.config.admin
    check = partial(check_host, allowed=allowed_hosts(admin), setting="admin.hosts")
    trusted = TrustedHeader(admin.trusted_header, admin.trusted_proxies, admin.trusted_scopes)
    return _middleware(of, admin_routes(of), check, Origins(()), trusted, is_public=False)


def _middleware(
    of: Services,
    routes: tuple[Route, ...],
    check: Callable[[web.BaseRequest], None],
    origins: Origins,
    trusted: TrustedHeader,
    *,
    is_public: bool,
) -> Middleware:
    gateway, clock = of.gateway, of.gateway.clock
    room = gateway.config.server.body_bytes_in_flight_max
    places = Places(room, of.serving.limits.take_place)
    log, tracer = RequestLines(gateway.log, clock), gateway.tracer
    return Middleware(
        routes,
        entering=(
            *((origins.enter,) if origins.are_allowed else ()),
            RequestRouting(routes, check, is_public=is_public).enter,
            Keys(gateway.authenticator, clock, trusted).enter,
            places.enter,
        ),
        leaving=(
            places.leave,
            RequestMetrics(gateway.metrics).leave,
            RequestRecords(gateway.ended_requests, is_public=is_public).leave,
            *((log.leave,) if gateway.config.log.requests else ()),
            *((RequestSpans(tracer, gateway.wall).leave,) if tracer is not None else ()),
        ),
        new_id=gateway.new_id,
        clock=clock,
        log=gateway.log,
    )


class _AnyPart:
    """Stands for every part of a gateway where routes are described and never called."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *given: object) -> Any:
        return self


def described(listener: ListenerName) -> dict[str, Any]:
    """Return the OpenAPI document of a listener as JSON values, without a gateway."""
    find = {"public": public_routes, "admin": admin_routes}[listener]
    found: dict[str, Any] = msgspec.json.decode(
        msgspec.json.encode(openapi.document(listener, find(cast(Services, _AnyPart()))))
    )
    return found
