"""What the types of settings cannot say: names, addresses, and keys that belong together."""

from __future__ import annotations

import ipaddress
import math
import re
from collections.abc import Callable
from functools import partial
from urllib.parse import urlsplit

from engine.config import EngineConfig, LevelsConfig
from engine.storage.remote.address import check_remote_url
from gateway.config.decoding import ConfigError
from gateway.config.fleet import find_problem
from gateway.config.tables import AdminConfig, Config, ServerConfig, WebhookConfig
from gateway.config.web_addresses import is_origin, is_web_address
from tenancy.accounts.declared_tenants import check_declared
from tenancy.accounts.keys import check_name
from tenancy.accounts.shared_scopes import check_scopes
from tenancy.errors import BadName, StoreError
from tenancy.storage.backends import check_place

_MODEL_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:/-]{0,127}")
_HEADER = re.compile(r"[A-Za-z0-9-]{1,64}")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,127}")
_OTHER_HEADERS = ("authorization", "cookie", "host", "x-api-key", "x-goog-api-key")
"""Headers that clients set, so that they prove no user."""
ANY_NAME = "*"
"""The alias of the model that takes every name which no model has."""
KEEP_HOURS_MIN = 24
"""Fewest hours for which stored responses are kept, if they are kept."""
BODIES_IN_FLIGHT_MIN = 8
"""Largest bodies for which there must be room: a tenant's quarter holds one, compressed and not."""
Origin = dict[str, str]
"""Source of each value by key path, such as "server.listen"."""


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


def check_values(config: Config, origin: Origin) -> Config:
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
        if remote.shared:
            raise ConfigError(
                f"{at('engine.levels.remote.shared')}: true without engine.levels.remote.url;"
                " expected the address that all replicas of the model have"
            )
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
