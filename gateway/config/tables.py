"""Every table of the configuration file, with a default for each key. `Config` has them all."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from engine.config import EngineConfig
from engine.model_store import DEFAULT_MODEL
from gateway.config.decoding import ConfigError, check_names, overlaid
from gateway.config.fleet import FleetConfig, ReplicaSettings
from gateway.retention_classes import CachingConfig
from gateway.template_date import TemplatesConfig
from tenancy.accounts.declared_tenants import DeclaredTenant
from tenancy.accounts.shared_scopes import ScopeTerms
from tenancy.errors import BadPrice
from tenancy.pricing.charges import ANY, RateCard
from tenancy.types import ToleranceMode

Seconds = Annotated[float, Meta(gt=0, le=86_400)]
PositiveInt = Annotated[int, Meta(ge=1, le=2**40)]
DEFAULT_DATA_DIR = Path("data")


class ServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The public listener."""

    listen: str = "127.0.0.1:8080"
    hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "[::1]")
    """Allowed values of the `Host` header beside the address of `listen`; "*" allows all."""
    processes: Annotated[int, Meta(ge=1, le=16)] = 1
    """Gateway processes on one port. More than 1 need PostgreSQL, Valkey and engines elsewhere."""
    header_timeout_s: Seconds = 10.0
    """The longest wait for the head of a request."""
    body_timeout_s: Seconds = 30.0
    """The longest wait for its body, which has `body_rate_min_bytes_per_s` from then on."""
    body_rate_min_bytes_per_s: Seconds = 1_000.0
    keep_alive_timeout_s: Seconds = 75.0
    write_timeout_s: Seconds = 20.0
    """The longest wait until a client reads written bytes."""
    send_buffer_bytes: PositiveInt = 65_536
    body_bytes_max: PositiveInt = 10 * 2**20
    body_bytes_in_flight_max: PositiveInt = 256 * 2**20
    """Bodies that are received or parsed at a time, and stored content that requests name, of all
    clients; one tenant may hold a quarter of what the others leave."""
    body_values_max: PositiveInt = 200_000
    """Values in a JSON body, counted by its braces, brackets and commas."""
    connections_max: PositiveInt = 4_096
    connections_per_address_max: Annotated[int, Meta(ge=0)] = 512
    """Connections of clients that have shown no valid key; 0 is no limit."""
    stream_keep_alive_s: Seconds = 15.0
    tolerance: ToleranceMode = "standard"
    """How requests with fields that the server does not honour are treated, unless their key says
    otherwise (docs/dialects.md)."""
    dashboard: bool = True
    """Whether tenants have a page of their own at /dashboard."""
    cors_origins: tuple[str, ...] = ()
    """Origins of web pages that may call this listener; "*" allows all."""


class AdminConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The admin listener: metrics, admin API, dashboard. Only operators should reach it."""

    listen: str = "127.0.0.1:8081"
    hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "[::1]")
    """Allowed values of the `Host` header beside the address of `listen`; "*" allows all."""
    audit_days: Annotated[int, Meta(ge=1, le=36_500)] = 400
    """How long the audit log keeps a change."""
    trusted_header: str = ""
    """The header in which a proxy names the administrator that it has authenticated; "" trusts
    none."""
    trusted_proxies: tuple[str, ...] = ()
    """Networks of such proxies, as they connect."""
    trusted_scopes: tuple[Literal["erase", "money", "read", "tenants"], ...] = ("read",)
    """What their users may do."""


class ModelSettings(ReplicaSettings, frozen=True):
    """The model of a server with one model."""

    name: str = DEFAULT_MODEL
    """A built-in model, a GGUF file, a Hugging Face folder, or a pulled hub id."""
    aliases: tuple[str, ...] = ()
    """Further names that clients may request; "*": every name."""


class ServedModelSettings(ReplicaSettings, frozen=True):
    """One of several models, each in an engine of its own."""

    name: str
    """What clients send; prices, usage and metrics name the model so."""
    path: str = ""
    """As `model.name`; empty: `name`."""
    aliases: tuple[str, ...] = ()
    """Further names; "*": every name that no model has."""
    default: bool = False
    """The model that decides on readiness and that commands without a model's name use; the first
    one, if none is."""
    quota_scale: Annotated[float, Meta(gt=0, le=1_000)] = 1.0
    """Factor of tenants' floors, ceilings and promises, which are in blocks, in this model's
    pool."""
    tenants: tuple[str, ...] | None = None
    """Names of those that may use the model; without the key, all."""
    engine: dict[str, Any] = msgspec.field(default_factory=dict)
    """Settings of [engine] that differ for this model."""

    @property
    def open_to(self) -> frozenset[str] | None:
        """The names of the tenants that may use the model; None for all."""
        return None if self.tenants is None else frozenset(self.tenants)

    @property
    def source(self) -> str:
        """The model to serve, as `model.name` names one."""
        return self.path or self.name


class EmbeddingsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The model of `/v1/embeddings`, in a process of its own; an empty `model` turns it off."""

    model: str = ""
    """A built-in embedding model, or a folder."""
    aliases: tuple[str, ...] = ()
    """Further names that clients may request."""
    truncate: bool = True
    """Texts that are too long are cut, which a header tells; else refused."""
    threads: Annotated[int, Meta(ge=0, le=1_024)] = 0
    """Threads of the process; 0: half of the processors."""
    cache_mib: Annotated[int, Meta(ge=0, le=2**20)] = 64
    """Vectors that are kept, of each tenant; 0: no cache."""
    waiting_tokens_max: Annotated[int, Meta(ge=2_048, le=2**40)] = 1_000_000
    """Tokens of texts that wait; a tenant may hold half of what others leave."""


class LimitsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Limits of one request."""

    choices_max: Annotated[int, Meta(ge=1, le=128)] = 16
    output_tokens_default: PositiveInt = 4_096
    """Output tokens of a request without `max_tokens`, if the context has room."""
    requests_per_tenant_max: PositiveInt = 256
    """Concurrent requests of a tenant."""
    queue_timeout_s: Seconds = 120.0


class TenancyConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Tenants and their database."""

    database: str = "trunkline.db"
    """A file, relative to the data directory, or postgresql://USER@HOST/DATABASE, without a
    password."""
    tenants_as_labels_max: Annotated[int, Meta(ge=0, le=1_000)] = 100
    """Tenants with their own label in metrics; the rest share one label."""
    tenants_followed_max: Annotated[int, Meta(ge=1, le=100_000)] = 500
    """The most recently active tenants, whose prompts are sampled for advice and findings, at most
    5 MiB each."""
    shared_scopes: tuple[ScopeTerms, ...] | None = None
    """The declared shared scopes; a reload removes a scope that is no longer declared. Without the
    key, none is changed."""


class IdempotencyConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Stored responses of requests that have an `Idempotency-Key`."""

    keep_hours: Annotated[int, Meta(ge=0, le=744)] = 24
    """How long a response is kept: 24 or more; 0 stores none and refuses the header."""
    result_bytes_max: PositiveInt = 4 * 2**20
    """The size of one response as sent; of a larger one only the key is stored."""
    tenant_bytes_max: PositiveInt = 256 * 2**20
    """All stored responses of a tenant, compressed; a further one counts as too large."""
    keys_per_tenant_max: PositiveInt = 100_000
    """Stored keys of a tenant."""


class ResponsesConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Stored responses and conversations, which clients continue and read by id.

    A day by default: agents continue within minutes, and a server whose operator has not decided
    should not hold a month of its tenants' texts. `per_tenant_max`, `tenant_bytes_max`: of a
    tenant's responses and conversations; beyond them nothing more is stored.
    """

    keep_hours: Annotated[int, Meta(ge=0, le=8_784)] = 24
    """How long a response is kept after the latest one of its thread, and a conversation after its
    latest change; 0 stores none."""
    per_tenant_max: PositiveInt = 100_000
    tenant_bytes_max: PositiveInt = 256 * 2**20


class BillingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The user is the `user` or `metadata.user_id` that the client sends."""

    attribution: Literal["none", "user"] = "none"
    """"user" stores which end user each request names, for usage by user."""


class LogConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Failures and engine events are logged in any case."""

    requests: bool = True
    """Log one JSON line per request on standard error, never with prompts or keys."""


class TracingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """OpenTelemetry traces; an empty `endpoint` turns them off."""

    endpoint: str = ""
    """Base address of a collector that takes OTLP over HTTP."""
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Share of the traces that no client began."""


WebhookFormat = Literal["standard", "slack"]
WebhookEventType = Literal[
    "budget.threshold",
    "hit_ratio.fell",
    "promises.broken",
    "key.expires",
    "engine.restarted",
    "tenant.limited",
    "finding.new",
]


class WebhookConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """An address that events are sent to.

    `url`, or `url_file`: a file with the address, where it is a secret. `secret_file` or
    `secret_env`: a file or a variable with the secret that signs requests, `whsec_` and base64; not
    for `slack`.
    """

    name: str
    """Names it in the database and the log."""
    url: str = ""
    url_file: str = ""
    secret_file: str = ""
    secret_env: str = ""
    events: tuple[WebhookEventType, ...] = ()
    """Empty for all."""
    format: WebhookFormat = "standard"


class MetricsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Export of metrics by OpenTelemetry's protocol, beside `/metrics`; off without `endpoint`."""

    endpoint: str = ""
    """Base address of a collector that takes OTLP over HTTP."""
    interval_s: Annotated[float, Meta(ge=1, le=3_600)] = 30.0


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """All settings.

    Without the key, no tenant is changed; `tenants = []` declares none.
    """

    data_dir: str = str(DEFAULT_DATA_DIR)
    server: ServerConfig = ServerConfig()
    admin: AdminConfig = AdminConfig()
    model: ModelSettings = ModelSettings()
    models: tuple[ServedModelSettings, ...] = ()
    """Several models, in place of `model`."""
    templates: TemplatesConfig = TemplatesConfig()
    embeddings: EmbeddingsConfig = EmbeddingsConfig()
    limits: LimitsConfig = LimitsConfig()
    caching: CachingConfig = CachingConfig()
    tenancy: TenancyConfig = TenancyConfig()
    idempotency: IdempotencyConfig = IdempotencyConfig()
    responses: ResponsesConfig = ResponsesConfig()
    billing: BillingConfig = BillingConfig()
    log: LogConfig = LogConfig()
    tracing: TracingConfig = TracingConfig()
    metrics: MetricsConfig = MetricsConfig()
    engine: EngineConfig = EngineConfig()
    fleet: FleetConfig = FleetConfig()
    webhooks: tuple[WebhookConfig, ...] = ()
    tenants: tuple[DeclaredTenant, ...] | None = None
    """The declared tenants; a reload suspends a tenant no longer declared."""

    @property
    def data(self) -> Path:
        return Path(self.data_dir)

    @property
    def models_dir(self) -> Path:
        return self.data / "models"

    @property
    def fleet_folder(self) -> Path:
        """Return the folder of this gateway's certificate for engines elsewhere."""
        return Path(self.fleet.tls or self.data / "fleet" / f"gateway-{self.fleet.name}")

    def served_models(self) -> tuple[ServedModelSettings, ...]:
        """Return the models to serve, the default one first. A single model has no name here: its
        card names it."""
        if not self.models:
            one = self.model
            where = {name: getattr(one, name) for name in ReplicaSettings.__struct_fields__}
            return (ServedModelSettings("", one.name, one.aliases, **where),)
        default = next((one for one in self.models if one.default), self.models[0])
        return (default, *(one for one in self.models if one is not default))

    def engine_of(self, model: ServedModelSettings, what: str = "models") -> EngineConfig:
        """Return the settings of a model's engine. `what`: where the models stand. Raises
        ConfigError for an unknown setting or a wrong value in `model.engine`."""
        where = f"{what}: {model.name!r}: engine"
        check_names(model.engine, EngineConfig, where, "")
        try:
            tree = overlaid(msgspec.to_builtins(self.engine), model.engine)
            return msgspec.convert(tree, EngineConfig)
        except msgspec.ValidationError as error:
            message, _, path = str(error).partition(" - at `$.")
            raise ConfigError(f"{where}.{path.rstrip('`')}: {message}") from error

    def check_card(self, card: RateCard) -> None:
        """Check that a rate card can apply: its model and its retention classes exist.

        Raises BadPrice for an unknown class, and for a model's alias.
        """
        self.caching.check_card(card)
        aliases = [alias for one in self.served_models() for alias in one.aliases]
        if card.model != ANY and card.model in (*aliases, *self.embeddings.aliases):
            message = f"model: {card.model!r} is an alias; expected the model's own name"
            raise BadPrice("bad_rate_card", message)
