"""The gateway's settings: one strict TOML, every key with a default.

Flags win over environment, environment over the file, the file over defaults; `origin` remembers
which it was. An unknown key, a wrong type or an impossible value is an error that names the file,
the key, what came and what would be right. It knows no argparse and opens nothing but the file;
`gateway.__main__` calls it, everybody reads the values.
"""

from __future__ import annotations

import difflib
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin
from urllib.parse import urlsplit

import msgspec
from msgspec import Meta, Struct

from engine.config import EngineConfig
from engine.model_store import DEFAULT_MODEL
from gateway.retention_classes import CachingConfig
from tenancy.accounts.declared_keys import DeclaredKey
from tenancy.accounts.declared_tenants import DeclaredTenant, check_declared
from tenancy.accounts.shared_scopes import ScopeTerms, check_scopes
from tenancy.errors import BadName, BadPrice, StoreError
from tenancy.pricing.charges import RateCard
from tenancy.storage.backends import check_place

Seconds = Annotated[float, Meta(gt=0, le=86_400)]
Whole = Annotated[int, Meta(ge=1, le=2**40)]

DEFAULT_DATA_DIR = Path("data")
KEEP_HOURS_MIN = 24
ENVIRONMENT = {"TRUNKLINE_DATA_DIR": "data_dir", "TRUNKLINE_MODEL": "model.name"}


class ConfigError(Exception):
    """A setting that cannot be; the message says where, what came and what would be right."""


class ServerConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The public listener. `hosts`: what may stand in `Host`; "*" allows all names.

    `header_timeout_s`: for a request's head; `body_timeout_s`: for its body, which beyond that must
    keep `body_rate_min_bytes_per_s`; `write_timeout_s`: for a client to read what was written.
    """

    listen: str = "127.0.0.1:8080"
    hosts: tuple[str, ...] = ("localhost", "127.0.0.1", "[::1]")
    header_timeout_s: Seconds = 10.0
    body_timeout_s: Seconds = 30.0
    body_rate_min_bytes_per_s: Seconds = 1_000.0
    keep_alive_timeout_s: Seconds = 75.0
    write_timeout_s: Seconds = 20.0
    send_buffer_bytes: Whole = 65_536
    body_bytes_max: Whole = 10 * 2**20
    connections_max: Whole = 4_096
    connections_per_address_max: Annotated[int, Meta(ge=0)] = 512
    stream_keep_alive_s: Seconds = 15.0


class AdminConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """The admin listener: metrics. Keep it on an address that only operators reach."""

    listen: str = "127.0.0.1:8081"


class ModelSettings(Struct, frozen=True, forbid_unknown_fields=True):
    """`name`: a built-in model, a GGUF file, a Hugging Face folder, or a hub id that was pulled.

    `aliases`: further names that clients may ask for.
    """

    name: str = DEFAULT_MODEL
    aliases: tuple[str, ...] = ()


class LimitsConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """What one request may ask for. `output_tokens_default`: where it does not say, if the context
    leaves as many. `requests_per_tenant_max`: at once."""

    choices_max: Annotated[int, Meta(ge=1, le=128)] = 16
    output_tokens_default: Whole = 4_096
    requests_per_tenant_max: Whole = 256
    queue_timeout_s: Seconds = 120.0


class TenancyConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`database`: a file, relative to the data directory, or a server's database, as in
    postgresql://USER@HOST/DATABASE, without a password. `tenants_as_labels_max`: how many tenants
    appear by name in metrics; the rest are counted together. `tenants_followed_max`: those active
    last whose prompts are sampled for advice, at most 2 MiB each. `shared_scopes`: those that
    the file declares; one that it declares no longer is removed. A file without any says
    nothing."""

    database: str = "trunkline.db"
    tenants_as_labels_max: Annotated[int, Meta(ge=0, le=1_000)] = 20
    tenants_followed_max: Annotated[int, Meta(ge=1, le=100_000)] = 500
    shared_scopes: tuple[ScopeTerms, ...] | None = None


class IdempotencyConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """Answers to requests that clients name by `Idempotency-Key`. `keep_hours`: from 24 on; 0 keeps
    none, and refuses such names. `result_bytes_max`: of one answer as it is sent; of a larger one
    only the name is kept. `tenant_bytes_max`: of all that is kept for a tenant, compressed; what
    comes later is as if too large. `keys_per_tenant_max`: names at once."""

    keep_hours: Annotated[int, Meta(ge=0, le=744)] = 24
    result_bytes_max: Whole = 4 * 2**20
    tenant_bytes_max: Whole = 256 * 2**20
    keys_per_tenant_max: Whole = 100_000


class LogConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """`requests`: one JSON line for each on standard error; never prompts or keys. Failures and the
    engine's life are logged in any case."""

    requests: bool = True


class TracingConfig(Struct, frozen=True, forbid_unknown_fields=True):
    """OpenTelemetry traces, off while `endpoint` is empty: the base address of a collector that
    takes OTLP over HTTP. `sample_ratio`: of traces that no client began."""

    endpoint: str = ""
    sample_ratio: Annotated[float, Meta(ge=0, le=1)] = 1.0


class Config(Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that can be set. `tenants`: those that the file declares; one that it declares no
    longer is suspended. A file without any says nothing of any; `tenants = []` declares none."""

    data_dir: str = str(DEFAULT_DATA_DIR)
    server: ServerConfig = ServerConfig()
    admin: AdminConfig = AdminConfig()
    model: ModelSettings = ModelSettings()
    limits: LimitsConfig = LimitsConfig()
    caching: CachingConfig = CachingConfig()
    tenancy: TenancyConfig = TenancyConfig()
    idempotency: IdempotencyConfig = IdempotencyConfig()
    log: LogConfig = LogConfig()
    tracing: TracingConfig = TracingConfig()
    engine: EngineConfig = EngineConfig()
    tenants: tuple[DeclaredTenant, ...] | None = None

    @property
    def data(self) -> Path:
        return Path(self.data_dir)

    @property
    def models_dir(self) -> Path:
        return self.data / "models"

    def check_card(self, card: RateCard) -> None:
        """Raises BadPrice for a price that nobody would ever pay: of a class that there is not, or
        by a name under which the ledger knows no model."""
        self.caching.check_card(card)
        if card.model in self.model.aliases:
            message = f"model: {card.model!r} is an alias; prices are by the model's own name"
            raise BadPrice("bad_rate_card", message)


Origin = dict[str, str]
"""From a key's path ("server.listen") to where its value came from."""


def load_config(
    file: Path | None, environment: Mapping[str, str], flags: Mapping[str, object]
) -> tuple[Config, Origin]:
    """The effective settings. `flags`: by key path, those that were given. Raises ConfigError."""
    origin: Origin = {}
    tree: dict[str, Any] = {}
    if file is None and environment.get("TRUNKLINE_CONFIG"):
        file = Path(environment["TRUNKLINE_CONFIG"])
    if file is not None:
        tree = _read(file)
        _decode(tree, str(file))  # errors of the file are told of the file
        origin.update(dict.fromkeys(_paths(tree), str(file)))
    for name, path in ENVIRONMENT.items():
        if text := environment.get(name):
            _put(tree, path, text)
            origin[path] = f"environment ({name})"
    for path, flag in flags.items():
        _put(tree, path, flag)
        origin[path] = "command line"
    return _checked(_decode(tree, "the command line"), origin), origin


def effective(config: Config, origin: Origin) -> list[tuple[str, object, str]]:
    """(key path, value, where it came from) of every setting, in the order of the file."""
    tree = msgspec.to_builtins(config)
    return [(p, v, origin.get(p, "default")) for p, v in _paths(tree).items()]


def parse_address(text: str, what: str) -> tuple[str, int]:
    """host:port, the host in brackets if it is an IPv6 address. Raises ConfigError."""
    host, _, port = text.rpartition(":")
    is_number = port.isascii() and port.isdigit() and len(port) <= 5 and int(port) <= 65_535
    is_bare_ipv6 = ":" in host and not (host.startswith("[") and host.endswith("]"))
    if not host.strip("[]") or not is_number or is_bare_ipv6:
        raise ConfigError(
            f"{what}: {text!r} is no address; write HOST:PORT, as in 127.0.0.1:8080 or [::1]:8080"
        )
    return host.strip("[]"), int(port)


def _read(file: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(file.read_text())
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} is not TOML: {error}") from error


def _decode(tree: dict[str, Any], where: str) -> Config:
    _check_names(tree, Config, where, "")
    tenants = tree.get("tenants")
    for number, table in enumerate(tenants if isinstance(tenants, list) else ()):
        keys = table.get("keys") if isinstance(table, dict) else None
        _check_tables(keys, DeclaredKey, where, f"tenants[{number}].keys")
    _check_tables(tenants, DeclaredTenant, where, "tenants")
    tenancy = tree.get("tenancy")
    scopes = tenancy.get("shared_scopes") if isinstance(tenancy, dict) else None
    _check_tables(scopes, ScopeTerms, where, "tenancy.shared_scopes")
    try:
        return msgspec.convert(tree, Config)
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$.")
        key = path.rstrip("`")
        came = f" (it is {_get(tree, key)!r})" if "[" not in key else ""
        if options := _options(key):
            message = f"Expected one of {', '.join(map(repr, options))}"
        raise ConfigError(f"{where}: {key}: {message}{came}") from error


def _check_tables(tables: object, kind: Any, where: str, path: str) -> None:
    """Tables of a list, each told by its place: the same checks as everywhere."""
    for number, table in enumerate(tables if isinstance(tables, list) else ()):
        at = f"{path}[{number}]"
        if isinstance(table, dict):
            _check_names(table, kind, where, f"{at}.")
        try:
            msgspec.convert(table, kind)
        except msgspec.ValidationError as error:
            message, _, path = str(error).partition(" - at `$")
            raise ConfigError(f"{where}: {at}{path.rstrip('`')}: {message}") from error


def _options(path: str) -> tuple[object, ...]:
    """What a setting may be, if it is one of a few."""
    kind: Any = Config
    for name in path.split("."):
        fields = msgspec.structs.fields(kind) if isinstance(kind, type) else ()
        kind = {field.name: field.type for field in fields}.get(name)
    return get_args(kind) if get_origin(kind) is Literal else ()


def _check_names(tree: dict[str, Any], kind: Any, where: str, above: str) -> None:
    """An unknown key is most often a typo: say which key was meant."""
    known = {field.name: field for field in msgspec.structs.fields(kind)}
    for name, value in tree.items():
        if name not in known:
            close = difflib.get_close_matches(name, known, n=1)
            hint = f"did you mean {above}{close[0]}?" if close else f"there are {', '.join(known)}"
            raise ConfigError(f"{where}: {above}{name} is not a setting; {hint}")
        inner = known[name].type
        if isinstance(value, dict) and isinstance(inner, type) and issubclass(inner, Struct):
            _check_names(value, inner, where, f"{above}{name}.")


def _checked(config: Config, origin: Origin) -> Config:
    """What types alone cannot say."""

    def at(path: str) -> str:
        return f"{origin[path]}: {path}" if path in origin else path

    public = parse_address(config.server.listen, at("server.listen"))
    admin = parse_address(config.admin.listen, at("admin.listen"))
    if public == admin and public[1]:
        raise ConfigError(
            f"{at('admin.listen')}: {config.admin.listen} is the public listener's address; the"
            " admin listener needs one of its own"
        )
    for path, text in (
        ("data_dir", config.data_dir),
        ("model.name", config.model.name),
        ("tenancy.database", config.tenancy.database),
    ):
        if not text or "\x00" in text:
            raise ConfigError(f"{at(path)}: {text!r} is no name")
    try:
        check_place(config.tenancy.database)
    except StoreError as error:
        raise ConfigError(f"{at('tenancy.database')}: {error.message}") from error
    _check_endpoint(config.tracing.endpoint, at("tracing.endpoint"))
    try:
        check_declared(config.tenants or ())
        for tenant in config.tenants or ():
            config.caching.check_classes(tenant.classes or ())
    except BadName as error:
        raise ConfigError(f"{at('tenants')}: {error.message}") from error
    try:
        check_scopes(config.tenancy.shared_scopes or ())
    except BadName as error:
        raise ConfigError(f"{at('tenancy.shared_scopes')}: {error.message}") from error
    if 0 < (hours := config.idempotency.keep_hours) < KEEP_HOURS_MIN:
        raise ConfigError(
            f"{at('idempotency.keep_hours')}: answers are kept for {KEEP_HOURS_MIN} hours or more,"
            f" or not at all (0); it is {hours}"
        )
    engine = config.engine
    if engine.prefill_chunk_tokens_max > engine.step_tokens_max:
        raise ConfigError(
            f"{at('engine.prefill_chunk_tokens_max')} ({engine.prefill_chunk_tokens_max}) is above"
            f" engine.step_tokens_max ({engine.step_tokens_max}); a slice must fit a step"
        )
    return config


def _check_endpoint(text: str, what: str) -> None:
    """Empty, or where a collector is. What it asks for as proof is a secret and stands elsewhere:
    nothing here is hidden when settings are shown."""
    if not text:
        return
    try:
        url = urlsplit(text)
        is_place = url.scheme in ("http", "https") and bool(url.hostname) and url.port != 0
    except ValueError:  # a port that is no number, a broken IPv6 address
        is_place = False
    if set("@?#") & set(text):
        raise ConfigError(
            f"{what}: no user, password or query may stand in it; headers for the collector go"
            " into the environment, OTEL_EXPORTER_OTLP_HEADERS"
        )
    if not is_place:
        raise ConfigError(
            f"{what}: {text!r} is no address; write http://HOST:PORT, as in http://127.0.0.1:4318"
        )


def _paths(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found.update(_paths(value, f"{above}{name}."))
        else:
            found[f"{above}{name}"] = value
    return found


def _put(tree: dict[str, Any], path: str, value: object) -> None:
    *sections, name = path.split(".")
    for section in sections:
        tree = tree.setdefault(section, {})
    tree[name] = value


def _get(tree: Mapping[str, Any], path: str) -> object:
    value: Any = tree
    for name in path.split("."):
        value = value.get(name) if isinstance(value, Mapping) else None
    return value
