"""The gateway's configuration: one strict TOML file, every key with a default.

Flags override the environment, the environment overrides the file, the file overrides the defaults;
an `Origin` records the source of each value. An unknown key, a wrong type or an impossible value is
an error that names the file, the key, the value and what is expected. This module knows no argparse
and opens no file but the configuration. `gateway.__main__` loads it; all of the gateway reads its
values.
"""

from __future__ import annotations

import difflib
import ipaddress
import math
import re
import tomllib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from engine.config import EngineConfig, LevelsConfig
from engine.model_store import DEFAULT_MODEL
from engine.storage.remote.address import check_remote_url
from gateway.fleet_config import VARIABLES, FleetConfig, ReplicaSettings, find_problem
from gateway.retention_classes import CachingConfig
from gateway.template_date import TemplatesConfig
from gateway.web_addresses import is_origin, is_web_address
from tenancy.accounts.declared_keys import DeclaredKey
from tenancy.accounts.declared_tenants import DeclaredTenant, check_declared
from tenancy.accounts.keys import check_name
from tenancy.accounts.shared_scopes import ScopeTerms, check_scopes
from tenancy.errors import BadName, BadPrice, StoreError
from tenancy.pricing.charges import ANY, RateCard
from tenancy.storage.backends import check_place
from tenancy.types import ToleranceMode

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_HEADER = re.compile(r"[A-Za-z0-9-]{1,64}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_OTHER_HEADERS = ("authorization", "cookie", "host", "x-api-key", "x-goog-api-key")
"""Headers that clients set, so that they prove no user."""

Seconds = Annotated[float, Meta(gt=0, le=86_400)]
PositiveInt = Annotated[int, Meta(ge=1, le=2**40)]

ANY_NAME = "*"
"""The alias of the model that takes every name which no model has."""
DEFAULT_DATA_DIR = Path("data")
KEEP_HOURS_MIN = 24
"""Fewest hours for which stored responses are kept, if they are kept."""
BODIES_IN_FLIGHT_MIN = 8
"""Largest bodies for which there must be room: a tenant's quarter holds one, compressed and not."""
ENVIRONMENT = {"TRUNKLINE_DATA_DIR": "data_dir", "TRUNKLINE_MODEL": "model.name"} | VARIABLES
"""Environment variables and the key paths that they set."""


class ConfigError(Exception):
    """A setting has a wrong value; the message names the setting, its value and what is
    expected."""


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
        _check_names(model.engine, EngineConfig, where, "")
        try:
            tree = _overlaid(msgspec.to_builtins(self.engine), model.engine)
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


Origin = dict[str, str]
"""Source of each value by key path, such as "server.listen"."""


def load_config(
    file: Path | None, environment: Mapping[str, str], flags: Mapping[str, object]
) -> tuple[Config, Origin]:
    """Return the effective settings and the source of each. `file`: `find_config_file` finds it.
    `flags`: given ones, by key path.

    Raises ConfigError.
    """
    origin: Origin = {}
    tree: dict[str, Any] = {}
    if file is not None:
        tree = _read(file)
        _decode(tree, str(file))  # here, so that errors name the file
        origin.update(dict.fromkeys(_paths(tree), str(file)))
    for name, path in ENVIRONMENT.items():
        if text := environment.get(name):
            _set_path(tree, path, text)
            origin[path] = f"environment ({name})"
    for path, flag in flags.items():
        _set_path(tree, path, flag)
        origin[path] = "command line"
    _choose_models(tree, origin)
    return _check_values(_decode(tree, "the command line"), origin), origin


def effective(config: Config, origin: Origin) -> list[tuple[str, object, str]]:
    """Return (key path, value, source) of every setting, in the order of the file."""
    tree = msgspec.to_builtins(config)
    return [(p, v, origin.get(p, "default")) for p, v in _paths(tree).items()]


def is_model_name(text: str) -> bool:
    """Return whether a text could be the name of a model."""
    return _MODEL_NAME.fullmatch(text) is not None


def parse_address(text: str, what: str) -> tuple[str, int]:
    """Return host and port of HOST:PORT, an IPv6 host in brackets. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    is_number = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65_535
    is_bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not host.strip("[]") or not is_number or is_bare_ipv6:
        raise ConfigError(
            f"{what}: invalid address {text!r}: expected HOST:PORT, such as 127.0.0.1:8080 or"
            " [::1]:8080"
        )
    return host.strip("[]"), int(port)


def _read(file: Path) -> dict[str, Any]:
    try:
        # Windows' editors begin a file with a byte order mark.
        return tomllib.loads(file.read_text("utf-8-sig"))
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not valid TOML: {error}") from error


def _decode(tree: dict[str, Any], where: str) -> Config:
    _check_names(tree, Config, where, "")
    tenants = tree.get("tenants")
    for number, table in enumerate(tenants if isinstance(tenants, list) else ()):
        keys = table.get("keys") if isinstance(table, dict) else None
        _check_tables(keys, DeclaredKey, where, f"tenants[{number}].keys")
    _check_tables(tenants, DeclaredTenant, where, "tenants")
    _check_tables(tree.get("webhooks"), WebhookConfig, where, "webhooks")
    _check_tables(tree.get("models"), ServedModelSettings, where, "models")
    tenancy = tree.get("tenancy")
    scopes = tenancy.get("shared_scopes") if isinstance(tenancy, dict) else None
    _check_tables(scopes, ScopeTerms, where, "tenancy.shared_scopes")
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        key = path.rstrip("`")
        value = f" (it is {_get_path(tree, key)!r})" if "[" not in key else ""
        raise ConfigError(f"{where}: {key}: {_explained(message, Config, key)}{value}") from error


def _choose_models(tree: dict[str, Any], origin: Origin) -> None:
    """Reduce [[models]] to the model that the command line names, if it names one: a table's name,
    or another model, which is then the only one. Raises ConfigError for both [model] and
    [[models]]."""
    tables = tree.get("models")
    if not tables or "model" not in tree:
        return
    if origin.get("model.name") != "command line" or len(tree["model"]) > 1:
        where = next((f"{origin[path]}: " for path in origin if path.startswith("model.")), "")
        raise ConfigError(f"{where}[model] and [[models]] are both set; expected one of them")
    name = tree["model"]["name"]
    named = [one for one in tables if isinstance(one, dict) and one.get("name") == name]
    del tree["models"]
    if named:
        del tree["model"]
        tree["models"] = named


def _overlaid(below: dict[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of `below` with those of `above` in their place, table by table."""
    found = dict(below)
    for name, value in above.items():
        inner = found.get(name)
        is_table = isinstance(inner, dict) and isinstance(value, Mapping)
        found[name] = _overlaid(inner, value) if is_table and inner is not None else value
    return found


def _check_models(config: Config, what: str) -> None:
    """Check the names of several models, and the settings of their engines. Raises ConfigError."""
    seen: dict[str, str] = {}
    for one in config.models:
        for name in dict.fromkeys((one.name, *one.aliases)):
            if not is_model_name(name) and (name == one.name or name != ANY_NAME):
                raise ConfigError(
                    f"{what}: invalid name {name[:80]!r}: expected up to 128 letters, digits and"
                    " . _ : / - , beginning with a letter or a digit"
                )
            if name in seen:
                raise ConfigError(
                    f"{what}: {name!r} names both {seen[name]!r} and {one.name!r}; expected each"
                    " name and alias once"
                )
        seen |= dict.fromkeys((one.name, *one.aliases), one.name)
        if "\x00" in one.path:
            raise ConfigError(f"{what}: {one.name}: path {one.path!r} contains NUL; expected none")
        for tenant in one.tenants or ():
            try:
                check_name(tenant, "tenant")
            except BadName as error:
                raise ConfigError(f"{what}: {one.name}: tenants: {error.message}") from error
        _check_engine(config.engine_of(one, what), partial(_setting_of, f"{what}: {one.name}"))
    defaults = [one.name for one in config.models if one.default]
    if len(defaults) > 1:
        raise ConfigError(f"{what}: {' and '.join(defaults)} have default = true; expected one")


def _setting_of(model: str, path: str) -> str:
    return f"{model}: {path}"


def _check_engine(engine: EngineConfig, at: Callable[[str], str]) -> None:
    """Check the settings of an engine. `at`: the place of a setting. Raises ConfigError."""
    if engine.prefill_chunk_tokens_max > engine.step_tokens_max:
        raise ConfigError(
            f"{at('engine.prefill_chunk_tokens_max')} ({engine.prefill_chunk_tokens_max}) exceeds"
            f" engine.step_tokens_max ({engine.step_tokens_max}); expected at most that many"
        )


def _check_tables(tables: object, kind: Any, where: str, path: str) -> None:
    """Check each table of a list; an error names its index."""
    for number, table in enumerate(tables if isinstance(tables, list) else ()):
        at = f"{path}[{number}]"
        if isinstance(table, dict):
            _check_names(table, kind, where, f"{at}.")
        try:
            msgspec.convert(table, kind)
        except msgspec.ValidationError as error:
            message, _, inner = str(error).partition(" - at `$")
            inner = inner.rstrip("`")
            raise ConfigError(
                f"{where}: {at}{inner}: {_explained(message, kind, inner)}"
            ) from error


def _explained(message: str, kind: Any, path: str) -> str:
    """Return a decoder's message, with the allowed values of a setting that is one of a few, or a
    number or one of a few. `path`: the setting's place in a value of `kind`."""
    for name in re.findall(r"[^.\[\]]+", path):
        if name.isdigit():  # an element of a list
            kind = next(iter(get_args(kind)), None)
            continue
        fields = msgspec.structs.fields(kind) if isinstance(kind, type) else ()
        kind = {field.name: field.type for field in fields}.get(name)
    if get_origin(kind) is Literal:
        return f"Expected one of {', '.join(map(repr, get_args(kind)))}"
    words = [
        one for part in get_args(kind) if get_origin(part) is Literal for one in get_args(part)
    ]
    if words and message.startswith(("Invalid enum value", "Expected `int | str`")):
        return f"Expected a whole number, or {' or '.join(map(repr, words))}"
    return message


def _check_names(tree: dict[str, Any], kind: Any, where: str, above: str) -> None:
    """Raise ConfigError for an unknown key, and suggest the key that was probably meant."""
    known = {field.name: field for field in msgspec.structs.fields(kind)}
    for name, value in tree.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = (
                f"did you mean {above}{close[0]}?"
                if close
                else f"expected one of {', '.join(known)}"
            )
            raise ConfigError(f"{where}: unknown setting {above}{name}; {hint}")
        inner = known[name].type
        if isinstance(value, dict) and isinstance(inner, type) and issubclass(inner, Struct):
            _check_names(value, inner, where, f"{above}{name}.")


def _check_values(config: Config, origin: Origin) -> Config:
    """Check what types cannot express. Raises ConfigError."""

    def at(path: str) -> str:
        return f"{origin[path]}: {path}" if path in origin else path

    public = parse_address(config.server.listen, at("server.listen"))
    admin = parse_address(config.admin.listen, at("admin.listen"))
    if public == admin and public[1]:
        raise ConfigError(
            f"{at('admin.listen')}: {config.admin.listen} is the address of the public listener;"
            " expected another address"
        )
    for path, text in (
        ("data_dir", config.data_dir),
        ("model.name", config.model.name),
        ("tenancy.database", config.tenancy.database),
    ):
        if not text or "\x00" in text:
            raise ConfigError(
                f"{at(path)}: invalid name {text!r}: expected a non-empty string without NUL"
            )
    if "\x00" in config.embeddings.model:
        raise ConfigError(
            f"{at('embeddings.model')}: invalid name {config.embeddings.model!r}: expected a string"
            " without NUL"
        )
    served = config.served_models()
    chat = {name for one in served for name in (one.name, one.source, *one.aliases)}
    if shared := (chat - {""}) & {config.embeddings.model, *config.embeddings.aliases}:
        raise ConfigError(
            f"{at('embeddings.model')}: {min(shared)!r} names the chat model too; expected another"
            " name"
        )
    try:
        check_place(config.tenancy.database)
    except StoreError as error:
        raise ConfigError(f"{at('tenancy.database')}: {error.message}") from error
    _check_endpoint(config.tracing.endpoint, at("tracing.endpoint"))
    _check_webhooks(config.webhooks, at("webhooks"))
    _check_endpoint(config.metrics.endpoint, at("metrics.endpoint"))
    _check_trusted(config.admin, at)
    try:
        check_declared(config.tenants or ())
        for tenant in config.tenants or ():
            config.caching.check_settings(tenant)
    except BadName as error:
        raise ConfigError(f"{at('tenants')}: {error.message}") from error
    try:
        check_scopes(config.tenancy.shared_scopes or ())
    except BadName as error:
        raise ConfigError(f"{at('tenancy.shared_scopes')}: {error.message}") from error
    if 0 < (hours := config.idempotency.keep_hours) < KEEP_HOURS_MIN:
        raise ConfigError(
            f"{at('idempotency.keep_hours')}: {hours} is not allowed; expected 0, or"
            f" {KEEP_HOURS_MIN} or more"
        )
    _check_server(config.server, at)
    _check_engine(config.engine, at)
    _check_levels(config.engine.levels, at)
    _check_models(config, at("models"))
    if problem := find_problem(config.fleet, served):
        raise ConfigError(f"{at('fleet' if 'fleet' in problem else 'models')}: {problem}")
    return config


def _check_server(server: ServerConfig, at: Callable[[str], str]) -> None:
    """Check the public listener's origins, and that its bodies fit in their memory."""
    for one in server.cors_origins:
        if one != "*" and not is_origin(one):
            raise ConfigError(
                f"{at('server.cors_origins')}: {one[:80]!r}; expected an origin as browsers"
                ' send it, such as https://app.example.com, or "*"'
            )
    if server.body_bytes_in_flight_max < BODIES_IN_FLIGHT_MIN * server.body_bytes_max:
        raise ConfigError(
            f"{at('server.body_bytes_in_flight_max')}: {server.body_bytes_in_flight_max} is too"
            f" small for server.body_bytes_max ({server.body_bytes_max}); expected at least"
            f" {BODIES_IN_FLIGHT_MIN * server.body_bytes_max}"
        )


def _check_levels(levels: LevelsConfig, at: Callable[[str], str]) -> None:
    """Check the levels below the device; what this machine can have is checked at the start."""
    if "\x00" in levels.dir:
        raise ConfigError(f"{at('engine.levels.dir')}: {levels.dir!r}; expected a path without NUL")
    for name in ("disk_gib", "disk_write_gib_per_day", "look_ms"):
        value = getattr(levels, name)
        if not math.isfinite(value):
            raise ConfigError(f"{at(f'engine.levels.{name}')}: {value}; expected a finite number")
    if levels.seal and bool(levels.key_file) == bool(levels.key_env):
        has = "neither" if not levels.key_file else "both"
        raise ConfigError(
            f"{at('engine.levels.seal')}: true with {has} of engine.levels.key_file and"
            " engine.levels.key_env; expected one of them"
        )
    if levels.key_env and not _VARIABLE.fullmatch(levels.key_env):
        raise ConfigError(
            f"{at('engine.levels.key_env')}: {levels.key_env[:80]!r}; expected the name of a"
            " variable of the environment"
        )
    _check_remote(levels, at)
    for name in ("key_file", "key_file_before"):
        if "\x00" in getattr(levels, name):
            raise ConfigError(f"{at(f'engine.levels.{name}')}: expected a path without NUL")


def _check_remote(levels: LevelsConfig, at: Callable[[str], str]) -> None:
    """Check the remote store: its address, and that it gets sealed copies of a disk."""
    remote = levels.remote
    for name in ("gib", "timeout_ms"):
        if not math.isfinite(value := getattr(remote, name)):
            key = at(f"engine.levels.remote.{name}")
            raise ConfigError(f"{key}: {value}; expected a finite number")
    if not remote.url:
        return
    if problem := check_remote_url(remote.url):
        raise ConfigError(f"{at('engine.levels.remote.url')}: {problem}")
    for name, value in (("seal", levels.seal), ("disk_gib", levels.disk_gib)):
        if not value:
            raise ConfigError(
                f"{at('engine.levels.remote.url')}: set without engine.levels.{name}; a remote"
                " store has sealed copies that come from the disk, where its index is"
            )


def check_web_address(text: str, what: str) -> None:
    """Check an address of a webhook, without quoting it: it may be a secret. Raises ConfigError."""
    if not is_web_address(text) or "@" in urlsplit(text).netloc:
        raise ConfigError(f"{what}: not an address; expected https://HOST/PATH without a password")


def _check_webhooks(webhooks: tuple[WebhookConfig, ...], what: str) -> None:
    names = [one.name for one in webhooks]
    for one in webhooks:
        if not _WEBHOOK_NAME.fullmatch(one.name) or names.count(one.name) > 1:
            raise ConfigError(
                f"{what}: invalid name {one.name[:80]!r}: expected up to 64 letters, digits, dots"
                " and hyphens, each name once"
            )
        if bool(one.url) == bool(one.url_file):
            raise ConfigError(f"{what}: {one.name}: expected either url or url_file")
        if one.url:
            check_web_address(one.url, f"{what}: {one.name}: url")
        if (one.format == "standard") != (bool(one.secret_file) != bool(one.secret_env)):
            raise ConfigError(
                f"{what}: {one.name}: expected either secret_file or secret_env for the format"
                " 'standard', and neither for 'slack'"
            )


_WEBHOOK_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]{0,63}")


def _check_trusted(admin: AdminConfig, at: Callable[[str], str]) -> None:
    """Check the header and the proxies that sign in administrators. `at`: where a setting stands.

    A network of all addresses would let every client name itself an administrator.
    """
    if not admin.trusted_header:
        return
    is_name = _HEADER.fullmatch(admin.trusted_header) is not None
    if not is_name or admin.trusted_header.lower() in _OTHER_HEADERS:
        raise ConfigError(
            f"{at('admin.trusted_header')}: invalid header {admin.trusted_header!r}: expected a"
            " header that the proxy alone sets, such as X-Forwarded-User"
        )
    if not admin.trusted_proxies:
        raise ConfigError(
            f"{at('admin.trusted_header')}: {admin.trusted_header} is trusted from no address;"
            " expected the proxy's address in admin.trusted_proxies"
        )
    for text in admin.trusted_proxies:
        try:
            network = ipaddress.ip_network(text)
        except ValueError:
            network = None
        if network is None or network.prefixlen == 0:
            raise ConfigError(
                f"{at('admin.trusted_proxies')}: invalid network {text!r}: expected the proxy's own"
                " address, such as 10.0.0.7/32"
            )


def _check_endpoint(text: str, what: str) -> None:
    """Check that a collector's endpoint is empty or an HTTP address without credentials.

    Settings are shown as they are, so secrets for the collector belong in the environment.
    """
    if not text:
        return
    if set("@?#") & set(text):
        raise ConfigError(
            f"{what}: a user, password or query is not allowed; set headers of the collector in"
            " the environment variable OTEL_EXPORTER_OTLP_HEADERS"
        )
    if not is_web_address(text):
        raise ConfigError(
            f"{what}: invalid address {text!r}: expected http://HOST:PORT, such as"
            " http://127.0.0.1:4318"
        )


def _paths(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found.update(_paths(value, f"{above}{name}."))
        else:
            found[f"{above}{name}"] = value
    return found


def _set_path(tree: dict[str, Any], path: str, value: object) -> None:
    *sections, name = path.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[name] = value


def _get_path(tree: Mapping[str, Any], path: str) -> object:
    value: Any = tree
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
